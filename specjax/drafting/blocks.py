"""Blocks that drafters fill."""

import jax.numpy as jnp

from specjax.types import DraftBlock


def empty_block(rows: int, longest: int, vocab: int, with_confidence: bool) -> DraftBlock:
    """A block without tokens.

    Args:
      rows: B.
      longest: G.
      vocab: V.
      with_confidence: whether there are confidences.
    """
    empty = jnp.zeros((rows, longest + 1, vocab), jnp.float32)
    return DraftBlock(
        tokens=jnp.zeros((rows, longest), jnp.int32),
        probs=empty,
        confidences=empty if with_confidence else None,
        num_drafted=jnp.zeros((rows,), jnp.int32),
        calls={},
    )
