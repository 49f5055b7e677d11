"""The horizontal cascade: large drafters write the first tokens of a block, small ones the rest.

Axes: B rows, G longest block, V vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from specjax.decoding import drafter_calls
from specjax.decoding.outcome import drafted_sources, last_token
from specjax.decoding.tree import draft_probs
from specjax.drafting.several import (
    SeveralDrafters,
    SeveralState,
    append_block,
    cut_from,
    empty_block,
)
from specjax.errors import UserError
from specjax.processing import advance
from specjax.types import (
    Array,
    Bonus,
    DraftBlock,
    Drafter,
    DraftInputs,
    DraftTraits,
    Params,
)


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
      shared: names of models that several drafters use. Their passes are added up; any other name
        must belong to a single model.
    """

    drafters: tuple[Drafter, ...]
    counts: tuple[int, ...] | None = None
    cumulative: bool = False
    shared: tuple[str, ...] = ()

    _reads_drafts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.drafters, tuple) or not self.drafters:
            raise UserError(
                f"drafters must be a tuple of at least one drafter, got {self.drafters!r}"
            )
        self._check_parts([f"drafters[{i}]" for i in range(len(self.drafters))])
        longest = [drafter.max_draft for drafter in self.drafters]
        counts = tuple(longest) if self.counts is None else self.counts
        fits = isinstance(counts, tuple) and len(counts) == len(longest)
        if not fits or any(
            n not in range(1, most + 1) for n, most in zip(counts, longest, strict=True)
        ):
            raise UserError(
                f"counts must be a tuple of numbers from 1 to the drafters' {longest}, got "
                f"{self.counts!r}: leave out a drafter that contributes nothing"
            )
        self._check_names(self.shared)

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return self.drafters

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
            random_stops=any(traits.random_stops for traits in each),
            fixed_length=exact and all(traits.fixed_length for traits in each),
            # Several drafters lag by what the rows have accepted, and catch up in common passes.
            independent_rows=len(each) == 1 and exact and each[0].independent_rows,
            catches_up=each[-1].catches_up,
            processes=all(traits.processes for traits in each),
        )

    def describe(self) -> Any:
        counts = {"counts": list(self._counts), "cumulative": self.cumulative}
        return super().describe() | counts

    def propose(
        self,
        params: Sequence[Params],
        state: SeveralState,
        inputs: DraftInputs,
        *,
        with_confidence: bool,
        with_sources: bool = False,
    ) -> tuple[DraftBlock, SeveralState]:
        limits = jnp.where(inputs.active, inputs.limits, 0)
        uniforms = self._split(inputs.uniforms)
        sizes = limits.size, self.max_draft, self.vocab_size
        block = empty_block(*sizes, with_confidence, with_sources)
        calls = dict.fromkeys(self.model_names, jnp.int32(0))
        states, before, named = list(state.drafters), block.num_drafted, 0
        for i, drafter in enumerate(self.drafters):
            before = block.num_drafted
            if i:
                states[i] = drafter_calls.commit(drafter, states[i], block.tokens, before)
            allowed = jnp.clip(limits - before, 0, self._allowed(i, before))
            # `CaterpillarDrafter` requests confidences of the drafters that have them.
            wanted = with_confidence and drafter.has_confidence
            # The last drafter may have to give a bonus even if it drafts nothing.
            last = i + 1 == len(self.drafters)
            drafts = drafter_calls.draft_limits(drafter, params[i], states[i], allowed) > 0
            part, states[i] = drafter_calls.propose(
                drafter,
                params[i],
                states[i],
                DraftInputs(
                    last_token(block.tokens, before, inputs.tokens),
                    allowed,
                    uniforms[i],
                    advance(inputs.sampling, block.tokens, before),
                    inputs.active if last else drafts,
                ),
                with_confidence=wanted,
                with_sources=with_sources,
            )
            part = part._replace(probs=draft_probs(part, self.vocab_size))
            if wanted != with_confidence:
                part = part._replace(confidences=jnp.zeros_like(part.probs))
            if with_sources:
                part = part._replace(sources=drafted_sources(part) + named)
                named += len(drafter.source_names)
            block = append_block(block, part)
            for name in part.calls:
                calls[name] += part.calls[name]
        new = SeveralState(tuple(states), state.marks, before)
        return block._replace(calls=calls), new

    def bonus(
        self,
        params: Sequence[Params],
        state: SeveralState,
        inputs: DraftInputs,
        block: DraftBlock,
        *,
        with_confidence: bool,
    ) -> tuple[Bonus, SeveralState]:
        drafter, last = self.drafters[-1], state.drafters[-1]
        extra, last = drafter_calls.bonus(
            drafter,
            params[-1],
            last,
            inputs._replace(tokens=last_token(block.tokens, state.note, inputs.tokens)),
            cut_from(block, state.note, drafter.max_draft),
            with_confidence=with_confidence,
        )
        calls = dict.fromkeys(self.model_names, jnp.int32(0)) | extra.calls
        drafters = (*state.drafters[:-1], last)
        return extra._replace(calls=calls), state._replace(drafters=drafters)

    def _allowed(self, index: int, before: Array) -> Array:
        """The most tokens that a drafter may add to the `before [B]` tokens of a block; `[B]`."""
        longest = self.drafters[index].max_draft
        if not self.cumulative:
            return jnp.full_like(before, longest)
        missing = sum(self._counts[: index + 1]) - before
        more = missing + longest - self._counts[index]
        return jnp.where(missing > 0, jnp.minimum(more, longest), 0)
