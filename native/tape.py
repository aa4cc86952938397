"""Calls into the C++ kernels as words, and tapes: a whole decode step, recorded once and replayed in one call.

The problem. An operation has up to twenty arguments: one that is added on one side only turns pointers into sizes on
the other. And a decode step of a small model is two hundred operations of 5 to 30 microseconds; Python, torch's
dispatch and an allocation cost about 10 microseconds each time, so half of the step is spent on the way to the kernels.

The idea. The arguments are one struct, written down once, in C (native/cpu.py). The build includes its text as a
header; here Python's `struct` module reads the same text and lays the values out as C does:

    const float *x, *weight; float* y; int64_t rows, n; float eps;         one declaration
      │ C++: struct RmsNorm { ... }              │ Python: RMS_NORM(x=x, weight=weight, y=out, rows=3, n=576, eps=1e-5)

    one operation      | op | n | struct of n words |                                      1 call
    a recorded step    | op | n | ... || op | n | ... || ... || op | n | ... |              still 1 call

A tape's pointers are fixed; the numbers behind them (ids, positions, lengths) are written in place before a replay.
Source: CUDA graphs and their private memory pools, as torch.cuda.CUDAGraph has them. Left out: tapes whose sizes vary.
"""

from __future__ import annotations

import re
import struct
import threading
from math import prod

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from native import build

FORMATS = {"int64_t": "q", "float": "f", "bool": "?"}  # of Python's struct module; any pointer is P


class Operation:
    """One operation of kernels.cpp. `fields` is the body of the C struct that holds its arguments."""

    declared: list[Operation] = []  # the order is that of the table in kernels.cpp

    def __init__(self, name: str, fields: str):
        self.name, self.text, self.number = name, f"struct {name} {{{fields}}};", len(self.declared)
        self.declared.append(self)
        layout, words = "@2q", {}  # @: sizes and alignment of C
        for kind, names in re.findall(r"(?:const )?(\w+)(\*? [^;]+);", re.sub("//.*", "", fields)):
            for field in names.split(","):
                name, is_pointer = field.strip(" *"), "*" in field
                words[name] = f"0 if {name} is None else {name}.data_ptr()" if is_pointer else name
                layout += "P" if is_pointer else FORMATS[kind]
        self.layout = struct.Struct(layout + "0q")
        self.n_words = self.layout.size // 8 - 2
        # As namedtuple does it: a function with these very arguments, twice as fast as looking up each by its name.
        self.values = eval(f"lambda *, {', '.join(words)}: ({', '.join(words.values())})")

    def __call__(self, **arguments: Tensor | float | None) -> None:
        """Run the operation now, and add it to the tape if one is open. A pointer is given as its tensor or None."""
        words = self.layout.pack(self.number, self.n_words, *self.values(**arguments))
        if recording.tape is not None:
            recording.tape.words.append(words)
        check(build.library.run(words, len(words) // 8))


def header() -> str:
    """C++: the struct of every operation, and the list of their names."""
    names = " ".join(f"X({operation.name})" for operation in Operation.declared)
    structs = "\n".join(operation.text for operation in Operation.declared)
    return f"#pragma once\n#include <cstdint>\n{structs}\n#define VITRINE_OPERATIONS(X) {names}\n"


class _Recording(threading.local):  # each thread has its own: what others compute meanwhile is not part of the step
    tape: Tape | None = None


recording = _Recording()


def empty(shape: tuple[int, ...]) -> Tensor:
    """float32 memory for a result, the tape's own while one is open."""
    return torch.empty(shape) if recording.tape is None else recording.tape.empty(shape)


def ready(t: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """`t` as the kernels read it: contiguous and of `dtype`. A conversion could not be replayed."""
    if t is None or t.dtype is dtype and t.is_contiguous():
        return t
    if recording.tape is not None:
        raise ValueError(f"a tape needs contiguous {dtype} tensors, got {t.dtype} with strides {t.stride()}")
    return t.to(dtype).contiguous()


def check(error: bytes | None) -> None:
    if error:
        raise ValueError(error.decode())


GATHER = Operation("Gather", """
    const int64_t* rows;  // [count], or null for 0, 1, 2 ...
    const char* x;
    char* y;
    int64_t count, limit, bytes;  // rows to copy, rows of x, bytes of a row
""")  # fmt: skip


def gather(source: Tensor, rows: Tensor | None, out: Tensor) -> Tensor:
    """out[i] = source[rows[i]], or source[i] without rows; of any dtype."""
    ready(out, out.dtype)
    source, rows = ready(source, out.dtype), ready(rows, torch.int64)
    count, limit = (out.shape[0], source.shape[0]) if rows is not None else (1, 1)
    GATHER(rows=rows, x=source, y=out, count=count, limit=limit, bytes=out.nbytes // max(count, 1))
    return out


def uses(memory: Tensor) -> int:  # how many tensors share this memory, this one included
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
        if recording.tape is not None:
            raise ValueError("a tape is already being recorded: close it first")
        recording.tape = self
        return super().__enter__()

    def __exit__(self, *error):
        recording.tape = None
        self.run = b"".join(self.words)
        return super().__exit__(*error)

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Memory that no tensor uses at this point of the recording. It is the tape's: a replay still writes there."""
        blocks = self.memory.setdefault(prod(shape), [])
        for memory, unused in blocks:
            if uses(memory) == unused:
                return memory.view(shape)
        memory = torch.empty(prod(shape))
        blocks.append((memory, uses(memory)))
        self.owned.add(memory.data_ptr())
        return memory.view(shape)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # What is no operation of ours would silently not be replayed. The two that a step needs (a copy, a choice of
        # rows) are translated, what moves no data may pass, and the rest is refused.
        kwargs = kwargs or {}
        tensors = {t.untyped_storage().data_ptr(): t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)}
        self.inputs |= {address: t for address, t in tensors.items() if address not in self.owned}
        name = func._schema.name
        if name == "aten::copy_" and args[0].shape == args[1].shape and args[0].dtype is args[1].dtype:
            return gather(args[1], None, args[0])
        if name == "aten::index" and len(args[1]) == 1 and args[1][0].dim() == 1:
            return gather(args[0], args[1][0], self.empty((args[1][0].shape[0], *args[0].shape[1:])))
        out = func(*args, **kwargs)
        if func.namespace != "vitrine":
            results = out if isinstance(out, (tuple, list)) else (out,)
            if func._schema.is_mutable or any(r.untyped_storage().data_ptr() not in tensors for r in results):
                raise ValueError(f"{func} cannot be part of a tape: only torch.ops.vitrine, views, row copies")
        return out

    def replay(self) -> None:
        """Run every recorded operation again, on the same memory."""
        check(build.library.replay(self.run, len(self.run) // 8))
