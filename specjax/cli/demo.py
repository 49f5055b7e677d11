"""`specjax demo`: decodes sample captions with the built-in pair, method by method."""

import argparse
import io
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import specjax
from specjax import drafting, rules, verification
from specjax.checks import require
from specjax.cli.bench.pairs import check_positive
from specjax.cli.bench.report import Report
from specjax.data.files import read_lines
from specjax.evaluation import METRICS, Bootstrap, figure, pooled
from specjax.runs.run_directory import RunDirectory
from specjax.text.built_in import DEFAULT_PAIR, built_in_pair
from specjax.types import Stopping

_CONFIG_NAME, _TABLE_NAME, _PLOT_NAME = "demo_config.json", "results.json", "quality_latency.png"
ALONE = "verifier alone"
DRAFTER = "drafter alone"
# The samples of each built-in pair, and the longest output, in tokens.
_SAMPLES = {"multi30k_ende": ("samples.tsv", 64), "gsm8k": ("samples.jsonl", 192)}
_BUCKET = 48
_NOTES = (
    "interval: of BLEU, 95 % of bootstrap resamples of the captions. over_verifier: BLEU minus",
    "that of the verifier alone, paired on the captions; its intervals hold for all rows at once,",
    "in 95 % of tables. Where 0 is in one, neither is shown to be better.",
)
# Ends of an interval so far out need more resamples than usual.
_RESAMPLES = 5000
# Where adaptive drafts end: the least confidence, or with an acceptance head the most risk.
_SURE, _RISK = 0.4, 0.5
_COLUMNS = (
    "method",
    "temperature",
    "bleu",
    "interval",
    "over_verifier",
    "tokens_per_second",
    "speedup",
    "tokens_per_verifier_call",
    "acceptance_rate",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the pair, the texts, and where the results go."""
    parser.add_argument(
        "--built-in",
        default=DEFAULT_PAIR,
        choices=list(_SAMPLES),
        help="the pair: T5s that translate captions, or Llamas that write about school mathematics",
    )
    parser.add_argument("--drafter", help="the drafter's directory; the built-in one if left out")
    parser.add_argument("--verifier", help="the verifier's directory; the built-in one if left out")
    parser.add_argument(
        "--samples",
        help="a TSV file of sources and references below a header line, or a JSONL file of objects "
        "with these two; the built-in one if left out",
    )
    parser.add_argument("--max-new", type=int, help="longest output, in tokens")
    parser.add_argument("--max-draft", type=int, default=5, help="tokens drafted per round")
    parser.add_argument("--rows", type=int, default=1, help="batch size")
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="how many seeds: the table has the median speed and the BLEU of all texts",
    )
    parser.add_argument(
        "--output", default="demo_output", help="the directory of the results and the plot"
    )
    parser.add_argument(
        "--show", type=int, default=3, help="how many translations to show side by side"
    )


def run(args: argparse.Namespace) -> int:
    """Decodes the samples with every method, prints the table, writes results and plot."""
    for module in ("sacrebleu", "matplotlib"):
        require(module, "eval")
    name, usual = _SAMPLES[args.built_in]
    args.max_new = usual if args.max_new is None else args.max_new
    samples = Path(args.samples) if args.samples else built_in_pair(args.built_in) / name
    sources, references = _read(samples)
    check_positive(args, "max_draft", "max_new", "rows", "repeats")
    if args.show < 0:
        raise ValueError(f"--show must be at least 0, got {args.show}")
    with RunDirectory(
        args.output, config_name=_CONFIG_NAME, makes=(_TABLE_NAME, _PLOT_NAME)
    ) as output:
        _run(args, output, sources, references)
    return 0


def _run(
    args: argparse.Namespace, output: RunDirectory, sources: list[str], references: list[str]
) -> None:
    pair = specjax.load_pair(args.built_in, drafter=args.drafter, verifier=args.verifier)
    methods = _methods(pair, args, sources)
    for decoder in methods.values():
        decoder.rows(sources)  # refuses what does not fit, before the first one takes its time
    for name, decoder in methods.items():
        print(f"preparing: {name} ...", flush=True)
        decoder(sources[: args.rows + 1], progress=False)  # one row more: a slot is refilled
    results: list[dict[str, Any]] = []
    shown: dict[str, list[str]] = {}
    for temperature in (0.0, 1.0):
        print(f"decoding at temperature {temperature:g} ...", flush=True)
        rows, texts = _measure(methods, temperature, sources, references, args.repeats)
        results += rows
        if temperature == 0.0:
            shown = texts
    shown_rows = [{**row, **_intervals(row)} for row in results]
    print(Report(shown_rows, _COLUMNS, _NOTES).table())
    _show(args.show, sources, references, shown)
    # Another demo may take the place of the one before: it is quick to repeat.
    names = (
        "built_in", "drafter", "verifier", "samples", "max_new", "max_draft", "rows", "repeats"
    )  # fmt: skip
    output.claim({name: getattr(args, name) for name in names}, replace=True)
    output.record(command=args.command_line)
    written = _write(output, results)
    print("\nwritten: " + ", ".join(map(str, written)))


def _show(
    count: int, sources: list[str], references: list[str], outputs: dict[str, list[str]]
) -> None:
    """Prints greedy outputs side by side, for the samples on which the methods differ most."""
    texts = [dict.fromkeys(of_one) for of_one in zip(*outputs.values(), strict=True)]
    order = sorted(range(len(texts)), key=lambda i: (-len(texts[i]), i))
    for i in order[:count]:
        print(f"\n{sources[i]}\n  reference: {references[i]}")
        for text in texts[i]:
            print(f"  {'; '.join(m for m, out in outputs.items() if out[i] == text)}: {text}")


def _methods(
    pair: specjax.Pair, args: argparse.Namespace, sources: list[str]
) -> dict[str, specjax.Decoder]:
    max_draft = args.max_draft
    # One bucket holds every sample, so that each method is one program.
    longest = max(len(pair.verifier.tokenizer.encode(source)) for source in sources)
    bucket = _BUCKET * -(-longest // _BUCKET)
    shape: dict[str, Any] = {"batch_size": args.rows, "buckets": (bucket,)}
    shape["max_new_tokens"] = args.max_new

    def both(rule: rules.Rule, algorithm: verification.Verification) -> specjax.Decoder:
        return specjax.Decoder(
            pair, rule=rule, verification=algorithm, max_draft=max_draft, **shape
        )

    block = verification.Block()
    # Twice as long where the drafter is sure, shorter where it is not.
    sure: Stopping = drafting.Confidence(_SURE)
    if pair.drafter.head is not None:
        sure = drafting.Survival(threshold=_RISK)
    return {
        ALONE: specjax.Decoder(pair.verifier, **shape),
        DRAFTER: specjax.Decoder(pair.drafter, **shape),
        "lossless, token": both(rules.Lossless(), verification.Token()),
        "lossless, block": both(rules.Lossless(), block),
        "lossless, adaptive": specjax.Decoder(
            pair, stopping=sure, max_draft=2 * max_draft, **shape
        ),
        "Lossy(0.5)": both(rules.Lossy(0.5), block),
        "OPT(0.2)": both(rules.OPT(0.2), block),
        "TokenV3(0.5)": both(rules.TokenV3(0.5), block),
    }


def _measure(
    methods: dict[str, specjax.Decoder],
    temperature: float,
    sources: list[str],
    references: list[str],
    repeats: int,
) -> tuple[list[dict[str, Any]], dict[str, list[str]]]:
    """One line of the table per method, and its texts."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    outputs: dict[str, list[specjax.Result]] = {name: [] for name in methods}
    for seed in range(repeats):
        # Turn by turn, so that a noisy machine disturbs all of them alike.
        for name, decoder in methods.items():
            start = time.perf_counter()
            result = decoder(sources, temperature=temperature, seed=seed, progress=False)
            seconds[name].append(time.perf_counter() - start)
            outputs[name].append(result)
    speeds = {
        name: statistics.median(
            float(result.info.rows.emitted.sum() / spent)
            for result, spent in zip(results, seconds[name], strict=True)
        )
        for name, results in outputs.items()
    }
    # Over all repeats: drawn texts differ by the seed. What is resampled are the captions.
    scored = {
        name: pooled([figure(METRICS["bleu"], result.texts, references) for result in results])
        for name, results in outputs.items()
    }
    each = Bootstrap(resamples=_RESAMPLES)
    # One of many comparisons of equals would leave out 0 by chance (Bonferroni).
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
                "method": name,
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
    """What the table shows of the intervals of BLEU."""
    (low, high), (least, most) = row["bleu_interval"], row["bleu_over_verifier_interval"]
    over = f"{row['bleu_over_verifier']:+.1f} [{least:+.1f}, {most:+.1f}]"
    return {
        "interval": f"[{low:.1f}, {high:.1f}]",
        "over_verifier": None if row["method"] == ALONE else over,
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
                f"{path}:{number}: needs 2 columns, a source and a reference, got {found}"
            )
    if not pairs:
        raise ValueError(f"{path} has no samples below its header {header!r}; add some")
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
                f"{path}:{number}: needs an object of 2 texts, a source and a reference, such as "
                '{"question": "...", "answer": "..."}'
            )
        found.append(values)
    if not found:
        raise ValueError(f"{path} has no samples; add some")
    return [source for source, _ in found], [reference for _, reference in found]


def _write(output: RunDirectory, results: list[dict[str, Any]]) -> list[Path]:
    require("matplotlib", "eval").use("Agg")
    pyplot = require("matplotlib.pyplot", "eval")
    table = output.write(_TABLE_NAME, (json.dumps(results, indent=1) + "\n").encode())
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for axis, temperature in zip(axes, (0.0, 1.0), strict=True):
        points = [row for row in results if row["temperature"] == temperature]
        for row, marker in zip(points, "os^v<DPX"[: len(points)], strict=True):
            latency = 1e3 / row["tokens_per_second"]
            low, high = row["bleu_interval"]
            errors = [[row["bleu"] - low], [high - row["bleu"]]]
            style: dict[str, Any] = {"fmt": marker, "ms": 9, "alpha": 0.75, "lw": 1, "capsize": 3}
            axis.errorbar(latency, row["bleu"], errors, label=row["method"], **style)
        axis.set(title=f"temperature {temperature:g}", xlabel="ms per token", ylabel="BLEU")
        axis.margins(0.15)
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=130)
    pyplot.close(figure)
    return [table, output.write(_PLOT_NAME, image.getvalue())]
