"""A comparison that several replicas share: each measures its settings, and a merge joins them.

Latency is compared with the verifier alone on the same machine, in turns. So each replica measures
the verifier alone for itself, and the replicas need the same kind of machine.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specjax.checks import check_path
from specjax.runs.merging import OnStart, Shared, beside, say_unmerged
from specjax.runs.processes import Process
from specjax.runs.run_directory import RunDirectory
from specjax.runs.store import Store
from specjax.study.measure import tell
from specjax.study.points import CONFIG_NAME, MADE, POINTS_NAME, RECORDS, Points, read_points
from specjax.text.setting import VERIFIER_ALONE, Setting
from specjax.writing import InUseError

PathLike = str | os.PathLike[str]
SHARED = Shared(CONFIG_NAME, MADE, "comparison", same_machine=True)
# The record that says that a replica has measured its share, and of which settings.
GRID = "grid"


def share(settings: Sequence[Setting], process: Process) -> list[Setting]:
    """The settings that a replica measures.

    Args:
      settings: all, in order.
      process: which replica.

    Returns:
      In the same order: its own, which are the same whatever the rest of the grid is, and the
      verifier alone of those. It may be none.

    Raises:
      ValueError: the replicas are one program, or more than there are settings.
    """
    if process.together:
        raise ValueError(
            "a comparison cannot run as one program of several processes: give only "
            "--process_count and --process_index"
        )
    others = [one for one in settings if one.method != VERIFIER_ALONE]
    if process.count > len(others):
        raise ValueError(
            f"process_count must be at most {len(others)}, the number of settings to measure, "
            f"got {process.count}"
        )

    def is_own(one: Setting) -> bool:
        return int(one.key.rpartition("-")[2], 16) % process.count == process.index

    needed = {one.verifier_alone for one in others if is_own(one)}
    if not needed:
        tell(
            f"warning: process {process.index} of {process.count} has no settings to measure: "
            "use fewer processes"
        )
    compared = {one.verifier_alone for one in others}
    return [one for one in settings if (one in needed if one in compared else is_own(one))]


def finish(part: RunDirectory, process: Process, on_start: OnStart | None) -> None:
    """Merges the parts beside a finished one where all have measured the same grid."""
    found = beside(part, process)
    grids = [_grid_of(path) for path in found]
    if None not in grids and all(grid == grids[0] for grid in grids):
        with contextlib.suppress(InUseError):  # another part that has just ended writes the same
            _merge(SHARED.directory(part.path.parent), found, on_start)
    else:
        say_unmerged(part, process)


def is_comparison(roots: Sequence[PathLike]) -> bool:
    """Whether there are parts of a comparison in some directories, or one level below."""
    paths = [Path(root).expanduser().absolute() for root in roots]
    places = [place for path in paths for place in SHARED.parts_in(path)]
    return any((place / CONFIG_NAME).is_file() for place in places)


def merge(
    output_dir: PathLike, parts: Sequence[PathLike] = (), *, on_start: OnStart | None = None
) -> dict[str, Any]:
    """Makes one comparison of the parts of several replicas; the parts stay.

    Args:
      output_dir: the directory of the comparison.
      parts: see `specjax.runs.merging.merge`.
      on_start: is called as `on_start(run, paths={...})` with the `RunDirectory`, before writing.

    Returns:
      The content of `results.json`.

    Raises:
      FileNotFoundError: there are no parts, or not all of them.
      OSError: the directory cannot be written.
      ValueError: the parts are of different runs or grids, or one has not ended.
    """
    check_path(output_dir, "merge: ")
    whole = SHARED.directory(output_dir)
    return _merge(whole, SHARED.find(parts or [whole.path]), on_start)


def _merge(whole: RunDirectory, found: Sequence[Path], on_start: OnStart | None) -> dict[str, Any]:
    configuration = SHARED.common(found)
    order: dict[Setting, None] = {}
    for path in found:
        if (grid := _grid_of(path)) is None:
            raise ValueError(
                f"{path} has not measured all of its settings: run the same command there again"
            )
        order |= dict.fromkeys(grid)
    sources = [read_points(path) for path in found]
    with whole as run:
        run.claim(configuration)
        if on_start is not None:
            on_start(run, paths={path.name: str(path) for path in found})
        points = Points(run, sources[0].quality, sources[0].bootstrap)
        points.read()
        # The last first: the verifier alone is the first part's.
        for source in reversed(sources):
            points.take(source)
        if absent := [one for one in order if one not in points.of()]:
            raise ValueError(
                f"{len(absent)} of {len(order)} settings are in no part; the first is "
                f"{absent[0].described()}: run the same command in all processes again"
            )
        results = points.finish(list(order))
    tell(f"merged {len(found)} parts: {len(order)} settings in {whole.path / POINTS_NAME}")
    return results


def _grid_of(path: Path) -> list[Setting] | None:
    """All settings of the grid of which a part has measured its share; None if it has not ended."""
    run = RunDirectory(path, config_name=CONFIG_NAME, makes=MADE)
    record = None if run.peek() is None else Store(run, RECORDS).get(GRID)
    return None if record is None else [Setting(**values) for values in record.value]
