"""What a round carries, aims at, emits and reports.

Axes: B rows, G longest block, N positions, V vocabulary, D width.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decoding.history import History
from specjax.decoding.tree import Judgement
from specjax.platforms import entry, row
from specjax.rules import Budgeted
from specjax.types import Array, Cache, DraftBlock, Rule
from specjax.verification import block_acceptance_probs, token_acceptance_probs


class RoundState(NamedTuple):
    """What one round leaves to the next, per row.

    Attributes:
      tokens: `[B]` int32, the last committed token; not in the verifier's cache yet.
      positions: `[B]` int32, where it belongs there.
      cache: the verifier's.
      drafter: the drafter's state.
      carry: the verification's carry.
      credit: `[B]` float32, the nats that `rules.Budgeted` has left unspent; 0 under other rules.
      history: of a nested round, what of the rows the verifier has read; else None.
    """

    tokens: Array  # [B]
    positions: Array  # [B]
    cache: Cache
    drafter: Any
    carry: Any
    credit: Array  # [B]
    history: History | None = None


class RoundInfo(NamedTuple):
    """What happened in one round, per row.

    Attributes:
      drafted: `[B]` int32.
      accepted: `[B]` int32.
      calls: model's name -> int32 scalar, its passes; each serves the whole batch.
      row_calls: model's name -> `[B]` int32, the same without the drafter's passes that only other
        rows' whole blocks took.
      token_sum: `[B]` float32, sum_i prod_{j <= i} min(1, pi_j / q_j) on this draft; of a tree, how
        many tokens stand.
      block_sum: `[B]` float32, sum_i P_i on the same draft, never less; of a tree the same.
      log_p: `[B, G + 1]` float32, natural logarithms of the emitted tokens' p (-inf possible).
      log_target: `[B, G + 1]` float32, of their pi.
      nan_in: `[B]` int32, the index into `Round.nan_sources` of what gave NaN; -1 for nothing.
    """

    drafted: Array  # [B]
    accepted: Array  # [B]
    calls: dict[str, Array]
    row_calls: dict[str, Array]  # [B]
    token_sum: Array  # [B]
    block_sum: Array  # [B]
    log_p: Array  # [B, G + 1]
    log_target: Array  # [B, G + 1]
    nan_in: Array  # [B]


class RoundOutcome(NamedTuple):
    """What a round emits.

    Attributes:
      tokens: `[B, G + 1]` int32: the accepted tokens, then one more; the rest is padding.
      counts: `[B]` int32, how many of them are real (at least 1).
      probs: `[B, G + 1, V]` float32, the target distribution that each of them follows, where
        verification leaves no carry. So a block that a round has emitted can be the draft of a
        round above, with `probs` as its q.
      confidences: `[B, G + 1, V]` float32, the verifier's confidences there, or None unless the
        rule reads them or the caller asks for them.
      hidden: `[B, G + 1, D]`, the verifier's hidden states there, or None unless the drafter reads
        them.
    """

    tokens: Array  # [B, G + 1]
    counts: Array  # [B]
    probs: Array  # [B, G + 1, V]
    confidences: Array | None = None  # [B, G + 1, V]
    hidden: Array | None = None  # [B, G + 1, D]


class RoundMark(NamedTuple):
    """A place to which a nested round may be moved back.

    Attributes:
      tokens: `[B]` int32, the last token committed there.
      positions: `[B]` int32, where it belongs.
      drafter: the drafter's mark.
    """

    tokens: Array  # [B]
    positions: Array  # [B]
    drafter: Any


class AfterBlock(NamedTuple):
    """What is aimed at after whole blocks, and what it took to know that.

    Attributes:
      target: `[B, V]`, the target distribution at the bonus position.
      credit: `[B]` float32, what a budget has left after it.
      drafter: the drafter's state.
      calls: model's name -> int32 scalar, its passes.
      nan: `[B]` bool, where the drafter gave NaN.
      took: `[B]` bool, the rows that needed the passes.
    """

    target: Array  # [B, V]
    credit: Array  # [B]
    drafter: Any
    calls: dict[str, Array]
    nan: Array  # [B]
    took: Array  # [B]


def nan_in_passes(block: DraftBlock, p: Array) -> tuple[Array, Array]:
    """Whether the verifier, of `p [B, G + 1, V]`, and the drafter gave NaN; both `[B]` bool.

    A NaN anywhere in a block ends the row, even where the row might not have come there: to drop
    the tokens before it for their values would be biased.
    """
    position = jnp.arange(p.shape[1])[None]
    # Any NaN among the logits makes all probabilities NaN.
    in_verifier = jnp.isnan(p[..., 0]) & (position <= block.num_drafted[:, None])
    in_drafter = jnp.isnan(block.probs[..., 0]) & (position < block.num_drafted[:, None])
    return in_verifier.any(axis=1), in_drafter.any(axis=1)


def report(
    block: DraftBlock,
    p: Array,
    judged: Judgement,
    outcome: RoundOutcome,
    last_target: Array,
    after: AfterBlock,
    nan: tuple[Array, Array],
    calls: dict[str, Array],
) -> RoundInfo:
    """What happened.

    Args:
      block: what was drafted; of a tree, the accepted path.
      p: `[B, G + 1, V]`, the verifier's distributions there.
      judged: how the block was judged.
      outcome: what is emitted.
      last_target: `[B, V]`, the target distribution of the last emitted token.
      after: what is aimed at after whole blocks.
      nan: `[B]` bool, whether the verifier and the drafter gave NaN.
      calls: model's name -> int32 scalar, its passes but those after the block.
    """
    accepted = judged.accepted
    last = jnp.take_along_axis(outcome.tokens, accepted[:, None], axis=1)[:, 0]
    last_p = jax.vmap(row)(p, accepted)
    log_p = _emitted_logs(p, block.tokens, last_p, last, accepted)
    log_target = _emitted_logs(outcome.probs, block.tokens, last_target, last, accepted)
    position = jnp.arange(p.shape[1])[None]
    in_rule = (jnp.isnan(log_target) & (position < outcome.counts[:, None])).any(axis=1)
    nan_in = jnp.where(nan[0], 0, jnp.where(nan[1] | after.nan, 1, jnp.where(in_rule, 2, -1)))
    token_sum = block_sum = accepted.astype(jnp.float32)
    if judged.acceptance is not None:
        drafted = block.tokens, block.probs, judged.acceptance.targets, block.num_drafted
        chances = jax.vmap(token_acceptance_probs)(*drafted)
        token_sum = jnp.cumprod(chances, axis=1).sum(axis=1)
        block_sum = jax.vmap(block_acceptance_probs)(*drafted).sum(axis=1)
    return RoundInfo(
        drafted=block.num_drafted,
        accepted=accepted,
        calls={name: calls[name] + after.calls.get(name, 0) for name in calls},
        row_calls={
            name: calls[name] + jnp.where(after.took, after.calls.get(name, 0), 0) for name in calls
        },
        token_sum=token_sum,
        block_sum=block_sum,
        log_p=log_p,
        log_target=log_target,
        nan_in=nan_in,
    )


def emitted(tokens: Array, accepted: Array, next_token: Array) -> Array:
    """The accepted tokens of `tokens [B, G]`, then the next one; `[B, G + 1]`."""
    index = jnp.arange(tokens.shape[1] + 1)[None]
    padded = jnp.pad(tokens, ((0, 0), (0, 1)))
    return jnp.where(index == accepted[:, None], next_token[:, None], padded)


def _emitted_logs(
    probs: Array, drafted: Array, last_probs: Array, last: Array, accepted: Array
) -> Array:
    """Logarithms `[B, G + 1]` of probabilities `[B, G + 1, V]` of the emitted tokens.

    The drafted ones are looked up together with what verification looks up, the last one (of
    `last_probs [B, V]`) by itself: one pass over all that is drafted, not two.
    """
    chances = jax.vmap(jax.vmap(entry))(probs, jnp.pad(drafted, ((0, 0), (0, 1))))
    at_last = jnp.arange(probs.shape[1])[None] == accepted[:, None]
    return jnp.log(jnp.where(at_last, jax.vmap(entry)(last_probs, last)[:, None], chances))


def block_targets(rule: Rule, credit: Array, *distributions: Array | None) -> tuple[Array, Array]:
    """The targets at successive positions.

    Args:
      rule: the rule, its strengths `[B]`.
      credit: `[B]` float32, what its budget has left before the first position.
      *distributions: q, p, q_conf and p_conf, `[B, N, V]` float32; None where they are not read.

    Returns:
      pi `[B, N, V]`, and the credit after 0 .. N positions `[B, N + 1]`. Both depend at a position
      on what stands before it alone, so that a drafted token never decides about itself.
    """

    def row(rule: Rule, credit: Array, *at: Any) -> tuple[Array, Array]:
        if not isinstance(rule, Budgeted):
            return jax.vmap(rule)(*at), jnp.broadcast_to(credit, (at[0].shape[0] + 1,))

        def spend(credit: Array, one: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
            held, left = rule.spend(*one, credit)
            return left, (held, left)

        wanted = jax.vmap(rule.rule)(*at)
        _, (held, left) = lax.scan(spend, credit, (wanted, at[1]))
        return held, jnp.concatenate([credit[None], left])

    return jax.vmap(row)(rule, credit, *distributions)


def next_target(rule: Rule, credit: Array, *distributions: Array | None) -> tuple[Array, Array]:
    """`block_targets` at one position: `[B, V]` to `[B, V]`, and the credit after it `[B]`."""
    one = (None if x is None else x[:, None] for x in distributions)
    targets, credits = block_targets(rule, credit, *one)
    return targets[:, 0], credits[:, 1]
