"""Two sides of one switch: run them in turn, and gather what was counted and what the clock said.

A clock on a shared machine drifts by a tenth within a minute, and does not say why one side is faster. So an
experiment, a function Lab -> Result, says what one side does, and the lab runs the sides in turn. Counted work must be
equal in all rounds, ratios are taken within a round. Most switches belong to the scheduler, without tensors: each run
puts a fresh one into the same engine; where the switch belongs to the model, every side has an engine of its own:

    model, KV memory ── engine ── scheduler(batching="static")       round 1: A   round 2: A
                             `─── scheduler(batching="continuous")   round 1:   B round 2:   B

Source: paired measurement, common in benchmarking. Left out: which switches (scheduling.py, speed.py, guessing.py).
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

import torch

import kernels
from benchmarks.past import scheduler_class
from benchmarks.peers import random_prompt
from benchmarks.roofline import read_bandwidth
from generate import LLM
from kv_paged import BlockPool
from radix import PREFIX_CACHES
from request import Request
from sampling import SamplingParams
from scheduler import Scheduler, Sequence, Step


@dataclass(frozen=True)
class Sizes:
    """What `--quick` makes smaller. Lengths in tokens."""

    rounds: int = 3
    trace_requests: int = 600  # kv-memory
    batch_requests: int = 24
    shared: int = 384  # the beginning that several requests have in common
    long_prompt: int = 2000
    budgets: tuple[int, ...] = (64, 128, 256, 512)
    lpm_requests: int = 160
    configurations: tuple[str, ...] = ("float32", "bfloat16", "int8", "int8-g32", "int4", "int4-g64", "int4-g128")
    batches: tuple[int, ...] = (1, 8, 32)
    decoded: int = 48  # tokens of each sequence where only decoding is timed
    text: int = 1024  # of data/alice.txt
    compile: bool = True  # dense layers too, which takes half a minute
    guessed: int = 64  # tokens of each speculated answer
    records: int = 6  # answers in JSON
    rates: tuple[float, ...] = (1, 2, 4, 8, 12)  # requests a second
    load_requests: int = 32


FULL = Sizes()
QUICK = Sizes(
    rounds=1, trace_requests=200, batch_requests=16, shared=192, long_prompt=1000, budgets=(128,), lpm_requests=80,
    configurations=("float32", "bfloat16", "int8", "int4"), decoded=16, text=256, compile=False, guessed=32, records=3,
)  # fmt: skip


@dataclass
class Run:
    """One side, once: what was counted, what the clock said, what was answered."""

    counted: dict[str, float]
    clock: dict[str, float] = field(default_factory=dict)
    answers: list[list[int]] = field(default_factory=list)


@dataclass
class Result:
    """What an experiment found. sides: the rows of its table, as `Lab.alternate` gathers them; measured: what the
    switch gives; floor: the most it could give; series: plain lists and numbers that its picture draws (plots.py)."""

    measured: str
    floor: str = ""
    sides: dict[str, dict] = field(default_factory=dict)
    series: dict | None = None


class Watched:
    """Mixed into a scheduler class, keeps what each step computed."""

    def __init__(self, *args, **switches):
        super().__init__(*args, **switches)
        self.taken: list[list[tuple[Sequence, int]]] = []  # of each step: (sequence, tokens)

    def schedule(self) -> Step:
        step = super().schedule()
        self.taken.append(step.entries[:])
        return step

    @property
    def step_tokens(self) -> list[int]:
        return [sum(n for _, n in entries) for entries in self.taken]

    @property
    def work(self) -> dict[str, int]:
        return {"steps": len(self.taken), "tokens computed": sum(self.step_tokens)}


def watched_scheduler(num_blocks: int, block_size: int, prefix_cache: str = "none", **switches) -> Watched:
    """A scheduler that stands alone: drive it, or put it into an engine (Lab.scheduler)."""
    pool = BlockPool(num_blocks + 1, block_size)
    base = scheduler_class(switches.pop("batching", "continuous"), switches.pop("reserve", "paged"))
    return type("Watched", (Watched, base), {})(pool, PREFIX_CACHES[prefix_cache](pool), **switches)


def drive(scheduler: Scheduler, sequences: list[Sequence]) -> None:
    """Queue sequences and answer each with max_tokens zeros, without a model."""
    for seq in sequences:
        scheduler.add(seq)
    while scheduler.has_unfinished():
        step = scheduler.schedule()
        scheduler.computed(step)
        for seq in [seq for seq, _ in step.entries if seq.num_new == 0]:
            seq.tokens.append(0)
            if len(seq.output) == seq.max_tokens:
                scheduler.finish(seq)


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
        llm.scheduler = watched_scheduler(num_blocks or held, llm.kv.block_size, prefix_cache, **switches)
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


# ---- workloads


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


def run_all(llm: LLM, requests: list[Request], after_step: Callable[[list], None] = lambda deltas: None) -> float:
    """Seconds until all are answered. An answer that failed is an error here: its time would mean nothing."""
    began = time.perf_counter()
    while llm.engine.has_work:
        after_step(llm.engine.step())
    failed = [answer.error for request in requests for answer in request.answers if answer.error]
    if failed:
        raise ValueError(f"a request of the workload failed: {failed[0]}")
    return time.perf_counter() - began


def tokens_of(requests: list[Request]) -> list[list[int]]:
    """The tokens of every answer, those of parallel ones side by side."""
    return [list(answer.token_ids) for request in requests for answer in request.answers]
