"""Speculative decoding: rounds of drafting and verification, for any rule.

`Round.__call__` is a round in its order: draft, score, rule, verify. `Round.commit` ends it.

Source: Leviathan et al. (arXiv 2211.17192); Faster Cascades via Speculative Decoding
(arXiv 2405.19261), Algorithm 4.

Axes: B rows, G longest block, N = G + 1 nodes, V vocabulary, D width.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from specjax.checks import check_part, check_static
from specjax.decoding import history as history_lib
from specjax.decoding.blocks import (
    Scored,
    along,
    check_widths,
    commit_tokens,
    draft_probs,
    drafted_sources,
    draw_after,
    emit,
    judge,
    last_token,
    node_counts,
    powers_of_two,
    prefill_drafter,
    propose_block,
    read_bonus,
    score,
    wanted_limits,
)
from specjax.decoding.history import History
from specjax.decoding.method import (
    Method,
    MethodParams,
    Step,
    check_drafter,
    check_model,
    check_pair,
    check_rollback,
    check_vocabularies,
    per_row,
    step_uniforms,
)
from specjax.errors import UserError
from specjax.platforms import entry, row, rows_in_tiles, when
from specjax.processing import advance, logs_along, unprocessed
from specjax.rules.target import check_is_rule, has_carry, init_carry
from specjax.sampling.draws import num_uniforms
from specjax.types import (
    Axes,
    Cache,
    DecodeState,
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
from specjax.verification import Block, block_acceptance_probs, token_acceptance_probs

# The verifier's own tokens: after a rejection, after a whole block, after no draft. The codes of
# the drafter's parts follow.
OWN = ("residual", "bonus", "verifier")
_RESIDUAL, _BONUS, _NO_DRAFT = range(len(OWN))


class RoundState(NamedTuple):
    """The state of a row between two rounds.

    Attributes:
      tokens: the last committed token, which is not in the verifier's cache yet.
      positions: its position there.
      cache: the verifier's.
      drafter: the drafter's state.
      carry: the verification's carry.
      rule_carry: the rule's; () if it has none.
      history: in a nested round, the tokens that the verifier has read; else None.
    """

    tokens: Int32[Array, " B"]
    positions: Int32[Array, " B"]
    cache: Cache
    drafter: Any
    carry: Any
    rule_carry: Any
    history: History | None = None

    @property
    def cached(self) -> Array:
        read = self.positions if self.history is None else self.history.read
        return jnp.minimum(self.positions, read)


class RoundOutcome(NamedTuple):
    """The output of a round.

    Attributes:
      step: the accepted tokens, then the next token, at least 1; their statistics; and the state
        with caches filled, whose positions `Round.commit` moves. The passes in it are without those
        that only the whole blocks of other rows needed.
      calls: model's name -> int32 scalar, its passes; each serves the whole batch.
      probs: the target distribution of each token, if verification leaves no carry. So the block of
        a round can be the draft of a round above, with `probs` as its q.
      confidences: the verifier's confidences there, or None unless the rule or the caller needs
        them.
      hidden: the verifier's hidden states there, or None unless the drafter reads them.
    """

    step: Step
    calls: dict[str, Array]
    probs: Float32[Array, "B N V"]
    confidences: Float32[Array, "B N V"] | None
    hidden: Float[Array, "B N D"] | None


class RoundMark(NamedTuple):
    """A place to which a nested round can go back: the last token committed there."""

    tokens: Int32[Array, " B"]
    positions: Int32[Array, " B"]
    drafter: Any


class AfterBlock(NamedTuple):
    """The target after whole blocks, and the passes of models for it, which the rows `took`."""

    target: Float32[Array, "B V"]
    rule_carry: Any
    drafter: Any
    calls: dict[str, Array]
    nan: Bool[Array, " B"]
    took: Bool[Array, " B"]


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
    verification: Verification = Block()  # noqa: RUF009  immutable
    widths: tuple[int, ...] | None = None
    name: str = "verifier"
    nested: bool = False
    process_drafts: bool = True

    def __post_init__(self) -> None:
        check_fit(self.drafter, self.verification, nested=self.nested)
        drafter, longest = self.drafter, self.drafter.max_draft
        check_model("verifier", self.verifier)
        check_vocabularies(self.verifier, drafter)
        kind = type(drafter).__name__
        check_rollback(self.verifier, longest + 1, f"{kind} with max_draft={longest}")
        if drafter.traits.drafts_trees and not self.verifier.reads_trees:
            raise UserError(
                f"{kind} drafts trees, which {type(self.verifier).__name__} cannot read: use a "
                "drafter of chains"
            )
        names = self.model_names
        if len(set(names)) < len(names):
            raise UserError(f"models of a round must have different names, got {', '.join(names)}")
        if self.widths is not None:
            check_widths(self.widths, longest + 1)

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

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        models = (self.verifier, self.drafter)
        first, second = (x.prompt_positions(input_lengths, prefix_lengths) for x in models)
        return np.maximum(first, second)

    def prefill(self, params: MethodParams, prompts: Prompts, max_length: int) -> RoundState:
        rows, longest = prompts.inputs.shape[0], self.drafter.max_draft
        filled = self._reader.prefill(params.verifier, prompts, max_length)
        drafter = prefill_drafter(self.drafter, params.drafter, prompts, max_length, filled)
        first = self.verification.init_carry(longest), init_carry(params.rule)
        carries = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape)), first)
        history = history_lib.begin(filled, max_length, longest) if self.nested else None
        read = (filled.tokens, filled.positions, filled.cache)
        return RoundState(*read, drafter, carries[0], carries[1], history)

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
        with_log_probs: bool = False,
        with_sources: bool = False,
    ) -> RoundOutcome:
        """Runs one round for all rows, up to the commit.

        The uniforms are independent; the results of rows that are not active are arbitrary; limits,
        0 .. G, are the longest blocks. The options (static) ask for the verifier's confidences, the
        log-probabilities under the verifier itself, and where the tokens came from.
        """
        self.check_rule(params.rule)
        params = params._replace(rule=per_row(params.rule, active))
        rule, drafter = params.rule, self.drafter
        reads_bonus = rule.reads_draft or self.verification.has_carry
        ends = np.cumsum(self._uniforms)[:-1].tolist()
        for_draft, for_accept, for_next = jnp.split(uniforms, ends, axis=1)
        limits = jnp.where(active, limits, 0)
        behind = jnp.int32(0)
        if state.history is not None:
            # The verifier's next pass reads up to G + 1 of its missing tokens with the draft.
            cache, history, behind = history_lib.catch_up(
                self.verifier, params.verifier, state.cache, state.positions, state.history, active,
                spare=drafter.max_draft + 1,
            )  # fmt: skip
            state = state._replace(cache=cache, history=history)

        # Draft.
        drafts = wanted_limits(drafter, params.drafter, state.drafter, limits) > 0
        inputs = DraftInputs(
            state.tokens,
            limits,
            for_draft,
            sampling if self.process_drafts else unprocessed(sampling),
            active if reads_bonus else drafts,
            rule.reads_draft_confidence,
            with_sources,
            state.cache if drafter.traits.reads_verifier_hidden else None,
        )
        block, drafter_state = propose_block(drafter, params.drafter, state.drafter, inputs)
        calls = {self.name: behind + 1, **block.calls}

        # Score.
        scored, state = self._score(
            params.verifier,
            state,
            block,
            active,
            sampling,
            with_confidence=with_confidence or rule.reads_verifier_confidence,
            with_hidden=drafter.traits.reads_verifier_hidden,
            # Only a rule that reads the drafter emits tokens whose p may round to 0.
            with_logits=with_log_probs or rule.reads_draft,
        )
        # A NaN anywhere in a block makes all probabilities NaN. It ends the row, even if that might
        # not have reached it: a choice that depends on earlier tokens would be biased.
        position = jnp.arange(scored.p.shape[1])[None]
        in_verifier = jnp.isnan(scored.p[..., 0]) & (position <= block.num_drafted[:, None])
        nan_in_verifier, nan_in_drafter = in_verifier.any(axis=1), jnp.zeros(limits.shape, bool)
        if block.probs is not None:
            block = block._replace(probs=rows_in_tiles(block.probs))
            in_drafter = jnp.isnan(block.probs[..., 0])
            if block.drawn_from is None:  # else rows without a draw are 0
                in_drafter &= position < block.num_drafted[:, None]
            nan_in_drafter = in_drafter.any(axis=1)

        # Rule. The bonus row of the block is not filled in yet; it is read only later.
        q = draft_probs(block, self.verifier.vocab_size) if rule.reads_draft else scored.p
        with jax.named_scope("rule"):
            targets, rule_carries = block_targets(
                rule, state.rule_carry, q, scored.p, block.confidences, scored.p_conf
            )
        targets = rows_in_tiles(targets)

        # Verify.
        with jax.named_scope("verification"):
            judged = judge(self.verification, for_accept, block, targets, state.carry)
        cache, nodes = scored.cache, None
        if judged.path is not None:
            cache = self.verifier.keep(cache, state.positions, judged.path.nodes)
            nodes = node_counts(judged.path, block)
        block, targets, scored = along(judged, block, targets, scored._replace(cache=None))
        p, p_conf, accepted = scored.p, scored.p_conf, judged.accepted
        whole = accepted == block.num_drafted
        before = _at(rule_carries, block.num_drafted)
        before = state._replace(rule_carry=before, drafter=drafter_state)
        with jax.named_scope("bonus"):
            if inputs.memory is not None:  # the old cache would be copied to outlive the write
                inputs = inputs._replace(memory=cache)
            after = self._after_whole_blocks(
                params, inputs, before, block, targets, p, p_conf, accepted, active & whole
            )
        with jax.named_scope("verification"):
            next_token = draw_after(judged, for_next, block, after.target)
            carry = state.carry
            if judged.acceptance is not None:
                chain = ScoredBlock(
                    block.tokens,
                    draft_probs(block, self.verifier.vocab_size),
                    judged.acceptance.targets,
                    block.num_drafted,
                )
                next_carry = jax.vmap(self.verification.next_carry)
                carry = next_carry(judged.acceptance, chain, carry, accepted, next_token)
        tokens = emit(block.tokens, accepted, next_token)

        # Report: targets and statistics of what was emitted.
        last_target = jnp.where(whole[:, None], after.target, jax.vmap(row)(targets, accepted))
        sources = None
        if with_sources:
            last = jnp.where(block.num_drafted == 0, _NO_DRAFT, _BONUS)
            last = jnp.where(whole, last, _RESIDUAL)
            sources = emit(drafted_sources(block) + len(OWN), accepted, last)
        counts = accepted + 1
        real = jnp.arange(tokens.shape[1])[None] < counts[:, None]
        logs = logs_along(p, scored.logits, sampling, tokens, real, with_plain=with_log_probs)
        chances = jax.vmap(jax.vmap(entry))(targets, jnp.pad(block.tokens, ((0, 0), (0, 1))))
        at_last = jnp.arange(targets.shape[1])[None] == accepted[:, None]
        of_last = jax.vmap(entry)(last_target, next_token)[:, None]
        log_target = jnp.log(jnp.where(at_last, of_last, chances))
        nan_in_rule = (jnp.isnan(log_target) & real).any(axis=1)
        targets = jnp.where((at_last & whole[:, None])[..., None], after.target[:, None], targets)
        nan_in = jnp.where(
            nan_in_verifier,
            0,
            jnp.where(nan_in_drafter | after.nan, 1, jnp.where(nan_in_rule, 2, -1)),
        )
        token_sum = block_sum = accepted.astype(jnp.float32)
        if judged.acceptance is not None:
            drafted = block.tokens, block.probs, judged.acceptance.targets, block.num_drafted
            chances = jax.vmap(token_acceptance_probs)(*drafted)
            token_sum = jnp.cumprod(chances, axis=1).sum(axis=1)
            block_sum = jax.vmap(block_acceptance_probs)(*drafted).sum(axis=1)
        passes = {name: calls[name] + after.calls.get(name, 0) for name in calls}
        row_passes = {
            name: calls[name] + jnp.where(after.took, after.calls.get(name, 0), 0) for name in calls
        }
        rule_carry = where_rows(whole, after.rule_carry, _at(rule_carries, accepted + 1))
        inner = state._replace(
            cache=cache, drafter=after.drafter, carry=carry, rule_carry=rule_carry
        )
        step = Step(
            tokens=tokens,
            counts=counts,
            inner=inner,
            calls=row_passes,
            log_probs=logs._replace(target=log_target),
            drafted=block.num_drafted,
            accepted=accepted,
            deferrals=1,
            token_sum=token_sum,
            block_sum=block_sum,
            nan_in=nan_in,
            sources=sources,
            nodes=nodes,
        )
        return RoundOutcome(step, passes, targets, p_conf, scored.hidden)

    def commit(
        self,
        old: RoundState,
        new: RoundState,
        tokens: Array,
        counts: Array,
        hidden: Array | None = None,
    ) -> RoundState:
        """Moves each row on by `counts` tokens; a row with 0 stays as it was.

        Fewer tokens than in the outcome cut a block (if neither the verification nor the rule has a
        carry). Only a nested round may commit more than it emitted. Caches stay: entries past a
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
            drafter=commit_tokens(self.drafter, new.drafter, tokens, counts, hidden),
            carry=where_rows(moved, new.carry, old.carry),
            rule_carry=where_rows(moved, new.rule_carry, old.rule_carry),
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

    def inner_axes(self, inner: RoundState) -> Axes:
        axes = row_axes(inner._replace(cache=(), drafter=()))
        return axes._replace(
            cache=self.verifier.cache_axes(inner.cache),
            drafter=self.drafter.state_axes(inner.drafter),
        )

    def _score(
        self,
        params: Params,
        state: RoundState,
        block: DraftBlock,
        active: Array,
        sampling: Sampling,
        **options: Any,
    ) -> tuple[Scored, RoundState]:
        """The verifier's pass over the blocks; in a nested round also over the tokens it lacks."""
        drafted = jnp.where(active, block.num_drafted, 0)
        reader = self._reader, params, state.cache, sampling, self.verifier_widths
        if state.history is None:
            tokens = jnp.concatenate([state.tokens[:, None], block.tokens], axis=1)
            longest = jnp.max(drafted) + 1
            scored = score(*reader, tokens, state.positions, longest, block.parents, **options)
            return scored, state
        full = block.tokens.shape[1] + 1
        lacks = history_lib.unread(state.history, state.positions, block.tokens, 2 * full)
        longest = jnp.max(jnp.where(active, drafted + lacks.lags, 0)) + 1
        options |= {"skipped": lacks.lags, "rows": full}
        scored = score(*reader, lacks.tokens, lacks.starts, longest, **options)
        read = state.history.read
        read = jnp.where(active, jnp.maximum(read, state.positions), read)
        history = state.history._replace(read=read)
        count = block.num_drafted + 1
        history = history_lib.note_block(history, state.positions, block.tokens, count)
        return scored, state._replace(history=history)

    def _after_whole_blocks(
        self,
        params: MethodParams,
        inputs: DraftInputs,
        state: RoundState,
        block: DraftBlock,
        targets: Array,
        p: Array,
        p_conf: Array | None,
        accepted: Array,
        whole: Array,
    ) -> AfterBlock:
        """The target after whole blocks; arbitrary after others.

        Only here the drafter reads the last drafted token, if a row needs that; this also gives q
        at the bonus position.
        """
        rule = params.rule
        reads_bonus = rule.reads_draft or self.verification.has_carry
        needed = whole if reads_bonus else whole & (block.num_drafted > 0)
        names = self.drafter.model_names
        none = {name: jnp.int32(0) for name in names}
        # Of whole blocks; the draw after others reads this row too.
        at_bonus = lambda x: jax.vmap(row)(x, accepted)  # noqa: E731

        nothing = needed & False
        skipped = at_bonus(targets), state.rule_carry, state.drafter, none, nothing
        if not reads_bonus and self.drafter.traits.catches_up:
            return AfterBlock(*skipped, took=nothing)
        inputs = inputs._replace(sampling=advance(inputs.sampling, block.tokens, block.num_drafted))
        # Taken out here: the loop would bring all of p into another layout.
        last, last_conf = at_bonus(p), jax.tree.map(at_bonus, p_conf)

        def run(before: tuple[Any, ...]) -> tuple[Any, ...]:
            bonus, drafter = read_bonus(self.drafter, params.drafter, before[2], inputs, block)
            read = bonus.probs, last, bonus.confidences, last_conf
            target, rule_carry = next_target(rule, state.rule_carry, *read)
            calls = {name: bonus.calls[name] for name in names}
            nan = needed & rule.reads_draft_confidence & jnp.isnan(bonus.probs[:, 0])
            return target, rule_carry, drafter, calls, nan

        return AfterBlock(*when(jnp.any(needed), run, skipped), took=needed)


@dataclasses.dataclass(frozen=True)
class Speculative(Round, Method):
    """Decodes with a drafter and a verifier; a step is a round. Its parameters: `MethodParams`."""

    def __post_init__(self) -> None:
        Round.__post_init__(self)
        Method.__post_init__(self)

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
        return self.drafter.traits.independent_rows and len(self.verifier_widths) == 1

    @property
    def predictions(self) -> int:
        return self.drafter.traits.predictions

    @property
    def source_names(self) -> tuple[str, ...]:
        return (*OWN, *self.drafter.source_names)

    def committed(self, state: DecodeState) -> RoundState:
        return state.inner

    def check_params(self, params: Params, rows: int) -> None:
        check_pair(self, params, rows)

    def describe(self) -> dict[str, Any]:
        return {
            **super().describe(),
            "drafter": self.drafter.describe(),
            "verification": repr(self.verification),
            "widths": list(self.verifier_widths),
        }

    def step(self, params: MethodParams, state: DecodeState) -> Step:
        active = ~state.finished
        uniforms = step_uniforms(state, self.num_uniforms)
        limits = state.draft_limits
        if self.verification.has_carry:
            limits = jnp.full_like(limits, self.max_draft)  # requests have no other
        outcome = self(
            params, state.sampling, state.inner, uniforms, active, limits,
            with_log_probs=state.wants_log_probs, with_sources=state.wants_sources,
        )  # fmt: skip
        step = outcome.step
        counts = jnp.where(active & (step.nan_in < 0), step.counts, 0)
        return step._replace(
            counts=counts,
            inner=self.commit(state.inner, step.inner, step.tokens, counts, outcome.hidden),
            rollbacks=step.accepted < step.drafted,
        )


def block_targets(
    rule: Any, carry: Any, *distributions: Array | None
) -> tuple[Float32[Array, "B N V"], Any]:
    """Pi at successive positions, from q, p, q_conf and p_conf `[B, N, V]`; None if not read.

    Also returns the rule's carries after 0 .. N positions. Both depend only on earlier positions,
    so that a drafted token never decides about itself.
    """
    if has_carry(rule):
        return jax.vmap(lambda rule, *read: rule.targets(*read))(rule, carry, *distributions)
    return jax.vmap(lambda rule, *at: jax.vmap(rule)(*at))(rule, *distributions), carry


def next_target(rule: Rule, carry: Any, *distributions: Array | None) -> tuple[Array, Any]:
    """`block_targets` at a single position: `[B, V]` to `[B, V]`, and the carry after it."""
    one = (None if x is None else x[:, None] for x in distributions)
    targets, carries = block_targets(rule, carry, *one)
    return targets[:, 0], jax.tree.map(lambda x: x[:, 1], carries)


def inner_sources(sources: Array) -> Array:
    """The sources of an inner round: 0 for its verifier's own tokens, then the drafter's parts."""
    return jnp.maximum(sources - (len(OWN) - 1), 0)


def _at(tree: Any, index: Array) -> Any:
    """`x[b, index[b]]` of each array."""
    at = jax.vmap(lambda row, i: lax.dynamic_index_in_dim(row, i, keepdims=False))
    return jax.tree.map(lambda x: at(x, index), tree)


def check_is_verification(verification: Any) -> None:
    """Raises UserError unless it is a verification, and hashable."""
    needed = ("acceptance", "has_carry", "keeps_last_pass")
    check_part("verification", verification, needed, "verification.Block()")
    check_static("verification", verification)


def check_fit(drafter: Drafter, verification: Verification, *, nested: bool = False) -> None:
    """Raises UserError unless the parts of a round fit together, whatever its models are."""
    check_drafter("drafter", drafter)
    check_is_verification(verification)
    verification.check(drafter.max_draft, drafter.traits)
    judge, drafts, traits = type(verification).__name__, type(drafter).__name__, drafter.traits
    if traits.drafts_trees and not verification.walks_trees:
        raise UserError(
            f"{judge} cannot verify the trees of {drafts}: use Traversal, or another verification "
            "with `walk`"
        )
    if verification.has_carry and not traits.fixed_length:
        # Carry-overs would need the stopping state of each earlier block.
        raise UserError(
            f"{judge} needs drafts of a fixed length, but {drafts} has "
            f"fixed_length=False: use Block or Token verification, or a drafter whose blocks all "
            "have the length of their limit"
        )
    if nested and verification.has_carry:
        raise UserError(
            f"{judge} is not exact in an inner round of a cascade: use Block or Token verification"
        )
    if nested and (traits.drafts_trees or traits.reads_verifier_hidden):
        what = "drafts trees" if traits.drafts_trees else "reads the verifier's hidden states"
        raise UserError(f"{drafts} {what}: it cannot draft for an inner round of a cascade")


def check_rule(rule: Rule, drafter: Drafter, *, nested: bool = False) -> None:
    """Raises UserError unless `rule` is a rule that fits the drafter.

    In a nested round it must have no carry: only the round of the verifier can keep it.
    """
    if has_carry(rule) and (nested or drafter.traits.drafts_trees):
        where = "inside a cascade" if nested else "over trees"
        raise UserError(
            f"rule must not have a carry in a round {where}, got {rule!r}: use a rule without one"
        )
    check_is_rule("rule", rule)
    reads = rule.reads_draft or rule.reads_draft_confidence
    if reads and not drafter.traits.has_distributions:
        raise UserError(
            f"{type(rule).__name__} reads the drafter's distribution after each token, but the "
            f"branches of {type(drafter).__name__} have different drafters: use a rule that reads "
            "only the verifier, such as Lossless"
        )
    if reads and not drafter.traits.draws_bonus:
        raise UserError(
            f"{type(rule).__name__} reads the drafter's distribution after a whole draft, but "
            f"{type(drafter).__name__} has none after its longest one: give a max_draft that is "
            "less by one"
        )
    if rule.reads_draft_confidence and not drafter.has_confidence:
        raise UserError(
            f"{type(rule).__name__} reads the drafter's confidence, but "
            f"{type(drafter).__name__} has none: choose another rule"
        )
