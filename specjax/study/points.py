"""The measured settings of a comparison, in the directory of its run (see docs/compare.md).

Each setting has a sealed record for each part of the texts: its outputs, its times, its figures and
their resamples.
"""

import dataclasses
import hashlib
import json
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.checks import PathLike, one_line
from specjax.errors import MissingFileError, UserError
from specjax.evaluation import Bootstrap
from specjax.runs.evaluation import Predictions, predictions_of
from specjax.runs.run_directory import Record, RunDirectory, Store
from specjax.study import plots, tables
from specjax.study.expect import Expected
from specjax.study.measure import Measured, Scores
from specjax.study.speedups import recommend
from specjax.text import TextModel
from specjax.text.setting import DRAFTER_ALONE, Setting, check_single

CONFIG_NAME, POINTS_NAME, RESULTS_NAME = "compare_config.json", "points.jsonl", "results.json"
RECORDS = "points"
# Parts of the texts: those on which settings are compared, and those that confirm a choice.
COMPARED, HELD_OUT = "texts", "held out"
_TABLES = ("settings.csv", "best.csv", "table_2.csv")
MADE = (POINTS_NAME, RECORDS, RESULTS_NAME, *_TABLES, *plots.FILES)
_RESAMPLED = "resampled/"
_DONE, _FAILED, _ESTIMATED = "done", "failed", "estimated"
_LONGEST = 500


class Point(NamedTuple):
    """A setting on a part of the texts.

    Attributes:
      about: the values of its line besides the setting and the figures: `status` and more.
      scores: None if it has failed.
    """

    setting: Setting
    about: Mapping[str, Any]
    scores: Scores | None


class Points:
    """The points of a run.

    Args:
      run: the directory, open and claimed.
      quality: the name of the first metric, or None.

    Attributes:
      store: the records.
      estimates: setting -> its estimate.
      frontier: the estimates of the settings on the frontier; see `expect.frontier_of`.
    """

    def __init__(self, run: RunDirectory, quality: str | None, bootstrap: Bootstrap):
        self._run, self.quality, self.bootstrap = run, quality, bootstrap
        self.store = Store(run, RECORDS)
        self.estimates: dict[Setting, Expected] = {}
        self.frontier: dict[Setting, Expected] = {}
        self._points: dict[str, dict[Setting, Point]] = {}

    def read(self, models: Mapping[str, TextModel] | None = None) -> None:
        """Reads the points of earlier starts.

        Args:
          models: by name; the models of the points must be the same.

        Raises:
          UserError: a record is damaged, or was measured with another model.
        """
        for key in self.store.keys():  # noqa: SIM118
            record = self.store.get(key) if isinstance(key, tuple) else None
            if not isinstance(key, tuple) or record is None:  # estimates have a text as the key
                continue
            try:
                point = _point(record)
                used = dict(point.about.get("models", {}))
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise UserError(
                    f"{self.store.path(key)} has no valid setting ({one_line(error)}): delete it, "
                    "and run the same command again"
                ) from None
            for name, fingerprint in used.items():
                if models and name in models and models[name].fingerprint != fingerprint:
                    raise UserError(
                        f"{self.store.path(key)} was measured with another model {name!r}: choose "
                        "another output_dir, or delete the file to measure it again"
                    )
            self._points.setdefault(str(key[1]), {})[point.setting] = point

    def of(self, part: str = COMPARED) -> dict[Setting, Point]:
        """Returns all points of a part of the texts."""
        return dict(self._points.get(part, {}))

    def scored(self, part: str = COMPARED) -> dict[Setting, Scores]:
        """Returns the figures of the settings that have figures."""
        return {x: p.scores for x, p in self.of(part).items() if p.scores is not None}

    def measured(self, setting: Setting, part: str = COMPARED) -> Measured:
        """Returns the measurements of a setting that is done."""
        record = self.store.read((setting.key, part))
        return Measured.of_record(record.value, record.arrays)

    def estimate(
        self, about: Any, make: Callable[[], list[Expected]], frontier: Collection[Setting] = ()
    ) -> None:
        """Estimates settings, or reads the estimates of an earlier start.

        Args:
          about: JSON values that identify these estimates.
          frontier: the settings that are estimated for the frontier.
        """
        known = self.once(
            "estimates", about, lambda: [[x.setting.to_dict(), x.to_dict()] for x in make()]
        )
        for values, figures in known:
            setting = Setting(**values)
            kept = self.frontier if setting in frontier else self.estimates
            kept[setting] = Expected.of(setting, figures)

    def once(self, what: str, about: Any, make: Callable[[], Any]) -> Any:
        """Returns JSON values that are made by the first start; `about` identifies them."""
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
        key = f"{what} {digest}"
        if key not in self.store:
            self.store.put(key, {what: make()})
        return self.store.read(key).value[what]

    def put(
        self,
        setting: Setting,
        part: str,
        measured: Measured,
        scores: Scores,
        about: Mapping[str, Any],
    ) -> None:
        """Writes a measured setting; `about` has the other values of its line."""
        value, arrays = measured.to_record()
        value |= {
            "setting": setting.to_dict(),
            "figures": dict(scores.figures),
            "about": {
                "status": _DONE,
                "seeds": measured.seeds,
                "texts": len(measured.rows[0]),
                **about,
            },
        }
        arrays |= {f"{_RESAMPLED}{name}": array for name, array in scores.resampled.items()}
        self._put(setting, part, Record(value, arrays))

    def put_failed(self, setting: Setting, part: str, error: Exception) -> None:
        """Writes why a setting failed."""
        reason = one_line(error)[:_LONGEST]
        if not isinstance(error, ValueError | TypeError | OSError | ImportError):
            reason = f"{type(error).__name__}: {reason}"
        trace = "".join(traceback.format_exception(error))
        about = {"status": _FAILED, "error": reason, "traceback": trace}
        self._put(setting, part, Record({"setting": setting.to_dict(), "about": about}, {}))

    def _put(self, setting: Setting, part: str, record: Record) -> None:
        self.store.put((setting.key, part), *record)
        self._points.setdefault(part, {})[setting] = _point(record)

    def finish(self, order: Sequence[Setting], more: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the lines, tables and plots of all points; returns the content of `results.json`.

        Args:
          order: the settings of the first lines.
          more: more values of `results.json`.
        """
        known, quality, bootstrap = self.of(), self.quality, self.bootstrap
        # What to decode with, for each sampling whose verifier alone was measured. Before anything
        # is written, because it reads records that may be gone.
        scored, verdicts = self.scored(), []
        for group in tables.by_sampling(scored):
            if group[0].verifier_alone in scored and len(group) > 1:
                runs = {setting: self.measured(setting) for setting in group}
                times = {x: (run.times, run.verifier_times or run.times) for x, run in runs.items()}
                here = {setting: scored[setting] for setting in group}
                setting, text = recommend(here, times, quality, bootstrap)
                verdict = {"setting": setting.to_dict(), "recommended": setting.described()}
                verdicts.append({**verdict, "text": text})
        points = {x: Point(x, {"status": _ESTIMATED}, None) for x in self.estimates} | known
        first = [setting for setting in order if setting in points]
        points = {setting: points[setting] for setting in (*first, *points)}
        scored = {setting: scored[setting] for setting in points if setting in scored}
        lines = []
        for setting, point in points.items():
            values = {"setting": setting.described(), "values": setting.to_dict(), **point.about}
            if point.scores is not None:
                values["figures"] = point.scores.figures
            if setting in self.estimates:
                values["expected"] = self.estimates[setting].to_dict()
            text = json.dumps(values, allow_nan=False, ensure_ascii=False)
            lines.append(text.encode(errors="backslashreplace") + b"\n")
        self._run.write(POINTS_NAME, b"".join(lines))  # before a plot can fail
        # The failures of an earlier grid are not tried again.
        failures = {
            setting.described(): points[setting].about["error"]
            for setting in first
            if points[setting].about["status"] == _FAILED
        }
        best = tables.best_rows(scored, quality, bootstrap)
        if not scored:
            best = tables.estimated_rows([*self.estimates.values()])
        drawn = plots.acceptance_figure(self.estimates, self.frontier)
        files = plots.files_of(plots.ACCEPTANCE, drawn)
        rows = {"best": best, "settings": tables.flat_rows(scored, self.estimates)}
        table_2: tables.Rows = []
        if quality is not None:
            table_2 = tables.table_2(scored, quality, bootstrap)
            for name in plots.PLOTS:
                files |= plots.files_of(name, plots.figure(scored, name, quality, bootstrap))
            rows["table_2"] = tables.table_2_rows(table_2, quality)
        files |= {f"{name}.csv": tables.csv_text(each).encode() for name, each in rows.items()}
        for name, data in files.items():
            self._run.write(name, data)
        results = {
            "quality": quality,
            "estimated": len(self.estimates),
            "done": len(scored),
            "failed": len(failures),
            "failures": failures,
            "best": best,
            "table_2": table_2,
            "verdicts": verdicts,
            **more,
        }
        self._run.write_json(RESULTS_NAME, results)
        return results


def _point(record: Record) -> Point:
    value, scores = record.value, None
    if "figures" in value:
        again = {
            name.removeprefix(_RESAMPLED): array
            for name, array in record.arrays.items()
            if name.startswith(_RESAMPLED)
        }
        scores = Scores(value["figures"], again)
    setting = Setting(**value["setting"])
    check_single(setting)
    return Point(setting, value["about"], scores)


def read_points(directory: PathLike) -> Points:
    """Reads the points of a directory of `specjax compare`, without a lock.

    Raises:
      FileNotFoundError: it is not a directory of a comparison.
      UserError: a record is damaged.
    """
    run = RunDirectory(directory, config_name=CONFIG_NAME, makes=MADE)
    configuration = run.peek()
    if configuration is None:
        raise MissingFileError(
            f"{run.path} has no {CONFIG_NAME}: give a directory written by `specjax compare`"
        )
    try:
        how = configuration["measuring"]
        quality = how["metrics"][0] if how["metrics"] else None
        bootstrap = Bootstrap(**how["bootstrap"])
    except (LookupError, TypeError) as error:
        raise UserError(f"{run.path / CONFIG_NAME} is damaged ({error}): restore it") from None
    points = Points(run, quality, bootstrap)
    points.read()
    return points


def predictions_in(directory: PathLike) -> dict[str, list[Predictions]] | None:
    """Reads the predictions of a comparison.

    Returns:
      The setting's text -> the predictions of each seed; None if it is not a comparison.

    Raises:
      UserError: a record is damaged, or no setting is done.
    """
    place = Path(directory).expanduser()
    if not (place / CONFIG_NAME).is_file():
        return None
    points = read_points(place)
    if not points.scored():
        raise UserError(
            f"{place} has no measured setting: run specjax compare there without --estimate"
        )
    predictions: dict[str, list[Predictions]] = {}
    for setting in points.scored():
        name, measured = setting.described(), points.measured(setting)
        predictions[name] = []
        for seed, rows in zip(measured.seeds, measured.rows, strict=True):
            run = predictions_of(rows, f"{place}: {name}, seed {seed}")
            if setting.method == DRAFTER_ALONE and run.counts is not None:
                # A model that decodes alone counts as the verifier, but this model is the drafter,
                # and the verifier has not read the texts.
                calls = {"drafter": run.counts.calls["verifier"]}
                counts = dataclasses.replace(run.counts, calls=calls, deferrals=None)
                run = dataclasses.replace(run, counts=counts, log_p=np.full(len(run), np.nan))
            predictions[name].append(run)
    return predictions
