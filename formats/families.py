"""The families of models: what a checkpoint of each says about itself, in both containers, and which tensors it holds.

The problem: llama, qwen3 and gemma3 differ in a few keys, a few tensors and what an absent key means. Scattered over a
loader as `if arch == ...`, they could only be understood all at once.

The idea: one `Architecture` a family, and two readers that ask it. How a family computes is in `LAYERS` of model.py; a
new one is an entry here and, if its layer is not the common one, a layer there.

    config.json, old keys or new --+--> ModelConfig --> tensor_shapes(): every tensor the checkpoint must hold
    GGUF metadata -----------------+                    gguf_name(): what a GGUF file calls it

Sources: the configuration classes of transformers (what an absent key means), llama.cpp's src/llama-model.cpp.
Left out: encoders, mixtures of experts, multimodal models: all refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from formats.config import DTYPES, CheckpointError, ModelConfig, Reader, gguf_rope, hf_rope

MOST_LAYERS = 10_000  # a damaged number must not become a list of that length
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
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
GGUF_KEYS = {  # settings: transformers' key -> GGUF's, after the name of the architecture
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}


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
    pairs_in_gguf: bool = False  # q and k have their rows in another order there: see checkpoint.py
    parts: dict[str, tuple[str, ...]] = field(default_factory=lambda: PARTS)


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


def _gemma3(read: Reader, layers: int) -> dict:
    """Most layers look through a window and rotate at a base of their own; every sixth looks back to the start."""
    _refuse_softcapping(read)
    read.only("use_bidirectional_attention", (False,), "only causal attention is supported")
    period = read.number("sliding_window_pattern", 6)
    ropes = read.settings("rope_parameters")  # transformers 5: one set for each type of layer
    full, local = (ropes.get(kind) or {} for kind in ("full_attention", "sliding_attention"))
    local = Reader({"rope_theta": read.values["rope_local_base_freq"]} | local, f"{read.where}: sliding_attention")
    for key in ("rope_type", "type"):
        local.only(key, ("default",), "scaling the rotation of layers with a window is not supported")
    fields = _attention_bias(read) | hf_rope(Reader(read.values | {"rope_parameters": full}, read.where))
    fields |= _windows(read, _windowed(read, layers, [(i + 1) % period for i in range(layers)]))
    fields["attn_scale"] = read.real("query_pre_attn_scalar") ** -0.5
    return fields | {"rope_local_theta": local.real("rope_theta", least=1)}


def _gemma3_gguf(read: Reader, layers: int) -> dict:
    _refuse_softcapping(read)
    per_head = read.number("hidden_size") / read.number("num_attention_heads")
    # The scale of the 27B model is not that of its heads: llama.cpp too knows it by its layers.
    scale = (per_head if layers == 62 else read.number("head_dim", int(per_head))) ** -0.5
    local = read.real("rope.freq_base_swa", 10000.0, least=1)
    return gguf_windows(read, layers, period=6) | {"rope_local_theta": local, "attn_scale": scale}


def _refuse_softcapping(read: Reader) -> None:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        read.only(key, (0.0,), "soft-capping of logits is not supported")


GEMMA3 = Architecture(
    "gemma3_text",
    _gemma3,
    _gemma3_gguf,
    {"qk_norm": True, "norm_offset": 1.0, "scaled_embedding": True},
    {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256}
    | {"sliding_window": 4096, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "tie_word_embeddings": True},
    activations=("gelu_pytorch_tanh",),
    parts=PARTS
    | {"post_attention_layernorm": ("post_attention_norm", "hidden")}
    | {"pre_feedforward_layernorm": ("ffn_norm", "hidden"), "post_feedforward_layernorm": ("post_ffw_norm", "hidden")},
)
ARCHITECTURES = {
    "llama": Architecture("llama", _llama, pairs_in_gguf=True),
    "mistral": Architecture("mistral", _mistral, None, {}, {"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": Architecture("qwen2", _qwen2, fixed={"qkv_bias": True}, defaults={"sliding_window": 4096}),
    "qwen3": Architecture("qwen3", _qwen3, fixed={"qk_norm": True}, defaults={"sliding_window": 4096, "head_dim": 128}),
    "gemma3": GEMMA3,
}


# ---- names, shapes, and the two readers


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this config holds, by its canonical (transformers) name, with its shape."""
    c = config
    sizes = {"hidden": c.hidden_size, "inner": c.intermediate_size, "head": c.head_dim}
    sizes |= {"queries": c.num_heads * c.head_dim, "keys": c.num_kv_heads * c.head_dim}
    layer = {}
    for name, (_, rows, *columns_and_bias) in ARCHITECTURES[c.architecture].parts.items():
        if rows != "head" or c.qk_norm:
            layer[f"{name}.weight"] = tuple(sizes[size] for size in (rows, *columns_and_bias[:1]))
        if columns_and_bias and getattr(c, columns_and_bias[1]):
            layer[f"{name}.bias"] = (sizes[rows],)
    shapes = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(c.num_layers) for name, shape in layer.items()}
    shapes["model.norm.weight"] = (c.hidden_size,)
    return shapes if c.tie_word_embeddings else shapes | {"lm_head.weight": (c.vocab_size, c.hidden_size)}


def gguf_name(config: ModelConfig, name: str) -> str:
    """model.layers.0.self_attn.q_proj.weight -> blk.0.attn_q.weight"""
    stem, _, kind = name.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{ARCHITECTURES[config.architecture].parts[part][0]}.{kind}"


def from_hf(config: dict, generation: dict, where: str) -> ModelConfig:
    """The ModelConfig of a transformers folder; `where` names the file in errors. Raises CheckpointError."""
    arch = _hf_architecture(config, where)
    family = ARCHITECTURES[arch]
    read = Reader({"rms_norm_eps": 1e-6} | family.defaults | config, where)
    for key in ("hidden_act", "hidden_activation"):
        read.only(key, family.activations, f"only {family.activations[0]} is supported")
    read.only("quantization_config", (), "weights quantised by other tools are not read; use the original or a GGUF")
    fields = _sizes(read, arch)
    fields |= family.read_hf(read, fields["num_layers"])
    if "rope_theta" not in fields:
        fields |= hf_rope(read)
    fields["tie_word_embeddings"] = read.flag("tie_word_embeddings")
    # transformers 5 writes dtype, 4 torch_dtype, some tools "torch.bfloat16"; "" leaves it to the tensors.
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    generation = Reader(generation, "generation_config.json")
    bos = read.ids("bos_token_id") or generation.ids("bos_token_id")
    eos = read.ids("eos_token_id") + generation.ids("eos_token_id")
    return _config(fields | family.fixed, bos, eos, dtype if dtype in DTYPES else "", where)


def _hf_architecture(config: dict, where: str) -> str:
    classes, kind = config.get("architectures") or [], config.get("model_type")
    if not isinstance(classes, list):
        raise CheckpointError(f"{where}: architectures is {classes!r}; it must be a list of class names.")
    named = [str(c).removesuffix("ForCausalLM").lower() for c in classes]
    types = {family.model_type: name for name, family in ARCHITECTURES.items()}
    arch = types.get(kind) if kind or not named else named[0]
    if arch not in ARCHITECTURES or any(name not in ARCHITECTURES for name in named):
        raise CheckpointError(
            f"{where}: architecture {kind!r} {classes or ''} is not supported. "
            f"Supported: {', '.join(types)}, as causal language models."
        )
    return arch


def from_gguf(metadata: dict, shapes: dict[str, tuple[int, ...]], where: str) -> ModelConfig:
    """The ModelConfig of a GGUF file. `shapes` maps its tensors' names (blk.0.attn_q.weight) to their shapes.

    GGUF has no flag for biases or a tied head: the tensors themselves tell. The embedding's rows are the vocabulary.
    `dtype` is left "" for the caller, who knows how the tensors are stored. Raises CheckpointError.
    """
    arch, parts = metadata.get("general.architecture"), metadata.get("split.count", 1)
    known = [name for name, family in ARCHITECTURES.items() if family.read_gguf]
    if arch not in known:
        names = ", ".join(known).replace("llama", "llama (and mistral)")
        raise CheckpointError(f"{where}: architecture {arch!r} is not supported. Supported in GGUF: {names}.")
    if parts != 1:
        raise CheckpointError(f"{where} is one of {parts} parts: join them (llama-gguf-split --merge).")
    if "token_embd.weight" not in shapes:
        raise CheckpointError(f"{where}: tensor 'token_embd.weight' is missing: not a complete language model.")
    prefix, family = arch + ".", ARCHITECTURES[arch]
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    for key, value in values.items():  # one number, or one for each layer
        if isinstance(value, list) and len(set(value)) == 1 and key in GGUF_KEYS.values():
            values[key] = value[0]
    read = Reader(values | {"vocab_size": shapes["token_embd.weight"][0]}, f"{where}: {arch}", GGUF_KEYS)
    read.only("expert_count", (0,), "mixtures of experts are not supported")
    fields = _sizes(read, arch)
    dim = fields["head_dim"]
    read.only("attention.value_length", (dim,), f"only values as long as the keys ({dim}) are supported")
    read.only("rope.dimension_count", (dim,), f"rotating only a part of each head ({dim}) is not supported")
    fields |= gguf_rope(read) | family.read_gguf(read, fields["num_layers"])
    for name, part in (("qkv_bias", "attn_q"), ("o_bias", "attn_output"), ("mlp_bias", "ffn_down")):
        fields[name] = f"blk.0.{part}.bias" in shapes
    fields["tie_word_embeddings"] = "output.weight" not in shapes
    tokens = Reader(metadata, where)
    bos, *eos = (tokens.ids(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos", "eot", "eom"))
    return _config(fields | family.fixed, bos, sum(eos, ()), "", where)


def _sizes(read: Reader, arch: str) -> dict:
    """What every family has, under the names of either container."""
    heads, hidden = read.number("num_attention_heads"), read.number("hidden_size")
    if hidden % heads and read.get("head_dim") is None:
        raise CheckpointError(
            f"{read.where}: head_dim is not given and hidden_size {hidden} is no multiple of the {heads} heads."
        )
    layers = read.number("num_hidden_layers", most=MOST_LAYERS)
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
    return {key: read.number(key) for key in sizes} | {
        "architecture": arch,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": read.number("num_key_value_heads", heads),
        "head_dim": read.number("head_dim", hidden // heads),
        "rms_norm_eps": read.real("rms_norm_eps", least=0),
        "sliding_window": (None,) * layers,
    }


def _config(fields: dict, bos: tuple[int, ...], eos: tuple[int, ...], dtype: str, where: str) -> ModelConfig:
    """The last fields, and what must hold between the numbers, whichever container they came from."""
    eos = tuple(dict.fromkeys(eos))
    c = ModelConfig(**fields, bos_token_id=bos[0] if bos else None, eos_token_ids=eos, dtype=dtype)
    if any(i >= c.vocab_size for i in (*bos, *eos)):
        raise CheckpointError(f"{where}: bos_token_id {bos} or eos_token_id {eos} is beyond the {c.vocab_size} tokens.")
    if c.num_heads % c.num_kv_heads:
        raise CheckpointError(f"{where}: {c.num_heads} attention heads cannot share {c.num_kv_heads} key-value heads.")
    if c.head_dim % 2:
        raise CheckpointError(f"{where}: head_dim is {c.head_dim}; rotary embeddings need an even one.")
    divisors = (c.rope_scaling or {}).get("factors")
    if divisors is not None and len(divisors) != c.head_dim // 2:
        raise CheckpointError(f"{where}: {len(divisors)} rope factors for a head_dim of {c.head_dim}, not half of it.")
    return c
