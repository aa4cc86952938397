"""What scheduling and paging buy: the same engine twice, with one argument of the scheduler flipped.

Problem. A paper's "up to 6x" was measured on another machine, model and workload. It does not say whether the idea
works here.

Idea. One workload through two schedulers that differ in one argument, over one model (lab.py). What is counted is
the proof, what the clock says is what it is worth here:

    kv-memory          slabs for the longest answer | pages           share of the memory held that has a token in it
    batching           static | continuous                            steps for the same tokens
    selective-batching padded to a rectangle | one flat run           rows computed
    chunked-prefill    whole prompts | a token budget                 the largest step that others wait for
    preemption         recompute | swap                               tokens computed twice

Lengths are lognormal with sigma 1, about the spread of chat traces; token ids are random, which costs the model what
text would. `kv-memory` only counts, so it drives the scheduler without a model.

Sources: the paper of each idea stands beside its claim. Left out: what requests share (sharing.py), switches of
the model (benchmarks/speed.py), guesses and structure (benchmarks/guessing.py).
"""

from __future__ import annotations

import time

from benchmarks import simulate
from benchmarks.lab import Claim, Found, Lab, Run, answer_of, median, middle, ratio, run_all, tokens_of


def kv_memory(lab: Lab) -> Found:
    """A chat trace through the real scheduler and pool: which share of the KV slots held has a token in it?"""

    def side(reserve: str, block_size: int) -> Run:
        flags = f"--simulate --requests {lab.sizes.trace_requests} --rate 1000 --seed {lab.seed} --prefixes 0 --turns 1"
        flags += " --prompt-mean 161 --output-mean 338 --length-spread 1 --max-tokens 1024 --max-model-len 2048"
        flags += f" --num-blocks {16384 // block_size + 1} --block-size {block_size} --max-num-seqs 256"
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

    size = lab.block_size
    sides = lab.alternate(
        {
            "contiguous": lambda: side("contiguous", size),
            "paged": lambda: side("paged", size),
            "paged, one token a block": lambda: side("paged", 1),
        }
    )
    slab, pages, ideal = (side["counted"] for side in sides.values())
    share = "held slots with a token"
    return Found(
        sides,
        f"{slab[share]:.0%} of a contiguous reservation holds tokens, {pages[share]:.1%} of pages; the same trace "
        f"takes {slab['steps'] / pages['steps']:.1f}x fewer steps with pages",
        f"blocks of one token waste nothing: {slab['steps'] / ideal['steps']:.1f}x fewer steps",
    )


def batching(lab: Lab) -> Found:
    """More requests than seats, with answers of very different length."""
    sizes = lab.sizes
    lengths = lab.lengths(sizes.batch_requests, sizes.answer_mean, 8 * sizes.answer_mean)

    def side(kind: str) -> Run:
        scheduler, draw = lab.scheduler(batching=kind, max_num_seqs=sizes.seats), lab.drawn()
        requests = [lab.llm.add(draw(24), answer_of(n)) for n in lengths]
        seconds = run_all(lab.llm, requests)
        counted = scheduler.work | {"tokens a step": round(sum(scheduler.step_tokens) / len(scheduler.step_tokens), 2)}
        return Run(counted, {"output tok/s": sum(lengths) / seconds}, tokens_of(requests))

    sides = lab.alternate({name: lambda name=name: side(name) for name in ("static", "continuous")})
    a, b = sides["continuous"], sides["static"]
    full = -(-sum(lengths) // sizes.seats)
    return Found(
        sides,
        f"{ratio(a, b, 'output tok/s')} the throughput, from {b['counted']['steps'] / a['counted']['steps']:.2f}x "
        "fewer steps over the same tokens",
        f"every seat taken in every step: {b['counted']['steps'] / full:.2f}x fewer steps",
    )


def selective_batching(lab: Lab) -> Found:
    """Prompts of very different length together: side by side in one flat run, or padded to the longest."""
    lengths = lab.lengths(lab.sizes.seats, lab.sizes.unshared / 4, lab.sizes.unshared)

    def side(padded: bool) -> Run:
        scheduler, draw = lab.scheduler(max_num_batched_tokens=lab.llm.max_model_len), lab.drawn()
        longest = max(lengths)
        requests = [lab.llm.add(draw(longest)[: longest if padded else n], answer_of(1)) for n in lengths]
        seconds = run_all(lab.llm, requests)
        return Run(scheduler.work, {"prompt tok/s": sum(lengths) / seconds})

    sides = lab.alternate({"rectangle": lambda: side(True), "flat run": lambda: side(False)})
    a, b = sides["rectangle"]["counted"], sides["flat run"]["counted"]
    return Found(
        sides,
        f"{ratio(sides['flat run'], sides['rectangle'], 'prompt tok/s')} the prompt tokens a second, from "
        f"{a['tokens computed'] / b['tokens computed']:.2f}x fewer rows: {b['tokens computed']:,} of "
        f"{a['tokens computed']:,} are nobody's padding",
        f"no padding is left: {a['tokens computed'] / sum(lengths):.2f}x fewer rows",
    )


def chunked_prefill(lab: Lab) -> Found:
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
    steps = whole["counted"]["largest step"] / small["counted"]["largest step"]
    return Found(
        sides,
        f"the longest gap falls from {middle(whole, 'gap max ms'):,.0f} to {middle(small, 'gap max ms'):,.0f} ms with "
        f"chunks of {min(lab.sizes.budgets)}; the long prompt's own TTFT becomes "
        f"{ratio(small, whole, 'TTFT of the long prompt s')}",
        f"a gap is as long as its step is large, and the largest is {steps:.0f}x smaller",
    )


def preemption(lab: Lab) -> Found:
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
    tokens = again["counted"]["tokens computed"] / swap["counted"]["tokens computed"]
    return Found(
        sides,
        f"swapping gives {ratio(swap, again, 'output tok/s')} the throughput of recomputing, which computes "
        f"{again['counted']['recomputed tokens']} tokens a second time",
        f"nothing computed twice: {tokens:.2f}x fewer tokens",
    )


CLAIMS = {
    "kv-memory": Claim(
        kv_memory,
        "paged KV, block tables",
        "contiguous reservation stores tokens in 20-38 % of its memory, pages waste under 4 %; 2-4x throughput",
        "vLLM (SOSP 2023)",
        "OPT-13B, one A100, chat traces",
        "a slab is sized by what a request may ask for (here 1,024 answer tokens, mean 338), so its waste follows that "
        "limit; a page can only waste the end of its last block.",
        12,
        "none: counted without a model",
    ),
    "batching": Claim(
        batching,
        "continuous batching",
        "2-10x over static batching, depending on the length spread",
        "Orca (OSDI 2022)",
        "GPT-3 13B to 341B, A100s",
        "two cores are already busy with arithmetic at a few sequences, so an empty seat saves part of its time here; "
        "on a GPU a step costs nearly the same with empty seats, and the ratio nears that of the steps.",
        25,
    ),
    "selective-batching": Claim(
        selective_batching,
        "selective batching",
        "no padded work",
        "Orca (OSDI 2022), section 4.2",
        "GPT-3 13B to 341B, A100s",
        "rows are all a product sees, so it gains what it no longer computes; attention was never padded, and the "
        "longer sequences of the rectangle cost it more than their share.",
        12,
        "none: padding is a part of the prompt",
    ),
    "chunked-prefill": Claim(
        chunked_prefill,
        "chunked prefill",
        "flat inter-token latency while a long prompt arrives",
        "Sarathi-Serve (OSDI 2024)",
        "Mistral-7B to Falcon-180B, A100s",
        "the gap is the time of one step, so it is set by the budget; two cores have no idle arithmetic to hide a "
        "chunk in, so gaps shrink in proportion and do not become flat.",
        90,
    ),
    "preemption": Claim(
        preemption,
        "preemption by recompute or by swap",
        "recomputing costs about the same as swapping at blocks of 16 to 64 tokens; no ratio claimed",
        "vLLM (SOSP 2023), sections 4.5 and 7.3",
        "OPT-13B, one A100",
        "host and pool are the same memory here, so a swap is a copy of some megabytes, while recomputing takes "
        "arithmetic, the scarce thing on two cores; a GPU has arithmetic to spare, and its swaps cross a slower bus.",
        20,
    ),
}
