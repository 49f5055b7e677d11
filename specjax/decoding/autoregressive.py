"""Autoregressive decoding: one token per pass of one model."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.decoding.loop import LoopMethod
from specjax.decoding.state import add_log_probs, append, end_by_nan, step_uniforms
from specjax.platforms import entry
from specjax.sampling import drawn, num_uniforms
from specjax.types import (
    Array,
    Axes,
    Cache,
    DecodeState,
    LanguageModel,
    Params,
    PromptBatch,
    row_axes,
)


class AutoregressiveParams(NamedTuple):
    """Attributes: the model's parameters, under the name that its passes are counted under."""

    verifier: Params


class AutoregressiveState(NamedTuple):
    """Attributes: the last token `[B]`, its position `[B]`, and the cache without it."""

    tokens: Array  # [B]
    positions: Array  # [B]
    cache: Cache


@dataclasses.dataclass(frozen=True)
class Autoregressive(LoopMethod):
    """Decodes with one model. Its parameters: `AutoregressiveParams`.

    Attributes:
      model: the language model.
      eos_ids: tokens that end a row.
      partitioner: where arrays lie on a mesh; None for one device.
    """

    model: LanguageModel

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.model.vocab_size

    @property
    def model_names(self) -> tuple[str, ...]:
        """One model alone counts as the verifier."""
        return ("verifier",)

    @property
    def independent_rows(self) -> bool:
        """One token per row and pass, whatever the others do."""
        return True

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        """See `LoopMethod`."""
        return self.model.prompt_positions(input_lengths, prefix_lengths)

    def prefill(
        self, params: AutoregressiveParams, prompts: PromptBatch, max_length: int
    ) -> AutoregressiveState:
        """See `LoopMethod`."""
        filled = self.model.prefill(
            params.verifier,
            prompts.inputs,
            prompts.input_lengths,
            max_length,
            prompts.prefix,
            prompts.prefix_lengths,
        )
        return AutoregressiveState(filled.tokens, filled.positions, filled.cache)

    def inner_axes(self, inner: AutoregressiveState) -> Axes:
        """See `LoopMethod`."""
        axes = row_axes(inner._replace(cache=()))
        return axes._replace(cache=self.model.cache_axes(inner.cache))

    def step(self, params: AutoregressiveParams, state: DecodeState) -> DecodeState:
        """See `LoopMethod`."""
        inner: AutoregressiveState = state.inner
        with jax.named_scope("verifier_pass"):
            logits, _, cache = self.model.extend(
                params.verifier, inner.cache, inner.tokens[:, None], inner.positions
            )
        with jax.named_scope("draw"):
            uniforms = step_uniforms(state, num_uniforms(self.vocab_size))
            probs, tokens = jax.vmap(drawn)(logits[:, 0], state.sampling, uniforms)
        nan = jnp.isnan(probs[:, 0])
        counts = (~state.finished & ~nan).astype(jnp.int32)
        new, kept = append(state, tokens[:, None], counts, self.eos_ids)
        log_p = jnp.log(jax.vmap(entry)(probs, tokens))[:, None]
        info = add_log_probs(new.info, kept, log_p, log_p, state.lengths)
        passes = (~state.finished).astype(jnp.int32)
        no_draft = (~state.finished)[:, None].astype(jnp.int32)
        info = info._replace(
            calls={"verifier": info.calls["verifier"] + passes},
            deferrals=info.deferrals + passes,
            drafted_lengths=info.drafted_lengths + no_draft,
            accepted_lengths=info.accepted_lengths + no_draft,
        )
        inner = AutoregressiveState(
            jnp.where(counts > 0, tokens, inner.tokens), inner.positions + counts, cache
        )
        new = new._replace(inner=inner, info=info, steps=state.steps + passes)
        return end_by_nan(new, jnp.where(nan & ~state.finished, 0, -1))
