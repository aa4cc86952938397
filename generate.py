"""The composition: `EngineConfig`, `LLM`, and the command line.

    llm = LLM(model="smollm2", quant="int4", compile=True)
    print(llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=32))[0].outputs[0].text)

`LLM` puts the files of this repository together and nothing else; the words are vLLM's. An option is one field of
EngineConfig: the arguments of `LLM`, the flags of every command and `--help` are made from these fields.

    options ──► device, kernels ──► checkpoint ──► tokenizer, model ──► pages in the memory that is left ──┐
      ┌────────────────────────────────────────────────────────────────────────────────────────────────────┘
      └─► runner: eager, compiled or captured ──► scheduler ──► engine ──► steps timed, if anyone guesses
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

import kernels
from benchmarks.past import BATCHINGS, RESERVES, scheduler_class
from checkpoint import open_checkpoint
from compiled import GPU_BUCKETS, CapturedRunner, CompiledRunner, ModelRunner, cuda_capture, tape_capture
from drafting.budget import Speculator, StepCost
from drafting.draft_model import DraftModel, check_same_tokens, first_layers
from drafting.head import SHIPPED, HeadProposer, computed_anew, load_head
from engine import Engine
from formats.command_line import add_flags, as_command, given, refuse_unused, warn
from kv_paged import (
    BlockPool,
    KVCache,
    block_bytes,
    blocks_for_budget,
    blocks_needed,
    describe_capacity,
    parse_memory,
)
from model import Transformer, padding_batch
from native.machine import usable_memory, usable_threads
from overlap import OverlapEngine
from quantize import has_kernels, set_activations
from radix import PREFIX_CACHES
from request import Delta, Request, RequestOutput
from sampling import SamplerState, SamplingParams, sample
from scheduler import POLICIES, PREEMPTIONS
from serving import chat, terminal
from speculative import NgramProposer
from tokenizer import Tokenizer

TYPICAL_CONTEXT = 256  # tokens, where the cost of a step is measured
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_PROMPT = "Once upon a time"


def option(default, help: str, **rules):
    """A field with its help text and rules: one_of (the values allowed), least, read (text to value), flag=False."""
    return field(default=default, metadata={"help": help} | rules)


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is made of. Raises ValueError naming the field, the value and what is allowed."""

    model: str = option("smollm2", "a short name, a Hugging Face folder, a .gguf file or a hub id")
    quant: str | None = option(None, "int8, int8-g32, int4, int4-g64, int4-g128 or nf4-g64; as stored if not given")
    compile: bool = option(False, "compile one decoder layer for all, or capture decode steps, whichever pays")
    dtype: str = option("auto", "of weights and activations; auto: float32 on a CPU", one_of=["auto", *DTYPES])
    device: str = option("auto", "auto (a GPU if there is one), cpu, cuda or cuda:N")
    block_size: int = option(16, "tokens per KV page", least=1)
    num_blocks: int | None = option(None, "KV pages, instead of --kv-memory", least=1)
    kv_memory: int | None = option(None, "bytes for the KV pages, e.g. 2G", read=parse_memory)
    kv_dtype: str = option("auto", "of keys and values; auto: that of the model", one_of=["auto", *DTYPES])
    max_model_len: int | None = option(None, "longest prompt plus answer; at most what the model was trained for")
    max_num_seqs: int = option(32, "sequences that run at once: batch slots", least=1)
    max_num_batched_tokens: int = option(512, "tokens computed in one step", least=1)
    policy: str = option("fcfs", "who goes next: fcfs, priority or lpm (longest cached prefix)", one_of=POLICIES)
    prefix_cache: str = option("radix", "radix, hash or none", one_of=PREFIX_CACHES)
    preemption: str = option("recompute", "without free blocks: recompute or swap", one_of=PREEMPTIONS)
    batching: str = option("continuous", "continuous, or static to compare with", one_of=BATCHINGS)
    reserve: str = option("paged", "paged, or contiguous to compare with", one_of=RESERVES)
    chunked: bool = option(True, "compute long prompts in chunks beside decodes")
    activations: str = option("int8", "of quantised products: int8 or float", one_of=["int8", "float"])
    speculate: str | None = option(None, "who guesses: ngram, head, head:FILE, draft:MODEL or self:LAYERS")
    draft_quant: str | None = option(None, "quant of a draft model; as the target's if not given")
    num_speculative_tokens: int = option(5, "guesses an answer is given at most; speculate=None is off", least=1)
    verify: str = option("coupled", "coupled (the same tokens) or rejection", one_of=["coupled", "rejection"])
    jump_forward: bool = option(True, "append what a structured answer can only go on with, instead of drawing it")
    overlap: bool = option(False, "plan the next step while the model runs this one")
    kernels: str = option("native", "native or reference, for the process", one_of=["native", "reference"])
    threads: int | None = option(None, "threads of the kernels, for the process; all the machine allows if not given")
    seed: int = option(0, "draws the seeds of requests that bring none")
    trace: bool = option(False, "print each step's plan to stderr")
    quiet: bool = option(True, "print nothing about loading", flag=False)

    def __post_init__(self):
        kinds = {"str": (str, os.PathLike), "int": int, "bool": bool, "None": type(None)}
        for f in dataclasses.fields(self):
            value, allowed, one_of = getattr(self, f.name), f.type.split(" | "), f.metadata.get("one_of")
            right = any(isinstance(value, kinds[kind]) for kind in allowed)
            if not right or (isinstance(value, bool) and "bool" not in allowed):
                raise ValueError(f"{f.name}={value!r}: must be {' or '.join(allowed)}, not {type(value).__name__}")
            if one_of is not None and value not in one_of:
                raise ValueError(f"{f.name}={value!r} is not known; choose one of {', '.join(one_of)}")
            if value is not None and value < f.metadata.get("least", value):
                raise ValueError(f"{f.name}={value}: must be at least {f.metadata['least']}")
        if self.num_blocks is not None and self.kv_memory is not None:
            both = f"num_blocks={self.num_blocks} and kv_memory={self.kv_memory}"
            raise ValueError(f"{both} both size the pool: give one of them")
        if self.reserve == "contiguous" and self.prefix_cache != "none":
            cache = f'prefix_cache must be "none", not {self.prefix_cache!r}'
            raise ValueError(f'reserve="contiguous" shares no blocks: {cache}')
        if self.draft_quant is not None and not (self.speculate or "").startswith("draft:"):
            setting = f"draft_quant={self.draft_quant!r}"
            raise ValueError(f"{setting} needs speculate='draft:<model>', not {self.speculate!r}")


class LLM:
    """A model ready to answer. The options are the fields of EngineConfig."""

    def __init__(self, model: str = "smollm2", **options):
        self.options = EngineConfig(model, **options)
        self.device = choose_device(self.options.device)
        threads, reason = self.options.threads, "as was asked for"
        if threads is None:
            threads, reason = usable_threads()
        kernels.set_threads(threads)
        on_gpu = self.options.kernels == "native" and self.device.type == "cuda"
        kernels.set_backend("triton" if on_gpu else self.options.kernels)
        if not self.options.quiet:
            warn(f"threads: {threads} ({reason})")
        self._load()
        self.kv = self._allocate()
        self.runner = self._runner(self.model, self.kv)
        self.scheduler = self._scheduler()
        self.engine = self._engine()
        self.streams: dict[Request, deque[Delta]] = {}  # what each open one has not read yet
        proposer = self._proposer() if self.options.speculate is not None else None
        if self.options.compile:
            self._warm_up()
        if proposer is not None:
            self.engine.speculator = self._speculator(proposer)

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
        if (n := len(prompts)) != len(params):
            raise ValueError(f"{n} prompts but {len(params)} SamplingParams: give one for all or one for each")
        requests: list[Request] = []
        try:
            for prompt, p in zip(prompts, params, strict=True):
                requests.append(self.add(prompt, p))
            for request in requests:
                while not request.finished:
                    self._step()
        finally:  # refused halfway, or interrupted: nothing of this call stays behind
            for request in requests:
                self.engine.abort(request)
        return [request.output() for request in requests]

    def chat(self, messages: list[dict], params: SamplingParams | None = None, **template_options) -> RequestOutput:
        """Answer a conversation [{"role": ..., "content": ...}, ...] through the model's chat template."""
        ids = self.tokenizer.encode_chat(messages, **template_options)
        return self.generate([ids], SamplingParams(max_tokens=None) if params is None else params)[0]

    def stream(self, prompt: str | list[int], params: SamplingParams | None = None) -> Iterator[Delta]:
        """The answer as it is made. Closing the generator early aborts it; several may be open, beside other calls."""
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
        """Queue a prompt without running it; `engine.step()` does that. options: priority, namespace."""
        if not isinstance(prompt, (str, list, tuple)):
            raise ValueError(f"prompt {repr(prompt)[:60]} is neither a text nor a list of token ids")
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params={repr(params)[:60]}: must be SamplingParams, not {type(params).__name__}")
        if isinstance(prompt, str):
            return self.engine.add(self.tokenizer.encode(prompt), params, prompt, **options)
        return self.engine.add(prompt, params, **options)

    def stats(self) -> dict:
        """Blocks free, cached, live and total; requests running and waiting; counters; graphs compiled."""
        runner, speculator = self.runner, self.engine.speculator
        counts = {"graphs_compiled": runner.graphs_compiled, "steps_captured": runner.steps_captured}
        counts |= {"compile_s": runner.seconds}
        return self.scheduler.stats() | counts | (speculator.stats() if speculator is not None else {})

    def _step(self) -> None:
        """One step for everybody; what it added to open streams waits there to be read."""
        for delta in self.engine.step():
            if delta.request in self.streams:
                self.streams[delta.request].append(delta)

    # -- putting it together

    def _load(self) -> None:
        """From a name to config, tokenizer and model."""
        start, options = time.perf_counter(), self.options
        checkpoint = open_checkpoint(options.model)
        self.config = checkpoint.config
        most = self.config.max_position_embeddings
        self.max_model_len = most if options.max_model_len is None else options.max_model_len
        if not 2 <= self.max_model_len <= most:
            raise ValueError(f"max_model_len={options.max_model_len}: this model takes 2 to {most} tokens")
        self.tokenizer = Tokenizer.from_checkpoint(checkpoint)
        torch.set_num_threads(1)  # loading is many small operations: threads would only wait for each other
        dtype = options.dtype
        if dtype == "auto":
            dtype = "float32" if self.device.type == "cpu" else self.config.dtype
        self.model = self._transformer(checkpoint, options.quant, DTYPES[dtype])
        # Quantised products run on the native kernels' own threads. Those of torch would still spin for a while after
        # each of its operations, on the cores that the next kernel needs.
        alone = kernels.backend() == "native" and has_kernels(self.model)
        torch.set_num_threads(1 if alone else kernels.threads())
        self.load_s = time.perf_counter() - start

    def _transformer(self, checkpoint, quant: str | None, dtype: torch.dtype) -> Transformer:
        model = Transformer(checkpoint, quant, dtype, self.device, self.max_model_len, self._progress)
        set_activations(model, self.options.activations)
        return model

    def _progress(self, done: int, total: int) -> None:
        if not self.options.quiet and sys.stderr and sys.stderr.isatty():
            warn(f"\rloading layers {done}/{total}", end="\n" if done == total else "")

    def _allocate(self) -> KVCache:
        """The page pool: num_blocks if given (block 0, the padding, on top), else what the memory budget holds."""
        options, config = self.options, self.config
        dtype = self.model.dtype if options.kv_dtype == "auto" else DTYPES[options.kv_dtype]
        layout = (config.num_layers, options.block_size, config.num_kv_heads, config.head_dim, dtype.itemsize)
        free, bound = usable_memory(str(self.device))
        self.memory = f"{free / 2**20:,.0f} MiB of memory are free ({bound})"
        if options.num_blocks is not None:
            total = options.num_blocks + 1
        else:
            total = blocks_for_budget(options.kv_memory, *layout, free)
            if options.kv_memory is None:  # no more than every batch slot filled to the last token could use
                total = min(total, 1 + options.max_num_seqs * blocks_needed(self.max_model_len, options.block_size))
        if block_bytes(*layout) * total > free:
            warn(
                f"warning: the KV pool takes {block_bytes(*layout) * total / 2**20:,.0f} MiB when it fills, but"
                f" {self.memory}: the process may be killed; lower --kv-memory or --num-blocks"
            )
        try:
            shape = (config.num_layers, total, options.block_size, config.num_kv_heads, config.head_dim)
            return KVCache(*shape, dtype, self.device)
        except (OSError, RuntimeError, OverflowError) as error:
            raise ValueError(
                f"a KV pool of {total:,} blocks, {block_bytes(*layout) * total:,} bytes, cannot be had ({error}): "
                "lower --num-blocks or --kv-memory"
            ) from None

    def _scheduler(self):
        options = self.options
        pool = BlockPool(self.kv.num_blocks, options.block_size)
        cache = PREFIX_CACHES[options.prefix_cache](pool)
        limits = (options.max_num_seqs, options.max_num_batched_tokens, self.max_model_len)
        rules = (options.policy, options.preemption, options.chunked)
        scheduler = scheduler_class(options.batching, options.reserve)(pool, cache, *limits, *rules)
        if not options.quiet:
            warn(f"{describe_capacity(pool, self.max_model_len, self.kv.nbytes // self.kv.num_blocks)}; {self.memory}")
        return scheduler

    def _engine(self) -> Engine:
        eos = frozenset(self.config.eos_token_ids) | frozenset(self.tokenizer.eos_token_ids)
        options, kind = self.options, OverlapEngine if self.options.overlap else Engine
        trace = warn if options.trace else None
        return kind(self.runner, self.scheduler, self.tokenizer, eos, options.seed, trace, options.jump_forward)

    def _runner(self, model: Transformer, kv: KVCache) -> ModelRunner:
        """How steps of a model are computed: captured where kernels do the arithmetic, else compiled (compiled.py)."""
        options, backend = self.options, kernels.backend()
        if not options.compile:
            return ModelRunner(model, kv)
        if backend == "native" and has_kernels(model) and model.dtype == torch.float32 and model.native_only:
            # A replay is cheap to record on a CPU: every batch size is a bucket of its own, and nothing is padded.
            inner, capture, buckets = ModelRunner(model, kv), tape_capture, range(1, options.max_num_seqs)
        else:
            inner, capture, buckets = CompiledRunner(model, kv, quiet=options.quiet), cuda_capture, GPU_BUCKETS
            if backend != "triton":  # the reference kernels read lengths back, which a graph cannot wait for
                return inner
        buckets = [b for b in buckets if b < options.max_num_seqs]
        widest = blocks_needed(self.max_model_len, kv.block_size)
        return CapturedRunner(inner, [*buckets, options.max_num_seqs], widest, capture)

    def _warm_up(self) -> None:
        """Compile or capture now, not in the middle of the first answer. Other batch sizes wait for their first use."""
        for prompt in ([0], [0, 0, 0]):
            (output,) = self.generate([prompt], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
            if output.outputs[0].error:
                raise ValueError(f"the model cannot compute its first step: {output.outputs[0].error}")
        self.scheduler.drop_cache()

    def _proposer(self):
        """Who guesses."""
        options, target, kv = self.options, self.model, self.kv
        kind, colon, what = options.speculate.partition(":")
        if options.speculate == "ngram":
            return NgramProposer()
        if kind == "head" and (what or not colon):
            tape = isinstance(self.runner, CapturedRunner) and self.runner.capture is tape_capture
            capture = tape_capture if tape else computed_anew
            return HeadProposer(load_head(what or SHIPPED, target), self.engine, capture)
        if kind == "self" and what.isdecimal():
            draft = first_layers(target, int(what))
        elif kind == "draft" and what:
            checkpoint = open_checkpoint(what)
            draft = self._transformer(checkpoint, options.draft_quant or options.quant, target.dtype)
            check_same_tokens(Tokenizer.from_checkpoint(checkpoint), self.tokenizer)
        else:
            raise ValueError(
                f"speculate={options.speculate!r} is not known; use ngram, head, head:<file.safetensors>, "
                "draft:<model> or self:<number of layers>"
            )
        c, size = draft.config, (kv.num_blocks, kv.block_size)  # as many pages as the target has
        pages = KVCache(len(draft.layers), *size, c.num_kv_heads, c.head_dim, draft.dtype, self.device)
        return DraftModel(self._runner(draft, pages), target.config.vocab_size, options.verify == "rejection")

    def _speculator(self, proposer) -> Speculator:
        """Measure what steps cost by their rows, which says how much guessing pays."""
        slots, most = self.options.max_num_seqs, self.options.num_speculative_tokens
        sampler = SamplerState(SamplingParams(temperature=0), [0])
        context = min(TYPICAL_CONTEXT, self.max_model_len)  # a row costs its products and a look at every key

        @torch.inference_mode()
        def cost(runner: ModelRunner, most_rows: int) -> StepCost:
            def run(rows: int) -> None:
                batch = padding_batch(rows, self.device, max(2, blocks_needed(context, self.kv.block_size)))
                batch.context_lens[:rows], batch.positions[:] = context, context - 1
                sample(runner.run(batch), [sampler] * rows)

            return StepCost.measure(run, most_rows)

        draft, trust = None, Speculator.TRUST
        if isinstance(proposer, HeadProposer):
            one = padding_batch(1, self.device)
            draft, trust = proposer.measure(slots, before=lambda: self.runner.run(one)), HeadProposer.TRUST
        if isinstance(proposer, DraftModel):
            draft = cost(proposer.runner, slots)
        return Speculator(proposer, most, cost(self.runner, slots * (1 + most)), draft, trust)


def choose_device(name: str) -> torch.device:
    """ "auto" is the GPU if torch sees one."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not (match := re.fullmatch(r"auto|cpu|cuda(?::(\d+))?", name)):
        raise ValueError(f"device={name!r} is not known; use auto, cpu, cuda or cuda:N")
    index = match[1] and int(match[1])
    if name.startswith("cuda") and (index or 0) >= gpus:
        raise ValueError(f"device={name!r}, but torch {torch.__version__} sees {gpus} GPU(s), counted from 0")
    if index is not None:  # without a number it is the current one
        torch.cuda.set_device(index)  # where Triton launches, and graphs are captured
    return torch.device(("cuda" if gpus else "cpu") if name == "auto" else name)


# -- the command line


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each option; booleans also as --no-..."""
    options = [f for f in dataclasses.fields(EngineConfig) if f.metadata.get("flag", True)]
    add_flags(parser.add_argument_group("engine (LLM)"), options)


def engine_rules(args: argparse.Namespace) -> list[tuple]:
    """What LLM takes and needs only beside something else: rules for `refuse_unused`."""
    drafts = (args.speculate or "").startswith(("draft:", "self:"))
    return [
        (["num_speculative_tokens"], args.speculate, "nothing is guessed; add --speculate"),
        (["verify"], drafts, "only a model's guesses have a distribution; add --speculate draft:M or self:K"),
    ]


def engine_arguments(args: argparse.Namespace) -> dict:
    return {f.name: getattr(args, f.name) for f in dataclasses.fields(EngineConfig) if hasattr(args, f.name)}


def sampling_fields() -> list[dataclasses.Field]:
    """The fields of SamplingParams that have a flag of their own; --seed is the engine's, which draws the requests'."""
    return [f for f in dataclasses.fields(SamplingParams) if f.name != "seed"]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("generate.py", description="Generate text with the vitrine engine.")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prompt", help=f"text to continue (default {DEFAULT_PROMPT!r})")
    what.add_argument("--chat", action="store_true", help="an interactive conversation")
    what.add_argument("--prompts-file", metavar="F", help="one prompt on each line, answered together")
    parser.add_argument("--system", metavar="TEXT", help="the system message of --chat")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_engine_flags(parser)
    group = parser.add_argument_group("sampling (SamplingParams); greedy unless told otherwise")
    add_flags(group, sampling_fields(), "store_true", temperature=0.0, max_tokens=128)
    args = parser.parse_args(argv)
    if args.system is not None and not args.chat:
        parser.error("--system belongs to --chat")
    if args.json and args.chat:
        parser.error("--json and --chat do not go together")
    refuse_unused(
        given(parser, argv, args),
        *engine_rules(args),
        (["n"], not args.chat, "a conversation goes on from one answer; leave it out"),
        (["logprobs", "prompt_logprobs"], args.json, "only --json shows them; add it"),
    )
    args.prompt = DEFAULT_PROMPT if args.prompt is None else args.prompt
    return args


@as_command
def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    params = SamplingParams(**{f.name: getattr(args, f.name) for f in sampling_fields()})  # refused before loading
    prompts = None if args.prompts_file is None else terminal.read_prompts(args.prompts_file)
    llm = LLM(**engine_arguments(args), quiet=False)
    if args.chat:
        return chat.run_chat(llm, args.system, params)
    if prompts is not None:
        return terminal.run_file(llm, args, params, prompts)
    return terminal.run_prompt(llm, args, params)


if __name__ == "__main__":
    sys.exit(main())
