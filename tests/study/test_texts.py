"""The texts of a comparison: prompts, references, problems; and what they are scored with."""

import dataclasses
import json

import numpy as np
import pytest

from specjax.data.few_shot import FewShot
from specjax.evaluation import AnswerAfter, Sandbox, sandbox
from specjax.study import Bench, Measuring, Setting, Texts, read_texts, score
from specjax.study.measure import Measured, Times
from tests.study import world

ROWS = [
    {"ask": f"What is {i}?", "known": [f"#### {i}", f"It is {i}. #### {i}.0"], "one": str(i),
     "test_list": [f"assert x == {i}"]}
    for i in range(4)
]  # fmt: skip
TASK = FewShot(prompt="Q: {ask}\nA:", references="known")


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_a_task_makes_texts_and_references(source):
    found = read_texts(source, task=TASK, limit=3)
    assert [e.inputs for e in found.examples] == [f"Q: What is {i}?\nA:" for i in range(3)]
    assert found.references[2] == ("#### 2", "It is 2. #### 2.0") and len(found.references) == 3
    assert found.examples[2].targets == found.references[2] and found.problems is None
    # A gin file gives both names the same value.
    assert read_texts(source, task=TASK, references="known", limit=3) == found
    one = read_texts(source, task=FewShot(prompt="{ask}", references="one"))
    assert one.examples[3].targets == "3" and one.references[3] == ("3",)
    nothing = read_texts(source, task=FewShot(prompt="{ask}"), problems=source)
    assert nothing.references == [()] * 4 and nothing.problems[3].tests.strip() == "assert x == 3"


def test_what_does_not_go_together_is_refused(source, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text(json.dumps(ROWS[0]) + "\n")
    ask = {"inputs_field": "ask"}
    for options, message in (
        (
            {"task": TASK, "references": source},
            "references and references_field must be left out: ",
        ),
        ({"task": TASK, "targets_field": "one"}, "targets_field must be left out"),
        ({**ask, "targets_field": "one", "references": source}, "give either `references`"),
        ({**ask, "references_field": "one"}, "references_field='one' needs references: give their"),
        ({"task": TASK, "problems": few}, "few.jsonl has 1 problems, but .*rows.jsonl has 4 rows"),
        ({**ask, "references": few, "references_field": "one"}, "has 4 texts, but there are 1 ref"),
    ):
        with pytest.raises(ValueError, match=message):
            read_texts(source, **options)
    assert read_texts(source, **ask).references == [()] * 4  # there may be none


def test_the_problems_of_other_texts_are_refused(tmp_path):
    rows = [
        {"prompt": f"def fn{i}(x):\n", "entry_point": f"fn{i}", "test": "def check(f): pass\n"}
        for i in range(8)
    ]

    def written(name, some):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in some))
        return path

    source, turned = written("a.jsonl", rows), written("b.jsonl", rows[::-1])
    task = FewShot(prompt="{prompt}")
    found = read_texts(source, task=task, problems=source, limit=3)
    assert [problem.entry_point for problem in found.problems] == ["fn0", "fn1", "fn2"]
    # Three of the eight, drawn: the problems of the first three are others.
    drawn = dataclasses.replace(task, limit=3)
    with pytest.raises(ValueError, match="has 8 problems, but .* has 3 rows"):
        read_texts(source, task=drawn, problems=source, limit=3)
    told = "tests 'fn7', which is not in row 0 of .*a.jsonl"
    with pytest.raises(ValueError, match=told):
        read_texts(source, task=task, problems=turned)


class Stub(Sandbox):
    """Says that a program passes where it says so itself."""

    def check(self):
        return None

    def run(self, source):
        return sandbox.Outcome("right" in source, "")


def test_answers_and_programs_are_scored(source):
    """The figures of known outputs, by hand."""
    outputs = ["#### 0", "1 right", "so #### 2.", "#### 9 right"]
    texts = read_texts(source, task=TASK, problems=source)
    how = Measuring(
        metrics=("exact_match", "numeric_accuracy", "answer_f1"), num_samples=1, latency_limit=2,
        bootstrap=world.measuring().bootstrap, answer=AnswerAfter("####"),
        reference_answer=AnswerAfter("####"), sandbox=Stub(),
    )  # fmt: skip
    assert how.metrics[-1] == "pass_at_1" and "AnswerAfter" in how.describe()["answer"]
    bench = Bench(world.models(), texts, [np.ones(1, np.int32)] * 4, how)
    ones = np.ones((1, 1, 2))
    times = Times(ones, ones[0], ones[0])
    records = [
        {"prediction": output, "inputs": e.inputs}
        for e, output in zip(texts.examples, outputs, strict=True)
    ]
    figures = score(Setting(), Measured([0], [records], times, None, 0), bench).figures
    # Answers "0", "", "2.", "9" for "0", "1", "2", "3".
    expected = {"exact_match": 25.0, "numeric_accuracy": 50.0, "answer_f1": 50.0, "pass_at_1": 50.0}
    assert {name: figures[name]["value"] for name in expected} == expected
    part = bench.part(1, 3)
    assert part.texts.problems == texts.problems[1:3] and len(how.scorers(part.texts)) == 4


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"seed": -1}, "seed must be a whole number of at least 0"),
        ({"costs": {"verifier": 1.0}}, "costs has no cost for the drafter"),
        ({"sandbox": 3}, "sandbox must"),
    ],
)
def test_bad_measures_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        Measuring(**settings)


def test_problems_and_a_sandbox_belong_together(source):
    texts = read_texts(source, task=TASK, problems=source)
    plain = Measuring(metrics=("chrf",), latency_limit=4)
    running = Measuring(metrics=(), sandbox=Stub(), latency_limit=4)
    for how, given in ((plain, texts), (running, texts._replace(problems=None))):
        with pytest.raises(ValueError, match="pass_at_1 needs both problems"):
            how.fitted(given)
    running.fitted(texts._replace(references=[()] * 4))


def test_few_texts_and_no_references_are_said(capsys):
    how = Measuring(metrics=("chrf",), latency_batch_size=2)
    few = Texts(world.EXAMPLES, [()] * 6)
    fitted = how.fitted(few)
    assert fitted.latency_limit == 6 and fitted.metrics == () and fitted.quality is None
    told = capsys.readouterr().err
    assert "LATENCY_LIMIT=64: timing all 6 texts" in told
    assert how.fitted(few, quiet=True) == fitted and not capsys.readouterr().err
    assert "there are no references, so chrf is not computed" in told
    with pytest.raises(
        ValueError, match="3 texts are too few for an interval of the latency: give at least 4"
    ):
        how.fitted(few.part(0, 3))
    with pytest.raises(ValueError, match="latency_limit must be at least"):
        dataclasses.replace(how, latency_limit=3).fitted(few)
