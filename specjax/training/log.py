"""The log of a training run: one JSON line per report."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specjax.runs.run_directory import RunDirectory
from specjax.writing import naming_failures

METRICS_NAME = "metrics.jsonl"


class Log:
    """Appends lines to `metrics.jsonl`.

    Args:
      run: the run's directory; claimed.
      step: lines of later steps are dropped, and so is a torn last line.
    """

    def __init__(self, run: RunDirectory, step: int):
        self._run, self._path = run, run.own(METRICS_NAME)
        if self._path.exists():
            kept = [json.dumps(row) for row in _rows(self._path) if row["step"] <= step]
            run.write(METRICS_NAME, "".join(line + "\n" for line in kept).encode())

    def add(self, row: Mapping[str, Any]) -> None:
        """Appends one line.

        Raises:
          OSError: it cannot be written.
        """
        self._run.keep()
        with naming_failures(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text("utf-8").split("\n"):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield row
