"""The hot operations of a decoder step, each registered as a torch op with a readable reference.

The problem. A decode step of a small model spends its time in very few places: reading the weights once (the linear
layers), reading the live keys and values once (attention), and everything else, which is nearly all overhead: a
separate norm, a separate rotation, a separate addition each read and write the hidden state again and each cost a
call. So the step is cut into a few operations that move every byte once.

The idea. Each operation exists up to three times with one signature: the torch REFERENCE in this file (what it means),
C++ for the CPU (kernels.cpp, called by native/cpu.py) and, where the GPU is the point, Triton
(native/gpu.py). Those files are one concept, cut where a reader would pause. This file registers the operations
under `torch.ops.vitrine` with a fake, so that torch.compile sees an opaque node and no graph break, and picks the
implementation: `set_backend("native" | "reference" | "triton")`.

One decoder layer is six calls:

    hidden ─┬─ int4_linear(norm) ── rope_write_kv ── paged_attention ── int4_linear(residual) ─┬─ ...
            └──────────────────────────────────────────────────────────────────────────────────┘
        ... ─┬─ int4_linear(norm, silu_gate) ── int4_linear(residual) ─┬─ hidden
             └─────────────────────────────────────────────────────────┘

Quantised weights have one packed form for every backend: native/packing.py draws it.

Batch invariance. In the native backend the result of a row never depends on which other rows are in the call: one row,
few rows and many rows add in the same order, and attention walks the keys in fixed tiles from position 0. That is what
makes greedy decoding independent of batching, chunking and preemption bit for bit, and not just nearly.

Sources: paged attention, Kwon et al. 2023, section 4; online softmax, Milakov and Gimelshein 2018, Algorithm 3; 8-bit
activations per group of 32, the Q8_0 format of GGUF; rotary embedding, Su et al. 2021, section 3.4; SiLU-gated MLP,
Shazeer 2020, section 2.

Left out: gradients, training-time dropout, attention biases other than the sliding window, int4 without a minimum
(a symmetric code is the case min = -8 * scale).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from native import build as kernels_build
from native import cpu as kernels_native
from native import tape as kernels_tape
from native.packing import GROUP, TILE, pack_int4, pack_int8, unpack_int4, unpack_int8  # noqa: F401

# ---------------------------------------------------------------- the references


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. x [..., H], weight [H]."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x.dtype)


def rope_write_kv(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Split the fused projection, rotate q and k, store k and v in their slots; returns q [T, num_heads, head_dim].

    qkv [T, (num_heads + 2 * kv_heads) * head_dim]; positions int64 [T]; cos_sin float32 [max_pos, head_dim], the
    cosines in the first half of a row and the sines in the second (component i is paired with i + head_dim/2);
    caches [num_blocks, kv_heads, block_size, head_dim]; slot_mapping int64 [T], a negative slot is not written.
    With `q_norm`, `k_norm` [head_dim] every head is RMS-normalised before it is rotated (Qwen3).
    """
    _, kv_heads, block_size, head_dim = k_cache.shape
    heads = qkv.view(qkv.shape[0], num_heads + 2 * kv_heads, head_dim)
    q, k, v = heads.split((num_heads, kv_heads, kv_heads), dim=1)  # [T, heads, head_dim] each
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, head_dim/2]
    # No choosing of rows: how many there are would have to come back from a GPU, which a CUDA graph cannot wait for.
    written = (slot_mapping >= 0)[:, None, None]
    slots = slot_mapping.clamp(min=0)
    block, offset = slots // block_size, slots % block_size
    for cache, rows in ((k_cache, _rotate(k, cos, sin)), (v_cache, v)):
        cache[block, :, offset] = torch.where(written, rows.to(cache.dtype), cache[block, :, offset])
    return _rotate(q, cos, sin).to(qkv.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Causal attention of a flat run of query rows over paged keys and values -> [T, heads, head_dim].

    q [T, heads, head_dim]; caches [num_blocks, kv_heads, block_size, head_dim]; block_tables int32 [S, max_blocks];
    query_start int32 [S + 1], sequence s owns rows query_start[s]:query_start[s + 1], the last tokens of its
    context_lens[s] (int32 [S], this step's included). A query at position p sees keys j <= p, and with `window` > 0
    only j > p - window. Rows that belong to no sequence are padding and come back as zeros.
    """
    out = torch.zeros_like(q)
    _, kv_heads, _, head_dim = k_cache.shape
    starts, lens = query_start.tolist(), context_lens.tolist()
    for s, length in enumerate(lens):
        rows = slice(starts[s], starts[s + 1])
        n = rows.stop - rows.start
        if n == 0:
            continue
        keys, values = (_gather_context(c, block_tables[s], length) for c in (k_cache, v_cache))
        query = q[rows].float().view(n, kv_heads, -1, head_dim)  # [n, kv_heads, group, head_dim]
        scores = torch.einsum("nhgd,hjd->hgnj", query, keys) * scale
        position = torch.arange(length - n, length, device=q.device)[:, None]  # [n, 1]
        j = torch.arange(length, device=q.device)[None]  # [1, context]
        hidden = j > position
        if window > 0:
            hidden |= j <= position - window
        probs = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hgnj,hjd->nhgd", probs, values).reshape(n, -1, head_dim).to(q.dtype)
    return out


def _gather_context(cache: Tensor, block_table: Tensor, length: int) -> Tensor:  # -> float32 [kv_heads, length, d]
    _, kv_heads, block_size, head_dim = cache.shape
    blocks = cache[block_table[: -(-length // block_size)].long()]  # [n, kv_heads, block_size, head_dim]
    return blocks.transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, :length].float()


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up; gate_up [..., 2 * I] with the gate in the first half -> [..., I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def int4_linear(
    x: Tensor,
    packed: Tensor,
    out_features: int,
    group_size: int,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    silu_gate: bool = False,
    activation: str = "int8",
) -> Tensor:
    """x [..., K] times the packed int4 weight -> [..., out_features], with what usually surrounds a product fused in.

    In this order: RMS norm of x with `norm_weight`; the product; + `bias`; with `silu_gate` the two halves of the
    outputs become silu(gate) * up (so [..., out_features / 2] is returned); + `residual`.
    `activation` "int8" rounds x per row and group of 32 to 8 bits with a float scale (amax / 127), "float" keeps it.
    """
    return _linear(
        _dense_product, 4, x, packed, out_features, group_size, bias, norm_weight, eps, residual, silu_gate, activation
    )


def int8_linear(
    x: Tensor,
    packed: Tensor,
    out_features: int,
    group_size: int,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    silu_gate: bool = False,
    activation: str = "int8",
) -> Tensor:
    """As `int4_linear`, over int8 weights; `group_size` 0 means one float32 scale per output channel."""
    return _linear(
        _dense_product, 8, x, packed, out_features, group_size, bias, norm_weight, eps, residual, silu_gate, activation
    )


def _dense_product(x: Tensor, packed: Tensor, out_features: int, group_size: int, bits: int) -> Tensor:
    unpack = unpack_int4 if bits == 4 else unpack_int8
    return x @ unpack(packed, x.shape[-1], group_size)[:out_features].t()


def _linear(
    product, bits, x, packed, out_features, group_size, bias=None, norm_weight=None, eps=0.0, residual=None,
    silu_gate=False, activation="int8",
) -> Tensor:  # fmt: skip
    """What surrounds `product`, which is the dense one above or Triton's."""
    wide = x.float()
    if norm_weight is not None:
        wide = rms_norm(wide, norm_weight, eps)
    if activation == "int8":
        wide = round_to_int8(wide)
    elif activation != "float":
        raise ValueError(f"activation {activation!r} is unknown: choose int8 or float")
    y = product(wide, packed, out_features, group_size, bits)
    if bias is not None:
        y = y + bias.float()
    if silu_gate:
        y = silu_mul(y)
    return (y if residual is None else y + residual.float()).to(x.dtype)


def round_to_int8(x: Tensor) -> Tensor:
    """What "int8" activations do to x [..., K]: per group of 32, code = round(x * 127 / amax), value = code * scale."""
    groups = F.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(amax, 127.0) / amax  # a number / tensor would multiply by the rounded 1 / amax
    codes = torch.round(groups * torch.where(amax > 0, inverse, 0.0))  # halves to even, as the CPU does
    return (codes * (amax / 127.0)).flatten(-2)[..., : x.shape[-1]]


def int4_embedding(ids: Tensor, packed: Tensor, in_features: int, group_size: int) -> Tensor:
    """Rows `ids` [...] of the packed int4 table, dequantised -> float32 [..., in_features]."""
    return _embedding(ids, packed, in_features, group_size, unpack_int4)


def int8_embedding(ids: Tensor, packed: Tensor, in_features: int, group_size: int) -> Tensor:
    """Rows `ids` [...] of the packed int8 table, dequantised -> float32 [..., in_features]."""
    return _embedding(ids, packed, in_features, group_size, unpack_int8)


def _embedding(ids: Tensor, packed: Tensor, in_features: int, group_size: int, unpack) -> Tensor:
    flat = ids.flatten()
    tiles = unpack(packed[flat // TILE], in_features, group_size).view(-1, TILE, in_features)
    rows = tiles[torch.arange(flat.numel(), device=ids.device), flat % TILE]
    return rows.view(*ids.shape, in_features)


# ---------------------------------------------------------------- registration and dispatch

_LINEAR = (
    "(Tensor x, Tensor packed, int out_features, int group_size, Tensor? bias=None, Tensor? norm_weight=None, "
    'float eps=0.0, Tensor? residual=None, bool silu_gate=False, str activation="int8") -> Tensor'
)
_EMBEDDING = "(Tensor ids, Tensor packed, int in_features, int group_size) -> Tensor"
_SCHEMAS = {
    rms_norm: "(Tensor x, Tensor weight, float eps) -> Tensor",
    rope_write_kv: "(Tensor qkv, Tensor positions, Tensor cos_sin, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor slot_mapping, int num_heads, Tensor? q_norm=None, Tensor? k_norm=None, float eps=0.0) -> Tensor",
    paged_attention: "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor query_start, "
    "Tensor context_lens, float scale, int window=0) -> Tensor",
    silu_mul: "(Tensor gate_up) -> Tensor",
    int4_linear: _LINEAR,
    int8_linear: _LINEAR,
    int4_embedding: _EMBEDDING,
    int8_embedding: _EMBEDDING,
}


def _fake_linear(x, packed, out_features, group_size, *rest, silu_gate=False, **_):
    gated = rest[4] if len(rest) > 4 else silu_gate
    return x.new_empty((*x.shape[:-1], out_features // 2 if gated else out_features))


def _fake_rope(qkv, positions, cos_sin, k_cache, v_cache, slot_mapping, num_heads, *rest, **_):
    return qkv.new_empty((qkv.shape[0], num_heads, k_cache.shape[3]))


def _fake_embedding(ids, packed, in_features, group_size):
    return packed.new_empty((*ids.shape, in_features), dtype=torch.float32)


_FAKES = {
    rms_norm: lambda x, weight, eps: x.new_empty(x.shape),
    rope_write_kv: _fake_rope,
    paged_attention: lambda q, *rest, **_: q.new_empty(q.shape),
    silu_mul: lambda gate_up: gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2)),
    int4_linear: _fake_linear,
    int8_linear: _fake_linear,
    int4_embedding: _fake_embedding,
    int8_embedding: _fake_embedding,
}

_reference_of = {reference.__name__: reference for reference in _SCHEMAS}
_on_cpu, _on_cuda = dict(_reference_of), dict(_reference_of)  # op name -> implementation in use
_library = torch.library.Library("vitrine", "DEF")


def _register(name: str, schema: str, fake) -> None:
    _library.define(name + schema)
    _library.impl(name, lambda *args, **kwargs: _on_cpu[name](*args, **kwargs), "CPU")
    _library.impl(name, lambda *args, **kwargs: _on_cuda[name](*args, **kwargs), "CUDA")
    torch.library.register_fake(f"vitrine::{name}", fake, lib=_library)


for _op, _schema in _SCHEMAS.items():
    _register(_op.__name__, _schema, _FAKES[_op])

_backend = "reference"


def set_backend(name: str) -> str:
    """Choose the implementation behind `torch.ops.vitrine` and return the name of the one now in use.

    "native" is C++ on the CPU, and Triton for tensors on a GPU where Triton is installed. Without a working compiler it
    becomes "reference", with one note on stderr that says why. "triton" on the CPU needs TRITON_INTERPRET=1.
    """
    global _backend
    if name not in ("native", "reference", "triton"):
        raise ValueError(f"kernels backend {name!r} is unknown: choose native, reference or triton")
    on_gpu = {}
    if name == "triton" or name == "native" and torch.cuda.is_available():
        on_gpu = _triton_operations(required=name == "triton")
    if name == "native":
        try:
            kernels_build.load()
        except kernels_build.BuildError as error:
            print(f"kernels: {error}\nkernels: using the slow torch reference instead", file=sys.stderr)
            name = "reference"
    on_cpu = {"native": {op: getattr(kernels_native, op) for op in _reference_of}, "triton": on_gpu}.get(name, {})
    _on_cpu.update(_reference_of | on_cpu)
    _on_cuda.update(_reference_of | on_gpu)
    _backend = name
    return name


def _triton_operations(required: bool) -> dict[str, Callable]:
    """The operations that exist in Triton; the others are cheap on a GPU and keep their references."""
    try:
        from native import gpu as kernels_triton
    except ImportError as error:
        if not required:
            return {}
        raise ValueError(f"the triton backend needs the triton package ({error}): pip install triton") from error
    return {
        "paged_attention": kernels_triton.paged_attention,
        "int4_linear": partial(_linear, kernels_triton.product, 4),
        "int8_linear": partial(_linear, kernels_triton.product, 8),
    }


def backend() -> str:
    """The backend in use."""
    return _backend


def use_device(device: torch.device) -> None:
    """Have this thread launch on `device` from now on: which GPU is the current one, CUDA keeps for each thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def set_threads(n: int) -> None:
    """Threads of the native backend, the caller's included. What no machine has would end the process, not raise."""
    if not 1 <= n <= 1024:
        raise ValueError(f"threads={n}: must be from 1 to 1024")
    kernels_build.set_threads(n)


def threads() -> int:
    """What `set_threads` set, or torch's own number before that."""
    return kernels_build.threads


def record() -> kernels_tape.Tape:
    """`with record() as tape: step()` runs a step and keeps it; `tape.replay()` runs it again in one call.

    Only operations of `torch.ops.vitrine`, views and row copies may be inside, on tensors whose memory stays in place;
    new inputs are written into the old tensors first. What the step returned is overwritten by every replay.
    """
    if _backend != "native":
        raise ValueError(f"a tape records native kernels, and the backend is {_backend!r}: call set_backend('native')")
    return kernels_tape.Tape()
