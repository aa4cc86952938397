"""Two sides of one switch: run them in turn, gather what was counted and what the clock said, and lay it out.

Problem. A clock on a shared machine drifts by a tenth within a minute, so a side measured later than the other is
compared with the weather. And a clock says nothing about why.

Idea. The scheduler is the only part that knows the switches, and it holds no tensors. So the model is loaded once, and
each run puts a fresh scheduler into the same engine, over the same KV memory:

    model, KV memory ── engine ── scheduler(batching="static")       round 1: A   round 2: A
                             `─── scheduler(batching="continuous")   round 1:   B round 2:   B

`Watched` is that scheduler, noting the tokens of each step and the seconds of planning. What is counted must be equal
in all rounds; readings of the clock are kept one by one, and ratios are taken within a round.

Source: the alternation is common practice in benchmarking (paired measurement). Left out: which switches, on which
workloads, against which claims: bench_ideas.py.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import log

from generate import LLM
from kv_paged import BlockPool
from radix import PREFIX_CACHES
from request import Request
from sampling_params import SamplingParams
from scheduler import Scheduler, Sequence, Step


@dataclass(frozen=True)
class Sizes:
    """How large the workloads are. Lengths in tokens."""

    rounds: int = 3
    trace_requests: int = 600  # kv-memory
    batch_requests: int = 24
    seats: int = 8
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


FULL = Sizes()
QUICK = Sizes(
    rounds=1, trace_requests=200, batch_requests=16, answer_mean=24, shared=192, questions=4, conversations=1, turns=3,
    turn=64, branches=2, unshared=96, long_prompt=1000, budgets=(128,), preempt_answer=64, lpm_requests=80,
)  # fmt: skip


@dataclass
class Run:
    """One side, once: what was counted, what the clock said, what was answered."""

    counted: dict[str, float]
    clock: dict[str, float] = field(default_factory=dict)
    answers: list[list[int]] = field(default_factory=list)


class Watched(Scheduler):
    """The scheduler, which also notes what each step computes and the seconds spent on planning."""

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

    def finish(self, seq: Sequence) -> None:
        self._timed(super().finish, seq)

    def _timed(self, call: Callable, *args):
        began = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.planning += time.perf_counter() - began

    @property
    def work(self) -> dict[str, int]:
        return {"steps": len(self.step_tokens), "tokens computed": sum(self.step_tokens)}


class Lab:
    """What the experiments share: one model (loaded when first needed), the sizes, the workload's seed."""

    def __init__(self, load: Callable[[], LLM], sizes: Sizes = FULL, seed: int = 0, block_size: int = 16):
        self.load, self.sizes, self.seed, self.block_size = load, sizes, seed, block_size

    @cached_property
    def llm(self) -> LLM:
        llm = self.load()
        llm.generate([self.drawn(64)(64)], answer_of(2))  # touch the weights and the first pages
        return llm

    def drawn(self, vocab_size: int | None = None) -> Callable[[int], list[int]]:
        """A source of fresh random token ids, the same for every side."""
        draw, high = random.Random(self.seed), vocab_size or self.llm.config.vocab_size
        return lambda n: [draw.randrange(high) for _ in range(n)]

    def lengths(self, n: int, mean: float, most: int) -> list[int]:
        """n lognormal lengths (sigma 1) of this mean, cut at `most`."""
        draw = random.Random(self.seed)
        return [max(1, min(most, round(draw.lognormvariate(log(mean) - 0.5, 1.0)))) for _ in range(n)]

    def scheduler(self, prefix_cache: str = "none", num_blocks: int | None = None, **switches) -> Watched:
        """Put a fresh scheduler into the engine: same model, same KV memory, other switches."""
        held = self.llm.kv.num_blocks - 1
        if (num_blocks or 0) > held:
            raise ValueError(f"the experiment needs {num_blocks} KV blocks, the pool has {held}: raise --num-blocks")
        switches.setdefault("max_model_len", self.llm.max_model_len)
        scheduler = counting_scheduler(num_blocks or held, self.llm.kv.block_size, prefix_cache, **switches)
        self.llm.scheduler = self.llm.engine.scheduler = scheduler
        return scheduler

    def alternate(self, sides: dict[str, Callable[[], Run]]) -> dict[str, dict]:
        """Run the sides in turn, as many rounds as asked, and gather what they found."""
        runs: dict[str, list[Run]] = {name: [] for name in sides}
        for _ in range(self.sizes.rounds):
            for name, run in sides.items():
                runs[name].append(run())
        return {name: gathered(name, rounds) for name, rounds in runs.items()}


def counting_scheduler(num_blocks: int, block_size: int, prefix_cache: str = "none", **switches) -> Watched:
    pool = BlockPool(num_blocks + 1, block_size)
    cache = None if prefix_cache == "none" else PREFIX_CACHES[prefix_cache](pool)
    return Watched(pool, cache, **switches)


def gathered(name: str, rounds: list[Run]) -> dict:
    """Counts of a side (equal in all rounds) and its clock readings."""
    first = rounds[0]
    if any(run.counted != first.counted or run.answers != first.answers for run in rounds):
        raise RuntimeError(f"{name}: two rounds did not do the same work: {[run.counted for run in rounds]}")
    clock = {key: [float(f"{run.clock[key]:.4g}") for run in rounds] for key in first.clock}
    return {"counted": first.counted, "clock": clock, "answers": first.answers}


def answer_of(n: int) -> SamplingParams:
    """Greedy, exactly n tokens."""
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)


def run_all(llm: LLM, requests: list[Request]) -> float:
    """Seconds until all are answered. An answer that failed is an error here: its time would mean nothing."""
    began = time.perf_counter()
    while llm.engine.has_work:
        llm.engine.step()
    failed = [choice.error for request in requests for choice in request.choices if choice.error]
    if failed:
        raise ValueError(f"a request of the workload failed: {failed[0]}")
    return time.perf_counter() - began


def tokens_of(requests: list[Request]) -> list[list[int]]:
    return [list(request.choices[0].token_ids) for request in requests]


def median(values: list[float]) -> float:
    return statistics.median(values)


def ratio(a: dict, b: dict, key: str) -> str:
    """a over b, round by round: "1.52x", or "1.52x (1.49 to 1.55)" if the rounds differ."""
    each = [x / y for x, y in zip(a["clock"][key], b["clock"][key], strict=True)]
    middle, least, most = (f"{value:.2f}" for value in (median(each), min(each), max(each)))
    return f"{middle}x" if least == most else f"{middle}x ({least} to {most})"


def columns(sides: dict[str, dict]) -> list[list[str]]:
    """A table of the sides: a header, then counts and clock readings, the latter as "median (least to most)"."""
    first = next(iter(sides.values()))
    table = [["", *first["counted"], *first["clock"]]]
    for name, side in sides.items():
        clock = [
            f"{median(v):.4g}" + (f" ({min(v):.4g} to {max(v):.4g})" if len(v) > 1 else "")
            for v in side["clock"].values()
        ]
        table.append([name, *(f"{value:,}" for value in side["counted"].values()), *clock])
    return table


SAME = {True: "the same on all sides", False: "NOT the same on all sides", None: "none: counted without a model"}


def as_text(rows: dict[str, dict]) -> str:
    out = []
    for name, row in rows.items():
        out += [f"== {name}: {row['mechanism']}", f"   claimed   {row['claim']} [{row['source']}]"]
        out += [f"   measured  {row['measured']}", f"   why       {row['why']}"]
        out += [f"   answers   {SAME[row['same_answers']]}", ""]
        table = columns(row["sides"])
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        out += ["   " + "  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in table] + [""]
    return "\n".join(out)


def as_markdown(result: dict) -> str:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    out = ["# What each idea buys", "", f"`{result['command']}` on {result['machine']}.", ""]
    out += ["Clock readings are medians (least to most) of the rounds; counted work is the same in every round.", ""]
    head = ["mechanism", "claimed", "measured here", "why they differ"]
    out += [line(head), line(["---"] * len(head))]
    for row in result["ideas"].values():
        claim = f"{row['claim']} ({row['source']})"
        out.append(line([row["mechanism"], claim, row["measured"], row["why"]]))
    for name, row in result["ideas"].items():
        table = columns(row["sides"])
        out += ["", f"## {name}", "", f"Answers: {SAME[row['same_answers']]}.", ""]
        out += [line(table[0]), line(["---"] + ["---:"] * (len(table[0]) - 1)), *map(line, table[1:])]
    return "\n".join(out) + "\n"
