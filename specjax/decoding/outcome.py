"""The state, target, output and statistics of a round.

Axes: B rows, G longest block, N = G + 1 nodes, V vocabulary, D width.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from specjax.decoding.history import History
from specjax.decoding.tree import Judgement
from specjax.platforms import entry
from specjax.processing import Logs
from specjax.rules import Budgeted
from specjax.types import Cache, DraftBlock, Rule
from specjax.verification import block_acceptance_probs, token_acceptance_probs

# The verifier's own tokens: after a rejection, after a whole block, after no draft. The codes of
# the drafter's parts follow.
OWN = ("residual", "bonus", "verifier")
_RESIDUAL, _BONUS, _NO_DRAFT = range(len(OWN))


class RoundState(NamedTuple):
    """The state of a row between two rounds.

    Attributes:
      tokens: the last committed token, which is not in the verifier's cache yet.
      positions: its position there.
      cache: the verifier's.
      drafter: the drafter's state.
      carry: the verification's carry.
      credit: the unspent nats of `rules.Budgeted`; 0 under other rules.
      history: in a nested round, the tokens that the verifier has read; else None.
    """

    tokens: Int32[Array, " B"]
    positions: Int32[Array, " B"]
    cache: Cache
    drafter: Any
    carry: Any
    credit: Float32[Array, " B"]
    history: History | None = None

    @property
    def cached(self) -> Array:
        read = self.positions if self.history is None else self.history.read
        return jnp.minimum(self.positions, read)


class RoundInfo(NamedTuple):
    """Statistics of one round, per row.

    Attributes:
      drafted: the number of drafted tokens; of a tree, the accepted tokens, and one more if the
        path ended by a rejection.
      accepted: the number of accepted tokens.
      calls: model's name -> int32 scalar, its passes; each serves the whole batch.
      row_calls: model's name -> `[B]` int32, the same without drafter passes that only the whole
        blocks of other rows needed.
      token_sum: sum_i prod_{j <= i} min(1, pi_j / q_j) on this draft; of a tree, the number of
        accepted tokens.
      block_sum: sum_i P_i on the same draft, never smaller; of a tree the same as `token_sum`.
      logs: of the emitted tokens, `[B, G + 1]`, under the verifier.
      log_target: natural logarithms of their pi.
      nan_in: the index into `Round.nan_sources` of the source of NaN; -1 for none.
      nodes: see `node_counts`; None of chains.
    """

    drafted: Int32[Array, " B"]
    accepted: Int32[Array, " B"]
    calls: dict[str, Array]
    row_calls: dict[str, Array]
    token_sum: Float32[Array, " B"]
    block_sum: Float32[Array, " B"]
    logs: Logs
    log_target: Float32[Array, "B N"]
    nan_in: Int32[Array, " B"]
    nodes: Int32[Array, "B 2 G"] | None = None


class RoundOutcome(NamedTuple):
    """The output of a round.

    Attributes:
      tokens: the accepted tokens, then the next token; the rest is padding.
      counts: the number of real tokens (at least 1).
      probs: the target distribution of each token, if verification leaves no carry. So the block of
        a round can be the draft of a round above, with `probs` as its q.
      confidences: the verifier's confidences there, or None unless the rule or the caller needs
        them.
      hidden: the verifier's hidden states there, or None unless the drafter reads them.
      sources: where the tokens came from (see `token_sources`), or None unless they are requested.
    """

    tokens: Int32[Array, "B N"]
    counts: Int32[Array, " B"]
    probs: Float32[Array, "B N V"]
    confidences: Float32[Array, "B N V"] | None = None
    hidden: Float[Array, "B N D"] | None = None
    sources: Int32[Array, "B N"] | None = None


class RoundMark(NamedTuple):
    """A place to which a nested round can go back.

    Attributes:
      tokens: the last token committed there.
      positions: its position.
      drafter: the drafter's mark.
    """

    tokens: Int32[Array, " B"]
    positions: Int32[Array, " B"]
    drafter: Any


class AfterBlock(NamedTuple):
    """The target after whole blocks, and the cost of knowing it.

    Attributes:
      target: the target at the bonus position.
      credit: the rest of the budget after it.
      drafter: the drafter's state.
      calls: model's name -> int32 scalar, its passes.
      nan: whether the drafter gave NaN.
      took: the rows that needed the passes.
    """

    target: Float32[Array, "B V"]
    credit: Float32[Array, " B"]
    drafter: Any
    calls: dict[str, Array]
    nan: Bool[Array, " B"]
    took: Bool[Array, " B"]


def nan_in_passes(block: DraftBlock, p: Array) -> tuple[Array, Array]:
    """Whether the verifier, of `p [B, G + 1, V]`, and the drafter gave NaN; both `[B]` bool.

    A NaN anywhere in a block ends the row, even if the row might not have reached it: a choice that
    depends on earlier tokens would be biased.
    """
    position = jnp.arange(p.shape[1])[None]
    # Any NaN among the logits makes all probabilities NaN.
    in_verifier = jnp.isnan(p[..., 0]) & (position <= block.num_drafted[:, None])
    if block.probs is None:
        return in_verifier.any(axis=1), jnp.zeros(p.shape[:1], bool)
    in_drafter = jnp.isnan(block.probs[..., 0])
    if block.drawn_from is None:  # else rows without a draw are 0
        in_drafter &= position < block.num_drafted[:, None]
    return in_verifier.any(axis=1), in_drafter.any(axis=1)


def report(
    block: DraftBlock,
    logs: Logs,
    judged: Judgement,
    outcome: RoundOutcome,
    last_target: Float32[Array, "B V"],
    after: AfterBlock,
    nan: tuple[Array, Array],
    calls: dict[str, Array],
) -> RoundInfo:
    """The statistics of a round.

    Args:
      block: the draft; of a tree, the accepted path.
      logs: see `RoundInfo`.
      judged: the result of verification.
      outcome: the output of the round.
      last_target: the target distribution of the last emitted token.
      after: the target after whole blocks.
      nan: whether the verifier and the drafter gave NaN.
      calls: each model's passes, without those after the block.
    """
    accepted = judged.accepted
    last = jnp.take_along_axis(outcome.tokens, accepted[:, None], axis=1)[:, 0]
    counted = jnp.arange(outcome.tokens.shape[1])[None] < outcome.counts[:, None]
    log_target = _emitted_logs(outcome.probs, block.tokens, last_target, last, accepted)
    in_rule = (jnp.isnan(log_target) & counted).any(axis=1)
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
        logs=logs,
        log_target=log_target,
        nan_in=nan_in,
    )


def emitted(tokens: Array, accepted: Array, next_token: Array) -> Array:
    """The accepted tokens of `tokens [B, G]`, then the next one; `[B, G + 1]`."""
    index = jnp.arange(tokens.shape[1] + 1)[None]
    padded = jnp.pad(tokens, ((0, 0), (0, 1)))
    return jnp.where(index == accepted[:, None], next_token[:, None], padded)


def last_token(tokens: Array, counts: Array, before: Array) -> Array:
    """The last of the first `counts [B]` of `tokens [B, T]`; `before [B]` if there is none."""
    place = jnp.maximum(counts - 1, 0)[:, None]
    return jnp.where(counts > 0, jnp.take_along_axis(tokens, place, axis=1)[:, 0], before)


def _emitted_logs(
    probs: Array, drafted: Array, last_probs: Array, last: Array, accepted: Array
) -> Array:
    """Logarithms `[B, G + 1]` of probabilities `[B, G + 1, V]` of the emitted tokens."""
    chances = jax.vmap(jax.vmap(entry))(probs, jnp.pad(drafted, ((0, 0), (0, 1))))
    at_last = jnp.arange(probs.shape[1])[None] == accepted[:, None]
    return jnp.log(jnp.where(at_last, jax.vmap(entry)(last_probs, last)[:, None], chances))


def block_targets(
    rule: Rule, credit: Float32[Array, " B"], *distributions: Array | None
) -> tuple[Array, Array]:
    """The targets at successive positions, from q, p, q_conf and p_conf there.

    Args:
      rule: the rule, its strengths `[B]`.
      credit: the rest of its budget before the first position.
      *distributions: `[B, N, V]`; None if they are not read.

    Returns:
      pi `[B, N, V]`, and the credit after 0 .. N positions `[B, N + 1]`. Both depend only on
      earlier positions, so that a drafted token never decides about itself.
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
    """`block_targets` at a single position: `[B, V]` to `[B, V]`, and the credit after it `[B]`."""
    one = (None if x is None else x[:, None] for x in distributions)
    targets, credits = block_targets(rule, credit, *one)
    return targets[:, 0], credits[:, 1]


def drafted_sources(block: DraftBlock) -> Int32[Array, "B G"]:
    """The part of the drafter that each token came from."""
    return jnp.zeros_like(block.tokens) if block.sources is None else block.sources


def round_sources(block: DraftBlock, accepted: Array) -> Int32[Array, "B N"]:
    """The sources of a round's tokens, of which `accepted [B]` were drafted."""
    whole = jnp.where(block.num_drafted == 0, _NO_DRAFT, _BONUS)
    last = jnp.where(accepted < block.num_drafted, _RESIDUAL, whole)
    return emitted(drafted_sources(block) + len(OWN), accepted, last)


def inner_sources(sources: Array) -> Array:
    """The sources of an inner round: 0 for its verifier's own tokens, then the drafter's parts."""
    return jnp.maximum(sources - (len(OWN) - 1), 0)
