"""The native products, norms and tables against their references over drawn shapes, and what must hold bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import ROWS, SEEDS, copies, drawn, generator, layer_inputs, one_layer, ops, poison, random_weight

import kernels

pytestmark = pytest.mark.usefixtures("native")

LINEAR = {
    "bits": st.sampled_from([4, 8]),
    "n": st.sampled_from([1, 2, 15, 16, 31, 32, 96, 130]),
    "k": st.sampled_from([1, 31, 32, 64, 100, 256]),
    "group_size": st.sampled_from([0, 32, 64, 128]),
    "activation": st.sampled_from(["int8", "float"]),
    "seed": SEEDS,
}


@drawn
@given(rows=ROWS, extras=st.sets(st.sampled_from(["bias", "norm", "residual", "gate"])), **LINEAR)
def test_linear_matches_the_reference(rows, extras, bits, n, k, group_size, activation, seed):
    g = generator(seed)
    group_size = group_size or (32 if bits == 4 else 0)
    n += n % 2 if "gate" in extras else 0
    packed = random_weight(bits, n, k, group_size, g)
    width = n // 2 if "gate" in extras else n
    kwargs = {
        "bias": torch.randn(n, generator=g) if "bias" in extras else None,
        "norm_weight": torch.randn(k, generator=g) if "norm" in extras else None,
        "eps": 1e-5,
        "residual": torch.randn(rows, width, generator=g) if "residual" in extras else None,
        "silu_gate": "gate" in extras,
        "activation": activation,
    }
    x = torch.randn(rows, k, generator=g)
    # After a fused norm a value on the edge between two codes may round the other way: one code of 127 at most.
    slack = 3e-2 if "norm" in extras and activation == "int8" else 2e-4
    with pytest.MonkeyPatch.context() as patch:
        poison(patch)
        got = getattr(ops, f"int{bits}_linear")(x, packed, n, group_size, **kwargs)
    want = getattr(kernels, f"int{bits}_linear")(x, packed, n, group_size, **kwargs)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, atol=slack * max(1.0, want.abs().max().item() if rows else 1.0), rtol=1e-3)


@drawn
@given(gate=st.booleans(), norm=st.booleans(), **LINEAR)
def test_a_row_of_a_linear_is_the_same_bits_in_any_company(gate, norm, bits, n, k, group_size, activation, seed):
    g = generator(seed)
    group_size = group_size or (32 if bits == 4 else 0)
    n += n % 2 if gate else 0
    packed, x = random_weight(bits, n, k, group_size, g), torch.randn(71, k, generator=g)
    kwargs = {"activation": activation, "silu_gate": gate, "eps": 1e-5}
    kwargs["norm_weight"] = torch.randn(k, generator=g) if norm else None
    op = getattr(ops, f"int{bits}_linear")
    together = op(x, packed, n, group_size, **kwargs)
    for rows in ([0], [70], [3, 2], [9, 1, 5], list(range(13, 30))):
        assert torch.equal(op(x[rows].contiguous(), packed, n, group_size, **kwargs), together[rows])
    kernels.set_threads(1)
    assert torch.equal(op(x, packed, n, group_size, **kwargs), together)
    kernels.set_threads(2)


def test_extreme_codes_against_extreme_activations():
    """Codes of -128 and 15 beside activations of one sign: no sum of products leaves its integers."""
    codes = torch.full((16, 32), -128, dtype=torch.int8)
    codes[1::2, ::2] = 127
    packed, x = kernels.pack_int8(codes, torch.ones(16, 1), 0), torch.ones(1, 32)
    nibbles = torch.full((16, 16), 255, dtype=torch.uint8)
    packed4 = kernels.pack_int4(nibbles, torch.ones(16, 1).half(), torch.zeros(16, 1).half(), 32)
    for signs in (x, -x, x * (1 - 2 * (torch.arange(32) % 2))):
        torch.testing.assert_close(ops.int8_linear(signs, packed, 16, 0), signs @ codes.float().T)
        torch.testing.assert_close(ops.int4_linear(signs, packed4, 16, 32), (15 * signs.sum()).expand(1, 16))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_non_finite_activation_stays_visible_and_in_its_row(bits, bad):
    g = generator(0)
    packed, x = random_weight(bits, 20, 64, 32, g), torch.randn(5, 64, generator=g)
    clean = getattr(ops, f"int{bits}_linear")(x, packed, 20, 32)
    x[2, 40] = bad
    got = getattr(ops, f"int{bits}_linear")(x, packed, 20, 32)
    assert not got[2].isfinite().any()
    keep = [0, 1, 3, 4]
    assert torch.equal(got[keep], clean[keep])
    assert ops.silu_mul(torch.full((1, 4), float("nan"))).isnan().all()


@drawn
@given(
    bits=st.sampled_from([4, 8]),
    n=st.integers(1, 50),
    k=st.integers(1, 140),
    group=st.sampled_from([0, 32, 64]),
    seed=SEEDS,
)
def test_embedding_and_unpacking_give_back_the_canonical_weights(bits, n, k, group, seed):
    g = generator(seed)
    group = group or (32 if bits == 4 else 0)
    packed = random_weight(bits, n, k, group, g)
    ids = torch.randint(0, n, (3, 2), generator=g)
    want = getattr(kernels, f"unpack_int{bits}")(packed, k, group)[:n][ids]
    assert torch.equal(getattr(ops, f"int{bits}_embedding")(ids, packed, k, group), want)
    assert torch.equal(getattr(kernels, f"int{bits}_embedding")(ids, packed, k, group), want)


@drawn
@given(rows=ROWS, n=st.integers(1, 70), seed=SEEDS)
def test_norms_and_gate_match_the_reference(rows, n, seed):
    g = generator(seed)
    x, weight = torch.randn(rows, 2 * n, generator=g), torch.randn(2 * n, generator=g)
    with pytest.MonkeyPatch.context() as patch:
        poison(patch)
        got = (ops.rms_norm(x, weight, 1e-5), ops.silu_mul(20 * x))
    want = (kernels.rms_norm(x, weight, 1e-5), kernels.silu_mul(20 * x))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    if rows:
        assert torch.equal(ops.rms_norm(x[-1:].contiguous(), weight, 1e-5), got[0][-1:])


def test_a_layer_compiles_without_graph_breaks_and_mutates_the_cache():
    hidden, weights, state = layer_inputs()
    eager, compiled = copies(state), copies(state)
    want = one_layer(hidden, weights, eager)
    got = torch.compile(one_layer, fullgraph=True, backend="aot_eager")(hidden, weights, compiled)
    assert torch.equal(got, want)
    assert torch.equal(compiled["k"], eager["k"]) and eager["k"].abs().sum() > 0


def test_every_op_passes_opcheck():
    hidden, weights, state = layer_inputs()
    check = torch.library.opcheck
    utils = ("test_schema", "test_faketensor")
    check(ops.rms_norm.default, (hidden, weights["norm"], 1e-5), test_utils=utils)
    check(ops.silu_mul.default, (hidden,), test_utils=utils)
    fused = (hidden, weights["qkv"], 64, 32, None, weights["norm"], 1e-5, None, True)
    check(ops.int4_linear.default, fused, test_utils=utils)
    check(ops.int8_linear.default, (hidden, random_weight(8, 7, 48, 0, generator(0)), 7, 0), test_utils=utils)
    check(ops.int4_embedding.default, (torch.tensor([[1, 2]]), weights["qkv"], 48, 32), test_utils=utils)
    table = random_weight(8, 7, 48, 32, generator(0))
    check(ops.int8_embedding.default, (torch.tensor([1]), table, 48, 32), test_utils=utils)
    qkv = torch.randn(3, 64)
    rope = (qkv, *(state[n] for n in ("positions", "cos_sin", "k", "v", "slots")), 2)
    check(ops.rope_write_kv.default, rope, test_utils=utils)
    names = ("k", "v", "tables", "starts", "lens")
    check(ops.paged_attention.default, (torch.randn(3, 2, 16), *(state[n] for n in names), 0.25), test_utils=utils)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_activations_are_computed_in_float32_and_returned_as_they_came(dtype):
    hidden, weights, _ = layer_inputs()
    got = ops.int4_linear(hidden.to(dtype), weights["qkv"], 64, 32, activation="float")
    want = kernels.int4_linear(hidden.to(dtype), weights["qkv"], 64, 32, activation="float")
    assert got.dtype is dtype
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
