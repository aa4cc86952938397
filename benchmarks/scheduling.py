"""What scheduling, paging and sharing buy: the same engine twice, with one argument of the scheduler flipped.

    kv-memory        slabs for the longest answer | pages            share of the memory held that has a token in it
    batching         static | continuous                             steps for the same tokens
    chunked-prefill  unsplit prompts | a token budget                the largest step that others wait for
    preemption       recompute | swap                                tokens computed twice
    fork             four requests | one of n=4                      blocks held, tokens computed
    lpm              first come | longest prefix first               prompt tokens matched in the cache
    prefix-cache     none | hash | radix, on three workloads         prompt tokens matched in the cache, and TTFT
    radix-tree       (a picture only)                                what the tree holds after eight requests

Token ids are random, which costs the model what text would. `kv-memory`, `lpm` and `radix-tree` only count, without a
model. Sources: beside each claim in papers.json. Left out: beams, which share as forks do.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict
from collections.abc import Callable
from math import log
from statistics import fmean, median

from benchmarks import simulate
from benchmarks.lab import Lab, Result, Run, Sizes, answer_of, drive, middle, ratio, run_all, tokens_of
from benchmarks.lab import watched_scheduler as watched
from benchmarks.peers import random_prompt
from scheduler import Sequence


class Occupancy(simulate.Simulation):
    """The simulator, which also keeps what share of the pool holds tokens, is held but empty, or is free."""

    def __init__(self, args):
        super().__init__(args)
        self.samples: list[list[float]] = []

    def _sample(self) -> None:
        super()._sample()
        balance = self.scheduler.tables.balance(self.scheduler.running)
        if self.scheduler.waiting:  # else no request lacks memory: nothing is wasted
            tokens, held, pool = balance["kv_tokens"] / self.scheduler.block_size, balance["live"], balance["total"]
            self.samples.append([round(part / pool, 4) for part in (tokens, held - tokens, pool - held)])


def kv_memory(lab: Lab, bars: int = 24) -> Result:
    """A chat trace in a pool of 16,384 tokens, too few for what arrives: which share of the slots has a token in it?"""
    trace = f"--requests {lab.sizes.trace_requests} --seed {lab.seed} --rate 1000 --prefixes 0 --turns 1"
    trace += " --prompt-mean 161 --output-mean 338 --length-spread 1 --max-tokens 1024 --max-model-len 2048"
    trace += " --max-num-seqs 256 --prefix-cache none"
    samples = {}

    def side(pool: tuple[str, int]) -> Run:
        reserve, size = pool
        flags = f"{trace} --reserve {reserve} --block-size {size} --num-blocks {16384 // size + 1}"
        run = Occupancy(simulate.parse(flags.split()))
        run.run()
        samples[pool], report = run.samples, run.report()
        counted = {"held slots with a token": round(report["kv_share_of_live"], 4)}
        counted |= {"pool with a token": round(report["kv_share_of_pool"], 4)}
        counted |= {"tokens a step": round(report["tokens_per_step"], 1)}
        return Run(counted | {key: report[key] for key in ("steps", "preemptions")})

    size, share = lab.block_size, "held slots with a token"
    pools = {"contiguous": ("contiguous", size), "paged": ("paged", size), "paged, one token a block": ("paged", 1)}
    sides = lab.alternate(side, pools)
    slab, pages, ideal = (side["counted"] for side in sides.values())
    series = {"one slab per request": samples["contiguous", size], f"pages of {size} tokens": samples["paged", size]}
    return Result(
        f"{slab[share]:.0%} of a contiguous reservation holds tokens, {pages[share]:.1%} of pages; the same trace "
        f"takes {slab['steps'] / pages['steps']:.1f}x fewer steps with pages",
        f"blocks of one token waste nothing: {slab['steps'] / ideal['steps']:.1f}x fewer steps",
        sides,
        {name: values[:: -(-len(values) // bars)] for name, values in series.items()},
    )


def batching(lab: Lab, slots: int = 8, mean: int = 40) -> Result:
    """More requests than batch slots, with answers of very different length: sigma 1 is about that of chat traces."""
    length = random.Random(lab.seed).lognormvariate
    lengths = [round(length(log(mean) - 0.5, 1.0)) for _ in range(lab.sizes.batch_requests)]
    lengths = [max(1, min(8 * mean, n)) for n in lengths]
    series = {}

    def side(kind: str) -> Run:
        scheduler, draw = lab.scheduler(batching=kind, max_num_seqs=slots), lab.drawn()
        requests = [lab.llm.add(draw(24), answer_of(n)) for n in lengths]
        seconds = run_all(lab.llm, requests)
        series[kind] = batch_slots(scheduler.taken)
        counted = scheduler.work | {"tokens a step": round(fmean(scheduler.step_tokens), 2)}
        return Run(counted, {"output tok/s": sum(lengths) / seconds}, tokens_of(requests))

    sides = lab.alternate(side, ["static", "continuous"])
    static, continuous = (side["counted"]["steps"] for side in sides.values())
    return Result(
        f"{ratio(sides['continuous'], sides['static'], 'output tok/s')} the throughput, from "
        f"{static / continuous:.2f}x fewer steps over the same tokens",
        f"every batch slot taken in every step: {static / -(-sum(lengths) // slots):.2f}x fewer steps",
        sides,
        series,
    )


def batch_slots(steps: list[list[tuple[Sequence, int]]]) -> list[list[int]]:
    """[[batch slot, first step, last step + 1, request], ...]: each takes the lowest slot free when it joins."""
    first, end = {}, {}
    for step, entries in enumerate(steps):
        for seq, _ in entries:
            first.setdefault(seq, step)
            end[seq] = step + 1
    rows, taken_until = [], defaultdict(int)
    for number, (seq, start) in enumerate(first.items()):
        slot = next(slot for slot in itertools.count() if taken_until[slot] <= start)
        taken_until[slot] = end[seq]
        rows.append([slot, start, end[seq], number])
    return rows


def chunked_prefill(lab: Lab, runners: int = 4) -> Result:
    """Four requests have decoded a few tokens when a long prompt arrives: how long do they wait for the next one?"""
    llm, long, smallest, series = lab.llm, lab.sizes.long_prompt, min(lab.sizes.budgets), {}
    lasting, vocab = 16 + -(-long // (smallest - runners)), llm.config.vocab_size

    def side(budget: int | None) -> Run:
        scheduler = lab.scheduler(chunked=bool(budget), max_num_batched_tokens=budget or llm.max_model_len)
        requests = [llm.add(random_prompt(vocab, 8, seed), answer_of(lasting)) for seed in range(runners)]
        times: list[float] = []  # of the first one's tokens

        def watch(deltas: list) -> None:
            if any(delta.request is requests[0] for delta in deltas):
                times.append(time.perf_counter())
            if len(times) == 9 and len(requests) == runners:
                requests.append(llm.add(random_prompt(vocab, long, 99), answer_of(1)))

        run_all(llm, requests, watch)
        late = requests[-1]
        gaps = [[round(b - late.arrival, 4), round((b - a) * 1e3, 3)] for a, b in itertools.pairwise(times)]
        series["whole prompt in one step" if budget is None else f"chunks of {budget}"] = gaps
        clock = {"gap max ms": max(ms for _, ms in gaps), "TTFT of the long prompt s": late.first_token - late.arrival}
        return Run({"largest step": max(scheduler.step_tokens)} | scheduler.work, clock, tokens_of(requests))

    sides = lab.alternate(side, {"whole": None} | {f"chunks of {b}": b for b in lab.sizes.budgets})
    unsplit, small = sides["whole"], sides[f"chunks of {smallest}"]
    steps = unsplit["counted"]["largest step"] / small["counted"]["largest step"]
    return Result(
        f"the longest gap falls from {middle(unsplit, 'gap max ms'):,.0f} to {middle(small, 'gap max ms'):,.0f} ms "
        f"with chunks of {smallest}; the long prompt's own TTFT becomes "
        f"{ratio(small, unsplit, 'TTFT of the long prompt s')}",
        f"a gap is as long as its step is large, and the largest is {steps:.0f}x smaller",
        sides,
        {"long_prompt": long, "gaps": series},  # [seconds since it arrived, ms since the last token]
    )


def preemption(lab: Lab, n: int = 8, prompt: int = 64, answer: int = 96) -> Result:
    """A pool that holds half of what its requests grow to, without a prefix cache."""

    def side(kind: str) -> Run:
        each = -(-(prompt + answer) // lab.llm.kv.block_size)
        scheduler, draw = lab.scheduler(preemption=kind, num_blocks=each * n // 2, max_num_seqs=n), lab.drawn()
        requests = [lab.llm.add(draw(prompt), answer_of(answer)) for _ in range(n)]
        seconds = run_all(lab.llm, requests)
        stats = scheduler.stats()
        counted = {key.replace("_", " "): stats[key] for key in ("preemptions", "recomputed_tokens", "swaps")}
        return Run(scheduler.work | counted, {"output tok/s": n * answer / seconds}, tokens_of(requests))

    sides = lab.alternate(side, ["recompute", "swap"])
    again, swap = sides["recompute"], sides["swap"]
    tokens = again["counted"]["tokens computed"] / swap["counted"]["tokens computed"]
    return Result(
        f"swapping gives {ratio(swap, again, 'output tok/s')} the throughput of recomputing, which computes "
        f"{again['counted']['recomputed tokens']} tokens a second time",
        f"nothing computed twice: {tokens:.2f}x fewer tokens",
        sides,
    )


def fork(lab: Lab, n: int = 4, answer: int = 24) -> Result:
    """Four answers to one long prompt: as one request that forks, or as four that know nothing of each other."""
    prompt = lab.sizes.shared + lab.block_size // 2  # ends inside a block, which has to be copied

    def side(forks: bool) -> Run:
        scheduler, ids, held = lab.scheduler(), lab.drawn()(prompt), []
        requests = [lab.llm.add(ids, answer_of(answer, n=n if forks else 1)) for _ in range(1 if forks else n)]
        seconds = run_all(lab.llm, requests, lambda deltas: held.append(scheduler.stats()["live"]))
        counted = {"most blocks held": max(held), "blocks copied": scheduler.copies} | scheduler.work
        return Run(counted, {"seconds": seconds}, tokens_of(requests))

    sides = lab.alternate(side, {"four requests": False, "forks": True})
    a, b = (side["counted"] for side in sides.values())
    return Result(
        f"{a['most blocks held']} blocks held by four requests, {b['most blocks held']} by four forks, which copied "
        f"{b['blocks copied']}: {a['most blocks held'] / b['most blocks held']:.2f}x fewer, and "
        f"{ratio(*sides.values(), 'seconds')} faster, for the prompt is computed once",
        f"the prompt held once: at most {n * (prompt + answer) / (prompt + n * answer):.2f}x fewer blocks, and "
        f"{a['tokens computed'] / b['tokens computed']:.2f}x fewer tokens to compute",
        sides,
    )


def lpm(lab: Lab, rooms: tuple[int, ...] = (1, 2, 3, 4, 6, 8)) -> Result:
    """Requests over eight long prefixes, arrived in random order; the cache has room for so many of the prefixes."""
    size, n, length = lab.block_size, lab.sizes.lpm_requests, 256

    def side(case: tuple[str, int]) -> Run:
        policy, room = case
        draw, order = lab.drawn(10**6), random.Random(lab.seed)
        prefixes = [draw(length) for _ in range(8)]
        blocks = 4 * -(-(length + 32 + 16) // size) + room * length // size
        scheduler = watched(blocks, size, "radix", policy=policy, max_num_seqs=4, max_model_len=512)
        drive(scheduler, [Sequence(order.choice(prefixes) + draw(32), 16) for _ in range(n)])
        stats = scheduler.stats()
        rate = round(stats["hit_tokens"] / stats["prompt_tokens"], 3)
        counted = {"KV tokens": blocks * size, "hit rate": rate, "cached tokens": stats["hit_tokens"]}
        return Run(counted | scheduler.work | {"evicted blocks": stats["evicted_blocks"]})

    cases = {f"{policy}, room for {room}": (policy, room) for room in rooms for policy in ("fcfs", "lpm")}
    sides = lab.alternate(side, cases)
    series = {policy: [] for policy in ("fcfs", "lpm")}
    for name, (policy, _) in cases.items():
        series[policy].append([sides[name]["counted"][key] for key in ("KV tokens", "hit rate")])
    b, a = (sides[f"{policy}, room for 2"]["counted"] for policy in ("fcfs", "lpm"))
    return Result(
        f"with room for two of the prefixes, hit rate {b['hit rate']:.0%} in order of arrival, {a['hit rate']:.0%} "
        f"longest prefix first: {b['tokens computed'] / a['tokens computed']:.2f}x fewer tokens to compute",
        f"every prefix computed once: a hit rate of {(n - 8) * length / (n * (length + 32)):.0%}",
        sides,
        series,
    )


# ---- prefixes: a workload draws prompts and asks; what it asks next may continue an answer


def few_shot(sizes: Sizes, draw: Callable, ask: Callable) -> None:
    examples = draw(sizes.shared)
    for _ in range(7):
        ask(examples + draw(24))


def multi_turn(sizes: Sizes, draw: Callable, ask: Callable) -> None:
    for _ in range(2):
        history: list[int] = []
        for _ in range(4):
            history = history + draw(sizes.shared // 4)
            history += ask(history)


def no_reuse(sizes: Sizes, draw: Callable, ask: Callable) -> None:
    for _ in range(7):
        ask(draw(256))


WORKLOADS = {"few-shot": few_shot, "multi-turn": multi_turn, "no reuse": no_reuse}


def prefix_cache(lab: Lab) -> Result:
    """One client that asks one question after another, so that a TTFT holds no queueing."""

    def side(case: tuple[str, str]) -> Run:
        scheduler, requests, seconds = lab.scheduler(prefix_cache=case[1]), [], 0.0

        def ask(prompt: list[int]) -> list[int]:
            nonlocal seconds
            requests.append(lab.llm.add(prompt, answer_of(8)))
            seconds += run_all(lab.llm, requests[-1:])
            return list(requests[-1].answers[0].token_ids)

        WORKLOADS[case[0]](lab.sizes, lab.drawn(), ask)
        stats = scheduler.stats()
        counted = {"prompt tokens": stats["prompt_tokens"], "cached tokens": stats["hit_tokens"]} | scheduler.work
        counted["before the median TTFT"] = median([len(r.prompt_ids) - r.num_cached_tokens for r in requests])
        first_token = median([r.first_token - r.arrival for r in requests])
        return Run(counted, {"TTFT ms": first_token * 1e3, "seconds": seconds}, tokens_of(requests))

    cases = {f"{workload}, {cache}": (workload, cache) for workload in WORKLOADS for cache in ("none", "hash", "radix")}
    sides, measured, floors = lab.alternate(side, cases), [], []
    for name in WORKLOADS:
        none, radix = sides[f"{name}, none"], sides[f"{name}, radix"]
        share = radix["counted"]["cached tokens"] / radix["counted"]["prompt tokens"]
        first, total = ratio(none, radix, "TTFT ms"), ratio(none, radix, "seconds")
        measured.append(f"{name} {share:.0%} cached, TTFT {first} and the whole {total} faster")
        keys = ("before the median TTFT", "tokens computed")
        first, total = (none["counted"][key] / radix["counted"][key] for key in keys)
        floors.append(f"{name} {first:.1f}x and {total:.1f}x")
    floor = f"only what is not cached computed, TTFT and whole: {', '.join(floors)}"
    return Result("; ".join(measured), floor, sides)


TREE = {  # name: the one it continues, tokens of its own
    "system prompt": (None, 48),
    "chat 1": ("system prompt", 16),
    "turn 2": ("chat 1", 24),
    "turn 3": ("turn 2", 16),
    "chat 2": ("system prompt", 24),
    "chat 3": ("system prompt", 16),
    "four examples": (None, 64),
    "question 1": ("four examples", 16),
    "question 2": ("four examples", 24),
    "question 3": ("four examples", 16),
}


def radix_tree(lab: Lab, size: int = 8) -> Result:
    """What the cache holds after the requests of TREE, as nested {label, tokens, requests, children}."""
    prompts: dict[str, list[int]] = {}
    for name, (base, own) in TREE.items():
        prompts[name] = prompts.get(base, []) + [len(prompts)] * own
    requests = [prompts[name] for name, (base, _) in TREE.items() if base]
    scheduler = watched(256, size, "radix", max_num_seqs=1)
    drive(scheduler, [Sequence(list(prompt), 1) for prompt in requests])

    def picture(node: dict, before: list[int]) -> dict:
        path = before + node["tokens"]
        ends = [name for name, prompt in prompts.items() if len(before) < len(prompt) and prompt == path[: len(prompt)]]
        block = len(before) + min(size, len(node["tokens"]))
        through = [prompt for prompt in requests if prompt[:block] == path[:block]]
        children = [picture(child, path) for child in node["children"]]
        return {"label": ", ".join(ends), "tokens": node["n_tokens"], "requests": len(through), "children": children}

    (root,) = scheduler.cache.snapshot(max_tokens=1000)
    asked, computed = sum(map(len, requests)), scheduler.work["tokens computed"]
    share = f"{1 - computed / asked:.0%} were cached"
    measured = f"{asked} prompt tokens were asked for, {computed} of them computed: {share}"
    return Result(measured, series=picture(root, []))


EXPERIMENTS = {
    "kv-memory": kv_memory,
    "batching": batching,
    "chunked-prefill": chunked_prefill,
    "preemption": preemption,
}
EXPERIMENTS |= {"fork": fork, "lpm": lpm, "prefix-cache": prefix_cache, "radix-tree": radix_tree}
