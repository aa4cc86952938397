"""Calls into the C++ kernels, and tapes: a whole decode step recorded once and replayed in one call.

The problem. A decode step of a small model is two hundred operations of 5 to 30 microseconds each, and Python, torch's
dispatch and an allocation cost about 10 microseconds every time: half of the step is spent on the way to the kernels.

The idea. The kernels' one entry point takes a run of 64-bit words, and one operation is a short run of them:

    one operation      | op | n | pointers and sizes ... |                              1 call
    a recorded step    | op | n | ... || op | n | ... || ... || op | n | ... |          still 1 call

`Tape` keeps the words of every operation that is called while it is open; `replay()` hands all of them over at once.
The pointers are fixed; the numbers behind them (token ids, positions, block tables, lengths) are written in place
before each replay. It is a CUDA graph for the CPU, with the same two rules. Whatever is not one of our operations
would silently not be replayed, so the recorder translates the two torch operations that a step needs (a copy, a choice
of rows), lets pass what moves no data, and refuses the rest. And memory that is free again while recording is still
written by the replay, so results live in memory that belongs to the tape, given out again only within it.

Source: CUDA graphs and their private memory pools, as torch.cuda.CUDAGraph has them. Left out: tapes whose sizes vary.
"""

from __future__ import annotations

import struct
import threading
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from native import build as kernels_build

RMS_NORM, SILU_MUL, LINEAR, EMBEDDING, ROPE, ATTENTION, GATHER, DRAW = range(8)  # as in OPS of kernels.cpp


class _Open(threading.local):  # one for each thread: what another one computes meanwhile is not of the step
    tape: Tape | None = None


_open = _Open()


def call(op: int, form: str, *words) -> None:
    """Run one operation now, and note it if a tape is open. `form` as in struct: whole numbers and pointers are q."""
    run = _layout(form).pack(op, len(words), *words)
    if _open.tape is not None:
        _open.tape.words.append(run)
    _check(kernels_build.library.run(run, len(words) + 2))


def empty(shape: tuple[int, ...]) -> Tensor:
    """float32 memory for a result, the tape's own while one is open."""
    return torch.empty(shape) if _open.tape is None else _open.tape.empty(shape)


def ready(t: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`t` as the kernels read it: contiguous and of `dtype`. A conversion could not be replayed."""
    if t.dtype is dtype and t.is_contiguous():
        return t
    if _open.tape is not None:
        raise ValueError(f"a tape needs contiguous {dtype} tensors, got {t.dtype} with strides {t.stride()}")
    return t.to(dtype).contiguous()


@lru_cache(maxsize=64)
def _layout(form: str) -> struct.Struct:
    return struct.Struct("=2q" + form)


def _check(error: bytes | None) -> None:
    if error:
        raise ValueError(error.decode())


def _uses(memory: Tensor) -> int:  # how many tensors share this memory, this one included
    return torch._C._storage_Use_Count(memory.untyped_storage()._cdata)


class Tape(TorchDispatchMode):
    """The operations called while it was open, to be run again by `replay()`; see `kernels.record`."""

    def __init__(self):
        super().__init__()
        self.words: list[bytes] = []
        self.inputs: dict[int, Tensor] = {}  # address -> a tensor that keeps that memory alive
        self.memory: dict[int, list[tuple[Tensor, int]]] = {}  # elements -> (memory, its uses when nobody has it)
        self.owned: set[int] = set()  # addresses of that memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled; True, the default, would import torch's compiler: three seconds for nothing."""
        return False

    def __enter__(self):
        if _open.tape is not None:
            raise ValueError("a tape is already being recorded: close it first")
        _open.tape = self
        return super().__enter__()

    def __exit__(self, *error):
        _open.tape = None
        self.run = b"".join(self.words)
        return super().__exit__(*error)

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Memory that no tensor of the recording uses at this point, nor at the same point of a replay."""
        n = 1
        for size in shape:
            n *= size
        blocks = self.memory.setdefault(n, [])
        for memory, unused in blocks:
            if _uses(memory) == unused:
                return memory.view(shape)
        memory = torch.empty(n)
        blocks.append((memory, _uses(memory)))
        self.owned.add(memory.data_ptr())
        return memory.view(shape)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = {t.untyped_storage().data_ptr(): t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)}
        for address, t in given.items():
            if address not in self.owned:
                self.inputs.setdefault(address, t)
        name = func._schema.name
        if name == "aten::copy_" and args[0].shape == args[1].shape and args[0].dtype is args[1].dtype:
            return _gather(args[1], None, args[0])
        if name == "aten::index" and len(args[1]) == 1 and args[1][0].dim() == 1:
            return _gather(args[0], args[1][0], self.empty((args[1][0].shape[0], *args[0].shape[1:])))
        out = func(*args, **kwargs)
        if func.namespace == "vitrine":
            return out
        results = out if isinstance(out, (tuple, list)) else (out,)
        if func._schema.is_mutable or any(r.untyped_storage().data_ptr() not in given for r in results):
            raise ValueError(f"{func} cannot be part of a tape: only torch.ops.vitrine, views and row copies can be")
        return out

    def replay(self) -> None:
        """Run every recorded operation again, on the same memory."""
        _check(kernels_build.library.replay(self.run, len(self.run) // 8))


def _gather(source: Tensor, rows: Tensor | None, out: Tensor) -> Tensor:
    """out[i] = source[rows[i]], or source[i] without rows."""
    ready(out, out.dtype)
    source = ready(source, out.dtype)
    count, limit = (out.shape[0], source.shape[0]) if rows is not None else (1, 1)
    pointers = (0 if rows is None else ready(rows, torch.int64).data_ptr(), source.data_ptr(), out.data_ptr())
    call(GATHER, "6q", *pointers, count, limit, out.numel() * out.element_size() // max(count, 1))
    return out
