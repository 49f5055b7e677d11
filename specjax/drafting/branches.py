"""Several drafters at once: each drafts its own chain or tree after the last committed token.

Axes: B rows, G nodes without the root, n nodes of a part, V vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from specjax.decoding import drafter_calls
from specjax.decoding.outcome import drafted_sources
from specjax.drafting.several import SeveralDrafters, SeveralState
from specjax.errors import UserError
from specjax.platforms import entry, row
from specjax.types import (
    Bonus,
    ChildLaw,
    DraftBlock,
    Drafter,
    DraftInputs,
    DraftTraits,
    Params,
)


@dataclasses.dataclass(frozen=True)
class BranchesDrafter(SeveralDrafters):
    """Drafters side by side. Its parameters: a tuple of theirs.

    The block is the union of their chains and trees. A token that a drafter was certain to draw, as
    at temperature 0 or by copying, is joined with an equal token of an earlier drafter, so that the
    longest path that is right is found. Other tokens are never joined: that would change their law.

    A node has no single draft distribution, so rules that read the drafter are refused.

    Source: SpecInfer (arXiv 2305.09781), merge-based construction of trees from several models.

    Attributes:
      drafters: at least two, of chains or trees; earlier ones are verified first, and copies belong
        to the end.
      shared: names of models that several drafters use; see `HorizontalCascade`.
    """

    drafters: tuple[Drafter, ...]
    shared: tuple[str, ...] = ()

    _takes_trees: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.drafters, tuple):
            raise UserError(f"drafters must be a tuple of drafters, got {self.drafters!r}")
        if len(self.drafters) < 2:
            raise UserError(
                f"drafters must be at least two, got {len(self.drafters)}: use a single drafter "
                "without BranchesDrafter"
            )
        self._check_parts([f"drafters[{i}]" for i in range(len(self.drafters))])
        self._check_names(self.shared)

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return self.drafters

    @property
    def max_draft(self) -> int:
        return sum(drafter.max_draft for drafter in self.drafters)

    @property
    def has_confidence(self) -> bool:
        return False

    @property
    def traits(self) -> DraftTraits:
        # The number of nodes depends on the tokens, because equal tokens are joined.
        each = [drafter.traits for drafter in self.drafters]
        return DraftTraits(
            prefix_only=False,
            random_stops=any(traits.random_stops for traits in each),
            # A drafter reads the accepted tokens of others in its next pass.
            catches_up=True,
            drafts_trees=True,
            reads_verifier_hidden=any(traits.reads_verifier_hidden for traits in each),
            processes=all(traits.processes for traits in each),
            has_distributions=False,
        )

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
        calls = dict.fromkeys(self.model_names, jnp.int32(0))
        states, blocks, named = list(state.drafters), [], 0
        for i, drafter in enumerate(self.drafters):
            allowed = jnp.minimum(limits, drafter.max_draft)
            drafts = drafter_calls.draft_limits(drafter, params[i], states[i], allowed) > 0
            block, states[i] = drafter_calls.propose(
                drafter,
                params[i],
                states[i],
                inputs._replace(limits=allowed, uniforms=uniforms[i], active=drafts),
                with_confidence=False,
                with_sources=with_sources,
            )
            if with_sources:
                block = block._replace(sources=drafted_sources(block) + named)
                named += len(drafter.source_names)
            blocks.append(block)
            for name in block.calls:
                calls[name] += block.calls[name]
        union = united(blocks)._replace(calls=calls)
        return union, state._replace(drafters=tuple(states))

    def bonus(
        self,
        params: Sequence[Params],
        state: SeveralState,
        inputs: DraftInputs,
        block: DraftBlock,
        *,
        with_confidence: bool,
    ) -> tuple[Bonus, SeveralState]:
        raise NotImplementedError  # no rule reads it: see `DraftTraits.has_distributions`


class _Part(NamedTuple):
    """A part of a union.

    Attributes:
      parents: in the part.
      drawn_from: rows of the union's `probs`.
      length: the number of nodes.
    """

    tokens: Int32[Array, " n"]
    parents: Int32[Array, " n"]
    laws: Int32[Array, " n"]
    drawn_from: Int32[Array, " n"]
    sources: Int32[Array, " n"]
    length: Int32[Array, ""]


def united(blocks: Sequence[DraftBlock]) -> DraftBlock:
    """The union of blocks after the same committed token, in their order.

    A token that was not drawn, or that has all of its draft distribution, is joined with an equal
    earlier token after the same text. A sibling that the law of a drawn token needs stays in the
    union, and past its end if it was cut off: the draw did not know of the limit.

    The blocks are chains and trees, and all or none have `sources`. The union is a tree of up to
    the sum of their lengths, with `drawn_from` and without calls.
    """
    nobody = sum(_rows(block) for block in blocks)  # the row that no token is drawn from
    parts, probs, start = [], [], 0
    for block in blocks:
        part = _part(block, start, nobody)
        parts.append(part)
        if block.probs is not None:
            rows = start + jnp.arange(_rows(block), dtype=jnp.int32)
            # Rows that nothing is drawn from may be arbitrary.
            exists = jax.vmap(_exists)(part)[:, None]
            used = jnp.any((part.drawn_from[:, None] == rows[None, :, None]) & exists, axis=2)
            probs.append(jnp.where(used[..., None], block.probs[:, : rows.size], 0.0))
        start += _rows(block)
    size = sum(part.tokens.shape[1] for part in parts)
    none = jnp.zeros((blocks[0].num_drafted.size, size), jnp.int32)
    tree = _Part(none, none, none, jnp.full_like(none, nobody), none, none[:, 0])
    for part in parts:
        tree = jax.vmap(_joined)(tree, part)
    tree = jax.vmap(_with_cut_siblings)(tree, parts)
    return DraftBlock(
        tokens=tree.tokens,
        probs=jnp.pad(jnp.concatenate(probs, axis=1), ((0, 0), (0, 1), (0, 0))) if probs else None,
        confidences=None,
        num_drafted=tree.length,
        calls={},
        parents=tree.parents,
        laws=tree.laws,
        sources=None if blocks[0].sources is None else tree.sources,
        drawn_from=tree.drawn_from,
    )


def _rows(block: DraftBlock) -> int:
    """The number of rows of `probs` that a token may be drawn from."""
    if block.probs is None:
        return 0
    # The last node has no children.
    return block.probs.shape[1] - (block.drawn_from is None)


def _exists(part: _Part) -> Array:
    """Which nodes of a row's part its limit left, `[n]`."""
    return jnp.arange(part.tokens.size) < part.length


def _part(block: DraftBlock, start: int, nobody: int) -> _Part:
    """A block whose `probs` begin at row `start` of the union's."""
    tokens, parents, laws = block.tokens, block.parents, block.laws
    if parents is None:
        size = tokens.shape[1]
        parents = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], tokens.shape)
        laws = jnp.full_like(tokens, ChildLaw.DRAWN)
    assert laws is not None, "the trees of BranchesDrafter need DraftBlock.laws"
    rows = jnp.full_like(tokens, nobody)
    if block.probs is None:
        laws = jnp.full_like(tokens, ChildLaw.TOP)
    else:
        source_rows = parents if block.drawn_from is None else block.drawn_from
        rows = jnp.where(source_rows < _rows(block), source_rows + start, nobody)
        drawn_by = block.probs[:, : tokens.shape[1]]
        if block.parents is not None:
            drawn_by = jax.vmap(jax.vmap(row, (None, 0)))(block.probs, source_rows)
        chances = jax.vmap(jax.vmap(entry))(drawn_by, tokens)
        # A token that was certain is a function of the text.
        laws = jnp.where(chances >= 1.0, ChildLaw.TOP, laws)
    return _Part(tokens, parents, laws, rows, drafted_sources(block), block.num_drafted)


def _needed(part: _Part) -> Array:
    """The nodes `[n]` without which a drawn node of the block would have another law."""
    index = jnp.arange(part.tokens.size)
    beside = (part.drawn_from[:, None] == part.drawn_from[None]) & _exists(part)[None]
    elder = index[:, None] < index[None]
    law = part.laws[None]
    return jnp.any(beside & ((law == ChildLaw.OFF) | (elder & (law == ChildLaw.WITHOUT))), axis=1)


def _joined(tree: _Part, part: _Part) -> _Part:
    """A row's tree with one more part."""
    size, longest = part.tokens.size, tree.tokens.size
    numbers = jnp.arange(1, longest + 1, dtype=jnp.int32)
    fixed, needed = part.laws == ChildLaw.TOP, _needed(part)

    def step(i: Array, carry: tuple[_Part, Array]) -> tuple[_Part, Array]:
        tree, places = carry  # places [n + 1]: where the nodes of the part are in the tree
        new = jax.tree.map(lambda x: x[i] if x.ndim else x, part)
        new = new._replace(parents=places[new.parents])
        equal = (tree.parents == new.parents) & (tree.tokens == new.tokens)
        equal &= numbers <= tree.length
        joins = fixed[i] & jnp.any(equal)
        adds = (i < part.length) & (needed[i] | ~joins)
        at = jnp.where(adds, tree.length, longest)
        put = lambda x, y: x.at[at].set(y, mode="drop") if x.ndim else x + adds.astype(jnp.int32)  # noqa: E731
        place = jnp.where(joins, numbers[jnp.argmax(equal)], tree.length + 1)
        return jax.tree.map(put, tree, new), places.at[i + 1].set(place)

    start = tree, jnp.zeros((size + 1,), jnp.int32)
    return lax.fori_loop(0, size, step, start)[0]


def _with_cut_siblings(tree: _Part, parts: Sequence[_Part]) -> _Part:
    """A row's tree, and past its end the nodes that were cut off and that a law needs."""
    kept = jnp.concatenate([_needed(part) & ~_exists(part) for part in parts])
    tokens = jnp.concatenate([part.tokens for part in parts])
    rows = jnp.concatenate([part.drawn_from for part in parts])
    at = tree.length - 1 + jnp.cumsum(kept, dtype=jnp.int32)
    at = jnp.where(kept, at, kept.size)
    put = lambda x, new: x.at[at].set(new, mode="drop")  # noqa: E731
    return tree._replace(tokens=put(tree.tokens, tokens), drawn_from=put(tree.drawn_from, rows))
