"""The composition: `LLM`, and the command line.

    from generate import LLM
    from sampling import SamplingParams
    llm = LLM(model="smollm2", quant="int4", compile=True)
    print(llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=32))[0].outputs[0].text)

    python generate.py --compile --quant int4 --prompt "The capital of France is"

`LLM` puts the files of this repository together and nothing else: a checkpoint becomes a model, free memory becomes a
pool of pages, and the engine's step loop runs until every request has its answer. The words are vLLM's.

    arguments ──► device, kernels ──► checkpoint ──► tokenizer, model ──► pages in the memory that is left ──┐
      ┌──────────────────────────────────────────────────────────────────────────────────────────────────────┘
      └─► scheduler ──► engine ──► layers compiled or steps captured ──► steps timed, if anyone guesses

Arguments of a wrong type or word are refused before a checkpoint is opened, a context before weights are read, a draft
model before anything is compiled.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterator

import torch

import kernels
from checkpoint import Checkpoint, open_checkpoint
from compiled import GPU_BUCKETS, DecodeGraphs, LayerCompiler, cuda_capture, tape_capture
from drafting.budget import Speculator, StepCost
from drafting.draft_model import DraftModel, make_proposer
from drafting.head import HeadProposer
from engine import Engine
from kv_paged import BlockPool, KVCache, block_bytes, blocks_for_budget, blocks_needed, describe_capacity, free_memory
from model import Transformer, padding_batch
from policies import POLICIES
from quantize import set_activations
from radix import PREFIX_CACHES
from request import Delta, Request, RequestOutput
from sampling import SamplerState, SamplingParams, sample
from scheduler import BATCHINGS, PREEMPTIONS, RESERVES, Scheduler
from speculative import Proposer
from tokenizer import Tokenizer

TYPICAL_CONTEXT = 256  # tokens, where the cost of a step is measured
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CHOICES = {  # what the arguments of LLM that are one of a few words may be
    "dtype": ["auto", *DTYPES],
    "kv_dtype": ["auto", *DTYPES],
    "prefix_cache": [*PREFIX_CACHES, "none"],
    "policy": POLICIES,
    "preemption": PREEMPTIONS,
    "batching": BATCHINGS,
    "reserve": RESERVES,
    "activations": ["int8", "float"],
    "verify": ["coupled", "rejection"],
}


def choose(name: str, value, allowed) -> None:
    """Refuse a value that is not one of `allowed`, naming both."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(map(str, allowed))}")


def check_types(given: dict) -> None:
    """Refuse arguments of another type than LLM's signature says: "4" is no block size, and neither is 1.5."""
    kinds = {"str": (str, os.PathLike), "int": int, "bool": bool, "None": type(None)}
    for name, parameter in inspect.signature(LLM).parameters.items():
        value, wanted = given[name], parameter.annotation.split(" | ")
        right = any(isinstance(value, kinds[kind]) for kind in wanted)
        if not right or (isinstance(value, bool) and "bool" not in wanted):
            raise ValueError(f"{name}={value!r}: must be {' or '.join(wanted)}, not {type(value).__name__}")


def check_arguments(given: dict) -> None:
    """Refuse what can be seen to be wrong without a device or a model; `given` are the arguments of LLM by name."""
    check_types(given)
    for name, allowed in CHOICES.items():
        choose(name, given[name], allowed)
    if given["reserve"] == "contiguous" and given["prefix_cache"] != "none":
        raise ValueError(
            f'reserve="contiguous" shares no blocks: prefix_cache must be "none", not {given["prefix_cache"]!r}'
        )
    guesses, speculate, draft_quant = given["num_speculative_tokens"], given["speculate"], given["draft_quant"]
    if guesses < 1:
        raise ValueError(f"num_speculative_tokens={guesses}: at least 1; speculate=None is off")
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if given[name] < 1:
            raise ValueError(f"{name}={given[name]}: must be at least 1")
    if draft_quant is not None and not (speculate or "").startswith("draft:"):
        raise ValueError(f"draft_quant={draft_quant!r} needs speculate='draft:<model>', not {speculate!r}")


class LLM:
    """A model ready to answer. Arguments:

    model           "smollm2", a Hugging Face folder, a .gguf file or a hub id
    quant           None, "int8", "int8-g32", "int4", "int4-g64" or "int4-g128"; activations "int8" or "float" beside it
    compile         compile one decoder layer for all (and capture decode steps on a GPU)
    dtype, device   "auto": float32 on a CPU, the checkpoint's own 16 bits on a GPU if there is one
    block_size      tokens per KV page; the pool has num_blocks of them, or as many as kv_memory bytes hold
    kv_dtype        "auto": that of the model; "float16" or "bfloat16" halve the bytes attention reads in float32 models
    max_model_len   the longest prompt plus answer; at most what the model was trained for
    policy          "fcfs", "priority" or "lpm"; preemption "recompute" or "swap"; batching "continuous" or "static"
    prefix_cache    "radix", "hash" or "none"
    speculate       None, "ngram", "head" (trained for the default model), "head:<file>", "draft:<model>" or
                    "self:<layers>"; at most num_speculative_tokens guesses at a time; verify "coupled" (the same tokens
                    as without) or "rejection" (the same distribution); draft_quant is the draft model's quant (None: as
                    the target)
    overlap         plan the next step while the model runs this one (overlap.py; pays where Python and model do not
                    share the processor)
    jump_forward    append what a structured answer can only go on with, instead of drawing it token by token
    kernels         "native" (C++ on a CPU, Triton on a GPU) or "reference"; like threads it is the whole process's: of
                    several LLMs the one made last decides
    """

    def __init__(
        self,
        model: str = "smollm2",
        quant: str | None = None,
        compile: bool = False,
        dtype: str = "auto",
        device: str = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_memory: int | None = None,
        kv_dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        policy: str = "fcfs",
        prefix_cache: str = "radix",
        preemption: str = "recompute",
        batching: str = "continuous",
        reserve: str = "paged",
        chunked: bool = True,
        activations: str = "int8",
        speculate: str | None = None,
        draft_quant: str | None = None,
        num_speculative_tokens: int = 5,
        verify: str = "coupled",
        jump_forward: bool = True,
        overlap: bool = False,
        kernels: str = "native",
        threads: int | None = None,
        seed: int = 0,
        trace: bool = False,
        quiet: bool = True,
    ):
        check_arguments(locals())
        self.quiet = quiet
        self.device = choose_device(device)
        set_backend(kernels, self.device, threads)
        self._load(model, quant, dtype, activations, max_model_len, threads)
        self.kv = self._allocate(block_size, num_blocks, kv_memory, kv_dtype, max_num_seqs)
        pool = BlockPool(self.kv.num_blocks, block_size)
        cache = None if prefix_cache == "none" else PREFIX_CACHES[prefix_cache](pool)
        limits = (max_num_seqs, max_num_batched_tokens, self.max_model_len)
        rules = (policy, preemption, chunked, batching, reserve)
        self.scheduler = Scheduler(pool, cache, *limits, *rules)
        if not quiet:
            say(describe_capacity(pool, self.max_model_len, self.kv.nbytes // self.kv.num_blocks))
        self.engine = self._engine(seed, trace, jump_forward, overlap)
        self.streams: dict[Request, deque[Delta]] = {}  # what each open one has not read yet
        self.compiler: LayerCompiler | None = None
        self.graphs: DecodeGraphs | None = None
        proposer = self._proposer(speculate, draft_quant or quant, activations, verify)
        if compile:
            self._compile(quant, max_num_seqs)
        if proposer is not None:
            self._speculate(proposer, num_speculative_tokens, max_num_seqs, compile, draft_quant or quant)

    # -- what users call

    def generate(
        self,
        prompts: str | list[int] | list[str] | list[list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt (text, or token ids), in order. One bad prompt raises ValueError before any is run."""
        if not isinstance(prompts, (str, list, tuple)):
            raise ValueError(f"prompts={repr(prompts)[:60]}: must be a text, a list of token ids, or a list of those")
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        if not isinstance(params, (list, tuple)):
            params = [SamplingParams() if params is None else params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts but {len(params)} SamplingParams: give one for all or one for each"
            )
        return self._answer(prompts, params)

    def chat(self, messages: list[dict], params: SamplingParams | None = None, **template_options) -> RequestOutput:
        """Answer a conversation [{"role": ..., "content": ...}, ...] through the model's chat template."""
        ids = self.tokenizer.encode_chat(messages, **template_options)
        return self._answer([ids], [SamplingParams(max_tokens=None) if params is None else params])[0]

    def stream(self, prompt: str | list[int], params: SamplingParams | None = None) -> Iterator[Delta]:
        """The answer as it is made. Closing the generator early aborts the request.

        Several streams may be open at once, and other calls made meanwhile: each step serves all of them.
        """
        request = self.add(prompt, SamplingParams() if params is None else params)
        unread = self.streams[request] = deque()
        try:
            while unread or not request.finished:
                if unread:
                    yield unread.popleft()
                else:
                    self._step()
        finally:
            del self.streams[request]
            self.engine.abort(request)

    def add(self, prompt: str | list[int], params: SamplingParams, **options) -> Request:
        """Queue a prompt without running it; `engine.step()` does that."""
        if not isinstance(prompt, (str, list, tuple)):
            raise ValueError(f"prompt {repr(prompt)[:60]} is neither a text nor a list of token ids")
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params={repr(params)[:60]}: must be SamplingParams, not {type(params).__name__}")
        text = prompt if isinstance(prompt, str) else None
        ids = self.tokenizer.encode(prompt) if text is not None else prompt
        return self.engine.add(ids, params, text, **options)

    def stats(self) -> dict:
        """Blocks free, cached, live and total; requests running and waiting; counters; graphs compiled."""
        compiled = self.compiler.graphs if self.compiler else 0
        captured = len(self.graphs.recorded) if self.graphs else 0
        counts = {"graphs_compiled": compiled, "steps_captured": captured, "compile_s": self.compile_s}
        speculator = self.engine.speculator
        return self.scheduler.stats() | counts | (speculator.stats() if speculator is not None else {})

    # -- putting it together

    def _step(self) -> None:
        """One step for everybody; what it added to open streams waits there to be read."""
        for delta in self.engine.step():
            if delta.request in self.streams:
                self.streams[delta.request].append(delta)

    def _answer(self, prompts: list[str | list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
        requests: list[Request] = []
        try:
            for prompt, p in zip(prompts, params, strict=True):
                requests.append(self.add(prompt, p))
            while not all(request.finished for request in requests):
                self._step()
        finally:  # refused halfway, or interrupted: nothing of this call stays behind
            for request in requests:
                self.engine.abort(request)
        return [request.output() for request in requests]

    def _load(
        self, name: str, quant: str | None, dtype: str, activations: str, max_model_len: int | None, threads: int | None
    ) -> None:
        """From a name to config, tokenizer and model."""
        start = time.perf_counter()
        ckpt = open_checkpoint(name)
        self.config = ckpt.config
        self.max_model_len = self._context(max_model_len)
        if dtype == "auto":
            dtype = "float32" if self.device.type == "cpu" else ckpt.config.dtype
        self.tokenizer = Tokenizer.from_checkpoint(ckpt)
        threads = threads or os.cpu_count() or 1
        torch.set_num_threads(1)  # loading is many small operations: threads would only wait for each other
        self.model = self._transformer(ckpt, quant, DTYPES[dtype], activations)
        # Quantised products run on the native kernels' own threads. Those of torch would still spin for a while after
        # each of its operations, on the cores that the next kernel needs.
        torch.set_num_threads(1 if kernels.backend() == "native" and quant else threads)
        self.load_s = time.perf_counter() - start

    def _transformer(self, ckpt: Checkpoint, quant: str | None, dtype: torch.dtype, activations: str) -> Transformer:
        model = Transformer(ckpt, quant, dtype, self.device, self.max_model_len, self._progress)
        set_activations(model, activations)
        return model

    def _context(self, wanted: int | None) -> int:
        most = self.config.max_position_embeddings
        if wanted is not None and not 2 <= wanted <= most:
            raise ValueError(f"max_model_len={wanted}: this model takes 2 to {most} tokens")
        return wanted or most

    def _allocate(
        self, block_size: int, num_blocks: int | None, kv_memory: int | None, kv_dtype: str, max_num_seqs: int
    ) -> KVCache:
        """The page pool: num_blocks if given (block 0, the padding, on top), else what the memory budget holds."""
        if block_size < 1 or (num_blocks is not None and num_blocks < 1):
            raise ValueError(f"block_size={block_size} and num_blocks={num_blocks} must be at least 1")
        if num_blocks is not None and kv_memory is not None:
            raise ValueError(f"num_blocks={num_blocks} and kv_memory={kv_memory} both size the pool: give one of them")
        config, dtype = self.config, self.model.dtype if kv_dtype == "auto" else DTYPES[kv_dtype]
        layout = (config.num_layers, block_size, config.num_kv_heads, config.head_dim)
        if num_blocks is not None:
            total = num_blocks + 1
        else:
            total = blocks_for_budget(kv_memory, *layout, dtype.itemsize, free_memory(str(self.device)))
            if kv_memory is None:  # no more than every seat filled to the last token could use
                total = min(total, 1 + max_num_seqs * blocks_needed(self.max_model_len, block_size))
        try:
            return KVCache(
                config.num_layers, total, block_size, config.num_kv_heads, config.head_dim, dtype, self.device
            )
        except (OSError, RuntimeError, OverflowError) as error:
            nbytes = block_bytes(*layout, dtype.itemsize) * total
            raise ValueError(
                f"a KV pool of {total:,} blocks, {nbytes:,} bytes, cannot be had ({error}): "
                "lower --num-blocks or --kv-memory"
            ) from None

    def _engine(self, seed: int, trace: bool, jump_forward: bool, overlap: bool) -> Engine:
        eos = frozenset(self.config.eos_token_ids) | frozenset(self.tokenizer.eos_token_ids)
        parts = (self.model, self.kv, self.scheduler, self.tokenizer)
        return Engine(*parts, eos, seed, say if trace else None, jump_forward, overlap=overlap)

    def _proposer(self, speculate: str | None, quant: str | None, activations: str, verify: str) -> Proposer | None:
        """Who guesses, if anyone; `quant` is that of a draft model."""
        if speculate is None:
            return None

        def load(name: str) -> tuple[Transformer, Tokenizer]:
            ckpt = open_checkpoint(name)
            return self._transformer(ckpt, quant, self.model.dtype, activations), Tokenizer.from_checkpoint(ckpt)

        return make_proposer(speculate, self.engine, load, verify == "rejection")

    def _compile(self, quant: str | None, max_num_seqs: int) -> None:
        """Compile or capture (compiled.py says which when).

        What the compiler makes is made now and not in the middle of the first answer. Captures cost little: that of a
        single sequence is made now, the others when their sizes first come up.
        """
        self.graphs = self._graphs(self.model, self.kv, quant, max_num_seqs)
        if self.graphs is not None:
            self.engine.run_model = self.graphs
        if self.graphs is None or self.device.type == "cuda":
            self.compiler = LayerCompiler(quiet=self.quiet)
            self.compiler.install(self.model)
        for prompt in ([0], [0, 0, 0]):
            (output,) = self._answer([prompt], [SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)])
            if output.outputs[0].error:
                raise ValueError(f"the model cannot compute its first step: {output.outputs[0].error}")
        self.scheduler.drop_cache()

    def _graphs(self, model: Transformer, kv: KVCache, quant: str | None, max_num_seqs: int) -> DecodeGraphs | None:
        """For capturing the decode steps of a model; None where compiling is the better way."""
        on_gpu = self.device.type == "cuda" and kernels.backend() == "triton"  # the references read lengths back
        native = kernels.backend() == "native" and quant is not None and model.dtype == torch.float32
        if not on_gpu and not native:
            return None
        buckets = [b for b in GPU_BUCKETS if b < max_num_seqs] if on_gpu else range(1, max_num_seqs)
        widest = blocks_needed(self.max_model_len, kv.block_size)
        return DecodeGraphs(model, kv, [*buckets, max_num_seqs], widest, cuda_capture if on_gpu else tape_capture)

    def _speculate(self, proposer: Proposer, most: int, max_num_seqs: int, capture: bool, quant: str | None) -> None:
        """Measure what steps cost by their rows, which says how much guessing pays."""
        state = SamplerState(SamplingParams(temperature=0), [0])
        context = min(TYPICAL_CONTEXT, self.max_model_len)  # a row costs its products and a look at every key

        @torch.inference_mode()
        def cost(run_model, most_rows: int) -> StepCost:
            def run(rows: int) -> None:
                batch = padding_batch(rows, self.device, max(2, blocks_needed(context, self.kv.block_size)))
                batch.context_lens[:rows], batch.positions[:] = context, context - 1
                sample(run_model(batch), [state] * rows)

            return StepCost.measure(run, most_rows)

        draft, trust = None, Speculator.TRUST
        if isinstance(proposer, HeadProposer):
            trust = HeadProposer.TRUST
            if self.graphs is not None and self.device.type == "cpu":
                proposer.capture = self.graphs.capture
            one = padding_batch(1, self.device)
            draft = proposer.measure(max_num_seqs, before=lambda: self.engine.run_model(one))
        if isinstance(proposer, DraftModel):
            graphs = self._graphs(proposer.model, proposer.kv, quant, max_num_seqs) if capture else None
            proposer.run_model = graphs or proposer.run_model
            draft = cost(proposer.run_model, max_num_seqs)
        step = cost(self.engine.run_model, max_num_seqs * (1 + most))
        self.engine.speculator = Speculator(proposer, most, step, draft, trust)

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling and capturing so far."""
        return sum(part.seconds for part in (self.compiler, self.graphs) if part)

    def _progress(self, done: int, total: int) -> None:
        if not self.quiet and sys.stderr.isatty():
            end = "\n" if done == total else ""
            print(f"\rloading layers {done}/{total}", end=end, file=sys.stderr, flush=True)


def say(line: str) -> None:
    print(line, file=sys.stderr)


def choose_device(name: str) -> torch.device:
    """ "auto" is the GPU if torch sees one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}, but torch {torch.__version__} sees no GPU; use --device cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device={name!r} is not known; use auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name!r}, but torch sees {torch.cuda.device_count()} GPU(s), counted from 0")
    if device.index is not None and device.type == "cuda":  # without a number it is the current one
        torch.cuda.set_device(device)  # where Triton launches, and graphs are captured
    return device


def set_backend(name: str, device: torch.device, threads: int | None) -> None:
    """Choose the kernels and their threads (None: one for each processor)."""
    choose("kernels", name, ["native", "reference"])
    kernels.set_threads((os.cpu_count() or 1) if threads is None else threads)
    kernels.set_backend("triton" if name == "native" and device.type == "cuda" else name)


if __name__ == "__main__":
    from cli import main

    sys.exit(main())
