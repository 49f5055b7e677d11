"""A tokenizer.json whose steps panic."""

import json

import pytest
import tokenizers as tk

import specjax
from specjax.runs.inference import infer
from specjax.tokenizers import load_tokenizer
from tests import tiny_pair

pre, norm = tk.pre_tokenizers, tk.normalizers
SLOW = tk.Regex("(a+)+$")
LONG = "a" * 60 + "b"


def write(directory, normalizer=None, splitting=None, decoder=None):
    alphabet = sorted(pre.ByteLevel.alphabet())
    made = tk.Tokenizer(tk.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    steps = [splitting] if splitting is not None else []
    made.pre_tokenizer = pre.Sequence([*steps, pre.ByteLevel(False, use_regex=False)])
    made.decoder = decoder or tk.decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    made.add_special_tokens(["</s>"])
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return directory


@pytest.mark.parametrize("part", ["splitting", "normalizer"])
def test_a_panic_is_an_error_of_its_row(tmp_path, part, capfd):
    step = pre.Split(SLOW, "isolated") if part == "splitting" else norm.Replace(SLOW, "x")
    words = load_tokenizer(write(tmp_path, **{part: step}))
    assert len(words.encode("aab")) == 3
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot split the text \(.*Onig"):
        words.encode(LONG)
    decoder = specjax.Decoder(tiny_pair.tabular(1, words), max_new_tokens=2, buckets=(8,))
    with pytest.raises(ValueError, match=r"prompt 1: .*tokenizer\.json cannot split the text"):
        decoder(["ab", LONG])
    (tmp_path / "prompts.txt").write_text(f"ab\n{LONG}\nb\n")
    infer(lambda: decoder, source=tmp_path / "prompts.txt", output_dir=tmp_path / "run")
    lines = (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()
    first, second, third = map(json.loads, lines)
    assert "prompts.txt:2: " in second["error"] and second["prediction"] is None
    assert first["prediction"] is not None and third["prediction"] is not None


def test_a_panic_of_a_decoder_is_told(tmp_path):
    decoder = tk.decoders.Sequence([tk.decoders.Fuse(), tk.decoders.Replace(SLOW, "x")])
    words = load_tokenizer(write(tmp_path, decoder=decoder))
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot join the tokens"):
        words.decode(words.encode(LONG))
