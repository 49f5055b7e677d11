"""The benchmark of rules and verification runs, and its last line is JSON."""

import json

import pytest

from benchmarks.verification import main

SMALL = ["--rows", "1", "2", "--drafts", "2", "--vocabs", "32", "--repeats", "1"]


@pytest.mark.exhaustive
def test_table_and_json(capsys):
    assert main([*SMALL, "--rules", "OPT", "Mentored"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    figures = json.loads(last)
    assert len(figures["rows"]) == 2 * 2 * 2 and all(r["ratio"] > 0 for r in figures["rows"])
    assert any("OPT" in line and "Block" in line for line in table)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rules", "Best"], "--rules Best is unknown: choose from Lossless"),
        (["--verifications", "Tree"], "--verifications Tree is unknown: choose from Token"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--rows", "0"], "--rows must be at least 1, got 0"),
    ],
)
def test_bad_input_is_one_line(capsys, args, message):
    assert main([*SMALL, *args]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
