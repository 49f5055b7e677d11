"""Measures the points of a sweep one by one, into a directory; a stopped sweep can be resumed.

Files in the output directory:

    sweep_config.json   what determines every point: the models, the texts, how they are measured
    points.jsonl        a line for each point, written anew after each one
    points/             of each point that has not failed the predictions of every seed, and the
                        resamples of its figures
    results.json        table 2
    quality_*.png       the figures

The command adds `config.gin` and `runs.jsonl` (see `RunDirectory.record`).
"""

import gc
import hashlib
import json
import os
import sys
import time
import traceback
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from specjax.data import Example
from specjax.evaluation import Problem
from specjax.memory import spare_maps
from specjax.runs.inputs import check_truncate, tokens_of
from specjax.runs.lines import Record, line_of, record_of
from specjax.runs.run_directory import RunDirectory
from specjax.sweeping import plots
from specjax.sweeping.measurement import Bench, Measured, Measuring, measure
from specjax.sweeping.points import DRAFTER, VERIFIER, Point
from specjax.sweeping.scores import RELATIVE, Scores, over, score
from specjax.sweeping.storage import packed_arrays, write_predictions
from specjax.sweeping.tables import table_2
from specjax.text import Decoder
from specjax.writing import naming_failures, new_directory

CONFIG_NAME, POINTS_NAME, RESULTS_NAME = "sweep_config.json", "points.jsonl", "results.json"
DETAILS_NAME = "points"
_RESAMPLED = "resampled.npz"
_MADE = (POINTS_NAME, DETAILS_NAME, RESULTS_NAME, *plots.PLOTS)
_DONE, _FAILED = "done", "failed"
_LONGEST = 500
# What a line, or the file of a point's resamples, may raise where it was changed or cut.
_UNREADABLE = (
    ValueError, LookupError, TypeError, OSError, EOFError, zipfile.BadZipFile, zlib.error
)  # fmt: skip


class Maker(Protocol):
    """Makes the decoders of points."""

    def __call__(self, point: Point, batch_size: int) -> Decoder:
        """The decoder of a point; raises where there can be none."""

    def command(self, point: Point) -> list[str]:
        """The words behind `specjax infer` that decode as the point does."""


def sweep(
    make: Maker,
    points: Sequence[Point],
    *,
    examples: Sequence[Example],
    references: Sequence[Sequence[str]],
    measuring: Measuring,
    output_dir: str | os.PathLike[str],
    problems: Sequence[Problem] | None = None,
    chat: bool = False,
    truncate: str | None = None,
    allow_other_environment: bool = False,
    on_start: Callable[[RunDirectory], None] | None = None,
) -> dict[str, Any]:
    """Measures all points that the directory does not have yet, and draws and tabulates all.

    A point that fails, because its decoder cannot be made or the memory is full, gets a line that
    says why; the others are measured, and the next start tries it again. A kill loses the point
    that was measured, and no other. Points of an earlier grid stay, in the table and the figures
    too.

    Args:
      make: makes decoders.
      points: what is measured, in this order; at each temperature the verifier alone first.
      examples: the texts.
      references: for each text one or several.
      measuring: how.
      output_dir: a new directory, or that of a sweep over the same texts, measured in the same way.
      problems: for each text what a program that goes on with it must do; with
        `measuring.sandbox`.
      chat: whether each text is a user's message for the model's chat template.
      truncate: "end" or "beginning", where texts that are too long are cut; None refuses them.
      allow_other_environment: continue a sweep that was begun on another device or with other
        versions.
      on_start: is called with the `RunDirectory` before the long work, after all checks.

    Returns:
      The content of `results.json`: `table_2` (see `tables.table_2`), `quality`, the numbers of
      points that are `done` and `failed`, and `failures`: point -> why.

    Raises:
      ImportError: the figures cannot be drawn, or a metric cannot be computed.
      OSError: the directory cannot be written, or another process works there.
      TypeError: a value of the wrong type.
      ValueError: a text cannot be decoded, the texts and references do not go together, or the
        directory has another sweep, or a point of the same name that was measured otherwise.
    """
    plots.check()
    if not isinstance(chat, bool):
        raise TypeError(f"chat must be True or False, got {chat!r}")
    check_truncate(truncate)
    measuring.check_texts(references, problems)
    if jax.process_count() > 1:
        raise ValueError("a sweep takes one process: others would take other times")
    with RunDirectory(output_dir, config_name=CONFIG_NAME, makes=_MADE) as run:
        verifier = make(
            Point(method=VERIFIER, temperature=points[0].temperature), measuring.batch_size
        )
        tokens = [
            tokens_of(verifier, e.inputs, f"text {e.id}", chat=chat, truncate=truncate)
            for e in examples
        ]
        bench = Bench(examples, tokens, references, measuring, problems)
        run.claim(
            _configuration(verifier, bench, chat), allow_other_environment=allow_other_environment
        )
        directory = _Directory(run, measuring)
        directory.read()
        directory.check(make, points)
        if on_start is not None:
            on_start(run)
        missing = [point for point in points if not directory.has(point)]
        if len(missing) < len(points):
            _say(f"{len(points) - len(missing)} of {len(points)} points are there already")
        for i, point in enumerate(missing):
            _say(f"point {i + 1} of {len(missing)}: {point.described()} ...")
            spare_maps()
            begin = time.perf_counter()
            try:
                found = _measure(make, point, bench, directory.scored)
            except Exception as error:
                directory.put_failed(point, error, points)
                gc.collect()  # what it held
                continue
            directory.put(point, *found, time.perf_counter() - begin, make, points)
        return directory.finish()


def _configuration(verifier: Decoder, bench: Bench, chat: bool) -> dict[str, Any]:
    texts = [
        (e.id, e.inputs, *refs) for e, refs in zip(bench.examples, bench.references, strict=True)
    ]
    described = verifier.describe()
    kept = ("models", "top_k", "top_p", "max_new_tokens", "buckets", "mesh", "environment")
    return {
        **{name: described[name] for name in kept},
        "measuring": bench.measuring.describe(),
        "texts": _digest(texts),
        "tokens": _digest([prompt.tolist() for prompt in bench.prompts]),
        "rows": len(texts),
        "chat": chat,
        **({} if bench.problems is None else {"problems": _digest(bench.problems)}),
    }


def _measure(
    make: Maker, point: Point, bench: Bench, scored: Mapping[Point, Scores]
) -> tuple[Measured, Scores, dict[str, Any], str]:
    """What was measured, its figures, those over the verifier's, and the decoder's fingerprint."""
    alone = Point(method=VERIFIER, temperature=point.temperature)
    if point != alone and alone not in scored:
        raise ValueError(f"{alone.described()} failed: there is nothing to compare with")
    made: list[Decoder] = []

    def remembered(batch_size: int) -> Decoder:
        made.append(make(point, batch_size))
        return made[-1]

    measured = measure(
        remembered,
        None if point == alone else lambda batch_size: make(alone, batch_size),
        bench,
        point.temperature,
    )
    found = score(measured, bench, point.described())
    if point.method == DRAFTER:
        found = found.of_a_drafter()
    apart = {
        name: over(found, scored.get(alone, found), name, bench.measuring.bootstrap)
        for name in bench.measuring.metrics
    }
    return measured, found, apart, _fingerprint(made[0])


class _Directory:
    """The points of a run's directory.

    Attributes:
      scored: those that are done.
    """

    def __init__(self, run: RunDirectory, measuring: Measuring):
        self._run, self._measuring = run, measuring
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
                    self.scored[point] = self._scores(point, record)
                self._records[point] = record
            except _UNREADABLE:
                raise ValueError(
                    f"{path}:{number}: the line is no point of this sweep, has been changed, or "
                    f"what belongs to it in {DETAILS_NAME}/ is missing: delete line {number} and "
                    "run the same command again"
                ) from None

    def check(self, make: Maker, points: Sequence[Point]) -> None:
        """Refuses points that were measured with what is now another decoder."""
        for point in filter(self.has, points):
            record = self._records[point]
            if record["fingerprint"] != _fingerprint(make(point, self._measuring.batch_size)):
                raise ValueError(
                    f"output_dir={self._run.path} has the point {point.described()} of other "
                    "settings (its gin files, models or versions have changed): choose another "
                    f"output_dir, or delete its line in {POINTS_NAME}"
                )

    def put(
        self,
        point: Point,
        measured: Measured,
        found: Scores,
        apart: Mapping[str, Any],
        fingerprint: str,
        seconds: float,
        make: Maker,
        order: Sequence[Point],
    ) -> None:
        """Writes a point that is done."""
        details = self._run.own(DETAILS_NAME)
        with naming_failures(details):
            details.mkdir(exist_ok=True)
        with new_directory(details / point.key, replace=True) as partial:
            files = write_predictions(partial, measured.seeds, measured.records)
            (partial / _RESAMPLED).write_bytes(packed_arrays(found.resampled))
        how = self._measuring
        self.scored[point] = found
        self._records[point] = {
            **_about(point, _DONE),
            "seeds": measured.seeds,
            "texts": len(measured.records[0]),
            "figures": found.figures,
            "over_verifier": apart,
            "latency_of": {
                "texts": measured.times.seconds.shape[2] * how.latency_batch_size,
                "batch_size": how.latency_batch_size,
                "repeats": how.repeats,
            },
            "predictions": [f"{DETAILS_NAME}/{point.key}/{file}" for file in files],
            "infer": make.command(point),
            "fingerprint": fingerprint,
            "process": {
                "seconds": seconds,
                "compiled": measured.compiled,
                "compiled_while_timed": measured.compiled_late,
            },
        }
        self._write(order)
        self._run.keep()
        _say(f"  {_shown(found, how.metrics[0])}")

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
        _say(f"  failed: {told}")

    def finish(self) -> dict[str, Any]:
        """Draws and tabulates all points."""
        quality = self._measuring.metrics[0]
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
            "table_2": table_2(ordered, quality, self._measuring.bootstrap),
        }
        for name, data in plots.draw(ordered, quality).items():
            self._run.write(name, data)
        text = json.dumps(results, indent=1, allow_nan=False) + "\n"
        self._run.write(RESULTS_NAME, text.encode())
        return results

    @property
    def records(self) -> list[Record]:
        """The lines of all points."""
        return list(self._records.values())

    def _scores(self, point: Point, record: Record) -> Scores:
        with np.load(self._run.path / DETAILS_NAME / point.key / _RESAMPLED) as arrays:
            return Scores(record["figures"], dict(arrays))

    def _write(self, order: Sequence[Point]) -> None:
        """All lines, those of the grid in its order, then those of earlier ones."""
        here = [point for point in order if point in self._records]
        others = [point for point in self._records if point not in set(order)]
        self._records = {point: self._records[point] for point in (*here, *others)}
        lines = b"".join(map(line_of, self._records.values()))
        self._run.write(POINTS_NAME, lines)


def _about(point: Point, status: str) -> Record:
    return {"point": point.described(), **point.to_dict(), "status": status}


def _fingerprint(decoder: Decoder) -> str:
    """Of what determines a decoder's texts, but the machine, which the whole run has."""
    described = decoder.describe()
    del described["environment"]
    if decoder.costs is not None:  # measured anew at each start
        del described["stopping"], described["own_params"]
    return _digest(described)


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _shown(found: Scores, quality: str) -> str:
    parts = []
    for name in (quality, RELATIVE):
        values = found.figures[name]
        if values["value"] is not None and values["low"] is not None:
            ends = f"[{values['low']:.4g}, {values['high']:.4g}]"
            parts.append(f"{name.replace('_', ' ')} {values['value']:.4g} {ends}")
    return ", ".join(parts)


def _say(text: str) -> None:
    print(f"specjax: {text}", file=sys.stderr, flush=True)
