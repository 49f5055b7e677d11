"""Estimates of a TPU's compiler for kernels and the plain code that they replace.

The operations are those of `sampling.draw_kernels`, with V numbers for each row, and attention to a
cache of S positions by six queries of Llama 3 8B (`attend`) and one of Llama 3.2 1B (`attend_one`).

Each operation is compiled twice as its own program: as plain code, vmapped over rows, and as a
kernel. Nothing runs: an estimate is not a measurement. For each program there are two estimates, in
microseconds at the chip's clock, as if its operations ran in sequence:

- `xla`: the estimates in the program's text, with some 1,800 cycles for most small operations.
Gathers have none, and count as 0. For a kernel, the simulation, or the time of its arrays in main
memory if that is longer.
- `sim`: libtpu's simulation of the final instructions. It allows reads and writes of main memory at
the same time, each at full speed: an operation takes at least the time of its arrays, and the
program at least the time of all of them, with parallel copies. The simulator fails at most gathers:
"-".
"""

import argparse
import functools
import itertools
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import command
from benchmarks.compiled import Program, parse
from benchmarks.predicted import CHIPS
from benchmarks.tpu.estimates import executed
from benchmarks.tpu.topologies import TPUS, mesh_of
from specjax import sampling
from specjax.cli.bench import check_positive
from specjax.cli.report import Report
from specjax.models import attention_kernel, preset
from specjax.models.attention import forms
from specjax.models.cache import layout_for
from specjax.sampling import distributions, draw_kernels, draws
from specjax.types import Sampling

HELP = "estimated microseconds of the TPU kernels for softmax and draws, and of plain code"

Shape = tuple[tuple[int, ...], Any]


class Operation(NamedTuple):
    """Plain code for a row, the kernel for many, and the arrays of a row.

    The arrays follow from V or S, and from whether they are the kernel's.
    """

    plain: Any
    kernel: Any
    arrays: Callable[[int, bool], Sequence[Shape]]


def _draw(names: str) -> Callable[[int, bool], Sequence[Shape]]:
    """Of logits or weights x, temperatures t and uniforms u."""

    def arrays(size: int, _: bool) -> Sequence[Shape]:
        shapes = {"x": (size,), "t": (), "u": (sampling.num_uniforms(size),)}
        return [(shapes[name], jnp.float32) for name in names]

    return arrays


def _attention(name: str, queries: int) -> Operation:
    config = preset(name)
    heads, kv_heads, width = config.num_heads, config.kv_heads, config.head_dim

    def arrays(size: int, kernel: bool) -> Sequence[Shape]:
        shared = kv_heads if kernel else layout_for("tpu", heads, kv_heads, width).heads
        entries = (size, kv_heads // shared, shared * width), jnp.bfloat16
        query = (queries, kv_heads, heads // kv_heads, width), jnp.bfloat16
        return query, entries, entries, ((1, 1, queries, size), jnp.float32)

    kernel, plain = forms(width**-0.5, None)
    return Operation(plain, kernel, arrays)


OPERATIONS = {
    "drawn": Operation(
        lambda x, t, u: distributions.drawn_plainly(x, Sampling(t), u),
        draw_kernels.drawn,
        _draw("xtu"),
    ),
    "draw": Operation(draws.draw_plainly, draw_kernels.draw_by_weights, _draw("xu")),
    "distribution": Operation(
        lambda x, t: distributions.distribution_plainly(x, Sampling(t)),
        draw_kernels.distribution,
        _draw("xt"),
    ),
    "attend": _attention("llama3_8b", 6),
    "attend_one": _attention("llama3.2_1b", 1),
}
_FORMS = PLAIN, KERNEL = ("plain", "kernel")


class Case(NamedTuple):
    """A name of `OPERATIONS`, a name of `TPUS`, B rows and V or S."""

    operation: str
    chip: str
    rows: int
    size: int


def simulated(text: str) -> dict[str, int]:
    """Operation -> cycles, from a textproto of libtpu's simulation."""
    pattern = r'hlo_op_name:\s*"([^"]*)"\s+estimated_cycles:\s*(\d+)'
    return {name: int(cycles) for name, cycles in re.findall(pattern, text)}


def cycles_of(
    program: Program, profile: Mapping[str, int], rate: float
) -> tuple[float, float | None]:
    """XLA's estimate and the simulation of a program, in cycles.

    Args:
      program: a compiled program.
      profile: operation -> simulated cycles.
      rate: bytes per cycle of the chip's main memory.

    Returns:
      Both; None for the simulation if it lacks an operation.
    """
    known = {one.name: one for block in program.computations.values() for one in block}
    xla, sim, moved, whole = 0.0, 0.0, 0.0, True
    for item in executed(program, 1, loop=False):
        one = item.instruction
        moved += item.moved
        if one.cycles is None and one.name not in profile:
            continue
        arrays = [array for name in one.operands if name in known for array in known[name].arrays]
        size = sum(array.padded_nbytes for array in (*arrays, *one.arrays) if array.space == 0)
        moved += item.times * size
        whole &= one.name in profile
        sim += item.times * max(profile.get(one.name, 0), size / rate)
        xla += max(item.cycles, item.times * size / rate if one.target else 0)
    return xla, max(sim, moved / rate) if whole else None


def _compile(case: Case, form: str, simulate: bool, folder: Path) -> None:
    """Writes the program and its profile; runs in its own process."""
    os.dup2(os.open(folder / "stderr", os.O_CREAT | os.O_WRONLY), 2)
    if simulate:
        flags = os.environ.get("LIBTPU_INIT_ARGS", "")
        os.environ["LIBTPU_INIT_ARGS"] = f"{flags} --xla_jf_dump_static_llo_profile_to={folder}"
    jax.config.update("jax_enable_compilation_cache", False)  # cached programs are not simulated
    where = NamedSharding(mesh_of(case.chip, 1, 1), PartitionSpec())
    plain, kernel, arrays = OPERATIONS[case.operation]
    args = [
        jax.ShapeDtypeStruct((case.rows, *shape), dtype, sharding=where)
        for shape, dtype in arrays(case.size, form == KERNEL)
    ]
    if simulate:
        attention_kernel.pl.pallas_call = _of_all_blocks  # type: ignore[assignment]
    code = jax.vmap(plain) if form == PLAIN else kernel
    text = jax.jit(code).lower(*args).compile().as_text()
    assert text is not None, "libtpu's programs have a text"
    (folder / "program").write_text(text)


_pallas_call = pl.pallas_call


class _Numbers(NamedTuple):
    """Numbers that are computed where a kernel reads them."""

    at: Callable[[Any], Any]

    def __getitem__(self, i: Any) -> Any:
        return self.at(i)


def _of_all_blocks(kernel: Any, **options: Any) -> Any:
    """A call of `attend_long` that reads all blocks of all rows.

    The simulator does not know the copy of numbers that decide what a kernel reads.
    """
    if "grid_spec" not in options:
        return _pallas_call(kernel, **options)
    spec, name = options.pop("grid_spec"), options.pop("name")

    def call(row_of: Array, block_of: Array, ends: Array, *args: Array) -> Array:
        steps = row_of.size
        blocks = steps // ends.size
        rows = _Numbers(lambda i: jax.lax.div(i, jnp.int32(blocks)))
        places = _Numbers(lambda i: jax.lax.rem(i, jnp.int32(blocks)))
        whole = _Numbers(lambda _: jnp.int32(1 << 30))

        def of_step(one: Any) -> Any:
            index = one.index_map
            return pl.BlockSpec(
                one.block_shape, lambda part, i: index(part, i, rows, places, whole)
            )

        return _pallas_call(
            functools.partial(kernel, rows, places, whole),
            grid=(spec.grid[0], steps),
            in_specs=[of_step(one) for one in spec.in_specs],
            out_specs=of_step(spec.out_specs),
            scratch_shapes=spec.scratch_shapes,
            name=name,
            **options,
        )(*args)

    return call


def _measured(
    case: Case, form: str, simulate: bool, seconds: float
) -> tuple[tuple[float | None, float | None], str]:
    """Both estimates in microseconds; and the reason if there is none, else ""."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = multiprocessing.get_context("spawn").Process(
            target=_compile, args=(case, form, simulate, folder)
        )
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
            return (None, None), f"stopped after {seconds:g} s"
        if process.exitcode:
            said = (folder / "stderr").read_text(errors="replace")
            found = re.search(r"Static LLO profiling .*|^[\w.]+Error: .*", said, re.MULTILINE)
            return (None, None), found[0] if found else f"exit status {process.exitcode}"
        profile: dict[str, int] = {}
        for file in folder.glob("*.textproto"):
            profile |= simulated(file.read_text())
        hertz = TPUS[case.chip].hertz
        program = parse((folder / "program").read_text())
        xla, sim = cycles_of(program, profile, CHIPS[case.chip].bandwidth / hertz)
    return (1e6 * xla / hertz, None if sim is None else 1e6 * sim / hertz), ""


def _row(case: Case, seconds: float) -> tuple[dict[str, Any], list[str]]:
    """Both forms of an operation, and the failures."""
    row: dict[str, Any] = case._asdict()
    notes, found = [], {}
    for form in _FORMS:
        what = f"{form} {case.operation}, {case.chip}, {case.rows} x {case.size}"
        print(f"benchmarks.kernels: {what}", file=sys.stderr, flush=True)
        found[form], why = _measured(case, form, True, seconds)
        if why and form == PLAIN:  # a kernel has only the simulation
            notes.append(f"{what} is not simulated: {why}")
            found[form], why = _measured(case, form, False, seconds)
        if why:
            notes.append(f"{what} fails: {why}")
    for i, kind in enumerate(("xla", "sim")):
        plain, kernel = found[PLAIN][i], found[KERNEL][i]
        row |= {f"plain_{kind}_us": plain, f"kernel_{kind}_us": kernel}
        row[f"ratio_{kind}"] = plain / kernel if plain and kernel else None
    return row, notes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the operations, sizes and chips."""
    names = list(OPERATIONS)
    parser.add_argument("--operations", nargs="+", default=names, choices=names)
    parser.add_argument("--chips", nargs="+", default=["v5e"], choices=list(TPUS))
    parser.add_argument("--rows", type=int, nargs="+", default=[8], help="B")
    parser.add_argument(
        "--vocabularies", type=int, nargs="+", default=[32128, 128256, 256000], help="V"
    )
    parser.add_argument("--caches", type=int, nargs="+", default=[256, 1024, 4096], help="S")
    parser.add_argument("--seconds", type=int, default=300, help="the limit of each compilation")


def run(args: argparse.Namespace) -> Report:
    """Compiles all requested programs; a row for each operation."""
    check_positive(args, "rows", "vocabularies", "caches", "seconds")
    if unsuited := [size for size in args.vocabularies if not draw_kernels.suits(size)]:
        raise ValueError(f"--vocabularies must be sizes that kernels support, got {unsuited}")
    mesh_of(args.chips[0], 1, 1)  # raises if libtpu is missing
    made = [
        _row(Case(operation, chip, rows, size), args.seconds)
        for operation, chip, rows in itertools.product(args.operations, args.chips, args.rows)
        for size in (args.caches if operation.startswith("attend") else args.vocabularies)
    ]
    notes = [note for _, failed in made for note in failed]
    return Report([row for row, _ in made], list(made[0][0]), notes)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m benchmarks.kernels`."""
    return command.main(__file__, HELP, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
