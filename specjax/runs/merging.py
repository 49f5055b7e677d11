"""Merges the parts of a run, which several processes have written."""

import contextlib
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checks import check_path
from specjax.errors import UserError
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


@dataclasses.dataclass(frozen=True)
class Shared:
    """A kind of run that several processes can share, each with its own part of the directory.

    Attributes:
      config_name: the file of the configuration; `makes`: see `RunDirectory`.
      what: the name of such a run in messages.
      same_machine: whether parts from different machines are errors; if not, they are warnings.
    """

    config_name: str
    makes: tuple[str, ...]
    what: str = "run"
    same_machine: bool = False

    def directory(
        self, output_dir: str | os.PathLike[str], process: Process | None = None
    ) -> RunDirectory:
        """Returns the directory of a process, not yet open; None: the directory of the run."""
        whole = RunDirectory(output_dir, config_name=self.config_name, makes=self.makes)
        if process is None:
            return whole
        place = whole.path / process.directory
        return RunDirectory(place, config_name=self.config_name, makes=self.makes)

    def check_whole(
        self,
        part: RunDirectory,
        configuration: Mapping[str, Any],
        *,
        allow_other_environment: bool = False,
    ) -> None:
        """Raises UserError if the parent directory of a part has another run."""
        whole = self.directory(part.path.parent)
        theirs = whole.peek()
        ours = json.loads(json.dumps(configuration))
        ignored = (ENVIRONMENT,) if allow_other_environment else ()
        if theirs is not None and whole.kept and (apart := _difference(theirs, ours, *ignored)):
            raise UserError(
                f"output_dir={whole.path} has a run of another configuration ({apart}): choose "
                "another output_dir, or use the same configuration"
            )

    def parts_in(self, root: Path) -> list[Path]:
        """Returns the directory itself if it is a part, or the parts up to two levels below."""
        if _place(root) and (root / self.config_name).is_file():
            return [root]
        paths = sorted([*root.glob("part-*-of-*"), *root.glob("*/part-*-of-*")])
        return [path for path in paths if _place(path)]

    def find(self, roots: Sequence[str | os.PathLike[str]]) -> list[Path]:
        """The directories of all parts of one run, in order.

        `roots` are parts, or directories with parts up to two levels below.
        """
        for root in roots:
            check_path(root, "merge: ")
        shown = ", ".join(map(str, roots))
        paths = [Path(root).expanduser().absolute() for root in roots]
        placed = [(_place(part), part) for path in paths for part in self.parts_in(path)]
        counts = sorted({place[1] for place, _ in placed if place is not None})
        if not counts:
            raise FileNotFoundError(f"{shown}: there is no directory part-I-of-N: check the path")
        if len(counts) > 1:
            of_all = " and ".join(f"{count} processes" for count in counts)
            raise UserError(f"{shown} has parts of {of_all}: give the directories of one run")
        by_index: dict[int, Path] = {}
        for place, path in placed:
            assert place is not None
            if place[0] in by_index:
                raise UserError(
                    f"{path} and {by_index[place[0]]} are the same part: leave out one of them"
                )
            by_index[place[0]] = path
        (count,) = counts
        if absent := [i for i in range(count) if i not in by_index]:
            raise FileNotFoundError(
                f"{shown} has no {Process(absent[0], count).directory}: copy the parts of all "
                f"{count} processes there, or give their directories"
            )
        return [by_index[i] for i in range(count)]

    def common(self, parts: Sequence[Path]) -> dict[str, Any]:
        """The configuration that all parts of a run must share, without the keys of a part."""
        stored = [read_config(path / self.config_name) for path in parts]
        configurations: list[dict[str, Any]] = []
        for path, config in zip(parts, stored, strict=True):
            if config is None or not isinstance(config.get(PART), dict):
                raise UserError(
                    f"{path} has no {self.config_name} of a part: run this process to its end"
                )
            configurations.append(config)
        first = configurations[0]
        same = "on the same kind of machine" if self.same_machine else "and the same files"
        for index, (path, other) in enumerate(zip(parts, configurations, strict=True)):
            if other[PART].get("index") != index:
                raise UserError(
                    f"{path} has the part of process {other[PART].get('index')}: rename it"
                )
            apart = _difference(first, other)
            if apart and (self.same_machine or _difference(first, other, ENVIRONMENT)):
                raise UserError(
                    f"{path} is not part of the same {self.what} as {parts[0]} ({apart}): run all "
                    f"processes with the same command {same}, in a new output_dir"
                )
            if apart:
                text = f"specjax: warning: {path} was decoded in another environment ({apart})"
                print(text, file=sys.stderr)
        return _shared(first)


# The runs of `specjax infer`.
ROWS = Shared(CONFIG_NAME, MADE)


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
      on_start: called as `on_start(run, paths={...})` with the `RunDirectory`, before writing.

    Raises:
      FileNotFoundError: a part is missing, or all are.
      OSError: the directory cannot be written.
      ValueError: the parts are of different runs, rows are missing, or a row is in two parts.
    """
    check_path(output_dir, "merge: ")
    whole = ROWS.directory(output_dir)
    return _write(whole, ROWS.find(parts or [whole.path]), on_start)


def read_parts(directory: str | os.PathLike[str]) -> list[Record] | None:
    """Returns the rows of all parts in a directory, in order; None without parts. See `merge`."""
    if not ROWS.parts_in(Path(directory)):
        return None
    parts = ROWS.find([directory])
    return _rows(parts, _configuration(parts))


def finish(part: RunDirectory, process: Process, on_start: OnStart | None) -> None:
    """Merges all parts if this process is the last to end.

    If several end at once, one of them writes. The part is closed.
    """
    if process.together:
        with processes.naming_lost_processes(process):
            processes.gather(np.int32(process.index))  # wait until all have written
        if process.index:
            return
    parts = beside(part, process)
    # A part that fails now removes its configuration.
    if any(read_config(path / CONFIG_NAME) is None for path in parts):
        return say_unmerged(part, process)
    configuration = _configuration(parts)
    run = fingerprint_of(configuration)
    files = [path / PREDICTIONS_NAME for path in parts]
    written = {key_of(row) for path in files for row in written_rows(path, run)[0]}
    if len(written) < configuration["rows"] * configuration.get(SAMPLES, 1):
        return say_unmerged(part, process)
    with contextlib.suppress(InUseError):  # another part that has just ended writes the same
        _write(ROWS.directory(part.path.parent), parts, on_start)


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
    configuration = _configuration(parts)
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
        run.write(METRICS_NAME, (json.dumps(metrics, indent=1) + "\n").encode())
    print(
        f"specjax: merged {len(parts)} parts: {len(records)} predictions in {path}",
        file=sys.stderr,
    )
    return metrics


def _configuration(parts: Sequence[Path]) -> dict[str, Any]:
    """The configuration that all parts share."""
    configuration = ROWS.common(parts)
    counts = configuration.get("rows"), configuration.get(SAMPLES, 1)
    whole = all(type(count) is int and count >= 1 for count in counts)
    if not whole or not isinstance(configuration.get("input"), str):
        raise UserError(
            f"{parts[0] / CONFIG_NAME} is damaged: run the same command again in a new output_dir"
        )
    return configuration


def _rows(parts: Sequence[Path], configuration: Mapping[str, Any]) -> list[Record]:
    """All rows of a run in order."""
    rows, run = configuration["rows"], fingerprint_of(configuration)
    samples = configuration.get(SAMPLES, 1)
    records: dict[tuple[int, int], Record] = {}
    for path in parts:
        for record in written_rows(path / PREDICTIONS_NAME, run)[0]:
            key = i, sample = key_of(record)
            if key in records:
                raise UserError(f"row {i} of {path} is in another part, too: start a new run")
            if not (0 <= i < rows and 0 <= sample < samples):
                raise UserError(f"{path} has row {i}, but the run has {rows} rows: delete {path}")
            records[key] = record
    keys = list(itertools.product(range(rows), range(samples)))
    if absent := [i for i, sample in keys if (i, sample) not in records]:
        raise UserError(
            f"{len(absent)} of {len(keys)} rows are in no part; the first is {absent[0]}: run the "
            f"same command again in the processes of {parts[0].parent} that have not ended"
        )
    ordered = [records[key] for key in keys]
    inputs = [(x["inputs"], x.get("targets")) for x in ordered[::samples]]
    if hash_of(inputs) != configuration["input"]:
        raise UserError(
            f"the rows of {parts[0].parent} have other inputs than the run: run the same command "
            "again in a new output_dir"
        )
    return ordered


def _place(path: Path) -> tuple[int, int] | None:
    """The index and the count in the name of a part's directory; None for other names."""
    words = path.name.split("-")
    numbers = words[1::2]
    if len(words) != 4 or words[::2] != ["part", "of"] or not all(map(str.isdecimal, numbers)):
        return None
    return int(numbers[0]), int(numbers[1])


def _shared(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without the keys of a part."""
    of_part = (PART, "fingerprint", "files", "kept")
    return {key: value for key, value in configuration.items() if key not in of_part}


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any], *ignored: str) -> str:
    first, second = (
        {key: value for key, value in _shared(each).items() if key not in ignored}
        for each in (theirs, ours)
    )
    return difference(first, second)
