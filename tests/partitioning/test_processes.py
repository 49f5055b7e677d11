"""Two processes with four devices each, as one program, decode as one process with eight does."""

import json
import re
import time

import pytest

from tests.fuzzing import kills
from tests.variants import variants


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return kills.Hosts(tmp_path_factory.mktemp("program"), 24)


# Runs the command; its largest program takes some seconds more to compile. After the mesh, no group
# of devices may need a connection, because gloo waits only 30 seconds for it.
SLOW = """
import sys, time
import jax
from jax._src import distributed
from specjax.cli.entry import run
from specjax.runs import processes

def groups():
    client = distributed.global_state.client
    return {{name for name, _ in client.key_value_dir_get_bytes("cpu:gloo/")}}

def connect(mesh, connect=processes.connect, **wait):
    connect(mesh, **wait)
    connected.append(groups())

def compiled(event, seconds, **about):
    if event.endswith("backend_compile_duration") and "_run" in about.get("fun_name", ""):
        print("slept", file=sys.stderr)
        time.sleep({seconds})

connected = []
processes.connect = connect
jax.monitoring.register_event_duration_secs_listener(compiled)
try:
    run()
finally:  # it exits
    print("groups:", *map(len, (*connected, groups())), file=sys.stderr)
"""


@pytest.mark.parametrize("seconds", variants([0, 35], 0))
def test_two_processes_write_what_one_does(setting, tmp_path, seconds):
    setting.undisturbed(tmp_path / "alone")
    outputs = [tmp_path / "both", tmp_path / "nothing"]
    program = ("-c", SLOW.format(seconds=seconds))
    first, second = setting.both(outputs[0], OUTPUT_DIR=outputs[1], program=program)
    printed, _ = kills.finish(first)
    assert json.loads(printed.splitlines()[-1])["rows"] == 24
    printed, told = kills.finish(second)
    assert "{" not in printed and not outputs[1].exists()  # gloo prints, too
    assert "slept" in told
    joined, meshed, later = map(int, re.search(r"^groups: (\d+) (\d+) (\d+)$", told, re.M).groups())
    assert 0 < joined < meshed == later
    assert setting.outcome(outputs[0]) == setting.outcome(tmp_path / "alone")
    configs = [
        json.loads((tmp_path / x / "infer_config.json").read_text()) for x in ("both", "alone")
    ]
    assert configs[0] == configs[1]  # though each process has read its part of the models


@pytest.mark.parametrize("index", variants([0, 1], 0))
def test_a_process_that_lost_the_other_ends_with_one_line(setting, tmp_path, index):
    children = setting.both(tmp_path)
    while setting.written(tmp_path) < 4:
        assert all(child.poll() is None for child in children)
        time.sleep(0.01)
    children[index].kill()
    children[index].communicate()
    kills.check_lost(children[1 - index])


@pytest.mark.exhaustive
def test_a_process_with_another_input_ends_both(setting, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("ba\n" * 24)
    for child in setting.both(tmp_path / "out", INPUT=other):
        _, told = child.communicate(timeout=300)
        assert child.returncode == 2, told
        assert re.search(r"^specjax infer: process 1 has another input than process 0", told, re.M)


@pytest.mark.exhaustive
def test_a_process_that_refuses_its_input_ends_both(setting, tmp_path):
    first, second = setting.both(tmp_path / "out", INPUT=tmp_path / "nothing.txt")
    _, told = second.communicate(timeout=300)
    assert second.returncode == 2 and "nothing.txt" in told
    _, told = first.communicate(timeout=300)
    assert first.returncode == 1, told
    assert re.search(r"^specjax infer: process 0 of 2 lost another process", told, re.M)
