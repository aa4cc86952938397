"""Calls in an answer, however the answer is cut into pieces."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_template import ChatTemplate
from structured import compile_json_schema
from tool_calls import LAYOUTS, ForcedCall, ToolParser, find_layout, forced_schema

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
    ("<tool_call>no json</tool_call>" + call("f"), "<tool_call>no json</tool_call>", [("f", {})]),
    (call("f").removesuffix("</tool_call>"), "", [("f", {})]),  # the model ended without closing
    ('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    (call("f", '{"x": "</tool"}'), "", [("f", {"x": "</tool"})]),
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
    assert find_layout(SimpleNamespace(apply_chat_template=template.render)) == layout


def test_a_demanded_call():
    assert parse(ForcedCall("f"), ['{"x"', ": 1}"]) == ("", [("f", {"x": 1})])
    assert parse(ForcedCall(None), '{"name": "g", "arguments": {}}') == ("", [("g", {})])
    assert parse(ForcedCall("f"), '{"x": ') == ('{"x": ', [])
    accepts = compile_json_schema(json.dumps(forced_schema(TOOLS, None)))
    for text, allowed in ((b'{"name": "g", "arguments": {}}', True), (b'{"name": "h", "arguments": {}}', False)):
        assert bool(accepts.accepting[accepts.run(1, text)]) == allowed
    assert forced_schema(TOOLS, "g") == {"type": "object", "properties": {}}
