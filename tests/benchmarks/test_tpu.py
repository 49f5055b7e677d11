"""What a TPU's compiler says of decoding: how its text is read, and bounds for a small loop."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from benchmarks import gpu
from benchmarks.compiled import parse
from benchmarks.predicted import CHIPS
from benchmarks.shapes import Sizes
from benchmarks.tpu import estimates, run, topologies, waste
from benchmarks.tpu.cases import Case, at_depth
from benchmarks.tpu.measures import rooflines
from specjax.partitioning import make_mesh

# Of the loop of T5 base + small with two layers each and 8 rows, on a v5e.
MOST_PADDING = 1.35  # 6 positions in a tile of 8 make 1.33
MOST_TEMPORARIES = 3.0  # times the verifier's logits
LOGITS_MB = 8 * 6 * 32_128 * 4 / 1e6

PROGRAM = pathlib.Path(__file__).with_name("tpu_loop.hlo").read_text()
LARGE = waste.Large(8, 3_210, 640, 8 * 640 * 128, frozenset({(640, 1_024)}))


@pytest.fixture(scope="module")
def small():
    program = parse(PROGRAM)
    return program, estimates.executed(program, 5, loop=True)


def cycles_by_part(run):
    return estimates.by_part(run, lambda one: one.cycles)


def test_cycles_are_counted_by_part_as_often_as_they_run(small):
    _, found = small
    assert cycles_by_part(found) == {
        "verifier_pass": 1000,
        "drafter_pass": 4 * 100 + 9000,  # the first catches up
        "distribution": 0,
        "draw": 4 * 10,
        "rule": 32 * 3,
        "verification": 0,
        "bonus": 50 + 7,
        "bookkeeping": 20,
        "unnamed": 4,
    }
    assert {name: cycles for name, (cycles, _) in estimates.by_region(found).items()} == {
        "outside": 1000 + 9000 + 32 * 3 + 20 + 4,
        "draft steps": 4 * 110,
        "bonus": 57,
        "skipped": 0,
    }


def test_what_has_no_estimate_is_named(small):
    _, found = small
    assert estimates.without_estimate(found) == {"tpu_custom_call": 1}
    # Two copies beside the rest, of bfloat16.
    assert estimates.by_region(found)["outside"][1] == 2 * 8 * 640 * 128 * 2


def test_a_kernel_that_reads_a_cache_takes_the_time_of_its_bytes(small):
    reads = PROGRAM.replace("custom-call(%s), custom_call", "custom-call(%turned), custom_call")
    assert reads != PROGRAM
    found = estimates.executed(parse(reads), 5, loop=True, kernels=estimates.Kernels(640, 1000.0))
    cycles = round(8 * 640 * 128 * 4 / 1000)
    reading = estimates.by_part(found, lambda one: one.times * one.reading)
    assert {part: n for part, n in reading.items() if n} == {"unnamed": cycles}
    before = cycles_by_part(small[1])["unnamed"]
    assert cycles_by_part(found)["unnamed"] == before + cycles
    assert estimates.without_estimate(found) == {}


def test_a_loop_starts_where_its_counter_does():
    later = PROGRAM.replace("%zero = s32[]{:T(128)} constant(0)", "%zero = s32[] constant(1)")
    found = estimates.executed(parse(later), 5, loop=True)
    cycles = cycles_by_part(found)
    assert (cycles["drafter_pass"], cycles["rule"]) == (3 * 100 + 9000, 31 * 3)


def test_copies_are_told_from_fetches(small):
    program, found = small
    copied = waste.copies(program, (one.instruction for one in found), LARGE)
    # By a fusion, and where the drafter catches up; not before the loop.
    counted = {"cache_copies": 2, "cache_stores": 1, "cache_fused": 1}
    assert {name: n for name, n in copied.items() if n} == counted
    assert waste.host_transfers(program) == waste.doubles(program) == 0


def test_the_most_padded_array_is_named(small):
    _, found = small
    ratio, maker, array = waste.worst_padding((one.instruction for one in found), LARGE)
    assert ratio == pytest.approx(128 / 6)
    assert (maker.name, str(array)) == ("p", "f32[8,6,3210]{1,0,2:T(8,128)}")


@pytest.mark.parametrize(
    ("text", "nbytes", "padded"),
    [
        ("f32[8,6,32128]{2,1,0:T(8,128)}", 8 * 6 * 32_128 * 4, 8 * 8 * 32_128 * 4),
        ("f32[8,6,32128]{1,0,2:T(8,128)}", 8 * 6 * 32_128 * 4, 32_128 * 8 * 128 * 4),
        ("f32[8,6,32128]{2,0,1:T(8,128)}", 8 * 6 * 32_128 * 4, 8 * 6 * 32_128 * 4),
        ("bf16[8,6,256,64]{3,1,2,0:T(8,128)(2,1)S(1)}", 1_572_864, 8 * 256 * 8 * 128 * 2),
        ("bf16[768]{0:T(1024)(128)(2,1)}", 1_536, 2_048),
        ("pred[8]{0:T(512)(128)(4,1)}", 8, 512),
        ("s32[]{:T(128)}", 4, 512),
        ("f32[3,5]{1,0}", 60, 60),
        ("f32[]", 4, 4),
    ],
)
def test_layouts_are_read(text, nbytes, padded):
    one = parse(f"ENTRY %main (a: f32[]) -> f32[] {{\n  ROOT %x = {text} add(%a, %a)\n}}")
    (array,) = one.instructions("main")[0].arrays
    assert (array.nbytes, array.padded_nbytes) == (nbytes, padded)
    assert array.space == ("S(1)" in text)


def test_the_layers_that_are_missing_are_extrapolated():
    def measure(layers):
        return {"cycles": 7.0 + 3.0 * layers[0] + 2.0 * layers[1], "copies": 2.0 - layers[0]}

    assert at_depth(measure, (2, 4), (12, 8), both=True) == {"cycles": 59.0, "copies": 0.0}
    assert at_depth(measure, (2, 4), (12, 8), both=False)["cycles"] == 7 + 36 + 4
    assert at_depth(measure, None, (1, 1), both=True)["cycles"] == 12


@pytest.mark.parametrize(
    ("pair", "method", "millions"),
    [
        ("t5", "eagle", 11.8),
        ("t5", "dflash_2", 18.3),
        ("t5_xl", "eagle", 81.8),
        ("t5_xl", "dflash_3", 190.9),
        ("t5_xl", "dflash_5", 304.1),
    ],
)
def test_a_head_has_the_matrices_of_its_kind(pair, method, millions):
    """EAGLE-3: 3 D² + 7 D I + 2 D I and the feed-forward block; a layer of DFlash: 6 D I and it."""
    sizes = Sizes(rows=8, cache=256, prompt=64, draft=5)
    case = Case(pair, "v5e", make_mesh(1, 1), method, sizes)
    network = case.networks(case.layers)[1].abstract_params()["network"]
    count = sum(leaf.size for leaf in jax.tree.leaves(network))
    assert count / 1e6 == pytest.approx(millions, abs=0.06)
    # A draft reads them, but for the projection of the verifier's states, as often as it passes.
    passes = sizes.draft if method == "eagle" else 1
    bound = rooflines(case)["drafter_pass"]
    assert bound > 0.8 * passes * 2 * count / CHIPS["v5e"].bandwidth


@pytest.mark.parametrize(("benchmark", "extra"), [(run, "tpu"), (gpu, "gpu")])
def test_without_the_compiler_one_line_says_how_to_install_it(
    monkeypatch, capsys, benchmark, extra
):
    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda name: None)
    assert benchmark.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"python -m pip install -c constraints.txt -e '.[{extra}-compile]'")


@pytest.fixture(scope="module")
def loops():
    """Of two layers, on one device and on a mesh."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install -c constraints.txt -e '.[tpu-compile]'")
    words = ["--pairs", "t5", "--chips", "v5e", "--layers", "2", "--programs", "step"]
    words += ["--meshes", "1x1", "2x2"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tpu", *words],
        check=True, capture_output=True, text=True,
        env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"},
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])["rows"]


@pytest.mark.exhaustive
def test_a_loop_on_a_tpu_wastes_nothing(loops):
    for loop in loops:
        assert loop["padding"] <= MOST_PADDING, loop["padded"]
        # Stores bring a cache that was fetched to the chip back as it lies.
        assert loop["cache_copies"] == loop["cache_fused"] == 0
        assert loop["host_transfers"] == loop["float64"] == 0
        assert sum(line["cycles"] for line in loop["parts"][:-1]) > 0, "no estimate is found"
    assert loops[0]["temporaries_MB"] <= MOST_TEMPORARIES * LOGITS_MB
    # A pass moves [4, 6, 768] bfloat16; a distribution of one token is [4, 32128] float32.
    assert 0.03 < loops[1]["widest_collective_MB"] < 0.1
