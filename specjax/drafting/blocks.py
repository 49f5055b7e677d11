"""Functions that fill, lengthen and cut blocks of drafters.

Axes: B rows, G longest block, V vocabulary.
"""

import jax
import jax.numpy as jnp

from specjax.decoding.history import put_at
from specjax.decoding.token_sources import drafted_sources
from specjax.types import Array, DraftBlock


def empty_block(
    rows: int, longest: int, vocab: int, with_confidence: bool, with_sources: bool = False
) -> DraftBlock:
    """A block without tokens.

    Args:
      rows: B.
      longest: G.
      vocab: V.
      with_confidence: whether the block has confidences.
      with_sources: whether it has sources.
    """
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
