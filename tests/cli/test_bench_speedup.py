"""The benchmark of whole pairs runs on any pair, and names bad input."""

import json

import pytest

from specjax.cli.main import main
from tests import tiny_pair


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pair")
    paths = tiny_pair.write_pair(directory / "models")
    prompts = directory / "prompts.txt"
    prompts.write_text("\n".join(tiny_pair.sentences(4, seed=1)) + "\n", encoding="utf-8")
    named = [f"--{name}={path}" for name, path in paths.items()]
    small = ["--rows=2", "--drafts=2", "--temperatures=0", "--max-new=6", "--repeats=1"]
    return ["bench", "speedup", *named, f"--inputs={prompts}", *small]


def test_figures_fit_together(arguments, capsys):
    assert main(arguments) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    ideal = row["tokens_per_call"] / (row["max_draft"] * row["c"] + row["r"])
    assert row["ideal"] == pytest.approx(ideal)
    assert row["of_ideal"] == pytest.approx(row["speedup"] / ideal)
    assert 1 <= row["tokens_per_call"] <= 3 and row["overhead"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--rows=9", "has 4 prompts, but a batch takes 9"),
        ("--drafts=0", "--drafts must be at least 1, got [0]"),
        ("--inputs=/missing.txt", "/missing.txt"),
    ],
)
def test_bad_input_is_one_line(arguments, capsys, change, message):
    assert main([*arguments, change]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
