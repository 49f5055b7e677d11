"""The directory of a sweep: what is known of its points, on disk."""

import json
import shutil
import sys
import traceback
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.evaluation import Bootstrap
from specjax.runs.lines import Record, line_of, record_of
from specjax.runs.run_directory import RunDirectory
from specjax.sweeping import plots
from specjax.sweeping.measurement import Measured
from specjax.sweeping.points import Point
from specjax.sweeping.scores import RELATIVE, Scores
from specjax.sweeping.storage import packed_arrays, read_arrays, write_predictions
from specjax.sweeping.tables import table_2
from specjax.writing import naming_failures, new_directory

CONFIG_NAME, POINTS_NAME, RESULTS_NAME = "sweep_config.json", "points.jsonl", "results.json"
DETAILS_NAME = "points"
GRID = "grid"
MADE = (POINTS_NAME, DETAILS_NAME, RESULTS_NAME, *plots.PLOTS)
_RESAMPLED = "resampled.npz"
_DONE, _FAILED = "done", "failed"
_LONGEST = 500
# What a line, or the file of a point's resamples, may raise where it was changed or cut.
_UNREADABLE = (
    ValueError, LookupError, TypeError, OSError, EOFError, zipfile.BadZipFile, zlib.error
)  # fmt: skip


class PointsDirectory:
    """The points of a sweep's directory, which is open.

    Args:
      run: the directory, claimed.
      quality: the name of the first metric.
      bootstrap: the resampling.

    Attributes:
      scored: the points that are done.
    """

    def __init__(self, run: RunDirectory, quality: str, bootstrap: Bootstrap):
        self._run, self._quality, self._bootstrap = run, quality, bootstrap
        self._records: dict[Point, Record] = {}
        self.scored: dict[Point, Scores] = {}

    def has(self, point: Point) -> bool:
        """Whether the point is done."""
        return point in self.scored

    def read(self) -> None:
        """Reads what earlier starts have measured."""
        path = self._run.path / POINTS_NAME
        if not path.exists():
            return
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                record = record_of(line)
                point = Point.of(record)
                if record["status"] == _DONE:
                    self.scored[point] = self._scores(record)
                self._records[point] = record
            except FileNotFoundError as error:
                # A copy of the directory, as launch makes them, may have been cut between files.
                say(f"{point.described()} lacks {error.filename}: it is not taken as done")
            except _UNREADABLE:
                raise ValueError(
                    f"{path}:{number}: the line is no point of this sweep, or has been changed, or "
                    f"its {DETAILS_NAME}/*/{_RESAMPLED} has: delete line {number} and run the same "
                    "command again"
                ) from None

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._run.path

    def fingerprint(self, point: Point) -> str:
        """That of the decoder which measured a point."""
        return self._records[point]["fingerprint"]

    def put(
        self,
        point: Point,
        measured: Measured,
        found: Scores,
        about: Mapping[str, Any],
        order: Sequence[Point],
    ) -> None:
        """Writes a point that is done; `about` is what else its line says."""
        details = self._run.own(DETAILS_NAME)
        with naming_failures(details):
            details.mkdir(exist_ok=True)
        with new_directory(details / point.key, replace=True) as partial:
            files = write_predictions(partial, measured.seeds, measured.records)
            (partial / _RESAMPLED).write_bytes(packed_arrays(found.resampled))
        self.scored[point] = found
        self._records[point] = {
            **_about(point, _DONE),
            "seeds": measured.seeds,
            "texts": len(measured.records[0]),
            "figures": found.figures,
            **about,
            "predictions": [f"{DETAILS_NAME}/{point.key}/{file}" for file in files],
        }
        self._write(order)
        self._run.keep()
        say(f"  {_shown(found, self._quality)}")

    def put_failed(self, point: Point, error: Exception, order: Sequence[Point]) -> None:
        """Writes a point that failed."""
        told = " ".join(str(error).split())[:_LONGEST]
        if not isinstance(error, ValueError | TypeError | OSError | ImportError):
            told = f"{type(error).__name__}: {told}"
        self._records[point] = {
            **_about(point, _FAILED),
            "error": told,
            "traceback": "".join(traceback.format_exception(error)),
        }
        self._write(order)
        say(f"  failed: {told}")

    def finish(self, grid: Sequence[Point] | None = None) -> dict[str, Any]:
        """Draws and tabulates all points.

        Args:
          grid: for a part, all points of the sweep: their keys go into the file.

        Returns:
          The content of `results.json`, but for the grid.
        """
        quality = self._quality
        ordered = {point: self.scored[point] for point in self._records if self.has(point)}
        failures = {
            point.described(): record["error"]
            for point, record in self._records.items()
            if record["status"] == _FAILED
        }
        results = {
            "quality": quality,
            "done": len(ordered),
            "failed": len(failures),
            "failures": failures,
            "table_2": table_2(ordered, quality, self._bootstrap),
        }
        self._warn_of_compiling()
        for name, data in plots.draw(ordered, quality).items():
            self._run.write(name, data)
        told = {} if grid is None else {GRID: [point.key for point in grid]}
        text = json.dumps(results | told, indent=1, allow_nan=False) + "\n"
        self._run.write(RESULTS_NAME, text.encode())
        return results

    def _warn_of_compiling(self) -> None:
        late = [
            point.described()
            for point in self.scored
            if self._records[point].get("process", {}).get("compiled_while_timed")
        ]
        if late:
            say(
                f"warning: times of {', '.join(late)} include compiling: to measure them again, "
                f"delete their lines in {self._run.path / POINTS_NAME} and run the same command"
            )

    @property
    def records(self) -> dict[Point, Record]:
        """The lines of all points, in order."""
        return dict(self._records)

    def take(self, other: "PointsDirectory", points: Sequence[Point]) -> None:
        """Copies points of another directory of the same sweep; what is done here stays done."""
        details = self._run.own(DETAILS_NAME)
        with naming_failures(details):
            details.mkdir(exist_ok=True)
        for point in points:
            if other.has(point):
                place = _details(other._records[point])
                with new_directory(self._run.path / place, replace=True) as partial:
                    shutil.copytree(other._run.path / place, partial, dirs_exist_ok=True)
                self.scored[point] = other.scored[point]
            elif self.has(point):
                continue
            self._records[point] = other._records[point]

    def write(self, order: Sequence[Point]) -> None:
        """Writes all lines: of `order` first."""
        self._write(order)
        self._run.keep()

    def _scores(self, record: Record) -> Scores:
        for name in record["predictions"]:
            (self._run.path / name).stat()
        arrays = read_arrays(self._run.path / _details(record) / _RESAMPLED)
        return Scores(record["figures"], arrays)

    def _write(self, order: Sequence[Point]) -> None:
        """All lines, those of the grid in its order, then those of earlier ones."""
        here = [point for point in order if point in self._records]
        others = [point for point in self._records if point not in set(order)]
        self._records = {point: self._records[point] for point in (*here, *others)}
        lines = b"".join(map(line_of, self._records.values()))
        self._run.write(POINTS_NAME, lines)


def _details(record: Record) -> Path:
    """The directory of a point's files, in that of the sweep."""
    return Path(record["predictions"][0]).parent


def _about(point: Point, status: str) -> Record:
    return {"point": point.described(), **point.to_dict(), "status": status}


def _shown(found: Scores, quality: str) -> str:
    parts = []
    for name in (quality, RELATIVE):
        values = found.figures[name]
        if values["value"] is not None and values["low"] is not None:
            ends = f"[{values['low']:.4g}, {values['high']:.4g}]"
            parts.append(f"{name.replace('_', ' ')} {values['value']:.4g} {ends}")
    return ", ".join(parts)


def say(text: str) -> None:
    """Tells the user."""
    print(f"specjax: {text}", file=sys.stderr, flush=True)
