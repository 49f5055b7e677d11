"""Cascades in which the drafter writes until it is unsure: the token cascade, and BiLD.

One step is a draft and a pass of the verifier over it, for all rows. Unlike a round of speculative
decoding it ends the draft before a token is drawn, always takes the next token from the verifier,
and makes no pass of the verifier for rows that end with the draft.

Source: Faster Cascades via Speculative Decoding (arXiv 2405.19261), eq. 2, section 5 and E.1;
Speculative Decoding with Big Little Decoder (arXiv 2302.07863).

Axes: B rows, G longest draft, V vocabulary.
"""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax.checks import check_count
from specjax.decoding.fallback import Drafted, draft_until_fallback
from specjax.decoding.outcome import emitted
from specjax.decoding.pair_method import (
    CascadeParams,
    CascadeState,
    PairMethod,
    Reader,
    log_at,
    per_row,
    source_of_nan,
    step_counts,
)
from specjax.decoding.scoring import Scored, powers_of_two, score
from specjax.decoding.state import add_log_probs, append, end_by_nan, step_uniforms
from specjax.rules import FallbackRollback, check_reads_drafter_alone
from specjax.sampling import draw, num_uniforms
from specjax.types import Array, DecodeState


def check_limit(limit: Any) -> None:
    """Raises ValueError unless a draft's longest length is a whole number of at least 1."""
    remedy = "give how many tokens the drafter may write before the verifier runs"
    check_count("limit", limit, remedy)


@dataclasses.dataclass(frozen=True)
class _FallbackCascade(PairMethod):
    """Drafts until the drafter defers, then lets the verifier read the draft and write one token.

    Attributes:
      verifier: the large model.
      drafter: the small model.
      limit: G >= 1, so many tokens of the drafter at most between two passes of the verifier.
      eos_ids: tokens that end a row.
      partitioner: where arrays lie on a mesh; None for one device.
    """

    limit: int = 10

    def __post_init__(self) -> None:
        check_limit(self.limit)
        super().__post_init__()

    @property
    def max_draft(self) -> int:
        """G."""
        return self.limit

    @abc.abstractmethod
    def fallback(self, rule: Any) -> Any:
        """The rule before whose deferral a draft ends."""

    @abc.abstractmethod
    def rollback(self, rule: Any) -> Any:
        """The rule at whose first deferral it is cut back, or None."""

    def step(self, params: CascadeParams, state: DecodeState) -> DecodeState:
        """One draft, and one token of the verifier."""
        rule = per_row(params.rule, state.steps)
        active, per_draw = ~state.finished, num_uniforms(self.vocab_size)
        uniforms = step_uniforms(state, (self.limit + 1) * per_draw)
        uniforms = uniforms.reshape(-1, self.limit + 1, per_draw)
        rollback = self.rollback(rule)
        drafted = draft_until_fallback(
            self.drafter,
            params.drafter,
            state,
            self.fallback(rule),
            uniforms[:, :-1],
            self.eos_ids,
            keep_probs=rollback is not None,
            keep_confidences=rollback is not None and rollback.reads_draft_confidence,
        )
        # A stop string ends the draft; it ends the row unread where nothing can be cut back.
        ended = drafted.ended | (drafted.stopped if rollback is None else False)
        waiting = active & ~ended & ~drafted.nan
        scored = self._read(params, state, drafted, waiting, rollback)
        standing = _standing(rollback, drafted, scored, waiting)
        p = jnp.take_along_axis(scored.p, standing[:, None, None], axis=1)[:, 0]
        next_token = jax.vmap(draw)(p, uniforms[:, -1])
        tokens = emitted(drafted.tokens[:, :-1], standing, next_token)
        read = jnp.arange(self.limit + 1)[None] <= drafted.counts[:, None]
        bad = (jnp.isnan(scored.p[..., 0]) & read).any(axis=1) & waiting
        counts = jnp.where(active & ~drafted.nan & ~bad, standing + waiting.astype(jnp.int32), 0)
        new, kept = append(state, tokens, counts, self.eos_ids)
        own = jnp.arange(self.limit + 1)[None] < standing[:, None]
        log_p = log_at(scored.p, tokens)
        info = add_log_probs(
            new.info,
            kept,
            # The verifier has not read what comes after its last pass.
            jnp.where(waiting[:, None], log_p, jnp.nan),
            jnp.where(own, drafted.log_q, log_p),
            state.lengths,
        )
        passes = waiting.astype(jnp.int32)
        calls = {"verifier": passes, "drafter": drafted.calls}
        rolled = waiting & (standing < drafted.counts)
        # Where nothing can be cut back the drafter's tokens are no drafts: none is ever rejected.
        none = jnp.zeros_like(standing)
        blocks = (none, none) if rollback is None else (drafted.counts, standing)
        stood = jnp.where(active, blocks[1], 0).astype(jnp.float32)
        info = info._replace(
            **step_counts(state, *blocks),
            calls={name: info.calls[name] + calls[name] for name in info.calls},
            token_sum=info.token_sum + stood,
            block_sum=info.block_sum + stood,
            deferrals=info.deferrals + passes,
            rollbacks=info.rollbacks + rolled.astype(jnp.int32),
        )
        new = new._replace(
            inner=_moved(state.inner, tokens, counts, scored, drafted),
            info=info,
            steps=state.steps + active.astype(jnp.int32),
        )
        return end_by_nan(new, source_of_nan(bad, drafted.nan))

    def _read(
        self,
        params: CascadeParams,
        state: DecodeState,
        drafted: Drafted,
        waiting: Array,
        rollback: Any,
    ) -> Scored:
        """The verifier's pass over the drafts; none where no row waits for it."""
        inner: CascadeState = state.inner
        tokens = jnp.concatenate([inner.tokens[:, None], drafted.tokens[:, :-1]], axis=1)
        with_confidence = rollback is not None and rollback.reads_verifier_confidence

        def run(cache: Any) -> Scored:
            return score(
                self.verifier,
                params.verifier,
                cache,
                tokens,
                inner.verifier.positions,
                jnp.max(jnp.where(waiting, drafted.counts, 0)) + 1,
                powers_of_two(self.limit + 1),
                state.sampling,
                with_confidence=with_confidence,
            )

        def skip(cache: Any) -> Scored:
            nothing = jnp.zeros((*tokens.shape, self.vocab_size), jnp.float32)
            return Scored(nothing, nothing if with_confidence else None, cache)

        return lax.cond(jnp.any(waiting), run, skip, inner.verifier.cache)


@dataclasses.dataclass(frozen=True)
class TokenCascade(_FallbackCascade):
    """The token cascade: the drafter writes while its rule does not defer, else the verifier.

    Where the drafter defers, or after `limit` tokens of its own, the verifier reads what it has not
    seen and draws one token. A row that ends with a token of the drafter takes no more pass. Its
    parameters: `CascadeParams` with a deferral rule that reads the drafter alone, such as
    `rules.Chow` or `rules.ChowLog`.
    """

    def check_rule(self, rule: Any) -> None:
        """Raises TypeError or ValueError unless the rule decides by the drafter alone."""
        check_reads_drafter_alone("rule", rule, ", or the oracle cascade, which runs both models")

    def fallback(self, rule: Any) -> Any:
        """The rule itself."""
        return rule

    def rollback(self, rule: Any) -> Any:
        """None: what is drafted stands."""
        return None


@dataclasses.dataclass(frozen=True)
class BiLDCascade(_FallbackCascade):
    """BiLD as its authors have it: fallback and rollback.

    Where the fallback rule defers, or after `limit` tokens, the verifier reads the draft. From the
    first position at which the rollback rule defers, the draft is dropped, and the verifier draws
    the token there; where none does, it adds one. A row that ends with a token of the drafter does
    so unread. Its parameters: `CascadeParams` with `rules.FallbackRollback`.
    """

    def check_rule(self, rule: Any) -> None:
        """Raises TypeError unless the rule is a `rules.FallbackRollback`."""
        if not isinstance(rule, FallbackRollback):
            raise TypeError(
                "rule must be rules.FallbackRollback(fallback=rules.Chow(0.4), "
                f"rollback=rules.BiLD(2.0)), got {rule!r}"
            )

    def fallback(self, rule: FallbackRollback) -> Any:
        """Its fallback."""
        return rule.fallback

    def rollback(self, rule: FallbackRollback) -> Any:
        """Its rollback."""
        return rule.rollback


def _standing(rollback: Any, drafted: Drafted, scored: Scored, waiting: Array) -> Array:
    """`[B]` int32, how many drafted tokens stand; all of them in rows that do not wait."""
    if rollback is None:
        return drafted.counts

    def decide(rule: Any, *of: Any) -> Array:
        return jax.vmap(rule.defers)(*of)

    defers = jax.vmap(decide)(rollback, drafted.probs, scored.p, drafted.confidences, scored.p_conf)
    index = jnp.arange(defers.shape[1], dtype=jnp.int32)[None]
    defers &= waiting[:, None]
    return jnp.minimum(jnp.min(jnp.where(defers, index, defers.shape[1]), axis=1), drafted.counts)


def _moved(
    inner: CascadeState, tokens: Array, counts: Array, scored: Scored, drafted: Drafted
) -> CascadeState:
    """The state after `counts [B]` of `tokens [B, G + 1]` were committed."""
    last = jnp.take_along_axis(tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
    return inner._replace(
        tokens=jnp.where(counts > 0, last, inner.tokens),
        verifier=Reader(inner.verifier.positions + counts, scored.cache),
        drafter=Reader(inner.drafter.positions + counts, drafted.cache),
    )
