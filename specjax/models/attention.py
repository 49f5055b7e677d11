"""Attention over a ragged cache, as flax.linen modules.

Axes: B rows, T queries, S keys, E model width, `read` the width of what is read (a draft head may
read more than E), H query heads in K groups of N (H = K·N), D head width. P heads share a vector of
P D lanes: there are K / P sets of P N queries. Keys are `[B, K, S, D]` and values `[B, K, D, S]` in
the default layout. Masks are additive: 0 or `MASKED`.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen.partitioning import param_with_axes
from jaxtyping import Array, Bool, Float, Float32, Int32

from specjax import cpu_kernels
from specjax.compilation import product_precision
from specjax.kernel_choice import on_one_cpu, on_one_tpu
from specjax.models.attention_kernel import BLOCK, attend_long, fits
from specjax.models.cache import (
    CacheEntries,
    CacheLayout,
    RaggedCache,
    is_long,
    places_from,
    without_nan,
    write_layer,
)
from specjax.models.config import ModelConfig, Style
from specjax.models.layers import Dense, RMSNorm, normalise
from specjax.models.position_encoding import MASKED, Rope, rotate
from specjax.models.weights import normal_init
from specjax.types import TreeShape, traced_dataclass

# Blocks of at most this many queries multiply keys of several heads with zeros beside their own.
_FEW = 32


class Segment(NamedTuple):
    """Keys and values that queries attend to, under one softmax with the other segments.

    Attributes:
      bias: broadcastable to `[B, K, N, T, S]`: the masks, with position biases.
      start: the position of the first key, if the segment continues the one before it.
    """

    keys: Array
    values: Array
    bias: Float32[Array, "..."]
    start: Int32[Array, " B"] | None = None


class Attention(nn.Module):
    """Multi-head attention with grouped queries.

    Attributes:
      keyed_values: see `LayerSpec.keyed_values`.
    """

    config: ModelConfig
    style: Style
    layout: CacheLayout = CacheLayout()
    keyed_values: bool = False

    def setup(self) -> None:
        config, style = self.config, self.style
        grouped = config.kv_heads < config.num_heads
        queries, shared = "joined_kv", "joined_grouped_kv" if grouped else "joined_kv"
        dense = functools.partial(
            Dense, dtype=config.dtype, param_dtype=config.param_dtype, kernel_init=normal_init
        )
        project = functools.partial(dense, has_bias=style.biases)
        width = config.kv_heads * config.head_dim
        self.query = project(
            config.num_heads * config.head_dim * (2 if style.gated else 1),
            ("embed", queries),
            kernel_init=self._query_init,
        )
        self.key = project(width, ("embed", shared))
        self.value = project(width, ("embed", shared))
        self.out = dense(config.embed_dim, ("joined_kv", "embed"), has_bias=style.out_bias)
        if style.sinks:
            shape = (config.num_heads,)
            self.sinks = param_with_axes(
                "sinks", nn.initializers.zeros, shape, config.param_dtype, axes=("heads",)
            )
        if style.qk_norms is not None:
            each = style.qk_norms == "head"
            sizes = (config.norm_eps, config.dtype, config.param_dtype, style.plus_one_norms)
            self.query_norm = RMSNorm(*sizes, axis="kv" if each else queries)
            self.key_norm = RMSNorm(*sizes, axis="kv" if each else shared)
        self.dropout = nn.Dropout(style.dropout_rate, broadcast_dims=(-2,))

    def _query_init(self, *args: Any) -> Array:
        kernel = normal_init(*args)
        if self.style.query_scale != 1.0:
            return kernel
        # T5 does not divide attention logits by sqrt(D); its initial queries are divided instead.
        return kernel / jnp.sqrt(jnp.asarray(self.config.head_dim, kernel.dtype))

    def _heads(self, x: Float[Array, "B S *joined"], norm: str) -> Float[Array, "B S heads D"]:
        norms = self.style.qk_norms
        if norms == "all":
            x = getattr(self, norm)(x)
        x = x.reshape(*x.shape[:2], -1, self.config.head_dim)
        return getattr(self, norm)(x) if norms == "head" else x

    def keys_values(
        self, x: Float[Array, "B S read"], rope: Rope | None = None
    ) -> tuple[Array, Array]:
        made = self.key(x)
        keys = self._heads(made, "key_norm")
        values = (made if self.keyed_values else self.value(x)).reshape(keys.shape)
        if self.style.value_norms:
            values = normalise(values, self.config.norm_eps).astype(values.dtype)
        return self.layout.arrange(keys if rope is None else rotate(keys, rope), values)

    def __call__(
        self,
        x: Float[Array, "B T read"],
        segments: Sequence[Segment],
        rope: Rope | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B T E"]:
        config = self.config
        query = self.query(x)
        if self.style.gated:
            query = query.reshape(*x.shape[:2], -1, 2, config.head_dim)
            query, gate = query[:, :, :, 0], query[:, :, :, 1]
        query = self._heads(query, "query_norm")
        if rope is not None:
            query = rotate(query, rope)
        query = query.reshape(*x.shape[:2], config.kv_heads, -1, config.head_dim)
        y = self._attend(query, segments, deterministic)
        if self.style.gated:
            y *= nn.sigmoid(gate).reshape(y.shape)
        return self.out(y.reshape(*x.shape[:2], config.num_heads * config.head_dim))

    def _attend(
        self,
        query: Float[Array, "B T K N D"],
        segments: Sequence[Segment],
        deterministic: bool,
    ) -> Float[Array, "B T K N D"]:
        style, sinks = self.style, None
        if style.sinks:
            shape = (1, *query.shape[2:4], 1, 1)
            sinks = self.sinks.astype(jnp.float32).reshape(shape)
        longest = max(segments, key=lambda segment: segment.bias.shape[-1])
        others = [segment for segment in segments if segment is not longest]
        if (
            self.layout.joins_long
            and deterministic
            and query.shape[1] <= _FEW
            and is_long(longest.keys)
            and fits(query)
            and all(segment.bias.shape[-1] <= BLOCK for segment in others)
        ):
            kernel, plain = forms(style.query_scale, style.attn_softcap)
            rows = query.shape[0]
            if sinks is not None:  # to the kernel, positions with zeros
                nothing = jnp.zeros((rows, 1, *longest.keys.shape[2:]), longest.keys.dtype)
                others.append(Segment(nothing, nothing, sinks))
            parts = [query]
            for keys, values, bias, _ in (longest, *others):
                parts += [keys, values, jnp.broadcast_to(bias, (rows, *bias.shape[1:]))]
            return jax.vmap(functools.partial(on_one_tpu, kernel=kernel, plain=plain))(*parts)
        if deterministic and _takes(query, segments, self.layout):
            numbers, tree = jax.tree.flatten((query, segments, sinks))
            kernel, plain = _on_cpus(tree, style.query_scale, style.attn_softcap)
            return on_one_cpu(*numbers, kernel=kernel, plain=plain)
        dropout = functools.partial(self.dropout, deterministic=deterministic)
        by_position, softcap = self.layout.by_position, style.attn_softcap
        return _attend(query, segments, by_position, style.query_scale, softcap, sinks, dropout)


@functools.cache
def forms(scale: float, softcap: float | None) -> tuple[Any, Any]:
    """Attention to a long segment and short ones: the kernel for rows, plain code for a row.

    Both take the query, then each segment's keys and values by position, and its bias. They are
    cached because they identify programs.
    """

    def kernel(query: Float[Array, "B T K N D"], *parts: Array) -> Float[Array, "B T K N D"]:
        flat = [x if x.ndim == 5 else x.reshape(*x.shape[:2], -1) for x in parts]
        return attend_long(query, *flat, scale=scale, softcap=softcap)

    def plain(query: Float[Array, "T K N D"], *parts: Array) -> Float[Array, "T K N D"]:
        parts = tuple(part[None] for part in parts)
        segments = list(map(Segment, parts[::3], parts[1::3], parts[2::3]))
        return _attend(query[None], segments, True, scale, softcap)[0]

    return kernel, plain


def _takes(
    query: Float[Array, "B T K N D"], segments: Sequence[Segment], layout: CacheLayout
) -> bool:
    few = query.shape[1] <= cpu_kernels.MOST_QUERIES
    dtypes = {query.dtype, *(segment.keys.dtype for segment in segments)}
    known = dtypes <= {jnp.dtype(jnp.float32)} or dtypes <= {jnp.dtype(jnp.bfloat16)}
    plain = layout.by_position or len(segments) > 2
    return few and known and not plain and cpu_kernels.available()


# Cached because they identify programs.
@functools.cache
def _on_cpus(tree: Any, scale: float, softcap: float | None) -> tuple[Any, Any]:
    def kernel(*numbers: Array) -> Array:
        query, segments, sinks = jax.tree.unflatten(tree, numbers)
        parts = [
            (keys, values, jnp.broadcast_to(bias, (*bias.shape[:-1], keys.shape[2])))
            for keys, values, bias, _ in segments
        ]
        start = segments[-1].start if len(segments) > 1 else None
        sinks = None if sinks is None else sinks.reshape(-1)
        y = cpu_kernels.attention(query, parts, start, sinks, scale, softcap)
        return y.astype(query.dtype)

    def plain(*numbers: Array) -> Array:
        query, segments, sinks = jax.tree.unflatten(tree, numbers)
        return _attend(query, segments, False, scale, softcap, sinks)

    return kernel, plain


def _attend(
    query: Float[Array, "B T K N D"],
    segments: Sequence[Segment],
    by_position: bool,
    scale: float,
    softcap: float | None,
    sinks: Float32[Array, "1 K N 1 1"] | None = None,
    dropout: Callable[[Array], Array] = lambda weights: weights,
) -> Float[Array, "B T K N D"]:
    length, kv_heads, groups, width = query.shape[1:]
    dtype, precision = query.dtype, product_precision(query.dtype)
    heads = 1
    if by_position:
        # Those of a long cache are all in one vector.
        heads = segments[0].keys.shape[-1] // width if length <= _FEW else 1
        shape = kv_heads // heads, heads * width
        segments = [
            Segment(
                keys.reshape(*keys.shape[:2], *shape), values.reshape(*keys.shape[:2], *shape), bias
            )
            for keys, values, bias, _ in segments
        ]
    query = _spread(query, heads)
    # On TPUs the product of a matrix and a single vector does not use the matrix units: it
    # takes three times as long as with two vectors.
    single = by_position and length * query.shape[3] == 1
    if single:
        query = jnp.pad(query, [(0, 0)] * 3 + [(0, 1), (0, 0)])

    def logits_of(segment: Segment) -> Float32[Array, "B K N T S"]:
        keys = "bskd" if by_position else "bksd"
        logits = jnp.einsum(
            f"btknd,{keys}->bknts",
            query,
            segment.keys,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        logits = logits.reshape(logits.shape[0], kv_heads, -1, *logits.shape[3:])
        if scale != 1.0:
            logits = logits * scale
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        return logits + segment.bias

    of_segments = [logits_of(segment) for segment in segments]
    if sinks is not None:
        of_segments.append(jnp.broadcast_to(sinks, (*of_segments[0].shape[:-1], 1)))
    logits = jnp.concatenate(of_segments, axis=-1)
    weights = dropout(jax.nn.softmax(logits, axis=-1).astype(dtype))
    ends = np.cumsum([part.shape[-1] for part in of_segments])[:-1].tolist()
    # Back to the heads that share keys.
    weights = weights.reshape(query.shape[0], *query.shape[2:4], length, -1)
    parts = jnp.split(weights, ends, axis=-1)[: len(segments)]
    values = "bskd" if by_position else "bkds"
    y = functools.reduce(
        operator.add,
        (
            jnp.einsum(f"bknts,{values}->btknd", part, segment.values, precision=precision)
            for part, segment in zip(parts, segments, strict=True)
        ),
    )
    return _gathered(y[:, :, :, :1] if single else y, heads, groups)


def _lanes(heads: int, width: int) -> Bool[Array, "P 1 lanes"]:
    lane = jax.lax.broadcasted_iota(jnp.int32, (heads, 1, heads * width), 2)
    return lane // width == jax.lax.broadcasted_iota(jnp.int32, lane.shape, 0)


def _spread(query: Float[Array, "B T K N D"], heads: int) -> Float[Array, "B T sets queries lanes"]:
    batch, length, kv_heads, groups, width = query.shape
    if heads == 1:
        return query
    query = query.reshape(batch, length, kv_heads // heads, heads, groups, width).swapaxes(3, 4)
    query = query.reshape(batch, length, -1, 1, groups, heads * width)
    query = jnp.where(_lanes(heads, width), query, jnp.zeros((), query.dtype))
    return query.reshape(batch, length, -1, heads * groups, heads * width)


def _gathered(
    y: Float[Array, "B T sets queries lanes"], heads: int, groups: int
) -> Float[Array, "B T K N D"]:
    batch, length, sets, _, width = y.shape
    if heads == 1:
        return y
    y = y.reshape(batch, length, sets, heads, groups, width)
    # All other parts are zero.
    y = jnp.where(_lanes(heads, width // heads), y, jnp.zeros((), y.dtype)).sum(axis=3)
    y = y.reshape(batch, length, sets, groups, heads, width // heads).swapaxes(3, 4)
    return y.reshape(batch, length, sets * heads, groups, width // heads)


def block_bias(length: int, window: int | None = None) -> Float32[Array, "1 1 1 T T"]:
    """The mask of a block that attends to itself.

    The window is the number of positions that a query sees, including its own; None for all.
    """
    return around_bias(length, (window or length) - 1, 0)


def around_bias(length: int, before: int, after: int) -> Float32[Array, "1 1 1 T T"]:
    """The mask of an encoder's window: a query sees so many positions before and after its own."""
    # Computed on the device: a host array would be stored in each executable.
    shape = (1, 1, 1, length, length)
    age = jax.lax.broadcasted_iota(jnp.int32, shape, 3)
    age -= jax.lax.broadcasted_iota(jnp.int32, shape, 4)
    return jnp.where((age <= before) & (-age <= after), 0.0, MASKED).astype(jnp.float32)


def seen_bias(seen: Bool[Array, "_ _ S"]) -> Float32[Array, "_ 1 1 _ S"]:
    """The mask of attention by what each query sees."""
    return jnp.where(seen, 0.0, MASKED).astype(jnp.float32)[:, None, None]


@traced_dataclass
class LayerMemory:
    """A layer's entries of earlier tokens.

    Attributes:
      start: the position of a block's first token; None if it continues no entries.
      written: whether the block's keys and values are written into the cache, and read there; else
        they are read beside it.
      hides_nan: whether a token's NaN entries are hidden from tokens that do not see it.
    """

    keys: Array
    values: Array
    bias: Float32[Array, "..."]
    start: Int32[Array, " B"] | None = None
    written: bool = dataclasses.field(default=False, metadata={"static": True})
    hides_nan: bool = dataclasses.field(default=False, metadata={"static": True})


def attended(
    past: LayerMemory | None, layout: CacheLayout, keys: Array, values: Array, bias: Array
) -> tuple[list[Segment], Array, Array]:
    """The segments that a block attends to, and the block's entries or the cache with them."""
    if past is not None and past.hides_nan:
        keys, values = without_nan(keys, values)
    if past is None:
        return [Segment(keys, values, bias)], keys, values
    if past.start is None or not past.written:
        block = Segment(keys, values, bias, past.start)
        return [Segment(past.keys, past.values, past.bias), block], keys, values
    keys, values = write_layer(past.start, layout, past.keys, past.values, keys, values)
    return [Segment(keys, values, past.bias)], keys, values


class Memory(NamedTuple):
    """A cache and the positions where a block continues it.

    Attributes:
      positions: where the block of each row starts, or its tree; entries before it are live.
      layout: how the entries lie; static.
      written: whether a layer writes its entries before it reads the cache; static.
      tree: the places of the block's tokens in a tree; None for a chain.
    """

    cache: RaggedCache
    positions: Int32[Array, " B"]
    layout: CacheLayout = CacheLayout()
    written: bool = False
    tree: TreeShape | None = None

    @property
    def max_length(self) -> int:
        """S, the number of positions."""
        return self.cache.max_length(self.layout)

    def bias(self, length: int, window: int | None = None) -> Float32[Array, "B 1 1 _ S"]:
        """The mask of a block of `length` tokens that attends to the cache; see `block_bias`.

        It is the same for all queries without a window if `written` is false and there is no tree.
        """
        numbers = jnp.arange(self.max_length, dtype=jnp.int32)[None, None]
        queries = self.places(length)[..., None]
        seen = numbers < self.positions[:, None, None]
        if self.tree is not None:
            seen = self._over_slots(seen, self.tree.seen[..., : self._cached_nodes])
        elif self.written:
            seen = numbers <= queries
        return _mask(seen, queries, self.slots()[:, None], window)

    def tree_bias(self, length: int, window: int | None = None) -> Float32[Array, "B 1 1 T T"]:
        """The mask of a tree's tokens that attend to each other."""
        assert self.tree is not None
        places, seen = self.places(length), self.tree.seen[..., -length:]
        return _mask(seen, places[..., None], places[:, None], window)

    def places(self, length: int) -> Int32[Array, "B T"]:
        """The positions of a block's tokens in the text."""
        if self.tree is None:
            return places_from(self.positions, length)
        return self.positions[:, None] + self.tree.depths[:, -length:]

    def slots(self) -> Int32[Array, "_ S"]:
        """The positions of the cache's slots in the text."""
        slots = jnp.arange(self.max_length, dtype=jnp.int32)[None]
        if self.tree is None:
            return slots
        places = self.positions[:, None] + self.tree.depths[:, : self._cached_nodes]
        return self._over_slots(slots, places)

    @property
    def _cached_nodes(self) -> int:
        assert self.tree is not None
        return self.tree.depths.shape[1] - (0 if self.written else self.tree.seen.shape[1])

    def _over_slots(self, slots: Array, nodes: Array) -> Array:
        # `slots [..., S]`, with `nodes [B, ..., n]` in those of a tree's first n nodes.
        if nodes.shape[-1] == 0:
            return slots
        slots = jnp.broadcast_to(slots, (*nodes.shape[:-1], slots.shape[-1]))
        numbers = places_from(self.positions, nodes.shape[-1])

        def put(row: Array, at: Array, new: Array) -> Array:
            return row.at[..., at].set(new, mode="drop", unique_indices=True)

        return jax.vmap(put)(slots, numbers, nodes)

    def layer(self, index: int, bias: Array) -> LayerMemory:
        start, tree = self.positions, self.tree
        if tree is not None:
            start = start + (tree.depths.shape[1] - tree.seen.shape[1])
        keys, values = self.cache.keys[index], self.cache.values[index]
        hides_nan = tree is not None and not self.written  # `write_layer` does
        return LayerMemory(keys, values, bias, start, self.written, hides_nan)


def _mask(seen: Array, queries: Array, keys: Array, window: int | None) -> Array:
    if window is not None:
        seen = seen & (keys > queries - window)
    return seen_bias(seen)


def block_updates(
    keys: Sequence[Array], values: Sequence[Array], hidden: Float[Array, "B T E"]
) -> CacheEntries:
    """The entries that a block adds to a cache; the hidden states show which are NaN."""
    computed = ~jnp.any(jnp.isnan(hidden), axis=2)
    return CacheEntries(tuple(keys), tuple(values), computed)
