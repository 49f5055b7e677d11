"""`specjax train_head --gin.NAME=value`: trains the acceptance head of a pair's drafter."""

import argparse
import json

from specjax.cli import gin_config

DEFAULT_FILE = "runs/train_head.gin"
GROUPS = {
    "pairs/*_head.gin": "whole recipes, each instead of all that: --gin_file=pairs/RECIPE.gin"
}
_COLUMNS = ("predictor", "loss", "kl", "auc", "ece", "kl_even", "ece_even")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    gin_config.add_arguments(parser, DEFAULT_FILE, GROUPS)


def run(args: argparse.Namespace) -> int:
    """Trains as the gin files say; prints the predictors' figures and one line of JSON."""
    # Imported here so that `specjax --help` stays quick.
    from specjax import data, text, training
    from specjax.cli.bench.report import Report
    from specjax.runs.run_directory import RunDirectory

    gin_config.register(
        data.read_examples,
        text.load_pair,
        training.HeadRecipe,
        training.Labelling,
        train_head=training.run_head_recipe,
    )
    gin_config.configure_from(args)

    def record(run: RunDirectory) -> None:
        run.record(command=args.command_line, config=gin_config.operative_config())

    results = gin_config.call(training.run_head_recipe, on_start=record)
    print(Report(results["rows"], _COLUMNS).table())
    print(json.dumps(results))
    return 0
