"""Settings in the files beside a vocabulary."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specjax.checks import short_repr
from specjax.errors import UserError
from specjax.tokenizers.chat_template import read_chat_template
from specjax.tokenizers.model_files import SPECJAX_FILE, SpecialIds, read_json_if_there, special_ids

_FILES = (
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "config.json",
    SPECJAX_FILE,
)

_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_MOST_SENTINELS = 10_000  # T5 has 100, ByT5 125
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_entry(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("content"), str)


def _is_decoder(value: Any) -> bool:
    # Longer keys are not ids, and more than 5000 digits cannot be read.
    return isinstance(value, dict) and all(
        key.isdecimal() and len(key) <= 10 and _is_id(int(key)) and _is_entry(entry)
        for key, entry in value.items()
    )


def _is_listed(value: Any) -> bool:
    return isinstance(value, list) and all(_is_entry(e) and _is_id(e.get("id")) for e in value)


_SENTINELS = (lambda v: _is_id(v) and v <= _MOST_SENTINELS, f"in 0 .. {_MOST_SENTINELS}")
_MORE = (lambda v: isinstance(v, list | dict), "a list or an object")
# By file and field: a test of values, and its description.
_TYPES: dict[str, dict[str, tuple[Callable[[Any], bool], str]]] = {
    "tokenizer_config.json": {
        "extra_ids": _SENTINELS,
        "added_tokens_decoder": (_is_decoder, "an object from ids to objects with content"),
        "additional_special_tokens": _MORE,
        "extra_special_tokens": _MORE,
    },
    "special_tokens_map.json": {
        "additional_special_tokens": _MORE,
        "extra_special_tokens": _MORE,
    },
    "tokenizer.json": {"added_tokens": (_is_listed, "a list of objects with content and id")},
    SPECJAX_FILE: {"config": (lambda v: isinstance(v, dict), "an object")},
}


def _check_types(path: str, name: str, values: Mapping[str, Any]) -> None:
    wanted = _TYPES.get(name, {})
    if name == "added_tokens.json":
        wanted = dict.fromkeys(values, (_is_id, "an id"))
    for key, (good, what) in wanted.items():
        value = values.get(key)
        absent = value is None and name != "added_tokens.json"
        if not absent and not good(value):
            raise UserError(f"{path}: {key}={short_repr(value)} must be {what}; restore the file")


class TokenizerSettings:
    """The settings of a directory; their types are checked here, once."""

    def __init__(self, directory: Path | None) -> None:
        self.files = {
            name: values
            for name in _FILES
            if directory is not None and (values := read_json_if_there(directory / name))
        }
        for name, values in self.files.items():
            _check_types(f"{directory}/{name}", name, values)
        self.directory = directory
        self.config = self.files.get("tokenizer_config.json", {})
        self.ids = SpecialIds() if directory is None else special_ids(directory)
        self.chat_template = None if directory is None else read_chat_template(directory)

    @functools.cached_property
    def tokenizer_json(self) -> dict[str, Any]:
        """The content of tokenizer.json; empty if there is none."""
        if self.directory is None:
            return {}
        file = self.directory / "tokenizer.json"
        content = read_json_if_there(file)
        _check_types(str(file), file.name, content)
        return content

    @property
    def rows(self) -> int:
        """The rows of the model's embedding; 0 if no file names them."""
        ours = self.files.get(SPECJAX_FILE, {}).get("config")
        for values in (self.files.get("config.json", {}), ours):
            rows = values.get("vocab_size") if isinstance(values, dict) else None
            if isinstance(rows, int):
                return rows
        return 0

    @property
    def is_t5(self) -> bool | None:
        """Whether the model, else the tokenizer's class, is T5's; None if unknown.

        Pile-T5 is a UMT5 with Llama's tokenizer.
        """
        kind = self.files.get("config.json", {}).get("model_type")
        kind = kind or (self.files.get(SPECJAX_FILE, {}).get("config") or {}).get("family")
        named = str(self.config.get("tokenizer_class") or "").lower()
        if not kind:
            return named.startswith(("t5tokenizer", "mt5tokenizer")) if named else None
        return str(kind).lower() in ("t5", "mt5", "umt5") and not named.startswith("llama")

    def text(self, name: str) -> str | None:
        """A special token's text, under `bos_token` and the like."""
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            value = self.files.get(file, {}).get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                return value
        return None

    def named_special(self) -> dict[str, dict[str, bool]]:
        """The texts declared as special tokens, each with its flags (`lstrip` and others)."""
        named: dict[str, dict[str, bool]] = {}
        for file in ("special_tokens_map.json", "tokenizer_config.json"):
            values = self.files.get(file, {})
            entries = [values.get(f"{name}_token") for name in _SPECIAL]
            for name in ("additional_special_tokens", "extra_special_tokens"):
                more = values.get(name) or []
                entries += list(more.values()) if isinstance(more, dict) else list(more)
            for entry in entries:
                flags = entry if isinstance(entry, dict) else {"content": entry}
                if isinstance(text := flags.get("content"), str) and text:
                    named[text] = {name: bool(flags[name]) for name in _FLAGS if name in flags}
        return named

    def id_of(self, name: str, vocabulary: Mapping[str, int], default: int) -> int | None:
        """A special token's id: that of the declared text, else the default (negative for none)."""
        if (token_id := vocabulary.get(self.text(name) or "")) is not None:
            return token_id
        if default >= 0:
            return default
        return ({"eos_token": self.ids.eos, "bos_token": (self.ids.bos,)}.get(name) or (None,))[0]

    def eos_and_pad(
        self, eos: int | None, pad: int | None, file: Path
    ) -> tuple[tuple[int, ...], int]:
        """The eos ids and the pad id; the model's files have priority over the tokenizer's."""
        ends = self.ids.eos or (() if eos is None else (eos,))
        if not ends:
            raise UserError(
                f"{file} has no end-of-sequence token; put eos_token_id into "
                "generation_config.json beside it"
            )
        pad = self.ids.pad if self.ids.pad is not None else pad
        return ends, ends[0] if pad is None else pad

    def flag(self, name: str, default: bool) -> bool:
        """A boolean of tokenizer_config.json."""
        value = self.config.get(name)
        return default if value is None else bool(value)


def added_tokens(
    settings: TokenizerSettings, size: int, is_t5: bool
) -> dict[str, tuple[int, bool | None]]:
    """Texts that a directory adds to a SentencePiece model of `size` pieces.

    By text, the id and whether the token is special; None if the file has no flag. In a T5,
    sentinels follow the pieces if no file lists them.
    """
    added: dict[str, tuple[int, bool | None]] = {}
    # transformers 5 lists them only there.
    for entry in settings.tokenizer_json.get("added_tokens") or []:
        added[entry["content"]] = (int(entry["id"]), bool(entry.get("special")))
    for text, token_id in settings.files.get("added_tokens.json", {}).items():
        added.setdefault(text, (int(token_id), None))
    for token_id, entry in (settings.config.get("added_tokens_decoder") or {}).items():
        added[entry["content"]] = (int(token_id), bool(entry.get("special")))
    if is_t5 and not any(text.startswith("<extra_id_") for text in added):
        count = settings.config.get("extra_ids")
        count = implied_sentinels(settings.rows, size) if count is None else count
        for i in range(count):
            added[f"<extra_id_{i}>"] = (size + count - 1 - i, True)
    return added


def implied_sentinels(rows: int, size: int) -> int:
    """The number of T5's sentinels after `size` pieces, in reverse order, if no file lists them.

    transformers always adds them; here only if the model's embedding has rows for them.
    """
    return 100 if rows >= size + 100 else 0
