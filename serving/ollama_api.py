"""Ollama's /api/generate and /api/chat as a thin adapter, so that what speaks to Ollama can speak to this engine.

Many editors and chat programs know only Ollama's API. It has other names for the same things, streams unless told not
to, and separates its JSON objects by newlines. So a body becomes a prompt and SamplingParams, and deltas become lines:

    {"model": "smollm2", "prompt": "hi", "options": {"num_predict": 8, "temperature": 0}}
        └► SamplingParams(max_tokens=8, temperature=0) ─► {"response": "He", "done": false}  {"done": true, ...}

Unset options have Ollama's documented defaults; num_predict -1 or -2 is no limit but the context. The rule for unknown
fields is that of openai_schema.py: options that would change the model or its memory (num_ctx, num_gpu ...) belong to
the server's command line and are ignored, as Ollama's clients send them out of habit. A body without a prompt is how
they load a model: it is here. Source: Ollama's API documentation (docs/api.md). Left out, and refused in a sentence:
pulling and making models, embeddings (openai_api.py says why), and `context`: the prefix cache finds a conversation.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import FailFast, Field, create_model
from typing_extensions import TypeAliasType

from request import Delta
from sampling import SamplingParams
from serving.engine_thread import Job, Served
from serving.guard import ApiError, error_body, streamed
from serving.openai_schema import NO_EMBEDDINGS, UNSUPPORTED, Body, asked, sampling_fields
from serving.service import Service

FOREVER = "9999-12-31T23:59:59Z"
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
# What /api/ has no place for in its answers, or another name.
ELSEWHERE = "n best_of beam_width logprobs prompt_logprobs json_schema max_tokens repetition_penalty".split()


REFUSED = {
    **dict.fromkeys(("embed", "embeddings"), NO_EMBEDDINGS),
    **dict.fromkeys("pull create copy delete push".split(), "models are chosen as the server starts, with --model"),
}


OptionFields = create_model("OptionFields", __base__=Body, **sampling_fields(*ELSEWHERE))


class Options(OptionFields):
    """The fields of SamplingParams, two of them under Ollama's names."""

    num_predict: int | None = Field(None, ge=-2)
    repeat_penalty: float | None = None


class OllamaBody(Body):
    """What generate and chat have in common. `format` is "json" or a JSON Schema."""

    unsupported: ClassVar = UNSUPPORTED | {"template": ("",), "context": ([],), "images": ([],), "tools": ([],)}

    model: str | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None

    def params(self) -> SamplingParams:
        options, form = self.options or Options(), {"type": "object"} if self.format == "json" else self.format
        if isinstance(form, str) and form:
            raise ApiError(400, f"format={form[:40]!r} is not allowed: 'json' or a JSON Schema", "format")
        limit = None if options.num_predict in (-1, -2) else options.num_predict
        more = {"json_schema": None if form == "" else form, "max_tokens": limit}
        if options.repeat_penalty is not None:
            more["repetition_penalty"] = options.repeat_penalty
        return SamplingParams(**(DEFAULTS | asked(options) | more))


class GenerateBody(OllamaBody):
    """POST /api/generate: one turn through the chat template, or with raw=true the prompt as it is."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None

    def messages(self) -> list[dict]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}]


ChatMessages = TypeAliasType("ChatMessages", Annotated[list[dict[str, Any]], FailFast()])


class OllamaChatBody(OllamaBody):
    """POST /api/chat"""

    messages: ChatMessages | None = None


class ShowBody(Body):
    model: str | None = None
    name: str | None = None  # as older clients say


class OllamaWriter:
    """Words a job's answer as lines of JSON."""

    media_type = "application/x-ndjson"

    def __init__(self, job: Job, chat: bool):
        self.job, self.chat = job, chat

    def start(self) -> Iterator[bytes]:
        yield from ()

    def waiting(self) -> bytes:
        return line(self._object("") | {"done": False})

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
        first, tokens = request.first_token or request.finished_at, len(answer.token_ids)
        seconds = request.finished_at - (first if tokens > 1 else request.arrival)
        seconds *= tokens / max(1, tokens - 1)  # the steps after the first token made the others, alone it took it all
        return self._object(text) | {
            "done": True,
            "done_reason": answer.finish_reason,
            "total_duration": int((time.perf_counter() - request.arrival) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": len(request.prompt_ids),
            "prompt_eval_duration": int((first - request.arrival) * 1e9),
            "eval_count": tokens,
            "eval_duration": int(seconds * 1e9),
        }


def ollama_routes(service: Service) -> APIRouter:
    """The routes under /api/."""
    router = APIRouter(prefix="/api", tags=["Ollama"])

    def loaded(body: OllamaBody, content: dict) -> Response:
        """The answer to a body without a prompt: the model is in memory, and stays there, whatever clients want."""
        body.params()
        keep_alive = str((body.model_extra or {}).get("keep_alive"))
        reason = "unload" if re.fullmatch(r"0[0.]*[a-z]*", keep_alive) else "load"
        head = {"model": service.model(body.model).name, "created_at": datetime.now(timezone.utc).isoformat()}
        return JSONResponse(head | content | {"done": True, "done_reason": reason}, 200, body.headers())

    async def answer(http: Request, served: Served, body: OllamaBody, prompt: str | list[int], chat: bool) -> Response:
        params, headers = body.params(), body.headers()
        job = await service.submit(served, [prompt], params, streaming=body.stream is not False)
        return await service.answer(http, job, OllamaWriter(job, chat), headers)

    @router.post("/generate", response_model=None, responses=streamed("application/x-ndjson"))
    async def generate(body: GenerateBody, http: Request) -> Response:
        """Answer one prompt."""
        if not body.prompt:
            return loaded(body, {"response": ""})
        served = service.model(body.model)
        prompt: str | list[int] = body.prompt
        if not body.raw and served.llm.tokenizer.has_chat_template:
            prompt = await service.encode_chat(served, body.messages())
        elif body.system:
            raise ApiError(400, "'system' needs a chat template, and raw=true and base models use none", "system")
        return await answer(http, served, body, prompt, chat=False)

    @router.post("/chat", response_model=None, responses=streamed("application/x-ndjson"))
    async def chat(body: OllamaChatBody, http: Request) -> Response:
        """Answer a conversation."""
        if not body.messages:
            return loaded(body, {"message": {"role": "assistant", "content": ""}})
        served = service.model(body.model)
        return await answer(http, served, body, await service.encode_chat(served, body.messages), chat=True)

    add_model_routes(router, service)
    return router


def add_model_routes(router: APIRouter, service: Service) -> None:
    """What models there are, and a sentence for what would change that."""

    @router.get("/tags", response_model=None)
    async def tags() -> dict:
        """The models there are."""
        return {"models": [card(served) for served in service.engine.models.values()]}

    @router.get("/ps", response_model=None)
    async def loaded_models() -> dict:
        """The models in memory: all of them, for as long as the server runs."""
        return {"models": [card(served) | {"expires_at": FOREVER} for served in service.engine.models.values()]}

    @router.post("/show", response_model=None)
    async def show(body: ShowBody) -> Response:
        """What a model is."""
        served = service.model(body.model or body.name)
        config, family = served.llm.config, served.llm.config.architecture
        described = {
            "details": card(served)["details"],
            "model_info": {"general.architecture": family, f"{family}.context_length": served.llm.max_model_len}
            | {f"{family}.block_count": config.num_layers, f"{family}.embedding_length": config.hidden_size},
            "capabilities": ["completion"],
        }
        return JSONResponse(described, 200, body.headers())

    async def refused(http: Request) -> Response:
        action = http.url.path.rpartition("/")[2]
        raise ApiError(400, f"/api/{action} is not supported: {REFUSED[action]}")

    for action in REFUSED:
        router.add_api_route(f"/{action}", refused, methods=["POST", "DELETE"], include_in_schema=False)

    @router.get("/version", response_model=None)
    async def version() -> dict:
        """A version high enough for clients that check it."""
        return {"version": "0.5.0"}


def card(served: Served) -> dict:
    """A model as Ollama lists it."""
    config, made = served.llm.config, datetime.fromtimestamp(served.created, timezone.utc).isoformat()
    details = {"family": config.architecture, "format": "vitrine", "quantization_level": served.llm.options.quant or ""}
    size = served.llm.model.weight_bytes
    return {"name": served.name, "model": served.name, "modified_at": made, "size": size, "details": details}


def line(data: dict) -> bytes:
    return json.dumps(data, ensure_ascii=False).encode() + b"\n"
