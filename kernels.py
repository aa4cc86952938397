"""The hot operations of a decoder step, each registered as a torch op with a readable reference.

A separate norm, rotation or addition reads and writes the hidden state once more and costs a call. So the step is cut
into a few operations that move every byte once. Each has up to three implementations with one signature: the torch
REFERENCE in this file (what it means), C++ (native/cpu.py) and, where the GPU is the point, Triton (native/gpu.py).

    hidden ─┬─ int4_linear(norm) ── rope_write_kv ── paged_attention ── int4_linear(residual) ─┬─ ...
            └──────────────────────────────────────────────────────────────────────────────────┘

In the native backend a row's result never depends on which other rows are in the call: sums have one order, attention
walks the keys in fixed tiles from position 0. Greedy decoding is therefore bit for bit independent of batching,
chunking and preemption. Sources: paged attention, Kwon et al. 2023, section 4; online softmax, Milakov and Gimelshein
2018, Algorithm 3; SiLU-gated MLP, Shazeer 2020, section 2. Left out: gradients, dropout.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from formats.command_line import warn
from native import build, cpu
from native.packing import GROUP, TILE, pack_int4, pack_int8, unpack_int4, unpack_int8  # noqa: F401
from native.tape import Tape

_references: dict[str, Callable] = {}
_on_cpu: dict[str, Callable] = {}  # op name -> implementation in use
_on_cuda: dict[str, Callable] = {}
_library = torch.library.Library("vitrine", "DEF")
_backend = "reference"


def op(fake: Callable[..., Tensor], mutates: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
    """Register the reference below as torch.ops.vitrine.<its name>; the schema is that of its signature.

    `fake` makes an empty result of the right shape from the same arguments, so that torch.compile sees one opaque node
    and no graph break; `mutates` names the arguments that are written in place.
    """

    def register(reference: Callable) -> Callable:
        name = reference.__name__
        _references[name] = _on_cpu[name] = _on_cuda[name] = reference
        _library.define(name + torch.library.infer_schema(reference, mutates_args=mutates))
        _library.impl(name, lambda *args, **kwargs: _on_cpu[name](*args, **kwargs), "CPU")
        _library.impl(name, lambda *args, **kwargs: _on_cuda[name](*args, **kwargs), "CUDA")
        torch.library.register_fake(f"vitrine::{name}", fake, lib=_library)
        return reference

    return register


@op(fake=lambda x, weight, eps: x.new_empty(x.shape))
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. x [..., H], weight [H]."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x.dtype)


def _fake_rope(qkv, positions, cos_sin, k_cache, v_cache, slot_mapping, num_heads, *rest, **_) -> Tensor:
    return qkv.new_empty((qkv.shape[0], num_heads, k_cache.shape[3]))


@op(fake=_fake_rope, mutates=("k_cache", "v_cache"))
def rope_write_kv(
    qkv: Tensor, positions: Tensor, cos_sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
    num_heads: int, q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """Split the fused projection, rotate q and k, store k and v in their slots; returns q [T, num_heads, head_dim].

    qkv [T, (num_heads + 2 * kv_heads) * head_dim]; positions int64 [T]; cos_sin float32 [max_pos, D], the cosines in
    the first half of a row and the sines in the second: the first D <= head_dim components of a head rotate, i together
    with i + D/2; caches [num_blocks, kv_heads, block_size, head_dim]; slot_mapping int64 [T], a negative slot is not
    written. With `q_norm`, `k_norm` [head_dim] every head is RMS-normalised before it is rotated (Qwen3)."""
    _, kv_heads, block_size, head_dim = k_cache.shape
    heads = qkv.view(qkv.shape[0], num_heads + 2 * kv_heads, head_dim)
    q, k, v = heads.split((num_heads, kv_heads, kv_heads), dim=1)  # [T, heads, head_dim] each
    if q_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions].unsqueeze(1).tensor_split((half,), dim=-1)  # [T, 1, D/2]
    a, b, rest = torch.cat((q, k), dim=1).float().tensor_split((half, 2 * half), dim=-1)  # [T, heads, D/2, D/2, others]
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
    q, k = rotated.split((num_heads, kv_heads), dim=1)
    # No choosing of rows: how many there are would have to come back from a GPU, which a CUDA graph cannot wait for.
    written, slots = (slot_mapping >= 0)[:, None, None], slot_mapping.clamp(min=0)
    block, offset = slots // block_size, slots % block_size
    for cache, rows in ((k_cache, k), (v_cache, v)):
        cache[block, :, offset] = torch.where(written, rows.to(cache.dtype), cache[block, :, offset])
    return q.to(qkv.dtype).contiguous()


@op(fake=lambda q, *rest, **_: q.new_empty(q.shape))
def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, query_start: Tensor, context_lens: Tensor,
    scale: float, window: int = 0, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """Causal attention of a flat run of query rows over paged keys and values -> [T, heads, head_dim].

    Caches [num_blocks, kv_heads, block_size, head_dim]; block_tables int32 [S, max_blocks]; query_start int32 [S + 1]:
    sequence s owns rows query_start[s]:query_start[s + 1], the last tokens of its context_lens[s] (int32 [S]). A query
    at position p sees keys p - window < j <= p (all if window is 0). With `softcap` > 0 (Gemma 2) a score s becomes
    softcap * tanh(s / softcap). Rows that belong to no sequence are padding and come back as zeros."""
    out = torch.zeros_like(q)
    _, kv_heads, block_size, _ = k_cache.shape
    starts = query_start.tolist()
    for s, length in enumerate(context_lens.tolist()):
        rows = slice(starts[s], starts[s + 1])
        query = q[rows].float().unflatten(1, (kv_heads, -1))  # [n, kv_heads, group, head_dim]
        blocks = block_tables[s, : -(-length // block_size)].long()
        keys = k_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length].float()  # [kv_heads, context, head_dim]
        values = v_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length].float()
        scores = torch.einsum("nhgd,hjd->hgnj", query, keys) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        positions = torch.arange(length, device=q.device)  # of the keys, and the last n of them of the queries
        ahead = positions[None] - positions[length - len(query) :, None]  # [n, context]
        hidden = (ahead > 0) | (ahead <= -(window or length))
        probs = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hgnj,hjd->nhgd", probs, values).reshape(out[rows].shape).to(q.dtype)
    return out


@op(fake=lambda gate_up: gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2)))
def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up; gate_up [..., 2 * I] with the gate in the first half -> [..., I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)  # [..., I] each
    return (F.silu(gate) * up).to(gate_up.dtype)


UNPACK = {4: unpack_int4, 8: unpack_int8}


def linear_with(product: Callable[..., Tensor], bits: int) -> Callable[..., Tensor]:
    """`int4_linear` or `int8_linear` around `product`, which is the dense one below or Triton's."""

    def linear(
        x: Tensor, packed: Tensor, out_features: int, group_size: int, bias: Tensor | None = None,
        norm_weight: Tensor | None = None, eps: float = 0.0, residual: Tensor | None = None, silu_gate: bool = False,
        activation: str = "int8",
    ) -> Tensor:  # fmt: skip
        """x [..., K] times the packed weight -> [..., out_features], with what usually surrounds a product fused in.

        In this order: RMS norm of x with `norm_weight`; the product; + `bias`; with `silu_gate` the two halves of the
        outputs become silu(gate) * up (so [..., out_features / 2] is returned); + `residual`.
        `group_size` 0 (int8 only) means one float32 scale per output channel. `activation` "int8" rounds x per row and
        group of 32 to 8 bits with a float scale (amax / 127), "float" keeps it.
        """
        wide = x.float()
        if norm_weight is not None:
            wide = rms_norm(wide, norm_weight, eps)
        if activation == "int8":
            wide = round_to_int8(wide)
        y = product(wide, packed, out_features, group_size, bits)
        if bias is not None:
            y = y + bias.float()
        if silu_gate:
            y = silu_mul(y)
        return (y if residual is None else y + residual.float()).to(x.dtype)

    linear.__name__ = f"int{bits}_linear"
    return linear


def _dense_product(x: Tensor, packed: Tensor, out_features: int, group_size: int, bits: int) -> Tensor:
    return x @ UNPACK[bits](packed, x.shape[-1], group_size)[:out_features].t()


def _fake_linear(
    x, packed, out_features, group_size, bias=None, norm_weight=None, eps=0.0, residual=None, silu_gate=False, **_
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features // 2 if silu_gate else out_features))


int4_linear, int8_linear = (op(_fake_linear)(linear_with(_dense_product, bits)) for bits in (4, 8))


def round_to_int8(x: Tensor) -> Tensor:
    """What "int8" activations do to x [..., K]: per group of 32, code = round(x * 127 / amax), value = code * scale."""
    groups = F.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(amax, 127.0) / amax  # a number / tensor would multiply by the rounded 1 / amax
    codes = torch.round(groups * torch.where(amax > 0, inverse, 0.0))  # halves to even, as the CPU does
    return (codes * (amax / 127.0)).flatten(-2)[..., : x.shape[-1]]


def embedding_of(bits: int) -> Callable[..., Tensor]:
    def embedding(ids: Tensor, packed: Tensor, in_features: int, group_size: int) -> Tensor:
        """Rows `ids` [...] of the packed table, dequantised -> float32 [..., in_features]."""
        flat = ids.flatten()
        tiles = UNPACK[bits](packed[flat // TILE], in_features, group_size).view(-1, TILE, in_features)
        rows = tiles[torch.arange(flat.numel(), device=ids.device), flat % TILE]
        return rows.view(*ids.shape, in_features)

    embedding.__name__ = f"int{bits}_embedding"
    return embedding


def _fake_embedding(ids, packed, in_features, group_size) -> Tensor:
    return packed.new_empty((*ids.shape, in_features), dtype=torch.float32)


int4_embedding, int8_embedding = (op(_fake_embedding)(embedding_of(bits)) for bits in (4, 8))


def set_backend(name: str) -> str:
    """Choose the implementation behind `torch.ops.vitrine` and return the name of the one now in use.

    "native" is C++ on the CPU; without a working compiler it becomes "reference", with a note on stderr that says why.
    "triton" is for a GPU; on the CPU it needs TRITON_INTERPRET=1.
    """
    global _backend
    if name not in ("native", "reference", "triton"):
        raise ValueError(f"kernels backend {name!r} is unknown: choose native, reference or triton")
    on_cpu, on_cuda = {}, {}
    if name == "triton":
        on_cpu = on_cuda = _triton_operations()
    elif name == "native":
        try:
            cpu.load()
            on_cpu = {op: getattr(cpu, op) for op in _references}
        except build.BuildError as error:
            warn(f"kernels: {error}\nkernels: using the slow torch reference instead")
            name = "reference"
    _on_cpu.update(_references | on_cpu)
    _on_cuda.update(_references | on_cuda)
    _backend = name
    return name


def _triton_operations() -> dict[str, Callable]:
    """The operations that exist in Triton; the others are cheap on a GPU and keep their references."""
    try:
        from native import gpu
    except ImportError as error:
        raise ValueError(f"the triton backend needs the triton package ({error}): pip install triton") from error
    linears = {f"int{bits}_linear": linear_with(gpu.product, bits) for bits in (4, 8)}
    return {"paged_attention": gpu.paged_attention, **linears}


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
    build.set_threads(n)


def threads() -> int:
    """What `set_threads` set, or torch's own number before that."""
    return build.threads


def record() -> Tape:
    """`with record() as tape: step()` runs a step and keeps it; `tape.replay()` runs it again in one call.

    Only operations of `torch.ops.vitrine`, views and row copies may be inside, on tensors whose memory stays in place;
    new inputs are written into the old tensors first. What the step returned is overwritten by every replay.
    """
    if _backend != "native":
        raise ValueError(f"a tape records native kernels, and the backend is {_backend!r}: call set_backend('native')")
    return Tape()
