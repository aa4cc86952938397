"""The library's front door: what LLM and its methods refuse, before anything is queued."""

import re

import pytest
import tiny
import torch

from generate import LLM, choose_device
from sampling import SamplingParams

ONE = SamplingParams(temperature=0, max_tokens=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tiny.hf_folder(tmp_path_factory.mktemp("m") / "m", "llama"))


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(folder, kernels="reference", num_blocks=40)


@pytest.mark.parametrize(
    "argument",
    [
        {"block_size": "4"},
        {"block_size": True},
        {"num_blocks": 2.5},
        {"max_num_seqs": 1.5},
        {"max_num_batched_tokens": 2.5},
        {"max_model_len": 100.5},
        {"kv_memory": "1G"},
        {"threads": 1.5},
        {"seed": "x"},
        {"speculate": 5},
        {"num_speculative_tokens": 1.5},
        {"device": 0},
        {"compile": "yes"},
        {"model": None},
    ],
)
def test_arguments_of_a_wrong_type_are_refused_by_name(folder, argument):
    ((name, value),) = argument.items()
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}: must be")):
        LLM(**({"model": folder} | argument))


@pytest.mark.parametrize("prompts", [b"the cat", None, 5, {"prompt": "x"}, [b"the"], [None], [5.0], ["a", 3]])
def test_what_is_no_prompt_is_refused(llm, prompts):
    with pytest.raises(ValueError, match="prompt"):
        llm.generate(prompts, ONE)
    assert llm.stats()["live"] == 0 and not llm.engine.requests


@pytest.mark.parametrize("prompts", ["", [""], [[]], ["the cat", ""]])
def test_an_empty_prompt_fails_the_call_and_nothing_stays(llm, prompts):
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.generate(prompts, ONE)
    assert llm.stats()["live"] == 0 and not llm.engine.requests
    assert llm.generate([], ONE) == []


def test_parameters_come_one_for_all_or_one_for_each(llm):
    both = llm.generate(("the cat", [3, 4]), (ONE, ONE))
    assert [len(output.outputs[0].token_ids) for output in both] == [1, 1]
    for params in ([], (ONE,), [ONE, None], {"max_tokens": 2}):
        with pytest.raises(ValueError, match="SamplingParams"):
            llm.generate(["the cat", "the dog"], params)


def test_a_gpu_without_a_number_is_the_current_one_and_one_with_a_number_becomes_it(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", chosen.append, raising=False)
    for name, device, now in (("auto", "cuda", []), ("cuda", "cuda", []), ("cuda:1", "cuda:1", [1])):
        assert choose_device(name) == torch.device(device) and chosen == now
    with pytest.raises(ValueError, match="device='cuda:2'"):
        choose_device("cuda:2")


def test_streams_that_are_open_at_once_lose_nothing_to_each_other_or_to_other_calls(llm):
    prompts, params = ("the cat", "the dog sat", "a"), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts]
    streams = [llm.stream(prompt, params) for prompt in prompts]
    read = [next(stream).token_ids[:] for stream in streams]
    closed = llm.stream("the cat", params)
    next(closed)
    closed.close()
    assert llm.generate(prompts[0], params)[0].outputs[0].token_ids == alone[0]
    for found, stream in zip(read, streams, strict=True):
        found += [token for delta in stream for token in delta.token_ids]
    assert read == alone and not llm.streams


@pytest.mark.parametrize("params", [{}, 0, False, ""])
def test_only_a_missing_params_is_the_default(llm, params):
    for call in (llm.generate, llm.chat, lambda *given: next(llm.stream(*given))):
        prompt = [{"role": "user", "content": "the cat"}] if call == llm.chat else "the cat"
        with pytest.raises(ValueError, match="must be SamplingParams"):
            call(prompt, params)


@pytest.mark.parametrize("option", [{"priority": "high"}, {"priority": None}, {"priority": True}, {"namespace": [1]}])
def test_options_that_cannot_be_ordered_or_looked_up_harm_nobody(folder, option):
    llm = LLM(folder, kernels="reference", num_blocks=40, policy="priority", max_num_seqs=1)
    others = [llm.add([3, 4, 5], ONE, priority=priority) for priority in (2, -1)]
    ((name, _),) = option.items()
    with pytest.raises(ValueError, match=f"{name}="):
        llm.add([3, 4, 5], ONE, **option)
    assert len(llm.engine.requests) == len(llm.scheduler.sequences) == 2
    while llm.engine.has_work:
        llm.engine.step()
    assert [other.answers[0].finish_reason for other in others] == ["length", "length"]


UNKNOWN = {"dtype": "int3", "device": "quantum", "prefix_cache": "tree", "policy": "best", "kernels": "fast"}
UNKNOWN |= {"activations": "int4", "preemption": "drop", "batching": "none", "reserve": "all", "verify": "no"}
LIMITS = ("max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks", "num_speculative_tokens")


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        *((name, value, "is not known; (choose one of|use) .") for name, value in UNKNOWN.items()),
        *((name, value, "must be at least 1") for name in LIMITS for value in (0, -5)),
        *(("threads", value, "must be from 1 to 1024") for value in (0, -1, 1025, 10**9)),
    ],
)
def test_bad_options_are_named_before_a_model_is_loaded(name, value, allowed):
    with pytest.raises(ValueError, match=f"{name}={value!r}:? {allowed}"):
        LLM("no/such/model", **{name: value})


def test_options_that_a_model_cannot_have_are_named(folder):
    for name, value in (("quant", "int5"), ("max_model_len", 1_000_000)):
        with pytest.raises(ValueError, match=rf"{name}.*{value}|{value}.*{name}"):
            LLM(folder, kernels="reference", num_blocks=20, **{name: value})


def test_a_model_whose_first_step_fails_is_not_taken_for_ready(folder, monkeypatch):
    monkeypatch.setattr("compiled.CompiledRunner.run", lambda self, batch: 1 / 0)
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        LLM(folder, kernels="reference", num_blocks=40, compile=True)
