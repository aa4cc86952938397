"""Quantised weights: the layout byte by byte, half a step of error at most, GGUF blocks taken over exactly, layers."""

import dataclasses

import gguf as oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import quantize
from formats import gguf
from formats.layers import linear_from_checkpoint
from quantize import (
    INT8,
    INT8_G32,
    SCHEMES,
    Linear,
    QuantRows,
    adopt_blocks,
    concatenate,
    pack_nibbles,
    parse_scheme,
    quantised_layer,
    quantize_rows,
    set_activations,
    unpack_nibbles,
)

ALL = list(SCHEMES.values())
STEPS = [s for s in ALL if s.kernel]  # the schemes whose values are one step apart
INT4 = SCHEMES["int4"]


@dataclasses.dataclass
class Memory:
    """The part of a Checkpoint that quantize.py reads, over a dictionary of tensors and GGUF blocks."""

    held: dict
    quant: dict | None = None

    def blocks(self, name):
        return self.held[name] if isinstance(self.held[name], gguf.Blocks) else None

    def tensor(self, name):
        found = self.held[name]
        return gguf.dequantize(found) if isinstance(found, gguf.Blocks) else found

    def shape(self, name):
        return tuple(self.held[name].shape)

    def release(self, name):
        pass


def blocks_of(kind: str, weight: torch.Tensor) -> gguf.Blocks:
    """`weight` quantised by the PyPI package `gguf`."""
    raw = torch.from_numpy(oracle.quants.quantize(weight.numpy(), oracle.GGMLQuantizationType[kind]))
    return gguf.Blocks(kind, tuple(weight.shape), raw.view(len(weight), weight.shape[1] // 32, -1))


def oracle_weight(blocks: gguf.Blocks) -> torch.Tensor:
    raw = blocks.data.reshape(len(blocks.data), -1).numpy()
    return torch.from_numpy(oracle.quants.dequantize(raw, oracle.GGMLQuantizationType[blocks.kind]))


def values(held: QuantRows | Linear) -> torch.Tensor:
    """The weight as float32 [N, K]."""
    if isinstance(held, QuantRows):
        return held.scheme.dequantize(held.parts, held.in_features)
    return held.lookup(torch.arange(held.out_features)).float()


def steps_of(rows: QuantRows) -> torch.Tensor:
    """The stored step of every weight [N, K]."""
    steps = rows.parts["scales"].float().repeat_interleave(rows.scheme.group_size or rows.in_features, 1)
    return steps[:, : rows.in_features]


def assert_within_half_a_step(rows: QuantRows, weight: torch.Tensor) -> None:
    error = (values(rows) - weight.float()).abs()
    slack = weight.float().abs() * 2**-22 + 1e-45  # the float32 arithmetic itself
    assert torch.isfinite(error).all()
    assert (error <= steps_of(rows) / 2 + slack).all()


# ---- bytes


def test_int4_bytes_are_those_of_the_docstring():
    q = torch.arange(32, dtype=torch.uint8).remainder(16).view(1, 32)
    q[0, 16:] = 15 - q[0, 16:]  # so that the two halves differ
    packed = pack_nibbles(q)
    assert packed.tolist() == [[i | (15 - i) << 4 for i in range(16)]]


@pytest.mark.parametrize("scheme", STEPS, ids=lambda s: s.name)
@pytest.mark.parametrize("shape", [(1, 1), (5, 48), (16, 64), (33, 200)], ids=str)
def test_stored_layout_and_layer_bytes_follow_the_formula(scheme, shape):
    n, k = shape
    rows = quantize_rows(torch.randn(n, k), scheme)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in rows.parts.items()} == scheme.layout(n, k)
    padded_n, padded_k = -(-n // 16) * 16, -(-k // (scheme.group_size or 32)) * (scheme.group_size or 32)
    params = 4 if scheme.group_size == 0 else padded_k // scheme.group_size * (4 if scheme.bits == 4 else 2)
    bias = torch.randn(n)
    layer = quantised_layer(rows, bias)
    assert layer.weight_bytes == padded_n * (padded_k * scheme.bits // 8 + params) + 4 * n
    assert layer.weight_bytes == sum(t.nbytes for t in layer.buffers())


# ---- quantising


@st.composite
def weights(draw):
    """Matrices of odd shapes and sizes: with outliers, constant groups, zero groups, and offsets far from zero."""
    n, k = draw(st.integers(1, 20)), draw(st.integers(1, 200))
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31))))
    w *= draw(st.sampled_from([1e-43, 1e-30, 1e-7, 1e-3, 0.05, 1.0, 300.0]))
    w += draw(st.sampled_from([0.0, 0.0, -0.7, 40.0]))
    for _ in range(draw(st.integers(0, 3))):
        row, column = draw(st.integers(0, n - 1)), draw(st.integers(0, k - 1))
        end = draw(st.sampled_from([column + 1, k]))
        w[row, column:end] = draw(st.sampled_from([-900.0, 0.0, 0.1, 900.0]))
    return w


@given(weights(), st.sampled_from(STEPS))
def test_every_weight_is_within_half_a_stored_step(w, scheme):
    assert_within_half_a_step(quantize_rows(w, scheme), w)


@given(weights())
def test_normal_float_4_takes_the_nearest_of_its_sixteen_values(w):
    scheme = SCHEMES["nf4-g64"]
    rows = quantize_rows(w, scheme)
    largest = rows.parts["scales"].repeat_interleave(64, 1)[:, : w.shape[1], None]
    nf4 = torch.tensor(scheme.VALUES)  # [16]
    least = (nf4 * largest - w.unsqueeze(2)).abs().amin(2)
    assert ((values(rows) - w).abs() <= least + largest[..., 0] * 1e-6).all()


@pytest.mark.parametrize("scheme", STEPS[1:], ids=lambda s: s.name)
def test_padding_takes_no_part_in_a_group(scheme):
    """Weights far from zero: a padded zero would stretch the range of the last group."""
    last = scheme.group_size // 2
    w = torch.randn(6, 256 + last) + 40
    rows, alone = quantize_rows(w, scheme), quantize_rows(w[:, 256:], scheme)
    assert torch.equal(rows.parts["scales"][:, -1:], alone.parts["scales"])
    q = rows.parts["qweight"] if scheme.bits == 8 else unpack_nibbles(rows.parts["qweight"])
    assert q.shape[1] == 256 + scheme.group_size and not q[:, 256 + last :].any()


@given(weights(), st.sampled_from(ALL))
def test_a_layer_holds_exactly_its_rows(w, scheme):
    rows = quantize_rows(w, scheme)
    assert torch.equal(values(quantised_layer(rows)), values(rows))


def test_quantising_in_chunks_changes_nothing(monkeypatch):
    w = torch.randn(50, 96)
    whole = {s.name: quantize_rows(w, s) for s in ALL}
    monkeypatch.setattr("quantize.CHUNK", 96 * 7)
    for scheme in ALL:
        rows = quantize_rows(w, scheme)
        assert torch.equal(rows.parts["qweight"], whole[scheme.name].parts["qweight"])
        assert torch.equal(values(rows), values(whole[scheme.name]))
        one, other = quantised_layer(rows), quantised_layer(whole[scheme.name])
        assert all(map(torch.equal, one.buffers(), other.buffers()))


@pytest.mark.parametrize("scheme", STEPS, ids=lambda s: s.name)
@pytest.mark.parametrize("constant", [0.0, 0.1, -0.25])
def test_a_constant_row_stays_what_it_is(scheme, constant):
    back = values(quantize_rows(torch.full((1, 128), constant), scheme))
    exact = constant == 0 or scheme.bits == 4 and constant == -0.25  # a number of fp16
    torch.testing.assert_close(back, torch.full_like(back, constant), rtol=0 if exact else 2**-10, atol=0)


@pytest.mark.parametrize("scheme", ALL, ids=lambda s: s.name)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_numbers_are_refused_by_name(scheme, bad):
    w = torch.randn(4, 64)
    w[2, 9] = bad
    with pytest.raises(ValueError, match=r"layers\.3\.up_proj.*NaN or infinite"):
        quantize_rows(w, scheme, "layers.3.up_proj")


def test_damaged_blocks_are_refused_by_name():
    for kind, scheme in (("Q4_0", "int4"), ("Q4_1", "int4"), ("Q8_0", "int8")):
        blocks = blocks_of(kind, torch.randn(4, 64))
        blocks.data[1, 0, :2] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)  # the scale becomes infinite
        with pytest.raises(ValueError, match=r"a\.weight.*NaN or infinite"):
            linear_from_checkpoint(Memory({"a.weight": blocks}), ["a.weight"], scheme, torch.float32)


def test_weights_beyond_fp16_are_refused_where_scales_are_fp16():
    w = torch.randn(3, 64)
    w[1, 5], w[2, 7] = 1e8, -1e8
    for scheme in STEPS:
        if scheme.group_size:
            with pytest.raises(ValueError, match=r"big\.weight.*1e\+08.*int8"):
                quantize_rows(w, scheme, "big.weight")
    assert_within_half_a_step(quantize_rows(w, SCHEMES["int8"], "big.weight"), w)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_source_may_have_any_float_type(dtype):
    w = torch.randn(8, 64).to(dtype)
    assert torch.equal(values(quantize_rows(w, INT4)), values(quantize_rows(w.float(), INT4)))


# ---- schemes


def test_schemes_by_name():
    assert parse_scheme(None) is None
    assert parse_scheme("int4") == parse_scheme("int4-g32") == INT4
    assert parse_scheme(INT4) is INT4
    assert (parse_scheme("int4-g128").bits, parse_scheme("int4-g128").group_size) == (4, 128)


@pytest.mark.parametrize("text", ["int3", "INT4", "", "int4-g48", "q4_0"])
def test_an_unknown_scheme_lists_the_known_ones(text):
    with pytest.raises(ValueError) as error:
        parse_scheme(text)
    assert repr(text) in str(error.value) and all(name in str(error.value) for name in SCHEMES)


# ---- GGUF blocks


@pytest.mark.parametrize("kind, scheme", [("Q4_0", "int4"), ("Q4_1", "int4"), ("Q8_0", "int8"), ("Q8_0", "int8-g32")])
def test_blocks_are_taken_over_bit_for_bit(kind, scheme):
    """Also with d = 0 and with a negative d, which llama.cpp writes for Q4_0."""
    w = torch.randn(20, 96)
    w[3] = 0
    blocks = blocks_of(kind, w)
    blocks.data[5, 1, 1] ^= 0x80  # the sign of d
    layer = linear_from_checkpoint(Memory({"a": blocks}), ["a"], scheme, torch.float32)
    assert torch.equal(values(layer), oracle_weight(blocks))
    assert layer.weight_bytes == 32 * 96 * (4 if kind[1] == "4" else 8) // 8 + 32 * 3 * (4 if kind[1] == "4" else 2)


def test_taken_over_rows_do_not_hold_on_to_the_file():
    for kind, scheme in (("Q4_1", INT4), ("Q8_0", INT8_G32)):
        blocks = blocks_of(kind, torch.randn(4, 32))  # one block a row: the slices are nearly contiguous
        rows = adopt_blocks(blocks, scheme)
        before = values(rows)
        blocks.data.zero_()
        assert torch.equal(values(rows), before)


def test_a_q4_0_scale_whose_minimum_leaves_fp16_is_quantised_anew():
    blocks = blocks_of("Q4_0", torch.randn(2, 32))
    blocks.data[0, 0, :2] = torch.tensor([9000.0]).half().view(torch.uint8)  # 8 * 9000 > 65504
    blocks.data[0, 0, 2:] = 0x89  # weights 1 * d and 0 * d
    assert adopt_blocks(blocks, INT4) is None
    rows = quantize_rows(blocks, INT4)
    assert_within_half_a_step(rows, oracle_weight(blocks))


OTHERS = [("Q4_1", "int8"), ("Q4_1", "int4-g64"), ("Q8_0", "int4"), ("Q5_1", "int4"), ("Q4_0", "int8-g32")]


@pytest.mark.parametrize("kind, scheme", OTHERS)
def test_other_pairs_are_quantised_anew(kind, scheme):
    blocks = blocks_of(kind, torch.randn(7, 64))
    layer = linear_from_checkpoint(Memory({"a": blocks}), ["a"], scheme, torch.float32)
    assert layer.scheme is SCHEMES[scheme]
    expected = quantize_rows(oracle_weight(blocks), SCHEMES[scheme])
    assert torch.equal(values(layer), values(expected))


def test_the_default_models_weights_do_not_change(smollm2):
    """`--quant int4` on the default file: its Q4_1 tensors and its Q8_0 table, bit for bit (every tenth, all kinds)."""
    file = gguf.File(smollm2)
    quantised = [name for name in file.tensors if file.blocks(name) is not None]
    assert len(quantised) == 211
    for name in quantised[::10] + ["token_embd.weight"]:
        blocks = file.blocks(name)
        scheme = "int4" if blocks.kind == "Q4_1" else "int8"
        weight = values(linear_from_checkpoint(Memory({name: blocks}), [name], scheme, torch.float32))
        for start in range(0, len(weight), 4096):  # the oracle needs many times the memory of what it dequantises
            part = blocks.rows(torch.arange(start, min(start + 4096, len(weight))))
            assert torch.equal(weight[start : start + 4096], oracle_weight(part)), name


# ---- layers


def test_fused_rows_may_come_from_different_sources():
    q, k, v = torch.randn(48, 64), torch.randn(16, 64), torch.randn(5, 64)
    held = {"q": blocks_of("Q4_1", q), "k": blocks_of("Q4_0", k), "v": v.bfloat16(), "b": torch.randn(69)}
    held |= {"qb": held["b"][:48], "kb": held["b"][48:64], "vb": held["b"][64:]}
    layer = linear_from_checkpoint(Memory(held), ["q", "k", "v"], "int4", torch.float32, ["qb", "kb", "vb"])
    assert layer.scheme is INT4 and (layer.out_features, layer.in_features) == (69, 64)
    w = values(layer)
    assert torch.equal(w[:48], oracle_weight(held["q"])) and torch.equal(w[48:64], oracle_weight(held["k"]))
    assert torch.equal(w[64:], values(quantize_rows(held["v"], INT4)))
    assert torch.equal(layer.bias, held["b"])


def test_q8_0_beside_a_dense_weight_gives_the_whole_layer_groups():
    held = {"gate": torch.randn(32, 64), "up": blocks_of("Q8_0", torch.randn(32, 64))}
    layer = linear_from_checkpoint(Memory(held), ["gate", "up"], "int8", torch.float32)
    assert layer.group_size == 32
    assert torch.equal(values(layer)[32:], oracle_weight(held["up"]))


def test_rows_of_different_forms_are_not_put_together():
    a, b = quantize_rows(torch.randn(4, 64), INT4), quantize_rows(torch.randn(4, 64), SCHEMES["int4-g64"])
    with pytest.raises(ValueError, match="cannot form one layer"):
        concatenate([a, b])


@pytest.mark.parametrize("scheme", [None, *ALL], ids=lambda s: s.name if s else "dense")
@pytest.mark.parametrize("k", [64, 80], ids=["whole groups", "padded groups"])
def test_forward_is_the_product_with_the_dequantised_weight(scheme, k):
    torch.manual_seed(0)
    held = {"gate": torch.randn(24, k), "up": torch.randn(24, k), "gate_b": torch.randn(24), "up_b": torch.randn(24)}
    layer = linear_from_checkpoint(Memory(held), ["gate", "up"], scheme, torch.float32, ["gate_b", "up_b"])
    set_activations(layer, "float")
    x, norm, residual = torch.randn(3, k), torch.rand(k), torch.randn(3, 24)
    w = values(layer)
    assert torch.allclose(layer(x), x @ w.T + layer.bias, atol=1e-4)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * norm
    gate, up = (normed @ w.T + layer.bias).chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up + residual
    assert torch.allclose(layer(x, norm, 1e-5, residual, True), expected, atol=1e-3)


def test_a_layer_without_a_kernel_dequantises_its_parts():
    rows = quantize_rows(torch.randn(50, 96), SCHEMES["nf4-g64"])
    layer, ids = quantised_layer(rows), torch.tensor([49, 0, 7])
    assert torch.equal(layer.lookup(ids), values(rows)[ids])
    assert layer.weight_bytes == 50 * (128 // 2 + 2 * 4) and not quantize.has_kernels(layer)
    assert layer(torch.randn(3, 96).bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_the_activation_switch_reaches_every_layer(scheme):
    torch.manual_seed(0)
    w, x = torch.randn(32, 64), torch.randn(4, 64)
    model = torch.nn.ModuleList([quantised_layer(quantize_rows(w, SCHEMES[scheme])), Linear(w)])
    set_activations(model, "float")
    exact = model[0](x)
    set_activations(model, "int8")
    assert 0 < (model[0](x) - exact).abs().max() < 0.01 * exact.abs().max()


def test_dense_layers_keep_the_checkpoints_weights():
    held = {"a": torch.randn(8, 32).bfloat16(), "b": torch.randn(8, 32), "c": blocks_of("Q4_0", torch.randn(8, 32))}
    layer = linear_from_checkpoint(Memory(held), ["a", "b", "c"], None, torch.float32)
    assert isinstance(layer, Linear)
    assert torch.equal(values(layer), torch.cat([held["a"].float(), held["b"], oracle_weight(held["c"])]))
    assert layer.weight_bytes == 24 * 32 * 4
    assert linear_from_checkpoint(Memory(held), ["a"], None, torch.bfloat16).weight.dtype == torch.bfloat16


# ---- the tied table


@pytest.mark.parametrize("scheme", [None, "int8", "int8-g32", "int4", "int4-g128"])
@pytest.mark.parametrize("source", ["dense", "Q8_0", "Q4_1"])
def test_a_tied_table_is_one_table(scheme, source):
    """Lookup returns the very rows that the head multiplies with; one buffer; 8 bits under every scheme."""
    torch.manual_seed(0)
    w = torch.randn(100, 64)
    held = {"model.embed_tokens.weight": w if source == "dense" else blocks_of(source, w)}
    table = linear_from_checkpoint(Memory(held), ["model.embed_tokens.weight"], scheme, torch.float32)
    set_activations(table, "float")
    rows, x = values(table), torch.randn(3, 64)
    assert torch.allclose(table(x), x @ rows.T, atol=1e-4)
    before = w if source == "dense" else oracle_weight(held["model.embed_tokens.weight"])
    assert (rows - before).abs().max() <= before.abs().max() / 127  # not 4 bits
    assert len(list(table.buffers())) == 1 and table.weight_bytes == sum(t.nbytes for t in table.buffers())
    if scheme is None:
        assert table.weight_bytes == 100 * 64 * 4
    else:  # 112 rows in tiles of 16; a scale for each row, or for each 32 weights
        assert table.weight_bytes == 112 * (64 + (4 if table.group_size == 0 else 2 * 2))


def test_the_head_of_an_untied_model_keeps_8_bits_too():
    held = {"lm_head.weight": torch.randn(40, 64), "model.layers.0.mlp.up_proj.weight": torch.randn(40, 64)}
    assert linear_from_checkpoint(Memory(held), ["lm_head.weight"], "int4", torch.float32).scheme is INT8
    layer = linear_from_checkpoint(Memory(held), ["model.layers.0.mlp.up_proj.weight"], "int4", torch.float32)
    assert layer.scheme is INT4
