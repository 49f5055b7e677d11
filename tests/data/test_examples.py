import gzip
import json

import pytest

from specjax.data.examples import Example, read_aligned, read_examples

ROWS = [("eins", "one"), ("zwei", "two"), ("", "nothing")]


def write(path, text):
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def found(examples):
    return [example[:3] for example in examples]


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_all_formats_yield_the_same_examples(tmp_path, packed):
    lines = ["\t".join(row) for row in ROWS]
    objects = [json.dumps({"inputs": a, "targets": b, "n": 1}) for a, b in ROWS]
    text = write(tmp_path / f"a.de{packed}", "".join(f"{a}\n" for a, _ in ROWS))
    other = write(tmp_path / f"a.en{packed}", "".join(f"{b}\n" for _, b in ROWS))
    tsv = write(tmp_path / f"a.tsv{packed}", "\n".join(lines))
    header = write(tmp_path / f"b.tsv{packed}", "\n".join(["de\ten", *lines]))
    jsonl = write(tmp_path / f"a.jsonl{packed}", "\n".join(objects))

    with_targets = [(i, a, b) for i, (a, b) in enumerate(ROWS)]
    without = [(i, a, None) for i, (a, _) in enumerate(ROWS)]
    assert found(read_examples(text)) == without
    assert found(read_aligned(text, other)) == with_targets
    assert found(read_examples(tsv)) == without
    assert found(read_examples(tsv, targets_field=1)) == with_targets
    assert found(read_examples(header, inputs_field="de", targets_field="en")) == with_targets
    # Where one field has a name, the other may still be a number.
    assert found(read_examples(header, targets_field="en")) == with_targets
    assert found(read_examples(header, inputs_field="de", targets_field=1)) == with_targets
    assert found(read_examples(jsonl)) == without
    assert found(read_examples(jsonl, targets_field="targets")) == with_targets
    assert next(read_examples(header, targets_field="en")).where == f"{header}:2"
    assert [e.where for e in read_aligned(text, other)][2] == f"{text}:3"


def test_fields_formats_and_directories_are_configurable(tmp_path):
    write(tmp_path / "data", '{"question": "warum", "answer": "darum"}\n')
    (example,) = read_examples(
        "data",
        directory=tmp_path,
        format="jsonl",
        inputs_field="question",
        targets_field="answer",
    )
    assert example == Example(0, "warum", "darum", f"{tmp_path / 'data'}:1")
    write(tmp_path / "x.tsv", "\t\ttext\n1\tja\twarum\n")  # columns without names keep places
    fields = {"inputs_field": "text", "targets_field": 1}
    assert next(read_examples("x.tsv", directory=tmp_path, **fields))[1:3] == ("warum", "ja")
    write(tmp_path / "x.tsv", "id\twarum\n")
    assert next(read_examples("x.tsv", directory=tmp_path, inputs_field=1)).inputs == "warum"
    (tmp_path / "e").write_text("a\n")
    (tmp_path / "f").write_text("b\n")
    assert found(read_aligned("e", "f", directory=tmp_path)) == [(0, "a", "b")]


def test_a_field_may_be_a_list_of_references_or_go_into_an_object(tmp_path):
    write(tmp_path / "a.jsonl", '{"inputs": "q", "a": {"text": ["one", 1]}, "b.c": "d"}\n')
    for field, targets in (("a.text", ("one", "1")), ("a.text.1", "1"), ("b.c", "d")):
        (example,) = read_examples(tmp_path / "a.jsonl", targets_field=field)
        assert example.targets == targets


@pytest.mark.parametrize(
    ("name", "text", "options", "message"),
    [
        ("a.tsv", "a\tb\nc\n", {}, r"a\.tsv:2: the line has 1 columns, but line 1 has 2"),
        (
            "a.tsv",
            "a\tb\n",
            {"inputs_field": 2},
            r"a\.tsv:1: there is no field '2': the record has '0', '1'; give another field as in",
        ),
        (
            "a.tsv",
            "a\tb\nc\td\n",
            {"inputs_field": "x"},
            r"a\.tsv:2: there is no field 'x'",
        ),
        (
            "a.tsv",
            "x\ty\tx\n1\t2\t3\n",
            {"inputs_field": "y", "targets_field": 2},
            r"a\.tsv:1: the header has a column twice: rename it",
        ),
        ("a.tsv", "a\tb\n", {"inputs_field": "a"}, r"a\.tsv has a header but no other line"),
        (
            "a.jsonl",
            '{"inputs": "a"}\n{oh}\n',
            {},
            r"a\.jsonl:2: the line must be a JSON object, got .* column 2",
        ),
        (
            "a.jsonl",
            '{"inputs": "a"}\n\n',
            {},
            r"a\.jsonl:2: the line must be a JSON object",
        ),
        (
            "a.jsonl",
            "[" * 100_000 + "\n",
            {},
            r"a\.jsonl:1: the line must be a JSON object",
        ),
        (
            "a.jsonl",
            "9" * 9999 + "\n",
            {},
            r"a\.jsonl:1: the line must be a JSON object",
        ),
        ("a.jsonl", "[1]\n", {}, r"a\.jsonl:1: the line must be a JSON object, got \[1\]"),
        ("a.jsonl", '{"text": "a"}\n', {}, r"a\.jsonl:1: there is no field 'inputs': .* 'text'"),
        ("a.jsonl", '{"inputs": {}}\n', {}, r"a\.jsonl:1: 'inputs' must be a text, a number or"),
        ("a.txt", "a\n", {"format": "csv"}, r"`format` must be one of text, tsv, jsonl, got 'csv'"),
    ],
)
def test_bad_input_gives_an_error_of_one_line(tmp_path, name, text, options, message):
    path = write(tmp_path / name, text)
    with pytest.raises(ValueError, match=message) as error:
        list(read_examples(path, **options))
    assert "\n" not in str(error.value)


def test_a_number_is_not_a_path(tmp_path):
    (tmp_path / "a.txt").write_text("a\n")
    with pytest.raises(ValueError, match="2024 must be a path: put a path of digits in quotes"):
        list(read_examples("a.tsv", directory=2024))
    with pytest.raises(ValueError, match="1 must be a path"):
        list(read_aligned("a.txt", 1, directory=tmp_path))


@pytest.mark.parametrize("longer", ["left", "right"])
def test_unaligned_files_give_an_error(tmp_path, longer):
    for side in ("left", "right"):
        (tmp_path / side).write_text("a\nb\nc\n" if side == longer else "a\nb\n")
    with pytest.raises(ValueError, match=rf"{longer}:3: this line has no counterpart"):
        list(read_aligned(tmp_path / "left", tmp_path / "right"))
