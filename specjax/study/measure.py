"""Measures settings, in turns with the verifier alone, and computes their figures.

Axes: n texts, c timed chunks of texts, s samples of a text, r repeats, R resamples.
"""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Int, Int32

from specjax.checks import whole_fields
from specjax.compilation import count_compilations
from specjax.errors import UserError, tell
from specjax.evaluation import METRICS, Bootstrap, PassAt1, Sandbox
from specjax.evaluation.bootstrap import Sums, divided, mean, ratio
from specjax.evaluation.efficiency import VERIFIER, check_costs
from specjax.evaluation.metrics import check_references
from specjax.runs.evaluation import (
    PASS_AT_1,
    Scoring,
    as_json,
    check_answers,
    decoding_figures,
    figures_of,
    pooled_figures,
    predictions_of,
)
from specjax.runs.predictions import record_of_row
from specjax.study.texts import Texts
from specjax.text import Decoder, Result, TextModel
from specjax.text.requests import Prefix
from specjax.text.results import Row
from specjax.text.setting import DRAFTER_ALONE, Setting

_Side = TypeVar("_Side", bound=Hashable)
_Part = TypeVar("_Part")
_Result = TypeVar("_Result")
# The most times a chunk is timed until nothing is compiled meanwhile.
_TRIES = 3
RELATIVE, NATS, DEFERRALS = "relative_latency", "nats_per_token", "deferrals_per_token"
# Figures of the verifier, which `specjax.evaluation` also has for a drafter alone.
_OF_A_VERIFIER = ("tokens_per_verifier_call", DEFERRALS, NATS, "impossible_share")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measuring:
    """How settings are measured.

    Attributes:
      metrics: names in `specjax.evaluation.METRICS`, or "pass_at_1"; the first is the quality.
        Empty: only speed and divergence are compared.
      num_samples: the number of outputs for each prompt at a temperature above 0; at 0 it is 1.
      seed: the seed of the first sample; the others have the following seeds.
      batch_size: the batch size for quality and estimates.
      latency_batch_size: the batch size for times.
      latency_limit: the number of timed texts, the first of all.
      repeats: how often each of these is timed.
      answer: extracts the scored part of an output, such as `AnswerAfter("####")`; None: all.
      reference_answer: likewise, for references.
      sandbox: runs outputs as programs, which adds the metric "pass_at_1"; None runs nothing.
      costs: model's name -> the cost of a pass, in any unit, such as {"verifier": 1.0, "drafter":
        0.05}, for the figure `cost_per_token`; settings of a drafter without a cost lack it.

    Raises:
      UserError: a value is out of range, a metric is unknown or its library is not installed.
      OSError: programs cannot be contained here.
    """

    metrics: Sequence[str] = ("bleu",)
    num_samples: int = 5
    seed: int = 0
    batch_size: int = 16
    latency_batch_size: int = 1
    latency_limit: int = 64
    repeats: int = 3
    bootstrap: Bootstrap = dataclasses.field(default_factory=Bootstrap)
    answer: Callable[[str], str] | None = None
    reference_answer: Callable[[str], str] | None = None
    sandbox: Sandbox | None = None
    costs: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "metrics", figures_of(self.metrics, self.sandbox))
        check_answers(self.answer, self.reference_answer)
        whole_fields(self, num_samples=1, batch_size=1, repeats=1, seed=0)
        whole_fields(self, latency_batch_size=1, latency_limit=1)
        if self.costs is not None:
            put(self, "costs", check_costs(self.costs))
            if absent := [name for name in (VERIFIER, "drafter") if name not in self.costs]:
                raise UserError(f"costs has no cost for the {absent[0]}: add costs[{absent[0]!r}]")

    @property
    def quality(self) -> str | None:
        """The first metric, or None."""
        return self.metrics[0] if self.metrics else None

    def fitted(self, texts: Texts, *, quiet: bool = False) -> "Measuring":
        """Adapts to few texts or missing references, with messages about the changes.

        Raises:
          UserError: a metric cannot use the references, problems and sandbox are not both given,
            or there are too few texts to time.
        """
        how, count, say = self, len(texts.examples), (lambda text: None) if quiet else tell
        least = 2 * self.latency_batch_size
        if count < least:
            raise UserError(
                f"{count} texts are too few for an interval of the latency: give at least {least} "
                "texts, twice latency_batch_size"
            )
        if count < self.latency_limit:
            say(f"LATENCY_LIMIT={self.latency_limit}: timing all {count} texts")
            how = dataclasses.replace(how, latency_limit=count)
        if how.latency_limit < least:
            raise UserError(
                f"latency_limit must be at least {least}, twice latency_batch_size, got "
                f"{self.latency_limit}"
            )
        if (texts.problems is None) != (self.sandbox is None):
            raise UserError(
                "pass_at_1 needs both problems (PROBLEMS=HumanEval.jsonl) and a sandbox "
                "(SANDBOX=@Sandbox()): give both, or neither"
            )
        scored = [name for name in how.metrics if name != PASS_AT_1]
        if scored and not any(texts.references):
            say(
                f"there are no references, so {scored[0]} is not computed: give "
                "TARGETS_FIELD, REFERENCES, or the references field of the task"
            )
            how = dataclasses.replace(how, metrics=figures_of((), how.sandbox))
        for scorer in how.scorers(texts).values():
            check_references(scorer.metric, scorer.references)
        return how

    def scorers(self, texts: Texts) -> dict[str, Scoring]:
        """Returns the metrics with the references, or the problems, of all texts."""
        references: Sequence[Sequence[str]] = texts.references
        if (answer := self.reference_answer) is not None:
            references = [tuple(map(answer, several)) for several in references]
        scorers = {}
        for name in self.metrics:
            if name != PASS_AT_1:
                scorers[name] = Scoring(METRICS[name], references, self.answer)
            elif self.sandbox is not None and texts.problems is not None:
                scorers[name] = Scoring(PassAt1(self.sandbox), texts.problems)
        return scorers

    def describe(self) -> dict[str, Any]:
        """Returns JSON values, without fields that are None."""
        values = dataclasses.asdict(dataclasses.replace(self, answer=None, reference_answer=None))
        for name in ("answer", "reference_answer"):
            values[name] = repr(getattr(self, name))
        for name in ("answer", "reference_answer", "sandbox", "costs"):
            if getattr(self, name) is None:
                del values[name]
        return values


@dataclasses.dataclass(frozen=True, eq=False)
class Bench:
    """The models and texts for measuring settings.

    Attributes:
      models: "verifier" and the drafters of the settings, by name.
      prompts: the tokens of the texts.
      measuring: fitted to the texts.
      options: more options of every decoder, such as `max_new_tokens`.
      shared: tokens with which most prompts begin, such as few-shot examples: every decoder reads
        them once, before it is timed. Without tokens it reads whole prompts.
    """

    models: Mapping[str, TextModel]
    texts: Texts
    prompts: Sequence[np.ndarray]
    measuring: Measuring
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shared: Int32[np.ndarray, " L"] = dataclasses.field(
        default_factory=lambda: np.zeros(0, np.int32)
    )

    def decoder(self, setting: Setting, batch_size: int) -> Decoder:
        return Decoder(self.models, setting, batch_size=batch_size, **self.options)

    def part(self, start: int, stop: int, timed: int | None = None) -> "Bench":
        """Returns the bench of some texts, of which the first `timed` are timed."""
        how = self.measuring
        return dataclasses.replace(
            self,
            texts=self.texts.part(start, stop),
            prompts=self.prompts[start:stop],
            measuring=how if timed is None else dataclasses.replace(how, latency_limit=timed),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Times:
    """The seconds and the emitted tokens of chunks of texts.

    `passes` are the verifier's, of a batch: it waits for its last row.
    """

    seconds: Float[np.ndarray, "s r c"]
    tokens: Int[np.ndarray, "s c"]
    passes: Int[np.ndarray, "s c"]

    @classmethod
    def of(
        cls, seconds: Float[np.ndarray, "s r c"], results: Sequence[Sequence[Result]]
    ) -> "Times":
        """Of a result of each sample and chunk."""
        infos = [[result.info.per_row for result in sample] for sample in results]
        return cls(
            seconds,
            np.array([[info.emitted.sum() for info in sample] for sample in infos]),
            np.array([[info.verifier_calls.max() for info in sample] for sample in infos]),
        )

    @property
    def per_pass(self) -> float:
        """The tokens of a pass of a batch."""
        return float(divided(self.tokens.sum(), self.passes.sum()))

    @property
    def by_turn(self) -> "Times":
        """The same with each turn as a chunk, for the interval of these very texts."""
        samples, repeats, _ = self.seconds.shape
        both = (np.tile(counts, repeats) for counts in (self.tokens, self.passes))
        return Times(self.seconds.reshape(samples, 1, -1), *both)

    @property
    def usual(self) -> Float[np.ndarray, " c"]:
        """The mean over samples of the median over repeats."""
        return np.median(self.seconds, axis=1).mean(axis=0)


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
    """The measurements of a setting.

    Attributes:
      seeds: s seeds.
      rows: for each seed the n lines of a `predictions.jsonl`.
      times: of the first texts.
      verifier_times: of the verifier alone, measured in turns; None for itself.
      compiled: the number of programs compiled or read from disk.
    """

    seeds: list[int]
    rows: list[list[dict[str, Any]]]
    times: Times
    verifier_times: Times | None
    compiled: int

    def to_record(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Returns a JSON value and arrays for `of_record`."""
        value = {name: getattr(self, name) for name in _PLAIN}
        both = {"own": self.times, "verifier": self.verifier_times}
        arrays = {
            f"{name}/{field}": getattr(times, field)
            for name, times in both.items()
            if times is not None
            for field in _TIMES
        }
        return value, arrays

    @classmethod
    def of_record(cls, value: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> "Measured":
        """Restores `to_record`; other values and arrays are ignored."""

        def times(name: str) -> Times:
            return Times(*(arrays[f"{name}/{field}"] for field in _TIMES))

        return cls(
            times=times("own"),
            verifier_times=times("verifier") if "verifier/seconds" in arrays else None,
            **{name: value[name] for name in _PLAIN},
        )


_PLAIN, _TIMES = ("seeds", "rows", "compiled"), ("seconds", "tokens", "passes")


class MeasuringError(Exception):
    """A setting could not be measured, for example because memory is full or a model gives NaN."""

    def __init__(self, error: Exception):
        super().__init__(f"{type(error).__name__}: {' '.join(str(error).split())}")


def measure(setting: Setting, bench: Bench) -> Measured:
    """Decodes all texts, and times the first texts in turns with the verifier alone.

    A row's output depends on its seed and its place. So it is the same at any batch size (unless a
    policy reads the other rows), and in every part of the texts. If both batch sizes are equal, the
    outputs of timed texts are those of their turns.

    Raises:
      UserError: a model gave NaN, or the parts of the setting cannot be combined; also any error
        of decoding, such as a full memory.
    """
    how, alone = bench.measuring, setting.verifier_alone
    size, samples = how.latency_batch_size, how.num_samples
    # At temperature 0 all samples are equal.
    seeds = list(range(how.seed, how.seed + (samples if setting.temperature > 0.0 else 1)))
    # An incomplete last chunk is left out.
    starts = range(0, how.latency_limit - size + 1, size)
    chunks = [list(range(start, start + size)) for start in starts]
    with count_compilations() as counts:
        reader = _Reader(setting, bench, how.batch_size)
        same = how.batch_size == size
        readers = [reader if same else _Reader(setting, bench, size)]
        if setting != alone:
            readers.append(_Reader(alone, bench, size))
        for each in readers:
            each.warm(chunks, seeds[0])
        shape = (len(seeds), how.repeats, len(chunks))
        seconds = [np.zeros(shape) for _ in readers]
        results: list[Any] = [[[None] * len(chunks) for _ in seeds] for _ in readers]
        for repeat, (i, seed) in itertools.product(range(how.repeats), enumerate(seeds)):
            # A text gets both orders over its repeats and seeds.
            order = range(len(readers))[:: 1 if (repeat + i) % 2 else -1]
            sides = {k: functools.partial(readers[k].timed, seed) for k in order}
            for k, _, j, (spent, result) in take_turns(sides, chunks, 1):
                seconds[k][i, repeat, j] = spent
                results[k][i][j] = result
        rows = []
        for seed, of_seed in zip(seeds, results[0], strict=True):
            known = itertools.chain(*of_seed) if same else ()
            rows.append(reader.records(seed, dict(enumerate(known))))
    times = [Times.of(*one) for one in zip(seconds, results, strict=True)]
    return Measured(
        seeds=seeds,
        rows=rows,
        times=times[0],
        verifier_times=times[1] if setting != alone else None,
        compiled=counts.compiled + counts.read,
    )


class _Reader:
    """A decoder of the texts, which has read the beginning of all prompts."""

    def __init__(self, setting: Setting, bench: Bench, batch_size: int):
        self._decoder, self._bench = bench.decoder(setting, batch_size), bench
        # A token compiles all programs, but a constraint may need more.
        self._shortest = None if setting.processors else 1
        prefix = Prefix(bench.shared, None, self._decoder.method, self._decoder.params)
        self._prefix = prefix if len(prefix) else None

    def _arguments(self, places: Sequence[int], seed: int) -> dict[str, Any]:
        return {
            "prompts": [self._bench.prompts[i] for i in places],
            # Row ids are places in the file, so that a part of the texts has the same outputs.
            "ids": [self._bench.texts.examples[i].id for i in places],
            "seed": seed,
            "prefix": self._prefix,
        }

    def warm(self, chunks: list[list[int]], seed: int) -> None:
        """Decodes a chunk of each shape, to compile its programs."""
        shapes: dict[int, list[int]] = {}
        for chunk in chunks:
            longest = max(len(self._bench.prompts[i]) for i in chunk)
            shapes.setdefault(int(np.searchsorted(self._decoder.buckets, longest)), chunk)
        for chunk in shapes.values():
            self._decoder(
                **self._arguments(chunk, seed), max_new_tokens=self._shortest, progress=False
            )

    def timed(self, seed: int, chunk: list[int]) -> tuple[float, Result]:
        """The seconds of a chunk, and its result."""
        arguments = self._arguments(chunk, seed)
        for _ in range(_TRIES):
            with count_compilations() as counts:
                spent, result = time_call(lambda: self._decoder(**arguments, progress=False))
            if not counts.compiled + counts.read:
                break
        return spent, result

    def records(self, seed: int, known: Mapping[int, Row]) -> list[dict[str, Any]]:
        """The records of all texts; those at places without a known row are decoded."""
        examples = self._bench.texts.examples
        places = [i for i in range(len(examples)) if i not in known]
        decoded = self._decoder.rows(**self._arguments(places, seed)) if places else ()
        rows = {**known, **{places[row.index]: row for row in decoded}}
        for i, example in enumerate(examples):
            if rows[i].error is not None:
                raise UserError(f"row {example.id}: {rows[i].error}")
        return [record_of_row(example, rows[i]) for i, example in enumerate(examples)]


def take_turns(
    sides: Mapping[_Side, Callable[[_Part], _Result]], parts: Sequence[_Part], repeats: int
) -> Iterator[tuple[_Side, int, int, _Result]]:
    """Calls all sides on each part of the work before the next part, in alternating order.

    So slow changes of the machine affect all sides equally.

    Yields:
      For each call the side, the repeat, the place of the part, and the result.
    """
    names = list(sides)
    for repeat in range(repeats):
        for i, part in enumerate(parts):
            for name in names[:: -1 if (repeat + i) % 2 else 1]:
                yield name, repeat, i, sides[name](part)


def time_call(call: Callable[[], _Result]) -> tuple[float, _Result]:
    """Returns the seconds of a call, and its result."""
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


class Scores(NamedTuple):
    """Figures and their resamples.

    Attributes:
      figures: name -> `value`, `low`, `high`, `error`: JSON values, None if undefined.
      resampled: name -> the figure of each resample of the texts.
    """

    figures: Mapping[str, Mapping[str, float | None]]
    resampled: Mapping[str, Float[np.ndarray, " R"]]

    def value(self, name: str) -> float:
        """The value of a figure, or NaN."""
        value = self.figures.get(name, {}).get("value")
        return math.nan if value is None else value

    def has(self, name: str) -> bool:
        return not math.isnan(self.value(name))


def score(setting: Setting, measured: Measured, bench: Bench) -> Scores:
    """Returns all figures of a measured setting.

    They are the figures of `specjax evaluate`, pooled over all seeds, and
      `latency`: seconds of a text: the mean over samples of the median over repeats.
      `relative_latency`: `latency` over the verifier's, both measured in turns on the same texts.
      `relative_time_per_token`: the same per emitted token.

    The bootstrap resamples the texts, each with the outputs of all seeds.

    Raises:
      UserError: a figure cannot be computed.
    """
    costs = prices(setting, bench.measuring.costs)
    runs = []
    for rows in measured.rows:
        run = predictions_of(rows, setting.described())
        known = costs is not None and run.counts is not None and {*run.counts.calls} <= {*costs}
        runs.append((run, decoding_figures(run, costs if known else None)))
    sums_of = pooled_figures(runs, bench.measuring.scorers(bench.texts))
    sums_of |= _latency(measured.times, measured.verifier_times, bench)
    if setting.method == DRAFTER_ALONE:
        # A model that decodes alone counts as the verifier, but this model is the drafter.
        sums_of = {name: sums for name, sums in sums_of.items() if name not in _OF_A_VERIFIER}
    bootstrap = bench.measuring.bootstrap
    resampled = {key: bootstrap.replicates(sums) for key, sums in sums_of.items()}
    return Scores(
        {key: as_json(bootstrap.summary(sums_of[key].value, resampled[key])) for key in sums_of},
        resampled,
    )


def prices(setting: Setting, costs: Mapping[str, float] | None) -> dict[str, float] | None:
    """Returns the cost of a pass of each model of a setting; None if its drafter has no cost."""
    if costs is None or setting.drafter not in costs:
        return None
    if setting.method == DRAFTER_ALONE:  # a model that decodes alone counts as the verifier
        return {"verifier": costs[setting.drafter]}
    return {**costs, "drafter": costs[setting.drafter]}


def _latency(times: Times, verifier: Times | None, bench: Bench) -> dict[str, Sums]:
    per_text = 1.0 / bench.measuring.latency_batch_size
    other = times if verifier is None else verifier
    both = [times.usual, times.tokens.sum(axis=0), other.usual, other.tokens.sum(axis=0)]

    def per_token(sums: np.ndarray) -> np.ndarray:
        return divided(sums[:, 0] * sums[:, 3], sums[:, 1] * sums[:, 2])

    return {
        "latency": mean(times.usual, per_text),
        RELATIVE: ratio(times.usual, other.usual),
        "relative_time_per_token": Sums(np.stack(both, axis=1).astype(np.float64), per_token),
    }


def over(scores: Scores, other: Scores, name: str, bootstrap: Bootstrap) -> dict[str, Any]:
    """Returns the paired difference of a figure to that of another setting."""
    if not (scores.has(name) and other.has(name)):
        return as_json(bootstrap.summary(np.nan, np.zeros(1)))
    difference = scores.resampled[name] - other.resampled[name]
    return as_json(bootstrap.summary(scores.value(name) - other.value(name), difference))
