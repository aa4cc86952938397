"""Ollama's /api/generate and /api/chat as a thin adapter, so that what speaks to Ollama can speak to this engine.

The problem. Many editors and chat programs know only Ollama's API. It has other names for the same things, streams
unless told not to, and separates its JSON objects by newlines instead of wrapping them in events.

The idea. Translate the body into a prompt and SamplingParams, and deltas into lines:

    {"model": "smollm2", "prompt": "hi", "options": {"num_predict": 8, "temperature": 0}}
        └► SamplingParams(max_tokens=8, temperature=0) ─► {"response": "He", "done": false}  {"done": true, ...}

Unset options have Ollama's documented defaults (temperature 0.8, top_k 40, top_p 0.9); num_predict -1 or -2 is no limit
but the context. The rule for unknown fields is that of openai_schema.py. Options that would change the model or its
memory (num_ctx, num_gpu ...) belong to the server's command line and are ignored by that rule, as Ollama's clients send
them out of habit; images and `suffix` are refused.

Source: Ollama's API documentation (docs/api.md). Left out: pulling and making models, /api/embed (openai_api.py says
why), `context` (the prefix cache finds a conversation again without it), and tools (use /v1/chat/completions).
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from datetime import datetime, timezone
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from sampling import SamplingParams
from serving.engine_thread import Job
from serving.guard import ApiError, EventStream, internal_error, until_left
from serving.openai_api import raise_failure
from serving.openai_schema import Body, Real
from serving.service import Service

# Ollama's name of an option -> ours.
OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}


class Options(Body):
    num_predict: int | None = None
    temperature: Real | None = None
    top_k: int | None = None
    top_p: Real | None = None
    min_p: Real | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: Real | None = None
    presence_penalty: Real | None = None
    frequency_penalty: Real | None = None


class OllamaBody(Body):
    """What generate and chat have in common. `format` is "json" or a JSON Schema."""

    model: str | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    images: list[str] | None = None

    def params(self) -> SamplingParams:
        if self.images:
            raise ApiError(400, "images are not read by this server", "images")
        options = self.options or Options()
        given = {ours: value for name, ours in OPTIONS.items() if (value := getattr(options, name)) is not None}
        limit = options.num_predict
        if limit is not None and limit < -2:
            raise ApiError(
                400, f"num_predict={limit} is not allowed: -1 or -2 for no limit, or a number", "num_predict"
            )
        given["max_tokens"] = None if limit is None or limit < 0 else limit
        if self.format == "json":
            given["json_schema"] = {"type": "object"}
        elif isinstance(self.format, dict):
            given["json_schema"] = self.format
        elif self.format:
            raise ApiError(400, f"format={self.format[:40]!r} is not allowed: 'json' or a JSON Schema", "format")
        return SamplingParams(**(DEFAULTS | given))


class GenerateBody(OllamaBody):
    """POST /api/generate: one turn through the chat template, or with raw=true the prompt as it is."""

    prompt: str
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None

    def messages(self) -> list[dict]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}]


class OllamaChatBody(OllamaBody):
    """POST /api/chat"""

    messages: list[dict[str, Any]] = Field(min_length=1)


class OllamaApi:
    """The routes under /api/."""

    def __init__(self, service: Service):
        self.service = service
        self.router = APIRouter(prefix="/api", tags=["Ollama"])
        for path, handler, method in (
            ("/generate", self.generate, "POST"),
            ("/chat", self.chat, "POST"),
            ("/tags", self.tags, "GET"),
            ("/version", self.version, "GET"),
        ):
            self.router.add_api_route(path, handler, methods=[method], response_model=None)

    async def generate(self, body: GenerateBody, http: Request) -> Response:
        """Answer one prompt."""
        if body.suffix:
            raise ApiError(400, "'suffix' is not supported: these models do not fill in the middle", "suffix")
        served = self.service.model(body.model)
        if body.raw or not served.llm.tokenizer.has_chat_template:
            ids = await self.service.help(self.service.encode, served, body.prompt)
        else:
            ids = await self.service.help(self.service.encode_chat, served, body.messages(), None)
        return await self._answer(http, body, ids, lambda text: {"response": text})

    async def chat(self, body: OllamaChatBody, http: Request) -> Response:
        """Answer a conversation."""
        served = self.service.model(body.model)
        ids = await self.service.help(self.service.encode_chat, served, body.messages, None)
        return await self._answer(http, body, ids, lambda text: {"message": {"role": "assistant", "content": text}})

    async def tags(self) -> dict:
        """The models there are."""
        models = []
        for served in self.service.engine.models.values():
            config, made = served.llm.config, datetime.fromtimestamp(served.created, timezone.utc).isoformat()
            details = {"family": config.architecture, "format": "vitrine"}
            models.append({"name": served.name, "model": served.name, "modified_at": made, "details": details})
        return {"models": models}

    async def version(self) -> dict:
        """A version high enough for clients that check it."""
        return {"version": "0.5.0"}

    # -- inside

    async def _answer(self, http: Request, body: OllamaBody, ids: list[int], word) -> Response:
        streaming, headers = body.stream is not False, body.headers()
        served = self.service.model(body.model)
        job = await self.service.submit(served, [(ids, None)], body.params(), streaming=streaming)

        def leave() -> None:
            self.service.engine.abort(job)
            self.service.record(http.url.path, job)

        if streaming:
            stall = self.service.limits.stall_seconds
            return EventStream(self._lines(job, word), leave, "application/x-ndjson", stall, headers)
        try:
            if not await until_left(http.receive, job.ended.wait()):
                return Response(status_code=499)
            raise_failure(job)
            return JSONResponse(self._last(job, word(job.requests[0].answers[0].text)), 200, headers)
        finally:
            leave()

    async def _lines(self, job: Job, word) -> AsyncGenerator[bytes]:
        try:
            while deltas := await job.read():
                for delta in deltas:
                    if delta.error or delta.finish_reason in ("abort", "error"):
                        raise_failure(job)
                    if delta.text:
                        yield line(self._head(job) | word(delta.text) | {"done": False})
            raise_failure(job)
            yield line(self._last(job, word("")))
        except Exception as error:
            yield line({"error": internal_error(error).message})

    def _head(self, job: Job) -> dict:
        return {"model": job.served.name, "created_at": datetime.now(timezone.utc).isoformat()}

    def _last(self, job: Job, content: dict) -> dict:
        """The final object: why it ended, and the figures (nanoseconds)."""
        request = job.requests[0]
        choice = request.answers[0]
        first = request.first_token or request.finished_at
        return (
            self._head(job)
            | content
            | {
                "done": True,
                "done_reason": choice.finish_reason,
                "total_duration": int((time.perf_counter() - request.arrival) * 1e9),
                "load_duration": 0,
                "prompt_eval_count": len(request.prompt_ids),
                "prompt_eval_duration": int((first - request.arrival) * 1e9),
                "eval_count": len(choice.token_ids),
                "eval_duration": int((request.finished_at - first) * 1e9),
            }
        )


def line(data: dict) -> bytes:
    return json.dumps(data, ensure_ascii=False).encode() + b"\n"
