"""Every text of a schema's expression is JSON of the schema; what cannot be followed is refused."""

import datetime
import json
import re
import types

import outlines_core
import pytest

from specjax import processors
from specjax.processors.byte_automata import byte_automaton
from specjax.processors.json_schemas import schema_pattern
from tests.processors.schema_values import SCHEMAS, fits, sampled
from tests.variants import variants

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TREE = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "value": INTEGER,
                "below": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
            },
            "required": ["value"],
        }
    },
    "$ref": "#/$defs/tree",
}
MORE = {
    "alternatives": {"type": "string", "pattern": "a|b+"},
    "anchors": {"type": "string", "pattern": r"^(?P<x>a|[$^]{2})|\$b$|\Ac\Z|(?#^)d"},
    "digits": {"type": "string", "pattern": r"[\d\-]+"},
    "any value": {"type": "object", "properties": {"x": {}, "y": {"type": "boolean"}}},
    "any array": {"type": "array", "items": True, "minItems": 1},
    "no items": {"type": "array", "items": INTEGER, "maxItems": 0},
    "two types": {"type": ["string", "integer", "array"], "minLength": 2, "items": INTEGER},
    "enum of a type": {"type": ["string", "null"], "enum": ["x", None]},
    "map": {"type": "object", "additionalProperties": {"type": "number"}},
    "no properties": {"type": "object", "properties": {}, "additionalProperties": False},
    "all optional": {"type": "object", "properties": dict.fromkeys("abcd", INTEGER)},
    "names": {"type": "object", "properties": dict.fromkeys(("a.b", "é+", "$"), INTEGER)},
    "tuple": {"type": "array", "prefixItems": [STRING, {}], "items": False, "minItems": 2},
    "without a type": {"properties": {"a": {"pattern": "x+"}}, "required": ["a"]},
    "tree": TREE,
    "part": {"type": "object", "properties": {"a": STRING, "c": {"$ref": "#/properties/a"}}},
    "numbers": {"enum": [0.1, -1e300, 1e-7, 2**63, -0.0, 12]},
}
ALL = {**SCHEMAS, **MORE}


def wrong(texts, schema):
    """The first text that is not JSON of the schema."""
    for text in texts:
        try:
            value = json.loads(text)
        except ValueError:
            return text
        if not fits(value, schema, schema):
            return text
    return None


@pytest.mark.parametrize("whitespace", variants([None, "", "[ \n]*|\t"], None))
@pytest.mark.parametrize("name", ALL)
def test_sampled_texts_are_json_of_their_schema(name, whitespace):
    schema = ALL[name]
    pattern = schema_pattern(json.dumps(schema), whitespace)
    texts = list(sampled(byte_automaton(pattern), 40))
    assert wrong(texts, schema) is None
    assert len(set(texts)) > 1 or name in ("const", "no properties", "no items")


def test_control_the_library_alone_writes_what_is_wrong():
    time = {"type": "string", "format": "time"}
    for schema in (MORE["alternatives"], time, MORE["any value"]):
        pattern = outlines_core.json_schema.build_regex_from_schema(json.dumps(schema))
        assert wrong(sampled(byte_automaton(pattern), 200), schema) is not None
    assert wrong(["[1, 2, 3, 4]"], SCHEMAS["array"]) and wrong(['{"b": 1}'], SCHEMAS["optional"])


def accepts(schema, text, whitespace=None):
    pattern = schema_pattern(json.dumps(schema), whitespace)
    return re.fullmatch(pattern, text) is not None


def test_dates_are_those_of_a_calendar_but_for_the_days_of_months_and_year_0():
    schema = {"type": "string", "format": "date"}
    for days in range(0, 3652058, 997):
        assert accepts(schema, f'"{datetime.date.min + datetime.timedelta(days)}"')
    for text in ("2024-13-01", "2024-00-01", "2024-01-32", "2024-01-00", "12024-01-01", "024-1-1"):
        assert not accepts(schema, f'"{text}"')
    assert not accepts(schema, '"\u0662024-02-29"')
    for sample in sampled(byte_automaton(schema_pattern(json.dumps(schema))), 40):
        year, month, day = map(int, json.loads(sample).split("-"))
        assert datetime.date(year or 1, month, 1) and datetime.date(2000, 1, day)


def test_a_pattern_matches_the_whole_text():
    anchors = MORE["anchors"]
    for text in ("a", "$^", "$b", "c", "d"):
        assert accepts(anchors, f'"{text}"')
    for text in ("^a", "b", "$b$", "ab", ""):
        assert not accepts(anchors, f'"{text}"')


def test_schemas_that_contain_themselves_are_followed_some_levels():
    below = '{"value":1,"below":[%s]}'
    text = '{"value":1}'
    for level in range(6):
        assert accepts(TREE, text) == (level <= 3)
        text = below % text


CHAIN = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(9)}


def test_references_are_followed_as_deep_as_they_are():
    defs = {**CHAIN, "d9": INTEGER}
    assert accepts({"$ref": "#/$defs/d0", "$defs": defs}, '{"a":' * 9 + "1" + "}" * 9)
    # Also beside a schema that contains itself.
    both = {"properties": {"tree": TREE["$defs"]["tree"], "chain": {"$ref": "#/$defs/d4"}}}
    both = {**both, "required": ["chain"], "$defs": {**defs, **TREE["$defs"]}}
    assert accepts(both, '{"chain":' + '{"a":' * 5 + "1" + "}" * 6)


def test_optional_properties_and_their_order():
    for text, right in (("{}", True), ('{"b": 1, "d": 2}', True), ('{"d": 1, "b": 2}', False)):
        assert accepts(MORE["all optional"], text) == right


def nested(levels, around, schema=INTEGER):
    for _ in range(levels):
        schema = around(schema)
    return schema


def array(items):
    return {"type": "array", "items": items}


def holder(inner):
    return {"type": "object", "properties": {"a": inner}}


DOUBLE = {
    f"d{i}": {"properties": {x: {"$ref": f"#/$defs/d{i + 1}"} for x in "ab"}} for i in range(20)
}
RINGS = {
    f"d{i}": {"properties": {f"p{j}": {"$ref": f"#/$defs/d{j}"} for j in "0123456789"}}
    for i in range(10)
}
SELF: dict = {"type": "array"}
SELF["items"] = SELF
REFUSED = {
    "schema.maxLength is not supported beside format": {"format": "date", "maxLength": 3},
    "schema.format is not supported beside pattern": {"format": "date", "pattern": "a"},
    "schema.const is not supported beside enum": {"enum": [1], "const": 1},
    "schema.anyOf is not supported beside properties": {"properties": {}, "anyOf": [{}]},
    r"schema.minLength is not supported beside \$ref": {"$ref": "#/$defs/x", "minLength": 1},
    "schema.items is not supported beside properties": {"properties": {}, "items": {}},
    'schema.minItems must be a whole number, at least 0, got "3"': {"minItems": "3"},
    r"schema.anyOf must be a list of schemas, not empty, got \[\]": {"anyOf": []},
    "schema.anyOf must be a list of schemas, not empty, got null": {"anyOf": None},
    "schema.prefixItems must be a list of schemas, .* got null": {"prefixItems": None},
    r"schema.type must be one of .* got \[\]": {"type": []},
    "schema.minProperties is not supported": {"type": "object", "minProperties": 1},
    r"schema.\$ref must be a part of the schema": {"$ref": "http://x/y"},
    "schema .* has more than 2097152 characters": nested(16, array),
    "schema .* takes more than 1024 MB to compile": nested(40, array),
    "schema.*takes more than 1024 MB to compile, or is nested too": nested(200, holder),
    "schema is nested too deeply": nested(3000, holder),
    r"schema \[+\.\.\. is nested too deeply": "[" * 100_000,
    r"\$defs\.d.* is part 20001 of the schema": {**DOUBLE["d0"], "$defs": {**DOUBLE, "d20": {}}},
    r"is part 20001 of the schema": {"$ref": "#/$defs/d0", "$defs": RINGS},
    "Circular reference detected": SELF,
    "more than 2097152 characters": nested(18, lambda x: {"properties": {"a": x, "b": x}}),
    "schema has more than 2097152 characters": '{"title": "' + "x" * 2_100_000 + '"}',
    r"it has \{1\}\)": {"enum": {1}},
    "schema cannot be written as JSON": {"const": float("nan")},
    "NaN is not a number of JSON": '{"const": NaN}',
    "1e999 is not a number of JSON": '{"const": 1e999}',
    "has half of a surrogate pair": {"const": "\ud800"},
    "schema.const has the number .* cannot be exact": {"const": 2**64 + 1},
    "schema.const has the name .*, which JSON escapes": {"const": [{'"': 1}]},
    # Keywords beside others.
    "schema.maxLength is not supported beside pattern: leave one of them out, got 3": {
        "pattern": "a",
        "maxLength": 3,
    },
    "schema.enum has 1, which is not of type string": {"type": "string", "enum": ["a", 1]},
    "schema.const has true, which is not of type integer": {"type": "integer", "const": True},
    "schema.type is not supported beside anyOf": {"type": "object", "anyOf": [{}]},
    'schema.minLength is not supported beside type "integer": leave it out': {
        "type": "integer",
        "minLength": 1,
    },
    "schema.items is not supported beside type .*null": {"type": ["string", "null"], "items": {}},
    'schema.type must be "object" beside properties .*, write anyOf': {
        "type": ["object", "null"],
        "properties": {},
    },
    "schema has minLength without a type: add it": {"minLength": 1},
    'schema.required has "b", which is not in properties': {"properties": {}, "required": ["b"]},
    'schema.required has "a", which is not in properties: add it': {"required": ["a"]},
    "schema.required is not supported beside type .*: leave it out": {
        "type": "integer",
        "required": ["a"],
    },
    "schema.additionalProperties is false without properties: add": {"additionalProperties": False},
    "schema.minItems is not supported with .* write 1": {"prefixItems": [{}], "minItems": 2},
    "schema.maxItems is not supported with .* write 2": {"prefixItems": [{}, {}], "maxItems": 1},
    "schema.items must be true or false beside prefixItems": {"prefixItems": [{}], "items": {}},
    "schema.items must be true or a schema beside type": {"type": "array", "items": False},
    "schema.maxItems must be at least minItems, 3, got 2": {
        "type": "array",
        "minItems": 3,
        "maxItems": 2,
    },
    "schema.additionalProperties must be true or false beside properties": {
        "properties": {"a": {}},
        "additionalProperties": {},
    },
    # Values of the wrong type.
    "schema.maxLength must be a whole number, at least 0, got true": {"maxLength": True},
    "schema.minLength must be .* got -1": {"minLength": -1},
    r"schema.enum must be a list of values, not empty, got \[\]": {"enum": []},
    "schema.anyOf must be a list of schemas, not empty, got 5": {"anyOf": 5},
    r"schema.type must be one of .* got \[5\]": {"type": [5]},
    "schema.properties must be an object of schemas, got 5": {"properties": 5},
    'schema.required must be a list of names, got "a"': {"required": "a", "properties": {"a": {}}},
    "schema.pattern must be a text": {"pattern": 5},
    "schema.items must be true, false or a schema": {"items": []},
    "schema.anyOf.0. must be an object, got true: write {}": {"anyOf": [True]},
    # What the library writes wrong, or leaves out without a word.
    "schema.format must be date or uuid .for others write a pattern., got .date-": {
        "format": "date-time"
    },
    "schema.minDigits is not supported": {"type": "integer", "minDigits": 2},
    "schema.oneOf is not supported: write anyOf": {"oneOf": [{}]},
    "schema.minimum is not supported: write the numbers": {"type": "integer", "minimum": 1},
    # References.
    r"schema.properties.a.\$ref must be in a property that is not required, as it": {
        "properties": {"a": {"$ref": "#"}},
        "required": ["a"],
    },
    r"schema.items.\$ref must be in a property that": {"type": "array", "items": {"$ref": "#"}},
    r"schema.\$ref must be in a property": {"$ref": "#"},
    r"schema.\$defs.a.properties.c.\$ref must be in a property": {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {
                "properties": {"b": {"$ref": "#/$defs/a"}, "c": {"$ref": "#/$defs/c"}},
                "required": ["c"],
            },
            "c": INTEGER,
        },
    },
    r"schema.\$ref must be a part of the schema.*a~1b": {"$ref": "#/a~1b"},
    r"schema.\$ref is .#/a., and the schema has no such part": {"$ref": "#/a"},
    r"schema.\$ref must lead through objects only: move .*anyOf/0": {
        "$ref": "#/$defs/u/anyOf/0",
        "$defs": {"u": {"anyOf": [{}]}},
    },
    'schema.properties has the name ."., which JSON escapes: rename it': {"properties": {'"': {}}},
    # Patterns are shown as they were written.
    "schema.pattern '.\\*' allows a quote": {"type": "string", "pattern": ".*"},
    r"^schema.pattern '\(' is not a regular expression: .* at position 0$": {"pattern": "("},
    "schema.pattern .* is nested too deeply": {"pattern": "(" * 900 + ")" * 900},
    "takes more than 20000 states: .*maxLength": {"type": "string", "maxLength": 3000},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_followed_is_refused_by_its_path(message):
    given = REFUSED[message]
    with pytest.raises(ValueError, match=message) as caught:
        processors.JsonSchema(given)
    assert "(?a)" not in str(caught.value) and "(?:" not in str(caught.value)


def test_a_mapping_is_a_schema():
    given = {"type": "object", "properties": types.MappingProxyType({"a": INTEGER})}
    schema = json.loads(processors.JsonSchema(types.MappingProxyType(given)).schema[0])
    assert schema == {"type": "object", "properties": {"a": INTEGER}}


@pytest.mark.parametrize("space", ["(", "[", "x", "a|b", r"\s*", "(?i) ", '"', "[^\\s\\S]"])
def test_a_space_is_what_json_has_between_its_parts(space):
    with pytest.raises(ValueError, match="^whitespace .* (must match only|is not a reg|has a)"):
        processors.JsonSchema(INTEGER, whitespace=space)


def test_the_space_is_an_expression_of_its_own():
    with pytest.raises(ValueError, match="whitespace must be a text such as"):
        processors.JsonSchema(INTEGER, whitespace=5)
    schema = array(INTEGER)
    assert accepts(schema, "[\t1,\n2 ]", "^ |\t|\n$") and not accepts(schema, "[  1]", " |\t|\n")
    assert accepts(schema, "[1,2]", "") and not accepts(schema, "[1, 2]", "")
