"""`specjax train head` from a tiny pair and prompts to a head in the drafter's directory."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.numpy

from specjax import load_pair, load_text_model
from specjax.checkpoints.attachments import load_head
from specjax.cli.main import main
from specjax.runs.run_directory import Store
from specjax.training.checkpoint_store import CheckpointStore
from tests.fuzzing.kills import interrupted
from tests.tiny_pair import sentences, write_pair

SETTINGS = {
    "EPOCHS": 4,
    "LEARNING_RATE": 0.02,
    "MAX_NEW_TOKENS": 8,
    "BLOCKS": 1,
    "Labelling.shard_rows": 24,
    "Labelling.batch_size": 12,
    "HeadRecipe.rows_per_batch": 8,
    "HeadRecipe.checkpoints": 4,
    "HeadRecipe.progress": False,
}

PAIR = ("drafter", "verifier")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    for name, count, seed in (("train", 60, 0), ("validation", 20, 1)):
        text = "\n".join(sentences(count, seed)) + "\n"
        (directory / f"{name}.txt").write_text(text, encoding="utf-8")
    write_pair(directory / "pair")
    return directory


def run(data, output, *files, **bindings):
    pair = {name.upper(): data / "pair" / name for name in PAIR}
    sources = {"DATA_DIR": data, "TRAIN": "train.txt", "VALIDATION": "validation.txt"}
    values = {**SETTINGS, **pair, **sources, "OUTPUT_DIR": output, **bindings}
    return main(
        ["train", "head", *files, *(f"--gin.{name}={value}" for name, value in values.items())]
    )


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    output = tmp_path_factory.mktemp("run")
    assert run(data, output) == 0
    return output


def outcome(output):
    """All that a run has made but what tells of its process."""
    names = ("head_data", "acceptance_head", "results.json")
    files = [f for name in names for f in (output / name, *(output / name).glob("*"))]
    return {str(f.relative_to(output)): f.read_bytes() for f in files if f.is_file()}


def test_the_result_is_a_head_and_a_table(data, trained, tmp_path, capsys):
    assert run(data, trained) == 0
    table, line = capsys.readouterr().out.rsplit("\n", 2)[:2]
    results = json.loads(line)
    assert results == json.loads((trained / "results.json").read_text())
    rows = {row["predictor"]: row for row in results["rows"]}
    assert list(rows) == ["head", "constant"]
    assert [shown.split()[0] for shown in table.splitlines()[2:4]] == ["head", "constant"]
    assert results["num_params"] == 16 * 16 + 16 + 17 and results["bytes"] == 4 * 289
    # It has learnt which tokens are accepted, which no constant tells.
    assert rows["head"]["loss"] < rows["constant"]["loss"]
    assert all(row["kl"] > 0.0 for row in rows.values())
    assert {"config.gin", "runs.jsonl", "metrics.jsonl"} <= {f.name for f in trained.iterdir()}
    drafter = tmp_path / "drafter"
    shutil.copytree(data / "pair" / "drafter", drafter)
    shutil.copytree(trained / "acceptance_head", drafter / "acceptance_head")
    head = load_pair(drafter=drafter, verifier=data / "pair" / "verifier").drafter.head
    assert head.notes["rejection_weight"] == 6.0 and head.notes["mixing"] == 0.15


def test_a_head_that_reads_confidences_knows_more(data, trained, tmp_path):
    longer = {"CONFIDENCES": True, "BLOCKS": 0, "EPOCHS": 40, "LEARNING_RATE": 0.05}
    assert run(data, tmp_path, **longer) == 0
    alone, both = (
        json.loads((output / "results.json").read_text())["rows"][0]
        for output in (trained, tmp_path)
    )
    assert both["kl"] < alone["kl"] and both["loss"] < alone["loss"]
    assert load_head(tmp_path).config.confidences


def test_a_head_is_installed_on_request(data, trained, tmp_path, capsys):
    drafter, output = tmp_path / "drafter", tmp_path / "run"
    shutil.copytree(data / "pair" / "drafter", drafter)
    shutil.copytree(trained, output)
    bindings = {"DRAFTER": drafter, "INSTALL": True}
    (drafter / "acceptance_head").mkdir()
    (drafter / "acceptance_head" / "mine").write_text("")
    assert run(data, output, **bindings) == 2
    assert "acceptance_head is not an acceptance head: move it" in capsys.readouterr().err
    shutil.rmtree(drafter / "acceptance_head")
    assert run(data, output, **bindings) == 0
    for place in (drafter, output):
        (place / "acceptance_head" / "mine").write_text("mine")
    assert run(data, output, **bindings) == 0  # the same head stays, with what is beside it
    assert all((place / "acceptance_head" / "mine").exists() for place in (drafter, output))
    (drafter / "acceptance_head" / "head.json").write_text("{}")
    assert run(data, output, **bindings) == 0
    earlier = drafter / "acceptance_head.earlier-1"
    assert {"head.json", "head.safetensors", "mine"} < {file.name for file in earlier.iterdir()}
    assert load_text_model(drafter).head.config == load_head(trained).config


def test_a_head_that_is_worse_than_a_constant_is_not_installed(data, tmp_path, capsys):
    """One step at a huge rate ruins it; an option installs it regardless."""
    drafter = tmp_path / "drafter"
    shutil.copytree(data / "pair" / "drafter", drafter)
    bindings = {"DRAFTER": drafter, "LEARNING_RATE": 10, "EPOCHS": 1}
    assert run(data, tmp_path / "run", INSTALL=True, **bindings) == 0
    shown = capsys.readouterr()
    results = json.loads(shown.out.splitlines()[-1])
    losses = {row["predictor"]: row["loss"] for row in results["rows"]}
    assert losses["head"] > losses["constant"] and results["installed"] is False
    assert "the head was not installed: its validation loss" in shown.err
    assert "INSTALL='anyway' installs it regardless" in shown.err
    assert not (drafter / "acceptance_head").exists()
    assert run(data, tmp_path / "run", INSTALL="anyway", **bindings) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["installed"] is True
    assert load_text_model(drafter).head is not None


def test_a_stopped_run_continues_to_the_same_bits(data, trained, tmp_path, monkeypatch):
    """Stopped while it labels, and while it trains."""
    with interrupted(monkeypatch, Store, "put", 3):
        assert run(data, tmp_path) == 130
    assert len(list((tmp_path / "head_data").iterdir())) == 2
    with interrupted(monkeypatch, CheckpointStore, "save"):
        assert run(data, tmp_path) == 130
    kept = {f.name: f.stat().st_mtime_ns for f in (tmp_path / "head_data").iterdir()}
    assert len(kept) == 4  # three shards of 60 prompts and one of 20
    assert run(data, tmp_path) == 0
    assert kept == {f.name: f.stat().st_mtime_ns for f in (tmp_path / "head_data").iterdir()}
    assert outcome(tmp_path) == outcome(trained)


def test_prompts_that_cannot_be_decoded_are_left_out(data, tmp_path, capsys):
    lines = (data / "train.txt").read_text().splitlines()[:4]
    Path(data / "gaps.txt").write_text("\n".join([*lines[:2], "", "ba " * 2000, *lines[2:]]) + "\n")
    bindings = {"TRAIN": "gaps.txt", "VALIDATION": "gaps.txt", "HeadRecipe.progress": True}
    assert run(data, tmp_path, EPOCHS=1, MIXING=None, **bindings) == 0
    told = capsys.readouterr().err
    assert "2 of 6 training prompts were skipped: training example 2 is empty" in told
    assert "and 1 more" in told
    (shard,) = (tmp_path / "head_data").glob("training-*")
    assert len(safetensors.numpy.load_file(shard)["offsets"]) == 5


def test_another_configuration_in_the_same_directory_is_refused(data, trained, capsys):
    for bindings, messages in (
        (
            {"REJECTION_WEIGHT": 3, "MIXING": 0.5},
            ("task.rejection_weight: 6.0 there, 3.0 here", "training.mixing: 0.15 there, 0.5 here"),
        ),
        ({"TRAIN": "validation.txt"}, ("training.prompts: 60 there, 20 here",)),
    ):
        assert run(data, trained, **bindings) == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert all(message in error.lower() for message in messages)
