"""Autoregressive decoding: one token per pass of one model."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.decoding.compilation import jit_steps
from specjax.decoding.loop import (
    DecodeState,
    Loop,
    PromptBatch,
    append,
    check_eos_ids,
    check_stops,
    run_loop,
    step_uniforms,
)
from specjax.sampling import distribution, draw, num_uniforms
from specjax.types import Array, Cache, LanguageModel, Params


class _Inner(NamedTuple):
    tokens: Array  # [B]
    positions: Array  # [B]
    cache: Cache


@dataclasses.dataclass(frozen=True)
class Autoregressive(Loop):
    """Decodes with one model; static and hashable.

    Attributes:
      model: the language model.
      eos_ids: tokens that end a row.
    """

    model: LanguageModel
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_eos_ids(self.eos_ids, self.model.vocab_size)

    @property
    def max_draft(self) -> int:
        """See `Loop`."""
        return 0

    @property
    def main_model(self) -> LanguageModel:
        """See `Loop`."""
        return self.model

    def prefill(self, params: Params, prompt: PromptBatch, max_length: int) -> _Inner:
        """See `Loop`."""
        inputs, input_lengths, *prefix = prompt
        filled = self.model.prefill(params, inputs, input_lengths, max_length, *prefix)
        return _Inner(filled.tokens, filled.positions, filled.cache)

    def run(
        self,
        params: Params,
        state: DecodeState,
        stop_after: int | Array,
        until_finished: int | Array | None = None,
    ) -> DecodeState:
        """Decodes on for at most `stop_after` steps; arguments as in `Speculative.run`."""
        stops = check_stops(state, stop_after, until_finished)
        return jitted_run()(self, params, state, *stops)


def _run(
    loop: Autoregressive,
    params: Params,
    state: DecodeState,
    stop_after: Array,
    until_finished: Array,
) -> DecodeState:
    def step(state: DecodeState) -> DecodeState:
        inner: _Inner = state.inner
        logits, _, cache = loop.model.extend(
            params, inner.cache, inner.tokens[:, None], inner.positions
        )
        probs = jax.vmap(distribution)(logits[:, 0], state.sampling)
        uniforms = step_uniforms(state, num_uniforms(loop.model.vocab_size))
        tokens = jax.vmap(draw)(probs, uniforms)
        active = ~state.finished
        new, kept = append(state, tokens[:, None], active.astype(jnp.int32), loop.eos_ids)
        once = kept[:, 0].astype(jnp.int32)
        log_p = jnp.log(jnp.take_along_axis(probs, tokens[:, None], axis=1)[:, 0])
        log_p = jnp.where(kept[:, 0], log_p, 0.0)
        info = new.info
        info = info._replace(
            rounds=info.rounds + once,
            verifier_calls=info.verifier_calls + once,
            log_p=info.log_p + log_p,
            log_target=info.log_target + log_p,
        )
        inner = _Inner(jnp.where(active, tokens, inner.tokens), inner.positions + once, cache)
        return new._replace(inner=inner, info=info)

    return run_loop(step, state, stop_after, until_finished)


jitted_run = jit_steps(_run, static_argnums=0, donate_argnums=2)
