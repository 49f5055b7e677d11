"""Cascades in which the drafter writes until it is unsure: the token cascade, and BiLD.

A step is a draft and a pass of the verifier over it, for all rows. A round of speculative decoding
differs: here the draft ends before a token is drawn, the next token is always the verifier's, and
rows that end with the draft need no pass of the verifier.

Source: Faster Cascades via Speculative Decoding (arXiv 2405.19261), eq. 2, section 5 and E.1;
Speculative Decoding with Big Little Decoder (arXiv 2302.07863).

Axes: B rows, G longest draft, N = G + 1 places, V vocabulary.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from specjax.checks import check_count
from specjax.decoding.history import put_column
from specjax.decoding.loop import MethodParams, per_row
from specjax.decoding.outcome import emitted
from specjax.decoding.roundless import (
    PairMethod,
    SequentialState,
    log_at,
    models_of,
    source_of_nan,
)
from specjax.decoding.scoring import Scored, Wanted, powers_of_two, score
from specjax.decoding.state import Step, end_tokens, read_token, step_uniforms
from specjax.errors import UserError
from specjax.processing import advance, distributions, logs_along, with_processing
from specjax.rules import FallbackRollback
from specjax.rules.sequential import check_reads_drafter_alone
from specjax.sampling import confidence, draw, num_uniforms
from specjax.types import (
    Cache,
    DecodeState,
    LanguageModel,
    Params,
    Processing,
    StopState,
)


class Drafted(NamedTuple):
    """The tokens that the drafter has written. Entries past `counts` are arbitrary.

    Attributes:
      counts: 0 .. G.
      log_q: the tokens' log-probabilities when they were drawn.
      probs: the distributions that they were drawn from; or None.
      calls: the number of passes that read a token of the row.
      ended: whether the last token ends the row by an EOS or its limit.
      stopped: whether the last token completes a stop string.
      nan: whether the drafter gave NaN.
      cache: the drafter's cache; it holds the whole draft, unless the draft has ended a text.
    """

    tokens: Int32[Array, "B N"]
    counts: Int32[Array, " B"]
    log_q: Float32[Array, "B N"]
    probs: Float32[Array, "B N V"] | None
    confidences: Float32[Array, "B N V"] | None
    calls: Int32[Array, " B"]
    ended: Bool[Array, " B"]
    stopped: Bool[Array, " B"]
    nan: Bool[Array, " B"]
    cache: Cache


class _Writing(NamedTuple):
    """The state of the loop."""

    step: Array
    drafted: Drafted
    last: Array
    going: Array
    stop: StopState | None  # after the drafted tokens
    processing: Processing | None  # likewise


def draft_until_fallback(
    model: LanguageModel,
    params: Params,
    state: DecodeState,
    fallback: Any,
    uniforms: Float32[Array, "B G U"],
    eos_ids: tuple[int, ...],
    *,
    keep_probs: bool,
    keep_confidences: bool,
) -> Drafted:
    """Draws tokens until the fallback rule defers, the row's limit is reached, or the text ends.

    The rule decides before a token is drawn, from its distribution. A row at its limit still reads
    its last token, in a pass of one token: so the drafter never lags.

    Args:
      model: the drafter.
      params: its parameters.
      state: the rows; `state.inner` is a `SequentialState`.
      fallback: a deferral rule that reads only the drafter; strengths `[B]`.
      uniforms: in [0, 1), independent.
      eos_ids: tokens that end a row.
      keep_probs: whether `probs` are needed (static).
      keep_confidences: whether `confidences` are needed (static).
    """
    rows, longest, _ = uniforms.shape
    start = state.inner.drafter

    def put(buffer: Array | None, value: Any, index: Array) -> Array | None:
        return None if buffer is None else put_column(buffer, value, index)

    def step(carry: _Writing) -> _Writing:
        index, drafted = carry.step, carry.drafted
        logits, _, cache = model.extend(
            params, drafted.cache, carry.last[:, None], start.positions + index
        )
        sampling = with_processing(state.sampling, carry.processing)
        q = distributions(logits[:, 0], sampling)
        reads = fallback.reads_draft_confidence or keep_confidences
        q_conf = jax.vmap(confidence)(logits[:, 0]) if reads else None
        defers = jax.vmap(lambda rule, *of: rule.defers(of[0], None, of[1], None))(
            fallback, q, q_conf
        )
        nan = carry.going & jnp.isnan(q[:, 0])
        draws = carry.going & ~defers & ~nan & (index < state.draft_limits)
        uniform = lax.dynamic_index_in_dim(uniforms, index, axis=1, keepdims=False)
        token = jax.vmap(draw)(q, uniform)
        full = state.lengths + index + 1 >= state.limits
        ended = draws & (end_tokens(token, eos_ids) | full)
        stop, complete = read_token(carry.stop, token)
        stopped = draws & complete
        drafted = Drafted(
            tokens=put_column(drafted.tokens, token, index),
            counts=drafted.counts + draws.astype(jnp.int32),
            log_q=put_column(drafted.log_q, log_at(q, token), index),
            probs=put(drafted.probs, q, index),
            confidences=put(drafted.confidences, q_conf, index),
            calls=drafted.calls + carry.going.astype(jnp.int32),
            ended=drafted.ended | ended,
            stopped=drafted.stopped | stopped,
            nan=drafted.nan | nan,
            cache=cache,
        )
        processing = advance(sampling, token[:, None], draws).processing
        return _Writing(index + 1, drafted, token, draws & ~ended & ~stopped, stop, processing)

    def unfinished(carry: _Writing) -> Array:
        return (carry.step <= longest) & jnp.any(carry.going)

    wide = (rows, longest + 1, model.vocab_size)
    empty = _empty_draft(start.cache, wide, keep_probs, keep_confidences)
    last, processing = state.inner.tokens, state.sampling.processing
    first = _Writing(jnp.int32(0), empty, last, ~state.finished, state.stop, processing)
    return lax.while_loop(unfinished, step, first).drafted


def _empty_draft(
    cache: Cache, wide: tuple[int, int, int], keep_probs: bool, keep_confidences: bool
) -> Drafted:
    """A draft before its first token; `wide` is (B, G + 1, V)."""
    none, zeros = jnp.zeros(wide[:1], bool), jnp.zeros(wide, jnp.float32)
    return Drafted(
        tokens=jnp.zeros(wide[:2], jnp.int32),
        counts=jnp.zeros(wide[:1], jnp.int32),
        log_q=jnp.zeros(wide[:2], jnp.float32),
        probs=zeros if keep_probs else None,
        confidences=zeros if keep_confidences else None,
        calls=jnp.zeros(wide[:1], jnp.int32),
        ended=none,
        stopped=none,
        nan=none,
        cache=cache,
    )


@dataclasses.dataclass(frozen=True)
class _FallbackCascade(PairMethod):
    """Drafts until the drafter defers; then the verifier reads the draft and writes a token.

    Attributes:
      limit: G >= 1, the most tokens of the drafter between two passes of the verifier.
    """

    limit: int = 10

    def __post_init__(self) -> None:
        remedy = "give how many tokens the drafter may write before the verifier runs"
        check_count("limit", self.limit, remedy)
        super().__post_init__()

    @property
    def max_draft(self) -> int:
        return self.limit

    @abc.abstractmethod
    def fallback(self, rule: Any) -> Any:
        """The rule that ends a draft when it defers."""

    @abc.abstractmethod
    def rollback(self, rule: Any) -> Any:
        """The rule that cuts the draft where it first defers, or None."""

    def step(self, params: MethodParams, state: DecodeState) -> Step:
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
        # A stop string ends the draft. Without a rollback rule it also ends the row.
        ended = drafted.ended | (drafted.stopped if rollback is None else False)
        waiting = active & ~ended & ~drafted.nan
        scored = self._read(params.verifier, state, drafted, waiting, rollback)
        standing = _num_kept(rollback, drafted, scored, waiting)
        p = jnp.take_along_axis(scored.p, standing[:, None, None], axis=1)[:, 0]
        next_token = jax.vmap(draw)(p, uniforms[:, -1])
        tokens = emitted(drafted.tokens[:, :-1], standing, next_token)
        read = jnp.arange(self.limit + 1)[None] <= drafted.counts[:, None]
        bad = (jnp.isnan(scored.p[..., 0]) & read).any(axis=1) & waiting
        passes = waiting.astype(jnp.int32)
        counts = jnp.where(active & ~drafted.nan & ~bad, standing + passes, 0)
        last = jnp.take_along_axis(tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
        caches = {"verifier": scored.cache, "drafter": drafted.cache}
        by_drafter = jnp.arange(self.limit + 1)[None] < standing[:, None]
        counted = jnp.arange(self.limit + 1)[None] < counts[:, None]
        given = scored.p, scored.logits, state.sampling, tokens, counted
        logs = logs_along(*given, with_conf=state.wants_log_conf)
        log_conf, log_p = jax.tree.map(
            lambda x: jnp.where(waiting[:, None], x, jnp.nan), (logs.conf, logs.p)
        )
        # Without a rollback rule the drafter's tokens do not count as drafts: none is ever
        # rejected.
        blocks = (0, 0) if rollback is None else (drafted.counts, standing)
        stood = None if rollback is None else standing.astype(jnp.float32)
        return Step(
            tokens=tokens,
            counts=counts,
            inner=state.inner.read_on(last, dict.fromkeys(caches, counts), caches),
            calls={"verifier": passes, "drafter": drafted.calls},
            # The verifier has not read the tokens after its last pass.
            log_conf=log_conf,
            log_p=log_p,
            log_target=jnp.where(by_drafter, drafted.log_q, log_p),
            drafted=blocks[0],
            accepted=blocks[1],
            deferrals=passes,
            rollbacks=waiting & (standing < drafted.counts),
            token_sum=stood,
            block_sum=stood,
            nan_in=source_of_nan(bad, drafted.nan),
            sources=models_of(state, lambda: by_drafter),
        )

    def _read(
        self,
        params: Params,
        state: DecodeState,
        drafted: Drafted,
        waiting: Array,
        rollback: Any,
    ) -> Scored:
        """The verifier's pass over the drafts; no pass if no row waits for it."""
        inner: SequentialState = state.inner
        tokens = jnp.concatenate([inner.tokens[:, None], drafted.tokens[:, :-1]], axis=1)
        with_confidence = rollback is not None and rollback.reads_verifier_confidence

        def run(cache: Any) -> Scored:
            return score(
                self.verifier,
                params,
                cache,
                tokens,
                inner.verifier.positions,
                jnp.max(jnp.where(waiting, drafted.counts, 0)) + 1,
                powers_of_two(self.limit + 1),
                Wanted(state.sampling, with_confidence, with_logits=True),
            )

        def skip(cache: Any) -> Scored:
            nothing = jnp.zeros((*tokens.shape, self.vocab_size), jnp.float32)
            return Scored(nothing, nothing if with_confidence else None, None, nothing, cache)

        return lax.cond(jnp.any(waiting), run, skip, inner.verifier.cache)


@dataclasses.dataclass(frozen=True)
class TokenCascade(_FallbackCascade):
    """The token cascade: the drafter writes until its rule defers, then the verifier.

    When the drafter defers, or after `limit` of its tokens, the verifier reads the new tokens and
    draws one. A row that ends with a token of the drafter needs no further pass. Its parameters:
    `MethodParams` with a deferral rule that reads only the drafter, such as `rules.Chow` or
    `rules.ChowLog`.
    """

    def check_rule(self, rule: Any) -> None:
        check_reads_drafter_alone("rule", rule, ", or the oracle cascade, which runs both models")

    def fallback(self, rule: Any) -> Any:
        return rule

    def rollback(self, rule: Any) -> Any:
        return None


@dataclasses.dataclass(frozen=True)
class BiLDCascade(_FallbackCascade):
    """BiLD as published: fallback and rollback.

    When the fallback rule defers, or after `limit` tokens, the verifier reads the draft. The draft
    is cut where the rollback rule first defers, and the verifier draws the token there; if it never
    defers, the verifier adds a token. A row that ends with a token of the drafter ends without that
    pass. Its parameters: `MethodParams` with `rules.FallbackRollback`.
    """

    def check_rule(self, rule: Any) -> None:
        if not isinstance(rule, FallbackRollback):
            raise UserError(
                f"rule must be a rules.FallbackRollback, got {rule!r}: give "
                "rules.FallbackRollback(fallback=rules.Chow(0.4), rollback=rules.BiLD(2.0))"
            )

    def fallback(self, rule: FallbackRollback) -> Any:
        return rule.fallback

    def rollback(self, rule: FallbackRollback) -> Any:
        return rule.rollback


def _num_kept(
    rollback: Any, drafted: Drafted, scored: Scored, waiting: Array
) -> Int32[Array, " B"]:
    """The number of drafted tokens that are kept; all in rows that do not wait."""
    if rollback is None:
        return drafted.counts

    def decide(rule: Any, *of: Any) -> Array:
        return jax.vmap(rule.defers)(*of)

    defers = jax.vmap(decide)(rollback, drafted.probs, scored.p, drafted.confidences, scored.p_conf)
    index = jnp.arange(defers.shape[1], dtype=jnp.int32)[None]
    defers &= waiting[:, None]
    return jnp.minimum(jnp.min(jnp.where(defers, index, defers.shape[1]), axis=1), drafted.counts)
