"""The report of a benchmark: a table and a line of JSON."""

import dataclasses
import json
import os
import platform
from collections.abc import Sequence
from typing import Any

import jax

from specjax.cli import print_data


@dataclasses.dataclass
class Report:
    """The figures of a benchmark.

    Attributes:
      rows: a dict for each line of the table; the JSON line has all keys.
      columns: the keys in the table, in order.
      notes: lines below the table.
      summary: figures about the whole run.
    """

    rows: list[dict[str, Any]]
    columns: Sequence[str]
    notes: Sequence[str] = ()
    summary: dict[str, Any] = dataclasses.field(default_factory=dict)

    def table(self) -> str:
        """Returns the rows as aligned text, then the summary and the notes."""
        cells = [list(self.columns)]
        cells += [[_cell(row.get(column)) for column in self.columns] for row in self.rows]
        widths = [max(len(line[i]) for line in cells) for i in range(len(self.columns))]
        lines = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
        lines.insert(1, "  ".join("-" * w for w in widths))
        lines += [f"{key}: {_cell(value)}" for key, value in self.summary.items()]
        return "\n".join([*lines, *self.notes])

    def show(self, name: str) -> None:
        """Prints the table, then all figures and the machine as JSON (not on a terminal)."""
        print(self.table())
        machine = {
            "backend": jax.default_backend(),
            "device": jax.devices()[0].device_kind,
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "jax": jax.__version__,
        }
        values = {"bench": name, "machine": machine, **self.summary, "rows": self.rows}
        print_data(json.dumps(values, allow_nan=False))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " / ".join(map(_cell, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
