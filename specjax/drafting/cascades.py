"""Cascades of drafters: horizontal and vertical, which `Cascade` makes of its matrix.

Source: Cascade Speculative Drafting (arXiv 2312.11462).

Axes: B rows, G longest block, K longest block of the level below, R inner rounds, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from specjax.decoding import MethodParams, Round
from specjax.decoding.blocks import (
    append_block,
    commit_tokens,
    cut_from,
    draft_probs,
    drafted_sources,
    empty_block,
    last_token,
    prefill_drafter,
    propose_block,
    read_bonus,
    wanted_limits,
)
from specjax.decoding.method import check_drafter, check_rollback
from specjax.decoding.speculative import RoundMark, RoundState, check_fit, inner_sources
from specjax.errors import UserError
from specjax.processing import advance, with_processing
from specjax.types import (
    Axes,
    Bonus,
    DraftBlock,
    Drafter,
    DraftInputs,
    DraftTraits,
    Params,
    Processing,
    Prompts,
    Verification,
    row_axes,
)
from specjax.verification import Block


class SeveralState(NamedTuple):
    """The state of several drafters between rounds.

    Attributes:
      drafters: their states, in their order.
      marks: the place of each drafter at the last commit; empty if drafters do not read drafts.
      note: information about the last block.
    """

    drafters: tuple[Any, ...]
    marks: tuple[Any, ...]
    note: Int32[Array, " B"]


class SeveralDrafters(Drafter):
    """Has several drafters, and decides which of them drafts. Parameters: a tuple of theirs.

    Attributes:
      drafters: in their order.
    """

    # Whether a drafter reads the drafts of earlier drafters as if they were committed. The commit
    # takes them back.
    _reads_drafts: ClassVar[bool] = False
    # Whether the drafters may read the verifier's states of prompts.
    _takes_states: ClassVar[bool] = False

    # Only for the type checker: a field of a dataclass may replace it.
    if TYPE_CHECKING:

        @property
        def drafters(self) -> tuple[Drafter, ...]:
            """The drafters, in their order."""

    def _check_parts(self, names: Sequence[str]) -> None:
        """Raises UserError unless all are drafters whose commits can be combined."""
        where = type(self).__name__
        for name, drafter in zip(names, self.drafters, strict=True):
            check_drafter(name, drafter)
            kind, traits = type(drafter).__name__, drafter.traits
            reads = traits.reads_verifier_hidden and self._reads_drafts
            if reads or (traits.boundaries and not self._takes_states):
                raise UserError(
                    f"{kind} reads the verifier's hidden states, which drafters in {where} do not "
                    f"get: use it without {where}"
                )
        sizes = [drafter.vocab_size for drafter in self.drafters]
        if len(set(sizes) - {0}) > 1:  # 0 where there is no network yet
            raise UserError(f"{', '.join(names)} must have the same vocabulary, got sizes {sizes}")

    def check_within(self, before: int) -> None:
        for drafter in self.drafters:
            drafter.check_within(before)
            before += drafter.max_draft if self._reads_drafts else 0

    @property
    def vocab_size(self) -> int:
        return self.drafters[0].vocab_size

    @property
    def num_uniforms(self) -> int:
        return sum(drafter.num_uniforms for drafter in self.drafters)

    @property
    def has_confidence(self) -> bool:
        return all(drafter.has_confidence for drafter in self.drafters)

    @property
    def model_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(n for drafter in self.drafters for n in drafter.model_names))

    @property
    def source_names(self) -> tuple[str, ...]:
        return tuple(name for drafter in self.drafters for name in drafter.source_names)

    def describe(self) -> Any:
        return {"drafters": [drafter.describe() for drafter in self.drafters]}

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        each = [d.prompt_positions(input_lengths, prefix_lengths) for d in self.drafters]
        return functools.reduce(np.maximum, each)  # an encoder-decoder returns a single number

    def prefill(
        self, params: Sequence[Params], prompts: Prompts, max_length: int, verifier: Any = None
    ) -> SeveralState:
        together = zip(self.drafters, params, strict=True)
        given = prompts, max_length, verifier
        states = tuple(prefill_drafter(drafter, part, *given) for drafter, part in together)
        rows = prompts.inputs.shape[0]
        return SeveralState(states, self._kept(states), jnp.zeros((rows,), jnp.int32))

    def commit(
        self, state: SeveralState, tokens: Array, counts: Array, hidden: Array | None = None
    ) -> SeveralState:
        states = []
        for i, (drafter, part) in enumerate(zip(self.drafters, state.drafters, strict=True)):
            now = drafter.rewind(part, state.marks[i]) if i and self._reads_drafts else part
            states.append(commit_tokens(drafter, now, tokens, counts, hidden))
        return state._replace(drafters=tuple(states), marks=self._kept(states))

    def mark(self, state: SeveralState) -> tuple[Any, ...]:
        return state.marks if self._reads_drafts else self._marks(state.drafters)

    def rewind(self, state: SeveralState, mark: tuple[Any, ...]) -> SeveralState:
        together = zip(self.drafters, state.drafters, mark, strict=True)
        states = tuple(drafter.rewind(part, place) for drafter, part, place in together)
        return state._replace(drafters=states, marks=mark if self._reads_drafts else ())

    def state_axes(self, state: SeveralState) -> Axes:
        together = zip(self.drafters, state.drafters, strict=True)
        axes = row_axes(state._replace(drafters=()))
        return axes._replace(drafters=tuple(drafter.state_axes(part) for drafter, part in together))

    def _kept(self, states: Sequence[Any]) -> tuple[Any, ...]:
        """`SeveralState.marks`: a mark can be as large as a state."""
        return self._marks(states) if self._reads_drafts else ()

    def _marks(self, states: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(d.mark(part) for d, part in zip(self.drafters, states, strict=True))


class Widened(Drafter):
    """Adds to the blocks of another `drafter`, whose parameters and state it has."""

    drafter: Any

    @property
    def vocab_size(self) -> int:
        return self.drafter.vocab_size

    @property
    def num_uniforms(self) -> int:
        return self.drafter.num_uniforms

    @property
    def has_confidence(self) -> bool:
        return self.drafter.has_confidence

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.drafter.model_names

    @property
    def source_names(self) -> tuple[str, ...]:
        return self.drafter.source_names

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        return self.drafter.prompt_positions(input_lengths, prefix_lengths)

    def prefill(self, params: Params, prompts: Prompts, max_length: int) -> Any:
        return self.drafter.prefill(params, prompts, max_length)

    def commit(self, state: Any, tokens: Array, counts: Array, hidden: Array | None = None) -> Any:
        return self.drafter.commit(state, tokens, counts)

    def mark(self, state: Any) -> Any:
        return self.drafter.mark(state)

    def rewind(self, state: Any, mark: Any) -> Any:
        return self.drafter.rewind(state, mark)

    def state_axes(self, state: Any) -> Axes:
        return self.drafter.state_axes(state)


@dataclasses.dataclass(frozen=True)
class HorizontalCascade(SeveralDrafters):
    """Drafters that extend a block in turn. Its parameters: a tuple of theirs.

    Each position keeps the distribution of the drafter that drew its token. The bonus position has
    the last drafter's.

    A later drafter reads the tokens of the earlier ones. Its stopping policy learns nothing from
    earlier rounds; the first drafter's does.

    Source: Cascade Speculative Drafting (arXiv 2312.11462), section 3.2.

    Attributes:
      drafters: larger ones first; each may be a cascade.
      counts: the number of tokens of each drafter, 1 .. its own `max_draft`, which None stands for.
        A drafter with a larger `max_draft` may add more.
      cumulative: False, as in the paper: each drafter adds its count. True, as in the published
        code: each drafts until the block has the sum of the counts so far, so it adds less if an
        earlier drafter added more.
    """

    drafters: tuple[Drafter, ...]
    counts: tuple[int, ...] | None = None
    cumulative: bool = False

    _reads_drafts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check_parts([f"drafters[{i}]" for i in range(len(self.drafters))])
        self.check_within(0)

    @property
    def _counts(self) -> tuple[int, ...]:
        return self.counts or tuple(drafter.max_draft for drafter in self.drafters)

    @property
    def max_draft(self) -> int:
        longest = [drafter.max_draft for drafter in self.drafters]
        if not self.cumulative:
            return sum(longest)
        counts = np.array(self._counts)
        return int(np.max(np.cumsum(counts) - counts + longest))

    @property
    def traits(self) -> DraftTraits:
        # The traits of several drafters: the distribution depends on the place in the block.
        each = [drafter.traits for drafter in self.drafters]
        exact = all(n == d.max_draft for n, d in zip(self._counts, self.drafters, strict=True))
        return DraftTraits(
            prefix_only=len(each) == 1 and each[0].prefix_only,
            fixed_length=exact and all(traits.fixed_length for traits in each),
            # Several drafters lag by what the rows have accepted, and catch up in common passes.
            independent_rows=len(each) == 1 and exact and each[0].independent_rows,
            catches_up=each[-1].catches_up,
            processes=all(traits.processes for traits in each),
            predictions=max(traits.predictions for traits in each),
        )

    def describe(self) -> Any:
        counts = {"counts": list(self._counts), "cumulative": self.cumulative}
        return super().describe() | counts

    def propose(
        self, params: Sequence[Params], state: SeveralState, inputs: DraftInputs
    ) -> tuple[DraftBlock, SeveralState]:
        limits = jnp.where(inputs.active, inputs.limits, 0)
        ends = np.cumsum([drafter.num_uniforms for drafter in self.drafters])[:-1].tolist()
        uniforms = jnp.split(inputs.uniforms, ends, axis=1)
        sizes = limits.size, self.max_draft, self.vocab_size
        block = empty_block(*sizes, inputs.with_confidence, inputs.with_sources)
        calls = dict.fromkeys(self.model_names, jnp.int32(0))
        states, before, named = list(state.drafters), block.num_drafted, 0
        for i, drafter in enumerate(self.drafters):
            before = block.num_drafted
            if i:
                states[i] = commit_tokens(drafter, states[i], block.tokens, before)
            # The most tokens that it may add.
            most: Any = drafter.max_draft
            if self.cumulative:
                missing = sum(self._counts[: i + 1]) - before
                more = jnp.minimum(missing + most - self._counts[i], most)
                most = jnp.where(missing > 0, more, 0)
            allowed = jnp.clip(limits - before, 0, most)
            # `CaterpillarDrafter` requests confidences of the drafters that have them.
            reports = inputs.with_confidence and drafter.has_confidence
            # The last drafter may have to give a bonus even if it drafts nothing.
            last = i + 1 == len(self.drafters)
            drafts = wanted_limits(drafter, params[i], states[i], allowed) > 0
            part, states[i] = propose_block(
                drafter,
                params[i],
                states[i],
                DraftInputs(
                    last_token(block.tokens, before, inputs.tokens),
                    allowed,
                    uniforms[i],
                    advance(inputs.sampling, block.tokens, before),
                    inputs.active if last else drafts,
                    reports,
                    inputs.with_sources,
                ),
            )
            part = part._replace(probs=draft_probs(part, self.vocab_size))
            if reports != inputs.with_confidence:
                part = part._replace(confidences=jnp.zeros_like(part.probs))
            if inputs.with_sources:
                part = part._replace(sources=drafted_sources(part) + named)
                named += len(drafter.source_names)
            block = append_block(block, part)
            for name in part.calls:
                calls[name] += part.calls[name]
        new = SeveralState(tuple(states), state.marks, before)
        return block._replace(calls=calls), new

    def bonus(
        self, params: Sequence[Params], state: SeveralState, inputs: DraftInputs, block: DraftBlock
    ) -> tuple[Bonus, SeveralState]:
        drafter, last = self.drafters[-1], state.drafters[-1]
        extra, last = read_bonus(
            drafter,
            params[-1],
            last,
            inputs._replace(tokens=last_token(block.tokens, state.note, inputs.tokens)),
            cut_from(block, state.note, drafter.max_draft),
        )
        calls = dict.fromkeys(self.model_names, jnp.int32(0)) | extra.calls
        drafters = (*state.drafters[:-1], last)
        return extra._replace(calls=calls), state._replace(drafters=drafters)


class VerticalCascadeState(NamedTuple):
    """The inner round's state, which after `propose` has moved on by the block from the mark.

    `active` are the rows that drafted last or may need a bonus.
    """

    round: RoundState
    mark: RoundMark
    active: Bool[Array, " B"]


class _Collecting(NamedTuple):
    """The state of the loop over inner rounds."""

    step: Array
    block: DraftBlock
    round: RoundState
    processing: Processing | None


@dataclasses.dataclass(frozen=True)
class VerticalCascade(Drafter):
    """Drafts with its own rounds. Its parameters: `MethodParams`; the verifier is the reviewer.

    The level below drafts, and the middle model reviews under its own rule, until there are enough
    tokens. They follow the inner target pi = T(q, p), for q of the level below and p of the middle
    model. The block reports pi as its tokens' distribution: so the level above is exact, whatever
    the rule. The middle model's p is not that distribution, unless the rule is `Lossless`.

    An inner round never drafts more than fits into the block, so no reviewed token is lost. Whether
    another round follows depends only on earlier tokens.

    Source: Cascade Speculative Drafting (arXiv 2312.11462), section 3.1.

    Attributes:
      drafter: the level below: any drafter, even a cascade.
      reviewer: the middle model; its name until there is a network.
      max_draft: G >= 1.
      min_draft: rounds follow until a block has this many tokens, 1 .. G; None for G. A row whose
        limit is below G needs fewer by the difference. Extra tokens of the last round stay.
      verification: of the inner rounds; without a carry (not GreedyBlock).
      name: the middle model's passes are counted under it.
    """

    drafter: Drafter
    reviewer: Any
    max_draft: int
    min_draft: int | None = None
    verification: Verification = Block()  # noqa: RUF009  immutable
    name: str = "reviewer"

    def __post_init__(self) -> None:
        check_fit(self.drafter, self.verification, nested=True)
        if not isinstance(self.reviewer, str):
            self._round  # noqa: B018  its checks
        self.check_within(0)

    def check_within(self, before: int) -> None:
        before += self.max_draft
        # A nested round may lag behind by as many tokens as it reads otherwise.
        tokens = before + 2 * (self.drafter.max_draft + 1)
        if not isinstance(self.reviewer, str):
            what = f"{type(self).__name__} with max_draft={self.max_draft}"
            check_rollback(self.reviewer, tokens, what)
        self.drafter.check_within(before)

    @property
    def _round(self) -> Round:
        return Round(self.reviewer, self.drafter, self.verification, name=self.name, nested=True)

    @property
    def _enough(self) -> int:
        """The tokens of a whole block, and the most inner rounds, each of which adds one."""
        return self.max_draft if self.min_draft is None else self.min_draft

    @property
    def vocab_size(self) -> int:
        return self.drafter.vocab_size

    @property
    def num_uniforms(self) -> int:
        return self._enough * self._round.num_uniforms

    @property
    def has_confidence(self) -> bool:
        return True

    @property
    def traits(self) -> DraftTraits:
        # Where a block ends may depend on the randomness of a round.
        fixed = self._enough == self.max_draft
        return DraftTraits(
            prefix_only=self.drafter.traits.prefix_only,
            fixed_length=fixed,
            catches_up=True,
            processes=self.drafter.traits.processes,
            predictions=self.drafter.traits.predictions,
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        return (self.name, *self.drafter.model_names)

    @property
    def source_names(self) -> tuple[str, ...]:
        return (self.name, *self.drafter.source_names)

    def describe(self) -> Any:
        return {
            "name": self.name,
            "reviewer": self.reviewer.describe(),
            "drafter": self.drafter.describe(),
            "max_draft": self.max_draft,
            "min_draft": self._enough,
            "verification": repr(self.verification),
            "widths": list(self._round.verifier_widths),
        }

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        return self._round.prompt_positions(input_lengths, prefix_lengths)

    def prefill(
        self, params: MethodParams, prompts: Prompts, max_length: int
    ) -> VerticalCascadeState:
        inner = self._round
        state = inner.prefill(params, prompts, max_length)
        nobody = jnp.zeros(state.positions.shape, bool)
        return VerticalCascadeState(state, inner.mark(state), nobody)

    def propose(
        self, params: MethodParams, state: VerticalCascadeState, inputs: DraftInputs
    ) -> tuple[DraftBlock, VerticalCascadeState]:
        inner, most = self._round, self._enough
        limits = jnp.where(inputs.active, inputs.limits, 0)
        # At least one token if any is allowed.
        spare = self.max_draft - self._enough
        enough = jnp.maximum(limits - spare, jnp.minimum(limits, 1))
        uniforms = inputs.uniforms.reshape(limits.size, most, inner.num_uniforms)

        def step(carry: _Collecting) -> _Collecting:
            drafted = carry.block.num_drafted
            going, room = drafted < enough, limits - drafted
            sampling = with_processing(inputs.sampling, carry.processing)
            outcome = inner(
                params,
                sampling,
                carry.round,
                lax.dynamic_index_in_dim(uniforms, carry.step, axis=1, keepdims=False),
                going,
                # The round adds a token of its own.
                jnp.clip(room - 1, 0, self.drafter.max_draft),
                with_confidence=inputs.with_confidence,
                with_sources=inputs.with_sources,
            )
            tokens, counts = outcome.step.tokens, jnp.where(going, outcome.step.counts, 0)
            # NaN here must be NaN in the level above.
            bad = (outcome.step.nan_in >= 0)[:, None, None]
            probs = jnp.where(bad, jnp.nan, outcome.probs)
            part = DraftBlock(tokens, probs, outcome.confidences, counts, {})
            if outcome.step.sources is not None:
                part = part._replace(sources=inner_sources(outcome.step.sources))
            block = append_block(carry.block, part)
            calls = {name: carry.block.calls[name] + outcome.calls[name] for name in outcome.calls}
            after = inner.commit(carry.round, outcome.step.inner, tokens, counts)
            processing = advance(sampling, tokens, counts).processing
            return _Collecting(carry.step + 1, block._replace(calls=calls), after, processing)

        def unfinished(carry: _Collecting) -> Array:
            return (carry.step < most) & jnp.any(carry.block.num_drafted < enough)

        sizes = limits.size, self.max_draft, self.vocab_size
        block = empty_block(*sizes, inputs.with_confidence, inputs.with_sources)
        block = block._replace(calls=dict.fromkeys(self.model_names, jnp.int32(0)))
        first = _Collecting(jnp.int32(0), block, state.round, inputs.sampling.processing)
        done = lax.while_loop(unfinished, step, first)
        return done.block, state._replace(round=done.round, active=inputs.active)

    def bonus(
        self,
        params: MethodParams,
        state: VerticalCascadeState,
        inputs: DraftInputs,
        block: DraftBlock,
    ) -> tuple[Bonus, VerticalCascadeState]:
        """The inner target after the block, from a round that drafts nothing."""
        inner = self._round
        outcome = inner(
            params,
            inputs.sampling,
            state.round,
            jnp.zeros((inputs.tokens.size, inner.num_uniforms), jnp.float32),
            state.active,
            jnp.zeros_like(inputs.tokens),
            with_confidence=inputs.with_confidence,
        )
        probs = jnp.where((outcome.step.nan_in >= 0)[:, None], jnp.nan, outcome.probs[:, 0])
        confidences = outcome.confidences
        reported = confidences[:, 0] if inputs.with_confidence and confidences is not None else None
        return Bonus(probs, reported, outcome.calls), state._replace(round=outcome.step.inner)

    def commit(
        self, state: VerticalCascadeState, tokens: Array, counts: Array, hidden: Array | None = None
    ) -> VerticalCascadeState:
        inner = self._round
        back = inner.rewind(state.round, state.mark)
        now = inner.commit(back, back, tokens, counts)
        return state._replace(round=now, mark=inner.mark(now))

    def mark(self, state: VerticalCascadeState) -> RoundMark:
        return state.mark

    def rewind(self, state: VerticalCascadeState, mark: RoundMark) -> VerticalCascadeState:
        return state._replace(round=self._round.rewind(state.round, mark), mark=mark)

    def state_axes(self, state: VerticalCascadeState) -> Axes:
        return VerticalCascadeState(
            self._round.inner_axes(state.round), row_axes(state.mark), row_axes(state.active)
        )
