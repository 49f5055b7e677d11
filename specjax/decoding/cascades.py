"""Methods in which one model writes at a time: every model reads each committed token itself.

Autoregressive decoding has one model. The cascades have two. They are no rounds of speculative
decoding: the next token is one model's own, and a row that ends with a draft needs no pass over it.

Source: Faster Cascades via Speculative Decoding (arXiv 2405.19261), eq. 1 and 2, section 5 and E.1;
Speculative Decoding with Big Little Decoder (arXiv 2302.07863).

Axes: B rows, G longest draft, N = G + 1 places, S cache length, T tokens, V vocabulary, U uniforms
of a draw.
"""

import abc
import dataclasses
import functools
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from specjax.checks import check_count, check_part
from specjax.decoding.blocks import Scored, emit, powers_of_two, score
from specjax.decoding.history import put_at, put_column
from specjax.decoding.method import (
    Method,
    MethodParams,
    Step,
    check_model,
    check_pair,
    check_rollback,
    check_vocabularies,
    end_tokens,
    per_row,
    read_token,
    step_uniforms,
)
from specjax.errors import UserError
from specjax.partitioning import Partitioner
from specjax.platforms import entry, when
from specjax.processing import advance, distributions, draws, logs_along, with_processing
from specjax.rules import FallbackRollback, Lossless
from specjax.rules.deferral import check_deferral, check_reads_drafter_alone
from specjax.rules.target import check_is_rule
from specjax.sampling.distributions import confidence, log_confidence
from specjax.sampling.draws import draw, num_uniforms
from specjax.types import (
    NAN,
    RUNNING,
    Axes,
    Cache,
    DecodeState,
    LanguageModel,
    LogProbs,
    Params,
    Processing,
    Prompts,
    Sampling,
    StopState,
    row_axes,
)
from specjax.types.pytrees import where_rows

VERIFIER, DRAFTER = range(2)  # in `model_names`
_LATER: Any = None  # a model that is bound later


class HasRead(NamedTuple):
    """The part of each row that a model has read.

    Attributes:
      positions: the position of the last committed token in its cache.
      cache: its cache, without that token.
    """

    positions: Int32[Array, " B"]
    cache: Cache

    @property
    def cached(self) -> Array:
        return self.positions


class SequentialState(NamedTuple):
    """The state of a row between two steps.

    Attributes:
      tokens: the last committed token; in no cache yet.
      extra: other values of a method; the batch is the first axis of its arrays.
    """

    tokens: Int32[Array, " B"]
    verifier: HasRead
    drafter: HasRead | None = None
    extra: Any = ()

    def read_on(
        self, last: Array, counts: dict[str, Array], caches: dict[str, Cache]
    ) -> "SequentialState":
        """The state after `counts` `[B]` more tokens by model, the last of them `last [B]`."""
        moved = functools.reduce(jnp.maximum, counts.values()) > 0
        read = {
            name: HasRead(getattr(self, name).positions + counts[name], caches[name])
            for name in counts
        }
        return self._replace(tokens=jnp.where(moved, last, self.tokens), **read)


class SequentialMethod(Method):
    """Prefills, axes and checks of methods without rounds. Parameters: `MethodParams`."""

    @property
    @abc.abstractmethod
    def models(self) -> dict[str, LanguageModel]:
        """The models by name; their passes are counted under it."""

    def __post_init__(self) -> None:
        for name, model in self.models.items():
            check_model(name, model)
        super().__post_init__()

    @property
    def vocab_size(self) -> int:
        return self.models["verifier"].vocab_size

    @property
    def model_names(self) -> tuple[str, ...]:
        return tuple(self.models)

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        each = (x.prompt_positions(input_lengths, prefix_lengths) for x in self.models.values())
        return functools.reduce(np.maximum, each)

    def prefill(self, params: MethodParams, prompts: Prompts, max_length: int) -> SequentialState:
        filled = {
            name: model.prefill(getattr(params, name), prompts, max_length)
            for name, model in self.models.items()
        }
        read = {name: HasRead(x.positions, x.cache) for name, x in filled.items()}
        return SequentialState(filled["verifier"].tokens, **read)

    def check_params(self, params: Params, rows: int) -> None:
        check_pair(self, params, rows)

    def committed(self, state: DecodeState) -> SequentialState:
        return state.inner

    def inner_axes(self, inner: SequentialState) -> Axes:
        read = {}
        for name, model in self.models.items():
            one: HasRead = getattr(inner, name)
            read[name] = HasRead(row_axes(one.positions), model.cache_axes(one.cache))
        return inner._replace(tokens=row_axes(inner.tokens), extra=row_axes(inner.extra), **read)


@dataclasses.dataclass(frozen=True)
class Autoregressive(SequentialMethod):
    """Decodes with one model, a token per pass.

    Its parameters: `MethodParams` with only a verifier. A rule shapes the target distribution; it
    must not read a drafter.

    Attributes:
      model: the language model; it counts as the verifier.
    """

    model: LanguageModel

    @property
    def models(self) -> dict[str, LanguageModel]:
        return {"verifier": self.model}

    @property
    def independent_rows(self) -> bool:
        return True

    def check_rule(self, rule: Any) -> None:
        check_is_rule("rule", rule)
        if rule.reads_draft or rule.reads_draft_confidence:
            raise UserError(
                f"{type(rule).__name__} reads the drafter, but there is none: give a drafter, or a "
                "rule that reads only the verifier"
            )

    def step(self, params: MethodParams, state: DecodeState) -> Step:
        inner: SequentialState = state.inner
        last, read = inner.tokens[:, None], inner.verifier
        with jax.named_scope("verifier_pass"):
            logits, _, cache = self.model.extend(params.verifier, read.cache, last, read.positions)
        with jax.named_scope("draw"):
            uniforms = step_uniforms(state, num_uniforms(self.vocab_size))
            probs, target, tokens = self._drawn(params.rule, logits[:, 0], state.sampling, uniforms)
        nan = jnp.isnan(target[:, 0])
        counts = (~state.finished & ~nan).astype(jnp.int32)
        logs = logs_along(
            probs[:, None],
            logits if state.wants_log_probs else None,
            state.sampling,
            tokens[:, None],
            counts[:, None] > 0,
            with_plain=state.wants_log_probs,
        )
        return Step(
            tokens=tokens[:, None],
            counts=counts,
            inner=inner.read_on(tokens, {"verifier": counts}, {"verifier": cache}),
            calls={"verifier": 1},
            log_probs=logs._replace(target=jnp.log(jax.vmap(entry)(target, tokens))[:, None]),
            deferrals=1,
            nan_in=jnp.where(nan, VERIFIER, -1),
            sources=jnp.full_like(last, VERIFIER) if state.wants_sources else None,
        )

    def _drawn(
        self, rule: Any, logits: Array, sampling: Sampling, uniforms: Array
    ) -> tuple[Array, Array, Array]:
        """The verifier's distributions, the rule's, both `[B, V]`, and tokens of the latter."""
        if isinstance(rule, Lossless):
            probs, tokens = draws(logits, sampling, uniforms)
            return probs, probs, tokens
        probs = distributions(logits, sampling)
        p_conf = jax.vmap(confidence)(logits) if rule.reads_verifier_confidence else None
        target = jax.vmap(lambda rule, *of: rule(*of))(
            per_row(rule, uniforms[:, 0]), probs, probs, None, p_conf
        )
        return probs, target, jax.vmap(draw)(target, uniforms)


@dataclasses.dataclass(frozen=True)
class PairMethod(SequentialMethod):
    """Decodes with two models, step by step. Its parameters: `MethodParams`.

    `DecodeInfo.calls` are a row's own: passes that read a token of this row. Without models, the
    method is for `Decoder(pair, method=...)`, which adds them by `bound`.

    Attributes:
      verifier: the large model; None, as for the drafter, if it is bound later.
      drafter: the small model.
    """

    verifier: LanguageModel = dataclasses.field(default=_LATER, kw_only=True)
    drafter: LanguageModel = dataclasses.field(default=_LATER, kw_only=True)

    def __post_init__(self) -> None:
        if self.verifier is _LATER and self.drafter is _LATER:
            return
        super().__post_init__()
        check_vocabularies(self.verifier, self.drafter)

    def bound(
        self,
        verifier: LanguageModel,
        drafter: LanguageModel,
        eos_ids: tuple[int, ...],
        partitioner: Partitioner | None,
    ) -> Self:
        """The same method over these models."""
        return dataclasses.replace(
            self, verifier=verifier, drafter=drafter, eos_ids=eos_ids, partitioner=partitioner
        )

    @property
    def models(self) -> dict[str, LanguageModel]:
        return {"verifier": self.verifier, "drafter": self.drafter}

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "drafter": self.drafter.describe()}


def _log_at(probs: Array, tokens: Array) -> Array:
    """Natural logarithms of the probabilities `[..., V]` of `tokens [...]`."""
    return jnp.log(jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0])


def _models_of(state: DecodeState, drafter: Array) -> Array | None:
    """`Step.sources`; `drafter [B, T]` says which tokens are the drafter's."""
    return jnp.where(drafter, DRAFTER, VERIFIER) if state.wants_sources else None


def _source_of_nan(in_verifier: Array, in_drafter: Array) -> Int32[Array, " B"]:
    """For `Step.nan_in`, from two `[B]` bool."""
    return jnp.where(in_verifier, VERIFIER, jnp.where(in_drafter, DRAFTER, -1))


@dataclasses.dataclass(frozen=True)
class OracleCascade(PairMethod):
    """One token a step: the verifier's if the rule defers, else the drafter's.

    Its parameters: `MethodParams` with any deferral rule, such as `rules.Diff` or `rules.DiffLog`.
    `DecodeInfo.deferrals` counts the verifier's tokens; both models make a pass for every token. So
    it shows the value of a deferral rule, whatever its cost.

    Source: Figure 1 of Faster Cascades via Speculative Decoding (arXiv 2405.19261), section 3.2 and
    Remark 1.
    """

    @property
    def independent_rows(self) -> bool:
        return True

    def check_rule(self, rule: Any) -> None:
        check_deferral("rule", rule, "rules.Diff(strength=0.1)")

    def step(self, params: MethodParams, state: DecodeState) -> Step:
        inner: SequentialState = state.inner
        rule = per_row(params.rule, state.steps)
        logits, caches = {}, {}
        for name, model in self.models.items():
            read, weights = getattr(inner, name), getattr(params, name)
            out = model.extend(weights, read.cache, inner.tokens[:, None], read.positions)
            logits[name], caches[name] = out.logits[:, 0], out.cache
        large, small = logits["verifier"], logits["drafter"]
        p, q = (distributions(x, state.sampling) for x in (large, small))
        p_conf = jax.vmap(confidence)(large) if rule.reads_verifier_confidence else None
        q_conf = jax.vmap(confidence)(small) if rule.reads_draft_confidence else None
        defers = jax.vmap(lambda rule, *of: rule.defers(*of))(rule, q, p, q_conf, p_conf)
        target = jnp.where(defers[:, None], p, q)
        tokens = jax.vmap(draw)(target, step_uniforms(state, num_uniforms(self.vocab_size)))
        nan = _source_of_nan(jnp.isnan(p[:, 0]), jnp.isnan(q[:, 0]))
        counts = (~state.finished & (nan < 0)).astype(jnp.int32)
        logs = logs_along(
            p[:, None],
            large[:, None],
            state.sampling,
            tokens[:, None],
            counts[:, None] > 0,
            with_plain=state.wants_log_probs,
        )
        return Step(
            tokens=tokens[:, None],
            counts=counts,
            inner=inner.read_on(tokens, dict.fromkeys(caches, counts), caches),
            calls=dict.fromkeys(caches, 1),
            log_probs=logs._replace(target=_log_at(target, tokens)[:, None]),
            deferrals=counts * defers.astype(jnp.int32),
            nan_in=nan,
            sources=_models_of(state, ~defers[:, None]),
        )


class Drafted(NamedTuple):
    """The tokens that the drafter has written. Entries past `counts` are arbitrary.

    Attributes:
      log_probs: the tokens' log-probabilities when they were drawn; `probs` has distributions.
      calls: the number of passes that read a token of the row.
      ended: whether the last token ends the row by an EOS or its limit.
      stopped: whether the last token completes a stop string.
      nan: whether the drafter gave NaN.
      cache: the drafter's cache; it holds the whole draft, unless the draft has ended a text.
    """

    tokens: Int32[Array, "B N"]
    counts: Int32[Array, " B"]
    log_probs: Float32[Array, "B N"]
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
        for model in filter(None, self.models.values()):
            check_rollback(model, self.limit + 1, f"limit={self.limit}")

    @property
    def max_draft(self) -> int:
        return self.limit

    def step(self, params: MethodParams, state: DecodeState) -> Step:
        rule = per_row(params.rule, state.steps)
        active, per_draw = ~state.finished, num_uniforms(self.vocab_size)
        uniforms = step_uniforms(state, (self.limit + 1) * per_draw)
        uniforms = uniforms.reshape(-1, self.limit + 1, per_draw)
        fallback, rollback = rule, None
        if isinstance(rule, FallbackRollback):
            fallback, rollback = rule.fallback, rule.rollback
        drafted = self._draft(params.drafter, state, fallback, rollback, uniforms[:, :-1])
        # A stop string ends the draft. Without a rollback rule it also ends the row.
        ended = drafted.ended | (drafted.stopped if rollback is None else False)
        waiting = active & ~ended & ~drafted.nan
        scored = self._read(params.verifier, state, drafted, waiting, rollback)
        standing = drafted.counts
        if rollback is not None:
            defers = jax.vmap(lambda rule, *of: jax.vmap(rule.defers)(*of))(
                rollback, drafted.probs, scored.p, drafted.confidences, scored.p_conf
            )
            index = jnp.arange(self.limit + 1, dtype=jnp.int32)[None]
            defers &= waiting[:, None]
            first = jnp.min(jnp.where(defers, index, self.limit + 1), axis=1)
            standing = jnp.minimum(first, drafted.counts)
        p = jnp.take_along_axis(scored.p, standing[:, None, None], axis=1)[:, 0]
        next_token = jax.vmap(draw)(p, uniforms[:, -1])
        tokens = emit(drafted.tokens[:, :-1], standing, next_token)
        read = jnp.arange(self.limit + 1)[None] <= drafted.counts[:, None]
        bad = (jnp.isnan(scored.p[..., 0]) & read).any(axis=1) & waiting
        passes = waiting.astype(jnp.int32)
        counts = jnp.where(active & ~drafted.nan & ~bad, standing + passes, 0)
        last = jnp.take_along_axis(tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
        caches = {"verifier": scored.cache, "drafter": drafted.cache}
        by_drafter = jnp.arange(self.limit + 1)[None] < standing[:, None]
        counted = jnp.arange(self.limit + 1)[None] < counts[:, None]
        logs = logs_along(
            scored.p, scored.logits, state.sampling, tokens, counted,
            with_plain=state.wants_log_probs,
        )  # fmt: skip
        # The verifier has not read the tokens after its last pass.
        logs = jax.tree.map(lambda x: jnp.where(waiting[:, None], x, jnp.nan), logs)
        # Without a rollback rule the drafter's tokens do not count as drafts: none is ever
        # rejected.
        blocks = (0, 0) if rollback is None else (drafted.counts, standing)
        stood = None if rollback is None else standing.astype(jnp.float32)
        return Step(
            tokens=tokens,
            counts=counts,
            inner=state.inner.read_on(last, dict.fromkeys(caches, counts), caches),
            calls={"verifier": passes, "drafter": drafted.calls},
            log_probs=logs._replace(
                target=jnp.where(by_drafter, drafted.log_probs, logs.processed)
            ),
            drafted=blocks[0],
            accepted=blocks[1],
            deferrals=passes,
            rollbacks=waiting & (standing < drafted.counts),
            token_sum=stood,
            block_sum=stood,
            nan_in=_source_of_nan(bad, drafted.nan),
            sources=_models_of(state, by_drafter),
        )

    def _draft(
        self,
        params: Params,
        state: DecodeState,
        fallback: Any,
        rollback: Any,
        uniforms: Float32[Array, "B G U"],
    ) -> Drafted:
        """Draws tokens until the fallback rule defers, the limit is reached, or the text ends.

        The rule decides before a token is drawn, from its distribution. A row at its limit still
        reads its last token, in a pass of one token: so the drafter never lags.
        """
        rows, longest, _ = uniforms.shape
        start = state.inner.drafter
        # What the rollback rule reads.
        keeps_confidences = rollback is not None and rollback.reads_draft_confidence

        def put(buffer: Array | None, value: Any, index: Array) -> Array | None:
            return None if buffer is None else put_column(buffer, value, index)

        def step(carry: _Writing) -> _Writing:
            index, drafted = carry.step, carry.drafted
            logits, _, cache = self.drafter.extend(
                params, drafted.cache, carry.last[:, None], start.positions + index
            )
            sampling = with_processing(state.sampling, carry.processing)
            q = distributions(logits[:, 0], sampling)
            reads = fallback.reads_draft_confidence or keeps_confidences
            q_conf = jax.vmap(confidence)(logits[:, 0]) if reads else None
            defers = jax.vmap(lambda rule, *of: rule.defers(of[0], None, of[1], None))(
                fallback, q, q_conf
            )
            nan = carry.going & jnp.isnan(q[:, 0])
            draws = carry.going & ~defers & ~nan & (index < state.draft_limits)
            uniform = lax.dynamic_index_in_dim(uniforms, index, axis=1, keepdims=False)
            token = jax.vmap(draw)(q, uniform)
            full = state.lengths + index + 1 >= state.limits
            ended = draws & (end_tokens(token, self.eos_ids) | full)
            stop, complete = read_token(carry.stop, token)
            stopped = draws & complete
            drafted = Drafted(
                tokens=put_column(drafted.tokens, token, index),
                counts=drafted.counts + draws.astype(jnp.int32),
                log_probs=put_column(drafted.log_probs, _log_at(q, token), index),
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

        wide = (rows, longest + 1, self.vocab_size)
        none, zeros = jnp.zeros(wide[:1], bool), jnp.zeros(wide, jnp.float32)
        empty = Drafted(
            tokens=jnp.zeros(wide[:2], jnp.int32),
            counts=jnp.zeros(wide[:1], jnp.int32),
            log_probs=jnp.zeros(wide[:2], jnp.float32),
            probs=None if rollback is None else zeros,
            confidences=zeros if keeps_confidences else None,
            calls=jnp.zeros(wide[:1], jnp.int32),
            ended=none,
            stopped=none,
            nan=none,
            cache=start.cache,
        )
        last, processing = state.inner.tokens, state.sampling.processing
        first = _Writing(jnp.int32(0), empty, last, ~state.finished, state.stop, processing)
        return lax.while_loop(unfinished, step, first).drafted

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

        def run(before: Scored) -> Scored:
            return score(
                self.verifier,
                params,
                before.cache,
                state.sampling,
                powers_of_two(self.limit + 1),
                tokens,
                inner.verifier.positions,
                jnp.max(jnp.where(waiting, drafted.counts, 0)) + 1,
                with_confidence=with_confidence,
                with_logits=True,
            )

        none = jnp.zeros((*tokens.shape, self.vocab_size), jnp.float32)
        confidences = none if with_confidence else None
        before = Scored(none, confidences, None, none, inner.verifier.cache)
        return when(jnp.any(waiting), run, before)


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


class Response(NamedTuple):
    """The first response of a row.

    Attributes:
      first: the token from which the verifier begins.
      deferred: whether the verifier writes.
      log_probs: the response's tokens under the drafter's confidences.
      processing: the processors after the prompt, with which the verifier begins.
    """

    first: Int32[Array, " B"]
    deferred: Bool[Array, " B"]
    log_probs: Float32[Array, "B S"]
    processing: Processing | None


@dataclasses.dataclass(frozen=True)
class SequenceCascade(PairMethod):
    """One token a step: of the drafter, then of the verifier in rows that defer.

    Once a response of the drafter has ended, by an end-of-sequence token, a stop string or the
    row's limit, the rule decides. If it defers, the verifier writes a new response from the prompt,
    which replaces the first. Rows of a batch do so independently. Its parameters: `MethodParams`
    with `rules.SequenceChow` or `rules.SequenceChowLog`.
    """

    @property
    def independent_rows(self) -> bool:
        return True

    def check_rule(self, rule: Any) -> None:
        check_part("rule", rule, ("defers_response",), "rules.SequenceChow(strength=0.3)")

    def prefill(self, params: MethodParams, prompts: Prompts, max_length: int) -> SequentialState:
        state = super().prefill(params, prompts, max_length)
        rows = state.tokens.shape[0]
        return state._replace(
            extra=Response(
                first=state.tokens,
                deferred=jnp.zeros((rows,), bool),
                log_probs=jnp.zeros((rows, max_length), jnp.float32),
                processing=None,
            )
        )

    def begun(self, params: MethodParams, *rest: Any, **more: Any) -> DecodeState:
        state = super().begun(params, *rest, **more)
        response = state.inner.extra._replace(processing=state.sampling.processing)
        return state._replace(inner=state.inner._replace(extra=response))

    def committed(self, state: DecodeState) -> SequentialState:
        inner: SequentialState = state.inner
        assert inner.drafter is not None
        prompt = inner.verifier.positions - state.lengths
        first = jnp.where(inner.extra.deferred, prompt, inner.drafter.positions)
        return inner._replace(drafter=inner.drafter._replace(positions=first))

    def step(self, params: MethodParams, state: DecodeState) -> Step:
        inner: SequentialState = state.inner
        response: Response = inner.extra
        active = ~state.finished
        rows = {"verifier": active & response.deferred, "drafter": active & ~response.deferred}
        logits, caches = {}, {}
        for name, model in self.models.items():
            read = getattr(params, name), getattr(inner, name), inner.tokens
            logits[name], caches[name] = _pass(model, *read, self.vocab_size, rows[name])
        writing, drafting = rows["verifier"], rows["drafter"]
        current = jnp.where(response.deferred[:, None], logits["verifier"], logits["drafter"])
        probs = distributions(current, state.sampling)
        tokens = jax.vmap(draw)(probs, step_uniforms(state, num_uniforms(self.vocab_size)))
        nan = active & jnp.isnan(probs[:, 0])
        kept = active & ~nan
        counts = kept.astype(jnp.int32)
        target = _log_at(probs, tokens)[:, None]
        sure = jax.vmap(log_confidence)(current, tokens)[:, None]
        response = response._replace(
            log_probs=put_at(response.log_probs, sure, state.lengths, (kept & drafting)[:, None])
        )
        by_verifier = writing[:, None]
        calls = {name: wrote.astype(jnp.int32) for name, wrote in rows.items()}
        read_now = {name: counts * calls[name] for name in calls}
        return Step(
            tokens=tokens[:, None],
            counts=counts,
            inner=inner.read_on(tokens, read_now, caches)._replace(extra=response),
            calls=calls,
            # The verifier does not read the drafter's tokens.
            log_probs=LogProbs(
                plain=jnp.where(by_verifier, sure, jnp.nan),
                processed=jnp.where(by_verifier, target, jnp.nan),
                target=target,
            ),
            deferrals=read_now["verifier"],
            nan_in=_source_of_nan(nan & writing, nan & drafting),
            sources=_models_of(state, drafting[:, None]),
        )

    def stepped(self, params: MethodParams, before: DecodeState, after: DecodeState) -> DecodeState:
        """Lets the verifier start in rows whose response has ended and whose rule defers."""
        response: Response = after.inner.extra
        done = ~before.finished & ~response.deferred & after.finished & (after.ended_by != NAN)
        defers = lax.cond(
            jnp.any(done),
            jax.vmap(lambda rule, *of: rule.defers_response(*of)),
            lambda *_: jnp.zeros_like(done),
            per_row(params.rule, after.steps), response.log_probs, after.lengths,
        )  # fmt: skip
        return _restart(after, defers & done)


def _pass(
    model: LanguageModel, params: Params, read: HasRead, tokens: Array, vocab: int, rows: Array
) -> tuple[Array, Cache]:
    """A pass over one token of each row, `[B, V]` float32 logits; none if no row needs it."""

    def run(before: tuple[Array, Cache]) -> tuple[Array, Cache]:
        logits, _, cache = model.extend(params, before[1], tokens[:, None], read.positions)
        return logits[:, 0].astype(jnp.float32), cache

    none = jnp.zeros((tokens.size, vocab), jnp.float32)
    return when(jnp.any(rows), run, (none, read.cache))


def _restart(state: DecodeState, rows: Array) -> DecodeState:
    """Drops the responses in `rows [B]`, which the verifier writes again from the prompt."""
    inner: SequentialState = state.inner
    response: Response = inner.extra
    info = state.info

    def cleared(x: Any, value: float = 0) -> Any:
        return None if x is None else where_rows(rows, jnp.full_like(x, value), x)

    stop, processing = state.stop, state.sampling.processing
    if processing is not None and response.processing is not None:
        first = where_rows(rows, response.processing.state, processing.state)
        processing = dataclasses.replace(processing, state=first)
    if stop is not None:
        stop = stop._replace(states=where_rows(rows, stop.first, stop.states))
    return state._replace(
        stop=stop,
        sampling=with_processing(state.sampling, processing),
        tokens=cleared(state.tokens),
        lengths=cleared(state.lengths),
        ended_by=cleared(state.ended_by, RUNNING),
        inner=inner._replace(
            tokens=jnp.where(rows, response.first, inner.tokens),
            extra=response._replace(deferred=response.deferred | rows),
        ),
        info=info._replace(
            log_prob=jax.tree.map(cleared, info.log_prob),
            log_probs=jax.tree.map(lambda x: cleared(x, jnp.nan), info.log_probs),
            sources=cleared(info.sources, -1),
        ),
    )
