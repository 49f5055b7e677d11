"""What a benchmark reads, and what it printed."""

import json

import pytest

from tests import tiny_pair


@pytest.fixture
def rows(capsys):
    """The rows of the last line, which is JSON."""
    return lambda: json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """The words for four prompts, with a pair whose programs compile quickly."""
    return tiny_pair.quick_bench(tmp_path, monkeypatch)
