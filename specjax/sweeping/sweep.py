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

import dataclasses
import gc
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from specjax.data import Example
from specjax.evaluation import Problem
from specjax.memory import spare_maps
from specjax.runs.inputs import check_truncate, tokens_of
from specjax.runs.processes import Part
from specjax.sweeping import parts, plots
from specjax.sweeping.directory import POINTS_NAME, RESULTS_NAME, PointsDirectory, say
from specjax.sweeping.measurement import Bench, Measured, Measuring, measure
from specjax.sweeping.points import DRAFTER, VERIFIER, Point
from specjax.sweeping.scores import Scores, over, prices, score
from specjax.text import Decoder


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
    on_start: Callable[..., None] | None = None,
    part: Part | None = None,
) -> dict[str, Any]:
    """Measures all points that the directory does not have yet, and draws and tabulates all.

    A point that fails, because its decoder cannot be made or the memory is full, gets a line that
    says why; the others are measured, and the next start tries it again. A kill loses the point
    that was measured, and no other. Points of an earlier grid stay, in the table and the figures
    too.

    With `part` this process measures its share of the points (`parts.share`) into a directory of
    its own in `output_dir`; the last one to end merges those that are on one file system.

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
      on_start: is called with the `RunDirectory` before the long work, after all checks; before a
        merge also with `paths=`, those of the parts.
      part: which of several replicas this is; None for one alone.

    Returns:
      The content of `results.json` (with `part` of its own): `table_2` (see `tables.table_2`),
      `quality`, the numbers of points that are `done` and `failed`, and `failures`: point -> why.

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
    grid = points
    if part is not None:
        points = parts.share(points, part)
    with parts.directory_of(output_dir, part) as run:
        verifier = make(
            Point(method=VERIFIER, temperature=grid[0].temperature), measuring.batch_size
        )
        tokens = [
            tokens_of(verifier, e.inputs, f"text {e.id}", chat=chat, truncate=truncate)
            for e in examples
        ]
        bench = Bench(examples, tokens, references, measuring, problems)
        configuration = _configuration(verifier, bench, chat)
        if part is not None:
            parts.check_whole(run, configuration)
            configuration[parts.PART] = dataclasses.asdict(part)
        run.claim(configuration, allow_other_environment=allow_other_environment)
        directory = PointsDirectory(run, measuring.metrics[0], measuring.bootstrap)
        directory.read()
        _check(directory, make, points, measuring.batch_size)
        if on_start is not None:
            on_start(run)
        missing = [point for point in points if not directory.has(point)]
        if part is not None and missing:
            (run.path / RESULTS_NAME).unlink(missing_ok=True)  # it says that this part is whole
        if len(missing) < len(points):
            say(f"{len(points) - len(missing)} of {len(points)} points are there already")
        for i, point in enumerate(missing):
            say(f"point {i + 1} of {len(missing)}: {point.described()} ...")
            spare_maps()
            begin = time.perf_counter()
            try:
                found = _measure(make, point, bench, directory.scored)
            except Exception as error:
                directory.put_failed(point, error, points)
                gc.collect()  # what it held
                continue
            measured, scores, about = found
            about["infer"] = make.command(point)
            about["process"]["seconds"] = time.perf_counter() - begin
            directory.put(point, measured, scores, about, points)
        if not points:  # a part without any is whole, too
            directory.write(points)
        results = directory.finish(grid if part is not None else None)
    if part is not None:
        parts.finish(run, part, on_start)
    return results


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
) -> tuple[Measured, Scores, dict[str, Any]]:
    """What was measured, its figures, and what else its line says."""
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
    found = score(measured, bench, point.described(), prices(point, bench.measuring.costs))
    if point.method == DRAFTER:
        found = found.of_a_drafter()
    apart = {
        name: over(found, scored.get(alone, found), name, bench.measuring.bootstrap)
        for name in bench.measuring.metrics
    }
    how = bench.measuring
    return (
        measured,
        found,
        {
            "over_verifier": apart,
            "latency_of": {
                "texts": measured.times.seconds.shape[2] * how.latency_batch_size,
                "batch_size": how.latency_batch_size,
                "repeats": how.repeats,
            },
            "fingerprint": _fingerprint(made[0]),
            "process": {
                "compiled": measured.compiled,
                "compiled_while_timed": measured.compiled_late,
            },
        },
    )


def _check(
    directory: PointsDirectory, make: Maker, points: Sequence[Point], batch_size: int
) -> None:
    """Refuses points that were measured with what is now another decoder."""
    for point in filter(directory.has, points):
        if directory.fingerprint(point) != _fingerprint(make(point, batch_size)):
            raise ValueError(
                f"output_dir={directory.path} has the point {point.described()} of other "
                "settings (its gin files, models or versions have changed): choose another "
                f"output_dir, or delete its line in {POINTS_NAME}"
            )


def _fingerprint(decoder: Decoder) -> str:
    """Of what determines a decoder's texts, but the machine, which the whole run has."""
    described = decoder.describe()
    del described["environment"]
    if decoder.measured:  # costs, anew at each start
        del described["stopping"], described["own_params"]
    return _digest(described)


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
