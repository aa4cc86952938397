"""Paged attention and the quantised product on a GPU, in Triton.

The problem. A GPU hides memory latency only when thousands of programs run at once. A decode step offers few: one query
token per sequence and kv head, each of which must walk a long context alone, while most of the machine idles.

The idea. Cut the context, too. Every program takes a block of 16 query rows (what a matrix unit takes at least), one kv
head and one SPLIT of the keys, and leaves a partial result (largest score m, sum l of exp(score - m), weighted values);
a second, small kernel folds the splits of each row from first to last:

    grid = row blocks x kv heads x splits           keys  0 ... 511 │ 512 ... 1023 │ 1024 ... position
                                                          m, l, acc │  m, l, acc   │  m, l, acc
                                                               └──── fold ──────┴──────┘ ──► out

Splits are counted from position 0: a row's additions do not depend on what else is in the batch. Sources:
Flash-Decoding (Dao et al. 2023, blog); Milakov and Gimelshein 2018. Left out: tuning per device, 8-bit activations
inside the matrix unit. TRITON_INTERPRET=1 runs both on a CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from native.packing import GROUP, TILE, padded

ROWS = 16  # rows of a block: tokens x heads of a group
KEYS = 64  # keys of a tile
SPLIT = 512  # keys of a split


@triton.jit
def _sequence_of(block, query_start, sequences, TOKENS: tl.constexpr):
    """Sequence s owns the row blocks from query_start[s] // TOKENS + s on: room for its rows, in rising order."""
    low, high = 0, sequences
    while low + 1 < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // TOKENS + middle <= block:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _split_attention(
    q, k_cache, v_cache, block_tables, query_start, context_lens, partial, bounds, scale, softcap,
    sequences, max_blocks, heads, kv_heads, rows_total, window,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, GROUP_HEADS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    block, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    s = _sequence_of(block, query_start, sequences, TOKENS)
    start, end = tl.load(query_start + s), tl.load(query_start + s + 1)
    first = (block - start // TOKENS - s) * TOKENS  # first token of the block, within its sequence
    context = tl.load(context_lens + s)

    row, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    token, head = first + row // GROUP_HEADS, kv_head * GROUP_HEADS + row % GROUP_HEADS
    valid = (row // GROUP_HEADS < TOKENS) & (start + token < end)
    position = context - (end - start) + token  # [ROWS]
    at = ((start + token) * heads + head) * HEAD_DIM
    inside_row = valid[:, None] & (d < HEAD_DIM)
    query = tl.load(q + at[:, None] + d, mask=inside_row, other=0.0).to(tl.float32)

    m = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    last = tl.minimum(tl.max(tl.where(valid, position, -1)) + 1, (split + 1) * SPLIT)
    begin = 0  # the first key that any row of the block sees
    if window > 0:
        begin = tl.maximum(tl.min(tl.where(valid, position, context)) - window + 1, 0)
    for tile in range(tl.maximum(split * SPLIT, begin // KEYS * KEYS), last, KEYS):
        j = tile + tl.arange(0, KEYS)
        inside = (j >= begin) & (j < last)
        page = tl.load(block_tables + s * max_blocks + j // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        offset = ((page * kv_heads + kv_head) * BLOCK_SIZE + j % BLOCK_SIZE) * HEAD_DIM
        read = inside[:, None] & (d < HEAD_DIM)
        keys = tl.load(k_cache + offset[:, None] + d, mask=read, other=0.0).to(tl.float32)
        values = tl.load(v_cache + offset[:, None] + d, mask=read, other=0.0).to(tl.float32)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale  # [ROWS, KEYS]
        if softcap > 0:  # softcap * tanh(scores / softcap)
            scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
        seen = (j <= position[:, None]) & inside & valid[:, None]
        if window > 0:
            seen = seen & (j > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        largest = tl.maximum(m, tl.max(scores, 1))
        safe = tl.where(largest == float("-inf"), 0.0, largest)  # a row that has seen nothing yet
        weights = tl.exp(scores - safe[:, None])
        keep = tl.exp(m - safe)
        total = total * keep + tl.sum(weights, 1)
        acc = acc * keep[:, None] + tl.dot(weights, values, input_precision="ieee")
        m = largest
    to = (split * rows_total + start + token) * heads + head
    tl.store(bounds + 2 * to, m, mask=valid)
    tl.store(bounds + 2 * to + 1, total, mask=valid)
    tl.store(partial + to[:, None] * HEAD_DIM + d, acc, mask=inside_row)


@triton.jit
def _fold_splits(
    partial, bounds, out, query_start, sequences, heads, rows_total, splits,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, WIDTH)
    m, total, acc = float("-inf"), 0.0, tl.zeros((WIDTH,), tl.float32)
    if row < tl.load(query_start + sequences):  # rows beyond it belong to no sequence and stay zero
        for split in range(splits):
            at = (split * rows_total + row) * heads + head
            part = tl.load(bounds + 2 * at)
            if part != float("-inf"):
                largest = tl.maximum(m, part)
                keep, take = tl.exp(m - largest), tl.exp(part - largest)
                total = total * keep + tl.load(bounds + 2 * at + 1) * take
                acc = acc * keep + tl.load(partial + at * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0) * take
                m = largest
        acc = acc / total
    tl.store(out + (row * heads + head) * HEAD_DIM + d, acc.to(out.dtype.element_ty), mask=d < HEAD_DIM)


def paged_attention(
    q, k_cache, v_cache, block_tables, query_start, context_lens, scale, window=0, softcap=0.0
) -> Tensor:
    """As kernels.paged_attention: [T, heads, head_dim] over paged keys and values."""
    rows, heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    sequences, max_blocks = block_tables.shape
    if rows == 0 or sequences == 0:
        return torch.zeros_like(q)
    group = heads // kv_heads
    block_rows = max(ROWS, triton.next_power_of_2(group))
    tokens = block_rows // group
    splits = triton.cdiv(max_blocks * block_size, SPLIT)  # the longest context possible: the real one is on the device
    partial, bounds = (q.new_empty((splits, rows, heads, n), dtype=torch.float32) for n in (head_dim, 2))
    out, width = torch.empty_like(q), max(16, triton.next_power_of_2(head_dim))
    _split_attention[(rows // tokens + sequences, kv_heads, splits)](
        q.contiguous(), k_cache, v_cache, block_tables.contiguous(), query_start, context_lens, partial, bounds, scale,
        float(softcap), sequences, max_blocks, heads, kv_heads, rows, window,
        BLOCK_SIZE=block_size, HEAD_DIM=head_dim, WIDTH=width, GROUP_HEADS=group, TOKENS=tokens,
        ROWS=block_rows, KEYS=KEYS, SPLIT=SPLIT,
    )  # fmt: skip
    _fold_splits[(rows, heads)](
        partial, bounds, out, query_start, sequences, heads, rows, splits, HEAD_DIM=head_dim, WIDTH=width
    )
    return out


@triton.jit
def _product(
    x, packed, y, rows, n, k, groups, tile_bytes, repeat,
    BITS: tl.constexpr, PARAM: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """x [rows, k] times the packed tiles, 32 inputs at a time; the codes are opened up in registers.

    PARAM is the type of the scales; int4 has a minimum behind each 16 of them. `repeat` groups of 32 share a scale.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    i = tl.arange(0, 32)  # inputs of a group
    step, inside = i // 4, channel < n
    tile = packed + (channel // 16).to(tl.int64) * tile_bytes  # [CHANNELS]
    chunk = step % 4 if BITS == 4 else step
    offset = (chunk * 64 + i % 4)[:, None] + (channel % 16 * 4)[None]  # [32, CHANNELS]
    params = (tile + groups * 64 * BITS).to(tl.pointer_type(PARAM)) + channel % 16
    acc = tl.zeros((ROWS, CHANNELS), tl.float32)
    for g in range(groups):
        code = tl.load(tile[None] + g * 64 * BITS + offset, mask=inside[None], other=0)
        at = params + g // repeat * (32 if BITS == 4 else 16)
        scale = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if BITS == 4:
            low = tl.load(at + 16, mask=inside, other=0.0).to(tl.float32)
            nibble = (code >> (step // 4 * 4).to(tl.uint8)[:, None]) & 15
            weight = nibble.to(tl.float32) * scale[None] + low[None]  # [32, CHANNELS]
        else:
            weight = code.to(tl.int8, bitcast=True).to(tl.float32) * scale[None]
        column = g * 32 + i
        values = tl.load(x + row[:, None] * k + column, mask=(row < rows)[:, None] & (column < k), other=0.0)
        acc += tl.dot(values, weight, input_precision="ieee")
    tl.store(y + row[:, None] * n + channel, acc, mask=(row < rows)[:, None] & inside[None])


def product(x: Tensor, packed: Tensor, out_features: int, group_size: int, bits: int) -> Tensor:
    """float32 x [..., K] times the packed weight -> [..., out_features], the activations as they are."""
    k = x.shape[-1]
    flat = x.reshape(-1, k).contiguous()
    y = torch.empty((flat.shape[0], out_features), dtype=torch.float32, device=x.device)
    if flat.shape[0]:
        groups, channels = padded(k, group_size) // GROUP, 2 * TILE
        _product[(triton.cdiv(flat.shape[0], ROWS), triton.cdiv(out_features, channels))](
            flat, packed, y, flat.shape[0], out_features, k, groups, packed.shape[1], group_size // GROUP or groups,
            BITS=bits, PARAM=tl.float16 if group_size else tl.float32, ROWS=ROWS, CHANNELS=channels,
        )  # fmt: skip
    return y.view(*x.shape[:-1], out_features)
