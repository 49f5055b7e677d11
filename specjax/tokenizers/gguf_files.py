"""GGUF files, in which llama.cpp keeps a model: their header, and the small files it stands for.

A file has its metadata first (sizes, vocabulary, chat template), then the places of its tensors.
`unpacked` writes the metadata as the files of the Hugging Face directory that it was made of, so
one code reads both.

Source: `docs/gguf.md` of ggml, and `convert_hf_to_gguf.py` and `src/llama-vocab.cpp` of llama.cpp.
"""

import atexit
import contextlib
import functools
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.errors import UserError
from specjax.tokenizers.model_files import CHAT_TEMPLATE, GENERATION_FILE, write_json
from specjax.tokenizers.transformers_classes import QWEN2
from specjax.writing import temporary_directory

SUFFIX = ".gguf"
# The model types of general.architecture.
MODEL_TYPES = {
    **{name: name for name in ("llama", "qwen2", "qwen3", "gemma", "gemma2")},
    "gemma3": "gemma3_text",
}
# Codes of values' types, with struct's letters of numbers.
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_TEXT, _LIST = 8, 9
# Types of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
# Tokens that end a turn, whether or not the metadata names them.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tensor(NamedTuple):
    """The place of a tensor; `kind` is ggml's code of its type."""

    shape: tuple[int, ...]
    kind: int
    start: int


class Header(NamedTuple):
    """The header of a GGUF file."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file."""
    return path.suffix == SUFFIX and path.is_file()


def read_header(file: Path) -> Header:
    """Reads the header of a GGUF file; a damaged one is a `UserError`."""
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise UserError(f"{file} is no GGUF file; download or copy it again")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                return _header(_Cursor(content, 4))
            except (
                struct.error,
                LookupError,
                TypeError,
                ValueError,
                ArithmeticError,
                RecursionError,
            ) as error:
                raise UserError(
                    f"{file} is cut short or damaged ({error}); download or copy it again"
                ) from None


class _Cursor:
    def __init__(self, content: Any, at: int) -> None:
        self.content, self.at = content, at

    def number(self, letter: str) -> Any:
        value = struct.unpack_from(f"<{letter}", self.content, self.at)[0]
        self.at += struct.calcsize(letter)
        return value

    def text(self) -> str:
        start = self.at + 8
        self.at = start + self.number("Q")
        if self.at > len(self.content):
            raise ValueError("a text is longer than the file")
        return self.content[start : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            return self.number(_NUMBERS[kind])
        kind, count = self.number("I"), self.number("Q")
        if kind in (_TEXT, _LIST):
            return [self.value(kind) for _ in range(count)]
        values = np.frombuffer(self.content, f"<{_NUMBERS[kind]}", count, self.at)
        self.at += values.nbytes
        return values.tolist()


def _header(cursor: _Cursor) -> Header:
    version, count, pairs = (cursor.number(letter) for letter in "IQQ")
    if version not in (2, 3):
        raise ValueError(f"version {version}")
    metadata = {}
    for _ in range(pairs):
        name = cursor.text()
        metadata[name] = cursor.value(cursor.number("I"))
    places = {}
    for _ in range(count):
        name = cursor.text()
        shape = tuple(cursor.number("Q") for _ in range(cursor.number("I")))
        places[name] = Tensor(shape[::-1], cursor.number("I"), cursor.number("Q"))
    alignment = metadata.get("general.alignment", 32)
    start = cursor.at + -cursor.at % alignment
    tensors = {name: place._replace(start=start + place.start) for name, place in places.items()}
    return Header(metadata, tensors)


_kept = contextlib.ExitStack()
atexit.register(_kept.close)


class _Unpacked(NamedTuple):
    """A directory until the process ends, and why it has no tokenizer."""

    place: Path
    fault: UserError | None


def unpacked(file: Path, *, tokenizer: bool = False) -> Path:
    """A directory with what a GGUF file has besides its weights, as files of Hugging Face.

    It is temporary, and has the file's name, for messages. `tokenizer`: a tokenizer that cannot be
    read is a `UserError`.
    """
    status = file.stat()
    found = _unpacked(file.absolute(), status.st_mtime_ns, status.st_size)
    if tokenizer and found.fault is not None:
        raise found.fault
    return found.place


@functools.cache
def _unpacked(file: Path, _time: int, _size: int) -> _Unpacked:
    header, fault = read_header(file), None
    metadata = header.metadata
    try:
        files = {"config.json": _config(file, header), **_settings(metadata)}
        try:
            files |= _vocabulary(file, metadata)
        except UserError as error:
            fault = error
    except (TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{file}: its metadata is damaged ({error}); copy it again") from None
    directory = _kept.enter_context(temporary_directory()) / file.name
    directory.mkdir()
    for name, content in files.items():
        if isinstance(content, bytes):
            (directory / name).write_bytes(content)
        else:
            write_json(directory / name, content)
    return _Unpacked(directory, fault)


def _settings(metadata: dict[str, Any]) -> dict[str, Any]:
    """The names and contents of the files beside a vocabulary."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    kinds = _kinds(metadata)
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends += [i for i, text in enumerate(tokens) if text in _TURN_ENDS and kinds[i] == _CONTROL]
    ids = {
        name: metadata.get(f"tokenizer.ggml.{stored}_token_id")
        for name, stored in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    generation = {
        "bos_token_id": ids["bos"],
        "pad_token_id": ids["pad"],
        "eos_token_id": list(dict.fromkeys(i for i in ends if i is not None)),
    }
    byte_level = metadata.get("tokenizer.ggml.model") == "gpt2"
    gemma = metadata["general.architecture"].startswith("gemma")
    marked = "GemmaTokenizer" if gemma else "LlamaTokenizer"
    config = {
        **{f"{name}_token": tokens[i] for name, i in ids.items() if i is not None},
        "tokenizer_class": "PreTrainedTokenizerFast" if byte_level else marked,
        "add_bos_token": _adds("bos", metadata),
        "add_eos_token": _adds("eos", metadata),
        "legacy": False,
    }
    template = metadata.get("tokenizer.chat_template")
    return {
        GENERATION_FILE: generation,
        "tokenizer_config.json": config,
        **({} if template is None else {CHAT_TEMPLATE: template.encode()}),
    }


def _adds(name: str, metadata: dict[str, Any]) -> bool:
    """Whether a text gets a beginning ("bos") or an end ("eos")."""
    begins = metadata.get("tokenizer.ggml.model") != "gpt2"
    begins |= metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    return metadata.get(f"tokenizer.ggml.add_{name}_token", begins and name == "bos")


def _kinds(metadata: dict[str, Any]) -> list[int]:
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    return metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)


def _vocabulary(file: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    """The name and content of the file of a vocabulary; none if there is none."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        return {}
    if kind == "gpt2":
        return {"tokenizer.json": _tokenizer_json(file, metadata, _kinds(metadata))}
    if kind == "llama":
        return {"tokenizer.model": _sentencepiece(metadata, _kinds(metadata))}
    raise UserError(
        f"{file}: tokenizer.ggml.model={kind!r} must be 'gpt2' or 'llama'; give tokenizer="
    )


def _config(file: Path, header: Header) -> dict[str, Any]:
    """The fields of `config.json`."""
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in MODEL_TYPES:
        raise UserError(
            f"{file}: general.architecture={architecture!r} must be one of {', '.join(MODEL_TYPES)}"
        )

    def field(name: str) -> Any:
        value = metadata.get(f"{architecture}.{name}")
        # As it was written: 1e-05, not the nearest float32.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    heads, width = field("attention.head_count"), field("embedding_length")
    head_dim = field("attention.key_length")
    if head_dim is None and isinstance(heads, int) and isinstance(width, int) and heads:
        head_dim = width // heads
    tokens = metadata.get("tokenizer.ggml.tokens")
    embedding = header.tensors.get("token_embd.weight")
    key_heads = field("attention.head_count_kv")
    rotated = field("rope.dimension_count")
    if None not in (rotated, head_dim) and rotated != head_dim:
        raise UserError(
            f"{file}: {architecture}.rope.dimension_count={rotated} must be {head_dim}, the width "
            "of a head"
        )
    values = {
        "model_type": MODEL_TYPES[architecture],
        "vocab_size": embedding.shape[0] if embedding else len(tokens or ()),
        "hidden_size": width,
        "num_hidden_layers": field("block_count"),
        "intermediate_size": field("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if key_heads is None else key_heads,
        "head_dim": head_dim,
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_theta": field("rope.freq_base"),
        "rope_scaling": _rope_scaling(file, header, field),
        "max_position_embeddings": field("context_length"),
        "sliding_window": field("attention.sliding_window"),
        "attn_logit_softcapping": field("attn_logit_softcapping"),
        "final_logit_softcapping": field("final_logit_softcapping"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    # llama.cpp scales the queries of the 27B by the width of the text over the heads.
    if (architecture, values["num_hidden_layers"]) in (("gemma2", 46), ("gemma3", 62)):
        values["query_pre_attn_scalar"] = width // heads
    elif architecture in ("gemma2", "gemma3"):
        values["query_pre_attn_scalar"] = head_dim
    return {name: value for name, value in values.items() if value is not None}


def _rope_scaling(file: Path, header: Header, field: Any) -> dict[str, Any] | None:
    stored = header.tensors.get("rope_freqs.weight")
    if stored is None:
        kind = field("rope.scaling.type")
        if kind in (None, "none"):
            return None
        return {"rope_type": kind, "factor": field("rope.scaling.factor")}
    # Llama 3.1 and later store what each frequency is divided by, which follows from the largest.
    stretch = {
        "rope_type": "llama3",
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    divisors = np.fromfile(file, "<f4", stored.shape[0], offset=stored.start)
    return {**stretch, "factor": float(divisors.max(initial=1.0))}


def _split(regex: str) -> dict[str, Any]:
    return {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
            {**_BYTES, "use_regex": False},
        ],
    }


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
# By tokenizer.ggml.pre: the normalizer and the splitting before merges.
_STEPS: dict[str, tuple[Any, Any]] = {
    "gpt-2": (None, _BYTES),
    "smollm": (None, {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTES]}),
    **dict.fromkeys(_LLAMA3_NAMES, (None, _split(_LLAMA3))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), ({"type": "NFC"}, _split(QWEN2))),
}


def _tokenizer_json(file: Path, metadata: dict[str, Any], kinds: list[int]) -> dict[str, Any]:
    """The `tokenizer.json` of a byte-level vocabulary."""
    named = metadata.get("tokenizer.ggml.pre")
    if named not in _STEPS:
        raise UserError(
            f"{file}: tokenizer.ggml.pre={named!r} must be one of {', '.join(_STEPS)}; give "
            "tokenizer="
        )
    normalizer, pre_tokenizer = _STEPS[named]
    tokens = metadata["tokenizer.ggml.tokens"]
    added = [
        {
            "id": i,
            "content": tokens[i],
            "special": kind != _USER_DEFINED,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for i, kind in enumerate(kinds)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    around = {
        name: metadata.get(f"tokenizer.ggml.{name}_token_id")
        for name in ("bos", "eos")
        if _adds(name, metadata)
    }
    special = {
        name: {"SpecialToken": {"id": tokens[i], "type_id": 0}} for name, i in around.items()
    }
    text = {"Sequence": {"id": "A", "type_id": 0}}
    single = [*filter(None, [special.get("bos"), text, special.get("eos")])]
    ids = {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in around.values()}
    template = {"single": single, "pair": [*single, *single], "special_tokens": ids}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": {"type": "TemplateProcessing", **template} if around else None,
        "decoder": {**_BYTES, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "vocab": {text: i for i, text in enumerate(tokens) if kinds[i] != _UNUSED},
            "merges": [merge.split(" ", 1) for merge in metadata["tokenizer.ggml.merges"]],
            # A word that is a token is taken whole.
            "ignore_merges": named in _LLAMA3_NAMES,
        },
    }


def _sentencepiece(metadata: dict[str, Any], kinds: list[int]) -> bytes:
    """The SentencePiece model of a vocabulary, in protobuf's encoding."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    size = max((i for i, kind in enumerate(kinds) if kind != _UNUSED), default=-1) + 1
    pieces = (
        _field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + _field(3, kind)
        for text, score, kind in zip(tokens[:size], scores, kinds, strict=False)
    )
    numbers = {"unknown": 40, "bos": 41, "eos": 42, "padding": 43}
    ids = {n: metadata.get(f"tokenizer.ggml.{name}_token_id", -1) for name, n in numbers.items()}
    if ids[40] < 0:
        ids[40] = kinds.index(_UNKNOWN)
    trainer = _field(3, 2) + _field(35, 1)  # BPE, with pieces for bytes
    trainer += b"".join(_field(number, i) for number, i in ids.items())
    normalizer = _field(1, b"identity") + _field(4, 0) + _field(5, 1)  # spaces are kept, and marked
    normalizer += _field(3, int(metadata.get("tokenizer.ggml.add_space_prefix", True)))
    model = b"".join(_field(1, piece) for piece in pieces)
    return model + _field(2, trainer) + _field(3, normalizer)


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return _varint(number << 3 | 2) + _varint(len(value)) + value
    return _varint(number << 3) + _varint(value % 2**64)  # negative numbers are cut to 64 bits


def _varint(value: int) -> bytes:
    groups = []
    while True:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
        if not value:
            groups[-1] &= 0x7F
            return bytes(groups)
