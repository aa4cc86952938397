"""Beam search over forks equals a beam search that recomputes everything with naive.py."""

import math

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_rows import normal
from test_engine import CONTEXT, assert_all_free, drain, make_engine, prompts_of, run, world

import naive
from beam import beam_step
from sampling import SamplingParams


def naive_beams(arch: str, prompt: list[int], width: int, max_tokens: int, stop_ids: set[int]) -> list[tuple]:
    """[(mean log-probability, tokens)] of all finished answers, best first; no fork, no cache, no early end."""
    ckpt, weights, _, _ = world(arch)
    live, finished = [(0.0, [])], []
    for length in range(1, max_tokens + 1):
        candidates = []
        for total, tokens in live:
            logprobs = naive.forward(weights, ckpt.config, prompt + tokens)[-1].double().log_softmax(-1)
            candidates += [(total + float(p), [*tokens, t]) for t, p in enumerate(logprobs)]
        candidates = sorted(candidates, key=lambda c: -c[0])[: 2 * width]
        ended = [c for c in candidates[:width] if c[1][-1] in stop_ids]
        live = [c for c in candidates if c[1][-1] not in stop_ids][:width]
        finished += [(total / length, tokens) for total, tokens in ended]
    finished += [(total / max_tokens, tokens) for total, tokens in live]
    return sorted(finished, key=lambda c: -c[0])


@hypothesis.settings(max_examples=40)
@hypothesis.given(st.data())
def test_beams_equal_the_naive_search(data):
    width = data.draw(st.integers(1, 4))
    switches = {
        "arch": data.draw(st.sampled_from(["llama", "mistral"])),
        "block_size": data.draw(st.sampled_from([1, 2, 4])),
        "max_num_seqs": data.draw(st.sampled_from([4, 5, 32])),
        "max_num_batched_tokens": data.draw(st.sampled_from([1, 3, 64])),
        "prefix_cache": data.draw(st.sampled_from(["radix", "hash", "none"])),
        "preemption": data.draw(st.sampled_from(["recompute", "swap"])),
    }
    max_tokens = data.draw(st.integers(1, 5))
    stops = data.draw(st.sampled_from([[], list(range(3, 60))]))
    params = SamplingParams(
        beam_width=width, n=width, temperature=0, max_tokens=max_tokens, ignore_eos=True, stop_token_ids=stops
    )
    # Room for one search, barely: two of them must take turns.
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    needed = width * -(-(max(lengths) + max_tokens) // switches["block_size"])
    switches["num_blocks"] = needed + data.draw(st.sampled_from([0, 3, 100]))
    prompts = prompts_of(*lengths)
    outputs = run(make_engine(**switches), [(prompt, params) for prompt in prompts])
    for prompt, output in zip(prompts, outputs, strict=True):
        truth = naive_beams(switches["arch"], prompt, width, max_tokens, set(stops))[:width]
        assert [answer.token_ids for answer in output.outputs] == [tokens for _, tokens in truth]


@pytest.mark.parametrize("preemption", ("recompute", "swap"))
@pytest.mark.parametrize("tight", ({"max_num_seqs": 4}, {"max_num_seqs": 5, "num_blocks": 24}, {"num_blocks": 21}))
def test_searches_that_wait_for_each_other_go_on(tight, preemption):
    """Beams of one search hold batch slots and blocks that beams of another need: the older search gets them."""
    params = SamplingParams(beam_width=4, n=4, temperature=0, max_tokens=10, ignore_eos=True)
    prompts = prompts_of(9, 10, 5)
    outputs = run(make_engine(preemption=preemption, prefix_cache="none", **tight), [(p, params) for p in prompts])
    for prompt, output in zip(prompts, outputs, strict=True):
        (alone,) = run(make_engine(), [(prompt, params)])
        assert [a.token_ids for a in output.outputs] == [a.token_ids for a in alone.outputs]


def test_beams_beside_other_requests_and_aborted():
    engine = make_engine(max_num_seqs=4, num_blocks=40)
    params = SamplingParams(beam_width=3, n=2, temperature=0, max_tokens=10, ignore_eos=True, logprobs=1)
    first, second = (engine.add(prompt, params) for prompt in prompts_of(9, 10))
    for _ in range(6):
        engine.step()
    engine.abort(first)
    drain(engine)
    assert all(choice.finish_reason == "abort" for choice in first.answers)
    output = second.output()
    assert len(output.outputs) == 2 and all(len(a.logprobs) == 10 for a in output.outputs)
    assert_all_free(engine)


def test_searches_that_cannot_run_side_by_side_are_refused():
    engine = make_engine(max_num_seqs=4, num_blocks=40)
    for wrong in ({"beam_width": 5}, {"beam_width": 4, "max_tokens": CONTEXT}):
        with pytest.raises(ValueError, match="beam_width"):
            engine.add([5, 6, 7], SamplingParams(temperature=0, **wrong))
    with pytest.raises(ValueError, match="stop"):
        engine.add([5, 6, 7], SamplingParams(temperature=0, beam_width=2, stop=["x"]))
    assert not engine.has_work


def test_a_search_for_nothing_has_as_many_answers_as_it_was_asked_for():
    engine = make_engine(max_num_seqs=4, num_blocks=40)
    (output,) = run(engine, [([5, 6, 7], SamplingParams(beam_width=3, n=2, temperature=0, max_tokens=0))])
    answers = [(a.index, a.token_ids, a.finish_reason) for a in output.outputs]
    assert answers == [(0, [], "length"), (1, [], "length")]


@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 12), st.integers(0, 1000), st.booleans())
def test_beam_step_is_brute_force(beams, vocab, n, seed, ties):
    logits = normal(beams, vocab, seed)
    logprobs = logits.round() if ties else torch.log_softmax(logits, -1)
    logprobs[seed % beams, 0] = -math.inf
    scores = [-float(b % 2) for b in range(beams)]
    every = [(b, v, scores[b] + logprobs[b, v].item()) for b in range(beams) for v in range(vocab)]
    expected = sorted((c for c in every if c[2] > -math.inf), key=lambda c: (-c[2], c[0], c[1]))[:n]
    assert beam_step(logprobs, scores, n) == expected
