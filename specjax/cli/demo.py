"""`specjax demo`: the built-in pair on its own sample captions, method by method."""

import argparse
import csv
import json
import statistics
import time
from pathlib import Path
from typing import Any

import specjax
from specjax import rules, verification
from specjax._pair import BUILT_IN
from specjax.cli.bench.pairs import check_positive
from specjax.cli.bench.report import Report
from specjax.output_directory import make_writable

ALONE = "verifier alone"
DRAFTER = "drafter alone"
# One bucket holds every sample, so that each method is one program.
_BUCKET = 48
_COLUMNS = (
    "method",
    "temperature",
    "bleu",
    "tokens_per_second",
    "speedup",
    "tokens_per_verifier_call",
    "acceptance_rate",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the pair, the texts, and where the results go."""
    parser.add_argument("--drafter", help="directory; the built-in pair by default")
    parser.add_argument("--verifier", help="directory; the built-in pair by default")
    parser.add_argument("--samples", help="TSV of source and reference with a header line")
    parser.add_argument("--max-draft", type=int, default=5, help="tokens drafted per round")
    parser.add_argument("--rows", type=int, default=1, help="batch size")
    parser.add_argument(
        "--repeats", type=int, default=3, help="timings, of which the median counts"
    )
    parser.add_argument("--output", default="demo_output", help="directory of results and plot")
    parser.add_argument("--show", type=int, default=3, help="translations to show side by side")


def run(args: argparse.Namespace) -> int:
    """Decodes the samples with every method, prints the table, writes results and plot."""
    samples = Path(args.samples) if args.samples else BUILT_IN / "samples.tsv"
    sources, references = _read(samples)
    check_positive(args, "max_draft", "rows", "repeats")
    if args.show < 0:
        raise ValueError(f"--show must be at least 0, got {args.show}")
    output = make_writable(args.output)
    pair = specjax.load_pair(drafter=args.drafter, verifier=args.verifier)
    methods = _methods(pair, args.max_draft, args.rows)
    for name, decoder in methods.items():
        print(f"compiling: {name} ...", flush=True)
        decoder(sources[: args.rows + 1], progress=False)  # one row more: a slot is refilled
    results: list[dict[str, Any]] = []
    shown: dict[str, list[str]] = {}
    for temperature in (0.0, 1.0):
        print(f"decoding at temperature {temperature:g} ...", flush=True)
        rows, texts = _measure(methods, temperature, sources, references, args.repeats)
        results += rows
        if temperature == 0.0:
            shown = texts
    print(Report(results, _COLUMNS).table())
    _show(args.show, sources, references, shown)
    written = _write(output, results)
    print("\nwritten: " + ", ".join(map(str, written)))
    return 0


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


def _methods(pair: specjax.Pair, max_draft: int, rows: int) -> dict[str, specjax.Decoder]:
    shape: dict[str, Any] = {"batch_size": rows, "buckets": (_BUCKET,), "max_new_tokens": 64}

    def both(rule: rules.Rule, algorithm: verification.Verification) -> specjax.Decoder:
        return specjax.Decoder(
            pair, rule=rule, verification=algorithm, max_draft=max_draft, **shape
        )

    block = verification.Block()
    return {
        ALONE: specjax.Decoder(pair.verifier, **shape),
        DRAFTER: specjax.Decoder(pair.drafter, **shape),
        "lossless, token": both(rules.Lossless(), verification.Token()),
        "lossless, block": both(rules.Lossless(), block),
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
    import sacrebleu

    seconds: dict[str, list[float]] = {name: [] for name in methods}
    outputs = {}
    for _ in range(repeats):
        # Turn by turn, so that a noisy machine disturbs all of them alike.
        for name, decoder in methods.items():
            start = time.perf_counter()
            outputs[name] = decoder(sources, temperature=temperature, progress=False)
            seconds[name].append(time.perf_counter() - start)
    speeds = {
        name: float(result.info.rows.emitted.sum() / statistics.median(seconds[name]))
        for name, result in outputs.items()
    }
    rows = []
    for name, result in outputs.items():
        info = result.info
        drafted = info.rows.drafted.sum() > 0
        rows.append(
            {
                "method": name,
                "temperature": temperature,
                "bleu": sacrebleu.corpus_bleu(result.texts, [references]).score,
                "tokens_per_second": speeds[name],
                "speedup": speeds[name] / speeds[ALONE],
                "tokens_per_verifier_call": (
                    None if name == DRAFTER else info.tokens_per_verifier_call
                ),
                "acceptance_rate": info.acceptance_rate if drafted else None,
            }
        )
    return rows, {name: result.texts for name, result in outputs.items()}


def _read(path: Path) -> tuple[list[str], list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        header, *lines = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    for number, line in enumerate(lines, start=2):
        if len(line) != 2:
            raise ValueError(f"{path}:{number}: needs a source and a reference, has {len(line)}")
    if not lines:
        raise ValueError(f"{path}: no samples under the header {header}")
    return [line[0] for line in lines], [line[1] for line in lines]


def _write(output: Path, results: list[dict[str, Any]]) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    table, plot = output / "results.json", output / "quality_latency.png"
    table.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for axis, temperature in zip(axes, (0.0, 1.0), strict=True):
        for row in results:
            if row["temperature"] == temperature:
                latency = 1e3 / row["tokens_per_second"]
                axis.plot(latency, row["bleu"], "o", label=row["method"])
                axis.annotate(
                    row["method"], (latency, row["bleu"]), xytext=(4, 4), textcoords="offset points"
                )
        axis.set(title=f"temperature {temperature:g}", xlabel="ms per token", xmargin=0.2)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("BLEU")
    figure.savefig(plot, dpi=130)
    pyplot.close(figure)
    return [table, plot]
