"""Ids and special tokens for every class, flag and post-processor, against transformers 5."""

import base64
import contextlib
import itertools
import json
import warnings

import pytest
import tokenizers as tk

from specjax.tokenizers import load_tokenizer
from specjax.tokenizers.transformers_classes import QWEN2

pre, post, norm = tk.pre_tokenizers, tk.processors, tk.normalizers
SPECIAL = [f"<{x}>" for x in ("s", "/s", "unk", "pad", "bos", "eos", "mask", "|endoftext|")]
SPECIAL.append("<extra_0>")
TEXTS = ("ab 12", " a\nb", "x<extra_0> y")


def _bytes(pre_tokenizer=None, normalizer=None):
    alphabet = sorted(pre.ByteLevel.alphabet())
    made = tk.Tokenizer(tk.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizer or pre.ByteLevel(add_prefix_space=False)
    made.decoder = tk.decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    return made


def _marked(normalizer, pre_tokenizer):
    words = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "x", "▁a", "ab", "▁ab"]
    model = tk.models.BPE(
        vocab={w: i for i, w in enumerate(words)},
        merges=[("▁", "a"), ("a", "b"), ("▁a", "b")],
        byte_fallback=True,
        fuse_unk=True,
        unk_token="<unk>",
    )
    made = tk.Tokenizer(model)
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    marks = [tk.decoders.Replace("▁", " "), tk.decoders.ByteFallback(), tk.decoders.Fuse()]
    made.decoder = tk.decoders.Sequence(marks)
    return made


def _unigram():
    words = ["<pad>", "</s>", "<unk>", "▁", "a", "b", "x", "y", "1", "2", "▁ab", "▁a"]
    made = tk.Tokenizer(tk.models.Unigram([(w, -float(i)) for i, w in enumerate(words)], unk_id=2))
    made.pre_tokenizer = pre.Sequence([pre.WhitespaceSplit(), pre.Metaspace()])
    made.decoder = tk.decoders.Metaspace()
    return made


# tokenizer.json as it is published for these classes.
FORMS = {
    "bytes": _bytes,
    "bytes, digits": lambda: _bytes(pre.Sequence([pre.Digits(True), pre.ByteLevel(False)])),
    "qwen2": lambda: _bytes(
        pre.Sequence(
            [pre.Split(tk.Regex(QWEN2), "isolated"), pre.ByteLevel(False, use_regex=False)]
        ),
        norm.NFC(),
    ),
    "llama 2": lambda: _marked(norm.Sequence([norm.Prepend("▁"), norm.Replace(" ", "▁")]), None),
    "llama": lambda: _marked(None, pre.Metaspace(prepend_scheme="first", split=False)),
    "gemma": lambda: _marked(norm.Replace(" ", "▁"), pre.Split(" ", "merged_with_previous")),
    "t5": _unigram,
}
# Form, class and model type: True if the ids must be equal and nothing is said.
CLASSES = {
    ("bytes", None, None): True,
    ("bytes", None, "llama"): True,
    ("bytes", "PreTrainedTokenizerFast", "llama"): True,
    ("bytes", "PreTrainedTokenizer", "smollm3"): True,
    ("bytes", "TokenizersBackend", None): True,
    ("bytes", "LlamaTokenizerFast", "llama"): True,
    ("bytes", "LlamaTokenizer", "smollm3"): True,
    ("bytes", "GPT2Tokenizer", "llama"): True,
    ("bytes", "GPT2TokenizerFast", "olmo2"): True,
    ("bytes", "GPTNeoXTokenizer", "llama"): False,
    ("bytes", "LlamaTokenizerFast", "qwen2"): False,
    ("bytes", "MyTokenizer", "llama"): False,
    ("bytes, digits", "PreTrainedTokenizerFast", "llama"): True,
    ("bytes, digits", "GPT2Tokenizer", "llama"): False,
    ("bytes, digits", "GPT2Tokenizer", "olmo2"): True,
    ("qwen2", "Qwen2Tokenizer", "qwen2"): True,
    ("qwen2", "Qwen2TokenizerFast", "qwen3"): True,
    ("qwen2", "LlamaTokenizerFast", "qwen2"): True,
    ("qwen2", None, "qwen3"): True,
    ("bytes, digits", "PreTrainedTokenizerFast", "gpt_oss"): True,
    ("bytes, digits", None, "gpt_oss"): True,
    ("llama", "LlamaTokenizer", "llama"): True,
    ("llama", "LlamaTokenizerFast", None): True,
    ("llama", "LlamaTokenizerFast", "mistral"): True,
    ("llama", "GemmaTokenizer", "llama"): False,
    ("llama 2", "LlamaTokenizer", "llama"): False,
    ("llama 2", "LlamaTokenizer", "phi3"): True,
    ("llama 2", "LlamaTokenizer", "mistral"): True,
    ("llama 2", "PreTrainedTokenizerFast", "llama"): True,
    ("gemma", "GemmaTokenizer", "gemma2"): True,
    ("gemma", "GemmaTokenizerFast", "gemma3_text"): True,
    ("gemma", None, "t5gemma"): True,
    ("gemma", "GemmaTokenizer", "t5gemma2"): True,
    ("t5", "T5Tokenizer", "t5"): True,
    ("t5", "T5TokenizerFast", "mt5"): True,
    ("t5", None, "umt5"): True,
    ("t5", "PreTrainedTokenizerFast", "umt5"): True,
}
POST = {
    "none": None,
    "bos": {"single": "<s> $A"},
    "eos": {"single": "$A </s>"},
    "both": {"single": "<s> $A </s>"},
    "two": {"single": "<s> <pad> $A"},
    "bytes": post.ByteLevel(trim_offsets=False),
    "roberta": "roberta",
    "sequence": "sequence",
}
FLAGS = [
    {},
    {"add_bos_token": None},
    *({"add_bos_token": b} | ({} if e is None else {"add_eos_token": e})
      for b, e in itertools.product((False, True), (None, False, True))),
    {"add_eos_token": True},
]  # fmt: skip


def _processor(name, ids):
    found = POST[name]
    if isinstance(found, dict):
        special = [(text, ids[text]) for text in ("<s>", "</s>", "<pad>")]
        return post.TemplateProcessing(**found, special_tokens=special)
    ends = post.RobertaProcessing(("</s>", ids["</s>"]), ("<s>", ids["<s>"]))
    if found == "sequence":
        return post.Sequence([post.ByteLevel(), ends])
    return ends if found == "roberta" else found


def _write(directory, name, values):
    (directory / name).write_text(json.dumps(values))


@contextlib.contextmanager
def told():
    """The warnings of loading that say how ids differ."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = []
        yield found
    found += [str(w.message) for w in caught if "transformers 5" in str(w.message)]


@pytest.mark.parametrize("case", CLASSES, ids=lambda case: "-".join(map(str, case)))
def test_ids_are_those_of_transformers_or_loading_says_how_they_differ(tmp_path, case):
    from transformers import AutoTokenizer

    form, name, kind = case
    made = FORMS[form]()
    made.add_special_tokens([tk.AddedToken(text, special=True) for text in SPECIAL])
    ids = made.get_vocab(with_added_tokens=True)
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "image_token": "<mask>"}
    _write(tmp_path, "config.json", {} if kind is None else {"model_type": kind})
    for processor, flags in itertools.product(POST, FLAGS):
        if flags and processor not in ("none", "bos", "eos"):
            continue
        made.post_processor = _processor(processor, ids) or post.Sequence([])
        content = json.loads(made.to_str())
        content["post_processor"] = content["post_processor"] if POST[processor] else None
        _write(tmp_path, "tokenizer.json", content)
        _write(tmp_path, "tokenizer_config.json", {"tokenizer_class": name, **named, **flags})
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        with told() as words:
            ours = load_tokenizer(tmp_path)
        # transformers 5 takes a file with any ByteLevel for none of LlamaTokenizer's.
        plain = name == "LlamaTokenizer" and processor in ("bytes", "sequence")
        assert bool(words) == (not CLASSES[case] and not plain), words
        equal = [ours.encode(text) == theirs.encode(text) for text in TEXTS]
        assert all(equal) or words, (processor, flags)
        around = [ours.encode(""), theirs.encode("")]
        assert around[0] == around[1], (processor, flags)
        if name != "MyTokenizer":
            assert ours.special_tokens == theirs.special_tokens_map
        assert all("\n" not in word and str(tmp_path) in word for word in words)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "t5"])
def test_flags_of_a_sentencepiece_model(tmp_path, kind):
    import sentencepiece
    from transformers import AutoTokenizer

    names = {"llama": "LlamaTokenizer", "gemma2": "GemmaTokenizer", "t5": "T5Tokenizer"}
    ids = {"llama": (1, 2, 0, -1), "gemma2": (2, 1, 3, 0), "t5": (-1, 1, 2, 0)}[kind]
    options = dict(zip(("bos_id", "eos_id", "unk_id", "pad_id"), ids, strict=True))
    if kind != "t5":
        options |= {"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": False}
        options |= {"normalization_rule_name": "identity", "vocab_size": 300}
    if kind == "gemma2":
        options |= {"add_dummy_prefix": False, "bos_piece": "<bos>", "eos_piece": "<eos>"}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox", "a stitch in time"] * 8),
        model_prefix=str(tmp_path / "spiece"),
        minloglevel=2,
        hard_vocab_limit=False,
        **options,
    )
    (tmp_path / "spiece.vocab").unlink()
    if kind != "t5":
        (tmp_path / "spiece.model").rename(tmp_path / "tokenizer.model")
    _write(tmp_path, "config.json", {"model_type": kind})
    made = None
    for beside, flags in itertools.product((False, True), FLAGS):
        _write(tmp_path, "tokenizer_config.json", {"tokenizer_class": names[kind], **flags})
        if beside and made is None:
            made = AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer
        if made is not None:
            ends = ("<bos>", "<eos>") if kind == "gemma2" else ("<s>", "</s>")
            made.post_processor = post.TemplateProcessing(
                single=f"{ends[0]} $A {ends[1]}",
                special_tokens=list(zip(ends, (5, 6), strict=True)),
            )
            made.save(str(tmp_path / "tokenizer.json"))
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        with told() as words:
            ours = load_tokenizer(tmp_path)
        assert bool(words) == (not beside and kind != "t5" and flags.get("add_bos_token") is None)
        extra = ours.encode("the fox")[: len(words)]
        assert ours.encode("the fox") == extra + theirs.encode("the fox"), (beside, flags)
        assert all("does not set add_bos_token" in word for word in words)
        assert ours.special_tokens == theirs.special_tokens_map


def test_a_difference_is_told_by_its_part(tmp_path):
    made = FORMS["bytes, digits"]()
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    _write(tmp_path, "config.json", {"model_type": "llama"})
    _write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
    _write(tmp_path, "generation_config.json", {"eos_token_id": 256})
    with pytest.warns(UserWarning, match="by GPT2Tokenizer, which replaces its pre-tokenizer;"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model", "sentencepiece.model"])
def test_a_vocabulary_of_tiktoken(tmp_path, name):
    from transformers import AutoTokenizer

    lines = (base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256))
    (tmp_path / name).write_bytes(b"".join(lines))
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(ValueError, match="is in tiktoken's format, .* put tokenizer.json"):
            load_tokenizer(path)
    made = FORMS["bytes"]()
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    _write(tmp_path, "config.json", {"model_type": "llama"})
    _write(tmp_path, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
    ours = load_tokenizer(tmp_path)
    assert ours.encode("ab") == AutoTokenizer.from_pretrained(tmp_path).encode("ab") == [64, 65]
    (tmp_path / name).write_bytes(b"\0 not a model")
    with pytest.raises(ValueError, match="is no SentencePiece model"):
        load_tokenizer(tmp_path)
