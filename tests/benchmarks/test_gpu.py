"""What XLA's compiler for GPUs says of decoding: what the host does, and bounds for small loops."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from benchmarks import gpu
from benchmarks.compiled import parse
from benchmarks.tpu.estimates import Reader

# Of the loop of T5 base + small with two layers each and 8 rows, on an H100.
MOST_KERNELS = {"block": 450, "opt": 530, "confidence": 500}
MOST_LAUNCHES, MOST_WAITS = 40, 14
# Of drafts before the first token, of zeros; with OPT also of the drafter's distribution.
MOST_VOCABULARY_COPIES = 3

PROGRAM = pathlib.Path(__file__).with_name("tpu_loop.hlo").read_text()


@pytest.mark.parametrize(("graph", "launches"), [(5, 93), (4, 87)])
def test_the_host_runs_loops_and_launches_the_rest(monkeypatch, graph, launches):
    """By hand: 1 + 4 * (2 + 3) + 32 * (1 + 1) in loops, and twice 4 kernels between them."""
    monkeypatch.setattr(gpu, "_GRAPH", graph)
    reader = Reader(parse(PROGRAM), 5)
    # The loop that runs once asks twice, the drafting loop five times; that of 32 runs never.
    assert gpu.host_calls(reader, reader.step(loop=True)) == (launches, 2 + 5)


@pytest.fixture(scope="module")
def loops():
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        pytest.skip("jax[cuda12] is missing: pip install -c constraints.txt -e '.[gpu-compile]'")
    words = ["--programs", "step", "--layers", "2", "--methods", *MOST_KERNELS]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *words],
        check=True, capture_output=True, text=True,
        env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"},
    )  # fmt: skip
    return {row["method"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", MOST_KERNELS)
def test_a_loop_on_a_gpu_copies_no_cache_and_is_few_graphs(loops, method):
    loop = loops[method]
    assert loop["cache_copies"] == 0 and loop["vocabulary_copies"] <= MOST_VOCABULARY_COPIES
    assert 0 < loop["kernels"] <= MOST_KERNELS[method]
    assert loop["launches"] <= MOST_LAUNCHES and loop["waits"] <= MOST_WAITS
