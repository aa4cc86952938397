"""What sharing a beginning buys: prompts computed and held once, for forks, for later requests, and by their order.

Problem. Samples of one prompt, turns of one conversation and questions under the same examples begin alike, and a plain
engine computes and holds that beginning once for each of them.

Idea. Flip one argument and count what is computed and held (benchmarks/lab.py):

    fork           four requests | one of n=4                  blocks held, tokens computed
    lpm            first come | longest prefix first           prompt tokens found in the cache
    prefix-cache   none | hash | radix, on four workloads      prompt tokens found in the cache, and TTFT

The four workloads are few-shot questions, conversations, a tree of thought, and one without anything to share, which
shows what looking costs. `lpm` only counts, so it drives the scheduler without a model.

Sources: the paper of each idea stands beside its claim. Left out: beams, which share as forks do.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from benchmarks.lab import (
    Claim,
    Found,
    Lab,
    Run,
    Sizes,
    answer_of,
    counting_scheduler,
    median,
    middle,
    ratio,
    run_all,
    tokens_of,
)
from scheduler import Sequence


def fork(lab: Lab) -> Found:
    """Four answers to one long prompt: as one request that forks, or as four that know nothing of each other."""
    n, answer = 4, 24
    prompt = lab.sizes.shared + lab.block_size // 2  # ends inside a block, which is the one to be copied

    def side(forks: bool) -> Run:
        scheduler, ids = lab.scheduler(), lab.drawn()(prompt)
        requests = [lab.llm.add(ids, answer_of(answer, n=n if forks else 1)) for _ in range(1 if forks else n)]
        held, began = 0, time.perf_counter()
        while lab.llm.engine.has_work:
            lab.llm.engine.step()
            held = max(held, scheduler.stats()["live"])
        seconds = time.perf_counter() - began
        run_all(lab.llm, requests)  # nothing is left: looks for failures
        counted = {"most blocks held": held, "blocks copied": scheduler.copies} | scheduler.work
        return Run(counted, {"seconds": seconds}, tokens_of(requests))

    sides = lab.alternate({"four requests": lambda: side(False), "forks": lambda: side(True)})
    apart, forks = sides["four requests"], sides["forks"]
    a, b = apart["counted"], forks["counted"]
    return Found(
        sides,
        f"{a['most blocks held']} blocks held by four requests, {b['most blocks held']} by four forks, which copied "
        f"{b['blocks copied']}: {a['most blocks held'] / b['most blocks held']:.2f}x fewer, and "
        f"{ratio(apart, forks, 'seconds')} faster, for the prompt is computed once",
        f"the prompt held once: at most {n * (prompt + answer) / (prompt + n * answer):.2f}x fewer blocks, and "
        f"{a['tokens computed'] / b['tokens computed']:.2f}x fewer tokens to compute",
    )


def lpm(lab: Lab) -> Found:
    """Requests over eight long prefixes, arrived in random order; the cache has room for about two of the prefixes."""

    def side(policy: str) -> Run:
        draw, order, size = lab.drawn(10**6), random.Random(lab.seed), lab.block_size
        prefixes = [draw(256) for _ in range(8)]
        per_request = -(-(256 + 32 + 16) // size)
        scheduler = counting_scheduler(
            4 * per_request + 2 * 256 // size, size, "radix", policy=policy, max_num_seqs=4, max_model_len=512
        )
        for _ in range(lab.sizes.lpm_requests):
            scheduler.add(Sequence(order.choice(prefixes) + draw(32), 16))
        while scheduler.has_unfinished():
            step = scheduler.schedule()
            scheduler.computed(step)
            for seq in [seq for seq, _ in step.entries if seq.num_new == 0]:
                seq.tokens.append(0)
                if len(seq.tokens) - seq.num_prompt == 16:
                    scheduler.finish(seq)
        stats = scheduler.stats()
        hits = {
            "hit rate": round(stats["hit_tokens"] / stats["prompt_tokens"], 3),
            "cached tokens": stats["hit_tokens"],
        }
        return Run(hits | scheduler.work | {"evicted blocks": stats["evicted_blocks"]})

    sides = lab.alternate({name: lambda name=name: side(name) for name in ("fcfs", "lpm")})
    a, b = sides["lpm"]["counted"], sides["fcfs"]["counted"]
    most = (lab.sizes.lpm_requests - 8) * 256 / (lab.sizes.lpm_requests * (256 + 32))
    return Found(
        sides,
        f"hit rate {b['hit rate']:.0%} in order of arrival, {a['hit rate']:.0%} longest prefix first: "
        f"{b['tokens computed'] / a['tokens computed']:.2f}x fewer tokens to compute",
        f"every prefix computed once: a hit rate of {most:.0%}",
    )


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


def prefix_cache(lab: Lab) -> Found:
    """One client that asks one question after another, so that a TTFT holds no queueing."""

    def side(workload: Callable, cache: str) -> Run:
        scheduler, requests = lab.scheduler(prefix_cache=cache), []
        total = 0.0

        def ask(prompt: list[int]) -> list[int]:
            nonlocal total
            requests.append(lab.llm.add(prompt, answer_of(8)))
            total += run_all(lab.llm, requests[-1:])
            return list(requests[-1].answers[0].token_ids)

        workload(lab.sizes, lab.drawn(), ask)
        stats = scheduler.stats()
        counted = {"prompt tokens": stats["prompt_tokens"], "cached tokens": stats["hit_tokens"]} | scheduler.work
        counted["before the median TTFT"] = median([len(r.prompt_ids) - r.num_cached_tokens for r in requests])
        ttft = median([request.first_token - request.arrival for request in requests])
        planning = scheduler.planning / total * 100
        return Run(counted, {"TTFT ms": ttft * 1e3, "seconds": total, "planning %": planning}, tokens_of(requests))

    sides, found, floors = {}, [], []
    for name, workload in WORKLOADS.items():
        caches = {f"{name}, {c}": lambda w=workload, c=c: side(w, c) for c in ("none", "hash", "radix")}
        sides |= lab.alternate(caches)
        none, radix = sides[f"{name}, none"], sides[f"{name}, radix"]
        share = radix["counted"]["cached tokens"] / radix["counted"]["prompt tokens"]
        if workload is not no_reuse:
            times = [ratio(none, radix, key) for key in ("TTFT ms", "seconds")]
            first, whole = (
                none["counted"][key] / radix["counted"][key] for key in ("before the median TTFT", "tokens computed")
            )
            floors.append(f"{name} {first:.1f}x and {whole:.1f}x")
            found.append(f"{name} {share:.0%} cached, TTFT {times[0]} and the whole {times[1]} faster")
    cost = middle(radix, "planning %") - middle(none, "planning %")
    found.append(f"no reuse {share:.0%} cached, the tree costs {cost:+.2f} % of the time")
    return Found(sides, "; ".join(found), f"only what is not cached computed, TTFT and whole: {', '.join(floors)}")


CLAIMS = {
    "fork": Claim(
        fork,
        "copy-on-write fork",
        "the prompt's memory is paid once: 6.1-9.8 % of blocks saved with parallel samples, 37.6-55.2 % with beams",
        "vLLM (SOSP 2023), section 6.3",
        "OPT-13B, one A100, Alpaca trace",
        "the saving is the prompt's share of all tokens, and prompts are short in the paper's trace, long here.",
        10,
    ),
    "lpm": Claim(
        lpm,
        "longest prefix first against first come first served",
        "cache-aware order raises the hit rate",
        "SGLang (NeurIPS 2024)",
        "Llama-2-7B, one A10G",
        "the gain needs a queue to choose from and a cache too small for all prefixes; that the oldest is "
        "passed over at most 16 times bounds the wait and costs hardly any hits.",
        3,
        "none: counted without a model",
    ),
    "prefix-cache": Claim(
        prefix_cache,
        "prefix cache, radix tree and block hash",
        "TTFT down by half and more; up to 6.4x throughput; under 0.3 % cost without reuse",
        "vLLM APC; SGLang (NeurIPS 2024)",
        "Llama-2-7B to 70B and Mixtral-8x7B, A10G and A100",
        "TTFT falls with the share of the prompt that is cached, which the workload sets; both caches find the same "
        "whole blocks, and the gain in throughput ends where decoding the answers begins.",
        90,
    ),
}
