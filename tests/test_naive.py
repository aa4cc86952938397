"""naive.py against transformers: the reference of everything else must itself be right."""

import pytest
import tiny
import torch

import naive
from checkpoint import open_checkpoint

SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32},
    "yarn-factor-1": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.0,
    },
}
VARIANTS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-head_dim": ("llama", {"hidden_size": 48, "head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": 4}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"tie_word_embeddings": True}),
    "phi3": ("phi3", {}),
    "phi3-partial": ("phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "olmo2": ("olmo2", {}),
    "olmo2-mha-tied": ("olmo2", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "granite": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {}),
    "smollm3-marked": ("smollm3", {"no_rope_layers": [0, 1, 1, 0]}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "starcoder2": ("starcoder2", {"sliding_window": 7}),
    "starcoder2-plain": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "gpt2": ("gpt2", {"tie_word_embeddings": True}),
    "gpt2-inner": ("gpt2", {"n_inner": 80}),
    "gemma3": ("gemma3", {"tie_word_embeddings": True, "num_hidden_layers": 4}),
    "gemma3-scaled": (
        "gemma3",
        {
            "query_pre_attn_scalar": 24,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
} | {
    f"llama-{name}": ("llama", {"rope_parameters": {"rope_theta": 10000.0, **scaling}})
    for name, scaling in SCALINGS.items()
}


def oracle_logits(folder, tokens: list[int]) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request, tmp_path_factory):
    """(name, folder, tokens, the logits of transformers): shared by the tests of naive.py and model.py."""
    arch, overrides = VARIANTS[request.param]
    folder = tiny.hf_folder(tmp_path_factory.mktemp("m") / request.param, arch, **overrides)
    tokens = torch.randint(3, 320, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    return request.param, folder, tokens, oracle_logits(folder, tokens)


def weights_of(ckpt) -> dict[str, torch.Tensor]:
    return {name: ckpt.tensor(name).float() for name in ckpt.names()}


def test_logits_equal_transformers(variant):
    """The reference; test_model.py holds the model of the engine against the same logits."""
    _, folder, tokens, expected = variant
    ckpt = open_checkpoint(folder)
    torch.testing.assert_close(naive.forward(weights_of(ckpt), ckpt.config, tokens), expected, atol=1e-4, rtol=1e-4)


def test_generate_is_the_loop_over_forward(tmp_path):
    ckpt = open_checkpoint(tiny.hf_folder(tmp_path / "m", "llama"))
    weights, prompt = weights_of(ckpt), [5, 6, 7]
    out = naive.generate(weights, ckpt.config, prompt, 5)
    for i, token in enumerate(out):
        assert token == int(naive.forward(weights, ckpt.config, prompt + out[:i])[-1].argmax())
    assert naive.generate(weights, ckpt.config, prompt, 5, stop_ids=(out[2],)) == out[:3]
