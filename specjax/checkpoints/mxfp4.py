"""Experts in MXFP4, as gpt-oss is published: they become floats where they are copied.

A column of a matrix is stored as a row: 32 numbers share a scale, a power of two, and each has 4
bits.

Sources: Open Compute Project 2023, Microscaling Formats 1.0; `transformers/integrations/mxfp4.py`.
"""

import dataclasses
from typing import Any

import numpy as np

from specjax.checkpoints.arrays import Stack

_BLOCK = 32
_POSITIVE = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_NUMBERS = np.append(_POSITIVE, -_POSITIVE)
# Of each byte the two numbers, the lower half first, as one entry.
_PAIRS = np.stack([np.tile(_NUMBERS, 16), np.repeat(_NUMBERS, 16)], -1).view(np.complex64)[:, 0]
_SCALES = np.append(np.ldexp(np.float32(1.0), np.arange(-127, 128)), np.float32(np.nan))


def shape_in_floats(blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of the stack `[X, n, m]` that arrays of these shapes stand for; None if none."""
    if len(scales) != 3 or blocks != (*scales, _BLOCK // 2):
        return None
    count, columns, groups = scales
    return count, groups * _BLOCK, columns


def stack_of(blocks: np.ndarray, scales: np.ndarray) -> Stack:
    """The matrices of all experts, which are read when they are copied."""
    rows = range(scales.shape[2] * _BLOCK)
    return Stack([Mxfp4Matrix(*matrix, rows) for matrix in zip(blocks, scales, strict=True)])


@dataclasses.dataclass(frozen=True)
class Mxfp4Matrix:
    """A matrix, or a part of it; slices of it are of this type, too.

    Attributes:
      blocks: `[columns, groups, 16]`.
      scales: `[columns, groups]`.
      rows: the rows of the part.
    """

    blocks: np.ndarray
    scales: np.ndarray
    rows: range

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.blocks)

    def __getitem__(self, at: tuple[slice, slice]) -> "Mxfp4Matrix":
        rows, columns = at
        return Mxfp4Matrix(self.blocks[columns], self.scales[columns], self.rows[rows])

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        numbers = np.take(_PAIRS, self.blocks, mode="clip").view(np.float32)
        with np.errstate(over="ignore"):  # the checkpoint is searched for infinity
            columns = (numbers * _SCALES[self.scales][..., None]).reshape(len(self.blocks), -1)
        return columns[:, self.rows.start : self.rows.stop : self.rows.step].T
