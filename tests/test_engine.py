"""The ladder: whatever is switched on and whoever else is running, each request gets what naive.py gives it alone."""

import contextlib
import dataclasses
import functools
import json
import threading
from concurrent.futures import Future

import hypothesis
import pytest
import tiny
import torch
from hypothesis import strategies as st
from test_naive import weights_of

import generate
import kernels
import naive
from benchmarks.past import scheduler_class
from checkpoint import open_checkpoint
from compiled import ModelRunner
from drafting.budget import Speculator
from drafting.draft_model import DraftModel, first_layers
from drafting.head import DraftHead, HeadProposer, head_shapes
from engine import Engine, lay_out
from kv_paged import BlockPool, KVCache
from model import Transformer
from overlap import OverlapEngine
from radix import PREFIX_CACHES
from sampling import SamplerState, SamplingParams, sample
from scheduler import Sequence, Step
from speculative import NgramProposer
from structured import Guides
from tokenizer import Tokenizer

CONTEXT = 64
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@functools.cache
def world(arch: str = "llama"):
    """One tiny model for all tests: (checkpoint, its weights, the Transformer, the tokenizer)."""
    import tempfile

    overrides = {"sliding_window": 5} if arch == "mistral" else {}
    folder = tiny.hf_folder(tempfile.mkdtemp() + "/m", arch, **overrides)
    ckpt = open_checkpoint(folder)
    return ckpt, weights_of(ckpt), Transformer(ckpt, max_model_len=CONTEXT), Tokenizer.from_checkpoint(ckpt)


@functools.cache
def stranger() -> Transformer:
    """A draft model that is seldom right: other weights, other shape, the same tokens but for padding."""
    import tempfile

    folder = tiny.hf_folder(tempfile.mkdtemp() + "/m", "qwen3", seed=9, num_hidden_layers=1, vocab_size=352)
    return Transformer(open_checkpoint(folder), max_model_len=CONTEXT)


@functools.cache
def random_head(arch: str) -> DraftHead:
    """A head that is sure of itself and seldom right."""
    model, draw = world(arch)[2], torch.Generator().manual_seed(3)
    shapes = head_shapes(model.config.hidden_size, 16, 40)
    weights = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items() if name != "kept"}
    return DraftHead(weights | {"kept": torch.arange(3, 323, 8)[:40] % 320}, model)


def make_engine(
    arch="llama",
    block_size=4,
    num_blocks=200,
    prefix_cache="radix",
    jump_forward=True,
    speculate=None,
    most=3,
    step_cost=None,
    rejection=False,
    overlap=False,
    batching="continuous",
    reserve="paged",
    **switches,
) -> Engine:
    """speculate: "ngram", "head", "self:1", "copy" (of the target, as its draft) or "stranger"; `most` guesses."""
    ckpt, _, model, tokenizer = world(arch)

    def pages(c, layers: int) -> KVCache:
        kv = KVCache(layers, num_blocks + 1, block_size, c.num_kv_heads, c.head_dim, torch.float32)
        kv.data[:, :, 1:] = float("nan")  # what was never written must never be read
        return kv

    pool = BlockPool(num_blocks + 1, block_size)
    kv = pages(ckpt.config, ckpt.config.num_layers)
    switches = {"max_model_len": CONTEXT} | switches
    scheduler = scheduler_class(batching, reserve)(pool, PREFIX_CACHES[prefix_cache](pool), **switches)
    eos = frozenset(ckpt.config.eos_token_ids) | frozenset(tokenizer.eos_token_ids)
    kind = OverlapEngine if overlap else Engine
    engine = kind(ModelRunner(model, kv), scheduler, tokenizer, eos, jump_forward=jump_forward)
    if speculate == "ngram":
        engine.speculator = Speculator(NgramProposer(3, 1), most, step_cost)
    elif speculate == "head":
        engine.speculator = Speculator(HeadProposer(random_head(arch), engine), most, step_cost)
    elif speculate:
        draft = {"copy": lambda: model, "stranger": stranger, "self:1": lambda: first_layers(model, 1)}[speculate]()
        runner = ModelRunner(draft, pages(draft.config, len(draft.layers)))
        proposer = DraftModel(runner, ckpt.config.vocab_size, rejection, 40)
        engine.speculator = Speculator(proposer, most, step_cost)
    return engine


def run(engine: Engine, requests: list, arrivals: list[int] | None = None) -> list:
    """Add (prompt, params) pairs at their steps and run to the end. Checks the pool's balance after every step."""
    arrivals = arrivals or [0] * len(requests)
    added: list = [None] * len(requests)
    clock, speculating = 0, engine.speculator is not None
    while engine.has_work or None in added:
        for i, arrival in enumerate(arrivals):
            if arrival <= clock and added[i] is None:
                added[i] = engine.add(*requests[i])
        engine.step()
        stats = engine.scheduler.stats()
        assert stats["free"] + stats["cached"] + stats["live"] == stats["total"], stats
        clock += 1
        assert clock < 5000, "no progress"
    assert speculating == (engine.speculator is not None), "the speculator failed"
    assert_all_free(engine)
    return [request.output() for request in added]


def drain(engine: Engine) -> list:
    """Step until nothing is left to do; all deltas."""
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    return deltas


def answer_of(engine: Engine, prompt: list[int], params: SamplingParams, **options):
    """One request run to its end: (the request, its first answer)."""
    request = engine.add(prompt, params, **options)
    drain(engine)
    return request, request.output().outputs[0]


def assert_all_free(engine: Engine) -> None:
    stats = engine.scheduler.stats()
    assert stats["live"] == 0 and not engine.requests
    if engine.speculator is not None and isinstance(engine.speculator.proposer, DraftModel):
        proposer = engine.speculator.proposer
        proposer.propose([], [])  # lets go of what has ended
        balance = proposer.tables.balance([])
        assert balance["live"] == 0 and balance["free"] + balance["cached"] == balance["total"]
    engine.scheduler.drop_cache()
    assert engine.scheduler.stats()["free"] == stats["total"]


@functools.cache
def naive_answer(
    arch: str, prompt: tuple[int, ...], params_key: tuple, choice: int, jump: bool, noise: int = 0
) -> list[int]:
    """What naive.py answers; with `noise`, a seed, its logits are off by about 1e-5."""
    draw = torch.Generator().manual_seed(noise)
    ckpt, weights, _, tokenizer = world(arch)
    fields = dict(params_key)
    params = SamplingParams(**fields | {"logit_bias": dict(fields["logit_bias"])})
    eos = (*ckpt.config.eos_token_ids, *tokenizer.eos_token_ids)
    state = SamplerState(params, prompt, choice, params.seed, () if params.ignore_eos else eos)
    start = Guides(tokenizer, 320, eos, jump).answer(params, list(prompt))
    guide, ended = start and start.fork(), []

    def pick(logits):
        nonlocal guide
        if noise:
            logits = logits + 1e-5 * torch.randn(len(logits), generator=draw)
        if guide and guide.forced:
            token = guide.forced[0]
        else:
            token = sample(logits[None], [state], [guide and guide.mask()])[0].token
        state.commit(token)
        if guide and not ended:
            guide.commit(token)
            if guide.is_complete:
                ended.append(state.n_output)
                guide = start.fork()  # whatever follows is cut off below
        return token

    limit = min(params.max_tokens, CONTEXT - len(prompt))
    stops = (*(() if params.ignore_eos else eos), *params.stop_token_ids)
    ids = naive.generate(weights, ckpt.config, list(prompt), limit, pick, stops)
    return ids[: ended[0]] if ended else ids


def expected(
    arch: str, prompt: list[int], params: SamplingParams, choice: int = 0, jump: bool = True, noise: int = 0
) -> list[int]:
    fields = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
    fields["json_schema"] = params.json_schema and json.dumps(params.json_schema)
    fields["logit_bias"] = tuple(params.logit_bias.items())
    key = tuple(fields.items())
    return naive_answer(arch, tuple(prompt), key, choice, jump, noise)


# -- the ladder --------------------------------------------------------------------------------------------------


STRUCTURES = (
    {"regex": "the [a-f]{2,5}(, on the mat)*"},
    {"regex": "[^x]*"},
    {"choice": ["a test of the engine", "a test", "b"]},
    {"json_schema": {"properties": {"name": {"type": "boolean"}}, "required": ["name"], "additionalProperties": False}},
)


@st.composite
def workloads(draw):
    """Requests whose prompts share beginnings now and then, in mixed company."""
    stems = draw(st.lists(st.lists(st.integers(3, 8), min_size=1, max_size=20), min_size=1, max_size=2))
    requests = []
    for _ in range(draw(st.integers(1, 5))):
        prompt = draw(st.sampled_from([[], *stems])) + draw(st.lists(st.integers(3, 8), min_size=1, max_size=6))
        params = SamplingParams(
            n=draw(st.sampled_from([1, 1, 1, 2, 3])),
            temperature=draw(st.sampled_from([0, 0, 0.7])),
            top_p=draw(st.sampled_from([1.0, 0.9])),
            typical_p=draw(st.sampled_from([1.0, 1.0, 0.8])),
            seed=draw(st.integers(0, 3)),
            max_tokens=draw(st.integers(1, 10)),
            frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.5])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
            ignore_eos=draw(st.booleans()),
            stop_token_ids=draw(st.sampled_from([[], list(range(100, 160))])),
            **draw(st.sampled_from([{}, {}, *STRUCTURES])),
        )
        requests.append((prompt, params))
    return requests, [draw(st.integers(0, 6)) for _ in requests]


@st.composite
def switches(draw):
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    chosen = {
        "arch": draw(st.sampled_from(["llama", "llama", "mistral", "gemma2", "smollm3", "gpt2"])),
        "block_size": block_size,
        "num_blocks": -(-draw(st.sampled_from([38, 45, 60, 400])) // block_size),  # 38 tokens hold any one request
        "prefix_cache": draw(st.sampled_from(["radix", "hash", "none"])),
        "max_num_seqs": draw(st.sampled_from([1, 2, 3, 32])),
        "max_num_batched_tokens": draw(st.sampled_from([1, 3, 8, 64, 512])),
        "policy": draw(st.sampled_from(["fcfs", "lpm", "priority"])),
        "preemption": draw(st.sampled_from(["recompute", "swap"])),
        "batching": draw(st.sampled_from(["continuous", "continuous", "static"])),
        "jump_forward": draw(st.booleans()),
        "overlap": draw(st.booleans()),
        "kernels": draw(st.sampled_from(["reference", "native"])),
        "speculate": draw(st.sampled_from([None, "ngram", "head", "copy", "stranger", "self:1"])),
    }
    if chosen["speculate"]:
        chosen["most"] = draw(st.integers(1, 5))
        chosen["step_cost"] = draw(st.sampled_from([None, lambda rows: 10.0 + rows, lambda rows: 1.0 + rows]))
    if chosen["max_num_batched_tokens"] >= CONTEXT:
        chosen["chunked"] = draw(st.booleans())
    if chosen["prefix_cache"] == "none":
        chosen["reserve"] = draw(st.sampled_from(["paged", "contiguous"]))
    return chosen


@hypothesis.settings(max_examples=max(300, hypothesis.settings().max_examples))
@hypothesis.given(workloads(), switches())
def test_ladder(workload, chosen):
    requests, arrivals = workload
    with backend(chosen.pop("kernels")):
        outputs = run(make_engine(**chosen), requests, arrivals)
    for (prompt, params), output in zip(requests, outputs, strict=True):
        for choice, answer in enumerate(output.outputs):
            wanted = expected(chosen["arch"], prompt, params, choice, chosen["jump_forward"])
            assert answer.token_ids == wanted or a_tie(
                chosen["arch"], prompt, params, choice, chosen["jump_forward"], answer.token_ids
            ), (prompt, params, choice)
            assert answer.finish_reason in ("stop", "length")


@contextlib.contextmanager
def backend(name: str):
    before = kernels.backend()
    assert kernels.set_backend(name) == name
    try:
        yield
    finally:
        kernels.set_backend(before)


def a_tie(arch: str, prompt: list[int], params: SamplingParams, choice: int, jump: bool, got: list[int]) -> bool:
    """Whether rounding alone decides between two answers: a drawn number on the very border between two tokens, or two
    equal logits. Then noise no larger than what two ways of adding may differ by makes naive.py give the other."""
    return any(expected(arch, prompt, params, choice, jump, noise) == got for noise in range(1, 101))


def test_a_tie_is_told_from_a_mistake():
    prompt, params = prompts_of(6)[0], SamplingParams(temperature=0.7, seed=1, max_tokens=1, ignore_eos=True)
    (token,) = expected("llama", prompt, params)
    assert not a_tie("llama", prompt, params, 0, True, [token + 1])
    ckpt, weights, _, _ = world()
    logits = naive.forward(weights, ckpt.config, prompt)[-1]
    first, second = logits.topk(2).indices.tolist()
    greedy = dataclasses.replace(params, temperature=0, logit_bias={second: float(logits[first] - logits[second])})
    assert all(a_tie("llama", prompt, greedy, 0, True, [token]) for token in (first, second))


# -- field cases -------------------------------------------------------------------------------------------------


def prompts_of(*lengths: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(7)
    return [torch.randint(3, 300, (n,), generator=draw).tolist() for n in lengths]


@pytest.mark.parametrize("overlap", (False, True))
@pytest.mark.parametrize("stage", ("waiting", "prefilling", "decoding", "forked"))
def test_abort_gives_every_block_back(stage, overlap):
    engine = make_engine(max_num_batched_tokens=4, max_num_seqs=4, prefix_cache="none", overlap=overlap)
    first = engine.add(prompts_of(20)[0], dataclasses.replace(GREEDY, max_tokens=40, n=3 if stage == "forked" else 1))
    steps = {"waiting": 0, "prefilling": 2, "decoding": 7, "forked": 7}[stage]
    for _ in range(steps):
        engine.step()
    other = engine.add(prompts_of(5)[0], GREEDY)
    (ended, *_) = engine.abort(first)
    assert ended.finish_reason == "abort"
    engine.abort(first)  # once more does nothing
    drain(engine)
    assert other.output().outputs[0].token_ids == expected("llama", prompts_of(5)[0], GREEDY)
    assert engine.abort(other) == [], "after the end there is nothing to abort"
    assert_all_free(engine)


@pytest.mark.parametrize("overlap", (False, True))
@pytest.mark.parametrize("broken", ("run", "schedule"))
def test_a_step_or_a_plan_that_raises_ends_its_requests_and_the_engine_serves_on(monkeypatch, overlap, broken):
    engine = make_engine(overlap=overlap, max_num_batched_tokens=8)
    requests = [engine.add(p, dataclasses.replace(GREEDY, n=2)) for p in prompts_of(5, 6, 7)]
    for _ in range(5):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner if broken == "run" else engine.scheduler, broken, lambda *args: 1 / 0)
        deltas = []
        while not deltas:  # with overlap a step that was planned before may be on its way
            deltas = [d for d in engine.step() if d.finish_reason]
    assert {d.finish_reason for d in deltas} == {"error"} and all("ZeroDivisionError" in d.error for d in deltas)
    assert all(request.finished for request in requests) and not engine.has_work
    (output,) = run(engine, [(prompts_of(5)[0], GREEDY)])
    assert output.outputs[0].token_ids == expected("llama", prompts_of(5)[0], GREEDY)


@pytest.mark.parametrize("broken", ("choose", "answers"))
def test_a_beam_search_that_raises_leaves_the_others(monkeypatch, capsys, broken):
    engine = make_engine()
    beams = engine.add(prompts_of(6)[0], SamplingParams(beam_width=3, n=2, temperature=0, max_tokens=3))
    other = engine.add(prompts_of(5)[0], GREEDY)
    engine.step()
    monkeypatch.setattr(beams.search, broken, lambda: 1 / 0)
    while not beams.finished:
        deltas = engine.step()
    assert all("ZeroDivisionError" in answer.error for answer in beams.output().outputs)
    assert any(d.request is other and d.token_ids for d in deltas), "the others' tokens of this step were lost"
    assert "1 request(s) failed" in capsys.readouterr().err
    drain(engine)
    assert other.output().outputs[0].token_ids == expected("llama", prompts_of(5)[0], GREEDY)
    assert_all_free(engine)


def test_a_plan_that_raises_waits_for_the_step_on_its_way(monkeypatch):
    engine = make_engine(overlap=True)
    engine.add(prompts_of(5)[0], GREEDY)
    while engine.flight is None:
        engine.step()
    engine.flight.logits.result()
    gate, run_model = threading.Event(), engine.runner.run
    monkeypatch.setattr(engine.runner, "run", lambda batch: gate.wait(60) and run_model(batch))
    engine.step()  # launches a step that waits at the gate
    flight, discard = engine.flight, engine.discard
    monkeypatch.setattr(engine, "discard", lambda: (gate.set(), discard()))
    monkeypatch.setattr(engine.scheduler, "schedule", lambda: 1 / 0)
    try:
        (delta,) = engine.step()
        assert delta.finish_reason == "error" and flight.logits.done(), "its blocks were given away while it ran"
    finally:
        gate.set()


def test_who_was_planned_behind_a_step_that_raises_is_told(monkeypatch):
    engine = make_engine(overlap=True, max_num_batched_tokens=3)
    short = dataclasses.replace(GREEDY, n=2, max_tokens=3)
    requests = [engine.add([5 + i], params) for i, params in enumerate((short, GREEDY, GREEDY))]
    plan_next, planned = engine.plan_next, []

    def spy(flight):
        following = plan_next(flight)
        entries = following.step.entries if following else []
        others = {seq.id for seq, _ in entries} - {answer.seq.id for answer in flight.answers}
        planned.extend(others)
        if others:
            flight.logits = Future()
            flight.logits.set_exception(ZeroDivisionError())
        return following

    monkeypatch.setattr(engine, "plan_next", spy)
    deltas = []
    while engine.has_work and not planned:
        deltas = engine.step()
    assert planned, "nobody outside the step was planned behind it"
    assert {d.request for d in deltas if d.finish_reason == "error"} == set(requests)
    assert all(request.finished for request in requests)
    assert_all_free(engine)


def test_a_text_that_cannot_be_made_ends_its_own_request(monkeypatch):
    engine = make_engine()
    prompts = prompts_of(5, 6)
    broken, other = (engine.add(p, GREEDY) for p in prompts)
    for name in ("add", "finish"):  # at every call: at the end as well
        monkeypatch.setattr(broken.answers[0].detokenizer, name, lambda *args: 1 / 0)
    deltas = drain(engine)
    assert [d.request for d in deltas if d.finish_reason == "error"] == [broken]
    assert other.output().outputs[0].token_ids == expected("llama", prompts[1], GREEDY)
    assert_all_free(engine)


@pytest.mark.parametrize("scored", (None, 1))  # the first row is that of the answer, or of the prompt's second token
def test_a_row_that_is_not_finite_ends_its_own_request(monkeypatch, scored):
    engine = make_engine()
    prompts, run_model = prompts_of(5, 6), engine.runner.run
    bad = engine.add(prompts[0], dataclasses.replace(GREEDY, prompt_logprobs=scored))
    other = engine.add(prompts[1], GREEDY)

    def first_row_is_bad(batch):
        logits = run_model(batch)
        logits[0] = float("nan")
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", first_row_is_bad)
        deltas = engine.step()
    assert [d.request for d in deltas if d.finish_reason == "error"] == [bad] and bad.finished
    drain(engine)
    answer = bad.output().outputs[0]
    assert "NaN" in answer.error and answer.token_ids == []
    assert other.output().outputs[0].token_ids == expected("llama", prompts[1], GREEDY)
    assert_all_free(engine)


@pytest.mark.parametrize("overlap", (False, True))
def test_an_end_is_told_though_the_step_fails_behind_it(monkeypatch, overlap):
    engine = make_engine(overlap=overlap)
    short = engine.add(prompts_of(5)[0], dataclasses.replace(GREEDY, max_tokens=4))
    other = engine.add(prompts_of(6)[0], GREEDY)
    finish = engine.scheduler.finish

    def ends_badly(seq, keep=True):
        finish(seq, keep)
        return seq.answer.request is other or 1 / 0

    monkeypatch.setattr(engine.scheduler, "finish", ends_badly)
    deltas = drain(engine)
    assert [(d.request, d.finish_reason) for d in deltas if d.finish_reason] == [(short, "length"), (other, "error")]
    assert short.finished and not engine.requests


@pytest.mark.parametrize("overlap", (False, True))
def test_whichever_thread_runs_the_model_has_chosen_its_gpu(monkeypatch, overlap):
    engine = make_engine(overlap=overlap)
    engine.device, run_model, chosen, ran = torch.device("cuda:1"), engine.runner.run, {}, set()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.update({threading.get_ident(): str(device)}))

    def watched(batch):
        ran.add((threading.get_ident(), chosen.get(threading.get_ident())))
        return run_model(batch)

    engine.runner.run = watched
    serve = threading.Thread(target=lambda: run(engine, [(prompts_of(5)[0], GREEDY)]))
    serve.start()
    serve.join()
    assert {device for _, device in ran} == {"cuda:1"} and len(ran) == 1 + overlap
    assert threading.get_ident() not in chosen, "of this thread nothing was asked"


def test_neither_trace_nor_speculator_can_end_a_request(monkeypatch):
    engine = make_engine(speculate="copy")
    engine.observers.append(lambda step: 1 / 0)
    monkeypatch.setattr(engine.speculator, "observe", lambda choice: 1 / 0)
    monkeypatch.setattr("sys.stderr", None)  # and nobody listens
    request, answer = answer_of(engine, prompts_of(5)[0], GREEDY)
    assert answer.token_ids == expected("llama", prompts_of(5)[0], GREEDY)
    assert not engine.observers and engine.speculator is None
    assert_all_free(engine)


@pytest.mark.parametrize("preemption", ("recompute", "swap"))
def test_preemption_changes_nothing_a_user_sees(preemption):
    params = dataclasses.replace(GREEDY, temperature=0.9, seed=3, max_tokens=12, frequency_penalty=0.7, stop=["\x00"])
    requests = [(p, dataclasses.replace(params, logprobs=2, prompt_logprobs=0)) for p in prompts_of(10, 11)]
    roomy = run(make_engine(), requests)
    engine = make_engine(
        block_size=2, num_blocks=14, max_num_batched_tokens=4, preemption=preemption, prefix_cache="none"
    )
    streams: dict[int, str] = {}
    added = [engine.add(*request) for request in requests]
    while engine.has_work:
        for delta in engine.step():
            streams[delta.request.id] = streams.get(delta.request.id, "") + delta.text
    assert engine.scheduler.stats()["preemptions"] > 0
    for request, other in zip(added, roomy, strict=True):
        got, wanted = request.output().outputs[0], other.outputs[0]
        assert (got.token_ids, got.text, got.finish_reason) == (wanted.token_ids, wanted.text, wanted.finish_reason)
        assert streams[request.id] == got.text and len(got.logprobs) == 12
        scores = [*got.logprobs, *request.output().prompt_logprobs[1:]]
        for a, b in zip(scores, [*wanted.logprobs, *other.prompt_logprobs[1:]], strict=True):
            assert a.token == b.token and a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_namespaces_do_not_share_prefixes():
    prompt, hits = prompts_of(12)[0], []
    engine, salt = make_engine(), ("salt", "X")
    for namespace in (None, ("lora", "X"), salt, salt, None, 1, True, 1.0, 1):
        request, _ = answer_of(engine, prompt, GREEDY, namespace=namespace)
        hits.append(request.num_cached_tokens)
    assert hits == [0, 0, 0, 8, 8, 0, 0, 0, 8]


@pytest.mark.parametrize("cache", ("radix", "hash"))
def test_overwritten_prefix_is_not_found_again(cache):
    a, b = prompts_of(9, 10)
    engine = make_engine(num_blocks=3, prefix_cache=cache)
    params = dataclasses.replace(GREEDY, max_tokens=3)
    for prompt in (a, b, a):
        request, answer = answer_of(engine, prompt, params)
        assert answer.token_ids == expected("llama", prompt, params)
        assert request.num_cached_tokens == 0


def test_prompt_logprobs_are_those_of_a_cold_run():
    ckpt, weights, _, _ = world()
    prompt = prompts_of(33)[0]
    params = dataclasses.replace(GREEDY, prompt_logprobs=2, max_tokens=2)
    truth = naive.forward(weights, ckpt.config, prompt).log_softmax(-1)
    engine = make_engine(block_size=16, max_num_batched_tokens=5)
    for warm in (False, True):
        if warm:  # now the prompt's blocks are cached
            answer_of(engine, prompt, GREEDY)
        scores = answer_of(engine, prompt, params)[0].output().prompt_logprobs
        assert scores[0] is None and len(scores) == 33
        for p, score in enumerate(scores[1:]):
            assert score.token == prompt[p + 1] and len(score.top) == 2
            assert score.logprob == pytest.approx(float(truth[p, prompt[p + 1]]), abs=1e-4)
            assert [i for i, _ in score.top] == truth[p].topk(2).indices.tolist()


def test_scoring_a_prompt_without_an_answer():
    request = dataclasses.replace(GREEDY, max_tokens=0, prompt_logprobs=1)
    (output,) = run(make_engine(), [(prompts_of(9)[0], request)])
    assert len(output.prompt_logprobs) == 9 and output.outputs[0].token_ids == []
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("width", [{}, {"n": 2, "temperature": 1, "seed": 1}])
@pytest.mark.parametrize("length", [1, 4, 15, 16])
def test_no_limit_of_its_own_reaches_as_far_as_the_memory(length, width):
    engine = make_engine(block_size=4, num_blocks=4)  # 16 tokens, and a context of 64
    params = dataclasses.replace(GREEDY, max_tokens=None, **width)
    request, _ = answer_of(engine, list(range(5, 5 + length)), params)
    assert {(len(c.token_ids), c.finish_reason) for c in request.answers} == {(17 - length, "length")}
    assert_all_free(engine)
    for prompt, limit in ([5] * length, 18 - length), ([5] * 17, None):
        with pytest.raises(ValueError, match="the whole pool holds 16"):
            engine.add(prompt, dataclasses.replace(params, max_tokens=limit))


def test_prompt_length_limits():
    engine = make_engine()
    with pytest.raises(ValueError, match="empty"):
        engine.add([], GREEDY)
    for length in (64, 65):
        with pytest.raises(ValueError, match=rf"{length} tokens.*64"):
            engine.add(prompts_of(length)[0], GREEDY)
    for limit in (1, None, 10_000):
        request, answer = answer_of(engine, prompts_of(63)[0], dataclasses.replace(GREEDY, max_tokens=limit))
        assert len(answer.token_ids) == 1 and answer.finish_reason == "length"
    assert_all_free(engine)


@pytest.mark.parametrize("bad", ({"logit_bias": {"999999": 5}}, {"stop_token_ids": [5, 320]}, {}))
def test_ids_beyond_the_vocabulary_are_refused_before_scheduling(bad):
    engine = make_engine()
    with pytest.raises(ValueError, match="must be a token id: an integer from 0 to 319"):
        engine.add([5, 6 if bad else 320], dataclasses.replace(GREEDY, **bad))
    engine.add([5, 319], dataclasses.replace(GREEDY, max_tokens=0, logit_bias={"319": 1}, stop_token_ids=[319]))


def forcing(token: int, **fields) -> SamplingParams:
    return SamplingParams(temperature=0, logit_bias={token: 100}, **({"max_tokens": 8} | fields))


def test_min_tokens_holds_back_every_eos():
    eos = world()[0].config.eos_token_ids[0]
    (output,) = run(make_engine(), [([5, 6], forcing(eos, min_tokens=4))])
    ids = output.outputs[0].token_ids
    assert len(ids) == 5 and eos not in ids[:4] and ids[4] == eos and output.outputs[0].finish_reason == "stop"
    tokenizer = world()[3]
    letter = tokenizer.encode("a", add_special_tokens=False)[0]
    (output,) = run(make_engine(), [([5, 6], forcing(letter, stop=["a"], min_tokens=6))])
    assert output.outputs[0].text == "aaaaa" and len(output.outputs[0].token_ids) == 6


def test_every_eos_stops_also_at_max_tokens_and_ignore_eos_disables_all():
    engine = make_engine()
    for eos in engine.eos_token_ids:
        for params in (forcing(eos), forcing(eos, max_tokens=1)):
            (output,) = run(make_engine(), [([5, 6], params)])
            assert output.outputs[0].token_ids == [eos] and output.outputs[0].finish_reason == "stop"
        (output,) = run(make_engine(), [([5, 6], forcing(eos, ignore_eos=True))])
        assert output.outputs[0].token_ids == [eos] * 8 and output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_special_token_in_a_stop_string_stops_also_with_ignore_eos(overlap):
    tokenizer = world()[3]
    eos = world()[0].config.eos_token_ids[0]
    text = tokenizer.decode([eos], skip_special_tokens=False)
    params = forcing(eos, ignore_eos=True, stop=[text, "x"], min_tokens=3)
    (output,) = run(make_engine(overlap=overlap), [([5, 6], params)])
    answer = output.outputs[0]
    assert (answer.token_ids, answer.text) == ([eos] * 3, "")
    assert (answer.finish_reason, answer.stop_reason) == ("stop", text)


def test_no_piece_of_a_stop_string_is_streamed():
    engine, tokenizer = make_engine(), world()[3]
    letters = [tokenizer.encode(c, add_special_tokens=False)[0] for c in "ABCDEF"]
    script = iter(letters)

    def scripted(batch):
        logits = torch.zeros(len(batch.logit_rows), 320)
        logits[:, next(script)] = 50.0
        return logits

    engine.runner.run = scripted
    request = engine.add([5, 6], dataclasses.replace(GREEDY, stop=["BCDEF"]))
    texts = []
    while engine.has_work:
        texts += [delta.text for delta in engine.step()]
    assert "".join(texts) == "A" == request.output().outputs[0].text and texts[0] == "A"
    assert request.output().outputs[0].finish_reason == "stop"
    assert request.output().outputs[0].stop_reason == "BCDEF"


def test_best_of_returns_the_likeliest(tmp_path):
    params = SamplingParams(n=2, best_of=4, temperature=1.0, seed=5, max_tokens=4, ignore_eos=True)
    (output,) = run(make_engine(), [(prompts_of(6)[0], params)])
    scores = [answer.cumulative_logprob / 4 for answer in output.outputs]
    everyone = dataclasses.replace(params, n=4, best_of=4)
    (all_four,) = run(make_engine(), [(prompts_of(6)[0], everyone)])
    best = sorted((a.cumulative_logprob / 4 for a in all_four.outputs), reverse=True)[:2]
    assert scores == pytest.approx(best)


def test_llm_over_a_gguf_file(tmp_path):
    """The facade: text in, text out, equal to the folder the file was made from."""
    folder = tiny.hf_folder(tmp_path / "m", "llama")
    llms = [
        generate.LLM(str(path), kernels="reference", num_blocks=20)
        for path in (folder, tiny.gguf_file(folder, tmp_path / "m.gguf"))
    ]
    outputs = [llm.generate(["the cat sat", "hello"], GREEDY) for llm in llms]
    assert outputs[0] is not outputs[1]
    for a, b in zip(*outputs, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids and a.outputs[0].text == b.outputs[0].text
    assert "".join(delta.text for delta in llms[0].stream("the cat sat", GREEDY)) == outputs[0][0].outputs[0].text
    assert llms[0].stats()["live"] == 0


def test_padded_vocabulary_id_decodes_to_nothing(tmp_path):
    folder = tiny.hf_folder(tmp_path / "m", "llama", vocab_size=384)
    llm = generate.LLM(str(folder), kernels="reference", num_blocks=20)
    for logprobs in (None, 2):
        (output,) = llm.generate([[5, 6]], forcing(380, max_tokens=3, logprobs=logprobs))
        assert output.outputs[0].token_ids == [380] * 3 and output.outputs[0].text == ""
    assert llm.generate(["the cat"], GREEDY)[0].outputs[0].finish_reason


def test_a_step_is_laid_out_as_it_is_drawn():
    """The picture above `lay_out`: a token in the slot of another one would be read by whoever owns that."""
    a, b = Sequence(list(range(100, 109)), 9), Sequence(list(range(200, 210)), 9)
    a.num_computed, a.block_table, b.num_computed, b.block_table = 4, [7, 2], 9, [5, 1, 3]
    batch, _ = lay_out(Step(0, [(a, 5), (b, 1)]), 5, "cpu", [range(8, 9), range(9, 10)])
    drawn = {"tokens": [104, 105, 106, 107, 108, 209], "positions": [4, 5, 6, 7, 8, 9], "query_start": [0, 5, 6]}
    drawn |= {"slot_mapping": [39, 10, 11, 12, 13, 9], "block_tables": [[7, 2, 0], [5, 1, 3]]}
    drawn |= {"context_lens": [9, 10], "logit_rows": [4, 5]}
    assert {name: getattr(batch, name).tolist() for name in drawn} == drawn and not batch.one_each
