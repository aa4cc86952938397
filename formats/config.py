"""What a checkpoint says about itself, in one form: the architecture, its sizes, and its rotary scaling.

The problem: the same Llama is described in the `config.json` of transformers 4 (`rope_theta`, `rope_scaling`), in that
of transformers 5 (`rope_parameters`), and in the metadata of a GGUF file (`llama.rope.freq_base`). A key read under its
old name only, or a default that differs from the one the authors used, does not crash: the model talks fluent
nonsense, or ignores half of its context. So everything is read here, once, strictly, into a `ModelConfig`, and what
this engine does not compute is refused by name instead of being left out in silence.

    config.json (old keys) --+
    config.json (new keys) --+--> ModelConfig --> tensor_shapes(): every tensor the checkpoint must hold
    GGUF metadata -----------+         |
                                       +--> model.py

Rotary scaling, `ModelConfig.rope_scaling` (None: not scaled). Base frequencies are f_i = rope_theta^(-2i/head_dim):

    {"rope_type": "linear", "factor"}             f_i / factor (Chen et al. 2023, position interpolation)
    {"rope_type": "llama3", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
                                                  long wavelengths divided by factor, short ones kept, a ramp between
    {"rope_type": "llama3_factors", "factors"}    the same, as GGUF stores it: f_i / factors[i], head_dim/2 numbers
    {"rope_type": "yarn", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate",
     "attention_factor"}                          Peng et al. 2023; cos and sin are multiplied by attention_factor,
                                                  which is always filled in here (verbatim where the file gives it)

Left out: dynamic NTK, LongRoPE and multimodal rotary scaling, partial rotary embeddings, mixtures of experts, and
checkpoints quantised by other tools (GPTQ, AWQ, bitsandbytes): all recognised, all refused by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
DTYPES = ("float32", "float16", "bfloat16")
MOST_LAYERS = 10_000  # a damaged number must not become a list of that length


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded: the message names the file, the cause, and what to do."""


@dataclass(frozen=True)
class ModelConfig:
    """Everything the model needs to know about a checkpoint; the same whichever container it came in."""

    architecture: str  # one of ARCHITECTURES
    vocab_size: int  # rows of the embedding; may be padded beyond the tokenizer
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # need not be hidden_size / num_heads
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict | None  # see the module's docstring
    max_position_embeddings: int
    tie_word_embeddings: bool  # True: the head is the embedding, and the checkpoint has no lm_head.weight
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: tuple[int | None, ...]  # per layer; a query sees itself and window - 1 tokens before; None: all
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # union of config.json and generation_config.json
    dtype: str  # the checkpoint's own, one of DTYPES; "float32" for quantised GGUF


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this config holds, by its canonical (transformers) name, with its shape."""
    c = config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    linears = {  # name: (rows, columns, has a bias)
        "self_attn.q_proj": (q, c.hidden_size, c.qkv_bias),
        "self_attn.k_proj": (kv, c.hidden_size, c.qkv_bias),
        "self_attn.v_proj": (kv, c.hidden_size, c.qkv_bias),
        "self_attn.o_proj": (c.hidden_size, q, c.o_bias),
        "mlp.gate_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
        "mlp.up_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
        "mlp.down_proj": (c.hidden_size, c.intermediate_size, c.mlp_bias),
    }
    norms = {"input_layernorm": c.hidden_size, "post_attention_layernorm": c.hidden_size}
    if c.qk_norm:
        norms |= {"self_attn.q_norm": c.head_dim, "self_attn.k_norm": c.head_dim}
    shapes = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    for i in range(c.num_layers):
        for name, (rows, columns, bias) in linears.items():
            shapes[f"model.layers.{i}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"model.layers.{i}.{name}.bias"] = (rows,)
        shapes |= {f"model.layers.{i}.{name}.weight": (size,) for name, size in norms.items()}
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return shapes


class Reader:
    """Typed access to a dictionary of settings; every complaint names the file, the key and the value."""

    def __init__(self, values: dict, where: str):
        self.values, self.where = values, where

    def number(self, key: str, default=None, whole: bool = True, least: float = 1, most: float = math.inf):
        """A number from `least` to `most`; a key that is absent or null gives `default`, or is refused without one."""
        value = self.values.get(key)
        value = default if value is None else value
        kinds, wanted = ((int,), "an integer") if whole else ((int, float), "a number")
        if type(value) not in kinds or not math.isfinite(value) or not least <= value <= most:
            state = "is missing" if value is None else f"is {value!r}"
            limit = f" and at most {most:,}" if most < math.inf else ""
            raise CheckpointError(f"{self.where}: {key} {state}; it must be {wanted} of at least {least:g}{limit}.")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {key} is {value!r}; it must be true or false.")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids given as one number, a list, or not at all; -1 is an old way to say "none"."""
        value = self.values.get(key)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(i) is not int for i in found):
            raise CheckpointError(f"{self.where}: {key} is {value!r}; it must be a token id or a list of them.")
        return tuple(i for i in found if i >= 0)

    def only(self, key: str, allowed: tuple, why: str) -> None:
        """Refuse a setting that asks for something this engine does not compute."""
        value = self.values.get(key)
        if value is not None and value not in allowed:
            raise CheckpointError(f"{self.where}: {key} is {value!r}: {why}.")


def from_hf(config: dict, generation: dict, where: str) -> ModelConfig:
    """The ModelConfig of a transformers folder; `where` names the file in errors. Raises CheckpointError."""
    read = Reader(config, where)
    arch = _hf_architecture(config, where)
    read.only("hidden_act", ("silu", "swish"), "only silu is supported")
    read.only("quantization_config", (), "weights quantised by other tools are not read; use the original or a GGUF")
    heads = read.number("num_attention_heads")
    hidden = read.number("hidden_size")
    layers = read.number("num_hidden_layers", most=MOST_LAYERS)
    positions = read.number("max_position_embeddings")
    theta, scaling = _hf_rope(config, positions, where)
    # What an absent key means is the default of the architecture's class in transformers; null means "derive it".
    kv_default = 8 if arch == "mistral" and "num_key_value_heads" not in config else heads
    attention_bias = read.flag("attention_bias") and arch in ("llama", "qwen3")
    eos = read.ids("eos_token_id") + Reader(generation, "generation_config.json").ids("eos_token_id")
    bos = read.ids("bos_token_id") or Reader(generation, "generation_config.json").ids("bos_token_id")
    return checked(
        ModelConfig(
            architecture=arch,
            vocab_size=read.number("vocab_size"),
            hidden_size=hidden,
            intermediate_size=read.number("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=read.number("num_key_value_heads", kv_default),
            head_dim=_hf_head_dim(read, arch, hidden, heads),
            rms_norm_eps=float(read.number("rms_norm_eps", 1e-6, whole=False, least=0)),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=positions,
            tie_word_embeddings=read.flag("tie_word_embeddings"),
            qkv_bias=attention_bias or arch == "qwen2",
            o_bias=attention_bias,
            mlp_bias=read.flag("mlp_bias") and arch == "llama",
            qk_norm=arch == "qwen3",
            sliding_window=_hf_windows(read, arch, layers),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=tuple(dict.fromkeys(eos)),
            dtype=_hf_dtype(config),
        ),
        where,
    )


def _hf_architecture(config: dict, where: str) -> str:
    classes = config.get("architectures") or []
    if not isinstance(classes, list):
        raise CheckpointError(f"{where}: architectures is {classes!r}; it must be a list of class names.")
    named = [str(c).removesuffix("ForCausalLM").lower() for c in classes]
    arch = config.get("model_type") or (named[0] if named else None)
    if arch not in ARCHITECTURES or any(name not in ARCHITECTURES for name in named):
        raise CheckpointError(
            f"{where}: architecture {arch!r} {classes or ''} is not supported. "
            f"Supported: {', '.join(ARCHITECTURES)}, as causal language models."
        )
    return arch


def _hf_head_dim(read: Reader, arch: str, hidden: int, heads: int) -> int:
    """What the file says; null, or absent outside Qwen3 (whose class has 128), means hidden_size / heads."""
    if arch == "qwen3" and "head_dim" not in read.values:
        return 128
    if read.values.get("head_dim") is None and hidden % heads:
        raise CheckpointError(
            f"{read.where}: head_dim is not given and hidden_size {hidden} is no multiple of the {heads} heads."
        )
    return read.number("head_dim", hidden // heads)


def _hf_dtype(config: dict) -> str:
    """transformers 5 writes dtype, 4 torch_dtype, some tools "torch.bfloat16"; "" leaves it to the tensors."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return name if name in DTYPES else ""


def _hf_windows(read: Reader, arch: str, layers: int) -> tuple[int | None, ...]:
    """The attention window of each layer, as transformers decides it.

    Mistral: one window for all layers, 4096 when the key is absent, none when it is null. Qwen: none unless
    use_sliding_window is set; then the layers that layer_types names, or those from max_window_layers on. A Llama of
    transformers has no window whatever its config says.
    """
    kinds = read.values.get("layer_types")
    if kinds is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or any(k not in known for k in kinds):
            raise CheckpointError(f"{read.where}: layer_types is {kinds!r}; it must list {layers} of {known}.")
    absent = 4096 if "sliding_window" not in read.values else None
    if arch == "llama" or (arch != "mistral" and not read.flag("use_sliding_window")):
        return (None,) * layers
    if read.values.get("sliding_window", absent) is None:
        return (None,) * layers
    window = read.number("sliding_window", absent)
    if arch == "mistral":
        if kinds is not None and len(set(kinds)) > 1:
            raise CheckpointError(f"{read.where}: a mistral with mixed layer_types is a ministral: not supported.")
        return (window,) * layers
    if kinds is None:
        first = read.number("max_window_layers", 28, least=0)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _hf_rope(config: dict, positions: int, where: str) -> tuple[float, dict | None]:
    """(theta, scaling). Old files have rope_theta beside rope_scaling, new ones rope_parameters with theta inside."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(v, dict) for v in rope.values()):
        raise CheckpointError(f"{where}: rotary settings {rope!r}: one set for all layers is supported.")
    inner, outer = config.get("rope_parameters") or {}, config.get("rope_theta")
    theta = rope.get("rope_theta") or inner.get("rope_theta") or outer or 10000.0
    read = Reader(rope | {"rope_theta": theta}, f"{where}: rope settings")
    theta = float(read.number("rope_theta", whole=False, least=1))
    for source in (Reader(config, where), read):
        source.only("partial_rotary_factor", (1, 1.0), "rotating only a part of each head is not supported")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    original = Reader(rope | config, where).number("original_max_position_embeddings", positions)  # top level wins
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, {"rope_type": "linear", "factor": float(read.number("factor", whole=False, least=1e-6))}
    if kind == "llama3":
        numbers = {
            key: float(read.number(key, whole=False, least=1e-6))
            for key in ("factor", "low_freq_factor", "high_freq_factor")
        }
        if numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
            raise CheckpointError(f"{where}: rope settings: high_freq_factor must exceed low_freq_factor: {numbers}.")
        return theta, {"rope_type": "llama3", **numbers, "original_max_position_embeddings": original}
    if kind == "yarn":
        return theta, _hf_yarn(read, positions / original, original)
    if kind == "llama3_factors":  # what quantize.py writes for a GGUF file that holds the divisors
        divisors = rope.get("factors")
        if not isinstance(divisors, list) or not divisors:
            raise CheckpointError(f"{where}: rope settings: factors is {divisors!r}; it must list divisors.")
        each = Reader(dict(enumerate(divisors)), f"{where}: rope settings: factors")
        return theta, {
            "rope_type": kind,
            "factors": tuple(each.number(i, whole=False, least=1e-6) for i in each.values),
        }
    raise CheckpointError(f"{where}: rope_type {kind!r} is not supported. Supported: default, linear, llama3, yarn.")


def _hf_yarn(read: Reader, implied: float, original: int) -> dict:
    """YaRN's numbers with every default filled in; an attention_factor in the file is taken as it stands."""
    factor = float(read.number("factor", implied, whole=False, least=1e-6))
    attention = read.values.get("attention_factor")
    if attention is None:
        scales = read.values.get("mscale"), read.values.get("mscale_all_dim")
        above, below = scales if all(scales) else (1.0, 0.0)
        attention = yarn_mscale(factor, above) / yarn_mscale(factor, below)
    else:
        attention = read.number("attention_factor", whole=False, least=0)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": float(attention),
        "beta_fast": float(read.number("beta_fast", 32.0, whole=False, least=1e-6)),
        "beta_slow": float(read.number("beta_slow", 1.0, whole=False, least=1e-6)),
        "truncate": read.flag("truncate", True),
    }


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """The factor on cos and sin that keeps attention sharp over a longer context (YaRN, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def from_gguf(metadata: dict, shapes: dict[str, tuple[int, ...]], where: str) -> ModelConfig:
    """The ModelConfig of a GGUF file. `shapes` maps its tensors' names (blk.0.attn_q.weight) to their shapes.

    GGUF has no flag for biases or a tied head: the tensors themselves tell. The embedding's rows are the vocabulary.
    `dtype` is left "" for the caller, who knows how the tensors are stored. Raises CheckpointError.
    """
    arch = metadata.get("general.architecture")
    if arch not in ("llama", "qwen2", "qwen3"):
        raise CheckpointError(
            f"{where}: architecture {arch!r} is not supported. Supported in GGUF: llama (and mistral), qwen2, qwen3."
        )
    if metadata.get("split.count", 1) != 1:
        raise CheckpointError(
            f"{where} is one of {metadata['split.count']} parts: join them (llama-gguf-split --merge)."
        )
    if "token_embd.weight" not in shapes:
        raise CheckpointError(f"{where}: tensor 'token_embd.weight' is missing: not a complete language model.")
    prefix = arch + "."
    read = Reader({k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}, f"{where}: {arch}")
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        value = read.values.get(key)  # one number, or one for each layer
        if isinstance(value, list) and len(set(value)) == 1:
            read.values[key] = value[0]
    read.only("expert_count", (0,), "mixtures of experts are not supported")
    layers, hidden = read.number("block_count", most=MOST_LAYERS), read.number("embedding_length")
    heads = read.number("attention.head_count")
    head_dim = read.number("attention.key_length", hidden // heads)
    read.only("attention.value_length", (head_dim,), f"only values as long as the keys ({head_dim}) are supported")
    read.only("rope.dimension_count", (head_dim,), f"rotating only a part of each head ({head_dim}) is not supported")
    theta, scaling = _gguf_rope(read)
    tokens = Reader(metadata, where)
    eos = [i for kind in ("eos", "eot", "eom") for i in tokens.ids(f"tokenizer.ggml.{kind}_token_id")]
    bos = tokens.ids("tokenizer.ggml.bos_token_id")
    return checked(
        ModelConfig(
            architecture=arch,
            vocab_size=shapes["token_embd.weight"][0],
            hidden_size=hidden,
            intermediate_size=read.number("feed_forward_length"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=read.number("attention.head_count_kv", heads),
            head_dim=head_dim,
            rms_norm_eps=float(read.number("attention.layer_norm_rms_epsilon", whole=False, least=0)),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=read.number("context_length"),
            tie_word_embeddings="output.weight" not in shapes,
            qkv_bias=arch == "qwen2" or "blk.0.attn_q.bias" in shapes,
            o_bias="blk.0.attn_output.bias" in shapes,
            mlp_bias="blk.0.ffn_down.bias" in shapes,
            qk_norm=arch == "qwen3",
            sliding_window=_gguf_windows(read, layers),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=tuple(dict.fromkeys(eos)),
            dtype="",
        ),
        where,
    )


def _gguf_rope(read: Reader) -> tuple[float, dict | None]:
    """(theta, scaling); llama.cpp takes a factor without a type for linear, and a factor of 0 for none."""
    theta = float(read.number("rope.freq_base", 10000.0, whole=False, least=1))
    factor = float(read.number("rope.scaling.factor", read.values.get("rope.scale_linear", 0.0), whole=False, least=0))
    kind = read.values.get("rope.scaling.type", "linear")
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return theta, None
    if kind == "linear":
        return theta, {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise CheckpointError(
            f"{read.where}.rope.scaling.type {kind!r} is not supported. Supported: none, linear, yarn."
        )
    read.only("rope.scaling.yarn_ext_factor", (1.0, -1.0), "only full YaRN (1.0) is supported")
    read.only("rope.scaling.yarn_log_multiplier", (0.0,), "only YaRN's own attention factor is supported")
    names = {"factor": "factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    settings = Reader({k: read.values.get("rope.scaling." + name) for k, name in names.items()}, read.where)
    settings.number("factor", whole=False, least=1e-6)  # not implied by the context lengths, as in transformers
    original = read.number("rope.scaling.original_context_length", read.number("context_length"))
    scaling = _hf_yarn(settings, 1.0, original)
    # llama.cpp multiplies these onto YaRN's own factor, where transformers' attention_factor replaces it.
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        scaling["attention_factor"] *= read.number(key, 1.0, whole=False, least=0)
    return theta, scaling


def _gguf_windows(read: Reader, layers: int) -> tuple[int | None, ...]:
    """attention.sliding_window (0: none) in every layer, or in those that sliding_window_pattern marks."""
    window = read.number("attention.sliding_window", 0, least=0) or None
    pattern = read.values.get("attention.sliding_window_pattern", [True] * layers)
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise CheckpointError(f"{read.where}.attention.sliding_window_pattern must list {layers} layers: {pattern!r}.")
    return tuple(window if windowed else None for windowed in pattern)


def checked(config: ModelConfig, where: str) -> ModelConfig:
    """What must hold between the numbers, whichever container they came from."""
    c = config
    if c.num_heads % c.num_kv_heads:
        raise CheckpointError(f"{where}: {c.num_heads} attention heads cannot share {c.num_kv_heads} key-value heads.")
    if c.head_dim % 2:
        raise CheckpointError(f"{where}: head_dim is {c.head_dim}; rotary embeddings need an even one.")
    divisors = (c.rope_scaling or {}).get("factors")
    if divisors is not None and len(divisors) != c.head_dim // 2:
        raise CheckpointError(f"{where}: {len(divisors)} rope factors for a head_dim of {c.head_dim}, not half of it.")
    return config
