"""JSON schemas as regular expressions, by outlines-core.

It ignores what it cannot follow, and follows references and levels without a limit. So schemas are
checked and rewritten first: see `plain_schemas`.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from specjax.checks import require
from specjax.errors import UserError
from specjax.processors.byte_automata import byte_automaton, shortened
from specjax.processors.caches import bounded_cache
from specjax.processors.plain_schemas import plain_schema, without_anchors
from specjax.processors.schema_keywords import SchemaError

MOST_TEXT = 2 << 20
_TOO_LONG = f"more than {MOST_TEXT} characters"
_SPACES = frozenset(b" \t\n\r")


def schema_text(schema: Any) -> str:
    """Returns the JSON of a mapping; a text as it is.

    Raises:
      TypeError: it is neither a mapping nor a text, or contains what JSON does not have.
      ValueError: it contains itself, or a number that JSON does not have, or is too long.
    """
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, Mapping):
        made = f"{getattr(schema, '__name__', '...')}.model_json_schema()"
        remedy = f": write {made}" if hasattr(schema, "model_json_schema") else ""
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
            if length > MOST_TEXT:
                raise UserError(_TOO_LONG)
        return "".join(parts)
    except RecursionError:
        raise UserError("schema is nested too deeply: use fewer levels") from None
    except (TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise type(error)(
            f"schema cannot be written as JSON ({why}): write dicts, lists, texts, finite numbers, "
            "True, False and None; for a schema that contains itself, write a $ref"
        ) from None


def _as_dict(given: Any) -> dict[Any, Any]:
    if isinstance(given, Mapping):
        return dict(given)
    raise UserError(f"it has {shortened(repr(given))}")


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

    Raises:
      TypeError: `whitespace` is not a text.
      ValueError: the schema is not JSON, has what is not supported, or is too large; or whitespace
        is more than spaces, tabs and ends of lines.
    """
    if not isinstance(whitespace, str | None):
        raise UserError(f"whitespace must be a text such as ' ?', or None, got {whitespace!r}")
    try:
        return _pattern(schema, whitespace)
    except SchemaError as error:
        raise UserError(f"{name}{error}") from None


@bounded_cache(most_bytes=64 << 20)
def _pattern(schema: str, whitespace: str | None) -> str:
    library = require("outlines_core", "constraints").json_schema
    if len(schema) > MOST_TEXT:
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
    plain = json.dumps(plain_schema(tree, space))
    try:
        pattern = library.build_regex_from_schema(plain, space)
    except Exception as error:  # of its own types
        why = " ".join(str(error).split())
        raise SchemaError(
            f" {shortened(schema)} is not supported by outlines-core: {why}"
        ) from None
    # Digits and letters in patterns are ASCII, as in JavaScript.
    pattern = f"(?a){pattern}"
    try:
        byte_automaton(pattern, name=f" {shortened(schema)}")
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
    space = without_anchors(whitespace, name)
    found = byte_automaton(space, ascii_only=True, name=name)
    others = [byte for byte in range(256) if byte not in _SPACES]
    if (found.steps[:, others] >= 0).any() or not found.accepting.any():
        raise UserError(
            f"{name} must match only spaces, tabs and ends of lines, as JSON has them: write "
            r"' ?' or '[ \t\n\r]*'"
        )
    return space
