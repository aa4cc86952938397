"""Calls in an answer, however the answer is cut into pieces."""

import json

import pytest
from grammar_walks import BYTE_GUIDES, accepts
from hypothesis import given
from hypothesis import strategies as st

from automata import GrammarError
from formats.chat_template import ChatTemplate
from serving.tools import FORCED, LAYOUTS, ToolParser, find_layout, forced_schema

MARKED, PARAMETERS, ARGUMENTS = LAYOUTS
TOOLS = [{"function": {"name": "f"}}, {"function": {"name": "g", "parameters": {"type": "object", "properties": {}}}}]


def parse(parser, pieces) -> tuple[str, list]:
    text, calls = "", []
    for piece in pieces:
        shown, made = parser.feed(piece)
        text, calls = text + shown, calls + made
    shown, made = parser.finish()
    return text + shown, [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls + made]


def call(name: str, arguments="{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CASES = [
    ("plain text <tool", "plain text <tool", []),
    ("a " + call("f", '{"x": 1}') + " b" + call("g"), "a  b", [("f", {"x": 1}), ("g", {})]),
    ("a " + call("unknown"), "a " + call("unknown"), []),
    (call("f", "[1]"), call("f", "[1]"), []),
    (call("f", '{"x": NaN}'), call("f", '{"x": NaN}'), []),
    ("<tool_call>no json</tool_call>" + call("f"), "<tool_call>no json</tool_call>", [("f", {})]),
    (call("f").removesuffix("</tool_call>"), "", [("f", {})]),  # the model ended without closing
    ('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    (call("f", '{"x": "</tool"}'), "", [("f", {"x": "</tool"})]),
    (call("f", '{"x": "a</tool_call>\\"}{"}') + "!", "!", [("f", {"x": 'a</tool_call>"}{'})]),
    ("Write <tool_call> first. " + call("g"), "Write <tool_call> first. ", [("g", {})]),
    ("Write <tool_call>{x} " + call("g"), "Write <tool_call>{x} ", [("g", {})]),
    ('Write <tool_call>{"x": ' + call("g"), 'Write <tool_call>{"x": ', [("g", {})]),
    (call("f") + " \n" + call("g") + "<tool_call>", " \n<tool_call>", [("f", {}), ("g", {})]),
]


@pytest.mark.parametrize("answer, text, calls", CASES)
@given(st.data())
def test_any_cut_gives_the_same_text_and_calls(answer, text, calls, data):
    pieces, rest = [], answer
    while rest:
        cut = data.draw(st.integers(1, min(12, len(rest))))
        pieces, rest = [*pieces, rest[:cut]], rest[cut:]
    assert parse(ToolParser(MARKED, TOOLS), pieces) == (text, calls)


def test_text_is_shown_as_soon_as_it_can_be_no_call():
    parser = ToolParser(MARKED, TOOLS)
    assert parser.feed("Look <tool") == ("Look ", []) and parser.feed("box") == ("<toolbox", [])
    assert parser.feed(" <tool_call> is") == (" <tool_call> is", [])


def test_an_answer_that_is_nothing_but_a_call():
    answer = '{"name": "f", "parameters": {"x": 1}}'
    assert parse(ToolParser(PARAMETERS, TOOLS), answer) == ("", [("f", {"x": 1})])
    assert parse(ToolParser(ARGUMENTS, TOOLS), answer) == (answer, [])
    assert parse(ToolParser(None, TOOLS), answer) == (answer, [])


@pytest.mark.parametrize(
    "printed, layout",
    [
        ('<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>', MARKED),
        ('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', PARAMETERS),
        ("call {{ f.name }} with {{ f.arguments }}", None),
        ("{{ raise_exception('no calls') }}", None),
        ("", None),
    ],
)
def test_the_layout_is_found_in_what_the_template_prints(printed, layout):
    source = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{% set f = c.function %}"
        + printed
        + "{% endfor %}{% endfor %}"
    )
    template = ChatTemplate({"default": source}, {})
    tokenizer = type("Tokenizer", (), {"apply_chat_template": template.render})  # (a class can be hashed)
    assert find_layout(tokenizer) == layout


def test_a_demanded_call():
    assert parse(ToolParser(FORCED, TOOLS), '{"name": "g", "arguments": {}}') == ("", [("g", {})])
    assert parse(ToolParser(FORCED, TOOLS), '{"name": ') == ('{"name": ', [])
    schema = forced_schema(TOOLS)
    for text, allowed in (('{"name": "g", "arguments": {}}', True), ('{"name": "h", "arguments": {}}', False)):
        assert accepts(BYTE_GUIDES, text, json_schema=schema) == allowed
    assert "additionalProperties" not in TOOLS[1]["function"]["parameters"]
    bare = {"function": {"name": "f", "parameters": {"type": "object", "description": "none"}}}
    assert forced_schema([bare])["anyOf"][0]["properties"]["arguments"]["additionalProperties"] is False


def test_references_within_the_parameters_hold_in_a_demanded_call():
    node = {"type": "object", "properties": {"n": {"$ref": "#/$defs/digit"}, "$ref": {"const": "#/$defs/digit"}}}
    node |= {"required": ["n"], "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}}}
    tools = [*TOOLS, {"function": {"name": "h", "parameters": node}}]
    schema = forced_schema(tools)
    assert accepts(BYTE_GUIDES, '{"name": "h", "arguments": {"n": 7, "$ref": "#/$defs/digit"}}', json_schema=schema)
    assert not accepts(BYTE_GUIDES, '{"name": "h", "arguments": {"n": 10}}', json_schema=schema)
    recursive = {"properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    schema = forced_schema([{"function": {"name": "r", "parameters": recursive}}])
    assert accepts(BYTE_GUIDES, '{"name": "r", "arguments": {"next": {"next": {}}}}', json_schema=schema)
    assert not accepts(BYTE_GUIDES, '{"name": "r", "arguments": {"name": "r", "arguments": {}}}', json_schema=schema)


@pytest.mark.parametrize("parameters", [None, {}, {"description": "none"}, {"anyOf": [{"required": ["a"]}, True]}])
def test_arguments_are_an_object_even_if_the_schema_says_nothing(parameters):
    schema = forced_schema([{"function": {"name": "f", "parameters": parameters}}])
    for arguments, allowed in (("{}", True), ("3", False), ("null", False), ('"x"', False)):
        assert accepts(BYTE_GUIDES, f'{{"name": "f", "arguments": {arguments}}}', json_schema=schema) == allowed


def test_parameters_nested_beyond_all_bounds_are_refused():
    deep = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(GrammarError, match="too deeply"):
        forced_schema([{"function": {"name": "f", "parameters": deep}}])


@pytest.mark.parametrize("parameters", [{"type": "object", "x-foo": 1}, {"$defs": {}}, {"type": ["object", "null"]}])
def test_a_tool_that_declares_nothing_takes_nothing(parameters):
    arguments = forced_schema([{"function": {"name": "f", "parameters": parameters}}])["anyOf"][0]["properties"]
    assert arguments["arguments"] == parameters | {
        "type": "object", "properties": {}, "additionalProperties": False
    }  # fmt: skip
    with pytest.raises(GrammarError, match="tool 'f' are no object but 'string'"):
        forced_schema([{"function": {"name": "f", "parameters": {"type": "string"}}}])


def test_numbers_that_are_no_json_make_no_call():
    for number in ("1e999", "-1e999", "NaN"):
        text = call("f", f'{{"x": {number}}}')
        assert parse(ToolParser(MARKED, TOOLS), [text]) == (text, [])
