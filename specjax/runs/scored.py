"""Reads predictions and references for scoring.

Axes: n rows.
"""

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from specjax.checks import check_path, tuple_text
from specjax.data.examples import field_of
from specjax.data.records import SourceRecord, guess_format, read_objects, read_records
from specjax.errors import UserError
from specjax.evaluation.efficiency import RowCounts
from specjax.runs.merging import read_parts
from specjax.runs.predictions import (
    CHECKSUM,
    CONFIG_NAME,
    PREDICTIONS_NAME,
    RUN,
    key_of,
    record_of,
)
from specjax.runs.run_directory import fingerprint_of, read_config


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Predictions:
    """The content of a file of predictions of n rows.

    Attributes:
      path: the file.
      outputs: n texts; "" for a missing prediction.
      inputs: n texts, None if unknown.
      targets: for each row its references, or None.
      missing: the rows without a prediction.
      counts: the counts of decoding, or None if unknown.
      log_target: log π of the rows, NaN if unknown; None if `counts` is None.
      log_p: log p of the rows, -inf if the verifier could not emit them.
    """

    path: str
    outputs: list[str]
    inputs: list[str | None]
    targets: list[tuple[str, ...] | None]
    missing: tuple[int, ...]
    counts: RowCounts | None
    log_target: Float64[np.ndarray, " n"] | None
    log_p: Float64[np.ndarray, " n"] | None

    def __len__(self) -> int:
        return len(self.outputs)


def read_predictions(
    path: str | os.PathLike[str],
    *,
    prediction_field: str = "prediction",
    targets_field: str = "targets",
) -> list[Predictions]:
    """Reads a file of predictions.

    Args:
      path: a JSONL file, plain or `.gz`; or the directory of a run of `specjax infer`, or of its
        parts. Rows of `specjax infer` are sorted by id; other rows keep the order of the file.
      prediction_field: the key of the output, a text or null.
      targets_field: the key of a row's reference, a text or a list of texts; optional.

    Returns:
      The predictions; those of each sample if a run of `specjax infer` has several.
    """
    check_path(path, "predictions=")
    name = os.path.expanduser(os.fspath(path))
    if os.path.isdir(name):
        file = os.path.join(name, PREDICTIONS_NAME)
        if not os.path.exists(file) and (rows := read_parts(name)) is not None:
            fields = prediction_field, targets_field
            return [predictions_of(rows, name, *fields) for rows in _by_sample(name, rows)]
        name = file
    run, records = _run_of(name), []
    if run is not None and os.path.exists(name) and not os.path.isfile(name):
        raise UserError(f"{name} is not a regular file: restore the predictions of this run")
    for number, line, record in read_objects(name):
        if CHECKSUM in record or run is not None:
            _check_seal(f"{name}:{number}", line, run)
            run = record.get(RUN) if run is None else run  # all rows must be of one run
        _check(f"{name}:{number}", record, prediction_field, targets_field)
        records.append(record)
    if all(CHECKSUM in record for record in records):
        fields = prediction_field, targets_field
        return [predictions_of(rows, name, *fields) for rows in _by_sample(name, records)]
    # `info` of other programs may have another form.
    plain = [{key: value for key, value in record.items() if key != "info"} for record in records]
    return [predictions_of(plain, name, prediction_field, targets_field)]


def predictions_of(
    records: Sequence[dict[str, Any]],
    path: str,
    prediction_field: str = "prediction",
    targets_field: str = "targets",
) -> Predictions:
    """Makes predictions from a record for each row, in order; `path` names them in messages."""
    texts = [record[prediction_field] for record in records]
    inputs = [record.get("inputs") for record in records]
    has_counts = any("info" in record for record in records)
    counts = RowCounts.from_records(records) if has_counts else None
    target, p = _log_probs(records) if counts is not None else (None, None)
    if has_counts and any("log_prob" in x and "log_prob_processed" not in x for x in records):
        warnings.warn(
            f"{path} has no log_prob_processed, as an earlier version wrote it: nats_per_token and "
            "impossible_share are unknown; decode again to have them",
            stacklevel=2,
        )
    return Predictions(
        path=path,
        outputs=[text or "" for text in texts],
        inputs=[text if isinstance(text, str) else None for text in inputs],
        targets=[
            as_references(field_of(SourceRecord(path, record), targets_field))
            if targets_field in record
            else None
            for record in records
        ],
        missing=tuple(row for row, text in enumerate(texts) if text is None),
        counts=counts,
        log_target=target,
        log_p=p,
    )


def named(paths: Any) -> dict[str, tuple[str, ...]]:
    """Name -> the files of each method, of a path, several, or name -> a path or several.

    Without names a method has the name of its directory, or of its file if that is not
    `predictions.jsonl`.
    """
    if isinstance(paths, Mapping):
        several = {
            str(name): tuple(value) if isinstance(value, list | tuple) else (value,)
            for name, value in paths.items()
        }
    else:
        alone = isinstance(paths, str | os.PathLike)
        if not alone and not isinstance(paths, list | tuple):
            raise UserError(
                f"predictions must be a path, several paths, or a dict of paths, got {paths!r}"
            )
        files = [paths] if alone else list(paths)
        for path in files:
            check_path(path, "predictions=")
            _refuse_joined("predictions", path)
        short = [_short_name(path) for path in files]
        several = {}
        for name, path in zip(short, files, strict=True):
            key = name if short.count(name) == 1 else os.fspath(path)
            if key in several:
                raise UserError(f"predictions has {key} twice: give different files")
            several[key] = (path,)
    for path in (path for of_method in several.values() for path in of_method):
        check_path(path, "predictions=")
    if not several or not all(several.values()):
        raise UserError("predictions is empty: give at least one file")
    return several


def read_references(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    field: str | int | None = None,
) -> list[tuple[str, ...]]:
    """Reads references, row by row.

    Args:
      sources: a file, plain or `.gz`, or several files, each with a reference for every row: text
        (a line each), TSV or JSONL.
      field: TSV: a column, counted from 0, or its name in the first line; optional for a single
        column. JSONL: a key, "targets" by default, of a text or a list of texts. An empty list is
        the empty answer, "".
    """
    names: Any = [sources] if isinstance(sources, str | os.PathLike) else sources
    if not isinstance(names, Sequence) or not names:
        raise UserError(f"references must be a path or several paths, got {sources!r}")
    for path in names:
        _refuse_joined("references", path)
    columns = [_column(path, field) for path in names]
    for path, column in zip(names, columns, strict=True):
        if len(column) != len(columns[0]):
            raise UserError(
                f"{path} has {len(column)} references, but {names[0]} has {len(columns[0])}: give "
                "files with the same number of rows"
            )
    return [tuple(text for part in row for text in part) for row in zip(*columns, strict=True)]


def as_references(texts: str | Sequence[str]) -> tuple[str, ...]:
    """Returns a text or several texts as a tuple; an empty list as ("",)."""
    return (texts,) if isinstance(texts, str) else tuple(texts) or ("",)


def _refuse_joined(name: str, path: Any) -> None:
    """Raises ValueError for several files in one text."""
    if isinstance(path, str) and "," in path and not os.path.exists(os.path.expanduser(path)):
        raise UserError(f"{name}={path!r}: no such file; write several as {tuple_text(path)}")


def _column(path: Any, field: str | int | None) -> list[tuple[str, ...]]:
    check_path(path, "references=")
    name = os.path.expanduser(os.fspath(path))
    kind = guess_format(name)
    if kind == "text" and field is not None:
        raise UserError(f"{name}: a text file has no field {field!r}: leave out the field")
    header = None if field is None else isinstance(field, str)
    records = list(read_records(name, header=header, option="references_field"))
    if field is None:
        field = "targets" if kind == "jsonl" else 0
        if kind == "tsv" and (count := len(records[0].values)) > 1:
            raise UserError(
                f"{name} has {count} columns: choose the column of the references with "
                "references_field (0 is the first)"
            )
    return [as_references(field_of(record, field)) for record in records]


def _run_of(file: str) -> str | None:
    """The fingerprint of the run in the directory of a file; None if that is not a run's file."""
    path = Path(file)
    if path.name != PREDICTIONS_NAME:
        return None
    configuration = read_config(path.parent / CONFIG_NAME)
    return None if configuration is None else fingerprint_of(configuration)


def _check_seal(place: str, line: str, run: str | None) -> None:
    try:
        record_of(line.encode(), run)
    except ValueError as error:
        raise UserError(
            f"{place}: the line {error}: restore it, or copy the file elsewhere and remove "
            f"`{CHECKSUM}` and `{RUN}` from all lines"
        ) from None


def _check(place: str, record: dict[str, Any], field: str, targets_field: str) -> None:
    if field not in record:
        raise UserError(
            f"{place}: there is no key {field!r}; the keys are {', '.join(map(repr, record))}"
        )
    if not isinstance(record[field], str | None):
        raise UserError(
            f"{place}: {field!r} must be a text or null, got {str(record[field])[:40]!r}"
        )
    if targets_field in record:
        field_of(SourceRecord(place, record), targets_field)


def _by_sample(name: str, records: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The rows of each sample, in order."""
    ordered = sorted(records, key=key_of)
    samples = 1 + max(key_of(record)[1] for record in records)
    for place in range(len(ordered) + -len(ordered) % samples):
        i, sample = divmod(place, samples)
        if place == len(ordered) or key_of(ordered[place]) != (i, sample):
            which = f" and sample {sample}" if samples > 1 else ""
            raise UserError(
                f"{name}: there is no row with id {i}{which}: finish the run with the same command "
                "before you score it"
            )
    return [ordered[sample::samples] for sample in range(samples)]


def _log_probs(records: Sequence[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Log π and log p, `[n]` each."""
    target, p = np.full(len(records), np.nan), np.full(len(records), np.nan)
    for i, record in enumerate(records):
        ours, theirs = record.get("log_prob_target"), record.get("log_prob_processed")
        if isinstance(ours, int | float) and record.get("ended_by") != "nan":
            target[i] = ours
            if "log_prob_processed" in record:
                p[i] = theirs if isinstance(theirs, int | float) else -np.inf
    return target, p


def _short_name(path: Any) -> str:
    place = Path(os.path.expanduser(os.fspath(path))).absolute()
    if place.is_dir():
        return place.name
    name = place.name.removesuffix(".gz")
    return place.parent.name if name == PREDICTIONS_NAME else name.removesuffix(".jsonl")
