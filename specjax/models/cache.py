"""The ragged key-value cache: every row of a batch has its own position.

Axes: B rows, L decoder layers, K key-value heads, S cache length, D head width, T tokens of a
block, P encoder length.

There is one array per layer that makes keys and values (`Style.cached`), so that a layer reads its
entries without a copy. K and D may differ by layer. A `CacheLayout` sets the order of the axes; by
default, keys are `[B, K, S, D]` and values `[B, K, D, S]`.

An entry at position k of row b is live iff k < positions[b]. Later entries are stale; they are
overwritten before any query can see them. So a smaller position is all that a rollback needs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Integer

from specjax.models import recurrent
from specjax.models.config import ModelConfig
from specjax.models.recurrent import RecurrentMemory

# Past the end of any cache.
_NOWHERE = 1 << 30


# The number of lanes of a TPU's vectors.
_LANES = 128
# With up to six queries for each of these heads, the rows of a TPU's matrix unit are not full.
_FEW_HEADS = 16
# On one TPU `attend_long` reads a cache of so many positions, in which all heads share a vector.
# Two blocks: short rows read less. At one block libtpu's simulation gives both the same time.
LONG = 2048


class CacheLayout(NamedTuple):
    """How a layer's keys and values lie in their arrays.

    Attributes:
      heads: P, the number of heads that share a vector of lanes.
      by_position: whether keys and values are `[B, S, K / P, P D]`; else keys are
        `[B, K / P, S, P D]` and values `[B, K / P, P D, S]`.
      joins_long: whether all heads share a vector where a cache by position has `LONG` positions or
        more. The functions below read it off the arrays.
    """

    heads: int = 1
    by_position: bool = False
    joins_long: bool = False

    @property
    def key_axis(self) -> int:
        """The axis of the positions of keys, not counting the rows."""
        return 0 if self.by_position else 1

    @property
    def value_axis(self) -> int:
        """The axis of the positions of values, not counting the rows."""
        return 0 if self.by_position else 2

    def arrange(
        self, keys: Float[Array, "B S K D"], values: Float[Array, "B S K D"]
    ) -> tuple[Array, Array]:
        """Keys and values as they lie in a cache."""
        rows, length, heads, width = keys.shape
        shape = (rows, length, heads // self.heads, self.heads * width)
        keys, values = keys.reshape(shape), values.reshape(shape)
        if self.by_position:
            return keys, values
        return keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 3, 1)


def layout_for(
    platform: str, heads: int, kv_heads: int, head_dim: int, ways: int | None = None
) -> CacheLayout:
    """The fastest layout for decoding.

    On CPUs and GPUs, products of attention run along the last axis of the array that they read: on
    a CPU, two to seven times as fast as with values `[B, K, S, D]`. On a TPU, a write is fast if
    all entries of a position lie together. Heads of less than 128 share a vector, because a product
    with so few queries waits for the memory: if the heads are few, all share one vector, which
    avoids transposes; else as many as fill the lanes. So many `ways` of a mesh's devices split
    the heads; None: there is a single device.
    """
    if platform != "tpu":
        return CacheLayout()
    joins_long = ways is None
    local = kv_heads // ways if ways is not None and kv_heads % ways == 0 else kv_heads
    if head_dim < _LANES and local * (heads // kv_heads) <= _FEW_HEADS:
        return CacheLayout(local, True, joins_long)
    fits = [p for p in range(1, max(_LANES // head_dim, 1) + 1) if local % p == 0]
    return CacheLayout(max(fits), True, joins_long)


def is_long(keys: Array) -> bool:
    """Whether these keys, in a layout by position, lie as `attend_long` reads them."""
    return keys.shape[1] >= LONG and keys.shape[2] == 1


class CacheEntries(NamedTuple):
    """The entries that one block adds to a cache, for each layer that makes keys and values.

    Attributes:
      recurrent: the memory of the other layers after the block, whole; None if there are none.
      computed: true if a token's last hidden state has no NaN. It makes the write depend on every
        read of the old cache. Without it XLA cannot order reads and write, and copies the whole
        cache at every step.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    computed: Bool[Array, "B T"]
    recurrent: RecurrentMemory | None = None


class Cross(NamedTuple):
    """The encoder's keys and values for each layer of the decoder; computed once per prompt."""

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    mask: Bool[Array, "B P"]  # false at padding


class RaggedCache(NamedTuple):
    """Keys and values of the tokens read so far, for each layer that makes them.

    The leading axis of every array is the batch.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    cross: Cross | None = None
    recurrent: RecurrentMemory | None = None

    def max_length(self, layout: CacheLayout) -> int:
        return self.keys[0].shape[1 + layout.key_axis]


def allocate(
    layers: Sequence[ModelConfig], batch: int, max_length: int, layout: CacheLayout
) -> RaggedCache:
    """An empty cache of layers of these sizes: zeros, without `cross`."""

    def empty(sizes: ModelConfig, axis: int) -> Array:
        joins = layout.joins_long and max_length >= LONG
        heads = sizes.kv_heads if joins else layout.heads
        shape = [batch, sizes.kv_heads // heads, heads * sizes.head_dim]
        shape.insert(1 + axis, max_length)
        return jnp.zeros(shape, sizes.dtype)

    return RaggedCache(
        keys=tuple(empty(sizes, layout.key_axis) for sizes in layers),
        values=tuple(empty(sizes, layout.value_axis) for sizes in layers),
    )


def write(
    cache: RaggedCache, updates: CacheEntries, positions: Integer[Array, " B"], layout: CacheLayout
) -> RaggedCache:
    """Writes a block at `positions[b] .. positions[b] + T - 1` of each row b.

    Entries outside `0 .. S - 1` are dropped: `dynamic_update_slice` would clamp the start and
    overwrite live entries. Tokens whose hidden state is NaN are not written: if they are padding of
    a prompt, their entries would make the other positions NaN.
    """
    place = places_from(positions, updates.computed.shape[1])
    place = jnp.where(updates.computed, place, _NOWHERE + place - place[:, :1])

    def write_layers(axis: int, layers: tuple[Array, ...], blocks: tuple[Array, ...]) -> Any:
        pairs = zip(layers, blocks, strict=True)
        return tuple(_write_at(axis, entries, block, place) for entries, block in pairs)

    return cache._replace(
        keys=write_layers(layout.key_axis, cache.keys, updates.keys),
        values=write_layers(layout.value_axis, cache.values, updates.values),
        recurrent=updates.recurrent,
    )


def write_layer(
    positions: Int32[Array, " B"],
    layout: CacheLayout,
    keys: Array,
    values: Array,
    new_keys: Array,
    new_values: Array,
) -> tuple[Array, Array]:
    """`write` for one layer; NaN entries become 0."""
    new_keys, new_values = without_nan(new_keys, new_values)
    place = places_from(positions, new_keys.shape[1 + layout.key_axis])
    return (
        _write_at(layout.key_axis, keys, new_keys, place),
        _write_at(layout.value_axis, values, new_values, place),
    )


def without_nan(*entries: Array) -> tuple[Array, ...]:
    """Entries of a block, 0 in place of NaN."""
    # The mask is added to the logits, which does not hide NaN: other queries would see it. The
    # logits of the token itself are NaN anyway.
    return tuple(jnp.where(jnp.isnan(x), 0, x) for x in entries)


def keep(
    cache: RaggedCache,
    positions: Integer[Array, " B"],
    nodes: Integer[Array, "B G"],
    layout: CacheLayout,
) -> RaggedCache:
    """Moves the entries of a path through a tree, which starts at `positions[b]`, together.

    The entry at `positions[b] + nodes[b, i]` moves to `positions[b] + 1 + i`. Entries that come
    from slots past the end are arbitrary; those that move there are dropped.
    """
    place = places_from(positions, nodes.shape[1] + 1)
    source = place[:, :1] + nodes.astype(jnp.int32)

    def move(axis: int, layers: tuple[Array, ...]) -> tuple[Array, ...]:
        # Outside of the cache, the default would read NaN, which a mask does not hide.
        take = jax.vmap(lambda row, at: jnp.take(row, at, axis=axis, mode="clip"))
        return tuple(_write_at(axis, x, take(x, source), place[:, 1:]) for x in layers)

    return cache._replace(
        keys=move(layout.key_axis, cache.keys), values=move(layout.value_axis, cache.values)
    )


def places_from(positions: Integer[Array, " B"], length: int) -> Int32[Array, "B T"]:
    """So many positions of each row, from its own."""
    # In 8-bit or unsigned dtypes, sums and differences of positions would wrap around.
    return positions.astype(jnp.int32)[:, None] + jnp.arange(length, dtype=jnp.int32)[None]


# Writes a block at places of an axis, which does not count the rows.
def _write_at(axis: int, entries: Array, block: Array, place: Int32[Array, "B T"]) -> Array:
    if axis == 0:  # all heads of a long cache share a vector
        block = block.reshape(*block.shape[:2], *entries.shape[2:])

    def write_row(row: Array, block: Array, slots: Array) -> Array:
        index = (slice(None),) * axis + (slots,)
        return row.at[index].set(
            block,
            mode="drop",
            unique_indices=True,
            indices_are_sorted=slots.size == 1,
            wrap_negative_indices=False,
        )

    return jax.vmap(write_row)(entries, block.astype(entries.dtype), place)


def logical_axes(cache: RaggedCache, layout: CacheLayout) -> Any:
    """The cache, of arrays or of shapes, with a tuple of axis names in place of each array."""
    keys, values = ("batch", "kv_heads", "length", "kv"), ("batch", "kv_heads", "kv", "length")
    if layout.by_position:
        keys = values = ("batch", "length", "kv_heads", "kv")
    names = {"keys": keys, "values": values, "mask": ("batch", "length")}

    def axes(path: tuple[Any, ...], _: Any) -> tuple[str, ...]:
        fields = [step.name for step in path if isinstance(step, jax.tree_util.GetAttrKey)]
        return names[fields[-1]]

    named = jax.tree_util.tree_map_with_path(axes, cache._replace(recurrent=None))
    if cache.recurrent is None:
        return named
    return named._replace(recurrent=recurrent.logical_axes(cache.recurrent))
