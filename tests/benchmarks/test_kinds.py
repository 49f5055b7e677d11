"""The benchmark of kinds of requests: its requests, sides and figures."""

import gzip
import json

import pytest

import specjax
from benchmarks import kinds
from specjax.models import LlamaConfig, model_from_config
from specjax.tokenizers import ByteTokenizer
from tests.models.tiny import random_params

FUNCTION = {"prompt": "def one():\n", "canonical_solution": "    return 1\n"}
TASK = {"task_id": 11, "text": "Write two.", "test_list": ["assert two() == 2"], "code": "two = 2"}


def written(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return str(path)


@pytest.fixture
def pair(monkeypatch):
    config = LlamaConfig(
        vocab_size=259, embed_dim=16, num_heads=2, head_dim=8, mlp_dim=24, num_layers=1,
        num_kv_heads=2,
    )  # fmt: skip
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = "{% for m in messages %}Q: {{ m.content }}\nA:{% endfor %}"
    model = model_from_config(config)
    both = {
        name: specjax.TextModel(model, random_params(model, seed), tokenizer)
        for seed, name in enumerate(("verifier", "drafter"))
    }

    def load(weights, **paths):
        return specjax.Pair(**{name: both[name] for name in paths})

    monkeypatch.setattr(kinds, "load_pair", load)


def test_each_side_of_each_kind_has_its_figures(pair, tmp_path, capsys):
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
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    of = {(row["kind"], row["side"]): row for row in rows}
    assert {kind for kind, _ in of} == {"complete", "edit", "write", "explain", "all"}
    assert {side for _, side in of} == {"alone", "drafter, G=2", "Lookup(min_match=2), G=2"}
    for (kind, side), row in of.items():
        count = {"complete": 2, "edit": 2, "write": 1, "explain": 1, "all": 6}[kind]
        assert row["same"] == f"{count}/{count}" and row["tokens_per_s"] > 0
        assert row["speedup"] == 1.0 or side != "alone"
        assert 1.0 <= row["tokens_per_pass"] <= 3.0


def test_without_a_drafter_copies_are_measured(pair, tmp_path, capsys):
    file = written(tmp_path / "mbpp.jsonl", [TASK])
    assert kinds.main(["--verifier=x", f"--mbpp={file}", "--max-new=4", "--drafts=2"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert {row["side"] for row in rows} == {"alone", "Lookup(min_ngram=2), G=2"}
    assert all(row["tokens_per_pass"] == 1.0 for row in rows if row["side"] == "alone")


def test_without_requests_there_is_one_line(capsys):
    assert kinds.main(["--verifier=x"]) == 2
    assert "no requests: give --human-eval, --mbpp or --spec-bench" in capsys.readouterr().err
