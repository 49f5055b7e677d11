"""Two processes with four devices each, as one program, decode as one process with eight does."""

import re

import pytest

from tests.cli import kill_hosts


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return kill_hosts.Run(tmp_path_factory.mktemp("program"), "program", 24)


def test_two_processes_write_what_one_does(setting, tmp_path):
    setting.alone(tmp_path / "alone")
    for child in setting.both(tmp_path / "both"):
        kill_hosts.finish(child)
    kill_hosts.compare(tmp_path / "both", tmp_path / "alone")
    parts = sorted((tmp_path / "both").glob("part-*/predictions.jsonl"))
    rows = [path.read_bytes().splitlines() for path in parts]
    assert len(rows) == 2 and all(len(own) > 4 for own in rows) and sum(map(len, rows)) == 24


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", kill_hosts.MESHES)
def test_a_process_that_is_killed_is_started_again(way):
    assert kill_hosts.run(way, 10, seed=1)["kills"] == 10


@pytest.mark.exhaustive
def test_a_process_with_another_input_ends_both(setting, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("ba\n" * 24)
    for child in setting.both(tmp_path / "out", INPUT=other):
        _, told = child.communicate(timeout=300)
        assert child.returncode == 2, told
        assert re.search(r"^specjax infer: process 1 has an input that differs", told, re.M)


@pytest.mark.exhaustive
def test_a_process_that_refuses_its_input_ends_both(setting, tmp_path):
    first, second = setting.both(tmp_path / "out", INPUT=tmp_path / "nothing.txt")
    _, told = second.communicate(timeout=300)
    assert second.returncode == 2 and "nothing.txt" in told
    _, told = first.communicate(timeout=300)
    assert first.returncode == 1, told
    assert re.search(r"^specjax infer: process 0 of 2 lost another process", told, re.M)
