"""JSON schemas in the plain form that outlines-core follows exactly.

A plain schema has no references, lists of types or formats, its patterns are expressions for the
whole text, and its size is known before it becomes an expression.
"""

import json
import re
import urllib.parse
from collections.abc import Sequence
from typing import Any, NamedTuple

from specjax.checks import require
from specjax.errors import UserError
from specjax.processors.byte_automata import byte_automaton, shortened
from specjax.processors.schema_keywords import (
    FORMATS,
    TYPES,
    SchemaError,
    deciding_keyword,
    of_type,
    refuse,
    shown,
)

MOST_LEVELS = 48
MOST_PARTS = 20_000
MOST_CHARACTERS = 1 << 20
# How often schemas may contain themselves.
_AGAIN = 4
# Characters that JSON escapes in a string, as bytes.
_ESCAPED = [*range(0x20), ord('"'), ord("\\")]


def plain_schema(root: Any, space: str) -> dict[str, Any]:
    """Rewrites a schema for outlines-core.

    Args:
      root: what `json.loads` gives.
      space: the regular expression between the parts of JSON.

    Raises:
      SchemaError: the schema is not supported, or its expression would be too large.
    """
    reader = _SchemaReader(root, len(space))
    found = reader.read(root, _Path("", 0, ("#",)))
    if found is None:
        refuse(reader.endless, "needs itself in every text, so no text ends: make it optional")
    return found.schema


def without_anchors(pattern: str, name: str) -> str:
    """An expression of the same texts that may be part of another expression.

    Raises:
      ValueError: the expression is not supported; `name` is what the error calls it.
    """
    if re.match(r"\(\?[a-zA-Z]+\)", pattern):
        raise UserError(f"{name} begins with flags, which are not supported here: leave them out")
    byte_automaton(pattern, ascii_only=True, name=name)
    # What it compiles has anchors only where they change nothing. Names of groups may be once.
    parts = re.compile(r"\\[AZ]|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?#[^)]*\)|[\^$]|\(\?P<\w+>", re.S)

    def part(found: re.Match[str]) -> str:
        text = found[0]
        if text in (r"\A", r"\Z", "^", "$") or text.startswith("(?#"):
            return ""
        return "(?:" if text.startswith("(?P<") else text

    return f"(?:{parts.sub(part, pattern)})"


class _Plain(NamedTuple):
    schema: dict[str, Any]
    size: int  # its expression has at most so many characters


class _Path(NamedTuple):
    where: str
    level: int
    followed: tuple[str, ...]  # the references that led here

    def below(self, name: str) -> "_Path":
        return self._replace(where=self.where + name, level=self.level + 1)


class _SchemaReader:
    """Reads the parts of a schema.

    Attributes:
      gap: characters of the expression between the parts of JSON.
      parts: how many were read; each reference counts again.
      endless: where a reference was first not followed, as its schema contains itself too often.
    """

    def __init__(self, root: Any, gap: int) -> None:
        self.root, self.gap = root, gap
        self.parts, self.endless = 0, ""

    def read(self, schema: Any, place: _Path) -> _Plain | None:
        """The plain form, or None if no text of the schema ends."""
        self.parts += 1
        if self.parts > MOST_PARTS:
            refuse(
                place.where,
                f"is part {self.parts} of the schema, and {MOST_PARTS} are allowed (a part counts "
                "for each reference to it): use fewer references",
            )
        if place.level > MOST_LEVELS:
            refuse(place.where, f"is {place.level} levels deep, and {MOST_LEVELS} are allowed")
        kind = deciding_keyword(schema, place.where)
        found = getattr(self, f"_{_METHODS.get(kind, 'simple')}")(schema, place, kind)
        if found is not None and found.size > MOST_CHARACTERS:
            refuse(
                place.where,
                f"becomes an expression of up to {found.size} characters, and {MOST_CHARACTERS} "
                "are allowed: use fewer nested arrays, optional properties or values",
            )
        return found

    def _simple(self, schema: dict[str, Any], place: _Path, kind: str) -> _Plain:
        """A type without parts, or any JSON."""
        if kind == "any":
            # In a list, as outlines-core makes alternatives without parentheses of it.
            return _Plain({"anyOf": [{}]}, 13_000 + 232 * self.gap)
        lengths: dict[str, Any] = {
            key: schema[key] for key in ("minLength", "maxLength") if key in schema
        }
        size = _SIZES[kind] + sum(len(str(x)) + 5 for x in lengths.values())
        return _Plain({"type": kind, **lengths}, size)

    def _text(self, schema: dict[str, Any], place: _Path, kind: str) -> _Plain:
        """A string of a pattern or format."""
        if kind == "format":
            pattern = f"(?:{FORMATS[schema['format']]})"
        else:
            name = f"{place.where}.pattern {shortened(repr(schema['pattern']))}"
            try:
                pattern = without_anchors(schema["pattern"], name)
                steps = byte_automaton(pattern, ascii_only=True, name=name).steps
            except ValueError as error:
                raise SchemaError(str(error)) from None
            if (steps[:, _ESCAPED] >= 0).any():
                refuse(
                    name,
                    "allows a quote, a backslash or a control character: leave them out, as in "
                    r'[^"\\\x00-\x1f]',
                )
        return _Plain({"type": "string", "pattern": pattern}, len(pattern) + 10)

    def _values(self, schema: dict[str, Any], place: _Path, kind: str) -> _Plain:
        """An enum or a const."""
        values = schema["enum"] if kind == "enum" else [schema["const"]]
        given = schema.get("type", list(TYPES))
        types = given if isinstance(given, list) else [given]
        for value in values:
            if not any(TYPES[each](value) for each in types):
                refuse(f"{place.where}.{kind}", f"has {shown(value)}, which is not of type {given}")
            _check_value(value, f"{place.where}.{kind}", 0)
        size = 10
        for value in values:
            text = json.dumps(value, ensure_ascii=False)
            parts = isinstance(value, list | dict)
            size += 2 * len(text) + (2 * self.gap * sum(map(text.count, "[]{},:")) if parts else 0)
        return _Plain({"enum": values}, size)

    def _types(self, schema: dict[str, Any], place: _Path, kind: str) -> _Plain | None:
        return self._alternatives([of_type(schema, each) for each in schema["type"]], place, "")

    def _any_of(self, schema: dict[str, Any], place: _Path, kind: str) -> _Plain | None:
        return self._alternatives(schema["anyOf"], place, ".anyOf")

    def _alternatives(self, schemas: Sequence[Any], place: _Path, name: str) -> _Plain | None:
        found = [
            self.read(each, place.below(f"{name}[{i}]" if name else ""))
            for i, each in enumerate(schemas)
        ]
        left = [each for each in found if each is not None]
        if not left:
            return None
        return _Plain({"anyOf": [x.schema for x in left]}, 10 + sum(x.size + 6 for x in left))

    def _reference(self, schema: dict[str, Any], place: _Path, kind: str) -> _Plain | None:
        pointer, where = schema["$ref"], f"{place.where}.$ref"
        names = pointer.split("/")
        if names[0] != "#":
            refuse(where, f"must be within the schema, as '#/$defs/name' is, got {shown(pointer)}")
        repeats = len(place.followed) - len(set(place.followed))
        if pointer in place.followed and repeats >= _AGAIN:
            self.endless = self.endless or where
            return None
        target = self.root
        for name in names[1:]:
            name = urllib.parse.unquote(name).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdecimal():
                target = dict(enumerate(target)).get(int(name))
            else:
                target = target.get(name) if isinstance(target, dict) else None
            if target is None:
                refuse(where, f"is {shown(pointer)}, and the schema has no such part")
        path = "".join(f".{name}" for name in names[1:])
        return self.read(target, _Path(path, place.level + 1, (*place.followed, pointer)))

    def _array(self, schema: dict[str, Any], place: _Path, kind: str) -> _Plain | None:
        counts: dict[str, Any] = {
            key: schema[key] for key in ("minItems", "maxItems") if key in schema
        }
        items = schema.get("items", True)
        if items is True:
            return _Plain({"type": "array", **counts}, 7_000 + 120 * self.gap)
        inner = None if items is False else self.read(items, place.below(".items"))
        if inner is not None:
            size = 2 * inner.size + 4 * self.gap + 60
            return _Plain({"type": "array", "items": inner.schema, **counts}, size)
        if counts.get("minItems", 0):
            if items is False:
                refuse(f"{place.where}.minItems", f"must be 0 beside items false, got {counts}")
            return None
        return _Plain({"type": "array", "maxItems": 0}, 10 + self.gap)

    def _tuple(self, schema: dict[str, Any], place: _Path, kind: str) -> _Plain | None:
        """Arrays with a schema for each item; all of them are written, and no others."""
        count, items = len(schema["prefixItems"]), schema.get("items", False)
        if isinstance(items, dict):
            why = f"must be true or false beside prefixItems, got {shown(items)}"
            refuse(f"{place.where}.items", why)
        least, most = schema.get("minItems", count), schema.get("maxItems", count)
        if not least <= count <= most:
            key = "minItems" if least > count else "maxItems"
            refuse(
                f"{place.where}.{key}",
                f"is not supported with this number of prefixItems, {count}, got {schema[key]}: "
                f"write {count}",
            )
        inner = [
            self.read(each, place.below(f".prefixItems[{i}]"))
            for i, each in enumerate(schema["prefixItems"])
        ]
        found = [each for each in inner if each is not None]
        if len(found) < count:
            return None
        size = sum(each.size + 2 * self.gap + 2 for each in found) + 2 * self.gap + 10
        return _Plain({"type": "array", "prefixItems": [x.schema for x in found]}, size)

    def _object(self, schema: dict[str, Any], place: _Path, kind: str) -> _Plain | None:
        given, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        required = schema.get("required", [])
        for name in required:
            if name not in given:
                refuse(
                    f"{place.where}.required",
                    f"has {shown(name)}, which is not in properties: add it there",
                )
        if not given and isinstance(more, dict):
            return self._map(more, place)
        if given and isinstance(more, dict):
            refuse(
                f"{place.where}.additionalProperties",
                f"is not supported beside properties, got {shown(more)}: leave it out",
            )
        if "properties" not in schema and more:
            return _Plain({"type": "object"}, 7_000 + 120 * self.gap)
        inner, sizes = {}, []
        for name, each in given.items():
            _check_name(name, f"{place.where}.properties")
            found = self.read(each, place.below(f".properties.{name}"))
            if found is not None:
                inner[name] = found.schema
                sizes.append(found.size + 2 * len(name) + 4 * self.gap + 16)
            elif name in required:
                return None
        # Without a required property, each in turn is the last one written.
        times = [1 if required else len(sizes) - i for i in range(len(sizes))]
        size = sum(a * b for a, b in zip(sizes, times, strict=True)) + 2 * self.gap + 20
        plain = {"type": "object", "properties": inner, "required": required}
        return _Plain(plain, size)

    def _map(self, more: dict[str, Any], place: _Path) -> _Plain:
        """Objects with any names, and values of one schema."""
        inner = self.read(more, place.below(".additionalProperties"))
        if inner is None:
            return _Plain({"type": "object", "properties": {}}, 20 + self.gap)
        size = 2 * inner.size + 8 * self.gap + 140
        return _Plain({"type": "object", "additionalProperties": inner.schema}, size)


# Characters of the expressions of outlines-core.
_SIZES = {"string": 45, "number": 52, "integer": 22, "boolean": 12, "null": 4}
# Other keywords and types are simple.
_METHODS = {
    "$ref": "reference",
    "anyOf": "any_of",
    "types": "types",
    "enum": "values",
    "const": "values",
    "pattern": "text",
    "format": "text",
    "prefixItems": "tuple",
    "array": "array",
    "object": "object",
}


def _check_name(name: str, where: str) -> None:
    """Refuses the name of a property that outlines-core does not write as it is."""
    if json.dumps(name, ensure_ascii=False)[1:-1] != name:
        refuse(where, f"has the name {name!r}, which JSON escapes: rename it")


def _check_value(value: Any, where: str, level: int) -> None:
    """Refuses a value that outlines-core does not write as it is."""
    if level > MOST_LEVELS:
        refuse(where, f"has a value more than {MOST_LEVELS} levels deep: use fewer levels")
    if isinstance(value, list | dict):
        for name in value if isinstance(value, dict) else ():
            _check_name(name, where)
        for each in value.values() if isinstance(value, dict) else value:
            _check_value(each, where, level + 1)
    elif isinstance(value, float) or (isinstance(value, int) and abs(value) >= 2**63):
        library = require("outlines_core", "constraints").json_schema
        written = library.build_regex_from_schema(json.dumps({"const": value}))
        if json.loads(re.sub(r"\\(.)", r"\1", written)) != value:
            refuse(
                where, f"has the number {value!r}, which cannot be exact: round it, or use a text"
            )
