"""From what a request says to what the engine takes: which model, which token ids, within which limits.

The problem. Turning text into ids is work: a chat template is a stranger's program that may run for seconds, a
megabyte of text takes a second to tokenise, a grammar must be compiled. Done in the event loop, it would stop every
other client's stream.

The idea. Everything that costs time in proportion to what was sent is done by a few helper threads, before anything is
queued; what is wrong with a request is found there, and comes back as 400.

    body ─► model by name ─► helpers: template, tokeniser, grammar ─► length check ─► EngineThread.submit ─► Job
            404                       400                              400             429, 503

Both APIs (openai_api.py, ollama_api.py) are thin layers over `Service`: they read a body, call `submit`, and word the
answer. A prompt that must be too long is refused before it is tokenised, since no token stands for more bytes than the
longest one.

Left out: queueing per client or per key; whoever may use the server may use all of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from policies import POLICIES
from sampling import SamplingParams
from serving.engine_thread import EngineThread, Job, Served
from serving.guard import ApiError

log = logging.getLogger("vitrine")


@dataclass(frozen=True)
class Limits:
    """What one request, or one client, may ask for."""

    max_body: int = 4 << 20  # bytes
    max_choices: int = 128  # answers to one request: prompts times n or best_of
    stall_seconds: float = 60.0  # a client that neither reads nor sends what it owes for so long is taken for gone


class Service:
    """The models behind their names, and the way of a request into the engine."""

    def __init__(self, engine: EngineThread, limits: Limits, log_prompts: bool = False):
        self.engine, self.limits, self.log_prompts = engine, limits, log_prompts
        self.helpers = ThreadPoolExecutor(2, thread_name_prefix="helper")

    def model(self, name: str | None) -> Served:
        """The model of that name. Without a name: the only one there is. Raises ApiError 404."""
        models = self.engine.models
        if name is None and len(models) == 1:
            return next(iter(models.values()))
        if name in models:
            return models[name]
        known = ", ".join(repr(known) for known in models)
        if name is None:
            raise ApiError(400, f"'model' is missing, and this server has several: {known}", "model")
        raise ApiError(404, f"there is no model {name[:100]!r} here; there is {known}", "model", "model_not_found")

    async def help(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function that takes time in a helper thread."""
        return await asyncio.get_running_loop().run_in_executor(self.helpers, partial(function, *args, **kwargs))

    # -- text to ids

    def encode(self, served: Served, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a plain text. For helper threads. Raises ApiError if it cannot fit the context."""
        self._check_length(served, text)
        return served.llm.tokenizer.encode(text, add_special_tokens)

    def encode_chat(self, served: Served, messages: list[dict], tools: list[dict] | None, **options: Any) -> list[int]:
        """Ids of a conversation. For helper threads. Raises TemplateError, or ApiError if tools would be lost."""
        tokenizer = served.llm.tokenizer
        ids = tokenizer.encode_chat(messages, tools=tools, **options)
        if tools and ids == tokenizer.encode_chat(messages, **options):
            raise ApiError(400, f"the chat template of {served.name!r} does not show tools to the model", "tools")
        return ids

    def _check_length(self, served: Served, text: str) -> None:
        context = served.llm.max_model_len
        if len(text) > context * served.longest_token:
            raise ApiError(
                400,
                f"a prompt of {len(text)} characters has more than {len(text) // served.longest_token} tokens; the "
                f"context of {served.name!r} is {context} tokens, prompt and answer together",
                code="context_length_exceeded",
            )

    # -- into the engine

    async def submit(
        self,
        served: Served,
        prompts: list[tuple[list[int], str | None]],
        params: SamplingParams,
        priority: int = 0,
        namespace: Hashable = None,
        streaming: bool = False,
    ) -> Job:
        """Check what the request as a whole asks for, and queue it. Raises ApiError, ValueError or Unavailable."""
        width = params.beam_width or params.best_of or params.n
        if len(prompts) * width > self.limits.max_choices:
            raise ApiError(
                400,
                f"{len(prompts)} prompts with {width} answers each: one request may ask for "
                f"{self.limits.max_choices} answers in all; lower n, or send several requests",
                "n" if width > 1 else "prompt",
            )
        if priority and served.llm.scheduler.policy is not POLICIES["priority"]:
            raise ApiError(400, f"priority={priority} needs a server started with --policy priority", "priority")
        # A grammar takes long to compile: here, so that the engine thread finds it ready. A bad one is refused.
        await self.help(served.llm.engine.guides.answer, params, prompts[0][0])
        return await self.engine.submit(served, prompts, params, priority, namespace, streaming)

    def record(self, path: str, job: Job, user: str | None = None) -> None:
        """One line in the log for a request that is over. Prompts and answers only if --log-prompts asks for them."""
        for request in job.requests:
            choices = request.answers
            reasons = ",".join(choice.finish_reason or "left" for choice in choices)
            ttft = f"{request.first_token - request.arrival:.3f}s" if request.first_token else "-"
            line = (
                f"{path} model={job.served.name} prompt={len(request.prompt_ids)} cached={request.num_cached_tokens} "
                f"generated={sum(len(choice.token_ids) for choice in choices)} finish={reasons} ttft={ttft} "
                f"total={time.perf_counter() - request.arrival:.3f}s"
            )
            if user is not None:
                line += f" user={user[:64]!a}"
            if self.log_prompts:
                prompt = request.prompt
                if prompt is None:
                    prompt = job.served.llm.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
                line += f" prompt_text={prompt!r} answers={[choice.text for choice in choices]!r}"
            log.info(line)
