"""Two other engines on the same model, measured the way `bench.py decode` measures this one.

    python benchmarks/peers.py transformers --model smollm2 --threads 2
    /venv/with/llama-cpp-python/bin/python benchmarks/peers.py llama.cpp --model model.gguf --threads 2
    python bench.py versus --peer transformers --peer llama.cpp:PYTHON:model.gguf --quant int4 --compile --threads 2

The problem. A ratio between two programs means something only if both did the same work: the same weights, threads and
prompts, prefill and decode apart. So each engine is a class with two methods, driven by its own fastest loop:

    prefill(prompt)          seconds from the prompt to the logits of its last token
    decode(prompts, steps)   seconds of `steps` greedy tokens for all prompts together, after their prompts

llama.cpp lives in an environment without torch: this file imports nothing heavy before it is needed.
Left out: transformers with torch.compile; llama.cpp's server, which `bench.py serve --url` loads.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import random
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":  # run as a script, perhaps by another program's Python: import from the root
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.figures import ratios, table  # noqa: E402
from formats.command_line import as_command, warn  # noqa: E402


def random_prompt(vocab_size: int, length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(100, vocab_size - 100) for _ in range(length)]


class Transformers:
    """transformers' model class for the checkpoint's architecture, its own cache, greedy, float32."""

    def __init__(self, model: str, threads: int, sequences: int, length: int):
        try:
            import transformers  # a requirement of the tests only
        except ImportError:
            raise ValueError("transformers is not installed: pip install -r requirements-dev.txt") from None
        import torch

        from checkpoint import open_checkpoint

        torch.set_num_threads(threads)
        self.torch, self.new_cache = torch, transformers.DynamicCache
        self.model = hf_model(open_checkpoint(model))
        self.vocab_size = self.model.config.vocab_size
        takes = inspect.signature(self.model.forward).parameters
        self.cache_argument = "cache" if "cache" in takes else "past_key_values"  # the older name

    def prefill(self, prompt: list[int]) -> float:
        ids, start = self.torch.tensor([prompt]), time.perf_counter()
        self._next(ids, self.new_cache())
        return time.perf_counter() - start

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        cache = self.new_cache()
        ids = self._next(self.torch.tensor(prompts), cache)
        start = time.perf_counter()
        for _ in range(steps):
            ids = self._next(ids, cache)
        return time.perf_counter() - start

    def _next(self, ids, cache):
        """ids [B, T] -> the greedy next tokens [B, 1]."""
        with self.torch.inference_mode():
            logits = self.model(ids, logits_to_keep=1, **{self.cache_argument: cache}).logits
            return logits[:, -1].argmax(-1, keepdim=True)


def hf_model(ckpt):
    """The checkpoint as a model of transformers, float32: every tensor by the name both of them use."""
    import torch
    import transformers

    from formats.quantized_folder import hf_config

    if (ckpt.config.rope_scaling or {}).get("rope_type") == "llama3_factors":
        raise ValueError("transformers cannot take the rotary divisors of this GGUF file: use the original folder")
    if ckpt.quant is not None:
        raise ValueError(f"transformers cannot take the integers in {ckpt.path}: use the original model")
    config = transformers.AutoConfig.for_model(**hf_config(ckpt.config))
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    weights = {name: ckpt.tensor(name).to(torch.float32, copy=True) for name in ckpt.names()}
    model.load_state_dict(weights, strict=not ckpt.config.tie_word_embeddings)
    return model


class LlamaCpp:
    """llama.cpp through its C interface: one context, a sequence number for each prompt, one batch a step."""

    def __init__(self, model: str, threads: int, sequences: int, length: int):
        try:
            import llama_cpp
        except ImportError:
            raise ValueError(f"{sys.executable} has no llama_cpp: name the Python of its environment") from None
        self.lib = lib = llama_cpp
        lib.llama_backend_init()
        options = lib.llama_model_default_params()
        options.n_gpu_layers = 0
        handle = lib.llama_model_load_from_file(model.encode(), options)
        if not handle:
            raise ValueError(f"llama.cpp cannot load {model}")
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(handle))
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_seq_max, options.kv_unified = length, sequences, True
        options.n_batch, options.n_ubatch = max(2048, length), 512
        options.n_threads = options.n_threads_batch = threads
        self.context = lib.llama_init_from_model(handle, options)
        self.memory, self.batch = lib.llama_get_memory(self.context), lib.llama_batch_init(options.n_batch, 0, 1)

    def prefill(self, prompt: list[int]) -> float:
        start = time.perf_counter()
        self._fill([prompt])
        return time.perf_counter() - start

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """The prompts' tokens over again: which tokens are computed costs nothing, choosing them would."""
        self._fill(prompts)
        width, start = len(prompts[0]), time.perf_counter()
        for i in range(width, width + steps):
            self._run([(prompt[i % width], i, s, True) for s, prompt in enumerate(prompts)])
        return time.perf_counter() - start

    def _fill(self, prompts: list[list[int]]) -> None:
        """Forget everything, then compute the prompts."""
        self.lib.llama_memory_clear(self.memory, True)
        for s, prompt in enumerate(prompts):
            self._run([(token, i, s, i == len(prompt) - 1) for i, token in enumerate(prompt)])

    def _run(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """One pass over rows of (token, position, sequence, whether it needs logits)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, needs_logits) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, needs_logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if self.lib.llama_decode(self.context, batch):
            raise ValueError(f"llama.cpp failed on a batch of {len(rows)} tokens")
        self.lib.llama_synchronize(self.context)


ENGINES = {"transformers": Transformers, "llama.cpp": LlamaCpp}


def measure(args: argparse.Namespace) -> dict:
    """Load and measure one engine: rates in tokens per second, one entry a repetition."""
    start = time.perf_counter()
    length = max(args.prompt, max(args.batch) * (16 + args.gen)) + 256
    engine = ENGINES[args.engine](args.model, args.threads, max(args.batch), length)
    load_s, long = time.perf_counter() - start, random_prompt(engine.vocab_size, args.prompt, 0)

    def decode_rate(batch: int) -> float:
        prompts = [random_prompt(engine.vocab_size, 16, seed) for seed in range(batch)]
        return round(batch * args.gen / engine.decode(prompts, args.gen), 1)

    engine.prefill(long)  # warm-up
    return {
        "load_s": round(load_s, 3),
        "prefill_tok_s": [round(args.prompt / engine.prefill(long), 1) for _ in range(args.repeat)],
        "decode_tok_s": {str(b): [decode_rate(b) for _ in range(args.repeat)] for b in args.batch},
    }


# ---- for those who compare


def commands(peers: list[str], model: str) -> dict[str, list[str]]:
    """What each --peer means: {a name for the table: the command to run}. Raises ValueError for a missing file.

    transformers, llama.cpp:PYTHON:FILE.gguf, or any command that prints the JSON keys of `bench.py decode`.
    """
    script, named = str(Path(__file__).resolve()), {}
    for peer in peers:
        name, command = "peer", shlex.split(peer)
        if peer == "transformers":
            name, command = peer, [sys.executable, script, peer, "--model", model]
        elif peer.startswith("llama.cpp:"):
            python, _, file = peer.removeprefix("llama.cpp:").partition(":")
            for path in (python, file):
                if not Path(path).is_file():
                    raise ValueError(f"--peer {peer!r}: no file {path!r}; write llama.cpp:PYTHON:FILE.gguf")
            name, command = f"llama.cpp {Path(file).stem}", [python, script, "llama.cpp", "--model", file]
        if not command:
            raise ValueError("--peer is empty: write transformers, llama.cpp:PYTHON:FILE.gguf or a command")
        same = sum(known.partition(" (")[0] == name for known in named)
        named[name if not same else f"{name} ({same + 1})"] = command
    return named


def figures_of(name: str, command: list[str]) -> dict:
    """Run a program that prints one JSON line last. Raises ValueError with what it said if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{name} failed ({shlex.join(command)}): {done.stderr.strip()[-500:]}")
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise ValueError(f"{name} printed no JSON line ({shlex.join(command)}): {done.stdout[-200:]!r}") from None


def medians(result: dict) -> dict[str, float]:
    """One number per row of a table: the medians of a `decode` result."""
    rows = {"prefill": statistics.median(result["prefill_tok_s"])}
    return rows | {f"decode x{b}": statistics.median(rates) for b, rates in result["decode_tok_s"].items()}


def medians_of(name: str, command: list[str], batches: list[int]) -> dict[str, float]:
    """The rows of `medians` that a program prints. Raises ValueError where one is missing or not positive."""
    result = figures_of(name, command)
    with contextlib.suppress(LookupError, TypeError, AttributeError, statistics.StatisticsError):
        rows = medians(result)
        if all(rows[row] > 0 for row in ("prefill", *(f"decode x{batch}" for batch in batches))):
            return rows
    raise ValueError(
        f"{name} printed no positive rate for prefill and for decode x{', x'.join(map(str, batches))}: it must print "
        f"the keys of `bench.py decode`, not {json.dumps(result)[:200]}"
    )


def in_turn(ours: list[str], peers: dict[str, list[str]], sizes: list[str], batches: list[int], rounds: int) -> dict:
    """Run our program and the peers in turn: {row: {"vitrine": tok/s, "peers": {name: {tok_s, ratio, ratios}}}}."""
    taken: dict[str, list[dict]] = {name: [] for name in ("vitrine", *peers)}
    for i in range(rounds):
        for name, command in {"vitrine": ours, **peers}.items():
            warn(f"round {i + 1}/{rounds}: {name} ...")
            taken[name].append(medians_of(name, [*command, *sizes], batches))
    rows = {}
    for row in taken["vitrine"][0]:
        rates = {name: [rates[row] for rates in taken[name]] for name in taken}
        own = rates.pop("vitrine")
        beside = {name: {"tok_s": statistics.median(r)} | ratios(own, r) for name, r in rates.items()}
        rows[row] = {"vitrine": statistics.median(own), "peers": beside}
    return rows


def versus_table(rows: dict) -> str:
    beside = [(row, r["vitrine"], name, peer) for row, r in rows.items() for name, peer in r["peers"].items()]
    return table([{"tok/s": row, "vitrine": ours, "peer": name} | peer for row, ours, name, peer in beside])


@as_command
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks/peers.py", description="Measure another engine.")
    parser.add_argument("engine", choices=list(ENGINES))
    parser.add_argument("--model", required=True, metavar="M", help="as for LLM; for llama.cpp a .gguf file")
    for name, default in (("prompt", 512), ("gen", 128), ("repeat", 3), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], metavar="B")
    print(json.dumps(measure(parser.parse_args(argv))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
