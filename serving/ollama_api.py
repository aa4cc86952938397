"""Ollama's /api/generate and /api/chat as a thin adapter, so that what speaks to Ollama can speak to this engine.

The problem. Many editors and chat programs know only Ollama's API. It has other names for the same things, streams
unless told not to, and separates its JSON objects by newlines instead of wrapping them in events.

The idea. Translate the body into a prompt and SamplingParams, and deltas into lines:

    {"model": "smollm2", "prompt": "hi", "options": {"num_predict": 8, "temperature": 0}}
        └► SamplingParams(max_tokens=8, temperature=0) ─► {"response": "He", "done": false}  {"done": true, ...}

Unset options have Ollama's documented defaults (temperature 0.8, top_k 40, top_p 0.9); num_predict -1 or -2 is no limit
but the context. The rule for unknown fields is that of openai_schema.py. Options that would change the model or its
memory (num_ctx, num_gpu ...) belong to the server's command line and are ignored, as Ollama's clients send them out of
habit; images, tools and `suffix` are refused.

Source: Ollama's API documentation (docs/api.md). Left out: pulling and making models, /api/embed (openai_api.py says
why), `context` (the prefix cache finds a conversation again without it), and tools (use /v1/chat/completions).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import create_model

from request import Delta
from sampling import SamplingParams
from serving.engine_thread import Job, Served
from serving.guard import ApiError, error_body
from serving.openai_schema import Body, Messages, Texts, asked, sampling_fields
from serving.service import Service

DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
# What /api/ has no place for in its answers, or another name.
ELSEWHERE = "n best_of beam_width logprobs prompt_logprobs json_schema max_tokens repetition_penalty".split()


OptionFields = create_model("OptionFields", __base__=Body, **sampling_fields(*ELSEWHERE))


class Options(OptionFields):
    """The fields of SamplingParams, two of them under Ollama's names."""

    num_predict: int | None = None
    repeat_penalty: float | None = None


class OllamaBody(Body):
    """What generate and chat have in common. `format` is "json" or a JSON Schema."""

    model: str | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    images: Texts | None = None

    def params(self) -> SamplingParams:
        if self.images:
            raise ApiError(400, "images are not read by this server", "images")
        options = self.options or Options()
        limit, penalty = options.num_predict, options.repeat_penalty
        if limit is not None and limit < -2:
            message = f"num_predict={limit} is not allowed: -1 or -2 for no limit, or a number"
            raise ApiError(400, message, "num_predict")
        more: dict[str, Any] = {"max_tokens": None if limit is None or limit < 0 else limit}
        if penalty is not None:
            more["repetition_penalty"] = penalty
        if self.format == "json":
            more["json_schema"] = {"type": "object"}
        elif isinstance(self.format, dict):
            more["json_schema"] = self.format
        elif self.format:
            raise ApiError(400, f"format={self.format[:40]!r} is not allowed: 'json' or a JSON Schema", "format")
        return SamplingParams(**(DEFAULTS | asked(options) | more))


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

    messages: Messages
    tools: list[dict[str, Any]] | None = None

    def params(self) -> SamplingParams:
        if self.tools:
            raise ApiError(400, "tools are not read by /api/chat: use /v1/chat/completions", "tools")
        if any(message.get("images") for message in self.messages):
            raise ApiError(400, "images are not read by this server", "messages")
        return super().params()


class OllamaWriter:
    """Words a job's answer as lines of JSON."""

    media_type = "application/x-ndjson"

    def __init__(self, job: Job, chat: bool):
        self.job, self.chat = job, chat

    def feed(self, delta: Delta) -> Iterator[bytes]:
        if delta.text:
            yield line(self._object(delta.text) | {"done": False})

    def end(self) -> Iterator[bytes]:
        yield line(self._last(""))

    def failure(self, error: ApiError) -> bytes:
        return line(error_body(error, "/api/"))

    def whole(self) -> dict:
        return self._last(self.job.requests[0].answers[0].text)

    def _object(self, text: str) -> dict:
        content = {"message": {"role": "assistant", "content": text}} if self.chat else {"response": text}
        return {"model": self.job.served.name, "created_at": datetime.now(timezone.utc).isoformat()} | content

    def _last(self, text: str) -> dict:
        """The final object: why it ended, and the figures (nanoseconds)."""
        request = self.job.requests[0]
        answer = request.answers[0]
        first = request.first_token or request.finished_at
        return self._object(text) | {
            "done": True,
            "done_reason": answer.finish_reason,
            "total_duration": int((time.perf_counter() - request.arrival) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": len(request.prompt_ids),
            "prompt_eval_duration": int((first - request.arrival) * 1e9),
            "eval_count": len(answer.token_ids),
            "eval_duration": int((request.finished_at - first) * 1e9),
        }


def ollama_routes(service: Service) -> APIRouter:
    """The routes under /api/."""
    router = APIRouter(prefix="/api", tags=["Ollama"])

    async def answer(http: Request, served: Served, body: OllamaBody, ids: list[int], chat: bool) -> Response:
        params, headers = body.params(), body.headers()
        job = await service.submit(served, [(ids, None)], params, streaming=body.stream is not False)
        return await service.answer(http, job, OllamaWriter(job, chat), headers)

    @router.post("/generate", response_model=None)
    async def generate(body: GenerateBody, http: Request) -> Response:
        """Answer one prompt."""
        if body.suffix:
            raise ApiError(400, "'suffix' is not supported: these models do not fill in the middle", "suffix")
        served = service.model(body.model)
        if body.raw or not served.llm.tokenizer.has_chat_template:
            ids = await service.help(service.encode, served, body.prompt)
        else:
            ids = await service.help(service.encode_chat, served, body.messages(), None)
        return await answer(http, served, body, ids, chat=False)

    @router.post("/chat", response_model=None)
    async def chat(body: OllamaChatBody, http: Request) -> Response:
        """Answer a conversation."""
        served = service.model(body.model)
        ids = await service.help(service.encode_chat, served, body.messages, None)
        return await answer(http, served, body, ids, chat=True)

    @router.get("/tags", response_model=None)
    async def tags() -> dict:
        """The models there are."""
        models = []
        for served in service.engine.models.values():
            config, made = served.llm.config, datetime.fromtimestamp(served.created, timezone.utc).isoformat()
            details = {"family": config.architecture, "format": "vitrine"}
            models.append({"name": served.name, "model": served.name, "modified_at": made, "details": details})
        return {"models": models}

    @router.get("/version", response_model=None)
    async def version() -> dict:
        """A version high enough for clients that check it."""
        return {"version": "0.5.0"}

    return router


def line(data: dict) -> bytes:
    return json.dumps(data, ensure_ascii=False).encode() + b"\n"
