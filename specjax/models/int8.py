"""Matrices of 8-bit integers, with a scale for each output channel.

Reading weights takes most of the time of decoding few rows. Integers of 8 bits are half the bytes
of bfloat16 and a quarter of float32.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int8

from specjax.models.weights import StoredWeight
from specjax.platforms import by_platform, is_special
from specjax.types import traced_dataclass

# On CPUs, a product with fewer tokens than this converts the matrix in pieces of so many rows.
_FEW_TOKENS, _MOST_ROWS, _LEAST_ROWS = 64, 128, 32


@traced_dataclass
class Int8Weight(StoredWeight):
    """A matrix in 8 bits with a scale per column, or a stack of them.

    `specjax.checkpoints.load_model` makes it.

    A scale belongs to a whole channel, so it multiplies the channel's sum after the product.
    Operands of products have the dtype of the activations; in bfloat16 the integers are exact.

    Entry (i, j) of the matrix is `values[i, j] * scales[j]`.
    """

    values: Int8[Array, "*X n m"]
    scales: Float32[Array, "*X m"]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    is_scaled: ClassVar[bool] = True
    channel_axis: ClassVar[int] = 1  # that has a scale per entry

    def read(self, dtype: Any) -> Array:
        scales = jnp.expand_dims(self.scales, -1 - self.channel_axis)
        return (self.values.astype(jnp.float32) * scales).astype(dtype)

    def product(self, dot: Callable[[Array, Array], Array], x: Array) -> Array:
        def whole(x: Array, weight: Int8Weight) -> Array:
            # The barrier ties the integers to x. Without it, XLA converts whole matrices before a
            # loop that uses them, and the loop reads the converted copies.
            values, _ = jax.lax.optimization_barrier((weight.values, x))
            return weight._scaled(dot(x, values.astype(x.dtype)))

        # Of equal pieces, as large as may be; None if the matrix is not cut.
        sizes = range(min(_MOST_ROWS, self.shape[0] // 2), _LEAST_ROWS - 1, -1)
        rows = next((size for size in sizes if self.shape[0] % size == 0), None)
        if rows is None or x.shape[0] >= _FEW_TOKENS or is_special():
            return whole(x, self)

        def in_pieces(x: Array, weight: Int8Weight) -> Array:
            # XLA on CPUs fuses no conversion with a product: a whole converted matrix would be
            # written to memory and read again. A piece stays in a core's cache.
            pieces = weight.values.reshape(-1, rows, weight.shape[1])
            y = weight._scaled(weight._sums(dot, x.astype(jnp.float32), pieces))
            return y.astype(jax.eval_shape(whole, x, weight).dtype)

        return by_platform(x, self, default=whole, cpu=in_pieces)

    def product_of_stack(
        self, dot: Callable[[Array, Array], Array], x: Array, experts: Array
    ) -> Array:
        scales = jnp.take(self.scales, experts, axis=0, mode="clip")
        return (dot(x, self.values).astype(jnp.float32) * scales).astype(x.dtype)

    @classmethod
    def abstract(cls, shape: tuple[int, ...]) -> Any:
        scales: Any = jax.ShapeDtypeStruct(cls.axes(shape).scales, jnp.float32)
        values: Any = jax.ShapeDtypeStruct(shape, jnp.int8)
        return cls(values, scales)

    @classmethod
    def axes(cls, names: Any) -> Any:
        channels: Any = (*names[:-2], names[-2:][cls.channel_axis])
        return cls(names, channels)

    def _sums(self, dot: Callable[[Array, Array], Array], x: Array, pieces: Array) -> Array:
        def add(total: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
            x, values = part
            return total + dot(x, values.astype(x.dtype)), None

        parts = jnp.moveaxis(x.reshape(x.shape[0], *pieces.shape[:2]), 1, 0)
        empty = jnp.zeros((x.shape[0], pieces.shape[2]), jnp.float32)
        return jax.lax.scan(add, empty, (parts, pieces))[0]

    def _scaled(self, y: Array) -> Array:
        return (y.astype(jnp.float32) * self.scales[None]).astype(y.dtype)


@traced_dataclass
class Int8Embedding(Int8Weight):
    """An embedding in 8 bits with a scale per row, a token.

    Entry (i, j) of the matrix is `values[i, j] * scales[i]`.
    """

    scales: Float32[Array, " n"]

    channel_axis: ClassVar[int] = 0

    def rows(self, index: Array, dtype: Any) -> Array:
        values, scales = (
            jnp.take(x, index, axis=0, mode="clip").astype(jnp.float32)
            for x in (self.values, self.scales)
        )
        return (values * scales[..., None]).astype(dtype)

    def _sums(self, dot: Callable[[Array, Array], Array], x: Array, pieces: Array) -> Array:
        sums = jax.lax.map(lambda values: dot(x, values.astype(x.dtype)), pieces)
        return jnp.moveaxis(sums, 0, 1).reshape(x.shape[0], -1)
