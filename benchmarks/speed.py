"""What fewer bytes, fused kernels, compiled steps and overlap buy: engines that differ in how a step is computed.

Problem. A step of a model is bytes read, operations done and calls made, and each of these mechanisms saves one of the
three. A figure in tokens per second does not say which, nor whether there was anything to save.

Idea. Flip the one flag, count what it saves, and put the clock beside it (benchmarks/lab.py):

    phases         a prompt | 1, 8, 32 sequences decoding       operations done with each byte of weights read
    quantisation   float32 | bfloat16 | int8 | int4             bytes of weights a step reads, and perplexity
    gguf           the formats of blocks in a file              bits a weight, scales included
    compile        calls | one tape, or one compiled layer      calls that Python makes in a step
    kernels        torch operations | C++ kernels               operations, and memory they write results to
    overlap        plan, then run | plan while running          steps planned while the one before ran

Where the switch is one of the model, every side has an engine of its own, all loaded before the first is measured.
Dense layers run uncompiled here except in `compile`, where compiling them is the switch.

Sources: the paper or report of each mechanism stands beside its claim. Left out: other forms of quantisation
(`bench.py perplexity`).
"""

from __future__ import annotations

import math
import sys
import time
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from benchmarks import quality as bench_quality
from benchmarks.lab import Claim, Found, Lab, Run, decode, megabytes, middle, prefill_rate, ratio, tokens_of
from benchmarks.roofline import decode_floor, matrix_rate, prefill_floor
from checkpoint import open_checkpoint
from formats import gguf
from generate import LLM
from overlap import OverlapEngine
from request import Delta

BITS = {  # the sides of `quantisation`
    "float32": {"quant": None, "dtype": "float32", "compile": False},
    "bfloat16": {"quant": None, "dtype": "bfloat16", "compile": False},
    "int8": {"quant": "int8"},
    "int4": {"quant": "int4"},
}


def multiplied(model: nn.Module) -> int:
    """Weights that take part in a product for every row: all layers, without the table or head."""
    layers = [part for layer in model.layers for part in layer.modules() if hasattr(part, "in_features")]
    return sum(part.in_features * part.out_features for part in layers)


def phases(lab: Lab) -> Found:
    """A prompt, and sequences that decode together: rows of the same products, of which one pass reads all weights."""
    llm, prompt = lab.llm, lab.sizes.unshared
    weights, read = multiplied(llm.model), llm.model.step_bytes

    def side(rows: int) -> Run:
        lab.scheduler(max_num_batched_tokens=llm.max_model_len)
        rate = prefill_rate(llm, prompt, lab.seed) if rows == prompt else decode(llm, rows, lab.sizes.decoded)[0]
        counted = {"tokens a step": rows, "MB a step": megabytes(read)}
        counted["operations a byte"] = round(2 * weights * rows / read, 1)
        return Run(counted, {"tok/s": rate, "GB/s": rate / rows * read / 1e9, "Gop/s": 2 * weights * rate / 1e9})

    sides = lab.alternate(
        {"prompt": lambda: side(prompt)} | {f"{n} decoding": lambda n=n: side(n) for n in lab.sizes.batches}
    )
    quantised = lab.flags.get("quant") is not None and lab.flags.get("activations", "int8") == "int8"
    rate = matrix_rate(torch.int8 if quantised else llm.model.dtype, llm.device)
    ceiling = prompt / prefill_floor(rate, weights, prompt)
    one = decode_floor(lab.bandwidth, read, 0)
    x, y = (middle(sides[name], "tok/s") for name in ("prompt", f"{min(lab.sizes.batches)} decoding"))
    return Found(
        sides,
        f"a prompt {x:,.0f} tok/s, {x / ceiling:.0%} of what the arithmetic allows and {x / one / prompt:.0%} of what "
        f"the bandwidth does; one sequence {y:,.0f} tok/s, {y / ceiling:.0%} and {y / one:.0%}",
        f"{rate / 1e9:,.0f} Gop/s in one large product: {ceiling:,.0f} tok/s of prompt; "
        f"{lab.bandwidth / 1e9:.0f} GB/s: {one:,.0f} tok/s of one sequence",
    )


def quantisation(lab: Lab) -> Found:
    """The same checkpoint with weights of 32, 16, 8 and 4 bits."""
    engines = {name: lab.open(**flags) for name, flags in BITS.items()}
    text = bench_quality.TEXT.read_text(encoding="utf-8")
    quality: dict[str, float] = {}

    def side(name: str) -> Run:
        llm = lab.use(engines[name])
        if name not in quality:  # nothing in it is left to chance
            ids = llm.tokenizer.encode(text)[: min(lab.sizes.text, llm.max_model_len - 1)]
            quality[name] = bench_quality.perplexity(llm, ids)
        rate = decode(llm, 1, lab.sizes.decoded)[0]
        read = llm.model.step_bytes
        counted = {"MB a step": megabytes(read), "perplexity": round(quality[name], 3)}
        return Run(counted, {"tok/s": rate, "prompt tok/s": prefill_rate(llm, lab.sizes.unshared, lab.seed)})

    sides = lab.alternate({name: lambda name=name: side(name) for name in BITS})
    dense, rise = sides["float32"], {}
    for name in ("int8", "int4"):
        rise[name] = sides[name]["counted"]["perplexity"] / dense["counted"]["perplexity"] - 1
    rates = " -> ".join(f"{middle(side, 'tok/s'):.1f} ({name})" for name, side in sides.items())
    fewer = [dense["counted"]["MB a step"] / sides[name]["counted"]["MB a step"] for name in ("int8", "int4")]
    return Found(
        sides,
        f"{rates} tok/s: int8 {ratio(sides['int8'], dense, 'tok/s')}, int4 {ratio(sides['int4'], dense, 'tok/s')} the "
        f"speed of float32; perplexity {rise['int8']:+.2%} and {rise['int4']:+.2%}",
        f"bytes read a step: int8 {fewer[0]:.2f}x, int4 {fewer[1]:.2f}x fewer",
    )


def file_formats(lab: Lab) -> Found:
    """Bits of a weight in each block format of a GGUF, scales included, and on average in the file at hand."""
    named = [kind for kind in ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1")]
    sides = {
        kind: lambda k=kind: Run({"bits a weight": 8 * gguf.KINDS[k].bytes / gguf.KINDS[k].weights, "codes": int(k[1])})
        for kind in named
    }
    file = open_checkpoint(str(lab.flags.get("model", "smollm2"))).gguf
    if file is not None:
        weights = [info for info in file.tensors.values() if len(info.shape) > 1]
        bits = 8 * sum(info.nbytes for info in weights) / sum(math.prod(info.shape) for info in weights)
        sides["this file"] = lambda: Run({"bits a weight": round(bits, 3)})
    sides = lab.alternate(sides)
    shown = [f"{sides[kind]['counted']['bits a weight']:.4g}" for kind in named[:6]]
    return Found(
        sides,
        f"blocks of {' / '.join(shown)} bits for {', '.join(named[:6])}"
        + (f"; the file at hand has {sides['this file']['counted']['bits a weight']:.2f} on average" if file else ""),
        "codes without their scales: 8 / 6 / 5 / 4 / 3 / 2 bits",
    )


def watch_step(llm: LLM, watch: AbstractContextManager) -> None:
    """Let one sequence decode, and the model compute one of its steps inside `watch`."""
    decode(llm, 1, 1)  # whatever has to be recorded or compiled is, before
    runner, steps = llm.engine.runner, 0
    inner = runner.run

    def run(batch):
        nonlocal steps
        steps += 1
        with watch if steps == 2 else nullcontext():  # the first one is the prompt
            return inner(batch)

    runner.run = run
    try:
        decode(llm, 1, 1)
    finally:
        runner.run = inner


class PythonCalls:
    """Counts the functions, Python's and C's, that Python calls."""

    count = 0

    def __enter__(self):
        sys.setprofile(self._profile)

    def __exit__(self, *error):
        sys.setprofile(None)

    def _profile(self, frame, event: str, arg) -> None:
        self.count += event in ("call", "c_call")


def compiled(lab: Lab) -> Found:
    """Steps as calls from Python, and as one replayed tape (quantised) or with one compiled layer (dense)."""
    quant = lab.flags.get("quant") or "int4"
    kinds = {quant: {"quant": quant}} | ({"float32": {"quant": None, "dtype": "float32"}} if lab.sizes.compile else {})
    engines, calls = {}, {}
    for kind, flags in kinds.items():
        for name, on in ((f"{kind}, calls", False), (f"{kind}, compiled", True)):
            lab.tick(f"loading {name}")
            engines[name] = lab.open(compile=on, **flags)
    for name, llm in engines.items():
        calls[name] = PythonCalls()
        watch_step(lab.use(llm), calls[name])

    def side(name: str) -> Run:
        llm = lab.use(engines[name])
        rate, requests = decode(llm, 1, lab.sizes.decoded)
        counted = {"Python calls a step": calls[name].count}
        counted |= {key.replace("_", " "): llm.stats()[key] for key in ("graphs_compiled", "steps_captured")}
        return Run(counted, {"tok/s": rate}, tokens_of(requests) if name.startswith(quant) else [])

    sides = lab.alternate({name: lambda name=name: side(name) for name in engines})
    found, floors = [], []
    for kind in kinds:
        off, on = sides[f"{kind}, calls"], sides[f"{kind}, compiled"]
        llm = engines[f"{kind}, compiled"]
        found.append(
            f"{kind} {middle(off, 'tok/s'):.1f} -> {middle(on, 'tok/s'):.1f} tok/s, {ratio(on, off, 'tok/s')}, with "
            f"{on['counted']['Python calls a step']:,} calls a step instead of "
            f"{off['counted']['Python calls a step']:,} (ready in {llm.runner.seconds:.1f} s)"
        )
        floor = decode_floor(lab.bandwidth, llm.model.step_bytes, 0)
        floors.append(f"{kind} {floor:.0f} tok/s, {floor / middle(off, 'tok/s'):.2f}x")
    return Found(sides, "; ".join(found), f"nothing left but reading the weights: {', '.join(floors)}")


class Results(TorchDispatchMode):
    """Counts the operations that torch is given and the bytes of new memory they return, inside the references too."""

    def __init__(self):
        super().__init__()
        self.operations = self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "vitrine" and kernels.backend() == "reference":
            with self:
                return getattr(kernels, func.overloadpacket.__name__)(*args, **kwargs)
        out = func(*args, **kwargs)
        given = {t.untyped_storage().data_ptr() for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)}
        results = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor)]
        self.operations += 1
        self.nbytes += sum(t.nbytes for t in results if t.untyped_storage().data_ptr() not in given)
        return out


def fused_kernels(lab: Lab) -> Found:
    """Quantised layers in torch operations that write the dense weight out, and in kernels that never do."""
    quant = lab.flags.get("quant") or "int4"
    engines = {
        name: lab.open(quant=quant, compile=False, kernels=name, threads=1) for name in ("reference", "native")
    }  # one thread each: those of torch would wait for each other 9,000 times a step
    work: dict[str, dict] = {}

    def side(name: str) -> Run:
        llm = lab.use(engines[name])
        if name not in work:
            watch_step(llm, results := Results())
            written = megabytes(results.nbytes)
            work[name] = {"operations a step": results.operations, "MB of results a step": written}
        counted = work[name] | {"MB of weights a step": megabytes(llm.model.step_bytes)}
        return Run(counted, {"tok/s": decode(llm, 1, max(2, lab.sizes.decoded // 12))[0]})

    sides = lab.alternate({name: lambda name=name: side(name) for name in engines})
    slow, fast = sides["reference"], sides["native"]
    a, b = slow["counted"], fast["counted"]
    moved = [2 * side["MB of results a step"] + side["MB of weights a step"] for side in (a, b)]
    floor = decode_floor(lab.bandwidth, engines["native"].model.step_bytes, 0)
    return Found(
        sides,
        f"{middle(slow, 'tok/s'):.2f} -> {middle(fast, 'tok/s'):.1f} tok/s, {ratio(fast, slow, 'tok/s')}, with "
        f"{b['operations a step']:,} operations a step instead of {a['operations a step']:,}, which write "
        f"{b['MB of results a step']:,} MB instead of {a['MB of results a step']:,}",
        f"weights read once, results written and read once: {moved[0] / moved[1]:.0f}x fewer bytes; "
        f"{floor:.0f} tok/s at {lab.bandwidth / 1e9:.0f} GB/s",
    )


class Ahead(OverlapEngine):
    """Counts the steps that were planned while the one before ran."""

    ahead = 0

    def advance(self, deltas: list[Delta]) -> None:
        self.ahead += self.flight is not None
        super().advance(deltas)


def overlap(lab: Lab) -> Found:
    """Decoding with the next step planned between two steps, or during the one before."""
    llm, engine, runner = lab.llm, lab.llm.engine, lab.llm.runner
    ahead = Ahead(runner, llm.scheduler, llm.tokenizer, engine.eos_token_ids)

    def side(batch: int, on: bool) -> Run:
        scheduler, inside = lab.scheduler(), 0.0
        llm.engine = ahead if on else engine
        llm.engine.scheduler = llm.scheduler
        ahead.ahead, run_model = 0, runner.run

        def timed(batch):
            nonlocal inside
            began = time.perf_counter()
            try:
                return run_model(batch)
            finally:
                inside += time.perf_counter() - began

        runner.run = timed
        try:
            began = time.perf_counter()
            rate, requests = decode(lab.llm, batch, lab.sizes.decoded)
            share = inside / (time.perf_counter() - began) * 100
        finally:
            runner.run, llm.engine = run_model, engine
        counted = scheduler.work | {"planned ahead": ahead.ahead}
        return Run(counted, {"tok/s": rate, "model %": share}, tokens_of(requests))

    batches, sides = lab.sizes.batches[:2], {}
    for n in batches:
        sides |= {f"{n} at a time, {name}": lambda n=n, on=on: side(n, on) for name, on in (("off", 0), ("on", 1))}
    sides = lab.alternate(sides)
    found, floors = [], []
    for n in batches:
        off, on = sides[f"{n} at a time, off"], sides[f"{n} at a time, on"]
        found.append(f"{n} at a time {ratio(on, off, 'tok/s')}")
        floors.append(f"{n} at a time {100 / middle(off, 'model %'):.2f}x")
    planned = on["counted"]["planned ahead"] / on["counted"]["steps"]
    return Found(
        sides,
        f"{' and '.join(found)} the speed, with {planned:.0%} of the steps planned ahead",
        f"everything but the model hidden behind it: {', '.join(floors)}",
    )


ROUNDING = "none: rounding differs"
CLAIMS = {
    "phases": Claim(
        phases,
        "prefill and decode told apart",
        "prefill is bound by arithmetic, decode by bytes",
        "DistServe (OSDI 2024), section 2; Sarathi-Serve (OSDI 2024), section 3",
        "13B to 70B models, A100",
        "a core does fewer operations for each byte it can read than a GPU, so here arithmetic binds from a few rows "
        "on, there from a hundred or more.",
        15,
        "none: the sides do different work",
    ),
    "quantisation": Claim(
        quantisation,
        "int8 and int4 weights",
        "104.9 -> 155.6 (int8) -> 196.8 tok/s (int4, group 32): 1.48x and 1.88x",
        "gpt-fast (2023)",
        "Llama-2-7B from bfloat16, one A100",
        "the first figure there is of 16-bit weights, here of 32-bit ones; the head stays at 8 bits, which weighs more "
        "in a small model; torch's product of one dense row does not reach the memory's bandwidth and the kernels "
        "nearly do, so the ratio can exceed that of the bytes.",
        60,
        ROUNDING,
    ),
    "gguf": Claim(
        file_formats,
        "GGUF and K-quants",
        "8.5 / 6.6 / 5.7 / 4.8 / 3.9 / 2.6 bits a weight for Q8_0, Q6_K, Q5_K_M, Q4_K_M, Q3_K_M, Q2_K",
        "llama.cpp (2023)",
        "whole files of LLaMA-7B",
        "the claim is of mixes: a file called Q4_K_M stores most tensors as Q4_K and some as Q6_K, so its average lies "
        "above that of its commonest block.",
        1,
        "none: nothing is answered",
    ),
    "compile": Claim(
        compiled,
        "compiled decode, captured steps",
        "25.5 -> 107 tok/s: 4.2x",
        "gpt-fast (2023)",
        "Llama-2-7B in bfloat16, one A100",
        "a GPU is far ahead of the Python that feeds it; here a dense layer takes longer to read than to call, so only "
        "the small steps of quantised weights leave calls worth saving.",
        90,
    ),
    "kernels": Claim(
        fused_kernels,
        "fused kernels",
        "norm, product, activation and dequantisation in one pass, results between them in registers; no one ratio",
        "TensorRT-LLM; gpt-fast (2023)",
        "GPUs",
        "the reference writes every dense weight to memory before it multiplies, which no engine would do: the ratio "
        "says what fusing dequantisation into the product is worth, not what fusing a norm is.",
        30,
        ROUNDING,
    ),
    "overlap": Claim(
        overlap,
        "overlap scheduling",
        "10 % and more when the step is short",
        "SGLang v0.4 (2024); NanoFlow (2024)",
        "Llama-3-8B and smaller, H100",
        "a GPU computes while the processor plans; here both are the same two cores, so planning in parallel takes "
        "time from the model, and the hand-over between threads is paid as well.",
        20,
    ),
}
