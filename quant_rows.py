"""The bytes of a quantised weight: how rows of a matrix become small integers, and how GGUF blocks become the same.

The problem. While one token is decoded, every weight is read from memory once, and the reading takes longer than the
arithmetic: tokens/s <= bandwidth / bytes of weights. Halve the bytes and the ceiling doubles.

The idea. Weights side by side in a row of W [N, K] have similar size. Cut each row into groups and store, for each
group, its range in 16 bits and each weight as a small integer inside that range:

    int4    w ~ q * scale + min    q in 0..15,       scale and min fp16, a pair for each 32, 64 or 128 weights
    int8    w ~ q * scale          q in -127..127,   scale fp32, one for each output channel (a row of W)
    int8    w ~ q * scale          q in -128..127,   scale fp16, one for each 32 weights (what a Q8_0 file holds)

    bits a weight:  int4  4 + 32 / group   (5.0, 4.5, 4.25 for groups of 32, 64, 128)
                    int8  8 + 32 / K by channel, 8.5 by group

Two neighbouring values are one `scale` apart, so no weight is off by more than scale / 2. That holds only if q is
computed against the scale and min that are STORED, and if rounding those to fp16 never shrinks the range. So min is
rounded down and scale up, for a step that is wider by about 0.1 %. A group of equal weights keeps its value to fp16
rounding, and there is no integer zero point that could wrap around.

The layout. `scales` and `mins` are [N, Kp / group], where Kp is K padded up to whole groups. `qweight` is [N, Kp] int8
or, for int4, [N, Kp / 2] uint8: 32 weights take 16 bytes, the first half of them in the low nibbles.

    32 weights     w0  w1  w2  ...  w15   w16  w17  w18  ...  w31

    byte                 0             1             2                  15
                  +------+------+------+------+------+------+    +------+------+
    nibble hi, lo | w16  | w0   | w17  | w1   | w18  | w2   | .. | w31  | w15  |    byte i = w[i] | w[i + 16] << 4
                  +------+------+------+------+------+------+    +------+------+

A group of 64 or 128 is two or four such blocks under one scale. Padded places hold q = 0 and are never read as weights:
the activations they would meet count as zero.

These are the very bytes of a GGUF block, so a file that is quantised already is taken over, not quantised again: Q4_1
as it is, Q4_0, which means (q - 8) * d, with min = -8 * d, and Q8_0 as int8 by groups of 32. Every weight keeps its
value bit for bit. Any other pair of source and scheme (int8 of a Q4_1 tensor, int4 of a Q6_K tensor) goes through
float32 and is quantised anew.

Sources: Dettmers et al. 2022, LLM.int8(), arXiv:2208.07339, section 2 (absmax and row-wise scales); Yao et al. 2022,
ZeroQuant, arXiv:2206.01861, section 4.1 (a scale for each group); llama.cpp's Q4_0, Q4_1, Q8_0 for the blocks.

Left out: anything that looks at activations (GPTQ, AWQ, SmoothQuant), and clipping a group's range to lower its mean
squared error, which gives up the half-step bound. Both could fill the same layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from formats import gguf

CHUNK = 1 << 17  # weights handled at a time: bounds the memory that loading needs beside its result


@dataclass(frozen=True)
class Scheme:
    """How weights are stored. `group_size` 0 means one scale for a whole row."""

    name: str
    bits: int
    group_size: int


SCHEMES = {
    s.name: s
    for s in (
        Scheme("int8", 8, 0),
        Scheme("int8-g32", 8, 32),
        Scheme("int4", 4, 32),
        Scheme("int4-g64", 4, 64),
        Scheme("int4-g128", 4, 128),
    )
}


def parse_scheme(text: str | Scheme | None) -> Scheme | None:
    """The scheme of that name; None stays None (dense). "int4-g32" is another name of "int4"."""
    if text is None or isinstance(text, Scheme):
        return text
    scheme = SCHEMES.get("int4" if text == "int4-g32" else text)
    if scheme is None:
        known = ", ".join(SCHEMES)
        raise ValueError(f"quant={text!r} is not a known scheme; use one of {known}, or leave it out for dense weights")
    return scheme


def stored_layout(scheme: Scheme, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, int]]]:
    """What a weight [n, k] becomes: suffix -> (dtype, shape). This is the formula for its bytes."""
    group = scheme.group_size or k
    groups = -(-k // group)
    if scheme.bits == 8:
        scale = torch.float16 if scheme.group_size else torch.float32
        return {"qweight": (torch.int8, (n, groups * group)), "scales": (scale, (n, groups))}
    half = (torch.float16, (n, groups))
    return {"qweight": (torch.uint8, (n, groups * group // 2)), "scales": half, "mins": half}


def pack_int4(q: torch.Tensor) -> torch.Tensor:
    """uint8 [N, Kp] in 0..15, Kp a multiple of 32 -> uint8 [N, Kp / 2]."""
    low, high = q.view(len(q), -1, 2, 16).unbind(2)  # [N, Kp / 32, 16] each
    return (low | high << 4).flatten(1)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [N, Kp / 2] -> uint8 [N, Kp] in 0..15."""
    blocks = packed.view(len(packed), -1, 16)
    return torch.stack([blocks & 15, blocks >> 4], dim=2).flatten(1)


@dataclass(frozen=True)
class QuantRows:
    """Rows of a weight matrix in the layout of the module docstring; `mins` is None for int8."""

    qweight: torch.Tensor  # int4: uint8 [N, Kp / 2]; int8: int8 [N, Kp]
    scales: torch.Tensor  # [N, Kp / group]
    mins: torch.Tensor | None  # [N, Kp / group]
    in_features: int  # K, before padding

    def parts(self) -> dict[str, torch.Tensor]:
        """The tensors by the suffix under which a folder stores them."""
        both = {"qweight": self.qweight, "scales": self.scales}
        return both if self.mins is None else both | {"mins": self.mins}

    @property
    def bits(self) -> int:
        return 8 if self.mins is None else 4

    @property
    def group_size(self) -> int:
        return self.qweight.shape[1] * 8 // self.bits // self.scales.shape[1]

    def dequantize(self) -> torch.Tensor:
        """float32 [N, K]. The product and the sum are rounded one after the other, as GGUF's reference does it."""
        q = self.qweight if self.bits == 8 else unpack_int4(self.qweight)
        q = q.float().unflatten(1, self.scales.shape[1:] + (-1,))  # [N, groups, group]
        w = q * self.scales.float().unsqueeze(2)
        if self.mins is not None:
            w = w + self.mins.float().unsqueeze(2)
        return w.flatten(1)[:, : self.in_features]


def concatenate(pieces: list[QuantRows]) -> QuantRows:
    """Rows under rows: what a fused layer is made of. All pieces must agree on K, bits and group."""
    kinds = {(p.in_features, p.bits, p.group_size, p.scales.dtype) for p in pieces}
    if len(kinds) != 1:
        raise ValueError(f"these rows cannot form one layer: (in_features, bits, group, scale dtype) differ: {kinds}")
    if len(pieces) == 1:
        return pieces[0]
    first = pieces[0]
    mins = None if first.mins is None else torch.cat([p.mins for p in pieces])
    qweight = torch.cat([p.qweight for p in pieces])
    return QuantRows(qweight, torch.cat([p.scales for p in pieces]), mins, first.in_features)


def _half(x: torch.Tensor, towards: float) -> torch.Tensor:
    """Round float32 to fp16 in one direction only: towards -inf (never above x) or +inf (never below x)."""
    h = x.half()
    wrong = h.float() > x if towards < 0 else h.float() < x
    return torch.where(wrong, torch.nextafter(h, torch.full_like(h, towards)), h)


def _steps(distance: torch.Tensor, scale: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """round(distance / scale) within least..most. distance [n, groups, group], scale [n, groups]."""
    return (distance / scale.float().unsqueeze(2)).round_().clamp_(least, most)


def quantize_chunk(w: torch.Tensor, scheme: Scheme) -> QuantRows:
    """float32 [n, K] -> rows. Every weight is within half a stored step of its old value."""
    n, k = w.shape
    group = scheme.group_size or k
    padding = -k % group
    if padding:  # with the last weight: no range grows by it
        w = torch.cat([w, w[:, -1:].expand(n, padding)], dim=1)
    w = w.unflatten(1, (-1, group))  # [n, groups, group]
    least = torch.finfo(w.dtype).tiny  # a scale is never 0, not even that of a group of zeros: nothing divides by 0
    if scheme.bits == 8:
        scales = (w.abs().amax(dim=2) / 127).clamp_(min=least)  # [n, groups]
        scales = _half(scales, math.inf) if scheme.group_size else scales
        q, mins = _steps(w, scales, -127, 127).to(torch.int8), None
    else:
        low, high = w.aminmax(dim=2)  # [n, groups]
        mins = _half(low, -math.inf)
        scales = _half(((high - mins.float()) / 15).clamp_(min=least), math.inf)
        q = _steps(w - mins.float().unsqueeze(2), scales, 0, 15).to(torch.uint8)
    q = q.flatten(1)
    q[:, k:] = 0
    return QuantRows(q if scheme.bits == 8 else pack_int4(q), scales, mins, k)


def float_chunks(source: torch.Tensor | gguf.Blocks) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, float32 rows) over the whole matrix, about CHUNK weights at a time."""
    n, k = source.shape
    step = max(1, CHUNK // k)
    for start in range(0, n, step):
        if isinstance(source, torch.Tensor):
            yield start, source[start : start + step].float()
        else:
            part = source.data[start : start + step]
            yield start, gguf.dequantize(replace(source, shape=(len(part), k), data=part))


def _all_finite(*tensors: torch.Tensor | None) -> bool:
    return all(t is None or bool(torch.isfinite(t).all()) for t in tensors)


def quantize_rows(source: torch.Tensor | gguf.Blocks, scheme: Scheme, name: str = "weight") -> QuantRows:
    """A dense tensor [N, K] of any float type, or GGUF blocks, -> rows under `scheme`, one chunk at a time.

    Raises ValueError naming the tensor if a weight is NaN or infinite, or too large for fp16 scales.
    """
    n, k = source.shape
    out = {suffix: torch.empty(shape, dtype=dtype) for suffix, (dtype, shape) in stored_layout(scheme, n, k).items()}
    for start, w in float_chunks(source):
        if not _all_finite(w):
            raise ValueError(f"{name} holds NaN or infinite weights: the checkpoint is damaged, get it again")
        rows = quantize_chunk(w, scheme)
        if not _all_finite(rows.scales, rows.mins):
            largest = f"{w.abs().max():.3g}"
            raise ValueError(f"{name}: weights up to {largest} overflow fp16 scales; use quant='int8' (float32 scales)")
        for suffix, whole in out.items():
            whole[start : start + len(w)] = rows.parts()[suffix]
    return QuantRows(out["qweight"], out["scales"], out.get("mins"), k)


def adopt_blocks(blocks: gguf.Blocks, scheme: Scheme) -> QuantRows | None:
    """The very weights of GGUF blocks, if `scheme` can hold them without loss; else None.

    A Q8_0 tensor keeps its groups of 32 under "int8" too: a scale for each row would only lose what the file still has.
    Scales that are not finite are not taken over, so that `quantize_rows` meets the weights and names the tensor.
    """
    n, k = blocks.shape
    header = {"Q4_0": 2, "Q4_1": 4, "Q8_0": 2}.get(blocks.kind)  # bytes of fp16 scale (and min) before the weights
    fits = scheme.bits == 8 if blocks.kind == "Q8_0" else scheme.bits == 4 and scheme.group_size == 32
    if header is None or not fits:
        return None
    fp16 = blocks.data[:, :, :header].contiguous().view(torch.float16)  # [N, K / 32, 1 or 2]
    weights = blocks.data[:, :, header:].contiguous().view(n, -1)  # [N, bytes]
    scales = fp16[:, :, 0].contiguous()
    if blocks.kind == "Q8_0":
        rows = QuantRows(weights.view(torch.int8), scales, None, k)
    else:  # Q4_0 means (q - 8) * d, and 8 * d is exact in fp16
        rows = QuantRows(weights, scales, scales * -8 if blocks.kind == "Q4_0" else fp16[:, :, 1].contiguous(), k)
    return rows if _all_finite(rows.scales, rows.mins) else None
