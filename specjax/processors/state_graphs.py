"""Searches in the graph of an automaton.

Axes: S states, E edges.
"""

import numpy as np

# The number of steps where there is no way: more than any output is long.
FAR = np.int32(2**30)


def fewest_steps(sources: np.ndarray, targets: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """`[S]` int32, the fewest steps from each state to an end, `FAR` if there is no way.

    Searches backwards from the ends, so that each edge is followed once.

    Args:
      sources: `[E]`, the state that an edge leaves.
      targets: `[E]`, the state that it leads to.
      ends: `[S]` bool.
    """
    order = np.argsort(targets, kind="stable")
    sources = sources[order]
    first = np.searchsorted(targets, np.arange(len(ends) + 1), sorter=order)
    found = np.where(ends, np.int32(0), FAR)
    front = np.flatnonzero(ends)
    while front.size:
        near = np.unique(sources[members(first, front)[1]])
        front, distance = near[found[near] == FAR], found[front[0]] + 1
        found[front] = distance
    return found


def members(first: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(place in `groups`, member) of all members of some groups.

    Args:
      first: the members of group i are first[i] .. first[i + 1] - 1.
      groups: numbers of groups.
    """
    counts = first[groups + 1] - first[groups]
    offsets = np.repeat(first[groups] - np.cumsum(counts) + counts, counts)
    return np.repeat(np.arange(groups.size), counts), offsets + np.arange(offsets.size)
