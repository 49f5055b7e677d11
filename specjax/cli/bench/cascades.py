"""Kinds of drafting side by side: one drafter, two, and copies from the text with each."""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

import specjax
from specjax import Decoder, TextModel
from specjax.cli.bench import pairs
from specjax.cli.bench.report import Report
from specjax.memory import spare_maps
from specjax.text import BUCKETS, load_text_model
from specjax.tuning import (
    ALONE,
    Hierarchy,
    Measured,
    Screening,
    SpeedUp,
    Tuning,
    expect,
    hierarchies,
    measure,
    screening_of,
    speedup,
    tables_of_copies,
)
from specjax.types import Params

HELP = "one drafter, two, and copies from the text with each: standardised and wall-time speed-ups"

_COLUMNS = (
    "temperature", "kind", "drafts", "tokens_per_call", "ms", "ms_low", "ms_high", "ms_gain",
    "pw", "pw_gain", "wall", "wall_low", "wall_high", "wall_gain", "gain_low", "gain_high", "same",
)  # fmt: skip
_SINGLE = "one drafter"
_BUCKETS_HELP = "lengths that prompts are padded to; each one used is compiled for each decoder"


def _kinds(one: Hierarchy) -> str:
    """Which kind of drafting it is."""
    if not one.lengths:
        return "verifier alone"
    models = {0: "", 1: _SINGLE, 2: "two drafters"}[len(one.models)]
    return " and ".join(filter(None, (models, "copies" if one.copies else "")))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the models, the prompts and the sizes."""
    pairs.add_pair(parser)
    parser.add_argument("--drafters", nargs="*", default=[], help="directories of further drafters")
    parser.add_argument(
        "--choose", required=True, help="a text file of other prompts, on which settings are chosen"
    )
    parser.add_argument("--bigram", help="directory of a bigram table for copies; or built-in")
    parser.add_argument("--prompts", type=int, default=64, help="prompts of --inputs")
    parser.add_argument("--screened", type=int, default=24, help="prompts of --choose to screen")
    parser.add_argument("--chosen", type=int, default=24, help="others of --choose to choose by")
    parser.add_argument(
        "--candidates", type=int, default=2, help="the best expected of each kind to choose from"
    )
    pairs.add_temperatures(parser)
    parser.add_argument("--max-draft", type=int, default=10, help="most tokens of one drafter")
    parser.add_argument("--max-new", type=int, default=128, help="longest output, in tokens")
    parser.add_argument("--buckets", type=int, nargs="+", default=list(BUCKETS), help=_BUCKETS_HELP)
    parser.add_argument("--repeats", type=int, default=3, help="times that each is measured")
    parser.add_argument("--leniences", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    parser.add_argument("--seed", type=int, default=0, help="of drawn outputs")
    parser.add_argument("--grown", action="store_true", help=pairs.GROWN_HELP)
    parser.add_argument(
        "--costs",
        type=float,
        nargs="+",
        help="for pw: the time of a pass of each drafter, the largest first, in passes of the "
        "verifier; measured here if left out",
    )


def run(args: argparse.Namespace) -> Report:
    """Measures the best of each kind, at batch 1, in turns with the verifier alone.

    For each kind of drafting the theory ranks all lengths, K and leniences, by measured times and
    by parameters (see docs/choosing_drafts.md); `--candidates` of each ranking are measured on
    prompts of `--choose`, and the fastest of them, and the one with the highest ms, on those of
    `--inputs`. ms and pw: standardised walltime improvement (Cascade Speculative Drafting, section
    4.1), the emitted tokens over all passes in passes of the verifier, by numbers of parameters and
    by times of one pass. wall: seconds of the whole call. gain: over the best single drafter by the
    same measure, minus 1. Intervals: 95 %, bootstrap over prompts.
    """
    pairs.check_positive(
        args, "prompts", "screened", "chosen", "candidates", "max_draft", "max_new", "repeats"
    )
    asked = pairs.read_texts(args)
    others = [e.inputs for e in pairs.read_examples(args.choose)]
    if len(asked) < 2:
        raise ValueError(f"{args.inputs} has {len(asked)} prompts, but intervals need 2: add some")
    if len(others) < args.screened + args.chosen:
        raise ValueError(
            f"{args.choose} has {len(others)} prompts, but --screened and --chosen ask for "
            f"{args.screened + args.chosen}: add lines or ask for fewer"
        )
    tunings = {
        temperature: Tuning(
            temperature=temperature,
            max_new_tokens=args.max_new,
            screened=args.screened,
            measured=max(2, args.chosen),
            max_draft=args.max_draft,
            leniences=args.leniences,
            bigram=args.bigram,
            repeats=args.repeats,
            seed=args.seed,
            levels=3,
        )
        for temperature in args.temperatures
    }
    models = _load(args)
    rows = []
    for temperature, tuning in tunings.items():
        bench = _Bench(args, models, tuning)
        spare_maps()
        found = bench.rows(temperature, others, asked)
        for row in found:  # each is an hour's work, of which a stop should lose none
            print(json.dumps(row), flush=True)
        rows += found
    sizes = {name: _size(model) for name, model in models.items()}
    notes = [
        "kind: of each, the fastest and, if another, the one with the highest ms, chosen on other "
        "prompts.",
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
    verifier = pairs.grown(pair.verifier) if args.grown else pair.verifier
    drafters = {f"drafter_{i + 1}": model for i, model in enumerate(ordered)}
    specjax.Models(verifier=verifier, **drafters)  # one vocabulary
    if args.costs is not None and len(args.costs) != len(drafters):
        raise ValueError(
            f"--costs has {len(args.costs)} numbers, but there are {len(drafters)} drafters: give "
            "one for each, the largest drafter first"
        )
    return {"verifier": verifier, **drafters}


def _size(model: TextModel) -> int:
    return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(model.params))


@dataclasses.dataclass(frozen=True, eq=False)
class _Bench:
    """What is compared at one temperature."""

    args: argparse.Namespace
    models: Mapping[str, TextModel]
    tuning: Tuning

    @property
    def _options(self) -> dict[str, Any]:
        return {**self.tuning.decoding, "buckets": tuple(self.args.buckets)}

    def rows(self, temperature: float, others: list[str], asked: list[str]) -> list[dict[str, Any]]:
        """The lines of the table."""
        alone = Decoder(self.models["verifier"], **self._options)
        other = [alone.encode(text, f"prompt {i}") for i, text in enumerate(others)]
        prompts = [alone.encode(text, f"prompt {i}") for i, text in enumerate(asked)]
        tables = tables_of_copies(self.models["verifier"], self.tuning.bigram)
        screened = self.args.screened
        screening = screening_of(self.models, alone, other[:screened], tables, self.tuning)
        costs = self._costs(screening)
        by_kind = self._candidates(screening, costs["ms"], tables)
        candidates = [one for group in by_kind.values() for one in group]
        tried = self._measure([ALONE, *candidates], other[screened:][: self.args.chosen])
        chosen: list[Hierarchy] = []
        for group in by_kind.values():
            fastest = max(group, key=lambda one: speedup(tried[one], tried[ALONE]).value)
            least = max(
                group, key=lambda one: improvement(tried[one], self._named(one, costs["ms"]))
            )
            chosen += dict.fromkeys((fastest, least))
        spare_maps()
        found = self._measure([ALONE, *chosen], prompts)
        singles = [one for one in chosen if one.is_single]
        return [self._row(temperature, one, found, singles, costs) for one in [ALONE, *chosen]]

    def _costs(self, screening: Screening) -> dict[str, tuple[float, ...]]:
        """How a pass of each model is counted, in passes of the verifier."""
        sizes = [_size(model) for model in self.models.values()]
        times = [time / screening.alone[0] for time in screening.alone]
        if self.args.costs is not None:
            times = [1.0, *self.args.costs]
        return {"ms": tuple(size / sizes[0] for size in sizes), "pw": tuple(times)}

    def _candidates(
        self, screening: Screening, sizes: tuple[float, ...], tables: Mapping[str, Params]
    ) -> dict[str, list[Hierarchy]]:
        """Of each kind the best expected, by time and by ms."""
        weighed = list(
            hierarchies(
                len(self.models) - 1,
                tuple(tables),
                max_draft=self.tuning.max_draft,
                leniences=self.tuning.used_leniences,
                levels=3 if len(self.models) > 2 else 2,
            )
        )
        # A pass over any number of tokens counts once, and nothing else does.
        counted = dataclasses.replace(
            screening,
            alone=sizes,
            passes=tuple(
                dict.fromkeys(times, size)
                for size, times in zip(sizes, screening.passes, strict=True)
            ),
            call=0.0,
            prompts=None,
        )
        found: dict[str, list[Hierarchy]] = {}
        for seen in (screening, counted):
            ranked = sorted(weighed, key=lambda one: -expect(one, seen).speedup)
            taken: dict[str, int] = {}
            for one in ranked:
                kind = _kinds(one)
                taken[kind] = taken.get(kind, 0) + 1
                if one != ALONE and taken[kind] <= self.args.candidates:
                    group = found.setdefault(kind, [])
                    group += [one] * (one not in group)
        return {kind: found[kind] for kind in sorted(found, key=lambda kind: (len(kind), kind))}

    def _measure(
        self, wanted: Sequence[Hierarchy], prompts: list[np.ndarray]
    ) -> dict[Hierarchy, Measured]:
        names, models = list(self.models), list(self.models.values())
        decoders = {
            one: one.decoder(names, models, self.tuning.bigram, **self._options) for one in wanted
        }
        return measure(
            decoders,
            prompts,
            rows=1,
            repeats=self.args.repeats,
            seed=self.args.seed,
            names=names,
            tell=lambda text: print(text, flush=True),
        )

    def _named(self, one: Hierarchy, costs: Sequence[float]) -> dict[str, float]:
        """Costs by the names that a decoder of this hierarchy counts under."""
        if len(one.lengths) > 1:
            return dict(zip(self.models, costs, strict=True))
        # A pair calls its drafter so.
        own = {"drafter": costs[one.models[0]]} if one.models else {}
        return {"verifier": costs[0], **own}

    def _row(
        self,
        temperature: float,
        one: Hierarchy,
        found: Mapping[Hierarchy, Measured],
        singles: Sequence[Hierarchy],
        costs: Mapping[str, Sequence[float]],
    ) -> dict[str, Any]:
        own, alone = found[one], found[ALONE]
        row: dict[str, Any] = {
            "temperature": temperature,
            "kind": _kinds(one),
            "drafts": one.described(list(self.models)),
            "tokens_per_call": own.tokens_per_call,
            # Drawn texts differ by chance.
            "same": None
            if temperature
            else sum(a == b for a, b in zip(own.outputs, alone.outputs, strict=True)),
        }
        for name, of_all in costs.items():
            improved = [improvement(found[x], self._named(x, of_all)) for x in singles]
            value = improvement(own, self._named(one, of_all))
            low, high = interval(own, self._named(one, of_all), self.args.seed)
            row |= {name: value, f"{name}_low": low, f"{name}_high": high}
            row[f"{name}_gain"] = value / max(improved) - 1.0
        best = max(singles, key=lambda x: speedup(found[x], alone).value)
        wall: SpeedUp = speedup(own, alone, self.args.seed)
        gain: SpeedUp = speedup(own, found[best], self.args.seed)
        row |= {f"wall{end}": x for end, x in zip(("", "_low", "_high"), wall, strict=True)}
        names = ("wall_gain", "gain_low", "gain_high")
        return row | {name: x - 1.0 for name, x in zip(names, gain, strict=True)}


def improvement(found: Measured, costs: Mapping[str, float], which: Any = slice(None)) -> Any:
    """The standardised walltime improvement.

    Args:
      found: tokens and passes, `[n]` each.
      costs: of a pass of each model, in passes of the verifier.
      which: of the n.
    """
    spent = sum(costs[name] * calls[which].sum(-1) for name, calls in found.calls.items())
    return found.tokens[which].sum(-1) / spent


def interval(found: Measured, costs: Mapping[str, float], seed: int) -> tuple[float, float]:
    """Where `improvement` lies in 95 % of bootstrap draws of the prompts."""
    count = len(found.tokens)
    draws = np.random.default_rng(seed).integers(count, size=(2000, count))
    low, high = np.quantile(improvement(found, costs, draws), (0.025, 0.975))
    return float(low), float(high)
