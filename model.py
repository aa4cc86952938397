"""One decoder-only transformer over a flat run of tokens.

One request computes 300 prompt tokens while seven others compute one each. So all tokens of a step lie end to end:
every linear layer and norm treats a token as a row and does not care whose it is, and only attention is told of
sequences (selective batching: Orca, Yu et al. 2022, section 4.2).

    tokens      [ A A A A A | B | C ]          T = 7 rows, three sequences in one run
    query_start [ 0           5   6   7 ]      sequence s owns rows query_start[s] : query_start[s + 1]
    positions   [ 0 1 2 3 4 | 9 | 31 ]         A is prefilling its prompt, B and C decode

    x ─┬─ norm·qkv ── rope + cache write ── attention ── o ─(+)─┬─ norm·gate,up·silu ── down ─(+)─ x
       └─────────────────────────────────────────────────┘     └──────────────────────────────┘

Fusing is an option of each call, so a family that puts something between leaves it out: see `OpenLayer`. What a
family's files say is in formats/families.py. Left out: encoders, mixtures of experts, latent attention, gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels  # noqa: F401  (registers the operations of torch.ops.vitrine)
from formats.families import ARCHITECTURES
from formats.layers import linear_from_checkpoint
from quantize import parse_scheme

ops = torch.ops.vitrine


@dataclass
class Batch:
    """What one step computes: T rows of S sequences. A padding row has a slot inside block 0, which nobody owns."""

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]
    block_tables: Tensor  # int32 [S, max_blocks], 0 beyond a sequence's last block
    query_start: Tensor  # int32 [S + 1]
    context_lens: Tensor  # int32 [S], tokens in the cache once this step has written
    logit_rows: Tensor  # int64 [R], the rows whose logits are wanted
    one_each: bool = False  # every sequence computes one token, and all their logits are wanted


def padding_batch(rows: int, device: str | torch.device, max_blocks: int = 2) -> Batch:
    """Sequences of one token each that only touch block 0: for static buffers, and for measuring."""
    # As engine.lay_out does it, or layers would be compiled once more: views of one tensor, two sequences at least.
    sequences = torch.arange(max(rows, 2) + 1, dtype=torch.int32, device=device)
    tokens, positions, slot_mapping = torch.zeros(3, rows, dtype=torch.int64, device=device).unbind()
    block_tables = torch.zeros(max(rows, 2), max_blocks, dtype=torch.int32, device=device)
    query_start, context_lens = sequences.clamp(max=rows), (sequences[:-1] < rows).int()
    logit_rows = torch.arange(rows, device=device)
    return Batch(tokens, positions, slot_mapping, block_tables, query_start, context_lens, logit_rows, one_each=True)


def inverse_frequencies(dim: int, base: float, scaling: dict | None) -> tuple[Tensor, float]:
    """float64 [dim / 2]: the angle each rotated pair turns per position; and the factor on cosine and sine.

    RoPE: arXiv:2104.09864, section 3.4.2. YaRN: arXiv:2309.00071, section 3.
    """
    plain = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    kind = scaling["rope_type"] if scaling else "default"
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / scaling["factor"], 1.0
    if kind == "llama3_factors":
        return plain / torch.tensor(scaling["factors"], dtype=torch.float64), 1.0
    context = scaling["original_max_position_embeddings"]
    if kind == "llama3":
        wavelength = 2 * math.pi / plain
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = (context / wavelength - low) / (high - low)
        blended = (1 - smooth) * plain / scaling["factor"] + smooth * plain
        scaled = torch.where(wavelength > context / low, plain / scaling["factor"], blended)
        return torch.where(wavelength < context / high, plain, scaled), 1.0
    assert kind == "yarn"
    low, high = (
        dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))
        for rotations in (scaling["beta_fast"], scaling["beta_slow"])
    )
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low or 0.001)).clamp(0, 1)
    return plain / scaling["factor"] * ramp + plain * (1 - ramp), scaling["attention_factor"]


def rope_table(config, num_positions: int, layer: int = 0) -> Tensor:
    """float32 [num_positions, rotary_dim]: cosines in the first half of a row, sines in the second.

    Angles are computed in float64 and the table stays float32 whatever the model's dtype: at position 8,000 a bfloat16
    angle would be off by whole turns.
    """
    freqs, factor = inverse_frequencies(*config.rope(layer))
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), freqs)
    return (torch.cat([angles.cos(), angles.sin()], dim=-1) * factor).float()


@dataclass
class LayerWeights:
    """What a layer builds its parts from, named as transformers names them."""

    ckpt: object
    index: int
    scheme: object  # of quantize.py, or None
    dtype: torch.dtype

    def linear(self, *names: str, bias: bool = False) -> nn.Module:
        """One product: the rows of those weights that the family has, under one another. x [T, K] -> [T, N]"""
        parts = ARCHITECTURES[self.ckpt.config.architecture].parts
        stems = [f"model.layers.{self.index}.{name}" for name in names if name in parts]
        biases = [f"{stem}.bias" for stem in stems] if bias else None
        return linear_from_checkpoint(self.ckpt, [f"{stem}.weight" for stem in stems], self.scheme, self.dtype, biases)

    def norm(self, name: str) -> Norm:
        return Norm(self.ckpt, f"model.layers.{self.index}.{name}", self.dtype)


class Norm(nn.Module):
    """RMS norm (arXiv:1910.07467), or with a bias layer norm (arXiv:1607.06450). x [..., H] -> the same."""

    def __init__(self, ckpt, name: str, dtype: torch.dtype, scale: float = 1.0):
        super().__init__()
        self.eps = ckpt.config.rms_norm_eps
        weight = (ckpt.tensor(f"{name}.weight").float() + ckpt.config.norm_offset) * scale
        self.weight = nn.Parameter(weight.to(dtype), requires_grad=False)  # a copy: the checkpoint's pages can go
        ckpt.release(f"{name}.weight")
        bias = (ckpt.tensor(f"{name}.bias").float() * scale).to(dtype) if ckpt.config.norm_bias else None
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return ops.rms_norm(x, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    """RMS norm of x, grouped-query attention over the paged cache, + residual. x [T, hidden] -> the same.

    Window: Mistral, arXiv:2310.06825, section 2. Norms of q and k: Qwen3, arXiv:2505.09388, section 2.
    """

    def __init__(self, config, weights: LayerWeights):
        super().__init__()
        self.num_heads, self.eps = config.num_heads, config.rms_norm_eps
        self.scale, self.softcap = config.attn_scale or config.head_dim**-0.5, config.attn_softcap
        self.window = config.sliding_window[weights.index] or 0
        self.qkv = weights.linear(*(f"self_attn.{part}_proj" for part in ("qkv", "q", "k", "v")), bias=config.qkv_bias)
        self.o = weights.linear("self_attn.o_proj", bias=config.o_bias)
        self.q_norm = weights.norm("self_attn.q_norm").weight if config.qk_norm else None  # [head_dim]
        self.k_norm = weights.norm("self_attn.k_norm").weight if config.qk_norm else None

    def forward(self, x, norm, residual, positions, cos_sin, k_cache, v_cache, slot_mapping, *sequences):
        """`sequences`: block_tables, query_start and context_lens, as Batch has them."""
        qkv = self.qkv(x, norm_weight=norm, eps=self.eps)  # [T, (heads + 2 kv_heads) * head_dim]
        q = ops.rope_write_kv(
            qkv, positions, cos_sin, k_cache, v_cache, slot_mapping, self.num_heads, self.q_norm, self.k_norm, self.eps
        )  # [T, heads, head_dim]
        attended = ops.paged_attention(q, k_cache, v_cache, *sequences, self.scale, self.window, self.softcap)
        return self.o(attended.flatten(1), residual=residual)


class MLP(nn.Module):
    """RMS norm of x, silu(gate) * up, down, + residual. x [T, hidden] -> the same."""

    def __init__(self, config, weights: LayerWeights):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.gate_up = weights.linear("mlp.gate_up_proj", "mlp.gate_proj", "mlp.up_proj", bias=config.mlp_bias)
        self.down = weights.linear("mlp.down_proj", bias=config.mlp_bias)

    def forward(self, x, norm, residual):
        h = self.gate_up(x, norm_weight=norm, eps=self.eps, silu_gate=True)  # [T, intermediate]
        return self.down(h, residual=residual)


class DecoderLayer(nn.Module):
    """Attention and MLP with their residual paths: x [T, hidden] -> [T, hidden]."""

    native_only = True  # nothing but operations of kernels.py: a step may be recorded on the CPU, see compiled.py

    def __init__(self, config, weights: LayerWeights):
        super().__init__()
        self.attention, self.mlp = Attention(config, weights), MLP(config, weights)
        self.attn_norm = weights.norm("input_layernorm").weight
        self.mlp_norm = weights.norm("post_attention_layernorm").weight
        self.window = self.attention.window

    def forward(self, x, *step):
        x = self.attention.forward(x, self.attn_norm, x, *step)  # not through __call__, which costs a microsecond
        return self.mlp.forward(x, self.mlp_norm, x)


class GeluMLP(MLP):
    """A GELU for the gate, or, in families without a gate, between two products."""

    def forward(self, x, norm, residual):
        h = self.gate_up(x, norm_weight=norm, eps=self.eps)  # [T, intermediate], twice if there is a gate
        gate, *up = h.split(self.down.in_features, dim=-1)
        h = F.gelu(gate, approximate="tanh")
        return self.down(h * up[0] if up else h, residual=residual)


class NormedQKV(nn.Module):
    """q and k are normalised over all their heads together (OLMo 2, arXiv:2501.00656, section 2)."""

    def __init__(self, config, weights: LayerWeights, product: nn.Module):
        super().__init__()
        self.product = product
        self.q_norm, self.k_norm = weights.norm("self_attn.q_norm"), weights.norm("self_attn.k_norm")
        self.widths = [
            heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        ]

    def forward(self, x, norm_weight, eps):
        q, k, v = self.product(x, norm_weight, eps).split(self.widths, dim=-1)  # [T, heads * head_dim] each
        return torch.cat([self.q_norm(q), self.k_norm(k), v], dim=-1)


class WideNormAttention(Attention):
    def __init__(self, config, weights: LayerWeights):
        super().__init__(config, weights)
        self.qkv = NormedQKV(config, weights, self.qkv)


BEFORE = ("input_layernorm", None, "post_attention_layernorm", None)
AFTER = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
BOTH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


class OpenLayer(nn.Module):
    """A layer that is not fused: norms before and after attention and MLP, what is added to x scaled.

    Norms on both sides: Gemma 2 (arXiv:2408.00118, section 2) and 3; after only: OLMo 2; layer norms: GPT-2."""

    native_only = False

    def __init__(self, config, weights: LayerWeights, norms=BEFORE, mlp=MLP, attention=Attention):
        super().__init__()
        self.attention, self.mlp = attention(config, weights), mlp(config, weights)
        self.norms = nn.ModuleList(weights.norm(name) if name else nn.Identity() for name in norms)
        self.window, self.scale = self.attention.window, config.residual_scale

    def forward(self, x, *step):
        attn_norm, attn_post_norm, mlp_norm, mlp_post_norm = self.norms
        x = x + attn_post_norm(self.attention(attn_norm(x), None, None, *step)) * self.scale
        return x + mlp_post_norm(self.mlp(mlp_norm(x), None, None)) * self.scale


LAYERS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3"), DecoderLayer),
    **dict.fromkeys(("gemma2", "gemma3"), partial(OpenLayer, norms=BOTH, mlp=GeluMLP)),
    "olmo2": partial(OpenLayer, norms=AFTER, attention=WideNormAttention),
    **dict.fromkeys(("granite", "stablelm"), OpenLayer),
    **dict.fromkeys(("starcoder2", "gpt2"), partial(OpenLayer, mlp=GeluMLP)),
}


class Transformer(nn.Module):
    """Embedding, layers, final norm and head, built from a checkpoint one tensor at a time.

    `quant` is a scheme of quantize.py or None; `dtype` that of dense weights and activations; `max_model_len` bounds
    the rotary table. `progress(done, total)` is called as layers are loaded.
    """

    def __init__(
        self, ckpt, quant: str | None = None, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu",
        max_model_len: int | None = None, progress: Callable[[int, int], None] = lambda done, total: None,
    ):  # fmt: skip
        super().__init__()
        config, scheme = ckpt.config, parse_scheme(quant)
        self.config, self.dtype = config, dtype
        total = config.num_layers + 1
        self.embed = linear_from_checkpoint(ckpt, ["model.embed_tokens.weight"], scheme, dtype).to(device)
        self.head = self.embed  # a tied model reads its embedding table backwards
        if not config.tie_word_embeddings:
            self.head = linear_from_checkpoint(ckpt, ["lm_head.weight"], scheme, dtype).to(device)
        progress(1, total)
        self.layers = nn.ModuleList()
        # Plain tensors: as buffers, .to(bfloat16) would round the angles. Layers that rotate alike share theirs.
        self.cos_sin: list[Tensor] = []  # for each layer
        ropes = [config.rope(i) for i in range(config.num_layers)]
        for i in range(config.num_layers):
            weights = LayerWeights(ckpt, i, scheme, dtype)
            self.layers.append(LAYERS[config.architecture](config, weights).to(device))
            first = ropes.index(ropes[i])
            table = rope_table(config, max_model_len or config.max_position_embeddings, i) if first == i else None
            self.cos_sin.append(self.cos_sin[first] if table is None else table.to(device))
            progress(i + 2, total)
        self.norm = Norm(ckpt, "model.norm", dtype, config.logit_scale).to(device)
        self.embed_scale = torch.tensor(config.embed_scale, dtype=dtype).item()
        positions = ckpt.tensor("model.embed_positions.weight").to(device, dtype) if config.learned_positions else None
        self.register_buffer("positions", positions)  # [max_position_embeddings, hidden]

    def hidden(self, batch: Batch, kv, run_layer: Callable = nn.Module.__call__) -> Tensor:
        """The last hidden states [R, hidden] of the wanted rows; `run_layer(layer, x, ...)` computes a layer."""
        x = self.embed.lookup(batch.tokens).to(self.dtype)  # [T, hidden]
        if self.embed_scale != 1:
            x = x * self.embed_scale
        if self.positions is not None:
            x = x + self.positions[batch.positions]
        for layer, cos_sin, (k_cache, v_cache) in zip(self.layers, self.cos_sin, kv.layers, strict=True):
            x = run_layer(
                layer, x, batch.positions, cos_sin, k_cache, v_cache,
                batch.slot_mapping, batch.block_tables, batch.query_start, batch.context_lens,
            )  # fmt: skip
        rows = x if batch.one_each else x[batch.logit_rows]  # [R, hidden]
        return self.norm(rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [R, vocab] of hidden states [R, hidden]."""
        logits, cap = self.head(hidden).float(), self.config.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def forward(self, batch: Batch, kv) -> Tensor:
        """float32 logits [R, vocab] of the wanted rows."""
        return self.logits(self.hidden(batch, kv))

    @property
    def native_only(self) -> bool:
        """Whether a step is nothing but operations of kernels.py, and may be recorded on the CPU."""
        return all(layer.native_only for layer in self.layers) and self.embed_scale == 1

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they lie in memory."""
        return sum(t.nbytes for t in [*self.parameters(), *self.buffers()])

    @property
    def step_bytes(self) -> int:
        """Bytes of the weights one step reads: all but the embedding table, unless it is the head as well."""
        return self.weight_bytes - (0 if self.head is self.embed else self.embed.weight_bytes)
