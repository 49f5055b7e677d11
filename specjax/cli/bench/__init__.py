"""`specjax bench NAME`: measures a pair of models; each result is a ratio within one run.

A benchmark is a module with `HELP`, `add_arguments(parser)` and `run(args) -> Report`. `bench`
prints its table and, as the last line, all figures as JSON. Further benchmarks are in the folder
`benchmarks/` of a checkout: `python -m benchmarks.NAME`.
"""

import argparse
import importlib
from collections.abc import Sequence

from specjax.cli.bench.report import Report
from specjax.cli.help_format import HelpFormatter
from specjax.errors import UserError

BENCHMARKS = {
    "acceptance": "specjax.cli.bench.acceptance",
    "cost": "specjax.cli.bench.cost",
    "peers": "specjax.cli.bench.peers",
    "speedup": "specjax.cli.bench.speedup",
}
# Former benchmarks of the command -> their modules in `benchmarks`.
MOVED = {
    "cascades": "cascades",
    "drafting": "lookups",
    "loop": "loop",
    "ragged": "ragged",
    "screening": "estimates",
    "stopping": "stopping",
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


def check_words(words: Sequence[str]) -> None:
    """Raises ValueError for an unknown benchmark, or one that is now in `benchmarks`."""
    name = words[0] if words else ""
    if name in MOVED:
        raise UserError(
            f"bench {name} was moved: run python -m benchmarks.{MOVED[name]} in a checkout, "
            "with the same options"
        )
    if not name.startswith("-") and name not in BENCHMARKS:
        what = f"bench {name}: unknown benchmark" if name else "give a benchmark"
        raise UserError(f"{what}; choose from {', '.join(BENCHMARKS)}")


def run(args: argparse.Namespace) -> int:
    """Runs the chosen benchmark and prints its report."""
    report: Report = args.bench(args)
    report.show(args.benchmark)
    return 0
