"""The families of models: what a checkpoint of each says about itself, in both containers, and which parts it has.

The problem: llama, gemma3 and gpt2 differ in keys, tensors, their names, and what an absent key means. Scattered over a
loader as `if arch == ...`, they could only be understood all at once.

The idea: one `Architecture` a family, and two readers that ask it (read_config.py). How a family computes is in
`LAYERS` of model.py; a new one is an entry here and, if its layer is not the common one, a layer there. The parts of a
layer go by the names that Llama has for them.

Sources: the configuration classes of transformers (what an absent key means), llama.cpp's src/llama-model.cpp.
Left out: encoders, mixtures of experts, multimodal models: all refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from formats.config import CheckpointError, Reader, hf_rope

PARTS = {  # of a layer, by transformers' name: (GGUF's, rows, columns unless it is a norm, what says it has a bias)
    "self_attn.q_proj": ("attn_q", "queries", "hidden", "qkv_bias"),
    "self_attn.k_proj": ("attn_k", "keys", "hidden", "qkv_bias"),
    "self_attn.v_proj": ("attn_v", "keys", "hidden", "qkv_bias"),
    "self_attn.o_proj": ("attn_output", "hidden", "queries", "o_bias"),
    "mlp.gate_proj": ("ffn_gate", "inner", "hidden", "mlp_bias"),
    "mlp.up_proj": ("ffn_up", "inner", "hidden", "mlp_bias"),
    "mlp.down_proj": ("ffn_down", "hidden", "inner", "mlp_bias"),
    "input_layernorm": ("attn_norm", "hidden"),
    "post_attention_layernorm": ("ffn_norm", "hidden"),
    "self_attn.q_norm": ("attn_q_norm", "head"),  # if qk_norm
    "self_attn.k_norm": ("attn_k_norm", "head"),
}
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
FUSED_QKV = {"self_attn.qkv_proj": ("attn_qkv", "queries and keys", "hidden", "qkv_bias")}
POST_NORMS = {
    "post_attention_layernorm": ("post_attention_norm", "hidden"),
    "post_feedforward_layernorm": ("post_ffw_norm", "hidden"),
}


def without(*endings: str) -> dict[str, tuple[str, ...]]:
    return {name: part for name, part in PARTS.items() if not name.endswith(endings)}


def gguf_windows(read: Reader, layers: int, period: int = 0) -> dict:
    """attention.sliding_window (0: none) in every layer, or in those that the pattern marks.

    A pattern lists the layers, or is a number p: all but each p-th layer have the window (0: all have it).
    """
    window, pattern = read.number("attention.sliding_window", 0, least=0), "attention.sliding_window_pattern"
    marks = read.values.get(pattern)
    if not isinstance(marks, list):
        period = read.number(pattern, period, least=0)
        marks = [not period or (i + 1) % period for i in range(layers)]
    if len(marks) != layers:
        raise CheckpointError(f"{read.where}.{pattern} must list {layers} layers: {marks!r}.")
    return {"sliding_window": tuple(window if window and windowed else None for windowed in marks)}


@dataclass(frozen=True)
class Architecture:
    """What one family's files say. It goes by the name of its class in transformers, and of GGUF's architecture."""

    model_type: str  # in config.json
    read_hf: Callable[[Reader, int], dict]  # (settings, layers) -> fields of ModelConfig beyond the common ones
    read_gguf: Callable[[Reader, int], dict] | None = gguf_windows  # None: GGUF does not have it by its own name
    fixed: dict = field(default_factory=dict)  # fields that the family decides, whatever a file says
    defaults: dict = field(default_factory=dict)  # what a key absent from config.json means; null means "derive it"
    activations: tuple[str, ...] = ("silu", "swish")
    partial: bool = False  # only a part of each head may rotate
    pairs_in_gguf: bool = False  # q and k have their rows in another order there: see checkpoint.py
    parts: dict[str, tuple[str, ...]] = field(default_factory=lambda: PARTS)
    keys: dict[str, str] = field(default_factory=dict)  # settings that config.json calls otherwise than Llama's does
    renamed: dict[str, str] = field(default_factory=dict)  # parts of tensors' names, as Llama has them
    transposed: bool = False  # products are stored as [in, out] in transformers' files


# ---- the families


def _attention_bias(read: Reader) -> dict:
    return dict.fromkeys(("qkv_bias", "o_bias"), read.flag("attention_bias"))


def _windowed(read: Reader, layers: int, otherwise: list) -> list:
    """Which layers have the window: those that layer_types says, without it those that `otherwise` marks."""
    kinds, known = read.values.get("layer_types"), ("full_attention", "sliding_attention")
    if kinds is None:
        return otherwise
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in known for k in kinds):
        raise CheckpointError(f"{read.where}: layer_types is {kinds!r}; it must list {layers} of {known}.")
    return [kind == "sliding_attention" for kind in kinds]


def _windows(read: Reader, windowed: list) -> dict:
    window = read.number("sliding_window")
    return {"sliding_window": tuple(window if w else None for w in windowed)}


def _llama(read: Reader, layers: int) -> dict:  # no window, whatever its config says
    return _attention_bias(read) | {"mlp_bias": read.flag("mlp_bias")}


def _mistral(read: Reader, layers: int) -> dict:  # one window for all layers
    if len(set(_windowed(read, layers, []))) > 1:
        raise CheckpointError(f"{read.where}: a mistral with mixed layer_types is a ministral: not supported.")
    return {} if read.values["sliding_window"] is None else _windows(read, [True] * layers)


def _qwen2(read: Reader, layers: int) -> dict:
    """No window unless use_sliding_window is set: then in the layers of layer_types, or from max_window_layers on."""
    first = read.number("max_window_layers", 28, least=0)
    windowed = _windowed(read, layers, [i >= first for i in range(layers)])
    windows = {} if read.values["sliding_window"] is None else _windows(read, windowed)
    return windows if read.flag("use_sliding_window") else {}


def _qwen3(read: Reader, layers: int) -> dict:
    return _attention_bias(read) | _qwen2(read, layers)


def _one_window(read: Reader, layers: int) -> dict:
    return {} if read.values.get("sliding_window") is None else _windows(read, [True] * layers)


def _gemma(read: Reader, layers: int, period: int) -> dict:
    """All but every `period`-th layer look through a window."""
    read.only("use_bidirectional_attention", (False,), "only causal attention is supported")
    fields = _attention_bias(read) | {"embed_scale": read.number("hidden_size") ** 0.5}
    fields["attn_scale"] = read.real("query_pre_attn_scalar") ** -0.5
    return fields | _windows(read, _windowed(read, layers, [(i + 1) % period for i in range(layers)]))


def _gemma_gguf(read: Reader, layers: int, period: int, largest: int) -> dict:
    """The scale of the largest model is not that of its heads: llama.cpp too knows it by its layers."""
    hidden = read.number("hidden_size")
    per_head = hidden / read.number("num_attention_heads")
    scale = (per_head if layers == largest else read.number("head_dim", int(per_head))) ** -0.5
    return gguf_windows(read, layers, period) | {"attn_scale": scale, "embed_scale": hidden**0.5}


def _softcaps(read: Reader) -> dict:
    names = {"attn_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
    return {ours: read.real(key, 0.0, least=0) for ours, key in names.items()}


def _gemma2(read: Reader, layers: int) -> dict:
    return _gemma(read, layers, period=2) | _softcaps(read)


def _gemma2_gguf(read: Reader, layers: int) -> dict:
    return _gemma_gguf(read, layers, period=2, largest=46) | _softcaps(read)


def _gemma3(read: Reader, layers: int) -> dict:
    """Layers with a window rotate at a base of their own."""
    _refuse_softcapping(read)
    ropes = read.settings("rope_parameters")  # transformers 5: one set for each type of layer
    full, local = (ropes.get(kind) or {} for kind in ("full_attention", "sliding_attention"))
    local = Reader({"rope_theta": read.values["rope_local_base_freq"]} | local, f"{read.where}: sliding_attention")
    for key in ("rope_type", "type"):
        local.only(key, ("default",), "scaling the rotation of layers with a window is not supported")
    fields = hf_rope(Reader(read.values | {"rope_parameters": full}, read.where))
    fields |= _gemma(read, layers, period=read.number("sliding_window_pattern", 6))
    return fields | {"rope_local_theta": local.real("rope_theta", least=1)}


def _gemma3_gguf(read: Reader, layers: int) -> dict:
    _refuse_softcapping(read)
    local = read.real("rope.freq_base_swa", 10000.0, least=1)
    return _gemma_gguf(read, layers, period=6, largest=62) | {"rope_local_theta": local}


def _refuse_softcapping(read: Reader) -> None:  # transformers ignores it for Gemma 3
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        read.only(key, (0.0,), "soft-capping of logits is not supported")


def _granite(read: Reader, layers: int) -> dict:
    scales = _scales(read, "embedding_multiplier", "residual_multiplier", "logits_scaling")
    return _llama(read, layers) | scales | {"attn_scale": read.real("attention_multiplier", 1.0)}


def _granite_gguf(read: Reader, layers: int) -> dict:
    head_dim = read.number("head_dim", read.number("hidden_size") // read.number("num_attention_heads"))
    scales = _scales(read, "embedding_scale", "residual_scale", "logit_scale")
    return scales | {"attn_scale": read.real("attention.scale", head_dim**-0.5)}


def _scales(read: Reader, *keys: str) -> dict:
    embed, residual, logits = (read.real(key, 1.0) for key in keys)
    return {"embed_scale": embed, "residual_scale": residual, "logit_scale": 1 / logits}


def _smollm3(read: Reader, layers: int) -> dict:
    """Layers that no_rope_layers marks with 0 do not rotate; without it every fourth."""
    read.only("use_sliding_window", (False,), "a window in this family is not supported")
    every = read.number("no_rope_layer_interval", 4)
    marks = read.values.get("no_rope_layers") or [int((i + 1) % every > 0) for i in range(layers)]
    if not isinstance(marks, list) or len(marks) != layers or set(marks) > {0, 1}:
        raise CheckpointError(f"{read.where}: no_rope_layers is {marks!r}; it must list {layers} times 0 or 1.")
    return _llama(read, layers) | {"unrotated": tuple(i for i in range(layers) if not marks[i])}


def _smollm3_gguf(read: Reader, layers: int) -> dict:  # no key says it, and llama.cpp takes every fourth
    return {"unrotated": tuple(range(3, layers, 4))}


def _stablelm(read: Reader, layers: int) -> dict:
    read.only("use_parallel_residual", (False,), "attention and MLP side by side are not supported")
    read.only("qk_layernorm", (False,), "layer norms of q and k are not supported")
    return {"qkv_bias": read.flag("use_qkv_bias")}


def _starcoder2(read: Reader, layers: int) -> dict:
    return dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), read.flag("use_bias")) | _one_window(read, layers)


def _gpt2(read: Reader, layers: int) -> dict:
    read.only("scale_attn_weights", (True,), "attention without a scale is not supported")
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        read.only(key, (False,), "this variant of attention is not supported")
    return {}


GEMMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256}
GEMMA |= {"sliding_window": 4096, "tie_word_embeddings": True}
GELU = ("gelu_pytorch_tanh", "gelu_new")
ARCHITECTURES = {
    "llama": Architecture("llama", _llama, pairs_in_gguf=True),
    "mistral": Architecture("mistral", _mistral, None, {}, {"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": Architecture("qwen2", _qwen2, fixed={"qkv_bias": True}, defaults={"sliding_window": 4096}),
    "qwen3": Architecture("qwen3", _qwen3, fixed={"qk_norm": True}, defaults={"sliding_window": 4096, "head_dim": 128}),
    "gemma2": Architecture(
        "gemma2",
        _gemma2,
        _gemma2_gguf,
        {"norm_offset": 1.0},
        GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        GELU,
        parts=PARTS | POST_NORMS | {"pre_feedforward_layernorm": ("ffn_norm", "hidden")},
    ),
    "gemma3": Architecture(
        "gemma3_text",
        _gemma3,
        _gemma3_gguf,
        {"qk_norm": True, "norm_offset": 1.0},
        GEMMA | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        GELU,
        parts=PARTS | POST_NORMS | {"pre_feedforward_layernorm": ("ffn_norm", "hidden")},
    ),
    "phi3": Architecture(
        "phi3",
        _one_window,
        defaults={"rms_norm_eps": 1e-5},
        partial=True,
        parts=FUSED_QKV
        | {"mlp.gate_up_proj": ("ffn_up", "gate and inner", "hidden", "mlp_bias")}
        | without(*QKV, *GATE_UP),
    ),
    "olmo2": Architecture(
        "olmo2",
        lambda read, layers: _attention_bias(read),
        defaults={"rms_norm_eps": 1e-5},
        parts=without("input_layernorm")
        | POST_NORMS
        | {"self_attn.q_norm": ("attn_q_norm", "queries"), "self_attn.k_norm": ("attn_k_norm", "keys")},
    ),
    "granite": Architecture("granite", _granite, _granite_gguf, pairs_in_gguf=True),
    "smollm3": Architecture(
        "smollm3",
        _smollm3,
        _smollm3_gguf,
        defaults={"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
        pairs_in_gguf=True,
    ),
    "stablelm": Architecture(
        "stablelm",
        _stablelm,
        lambda read, layers: _stablelm(read, layers) and {},
        {"norm_bias": True},
        {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
        partial=True,
        keys={"rms_norm_eps": "layer_norm_eps"},
    ),
    "starcoder2": Architecture(
        "starcoder2",
        _starcoder2,
        fixed={"norm_bias": True},
        defaults={"num_key_value_heads": 2, "norm_epsilon": 1e-5, "use_bias": True, "tie_word_embeddings": True},
        activations=GELU,
        parts=without("gate_proj"),
        keys={"rms_norm_eps": "norm_epsilon"},
        renamed={"c_fc": "up_proj", "c_proj": "down_proj"},
    ),
    "gpt2": Architecture(
        "gpt2",
        _gpt2,
        fixed={"learned_positions": True, "rotary_dim": 0}
        | dict.fromkeys(("norm_bias", "qkv_bias", "o_bias", "mlp_bias"), True),
        defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        activations=GELU,
        parts=FUSED_QKV | without(*QKV, "gate_proj"),
        keys={
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "num_key_value_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        renamed={
            "wte": "model.embed_tokens",
            "wpe": "model.embed_positions",
            "ln_f": "model.norm",
            "h": "model.layers",
            "ln_1": "input_layernorm",
            "ln_2": "post_attention_layernorm",
            "attn.c_attn": "self_attn.qkv_proj",
            "attn.c_proj": "self_attn.o_proj",
            "c_fc": "up_proj",
            "c_proj": "down_proj",
        },
        transposed=True,
    ),
}
