"""Ids of tokenizers in GGUF files are those of the tokenizers that the files were made of."""

import contextlib
import json
import random
import struct

import pytest
import sentencepiece
import tokenizers as tk

from specjax.errors import UserError
from specjax.models import FAMILIES
from specjax.tokenizers import gguf_files, load_tokenizer
from specjax.tokenizers.gguf_files import is_gguf, read_header
from specjax.tokenizers.transformers_classes import QWEN2

gguf = pytest.importorskip("gguf")
pre = tk.pre_tokenizers

TRAINING = [
    "Add two eggs and 200 g of flour, then stir until the dough is smooth.",
    "def area(width, height):\n    return width * height\n",
    "We'll see: it's 12 o'clock, they're late and I'M NOT.",
    "Der Hund schläft vor der Tür, weil es draußen regnet.",
] * 3
TEXTS = [
    *TRAINING[:4],
    "",
    " two  eggs   123 4567",
    "a\n\n  b\t\tc \r\n d",
    "IT'S I'll you'VE ... ??!! 2.5e3",
    "naïve café 東京 🙂 e\u0301",
    "<|user|>two eggs<|end|>\n<|user|> 12",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}{{ bos_token }}"


def _split(regex):
    steps = [pre.Split(tk.Regex(regex), "isolated"), pre.ByteLevel(False, use_regex=False)]
    return pre.Sequence(steps)


# As in the published tokenizer.json: normalizer, splitting, whether whole words are taken.
BYTE_LEVEL = {
    "gpt-2": (None, pre.ByteLevel(False), False),
    "smollm": (None, pre.Sequence([pre.Digits(True), pre.ByteLevel(False)]), False),
    "llama-bpe": (None, _split(LLAMA3), True),
    "qwen2": (tk.normalizers.NFC(), _split(QWEN2), False),
}


def trained(kind):
    normalizer, pre_tokenizer, whole = BYTE_LEVEL[kind]
    made = tk.Tokenizer(tk.models.BPE(ignore_merges=whole))
    made.pre_tokenizer, made.decoder = pre_tokenizer, tk.decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    special = ["<|begin|>", "<|end|>"]
    trainer = tk.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TRAINING, trainer)
    made.add_tokens([tk.AddedToken("<|user|>", normalized=False)])
    return made


def write(file, model, tokens, kinds, architecture="llama", **values):
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(64)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write_bytes(file, made, kind, **values):
    ids = made.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=ids.get)
    kinds = [{"<|begin|>": 3, "<|end|>": 3, "<|user|>": 4}.get(token, 1) for token in tokens]
    merges = json.loads(made.to_str())["model"]["merges"]
    # The converter fills up the rows of the embedding.
    tokens, kinds = [*tokens, "[PAD401]", "[PAD402]"], [*kinds, 5, 5]
    given = {
        "tokenizer_pre": kind,
        "token_merges": [" ".join(pair) for pair in merges],
        "bos_token_id": ids["<|begin|>"],
        "eos_token_id": ids["<|end|>"],
        "chat_template": TEMPLATE,
        **values,
    }
    return write(file, "gpt2", tokens, kinds, **given)


@pytest.mark.parametrize("kind", BYTE_LEVEL)
@pytest.mark.parametrize("bos", [False, True, None])
def test_byte_level_vocabularies(tmp_path, kind, bos):
    made, told = trained(kind), {} if bos is None else {"add_bos_token": bos}
    words = load_tokenizer(write_bytes(tmp_path / "m.gguf", made, kind, **told))
    bos = kind == "llama-bpe" if bos is None else bos  # as llama.cpp without being told
    assert words.vocab_size == made.get_vocab_size() and words.add_bos == bos
    for text in TEXTS:
        ids = made.encode(text).ids
        assert words.encode(text, add_special_tokens=False) == ids
        assert words.encode(text) == [words.bos_id] * bos + ids
        assert words.decode(ids) == made.decode(ids)
    assert words.eos_ids == (made.token_to_id("<|end|>"),)
    chat = [{"role": "user", "content": "two eggs"}]
    assert words.render_chat(chat) == "<|user|>two eggs<|end|><|begin|>"


def test_ends_of_turns_end_texts(tmp_path):
    made = trained("gpt-2")
    file = write_bytes(tmp_path / "m.gguf", made, "gpt-2", eos_token_id=made.token_to_id("a"))
    assert load_tokenizer(file).eos_ids == (made.token_to_id("a"), made.token_to_id("<|end|>"))


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_sentencepiece_vocabularies(tmp_path, family, listed):
    """`listed`: as the converter writes tokens that tokenizer_config.json lists, as in Gemma 3."""
    vocabulary = FAMILIES[family].vocabulary
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(TRAINING).splitlines()),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=330,
        minloglevel=2,
        user_defined_symbols=["<|user|>", "\u2581\u2581"],
        control_symbols=["<|end|>"],
        **vocabulary.options,
    )
    config = {"model_type": family, "vocab_size": 330}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(vocabulary.settings))
    theirs = load_tokenizer(tmp_path)
    pieces = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    ids = range(pieces.GetPieceSize())
    kinds = [
        3 * pieces.IsControl(i)
        or (3 if listed else 2) * pieces.IsUnknown(i)
        or 6 * pieces.IsByte(i)
        or (4 if pieces.IdToPiece(i) in ("<|user|>", "\u2581\u2581") else 1)
        for i in ids
    ]
    values = {
        "token_scores": [pieces.GetScore(i) for i in ids],
        "bos_token_id": pieces.bos_id(),
        "eos_token_id": pieces.eos_id(),
        **({"unk_token_id": pieces.unk_id()} if listed else {}),
        "add_space_prefix": family == "llama",
        "architecture": family,
    }
    tokens = [pieces.IdToPiece(i) for i in ids]
    if listed:
        tokens[tokens.index("\u2581\u2581")] = "  "
    ours = load_tokenizer(write(tmp_path / "m.gguf", "llama", tokens, kinds, **values))
    assert ours.fingerprint == theirs.fingerprint
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.bos_id == theirs.bos_id and ours.eos_ids[0] == theirs.eos_ids[0]
    assert ours.special_tokens["bos_token"] == theirs.special_tokens["bos_token"]


def test_a_file_is_unpacked_once(tmp_path):
    file = write_bytes(tmp_path / "m.gguf", trained("gpt-2"), "gpt-2")
    assert is_gguf(file) and read_header(file) is read_header(file)
    config = json.loads((read_header(file).directory / "config.json").read_text())
    assert config["max_position_embeddings"] == 64 and read_header(file).directory.name == "m.gguf"


# The values of a small file with each kind of vocabulary, as `(kind, value)`; see `packed`.
SMALL = {
    "general.architecture": ("str", "llama"),
    "general.alignment": ("I", 32),
    "llama.context_length": ("I", 64),
    "llama.attention.head_count": ("I", 4),
    "llama.attention.layer_norm_rms_epsilon": ("f", 1e-5),
    "tokenizer.chat_template": ("str", "{{ x }}"),
    "tokenizer.ggml.bos_token_id": ("I", 1),
    "tokenizer.ggml.eos_token_id": ("I", 1),
    "tokenizer.ggml.padding_token_id": ("I", 0),
    "tokenizer.ggml.add_bos_token": ("?", True),
    "tokenizer.ggml.add_space_prefix": ("?", False),
}
BYTES = [f"<0x{i:02X}>" for i in range(256)]
VOCABULARIES = {
    "llama": {
        "tokenizer.ggml.model": ("str", "llama"),
        "tokenizer.ggml.tokens": ("str[]", ["<unk>", "<s>", "a", *BYTES]),
        "tokenizer.ggml.scores": ("f[]", [0.0] * 259),
        "tokenizer.ggml.token_type": ("i[]", [2, 3, 1, *[6] * 256]),
    },
    "gpt2": {
        "tokenizer.ggml.model": ("str", "gpt2"),
        "tokenizer.ggml.pre": ("str", "gpt-2"),
        "tokenizer.ggml.tokens": ("str[]", ["<pad>", "<s>", "a", "b", "ab"]),
        "tokenizer.ggml.merges": ("str[]", ["a b"]),
        "tokenizer.ggml.token_type": ("i[]", [3, 3, 1, 1, 1]),
    },
}
CODES = {letter: code for code, letter in enumerate("BbHhIif?")} | {"Q": 10, "q": 11, "d": 12}


def packed(kind, value):
    """The bytes of a value of type "str", of a letter of struct, or of a list of either."""
    if isinstance(value, bytes):
        return value
    if kind.endswith("[]"):
        inner = [packed(kind[:-2], x) for x in value]
        code = 9 if kind.endswith("[][]") else CODES.get(kind[:-2], 8)
        return struct.pack("<IIQ", 9, code, len(value)) + b"".join(x[4:] for x in inner)
    if kind == "str":
        return struct.pack("<IQ", 8, len(value.encode())) + value.encode()
    return struct.pack(f"<I{kind}", CODES[kind], value)


def headed(values, counts=None, rest=b""):
    pairs = [packed("str", key)[4:] + packed(*value) for key, value in values.items()]
    counts = (0, len(pairs)) if counts is None else counts
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join(pairs) + rest


def write_header(file, values):
    file.write_bytes(headed(values))
    return file


OTHERS = {
    "whole": ("I", 7_000_000),
    "negative": ("i", -1),
    "huge": ("Q", 2**64 - 1),
    "float": ("f", 2.5),
    "nan": ("f", float("nan")),
    "text": ("str", "x"),
    "flag": ("?", True),
    "nan numbers": ("f[]", [float("nan")] * 259),
    "texts": ("str[]", ["a"]),
    "flags": ("?[]", [True]),
    "empty": ("i[]", []),
    "lists": ("i[][]", [[1], []]),
    "unknown type": ("", struct.pack("<I", 77)),
    "trillion numbers": ("", struct.pack("<IIQ", 9, 5, 10**12)),
    "long text": ("", struct.pack("<IQ", 8, 2**63)),
    "no Unicode": ("", struct.pack("<IQ", 8, 1) + b"\xff"),
}
# What other values of a key are as good.
GOOD = {
    "tokenizer.chat_template": ("text",),
    "tokenizer.ggml.add_bos_token": ("flag",),
    "llama.context_length": ("whole",),
    "llama.attention.head_count": ("whole",),
    "llama.attention.layer_norm_rms_epsilon": ("whole", "huge", "float"),
}


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_small_vocabularies_are_read(tmp_path, kind):
    words = load_tokenizer(write_header(tmp_path / "m.gguf", SMALL | VOCABULARIES[kind]))
    assert words.encode("aa") == [1, 2, 2] and words.pad_id == 0


@pytest.mark.parametrize(
    ("kind", "key"),
    [(kind, key) for kind, values in VOCABULARIES.items() for key in values]
    + [("llama", key) for key in SMALL],
)
def test_each_value_of_another_type_is_one_error(tmp_path, kind, key):
    values = SMALL | VOCABULARIES[kind]
    good = GOOD.get(key, ())
    if key == "tokenizer.ggml.add_space_prefix" and kind == "llama":
        good = ("flag",)
    for name, other in OTHERS.items():
        if name not in good:
            file = write_header(tmp_path / f"{name}.gguf", values | {key: other})
            with pytest.raises(UserError, match=rf"{name}\.gguf"):
                load_tokenizer(file)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("llama", {"token_type": ("i[]", [3] * 259)}, "unknown_token_id must be .* and is missing"),
        ("llama", {"unknown_token_id": ("I", 2)}, "unknown_token_id must be .* type 2 or 3, got 2"),
        ("llama", {"scores": ("str[]", ["a"] * 259)}, "scores must be a list of finite numbers"),
        ("llama", {"scores": ("f[]", [0.0])}, "scores must be 259 numbers"),
        ("llama", {"scores": None}, "scores must be .* and is missing"),
        ("llama", {"tokens": None}, "whole numbers from 1 to 6|of which there are 0"),
        ("llama", {"token_type": ("i[]", [2, *[7] * 258])}, "whole numbers from 1 to 6"),
        ("llama", {"bos_token_id": ("I", 259)}, "bos_token_id must be .* of which there are 259"),
        ("llama", {"add_space_prefix": ("i", 1)}, "add_space_prefix must be true or false, got 1"),
        ("llama", {"remove_extra_whitespaces": ("?", True)}, "remove_extra_whitespaces must be"),
        ("llama", {"precompiled_charsmap": ("B[]", [1])}, "precompiled_charsmap must be absent"),
        ("gpt2", {"token_type": ("i[]", [1])}, "token_type must be 5 whole numbers from 1 to 6"),
        ("gpt2", {"merges": ("str[]", ["ab"])}, "merges must be pairs of texts that join"),
        ("gpt2", {"merges": ("str[]", ["a a"])}, "merges must be pairs of texts that join"),
        ("gpt2", {"merges": None}, "merges must be .* and is missing"),
        ("gpt2", {"add_space_prefix": ("?", True)}, "add_space_prefix must be false"),
        ("gpt2", {"add_sep_token": ("?", True)}, "add_sep_token must be absent or False"),
        (
            "gpt2",
            {"add_eos_token": ("?", True), "eos_token_id": None},
            "eos_token_id must be .* and is missing",
        ),
        ("gpt2", {"pre": None}, "pre=None must be one of"),
        ("gpt2", {"eos_token_ids": ("i[]", [5])}, r"eos_token_ids must be the ids.* got \[5\]"),
        ("gpt2", {"eos_token_ids": ("i[]", [-1])}, r"eos_token_ids must be the ids.* got \[-1\]"),
    ],
)
def test_damaged_vocabularies_are_named(tmp_path, kind, values, message):
    keyed = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    header = {k: v for k, v in (SMALL | VOCABULARIES[kind] | keyed).items() if v is not None}
    with pytest.raises(UserError, match=rf"m\.gguf: tokenizer\.ggml\..*{message}"):
        load_tokenizer(write_header(tmp_path / "m.gguf", header))


def test_keys_that_change_no_ids(tmp_path):
    more = {
        "add_sep_token": ("?", False),
        "add_unknown_token": ("?", False),
        "fim_pre_token_id": ("I", 2),
        "mask_token_id": ("i", -1),
        "remove_extra_whitespaces": ("?", False),
        "token_type_count": ("I", 1),
        "eos_token_ids": ("i[]", [1, 3]),
    }
    keyed = {f"tokenizer.ggml.{name}": value for name, value in more.items()}
    keyed["tokenizer.huggingface.json"] = ("str", "{}")
    words = load_tokenizer(write_header(tmp_path / "m.gguf", SMALL | VOCABULARIES["gpt2"] | keyed))
    assert words.encode("ab") == [1, 4] and words.eos_ids == (1, 3)


TWICE = packed("str", "general.alignment")[4:] + packed("I", 32)
TENSOR = packed("str", "x")[4:]
ENDS = r"ends at byte \d+, before its contents do: download or copy it again"


ONE = {"general.alignment": ("I", 32)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>..", "is no GGUF file, as it begins with b'<htm': download or copy"),
        (b"GGUF\0\0\0\3", "is a big-endian GGUF file: take a little-endian"),
        (b"GGUF\1\0\0\0", "has version 1 of GGUF: take a file of version 2 or 3"),
        (b"GGUF\3", ENDS),
        (headed(ONE, (0, 10**12)), ENDS),
        (headed(ONE, (10**12, 1)), ENDS),
        (headed(ONE, (0, 2)), ENDS),
        (headed(ONE, (0, 2), TWICE), "has a key twice .Duplicate general.alignment"),
        *[(headed({"general.alignment": ("I", x)}), "Invalid alignment: ") for x in (0, 3)],
        *[
            (headed({"x": (kind, value)}), "'x' is a list of lists")
            for kind, value in (("i[][]", [[1]]), ("str[][]", [["a"]]), ("str[][][]", [[["a"]]]))
        ],
        *[
            (headed(ONE, (number, 1), tensor), message)
            for number, tensor, message in (
                (1, TENSOR + struct.pack("<I", 2**31) + bytes(40), ENDS),
                (1, TENSOR + struct.pack("<IQIQ", 1, 9, 0, 0), ENDS),
                (1, TENSOR + struct.pack("<IQIQ", 1, 0, 0, 0) + bytes(64), "'x' has shape"),
                (1, TENSOR + struct.pack("<IIQ", 0, 0, 0) + bytes(64), "'x' has shape"),
                (1, TENSOR + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0) + bytes(64), "reshape"),
                (2, 2 * (TENSOR + struct.pack("<IQIQ", 1, 8, 0, 0)) + bytes(64), "duplicated .* x"),
                (1, TENSOR + struct.pack("<IQIQ", 1, 8, 0, 2**64 - 96) + bytes(64), "the header"),
            )
        ],
    ],
)
def test_a_damaged_header_is_one_error(tmp_path, content, message):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(UserError, match=rf"m\.gguf .*{message}"):
        read_header(tmp_path / "m.gguf")


def test_a_reader_without_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_files, "_reader", lambda library: library.GGUFReader)
    monkeypatch.setattr(gguf.GGUFReader, "reads", 0, raising=False)
    with pytest.raises(UserError, match="this version of gguf is not supported: run pip"):
        read_header(write_header(tmp_path / "m.gguf", SMALL))


def test_the_values_of_a_header_have_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_files, "_MOST_READS", 1000)
    many = packed("str[]", [])[:8] + struct.pack("<Q", 2000) + bytes(16_000)
    with pytest.raises(UserError, match=r"its header has more than 1,000 values"):
        read_header(write_header(tmp_path / "m.gguf", SMALL | {"x": ("", many)}))


def test_damaged_bytes_are_one_error(tmp_path):
    content = write_bytes(tmp_path / "m.gguf", trained("gpt-2"), "gpt-2").read_bytes()
    rng = random.Random(0)
    for number in range(200):
        place = rng.randrange(4, 2000 if number % 2 else len(content))
        file = tmp_path / f"{number}.gguf"
        file.write_bytes(content[:place] + rng.randbytes(4) + content[place + 4 :])
        with contextlib.suppress(UserError):  # a damaged letter is no error
            load_tokenizer(file)


@pytest.mark.parametrize(
    ("model", "pre", "message"),
    [
        ("gpt2", "tekken", "tokenizer.ggml.pre='tekken' must be one of gpt-2, smollm"),
        ("bert", "gpt-2", "tokenizer.ggml.model='bert' must be 'gpt2' or 'llama'"),
    ],
)
def test_an_unknown_tokenizer_is_refused(tmp_path, model, pre, message):
    words = {"tokenizer.ggml.model": ("str", model), "tokenizer.ggml.pre": ("str", pre)}
    file = write_header(tmp_path / "m.gguf", SMALL | VOCABULARIES["gpt2"] | words)
    with pytest.raises(UserError, match=message):
        load_tokenizer(file)
    assert read_header(file).directory.is_dir()  # for a model with another tokenizer
