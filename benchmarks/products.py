"""Products of few rows on this CPU: XLA's and those of `specjax.cpu_kernels`, in turns.

A call multiplies up and down through the blocks of several layers, so that a small block is not
read from a core's cache alone. GB/s are of the weights. XLA has float32 in the layout `[K, N]`;
with 16 or 8 bits it would convert them first.
"""

import argparse
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import command
from specjax import cpu_kernels
from specjax.cli.report import Report
from specjax.compilation import jit, step_options
from specjax.errors import UserError
from specjax.models.int8 import Int8Weight
from specjax.models.weights import product

# Name -> the width of the residual stream and of the block.
SIZES = {
    "built-in": (256, 512),
    "T5 base": (768, 2048),
    "SmolLM2-135M": (576, 1536),
    "Qwen2.5 0.5B": (896, 4864),
    "Qwen2.5 1.5B": (1536, 8960),
}
FORMS = ("float32", "bfloat16", "int8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's arguments."""
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="models")
    parser.add_argument(
        "--rows", nargs="+", type=int, default=[1, 2, 4, 6, 8, 16], help="numbers of tokens"
    )
    parser.add_argument("--layers", type=int, default=4, help="blocks of a call")
    parser.add_argument("--repeats", type=int, default=7, help="turns")


def run(args: argparse.Namespace) -> Report:
    """Measures every size, form and number of rows."""
    if obstacle := cpu_kernels.obstacle():
        raise UserError(f"there are no kernels to measure: {obstacle}")
    lines: list[dict[str, Any]] = []
    for name in args.sizes:
        weights = {form: _weights(*SIZES[name], form, args.layers) for form in FORMS}
        for rows in args.rows:
            x = jnp.ones((rows, SIZES[name][0]), jnp.float32)
            calls = {"XLA": _through(jnp.dot, x, weights["float32"])}
            for form in FORMS:
                calls[form] = _through(product, x, weights[form])
            seconds = command.time_interleaved(calls, repeats=args.repeats)
            line: dict[str, Any] = {"size": name, "rows": rows}
            for form, time in seconds.items():
                read = weights.get(form, weights["float32"])
                size = sum(leaf.nbytes for leaf in jax.tree.leaves(read))
                line |= {f"{form}_ms": 1e3 * time, f"{form}_gb_s": size / time / 1e9}
            lines.append(line)
    return Report(lines, list(lines[0]))


def _weights(width: int, hidden: int, form: str, layers: int) -> list[Any]:
    rng = np.random.default_rng(0)
    found: list[Any] = []
    for shape in [(width, hidden), (hidden, width)] * layers:
        if form == "int8":
            values = jnp.asarray(rng.integers(-127, 128, shape, dtype=np.int8))
            found.append(Int8Weight(values, jnp.full(shape[1], 1e-3, jnp.float32)))
        else:
            found.append(jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5, form))
    return found


def _through(dot: Any, x: jax.Array, weights: list[Any]) -> Any:
    @functools.partial(jit, options=step_options)
    def blocks(x: jax.Array, weights: list[Any]) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(dot(x, weight))
        return x

    return functools.partial(blocks, x, weights)


main = command.program(__file__, __doc__.splitlines()[0], add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
