"""One way to decode, measured beside the verifier alone.

Axes: n texts, c chunks of texts that are timed, s seeds.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.checks import check_part, whole_number
from specjax.data import Example
from specjax.evaluation import METRICS, Bootstrap, PassAt1, Problem, Sandbox, check_references
from specjax.evaluation.efficiency import VERIFIER, check_costs
from specjax.runs.compilation_cache import count_compilations
from specjax.runs.evaluation import PASS_AT_1, Scorer, check_answers, figures_of
from specjax.runs.lines import Record, record_of_row
from specjax.text import Decoder

# The batch size -> what decodes with it.
MakeDecoder = Callable[[int], Decoder]
# How often a text is timed, at most, until nothing is compiled meanwhile.
_TRIES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measuring:
    """How each point is measured.

    Attributes:
      metrics: names in `specjax.evaluation.METRICS`, or "pass_at_1"; the first one is called
        quality.
      seeds: how many seeds, from `seed` on, at a temperature above 0; at 0 there is one.
      seed: the first one.
      batch_size: the texts decoded together for their quality.
      latency_batch_size: the same where time is measured.
      latency_texts: how many texts are timed, the first ones of all.
      repeats: how often each of them is timed.
      bootstrap: the resampling.
      answer: what of an output the metrics score, such as `AnswerAfter("####")`; all by default.
      reference_answer: likewise, of a reference.
      sandbox: where outputs are run as programs, which adds the metric "pass_at_1"; without one
        nothing is run.
      costs: what a pass of each model costs, in any unit, such as {"verifier": 1.0, "drafter":
        0.05}, for the figure `cost_per_token`; of other drafters and plans under their names in
        the grid. Points without a price have no such figure.

    Raises:
      ImportError: a metric's library is not installed.
      OSError: programs cannot be contained here.
      TypeError: for a value of the wrong type.
      ValueError: for one out of range, an unknown metric, or too few texts for an interval.
    """

    metrics: Sequence[str] = ("bleu",)
    seeds: int = 5
    seed: int = 0
    batch_size: int = 16
    latency_batch_size: int = 1
    latency_texts: int = 64
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
        if not self.metrics:
            raise ValueError("metrics is empty: give at least one, the first is called quality")
        names = ("seeds", "batch_size", "latency_batch_size", "latency_texts", "repeats")
        for name in names:
            put(self, name, whole_number(name, getattr(self, name), low=1))
        if self.costs is not None:
            put(self, "costs", check_costs(self.costs))
            if absent := [name for name in (VERIFIER, "drafter") if name not in self.costs]:
                raise ValueError(f"costs has no cost of a pass of the {absent[0]}: give one")
        put(self, "seed", whole_number("seed", self.seed, low=0))
        check_part("bootstrap", self.bootstrap, ("interval", "difference"), "Bootstrap()")
        if self.latency_texts < 2 * self.latency_batch_size:
            raise ValueError(
                f"latency_texts must be at least twice latency_batch_size = "
                f"{self.latency_batch_size}, so that there is an interval, got "
                f"{self.latency_texts}"
            )

    def check_texts(
        self, references: Sequence[Sequence[str]], problems: Sequence[Problem] | None
    ) -> None:
        """Makes sure, before long work, that texts can be scored.

        Args:
          references: of each text.
          problems: of each text, or None.

        Raises:
          ValueError: a metric cannot use them, there are fewer than are timed, or problems and a
            sandbox are not together.
        """
        if (problems is None) != (self.sandbox is None):
            raise ValueError(
                "pass_at_1 needs problems, such as PROBLEMS=HumanEval.jsonl, and a sandbox, such "
                "as SANDBOX=@Sandbox(): give both, or neither to run no programs"
            )
        if len(references) < self.latency_texts:
            raise ValueError(
                f"there are {len(references)} texts, but latency_texts={self.latency_texts} are "
                "timed: add texts, or time fewer"
            )
        texts = [name for name in self.metrics if name != PASS_AT_1]
        if texts and not all(references):
            raise ValueError(
                f"{texts[0]} needs references, and there are none: name their field (REFERENCES of "
                "a task, TARGETS_FIELD without one)"
            )
        for scorer in self.scorers(references, problems).values():
            check_references(scorer.metric, scorer.references)

    def scorers(
        self, references: Sequence[Sequence[str]], problems: Sequence[Problem] | None
    ) -> dict[str, Scorer]:
        """The metrics with the references, or the problems, of all texts."""
        own = self.reference_answer
        wanted = references if own is None else [tuple(map(own, texts)) for texts in references]
        found = {}
        for name in self.metrics:
            if name != PASS_AT_1:
                found[name] = Scorer(METRICS[name], wanted, self.answer)
            elif self.sandbox is not None and problems is not None:
                found[name] = Scorer(PassAt1(self.sandbox), problems)
        return found

    def describe(self) -> dict[str, Any]:
        """All of it as JSON values, but for what is left out."""
        made = dataclasses.asdict(dataclasses.replace(self, answer=None, reference_answer=None))
        for name in ("answer", "reference_answer"):
            made[name] = repr(getattr(self, name))
        for name in ("answer", "reference_answer", "sandbox", "costs"):
            if getattr(self, name) is None:
                del made[name]
        return made

    def seeds_at(self, temperature: float) -> list[int]:
        """The seeds at a temperature: greedy texts need one."""
        return list(range(self.seed, self.seed + (self.seeds if temperature > 0.0 else 1)))


@dataclasses.dataclass(frozen=True, eq=False)
class Bench:
    """The texts that points are measured on.

    Attributes:
      examples: n of them, whose references are `references`.
      prompts: n, the tokens of their inputs.
      references: for each text one or several.
      measuring: how.
      problems: for each text what a program that goes on with it must do, or None.

    Raises:
      ValueError: there are not as many references as examples, a metric cannot use them, or there
        are fewer texts than are timed.
    """

    examples: Sequence[Example]
    prompts: Sequence[np.ndarray]
    references: Sequence[Sequence[str]]
    measuring: Measuring
    problems: Sequence[Problem] | None = None

    def __post_init__(self) -> None:
        if not len(self.examples) == len(self.prompts) == len(self.references):
            raise ValueError(
                f"there are {len(self.examples)} texts, but {len(self.references)} references: "
                "give one line of references for each text"
            )
        self.measuring.check_texts(self.references, self.problems)

    @property
    def scorers(self) -> dict[str, Scorer]:
        """The metrics with their references."""
        return self.measuring.scorers(self.references, self.problems)

    def part(self, start: int, stop: int, timed: int | None = None) -> "Bench":
        """The same of some of the texts, of which the first `timed` ones are timed."""
        how = self.measuring
        return dataclasses.replace(
            self,
            examples=self.examples[start:stop],
            prompts=self.prompts[start:stop],
            references=self.references[start:stop],
            problems=None if self.problems is None else self.problems[start:stop],
            measuring=how if timed is None else dataclasses.replace(how, latency_texts=timed),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Times:
    """The seconds of chunks of texts.

    Attributes:
      seconds: `[s, r, c]` of each seed, repeat and chunk.
      tokens: `[s, c]` emitted.
    """

    seconds: np.ndarray  # [s, r, c]
    tokens: np.ndarray  # [s, c]

    @property
    def usual(self) -> np.ndarray:
        """`[c]`: of the repeats the median, of the seeds the mean."""
        return np.median(self.seconds, axis=1).mean(axis=0)

    @property
    def mean(self) -> np.ndarray:
        """`[c]`: the mean of all."""
        return self.seconds.mean(axis=(0, 1))


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
    """What one way to decode did.

    Attributes:
      seeds: s of them.
      records: for each seed the n lines of a `predictions.jsonl`.
      times: of the first texts.
      verifier_times: those of the verifier alone, in turns with them; None for itself.
      compiled: programs that were compiled or read from disk before it was timed.
      compiled_late: and in the times that count: such a text is timed again, three times at most.
    """

    seeds: list[int]
    records: list[list[Record]]
    times: Times
    verifier_times: Times | None
    compiled: int
    compiled_late: int


def measure(
    make: MakeDecoder, make_verifier: MakeDecoder | None, bench: Bench, temperature: float
) -> Measured:
    """Decodes all texts, and times the first ones in turns with the verifier alone.

    A row's text depends on its seed and its place. So texts are the same at any batch size (but
    where policies read the rows beside a row), and so are texts that another part of them is
    measured with.

    Args:
      make: makes the decoder, at its temperature; it is called once for each batch size.
      make_verifier: the same of the verifier alone at that temperature; None where it is that.
      bench: the texts, and how.
      temperature: of both.

    Returns:
      What was measured.

    Raises:
      ValueError: a model gave NaN, or the parts of the decoder do not go together. Anything that
        decoding may raise, such as where the memory is full.
    """
    how = bench.measuring
    seeds = how.seeds_at(temperature)
    with count_compilations() as counts:
        decoder = make(how.batch_size)
        records = [_decode(decoder, bench, seed) for seed in seeds]
        same = how.batch_size == how.latency_batch_size
        timed = [decoder if same else make(how.latency_batch_size)]
        if make_verifier is not None:
            timed.append(make_verifier(how.latency_batch_size))
        chunks = _chunks(bench)
        for one in timed:
            _warm(one, bench, chunks, seeds[0])
    times, late = _time(timed, bench, chunks, seeds)
    return Measured(
        seeds=seeds,
        records=records,
        times=times[0],
        verifier_times=times[1] if make_verifier is not None else None,
        compiled=counts.compiled + counts.read,
        compiled_late=late,
    )


def joined(parts: Sequence[Measured]) -> Measured:
    """What one way to decode did on several parts of the texts, in order."""
    others = [part.verifier_times for part in parts if part.verifier_times is not None]
    return Measured(
        seeds=parts[0].seeds,
        records=[
            list(itertools.chain(*several))
            for several in zip(*(p.records for p in parts), strict=True)
        ],
        times=_joined_times([part.times for part in parts]),
        verifier_times=_joined_times(others) if others else None,
        compiled=sum(part.compiled for part in parts),
        compiled_late=sum(part.compiled_late for part in parts),
    )


def _joined_times(parts: Sequence[Times]) -> Times:
    return Times(
        np.concatenate([part.seconds for part in parts], axis=-1),
        np.concatenate([part.tokens for part in parts], axis=-1),
    )


def _decode(decoder: Decoder, bench: Bench, seed: int) -> list[Record]:
    # By their places: a part of the texts gets the same ones as all of them.
    ids = [example.id for example in bench.examples]
    prompts: list[Any] = list(bench.prompts)
    rows = {row.index: row for row in decoder.rows(prompts, seed=seed, ids=ids)}
    found = []
    for i, example in enumerate(bench.examples):
        if rows[i].error is not None:
            raise ValueError(f"row {example.id}: {rows[i].error}: look at the weights")
        found.append(record_of_row(example, rows[i]))
    return found


def _chunks(bench: Bench) -> list[list[int]]:
    """The places of the texts that are timed together; those that fill no chunk are left out."""
    size, most = bench.measuring.latency_batch_size, bench.measuring.latency_texts
    return [list(range(start, start + size)) for start in range(0, most - size + 1, size)]


def _warm(decoder: Decoder, bench: Bench, chunks: list[list[int]], seed: int) -> None:
    """Decodes one chunk of each shape."""
    shapes: dict[int, list[int]] = {}
    for chunk in chunks:
        longest = max(len(bench.prompts[i]) for i in chunk)
        shapes.setdefault(int(np.searchsorted(decoder.buckets, longest)), chunk)
    for chunk in shapes.values():
        _run(decoder, bench, chunk, seed)


def _run(decoder: Decoder, bench: Bench, chunk: list[int], seed: int) -> tuple[float, int]:
    """The seconds of a chunk, and the tokens that it emitted."""
    prompts: list[Any] = [bench.prompts[i] for i in chunk]
    ids = [bench.examples[i].id for i in chunk]
    begin = time.perf_counter()
    result = decoder(prompts, seed=seed, ids=ids, progress=False)
    return time.perf_counter() - begin, int(result.info.rows.emitted.sum())


def _run_compiled(
    decoder: Decoder, bench: Bench, chunk: list[int], seed: int
) -> tuple[float, int, int]:
    """The same without compiling: some programs, such as of a deferral, only some texts need.

    The third number is how many programs were compiled all the same.
    """
    for _ in range(_TRIES):
        with count_compilations() as counts:
            spent, emitted = _run(decoder, bench, chunk, seed)
        late = counts.compiled + counts.read
        if not late:
            break
    return spent, emitted, late


def _time(
    decoders: list[Decoder], bench: Bench, chunks: list[list[int]], seeds: list[int]
) -> tuple[list[Times], int]:
    """The times of each, and how many programs were compiled within them.

    They take turns at every chunk, each as often first as the other.
    """
    shape = (len(seeds), bench.measuring.repeats, len(chunks))
    found = [Times(np.zeros(shape), np.zeros((shape[0], shape[2]), np.int64)) for _ in decoders]
    both, compiled = list(zip(decoders, found, strict=True)), 0
    for repeat in range(shape[1]):
        for i, seed in enumerate(seeds):
            for j, chunk in enumerate(chunks):
                # A text meets both orders over its repeats and seeds.
                order = both if (repeat + i + j) % 2 else both[::-1]
                for decoder, times in order:
                    spent, emitted, late = _run_compiled(decoder, bench, chunk, seed)
                    compiled += late
                    times.seconds[i, repeat, j] = spent
                    times.tokens[i, j] = emitted
    return found, compiled
