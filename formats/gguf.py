"""The GGUF container and its block formats, memory-mapped.

The problem: a model should be one file that starts at once. Reading gigabytes before the first token is slow, and a
second copy while converting them is fatal on a small machine. llama.cpp's answer is GGUF: metadata, a table of tensors,
then the tensors' bytes, aligned, in the very form the kernels read. The file is mapped, not read: the operating system
brings in the pages that are touched, and two processes share them.

    +--------+---------+-----------+--------+--------------------+-----------------------+- - -+------------------+
    | "GGUF" | version | n_tensors | n_keys | key, type, value.. | name, dims, type, at..| pad | tensor bytes ... |
    +--------+---------+-----------+--------+--------------------+-----------------------+- - -+------------------+
      4        4         8           8                             `at` counts from here ------>^

Fewer bits a weight: neighbouring weights of a row form a block with a scale d and perhaps a minimum m (fp16); each
weight keeps a small integer q. In brackets: bits a weight.

    blocks of 32    Q4_0 [4.5]  w = d (q - 8)    Q4_1 [5]  w = d q + m    Q5_0 [5.5], Q5_1 [6]  with a fifth bit kept
                    apart    Q8_0 [8.5]  w = d q, signed
    of 256          Q2_K [2.625], Q4_K [4.5], Q5_K [5.5]: sub-blocks whose scales and minima are themselves quantised:
                    w = d sc q - dmin mn    Q3_K [3.4375], Q6_K [6.5625]: scales only: w = d sc (q - 4 or 32)

Every length, count and offset is compared with the bytes that are there before anything is touched, since a read past
the end of a mapped file kills the process (SIGBUS).

Source: the GGUF specification and block layouts of ggml (github.com/ggml-org/ggml, docs/gguf.md, ggml-common.h).
Left out: writing, big-endian files, split files, importance-matrix (IQ), ternary and MXFP4 blocks.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from formats.config import CheckpointError

MAGIC = b"GGUF"
MAX_ARRAY = 1 << 24  # entries of a metadata array; the largest vocabularies hold well under a million
LFS_POINTER = b"version https://git-lfs"
UNREADABLE = (  # types that exist, by their number, and are not read here
    {9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S"}
    | {22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0"}
    | {35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"}
)


# ---- from a block's bytes to its weights ----


def fields(packed: torch.Tensor, run: int, shifts: Iterable[int], mask: int) -> torch.Tensor:
    """Unpack small integers: each `run` bytes give first the bits at shifts[0] of each byte, then those at shifts[1]...

    [B, n] uint8 -> [B, n * len(shifts)] uint8. All formats are this one pattern with other runs and shifts: 4-bit
    weights are run 16 or 32 with shifts (0, 4), 2-bit weights run 32 with shifts (0, 2, 4, 6), single bits (0 .. 7).
    """
    shifts = torch.tensor(tuple(shifts), dtype=torch.uint8).view(-1, 1)
    return (packed.unflatten(1, (-1, 1, run)) >> shifts & mask).flatten(1)  # [B, n/run, shifts, run] flattened


def half(b: torch.Tensor) -> torch.Tensor:
    """[B, 2n] uint8 -> [B, n] float32, two bytes an fp16 number."""
    return b.contiguous().view(torch.float16).float()


def simple(b: torch.Tensor, bits: int, minimum: bool) -> torch.Tensor:
    """Q4_0, Q4_1, Q5_0, Q5_1: d, perhaps m, the fifth bits (bit j of the 32 belongs to w_j), the low nibbles."""
    q = fields(b[:, -16:], 16, (0, 4), 15)
    if bits == 5:
        q |= fields(b[:, -20:-16], 1, range(8), 1) << 4
    d = half(b[:, :2])
    return d * q.float() + half(b[:, 2:4]) if minimum else d * (q.float() - 2 ** (bits - 1))


def q8_0(b: torch.Tensor) -> torch.Tensor:
    return half(b[:, :2]) * b[:, 2:].contiguous().view(torch.int8).float()


def scaled(d: torch.Tensor, scales: torch.Tensor, q: torch.Tensor, minima: torch.Tensor | None = None) -> torch.Tensor:
    """(d sc) q [- minima]: q [B, 256] in sub-blocks, each with its entry of `scales` and `minima` [B, sub-blocks]."""
    w = (d * scales.float())[:, :, None] * q.float().unflatten(1, (scales.shape[1], -1))  # [B, sub-blocks, weights]
    return (w if minima is None else w - minima[:, :, None]).flatten(1)


def q2_k(b: torch.Tensor) -> torch.Tensor:
    sc, d, dmin = b[:, :16], half(b[:, 80:82]), half(b[:, 82:84])  # a byte of sc: scale low, minimum high
    return scaled(d, sc & 15, fields(b[:, 16:80], 32, (0, 2, 4, 6), 3), dmin * (sc >> 4).float())


def q3_k(b: torch.Tensor) -> torch.Tensor:
    q = fields(b[:, 32:96], 32, (0, 2, 4, 6), 3).char() + fields(b[:, :32], 32, range(8), 1).char() * 4 - 4
    sc = fields(b[:, 96:104], 8, (0, 4), 15) | fields(b[:, 104:108], 4, (0, 2, 4, 6), 3) << 4  # 6 bits, offset 32
    return scaled(half(b[:, 108:110]), sc.char() - 32, q)


def scales_and_minima(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q4_K and Q5_K: twelve bytes hold eight 6-bit scales and eight 6-bit minima, [B, 12] -> two of [B, 8].

    Bytes 0-3 and 4-7 hold scales and minima 0-3 in their low six bits; bytes 8-11 hold the low nibbles of scales (low)
    and minima (high) 4-7, whose top two bits sit in the top two bits of bytes 0-3 and 4-7.
    """
    s, m, rest = b[:, :4], b[:, 4:8], b[:, 8:]
    return torch.cat([s & 63, rest & 15 | s >> 6 << 4], 1), torch.cat([m & 63, rest >> 4 | m >> 6 << 4], 1)


def q45_k(b: torch.Tensor, bits: int) -> torch.Tensor:
    sc, mn = scales_and_minima(b[:, 4:16])
    q = fields(b[:, -128:], 32, (0, 4), 15)
    if bits == 5:
        q |= fields(b[:, 16:48], 32, range(8), 1) << 4
    return scaled(half(b[:, :2]), sc, q, half(b[:, 2:4]) * mn.float())


def q6_k(b: torch.Tensor) -> torch.Tensor:
    q = fields(b[:, :128], 64, (0, 4), 15) | fields(b[:, 128:192], 32, (0, 2, 4, 6), 3) << 4
    return scaled(half(b[:, 208:210]), b[:, 192:208].contiguous().view(torch.int8), q.char() - 32)


@dataclass(frozen=True)
class Kind:
    """A ggml tensor type: its number in files, how many weights and bytes a block has, and how to read it."""

    number: int
    weights: int
    bytes: int
    dense: torch.dtype | None = None
    unpack: Callable[[torch.Tensor], torch.Tensor] | None = None  # [B, bytes] uint8 -> [B, weights] float32


KINDS = {
    "F32": Kind(0, 1, 4, dense=torch.float32),
    "F16": Kind(1, 1, 2, dense=torch.float16),
    "BF16": Kind(30, 1, 2, dense=torch.bfloat16),
    "Q4_0": Kind(2, 32, 18, unpack=partial(simple, bits=4, minimum=False)),
    "Q4_1": Kind(3, 32, 20, unpack=partial(simple, bits=4, minimum=True)),
    "Q5_0": Kind(6, 32, 22, unpack=partial(simple, bits=5, minimum=False)),
    "Q5_1": Kind(7, 32, 24, unpack=partial(simple, bits=5, minimum=True)),
    "Q8_0": Kind(8, 32, 34, unpack=q8_0),
    "Q2_K": Kind(10, 256, 84, unpack=q2_k),
    "Q3_K": Kind(11, 256, 110, unpack=q3_k),
    "Q4_K": Kind(12, 256, 144, unpack=partial(q45_k, bits=4)),
    "Q5_K": Kind(13, 256, 176, unpack=partial(q45_k, bits=5)),
    "Q6_K": Kind(14, 256, 210, unpack=q6_k),
}
KIND_OF_NUMBER = {kind.number: name for name, kind in KINDS.items()}


@dataclass(frozen=True)
class Blocks:
    """A still quantised matrix: `shape` (N, K), `data` [N, K / weights per block, bytes per block] uint8."""

    kind: str
    shape: tuple[int, ...]
    data: torch.Tensor

    def rows(self, index: torch.Tensor) -> Blocks:
        """The rows `index`, in that order (a copy). Rows are whole blocks, so nothing is requantised."""
        return Blocks(self.kind, (len(index), *self.shape[1:]), self.data[index])


def dequantize(blocks: Blocks) -> torch.Tensor:
    """The float32 weights of `blocks`, shape [N, K]: a slice at a time, so that little beside the result is alive."""
    kind = KINDS[blocks.kind]
    flat = blocks.data.reshape(-1, kind.bytes)  # [blocks, bytes]
    out = torch.empty(len(flat), kind.weights)
    step = max(1, (1 << 20) // kind.weights)
    for i in range(0, len(flat), step):
        out[i : i + step] = kind.unpack(flat[i : i + step])
    return out.view(blocks.shape)


# ---- the container


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `shape` slowest dimension first (as torch has it), `offset` from the start of the file."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Cursor:
    """Reads numbers and strings from the mapped file, never past its end."""

    SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at, self.size = path, data, 0, len(data)

    def damage(self, cause: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {cause}: truncated or damaged, fetch it again.")

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            raise self.damage(f"{what} needs {count} bytes at offset {self.at}, but the file ends at {self.size}")

    def numbers(self, code: str, count: int, what: str) -> tuple:
        size = struct.calcsize("<" + code) * count
        self.need(size, what)
        self.at += size
        return struct.unpack_from(f"<{count}{code}", self.data, self.at - size)

    def number(self, code: str, what: str):
        return self.numbers(code, 1, what)[0]

    def string(self, what: str) -> str:
        """UTF-8; bytes that are none (a vocabulary may hold fragments) survive as surrogate escapes."""
        length = self.number("Q", f"the length of {what}")
        self.need(length, what)
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8", errors="surrogateescape")

    def value(self, what: str):
        kind, count = self.number("I", f"the type of {what}"), 1
        is_array = kind == 9
        if is_array:  # of numbers or of strings
            kind, count = self.number("I", what), self.number("Q", what)
        if count > MAX_ARRAY:
            raise self.damage(f"{what} claims {count} entries, more than {MAX_ARRAY}")
        if kind != 8 and kind not in self.SCALARS:
            raise CheckpointError(f"{self.path}: {what} has value type {kind}, which is not read: damaged or newer.")
        if kind == 8:
            values = [self.string(what) for _ in range(count)]
        else:
            values = list(self.numbers(self.SCALARS[kind], count, what))
        return values if is_array else values[0]


class File:
    """A GGUF file, mapped. `metadata` maps key to value, `tensors` name to TensorInfo.

    Tensors returned are views of a private mapping: to be read, not written. Raises CheckpointError with cause, remedy.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        with open(self.path, "rb") as file:
            head = file.read(24)
            if head.startswith(LFS_POINTER):
                raise CheckpointError(
                    f"{path} is a Git LFS pointer, not the file: run `git lfs pull` in its repository."
                )
            if head[:4] != MAGIC:
                raise CheckpointError(f"{path} is not a GGUF file: it begins with {head[:4]!r} instead of {MAGIC!r}.")
            # Private (copy on write) because torch wants writable memory; the file itself cannot be changed through it.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        cursor = Cursor(self.path, self._map)
        cursor.at = len(MAGIC)
        version = cursor.number("I", "the header")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            cause = "big-endian" if swapped in (2, 3) else f"version {version}"
            raise CheckpointError(f"{path}: {cause} GGUF is not read, only little-endian versions 2 and 3: convert it.")
        n_tensors, n_keys = cursor.numbers("Q", 2, "the header")
        cursor.need(13 * n_keys + 32 * n_tensors, f"a header of {n_keys} keys and {n_tensors} tensors")
        self.metadata = {}
        for i in range(n_keys):
            key = cursor.string(f"metadata key {i}")
            if key in self.metadata:
                raise cursor.damage(f"metadata key {key!r} is there twice")
            self.metadata[key] = cursor.value(f"metadata {key!r}")
        self.tensors = self._read_table(cursor, n_tensors)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)  # [file size]

    def _read_table(self, cursor: Cursor, count: int) -> dict[str, TensorInfo]:
        entries = [self._read_entry(cursor) for _ in range(count)]
        align = self.metadata.get("general.alignment", 32)
        if type(align) is not int or not 1 <= align <= 1 << 20 or align & (align - 1):
            raise cursor.damage(f"general.alignment is {align!r}, not a power of two")
        start = -(-cursor.at // align) * align
        table: dict[str, TensorInfo] = {}
        for name, kind, shape, offset in entries:
            nbytes = math.prod(shape) // KINDS[kind].weights * KINDS[kind].bytes
            end, tensor = start + offset + nbytes, f"tensor {name!r} {list(shape)} ({kind})"
            if offset % align:
                raise cursor.damage(f"{tensor} starts at {offset}, not a multiple of {align}")
            if end > cursor.size:
                raise cursor.damage(f"{tensor} ends at byte {end} of {cursor.size}")
            if name in table:
                raise cursor.damage(f"{tensor} is listed twice")
            table[name] = TensorInfo(kind, shape, start + offset, nbytes)
        # Two tensors on the same bytes are a damaged table, which would otherwise load as fluent noise.
        for (a, first), (b, second) in pairwise(sorted(table.items(), key=lambda item: item[1].offset)):
            if first.offset + first.nbytes > second.offset:
                raise cursor.damage(f"tensors {a!r} and {b!r} overlap")
        return table

    def _read_entry(self, cursor: Cursor) -> tuple[str, str, tuple[int, ...], int]:
        name = cursor.string("a tensor name")
        tensor = f"tensor {name!r}"
        n_dims = cursor.number("I", tensor)
        if not 1 <= n_dims <= 4:
            raise cursor.damage(f"{tensor} has {n_dims} dimensions, not 1 to 4")
        dims, number = cursor.numbers("Q", n_dims, tensor), cursor.number("I", tensor)
        if number not in KIND_OF_NUMBER:
            known = UNREADABLE.get(number, f"unknown type {number}")
            use = f"Supported: {', '.join(KINDS)}. Use a file in one of these formats."
            raise CheckpointError(f"{self.path}: {tensor} is stored as {known}. {use}")
        kind = KIND_OF_NUMBER[number]
        if 0 in dims or dims[0] % KINDS[kind].weights:
            blocks = f"{kind} (blocks of {KINDS[kind].weights})"
            raise cursor.damage(f"{tensor} has shape {list(dims)}, which {blocks} cannot have")
        return name, kind, dims[::-1], cursor.number("Q", tensor)

    def raw(self, name: str) -> torch.Tensor:
        """The tensor's bytes, a view of the mapping: [nbytes] uint8."""
        info = self.tensors[name]
        return self._bytes[info.offset : info.offset + info.nbytes]

    def blocks(self, name: str) -> Blocks | None:
        """The tensor still quantised, a view of the mapping; None when it is stored dense."""
        info, kind = self.tensors[name], KINDS[self.tensors[name].kind]
        if kind.dense is not None:
            return None
        return Blocks(info.kind, info.shape, self.raw(name).view(*info.shape[:-1], -1, kind.bytes))

    def tensor(self, name: str) -> torch.Tensor:
        """Dense: F32, F16 and BF16 as a view of the mapping, everything else dequantised to float32."""
        info, blocks = self.tensors[name], self.blocks(name)
        if blocks is not None:
            return dequantize(blocks)
        raw, dtype = self.raw(name), KINDS[info.kind].dense
        if info.offset % dtype.itemsize:  # alignment below the element size: legal, but torch cannot view it
            raw = raw.clone()
        return raw.view(dtype).view(info.shape)

    def release(self, name: str) -> None:
        """Tell the system that this tensor's pages are not needed for now: resident memory falls, the data stays."""
        info = self.tensors[name]
        first = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (info.offset + info.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, length)
