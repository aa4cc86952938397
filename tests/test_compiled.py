"""Compiled and captured steps: a small fixed number of graphs, the same tokens, padding that touches nothing."""

import dataclasses

import pytest
import tiny
import torch

import kernels
from compiled import CapturedRunner, CompiledRunner, ModelRunner, cuda_capture, tape_capture
from generate import LLM
from kv_paged import KVCache
from model import padding_batch
from sampling import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.hf_folder(tmp_path_factory.mktemp("m") / "m", "llama")


@pytest.fixture
def native():
    if kernels.set_backend("native") != "native":
        pytest.skip("needs a C++ compiler")
    yield
    kernels.set_backend("reference")


def replaying(run):
    """Stands in for a CUDA graph: the same static buffers, computed anew."""
    output = run()
    return output, lambda: output.copy_(run())


def prompts(lengths) -> list[list[int]]:
    return [[3 + (7 * n + i) % 300 for i in range(n)] for n in lengths]


def answers(llm: LLM, work: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(work, GREEDY)]


@pytest.mark.parametrize("quant", (None, "int4"))
def test_two_graphs_serve_every_prompt_length_batch_and_context(folder, quant):
    llm = LLM(str(folder), quant=quant, kernels="reference", num_blocks=300)
    work = [[prompt] for prompt in prompts([3, 1, 2, *range(4, 21)])]  # 20 prompt lengths alone
    work += [prompts(range(5, 5 + batch)) for batch in range(1, 9)]  # batches of 1 to 8
    plain = [answers(llm, batch) for batch in work]
    compiler = llm.engine.runner = CompiledRunner(llm.model, llm.kv, "eager", quiet=True)
    llm.scheduler.drop_cache()
    for prompt in prompts([1, 3]):
        answers(llm, [prompt])
    with torch.inference_mode():
        for rows in (1, 2, 5):  # as when the cost of steps is measured
            assert len(compiler.run(padding_batch(rows, "cpu"))) == rows
    assert compiler.graphs_compiled == 2
    assert [answers(llm, batch) for batch in work] == plain
    assert answers(llm, prompts([60]))[0] and compiler.graphs_compiled == 2
    long = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    llm.generate(prompts([40]), long)
    assert compiler.graphs_compiled == 2


def test_inductor_compiles_one_layer_for_all(tmp_path):
    folder = tiny.hf_folder(tmp_path / "m", "qwen3", num_hidden_layers=4)
    plain = LLM(str(folder), kernels="reference", num_blocks=50)
    compiled = LLM(str(folder), kernels="reference", num_blocks=50, compile=True)
    work = prompts([9, 4])
    assert answers(compiled, work) == answers(plain, work)
    stats = compiled.stats()
    assert stats["graphs_compiled"] == 2 and stats["compile_s"] > 0


@pytest.mark.parametrize("quant", ("int4", "int8"))
def test_captured_steps_answer_as_eager_ones(folder, native, quant):
    """A tape replays the native kernels of a decode step; every batch size is recorded once."""
    plain = LLM(str(folder), quant=quant, num_blocks=100)
    captured = LLM(str(folder), quant=quant, num_blocks=100, compile=True, max_num_seqs=4)
    work = prompts([9, 4, 17, 6, 2, 30])
    assert answers(captured, work) == answers(plain, work)
    assert answers(captured, work) == answers(plain, work)  # now with cached prefixes, on recorded steps
    assert captured.stats()["steps_captured"] == 4 and captured.stats()["graphs_compiled"] == 0


def test_padding_rows_of_a_bucket_touch_only_block_0(folder):
    llm = LLM(str(folder), kernels="reference", num_blocks=20, block_size=4)
    reference = answers(llm, prompts([5, 9, 3]))
    llm.scheduler.drop_cache()
    runner = llm.engine.runner = CapturedRunner(llm.runner, [1, 2, 8], llm.max_model_len // 4, replaying)
    requests = [llm.add(prompt, GREEDY) for prompt in prompts([5, 9, 3])]
    llm.engine.step()  # all prompts; every later step is three rows in a bucket of eight
    used = {block for request in requests for block in request.seq.block_table}
    free = [block for block in range(1, 21) if block not in used]
    before = llm.kv.data[:, :, free].clone()
    llm.engine.step()
    grown = {block for request in requests for block in request.seq.block_table}
    untouched = [i for i, block in enumerate(free) if block not in grown]
    assert torch.equal(llm.kv.data[:, :, free][:, :, untouched], before[:, :, untouched])
    while llm.engine.has_work:
        llm.engine.step()
    assert [request.answers[0].token_ids for request in requests] == reference
    assert list(runner.recorded) == [8]


def test_padding_rows_keep_nothing_of_an_earlier_batch(folder):
    llm = LLM(str(folder), kernels="reference", num_blocks=20, block_size=4)
    runner = CapturedRunner(llm.runner, [4], 8, replaying)

    def run(*slots):
        batch = padding_batch(len(slots), "cpu")
        batch.slot_mapping[:] = torch.tensor(slots)
        batch.context_lens[:], batch.block_tables[:] = 3, 10
        with torch.inference_mode():
            runner.run(batch)

    run(41, 42, 43)
    llm.kv.data[:, :, 10] = 7.0  # slots 40 to 43
    run(45)
    assert (llm.kv.data[:, :, 10] == 7.0).all() and not (llm.kv.data[:, :, 11] == 0).all()
    static, padding = runner.recorded[4][0], padding_batch(3, "cpu")
    for name in ("slot_mapping", "context_lens"):
        assert torch.equal(getattr(static, name)[1:], getattr(padding, name)), name
    assert static.block_tables[:, 0].tolist() == [10, 0, 0, 0]


def test_a_batch_beyond_the_last_bucket_is_computed_as_always(folder):
    llm = LLM(str(folder), kernels="reference", num_blocks=40)
    plain = answers(llm, prompts([5, 9, 3]))

    def never(run):
        raise AssertionError("nothing to capture")

    llm.engine.runner = CapturedRunner(llm.runner, [1, 2], 32, never)
    llm.scheduler.drop_cache()
    assert answers(llm, prompts([5, 9, 3])) == plain


def test_a_tape_refuses_what_it_could_not_replay(folder, native):
    llm = LLM(str(folder), num_blocks=20)  # dense weights: their products are torch's own
    kv = KVCache(2, 4, 16, 2, 16, torch.float32)
    with pytest.raises(ValueError, match="cannot be part of a tape"):
        CapturedRunner(ModelRunner(llm.model, kv), [1], 4, tape_capture).record(1)


def test_steps_are_captured_on_a_gpu_only_where_no_kernel_waits_for_it(folder, monkeypatch):
    llm = LLM(str(folder), kernels="reference", num_blocks=20)
    llm.options = dataclasses.replace(llm.options, compile=True)
    # the reference attention asks how long the contexts are
    assert isinstance(llm._runner(llm.model, llm.kv), CompiledRunner)
    monkeypatch.setattr(kernels, "_backend", "triton")
    runner = llm._runner(llm.model, llm.kv)
    assert runner.capture is cuda_capture and runner.buckets == [1, 2, 4, 8, 16, 32]


def test_without_a_cpp_compiler_layers_run_uncompiled_and_say_so(tmp_path, capsys):
    # With biases something is left to fuse, a bias and the residual; without, a layer is products and kernels only.
    folder = tiny.hf_folder(tmp_path / "m", "llama", attention_bias=True, mlp_bias=True)
    plain = LLM(str(folder), kernels="reference", num_blocks=50)
    with torch._inductor.config.patch({"cpp.cxx": (None, "/nowhere/g++"), "force_disable_caches": True}):
        compiled = LLM(str(folder), kernels="reference", num_blocks=50, compile=True)
    assert "running the layer uncompiled instead" in capsys.readouterr().err
    work = prompts([9, 4])
    assert answers(compiled, work) == answers(plain, work)
