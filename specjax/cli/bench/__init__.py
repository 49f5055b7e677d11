"""`specjax bench NAME`: measurements, each a ratio inside one run.

A benchmark is a module with `HELP`, `add_arguments(parser)` and `run(args) -> Report`. `bench`
prints its table, then, as the last line, all its figures as one line of JSON.
"""

import argparse
import importlib

from specjax.cli.bench.report import Report

BENCHMARKS = {
    "acceptance": "specjax.cli.bench.acceptance",
    "layouts": "specjax.cli.bench.layouts",
    "loop": "specjax.cli.bench.loop",
    "models": "specjax.cli.bench.models",
    "peers": "specjax.cli.bench.peers",
    "speedup": "specjax.cli.bench.speedup",
    "verification": "specjax.cli.bench.verification",
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
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        module.add_arguments(sub)
        sub.set_defaults(bench=module.run)


def run(args: argparse.Namespace) -> int:
    """Runs the chosen benchmark and prints its report."""
    report: Report = args.bench(args)
    print(report.table())
    print(report.json_line(args.benchmark))
    return 0
