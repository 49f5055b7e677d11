"""Drafters that fill a block together, and blocks that are lengthened and cut.

Axes: B rows, G longest block, V vocabulary.
"""

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from specjax.decoding import drafter_calls
from specjax.decoding.guards import check_drafter
from specjax.decoding.history import put_at
from specjax.decoding.outcome import drafted_sources
from specjax.errors import UserError
from specjax.types import Axes, DraftBlock, Drafter, Params, Prompts, row_axes


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
      parts: the drafters.
    """

    # Whether a drafter reads the drafts of earlier drafters as if they were committed. The commit
    # takes them back.
    _reads_drafts: ClassVar[bool] = False
    # Whether the drafters may draft trees.
    _takes_trees: ClassVar[bool] = False

    @property
    def parts(self) -> tuple[Drafter, ...]:
        raise NotImplementedError

    def _check_parts(self, names: Sequence[str]) -> None:
        """Raises UserError unless all are drafters whose blocks and commits can be combined."""
        where = type(self).__name__
        for name, drafter in zip(names, self.parts, strict=True):
            check_drafter(name, drafter)
            kind, traits = type(drafter).__name__, drafter.traits
            if traits.drafts_trees and not self._takes_trees:
                raise UserError(
                    f"{kind} drafts trees, but the blocks of {where} are chains: use it without "
                    f"{where}"
                )
            if traits.boundaries or (traits.reads_verifier_hidden and self._reads_drafts):
                raise UserError(
                    f"{kind} reads the verifier's hidden states, but drafts in {where} have none: "
                    f"use it without {where}"
                )
        sizes = [drafter.vocab_size for drafter in self.parts]
        if len(set(sizes)) > 1:
            raise UserError(f"{', '.join(names)} must have the same vocabulary, got sizes {sizes}")

    def _check_names(self, shared: Sequence[str]) -> None:
        """Raises UserError if two models have the same name, unless it is in `shared`."""
        names = [name for drafter in self.parts for name in drafter.model_names]
        for name in names:
            if names.count(name) > 1 and name not in shared:
                raise UserError(
                    f"two drafters of {type(self).__name__} have the name {name!r}: give each its "
                    f"own name, or, if they are one model, shared=({name!r},)"
                )

    @property
    def vocab_size(self) -> int:
        return self.parts[0].vocab_size

    @property
    def num_uniforms(self) -> int:
        return sum(drafter.num_uniforms for drafter in self.parts)

    @property
    def has_confidence(self) -> bool:
        return all(drafter.has_confidence for drafter in self.parts)

    @property
    def model_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(n for drafter in self.parts for n in drafter.model_names))

    @property
    def source_names(self) -> tuple[str, ...]:
        return tuple(name for drafter in self.parts for name in drafter.source_names)

    def _split(self, uniforms: Array) -> list[Array]:
        """The uniforms of each drafter."""
        ends = np.cumsum([drafter.num_uniforms for drafter in self.parts])[:-1].tolist()
        return jnp.split(uniforms, ends, axis=1)

    def describe(self) -> Any:
        return {"drafters": [drafter.describe() for drafter in self.parts]}

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        each = [d.prompt_positions(input_lengths, prefix_lengths) for d in self.parts]
        return functools.reduce(np.maximum, each)  # an encoder-decoder returns a single number

    def prefill(self, params: Sequence[Params], prompts: Prompts, max_length: int) -> SeveralState:
        together = zip(self.parts, params, strict=True)
        states = tuple(drafter.prefill(part, prompts, max_length) for drafter, part in together)
        rows = prompts.inputs.shape[0]
        return SeveralState(states, self._kept(states), jnp.zeros((rows,), jnp.int32))

    def commit(
        self, state: SeveralState, tokens: Array, counts: Array, hidden: Array | None = None
    ) -> SeveralState:
        states = []
        for i, (drafter, part) in enumerate(zip(self.parts, state.drafters, strict=True)):
            now = drafter.rewind(part, state.marks[i]) if i and self._reads_drafts else part
            states.append(drafter_calls.commit(drafter, now, tokens, counts, hidden))
        return state._replace(drafters=tuple(states), marks=self._kept(states))

    def mark(self, state: SeveralState) -> tuple[Any, ...]:
        return state.marks if self._reads_drafts else self._marks(state.drafters)

    def rewind(self, state: SeveralState, mark: tuple[Any, ...]) -> SeveralState:
        together = zip(self.parts, state.drafters, mark, strict=True)
        states = tuple(drafter.rewind(part, place) for drafter, part, place in together)
        return state._replace(drafters=states, marks=mark if self._reads_drafts else ())

    def state_axes(self, state: SeveralState) -> Axes:
        together = zip(self.parts, state.drafters, strict=True)
        axes = row_axes(state._replace(drafters=()))
        return axes._replace(drafters=tuple(drafter.state_axes(part) for drafter, part in together))

    def _kept(self, states: Sequence[Any]) -> tuple[Any, ...]:
        """`SeveralState.marks`: a mark can be as large as a state."""
        return self._marks(states) if self._reads_drafts else ()

    def _marks(self, states: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(d.mark(part) for d, part in zip(self.parts, states, strict=True))


def empty_block(
    rows: int, longest: int, vocab: int, with_confidence: bool, with_sources: bool = False
) -> DraftBlock:
    """A block without tokens, of B `rows`, for up to G = `longest` tokens."""
    empty = jnp.zeros((rows, longest + 1, vocab), jnp.float32)
    return DraftBlock(
        tokens=jnp.zeros((rows, longest), jnp.int32),
        probs=empty,
        confidences=empty if with_confidence else None,
        num_drafted=jnp.zeros((rows,), jnp.int32),
        calls={},
        sources=jnp.zeros((rows, longest), jnp.int32) if with_sources else None,
    )


def append_block(block: DraftBlock, part: DraftBlock) -> DraftBlock:
    """The block with the tokens of `part` after its own; passes do not change.

    The bonus position of `part` is not copied: its own drafter may have filled it in.
    """
    starts, counts = block.num_drafted, part.num_drafted
    confidences = block.confidences
    if confidences is not None:
        assert part.confidences is not None
        confidences = _put_first(confidences, part.confidences, starts, counts + 1)
    return block._replace(
        tokens=_put_first(block.tokens, part.tokens, starts, counts),
        probs=_put_first(block.probs, part.probs, starts, counts + 1),
        confidences=confidences,
        num_drafted=starts + counts,
        sources=None
        if block.sources is None
        else _put_first(block.sources, drafted_sources(part), starts, counts),
    )


def cut_from(block: DraftBlock, starts: Array, longest: int) -> DraftBlock:
    """The block without its first `starts [B]` tokens, padded to `longest`."""

    def cut(x: Array, width: int) -> Array:
        place = starts[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
        return jax.vmap(lambda row, at: row.at[at].get(mode="fill", fill_value=0))(x, place)

    confidences = block.confidences
    return block._replace(
        tokens=cut(block.tokens, longest),
        probs=cut(block.probs, longest + 1),
        confidences=None if confidences is None else cut(confidences, longest + 1),
        num_drafted=jnp.maximum(block.num_drafted - starts, 0),
        calls={},
    )


def _put_first(buffer: Array, values: Array, starts: Array, counts: Array) -> Array:
    """Writes the first `counts [B]` of `values [B, n, ...]` at `starts [B]`; see `put_at`."""
    index = jnp.arange(values.shape[1], dtype=jnp.int32)[None]
    return put_at(buffer, values, starts, index < counts[:, None])
