"""What the OpenAI endpoints accept: every field, its type, and what it becomes.

The problem. A field that is accepted and then ignored gives an answer that looks right. A field that is refused because
this server has not heard of it breaks every client that is newer than the server.

The rule, for all endpoints: a field that stands below is obeyed, and checked strictly ("256" is no number, 1 no
boolean). A field that does not is ignored, and named in the header `X-Ignored-Fields` of the answer. Those of
UNSUPPORTED are known and would change what the answer means, so they are refused unless they ask for nothing.

    body ─► sizes ─► pydantic: names, types ─► params() ─► SamplingParams: values ─► engine: what the model allows

The fields of sampling are those of SamplingParams, which alone knows their values. null is the same as absent.
Source: OpenAI's API reference; vLLM's "OpenAI-compatible server". Left out: images, audio, stored conversations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, FailFast, Field, TypeAdapter, WithJsonSchema, create_model, model_validator
from typing_extensions import TypeAliasType

from formats.fields import SURROGATE
from sampling import SamplingParams
from serving.guard import ApiError, parts, size

# Other servers' names for a structure. Unheard, they would give an answer that has none.
STRUCTURE = "guided_json guided_regex guided_choice guided_grammar structured_outputs json_schema".split()
# Known fields that this server cannot honour: field -> values that ask for nothing.
UNSUPPORTED: dict[str, tuple] = {
    **dict.fromkeys(STRUCTURE, ()),
    "use_beam_search": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
}
NO_EMBEDDINGS = "this server has language models only; no embeddings"
INSTEAD = dict.fromkeys(STRUCTURE, "ask with response_format, regex, choice or grammar") | {
    "tools": "/v1/chat/completions has them",
    "images": "this server reads text only",
}
TEMPLATE_OPTIONS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "shield", "documents")
# What a field may hold, counted before anything looks at it: entries, and in all (guard.size). The context of a model
# bounds the fields of CONTEXT.
MOST_ENTRIES, MOST_CHARACTERS, MOST_SIZE = 256, 1 << 16, 1 << 18
MOST_NAMED = 20  # ignored fields, of at most 60 characters each: proxies refuse headers of 8 KB
CONTEXT = ("prompt", "input", "instructions", "system", "messages", "tokens")
MORE_ENTRIES = dict.fromkeys(("prompt", "choice", "logit_bias", "stop_token_ids"), 4096)

# A list of a hundred thousand wrong items is wrong once.
Ids = TypeAliasType("Ids", Annotated[list[int], FailFast()])
SeveralIds = TypeAliasType("SeveralIds", Annotated[list[Ids], FailFast()])
Texts = TypeAliasType("Texts", Annotated[list[str], FailFast()])
Messages = TypeAliasType("Messages", Annotated[list[dict[str, Any]], FailFast(), Field(min_length=1)])
Tools = TypeAliasType("Tools", Annotated[list["Tool"], FailFast()])


class Body(BaseModel):
    """A JSON object; its unknown fields are kept apart."""

    model_config = ConfigDict(strict=True, extra="allow")
    unsupported: ClassVar[dict[str, tuple]] = UNSUPPORTED

    @model_validator(mode="before")
    @classmethod
    def _measured(cls, data: Any) -> Any:
        """Raises ApiError for what is too large. Whole floats become integers: some clients write 16 as 16.0."""
        if not isinstance(data, dict):
            return data
        for name, value in [("the body", data), *data.items()][: MOST_ENTRIES + 1]:
            name, most = name[:100], MORE_ENTRIES.get(name, MOST_ENTRIES)
            several = isinstance(value, list) and value and isinstance(value[0], (str, list))  # prompts, say
            if (name not in CONTEXT or several) and isinstance(value, (list, dict)) and len(value) > most:
                raise ApiError(400, f"{name} has {len(value):,} entries; the limit is {most:,}", name)
            most = MOST_CHARACTERS if isinstance(value, str) else MOST_SIZE
            if name not in CONTEXT and value is not data and size(value) > most:
                raise ApiError(400, f"{name} holds more than {most:,} characters and values, the limit", name)
            # (What a context holds is checked as it is encoded.)
            texts = [value] if name in CONTEXT or value is data else parts(value)
            if any(isinstance(text, str) and SURROGATE.search(text) for text in texts):
                raise ApiError(400, f"{name} holds half a character (a lone surrogate): send whole ones", name)
        return {name: as_integers(value) for name, value in data.items()}

    def headers(self) -> dict[str, str]:
        """X-Ignored-Fields, if there are any. Raises ApiError for a known field that cannot be honoured."""
        ignored = []
        for name in dict.fromkeys(self._ignored()):
            shown = ascii(name[:40])[:60]  # quoted, unless it is a plain word: an edge of blanks is no header value
            ignored.append(shown[1:-1] if re.fullmatch(r"[\w.-]+", name[:40], re.ASCII) else shown)
        more = [f"and {len(ignored) - MOST_NAMED} more"] if len(ignored) > MOST_NAMED else []
        return {"X-Ignored-Fields": ", ".join(ignored[:MOST_NAMED] + more)} if ignored else {}

    def _ignored(self) -> Iterator[str]:
        """Names of the fields that are not obeyed, those of objects within this one behind the object's name."""
        for name, value in (self.model_extra or {}).items():
            if isinstance(value, dict):
                value = {key: inner for key, inner in value.items() if inner is not None}
            if name not in self.unsupported:
                yield name
            elif value is not None and value not in self.unsupported[name]:
                instead = INSTEAD.get(name, "leave it out")
                raise ApiError(400, f"{name!r} is not supported here; {instead}", name, "unsupported")
        for name in type(self).model_fields:
            value = getattr(self, name)
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, Body):
                    yield from (f"{name}.{field}" for field in inner._ignored())


def as_integers(value: Any) -> Any:
    """16 for 16.0, in a list of numbers too."""
    if isinstance(value, list) and value and isinstance(value[0], float):
        return list(map(as_integers, value))
    return int(value) if isinstance(value, float) and value.is_integer() else value


def sampling_fields(*but: str) -> dict[str, Any]:
    """The fields of SamplingParams for a pydantic model. Their types only document them: SamplingParams checks."""
    shown: dict[str, Any] = {}
    for name, hint in get_type_hints(SamplingParams).items():
        if name not in but:
            shown[name] = Annotated[Any, WithJsonSchema(TypeAdapter(hint | None).json_schema())], None
    return shown


def asked(body: BaseModel) -> dict[str, Any]:
    """What a body holds of the fields of SamplingParams."""
    names = [field.name for field in fields(SamplingParams) if field.name in type(body).model_fields]
    return {name: value for name in names if (value := getattr(body, name)) is not None}


class Turns(Body):
    """How the turns of a conversation end: None leaves it to the template."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def turn_options(self) -> dict[str, Any]:
        continued = bool(self.continue_final_message)
        return {"add_generation_prompt": self.add_generation_prompt, "continue_final_message": continued}


class StreamOptions(Body):
    include_usage: bool | None = None


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # it always is
    definition: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    definition: dict[str, Any] | None = Field(None, alias="schema")  # beside json_object

    def schema_asked(self) -> dict[str, Any] | None:
        """What becomes json_schema of SamplingParams."""
        if self.definition is not None and self.type != "json_object":
            raise ApiError(400, "response_format has a schema of its own only beside json_object", "response_format")
        if self.json_schema is not None and self.type != "json_schema":
            message = f"response_format has json_schema, but its type is {self.type!r}; make it 'json_schema'"
            raise ApiError(400, message, "response_format")
        if self.type == "json_object":
            return {"type": "object"} if self.definition is None else self.definition
        if self.type == "json_schema" and self.json_schema is None:
            raise ApiError(400, "response_format of type json_schema needs the field json_schema", "response_format")
        return self.json_schema and self.json_schema.definition


class Function(Body):
    name: str = Field(min_length=1, max_length=200)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


SamplingFields = create_model(
    "SamplingFields", __base__=Body, **sampling_fields("logprobs", "prompt_logprobs", "json_schema")
)


class SamplingBody(SamplingFields):
    """What completions and chat have in common."""

    model: str | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31)
    cache_salt: str | None = None  # cached prefixes are shared with requests of the same salt only
    user: str | None = None

    def params(self, **more: Any) -> SamplingParams:
        """The SamplingParams asked for. Raises ApiError or ParameterError."""
        schema = self.response_format and self.response_format.schema_asked()
        if schema is not None and "json_schema" in more:
            raise ApiError(400, "response_format must be text where tool_choice demands a call", "response_format")
        params = SamplingParams(**(asked(self) | ({} if schema is None else {"json_schema": schema}) | more))
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true", "stream_options")
        if self.stream and params.best_of is not None and params.best_of > params.n:
            raise ApiError(400, "best_of chooses among finished answers, so it cannot be streamed", "best_of")
        return params

    def routing(self) -> dict[str, Any]:
        """What the engine takes beside parameters."""
        namespace = None if self.cache_salt is None else ("salt", self.cache_salt)
        return {"priority": self.priority or 0, "namespace": namespace, "streaming": bool(self.stream)}

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionBody(SamplingBody):
    """POST /v1/completions"""

    prompt: str | Texts | Ids | SeveralIds
    echo: bool | None = None
    logprobs: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """One or more prompts, each a text or token ids."""
        several = isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int)
        prompts = self.prompt if several else [self.prompt]
        if not all(prompts):
            raise ApiError(400, "a prompt is empty; give it at least one character or token", "prompt")
        return prompts

    def params(self) -> SamplingParams:
        return super().params(logprobs=self.logprobs, prompt_logprobs=self.logprobs if self.echo else None)


class ChatBody(SamplingBody, Turns):
    """POST /v1/chat/completions"""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def params(self, **more: Any) -> SamplingParams:
        """Answers run up to the context unless they are told to end earlier."""
        limit, older = self.max_completion_tokens, self.max_tokens
        if limit is not None and older is not None and limit != older:
            raise ApiError(400, "max_tokens and max_completion_tokens differ; give only the latter", "max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
        scores = (self.top_logprobs or 0) if self.logprobs else None
        return super().params(max_tokens=older if limit is None else limit, logprobs=scores, **more)

    def template_options(self) -> dict[str, Any]:
        """What goes to the chat template beside messages and tools."""
        options = self.chat_template_kwargs or {}
        if taken := [name for name in TEMPLATE_OPTIONS if name in options]:
            raise ApiError(400, f"chat_template_kwargs must not hold {taken[0]!r}", "chat_template_kwargs")
        return options | self.turn_options()

    def offered_tools(self) -> tuple[list[dict], list[dict]]:
        """The tools, and those of which one must be called, if any must."""
        tools = [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]
        choice = self.tool_choice
        if choice is None or choice == "auto":
            return tools, []
        if choice == "none":
            return [], []
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if called := [tool for tool in tools if choice == "required" or tool["function"]["name"] == name]:
            return tools, called
        allowed = "'none', 'auto', 'required', or {'type': 'function', 'function': {'name': ...}} of one of tools"
        raise ApiError(400, f"tool_choice must be {allowed}", "tool_choice")


class TokenizeBody(Turns):
    """POST /tokenize: of a text (`prompt`), or of a conversation (`messages`)."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None

    def check(self) -> None:
        """Raises ApiError unless it is one of the two, with the options that belong to it."""
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give either prompt or messages", "prompt")
        of_chats = ("add_generation_prompt", "continue_final_message")
        for name in of_chats if self.messages is None else ("add_special_tokens",):
            if getattr(self, name):
                other = "messages" if self.messages is None else "prompt"
                raise ApiError(400, f"{name} goes with {other}, which is not given; leave it out", name)


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: Ids
