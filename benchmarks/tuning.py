"""How often the choice for a demand meets it on texts that the choice has not seen."""

import argparse
import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import specjax
from benchmarks import command
from specjax.cli.bench import workload
from specjax.cli.bench.report import Report
from specjax.evaluation import Bootstrap
from specjax.runs.run_directory import RunDirectory
from specjax.runs.store import Store
from specjax.study.choose import Search, halve
from specjax.study.demand import NOT_MET, Counts, Demand, Judge, verdict
from specjax.study.measure import Bench, Measured, Measuring, measure
from specjax.study.scores import RELATIVE, Scores, score
from specjax.study.texts import read_texts
from specjax.text.setting import VERIFIER_ALONE, Setting, named_method

HELP = "how often the choice for a demand meets it on held-out texts"
# Each rule is a program to compile; strengths are traced.
STRENGTHS: dict[str, Sequence[float | None]] = {
    "Lossless": (None,),
    "OPT": (0.0, 0.2, 0.5),
    "TokenV3": (0.3, 0.6, 0.9),
    "Lossy": (0.3, 0.7),
}
DEMANDS = (
    "quality >= 20",
    "as good as the verifier",
    "latency <= 0.9 of the verifier",
    "nats per token <= 0.1",
)
_COLUMNS = ("demand", "met", "missed", "cannot_be_met", "speedup", "met_naive", "speedup_naive")
_NOTES = (
    "Each seed splits the texts in two halves. met, missed, speedup (over the verifier alone): on",
    "the half that the choice has not seen. naive: the fastest setting that meets the demand on "
    "the other half, without rounds and without a margin.",
)
_ROUNDS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the texts, the demands and the store."""
    parser.add_argument("--inputs", required=True, help="a file of texts, a text per line")
    parser.add_argument("--references", required=True, help="a file of their references")
    parser.add_argument(
        "--store", required=True, help="a directory for measurements, which are made once"
    )
    parser.add_argument("--texts", type=int, default=300, help="number of first texts")
    parser.add_argument("--demands", nargs="+", default=list(DEMANDS))
    parser.add_argument("--seeds", type=int, default=10, help="number of splits")
    parser.add_argument("--draft", type=int, default=5, help="G")
    parser.add_argument("--confidence", type=float, default=0.9, help="see `study.choose.Search`")
    parser.add_argument("--resamples", type=int, default=400)


def run(args: argparse.Namespace) -> Report:
    """Measures all settings on all texts once, then splits the texts repeatedly."""
    workload.check_positive(args, "texts", "seeds", "draft")
    demands = [Demand.of(text) for text in args.demands]
    if args.texts < 16:
        raise ValueError(f"--texts must be at least 16, got {args.texts}")
    bootstrap = Bootstrap(resamples=args.resamples)
    how = Measuring(num_samples=1, latency_limit=args.texts, repeats=1, bootstrap=bootstrap)
    texts = read_texts(args.inputs, references=args.references, limit=args.texts)
    settings = [Setting(method=VERIFIER_ALONE)] + [
        Setting(rule=named_method(rule, strength).rule, max_draft=args.draft)
        for rule, strengths in STRENGTHS.items()
        for strength in strengths
    ]
    pair = specjax.load_pair()
    options: dict[str, Any] = {"max_new_tokens": 64, "buckets": (48, 96)}
    decoder = settings[0].decoder(pair.named, batch_size=1, **options)
    tokens = [decoder.encode(example.inputs) for example in texts.examples]
    bench = Bench(pair.named, texts, tokens, how, options)
    found = _measured(settings, bench, Path(args.store).expanduser())
    outcomes: dict[Demand, list[dict[str, Any]]] = {demand: [] for demand in demands}
    for seed in range(args.seeds):
        split = Split(found, bench, seed)
        for demand in demands:
            outcomes[demand].append(split.outcome(demand, args.confidence))
        print(f"seed {seed} ...", flush=True)
    rows = [_row(demand.described(), told) for demand, told in outcomes.items()]
    return Report(rows, _COLUMNS, _NOTES, summary={"texts": args.texts, "seeds": args.seeds})


def _measured(
    settings: Sequence[Setting], bench: Bench, directory: Path
) -> dict[Setting, Measured]:
    """The measurements of settings, made now or by an earlier call."""
    inputs = [example.inputs for example in bench.texts.examples]
    # The decoder also describes its models and the machine.
    about = bench.decoder(settings[0], 1).describe(), bench.measuring.describe()
    told = json.dumps((inputs, *about), sort_keys=True, default=repr)
    found = {}
    with RunDirectory(directory, config_name="tuning.json", makes=("measured",)) as run:
        run.claim({"measured": hashlib.sha256(told.encode()).hexdigest()})
        store = Store(run, "measured")
        for setting in settings:
            if setting.key not in store:
                print(f"{setting.described()} ...", flush=True)
                store.put(setting.key, *measure(setting, bench).to_record())
            record = store.get(setting.key)
            assert record is not None
            found[setting] = Measured.of_record(record.value, record.arrays)
    return found


class Split:
    """Texts in two halves: those of the rounds, and the held-out half.

    Args:
      found: the measurements of each setting, the verifier alone first; all texts are timed.
      bench: all texts.
      seed: the seed of the split.
    """

    def __init__(self, found: Mapping[Setting, Measured], bench: Bench, seed: int):
        self._found, self._bench = found, bench
        self._settings = list(found)
        order = np.random.default_rng(seed).permutation(len(bench.prompts))
        half = len(order) // 2
        self._ends = Search(rounds=_ROUNDS).ends(len(order), 2)
        self._seen, self._held_out = order[:half], order[half:]
        self._scored: dict[tuple[Setting, bytes], Scores] = {}

    def outcome(self, demand: Demand, confidence: float) -> dict[str, Any]:
        """The choice for a demand, and whether it meets it on the held-out texts."""
        alone, *others = self._settings
        rounds = [Counts(end, end) for end in self._ends]
        held_out = Counts(len(self._held_out), len(self._held_out))
        judge = Judge(demand, "bleu", confidence, rounds[-1], held_out)
        choice, _ = halve(others, alone, self._look, judge, rounds)
        seen = {setting: self._scores(setting, self._seen) for setting in self._settings}
        naive = naive_choice(demand, seen, alone, judge, rounds[-1])
        told: dict[str, Any] = {"answer": choice.answer, "setting": choice.setting, "naive": naive}
        for name, setting in (("", choice.setting), ("_naive", naive)):
            met, speedup = (None, None) if setting is None else self._on_held_out(demand, setting)
            told |= {f"met{name}": met, f"speedup{name}": speedup}
        return told

    def _look(self, setting: Setting, number: int) -> Scores:
        return self._scores(setting, self._seen[: self._ends[number]])

    def _on_held_out(self, demand: Demand, setting: Setting) -> tuple[bool, float | None]:
        scores, alone = (self._scores(one, self._held_out) for one in (setting, self._settings[0]))
        parts = verdict(demand, setting, scores, alone, "bleu")
        relative = scores.figures[RELATIVE]["value"]
        return all(part["met"] for part in parts), None if relative is None else 1.0 / relative

    def _scores(self, setting: Setting, rows: np.ndarray) -> Scores:
        key = (setting, rows.tobytes())
        if key not in self._scored:
            whole, bench = self._found[setting], self._bench
            part = dataclasses.replace(
                bench,
                texts=bench.texts.in_order(rows.tolist()),
                prompts=[bench.prompts[i] for i in rows],
                measuring=dataclasses.replace(bench.measuring, latency_limit=len(rows)),
            )
            self._scored[key] = score(setting, _rows_of(whole, rows), part)
        return self._scored[key]


def naive_choice(
    demand: Demand,
    seen: Mapping[Setting, Scores],
    alone: Setting,
    judge: Judge,
    texts: Counts,
) -> Setting | None:
    """The best setting whose figures meet the demand, as if without noise; None if none does.

    Args:
      demand: the demand.
      seen: the figures of all settings, with the verifier alone.
      alone: the verifier alone.
      judge: judges settings by their figures.
      texts: the texts of the figures.
    """
    fit = [
        setting
        for setting, scores in seen.items()
        if all(part["met"] for part in verdict(demand, setting, scores, seen[alone], "bleu"))
    ]
    judged = judge.judge(seen, alone, texts)
    return max(fit, key=lambda setting: judged[setting].gain, default=None)


def _rows_of(whole: Measured, rows: np.ndarray) -> Measured:
    """The measurements of some of the texts, one at a time."""

    def of(times: Any) -> Any:
        return dataclasses.replace(
            times, seconds=times.seconds[..., rows], tokens=times.tokens[..., rows]
        )

    return dataclasses.replace(
        whole,
        rows=[[lines[i] for i in rows] for lines in whole.rows],
        times=of(whole.times),
        verifier_times=None if whole.verifier_times is None else of(whole.verifier_times),
    )


def _row(demand: str, told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def mean(name: str) -> float | None:
        values = [one[name] for one in told if one[name] is not None]
        return float(np.mean(values)) if values else None

    chosen = {
        name: [None if one[key] is None else one[key].described() for one in told]
        for name, key in (("chosen", "setting"), ("chosen_naive", "naive"))
    }
    return {
        "demand": demand,
        "met": sum(one["met"] is True for one in told),
        "missed": sum(one["met"] is False for one in told),
        "cannot_be_met": sum(one["answer"] == NOT_MET for one in told),
        "speedup": mean("speedup"),
        "met_naive": sum(one["met_naive"] is True for one in told),
        "speedup_naive": mean("speedup_naive"),
        **chosen,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this benchmark; see `benchmarks.command.main`."""
    return command.main(__file__, HELP, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
