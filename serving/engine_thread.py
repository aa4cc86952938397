"""One thread runs the engine; everybody else sends it messages.

The problem. A server has hundreds of clients that come, read slowly, and leave when they like. An engine has one batch
and must never wait for any of them, not even for a lock.

The idea. The engine belongs to one thread. Messages are functions in a queue, run between two steps. What a step
produced goes to the event loop in one delivery, which appends it to the unread deltas of the jobs it is for.

    event loop (all clients)                               engine thread
      submit, abort, call  ──► messages (a queue) ──► run all of them
                                                      step each engine that has work
      Job: unread deltas   ◄── one delivery ◄──────── deltas of the step
           └─► read() takes everything unread at once, merged: a slow reader gets fewer, longer pieces

Source: vLLM's AsyncLLMEngine (Kwon et al. 2023, section 5). Left out: a process for the engine, which would not share
the interpreter lock with the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from generate import LLM
from request import Delta, Request
from sampling import SamplingParams
from serving.guard import ApiError
from serving.metrics import Metrics

log = logging.getLogger("vitrine")
QUIET_S = 3.0  # a reader is told when nothing came for so long


def merged(parts: list[Delta]) -> Delta:
    """Several deltas of one answer as one."""
    last = parts[-1]
    text = "".join(part.text for part in parts)
    tokens = [token for part in parts for token in part.token_ids]
    logprobs = [sampled for part in parts for sampled in part.logprobs]
    return Delta(last.request, last.index, text, tokens, logprobs, last.finish_reason, last.stop_reason, last.error)


@dataclass(eq=False)
class Served:
    """One model behind one name."""

    name: str
    llm: LLM
    created: int = field(default_factory=lambda: int(time.time()))
    jobs: dict[Request, Job] = field(default_factory=dict)  # of the open requests; the engine thread's own
    open: int = 0  # requests taken and not ended; the event loop's own
    broken: str | None = None

    def __post_init__(self):
        tokenizer = self.llm.tokenizer
        self.longest_token = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))  # bytes
        if tokenizer.has_chat_template:  # what the first message with a control string in it would wait for
            controls = tokenizer.decode(tokenizer.eos_token_ids, skip_special_tokens=False)
            with suppress(ValueError):
                tokenizer.encode_chat([{"role": "user", "content": f"a{controls}b"}])


class Job:
    """One client's request: a prompt or several, answered together. Used by the event loop only. Context, number of
    answers and `max_queue` bound the unread deltas, although no step ever waits for a reader."""

    def __init__(self, served: Served, prompts: int, streaming: bool):
        self.served, self.unfinished, self.streaming = served, prompts, streaming
        self.requests: list[Request] = []
        self.ended, self._news = asyncio.Event(), asyncio.Event()
        self._unread: dict[tuple[Request, int], list[Delta]] = defaultdict(list)  # by answer

    async def read(self) -> list[Delta]:
        """What is new, one delta for each answer that has news; [] after QUIET_S without any, or when it has ended."""
        alarm = asyncio.get_running_loop().call_later(QUIET_S, self._news.set)
        await self._news.wait()
        alarm.cancel()
        if not self.ended.is_set():  # after the end, another call returns [] at once
            self._news.clear()
        unread, self._unread = self._unread, defaultdict(list)
        return [merged(parts) for parts in unread.values()]

    def deliver(self, deltas: list[Delta], closed: int) -> None:
        """Deltas of one request, or the end of `closed` requests, or both."""
        self.served.open -= closed
        self.unfinished -= closed
        for delta in deltas if self.streaming else ():
            self._unread[delta.request, delta.index].append(delta)
        if self.unfinished == 0:
            self.ended.set()
        self._news.set()


class EngineThread:
    """Owns the engines. `start` and the coroutines belong to one event loop; `max_queue` is the number of requests
    that may wait for a batch slot, for each model. Several models take turns, a step each: they share the cores."""

    def __init__(self, models: dict[str, LLM], max_queue: int = 1024):
        self.models = {name: Served(name, llm) for name, llm in models.items()}
        self.metrics = Metrics(models)
        self.max_queue = max_queue
        self.draining = False
        self._messages: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None: stop
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- for the event loop

    def start(self) -> None:
        """Deliver to the running event loop from now on."""
        self._loop = asyncio.get_running_loop()
        self.metrics.stats = {name: served.llm.stats() for name, served in self.models.items()}
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not any(served.broken for served in self.models.values())

    def check_room(self, served: Served, n: int) -> None:
        """Raise ApiError if n more requests cannot be taken now."""
        if self.draining:
            message = "the server is shutting down and takes no new requests"
            raise ApiError(503, message, None, "unavailable", Retry_After="10")
        if served.broken or not self._thread.is_alive():
            message = f"model {served.name!r} has failed and must be restarted: {served.broken}"
            raise ApiError(503, message, None, "unavailable", Retry_After="60")
        slots = served.llm.scheduler.max_num_seqs
        if served.open + n > slots + self.max_queue:
            message = (
                f"{served.open} requests are open and {n} more do not fit: {slots} run at a time and "
                f"--max-queue={self.max_queue} may wait; try again later"
            )
            seconds = min(60, 1 + served.open // slots)
            raise ApiError(429, message, None, "queue_full", Retry_After=str(seconds))

    async def submit(
        self,
        served: Served,
        prompts: list[tuple[list[int], str | None]],
        params: SamplingParams,
        priority: int = 0,
        namespace: Hashable = None,
        streaming: bool = False,
    ) -> Job:
        """Queue all prompts (ids, and their text) or none. Raises ApiError, or the engine's ValueError."""
        self.check_room(served, len(prompts))
        job = Job(served, len(prompts), streaming)
        served.open += len(prompts)

        def add() -> None:
            engine = served.llm.engine
            try:
                for ids, text in prompts:
                    job.requests.append(engine.add(ids, params, text, priority, namespace))
            except BaseException:
                for request in job.requests:
                    engine.abort(request)
                self._deliver([(job, [], len(prompts))])
                raise
            served.jobs |= dict.fromkeys(job.requests, job)

        try:
            await self.call(add)
        except asyncio.CancelledError:
            self.abort(job)  # this message runs after `add`
            raise
        return job

    def abort(self, job: Job) -> None:
        """The client left. If the job has ended, nothing happens."""
        if not job.ended.is_set():
            self.send(lambda: self._abort(job.served, job.requests, None))

    def abort_all(self, reason: str) -> None:
        """End every request with an error that says why."""
        for served in self.models.values():
            self.send(lambda served=served: self._abort(served, list(served.jobs), reason))

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run a function in the engine thread, between two steps, and return what it returns."""
        answer = asyncio.get_running_loop().create_future()

        def message() -> None:
            try:
                setter, result = answer.set_result, function()
            except BaseException as error:
                setter, result = answer.set_exception, error
            self._post(lambda: answer.done() or setter(result))  # done: whoever asked has been cancelled

        self.send(message)
        return await answer

    async def measure(self) -> None:
        """Let the metrics show the schedulers as they are now; while a step takes longer, as they were."""

        def read() -> None:
            self.metrics.stats = {name: served.llm.stats() for name, served in self.models.items()}

        await asyncio.wait([asyncio.ensure_future(self.call(read))], timeout=0.2)

    def send(self, message: Callable[[], None]) -> None:
        """Have a function run in the engine thread, without waiting for it."""
        self._messages.put(message)

    async def stop(self) -> None:
        """Requests still open get no further answer."""
        self._messages.put(None)
        await asyncio.to_thread(self._thread.join)

    # -- the engine thread

    def _post(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # it has closed: the server is gone, and so are its clients
            self._loop.call_soon_threadsafe(function)

    def _run(self) -> None:
        """All messages first, then a step of each engine that has work."""
        while True:
            busy = [s for s in self.models.values() if not s.broken and s.llm.engine.has_work]
            try:
                message = self._messages.get(block=not busy)
            except queue.Empty:
                message = partial(self._step, busy)
            if message is None:
                return
            try:
                message()
            except Exception as error:  # a message with a bug must not end the engine
                log.error("engine thread: %s: %s", type(error).__name__, error)

    def _step(self, busy: list[Served]) -> None:
        for served in busy:
            try:
                self._publish(served, served.llm.engine.step())
            except Exception as error:  # beyond the requests of the step, which the engine ends itself: end them all
                reason = f"{type(error).__name__}: {error}"
                log.error("model %r: a step failed as a whole: %s", served.name, reason)
                self._abort(served, list(served.jobs), reason)

    def _abort(self, served: Served, requests: Iterable[Request], error: str | None) -> None:
        """End requests early: with an error that their clients are told, or silently, since they left.

        A model that cannot even do that is broken: it takes no more requests, and the others go on.
        """
        deltas: list[Delta] = []
        try:
            for request in requests:
                deltas += served.llm.engine.abort(request)
        except Exception as failure:
            served.broken = f"{type(failure).__name__}: {failure}"
            log.error("model %r is out of service: %s", served.name, served.broken)
            self._deliver([(job, [], 1) for job in served.jobs.values()])  # one entry for each request of a job
            served.jobs.clear()
        for delta in deltas if error else ():
            delta.error = delta.request.answers[delta.index].error = error
        self._publish(served, deltas)

    def _publish(self, served: Served, deltas: list[Delta]) -> None:
        """Count the deltas and hand them to their jobs."""
        now, deliveries = time.perf_counter(), []
        groups: dict[Request, list[Delta]] = defaultdict(list)  # where guesses were right, A's and B's deltas alternate
        for delta in deltas:
            groups[delta.request].append(delta)
        for request, group in groups.items():
            job = served.jobs.get(request)
            if job is None:  # refused halfway: its client never saw it begin
                continue
            self.metrics.count(served.name, request, group, now)
            if request.finished:
                del served.jobs[request]
                self.metrics.close(served.name, request)
            deliveries.append((job, group, int(request.finished)))
        self._deliver(deliveries)

    def _deliver(self, deliveries: list[tuple[Job, list[Delta], int]]) -> None:
        def deliver() -> None:
            for job, deltas, closed in deliveries:
                job.deliver(deltas, closed)

        if deliveries:  # one wake-up of the event loop for all of them
            self._post(deliver)
