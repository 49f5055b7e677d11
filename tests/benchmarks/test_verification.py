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
