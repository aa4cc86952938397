"""One thread runs the engine; everybody else sends it letters.

The problem. A server has hundreds of clients that come, read slowly, and leave when they like. An engine has one batch,
and it must never wait for any of them. Locks around the engine would make a step wait for a client and a client wait
for a step, and would leave open which of two requests came first.

The idea. The engine belongs to one thread. Letters go in by a queue and are opened between two steps; what a step
produced goes out in one delivery to the event loop, which puts it into the box of the job it is for.

    event loop (all clients)                               engine thread
      submit, abort, call  ──► letters (a queue) ──► open all of them
                                                     step each engine that has work
      job's box: unread deltas ◄── one delivery ◄─── deltas of the step
           │
           └─► read() takes everything unread at once, merged: a slow reader gets fewer, longer pieces

What is bounded, and by what. A box holds the unread part of one job's answers, which cannot be longer than the context
times the number of answers; the sum over all boxes is bounded because only so many jobs may be open (max_queue).
A step never waits for a reader. A client that leaves is a letter, opened before the next step, so its blocks are back
within one step. Several models take turns in the one thread, a step each: they share the cores anyway.

Failures. What the engine refuses (ValueError) is the answer to the letter. If a step fails as a whole, beyond the
requests it holds (engine.py ends those itself), all requests of that model end with the error; if not even that is
possible the model is marked broken and takes no more, and the others go on.

Source: the shape is that of vLLM's AsyncLLMEngine (Kwon et al. 2023, section 5), with a thread in place of a process.
Left out: a process of its own for the engine, which would free it of the interpreter lock that it shares with the
event loop; the native kernels run outside that lock.
"""

from __future__ import annotations

import asyncio
import functools
import math
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from beam import merged
from generate import LLM
from request import Delta, Request
from sampling import SamplingParams
from serving.metrics import Metrics

OBSERVE_SECONDS = 0.1  # between two looks of the live page while nothing happens


class Unavailable(Exception):
    """The request is right, but cannot be taken now. `status`: 429 or 503; `retry_after` in seconds."""

    def __init__(self, message: str, status: int, retry_after: int):
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


@dataclass(eq=False)
class Served:
    """One model behind one name."""

    name: str
    llm: LLM
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    jobs: dict[int, Job] = field(default_factory=dict)  # engine request id -> job; the engine thread's own
    open: int = 0  # requests taken and not ended; the event loop's own
    broken: str | None = None
    seconds: float = 1.0  # what a request took lately, smoothed: for Retry-After

    @functools.cached_property
    def longest_token(self) -> int:
        """Bytes of the token that stands for most."""
        tokenizer = self.llm.tokenizer
        return max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))

    def retry_after(self) -> int:
        """Seconds until the requests now open will have gone through the seats there are, by the latest pace."""
        turns = self.open / self.llm.scheduler.max_num_seqs
        return min(60, max(1, math.ceil(turns * self.seconds)))


class Job:
    """One client's request: a prompt or several, answered together. Used by the event loop only."""

    def __init__(self, served: Served, streaming: bool):
        self.served, self.streaming = served, streaming
        self.requests: list[Request] = []
        self.unfinished = 0  # of them; the engine thread's own
        self.ended = asyncio.Event()
        self._unread: list[Delta] = []
        self._news = asyncio.Event()

    async def read(self) -> list[Delta]:
        """What is new, one delta for each answer that has news; [] when there will be nothing more."""
        await self._news.wait()
        self._news.clear()
        if self.ended.is_set():
            self._news.set()  # whoever asks again is told at once that there is nothing more
        unread, self._unread = self._unread, []
        groups: dict[tuple[int, int], list[Delta]] = {}
        for delta in unread:
            groups.setdefault((delta.request.id, delta.index), []).append(delta)
        news = [merged(parts) for parts in groups.values()]
        for delta, parts in zip(news, groups.values(), strict=True):
            delta.error = parts[-1].error
        return news

    def deliver(self, deltas: list[Delta], ended: bool) -> None:
        self._unread += deltas if self.streaming else []
        if ended:
            self.ended.set()
        self._news.set()


class EngineThread:
    """Owns the engines. `start` and the coroutines belong to one event loop; `max_queue` is the number of requests
    that may wait for a seat, for each model."""

    def __init__(self, models: dict[str, LLM], max_queue: int = 1024):
        self.models = {name: Served(name, llm, Metrics()) for name, llm in models.items()}
        self.max_queue = max_queue
        self.draining = False
        self.observer: Callable[[], None] | None = (
            None  # called in the engine thread after every turn (serving/live.py)
        )
        self._letters: queue.SimpleQueue = queue.SimpleQueue()
        self._outbox: deque[tuple[Job, list[Delta], int, bool]] = deque()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- for the event loop

    def start(self) -> None:
        """Begin to work, delivering to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not any(served.broken for served in self.models.values())

    def check_room(self, served: Served, n: int) -> None:
        """Raise Unavailable if n more requests cannot be taken now."""
        if self.draining:
            raise Unavailable("the server is shutting down and takes no new requests", 503, 10)
        if served.broken or not self._thread.is_alive():
            raise Unavailable(f"model {served.name!r} has failed and must be restarted: {served.broken}", 503, 60)
        seats = served.llm.scheduler.max_num_seqs
        if served.open + n > seats + self.max_queue:
            message = (
                f"{served.open} requests are open and {n} more do not fit: {seats} run at a time and "
                f"--max-queue={self.max_queue} may wait; try again later"
            )
            raise Unavailable(message, 429, served.retry_after())

    async def submit(
        self,
        served: Served,
        prompts: list[tuple[list[int], str | None]],
        params: SamplingParams,
        priority: int = 0,
        namespace: Hashable = None,
        streaming: bool = False,
    ) -> Job:
        """Queue all prompts (ids, and their text) or none. Raises Unavailable, or the engine's ValueError."""
        self.check_room(served, len(prompts))
        job = Job(served, streaming)
        served.open += len(prompts)

        def add() -> None:
            engine = served.llm.engine
            try:
                for ids, text in prompts:
                    job.requests.append(engine.add(ids, params, text, priority, namespace))
            except BaseException:
                for request in job.requests:
                    engine.abort(request)
                job.requests.clear()
                raise
            job.unfinished = len(job.requests)
            served.jobs |= {request.id: job for request in job.requests}

        try:
            await self.call(add)
        except asyncio.CancelledError:
            # The letter may have been opened already or not; this one comes after it.
            self.send(
                lambda: (
                    self._abort(served, job.requests, None) if job.requests else self._send(job, [], len(prompts), True)
                )
            )
            raise
        except BaseException:
            served.open -= len(prompts)
            raise
        return job

    def abort(self, job: Job) -> None:
        """The client left. Ended already: nothing happens."""
        if not job.ended.is_set():
            self._letters.put(lambda: self._abort(job.served, job.requests, None))

    def abort_all(self, reason: str) -> None:
        """End every request with an error that says why."""
        for served in self.models.values():
            self._letters.put(lambda s=served: self._abort(s, [r for j in s.jobs.values() for r in j.requests], reason))

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run a function in the engine thread, between two steps, and return what it returns."""
        answer: Future = Future()

        def letter() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(function())
            except BaseException as error:
                answer.set_exception(error)

        self._letters.put(letter)
        return await asyncio.wrap_future(answer)

    def send(self, letter: Callable[[], None]) -> None:
        """Have something done in the engine thread, without waiting for it."""
        self._letters.put(letter)

    async def stop(self) -> None:
        """Stop working. Requests still open get no further answer."""
        self._letters.put(None)
        await asyncio.to_thread(self._thread.join)

    # -- the engine thread

    def post(self, function: Callable[[], None]) -> None:
        """Have something done in the event loop."""
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # it has closed: the server is gone, and so are its clients
            self._outbox.clear()

    def _run(self) -> None:
        while True:
            busy = [s for s in self.models.values() if not s.broken and s.llm.engine.has_work]
            try:
                if not self._open_letters(wait=not busy):
                    return
                for served in busy:
                    self._step(served)
                if self.observer:
                    self.observer()
            except Exception as error:  # a letter or an observer with a bug must not take the engine along
                print(f"engine thread: {type(error).__name__}: {error}", file=sys.stderr)

    def _open_letters(self, wait: bool) -> bool:
        """Do what the letters say; False if one says stop."""
        try:
            letter = self._letters.get(wait, OBSERVE_SECONDS if self.observer else None)
            while letter is not None:
                letter()
                letter = self._letters.get_nowait()
        except queue.Empty:
            return True
        return False

    def _step(self, served: Served) -> None:
        try:
            deltas = served.llm.engine.step()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            print(f"model {served.name!r}: a step failed as a whole: {reason}", file=sys.stderr)
            self._abort(served, list(served.llm.engine.requests.values()), reason)
            return
        self._publish(served, deltas)

    def _abort(self, served: Served, requests: list[Request], error: str | None) -> None:
        """End requests early: with an error that their clients are told, or silently, since they left."""
        deltas: list[Delta] = []
        try:
            for request in requests:
                deltas += served.llm.engine.abort(request)
        except Exception as failure:
            served.broken = f"{type(failure).__name__}: {failure}"
            print(f"model {served.name!r} is out of service: {served.broken}", file=sys.stderr)
            for job in served.jobs.values():  # one entry for each request of a job
                self._send(job, [], 1, True)
            served.jobs.clear()
        if error:
            for delta in deltas:
                delta.error = error
                delta.request.answers[delta.index].error = error
        self._publish(served, deltas)

    def _publish(self, served: Served, deltas: list[Delta]) -> None:
        """Count the deltas and hand them to their jobs."""
        now = time.perf_counter()
        groups: dict[Request, list[Delta]] = {}  # where guesses were right: A's first token, B's, A's second, B's
        for delta in deltas:
            groups.setdefault(delta.request, []).append(delta)
        for request, group in groups.items():
            job = served.jobs.get(request.id)
            if job is None:  # refused halfway: its client never saw it begin
                continue
            served.metrics.count(request, group, now)
            closed = request.finished
            if closed:
                job.unfinished -= 1
                del served.jobs[request.id]
                served.metrics.close(request)
                served.seconds += 0.1 * (now - request.arrival - served.seconds)
            self._send(job, group, int(closed), job.unfinished == 0)

    def _send(self, job: Job, deltas: list[Delta], closed: int, ended: bool) -> None:
        """Put a delivery into the outbox; one wake-up of the event loop empties it, however much is in it by then."""
        self._outbox.append((job, deltas, closed, ended))
        if len(self._outbox) == 1:
            self.post(self._empty_outbox)

    def _empty_outbox(self) -> None:
        """In the event loop."""
        while self._outbox:
            job, deltas, closed, ended = self._outbox[0]
            job.served.open -= closed
            job.deliver(deltas, ended)
            self._outbox.popleft()
