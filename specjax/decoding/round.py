"""One round: draft, extend, rule, verify.

Axes: B rows, G longest block, V vocabulary.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.drafting import Drafter
from specjax.rules import Rule
from specjax.sampling import Sampling, confidence, distribution, num_uniforms
from specjax.types import Array, Cache, DraftBlock, LanguageModel, Params
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
      drafter_calls: int32 scalar, passes of the drafter; each serves the whole batch.
      token_sum: `[B]` float32, sum_i prod_{j <= i} min(1, pi_j / q_j) on this draft.
      block_sum: `[B]` float32, sum_i P_i on the same draft; never less.
      log_p: `[B, G + 1]` float32, natural logarithms of the emitted tokens' p (-inf possible).
      log_target: `[B, G + 1]` float32, of their pi.
    """

    drafted: Array  # [B]
    accepted: Array  # [B]
    drafter_calls: Array  # scalar
    token_sum: Array  # [B]
    block_sum: Array  # [B]
    log_p: Array  # [B, G + 1]
    log_target: Array  # [B, G + 1]


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
        if isinstance(self.verification, type):
            raise TypeError(
                f"verification is the class {self.verification.__name__}: give an instance, "
                f"{self.verification.__name__}()"
            )
        if self.verifier.vocab_size != self.drafter.vocab_size:
            raise ValueError(
                f"the drafter's vocabulary has {self.drafter.vocab_size} tokens, the verifier's "
                f"{self.verifier.vocab_size}: they must be one"
            )
        traits = self.drafter.traits
        self.verification.check(self.drafter.max_draft, traits)
        if self.verification.has_carry and not traits.fixed_length:
            # Its carry-overs would need each earlier block's stopping state; see `still_drafting`.
            raise ValueError(
                f"{type(self.verification).__name__} needs drafts of a fixed length here: use "
                "Block or Token verification with adaptive stopping"
            )

    @property
    def num_uniforms(self) -> int:
        """How many uniforms a row's round takes."""
        return sum(self._uniforms)

    @property
    def _uniforms(self) -> tuple[int, int, int]:
        """For drafting, acceptance and the next token: never shared."""
        per_draw = num_uniforms(self.verifier.vocab_size)
        return self.drafter.num_uniforms, self.drafter.max_draft, per_draw

    def check_rule(self, rule: Rule) -> None:
        """Raises if `rule` is no rule, or reads a confidence that the drafter does not have."""
        if isinstance(rule, type):
            raise TypeError(f"rule is the class {rule.__name__}: give an instance of it")
        if rule.reads_draft_confidence and not self.drafter.has_confidence:
            raise ValueError(
                f"{type(rule).__name__} reads the drafter's confidence, but "
                f"{type(self.drafter).__name__} has none: choose another rule"
            )

    def __call__(
        self,
        params: Params,
        rule: Rule,
        sampling: Sampling,
        state: RoundState,
        uniforms: Array,
        active: Array,
    ) -> tuple[RoundOutcome, RoundState, RoundInfo]:
        """Runs one round for all rows.

        Args:
          params: `(verifier's, drafter's)`.
          rule: the rule; its strengths are scalars or `[B]`.
          sampling: fields `[B]`.
          state: the rows' state. Positions are not moved: see `commit`.
          uniforms: `[B, num_uniforms]` float32 in [0, 1), independent.
          active: `[B]` bool; what comes out for other rows is to be ignored.

        Returns:
          What is emitted, the state with caches filled, and what happened.
        """
        self.check_rule(rule)
        with_confidence = rule.reads_draft_confidence
        rule = jax.tree.map(lambda x: jnp.broadcast_to(x, active.shape), rule)
        ends = np.cumsum(self._uniforms)[:-1].tolist()
        for_draft, for_accept, for_next = jnp.split(uniforms, ends, axis=1)
        block, drafter = self.drafter.propose(
            params[1],
            state.drafter,
            state.tokens,
            for_draft,
            sampling,
            active,
            with_confidence=with_confidence,
        )
        read = jnp.concatenate([state.tokens[:, None], block.tokens], axis=1)
        logits, _, cache = self.verifier.extend(params[0], state.cache, read, state.positions)
        p = jax.vmap(jax.vmap(distribution, in_axes=(0, None)))(logits, sampling)
        p_conf = jax.vmap(jax.vmap(confidence))(logits) if rule.reads_verifier_confidence else None
        # The bonus row of the block is not filled in yet, and not read before it is.
        targets = jax.vmap(lambda rule, *rows: jax.vmap(rule)(*rows))(
            rule, block.probs, p, block.confidences, p_conf
        )
        acceptance, accepted = jax.vmap(functools.partial(accept, self.verification))(
            for_accept, block.tokens, block.probs, targets, block.num_drafted, state.carry
        )
        whole = accepted == block.num_drafted

        def bonus(drafter: Any) -> tuple[Array, Any]:
            q, q_conf, drafter = self.drafter.bonus(
                params[1], drafter, state.tokens, block, sampling, with_confidence=with_confidence
            )
            p_last = _at(p, block.num_drafted)
            conf_last = None if p_conf is None else _at(p_conf, block.num_drafted)
            return jax.vmap(_call)(rule, q, p_last, q_conf, conf_last), drafter

        def without(drafter: Any) -> tuple[Array, Any]:
            return _at(targets, block.num_drafted), drafter

        # The drafter lacks the last token's entries only where the whole block stands, and only
        # there is its distribution read.
        needed = jnp.any(whole & active)
        bonus_target, drafter = lax.cond(needed, bonus, without, drafter)
        next_token = jax.vmap(draw_next)(
            for_next, acceptance, block.probs, block.num_drafted, accepted, bonus_target
        )
        carry = jax.vmap(self.verification.next_carry)(
            acceptance, block.probs, block.num_drafted, state.carry, accepted, next_token
        )
        emitted = _emitted(block.tokens, accepted, next_token)
        last = jnp.log(jnp.take_along_axis(bonus_target, next_token[:, None], axis=1))
        at_bonus = jnp.arange(emitted.shape[1])[None] == block.num_drafted[:, None]
        info = RoundInfo(
            drafted=block.num_drafted,
            accepted=accepted,
            drafter_calls=block.calls + needed.astype(jnp.int32),
            token_sum=_sum_of_products(block, acceptance.targets),
            block_sum=jax.vmap(block_acceptance_probs)(
                block.tokens, block.probs, acceptance.targets, block.num_drafted
            ).sum(axis=1),
            log_p=_log_at(p, emitted),
            log_target=jnp.where(at_bonus, last, _log_at(targets, emitted)),
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


def _call(rule: Rule, q: Array, p: Array, q_conf: Array | None, p_conf: Array | None) -> Array:
    return rule(q, p, q_conf, p_conf)


def _at(x: Array, index: Array) -> Array:
    """`x[b, index[b]]`."""
    return jax.vmap(lambda row, i: lax.dynamic_index_in_dim(row, i, keepdims=False))(x, index)


def _emitted(tokens: Array, accepted: Array, next_token: Array) -> Array:
    index = jnp.arange(tokens.shape[1] + 1)[None]
    padded = jnp.pad(tokens, ((0, 0), (0, 1)))
    return jnp.where(index == accepted[:, None], next_token[:, None], padded)


def _log_at(probs: Array, tokens: Array) -> Array:
    return jnp.log(jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0])


def _sum_of_products(block: DraftBlock, targets: Array) -> Array:
    ratios = jax.vmap(token_acceptance_probs)(block.tokens, block.probs, targets, block.num_drafted)
    return jnp.cumprod(ratios, axis=1).sum(axis=1)
