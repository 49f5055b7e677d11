"""The benchmark of what scales: rows on devices, and the axes of a pair that decodes."""

import argparse
import json

import numpy as np
import pytest

from benchmarks import scaling, workload
from benchmarks.loops import Loops
from tests import tiny_pair


@pytest.mark.exhaustive
def test_devices_share_the_work_of_a_round(capsys):
    words = ["--devices", "1", "2", "--rows", "4", "--base", "1", "2", "8", "--max-new", "8"]
    assert scaling.main(words) == 0
    one, two = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert (one["rows_per_device"], two["rows_per_device"]) == (4, 2)
    # All but a few numbers by device is work on rows.
    assert two["MFLOP"] == pytest.approx(one["MFLOP"] / 2, rel=0.02)
    assert one["bytes_between_devices"] == 0 < two["bytes_between_devices"] < 100


@pytest.mark.exhaustive
def test_each_axis_is_measured_from_the_base(tmp_path, monkeypatch, capsys):
    paths = tiny_pair.write_pair(tmp_path / "pair")
    inputs = tmp_path / "inputs.txt"
    inputs.write_text("".join(f"{text}\n" for text in tiny_pair.sentences(2, seed=0)))
    asked = []

    def measured(setup, **sizes):
        assert isinstance(setup, Loops)
        asked.append(sizes)
        return {**sizes, "tokens_per_s": 1.0}

    monkeypatch.setattr(scaling, "_measured", measured)
    words = [f"--{name}={path}" for name, path in paths.items()]
    words += [f"--inputs={inputs}", "--rows", "1", "3", "--drafts", "2", "--contexts", "4", "5"]
    assert scaling.main([*words, "--base", "1", "2", "4", "--repeats", "1"]) == 0
    assert [tuple(sizes.values()) for sizes in asked] == [
        (1, 2, 4, 1),
        (1, 2, 5, 1),
        (3, 2, 4, 1),
    ]
    monkeypatch.undo()
    found = workload.load(
        argparse.Namespace(
            **paths, inputs=str(inputs), prompts=1, rows=[1], max_new=4, repeats=1, grown=False
        )
    )
    loops = Loops.of(*found, 4)
    row = scaling._measured(loops, rows=3, max_draft=2, context=5, repeats=1)
    assert row["tokens_per_s"] > 0 and 1 <= row["rounds"] <= 4
    both = [model.prepared for model in loops.pair.named.values()]
    assert row["parameters_MB"] == pytest.approx(sum(x.nbytes for x in _leaves(both)) / 1e6)
    assert row["state_MB"] > 0


def _leaves(tree):
    import jax

    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
