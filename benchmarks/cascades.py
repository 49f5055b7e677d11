"""Compares kinds of drafting: one drafter, two, and copies from the text with each."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

import specjax
from benchmarks import command
from benchmarks.spare_maps import spare_maps
from specjax import Decoder, TextModel
from specjax.cli.bench import workload
from specjax.cli.bench.report import Report
from specjax.decoding.scoring import powers_of_two
from specjax.drafting import Costs
from specjax.evaluation import Bootstrap, Interval, Sums, ratio
from specjax.study.drafting_plans import Plan, plans
from specjax.study.expect import expect, sampling_key
from specjax.study.turns import in_turns, timed
from specjax.text import load_text_model
from specjax.text.passes import PassTimes, measure_times
from specjax.text.scheduling import BUCKETS
from specjax.text.setting import VERIFIER_ALONE, Setting
from specjax.text.teacher_forcing import written

HELP = "one drafter, two, and copies from the text with each: standardised and wall-time speed-ups"

_COLUMNS = (
    "temperature", "kind", "drafts", "tokens_per_call", "ms", "ms_low", "ms_high", "ms_gain",
    "pw", "pw_gain", "wall", "wall_low", "wall_high", "wall_gain", "gain_low", "gain_high", "same",
)  # fmt: skip
_ALONE, _SINGLE = "verifier alone", "one drafter"
_BUCKETS_HELP = "lengths that prompts are padded to; each is compiled for each decoder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the models, the prompts and the sizes."""
    workload.add_pair(parser)
    parser.add_argument("--drafters", nargs="*", default=[], help="directories of further drafters")
    some = parser.add_mutually_exclusive_group(required=True)
    some.add_argument("--choose", help="a text file of other prompts, to choose settings")
    some.add_argument(
        "--drafts",
        nargs="+",
        help="measure these instead: numbers of tokens of one drafter, at least one, and texts "
        "such as 'Cascade(((1, 3), (0, 1)), last=Lookup(), width=8)'",
    )
    parser.add_argument("--bigram", help="directory of a bigram table for copies, or built-in")
    parser.add_argument("--prompts", type=int, default=64, help="number of prompts of --inputs")
    parser.add_argument("--screened", type=int, default=24, help="prompts of --choose for ranking")
    parser.add_argument("--chosen", type=int, default=24, help="prompts of --choose to choose by")
    parser.add_argument(
        "--candidates", type=int, default=2, help="settings of each kind to measure for choosing"
    )
    workload.add_temperatures(parser)
    parser.add_argument("--max-draft", type=int, default=10, help="most tokens of one drafter")
    parser.add_argument("--max-new", type=int, default=128, help="longest output, in tokens")
    parser.add_argument("--buckets", type=int, nargs="+", default=list(BUCKETS), help=_BUCKETS_HELP)
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each setting")
    parser.add_argument("--leniences", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    parser.add_argument("--seed", type=int, default=0, help="seed of drawn outputs")
    parser.add_argument("--grown", action="store_true", help=workload.GROWN_HELP)
    parser.add_argument(
        "--costs",
        type=float,
        nargs="+",
        help="for pw: the time of a pass of each drafter, the largest drafter first, in passes "
        "of the verifier; measured by default",
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Decoded:
    """Times, passes and outputs of decoding; arrays `[n]` of prompts.

    Attributes:
      seconds: the smallest of the repeats.
      tokens: emitted tokens.
      calls: model's name in the decoder -> its passes.
      outputs: the tokens of each prompt.
    """

    seconds: np.ndarray
    tokens: np.ndarray
    calls: Mapping[str, np.ndarray]
    outputs: Sequence[tuple[int, ...]] = ()

    @property
    def speed(self) -> Sums:
        """Tokens per second."""
        return ratio(self.tokens, self.seconds)

    def improvement(self, costs: Mapping[str, float]) -> Sums:
        """The standardised walltime improvement.

        Args:
          costs: the cost of a pass of each model, in passes of the verifier.
        """
        return ratio(self.tokens, sum(costs[name] * calls for name, calls in self.calls.items()))


def run(args: argparse.Namespace) -> Report:
    """Measures the best settings of each kind, at batch 1, in turns with the verifier alone.

    For each kind of drafting the theory ranks all lengths, K and leniences, by measured times and
    by parameters (see docs/compare.md); the first `--candidates` of each ranking are measured on
    prompts of `--choose`; the fastest, and the setting with the highest ms, are measured on
    `--inputs`. `--drafts` names the settings instead; pw then needs `--costs`.

    ms and pw: standardised walltime improvement (Cascade Speculative Drafting, section 4.1), the
    emitted tokens over all passes in passes of the verifier, by numbers of parameters and by times
    of a pass. wall: seconds of the whole call. gain: over the best single drafter by the same
    measure, minus 1. Intervals: 95 %, bootstrap over prompts.
    """
    workload.check_positive(
        args, "prompts", "screened", "chosen", "candidates", "max_draft", "max_new", "repeats"
    )
    asked = workload.read_texts(args)
    others = [] if args.drafts else [e.inputs for e in workload.read_examples(args.choose)]
    if len(asked) < 2:
        raise ValueError(f"{args.inputs} has {len(asked)} prompts, but intervals need 2: add more")
    if not args.drafts and len(others) < args.screened + args.chosen:
        raise ValueError(
            f"{args.choose} has {len(others)} prompts, but --screened and --chosen need "
            f"{args.screened + args.chosen}: add lines or lower these numbers"
        )
    plans(leniences=args.leniences, max_draft=1, levels=2)  # checks the arguments
    if args.drafts and not any(text.isdigit() for text in args.drafts):
        raise ValueError(
            f"--drafts must have a number of tokens of one drafter, to compare with, got "
            f"{args.drafts}"
        )
    models = _load(args)
    rows = []
    for temperature in args.temperatures:
        spare_maps()
        found = _Bench(args, models, temperature).rows(others, asked)
        for row in found:  # each takes an hour: an interruption must not lose rows
            print(json.dumps(row), flush=True)
        rows += found
    sizes = {name: _size(model) for name, model in models.items()}
    chosen = (
        "of each, the fastest setting and, if it differs, the highest ms, chosen on other prompts"
    )
    notes = [
        f"kind: {'as given by --drafts' if args.drafts else chosen}.",
        "ms, pw: tokens over passes of all models, by parameters and by times of a pass; wall: "
        "calls, with prompts.",
        "gain: over the best single drafter by the same measure, minus 1; its interval is that of "
        "wall_gain. same: prompts with the verifier's own output.",
    ]
    return Report(rows, _COLUMNS, notes, {"parameters": sizes, "prompts": len(asked)})


def _load(args: argparse.Namespace) -> dict[str, TextModel]:
    """The verifier, then the drafters, the largest first."""
    pair = specjax.load_pair(drafter=args.drafter, verifier=args.verifier)
    more = [load_text_model(path) for path in args.drafters]
    ordered = sorted([pair.drafter, *more], key=_size, reverse=True)
    verifier = workload.grown(pair.verifier) if args.grown else pair.verifier
    names = ["drafter", *(f"drafter_{i + 2}" for i in range(len(more)))]
    drafters = dict(zip(names, ordered, strict=True))
    specjax.Models(verifier=verifier, **drafters)  # checks the vocabularies
    if args.costs is not None and len(args.costs) != len(drafters):
        raise ValueError(
            f"--costs has {len(args.costs)} numbers, but there are {len(drafters)} drafters: give "
            "a number for each, the largest drafter first"
        )
    return {"verifier": verifier, **drafters}


def _size(model: TextModel) -> int:
    return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(model.params))


def kind_of(setting: Setting) -> str:
    """The kind of drafting of a setting."""
    if setting.is_alone:
        return _ALONE
    plan = Plan.of(setting)
    made = setting.made("drafting")
    trees = made is not None and made.default_verification.walks_trees
    models = {0: "", 1: _SINGLE, 2: "two drafters"}[len(plan.models)]
    drafters = " and ".join(filter(None, (models, "copies" if plan.copies else "")))
    return f"{drafters}, trees" if trees else drafters


@dataclasses.dataclass(frozen=True, eq=False)
class _Bench:
    """The comparison at a temperature."""

    args: argparse.Namespace
    models: Mapping[str, TextModel]
    temperature: float

    @property
    def alone(self) -> Setting:
        """The verifier alone."""
        return Setting(method=VERIFIER_ALONE, temperature=self.temperature)

    def decoder(self, setting: Setting) -> Decoder:
        """A decoder for one prompt at a time."""
        sizes = {"max_new_tokens": self.args.max_new, "buckets": tuple(self.args.buckets)}
        return setting.decoder(self.models, batch_size=1, **sizes)

    def rows(self, others: list[str], asked: list[str]) -> list[dict[str, Any]]:
        """The lines of the table."""
        args, alone = self.args, self.decoder(self.alone)
        other = [alone.encode(text, f"prompt {i}") for i, text in enumerate(others)]
        prompts = [alone.encode(text, f"prompt {i}") for i, text in enumerate(asked)]
        chosen, costs = self._given() if args.drafts else self._chosen(alone, other)
        spare_maps()
        found = self._measure([self.alone, *chosen], prompts)
        singles = [one for one in chosen if kind_of(one) == _SINGLE and Plan.of(one).is_single]
        return [self._row(one, found, singles, costs) for one in [self.alone, *chosen]]

    def _given(self) -> tuple[list[Setting], dict[str, dict[str, float]]]:
        """The settings of `--drafts`, and the costs of passes."""
        settings = [
            Setting(max_draft=int(text), temperature=self.temperature)
            if text.isdigit()
            else Setting(drafting=text, temperature=self.temperature)
            for text in self.args.drafts
        ]
        costs = {"ms": self._sizes}
        if self.args.costs is not None:
            costs["pw"] = dict(zip(self.models, [1.0, *self.args.costs], strict=True))
        return settings, costs

    @property
    def _sizes(self) -> dict[str, float]:
        """The parameters of each model, in verifiers."""
        largest = _size(self.models["verifier"])
        return {name: _size(model) / largest for name, model in self.models.items()}

    def _chosen(
        self, alone: Decoder, other: Sequence[np.ndarray]
    ) -> tuple[list[Setting], dict[str, dict[str, float]]]:
        """The best settings of each kind on other prompts, and the costs of passes."""
        by_kind, costs = self._candidates(alone, other[: self.args.screened])
        candidates = [one for group in by_kind.values() for one in group]
        part = other[self.args.screened :][: self.args.chosen]
        tried = self._measure([self.alone, *candidates], part)
        chosen: list[Setting] = []
        for group in by_kind.values():
            fastest = max(group, key=lambda one: tried[one].speed.value)
            most = max(group, key=lambda one: self._improvement(one, tried, costs["ms"]).value)
            chosen += dict.fromkeys((fastest, most))
        return chosen, costs

    def _candidates(
        self, alone: Decoder, prompts: Sequence[np.ndarray]
    ) -> tuple[dict[str, list[Setting]], dict[str, dict[str, float]]]:
        """The best expected settings of each kind, by time and by ms; and the costs of passes."""
        args, drafters = self.args, list(self.models)[1:]
        weighed = plans(
            drafters,
            max_draft=args.max_draft,
            leniences=args.leniences if self.temperature else (1.0,),
            levels=3 if len(drafters) > 1 else 2,
            bigram=args.bigram,
        )
        weighed = [dataclasses.replace(one, temperature=self.temperature) for one in weighed]
        tables = {table for one in weighed for table in Plan.of(one).tables}
        texts = {sampling_key(self.alone): written(alone, prompts, seed=args.seed)}
        print("measuring the cost of passes ...", flush=True)
        first: list[Any] = list(prompts[:1])
        times = measure_times(
            self.models,
            sorted(tables, key=str),
            powers_of_two(args.max_draft + 1),
            rows=1,
            prompt_length=max(1, round(float(np.mean([len(prompt) for prompt in prompts])))),
            call=lambda: alone(first, max_new_tokens=1, progress=False),
        )
        sizes = self._sizes
        steps = {name: time / times.steps["verifier"] for name, time in times.steps.items()}
        if args.costs is not None:
            steps = dict(zip(self.models, [1.0, *args.costs], strict=True))
        found: dict[str, list[Setting]] = {}
        for seen in (times, counted(sizes, list(tables))):
            estimates = expect(self.models, texts, weighed, times=seen)
            speed = {one.setting: one.speedup for one in estimates}
            taken: dict[str, int] = {}
            for one in sorted(weighed, key=lambda one: -speed[one]):
                kind = kind_of(one)
                taken[kind] = taken.get(kind, 0) + 1
                if taken[kind] <= args.candidates:
                    group = found.setdefault(kind, [])
                    group += [one] * (one not in group)
        kinds = sorted(found, key=lambda kind: (len(kind), kind))
        return {kind: found[kind] for kind in kinds}, {"ms": sizes, "pw": steps}

    def _measure(
        self, wanted: Sequence[Setting], prompts: Sequence[np.ndarray]
    ) -> dict[Setting, Decoded]:
        """Decodes each prompt with each setting in turns."""
        sides = {}
        for one in wanted:
            print(f"preparing: {one.described()} ...", flush=True)
            decoder = self.decoder(one)

            def decode(i: int, decoder: Decoder = decoder) -> tuple[float, Any]:
                given: list[Any] = [prompts[i]]
                return timed(lambda: decoder(given, seed=self.args.seed, ids=[i], progress=False))

            for i in range(len(prompts)):
                decode(i)  # compiles
            sides[one] = decode
        least: dict[Setting, np.ndarray] = {one: np.full(len(prompts), np.inf) for one in wanted}
        results: dict[Setting, dict[int, Any]] = {one: {} for one in wanted}
        for one, _, i, (spent, result) in in_turns(sides, range(len(prompts)), self.args.repeats):
            least[one][i] = min(least[one][i], spent)
            results[one][i] = result
        return {one: _decoded(least[one], results[one]) for one in wanted}

    def _improvement(
        self, one: Setting, found: Mapping[Setting, Decoded], costs: Mapping[str, float]
    ) -> Sums:
        """The improvement by costs under the names that a decoder of this setting uses."""
        # A pair counts its drafter under this name.
        named = {**costs, "drafter": costs.get(one.drafter, 0.0)}
        own = {name: named[name] for name in found[one].calls}
        return found[one].improvement(own)

    def _row(
        self,
        one: Setting,
        found: Mapping[Setting, Decoded],
        singles: Sequence[Setting],
        costs: Mapping[str, Mapping[str, float]],
    ) -> dict[str, Any]:
        own, alone, bootstrap = found[one], found[self.alone], Bootstrap(seed=self.args.seed)
        row: dict[str, Any] = {
            "temperature": self.temperature,
            "kind": kind_of(one),
            "drafts": one.described(without=("rule", "verification", "temperature")),
            "tokens_per_call": ratio(own.tokens, own.calls["verifier"]).value,
            # Drawn texts differ by chance.
            "same": None
            if self.temperature
            else sum(a == b for a, b in zip(own.outputs, alone.outputs, strict=True)),
        }
        for name, of_all in costs.items():
            best = max(self._improvement(x, found, of_all).value for x in singles)
            row |= _named(name, bootstrap.interval(self._improvement(one, found, of_all)))
            row[f"{name}_gain"] = row[name] / best - 1.0
        single = max(singles, key=lambda x: found[x].speed.value)
        row |= _named("wall", bootstrap.difference(own.speed, alone.speed, np.divide))
        gain = bootstrap.difference(own.speed, found[single].speed, np.divide)
        names = ("wall_gain", "gain_low", "gain_high")
        return row | {name: x - 1.0 for name, x in zip(names, gain[:3], strict=True)}


def counted(sizes: Mapping[str, float], tables: Sequence[tuple[str, str | None]]) -> PassTimes:
    """Times for which a pass over any number of tokens counts once, and nothing else counts."""
    costs = {
        (one, other): Costs((1,), (1, 2), (sizes.get(other or "", 0.0),), ((sizes[one],) * 2,))
        for one, other in tables
    }
    return PassTimes(1, sizes, dict.fromkeys(sizes, 0.0), 0.0, costs)


def _decoded(seconds: np.ndarray, results: Mapping[int, Any]) -> Decoded:
    infos = [results[i].info.per_row for i in range(len(seconds))]
    return Decoded(
        seconds=seconds,
        tokens=np.asarray([int(info.emitted.sum()) for info in infos]),
        calls={
            name: np.asarray([int(info.calls[name].sum()) for info in infos])
            for name in infos[0].calls
        },
        outputs=[tuple(map(int, results[i].tokens[0])) for i in range(len(seconds))],
    )


def _named(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this benchmark; see `benchmarks.command.main`."""
    return command.main(__file__, HELP, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
