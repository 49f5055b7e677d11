"""Messages that are understood at once: what was typed -> the whole line."""

import pytest

import specjax
from specjax.cli.main import main
from specjax.processors import Regex
from specjax.tokenizers import ByteTokenizer
from specjax.tokenizers.tokenizer import Pieces
from tests import tiny_pair

RUN = ["--gin.INPUT=in.txt", "--gin.OUTPUT_DIR=out"]
TRAIN = ["train", "--gin_file=models/t5_mini.gin", "--gin_file=tasks/fields.gin"]
TRAIN += ["--gin.VALIDATION=in.tsv", "--gin.OUTPUT_DIR=out"]
TYPED = [
    (
        ["infer", "--gin.STOPPING=Confidenc", *RUN],
        "STOPPING='Confidenc': there is no such name; did you mean Confidence?",
    ),
    (
        ["infer", "--gin.STOPPING=Budget", *RUN],
        "STOPPING='Budget': Budget: missing a required argument: 'tokens'",
    ),
    (
        ["infer", "--gin.RULE=Lossy(1.5)", *RUN],
        "RULE='Lossy(1.5)': strength must lie in [0, 1), got 1.5",
    ),
    (
        ["infer", "--gin.TASK=FewShot", *RUN],
        "TASK must be like FewShot(prompt='Question: {question}'), got 'FewShot': write @FewShot()",
    ),
    (
        ["evaluate", "--gin.PREDICTIONS=in.txt", "--gin.ANSWER=AnswerAfter"],
        "ANSWER must be like AnswerAfter('####'), got 'AnswerAfter': write @AnswerAfter()",
    ),
    (
        ["infer", "--gin.MESH_MODEL=16", *RUN],
        "MESH_MODEL=16 needs 16 devices, but there are 8: choose smaller sizes",
    ),
    (
        ["infer", "prompts/gsm8k.gin"],
        "prompts/gsm8k.gin: unexpected argument; write --gin_file=prompts/gsm8k.gin",
    ),
    (
        [*TRAIN, "--gin.TRAIN=one.tsv"],
        "one.tsv:1: there is no field '1': the record has '0'; give another field as TARGETS_FIELD",
    ),
    (
        [*TRAIN, "--gin.TRAIN=in.txt"],
        "in.txt: a line of a text file is one text, so there is no TARGETS_FIELD=1: give a .tsv or "
        ".jsonl file",
    ),
    (
        ["compare", "--gin.METHODS=('optt',)", *RUN],
        "METHODS='optt': there is no such name; did you mean OPT?",
    ),
    (
        ["compare", "--gin.METHODS={'Lossyy(0.2)': None}", *RUN],
        "METHODS='Lossyy': there is no such name; did you mean Lossy?",
    ),
    (
        ["compare", "--gin.METHODS=opt,lossy", *RUN],
        "METHODS must be a tuple of texts or a dict, got 'opt,lossy'; write ('opt', 'lossy')",
    ),
    (
        ["compare", "--gin.TEMPERATURES=0,1", *RUN],
        "TEMPERATURES must be a tuple, got '0,1'; write (0, 1)",
    ),
    (["compare", "--gin.MAX_DRAFTS=5", *RUN], "MAX_DRAFTS must be a tuple, got 5; write (5,)"),
    (
        ["evaluate", "--gin.PREDICTIONS=r_opt,r_ver"],
        "PREDICTIONS='r_opt,r_ver': no such file; write several as ('r_opt', 'r_ver')",
    ),
    (
        ["evaluate", "--gin.PREDICTIONS=in.jsonl", "--gin.REFERENCES=a,b"],
        "REFERENCES='a,b': no such file; write several as ('a', 'b')",
    ),
    (
        ["evaluate", "--gin.PREDICTIONS=in.jsonl", "--gin.METRICS=bleu,chrf"],
        "METRICS must be a tuple of names, got 'bleu,chrf'; write ('bleu', 'chrf')",
    ),
    (
        ["infer", "--gin.NUM_SPECULATIVE_TOKENS=5", *RUN],
        "--gin.NUM_SPECULATIVE_TOKENS: no such name; did you mean MAX_DRAFT?",
    ),
    (["demo", "--pair", "gsm8k"], "--pair: unknown option; did you mean --built-in=gsm8k?"),
    (["demo", "--pair=gsm8k"], "--pair=gsm8k: unknown option; did you mean --built-in=gsm8k?"),
    (["demo", "--max-drafts=3"], "--max-drafts=3: unknown option; did you mean --max-draft=3?"),
    (
        ["inspect", "qwen3_06b"],
        "qwen3_06b: no such directory or size; did you mean qwen3_0.6b?",
    ),
    (
        ["inspect", "Qwen/Qwen3-0.6B"],
        "Qwen/Qwen3-0.6B: no such directory or size; did you mean qwen3_0.6b?",
    ),
    (
        ["inspect", "nowhere"],
        "nowhere: no such directory; check the path, or download the model",
    ),
    (
        ["infer", "--gin.VERIFIER=qwen3_0.6b", "--gin.DRAFTER=qwen3_0.6b", *RUN],
        "VERIFIER='qwen3_0.6b': no such file or directory: check the path; download models from a "
        "hub first",
    ),
]


@pytest.mark.parametrize(("words", "line"), TYPED, ids=lambda x: " ".join(x)[:60])
def test_what_is_typed_gets_one_line(tmp_path, monkeypatch, capsys, words, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("Ein Hund rennt.\n")
    (tmp_path / "in.tsv").write_text("A dog runs.\tEin Hund rennt.\n")
    (tmp_path / "one.tsv").write_text("A dog runs.\n")
    (tmp_path / "in.jsonl").write_text('{"prediction": "Ein Hund"}\n')
    assert main(words) == 2
    assert capsys.readouterr().err == f"specjax {words[0]}: {line}\n"


def test_the_data_are_read_before_a_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr("specjax.training.recipe.load_model")
    assert main([*TRAIN, "--gin.TRAIN=absent.tsv", "--gin.INIT_FROM=built-in:gsm8k/drafter"]) == 2
    assert "absent.tsv: no such file: check the path\n" in capsys.readouterr().err


class Letters(ByteTokenizer):
    """Writes small letters only."""

    def pieces(self):
        texts = [b"" if not text.islower() else text for text in super().pieces().later]
        return Pieces(texts, texts)


def test_what_is_called_gets_one_line():
    drafter, verifier = (tiny_pair.tabular(i, Letters()) for i in (1, 2))
    with pytest.raises(ValueError) as error:
        specjax.Decoder(
            specjax.text.Pair(drafter=drafter, verifier=verifier),
            processors=(Regex("[0-9]"),),
            max_new_tokens=4,
        )(["a"])
    assert str(error.value) == (
        "Regex('[0-9]'): the tokenizer's tokens can write no text that matches: check the "
        "pattern or schema, and that its characters are in the vocabulary"
    )
