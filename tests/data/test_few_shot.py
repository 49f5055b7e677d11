"""Prompts of templates and solved examples."""

import json

import pytest

from specjax.data.few_shot import FewShot, Template

ROWS = [{"q": f"What is {i} and {i}?", "a": [str(2 * i), f"{2 * i}.0"], "n": i} for i in range(8)]
TASK = {"prompt": "Q: {q}\nA:", "completion": " {a.0}", "references": "a"}


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{a} and {b.c.1}", "x and 5"),
        ("{{{a}}}", "{x}"),
        ("{lines}", "one\ntwo"),
        ("{absent|none}, {null|none}, {b.c.7|}", "none, none, "),
        ("{b.c.0|none}", "y"),
    ],
)
def test_a_template_goes_into_objects_and_lists(template, text):
    record = {"a": "x", "b": {"c": ["y", 5]}, "lines": ["one", "two"], "null": None}
    assert Template(template).fill(record, "f:1") == text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{c}", r"f:3: there is no field 'c': the record has 'a', 'b'; write c\|text for"),
        ("{b.x}", r"f:3: there is no field 'b.x': b has 'd'"),
        ("{a.0}", r"f:3: there is no field 'a.0': a has 'x'"),
        ("{b.d.4}", r"f:3: there is no field 'b.d.4': b.d has '0'"),
        ("{b}", "f:3: 'b' must be a text, a number or a list of these"),
    ],
)
def test_what_is_missing_is_named_with_its_line(template, message):
    with pytest.raises(ValueError, match=message):
        Template(template).fill({"a": "x", "b": {"d": [True]}}, "f:3")


def test_examples_stand_before_each_input_and_none_is_its_own(tmp_path):
    examples = jsonl(tmp_path / "train.jsonl", ROWS[:5])
    source = jsonl(tmp_path / "test.jsonl", ROWS[1:7:5])
    task = FewShot(**TASK, examples=examples, shots=2, instruction="Add.")
    known, new = task.read(source)
    shot = "Q: What is {0} and {0}?\nA: {1}".format
    assert new.inputs == f"Add.\n\n{shot(0, 0)}\n\n{shot(1, 2)}\n\nQ: What is 6 and 6?\nA:"
    assert new.targets == ("12", "12.0") and new.where == f"{source}:2" and new.id == 1
    assert known.inputs == f"Add.\n\n{shot(0, 0)}\n\n{shot(2, 4)}\n\nQ: What is 1 and 1?\nA:"


@pytest.mark.parametrize("seed", [None, 0])
def test_an_example_that_is_there_twice_counts_once(tmp_path, seed):
    examples = jsonl(tmp_path / "train.jsonl", 2 * [ROWS[0]] + ROWS)
    task = FewShot(**TASK, examples=examples, shots=7, seed=seed)
    for made in task.read(examples):
        asked = made.inputs.removesuffix("\nA:").split("\n\n")
        assert len({shot.partition("\n")[0] for shot in asked}) == 8
    few = jsonl(tmp_path / "few.jsonl", 3 * [ROWS[0]])
    with pytest.raises(ValueError, match="has 0 different examples besides .*:1, but shots=2"):
        FewShot(**TASK, examples=few, shots=2, seed=seed).read(few)


def test_a_seed_draws_the_same_examples_every_time(tmp_path):
    examples = jsonl(tmp_path / "train.jsonl", ROWS)
    source = jsonl(tmp_path / "test.jsonl", [{"q": "?", "a": []}])
    made = [
        FewShot(**TASK, examples=examples, shots=3, seed=seed).read(source)[0]
        for seed in (None, 1, 1, 2)
    ]
    assert made[1] == made[2] and len({one.inputs for one in made}) == 3
    assert made[0].targets == ("",)


def test_inputs_are_drawn_in_their_order(tmp_path):
    source = jsonl(tmp_path / "test.jsonl", ROWS)
    places = [
        [one.where for one in FewShot(**TASK, limit=3, limit_seed=s).read(source)]
        for s in (0, 0, 1)
    ]
    assert places[0] == places[1] != places[2] and places[0] == sorted(places[0])


def test_of_fewer_inputs_than_the_limit_all_are_taken(tmp_path):
    source = jsonl(tmp_path / "test.jsonl", ROWS)
    assert len(FewShot(**TASK, limit=9).read(source)) == 8
    assert len(FewShot(**TASK, limit=8).read(source)) == 8


def test_a_tsv_names_its_columns_or_has_them_by_number(tmp_path):
    source = tmp_path / "a.tsv"
    source.write_text("en\tde\na dog\tein Hund\n")
    task = FewShot(prompt="English: {en}", completion=" {de}", references="de")
    (made,) = task.read(source)
    assert (made.inputs, made.targets) == ("English: a dog", ("ein Hund",))
    assert made.where == f"{source}:2"
    by_number = FewShot(prompt="{0}", references="1").read(source)
    assert [one.inputs for one in by_number] == ["en", "a dog"]
    with pytest.raises(
        ValueError, match=f"{source}:2: there is no field 'fr': the record has 'en'"
    ):
        FewShot(prompt="{fr}").read(source)


def test_a_default_stands_for_an_empty_list(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [{"q": "?", "a": {"text": []}}])
    task = FewShot(prompt="{q} {a.text.0|nothing}", references="a.text|nothing")
    (made,) = task.read(source)
    assert made.inputs == "? nothing" and made.targets == ("nothing",)


def test_too_few_examples_are_told(tmp_path):
    examples = jsonl(tmp_path / "train.jsonl", ROWS[:2])
    with pytest.raises(ValueError, match="has 1 different examples besides .*, but shots=3"):
        FewShot(**TASK, examples=examples, shots=3).read(examples)
    with pytest.raises(ValueError, match="has 1 different examples besides .*:1, but shots=2"):
        FewShot(**TASK, examples=examples, shots=2).read(examples)
    (tmp_path / "a.txt").write_text("a line\n")
    assert FewShot(prompt="Say {0}.").read(tmp_path / "a.txt")[0].inputs == "Say a line."
    with pytest.raises(ValueError, match=r"a.txt:1: there is no field 'q': the record has '0'"):
        FewShot(**TASK).read(tmp_path / "a.txt")
