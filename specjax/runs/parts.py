"""The parts of a run, each written by one process into a directory of its own, become one."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from specjax.text import Decoder

PART = "part"
# What is a part's own in its configuration, and not the run's.
OWN = (PART, "fingerprint", "files", "kept")
_ENVIRONMENT = "environment"


def directory_of(output_dir: str | os.PathLike[str], part: Part | None) -> RunDirectory:
    """The directory that a process writes: that of the run, or one in it.

    Args:
      output_dir: the directory of the run.
      part: this process; None for one alone.

    Returns:
      The directory, not yet open.

    Raises:
      TypeError: see `RunDirectory`.
      ValueError: see `RunDirectory`.
    """
    whole = RunDirectory(output_dir, config_name=CONFIG_NAME, makes=MADE)
    if part is None:
        return whole
    return RunDirectory(whole.path / part.name, config_name=CONFIG_NAME, makes=MADE)


def own_ids(
    decoder: Decoder, prompts: Mapping[int, Any], failed: Mapping[int, str], part: Part | None
) -> Collection[int]:
    """The ids of the rows that this process may write.

    Args:
      decoder: the decoder.
      prompts: the tokens of all inputs that can be decoded, by id.
      failed: the errors of the others, by id.
      part: this process; None for one alone.

    Returns:
      All without a part; of a replica its own; of a program all, but for failed inputs, which are
      the first process's.
    """
    everything = {*prompts, *failed}
    if part is None:
        return everything
    errors = failed if part.index == 0 else ()
    if part.together:
        return {*prompts, *errors}
    ids = list(prompts)
    own = {ids[place] for place in decoder.parts(list(prompts.values()), part.count)[part.index]}
    if not own:
        print(
            f"specjax: warning: process {part.index} of {part.count} has no rows: the input has "
            "fewer plans than there are processes; a smaller BATCH_SIZE makes more",
            file=sys.stderr,
        )
    return {*own, *errors}


def known_rounds(
    prompts: Mapping[int, Any], own: Collection[int], done: Mapping[int, Record], part: Part | None
) -> dict[int, int]:
    """The places of the prompts that are not to be decoded here, and the rounds they took.

    Args:
      prompts: see `own_ids`.
      own: its ids.
      done: the rows that this process has written.
      part: see `own_ids`. All processes of a program must call it, and learn of all rows.

    Returns:
      Place -> rounds; for the rows of other replicas 1.
    """
    known = np.zeros(len(prompts), np.int32)
    for place, i in enumerate(prompts):
        if i in done:
            known[place] = done[i]["info"]["rounds"]
        elif i not in own:
            known[place] = 1  # of another replica, as is all that shares slots with it
    if part is not None and part.together:
        known = processes.gather(known).max(axis=0)
    return {int(place): int(known[place]) for place in np.flatnonzero(known)}


def check_whole(part: RunDirectory, configuration: Mapping[str, Any]) -> None:
    """Raises ValueError if the directory around a part holds another run."""
    check_same(directory_of(part.path.parent, None), configuration)


def check_same(whole: RunDirectory, configuration: Mapping[str, Any]) -> None:
    """Raises ValueError if a directory, which is not open, holds another run."""
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
    for path in (output_dir, *parts):
        check_path(path, "merge: ")
    whole = directory_of(output_dir, None)
    roots = [Path(path).expanduser().absolute() for path in parts] or [whole.path]
    found = find(roots)
    configuration = _common(found)
    records = _complete(found, configuration["rows"])
    return _write(whole, found, configuration, records, on_start)


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
    whole = part.path.parent
    found = [whole / Part(i, count).name for i in range(count)]
    # One that fails at this moment takes its configuration back.
    if any(read_config(path / CONFIG_NAME) is None for path in found):
        return False
    configuration = _common(found)
    if len({i for path in found for i in _rows(path)}) < configuration["rows"]:
        return False
    records = _complete(found, configuration["rows"])
    run = directory_of(whole, None)
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
        print(
            f"specjax: this is part {part.index} of {part.count}. The last part to end writes "
            f"{run.path.parent / PREDICTIONS_NAME}; where parts are on different disks, bring "
            "them together, and run: specjax merge DIRECTORY",
            file=sys.stderr,
        )


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


def _common(found: Sequence[Path]) -> dict[str, Any]:
    """The configuration of the run, which all parts must have."""
    configurations = []
    for path in found:
        config = read_config(path / CONFIG_NAME)
        if config is None or PART not in config:
            raise ValueError(f"{path} has no {CONFIG_NAME} of a part: run that process to its end")
        configurations.append(config)
    first = configurations[0]
    for path, other in zip(found, configurations, strict=True):
        if told := _differ(first, other, _ENVIRONMENT):
            raise ValueError(
                f"{path} is a part of another run than {found[0]} ({told}): give all processes the "
                "same command and the same files, in a new output_dir"
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
