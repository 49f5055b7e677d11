"""Whether arrays fit into the machine: asked before anything is allocated."""

import contextlib
import gc
import math
import os
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

# Positions of a cache are int32, and writes to drop go to the second half of their range.
MOST_POSITIONS = 2**30
# What the control group of a container allows, version 2 and version 1.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


# A process's mapped pieces of memory, and how many it may have: Linux ends one that has more.
_MAPS, _MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")


def spare_maps(share: float = 0.4) -> bool:
    """Forgets compiled programs where they take much of what the system lets a process map.

    XLA maps several pieces of memory for each program, so a process that compiles hundreds of them
    would be ended (segmentation fault) with most of the memory free. What is needed again is read
    from the compilation cache, or compiled anew: call it between pieces of work, never while
    something is timed.

    Args:
      share: of the system's limit from which programs are forgotten.

    Returns:
      Whether they were.
    """
    try:
        pieces = _MAPS.read_bytes().count(b"\n")
        most = int(_MOST_MAPS.read_text())
    except (OSError, ValueError):  # not Linux: no such limit
        return False
    if pieces < share * most:
        return False
    jax.clear_caches()
    gc.collect()
    return True


def host_bytes() -> int:
    """The host's memory, or what a container may use of it; no limit where that is not known."""
    found = [sys.maxsize]
    with contextlib.suppress(AttributeError, OSError, ValueError):  # not a POSIX system
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in map(Path, _LIMITS):
        try:
            found.append(int(path.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(found)


def nbytes(tree: Any, shardings: Any = None) -> int:
    """The bytes that a tree takes on each device.

    Args:
      tree: a pytree of arrays or of their shapes. An array that is there twice counts once.
      shardings: a pytree of shardings like it, or None where each array lies in one place.

    Returns:
      The sum, of any size.
    """
    leaves = jax.tree.leaves(tree)
    places = [None] * len(leaves) if shardings is None else jax.tree.leaves(shardings)
    # Shapes may be one object for several arrays.
    own = {
        id(leaf) if isinstance(leaf, jax.Array | np.ndarray) else -i: (leaf, place)
        for i, (leaf, place) in enumerate(zip(leaves, places, strict=True), 1)
    }
    return sum(
        math.prod(leaf.shape if place is None else place.shard_shape(tuple(leaf.shape)))
        * leaf.dtype.itemsize
        for leaf, place in own.values()
    )


def in_words(size: int) -> str:
    """A number of bytes as "5.12 TB"."""
    number = float(min(size, 10**300))
    for unit in ("bytes", "kB", "MB", "GB", "TB", "PB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} EB"


@contextlib.contextmanager
def told_if_full(what: str, remedy: str) -> Iterator[None]:
    """Turns the words of XLA and Python for a full memory into one line.

    Args:
      what: the arrays or what makes them, for the message.
      remedy: what to do.

    Raises:
      ValueError: where an allocation fails.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        told = " ".join(str(error).split()) or "no room"
        full = re.search(r"RESOURCE_EXHAUSTED|out of memory", told, re.IGNORECASE)
        if full is None and not isinstance(error, MemoryError):
            raise
        raise ValueError(f"{what}: out of memory ({told[:200]}): {remedy}") from None


def check_fits(
    what: str, needed: int, remedy: str, devices: Collection[jax.Device] | None = None
) -> None:
    """Raises ValueError if arrays cannot fit.

    Args:
      what: the arrays or what makes them, for the message.
      needed: their bytes on each device, or on the host; at least.
      remedy: what to do.
      devices: where they are to lie; None: on the host.
    """
    local = [d for d in devices or () if d.process_index == jax.process_index()]
    room, where = host_bytes(), "the machine has"
    if local and local[0].platform != "cpu":
        stats = [device.memory_stats() or {} for device in local]
        room = min(stat.get("bytes_limit", sys.maxsize) for stat in stats)
        where = "a device has"
    elif local:
        needed *= len(local)  # they share the host's memory
    if needed > room:
        raise ValueError(
            f"{what}: this needs at least {in_words(needed)} of memory, but {where} "
            f"{in_words(room)}: {remedy}"
        )


def sizes_in_words(rows: int, length: int, max_draft: int, max_new: int) -> str:
    """What is asked of a method, for messages.

    Args:
      rows: B.
      length: L, of the prompts.
      max_draft: G.
      max_new: N, the longest output.
    """
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
    token_log_probs: bool = False,
) -> None:
    """Raises ValueError if such prompts and outputs certainly cannot fit.

    Args:
      method: the decoding method; nothing is known of one without `least_memory`.
      params: its parameters.
      prompts: a `PromptBatch` of arrays or of their shapes.
      max_new: N, the longest output.
      max_length: S, cache positions.
      remedy: what to do.
      token_log_probs: see `Method.init`.
    """
    if not hasattr(method, "least_memory"):
        return
    rows, length = np.shape(prompts.inputs)
    # Tracing needs memory too: more is asked for only if this much fits.
    traced = min(length, 2**20)
    inputs: Any = jax.ShapeDtypeStruct((rows, traced), np.int32)
    mesh = None if method.partitioner is None else method.partitioner.mesh
    devices = jax.devices()[:1] if mesh is None else mesh.devices.flatten().tolist()
    needed = 4 * rows * (length - traced) // len(devices) + method.least_memory(
        params,
        prompts._replace(inputs=inputs),
        max_new=min(max_new, MOST_POSITIONS),
        max_length=min(max_length, MOST_POSITIONS),
        token_log_probs=token_log_probs,
    )
    asked = sizes_in_words(rows, length, method.max_draft, max_new)
    check_fits(asked, needed, remedy, devices)
    if max_length > MOST_POSITIONS:
        raise ValueError(
            f"{asked}: this takes {max_length} positions of the cache, which has at most "
            f"{MOST_POSITIONS}: {remedy}"
        )
