"""The layers that all networks share, as flax.linen modules.

Axes: B rows, T queries, S keys, E model width, H query heads in K groups of N (H = K·N), D head
width, M feed-forward width, V vocabulary.

Every parameter has logical axis names (collection `params_axes`), as in T5X. Softmax, norms and
logits are float32 for activations of any dtype. Products of float32 activations are of float32 on
every device; see `product_precision`.
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

from specjax.models.cache import CacheEntries, RaggedCache
from specjax.models.rope import Rope, rotate

Array = jax.Array
Initializer = Callable[..., Array]

# Far below any logit but finite, so that adding a bias gives no NaN.
MASKED = -1e30

# The name of a tied embedding's transposed copy `[E, V]`; see `Model.prepare`.
TRANSPOSED = "transposed_embedding"

normal_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
truncated_init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


def product_precision(dtype: Any) -> jax.lax.Precision | None:
    """The `precision` of every product of a network whose activations have this dtype.

    JAX by itself rounds the operands of float32 products, to bfloat16 on a TPU and to TF32 on a
    GPU, in most products but not in all: a pass of one token and one of several then choose other
    tokens. Who decodes in float32 wants its digits; bfloat16 is there for speed.

    Args:
      dtype: the dtype of the activations.

    Returns:
      HIGHEST for float32, unless the user has set `jax_default_matmul_precision`; else None, by
      which JAX takes the user's setting or its own.
    """
    config: Any = jax.config
    if dtype != jnp.float32 or config.jax_default_matmul_precision is not None:
        return None
    return jax.lax.Precision.HIGHEST


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
        y = jnp.dot(flat, kernel.astype(self.dtype), precision=product_precision(self.dtype))
        return y.reshape(*x.shape[:-1], self.features)


def float32_logits(x: Array, kernel: Array, contract: int) -> Array:
    """The product of `x [..., E]` and a matrix with E on axis `contract`, summed in float32.

    bfloat16 operands are not converted first: their products are exact in float32, and the matrix,
    the largest of a small network, is read as bfloat16.
    """
    precision = product_precision(x.dtype)  # of the network, before x is converted
    if kernel.dtype != x.dtype:
        x, kernel = x.astype(jnp.float32), kernel.astype(jnp.float32)
    y = jax.lax.dot_general(
        x.reshape(-1, x.shape[-1]),  # as in Dense
        kernel,
        (((1,), (contract,)), ((), ())),
        precision=precision,
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
      keys: `[B, K, S, D]`.
      values: `[B, K, D, S]`.
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
        """`x [B, S, E]` -> keys `[B, K, S, D]` and values `[B, K, D, S]`."""
        shape = (*x.shape[:2], self.num_kv_heads, self.head_dim)
        keys, values = self.key(x).reshape(shape), self.value(x).reshape(shape)
        if rope is not None:
            keys = rotate(keys, rope)
        return keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 3, 1)

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
        logits = [self._logits(query, segment) for segment in segments]
        weights = jax.nn.softmax(jnp.concatenate(logits, axis=-1), axis=-1).astype(self.dtype)
        weights = self.dropout(weights, deterministic=deterministic)
        ends = np.cumsum([segment.keys.shape[2] for segment in segments])[:-1].tolist()
        parts = jnp.split(weights, ends, axis=-1)
        precision = product_precision(self.dtype)
        y = functools.reduce(
            operator.add,
            (
                jnp.einsum("bknts,bkds->btknd", part, segment.values, precision=precision)
                for part, segment in zip(parts, segments, strict=True)
            ),
        )
        return self.out(y.reshape(batch, length, self.num_heads * self.head_dim))

    def _logits(self, query: Array, segment: Segment) -> Array:
        logits = jnp.einsum(
            "btknd,bksd->bknts",
            query,
            segment.keys,
            precision=product_precision(self.dtype),
            preferred_element_type=jnp.float32,
        )
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * jnp.tanh(logits / self.softcap)
        return logits + segment.bias


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


class Memory(NamedTuple):
    """A cache and the positions where a block continues it.

    Attributes:
      cache: the entries of earlier tokens.
      positions: `[B]` int32, where the block of each row starts; entries before it are live.
    """

    cache: RaggedCache
    positions: Array

    def bias(self, length: int, window: int | None = None) -> Array:
        """The mask of a block that attends to the cache: `[B, 1, 1, T, S]` float32, 0 or `MASKED`.

        Args:
          length: T.
          window: the number of positions that a query sees, including its own; None for all.

        Returns:
          The additive mask (T is 1 without a window).
        """
        keys = jnp.arange(self.cache.max_length, dtype=jnp.int32)[None, None, :]
        start = self.positions[:, None, None]
        seen = keys < start
        if window is not None:
            queries = start + jnp.arange(length, dtype=jnp.int32)[None, :, None]
            seen = seen & (keys > queries - window)
        return jnp.where(seen, 0.0, MASKED).astype(jnp.float32)[:, None, None]

    def segment(self, layer: int, bias: Array) -> Segment:
        """The cache's entries of one layer as a segment."""
        return Segment(self.cache.keys[layer], self.cache.values[layer], bias)


def block_updates(keys: list[Array], values: list[Array], hidden: Array) -> CacheEntries:
    """The entries that a block adds to a cache; `hidden [B, T, E]` says which are NaN."""
    computed = ~jnp.any(jnp.isnan(hidden), axis=2)
    return CacheEntries(tuple(keys), tuple(values), computed)
