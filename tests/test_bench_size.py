"""The sizing calculator against what the loader and the page pool really take, and what it refuses."""

import json

import pytest
import tiny

import bench
import checkpoint
from formats.quantized_folder import main as quantize
from generate import LLM
from model import Transformer
from quantize import SCHEMES

RATES = ["--bandwidth", "20", "--gflops", "100"]  # given, so that no clock is read
SHAPE = ["--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--context", "8192"]


def size(capsys, *flags: str) -> dict:
    assert bench.main(["size", *flags, *RATES, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys, *flags: str) -> str:
    assert bench.main(["size", *flags, *RATES]) == 2
    return capsys.readouterr().err


@pytest.fixture(scope="module", params=tiny.ARCHITECTURES)
def folder(request, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("m") / request.param
    return str(tiny.hf_folder(path, request.param, tie_word_embeddings=request.param == "qwen3"))


@pytest.mark.parametrize("quant", [None, *SCHEMES])
def test_weights_are_what_the_loader_holds(folder, quant, capsys):
    found = size(capsys, "--model", folder, *(["--quant", quant] if quant else []))
    model = Transformer(checkpoint.open_checkpoint(folder), quant)
    assert found["weight_bytes"] == pytest.approx(model.weight_bytes, rel=0.02)
    assert found["step_bytes"] == pytest.approx(model.step_bytes, rel=0.02)
    if quant is None:
        assert found["parameters"] == sum(t.numel() for t in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("kind, quant", [("Q4_0", "int4"), ("Q8_0", "int8"), ("Q5_1", "int8"), ("F16", None)])
def test_weights_of_a_gguf_file(kind, quant, tmp_path, capsys):
    file = tiny.gguf_file(tiny.hf_folder(tmp_path / "m", "llama"), tmp_path / "m.gguf", kind)
    found = size(capsys, "--model", str(file), *(["--quant", quant] if quant else []))
    model = Transformer(checkpoint.open_checkpoint(file), quant)
    assert found["weight_bytes"] == pytest.approx(model.weight_bytes, rel=0.02)


@pytest.mark.parametrize("quant", ["int8", "int8-g32", "int4"])
def test_weights_of_a_quantised_folder(quant, tmp_path, capsys):
    source = tiny.hf_folder(tmp_path / "m", "qwen2")
    assert quantize(["--model", str(source), "--quant", quant, "--out", str(tmp_path / "q")]) == 0
    capsys.readouterr()
    found = size(capsys, "--model", str(tmp_path / "q"))
    model = Transformer(checkpoint.open_checkpoint(tmp_path / "q"))
    assert found["weight_bytes"] == pytest.approx(model.weight_bytes, rel=0.02)
    assert found["parameters"] == size(capsys, "--model", str(source))["parameters"]


@pytest.mark.parametrize("kv_dtype, short", [("float32", "fp32"), ("float16", "fp16")])
def test_the_pool_holds_the_tokens_that_were_promised(folder, kv_dtype, short, capsys):
    found = size(capsys, "--model", folder, "--memory", "4M", "--kv-dtype", short, "--context", "100")
    budget = found["memory_bytes"] - found["weight_bytes"]
    llm = LLM(model=folder, kv_memory=budget, kv_dtype=kv_dtype, kernels="reference", threads=1, max_num_seqs=10_000)
    pool = llm.scheduler.pool
    assert found["pool_tokens"] == pytest.approx(pool.total * pool.block_size, rel=0.02)
    assert found["kv_bytes_per_token"] * pool.num_blocks * pool.block_size == llm.kv.nbytes
    assert found["max_concurrency"] == pool.total // 7  # 100 tokens take 7 blocks of 16
    assert found["kv_bytes_per_request"] == 7 * 16 * found["kv_bytes_per_token"]


def test_the_default_model(smollm2, capsys):
    found = size(capsys, "--model", "smollm2", "--quant", "int4", "--concurrency", "4", "--context", "2048")
    llm = LLM(quant="int4", num_blocks=4 * 2048 // 16, kernels="reference")
    assert found["weight_bytes"] == pytest.approx(llm.model.weight_bytes, rel=0.02)
    assert found["kv_bytes"] == llm.kv.nbytes
    assert found["parameters"] == 134_515_008


def test_the_sizes_everyone_should_know(capsys):
    """A Llama-3-8B shape keeps 128 KiB a token, 1 GiB a conversation of 8,192, 16 GiB for sixteen; 7e9 is 14 GB."""
    flags = [*SHAPE, "--params", "7e9", "--dtype", "fp16", "--concurrency", "16", "--memory", "48G"]
    found = size(capsys, *flags)
    assert found["kv_bytes_per_token"] == 128 * 2**10 and found["kv_bytes_per_request"] == 2**30
    assert found["kv_bytes"] == pytest.approx(16 * 2**30, rel=1e-3) and found["weight_bytes"] == 14e9
    assert found["fits"] and found["max_concurrency"] == 34  # (48 GiB - 14 GB) / 1 GiB
    assert found["decode_floor_tok_s"]["1"] == pytest.approx(20e9 / (14e9 + 2**30), abs=0.01)
    assert found["decode_floor_tok_s"]["16"] == pytest.approx(16 * 20e9 / (14e9 + 16 * 2**30), abs=0.01)
    assert found["prefill_floor_s"] == pytest.approx(2 * 7e9 * 8192 / 100e9)
    four = size(capsys, *flags, "--quant", "int4")
    assert four["weight_bytes"] == 7e9 * 5 / 8  # 4 bits, and 32 of scale and minimum for 32 weights


def test_a_shape_is_counted_like_a_model(capsys):
    flags = [*SHAPE, "--hidden", "4096", "--intermediate", "14336", "--vocab", "128256", "--dtype", "fp16"]
    found = size(capsys, *flags, "--memory", "80G")
    assert found["parameters"] == 8_030_261_248 and found["weight_bytes"] == 2 * 8_030_261_248
    assert size(capsys, *flags, "--memory", "80G", "--tied")["parameters"] == 8_030_261_248 - 4096 * 128256


MACHINES = [("24G", "int4", True), ("24G", None, False), ("4G", None, False), ("1K", "int8", False)]


@pytest.mark.parametrize("memory, quant, fits", MACHINES)
def test_every_machine_is_answered(memory, quant, fits, capsys):
    """The calculator is for machines one does not have: the sizes, and what is missing."""
    flags = ["--params", "8e9", *SHAPE, "--concurrency", "16", "--kv-dtype", "fp16", "--memory", memory]
    flags += ["--quant", quant] if quant else []
    found = size(capsys, *flags)
    assert found["kv_bytes"] == pytest.approx(16 * 2**30, rel=1e-3) and found["fits"] is fits
    assert found["weight_bytes"] == 8e9 * {None: 4, "int8": 1 + 4 / 4096, "int4": 5 / 8}[quant]
    assert found["short_bytes"] == max(0, found["total_bytes"] - found["memory_bytes"])
    assert bench.main(["size", *flags, *RATES]) == 0
    text = capsys.readouterr().out
    assert ("fits, " in text) == fits and ("does not fit, short by " in text) != fits
    if memory != "24G":
        assert found["pool_tokens"] == found["max_concurrency"] == found["max_context"] == 0
        assert "take fewer bits a weight" in text


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--params", "8e9", "--layers", "32"], "--kv-heads, --head-dim, --context missing"),
        (SHAPE, "--hidden, --intermediate, --vocab missing"),
        (
            ["--params", "8e9", *SHAPE, "--hidden", "64", "--tied"],
            "--hidden, --tied would change nothing here: --params",
        ),
        (["--params", "0", *SHAPE], "--params 0.0: must be from 1 to 1e+18"),
        (["--params", "nan", *SHAPE], "--params nan: must be from 1"),
        (["--params", "0.5", *SHAPE], "--params 0.5: must be from 1"),
        ([*SHAPE, "--hidden", "64", "--intermediate", "9", "--vocab", "9", "--heads", "4"], "must divide --heads 4"),
        (["--params", "8e9", *SHAPE, "--concurrency", "0"], "--concurrency 0: must be from 1"),
        (["--params", "8e9", *SHAPE, "--layers", "1000000000"], "--layers 1000000000: must be from 1 to 100000"),
        (["--model", "smollm2", "--params", "8e9"], "--params would change nothing here: --model has a shape"),
        (["--params", "8e9", *SHAPE, "--threads", "2"], "--threads would change nothing here"),
        (["--model", "no-such-model"], "No model 'no-such-model'"),
    ],
)
def test_what_is_refused(flags, said, capsys):
    assert said in refusal(capsys, *flags)


def test_a_context_beyond_the_model_is_refused(folder, capsys):
    assert "at most 512 tokens" in refusal(capsys, "--model", folder, "--context", "513")


def test_unknown_types_and_sizes_name_the_choices(capsys):
    for flags in (["--kv-dtype", "fp8"], ["--memory", "lots"], ["--quant", "int3"]):
        with pytest.raises(SystemExit):
            bench.main(["size", "--model", "smollm2", *flags])
        assert flags[0] in capsys.readouterr().err
