"""What the OpenAI endpoints accept: every field, its type, and what it becomes.

The problem. A field that is accepted and then ignored gives an answer that looks right. A field that is refused because
this server has not heard of it breaks every client that is newer than the server.

The rule, for all endpoints: a field that stands below is obeyed, and checked strictly ("256" is no number, 1 no
boolean). A field that does not is ignored, and named in the header `X-Ignored-Fields` of the answer. Those of
UNSUPPORTED are known and would change what the answer means, so they are refused unless they ask for nothing.

    body ─► pydantic: types ─► SamplingBody.params(): names ─► SamplingParams: values ─► engine: what the model allows

null is the same as absent. Beyond OpenAI's fields there are vLLM's (top_k, min_p, repetition_penalty, stop_token_ids,
ignore_eos, min_tokens, include_stop_str_in_output, priority, cache_salt, continue_final_message,
add_generation_prompt, chat_template_kwargs) and regex, choice and beam_width.

Source: OpenAI's API reference; vLLM's "OpenAI-compatible server". Left out: images, audio, stored conversations.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sampling import SamplingParams
from serving.guard import ApiError

# Other servers' names for a structure. Left unheard, they would give an answer that has none.
STRUCTURE = "guided_json guided_regex guided_choice guided_grammar structured_outputs json_schema grammar".split()
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
    "parallel_tool_calls": (True,),
}
# Fields of a body that go to SamplingParams under the same name.
SAMPLING = """n best_of beam_width temperature top_p top_k min_p min_tokens stop stop_token_ids ignore_eos seed
include_stop_str_in_output presence_penalty frequency_penalty repetition_penalty logit_bias regex choice""".split()
TEMPLATE_OPTIONS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "shield", "documents")

Ids = list[int]
Real = Annotated[float, Field(allow_inf_nan=True)]  # SamplingParams knows the ranges, and NaN lies in none


class Body(BaseModel):
    """A JSON object; its unknown fields are kept apart."""

    model_config = ConfigDict(strict=True, extra="allow")

    def headers(self) -> dict[str, str]:
        """X-Ignored-Fields, if there are any. Raises ApiError for a known field that cannot be honoured."""
        ignored = []
        for name, value in (self.model_extra or {}).items():
            if name in UNSUPPORTED and value is not None and value not in UNSUPPORTED[name]:
                instead = "ask with response_format, regex or choice" if name in STRUCTURE else "leave it out"
                raise ApiError(400, f"{name!r} is not supported by this server; {instead}", name, "unsupported")
            if name not in UNSUPPORTED:
                shown = ascii(name[:40])  # quoted, unless it is a plain word: an edge of blanks is no header value
                ignored.append(shown[1:-1] if re.fullmatch(r"[\w.-]+", name[:40], re.ASCII) else shown)
        return {"X-Ignored-Fields": ", ".join(ignored[:20])} if ignored else {}


class StreamOptions(Body):
    include_usage: bool | None = None


class JsonSchema(Body):
    name: str | None = None
    strict: bool | None = None
    definition: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Function(Body):
    name: str = Field(min_length=1, max_length=200)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class SamplingBody(Body):
    """What completions and chat have in common."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    beam_width: int | None = None
    temperature: Real | None = None
    top_p: Real | None = None
    top_k: int | None = None
    min_p: Real | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    seed: int | None = None
    presence_penalty: Real | None = None
    frequency_penalty: Real | None = None
    repetition_penalty: Real | None = None
    logit_bias: dict[str, Real] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31)
    cache_salt: str | None = None
    user: str | None = None

    def params(self, **more: Any) -> SamplingParams:
        """The SamplingParams asked for. Raises ApiError or ParameterError."""
        given = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        given |= {name: value for name, value in self._shape().items() if value is not None}
        params = SamplingParams(**(given | more))
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true", "stream_options")
        if self.stream and params.best_of is not None and params.best_of > params.n:
            raise ApiError(400, "best_of chooses among finished answers, so it cannot be streamed", "best_of")
        return params

    def _shape(self) -> dict[str, Any]:
        """response_format as json_schema of SamplingParams."""
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return {}
        if wanted.type == "json_object":
            return {"json_schema": {"type": "object"}}
        if wanted.json_schema is None:
            raise ApiError(400, "response_format of type json_schema needs the field json_schema", "response_format")
        return {"json_schema": wanted.json_schema.definition}

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def namespace(self) -> tuple[str, str] | None:
        """Requests share cached prefixes only with those of the same salt."""
        return None if self.cache_salt is None else ("salt", self.cache_salt)


class CompletionBody(SamplingBody):
    """POST /v1/completions"""

    prompt: str | list[str] | Ids | list[Ids]
    echo: bool | None = None
    logprobs: int | None = None

    def prompts(self) -> list[str | Ids]:
        """One or more prompts, each a text or token ids."""
        given = self.prompt
        several = isinstance(given, list) and given and not isinstance(given[0], int)
        prompts = given if several else [given]
        if not all(prompts):
            raise ApiError(400, "a prompt is empty; give it at least one character or token", "prompt")
        return prompts

    def completion_params(self) -> SamplingParams:
        more: dict[str, Any] = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        if self.logprobs is not None:
            more["logprobs"] = self.logprobs
            if self.echo:
                more["prompt_logprobs"] = self.logprobs
        return self.params(**more)


class ChatBody(SamplingBody):
    """POST /v1/chat/completions"""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat_params(self, **more: Any) -> SamplingParams:
        """Answers run up to the context unless they are told to end earlier."""
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise ApiError(400, "max_tokens and max_completion_tokens differ; give only the latter", "max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
        return self.params(
            max_tokens=limits.pop() if limits else None,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            **more,
        )

    def template_options(self) -> dict[str, Any]:
        """What goes to the chat template beside messages and tools."""
        options = dict(self.chat_template_kwargs or {})
        for name in TEMPLATE_OPTIONS:
            if name in options:
                raise ApiError(400, f"chat_template_kwargs must not hold {name!r}", "chat_template_kwargs")
        options["add_generation_prompt"] = self.add_generation_prompt
        options["continue_final_message"] = bool(self.continue_final_message)
        return options

    def tool_wish(self) -> tuple[list[dict], str | None]:
        """The tools offered, and who must be called: None (nobody must), "" (any of them) or a function's name."""
        tools = [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]
        names = [tool["function"]["name"] for tool in tools]
        wish = self.tool_choice
        if wish is None or wish == "auto":
            return tools, None
        if wish == "none":
            return [], None
        if isinstance(wish, dict) and isinstance(wish.get("function"), dict):
            wish = wish["function"].get("name")
            if wish in names:
                return tools, wish
        elif wish == "required" and tools:
            return tools, ""
        allowed = "'none', 'auto', 'required', or {'type': 'function', 'function': {'name': ...}} of one of tools"
        raise ApiError(400, f"tool_choice must be {allowed}", "tool_choice")


class TokenizeBody(Body):
    """POST /tokenize: of a text (`prompt`), or of a conversation (`messages`)."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: Ids
