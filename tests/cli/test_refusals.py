"""Each command refuses bad input in one line, in the names that were typed, with status 2."""

import pytest

from specjax.cli.main import main

# Command -> an option or a value that is wrong, and a file that is not there. What else is refused
# is tested where it is checked.
REFUSED = {
    "demo": [
        (["--max-draft=0"], "max_draft must be"),
        (["--output=in.txt"], "in.txt"),
    ],
    "infer": [
        (["--gin.INPUT=in.txt", "--gin.OUTPUT_DIR=out", "--gin.MAX_DRAFT=0"], "MAX_DRAFT must be"),
        *(
            (["--gin.INPUT=in.txt", "--gin.OUTPUT_DIR=out", word], message)
            for word, message in (
                ("--show=-1", "show must be a whole number of at least 0, got -1"),
                ("--gin.SOURCES=1", "SOURCES must be True or False, got 1"),
                ("--gin.NUM_SAMPLES=0", "NUM_SAMPLES must be a whole number of at least 1, got 0"),
                ("--gin.infer.allow_other_environment=1", "must be True or False, got 1"),
            )
        ),
        (["--gin.INPUT=nowhere.txt", "--gin.OUTPUT_DIR=out"], "nowhere.txt: no such file"),
    ],
    "evaluate": [
        (["--gin.PREDICTIONS=in.txt", "--gin.METRICS=('blue',)"], "`METRICS` must be names in"),
        (["--gin.PREDICTIONS=nowhere.jsonl"], "nowhere.jsonl: no such file"),
    ],
    "train": [
        (
            [
                "--gin_file=models/t5_mini.gin",
                "--gin_file=tasks/fields.gin",
                "--gin.TRAIN=in.tsv",
                "--gin.VALIDATION=in.tsv",
                "--gin.OUTPUT_DIR=out",
                "--gin.NUM_STEPS=0",
            ],
            "NUM_STEPS must be",
        ),
        (["--gin.OUTPUT_DIR=out"], "not given: train.training_data, train.validation_data; add"),
    ],
    "train drafter": [
        (
            [
                "--gin.TRAIN=in.txt",
                "--gin.VALIDATION=in.txt",
                "--gin.VERIFIER=large",
                "--gin.OUTPUT_DIR=out",
                "--gin.MAX_DRAFT=0",
            ],
            "MAX_DRAFT must be",
        ),
        (
            ["--gin.TRAIN=in.txt", "--gin.VERIFIER=large", "--gin.OUTPUT_DIR=out"],
            "not given: VALIDATION; add a gin file",
        ),
    ],
    "train head": [
        (
            [
                "--gin.TRAIN=in.txt",
                "--gin.VALIDATION=in.txt",
                "--gin.OUTPUT_DIR=out",
                "--gin.BLOCKS=9",
            ],
            "BLOCKS must",
        ),
        (["--gin.TRAIN=in.txt", "--gin.OUTPUT_DIR=out"], "not given: VALIDATION; add a gin file"),
    ],
    "train bigram": [
        (["in.txt", "--tokenizer=bytes", "--output=new", "--min-count=0"], "--min-count must be"),
        (["nowhere.txt", "--tokenizer=bytes", "--output=new"], "nowhere.txt: no such file"),
    ],
    "convert": [
        (["nowhere", "new", "--to=hf"], "nowhere"),
        (["built-in:gsm8k/draft", "new", "--to=hf"], "no such part of gsm8k: choose from bigram"),
        (["nowhere", ".", "--to=hf"], "is not empty: give a new directory"),
    ],
    "merge": [
        (["nowhere"], "there is no directory part-I-of-N"),
        (["nowhere", "also"], "there is no directory part-I-of-N"),
    ],
}
CASES = [(command, *case) for command, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("command", "words", "message"), CASES)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, command, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("ba\n")
    (tmp_path / "in.tsv").write_text("ba\tba\n")
    before = sorted(tmp_path.rglob("*"))
    assert main([*command.split(), *words]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert told.err.startswith(f"specjax {command}: ") and message in told.err
    assert sorted(tmp_path.rglob("*")) == before
