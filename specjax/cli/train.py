"""`specjax train --gin_file=FILE --gin.NAME=value`: trains a model from pairs of texts."""

import argparse
import json

from specjax.cli import gin_config

DEFAULT_FILE = "runs/train.gin"
GROUPS = {
    "models": f"networks, each chosen by --gin_file={DEFAULT_FILE} --gin_file=models/NETWORK.gin",
    "tasks": "kinds of texts, one of which is needed beside it: --gin_file=tasks/KIND.gin",
    "pairs/*er.gin": "whole recipes, each instead of all that: --gin_file=pairs/RECIPE.gin",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    gin_config.add_arguments(parser, DEFAULT_FILE, GROUPS)


def run(args: argparse.Namespace) -> int:
    """Trains as the gin files say, and prints the result as one line of JSON."""
    # Imported here so that `specjax --help` stays quick.
    from specjax import data, models, training
    from specjax.runs.run_directory import RunDirectory

    gin_config.register(
        data.read_aligned,
        data.read_examples,
        models.T5Config,
        models.LlamaConfig,
        models.Llama3RopeScaling,
        models.Gemma2Config,
        data.Batching,
        training.Acceptance,
        training.AdamW,
        training.Cosine,
        training.Evaluation,
        training.InverseSqrt,
        training.Objective,
        training.OnPolicy,
        training.Recipe,
        training.TrainerConfig,
        train=training.run_recipe,
    )
    gin_config.configure_from(args)

    def record(run: RunDirectory) -> None:
        run.record(command=args.command_line, config=gin_config.operative_config())

    print(json.dumps(gin_config.call(training.run_recipe, on_start=record)))
    return 0
