"""One decoder-only transformer over a flat run of tokens.

The problem. Llama, Mistral, Qwen2, Qwen3 and SmolLM2 are one architecture with a few switches, and a batch is seldom a
rectangle: one request computes 300 prompt tokens while seven others compute one token each.

The idea. Lay all tokens of a step end to end. Every linear layer and norm treats a token as a row and does not care
whose it is, so nothing is padded. Only attention knows about sequences: it is given, for each of them, its rows, its
length and its pages (selective batching: Orca, Yu et al. 2022, section 4.2).

    tokens      [ A A A A A | B | C ]          T = 7 rows, three sequences in one run
    query_start [ 0           5   6   7 ]      sequence s owns rows query_start[s] : query_start[s + 1]
    positions   [ 0 1 2 3 4 | 9 | 31 ]         A is prefilling its prompt, B and C decode
    slots       where each row's key and value go in the paged cache

A layer is six operations of kernels.py; residual additions, norms and the SiLU gate ride along inside the products:

    x ─┬─ norm·qkv ── rope + cache write ── attention ── o ─(+)─┬─ norm·gate,up·silu ── down ─(+)─ x
       └─────────────────────────────────────────────────┘     └──────────────────────────────┘

Fused products hold their parts as rows under rows: qkv [(heads + 2 kv_heads) * head_dim, hidden] and gate_up
[2 intermediate, hidden].

Sources: Llama (arXiv:2302.13971, section 2.2), RoPE (arXiv:2104.09864, section 3.4.2), YaRN (arXiv:2309.00071, section
3), Mistral's window (arXiv:2310.06825, section 2), Qwen3's q/k norm (arXiv:2505.09388, section 2).
Left out: encoders, mixtures of experts, latent attention, dropout, gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import kernels  # noqa: F401  (registers the operations of torch.ops.vitrine)
from quantize import Embedding, embedding_from_checkpoint, linear_from_checkpoint, parse_scheme

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
    """Sequences of one token each that only touch block 0: for static buffers, and for measuring.

    Laid out as the engine lays out a step (layout.py), or a compiled layer would be compiled once more for it: views
    of one tensor, and at least two sequences, of which the second may be empty.
    """
    sequences = torch.arange(max(rows, 2) + 1, dtype=torch.int32, device=device)
    tokens, positions, slot_mapping = torch.zeros(3, rows, dtype=torch.int64, device=device).unbind()
    return Batch(
        tokens=tokens,
        positions=positions,
        slot_mapping=slot_mapping,
        block_tables=torch.zeros(max(rows, 2), max_blocks, dtype=torch.int32, device=device),
        query_start=sequences.clamp(max=rows),
        context_lens=(sequences[:-1] < rows).int(),
        logit_rows=torch.arange(rows, device=device),
        one_each=True,
    )


def inverse_frequencies(config) -> tuple[Tensor, float]:
    """float64 [head_dim / 2]: the angle each rotated pair turns per position; and the factor on cosine and sine."""
    dim, base, scaling = config.head_dim, config.rope_theta, config.rope_scaling
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
    if kind == "yarn":
        bounds = (
            dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))
            for rotations in (scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1)
        )
        low, high = bounds
        if scaling.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001
        ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
        return plain / scaling["factor"] * ramp + plain * (1 - ramp), scaling["attention_factor"]
    raise ValueError(f"rope_type {kind!r} is not supported; known are default, linear, llama3 and yarn")


def rope_table(config, num_positions: int) -> Tensor:
    """float32 [num_positions, head_dim]: cosines in the first half of a row, sines in the second.

    Angles are computed in float64 and the table stays float32 whatever the model's dtype: at position 8,000 a bfloat16
    angle would be off by whole turns.
    """
    freqs, factor = inverse_frequencies(config)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), freqs)
    return (torch.cat([angles.cos(), angles.sin()], dim=-1) * factor).float()


class DecoderLayer(nn.Module):
    """Attention and MLP with their residual paths: x [T, hidden] -> [T, hidden]."""

    def __init__(self, ckpt, index: int, scheme, dtype: torch.dtype):
        super().__init__()
        config, prefix = ckpt.config, f"model.layers.{index}."
        self.num_heads, self.head_dim, self.eps = config.num_heads, config.head_dim, config.rms_norm_eps
        self.window = config.sliding_window[index] or 0

        def linear(bias: bool, *names: str) -> nn.Module:
            weights = [f"{prefix}{name}.weight" for name in names]
            biases = [f"{prefix}{name}.bias" for name in names] if bias else None
            return linear_from_checkpoint(ckpt, weights, scheme, dtype, biases)

        def norm(name: str) -> nn.Parameter:
            return load_norm(ckpt, f"{prefix}{name}.weight", dtype)

        attn = "self_attn."
        self.qkv = linear(config.qkv_bias, attn + "q_proj", attn + "k_proj", attn + "v_proj")
        self.o = linear(config.o_bias, attn + "o_proj")
        self.gate_up = linear(config.mlp_bias, "mlp.gate_proj", "mlp.up_proj")
        self.down = linear(config.mlp_bias, "mlp.down_proj")
        self.attn_norm, self.mlp_norm = norm("input_layernorm"), norm("post_attention_layernorm")
        self.q_norm = norm(attn + "q_norm") if config.qk_norm else None  # [head_dim]
        self.k_norm = norm(attn + "k_norm") if config.qk_norm else None

    def forward(self, x, positions, cos_sin, k_cache, v_cache, slot_mapping, block_tables, query_start, context_lens):
        qkv = self.qkv(x, norm_weight=self.attn_norm, eps=self.eps)  # [T, (heads + 2 kv_heads) * head_dim]
        q = ops.rope_write_kv(
            qkv, positions, cos_sin, k_cache, v_cache, slot_mapping, self.num_heads, self.q_norm, self.k_norm, self.eps
        )  # [T, heads, head_dim]
        scale = self.head_dim**-0.5
        attended = ops.paged_attention(q, k_cache, v_cache, block_tables, query_start, context_lens, scale, self.window)
        x = self.o(attended.flatten(1), residual=x)
        h = self.gate_up(x, norm_weight=self.mlp_norm, eps=self.eps, silu_gate=True)  # [T, intermediate]
        return self.down(h, residual=x)


class Transformer(nn.Module):
    """Embedding, layers, final norm and head, built from a checkpoint one tensor at a time.

    `quant` is a scheme of quantize.py or None; `dtype` that of dense weights and activations; `max_model_len` bounds
    the rotary table. `progress(done, total)` is called as layers are loaded.
    """

    def __init__(
        self,
        ckpt,
        quant: str | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        max_model_len: int | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ):
        super().__init__()
        config, scheme = ckpt.config, parse_scheme(quant)
        self.config, self.dtype = config, dtype
        total = config.num_layers + 1
        self.embed = embedding_from_checkpoint(ckpt, "model.embed_tokens.weight", scheme, dtype).to(device)
        self.lm_head = None  # a tied model reads its embedding table backwards
        if not config.tie_word_embeddings:
            self.lm_head = embedding_from_checkpoint(ckpt, "lm_head.weight", scheme, dtype).to(device)
        progress(1, total)
        self.layers = nn.ModuleList()
        for i in range(config.num_layers):
            self.layers.append(DecoderLayer(ckpt, i, scheme, dtype).to(device))
            progress(i + 2, total)
        self.norm = load_norm(ckpt, "model.norm.weight", dtype).to(device)
        # A plain attribute: as a buffer, .to(bfloat16) would round the angles.
        self.cos_sin = rope_table(config, max_model_len or config.max_position_embeddings).to(device)
        self.run_layer = DecoderLayer.forward  # compiled.py may replace it
        self.states: Tensor | None = None  # [R, hidden] of the last step: what its logits were made of

    def hidden(self, batch: Batch, kv, run_layer: Callable = DecoderLayer.forward) -> Tensor:
        """Run all layers, writing keys and values into `kv`; the last hidden states of the wanted rows [R, hidden]."""
        x = self.embed.lookup(batch.tokens).to(self.dtype)  # [T, hidden]
        for i, layer in enumerate(self.layers):
            k_cache, v_cache = kv.layer(i)
            x = run_layer(
                layer,
                x,
                batch.positions,
                self.cos_sin,
                k_cache,
                v_cache,
                batch.slot_mapping,
                batch.block_tables,
                batch.query_start,
                batch.context_lens,
            )
        rows = x if batch.one_each else x[batch.logit_rows]  # [R, hidden]
        return ops.rms_norm(rows, self.norm, self.config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [R, vocab] of hidden states [R, hidden]."""
        return self.head.logits(hidden).float()

    def forward(self, batch: Batch, kv, run_layer: Callable | None = None) -> Tensor:
        """float32 logits [R, vocab] of the wanted rows."""
        self.states = self.hidden(batch, kv, run_layer or self.run_layer)
        return self.logits(self.states)

    @property
    def head(self) -> Embedding:
        """What turns hidden states into logits."""
        return self.embed if self.lm_head is None else self.lm_head

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they lie in memory."""
        return nbytes(self)

    @property
    def step_bytes(self) -> int:
        """Bytes of the weights one step reads: all but the embedding table, unless it is the head as well."""
        return self.weight_bytes - (nbytes(self.embed) if self.lm_head is not None else 0)


def load_norm(ckpt, name: str, dtype: torch.dtype) -> nn.Parameter:
    """A copy, so that the checkpoint's pages can go."""
    weight = nn.Parameter(ckpt.tensor(name).to(dtype, copy=True), requires_grad=False)
    ckpt.release(name)
    return weight


def nbytes(module: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in [*module.parameters(), *module.buffers()])
