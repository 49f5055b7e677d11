"""`specjax train drafter --gin.NAME=value`: trains a draft head for a verifier."""

import argparse
import functools
import json
import os

from specjax.cli import gin_config
from specjax.errors import tell

DEFAULT_FILE = "runs/train_drafter.gin"


add_arguments = functools.partial(gin_config.add_arguments, default=DEFAULT_FILE)


def run(args: argparse.Namespace) -> int:
    """Trains as the gin files configure; prints the result as one line of JSON."""
    # Imported here so that `specjax --help` stays quick.
    from specjax import text, training
    from specjax.cli.infer import mesh_of
    from specjax.data.examples import read_examples
    from specjax.training.teacher import VerifierTexts

    gin_config.register(
        mesh_of,
        read_examples,
        text.load_text_model,
        training.AdamW,
        training.DrafterRecipe,
        training.Objective,
        training.TrainerConfig,
        VerifierTexts,
        training.train_drafter,
    )
    gin_config.configure_from(args)
    record = gin_config.recorder(args)
    results = gin_config.call(training.train_drafter, on_start=record)
    print(json.dumps(results))
    place = os.path.expanduser(str(gin_config.value_of("train_drafter.output_dir")))
    verifier = gin_config.value_of("load_text_model.path")
    chat = gin_config.value_of("VerifierTexts.chat")
    same = f' --gin.CHAT="{chat}"' if chat else ""
    tell(
        f"next: specjax infer --gin.VERIFIER={verifier} --gin.DRAFTER={place}/drafter "
        f"--gin.MAX_DRAFT={results['max_draft']}{same} --gin.INPUT=FILE --gin.OUTPUT_DIR=RUN"
    )
    return 0
