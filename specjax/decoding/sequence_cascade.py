"""The sequence cascade: the drafter writes a whole response, which the verifier may replace.

Source: Faster Cascades via Speculative Decoding (arXiv 2405.19261), section 2 and eq. 1.

Axes: B rows, S cache length, V vocabulary.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from specjax.checks import check_part
from specjax.decoding.history import put_at
from specjax.decoding.loop import MethodParams, per_row
from specjax.decoding.roundless import (
    HasRead,
    PairMethod,
    SequentialState,
    log_at,
    models_of,
    source_of_nan,
)
from specjax.decoding.state import Step, step_uniforms
from specjax.processing import distributions, with_processing
from specjax.sampling import draw, log_confidence, num_uniforms
from specjax.types import (
    NAN,
    RUNNING,
    Cache,
    DecodeInfo,
    DecodeState,
    LanguageModel,
    Params,
    Processing,
    Prompts,
)
from specjax.types.pytrees import where_rows


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

    def _begun(self, params: MethodParams, *rest: Any, **more: Any) -> DecodeState:
        state = super()._begun(params, *rest, **more)
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
        log_probs = log_at(probs, tokens)[:, None]
        sure = jax.vmap(log_confidence)(current, tokens)[:, None]
        response = response._replace(
            log_probs=put_at(response.log_probs, sure, state.lengths, (kept & drafting)[:, None])
        )
        own_text = writing[:, None]
        calls = {name: wrote.astype(jnp.int32) for name, wrote in rows.items()}
        read_now = {name: counts * calls[name] for name in calls}
        return Step(
            tokens=tokens[:, None],
            counts=counts,
            inner=inner.read_on(tokens, read_now, caches)._replace(extra=response),
            calls=calls,
            # The verifier does not read the drafter's tokens.
            log_conf=jnp.where(own_text, sure, jnp.nan),
            log_p=jnp.where(own_text, log_probs, jnp.nan),
            log_target=log_probs,
            deferrals=read_now["verifier"],
            nan_in=source_of_nan(nan & writing, nan & drafting),
            sources=models_of(state, lambda: drafting[:, None]),
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

    def run(cache: Cache) -> tuple[Array, Cache]:
        logits, _, cache = model.extend(params, cache, tokens[:, None], read.positions)
        return logits[:, 0].astype(jnp.float32), cache

    def skip(cache: Cache) -> tuple[Array, Cache]:
        return jnp.zeros((tokens.size, vocab), jnp.float32), cache

    return lax.cond(jnp.any(rows), run, skip, read.cache)


def _restart(state: DecodeState, rows: Array) -> DecodeState:
    """Drops the responses in `rows [B]`, which the verifier writes again from the prompt."""
    inner: SequentialState = state.inner
    response: Response = inner.extra
    info: DecodeInfo = state.info

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
            log_conf=cleared(info.log_conf),
            log_p=cleared(info.log_p),
            log_target=cleared(info.log_target),
            token_log_conf=cleared(info.token_log_conf, jnp.nan),
            token_log_p=cleared(info.token_log_p, jnp.nan),
            token_log_target=cleared(info.token_log_target, jnp.nan),
            token_sources=cleared(info.token_sources, -1),
        ),
    )
