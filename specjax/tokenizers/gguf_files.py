"""GGUF files, in which llama.cpp keeps a model: their header, and the small files it stands for.

A file has its metadata first (sizes, vocabulary, chat template), then the places of its tensors.
`read_header` writes the metadata as the files of the Hugging Face directory that it was made of, so
one code reads both.

Source: `docs/gguf.md` of ggml, and `convert_hf_to_gguf.py` and `src/llama-vocab.cpp` of llama.cpp.
"""

import atexit
import contextlib
import functools
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.checks import one_line, require, short_repr
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
DIVISORS = "rope_freqs.weight"
# More than headers have, a text being two: Gemma's has 1,100,000.
_MOST_READS = 4_000_000
_AGAIN = "download or copy it again"
# What a value must be, in words.
_WORDS, _FLAG, WHOLE = "a text", "true or false", "a whole number of at least 1"
_NUMBER, _ID = "a number above 0", "the id of a token"
_TEXTS, _WHOLES, _NUMBERS = "a list of texts", "a list of whole numbers", "a list of finite numbers"
_PERIOD = f"{WHOLE} or a list of true and false"
_CHECKS: dict[str, Callable[[Any], Any]] = {
    _WORDS: lambda x: isinstance(x, str),
    _FLAG: lambda x: isinstance(x, bool),
    WHOLE: lambda x: type(x) is int and 0 < x < 2**31,
    _NUMBER: lambda x: type(x) in (int, float) and 0 < x < 3e38,
    _ID: lambda x: type(x) is int and 0 <= x < 2**31,
    _TEXTS: lambda x: isinstance(x, list),
    _WHOLES: lambda x: isinstance(x, np.ndarray) and x.dtype.kind in "iu",
    _NUMBERS: lambda x: (
        isinstance(x, np.ndarray) and x.dtype.kind in "iuf" and (abs(x) < 3e38).all()
    ),
    _PERIOD: lambda x: _CHECKS[WHOLE](x) or (isinstance(x, np.ndarray) and x.dtype == bool),
}
# Keys under the architecture's name: their fields of config.json, what they must be, and values of
# llama.cpp that they may lack.
_FIELDS: dict[str, tuple[Any, ...]] = {
    "block_count": ("num_hidden_layers", WHOLE),
    "context_length": ("max_position_embeddings", WHOLE),
    "embedding_length": ("hidden_size", WHOLE),
    "feed_forward_length": ("intermediate_size", WHOLE),
    "attention.head_count": ("num_attention_heads", WHOLE),
    "attention.head_count_kv": ("num_key_value_heads", WHOLE, None),
    "attention.key_length": ("head_dim", WHOLE, None),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", _NUMBER),
    "rope.freq_base": ("rope_theta", _NUMBER, 10_000.0),
}
_OWN_FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "gemma2": {
        "attention.sliding_window": ("sliding_window", WHOLE, 4096),
        "attn_logit_softcapping": ("attn_logit_softcapping", _NUMBER, 50.0),
        "final_logit_softcapping": ("final_logit_softcapping", _NUMBER, 30.0),
    },
    "gemma3": {
        "attention.sliding_window": ("sliding_window", WHOLE),
        "attention.sliding_window_pattern": ("sliding_window_pattern", _PERIOD, 6),
        "rope.freq_base_swa": ("rope_local_base_freq", _NUMBER, 10_000.0),
    },
}
# Those that must be the width of a head, and those that `_rope_scaling` reads.
_LENGTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_WIDTHS = [f"{name}{kind}" for name in _LENGTHS for kind in ("", "_swa")]
_SCALING = ["rope.scale_linear"] + [
    f"rope.scaling.{name}"
    for name in ("type", "factor", "original_context_length", "yarn_beta_fast", "yarn_beta_slow")
]
# Others, with the values that change nothing; None for any.
_NEUTRAL: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("vocab_size", "pooling_type", "rope.scaling.finetuned")),
    "attention.layer_norm_epsilon": None,  # of norms that these networks do not have
    "attention.causal": (True,),
    "attention.sliding_window_pattern": (2,),  # Gemma 2's
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
# Likewise of tokenizers.
_VOCABULARY = (
    *("model", "pre", "tokens", "token_type", "token_type_count", "scores", "merges"),
    *("add_bos_token", "add_eos_token", "add_space_prefix", "eos_token_ids"),
)
_NO_FLAGS = ("add_sep_token", "add_padding_token", "add_unknown_token", "remove_extra_whitespaces")
_NEUTRAL_OF_VOCABULARY = dict.fromkeys(_NO_FLAGS, (False,))
# Types of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
# Tokens that end a turn, whether or not the metadata names them.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
_LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


class Tensor(NamedTuple):
    """The place of a tensor; `kind` is a `gguf.GGMLQuantizationType`."""

    shape: tuple[int, ...]
    kind: Any
    start: int
    size: int


class Header(NamedTuple):
    """The header of a GGUF file; lists of numbers are arrays.

    `directory` has what the file has besides its weights, as files of Hugging Face, until the
    process ends. Its name is the file's, for messages. `fault` is why it has no tokenizer.
    """

    file: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    directory: Path = Path()
    fault: UserError | None = None

    def read(self, key: str, wanted: str, *default: Any) -> Any:
        """The value of a key, or the default; a `UserError` if it is not what is `wanted`."""
        value = self.metadata.get(key)
        if value is None and default:
            return default[0]
        if not _CHECKS[wanted](value):
            raise self.wrong(key, wanted)
        return value

    def wrong(self, key: str, wanted: str) -> UserError:
        value = self.metadata.get(key)
        value = value[:20].tolist() if isinstance(value, np.ndarray) else value
        got = "and is missing" if value is None else f"got {short_repr(value)}"
        return UserError(f"{self.file}: {key[:80]} must be {wanted}, {got}")

    def refuse_others(
        self, prefix: str, known: Collection[str], neutral: Mapping[str, Any], remedy: str
    ) -> None:
        """Refuses keys that are not known, unless their values change nothing."""
        for key, value in self.metadata.items():
            name = key.removeprefix(prefix)
            if name == key or name in known or name.endswith("_token_id"):
                continue
            allowed = neutral.get(name, ())
            listed = isinstance(value, np.ndarray | list)
            if allowed is not None and (listed or value not in allowed):
                error = self.wrong(key, " or ".join(["absent", *map(repr, allowed)]))
                raise UserError(f"{error}, which is not read; {remedy}")


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file."""
    return path.suffix == SUFFIX and path.is_file()


def _reader(gguf: Any) -> Any:
    class Reader(gguf.GGUFReader):
        """The package's own slices end with the file without an error, and take 5 times as long."""

        reads = 0

        def _count(self, reads: int) -> None:
            self.reads += reads
            if self.reads > _MOST_READS:
                raise ValueError(f"its header has more than {_MOST_READS:,} values")

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            self._count(1)
            if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise EOFError
            return np.frombuffer(self.data, dtype, int(count), int(offset))

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            """The package reads a list's entries one by one, a large vocabulary's in 5 seconds."""
            kinds = gguf.GGUFValueType
            if raw_type != kinds.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind = kinds(self._get(orig_offs, np.uint32)[0])
            count, start = int(self._get(orig_offs + 4, np.uint64)[0]), int(orig_offs) + 12
            if (dtype := self.gguf_scalar_to_np.get(kind)) is not None:
                parts = [self._get(start, dtype, count)]
                end = start + parts[0].nbytes
            elif kind == kinds.STRING:
                self._count(count)
                parts, end = [], start
                for _ in range(count):
                    start = end + 8
                    end = start + int.from_bytes(self._bytes[end:start], "little")
                    if end > len(self._bytes):
                        raise EOFError
                    parts.append(self._bytes[start:end])
            else:
                return super()._get_field_parts(orig_offs, raw_type)
            types = [kinds.ARRAY, *([kind] if count else [])]
            return end - int(orig_offs), parts, list(range(len(parts))), types

        @functools.cached_property
        def _bytes(self) -> memoryview:
            return memoryview(self.data)

    return Reader


@np.errstate(over="ignore")  # a place beyond 64 bits is refused
def _parse(file: Path) -> Header:
    gguf = require("gguf", "gguf")
    with file.open("rb") as opened:
        magic, version = opened.read(4), opened.read(4)
    if magic != b"GGUF":
        raise UserError(f"{file} is no GGUF file, as it begins with {magic!r}: {_AGAIN}")
    if version[:2] == b"\0\0":
        raise UserError(f"{file} is a big-endian GGUF file: take a little-endian one")
    if len(version) == 4 and (number := int.from_bytes(version, "little")) not in (2, 3):
        raise UserError(f"{file} has version {number} of GGUF: take a file of version 2 or 3")
    try:
        reader, tensors = _reader(gguf)(file), {}
        for x in reader.tensors:
            shape = tuple(x.shape[::-1].tolist())
            if not 0 < len(shape) < 5 or 0 in shape:
                raise ValueError(f"{short_repr(x.name)} has shape {shape}")
            if x.data_offset < reader.data_offset:
                raise ValueError(f"{short_repr(x.name)} is at byte {x.data_offset}, in the header")
            tensors[x.name] = Tensor(shape, x.tensor_type, x.data_offset, x.n_bytes)
        metadata = {key: _value(x) for key, x in reader.fields.items()}
    except EOFError:
        end = f"{file.stat().st_size:,}"
        raise UserError(f"{file} ends at byte {end}, before its contents do: {_AGAIN}") from None
    except KeyError as error:
        raise UserError(f"{file} has a key twice ({error.args[0]}): {_AGAIN}") from None
    except (ValueError, IndexError, OverflowError, RecursionError) as error:
        if "GGMLQuantizationType" in str(error):
            raise UserError(
                f"{file} has a quantisation that gguf does not know ({one_line(error)}): take "
                "another, such as Q8_0, Q4_K_M or F16"
            ) from None
        raise UserError(f"{file} is damaged ({one_line(error)}): {_AGAIN}") from None
    if not reader.reads:  # nothing was limited
        raise UserError("this version of gguf is not supported: run pip install gguf==0.19.0")
    return Header(file, metadata, tensors)


def _value(field: Any) -> Any:
    kinds = [kind.name for kind in field.types]
    if len(kinds) > 2:
        raise ValueError(f"{short_repr(field.name)} is a list of lists")
    if kinds[0] != "ARRAY" or kinds[-1] == "STRING":
        return field.contents()
    parts = [field.parts[i] for i in field.data]
    return np.concatenate(parts) if parts else np.zeros(0, int)


_directories = contextlib.ExitStack()
atexit.register(_directories.close)


def read_header(file: Path) -> Header:
    """The header of a GGUF file, without its tokenizer; a damaged one is a `UserError`."""
    status = file.stat()
    return _unpack(file.absolute(), status.st_mtime_ns, status.st_size)


@functools.cache
def _unpack(file: Path, _time: int, _size: int) -> Header:
    header, fault = _parse(file), None
    files = {"config.json": _config(header), **_settings(header)}
    try:
        files |= _vocabulary(header)
    except UserError as error:
        fault = error
    directory = _directories.enter_context(temporary_directory()) / file.name
    directory.mkdir()
    for name, content in files.items():
        if isinstance(content, bytes):
            (directory / name).write_bytes(content)
        else:
            write_json(directory / name, content)
    # Without hundreds of thousands of texts.
    rest = {key: x for key, x in header.metadata.items() if not key.startswith("tokenizer.")}
    return header._replace(metadata=rest, directory=directory, fault=fault)


def _settings(header: Header) -> dict[str, Any]:
    """The names and contents of the files beside a vocabulary."""
    tokens, kinds = _tokens(header)
    ends = [_id(header, name, None) for name in ("eos", "eot", "eom")]
    more = header.read("tokenizer.ggml.eos_token_ids", _WHOLES, np.zeros(0, int)).tolist()
    if not all(0 <= i < len(tokens) for i in more):
        raise header.wrong("tokenizer.ggml.eos_token_ids", "the ids of tokens")
    ends += more
    ends += [i for i, text in enumerate(tokens) if text in _TURN_ENDS and kinds[i] == _CONTROL]
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: _id(header, stored, None) for name, stored in names.items()}
    generation = {
        "bos_token_id": ids["bos"],
        "pad_token_id": ids["pad"],
        "eos_token_id": list(dict.fromkeys(i for i in ends if i is not None)),
    }
    byte_level = header.read("tokenizer.ggml.model", _WORDS, None) == "gpt2"
    gemma = header.metadata["general.architecture"].startswith("gemma")
    sentencepiece = "GemmaTokenizer" if gemma else "LlamaTokenizer"
    config = {
        **{f"{name}_token": tokens[i] for name, i in ids.items() if i is not None},
        "tokenizer_class": "PreTrainedTokenizerFast" if byte_level else sentencepiece,
        "add_bos_token": _adds("bos", header),
        "add_eos_token": _adds("eos", header),
        "legacy": False,
    }
    template = header.read("tokenizer.chat_template", _WORDS, None)
    return {
        GENERATION_FILE: generation,
        "tokenizer_config.json": config,
        **({} if template is None else {CHAT_TEMPLATE: template.encode()}),
    }


def _id(header: Header, name: str, *default: None) -> Any:
    key, tokens = f"tokenizer.ggml.{name}_token_id", header.metadata.get("tokenizer.ggml.tokens")
    found = header.read(key, _ID, *default)
    if found is not None and found >= len(tokens or ()):
        raise header.wrong(key, f"{_ID}, of which there are {len(tokens or ()):,}")
    return found


def _adds(name: str, header: Header) -> bool:
    """Whether a text gets a beginning ("bos") or an end ("eos")."""
    begins = header.read("tokenizer.ggml.model", _WORDS, None) != "gpt2"
    begins |= header.read("tokenizer.ggml.pre", _WORDS, None) in _LLAMA3_NAMES
    return header.read(f"tokenizer.ggml.add_{name}_token", _FLAG, begins and name == "bos")


def _tokens(header: Header) -> tuple[list[str], list[int]]:
    tokens, key = header.read("tokenizer.ggml.tokens", _TEXTS, []), "tokenizer.ggml.token_type"
    kinds = header.read(key, _WHOLES, np.full(len(tokens), _NORMAL)).tolist()
    if len(kinds) != len(tokens) or not set(kinds) <= set(range(_NORMAL, _BYTE + 1)):
        raise header.wrong(key, f"{len(tokens):,} whole numbers from {_NORMAL} to {_BYTE}")
    return tokens, kinds


def _vocabulary(header: Header) -> dict[str, Any]:
    """The name and content of the file of a vocabulary; none if there is none."""
    kind = header.read("tokenizer.ggml.model", _WORDS, None)
    if kind is None:
        return {}
    if kind not in ("gpt2", "llama"):
        raise UserError(
            f"{header.file}: tokenizer.ggml.model={kind!r} must be 'gpt2' or 'llama'; give "
            "tokenizer="
        )
    header.refuse_others("tokenizer.ggml.", _VOCABULARY, _NEUTRAL_OF_VOCABULARY, "give tokenizer=")
    if kind == "gpt2":
        return {"tokenizer.json": json.dumps(_tokenizer_json(header)).encode()}
    return {"tokenizer.model": _sentencepiece(header)}


def _config(header: Header) -> dict[str, Any]:
    if header.read("general.type", _WORDS, "model") != "model":
        raise header.wrong("general.type", "'model'")
    architecture = header.read("general.architecture", _WORDS)
    if architecture not in MODEL_TYPES:
        raise UserError(
            f"{header.file}: general.architecture={short_repr(architecture)} must be one of "
            f"{', '.join(MODEL_TYPES)}"
        )
    fields = _FIELDS | _OWN_FIELDS.get(architecture, {})
    known, remedy = {*fields, *_WIDTHS, *_SCALING}, "load the model that it was made of"
    for prefix in (architecture, "adapter", "clip", "diffusion", "xielu"):
        header.refuse_others(f"{prefix}.", known, _NEUTRAL, remedy)

    def read(name: str, wanted: str, *default: Any) -> Any:
        value = header.read(f"{architecture}.{name}", wanted, *default)
        # As it was written: 1e-05, not the nearest float32.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    values = {
        # A file without tensors has a tokenizer alone.
        field: read(name, wanted, *(default if header.tensors else (None,)))
        for name, (field, wanted, *default) in fields.items()
    }
    heads, width = values["num_attention_heads"], values["hidden_size"]
    share = width // heads if None not in (heads, width) else None
    head_dim = values["head_dim"] or share
    for name in _WIDTHS:
        if head_dim is not None and read(name, WHOLE, head_dim) != head_dim:
            raise header.wrong(f"{architecture}.{name}", f"{head_dim}, the width of a head")
    pattern = values.get("sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        kinds = ("full_attention", "sliding_attention")
        values["layer_types"] = [kinds[windowed] for windowed in pattern.tolist()]
        values["sliding_window_pattern"] = None
    if architecture in _OWN_FIELDS:
        # llama.cpp scales the queries of the 27B by the width of the text over the heads.
        large = (architecture, values["num_hidden_layers"]) in (("gemma2", 46), ("gemma3", 62))
        values["query_pre_attn_scalar"] = share if large else head_dim
    embedding = header.tensors.get("token_embd.weight")
    tokens = header.read("tokenizer.ggml.tokens", _TEXTS, [])
    values |= {
        "model_type": MODEL_TYPES[architecture],
        "vocab_size": embedding.shape[0] if embedding else len(tokens),
        "num_key_value_heads": values["num_key_value_heads"] or heads,
        "head_dim": head_dim,
        "rope_scaling": _rope_scaling(header, architecture, read),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    return {name: value for name, value in values.items() if value is not None}


def rope_divisors(header: Header) -> np.ndarray | None:
    """What the rotary frequencies of Llama 3.1 and later are divided by; None in other files."""
    stored = header.tensors.get(DIVISORS)
    if stored is None or header.metadata["general.architecture"] != "llama":
        return None
    if stored.kind.name != "F32" or len(stored.shape) > 1 or stored.size > 2**20:
        raise UserError(
            f"{header.file}: {DIVISORS} must be float32, one for each of a head's frequencies"
        )
    return np.fromfile(header.file, "<f4", stored.shape[0], offset=stored.start)


def _rope_scaling(header: Header, architecture: str, read: Any) -> dict[str, Any] | None:
    kind = read("rope.scaling.type", _WORDS, "linear")  # as in llama.cpp
    factor = read("rope.scaling.factor", _NUMBER, read("rope.scale_linear", _NUMBER, None))
    divisors, only = rope_divisors(header), "linear" if architecture == "gemma3" else "yarn"
    if kind != "none" and (kind, factor) not in (("linear", None), ("linear", 1.0)):
        if kind != only or divisors is not None:
            keys = [x for name in _SCALING if (x := f"{architecture}.{name}") in header.metadata]
            raise UserError(
                f"{header.file}: "
                f"{', '.join(f'{x}={short_repr(header.metadata[x])}' for x in keys)}: "
                f"of stretched positions only those of type {only!r} are read, without {DIVISORS}"
            )
        if kind == "linear":
            return {"rope_type": kind, "factor": factor}
        length = read("context_length", WHOLE, None)
        return {
            "rope_type": kind,
            "factor": read("rope.scaling.factor", _NUMBER),
            "original_max_position_embeddings": read(
                "rope.scaling.original_context_length", WHOLE, length
            ),
            "beta_fast": read("rope.scaling.yarn_beta_fast", _NUMBER, 32.0),
            "beta_slow": read("rope.scaling.yarn_beta_slow", _NUMBER, 1.0),
        }
    if divisors is None:
        return None
    # Llama 3.1 and later store what each frequency is divided by, which follows from the largest.
    return {
        "rope_type": "llama3",
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "factor": float(divisors.max(initial=1.0)),
    }


def _split(regex: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, {**_BYTES, "use_regex": False}]}


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


def _tokenizer_json(header: Header) -> dict[str, Any]:
    """The `tokenizer.json` of a byte-level vocabulary."""
    named = header.read("tokenizer.ggml.pre", _WORDS, None)
    if named not in _STEPS:
        raise UserError(
            f"{header.file}: tokenizer.ggml.pre={short_repr(named)} must be one of "
            f"{', '.join(_STEPS)}; give tokenizer="
        )
    if header.read("tokenizer.ggml.add_space_prefix", _FLAG, False):
        raise header.wrong("tokenizer.ggml.add_space_prefix", "false for this vocabulary")
    normalizer, pre_tokenizer = _STEPS[named]
    tokens, kinds = _tokens(header)
    vocabulary = {text: i for i, text in enumerate(tokens) if kinds[i] != _UNUSED}
    merges = [merge.split(" ", 1) for merge in header.read("tokenizer.ggml.merges", _TEXTS)]
    if not all(len(pair) == 2 and "".join(pair) in vocabulary for pair in merges):
        raise header.wrong("tokenizer.ggml.merges", "pairs of texts that join to a token")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": i, "content": tokens[i], "special": kind != _USER_DEFINED, **flags}
        for i, kind in enumerate(kinds)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    around = {name: _id(header, name) for name in ("bos", "eos") if _adds(name, header)}
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
        # A word that is a token is taken whole by Llama 3's.
        "model": {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": merges,
            "ignore_merges": named in _LLAMA3_NAMES,
        },
    }


def _sentencepiece(header: Header) -> bytes:
    """The SentencePiece model of a vocabulary."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec

    tokens, kinds = _tokens(header)
    scores = header.read("tokenizer.ggml.scores", _NUMBERS)
    if len(scores) != len(tokens):
        raise header.wrong("tokenizer.ggml.scores", f"{len(tokens):,} numbers")
    ids = [_id(header, name, None) for name in ("unknown", "bos", "eos", "padding")]
    unknown, *others = (-1 if i is None else i for i in ids)
    if unknown < 0 and _UNKNOWN in kinds:
        unknown = kinds.index(_UNKNOWN)
    # The converter calls it a control token where tokenizer_config.json lists it, as in Gemma 3.
    if unknown < 0 or kinds[unknown] not in (_UNKNOWN, _CONTROL):
        raise header.wrong(
            "tokenizer.ggml.unknown_token_id",
            f"the id of a token of type {_UNKNOWN} or {_CONTROL}",
        )
    kinds[unknown] = _UNKNOWN
    model = ModelProto()
    size = max(i for i, kind in enumerate(kinds) if kind != _UNUSED) + 1
    for text, score, kind in zip(tokens[:size], scores, kinds, strict=False):
        # The converter writes the spaces of user-defined tokens.
        model.pieces.add(piece=text.replace(" ", "\u2581"), score=score, type=kind)
    spec = model.trainer_spec
    spec.model_type, spec.byte_fallback, spec.unk_id = TrainerSpec.BPE, True, unknown
    spec.bos_id, spec.eos_id, spec.pad_id = others
    space = header.read("tokenizer.ggml.add_space_prefix", _FLAG, True)
    model.normalizer_spec.name, model.normalizer_spec.add_dummy_prefix = "identity", space
    model.normalizer_spec.remove_extra_whitespaces = False
    return model.SerializeToString()
