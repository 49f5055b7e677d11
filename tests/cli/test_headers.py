"""A header is never a row in silence: each reader of rows with each kind of file."""

import gzip
import json

import pytest

from specjax.cli.main import main

ROWS = ["A man rides a bicycle.\tEin Mann fährt Rad.", "A dog runs, too.\tEin Hund rennt auch."]
TRAIN = ["--gin.VALIDATION=plain.tsv", "--gin.OUTPUT_DIR=out", "--gin.TRAIN={}"]
NETWORK = ["train", "--gin_file=models/t5_mini.gin", "--gin_file=tasks/fields.gin"]
# Command -> its words, where {} is the file, and its option for the field.
READERS = {
    "infer": (["infer", "--gin.INPUT={}", "--gin.OUTPUT_DIR=out"], "INPUTS_FIELD"),
    "compare": (["compare", "--gin.INPUT={}", "--gin.OUTPUT_DIR=out"], "INPUTS_FIELD"),
    "compare, with references": (
        ["compare", "--gin.INPUT={}", "--gin.TARGETS_FIELD=1", "--gin.OUTPUT_DIR=out"],
        "INPUTS_FIELD",
    ),
    "compare, references": (
        ["compare", "--gin.INPUT=in.txt", "--gin.REFERENCES={}", "--gin.OUTPUT_DIR=out"],
        "REFERENCES_FIELD",
    ),
    "evaluate": (
        ["evaluate", "--gin.PREDICTIONS=p.jsonl", "--gin.REFERENCES={}"],
        "REFERENCES_FIELD",
    ),
    "train": ([*NETWORK, *TRAIN], "INPUTS_FIELD"),
    "train, validation": (
        [*NETWORK, "--gin.TRAIN=plain.tsv", "--gin.VALIDATION={}", "--gin.OUTPUT_DIR=out"],
        "INPUTS_FIELD",
    ),
    "train drafter": (["train", "drafter", *TRAIN, "--gin.VERIFIER=large"], "INPUTS_FIELD"),
    "train head": (["train", "head", *TRAIN], "INPUTS_FIELD"),
    "train bigram": (["train", "bigram", "{}", "--tokenizer=bytes", "--output=out"], "--field"),
}


def run(capsys, reader, name, *more):
    words, option = READERS[reader]
    status = main([*(word.format(name) for word in words), *more])
    return status, capsys.readouterr().err, option


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "\n".join(["en\tde", *ROWS])
    (tmp_path / "header.tsv").write_text(text)
    (tmp_path / "header.tsv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "one.tsv").write_text(text.replace("\tde", "").replace("\tEin", ""))
    (tmp_path / "header.csv").write_text(text.replace("\t", ","))
    (tmp_path / "plain.tsv").write_text("\n".join(ROWS))
    (tmp_path / "in.txt").write_text("A man rides a bicycle.\nA dog runs, too.\n")
    rows = [{"inputs": "x", "prediction": "Ein Mann fährt Rad."}] * 2
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("name", ["header.tsv", "header.tsv.gz", "one.tsv"])
@pytest.mark.parametrize("reader", READERS)
def test_a_header_without_a_named_field_is_refused(capsys, reader, name):
    status, told, option = run(capsys, reader, name)
    names = "'en'" if name == "one.tsv" else "'en', 'de'"
    assert status == 2 and told.count("\n") == 1
    assert told.endswith(
        f"{name}:1: this line looks like a header ({names}): name a column, such as {option}='en'; "
        f"if the line is a row, set {option}=0\n"
    )


@pytest.mark.parametrize("name", ["header.tsv", "header.tsv.gz", "one.tsv", "plain.tsv"])
def test_bench_reads_no_columns(capsys, name):
    assert main(["bench", f"--inputs={name}"]) == 2
    assert capsys.readouterr().err == (
        f"specjax bench: --inputs={name} has columns, but must have one prompt per line: "
        "write the prompts' column into a .txt file\n"
    )
    assert main(["bench", "--inputs=header.csv"]) == 2
    assert "header.csv: CSV files are not read" in capsys.readouterr().err


@pytest.mark.parametrize("reader", READERS)
def test_a_csv_file_is_refused(capsys, reader):
    status, told, _ = run(capsys, reader, "header.csv")
    assert status == 2 and told.count("\n") == 1
    assert told.endswith("header.csv: CSV files are not read: convert it to .tsv or .jsonl\n")


@pytest.mark.parametrize("field", ["0", "en"])
def test_a_number_reads_the_line_and_a_name_skips_it(capsys, field):
    words = ["train", "bigram", "header.tsv", "--tokenizer=bytes", "--output=out"]
    assert main([*words, f"--field={field}"]) == 0
    texts = 3 if field == "0" else 2
    assert f"from {texts} texts of" in capsys.readouterr().out


SHORT = ["Hello\tHallo", "Thanks\tDanke"]
# The first line -> the lines below.
HEADERS = {
    "source\ttarget": ["Hello\tHallo", "How are you?\tWie geht es dir?"],
    "src\ttgt": SHORT,
    "en\tde": [],
    "source text en\ttarget text de": ROWS,
    "text (en)\ttext (de)": SHORT,
    '"source"\t"target"': SHORT,
    "'sentence1'\t'sentence2'": SHORT,
}


@pytest.mark.parametrize("line", HEADERS)
def test_what_lies_below_hides_no_header(capsys, tmp_path, line):
    (tmp_path / "named.tsv").write_text("\n".join([line, *HEADERS[line]]))
    status, told, _ = run(capsys, "train bigram", "named.tsv")
    names = ", ".join(map(repr, line.split("\t")))
    assert status == 2 and f"named.tsv:1: this line looks like a header ({names}): name" in told


PLAIN = [
    ROWS,
    [*SHORT, "Yes\tJa", *ROWS],  # words among sentences
    ["answer\tAntwort", *SHORT],  # a word list
    ["dog\tHund", "cat\tKatze"],  # words only
    ["A dog runs, too.\tx", *ROWS],
    ["1\tA man rides a bicycle."] * 3,
    ["a\ta", *ROWS],  # no two columns have one name
    ["Haus\tCasa", "Mann\tUomo"],
    [" \t", *ROWS],
]


@pytest.mark.parametrize("rows", PLAIN, ids=range(len(PLAIN)))
def test_rows_without_a_header_are_read(capsys, tmp_path, rows):
    (tmp_path / "plain.tsv").write_text("\n".join(rows))
    status, told, _ = run(capsys, "train bigram", "plain.tsv")
    assert status == 0, told
