"""`specjax inspect DIR [DIR]`: what a model is, and what two models need as a pair."""

import argparse
import json
import sys
from typing import Any

from specjax.checks import one_number
from specjax.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "models",
        metavar="MODEL",
        nargs="+",
        help="one model, or two for a pair: directories, or published sizes such as qwen3_8b",
    )
    parser.add_argument(
        "--memory",
        metavar="GB",
        type=float,
        help="of two models: print the largest batch for a device of this memory",
    )
    parser.add_argument(
        "--acceptance",
        type=float,
        default=0.7,
        help="of two models: the rate of accepted tokens for which to choose the length of drafts; "
        "specjax bench measures it (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="bfloat16",
        help="of parameters and caches in memory",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")

    parser.epilog = "Exit status: 2 if the two models are not a pair, else 0."


def run(args: argparse.Namespace) -> int:
    """Prints what the directories hold; reads no array.

    Returns:
      0, or 2 for two models that are not a pair: a command that decodes refuses them.
    """
    # Imported here so that `specjax --help` stays quick.
    from specjax.text.directories import InspectedHead, as_pair, inspect

    if len(args.models) > 2:
        raise UserError(f"inspect takes one or two models, got {len(args.models)}")
    if args.memory is not None and not 0 < args.memory < 1e6:
        raise UserError(f"--memory must be above 0 and below 1,000,000 GB, got {args.memory:g}")
    one_number("--acceptance", args.acceptance, low=0.0, high=1.0)
    if args.memory is not None and len(args.models) == 1:
        raise UserError("--memory needs two models: give a drafter and a verifier")
    models = sorted(
        (inspect(path, dtype=args.dtype) for path in args.models),
        key=lambda x: (not isinstance(x, InspectedHead), x.params),
    )
    summaries = [model.summary() for model in models]
    values: dict[str, Any] = {"models": summaries}
    if len(models) == 2:
        memory = None if args.memory is None else args.memory * 1e9
        values |= as_pair(models[0], models[1], memory, args.acceptance)
    status = 2 if isinstance(values.get("pair"), str) else 0
    if args.json:
        json.dump(values, sys.stdout, indent=1)
        print()
        return status
    for summary in summaries:
        print(summary["path"])
        for name, text in _lines(summary):
            print(f"  {name:<16} {text}")
    if len(models) == 2:
        small, large = (summary["path"] for summary in summaries)
        if values["pair"] is True:
            print(f"a pair: {small} drafts for {large}")
        elif values["pair"]:
            print(f"not a pair: {values['pair']}")
        else:
            print("give their directories to compare the vocabularies")
        print(f"c = {values['c']:.3f} (bytes read by a drafter's pass, over a verifier's)")
        if "why" in values:
            print(values["why"], "(If a pass takes the time of its bytes: specjax bench measures.)")
        for context, batch in values.get("batches", {}).items():
            print(f"  {context:>7,} tokens of prompt and output: batches up to {batch:,}")
    return status


def _lines(summary: dict[str, Any]) -> list[tuple[str, str]]:
    from specjax.memory import in_words

    disk = ", ".join(f"{in_words(n)} {kind}" for kind, n in summary["bytes_on_disk"].items())
    cache = f"{in_words(summary['cache_bytes_per_row_and_1000_tokens'])} for 1,000 tokens"
    if (verifier := summary.get("verifier")) is not None:
        layers = "" if verifier["layers"] is None else f" and {verifier['layers']} layers"
        reads = ", ".join(map(str, verifier["boundaries"] or ("that follow from its layers",)))
        if verifier["cross_layer"] is not None:
            reads += f"; its encoder's output, as layer {verifier['cross_layer']} reads it"
        if summary["reads_memory"]:
            reads = "after its last layer; its keys and values"
        return [
            ("kind", f"{summary['family']} ({summary['format']})"),
            ("drafts for", f"{verifier['name'] or 'a model'} of width {verifier['width']}{layers}"),
            ("reads", f"the verifier's states {reads}"),
            ("parameters", f"{summary['parameters']:,}"),
            ("on disk", disk),
            ("in memory", in_words(summary["bytes_in_memory"])),
            ("read per pass", in_words(summary["bytes_read_per_pass"])),
            ("vocabulary", f"{summary['tokens']:,} of {summary['rows_of_the_embedding']:,} tokens"),
            ("cache per row", cache),
        ]
    eos = ", ".join(f"{i} {token!r}" for i, token in summary["eos"].items())
    one, six = summary["bytes_read_per_pass"], summary["bytes_read_per_6_tokens"]
    reads = in_words(one) + (f" for a token, {in_words(six)} for 6" if six > one else "")
    tokens = summary["tokens"]
    table = [
        ("family", f"{summary['family']} ({summary['format']})"),
        ("parameters", f"{summary['parameters']:,}"),
        ("on disk", disk),
        ("in memory", in_words(summary["bytes_in_memory"])),
        ("read per pass", reads),
        ("vocabulary", f"{summary['rows_of_the_embedding']:,} rows, "
                       f"{'no tokenizer' if tokens is None else f'{tokens:,} tokens'}"),
        ("ends texts with", eos or "no token"),
        ("context", f"{summary['context']:,} tokens" if summary["context"] else "not stated"),
        ("cache per row", cache),
        ("chat template", "yes" if summary["chat_template"] else "no"),
    ]  # fmt: skip
    files = {"on disk", "ends texts with", "context", "chat template"}
    lines = [line for line in table if disk or line[0] not in files]
    if summary["mtp_head"]:
        command = f"specjax convert {summary['path']} NEW --to speculators"
        lines.append(("MTP head", f"inside; to draft with it: {command}, --gin.DRAFTER=NEW"))
    return lines
