"""JSON Schema, Lark and GBNF: what is generated is valid, what is valid can be written, the rest is refused by name."""

import functools
import json
import random
import time

import hypothesis.strategies as st
import jsonschema
import pytest
from grammar_walks import BYTE_GUIDES, JSON_GUIDES, accepts, guide_for, random_text
from hypothesis import given, settings

from automata import GrammarError
from benchmarks import maskbench
from formats import grammars


def obj(properties, required=(), **more):
    return {"type": "object", "properties": properties, "required": list(required), **more}


CLOSED, INT32 = {"additionalProperties": False}, {"type": "integer", "format": "int32"}
TREE = obj({"v": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#"}}}, ["v"], **CLOSED)
LINK = obj({"v": {"enum": [1, 2]}, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}, ["v", "next"])
KINDS = [obj({"kind": {"const": kind}, size: {"type": "number"}}, ["kind", size]) for kind, size in ("or", "as")]

# (schema, values that must be writable, values that must not be)
CASES = [
    ({}, [None, True, 1.5, "x", [1, [2]], {"a": {"b": []}}], []),
    ({"type": "null"}, [None], [0, False, ""]),
    ({"type": ["string", "null"]}, ["", None], [1]),
    ({"type": "integer"}, [0, -1, 123, 2**63 - 1], [1.5, "1", True]),
    ({"type": "integer", "minimum": -3, "maximum": 12}, [-3, -1, 0, 9, 10, 12], [-4, 13, 100, -10]),
    ({"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 120}, [6, 10, 99, 100, 119], [5, 120, 0, -6]),
    ({"type": "number", "minimum": 0.05, "maximum": 37.5}, [0.05, 0.1, 1, 9.99, 37.5], [0.04, 0, 37.51, 38, -1]),
    ({"type": "integer", "multipleOf": 7}, [0, 7, 700], [1, 13, -6]),
    ({"type": "integer", "format": "int32"}, [0, 2**31 - 1, -(2**31)], [2**31, -(2**31) - 1]),
    ({"type": "integer", "format": "int64", "minimum": 5}, [5, 2**63 - 1], [4, 2**63]),
    ({"type": "string"}, ["", 'a"b\\c', "é😀\n\t", "x" * 300], [1]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é😀", '\n"\\'], ["a", "abcd", "😀"]),
    ({"type": "string", "pattern": "^\\d{3}-\\w+$", "maxLength": 6}, ["123-a", "123-ab"], ["123-abc", "12-a"]),
    ({"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, ["ab", "a-b"], ["a", "b", "ba"]),
    ({"type": "string", "format": "date"}, ["2024-02-28"], ["2024-13-01", "24-1-1"]),
    ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    ({"type": "string", "format": "ipv4"}, ["127.0.0.1"], ["256.0.0.1", "1.2.3"]),
    ({"enum": ["red", 1, None, True, [1, {"a": 2}]]}, ["red", 1, None, True, [1, {"a": 2}]], ["blue", 2, False, [1]]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}, [[1, 2]], [[1], [1] * 4, ["a", 1]]),
    ({"type": "array", "maxItems": 0}, [[]], [[1]]),
    ({"prefixItems": [{"type": "integer"}], "items": {"type": "null"}}, [[], [1, None]], [["a"], [1, 2]]),
    ({"type": "object"}, [{}, {"a": 1, "é": {"x": [None]}}], [[], 1]),
    (obj({}), [{}, {"a": 1}], [[]]),
    (obj({}, **CLOSED), [{}], [{"a": 1}]),
    (obj({"a": {"type": "integer"}, "b": {"type": "string"}}, ["a"]), [{"a": 1}, {"a": 1, "c": 2}], [{}, {"a": "1"}]),
    (obj({"a": {}, "b": {}}, ["b"], **CLOSED), [{"b": 1}, {"a": 1, "b": 2}], [{}, {"a": 1}, {"b": 1, "c": 3}]),
    (obj({}, additionalProperties={"type": "boolean"}), [{}, {"x": True}], [{"x": 1}]),
    (obj({"a": {"const": 1}}, ["a"], minProperties=2), [{"a": 1, "b": 2}], [{"a": 1}]),
    (obj({}, patternProperties={"^a": {"type": "integer"}}, **CLOSED), [{}, {"ab": 1}], [{"b": 1}, {"ab": "x"}]),
    ({"type": "integer", "anyOf": [{"minimum": 10}, {"maximum": 2}]}, [10, 2, -5], [5]),
    ({"oneOf": KINDS}, [{"kind": "o", "r": 1.5}, {"kind": "a", "s": 2}], [{"kind": "o", "s": 2}, {"kind": "x"}]),
    (
        {"allOf": [obj({"a": {"type": "integer"}}, ["a"]), obj({"b": {"maxLength": 1}}, ["b"])]},
        [{"a": 5, "b": "x"}],
        [],
    ),
    (TREE, [{"v": 1}, {"v": 1, "children": [{"v": 2, "children": [{"v": 3}]}]}], [{"children": []}, {"v": "x"}]),
    ({"$defs": {"n": LINK}, "$ref": "#/$defs/n"}, [{"v": 1, "next": {"v": 2, "next": None}}], [{"v": 3, "next": None}]),
    (
        obj({"$schema": {"type": "null"}, "enum": INT32}),
        [{"$schema": None}, {"enum": 1}],
        [{"$schema": 1}, {"enum": 2**31}],
    ),
    ({"definitions": {"a/b": {"const": 1}}, "$ref": "#/definitions/a~1b"}, [1], [2]),
    ({"title": "T", "default": 1, "$schema": "x", "x-note": 1, "anything": {"not": 3}, "type": "null"}, [None], [1]),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_valid_values_can_be_written_and_only_valid_ones_are(number):
    schema, writable, not_writable = CASES[number]
    for value in writable:
        for layout in ({}, {"separators": (",", ":")}, {"indent": 2}):
            text = json.dumps(value, ensure_ascii=False, **layout)
            assert accepts(BYTE_GUIDES, text, json_schema=schema), text
            assert not accepts(BYTE_GUIDES, " " + text, json_schema=schema)
            assert not accepts(BYTE_GUIDES, text + "\n", json_schema=schema)
    for value in not_writable:
        assert not accepts(BYTE_GUIDES, json.dumps(value, ensure_ascii=False), json_schema=schema), value
    validator, rng = jsonschema.Draft202012Validator(schema), random.Random(number)
    guide = guide_for(JSON_GUIDES, json_schema=schema)
    for _ in range(6):
        text = random_text(guide, rng, 150)
        assert text is None or validator.is_valid(json.loads(text)), text


LEAVES = [
    {"type": "integer", "minimum": -7, "maximum": 250},
    {"type": "number", "exclusiveMinimum": -0.5, "maximum": 12.25},
    {"type": "string", "maxLength": 3},
    {"type": "string", "pattern": "^[a-c]\\d?"},
    {"type": "string", "minLength": 1, "pattern": 'x|"$'},
    {"type": ["boolean", "null"]},
    {"enum": ["a", 1, None, 0.25]},
    {"const": 'é"'},
    {"type": "integer", "multipleOf": 3, "minimum": 1},
]
names = st.sampled_from(["a", "b", "é", 'q"'])


def composites(inner):
    extra = st.one_of(st.just({}), st.builds(lambda s: {"additionalProperties": s}, st.one_of(inner, st.booleans())))
    objects = st.builds(
        lambda props, needed, more: obj(props, [n for n in props if n in needed], **more),
        st.dictionaries(names, inner, max_size=3),
        st.sets(names),
        extra,
    )
    arrays = st.builds(
        lambda item, low, span: {"type": "array", "items": item, "minItems": low, "maxItems": low + span},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    pairs = st.lists(inner, min_size=1, max_size=2)
    combined = st.builds(lambda keyword, parts: {keyword: parts}, st.sampled_from(["anyOf", "allOf", "oneOf"]), pairs)
    return st.one_of(objects, arrays, combined)


@settings(max_examples=120, deadline=None)
@given(st.recursive(st.sampled_from(LEAVES), composites, max_leaves=5), st.randoms(use_true_random=False))
def test_drawn_schemas_generate_only_valid_values(schema, rng):
    try:
        guide = guide_for(JSON_GUIDES, json_schema=schema)
    except GrammarError:
        return
    validator = jsonschema.Draft202012Validator(schema)
    for _ in range(3):
        text = random_text(guide, rng, 150)
        assert text is None or validator.is_valid(json.loads(text)), text


REFUSED = [
    ({"type": "foo"}, "foo"),
    *(({keyword: {}}, keyword) for keyword in ("not", "if", "propertyNames", "contains", "dependentRequired")),
    ({"unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"properties": {"a": {"not": {}, "x-guidance": {"lenient": True}}}, "x-guidance": {"lenient": True}}, "not"),
    ({"type": "string", "format": "nothing"}, "nothing"),
    ({"pattern": "(?=a)"}, "look-ahead"),
    ({"pattern": "("}, "unclosed group"),
    ({"multipleOf": 0}, "multiple"),
    ({"minLength": -1}, "minLength"),
    ({"minimum": "1"}, "minimum"),
    ({"minimum": 10**400}, "out of range"),
    *(({key: wrong}, key) for key in ("required", "properties", "allOf", "enum") for wrong in ("a", 5)),
    ({"enum": [float("nan")]}, "expected value"),
    ({"$ref": "http://x/y"}, "http://x/y"),
    ({"$ref": "#/$defs/none"}, "/\\$defs/none"),
    ({"$ref": "#"}, "no text at all"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}], "x-guidance": {"coerce_one_of": True}}, "oneOf.*anyOf"),
    (obj({"a": {}}, minProperties=1), "minProperties|maxProperties"),
    ({"type": "object", "minProperties": 2}, "different names"),
]


@pytest.mark.parametrize("schema, message", REFUSED)
def test_malformed_unsupported_or_impossible_schemas_are_refused_by_name(schema, message):
    with pytest.raises(GrammarError, match=message):
        guide_for(BYTE_GUIDES, json_schema=schema)


def nested(depth: int, keyword: str) -> dict:
    schema = {"type": "null"}
    for _ in range(depth):
        schema = {keyword: schema if keyword == "items" else [schema]}
    return schema


NUMBERS = "minimum exclusiveMaximum multipleOf minLength maxLength minItems maxItems minProperties maxProperties const"
NUMBERS = NUMBERS.split()
REFERENCES = {c: {"$ref": f"#/$defs/{d}"} for c in "abcdefgh" for d in "abcdefgh"}
LARGE = {
    "multiple of 9e14": {"type": "integer", "multipleOf": 9e14},
    **{f"a number of 400 digits as {key}": {key: sign * 10**400} for key in NUMBERS for sign in (1, -1)},
    "multiples far apart": {"allOf": [{"multipleOf": 5e-324}, {"multipleOf": 1e300}]},
    "one large multiple": {"type": "integer", "multipleOf": 900_000},
    "many multiples": {"type": "integer", "allOf": [{"multipleOf": p} for p in (2, 3, 5, 7, 11, 13, 17, 19, 23)]},
    "multiples of a property": {"allOf": [obj({"a": {"multipleOf": p}}) for p in (7, 11, 13, 17, 19, 23, 29)]},
    "many patterns": {"type": "string", "allOf": [{"pattern": f"a{{{n}}}b"} for n in range(30)]},
    "patterns of a property": {"allOf": [obj({"a": {"pattern": f"a{{{n}}}b"}}) for n in range(30)]},
    "patterns beside one another": functools.reduce(
        lambda s, n: {"pattern": f"[a-z]{{0,{n}}}.*x{n}", "anyOf": [s]}, range(14), {}
    ),
    "many pattern properties": obj({}, patternProperties={f"^a{n}$": True for n in range(500)}),
    "a const of 1 MB": {"const": "x" * 1_000_000},
    "a const of many parts": {"const": list(range(30_000))},
    "required names": {"type": "object", "required": [f"p{n}" for n in range(10_000)]},
    "references in a chain": {
        "$defs": {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(1900)},
        "$ref": "#/$defs/d0",
    },
    "a bomb behind many harmless parts": {
        "allOf": [{"multipleOf": p} for p in (7919, 7907, 7901)],
        "properties": {f"p{n}": {"not": {}} for n in range(1900)},
    },
    "an enum of many texts": {"enum": [f"text {n}" for n in range(100_000)]},
    "a long string": {"type": "string", "maxLength": 2000},
    "a huge string": {"type": "string", "minLength": 10**9, "maxLength": 10**9},
    "a huge array": {"type": "array", "minItems": 10**6, "items": {"type": "array", "minItems": 10**6}},
    **{f"{n} properties": obj({f"p{i}": True for i in range(n)}) for n in (2_000, 10_000, 20_000)},
    "many combinations": {"allOf": [{"anyOf": [{"minimum": n}, {"maximum": n}]} for n in range(20)]},
    "an exploding pattern": {"type": "string", "pattern": "^(a|b)*a(a|b){30}$"},
    "nested repeats": {"type": "string", "pattern": "^((a{0,300}){0,300}){0,300}$"},
    "a forced megabyte": {"type": "string", "pattern": "^a{1000000}$"},
    "deep items": nested(150, "items"),
    "deep allOf": nested(150, "allOf"),
    **{
        f"{word!r} many times": "start: " + word * (60_000 // len(word))
        for word in ('"', '\\"', "/", "\\/", "<", "\n", '"a"', "(")
    },
    "blank lines": "\n" * 60_000,
    "references everywhere": {"$defs": {c: obj(REFERENCES) for c in "abcdefgh"}, "$ref": "#/$defs/a"},
}


@pytest.mark.parametrize("name", LARGE)
def test_large_and_hostile_schemas_work_or_are_refused_at_once(name):
    began = time.perf_counter()
    try:
        kind = "grammar" if isinstance(LARGE[name], str) else "json_schema"
        guide = guide_for(BYTE_GUIDES, **{kind: LARGE[name]})
    except ValueError:
        guide = None
    assert time.perf_counter() - began < 2.5  # a second on an idle machine
    assert guide is None or guide.forced or guide.mask().any()


def test_the_size_of_a_schema_and_of_a_grammar_is_bounded():
    for shape in (
        {"json_schema": {"enum": ["x" * grammars.MAX_SCHEMA]}},
        {"grammar": "x" * (grammars.MAX_GRAMMAR + 1)},
    ):
        with pytest.raises(GrammarError, match="characters, more than"):
            guide_for(BYTE_GUIDES, **shape)


def test_blanks_between_marks_are_bounded():
    schema = obj({"a": {"type": "string"}})
    for blank in ("", " ", "\n", "\n" + " " * 12):
        assert accepts(BYTE_GUIDES, f'{{{blank}"a":{blank}"x"{blank}}}', json_schema=schema)
    for blank in ("  ", "\n\n", "\n" + " " * 13, "\t"):
        assert not accepts(BYTE_GUIDES, f'{{{blank}"a":"x"}}', json_schema=schema)
        assert not accepts(BYTE_GUIDES, f'{{"a":"x"{blank}}}', json_schema=schema)


def test_maskbench_counts_what_compiles_and_what_is_judged_wrongly():
    case = {"schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
    tests = [({"a": 1, "b": [2]}, True), ({"a": "x"}, False), ({}, False)]
    case["tests"] = [{"data": data, "valid": valid} for data, valid in tests]
    result = maskbench.judge(BYTE_GUIDES, case)
    assert result["too_strict"] == result["too_lenient"] == 0 and len(result["masks_us"]) == len('{"a": 1, "b": [2]}')
    case["tests"][0]["valid"], case["tests"][2]["valid"] = False, True
    result = maskbench.judge(BYTE_GUIDES, case)
    assert result["too_strict"] == result["too_lenient"] == 1
    assert maskbench.judge(BYTE_GUIDES, {"schema": {"not": {}}, "tests": []}) is None


GRAMMARS = {
    "Lark": 'start: "(" start ")" | WORD\nWORD: /[a-c]+/',
    "GBNF": 'root ::= "(" root ")" | word\nword ::= [a-c]+',
    "GBNF that begins with a comment": '# start: none\nroot ::= "(" root ")" | [a-c]+',
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_context_free_grammars_of_both_kinds(name):
    for text, valid in (("abc", True), ("((a))", True), ("((a)", False), ("(a))", False), ("", False), ("d", False)):
        assert accepts(BYTE_GUIDES, text, grammar=GRAMMARS[name]) == valid, text
    rng, guide = random.Random(0), guide_for(JSON_GUIDES, grammar=GRAMMARS[name])
    for text in filter(None, (random_text(guide, rng) for _ in range(20))):
        assert text.count("(") == text.count(")") and text.strip("()").strip("abc") == ""


@pytest.mark.parametrize(
    "grammar, message",
    [
        ("hello", "Lark grammar .GBNF would have a rule root. cannot be used"),
        ("root ::= nothing", "GBNF grammar.*'nothing'"),
        ("start: nothing", 'Lark.*unknown name: "nothing"'),
        ("root ::= " + "(" * 5000, "GBNF grammar.*recursion"),
        ("start: start", "no text at all"),
        ("start: <|im_end|>", "special token <\\|im_end\\|>"),
        ("start: <[3]>", "special token"),
        ("start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(3000)), "more than 1000 rules"),
        ("start: %json " + '{"items": ' * 5_000, "nested too deeply"),
        ("start: X\nX: " + " & ".join(["/a/"] * 30), "intersects"),
        ('start: %json {"allOf": [{"multipleOf": 97}, {"multipleOf": 89}, {"multipleOf": 83}]}', "multipleOf"),
        ('start: %json {"not": {}}', "not"),
        (" ", "Lark grammar"),
    ],
)
def test_unreadable_grammars_are_refused_with_the_reason(grammar, message):
    with pytest.raises(GrammarError, match=f"(?s){message}"):
        guide_for(BYTE_GUIDES, grammar=grammar)


def test_the_empty_text_is_complete_at_once_and_an_optional_one_is_not():
    assert guide_for(BYTE_GUIDES, grammar='start: ""').is_complete
    guide = guide_for(BYTE_GUIDES, grammar='start: "a"?')
    assert not guide.is_complete and guide.mask()[0]
    assert not guide_for(BYTE_GUIDES, grammar='start: "a"?', ignore_eos=True).mask()[0]


@pytest.mark.parametrize("size", [1, 500, 513, 2000])
@pytest.mark.parametrize("unit", ["ab", "é", "😀"])
def test_long_forced_runs_are_masked_as_short_ones_are(size, unit):
    guide = guide_for(JSON_GUIDES, grammar=f"start: /({unit}){{{size}}}/")
    assert random_text(guide, random.Random(0), 10_000) == unit * size
