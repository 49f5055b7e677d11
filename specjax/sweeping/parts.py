"""A sweep by several replicas: each measures its share of the points, and a merge makes one of all.

Latency is compared with the verifier alone on the same machine, in turns. So each replica measures
the verifier alone for itself, and the replicas need the same kind of machine.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.evaluation import Bootstrap
from specjax.runs import parts as runs
from specjax.runs.lock import InUseError
from specjax.runs.processes import Part
from specjax.runs.run_directory import RunDirectory, difference, read_config
from specjax.sweeping.directory import (
    CONFIG_NAME,
    GRID,
    MADE,
    POINTS_NAME,
    RESULTS_NAME,
    PointsDirectory,
)
from specjax.sweeping.points import VERIFIER, Point

PART = runs.PART
OnStart = Callable[..., None]


def share(points: Sequence[Point], part: Part) -> list[Point]:
    """The points that a replica measures.

    Args:
      points: all, in order.
      part: which replica.

    Returns:
      In the same order: those that are its own by `Point.part`, whatever the rest of the grid is,
      and the verifier alone of their temperatures. It may be none.

    Raises:
      ValueError: the replicas are one program, or more than there are points.
    """
    if part.together:
        raise ValueError(
            "the processes of a sweep are replicas, each with a machine of its own: give "
            "--process_count and --process_index alone"
        )
    others = [point for point in points if point.method != VERIFIER]
    if part.count > len(others):
        raise ValueError(
            f"process_count must be at most {len(others)}, the points of the grid beside the "
            f"verifier alone, got {part.count}"
        )
    own = {point for point in points if point.part(part.count) == part.index}
    temperatures = {point.temperature for point in others if point in own}
    if not temperatures:
        print(
            f"specjax: warning: process {part.index} of {part.count} has no points of this grid: "
            "fewer processes would be as fast",
            file=sys.stderr,
        )
    compared = {point.temperature for point in others}
    return [
        point
        for point in points
        if (
            point.temperature in temperatures
            if point.method == VERIFIER and point.temperature in compared
            else point in own
        )
    ]


def directory_of(output_dir: str | os.PathLike[str], part: Part | None) -> RunDirectory:
    """The directory that a process writes: that of the sweep, or one in it; not yet open."""
    whole = RunDirectory(output_dir, config_name=CONFIG_NAME, makes=MADE)
    if part is None:
        return whole
    return RunDirectory(whole.path / part.name, config_name=CONFIG_NAME, makes=MADE)


def check_whole(part: RunDirectory, configuration: Mapping[str, Any]) -> None:
    """Raises ValueError if the directory around a part holds another sweep."""
    runs.check_same(directory_of(part.path.parent, None), configuration)


def finish(part_run: RunDirectory, part: Part, on_start: OnStart | None) -> None:
    """Merges the parts beside a finished one where all are there, or says how to."""
    whole = part_run.path.parent
    found = [whole / Part(i, part.count).name for i in range(part.count)]
    if all(_is_whole(path) for path in found) and set(_grid(found)) <= _keys(found):
        with contextlib.suppress(InUseError):  # another part that has just ended writes the same
            _merge(directory_of(whole, None), found, on_start)
        return
    print(
        f"specjax: this is part {part.index} of {part.count}. The last part to end merges them in "
        f"{whole}; where parts are on different disks, bring them together, and run: specjax merge "
        "DIRECTORY",
        file=sys.stderr,
    )


def is_sweep(roots: Sequence[str | os.PathLike[str]]) -> bool:
    """Whether there are parts of a sweep in some directories, or one level below."""
    paths = [Path(root).expanduser().absolute() for root in roots]
    places = [place for path in paths for place in runs.parts_in(path, CONFIG_NAME)]
    return any((place / CONFIG_NAME).is_file() for place in places)


def merge(
    output_dir: str | os.PathLike[str],
    parts: Sequence[str | os.PathLike[str]] = (),
    *,
    on_start: OnStart | None = None,
) -> dict[str, Any]:
    """Makes one sweep of the parts of several replicas; the parts stay.

    Args:
      output_dir: the directory of the sweep.
      parts: see `specjax.runs.parts.merge`.
      on_start: is called as `on_start(run, paths={...})` with the `RunDirectory`, before writing.

    Returns:
      The content of `results.json`.

    Raises:
      FileNotFoundError: there are no parts, or not all of them.
      OSError: the directory cannot be written.
      ValueError: the parts are of different sweeps or grids, or one has not ended.
    """
    whole = directory_of(output_dir, None)
    roots = [Path(path).expanduser().absolute() for path in parts] or [whole.path]
    return _merge(whole, runs.find(roots, CONFIG_NAME), on_start)


def _merge(whole: RunDirectory, found: Sequence[Path], on_start: OnStart | None) -> dict[str, Any]:
    configuration = _common(found)
    how = configuration["measuring"]
    settings = how["metrics"][0], Bootstrap(**how["bootstrap"])
    with whole as run:
        sources = []
        for path in found:
            part = RunDirectory(path, config_name=CONFIG_NAME, makes=MADE)
            sources.append(PointsDirectory(part, *settings))
            sources[-1].read()
        order = _order(_grid(found), [list(source.records) for source in sources])
        run.claim(configuration)
        if on_start is not None:
            on_start(run, paths={path.name: str(path) for path in found})
        directory = PointsDirectory(run, *settings)
        directory.read()
        # The last first: the verifier alone is the first part's.
        for source in reversed(sources):
            directory.take(source, list(source.records))
        directory.write(order)
        results = directory.finish()
    print(
        f"specjax: the {len(found)} parts are one: {len(order)} points are in "
        f"{whole.path / POINTS_NAME}",
        file=sys.stderr,
    )
    return results


def _common(found: Sequence[Path]) -> dict[str, Any]:
    """The configuration of the sweep, which all parts must have."""
    made = []
    for path in found:
        config = read_config(path / CONFIG_NAME)
        if config is None or PART not in config or not _is_whole(path):
            raise ValueError(
                f"{path} has not been measured to its end: start that process again, with the same "
                "command"
            )
        made.append({name: x for name, x in config.items() if name not in runs.OWN})
    for path, other in zip(found, made, strict=True):
        if told := difference(made[0], other):
            raise ValueError(
                f"{path} is a part of another sweep than {found[0]} ({told}): give all processes "
                "the same command on the same kind of machine, in a new output_dir"
            )
    return made[0]


def _grid(found: Sequence[Path]) -> list[str]:
    """The keys of all points that parts, which are whole, were asked for, in order."""
    asked = [json.loads((path / RESULTS_NAME).read_bytes())[GRID] for path in found]
    return list(dict.fromkeys(key for grid in asked for key in grid))


def _keys(found: Sequence[Path]) -> set[str]:
    """The keys of the points that parts have."""
    keys = set()
    for line in (line for path in found for line in (path / POINTS_NAME).read_bytes().splitlines()):
        # A line that was changed is refused where it is read in full.
        with contextlib.suppress(ValueError, LookupError, TypeError):
            keys.add(Point.of(json.loads(line)).key)
    return keys


def _is_whole(path: Path) -> bool:
    """Whether a part has measured all its points."""
    try:
        results = json.loads((path / RESULTS_NAME).read_bytes())
        lines = (path / POINTS_NAME).read_bytes().count(b"\n")
        return GRID in results and results["done"] + results["failed"] == lines
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _order(grid: Sequence[str], lists: Sequence[Sequence[Point]]) -> list[Point]:
    """The points of all parts, each once, as a single process would have them."""
    found = {point.key: point for own in lists for point in own}
    if absent := [key for key in grid if key not in found]:
        raise ValueError(
            f"{len(absent)} points that one part was asked for are in none, the first is "
            f"{absent[0]}: start all processes again, with the same command and grid"
        )
    return list(dict.fromkeys([*(found[key] for key in grid), *found.values()]))
