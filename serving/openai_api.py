"""OpenAI's endpoints over the engine: completions, chat, models, and their streams.

The problem. The official clients read exact shapes: a role only in the first chunk of a stream, one finish_reason for
each choice, usage in a chunk of its own and only if asked for, `[DONE]` once, an error as a chunk and then the end.

The idea. An answer has one writer, which is fed deltas and turns each into chunks. A stream sends them as they come;
an answer in one piece is the same writer fed with everything at once. So the two cannot differ.

    job.read() ─► delta ─► writer.feed ─► chunk ─► data: {...}          stream
    all of it  ─► delta ─► writer.feed ─► parts ─► {"choices": [...]}   in one piece

Choices are numbered over all prompts of a request: prompt * n + number of the answer.

Source: OpenAI's API reference. openai_schema.py holds the fields and the rule for unknown ones, tools.py and
logprobs.py two parts of the answers. Left out: /v1/embeddings. The models served here were trained to predict the
next token; the mean of their hidden states is a vector, but its distances mean little, so it is refused and not faked.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from request import Delta
from serving.engine_thread import Job, Served
from serving.guard import ApiError, EventStream, error_body, internal_error, sse, until_left
from serving.logprobs import Trail, chat_logprobs, completion_logprobs, prompt_places
from serving.openai_schema import ChatBody, CompletionBody, DetokenizeBody, SamplingBody, TokenizeBody
from serving.service import Service
from serving.tools import ForcedCall, ToolParser, find_layout, forced_schema


class Writer:
    """Words one job's answers. Subclasses know the shape of a choice."""

    prefix = kind = chunk_kind = ""

    def __init__(self, job: Job, body: SamplingBody):
        self.job, self.body = job, body
        self.tokenizer = job.served.llm.tokenizer
        self.numbers = {request.id: i for i, request in enumerate(job.requests)}
        self.head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": job.served.name}
        self.trails: dict[int, Trail] = {}

    def choice_number(self, delta: Delta) -> int:
        return self.numbers[delta.request.id] * delta.request.params.n + delta.index

    def trail(self, delta: Delta) -> Trail:
        number = self.choice_number(delta)
        if number not in self.trails:
            self.trails[number] = Trail(delta.request)
        return self.trails[number]

    def chunk(self, choices: list[dict]) -> dict:
        nothing_yet = {"usage": None} if self.body.include_usage else {}
        return self.head | {"object": self.chunk_kind, "choices": choices} | nothing_yet

    def usage(self) -> dict:
        requests = self.job.requests
        prompt = sum(len(request.prompt_ids) for request in requests)
        generated = sum(len(choice.token_ids) for request in requests for choice in request.answers)
        cached = sum(request.num_cached_tokens for request in requests)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def whole(self) -> dict:
        """The answer in one piece."""
        choices = []
        for request in self.job.requests:
            for o in request.output().outputs:
                delta = Delta(request, o.index, o.text, o.token_ids, o.logprobs or [], o.finish_reason, o.stop_reason)
                choices.append(self.whole_choice(delta))
        return self.head | {"object": self.kind, "choices": choices, "usage": self.usage()}


class CompletionWriter(Writer):
    """{"text", "logprobs"}; with `echo` the prompt comes first."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, job: Job, body: CompletionBody):
        super().__init__(job, body)
        self.lengths: dict[int, int] = {}  # choice -> characters of the prompt that its text begins with

    def whole_choice(self, delta: Delta) -> dict:
        number, text, tokens = self.choice_number(delta), delta.text, []
        if number not in self.lengths:
            self.lengths[number] = 0
            if self.body.echo:
                ids = delta.request.prompt_ids
                prompt, places = prompt_places(self.tokenizer, ids, delta.request.prompt)
                text, self.lengths[number] = prompt + text, len(prompt)
                if self.body.logprobs is not None:
                    tokens = list(zip(ids, delta.request.prompt_logprobs, places, strict=True))
        logprobs = None
        if self.body.logprobs is not None:
            start = self.lengths[number]
            tokens += [(sampled.token, sampled, start + place) for sampled, place in self.trail(delta).feed(delta)]
            logprobs = completion_logprobs(self.tokenizer, tokens, 0, top=self.body.logprobs > 0)
        return {
            "index": number,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def feed(self, delta: Delta) -> list[dict]:
        choice = self.whole_choice(delta)
        news = choice["text"] or choice["finish_reason"] or (choice["logprobs"] or {}).get("tokens")
        return [self.chunk([choice])] if news else []


class ChatWriter(Writer):
    """{"message": {"role", "content", "tool_calls"}, "logprobs"}; in a stream "delta" instead."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, job: Job, body: ChatBody, make_parser):
        super().__init__(job, body)
        self.make_parser = make_parser
        self.parsers: dict[int, ToolParser | ForcedCall | None] = {}
        self.calls: dict[int, int] = {}  # choice -> calls made

    def parts(self, delta: Delta) -> tuple[str, list[dict], dict | None, str | None]:
        """Text, calls, log-probabilities and finish_reason that a delta brings."""
        number = self.choice_number(delta)
        parser = self.parsers.setdefault(number, self.make_parser() if self.make_parser else None)
        text, calls = (delta.text, []) if parser is None else parser.feed(delta.text)
        reason = delta.finish_reason
        if parser is not None and reason is not None:
            rest, last = parser.finish()
            text, calls = text + rest, calls + last
        first = self.calls.get(number, 0)
        self.calls[number] = first + len(calls)
        calls = [{"index": first + i} | call for i, call in enumerate(calls)]
        logprobs = None
        if self.body.logprobs:
            tokens = self.trail(delta).feed(delta)
            logprobs = chat_logprobs(self.tokenizer, tokens) if tokens or reason else None
        return text, calls, logprobs, "tool_calls" if reason == "stop" and self.calls[number] else reason

    def whole_choice(self, delta: Delta) -> dict:
        text, calls, logprobs, reason = self.parts(delta)
        message: dict = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["content"] = text if text.strip() else None
            message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
        return {
            "index": self.choice_number(delta),
            "message": message,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": delta.stop_reason,
        }

    def feed(self, delta: Delta) -> list[dict]:
        number = self.choice_number(delta)
        opening = number not in self.parsers
        text, calls, logprobs, reason = self.parts(delta)
        chunks = []

        def add(content: dict, logprobs: dict | None = None, **more) -> None:
            choice = {"index": number, "delta": content, "logprobs": logprobs, "finish_reason": None} | more
            chunks.append(self.chunk([choice]))

        if opening:
            add({"role": "assistant", "content": ""})
        if text or (logprobs and logprobs["content"]):
            add({"content": text}, logprobs)
        for call in calls:
            add({"tool_calls": [call]})
        if reason is not None:
            add({}, finish_reason=reason, stop_reason=delta.stop_reason)
        return chunks


class OpenAIApi:
    """The routes. Each handler reads a body, submits a job, and lets a writer word it."""

    def __init__(self, service: Service):
        self.service = service
        self.layouts: dict[str, object] = {}  # model -> how it writes calls of tools, once it was asked
        self.router = APIRouter(tags=["OpenAI"])
        for path, handler, method in (
            ("/v1/completions", self.completions, "POST"),
            ("/v1/chat/completions", self.chat, "POST"),
            ("/v1/embeddings", self.embeddings, "POST"),
            ("/v1/models", self.models, "GET"),
            ("/v1/models/{name:path}", self.one_model, "GET"),
            ("/tokenize", self.tokenize, "POST"),
            ("/detokenize", self.detokenize, "POST"),
        ):
            self.router.add_api_route(path, handler, methods=[method], response_model=None)

    async def completions(self, body: CompletionBody, http: Request) -> Response:
        """Continue one or more prompts."""
        served, headers = self.service.model(body.model), body.headers()
        params, prompts = body.completion_params(), body.prompts()
        ids = await self.service.help(self._encode_all, served, prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        job = await self.service.submit(
            served, list(zip(ids, texts, strict=True)), params, body.priority or 0, body.namespace, bool(body.stream)
        )
        return await self._answer(http, job, CompletionWriter(job, body), headers)

    async def chat(self, body: ChatBody, http: Request) -> Response:
        """Answer a conversation."""
        served, headers = self.service.model(body.model), body.headers()
        tools, wish = body.tool_wish()
        options, make_parser = body.template_options(), None
        if wish is not None:
            params = body.chat_params(json_schema=forced_schema(tools, wish or None))
            make_parser = lambda: ForcedCall(wish or None)  # noqa: E731
        else:
            params = body.chat_params()
        ids = await self.service.help(self.service.encode_chat, served, body.messages, tools or None, **options)
        if tools and wish is None:
            layout = await self.service.help(self._layout, served)
            make_parser = lambda: ToolParser(layout, tools)  # noqa: E731
        job = await self.service.submit(
            served, [(ids, None)], params, body.priority or 0, body.namespace, bool(body.stream)
        )
        return await self._answer(http, job, ChatWriter(job, body, make_parser), headers)

    async def embeddings(self) -> Response:
        """Refused: the models served here are no embedding models."""
        raise ApiError(400, "this server has language models only; no embeddings", None, "unsupported")

    async def models(self) -> dict:
        """The models there are."""
        return {"object": "list", "data": [self._card(served) for served in self.service.engine.models.values()]}

    async def one_model(self, name: str) -> dict:
        """One of them."""
        return self._card(self.service.model(name))

    async def tokenize(self, body: TokenizeBody) -> Response:
        """Ids of a text or of a conversation."""
        served, headers = self.service.model(body.model), body.headers()
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", "prompt")
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            ids = await self.service.help(self.service.encode, served, body.prompt, special)
        else:
            options = {"add_generation_prompt": body.add_generation_prompt}
            options["continue_final_message"] = bool(body.continue_final_message)
            ids = await self.service.help(self.service.encode_chat, served, body.messages, None, **options)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": served.llm.max_model_len}, 200, headers)

    async def detokenize(self, body: DetokenizeBody) -> Response:
        """The text of ids, control tokens included."""
        served, headers = self.service.model(body.model), body.headers()
        bad = next((i for i in body.tokens if not 0 <= i < served.llm.config.vocab_size), None)
        if bad is not None:
            raise ApiError(400, f"{bad} is no token id of this model", "tokens")
        text = await self.service.help(served.llm.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text}, 200, headers)

    # -- inside

    def _encode_all(self, served: Served, prompts: list) -> list[list[int]]:
        return [self.service.encode(served, p) if isinstance(p, str) else p for p in prompts]

    def _layout(self, served: Served):
        if served.name not in self.layouts:
            self.layouts[served.name] = find_layout(served.llm.tokenizer)
        return self.layouts[served.name]

    def _card(self, served: Served) -> dict:
        card = {"id": served.name, "object": "model", "created": served.created, "owned_by": "vitrine"}
        return card | {"max_model_len": served.llm.max_model_len}

    async def _answer(self, http: Request, job: Job, writer: Writer, headers: dict) -> Response:
        """Stream the job, or wait for its end; a client that leaves takes its job along."""

        def leave() -> None:
            self.service.engine.abort(job)
            self.service.record(http.url.path, job, writer.body.user)

        if writer.body.stream:
            stall = self.service.limits.stall_seconds
            return EventStream(self._events(job, writer), leave, "text/event-stream", stall, headers)
        try:
            if not await until_left(http.receive, job.ended.wait()):
                return Response(status_code=499)  # nobody is there to read it
            raise_failure(job)
            try:
                return JSONResponse(writer.whole(), 200, headers)
            except Exception as error:
                raise internal_error(error) from error
        finally:
            leave()

    async def _events(self, job: Job, writer: Writer) -> AsyncGenerator[bytes]:
        """The stream of a job. Whatever goes wrong in the middle is its last event."""
        try:
            while deltas := await job.read():
                for delta in deltas:
                    if delta.error or delta.finish_reason in ("abort", "error"):
                        raise_failure(job)
                    for chunk in writer.feed(delta):
                        yield sse(chunk)
            raise_failure(job)
            if writer.body.include_usage:
                yield sse(writer.chunk([]) | {"usage": writer.usage()})
        except Exception as error:
            told = internal_error(error)
            yield sse(error_body(told.status, told.message, told.param, told.code))
            return
        yield sse("[DONE]")


def raise_failure(job: Job) -> None:
    """Raise ApiError if an answer of the job ended in anything but its own end."""
    for request in job.requests:
        for choice in request.answers:
            if choice.finish_reason == "abort":
                raise ApiError(503, choice.error or "the request was aborted", None, "aborted", retry_after=10)
            if choice.finish_reason == "error":
                raise ApiError(500, choice.error or "the request failed", None, "engine_error")
            if job.ended.is_set() and choice.finish_reason is None:
                raise ApiError(503, job.served.broken or "the model has failed", None, "engine_error")
