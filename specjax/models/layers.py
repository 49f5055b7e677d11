"""The layers that all networks share, as flax.linen modules.

Axes: B rows, T queries, S keys, E model width, H query heads in K groups of N (H = K·N), D head
width, M feed-forward width, V vocabulary.

Every parameter has logical axis names (collection `params_axes`), as in T5X. Softmax, norms and
logits are float32 for activations of any dtype. Matrices are read in `specjax.models.weights`.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.partitioning import param_with_axes
from jaxtyping import Array, Float, Float32, Integer

from specjax import cpu_kernels
from specjax.kernel_choice import on_one_cpu
from specjax.models.weights import (
    Initializer,
    declare,
    float32_logits,
    product,
    rows,
    truncated_init,
)
from specjax.platforms import with_layout

ACTIVATIONS = ("gelu", "linear", "relu", "silu", "swish")
_LIMIT = 7.0  # of gpt-oss

# The longest block of tokens whose products get a layout for TPUs; with it, prompts take longer, by
# the estimates of `python -m benchmarks.tpu --programs prefill`.
_BLOCK = 32

# The name of a tied embedding's transposed copy `[E, V]`; see `Model.prepare`.
TRANSPOSED = "transposed_embedding"


class RMSNorm(nn.Module):
    """Root-mean-square normalisation without mean or bias, in float32.

    Attributes:
      plus_one: whether the stored scale is the scale minus one (Gemma). It is then applied in
        float32 before the cast to `dtype`, else after the cast.
      axis: the logical name of the axis.
    """

    eps: float
    dtype: Any
    param_dtype: Any
    plus_one: bool = False
    axis: str = "embed"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        init = nn.initializers.zeros if self.plus_one else nn.initializers.ones
        scale = param_with_axes("scale", init, x.shape[-1:], self.param_dtype, axes=(self.axis,))
        scale = scale.reshape((1,) * (x.ndim - 1) + scale.shape)
        y = normalise(x, self.eps)
        if self.plus_one:
            return (y * (1.0 + scale.astype(jnp.float32))).astype(self.dtype)
        return y.astype(self.dtype) * scale.astype(self.dtype)


def normalise(x: Array, eps: float) -> Array:
    """The vectors of the last axis divided by their root mean square, in float32."""
    kernel, plain = _normalisers(eps)
    x = x.astype(jnp.float32)
    return on_one_cpu(x, kernel=kernel, plain=plain) if cpu_kernels.available() else plain(x)


# Cached because they identify programs.
@functools.cache
def _normalisers(eps: float) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    def kernel(x: Array) -> Array:
        return cpu_kernels.normalised(x.reshape(-1, x.shape[-1]), eps).reshape(x.shape)

    def plain(x: Array) -> Array:
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)

    return kernel, plain


class Dense(nn.Module):
    """A matrix product, with an optional bias; `axes` are the logical names of the kernel's two."""

    features: int
    axes: tuple[str, str]
    dtype: Any
    param_dtype: Any
    kernel_init: Initializer = truncated_init
    has_bias: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = (x.shape[-1], self.features)
        kernel = declare(self, "kernel", self.kernel_init, shape, self.axes)
        # A product of two matrices: with three axes, XLA on CPUs recomputes x and transposes its
        # copy for the kernel's gradient (a quarter of a training step).
        flat = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        y = product(flat, kernel)
        # Without this layout, XLA on TPUs transposes the kernels of queries, keys and values: a
        # copy of each, in every call.
        if x.shape[-2] <= _BLOCK:
            y = with_layout(y, (0, 1))
        if self.has_bias:
            init, axes = nn.initializers.zeros, self.axes[1:]
            bias = param_with_axes("bias", init, shape[1:], self.param_dtype, axes=axes)
            y = y + bias.astype(self.dtype)[None]
        return y.reshape(*x.shape[:-1], self.features)


class LogitsDense(nn.Module):
    """The untied output projection."""

    vocab_size: int
    param_dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "*B E"]) -> Float32[Array, "*B V"]:
        shape = (x.shape[-1], self.vocab_size)
        kernel = declare(self, "kernel", truncated_init, shape, ("embed", "vocab"))
        return float32_logits(x, kernel, 0)


class Embed(nn.Module):
    """The token embedding and the tied output projection.

    Attributes:
      stddev: the standard deviation of the initial entries.
      has_eoi: whether there is another vector, `eoi_embedding`; see `Style.eoi_token`.
    """

    vocab_size: int
    features: int
    dtype: Any
    param_dtype: Any
    stddev: float = 1.0
    has_eoi: bool = False

    def setup(self) -> None:
        if self.has_eoi:
            zeros, size = nn.initializers.zeros, (self.features,)
            self.eoi_embedding = param_with_axes(
                "eoi_embedding", zeros, size, self.param_dtype, axes=("embed",)
            )
        init, shape = nn.initializers.normal(self.stddev), (self.vocab_size, self.features)
        self.embedding = declare(self, "embedding", init, shape, ("vocab", "embed"))

    def __call__(self, tokens: Integer[Array, "*B"]) -> Float[Array, "*B E"]:
        tokens = tokens.astype(jnp.int32)  # a clip in 8 bits would wrap around
        return rows(self.embedding, tokens, self.dtype)

    def attend(self, x: Float[Array, "B T E"]) -> Float32[Array, "B T V"]:
        """The logits of hidden states, with the embedding as output projection."""
        if self.has_variable("params", TRANSPOSED):
            return float32_logits(x, self.get_variable("params", TRANSPOSED), 0)
        return float32_logits(x, self.embedding, 1)


class LayerInputs(nn.Module):
    """An input of each token for each layer: from an embedding, and from the residual stream."""

    vocab_size: int
    layers: int
    width: int  # P
    eps: float
    dtype: Any
    param_dtype: Any

    @nn.compact
    def __call__(
        self, tokens: Integer[Array, "B T"], x: Float[Array, "B T E"]
    ) -> Float[Array, "B T layers P"]:
        joined, dtypes = self.layers * self.width, (self.dtype, self.param_dtype)
        shape, each = (self.vocab_size, joined), (*x.shape[:2], self.layers, self.width)
        table = declare(self, "embedding", nn.initializers.normal(1.0), shape, ("vocab", "embed"))
        own = rows(table, tokens.astype(jnp.int32), self.dtype) * self.width**0.5
        projected = Dense(joined, ("embed", "embed"), *dtypes, name="projection")(x)
        projected = (projected * x.shape[-1] ** -0.5).reshape(each)
        projected = RMSNorm(self.eps, *dtypes, name="norm")(projected)
        return (projected + own.reshape(each)) * 2**-0.5


class MLP(nn.Module):
    """The feed-forward block: an output projection of the product of activated input projections.

    Attributes:
      activations: one per input projection; `("silu", "linear")` is SwiGLU.
      dropout_rate: the rate in the hidden layer; all positions share one mask.
    """

    mlp_dim: int
    activations: tuple[str, ...]
    dtype: Any
    param_dtype: Any
    dropout_rate: float = 0.0

    @nn.compact
    def __call__(self, x: Array, deterministic: bool = True) -> Array:
        count = len(self.activations)
        names = ["wi"] if count == 1 else [f"wi_{i}" for i in range(count)]
        dense = functools.partial(Dense, dtype=self.dtype, param_dtype=self.param_dtype)
        hidden = [
            activate(activation, dense(self.mlp_dim, ("embed", "mlp"), name=name)(x))
            for activation, name in zip(self.activations, names, strict=True)
        ]
        y = functools.reduce(operator.mul, hidden)
        y = nn.Dropout(self.dropout_rate, broadcast_dims=(-2,))(y, deterministic=deterministic)
        return dense(x.shape[-1], ("mlp", "embed"), name="wo")(y)


def activate(name: str, x: Array) -> Array:
    """One of `ACTIVATIONS` of a hidden layer, or of the two that gpt-oss has instead."""
    if name == "clamped_swish":
        x = jnp.minimum(x, _LIMIT)
        return x * jax.nn.sigmoid(1.702 * x)
    if name == "clamped_linear":
        return jnp.clip(x, -_LIMIT, _LIMIT) + 1.0
    return x if name == "linear" else getattr(jax.nn, name)(x)
