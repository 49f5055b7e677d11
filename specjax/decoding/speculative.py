"""Speculative decoding: rounds of drafting and verification, for any rule.

Source: Leviathan et al. (arXiv 2211.17192); Faster Cascades via Speculative Decoding
(arXiv 2405.19261), Algorithm 4.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.decoding.loop import Method, MethodParams, check_pair
from specjax.decoding.outcome import OWN, RoundState
from specjax.decoding.round import Round
from specjax.decoding.state import Step, step_uniforms
from specjax.types import (
    Axes,
    DecodeState,
    Drafter,
    LanguageModel,
    Params,
    Prompts,
    Rule,
    Verification,
)
from specjax.verification import Block


@dataclasses.dataclass(frozen=True)
class Speculative(Method):
    """Decodes with a drafter and a verifier. Its parameters: `MethodParams`.

    Attributes:
      verifier: the large model.
      drafter: the drafter.
      verification: the verification algorithm.
      widths: the widths of the verifier's passes; see `Round`.
      process_drafts: whether processors change the drafter's distributions too; see `Round`.
    """

    verifier: LanguageModel
    drafter: Drafter
    verification: Verification = Block()  # noqa: RUF009  immutable
    widths: tuple[int, ...] | None = None
    process_drafts: bool = True

    def __post_init__(self) -> None:
        self.round  # noqa: B018  its checks
        super().__post_init__()

    @functools.cached_property
    def round(self) -> Round:
        """A round of it."""
        parts = self.verifier, self.drafter, self.verification, self.widths
        return Round(*parts, process_drafts=self.process_drafts)

    @property
    def vocab_size(self) -> int:
        return self.verifier.vocab_size

    @property
    def max_draft(self) -> int:
        return self.drafter.max_draft

    @property
    def min_draft(self) -> int:
        return self.max_draft if self.verification.has_carry else 0

    @property
    def drafts_trees(self) -> bool:
        return self.drafter.traits.drafts_trees

    @property
    def independent_rows(self) -> bool:
        return self.drafter.traits.independent_rows and len(self.round.verifier_widths) == 1

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.round.model_names

    @property
    def nan_sources(self) -> tuple[str, ...]:
        return self.round.nan_sources

    @property
    def source_names(self) -> tuple[str, ...]:
        return (*OWN, *self.drafter.source_names)

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        models = (self.verifier, self.drafter)
        first, second = (x.prompt_positions(input_lengths, prefix_lengths) for x in models)
        return np.maximum(first, second)

    def prefill(self, params: MethodParams, prompts: Prompts, max_length: int) -> RoundState:
        return self.round.prefill(params, prompts, max_length)

    def committed(self, state: DecodeState) -> RoundState:
        return state.inner

    def inner_axes(self, inner: RoundState) -> Axes:
        return self.round.state_axes(inner)

    def check_rule(self, rule: Rule) -> None:
        self.round.check_rule(rule)

    def check_params(self, params: Params, rows: int) -> None:
        check_pair(self, params, rows)

    def describe(self) -> dict[str, Any]:
        return {
            **super().describe(),
            "drafter": self.drafter.describe(),
            "verification": repr(self.verification),
            "widths": list(self.round.verifier_widths),
        }

    def step(self, params: MethodParams, state: DecodeState) -> Step:
        one_round = self.round
        active = ~state.finished
        uniforms = step_uniforms(state, one_round.num_uniforms)
        limits = state.draft_limits
        if self.verification.has_carry:
            limits = jnp.full_like(limits, self.max_draft)  # checked by `init`
        outcome, inner, seen = one_round(
            params, state.sampling, state.inner, uniforms, active, limits,
            with_log_conf=state.wants_log_conf, with_sources=state.wants_sources,
        )  # fmt: skip
        counts = jnp.where(active & (seen.nan_in < 0), outcome.counts, 0)
        emitted = outcome.tokens, counts
        return Step(
            *emitted,
            inner=one_round.commit(state.inner, inner, *emitted, outcome.hidden),
            calls=seen.row_calls,
            log_conf=seen.logs.conf,
            log_p=seen.logs.p,
            log_target=seen.log_target,
            drafted=seen.drafted,
            accepted=seen.accepted,
            deferrals=1,
            rollbacks=seen.accepted < seen.drafted,
            token_sum=seen.token_sum,
            block_sum=seen.block_sum,
            nan_in=seen.nan_in,
            nodes=seen.nodes,
            sources=outcome.sources,
        )
