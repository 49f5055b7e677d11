"""Measurements in turns, so that slow changes of the machine affect all sides equally."""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
C = TypeVar("C")
T = TypeVar("T")


def in_turns(
    sides: Mapping[K, Callable[[C], T]], parts: Sequence[C], repeats: int
) -> Iterator[tuple[K, int, int, T]]:
    """Calls all sides on each part of the work before the next part, in alternating order.

    Args:
      sides: name -> function of a part of the work.
      parts: the parts of the work.
      repeats: the number of repeats of all parts.

    Yields:
      For each call the side, the repeat, the place of the part, and the result.
    """
    names = list(sides)
    for repeat in range(repeats):
        for i, part in enumerate(parts):
            for name in names[:: -1 if (repeat + i) % 2 else 1]:
                yield name, repeat, i, sides[name](part)


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Returns the seconds of a call, and its result."""
    begin = time.perf_counter()
    found = call()
    return time.perf_counter() - begin, found
