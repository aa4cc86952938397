"""A discrete-event simulation around the real scheduler, pool and prefix cache: policies studied without a model.

Problem. Whether a policy starves a request, or how many blocks a workload needs, takes many thousands of requests to
answer, and a model on a laptop serves a few a second.

Idea. The scheduler never looks at a tensor, so it cannot tell whether a step was computed or only waited for. Keep a
clock, let each step cost what a formula says, and let the "model" say any token it likes:

    arrivals (Poisson) ──► scheduler.schedule() ──► clock += step + token * tokens + context * context + swap * blocks
             ▲                                               │
             └── next turn, after some thinking ◄── finish ◄─┴─► append a token, record TTFT and TPOT

    python scheduler.py --simulate --requests 1000000     ten million steps in 5 1/2 minutes, 19 us to plan each
    python scheduler.py --cost                            a step planned with 10 / 1,000 / 100,000 waiting, 32 running

Lengths are lognormal, as in chat traces, and shared prefixes are drawn by Zipf's law. The constants of the cost formula
are flags: fit them to a machine with `bench.py decode`. Left out: overhead between steps, network time.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import log

from benchmarks.past import BATCHINGS, RESERVES, scheduler_class
from formats.command_line import as_command, given, refuse_unused, warn
from kv_paged import BlockPool
from radix import PREFIX_CACHES
from scheduler import POLICIES, PREEMPTIONS, Scheduler, Sequence

SAMPLE_EVERY = 32  # steps between two looks at how full the blocks are


@dataclass(eq=False)
class Request:
    """What the simulator knows and the scheduler does not: how long the answer will be, and when things happened."""

    arrival: float
    tokens: list[int]
    answer: int  # tokens it will generate
    turns_left: int
    opening: bool  # the first turn of its conversation
    admitted: float = -1.0
    first_token: float = -1.0


class Workload:
    """Requests in order of arrival: fresh ones from a Poisson process, next turns when their time has come."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.random = args, random.Random(args.seed)
        self.made = 0
        self.unused = 0  # token ids below this are taken: every fresh text is new to the cache
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
        room = self.args.max_model_len - len(tokens)
        answer = self._length(self.args.output_mean, min(room, self.args.max_tokens))
        heapq.heappush(self.coming, (arrival, self.made, Request(arrival, tokens, answer, turns_left, opening)))

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
            _, _, request = heapq.heappop(self.coming)
            if request.opening:
                self._open_conversation()
            yield request


def check_books(scheduler: Scheduler) -> None:
    """Reference counts recomputed from scratch: every owner of a block is a running sequence or the prefix cache."""
    owners = Counter(block for seq in scheduler.running for block in seq.block_table)
    stats, in_use = scheduler.stats(), len(owners)
    stack = list(scheduler.cache.roots.values()) if scheduler.cache else []
    while stack:
        node = stack.pop()
        stack += node.children.values()
        owners.update(node.blocks)
    balanced = stats["live"] == in_use and stats["free"] + stats["cached"] + stats["live"] == stats["total"]
    if not balanced or any(owners[block] != n for block, n in enumerate(scheduler.pool.refs) if block):
        raise RuntimeError(f"the books do not balance in step {scheduler.steps}: {stats}")


class Simulation:
    def __init__(self, args: argparse.Namespace):
        self.args, self.workload = args, Workload(args)
        pool = BlockPool(args.num_blocks, args.block_size)
        self.scheduler = scheduler_class(args.batching, args.reserve)(
            pool,
            PREFIX_CACHES[args.prefix_cache](pool),
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_model_len=args.max_model_len,
            policy=args.policy,
            preemption=args.preemption,
            chunked=not args.no_chunked,
        )
        self.now = 0.0
        self.done = self.generated = self.batched = 0
        self.queueing, self.ttft, self.tpot = array("d"), array("d"), array("d")
        self.kv_tokens = self.kv_live = self.kv_pool = 0  # slots, summed over samples
        self.planning = 0.0  # real seconds spent in the scheduler

    def run(self) -> None:
        scheduler, workload = self.scheduler, self.workload
        while scheduler.has_unfinished() or workload.coming:
            if not scheduler.has_unfinished():
                self.now = max(self.now, workload.coming[0][0])
            for request in workload.until(self.now):
                scheduler.add(Sequence(request.tokens, self.args.max_tokens, arrival=request.arrival, answer=request))
            self._step()
            if scheduler.steps % self.args.check_every == 0:
                check_books(scheduler)
        check_books(scheduler)
        progress(self.done, self.args, end=True)

    def _step(self) -> None:
        args, scheduler = self.args, self.scheduler
        began = time.perf_counter()
        step = scheduler.schedule()
        self.planning += time.perf_counter() - began
        if args.trace:
            print(f"{self.now:10.3f} s  {step.describe()}", file=sys.stderr if args.json else sys.stdout)
        for seq, _ in step.cached:
            if seq.answer.admitted < 0:
                seq.answer.admitted = self.now
        began = time.perf_counter()
        scheduler.computed(step)
        self.planning += time.perf_counter() - began
        tokens, context = step.num_tokens, sum(seq.num_computed for seq, _ in step.entries)
        moved = sum(len(blocks) for _, blocks in step.swap_out + step.swap_in)
        self.now += args.step_cost + args.token_cost * tokens + args.context_cost * context + args.swap_cost * moved
        self.batched += tokens
        for seq, _ in step.entries:
            if seq.num_computed == len(seq.tokens):
                self._token(seq)
        if scheduler.steps % SAMPLE_EVERY == 0:
            self._sample()

    def _token(self, seq: Sequence) -> None:
        """The model decides the next token of a sequence, which may be its last."""
        request: Request = seq.answer
        if request.first_token < 0:
            request.first_token = self.now
            self.queueing.append(request.admitted - request.arrival)
            self.ttft.append(self.now - request.arrival)
        seq.tokens.append(-1 - seq.number)  # a token of its own, so that only true continuations share a prefix
        answered = len(seq.tokens) - seq.num_prompt
        if answered == request.answer:
            self.scheduler.finish(seq)
            self.done += 1
            self.generated += answered
            if answered > 1:
                self.tpot.append((self.now - request.first_token) / (answered - 1))
            self.workload.next_turn(request, seq.tokens, self.now)
            if self.done % 1000 == 0:
                progress(self.done, self.args)

    def _sample(self) -> None:
        balance, size = self.scheduler.tables.balance(self.scheduler.running), self.scheduler.block_size
        self.kv_tokens += balance["kv_tokens"]
        self.kv_live += balance["live"] * size
        self.kv_pool += balance["total"] * size

    def report(self) -> dict:
        stats = self.scheduler.stats()
        return {
            "requests": self.done,
            "simulated_s": self.now,
            "output_tok_s": self.generated / self.now,
            "queueing_s": spread(self.queueing),
            "ttft_s": spread(self.ttft),
            "tpot_s": spread(self.tpot),
            "hit_rate": stats["hit_tokens"] / max(1, stats["prompt_tokens"]),
            "preemptions": stats["preemptions"],
            "recomputed_tokens": stats["recomputed_tokens"],
            "kv_share_of_live": self.kv_tokens / max(1, self.kv_live),
            "kv_share_of_pool": self.kv_tokens / max(1, self.kv_pool),
            "tokens_per_step": self.batched / stats["steps"],
            "steps": stats["steps"],
            "planning_us_per_step": self.planning / stats["steps"] * 1e6,
        }


def spread(values: array) -> dict[str, float]:
    """Mean and percentiles (nearest rank)."""
    ordered = sorted(values) or [0.0]
    at = {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 95, 99)}
    return {"mean": sum(ordered) / len(ordered), **at, "max": ordered[-1]}


def progress(done: int, args: argparse.Namespace, end: bool = False) -> None:
    if sys.stderr.isatty() and not args.trace:
        bar = "#" * (30 * done // args.requests)
        text = f"\r[{bar:.<30}] {done:,} of {args.requests:,} requests"
        warn(text, end="\n" if end else "")


def planning_cost(waiting: int, policy: str, steps: int = 300) -> float:
    """Median microseconds to plan and book one step with 32 running decodes, one of which ends (and is replaced) every
    other step, and `waiting` requests in the queue, each sharing a prefix with some others."""
    pool = BlockPool(4096, 16)
    scheduler = Scheduler(pool, PREFIX_CACHES["radix"](pool), policy=policy, max_num_batched_tokens=512)
    for i in range(waiting + 32 + steps):
        scheduler.add(Sequence([i % 64] * 64 + [i] * 64, 10**6, priority=i * 7919 % 5))
    costs = []
    while len(costs) < steps:
        began = time.perf_counter()
        step = scheduler.schedule()
        scheduler.computed(step)
        if len(scheduler.running) == 32:
            costs.append(time.perf_counter() - began)
        for seq, _ in step.entries:
            if seq.num_new == 0:
                seq.tokens.append(0)
        if scheduler.steps % 2 and len(scheduler.running) == 32:
            scheduler.finish(scheduler.running[scheduler.steps * 7919 % 32])
    return sorted(costs)[steps // 2] * 1e6


def print_planning_cost(as_json: bool) -> None:
    table = {policy: {n: planning_cost(n, policy) for n in (10, 1_000, 100_000)} for policy in POLICIES}
    if as_json:
        print(json.dumps(table))
        return
    print("microseconds to plan a step, 32 running   10 waiting   1,000 waiting   100,000 waiting")
    for policy, costs in table.items():
        print(f"{policy:40}" + f"{costs[10]:12.0f}{costs[1_000]:16.0f}{costs[100_000]:18.0f}")


def print_report(report: dict) -> None:
    for name, value in report.items():
        if isinstance(value, dict):
            text = "  ".join(f"{key} {number:.4f}" for key, number in value.items())
        else:
            text = f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"
        print(f"{name:22}{text}")


TINY, HUGE, ANY = 1e-9, 1e9, float("inf")
FLAGS = {  # flag: (default, least, most, help); nan lies outside all of them
    "workload": {
        "requests": (10_000, 1, HUGE, None),
        "rate": (5.0, TINY, HUGE, "new conversations a second"),
        "seed": (0, -ANY, ANY, None),
        "prompt-mean": (160.0, TINY, HUGE, "tokens of a request's own text"),
        "output-mean": (64.0, TINY, HUGE, "tokens of an answer"),
        "length-spread": (0.8, 0, 10, "sigma of the lognormal lengths"),
        "max-tokens": (512, 1, HUGE, "limit that requests ask for"),
        "prefixes": (20, 0, 100_000, "distinct shared prefixes (0: none)"),
        "prefix-len": (256, 1, HUGE, None),
        "prefix-share": (0.5, 0, 1, "share of conversations with a shared prefix"),
        "turns": (1.5, 1, HUGE, "mean turns of a conversation"),
        "think-time": (10.0, TINY, HUGE, "mean seconds between turns"),
    },
    "engine": {
        "num-blocks": (513, 2, HUGE, None),
        "block-size": (16, 1, HUGE, None),
        "max-num-seqs": (32, 1, HUGE, None),
        "max-num-batched-tokens": (512, 1, HUGE, None),
        "max-model-len": (2048, 2, HUGE, None),
    },
    "seconds of simulated time": {
        "step-cost": (4e-3, 0, HUGE, "per step: the weights are read once"),
        "token-cost": (2e-4, 0, HUGE, "per token computed"),
        "context-cost": (5e-7, 0, HUGE, "per token of context read by attention"),
        "swap-cost": (1e-4, 0, HUGE, "per block moved to or from the host"),
    },
    None: {"check-every": (10_000, 1, HUGE, "steps between two full checks of the books")},
}
CHOICES = {
    "policy": list(POLICIES),
    "prefix-cache": list(PREFIX_CACHES),
    "preemption": PREEMPTIONS,
    "batching": BATCHINGS,
    "reserve": RESERVES,
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Drive the real scheduler with a synthetic workload.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--simulate", action="store_true", help="simulate a workload")
    mode.add_argument("--cost", action="store_true", help="measure what planning a step costs as the queue grows")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--trace", action="store_true", help="print a line per step")
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title) if title else parser
        for name, (default, _, _, text) in flags.items():
            group.add_argument(f"--{name}", type=type(default), default=default, help=text)
        if title == "engine":
            for name, choices in CHOICES.items():
                group.add_argument(f"--{name}", choices=choices, default=choices[0])
            group.add_argument("--no-chunked", action="store_true", help="compute a prompt in one step or not at all")
    args = parser.parse_args(argv)
    for name, (_, least, most, _) in (item for flags in FLAGS.values() for item in flags.items()):
        value = getattr(args, name.replace("-", "_"))
        if not least <= value <= most:
            parser.error(f"--{name} {value}: must be from {least:g} to {most:g}")
    if args.prefix_len >= args.max_model_len - 1:
        parser.error(f"--prefix-len {args.prefix_len}: must be positive and leave room in --max-model-len")
    words = given(parser, argv, args)
    refuse_unused(
        words,
        (words - {"cost", "json"}, args.simulate, "--cost has a workload of its own; leave them out"),
        (["prefix_len", "prefix_share"], args.prefixes, "no prefixes are shared; raise --prefixes"),
        (["think_time"], args.turns > 1, "a conversation has one turn; raise --turns"),
        (["swap_cost"], args.preemption == "swap", "nothing is swapped; add --preemption swap"),
    )
    return args


@as_command
def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.cost:
        print_planning_cost(args.json)
        return 0
    simulation = Simulation(args)
    simulation.run()
    if args.json:
        print(json.dumps(simulation.report()))
    else:
        print_report(simulation.report())
    return 0


if __name__ == "__main__":  # run by scheduler.py
    raise SystemExit(main())
