"""Merges the parts of a run, which several processes have written."""

import contextlib
import itertools
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checks import check_count, listed
from specjax.errors import MissingFileError, UserError
from specjax.runs import processes
from specjax.runs.predictions import (
    CONFIG_NAME,
    COSTS_NAME,
    MADE,
    METRICS_NAME,
    PREDICTIONS_NAME,
    SAMPLES,
    Record,
    hash_of,
    key_of,
    lines_of,
    totals,
    written_rows,
)
from specjax.runs.processes import Process
from specjax.runs.run_directory import (
    ENVIRONMENT,
    PART,
    RunDirectory,
    difference,
    fingerprint_of,
    read_config,
)
from specjax.writing import InUseError

OnStart = Callable[..., None]


class UnfinishedError(UserError):
    """A part has not ended, or it has failed and removed its configuration."""


def directory_of(
    output_dir: str | os.PathLike[str], process: Process | None = None
) -> RunDirectory:
    """Returns the directory of a process, not yet open; None: the directory of the run."""
    whole = RunDirectory(output_dir, config_name=CONFIG_NAME, makes=MADE)
    if process is None:
        return whole
    place = whole.path / process.directory
    return RunDirectory(place, config_name=CONFIG_NAME, makes=MADE)


def check_whole(
    part: RunDirectory, configuration: Mapping[str, Any], allow_other_environment: bool
) -> None:
    """Raises UserError if the parent directory of a part has another run."""
    whole = directory_of(part.path.parent)
    whole.peek()
    whole.compare(configuration, allow_other_environment=allow_other_environment)


def _parts_in(root: Path) -> list[Path]:
    """Returns the directory itself if it is a part, or the parts up to two levels below."""
    if _is_part(root) and (root / CONFIG_NAME).is_file():
        return [root]
    paths = sorted([*root.glob("part-*-of-*"), *root.glob("*/part-*-of-*")])
    return list(filter(_is_part, paths))


def _find(roots: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The directories of all parts of one run, in order.

    `roots` are parts, or directories with parts up to two levels below.
    """
    paths = [Path(os.path.expanduser(root)).absolute() for root in roots]
    parts = sorted((part for path in paths for part in _parts_in(path)), key=lambda part: part.name)
    shown, names = listed(roots), [part.name for part in parts]
    if not parts:
        raise MissingFileError(f"{shown}: there is no directory part-I-of-N: check the path")
    count = int(names[0].rpartition("-")[2])
    if names != (needed := [Process(i, count).directory for i in range(count)]):
        raise UserError(
            f"{shown} must have {listed(needed)}, each once, and has {listed(names)}: "
            "give the directories of all parts of one run"
        )
    return parts


def _common(parts: Sequence[Path]) -> dict[str, Any]:
    """The configuration that all parts of a run must share, without the keys of a part."""
    first: dict[str, Any] = {}
    for index, path in enumerate(parts):
        stored = read_config(path / CONFIG_NAME) or {}
        part = stored.get(PART)
        if not isinstance(part, dict) or part.get("index") != index:
            raise UnfinishedError(
                f"{path} has no {CONFIG_NAME} of this part: run this process to its end"
            )
        config = {k: v for k, v in stored.items() if k not in (PART, "files", "kept")}
        first = first or config
        apart = difference(first, config)
        here = first.get(ENVIRONMENT)
        if apart and difference(first, {**config, ENVIRONMENT: here}):
            raise UserError(
                f"{path} is not part of the same run as {parts[0]} ({apart}): run all processes "
                "with the same command and the same files, in a new output_dir"
            )
        if apart:
            text = f"specjax: warning: {path} was decoded in another environment ({apart})"
            print(text, file=sys.stderr)
    return first


def merge(
    output_dir: str | os.PathLike[str],
    parts: Sequence[str | os.PathLike[str]] = (),
    *,
    on_start: OnStart | None = None,
) -> dict[str, Any]:
    """Writes the rows of all parts of a run, in the order of the inputs, and their totals.

    The files are equal to those of a single process; the parts are not removed.

    Args:
      output_dir: the directory of the run, for the merged files.
      parts: the directories `part-I-of-N`, or directories that contain them; by default those in
        `output_dir`, or one level below.
      on_start: see `infer`; called before writing.

    Raises:
      OSError: there are no parts, or the directory cannot be written.
      UserError: a part or a row is missing, or there twice; or the parts are of different runs.
    """
    whole = directory_of(output_dir)
    return _write(whole, _find(parts or [whole.path]), on_start)


def read_parts(directory: str | os.PathLike[str]) -> list[Record] | None:
    """Returns the rows of all parts in a directory, in order; None without parts. See `merge`."""
    if not _parts_in(Path(directory)):
        return None
    parts = _find([directory])
    return _rows(parts, _common(parts))


def finish(part: RunDirectory, process: Process, on_start: OnStart | None) -> None:
    """Merges all parts if this process is the last to end.

    If several end at once, one of them writes. The part is closed.
    """
    if process.together:
        with processes.naming_lost_processes(process):
            processes.gather(np.int32(process.index))  # wait until all have written
        if process.index:
            return
    try:
        with contextlib.suppress(InUseError):  # another part that has just ended writes the same
            _write(directory_of(part.path.parent), beside(part, process), on_start)
    except UnfinishedError:
        say_unmerged(part, process)


def beside(part: RunDirectory, process: Process) -> list[Path]:
    """Returns the directories of all parts of the run of a part, in order."""
    count = process.count
    return [part.path.parent / Process(i, count).directory for i in range(count)]


def say_unmerged(part: RunDirectory, process: Process) -> None:
    """Says how the parts will be merged."""
    print(
        f"specjax: part {process.index} of {process.count} is done. The last part to end merges "
        f"all in {part.path.parent}. If the parts are on different disks, copy them into one "
        "directory and run: specjax merge DIRECTORY",
        file=sys.stderr,
    )


def _write(whole: RunDirectory, parts: Sequence[Path], on_start: OnStart | None) -> dict[str, Any]:
    configuration = _common(parts)
    records = _rows(parts, configuration)
    with whole as run:
        run.claim(configuration, allow_other_environment=True)
        if on_start is not None:
            on_start(run, paths={path.name: str(path) for path in parts})
        run.keep()
        if (costs := parts[0] / COSTS_NAME).is_file():
            run.write(COSTS_NAME, costs.read_bytes())
        path = run.write(PREDICTIONS_NAME, lines_of(records, run.fingerprint))
        metrics = totals(records)
        run.write_json(METRICS_NAME, metrics)
    print(
        f"specjax: merged {len(parts)} parts: {len(records)} predictions in {path}",
        file=sys.stderr,
    )
    return metrics


def _rows(parts: Sequence[Path], configuration: Mapping[str, Any]) -> list[Record]:
    """All rows of a run in order."""
    run, samples = fingerprint_of(configuration), configuration.get(SAMPLES, 1)
    for name, count in (("rows", configuration.get("rows")), (SAMPLES, samples)):
        check_count(
            f"{parts[0] / CONFIG_NAME}: {name}",
            count,
            "run the same command again in a new output_dir",
        )
    rows = [x for path in parts for x in written_rows(path / PREDICTIONS_NAME, run)[0]]
    records = {key_of(record): record for record in rows}
    keys = list(itertools.product(range(configuration["rows"]), range(samples)))
    if absent := [key for key in keys if key not in records]:
        raise UnfinishedError(
            f"{len(absent)} of {len(keys)} rows are in no part; the first is {absent[0][0]}: run "
            f"the same command again in the processes of {parts[0].parent} that have not ended"
        )
    ordered = [records[key] for key in keys]
    inputs = [(x["inputs"], x.get("targets")) for x in ordered[::samples]]
    if len(rows) > len(keys) or hash_of(inputs) != configuration.get("input"):
        raise UserError(
            f"the parts in {parts[0].parent} have a row twice, or rows of other inputs: run the "
            "same command again in a new output_dir"
        )
    return ordered


def _is_part(path: Path) -> bool:
    return re.fullmatch(r"part-\d{5}-of-\d{5}", path.name) is not None
