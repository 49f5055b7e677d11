"""`specjax infer --gin_file=FILE --gin.NAME=value`: decodes a file of prompts."""

import argparse
import json
from typing import TYPE_CHECKING

from specjax.cli import gin_config

if TYPE_CHECKING:
    from specjax import text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    gin_config.add_arguments(parser)


def register() -> None:
    """Makes configurable what a decoder is made of; imports it."""
    # Imported here so that `specjax --help` stays quick.
    from specjax import partitioning, rules, text, verification
    from specjax.runs import inference

    gin_config.register(
        text.Decoder,
        text.load_pair,
        text.load_text_model,
        partitioning.make_mesh,
        inference.infer,
        verifier_alone,
        drafter_alone,
        *rules.ALL_RULES,
        *verification.ALL_VERIFICATIONS,
    )


def run(args: argparse.Namespace) -> int:
    """Decodes as the gin files say, and prints the metrics as one line of JSON."""
    from specjax.runs import environment, inference

    environment.enable_cache()
    register()
    gin_config.configure(args.gin_file, args.gin_binding)
    print(json.dumps(gin_config.call(inference.infer)))
    return 0


def verifier_alone(pair: "text.Pair") -> "text.TextModel":
    """The verifier of a pair, to decode with it alone."""
    return pair.verifier


def drafter_alone(pair: "text.Pair") -> "text.TextModel":
    """The drafter of a pair, to decode with it alone."""
    return pair.drafter
