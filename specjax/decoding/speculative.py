"""Speculative decoding: rounds of drafting and verification, for any rule.

Source: Leviathan et al. (arXiv 2211.17192); Faster Cascades via Speculative Decoding
(arXiv 2405.19261), Algorithm 4.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.decoding.checks import check_strengths
from specjax.decoding.loop import LoopMethod
from specjax.decoding.outcome import RoundInfo, RoundParams, RoundState
from specjax.decoding.round import Round
from specjax.decoding.state import add_log_probs, append, end_by_nan, step_uniforms
from specjax.types import (
    Array,
    Axes,
    DecodeInfo,
    DecodeState,
    Drafter,
    LanguageModel,
    Params,
    PromptBatch,
    Rule,
    Verification,
)
from specjax.verification import Block


@dataclasses.dataclass(frozen=True)
class Speculative(LoopMethod):
    """Decodes with a drafter and a verifier. Its parameters: `RoundParams`.

    Attributes:
      verifier: the large model.
      drafter: the drafter.
      verification: the verification algorithm.
      widths: how many tokens a pass of the verifier may read; see `Round`.
      eos_ids: tokens that end a row.
      partitioner: where arrays lie on a mesh; None for one device.

    Raises:
      TypeError: if a part is not what it must be.
      ValueError: if the parts do not fit together (see `Round`).
    """

    verifier: LanguageModel
    drafter: Drafter
    verification: Verification = Block()  # noqa: RUF009  immutable
    widths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self.round  # noqa: B018  its checks
        super().__post_init__()

    @property
    def round(self) -> Round:
        """One round of it."""
        return Round(self.verifier, self.drafter, self.verification, self.widths)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.verifier.vocab_size

    @property
    def max_draft(self) -> int:
        """G."""
        return self.drafter.max_draft

    @property
    def min_draft(self) -> int:
        """G under a verification with a carry, else 0."""
        return self.max_draft if self.verification.has_carry else 0

    @property
    def independent_rows(self) -> bool:
        """Where drafts are, and all blocks are read in one width: another rounds otherwise."""
        return self.drafter.traits.independent_rows and len(self.round.verifier_widths) == 1

    @property
    def model_names(self) -> tuple[str, ...]:
        """The verifier's, then those of the drafter's models."""
        return self.round.model_names

    @property
    def nan_sources(self) -> tuple[str, ...]:
        """The verifier, the drafter, the rule."""
        return self.round.nan_sources

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        """See `LoopMethod`."""
        models = (self.verifier, self.drafter)
        first, second = (x.prompt_positions(input_lengths, prefix_lengths) for x in models)
        return np.maximum(first, second)

    def prefill(self, params: RoundParams, prompts: PromptBatch, max_length: int) -> RoundState:
        """See `LoopMethod`."""
        return self.round.prefill(
            params,
            prompts.inputs,
            prompts.input_lengths,
            max_length,
            prompts.prefix,
            prompts.prefix_lengths,
        )

    def inner_axes(self, inner: RoundState) -> Axes:
        """See `LoopMethod`."""
        return self.round.state_axes(inner)

    def check_rule(self, rule: Rule) -> None:
        """Raises TypeError or ValueError for what is no rule, or does not fit the drafter."""
        self.round.check_rule(rule)

    def check_params(self, params: Params, state: DecodeState) -> None:
        """See `LoopMethod`."""
        if not isinstance(params, RoundParams):
            raise TypeError(
                f"params must be decoding.RoundParams(verifier=, drafter=, rule=), got "
                f"{type(params).__name__}"
            )
        self.check_rule(params.rule)
        check_strengths(params.rule, state.ended_by.shape[0])

    def init(self, params: RoundParams, prompts: PromptBatch, **sizes: Any) -> DecodeState:
        """See `Method`."""
        asked = prompts.draft_limits
        limits = np.asarray(self.max_draft if asked is None else asked)
        if self.verification.has_carry and np.any(limits < self.max_draft):
            raise ValueError(
                f"draft_limits must be None or {self.max_draft} in every row, got "
                f"{limits.tolist()}: {type(self.verification).__name__} needs drafts of a fixed "
                "length"
            )
        return super().init(params, prompts, **sizes)

    def describe(self) -> dict[str, Any]:
        """See `Method`."""
        return {
            **super().describe(),
            "drafter": self.drafter.describe(),
            "verification": repr(self.verification),
            "widths": list(self.round.verifier_widths),
        }

    def step(self, params: RoundParams, state: DecodeState) -> DecodeState:
        """One round."""
        one_round = self.round
        active = ~state.finished
        uniforms = step_uniforms(state, one_round.num_uniforms)
        limits = state.draft_limits
        if self.verification.has_carry:
            limits = jnp.full_like(limits, self.max_draft)  # as `init` has checked
        outcome, inner, seen = one_round(
            params, state.sampling, state.inner, uniforms, active, limits
        )
        counts = jnp.where(active & (seen.nan_in < 0), outcome.counts, 0)
        new, kept = append(state, outcome.tokens, counts, self.eos_ids)
        info = add_log_probs(new.info, kept, seen.log_p, seen.log_target, state.lengths)
        new = new._replace(
            inner=one_round.commit(state.inner, inner, outcome.tokens, counts),
            info=_add(info, seen, active),
            steps=state.steps + active.astype(jnp.int32),
        )
        return end_by_nan(new, jnp.where(active, seen.nan_in, -1))


def _add(info: DecodeInfo, seen: RoundInfo, active: Array) -> DecodeInfo:
    """Adds one round to the totals of the active rows."""
    once = active.astype(jnp.int32)
    real = active & (seen.nan_in < 0)
    length = jnp.arange(info.drafted_lengths.shape[1])[None]
    hits = [(length == n[:, None]) & active[:, None] for n in (seen.drafted, seen.accepted)]
    return info._replace(
        calls={name: info.calls[name] + once * seen.row_calls[name] for name in info.calls},
        drafted_lengths=info.drafted_lengths + hits[0].astype(jnp.int32),
        accepted_lengths=info.accepted_lengths + hits[1].astype(jnp.int32),
        token_sum=info.token_sum + jnp.where(real, seen.token_sum, 0.0),
        block_sum=info.block_sum + jnp.where(real, seen.block_sum, 0.0),
        deferrals=info.deferrals + once,
        rollbacks=info.rollbacks + (active & (seen.accepted < seen.drafted)).astype(jnp.int32),
    )
