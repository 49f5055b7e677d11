"""One round: draft, extend, rule, verify.

Axes: B rows, G longest block, V vocabulary.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.base import Array, Cache, DraftBlock, LanguageModel, Params
from specjax.drafting import Drafter
from specjax.rules import Rule
from specjax.sampling import Sampling, confidence, distribution
from specjax.verification import (
    Verification,
    accept,
    block_acceptance_probs,
    draw_next,
    token_acceptance_probs,
)


class RoundState(NamedTuple):
    """What one round leaves to the next, per row.

    Attributes:
      tokens: `[B]` int32, the last committed token; in no cache yet.
      positions: `[B]` int32, where it belongs in the verifier's cache.
      cache: the verifier's.
      drafter: the drafter's state.
      carry: the verification's carry.
    """

    tokens: Array  # [B]
    positions: Array  # [B]
    cache: Cache
    drafter: Any
    carry: Any


class RoundInfo(NamedTuple):
    """What happened in one round, per row.

    Attributes:
      drafted: `[B]` int32.
      accepted: `[B]` int32.
      drafter_calls: `[B]` int32, passes of the drafter.
      token_sum: `[B]` float32, sum_i prod_{j <= i} min(1, pi_j / q_j) on this draft.
      block_sum: `[B]` float32, sum_i P_i on the same draft; never less.
      log_p: `[B, G + 1]` float32, natural logarithms of the emitted tokens' p (-inf possible).
      log_target: `[B, G + 1]` float32, of their pi.
    """

    drafted: Array
    accepted: Array
    drafter_calls: Array
    token_sum: Array
    block_sum: Array
    log_p: Array
    log_target: Array


class RoundOutcome(NamedTuple):
    """What a round emits.

    Attributes:
      tokens: `[B, G + 1]` int32: the accepted tokens, then one more; the rest is padding.
      counts: `[B]` int32, how many of them are real (at least 1).
    """

    tokens: Array  # [B, G + 1]
    counts: Array  # [B]


@dataclasses.dataclass(frozen=True)
class Round:
    """The parts of a round; static and hashable. Parameters are `(verifier's, drafter's)`.

    Attributes:
      verifier: the large model.
      drafter: the drafter.
      verification: the algorithm.

    Raises:
      ValueError: if the vocabularies differ, or the verification is not exact for the drafter.
    """

    verifier: LanguageModel
    drafter: Drafter
    verification: Verification

    def __post_init__(self) -> None:
        if self.verifier.vocab_size != self.drafter.vocab_size:
            raise ValueError(
                f"the drafter's vocabulary has {self.drafter.vocab_size} tokens, the verifier's "
                f"{self.verifier.vocab_size}: they must be one"
            )
        self.verification.check(self.drafter.max_draft, self.drafter.traits)

    def check_rule(self, rule: Rule) -> None:
        """Raises ValueError if the rule reads a confidence that the drafter does not have."""
        if rule.reads_draft_confidence and not self.drafter.has_confidence:
            raise ValueError(
                f"{type(rule).__name__} reads the drafter's confidence, but "
                f"{type(self.drafter).__name__} has none: choose another rule"
            )

    def __call__(
        self, params: Params, rule: Rule, sampling: Sampling, state: RoundState, keys: Array
    ) -> tuple[RoundOutcome, RoundState, RoundInfo]:
        """Runs one round for all rows.

        Args:
          params: `(verifier's, drafter's)`.
          rule: the rule; its strengths are scalars.
          sampling: fields `[B]`.
          state: the rows' state. Positions are not moved: see `commit`.
          keys: `[B]` keys of the row and round; consumed.

        Returns:
          What is emitted, the state with caches filled, and what happened.
        """
        self.check_rule(rule)
        streams = jax.vmap(lambda key: jax.random.split(key, 3))(keys)
        block, drafter = self.drafter.propose(
            params[1],
            state.drafter,
            state.tokens,
            streams[:, 0],
            sampling,
            with_confidence=rule.reads_draft_confidence,
        )
        read = jnp.concatenate([state.tokens[:, None], block.tokens], axis=1)
        logits, _, cache = self.verifier.extend(params[0], state.cache, read, state.positions)
        p = jax.vmap(jax.vmap(distribution, in_axes=(0, None)))(logits, sampling)
        p_conf = jax.vmap(jax.vmap(confidence))(logits) if rule.reads_verifier_confidence else None

        def bonus(drafter):
            return self.drafter.bonus(
                params[1],
                drafter,
                state.tokens,
                block,
                sampling,
                with_confidence=rule.reads_draft_confidence,
            )

        if self.verification.has_carry:
            # A carry-over alters the target at the bonus position too, and needs q there.
            q, q_conf, drafter = bonus(drafter)
            block = _with_bonus(block, q, q_conf)
        targets = jax.vmap(jax.vmap(rule))(block.probs, p, block.confidences, p_conf)
        acceptance, accepted = jax.vmap(_first_half(self.verification))(
            streams[:, 1], block.tokens, block.probs, targets, block.num_drafted, state.carry
        )
        calls = block.calls
        at_bonus = jax.vmap(lambda x, i: lax.dynamic_index_in_dim(x, i, keepdims=False))
        last_target = at_bonus(acceptance.targets, block.num_drafted)
        if not self.verification.has_carry:
            whole = accepted == block.num_drafted

            def full(drafter):
                q, q_conf, drafter = bonus(drafter)
                p_last = at_bonus(p, block.num_drafted)
                conf_last = None if p_conf is None else at_bonus(p_conf, block.num_drafted)
                return jax.vmap(rule)(q, p_last, q_conf, conf_last), drafter

            # The drafter lacks the last token's entries only where the whole block stands, and
            # only there is its distribution read.
            last_target, drafter = lax.cond(
                jnp.any(whole), full, lambda d: (last_target, d), drafter
            )
            calls = calls + jnp.any(whole).astype(jnp.int32)
        next_token = jax.vmap(draw_next)(
            streams[:, 2], acceptance, block.probs, block.num_drafted, accepted, last_target
        )
        carry = jax.vmap(self.verification.next_carry)(
            acceptance, block.probs, block.num_drafted, state.carry, accepted, next_token
        )
        emitted = _emitted(block.tokens, accepted, next_token)
        info = RoundInfo(
            drafted=block.num_drafted,
            accepted=accepted,
            drafter_calls=jnp.broadcast_to(calls, accepted.shape),
            token_sum=_sum_of_products(block, acceptance.targets),
            block_sum=jax.vmap(block_acceptance_probs)(
                block.tokens, block.probs, acceptance.targets, block.num_drafted
            ).sum(axis=1),
            log_p=_log_at(p, emitted),
            log_target=_log_at(_put_rows(targets, block.num_drafted, last_target), emitted),
        )
        state = state._replace(tokens=next_token, cache=cache, drafter=drafter, carry=carry)
        return RoundOutcome(emitted, accepted + 1), state, info

    def commit(self, old: RoundState, new: RoundState, counts: Array) -> RoundState:
        """Moves each row on by `counts` `[B]` tokens; a row with 0 stays as it was.

        Args:
          old: the state before the round.
          new: the state that the round returned.
          counts: `[B]` int32, how many tokens are committed.

        Returns:
          The state for the next round. Caches are taken as they are: what was written past a
          row's position is overwritten before it can be seen.
        """
        moved = counts > 0

        def keep(a, b):
            return jax.tree.map(
                lambda x, y: jnp.where(moved.reshape((-1,) + (1,) * (y.ndim - 1)), y, x), a, b
            )

        return RoundState(
            tokens=keep(old.tokens, new.tokens),
            positions=old.positions + counts,
            cache=new.cache,
            drafter=self.drafter.commit(new.drafter, counts),
            carry=keep(old.carry, new.carry),
        )


def _first_half(verification: Verification):
    def call(key, tokens, draft, target, num_drafted, carry):
        return accept(verification, key, tokens, draft, target, num_drafted, carry)

    return call


def _with_bonus(block: DraftBlock, q: Array, q_conf: Array | None) -> DraftBlock:
    confidences = block.confidences
    if confidences is not None:
        confidences = _put_rows(confidences, block.num_drafted, q_conf)
    return block._replace(
        probs=_put_rows(block.probs, block.num_drafted, q),
        confidences=confidences,
        calls=block.calls + 1,
    )


def _put_rows(buffer: Array, index: Array, rows: Array | None) -> Array:
    """Replaces `buffer[b, index[b]]` by `rows[b]`."""
    return jax.vmap(lambda x, i, row: lax.dynamic_update_index_in_dim(x, row, i, axis=0))(
        buffer, index, rows
    )


def _emitted(tokens: Array, accepted: Array, next_token: Array) -> Array:
    index = jnp.arange(tokens.shape[1] + 1)[None]
    padded = jnp.pad(tokens, ((0, 0), (0, 1)))
    return jnp.where(index == accepted[:, None], next_token[:, None], padded)


def _log_at(probs: Array, tokens: Array) -> Array:
    return jnp.log(jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0])


def _sum_of_products(block: DraftBlock, targets: Array) -> Array:
    ratios = jax.vmap(token_acceptance_probs)(block.tokens, block.probs, targets, block.num_drafted)
    return jnp.cumprod(ratios, axis=1).sum(axis=1)
