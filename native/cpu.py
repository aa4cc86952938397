"""The operations of kernels.py for the C++ kernels: the arguments as one struct each, and the checks before them.

Every function here has the name and signature of its reference in kernels.py. It computes nothing. What it must do is
refuse, before memory is touched, whatever would make C++ read or write past the end of a tensor:

    torch tensors ──► shapes agree? types known? contiguous float32? ──► struct (native/tape.py) ──► kernels.cpp

Activations in other types are converted on the way in and back on the way out; the caches are read in their own type.
"""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor

from native import build
from native.packing import TILE, padded
from native.tape import Operation, empty, header, ready

CACHE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

RMS_NORM = Operation("RmsNorm", "const float *x, *weight; float* y; int64_t rows, n; float eps;")
SILU_MUL = Operation("SiluMul", "const float* x; float* y; int64_t rows, n;")  # x is [rows, 2 * n]
ROPE = Operation("Rope", """
    int64_t cache_type;  // 0 float32, 1 bfloat16, 2 float16
    const float* qkv;  // [rows, (heads + 2 * kv_heads) * head_dim]
    const int64_t* positions;
    const float* cos_sin;  // [max_positions, rotary_dim]
    void *k_cache, *v_cache;  // [num_blocks, kv_heads, block_size, head_dim]
    const int64_t* slots;
    const float *q_norm, *k_norm;  // [head_dim] or null
    float* q;  // [rows, heads, head_dim]
    int64_t rows, heads, kv_heads, num_blocks, block_size, head_dim, max_positions, rotary_dim;
    float eps;
""")  # fmt: skip
ATTENTION = Operation("Attention", """
    int64_t cache_type;
    const float* q;  // [rows, heads, head_dim]
    const void *k_cache, *v_cache;  // [num_blocks, kv_heads, block_size, head_dim]
    const int32_t *block_tables, *query_start, *context_lens;  // [S, max_blocks], [S + 1], [S]
    float* out;  // [rows, heads, head_dim]
    int64_t rows, sequences, max_blocks, heads, kv_heads, num_blocks, block_size, head_dim, window;
    float scale, softcap;  // softcap 0: none
""")  # fmt: skip
LINEAR = Operation("Linear", """
    int64_t bits;
    const float* x;  // [rows, k]
    const uint8_t* w;  // [tiles, tile_bytes]
    const float *bias, *norm, *residual;  // [n], [k], [rows, n or n / 2], each of them or null
    float* y;  // [rows, n or n / 2]
    int64_t rows, k, n, group_size;  // group_size 0: one float scale per channel
    bool silu_gate, float_activation;
    float eps;
""")  # fmt: skip
EMBEDDING = Operation("Embedding", """
    int64_t bits;
    const int64_t* ids;  // [count]
    const uint8_t* table;  // [tiles, tile_bytes]
    float* y;  // [count, k]
    int64_t count, k, group_size, tile_bytes, tiles;
""")  # fmt: skip
DRAW = Operation("Draw", """
    const float* x;  // [limit, n]
    const int64_t* rows;  // [count]
    const void* drawings;  // [count, 6] doubles: Drawing of sampling.h
    int64_t* tokens;  // [count]
    int64_t count, limit, n;
""")  # fmt: skip


def load(extra_flags: tuple[str, ...] = ()) -> str:
    """Build the kernels if the cache has none, load them, and return their instruction set."""
    if build.library is None or extra_flags:
        build.load(build.build(header(), extra_flags))
    return build.library.isa


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide, weight = ready(x), ready(weight)
    out, n = empty(wide.shape), weight.shape[0]
    RMS_NORM(x=wide, weight=weight, y=out, rows=wide.numel() // n, n=n, eps=eps)
    return out.to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    wide, n = ready(gate_up), gate_up.shape[-1] // 2
    out = empty((*wide.shape[:-1], n))
    SILU_MUL(x=wide, y=out, rows=out.numel() // max(n, 1), n=n)
    return out.to(gate_up.dtype)


def _cache_type(k: Tensor, v: Tensor) -> int:
    if k.dtype not in CACHE_TYPES or k.dtype is not v.dtype:
        raise ValueError(f"caches of {k.dtype} and {v.dtype}: both must be float32, bfloat16 or float16")
    if not (k.is_contiguous() and v.is_contiguous()):
        raise ValueError("the caches must be contiguous [num_blocks, kv_heads, block_size, head_dim] tensors")
    return CACHE_TYPES[k.dtype]


def rope_write_kv(
    qkv, positions, cos_sin, k_cache, v_cache, slot_mapping, num_heads, q_norm=None, k_norm=None, eps=0.0
) -> Tensor:
    num_blocks, kv_heads, block_size, head_dim = k_cache.shape
    wide, cos_sin = ready(qkv), ready(cos_sin)
    (rows, width), needed = wide.shape, (num_heads + 2 * kv_heads) * head_dim
    if width != needed or cos_sin.shape[1] > head_dim or cos_sin.shape[1] % 2:
        raise ValueError(
            f"qkv has {width} columns and the rotary table {cos_sin.shape[1]}, but {num_heads} + 2 * {kv_heads} "
            f"heads of {head_dim} need {needed} and an even number up to {head_dim}"
        )
    q = empty((rows, num_heads, head_dim))
    ROPE(
        cache_type=_cache_type(k_cache, v_cache), qkv=wide, positions=ready(positions, torch.int64), cos_sin=cos_sin,
        k_cache=k_cache, v_cache=v_cache, slots=ready(slot_mapping, torch.int64), q_norm=ready(q_norm),
        k_norm=ready(k_norm), q=q, rows=rows, heads=num_heads, kv_heads=kv_heads, num_blocks=num_blocks,
        block_size=block_size, head_dim=head_dim, max_positions=cos_sin.shape[0], rotary_dim=cos_sin.shape[1], eps=eps,
    )  # fmt: skip
    return q.to(qkv.dtype)


def paged_attention(
    q, k_cache, v_cache, block_tables, query_start, context_lens, scale, window=0, softcap=0.0
) -> Tensor:
    num_blocks, kv_heads, block_size, head_dim = k_cache.shape
    wide, tables = ready(q), ready(block_tables, torch.int32)
    rows, heads, dim = wide.shape
    if dim != head_dim or heads % kv_heads:
        raise ValueError(f"q has {heads} heads of {dim}, the cache {kv_heads} heads of {head_dim}: they do not fit")
    out = empty(wide.shape)
    ATTENTION(
        cache_type=_cache_type(k_cache, v_cache), q=wide, k_cache=k_cache, v_cache=v_cache, block_tables=tables,
        query_start=ready(query_start, torch.int32), context_lens=ready(context_lens, torch.int32), out=out, rows=rows,
        sequences=len(context_lens), max_blocks=tables.shape[1], heads=heads, kv_heads=kv_heads, num_blocks=num_blocks,
        block_size=block_size, head_dim=head_dim, window=window, scale=scale, softcap=softcap,
    )  # fmt: skip
    return out.to(q.dtype)


@lru_cache(maxsize=256)
def packed_bytes(bits: int, in_features: int, group_size: int) -> int:
    """Bytes of one tile of 16 channels in the packed forms of native/packing.py."""
    k = padded(in_features, group_size)
    params = k // group_size * (64 if bits == 4 else 32) if group_size else 64
    return k * TILE * bits // 8 + params


def _linear(
    bits, x, packed, out_features, group_size, bias=None, norm_weight=None, eps=0.0, residual=None,
    silu_gate=False, activation="int8",
) -> Tensor:  # fmt: skip
    k, width = x.shape[-1], out_features // 2 if silu_gate else out_features
    if packed.shape != (-(-out_features // TILE), packed_bytes(bits, k, group_size)):
        raise ValueError(
            f"int{bits} weight {tuple(packed.shape)} is not that of [{out_features}, {k}] in groups of {group_size}"
        )
    shapes = {"bias": (out_features,), "norm_weight": (k,), "residual": (*x.shape[:-1], width)}
    for (name, shape), t in zip(shapes.items(), (bias, norm_weight, residual), strict=True):
        if t is not None and t.shape != shape:
            raise ValueError(f"{name} has shape {tuple(t.shape)}, this product needs {shape}")
    out = empty(shapes["residual"])
    LINEAR(
        bits=bits, x=ready(x), w=packed, bias=ready(bias), norm=ready(norm_weight), residual=ready(residual), y=out,
        rows=out.numel() // max(width, 1), k=k, n=out_features, group_size=group_size, silu_gate=silu_gate,
        float_activation=activation == "float", eps=eps,
    )  # fmt: skip
    return out.to(x.dtype)


def _embedding(bits: int, ids: Tensor, packed: Tensor, in_features: int, group_size: int) -> Tensor:
    tiles, tile_bytes = packed.shape
    if tile_bytes != packed_bytes(bits, in_features, group_size):
        raise ValueError(
            f"packed int{bits} table {tuple(packed.shape)} has no rows of {in_features} in groups of {group_size}"
        )
    out = empty((*ids.shape, in_features))
    EMBEDDING(
        bits=bits, ids=ready(ids, torch.int64), table=packed, y=out, count=ids.numel(), k=in_features,
        group_size=group_size, tile_bytes=tile_bytes, tiles=tiles,
    )  # fmt: skip
    return out


int4_linear, int8_linear = partial(_linear, 4), partial(_linear, 8)
int4_embedding, int8_embedding = partial(_embedding, 4), partial(_embedding, 8)


def draw(logits: Tensor, rows: list[int], drawings: list[tuple[float, ...]]) -> list[int]:
    """A token of each of the `rows` of logits [R, V], as `sampling.weigh` and `sampling.draw` define it.

    A drawing is (best, temperature, min_p, top_k, top_p, u): the row's largest logit, the filters, the uniform sample.
    """
    wide, count = ready(logits), len(rows)
    row_ids, tokens = torch.tensor(rows, dtype=torch.int64), torch.empty(count, dtype=torch.int64)
    numbers = torch.tensor(drawings, dtype=torch.float64).view(count, 6)
    DRAW(x=wide, rows=row_ids, drawings=numbers, tokens=tokens, count=count, limit=wide.shape[0], n=wide.shape[1])
    return tokens.tolist()
