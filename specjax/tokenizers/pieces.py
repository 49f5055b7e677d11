"""The text of each token of a `tokenizer.json`, from its decoder."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.errors import UserError
from specjax.tokenizers.tokenizer import Pieces

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def pieces_of(decoder: Mapping[str, Any] | None, tokens: Sequence[str | None]) -> Pieces:
    """The text that each token adds.

    Args:
      decoder: the field "decoder" of a `tokenizer.json`.
      tokens: the vocabulary by id; None for tokens that are left out of texts.

    Returns:
      Their bytes.
    """
    whole: Any = {"type": "none"} if decoder is None else decoder
    steps = whole["decoders"] if whole["type"] == "Sequence" else [whole]
    first: list[Any] = list(tokens)
    later: list[Any] = list(tokens)
    drops_space = False
    for place, step in enumerate(steps):
        kind = step["type"]
        if kind == "Replace" and "String" in step["pattern"]:
            change = _replacing(step["pattern"]["String"], step["content"])
            first, later = _each(first, change), _each(later, change)
        elif kind == "Metaspace":
            mark = step["replacement"]
            later = _each(later, _replacing(mark, " "))
            # The first token loses all marks.
            rest = " " if step.get("prepend_scheme") == "never" else ""
            first = _each(first, _replacing(mark, rest))
        elif kind == "ByteFallback":
            first, later = _each(first, _byte), _each(later, _byte)
        elif kind == "ByteLevel":
            first, later = _each(first, _byte_level), _each(later, _byte_level)
        elif kind == "Strip" and _is_first_space(step) and _fused(steps[:place]):
            drops_space |= step["start"] == 1
        elif kind != "Fuse":
            raise UserError(
                f"the tokenizer's decoder ({kind}) does not join the texts of single tokens, so "
                "texts cannot be read token by token: cut the texts yourself"
            )
    begins, goes_on = [_bytes(text) for text in first], [_bytes(text) for text in later]
    if drops_space:
        begins = [text.removeprefix(b" ") for text in begins]
    return Pieces(begins, goes_on)


def _each(texts: list[Any], change: Any) -> list[Any]:
    return [change(text) if isinstance(text, str) else text for text in texts]


def _replacing(old: str, new: str) -> Any:
    return lambda text: text.replace(old, new)


def _byte(text: str) -> str | bytes:
    found = _BYTE.fullmatch(text)
    return bytes.fromhex(found[1]) if found else text


def _byte_level(text: str) -> bytes:
    if all(character in _BYTES for character in text):
        return bytes(_BYTES[character] for character in text)
    return text.encode()


def _bytes(text: Any) -> bytes:
    return text if isinstance(text, bytes) else (text or "").encode()


def _is_first_space(step: Mapping[str, Any]) -> bool:
    return step["content"] == " " and step["start"] in (0, 1) and step["stop"] == 0


def _fused(steps: Sequence[Mapping[str, Any]]) -> bool:
    return any(step["type"] == "Fuse" for step in steps)


def _byte_characters() -> dict[str, int]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    shifted = {chr(256 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in plain} | shifted


_BYTES = _byte_characters()
