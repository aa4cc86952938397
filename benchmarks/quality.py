"""What rounding costs, where a step's time goes, and how long a start takes.

    python bench.py perplexity --quant int4          dense, quantised, and quantised with 8-bit activations
    python bench.py profile --quant int4 --compile   milliseconds of one decode step: planning, kernels, sampling
    python bench.py start --quant int4 --compile     seconds from the command to its first token

Perplexity is exp of the mean negative log-probability of a text, here the opening of "Alice's Adventures in Wonderland"
(Lewis Carroll, 1865), scored by the engine's own prompt_logprobs: what is measured is what is served. A rise of 1 % is
as much surprise as 1.01 times as many equally likely choices. The text is short: compare rows, do not quote one alone.

The profile puts clocks around the parts of Engine.step. To see into the model's part, a step is recorded as a tape, and
its operations are replayed one kind at a time over all layers. Left out: torch's own operations, one by one.
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
import struct
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch

import engine as engine_module
import kernels
from benchmarks.figures import table
from benchmarks.lab import answer_of
from compiled import ModelRunner
from generate import LLM, engine_arguments
from native.tape import Operation
from sampling import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
TEXT = ROOT / "data" / "alice.txt"


def perplexity(llm: LLM, ids: list[int]) -> float:
    """exp of the mean negative log-probability of ids[1:], scored in one request."""
    (output,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0))
    if output.outputs[0].error:
        raise ValueError(f"the text cannot be scored: {output.outputs[0].error}")
    return math.exp(-statistics.fmean(score.logprob for score in output.prompt_logprobs[1:]))


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
            raise ValueError(f"--text {file} has {len(ids)} tokens: at least 2 are needed, the first is not scored")
        results[name] = {"perplexity": perplexity(llm, ids), "tokens": len(ids), "weight_bytes": llm.model.weight_bytes}
    return results


def quality_table(results: dict) -> str:
    base = results["dense"]["perplexity"]
    return table(
        [{"weights": n} | row | {"rise": f"{row['perplexity'] / base - 1:+.2%}"} for n, row in results.items()]
    )


def start(args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds from the command to its first token and to its end, in turn with what importing torch alone takes."""
    prompt, seconds = "Once upon a time", {"first_token_s": [], "end_s": [], "import_torch_s": []}
    threads = ["--threads", str(args.threads)] if args.threads else []
    command = [sys.executable, str(ROOT / "generate.py"), *args.forwarded, *threads]
    command += ["--prompt", prompt, "--max-tokens", "4"]
    for _ in range(args.repeat + 1):
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            n_bytes = len(child.stdout.read(len(prompt) + 1))
            seconds["first_token_s"].append(time.perf_counter() - began)
            child.stdout.read()
        seconds["end_s"].append(time.perf_counter() - began)
        if child.returncode or n_bytes <= len(prompt):
            raise ValueError(f"no token came: run {shlex.join(command)} to see why")
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        seconds["import_torch_s"].append(time.perf_counter() - began)
    return {name: [round(value, 3) for value in times[1:]] for name, times in seconds.items()}  # the first fills caches


def profile(llm: LLM, batch: int, steps: int) -> dict[str, dict]:
    """{"step": ms of its parts, "kernels": those of native kernels over quantised weights}, medians over the steps."""
    spent, samples, last, engine = defaultdict(float), defaultdict(list), {}, llm.engine

    def clocked(part: str, inner):
        def outer(*args, **kwargs):
            start, last[part] = time.perf_counter(), args
            try:
                return inner(*args, **kwargs)
            finally:
                spent[part] += time.perf_counter() - start

        return outer

    requests = [llm.add([100 + i] * 16, answer_of(steps + 2)) for i in range(batch)]
    with ExitStack() as clocks:
        for owner, name, part in (
            (engine.scheduler, "schedule", "schedule"),
            (engine_module, "lay_out", "lay out the run"),
            (engine.runner, "run", "model"),
            (engine_module, "sample", "sample"),
            (engine, "accept", "accept (text, stops)"),
        ):
            clocks.enter_context(patch.object(owner, name, clocked(part, getattr(owner, name))))
        while any(len(request.answers[0].token_ids) < 2 for request in requests):
            engine.step()
        while engine.has_work:
            spent.clear()
            clocked("whole step", engine.step)()
            for part, seconds in spent.items():
                samples[part].append(seconds)
    parts = {part: statistics.median(values) * 1e3 for part, values in samples.items()}
    result = {"step": parts | {"the rest": 2 * parts["whole step"] - sum(parts.values())}}
    if kernels.backend() == "native" and llm.options.quant and llm.model.dtype == torch.float32:
        result["kernels"] = profile_kernels(llm, *last["model"])
    return result


@torch.inference_mode()
def profile_kernels(llm: LLM, batch, repeats: int = 20) -> dict[str, tuple[float, float]]:
    """{operation: (ms over all layers, GB/s of weights)} of a step; native kernels and quantised weights only."""
    with kernels.record() as tape:
        ModelRunner(llm.model, llm.kv).run(batch)
    kinds, times = defaultdict(list), defaultdict(list)
    for words in tape.words:
        (number,) = struct.unpack_from("q", words)
        kinds[Operation.declared[number].name.lower()].append(words)
    for _ in range(repeats):
        for kind, words in kinds.items():
            tape.run = b"".join(words)
            start = time.perf_counter()
            tape.replay()
            times[kind].append(time.perf_counter() - start)
    medians = {kind: statistics.median(values) for kind, values in times.items()}
    read = {"linear": llm.model.step_bytes / 1e9}
    return {kind: (seconds * 1e3, read.get(kind, 0) / seconds) for kind, seconds in medians.items()}


def profile_table(result: dict) -> str:
    tables = []
    for batch, parts in result.items():
        rows = [(name, ms, None) for name, ms in sorted(parts["step"].items(), key=lambda item: -item[1])]
        rows += [(f"kernel: {name}", ms, rate or None) for name, (ms, rate) in parts.get("kernels", {}).items()]
        tables.append(table([{f"{batch} sequences": name, "ms": ms, "GB/s": rate} for name, ms, rate in rows]))
    return "\n\n".join(tables)
