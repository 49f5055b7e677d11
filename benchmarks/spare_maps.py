"""Drops compiled programs before a process has too many memory mappings."""

import gc
from pathlib import Path

import jax

# The memory mappings of a process, and their limit: Linux kills a process that exceeds it.
_MAPS, _MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")


def spare_maps(share: float = 0.4) -> bool:
    """Drops compiled programs if the process has a share of the mappings that the system allows.

    XLA makes several mappings for each program, so a process that compiles hundreds of programs
    would end with a segmentation fault although memory is free. Programs that are needed again are
    read from the compilation cache, or compiled again: never call this while something is timed.
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
