"""JSON schemas as regular expressions, by outlines-core.

It ignores keywords that it cannot follow, and writes some wrong. So a schema is checked here, and
what it would not follow is refused by its path in the schema. It gets the schema as it is, but for
patterns, which match whole texts, and `{}`.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from specjax.checks import require, short_repr
from specjax.errors import UserError
from specjax.processors.byte_automata import (
    MOST_CHARACTERS,
    build,
    byte_automaton,
    plain_expression,
)
from specjax.processors.caches import bounded_cache

_TOO_LONG = f"more than {MOST_CHARACTERS} characters"
_TOO_DEEP = "is nested too deeply: use fewer levels"
_SPACES = frozenset(b" \t\n\r")
# Characters that JSON escapes in a string, as bytes.
_ESCAPED = [*range(0x20), ord('"'), ord("\\")]
_POINTER = re.compile("#(/[^/~%#]+)*")
MOST_PARTS = 20_000
# Inside how many others references are followed at least, where a schema contains itself.
_AGAIN = 3

# What decides the values of a schema, the first that is there as in outlines-core; with the type
# that it needs and the keywords allowed beside it.
_DECIDING: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "properties": ("object", ("type", "required", "additionalProperties")),
    "anyOf": (None, ()),
    "prefixItems": ("array", ("type", "items", "minItems", "maxItems")),
    "enum": (None, ("type",)),
    "const": (None, ("type",)),
    "$ref": (None, ()),
    "pattern": ("string", ("type",)),
    "format": ("string", ("type",)),
}
_OF_TYPES = {
    "object": ("additionalProperties",),
    "array": ("items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength"),
}
_NOTES = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "$defs", "definitions"),
}
TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda x: isinstance(x, dict),
    "array": lambda x: isinstance(x, list),
    "string": lambda x: isinstance(x, str),
    "integer": lambda x: _is_number(x) and x == int(x),
    "number": lambda x: _is_number(x),
    "boolean": lambda x: isinstance(x, bool),
    "null": lambda x: x is None,
}
# Of outlines-core's formats, those whose expressions have no more texts than they should.
_FORMATS = ("date", "uuid")
_INSTEAD = {
    "oneOf": "write anyOf",
    "allOf": "write one schema",
    "minimum": "write the numbers as an enum, or a Regex",
    "maximum": "write the numbers as an enum, or a Regex",
}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_filled(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_COUNT = (lambda x: type(x) is int and x >= 0, "a whole number, at least 0")
_MORE = (lambda x: isinstance(x, bool | dict), "true, false or a schema")
_SCHEMAS = (_is_filled, "a list of schemas, not empty")
# The keywords that are followed, and what they must be.
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), _COUNT),
    **dict.fromkeys(("anyOf", "prefixItems"), _SCHEMAS),
    **dict.fromkeys(("items", "additionalProperties"), _MORE),
    "properties": (lambda x: isinstance(x, dict), "an object of schemas"),
    "enum": (_is_filled, "a list of values, not empty"),
    "const": (lambda x: True, ""),
    "type": (
        lambda x: all(each in [*TYPES] for each in (x if _is_filled(x) else [x])),
        f"one of {', '.join(TYPES)}, or a list of them",
    ),
    "required": (_is_texts, "a list of names"),
    "$ref": (
        lambda x: isinstance(x, str) and _POINTER.fullmatch(x) is not None,
        "a part of the schema such as '#/$defs/name', without ~ and %",
    ),
    "pattern": (lambda x: isinstance(x, str), "a text such as '[0-9]+'"),
    "format": (lambda x: x in _FORMATS, f"{' or '.join(_FORMATS)} (for others write a pattern)"),
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
            f"{short_repr(schema)}{remedy}"
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
        raise UserError(f"schema {_TOO_DEEP}") from None
    except (TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise UserError(
            f"schema cannot be written as JSON ({why}): write dicts, lists, texts, finite numbers, "
            "True, False and None; for a schema that contains itself, write a $ref"
        ) from None


def _as_dict(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise UserError(f"it has {short_repr(value)}")


def schema_pattern(schema: str, whitespace: str | None = None, name: str = "schema") -> str:
    """Returns a regular expression for the JSON of a schema; errors call the schema `name`.

    Keys come in the schema's order; those that are not required may be left out. A pattern matches
    the whole text of a string. A schema that contains itself is followed a few levels deep.
    `whitespace` is an expression for the space between the parts of JSON, by default at most one.
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
    space = "[ ]?"
    if whitespace is not None:
        told = f"whitespace {short_repr(whitespace)}"
        space, steps = _plain_part(whitespace, told)
        if (steps[:, [byte for byte in range(256) if byte not in _SPACES]] >= 0).any():
            raise UserError(
                f"{told} must match only spaces, tabs and ends of lines, as JSON has them: write "
                r"' ?' or '[ \t\n\r]*'"
            )
    name = f" {_beginning(schema)}"
    try:
        tree = json.loads(schema, parse_constant=_finite, parse_float=_finite)
        schema.encode()
        json.dumps(tree, ensure_ascii=False).encode()
        depth = _Checker(tree).depth()
    except RecursionError:
        raise SchemaError(f"{name} {_TOO_DEEP}") from None
    except UnicodeEncodeError:
        raise SchemaError(
            " has half of a surrogate pair, which no text has: leave it out"
        ) from None
    except ValueError as error:
        raise SchemaError(f"{name} is not JSON: {error}") from None
    try:
        written = build(name, schema=json.dumps(tree), space=space, depth=depth).decode()
        # Digits are ASCII, as in JavaScript.
        pattern = plain_expression(written, ascii_only=True, name=name)
        byte_automaton(pattern, name=name)
    except ValueError as error:
        raise SchemaError(
            f"{error} (minLength, maxLength, minItems and maxItems are repeats)"
        ) from None
    return pattern


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise UserError(f"{text} is not a number of JSON")
    return float(text)


def _plain_part(pattern: str, name: str) -> tuple[str, np.ndarray]:
    """An expression that may be part of another, and the steps of its automaton."""
    plain = f"(?:{plain_expression(pattern, ascii_only=True, name=name)})"
    return plain, byte_automaton(plain, name=name).steps


class _Checker:
    """Refuses what outlines-core would not follow; makes patterns, and `{}`, parts of others."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.parts, self.deepest, self.itself = 0, 0, False
        self.most: int | None = None  # None: a reference inside itself is not followed

    def depth(self) -> int:
        """Checks the whole schema; returns inside how many others a reference is followed."""
        self.check(self.root, "", (), False)
        if self.itself:
            # Again, as outlines-core does: it leaves out the property, even if it is required, in
            # which a reference is too deep.
            self.most, self.parts = max(_AGAIN, self.deepest), 0
            self.check(self.root, "", (), False)
        return self.deepest if self.most is None else self.most

    def check(self, schema: Any, where: str, followed: tuple[str, ...], optional: bool) -> None:
        """Checks a part.

        Args:
          followed: the references that lead to it.
          optional: whether the nearest property around it is not required.
        """
        self.parts += 1
        if self.parts > MOST_PARTS:
            _refuse(
                where,
                f"is part {self.parts} of the schema, and {MOST_PARTS} are allowed (a part counts "
                "for each reference to it): use fewer references",
            )
        kind = _deciding(schema, where)
        if kind in ("enum", "const"):
            stated = schema.get("type", list(TYPES))
            types = stated if isinstance(stated, list) else [stated]
            for value in schema["enum"] if kind == "enum" else [schema["const"]]:
                if not any(TYPES[each](value) for each in types):
                    why = f"has {_as_json(value)}, which is not of type {stated}"
                    _refuse(f"{where}.{kind}", why)
                _check_value(value, f"{where}.{kind}")
        elif kind == "pattern":
            schema["pattern"] = _string_pattern(schema["pattern"], f"{where}.pattern")
        elif kind == "prefixItems":  # outlines-core writes each of them, and no others
            count = len(schema["prefixItems"])
            for key, right in (("minItems", count.__ge__), ("maxItems", count.__le__)):
                if key in schema and not right(schema[key]):
                    _refuse(
                        f"{where}.{key}",
                        f"is not supported with this number of prefixItems, {count}, got "
                        f"{schema[key]}: write {count}",
                    )
        elif kind == "$ref":
            self._follow(schema["$ref"], f"{where}.$ref", followed, optional)
        elif kind == "any":
            schema["anyOf"] = [{}]  # outlines-core writes no parentheses around the alternatives
        if schema.get("anyOf") == [{}]:
            return
        for name, each in schema.get("properties", {}).items():
            _check_name(name, f"{where}.properties")
            is_optional = name not in schema.get("required", ())
            self.check(each, f"{where}.properties.{name}", followed, is_optional)
        for key in ("anyOf", "prefixItems"):
            for i, each in enumerate(schema.get(key, ())):
                self.check(each, f"{where}.{key}[{i}]", followed, optional)
        for key in ("items", "additionalProperties"):
            if isinstance(schema.get(key), dict):
                self.check(schema[key], f"{where}.{key}", followed, optional)

    def _follow(self, pointer: str, where: str, followed: tuple[str, ...], optional: bool) -> None:
        if self.most is None and pointer in followed:
            self.itself = True
            return
        if self.most is not None and len(followed) > self.most:
            if not optional:
                _refuse(where, "must be in a property that is not required, as it contains itself")
            return
        self.deepest = max(self.deepest, len(followed))
        target, names = self.root, pointer.split("/")[1:]
        for name in names:
            if not isinstance(target, dict):
                why = "must lead through objects only: move the part to $defs"
                _refuse(where, f"{why}, got {_as_json(pointer)}")
            if (target := target.get(name)) is None:
                _refuse(where, f"is {_as_json(pointer)}, and the schema has no such part")
        path = "".join(f".{name}" for name in names)
        self.check(target, path, (*followed, pointer), optional)


def _deciding(schema: Any, where: str) -> str:
    """Checks the keywords of a schema, and returns what decides its values.

    It is a keyword such as "enum", "type", or "any".
    """
    if not isinstance(schema, dict):
        remedy = ": write {}" if schema is True else ""
        _refuse(where, f"must be an object, got {_as_json(schema)}{remedy}")
    given = {key: value for key, value in schema.items() if key not in _NOTES}
    for key, value in given.items():
        if key not in _VALUES:
            remedy = _INSTEAD.get(key, "leave it out")
            _refuse(f"{where}.{key}", f"is not supported: {remedy}, got {_as_json(value)}")
        allowed, words = _VALUES[key]
        if not allowed(value):
            _refuse(f"{where}.{key}", f"must be {words}, got {_as_json(value)}")
    kind = next((key for key in _DECIDING if key in given), "type" if given else "any")
    of, beside = _DECIDING.get(kind, (None, ()))
    if of is not None and schema.setdefault("type", of) != of:
        why = f"must be {_as_json(of)} beside {kind} (for other types too, write anyOf)"
        _refuse(f"{where}.type", f"{why}, got {_as_json(schema['type'])}")
    if kind in ("type", "properties") and "object" in given.get("type", "object"):
        for name in given.get("required", ()):
            if name not in given.get("properties", ()):
                why = f"has {_as_json(name)}, which is not in properties: add it there"
                _refuse(f"{where}.required", why)
        if kind == "type" and given.get("additionalProperties") is False:
            _refuse(f"{where}.additionalProperties", "is false without properties: add properties")
    what, remedy = kind, "leave one of them out"
    if kind == "type":
        if "type" not in given:
            _refuse(where, f"has {', '.join(given)} without a type: add it")
        listed = given["type"] if isinstance(given["type"], list) else [given["type"]]
        beside = ("type", *(key for each in listed for key in _OF_TYPES.get(each, ())))
        what, remedy = f"type {_as_json(given['type'])}", "leave it out"
    for key, value in given.items():
        if key not in (kind, *beside):
            why = f"is not supported beside {what}: {remedy}, got {_as_json(value)}"
            _refuse(f"{where}.{key}", why)
    for key, of in (("items", "prefixItems"), ("additionalProperties", "properties")):
        if schema.get(key) is True:  # as if it were absent
            del schema[key]
        elif key in given and (given[key] is False) != (kind == of):
            words = "true or false" if kind == of else "true or a schema"
            _refuse(f"{where}.{key}", f"must be {words} beside {kind}, got {_as_json(given[key])}")
    for least, most in (("minItems", "maxItems"), ("minLength", "maxLength")):
        if given.get(least, 0) > given.get(most, math.inf):
            _refuse(
                f"{where}.{most}", f"must be at least {least}, {given[least]}, got {given[most]}"
            )
    return kind


def _string_pattern(written: str, where: str) -> str:
    name = f"{where} {short_repr(written)}"
    try:
        pattern, steps = _plain_part(written, name)
    except ValueError as error:
        raise SchemaError(str(error)) from None
    if (steps[:, _ESCAPED] >= 0).any():
        _refuse(
            name,
            "allows a quote, a backslash or a control character: leave them out, as in "
            r'[^"\\\x00-\x1f]',
        )
    return pattern


def _check_name(name: str, where: str) -> None:
    """Refuses the name of a property that outlines-core does not write as it is."""
    if json.dumps(name, ensure_ascii=False)[1:-1] != name:
        _refuse(where, f"has the name {name!r}, which JSON escapes: rename it")


def _check_value(value: Any, where: str) -> None:
    """Refuses a value that outlines-core does not write as it is."""
    if isinstance(value, list | dict):
        for name in value if isinstance(value, dict) else ():
            _check_name(name, where)
        for each in value.values() if isinstance(value, dict) else value:
            _check_value(each, where)
    elif isinstance(value, float) or (isinstance(value, int) and abs(value) >= 2**63):
        library = require("outlines_core", "constraints").json_schema
        written = library.build_regex_from_schema(json.dumps({"const": value}))
        if json.loads(re.sub(r"\\(.)", r"\1", written)) != value:
            _refuse(
                where, f"has the number {value!r}, which cannot be exact: round it, or use a text"
            )


class SchemaError(Exception):
    """Why a schema is refused, with the path in it; follows the schema's name."""


def _refuse(where: str, why: str) -> NoReturn:
    raise SchemaError(f"{where if len(where) <= 200 else '...' + where[-197:]} {why}")


def _as_json(value: Any) -> str:
    return _beginning(json.dumps(value, ensure_ascii=False))


def _beginning(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
