"""What TPUs' compilers make of the networks' kernels, where libtpu is installed."""

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

# Tokens, experts of a chip, E, M, whether in 8 bits, whether with biases: Qwen 3 30B-A3B, gpt-oss,
# Gemma 4 26B-A4B, Mixtral.
_EXPERTS = """
import jax
from jax.sharding import NamedSharding, PartitionSpec
from benchmarks.tpu.topologies import mesh_of
from specjax.models.experts_kernel import mixed_few
from specjax.models.int8 import Int8Weight

where = NamedSharding(mesh_of({chip!r}, 1, 1), PartitionSpec())

def of(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

for tokens, count, width, inner, in_8_bits, biased, dtype in (
    (6, 16, 2048, 768, False, False, "bfloat16"), (192, 16, 2048, 768, True, False, "bfloat16"),
    (8, 4, 2880, 2880, False, True, "bfloat16"), (256, 4, 2880, 2880, True, True, "bfloat16"),
    (48, 16, 2816, 704, False, False, "bfloat16"), (1, 8, 4096, 14336, False, False, "bfloat16"),
    (32, 8, 2048, 1024, False, False, "float32"),
):
    shapes = [(count, width, inner)] * 2 + [(count, inner, width)]
    channels = [(x, y) for x, _, y in shapes]
    stacks = [of(shape, dtype) for shape in shapes]
    if in_8_bits:
        pairs = zip(shapes, channels)
        stacks = [Int8Weight(of(x, "int8"), of(y, "float32")) for x, y in pairs]
    biases = [of(shape, dtype) for shape in channels] if biased else None
    given = of((tokens, width), dtype), of((tokens, count), "float32"), stacks, biases
    mixed_few.lower(*given, activations=("silu", "linear")).compile()
"""

# Two layers of Qwen 3 30B-A3B on eight chips, for one row.
_MESH = """
import re
from benchmarks.shapes import Sizes
from benchmarks.tpu.cases import Case
from benchmarks.tpu.topologies import mesh_of

sizes = Sizes(rows=1, refill=1, prompt=64, output=185, cache=256, draft=5)
case = Case("qwen3_30b_a3b+qwen3_0.6b", "v5e", mesh_of("v5e", 1, 8), "block", sizes)
text = case.compile((2, 2), ("step",))["step"].as_text()
assert len(re.findall(r"%mixed_few[.\\d]* = ", text)) == 2
stacks = r"bf16\\[\\d+,(?:2048,768|768,2048)\\]\\S*"
copied = re.findall(stacks + r" (?:copy|slice|all-gather)\\S*\\(", text)
assert not copied, copied
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


@pytest.mark.parametrize("chip", CHIPS)
def test_the_kernel_of_experts_compiles(chip):
    _run(_EXPERTS.format(chip=chip), CHIPS[chip])


def test_a_round_copies_no_experts():
    _run(_MESH, CHIPS["v5e"])
