"""OpenAI's /v1/responses, the newer door, as a translation into a chat and back.

The problem. Since 2025 the official client's first method is `responses.create`. It asks for the same things as a chat
under other names, and its streams are typed events instead of chunks.

The idea. A body becomes the ChatBody that asks for the same; what the chat's writer reads from a delta (text, calls,
scores, the end) becomes items, each opened, filled and closed by events:

    input items ─► messages ─► chat ─► delta ─► parts ─► output_item.added, output_text.delta ..., output_item.done
                                                └► items of `output`, which the last event repeats as a whole

An answer in one piece is the response that the last event would carry. Nothing is stored: what would need it
(`previous_response_id`, `store`, `background`) is refused, and the client sends the conversation as items.

Source: OpenAI's API reference, "Responses". Left out: tools that run in the server, reasoning items, images.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from pydantic import FailFast, Field, create_model
from typing_extensions import TypeAliasType

from request import Delta
from serving.guard import ApiError, sse, streamed
from serving.openai_api import ChatWriter, converse
from serving.openai_schema import UNSUPPORTED, Body, ChatBody, Function, JsonSchema, Messages, asked, sampling_fields
from serving.service import Service

ELSEWHERE = "n best_of beam_width logprobs prompt_logprobs json_schema max_tokens".split()
MESSAGE = ("type", "role", "content", "id", "status")  # the fields of a message in `input`
PREFIXES = {"message": "msg", "function_call": "fc"}  # of the ids of items

Fields = create_model("Fields", __base__=Body, **sampling_fields(*ELSEWHERE))


class Format(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]
    definition: dict[str, Any] | None = Field(None, alias="schema")


class TextOptions(Body):
    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class FunctionTool(Function):
    type: Literal["function"]
    strict: bool | None = None


FunctionTools = TypeAliasType("FunctionTools", Annotated[list[FunctionTool], FailFast()])


class ResponsesBody(Fields):
    """POST /v1/responses"""

    unsupported: ClassVar = UNSUPPORTED | {
        "store": (False,),
        "background": (False,),
        "truncation": ("disabled",),
        "service_tier": ("auto", "default"),
        "reasoning": ({},),
        **dict.fromkeys(("previous_response_id", "conversation", "prompt", "max_tool_calls"), ()),
    }

    model: str | None = None
    input: str | Messages
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    stream: bool | None = None
    text: TextOptions | None = None
    tools: FunctionTools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None

    def chat(self) -> ChatBody:
        """The chat that asks for the same. Raises ApiError for what has no counterpart."""
        form, tools, choice = self.text and self.text.format, None, self.tool_choice
        if self.tools is not None:
            tools = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools]
        if isinstance(choice, dict) and choice.get("type") == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        if form is not None and form.type == "json_schema":
            if form.definition is None:
                raise ApiError(400, "text.format of type json_schema needs the field schema", "text")
            form = {"type": "json_schema", "json_schema": {"schema": form.definition}}
        elif form is not None:
            form = {"type": form.type, "schema": form.definition}
        scored = bool(self.include) or self.top_logprobs is not None
        return ChatBody(
            **asked(self),
            model=self.model,
            messages=self.messages(),
            max_completion_tokens=self.max_output_tokens,
            stream=self.stream,
            response_format=form,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            logprobs=scored,
            top_logprobs=self.top_logprobs,
            user=self.user,
        )

    def messages(self) -> list[dict]:
        """The items of `input` as messages of a chat."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for item in [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input:
            kind = item.get("type") or "message"
            if kind == "message" and isinstance(item.get("role"), str):
                for field in (key for key, value in item.items() if value and key not in MESSAGE):
                    raise ApiError(400, f"{field!a:.60} of a message is not read by this server", "input")
                messages.append({"role": item["role"], "content": plain_text(item.get("content"))})
            elif kind == "function_call":  # belongs to the assistant's turn, and may stand beside others and a text
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            elif kind == "function_call_output":
                output = plain_text(item.get("output"))
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            else:
                message = f"an item of type {kind!a:.60} is not read by this server, or lacks its role"
                raise ApiError(400, message, "input", "unsupported")
        return messages


def plain_text(content: Any) -> str:
    """The text of a message or of a tool's output: a text, or parts that are texts."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        known = isinstance(part, dict) and part.get("type") in (None, "text", "input_text", "output_text")
        if not known or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ApiError(400, f"content of type {kind!a:.60} is not read by this server, only text", "input")
        texts.append(part["text"])
    return "".join(texts)


class ResponsesWriter(ChatWriter):
    """Words one chat as a response and its events."""

    def __init__(self, *args, body: ResponsesBody):
        super().__init__(*args)
        self.asked, self.events = body, itertools.count()
        self.output: list[dict] = []
        self.part: dict | None = None  # the text that is being written
        self.reason: str | None = None

    def response(self, status: str, **more) -> dict:
        body, params, usage = self.asked, self.job.requests[0].params, self.usage()
        form = body.text.format.model_dump(by_alias=True, exclude_unset=True) if body.text and body.text.format else {}
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        return {
            "id": f"resp_{self.head['id'].rpartition('-')[2]}",
            "object": "response",
            "created_at": self.head["created"],
            "model": self.head["model"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "output": self.output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"} | form},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump(exclude_unset=True) for tool in body.tools or ()],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else counts,
        } | more

    def event(self, kind: str, **fields) -> bytes:
        kind = f"response.{kind}"
        return f"event: {kind}\n".encode() + sse({"type": kind, "sequence_number": next(self.events)} | fields)

    def start(self) -> Iterator[bytes]:
        for kind in ("created", "in_progress"):
            yield self.event(kind, response=self.response("in_progress"))

    def feed(self, delta: Delta) -> Iterator[bytes]:
        text, calls, logprobs, self.reason = self.parts(delta)
        scores = logprobs["content"] if logprobs else []
        if text or scores or (self.reason and not calls and not self.output):
            yield from self.open_message()
            self.part["text"] += text
            self.part["logprobs"] += scores
            yield self.event("output_text.delta", **self.place(), delta=text, logprobs=scores)
        for call in calls:
            yield from self.close_message()
            yield from self.call(call)
        if self.reason is not None:
            yield from self.close_message(self.status)

    def place(self) -> dict:
        """Where the text that is being written stands."""
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, "content_index": 0}

    def open_item(self, **fields) -> Iterator[bytes]:
        item = {"id": f"{PREFIXES[fields['type']]}_{uuid.uuid4().hex}", "status": "in_progress"} | fields
        self.output.append(item)
        yield self.event("output_item.added", output_index=len(self.output) - 1, item=item)

    def close_item(self, status: str = "completed") -> Iterator[bytes]:
        item = self.output[-1]
        item["status"] = status
        yield self.event("output_item.done", output_index=len(self.output) - 1, item=item)

    def open_message(self) -> Iterator[bytes]:
        if self.part is None:
            yield from self.open_item(type="message", role="assistant", content=[])
            self.part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self.event("content_part.added", **self.place(), part=self.part)
            self.output[-1]["content"].append(self.part)

    def close_message(self, status: str = "completed") -> Iterator[bytes]:
        if self.part is not None:
            scores = self.part["logprobs"]
            yield self.event("output_text.done", **self.place(), text=self.part["text"], logprobs=scores)
            yield self.event("content_part.done", **self.place(), part=self.part)
            yield from self.close_item(status)
            self.part = None

    def call(self, call: dict) -> Iterator[bytes]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        yield from self.open_item(type="function_call", call_id=call["id"], name=name, arguments="")
        where = {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}
        yield self.event("function_call_arguments.delta", **where, delta=arguments)
        self.output[-1]["arguments"] = arguments
        yield self.event("function_call_arguments.done", **where, name=name, arguments=arguments)
        yield from self.close_item()

    def end(self) -> Iterator[bytes]:
        status = self.status
        yield self.event(status, response=self.response(status))

    @property
    def status(self) -> str:
        return "incomplete" if self.reason == "length" else "completed"

    def failure(self, error: ApiError) -> bytes:
        cause = {"code": "server_error", "message": error.message}
        return self.event("failed", response=self.response("failed", error=cause))

    def whole(self) -> dict:
        (whole,) = self.whole_deltas()
        rest = replace(whole, logprobs=[], finish_reason=None, stop_reason=None)
        pieces = [replace(rest, text=character) for character in whole.text]  # items in the order of a stream
        for delta in [replace(rest, text="", logprobs=whole.logprobs), *pieces, replace(whole, text="", logprobs=[])]:
            for _ in self.feed(delta):
                pass
        return self.response(self.status)


def responses_routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/responses", response_model=None, responses=streamed("text/event-stream"))
    async def responses(body: ResponsesBody, http: Request) -> Response:
        """Answer a conversation of items."""
        headers, chat = body.headers(), body.chat()
        job, parser = await converse(service, chat)
        return await service.answer(http, job, ResponsesWriter(job, chat, parser, body=body), headers, body.user)

    return router
