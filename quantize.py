"""Fewer bits a weight: how the rows of a matrix become small integers and back, and the layers that compute on them.

While one token is decoded, every weight is read from memory once, and the reading takes longer than the arithmetic:
tokens/s <= bandwidth / bytes of weights. Weights side by side in a row of W [N, K] have similar size, so each group of
them stores its range in 16 bits, and each weight as a small integer inside that range:

    int4    w ~ q * scale + min    q in 0..15,       scale and min fp16, a pair for each 32, 64 or 128 weights
    int8    w ~ q * scale          q in -127..127,   scale fp32, one for each output channel (a row of W)
    int8    w ~ q * scale          q in -128..127,   scale fp16, one for each 32 weights (what a Q8_0 file holds)

    tensors or GGUF blocks ──► QuantRows (quantised, or adopted as they are) ──► one fused PackedLinear in kernel tiles

Sources: Dettmers et al. 2022, LLM.int8(), arXiv:2208.07339, section 2; Yao et al. 2022, ZeroQuant, arXiv:2206.01861,
section 4.1; llama.cpp's Q4_0, Q4_1, Q8_0. Left out: whatever looks at activations (GPTQ, AWQ), mixed precision.
"""

from __future__ import annotations

import math
import runpy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels
from formats import gguf
from native import arena

VERSION = 1  # of the form in which formats/quantized_folder.py stores weights
CHUNK = 1 << 17  # weights handled at a time: bounds the memory that loading needs beside its result
TABLES = ("model.embed_tokens.weight", "lm_head.weight")
Parts = dict[str, Tensor]  # part name -> tensor [N, ...]


class Scheme:
    """How rows [N, K] are stored: as named parts, each with one row for a row. A quantised folder holds those parts.

    `bits` of a code; `group_size` weights share a scale (0: the whole row). `kernel` is the prefix of the functions in
    kernels.py that compute on these parts (pack_, _linear, _embedding); without one a layer dequantises.
    """

    bits: int
    kernel: str | None = None

    def __init__(self, name: str, group_size: int):
        self.name, self.group_size = name, group_size

    def quantize(self, w: Tensor) -> Parts:
        """float32 [n, K] -> parts."""
        raise NotImplementedError

    def dequantize(self, parts: Parts, k: int) -> Tensor:
        """Parts -> float32 [n, k]."""
        raise NotImplementedError

    def adopt(self, blocks: gguf.Blocks) -> Parts | None:
        """The very weights of GGUF blocks, if this scheme can hold them without loss; else None."""
        return None

    def layout(self, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, int]]]:
        """What a weight [n, k] becomes: part -> (dtype, shape)."""
        row = self.quantize(torch.zeros(1, k))
        return {name: (part.dtype, (n, part.shape[1])) for name, part in row.items()}

    def grouped(self, w: Tensor) -> Tensor:
        """[n, K] -> [n, groups, group]; the last group is filled up with the last weight: no range grows by it."""
        group = self.group_size or w.shape[1]
        padding = w[:, -1:].expand(-1, -w.shape[1] % group)
        return torch.cat([w, padding], dim=1).unflatten(1, (-1, group))


# Two neighbouring values are one scale apart, so no weight is off by more than scale / 2. That holds only if q comes
# from the scale and min that are STORED, and if rounding those to fp16 never shrinks the range: min is rounded down and
# scale up. A scale is never 0, not even that of a group of zeros: nothing divides by 0.
LEAST = torch.finfo(torch.float32).tiny


class Int8(Scheme):
    """`qweight` int8 [N, Kp], Kp being K padded to whole groups; `scales` [N, groups]: fp16, or float32 for a row."""

    bits, kernel = 8, "int8"

    def quantize(self, w: Tensor) -> Parts:
        groups = self.grouped(w)
        scales = (groups.abs().amax(dim=2) / 127).clamp_(min=LEAST)  # [n, groups]
        scales = _half(scales, math.inf) if self.group_size else scales
        q = _steps(groups, scales, -127, 127, w.shape[1])
        return {"qweight": q.to(torch.int8), "scales": scales}

    def dequantize(self, parts: Parts, k: int) -> Tensor:
        scales = parts["scales"].float().unsqueeze(2)
        q = parts["qweight"].float().unflatten(1, (scales.shape[1], -1))  # [N, groups, group]
        return (q * scales).flatten(1)[:, :k]

    def adopt(self, blocks: gguf.Blocks) -> Parts | None:
        if blocks.kind != "Q8_0" or self.group_size != 32:
            return None
        fp16, q = _split_blocks(blocks, 2)
        return {"qweight": q.view(torch.int8), "scales": fp16[:, :, 0].contiguous()}


class Int4(Scheme):
    """`scales` and `mins` fp16 [N, groups]; `qweight` uint8 [N, Kp / 2], 32 weights in 16 bytes as in a GGUF block:

    byte                 0             1             2                  15
                  +------+------+------+------+------+------+    +------+------+
    nibble hi, lo | w16  | w0   | w17  | w1   | w18  | w2   | .. | w31  | w15  |    byte i = w[i] | w[i + 16] << 4
                  +------+------+------+------+------+------+    +------+------+
    """

    bits, kernel = 4, "int4"

    def quantize(self, w: Tensor) -> Parts:
        groups = self.grouped(w)
        low, high = groups.aminmax(dim=2)  # [n, groups]
        mins = _half(low, -math.inf)
        scales = _half(((high - mins.float()) / 15).clamp_(min=LEAST), math.inf)
        q = _steps(groups - mins.float().unsqueeze(2), scales, 0, 15, w.shape[1])
        return {"qweight": pack_nibbles(q.to(torch.uint8)), "scales": scales, "mins": mins}

    def dequantize(self, parts: Parts, k: int) -> Tensor:
        scales, mins = (parts[name].float().unsqueeze(2) for name in ("scales", "mins"))
        q = unpack_nibbles(parts["qweight"]).float().unflatten(1, (scales.shape[1], -1))  # [N, groups, group]
        return (q * scales + mins).flatten(1)[:, :k]  # rounded one after the other, as GGUF's reference does it

    def adopt(self, blocks: gguf.Blocks) -> Parts | None:
        if blocks.kind not in ("Q4_0", "Q4_1") or self.group_size != 32:
            return None
        fp16, q = _split_blocks(blocks, 2 if blocks.kind == "Q4_0" else 4)
        scales = fp16[:, :, 0].contiguous()
        # Q4_0 means (q - 8) * d, and 8 * d is exact in fp16
        return {"qweight": q, "scales": scales, "mins": scales * -8 if blocks.kind == "Q4_0" else fp16[:, :, 1].clone()}


class NormalFloat4(Scheme):
    """NF4 of QLoRA (Dettmers et al. 2023, arXiv:2305.14314, appendix E): 16 values, each as likely as the next for
    normally distributed weights, times the largest magnitude of the group. Without a kernel, so it saves only memory.

    `qweight` as in `Int4`; `scales` float32 [N, groups].
    """

    bits = 4
    VALUES = (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    )  # fmt: skip

    def quantize(self, w: Tensor) -> Parts:
        groups, values = self.grouped(w), torch.tensor(self.VALUES)
        scales = groups.abs().amax(dim=2).clamp_(min=LEAST)  # [n, groups]
        q = torch.bucketize(groups / scales.unsqueeze(2), (values[1:] + values[:-1]) / 2)  # the nearest value
        return {"qweight": pack_nibbles(q.flatten(1).to(torch.uint8)), "scales": scales}

    def dequantize(self, parts: Parts, k: int) -> Tensor:
        values = torch.tensor(self.VALUES, device=parts["scales"].device)
        w = values.index_select(0, unpack_nibbles(parts["qweight"]).flatten().int())
        return (w.view(*parts["scales"].shape, -1) * parts["scales"].unsqueeze(2)).flatten(1)[:, :k]


INT8, INT8_G32 = Int8("int8", 0), Int8("int8-g32", 32)
INT4, INT4_G64, INT4_G128 = Int4("int4", 32), Int4("int4-g64", 64), Int4("int4-g128", 128)
SCHEMES = {s.name: s for s in (INT8, INT8_G32, INT4, INT4_G64, INT4_G128, NormalFloat4("nf4-g64", 64))}


def parse_scheme(text: str | Scheme | None) -> Scheme | None:
    """The scheme of that name; None stays None (dense). "int4-g32" is another name of "int4"."""
    if text is None or isinstance(text, Scheme):
        return text
    scheme = SCHEMES.get("int4" if text == "int4-g32" else text)
    if scheme is None:
        known = ", ".join(SCHEMES)
        raise ValueError(f"quant={text!r} is not a known scheme; use one of {known}, or leave it out for dense weights")
    return scheme


def pack_nibbles(q: Tensor) -> Tensor:
    """uint8 [N, Kp] in 0..15, Kp a multiple of 32 -> uint8 [N, Kp / 2]."""
    low, high = q.view(len(q), -1, 2, 16).unbind(2)  # [N, Kp / 32, 16] each
    return (low | high << 4).flatten(1)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 [N, Kp / 2] -> uint8 [N, Kp] in 0..15."""
    blocks = packed.view(len(packed), -1, 16)
    return torch.stack([blocks & 15, blocks >> 4], dim=2).flatten(1)


def _half(x: Tensor, towards: float) -> Tensor:
    """Round float32 to fp16 in one direction only: towards -inf (never above x) or +inf (never below x)."""
    h = x.half()
    wrong = h.float() > x if towards < 0 else h.float() < x
    return torch.where(wrong, torch.nextafter(h, torch.full_like(h, towards)), h)


def _steps(distance: Tensor, scale: Tensor, least: int, most: int, k: int) -> Tensor:
    """round(distance / scale) within least..most as [n, Kp], 0 where padded; distance [n, groups, group]."""
    q = (distance / scale.float().unsqueeze(2)).round_().clamp_(least, most).flatten(1)
    q[:, k:] = 0  # never read as a weight: the activation it would meet counts as zero
    return q


def _split_blocks(blocks: gguf.Blocks, header: int) -> tuple[Tensor, Tensor]:
    """(fp16 [N, K / 32, header / 2], the bytes behind those headers [N, bytes]): copies, which do not hold the file."""
    fp16 = blocks.data[:, :, :header].clone(memory_format=torch.contiguous_format).view(torch.float16)
    return fp16, blocks.data[:, :, header:].contiguous().view(len(blocks.data), -1)


@dataclass(frozen=True)
class QuantRows:
    """Rows of a weight matrix under a scheme."""

    scheme: Scheme
    parts: Parts
    in_features: int  # K, before padding

    @property
    def out_features(self) -> int:
        return len(next(iter(self.parts.values())))


def concatenate(pieces: list[QuantRows]) -> QuantRows:
    """Rows under rows: what a fused layer is made of. All pieces must agree on scheme and K."""
    first, forms = pieces[0], {(p.scheme.name, p.in_features) for p in pieces}
    if len(forms) != 1:
        raise ValueError(f"these rows cannot form one layer: (scheme, in_features) differ: {forms}")
    if len(pieces) == 1:
        return first
    return replace(first, parts={name: torch.cat([p.parts[name] for p in pieces]) for name in first.parts})


def float_chunks(source: Tensor | gguf.Blocks) -> Iterator[tuple[int, Tensor]]:
    """(first row, float32 rows) over the whole matrix, about CHUNK weights at a time."""
    n, k = source.shape
    step = max(1, CHUNK // k)
    for start in range(0, n, step):
        if isinstance(source, Tensor):
            yield start, source[start : start + step].float()
        else:
            part = source.data[start : start + step]
            yield start, gguf.dequantize(replace(source, shape=(len(part), k), data=part))


def _all_finite(tensors) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors)


def quantize_rows(source: Tensor | gguf.Blocks, scheme: Scheme, name: str = "weight") -> QuantRows:
    """A dense tensor [N, K] of any float type, or GGUF blocks, -> rows under `scheme`, one chunk at a time.

    Raises ValueError naming the tensor if a weight is NaN or infinite, or too large for fp16 scales.
    """
    n, k = source.shape
    out = {part: torch.empty(shape, dtype=dtype) for part, (dtype, shape) in scheme.layout(n, k).items()}
    for start, w in float_chunks(source):
        if not _all_finite([w]):
            raise ValueError(f"{name} holds NaN or infinite weights: the checkpoint is damaged, get it again")
        parts = scheme.quantize(w)
        if not _all_finite(parts.values()):
            largest = f"{w.abs().max():.3g}"
            raise ValueError(f"{name}: weights up to {largest} overflow fp16 scales; use quant='int8' (float32 scales)")
        for part, target in out.items():
            target[start : start + len(w)] = parts[part]
    return QuantRows(scheme, out, k)


def adopt_blocks(blocks: gguf.Blocks, scheme: Scheme) -> QuantRows | None:
    """GGUF blocks as rows, or None. If their scales are not finite, `quantize_rows` names the tensor instead."""
    parts = scheme.adopt(blocks)
    return QuantRows(scheme, parts, blocks.shape[1]) if parts is not None and _all_finite(parts.values()) else None


class Linear(nn.Module):
    """y = x W^T + bias with dense weights, and with what usually stands around it; also a table whose rows are read."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight)  # [N, K]
        self.register_buffer("bias", bias)  # [N]

    def forward(self, x: Tensor, norm_weight=None, eps=0.0, residual=None, silu_gate=False) -> Tensor:
        """RMS norm of x [T, K], product, bias, silu(first half) * second half, + residual: [T, N], or [T, N / 2]."""
        if norm_weight is not None:
            x = torch.ops.vitrine.rms_norm(x, norm_weight, eps)
        y = self.product(x)
        if silu_gate:
            y = torch.ops.vitrine.silu_mul(y)
        return y if residual is None else y + residual

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows `ids` [T] of the weight [T, K]: exactly those that a product multiplies with."""
        return F.embedding(ids, self.weight)

    @property
    def weight_bytes(self) -> int:
        """What one pass over this layer reads."""
        return sum(t.nbytes for t in self.buffers())


class StoredLinear(Linear):
    """Under a scheme without a kernel: holds the parts, and dequantises them for every product, some rows at a time."""

    def __init__(self, rows: QuantRows, bias: Tensor | None = None):
        nn.Module.__init__(self)
        self.scheme, self.names, self.in_features = rows.scheme, list(rows.parts), rows.in_features
        self.out_features = rows.out_features
        for name, part in rows.parts.items():
            self.register_buffer(name, part)
        self.register_buffer("bias", bias)  # [N]

    def lookup(self, ids: slice | Tensor) -> Tensor:
        return self.scheme.dequantize({name: getattr(self, name)[ids] for name in self.names}, self.in_features)

    def product(self, x: Tensor) -> Tensor:
        step = max(1, CHUNK // self.in_features)
        pieces = [self.lookup(slice(at, at + step)).to(x.dtype) for at in range(0, self.out_features, step)]
        y = torch.cat([F.linear(x, piece) for piece in pieces], dim=-1)
        return y if self.bias is None else y + self.bias


class PackedLinear(Linear):
    """Under a scheme with a kernel: the weight is held once, in the tiles that native/packing.py draws.

    `activations`: "int8" rounds x to 8 bits by groups of 32 before the product, "float" multiplies x as it is.
    """

    def __init__(self, rows: QuantRows, bias: Tensor | None = None):
        nn.Module.__init__(self)
        kernel, ops = rows.scheme.kernel, torch.ops.vitrine
        self.pack = getattr(kernels, f"pack_{kernel}")
        self.linear, self.embedding = getattr(ops, f"{kernel}_linear"), getattr(ops, f"{kernel}_embedding")
        self.scheme, self.group_size, self.activations = rows.scheme, rows.scheme.group_size, "int8"
        self.out_features, self.in_features = rows.out_features, rows.in_features
        self.register_buffer("packed", self._pack(rows))  # uint8 [N / 16, bytes of 16 rows]
        self.register_buffer("bias", bias)  # [N]

    def _pack(self, rows: QuantRows) -> Tensor:
        """The rows in the kernels' form, some tiles at a time: repacking needs little beside its result."""
        step = max(1, CHUNK // rows.in_features // kernels.TILE) * kernels.TILE
        packed = None
        for start in range(0, self.out_features, step):
            tiles = self.pack(*(part[start : start + step] for part in rows.parts.values()), self.group_size)
            if packed is None:
                packed = arena.empty(-(-self.out_features // kernels.TILE), tiles.shape[1])
            packed[start // kernels.TILE :][: len(tiles)] = tiles
        return packed

    def forward(self, x: Tensor, norm_weight=None, eps=0.0, residual=None, silu_gate=False) -> Tensor:
        """As `Linear.forward`, in one operation that reads every byte of the weight once."""
        return self.linear(
            x, self.packed, self.out_features, self.group_size, self.bias, norm_weight, eps, residual, silu_gate,
            self.activations,
        )  # fmt: skip

    def lookup(self, ids: Tensor) -> Tensor:
        return self.embedding(ids, self.packed, self.in_features, self.group_size)


def quantised_layer(rows: QuantRows, bias: Tensor | None = None) -> Linear:
    return (StoredLinear if rows.scheme.kernel is None else PackedLinear)(rows, bias)


def has_kernels(model: nn.Module) -> bool:
    """Whether every product of `model` is a quantised kernel, so that its steps can be recorded."""
    return all(isinstance(module, PackedLinear) for module in model.modules() if isinstance(module, Linear))


def set_activations(model: nn.Module, activations: str) -> None:
    """Choose "int8" or "float" activations for every quantised layer inside `model`."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.activations = activations


if __name__ == "__main__":
    runpy.run_module("formats.quantized_folder", run_name="__main__")
