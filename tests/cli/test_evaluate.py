"""`specjax evaluate` scores files of predictions, its own and strangers'."""

import dataclasses
import json
import math
import sys

import numpy as np
import pytest

import specjax
from specjax.cli.main import main
from specjax.evaluation import PassAt1, sandbox
from specjax.evaluation.efficiency import RowCounts
from specjax.runs.evaluation import Likelihood, predictions_of, read_references
from specjax.runs.predictions import lines_of
from tests.cli.infer_command import TEXTS, arguments, rows


def run(capsys, **bindings):
    status = main(["evaluate", *(f"--gin.{name}={value}" for name, value in bindings.items())])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def refused(capsys, **bindings):
    status, out, error = run(capsys, **bindings)
    assert status == 2 and not out and error.count("\n") == 1
    return error


def test_two_methods_are_compared_on_the_same_inputs(done, paths, tmp_path, capsys):
    source, lossless = done
    opt = tmp_path / "opt"
    assert main(arguments(paths, source, opt, RULE="OPT(0.2)")) == 0
    capsys.readouterr()
    status, out, error = run(
        capsys,
        PREDICTIONS=f"('{lossless}', '{opt}')",
        REFERENCES=source,
        METRICS="('bleu', 'exact_match')",
        COSTS="{'verifier': 1.0, 'drafter': 0.1}",
        RESAMPLES=200,
        OUTPUT_DIR=tmp_path / "scores",
    )
    assert status == 0 and not error
    scores = json.loads((tmp_path / "scores/scores.json").read_text())
    assert scores == json.loads(out.splitlines()[-1])
    assert (scores["rows"], scores["resamples"], scores["level"]) == (len(TEXTS), 200, 0.95)
    first = scores["methods"]["out"]["figures"]
    metrics = json.loads((lossless / "metrics.json").read_text())
    ours = first["tokens_per_verifier_call"]
    assert ours["value"] == metrics["tokens_per_verifier_call"]
    assert ours["low"] <= ours["value"] <= ours["high"]
    # A lossless method follows the verifier's own law.
    assert first["nats_per_token"] == dict.fromkeys(("value", "low", "high", "error"), 0.0)
    assert scores["methods"]["opt"]["figures"]["nats_per_token"]["value"] != 0.0
    (pair,) = scores["differences"]
    assert (pair["method"], pair["other"]) == ("opt", "out")
    for key, found in pair["figures"].items():
        a, b = (scores["methods"][m]["figures"][key]["value"] for m in ("opt", "out"))
        assert found["value"] == pytest.approx(a - b)
    assert "told_apart" in out and "95 % intervals over 11 inputs" in out
    assert (tmp_path / "scores/config.gin").exists() and (tmp_path / "scores/runs.jsonl").exists()


def test_an_evaluation_takes_the_place_of_the_one_before(done, tmp_path, capsys):
    settings = {"PREDICTIONS": done[1], "REFERENCES": done[0], "OUTPUT_DIR": tmp_path}
    for metric in ("exact_match", "rouge_1"):
        assert run(capsys, METRICS=f"('{metric}',)", RESAMPLES=100, **settings)[0] == 0
        scores = json.loads((tmp_path / "scores.json").read_text())
        assert metric in scores["methods"]["out"]["figures"]


def test_strangers_predictions_with_several_references(tmp_path, capsys):
    records = [
        {"inputs": "a", "answer": "the Cat", "targets": ["dog", "cat"]},
        {"inputs": "b", "answer": None, "targets": []},
        {"inputs": "c", "answer": "one two", "targets": "two three"},
    ]
    path = write(tmp_path / "mine.jsonl", records)
    status, out, error = run(
        capsys,
        PREDICTIONS=path,
        PREDICTION_FIELD="answer",
        METRICS="('answer_match', 'answer_f1')",
    )
    assert status == 0
    assert error == "specjax: 1 rows of mine have no prediction and count as empty texts\n"
    figures = json.loads(out.splitlines()[-1])["methods"]["mine"]["figures"]
    assert {k: f["value"] for k, f in figures.items()} == {
        "answer_match": pytest.approx(200 / 3),
        "answer_f1": pytest.approx(250 / 3),
    }


def test_runs_of_several_seeds_count_together(tmp_path, capsys):
    texts = [["a", "b", "x"], ["a", "y", "x"]]
    for seed, outputs in enumerate(texts):
        write(tmp_path / f"{seed}/predictions.jsonl", [{"prediction": text} for text in outputs])
    references = tmp_path / "references.txt"
    references.write_text("a\nb\nc\n")
    both = f"{{'both': ('{tmp_path}/0', '{tmp_path}/1'), 'first': '{tmp_path}/0'}}"
    status, out, _ = run(
        capsys, PREDICTIONS=both, REFERENCES=references, METRICS="('exact_match',)"
    )
    scores = json.loads(out.splitlines()[-1])
    assert status == 0
    assert scores["methods"]["both"]["figures"]["exact_match"]["value"] == 50.0
    assert scores["methods"]["first"]["figures"]["exact_match"]["value"] == pytest.approx(200 / 3)


@pytest.mark.parametrize(
    ("name", "text", "field"),
    [
        ("r.tsv", "en\tde\nx\ta\ny\tb\n", "de"),
        ("r.tsv", "x\ta\ny\tb\n", "1"),
        ("r.jsonl", '{"de": ["q", "a"]}\n{"de": "b"}\n', "de"),
    ],
)
def test_references_come_from_fields(tmp_path, capsys, name, text, field):
    path = write(tmp_path / "p.jsonl", [{"prediction": "a", "targets": None}, {"prediction": "b"}])
    (tmp_path / name).write_text(text)
    settings = {"REFERENCES": tmp_path / name, "REFERENCES_FIELD": field}
    status, out, _ = run(capsys, PREDICTIONS=path, METRICS="('exact_match',)", **settings)
    found = json.loads(out.splitlines()[-1])["methods"]["p"]["figures"]["exact_match"]
    assert status == 0 and found["value"] == 100.0


def test_a_terminal_gets_the_tables_only(tmp_path, capsys, monkeypatch):
    path = write(tmp_path / "p.jsonl", [{"prediction": "a", "targets": "a"}] * 2)
    for terminal in (False, True):
        monkeypatch.setattr(sys.stdout, "isatty", lambda answer=terminal: answer)
        status, out, _ = run(capsys, PREDICTIONS=path, METRICS="('exact_match',)")
        assert status == 0 and "exact_match" in out
        assert out.splitlines()[-1].startswith("{") != terminal


def test_texts_that_the_verifier_could_not_write_are_told(done, tmp_path, capsys):
    changed = []
    for record in rows(done[1]):
        del record["checksum"], record["run"]
        impossible = {"log_prob_processed": None} if record["id"] == 3 else {}
        changed.append({**record, **impossible})
    (tmp_path / "a.jsonl").write_bytes(lines_of(changed, "0" * 64))
    status, out, _ = run(capsys, PREDICTIONS=tmp_path / "a.jsonl", METRICS="()")
    figures = json.loads(out.splitlines()[-1])["methods"]["a"]["figures"]
    assert status == 0 and "bleu" not in figures
    assert figures["nats_per_token"]["value"] is None
    assert math.isclose(figures["impossible_share"]["value"], 1 / len(TEXTS))


def test_the_perplexity_under_a_model(paths, tmp_path, capsys):
    """It is that of `Decoder.score`; a failed row is left out, a cut one has no end."""
    texts = ["a b c", "b a", None]
    rows = [{"inputs": "a c b", "prediction": text} for text in texts]
    file = write(tmp_path / "three.jsonl", rows)
    given = {"PREDICTIONS": file, "METRICS": "()", "SCORE": f"'{paths['verifier']}'"}
    status, out, _ = run(capsys, **given)
    assert status == 0
    found = json.loads(out.splitlines()[-1])["methods"]["three"]["figures"]["perplexity"]
    model = specjax.text.load_text_model(paths["verifier"])
    scores = specjax.Decoder(model, max_new_tokens=4).score(["a c b"] * 2, texts[:2])
    count = sum(map(len, scores.log_probs))
    assert found["value"] == pytest.approx(math.exp(-scores.totals.sum() / count), rel=1e-6)
    runs = predictions_of([{**row, "ended_by": "length"} for row in rows[:1]], "cut")
    counts = RowCounts(
        **dict.fromkeys(("emitted", "rounds", "drafted", "accepted"), np.ones(1, int)),
        calls={},
        cut=np.array([True]),
        decoded=np.array([True]),
    )
    cut = Likelihood(model, False, [runs]).perplexity(dataclasses.replace(runs, counts=counts))
    first = scores.log_probs[0][:-1]
    assert cut.value == pytest.approx(math.exp(-first.sum() / len(first)), rel=1e-5)
    file = write(tmp_path / "bare.jsonl", [{"prediction": "a"}])
    assert "score needs the input of each row" in refused(capsys, **given | {"PREDICTIONS": file})
    given["SCORE"] = f"'{tmp_path / 'nowhere'}'"
    assert f"SCORE='{tmp_path / 'nowhere'}': no such file" in refused(capsys, **given)


def test_programs_are_run_where_it_is_asked_for(tmp_path, capsys, monkeypatch):
    problems = [{"test_list": [f"assert one() == {i}"]} for i in (1, 1, 2)]
    outputs = ["def one(): return 1", "def one(): return 2", "def one(): return 2"]
    settings = {
        "PREDICTIONS": write(tmp_path / "p.jsonl", [{"prediction": text} for text in outputs]),
        "PROBLEMS": write(tmp_path / "problems.jsonl", problems),
        "METRICS": "()",
    }
    monkeypatch.setattr(PassAt1, "values", lambda *_: pytest.fail("a program was run"))
    assert "give a sandbox" in refused(capsys, **settings)
    settings["SANDBOX"] = "@Sandbox()"
    monkeypatch.setattr(sandbox, "missing", lambda: "none here")
    assert "cannot be contained here (none here)" in refused(capsys, **settings)
    monkeypatch.undo()
    if sandbox.missing() is not None:
        pytest.skip(f"no sandbox here: {sandbox.missing()}")
    status, out, _ = run(capsys, **settings, **{"Sandbox.seconds": 30.0})
    found = json.loads(out.splitlines()[-1])["methods"]["p"]["figures"]["pass_at_1"]
    assert status == 0 and found["value"] == pytest.approx(200 / 3)
    write(tmp_path / "problems.jsonl", problems[:2])
    assert "has 2 problems, but" in refused(capsys, **settings)
    other = {"prompt": "def two():\n", "entry_point": "two", "test": "def check(f): pass\n"}
    write(tmp_path / "problems.jsonl", [other])
    asked = [{"prediction": "    return 1", "inputs": "def one():\n"}]
    settings["PREDICTIONS"] = write(tmp_path / "q.jsonl", asked)
    told = refused(capsys, **settings)
    assert "tests 'two', which is not in row 0" in told and "q.jsonl" in told
    settings |= {"PROBLEMS": None, "METRICS": "('pass_at_1',)"}
    assert "'pass_at_1' runs the outputs as programs" in refused(capsys, **settings)


def test_a_table_of_references_needs_the_name_of_a_column(tmp_path):
    path = tmp_path / "both.tsv"
    path.write_text("a dog\tein Hund\na man\tein Mann\n")
    assert read_references(path, field=1) == [("ein Hund",), ("ein Mann",)]
    with pytest.raises(ValueError, match="has 2 columns: choose the column of the references"):
        read_references(path)
    path.write_text("ein Hund\nein Mann\n")
    assert read_references(path) == [("ein Hund",), ("ein Mann",)]
