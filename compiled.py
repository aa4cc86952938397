"""Runners: the model as it is, compiled, captured.

A small model's decode step is a few milliseconds of arithmetic under hundreds of operations, and each pays for Python,
dispatch and launch before it computes anything.

1. Compile one layer, where layers consist of torch operations (dense weights), and run it for all: they differ in their
   weights only, which are inputs of the graph. Two graphs (one row and more) serve every batch, prompt and context.
2. Capture the decode step, where layers are native kernels: a CUDA graph, or a tape of C++ calls (native/tape.py). A
   recording has fixed sizes and addresses: one for each bucket of batch sizes, fed through static buffers:

       batch of 5 -> bucket 8:  rows 5, 6, 7 have slot 0, context length 1, block table 0: they write to block 0

Sources: gpt-fast, torch's recipe for regional compilation, vLLM and TensorRT-LLM for graphs per bucket. Left out:
compiling the prefill for fixed lengths, whole-model graphs.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import FunctionType

import torch

import kernels
from formats.command_line import warn
from model import Batch, Transformer, padding_batch

GPU_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class ModelRunner:
    """Runs a model over batches of one pool, its layers as they are.

    states: [R, hidden], what the logits of the last run were made of (a draft head guesses from them)."""

    graphs_compiled = steps_captured = 0
    seconds = 0.0  # spent compiling and capturing

    def __init__(self, model: Transformer, kv, run_layer: Callable = torch.nn.Module.__call__):
        self.model, self.kv, self.run_layer = model, kv, run_layer
        self.states: torch.Tensor | None = None

    def run(self, batch: Batch) -> torch.Tensor:
        """float32 logits [R, vocab] of the wanted rows."""
        self.states = self.model.hidden(batch, self.kv, self.run_layer)
        return self.model.logits(self.states)


class CompiledRunner(ModelRunner):
    """Runs layers compiled, counting and timing the graphs. backend: "inductor", or "eager" to count them only.

    Where it cannot (on a CPU it needs a C++ compiler), a line says so and the graph runs as it is."""

    def __init__(self, model: Transformer, kv, backend: str = "inductor", quiet: bool = False):
        super().__init__(model, kv, self.compiled_layer)
        self.compile_graph = torch._dynamo.lookup_backend(backend)
        self.quiet = quiet
        # torch.compile keeps its graphs with the code object and allows it eight: each model gets its own copy of it.
        source = type(model.layers[0]).forward
        layer = FunctionType(source.__code__.replace(co_name=f"layer_{id(self)}"), source.__globals__)
        self.layer = torch.compile(layer, fullgraph=True, backend=self.compile)
        self.marked = set()  # kinds of step that have their graph; marking costs more than the call, so it is done once

    def compiled_layer(self, layer: torch.nn.Module, x: torch.Tensor, *inputs) -> torch.Tensor:
        kind = (x.shape[0] == 1, layer.window, inputs[1].shape[1])  # the last: how many components rotate
        if kind not in self.marked:
            self.marked.add(kind)
            mark_sizes(x, *inputs)
        return self.layer(layer, x, *inputs)

    def compile(self, graph: torch.fx.GraphModule, example_inputs: list) -> Callable:
        self.graphs_compiled += 1
        if not self.quiet:
            warn(f"compiling decoder layer, graph {self.graphs_compiled} ...", end="")
        start = time.perf_counter()
        try:
            compiled = self.compile_graph(graph, example_inputs)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            cause = str(error).strip().partition("\n")[0]
            warn(f"\ncompile: {cause}\ncompile: running the layer uncompiled instead")
            return graph.forward
        self.seconds += time.perf_counter() - start
        if not self.quiet:
            warn(f" {time.perf_counter() - start:.1f} s")
        return compiled


def mark_sizes(x, positions, cos_sin, k_cache, v_cache, slot_mapping, block_tables, query_start, context_lens) -> None:
    """Tell torch.compile which sizes are symbols: T, unless it is one, which is always a constant; and batch sizes."""
    sizes = {block_tables: (0, 1), query_start: (0,), context_lens: (0,)}
    if x.shape[0] > 1:
        sizes |= {x: (0,), positions: (0,), slot_mapping: (0,)}
    for tensor, dims in sizes.items():
        for dim in dims:
            torch._dynamo.mark_dynamic(tensor, dim)


class CapturedRunner(ModelRunner):
    """Replays captured decode steps (every sequence computes one token) for batches of any size up to the last bucket.

    inner: runs what is captured, and batches without a bucket. capture(run) calls run() once or more and returns its
    output and what computes that output anew in its place; whatever calls `run` again can stand in for it."""

    def __init__(self, inner: ModelRunner, buckets: Sequence[int], max_blocks: int, capture: Callable):
        super().__init__(inner.model, inner.kv)
        self.inner, self.capture, self.device = inner, capture, inner.model.norm.weight.device
        self.buckets, self.max_blocks = sorted(buckets), max_blocks
        self.recorded: dict[int, tuple[Batch, torch.Tensor, torch.Tensor, Callable]] = {}

    @property
    def graphs_compiled(self) -> int:
        return self.inner.graphs_compiled

    @property
    def steps_captured(self) -> int:
        return len(self.recorded)

    @property
    def seconds(self) -> float:
        return self.inner.seconds

    def run(self, batch: Batch) -> torch.Tensor:
        """As ModelRunner.run; replayed logits and `states` are overwritten by the next replay."""
        rows, logit_rows = len(batch.tokens), None
        if rows > self.buckets[-1]:
            logits = self.inner.run(batch)
            self.states = self.inner.states
            return logits
        if not batch.one_each:  # a short prompt, or guesses to check: see one_token_each
            logit_rows = batch.logit_rows
            batch = one_token_each(batch)
        bucket = self.buckets[bisect_left(self.buckets, rows)]
        static, logits, states, replay = self.recorded.get(bucket) or self.record(bucket)
        if rows < bucket:
            static.slot_mapping[rows:] = 0
            static.context_lens[rows:] = 1
            static.block_tables[rows:, :1] = 0
        for name in ("tokens", "positions", "slot_mapping", "context_lens", "block_tables"):
            source, target = getattr(batch, name), getattr(static, name)
            if self.device.type == "cpu":  # numpy's assignment costs a tenth of three calls through torch's dispatch
                source, target = source.numpy(), target.numpy()
            if source.ndim == 2:
                target = target[:, : source.shape[1]]
            target[:rows] = source[:rows]
        replay()
        chosen = slice(rows) if logit_rows is None or len(logit_rows) == rows else logit_rows
        self.states = states[chosen]
        return logits[chosen]

    def record(self, bucket: int) -> tuple[Batch, torch.Tensor, torch.Tensor, Callable]:
        start = time.perf_counter()
        static = padding_batch(bucket, self.device, self.max_blocks)
        states = torch.empty(bucket, self.model.config.hidden_size, dtype=self.model.dtype, device=self.device)

        def run() -> torch.Tensor:
            logits = self.inner.run(static)
            states.copy_(self.inner.states)
            return logits

        logits, replay = self.capture(run)
        self.recorded[bucket] = static, logits, states, replay
        self.inner.seconds += time.perf_counter() - start
        return self.recorded[bucket]


def one_token_each(batch: Batch) -> Batch:
    """The same rows as sequences of one token each, which share their pages: the same computation, for every layer
    writes the keys of all rows before the first row looks at any."""
    rows, starts = len(batch.tokens), batch.query_start.tolist()
    owner = [s for s, (first, end) in enumerate(pairwise(starts)) for _ in range(first, end)]  # sequence of each row
    every = torch.arange(rows + 1, device=batch.tokens.device)
    return Batch(
        tokens=batch.tokens,
        positions=batch.positions,
        slot_mapping=batch.slot_mapping,
        block_tables=batch.block_tables[owner],
        query_start=every.int(),
        context_lens=(batch.positions + 1).int(),
        logit_rows=every[:-1],
        one_each=True,
    )


def tape_capture(run: Callable) -> tuple[torch.Tensor, Callable]:
    """Record the native kernels that `run` calls on the CPU."""
    with kernels.record() as tape:
        output = run()
    return output, tape.replay


def cuda_capture(run: Callable) -> tuple[torch.Tensor, Callable]:
    """Warm up on a side stream, as capture demands, then record `run` as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    return output, graph.replay
