"""Compares ways to draft: one drafter, cascades, and copies from the text."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import specjax
from benchmarks import command
from benchmarks.spare_maps import spare_maps
from specjax import Decoder, TextModel
from specjax.cli import bench
from specjax.cli.report import Report
from specjax.evaluation import Bootstrap
from specjax.evaluation.bootstrap import Interval, Sums, ratio
from specjax.text import load_text_model
from specjax.text.engine import BUCKETS
from specjax.text.setting import VERIFIER_ALONE, Setting

HELP = "one drafter, cascades, and copies from the text: standardised and wall-time speed-ups"

_COLUMNS = (
    "temperature", "drafts", "tokens_per_call", "ms", "ms_low", "ms_high", "ms_gain",
    "wall", "wall_low", "wall_high", "wall_gain", "gain_low", "gain_high", "same",
)  # fmt: skip
_BUCKETS_HELP = "lengths that prompts are padded to; each is compiled for each decoder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the models, the prompts and the sizes."""
    command.add_pair(parser)
    parser.add_argument("--drafters", nargs="*", default=[], help="directories of further drafters")
    parser.add_argument(
        "--drafts",
        nargs="+",
        required=True,
        help="numbers of tokens of one drafter, at least one, and texts such as "
        "'Cascade(((1, 3), (0, 1)), last=Lookup(), width=8)'",
    )
    parser.add_argument("--prompts", type=int, default=64, help="number of prompts of --inputs")
    command.add_temperatures(parser)
    parser.add_argument("--max-new", type=int, default=128, help="longest output, in tokens")
    parser.add_argument("--buckets", type=int, nargs="+", default=list(BUCKETS), help=_BUCKETS_HELP)
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each setting")
    parser.add_argument("--grown", action="store_true", help=command.GROWN_HELP)


@dataclasses.dataclass(frozen=True, eq=False)
class Decoded:
    """For each prompt the least seconds, the tokens, the passes of each model, and the output."""

    seconds: np.ndarray
    tokens: np.ndarray
    calls: Mapping[str, np.ndarray]
    outputs: Sequence[tuple[int, ...]] = ()

    @property
    def speed(self) -> Sums:
        """Tokens per second."""
        return ratio(self.tokens, self.seconds)

    def improvement(self, costs: Mapping[str, float]) -> Sums:
        """The standardised walltime improvement, by costs in passes of the verifier."""
        return ratio(self.tokens, sum(costs[name] * calls for name, calls in self.calls.items()))


def run(args: argparse.Namespace) -> Report:
    """Measures the settings of `--drafts`, at batch 1, in turns with the verifier alone.

    ms: standardised walltime improvement (Cascade Speculative Drafting, section 4.1), the emitted
    tokens over all passes in passes of the verifier, by numbers of parameters. wall: seconds of the
    whole call. gain: over the best single drafter by the same measure, minus 1. Intervals: 95 %,
    bootstrap over prompts.
    """
    command.check_positive(args, "prompts", "max_new", "repeats")
    asked = command.read_texts(args)
    if len(asked) < 2:
        raise ValueError(f"{args.inputs} has {len(asked)} prompts, but intervals need 2: add more")
    if not any(text.isdigit() for text in args.drafts):
        raise ValueError(
            f"--drafts must have a number of tokens of one drafter, to compare with, got "
            f"{args.drafts}"
        )
    models = _load(args)
    rows = []
    for temperature in args.temperatures:
        spare_maps()
        found = _Bench(args, models, temperature).rows(asked)
        for row in found:  # each takes an hour: an interruption must not lose rows
            print(json.dumps(row), flush=True)
        rows += found
    sizes = {name: model.size for name, model in models.items()}
    notes = [
        "ms: tokens over passes of all models, by parameters; wall: calls, with prompts.",
        "gain: over the best single drafter by the same measure, minus 1; its interval is that of "
        "wall_gain. same: prompts with the verifier's own output.",
    ]
    return Report(rows, _COLUMNS, notes, {"parameters": sizes, "prompts": len(asked)})


def _load(args: argparse.Namespace) -> dict[str, TextModel]:
    """The verifier, then the drafters, the largest first."""
    pair = specjax.load_pair(drafter=args.drafter, verifier=args.verifier)
    more = [load_text_model(path) for path in args.drafters]
    ordered = sorted([pair.drafter, *more], key=lambda model: model.size, reverse=True)
    verifier = command.grown(pair.verifier) if args.grown else pair.verifier
    names = ["drafter", *(f"drafter_{i + 2}" for i in range(len(more)))]
    drafters = dict(zip(names, ordered, strict=True))
    specjax.Pair(verifier=verifier, **drafters)  # checks the vocabularies
    return {"verifier": verifier, **drafters}


@dataclasses.dataclass(frozen=True, eq=False)
class _Bench:
    """The comparison at a temperature."""

    args: argparse.Namespace
    models: Mapping[str, TextModel]
    temperature: float

    @property
    def alone(self) -> Setting:
        return Setting(method=VERIFIER_ALONE, temperature=self.temperature)

    def decoder(self, setting: Setting) -> Decoder:
        """A decoder for one prompt at a time."""
        sizes = {"max_new_tokens": self.args.max_new, "buckets": tuple(self.args.buckets)}
        return Decoder(self.models, setting, batch_size=1, **sizes)

    def rows(self, asked: list[str]) -> list[dict[str, Any]]:
        """The lines of the table."""
        alone = self.decoder(self.alone)
        prompts = [alone.encode(text, f"prompt {i}") for i, text in enumerate(asked)]
        singles = [
            Setting(max_draft=int(text), temperature=self.temperature)
            for text in self.args.drafts
            if text.isdigit()
        ]
        others = [
            Setting(drafting=text, temperature=self.temperature)
            for text in self.args.drafts
            if not text.isdigit()
        ]
        settings = [self.alone, *singles, *others]
        found = self._measure(settings, prompts)
        return [self._row(one, found, singles) for one in settings]

    @property
    def _sizes(self) -> dict[str, float]:
        """The parameters of each model, in verifiers."""
        largest = self.models["verifier"].size
        return {name: model.size / largest for name, model in self.models.items()}

    def _measure(
        self, wanted: Sequence[Setting], prompts: Sequence[np.ndarray]
    ) -> dict[Setting, Decoded]:
        chunks, decoders = [[tokens] for tokens in prompts], {}
        for one in wanted:
            print(f"preparing: {one.described()} ...", flush=True)
            decoders[one] = self.decoder(one)
            for chunk in chunks:
                decoders[one](chunk, progress=False)  # compiles
        sides = bench.measure(decoders, chunks, self.args.repeats)
        return {one: _collect(side) for one, side in sides.items()}

    def _improvement(self, one: Setting, found: Mapping[Setting, Decoded]) -> Sums:
        """The improvement by sizes under the names that a decoder of this setting uses."""
        sizes = self._sizes
        # A pair counts its drafter under this name.
        named = {**sizes, "drafter": sizes.get(one.drafter, 0.0)}
        own = {name: named[name] for name in found[one].calls}
        return found[one].improvement(own)

    def _row(
        self, one: Setting, found: Mapping[Setting, Decoded], singles: Sequence[Setting]
    ) -> dict[str, Any]:
        own, alone, bootstrap = found[one], found[self.alone], Bootstrap()
        row: dict[str, Any] = {
            "temperature": self.temperature,
            "drafts": one.described(without=("rule", "verification", "temperature")),
            "tokens_per_call": ratio(own.tokens, own.calls["verifier"]).value,
            # Drawn texts differ by chance.
            "same": None
            if self.temperature
            else sum(a == b for a, b in zip(own.outputs, alone.outputs, strict=True)),
        }
        best = max(self._improvement(x, found).value for x in singles)
        row |= _columns("ms", bootstrap.interval(self._improvement(one, found)))
        row["ms_gain"] = row["ms"] / best - 1.0
        single = max(singles, key=lambda x: found[x].speed.value)
        row |= _columns("wall", bootstrap.difference(own.speed, alone.speed, np.divide))
        gain = bootstrap.difference(own.speed, found[single].speed, np.divide)
        names = ("wall_gain", "gain_low", "gain_high")
        return row | {name: x - 1.0 for name, x in zip(names, gain[:3], strict=True)}


def _collect(side: bench.Side) -> Decoded:
    infos = [result.info.per_row for result in side.results]
    return Decoded(
        seconds=side.times.seconds[0].min(axis=0),
        tokens=side.times.tokens[0],
        calls={
            name: np.asarray([int(info.calls[name].sum()) for info in infos])
            for name in infos[0].calls
        },
        outputs=[tuple(map(int, result.tokens[0])) for result in side.results],
    )


def _columns(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


main = command.program(__file__, HELP, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
