"""What was measured of settings, text by text: kept on disk, so that a stopped run goes on.

Axes: n texts.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.memory import spare_maps
from specjax.runs.run_directory import RunDirectory
from specjax.sweeping.measurement import Bench, Measured, joined, measure
from specjax.sweeping.scores import Scores, score
from specjax.sweeping.storage import read_measured, write_measured
from specjax.text import Decoder, TextModel
from specjax.tuning.halving import MeasuringError
from specjax.tuning.judging import Texts
from specjax.tuning.settings import Setting
from specjax.writing import naming_failures, new_directory

NAME = "measured"


class Evidence:
    """Measures settings on parts of the texts, each once.

    Args:
      models: by name, the verifier and the drafters.
      options: of all decoders, but their batch size.
      bench: all texts: those of the rounds, then the held-out ones.
      ends: where each round's texts end; the held-out ones follow the last.
      timed: how many of the first texts of each part are timed, the held-out part last.
      run: where it is kept.
    """

    def __init__(
        self,
        models: Mapping[str, TextModel],
        options: Mapping[str, Any],
        bench: Bench,
        ends: Sequence[int],
        timed: Sequence[int],
        run: RunDirectory,
    ):
        self._models, self._options, self._bench = models, dict(options), bench
        starts, stops = [0, *ends], [*ends, len(bench.examples)]
        self._parts = list(zip(starts, stops, timed, strict=True))
        self._run = run

    def look(self, setting: Setting, number: int) -> Scores:
        """Its figures on the texts of the rounds up to one, from 0; see `halving.Look`."""
        parts = range(number + 1)
        return self._scores(setting, parts)

    def held_out(self, setting: Setting) -> Scores:
        """Its figures on the held-out texts; raises what measuring raises."""
        try:
            return self._scores(setting, [len(self._parts) - 1])
        except MeasuringError as error:
            raise error.__cause__ or error from None

    def texts(self) -> list[Texts]:
        """How many texts each round looks at, and last the held-out ones."""
        counts = [Texts(stop - start, timed) for start, stop, timed in self._parts]
        rounds = [
            Texts(*(sum(column) for column in zip(*counts[: i + 1], strict=True)))
            for i in range(len(counts) - 1)
        ]
        return [*rounds, counts[-1]]

    def _scores(self, setting: Setting, parts: Sequence[int]) -> Scores:
        found = joined([self._measured(setting, part) for part in parts])
        start, stop = self._parts[parts[0]][0], self._parts[parts[-1]][1]
        timed = self._parts[parts[0]][2]
        return score(found, self._bench.part(start, stop, timed), setting.described())

    def _measured(self, setting: Setting, part: int) -> Measured:
        place = self._place(setting, part)
        if place.exists():
            return read_measured(place)
        spare_maps()
        bench = self._bench.part(*self._parts[part])
        alone = None if not setting.max_draft else _alone_of(setting)
        try:
            found = measure(
                lambda rows: self._decoder(setting, rows),
                None if alone is None else lambda rows: self._decoder(alone, rows),
                bench,
                setting.temperature,
            )
        except Exception as error:
            if alone is None:
                raise
            raise MeasuringError(error) from error
        with naming_failures(place):
            place.parent.mkdir(exist_ok=True)
        with new_directory(place, replace=True) as partial:
            write_measured(partial, found)
        self._run.keep()
        return found

    def _decoder(self, setting: Setting, rows: int) -> Decoder:
        return setting.decoder(self._models, batch_size=rows, **self._options)

    def _place(self, setting: Setting, part: int) -> Path:
        text = json.dumps(setting.to_dict(), sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:12]
        name = setting.rule if setting.max_draft else "alone"
        return self._run.own(NAME) / f"{name}-{key}-{part}"


def _alone_of(setting: Setting) -> Setting:
    """The verifier alone, that draws as a setting does."""
    return Setting(
        **{name: getattr(setting, name) for name in ("temperature", "top_k", "top_p")}, max_draft=0
    )


def parts_of(rows: int, rounds: int) -> list[int]:
    """Where the texts of each round end: each has twice as many as the one before.

    Args:
      rows: those of the last.
      rounds: how many.
    """
    return [max(rows >> (rounds - 1 - i), 1) for i in range(rounds)]


def timed_of(ends: Sequence[int], rows: int, measuring: Any) -> list[int]:
    """How many texts of each part are timed: in all rounds together about `latency_texts`.

    Args:
      ends: see `Evidence`.
      rows: the number of all texts.
      measuring: see `sweeping.Measuring`.
    """
    least = 2 * measuring.latency_batch_size
    sizes = [stop - start for start, stop in zip([0, *ends], [*ends, rows], strict=True)]
    share = measuring.latency_texts / ends[-1]
    wanted = [*(round(share * size) for size in sizes[:-1]), measuring.latency_texts]
    return [min(max(want, least), size) for want, size in zip(wanted, sizes, strict=True)]
