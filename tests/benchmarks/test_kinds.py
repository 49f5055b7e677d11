"""The benchmark of kinds of requests: its requests, sides and figures."""

import gzip
import json

import pytest

import specjax
from benchmarks import kinds
from tests import tiny_pair

FUNCTION = {"prompt": "def one():\n", "canonical_solution": "    return 1\n"}
TASK = {"task_id": 11, "text": "Write two.", "test_list": ["assert two() == 2"], "code": "two = 2"}


def written(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return str(path)


@pytest.fixture
def pair(monkeypatch):
    both = {"verifier": tiny_pair.chat_model(0), "drafter": tiny_pair.chat_model(1)}

    def load(weights, dtype, **paths):
        return specjax.Pair(**{name: both[name] for name in paths})

    monkeypatch.setattr(kinds, "load_pair", load)


def test_each_side_of_each_kind_has_its_figures(pair, tmp_path, rows):
    files = [
        f"--human-eval={written(tmp_path / 'he.jsonl.gz', [FUNCTION] * 3)}",
        f"--mbpp={written(tmp_path / 'mbpp.jsonl', [TASK, TASK | {'task_id': 900}])}",
    ]
    sizes = [
        "--each=2",
        "--max-new=6",
        "--drafts=2",
        "--drafting",
        "drafter",
        "Lookup(min_match=2)",
    ]
    assert kinds.main(["--verifier=x", "--drafter=y", *files, *sizes]) == 0
    of = {(row["kind"], row["side"]): row for row in rows()}
    assert {kind for kind, _ in of} == {"complete", "edit", "write", "explain", "all"}
    assert {side for _, side in of} == {"alone", "drafter, G=2", "Lookup(min_match=2), G=2"}
    for (kind, side), row in of.items():
        count = {"complete": 2, "edit": 2, "write": 1, "explain": 1, "all": 6}[kind]
        assert row["same"] == f"{count}/{count}" and row["tokens_per_s"] > 0
        assert row["speedup"] == 1.0 or side != "alone"
        assert 1.0 <= row["tokens_per_pass"] <= 3.0


def test_rows_are_decoded_together(pair, tmp_path, capsys, rows):
    file = written(tmp_path / "mbpp.jsonl", [TASK | {"task_id": i} for i in range(11, 16)])
    words = ["--verifier=x", f"--mbpp={file}", "--max-new=4", "--drafts=2", "--each=3"]
    assert kinds.main([*words, "--rows=2"]) == 0
    rows = rows()
    assert {row["same"] for row in rows if row["kind"] == "write"} == {"4/4"}
    assert all(1.0 <= row["tokens_per_pass"] <= 3.0 for row in rows)
    assert kinds.main([*words, "--rows=6"]) == 2
    assert "write has 5 requests: give a smaller --rows" in capsys.readouterr().err
    assert kinds.main([*words, "--rows=2", "--llama"]) == 2
    assert "leave out --llama or --rows" in capsys.readouterr().err


def test_tokens_after_an_end_do_not_count():
    made = kinds.Made.cut([[5, 6, 2, 2], [7, 8, 9, 5]], [2])
    assert [x.tolist() for x in made.tokens] == [[5, 6], [7, 8, 9, 5]]
    assert made.emitted == 7


def test_without_a_drafter_copies_are_measured(pair, tmp_path, rows):
    file = written(tmp_path / "mbpp.jsonl", [TASK])
    assert kinds.main(["--verifier=x", f"--mbpp={file}", "--max-new=4", "--drafts=2"]) == 0
    rows = rows()
    assert {row["side"] for row in rows} == {"alone", "Lookup(min_ngram=2), G=2"}
    assert all(row["tokens_per_pass"] == 1.0 for row in rows if row["side"] == "alone")
