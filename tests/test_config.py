"""What config files and GGUF metadata say, against what transformers makes of the same files."""

import dataclasses
import json

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint import CheckpointError, open_checkpoint
from formats import config, read_config

BASE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def parsed(generation=None, drop=(), **changes) -> config.ModelConfig:
    settings = {k: v for k, v in (BASE | changes).items() if k not in drop}
    if "model_type" in changes:
        settings.pop("architectures", None)
    return read_config.from_hf(settings, generation or {}, "config.json")


def oracle(**changes):
    import transformers

    settings = BASE | changes
    settings.pop("architectures")
    return transformers.AutoConfig.for_model(**settings)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
MIXED = ["sliding_attention", "full_attention"] * 2
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.0}


@pytest.mark.parametrize("type_key", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["old", "new"])
def test_rope_settings_under_old_and_new_keys(type_key, place):
    def read(kind, **numbers):
        rope = {type_key: kind, **numbers}
        if place == "old":
            return parsed(rope_theta=5e5, rope_scaling=rope)
        return parsed(rope_parameters=rope | {"rope_theta": 5e5})

    assert read("default").rope_scaling is None
    assert read("linear", factor=2).rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert read("llama3", **LLAMA3).rope_scaling == {"rope_type": "llama3", **LLAMA3}
    assert read("yarn", factor=4.0).rope_scaling["original_max_position_embeddings"] == 512
    assert read("yarn", original_max_position_embeddings=128).rope_scaling["factor"] == 4.0
    yarn = read("yarn", **YARN)
    assert yarn.rope_theta == 5e5
    filled = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
    assert yarn.rope_scaling == YARN | filled  # attention_factor verbatim: YaRN's own rule would give 1.14


def test_no_scaling_is_asked_for_and_none_applied():
    assert parsed(rope_theta=5e5, rope_scaling=None) == parsed(
        rope_parameters={"rope_theta": 5e5, "rope_type": "default"}
    )
    assert parsed().rope_theta == 10000.0 and parsed().rope_scaling is None
    assert parsed(original_max_position_embeddings=32).rope_scaling is None


@given(
    factor=st.floats(1, 64),
    given=st.fixed_dictionaries(
        {},
        optional={key: st.floats(0.1, 2) for key in ("attention_factor", "mscale", "mscale_all_dim")}
        | {"beta_fast": st.floats(8, 64), "beta_slow": st.floats(0.5, 4), "truncate": st.booleans()},
    ),
)
def test_yarn_attention_factor_is_that_of_transformers(factor, given):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 32, **given}
    frequencies, attention = ROPE_INIT_FUNCTIONS["yarn"](oracle(rope_parameters=rope | {"rope_theta": 1e4}), "cpu")
    ours = parsed(rope_parameters=rope).rope_scaling
    assert ours["attention_factor"] == pytest.approx(attention, rel=1e-12)
    assert all(ours[key] == value for key, value in given.items() if "mscale" not in key)


@pytest.mark.parametrize(
    "rope, words",
    [
        ({"type": "dynamic", "factor": 2.0}, "'dynamic' is not supported. Supported: default, linear, llama3, yarn"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "longrope"),
        ({"rope_type": [], "factor": 2.0}, "rope_type [] is not supported"),
        ({"type": "linear"}, "factor is missing"),
        ({"type": "linear", "factor": "2"}, "factor is '2'"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 1}, "must exceed"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "8 of 16 components"),
        ({"full_attention": {"rope_type": "default"}}, "one set for all layers"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"type": "yarn", "factor": 2.0, "beta_fast": 0}, "beta_fast is 0"),
        ({"type": "yarn", "factor": 2.0, "mscale": "1", "mscale_all_dim": 1}, "mscale is '1'"),
        (0, "rope_scaling is 0"),
    ],
)
def test_rope_settings_that_are_not_computed_are_refused(rope, words):
    with pytest.raises(CheckpointError, match="config.json") as caught:
        parsed(rope_scaling=rope)
    assert words in str(caught.value)


def test_rope_factors_as_quantize_py_writes_them():
    def read(factors):
        return parsed(rope_parameters={"rope_type": "llama3_factors", "factors": factors}).rope_scaling

    assert read([1, 1.5] * 4) == {"rope_type": "llama3_factors", "factors": (1, 1.5) * 4}
    for bad in ([], [1.0] * 7, [1.0] * 7 + [0], [1.0] * 7 + ["1"], None, 2.0):
        with pytest.raises(CheckpointError, match="factors"):
            read(bad)


@pytest.mark.parametrize("scaling", ["none", "linear", "yarn", "llama3"])
def test_gguf_carries_the_same_scaling(tmp_path, scaling):
    numbers = {"none": {}, "linear": {"factor": 2.0}, "yarn": YARN, "llama3": LLAMA3}[scaling]
    numbers = {k: v for k, v in numbers.items() if k != "attention_factor"}  # GGUF's is a multiplier, 1 here
    rope = {"rope_type": "default" if scaling == "none" else scaling, "rope_theta": 5e5, **numbers}
    folder = tiny.hf_folder(tmp_path / "hf", "llama", rope_parameters=rope, tokenizer=False)
    ours, theirs = (open_checkpoint(p).config for p in (folder, tiny.gguf_file(folder, tmp_path / "m.gguf")))
    assert ours.rope_theta == theirs.rope_theta == 5e5
    if scaling != "llama3":
        assert ours.rope_scaling == theirs.rope_scaling
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](oracle(rope_parameters=rope), "cpu")
    plain = 5e5 ** (-torch.arange(0, 16, 2) / 16)
    assert theirs.rope_scaling["rope_type"] == "llama3_factors"
    torch.testing.assert_close(plain / torch.tensor(theirs.rope_scaling["factors"]), scaled)


def test_head_dim_is_its_own_number():
    assert parsed(hidden_size=48, head_dim=16).head_dim == 16
    assert parsed(hidden_size=48, head_dim=None).head_dim == 12
    assert parsed(hidden_size=48).head_dim == 12
    assert parsed(model_type="qwen3").head_dim == oracle(model_type="qwen3").head_dim == 128
    assert parsed(hidden_size=50, head_dim=16).head_dim == 16
    for changes in ({"hidden_size": 50}, {"hidden_size": 12}, {"head_dim": 15}, {"head_dim": 0}):
        with pytest.raises(CheckpointError, match="head_dim"):
            parsed(**changes)


def test_biases_are_where_the_architecture_has_them():
    llama = parsed(attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
    qwen2 = parsed(model_type="qwen2")
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, False)
    qwen3 = parsed(model_type="qwen3", attention_bias=True)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.mlp_bias, qwen3.qk_norm) == (True, True, False, True)
    assert not parsed().qkv_bias and not parsed(model_type="mistral").qkv_bias


@pytest.mark.parametrize("arch", tiny.ARCHITECTURES)
@pytest.mark.parametrize("bias", [False, True])
def test_expected_tensors_are_those_of_transformers(arch, bias):
    import transformers

    kind = {"gemma3": "gemma3_text"}.get(arch, arch)
    biases = dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "use_qkv_bias"), bias)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    settings = oracle(model_type=kind, tie_word_embeddings=bias, **biases, **ids)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(settings)
    config = read_config.from_hf(json.loads(settings.to_json_string(use_diff=False)) | {"architectures": None}, {}, "")
    want = {
        read_config.llama_name(config, name): tuple(p.shape) for name, p in model.named_parameters()
    }  # a tied head once
    if arch == "gpt2":
        want = {name: shape[::-1] if name.endswith("_proj.weight") else shape for name, shape in want.items()}
    assert read_config.tensor_shapes(config) == want


def test_eos_is_the_union_of_both_files():
    assert parsed({"eos_token_id": [5, 7]}, eos_token_id=5).eos_token_ids == (5, 7)
    assert parsed({"eos_token_id": 7}, eos_token_id=[5, 6]).eos_token_ids == (5, 6, 7)
    assert parsed({"eos_token_id": None}, eos_token_id=5).eos_token_ids == (5,)
    assert parsed({"eos_token_id": [0]}).eos_token_ids == (0,)
    assert parsed(eos_token_id=-1).eos_token_ids == () and parsed().eos_token_ids == ()
    assert (
        parsed({"bos_token_id": 3}).bos_token_id == 3 and parsed({"bos_token_id": 3}, bos_token_id=0).bos_token_id == 0
    )
    for bad in ("5", 5.0, [5, "7"], True, {"a": 1}):
        with pytest.raises(CheckpointError, match="eos_token_id"):
            parsed({"eos_token_id": bad})


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral"},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": 4},
        {"model_type": "qwen2", "sliding_window": 4, "use_sliding_window": False},
        {"model_type": "qwen2", "sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1},
        {"model_type": "qwen2", "sliding_window": 4, "use_sliding_window": True},
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0},
        {"model_type": "qwen3", "sliding_window": None, "use_sliding_window": True, "max_window_layers": 0},
        {"model_type": "qwen3", "sliding_window": 4, "use_sliding_window": True, "layer_types": MIXED},
        {"model_type": "llama"},
    ],
)
def test_sliding_windows_are_those_of_transformers(changes):
    theirs = oracle(**changes)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 4  # Mistral: one mask for all layers
    window = getattr(theirs, "sliding_window", None)
    assert parsed(**changes).sliding_window == tuple(window if k == "sliding_attention" else None for k in kinds)


def test_numbers_absent_or_null_mean_what_transformers_makes_of_them():
    assert parsed(num_key_value_heads=None).num_kv_heads == 4
    assert parsed(drop=["num_key_value_heads"]).num_kv_heads == 4
    assert parsed(model_type="mistral", drop=["num_key_value_heads"], num_attention_heads=16).num_kv_heads == 8
    assert parsed(drop=["rms_norm_eps"]).rms_norm_eps == 1e-6
    assert not parsed().tie_word_embeddings and parsed(tie_word_embeddings=True).tie_word_embeddings
    assert parsed(drop=["model_type"]).architecture == "llama"
    assert parsed(dtype="bfloat16").dtype == parsed(torch_dtype="torch.bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model_type": "mamba"}, "'mamba'"),
        ({"model_type": "mixtral"}, "Supported: llama, mistral, qwen2, qwen3"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": 1}, "architectures is 1"),
        ({"architectures": "LlamaForCausalLM"}, "must be a list"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"num_key_value_heads": 3}, "cannot share 3"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"model_type": "gemma3"}, "'gemma3'"),
        ({"model_type": "gemma3_text", "hidden_act": "silu"}, "hidden_act is 'silu'"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"model_type": "gemma3_text", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ({"model_type": "gemma3_text", "rope_local_base_freq": 0}, "rope_theta is 0"),
        ({"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "'yarn'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "mistral", "layer_types": MIXED}, "ministral"),
    ],
)
def test_configs_that_are_not_supported_are_refused_by_name(changes, words):
    with pytest.raises(CheckpointError, match="config.json") as caught:
        parsed(**changes)
    assert words in str(caught.value)


GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": [96, 96],
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": [2, 2],
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 512,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def from_gguf(*tensors: str, **changes) -> config.ModelConfig:
    metadata = GGUF | {k.replace("__", "."): v for k, v in changes.items()}
    shapes = {"token_embd.weight": (320, 64)} | dict.fromkeys(tensors, (1,))
    return read_config.from_gguf({k: v for k, v in metadata.items() if v is not None}, shapes, "m.gguf")


def test_gguf_metadata():
    c = from_gguf()
    assert (c.head_dim, c.num_kv_heads, c.vocab_size, c.tie_word_embeddings) == (16, 2, 320, True)
    assert from_gguf(llama__attention__head_count_kv=None).num_kv_heads == 4
    assert from_gguf(llama__attention__key_length=32).head_dim == 32
    assert not from_gguf("output.weight").tie_word_embeddings
    biased = from_gguf("blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_down.bias")
    assert biased.qkv_bias and biased.o_bias and biased.mlp_bias and not c.qkv_bias
    assert from_gguf(llama__attention__sliding_window=8).sliding_window == (8, 8)
    assert from_gguf(llama__attention__sliding_window=0).sliding_window == (None, None)
    pattern = {"llama__attention__sliding_window": 8, "llama__attention__sliding_window_pattern": [True, False]}
    assert from_gguf(**pattern).sliding_window == (8, None)
    assert from_gguf(tokenizer__ggml__eot_token_id=7, tokenizer__ggml__eom_token_id=2).eos_token_ids == (2, 7)


def test_gguf_metadata_of_gemma3():
    metadata = {key.replace("llama.", "gemma3."): value for key, value in GGUF.items()}
    metadata |= {"general.architecture": "gemma3", "gemma3.attention.sliding_window": 8, "gemma3.block_count": 7}
    shapes = {"token_embd.weight": (320, 64)}
    c = read_config.from_gguf(metadata, shapes, "m.gguf")
    assert c.sliding_window == (8,) * 5 + (None, 8) and c.attn_scale == c.head_dim**-0.5  # every sixth layer sees all
    assert (c.rope(0), c.rope(5)) == ((16, 10000.0, None), (16, 10000.0, None))
    more = {"gemma3.rope.freq_base": 1e6, "gemma3.rope.scaling.factor": 8.0, "gemma3.block_count": 62}
    c = read_config.from_gguf(metadata | more, shapes, "m.gguf")
    assert (c.rope(0), c.rope(5)) == ((16, 10000.0, None), (16, 1e6, {"rope_type": "linear", "factor": 8.0}))
    assert c.attn_scale == (64 / 4) ** -0.5  # only the 27B model has 62 layers
    with pytest.raises(CheckpointError, match="softcapping"):
        read_config.from_gguf(metadata | {"gemma3.attn_logit_softcapping": 50.0}, shapes, "m.gguf")


def test_gguf_rope_scaling():
    assert from_gguf(llama__rope__scaling__factor=2.0).rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert from_gguf(llama__rope__scale_linear=2.0).rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert from_gguf(llama__rope__scaling__type="none", llama__rope__scaling__factor=2.0).rope_scaling is None
    yarn = {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0}
    plain = from_gguf(**yarn).rope_scaling
    assert plain["attention_factor"] == pytest.approx(1.1386, abs=1e-4)
    assert plain["original_max_position_embeddings"] == 512
    assert from_gguf(**yarn, llama__rope__scaling__attn_factor=0.5).rope_scaling["attention_factor"] == pytest.approx(
        plain["attention_factor"] / 2
    )


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"general__architecture": "mamba"}, "'mamba'"),
        ({"general__architecture": None}, "None"),
        ({"llama__block_count": None}, "block_count is missing"),
        ({"llama__expert_count": 8}, "expert_count"),
        ({"llama__attention__head_count": [4, 2]}, "head_count is [4, 2]"),
        ({"llama__attention__value_length": 8}, "value_length"),
        ({"llama__rope__dimension_count": 8}, "8 of 16 components"),
        ({"llama__rope__scaling__type": "longrope"}, "longrope"),
        ({"llama__rope__scaling__type": "yarn"}, "factor"),
        ({"split__count": 3}, "one of 3 parts"),
        ({"tokenizer__ggml__eos_token_id": "x"}, "eos_token_id"),
    ],
)
def test_gguf_metadata_that_is_not_supported_is_refused_by_name(changes, words):
    with pytest.raises(CheckpointError, match="m.gguf") as caught:
        from_gguf(**changes)
    assert words in str(caught.value)


def test_every_field_of_the_config_is_filled_from_both_containers(tmp_path):
    folder = tiny.hf_folder(tmp_path / "hf", "mistral", sliding_window=8, tie_word_embeddings=True)
    ours, theirs = (open_checkpoint(p).config for p in (folder, tiny.gguf_file(folder, tmp_path / "m.gguf")))
    assert theirs.architecture == "llama" and ours.architecture == "mistral"
    same = dataclasses.replace(theirs, architecture="mistral", rms_norm_eps=ours.rms_norm_eps)
    assert same == ours and theirs.rms_norm_eps == pytest.approx(ours.rms_norm_eps)
