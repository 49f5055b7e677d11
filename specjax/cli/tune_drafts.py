"""`specjax tune_drafts --gin.NAME=value`: chooses how to draft for a verifier."""

import argparse
import json

from specjax.cli import gin_config

DEFAULT_FILE = "runs/tune_drafts.gin"
_EXPECTED = ("drafts", "expected", "expected_over_single", "expected_tokens_per_round")
_MEASURED = ("drafts", "expected", "measured", "low", "high", "over_single", "tokens_per_call")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    gin_config.add_arguments(parser, DEFAULT_FILE)


def run(args: argparse.Namespace) -> int:
    """Tunes as the gin files say; prints two tables and one line of JSON."""
    # Imported here so that `specjax --help` stays quick.
    from specjax import data, partitioning, text, tuning
    from specjax.cli.bench.report import Report
    from specjax.runs.run_directory import RunDirectory

    gin_config.register(
        data.read_examples,
        partitioning.make_mesh,
        text.load_pair,
        text.load_text_model,
        tuning.Tuning,
        tuning.tune_drafts,
    )
    gin_config.configure_from(args)

    def record(run: RunDirectory) -> None:
        run.record(command=args.command_line, config=gin_config.operative_config())

    results = gin_config.call(tuning.tune_drafts, on_start=record)
    print("Expected speed-ups over the verifier alone:\n")
    print(Report(results["expected"], _EXPECTED).table())
    print("\nThe best of them measured, with 95 % intervals:\n")
    told = {name: results[name] for name in ("rank_correlation", "chosen", "why", "gin_file")}
    print(Report(results["measured"], _MEASURED, summary=told).table())
    print(json.dumps(results))
    return 0
