"""What transformers 5 does with the files of a tokenizer, which depends on its class.

Most classes read `tokenizer.json` as it is. The others take only its vocabulary, its post-processor
and its added tokens, and build the rest themselves.
"""

import json
from collections.abc import Mapping
from typing import Any

from specjax.errors import UserError
from specjax.tokenizers.model_files import no_panic
from specjax.tokenizers.tokenizer_config import TokenizerSettings

# The class that reads `tokenizer.json` as it is, and other names that lead to it.
PLAIN = "TokenizersBackend"
_PLAIN = (PLAIN, "PythonBackend", "PreTrainedTokenizer", "MistralCommonBackend")
# The class of a model type, which has priority over the class that the files name if it is PLAIN.
_OF_TYPES = {
    **dict.fromkeys(("t5", "mt5"), "T5Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text", "t5gemma"), "GemmaTokenizer"),
    **dict.fromkeys(("qwen2", "qwen3"), "Qwen2Tokenizer"),
    **dict.fromkeys(("umt5", "olmo2", "phi3", "mistral"), PLAIN),
}
# Model types whose published files name a wrong class.
_WRONG_CLASS = ("qwen2", "phi3")
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MARK = {"type": "Metaspace", "replacement": "▁"}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False}
# By class: the special tokens that it has without any file, and its own steps before the model.
_SPECIAL: dict[str, dict[str, str]] = {
    "LlamaTokenizer": {"bos": "<s>", "eos": "</s>", "unk": "<unk>"},
    "GemmaTokenizer": {name: f"<{name}>" for name in ("bos", "eos", "unk", "pad", "mask")},
    "Qwen2Tokenizer": dict.fromkeys(("unk", "eos", "pad"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("unk", "bos", "eos"), "<|endoftext|>"),
    "GPTNeoXTokenizer": {
        **dict.fromkeys(("unk", "bos", "eos"), "<|endoftext|>"),
        "pad": "<|padding|>",
    },
    "T5Tokenizer": {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"},
}
_STEPS: dict[str, tuple[Any, Any]] = {
    "LlamaTokenizer": (None, {**_MARK, "split": False}),
    "GemmaTokenizer": (
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"},
    ),
    "Qwen2Tokenizer": (
        {"type": "NFC"},
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated"},
                {**_BYTES, "use_regex": False},
            ],
        },
    ),
    "GPT2Tokenizer": (None, {**_BYTES, "use_regex": True}),
    "GPTNeoXTokenizer": ({"type": "NFC"}, {**_BYTES, "use_regex": True}),
    "T5Tokenizer": (
        None,
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "WhitespaceSplit"},
                {**_MARK, "prepend_scheme": "always", "split": True},
            ],
        },
    ),
}


def class_of(settings: TokenizerSettings) -> str:
    """The name of the class with which transformers 5 reads a directory, without "Fast"."""
    config = settings.files.get("config.json", {})
    kind = str(config.get("model_type") or "")
    stated = settings.config.get("tokenizer_class") or config.get("tokenizer_class")
    named = str(stated or "").removesuffix("Fast")
    usual = _OF_TYPES.get(kind)
    if not named:
        return usual or PLAIN
    if named == "LlamaTokenizer" and kind not in (*_WRONG_CLASS, "mistral"):
        file = None if settings.directory is None else settings.directory / "tokenizer.json"
        if file is not None and file.is_file() and b'"ByteLevel"' in file.read_bytes():
            return PLAIN
    if usual not in (None, named):
        if usual == PLAIN:
            return PLAIN
        named = str(usual) if kind in _WRONG_CLASS else named
    return PLAIN if named in _PLAIN else named


def special_texts(settings: TokenizerSettings, name: str) -> dict[str, str]:
    """The special tokens that a chat template gets from a class and a directory's files."""
    texts: dict[str, Any] = {f"{n}_token": text for n, text in _SPECIAL.get(name, {}).items()}
    files = [settings.config]
    if "added_tokens_decoder" not in settings.config:
        files.append(settings.files.get("special_tokens_map.json", {}))
    for values in files:
        more = values.get("extra_special_tokens")
        named = {**values, **(more if isinstance(more, dict) else {})}
        texts |= {key: value for key, value in named.items() if key.endswith("_token")}
    contents = {key: v.get("content") if isinstance(v, dict) else v for key, v in texts.items()}
    return {key: text for key, text in contents.items() if isinstance(text, str)}


def around_texts(
    settings: TokenizerSettings, name: str, processor: Any, vocabulary: Mapping[str, int]
) -> tuple[list[int], list[int]]:
    """The ids before and after a text, by a class and the post-processor of `tokenizer.json`.

    The flags `add_bos_token` and `add_eos_token` have no effect beside a `tokenizer.json`.
    """
    if name == "T5Tokenizer":
        ends = vocabulary.get(settings.text("eos_token") or "</s>")
        return [], [] if ends is None else [ends]
    if name == "GPTNeoXTokenizer" or processor is None:
        return [], []
    import tokenizers

    text = 2**32 - 1
    model = {"type": "WordLevel", "vocab": {"x": text}, "unk_token": "x"}
    parts = {"version": "1.0", "added_tokens": [], "post_processor": processor, "model": model}
    file = f"{settings.directory}/tokenizer.json"
    with no_panic(f"{file}: its post_processor cannot be used"):
        try:
            ids = tokenizers.Tokenizer.from_str(json.dumps(parts)).encode("x").ids
        except Exception as error:  # the package raises plain Exceptions
            raise UserError(f"{file}: its post_processor is wrong ({error})") from None
    if ids.count(text) != 1:
        raise UserError(f"{file}: its post_processor must write a text once, and no other")
    place = ids.index(text)
    return ids[:place], ids[place + 1 :]


def differences(name: str, normalizer: Any, pre_tokenizer: Any) -> str | None:
    """How the ids of transformers 5, of this class, differ from `tokenizer.json`'s own, or None."""
    if name == PLAIN:
        return None
    if name not in _STEPS:
        return f"transformers 5 reads it by {name}, which may change its ids"
    normal, split = _STEPS[name]
    if name == "T5Tokenizer" and (normalizer or {}).get("type") == "Precompiled":
        normalizer = None  # is kept
    parts = [
        what
        for what, ours, theirs in (
            ("normalizer", normalizer, normal),
            ("pre-tokenizer", pre_tokenizer, split),
        )
        if not _covers(ours, theirs)
    ]
    if not parts:
        return None
    return f"transformers 5 reads it by {name}, which replaces its {' and '.join(parts)}"


# Whether a step of `tokenizer.json` has all fields of a pattern.
def _covers(step: Any, pattern: Any) -> bool:
    if isinstance(pattern, Mapping):
        return isinstance(step, Mapping) and all(
            _covers(step.get(k), v) for k, v in pattern.items()
        )
    if isinstance(pattern, list):
        same = isinstance(step, list) and len(step) == len(pattern)
        return same and all(map(_covers, step, pattern))
    return step == pattern
