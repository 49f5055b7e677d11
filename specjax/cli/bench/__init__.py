"""`specjax bench NAME`: measures a pair of models; each result is a ratio within one run.

A benchmark is a module with `HELP`, `add_arguments(parser)` and `run(args) -> Report`. `bench`
prints its table and, as the last line, all figures as JSON. The benchmarks of specjax's single
parts are in the folder `benchmarks/` of a checkout.
"""

import argparse
import importlib

from specjax.cli.bench.report import Report
from specjax.cli.help_format import HelpFormatter

BENCHMARKS = {
    "acceptance": "specjax.cli.bench.acceptance",
    "cascades": "specjax.cli.bench.cascades",
    "cost": "specjax.cli.bench.cost",
    "drafting": "specjax.cli.bench.drafting",
    "loop": "specjax.cli.bench.loop",
    "peers": "specjax.cli.bench.peers",
    "ragged": "specjax.cli.bench.ragged",
    "screening": "specjax.cli.bench.screening",
    "speedup": "specjax.cli.bench.speedup",
    "stopping": "specjax.cli.bench.stopping",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one subcommand per benchmark."""
    names = parser.add_subparsers(dest="benchmark", required=True, metavar="NAME")
    for name, module_name in BENCHMARKS.items():
        module = importlib.import_module(module_name)
        sub = names.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            formatter_class=HelpFormatter,
        )
        module.add_arguments(sub)
        sub.set_defaults(bench=module.run)


def run(args: argparse.Namespace) -> int:
    """Runs the chosen benchmark and prints its report."""
    report: Report = args.bench(args)
    report.show(args.benchmark)
    return 0
