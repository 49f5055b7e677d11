"""The rows of `predictions.jsonl`: a JSON object in each line, sealed to its run.

The last keys of a line are the run's fingerprint and a checksum over the rest of the line. They
detect damaged rows and those of another run.
"""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checks import PathLike, short_repr
from specjax.data.examples import Example
from specjax.errors import UserError
from specjax.text.results import COUNTS, DraftAcceptance, Row, finite
from specjax.types.method import past_end
from specjax.writing import read_regular, write_atomically

CONFIG_NAME = "infer_config.json"
PREDICTIONS_NAME = "predictions.jsonl"
METRICS_NAME = "metrics.json"
COSTS_NAME = "costs.json"
MADE = (PREDICTIONS_NAME, METRICS_NAME, COSTS_NAME)

Record = dict[str, Any]
Key = tuple[int, int]  # the id of the input of a row, and the number of the sample
_FIRST_KEY = b'{"id": '
# The last keys of each line.
RUN, CHECKSUM = "run", "checksum"
_CHECKSUM = b', "checksum": "%s"}'
_DIGITS = 16
# The key of the number of samples in a configuration; without it there is one.
SAMPLES = "num_samples"


def record_of_row(example: Example, row: Row, num_samples: int = 1) -> Record:
    """Returns the record of a row, without its checksum; see `specjax.runs.inference.infer`."""
    record = {
        **about(example, row.sample if num_samples > 1 else None),
        "prediction": row.text,
        "tokens": row.tokens.tolist(),
        "log_prob_processed": finite(row.info.log_prob_processed),
        "log_prob_target": finite(row.info.log_prob_target),
        "ended_by": row.ended_by,
        "info": row.info.to_dict(),
        **({} if row.sources is None else {"sources": list(row.sources)}),
    }
    if row.error is not None:
        return {**record, "nan": row.error}
    if math.isnan(row.info.log_prob_processed):  # null would be minus infinity
        del record["log_prob_processed"]
    return record


def about(example: Example, sample: int | None = None) -> Record:
    """Returns the part of a record that describes the input."""
    record: Record = {"id": example.id, "inputs": example.inputs}
    record |= {} if example.targets is None else {"targets": example.targets}
    return record if sample is None else {**record, "sample": sample}


def key_of(record: Record) -> Key:
    """Returns the key of a record's row."""
    return record["id"], record.get("sample", 0)


def line_of(record: Record, run: str) -> bytes:
    """Returns the line of a record of the run with this fingerprint."""
    sealed = {**record, RUN: run[:_DIGITS]}
    text = json.dumps(sealed, ensure_ascii=False, allow_nan=False)
    # UTF-8 cannot encode half a surrogate pair; JSON can escape it.
    body = text.encode(errors="backslashreplace")
    return body[:-1] + _CHECKSUM % _checksum(body) + b"\n"


def lines_of(records: Iterable[Record], run: str) -> bytes:
    """Returns the lines of several records; see `line_of`."""
    return b"".join(line_of(record, run) for record in records)


def record_of(
    line: bytes, run: str | None, path: PathLike, number: int, remedy: str = ""
) -> Record:
    """Returns the record of line `number` of a file, without its end.

    `run` is the fingerprint of its run, None if unknown. Raises UserError if the line was changed,
    is of another run, or has a value of another type; `remedy` is the end of its message, otherwise
    that of a run to continue.
    """
    length = len(_CHECKSUM % (b"0" * _DIGITS))
    body = line[:-length] + b"}"
    record = None
    if line == body[:-1] + _CHECKSUM % _checksum(body):
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(body)
    if not isinstance(record, dict) or (run is not None and record.get(RUN) != run[:_DIGITS]):
        raise _not_a_row(path, number, remedy)
    if why := _find_fault(record):
        raise _not_a_row(path, number, remedy, why)
    return record


# What is read of a row: types, or one of several, or lists or objects of one, or two lists.
_KINDS: dict[str, Any] = {
    "info": dict,
    **dict.fromkeys(("id", "sample", *(f"info.{name}" for name in COUNTS)), int),
    **dict.fromkeys(("inputs", "error", "nan", "ended_by"), str),
    "targets": (str, [str]),
    "prediction": (str, type(None)),
    "sources": [str],
    **{name: [int] for name in ("tokens", "info.drafted_lengths", "info.accepted_lengths")},
    **dict.fromkeys(("log_prob_processed", "log_prob_target"), (float, int, type(None))),
    "info.nodes": [[int], [int]],
    "info.calls": {"": int},
}
_OPTIONAL = ("info.deferrals", "info.nodes")
_DECODED = ("ended_by", *(x for x in _KINDS if x.startswith("info") and x not in _OPTIONAL))


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, tuple):
        return any(_fits(value, one) for one in kind)
    if isinstance(kind, dict):
        return isinstance(value, dict) and _fits([*value.values()], [*kind.values()])
    if isinstance(kind, list):
        is_list = isinstance(value, list) and len(kind) in (1, len(value))
        return is_list and all(_fits(item, kind[0]) for item in value)
    return type(value) is kind and (kind is not int or 0 <= value < 2**31)


def _find_fault(record: Record) -> str | None:
    """Describes the first value of a row that is absent or of another type; None if all fit."""
    values, info = dict(record), record.get("info")
    if isinstance(info, dict):
        values |= {f"info.{name}": value for name, value in info.items()}
    for name, kind in _KINDS.items():
        if name in values and not _fits(values[name], kind):
            return f"{name!r} cannot be {short_repr(values[name])}"
    for name in ("id", "inputs", "prediction", *(() if "error" in values else _DECODED)):
        if name not in values:
            return f"the row has no {name!r}"
    if "sources" in values and len(values["sources"]) != len(values.get("tokens", ())):
        return "the row must have a source for each of its 'tokens'"
    return None


def hash_of(values: Any) -> str:
    """Returns a hash of JSON values, such as the inputs of a run."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:_DIGITS]


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:_DIGITS].encode()


def _not_a_row(
    path: PathLike,
    number: int,
    remedy: str = "",
    why: str = "the line is not a row of this run, was changed, or is a duplicate",
) -> UserError:
    remedy = remedy or f"delete line {number} and run the same command again"
    return UserError(f"{os.fspath(path)}:{number}: {why}: {remedy}")


def resume(
    path: Path, run: str, inputs: Mapping[Key, str], failed: Container[int]
) -> dict[Key, Record]:
    """The rows of an earlier start by key; removes an incomplete last line from the file.

    The file may be absent. `inputs` has the rows that may be there, with their inputs; `failed` the
    ids of those that cannot be decoded.
    """
    try:
        data = read_regular(path)
    except FileNotFoundError:
        return {}
    *lines, torn = data.split(b"\n")
    records: dict[Key, Record] = {}
    for number, line in enumerate(lines, 1):
        record = record_of(line, run, path, number)
        key = key_of(record)
        is_other = inputs.get(key) != record["inputs"] or ("error" in record) != (key[0] in failed)
        if key in records or is_other:
            raise _not_a_row(path, number)
        del record[RUN]
        records[key] = record
    if torn[: len(_FIRST_KEY)] != _FIRST_KEY[: len(torn)]:
        raise _not_a_row(path, len(lines) + 1)
    if torn:
        write_atomically(path, data[: -len(torn)])
    return records


def totals(records: Sequence[Record]) -> dict[str, Any]:
    """Returns the totals over all rows, the first keys of `metrics.json`."""
    decoded = [record for record in records if "error" not in record]
    counts = {name: sum(record["info"][name] for record in decoded) for name in COUNTS}
    acceptance = acceptance_of(records)
    judged = "accepted", "rounds", "emitted"
    each = [[record["info"][name] for name in judged] for record in decoded]
    counts["accepted_past_end"] = sum(int(past_end(*map(np.asarray, row))) for row in each)
    counts["accepted"] -= counts["accepted_past_end"]
    ended = [record["ended_by"] for record in decoded]

    def ratio(above: str, below: str) -> float | None:
        return counts[above] / counts[below] if counts[below] else None

    return {
        "rows": len(records),
        "failed": len(records) - len(decoded),
        "ended": ended.count("eos"),
        "ended_by_stop": ended.count("stop"),
        "ended_by_nan": ended.count("nan"),
        **counts,
        "tokens_per_verifier_call": ratio("emitted", "verifier_calls"),
        "acceptance_rate": finite(acceptance.draft_acceptance_rate),
        "acceptance": acceptance.to_dict(),
    }


def acceptance_of(records: Iterable[Record]) -> DraftAcceptance:
    """Returns the acceptance of drafts over all rows that were decoded."""
    return DraftAcceptance.of([x["info"] for x in records if "error" not in x])
