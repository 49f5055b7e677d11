"""What TPUs' compilers make of the attention kernel, where libtpu is installed."""

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu"),
]
CHIPS = {"v5e": "v5litepod-4", "v5p": "v5p-8", "v6e": "v6e-4"}

# Rows, queries, K, N, D, whether heads have biases of their own, and entries beside the cache:
# Llama 3 8B and 1B, T5 base and small, Gemma 2 9B and 4 31B, one head, many heads, wide trees. Each
# also with a limit of the logits and a sink of each head.
_KERNELS = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from benchmarks.tpu.topologies import mesh_of
from specjax.models.attention import forms

where = NamedSharding(mesh_of({chip!r}, 1, 1), PartitionSpec())
for length, kv_heads, groups, width, own, beside, dtype in (
    (6, 8, 4, 128, False, 6, "bfloat16"), (1, 8, 4, 64, False, 0, "bfloat16"),
    (6, 8, 8, 64, False, 0, "bfloat16"),
    (6, 12, 1, 64, True, 0, "bfloat16"), (1, 6, 1, 64, True, 0, "bfloat16"),
    (6, 8, 2, 256, False, 0, "bfloat16"), (6, 4, 8, 512, False, 6, "bfloat16"),
    (1, 1, 8, 256, False, 1, "bfloat16"),
    (1, 1, 1, 128, False, 0, "float32"), (2, 32, 1, 128, False, 0, "bfloat16"),
    (31, 8, 4, 128, False, 31, "bfloat16"), (6, 5, 3, 64, False, 6, "float32"),
    (32, 1, 32, 64, False, 32, "float32"), (32, 25, 1, 64, False, 32, "bfloat16"),
):
    def segment(number):
        entries = (3, number, 1, kv_heads * width), dtype
        heads = kv_heads if own else 1
        return [entries, entries, ((3, heads, 1, length, number), "float32")]

    shapes = [((3, length, kv_heads, groups, width), dtype), *segment(2500)]
    shapes += segment(beside) if beside else []
    sink = ((3, 1, 1, kv_heads * width), dtype)
    sinks = [sink, sink, ((3, kv_heads, groups, 1, 1), "float32")]
    for softcap, more in ((None, []), (50.0, sinks)):
        args = [jax.ShapeDtypeStruct(*shape, sharding=where) for shape in shapes + more]
        jax.jit(forms(width**-0.5, softcap)[0]).lower(*args).compile()
"""

# One layer of Llama 3 8B and of 1B, with a cache of 4,096 positions.
_ROUND = """
from benchmarks.compiled import parse
from benchmarks.shapes import Sizes
from benchmarks.tpu import waste
from benchmarks.tpu.cases import Case
from benchmarks.tpu.estimates import Kernels, executed
from benchmarks.tpu.measures import large_arrays
from benchmarks.tpu.topologies import mesh_of

sizes = Sizes(rows=8, refill=1, prompt=64, output=4000, cache=4096, draft=5)
case = Case("llama3", "v5e", mesh_of("v5e", 1, 1), "block", sizes, depth=1)
program = parse(case.compile((1, 1), ("step",))["step"].as_text())
run = executed(program, 5, loop=True, kernels=Kernels(4096, 500.0))
copied = waste.copies(program, (one.instruction for one in run), large_arrays(case))
assert copied["cache_copies"] == copied["cache_fused"] == 0, copied
kernels = [one for one in run if one.reading]
assert sum(one.times for one in kernels) == 1 + 5, kernels
logits = [
    array
    for one in run
    for array in one.instruction.arrays
    if array.dtype == "f32" and 4096 in array.shape and array.size >= 8 * 32 * 4096
]
assert not logits, logits
"""


def _run(program, kind):
    own = {
        "JAX_PLATFORMS": "cpu",
        "TPU_ACCELERATOR_TYPE": kind,
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("chip", CHIPS)
def test_the_kernel_compiles(chip):
    _run(_KERNELS.format(chip=chip), CHIPS[chip])


def test_a_round_writes_no_logits_of_a_long_cache():
    _run(_ROUND, CHIPS["v5e"])
