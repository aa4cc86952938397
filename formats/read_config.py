"""From what a file says to a ModelConfig, and from that to every tensor that the file must hold.

    config.json, old keys or new --+--> ModelConfig --> tensor_shapes(): every tensor the checkpoint must hold
    GGUF metadata -----------------+                    llama_name(), gguf_name(): by which names it goes

What differs between families is asked of their `Architecture` (families.py).
"""

from __future__ import annotations

import re

from formats.config import DTYPES, CheckpointError, ModelConfig, Reader, gguf_rope, hf_rope
from formats.families import ARCHITECTURES

MOST_LAYERS = 10_000  # a damaged number must not become a list of that length
OUTER = {
    "model.embed_tokens": "token_embd",
    "model.embed_positions": "position_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
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


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this config holds, by the name that a Llama's would have, with its shape."""
    c = config
    queries, keys, inner = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    sizes = {"hidden": c.hidden_size, "inner": inner, "head": c.head_dim, "queries": queries, "keys": keys}
    sizes |= {"queries and keys": queries + 2 * keys, "gate and inner": 2 * inner}
    layer = {}
    for name, (_, rows, *columns_and_bias) in ARCHITECTURES[c.architecture].parts.items():
        if rows == "head" and not c.qk_norm:
            continue
        layer[f"{name}.weight"] = tuple(sizes[size] for size in (rows, *columns_and_bias[:1]))
        if getattr(c, columns_and_bias[1] if columns_and_bias else "norm_bias"):
            layer[f"{name}.bias"] = (sizes[rows],)
    shapes = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    if c.learned_positions:
        shapes["model.embed_positions.weight"] = (c.max_position_embeddings, c.hidden_size)
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(c.num_layers) for name, shape in layer.items()}
    shapes |= {f"model.norm.{kind}": (c.hidden_size,) for kind in ("weight", "bias")[: 1 + c.norm_bias]}
    return shapes if c.tie_word_embeddings else shapes | {"lm_head.weight": (c.vocab_size, c.hidden_size)}


def is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a scheme holds the tensor: norms, biases and learned positions stay as they are."""
    return len(shape) == 2 and not name.startswith("model.embed_positions")


def llama_name(config: ModelConfig, name: str) -> str:
    """The name that a tensor of a transformers folder would have in a Llama, by which it goes here."""
    name = name.removeprefix("transformer.")
    for theirs, ours in ARCHITECTURES[config.architecture].renamed.items():
        name = re.sub(rf"\b{re.escape(theirs)}\b", ours, name)
    return name


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
    read = Reader({"rms_norm_eps": 1e-6} | family.defaults | config, where, family.keys)
    for key in ("hidden_act", "hidden_activation", "activation_function"):
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
    named = [re.sub("(ForCausalLM|LMHeadModel)$", "", str(c)).lower() for c in classes]
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
    keys = GGUF_KEYS
    if family.fixed.get("norm_bias"):
        keys = GGUF_KEYS | {"rms_norm_eps": "attention.layer_norm_epsilon"}
    read = Reader(values | {"vocab_size": shapes["token_embd.weight"][0]}, f"{where}: {arch}", keys)
    read.only("expert_count", (0,), "mixtures of experts are not supported")
    fields = _sizes(read, arch)
    dim = fields["head_dim"]
    read.only("attention.value_length", (dim,), f"only values as long as the keys ({dim}) are supported")
    fields["rotary_dim"] = read.number("rope.dimension_count", dim)
    fields |= gguf_rope(read) | family.read_gguf(read, fields["num_layers"])
    for bias in ("qkv_bias", "o_bias", "mlp_bias"):
        fields[bias] = any(f"blk.0.{part[0]}.bias" in shapes for part in family.parts.values() if bias in part)
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
    sizes = ("vocab_size", "hidden_size", "max_position_embeddings")
    inner = read.number("intermediate_size", 4 * hidden if arch == "gpt2" else None)
    return {key: read.number(key) for key in sizes} | {
        "intermediate_size": inner,
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
    if c.head_dim % 2 or c.rotary_dim % 2:
        raise CheckpointError(
            f"{where}: head_dim is {c.head_dim}, of which {c.rotary_dim} rotate; rotary embeddings need even numbers."
        )
    if c.rotary_dim not in (0, c.head_dim) and not (
        ARCHITECTURES[c.architecture].partial and c.rotary_dim < c.head_dim
    ):
        raise CheckpointError(
            f"{where}: {c.rotary_dim} of {c.head_dim} components of a head rotate (partial_rotary_factor); "
            f"in a {c.architecture} all of them do."
        )
    divisors = (c.rope_scaling or {}).get("factors")
    if divisors is not None and len(divisors) != c.rotary_dim // 2:
        raise CheckpointError(f"{where}: {len(divisors)} rope factors for {c.rotary_dim} components, not half of them.")
    return c
