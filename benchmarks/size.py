"""What a model needs and what a machine can do with it, computed before anything is loaded.

    python bench.py size --model smollm2 --quant int4 --context 2048 --concurrency 16
    python bench.py size --params 8e9 --layers 32 --kv-heads 8 --head-dim 128 --context 8192 --concurrency 16 \\
        --quant int4 --kv-dtype fp16 --memory 24G --bandwidth 100 --gflops 2000

The problem. "Will it fit, and how fast could it be?" is asked before a download, and of machines one does not have.

The idea. Two formulas give the bytes, two the floors (benchmarks/roofline.py), whose rates are measured or given:

    weights         parameters x bits / 8, and 4 bytes of scale and minimum a group: int4 in groups of 32 is 5.0 bits
    KV of a token   2 x layers x kv_heads x head_dim x bytes of an element

The tensors of --model, or of a shape given by --hidden, --intermediate and --vocab, are counted; of --params every
weight takes the bits of the scheme. Source: Kwon et al. 2023, section 3. Left out: activations, the rotary table, what
Python and torch take, and that embedding tables keep 8 bits where only --params is known.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import kernels
from benchmarks.figures import lines
from benchmarks.roofline import decode_floor, matrix_rate, prefill_floor, read_bandwidth
from checkpoint import Checkpoint, open_checkpoint
from formats.command_line import as_command, flag, given, refuse_unused, value_of
from formats.config import ModelConfig
from formats.layers import resolve_scheme, scheme_for
from formats.read_config import is_quantised, tensor_shapes
from generate import DTYPES
from kv_paged import block_bytes, blocks_needed, parse_memory
from native.machine import usable_memory, usable_threads
from quantize import SCHEMES, TABLES, Scheme, parse_scheme

SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
COUNTED = ["hidden", "intermediate", "vocab", "heads", "tied"]  # a shape whose weights are counted
RATES = ["bandwidth", "gflops"]
SHAPE = ["params", "layers", "kv_heads", "head_dim", *COUNTED]


@dataclass(frozen=True)
class Weights:
    """parameters: all of them; layer_parameters: those that every prompt token is multiplied with."""

    parameters: int
    layer_parameters: int
    nbytes: int
    step_bytes: int  # read in a decode step: all but the embedding table, unless that is the head as well


def quantized_bytes(scheme: Scheme, rows: int, columns: int) -> int:
    """Bytes of a weight [rows, columns]: codes, scales and minima."""
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in scheme.layout(rows, columns).values())


def count_weights(config: ModelConfig, ckpt: Checkpoint, quant: str | None, dtype: torch.dtype) -> Weights:
    """All tensors that a config demands, from their shapes. Raises ValueError as `resolve_scheme` does."""
    shapes, scheme, sizes = tensor_shapes(config), resolve_scheme(ckpt, quant), {}
    for name in shapes if ckpt.quant is None else ckpt.names():
        if ckpt.quant is not None and not name.endswith((".weight", ".bias")):
            sizes[name] = ckpt.tensor(name).nbytes  # codes, scales or minima, as they are stored
        elif ckpt.quant is not None or scheme is None or not is_quantised(name, shapes[name]):
            sizes[name] = math.prod(shapes[name]) * dtype.itemsize
        else:
            sizes[name] = quantized_bytes(scheme_for(ckpt, [name], scheme), *shapes[name])
    looked_up = 0 if config.tie_word_embeddings else sum(n for name, n in sizes.items() if "embed_tokens" in name)
    return Weights(
        sum(math.prod(shape) for shape in shapes.values()),
        sum(math.prod(shape) for name, shape in shapes.items() if len(shape) > 1 and name not in TABLES),
        sum(sizes.values()),
        sum(sizes.values()) - looked_up,
    )


def shape_of(args: argparse.Namespace) -> tuple[ModelConfig, Weights]:
    """The model of --model, or of the numbers that were given, and its weights."""
    dtype = DTYPES[args.dtype]
    if args.model:
        ckpt = open_checkpoint(args.model)
        return ckpt.config, count_weights(ckpt.config, ckpt, args.quant, dtype)
    config = ModelConfig(
        architecture="llama", vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=args.intermediate,
        num_layers=args.layers, num_heads=args.heads or (args.hidden or 0) // args.head_dim,
        num_kv_heads=args.kv_heads, head_dim=args.head_dim, rms_norm_eps=1e-5, rope_theta=1e4, rope_scaling=None,
        rotary_dim=args.head_dim,
        max_position_embeddings=sys.maxsize, tie_word_embeddings=args.tied, sliding_window=(None,) * args.layers,
        bos_token_id=None, eos_token_ids=(), dtype=args.dtype,
    )  # fmt: skip
    if args.params is None:
        return config, count_weights(config, Checkpoint(Path()), args.quant, dtype)  # a checkpoint without blocks
    each = quantized_bytes(parse_scheme(args.quant), 1, 4096) / 4096 if args.quant else dtype.itemsize
    parameters, nbytes = round(args.params), round(args.params * each)
    return config, Weights(parameters, parameters, nbytes, nbytes)


def size(args: argparse.Namespace) -> dict:
    """The figures as --json prints them, also for a machine that is too small."""
    config, weights = shape_of(args)
    most = config.max_position_embeddings
    context = args.context or most
    if context > most:
        raise ValueError(f"--context {context:,}: this model takes at most {most:,} tokens")
    shape = config.num_kv_heads, config.head_dim, DTYPES[args.kv_dtype].itemsize
    per_token, per_block = (block_bytes(config.num_layers, n, *shape) for n in (1, args.block_size))
    memory = args.memory or usable_memory()[0]
    pool = max(0, (memory - weights.nbytes) // per_block - 1)  # block 0 is padding
    each = blocks_needed(context, args.block_size)  # blocks of a request at full length
    kv_bytes = (args.concurrency * each + 1) * per_block
    total = weights.nbytes + kv_bytes
    bandwidth, rate = measured_rates(args)
    prefill_s = prefill_floor(rate, weights.layer_parameters, context)
    floors = {b: decode_floor(bandwidth, weights.step_bytes, b * per_token * context) for b in (1, args.concurrency)}
    return {
        "model": args.model,
        "parameters": weights.parameters,
        "quant": args.quant,
        "dtype": args.dtype,
        "weight_bytes": weights.nbytes,
        "step_bytes": weights.step_bytes,
        "bits_per_weight": round(8 * weights.nbytes / weights.parameters, 3),
        "kv_dtype": args.kv_dtype,
        "kv_bytes_per_token": per_token,
        "context": context,
        "kv_bytes_per_request": each * per_block,
        "concurrency": args.concurrency,
        "kv_bytes": kv_bytes,
        "total_bytes": total,
        "memory_bytes": memory,
        "fits": total <= memory,
        "short_bytes": max(0, total - memory),
        "pool_tokens": pool * args.block_size,
        "max_concurrency": pool // each,
        "max_context": min(pool // args.concurrency * args.block_size, most),
        "bandwidth_gb_s": round(bandwidth / 1e9, 2),
        "gflops": round(rate / 1e9, 1),
        "decode_floor_tok_s": {str(b): round(b * floor, 2) for b, floor in floors.items()},
        "prefill_floor_s": prefill_s,
        "prefill_floor_tok_s": round(context / prefill_s, 1),
    }


def measured_rates(args: argparse.Namespace) -> tuple[float, float]:
    """Bytes and operations per second: those given, else this machine's. Quantised products are summed as integers."""
    kernels.set_threads(args.threads or usable_threads()[0])
    bandwidth = args.bandwidth * 1e9 if args.bandwidth else read_bandwidth()
    dense = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32  # few CPUs multiply in float16
    return bandwidth, args.gflops * 1e9 if args.gflops else matrix_rate(torch.int8 if args.quant else dense)


def as_text(figures: dict) -> str:
    """The figures with bytes in GiB or MiB, and the verdict."""

    def size(nbytes: int) -> str:
        return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"

    rows = {name: size(value) if "bytes" in name else value for name, value in figures.items()}
    spare = size(figures["memory_bytes"] - figures["total_bytes"])
    verdict = f"fits, {spare} to spare" if figures["fits"] else f"does not fit, short by {rows['short_bytes']}"
    if not figures["pool_tokens"]:
        verdict += ": take fewer bits a weight (--quant int8 or int4) or more --memory"
    return f"{lines(rows)}\n{verdict}"


# ---- the command


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench.py size", description="What a model needs, and what fits.")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--model", metavar="M", help="a name, a folder, a .gguf file: counted, not loaded")
    parser.add_argument("--params", type=float, metavar="N", help="of a model not at hand: parameters, such as 8e9")
    for name in SHAPE[1:-1]:
        parser.add_argument(flag(name), type=int, metavar="N")
    parser.add_argument("--tied", action="store_true", help="the embedding table is the head as well")
    parser.add_argument("--context", type=int, metavar="N", help="tokens of a request; default: all the model takes")
    parser.add_argument("--concurrency", type=int, default=1, metavar="C", help="requests at once")
    parser.add_argument("--quant", choices=list(SCHEMES))
    floats = [*DTYPES, *SHORT]
    parser.add_argument("--dtype", default="float32", choices=floats, help="of dense weights; default as on a CPU")
    parser.add_argument("--kv-dtype", choices=floats, help="of keys and values; default: that of --dtype")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens of a KV page")
    memory = value_of(parse_memory)
    parser.add_argument("--memory", type=memory, metavar="BYTES", help="such as 24G; default: what is free here")
    parser.add_argument("--bandwidth", type=float, metavar="GB/S", help="default: measured here")
    parser.add_argument("--gflops", type=float, metavar="G", help="billion operations a second; default: measured here")
    parser.add_argument("--threads", type=int, metavar="N", help="of the two measurements")
    args = parser.parse_args(argv)
    check(args, given(parser, argv, args))
    args.dtype, args.kv_dtype = (SHORT.get(name, name) for name in (args.dtype, args.kv_dtype or args.dtype))
    return args


def check(args: argparse.Namespace, words: set[str]) -> None:
    """Refuse numbers that mean nothing and shapes that are given twice or in part; `words`: the flags given."""
    for name in words:
        value, least, most = getattr(args, name), 1e-6 if name in RATES else 1, 1e5 if name == "layers" else 1e18
        if isinstance(value, (int, float)) and not least <= value <= most:
            raise ValueError(f"{flag(name)} {value}: must be from {least:g} to {most:g}")
    needed = ["layers", "kv_heads", "head_dim", "context", *COUNTED[: 0 if args.params else 3]]
    if missing := [flag(name) for name in needed if name not in words and not args.model]:
        raise ValueError(
            f"{', '.join(missing)} missing: give --model, or --layers --kv-heads --head-dim --context with either "
            "--params or --hidden --intermediate --vocab"
        )
    refuse_unused(
        words,
        (SHAPE, not args.model, "--model has a shape of its own; leave it out"),
        (COUNTED, args.params is None, "--params says how many weights there are; leave it out"),
        (["threads"], not (args.bandwidth and args.gflops), "nothing is left to measure; leave it out"),
    )
    if args.heads and args.heads % args.kv_heads:
        raise ValueError(f"--kv-heads {args.kv_heads}: must divide --heads {args.heads}, since query heads share them")


@as_command
def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    figures = size(args)
    print(json.dumps(figures) if args.json else as_text(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
