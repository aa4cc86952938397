"""model.py against transformers and naive.py: every architecture, from both containers, however a run is cut up."""

import math

import pytest
import tiny
import torch
from test_naive import SCALINGS, VARIANTS, oracle_logits, variant, weights_of  # noqa: F401  (variant is a fixture)

import naive
from checkpoint import open_checkpoint
from formats.quantized_folder import save_quantized
from generate import LLM
from kv_paged import KVCache
from model import Batch, Transformer, rope_table
from sampling import SamplingParams

BLOCK = 4


def run(model: Transformer, sequences: list[list[int]], cuts: list[list[int]]) -> list[torch.Tensor]:
    """Logits [T, vocab] of each sequence, computed side by side; step i gives sequence s cuts[s][i] more tokens."""
    config = model.config
    widest = max(math.ceil(len(s) / BLOCK) for s in sequences)
    kv = KVCache(
        config.num_layers, 1 + widest * len(sequences), BLOCK, config.num_kv_heads, config.head_dim, model.dtype
    )
    kv.data.fill_(float("nan"))  # a slot that nobody wrote must never be read
    tables = [[1 + s + len(sequences) * b for b in range(widest)] for s in range(len(sequences))]  # interleaved blocks
    done, logits = [0] * len(sequences), [[] for _ in sequences]
    for step in zip(*cuts, strict=True):
        positions = [range(d, d + n) for d, n in zip(done, step, strict=True)]
        flat = [(s, p) for s, ps in enumerate(positions) for p in ps]
        done = [d + n for d, n in zip(done, step, strict=True)]
        batch = Batch(
            tokens=torch.tensor([sequences[s][p] for s, p in flat]),
            positions=torch.tensor([p for _, p in flat]),
            slot_mapping=torch.tensor([tables[s][p // BLOCK] * BLOCK + p % BLOCK for s, p in flat]),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            query_start=torch.tensor([0, *torch.tensor(step).cumsum(0)], dtype=torch.int32),
            context_lens=torch.tensor(done, dtype=torch.int32),
            logit_rows=torch.arange(len(flat)),
        )
        for s, rows in enumerate(model(batch, kv).split(list(step))):
            logits[s].append(rows)
    return [torch.cat(rows) for rows in logits]


def test_logits_equal_transformers(variant):  # noqa: F811
    """Rope scaling, head_dim, biases, window: safetensors, all tokens in one run."""
    _, folder, tokens, expected = variant
    model = Transformer(open_checkpoint(folder))
    torch.testing.assert_close(run(model, [tokens], [[len(tokens)]])[0], expected, atol=1e-4, rtol=1e-4)


# GGUF has no key for an attention_factor, for a window on some layers of a Qwen, for the scale of a Gemma, nor for
# which layers of a SmolLM3 rotate.
NOT_IN_GGUF = ("llama-yarn-factor-1", "qwen2-window", "gemma3-scaled", "smollm3-marked")
IN_GGUF = [name for name in VARIANTS if name not in NOT_IN_GGUF]


@pytest.mark.parametrize("variant", IN_GGUF, indirect=True)
def test_logits_from_gguf_equal_transformers(variant, tmp_path):  # noqa: F811
    """The same weights through GGUF, with q and k in llama.cpp's row order where it permutes them."""
    _, folder, tokens, expected = variant
    ckpt = open_checkpoint(tiny.gguf_file(folder, tmp_path / "m.gguf"))
    model = Transformer(ckpt)
    torch.testing.assert_close(run(model, [tokens], [[len(tokens)]])[0], expected, atol=1e-4, rtol=1e-4)


CUTS = {"token by token": [1] * 10, "chunks of 3": [3, 3, 3, 1], "at once": [10], "uneven": [2, 5, 1, 2]}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("window", (None, 3, 4, 5, 9, 10, 11))
def test_window_is_the_same_however_the_run_is_cut(tmp_path, window, cuts):
    ckpt = open_checkpoint(tiny.hf_folder(tmp_path / "m", "mistral", sliding_window=window))
    tokens = torch.randint(3, 320, (10,), generator=torch.Generator().manual_seed(2)).tolist()
    got = run(Transformer(ckpt), [tokens], [cuts])[0]
    expected = naive.forward(weights_of(ckpt), ckpt.config, tokens)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_sequences_in_one_run_do_not_see_each_other(tmp_path):
    ckpt = open_checkpoint(tiny.hf_folder(tmp_path / "m", "llama"))
    draw = torch.Generator().manual_seed(3)
    sequences = [torch.randint(3, 320, (n,), generator=draw).tolist() for n in (12, 3, 7)]
    got = run(Transformer(ckpt), sequences, [[5, 7, 0], [0, 1, 2], [1, 1, 5]])
    for logits, tokens in zip(got, sequences, strict=True):
        expected = naive.forward(weights_of(ckpt), ckpt.config, tokens)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_rotary_table_stays_float32(tmp_path, dtype):
    folder = tiny.hf_folder(tmp_path / "m", "llama", head_dim=32, max_position_embeddings=16384)
    model = Transformer(open_checkpoint(folder), dtype=dtype).to(dtype)
    freqs = 10000.0 ** -(torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    for position in (1857, 8000):
        angles = position * freqs
        expected = torch.cat([angles.cos(), angles.sin()])
        assert (model.cos_sin[0][position].double() - expected).abs().max() < 1e-6


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rotary_table_equals_transformers(tmp_path, scaling):
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_theta": 10000.0, **SCALINGS[scaling]}
    folder = tiny.hf_folder(tmp_path / "m", "llama", rope_parameters=rope)
    expected = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder))
    cos, sin = expected(torch.zeros(1), torch.arange(500)[None])  # [1, 500, head_dim], each half twice
    half = cos.shape[-1] // 2
    table = rope_table(open_checkpoint(folder).config, 500)
    torch.testing.assert_close(table, torch.cat([cos[0, :, :half], sin[0, :, :half]], -1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_16_bit_models_follow_the_float32_one(tmp_path, dtype):
    folder = tiny.hf_folder(tmp_path / "m", "qwen3")
    tokens = list(range(5, 25))
    got = run(Transformer(open_checkpoint(folder), dtype=dtype), [tokens], [[12, 8]])[0]
    expected = oracle_logits(folder, tokens)
    assert got.dtype == torch.float32
    assert (got - expected).abs().mean() < 0.15 * expected.abs().mean()


@pytest.mark.parametrize("quant", ("int8", "int4"))
def test_tied_model_quantises_and_keeps_one_table(tmp_path, quant):
    folder = tiny.hf_folder(tmp_path / "m", "llama", tie_word_embeddings=True)
    ckpt = open_checkpoint(folder)
    model = Transformer(ckpt, quant)
    assert model.head is model.embed
    tables = sum(t.numel() * t.element_size() for t in model.embed.buffers())
    assert tables < 320 * 64 * 2  # one table, about a byte a weight
    tokens = list(range(5, 25))
    got, expected = run(model, [tokens], [[20]])[0], oracle_logits(folder, tokens)
    similarity = torch.nn.functional.cosine_similarity(got, expected).mean()
    assert similarity > (0.99 if quant == "int8" else 0.8)


@pytest.mark.parametrize("arch", tiny.ARCHITECTURES)
def test_compiled_families_answer_as_the_reference_does(tmp_path, arch):
    folder = tiny.hf_folder(tmp_path / "m", arch)
    ckpt, prompt = open_checkpoint(folder), list(range(5, 25))
    llm = LLM(model=str(folder), num_blocks=40, threads=1, compile=True)
    output = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0].outputs[0]
    assert output.token_ids == naive.generate(weights_of(ckpt), ckpt.config, prompt, 12)
    rotations, windows = ({llm.config.rope(i)[0] for i in range(len(llm.model.layers))}, set(llm.config.sliding_window))
    assert llm.stats()["graphs_compiled"] == 2 * max(len(rotations), len(windows))


@pytest.mark.parametrize("arch", tiny.ARCHITECTURES)
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_quantised_families_follow_the_dense_one(tmp_path, arch, quant):
    folder = tiny.hf_folder(tmp_path / "m", arch)
    quantised = save_quantized(folder, quant, tmp_path / "q")
    tokens = list(range(5, 25))
    dense, *ours = (
        run(Transformer(open_checkpoint(path), scheme), [tokens], [[12, 8]])[0]
        for path, scheme in ((folder, None), (folder, quant), (quantised, None))
    )
    assert torch.equal(*ours)
    assert torch.nn.functional.cosine_similarity(ours[0], dense).mean() > {"int8": 0.99, "int4": 0.7}[quant]


def test_a_step_that_is_not_all_operations_of_ours_is_not_recorded(tmp_path, native):
    llm = LLM(model=str(tiny.hf_folder(tmp_path / "m", "gemma3")), quant="int8", num_blocks=40, threads=1, compile=True)
    assert llm.stats()["steps_captured"] == 0
