"""Matrices of 4-bit numbers, with a scale and a lowest number for each 32 inputs of an output.

They are a little more than half the bytes of 8 bits. A drafter's errors cost accepted tokens, but
under a lossless rule no quality.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float16, Float32, Integer, UInt8

from specjax.models.weights import StoredWeight
from specjax.types import traced_dataclass

# The inputs that share a scale. `cpu_code.FourBits` knows this number, too.
GROUP = 32


@traced_dataclass
class Int4Weight(StoredWeight):
    """A matrix in 4 bits; `specjax.checkpoints.load_model` makes it.

    Entry (i, j) is `scales[i // 32, j] * q + lows[i // 32, j]`, where q, in 0 .. 15, is the low
    half of `values[i // 2, j]` for an even i, and the high half for an odd i.
    """

    values: UInt8[Array, "n/2 m"]
    scales: Float16[Array, "n/32 m"]
    lows: Float16[Array, "n/32 m"]

    @property
    def shape(self) -> tuple[int, ...]:
        half, columns = self.values.shape
        return 2 * half, columns

    is_scaled: ClassVar[bool] = True
    channel_axis: ClassVar[int] = 1  # whose entries are quantised alone

    def read(self, dtype: Any) -> Array:
        halves = jnp.stack([self.values & 15, self.values >> 4], axis=1)
        groups = halves.reshape(-1, GROUP, halves.shape[-1]).astype(jnp.float32)
        scales, lows = (x.astype(jnp.float32)[:, None] for x in (self.scales, self.lows))
        return (groups * scales + lows).reshape(-1, halves.shape[-1]).astype(dtype)

    def product(self, dot: Callable[[Array, Array], Array], x: Array) -> Array:
        # The barrier keeps XLA from converting the matrix once for all, before a loop.
        weight, _ = jax.lax.optimization_barrier((self, x))
        return dot(x, weight.read(x.dtype))

    @classmethod
    def abstract(cls, shape: tuple[int, ...]) -> Self:
        rows, columns = shape
        groups: Any = jax.ShapeDtypeStruct((rows // GROUP, columns), jnp.float16)
        values: Any = jax.ShapeDtypeStruct((rows // 2, columns), jnp.uint8)
        return cls(values, groups, groups)

    @classmethod
    def axes(cls, names: Any) -> Any:
        # The groups may be too few to be split.
        groups: Any = (None, names[1])
        return cls(names, groups, groups)

    @classmethod
    def of(cls, matrix: Float32[Array, "n m"]) -> Self:
        """The matrix in 4 bits.

        From the lowest to the highest number of a group are 15 steps, or 14 if they fit better: so
        a fifth of the groups of a file of 4 bits (Q4_K) were made.
        """
        groups = matrix.reshape(-1, GROUP, matrix.shape[1])
        lows = jnp.min(groups, axis=1).astype(jnp.float16)
        above = groups - lows.astype(jnp.float32)[:, None]
        fits = []
        for count in (15, 14):
            scales = (jnp.max(above, axis=1) / count).astype(jnp.float16)
            steps = jnp.where(scales == 0, 1, scales).astype(jnp.float32)[:, None]
            q = jnp.clip(jnp.round(above / steps), 0, 15)
            fits.append((scales, q, jnp.sum((q * steps - above) ** 2, axis=1)))
        (scales, q, error), (others, other_q, other_error) = fits
        fewer = other_error < error
        scales = jnp.where(fewer, others, scales)
        q = jnp.where(fewer[:, None], other_q, q).astype(jnp.uint8).reshape(-1, 2, matrix.shape[1])
        return cls(q[:, 0] | q[:, 1] << 4, scales, lows)


@traced_dataclass
class Int4Embedding(Int4Weight):
    """An embedding in 4 bits, with a scale and a lowest number for each 32 entries of a token.

    Entry (i, j) of the matrix is entry (j, i) of an `Int4Weight` with these arrays.
    """

    is_transposed: ClassVar[bool] = True
    channel_axis: ClassVar[int] = 0

    @property
    def shape(self) -> tuple[int, ...]:
        width, tokens = super().shape
        return tokens, width

    def read(self, dtype: Any) -> Array:
        return super().read(dtype).T

    def rows(self, index: Integer[Array, "*B"], dtype: Any) -> Array:
        few = jax.tree.map(lambda x: jnp.take(x, index.reshape(-1), axis=1, mode="clip"), self)
        return few.read(dtype).reshape(*index.shape, -1)

    @classmethod
    def abstract(cls, shape: tuple[int, ...]) -> Any:
        return super().abstract(shape[::-1])

    @classmethod
    def axes(cls, names: Any) -> Any:
        return super().axes(names[::-1])

    @classmethod
    def of(cls, matrix: Float32[Array, "n m"]) -> Self:
        return super().of(matrix.T)
