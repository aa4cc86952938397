"""What scheduling, paging and sharing buy: the same engine twice, with one argument of the scheduler flipped.

    kv-memory           slabs for the longest answer | pages          share of the memory held that has a token in it
    batching            static | continuous                           steps for the same tokens
    selective-batching  padded to a rectangle | one flat run          rows computed
    chunked-prefill     unsplit prompts | a token budget              the largest step that others wait for
    preemption          recompute | swap                              tokens computed twice
    fork                four requests | one of n=4                    blocks held, tokens computed
    lpm                 first come | longest prefix first             prompt tokens matched in the cache
    prefix-cache        none | hash | radix, on four workloads        prompt tokens matched in the cache, and TTFT

Token ids are random, which costs the model what text would. `kv-memory` and `lpm` only count, without a model.
Sources: beside each claim in papers.json. Left out: beams, which share as forks do.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from benchmarks import simulate
from benchmarks.lab import (
    Lab,
    Result,
    Run,
    Sizes,
    answer_of,
    chat_trace,
    counting_scheduler,
    drive,
    gaps_while_a_prompt_arrives,
    lognormal_lengths,
    median,
    middle,
    ratio,
    run_all,
    tokens_of,
)
from scheduler import Sequence


def kv_memory(lab: Lab) -> Result:
    """A chat trace through the real scheduler and pool: which share of the KV slots held has a token in it?"""

    def side(pool: tuple[str, int]) -> Run:
        simulation = simulate.Simulation(chat_trace(lab.sizes.trace_requests, *pool, lab.seed))
        simulation.run()
        report = simulation.report()
        return Run(
            {
                "held slots with a token": round(report["kv_share_of_live"], 4),
                "pool with a token": round(report["kv_share_of_pool"], 4),
                "tokens a step": round(report["tokens_per_step"], 1),
                "steps": report["steps"],
                "preemptions": report["preemptions"],
            }
        )

    pools = {"contiguous": ("contiguous", lab.block_size), "paged": ("paged", lab.block_size)}
    sides = lab.alternate(side, pools | {"paged, one token a block": ("paged", 1)})
    slab, pages, ideal = (side["counted"] for side in sides.values())
    share = "held slots with a token"
    return (
        sides,
        f"{slab[share]:.0%} of a contiguous reservation holds tokens, {pages[share]:.1%} of pages; the same trace "
        f"takes {slab['steps'] / pages['steps']:.1f}x fewer steps with pages",
        f"blocks of one token waste nothing: {slab['steps'] / ideal['steps']:.1f}x fewer steps",
    )


def batching(lab: Lab) -> Result:
    """More requests than batch slots, with answers of very different length."""
    sizes = lab.sizes
    lengths = lognormal_lengths(sizes.batch_requests, sizes.answer_mean, 8 * sizes.answer_mean, lab.seed)

    def side(kind: str) -> Run:
        scheduler, draw = lab.scheduler(batching=kind, max_num_seqs=sizes.seats), lab.drawn()
        requests = [lab.llm.add(draw(24), answer_of(n)) for n in lengths]
        seconds = run_all(lab.llm, requests)
        counted = scheduler.work | {"tokens a step": round(sum(scheduler.step_tokens) / len(scheduler.step_tokens), 2)}
        return Run(counted, {"output tok/s": sum(lengths) / seconds}, tokens_of(requests))

    sides = lab.alternate(side, ["static", "continuous"])
    a, b = sides["continuous"], sides["static"]
    full = -(-sum(lengths) // sizes.seats)
    return (
        sides,
        f"{ratio(a, b, 'output tok/s')} the throughput, from {b['counted']['steps'] / a['counted']['steps']:.2f}x "
        "fewer steps over the same tokens",
        f"every batch slot taken in every step: {b['counted']['steps'] / full:.2f}x fewer steps",
    )


def selective_batching(lab: Lab) -> Result:
    """Prompts of very different length together: side by side in one flat run, or padded to the longest."""
    lengths = lognormal_lengths(lab.sizes.seats, lab.sizes.unshared / 4, lab.sizes.unshared, lab.seed)

    def side(padded: bool) -> Run:
        scheduler, draw = lab.scheduler(max_num_batched_tokens=lab.llm.max_model_len), lab.drawn()
        longest = max(lengths)
        requests = [lab.llm.add(draw(longest)[: longest if padded else n], answer_of(1)) for n in lengths]
        seconds = run_all(lab.llm, requests)
        return Run(scheduler.work, {"prompt tok/s": sum(lengths) / seconds})

    sides = lab.alternate(side, {"rectangle": True, "flat run": False})
    a, b = (side["counted"]["tokens computed"] for side in sides.values())
    return (
        sides,
        f"{ratio(sides['flat run'], sides['rectangle'], 'prompt tok/s')} the prompt tokens a second, from "
        f"{a / b:.2f}x fewer rows: {b:,} of {a:,} are no padding",
        f"no padding is left: {a / sum(lengths):.2f}x fewer rows",
    )


def chunked_prefill(lab: Lab) -> Result:
    """Four requests are decoding when a long prompt arrives: how long do they wait for their next token?"""
    long, runners, smallest = lab.sizes.long_prompt, 4, min(lab.sizes.budgets)
    lasting = 16 + -(-long // (smallest - runners))

    def side(budget: int | None) -> Run:
        scheduler = lab.scheduler(chunked=bool(budget), max_num_batched_tokens=budget or lab.llm.max_model_len)
        times, requests = gaps_while_a_prompt_arrives(lab.llm, long, lasting, runners)
        late = requests[-1]
        gaps = [(b, (b - a) * 1e3) for a, b in zip(times, times[1:], strict=False)]
        # With a chunk of the long prompt in the step: until its first token, which comes just before the watched one's.
        meanwhile = [ms for end, ms in gaps if end > late.arrival and end - ms / 1e3 < late.first_token]
        counted = {"largest step": max(scheduler.step_tokens), "tokens meanwhile": len(meanwhile) * runners}
        every = [ms for _, ms in gaps]
        clock = {"gap ms": median(every), "gap meanwhile ms": median(meanwhile), "gap max ms": max(every)}
        clock["TTFT of the long prompt s"] = late.first_token - late.arrival
        return Run(counted | scheduler.work, clock, tokens_of(requests))

    sides = lab.alternate(side, {"whole": None} | {f"chunks of {b}": b for b in lab.sizes.budgets})
    unsplit, small = sides["whole"], sides[f"chunks of {smallest}"]
    steps = unsplit["counted"]["largest step"] / small["counted"]["largest step"]
    return (
        sides,
        f"the longest gap falls from {middle(unsplit, 'gap max ms'):,.0f} to {middle(small, 'gap max ms'):,.0f} ms "
        f"with chunks of {smallest}; the long prompt's own TTFT becomes "
        f"{ratio(small, unsplit, 'TTFT of the long prompt s')}",
        f"a gap is as long as its step is large, and the largest is {steps:.0f}x smaller",
    )


def preemption(lab: Lab) -> Result:
    """A pool that holds half of what its requests grow to, without a prefix cache."""
    n, prompt, answer = lab.sizes.preempt_requests, 64, lab.sizes.preempt_answer

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
    return (
        sides,
        f"swapping gives {ratio(swap, again, 'output tok/s')} the throughput of recomputing, which computes "
        f"{again['counted']['recomputed tokens']} tokens a second time",
        f"nothing computed twice: {tokens:.2f}x fewer tokens",
    )


def fork(lab: Lab) -> Result:
    """Four answers to one long prompt: as one request that forks, or as four that know nothing of each other."""
    n, answer = 4, 24
    prompt = lab.sizes.shared + lab.block_size // 2  # ends inside a block, which has to be copied

    def side(forks: bool) -> Run:
        scheduler, ids = lab.scheduler(), lab.drawn()(prompt)
        requests = [lab.llm.add(ids, answer_of(answer, n=n if forks else 1)) for _ in range(1 if forks else n)]
        held, began = 0, time.perf_counter()
        while lab.llm.engine.has_work:
            lab.llm.engine.step()
            held = max(held, scheduler.stats()["live"])
        seconds = time.perf_counter() - began
        run_all(lab.llm, requests)  # nothing is left to run: looks for failures
        counted = {"most blocks held": held, "blocks copied": scheduler.copies} | scheduler.work
        return Run(counted, {"seconds": seconds}, tokens_of(requests))

    sides = lab.alternate(side, {"four requests": False, "forks": True})
    apart, forks = sides["four requests"], sides["forks"]
    a, b = apart["counted"], forks["counted"]
    return (
        sides,
        f"{a['most blocks held']} blocks held by four requests, {b['most blocks held']} by four forks, which copied "
        f"{b['blocks copied']}: {a['most blocks held'] / b['most blocks held']:.2f}x fewer, and "
        f"{ratio(apart, forks, 'seconds')} faster, for the prompt is computed once",
        f"the prompt held once: at most {n * (prompt + answer) / (prompt + n * answer):.2f}x fewer blocks, and "
        f"{a['tokens computed'] / b['tokens computed']:.2f}x fewer tokens to compute",
    )


def lpm(lab: Lab) -> Result:
    """Requests over eight long prefixes, arrived in random order; the cache has room for about two of the prefixes."""
    size, n = lab.block_size, lab.sizes.lpm_requests
    blocks = 4 * -(-(256 + 32 + 16) // size) + 2 * 256 // size

    def side(policy: str) -> Run:
        draw, order = lab.drawn(10**6), random.Random(lab.seed)
        prefixes = [draw(256) for _ in range(8)]
        scheduler = counting_scheduler(blocks, size, "radix", policy=policy, max_num_seqs=4, max_model_len=512)
        sequences = [Sequence(order.choice(prefixes) + draw(32), 16) for _ in range(n)]
        for seq in sequences:
            scheduler.add(seq)
        for _ in drive(scheduler, {seq.id: 16 for seq in sequences}):
            pass
        stats = scheduler.stats()
        hits = {
            "hit rate": round(stats["hit_tokens"] / stats["prompt_tokens"], 3),
            "cached tokens": stats["hit_tokens"],
        }
        return Run(hits | scheduler.work | {"evicted blocks": stats["evicted_blocks"]})

    sides = lab.alternate(side, ["fcfs", "lpm"])
    a, b = sides["lpm"]["counted"], sides["fcfs"]["counted"]
    return (
        sides,
        f"hit rate {b['hit rate']:.0%} in order of arrival, {a['hit rate']:.0%} longest prefix first: "
        f"{b['tokens computed'] / a['tokens computed']:.2f}x fewer tokens to compute",
        f"every prefix computed once: a hit rate of {(n - 8) * 256 / (n * (256 + 32)):.0%}",
    )


# Workloads of the prefix cache: draw(n) makes n new tokens, ask(prompt) returns the answer's tokens.


def few_shot(sizes: Sizes, draw: Callable, ask: Callable) -> None:
    examples = draw(sizes.shared)
    for _ in range(sizes.questions):
        ask(examples + draw(24))


def multi_turn(sizes: Sizes, draw: Callable, ask: Callable) -> None:
    for _ in range(sizes.conversations):
        history: list[int] = []
        for _ in range(sizes.turns):
            history = history + draw(sizes.turn)
            history += ask(history)


def tree_of_thought(sizes: Sizes, draw: Callable, ask: Callable) -> None:
    def expand(path: list[int], depth: int) -> None:
        for _ in range(sizes.branches):
            thought = path + draw(16)
            thought += ask(thought)
            if depth > 1:
                expand(thought, depth - 1)

    expand(draw(sizes.shared // 2), sizes.depth)


def no_reuse(sizes: Sizes, draw: Callable, ask: Callable) -> None:
    for _ in range(sizes.questions):
        ask(draw(sizes.unshared))


WORKLOADS = {"few-shot": few_shot, "multi-turn": multi_turn, "tree of thought": tree_of_thought, "no reuse": no_reuse}


def prefix_cache(lab: Lab) -> Result:
    """One client that asks one question after another, so that a TTFT holds no queueing."""

    def side(case: tuple[Callable, str]) -> Run:
        workload, cache = case
        scheduler, requests, seconds = lab.scheduler(prefix_cache=cache), [], []

        def ask(prompt: list[int]) -> list[int]:
            requests.append(lab.llm.add(prompt, answer_of(8)))
            seconds.append(run_all(lab.llm, requests[-1:]))
            return list(requests[-1].answers[0].token_ids)

        workload(lab.sizes, lab.drawn(), ask)
        stats = scheduler.stats()
        counted = {"prompt tokens": stats["prompt_tokens"], "cached tokens": stats["hit_tokens"]} | scheduler.work
        counted["before the median TTFT"] = median([len(r.prompt_ids) - r.num_cached_tokens for r in requests])
        clock = {"TTFT ms": median([r.first_token - r.arrival for r in requests]) * 1e3, "seconds": sum(seconds)}
        return Run(counted, clock | {"planning %": scheduler.planning / sum(seconds) * 100}, tokens_of(requests))

    sides, measured, floors = {}, [], []
    for name, workload in WORKLOADS.items():
        sides |= lab.alternate(side, {f"{name}, {cache}": (workload, cache) for cache in ("none", "hash", "radix")})
        none, radix = sides[f"{name}, none"], sides[f"{name}, radix"]
        a, b = none["counted"], radix["counted"]
        share = b["cached tokens"] / b["prompt tokens"]
        if workload is no_reuse:
            cost = middle(radix, "planning %") - middle(none, "planning %")
            measured.append(f"no reuse {share:.0%} cached, the tree costs {cost:+.2f} % of the time")
            continue
        first, total = ratio(none, radix, "TTFT ms"), ratio(none, radix, "seconds")
        measured.append(f"{name} {share:.0%} cached, TTFT {first} and the whole {total} faster")
        first, total = (a[key] / b[key] for key in ("before the median TTFT", "tokens computed"))
        floors.append(f"{name} {first:.1f}x and {total:.1f}x")
    return sides, "; ".join(measured), f"only what is not cached computed, TTFT and whole: {', '.join(floors)}"


EXPERIMENTS = {
    "kv-memory": kv_memory,
    "batching": batching,
    "selective-batching": selective_batching,
    "chunked-prefill": chunked_prefill,
    "preemption": preemption,
    "fork": fork,
    "lpm": lpm,
    "prefix-cache": prefix_cache,
}
