"""Quantised folders: equal to quantising in memory bit for bit, loaded by path, never half written or in the way."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import quantize
from checkpoint import open_checkpoint, tensor_shapes
from formats import gguf, quantized_folder
from formats import layers as weights
from formats.quantized_folder import WEIGHTS, save_quantized, write_weights
from formats.read_config import from_hf
from generate import LLM
from model import Transformer
from quantize import SCHEMES
from sampling import SamplingParams
from tokenizer import Tokenizer

FUSED = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",))
FUSED += (("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))
ROOT = Path(__file__).resolve().parent.parent


def buffers(ckpt, scheme) -> dict[str, torch.Tensor]:
    """Every layer of the model as model.py builds them, by name: what they hold."""
    c, layers = ckpt.config, {}
    layers["embed"] = weights.linear_from_checkpoint(ckpt, ["model.embed_tokens.weight"], scheme, torch.float32)
    if not c.tie_word_embeddings:
        layers["head"] = weights.linear_from_checkpoint(ckpt, ["lm_head.weight"], scheme, torch.float32)
    for i in range(c.num_layers):
        for parts in FUSED:
            bias = {"self_attn.q_proj": c.qkv_bias, "self_attn.o_proj": c.o_bias}.get(parts[0], c.mlp_bias)
            names = [f"model.layers.{i}.{part}" for part in parts]
            layers[names[0]] = weights.linear_from_checkpoint(
                ckpt,
                [name + ".weight" for name in names],
                scheme,
                torch.float32,
                [name + ".bias" for name in names] if bias else None,
            )
    sizes = {}
    for name, layer in layers.items():
        sizes[name] = torch.tensor([layer.out_features, layer.in_features, layer.scheme.group_size])
    norms = sizes | {n: ckpt.tensor(n) for n in ckpt.names() if "norm" in n}
    return norms | {f"{n}/{b}": t for n, layer in layers.items() for b, t in layer.named_buffers()}


def assert_same(ckpt, folder, scheme) -> None:
    """The folder gives the very layers that quantising in memory gives, with and without naming the scheme."""
    expected = buffers(ckpt, scheme)
    for named in (scheme, None):
        found = buffers(open_checkpoint(folder), named)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A tied model whose 80 columns are no whole number of groups."""
    path = tmp_path_factory.mktemp("llama") / "hf"
    return tiny.hf_folder(path, "llama", tie_word_embeddings=True, hidden_size=80, num_attention_heads=5, head_dim=16,
                          num_key_value_heads=1)  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
def test_saved_equals_in_memory_bit_for_bit(llama, tmp_path, scheme):
    out = save_quantized(llama, scheme, tmp_path / "q")
    assert_same(open_checkpoint(llama), out, scheme)
    assert open_checkpoint(out).config == open_checkpoint(llama).config


@pytest.mark.parametrize("arch, dtype", [("qwen2", "float16"), ("qwen3", "bfloat16"), ("mistral", "float32")])
def test_biases_untied_heads_and_dtypes_survive(tmp_path, arch, dtype):
    source = tiny.hf_folder(tmp_path / "hf", arch, dtype=dtype)
    out = save_quantized(source, "int4", tmp_path / "q")
    assert_same(open_checkpoint(source), out, "int4")
    assert open_checkpoint(out).config == open_checkpoint(source).config
    text = "the cat sat on 10 mats"
    assert Tokenizer.from_folder(out).encode(text) == Tokenizer.from_folder(source).encode(text)


@pytest.mark.parametrize("arch, kind, scheme", [
    ("llama", "Q4_0", "int4"), ("llama", "Q4_1", "int4"), ("llama", "Q8_0", "int8"), ("llama", "Q8_0", "int4"),
    ("qwen2", "Q4_1", "int4"), ("mistral", "Q4_1", "int8"), ("gemma3", "Q8_0", "int8"),
])  # fmt: skip
def test_from_gguf_with_config_and_tokenizer_written_anew(tmp_path, arch, kind, scheme):
    options = {"tie_word_embeddings": True} if arch == "llama" else {}
    hf = tiny.hf_folder(tmp_path / "hf", arch, **options)
    source = open_checkpoint(tiny.gguf_file(hf, tmp_path / "m.gguf", quant=kind))
    out = save_quantized(source.path, scheme, tmp_path / "q")
    assert_same(source, out, scheme)
    found, wanted = vars(open_checkpoint(out).config), vars(source.config)
    assert {k: v for k, v in found.items() if k != "architecture"} == {
        k: v for k, v in wanted.items() if k != "architecture"
    }
    ours, theirs = Tokenizer.from_folder(out), Tokenizer.from_checkpoint(source)
    messages = [{"role": "user", "content": "hello\nworld"}]
    assert ours.encode("the cat") == theirs.encode("the cat")
    assert ours.encode_chat(messages) == theirs.encode_chat(messages)


def test_rope_divisors_of_a_gguf_survive(tmp_path):
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 128, "rope_theta": 10000.0}
    hf = tiny.hf_folder(tmp_path / "hf", "llama", rope_parameters=rope)
    source = open_checkpoint(tiny.gguf_file(hf, tmp_path / "m.gguf"))
    assert source.config.rope_scaling["rope_type"] == "llama3_factors"
    out = save_quantized(source.path, "int4", tmp_path / "q")
    assert open_checkpoint(out).config == source.config


def test_a_config_that_cannot_be_said_is_refused(tmp_path, monkeypatch):
    source = tiny.gguf_file(tiny.hf_folder(tmp_path / "hf", "llama"), tmp_path / "m.gguf")
    monkeypatch.setattr("formats.quantized_folder.hf_config", lambda config: hf_config(config) | {"rope_theta": 1.5})
    with pytest.raises(ValueError, match="rope_theta"):
        save_quantized(source, "int4", tmp_path / "q")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "m.gguf"]


hf_config = quantized_folder.hf_config


def test_a_head_that_contradicts_the_tied_flag_is_kept(tmp_path):
    source = tiny.hf_folder(tmp_path / "hf", "llama")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    out = save_quantized(source, "int8", tmp_path / "q")
    assert not open_checkpoint(out).config.tie_word_embeddings
    assert_same(open_checkpoint(source), out, "int8")


def test_the_file_holds_one_table_and_what_the_formula_says(llama, tmp_path):
    """Read by the safetensors library itself: names, dtypes, shapes, metadata."""
    out = save_quantized(llama, "int4", tmp_path / "q")
    ckpt, stored = open_checkpoint(llama), load_file(out / WEIGHTS)
    expected = {}
    for name in ckpt.names():
        if len(ckpt.shape(name)) == 1:
            expected[name] = (torch.float32, ckpt.shape(name))
        else:
            scheme = SCHEMES["int8" if "embed" in name else "int4"]
            for suffix, entry in scheme.layout(*ckpt.shape(name)).items():
                expected[f"{name.removesuffix('.weight')}.{suffix}"] = entry
    assert {name: (t.dtype, tuple(t.shape)) for name, t in stored.items()} == expected
    assert not any("lm_head" in name for name in stored)
    about = open_checkpoint(out).quant
    assert (about["version"], about["scheme"], about["bits"], about["group_size"]) == (1, "int4", 4, 32)
    assert about["shapes"]["model.layers.1.mlp.down_proj"] == [80, 96]


def spoiled(llama, out: Path, layer: str, *parts: str, **added) -> str:
    """What is said when a folder lacks `parts` of a layer, or holds others."""
    save_quantized(llama, "int4", out, force=True)
    with safe_open(out / WEIGHTS, framework="pt") as file:
        metadata = file.metadata()
    stored = load_file(out / WEIGHTS)
    for part in parts:
        del stored[f"{layer}.{part}"]
    save_file(stored | {f"{layer}.{part}": tensor for part, tensor in added.items()}, out / WEIGHTS, metadata)
    with pytest.raises(ValueError) as caught:
        Transformer(open_checkpoint(out))
    return str(caught.value)


def test_every_stored_part_of_a_tensor_is_accounted_for_by_name(llama, tmp_path):
    layer, out = "model.layers.1.mlp.up_proj", tmp_path / "q"
    for part in ("qweight", "scales", "mins"):
        assert f"{layer}.{part} is missing: the folder is damaged" in spoiled(llama, out, layer, part)
    assert "model.embed_tokens.scales is missing" in spoiled(llama, out, "model.embed_tokens", "scales")
    assert f"Missing (1): {layer}.weight" in spoiled(llama, out, layer, "qweight", "scales", "mins")
    assert f"the parts of {layer} are not" in spoiled(llama, out, layer, more=torch.ones(1))
    assert f"the parts of {layer} are not" in spoiled(llama, out, layer, scales=torch.ones(96, 3))
    assert "Unknown (1): model.layers.9.x" in spoiled(llama, out, "model.layers.9", x=torch.ones(1))


def test_a_quantised_folder_decodes_with_captured_kernels_without_being_told(llama, tmp_path):
    out = save_quantized(llama, "int4", tmp_path / "q")
    prompt, params = [[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0)
    told, untold = (LLM(str(out), quant=quant, compile=True, num_blocks=20) for quant in ("int4", None))
    assert untold.stats()["steps_captured"] and not untold.stats()["graphs_compiled"]
    assert untold.generate(prompt, params)[0].outputs[0] == told.generate(prompt, params)[0].outputs[0]


class Mixed:
    """A checkpoint of one layer in which q is Q8_0 and k and v are dense, as in GGUF files of mixed kinds."""

    quant = None

    def __init__(self):
        draw = torch.Generator().manual_seed(0)
        self.held = {f"model.layers.0.self_attn.{p}_proj.weight": torch.randn(16, 64, generator=draw) for p in "qkv"}
        q = torch.randint(0, 100, (16, 2, 34), dtype=torch.uint8, generator=draw)  # small positive fp16 scales
        self.q8_0 = gguf.Blocks("Q8_0", (16, 64), q)

    def names(self):
        return list(self.held)

    def shape(self, name):
        return (16, 64)

    def tensor(self, name):
        return self.held[name]

    def blocks(self, name):
        return self.q8_0 if "q_proj" in name else None

    def release(self, name):
        pass


def test_pieces_of_one_layer_are_stored_in_one_form(tmp_path):
    ckpt = Mixed()
    write_weights(ckpt, SCHEMES["int8"], tmp_path / WEIGHTS, lambda done, total: None)
    stored = load_file(tmp_path / WEIGHTS)
    pieces = weights.load_rows(ckpt, ckpt.names(), SCHEMES["int8"])
    assert len(stored) == 6 and pieces[0].scheme is quantize.INT8_G32
    for name, rows in zip(ckpt.names(), pieces, strict=True):
        for suffix, part in rows.parts.items():
            assert torch.equal(stored[f"{name.removesuffix('.weight')}.{suffix}"], part)
    assert quantize.concatenate(pieces).out_features == 48


# ---- what is refused, and what is left behind


def test_a_quantised_folder_has_one_scheme(llama, tmp_path):
    out = save_quantized(llama, "int4", tmp_path / "q")
    with pytest.raises(ValueError, match="quantised as int4 and cannot be loaded as int8"):
        buffers(open_checkpoint(out), "int8")
    with pytest.raises(ValueError, match="quantised already .int4."):
        save_quantized(out, "int8", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_folder_of_a_later_version_is_refused(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(quantized_folder, "VERSION", 2)
    out = save_quantized(llama, "int4", tmp_path / "q")
    with pytest.raises(ValueError, match="version 2"):
        buffers(open_checkpoint(out), None)


def test_nothing_is_overwritten_unasked(llama, tmp_path):
    out = save_quantized(llama, "int4", tmp_path / "q")
    before = (out / WEIGHTS).read_bytes()
    with pytest.raises(ValueError, match="--force"):
        save_quantized(llama, "int8", out)
    assert (out / WEIGHTS).read_bytes() == before
    save_quantized(llama, "int8", out, force=True)
    assert open_checkpoint(out).quant["scheme"] == "int8"
    assert [p.name for p in tmp_path.iterdir()] == ["q"]


def test_force_replaces_only_what_this_command_wrote(llama, tmp_path):
    with pytest.raises(ValueError, match="choose another --out"):
        save_quantized(llama, "int4", llama, force=True)  # the model itself
    out = save_quantized(llama, "int4", tmp_path / "q")
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="choose another --out"):
        save_quantized(llama, "int4", out, force=True)
    assert (out / "notes.txt").read_text() == "mine"
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is a file"):
        save_quantized(llama, "int4", tmp_path / "file", force=True)
    (tmp_path / "empty").mkdir()
    assert (save_quantized(llama, "int4", tmp_path / "empty") / WEIGHTS).is_file()


@pytest.mark.parametrize("replacing", [False, True])
def test_a_full_disk_leaves_what_was_there(llama, tmp_path, monkeypatch, replacing):
    out = tmp_path / "q"
    if replacing:
        save_quantized(llama, "int8", out)

    def full(tensors, path, metadata):
        path.write_bytes(b"begun")
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr(quantized_folder, "save_file", full)
    with pytest.raises(OSError, match="cannot be written: No space left"):
        save_quantized(llama, "int4", out, force=True)
    assert [p.name for p in tmp_path.iterdir()] == (["q"] if replacing else [])
    if replacing:
        assert open_checkpoint(out).quant["scheme"] == "int8"


def test_a_damaged_weight_is_named_and_nothing_written(tmp_path):
    source = tiny.hf_folder(tmp_path / "hf", "llama")
    file = source / WEIGHTS
    raw = bytearray(file.read_bytes())
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    at = 8 + int.from_bytes(raw[:8], "little") + header["model.layers.1.mlp.up_proj.weight"]["data_offsets"][0]
    raw[at : at + 4] = b"\x00\x00\xc0\x7f"  # NaN
    file.write_bytes(raw)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN"):
        save_quantized(source, "int4", tmp_path / "q")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


# ---- the command


def test_progress_counts_every_weight(llama, tmp_path):
    seen = []
    save_quantized(llama, "int4", tmp_path / "q", progress=lambda done, total: seen.append((done, total)))
    assert len(seen) == 1 + 2 * 4 and seen == sorted(seen)  # the table, and four layers of each decoder layer
    matrices = [t for t in load_file(llama / WEIGHTS).values() if t.ndim == 2]
    assert seen[-1] == (sum(t.numel() for t in matrices),) * 2


def test_the_command_line(llama, tmp_path, capsys):
    out = tmp_path / "q"
    assert quantized_folder.main(["--model", str(llama), "--quant", "int8", "--out", str(out)]) == 0
    assert "int8" in capsys.readouterr().out and open_checkpoint(out).quant["scheme"] == "int8"
    assert quantized_folder.main(["--model", str(llama), "--quant", "int8", "--out", str(out)]) == 2
    assert "--force" in capsys.readouterr().err
    assert quantized_folder.main(["--model", str(llama), "--quant", "int5", "--out", str(tmp_path / "r")]) == 2
    shown = capsys.readouterr()
    assert "'int5'" in shown.err and "int4-g64" in shown.err and not shown.out
    assert quantized_folder.main(["--model", str(tmp_path / "nothing"), "--out", str(tmp_path / "r")]) == 2
    assert "nothing" in capsys.readouterr().err


CHILD = """
import sys
from pathlib import Path
import torch
import quantize
from formats import layers as weights
from checkpoint import open_checkpoint

def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) << 10

torch.set_num_threads(1)
folder, scheme = sys.argv[1], sys.argv[2] or None
for form in quantize.SCHEMES.values():  # what torch loads at first use is no weight
    quantize.quantize_rows(torch.ones(64, 64), form)
ckpt = open_checkpoint(folder)
Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
before = resident("VmRSS")
names = [name for name in ckpt.names() if name.endswith((".qweight", "proj.weight", "tokens.weight"))]
names = [name.replace(".qweight", ".weight") for name in names]
layers = [weights.linear_from_checkpoint(ckpt, [name], scheme, torch.float32) for name in names]
print(resident("VmHWM") - before, sum(layer.weight_bytes for layer in layers))
"""


@pytest.fixture(scope="module")
def big(llama, tmp_path_factory) -> Path:
    """100 million bfloat16 weights, one like the other: only their size matters."""
    path = tmp_path_factory.mktemp("big")
    sizes = {"num_hidden_layers": 30, "hidden_size": 512, "intermediate_size": 1536, "vocab_size": 4096}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "dtype": "bfloat16"}
    config = json.loads((llama / "config.json").read_text()) | sizes | heads
    (path / "config.json").write_text(json.dumps(config))
    shapes = tensor_shapes(from_hf(config, {}, "config.json"))
    save_file({name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}, path / WEIGHTS)
    return path


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc (Linux)")
@pytest.mark.parametrize("source", ["dense", "folder", "gguf"])
def test_loading_needs_little_beside_the_final_weights(tmp_path, source, big, smollm2):
    """Quantised while loading, from a quantised folder, and taken over from the default GGUF: under 1.5 times."""
    path, scheme = (smollm2, "int4") if source == "gguf" else (big, "int8")
    if source == "folder":
        path, scheme = save_quantized(big, "int8", tmp_path / "q"), ""
    command = [sys.executable, "-c", CHILD, str(path), scheme]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak, final = map(int, done.stdout.split())
    assert final > 90e6
    assert peak < 1.5 * final, f"peak {peak / 1e6:.0f} MB for {final / 1e6:.0f} MB of weights"
