"""Tiny random checkpoints, made on the spot by well-known libraries, for tests that need a model but not a good one.

`hf_folder` has transformers build and save a model (hidden size 64, two layers, 320 tokens), so the folder's names,
shapes and config keys are those of real checkpoints. `gguf_file` writes the same weights with the PyPI package `gguf`
the way llama.cpp stores them, with the rows of q and k of Llama-like models reordered. Weights are drawn wide (standard
deviation 0.3) so that logits are spread, an argmax is seldom a near-tie, and norms and biases are away from one and
zero, where forgetting them would go unnoticed.

    folder = tiny.hf_folder(tmp_path / "m", "llama", num_key_value_heads=1)  # any config field as an override
    file = tiny.gguf_file(folder, tmp_path / "m.gguf", quant="Q4_0")
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

CLASSES = {  # transformers' names of the config and the model, if not the architecture's own
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM"),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
}
SETTINGS = {  # what makes a small one differ as real ones do
    "qwen3": {"head_dim": 32},  # not hidden_size / heads
    "gemma2": {"head_dim": 32, "sliding_window": 5, "query_pre_attn_scalar": 32}
    | {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0},
    "gemma3": {"head_dim": 32, "sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32},
    "phi3": {"sliding_window": 9},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
    | {"attention_multiplier": 0.2},
    "smollm3": {"num_hidden_layers": 4},
    "stablelm": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25}},
}
ARCHITECTURES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "granite", "smollm3", "stablelm"),
    *("starcoder2", "gpt2"),
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1 (BOS) and 2 (EOS)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = (
    "the cat sat on the mat and the dog sat on the log",
    "once upon a time there was a little engine that could serve them all",
    "def add(a, b):\n    return a + b\n",
    "hello world, this is a test of the tokenizer. It is small.",
)


GPT2_KEYS = {
    "n_embd": "hidden_size", "n_inner": "intermediate_size", "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads", "n_positions": "max_position_embeddings", "layer_norm_epsilon": "norm_epsilon",
    "layer_norm_eps": "norm_epsilon",
}  # fmt: skip


def hf_folder(
    path: str | Path, arch: str, seed: int = 0, tokenizer=True, dtype="float32", max_shard_size="5GB", **overrides
) -> Path:
    """Save a random checkpoint of `arch` (one of ARCHITECTURES) at `path`; `overrides` are fields of its config."""
    import transformers

    shape = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
    }  # fmt: skip
    name = arch.capitalize()
    if arch == "gpt2":
        del shape["num_key_value_heads"]
    of_config, of_model = CLASSES.get(arch, (f"{name}Config", f"{name}ForCausalLM"))
    config = getattr(transformers, of_config)(**(shape | SETTINGS.get(arch, {}) | overrides))
    model = getattr(transformers, of_model)(config).float().eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):  # a tied head is listed once
            is_norm = "norm" in name or ".ln_" in name
            noise = torch.randn(parameter.shape, generator=draw) * (0.1 if is_norm else 0.3)
            noise = noise + 1 if is_norm and name.endswith("weight") else noise
            parameter.copy_(noise - 1 if is_norm and arch.startswith("gemma") else noise)  # Gemma computes with 1 + w
    path = Path(path)
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=max_shard_size)
    if tokenizer:
        save_tokenizer(path, min(320, config.vocab_size))
    return path


def save_tokenizer(path: str | Path, vocab_size: int = 320) -> None:
    """A byte-level BPE with the ChatML control tokens as ids 0, 1, 2: the two tokenizer files of folder `path`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options = {"special_tokens": list(SPECIALS), "initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, **options)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    path = Path(path)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[1],
        "eos_token": SPECIALS[2],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from halves (0..d/2 | d/2..d) to pairs (0, d/2, 1, d/2+1, ...), as llama.cpp rotates them."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def gguf_file(hf_path: str | Path, out: str | Path, quant: str = "F32") -> Path:
    """The checkpoint in `hf_path` as GGUF at `out`.

    `quant` (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0) applies to the matrices; norms and biases stay F32.
    """
    import gguf
    from safetensors import safe_open

    hf_path, out = Path(hf_path), Path(out)
    config = json.loads((hf_path / "config.json").read_text(encoding="utf-8"))
    arch = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config["model_type"], config["model_type"])
    config = {GPT2_KEYS.get(key, key): value for key, value in config.items()}
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    kinds = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], config["num_hidden_layers"])
    writer = gguf.GGUFWriter(str(out), arch)
    write_metadata(writer, gguf, config)
    if (hf_path / "tokenizer.json").exists():
        write_tokenizer(writer, hf_path, config["vocab_size"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for shard in sorted(hf_path.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                value = tensors.get_tensor(name).float()
                part = name.split(".")[-2]
                if arch in ("llama", "granite", "smollm3") and part in heads:
                    value = permute(value, heads[part])
                if arch.startswith("gemma") and "norm" in name:
                    value = value + 1
                if arch == "gpt2" and part in ("c_attn", "c_proj", "c_fc"):
                    value = value.t().contiguous() if value.ndim == 2 else value
                kind = gguf.GGMLQuantizationType[quant if value.ndim == 2 else "F32"]
                written = (
                    names.get_name(name, try_suffixes=(".weight", ".bias")) or "output.weight"
                )  # Gemma has no name
                writer.add_tensor(written, gguf.quants.quantize(value.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def write_metadata(writer, gguf, config: dict) -> None:
    """The hyperparameters, under the names llama.cpp gives them."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    numbers = {
        "vocab_size": config["vocab_size"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"] or 4 * config["hidden_size"],
        "head_count": config["num_attention_heads"], "head_count_kv": config["num_key_value_heads"],
        "key_length": head_dim, "value_length": head_dim,
        "rope_dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1)),
        "rope_freq_base": rope.get("rope_theta", 10000.0),
    }  # fmt: skip
    optional = {
        "layer_norm_rms_eps": "rms_norm_eps", "layer_norm_eps": "norm_epsilon",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier", "attention_scale": "attention_multiplier",
        "logit_scale": "logits_scaling", "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping", "parallel_residual": "use_parallel_residual",
    }  # fmt: skip
    numbers |= {name: config[key] for name, key in optional.items() if config.get(key) is not None}
    if config["model_type"] in ("mistral", "phi3", "starcoder2", "gemma2", "gemma3_text") and config["sliding_window"]:
        numbers["sliding_window"] = config["sliding_window"]
    for name, number in numbers.items():
        getattr(writer, f"add_{name}")(number)
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), "cpu")  # [head_dim / 2]
        plain = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())  # llama.cpp keeps the divisors


def write_tokenizer(writer, hf_path: Path, vocab_size: int) -> None:
    """The byte-level BPE of tokenizer.json as llama.cpp's "gpt2" vocabulary; ids past the tokenizer's are unused."""
    content = json.loads((hf_path / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = {i: token for token, i in content["model"]["vocab"].items()}
    added = {entry["id"]: entry["content"] for entry in content["added_tokens"]}
    tokens |= added
    kinds = [3 if i in added else 1 if i in tokens else 5 for i in range(vocab_size)]  # control, normal, unused
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens.get(i, f"[PAD{i}]") for i in range(vocab_size)])
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
