"""JSON schemas as regular expressions, by outlines-core.

It ignores what a regular expression cannot say, and does not escape what patterns and names put
into a string. So keywords that would be ignored, and such strings, are refused here.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from specjax.checks import require
from specjax.processors.byte_automata import byte_automaton

_READ = {
    *("type", "enum", "const", "anyOf", "$ref", "$defs", "definitions"),
    *("properties", "required", "additionalProperties"),
    *("items", "prefixItems", "minItems", "maxItems"),
    *("minLength", "maxLength", "pattern", "format"),
    *("title", "description", "default", "examples", "deprecated"),
    *("$schema", "$id", "$comment", "readOnly", "writeOnly"),
}
_FORMATS = ("date", "date-time", "time", "uuid")
_INSTEAD = {
    "oneOf": ": write anyOf",
    "allOf": ": write one schema",
    "minimum": ": write the numbers as an enum, or a Regex",
    "maximum": ": write the numbers as an enum, or a Regex",
}
# Characters that JSON escapes in a string, as bytes.
_ESCAPED = [*range(0x20), ord('"'), ord("\\")]


@functools.lru_cache(maxsize=64)
def schema_pattern(schema: str, whitespace: str | None = None) -> str:
    """Returns a regular expression for the JSON of a schema.

    Keys come in the schema's order; those that are not required may be left out. References to a
    schema that contains them are followed a few levels deep.

    Args:
      schema: a JSON schema.
      whitespace: a regular expression for the space between the parts of JSON; None: at most one
        space.

    Raises:
      ValueError: the schema is not JSON, or has what is not supported.
    """
    library = require("outlines_core", "constraints")
    try:
        tree = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"schema {_short(schema)} is not JSON: {error}") from None
    for where, why in _unsupported(tree, "schema"):
        raise ValueError(f"{where} {why}")
    try:
        pattern = library.json_schema.build_regex_from_schema(schema, whitespace)
    except Exception as error:  # of its own types
        why = " ".join(str(error).split())
        raise ValueError(f"schema {_short(schema)} is not supported: {why}") from None
    # Digits and letters in patterns and formats are ASCII, as in JavaScript.
    return f"(?a){pattern}"


def _short(schema: str) -> str:
    return schema if len(schema) <= 80 else schema[:77] + "..."


def _unsupported(schema: Any, where: str) -> Iterator[tuple[str, str]]:
    """Where a schema has something that is not supported, and why."""
    if not isinstance(schema, Mapping):
        yield where, f"must be an object, got {_short(json.dumps(schema))}"
        return
    for key in schema:
        if key not in _READ:
            yield f"{where}.{key}", f"is not supported{_INSTEAD.get(key, ': leave it out')}"
    if (name := schema.get("format")) is not None and name not in _FORMATS:
        yield f"{where}.format", f"must be one of {', '.join(_FORMATS)}, got {name!r}"
    if isinstance(pattern := schema.get("pattern"), str):
        automaton = byte_automaton(f"(?a){pattern}")
        if (automaton.steps[:, _ESCAPED] >= 0).any():
            yield (
                f"{where}.pattern",
                f"{pattern!r} allows a quote, a backslash or a control character: leave them out, "
                r'as in [^"\\\x00-\x1f]',
            )
    if schema.get("properties") and schema.get("additionalProperties") not in (None, False, True):
        yield f"{where}.additionalProperties", "is not supported beside properties: leave it out"
    for group in ("properties", "$defs", "definitions"):
        inner = schema.get(group, {})
        for name, below in inner.items() if isinstance(inner, Mapping) else ():
            if json.dumps(name, ensure_ascii=False)[1:-1] != name and group == "properties":
                yield f"{where}.{group}", f"has the name {name!r}, which JSON escapes: rename it"
            yield from _unsupported(below, f"{where}.{group}.{name}")
    for group in ("anyOf", "prefixItems"):
        for i, below in enumerate(schema.get(group, ())):
            yield from _unsupported(below, f"{where}.{group}[{i}]")
    for name in ("items", "additionalProperties"):
        if isinstance(below := schema.get(name), Mapping):
            yield from _unsupported(below, f"{where}.{name}")
