"""The oracle cascade: both models read every token, and the rule knows both.

It shows the value of a deferral rule, whatever its cost: Figure 1 of Faster Cascades via
Speculative Decoding (arXiv 2405.19261), section 3.2 and Remark 1.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decoding.loop import MethodParams, per_row
from specjax.decoding.roundless import (
    PairMethod,
    SequentialState,
    log_at,
    models_of,
    source_of_nan,
)
from specjax.decoding.state import Step, step_uniforms
from specjax.processing import distributions, logs_along
from specjax.rules.sequential import check_deferral
from specjax.sampling import confidence, draw, num_uniforms
from specjax.types import DecodeState


@dataclasses.dataclass(frozen=True)
class OracleCascade(PairMethod):
    """One token a step: the verifier's if the rule defers, else the drafter's.

    Its parameters: `MethodParams` with any deferral rule, such as `rules.Diff` or `rules.DiffLog`.
    `DecodeInfo.deferrals` counts the verifier's tokens; both models make a pass for every token.

    Attributes:
      verifier: the large model.
      drafter: the small model.
      eos_ids: tokens that end a row.
      partitioner: the layout of arrays on a mesh; None for one device.
    """

    @property
    def independent_rows(self) -> bool:
        """True: one token per row and step."""
        return True

    def check_rule(self, rule: Any) -> None:
        """Raises TypeError unless `rule` is a deferral rule."""
        check_deferral("rule", rule, "rules.Diff(strength=0.1)")

    def step(self, params: MethodParams, state: DecodeState) -> Step:
        inner: SequentialState = state.inner
        rule = per_row(params.rule, state.steps)
        logits, caches = {}, {}
        for name, model in self.models.items():
            read, own = getattr(inner, name), getattr(params, name)
            out = model.extend(own, read.cache, inner.tokens[:, None], read.positions)
            logits[name], caches[name] = out.logits[:, 0], out.cache
        large, small = logits["verifier"], logits["drafter"]
        p, q = (distributions(x, state.sampling) for x in (large, small))
        p_conf = jax.vmap(confidence)(large) if rule.reads_verifier_confidence else None
        q_conf = jax.vmap(confidence)(small) if rule.reads_draft_confidence else None
        defers = jax.vmap(lambda rule, *of: rule.defers(*of))(rule, q, p, q_conf, p_conf)
        target = jnp.where(defers[:, None], p, q)
        tokens = jax.vmap(draw)(target, step_uniforms(state, num_uniforms(self.vocab_size)))
        nan = source_of_nan(jnp.isnan(p[:, 0]), jnp.isnan(q[:, 0]))
        counts = (~state.finished & (nan < 0)).astype(jnp.int32)
        logs = logs_along(
            p[:, None],
            large[:, None],
            state.sampling,
            tokens[:, None],
            counts[:, None] > 0,
            with_conf=state.wants_log_conf,
        )
        return Step(
            tokens=tokens[:, None],
            counts=counts,
            inner=inner.read_on(tokens, dict.fromkeys(caches, counts), caches),
            calls=dict.fromkeys(caches, 1),
            log_conf=logs.conf,
            log_p=logs.p,
            log_target=log_at(target, tokens)[:, None],
            deferrals=counts * defers.astype(jnp.int32),
            nan_in=nan,
            sources=models_of(state, lambda: ~defers[:, None]),
        )
