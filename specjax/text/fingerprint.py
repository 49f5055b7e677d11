"""Hashes of parameters."""

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from specjax.types import Params


def digest(
    params: Params,
    described: str = "",
    change: Callable[[np.ndarray], np.ndarray] = lambda array: array,
) -> str:
    """A hash of parameters' names, shapes, dtypes and values.

    Args:
      params: a pytree of arrays.
      described: what else it depends on.
      change: what is done to each array before.

    Returns:
      16 hexadecimal digits.
    """
    made = hashlib.sha256(described.encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = change(whole(leaf))
        made.update(f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}".encode())
        made.update(np.ascontiguousarray(array).tobytes())
    return made.hexdigest()[:16]


def whole(array: Any) -> np.ndarray:
    """The values of an array, also if this process has only a part of them."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def weights_fingerprint(params: Params) -> str:
    """See `TextModel.weights_fingerprint`."""

    def rounded(array: np.ndarray) -> np.ndarray:
        is_float = jax.numpy.issubdtype(array.dtype, jax.numpy.floating)
        return array.astype(jax.numpy.bfloat16) if is_float else array

    return digest(params, change=rounded)
