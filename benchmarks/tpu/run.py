"""Estimates of a TPU's compiler for decoding: bytes, copies, padding and cycles of programs.

Nothing is allocated and nothing runs: an estimate is not a measurement. `benchmarks.tpu.estimates`
defines the counts, docs/scaling.md the roofline.
"""

import argparse
import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import command
from benchmarks.shapes import PROGRAMS, Sizes
from benchmarks.tpu.cases import ALONE, METHODS, PAIRS, Case, at_depth, configs_of
from benchmarks.tpu.measures import numbers_of, rooflines
from benchmarks.tpu.tables import COLUMNS, notes_of, row_of, step_of
from benchmarks.tpu.topologies import TPUS, mesh_of
from specjax.cli.bench import check_positive
from specjax.cli.report import Report
from specjax.models.int8 import FORMS

HELP = "bytes, copies, padding and estimated cycles of the programs that a TPU would run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the cases, the chips and what is printed of them."""
    add_cases(parser)
    parser.add_argument("--chips", nargs="+", default=["v5e"], choices=list(TPUS))
    parser.add_argument("--meshes", nargs="+", default=["1x1"], help="DATAxMODEL")
    parser.add_argument(
        "--tokens-per-round", type=float, nargs="+", default=[3.3], help="for the speed-ups"
    )
    parser.add_argument("--top", type=int, default=0, help="list the costliest instructions")


def add_cases(parser: argparse.ArgumentParser) -> None:
    """Adds the pairs, methods and sizes."""
    parser.add_argument(
        "--pairs", nargs="+", default=["t5"], help=f"{', '.join(PAIRS)}, or VERIFIER+DRAFTER"
    )
    parser.add_argument("--methods", nargs="+", default=["block"], choices=list(METHODS))
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--rows", type=int, nargs="+", default=[8], help="B")
    parser.add_argument("--draft", type=int, default=5, help="G")
    parser.add_argument("--cache", type=int, nargs="+", default=[256], help="S, cache positions")
    parser.add_argument("--prompt", type=int, default=64, help="P")
    parser.add_argument(
        "--layers",
        nargs="+",
        default=["8", "16"],
        help="two depths, for extrapolation; one depth, unchanged; or all",
    )
    parser.add_argument(
        "--weights", nargs="+", default=["None"], choices=["None", *FORMS], help="of both networks"
    )
    parser.add_argument("--draft-vocab", type=int, help="tokens that a head drafts; by default all")


def run(args: argparse.Namespace) -> Report:
    """Compiles all requested programs; a row for each."""
    rows, notes = [], []
    for case, name, few in programs(args):
        row, facts = _measured(case, name, few, args)
        rows.append(row)
        notes += notes_of(row, facts, args.top)
    return Report(rows, COLUMNS, notes)


def programs(args: argparse.Namespace) -> Iterator[tuple[Case, str, tuple[int, int] | None]]:
    """The programs to compile: case, name, and two depths if all layers are extrapolated."""
    check_positive(args, "rows", "draft", "cache", "prompt")
    depths = _depths(args.layers)
    few = (depths[0], depths[1]) if len(depths) == 2 else None
    for case in _cases(args, depths[0] if len(depths) == 1 else None):
        for name in args.programs:
            # Methods differ only in steps: only the first compiles the others.
            if name == "step" or case.method == args.methods[0]:
                yield case, name, few


def _depths(words: Sequence[str]) -> tuple[int, ...]:
    if list(words) == ["all"]:
        return ()
    if not all(word.isdigit() and int(word) for word in words) or not 1 <= len(words) <= 2:
        raise ValueError(f"--layers must be all, one depth or two depths, got {' '.join(words)}")
    if len(set(words)) < len(words):
        raise ValueError(f"--layers must be two different depths, got {' '.join(words)}")
    return tuple(sorted(map(int, words)))


def _cases(args: argparse.Namespace, depth: int | None) -> Iterator[Case]:
    for pair in args.pairs:
        configs_of(pair)
        for chip in args.chips:
            for mesh in args.meshes:
                data, ways = _sizes_of(mesh)
                where = mesh_of(chip, data, ways)
                for batch, cache in itertools.product(args.rows, args.cache):
                    if batch % data:
                        raise ValueError(f"--rows must be a multiple of {data}, got {batch}")
                    sizes = Sizes(
                        rows=batch,
                        refill=data,
                        prompt=args.prompt,
                        output=max(1, cache - args.prompt - args.draft - 1),
                        cache=cache,
                        draft=args.draft,
                    )
                    for form, method in itertools.product(args.weights, args.methods):
                        weights = None if form == "None" else form
                        vocab = args.draft_vocab
                        yield Case(pair, chip, where, method, sizes, depth, weights, vocab)


def _sizes_of(mesh: str) -> tuple[int, int]:
    data, _, ways = mesh.partition("x")
    if not (data.isdigit() and ways.isdigit() and int(data) and int(ways)):
        raise ValueError(f"--meshes must be DATAxMODEL, such as 2x2, got {mesh!r}")
    return int(data), int(ways)


def _measured(
    case: Case, name: str, few: tuple[int, int] | None, args: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, Any]]:
    numbers, facts = numbers_at(case, name, few)
    if name != "step":
        return row_of(case, name, numbers, facts), facts
    least, alone = rooflines(case), None
    if case.method != ALONE:
        reference = dataclasses.replace(case, method=ALONE, draft_vocab=None)
        alone = numbers_at(reference, name, few)[0], rooflines(reference)
    row = row_of(case, name, numbers, facts)
    return row | step_of(case, numbers, least, alone, args.tokens_per_round), facts


@functools.cache
def numbers_at(
    case: Case, name: str, few: tuple[int, int] | None, numbers_of: Any = numbers_of
) -> tuple[Mapping[str, float], dict[str, Any]]:
    """The numbers of a program with all layers, and facts of the compiled programs."""
    facts: dict[str, Any] = {"padding": 0.0}

    def measure(layers: tuple[int, int]) -> dict[str, float]:
        nonlocal facts
        begin = time.perf_counter()
        program = case.compile(layers, (name,))[name]
        what = f"{case.pair} {case.chip} {case.method} {name}, {layers[0]} + {layers[1]} layers"
        seconds = time.perf_counter() - begin
        print(f"benchmarks: {what}: {seconds:.0f} s", file=sys.stderr, flush=True)
        numbers, found = numbers_of(program, name, case)
        facts = max(facts, found, key=lambda one: one["padding"])
        return numbers

    both = case.method != ALONE and not case.has_head
    return at_depth(measure, few, case.layers, both), facts


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this benchmark; see `benchmarks.command.main`."""
    package = str(__file__).rsplit("run.py", 1)[0]
    return command.main(package, HELP, add_arguments, run, argv)
