"""What rounding costs, where a step's time goes, and how long a start takes.

    python bench.py perplexity --quant int4          dense, quantised, and quantised with 8-bit activations
    python bench.py profile --quant int4 --compile   milliseconds of one decode step: planning, kernels, sampling
    python bench.py start --quant int4 --compile     seconds from the command to its first token

Perplexity is exp of the mean negative log-probability of a text, token by token; a rise of 1 % means the model is as
surprised as if it had 1.01 times as many equally likely choices. The text is the opening of "Alice's Adventures in
Wonderland" (Lewis Carroll, 1865) in data/alice.txt, scored by the engine's own prompt_logprobs, so what is measured is
what is served. It is short: compare the rows, do not quote one alone.

The profile wraps the parts of Engine.step with clocks. Kernels are timed one kind at a time over all layers, recorded
as a tape of their own, with a full step between two runs so that no weight is still in a cache from the run before.
Left out: the time of torch's own operations one by one, which torch.profiler shows.
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

import engine as engine_module
import kernels
from benchmarks.lab import answer_of
from generate import LLM, engine_arguments
from sampling import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
TEXT = ROOT / "data" / "alice.txt"


def perplexity(llm: LLM, ids: list[int]) -> float:
    """exp of the mean negative log-probability of ids[1:], scored in one request."""
    (output,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0))
    if output.outputs[0].error:
        raise ValueError(f"the text cannot be scored: {output.outputs[0].error}")
    scores = [score.logprob for score in output.prompt_logprobs[1:]]
    return math.exp(-sum(scores) / len(scores))


def perplexities(args: argparse.Namespace) -> dict:
    """{variant: perplexity}: dense weights, then the quantised ones with float and with 8-bit activations."""
    file, options = Path(args.text or TEXT), engine_arguments(args)
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {file} is not UTF-8 ({error}): convert it") from None
    variants = {"dense": {"quant": None}}
    if quant := options["quant"]:
        variants |= {f"{quant}, {a} activations": {"activations": a} for a in ("float", "int8")}
    results = {}
    for name, changed in variants.items():
        llm = LLM(**(options | {"compile": False, "prefix_cache": "none"} | changed))
        ids = llm.tokenizer.encode(text)[: llm.max_model_len - 1]
        if len(ids) < 2:
            raise ValueError(
                f"{file} has {len(ids)} tokens in a context of {llm.max_model_len}: at least 2 are needed, since the "
                "first is not scored"
            )
        results[name] = {"perplexity": perplexity(llm, ids), "tokens": len(ids), "weight_bytes": llm.model.weight_bytes}
    return results


def table(results: dict) -> str:
    base = results["dense"]["perplexity"]
    rises = {name: f"{row['perplexity'] / base - 1:+.2%}" for name, row in results.items()}
    sizes = {name: f"{row['weight_bytes'] / 1e6:6.1f} MB, {row['tokens']} tokens" for name, row in results.items()}
    return "\n".join(f"{n:28} {r['perplexity']:8.4f} {rises[n]:>8}   {sizes[n]}" for n, r in results.items())


def start(args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds from the command to its first token and to its end, in turn with what importing torch alone takes."""
    prompt, seconds = "Once upon a time", {"first_token_s": [], "end_s": [], "import_torch_s": []}
    threads = ["--threads", str(args.threads)] if args.threads else []
    command = [sys.executable, str(ROOT / "generate.py"), *args.forwarded, *threads]
    command += ["--prompt", prompt, "--max-tokens", "4"]
    for round_ in range(args.repeat + 1):
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            n_bytes = len(child.stdout.read(len(prompt) + 1))
            first = time.perf_counter() - began
            child.stdout.read()
        end = time.perf_counter() - began
        if child.returncode or n_bytes <= len(prompt):
            raise ValueError(f"no token came: run {shlex.join(command)} to see why")
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        if round_:  # the first one warms the caches
            torch_alone = time.perf_counter() - began - end
            for times, value in zip(seconds.values(), (first, end, torch_alone), strict=True):
                times.append(round(value, 3))
    return seconds


def start_table(seconds: dict) -> str:
    names = {name: name.removesuffix("_s").replace("_", " ") for name in seconds}
    return "\n".join(f"{names[n]:12} {statistics.median(times):6.2f} s   {times}" for n, times in seconds.items())


def profile(llm: LLM, batch: int, steps: int) -> dict[str, dict]:
    """{"step": its parts, "kernels": those of native kernels over quantised weights}"""
    parts = {"step": profile_step(llm, batch, steps)}
    if kernels.backend() == "native" and llm.options.quant and llm.model.dtype == torch.float32:
        parts["kernels"] = profile_kernels(llm, batch, 16 + steps)
    return parts


def profile_table(result: dict) -> str:
    lines = []
    for batch, parts in result.items():
        rows = sorted(parts["step"].items(), key=lambda item: -item[1])
        lines.append(f"decode step, {batch} sequences: {parts['step']['whole step']:.3f} ms")
        lines += [f"  {name:24} {ms:8.3f} ms" for name, ms in rows if name != "whole step"]
        for name, (ms, rate) in parts.get("kernels", {}).items():
            lines.append(f"    {name:22} {ms:8.3f} ms" + (f"  {rate:5.1f} GB/s" if rate else ""))
    return "\n".join(lines)


def profile_step(llm: LLM, batch: int, steps: int) -> dict[str, float]:
    """Median milliseconds of the parts of a decode step over `steps` steps of `batch` sequences."""
    spent, samples, engine = defaultdict(float), defaultdict(list), llm.engine

    def clocked(owner, name: str, part: str) -> Callable[[], None]:
        inner = getattr(owner, name)

        def outer(*args, **kwargs):
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                spent[part] += time.perf_counter() - start

        setattr(owner, name, outer)
        return lambda: setattr(owner, name, inner)

    restore = [
        clocked(engine.scheduler, "schedule", "schedule"),
        clocked(engine_module, "lay_out", "lay out the run"),
        clocked(engine.runner, "run", "model"),
        clocked(engine_module, "sample", "sample"),
        clocked(engine, "accept", "accept (text, stops)"),
    ]
    requests = [llm.add([100 + i] * 16, answer_of(steps + 2)) for i in range(batch)]
    try:
        while any(len(request.answers[0].token_ids) < 2 for request in requests):
            engine.step()
        while engine.has_work:
            spent.clear()
            start = time.perf_counter()
            engine.step()
            spent["whole step"] = time.perf_counter() - start
            for part, seconds in spent.items():
                samples[part].append(seconds)
    finally:
        for undo in restore:
            undo()
    parts = {part: statistics.median(values) * 1e3 for part, values in samples.items()}
    return parts | {"the rest": 2 * parts["whole step"] - sum(parts.values())}


@torch.inference_mode()
def profile_kernels(llm: LLM, batch: int, context: int, repeats: int = 20) -> dict[str, tuple[float, float]]:
    """{kernel: (ms over all layers, GB/s of weights)} of a decode step; native kernels and quantised weights only."""
    model, config, ops = llm.model, llm.config, torch.ops.vitrine
    first = model.layers[0]
    parts = {"qkv": first.attention.qkv, "o": first.attention.o, "down": first.mlp.down}
    rows = {name: torch.randn(batch, part.in_features) for name, part in parts.items()}
    heads = torch.randn(batch, config.num_heads, config.head_dim)
    qkv = torch.randn(batch, first.attention.qkv.out_features)
    blocks = -(-context // llm.kv.block_size)
    tables = torch.arange(1, 1 + batch * blocks, dtype=torch.int32).view(batch, blocks) % llm.kv.num_blocks
    starts = torch.arange(batch + 1, dtype=torch.int32)
    lens = torch.full((batch,), context, dtype=torch.int32)
    positions = torch.full((batch,), context - 1)
    slots = tables[:, -1].long() * llm.kv.block_size + (context - 1) % llm.kv.block_size
    caches = llm.kv.layers
    scale = config.head_dim**-0.5
    x, eps = rows["qkv"], config.rms_norm_eps
    work = {
        "norm + qkv": lambda: [la.attention.qkv(x, norm_weight=la.attn_norm, eps=eps) for la in model.layers],
        "rope + cache write": lambda: [
            ops.rope_write_kv(qkv, positions, model.cos_sin[0], k, v, slots, config.num_heads) for k, v in caches
        ],
        "attention": lambda: [ops.paged_attention(heads, k, v, tables, starts, lens, scale) for k, v in caches],
        "o + residual": lambda: [la.attention.o(rows["o"], residual=x) for la in model.layers],
        "norm + gate, up + silu": lambda: [
            la.mlp.gate_up(x, norm_weight=la.mlp_norm, eps=eps, silu_gate=True) for la in model.layers
        ],
        "down + residual": lambda: [la.mlp.down(rows["down"], residual=x) for la in model.layers],
        "head": lambda: model.head(x),
    }
    read = {
        "norm + qkv": sum(layer.attention.qkv.weight_bytes for layer in model.layers),
        "o + residual": sum(layer.attention.o.weight_bytes for layer in model.layers),
        "norm + gate, up + silu": sum(layer.mlp.gate_up.weight_bytes for layer in model.layers),
        "down + residual": sum(layer.mlp.down.weight_bytes for layer in model.layers),
        "head": model.head.weight_bytes,
    }
    tapes = {}
    for name, run in work.items():
        with kernels.record() as tapes[name]:
            run()
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        for name, tape in tapes.items():
            start = time.perf_counter()
            tape.replay()
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {name: (seconds * 1e3, read.get(name, 0) / seconds / 1e9) for name, seconds in medians.items()}
