"""The files of `specjax infer`: their names, the rows of an earlier start, and totals over rows."""

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.data import Example
from specjax.runs.lines import FIRST_KEY, Record, record_of
from specjax.text.results import COUNTS

CONFIG_NAME = "infer_config.json"
PREDICTIONS_NAME = "predictions.jsonl"
METRICS_NAME = "metrics.json"
COSTS_NAME = "costs.json"
MADE = (PREDICTIONS_NAME, METRICS_NAME, COSTS_NAME)

_COUNTED = frozenset((*COUNTS, "rounds"))


def resume(
    path: Path, examples: list[Example], failed: Mapping[int, str], own: Collection[int]
) -> dict[int, Record]:
    """The rows that an earlier run wrote; removes an incomplete last line from the file.

    Args:
      path: the file; it need not be there.
      examples: all inputs.
      failed: the errors of those that cannot be decoded, by id.
      own: the ids of the rows that may be in the file.

    Returns:
      The records by id.

    Raises:
      OSError: it cannot be read.
      ValueError: a line is none of these rows, has been changed, or repeats one.
    """
    if not path.exists():
        return {}
    try:
        data = path.read_bytes()
    except OSError as error:
        raise OSError(
            f"{path} cannot be read ({error.strerror}): restore it, or choose another output_dir"
        ) from None
    whole = data[: data.rfind(b"\n") + 1]
    torn = data[len(whole) :]
    if torn[: len(FIRST_KEY)] != FIRST_KEY[: len(torn)]:
        raise ValueError(
            f"{path}: the end {torn[:40]!r} is no part of a row: delete it and run the same "
            "command again"
        )
    records: dict[int, Record] = {}
    for number, line in enumerate(whole.split(b"\n")[:-1], 1):
        try:
            record = record_of(line)
            i = record["id"]
            ours = record["inputs"] == examples[i].inputs and i not in records and i in own
            ours &= "error" in record if i in failed else record["info"].keys() >= _COUNTED
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            ours = False
        if not ours:
            raise ValueError(
                f"{path}:{number}: the line is not a row of this run, has been changed, or repeats "
                f"an input: delete line {number} and run the same command again"
            )
        records[i] = record
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return records


def totals(records: Sequence[Record]) -> dict[str, Any]:
    """Counts over all rows, which depend only on the rows; what `metrics.json` begins with."""
    decoded = [record for record in records if "error" not in record]
    counts = {name: sum(record["info"][name] for record in decoded) for name in COUNTS}

    def ratio(above: str, below: str) -> float | None:
        return counts[above] / counts[below] if counts[below] else None

    return {
        "rows": len(records),
        "failed": len(records) - len(decoded),
        "ended": sum(record["ended_by"] == "eos" for record in decoded),
        "ended_by_stop": sum(record["ended_by"] == "stop" for record in decoded),
        "ended_by_nan": sum(record["ended_by"] == "nan" for record in decoded),
        **counts,
        "tokens_per_verifier_call": ratio("emitted", "verifier_calls"),
        "acceptance_rate": ratio("accepted", "drafted"),
    }
