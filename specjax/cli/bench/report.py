"""The report that a benchmark returns and prints, and the timing of calls."""

import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax

K = TypeVar("K", bound=Hashable)


@dataclasses.dataclass
class Report:
    """The figures of one benchmark.

    Attributes:
      rows: one dict per line of the table; the JSON line has all rows with all keys.
      columns: the keys that the table shows, in order.
      notes: lines that are printed below the table.
      summary: figures about the whole run.
    """

    rows: list[dict[str, Any]]
    columns: Sequence[str]
    notes: Sequence[str] = ()
    summary: dict[str, Any] = dataclasses.field(default_factory=dict)

    def table(self) -> str:
        """The rows as aligned text, then the summary and the notes."""
        cells = [list(self.columns)]
        cells += [[_cell(row.get(column)) for column in self.columns] for row in self.rows]
        widths = [max(len(line[i]) for line in cells) for i in range(len(self.columns))]
        lines = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
        lines.insert(1, "  ".join("-" * w for w in widths))
        lines += [f"{key}: {_cell(value)}" for key, value in self.summary.items()]
        return "\n".join([*lines, *self.notes])

    def show(self, name: str) -> None:
        """Prints the table, then all figures as one line of JSON."""
        print(self.table())
        print(self.json_line(name))

    def json_line(self, name: str) -> str:
        """All figures as one line of JSON, with the machine that they were measured on."""
        machine = {
            "backend": jax.default_backend(),
            "device": jax.devices()[0].device_kind,
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "jax": jax.__version__,
        }
        return json.dumps(
            {"bench": name, "machine": machine, **self.summary, "rows": self.rows},
            allow_nan=False,
        )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def time_interleaved(
    calls: Mapping[K, Callable[[], Any]], *, repeats: int = 7, min_seconds: float = 0.02
) -> dict[K, float]:
    """Times several calls in turns, so that noise of the machine affects all of them equally.

    Args:
      calls: name -> a function without arguments that returns arrays; the timing waits for them.
      repeats: the number of turns of each call.
      min_seconds: a turn repeats a call so often that it takes about this long.

    Returns:
      name -> the median seconds per call. Compilation happens before and is not counted.
    """
    counts = {}
    for name, call in calls.items():
        jax.block_until_ready(call())
        start = time.perf_counter()
        jax.block_until_ready(call())
        counts[name] = max(1, int(min_seconds / max(time.perf_counter() - start, 1e-9)))
    seconds: dict[K, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(counts[name]):
                out = call()
            jax.block_until_ready(out)
            seconds[name].append((time.perf_counter() - start) / counts[name])
    return {name: statistics.median(values) for name, values in seconds.items()}
