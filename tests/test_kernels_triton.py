"""The Triton kernels against the references, in Triton's interpreter (no GPU) and, where there is one, on the GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_cases import SEEDS, Paged, compare, generator, ops, random_weight

import kernels

pytest.importorskip("triton")
# Triton reads the variable when it is first imported, and torch may have imported it already: hence a child process.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available()
in_triton = pytest.mark.skipif(not (INTERPRETED or GPU), reason="runs in the child process below")
drawn = settings(max_examples=15, deadline=None, phases=[Phase.generate])  # shrinking would take minutes here
SEQUENCES = [(1, 1), (5, 5), (70, 1), (64, 3), (65, 17), (130, 0), (600, 2), (1030, 1)]  # (context, new rows)


@pytest.fixture(autouse=True)
def device():
    before = kernels.backend()
    if INTERPRETED or GPU:
        kernels.set_backend("triton")
    with torch.device("cpu" if INTERPRETED else "cuda" if GPU else "cpu"):
        yield
    kernels.set_backend(before)


@pytest.mark.skipif(INTERPRETED, reason="this is the child process")
def test_the_triton_kernels_in_the_interpreter():
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    result = subprocess.run(command, cwd=Path(__file__).parent.parent, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert " passed" in result.stdout


def on_device(*values):
    device = torch.get_default_device()
    return [v.to(device) if isinstance(v, torch.Tensor) else v for v in values]


@in_triton
@drawn
@given(
    seqs=st.lists(st.sampled_from(SEQUENCES), max_size=3),
    kv_heads=st.sampled_from([1, 2]), group=st.sampled_from([1, 2, 3, 7]), head_dim=st.sampled_from([16, 20, 64]),
    block_size=st.sampled_from([4, 16]), window=st.sampled_from([0, 0, 1, 70]),
    softcap=st.sampled_from([0.0, 2.0]), pad=st.sampled_from([0, 3]), seed=SEEDS,
)  # fmt: skip
def test_attention_matches_the_reference(seqs, kv_heads, group, head_dim, block_size, window, softcap, pad, seed):
    with torch.device("cpu"):
        paged = Paged(seqs, kv_heads * group, kv_heads, head_dim, block_size, generator(seed), pad_rows=pad)
    compare("paged_attention", *on_device(*paged.args(window, softcap)), atol=2e-5, rtol=2e-5)


@in_triton
@drawn
@given(
    rows=st.sampled_from([0, 1, 5, 17]), bits=st.sampled_from([4, 8]), n=st.sampled_from([1, 16, 33, 70]),
    k=st.sampled_from([1, 32, 100, 130]), group_size=st.sampled_from([0, 32, 64]), gate=st.booleans(),
    activation=st.sampled_from(["int8", "float"]), seed=SEEDS,
)  # fmt: skip
def test_linear_matches_the_reference(rows, bits, n, k, group_size, gate, activation, seed):
    group_size = group_size or (32 if bits == 4 else 0)
    n += n % 2 if gate else 0
    with torch.device("cpu"):
        g = generator(seed)
        packed, x, bias = random_weight(bits, n, k, group_size, g), torch.randn(rows, k, generator=g), torch.randn(n)
    x, packed, bias = on_device(x, packed, bias)
    options = {"bias": bias, "silu_gate": gate, "activation": activation}
    compare(f"int{bits}_linear", x, packed, n, group_size, **options, atol=1e-3, rtol=1e-4)


@in_triton
def test_a_query_row_is_the_same_bits_in_any_company():
    with torch.device("cpu"):
        paged = Paged([(600, 1), (70, 17), (5, 5)], 6, 2, 16, 4, generator(0))
    q, k, v, tables, starts, lens, *rest = on_device(*paged.args())
    together = ops.paged_attention(q, k, v, tables, starts, lens, *rest)
    alone = ops.paged_attention(q[:1], k, v, tables[:1], starts[:2], lens[:1], *rest)
    assert torch.equal(alone, together[:1])
