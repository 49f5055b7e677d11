"""Attention over a ragged cache, as flax.linen modules.

Axes: B rows, T queries, S keys, E model width, H query heads in K groups of N (H = K·N), D head
width, P heads that share a vector (see `CacheLayout`).
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from specjax.compilation import product_precision
from specjax.models.cache import CacheEntries, CacheLayout, RaggedCache, without_nan, write_layer
from specjax.models.config import ModelConfig, Style
from specjax.models.layers import Dense, RMSNorm
from specjax.models.position_encoding import Rope, rotate
from specjax.models.weights import normal_init
from specjax.types import TreeShape

Array = jax.Array

# Far below any logit but finite, so that adding a bias gives no NaN.
MASKED = -1e30

# Blocks of at most this many queries multiply keys of several heads with zeros beside their own.
_FEW = 32


class Segment(NamedTuple):
    """Keys and values that queries attend to, under one softmax with the other segments.

    Attributes:
      keys: `[B, K, S, D]`, or as the layout of the attention has them.
      values: `[B, K, D, S]`, likewise.
      bias: float32, broadcastable to `[B, K, N, T, S]`: position biases, or
        `MASKED` where the query must not see the key.
    """

    keys: Array
    values: Array
    bias: Array


class Attention(nn.Module):
    """Multi-head attention with grouped queries.

    Attributes:
      config: the sizes.
      style: the scale, the soft cap, biases, norms of queries and keys, and dropout.
      layout: of the keys and values that it reads and returns.
    """

    config: ModelConfig
    style: Style
    layout: CacheLayout = CacheLayout()

    def setup(self) -> None:
        """Creates the parameters and submodules."""
        config, style = self.config, self.style
        grouped = config.kv_heads < config.num_heads
        own, shared = "joined_kv", "joined_grouped_kv" if grouped else "joined_kv"
        dense = functools.partial(
            Dense, dtype=config.dtype, param_dtype=config.param_dtype, kernel_init=normal_init
        )
        project = functools.partial(dense, has_bias=style.biases)
        width = config.kv_heads * config.head_dim
        self.query = project(
            config.num_heads * config.head_dim,
            ("embed", own),
            kernel_init=self._query_init,
        )
        self.key = project(width, ("embed", shared))
        self.value = project(width, ("embed", shared))
        self.out = dense(config.embed_dim, ("joined_kv", "embed"))
        if style.qk_norms is not None:
            each = style.qk_norms == "head"
            sizes = (config.norm_eps, config.dtype, config.param_dtype, style.plus_one_norms)
            self.query_norm = RMSNorm(*sizes, axis="kv" if each else own)
            self.key_norm = RMSNorm(*sizes, axis="kv" if each else shared)
        self.dropout = nn.Dropout(style.dropout_rate, broadcast_dims=(-2,))

    def _query_init(self, *args: Any) -> Array:
        kernel = normal_init(*args)
        if self.style.query_scale != 1.0:
            return kernel
        # T5 does not divide attention logits by sqrt(D); its initial queries are divided instead.
        return kernel / jnp.sqrt(jnp.asarray(self.config.head_dim, kernel.dtype))

    def _heads(self, x: Array, norm: str) -> Array:
        """Projected queries or keys `[B, S, heads·D]`, normed by `norm`: `[B, S, heads, D]`."""
        norms = self.style.qk_norms
        if norms == "all":
            x = getattr(self, norm)(x)
        x = x.reshape(*x.shape[:2], -1, self.config.head_dim)
        return getattr(self, norm)(x) if norms == "head" else x

    def keys_values(self, x: Array, rope: Rope | None = None) -> tuple[Array, Array]:
        """`x [B, S, E]` -> keys and values as `layout` has them."""
        keys = self._heads(self.key(x), "key_norm")
        values = self.value(x).reshape(keys.shape)
        return self.layout.arrange(keys if rope is None else rotate(keys, rope), values)

    def __call__(
        self,
        x: Array,
        segments: Sequence[Segment],
        rope: Rope | None = None,
        deterministic: bool = True,
    ) -> Array:
        config = self.config
        query = self._heads(self.query(x), "query_norm")
        if rope is not None:
            query = rotate(query, rope)
        query = query.reshape(*x.shape[:2], config.kv_heads, -1, config.head_dim)
        y = self._attend(query, segments, deterministic)
        return self.out(y.reshape(*x.shape[:2], config.num_heads * config.head_dim))

    def _attend(self, query: Array, segments: Sequence[Segment], deterministic: bool) -> Array:
        """Weighted sums of the segments' values for queries `[B, T, K, N, D]`, of that shape."""
        length, groups = query.shape[1], query.shape[3]
        heads, by_position = self.layout
        if length > _FEW:
            parts = (self.layout.separate(segment.keys, segment.values) for segment in segments)
            segments = [
                Segment(*part, segment.bias) for part, segment in zip(parts, segments, strict=True)
            ]
            heads = 1
        query = _spread(query, heads)
        # On TPUs the product of a matrix and a single vector does not use the matrix units: it
        # takes three times as long as with two vectors.
        single = by_position and length * query.shape[3] == 1
        if single:
            query = jnp.pad(query, [(0, 0)] * 3 + [(0, 1), (0, 0)])
        logits = jnp.concatenate([self._logits(query, segment) for segment in segments], axis=-1)
        weights = jax.nn.softmax(logits, axis=-1).astype(self.config.dtype)
        weights = self.dropout(weights, deterministic=deterministic)
        ends = np.cumsum([segment.bias.shape[-1] for segment in segments])[:-1].tolist()
        # Back to the heads that share keys.
        weights = weights.reshape(query.shape[0], *query.shape[2:4], length, -1)
        values = "bskd" if by_position else "bkds"
        precision = product_precision(self.config.dtype)
        y = functools.reduce(
            operator.add,
            (
                jnp.einsum(f"bknts,{values}->btknd", part, segment.values, precision=precision)
                for part, segment in zip(jnp.split(weights, ends, axis=-1), segments, strict=True)
            ),
        )
        return _own_parts(y[:, :, :, :1] if single else y, heads, groups)

    def _logits(self, query: Array, segment: Segment) -> Array:
        """`[B, K, N, T, S]` float32, for a query from `_spread`."""
        keys = "bskd" if self.layout.by_position else "bksd"
        logits = jnp.einsum(
            f"btknd,{keys}->bknts",
            query,
            segment.keys,
            precision=product_precision(self.config.dtype),
            preferred_element_type=jnp.float32,
        )
        logits = logits.reshape(logits.shape[0], self.config.kv_heads, -1, *logits.shape[3:])
        if self.style.query_scale != 1.0:
            logits = logits * self.style.query_scale
        if (cap := self.style.attn_softcap) is not None:
            logits = cap * jnp.tanh(logits / cap)
        return logits + segment.bias


def _own_lanes(heads: int, width: int) -> Array:
    """`[P, 1, P D]` bool: the lanes that belong to each of P heads that share a vector."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (heads, 1, heads * width), 2)
    return lane // width == jax.lax.broadcasted_iota(jnp.int32, lane.shape, 0)


def _spread(query: Array, heads: int) -> Array:
    """Queries `[B, T, K, N, D]` for keys that share their vector with other heads' keys."""
    batch, length, kv_heads, groups, width = query.shape
    if heads == 1:
        return query
    query = query.reshape(batch, length, kv_heads // heads, heads, groups, width).swapaxes(3, 4)
    query = query.reshape(batch, length, -1, 1, groups, heads * width)
    query = jnp.where(_own_lanes(heads, width), query, jnp.zeros((), query.dtype))
    return query.reshape(batch, length, -1, heads * groups, heads * width)


def _own_parts(y: Array, heads: int, groups: int) -> Array:
    """Takes from `[B, T, K / P, P N, P D]` the part of each query's own head; `[B, T, K, N, D]`."""
    batch, length, sets, _, width = y.shape
    if heads == 1:
        return y
    y = y.reshape(batch, length, sets, heads, groups, width)
    # All other parts are zero.
    y = jnp.where(_own_lanes(heads, width // heads), y, jnp.zeros((), y.dtype)).sum(axis=3)
    y = y.reshape(batch, length, sets, groups, heads, width // heads).swapaxes(3, 4)
    return y.reshape(batch, length, sets * heads, groups, width // heads)


def block_bias(length: int, window: int | None = None) -> Array:
    """The mask of a block that attends to itself: `[1, 1, 1, T, T]` float32, 0 or `MASKED`.

    Args:
      length: T.
      window: the number of positions that a query sees, including its own; None for all.

    Returns:
      The additive mask.
    """
    # Computed on the device: a host array would be stored in each executable.
    shape = (1, 1, 1, length, length)
    age = jax.lax.broadcasted_iota(jnp.int32, shape, 3)
    age -= jax.lax.broadcasted_iota(jnp.int32, shape, 4)
    seen = (age >= 0) & (age < (window or length))
    return jnp.where(seen, 0.0, MASKED).astype(jnp.float32)


def around_bias(length: int, before: int, after: int) -> Array:
    """The mask of an encoder's window: `[1, 1, 1, P, P]` float32, 0 or `MASKED`.

    Args:
      length: P.
      before: the number of positions before its own that a query sees.
      after: the number of positions after its own that a query sees.

    Returns:
      The additive mask.
    """
    shape = (1, 1, 1, length, length)
    age = jax.lax.broadcasted_iota(jnp.int32, shape, 3)
    age -= jax.lax.broadcasted_iota(jnp.int32, shape, 4)
    return jnp.where((age <= before) & (-age <= after), 0.0, MASKED).astype(jnp.float32)


class LayerMemory(NamedTuple):
    """A layer's entries of earlier tokens.

    Attributes:
      keys: of the cache.
      values: of the cache.
      bias: of the cached positions.
      write: writes the keys and values of a block into the cache, where the block then reads them;
        None if the block's entries are read beside the cache.
      hides_nan: whether a token's NaN entries are hidden from tokens that do not see it.
    """

    keys: Array
    values: Array
    bias: Array
    write: Callable[[Array, Array, Array, Array], tuple[Array, Array]] | None = None
    hides_nan: bool = False


def attended(
    past: LayerMemory | None, keys: Array, values: Array, bias: Array
) -> tuple[list[Segment], Array, Array]:
    """The segments that a block attends to, and the block's entries or the cache with them.

    Args:
      past: the layer's entries of earlier tokens.
      keys: of the block.
      values: of the block.
      bias: the mask of a block that attends to itself.
    """
    if past is not None and past.hides_nan:
        keys, values = without_nan(keys, values)
    own = Segment(keys, values, bias)
    if past is None:
        return [own], keys, values
    if past.write is None:
        return [Segment(past.keys, past.values, past.bias), own], keys, values
    keys, values = past.write(past.keys, past.values, keys, values)
    return [Segment(keys, values, past.bias)], keys, values


class Memory(NamedTuple):
    """A cache and the positions where a block continues it.

    Attributes:
      cache: the entries of earlier tokens.
      positions: `[B]` int32, where the block of each row starts, or its tree; entries before it are
        live.
      layout: how the entries lie; static.
      written: whether a layer writes its entries before it reads the cache; static.
      tree: the places of the block's tokens in a tree; None for a chain.
    """

    cache: RaggedCache
    positions: Array
    layout: CacheLayout = CacheLayout()
    written: bool = False
    tree: TreeShape | None = None

    @property
    def max_length(self) -> int:
        """S, the number of positions."""
        return self.cache.max_length(self.layout)

    def bias(self, length: int, window: int | None = None) -> Array:
        """The mask of a block that attends to the cache: `[B, 1, 1, T, S]` float32, 0 or `MASKED`.

        Args:
          length: T.
          window: the number of positions that a query sees, including its own; None for all.

        Returns:
          The additive mask (T is 1 without a window if `written` is false and there is no tree).
        """
        if self.tree is not None:
            numbers = jnp.arange(self.max_length, dtype=jnp.int32)[None, None]
            earlier = numbers < self.positions[:, None, None]
            seen = self._over_slots(earlier, self.tree.seen[..., : self._cached_nodes])
            return _mask(seen, self.places(length)[..., None], self.slots()[:, None], window)
        keys = jnp.arange(self.max_length, dtype=jnp.int32)[None, None, :]
        start = self.positions[:, None, None]
        queries = start + jnp.arange(length, dtype=jnp.int32)[None, :, None]
        seen = keys <= queries if self.written else keys < start
        return _mask(seen, queries, keys, window)

    def tree_bias(self, length: int, window: int | None = None) -> Array:
        """The mask of a tree's tokens that attend to each other: `[B, 1, 1, T, T]`; see `bias`."""
        assert self.tree is not None
        places, seen = self.places(length), self.tree.seen[..., -length:]
        return _mask(seen, places[..., None], places[:, None], window)

    def places(self, length: int) -> Array:
        """The positions in the text of a block of T tokens: `[B, T]` int32."""
        if self.tree is None:
            return self.positions[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
        return self.positions[:, None] + self.tree.depths[:, -length:]

    def slots(self) -> Array:
        """The positions in the text of the cache's slots, for a tree: `[B or 1, S]` int32."""
        assert self.tree is not None
        places = self.positions[:, None] + self.tree.depths[:, : self._cached_nodes]
        return self._over_slots(jnp.arange(self.max_length, dtype=jnp.int32)[None], places)

    @property
    def _cached_nodes(self) -> int:
        """The number of a tree's nodes that a layer reads from the cache."""
        assert self.tree is not None
        return self.tree.depths.shape[1] - (0 if self.written else self.tree.seen.shape[1])

    def _over_slots(self, given: Array, nodes: Array) -> Array:
        """`given [..., S]` with `nodes [B, ..., n]` in the slots of a tree's first n nodes."""
        if nodes.shape[-1] == 0:
            return given
        given = jnp.broadcast_to(given, (*nodes.shape[:-1], given.shape[-1]))
        numbers = self.positions[:, None] + jnp.arange(nodes.shape[-1], dtype=jnp.int32)[None]

        def put(row: Array, at: Array, new: Array) -> Array:
            return row.at[..., at].set(new, mode="drop", unique_indices=True)

        return jax.vmap(put)(given, numbers, nodes)

    def layer(self, index: int, bias: Array) -> LayerMemory:
        """The entries of layer `index`."""
        start, tree = self.positions, self.tree
        if tree is not None:
            start = start + (tree.depths.shape[1] - tree.seen.shape[1])
        write = functools.partial(write_layer, start, self.layout)
        keys, values = self.cache.keys[index], self.cache.values[index]
        hides_nan = tree is not None and not self.written  # `write` does
        return LayerMemory(keys, values, bias, write if self.written else None, hides_nan)


def _mask(seen: Array, queries: Array, keys: Array, window: int | None) -> Array:
    """`seen [B, T, S]` within a window, as a bias; `queries [B, T, 1]`, `keys [B, 1, S]`."""
    if window is not None:
        seen = seen & (keys > queries - window)
    return jnp.where(seen, 0.0, MASKED).astype(jnp.float32)[:, None, None]


def block_updates(keys: list[Array], values: list[Array], hidden: Array) -> CacheEntries:
    """The entries that a block adds to a cache; `hidden [B, T, E]` shows which are NaN."""
    computed = ~jnp.any(jnp.isnan(hidden), axis=2)
    return CacheEntries(tuple(keys), tuple(values), computed)
