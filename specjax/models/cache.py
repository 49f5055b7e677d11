"""The ragged key-value cache: every row of a batch at its own position.

Axes: B rows, L decoder layers, K key-value heads, S cache length, D head width, T tokens of a
block, P encoder length.

One array per layer, so that a layer's entries are read where they lie. An entry at position k of
row b is live iff k < positions[b]; what lies further on is stale and is overwritten before any
query can see it, which is all there is to rolling back.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Updates(NamedTuple):
    """What one block adds to a cache.

    Attributes:
      keys: L arrays `[B, K, T, D]`.
      values: L arrays `[B, K, T, D]`.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]


class Cross(NamedTuple):
    """What a decoder sees of the encoder; computed once per prompt.

    Attributes:
      keys: L arrays `[B, K, P, D]`.
      values: L arrays `[B, K, P, D]`.
      mask: `[B, P]` bool, which inputs are real.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    mask: Array


class RaggedCache(NamedTuple):
    """Keys and values of what was read so far; the leading axis of every array is the batch.

    Attributes:
      keys: L arrays `[B, K, S, D]`.
      values: L arrays `[B, K, S, D]`.
      cross: the encoder's, or None for a decoder-only network.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    cross: Cross | None = None

    @property
    def max_length(self) -> int:
        """S, the number of positions."""
        return self.keys[0].shape[2]


def allocate(
    num_layers: int, batch: int, kv_heads: int, max_length: int, head_dim: int, dtype: Any
) -> RaggedCache:
    """An empty cache.

    Args:
      num_layers: L.
      batch: B.
      kv_heads: K.
      max_length: S.
      head_dim: D.
      dtype: of the entries.

    Returns:
      A cache of zeros without `cross`.
    """
    shape = (batch, kv_heads, max_length, head_dim)
    return RaggedCache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        values=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
    )


def write(cache: RaggedCache, updates: Updates, positions: Array) -> RaggedCache:
    """Writes a block at `positions[b] .. positions[b] + T - 1` of each row b.

    What falls outside `0 .. S - 1` is dropped: `dynamic_update_slice` would clamp the start and
    destroy live entries.

    Args:
      cache: the cache.
      updates: the block's entries.
      positions: `[B]` int32.

    Returns:
      The cache with the block in it.
    """

    def write_row(row: Array, block: Array, position: Array) -> Array:
        slots = position + jnp.arange(block.shape[1], dtype=position.dtype)
        return row.at[:, slots].set(
            block,
            mode="drop",
            unique_indices=True,
            indices_are_sorted=True,
            wrap_negative_indices=False,
        )

    def write_layer(entries: Array, block: Array) -> Array:
        return jax.vmap(write_row)(entries, block.astype(entries.dtype), positions)

    return cache._replace(
        keys=tuple(map(write_layer, cache.keys, updates.keys)),
        values=tuple(map(write_layer, cache.values, updates.values)),
    )


def logical_axes(cache: RaggedCache) -> RaggedCache:
    """The names of the cache's axes.

    Args:
      cache: a cache, of arrays or of shapes.

    Returns:
      The same structure, a tuple of axis names in the place of each array.
    """

    def entries(layers: tuple[Any, ...], heads: str) -> tuple[Any, ...]:
        return tuple(("batch", heads, "length", "kv") for _ in layers)

    cross = cache.cross
    return RaggedCache(
        keys=entries(cache.keys, "kv_heads"),
        values=entries(cache.values, "kv_heads"),
        cross=cross
        and Cross(
            keys=entries(cross.keys, "kv_heads"),
            values=entries(cross.values, "kv_heads"),
            mask=("batch", "length"),
        ),
    )
