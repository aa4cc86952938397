"""What a model needs and what a machine can do with it, computed before anything is loaded.

    python bench.py size --model smollm2 --quant int4 --context 2048 --concurrency 16
    python bench.py size --params 8e9 --layers 32 --kv-heads 8 --head-dim 128 --context 8192 --concurrency 16 \\
        --quant int4 --kv-dtype fp16 --memory 24G --bandwidth 100 --gflops 2000

The problem. "Will it fit, and how fast could it be?" is asked before a download, not after an out-of-memory error.

The idea. Four formulas answer it. Only the two rates need a clock, and they can be given instead.

    weights         parameters x bits / 8, and 4 bytes of scale and minimum a group: int4 in groups of 32 is 5.0 bits
    KV of a token   2 x layers x kv_heads x head_dim x bytes of an element
    decode          tokens/s <= batch x bandwidth / (weight bytes + KV bytes of the batch)
    prefill         seconds  >= 2 x parameters of the layers x tokens / operations a second

With --model the tensors are counted from the config. Without it, either the shape is given (--hidden, --intermediate,
--vocab) and counted, or --params, and every weight takes the bits of the scheme; --hidden and --vocab then say how
large the 8-bit tables are. Source: Kwon et al. 2023, section 3.
Left out: activations, the rotary table, Python and torch themselves.
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
from benchmarks.roofline import decode_floor, matrix_rate, prefill_floor, read_bandwidth
from checkpoint import Checkpoint, open_checkpoint
from formats.command_line import as_command, flag, given, refuse_unused, value_of
from formats.config import ModelConfig
from formats.families import tensor_shapes
from formats.layers import resolve_scheme, scheme_for
from generate import DTYPES
from kv_paged import block_bytes, blocks_needed, parse_memory
from native.machine import usable_memory, usable_threads
from quantize import SCHEMES, TABLES, Scheme, parse_scheme

SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
GIB = 2**30


@dataclass(frozen=True)
class Weights:
    """parameters: all of them; layer_parameters: those that every prompt token is multiplied with."""

    parameters: int
    layer_parameters: int
    nbytes: int
    step_bytes: int  # read in a decode step: all but the embedding table, unless that is the head as well


def tensor_bytes(ckpt: Checkpoint, name: str, shape: tuple[int, ...], scheme: Scheme | None, dtype: torch.dtype) -> int:
    """Bytes of one tensor as the loader will hold it."""
    if scheme is None or len(shape) == 1:  # norms and biases stay dense
        return math.prod(shape) * dtype.itemsize
    parts = scheme_for(ckpt, [name], scheme).layout(*shape)
    return sum(math.prod(size) * kind.itemsize for kind, size in parts.values())


def stored_bytes(ckpt: Checkpoint, name: str, dtype: torch.dtype) -> int:
    """Bytes of one tensor of a folder that quantize.py wrote: integers, or scales with 16 bits (a whole row's: 32)."""
    shape = ckpt.shape(name)
    kind = name.rpartition(".")[2]
    whole_row = kind == "scales" and shape[1] == 1 and name.replace(".scales", ".mins") not in ckpt.names()
    size = {"qweight": 1, "scales": 4 if whole_row else 2, "mins": 2}.get(kind, dtype.itemsize)
    return math.prod(shape) * size


def count_weights(config: ModelConfig, ckpt: Checkpoint, quant: str | None, dtype: torch.dtype) -> Weights:
    """All tensors that a config demands, from their shapes. Raises ValueError as `resolve_scheme` does."""
    shapes, scheme = tensor_shapes(config), resolve_scheme(ckpt, quant)
    if ckpt.quant is None:
        sizes = {name: tensor_bytes(ckpt, name, shape, scheme, dtype) for name, shape in shapes.items()}
    else:
        sizes = {name: stored_bytes(ckpt, name, dtype) for name in ckpt.names()}
    looked_up = 0 if config.tie_word_embeddings else sum(n for name, n in sizes.items() if "embed_tokens" in name)
    return Weights(
        sum(math.prod(shape) for shape in shapes.values()),
        sum(math.prod(shape) for name, shape in shapes.items() if len(shape) > 1 and name not in TABLES),
        sum(sizes.values()),
        sum(sizes.values()) - looked_up,
    )


def estimate_weights(parameters: int, table: int, tied: bool, scheme: Scheme | None, dtype: torch.dtype) -> Weights:
    """Every parameter at the bits of the scheme, but the tables, of `table` weights each (0: unknown), at 8 bits."""
    tables = table if tied else 2 * table
    if tables >= parameters:
        raise ValueError(f"--vocab x --hidden: the tables alone have {tables:,} weights, --params is {parameters:,}")
    each = table_each = float(dtype.itemsize)  # bytes of a weight
    if scheme is not None:
        each, table_each = bits_of(scheme) / 8, bits_of(SCHEMES["int8"] if scheme.bits == 4 else scheme) / 8
    nbytes = round((parameters - tables) * each + tables * table_each)
    return Weights(parameters, parameters - tables, nbytes, nbytes - (0 if tied else round(table * table_each)))


def bits_of(scheme: Scheme) -> float:
    """Bits a weight in a long row, scales and minima counted."""
    long = 4096
    parts = scheme.layout(1, long).values()
    return sum(math.prod(size) * kind.itemsize for kind, size in parts) * 8 / long


def shape_of(args: argparse.Namespace) -> tuple[ModelConfig | None, Weights]:
    """The weights of --model or of the shape that was given; of --params alone there is no config."""
    dtype, scheme = DTYPES[args.dtype], parse_scheme(args.quant)
    if args.model:
        ckpt = open_checkpoint(args.model)
        return ckpt.config, count_weights(ckpt.config, ckpt, args.quant, dtype)
    if args.params:
        table = args.hidden * args.vocab if args.hidden and args.vocab else 0
        return None, estimate_weights(round(args.params), table, args.tied, scheme, dtype)
    config = ModelConfig(
        architecture="llama", vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=args.intermediate,
        num_layers=args.layers, num_heads=args.heads or args.hidden // args.head_dim, num_kv_heads=args.kv_heads,
        head_dim=args.head_dim, rms_norm_eps=1e-5, rope_theta=1e4, rope_scaling=None,
        max_position_embeddings=args.context, tie_word_embeddings=args.tied, qkv_bias=False, o_bias=False,
        mlp_bias=False, qk_norm=False, sliding_window=(None,) * args.layers, bos_token_id=None, eos_token_ids=(),
        dtype=args.dtype,
    )  # fmt: skip
    return config, count_weights(config, Checkpoint(Path()), args.quant, dtype)  # a checkpoint without blocks


def size(args: argparse.Namespace) -> dict:
    """The figures as --json prints them, also for a machine that is too small."""
    config, weights = shape_of(args)
    layers, kv_heads, head_dim = args.layers, args.kv_heads, args.head_dim
    context = args.context
    if args.model:
        layers, kv_heads, head_dim = config.num_layers, config.num_kv_heads, config.head_dim
        most = config.max_position_embeddings
        context = context or most
        if context > most:
            raise ValueError(f"--context {context:,}: this model takes at most {most:,} tokens")
    kv_dtype = DTYPES[args.kv_dtype or args.dtype]
    layout = (layers, args.block_size, kv_heads, head_dim, kv_dtype.itemsize)
    per_token, per_block = block_bytes(layers, 1, *layout[2:]), block_bytes(*layout)
    memory = args.memory or usable_memory()[0]
    pool = max(0, (memory - weights.nbytes) // per_block - 1)  # block 0 is padding
    each = blocks_needed(context, args.block_size)  # blocks of a request at full length
    kv_bytes = (args.concurrency * each + 1) * per_block
    bandwidth, rate = measured_rates(args)
    floors = {
        b: b * decode_floor(bandwidth, weights.step_bytes, b * per_token * context) for b in (1, args.concurrency)
    }
    longest = pool // args.concurrency * args.block_size
    prefill_s = prefill_floor(rate, weights.layer_parameters, context)
    return {
        "model": args.model,
        "parameters": weights.parameters,
        "quant": args.quant,
        "dtype": args.dtype,
        "weight_bytes": weights.nbytes,
        "step_bytes": weights.step_bytes,
        "bits_per_weight": round(8 * weights.nbytes / weights.parameters, 3),
        "kv_dtype": args.kv_dtype or args.dtype,
        "kv_bytes_per_token": per_token,
        "context": context,
        "kv_bytes_per_request": each * per_block,
        "concurrency": args.concurrency,
        "kv_bytes": kv_bytes,
        "total_bytes": weights.nbytes + kv_bytes,
        "memory_bytes": memory,
        "fits": weights.nbytes + kv_bytes <= memory,
        "short_bytes": max(0, weights.nbytes + kv_bytes - memory),
        "pool_tokens": pool * args.block_size,
        "max_concurrency": pool // each,
        "max_context": min(longest, config.max_position_embeddings) if args.model else longest,
        "bandwidth_gb_s": round(bandwidth / 1e9, 2),
        "gflops": round(rate / 1e9, 1),
        "decode_floor_tok_s": {str(b): round(floor, 2) for b, floor in floors.items()},
        "prefill_floor_s": prefill_s,
        "prefill_floor_tok_s": round(context / prefill_s, 1),
    }


def measured_rates(args: argparse.Namespace) -> tuple[float, float]:
    """Bytes and operations per second: those given, else this machine's. Quantised products are summed as integers."""
    kernels.set_threads(args.threads or usable_threads()[0])
    bandwidth = args.bandwidth * 1e9 if args.bandwidth else read_bandwidth()
    if args.gflops:
        return bandwidth, args.gflops * 1e9
    kind = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32  # few CPUs multiply in float16
    return bandwidth, matrix_rate(torch.int8 if args.quant else kind)


def gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.1f} MiB"


def table(f: dict) -> str:
    """The figures as text."""
    spare, several, context = f["memory_bytes"] - f["total_bytes"], str(f["concurrency"]), f"{f['context']:,}"
    verdict = f"fits, {gib(spare)} to spare" if spare >= 0 else f"does not fit, short by {gib(-spare)}"
    kv = [f"{f['kv_bytes_per_token'] / 1024:,.1f} KiB a token ({f['kv_dtype']})"]
    kv += [f"{gib(f['kv_bytes_per_request'])} a request of {context} tokens", f"{gib(f['kv_bytes'])} for {several}"]
    decode = [f"{floor:,.1f} tok/s for {batch}" for batch, floor in f["decode_floor_tok_s"].items()]
    rows = {
        "parameters": f"{f['parameters']:,}",
        "weights": f"{gib(f['weight_bytes'])}, {f['quant'] or f['dtype']}: {f['bits_per_weight']:.2f} bits a weight",
        "KV": ", ".join(kv),
        "in all": f"{gib(f['total_bytes'])} of {gib(f['memory_bytes'])}: {verdict}",
        "what fits": f"{f['max_concurrency']:,} requests of {context} tokens, or {several} of {f['max_context']:,}; "
        f"{f['pool_tokens']:,} tokens in all"
        + ("" if f["pool_tokens"] else ": take fewer bits a weight (--quant int8 or int4) or more --memory"),
        "decode": f"at most {' and '.join(decode)} at full context ({f['bandwidth_gb_s']:,} GB/s)",
        "prefill": f"at least {f['prefill_floor_s']:,.2f} s for {context} tokens, "
        f"{f['prefill_floor_tok_s']:,.1f} tok/s ({f['gflops']:,} billion operations a second)",
    }
    return "\n".join(f"{name:12}{text}" for name, text in rows.items())


# ---- the command


def kind_of_float(text: str) -> str:
    name = SHORT.get(text, text)
    if name not in DTYPES:
        raise ValueError(f"use one of {', '.join([*DTYPES, *SHORT])}")
    return name


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench.py size", description="What a model needs, and what fits.")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--model", metavar="M", help="a name, a folder, a .gguf file: counted, not loaded")
    shape = parser.add_argument_group("a model that is not at hand")
    shape.add_argument("--params", type=float, metavar="N", help="parameters, such as 8e9")
    for name in ("layers", "kv-heads", "head-dim", "heads", "hidden", "intermediate", "vocab"):
        shape.add_argument(f"--{name}", type=int, metavar="N")
    shape.add_argument("--tied", action="store_true", help="the embedding table is the head as well")
    parser.add_argument("--context", type=int, metavar="N", help="tokens of a request; default: all the model takes")
    parser.add_argument("--concurrency", type=int, default=1, metavar="C", help="requests at once")
    parser.add_argument("--quant", choices=list(SCHEMES))
    floats = {"type": value_of(kind_of_float), "metavar": "TYPE"}
    parser.add_argument("--dtype", default="float32", **floats, help="of dense weights; default float32, as on a CPU")
    parser.add_argument("--kv-dtype", **floats, help="of keys and values; default: that of --dtype")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens of a KV page")
    memory = value_of(parse_memory)
    parser.add_argument("--memory", type=memory, metavar="BYTES", help="such as 24G; default: what is free here")
    parser.add_argument("--bandwidth", type=float, metavar="GB/S", help="default: measured here")
    parser.add_argument("--gflops", type=float, metavar="G", help="billion operations a second; default: measured here")
    parser.add_argument("--threads", type=int, metavar="N", help="of the two measurements")
    args = parser.parse_args(argv)
    check(args)
    unmeasured = "--bandwidth and --gflops leave nothing to measure; leave it out"
    refuse_unused(given(parser, argv, args), (["threads"], not (args.bandwidth and args.gflops), unmeasured))
    return args


def check(args: argparse.Namespace) -> None:
    """Refuse numbers that mean nothing and shapes that are given twice or in part."""
    given = [name for name in ("params", "layers", "kv_heads", "head_dim", "heads", "hidden", "intermediate", "vocab")]
    given = [name for name in given if getattr(args, name) is not None]
    for name in (*given, "context", "concurrency", "block_size", "bandwidth", "gflops", "threads"):
        value = getattr(args, name)
        if value is not None and (not 0 < value < math.inf or (name == "params" and value < 1)):
            raise ValueError(f"{flag(name)} {value}: must be a positive number")
    if args.model and (given or args.tied):
        raise ValueError(f"--model has a shape of its own: leave out {', '.join(map(flag, given or ['tied']))}")
    if args.model:
        return
    needed = ["layers", "kv_heads", "head_dim", "context"]
    needed += [] if args.params else ["hidden", "intermediate", "vocab"]
    missing = [flag(name) for name in needed if getattr(args, name) is None]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} missing: give --model, or --layers --kv-heads --head-dim --context with either "
            "--params or --hidden --intermediate --vocab"
        )
    if args.params and (args.intermediate or args.heads):
        raise ValueError("--params says how many weights there are: leave out --intermediate and --heads")
    if args.heads and args.heads % args.kv_heads:
        raise ValueError(f"--kv-heads {args.kv_heads}: must divide --heads {args.heads}, since query heads share them")
    if args.params and (args.hidden is None) != (args.vocab is None):
        raise ValueError("--hidden and --vocab together say how large the tables are: give both or none")
    if args.tied and not args.vocab:
        raise ValueError("--tied is about the tables: give --hidden and --vocab too")


@as_command
def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    figures = size(args)
    print(json.dumps(figures) if args.json else table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
