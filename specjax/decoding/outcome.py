"""What a round reads, carries, emits and reports.

Axes: B rows, G longest block, V vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.decoding.history import History
from specjax.platforms import entry, row
from specjax.types import Acceptance, Array, Cache, DraftBlock, Params, Rule
from specjax.verification import block_acceptance_probs, token_acceptance_probs


class RoundParams(NamedTuple):
    """What a round reads besides its state.

    Attributes:
      verifier: the verifier's parameters.
      drafter: the drafter's; a neural drafter's are `drafting.NeuralDrafterParams`.
      rule: the rule, its strengths scalar or `[B]`.
    """

    verifier: Params
    drafter: Params
    rule: Rule


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
      token_sum: `[B]` float32, sum_i prod_{j <= i} min(1, pi_j / q_j) on this draft.
      block_sum: `[B]` float32, sum_i P_i on the same draft; never less.
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
    """

    tokens: Array  # [B, G + 1]
    counts: Array  # [B]
    probs: Array  # [B, G + 1, V]
    confidences: Array | None = None  # [B, G + 1, V]


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


def report(
    block: DraftBlock,
    p: Array,
    acceptance: Acceptance,
    outcome: RoundOutcome,
    next_target: Array,
    bonus_nan: Array,
) -> RoundInfo:
    """What happened, but for the passes.

    Args:
      block: what was drafted.
      p: `[B, G + 1, V]`, the verifier's distributions.
      acceptance: how the block was judged.
      outcome: what is emitted.
      next_target: `[B, V]`, the target distribution of the last emitted token.
      bonus_nan: `[B]` bool, whether the drafter gave NaN at the bonus position.

    A NaN anywhere in a block ends the row, even where the row might not have come there: to drop
    the tokens before it for their values would be biased.
    """
    accepted = outcome.counts - 1
    last = jnp.take_along_axis(outcome.tokens, accepted[:, None], axis=1)[:, 0]
    last_p = jax.vmap(row)(p, accepted)
    log_p = _emitted_logs(p, block.tokens, last_p, last, accepted)
    log_target = _emitted_logs(outcome.probs, block.tokens, next_target, last, accepted)
    position = jnp.arange(p.shape[1])[None]
    # Any NaN among the logits makes all probabilities NaN.
    bad = (
        jnp.isnan(p[..., 0]) & (position <= block.num_drafted[:, None]),
        jnp.isnan(block.probs[..., 0]) & (position < block.num_drafted[:, None]),
        jnp.isnan(log_target) & (position < outcome.counts[:, None]),
    )
    in_verifier, in_drafter, in_rule = (x.any(axis=1) for x in bad)
    in_drafter |= bonus_nan
    nan_in = jnp.where(in_verifier, 0, jnp.where(in_drafter, 1, jnp.where(in_rule, 2, -1)))
    return RoundInfo(
        drafted=block.num_drafted,
        accepted=accepted,
        calls={},
        row_calls={},
        token_sum=_sum_of_products(block, acceptance.targets),
        block_sum=jax.vmap(block_acceptance_probs)(
            block.tokens, block.probs, acceptance.targets, block.num_drafted
        ).sum(axis=1),
        log_p=log_p,
        log_target=log_target,
        nan_in=nan_in,
    )


def count_calls(
    info: RoundInfo, calls: dict[str, Array], bonus: dict[str, Array], took: Array
) -> RoundInfo:
    """Notes the passes: `calls`, and those at the bonus position, which rows `took [B]`."""
    return info._replace(
        calls={name: calls[name] + bonus.get(name, 0) for name in calls},
        row_calls={name: calls[name] + jnp.where(took, bonus.get(name, 0), 0) for name in calls},
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


def _sum_of_products(block: DraftBlock, targets: Array) -> Array:
    ratios = jax.vmap(token_acceptance_probs)(block.tokens, block.probs, targets, block.num_drafted)
    return jnp.cumprod(ratios, axis=1).sum(axis=1)
