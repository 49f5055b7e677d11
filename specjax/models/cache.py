"""The ragged key-value cache: every row of a batch has its own position.

Axes: B rows, L decoder layers, K key-value heads, S cache length, D head width, T tokens of a
block, P encoder length.

There is one array per layer, so that a layer reads its entries without a copy. Keys have the shape
`[B, K, S, D]` and values `[B, K, D, S]`: each product of attention then runs along the last axis of
the array it reads. On a CPU this is two to seven times as fast as values of shape `[B, K, S, D]`.

An entry at position k of row b is live iff k < positions[b]. Later entries are stale; they are
overwritten before any query can see them. So a smaller position is all that a rollback needs.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array

# The axis of the positions, not counting the rows.
KEY_AXIS, VALUE_AXIS = 1, 2
# Past the end of any cache.
_NOWHERE = 1 << 30


class CacheEntries(NamedTuple):
    """The entries that one block adds to a cache.

    Attributes:
      keys: L arrays `[B, K, T, D]`.
      values: L arrays `[B, K, D, T]`.
      computed: `[B, T]` bool, true if a token's last hidden state has no NaN. It makes the write
        depend on every read of the old cache. Without it XLA cannot order reads and write, and
        copies the whole cache at every step.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    computed: Array


class Cross(NamedTuple):
    """The encoder's keys and values for the decoder; computed once per prompt.

    Attributes:
      keys: L arrays `[B, K, P, D]`.
      values: L arrays `[B, K, D, P]`.
      mask: `[B, P]` bool, false at padding.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    mask: Array


class RaggedCache(NamedTuple):
    """Keys and values of the tokens read so far; the leading axis of every array is the batch.

    Attributes:
      keys: L arrays `[B, K, S, D]`.
      values: L arrays `[B, K, D, S]`.
      cross: the encoder's keys and values, or None for a decoder-only network.
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
      dtype: the dtype of the entries.

    Returns:
      A cache of zeros without `cross`.

    Raises:
      ValueError: if `max_length` is below 1.
    """
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}")
    keys = (batch, kv_heads, max_length, head_dim)
    values = (batch, kv_heads, head_dim, max_length)
    return RaggedCache(
        keys=tuple(jnp.zeros(keys, dtype) for _ in range(num_layers)),
        values=tuple(jnp.zeros(values, dtype) for _ in range(num_layers)),
    )


def write(cache: RaggedCache, updates: CacheEntries, positions: Array) -> RaggedCache:
    """Writes a block at `positions[b] .. positions[b] + T - 1` of each row b.

    Entries outside `0 .. S - 1` are dropped: `dynamic_update_slice` would clamp the start and
    overwrite live entries. Tokens whose hidden state is NaN are not written: if they are padding of
    a prompt, their entries would make the other positions NaN.

    Args:
      cache: the cache.
      updates: the block's entries.
      positions: `[B]` of an integer dtype.

    Returns:
      The cache that includes the block.
    """
    # In 8-bit or unsigned dtypes, sums and differences of positions would wrap around.
    index = jnp.arange(updates.computed.shape[1], dtype=jnp.int32)[None]
    place = positions.astype(jnp.int32)[:, None] + index
    place = jnp.where(updates.computed, place, _NOWHERE + index)

    def write_row(axis: int, row: Array, block: Array, slots: Array) -> Array:
        index = (slice(None),) * axis + (slots,)
        return row.at[index].set(
            block,
            mode="drop",
            unique_indices=True,
            indices_are_sorted=slots.size == 1,
            wrap_negative_indices=False,
        )

    def write_layers(axis: int, layers: tuple[Array, ...], blocks: tuple[Array, ...]) -> Any:
        write_rows = jax.vmap(functools.partial(write_row, axis))
        return tuple(
            write_rows(entries, block.astype(entries.dtype), place)
            for entries, block in zip(layers, blocks, strict=True)
        )

    return cache._replace(
        keys=write_layers(KEY_AXIS, cache.keys, updates.keys),
        values=write_layers(VALUE_AXIS, cache.values, updates.values),
    )


def logical_axes(cache: RaggedCache) -> Any:
    """The names of the cache's axes.

    Args:
      cache: a cache, of arrays or of shapes.

    Returns:
      The same structure with a tuple of axis names instead of each array.
    """
    names = {
        "keys": ("batch", "kv_heads", "length", "kv"),
        "values": ("batch", "kv_heads", "kv", "length"),
        "mask": ("batch", "length"),
    }

    def axes(path: tuple[Any, ...], _: Any) -> tuple[str, ...]:
        fields = [step.name for step in path if isinstance(step, jax.tree_util.GetAttrKey)]
        return names[fields[-1]]

    return jax.tree_util.tree_map_with_path(axes, cache)
