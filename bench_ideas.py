"""What each idea of the engine buys: the same engine twice, with one switch flipped, beside what its paper claimed.

    python bench.py ideas                              four minutes on two cores
    python bench.py ideas --only batching lpm --quick  some of them, smaller
    python bench.py ideas --out results                also writes ideas.json and ideas.md there

Problem. A paper's "up to 6x" was measured on another machine, model and workload, and a clock on a shared laptop is
off by a tenth from one minute to the next. Neither says whether the idea works here.

Idea. Load the model once and run one workload over two schedulers that differ in one argument, in turn, so that a
drift of the machine hits both alike:

    rounds    A B A B        the clock: median, least and most of the rounds, to be read as a ratio
    counted   steps, tokens computed, tokens found in the cache, blocks: the same in every round, or it is a bug

The counts are the proof (they do not depend on the machine; the tests check their sign), the clock is what they are
worth here, and a sentence says why that differs from the claim. Answers are compared too: no switch may change one.

Lengths are lognormal with sigma 1, about the spread of chat traces; token ids are random, which costs the model what
text would. `kv-memory` and `lpm` only count, so they drive the scheduler without a model. The rounds, the counting and
the tables are bench_lab.py.

Sources: the paper of each idea stands beside its claim. Left out: quantisation, kernels and compilation, which are
switches of LLM (`bench.py decode`), and load over HTTP.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import simulate
from bench_lab import (
    FULL,
    QUICK,
    Lab,
    Run,
    Sizes,
    answer_of,
    as_markdown,
    as_text,
    counting_scheduler,
    median,
    ratio,
    run_all,
    tokens_of,
)
from cli import engine_arguments
from generate import LLM
from scheduler import Sequence

FLIPPED = "max_num_seqs max_num_batched_tokens policy prefix_cache preemption batching reserve chunked speculate"


# ---- the experiments: each returns its sides and one sentence with what was measured


def kv_memory(lab: Lab) -> tuple[dict, str]:
    """A chat trace through the real scheduler and pool: which share of the KV slots held has a token in it?"""

    def side(reserve: str) -> Run:
        flags = f"--simulate --requests {lab.sizes.trace_requests} --rate 1000 --seed {lab.seed} --prefixes 0 --turns 1"
        flags += " --prompt-mean 161 --output-mean 338 --length-spread 1 --max-tokens 1024 --max-model-len 2048"
        flags += f" --num-blocks {16384 // lab.block_size + 1} --block-size {lab.block_size} --max-num-seqs 256"
        simulation = simulate.Simulation(simulate.parse(f"{flags} --prefix-cache none --reserve {reserve}".split()))
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

    sides = lab.alternate({name: lambda name=name: side(name) for name in ("contiguous", "paged")})
    slab, pages = (sides[name]["counted"] for name in ("contiguous", "paged"))
    return sides, (
        f"{slab['held slots with a token']:.0%} of a contiguous reservation holds tokens, "
        f"{pages['held slots with a token']:.1%} of pages; the same trace takes {slab['steps'] / pages['steps']:.1f}x "
        "fewer steps with pages"
    )


def batching(lab: Lab) -> tuple[dict, str]:
    """More requests than seats, with answers of very different length."""
    sizes = lab.sizes

    def side(kind: str) -> Run:
        scheduler, draw = lab.scheduler(batching=kind, max_num_seqs=sizes.seats), lab.drawn()
        lengths = lab.lengths(sizes.batch_requests, sizes.answer_mean, 8 * sizes.answer_mean)
        requests = [lab.llm.add(draw(24), answer_of(n)) for n in lengths]
        seconds = run_all(lab.llm, requests)
        counted = scheduler.work | {"tokens a step": round(sum(scheduler.step_tokens) / len(scheduler.step_tokens), 2)}
        return Run(counted, {"output tok/s": sum(lengths) / seconds}, tokens_of(requests))

    sides = lab.alternate({name: lambda name=name: side(name) for name in ("static", "continuous")})
    a, b = sides["continuous"], sides["static"]
    return sides, (
        f"{ratio(a, b, 'output tok/s')} the throughput, from {b['counted']['steps'] / a['counted']['steps']:.2f}x "
        "fewer steps over the same tokens"
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


def prefix_cache(lab: Lab) -> tuple[dict, str]:
    """One client that asks one question after another, so that a TTFT holds no queueing."""

    def side(workload: Callable, cache: str) -> Run:
        scheduler, requests = lab.scheduler(prefix_cache=cache), []
        total = 0.0

        def ask(prompt: list[int]) -> list[int]:
            nonlocal total
            requests.append(lab.llm.add(prompt, answer_of(8)))
            total += run_all(lab.llm, requests[-1:])
            return list(requests[-1].choices[0].token_ids)

        workload(lab.sizes, lab.drawn(), ask)
        stats = scheduler.stats()
        counted = {"prompt tokens": stats["prompt_tokens"], "cached tokens": stats["hit_tokens"]} | scheduler.work
        ttft = median([request.first_token - request.arrival for request in requests])
        planning = scheduler.planning / total * 100
        return Run(counted, {"TTFT ms": ttft * 1e3, "seconds": total, "planning %": planning}, tokens_of(requests))

    sides, found = {}, []
    for name, workload in WORKLOADS.items():
        caches = {f"{name}, {c}": lambda w=workload, c=c: side(w, c) for c in ("none", "hash", "radix")}
        sides |= lab.alternate(caches)
        none, radix = sides[f"{name}, none"], sides[f"{name}, radix"]
        share = radix["counted"]["cached tokens"] / radix["counted"]["prompt tokens"]
        if workload is not no_reuse:
            times = [ratio(none, radix, key) for key in ("TTFT ms", "seconds")]
            found.append(f"{name} {share:.0%} cached, TTFT {times[0]} and the whole {times[1]} faster")
    cost = median(radix["clock"]["planning %"]) - median(none["clock"]["planning %"])
    found.append(f"no reuse {share:.0%} cached, the tree costs {cost:+.2f} % of the time")
    return sides, "; ".join(found)


def chunked_prefill(lab: Lab) -> tuple[dict, str]:
    """Four requests are decoding when a long prompt arrives: how long do they wait for their next token?"""
    long, runners = lab.sizes.long_prompt, 4
    shares = min(lab.sizes.budgets) - runners  # tokens of the prompt in the smallest chunk
    lasting = 16 + -(-long // shares)

    def side(budget: int | None) -> Run:
        most = budget or lab.llm.max_model_len
        scheduler, draw = lab.scheduler(chunked=bool(budget), max_num_batched_tokens=most), lab.drawn()
        requests = [lab.llm.add(draw(8), answer_of(lasting)) for _ in range(runners)]
        gaps, meanwhile = [], []  # ms between two tokens: always, and while the long prompt waits for its first
        while lab.llm.engine.has_work:
            arriving = len(requests) > runners and requests[-1].first_token is None
            began = time.perf_counter()
            deltas = lab.llm.engine.step()
            if any(delta.request is requests[0] for delta in deltas):
                gaps.append((time.perf_counter() - began) * 1e3)
                meanwhile += gaps[-1:] * arriving
            if len(requests) == runners and len(gaps) == 8:
                requests.append(lab.llm.add(draw(long), answer_of(1)))
        run_all(lab.llm, requests)  # nothing is left: looks for failures
        arrived = requests[-1]
        counted = {"largest step": max(scheduler.step_tokens), "tokens meanwhile": len(meanwhile) * runners}
        clock = {"gap ms": median(gaps[1:]), "gap meanwhile ms": median(meanwhile), "gap max ms": max(gaps[1:])}
        clock["TTFT of the long prompt s"] = arrived.first_token - arrived.arrival
        return Run(counted | scheduler.work, clock, tokens_of(requests))

    sides = lab.alternate(
        {"whole": lambda: side(None)} | {f"chunks of {b}": lambda b=b: side(b) for b in lab.sizes.budgets}
    )
    whole, small = sides["whole"], sides[f"chunks of {min(lab.sizes.budgets)}"]
    return sides, (
        f"the longest gap falls from {median(whole['clock']['gap max ms']):,.0f} to "
        f"{median(small['clock']['gap max ms']):,.0f} ms with chunks of {min(lab.sizes.budgets)}; the long "
        f"prompt's own TTFT becomes {ratio(small, whole, 'TTFT of the long prompt s')}"
    )


def preemption(lab: Lab) -> tuple[dict, str]:
    """A pool that holds half of what its requests grow to, without a prefix cache."""
    sizes, prompt = lab.sizes, 64

    def side(kind: str) -> Run:
        each = -(-(prompt + sizes.preempt_answer) // lab.llm.kv.block_size)
        scheduler = lab.scheduler(
            preemption=kind, num_blocks=each * sizes.preempt_requests // 2, max_num_seqs=sizes.preempt_requests
        )
        draw = lab.drawn()
        requests = [lab.llm.add(draw(prompt), answer_of(sizes.preempt_answer)) for _ in range(sizes.preempt_requests)]
        seconds = run_all(lab.llm, requests)
        stats = scheduler.stats()
        counted = scheduler.work | {
            key.replace("_", " "): stats[key] for key in ("preemptions", "recomputed_tokens", "swaps")
        }
        generated = sizes.preempt_requests * sizes.preempt_answer
        return Run(counted, {"output tok/s": generated / seconds}, tokens_of(requests))

    sides = lab.alternate({name: lambda name=name: side(name) for name in ("recompute", "swap")})
    again, swap = sides["recompute"], sides["swap"]
    return sides, (
        f"swapping gives {ratio(swap, again, 'output tok/s')} the throughput of recomputing, which computes "
        f"{again['counted']['recomputed tokens']} tokens a second time"
    )


def lpm(lab: Lab) -> tuple[dict, str]:
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
    return sides, (
        f"hit rate {b['hit rate']:.0%} in order of arrival, {a['hit rate']:.0%} longest prefix first: "
        f"{b['tokens computed'] / a['tokens computed']:.2f}x fewer tokens to compute"
    )


@dataclass(frozen=True)
class Idea:
    """A row of the table: what is switched, what was claimed and where, and why a laptop may see something else."""

    run: Callable[[Lab], tuple[dict, str]]
    mechanism: str
    claim: str
    source: str
    why: str


IDEAS = {
    "kv-memory": Idea(
        kv_memory,
        "paged KV, block tables",
        "contiguous reservation stores tokens in 20-38 % of its memory, pages waste under 4 %; 2-4x throughput",
        "vLLM (SOSP 2023)",
        "a slab is sized by what a request may ask for (here 1,024 answer tokens, mean 338), so its waste follows that "
        "limit; a page can only waste the end of its last block.",
    ),
    "batching": Idea(
        batching,
        "continuous batching",
        "2-10x over static batching, depending on the length spread",
        "Orca (OSDI 2022)",
        "two cores are already busy with arithmetic at a few sequences, so an empty seat saves part of its time here; "
        "on a GPU a step costs nearly the same with empty seats, and the ratio nears that of the steps.",
    ),
    "prefix-cache": Idea(
        prefix_cache,
        "prefix cache, radix tree and block hash",
        "TTFT down by half and more; up to 6.4x throughput; under 0.3 % cost without reuse",
        "vLLM APC; SGLang (NeurIPS 2024)",
        "TTFT falls with the share of the prompt that is cached, which the workload sets; both caches find the same "
        "whole blocks, and the gain in throughput ends where decoding the answers begins.",
    ),
    "chunked-prefill": Idea(
        chunked_prefill,
        "chunked prefill",
        "flat inter-token latency while a long prompt arrives",
        "Sarathi-Serve (OSDI 2024)",
        "the gap is the time of one step, so it is set by the budget; two cores have no idle arithmetic to hide a "
        "chunk in, so gaps shrink in proportion and do not become flat.",
    ),
    "preemption": Idea(
        preemption,
        "preemption by recompute or by swap",
        "no ratio claimed",
        "vLLM (SOSP 2023), section 4.5",
        "host and pool are the same memory here, so a swap is a copy of some megabytes, while recomputing takes "
        "arithmetic, the scarce thing on two cores; a GPU has arithmetic to spare, and its swaps cross a slower bus.",
    ),
    "lpm": Idea(
        lpm,
        "longest prefix first against first come first served",
        "cache-aware order raises the hit rate",
        "SGLang (NeurIPS 2024)",
        "the gain needs a queue to choose from and a cache too small for all prefixes; that the oldest is "
        "passed over at most 16 times bounds the wait and costs hardly any hits.",
    ),
}


def measure(lab: Lab, names: list[str]) -> dict[str, dict]:
    """One row for each name, as it goes into the JSON."""
    rows = {}
    for name in names:
        idea, began = IDEAS[name], time.perf_counter()
        print(f"{name} ...", end=" ", file=sys.stderr, flush=True)
        sides, measured = idea.run(lab)
        print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)
        answers = {}
        for side, found in sides.items():  # sides of one workload must answer alike
            answers.setdefault(side.rpartition(", ")[0], []).append(found.pop("answers"))
        given = any(answer for group in answers.values() for answer in group)
        same = all(answer == group[0] for group in answers.values() for answer in group) if given else None
        row = {"mechanism": idea.mechanism, "claim": idea.claim, "source": idea.source, "measured": measured}
        rows[name] = row | {"why": idea.why, "same_answers": same, "sides": sides}
    return rows


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench.py ideas` beside those of the engine, whose defaults become the fast ones."""
    parser.add_argument(
        "--only", nargs="+", choices=list(IDEAS), default=list(IDEAS), metavar="NAME", help=", ".join(IDEAS)
    )
    parser.add_argument("--quick", action="store_true", help="smaller workloads, one round")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write ideas.json and ideas.md there")
    parser.add_argument("--machine", metavar="TEXT", help="how the files describe this machine")
    parser.set_defaults(quant="int4", compile=True)


def run(args: argparse.Namespace) -> int:
    """The command: measure, print, and write the files if asked."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(LLM).parameters.items()}
    for name in FLIPPED.split():
        if getattr(args, name) != defaults[name]:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} {getattr(args, name)}: the experiments set this themselves; leave it out")
    sizes = QUICK if args.quick else FULL
    lab = Lab(lambda: LLM(**engine_arguments(args)), sizes, args.seed, args.block_size)
    flags = " --quick" * args.quick + f" --model {args.model} --quant {args.quant}" + " --compile" * args.compile
    flags += f" --threads {args.threads}" * bool(args.threads)
    if args.only != list(IDEAS):
        flags = f" --only {' '.join(args.only)}" + flags
    result = {
        "command": "python bench.py ideas" + flags,
        "machine": args.machine or f"{os.cpu_count()} cores, {args.threads or os.cpu_count()} threads",
        "sizes": asdict(sizes),
        "ideas": measure(lab, args.only),
    }
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "ideas.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (args.out / "ideas.md").write_text(as_markdown(result), encoding="utf-8")
    print(json.dumps(result) if args.json else as_text(result["ideas"]))
    return 0
