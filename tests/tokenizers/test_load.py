"""Tokenizers against SentencePiece, the tokenizers package and transformers, on tiny models."""

import json
import shutil

import numpy as np
import pytest
import sentencepiece as spm
import tokenizers as tk
import transformers

from specjax.text.directories import built_in_pair
from specjax.tokenizers import added_text
from specjax.tokenizers.load import ByteTokenizer, load_tokenizer
from specjax.tokenizers.subword import HuggingFaceTokenizer, SentencePieceTokenizer

SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "a stitch in time saves nine",
    "we measured the acceptance rate of the draft model",
    "blocks of tokens are verified in parallel",
    "zwölf große Kisten stehen quer über den Weg",
    "prices rose by 3.5% in 2021, then fell",
    "she sells sea shells on the sea shore",
    "models that agree decode faster",
] * 8

TEXTS = [
    "the quick  fox 3.5% ",
    "a stitch\nin time",
    "über ☃ 日本",
    "x</s>y",
    "tab\there",
    "end.",
    "",
]


def _train(directory, name, **options):
    directory.mkdir()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_prefix=str(directory / "trained"),
        minloglevel=2,
        hard_vocab_limit=False,
        **options,
    )
    (directory / "trained.model").rename(directory / name)
    return directory


def _write(directory, name, values):
    (directory / name).write_text(json.dumps(values))


@pytest.fixture(scope="module")
def t5_dir(tmp_path_factory):
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    directory = _train(
        tmp_path_factory.mktemp("tokenizers") / "t5",
        "spiece.model",
        vocab_size=150,
        model_type="unigram",
        user_defined_symbols=["<mark>"],
        **ids,
    )
    _write(directory, "config.json", {"model_type": "t5", "vocab_size": 512})
    _write(directory, "tokenizer_config.json", {"tokenizer_class": "T5Tokenizer"})
    return directory


_BPE = {
    "vocab_size": 420,
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory):
    ids = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}
    place = tmp_path_factory.mktemp("tokenizers") / "llama"
    _train(place, "tokenizer.model", user_defined_symbols=["<mark>"], **ids, **_BPE)
    _write(place, "config.json", {"model_type": "llama"})
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False}
    _write(place, "tokenizer_config.json", settings)
    return place


@pytest.fixture(scope="module")
def gemma_dir(tmp_path_factory):
    ids = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "add_dummy_prefix": False}
    turns = {"user_defined_symbols": ["<start_of_turn>", "<end_of_turn>"]}
    directory = tmp_path_factory.mktemp("tokenizers") / "gemma"
    _train(directory, "tokenizer.model", **ids, **turns, **_BPE)
    _write(directory, "config.json", {"model_type": "gemma2", "eos_token_id": 1})
    _write(directory, "tokenizer_config.json", {"add_bos_token": True, "bos_token": "<s>"})
    turn = load_tokenizer(directory).encode("<end_of_turn>")[-1]
    _write(directory, "generation_config.json", {"eos_token_id": [1, turn], "pad_token_id": 0})
    return directory


def _both(directory):
    return load_tokenizer(directory), transformers.AutoTokenizer.from_pretrained(str(directory))


def _decode_alike(ours, theirs, ids):
    for skip in (True, False):
        expected = theirs.decode(ids, skip_special_tokens=skip)
        assert ours.decode(ids, skip_special_tokens=skip) == expected, (ids, skip)


def _agree(ours, theirs, texts):
    for text in texts:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        _decode_alike(ours, theirs, ids)


def test_t5_agrees_with_transformers(t5_dir):
    ours, theirs = load_tokenizer(t5_dir), transformers.T5Tokenizer.from_pretrained(str(t5_dir))
    _agree(ours, theirs, [*TEXTS, "  leading", " ", "a <extra_id_0> b<extra_id_1>c"])
    assert ours.vocab_size == len(theirs)
    assert (ours.eos_ids, ours.pad_id, ours.bos_id) == ((1,), 0, None)
    assert ours.encode("time", add_special_tokens=False)[-1] != 1
    assert ours.encode("<extra_id_0>") == [ours.vocab_size - 1, 1]


@pytest.mark.parametrize("as_json", [False, True])
def test_llama_agrees_with_transformers(llama_dir, as_json, tmp_path):
    directory, kind, spaces = llama_dir, SentencePieceTokenizer, []
    theirs = transformers.LlamaTokenizer.from_pretrained(str(llama_dir))
    if as_json:
        theirs.save_pretrained(str(tmp_path))
        (tmp_path / "tokenizer.model").unlink(missing_ok=True)
        _write(tmp_path, "config.json", {"model_type": "llama", "eos_token_id": 2})
        directory, kind, spaces = tmp_path, HuggingFaceTokenizer, ["  leading"]
    ours = load_tokenizer(directory)
    assert type(ours) is kind
    _agree(ours, theirs, [*TEXTS, *spaces, "a</s> <s>b"])
    with pytest.warns(UserWarning, match="a prompt begins with <s> twice"):
        _agree(ours, theirs, ["<s>[INST] hi [/INST]"])
    assert (ours.bos_id, ours.eos_ids, ours.pad_id) == (1, (2,), 2)
    assert ours.vocab_size == len(theirs)
    # The same vocabulary in either form.
    assert ours.fingerprint == load_tokenizer(llama_dir).fingerprint


def test_special_tokens_that_only_tokenizer_config_names(t5_dir, llama_dir, gemma_dir, tmp_path):
    """transformers leaves them out of a decoded text, and so do we."""
    t5, llama, gemma, json_only = (tmp_path / x for x in ("t5", "llama", "gemma", "json_only"))
    for source, copy in ((t5_dir, t5), (llama_dir, llama), (gemma_dir, gemma)):
        shutil.copytree(source, copy)
    transformers.LlamaTokenizer.from_pretrained(str(llama)).save_pretrained(str(json_only))
    (json_only / "tokenizer.model").unlink(missing_ok=True)
    _write(json_only, "config.json", {"model_type": "llama", "eos_token_id": 2})
    as_saved = json.loads((json_only / "tokenizer.json").read_text())
    silent = [token for token in as_saved["added_tokens"] if token["content"] != "<mark>"]
    _write(json_only, "tokenizer.json", {**as_saved, "added_tokens": silent})
    for directory in (t5, llama, json_only):
        plain = load_tokenizer(directory).encode("a fox", add_special_tokens=False)
        assert load_tokenizer(directory).token(3) == "<mark>"
        config = json.loads((directory / "tokenizer_config.json").read_text())
        names = ("additional_special_tokens", "extra_special_tokens")
        for key in names:
            extra = {"extra_ids": 0} if directory == t5 else {}
            settings = config | dict.fromkeys(names) | extra | {key: ["<mark>"]}
            _write(directory, "tokenizer_config.json", settings)
            ours, theirs = _both(directory)
            for ids in ([3, *plain], [*plain, 3, *plain], [*plain, 3]):
                _decode_alike(ours, theirs, ids)
                assert "<mark>" not in ours.decode(ids)
            assert ours.encode("a <mark>fox") == theirs.encode("a <mark>fox")
    # A token that tokenizer.json lists as not special stays so, though it is named.
    _write(json_only, "tokenizer.json", as_saved)
    ours, theirs = _both(json_only)
    assert ours.decode([3]) == theirs.decode([3], skip_special_tokens=True) == "<mark>"
    # added_tokens.json does not say whether its tokens are special.
    new = load_tokenizer(llama).vocab_size
    _write(llama, "added_tokens.json", {"<new>": new})
    assert load_tokenizer(llama).decode([new]) == "<new>"
    edited = {**json.loads((llama / "tokenizer_config.json").read_text()), "pad_token": "<new>"}
    _write(llama, "tokenizer_config.json", edited)
    assert load_tokenizer(llama).decode([new]) == ""
    # A piece of Gemma's own that is named in special_tokens_map.json, as 4.x writes it.
    before = load_tokenizer(gemma)
    turn = before.encode("<start_of_turn>")[-1]
    assert before.decode([turn]) == "<start_of_turn>"
    named = [{"content": "<start_of_turn>", "lstrip": False}, "<not in the vocabulary>"]
    _write(gemma, "special_tokens_map.json", {"additional_special_tokens": named})
    again = load_tokenizer(gemma)
    assert again.decode([turn]) == "" and again.vocab_size == before.vocab_size


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_any_ids_decode_as_in_transformers(family, t5_dir, llama_dir):
    """Only the first token's space goes: the one after a skipped `<unk>` stays."""
    ours, theirs = _both(t5_dir if family == "t5" else llama_dir)
    unknown = theirs.unk_token_id
    fox = theirs.encode("the fox", add_special_tokens=False)
    space = theirs.convert_tokens_to_ids("▁")
    if family == "t5":
        assert ours.decode([space, unknown, *fox]) == " the fox"
    rng = np.random.default_rng(0)
    cases = [[unknown, *fox], [space, unknown, *fox], [space, *fox], [*fox, unknown]]
    # Bytes that are no UTF-8 are left to SentencePiece, see below.
    drawn = [i for i in range(len(theirs)) if not ours.token(i).startswith("<0x")]
    cases += [rng.choice(drawn, rng.integers(1, 8)).tolist() for _ in range(300)]
    for ids in cases:
        _decode_alike(ours, theirs, ids)


def test_leading_spaces_of_llama_are_sentencepieces(llama_dir):
    """transformers 5 drops one of the spaces that begin a text; the model itself does not."""
    ours, theirs = _both(llama_dir)
    plain = spm.SentencePieceProcessor(model_file=str(llama_dir / "tokenizer.model"))
    for text in ("  leading", " a", "a  b"):
        assert ours.encode(text) == [1, *plain.EncodeAsIds(text)]
    assert ours.encode("  leading") != theirs.encode("  leading")


def test_added_tokens_that_only_tokenizer_json_names(llama_dir, tmp_path):
    """As transformers 5 saves them, the .model still beside."""
    theirs = transformers.LlamaTokenizer.from_pretrained(str(llama_dir))
    theirs.add_tokens(["<new>"])
    theirs.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    theirs.save_pretrained(str(tmp_path))
    _write(tmp_path, "config.json", {"model_type": "llama", "eos_token_id": 2})
    (tmp_path / "tokenizer.model").write_bytes((llama_dir / "tokenizer.model").read_bytes())
    ours = load_tokenizer(tmp_path)
    assert type(ours) is SentencePieceTokenizer and ours.vocab_size == len(theirs)
    assert theirs.convert_tokens_to_ids("<new>") in ours.encode("a<turn>b<new>")
    _agree(ours, theirs, ["a<turn>b<new>"])


def test_gemma_agrees_with_sentencepiece(gemma_dir):
    ours = load_tokenizer(gemma_dir)
    plain = spm.SentencePieceProcessor(model_file=str(gemma_dir / "tokenizer.model"))
    for text in [t for t in TEXTS if "</s>" not in t] + ["  leading", "<start_of_turn>user\nhi"]:
        ids = plain.EncodeAsIds(text)
        assert ours.encode(text) == [2, *ids]
        assert ours.decode(ours.encode(text)) == plain.DecodeIds(ids) == text
    assert len(ours.eos_ids) == 2
    assert ours.eos_ids[0] == 1


def test_ids_past_the_vocabulary_add_no_text(t5_dir, llama_dir):
    for directory in (t5_dir, llama_dir):
        tokenizer = load_tokenizer(directory)
        ids = tokenizer.encode("the fox")
        assert tokenizer.decode([*ids, tokenizer.vocab_size, 10**6]) == "the fox"
        with pytest.raises(ValueError, match="-7 is negative"):
            tokenizer.decode([-7])
    # Byte pieces that are no UTF-8 become U+FFFD, SentencePiece's own rule.
    llama = load_tokenizer(llama_dir)
    broken = [i for i in range(llama.vocab_size) if llama.token(i) == "<0xE2>"]
    assert llama.decode(broken) == "�"


def test_t5_gets_sentinels_only_where_the_embedding_has_rows(t5_dir, tmp_path):
    (tmp_path / "spiece.model").write_bytes((t5_dir / "spiece.model").read_bytes())
    size = load_tokenizer(tmp_path).vocab_size
    _write(tmp_path, "config.json", {"model_type": "t5", "vocab_size": size + 8})
    assert load_tokenizer(tmp_path).vocab_size == size
    assert max(load_tokenizer(tmp_path).encode("<extra_id_0>")) < size
    _write(tmp_path, "tokenizer_config.json", {"extra_ids": 8})
    assert load_tokenizer(tmp_path).encode("<extra_id_0>") == [size + 7, 1]
    named = {str(size): {"content": "<new>", "special": False}}
    _write(tmp_path, "tokenizer_config.json", {"added_tokens_decoder": named, "extra_ids": 0})
    added = load_tokenizer(tmp_path)
    assert added.encode("a <new> b", add_special_tokens=False)[1] == size
    assert added.decode(added.encode("a <new> b")) == "a<new> b"


@pytest.mark.parametrize("model_type", ["mt5", "umt5", "t5gemma", "t5gemma2"])
def test_tokenizers_of_other_encoder_decoders(model_type, t5_dir, llama_dir, gemma_dir, tmp_path):
    """mT5's and UMT5's append eos and may have sentinels; T5Gemma's are Gemma's."""
    gemma = "gemma" in model_type
    directory = shutil.copytree(gemma_dir if gemma else t5_dir, tmp_path / "copy")
    _write(directory, "config.json", {"model_type": model_type, "vocab_size": 300})
    ours, same = load_tokenizer(directory), load_tokenizer(gemma_dir if gemma else t5_dir)
    text = "a stitch <extra_id_1> in time"
    assert ours.encode(text) == same.encode(text)
    assert (ours.add_bos, ours.add_eos) == (gemma, not gemma)
    # Pile-T5: a UMT5 with Llama's tokenizer.
    if model_type == "umt5":
        directory = shutil.copytree(llama_dir, tmp_path / "pile")
        _write(directory, "config.json", {"model_type": model_type, "vocab_size": 300})
        with pytest.warns(UserWarning, match="without the space before texts; specjax has it"):
            ours = load_tokenizer(directory)
        assert ours.encode(text) == load_tokenizer(llama_dir).encode(text)


def test_files_alone_and_flags(t5_dir, llama_dir, tmp_path):
    alone = tmp_path / "any.model"
    alone.write_bytes((t5_dir / "spiece.model").read_bytes())
    assert load_tokenizer(alone).encode("a")[-1] == 1
    alone.write_bytes((llama_dir / "tokenizer.model").read_bytes())
    tokenizer = load_tokenizer(alone)
    assert tokenizer.encode("a") == load_tokenizer(llama_dir).encode("a")
    assert tokenizer.fingerprint != load_tokenizer(t5_dir).fingerprint
    _write(tmp_path, "tokenizer_config.json", {"add_bos_token": False, "add_eos_token": True})
    with pytest.warns(UserWarning, match="without the space before texts; specjax has it"):
        ids = load_tokenizer(alone).encode("a")
    assert ids[0] != 1 and ids[-1] == 2
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)
    for name in ("tokenizer_config.json", "config.json"):
        _write(tmp_path, name, {"tokenizer_class": "ByT5Tokenizer", "extra_ids": None})
        assert load_tokenizer(tmp_path).encode("a<extra_id_0>") == [100, 259, 1]
        assert load_tokenizer(tmp_path).vocab_size == 384
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (None, b"", r"has no tokenizer, .*\(tokenizer=PATH\)"),
        ("tokenizer.json", b"{", "is not a tokenizer"),
        ("tokenizer.model", b"not a model", "no SentencePiece model"),
        ("tokenizer.model", 200, "no SentencePiece model"),
        ("absent", None, "no such file or directory"),
    ],
)
def test_bad_input_is_told_in_one_line(t5_dir, tmp_path, name, content, message):
    path = tmp_path if name != "absent" else tmp_path / name
    if isinstance(content, int):
        content = (t5_dir / "spiece.model").read_bytes()[:content]
    if path == tmp_path and name is not None:
        (path / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("part", ["splitting", "normalizer", "decoder"])
def test_a_panic_of_a_tokenizer_json_is_an_error(tmp_path, part):
    slow, words = tk.Regex("(a+)+$"), sorted(tk.pre_tokenizers.ByteLevel.alphabet())
    made = tk.Tokenizer(tk.models.BPE(vocab={c: i for i, c in enumerate(words)}, merges=[]))
    made.pre_tokenizer = tk.pre_tokenizers.ByteLevel(False, use_regex=False)
    if part == "splitting":
        steps = [tk.pre_tokenizers.Split(slow, "isolated"), made.pre_tokenizer]
        made.pre_tokenizer = tk.pre_tokenizers.Sequence(steps)
    elif part == "normalizer":
        made.normalizer = tk.normalizers.Replace(slow, "x")
    else:
        made.decoder = tk.decoders.Sequence([tk.decoders.Fuse(), tk.decoders.Replace(slow, "x")])
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    _write(tmp_path, "tokenizer_config.json", {"eos_token": "</s>"})
    ours = load_tokenizer(tmp_path)
    assert len(ours.encode("aab")) == 3
    does = "join the tokens" if part == "decoder" else "split the text"
    with pytest.raises(ValueError, match=rf"tokenizer\.json cannot {does} \(.*Onig"):
        ours.decode(ours.encode("a" * 60 + "b"))


@pytest.mark.parametrize("kind", ["built-in", "llama_dir", "gemma_dir", "bytes"])
def test_what_is_added_to_a_prompt_keeps_its_first_space(kind, request):
    places = {"bytes": "bytes", "built-in": built_in_pair("gsm8k") / "verifier"}
    words = load_tokenizer(places.get(kind) or request.getfixturevalue(kind))
    prompt, rest = "def same(x):\n", "    return x\n    # twelve"
    before, whole = (words.encode(text) for text in (prompt, prompt + rest))
    while before[-1] in words.eos_ids:
        before.pop()
    after = whole[len(before) :]
    assert whole[: len(before)] == before
    assert added_text(words, before, after) == rest
    # By themselves they lose it where encoding puts a space before a text.
    assert (words.decode(after) == rest) == (kind in ("gemma_dir", "bytes"))
    assert added_text(words, [], after) == words.decode(after)


def test_a_character_may_begin_in_the_prompt():
    words = ByteTokenizer()
    ids = words.encode("a☃b")
    assert [added_text(words, ids[:i], ids[i:-1]) for i in (1, 2, 4)] == ["☃b", "☃b", "b"]


@pytest.mark.filterwarnings("ignore:This sequence already has")
def test_bytes_agree_with_transformers():
    ours, theirs = ByteTokenizer(extra_ids=125), transformers.ByT5Tokenizer()
    for text in (
        "the quick  fox 3.5% ",
        "a stitch\nin time",
        "über ☃ 日本",
        "tab\there",
        "end.",
        "",
        "a<extra_id_0>b <extra_id_124> <extra_id_125>",
        "a </s> b<pad>c \n<unk>  d",
        "a</s> ",  # no second eos
        "a</s></s>",
    ):
        assert ours.encode(text) == theirs.encode(text)
        told = ours.decode(ours.encode(text))
        assert told == theirs.decode(theirs.encode(text), skip_special_tokens=True)
        assert told == text or "<" in text
    assert ByteTokenizer().encode("<pad>") == ours.encode("<")[:1] + ours.encode("pad>")
    assert ours.vocab_size == len(theirs) == 384
    assert (ours.eos_ids, ours.pad_id, ours.bos_id) == ((1,), 0, None)


def test_bytes_without_meaning_are_defined():
    bytes_ = ByteTokenizer()
    snowman = bytes_.encode("☃", add_special_tokens=False)
    assert bytes_.decode(snowman[:2]) == ""  # cut within a character
    assert bytes_.decode([*snowman[:2], *bytes_.encode("a")]) == "a"
    assert bytes_.decode([0, 2, 259, 10_000, 100]) == "a"
    assert bytes_.decode([100, 1, 0], skip_special_tokens=False) == "a</s><pad>"
    assert bytes_.decode(np.array([100, 101], np.int32)) == "ab"
    assert bytes_.decode(range(3, 131)) == bytes(range(128)).decode()
    assert bytes_.encode("\ud800") == [66, 1]  # a lone surrogate is no text: "?"
    with pytest.raises(ValueError, match="-1 is negative"):
        bytes_.decode([100, -1])
    with pytest.raises(ValueError, match="`extra_ids` must be at least 0, got -1"):
        ByteTokenizer(extra_ids=-1)
