"""The oracle cascade: both models read every token, and the rule knows both.

It shows what a deferral rule is worth, whatever it costs: Figure 1 of Faster Cascades via
Speculative Decoding (arXiv 2405.19261), section 3.2 and Remark 1.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

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
from specjax.decoding.state import add_log_probs, append, end_by_nan, step_uniforms
from specjax.rules import check_deferral
from specjax.sampling import confidence, distribution, draw, num_uniforms
from specjax.types import DecodeState


@dataclasses.dataclass(frozen=True)
class OracleCascade(PairMethod):
    """One token a step, of the verifier where the rule defers, else of the drafter.

    Its parameters: `CascadeParams` with any deferral rule, such as `rules.Diff` or `rules.DiffLog`.
    `DecodeInfo.deferrals` counts the verifier's tokens; both models make a pass for every token.

    Attributes:
      verifier: the large model.
      drafter: the small model.
      eos_ids: tokens that end a row.
      partitioner: where arrays lie on a mesh; None for one device.
    """

    @property
    def independent_rows(self) -> bool:
        """One token per row and step, whatever the others do."""
        return True

    def check_rule(self, rule: Any) -> None:
        """Raises TypeError unless the rule defers or does not."""
        check_deferral("rule", rule, "rules.Diff(alpha=0.1)")

    def step(self, params: CascadeParams, state: DecodeState) -> DecodeState:
        """See `LoopMethod`."""
        inner: CascadeState = state.inner
        rule = per_row(params.rule, state.steps)
        read = []
        for model, own, reader in (
            (self.verifier, params.verifier, inner.verifier),
            (self.drafter, params.drafter, inner.drafter),
        ):
            logits, _, cache = model.extend(
                own, reader.cache, inner.tokens[:, None], reader.positions
            )
            read.append((logits[:, 0], cache))
        (large, large_cache), (small, small_cache) = read
        p, q = (jax.vmap(distribution)(logits, state.sampling) for logits in (large, small))
        p_conf = jax.vmap(confidence)(large) if rule.reads_verifier_confidence else None
        q_conf = jax.vmap(confidence)(small) if rule.reads_draft_confidence else None
        defers = jax.vmap(lambda rule, *of: rule.defers(*of))(rule, q, p, q_conf, p_conf)
        target = jnp.where(defers[:, None], p, q)
        tokens = jax.vmap(draw)(target, step_uniforms(state, num_uniforms(self.vocab_size)))
        nan = source_of_nan(jnp.isnan(p[:, 0]), jnp.isnan(q[:, 0]))
        active = ~state.finished
        counts = (active & (nan < 0)).astype(jnp.int32)
        new, kept = append(state, tokens[:, None], counts, self.eos_ids)
        log_p, log_target = (log_at(x, tokens)[:, None] for x in (p, target))
        info = add_log_probs(new.info, kept, log_p, log_target, state.lengths)
        passes = active.astype(jnp.int32)
        nothing = jnp.zeros_like(passes)
        info = info._replace(
            **step_counts(state, nothing, nothing),
            calls={name: info.calls[name] + passes for name in info.calls},
            deferrals=info.deferrals + counts * defers.astype(jnp.int32),
        )
        inner = inner._replace(
            tokens=jnp.where(counts > 0, tokens, inner.tokens),
            verifier=Reader(inner.verifier.positions + counts, large_cache),
            drafter=Reader(inner.drafter.positions + counts, small_cache),
        )
        new = new._replace(inner=inner, info=info, steps=state.steps + passes)
        return end_by_nan(new, jnp.where(active, nan, -1))
