"""Checks whether arrays fit into memory, before they are allocated; maps arrays of files."""

import contextlib
import functools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.errors import UserError

# Positions of a cache are int32; the upper half of the range marks dropped writes.
MOST_POSITIONS = 2**30
_OUT_OF_MEMORY = re.compile("RESOURCE_EXHAUSTED|INTERNAL: .*Out of memory allocating")
# The memory limit of a container (cgroup version 2 and version 1).
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_bytes() -> int:
    """Returns the memory of the host or the limit of the container; no limit if unknown."""
    sizes = [sys.maxsize]
    with contextlib.suppress(AttributeError, OSError, ValueError):  # not a POSIX system
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in map(Path, _LIMITS):
        try:
            sizes.append(int(path.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(sizes)


def nbytes(tree: Any, shardings: Any = None) -> int:
    """Returns the bytes of a tree on each device.

    Its leaves are arrays, their shapes, or numbers; a repeated array counts once. `shardings` has
    the same structure; None if nothing is sharded.
    """
    leaves = [x if hasattr(x, "dtype") else np.asarray(x) for x in jax.tree.leaves(tree)]
    places = [None] * len(leaves) if shardings is None else jax.tree.leaves(shardings)
    # Several arrays may share a shape object.
    counted = {
        id(leaf) if isinstance(leaf, jax.Array | np.ndarray) else -i: (leaf, place)
        for i, (leaf, place) in enumerate(zip(leaves, places, strict=True), 1)
    }
    return sum(
        math.prod(leaf.shape if place is None else place.shard_shape(tuple(leaf.shape)))
        * leaf.dtype.itemsize
        for leaf, place in counted.values()
    )


def in_words(size: int) -> str:
    """Formats a number of bytes, such as "5.12 TB"."""
    number = float(min(size, 10**300))
    for unit in ("bytes", "kB", "MB", "GB", "TB", "PB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} EB"


@contextlib.contextmanager
def explain_full_memory(what: str, remedy: str) -> Iterator[None]:
    """Turns out-of-memory errors of XLA and Python into one line about `what`."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        reason = " ".join(str(error).split()) or "allocation failed"
        # XLA's errors begin with their status code, on the CPU with that of the dispatch.
        if not isinstance(error, MemoryError) and not _OUT_OF_MEMORY.match(reason):
            raise
        raise UserError(f"{what}: out of memory ({reason[:200]}): {remedy}") from None


def check_fits(
    what: str, needed: int, remedy: str, devices: Collection[jax.Device] | None = None
) -> None:
    """Raises UserError if arrays cannot fit; `needed` bytes on each device, or on the host."""
    local = [d for d in devices or () if d.process_index == jax.process_index()]
    room, where = host_bytes(), "the machine has"
    if local and local[0].platform != "cpu":
        stats = [device.memory_stats() or {} for device in local]
        room = min(stat.get("bytes_limit", sys.maxsize) for stat in stats)
        where = "a device has"
    elif local:
        needed *= len(local)  # they share the host's memory
    if needed > room:
        raise UserError(
            f"{what}: this needs at least {in_words(needed)} of memory, but {where} "
            f"{in_words(room)}: {remedy}"
        )


def smaller(options: Mapping[str, int]) -> str:
    """The remedy for what is too large: the options that set its size, the largest first."""
    names = sorted(options, key=lambda name: -options[name])
    words = [f"{name}={options[name]}" for name in names if options[name] > 1] or ["model"]
    return f"choose a smaller {' or '.join(filter(None, (', '.join(words[:-1]), words[-1])))}"


def sizes_in_words(rows: int, length: int, max_draft: int, max_new: int) -> str:
    """Describes the sizes of a batch, for messages."""
    drafts = f", drafts of {max_draft}" if max_draft else ""
    return (
        f"{rows} row{'s' * (rows != 1)} with prompts of {length}{drafts} and outputs of {max_new} "
        "tokens"
    )


def check_state_fits(
    method: Any,
    params: Any,
    prompts: Any,
    *,
    max_new: int,
    max_length: int,
    remedy: str,
    beside: int = 0,
    log_probs: bool = False,
    sources: bool = False,
) -> None:
    """Raises UserError if prompts and outputs of these sizes certainly cannot fit.

    A method without `least_memory` is not checked. `beside` is what else is kept on each device,
    such as the caches of a prefix, in bytes.
    """
    if not hasattr(method, "least_memory"):
        return
    rows, length = np.shape(prompts.inputs)
    # Tracing also needs memory, so it is limited to this length.
    traced = min(length, 2**20)
    inputs: Any = jax.ShapeDtypeStruct((rows, traced), np.int32)
    mesh = None if method.partitioner is None else method.partitioner.mesh
    devices = jax.devices()[:1] if mesh is None else mesh.devices.flatten().tolist()
    needed = (
        beside
        + 4 * rows * (length - traced) // len(devices)
        + method.least_memory(
            params,
            prompts._replace(inputs=inputs),
            max_new=min(max_new, MOST_POSITIONS),
            max_length=min(max_length, MOST_POSITIONS),
            log_probs=log_probs,
            sources=sources,
        )
    )
    sizes = sizes_in_words(rows, length, method.max_draft, max_new)
    if 2 * nbytes(params) > needed * len(devices):
        remedy = f"load a smaller model, or its matrices in 8 bits (weights='int8'), or {remedy}"
    check_fits(sizes, needed, remedy, devices)
    if max_length > MOST_POSITIONS:
        raise UserError(
            f"{sizes}: this needs {max_length} positions of the cache; the limit is "
            f"{MOST_POSITIONS}: {remedy}"
        )


def mappers(path: Path) -> dict[str, Callable[[Any, Sequence[int]], np.ndarray]]:
    """Functions of a dtype and a shape that map the arrays of a safetensors file, by name."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {
        name: functools.partial(_map_array, path, 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def _map_array(path: Path, start: int, dtype: Any, shape: Sequence[int]) -> np.ndarray:
    if 0 in shape:  # an empty array cannot be mapped
        return np.empty(shape, dtype)
    return np.asarray(np.memmap(path, dtype, "r", start, tuple(shape)))
