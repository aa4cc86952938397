"""From what a request says to what the engine takes, and back: which model, which token ids, within which limits.

The problem. Turning text into ids is work: a chat template is a stranger's program that may run for seconds, a
megabyte of text takes a second to tokenise, a grammar must be compiled. The event loop must not do it.

The idea. What cannot fit the context is refused unread. The rest is done by helper threads before anything is queued:
long texts and grammars by two, all others by two more.

    body ─► model by name ─► size ─► helpers: template, tokeniser, grammar ─► EngineThread.submit ─► Job
            404              400     400                                      400, 429, 503          │
    answer, in one piece or as a stream ◄───────────────────── Writer, which words it ◄──────────────┘

Both APIs read a body, call `submit`, and give `answer` a writer that knows their shapes.
Left out: queueing per client or per key; whoever may use the server may use all of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from sampling import SamplingParams
from serving.engine_thread import EngineThread, Job, Served
from serving.guard import ApiError, EventStream, internal_error, size, until_left

log = logging.getLogger("vitrine")
LONG_TEXT = 50_000  # characters


@dataclass(frozen=True)
class Limits:
    """What one request, or one client, may ask for."""

    max_body: int = 4 << 20  # bytes
    max_choices: int = 128  # answers to one request: prompts times n or best_of
    stall_seconds: float = 60.0  # a client that neither reads nor sends what it owes for so long is taken for gone


class Service:
    """The models behind their names, and the way of a request into the engine and out of it."""

    def __init__(self, engine: EngineThread, limits: Limits, log_prompts: bool = False):
        self.engine, self.limits, self.log_prompts = engine, limits, log_prompts
        self.helpers, self.long_helpers = (ThreadPoolExecutor(2, name) for name in ("helper", "long-helper"))

    def model(self, name: str | None) -> Served:
        """The model of that name. Without a name: the only one there is. Raises ApiError 404."""
        models = self.engine.models
        if name is None and len(models) == 1:
            return next(iter(models.values()))
        if served := models.get(name) or models.get((name or "").removesuffix(":latest")):  # Ollama's clients add it
            return served
        known = ", ".join(repr(known) for known in models)
        if name is None:
            raise ApiError(400, f"'model' is missing, and this server has several: {known}", "model")
        raise ApiError(404, f"there is no model {name[:100]!r} here; there is {known}", "model", "model_not_found")

    async def help(self, function: Callable[..., Any], *args: Any, length: int = 0, **kwargs: Any) -> Any:
        """Run a function that takes time in a helper thread; `length`: the characters it reads."""
        helpers = self.long_helpers if length > LONG_TEXT else self.helpers
        return await asyncio.get_running_loop().run_in_executor(helpers, partial(function, *args, **kwargs))

    def close(self) -> None:
        for helpers in (self.helpers, self.long_helpers):
            helpers.shutdown(wait=False, cancel_futures=True)

    # -- text to ids

    async def encode(self, served: Served, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a plain text. Raises ApiError if it cannot fit the context."""
        check_length(served, len(text))
        return await self.help(served.llm.tokenizer.encode, text, add_special_tokens, length=len(text))

    async def encode_chat(
        self, served: Served, messages: list[dict], tools: list | None = None, **options
    ) -> list[int]:
        """Ids of a conversation. Raises TemplateError, or ApiError if it cannot fit the context or loses its tools."""

        def render() -> list[int]:
            ids = encode(messages, tools=tools, **options)
            if tools and ids == encode(messages, **options):
                raise ApiError(400, f"the chat template of {served.name!r} does not show tools to the model", "tools")
            return ids

        encode, length = served.llm.tokenizer.encode_chat, size([messages, tools, options])
        check_length(served, length)
        return await self.help(render, length=length)

    # -- into the engine and out of it

    async def submit(
        self, served: Served, prompts: list[str | list[int]], params: SamplingParams, **routing: Any
    ) -> Job:
        """Check what the request as a whole asks for, and queue it. Raises ApiError or ValueError."""
        width, most = params.beam_width or params.best_of or params.n, self.limits.max_choices
        if len(prompts) * width > most:
            remedy = f"one request may ask for {most} answers in all; lower n, or send several requests"
            message = f"{len(prompts)} prompts with {width} answers each: {remedy}"
            raise ApiError(400, message, "n" if width > 1 else "prompt")
        if (priority := routing.get("priority")) and served.llm.options.policy != "priority":
            raise ApiError(400, f"priority={priority} needs a server started with --policy priority", "priority")
        known: list[tuple[list[int], str | None]] = []
        for prompt in prompts:
            ids = await self.encode(served, prompt) if isinstance(prompt, str) else prompt
            if len(ids) >= served.llm.max_model_len:
                raise too_long(served, str(len(ids)))
            known.append((ids, prompt if isinstance(prompt, str) else None))
        await self.compile(served, params)
        return await self.engine.submit(served, known, params, **routing)

    async def compile(self, served: Served, params: SamplingParams) -> None:
        """Prepare a structure, so that the engine thread finds it ready. Raises GrammarError."""
        if params.structured:
            await self.help(served.llm.engine.guides.answer, params, [], length=LONG_TEXT + 1)

    async def answer(
        self, http: Request, job: Job, writer, headers: dict[str, str], user: str | None = None
    ) -> Response:
        """Stream the job, or wait for its end; a client that leaves takes its job along.

        A writer words answers, as pieces of a stream of its `media_type`: `start()`, `feed(delta)`, `end()`, or as the
        last one `failure(error)`; `waiting` is sent while nothing else is. `whole()` is all in one piece, as a dict.
        """

        def leave() -> None:
            self.engine.abort(job)
            self._record(http.url.path, job, user)

        if job.streaming:
            pieces = self._pieces(job, writer)
            return EventStream(pieces, leave, writer.media_type, self.limits.stall_seconds, headers)
        try:
            if not await until_left(http.receive, job.ended.wait()):
                return Response(status_code=499)  # nobody is there to read it
            raise_failure(job)
            return JSONResponse(writer.whole(), 200, headers)
        except Exception as error:
            raise internal_error(error) from error
        finally:
            leave()

    async def _pieces(self, job: Job, writer) -> AsyncGenerator[bytes]:
        """The stream of a job. Whatever goes wrong in the middle is its last piece."""
        try:
            for piece in writer.start():
                yield piece
            while (deltas := await job.read()) or not job.ended.is_set():
                if not deltas:  # a proxy hangs up on a stream that is silent
                    yield writer.waiting()
                for delta in deltas:
                    if delta.finish_reason in ("abort", "error"):
                        raise_failure(job)
                    for piece in writer.feed(delta):
                        yield piece
            raise_failure(job)
            for piece in writer.end():
                yield piece
        except Exception as error:
            yield writer.failure(internal_error(error))

    def _record(self, path: str, job: Job, user: str | None) -> None:
        """One line in the log for each prompt. Prompts and answers only if --log-prompts asks for them."""
        for request in job.requests:
            told: dict[str, Any] = {
                "model": job.served.name,
                "prompt": len(request.prompt_ids),
                "cached": request.num_cached_tokens,
                "generated": sum(len(answer.token_ids) for answer in request.answers),
                "finish": ",".join(answer.finish_reason or "left" for answer in request.answers),
                "ttft": f"{request.first_token - request.arrival:.3f}s" if request.first_token else "-",
                "total": f"{time.perf_counter() - request.arrival:.3f}s",
            }
            if user is not None:
                told["user"] = ascii(user[:64])
            if self.log_prompts:
                prompt = request.prompt
                if prompt is None:
                    prompt = job.served.llm.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
                told |= {"prompt_text": repr(prompt), "answers": repr([answer.text for answer in request.answers])}
            log.info("%s %s", path, " ".join(f"{key}={value}" for key, value in told.items()))


def check_length(served: Served, length: int) -> None:
    """No token stands for more bytes than the longest one, so a text may be too long whatever its tokens are."""
    if length > served.llm.max_model_len * served.longest_token:
        raise too_long(served, f"{length} characters, which are more than {length // served.longest_token}")


def too_long(served: Served, size: str) -> ApiError:
    most = served.llm.max_model_len
    context = f"the context of {served.name!r} is {most} tokens, prompt and answer together; at most {most - 1} fit"
    return ApiError(400, f"a prompt of {size} tokens: {context}", code="context_length_exceeded")


def raise_failure(job: Job) -> None:
    """Raise ApiError if an answer of the job ended in anything but its own end."""
    for answer in (answer for request in job.requests for answer in request.answers):
        if answer.finish_reason == "abort":
            raise ApiError(503, answer.error or "the request was aborted", None, "aborted", Retry_After="10")
        if answer.finish_reason == "error":
            raise ApiError(500, answer.error or "the request failed", None, "engine_error")
        if job.ended.is_set() and answer.finish_reason is None:
            raise ApiError(503, job.served.broken or "the model has failed", None, "engine_error")
