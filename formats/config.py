"""What a checkpoint says about itself, in one form: the architecture, its sizes, and its rotary scaling.

The problem: the same Llama is described in the `config.json` of transformers 4 (`rope_theta`, `rope_scaling`), in that
of transformers 5 (`rope_parameters`), and in the metadata of a GGUF file (`llama.rope.freq_base`). A key that is read
under its old name only does not crash: the model talks fluent nonsense. So everything is read once, strictly, into a
`ModelConfig`, and what this engine does not compute is refused by name. What each family says: formats/families.py.

`ModelConfig.rope_scaling` changes the base frequencies f_i = rope_theta^(-2i/rotary_dim); None: not scaled.

    {"rope_type": "linear", "factor"}             f_i / factor (Chen et al. 2023, position interpolation)
    {"rope_type": "llama3", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
                                                  long wavelengths divided by factor, short ones kept, a ramp between
    {"rope_type": "llama3_factors", "factors"}    the same, as GGUF stores it: f_i / factors[i], rotary_dim/2 numbers
    {"rope_type": "yarn", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate",
     "attention_factor"}                          Peng et al. 2023; cos and sin are multiplied by attention_factor

Left out: dynamic NTK, LongRoPE, multimodal rotary embeddings: refused by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DTYPES = ("float32", "float16", "bfloat16")
MOST = 2**53  # larger numbers are no sizes, and some are none of Python's floats


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded: the message names the file, the cause, and what to do."""


@dataclass(frozen=True)
class ModelConfig:
    """Everything the model needs to know about a checkpoint; the same whichever container it came in."""

    architecture: str  # one of families.ARCHITECTURES
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
    rotary_dim: int  # the first components of a head, which rotate: head_dim, a part of it, or 0
    max_position_embeddings: int
    tie_word_embeddings: bool  # True: the head is the embedding, and the checkpoint has no lm_head.weight
    sliding_window: tuple[int | None, ...]  # per layer; a query sees itself and window - 1 tokens before; None: all
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # union of config.json and generation_config.json
    dtype: str  # the checkpoint's own, one of DTYPES; "float32" for quantised GGUF
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # each head of q and k is normalised
    norm_bias: bool = False  # norms subtract the mean and add a bias (LayerNorm)
    learned_positions: bool = False  # a vector for each position is added to the embedding
    unrotated: tuple[int, ...] = ()  # layers that do not rotate at all
    rope_local_theta: float | None = None  # layers with a window rotate at this base, unscaled; None: as all others
    attn_scale: float | None = None  # on query times key; None: head_dim ** -0.5
    attn_softcap: float = 0.0  # a score s becomes softcap * tanh(s / softcap); 0: it stays
    logit_softcap: float = 0.0  # the same of the logits
    norm_offset: float = 0.0  # what is added to the weights of all norms
    embed_scale: float = 1.0  # on the embeddings,
    residual_scale: float = 1.0  # on what attention and MLP add,
    logit_scale: float = 1.0  # and on the logits

    def rope(self, layer: int) -> tuple[int, float, dict | None]:
        """(components that rotate, theta, scaling) of a layer."""
        width = 0 if layer in self.unrotated else self.rotary_dim
        if self.rope_local_theta is not None and self.sliding_window[layer] is not None:
            return width, self.rope_local_theta, None
        return width, self.rope_theta, self.rope_scaling


class Reader:
    """Typed access to a dictionary of settings; every complaint names the file, the key and the value."""

    def __init__(self, values: dict, where: str, keys: dict[str, str] | None = None):
        self.values, self.where = values, where
        self.keys = keys or {}  # what the file calls a setting, if not as transformers does

    def get(self, key: str):
        return self.values.get(self.keys.get(key, key))

    def number(self, key: str, default=None, whole: bool = True, least: float = 1, most: float = MOST):
        """A number from `least` to `most`; a key that is absent or null gives `default`, or is refused without one."""
        value = self.get(key)
        value = default if value is None else value
        kinds, wanted = ((int,), "an integer") if whole else ((int, float), "a number")
        if type(value) not in kinds or not least <= value <= most:
            state = "is missing" if value is None else f"is {repr(value)[:60]}"
            limit = f" and at most {most:,}" if most < MOST or type(value) in kinds and value > most else ""
            key = self.keys.get(key, key)
            raise CheckpointError(f"{self.where}: {key} {state}; it must be {wanted} of at least {least:g}{limit}.")
        return value

    def real(self, key: str, default: float | None = None, least: float = 1e-6) -> float:
        return float(self.number(key, default, whole=False, least=least))

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {key} is {value!r}; it must be true or false.")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids given as one number, a list, or not at all; -1 is an old way to say "none"."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(i) is not int for i in ids):
            raise CheckpointError(f"{self.where}: {key} is {value!r}; it must be a token id or a list of them.")
        return tuple(i for i in ids if i >= 0)

    def settings(self, key: str) -> dict:
        value = self.values.get(key)
        if not isinstance(value, dict | None):
            raise CheckpointError(f"{self.where}: {key} is {value!r}; it must hold settings by name.")
        return value or {}

    def only(self, key: str, allowed: tuple, why: str) -> None:
        """Refuse a setting that asks for something this engine does not compute."""
        value = self.values.get(key)
        if value is not None and value not in allowed:
            raise CheckpointError(f"{self.where}: {key} is {value!r}: {why}.")


def hf_rope(read: Reader) -> dict:
    """rope_theta, rope_scaling and rotary_dim. Old files keep them side by side, new ones in rope_parameters."""
    parameters = read.settings("rope_parameters")
    rope = read.settings("rope_scaling") or parameters
    if any(isinstance(v, dict) for v in rope.values()):
        raise CheckpointError(f"{read.where}: rotary settings {rope!r}: one set for all layers is supported.")
    thetas = [values.get("rope_theta") for values in (rope, parameters, read.values)]
    given = [Reader({"rope_theta": t}, read.where).real("rope_theta", least=1) for t in thetas if t is not None]
    theta = [*given, 10000.0][0]
    inner = Reader(rope | {"rope_theta": theta}, f"{read.where}: rope settings")
    share = inner.real("partial_rotary_factor", read.real("partial_rotary_factor", 1.0, least=0), least=0)
    head_dim = read.number("head_dim", read.number("hidden_size") // read.number("num_attention_heads"))
    positions = read.number("max_position_embeddings")
    outer = Reader(rope | read.values, read.where)  # top level wins
    original = outer.number("original_max_position_embeddings", positions)
    kind = next((rope[key] for key in ("rope_type", "type") if rope.get(key) is not None), "default")
    if kind == "default" and rope.get("factor") not in (None, 1):
        raise CheckpointError(f"{read.where}: rotary settings {rope!r:.200} have a factor and no rope_type.")
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise CheckpointError(
            f"{read.where}: rope_type {kind!r} is not supported. Supported: default, linear, llama3, yarn."
        )
    scaling = SCALINGS[kind](inner, original, positions)
    return {"rope_theta": theta, "rope_scaling": scaling, "rotary_dim": int(head_dim * share)}


def _llama3(read: Reader, original: int, positions: int) -> dict:
    numbers = {key: read.real(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
    if numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        raise CheckpointError(f"{read.where}: high_freq_factor must exceed low_freq_factor: {numbers}.")
    return {"rope_type": "llama3", **numbers, "original_max_position_embeddings": original}


def _factors(read: Reader, original: int, positions: int) -> dict:
    """What a quantised folder says of a GGUF file that holds the divisors."""
    divisors = read.values.get("factors")
    if not isinstance(divisors, list) or not divisors:
        raise CheckpointError(f"{read.where}: factors is {divisors!r}; it must list divisors.")
    each = Reader(dict(enumerate(divisors)), f"{read.where}: factors")
    return {"rope_type": "llama3_factors", "factors": tuple(each.real(i) for i in each.values)}


def _yarn(read: Reader, original: int, positions: int) -> dict:
    """YaRN's numbers with every default filled in; an attention_factor in the file is taken as it stands."""
    factor = read.real("factor", positions / original)
    above, below = (read.real(key, 0.0, least=0) for key in ("mscale", "mscale_all_dim"))
    if not above or not below:
        above, below = 1.0, 0.0
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": read.real("attention_factor", _mscale(factor, above) / _mscale(factor, below), least=0),
        "beta_fast": read.real("beta_fast", 32.0),
        "beta_slow": read.real("beta_slow", 1.0),
        "truncate": read.flag("truncate", True),
    }


def _mscale(factor: float, weight: float) -> float:
    """The factor on cos and sin that keeps attention sharp over a longer context (YaRN, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


SCALINGS = {
    "default": lambda read, original, positions: None,
    "linear": lambda read, original, positions: {"rope_type": "linear", "factor": read.real("factor")},
    "llama3": _llama3,
    "llama3_factors": _factors,
    "yarn": _yarn,
}


def gguf_rope(read: Reader) -> dict:
    """rope_theta and rope_scaling; llama.cpp takes a factor without a type for linear, and a factor of 0 for none."""
    theta = read.real("rope.freq_base", 10000.0, least=1)
    factor = read.real("rope.scaling.factor", read.values.get("rope.scale_linear", 0.0), least=0)
    kind = read.values.get("rope.scaling.type", "linear")
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return {"rope_theta": theta, "rope_scaling": None}
    if kind == "linear":
        return {"rope_theta": theta, "rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind != "yarn":
        raise CheckpointError(
            f"{read.where}.rope.scaling.type {kind!r} is not supported. Supported: none, linear, yarn."
        )
    read.only("rope.scaling.yarn_ext_factor", (1.0, -1.0), "only full YaRN (1.0) is supported")
    read.only("rope.scaling.yarn_log_multiplier", (0.0,), "only YaRN's own attention factor is supported")
    read.real("rope.scaling.factor")  # not implied by the context lengths, as in transformers
    keys = {"factor": "factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    settings = Reader({ours: read.values.get("rope.scaling." + key) for ours, key in keys.items()}, read.where)
    positions = read.number("max_position_embeddings")
    scaling = _yarn(settings, read.number("rope.scaling.original_context_length", positions), positions)
    # llama.cpp multiplies these onto YaRN's own factor, where transformers' attention_factor replaces it.
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        scaling["attention_factor"] *= read.real(key, 1.0, least=0)
    return {"rope_theta": theta, "rope_scaling": scaling}
