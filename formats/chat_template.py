"""A conversation becomes a prompt: the model's chat template, run safely, with forged turns kept out.

The problem. Every chat model was trained on its own layout of turns, and ships that layout as a small Jinja program.
The engine must run it exactly (one newline too many costs quality), although the program is a stranger's, and half of
its input is written by a user, who may write "<|im_end|>" and then a turn of the system's.

The idea. (1) Text written by people is marked *before* rendering, so that it differs from what the template writes. A
control string in a message becomes one private-use character, and plain text again when the template is done:

    messages --hide--> user: "hi ⟦1⟧"  --template-->  "<|im_start|>user\nhi ⟦1⟧<|im_end|>\n"  --reveal--> text
               |                                          |              |    |
       "<|im_end|>" hidden in ⟦1⟧                  written by the     user's  written by the
                                                   template: an id    words   template: an id

(2) The template runs in Jinja's immutable sandbox, the way transformers runs it, and under a `Meter`: it pays for each
step of a loop and for each character that is built, and what might build too much is refused before it happens.

Source: transformers' documentation, "Chat templates". Left out: images and audio; shielding of added tokens that are
not control tokens (<think>, <tool_call>), since a conversation's own history holds them, and they open no turn.
"""

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer


class TemplateError(ValueError):
    """The conversation could not be rendered; the message says why, in the template's own words where it has some."""


class ControlStrings:
    """The spellings of a tokenizer's control tokens, prepared for finding them whole and in halves."""

    def __init__(self, strings: Iterable[str] = ()):
        spellings = sorted({item for item in strings if item}, key=len, reverse=True)  # the longest match wins
        self.spelled = re.compile("|".join(map(re.escape, spellings)) or r"(?!)")
        self.hidden = re.compile(f"{self.spelled.pattern}|[\U000f0000-\U0010ffff]")
        self.beginnings = tuple({item[:cut] for item in spellings for cut in range(1, len(item))})
        self.endings = tuple({item[cut:] for item in spellings for cut in range(1, len(item))})


class Shield:
    """Marks text in a conversation that must not turn into control tokens, one private-use character for each.

    Whole spellings are replaced. Halves ("<|im_" at the end of a text, "end|>" at the start) get a mark beside them
    that stands for nothing, so that a template that joins two texts joins no control string either. Private-use
    characters of the user's own are replaced too, so a mark is never mistaken.
    """

    end = "\U000f0000"  # marks the end of a message to be continued

    def __init__(self, controls: ControlStrings | None = None):
        self._controls = controls or ControlStrings()
        self.marks: dict[str, str] = {}  # what was written -> the private-use character that stands for it

    def hide(self, value: Any) -> Any:
        """`value` (nested lists and dicts) with every string in it shielded."""
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, Mapping):
            hidden = {self.hide(key): self.hide(item) for key, item in value.items()}
            return Arguments(hidden) if isinstance(value, Arguments) else hidden
        return [self.hide(item) for item in value] if isinstance(value, (list, tuple)) else value

    def reveal(self, text: str) -> str:
        return text.translate({ord(mark): literal for literal, mark in self.marks.items()} | {ord(self.end): ""})

    def _mark(self, literal: str) -> str:
        return self.marks.setdefault(literal, chr(0xF0001 + len(self.marks)))

    def _hide_text(self, text: str) -> str:
        text = self._controls.hidden.sub(lambda match: self._mark(match[0]), text)
        body = text.strip()  # templates trim, so the edge of a text is where its blanks end
        before = self._mark("") if body.startswith(self._controls.endings) else ""
        after = self._mark("") if body.endswith(self._controls.beginnings) else ""
        return text.replace(body, before + body + after) if before or after else text


class ChatTemplate:
    """A model's template(s), ready to render. `sources` maps names to Jinja texts: "default", perhaps "tool_use".
    `variables` are the strings that templates read beside the messages: bos_token, eos_token ..."""

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str]):
        # A byte-order mark of the file that a template came in is none of its text.
        self.sources = {name: source.removeprefix("\ufeff") for name, source in sources.items()}
        self._variables = dict(variables)
        self._environment = Sandbox()
        self._compiled: dict[str, tuple[Any, bool]] = {}

    def render(
        self,
        messages: list[dict],
        *,
        add_generation_prompt=None,
        continue_final_message=False,
        tools=None,
        shield=None,
        **kwargs,
    ) -> str:
        """The prompt's text, with `shield`'s marks still in it.

        add_generation_prompt: open the assistant's turn (default: unless continuing). continue_final_message: end
        where the last message's content ends, inside its turn. `kwargs` go to the template. Raises TemplateError.
        """
        if continue_final_message and add_generation_prompt:
            raise TemplateError(
                "add_generation_prompt and continue_final_message exclude each other: the first opens a new turn, "
                "the second stays in the last one; set one of them to false"
            )
        if not isinstance(messages, (list, tuple)) or not messages:
            raise TemplateError(f"messages is {messages!r}: a chat needs a list of at least one message")
        source, shield = self._source(bool(tools)), shield or Shield()
        conversation = [_checked(message, "developer" in source) for message in messages]
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        token = METER.set(Meter([conversation, tools, kwargs]))
        try:
            template, reads_parts = self._compile(source)
            conversation = shield.hide(conversation if reads_parts else [_joined(message) for message in conversation])
            if continue_final_message:
                _mark_end(conversation[-1], shield.end)
            # No tools are None, not []: templates ask `tools is not none` before they print a list of them.
            variables = {"messages": conversation, "tools": shield.hide(tools or None), "documents": None}
            variables |= {"add_generation_prompt": add_generation_prompt} | shield.hide(kwargs)
            text = template.render(self._variables | variables)
        except TemplateError:
            raise
        except Exception as error:  # a stranger's program may raise anything
            raise TemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error
        finally:
            METER.reset(token)
        if not continue_final_message:
            return text
        if shield.end not in text:
            raise TemplateError("continue_final_message: this chat template does not print the last message's content")
        return text[: text.rindex(shield.end)]

    def _source(self, with_tools: bool) -> str:
        for name in ("tool_use", "default") if with_tools else ("default",):
            if name in self.sources:
                return self.sources[name]
        raise TemplateError(
            "this model has no chat template (tokenizer_config.json, chat_template.jinja or the GGUF metadata would "
            "hold it): it is probably a base model; use plain completion, or put a chat_template.jinja beside it"
        )

    def _compile(self, source: str) -> tuple[Any, bool]:
        if source not in self._compiled:
            tree = self._environment.parse(source)
            self._compiled[source] = self._environment.from_string(tree), _reads_parts(tree)
        return self._compiled[source]


def _reads_parts(tree: nodes.Template) -> bool:
    """Whether the template loops over a message's content, and so wants a list of parts left a list."""
    for loop in tree.find_all(nodes.For):
        parts = [loop.iter, *loop.iter.find_all(nodes.Expr)]
        names = [getattr(node, "name", getattr(node, "attr", getattr(node, "value", None))) for node in parts]
        # `content.split(...)` is a loop over the pieces of a string.
        if "content" in names and not any(
            isinstance(getattr(node, "node", None), nodes.Getattr) and isinstance(node, nodes.Call) for node in parts
        ):
            return True
    return False


class Arguments(dict):
    """Of a tool call: an object to most templates, JSON text to those that append it to a text of theirs."""

    def __add__(self, text: str) -> str:
        return json.dumps(self, ensure_ascii=False) + text

    def __radd__(self, text: str) -> str:
        return text + json.dumps(self, ensure_ascii=False)


def _checked(message: Any, knows_developer: bool) -> dict:
    """A copy of one message in the form that templates read; raises TemplateError for what no template can render."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TemplateError(f"a message is {message!r:.200}: it must be an object with a string 'role' and a 'content'")
    content = "" if message.get("content") is None else message["content"]
    if not isinstance(content, (str, list, tuple)):
        raise TemplateError(f"content is {content!r:.200}: it must be a string or a list of text parts")
    for part in content if not isinstance(content, str) else ():
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise TemplateError(f"content holds the part {part!r:.200}: only {{'type': 'text', 'text': ...}} is read")
    message = {**message, "content": content}
    if message["role"] == "developer" and not knows_developer:  # OpenAI's newer name for the same
        message["role"] = "system"
    calls = message.pop("tool_calls", None)  # null stands for none in the API, but templates ask `is defined`
    if calls and not (isinstance(calls, (list, tuple)) and all(isinstance(call, Mapping) for call in calls)):
        raise TemplateError(f"tool_calls is {calls!r:.200}: it must be a list of objects, one for each call")
    return message | {"tool_calls": [_with_object(call) for call in calls]} if calls else message


def _with_object(call: Mapping) -> dict:
    """The API carries a call's arguments as a JSON string; most templates print them through `tojson`."""
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    arguments = function.get("arguments")
    try:
        value = json.loads(arguments or "null") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise TemplateError(f"a tool call's arguments are not JSON: {arguments!r:.200}") from error
    value = Arguments(value or {}) if isinstance(value, (Mapping, type(None))) else value
    return {**call, "function": {**function, "arguments": value}}


def _joined(message: dict) -> dict:
    """Text parts as one string, a line each, for templates that know strings only."""
    content = message["content"]
    return message if isinstance(content, str) else message | {"content": "\n".join(part["text"] for part in content)}


def _mark_end(message: dict, end: str) -> None:
    """Puts `end` behind the message's text: where it comes out, the prompt is cut."""
    content = message["content"]
    if not content:
        raise TemplateError(f"continue_final_message needs text to continue; the last message's content is {content!r}")
    if isinstance(content, str):
        message["content"] = content + end
    else:
        content[-1]["text"] += end


# -- the sandbox

RENDER_UNITS = 2**27  # characters that a rendering may build, and STEP_UNITS for each step of a loop and each call
STEP_UNITS = 32
UNITS_PER_CHARACTER = 64  # more of them for each character of the input
RENDER_SECONDS = 5.0  # CPU time of the rendering thread
MAX_BITS = 100_000  # of an integer: products of longer ones take long
# Filters, methods and operators whose result may be as long as what they work on times what they are given ...
MULTIPLYING = """* % batch center expandtabs format format_map indent join ljust replace rjust round slice to_bytes
tojson translate zfill""".split()
QUADRATIC = ("sum", "urlize", "wordwrap")  # ... and those that may take as many steps as the square of it
WIDE_FORMAT = re.compile(r"\d{5}|%[-+ #0]*\*|\.\*|\{[^{}]*\{")  # a width of five digits or more, or a computed one


class Meter:
    """What one rendering may still spend."""

    def __init__(self, given: Any):
        self.sizes: dict[int, tuple[int, Any]] = {}  # by id; beside it the container, or its id might be used again
        self.units = RENDER_UNITS + UNITS_PER_CHARACTER * self.size(given)
        self.deadline = time.thread_time() + RENDER_SECONDS

    def size(self, value: Any) -> int:
        """About how many characters `value` prints as. No container can change in this sandbox, so each is measured
        once: one that holds another twice, which holds a third twice, and so on, takes no time."""
        if isinstance(value, (str, bytes)):
            return len(value)
        if not isinstance(value, (dict, list, tuple, set, range, MappingView)):
            return 8
        if id(value) not in self.sizes:
            items = (*value, *value.values()) if isinstance(value, dict) else value
            self.sizes[id(value)] = sum(8 + self.size(item) for item in items), value
        return self.sizes[id(value)][0]

    def charge(self, units: int) -> None:
        self.units -= units
        if self.units < 0:
            raise TemplateError("the chat template builds too much text or loops too long; it was stopped")
        if time.thread_time() > self.deadline:
            raise TemplateError(f"the chat template ran for {RENDER_SECONDS} s of CPU time; it was stopped")

    def pay(self, name: str, run: Callable[[], Any], target: Any, given: list) -> Any:
        """The result of run(), which is what `name` makes of `target` and `given`."""
        length = self.size(target) + sum(map(self.size, given))
        times = sum(abs(value) if isinstance(value, int) else self.size(value) for value in given)
        if name in ("%", "format", "format_map") and WIDE_FORMAT.search(str(target)):
            raise TemplateError("the chat template asks for a format that is too wide or has a computed width")
        worst = (8 + length) * (1 + (length if name in QUADRATIC else times if name in MULTIPLYING else 0))
        self.charge(STEP_UNITS if worst <= self.units else worst)
        result = run()
        if isinstance(result, Iterator):  # a list has a size
            result = list(result)
        if isinstance(result, int):
            _check_bits(result.bit_length())
        self.charge(self.size(result))
        return result


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateError("the chat template computes with numbers that are too long")


METER: ContextVar[Meter] = ContextVar("meter of the rendering in progress")


def _paid(name: str, function: Callable) -> Callable:
    """A filter under the meter."""

    @functools.wraps(function)  # keeps Jinja's own marks, e.g. "pass the environment as the first argument"
    def run(*args: Any, **kwargs: Any) -> Any:
        target, *given = args[1:] if hasattr(function, "jinja_pass_arg") else args
        return METER.get().pay(name, lambda: function(*args, **kwargs), target, [*given, *kwargs.values()])

    return run


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Plain JSON. Jinja's own filter escapes <, > and & for HTML, which no model was trained on."""
    options = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys}
    return _concat(json.JSONEncoder(**options).iterencode(value))


def _concat(parts: Iterable[str]) -> str:
    """How Jinja joins every buffer: the output, macros, captured blocks."""
    pieces = []
    for part in parts:
        METER.get().charge(len(part))
        pieces.append(part)
    return "".join(pieces)


def _raise_exception(message: str) -> None:
    raise TemplateError(str(message))


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training; for inference the tag means its body."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _measured(node: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute("measured"), [node], [], None, None)


class _Instrument(NodeTransformer):
    """Adds the meter to a parsed template where the sandbox offers no hook: loops, `~` and literal containers."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        node, step = self.generic_visit(node), _measured(nodes.Const(True))
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        if node.test is not None:  # `for x in xs if test`: steps whose test fails never reach the body
            node.test = nodes.And(step, node.test)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        return nodes.Filter(nodes.List(self.generic_visit(node).nodes), "join", [], [], None, None)

    def visit_List(self, node: nodes.Expr) -> nodes.Expr:
        node = self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else _measured(node)  # `for a, b in ...` stores

    visit_Tuple = visit_Dict = visit_List


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that chat templates expect. No name in a template leads to `measured`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    concat = staticmethod(_concat)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        self.finalize = self.measured
        self.filters = {name: _paid(name, function) for name, function in (self.filters | {"tojson": _tojson}).items()}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)

    def _parse(self, source, name, filename):
        return _Instrument().visit(super()._parse(source, name, filename))

    def measured(self, value: Any) -> Any:
        METER.get().charge(STEP_UNITS + METER.get().size(value))
        return value

    def call_binop(self, context, operator, left, right):
        target, given = (right, left) if operator == "*" and isinstance(left, int) else (left, right)
        numbers = isinstance(target, (int, float))
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * right)
        run = functools.partial(super().call_binop, context, operator, left, right)
        return METER.get().pay("" if numbers else operator, run, target, [given])

    def call(__self, __context, __obj, *args, **kwargs):  # noqa: B902 (Jinja's own signature)
        method = getattr(__obj, "__wrapped__", __obj)  # str.format comes wrapped
        run = functools.partial(super().call, __context, __obj, *args, **kwargs)
        given = [*args, *kwargs.values()]
        return METER.get().pay(getattr(method, "__name__", ""), run, getattr(method, "__self__", None), given)
