"""The benchmark of rows that read the same tokens."""

import json

from benchmarks import samples


def test_examples_are_read_once(capsys):
    options = ["--shots", "1", "--prompts", "2", "--max-new", "2", "--repeats", "1"]
    assert samples.main(options) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    ways = {row["way"]: row for row in found}
    assert all(row["same_texts"] for row in found)
    read = [ways[way]["tokens_read"] for way in ("prefix kept", "share_prefix", "whole prompts")]
    shared = read[1] - read[0]
    assert shared > 50 and read[2] == read[0] + 2 * shared
    assert samples.main(["--shots", "33"]) == 2
    assert "has 31 different examples besides" in capsys.readouterr().err
