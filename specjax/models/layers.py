"""The layers that all networks share, as flax.linen modules.

Axes: B rows, T queries, S keys, E model width, H query heads in K groups of N (H = K·N), D head
width, M feed-forward width, V vocabulary.

Every parameter has logical axis names (collection `params_axes`), as in T5X. Softmax, norms and
logits are float32 for activations of any dtype. Products of float32 have the backend's default
precision: exact on a CPU, with rounded operands on a TPU or (TF32) a GPU. For exact products set
`jax.config.update("jax_default_matmul_precision", "highest")`.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen.partitioning import param_with_axes

from specjax.models.cache import CacheEntries, CacheLayout, RaggedCache, write_layer
from specjax.models.rope import Rope, rotate

Array = jax.Array
Initializer = Callable[..., Array]

# Far below any logit but finite, so that adding a bias gives no NaN.
MASKED = -1e30

# The name of a tied embedding's transposed copy `[E, V]`; see `Model.prepare`.
TRANSPOSED = "transposed_embedding"

# Queries, of a block at most. Beyond, the zeros beside keys of several heads cost more than a copy.
_FEW = 32

normal_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
truncated_init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


class RMSNorm(nn.Module):
    """Root-mean-square normalisation without mean or bias, in float32.

    Attributes:
      eps: is added to the mean square.
      dtype: the dtype of the result.
      param_dtype: the dtype of the scale.
      plus_one: whether the stored scale is the scale minus one (Gemma). It is then applied in
        float32 before the cast to `dtype`, else after the cast.
    """

    eps: float
    dtype: Any
    param_dtype: Any
    plus_one: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Normalises the last axis of `x [..., E]`."""
        init = nn.initializers.zeros if self.plus_one else nn.initializers.ones
        scale = param_with_axes("scale", init, x.shape[-1:], self.param_dtype, axes=("embed",))
        scale = scale.reshape((1,) * (x.ndim - 1) + scale.shape)
        x = x.astype(jnp.float32)
        y = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        if self.plus_one:
            return (y * (1.0 + scale.astype(jnp.float32))).astype(self.dtype)
        return y.astype(self.dtype) * scale.astype(self.dtype)


class Dense(nn.Module):
    """A matrix product without bias: `x [..., in] @ kernel [in, features]`.

    Attributes:
      features: the width of the result.
      axes: the logical names of the kernel's two axes.
      dtype: the dtype of the product and its result.
      param_dtype: the dtype of the kernel.
      kernel_init: the kernel's initialiser.
    """

    features: int
    axes: tuple[str, str]
    dtype: Any
    param_dtype: Any
    kernel_init: Initializer = truncated_init

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Multiplies the last axis of `x` with the kernel."""
        shape = (x.shape[-1], self.features)
        kernel = param_with_axes(
            "kernel", self.kernel_init, shape, self.param_dtype, axes=self.axes
        )
        # As a product of two matrices: with three axes XLA on CPUs recomputes x and transposes its
        # copy for the kernel's gradient (a quarter of a training step).
        flat = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        return jnp.dot(flat, kernel.astype(self.dtype)).reshape(*x.shape[:-1], self.features)


def float32_logits(x: Array, kernel: Array, contract: int) -> Array:
    """The product of `x [..., E]` and a matrix with E on axis `contract`, summed in float32.

    bfloat16 operands are not converted first: their products are exact in float32, and the matrix,
    the largest of a small network, is read as bfloat16.
    """
    if kernel.dtype != x.dtype:
        x, kernel = x.astype(jnp.float32), kernel.astype(jnp.float32)
    y = jax.lax.dot_general(
        x.reshape(-1, x.shape[-1]),  # as in Dense
        kernel,
        (((1,), (contract,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return y.reshape(*x.shape[:-1], y.shape[-1])


class LogitsDense(nn.Module):
    """The untied output projection; its result is float32.

    Attributes:
      vocab_size: V.
      param_dtype: the dtype of the kernel.
    """

    vocab_size: int
    param_dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """`x [B, T, E]` -> logits `[B, T, V]` float32."""
        shape = (x.shape[-1], self.vocab_size)
        kernel = param_with_axes(
            "kernel", truncated_init, shape, self.param_dtype, axes=("embed", "vocab")
        )
        return float32_logits(x, kernel, 0)


class Embed(nn.Module):
    """The token embedding and the tied output projection.

    Attributes:
      vocab_size: V.
      features: E.
      dtype: the dtype of the result.
      param_dtype: the dtype of the table.
      stddev: the standard deviation of the initial entries.
    """

    vocab_size: int
    features: int
    dtype: Any
    param_dtype: Any
    stddev: float = 1.0

    def setup(self) -> None:
        """Creates the parameters and submodules."""
        self.embedding = param_with_axes(
            "embedding",
            nn.initializers.normal(self.stddev),
            (self.vocab_size, self.features),
            self.param_dtype,
            axes=("vocab", "embed"),
        )

    def __call__(self, tokens: Array) -> Array:
        """Tokens `[B, T]` -> `[B, T, E]`; a token outside `0 .. V - 1` takes the nearest row."""
        tokens = tokens.astype(jnp.int32)  # a clip in 8 bits would wrap around
        return jnp.take(self.embedding, tokens, axis=0, mode="clip").astype(self.dtype)

    def attend(self, x: Array) -> Array:
        """`x [B, T, E]` -> logits `[B, T, V]` float32, with the embedding as output projection."""
        if self.has_variable("params", TRANSPOSED):
            return float32_logits(x, self.get_variable("params", TRANSPOSED), 0)
        return float32_logits(x, self.embedding, 1)


class MLP(nn.Module):
    """The feed-forward block: an output projection of the product of activated input projections.

    Attributes:
      mlp_dim: M.
      activations: one per input projection; `("silu", "linear")` is SwiGLU.
      dtype: the dtype of the activations.
      param_dtype: the dtype of the kernels.
      dropout_rate: the rate in the hidden layer; all positions share one mask.
    """

    mlp_dim: int
    activations: tuple[str, ...]
    dtype: Any
    param_dtype: Any
    dropout_rate: float = 0.0

    @nn.compact
    def __call__(self, x: Array, deterministic: bool = True) -> Array:
        """`x [B, T, E]` -> `[B, T, E]`."""
        count = len(self.activations)
        names = ["wi"] if count == 1 else [f"wi_{i}" for i in range(count)]
        dense = functools.partial(Dense, dtype=self.dtype, param_dtype=self.param_dtype)
        hidden = [
            _activate(activation, dense(self.mlp_dim, ("embed", "mlp"), name=name)(x))
            for activation, name in zip(self.activations, names, strict=True)
        ]
        y = functools.reduce(operator.mul, hidden)
        y = nn.Dropout(self.dropout_rate, broadcast_dims=(-2,))(y, deterministic=deterministic)
        return dense(x.shape[-1], ("mlp", "embed"), name="wo")(y)


def _activate(name: str, x: Array) -> Array:
    return x if name == "linear" else getattr(jax.nn, name)(x)


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
      num_heads: H.
      num_kv_heads: K.
      head_dim: D.
      features: E, the width of the result.
      dtype: the dtype of the activations (logits and softmax are float32).
      param_dtype: the dtype of the kernels.
      scale: the factor of the attention logits.
      softcap: c in c·tanh(x / c), which is applied to the scaled logits, or None.
      query_init: the initialiser of the query kernel.
      dropout_rate: the rate for the attention weights; all queries share one mask.
      layout: how the keys and values lie that it reads and makes.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    features: int
    dtype: Any
    param_dtype: Any
    scale: float = 1.0
    softcap: float | None = None
    query_init: Initializer = normal_init
    dropout_rate: float = 0.0
    layout: CacheLayout = CacheLayout()  # noqa: RUF009  immutable

    def setup(self) -> None:
        """Creates the parameters and submodules."""
        dense = functools.partial(
            Dense, dtype=self.dtype, param_dtype=self.param_dtype, kernel_init=normal_init
        )
        kv = "joined_kv" if self.num_kv_heads == self.num_heads else "joined_grouped_kv"
        self.query = dense(
            self.num_heads * self.head_dim, ("embed", "joined_kv"), kernel_init=self.query_init
        )
        self.key = dense(self.num_kv_heads * self.head_dim, ("embed", kv))
        self.value = dense(self.num_kv_heads * self.head_dim, ("embed", kv))
        self.out = dense(self.features, ("joined_kv", "embed"))
        self.dropout = nn.Dropout(self.dropout_rate, broadcast_dims=(-2,))

    def keys_values(self, x: Array, rope: Rope | None = None) -> tuple[Array, Array]:
        """`x [B, S, E]` -> keys and values as `layout` has them."""
        shape = (*x.shape[:2], self.num_kv_heads, self.head_dim)
        keys, values = self.key(x).reshape(shape), self.value(x).reshape(shape)
        if rope is not None:
            keys = rotate(keys, rope)
        return self.layout.arrange(keys, values)

    def __call__(
        self,
        x: Array,
        segments: Sequence[Segment],
        rope: Rope | None = None,
        deterministic: bool = True,
    ) -> Array:
        """Queries from `x [B, T, E]` attend to all segments; returns `[B, T, E]`."""
        batch, length, _ = x.shape
        groups = self.num_heads // self.num_kv_heads
        query = self.query(x).reshape(batch, length, self.num_heads, self.head_dim)
        if rope is not None:
            query = rotate(query, rope)
        query = query.reshape(batch, length, self.num_kv_heads, groups, self.head_dim)
        y = self._attend(query, segments, deterministic)
        return self.out(y.reshape(batch, length, self.num_heads * self.head_dim))

    def _attend(self, query: Array, segments: Sequence[Segment], deterministic: bool) -> Array:
        """What queries `[B, T, K, N, D]` take of the segments' values, of the same shape."""
        length, groups = query.shape[1], query.shape[3]
        heads, by_position = self.layout
        if length > _FEW:
            parts = (self.layout.separate(segment.keys, segment.values) for segment in segments)
            segments = [
                Segment(*part, segment.bias) for part, segment in zip(parts, segments, strict=True)
            ]
            heads = 1
        query = _spread(query, heads)
        # TPUs multiply a matrix with one vector outside of their matrix units, which takes three
        # times as long as with two.
        alone = by_position and length * query.shape[3] == 1
        if alone:
            query = jnp.pad(query, [(0, 0)] * 3 + [(0, 1), (0, 0)])
        logits = jnp.concatenate([self._logits(query, segment) for segment in segments], axis=-1)
        weights = jax.nn.softmax(logits, axis=-1).astype(self.dtype)
        weights = self.dropout(weights, deterministic=deterministic)
        ends = np.cumsum([segment.bias.shape[-1] for segment in segments])[:-1].tolist()
        # Back to the heads that share keys.
        weights = weights.reshape(query.shape[0], *query.shape[2:4], length, -1)
        values = "bskd" if by_position else "bkds"
        y = functools.reduce(
            operator.add,
            (
                jnp.einsum(f"bknts,{values}->btknd", part, segment.values)
                for part, segment in zip(jnp.split(weights, ends, axis=-1), segments, strict=True)
            ),
        )
        return _own_parts(y[:, :, :, :1] if alone else y, heads, groups)

    def _logits(self, query: Array, segment: Segment) -> Array:
        """`[B, K, N, T, S]` float32, for a query from `_spread`."""
        keys = "bskd" if self.layout.by_position else "bksd"
        logits = jnp.einsum(
            f"btknd,{keys}->bknts", query, segment.keys, preferred_element_type=jnp.float32
        )
        logits = logits.reshape(logits.shape[0], self.num_kv_heads, -1, *logits.shape[3:])
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * jnp.tanh(logits / self.softcap)
        return logits + segment.bias


def _own_lanes(heads: int, width: int) -> Array:
    """`[P, 1, P D]` bool: which lanes of a vector that P heads share are each head's own."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (heads, 1, heads * width), 2)
    return lane // width == jax.lax.broadcasted_iota(jnp.int32, lane.shape, 0)


def _spread(query: Array, heads: int) -> Array:
    """Queries `[B, T, K, N, D]` for keys that share their vector with other heads' keys.

    Returns:
      `[B, T, K / P, P N, P D]`, P = `heads`: each query at the place of its own head, beside zeros.
    """
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
    # The only part that is not zero.
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


class Past(NamedTuple):
    """What a layer remembers of earlier tokens.

    Attributes:
      keys: of the cache.
      values: of the cache.
      bias: of the cached positions.
      write: writes the keys and values of a block among them, which then attends to itself there;
        None where they stay apart.
    """

    keys: Array
    values: Array
    bias: Array
    write: Callable[[Array, Array, Array, Array], tuple[Array, Array]] | None = None


def attended(
    past: Past | None, keys: Array, values: Array, bias: Array
) -> tuple[list[Segment], Array, Array]:
    """What a block attends to, and its entries, or the layer's cache with them.

    Args:
      past: what the layer remembers of earlier tokens.
      keys: of the block.
      values: of the block.
      bias: of the block that attends to itself.
    """
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
      positions: `[B]` int32, where the block of each row starts; entries before it are live.
      layout: how the entries lie; static.
      written: whether a layer writes its entries before it reads the cache; static.
    """

    cache: RaggedCache
    positions: Array
    layout: CacheLayout = CacheLayout()
    written: bool = False

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
          The additive mask (T is 1 without a window, unless the block is written).
        """
        keys = jnp.arange(self.max_length, dtype=jnp.int32)[None, None, :]
        start = self.positions[:, None, None]
        queries = start + jnp.arange(length, dtype=jnp.int32)[None, :, None]
        seen = keys <= queries if self.written else keys < start
        if window is not None:
            seen = seen & (keys > queries - window)
        return jnp.where(seen, 0.0, MASKED).astype(jnp.float32)[:, None, None]

    def layer(self, index: int, bias: Array) -> Past:
        """What one layer remembers."""
        write = functools.partial(write_layer, self.positions, self.layout)
        keys, values = self.cache.keys[index], self.cache.values[index]
        return Past(keys, values, bias, write if self.written else None)


def block_updates(keys: list[Array], values: list[Array], hidden: Array) -> CacheEntries:
    """The entries that a block adds to a cache; `hidden [B, T, E]` says which are NaN."""
    computed = ~jnp.any(jnp.isnan(hidden), axis=2)
    return CacheEntries(tuple(keys), tuple(values), computed)
