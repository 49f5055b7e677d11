"""A sweep by several replicas: each measures its share of the points, and a merge makes one of all.

Latency is compared with the verifier alone on the same machine, in turns. So each replica measures
the verifier alone for itself, and the replicas need the same kind of machine.
"""

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specjax.evaluation import Bootstrap
from specjax.runs import parts as runs
from specjax.runs.lock import InUseError
from specjax.runs.processes import Part
from specjax.runs.run_directory import RunDirectory
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

# As for `specjax infer`, of the files of a sweep.
directory_of = functools.partial(runs.directory_of, config_name=CONFIG_NAME, makes=MADE)
check_whole = functools.partial(runs.check_whole, config_name=CONFIG_NAME, makes=MADE)


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


def finish(part_run: RunDirectory, part: Part, on_start: OnStart | None) -> None:
    """Merges the parts beside a finished one where all are there, or says how to."""
    whole = part_run.path.parent
    found = runs.beside(part_run, part.count)
    if all(_is_whole(path) for path in found) and set(_grid(found)) <= _keys(found):
        with contextlib.suppress(InUseError):  # another part that has just ended writes the same
            _merge(directory_of(whole, None), found, on_start)
    else:
        runs.tell_unmerged(part, f"merges them in {whole}")


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
    whole, found = runs.whole_and_parts(output_dir, parts, config_name=CONFIG_NAME, makes=MADE)
    return _merge(whole, found, on_start)


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
    """The configuration of the sweep, which all parts must have; all must be whole."""
    for path in found:
        if not _is_whole(path):
            raise ValueError(
                f"{path} has not been measured to its end: start that process again, with the same "
                "command"
            )
    return runs.common(found, config_name=CONFIG_NAME, what="sweep", same_machine=True)


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
