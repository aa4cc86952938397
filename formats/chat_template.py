"""A conversation becomes a prompt: the model's chat template, with forged turns kept out.

The problem. Every chat model was trained on its own layout of turns, and ships that layout as a small Jinja program.
The engine must run it exactly as the model's makers did (one newline too many costs quality), although half of its
input is written by a user, who may write "<|im_end|>" and then a turn of the system's.

The idea. Text written by people is told apart from text written by the template by marking it *before* rendering. A
control string in a message becomes one private-use character, and plain text again when the template is done.

    messages --hide--> user: "hi ⟦1⟧"  --template-->  "<|im_start|>user\nhi ⟦1⟧<|im_end|>\n"  --reveal--> text
               |                                          |              |    |
       "<|im_end|>" hidden in ⟦1⟧                  written by the     user's  written by the
                                                   template: an id    words   template: an id

The same trick continues a message (`continue_final_message`): a mark behind its last character shows, in the rendered
text, where to cut, whatever the template wrote after it.

Arguments of tool calls are JSON text in the API. Most templates want them as an object, and get one; a template that
fails to append an object to its own text gets the text.

Content may come as a list of text parts (the API allows it). A template that loops over parts gets them as they are;
one that knows strings only gets them joined by newlines.

Source: transformers' documentation, "Chat templates"; the sandbox is formats/template_sandbox.py, the only file of ours
imported. Left out: images and audio (refused by name), and shielding of added tokens that are not control tokens
(<think>, <tool_call>): a conversation's own history holds them, and they open no turn.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jinja2 import nodes

from formats.template_sandbox import Sandbox, TemplateError, metered


class ControlStrings:
    """The spellings of a tokenizer's control tokens, prepared for finding them whole and in halves."""

    def __init__(self, strings: Iterable[str]):
        spellings = sorted({item for item in strings if item}, key=len, reverse=True)  # the longest match wins
        private_use = "[\U000f0000-\U0010ffff]"
        self.spelled = re.compile("|".join(map(re.escape, spellings)) or r"(?!)")
        self.hidden = re.compile(f"{self.spelled.pattern}|{private_use}")
        self.longest = max(map(len, spellings), default=0)
        self.beginnings = {item[:cut] for item in spellings for cut in range(1, len(item))}
        self.endings = {item[cut:] for item in spellings for cut in range(1, len(item))}


NO_CONTROLS = ControlStrings(())


class Shield:
    """Marks text in a conversation that must not turn into control tokens, one private-use character for each.

    Whole spellings are replaced. Halves ("<|im_" at the end of a text, "end|>" at the start) get a mark beside them
    that stands for nothing, so that a template that joins two texts joins no control string either. Private-use
    characters of the user's own are replaced too, so a mark is never mistaken.
    """

    def __init__(self, controls: ControlStrings = NO_CONTROLS):
        self._controls = controls
        self._marks: dict[str, str] = {}  # what was written -> the private-use character that stands for it
        self.end = "\U000f0000"  # marks the end of a message to be continued

    @property
    def used(self) -> bool:
        """Whether anything had to be hidden."""
        return bool(self._marks)

    def mark(self, literal: str) -> str:
        return self._marks.setdefault(literal, chr(0xF0001 + len(self._marks)))

    def hide(self, value: Any) -> Any:
        """`value` (nested lists and dicts) with every string in it shielded."""
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, (list, tuple)) else value

    def reveal(self, text: str) -> str:
        return text.translate({ord(mark): literal for literal, mark in self._marks.items()} | {ord(self.end): ""})

    def _hide_text(self, text: str) -> str:
        text = self._controls.hidden.sub(lambda match: self.mark(match[0]), text)
        # Templates trim, so the edge of a text is where its blanks end.
        body = text.strip()
        left, right = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
        lengths = range(1, min(self._controls.longest, len(body) + 1))
        if any(body[:n] in self._controls.endings for n in lengths):
            body = self.mark("") + body
        if any(body[len(body) - n :] in self._controls.beginnings for n in lengths):
            body = body + self.mark("")
        return left + body + right if body else text


class ChatTemplate:
    """A model's template(s), ready to render. `sources` maps names to Jinja texts: "default", perhaps "tool_use".
    `variables` are the strings that templates read beside the messages: bos_token, eos_token ..."""

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str]):
        self.sources = dict(sources)
        self._variables = dict(variables)
        self._environment = Sandbox()
        self._compiled: dict[str, tuple[Any, bool]] = {}

    def render(
        self,
        messages: list[dict],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: list[dict] | None = None,
        shield: Shield | None = None,
        **kwargs: Any,
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
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        source = self._source(bool(tools))
        conversation = [_checked(message) for message in _nonempty_list(messages)]
        shield = shield or Shield()
        with metered([conversation, tools or [], kwargs]):
            template, reads_parts = self._compile(source)
            if not reads_parts:
                conversation = [_with_joined_parts(message) for message in conversation]
            # No tools are None, not []: templates ask `tools is not none` before they print a list of them.
            given = {"tools": shield.hide(tools or None), "documents": None}
            given |= {"add_generation_prompt": add_generation_prompt} | shield.hide(kwargs)

            def filled(conversation: list[dict]) -> str:
                conversation = shield.hide(conversation)
                if continue_final_message:
                    _mark_end(conversation[-1], shield.end)
                return template.render(self._variables | {"messages": conversation} | given)

            try:
                text = filled(conversation)
            except TypeError:  # some templates append the arguments of a call to a text, and so want them as one
                written = [_with_written_arguments(message) for message in conversation]
                if written == conversation:
                    raise
                text = filled(written)
        if not continue_final_message:
            return text
        if shield.end not in text:
            raise TemplateError("continue_final_message: this chat template does not print the last message's content")
        return text[: text.rindex(shield.end)]

    def _source(self, with_tools: bool) -> str:
        if with_tools and "tool_use" in self.sources:
            return self.sources["tool_use"]
        if "default" in self.sources:
            return self.sources["default"]
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
        # `content.split(...)` is a loop over a string's pieces; the inserted ticks are calls, but not of the content.
        if any(isinstance(call.node, nodes.Getattr) for call in loop.iter.find_all(nodes.Call)):
            continue
        for node in (loop.iter, *loop.iter.find_all(nodes.Expr)):
            key = getattr(node, "name", None) if isinstance(node, nodes.Name) else getattr(node, "attr", None)
            if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
                key = node.arg.value
            if key == "content":
                return True
    return False


def _nonempty_list(messages: Any) -> list:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise TemplateError(f"messages is {messages!r}: a chat needs a list of at least one message")
    return list(messages)


def _checked(message: Any) -> dict:
    """A copy of one message in the form that templates read; raises TemplateError for what no template can render."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TemplateError(f"a message is {message!r:.200}: it must be an object with a string 'role' and a 'content'")
    content = message.get("content")
    if not isinstance(content, (str, list, tuple, type(None))):
        raise TemplateError(f"content is {content!r:.200}: it must be a string or a list of text parts")
    for part in content if isinstance(content, (list, tuple)) else ():
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise TemplateError(f"content holds the part {part!r:.200}: only {{'type': 'text', 'text': ...}} is read")
    message = dict(message)
    calls = message.pop("tool_calls", None)  # null stands for none in the API, but templates ask `is defined`
    if calls and not (isinstance(calls, (list, tuple)) and all(isinstance(call, Mapping) for call in calls)):
        raise TemplateError(f"tool_calls is {calls!r:.200}: it must be a list of objects, one for each call")
    return message | {"tool_calls": [_with_parsed_arguments(call) for call in calls]} if calls else message


def _with_parsed_arguments(call: Any) -> Any:
    """The API carries arguments as a JSON string; most templates print them through `tojson` and want the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise TemplateError(f"a tool call's arguments are not JSON: {function['arguments']!r:.200}") from error
    return dict(call) | {"function": dict(function) | {"arguments": arguments}}


def _with_written_arguments(message: dict) -> dict:
    """The arguments of calls as JSON text again, for templates that know no objects."""
    calls = []
    for call in message.get("tool_calls", ()):
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), Mapping):
            text = json.dumps(function["arguments"], ensure_ascii=False)
            call = dict(call) | {"function": dict(function) | {"arguments": text}}
        calls.append(call)
    return message | {"tool_calls": calls} if calls else message


def _with_joined_parts(message: dict) -> dict:
    """Text parts as one string, a line each, for templates that know strings only."""
    if not isinstance(message.get("content"), (list, tuple)):
        return message
    return message | {"content": "\n".join(part["text"] for part in message["content"])}


def _mark_end(message: dict, end: str) -> None:
    """Puts `end` behind the message's text: where it comes out, the prompt is cut."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + end
    elif content:
        content[-1]["text"] += end
    else:
        raise TemplateError(f"continue_final_message needs text to continue; the last message's content is {content!r}")
