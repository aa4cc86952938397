"""The floor: how fast this machine could possibly go, measured before anything is called fast.

Decoding one token reads every weight byte and every live key and value once, and a processor cannot read faster than
its memory delivers. So

    tokens/s  <=  bandwidth / (weight bytes + KV bytes of the sequence)          the decode floor's reciprocal

A figure in tokens/s alone says nothing; its share of this bound says how much is left to gain. The bandwidth is not
looked up, it is measured here: read a buffer far larger than the caches, with as many threads as the engine uses. A
model small enough to stay in the last-level cache can exceed 100 %: the bound is one for memory.

Source: Williams et al., "Roofline" (CACM 2009); gpt-fast prints the achieved GB/s beside tok/s for the same reason.
Left out: the arithmetic ceiling, which bounds prefill (2 x parameters x tokens operations), not decode.
"""

from __future__ import annotations

import time

import torch

import kernels


def read_bandwidth(device: torch.device | str = "cpu", mebibytes: int = 256, repeats: int = 5) -> float:
    """Bytes per second that a sum over a large buffer reads with the kernels' threads: the best of a few runs."""
    device = torch.device(device)
    if device.type == "cuda":
        mebibytes *= 8
    buffer = torch.ones(mebibytes * 2**18, dtype=torch.float32, device=device)  # 4 bytes each

    def timed() -> float:
        start = time.perf_counter()
        buffer.sum().item()  # .item() waits for the device
        return time.perf_counter() - start

    own = torch.get_num_threads()  # may be 1, so that torch leaves the processors to the kernels' threads
    torch.set_num_threads(kernels.threads())
    try:
        timed()
        return buffer.numel() * 4 / min(timed() for _ in range(repeats))
    finally:
        torch.set_num_threads(own)


def decode_floor(bandwidth: float, weight_bytes: float, kv_bytes: float) -> float:
    """Tokens per second that one sequence cannot exceed while its weights and KV come from memory."""
    return bandwidth / (weight_bytes + kv_bytes)
