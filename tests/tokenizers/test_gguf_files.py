"""Ids of tokenizers in GGUF files are those of the tokenizers that the files were made of."""

import contextlib
import json
import random

import pytest
import sentencepiece
import tokenizers as tk

from specjax.errors import UserError
from specjax.models import FAMILIES
from specjax.tokenizers import load_tokenizer
from specjax.tokenizers.gguf_files import is_gguf, unpacked
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
@pytest.mark.parametrize("bos", [False, True])
def test_byte_level_vocabularies(tmp_path, kind, bos):
    made = trained(kind)
    words = load_tokenizer(write_bytes(tmp_path / "m.gguf", made, kind, add_bos_token=bos))
    assert words.vocab_size == made.get_vocab_size() and words.add_bos == bos
    for text in TEXTS:
        ids = made.encode(text).ids
        assert words.encode(text, add_special_tokens=False) == ids
        assert words.encode(text) == [words.bos_id] * bos + ids
        assert words.decode(ids) == made.decode(ids)
    assert words.eos_ids == (made.token_to_id("<|end|>"),)
    chat = [{"role": "user", "content": "two eggs"}]
    assert words.render_chat(chat) == "<|user|>two eggs<|end|><|begin|>"


def test_a_llama_3_begins_its_texts_without_being_told(tmp_path):
    words = load_tokenizer(write_bytes(tmp_path / "m.gguf", trained("llama-bpe"), "llama-bpe"))
    assert words.add_bos


def test_ends_of_turns_end_texts(tmp_path):
    made = trained("gpt-2")
    file = write_bytes(tmp_path / "m.gguf", made, "gpt-2", eos_token_id=made.token_to_id("a"))
    assert load_tokenizer(file).eos_ids == (made.token_to_id("a"), made.token_to_id("<|end|>"))


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_sentencepiece_vocabularies(tmp_path, family):
    vocabulary = FAMILIES[family].vocabulary
    (tmp_path / "texts").write_text("\n".join(TRAINING))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "texts"),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=330,
        minloglevel=2,
        user_defined_symbols=["<|user|>"],
        control_symbols=["<|end|>"],
        **vocabulary.options,
    )
    (tmp_path / "tokenizer.vocab").unlink()
    (tmp_path / "texts").unlink()
    config = {"model_type": family, "vocab_size": 330}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(vocabulary.settings))
    theirs = load_tokenizer(tmp_path)
    pieces = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    ids = range(pieces.GetPieceSize())
    kinds = [
        3 * pieces.IsControl(i)
        or 2 * pieces.IsUnknown(i)
        or 6 * pieces.IsByte(i)
        or (4 if pieces.IdToPiece(i) == "<|user|>" else 1)
        for i in ids
    ]
    values = {
        "token_scores": [pieces.GetScore(i) for i in ids],
        "bos_token_id": pieces.bos_id(),
        "eos_token_id": pieces.eos_id(),
        "add_space_prefix": family == "llama",
        "architecture": family,
    }
    tokens = [pieces.IdToPiece(i) for i in ids]
    ours = load_tokenizer(write(tmp_path / "m.gguf", "llama", tokens, kinds, **values))
    assert ours.fingerprint == theirs.fingerprint
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(
            text, add_special_tokens=False
        )
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.bos_id == theirs.bos_id and ours.eos_ids[0] == theirs.eos_ids[0]
    assert ours.special_tokens["bos_token"] == theirs.special_tokens["bos_token"]


def test_a_file_is_unpacked_once(tmp_path):
    file = write_bytes(tmp_path / "m.gguf", trained("gpt-2"), "gpt-2")
    assert is_gguf(file) and unpacked(file) == unpacked(file)
    config = json.loads((unpacked(file) / "config.json").read_text())
    assert config["max_position_embeddings"] == 64 and unpacked(file).name == "m.gguf"


def test_damaged_metadata_is_one_error(tmp_path):
    file = write(tmp_path / "m.gguf", "gpt2", ["a", "b"], [1], tokenizer_pre="gpt-2")
    with pytest.raises(UserError, match=r"m\.gguf: its metadata is damaged"):
        load_tokenizer(file)


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
    ("values", "message"),
    [
        ({"tokenizer_pre": "tekken"}, "tokenizer.ggml.pre='tekken' must be one of gpt-2, smollm"),
        ({"tokenizer_model": "bert"}, "tokenizer.ggml.model='bert' must be 'gpt2' or 'llama'"),
    ],
)
def test_an_unknown_tokenizer_is_refused(tmp_path, values, message):
    file = tmp_path / "m.gguf"
    made = trained("gpt-2")
    if "tokenizer_model" in values:
        write(file, values["tokenizer_model"], ["a"], [1])
    else:
        write_bytes(file, made, values["tokenizer_pre"])
    with pytest.raises(UserError, match=message):
        load_tokenizer(file)
    assert unpacked(file).is_dir()  # for a model with another tokenizer
