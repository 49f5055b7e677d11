"""Reads predictions and their references from files.

Axes: n rows.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checks import check_path
from specjax.data.examples import guess_format, read_examples, read_objects
from specjax.data.files import read_lines
from specjax.evaluation.efficiency import RowCounts
from specjax.runs.lines import record_of

FILE_NAME = "predictions.jsonl"
_COUNTED = ("emitted", "rounds", "drafted", "accepted")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Predictions:
    """What a file of predictions says of n rows.

    Attributes:
      path: the file.
      outputs: n texts; "" where there is no prediction.
      inputs: n texts, None where the file does not say.
      targets: for each row its references, or None.
      failed: how many rows have no prediction.
      counts: what decoding took, or None where the file does not say.
      log_target: `[n]` float64, log π of the rows, NaN where unknown; None if `counts` is.
      log_p: `[n]` float64, log p of the rows, -inf where the verifier could not emit them.
    """

    path: str
    outputs: list[str]
    inputs: list[str | None]
    targets: list[tuple[str, ...] | None]
    failed: int
    counts: RowCounts | None
    log_target: np.ndarray | None  # [n]
    log_p: np.ndarray | None  # [n]

    def __len__(self) -> int:
        return len(self.outputs)


def read_predictions(
    path: str | os.PathLike[str],
    *,
    prediction_field: str = "prediction",
    targets_field: str = "targets",
) -> Predictions:
    """Reads a file of predictions.

    Args:
      path: a JSONL file, plain or `.gz`, or the directory of a run of `specjax infer`. The rows of
        `specjax infer` are put in the order of their ids; others are taken in that of the file.
      prediction_field: the key of the output, a text or null.
      targets_field: the key of a row's reference, a text or a list of texts, if it has one.

    Returns:
      The predictions.

    Raises:
      FileNotFoundError: there is no such file.
      TypeError: `path` is not a path.
      ValueError: the file is empty or not JSONL, a row lacks its prediction or has been changed
        since it was written, or rows of `specjax infer` are missing.
    """
    check_path(path, "predictions=")
    name = os.path.expanduser(os.fspath(path))
    if os.path.isdir(name):
        name = os.path.join(name, FILE_NAME)
    records = []
    for number, line, record in read_objects(name):
        _check(name, number, line, record, prediction_field, targets_field)
        records.append(record)
    if all("checksum" in record for record in records):
        records = _in_order(name, records)
    return predictions_of(records, name, prediction_field, targets_field)


def predictions_of(
    records: Sequence[dict[str, Any]],
    path: str,
    prediction_field: str = "prediction",
    targets_field: str = "targets",
) -> Predictions:
    """What records say, such as those of `specjax.runs.lines.record_of_row`.

    Args:
      records: one for each row, in order; see `read_predictions`.
      path: their file, or what messages call them.
      prediction_field: the key of the output.
      targets_field: the key of a row's reference, if it has one.

    Returns:
      The predictions.
    """
    texts = [record[prediction_field] for record in records]
    counts = RowCounts.from_records(records) if _has_counts(records) else None
    target, p = _log_probs(records) if counts is not None else (None, None)
    return Predictions(
        path=path,
        outputs=[text or "" for text in texts],
        inputs=[_text(record.get("inputs")) for record in records],
        targets=[
            as_references(record[targets_field]) if targets_field in record else None
            for record in records
        ],
        failed=texts.count(None),
        counts=counts,
        log_target=target,
        log_p=p,
    )


def read_references(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    field: str | int | None = None,
) -> list[tuple[str, ...]]:
    """Reads references, row by row.

    Args:
      sources: a file, plain or `.gz`, or several, of which each has a reference for every row: text
        (one per line), TSV or JSONL.
      field: TSV: a column, counted from 0, or its name in the first line, which may be left out
        where there is one column. JSONL: a key, "targets" by default, of a text or a list of texts.
        An empty list stands for the empty answer, "".

    Returns:
      For each row its references.

    Raises:
      FileNotFoundError: there is no such file.
      TypeError: a path is not a path.
      ValueError: a file is empty or unreadable, lacks the field, has several columns and no field
        is given, or has another number of rows than the first.
    """
    names: Any = [sources] if isinstance(sources, str | os.PathLike) else sources
    if not isinstance(names, Sequence) or not names:
        raise TypeError(f"references must be a path or several, got {sources!r}")
    columns = [_column(path, field) for path in names]
    for path, column in zip(names, columns, strict=True):
        if len(column) != len(columns[0]):
            raise ValueError(
                f"{path} has {len(column)} references, but {names[0]} has {len(columns[0])}: all "
                "files of references must have as many rows"
            )
    return [tuple(text for part in row for text in part) for row in zip(*columns, strict=True)]


def as_references(value: Any) -> tuple[str, ...] | None:
    """A text or a list of texts as a tuple, ("",) for an empty list; None for anything else."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        return None
    return tuple(value) or ("",)


def _column(path: Any, field: str | int | None) -> list[tuple[str, ...]]:
    check_path(path, "references=")
    name = os.path.expanduser(os.fspath(path))
    kind = guess_format(name)
    if kind == "text":
        if field is not None:
            raise ValueError(f"{name}: a text file has no field {field!r}: leave it out")
        return [(line,) for _, line in read_lines(name)]
    if kind == "tsv":
        if field is None:
            _, first = next(read_lines(name), (0, ""))
            if columns := first.count("\t"):
                raise ValueError(
                    f"{name} has {columns + 1} columns: say which one has the references "
                    "(references_field, REFERENCES_FIELD), 0 for the first"
                )
        return [(example.inputs,) for example in read_examples(name, inputs_field=field)]
    key = "targets" if field is None else field
    rows = []
    for number, _, record in read_objects(name):
        rows.append(_references(name, number, record, key))
    return rows


def _references(name: str, number: int, record: dict[str, Any], key: Any) -> tuple[str, ...]:
    if key not in record:
        raise ValueError(
            f"{name}:{number}: there is no key {key!r}: the object has "
            f"{', '.join(map(repr, record))}"
        )
    found = as_references(record[key])
    if found is None:
        raise ValueError(
            f"{name}:{number}: {key!r} must be a text or a list of texts, got "
            f"{str(record[key])[:40]!r}"
        )
    return found


def _check(
    name: str, number: int, line: str, record: dict[str, Any], field: str, targets_field: str
) -> None:
    if "checksum" in record:
        try:
            record_of(line.encode())
        except ValueError:
            raise ValueError(
                f"{name}:{number}: the line has been changed since it was written: restore it, or "
                "remove `checksum` from all lines"
            ) from None
    if field not in record:
        raise ValueError(
            f"{name}:{number}: there is no key {field!r}: the object has "
            f"{', '.join(map(repr, record))}: name the key of the prediction"
        )
    if not isinstance(record[field], str | None):
        raise ValueError(
            f"{name}:{number}: {field!r} must be a text or null, got {str(record[field])[:40]!r}"
        )
    if targets_field in record:
        _references(name, number, record, targets_field)


def _in_order(name: str, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ordered = sorted(records, key=lambda record: record["id"])
    for i, record in enumerate(ordered):
        if record["id"] != i:
            raise ValueError(
                f"{name}: there is no row with id {i}: finish the run, with the command that began "
                "it, before you score it"
            )
    return ordered


def _has_counts(records: Sequence[dict[str, Any]]) -> bool:
    """Whether every row that has no error says what it took."""
    infos: list[Any] = [record.get("info") for record in records if "error" not in record]
    return (
        bool(infos)
        and all(
            isinstance(info, dict)
            and all(_is_count(info.get(key)) for key in _COUNTED)
            and isinstance(info.get("calls"), dict)
            and info["calls"].keys() == infos[0]["calls"].keys()
            and all(map(_is_count, info["calls"].values()))
            and _is_count(info.get("deferrals", 0))
            for info in infos
        )
        and all("info" not in record for record in records if "error" in record)
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _log_probs(records: Sequence[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Log π and log p, `[n]` each. JSON has no infinity: a null p is one, but for a row of NaN.

    A row without p is one that the verifier has not read.
    """
    target, p = np.full(len(records), np.nan), np.full(len(records), np.nan)
    for i, record in enumerate(records):
        ours, theirs = record.get("log_prob_target"), record.get("log_prob")
        if isinstance(ours, int | float) and record.get("ended_by") != "nan":
            target[i] = ours
            if "log_prob" in record:
                p[i] = theirs if isinstance(theirs, int | float) else -np.inf
    return target, p


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def named(paths: Any) -> dict[str, tuple[str, ...]]:
    """Names of methods -> the files of their predictions, each of another seed.

    Args:
      paths: a path, several, or a dict: name -> a path or several. Without names a method is called
        by its directory, or by its file if that is not `predictions.jsonl`.

    Returns:
      The files of each method.

    Raises:
      TypeError: `paths` is nothing of that.
      ValueError: it is empty, or the same path stands in it twice.
    """
    if isinstance(paths, str | os.PathLike):
        paths = (paths,)
    if isinstance(paths, dict):
        made = {
            str(name): tuple(value) if isinstance(value, list | tuple) else (value,)
            for name, value in paths.items()
        }
    elif isinstance(paths, list | tuple):
        for path in paths:
            check_path(path, "predictions=")
        short = [_short_name(path) for path in paths]
        names = [
            n if short.count(n) == 1 else os.fspath(p) for n, p in zip(short, paths, strict=True)
        ]
        if len(set(names)) < len(names):
            again = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"predictions has {again} twice: compare it with another one")
        made = {name: (path,) for name, path in zip(names, paths, strict=True)}
    else:
        raise TypeError(f"predictions must be a path, several, or a dict of them, got {paths!r}")
    for paths_of_one in made.values():
        for path in paths_of_one:
            check_path(path, "predictions=")
    if not made or not all(made.values()):
        raise ValueError("predictions is empty: give at least one file")
    return made


def _short_name(path: Any) -> str:
    place = Path(os.path.expanduser(os.fspath(path))).absolute()
    if place.is_dir():
        return place.name
    name = place.name.removesuffix(".gz")
    return place.parent.name if name == FILE_NAME else name.removesuffix(".jsonl")
