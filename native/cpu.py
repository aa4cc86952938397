"""The operations of kernels.py for the C++ kernels: the checks, the pointers and the sizes.

Every function here has the name and signature of its reference in kernels.py and hands its arguments to kernels.cpp as
one run of words (native/tape.py draws it). Nothing is computed here. What it must do is refuse, before memory is
touched, whatever would make C++ read or write past the end of a tensor:

    torch tensors ──► shapes agree? types known? contiguous float32? ──► | op | n | pointers | sizes | ──► C++

Activations in other types are converted on the way in and back on the way out; the caches are read in their own type.
"""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor

from native.packing import TILE, padded
from native.tape import ATTENTION, DRAW, EMBEDDING, LINEAR, RMS_NORM, ROPE, SILU_MUL, call, empty, ready

CACHE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _pointer(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide, weight = ready(x), ready(weight)
    out = empty(wide.shape)
    n = weight.shape[0]
    rows = wide.numel() // n
    call(RMS_NORM, "5qd", wide.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, n, eps)
    return out.to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    wide = ready(gate_up)
    n = wide.shape[-1] // 2
    out = empty((*wide.shape[:-1], n))
    call(SILU_MUL, "4q", wide.data_ptr(), out.data_ptr(), out.numel() // max(n, 1), n)
    return out.to(gate_up.dtype)


def rope_write_kv(
    qkv, positions, cos_sin, k_cache, v_cache, slot_mapping, num_heads, q_norm=None, k_norm=None, eps=0.0
) -> Tensor:
    num_blocks, kv_heads, block_size, head_dim = k_cache.shape
    wide, positions, slots = ready(qkv), ready(positions, torch.int64), ready(slot_mapping, torch.int64)
    cos_sin = ready(cos_sin)
    q_norm, k_norm = (None if w is None else ready(w) for w in (q_norm, k_norm))
    rows, width = wide.shape
    if width != (num_heads + 2 * kv_heads) * head_dim or cos_sin.shape[1] != head_dim:
        raise ValueError(
            f"qkv has {width} columns and the rotary table {cos_sin.shape[1]}, but {num_heads} + 2 * {kv_heads} "
            f"heads of {head_dim} need {(num_heads + 2 * kv_heads) * head_dim} and {head_dim}"
        )
    q = empty((rows, num_heads, head_dim))
    call(
        ROPE,
        "17qd",
        _cache_type(k_cache, v_cache),
        *(_pointer(t) for t in (wide, positions, cos_sin, k_cache, v_cache, slots, q_norm, k_norm, q)),
        *(rows, num_heads, kv_heads, num_blocks, block_size, head_dim, cos_sin.shape[0], eps),
    )
    return q.to(qkv.dtype)


def paged_attention(q, k_cache, v_cache, block_tables, query_start, context_lens, scale, window=0) -> Tensor:
    num_blocks, kv_heads, block_size, head_dim = k_cache.shape
    wide = ready(q)
    tables, starts, lens = (ready(t, torch.int32) for t in (block_tables, query_start, context_lens))
    rows, heads, dim = wide.shape
    if dim != head_dim or heads % kv_heads:
        raise ValueError(f"q has {heads} heads of {dim}, the cache {kv_heads} heads of {head_dim}: they do not fit")
    out = empty(wide.shape)
    call(
        ATTENTION,
        "17qd",
        _cache_type(k_cache, v_cache),
        *(t.data_ptr() for t in (wide, k_cache, v_cache, tables, starts, lens, out)),
        *(rows, lens.shape[0], tables.shape[1], heads, kv_heads, num_blocks, block_size, head_dim, window, scale),
    )
    return out.to(q.dtype)


def _cache_type(k_cache: Tensor, v_cache: Tensor) -> int:
    if k_cache.dtype not in CACHE_TYPES or k_cache.dtype is not v_cache.dtype:
        raise ValueError(f"caches of {k_cache.dtype} and {v_cache.dtype}: both must be float32, bfloat16 or float16")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("the caches must be contiguous [num_blocks, kv_heads, block_size, head_dim] tensors")
    return CACHE_TYPES[k_cache.dtype]


@lru_cache(maxsize=256)
def packed_bytes(bits: int, in_features: int, group_size: int) -> int:
    """Bytes of one tile of 16 channels in the packed forms of native/packing.py."""
    k = padded(in_features, group_size)
    if bits == 4:
        return k * 8 + k // group_size * 64
    return k * 16 + (k // group_size * 32 if group_size else 64)


def _linear(
    bits, x, packed, out_features, group_size, bias=None, norm_weight=None, eps=0.0, residual=None,
    silu_gate=False, activation="int8",
) -> Tensor:  # fmt: skip
    k, width = x.shape[-1], out_features // 2 if silu_gate else out_features
    if packed.shape != (-(-out_features // TILE), packed_bytes(bits, k, group_size)):
        raise ValueError(
            f"int{bits} weight {tuple(packed.shape)} is not that of [{out_features}, {k}] in groups of {group_size}"
        )
    if activation not in ("int8", "float"):
        raise ValueError(f"activation {activation!r} is unknown: choose int8 or float")
    shape = (*x.shape[:-1], width)
    for name, given, wanted in (
        ("bias", bias, (out_features,)),
        ("norm_weight", norm_weight, (k,)),
        ("residual", residual, shape),
    ):
        if given is not None and given.shape != wanted:
            raise ValueError(f"{name} has shape {tuple(given.shape)}, this product needs {wanted}")
    wide = ready(x)
    bias, norm_weight, residual = (None if t is None else ready(t) for t in (bias, norm_weight, residual))
    out = empty(shape)
    call(
        LINEAR,
        "13qd",
        bits,
        *(_pointer(t) for t in (wide, packed, bias, norm_weight, residual, out)),
        *(out.numel() // max(width, 1), k, out_features, group_size, silu_gate, activation == "float", eps),
    )
    return out.to(x.dtype)


int4_linear, int8_linear = partial(_linear, 4), partial(_linear, 8)


def _embedding(bits: int, ids: Tensor, packed: Tensor, in_features: int, group_size: int) -> Tensor:
    tiles, tile_bytes = packed.shape
    if tile_bytes != packed_bytes(bits, in_features, group_size):
        raise ValueError(
            f"packed int{bits} table {tuple(packed.shape)} has no rows of {in_features} in groups of {group_size}"
        )
    ids = ready(ids, torch.int64)
    out = empty((*ids.shape, in_features))
    sizes = (ids.numel(), in_features, group_size, tile_bytes, tiles)
    call(EMBEDDING, "9q", bits, ids.data_ptr(), packed.data_ptr(), out.data_ptr(), *sizes)
    return out


int4_embedding, int8_embedding = partial(_embedding, 4), partial(_embedding, 8)


def draw(logits: Tensor, rows: list[int], drawings: list[tuple[float, ...]]) -> list[int]:
    """A token of each of the `rows` of logits [R, V], as `sampling.weigh` and `sampling.draw` define it.

    A drawing is (best, temperature, min_p, top_k, top_p, u): the row's largest logit, finite; the filters; and the
    uniform sample in [0, 1).
    """
    wide, count = ready(logits), len(rows)
    row_ids, numbers = torch.tensor(rows, dtype=torch.int64), torch.tensor(drawings, dtype=torch.float64)
    if numbers.shape != (count, 6):
        raise ValueError(f"{count} rows to draw from and drawings of shape {tuple(numbers.shape)}: six numbers each")
    tokens = torch.empty(count, dtype=torch.int64)
    call(DRAW, "7q", *(t.data_ptr() for t in (wide, row_ids, numbers, tokens)), count, *wide.shape)
    return tokens.tolist()
