"""The floor: how fast this machine could possibly go, measured before anything is called fast.

Decoding a token reads every weight and every live key and value once, and multiplies each weight with each prompt token
once. A processor does neither faster than its memory delivers and its cores multiply, which is measured, not looked up:

    decode    tokens/s  <=  bandwidth / (weight bytes + KV bytes of the sequence)
    prefill   seconds   >=  2 x parameters x tokens / operations a second

A figure's share of its bound says how much is left to gain. A model that stays in the last-level cache can exceed it.

Source: Williams et al., "Roofline" (CACM 2009). Left out: the operations of attention, the bandwidth of the caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import kernels


def read_bandwidth(device: torch.device | str = "cpu", mebibytes: int = 256, repeats: int = 5) -> float:
    """Bytes per second that a sum over a buffer far larger than the caches reads: the best of a few runs."""
    device = torch.device(device)
    if device.type == "cuda":
        mebibytes *= 8
    buffer = torch.ones(mebibytes * 2**18, dtype=torch.float32, device=device)  # 4 bytes each
    return buffer.numel() * 4 / best_time(lambda: buffer.sum().item(), repeats)  # .item() waits for the device


def matrix_rate(dtype: torch.dtype, device: torch.device | str = "cpu", size: int = 1024, repeats: int = 10) -> float:
    """Operations per second (a multiplication and an addition each) of a [size, size] product: the best of a few runs.

    `dtype` is float32, bfloat16, float16 or int8, which is summed in 32 bits as products of quantised weights are.
    """
    a = torch.ones(size, size, dtype=dtype, device=device)
    product = torch._int_mm if dtype == torch.int8 else torch.mm
    return 2 * size**3 / best_time(lambda: product(a, a)[0, 0].item(), repeats)


def best_time(work: Callable[[], object], repeats: int) -> float:
    """The least seconds of a few runs, on the kernels' threads, after one that is not counted."""
    own, seconds = torch.get_num_threads(), []  # may be 1: torch leaves the processors to the kernels' threads
    torch.set_num_threads(kernels.threads())
    try:
        for _ in range(1 + repeats):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(own)
    return min(seconds[1:])


def decode_floor(bandwidth: float, weight_bytes: float, kv_bytes: float) -> float:
    """Tokens per second that one sequence cannot exceed while its weights and KV come from memory."""
    return bandwidth / (weight_bytes + kv_bytes)


def prefill_floor(rate: float, parameters: float, tokens: int) -> float:
    """Seconds that a prompt takes at least, at `rate` operations per second."""
    return 2 * parameters * tokens / rate
