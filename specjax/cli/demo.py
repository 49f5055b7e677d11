"""`specjax demo`: compares settings on sample texts with a built-in pair."""

import argparse
from typing import Any

from specjax.cli.compare import SOME_FAILED, tables
from specjax.environment import products
from specjax.errors import tell
from specjax.study import Measuring, Setting, Texts, compare, read_texts
from specjax.text import load_pair
from specjax.text.directories import DEFAULT_PAIR, built_in_pair

# Built-in pair -> its samples, their fields, and max_new_tokens.
_SAMPLES = {
    "multi30k_ende": ("samples.tsv", "en", "de", 64),
    "gsm8k": ("samples.jsonl", "question", "answer", 192),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "--built-in",
        default=DEFAULT_PAIR,
        choices=list(_SAMPLES),
        help="the pair: T5 models for translation, or Llama models for school mathematics",
    )
    parser.add_argument("--max-draft", type=int, default=5, help="tokens drafted per round")
    parser.add_argument(
        "--output",
        default="demo_output",
        help="the directory of the results, as of specjax compare; the same demo is not repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Measures all settings on the samples, and prints the tables and a verdict."""
    wanted = [setting for t in (0.0, 1.0) for setting in settings(args.max_draft, t)]
    texts = samples(args.built_in)
    # One batch size for quality and time: fewer programs to compile, and timed texts are decoded
    # once. Half of the texts suffice for the interval of a verdict.
    sizes: dict[str, Any] = {"batch_size": 1, "latency_limit": len(texts.examples) // 2}
    results = compare(
        lambda _: load_pair(args.built_in).named,
        wanted,
        texts,
        measuring=Measuring(num_samples=2, repeats=1, **sizes),
        output_dir=args.output,
        measured="all",
        options={"max_new_tokens": _SAMPLES[args.built_in][-1]},
        one_bucket=True,
        on_start=lambda run: run.record(command=args.command_line),
    )
    print(*products(), tables({**results, "table_2": []}), sep="\n")
    tell(
        f"plots and tables are in {args.output}; next, with your own models and texts: "
        "specjax compare --gin.VERIFIER=LARGE --gin.DRAFTER=SMALL --gin.INPUT=TEXTS "
        "--gin.OUTPUT_DIR=RUN"
    )
    return SOME_FAILED if results["failed"] else 0


def settings(max_draft: int, temperature: float) -> list[Setting]:
    """Returns the settings of the demo, from the verifier's quality to the drafter's speed."""
    chosen: list[dict[str, Any]] = [{"method": "VerifierAlone"}]
    rules = ("Lossless", "OPT(0.2)", "OPT(0.4)", "TokenV3(0.8)")
    chosen += [{"rule": rule, "max_draft": max_draft} for rule in rules]
    chosen.append({"method": "DrafterAlone"})
    return [Setting(temperature=temperature, **values) for values in chosen]


def samples(built_in: str) -> Texts:
    """Returns the samples of a built-in pair, with their references."""
    name, inputs_field, targets_field, _ = _SAMPLES[built_in]
    return read_texts(
        built_in_pair(built_in) / name, inputs_field=inputs_field, targets_field=targets_field
    )
