"""A day on a GPU: parts are kept as they end, and a dry run measures all of them."""

import argparse
import json
import time
from pathlib import Path

import pytest

from benchmarks import gpu_day
from benchmarks.gpu_day import Part
from specjax.evaluation import sandbox

ROWS = [{"kind": "complete", "side": "alone", "speedup": 1.0}, {"kind": "all", "side": "G=4"}]


def quick(name, text, needs=None):
    """A part that prints a text."""
    return Part(name, "kinds", ["timeit", "-n1", "-r1", f"print({text!r}); {text}"], needs)


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    def run(parts, *words):
        monkeypatch.setattr(gpu_day, "parts", lambda args: parts)
        assert gpu_day.main([str(tmp_path / "day"), "--dry-run", *words]) == 0
        figures = json.loads((tmp_path / "day/figures.json").read_bytes())
        return figures, (tmp_path / "day/table.md").read_text(), capfd.readouterr().out

    return run


def test_what_is_done_is_not_measured_again(run, tmp_path):
    waits = tmp_path / "head"
    parts = [
        quick("good", json.dumps({"rows": ROWS})),
        quick("bad", "1 / 0"),
        quick("slow", "__import__('time').sleep(60)"),
        quick("after", json.dumps({"rows": ROWS}), waits),
    ]
    figures, table, _ = run(parts, "--part-minutes=0.6", "--parts", "g", "b", "a")
    assert {name: part["status"] for name, part in figures.items()} == {
        "good": "done",
        "bad": "failed (1)",
    }
    assert "ZeroDivisionError" in figures["bad"]["log"][-1]
    assert "| good | G=4 |" in table and "complete" not in table and "bad: failed (1)" in table
    waits.touch()
    figures, _, out = run([parts[0], parts[3]])
    assert figures["after"]["report"] == {"rows": ROWS}
    assert "after ..." in out and "good ..." not in out


def test_a_part_ends_in_time_with_all_that_it_started(tmp_path):
    text = "import subprocess, time; print(subprocess.Popen(['sleep', '3600']).pid, flush=True)"
    part = Part("slow", "kinds", ["timeit", "-n1", "-r1", f"{text}; time.sleep(60)"])
    found = gpu_day.measured(part, tmp_path, 10)
    assert found["status"] == "out of time" and found["seconds"] >= 10
    (child,) = found["log"]
    for _ in range(600):
        stat = Path(f"/proc/{child}/stat")
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("it runs on")


def test_the_most_telling_parts_come_first(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_day, "_smollm2", lambda: None)
    parser = argparse.ArgumentParser()
    gpu_day.add_arguments(parser)
    files = ["--human-eval=he", "--mbpp=a b/mbpp", "--train=t"]
    names = [x.name for x in gpu_day.parts(parser.parse_args(["day", *files]))]
    assert names[:2] == ["round_t5_base", "round_llama3_8b"] and "human_eval" not in names
    pair = ["--verifier=v", "--drafter=d"]
    parts = gpu_day.parts(parser.parse_args(["day", *files, *pair]))
    assert parts[0].name == "pair_b1_t0" and "a b/mbpp" in parts[0].words
    assert len({part.name for part in parts}) == len(parts)


@pytest.mark.exhaustive
@pytest.mark.skipif(sandbox.missing() is not None, reason="no sandbox here")
def test_a_dry_run_measures_every_part(tmp_path):
    """Some minutes, also on a CPU: `make test-outside`."""
    pytest.importorskip("transformers")
    assert gpu_day.main([str(tmp_path / "day"), "--dry-run", "--part-minutes=60"]) == 0
    figures = json.loads((tmp_path / "day/figures.json").read_bytes())
    assert {name: part for name, part in figures.items() if part["status"] != "done"} == {}
    table = (tmp_path / "day/table.md").read_text()
    for kind in gpu_day._COLUMNS:
        assert f"## {kind}" in table
    for text in ("transformers, assistant", "round_llama3_8b_graph", "train_pair_block", "mbpp"):
        assert text in table
