"""What a benchmark reads, and what it printed."""

import json

import pytest

import specjax
from tests import tiny_pair


@pytest.fixture
def rows(capsys):
    """The rows of the last line, which is JSON."""
    return lambda: json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """The words for four prompts, with a pair whose programs compile quickly."""
    pair = specjax.Pair(tiny_pair.tabular(1), tiny_pair.tabular(2))
    monkeypatch.setattr("specjax.cli.bench.load_pair", lambda **_: pair)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ba\nde\nki\nlo\n", encoding="utf-8")
    return [f"--inputs={prompts}", "--max-new=6"]
