"""`specjax train --gin_file=FILE --gin.NAME=value`: trains a model on pairs of texts."""

import argparse
import functools
import json
import os

from specjax.cli import gin_config
from specjax.errors import tell

DEFAULT_FILE = "runs/train.gin"
GROUPS = {
    "models": f"networks, each chosen by --gin_file={DEFAULT_FILE} --gin_file=models/NETWORK.gin",
    "tasks": "kinds of texts, to add to a network: --gin_file=tasks/KIND.gin",
    "pairs/*er*.gin": "complete recipes, instead of the files above: --gin_file=pairs/RECIPE.gin",
}


add_arguments = functools.partial(gin_config.add_arguments, default=DEFAULT_FILE, groups=GROUPS)


def run(args: argparse.Namespace) -> int:
    """Trains as the gin files configure; prints the result as one line of JSON."""
    # Imported here so that `specjax --help` stays quick.
    from specjax import models, training
    from specjax.data.batching import Batching
    from specjax.data.examples import read_aligned, read_examples
    from specjax.models.config import kinds_of
    from specjax.training.recipe import Evaluation

    families = models.FAMILIES.values()
    gin_config.register(
        read_aligned,
        read_examples,
        *(family.config for family in families),
        *(
            x
            for family in families
            for part in family.config.parts.values()
            for x in kinds_of(part)
        ),
        Batching,
        training.AdamW,
        Evaluation,
        training.Objective,
        training.Recipe,
        training.Teacher,
        training.TrainerConfig,
        train=training.train_model,
    )
    gin_config.configure_from(args)
    record = gin_config.recorder(args)
    results = gin_config.call(training.train_model, on_start=record)
    place = os.path.expanduser(str(gin_config.value_of("train.output_dir")))
    print(json.dumps(results))
    tell(f"next: {_next(f'{place}/model')}")
    return 0


def _next(model: str) -> str:
    """The next command: a distilled model is its teacher's drafter."""
    run = "--gin.INPUT=FILE --gin.OUTPUT_DIR=RUN"
    if teacher := gin_config.value_of("Teacher.path"):
        return f"specjax infer --gin.VERIFIER={teacher} --gin.DRAFTER={model} {run}"
    return (
        f"specjax infer --gin.METHOD=VerifierAlone --gin.VERIFIER={model} {run}; "
        f"--gin.TEACHER={model} trains a drafter for this model"
    )
