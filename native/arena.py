"""Memory for weights that stay: large mappings in huge pages, handed out piece by piece.

The problem. From the heap, the weights that stay would lie between the temporaries that go, and the holes add up:
loading took up to 1.6 times the final weights. And one layer of a small model is less than a huge page (2 MiB).

The idea. Take 64 MiB at a time and hand out neighbouring pieces. Side by side the layers fill huge pages, and a step
that reads every weight once misses the TLB far less often. A mapping goes with its last piece; what nobody touched of
it was never memory. Left out: giving single pieces back.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

CHUNK = 64 << 20
free = torch.empty(0, dtype=torch.uint8)


def empty(rows: int, columns: int) -> torch.Tensor:
    """uint8 [rows, columns] of zeros, aligned to a cache line."""
    global free
    nbytes = rows * columns
    if nbytes > len(free):
        mapping = mmap.mmap(-1, max(nbytes, CHUNK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):  # a system without huge pages: small ones do
            mapping.madvise(mmap.MADV_HUGEPAGE)
        free = torch.frombuffer(mapping, dtype=torch.uint8)
    piece, free = free[:nbytes], free[-(-nbytes // 64) * 64 :]
    return piece.view(rows, columns)
