"""`specjax demo`: the built-in pair on its own sample captions, method by method."""

import argparse
import csv
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import specjax
from specjax import rules, verification
from specjax._pair import BUILT_IN
from specjax.cli.bench.report import Report

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
    parser.add_argument("--max-draft", type=int, default=3, help="tokens drafted per round")
    parser.add_argument("--rows", type=int, default=1, help="batch size")
    parser.add_argument("--output", default="demo_output", help="directory of results and plot")
    parser.add_argument("--show", type=int, default=3, help="translations to show side by side")


def run(args: argparse.Namespace) -> int:
    """Decodes the samples with every method, prints the table, writes results and plot."""
    samples = Path(args.samples) if args.samples else BUILT_IN / "samples.tsv"
    sources, references = _read(samples)
    for name in ("max_draft", "rows"):
        if getattr(args, name) < 1:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} must be at least 1, got {getattr(args, name)}")
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    pair = specjax.load_pair(drafter=args.drafter, verifier=args.verifier)
    results, shown = [], {}
    for temperature in (0.0, 1.0):
        base = None
        for name, decoder in _methods(pair, args.max_draft, args.rows).items():
            row, texts = _measure(name, decoder, temperature, sources, references)
            base = row["tokens_per_second"] if name == ALONE else base
            results.append(row)
            shown[name, temperature] = texts
        for row in results:
            if row["temperature"] == temperature:
                row["speedup"] = row["tokens_per_second"] / base
    print(Report(results, _COLUMNS).table())
    for i in range(min(args.show, len(sources))):
        print(f"\n{sources[i]}\n  reference: {references[i]}")
        for (name, temperature), texts in shown.items():
            if temperature == 0.0:
                print(f"  {name}: {texts[i]}")
    written = _write(output, results)
    print("\nwritten: " + ", ".join(map(str, written)))
    return 0


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
    name: str,
    decoder: Callable[..., specjax.Result],
    temperature: float,
    sources: list[str],
    references: list[str],
) -> tuple[dict[str, Any], list[str]]:
    import sacrebleu

    print(f"{name}, T={temperature:g} ...", flush=True)
    decoder(sources[:1], temperature=temperature, progress=False)  # compiles
    start = time.perf_counter()
    result = decoder(sources, temperature=temperature, progress=False)
    seconds = time.perf_counter() - start
    info = result.info
    drafted = info.rows.drafted.sum() > 0
    calls = None if name == DRAFTER else info.tokens_per_verifier_call
    row = {
        "method": name,
        "temperature": temperature,
        "bleu": sacrebleu.corpus_bleu(result.texts, [references]).score,
        "tokens_per_second": float(info.rows.emitted.sum() / seconds),
        "speedup": None,
        "tokens_per_verifier_call": calls,
        "acceptance_rate": info.acceptance_rate if drafted else None,
    }
    return row, result.texts


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
