"""Times short calls in turns."""

import statistics
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import jax

from specjax.study.measure import in_turns, timed

K = TypeVar("K", bound=Hashable)


def time_interleaved(
    calls: Mapping[K, Callable[[], Any]], *, repeats: int = 7, min_seconds: float = 0.02
) -> dict[K, float]:
    """Times several calls in turns, so that noise of the machine affects all of them equally.

    Args:
      calls: name -> a function without arguments that returns arrays; the timing waits for them.
      repeats: the number of turns of each call.
      min_seconds: a turn repeats a call for about this long.

    Returns:
      name -> the median seconds per call. Compilation happens before and is not counted.
    """

    def side(call: Callable[[], Any]) -> Callable[[None], float]:
        def several() -> Any:
            for _ in range(count):
                found = call()
            return jax.block_until_ready(found)

        jax.block_until_ready(call())
        once, _ = timed(lambda: jax.block_until_ready(call()))
        count = max(1, int(min_seconds / max(once, 1e-9)))
        return lambda _: timed(several)[0] / count

    seconds: dict[K, list[float]] = {name: [] for name in calls}
    sides = {name: side(call) for name, call in calls.items()}
    for name, _, _, spent in in_turns(sides, [None], repeats):
        seconds[name].append(spent)
    return {name: statistics.median(values) for name, values in seconds.items()}
