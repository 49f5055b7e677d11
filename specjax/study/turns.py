"""Measurements in turns: what disturbs the machine for long disturbs all sides alike."""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
C = TypeVar("C")
T = TypeVar("T")


def in_turns(
    sides: Mapping[K, Callable[[C], T]], parts: Sequence[C], repeats: int
) -> Iterator[tuple[K, int, int, T]]:
    """Lets all sides work on a part before any of them works on the next.

    The order of the sides alternates, so that none is always the first, or behind the same one.

    Args:
      sides: name -> what is called with each part of the work.
      parts: of the work.
      repeats: how often all of it is done.

    Yields:
      Of each call the side, the repeat, the place of the part, and what it returned.
    """
    names = list(sides)
    for repeat in range(repeats):
        for i, part in enumerate(parts):
            for name in names[:: -1 if (repeat + i) % 2 else 1]:
                yield name, repeat, i, sides[name](part)


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """The seconds of a call, and what it returned."""
    begin = time.perf_counter()
    found = call()
    return time.perf_counter() - begin, found
