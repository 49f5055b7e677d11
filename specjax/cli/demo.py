"""`specjax demo`: decodes sample texts with a built-in pair, setting by setting."""

import argparse
import io
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

from specjax.checks import require
from specjax.cli.bench.report import Report
from specjax.cli.bench.workload import check_positive
from specjax.data.files import read_lines
from specjax.evaluation import METRICS, Bootstrap, figure
from specjax.evaluation.bootstrap import pooled
from specjax.runs.run_directory import RunDirectory
from specjax.study.plots import MARKS
from specjax.text import Decoder, Pair, Result, load_pair
from specjax.text.directories import DEFAULT_PAIR, built_in_pair
from specjax.text.setting import Setting
from specjax.types import Sampling

_CONFIG_NAME, _TABLE_NAME, _PLOT_NAME = "demo_config.json", "results.json", "quality_speed.png"
ALONE = "verifier alone"
DRAFTER = "drafter alone"
LOSSLESS = "lossless"
# For each built-in pair: the samples, max_new_tokens, and the drafter of the demo. `drafter_small`
# is weak enough to show the trade-off of a cascade.
_SAMPLES = {
    "multi30k_ende": ("samples.tsv", 64, "drafter_small"),
    "gsm8k": ("samples.jsonl", 192, "drafter"),
}
_BUCKET = 48
_NOTES = (
    "bleu: with a 95 % bootstrap interval. over_verifier: BLEU minus that of the verifier alone;",
    "its intervals cover all rows jointly (95 %). If an interval contains 0, neither setting is",
    "shown to be better. Lossless rows follow the verifier's distribution: at temperature 1 they",
    "differ from it only by chance.",
)
# The wide joint intervals need more resamples than usual.
_RESAMPLES = 5000
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
    parser.add_argument("--drafter", help="the drafter's directory (default: built-in)")
    parser.add_argument("--verifier", help="the verifier's directory (default: built-in)")
    parser.add_argument(
        "--samples",
        help="sources and references: a TSV file with a header line, or a JSONL file of objects "
        "with these two values (default: the built-in samples)",
    )
    parser.add_argument("--max-new", type=int, help="longest output, in tokens")
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
    name, usual, drafter = _SAMPLES[args.built_in]
    args.max_new = usual if args.max_new is None else args.max_new
    if args.drafter is None and args.verifier is None:
        args.drafter = f"built-in:{args.built_in}/{drafter}"
        args.verifier = f"built-in:{args.built_in}/verifier"
    samples = Path(args.samples) if args.samples else built_in_pair(args.built_in) / name
    sources, references = _read(samples)
    check_positive(args, "max_draft", "max_new", "rows", "repeats")
    if args.show < 0:
        raise ValueError(f"--show must be at least 0, got {args.show}")
    if Path(args.output).expanduser().is_file():
        raise ValueError(f"--output={args.output} is a file: choose a directory")
    with RunDirectory(
        args.output, config_name=_CONFIG_NAME, makes=(_TABLE_NAME, _PLOT_NAME)
    ) as output:
        _run(args, output, sources, references)
    return 0


def _run(
    args: argparse.Namespace, output: RunDirectory, sources: list[str], references: list[str]
) -> None:
    pair = load_pair(drafter=args.drafter, verifier=args.verifier)
    decoders = _decoders(pair, args, sources)
    for decoder in decoders.values():
        decoder.rows(sources)  # checks the lengths before any long work
    for name, decoder in decoders.items():
        print(f"compiling: {name} ...", flush=True)
        decoder(sources[: args.rows + 1], progress=False)  # the extra row refills a slot
    results: list[dict[str, Any]] = []
    shown: dict[str, list[str]] = {}
    for temperature in (0.0, 1.0):
        print(f"decoding at temperature {temperature:g} ...", flush=True)
        rows, texts = _measure(decoders, temperature, sources, references, args.repeats)
        results += rows
        if temperature == 0.0:
            shown = texts
    shown_rows = [{**row, **_intervals(row)} for row in results]
    print(Report(shown_rows, _COLUMNS, _NOTES).table())
    _show(args.show, sources, references, shown)
    if args.show:
        print(f"\n{LOSSLESS} at temperature 0, by the source of each token:")
        found = decoders[LOSSLESS](sources, sampling=Sampling(0.0), sources=True, progress=False)
        print(f"{found.show(min(args.show, 2))}\n{found.acceptance}")
    # A new demo may replace an old demo: it is quick to repeat.
    names = (
        "built_in", "drafter", "verifier", "samples", "max_new", "max_draft", "rows", "repeats"
    )  # fmt: skip
    output.claim({name: getattr(args, name) for name in names}, replace=True)
    output.record(command=args.command_line)
    written = _write(output, results)
    print("\nwrote " + ", ".join(map(str, written)))
    print(
        "next, with your own models and texts: specjax compare --gin.VERIFIER=LARGE "
        "--gin.DRAFTER=SMALL --gin.INPUT=TEXTS --gin.OUTPUT_DIR=RUN"
    )


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
        "lossless, adaptive": Setting(max_draft=2 * max_draft, stopping="Confidence(0.4)"),
        **{rule: Setting(rule=rule, max_draft=max_draft) for rule in rules},
        DRAFTER: Setting(method="DrafterAlone"),
    }


def _decoders(pair: Pair, args: argparse.Namespace, sources: list[str]) -> dict[str, Decoder]:
    # A single bucket for all samples needs a single program for each kind of setting.
    longest = max(len(pair.verifier.tokenizer.encode(source)) for source in sources)
    shape: dict[str, Any] = {
        "batch_size": args.rows,
        "buckets": (_BUCKET * -(-longest // _BUCKET),),
        "max_new_tokens": args.max_new,
    }
    return {
        name: setting.decoder(pair.named, **shape)
        for name, setting in settings(args.max_draft).items()
    }


def _measure(
    decoders: dict[str, Decoder],
    temperature: float,
    sources: list[str],
    references: list[str],
    repeats: int,
) -> tuple[list[dict[str, Any]], dict[str, list[str]]]:
    """The table's rows, one per setting, and the texts of each setting."""
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    outputs: dict[str, list[Result]] = {name: [] for name in decoders}
    for seed in range(repeats):
        # In turns, so that noise of the machine affects all settings equally.
        for name, decoder in decoders.items():
            start = time.perf_counter()
            result = decoder(sources, sampling=Sampling(temperature), seed=seed, progress=False)
            seconds[name].append(time.perf_counter() - start)
            outputs[name].append(result)
    speeds = {
        name: statistics.median(
            float(result.info.per_row.emitted.sum() / spent)
            for result, spent in zip(results, seconds[name], strict=True)
        )
        for name, results in outputs.items()
    }
    # Over all seeds. The bootstrap resamples the inputs.
    scored = {
        name: pooled([figure(METRICS["bleu"], result.texts, references) for result in results])
        for name, results in outputs.items()
    }
    each = Bootstrap(resamples=_RESAMPLES)
    # Bonferroni correction for the comparisons with the verifier alone.
    joint = Bootstrap(resamples=_RESAMPLES, level=1.0 - 0.05 / (2 * max(1, len(scored) - 1)))
    resampled = {name: each.replicates(sums) for name, sums in scored.items()}
    alone = scored[ALONE].value, resampled[ALONE]
    rows = []
    for name, results in outputs.items():
        bleu = each.summary(scored[name].value, resampled[name])
        over = joint.summary(bleu.value - alone[0], resampled[name] - alone[1])
        calls, acceptance = (
            statistics.mean(getattr(result.info, rate) for result in results)
            for rate in ("tokens_per_verifier_call", "acceptance_rate")
        )
        rows.append(
            {
                "setting": name,
                "temperature": temperature,
                "bleu": bleu.value,
                "bleu_interval": [bleu.low, bleu.high],
                "bleu_over_verifier": over.value,
                "bleu_over_verifier_interval": [over.low, over.high],
                "tokens_per_second": speeds[name],
                "speedup": speeds[name] / speeds[ALONE],
                "tokens_per_verifier_call": None if name == DRAFTER else calls,
                "acceptance_rate": None if math.isnan(acceptance) else acceptance,
            }
        )
    return rows, {name: results[0].texts for name, results in outputs.items()}


def _intervals(row: dict[str, Any]) -> dict[str, str | None]:
    """BLEU and its difference to the verifier's, with their intervals."""
    (low, high), (least, most) = row["bleu_interval"], row["bleu_over_verifier_interval"]
    over = f"{row['bleu_over_verifier']:+.1f} [{least:+.1f}, {most:+.1f}]"
    return {
        "bleu": f"{row['bleu']:.1f} [{low:.1f}, {high:.1f}]",
        "over_verifier": None if row["setting"] == ALONE else over,
    }


def _read(path: Path) -> tuple[list[str], list[str]]:
    if path.suffix == ".jsonl":
        return _read_objects(path)
    (_, header), *lines = read_lines(path)
    pairs = []
    for number, line in lines:
        pairs.append(line.split("\t"))
        if len(pairs[-1]) != 2:
            found = len(pairs[-1])
            raise ValueError(
                f"{path}:{number}: must have 2 columns, a source and a reference, got {found}"
            )
    if not pairs:
        raise ValueError(f"{path} has no samples after its header {header!r}: add samples")
    return [source for source, _ in pairs], [reference for _, reference in pairs]


def _read_objects(path: Path) -> tuple[list[str], list[str]]:
    found = []
    for number, line in read_lines(path):
        try:
            values = [*json.loads(line).values()]
        except (ValueError, AttributeError):
            values = []
        if len(values) != 2 or not all(isinstance(value, str) for value in values):
            raise ValueError(
                f"{path}:{number}: must be an object of 2 texts, a source and a reference, such as "
                '{"question": "...", "answer": "..."}'
            )
        found.append(values)
    if not found:
        raise ValueError(f"{path} has no samples: add samples")
    return [source for source, _ in found], [reference for _, reference in found]


def _write(output: RunDirectory, results: list[dict[str, Any]]) -> list[Path]:
    matplotlib: Any = require("matplotlib", "eval")
    matplotlib.use("Agg")
    colours = matplotlib.colormaps["cividis"]
    pyplot = require("matplotlib.pyplot", "eval")
    table = output.write(_TABLE_NAME, (json.dumps(results, indent=1) + "\n").encode())
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    for axis, temperature in zip(axes, (0.0, 1.0), strict=True):
        rows = [row for row in results if row["temperature"] == temperature]
        rules = [row for row in rows if row["setting"].startswith("OPT")]
        axis.plot([row["speedup"] for row in rules], [row["bleu"] for row in rules], c="0.7")
        for i, row in enumerate(rows):
            low, high = row["bleu_interval"]
            errors = [[row["bleu"] - low], [high - row["bleu"]]]
            style: dict[str, Any] = {"ls": "", "ms": 7, "alpha": 0.8, "lw": 1, "capsize": 3}
            # The marks differ without colours too; names beside them would cover each other.
            style |= {"marker": MARKS[i % len(MARKS)], "c": colours(0.85 * i / len(rows))}
            axis.errorbar(row["speedup"], row["bleu"], errors, label=row["setting"], **style)
        axis.axhline(rows[0]["bleu"], c="0.8", ls="--", lw=1)
        axis.set(title=f"temperature {temperature:g}", xlabel="speed-up over the verifier")
        axis.set(ylabel="BLEU", xscale="log")
        for which in ("major", "minor"):  # 2, not 2 x 10^0
            getattr(axis.xaxis, f"set_{which}_formatter")("{x:g}")
        axis.margins(0.2)
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=130)
    pyplot.close(figure)
    return [table, output.write(_PLOT_NAME, image.getvalue())]
