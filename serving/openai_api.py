"""OpenAI's endpoints over the engine: completions, chat, models, and their streams.

The problem. The official clients read exact shapes: a role only in the first chunk of a stream, one finish_reason for
each choice, usage in a chunk of its own and only if asked for, `[DONE]` once, an error as a chunk and then the end.

The idea. An answer has one writer, which is fed deltas and turns each into chunks. An answer in one piece is the same
writer fed with everything at once, so it cannot differ from a stream.

    job.read() ─► delta ─► writer.feed ─► chunk ─► data: {...}                 stream
    all of it  ─► delta ─► writer.whole_choice  ─► {"choices": [...]}          in one piece

Source: OpenAI's API reference. Left out: /v1/embeddings. The mean of the hidden states of a model that was trained to
predict the next token is a vector, but its distances mean little, so it is refused and not faked.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from automata import GrammarError
from request import Delta
from sampling import SamplingParams
from serving.engine_thread import Job, Served
from serving.guard import ApiError, error_body, sse, streamed
from serving.logprobs import ShownTokens, chat_logprobs, completion_logprobs, prompt_offsets
from serving.openai_schema import NO_EMBEDDINGS, ChatBody, CompletionBody, DetokenizeBody, SamplingBody, TokenizeBody
from serving.service import Service
from serving.tools import FORCED, ToolParser, find_layout, forced_schema


class Writer:
    """Words one job's answers. Subclasses know the shape of a choice, and of its chunks."""

    media_type = "text/event-stream"
    prefix = kind = chunk_kind = ""

    def __init__(self, job: Job, body: SamplingBody):
        self.job, self.body = job, body
        self.tokenizer = job.served.llm.tokenizer
        self.head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": job.served.name}
        self.shown: dict[int, ShownTokens] = {}

    def number(self, delta: Delta) -> int:
        """Of the choice, over all prompts of the request."""
        return self.job.requests.index(delta.request) * delta.request.params.n + delta.index

    def shown_tokens(self, delta: Delta) -> list:
        """The tokens whose text this delta shows, with their offsets."""
        number = self.number(delta)
        if number not in self.shown:
            self.shown[number] = ShownTokens(delta.request)
        return self.shown[number].feed(delta)

    def chunk(self, choices: list[dict], usage: dict | None = None) -> bytes:
        chunk = self.head | {"object": self.chunk_kind, "choices": choices}
        return sse(chunk | ({"usage": usage} if self.body.include_usage else {}))

    def start(self) -> Iterator[bytes]:
        yield from ()

    def waiting(self) -> bytes:
        return b": no token yet\n\n"

    def feed(self, delta: Delta) -> Iterator[bytes]:
        for choice in self.chunk_choices(delta):
            yield self.chunk([choice])

    def end(self) -> Iterator[bytes]:
        if self.body.include_usage:
            yield self.chunk([], self.usage())
        yield sse("[DONE]")

    def failure(self, error: ApiError) -> bytes:
        return sse(error_body(error))

    def usage(self) -> dict:
        requests = self.job.requests
        prompt = sum(len(request.prompt_ids) for request in requests)
        generated = sum(len(answer.token_ids) for request in requests for answer in request.answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(request.num_cached_tokens for request in requests)},
        }

    def whole(self) -> dict:
        """The answer in one piece."""
        choices = [self.whole_choice(delta) for delta in self.whole_deltas()]
        return self.head | {"object": self.kind, "choices": choices, "usage": self.usage()}

    def whole_deltas(self) -> Iterator[Delta]:
        """Each answer as one delta."""
        for request in self.job.requests:
            for o in request.output().outputs:
                yield Delta(request, o.index, o.text, o.token_ids, o.logprobs or [], o.finish_reason, o.stop_reason)


class CompletionWriter(Writer):
    """{"text", "logprobs"}; with `echo` the prompt comes first."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, job: Job, body: CompletionBody):
        super().__init__(job, body)
        self.lengths: dict[int, int] = {}  # choice -> characters of the prompt that its text begins with

    def whole_choice(self, delta: Delta) -> dict:
        number, text, tokens, logprobs = self.number(delta), delta.text, [], None
        if number not in self.lengths:
            self.lengths[number] = 0
            if self.body.echo:
                ids = delta.request.prompt_ids
                prompt, offsets = prompt_offsets(self.tokenizer, ids, delta.request.prompt)
                text, self.lengths[number] = prompt + text, len(prompt)
                if self.body.logprobs is not None:
                    tokens = list(zip(ids, delta.request.prompt_logprobs, offsets, strict=True))
        if self.body.logprobs is not None:
            start = self.lengths[number]
            tokens += [(sampled.token, sampled, start + offset) for sampled, offset in self.shown_tokens(delta)]
            logprobs = completion_logprobs(self.tokenizer, tokens, top=self.body.logprobs > 0)
        reasons = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        return {"index": number, "text": text, "logprobs": logprobs} | reasons

    def chunk_choices(self, delta: Delta) -> list[dict]:
        choice = self.whole_choice(delta)
        return [choice] if choice["text"] or delta.finish_reason or (choice["logprobs"] or {}).get("tokens") else []


class ChatWriter(Writer):
    """{"message": {"role", "content", "tool_calls"}, "logprobs"}; in a stream "delta" instead."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, job: Job, body: ChatBody, make_parser: Callable[[], ToolParser]):
        super().__init__(job, body)
        self.parsers = [make_parser() for _ in range(job.requests[0].params.n)]  # one for each choice
        self.calls = [0] * len(self.parsers)  # made by each

    def parts(self, delta: Delta) -> tuple[str, list[dict], dict | None, str | None]:
        """Text, calls, log-probabilities and finish_reason that a delta brings."""
        reason, parser, first = delta.finish_reason, self.parsers[delta.index], self.calls[delta.index]
        text, calls = parser.feed(delta.text)
        if reason is not None:
            rest, last = parser.finish()
            text, calls = text + rest, calls + last
        if self.body.parallel_tool_calls is False:
            calls = calls[: 1 - first]
        self.calls[delta.index] += len(calls)
        calls = [{"index": first + i} | call for i, call in enumerate(calls)]
        logprobs = None
        if self.body.logprobs:
            tokens = self.shown_tokens(delta)
            logprobs = chat_logprobs(self.tokenizer, tokens) if tokens or reason else None
        return text, calls, logprobs, "tool_calls" if reason == "stop" and self.calls[delta.index] else reason

    def whole_choice(self, delta: Delta) -> dict:
        text, calls, logprobs, reason = self.parts(delta)
        message: dict = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["content"] = text if text.strip() else None
            message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
        reasons = {"finish_reason": reason, "stop_reason": delta.stop_reason}
        return {"index": delta.index, "message": message, "logprobs": logprobs} | reasons

    def start(self) -> Iterator[bytes]:
        """The role, as soon as the request is taken: a long prompt may keep its first token for a minute."""
        for number in range(len(self.parsers)):
            yield self.chunk([chunk_choice(number, {"role": "assistant", "content": ""})])

    def chunk_choices(self, delta: Delta) -> Iterator[dict]:
        text, calls, logprobs, reason = self.parts(delta)
        if text or (logprobs and logprobs["content"]):
            yield chunk_choice(delta.index, {"content": text}, logprobs=logprobs)
        for call in calls:
            yield chunk_choice(delta.index, {"tool_calls": [call]})
        if reason is not None:
            yield chunk_choice(delta.index, {}, finish_reason=reason, stop_reason=delta.stop_reason)


def chunk_choice(number: int, delta: dict, **more) -> dict:
    return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None} | more


def openai_routes(service: Service) -> APIRouter:
    """Each handler reads a body, submits a job, and lets a writer word it."""
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/completions", response_model=None, responses=streamed("text/event-stream"))
    async def completions(body: CompletionBody, http: Request) -> Response:
        """Continue one or more prompts."""
        served, headers = service.model(body.model), body.headers()
        job = await service.submit(served, body.prompts(), body.params(), **body.routing())
        return await service.answer(http, job, CompletionWriter(job, body), headers, body.user)

    @router.post("/v1/chat/completions", response_model=None, responses=streamed("text/event-stream"))
    async def chat(body: ChatBody, http: Request) -> Response:
        """Answer a conversation."""
        headers = body.headers()
        job, parser = await converse(service, body)
        return await service.answer(http, job, ChatWriter(job, body, parser), headers, body.user)

    @router.post("/v1/embeddings", response_model=None)
    async def embeddings() -> Response:
        """Refused: the models served here are no embedding models."""
        raise ApiError(400, NO_EMBEDDINGS, None, "unsupported")

    @router.get("/v1/models", response_model=None)
    async def models() -> dict:
        """The models there are."""
        return {"object": "list", "data": [card(served) for served in service.engine.models.values()]}

    @router.get("/v1/models/{name:path}", response_model=None)
    async def one_model(name: str) -> dict:
        """One of them."""
        return card(service.model(name))

    add_token_routes(router, service)
    return router


def add_token_routes(router: APIRouter, service: Service) -> None:
    """vLLM's two routes between text and ids."""

    @router.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeBody) -> Response:
        """Ids of a text or of a conversation."""
        served, headers = service.model(body.model), body.headers()
        body.check()
        if body.prompt is not None:
            ids = await service.encode(served, body.prompt, body.add_special_tokens is not False)
        else:
            ids = await service.encode_chat(served, body.messages, **body.turn_options())
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": served.llm.max_model_len}, 200, headers)

    @router.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeBody) -> Response:
        """The text of ids, control tokens included."""
        served, headers = service.model(body.model), body.headers()
        bad = next((i for i in body.tokens if not 0 <= i < served.llm.config.vocab_size), None)
        if bad is not None:
            raise ApiError(400, f"{bad} is no token id of this model", "tokens")
        decode, length = served.llm.tokenizer.decode, len(body.tokens)
        text = await service.help(decode, body.tokens, skip_special_tokens=False, length=length)
        return JSONResponse({"prompt": text}, 200, headers)


async def converse(service: Service, body: ChatBody) -> tuple[Job, Callable[[], ToolParser]]:
    """Queue the answer to a conversation. Returns its job, and what makes a reader of its text."""
    served, (tools, called) = service.model(body.model), body.offered_tools()
    schema = {"json_schema": forced_schema(called)} if called else {}
    params, options = body.params(**schema), body.template_options()
    ids = await service.encode_chat(served, body.messages, tools or None, **options)
    layout = FORCED if called else await service.help(find_layout, served.llm.tokenizer) if tools else None
    try:
        job = await service.submit(served, [ids], params, **body.routing())
    except GrammarError:
        await name_bad_tool(service, served, called)
        raise
    return job, partial(ToolParser, layout, tools)


async def name_bad_tool(service: Service, served: Served, tools: list[dict]) -> None:
    """Raise ApiError for the first tool whose parameters cannot be compiled."""
    for tool in tools:
        name = tool["function"]["name"]
        try:
            await service.compile(served, SamplingParams(json_schema=forced_schema([tool])))
        except GrammarError as error:
            raise ApiError(400, f"the parameters of tool {name!r}: {error}", "tools") from error


def card(served: Served) -> dict:
    """A model as /v1/models describes it."""
    card = {"id": served.name, "object": "model", "created": served.created, "owned_by": "vitrine"}
    return card | {"max_model_len": served.llm.max_model_len}
