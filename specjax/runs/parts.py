"""The parts of a run, each written by one process into a directory of its own, become one."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checks import check_path
from specjax.runs import processes
from specjax.runs.lines import Record, line_of, record_of
from specjax.runs.lock import InUseError
from specjax.runs.processes import Part
from specjax.runs.rows_file import (
    CONFIG_NAME,
    COSTS_NAME,
    MADE,
    METRICS_NAME,
    PREDICTIONS_NAME,
    totals,
)
from specjax.runs.run_directory import GIN_NAME, RunDirectory, difference, read_config

PART = "part"
# What is a part's own in its configuration, and not the run's.
OWN = (PART, "fingerprint", "files", "kept")
_ENVIRONMENT = "environment"


def directory_of(
    output_dir: str | os.PathLike[str],
    part: Part | None,
    *,
    config_name: str = CONFIG_NAME,
    makes: Sequence[str] = MADE,
) -> RunDirectory:
    """The directory that a process writes: that of the run, or one in it.

    Args:
      output_dir: the directory of the run.
      part: this process; None for one alone.
      config_name: see `RunDirectory`; by default that of `specjax infer`.
      makes: see `RunDirectory`.

    Returns:
      The directory, not yet open.

    Raises:
      TypeError: see `RunDirectory`.
      ValueError: see `RunDirectory`.
    """
    whole = RunDirectory(output_dir, config_name=config_name, makes=makes)
    if part is None:
        return whole
    return RunDirectory(whole.path / part.name, config_name=config_name, makes=makes)


def check_whole(
    part: RunDirectory,
    configuration: Mapping[str, Any],
    *,
    config_name: str = CONFIG_NAME,
    makes: Sequence[str] = MADE,
) -> None:
    """Raises ValueError if the directory around a part holds another run; see `directory_of`."""
    whole = directory_of(part.path.parent, None, config_name=config_name, makes=makes)
    theirs = whole.peek()
    ours = json.loads(json.dumps(configuration))
    if theirs is not None and theirs["kept"] and (told := _differ(theirs, ours)):
        raise ValueError(
            f"output_dir={whole.path} holds a run of another configuration ({told}): choose "
            "another output_dir, or use the same configuration"
        )


def merge(
    output_dir: str | os.PathLike[str],
    parts: Sequence[str | os.PathLike[str]] = (),
    *,
    on_start: Callable[..., None] | None = None,
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
    whole, found = whole_and_parts(output_dir, parts)
    configuration = common(found)
    records = _complete(found, configuration["rows"])
    return _write(whole, found, configuration, records, on_start)


def whole_and_parts(
    output_dir: str | os.PathLike[str],
    parts: Sequence[str | os.PathLike[str]],
    *,
    config_name: str = CONFIG_NAME,
    makes: Sequence[str] = MADE,
) -> tuple[RunDirectory, list[Path]]:
    """The directory that a merge writes, not yet open, and those of its parts, in order.

    Args:
      output_dir: see `merge`.
      parts: see `merge`.
      config_name: see `directory_of`.
      makes: see `directory_of`.

    Raises:
      FileNotFoundError: see `find`.
      TypeError: a path is not a path.
      ValueError: see `find`.
    """
    for path in (output_dir, *parts):
        check_path(path, "merge: ")
    whole = directory_of(output_dir, None, config_name=config_name, makes=makes)
    roots = [Path(path).expanduser().absolute() for path in parts] or [whole.path]
    return whole, find(roots, config_name)


def merge_if_complete(
    part: RunDirectory, count: int, *, on_start: Callable[..., None] | None = None
) -> bool:
    """Merges the parts beside a finished one if all their rows are there.

    Where several end at once, one of them writes.

    Args:
      part: a finished part, closed.
      count: the number of parts.
      on_start: see `merge`.

    Returns:
      Whether all rows were there.
    """
    found = beside(part, count)
    # One that fails at this moment takes its configuration back.
    if any(read_config(path / CONFIG_NAME) is None for path in found):
        return False
    configuration = common(found)
    if len({i for path in found for i in _rows(path)}) < configuration["rows"]:
        return False
    records = _complete(found, configuration["rows"])
    run = directory_of(part.path.parent, None)
    # Another part that has just ended writes the same.
    with contextlib.suppress(InUseError):
        _write(run, found, configuration, records, on_start)
    return True


def finish(run: RunDirectory, part: Part, on_start: Callable[..., None] | None) -> None:
    """Makes one of all parts where this process, which has closed its own, can and should."""
    if part.together:
        with processes.naming_lost_processes(part):
            processes.gather(np.int32(part.index))  # all have written
        if part.index:
            return
    if not merge_if_complete(run, part.count, on_start=on_start):
        tell_unmerged(part, f"writes {run.path.parent / PREDICTIONS_NAME}")


def tell_unmerged(part: Part, does: str) -> None:
    """Says, where not all parts are there, how they become one; `does`: what a merge does."""
    print(
        f"specjax: this is part {part.index} of {part.count}. The last part to end {does}; where "
        "parts are on different disks, bring them together, and run: specjax merge DIRECTORY",
        file=sys.stderr,
    )


def beside(part: RunDirectory, count: int) -> list[Path]:
    """The directories of all parts that the directory around a part should have, in order."""
    return [part.path.parent / Part(i, count).name for i in range(count)]


def parts_in(root: Path, config_name: str) -> list[Path]:
    """The parts that a directory is, or has in it, or one level below."""
    if _place(root) and (root / config_name).is_file():
        return [root]
    return sorted(root.glob("part-*-of-*")) or sorted(root.glob("*/part-*-of-*"))


def find(roots: Sequence[Path], config_name: str = CONFIG_NAME) -> list[Path]:
    """All parts of one run.

    Args:
      roots: parts, or directories that have them in them or one level below.
      config_name: the file by which a part is known.

    Returns:
      Their directories, in order.

    Raises:
      FileNotFoundError: there are none, or not all.
      ValueError: there are those of two divisions, or one twice.
    """
    found = [path for root in roots for path in parts_in(root, config_name)]
    shown = ", ".join(map(str, roots))
    placed = {path: _place(path) for path in found}
    counts = {place[1] for place in placed.values() if place is not None}
    if not counts:
        raise FileNotFoundError(
            f"{shown}: there is no part-I-of-N of a run of several processes: check the path"
        )
    if len(counts) > 1:
        told = " and ".join(f"{count} processes" for count in sorted(counts))
        raise ValueError(f"{shown} has parts of {told}: name the directories of one run")
    by_index: dict[int, Path] = {}
    for path, place in placed.items():
        if place is None:
            continue
        if place[0] in by_index:
            raise ValueError(f"{path} and {by_index[place[0]]} are the same part: name one of them")
        by_index[place[0]] = path
    (count,) = counts
    if absent := [i for i in range(count) if i not in by_index]:
        raise FileNotFoundError(
            f"{shown} has no {Part(absent[0], count).name}: bring the parts of all {count} "
            "processes there, or name their directories"
        )
    return [by_index[i] for i in range(count)]


def _place(path: Path) -> tuple[int, int] | None:
    """The index and the count in the name of a part's directory; None if it is none."""
    words = path.name.split("-")
    if len(words) != 4 or words[::2] != ["part", "of"] or not "".join(words[1::2]).isdecimal():
        return None
    return int(words[1]), int(words[3])


def _differ(theirs: Mapping[str, Any], ours: Mapping[str, Any], *ignored: str) -> str:
    one, other = (
        {key: value for key, value in each.items() if key not in (*OWN, *ignored)}
        for each in (theirs, ours)
    )
    return difference(one, other)


def common(
    found: Sequence[Path],
    *,
    config_name: str = CONFIG_NAME,
    what: str = "run",
    same_machine: bool = False,
) -> dict[str, Any]:
    """The configuration of the run, which all parts must have.

    Args:
      found: the directories of the parts.
      config_name: see `directory_of`.
      what: what the parts make together, for the message.
      same_machine: whether parts from other machines are refused; else a warning names them.

    Returns:
      It, without what is a part's own.

    Raises:
      ValueError: a part has none, or another one.
    """
    configurations = []
    for path in found:
        config = read_config(path / config_name)
        if config is None or PART not in config:
            raise ValueError(f"{path} has no {config_name} of a part: run that process to its end")
        configurations.append(config)
    first = configurations[0]
    ignored = () if same_machine else (_ENVIRONMENT,)
    same = "on the same kind of machine" if same_machine else "and the same files"
    for path, other in zip(found, configurations, strict=True):
        if told := _differ(first, other, *ignored):
            raise ValueError(
                f"{path} is a part of another {what} than {found[0]} ({told}): give all processes "
                f"the same command {same}, in a new output_dir"
            )
        if told := _differ(first, other):
            print(f"specjax: warning: {path} was decoded elsewhere ({told})", file=sys.stderr)
    return {key: value for key, value in first.items() if key not in OWN}


def _rows(path: Path) -> Iterator[int]:
    """The ids of the rows that a part has written so far."""
    return (record["id"] for record in _records(path))


def _records(path: Path) -> Iterator[Record]:
    """The rows of a part; one that is being written is not told."""
    file = path / PREDICTIONS_NAME
    try:
        data = file.read_bytes()
    except FileNotFoundError:  # no row is finished
        return
    except OSError as error:
        raise OSError(f"{file} cannot be read ({error.strerror}): restore it") from None
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            yield record_of(line)
        except ValueError:
            raise ValueError(
                f"{file}:{number}: the line has been changed: delete it, and start that process "
                "again"
            ) from None


def _complete(found: Sequence[Path], rows: int) -> list[Record]:
    """All rows in order."""
    records: dict[int, Record] = {}
    for path in found:
        for record in _records(path):
            if record["id"] in records:
                raise ValueError(f"{path} has row {record['id']}, which another part has, too")
            records[record["id"]] = record
    absent = [i for i in range(rows) if i not in records]
    if absent:
        raise ValueError(
            f"{len(absent)} of {rows} rows are in no part, the first is {absent[0]}: start the "
            "processes that have not ended again, with the same command"
        )
    return [records[i] for i in range(rows)]


def _write(
    whole: RunDirectory,
    found: Sequence[Path],
    configuration: Mapping[str, Any],
    records: Sequence[Record],
    on_start: Callable[..., None] | None,
) -> dict[str, Any]:
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
        f"specjax: the {len(found)} parts are one: {len(records)} predictions are in {path}",
        file=sys.stderr,
    )
    return metrics


def gin_text(paths: Mapping[str, str]) -> str | None:
    """The gin configuration of the first of some parts, by name -> path; None without one."""
    path = Path(next(iter(paths.values())), GIN_NAME)
    return path.read_text(encoding="utf-8") if path.is_file() else None
