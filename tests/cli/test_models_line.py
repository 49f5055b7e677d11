"""Every command that loads models prints them in its first line, also those of the default."""

import json

import pytest

from specjax.cli.main import main
from specjax.text.directories import built_in_pair

PAIR = (
    "verifier=built-in:multi30k_ende/verifier, drafter=built-in:multi30k_ende/drafter "
    "(built in: English to German captions)"
)
LLAMA = "built-in:gsm8k/verifier (built in: school math)"
LLAMAS = "verifier=built-in:gsm8k/verifier, drafter=built-in:gsm8k/drafter (built in: school math)"
RUN = ["--gin.INPUT=in.txt", "--gin.OUTPUT_DIR=out"]
DATA = ["--gin.TRAIN=in.tsv", "--gin.VALIDATION=in.tsv", "--gin.OUTPUT_DIR=out"]
TEACHER = built_in_pair("gsm8k") / "verifier"
COMMANDS = [
    (["infer", *RUN], PAIR),
    (["infer", "--gin.RULE=OPT(0.2)", *RUN], PAIR),
    (
        ["infer", "--gin.METHOD=VerifierAlone", *RUN],
        "built-in:multi30k_ende/verifier (built in: English to German captions)",
    ),
    (
        ["infer", "--gin.VERIFIER=built-in:gsm8k/verifier", *RUN, "--gin.DRAFTER=in"],
        "verifier=built-in:gsm8k/verifier, drafter=in (built in: school math)",
    ),
    (["compare", "--gin.REFERENCES=in.txt", *RUN], PAIR),
    (["train", "head", *DATA], PAIR),
    (
        [
            "train",
            "--gin_file=models/llama_mini.gin",
            "--gin_file=tasks/fields.gin",
            f"--gin.TEACHER={TEACHER}",
            "--gin.DISTILLATION_WEIGHT=1.0",
            *DATA,
        ],
        f"teacher={LLAMA}",
    ),
    (["evaluate", "--gin.PREDICTIONS=in.jsonl", "--gin.SCORE=built-in:gsm8k/verifier"], LLAMA),
    (["demo", "--output=out"], PAIR),
    (["demo", "--built-in=gsm8k", "--output=out"], LLAMAS),
    (["bench", "--inputs=in.txt"], PAIR),
]


@pytest.fixture(autouse=True)
def models_line():
    """The line is printed here."""


class StopError(Exception):
    pass


@pytest.mark.parametrize(
    ("words", "models"), COMMANDS, ids=lambda x: " ".join(x)[:40] if isinstance(x, list) else ""
)
def test_the_first_line_has_the_models(tmp_path, monkeypatch, capsys, words, models):
    def stop(*_, **__):
        raise StopError

    # The line is printed before the arrays are read, which may take minutes.
    monkeypatch.setattr("specjax.checkpoints.load_model", stop)
    monkeypatch.setattr("specjax.training.recipe.load_model", stop)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("Ein Hund rennt.\n" * 64)
    (tmp_path / "in.tsv").write_text("A dog runs.\tEin Hund rennt.\n")
    row = {"inputs": "1 + 1", "prediction": "2", "targets": "2"}
    (tmp_path / "in.jsonl").write_text(f"{json.dumps(row)}\n")
    (tmp_path / "in").symlink_to(built_in_pair("gsm8k") / "drafter")
    assert main(words) == 1
    first, *others = capsys.readouterr().err.splitlines()
    assert first == f"specjax: models: {models}"
    assert "unexpected StopError" in others[-1], others
