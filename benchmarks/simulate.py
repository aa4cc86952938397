"""A discrete-event simulation around the real scheduler, pool and prefix cache: policies studied without a model.

Problem. Whether a policy starves a request, or how many blocks a workload needs, takes many thousands of requests to
answer, and a model on a laptop serves a few a second.

Idea. The scheduler never looks at a tensor. So keep a clock, and let each step cost what a formula says:

    arrivals (Poisson) ──► scheduler.schedule() ──► clock += step + token * tokens + context * context + swap * blocks
             ▲                                               │
             └── next turn, after some thinking ◄── finish ◄─┴─► append a token, record TTFT and TPOT

Lengths are lognormal, as in chat traces, and shared prefixes are drawn by Zipf's law. Fit the costs to a machine with
`bench.py decode`. Left out: overhead between steps, network time.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import inf, log

from benchmarks.figures import lines, spread
from benchmarks.past import BATCHINGS, RESERVES, scheduler_class
from formats.command_line import as_command, flag, given, refuse_unused
from kv_paged import BlockPool
from radix import PREFIX_CACHES
from scheduler import POLICIES, PREEMPTIONS, Sequence

SAMPLE_EVERY = 32  # steps between two looks at how full the blocks are
TINY, HUGE = 1e-9, 1e9
FLAGS = {  # name: (default, least, most, help); nan lies outside all of them
    "requests": (10_000, 1, HUGE, None),
    "rate": (5.0, TINY, HUGE, "new conversations a second"),
    "seed": (0, -inf, inf, None),
    "prompt_mean": (160.0, TINY, HUGE, "tokens of a request's own text"),
    "output_mean": (64.0, TINY, HUGE, "tokens of an answer"),
    "length_spread": (0.8, 0, 10, "sigma of the lognormal lengths"),
    "max_tokens": (512, 1, HUGE, "limit that requests ask for"),
    "prefixes": (20, 0, 100_000, "distinct shared prefixes (0: none)"),
    "prefix_len": (256, 1, HUGE, None),
    "prefix_share": (0.5, 0, 1, "share of conversations with a shared prefix"),
    "turns": (1.5, 1, HUGE, "mean turns of a conversation"),
    "think_time": (10.0, TINY, HUGE, "mean seconds between turns"),
    "num_blocks": (513, 2, HUGE, None),
    "block_size": (16, 1, HUGE, None),
    "max_num_seqs": (32, 1, HUGE, None),
    "max_num_batched_tokens": (512, 1, HUGE, None),
    "max_model_len": (2048, 2, HUGE, None),
    "step_cost": (4e-3, 0, HUGE, "seconds per step: the weights are read once"),
    "token_cost": (2e-4, 0, HUGE, "seconds per token computed"),
    "context_cost": (5e-7, 0, HUGE, "seconds per token of context read by attention"),
    "swap_cost": (1e-4, 0, HUGE, "seconds per block moved to or from the host"),
}
CHOICES = {
    "policy": list(POLICIES),
    "prefix_cache": list(PREFIX_CACHES),
    "preemption": PREEMPTIONS,
    "batching": BATCHINGS,
    "reserve": RESERVES,
}


@dataclass(eq=False)
class Request:
    """What the simulator knows and the scheduler does not: how long the answer will be, and when things happened."""

    arrival: float
    tokens: list[int]
    answer: int  # tokens it will generate
    turns_left: int
    opening: bool  # the first turn of its conversation
    admitted: float | None = None
    first_token: float | None = None


class Workload:
    """Requests in order of arrival: fresh ones from a Poisson process, next turns when their time has come."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.random = args, random.Random(args.seed)
        self.made = self.unused = 0  # requests; token ids below `unused` are taken: a fresh text is new to the cache
        self.clock = 0.0
        self.coming: list[tuple[float, int, Request]] = []  # heap of the next opening and of next turns
        self.prefixes = [self._fresh(args.prefix_len) for _ in range(args.prefixes)]
        self.popularity = list(accumulate(1 / (rank + 1) for rank in range(args.prefixes)))
        self._open_conversation()

    def _fresh(self, n: int) -> list[int]:
        self.unused += n
        return list(range(self.unused - n, self.unused))

    def _length(self, mean: float, most: int) -> int:
        spread = self.args.length_spread
        return max(1, min(most, round(self.random.lognormvariate(log(mean) - spread**2 / 2, spread))))

    def _request(self, arrival: float, tokens: list[int], turns_left: int, opening: bool) -> None:
        self.made += 1
        most = min(self.args.max_model_len - len(tokens), self.args.max_tokens)
        request = Request(arrival, tokens, self._length(self.args.output_mean, most), turns_left, opening)
        heapq.heappush(self.coming, (arrival, self.made, request))

    def _open_conversation(self) -> None:
        if self.made >= self.args.requests:
            return
        self.clock += self.random.expovariate(self.args.rate)
        shared = []
        if self.prefixes and self.random.random() < self.args.prefix_share:
            (shared,) = self.random.choices(self.prefixes, cum_weights=self.popularity)
        own = self._length(self.args.prompt_mean, self.args.max_model_len - 1 - len(shared))
        turns_left = 0
        while turns_left < 49 and self.random.random() > 1 / self.args.turns:
            turns_left += 1
        self._request(self.clock, shared + self._fresh(own), turns_left, opening=True)

    def next_turn(self, request: Request, tokens: list[int], now: float) -> None:
        """The user has read the answer and asks on, unless the context is full or enough requests were made."""
        own = self._length(self.args.prompt_mean, self.args.max_model_len)
        if request.turns_left and self.made < self.args.requests and len(tokens) + own < self.args.max_model_len:
            arrival = now + self.random.expovariate(1 / self.args.think_time)
            self._request(arrival, tokens + self._fresh(own), request.turns_left - 1, opening=False)

    def until(self, now: float) -> Iterator[Request]:
        """The requests that have arrived by now."""
        while self.coming and self.coming[0][0] <= now:
            request = heapq.heappop(self.coming)[-1]
            if request.opening:
                self._open_conversation()
            yield request


class Simulation:
    def __init__(self, args: argparse.Namespace):
        self.args, self.workload = args, Workload(args)
        pool = BlockPool(args.num_blocks, args.block_size)
        names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "policy", "preemption", "chunked")
        options = {name: getattr(args, name) for name in names}
        cache = PREFIX_CACHES[args.prefix_cache](pool)
        self.scheduler = scheduler_class(args.batching, args.reserve)(pool, cache, **options)
        self.now = self.planning = 0.0  # simulated seconds; real seconds spent in the scheduler
        self.generated = self.batched = 0
        self.times: dict[str, list[float]] = {"queueing_s": [], "ttft_s": [], "tpot_s": []}
        self.done = self.kv_tokens = self.kv_live = self.kv_pool = 0  # KV in slots, summed over samples

    def run(self) -> None:
        while self.scheduler.has_unfinished() or self.workload.coming:
            if not self.scheduler.has_unfinished():
                self.now = max(self.now, self.workload.coming[0][0])
            self.arrivals(self.now)
            self.step()
            if self.scheduler.steps % SAMPLE_EVERY == 0:
                self._sample()

    def arrivals(self, until: float) -> None:
        for request in self.workload.until(until):
            seq = Sequence(request.tokens, self.args.max_tokens, arrival=request.arrival, answer=request)
            self.scheduler.add(seq)

    def step(self) -> None:
        args, scheduler = self.args, self.scheduler
        began = time.perf_counter()
        step = scheduler.schedule()
        scheduler.computed(step)
        self.planning += time.perf_counter() - began
        if args.trace:
            print(f"{self.now:10.3f} s  {step.describe()}", file=sys.stderr if args.json else sys.stdout)
        for seq, _ in step.cached:
            if seq.answer.admitted is None:
                seq.answer.admitted = self.now
        context = sum(seq.num_computed for seq, _ in step.entries)
        moved = sum(len(blocks) for _, blocks in step.swap_out + step.swap_in)
        self.now += args.step_cost + args.token_cost * step.num_tokens
        self.now += args.context_cost * context + args.swap_cost * moved
        self.batched += step.num_tokens
        for seq, _ in step.entries:
            if seq.num_computed == len(seq.tokens):
                self._token(seq)

    def _token(self, seq: Sequence) -> None:
        """The model decides the next token of a sequence, which may be its last."""
        request: Request = seq.answer
        if request.first_token is None:
            request.first_token = self.now
            self.times["queueing_s"].append(request.admitted - request.arrival)
            self.times["ttft_s"].append(self.now - request.arrival)
        seq.tokens.append(-1)  # which one does not matter: every request's own text comes before it
        answered = len(seq.tokens) - seq.num_prompt
        if answered == request.answer:
            self.scheduler.finish(seq)
            self.done += 1
            self.generated += answered
            if answered > 1:
                self.times["tpot_s"].append((self.now - request.first_token) / (answered - 1))
            self.workload.next_turn(request, seq.tokens, self.now)

    def _sample(self) -> None:
        balance, size = self.scheduler.tables.balance(self.scheduler.running), self.scheduler.block_size
        self.kv_tokens += balance["kv_tokens"]
        self.kv_live += balance["live"] * size
        self.kv_pool += balance["total"] * size

    def report(self) -> dict:
        """The figures as --json prints them; None where nothing was observed."""
        stats = self.scheduler.stats()
        return {
            "requests": self.done,
            "simulated_s": self.now,
            "output_tok_s": self.generated / self.now,
            **{name: spread(values) for name, values in self.times.items()},
            "hit_rate": stats["hit_tokens"] / stats["prompt_tokens"],
            "preemptions": stats["preemptions"],
            "recomputed_tokens": stats["recomputed_tokens"],
            "kv_share_of_live": self.kv_tokens / self.kv_live if self.kv_live else None,
            "kv_share_of_pool": self.kv_tokens / self.kv_pool if self.kv_pool else None,
            "tokens_per_step": self.batched / stats["steps"],
            "steps": stats["steps"],
            "planning_us_per_step": self.planning / stats["steps"] * 1e6,
        }


def planning_cost(waiting: int, policy: str, steps: int = 300) -> float:
    """Median microseconds to plan and book a step with 32 running sequences and `waiting` requests in the queue."""
    flags = f"--requests {waiting + 32 + steps} --policy {policy} --num-blocks 4096 --rate 1e9 --turns 1 --prefixes 64"
    simulation = Simulation(parse([*flags.split(), *"--prefix-share 1 --prefix-len 64 --prompt-mean 64".split()]))
    simulation.arrivals(inf)
    costs = []
    while len(costs) < steps:
        before = simulation.planning
        simulation.step()
        if len(simulation.scheduler.running) == 32:
            costs.append(simulation.planning - before)
    return statistics.median(costs) * 1e6


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("scheduler.py", description="Drive the real scheduler with a synthetic workload.")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--simulate", action="store_true", help="simulate a workload (the default)")
    mode.add_argument("--cost", action="store_true", help="measure what planning a step costs as the queue grows")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--trace", action="store_true", help="print a line per step")
    for name, (default, _, _, text) in FLAGS.items():
        parser.add_argument(flag(name), type=type(default), default=default, help=f"{text or ''} (default {default})")
    for name, choices in CHOICES.items():
        parser.add_argument(flag(name), choices=choices, default=choices[0])
    about = "compute a prompt in one step or not at all"
    parser.add_argument("--no-chunked", action="store_false", dest="chunked", help=about)
    args = parser.parse_args(argv)
    for name, (_, least, most, _) in FLAGS.items():
        if not least <= getattr(args, name) <= most:
            parser.error(f"{flag(name)} {getattr(args, name)}: must be from {least:g} to {most:g}")
    if args.prefix_len >= args.max_model_len - 1:
        parser.error(f"--prefix-len {args.prefix_len}: must leave room in --max-model-len {args.max_model_len}")
    words = given(parser, argv, args)
    refuse_unused(
        words,
        (words - {"cost", "json"}, not args.cost, "--cost has a workload of its own; leave them out"),
        (["prefix_len", "prefix_share"], args.prefixes, "no prefixes are shared; raise --prefixes"),
        (["think_time"], args.turns > 1, "a conversation has one turn; raise --turns"),
        (["swap_cost"], args.preemption == "swap", "nothing is swapped; add --preemption swap"),
    )
    return args


@as_command
def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.cost:  # {policy: {requests waiting: microseconds to plan a step}}
        result = {policy: {str(n): planning_cost(n, policy) for n in (10, 1_000, 100_000)} for policy in POLICIES}
    else:
        simulation = Simulation(args)
        simulation.run()
        result = simulation.report()
    print(json.dumps(result) if args.json else lines(result))
    return 0


if __name__ == "__main__":  # run by scheduler.py
    raise SystemExit(main())
