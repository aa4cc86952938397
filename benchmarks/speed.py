"""What fewer bytes, fused kernels, compiled steps and overlap buy: engines that differ in how a step is computed.

A step of a model is bytes read, operations done and calls made, and each of these mechanisms saves one of the three.
So the one flag is flipped, what it saves is counted, and the clock stands beside it (lab.py):

    quantisation   float32 | bfloat16 | int8 | int4             bytes of weights a step reads, and perplexity
    gguf           the formats of blocks in a file              bits a weight, scales included
    compile        calls | one tape, or one compiled layer      calls that Python makes in a step
    kernels        torch operations | C++ kernels               operations, and memory they write results to
    overlap        plan, then run | plan while running          steps planned while the one before ran
    mmap           the file read whole | mapped                 memory at the peak of a start

Sources: beside each claim in papers.json. Left out: other forms of quantisation (`bench.py perplexity`).
"""

from __future__ import annotations

import math
import multiprocessing
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from benchmarks import quality as bench_quality
from benchmarks.lab import Lab, ObservedRunner, Result, Run, decode, megabytes, middle, prefill_rate, ratio, tokens_of
from benchmarks.roofline import decode_floor
from checkpoint import open_checkpoint
from formats import gguf
from generate import LLM
from model import Transformer
from overlap import OverlapEngine
from request import Delta

BITS = {  # the sides of `quantisation`
    "float32": {"quant": None, "dtype": "float32", "compile": False},
    "bfloat16": {"quant": None, "dtype": "bfloat16", "compile": False},
    "int8": {"quant": "int8"},
    "int4": {"quant": "int4"},
}


def quantisation(lab: Lab) -> Result:
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

    sides = lab.alternate(side, list(BITS))
    dense, rise = sides["float32"], {}
    for name in ("int8", "int4"):
        rise[name] = sides[name]["counted"]["perplexity"] / dense["counted"]["perplexity"] - 1
    rates = " -> ".join(f"{middle(side, 'tok/s'):.1f} ({name})" for name, side in sides.items())
    fewer = [dense["counted"]["MB a step"] / sides[name]["counted"]["MB a step"] for name in ("int8", "int4")]
    return (
        sides,
        f"{rates} tok/s: int8 {ratio(sides['int8'], dense, 'tok/s')}, int4 {ratio(sides['int4'], dense, 'tok/s')} the "
        f"speed of float32; perplexity {rise['int8']:+.2%} and {rise['int4']:+.2%}",
        f"bytes read a step: int8 {fewer[0]:.2f}x, int4 {fewer[1]:.2f}x fewer",
    )


def file_formats(lab: Lab) -> Result:
    """Bits of a weight in each block format of a GGUF, scales included, and on average in the file at hand."""
    kinds = "Q8_0 Q6_K Q5_K Q4_K Q3_K Q2_K Q4_0 Q4_1 Q5_0 Q5_1".split()
    bits = {kind: 8 * gguf.KINDS[kind].bytes / gguf.KINDS[kind].weights for kind in kinds}
    runs = {kind: Run({"bits a weight": bits[kind], "codes": int(kind[1])}) for kind in kinds}
    file, average = open_checkpoint(str(lab.flags.get("model", "smollm2"))).gguf, ""
    if file is not None:
        weights = [info for info in file.tensors.values() if len(info.shape) > 1]
        mean = 8 * sum(info.nbytes for info in weights) / sum(math.prod(info.shape) for info in weights)
        runs["this file"] = Run({"bits a weight": round(mean, 3)})
        average = f"; the file at hand has {mean:.2f} on average"
    shown = " / ".join(f"{bits[kind]:.4g}" for kind in kinds[:6])
    measured = f"blocks of {shown} bits for {', '.join(kinds[:6])}{average}"
    return lab.alternate(runs.get, list(runs)), measured, "codes without their scales: 8 / 6 / 5 / 4 / 3 / 2 bits"


def start_of(model: str, quant: str | None, read: bool) -> dict[str, float]:
    """In a process of its own: seconds to open a checkpoint and to a model, and bytes that its start took at the peak.

    read: the file is first copied into private memory, as an engine does that does not map it.
    """
    torch.set_num_threads(1)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    ckpt = open_checkpoint(model)
    if read and ckpt.gguf is not None:
        data, table = torch.from_numpy(np.fromfile(ckpt.path, np.uint8)), ckpt.gguf.tensors
        ckpt.gguf.raw = lambda name: data[table[name].offset : table[name].offset + table[name].nbytes]
    elif read:
        ckpt.tensor = {name: ckpt.tensor(name).clone() for name in ckpt.names()}.__getitem__
    opened = time.perf_counter() - began
    transformer = Transformer(ckpt, quant, torch.float32, max_model_len=512)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # kB
    return {
        "open s": opened,
        "ready s": time.perf_counter() - began,
        "peak": peak * 1024,
        "model": transformer.weight_bytes,
    }


def mapped_weights(lab: Lab) -> Result:
    """The same model started from a file that is mapped, and from one that is read whole."""
    model, quant, sizes = str(lab.flags.get("model", "smollm2")), lab.flags.get("quant"), {}

    def side(read: bool) -> Run:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            figures = pool.submit(start_of, model, quant, read).result()
        sizes["model"] = figures["model"]
        clock = {key: figures[key] for key in ("open s", "ready s")}
        return Run({"copies of the file": int(read)}, clock | {"MB at the peak": megabytes(figures["peak"])})

    sides = lab.alternate(side, {"whole": True, "mapped": False})
    a, b = sides["whole"], sides["mapped"]
    return (
        sides,
        f"the file is open {ratio(a, b, 'open s')} and the model ready {ratio(a, b, 'ready s')} faster; "
        f"{middle(a, 'MB at the peak'):.0f} -> {middle(b, 'MB at the peak'):.0f} MB at the peak",
        f"no copy: a peak of {sizes['model'] / 1e6:.0f} MB, the model itself",
    )


def watch_step(llm: LLM, watch: AbstractContextManager) -> None:
    """Let one sequence decode, and the model compute one of its steps inside `watch`."""
    decode(llm, 1, 1)  # whatever has to be recorded or compiled is, before
    contexts = iter([nullcontext(), watch])  # the first step is the prompt
    runner = llm.engine.runner
    llm.engine.runner = ObservedRunner(runner, lambda: next(contexts))
    try:
        decode(llm, 1, 1)
    finally:
        llm.engine.runner = runner


class PythonCalls:
    """Counts the functions, Python's and C's, that Python calls."""

    count = 0

    def __enter__(self):
        sys.setprofile(self._profile)

    def __exit__(self, *error):
        sys.setprofile(None)

    def _profile(self, frame, event: str, arg) -> None:
        self.count += event in ("call", "c_call")


def compiled(lab: Lab) -> Result:
    """Steps as calls from Python, and as one replayed tape (quantised) or with one compiled layer (dense)."""
    quant = lab.flags.get("quant") or "int4"
    kinds = {quant: {"quant": quant}} | ({"float32": {"quant": None, "dtype": "float32"}} if lab.sizes.compile else {})
    engines, calls = {}, {}
    for kind, flags in kinds.items():
        for name, on in ((f"{kind}, calls", False), (f"{kind}, compiled", True)):
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

    sides = lab.alternate(side, list(engines))
    measured, floors = [], []
    for kind in kinds:
        off, on = sides[f"{kind}, calls"], sides[f"{kind}, compiled"]
        llm = engines[f"{kind}, compiled"]
        measured.append(
            f"{kind} {middle(off, 'tok/s'):.1f} -> {middle(on, 'tok/s'):.1f} tok/s, {ratio(on, off, 'tok/s')}, with "
            f"{on['counted']['Python calls a step']:,} calls a step instead of "
            f"{off['counted']['Python calls a step']:,} (ready in {llm.runner.seconds:.1f} s)"
        )
        floor = decode_floor(lab.bandwidth, llm.model.step_bytes, 0)
        floors.append(f"{kind} {floor:.0f} tok/s, {floor / middle(off, 'tok/s'):.2f}x")
    return sides, "; ".join(measured), f"nothing left but reading the weights: {', '.join(floors)}"


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
        inputs = {t.untyped_storage().data_ptr() for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)}
        results = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor)]
        self.operations += 1
        self.nbytes += sum(t.nbytes for t in results if t.untyped_storage().data_ptr() not in inputs)
        return out


def fused_kernels(lab: Lab) -> Result:
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

    sides = lab.alternate(side, list(engines))
    slow, fast = sides["reference"], sides["native"]
    a, b = slow["counted"], fast["counted"]
    moved = [2 * side["MB of results a step"] + side["MB of weights a step"] for side in (a, b)]
    floor = decode_floor(lab.bandwidth, engines["native"].model.step_bytes, 0)
    return (
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


class Stopwatch:
    """Sums up the seconds inside it."""

    seconds = 0.0

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *error) -> None:
        self.seconds += time.perf_counter() - self.began


def overlap(lab: Lab) -> Result:
    """Decoding with the next step planned between two steps, or during the one before."""
    llm, plain = lab.llm, lab.llm.engine
    ahead = Ahead(llm.runner, llm.scheduler, llm.tokenizer, plain.eos_token_ids)

    def side(case: tuple[int, bool]) -> Run:
        batch, on = case
        scheduler, inside, total = lab.scheduler(), Stopwatch(), Stopwatch()
        llm.engine = ahead if on else plain
        llm.engine.scheduler, llm.engine.runner = scheduler, ObservedRunner(llm.runner, lambda: inside)
        ahead.ahead = 0
        try:
            with total:
                rate, requests = decode(llm, batch, lab.sizes.decoded)
        finally:
            llm.engine.runner, llm.engine = llm.runner, plain
        clock = {"tok/s": rate, "model %": inside.seconds / total.seconds * 100}
        return Run(scheduler.work | {"planned ahead": ahead.ahead}, clock, tokens_of(requests))

    batches = lab.sizes.batches[:2]
    cases = {f"{n} at a time, {name}": (n, on) for n in batches for name, on in (("off", False), ("on", True))}
    sides = lab.alternate(side, cases)
    measured, floors = [], []
    for n in batches:
        off, on = sides[f"{n} at a time, off"], sides[f"{n} at a time, on"]
        measured.append(f"{n} at a time {ratio(on, off, 'tok/s')}")
        floors.append(f"{n} at a time {100 / middle(off, 'model %'):.2f}x")
    planned = on["counted"]["planned ahead"] / on["counted"]["steps"]
    return (
        sides,
        f"{' and '.join(measured)} the speed, with {planned:.0%} of the steps planned ahead",
        f"everything but the model hidden behind it: {', '.join(floors)}",
    )


EXPERIMENTS = {
    "quantisation": quantisation,
    "gguf": file_formats,
    "compile": compiled,
    "kernels": fused_kernels,
    "overlap": overlap,
    "mmap": mapped_weights,
}
