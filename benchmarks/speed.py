"""What fewer bytes, fused kernels, compiled steps and overlap buy: engines that differ in how a step is computed.

A step of a model is bytes read, operations done and calls made, and each of these mechanisms saves one of the three.
So one flag is flipped, what it saves is counted, and the clock stands beside it (lab.py):

    quantisation   float32 | bfloat16 | int8 | int4 ...         bytes of weights a step reads, and perplexity
    compile        calls | one tape, or one compiled layer      calls that Python makes in a step
    kernels        torch operations | C++ kernels               calls again: operations that are fused are not made
    overlap        plan, then run | plan while running          steps planned while the one before ran
    load           (a picture only) `bench.py serve --rates`    what users wait for

Sources: beside each claim in papers.json. Left out: activations in 8 bits (`bench.py perplexity`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks import quality
from benchmarks.lab import Lab, Result, Run, decode, middle, prefill_rate, ratio, tokens_of
from benchmarks.peers import figures_of
from benchmarks.roofline import decode_floor, matrix_rate, read_bandwidth
from benchmarks.size import count_weights
from checkpoint import open_checkpoint
from generate import LLM
from kv_paged import block_bytes
from overlap import OverlapEngine
from request import Delta

BENCH = Path(__file__).resolve().parent.parent / "bench.py"
PROMPT = 256  # tokens


def quantisation(lab: Lab) -> Result:
    """The same checkpoint with weights of 32, 16, 8 and 4 bits. Its dots: operations a byte, operations a second."""
    engines = {}
    for name in lab.sizes.configurations:
        dense = {"quant": None, "dtype": name, "compile": False}
        engines[name] = lab.open(**(dense if "float" in name else {"quant": name}))
    text = quality.TEXT.read_text(encoding="utf-8")
    context = 16 + lab.sizes.decoded // 2  # tokens that a sequence has on average
    weighed = {name: weigh(llm, context) for name, llm in engines.items()}
    series = {"prompt": PROMPT, "ceilings": ceilings(), "configurations": weighed}

    def side(name: str) -> Run:
        llm, row = lab.use(engines[name]), weighed[name]
        if "perplexity" not in row:  # nothing in it is left to chance
            ids = llm.tokenizer.encode(text)[: min(lab.sizes.text, llm.max_model_len - 1)]
            row["perplexity"] = round(quality.perplexity(llm, ids), 3)
        clock = {f"tok/s x{n}": decode(llm, n, lab.sizes.decoded)[0] for n in lab.sizes.batches}
        counted = {"MB a step": float(f"{llm.model.step_bytes / 1e6:.4g}"), "perplexity": row["perplexity"]}
        return Run(counted, clock | {"prompt tok/s": prefill_rate(llm, PROMPT, lab.seed)})

    sides = lab.alternate(side, list(engines))
    for name, row in weighed.items():
        row["prefill_tok_s"] = middle(sides[name], "prompt tok/s")
        row["decode_tok_s"] = {str(n): middle(sides[name], f"tok/s x{n}") for n in lab.sizes.batches}
    dense, int8, int4 = (sides[name] for name in ("float32", "int8", "int4"))
    rates = " -> ".join(f"{middle(sides[name], 'tok/s x1'):.1f} ({name})" for name in sides)
    rise = [x["counted"]["perplexity"] / dense["counted"]["perplexity"] - 1 for x in (int8, int4)]
    fewer = [dense["counted"]["MB a step"] / x["counted"]["MB a step"] for x in (int8, int4)]
    return Result(
        f"{rates} tok/s: int8 {ratio(int8, dense, 'tok/s x1')}, int4 {ratio(int4, dense, 'tok/s x1')} the speed of "
        f"float32; perplexity {rise[0]:+.2%} and {rise[1]:+.2%}",
        f"bytes read a step: int8 {fewer[0]:.2f}x, int4 {fewer[1]:.2f}x fewer",
        sides,
        series,
    )


def ceilings() -> dict[str, float]:
    """What no step exceeds here: gigabytes and 1e9 operations a second."""
    rates = read_bandwidth(), matrix_rate(torch.float32), matrix_rate(torch.int8)
    names = "read GB/s", "float32 GFLOP/s", "int8 GOP/s"
    return {name: round(rate / 1e9, 2) for name, rate in zip(names, rates, strict=True)}


def weigh(llm: LLM, context: int) -> dict[str, float]:
    """Bits a weight, and what a dot of the roofline is made of: bytes and weights of a step."""
    config, options = llm.config, llm.options
    weights = count_weights(config, open_checkpoint(options.model), options.quant, llm.model.dtype)
    kv_bytes = block_bytes(config.num_layers, 1, config.num_kv_heads, config.head_dim, llm.kv.data.element_size())
    return {
        "bits": round(8 * weights.nbytes / weights.parameters, 3),
        "step_bytes": weights.step_bytes,
        "kv_bytes": kv_bytes * context,  # of a sequence
        "layer_parameters": weights.layer_parameters,
        "head_parameters": config.vocab_size * config.hidden_size,
    }


class CallCounter:
    """A ModelRunner: counts the functions, Python's and C's, that Python calls while another runner computes a step."""

    def __init__(self, runner):
        self.runner, self.calls = runner, 0

    def run(self, batch):
        self.calls = 0
        sys.setprofile(self._count)
        try:
            return self.runner.run(batch)
        finally:
            sys.setprofile(None)

    def _count(self, frame, event: str, arg) -> None:
        self.calls += event in ("call", "c_call")

    def __getattr__(self, name: str):
        return getattr(self.runner, name)


def calls_of_a_step(llm: LLM) -> int:
    """Calls that Python makes while the model decodes one token of one sequence."""
    decode(llm, 1, 1)  # whatever has to be recorded or compiled is, before
    with patch.object(llm.engine, "runner", CallCounter(llm.engine.runner)) as counter:
        decode(llm, 1, 1)
    return counter.calls  # of the last step; the one before was the prompt's


def calls_and_rates(lab: Lab, engines: dict[str, LLM], tokens: int) -> dict[str, dict]:
    """The sides of a table: each engine decodes one sequence."""
    calls = {name: calls_of_a_step(lab.use(llm)) for name, llm in engines.items()}

    def side(name: str) -> Run:
        llm = lab.use(engines[name])
        rate, requests = decode(llm, 1, tokens)
        counted = {"Python calls a step": calls[name]}
        counted |= {key.replace("_", " "): llm.stats()[key] for key in ("graphs_compiled", "steps_captured")}
        return Run(counted, {"tok/s": rate}, tokens_of(requests) if llm.options.quant else [])  # dense ones round

    return lab.alternate(side, list(engines))


def faster(off: dict, on: dict) -> str:
    fewer = " calls a step instead of ".join(f"{side['counted']['Python calls a step']:,}" for side in (on, off))
    return f"{middle(off, 'tok/s'):.1f} -> {middle(on, 'tok/s'):.1f} tok/s, {ratio(on, off, 'tok/s')}, with {fewer}"


def compiled(lab: Lab) -> Result:
    """Steps as calls from Python, and as one replayed tape (quantised) or with one compiled layer (dense)."""
    quant = lab.flags.get("quant") or "int4"
    kinds = {quant: {"quant": quant}} | ({"float32": {"quant": None, "dtype": "float32"}} if lab.sizes.compile else {})
    switch = {"calls": False, "compiled": True}
    engines = {f"{kind}, {name}": lab.open(compile=on, **kinds[kind]) for kind in kinds for name, on in switch.items()}
    sides, measured, floors = calls_and_rates(lab, engines, lab.sizes.decoded), [], []
    for kind in kinds:
        off, on, llm = sides[f"{kind}, calls"], sides[f"{kind}, compiled"], engines[f"{kind}, compiled"]
        measured.append(f"{kind} {faster(off, on)} (ready in {llm.runner.seconds:.1f} s)")
        floor = decode_floor(lab.bandwidth, llm.model.step_bytes, 0)
        floors.append(f"{kind} {floor:.0f} tok/s, {floor / middle(off, 'tok/s'):.2f}x")
    return Result("; ".join(measured), f"nothing left but reading the weights: {', '.join(floors)}", sides)


def fused_kernels(lab: Lab) -> Result:
    """Quantised layers in torch operations that write the dense weight out, and in kernels that never do."""
    flags = {"quant": lab.flags.get("quant") or "int4", "compile": False}
    flags["threads"] = 1  # those of torch would wait for each other 9,000 times a step
    engines = {name: lab.open(kernels=name, **flags) for name in ("reference", "native")}
    sides = calls_and_rates(lab, engines, max(2, lab.sizes.decoded // 12))
    floor = decode_floor(lab.bandwidth, engines["native"].model.step_bytes, 0)
    rate = f"{floor:.0f} tok/s at {lab.bandwidth / 1e9:.0f} GB/s"
    return Result(faster(*sides.values()), f"nothing left but reading the weights: {rate}", sides)


class Ahead(OverlapEngine):
    """Counts the steps that were planned while the one before ran."""

    ahead = 0

    def advance(self, deltas: list[Delta]) -> None:
        self.ahead += self.flight is not None
        super().advance(deltas)


def overlap(lab: Lab) -> Result:
    """Decoding with the next step planned between two steps, or during the one before."""
    llm, batches = lab.llm, lab.sizes.batches[:2]

    def side(case: tuple[int, bool]) -> Run:
        ahead = Ahead(llm.runner, llm.scheduler, llm.tokenizer, llm.engine.eos_token_ids)
        with patch.object(llm, "engine", ahead if case[1] else llm.engine):
            scheduler = lab.scheduler()
            rate, requests = decode(llm, case[0], lab.sizes.decoded)
        return Run(scheduler.work | {"planned ahead": ahead.ahead}, {"tok/s": rate}, tokens_of(requests))

    cases = {f"{n} at a time, {name}": (n, on) for n in batches for name, on in (("off", False), ("on", True))}
    sides, measured, floors = lab.alternate(side, cases), [], []
    for n in batches:
        off, on = sides[f"{n} at a time, off"], sides[f"{n} at a time, on"]
        parts = quality.profile(llm, n, lab.sizes.decoded)["step"]
        measured.append(f"{n} at a time {ratio(on, off, 'tok/s')}")
        floors.append(f"{n} at a time {parts['whole step'] / parts['model']:.2f}x")
    planned = on["counted"]["planned ahead"] / on["counted"]["steps"]
    return Result(
        f"{' and '.join(measured)} the speed, with {planned:.0%} of the steps planned ahead",
        f"everything but the model hidden behind it: {', '.join(floors)}",
        sides,
    )


def load(lab: Lab) -> Result:
    """Latency of a server under several rates of requests, in a process of its own."""
    words = ["--rates", *lab.sizes.rates, "--requests", lab.sizes.load_requests, "--gen", 32, "--num-blocks", 2000]
    words += ["--model", lab.flags["model"], "--threads", lab.flags["threads"], "--quant", "int4", "--compile"]
    figures = figures_of("bench.py serve", [sys.executable, str(BENCH), "serve", "--json", *map(str, words)])
    rates = [{key: row[key] for key in ("rate", "ttft_s", "tpot_s")} for row in figures["rates"]]
    first, last = ({q: f"{1e3 * row['ttft_s'][q]:,.0f}" for q in ("p50", "p95")} for row in (rates[0], rates[-1]))
    return Result(
        f"median TTFT {first['p50']} ms at {rates[0]['rate']:g} requests a second, {last['p50']} ms at "
        f"{rates[-1]['rate']:g}; 95 % come within {first['p95']} and {last['p95']} ms",
        series={"rates": rates},
    )


EXPERIMENTS = {
    "quantisation": quantisation,
    "compile": compiled,
    "kernels": fused_kernels,
    "overlap": overlap,
    "load": load,
}
