"""Quantised matrices of GGUF files, which become floats where they are placed, by a jitted program.

A row is cut into blocks of numbers that share scales. Here are the kinds of llama.cpp's usual
files; the package gguf reads the others, five times as slowly.

Axes: N blocks.

Source: `ggml-common.h` and `ggml-quants.c` of llama.cpp.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int8, UInt8

from specjax.compilation import jit
from specjax.platforms import host_cpu

_Dequantise = Callable[[UInt8[Array, "N bytes"]], Float32[Array, "N numbers"]]


def _half(pair: UInt8[Array, "N 2"]) -> Float32[Array, "N 1"]:
    return lax.bitcast_convert_type(pair, jnp.float16).astype(jnp.float32)[:, None]


def _nibbles(packed: UInt8[Array, "N P"], width: int) -> UInt8[Array, "N 2P"]:
    """Of each `width` bytes first their lower halves, then their upper ones."""
    groups = packed.reshape(len(packed), -1, 1, width)
    return jnp.concatenate([groups & 15, groups >> 4], axis=2).reshape(len(packed), -1)


def _signed(number: UInt8[Array, "N n"], zero: int) -> Int8[Array, "N n"]:
    return lax.bitcast_convert_type(number, jnp.int8) - jnp.int8(zero)


def _by_group(
    scales: Float32[Array, "N groups"], numbers: Array
) -> tuple[Float32[Array, "N groups 1"], Float32[Array, "N groups n"]]:
    grouped = numbers.astype(jnp.float32).reshape(*scales.shape, -1)
    return scales[:, :, None], grouped


def _q8_0(blocks: Array) -> Array:
    return _half(blocks[:, :2]) * _signed(blocks[:, 2:], 0).astype(jnp.float32)


def _q4_0(blocks: Array) -> Array:
    return _half(blocks[:, :2]) * _signed(_nibbles(blocks[:, 2:], 16), 8).astype(jnp.float32)


def _q5_0(blocks: Array) -> Array:
    bit = np.arange(32, dtype=np.uint8)
    fifth = (blocks[:, 2:6][:, bit // 8] >> (bit % 8)[None]) & 1
    number = _nibbles(blocks[:, 6:], 16) | (fifth << 4)
    return _half(blocks[:, :2]) * _signed(number, 16).astype(jnp.float32)


def _scales_and_least(packed: Array) -> tuple[Array, Array]:
    """The 6-bit scales and minima of the eight groups of a Q4_K or Q5_K block."""
    low, high, both = jnp.split(packed, 3, axis=1)
    scales = jnp.concatenate([low & 63, (both & 15) | ((low >> 2) & 48)], axis=1)
    least = jnp.concatenate([high & 63, (both >> 4) | ((high >> 2) & 48)], axis=1)
    return scales.astype(jnp.float32), least.astype(jnp.float32)


def _with_minima(blocks: Array, numbers: Array) -> Array:
    scales, least = _scales_and_least(blocks[:, 4:16])
    scale, number = _by_group(_half(blocks[:, :2]) * scales, numbers)
    offset = (_half(blocks[:, 2:4]) * least)[:, :, None]
    return (scale * number - offset).reshape(len(blocks), -1)


def _q4_k(blocks: Array) -> Array:
    return _with_minima(blocks, _nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: Array) -> Array:
    bit = np.arange(8, dtype=np.uint8)[None, :, None]
    fifth = ((blocks[:, 16:48][:, None] >> bit) & 1).reshape(len(blocks), -1)
    return _with_minima(blocks, _nibbles(blocks[:, 48:], 32) | (fifth << 4))


def _q6_k(blocks: Array) -> Array:
    low, high, scales, whole = jnp.split(blocks, (128, 192, 208), axis=1)
    shift = np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]
    high = (high.reshape(len(blocks), 2, 1, 32) >> shift) & 3
    number = _nibbles(low, 64) | (high.reshape(len(blocks), -1) << 4)
    of_group = _half(whole) * _signed(scales, 0).astype(jnp.float32)
    scale, number = _by_group(of_group, _signed(number, 32))
    return (scale * number).reshape(len(blocks), -1)


# By the name of the kind: the bytes of a block, and the function.
KINDS: dict[str, tuple[int, _Dequantise]] = {
    "Q4_0": (18, _q4_0),
    "Q5_0": (22, _q5_0),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}


@dataclasses.dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix of a file, its transpose, or a part of either; slices of it are of this type, too.

    Attributes:
      rows: the bytes of its rows, a memory map.
      kind: one of `KINDS`.
      transposed: whether it is the transpose.
    """

    rows: np.ndarray
    kind: str
    transposed: bool = False
    ndim = 2

    @property
    def shape(self) -> tuple[int, int]:
        width = self.rows.shape[1] // KINDS[self.kind][0] * _NUMBERS[self.kind]
        return (width, len(self.rows)) if self.transposed else (len(self.rows), width)

    @property
    def T(self) -> "QuantisedMatrix":  # noqa: N802  NumPy's name
        return dataclasses.replace(self, transposed=not self.transposed)

    def __getitem__(self, at: Any) -> Any:
        first, second = (*at, slice(None))[:2]
        rows, columns = (second, first) if self.transposed else (first, second)
        part = dataclasses.replace(self, rows=self.rows[rows])
        if columns == slice(None):
            return part
        floats = np.asarray(part)
        return floats[columns] if self.transposed else floats[:, columns]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        with jax.default_device(host_cpu()):
            return np.asarray(self._floats(self.rows, dtype or np.float32))

    def place(self, dtype: Any, sharding: jax.sharding.Sharding) -> jax.Array:
        """The matrix on the only device of a sharding."""
        (device,) = sharding.device_set
        floats = self._floats(jax.device_put(self.rows, device), dtype)
        return jax.device_put(floats, sharding)

    def _floats(self, rows: Any, dtype: Any) -> jax.Array:
        return _floats(rows, self.kind, self.transposed, np.dtype(dtype))


_NUMBERS = {kind: 32 if kind.endswith("_0") else 256 for kind in KINDS}


@functools.partial(jit, static_argnums=(1, 2, 3))
def _floats(rows: Array, kind: str, transposed: bool, dtype: np.dtype) -> Array:
    size, dequantise = KINDS[kind]
    floats = dequantise(rows.reshape(-1, size)).astype(dtype).reshape(len(rows), -1)
    return floats.T if transposed else floats
