"""What a TPU's compiler says of kernels: how its simulation is read, and what is refused."""

import importlib.util
import json
import subprocess
import sys

import pytest

from benchmarks import kernels
from benchmarks.compiled import parse
from benchmarks.tpu import topologies

PROFILE = """hlo_op_estimate {
  hlo_op_name: "fusion.1"
  estimated_cycles: 2789
  num_equivalent_hlos: 1
}
hlo_op_estimate {
  hlo_op_name: "drawn.1"
  estimated_cycles: 10
}
"""
# 4096 bytes each: in main memory x, y and drawn.1, on the chip copy-done and fusion.1.
PROGRAM = """ENTRY %main (x: f32[8,128], y: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  %y = f32[8,128]{1,0:T(8,128)} parameter(1)
  %copy-start = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]) copy-start(%y)
  %copy-done = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%copy-start)
  %fusion.1 = f32[8,128]{1,0:T(8,128)S(1)} fusion(%x), backend_config={"estimated_cycles":"1800"}
  ROOT %drawn.1 = f32[8,128]{1,0:T(8,128)} custom-call(%fusion.1, %copy-done), \
custom_call_target="tpu_custom_call", backend_config={"estimated_cycles":"10"}
}"""


def test_a_simulation_is_read():
    assert kernels.simulated(PROFILE) == {"fusion.1": 2789, "drawn.1": 10}
    assert kernels.simulated("") == {}


@pytest.mark.parametrize(
    ("rate", "xla", "sim"),
    [
        (4096.0, 1800 + 10, 2789 + 10),
        (4.0, 1800 + 1024, 2789 + 1024),  # what drawn.1 writes
        (1.0, 1800 + 4096, 3 * 4096),  # everything, with the copy
    ],
)
def test_memory_takes_its_time(rate, xla, sim):
    assert kernels.cycles_of(parse(PROGRAM), kernels.simulated(PROFILE), rate) == (xla, sim)


def test_part_of_a_simulation_is_none():
    assert kernels.cycles_of(parse(PROGRAM), {"drawn.1": 10}, 4096.0) == (1810, None)


def test_unknown_chips_are_refused(capsys):
    with pytest.raises(SystemExit) as refused:
        kernels.main(["--chips", "v1"])
    assert refused.value.code == 2
    assert "v5e" in capsys.readouterr().err


def test_without_libtpu_one_line_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda name: None)
    assert kernels.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("python -m pip install -c constraints.txt -e '.[tpu-compile]'")


@pytest.mark.exhaustive
def test_kernels_are_estimated_and_a_refused_simulation_is_said():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install -c constraints.txt -e '.[tpu-compile]'")
    words = ["--operations", "distribution", "draw", "--vocabularies", "1024"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernels", *words],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    softmax, draw = json.loads(done.stdout.splitlines()[-1])["rows"]
    figures = [value for name, value in softmax.items() if name.endswith("us")]
    assert len(figures) == 4
    assert all(value > 0 for value in figures)
    assert draw["plain_xla_us"] > 0
    assert draw["kernel_sim_us"] > 0
    refused = "plain draw, v5e, 8 x 1024 is not simulated: "
    assert (draw["plain_sim_us"] is None) == (refused in done.stdout)
