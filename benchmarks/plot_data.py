"""What the pictures show, gathered: counted on the scheduler alone, counted with a model, or read off a clock.

    python bench.py plots                    gathers everything, writes results/plots.json, draws results/plots/*.svg
    python bench.py plots --redraw           draws from results/plots.json again: nothing is measured

The problem. A picture that is drawn by the program that measures cannot be drawn again without measuring, and nobody
can check a dot against its number.

The idea. Gathering and drawing share nothing but a dictionary of plain numbers, kept beside the pictures:

    GATHER[name](bench) ──► {"kv-memory": {...}, ...} in plots.json ──► PICTURES[name].draw (plots.py) ──► SVG

Where no clock is needed none is read: pages, seats, cache hits and the tree come from the real scheduler, pool and
cache with a pretended model, acceptance from the real model with the speculator told to guess always. These repeat to
the last digit. What the clock says is measured the way the other commands measure it, most of it by running them.

Left out: error bars. Rates are medians of a few repetitions, and a machine that others use moves them by a tenth.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import log
from pathlib import Path

import torch

import kernels
from benchmarks import quality as bench_quality
from benchmarks import simulate
from benchmarks import size as bench_size
from benchmarks.lab import answer_of, counting_scheduler
from benchmarks.peers import figures_of, random_prompt
from benchmarks.roofline import matrix_rate, read_bandwidth
from checkpoint import open_checkpoint
from drafting.budget import Speculator
from formats.config import ModelConfig
from generate import LLM
from kv_paged import BlockPool, block_bytes
from radix import RadixCache
from scheduler import Sequence
from speculative import NgramProposer

HERE = Path(__file__).resolve().parent.parent
CONFIGURATIONS = {  # name: flags of the engine
    "float32": ["--dtype", "float32"],
    "bfloat16": ["--dtype", "bfloat16"],
    **{quant: ["--quant", quant, "--compile"] for quant in ("int8", "int8-g32", "int4", "int4-g64", "int4-g128")},
}


@dataclass(frozen=True)
class Sizes:
    """How large the workloads are. Lengths in tokens."""

    trace_requests: int = 300
    batch_requests: int = 16
    hit_requests: int = 400
    hit_blocks: tuple[int, ...] = (128, 192, 256, 384, 512, 768, 1024, 2048)
    long_prompt: int = 1500
    prompt: int = 512
    batches: tuple[int, ...] = (1, 8, 32)
    gen: int = 48
    repeat: int = 3
    drafts: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    draft_gen: int = 96
    rates: tuple[float, ...] = (1, 2, 4, 8, 12)
    load_requests: int = 32
    load_gen: int = 32
    configurations: tuple[str, ...] = tuple(CONFIGURATIONS)


@dataclass
class Bench:
    """The model that the pictures are of, and how much is done."""

    model: str = "smollm2"
    threads: int = 2
    sizes: Sizes = Sizes()
    text: Path = bench_quality.TEXT

    @cached_property
    def config(self) -> ModelConfig:
        return open_checkpoint(self.model).config

    @property
    def tokens(self) -> int:
        """The context that is asked for: no model of the tests takes more, and the pool stays small."""
        return min(2048, self.config.max_position_embeddings)

    def flags(self) -> list[str]:
        return ["--model", self.model, "--threads", str(self.threads), "--max-model-len", str(self.tokens)]

    def llm(self, **changed) -> LLM:
        given = {"model": self.model, "threads": self.threads, "max_model_len": self.tokens, "num_blocks": 512}
        return LLM(**(given | changed))

    def run(self, *words: str) -> dict:
        """The JSON of another command of bench.py, in a process of its own: its memory goes with it."""
        name = f"bench.py {words[0]}"
        return figures_of(name, [sys.executable, str(HERE / "bench.py"), *words, "--json", *self.flags()])


# ---- counted: the scheduler, the pool and the cache, without a model


class Occupancy(simulate.Simulation):
    """The simulator, which also notes what the slots of the pool hold while requests wait for memory."""

    def __init__(self, args):
        super().__init__(args)
        self.samples: list[tuple[float, float, float]] = []  # shares of the pool: tokens, reserved, fragments

    def _sample(self) -> None:
        super()._sample()
        scheduler, size = self.scheduler, self.scheduler.block_size
        if not scheduler.stats()["waiting"]:
            return  # nobody wants memory: nothing is wasted
        balance = scheduler.tables.balance(scheduler.running)
        tokens, held = balance["kv_tokens"], balance["live"] * size
        to_come = 0  # slots already held that the answers will yet fill
        for seq in scheduler.running:
            end = min(len(seq.block_table) * size, seq.num_prompt + seq.answer.answer)
            to_come += max(0, end - seq.num_computed)
        reserved = min(to_come, held - tokens)
        gaps = balance["free"] * size if self.args.reserve == "contiguous" else 0  # no slab fits, free pages always do
        pool = balance["total"] * size
        self.samples.append((tokens / pool, reserved / pool, (held - tokens - reserved + gaps) / pool))


def kv_memory(bench: Bench, bars: int = 24) -> dict:
    """{side: {tokens, reserved, fragments: shares of the pool over time, mean: of each}}"""
    sides = {}
    for name, reserve in (("one slab per request", "contiguous"), ("pages of 16 tokens", "paged")):
        flags = (
            f"--simulate --requests {bench.sizes.trace_requests} --rate 1000 --prefixes 0 --turns 1 --prompt-mean 161"
        )
        flags += " --output-mean 338 --length-spread 1 --max-tokens 1024 --num-blocks 1025 --max-num-seqs 256"
        run = Occupancy(simulate.parse(f"{flags} --prefix-cache none --reserve {reserve}".split()))
        run.run()
        parts = {part: list(values) for part, values in zip(PARTS, zip(*run.samples, strict=True), strict=True)}
        sides[name] = {part: thinned(values, bars) for part, values in parts.items()}
        sides[name]["mean"] = {part: round(statistics.fmean(values), 4) for part, values in parts.items()}
        sides[name]["steps"] = run.scheduler.steps
    return sides


PARTS = ("tokens", "reserved", "fragments")


def thinned(values: list[float], n: int) -> list[float]:
    """n means over equal runs of the values (or the values, if they are fewer)."""
    n = min(n, len(values))
    edges = [round(i * len(values) / n) for i in range(n + 1)]
    return [round(statistics.fmean(values[a:b]), 4) for a, b in zip(edges, edges[1:], strict=False)]


def batch_chart(bench: Bench, seats: int = 4) -> dict:
    """{side: [[seat, first step, last step + 1, request], ...]}: who sat where, in which steps."""
    draw = random.Random(1)
    lengths = [
        max(2, min(60, round(draw.lognormvariate(log(18) - 0.5, 1.0)))) for _ in range(bench.sizes.batch_requests)
    ]
    sides = {}
    for batching in ("static", "continuous"):
        scheduler = counting_scheduler(256, 16, max_num_seqs=seats, batching=batching)
        ends = {}
        for number, length in enumerate(lengths):
            seq = Sequence([number] * 24, 64)
            ends[seq.id] = number, 24 + length
            scheduler.add(seq)
        sides[batching] = seating(scheduler, ends, seats)
    return sides


def seating(scheduler, ends: dict, seats: int) -> list[list[int]]:
    """Run to the end; an answer sits on the lowest seat that is free when it joins."""
    free, seated, rows, step_number = list(range(seats)), {}, [], 0
    while scheduler.has_unfinished():
        step = scheduler.schedule()
        scheduler.computed(step)
        for seq, _ in step.entries:
            if seq.id not in seated:
                seated[seq.id] = free.pop(0), step_number
        for seq in [seq for seq, _ in step.entries if seq.num_new == 0]:
            seq.tokens.append(0)
            number, length = ends[seq.id]
            if len(seq.tokens) == length:
                scheduler.finish(seq)
                seat, start = seated[seq.id]
                rows.append([seat, start, step_number + 1, number])
                free = sorted([*free, seat])
        step_number += 1
    return rows


def hit_rate(bench: Bench) -> dict:
    """{policy: [[tokens that the pool holds, share of prompt tokens found in the cache], ...]}"""
    flags = (
        f"--simulate --requests {bench.sizes.hit_requests} --rate 30 --prefixes 16 --prefix-len 256 --prefix-share 0.9"
    )
    flags += " --turns 2 --think-time 2 --prompt-mean 48 --output-mean 32 --max-tokens 64 --max-num-seqs 8"
    flags += " --max-model-len 1024"
    sides = {}
    for policy in ("fcfs", "lpm"):
        sides[policy] = []
        for blocks in bench.sizes.hit_blocks:
            run = simulate.Simulation(simulate.parse(f"{flags} --policy {policy} --num-blocks {blocks + 1}".split()))
            run.run()
            sides[policy].append([blocks * 16, round(run.report()["hit_rate"], 4)])
    return sides


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


def radix_tree(bench: Bench, block_size: int = 8) -> dict:
    """A tree {label, tokens, blocks, requests, children}: what a RadixCache holds after this workload was answered."""
    pool = BlockPool(256, block_size)
    cache, prompts, made = RadixCache(pool), {}, 0
    for name, (base, own) in TREE.items():
        prompts[name] = prompts.get(base, []) + list(range(made, made + own))
        made += own
        if base is None:
            continue  # a beginning that others share, no request
        match = cache.match(prompts[name])
        cache.lock(match.handle)
        blocks = pool.allocate((len(prompts[name]) - match.n_tokens) // block_size)
        cache.unlock(cache.insert(prompts[name], match.blocks + blocks, match.handle).handle)
        pool.release(blocks)
    asked = [prompts[name] for name, (base, _) in TREE.items() if base]

    def picture(node: dict, before: list[int]) -> dict:
        path = before + node["tokens"]
        through = len(before) + min(block_size, len(node["tokens"]))
        ends = [name for name, prompt in prompts.items() if len(before) < len(prompt) and prompt == path[: len(prompt)]]
        return {
            "label": ", ".join(ends),
            "tokens": node["n_tokens"],
            "blocks": len(node["blocks"]),
            "requests": sum(prompt[:through] == path[:through] for prompt in asked),
            "children": [picture(child, path) for child in node["children"]],
        }

    (root,) = cache.snapshot(max_tokens=1000)
    return {"tree": picture(root, []), "prompt_tokens": sum(map(len, asked)), "computed_tokens": made}


# ---- counted, with a model

REPEATS = (
    "Here is a table of the planets, first as text and then once more, unchanged.\n"
    + "".join(
        f"- {name}: planet number {i} from the Sun\n" for i, name in enumerate("Mercury Venus Earth Mars".split(), 1)
    )
    + "Once more:\n- Mercury: planet number 1 from the Sun\n- Venus:"
)
PROMPTS = {"text that repeats": REPEATS, "a story": "Once upon a time"}


def acceptance(bench: Bench) -> dict:
    """{text: [[draft length, share of guesses accepted, tokens a step], ...]} of n-gram drafts, guessing always."""
    most = max(bench.sizes.drafts)
    llm, found = bench.llm(quant="int4", speculate="ngram", num_speculative_tokens=most), {}
    for text, prompt in PROMPTS.items():
        found[text] = []
        for length in bench.sizes.drafts:
            speculator = llm.engine.speculator = Speculator(NgramProposer(), length)
            llm.generate(prompt, answer_of(bench.sizes.draft_gen))
            stats = speculator.stats()
            share = stats["accepted"] / stats["drafted"] if stats["drafted"] else 0.0
            found[text].append([length, round(share, 4), round(stats["tokens_per_step"], 3)])
    return found


# ---- with a clock


def chunking(bench: Bench, runners: int = 4, chunk: int = 64) -> dict:
    """{side: [[seconds, ms since the last token], ...]} of one of four decoding requests while a long prompt comes."""
    llm, long = bench.llm(quant="int4", compile=True), min(bench.sizes.long_prompt, bench.tokens - 8)
    vocab, lasting = llm.config.vocab_size, 24 + -(-long // (chunk - runners))
    sides = {}
    for name, budget in (("whole prompt in one step", bench.tokens), (f"chunks of {chunk}", chunk)):
        scheduler = counting_scheduler(500, 16, max_num_batched_tokens=budget, max_model_len=bench.tokens)
        llm.scheduler = llm.engine.scheduler = scheduler
        watched = [llm.add(random_prompt(vocab, 8, seed), answer_of(lasting)) for seed in range(runners)][0]
        gaps, began, last, arrived = [], time.perf_counter(), None, None
        while llm.engine.has_work:
            deltas = llm.engine.step()
            now = time.perf_counter()
            if any(delta.request is watched for delta in deltas):
                gaps += [[round(now - began, 4), round((now - last) * 1e3, 3)]] if last else []
                last = now
            if len(gaps) == 8 and arrived is None:
                arrived = now - began
                llm.add(random_prompt(vocab, long, 99), answer_of(1))
        sides[name] = {"gaps": gaps, "arrived": round(arrived, 4)}
    return {"long_prompt": long, "sides": sides}


def configurations(bench: Bench) -> dict:
    """Ceilings of the machine, and of each configuration its bits, bytes, perplexity and rates (medians)."""
    kernels.set_threads(bench.threads)
    ceilings = {
        "read GB/s": read_bandwidth() / 1e9,
        "float32 GFLOP/s": matrix_rate(torch.float32) / 1e9,
        "int8 GOP/s": matrix_rate(torch.int8) / 1e9,
    }
    ckpt, found = open_checkpoint(bench.model), {}
    text = bench.text.read_text(encoding="utf-8")
    for name in bench.sizes.configurations:
        flags = CONFIGURATIONS[name]
        quant, dtype = (name, "float32") if "--quant" in flags else (None, name)
        weights = bench_size.count_weights(bench.config, ckpt, quant, getattr(torch, dtype))
        sizes = [
            "--prompt",
            str(bench.sizes.prompt),
            "--gen",
            str(bench.sizes.gen),
            "--repeat",
            str(bench.sizes.repeat),
        ]
        rates = bench.run("decode", *flags, *sizes, "--batch", *map(str, bench.sizes.batches), "--num-blocks", "512")
        llm = bench.llm(quant=quant, dtype=dtype, prefix_cache="none")
        ids = llm.tokenizer.encode(text)[: bench.tokens - 1]
        found[name] = {
            "bits": round(8 * weights.nbytes / weights.parameters, 3),
            "step_bytes": weights.step_bytes,
            "layer_parameters": weights.layer_parameters,
            "head_parameters": bench.config.vocab_size * bench.config.hidden_size,
            "kv_bytes": block_bytes(*kv_shape(bench.config), llm.kv.data.element_size()) * (16 + bench.sizes.gen // 2),
            "perplexity": round(bench_quality.perplexity(llm, ids), 4),
            "prefill_tok_s": statistics.median(rates["prefill_tok_s"]),
            "decode_tok_s": {b: statistics.median(each) for b, each in rates["decode_tok_s"].items()},
        }
    return {"prompt": bench.sizes.prompt, "ceilings": {k: round(v, 2) for k, v in ceilings.items()}, "found": found}


def kv_shape(config: ModelConfig) -> tuple[int, int, int, int]:
    """The arguments of block_bytes for one token, but for the bytes of an element."""
    return config.num_layers, 1, config.num_kv_heads, config.head_dim


def load(bench: Bench) -> dict:
    """{"rates": [...]} of `bench.py serve --rates`."""
    sizes = bench.sizes
    words = ["--rates", *map(str, sizes.rates), "--requests", str(sizes.load_requests), "--gen", str(sizes.load_gen)]
    return bench.run("serve", *words, "--quant", "int4", "--compile", "--num-blocks", "2000")


GATHER: dict[str, Callable[[Bench], dict]] = {
    "kv-memory": kv_memory,
    "batch-chart": batch_chart,
    "chunking": chunking,
    "hit-rate": hit_rate,
    "radix-tree": radix_tree,
    "configurations": configurations,
    "acceptance": acceptance,
    "load": load,
}
