"""One round: draft, score, rule, verify.

Axes: B rows, G longest block, V vocabulary, W tokens that the verifier reads.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from specjax.decoding import drafter_calls
from specjax.decoding import history as history_lib
from specjax.decoding.guards import check_parts, check_rule
from specjax.decoding.loop import MethodParams, per_row
from specjax.decoding.outcome import (
    AfterBlock,
    RoundInfo,
    RoundMark,
    RoundOutcome,
    RoundState,
    block_targets,
    emitted,
    last_token,
    nan_in_passes,
    next_target,
    report,
    round_sources,
)
from specjax.decoding.scoring import Scored, Wanted, check_widths, powers_of_two, score
from specjax.decoding.tree import (
    Judgement,
    along,
    draft_probs,
    draw_after,
    judge,
    kept,
    node_counts,
)
from specjax.errors import UserError
from specjax.platforms import row, rows_in_tiles
from specjax.processing import advance, logs_along, unprocessed
from specjax.sampling import num_uniforms
from specjax.types import (
    Axes,
    DraftBlock,
    Drafter,
    DraftInputs,
    LanguageModel,
    Params,
    Prompts,
    Rule,
    Sampling,
    ScoredBlock,
    Verification,
    row_axes,
)
from specjax.types.pytrees import where_rows


@dataclasses.dataclass(frozen=True)
class Round:
    """The parts of a round; static and hashable. Its parameters are `MethodParams`.

    Attributes:
      verifier: the large model.
      drafter: the drafter.
      verification: the algorithm.
      widths: the numbers of tokens that a pass of the verifier may read, increasing up to G + 1;
        each pass takes the smallest width that holds the longest draft of an active row. None: only
        G + 1 if drafts have a fixed length, else powers of two. Each width is compiled.
      name: the verifier's; its passes are counted under it.
      nested: whether a round above reviews this round's output. It may then commit more tokens than
        this round emitted; the verifier reads up to G + 1 of them in the pass over the next block,
        for which a width of 2 G + 2 is added. Verification must leave no carry.
      process_drafts: whether processors change the drafter's distributions too.
    """

    verifier: LanguageModel
    drafter: Drafter
    verification: Verification
    widths: tuple[int, ...] | None = None
    name: str = "verifier"
    nested: bool = False
    process_drafts: bool = True

    def __post_init__(self) -> None:
        check_parts(self.verifier, self.drafter, self.verification, self.nested)
        names = self.model_names
        if len(set(names)) < len(names):
            raise UserError(f"models of a round must have different names, got {', '.join(names)}")
        if self.widths is not None:
            check_widths(self.widths, self.drafter.max_draft + 1)

    @property
    def _reader(self) -> LanguageModel:
        """The verifier, which returns the states that the drafter reads."""
        boundaries = self.drafter.traits.boundaries
        return self.verifier.reading(boundaries) if boundaries else self.verifier

    @property
    def num_uniforms(self) -> int:
        return sum(self._uniforms)

    @property
    def _uniforms(self) -> tuple[int, int, int]:
        """The numbers for drafting, for acceptance and for the next token, which share none."""
        per_draw = num_uniforms(self.verifier.vocab_size)
        return self.drafter.num_uniforms, self.drafter.max_draft, per_draw

    @property
    def model_names(self) -> tuple[str, ...]:
        return (self.name, *self.drafter.model_names)

    @property
    def nan_sources(self) -> tuple[str, ...]:
        return (self.name, "drafter", "rule")

    @property
    def verifier_widths(self) -> tuple[int, ...]:
        """The widths that are compiled."""
        full = self.drafter.max_draft + 1
        usual = (full,) if self.drafter.traits.fixed_length else powers_of_two(full)
        widths = usual if self.widths is None else self.widths
        # A nested round may lag behind by as many tokens as it reads otherwise.
        return (*widths, 2 * full) if self.nested else widths

    def check_rule(self, rule: Rule) -> None:
        check_rule(rule, self.drafter, nested=self.nested)

    def prefill(self, params: MethodParams, prompts: Prompts, max_length: int) -> RoundState:
        rows, longest = prompts.inputs.shape[0], self.drafter.max_draft
        filled = self._reader.prefill(params.verifier, prompts, max_length)
        drafter = drafter_calls.prefill(self.drafter, params.drafter, prompts, max_length, filled)
        carry = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (rows, *x.shape)),
            self.verification.init_carry(longest),
        )
        history = history_lib.begin(filled, max_length, longest) if self.nested else None
        credit = jnp.zeros(filled.positions.shape, jnp.float32)
        read = (filled.tokens, filled.positions, filled.cache)
        return RoundState(*read, drafter, carry, credit, history)

    def __call__(
        self,
        params: MethodParams,
        sampling: Sampling,
        state: RoundState,
        uniforms: Array,
        active: Bool[Array, " B"],
        limits: Int32[Array, " B"],
        *,
        with_confidence: bool = False,
        with_log_conf: bool = False,
        with_sources: bool = False,
    ) -> tuple[RoundOutcome, RoundState, RoundInfo]:
        """Runs one round for all rows.

        Args:
          params: the parameters.
          sampling: fields `[B]`.
          state: the rows' state. Positions are not moved: see `commit`.
          uniforms: in [0, 1), independent.
          active: ignore the results of other rows.
          limits: in 0 .. G, the longest block of each row.
          with_confidence: whether to return the verifier's confidences (static).
          with_log_conf: whether to return log-probabilities under the verifier itself (static).
          with_sources: whether to return where the tokens came from (static).

        Returns:
          The output, the state with caches filled, and statistics.
        """
        self.check_rule(params.rule)
        params = params._replace(rule=per_row(params.rule, active))
        ends = np.cumsum(self._uniforms)[:-1].tolist()
        for_draft, for_accept, for_next = jnp.split(uniforms, ends, axis=1)
        limits = jnp.where(active, limits, 0)
        state, behind = _caught_up(self.verifier, params.verifier, state, active)
        inputs = DraftInputs(state.tokens, limits, for_draft, sampling, active)
        inputs = self._prepared(params, state, inputs)
        block, drafter = drafter_calls.propose(
            self.drafter,
            params.drafter,
            state.drafter,
            inputs,
            with_confidence=params.rule.reads_draft_confidence,
            with_sources=with_sources,
        )
        calls = {self.name: behind + 1, **block.calls}
        wanted = Wanted(
            sampling,
            with_confidence or params.rule.reads_verifier_confidence,
            self.drafter.traits.reads_verifier_hidden,
            # Only a rule that reads the drafter emits tokens whose p may round to 0.
            with_log_conf or params.rule.reads_draft,
            block.parents,
        )
        scored, state = self._read(params.verifier, state, block, active, wanted)
        if block.probs is not None:
            block = block._replace(probs=rows_in_tiles(block.probs))
        nan = nan_in_passes(block, scored.p)
        q = draft_probs(block, self.verifier.vocab_size) if params.rule.reads_draft else scored.p
        # The bonus row of the block is not filled in yet; it is read only later.
        with jax.named_scope("rule"):
            targets, credits = block_targets(
                params.rule, state.credit, q, scored.p, block.confidences, scored.p_conf
            )
        targets = rows_in_tiles(targets)
        with jax.named_scope("verification"):
            judged = judge(self.verification, for_accept, block, targets, state.carry)
        cache = kept(judged, self.verifier, scored.cache, state.positions)
        nodes = node_counts(judged, block)
        block, targets, scored = along(judged, block, targets, scored._replace(cache=None))
        p, p_conf, hidden = scored.p, scored.p_conf, scored.hidden
        accepted = judged.accepted
        whole = accepted == block.num_drafted
        before = state._replace(credit=_at(credits, block.num_drafted), drafter=drafter)
        with jax.named_scope("bonus"):
            after = self._after(params, inputs, before, block, (targets, p, p_conf), active & whole)
        with jax.named_scope("verification"):
            next_token = draw_after(judged, for_next, block, after.target)
            carry = self._next_carry(judged, block, state.carry, next_token)
        tokens = emitted(block.tokens, accepted, next_token)
        last_target = jnp.where(whole[:, None], after.target, jax.vmap(row)(targets, accepted))
        at_bonus = jnp.arange(targets.shape[1])[None] == block.num_drafted[:, None]
        targets = jnp.where(at_bonus[..., None], after.target[:, None], targets)
        sources = round_sources(block, accepted) if with_sources else None
        outcome = RoundOutcome(tokens, accepted + 1, targets, p_conf, hidden, sources)
        counted = jnp.arange(tokens.shape[1])[None] < outcome.counts[:, None]
        logs = logs_along(p, scored.logits, sampling, tokens, counted, with_conf=with_log_conf)
        info = report(block, logs, judged, outcome, last_target, after, nan, calls)
        info = info._replace(nodes=nodes)
        left = jnp.where(whole, after.credit, _at(credits, accepted + 1))
        new = state._replace(cache=cache, drafter=after.drafter, carry=carry, credit=left)
        return outcome, new, info

    def commit(
        self,
        old: RoundState,
        new: RoundState,
        tokens: Array,
        counts: Array,
        hidden: Array | None = None,
    ) -> RoundState:
        """Moves each row on by `counts` tokens; a row with 0 stays as it was.

        Fewer tokens than in the outcome cut a block (if verification has no carry and the rule has
        no budget). Only a nested round may commit more than it emitted. Caches stay: entries past a
        row's position are not seen.
        """
        moved = counts > 0
        history = new.history
        if history is not None:
            history = history_lib.commit(history, old.positions, tokens, counts)
        return RoundState(
            tokens=last_token(tokens, counts, old.tokens),
            positions=old.positions + counts,
            cache=new.cache,
            drafter=drafter_calls.commit(self.drafter, new.drafter, tokens, counts, hidden),
            carry=where_rows(moved, new.carry, old.carry),
            credit=jnp.where(moved, new.credit, old.credit),
            history=history,
        )

    def mark(self, state: RoundState) -> RoundMark:
        return RoundMark(state.tokens, state.positions, self.drafter.mark(state.drafter))

    def rewind(self, state: RoundState, mark: RoundMark) -> RoundState:
        """Takes back the tokens committed since `mark`, in a nested round.

        Tokens that were read stay in the caches for the `commit` that must follow.
        """
        drafter = self.drafter.rewind(state.drafter, mark.drafter)
        return state._replace(tokens=mark.tokens, positions=mark.positions, drafter=drafter)

    def state_axes(self, state: RoundState) -> Axes:
        """The logical axis names of the state."""
        axes = row_axes(state._replace(cache=(), drafter=()))
        return axes._replace(
            cache=self.verifier.cache_axes(state.cache),
            drafter=self.drafter.state_axes(state.drafter),
        )

    def _prepared(
        self, params: MethodParams, state: RoundState, inputs: DraftInputs
    ) -> DraftInputs:
        """The drafter's inputs, in which only the rows are active that it serves."""
        allowed = inputs.limits
        drafts = (
            drafter_calls.draft_limits(self.drafter, params.drafter, state.drafter, allowed) > 0
        )
        return inputs._replace(
            sampling=inputs.sampling if self.process_drafts else unprocessed(inputs.sampling),
            active=inputs.active if self._reads_bonus(params.rule) else drafts,
        )

    def _reads_bonus(self, rule: Rule) -> bool:
        return rule.reads_draft or self.verification.has_carry

    def _read(
        self, params: Params, state: RoundState, block: DraftBlock, active: Array, wanted: Wanted
    ) -> tuple[Scored, RoundState]:
        """The verifier's pass over the blocks; in a nested round also over the tokens it lacks."""
        drafted = jnp.where(active, block.num_drafted, 0)
        widths = self.verifier_widths
        if state.history is None:
            tokens = jnp.concatenate([state.tokens[:, None], block.tokens], axis=1)
            given = tokens, state.positions, jnp.max(drafted) + 1, widths, wanted
            return score(self._reader, params, state.cache, *given), state
        full = block.tokens.shape[1] + 1
        lacks = history_lib.unread(state.history, state.positions, block.tokens, 2 * full)
        longest = jnp.max(jnp.where(active, drafted + lacks.lags, 0)) + 1
        wanted = wanted._replace(skipped=lacks.lags, rows=full)
        given = lacks.tokens, lacks.starts, longest, widths, wanted
        scored = score(self.verifier, params, state.cache, *given)
        history = history_lib.note_caught_up(state.history, state.positions, active)
        read = block.num_drafted + 1
        history = history_lib.note_block(history, state.positions, block.tokens, read)
        return scored, state._replace(history=history)

    def _after(
        self,
        params: MethodParams,
        inputs: DraftInputs,
        state: RoundState,
        block: DraftBlock,
        outputs: tuple[Array, Array, Array | None],
        whole: Array,
    ) -> AfterBlock:
        """The target after whole blocks; `outputs` holds targets, p and p_conf."""
        rule, reads = params.rule, self._reads_bonus(params.rule)
        targets, p, p_conf = outputs
        needed = whole if reads else whole & (block.num_drafted > 0)
        names = self.drafter.model_names
        none = {name: jnp.int32(0) for name in names}
        at_bonus = lambda x: jax.vmap(row)(x, block.num_drafted)  # noqa: E731

        def skip(drafter: Any) -> tuple[Any, ...]:
            return at_bonus(targets), state.credit, drafter, none, needed & False

        inputs = inputs._replace(sampling=advance(inputs.sampling, block.tokens, block.num_drafted))

        def run(drafter: Any) -> tuple[Any, ...]:
            extra, drafter = drafter_calls.bonus(
                self.drafter,
                params.drafter,
                drafter,
                inputs,
                block,
                with_confidence=rule.reads_draft_confidence,
            )
            read = extra.probs, at_bonus(p), extra.confidences, jax.tree.map(at_bonus, p_conf)
            target, credit = next_target(rule, state.credit, *read)
            calls = {name: extra.calls[name] for name in names}
            nan = needed & rule.reads_draft_confidence & jnp.isnan(extra.probs[:, 0])
            return target, credit, drafter, calls, nan

        if not reads and self.drafter.traits.catches_up:
            target, credit, drafter, calls, nan = skip(state.drafter)
            return AfterBlock(target, credit, drafter, calls, nan, nan)
        found = lax.cond(jnp.any(needed), run, skip, state.drafter)
        target, credit, drafter, calls, nan = found
        return AfterBlock(target, credit, drafter, calls, nan, needed)

    def _next_carry(
        self, judged: Judgement, block: DraftBlock, carry: Any, next_token: Array
    ) -> Any:
        if judged.acceptance is None:
            return carry
        probs = draft_probs(block, self.verifier.vocab_size)
        targets = judged.acceptance.targets
        scored = ScoredBlock(block.tokens, probs, targets, block.num_drafted)
        following = jax.vmap(self.verification.next_carry)
        return following(judged.acceptance, scored, carry, judged.accepted, next_token)


def _caught_up(
    verifier: LanguageModel, params: Params, state: RoundState, active: Array
) -> tuple[RoundState, Array]:
    """Lets the verifier of a nested round catch up to a pass's length; counts its passes."""
    if state.history is None:
        return state, jnp.int32(0)
    # The next pass reads this many together with the draft.
    spare = state.history.drafted.shape[1] + 1
    cache, history, calls = history_lib.catch_up(
        verifier, params, state.cache, state.positions, state.history, active, spare
    )
    return state._replace(cache=cache, history=history), calls


def _at(x: Array, index: Array) -> Array:
    """`x[b, index[b]]`."""
    return jax.vmap(lambda row, i: lax.dynamic_index_in_dim(row, i, keepdims=False))(x, index)
