"""The floor: how fast this machine could possibly go, measured before anything is called fast.

Decoding one token reads every weight byte and every live key and value once, and a processor cannot read faster than
its memory delivers. So

    tokens/s  <=  bandwidth / (weight bytes + KV bytes of the sequence)          the decode floor's reciprocal

A figure in tokens/s alone says nothing; its share of this bound says how much is left to gain. The bandwidth is not
looked up, it is measured here: read a buffer far larger than the caches, with as many threads as the engine uses. A
model small enough to stay in the last-level cache can exceed 100 %: the bound is one for memory.

Prefill has the other ceiling: each weight is multiplied with every token of the prompt, two operations a time, and a
processor multiplies no faster than it does in one large matrix product, which is measured too:

    seconds   >=  2 x parameters x tokens / operations a second                  the prefill floor

Source: Williams et al., "Roofline" (CACM 2009); gpt-fast prints the achieved GB/s beside tok/s for the same reason.
Left out: the operations of attention, and the bandwidth of the caches between memory and processor.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import kernels


def read_bandwidth(device: torch.device | str = "cpu", mebibytes: int = 256, repeats: int = 5) -> float:
    """Bytes per second that a sum over a large buffer reads with the kernels' threads: the best of a few runs."""
    device = torch.device(device)
    if device.type == "cuda":
        mebibytes *= 8
    buffer = torch.ones(mebibytes * 2**18, dtype=torch.float32, device=device)  # 4 bytes each
    return buffer.numel() * 4 / best_time(lambda: buffer.sum().item(), repeats)  # .item() waits for the device


def matrix_rate(dtype: torch.dtype, device: torch.device | str = "cpu", size: int = 1024, repeats: int = 10) -> float:
    """Operations per second of a [size, size] product, a multiplication and an addition each: the best of a few runs.

    `dtype` float32, bfloat16, float16 or int8 (summed in 32 bits, what products of quantised weights can do at most).
    """
    a = torch.ones(size, size, dtype=dtype, device=device)
    product = torch._int_mm if dtype == torch.int8 else torch.mm
    return 2 * size**3 / best_time(lambda: product(a, a)[0, 0].item(), repeats)


def best_time(work: Callable[[], object], repeats: int) -> float:
    """The least seconds of a few runs, on the kernels' threads, after one that is not counted."""
    own = torch.get_num_threads()  # may be 1, so that torch leaves the processors to the kernels' threads
    torch.set_num_threads(kernels.threads())
    try:
        work()
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        return min(seconds)
    finally:
        torch.set_num_threads(own)


def decode_floor(bandwidth: float, weight_bytes: float, kv_bytes: float) -> float:
    """Tokens per second that one sequence cannot exceed while its weights and KV come from memory."""
    return bandwidth / (weight_bytes + kv_bytes)


def prefill_floor(rate: float, parameters: float, tokens: int) -> float:
    """Seconds that a prompt takes at least, at `rate` operations per second."""
    return 2 * parameters * tokens / rate
