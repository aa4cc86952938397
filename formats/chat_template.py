"""A conversation becomes a prompt: the model's chat template, with forged turns kept out.

The problem. Every chat model was trained on its own layout of turns, and ships that layout as a small Jinja program.
The engine must run it exactly (one newline too many costs quality), although half of its input is written by a user,
who may write "<|im_end|>" and then a turn of the system's.

The idea. Text written by people is marked *before* rendering, so that it differs from what the template writes. A
control string in a message becomes one private-use character, and plain text again when the template is done:

    messages --hide--> user: "hi ⟦1⟧"  --template-->  "<|im_start|>user\nhi ⟦1⟧<|im_end|>\n"  --reveal--> text
               |                                          |              |    |
       "<|im_end|>" hidden in ⟦1⟧                  written by the     user's  written by the
                                                   template: an id    words   template: an id

Source: transformers' documentation, "Chat templates". Left out: images and audio; shielding of added tokens that are
not control tokens (<think>, <tool_call>), since a conversation's own history holds them, and they open no turn.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from formats.fields import SURROGATE
from formats.template_process import TemplateError, TemplateProcess

PROCESS = TemplateProcess()
MEDIA = {"image", "image_url", "images", "audio", "input_audio", "video", "file"}  # of a part
UNREAD = ("images", "audio", "function_call")  # of a message: without them it would say something else


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

    Halves ("<|im_" at the end of a text, "end|>" at the start) get a mark beside them that stands for nothing: joined,
    they make no control string. Private-use characters of the user's own are replaced too, so no mark is mistaken.
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
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, (list, tuple)) else value

    def reveal(self, text: str) -> str:
        return text.translate({ord(mark): literal for literal, mark in self.marks.items()})

    def _mark(self, literal: str) -> str:
        return self.marks.setdefault(literal, chr(0xF0001 + len(self.marks)))

    def _hide_text(self, text: str) -> str:
        if SURROGATE.search(text):
            raise TemplateError(f"{text!r:.80} cannot be encoded: it must be a string without lone surrogates")
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

    def render(
        self, messages, *, add_generation_prompt=None, continue_final_message=False, tools=None, shield=None, **kwargs
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
        try:
            conversation = shield.hide([_checked(message, source) for message in messages])
            # No tools are None, not []: templates ask `tools is not none` before they print a list of them.
            variables = {"tools": shield.hide(tools or None), "documents": None} | shield.hide(kwargs)
        except RecursionError:
            raise TemplateError("the conversation is nested too deeply") from None
        if continue_final_message:
            _mark_end(conversation[-1], shield.end)
        elif add_generation_prompt is None:
            add_generation_prompt = True
        variables |= {"messages": conversation, "add_generation_prompt": bool(add_generation_prompt)}
        text = PROCESS.run(source, self._variables | variables)
        if not continue_final_message:
            return text
        if shield.end not in text:
            raise TemplateError("continue_final_message: this chat template does not print the last message's content")
        return text[: text.rindex(shield.end)].replace(shield.end, "")

    def _source(self, with_tools: bool) -> str:
        """ "tool_use" for tools, else "default", else the first that the file lists."""
        names = ["tool_use", "default"] if with_tools else ["default"]
        for name in [*names, *self.sources]:
            if name in self.sources:
                return self.sources[name]
        raise TemplateError(
            "this model has no chat template (tokenizer_config.json, chat_template.jinja or the GGUF metadata would "
            "hold it): it is probably a base model; use plain completion, or put a chat_template.jinja beside it"
        )


LOOP_OVER_CONTENT = re.compile(  # but not over the pieces of a string, `content.split(...)`
    r"""\{%[-+]?\s*for\b[^%]*?\bin\b(?:(?!%\}|\.\s*\w+\s*\().)*\bcontent\b(?:(?!%\}|\.\s*\w+\s*\().)*%\}""", re.S
)


def _checked(message: Any, source: str) -> dict:
    """A copy of one message in the form that the template reads. Raises TemplateError for what none can render."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TemplateError(f"a message is {message!r:.200}: it must be an object with a string 'role' and a 'content'")
    for field in UNREAD:
        if message.get(field):
            raise TemplateError(f"a message has {field!r}, which this engine does not read; leave it out")
    content = "" if message.get("content") is None else message["content"]
    if not isinstance(content, (str, list, tuple)):
        raise TemplateError(f"content is {content!r:.200}: it must be a string or a list of text parts")
    if not isinstance(content, str):
        for part in content:
            known = isinstance(part, Mapping) and part.get("type") == "text" and not MEDIA & part.keys()
            if not known or not isinstance(part.get("text"), str):
                text = "only {'type': 'text', 'text': ...} is read"
                raise TemplateError(f"content holds the part {part!r:.200}: {text}")
        if not LOOP_OVER_CONTENT.search(source):
            content = "\n".join(part["text"] for part in content)
    message = {**message, "content": content}
    if message["role"] == "developer" and "developer" not in source:  # OpenAI's newer name for the same
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
    return {**call, "function": {**function, "arguments": {} if value is None else value}}


def _mark_end(message: dict, end: str) -> None:
    """Puts `end` behind the message's text: where it comes out, the prompt is cut."""
    content = message["content"]
    if not content:
        raise TemplateError(f"continue_final_message needs text to continue; the last message's content is {content!r}")
    if isinstance(content, str):
        message["content"] = content + end
    else:
        content[-1]["text"] += end
