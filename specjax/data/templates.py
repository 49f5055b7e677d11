"""Texts with fields: "Question: {question}"."""

import dataclasses
import difflib
import re
from collections.abc import Mapping
from typing import Any

from specjax.errors import UserError

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


@dataclasses.dataclass(frozen=True)
class Template:
    """A text with fields of a record.

    `{question}` is the value of this key; `{answers.text.0}` uses the keys of objects and the
    places in lists; `{answers.0|none}` is "none" if the value is absent or null. A list of texts is
    joined by line breaks. `{{` and `}}` are braces.
    """

    source: str

    def __post_init__(self) -> None:
        if not isinstance(self.source, str):
            raise UserError(
                f"a template must be a text such as 'Question: {{question}}', got {self.source!r}"
            )
        for match in _PART.finditer(self.source):
            if match[0] in ("{", "}"):
                raise UserError(
                    f"the template {self.source!r} has an unpaired {match[0]!r} at character "
                    f"{match.start() + 1}: write {match[0] * 2!r} for a brace"
                )
            if match[1] is not None and not all(match[1].partition("|")[0].split(".")):
                raise UserError(
                    f"the template {self.source!r} has a field without a name, {match[0]!r}: write "
                    "a field as {name}"
                )

    @property
    def fields(self) -> tuple[str, ...]:
        """The keys that the template reads, each once."""
        names = (match[1] for match in _PART.finditer(self.source) if match[1] is not None)
        return tuple(dict.fromkeys(re.split(r"[.|]", name)[0] for name in names))

    def fill(self, record: Mapping[str, Any], where: str) -> str:
        """Fills in the record's values."""

        def put(match: re.Match[str]) -> str:
            if match[1] is None:
                return match[0][0]
            value = look_up(record, match[1], where)
            return "\n".join(value) if isinstance(value, tuple) else value

        return _PART.sub(put, self.source)


def look_up(record: Mapping[str, Any], field: str, where: str) -> str | tuple[str, ...]:
    """Returns the text, or the texts of a list, in a field; see `Template`."""
    path, bar, default = field.partition("|")
    value: Any = record
    for i, name in enumerate([path] if path in record else path.split(".")):
        inner = _inner(value, name)
        if inner is None:
            if bar:
                return default
            outer = ".".join(path.split(".")[:i]) or "the record"
            keys = value if isinstance(value, Mapping) else ()
            near = difflib.get_close_matches(name, keys, n=1)
            raise UserError(
                f"{where}: there is no field {path!r}: {outer} {_contents(value)}; "
                + (f"did you mean {near[0]}?" if near else f"write {path}|text for a default")
            )
        value = inner
    if isinstance(value, list | tuple):
        return tuple(_text(item, path, where) for item in value)
    return _text(value, path, where)


def _inner(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(name)
    if isinstance(value, list | tuple) and name.isdecimal():
        return value[int(name)] if int(name) < len(value) else None
    return None


def _contents(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"has {', '.join(map(repr, value)) or 'nothing'}"
    if isinstance(value, list | tuple):
        return f"is a list of {len(value)}, counted from 0"
    return f"is {value!r}"[:60]


def _text(value: Any, path: str, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise UserError(
        f"{where}: {path!r} must be a text, a number or a list of these, got {str(value)[:40]!r}"
    )
