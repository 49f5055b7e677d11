"""What XLA's compiler for GPUs makes of decoding, without a GPU: kernels, copies and memory.

Nothing is allocated and nothing runs, and this compiler estimates no times. Kernels are not tuned,
because only a GPU can try them, so another GPU may split a product otherwise. The counts are of a
usual round; see `benchmarks.tpu.estimates`.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import command
from benchmarks.compiled import parse
from benchmarks.tpu import estimates, waste
from benchmarks.tpu.cases import Case
from benchmarks.tpu.estimates import CALLS, FREE, Call, Reader
from benchmarks.tpu.measures import MB, large_arrays, rooflines
from benchmarks.tpu.run import add_cases, numbers_at, programs
from benchmarks.tpu.topologies import GPUS
from specjax.cli.report import Report

HELP = "kernels, launches, copies and memory of the programs that a GPU would run"

_COLUMNS = (
    *("pair", "chip", "rows", "cache", "draft", "weights", "method", "program", "arguments_MB"),
    *("temporaries_MB", "cache_copies", "vocabulary_copies", "verifier_pass", "drafter_pass"),
    *("kernels", "launches", "waits", "roofline_us"),
)
# XLA records so many successive kernels, or more, as a CUDA graph.
_GRAPH = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the cases and the GPUs."""
    add_cases(parser)
    parser.add_argument("--chips", nargs="+", default=["h100"], choices=list(GPUS))


def run(args: argparse.Namespace) -> Report:
    """Compiles all requested programs; a row for each."""
    args.meshes = ["1x1"]
    rows = [_row(case, name, few) for case, name, few in programs(args)]
    notes = (
        "kernels: with copies, in a round or in a whole program; launches by the host: kernels, "
        "and CUDA graphs of them; waits: of the host for a loop's condition.",
    )
    return Report(rows, _COLUMNS, notes)


def _row(case: Case, name: str, few: tuple[int, int] | None) -> dict[str, Any]:
    numbers, _ = numbers_at(case, name, few, numbers_of)
    return {
        **case.names,
        "program": name,
        "arguments_MB": numbers["arguments"] / MB,
        "temporaries_MB": numbers["temporaries"] / MB,
        "roofline_us": 1e6 * rooflines(case)["step"] if name == "step" else None,
        **{key: round(n) for key, n in numbers.items() if key not in ("arguments", "temporaries")},
    }


def numbers_of(program: Any, name: str, case: Case) -> tuple[dict[str, float], dict[str, Any]]:
    """The numbers of a program, as `benchmarks.tpu.measures.numbers_of` gives them for a TPU."""
    parsed = parse(program.as_text())
    reader = Reader(parsed, case.sizes.draft)
    loop = name == "step"
    found = estimates.executed(parsed, case.sizes.draft, loop=loop)
    memory = program.memory_analysis()
    copied = waste.copies(parsed, (one.instruction for one in found), large_arrays(case))
    launches, waits = host_calls(reader, reader.step(loop=loop))
    parts = estimates.by_part(found, lambda one: one.times)
    numbers = {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "cache_copies": copied["cache_copies"],
        "vocabulary_copies": copied["vocabulary_copies"],
        **parts,
        "kernels": sum(parts.values()),
        "launches": launches,
        "waits": waits + loop,  # the round's own condition
    }
    return {key: float(value) for key, value in numbers.items()}, {"padding": 1.0}


def host_calls(reader: Reader, step: Sequence[Call]) -> tuple[int, int]:
    """The kernels and graphs that the host launches in a step, and how often it waits for the GPU.

    Successive kernels are a graph, with branches that have no loop. The host runs all loops, and
    waits for their conditions, unless the number of their runs is known.
    """
    launches = waits = 0
    for call in step:
        kernels = 0
        for one in reader.program.instructions(call.name):
            inner = reader.calls(one, call) if one.opcode in CALLS else []
            if one.opcode == "while" or any(_has_loop(reader, name) for name in one.called):
                launches += call.times * _launches(kernels)
                kernels = 0
                launched, waited = host_calls(reader, inner)
                launches, waits = launches + launched, waits + waited
                if one.opcode == "conditional":
                    waits += call.times
                elif reader.program.trips(one) is None:
                    waits += call.times + inner[0].times
            elif inner:
                kernels += max(sum(x.times > 0 for x in reader.block(branch)) for branch in inner)
            elif one.opcode not in FREE:
                kernels += 1
        launches += call.times * _launches(kernels)
    return launches, waits


def _launches(kernels: int) -> int:
    return 1 if kernels >= _GRAPH else kernels


def _has_loop(reader: Reader, name: str) -> bool:
    inside = reader.program.instructions(name)
    return any(
        one.opcode == "while" or any(_has_loop(reader, called) for called in one.called)
        for one in inside
    )


main = command.program(__file__, HELP, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
