"""Speculative decoding: rounds of drafting and verification, for any rule.

Source: Leviathan et al. (arXiv 2211.17192); Faster Cascades via Speculative Decoding
(arXiv 2405.19261), Algorithm 4.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.decoding.compilation import jit_steps
from specjax.decoding.loop import (
    DecodeInfo,
    DecodeState,
    Loop,
    PromptBatch,
    append,
    check_eos_ids,
    check_stops,
    run_loop,
    step_uniforms,
)
from specjax.decoding.round import Round, RoundInfo, RoundState
from specjax.drafting import Drafter
from specjax.rules import Rule
from specjax.types import Array, LanguageModel, Params
from specjax.verification import Block, Verification


@dataclasses.dataclass(frozen=True)
class Speculative(Loop):
    """Decodes with a drafter and a verifier; static and hashable.

    Parameters are `(verifier's, drafter's)`; a neural drafter's are
    `(model parameters, stopping parameters)`.

    Attributes:
      verifier: the large model.
      drafter: the drafter.
      verification: the verification algorithm.
      eos_ids: tokens that end a row.

    Raises:
      ValueError: if the parts do not fit together (see `Round`).
    """

    verifier: LanguageModel
    drafter: Drafter
    verification: Verification = Block()  # noqa: RUF009  immutable
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.round  # noqa: B018  its checks
        check_eos_ids(self.eos_ids, self.verifier.vocab_size)

    @property
    def round(self) -> Round:
        """One round of it."""
        return Round(self.verifier, self.drafter, self.verification)

    @property
    def max_draft(self) -> int:
        """See `Loop`."""
        return self.drafter.max_draft

    @property
    def main_model(self) -> LanguageModel:
        """See `Loop`."""
        return self.verifier

    def prefill(self, params: Params, prompt: PromptBatch, max_length: int) -> RoundState:
        """See `Loop`."""
        inputs, input_lengths, *prefix = prompt
        filled = self.verifier.prefill(params[0], inputs, input_lengths, max_length, *prefix)
        drafter = self.drafter.prefill(params[1], inputs, input_lengths, max_length, *prefix)
        carry = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (inputs.shape[0], *x.shape)),
            self.verification.init_carry(self.max_draft),
        )
        return RoundState(filled.tokens, filled.positions, filled.cache, drafter, carry)

    def run(
        self,
        params: Params,
        rule: Rule,
        state: DecodeState,
        stop_after: int | Array,
        until_finished: int | Array | None = None,
    ) -> DecodeState:
        """Decodes on for at most `stop_after` rounds. The state is donated: use the result.

        Args:
          params: `(verifier's, drafter's)`.
          rule: the rule; its strengths are traced, scalar or `[B]`, so a sweep compiles once.
          state: from `init`, `run` or `insert_rows`.
          stop_after: how many rounds.
          until_finished: return once so many rows are finished, those that were before included;
            all by default. Both are traced.

        Returns:
          The state; the rows are finished, or the rounds are done.

        Raises:
          ValueError: for a rule that does not fit the drafter or the batch, or a stop below 1.
        """
        self.round.check_rule(rule)
        stops = check_stops(state, stop_after, until_finished)
        for name, leaf in jax.tree_util.tree_leaves_with_path(rule):
            if jnp.shape(leaf) not in ((), state.finished.shape):
                raise ValueError(
                    f"rule{jax.tree_util.keystr(name)} must be scalar or [B] = "
                    f"{state.finished.shape}, got shape {jnp.shape(leaf)}"
                )
        return jitted_run()(self, params, rule, state, *stops)


def _run(
    loop: Speculative,
    params: Params,
    rule: Rule,
    state: DecodeState,
    stop_after: Array,
    until_finished: Array,
) -> DecodeState:
    one_round = loop.round

    def step(state: DecodeState) -> DecodeState:
        active = ~state.finished
        uniforms = step_uniforms(state, one_round.num_uniforms)
        outcome, inner, seen = one_round(
            params, rule, state.sampling, state.inner, uniforms, active
        )
        counts = jnp.where(active, outcome.counts, 0)
        new, kept = append(state, outcome.tokens, counts, loop.eos_ids)
        info = _add(new.info, seen, active, kept)
        return new._replace(inner=one_round.commit(state.inner, inner, counts), info=info)

    return run_loop(step, state, stop_after, until_finished)


jitted_run = jit_steps(_run, static_argnums=0, donate_argnums=3)


def _add(info: DecodeInfo, seen: RoundInfo, active: Array, kept: Array) -> DecodeInfo:
    """Adds one round to the totals of the active rows."""
    once = active.astype(jnp.int32)
    real = active.astype(jnp.float32)
    position = jnp.arange(info.drafted_at.shape[1])[None]
    at = [(position < n[:, None]) & active[:, None] for n in (seen.drafted, seen.accepted)]
    log_p, log_target = (jnp.where(kept, x, 0.0).sum(axis=1) for x in (seen.log_p, seen.log_target))
    return info._replace(
        rounds=info.rounds + once,
        drafter_calls=info.drafter_calls + once * seen.drafter_calls,
        verifier_calls=info.verifier_calls + once,
        drafted=info.drafted + once * seen.drafted,
        accepted=info.accepted + once * seen.accepted,
        drafted_at=info.drafted_at + at[0].astype(jnp.int32),
        accepted_at=info.accepted_at + at[1].astype(jnp.int32),
        token_sum=info.token_sum + real * seen.token_sum,
        block_sum=info.block_sum + real * seen.block_sum,
        log_p=info.log_p + log_p,
        log_target=info.log_target + log_target,
    )
