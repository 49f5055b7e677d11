"""JSON schemas as regular expressions, by outlines-core.

It ignores what it cannot follow, and follows references and levels without a limit. So schemas are
checked, and rewritten in a plain form that it follows exactly: without references, lists of types
or formats, and with patterns for the whole text. What is not
supported is refused by its path in the schema.
"""

import json
import math
import re
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from specjax.checks import require
from specjax.errors import UserError
from specjax.processors.byte_automata import (
    MOST_CHARACTERS,
    built,
    byte_automaton,
    plain_expression,
    shortened,
)
from specjax.processors.caches import bounded_cache

_TOO_LONG = f"more than {MOST_CHARACTERS} characters"
_SPACES = frozenset(b" \t\n\r")
MOST_LEVELS = 48
MOST_PARTS = 20_000
# How often schemas may contain themselves.
_AGAIN = 4
# Characters that JSON escapes in a string, as bytes.
_ESCAPED = [*range(0x20), ord('"'), ord("\\")]

# What decides the values of a schema, by keyword or by type; with the keywords allowed beside it.
_BESIDE: dict[str, tuple[str, ...]] = {
    "$ref": (),
    "anyOf": (),
    "enum": ("type",),
    "const": ("type",),
    "pattern": ("type",),
    "format": ("type",),
    "prefixItems": ("type", "items", "minItems", "maxItems"),
    "object": ("type", "properties", "required", "additionalProperties"),
    "array": ("type", "items", "minItems", "maxItems"),
    "string": ("type", "minLength", "maxLength"),
    "integer": ("type",),
    "number": ("type",),
    "boolean": ("type",),
    "null": ("type",),
}
_NOTES = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "$defs", "definitions"),
}
_KINDS = {"pattern": "string", "format": "string", "prefixItems": "array"}
TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda x: isinstance(x, dict),
    "array": lambda x: isinstance(x, list),
    "string": lambda x: isinstance(x, str),
    "integer": lambda x: _is_number(x) and x == int(x),
    "number": lambda x: _is_number(x),
    "boolean": lambda x: isinstance(x, bool),
    "null": lambda x: x is None,
}
# RFC 3339 and RFC 4122. The days are those of the Gregorian calendar, from year 1.
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAYS = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAYS}|{_LEAP}-02-29)"
_MINUTES = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_MINUTES}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_MINUTES})"
FORMATS = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "time": _TIME,
    "uuid": "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
}
_INSTEAD = {
    "oneOf": "write anyOf",
    "allOf": "write one schema",
    "minimum": "write the numbers as an enum, or a Regex",
    "maximum": "write the numbers as an enum, or a Regex",
}


def schema_text(schema: Any) -> str:
    """Returns the JSON of a mapping; a text as it is."""
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, Mapping):
        call = f"{getattr(schema, '__name__', '...')}.model_json_schema()"
        remedy = f": write {call}" if hasattr(schema, "model_json_schema") else ""
        raise UserError(
            f"schema must be like {{'type': 'integer'}}, a text, or a tuple of such, got "
            f"{shortened(repr(schema))}{remedy}"
        )
    parts: list[str] = []
    length = 0
    try:
        # Part by part: dicts that are in several places may make it longer than the memory.
        for part in json.JSONEncoder(default=_as_dict, allow_nan=False).iterencode(schema):
            parts.append(part)
            length += len(part)
            if length > MOST_CHARACTERS:
                raise UserError(_TOO_LONG)
        return "".join(parts)
    except RecursionError:
        raise UserError("schema is nested too deeply: use fewer levels") from None
    except (TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise UserError(
            f"schema cannot be written as JSON ({why}): write dicts, lists, texts, finite numbers, "
            "True, False and None; for a schema that contains itself, write a $ref"
        ) from None


def _as_dict(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise UserError(f"it has {shortened(repr(value))}")


def schema_pattern(schema: str, whitespace: str | None = None, name: str = "schema") -> str:
    """Returns a regular expression for the JSON of a schema.

    Keys come in the schema's order; those that are not required may be left out. A pattern matches
    the whole text of a string. References to a schema that contains them are followed a few levels
    deep.

    Args:
      schema: a JSON schema.
      whitespace: a regular expression for the space between the parts of JSON; None: at most one
        space.
      name: what errors call the schema.
    """
    if not isinstance(whitespace, str | None):
        raise UserError(f"whitespace must be a text such as ' ?', or None, got {whitespace!r}")
    try:
        return _pattern(schema, whitespace)
    except SchemaError as error:
        raise UserError(f"{name}{error}") from None


@bounded_cache(most_bytes=64 << 20)
def _pattern(schema: str, whitespace: str | None) -> str:
    require("outlines_core", "constraints")
    if len(schema) > MOST_CHARACTERS:
        raise SchemaError(f" has {_TOO_LONG}: use a smaller schema")
    space = "[ ]?" if whitespace is None else _checked_space(whitespace)
    try:
        tree = json.loads(schema, parse_constant=_no_number, parse_float=_finite)
        schema.encode()
        json.dumps(tree, ensure_ascii=False).encode()
    except RecursionError:
        raise SchemaError(f" {shortened(schema)} is nested too deeply: use fewer levels") from None
    except UnicodeEncodeError:
        raise SchemaError(
            " has half of a surrogate pair, which no text has: leave it out"
        ) from None
    except ValueError as error:
        raise SchemaError(f" {shortened(schema)} is not JSON: {error}") from None
    reader = _SchemaReader(tree)
    plain = reader.read(tree, _Path("", 0, ("#",)))
    if plain is None:
        refuse(reader.endless, "needs itself in every text, so no text ends: make it optional")
    name = f" {shortened(schema)}"
    try:
        pattern = built(name, schema=json.dumps(plain), space=space).decode()
        byte_automaton(pattern, name=name)
    except ValueError as error:
        raise SchemaError(
            f"{error} (minLength, maxLength, minItems and maxItems are repeats)"
        ) from None
    return pattern


def _no_number(text: str) -> NoReturn:
    raise UserError(f"{text} is not a number of JSON")


def _finite(text: str) -> float:
    return float(text) if math.isfinite(float(text)) else _no_number(text)


def _checked_space(whitespace: str) -> str:
    name = f"whitespace {shortened(repr(whitespace))}"
    space, steps = _plain_part(whitespace, name)
    others = [byte for byte in range(256) if byte not in _SPACES]
    if (steps[:, others] >= 0).any():
        raise UserError(
            f"{name} must match only spaces, tabs and ends of lines, as JSON has them: write "
            r"' ?' or '[ \t\n\r]*'"
        )
    return space


def _plain_part(pattern: str, name: str) -> tuple[str, np.ndarray]:
    """An expression that may be part of another, and the steps of its automaton."""
    # Digits and letters are ASCII, as in JavaScript.
    plain = f"(?:{plain_expression(pattern, ascii_only=True, name=name)})"
    return plain, byte_automaton(plain, name=name).steps


class _Path(NamedTuple):
    where: str
    level: int
    followed: tuple[str, ...]  # the references that led here

    def below(self, name: str) -> "_Path":
        return self._replace(where=self.where + name, level=self.level + 1)


class _SchemaReader:
    """Reads the parts of a schema.

    Attributes:
      parts: how many were read; each reference counts again.
      endless: where a reference was first not followed, as its schema contains itself too often.
    """

    def __init__(self, root: Any) -> None:
        self.root = root
        self.parts, self.endless = 0, ""

    def read(self, schema: Any, place: _Path) -> dict[str, Any] | None:
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
        return getattr(self, f"_{_METHODS.get(kind, 'simple')}")(schema, place, kind)

    def _simple(self, schema: dict[str, Any], place: _Path, kind: str) -> dict[str, Any]:
        """A type without parts, or any JSON."""
        if kind == "any":
            # In a list, as outlines-core makes alternatives without parentheses of it.
            return {"anyOf": [{}]}
        plain = {"type": kind}
        return plain | {key: x for key, x in schema.items() if key in ("minLength", "maxLength")}

    def _text(self, schema: dict[str, Any], place: _Path, kind: str) -> dict[str, Any]:
        """A string of a pattern or format."""
        if kind == "format":
            pattern = f"(?:{FORMATS[schema['format']]})"
        else:
            name = f"{place.where}.pattern {shortened(repr(schema['pattern']))}"
            try:
                pattern, steps = _plain_part(schema["pattern"], name)
            except ValueError as error:
                raise SchemaError(str(error)) from None
            if (steps[:, _ESCAPED] >= 0).any():
                refuse(
                    name,
                    "allows a quote, a backslash or a control character: leave them out, as in "
                    r'[^"\\\x00-\x1f]',
                )
        return {"type": "string", "pattern": pattern}

    def _values(self, schema: dict[str, Any], place: _Path, kind: str) -> dict[str, Any]:
        """An enum or a const."""
        values = schema["enum"] if kind == "enum" else [schema["const"]]
        stated = schema.get("type", list(TYPES))
        types = stated if isinstance(stated, list) else [stated]
        for value in values:
            if not any(TYPES[each](value) for each in types):
                why = f"has {shown(value)}, which is not of type {stated}"
                refuse(f"{place.where}.{kind}", why)
            _check_value(value, f"{place.where}.{kind}", 0)
        return {"enum": values}

    def _types(self, schema: dict[str, Any], place: _Path, kind: str) -> dict[str, Any] | None:
        return self._alternatives([of_type(schema, each) for each in schema["type"]], place, "")

    def _any_of(self, schema: dict[str, Any], place: _Path, kind: str) -> dict[str, Any] | None:
        return self._alternatives(schema["anyOf"], place, ".anyOf")

    def _alternatives(
        self, schemas: Sequence[Any], place: _Path, name: str
    ) -> dict[str, Any] | None:
        read = [
            self.read(each, place.below(f"{name}[{i}]" if name else ""))
            for i, each in enumerate(schemas)
        ]
        ending = [each for each in read if each is not None]
        return {"anyOf": ending} if ending else None

    def _reference(self, schema: dict[str, Any], place: _Path, kind: str) -> dict[str, Any] | None:
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

    def _array(self, schema: dict[str, Any], place: _Path, kind: str) -> dict[str, Any] | None:
        counts: dict[str, Any] = {
            key: schema[key] for key in ("minItems", "maxItems") if key in schema
        }
        items = schema.get("items", True)
        if items is True:
            return {"type": "array", **counts}
        inner = None if items is False else self.read(items, place.below(".items"))
        if inner is not None:
            return {"type": "array", "items": inner, **counts}
        if counts.get("minItems", 0):
            if items is False:
                refuse(f"{place.where}.minItems", f"must be 0 beside items false, got {counts}")
            return None
        return {"type": "array", "maxItems": 0}

    def _tuple(self, schema: dict[str, Any], place: _Path, kind: str) -> dict[str, Any] | None:
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
        return None if None in inner else {"type": "array", "prefixItems": inner}

    def _object(self, schema: dict[str, Any], place: _Path, kind: str) -> dict[str, Any] | None:
        properties, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        required = schema.get("required", [])
        for name in required:
            if name not in properties:
                refuse(
                    f"{place.where}.required",
                    f"has {shown(name)}, which is not in properties: add it there",
                )
        if not properties and isinstance(more, dict):
            return self._map(more, place)
        if properties and isinstance(more, dict):
            refuse(
                f"{place.where}.additionalProperties",
                f"is not supported beside properties, got {shown(more)}: leave it out",
            )
        if "properties" not in schema and more:
            return {"type": "object"}
        inner = {}
        for name, each in properties.items():
            _check_name(name, f"{place.where}.properties")
            plain = self.read(each, place.below(f".properties.{name}"))
            if plain is not None:
                inner[name] = plain
            elif name in required:
                return None
        return {"type": "object", "properties": inner, "required": required}

    def _map(self, more: dict[str, Any], place: _Path) -> dict[str, Any]:
        """Objects with any names, and values of one schema."""
        inner = self.read(more, place.below(".additionalProperties"))
        if inner is None:
            return {"type": "object", "properties": {}}
        return {"type": "object", "additionalProperties": inner}


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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_filled(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0


_SCHEMAS = (lambda x: isinstance(x, dict), "an object of schemas")
_COUNT = (_is_count, "a whole number, at least 0")
_MORE = (lambda x: isinstance(x, bool | dict), "true, false or a schema")
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("$defs", "definitions", "properties"), _SCHEMAS),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), _COUNT),
    **dict.fromkeys(("items", "additionalProperties"), _MORE),
    **dict.fromkeys(("anyOf", "prefixItems"), (_is_filled, "a list of schemas, not empty")),
    "enum": (_is_filled, "a list of values, not empty"),
    "type": (
        lambda x: (
            set(x) <= set(TYPES)
            if _is_filled(x) and all(isinstance(each, str) for each in x)
            else isinstance(x, str) and x in TYPES
        ),
        f"one of {', '.join(TYPES)}, or a list of them",
    ),
    "required": (
        lambda x: isinstance(x, list) and all(isinstance(each, str) for each in x),
        "a list of names",
    ),
    "$ref": (lambda x: isinstance(x, str), "a reference such as '#/$defs/name'"),
    "pattern": (lambda x: isinstance(x, str), "a text such as '[0-9]+'"),
    "format": (
        lambda x: isinstance(x, str) and x in FORMATS,
        f"one of {', '.join(FORMATS)}",
    ),
}


class SchemaError(Exception):
    """Why a schema is refused, with the path in it; follows the schema's name."""


def refuse(where: str, why: str) -> NoReturn:
    """Refuses what is at a path in a schema."""
    raise SchemaError(f"{where if len(where) <= 200 else '...' + where[-197:]} {why}")


def shown(value: Any) -> str:
    """A value as JSON, for a message."""
    return shortened(json.dumps(value, ensure_ascii=False))


def deciding_keyword(schema: Any, where: str) -> str:
    """Checks the keywords of a schema, and returns the one that decides its values.

    It is a keyword such as "enum"; a type such as "object"; "types" if several types are possible;
    or "any".
    """
    if not isinstance(schema, dict):
        remedy = ": write {}" if schema is True else ""
        refuse(where, f"must be an object, got {shown(schema)}{remedy}")
    for key, value in schema.items():
        if key not in _NOTES and key not in _KEYWORDS:
            remedy = _INSTEAD.get(key, "leave it out")
            refuse(f"{where}.{key}", f"is not supported: {remedy}, got {shown(value)}")
        allowed, words = _VALUES.get(key, (None, ""))
        if allowed is not None and not allowed(value):
            refuse(f"{where}.{key}", f"must be {words}, got {shown(value)}")
    kind = _kind(schema, where)
    beside = {kind, *_BESIDE.get(kind, ())}
    if kind == "types":
        beside = set().union(*map(_keywords, schema["type"]))
    for key in schema:
        if key not in _NOTES and key not in beside:
            of, remedy = f"beside {kind}", "leave one of them out"
            if kind in (*TYPES, "types"):
                of, remedy = f"for type {shown(schema.get('type', kind))}", "leave it out"
            refuse(f"{where}.{key}", f"is not supported {of}, got {shown(schema[key])}: {remedy}")
    for least, most in (("minItems", "maxItems"), ("minLength", "maxLength")):
        if schema.get(least, 0) > schema.get(most, float("inf")):
            refuse(
                f"{where}.{most}",
                f"must be at least {least}, {schema[least]}, got {schema[most]}",
            )
    return kind


def _kind(schema: dict[str, Any], where: str) -> str:
    for key in ("$ref", "anyOf", "enum", "const"):
        if key in schema:
            return key
    stated = schema.get("type")
    if isinstance(stated, list):
        return "types"
    possible = [each for each in TYPES if _keywords(each) & set(schema) - {"type"}]
    if stated is None and len(possible) > 1:
        refuse(where, f"has keywords of {' and '.join(possible)}: add type")
    for key, of in _KINDS.items():
        if key in schema and stated in (None, of):
            return key
    return stated or (possible[0] if possible else "any")


def _keywords(of: str) -> set[str]:
    """All keywords for values of a type."""
    kinds = [key for key, each in _KINDS.items() if each == of]
    return {*_BESIDE[of], *kinds, *(key for kind in kinds for key in _BESIDE[kind])}


def of_type(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """A schema for those values of another that are of a type."""
    return {**{key: x for key, x in schema.items() if key in _keywords(name)}, "type": name}


_KEYWORDS = {key for kind, keys in _BESIDE.items() for key in (kind, *keys)} - set(TYPES)
