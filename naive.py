"""The whole engine, slow: what every other file must agree with.

Generating text is one loop: run the model over all tokens so far, pick a token from the last row of logits, append it,
repeat. Here it is with nothing added: float32, one sequence, no cache, every token computed anew each time.

    tokens [T] -> embed [T, hidden] -> (attention + MLP) x layers -> norm -> logits [T, vocab] -> pick from the last
       ^                                                                                              |
       +----------------------------------- append ---------------------------------------------------+

Everything else is a speed-up of this file and must give the same tokens. It shares no code with model.py: a mistake
would have to be made twice, in two ways (rotary embeddings are complex rotations here and real ones there).

Sources: Llama (arXiv:2302.13971, section 2), RoPE (arXiv:2104.09864, section 3.2), position interpolation
(arXiv:2306.15595), YaRN (arXiv:2309.00071, section 3), grouped-query attention (arXiv:2305.13245); what other families
do otherwise stands at the line that does it.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F


def inverse_frequencies(width: int, theta: float, scaling: dict | None) -> tuple[torch.Tensor, float]:
    """Angle per position of each of the rotating pairs [width / 2], and a factor on their length."""
    half = torch.arange(0, width, 2, dtype=torch.float64)
    freqs = theta ** -(half / width)
    scaling = scaling or {"rope_type": "default"}
    kind, factor = scaling["rope_type"], scaling.get("factor", 1.0)
    if kind == "linear":
        return freqs / factor, 1.0
    if kind == "llama3":  # slow pairs are interpolated, fast ones kept, those between are blended
        turns = scaling["original_max_position_embeddings"] * freqs / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return freqs * (keep + (1 - keep) / factor), 1.0
    if kind == "llama3_factors":  # GGUF stores the divisors that llama3 scaling comes to
        return freqs / torch.tensor(scaling["factors"], dtype=torch.float64), 1.0
    if kind == "yarn":
        original = scaling["original_max_position_embeddings"]

        def pair_that_turns(n):  # the (fractional) pair index that turns n times over the original context
            return width * math.log(original / (n * 2 * math.pi)) / (2 * math.log(theta))

        first, last = pair_that_turns(scaling["beta_fast"]), pair_that_turns(scaling["beta_slow"])
        if scaling["truncate"]:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        keep = 1 - ((half / 2 - first) / (last - first or 0.001)).clamp(0, 1)
        return freqs * (keep + (1 - keep) / factor), scaling["attention_factor"]
    return freqs, 1.0


def rotate(x: torch.Tensor, width: int, theta: float, scaling: dict | None) -> torch.Tensor:
    """Turn each pair (i, i + width / 2) of x [T, heads, head_dim] by position times its frequency; the rest stays."""
    freqs, length = inverse_frequencies(width, theta, scaling)
    angles = torch.outer(torch.arange(x.shape[0], dtype=torch.float64), freqs)
    turn = torch.polar(torch.full_like(angles, length), angles).to(torch.complex64)[:, None]  # [T, 1, width / 2]
    pairs = torch.complex(x[..., : width // 2], x[..., width // 2 : width]) * turn
    return torch.cat([pairs.real, pairs.imag, x[..., width:]], dim=-1)


def linear(w: dict, name: str, x: torch.Tensor) -> torch.Tensor:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def norm(w: dict, name: str, x: torch.Tensor, config) -> torch.Tensor:
    """RMS norm; with a bias layer norm; x itself where the family has no such norm."""
    if f"{name}.weight" not in w:
        return x
    bias = w.get(f"{name}.bias")
    x = x if bias is None else x - x.mean(-1, keepdim=True)
    x = x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * (w[f"{name}.weight"] + config.norm_offset)
    return x if bias is None else x + bias


def softcap(scores: torch.Tensor, cap: float) -> torch.Tensor:  # Gemma 2
    return cap * torch.tanh(scores / cap) if cap else scores


def attention(w: dict, x: torch.Tensor, config, layer: int) -> torch.Tensor:
    """Every token looks back at those before it: x [T, hidden] -> [T, hidden]."""
    T, sizes = len(x), [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    if "self_attn.qkv_proj.weight" in w:  # one matrix in Phi-3 and GPT-2
        q, k, v = linear(w, "self_attn.qkv_proj", x).split([heads * config.head_dim for heads in sizes], dim=-1)
    else:
        q, k, v = (linear(w, f"self_attn.{part}_proj", x) for part in "qkv")
    if config.architecture == "olmo2":  # over all heads together; in other families over each
        q, k = norm(w, "self_attn.q_norm", q, config), norm(w, "self_attn.k_norm", k, config)
    q, k, v = (t.view(T, heads, config.head_dim) for t, heads in zip((q, k, v), sizes, strict=True))
    if config.qk_norm:
        q, k = norm(w, "self_attn.q_norm", q, config), norm(w, "self_attn.k_norm", k, config)
    q, k = (rotate(t, *config.rope(layer)) for t in (q, k))
    k, v = (t.repeat_interleave(config.num_heads // config.num_kv_heads, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (config.attn_scale or 1 / math.sqrt(config.head_dim))
    age = torch.arange(T)[:, None] - torch.arange(T)[None, :]  # [query, key]: how far back the key lies
    hidden = (age < 0) | (age >= (config.sliding_window[layer] or T + 1))  # the future, and what left the window
    probs = softcap(scores, config.attn_softcap).masked_fill(hidden, -torch.inf).softmax(-1)
    return linear(w, "self_attn.o_proj", torch.einsum("hqk,khd->qhd", probs, v).reshape(T, -1))


def mlp(w: dict, x: torch.Tensor, config) -> torch.Tensor:
    """x [T, hidden] -> [T, hidden]."""
    gelu = config.architecture in ("gemma2", "gemma3", "gpt2", "starcoder2")
    act = partial(F.gelu, approximate="tanh") if gelu else F.silu
    if "mlp.gate_up_proj.weight" in w:
        gate, up = linear(w, "mlp.gate_up_proj", x).chunk(2, dim=-1)
    elif "mlp.gate_proj.weight" in w:
        gate, up = linear(w, "mlp.gate_proj", x), linear(w, "mlp.up_proj", x)
    else:  # StarCoder 2, GPT-2
        gate, up = linear(w, "mlp.up_proj", x), 1
    return linear(w, "mlp.down_proj", act(gate) * up)


def forward(weights: dict[str, torch.Tensor], config, tokens: list[int]) -> torch.Tensor:
    """Logits [T, vocab] of all positions of one sequence. `weights`: float32 tensors by the names a Llama has."""
    x = weights["model.embed_tokens.weight"][torch.tensor(tokens)] * config.embed_scale  # [T, hidden]
    if config.learned_positions:
        x = x + weights["model.embed_positions.weight"][: len(tokens)]
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        w = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        after = "post_feedforward_layernorm.weight" in w  # Gemma and OLMo 2 have norms after attention and MLP
        h = attention(w, norm(w, "input_layernorm", x, config), config, i)
        x = x + config.residual_scale * (norm(w, "post_attention_layernorm", h, config) if after else h)
        h = norm(w, "pre_feedforward_layernorm" if after else "post_attention_layernorm", x, config)
        x = x + config.residual_scale * norm(w, "post_feedforward_layernorm", mlp(w, h, config), config)
    # Tied models read the embedding table backwards.
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    logits = norm(weights, "model.norm", x, config) @ head.T * config.logit_scale
    return softcap(logits, config.logit_softcap)


def greedy(logits: torch.Tensor) -> int:
    return int(logits.argmax())


def generate(
    weights: dict[str, torch.Tensor],
    config,
    prompt: list[int],
    max_tokens: int,
    pick: Callable[[torch.Tensor], int] = greedy,
    stop_ids: tuple[int, ...] = (),
) -> list[int]:
    """The tokens that follow `prompt`: at most `max_tokens`, ending with the first one in `stop_ids`."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(pick(forward(weights, config, tokens)[-1]))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]
