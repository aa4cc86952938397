"""Rotation, cache writes and paged attention against their references, and what must hold bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import ROWS, SEEDS, Paged, compare, drawn, generator, ops

import kernels
from native import cpu as kernels_native

pytestmark = pytest.mark.usefixtures("native")


@st.composite
def sequences(draw):
    seqs = []
    for _ in range(draw(st.integers(0, 4))):
        context = draw(st.sampled_from([1, 2, 5, 63, 64, 65, 130, 200]))
        seqs.append((context, min(context, draw(st.sampled_from([0, 1, 1, 2, 17, 70])))))
    return seqs


ATTENTION = {
    "kv_heads": st.sampled_from([1, 2, 3]),
    "group": st.sampled_from([1, 2, 3, 4, 7]),
    "head_dim": st.sampled_from([16, 20, 36, 64, 80, 128]),
    "block_size": st.sampled_from([1, 4, 16, 32]),
    "window": st.sampled_from([0, 0, 1, 4, 64, 100]),
    "seed": SEEDS,
}


@drawn
@given(
    seqs=sequences(),
    pad=st.sampled_from([0, 3]),
    softcap=st.sampled_from([0.0, 0.5, 50.0]),
    dtype=st.sampled_from(list(kernels_native.CACHE_TYPES)),
    **ATTENTION,
)
def test_attention_matches_the_reference(
    seqs, pad, softcap, dtype, kv_heads, group, head_dim, block_size, window, seed
):
    paged = Paged(seqs, kv_heads * group, kv_heads, head_dim, block_size, generator(seed), dtype, pad)
    compare("paged_attention", *paged.args(window, softcap), atol=2e-5, rtol=2e-5)


@drawn
@given(context=st.sampled_from([5, 64, 100, 200]), cuts=st.sets(st.integers(1, 199)), **ATTENTION)
def test_a_query_row_is_the_same_bits_however_it_is_chunked(
    context, cuts, kv_heads, group, head_dim, block_size, window, seed
):
    paged = Paged([(context, context)], kv_heads * group, kv_heads, head_dim, block_size, generator(seed))
    whole = ops.paged_attention(*paged.args(window))
    edges = sorted({0, context, *(c for c in cuts if c < context)})
    for a, b in zip(edges, edges[1:], strict=False):
        starts, lens = torch.tensor([0, b - a], dtype=torch.int32), torch.tensor([b], dtype=torch.int32)
        q = paged.q[a:b].contiguous()
        part = ops.paged_attention(q, paged.k, paged.v, paged.tables, starts, lens, 0.3, window)
        assert torch.equal(part, whole[a:b])


@pytest.mark.parametrize("window", [0, 70])
def test_a_query_row_is_the_same_bits_among_other_sequences(window):
    seqs = [(200, 1), (64, 64), (1, 1), (131, 3), (90, 0), (400, 1), (65, 1)]
    paged = Paged(seqs, 9, 3, 64, 16, generator(1))
    together = ops.paged_attention(*paged.args(window))
    for s, (_, n) in enumerate(seqs):
        rows = slice(int(paged.starts[s]), int(paged.starts[s]) + n)
        starts, lens = torch.tensor([0, n], dtype=torch.int32), paged.lens[s : s + 1]
        alone = ops.paged_attention(
            paged.q[rows].contiguous(), paged.k, paged.v, paged.tables[s : s + 1], starts, lens, 0.3, window
        )
        assert torch.equal(alone, together[rows])


@drawn
@given(
    rows=ROWS, heads=st.integers(1, 4), kv_heads=st.integers(1, 3), half=st.integers(1, 40), norm=st.booleans(),
    dtype=st.sampled_from(list(kernels_native.CACHE_TYPES)), seed=SEEDS,
)  # fmt: skip
def test_rope_write_kv_matches_the_reference(rows, heads, kv_heads, half, norm, dtype, seed):
    g = generator(seed)
    dim, block_size = 2 * half, 4
    qkv, cos_sin = torch.randn(rows, (heads + 2 * kv_heads) * dim, generator=g), torch.randn(50, dim, generator=g)
    positions = torch.randint(0, 50, (rows,), generator=g)
    slots = 4 + torch.randperm(80, generator=g)[:rows]
    slots[1::3] = -1
    norms = [torch.randn(dim, generator=g) if norm else None for _ in range(2)]
    native = [torch.full((21, kv_heads, block_size, dim), 7.5, dtype=dtype) for _ in range(2)]
    plain = [c.clone() for c in native]
    q = ops.rope_write_kv(qkv, positions, cos_sin, *native, slots, heads, *norms, 1e-6)
    want = kernels.rope_write_kv(qkv, positions, cos_sin, *plain, slots, heads, *norms, 1e-6)
    torch.testing.assert_close(q, want, atol=1e-5, rtol=1e-5)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for a, b in zip(native, plain, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
    assert torch.equal(native[1], plain[1])  # values are only converted, so exactly alike
    assert (native[0][0] == 7.5).all() and (native[1][0] == 7.5).all()


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_padding_slot_writes_nowhere(backend):
    kernels.set_backend(backend)
    k, v = (torch.full((3, 1, 4, 8), 9.0) for _ in range(2))
    slots = torch.tensor([-1, 5, -1])
    ops.rope_write_kv(torch.randn(3, 24), torch.arange(3), torch.randn(4, 8), k, v, slots, 1)
    for cache in (k, v):
        changed = (cache != 9.0).any(-1).nonzero().tolist()  # [block, head, offset]
        assert changed == [[1, 0, 1]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_storing_half_precision_keys_rounds_as_torch_does(dtype):
    values = torch.cat((torch.logspace(-9, 5, 2000), torch.tensor([0.0, 65504.0, 65519.0, 65520.0, float("inf")])))
    values = torch.cat((values, -values, torch.tensor([float("nan")])))
    values = torch.nn.functional.pad(values, (0, -len(values) % 2))
    dim = len(values)
    k, v = (torch.zeros(2, 1, 1, dim, dtype=dtype) for _ in range(2))
    qkv = torch.cat((torch.zeros(2 * dim), values)).unsqueeze(0)
    ops.rope_write_kv(qkv, torch.zeros(1, dtype=torch.int64), torch.ones(1, dim), k, v, torch.tensor([1]), 1)
    torch.testing.assert_close(v[1, 0, 0], values.to(dtype), atol=0, rtol=0, equal_nan=True)
