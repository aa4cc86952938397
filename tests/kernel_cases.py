"""What the tests of the kernels share: drawn weights and caches, poisoned memory, one small decoder layer."""

import os

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

import kernels

ops = torch.ops.vitrine
ROWS = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 17, 70])
SEEDS = st.integers(0, 2**31 - 1)
drawn = settings(max_examples=int(os.environ.get("KERNEL_EXAMPLES", "40")), deadline=None)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def poison(monkeypatch: pytest.MonkeyPatch):
    """Fresh memory holds NaN: an output element a kernel forgets to write cannot pass for a zero."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))


def compare(name: str, *args, atol: float, rtol: float, **kwargs) -> None:
    """An operation on the backend in use, on poisoned memory, against its reference."""
    with pytest.MonkeyPatch.context() as patch:
        poison(patch)
        got = getattr(ops, name)(*args, **kwargs)
    torch.testing.assert_close(got, getattr(kernels, name)(*args, **kwargs), atol=atol, rtol=rtol)


def random_weight(bits, n, k, group_size, g):
    """A packed weight [n, k] with k padded to its group, codes over their whole range."""
    step = group_size or 32
    kp = -(-k // step) * step
    if bits == 4:
        codes = torch.randint(0, 256, (n, kp // 2), dtype=torch.uint8, generator=g)
        scales, mins = (torch.randn(n, kp // group_size, generator=g).half() * 0.1 for _ in range(2))
        return kernels.pack_int4(codes, scales, mins, group_size)
    codes = torch.randint(-128, 128, (n, kp), dtype=torch.int8, generator=g)
    scales = torch.randn(n, kp // group_size if group_size else 1, generator=g) * 0.01
    return kernels.pack_int8(codes, scales.half() if group_size else scales, group_size)


class Paged:
    """Sequences of given (context, new rows) over shuffled blocks; everything they do not own is NaN."""

    def __init__(self, seqs, heads, kv_heads, head_dim, block_size, g, dtype=torch.float32, pad_rows=0):
        counts = [-(-max(c, 1) // block_size) for c, _ in seqs]
        free = (1 + torch.randperm(sum(counts) + 2, generator=g)).tolist()
        shape = (sum(counts) + 3, kv_heads, block_size, head_dim)
        self.k, self.v = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
        self.tables = torch.zeros(len(seqs), max(counts, default=1), dtype=torch.int32)
        for s, (context, _) in enumerate(seqs):
            blocks = [free.pop() for _ in range(counts[s])]
            self.tables[s, : counts[s]] = torch.tensor(blocks)
            for j in range(context):
                at = blocks[j // block_size], slice(None), j % block_size
                self.k[at], self.v[at] = (torch.randn(kv_heads, head_dim, generator=g).to(dtype) for _ in range(2))
        self.starts = torch.tensor([0, *(n for _, n in seqs)]).cumsum(0).int()
        self.lens = torch.tensor([c for c, _ in seqs], dtype=torch.int32)
        self.q = torch.randn(int(self.starts[-1]) + pad_rows, heads, head_dim, generator=g)

    def args(self, window=0, softcap=0.0, scale=0.3):
        return self.q, self.k, self.v, self.tables, self.starts, self.lens, scale, window, softcap


def one_layer(hidden, weights, state):
    """A decoder layer as kernels.py draws it."""
    qkv = ops.int4_linear(hidden, weights["qkv"], 64, 32, norm_weight=weights["norm"], eps=1e-5)
    q = ops.rope_write_kv(qkv, state["positions"], state["cos_sin"], state["k"], state["v"], state["slots"], 2)
    mixed = ops.paged_attention(q, state["k"], state["v"], state["tables"], state["starts"], state["lens"], 0.25)
    hidden = ops.int4_linear(mixed.flatten(1), weights["o"], 48, 32, residual=hidden)
    gated = ops.int4_linear(hidden, weights["gate_up"], 128, 32, norm_weight=weights["norm"], eps=1e-5, silu_gate=True)
    return ops.int4_linear(gated, weights["down"], 48, 32, residual=hidden)


def layer_inputs():
    g = generator(3)
    shapes = {"qkv": (64, 48), "o": (48, 32), "gate_up": (128, 48), "down": (48, 64)}
    weights = {name: random_weight(4, *shape, 32, g) for name, shape in shapes.items()}
    weights["norm"] = torch.randn(48, generator=g)
    state = {
        "positions": torch.tensor([0, 1, 2]),
        "slots": torch.tensor([4, 5, 6]),
        "tables": torch.tensor([[1]], dtype=torch.int32),
        "starts": torch.tensor([0, 3], dtype=torch.int32),
        "lens": torch.tensor([3], dtype=torch.int32),
        "cos_sin": torch.randn(8, 16, generator=g),
        "k": torch.zeros(3, 1, 4, 16),
        "v": torch.zeros(3, 1, 4, 16),
    }
    return torch.randn(3, 48, generator=g), weights, state


def copies(state):
    return {name: t.clone() for name, t in state.items()}
