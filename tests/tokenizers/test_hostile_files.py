"""A tokenizer.json whose steps panic or grow."""

import json

import pytest
import tokenizers as tk

import specjax
from specjax.runs.inference import infer
from specjax.tokenizers import load_tokenizer
from specjax.tokenizers.subword import growth
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


# Regular expressions that match no empty text, and some that may.
CLEAN = [r"\s+", " {2,}", "[ \t]+", r"[\r\n]", r"\n", r"[^\w ]", r"\p{Zs}", " +", "\u00a0", r"\.x*"]
EMPTY = ["x*", "x?", "x{0,2}", "x{2}?", "x+?|", r"\b", "(x)*", "[[:space:]]*", "[^]]*", "(?=x)"]
TYPOGRAPHY = [("\u2026", "..."), ("\u00bd", "1/2"), ("\u00bc", "1/4"), ("\u20ac", "EUR")]
TYPOGRAPHY += [("\u2122", "(TM)"), ("\u00e6", "ae"), ("\u2014", "--")]
MANY = norm.Replace("a", "a" * 100)


@pytest.mark.parametrize(
    ("part", "times"),
    [
        (norm.Replace(" ", "\u2581"), 1),
        (norm.Sequence([norm.Prepend("\u2581"), norm.Replace(" ", "\u2581")]), 1),
        (norm.Replace("``", '"'), 1),
        (norm.Sequence([norm.NFKC(), norm.Replace("a", "bc")]), 2),
        (norm.Replace(tk.Regex(" {2,}"), " "), 1),
        (norm.Sequence([norm.Replace(tk.Regex(x), " ") for x in CLEAN]), 1),
        (norm.Sequence([norm.Replace(a, b) for a, b in TYPOGRAPHY]), 4),
        (norm.Sequence([norm.Replace("a", "bbb"), norm.Lowercase(), norm.Replace("c", "ddd")]), 9),
        (norm.Sequence([norm.Replace("ab", "bc"), norm.Replace("xc", "yyyy")]), 2),
        *((norm.Sequence([norm.Replace(tk.Regex(x), " ")] * 11), 2048) for x in EMPTY),
        (MANY, 100),
        (norm.Sequence([MANY, norm.Sequence([MANY, MANY])]), 1e6),
        (tk.decoders.Sequence([tk.decoders.Replace("a", "a" * 50)] * 2), 2500),
    ],
)
def test_growth_is_known_and_limited(tmp_path, part, times):
    assert growth(json.loads(part.__getstate__())) == times
    kind = "decoder" if isinstance(part, tk.decoders.Decoder) else "normalizer"
    directory = write(tmp_path, **{kind: part})
    if times <= 1000:
        load_tokenizer(directory)
        return
    with pytest.raises(ValueError, match=f"its {kind} may make a text .* times as long, more than"):
        load_tokenizer(directory)
