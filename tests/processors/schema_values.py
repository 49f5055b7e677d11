"""Schemas, a validator of JSON values, and sampled texts of a constraint."""

import random
import re
import uuid

import numpy as np

from specjax.processors.byte_automata import FAR, fewest_steps

SCHEMAS = {
    "nested": {
        "type": "object",
        "properties": {
            "who": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 12}},
                "required": ["name"],
            },
            "age": {"type": "integer"},
        },
        "required": ["who", "age"],
    },
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
        "required": ["b"],
    },
    "enum": {"enum": ["red", 'a "quoted" é', 3, None, {"x": [1, 2]}]},
    "const": {"const": "line\nbreak\\"},
    "number": {"type": "number"},
    "escapes": {"type": "string", "minLength": 1, "maxLength": 20},
    "array": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    "pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"enum": ["x", "y"]}]},
    "any": {"anyOf": [{"type": "integer"}, {"type": "object", "properties": {}}]},
    "pattern": {"type": "string", "pattern": r"^\d{3}-[a-z]+$", "title": "Number"},
    "reference": {
        "$defs": {"point": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/point"}},
        "required": ["at"],
    },
    "uuid": {"type": "string", "format": "uuid"},
}
_KINDS = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def fits(value, schema, root):
    """Whether a value is of a schema, by the words of the specification."""
    if "$ref" in schema:
        target = root
        for name in schema["$ref"].split("/")[1:]:
            target = target[name.replace("~1", "/")]
        if not fits(value, target, root):
            return False
    if "anyOf" in schema and not any(fits(value, each, root) for each in schema["anyOf"]):
        return False
    if "enum" in schema and not any(_same(value, each) for each in schema["enum"]):
        return False
    if "const" in schema and not _same(value, schema["const"]):
        return False
    types = schema.get("type", list(_KINDS))
    if not any(_is(value, each) for each in ([types] if isinstance(types, str) else types)):
        return False
    checks = {dict: _fits_object, list: _fits_array, str: _fits_string}
    return checks.get(type(value), lambda *_: True)(value, schema, root)


def _is(value, kind):
    return isinstance(value, _KINDS[kind]) and isinstance(value, bool) == (kind == "boolean")


def _same(value, other):
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _fits_object(value, schema, root):
    known, more = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name, each in value.items():
        below = known.get(name, more)
        if below is False or (below is not True and not fits(each, below, root)):
            return False
    return set(schema.get("required", ())) <= set(value)


def _fits_array(value, schema, root):
    first, more = schema.get("prefixItems", []), schema.get("items", True)
    for i, each in enumerate(value):
        below = first[i] if i < len(first) else more
        if below is False or (below is not True and not fits(each, below, root)):
            return False
    return schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 10**9)


def _fits_string(value, schema, root):
    try:
        {"uuid": uuid.UUID}.get(schema.get("format"), str)(value)
    except ValueError:
        return False
    return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**9) and (
        re.search(schema.get("pattern", ""), value, re.ASCII) is not None
    )


def sampled(automaton, count, seed=0):
    """Texts of a language: walks that turn to the nearest end after a while."""
    draw = random.Random(seed)
    sources, _ = np.nonzero(automaton.steps >= 0)
    distances = fewest_steps(sources, automaton.steps[automaton.steps >= 0], automaton.accepting)
    for _ in range(count):
        state, text, longest = 0, [], draw.randrange(60)
        while True:
            (following,) = np.nonzero(automaton.steps[state] >= 0)
            late = len(text) > longest
            if automaton.accepting[state] and (late or not following.size or draw.random() < 0.2):
                break
            if late:
                after = distances[automaton.steps[state, following]]
                following = following[after < distances[state]]
                assert distances[state] < FAR
            text.append(draw.choice(following.tolist()))
            state = automaton.steps[state, text[-1]]
        yield bytes(text).decode()
