"""JSON Schema: what is generated validates with `jsonschema`, what can be written is accepted, the rest is refused."""

import json
import random

import hypothesis.strategies as st
import jsonschema
import pytest
from grammar_walks import EOS, JSON_TRIE, random_text
from hypothesis import given, settings

from regular import GrammarError
from structured import TokenGuide, compile_json_schema

TREE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["v"],
}
LINKED = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"enum": [1, 2]}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v", "next"],
        }
    },
    "$ref": "#/$defs/node",
}
SHAPES = {
    "oneOf": [
        {
            "properties": {"kind": {"const": "circle"}, "r": {"type": "number", "exclusiveMinimum": 0}},
            "required": ["kind", "r"],
        },
        {"properties": {"kind": {"const": "square"}, "side": {"type": "integer"}}, "required": ["kind", "side"]},
    ]
}


def obj(properties, required=(), **more):
    return {"type": "object", "properties": properties, "required": list(required), **more}


# (schema, values that must be writable, values that must not be)
CASES = [
    (True, [None, True, 1.5, "x", [1, [2]], {"a": {"b": []}}], []),
    ({}, [0, {}, []], []),
    ({"type": "null"}, [None], [0, False, ""]),
    ({"type": "boolean"}, [True, False], [0, "true"]),
    ({"type": ["string", "null"]}, ["", None], [1]),
    ({"type": "integer"}, [0, -1, 123, 2**63 - 1], [1.5, "1", True, 10**30]),
    ({"type": "number"}, [0, -1.5, 1e-07, 2.5e30, 0.30000000000000004], ["1", None]),
    ({"type": "integer", "minimum": -3, "maximum": 12}, [-3, -1, 0, 9, 10, 12], [-4, 13, 100, -10]),
    ({"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 120}, [6, 10, 99, 100, 119], [5, 120, 0, -6]),
    ({"minimum": 0}, [0, 0.0, 5, 1.25, 10**15], [-1, -0.5]),
    ({"maximum": -2.5}, [-2.5, -2.50, -3, -100], [-2.4, -2, 0, 3]),
    (
        {"type": "number", "minimum": 0.05, "maximum": 37.5},
        [0.05, 0.1, 1, 9.99, 37, 37.5, 30],
        [0.04, 0, 37.51, 38, 100, -1],
    ),
    ({"type": "number", "exclusiveMaximum": 5}, [4.9, 0, -7.25], [5, 5.0, 6]),
    ({"type": "integer", "minimum": 1e300}, None, None),
    ({"allOf": [{"minimum": 3}, {"exclusiveMinimum": 3}, {"type": "integer"}]}, [4], [3]),
    ({"type": "integer", "maximum": 1e300, "minimum": 7}, [7, 10**18], [6]),
    ({"type": "integer", "multipleOf": 7}, [0, 7, -14, 700], [1, 13, -6]),
    ({"type": "number", "multipleOf": 5, "minimum": 12, "maximum": 50}, [15, 20, 50], [10, 12, 55, 12.5]),
    ({"type": "string"}, ["", 'a"b\\c', "é😀\n\t\x01", "x" * 300], [1]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é😀", '\n"\\'], ["a", "abcd", "😀"]),
    ({"maxLength": 0}, [""], ["a"]),
    ({"pattern": "^a+$"}, ["a", "aaa"], ["", "ba", "ab"]),
    ({"pattern": "b"}, ["b", "abc", "é b\n"], ["", "a"]),
    ({"pattern": "^(a|b)|c$"}, ["ax", "b", "xc"], ["xa", "cx"]),
    ({"pattern": '^["\\\\\\n]{2}$'}, ['"\\', "\n\n"], ['"', "nn"]),
    ({"pattern": "^\\d{3}-\\w+$", "maxLength": 6}, ["123-a", "123-ab"], ["123-abc", "12-a"]),
    ({"allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, ["ab", "a-b"], ["a", "b", "ba"]),
    (
        {"enum": ["red", 1, 1.5, None, True, [1, {"a": 2}], {}]},
        ["red", 1, 1.5, None, True, [1, {"a": 2}], {}],
        ["blue", 2, False, [1]],
    ),
    ({"enum": [1, 2, "x", 30], "type": "integer", "maximum": 10}, [1, 2], ["x", 30]),
    ({"enum": ["a", "bb", "ccc"], "minLength": 2, "pattern": "b|c"}, ["bb", "ccc"], ["a"]),
    ({"const": {"a": [1, "é\n"]}}, [{"a": [1, "é\n"]}], [{}, {"a": [1]}]),
    ({"const": "\u2028/\x7f"}, ["\u2028/\x7f"], ["/"]),
    ({"type": "array"}, [[], [1, "a", [True]]], [{}]),
    (
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
        [[1, 2], [1, 2, 3]],
        [[], [1], [1, 2, 3, 4], ["a", 1]],
    ),
    ({"items": {"type": "boolean"}, "maxItems": 2}, [[], [True], [True, False]], [[True] * 3, [1]]),
    ({"items": False}, [[]], [[1]]),
    (
        {"prefixItems": [{"type": "integer"}, {"type": "string"}], "items": {"type": "null"}},
        [[], [1], [1, "a"], [1, "a", None, None]],
        [["a"], [1, 2], [1, None]],
    ),
    (
        {"prefixItems": [{"const": 1}, {"const": 2}, {"const": 3}], "minItems": 2},
        [[1, 2], [1, 2, 3]],
        [[], [1], [1, 3], [1, 2, 3, 4]],
    ),
    ({"prefixItems": [{"const": 1}], "minItems": 2, "maxItems": 3}, [[1, "x"], [1, 2, 3]], [[1], [1, 2, 3, 4]]),
    (
        {"items": [{"type": "integer"}, {"type": "string"}], "additionalItems": False},
        [[], [1], [1, "a"]],
        [[1, "a", 2]],
    ),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 1]]),
    ({"type": "object"}, [{}, {"a": 1, "é": {"x": [None]}}], [[], 1]),
    (
        obj({"a": {"type": "integer"}, "b": {"type": "string"}}, ["a"]),
        [{"a": 1}, {"a": 1, "b": "x"}],
        [{}, {"b": "x"}, {"a": "1"}, {"a": 1, "c": 2}],
    ),
    (
        obj({"a": {}, "b": {}, "c": {}}, ["b"]),
        [{"b": 1}, {"a": 1, "b": 2}, {"b": 2, "c": 3}, {"a": 1, "b": 2, "c": 3}],
        [{}, {"a": 1}, {"a": 1, "c": 3}],
    ),
    (
        obj({"a": {"type": "null"}, "b": {"type": "null"}}),
        [{}, {"a": None}, {"b": None}, {"a": None, "b": None}],
        [{"c": None}],
    ),
    (
        obj({"a": {"type": "integer"}}, additionalProperties={"type": "boolean"}),
        [{}, {"a": 1}, {"x": True}, {"a": 1, "x": True, "aa": False}],
        [{"a": True}, {"x": 1}],
    ),
    (obj({"a": {"const": 1}}, additionalProperties=True), [{"a": 1, "b": [1]}, {"b": 2}], [{"a": 2}]),
    (obj({"a": {"const": 1}}, ["b"]), [{"b": 0}, {"a": 1, "b": {}}], [{"a": 1}, {}]),
    ({"additionalProperties": {"type": "integer"}}, [{}, {"x": 1, "y": 2}], [{"x": "a"}]),
    ({"type": "object", "additionalProperties": False}, [{}], [{"a": 1}]),
    (
        {"type": "object", "minProperties": 1, "maxProperties": 2},
        [{"a": 1}, {"a": 1, "b": 2}],
        [{}, {"a": 1, "b": 2, "c": 3}],
    ),
    ({"required": ["a"]}, [{"a": 1}], [{}]),
    ({"properties": {'q"\\\n': {"const": 1}}}, [{'q"\\\n': 1}, {}], [{"q": 1}]),
    ({"anyOf": [{"type": "integer"}, {"maxLength": 2}]}, [5, "ab"], ["abc", None]),
    ({"type": "integer", "anyOf": [{"minimum": 10}, {"maximum": 2}]}, [10, 2, -5], [5]),
    (
        obj({"a": {"const": 1}, "b": {"const": 2}}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
        [{"a": 1}, {"b": 2}, {"a": 1, "b": 2}],
        [{}],
    ),
    (
        obj({"a": {"const": 1}, "b": {"const": 2}}, oneOf=[{"required": ["a"]}, {"required": ["b"]}]),
        [{"a": 1}, {"b": 2}],
        [{}, {"a": 1, "b": 2}],
    ),
    (
        SHAPES,
        [{"kind": "circle", "r": 1.5}, {"kind": "square", "side": 2}],
        [{"kind": "circle", "side": 2}, {"kind": "x"}],
    ),
    ({"type": "integer", "format": "int32"}, [0, 2**31 - 1, -(2**31)], [2**31, -(2**31) - 1, 1.5]),
    ({"type": "integer", "format": "int64", "minimum": 5}, [5, 2**63 - 1], [4, 2**63]),
    ({"type": ["number", "null"], "format": "double", "maximum": 2}, [1.5, -3, None], [2.5, "a"]),
    ({"allOf": [{"type": "integer", "format": "int32"}, {"enum": [7, 2**40]}]}, [7], [2**40]),
    ({"properties": {}, "minProperties": 1}, [{"a": 1}, {"a": 1, "b": 2}], [{}]),
    (obj({"a": {"const": 1}}, ["a"], minProperties=2), [{"a": 1, "b": 2}], [{"a": 1}, {"b": 1, "c": 2}]),
    ({"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]}, ["a", 1, None], [1.5]),
    ({"oneOf": [{"maximum": 3}, {"minimum": 3.5}]}, [3, 4, -1], [3.25]),
    ({"oneOf": [{"minLength": 5}, {"maxLength": 2}]}, ["a", "abcde"], ["abc"]),
    ({"oneOf": [{"const": 1}, {"const": True}, {"enum": ["a", "b"]}]}, [1, True, "b"], [False]),
    ({"allOf": [{"type": "number"}, {"type": "integer"}, {"minimum": 3}, {"maximum": 9.5}]}, [3, 9], [2, 10, 3.5]),
    (
        {"allOf": [obj({"a": {"type": "integer"}}, ["a"]), obj({"b": {"maxLength": 1}, "a": {"minimum": 5}}, ["b"])]},
        [{"a": 5, "b": "x"}],
        [{"a": 4, "b": "x"}, {"a": 5}],
    ),
    (
        {"allOf": [obj({"a": {}}, additionalProperties=False), obj({"b": {}, "a": {"type": "null"}})]},
        [{}, {"a": None}],
        [{"a": 1}, {"b": 1}, {"a": None, "b": 1}],
    ),
    ({"allOf": [{"enum": [1, 2, 3]}, {"enum": [2.0, 3, 4]}, {"const": 3}]}, [3], [2]),
    (
        {"allOf": [{"items": {"type": "integer"}}, {"prefixItems": [{"minimum": 2}], "items": True}]},
        [[2], [2, 0]],
        [[1], ["a"]],
    ),
    ({"allOf": [{"multipleOf": 4}, {"multipleOf": 6, "type": "integer"}]}, [12, -24, 0], [4, 6]),
    (
        {"$defs": {"s": {"maxLength": 1}}, "properties": {"a": {"$ref": "#/$defs/s", "minLength": 1}}},
        [{"a": "x"}],
        [{"a": ""}],
    ),
    ({"definitions": {"a/b~c %": {"const": 1}}, "$ref": "#/definitions/a~1b~0c%20%25"}, [1], [2]),
    (
        TREE,
        [{"v": 1}, {"v": 1, "children": []}, {"v": 1, "children": [{"v": 2, "children": [{"v": 3}]}, {"v": 4}]}],
        [{"children": []}],
    ),
    (LINKED, [{"v": 1, "next": None}, {"v": 1, "next": {"v": 2, "next": None}}], [{"v": 1}, {"v": 3, "next": None}]),
    (
        {
            "title": "T",
            "description": "d",
            "default": 1,
            "examples": [],
            "$schema": "x",
            "$id": "y",
            "x-note": 1,
            "type": "null",
        },
        [None],
        [1],
    ),
]
CASES = [case for case in CASES if case[1] is not None]


def layouts(value):
    yield json.dumps(value, ensure_ascii=False)
    yield json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    yield json.dumps(value, ensure_ascii=False, indent=2)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_cases(number):
    schema, writable, not_writable = CASES[number]
    dfa = compile_json_schema(schema)
    fixed = compile_json_schema(json.dumps(schema), blanks="fixed")
    validator = jsonschema.Draft202012Validator(
        schema if not isinstance(schema, dict) or not isinstance(schema.get("items"), list) else {}
    )
    for value in writable:
        assert validator.is_valid(value), value
        assert fixed.accepts(json.dumps(value, ensure_ascii=False).encode()), value
        for spelled in layouts(value):
            assert dfa.accepts(spelled.encode()), spelled
            assert not dfa.accepts(b" " + spelled.encode()) and not dfa.accepts(spelled.encode() + b"\n")
    for value in not_writable:
        for spelled in layouts(value):
            assert not dfa.accepts(spelled.encode()), spelled
    rng = random.Random(number)
    for automaton in (dfa, fixed):
        guide = TokenGuide(automaton, JSON_TRIE, [EOS])
        for _ in range(6):
            written = random_text(guide, rng, 150)
            if written is not None:
                assert validator.is_valid(json.loads(written)), written


leaves = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "integer", "minimum": -7, "maximum": 250},
        {"type": "number", "exclusiveMinimum": -0.5, "maximum": 12.25},
        {"type": "number", "minimum": 0.001},
        {"type": "string", "maxLength": 3},
        {"type": "string", "pattern": "^[a-c]\\d?"},
        {"type": "string", "minLength": 1, "pattern": 'x|"$'},
        {"type": ["boolean", "null"]},
        {"enum": ["a", 1, None, 0.25]},
        {"const": 'é"'},
        {"type": "integer", "multipleOf": 3, "minimum": 1},
    ]
)
names = st.sampled_from(["a", "b", "é", 'q"'])


def composites(inner):
    objects = st.builds(
        lambda props, needed, extra: {
            "type": "object",
            "properties": props,
            "required": [n for n in props if n in needed],
            **extra,
        },
        st.dictionaries(names, inner, max_size=3),
        st.sets(names),
        st.one_of(st.just({}), st.builds(lambda s: {"additionalProperties": s}, st.one_of(inner, st.booleans()))),
    )
    arrays = st.builds(
        lambda item, low, span: {"type": "array", "items": item, "minItems": low, "maxItems": low + span},
        inner, st.integers(0, 2), st.integers(0, 2),
    )  # fmt: skip
    tuples = st.builds(
        lambda prefix, low: {"type": "array", "prefixItems": prefix, "minItems": min(low, len(prefix))},
        st.lists(inner, min_size=1, max_size=3), st.integers(0, 3),
    )  # fmt: skip
    pairs = st.lists(inner, min_size=1, max_size=2)
    return st.one_of(
        objects, arrays, tuples, st.builds(lambda p: {"anyOf": p}, pairs), st.builds(lambda p: {"allOf": p}, pairs)
    )


schemas = st.recursive(leaves, composites, max_leaves=5)


@settings(max_examples=120)
@given(schemas, st.randoms(use_true_random=False))
def test_drawn_schemas_generate_only_valid_values(schema, rng):
    try:
        dfa = compile_json_schema(schema)
    except GrammarError as error:
        assert "allows no value" in str(error) or "beside an enum" in str(error)
        return
    guide = TokenGuide(dfa, JSON_TRIE, [EOS])
    validator = jsonschema.Draft202012Validator(schema)
    for _ in range(3):
        written = random_text(guide, rng, 150)
        if written is not None:
            assert validator.is_valid(json.loads(written)), written


REFUSED = [
    ({"type": "foo"}, "not a JSON type"),
    ({"type": "object", "properties": {"a": {"type": "strng"}}}, "#/properties/a/type"),
    ({"maxlength": 3}, "'maxlength' is not supported"),
    ({"not": {}}, "'not'"),
    ({"if": {}, "then": {}}, "'if'"),
    ({"patternProperties": {}}, "patternProperties"),
    ({"propertyNames": {}}, "propertyNames"),
    ({"contains": {}}, "contains"),
    ({"dependentRequired": {}}, "dependentRequired"),
    ({"unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"format": "uri"}, "'uri' is not supported"),
    ({"type": "string", "format": "int64"}, "'int64' is not supported"),
    ({"type": "integer", "format": []}, "must be a string"),
    ({"properties": {}, "additionalProperties": False, "minProperties": 1}, "allows no value"),
    ({"pattern": "(?=a)"}, "look-ahead"),
    ({"pattern": "("}, "never closed"),
    ({"pattern": 3}, "must be a string"),
    ({"multipleOf": 0.01}, "multipleOf"),
    ({"multipleOf": 0}, "above 0"),
    ({"minLength": -1}, "at least 0"),
    ({"minItems": True}, "at least 0"),
    ({"minimum": "1"}, "finite number"),
    ({"exclusiveMinimum": True, "minimum": 1}, "finite number"),
    ({"required": "a"}, "list of property names"),
    ({"properties": []}, "properties"),
    ({"prefixItems": {}}, "prefixItems"),
    ({"enum": "ab"}, "list of values"),
    ({"enum": [float("nan")]}, "not a JSON number"),
    ({"const": "\ud800"}, "surrogate"),
    ({"anyOf": []}, "non-empty list"),
    ({"items": 3}, "a schema is an object"),
    ({"$ref": "http://x/y"}, "not supported"),
    ({"$ref": "#/$defs/none"}, "leads nowhere"),
    ({"$ref": "#"}, "allows no value"),
    ({"allOf": [{"$ref": "#"}]}, "allows no value"),
    ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "nested deeper"),
    (False, "allows no value"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "allows no value"),
    ({"enum": []}, "allows no value"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "allows no value"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "oneOf"),
    (obj({"a": {}}, minProperties=1), "minProperties"),
    ({"type": "object", "minProperties": 2}, "different names"),
    ({"enum": [[1]], "minItems": 1}, "beside an enum"),
    ("{", "not JSON"),
    ("[1]", "a schema is an object"),
    ("[" * 100_000, "not JSON"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_F57_malformed_unsupported_or_impossible_schemas_are_refused_by_name(number):
    schema, message = REFUSED[number]
    with pytest.raises(GrammarError, match=message.replace("$", r"\$")):
        compile_json_schema(schema)


def test_F57_exploding_schemas_are_refused_after_bounded_work():
    wide = {
        "$defs": {"n": {"properties": {c: {"$ref": "#/$defs/n"} for c in "abcdefghijklmnopqrstuvwxyz"}}},
        "$ref": "#/$defs/n",
    }
    pairs = {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": i}]} for i in range(10)]}
    deep = {}
    for _ in range(3000):
        deep = {"items": deep}
    heavy = {"properties": {str(n): {"pattern": f"^(a|b)*a(a|b){{7}}{n}$"} for n in range(200)}}
    for schema in (wide, pairs, deep, heavy):
        with pytest.raises(GrammarError, match="unfolds|combinations|too large|too long|too deeply|taken together"):
            compile_json_schema(schema)
    with pytest.raises(GrammarError, match="blanks"):
        compile_json_schema({}, blanks="none")


def test_F56_empty_objects_empty_arrays_and_long_strings():
    assert compile_json_schema({"type": "object", "properties": {}}).accepts(b"{}")
    assert compile_json_schema({"type": "array", "maxItems": 0}).accepts(b"[]")
    for schema, text in (({"type": "object", "properties": {}}, "{}"), ({"type": "array", "maxItems": 0}, "[]")):
        guide = TokenGuide(compile_json_schema(schema), JSON_TRIE, [EOS])
        assert random_text(guide, random.Random(0)).decode() == text
    long = compile_json_schema({"type": "string", "maxLength": 2000})
    assert long.accepts(json.dumps("é" * 2000, ensure_ascii=False).encode())
    assert not long.accepts(json.dumps("x" * 2001).encode())
    with pytest.raises(GrammarError, match="too long|too large"):
        compile_json_schema({"type": "string", "maxLength": 100_000})
