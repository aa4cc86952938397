"""The whole engine, slow: what every other file must agree with.

Generating text is one loop: run the model over all tokens so far, pick a token from the last row of logits, append it,
repeat. Here it is with nothing added: float32, one sequence, no cache, every token computed anew each time.

    tokens [T] -> embed [T, hidden] -> (attention + MLP) x layers -> norm -> logits [T, vocab] -> pick from the last
       ^                                                                                              |
       +----------------------------------- append ---------------------------------------------------+

Everything else is a speed-up of this file and must give the same tokens. It shares no code with model.py: a mistake
would have to be made twice, in two ways (rotary embeddings are complex rotations here and real ones there).

Sources: Llama (arXiv:2302.13971, section 2), RoPE (arXiv:2104.09864, section 3.2), position interpolation
(arXiv:2306.15595), YaRN (arXiv:2309.00071, section 3), grouped-query attention (arXiv:2305.13245), Gemma 3.
"""

import math
from collections.abc import Callable

import torch


def inverse_frequencies(head_dim: int, theta: float, scaling: dict | None) -> tuple[torch.Tensor, float]:
    """Angle per position of each of the head_dim / 2 rotating pairs [head_dim / 2], and a factor on their length."""
    half = torch.arange(0, head_dim, 2, dtype=torch.float64)
    freqs = theta ** -(half / head_dim)
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
            return head_dim * math.log(original / (n * 2 * math.pi)) / (2 * math.log(theta))

        first, last = pair_that_turns(scaling["beta_fast"]), pair_that_turns(scaling["beta_slow"])
        if scaling["truncate"]:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        keep = 1 - ((half / 2 - first) / (last - first or 0.001)).clamp(0, 1)
        return freqs * (keep + (1 - keep) / factor), scaling["attention_factor"]
    return freqs, 1.0


def rotate(x: torch.Tensor, theta: float, scaling: dict | None) -> torch.Tensor:
    """Turn each pair (i, i + head_dim / 2) of x [T, heads, head_dim] by position times its frequency."""
    freqs, length = inverse_frequencies(x.shape[2], theta, scaling)
    angles = torch.outer(torch.arange(x.shape[0], dtype=torch.float64), freqs)
    turn = torch.polar(torch.full_like(angles, length), angles).to(torch.complex64)[:, None]  # [T, 1, head_dim / 2]
    pairs = torch.complex(*x.chunk(2, dim=-1)) * turn
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def forward(weights: dict[str, torch.Tensor], config, tokens: list[int]) -> torch.Tensor:
    """Logits [T, vocab] of all positions of one sequence. `weights`: float32 tensors by their Hugging Face names."""
    w = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    T, heads, kv_heads, head_dim = len(tokens), config.num_heads, config.num_kv_heads, config.head_dim
    gemma = config.architecture == "gemma3"

    def linear(x, name):
        y = x @ w[name + ".weight"].T
        return y + w[name + ".bias"] if name + ".bias" in w else y

    def norm(x, name):
        weight = w[name + ".weight"] + 1 if gemma else w[name + ".weight"]
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight

    def gated(gate):
        return torch.nn.functional.gelu(gate, approximate="tanh") if gemma else torch.nn.functional.silu(gate)

    age = torch.arange(T)[:, None] - torch.arange(T)[None, :]  # [query, key]: how far back the key lies
    x = w["embed_tokens.weight"][torch.tensor(tokens)]  # [T, hidden]
    if gemma:
        x = x * math.sqrt(config.hidden_size)
    for i in range(config.num_layers):
        layer, window = f"layers.{i}.", config.sliding_window[i]
        h = norm(x, layer + "input_layernorm")
        q = linear(h, layer + "self_attn.q_proj").view(T, heads, head_dim)
        k = linear(h, layer + "self_attn.k_proj").view(T, kv_heads, head_dim)
        v = linear(h, layer + "self_attn.v_proj").view(T, kv_heads, head_dim)
        if config.qk_norm:
            q, k = norm(q, layer + "self_attn.q_norm"), norm(k, layer + "self_attn.k_norm")
        if config.rope_local_theta and window:
            q, k = (rotate(t, config.rope_local_theta, None) for t in (q, k))
        else:
            q, k = (rotate(t, config.rope_theta, config.rope_scaling) for t in (q, k))
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))  # [T, heads, head_dim]
        scores = torch.einsum("qhd,khd->hqk", q, k) * (config.attn_scale or 1 / math.sqrt(head_dim))
        hidden = (age < 0) | (age >= (window or T + 1))  # the future, and what the window has left behind
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        h = linear(torch.einsum("hqk,khd->qhd", probs, v).reshape(T, heads * head_dim), layer + "self_attn.o_proj")
        x = x + (norm(h, layer + "post_attention_layernorm") if gemma else h)
        h = norm(x, layer + ("pre_feedforward_layernorm" if gemma else "post_attention_layernorm"))
        gate, up = linear(h, layer + "mlp.gate_proj"), linear(h, layer + "mlp.up_proj")
        h = linear(gated(gate) * up, layer + "mlp.down_proj")
        x = x + (norm(h, layer + "post_feedforward_layernorm") if gemma else h)
    head = w.get("lm_head.weight", w["embed_tokens.weight"])  # tied models read the embedding table backwards
    return norm(x, "norm") @ head.T


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
