"""Two sides of one switch: run them in turn, and gather what was counted and what the clock said.

A clock on a shared machine drifts by a tenth within a minute, and does not say why one side is faster. So the sides
take turns, ratios are taken within a round, and counted work, equal in all rounds, stands beside the clock. Most
switches belong to the scheduler, which holds no tensors: each run puts a fresh one into the same engine:

    model, KV memory ── engine ── scheduler(batching="static")       round 1: A   round 2: A
                             `─── scheduler(batching="continuous")   round 1:   B round 2:   B

Where the switch belongs to the model (its bits, its kernels), every side has an engine of its own.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import log

import torch

import kernels
from benchmarks import simulate
from benchmarks.past import scheduler_class
from benchmarks.peers import random_prompt
from benchmarks.roofline import read_bandwidth
from generate import LLM
from kv_paged import BlockPool
from radix import PREFIX_CACHES
from request import Request
from sampling import SamplingParams
from scheduler import Scheduler, Sequence, Step

median = statistics.median


@dataclass(frozen=True)
class Sizes:
    """How large the workloads are. Lengths in tokens."""

    rounds: int = 3
    trace_requests: int = 600  # kv-memory
    batch_requests: int = 24
    seats: int = 8  # batch slots
    answer_mean: int = 40
    shared: int = 384  # few-shot: the examples; tree: the problem
    questions: int = 7
    conversations: int = 2
    turns: int = 4
    turn: int = 96
    branches: int = 3
    depth: int = 2
    unshared: int = 256
    long_prompt: int = 2000
    budgets: tuple[int, ...] = (64, 128, 256, 512)
    preempt_requests: int = 8
    preempt_answer: int = 96
    lpm_requests: int = 160
    batches: tuple[int, ...] = (1, 8, 32)
    decoded: int = 48  # tokens of each sequence where only decoding is timed
    text: int = 1024  # of data/alice.txt
    compile: bool = True  # dense layers too, which takes half a minute
    guessed: int = 64  # tokens of each speculated answer
    records: int = 6  # answers in JSON


FULL = Sizes()
QUICK = Sizes(
    rounds=1, trace_requests=200, batch_requests=16, answer_mean=24, shared=192, questions=4, conversations=1, turns=3,
    turn=64, branches=2, unshared=96, long_prompt=1000, budgets=(128,), preempt_answer=64, lpm_requests=80,
    decoded=16, text=256, compile=False, guessed=32, records=3,
)  # fmt: skip


@dataclass
class Run:
    """One side, once: what was counted, what the clock said, what was answered."""

    counted: dict[str, float]
    clock: dict[str, float] = field(default_factory=dict)
    answers: list[list[int]] = field(default_factory=list)


Result = tuple[dict[str, dict], str, str]  # sides, a sentence with what was measured, the most it could give here


class Watched:
    """Mixed into a scheduler class, records the tokens of each step and the seconds spent on planning."""

    def __init__(self, *args, **switches):
        super().__init__(*args, **switches)
        self.step_tokens: list[int] = []
        self.planning = 0.0

    def schedule(self) -> Step:
        step = self._timed(super().schedule)
        self.step_tokens.append(step.num_tokens)
        return step

    def computed(self, step: Step) -> None:
        self._timed(super().computed, step)

    def finish(self, seq: Sequence, keep: bool = True) -> None:
        self._timed(super().finish, seq, keep)

    def _timed(self, call: Callable, *args):
        began = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.planning += time.perf_counter() - began

    @property
    def work(self) -> dict[str, int]:
        return {"steps": len(self.step_tokens), "tokens computed": sum(self.step_tokens)}


class ObservedRunner:
    """A ModelRunner that runs another one under the context manager that `watch()` returns."""

    def __init__(self, runner, watch: Callable):
        self.runner, self.watch = runner, watch

    def run(self, batch):
        with self.watch():
            return self.runner.run(batch)

    def __getattr__(self, name: str):
        return getattr(self.runner, name)


class Lab:
    """What the experiments share: an engine (loaded when first needed), the sizes, the workload's seed."""

    def __init__(self, flags: dict, sizes: Sizes = FULL):  # flags: arguments of LLM
        self.flags, self.sizes = flags, sizes
        self.seed, self.block_size = flags.get("seed", 0), flags.get("block_size", 16)
        self._process: dict[LLM, tuple[str, int]] = {}  # kernels and torch's threads that each engine needs

    @cached_property
    def llm(self) -> LLM:
        return self.open()

    @cached_property
    def bandwidth(self) -> float:
        """Bytes a second of this machine's memory."""
        return read_bandwidth(self.llm.device)

    def open(self, **changed) -> LLM:
        """An engine with some flags changed, warmed up. It stays until `close`."""
        flags = self.flags | changed
        if changed and flags.get("num_blocks") is None and flags.get("kv_memory") is None:
            flags["num_blocks"] = 512  # beside the lab's own engine there is no room for another full pool
        llm = LLM(**flags)
        self._process[llm] = kernels.backend(), torch.get_num_threads()
        prompt = random_prompt(llm.config.vocab_size, 16, self.seed)
        llm.generate([prompt], answer_of(2))  # touch the weights and the first pages
        return llm

    def use(self, llm: LLM) -> LLM:
        """Kernels and threads belong to the process: set them as `llm` was made with."""
        backend, threads = self._process[llm]
        kernels.set_backend(backend)
        torch.set_num_threads(threads)
        return llm

    def close(self) -> None:
        """Let go of all engines but the lab's own."""
        own = vars(self).get("llm")
        self._process = {llm: state for llm, state in self._process.items() if llm is own}
        gc.collect()
        if own is not None:
            self.use(own)

    def drawn(self, vocab_size: int | None = None) -> Callable[[int], list[int]]:
        """A source of fresh random token ids, the same for every side."""
        draw, high = random.Random(self.seed), vocab_size or self.llm.config.vocab_size
        return lambda n: [draw.randrange(high) for _ in range(n)]

    def scheduler(self, prefix_cache: str = "none", num_blocks: int | None = None, llm=None, **switches) -> Watched:
        """Put a fresh scheduler into an engine (the lab's own): same model, same KV memory, other switches."""
        llm = llm or self.llm
        held = llm.kv.num_blocks - 1
        if (num_blocks or 0) > held:
            raise ValueError(f"the experiment needs {num_blocks} KV blocks, the pool has {held}: raise --num-blocks")
        switches.setdefault("max_model_len", llm.max_model_len)
        llm.scheduler = counting_scheduler(num_blocks or held, llm.kv.block_size, prefix_cache, **switches)
        llm.engine.scheduler = llm.scheduler
        return llm.scheduler

    def alternate(self, side: Callable[..., Run], sides: dict | list | tuple) -> dict[str, dict]:
        """Run side(argument) for each {name: argument} in turn, as many rounds as asked for, and gather the runs."""
        sides = sides if isinstance(sides, dict) else dict(zip(sides, sides, strict=True))
        runs: dict[str, list[Run]] = {name: [] for name in sides}
        for _ in range(self.sizes.rounds):
            for name, argument in sides.items():
                runs[name].append(side(argument))
        return {name: gathered(name, rounds) for name, rounds in runs.items()}


def gathered(name: str, rounds: list[Run]) -> dict:
    """Counts of a side (equal in all rounds) and its clock readings."""
    first = rounds[0]
    if any(run.counted != first.counted or run.answers != first.answers for run in rounds):
        raise RuntimeError(f"{name}: two rounds did not do the same work: {[run.counted for run in rounds]}")
    clock = {key: [float(f"{run.clock[key]:.4g}") for run in rounds] for key in first.clock}
    return {"counted": first.counted, "clock": clock, "answers": first.answers}


def middle(side: dict, key: str) -> float:
    """The median of a clock reading over the rounds."""
    return median(side["clock"][key])


def ratio(a: dict, b: dict, key: str) -> str:
    """a over b, round by round: "1.52x", or "1.52x (1.49 to 1.55)" if the rounds differ."""
    each = [x / y for x, y in zip(a["clock"][key], b["clock"][key], strict=True)]
    mid, least, most = (f"{value:.2f}" for value in (median(each), min(each), max(each)))
    return f"{mid}x" if least == most else f"{mid}x ({least} to {most})"


def megabytes(nbytes: float) -> float:
    """To four digits."""
    return float(f"{nbytes / 1e6:.4g}")


# ---- workloads without a model


def counting_scheduler(num_blocks: int, block_size: int, prefix_cache: str = "none", **switches) -> Watched:
    pool = BlockPool(num_blocks + 1, block_size)
    cache = PREFIX_CACHES[prefix_cache](pool)
    base = scheduler_class(switches.pop("batching", "continuous"), switches.pop("reserve", "paged"))
    return type("Watched", (Watched, base), {})(pool, cache, **switches)


def drive(scheduler: Scheduler, lengths: dict[int, int]) -> Iterator[tuple[list[Sequence], list[Sequence]]]:
    """Answer the queued sequences with lengths[seq.id] zeros each; yields who was in a step, and who ended with it."""
    while scheduler.has_unfinished():
        step = scheduler.schedule()
        scheduler.computed(step)
        members, ended = [seq for seq, _ in step.entries], []
        for seq in members:
            if seq.num_new == 0:
                seq.tokens.append(0)
                if len(seq.output) == lengths[seq.id]:
                    scheduler.finish(seq)
                    ended.append(seq)
        yield members, ended


def lognormal_lengths(n: int, mean: float, most: int, seed: int) -> list[int]:
    """n lognormal lengths of this mean, cut at `most`; sigma 1 is about the spread of chat traces."""
    draw = random.Random(seed)
    return [max(1, min(most, round(draw.lognormvariate(log(mean) - 0.5, 1.0)))) for _ in range(n)]


def chat_trace(requests: int, reserve: str, block_size: int = 16, seed: int = 0):
    """Arguments of the simulator for a chat trace in a pool of 16,384 tokens, too small for what arrives."""
    flags = f"--simulate --requests {requests} --rate 1000 --seed {seed} --prefixes 0 --turns 1 --prompt-mean 161"
    flags += " --output-mean 338 --length-spread 1 --max-tokens 1024 --max-model-len 2048 --max-num-seqs 256"
    flags += f" --num-blocks {16384 // block_size + 1} --block-size {block_size} --prefix-cache none"
    return simulate.parse(f"{flags} --reserve {reserve}".split())


# ---- workloads with a model


def answer_of(tokens: int, **params) -> SamplingParams:
    """Greedy, exactly so many tokens."""
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **params)


def prefill_rate(llm: LLM, length: int, seed: int) -> float:
    """Prompt tokens per second, to the first token of the answer."""
    llm.scheduler.drop_cache()
    start = time.perf_counter()
    llm.generate(random_prompt(llm.config.vocab_size, length, seed), answer_of(1))
    return length / (time.perf_counter() - start)


def decode(llm: LLM, batch: int, tokens: int) -> tuple[float, list[Request]]:
    """Tokens per second of `batch` sequences together, each computing one token a step; and the requests."""
    llm.scheduler.drop_cache()
    requests = [llm.add(random_prompt(llm.config.vocab_size, 16, seed), answer_of(tokens + 1)) for seed in range(batch)]
    return run_decode(llm, requests), requests


def run_decode(llm: LLM, requests: list[Request]) -> float:
    """Run queued requests to their end. Tokens per second once each has its first, so that no prefill is in it."""
    while any(request.first_token is None for request in requests) and llm.engine.has_work:
        llm.engine.step()
    done = sum(map(len, tokens_of(requests)))
    seconds = run_all(llm, requests)
    return (sum(map(len, tokens_of(requests))) - done) / seconds


def run_all(llm: LLM, requests: list[Request]) -> float:
    """Seconds until all are answered. An answer that failed is an error here: its time would mean nothing."""
    began = time.perf_counter()
    while llm.engine.has_work:
        llm.engine.step()
    failed = [answer.error for request in requests for answer in request.answers if answer.error]
    if failed:
        raise ValueError(f"a request of the workload failed: {failed[0]}")
    return time.perf_counter() - began


def tokens_of(requests: list[Request]) -> list[list[int]]:
    """The tokens of every answer, those of parallel ones side by side."""
    return [list(answer.token_ids) for request in requests for answer in request.answers]


def gaps_while_a_prompt_arrives(llm: LLM, long: int, lasting: int, runners: int) -> tuple[list[float], list[Request]]:
    """A prompt of `long` tokens arrives after `runners` requests have decoded 9 of their `lasting` tokens each.

    Returns the times of the first one's tokens (perf_counter), and the requests, the late one last.
    """
    vocab, times = llm.config.vocab_size, []
    requests = [llm.add(random_prompt(vocab, 8, seed), answer_of(lasting)) for seed in range(runners)]
    while llm.engine.has_work:
        deltas = llm.engine.step()
        if any(delta.request is requests[0] for delta in deltas):
            times.append(time.perf_counter())
        if len(times) == 9 and len(requests) == runners:
            requests.append(llm.add(random_prompt(vocab, long, 99), answer_of(1)))
    run_all(llm, requests)  # nothing is left to run: looks for failures
    return times, requests
