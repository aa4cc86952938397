"""Tapes: a whole decode step of C++ kernels, recorded once and replayed in one call.

The problem. A decode step of a small model is two hundred operations of 5 to 30 microseconds each, and Python, torch's
dispatch and an allocation cost about 10 microseconds every time: half of the step is spent on the way to the kernels.

The idea. The kernels' one entry point takes a run of 64-bit words, and one operation is a short run of them:

    one operation      | op | n | struct of arguments |                                    1 call
    a recorded step    | op | n | ... || op | n | ... || ... || op | n | ... |              still 1 call

The pointers are fixed; the numbers behind them (token ids, positions, lengths) are written in place before a replay.
Source: CUDA graphs and their private memory pools, as torch.cuda.CUDAGraph has them. Left out: tapes whose sizes vary.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from native import build
from native.cpu import gather
from native.operation import check, recording


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
