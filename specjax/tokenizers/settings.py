"""What the files around a vocabulary say about it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.tokenizers.chat_template import read_chat_template
from specjax.tokenizers.model_files import SPECJAX_FILE, SpecialIds, read_json_if_there, special_ids
from specjax.tokenizers.tokenizer import Tokenizer

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


class TokenizerSettings:
    """What the files around a vocabulary say."""

    def __init__(self, directory: Path | None) -> None:
        self.files = {
            name: values
            for name in _FILES
            if directory is not None and (values := read_json_if_there(directory / name))
        }
        if directory is not None:
            _check_types(directory, self.files)
        self.directory = directory
        self.config = self.files.get("tokenizer_config.json", {})
        self.ids = SpecialIds() if directory is None else special_ids(directory)
        self.chat_template = None if directory is None else read_chat_template(directory)

    @property
    def rows(self) -> int:
        """Of the model's embedding; 0 where no file says."""
        ours = self.files.get(SPECJAX_FILE, {}).get("config")
        for values in (self.files.get("config.json", {}), ours):
            rows = values.get("vocab_size") if isinstance(values, dict) else None
            if isinstance(rows, int):
                return rows
        return 0

    @property
    def is_t5(self) -> bool | None:
        """Whether the model, else the tokenizer's class, is T5's; None where no file says."""
        kind = self.files.get("config.json", {}).get("model_type")
        kind = kind or (self.files.get(SPECJAX_FILE, {}).get("config") or {}).get("family")
        kind = kind or self.config.get("tokenizer_class")
        return str(kind).lower().startswith("t5") if kind else None

    def text(self, name: str) -> str | None:
        """A special token's text, under `bos_token` and the like."""
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            value = self.files.get(file, {}).get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                return value
        return None

    def named_special(self) -> dict[str, dict[str, bool]]:
        """The texts named as special tokens, each with its flags (`lstrip` and the like)."""
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
        """A special token's id: the named text's, else the default (negative for none)."""
        found = vocabulary.get(self.text(name) or "")
        if found is None and default >= 0:
            found = default
        if found is None:
            named = {"eos_token": self.ids.eos, "bos_token": (self.ids.bos,)}.get(name) or (None,)
            found = named[0]
        return found

    def eos_and_pad(
        self, eos: int | None, pad: int | None, file: Path
    ) -> tuple[tuple[int, ...], int]:
        """The generation's eos ids and the pad id, of the model's files before the tokenizer's."""
        ends = self.ids.eos or (() if eos is None else (eos,))
        if not ends:
            raise ValueError(
                f"{file} names no end-of-sequence token; put eos_token_id into "
                "generation_config.json beside it"
            )
        pad = self.ids.pad if self.ids.pad is not None else pad
        return ends, ends[0] if pad is None else pad

    def flag(self, name: str, default: bool) -> bool:
        """A boolean of tokenizer_config.json."""
        value = self.config.get(name)
        return default if value is None else bool(value)

    def texts(self, tokenizer: Tokenizer, eos: int | None, unknown: int) -> dict[str, str]:
        """The special tokens' texts, for chat templates."""
        ids = {"bos": tokenizer.bos_id, "eos": eos, "pad": tokenizer.pad_id, "unk": unknown}
        found = {}
        for name, token_id in ids.items():
            text = self.text(f"{name}_token")
            if text is None and token_id is not None and token_id >= 0:
                text = tokenizer.token(token_id)
            if text is not None:
                found[f"{name}_token"] = text
        return found


def added_tokens(
    settings: TokenizerSettings, size: int, is_t5: bool
) -> dict[str, tuple[int, bool | None]]:
    """Texts that a directory adds to a SentencePiece model.

    Args:
      settings: of the directory.
      size: pieces of the model.
      is_t5: whether sentinels follow the pieces where no file lists them.

    Returns:
      By text, the id and whether the token is special; None where the file does not say.
    """
    added: dict[str, tuple[int, bool | None]] = {}
    # transformers 5 names them there alone.
    for entry in _listed_tokens(settings.directory):
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


def _listed_tokens(directory: Path | None) -> list[dict[str, Any]]:
    """What a `tokenizer.json` lists as added."""
    if directory is None:
        return []
    file = directory / "tokenizer.json"
    listed = read_json_if_there(file).get("added_tokens") or []
    if not isinstance(listed, list) or not all(
        isinstance(entry, dict)
        and isinstance(entry.get("content"), str)
        and _is_id(entry.get("id"))
        for entry in listed
    ):
        raise ValueError(
            f"{file}: added_tokens must be a list of objects with content and id; restore the file"
        )
    return listed


def _check_types(directory: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Asserts that the values that are read here have the types that they must have."""

    def check(name: str, key: str, wanted: str, good: bool, value: Any) -> None:
        if not good:
            shown = repr(value)[:60]
            raise ValueError(
                f"{directory / name}: {key}={shown} must be {wanted}; restore the file"
            )

    settings = files.get("tokenizer_config.json", {})
    if (value := settings.get("extra_ids")) is not None:
        good = _is_id(value) and value <= _MOST_SENTINELS
        check("tokenizer_config.json", "extra_ids", f"in 0 .. {_MOST_SENTINELS}", good, value)
    if (value := settings.get("added_tokens_decoder")) is not None:
        good = isinstance(value, dict) and all(
            _is_id(_whole(key))
            and isinstance(entry, dict)
            and isinstance(entry.get("content"), str)
            for key, entry in value.items()
        )
        wanted = "an object from ids to objects with content"
        check("tokenizer_config.json", "added_tokens_decoder", wanted, good, value)
    for text, value in files.get("added_tokens.json", {}).items():
        check("added_tokens.json", text, "an id", _is_id(value), value)
    if (value := files.get(SPECJAX_FILE, {}).get("config")) is not None:
        check(SPECJAX_FILE, "config", "an object", isinstance(value, dict), value)
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            value = files.get(name, {}).get(key)
            check(name, key, "a list or an object", isinstance(value, list | dict | None), value)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _whole(text: str) -> int | None:
    """The number that a key spells; None for other keys, and beyond all ids."""
    return int(text) if text.isdecimal() and len(text) <= 10 else None


def implied_sentinels(rows: int, size: int) -> int:
    """How many sentinels T5 has after `size` pieces, in reverse, where no file lists them.

    transformers adds them unasked, here only where the model's embedding has rows for them.
    """
    return 100 if rows >= size + 100 else 0
