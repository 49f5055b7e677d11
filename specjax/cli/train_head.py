"""`specjax train head --gin.NAME=value`: trains the acceptance head of a pair's drafter."""

import argparse
import functools
import json

from specjax.cli import gin_config, print_data
from specjax.errors import tell

DEFAULT_FILE = "runs/train_head.gin"
GROUPS = {
    "pairs/*_head.gin": "complete recipes: --gin_file=pairs/RECIPE.gin",
}
_PREDICTORS = ("predictor", "loss", "kl")
_NEXT = (
    "copy the directory acceptance_head into the drafter's directory, then specjax infer "
    '--gin.STOPPING="Survival(threshold=0.7)" --gin.MAX_DRAFT=12'
)


add_arguments = functools.partial(gin_config.add_arguments, default=DEFAULT_FILE, groups=GROUPS)


def run(args: argparse.Namespace) -> int:
    """Trains as the gin files configure; prints a table and, for programs, a line of JSON."""
    # Imported here so that `specjax --help` stays quick.
    from specjax import text, training
    from specjax.cli.report import Report
    from specjax.data.examples import read_examples
    from specjax.training.head_data import Labelling

    gin_config.register(
        read_examples,
        text.load_pair,
        training.HeadRecipe,
        Labelling,
        training.train_head,
    )
    gin_config.configure_from(args)
    results = gin_config.call(training.train_head, on_start=gin_config.recorder(args))
    print(Report(results["rows"], _PREDICTORS).table())
    print_data(json.dumps(results))
    if "installed" not in results:
        tell(f"next: {_NEXT}")
    return 0
