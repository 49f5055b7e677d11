"""Fingerprints of parameters: equal for equal values, however these are split over devices.

Each entry of an array is mixed with its position, and the results are summed where the array is:
devices read their own parts, and only sums travel. A fingerprint tells apart what differs by
accident, not by intent.
"""

import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.compilation import jit
from specjax.types import Params


def digest(params: Params, described: str = "", *, as_bfloat16: bool = False) -> str:
    """A hash of parameters' names, shapes, dtypes and values, 16 hexadecimal digits.

    All processes of a program must call it if they share an array. `described` is hashed too. With
    `as_bfloat16` floats are rounded first: a checkpoint that is loaded as float32 or bfloat16, or
    written as bfloat16, has the same.
    """
    names, sums = [], []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        x = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        rounds = as_bfloat16 and jnp.issubdtype(x.dtype, jnp.floating)
        dtype = jnp.dtype(jnp.bfloat16) if rounds else x.dtype
        names.append(f"{jax.tree_util.keystr(path)} {x.shape} {dtype}")
        if isinstance(x, np.ndarray) and dtype.itemsize == 8:  # JAX may narrow it
            x, dtype = np.ascontiguousarray(x)[..., None].view(np.uint32), jnp.dtype(np.uint32)
        sums.append(_sums(x, dtype))
    digest = hashlib.sha256(described.encode())
    for name, total in zip(names, jax.device_get(sums), strict=True):
        digest.update(name.encode() + np.array(total, np.uint32).tobytes())
    return digest.hexdigest()[:16]


@functools.partial(jit, static_argnums=1)
def _sums(x: Any, dtype: np.dtype) -> Any:
    """Two sums over an array's entries in this dtype."""
    uint32 = jnp.uint32
    x = x.astype(np.uint8 if dtype == np.bool_ else dtype)
    words = lax.bitcast_convert_type(x, f"uint{8 * min(x.dtype.itemsize, 4)}").astype(uint32)
    place = uint32(0)
    for axis in range(words.ndim):
        place += lax.broadcasted_iota(uint32, words.shape, axis)
        place *= uint32(0x9E3779B1)
    # MurmurHash3's finaliser gives the first sum, and a round more the second.
    first = words ^ place
    first = (first ^ (first >> 16)) * uint32(0x85EBCA6B)
    first = (first ^ (first >> 13)) * uint32(0xC2B2AE35)
    first ^= first >> 16
    second = first * uint32(0x9E3779B1)
    second ^= second >> 15
    # A single reduction, for which XLA stores no mixed entries.
    add = lambda one, other: (one[0] + other[0], one[1] + other[1])  # noqa: E731
    return lax.reduce((first, second), (uint32(0), uint32(0)), add, range(words.ndim))
