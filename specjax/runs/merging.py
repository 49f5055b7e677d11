"""The parts of a run, each written by one process into a directory of its own, become one."""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checks import check_path
from specjax.runs import processes
from specjax.runs.predictions import (
    CONFIG_NAME,
    COSTS_NAME,
    MADE,
    METRICS_NAME,
    PREDICTIONS_NAME,
    Record,
    line_of,
    totals,
    written_rows,
)
from specjax.runs.processes import Process
from specjax.runs.run_directory import (
    ENVIRONMENT,
    GIN_NAME,
    PART,
    RunDirectory,
    difference,
    read_config,
)
from specjax.writing import InUseError

OnStart = Callable[..., None]


@dataclasses.dataclass(frozen=True)
class Shared:
    """A kind of run that several processes can share, each with a directory in that of the run.

    Attributes:
      config_name: see `RunDirectory`.
      makes: see `RunDirectory`.
      what: what the parts make together, for messages.
      same_machine: whether parts from other machines are refused; else a warning names them.
    """

    config_name: str
    makes: tuple[str, ...]
    what: str = "run"
    same_machine: bool = False

    def directory(
        self, output_dir: str | os.PathLike[str], process: Process | None = None
    ) -> RunDirectory:
        """The directory that a process writes, not yet open: that of the run, or one in it."""
        whole = RunDirectory(output_dir, config_name=self.config_name, makes=self.makes)
        if process is None:
            return whole
        place = whole.path / process.directory
        return RunDirectory(place, config_name=self.config_name, makes=self.makes)

    def check_whole(self, part: RunDirectory, configuration: Mapping[str, Any]) -> None:
        """Raises ValueError if the directory around a part holds another run."""
        whole = self.directory(part.path.parent)
        theirs = whole.peek()
        ours = json.loads(json.dumps(configuration))
        if theirs is not None and whole.kept and (found := _difference(theirs, ours)):
            raise ValueError(
                f"output_dir={whole.path} holds a run of another configuration ({found}): choose "
                "another output_dir, or use the same configuration"
            )

    def parts_in(self, root: Path) -> list[Path]:
        """The parts that a directory is, or has in it, or one level below."""
        if _place(root) and (root / self.config_name).is_file():
            return [root]
        found = sorted(root.glob("part-*-of-*")) or sorted(root.glob("*/part-*-of-*"))
        return [path for path in found if _place(path)]

    def find(self, roots: Sequence[str | os.PathLike[str]]) -> list[Path]:
        """All parts of one run.

        Args:
          roots: parts, or directories that have them in them or one level below.

        Returns:
          Their directories, in order.

        Raises:
          FileNotFoundError: there are none, or not all.
          TypeError: a root is no path.
          ValueError: there are those of two divisions, or one twice.
        """
        for root in roots:
            check_path(root, "merge: ")
        shown = ", ".join(map(str, roots))
        paths = [Path(root).expanduser().absolute() for root in roots]
        placed = [(_place(part), part) for path in paths for part in self.parts_in(path)]
        counts = sorted({place[1] for place, _ in placed if place is not None})
        if not counts:
            raise FileNotFoundError(
                f"{shown}: there is no part-I-of-N of a run of several processes: check the path"
            )
        if len(counts) > 1:
            of_all = " and ".join(f"{count} processes" for count in counts)
            raise ValueError(f"{shown} has parts of {of_all}: name the directories of one run")
        by_index: dict[int, Path] = {}
        for place, path in placed:
            assert place is not None
            if place[0] in by_index:
                raise ValueError(
                    f"{path} and {by_index[place[0]]} are the same part: name one of them"
                )
            by_index[place[0]] = path
        (count,) = counts
        if absent := [i for i in range(count) if i not in by_index]:
            raise FileNotFoundError(
                f"{shown} has no {Process(absent[0], count).directory}: bring the parts of all "
                f"{count} processes there, or name their directories"
            )
        return [by_index[i] for i in range(count)]

    def common(self, found: Sequence[Path]) -> dict[str, Any]:
        """The configuration of the run, which all parts must have.

        Args:
          found: the directories of the parts, in order.

        Returns:
          It, without what is a part's own.

        Raises:
          ValueError: a part has none, or another one.
        """
        stored = [read_config(path / self.config_name) for path in found]
        configurations = [config for config in stored if config is not None and PART in config]
        if len(configurations) < len(found):
            path = found[[config is None or PART not in config for config in stored].index(True)]
            raise ValueError(
                f"{path} has no {self.config_name} of a part: run that process to its end"
            )
        first = configurations[0]
        same = "on the same kind of machine" if self.same_machine else "and the same files"
        for index, (path, other) in enumerate(zip(found, configurations, strict=True)):
            if other[PART].get("index") != index:
                raise ValueError(
                    f"{path} holds the part of process {other[PART].get('index')}: give it its own "
                    "name"
                )
            apart = _difference(first, other)
            if apart and (self.same_machine or _difference(first, other, ENVIRONMENT)):
                raise ValueError(
                    f"{path} is a part of another {self.what} than {found[0]} ({apart}): give all "
                    f"processes the same command {same}, in a new output_dir"
                )
            if apart:
                print(f"specjax: warning: {path} was decoded elsewhere ({apart})", file=sys.stderr)
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

    What it leaves is what a single process would have left; the parts stay.

    Args:
      output_dir: the directory of the run, which gets the files.
      parts: the directories `part-I-of-N`, or directories that have these in them; by default
        those in `output_dir`, and one level below.
      on_start: is called as `on_start(run, paths={...})` with the `RunDirectory`, before writing.

    Returns:
      The content of `metrics.json`.

    Raises:
      FileNotFoundError: there are no parts, or not all of them.
      OSError: the directory cannot be written.
      TypeError: a path is not a path.
      ValueError: the parts are of different runs, rows are missing, or a row is in two parts.
    """
    check_path(output_dir, "merge: ")
    whole = ROWS.directory(output_dir)
    found = ROWS.find(parts or [whole.path])
    return _write(whole, found, on_start)


def read_parts(directory: str | os.PathLike[str]) -> list[Record] | None:
    """The rows of all parts in a directory, in order; None if it has no parts. See `merge`."""
    if not ROWS.parts_in(Path(directory)):
        return None
    found = ROWS.find([directory])
    return _rows(found, ROWS.common(found)["rows"])


def finish(part: RunDirectory, process: Process, on_start: OnStart | None) -> None:
    """Makes one of all parts where this process, which has closed its own, can and should.

    Where several end at once, one of them writes.

    Args:
      part: a finished part, closed.
      process: the process that wrote it.
      on_start: see `merge`.
    """
    if process.together:
        with processes.naming_lost_processes(process):
            processes.gather(np.int32(process.index))  # all have written
        if process.index:
            return
    found = beside(part, process)
    # One that fails at this moment takes its configuration back.
    if any(read_config(path / CONFIG_NAME) is None for path in found):
        return say_unmerged(part, process)
    written = {row["id"] for path in found for row in written_rows(path / PREDICTIONS_NAME)[0]}
    if len(written) < ROWS.common(found)["rows"]:
        return say_unmerged(part, process)
    with contextlib.suppress(InUseError):  # another part that has just ended writes the same
        _write(ROWS.directory(part.path.parent), found, on_start)


def beside(part: RunDirectory, process: Process) -> list[Path]:
    """The directories of all parts that the directory around a part should have, in order."""
    count = process.count
    return [part.path.parent / Process(i, count).directory for i in range(count)]


def say_unmerged(part: RunDirectory, process: Process) -> None:
    """Says, where not all parts have ended, how they become one."""
    print(
        f"specjax: this is part {process.index} of {process.count}. The last part to end merges "
        f"them in {part.path.parent}; where parts are on different disks, bring them together, and "
        "run: specjax merge DIRECTORY",
        file=sys.stderr,
    )


def gin_text(paths: Mapping[str, str]) -> str | None:
    """The gin configuration of the first of some parts, by name -> path; None without one."""
    path = Path(next(iter(paths.values())), GIN_NAME)
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _write(whole: RunDirectory, found: Sequence[Path], on_start: OnStart | None) -> dict[str, Any]:
    configuration = ROWS.common(found)
    records = _rows(found, configuration["rows"])
    with whole as run:
        run.claim(configuration, allow_other_environment=True)
        if on_start is not None:
            on_start(run, paths={path.name: str(path) for path in found})
        run.keep()
        if (costs := found[0] / COSTS_NAME).is_file():
            run.write(COSTS_NAME, costs.read_bytes())
        path = run.write(PREDICTIONS_NAME, b"".join(map(line_of, records)))
        metrics = totals(records)
        run.write(METRICS_NAME, (json.dumps(metrics, indent=1) + "\n").encode())
    print(
        f"specjax: merged {len(found)} parts: {len(records)} predictions are in {path}",
        file=sys.stderr,
    )
    return metrics


def _rows(found: Sequence[Path], rows: int) -> list[Record]:
    """All rows in order."""
    records: dict[int, Record] = {}
    for path in found:
        for record in written_rows(path / PREDICTIONS_NAME)[0]:
            i = record["id"]
            if i in records:
                raise ValueError(f"{path} has row {i}, which another part has, too")
            if not 0 <= i < rows:
                raise ValueError(f"{path} has row {i}, but the run has {rows} rows")
            records[i] = record
    if absent := [i for i in range(rows) if i not in records]:
        raise ValueError(
            f"{len(absent)} of {rows} rows are in no part, the first is {absent[0]}: start the "
            "processes that have not ended again, with the same command"
        )
    return [records[i] for i in range(rows)]


def _place(path: Path) -> tuple[int, int] | None:
    """The index and the count in the name of a part's directory; None if it is none."""
    words = path.name.split("-")
    if len(words) != 4 or words[::2] != ["part", "of"] or not "".join(words[1::2]).isdecimal():
        return None
    return int(words[1]), int(words[3])


def _shared(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without what is a part's own."""
    own = (PART, "fingerprint", "files", "kept")
    return {key: value for key, value in configuration.items() if key not in own}


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any], *ignored: str) -> str:
    one, other = (
        {key: value for key, value in _shared(each).items() if key not in ignored}
        for each in (theirs, ours)
    )
    return difference(one, other)
