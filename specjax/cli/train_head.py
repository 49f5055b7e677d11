"""`specjax train_head --gin.NAME=value`: trains the acceptance head of a pair's drafter."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from specjax.cli import gin_config

if TYPE_CHECKING:
    from specjax.training import HeadGrid, HeadRecipe

DEFAULT_FILE = "runs/train_head.gin"
GROUPS = {
    "pairs/*_head.gin": "whole recipes, each instead of all that: --gin_file=pairs/RECIPE.gin",
    "grids/*.gin": "grids of heads, each beside a recipe: --gin_file=grids/GRID.gin",
}
_PREDICTORS = ("predictor", "loss", "kl", "auc", "ece", "kl_even", "ece_even")
_GRID = ("rejection_weight", "blocks", "train_kl", "kl", "threshold")
_MEASURED = ("tokens_per_second", "verification_rate", "discard_rate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    gin_config.add_arguments(parser, DEFAULT_FILE, GROUPS)


def run(args: argparse.Namespace) -> int:
    """Trains as the gin files say; prints a table and one line of JSON."""
    # Imported here so that `specjax --help` stays quick.
    from specjax import data, text, training
    from specjax.cli.bench.report import Report
    from specjax.runs.run_directory import RunDirectory

    gin_config.register(
        data.read_examples,
        text.load_pair,
        training.HeadGrid,
        training.HeadRecipe,
        training.Labelling,
        train_head,
    )
    gin_config.configure_from(args)

    def record(run: RunDirectory) -> None:
        run.record(command=args.command_line, config=gin_config.operative_config())

    results = gin_config.call(train_head, on_start=record)
    if "heads" in results:
        print(Report(results["heads"], (*_GRID, *_MEASURED)).table())
    else:
        print(Report(results["rows"], _PREDICTORS).table())
    print(json.dumps(results))
    return 0


def train_head(
    recipe: "HeadRecipe",
    make_pair: Any,
    *,
    grid: "HeadGrid | None" = None,
    install: bool = False,
    **others: Any,
) -> dict[str, Any]:
    """One head; or, with a grid, all of its heads."""
    from specjax import training

    if grid is None:
        return training.run_head_recipe(recipe, make_pair, install=install, **others)
    if install:
        raise ValueError("INSTALL must be False with a grid: copy the head that you choose")
    return training.run_head_grid(grid, recipe, make_pair, **others)
