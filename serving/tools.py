"""Calls of tools: from the model's text back to what the API returns.

The problem. A model calls a tool by writing text, in the layout that its training used. The API promises the caller a
list of calls with JSON arguments, and in a stream the text of a call must not be shown as if it were an answer.

The idea. The chat template knows the layout, since it must print the calls of earlier turns. So an invented call is
rendered, and what surrounds it in the rendered text tells which of the known layouts this is.

    rendered    <|im_start|>assistant\n<tool_call>\n{"name": "probe", "arguments": {"x": 1}}\n</tool_call><|im_end|>
                                       └─ opens ─┘ └──────── JSON, key "arguments" ───────┘ └─ closes ─┘

A call ends where its JSON ends, whatever marks its strings hold. What is no call of an offered tool is text, and a
later call is still found. One that `tool_choice` demands needs no layout: the output is constrained to its JSON. Left
out: layouts marked by control tokens (their text is removed before it gets here), arguments streamed in pieces.
"""

from __future__ import annotations

import functools
import json
import math
import re
import uuid
from dataclasses import dataclass
from typing import Any

from automata import GrammarError
from formats.chat_template import TemplateError
from tokenizer import Tokenizer

PROBE = "probe_function_name"
SCHEMAS_BY_NAME = ("properties", "$defs", "definitions")
CONSTANTS = ("const", "enum", "default", "examples")  # what stands there is no schema, whatever it looks like
OPEN_ENDED = {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
DECLARING = OPEN_ENDED | {"properties", "enum", "const"}  # a schema without these declares no parameter
JSON_BRACES = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*("|\\?\Z)|[{}]', re.DOTALL)  # between the strings
BEGINNING = re.compile(r'\s*(?:\{\s*(?:["}].*)?)?', re.DOTALL)  # of an object, as far as it goes
OUTSIDE, INSIDE, BEHIND = "outside", "inside", "behind"  # a call


@dataclass(frozen=True)
class Layout:
    """How a model writes a call: between two marks, or as an answer that begins with the JSON (marks empty)."""

    opens: str
    closes: str
    arguments: str  # the key that holds them


FORCED = Layout("", "", "arguments")  # of a call that tool_choice demands: the output is constrained to it
LAYOUTS = (Layout("<tool_call>", "</tool_call>", "arguments"), Layout("", "", "parameters"), FORCED)


@functools.lru_cache(maxsize=8)  # models
def find_layout(tokenizer: Tokenizer) -> Layout | None:
    """The layout that this model's chat template prints, None if it is not one of LAYOUTS."""
    call = {"type": "function", "id": "abcdefghi", "function": {"name": PROBE, "arguments": {"probe_key": 1}}}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=False)
    except TemplateError:
        return None
    for layout in LAYOUTS:
        body = rf'{{"name":"{PROBE}","{layout.arguments}":{{"probe_key":1}}}}'
        if layout.opens + body + layout.closes in re.sub(r"\s", "", text):
            return layout
    return None


def api_call(name: str, arguments: dict) -> dict:
    """A call as the API words it."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


class ToolParser:
    """Separates an answer, as it arrives, into text and calls."""

    def __init__(self, layout: Layout | None, tools: list[dict]):
        self.layout, self.names = layout or Layout("", "", ""), [tool["function"]["name"] for tool in tools]
        self._text = ""  # not decided yet
        self._state = INSIDE if layout is not None and not layout.opens else OUTSIDE
        self._at = self._depth = 0  # of the object being read: how far, and how many braces are open there

    def feed(self, text: str, last: bool = False) -> tuple[str, list[dict]]:
        """Text that is certain to be text, and calls that are complete; of the last piece, everything."""
        self._text += text
        opens, closes = self.layout.opens, self.layout.closes
        shown, calls = "", []
        while True:
            if self._state == OUTSIDE:
                at = self._text.find(opens) if opens else -1
                if at < 0:
                    end = len(self._text) - (0 if last else _possible_beginning(self._text, opens))
                    shown, self._text = shown + self._text[:end], self._text[end:]
                    return shown, calls
                shown, self._text, self._state = shown + self._text[:at], self._text[at + len(opens) :], INSIDE
                self._at = self._depth = 0
            elif self._state == INSIDE:
                end = self._object_end()
                if end is None and not last and BEGINNING.fullmatch(self._text):
                    return shown, calls
                if call := self._read(self._text[:end]):
                    calls.append(call)
                    self._text, self._state = self._text[end or len(self._text) :], BEHIND
                else:  # the mark was only mentioned; another may follow
                    shown, self._state = shown + opens, OUTSIDE
            else:
                rest = self._text.lstrip()  # blanks and the closing mark belong to the call
                if not last and (not rest or (closes.startswith(rest) and rest != closes)):
                    return shown, calls
                unclosed = not rest.startswith(closes) and not closes.startswith(rest)
                self._text, self._state = self._text if unclosed else rest[len(closes) :], OUTSIDE

    def finish(self) -> tuple[str, list[dict]]:
        """The answer is over: a call that was never closed counts if it is whole, else it is text."""
        return self.feed("", last=True)

    def _object_end(self) -> int | None:
        """Where the JSON object that the text begins with ends, if it does. Goes on where it left off."""
        for piece in JSON_BRACES.finditer(self._text, self._at):
            if piece[0] not in "{}" and not piece[1]:  # a string without its end
                return None
            self._at = piece.end()
            self._depth += {"{": 1, "}": -1}.get(piece[0], 0)
            if self._depth <= 0:
                return self._at
        return None

    def _read(self, body: str) -> dict | None:
        try:
            # Python's reader takes NaN and 1e999, the caller's may not.
            value = json.loads(body, parse_constant=_finite, parse_float=_finite)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or value.get("name") not in self.names:
            return None
        arguments = value.get(self.layout.arguments)
        return api_call(value["name"], arguments) if isinstance(arguments, dict) else None


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is no JSON")
    return value


def _possible_beginning(text: str, mark: str) -> int:
    """How many of the last characters of `text` may be the beginning of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)


def forced_schema(tools: list[dict]) -> dict:
    """The JSON Schema of a call that must be made, of any of the tools, in the layout FORCED."""
    calls = []
    for i, tool in enumerate(tools):
        name = tool["function"]["name"]
        try:
            arguments = _moved(_parameters(tool), f"#/anyOf/{i}/properties/arguments")
        except RecursionError:
            raise GrammarError(f"the parameters of tool {name!r} are nested too deeply; flatten them") from None
        properties = {"name": {"const": name}, "arguments": arguments}
        call = {"type": "object", "properties": properties, "required": list(properties)}
        calls.append(call | {"additionalProperties": False})
    return {"anyOf": calls}


def _parameters(tool: dict) -> dict:
    """Arguments are an object, whether the schema says so or not; a function takes none that it does not declare."""
    parameters = dict(tool["function"].get("parameters") or {})
    kind = parameters.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise GrammarError(f"the parameters of tool {tool['function']['name']!r} are no object but {kind!r:.60}")
    parameters["type"] = "object"
    if not DECLARING & parameters.keys() and not parameters.get("required"):
        parameters["properties"] = {}
    if "properties" in parameters and not OPEN_ENDED & parameters.keys():
        parameters["additionalProperties"] = False
    return parameters


def _moved(schema: Any, ref_path: str) -> Any:
    """A schema with its references into itself led to where it will stand: "#/$defs/a" -> ref_path + "/$defs/a"."""
    if isinstance(schema, list):
        return [_moved(part, ref_path) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            result[key] = ref_path + value[1:]
        elif key in SCHEMAS_BY_NAME and isinstance(value, dict):  # its keys are names, even one like "enum" or "$ref"
            result[key] = {name: _moved(part, ref_path) for name, part in value.items()}
        else:
            result[key] = value if key in CONSTANTS else _moved(value, ref_path)
    return result
