"""Calls into the C++ kernels: the arguments of an operation are one struct, which both languages fill and read by name.

The problem. An operation has up to twenty arguments. If Python writes them in a row and C++ reads them in a row, one
added in the middle of one side turns pointers into sizes on the other.

The idea. The struct is written down once, in C, beside the Python function that fills it (native/cpu.py). The build
includes the text as a header; here Python's `struct` module reads the same text and lays the values out as C does:

    const float *x, *weight; float* y; int64_t rows, n; float eps;         one declaration
      │                                          │
      ▼ C++: struct RmsNorm { ... }              ▼ Python: RMS_NORM(x=x, weight=weight, y=out, rows=3, n=576, eps=1e-5)
                                   | op | n | struct of n words |          64-bit words, run at once or kept on a tape

Left out: structs inside structs, and arrays.
"""

from __future__ import annotations

import re
import struct
import threading

import torch
from torch import Tensor

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
    tape = None  # a native.tape.Tape while one is open


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
