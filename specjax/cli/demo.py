"""`specjax demo`: decodes sample texts with a built-in pair, setting by setting."""

import argparse
import io
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.checks import require
from specjax.cli.bench import check_positive, pass_times
from specjax.cli.report import Report
from specjax.data.examples import read_examples
from specjax.errors import UserError
from specjax.evaluation import METRICS, Bootstrap, figure
from specjax.evaluation.bootstrap import pooled
from specjax.runs.run_directory import RunDirectory
from specjax.study.measure import Times, in_turns, timed
from specjax.study.plots import MARKS
from specjax.study.speedups import conclusion, round_cost, speedup, speedups, spread
from specjax.text import Decoder, Pair, Result, load_pair
from specjax.text.directories import DEFAULT_PAIR, built_in_pair
from specjax.text.passes import PassTimes
from specjax.text.results import finite
from specjax.text.setting import Setting
from specjax.types import Sampling

_CONFIG_NAME, _TABLE_NAME, _PLOT_NAME = "demo_config.json", "results.json", "quality_speed.png"
ALONE = "verifier alone"
DRAFTER = "drafter alone"
LOSSLESS = "lossless"
LOSSLESS_ADAPTIVE = "lossless, adaptive"
# Built-in pair -> its samples, their fields, and max_new_tokens.
_SAMPLES = {
    "multi30k_ende": ("samples.tsv", "en", "de", 64),
    "gsm8k": ("samples.jsonl", "question", "answer", 192),
}
_BUCKET = 48
# About how many turns the settings take at the samples.
_TURNS = 16
_NOTES = (
    "bleu: with a 95 % bootstrap interval. over_verifier: BLEU minus that of the verifier alone;",
    "its intervals cover all rows jointly (95 %). If an interval contains 0, neither setting is",
    "shown to be better. Lossless rows follow the verifier's distribution: at temperature 1 they",
    "differ from it only by chance. speedup: tokens per second over those of the verifier alone,",
    "timed in turns on the same samples, with a 95 % interval.",
)
# The wide joint intervals need more resamples than usual.
_RESAMPLES = 5000
_CAPTION = (
    "Up is better, right is faster. Bars: 95 % intervals of the speed-up, and (jointly) of the "
    "BLEU over the verifier's. Dashed lines: the verifier alone."
)
_COLUMNS = (
    "setting",
    "temperature",
    "bleu",
    "over_verifier",
    "tokens_per_second",
    "speedup",
    "tokens_per_verifier_call",
    "acceptance_rate",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "--built-in",
        default=DEFAULT_PAIR,
        choices=list(_SAMPLES),
        help="the pair: T5 models for translation, or Llama models for school mathematics",
    )
    parser.add_argument("--max-draft", type=int, default=5, help="tokens drafted per round")
    parser.add_argument("--rows", type=int, default=1, help="batch size")
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="number of seeds: the table has the median speed and the BLEU of all outputs",
    )
    parser.add_argument(
        "--output", default="demo_output", help="the directory for the results and the plot"
    )
    parser.add_argument("--show", type=int, default=3, help="number of samples to print")


def run(args: argparse.Namespace) -> int:
    """Decodes the samples with every setting, prints the table, writes the results and the plot."""
    for module in ("sacrebleu", "matplotlib"):
        require(module, "eval")
    check_positive(args, "max_draft", "rows", "repeats")
    if args.show < 0:
        raise UserError(f"--show must be at least 0, got {args.show}")
    if Path(args.output).expanduser().is_file():
        raise UserError(f"--output={args.output} is a file: choose a directory")
    makes = (_TABLE_NAME, _PLOT_NAME)
    with RunDirectory(args.output, config_name=_CONFIG_NAME, makes=makes) as output:
        sources, references = samples(args.built_in)
        pair = load_pair(args.built_in)
        decoders = _decoders(pair, args, sources)
        for name, decoder in decoders.items():
            print(f"compiling: {name} ...", flush=True)
            decoder(sources[: args.rows + 1], progress=False)  # the extra row refills a slot
        measured = {}
        for temperature in (0.0, 1.0):
            print(f"decoding at temperature {temperature:g} ...", flush=True)
            measured[temperature] = _measure(decoders, temperature, sources, args)
        print("measuring passes ...", flush=True)
        prompts = sources[: args.rows]
        times = pass_times(pair, decoders[ALONE], prompts, args.max_draft, progress=False)
        results = [row for t, runs in measured.items() for row in _rows(runs, t, references)]
        shown_rows = [{**row, **_intervals(row)} for row in results]
        print(Report(shown_rows, _COLUMNS, _NOTES).table())
        greedy = {name: run.results[0] for name, run in measured[0.0].items()}
        texts = {name: result.texts for name, result in greedy.items()}
        _show(args.show, sources, references, texts)
        if args.show:
            print(f"\n{LOSSLESS} at temperature 0, by the source of each token:")
            sampling = Sampling(0.0)
            result = decoders[LOSSLESS](sources, sampling=sampling, sources=True, progress=False)
            print(f"{result.show(min(args.show, 2))}\n{result.acceptance}")
        print()
        for temperature, runs in measured.items():
            print(_verdict(runs, temperature, times, args.max_draft))
        # A new demo may replace an old demo: it is quick to repeat.
        names = ("built_in", "max_draft", "rows", "repeats")
        output.claim({name: getattr(args, name) for name in names}, replace=True)
        output.record(command=args.command_line)
        written = _write(output, results)
    print("\nwrote " + ", ".join(map(str, written)))
    print(
        "next, with your own models and texts: specjax compare --gin.VERIFIER=LARGE "
        "--gin.DRAFTER=SMALL --gin.INPUT=TEXTS --gin.OUTPUT_DIR=RUN"
    )
    return 0


def samples(built_in: str) -> tuple[list[str], list[str]]:
    """Returns the texts of a built-in pair's samples, and their references."""
    name, inputs_field, targets_field, _ = _SAMPLES[built_in]
    file = built_in_pair(built_in) / name
    examples = read_examples(file, inputs_field=inputs_field, targets_field=targets_field)
    return [x.inputs for x in examples], [str(x.targets) for x in examples]


def _show(
    count: int, sources: list[str], references: list[str], outputs: dict[str, list[str]]
) -> None:
    """Prints the greedy outputs of the samples on which the settings differ most."""
    texts = [dict.fromkeys(of_sample) for of_sample in zip(*outputs.values(), strict=True)]
    order = sorted(range(len(texts)), key=lambda i: (-len(texts[i]), i))
    for i in order[:count]:
        print(f"\n{sources[i]}\n  reference: {references[i]}")
        for text in texts[i]:
            print(f"  {'; '.join(m for m, out in outputs.items() if out[i] == text)}: {text}")


def settings(max_draft: int) -> dict[str, Setting]:
    """Returns the settings of the demo, from the verifier's quality to the drafter's speed."""
    rules = ("OPT(0.1)", "OPT(0.2)", "OPT(0.4)", "TokenV3(0.8)")
    return {
        ALONE: Setting(method="VerifierAlone"),
        LOSSLESS: Setting(max_draft=max_draft),
        # Longer drafts where the drafter is sure.
        LOSSLESS_ADAPTIVE: Setting(max_draft=2 * max_draft, stopping="Confidence(0.4)"),
        **{rule: Setting(rule=rule, max_draft=max_draft) for rule in rules},
        DRAFTER: Setting(method="DrafterAlone"),
    }


def _decoders(pair: Pair, args: argparse.Namespace, sources: list[str]) -> dict[str, Decoder]:
    # A single bucket for all samples needs a single program for each kind of setting.
    longest = max(len(pair.verifier.tokenizer.encode(source)) for source in sources)
    shape: dict[str, Any] = {
        "batch_size": args.rows,
        "buckets": (_BUCKET * -(-longest // _BUCKET),),
        "max_new_tokens": _SAMPLES[args.built_in][-1],
    }
    return {
        name: setting.decoder(pair.named, **shape)
        for name, setting in settings(args.max_draft).items()
    }


class _Repeats(NamedTuple):
    """A setting's outputs for all samples, and the times of its turns."""

    results: list[Result]
    times: Times


def _measure(
    decoders: dict[str, Decoder], temperature: float, sources: list[str], args: argparse.Namespace
) -> dict[str, _Repeats]:
    """Decodes all samples `args.repeats` times; the settings take turns at every few samples."""
    each = args.rows * max(1, round(len(sources) / _TURNS / args.rows))
    parts = [range(i, min(i + each, len(sources))) for i in range(0, len(sources), each)]
    rows: dict[str, list[list[Any]]] = {name: [] for name in decoders}
    spent = {name: np.zeros((args.repeats, len(parts))) for name in decoders}
    tokens = {name: np.zeros((args.repeats, len(parts)), np.int64) for name in decoders}

    def side(decoder: Decoder, seed: int) -> Any:
        def decode(part: Sequence[int]) -> tuple[float, Result]:
            texts = [sources[i] for i in part]
            drawn: Any = {"sampling": Sampling(temperature), "seed": seed, "ids": part}
            return timed(lambda: decoder(texts, progress=False, **drawn))

        return decode

    for seed in range(args.repeats):
        order = list(decoders)[:: -1 if seed % 2 else 1]
        sides = {name: side(decoders[name], seed) for name in order}
        for name, _, place, (seconds, result) in in_turns(sides, parts, 1):
            if place == 0:
                rows[name].append([])
            rows[name][-1] += result.rows
            spent[name][seed, place] = seconds
            tokens[name][seed, place] = result.info.emitted
    runs = {}
    for name, several in rows.items():
        times = Times(spent[name][:, None], tokens[name])
        if temperature == 0.0:  # repeats of the same texts
            times = Times(spent[name][None], tokens[name][:1])
        runs[name] = _Repeats([Result(tuple(one)) for one in several], times)
    return runs


def _verdict(runs: dict[str, _Repeats], temperature: float, times: PassTimes, length: int) -> str:
    """What was fastest at no loss, or why drafting does not pay."""
    names = [name for name in (LOSSLESS, LOSSLESS_ADAPTIVE) if name in runs]
    gains = speedups({name: (runs[name].times, runs[ALONE].times) for name in names})
    calls = [result.info.tokens_per_verifier_call for result in runs[LOSSLESS].results]
    return conclusion(
        gains,
        where=f"at temperature {temperature:g}",
        cost=round_cost(times, length, statistics.mean(calls)),
        spread=spread([runs[ALONE].times]),
    )


def _rows(
    runs: dict[str, _Repeats], temperature: float, references: list[str]
) -> list[dict[str, Any]]:
    """The table's rows, one per setting."""
    # Over all seeds. The bootstrap resamples the inputs.
    scored = {
        name: pooled([figure(METRICS["bleu"], result.texts, references) for result in run.results])
        for name, run in runs.items()
    }
    each = Bootstrap(resamples=_RESAMPLES)
    # Bonferroni correction for the comparisons with the verifier alone.
    joint = Bootstrap(resamples=_RESAMPLES, level=1.0 - 0.05 / (2 * max(1, len(scored) - 1)))
    resampled = {name: each.replicates(sums) for name, sums in scored.items()}
    alone = scored[ALONE].value, resampled[ALONE]
    rows = []
    for name, run in runs.items():
        bleu = each.summary(scored[name].value, resampled[name])
        over = joint.summary(bleu.value - alone[0], resampled[name] - alone[1])
        calls, acceptance = (
            finite(statistics.mean(getattr(result.info, rate) for result in run.results))
            for rate in ("tokens_per_verifier_call", "acceptance_rate")
        )
        gain = speedup(run.times, runs[ALONE].times)
        rows.append(
            {
                "setting": name,
                "temperature": temperature,
                "bleu": bleu.value,
                "bleu_interval": [bleu.low, bleu.high],
                "bleu_over_verifier": over.value,
                "bleu_over_verifier_interval": [over.low, over.high],
                "tokens_per_second": float(run.times.tokens.mean(0).sum() / run.times.usual.sum()),
                "speedup": gain.value,
                "speedup_interval": [finite(gain.low), finite(gain.high)],
                "tokens_per_verifier_call": None if name == DRAFTER else calls,
                "acceptance_rate": acceptance,
            }
        )
    return rows


def _intervals(row: dict[str, Any]) -> dict[str, str | None]:
    """BLEU, its difference to the verifier's, and the speed-up, with their intervals."""
    (low, high), (least, most) = row["bleu_interval"], row["bleu_over_verifier_interval"]
    over = f"{row['bleu_over_verifier']:+.1f} [{least:+.1f}, {most:+.1f}]"
    slow, fast = row["speedup_interval"]
    faster = f"{row['speedup']:.2f}" + ("" if fast is None else f" [{slow:.2f}, {fast:.2f}]")
    return {
        "bleu": f"{row['bleu']:.1f} [{low:.1f}, {high:.1f}]",
        "over_verifier": None if row["setting"] == ALONE else over,
        "speedup": "1" if row["setting"] == ALONE else faster,
    }


def _write(output: RunDirectory, results: list[dict[str, Any]]) -> list[Path]:
    matplotlib: Any = require("matplotlib", "eval")
    matplotlib.use("Agg")
    colours = matplotlib.colormaps["cividis"]
    pyplot = require("matplotlib.pyplot", "eval")
    table = output.write(_TABLE_NAME, (json.dumps(results, indent=1) + "\n").encode())
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for axis, temperature in zip(axes, (0.0, 1.0), strict=True):
        rows = [row for row in results if row["temperature"] == temperature]
        _panel(axis, [row for row in rows if row["setting"] != DRAFTER], colours)
        # Many times faster: on the same scale it would squeeze all else.
        for row in rows:
            if row["setting"] == DRAFTER:
                note = f"{DRAFTER}: {row['bleu']:.1f} BLEU at {row['speedup']:.3g}x (not in view)"
                axis.text(0.99, 0.01, note, transform=axis.transAxes, ha="right", va="bottom")
        axis.set(title=f"temperature {temperature:g}", ylabel="BLEU")
        axis.set_xlabel("speed-up over the verifier alone")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(_CAPTION, fontsize="small")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=130)
    pyplot.close(figure)
    return [table, output.write(_PLOT_NAME, image.getvalue())]


def _panel(axis: Any, rows: list[dict[str, Any]], colours: Any) -> None:
    """Draws the settings of a temperature."""
    for i, row in enumerate(rows):
        low, high = row["bleu_over_verifier_interval"]
        difference, faster = row["bleu_over_verifier"], row["speedup"]
        slow, fast = (faster if end is None else end for end in row["speedup_interval"])
        style: dict[str, Any] = {"ls": "", "ms": 9, "lw": 1, "capsize": 3, "elinewidth": 0.8}
        # The marks differ without colours too; names beside them would cover each other.
        style |= {"marker": MARKS[i % len(MARKS)], "c": colours(0.85 * i / len(rows))}
        _, *bars = axis.errorbar(
            faster,
            row["bleu"],
            [[difference - low], [high - difference]],
            [[faster - slow], [fast - faster]],
            label=row["setting"],
            **style,
        )
        for bar in (part for several in bars for part in several):
            bar.set_alpha(0.4)
    axis.axhline(rows[0]["bleu"], c="0.7", ls="--", lw=1)
    axis.axvline(1.0, c="0.7", ls="--", lw=1)
    axis.margins(0.1)
    axis.grid(alpha=0.3)
