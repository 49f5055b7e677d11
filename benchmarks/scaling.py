"""Speed, memory and work by batch, draft, context and number of devices.

Tokens per second and memory are measured with a pair that decodes here. The work of each device on
meshes of virtual devices is read from compiled programs, without allocation
(XLA_FLAGS=--xla_force_host_platform_device_count=8 before the start).
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import command, workload
from benchmarks.collectives import TINY, Sizes, compiled_pair
from benchmarks.loops import Loops
from benchmarks.traffic import collectives
from specjax.cli.report import Report
from specjax.compilation import placement
from specjax.decoding.method import jitted_run
from specjax.models import PRESETS, preset

HELP = "tokens/s and memory against batch, draft and context; work of a device against devices"

# More steps than any output needs.
_FOREVER = np.int32(2**31 - 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the pair, the three axes, and the meshes."""
    workload.add_pair(parser, required=False)
    parser.add_argument("--grown", action="store_true", help=workload.GROWN_HELP)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64], help="B")
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 5, 10, 20], help="G")
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 512, 4096], help="P")
    parser.add_argument("--base", type=int, nargs=3, default=[1, 5, 64], help="B G P otherwise")
    parser.add_argument("--max-new", type=int, default=16, help="N, the longest output, in tokens")
    parser.add_argument("--repeats", type=int, default=2, help="measurements; the fastest counts")
    parser.add_argument("--devices", type=int, nargs="+", help="read the work on N x 1 meshes")
    parser.add_argument(
        "--model", default="llama", help=f"for --devices: {', '.join(TINY)} (tiny), or a preset"
    )


def run(args: argparse.Namespace) -> Report:
    """Decodes, or with `--devices` compiles."""
    args.prompts = max(args.rows)
    names = ("rows", "drafts", "contexts", "base", "max_new", "repeats")
    workload.check_positive(args, *names, *(["devices"] if args.devices else []))
    rows = list(_work(args) if args.devices else _decoded(args))
    return Report(rows, list(rows[0]))


def _decoded(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures along one axis after the other; the others stay at `--base`."""
    if args.inputs is None:
        raise ValueError("--inputs is needed: a text file, one prompt per line")
    base = dict(zip(("rows", "max_draft", "context"), args.base, strict=True))
    points = [base]
    axes = {"rows": args.rows, "max_draft": args.drafts, "context": args.contexts}
    points += [{**base, name: value} for name, values in axes.items() for value in values]
    args.rows = [1]
    loaded = Loops.of(*workload.load(args), args.max_new)
    for point in sorted({tuple(point.items()) for point in points}, key=points_order(base)):
        row = _measured(loaded, **dict(point), repeats=args.repeats)
        print(f"benchmarks.scaling: {row}", file=sys.stderr, flush=True)  # the next may take long
        yield row


def points_order(base: dict[str, int]) -> Any:
    """Sorts the base first, then the points of one axis after the other."""

    def key(point: tuple[tuple[str, int], ...]) -> Any:
        return [(name, value) for name, value in point if value != base[name]]

    return key


def _measured(
    loaded: Loops, rows: int, max_draft: int, context: int, repeats: int
) -> dict[str, Any]:
    # Prompts that are too short are repeated.
    told = [np.resize(x[:n], context) for x, n in zip(loaded.inputs, loaded.lengths, strict=True)]
    loops = dataclasses.replace(
        loaded,
        inputs=np.resize(np.stack(told), (rows, context)),
        lengths=np.full(rows, context, np.int32),
    )
    loops.check_fits(rows, max_draft)
    method = loops.speculative(max_draft)
    params = loops.params_of(method)
    batch = slice(0, rows)
    state = loops.start(method, batch, 0.0)
    stops = _FOREVER, np.int32(rows)
    decode = jitted_run(placement(state)).lower(method, params, state, *stops).compile()
    seconds, emitted, steps = np.inf, 0, 0
    for _ in range(repeats):
        state = jax.block_until_ready(loops.start(method, batch, 0.0))
        begin = time.perf_counter()
        end = jax.block_until_ready(decode(params, state, *stops))
        seconds = min(seconds, time.perf_counter() - begin)
        emitted, steps = int(end.lengths.sum()), int(end.steps.max())
    used = decode.memory_analysis()
    return {
        "rows": rows,
        "max_draft": max_draft,
        "context": context,
        "tokens_per_s": emitted / seconds,
        "tokens": emitted,
        "rounds": steps,
        "ms_per_round": 1e3 * seconds / steps,
        "parameters_MB": _megabytes(sum(x.nbytes for x in jax.tree.leaves(params))),
        "state_MB": _megabytes(sum(x.nbytes for x in jax.tree.leaves(end))),
        "temporary_MB": _megabytes(used.temp_size_in_bytes),
    }


def _work(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The work of a device in a round, with the largest of `--rows` rows in total."""
    if args.model not in TINY and args.model not in PRESETS:
        raise ValueError(f"--model must be one of {', '.join((*TINY, *PRESETS))}, got {args.model}")
    config = TINY[args.model] if args.model in TINY else preset(args.model)
    _, draft, context = args.base
    sizes = Sizes(
        rows=max(args.rows),
        refill=max(args.devices),
        prompt=context,
        output=args.max_new,
        cache=context + args.max_new + draft + 1,
        draft=draft,
    )
    for devices in args.devices:
        program = compiled_pair(config, devices, 1, sizes)["round"]
        cost, used = program.cost_analysis(), program.memory_analysis()
        yield {
            "devices": devices,
            "rows": sizes.rows,
            "rows_per_device": sizes.rows // devices,
            "MFLOP": cost["flops"] / 1e6,
            "MB_moved": _megabytes(cost["bytes accessed"]),
            "arguments_MB": _megabytes(used.argument_size_in_bytes),
            "temporary_MB": _megabytes(used.temp_size_in_bytes),
            "bytes_between_devices": sum(one.nbytes for one in collectives(program.as_text())),
        }


def _megabytes(nbytes: float) -> float:
    return nbytes / 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this benchmark; see `benchmarks.command.main`."""
    return command.main(__file__, HELP, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
