"""Fingerprints of parameters: equal for equal values, however these are split over devices.

Each entry of an array is mixed with its position, and the results are summed. So a process reads
only its own parts, and the processes exchange a few bytes. A fingerprint tells apart what differs
by accident, not by intent.
"""

import concurrent.futures
import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from specjax.types import Params

_ENTRIES = 2**15  # mixed together, in a processor's cache
# A shift and a factor. MurmurHash3's finaliser gives the first sum, and a round more the second.
_ROUNDS = [
    (np.uint32(shift), np.uint32(factor))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 0x9E3779B1), (15, 1))
]
_ROWS, _COLUMNS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


def digest(params: Params, described: str = "", *, as_bfloat16: bool = False) -> str:
    """Returns a hash of parameters' names, shapes, dtypes and values.

    All processes of a program must call it if they share an array.

    Args:
      params: a pytree of arrays.
      described: a text to include in the hash.
      as_bfloat16: whether floats are rounded to bfloat16 first.

    Returns:
      16 hexadecimal digits.
    """
    leaves = [
        (jax.tree_util.keystr(path), x if isinstance(x, jax.Array) else np.asarray(x))
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    ]
    sums = np.zeros((len(leaves), 2), np.uint32)
    with concurrent.futures.ThreadPoolExecutor(8) as threads:  # NumPy releases Python's lock
        mixed = [
            (i, threads.submit(_mixed, part, begins, x.shape, as_bfloat16))
            for i, (_, x) in enumerate(leaves)
            for part, begins in _own_parts(x)
        ]
        for i, part in mixed:
            sums[i] += part.result()
    shared = [isinstance(x, jax.Array) and not x.is_fully_addressable for _, x in leaves]
    if any(shared):
        from jax.experimental import multihost_utils

        every = multihost_utils.process_allgather(sums[shared])
        sums[shared] = np.asarray(every).sum(axis=0, dtype=np.uint32)
    made = hashlib.sha256(described.encode())
    for (path, x), total in zip(leaves, sums, strict=True):
        dtype = "bfloat16" if as_bfloat16 and _is_float(x.dtype) else x.dtype
        made.update(f"{path} {x.shape} {dtype}".encode() + total.tobytes())
    return made.hexdigest()[:16]


def weights_fingerprint(params: Params) -> str:
    """A hash of weights in bfloat16, with which a head identifies its drafter.

    It is the same for a checkpoint loaded as float32 or bfloat16, or written as bfloat16.
    """
    return digest(params, as_bfloat16=True)


def _own_parts(array: Any) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """The parts of an array that this process counts, and where they begin."""
    if not isinstance(array, jax.Array):
        yield array, (0,) * array.ndim
        return
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            yield shard.data, tuple(at.start or 0 for at in shard.index)


def _is_float(dtype: Any) -> bool:
    return bool(jax.numpy.issubdtype(dtype, jax.numpy.floating))


def _mixed(
    part: Any, begins: tuple[int, ...], shape: tuple[int, ...], as_bfloat16: bool
) -> np.ndarray:
    """Two sums over a part of an array of this shape."""
    part, sums = np.ascontiguousarray(part), np.zeros(2, np.uint32)
    if not part.size:
        return sums
    *leading, first = begins or (0,)
    rows = np.zeros((), np.uint64)
    for axis, begin in enumerate(leading):
        place = np.arange(begin, begin + part.shape[axis], dtype=np.uint64)
        rows = rows[..., None] * np.uint64(shape[axis]) + place
    rows = (rows.reshape(-1) * _ROWS >> np.uint64(32)).astype(np.uint32)
    entries = part.reshape(len(rows), -1)
    wide = min(entries.shape[1], _ENTRIES)
    high = _ENTRIES // wide
    for left in range(0, entries.shape[1], wide):
        words = _words(entries[:1, left : left + wide], as_bfloat16)
        scale = words.shape[1] // min(wide, entries.shape[1] - left)
        columns = np.arange(words.shape[1], dtype=np.uint64) + np.uint64((first + left) * scale)
        columns = (columns * _COLUMNS >> np.uint64(32)).astype(np.uint32)
        for top in range(0, len(rows), high):
            words = _words(entries[top : top + high, left : left + wide], as_bfloat16)
            mixed = rows[top : top + high, None] + columns
            mixed ^= words
            for i, (shift, factor) in enumerate(_ROUNDS):
                mixed ^= mixed >> shift
                if i >= 2:
                    sums[i - 2 : i - 1] += np.add.reduce(mixed, axis=None, dtype=np.uint32)
                mixed *= factor
    return sums


def _words(entries: np.ndarray, as_bfloat16: bool) -> np.ndarray:
    """The bits of entries as whole numbers; of wide entries two or more."""
    if as_bfloat16 and _is_float(entries.dtype):
        entries = entries.astype(jax.numpy.bfloat16)
    size = min(entries.dtype.itemsize, 4)
    return np.ascontiguousarray(entries).view(f"u{size}").astype(np.uint32, copy=False)
