"""Rotary position embeddings (Su et al. 2021).

Axes: B rows, T tokens, D head width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


class Rope(NamedTuple):
    """The cosines and sines of the rotary angles of a block's positions.

    Attributes:
      cos: `[B, T, 1, D // 2]` float32.
      sin: `[B, T, 1, D // 2]` float32.
    """

    cos: Array
    sin: Array


def rope_angles(positions: Array, frequencies: np.ndarray) -> Rope:
    """The rotary angles at `positions [B, T]`.

    Args:
      positions: `[B, T]` int32.
      frequencies: `[D // 2]` float32, radians per position.

    Returns:
      A `Rope`.
    """
    angles = positions.astype(jnp.float32)[:, :, None] * frequencies[None, None, :]
    return Rope(jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None])


def rotate(x: Array, rope: Rope) -> Array:
    """Rotates `x [B, T, heads, D]`; dimension i is paired with i + D // 2 (Su et al. 2021)."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = rope.cos.astype(x.dtype), rope.sin.astype(x.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
