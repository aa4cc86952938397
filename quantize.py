"""Fewer bits a weight: the layers that compute on quantised weights, and how a checkpoint becomes such layers.

The problem. A layer of a checkpoint may come dense or quantised in several ways, fused with its neighbours or not, and
the model wants one thing: y = x W^T, with as few bytes read as the user allows.

The idea. Rows of W are independent. Each weight of the checkpoint becomes rows of small integers (quant_rows.py: the
layout, and the promise that blocks of a GGUF are taken over bit for bit), rows are put under rows, and that is one
layer. Dense or 4 or 8 bits, the three layer classes have one interface: the model does not know which it holds.

    checkpoint      q_proj [576, 576] Q4_1    k_proj [192, 576] Q4_1    v_proj [192, 576] F32
                          | taken over              | taken over              | quantised
    QuantRows        [576, ...]                [192, ...]                [192, ...]
                          +-------------------------+-------------------------+
    Int4Linear       qkv: [960, 576], repacked into the tiles that the kernels read

Every linear layer is quantised. The embedding table and the output head stay at 8 bits even under int4: an error there
meets the logits directly, and a tied model reads this one table both as embedding and as head, held once. Norms and
biases stay dense. The schemes: "int8" (a scale for each output channel), "int8-g32", "int4" (groups of 32), "int4-g64",
"int4-g128". A Q8_0 tensor keeps its groups under "int8" too, so that nothing it holds is lost.

Source: Frantar et al. 2022, GPTQ, arXiv:2210.17323, section 1 (why weight-only quantisation speeds up decoding).

Left out: layers that choose their own bits (mixed precision), int4 tables, training. `python quantize.py --model M
--quant int4 --out DIR` writes a quantised folder, by formats/quantized_folder.py.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
import torch.nn.functional as F
from torch import nn

import kernels
from quant_rows import (
    CHUNK,
    SCHEMES,
    QuantRows,
    Scheme,
    adopt_blocks,
    concatenate,
    float_chunks,
    parse_scheme,
    quantize_rows,
)

VERSION = 1  # of the form in which formats/quantized_folder.py stores weights
TABLES = ("model.embed_tokens.weight", "lm_head.weight")


class Linear(nn.Module):
    """y = x W^T + bias with dense weights, and with what usually stands around it: see `forward`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight)  # [N, K]
        self.register_buffer("bias", bias)  # [N]

    def forward(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        residual: torch.Tensor | None = None,
        silu_gate: bool = False,
    ) -> torch.Tensor:
        """x [T, K] -> [T, N] or, with `silu_gate`, [T, N / 2].

        In this order: RMS norm of x, product, bias, silu(first half) * second half, + residual.
        """
        if norm_weight is not None:
            x = torch.ops.vitrine.rms_norm(x, norm_weight, eps)
        y = F.linear(x, self.weight, self.bias)
        if silu_gate:
            y = torch.ops.vitrine.silu_mul(y)
        return y if residual is None else y + residual

    def dequantize(self) -> torch.Tensor:
        """The weight as float32 [N, K]."""
        return self.weight.float()

    @property
    def weight_bytes(self) -> int:
        """What one pass over this layer reads."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class Arena:
    """Memory for weights that stay: large mappings, handed out piece by piece.

    From the heap, the weights that stay would lie between the temporaries that go, and the holes add up: loading took
    up to 1.6 times the final weights. And one layer of a small model is less than a huge page (2 MiB); side by side
    they fill them, and a step that reads every weight once misses the TLB far less often. A mapping goes with its last
    piece; what nobody touched of it was never memory.
    """

    CHUNK = 64 << 20

    def __init__(self):
        self.free = torch.empty(0, dtype=torch.uint8)

    def empty(self, rows: int, columns: int) -> torch.Tensor:
        """uint8 [rows, columns] of zeros, aligned to a cache line."""
        nbytes = rows * columns
        if nbytes > len(self.free):
            private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
            mapping = mmap.mmap(-1, max(nbytes, self.CHUNK), **private)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without huge pages: small ones do
                    mapping.madvise(mmap.MADV_HUGEPAGE)
            self.free = torch.frombuffer(mapping, dtype=torch.uint8)
        piece, self.free = self.free[:nbytes], self.free[-(-nbytes // 64) * 64 :]
        return piece.view(rows, columns)


arena = Arena()


class _PackedLinear(nn.Module):
    """What the two quantised layers share. The weight is held once, in the tiles that native/packing.py draws.

    `activations`: "int8" rounds x to 8 bits by groups of 32 before the product, "float" multiplies x as it is.
    Bytes: rows N padded to a multiple of 16, times the bytes of a row in `stored_layout`.
    """

    bits: int

    def __init__(self, rows: QuantRows, bias: torch.Tensor | None = None):
        super().__init__()
        if rows.bits != self.bits:
            raise ValueError(f"{type(self).__name__} needs {self.bits}-bit rows, not {rows.bits}-bit ones")
        self.out_features, self.in_features = len(rows.qweight), rows.in_features
        self.group_size = 0 if rows.scales.dtype == torch.float32 else rows.group_size
        self.activations = "int8"
        self.register_buffer("packed", self._pack(rows))  # uint8 [N / 16, bytes of 16 rows]
        self.register_buffer("bias", bias)  # [N]

    def _pack(self, rows: QuantRows) -> torch.Tensor:
        """The canonical rows in the kernels' form, some tiles at a time: repacking needs little beside its result."""
        step = max(1, CHUNK // rows.in_features // kernels.TILE) * kernels.TILE
        packed = None
        for start in range(0, self.out_features, step):
            tiles = self._pack_tiles(*(part[start : start + step] for part in rows.parts().values()))
            if packed is None:
                packed = arena.empty(-(-self.out_features // kernels.TILE), tiles.shape[1])
            packed[start // kernels.TILE :][: len(tiles)] = tiles
        return packed

    @property
    def weight_bytes(self) -> int:
        """What one pass over this layer reads."""
        return self.packed.nbytes + (0 if self.bias is None else self.bias.nbytes)


class Int4Linear(_PackedLinear):
    """y = x W^T + bias over 4-bit weights."""

    bits = 4

    def _pack_tiles(self, qweight: torch.Tensor, scales: torch.Tensor, mins: torch.Tensor) -> torch.Tensor:
        return kernels.pack_int4(qweight, scales, mins, self.group_size)

    def forward(self, x, norm_weight=None, eps=0.0, residual=None, silu_gate=False) -> torch.Tensor:
        """As `Linear.forward`, in one operation that reads every byte of the weight once."""
        return torch.ops.vitrine.int4_linear(
            x, self.packed, self.out_features, self.group_size, self.bias, norm_weight, eps, residual, silu_gate,
            self.activations,
        )  # fmt: skip

    def dequantize(self) -> torch.Tensor:
        """The weight as float32 [N, K], every value the one that was stored."""
        return kernels.unpack_int4(self.packed, self.in_features, self.group_size)[: self.out_features]


class Int8Linear(_PackedLinear):
    """y = x W^T + bias over 8-bit weights; `group_size` 0 means one scale for each output channel."""

    bits = 8

    def _pack_tiles(self, qweight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return kernels.pack_int8(qweight, scales, self.group_size)

    def forward(self, x, norm_weight=None, eps=0.0, residual=None, silu_gate=False) -> torch.Tensor:
        """As `Linear.forward`, in one operation that reads every byte of the weight once."""
        return torch.ops.vitrine.int8_linear(
            x, self.packed, self.out_features, self.group_size, self.bias, norm_weight, eps, residual, silu_gate,
            self.activations,
        )  # fmt: skip

    def dequantize(self) -> torch.Tensor:
        """The weight as float32 [N, K], every value the one that was stored."""
        return kernels.unpack_int8(self.packed, self.in_features, self.group_size)[: self.out_features]


class Embedding(nn.Module):
    """One table, two readers: `lookup` takes rows of it, `logits` multiplies with all of it (a tied output head).

    `table` is a Linear or an Int8Linear [V, H]. It is held once; what `lookup` returns is exactly a row of what
    `logits` multiplies with.
    """

    def __init__(self, table: Linear | Int8Linear, dtype: torch.dtype):
        super().__init__()
        self.table, self.dtype = table, dtype

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] -> [T, H] in the dtype of the activations."""
        if isinstance(self.table, Linear):
            return F.embedding(ids, self.table.weight)
        rows = torch.ops.vitrine.int8_embedding(ids, self.table.packed, self.table.in_features, self.table.group_size)
        return rows.to(self.dtype)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, V]."""
        return self.table(x)

    @property
    def weight_bytes(self) -> int:
        """What `logits` reads; `lookup` reads a row for each id."""
        return self.table.weight_bytes


def set_activations(model: nn.Module, activations: str) -> None:
    """Choose "int8" or "float" activations for every quantised layer inside `model`."""
    if activations not in ("int8", "float"):
        raise ValueError(f"activations={activations!r}: use 'int8' or 'float'")
    for module in model.modules():
        if isinstance(module, _PackedLinear):
            module.activations = activations


def resolve_scheme(ckpt, scheme: str | Scheme | None) -> Scheme | None:
    """The scheme in force: the asked one, or that of a folder which is quantised already and cannot have another."""
    wanted = parse_scheme(scheme)
    if ckpt.quant is None:
        return wanted
    if ckpt.quant["version"] != VERSION:
        raise ValueError(f"{ckpt.path} was written as version {ckpt.quant['version']} of this format, not {VERSION}")
    stored = parse_scheme(ckpt.quant["scheme"])
    if wanted not in (None, stored):
        raise ValueError(
            f"{ckpt.path} is quantised as {stored.name} and cannot be loaded as {wanted.name}; leave quant out, "
            f"or quantise the original model"
        )
    return stored


def scheme_for(ckpt, names: list[str], scheme: Scheme) -> Scheme:
    """The scheme for the weights `names`, which form one layer and therefore share one form.

    The embedding table and the head keep 8 bits. Next to a Q8_0 tensor, which has groups, "int8" has groups too.
    """
    if scheme.bits == 4 and names[0] in TABLES:
        scheme = SCHEMES["int8"]
    if scheme.name == "int8" and any(b is not None and b.kind == "Q8_0" for b in map(ckpt.blocks, names)):
        scheme = SCHEMES["int8-g32"]
    return scheme


def load_rows(ckpt, names: list[str], scheme: Scheme) -> list[QuantRows]:
    """The weights `names`, which form one layer, as one piece each: taken over where that loses nothing."""
    if ckpt.quant is not None:
        return [stored_rows(ckpt, name.removesuffix(".weight")) for name in names]
    form, pieces = scheme_for(ckpt, names, scheme), []
    for name in names:
        blocks = ckpt.blocks(name)
        rows = None if blocks is None else adopt_blocks(blocks, form)
        if rows is None:
            rows = quantize_rows(ckpt.tensor(name) if blocks is None else blocks, form, name)
        pieces.append(rows)
        ckpt.release(name)  # the source is mapped, and its pages would stay beside the copy
    return pieces


def stored_rows(ckpt, layer: str) -> QuantRows:
    """Rows of a folder that formats/quantized_folder.py wrote."""
    qweight, scales = ckpt.tensor(f"{layer}.qweight"), ckpt.tensor(f"{layer}.scales")
    mins = ckpt.tensor(f"{layer}.mins") if qweight.dtype == torch.uint8 else None
    return QuantRows(qweight, scales, mins, ckpt.quant["shapes"][layer][1])


def load_dense(ckpt, names: list[str], dtype: torch.dtype) -> torch.Tensor:
    """The weights `names` under one another as one [N, K] of `dtype`; a part is converted a chunk at a time."""
    sources = [ckpt.blocks(name) for name in names]
    if len(names) == 1 and sources[0] is None:
        return ckpt.tensor(names[0]).to(dtype)
    rows = [ckpt.shape(name)[0] for name in names]
    out = torch.empty(sum(rows), ckpt.shape(names[0])[1], dtype=dtype)
    for name, source, part in zip(names, sources, out.split(rows), strict=True):
        for start, w in float_chunks(ckpt.tensor(name) if source is None else source):
            part[start : start + len(w)] = w
        ckpt.release(name)
    return out


def linear_from_checkpoint(
    ckpt, names: list[str], scheme: str | Scheme | None, dtype: torch.dtype, bias_names: list[str] | None = None
) -> Linear | Int8Linear | Int4Linear:
    """The layer whose rows are those of the weights `names`, one under the other (a fused layer has several).

    `scheme` None means dense in `dtype`, unless the checkpoint is a quantised folder. One weight is in memory at a
    time beside the layer. Raises ValueError as `resolve_scheme` and `quantize_rows` do.
    """
    bias = None if bias_names is None else torch.cat([ckpt.tensor(name).to(dtype) for name in bias_names])
    scheme = resolve_scheme(ckpt, scheme)
    if scheme is None:
        return Linear(load_dense(ckpt, names, dtype), bias)
    rows = concatenate(load_rows(ckpt, names, scheme))
    return (Int8Linear if rows.bits == 8 else Int4Linear)(rows, bias)


def embedding_from_checkpoint(ckpt, name: str, scheme: str | Scheme | None, dtype: torch.dtype) -> Embedding:
    """The embedding table `name`, and the output head too if the model ties them: dense, or 8 bits under any scheme."""
    return Embedding(linear_from_checkpoint(ckpt, [name], scheme, dtype), dtype)


def main(argv: list[str] | None = None) -> int:
    """`python quantize.py`: the command lives in quantized_folder.py, which needs more of the engine than this file."""
    from formats import quantized_folder

    return quantized_folder.main(argv)


if __name__ == "__main__":
    raise SystemExit(main())
