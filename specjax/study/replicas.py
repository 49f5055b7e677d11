"""A comparison shared by several replicas: each measures its settings, and a merge joins them.

Each replica also measures the verifier alone, because latency is relative to the verifier on the
same machine. All replicas need the same kind of machine.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specjax.errors import UserError
from specjax.runs.merging import OnStart, Shared, beside, say_unmerged
from specjax.runs.processes import Process
from specjax.runs.run_directory import RunDirectory, Store
from specjax.study.measure import tell
from specjax.study.points import (
    CHOSEN_NAME,
    CONFIG_NAME,
    MADE,
    POINTS_NAME,
    RECORDS,
    Points,
    naming_record,
    read_points,
)
from specjax.text.setting import VERIFIER_ALONE, Setting
from specjax.writing import InUseError

PathLike = str | os.PathLike[str]
SHARED = Shared(CONFIG_NAME, MADE, "comparison", same_machine=True)
# The key of the record with all settings of the grid; it shows that a replica is done.
GRID = "grid"


def share(settings: Sequence[Setting], process: Process) -> list[Setting]:
    """Returns the settings that a replica measures, in order, with the verifier alone of each.

    Whether a setting belongs to a replica does not depend on the rest of the grid.

    Raises:
      UserError: the processes are more than the settings.
    """
    others = [setting for setting in settings if setting.method != VERIFIER_ALONE]
    if process.count > len(others):
        raise UserError(
            f"process_count must be at most {len(others)}, the number of settings to measure, "
            f"got {process.count}"
        )

    def measures(setting: Setting) -> bool:
        return int(setting.key.rpartition("-")[2], 16) % process.count == process.index

    needed = {setting.verifier_alone for setting in others if measures(setting)}
    if not needed:
        tell(
            f"warning: process {process.index} of {process.count} has no settings to measure: "
            "use fewer processes"
        )
    compared = {setting.verifier_alone for setting in others}
    return [x for x in settings if (x in needed if x in compared else measures(x))]


def finish(part: RunDirectory, process: Process, on_start: OnStart | None) -> None:
    """Merges all parts if every part has measured the same grid."""
    parts = beside(part, process)
    grids = [_grid_of(path) for path in parts]
    if None not in grids and all(grid == grids[0] for grid in grids):
        with contextlib.suppress(InUseError):  # another part that has just ended writes the same
            _merge(SHARED.directory(part.path.parent), parts, on_start)
    else:
        say_unmerged(part, process)


def is_comparison(roots: Sequence[PathLike]) -> bool:
    """Whether directories, or directories one level below, contain parts of a comparison."""
    paths = [Path(root).expanduser().absolute() for root in roots]
    places = [place for path in paths for place in SHARED.parts_in(path)]
    return any((place / CONFIG_NAME).is_file() for place in places)


def merge_comparison(
    output_dir: PathLike, parts: Sequence[PathLike] = (), *, on_start: OnStart | None = None
) -> dict[str, Any]:
    """Merges the parts of several replicas into one comparison; the parts are not removed.

    Args:
      output_dir: the directory of the comparison.
      parts: see `specjax.runs.merging.merge`.
      on_start: called as `on_start(run, paths={...})` with the `RunDirectory`, before writing.

    Raises:
      OSError: a part is missing, or the directory cannot be written.
      UserError: the parts are of different runs or grids, or one has not ended.
    """
    whole = SHARED.directory(output_dir)
    return _merge(whole, SHARED.find(parts or [whole.path]), on_start)


def _merge(whole: RunDirectory, parts: Sequence[Path], on_start: OnStart | None) -> dict[str, Any]:
    configuration = SHARED.common(parts)
    order: dict[Setting, None] = {}
    for path in parts:
        if (grid := _grid_of(path)) is None:
            raise UserError(
                f"{path} has not measured all of its settings: run the same command there again"
            )
        order |= dict.fromkeys(grid)
    sources = [read_points(path) for path in parts]
    with whole as run:
        # The parts agree in their environment; an earlier merge may have another.
        run.claim(configuration, allow_other_environment=True)
        if on_start is not None:
            on_start(run, paths={path.name: str(path) for path in parts})
        points = Points(run, sources[0].quality, sources[0].bootstrap)
        points.read()
        # In reverse, so that the verifier alone is that of the first part.
        for source in reversed(sources):
            points.take(source)
        if absent := [one for one in order if one not in points.of()]:
            raise UserError(
                f"{len(absent)} of {len(order)} settings are in no part; the first is "
                f"{absent[0].described()}: run the same command in all processes again"
            )
        (whole.path / CHOSEN_NAME).unlink(missing_ok=True)  # of an earlier grid
        results = points.finish(list(order), points.recommended())
    tell(f"merged {len(parts)} parts: {len(order)} settings in {whole.path / POINTS_NAME}")
    return results


def _grid_of(path: Path) -> list[Setting] | None:
    """All settings of a finished part's grid; None if the part has not ended."""
    run = RunDirectory(path, config_name=CONFIG_NAME, makes=MADE)
    store = Store(run, RECORDS)
    record = None if run.peek() is None else store.get(GRID)
    if record is None:
        return None
    with naming_record(store, GRID):
        return [Setting(**values) for values in record.value]
