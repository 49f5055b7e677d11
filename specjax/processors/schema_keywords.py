"""Which keywords of JSON schemas are supported: beside which others, and with which values.

What the tables do not allow is refused by its path in the schema.
"""

import json
from collections.abc import Callable
from typing import Any, NoReturn

from specjax.processors.byte_automata import shortened

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
    """Raises SchemaError for a path in a schema."""
    raise SchemaError(f"{where if len(where) <= 200 else '...' + where[-197:]} {why}")


def shown(value: Any) -> str:
    """A value as JSON, for a message."""
    return shortened(json.dumps(value, ensure_ascii=False))


def deciding_keyword(schema: Any, where: str) -> str:
    """Checks the keywords of a schema, and tells which decides its values.

    Returns:
      A keyword such as "enum"; a type such as "object"; "types" if several types are possible; or
      "any".

    Raises:
      SchemaError: a keyword is not supported, is beside another that it cannot be beside, or has a
        value of the wrong type.
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
    given = schema.get("type")
    if isinstance(given, list):
        return "types"
    possible = [each for each in TYPES if _keywords(each) & set(schema) - {"type"}]
    if given is None and len(possible) > 1:
        refuse(where, f"has keywords of {' and '.join(possible)}: add type")
    for key, of in _KINDS.items():
        if key in schema and given in (None, of):
            return key
    return given or (possible[0] if possible else "any")


def _keywords(of: str) -> set[str]:
    """All keywords for values of a type."""
    kinds = [key for key, each in _KINDS.items() if each == of]
    return {*_BESIDE[of], *kinds, *(key for kind in kinds for key in _BESIDE[kind])}


def of_type(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """A schema for those values of another that are of a type."""
    return {**{key: x for key, x in schema.items() if key in _keywords(name)}, "type": name}


_KEYWORDS = {key for kind, keys in _BESIDE.items() for key in (kind, *keys)} - set(TYPES)
