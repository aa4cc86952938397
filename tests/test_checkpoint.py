"""Checkpoints: both containers give the same tensors, and what is missing, foreign, damaged or ambiguous is named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf as oracle_gguf
import pytest
import tiny
import torch
from conftest import ROOT
from safetensors.torch import load_file, save_file

import checkpoint
from checkpoint import CheckpointError, open_checkpoint
from formats import folder_files, gguf
from formats.read_config import llama_name

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def folder(tmp_path) -> Path:
    return tiny.hf_folder(tmp_path / "model", "llama", tokenizer=False)


def rewrite(folder: Path, change) -> None:
    """Apply `change` to the dictionary of tensors of a single-file folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal(model) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(model)
    return str(caught.value)


@pytest.mark.parametrize("arch", tiny.ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_both_containers_hold_the_tensors_of_transformers(tmp_path, arch, tied):
    folder = tiny.hf_folder(tmp_path / "hf", arch, tie_word_embeddings=tied, tokenizer=False)
    config = open_checkpoint(folder).config
    want = {llama_name(config, name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    if arch == "gpt2":
        want = {name: tensor.t() if name.endswith("_proj.weight") else tensor for name, tensor in want.items()}
    for path in (folder, tiny.gguf_file(folder, tmp_path / "m.gguf")):
        ours = open_checkpoint(path)
        assert set(ours.names()) == set(want) and (HEAD in want) is not tied
        for name in ours.names():
            assert ours.shape(name) == tuple(want[name].shape)
            assert torch.equal(ours.tensor(name), want[name]), name
            assert ours.blocks(name) is None
        assert (ours.gguf is None) == (path == folder) and ours.quant is None


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q8_0", "Q5_0"])
def test_gguf_blocks_come_in_the_row_order_of_transformers(tmp_path, arch, quant):
    folder = tiny.hf_folder(tmp_path / "hf", arch, tokenizer=False)
    ours = open_checkpoint(tiny.gguf_file(folder, tmp_path / "m.gguf", quant))
    package = oracle_gguf
    kind = package.GGMLQuantizationType[quant]
    for name, value in load_file(folder / "model.safetensors").items():
        blocks = ours.blocks(name)
        if value.ndim == 1:
            assert blocks is None and torch.equal(ours.tensor(name), value)
            continue
        want = torch.tensor(package.quants.quantize(value.numpy(), kind))  # rows quantise on their own
        assert blocks.kind == quant and blocks.shape == tuple(value.shape)
        assert torch.equal(blocks.data.flatten(1), want), name
        assert torch.equal(ours.tensor(name), gguf.dequantize(blocks)), name
    assert ours.config.dtype == "float32"


@pytest.mark.parametrize("quant, dtype", [("F16", "float16"), ("BF16", "bfloat16"), ("F32", "float32")])
def test_dense_gguf_keeps_its_dtype(tmp_path, folder, quant, dtype):
    ours = open_checkpoint(tiny.gguf_file(folder, tmp_path / "m.gguf", quant))
    assert ours.config.dtype == dtype
    assert str(ours.tensor("model.layers.0.self_attn.q_proj.weight").dtype) == f"torch.{dtype}"


def test_the_default_model(smollm2):
    ours = open_checkpoint("smollm2")
    assert ours.path == smollm2 and ours.config.tie_word_embeddings and len(ours.names()) == 272
    assert (ours.config.num_layers, ours.config.num_heads, ours.config.num_kv_heads) == (30, 9, 3)
    assert ours.blocks("model.layers.0.self_attn.q_proj.weight").kind == "Q4_1"
    assert ours.blocks(EMBEDDING).kind == "Q8_0" and ours.shape(EMBEDDING) == (49152, 576)


def test_shards_and_bfloat16(tmp_path):
    folder = tiny.hf_folder(tmp_path / "hf", "qwen3", dtype="bfloat16", max_shard_size="60KB", tokenizer=False)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    ours = open_checkpoint(folder)
    assert ours.config.dtype == "bfloat16"
    for shard in shards:
        for name, value in load_file(shard).items():
            assert torch.equal(ours.tensor(name), value)
    configure(folder, dtype=None)
    assert open_checkpoint(folder).config.dtype == "bfloat16"  # then the tensors decide
    shards[1].unlink()
    assert shards[1].name in refusal(folder) and "missing" in refusal(folder)


def test_tied_without_a_head_uses_the_embedding(tmp_path):
    folder = tiny.hf_folder(tmp_path / "hf", "llama", tie_word_embeddings=True, tokenizer=False)
    for path in (folder, tiny.gguf_file(folder, tmp_path / "m.gguf", "Q8_0")):
        ours = open_checkpoint(path)
        assert ours.config.tie_word_embeddings and HEAD not in ours.names()


@pytest.mark.parametrize("same", [True, False])
def test_tied_with_a_head_present_is_what_transformers_makes_of_it(tmp_path, same):
    import transformers

    folder = tiny.hf_folder(tmp_path / "hf", "llama", tie_word_embeddings=True, tokenizer=False)
    rewrite(folder, lambda t: t.update({HEAD: t[EMBEDDING].clone() if same else t[EMBEDDING] * 2}))
    ours = open_checkpoint(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).lm_head.weight
    assert ours.config.tie_word_embeddings is same
    assert torch.equal(ours.tensor(EMBEDDING if same else HEAD), theirs)
    assert (HEAD in ours.names()) is not same


def test_untied_and_no_head_is_an_error(folder):
    rewrite(folder, lambda t: t.pop(HEAD))
    assert f"Missing (1): {HEAD}" in refusal(folder)


def test_gguf_with_a_head_of_its_own(tmp_path, folder):
    ours = open_checkpoint(tiny.gguf_file(folder, tmp_path / "m.gguf"))
    assert not ours.config.tie_word_embeddings
    assert torch.equal(ours.tensor(HEAD), load_file(folder / "model.safetensors")[HEAD])


def test_biases_of_llama_come_out_of_both_containers(tmp_path):
    folder = tiny.hf_folder(tmp_path / "hf", "llama", attention_bias=True, mlp_bias=True, tokenizer=False)
    want = load_file(folder / "model.safetensors")
    for path in (folder, tiny.gguf_file(folder, tmp_path / "m.gguf")):
        ours = open_checkpoint(path)
        assert ours.config.qkv_bias and ours.config.o_bias and ours.config.mlp_bias
        assert sum(name.endswith("bias") for name in ours.names()) == 14
        for name in ours.names():
            assert torch.equal(ours.tensor(name), want[name]), name


@pytest.mark.parametrize("flag", ["attention_bias", "mlp_bias"])
def test_a_bias_that_the_config_does_not_ask_for_is_reported(tmp_path, flag):
    folder = tiny.hf_folder(tmp_path / "hf", "llama", tokenizer=False, **{flag: True})
    configure(folder, **{flag: False})
    stem = "self_attn.k_proj" if flag == "attention_bias" else "mlp.up_proj"
    message = refusal(folder)
    assert "Unknown" in message and f"model.layers.0.{stem}.bias" in message


def test_missing_and_unknown_tensors_are_named(folder):
    def spoil(tensors):
        tensors["model.layers.2.mlp.up_proj.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")

    rewrite(folder, spoil)
    message = refusal(folder)
    assert "Missing (1): model.layers.1.mlp.up_proj.weight" in message
    assert "Unknown (1): model.layers.2.mlp.up_proj.weight" in message
    assert str(folder) in message


def test_missing_tensors_of_a_gguf_are_named_as_the_file_names_them(tmp_path, folder):
    rewrite(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    assert "Missing (1): blk.1.ffn_up.weight" in refusal(tiny.gguf_file(folder, tmp_path / "m.gguf"))


def test_a_shape_that_the_config_does_not_have(folder):
    configure(folder, intermediate_size=95)
    message = refusal(folder)
    assert "mlp" in message and "[96, 64]" in message and "[95, 64]" in message


def test_rotary_leftovers_are_tolerated(folder):
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8).double()}))
    assert not any("rotary" in name for name in open_checkpoint(folder).names())


@pytest.mark.parametrize("stray", ["consolidated.safetensors", "a.safetensors", "zzz.safetensors", "model.safetensors"])
def test_only_what_the_index_assigns_is_used(tmp_path, stray):
    folder = tiny.hf_folder(tmp_path / "hf", "llama", max_shard_size="60KB", tokenizer=False)
    shards = sorted(folder.glob("model-*.safetensors"))
    want = {name: value for shard in shards for name, value in load_file(shard).items()}
    save_file({name: value + 1 for name, value in want.items()} | {"extra": torch.ones(1)}, folder / stray)
    first, last = load_file(shards[0]), load_file(shards[-1])  # and duplicates inside the shards themselves
    save_file(last | {name: value + 1 for name, value in first.items()}, shards[-1])
    save_file(first | {name: value + 1 for name, value in last.items()}, shards[0])
    ours = open_checkpoint(folder)
    assert set(ours.names()) == set(want)
    assert all(torch.equal(ours.tensor(name), value) for name, value in want.items())


def test_a_stray_file_beside_a_single_one_is_not_used(folder):
    want = load_file(folder / "model.safetensors")
    save_file({name: value + 1 for name, value in want.items()}, folder / "consolidated.safetensors")
    assert torch.equal(open_checkpoint(folder).tensor(EMBEDDING), want[EMBEDDING])
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    assert "2 safetensors files and no model.safetensors.index.json" in refusal(folder)


@pytest.mark.parametrize("table", [{"weight_map": {"a": "../other.safetensors"}}, {"weight_map": {"a": 5}}, {}, []])
def test_an_index_that_leaves_the_folder_or_is_none(folder, table):
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))
    assert "model.safetensors.index.json" in refusal(folder)


def test_an_index_that_names_a_tensor_its_file_lacks(folder):
    table = {"weight_map": {name: "model.safetensors" for name in [*open_checkpoint(folder).names(), "ghost"]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))
    assert "ghost" in refusal(folder)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1234567\n"
SPOILED = {
    "pointer": (lambda raw: POINTER, "git lfs pull"),
    "cut by 100 bytes": (lambda raw: raw[:-100], "is truncated: tensor 'model.norm.weight' ends"),
    "cut in the header": (lambda raw: raw[:500], "truncated or not safetensors"),
    "empty": (lambda raw: b"", "truncated or not safetensors"),
    "huge header": (lambda raw: (1 << 62).to_bytes(8, "little") + raw[8:], "truncated or not safetensors"),
    "header too long": (lambda raw: (1 << 27).to_bytes(8, "little") + raw[8:], "truncated or not safetensors"),
    "web page": (lambda raw: b"<!DOCTYPE html><html>" + bytes(500), "not safetensors"),
    "header no JSON": (lambda raw: raw[:8] + b"#" * len(raw[8:]), "header is damaged"),
    "bytes appended": (lambda raw: raw + bytes(64), "is damaged"),
    "offsets swapped": (lambda raw: raw.replace(b'"data_offsets":[0,', b'"data_offsets":[9,', 1), "is damaged"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_damaged_safetensors_are_refused_by_name(folder, case):
    spoil, words = SPOILED[case]
    path = folder / "model.safetensors"
    path.write_bytes(spoil(path.read_bytes()))
    message = refusal(folder)
    assert str(path) in message and words in message


def test_a_folder_in_the_place_of_a_file(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    assert "model.safetensors is not a file" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')
    assert "model.safetensors is missing" in refusal(folder)


SIZES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
NUMBERS = [*SIZES.split(), "max_position_embeddings", "rms_norm_eps", "rope_theta", "sliding_window"]


@pytest.mark.parametrize("key", NUMBERS)
def test_every_number_of_a_config_is_checked(tmp_path, key):
    folder = tiny.hf_folder(
        tmp_path / "hf", "qwen2", tokenizer=False
    )  # without use_sliding_window: checked all the same
    for number in (-1, 10**12, 10**400, float("nan"), float("inf"), "8", True, []):
        if key in ("max_position_embeddings", "rope_theta", "rms_norm_eps", "sliding_window") and number == 10**12:
            continue
        configure(folder, **{key: number})
        assert str(folder) in refusal(folder), number
        configure(folder, **{key: 0})
    assert key == "rms_norm_eps" or f"{key} is 0" in refusal(folder)


def test_token_ids_beyond_the_vocabulary_are_refused(folder):
    configure(folder, eos_token_id=10**400)
    assert "eos_token_id" in refusal(folder)


def test_truncated_gguf_is_refused_before_loading(tmp_path, folder):
    path = tiny.gguf_file(folder, tmp_path / "m.gguf", "Q8_0")
    path.write_bytes(path.read_bytes()[:-1024])
    message = refusal(path)
    assert str(path) in message and "tensor" in message and "truncated" in message


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [POINTER, b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_broken_json_is_refused_by_name(folder, file, content):
    (folder / file).write_bytes(content)
    assert str(folder / file) in refusal(folder)


def test_dtypes_that_no_layer_takes_are_refused(folder):
    rewrite(folder, lambda t: t.update({EMBEDDING: t[EMBEDDING].to(torch.float8_e4m3fn)}))
    assert "F8_E4M3" in refusal(folder) and EMBEDDING in refusal(folder)


def test_pickles_are_refused_and_never_opened(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    for model in (folder, folder / "pytorch_model.bin"):
        assert "pickle" in refusal(model) and "save_pretrained" in refusal(model)
    (folder / "pytorch_model.bin").unlink()
    assert "holds no weights" in refusal(folder)


def test_models_that_are_not_there(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refusal(tmp_path / "empty")
    tiny.gguf_file(folder, tmp_path / "empty" / "m.gguf")
    assert "m.gguf" in refusal(tmp_path / "empty")
    for model in ("nonsense", "./a/b", str(tmp_path / "gone.gguf"), "a/b/c", "owner/file.gguf", ""):
        assert "smollm2" in refusal(model) or "config.json" in refusal(model)
    assert f"name the folder {folder}" in refusal(folder / "model.safetensors")
    (tmp_path / "notes.txt").write_text("hello")
    assert "not a GGUF file" in refusal(tmp_path / "notes.txt")


def test_a_folder_of_quantize_py(folder):
    """Where a matrix is replaced by its parts, those are asked for, and the scheme is handed on."""

    def quantise(tensors):
        for name in [n for n in tensors if "mlp" in n]:
            stem = name.removesuffix(".weight")
            rows = tensors.pop(name).shape[0]
            tensors |= {
                stem + ".qweight": torch.zeros(rows, 32, dtype=torch.uint8),
                stem + ".scales": torch.ones(rows, 2),
            }
            tensors[stem + ".mins"] = torch.ones(rows, 2)

    rewrite(folder, quantise)
    tensors = load_file(folder / "model.safetensors")
    assert "U8" in refusal(folder)  # without the scheme, bytes are not weights
    scheme = {"version": 1, "scheme": "int4", "group_size": 32}
    save_file(tensors, folder / "model.safetensors", metadata={folder_files.QUANT_KEY: json.dumps(scheme)})
    ours = open_checkpoint(folder)
    assert ours.quant == scheme and set(ours.names()) == set(tensors)
    for damaged in ("{", "[]", "{}", '{"version": 1}', '{"version": "x", "scheme": 4}', "[" * 100_000):
        save_file(tensors, folder / "model.safetensors", metadata={folder_files.QUANT_KEY: damaged})
        assert "metadata is damaged" in refusal(folder) and "model.safetensors" in refusal(folder)


CHILD = """
import re, sys, torch
import checkpoint
ours = checkpoint.open_checkpoint(sys.argv[1])
dtype = getattr(torch, sys.argv[2])
status = lambda key: int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
ours.tensor("model.norm.weight").to(dtype)
before = status("VmRSS")
parameters = {}
for name in ours.names():
    parameters[name] = torch.empty(ours.shape(name), dtype=dtype)
    parameters[name].copy_(ours.tensor(name))
    ours.release(name)
peak = status("VmHWM") - before  # not getrusage: that peak is inherited from the process that started this one
final = sum(p.nbytes for p in parameters.values())
mapped = ".safetensors" in open("/proc/self/maps").read()
print(peak / final, final, mapped)
"""


def measured(model: Path, dtype: str) -> tuple[float, int, bool]:
    """(peak / parameters, bytes of the parameters, is a file still mapped), from a process of its own."""
    command = [sys.executable, "-c", CHILD, str(model), dtype]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    ratio, final, mapped = done.stdout.split()
    return float(ratio), int(final), mapped == "True"


def large_folder(path: Path) -> Path:
    """300 MB of float32 in two shards: layers of equal size, as real models have them."""
    settings = dict(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=17, num_attention_heads=8, vocab_size=2048
    )
    settings |= {"model_type": "llama", "num_key_value_heads": 8, "max_position_embeddings": 64}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(settings))
    shapes = checkpoint.tensor_shapes(checkpoint.from_hf(settings, {}, "config.json"))
    table = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(shapes)}
    for file in set(table.values()):
        save_file({name: torch.ones(shapes[name]) for name in shapes if table[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    return path


def test_peak_memory_while_loading_with_a_cast(tmp_path):
    folder = large_folder(tmp_path / "large")
    assert sum(f.stat().st_size for f in folder.glob("*.safetensors")) > 290e6
    ratio, final, mapped = measured(folder, "bfloat16")  # the file is twice the parameters: the harder way
    assert final > 145e6 and ratio < 1.5, f"peak is {ratio:.2f} x the parameters"
    assert not mapped, "a checkpoint file is still mapped after loading"


def test_peak_memory_while_loading_gguf(smollm2):
    runs = [measured(smollm2, "bfloat16") for _ in range(3)]  # pages that the kernel reads ahead only add to a peak
    ratio, final, _ = min(runs)
    assert final > 200e6 and ratio < 1.5, f"peak is {ratio:.2f} x the parameters"
