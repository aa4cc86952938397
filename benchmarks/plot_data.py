"""What the pictures show: counted on the scheduler alone, counted with a model, or read off a clock.

The problem. A picture drawn by the program that measures cannot be drawn again without measuring, and nobody can check
a dot against its number.

The idea. Gathering and drawing share nothing but a dictionary of plain numbers, kept beside the pictures:

    GATHER[name](bench) ──► {"kv-memory": {...}, ...} in plots.json ──► PICTURES[name].draw (plots.py) ──► SVG

Where no clock is needed none is read: pages, batch slots, cache hits and the tree come from the real scheduler, pool
and cache without a model, acceptance from the real model with a speculator that always guesses. These repeat to the
last digit. What needs a clock is measured by the other commands of bench.py, each in a process of its own.

Left out: error bars. Rates are medians of a few repetitions, and a shared machine moves them by a tenth.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

import kernels
from benchmarks import quality, simulate
from benchmarks import size as bench_size
from benchmarks.lab import (
    answer_of,
    chat_trace,
    counting_scheduler,
    drive,
    gaps_while_a_prompt_arrives,
    lognormal_lengths,
)
from benchmarks.peers import figures_of
from benchmarks.roofline import matrix_rate, read_bandwidth
from checkpoint import open_checkpoint
from drafting.budget import Speculator
from formats.config import ModelConfig
from generate import LLM
from kv_paged import BlockPool, block_bytes
from radix import RadixCache
from scheduler import Sequence
from speculative import NgramProposer

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("tokens", "reserved", "fragments")  # of the KV memory
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
    text: Path = quality.TEXT

    @cached_property
    def config(self) -> ModelConfig:
        return open_checkpoint(self.model).config

    @property
    def tokens(self) -> int:
        """The context of the engines that are started: the pool stays small."""
        return min(2048, self.config.max_position_embeddings)

    def llm(self, **options) -> LLM:
        return LLM(model=self.model, threads=self.threads, max_model_len=self.tokens, num_blocks=512, **options)

    def run(self, *words: object) -> dict:
        """The JSON of another command of bench.py, in a process of its own: its memory goes with it."""
        command = [sys.executable, str(ROOT / "bench.py"), *map(str, words), "--json", "--model", self.model]
        command += ["--threads", str(self.threads), "--max-model-len", str(self.tokens)]
        return figures_of(f"bench.py {words[0]}", command)


# ---- counted: the scheduler, the pool and the cache, without a model


class Occupancy(simulate.Simulation):
    """The simulator, which also records what the slots of the pool hold while requests wait for memory."""

    def __init__(self, args):
        super().__init__(args)
        self.samples: list[tuple[float, float, float]] = []  # shares of the pool: tokens, reserved, fragments

    def _sample(self) -> None:
        super()._sample()
        scheduler, size = self.scheduler, self.scheduler.block_size
        if not scheduler.stats()["waiting"]:
            return  # no request lacks memory: nothing is wasted
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
        run = Occupancy(chat_trace(bench.sizes.trace_requests, reserve))
        run.run()
        parts = dict(zip(PARTS, zip(*run.samples, strict=True), strict=True))
        sides[name] = {part: thinned(values, bars) for part, values in parts.items()}
        sides[name]["mean"] = {part: round(statistics.fmean(values), 4) for part, values in parts.items()}
        sides[name]["steps"] = run.scheduler.steps
    return sides


def thinned(values: tuple[float, ...], n: int) -> list[float]:
    """n means over equal runs of the values (or the values, if they are fewer)."""
    n = min(n, len(values))
    edges = [round(i * len(values) / n) for i in range(n + 1)]
    return [round(statistics.fmean(values[a:b]), 4) for a, b in zip(edges, edges[1:], strict=False)]


def batch_chart(bench: Bench, slots: int = 4) -> dict:
    """{side: [[batch slot, first step, last step + 1, request], ...]}: who held which slot, in which steps."""
    lengths = [max(2, length) for length in lognormal_lengths(bench.sizes.batch_requests, 18, 60, seed=1)]
    return {kind: occupied_slots(kind, lengths, slots) for kind in ("static", "continuous")}


def occupied_slots(batching: str, lengths: list[int], slots: int) -> list[list[int]]:
    """Run answers of these lengths to their end; each takes the lowest batch slot that is free when it joins."""
    scheduler = counting_scheduler(256, 16, max_num_seqs=slots, batching=batching)
    sequences = [Sequence([number] * 24, 64) for number in range(len(lengths))]
    for seq in sequences:
        scheduler.add(seq)
    free, joined, rows = list(range(slots)), {}, []
    steps = drive(scheduler, {seq.id: n for seq, n in zip(sequences, lengths, strict=True)})
    for step, (members, ended) in enumerate(steps):
        for seq in members:
            if seq.id not in joined:
                joined[seq.id] = free.pop(0), step
        for seq in ended:
            slot, start = joined[seq.id]
            rows.append([slot, start, step + 1, sequences.index(seq)])
            free = sorted([*free, slot])
    return rows


def hit_rate(bench: Bench) -> dict:
    """{policy: [[tokens that the pool holds, share of prompt tokens matched in the cache], ...]}"""
    flags = "--simulate --rate 30 --prefixes 16 --prefix-len 256 --prefix-share 0.9 --turns 2 --think-time 2"
    flags += " --prompt-mean 48 --output-mean 32 --max-tokens 64 --max-num-seqs 8 --max-model-len 1024"
    flags += f" --requests {bench.sizes.hit_requests}"

    def rate(policy: str, blocks: int) -> float:
        run = simulate.Simulation(simulate.parse(f"{flags} --policy {policy} --num-blocks {blocks + 1}".split()))
        run.run()
        return round(run.report()["hit_rate"], 4)

    blocks = bench.sizes.hit_blocks
    return {policy: [[n * 16, rate(policy, n)] for n in blocks] for policy in ("fcfs", "lpm")}


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
    requests = [prompts[name] for name, (base, _) in TREE.items() if base]

    def picture(node: dict, before: list[int]) -> dict:
        path = before + node["tokens"]
        through = len(before) + min(block_size, len(node["tokens"]))
        ends = [name for name, prompt in prompts.items() if len(before) < len(prompt) and prompt == path[: len(prompt)]]
        return {
            "label": ", ".join(ends),
            "tokens": node["n_tokens"],
            "blocks": len(node["blocks"]),
            "requests": sum(prompt[:through] == path[:through] for prompt in requests),
            "children": [picture(child, path) for child in node["children"]],
        }

    (root,) = cache.snapshot(max_tokens=1000)
    return {"tree": picture(root, []), "prompt_tokens": sum(map(len, requests)), "computed_tokens": made}


# ---- with a model

NAMES = ("Mercury", "Venus", "Earth", "Mars")
PLANETS = "".join(f"- {name}: planet number {i} from the Sun\n" for i, name in enumerate(NAMES, 1))
REPEATS = f"Here is a table of the planets, first as text and then once more, unchanged.\n{PLANETS}Once more:\n"
PROMPTS = {"text that repeats": f"{REPEATS}{PLANETS[:40]}- Venus:", "a story": "Once upon a time"}


def acceptance(bench: Bench) -> dict:
    """{text: [[draft length, share of guesses accepted, tokens a step], ...]} of n-gram drafts, guessing always."""
    llm = bench.llm(quant="int4", speculate="ngram", num_speculative_tokens=max(bench.sizes.drafts))

    def point(prompt: str, length: int) -> list[float]:
        llm.engine.speculator = Speculator(NgramProposer(), length)
        llm.generate(prompt, answer_of(bench.sizes.draft_gen))
        stats = llm.stats()
        return [length, round(stats["accepted"] / max(1, stats["drafted"]), 4), round(stats["tokens_per_step"], 3)]

    return {text: [point(prompt, length) for length in bench.sizes.drafts] for text, prompt in PROMPTS.items()}


def chunking(bench: Bench, runners: int = 4, chunk: int = 64) -> dict:
    """{side: [[seconds, ms since the last token], ...]} of one of four decoding requests while a long prompt comes."""
    llm, long = bench.llm(quant="int4", compile=True), min(bench.sizes.long_prompt, bench.tokens - 8)
    lasting, sides = 24 + -(-long // (chunk - runners)), {}
    for name, budget in (("whole prompt in one step", bench.tokens), (f"chunks of {chunk}", chunk)):
        scheduler = counting_scheduler(500, 16, max_num_batched_tokens=budget, max_model_len=bench.tokens)
        llm.scheduler = llm.engine.scheduler = scheduler
        times, requests = gaps_while_a_prompt_arrives(llm, long, lasting, runners)
        began, arrived = requests[0].arrival, requests[-1].arrival
        gaps = [[round(b - began, 4), round((b - a) * 1e3, 3)] for a, b in zip(times, times[1:], strict=False)]
        sides[name] = {"gaps": gaps, "arrived": round(arrived - began, 4)}
    return {"long_prompt": long, "sides": sides}


def configurations(bench: Bench) -> dict:
    """Ceilings of the machine, and of each configuration its bits, bytes, perplexity and rates (medians)."""
    kernels.set_threads(bench.threads)
    ceilings = {
        "read GB/s": round(read_bandwidth() / 1e9, 2),
        "float32 GFLOP/s": round(matrix_rate(torch.float32) / 1e9, 2),
        "int8 GOP/s": round(matrix_rate(torch.int8) / 1e9, 2),
    }
    rows = {name: configuration(bench, name) for name in bench.sizes.configurations}
    return {"prompt": bench.sizes.prompt, "ceilings": ceilings, "found": rows}


def configuration(bench: Bench, name: str) -> dict:
    flags, sizes, config = CONFIGURATIONS[name], bench.sizes, bench.config
    quant, dtype = (name, "float32") if "--quant" in flags else (None, name)
    weights = bench_size.count_weights(config, open_checkpoint(bench.model), quant, getattr(torch, dtype))
    words = ["--prompt", sizes.prompt, "--gen", sizes.gen, "--repeat", sizes.repeat, "--batch", *sizes.batches]
    rates = bench.run("decode", *flags, *words, "--num-blocks", 512)
    llm = bench.llm(quant=quant, dtype=dtype, prefix_cache="none")
    ids = llm.tokenizer.encode(bench.text.read_text(encoding="utf-8"))[: bench.tokens - 1]
    per_token = block_bytes(config.num_layers, 1, config.num_kv_heads, config.head_dim, llm.kv.data.element_size())
    return {
        "bits": round(8 * weights.nbytes / weights.parameters, 3),
        "step_bytes": weights.step_bytes,
        "layer_parameters": weights.layer_parameters,
        "head_parameters": config.vocab_size * config.hidden_size,
        "kv_bytes": per_token * (16 + sizes.gen // 2),
        "perplexity": round(quality.perplexity(llm, ids), 4),
        "prefill_tok_s": statistics.median(rates["prefill_tok_s"]),
        "decode_tok_s": {b: statistics.median(each) for b, each in rates["decode_tok_s"].items()},
    }


def load(bench: Bench) -> dict:
    """{"rates": [...]} of `bench.py serve --rates`."""
    sizes = bench.sizes
    words = ["--rates", *sizes.rates, "--requests", sizes.load_requests, "--gen", sizes.load_gen]
    return bench.run("serve", *words, "--quant", "int4", "--compile", "--num-blocks", 2000)


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
