"""The draft head is handed the right states, changes no answer, learns, and is refused where it does not belong."""

import dataclasses
import json

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_engine import GREEDY, expected, make_engine, prompts_of, random_head, run, world
from test_speculative import FAVOURITES, assert_drawn_from_favourites, fixed_logits

from compiled import CapturedRunner
from drafting import train as training
from drafting.budget import Speculator
from drafting.command import HELD_OUT, main, measure
from drafting.head import (
    KEY,
    DraftHead,
    HeadProposer,
    computed_anew,
    fingerprint,
    head_shapes,
    load_head,
    read_head,
    save_head,
    strength_of,
)
from drafting.train import Settings, head_step, norm, train
from engine import lay_out
from generate import LLM
from kv_paged import KVCache
from sampling import SamplingParams
from scheduler import Sequence, Step
from speculative import NgramProposer

OPTIONS = {"kernels": "reference", "num_blocks": 200, "threads": 1}


def drawn_weights(hidden=64, width=16, kept=range(40), seed=1) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = head_shapes(hidden, width, len(kept))
    weights = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items() if name != "kept"}
    return weights | {"kept": torch.tensor(kept)}


def written(path, model, name="tiny", **changes) -> dict[str, torch.Tensor]:
    weights = drawn_weights(model.config.hidden_size)
    save_head(path, weights | changes, model, name, {"steps": 3})
    return weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny.hf_folder(tmp_path_factory.mktemp("m") / "m", "llama"))


# -- the states it is handed


def last_state(tokens: list[int]) -> torch.Tensor:
    """The hidden state that the token behind `tokens` is drawn from, computed in one step by itself."""
    c, model = world()[0].config, world()[2]
    seq = Sequence(list(tokens), 1)
    seq.block_table = list(range(1, len(tokens) // 4 + 2))
    kv = KVCache(c.num_layers, len(seq.block_table) + 1, 4, c.num_kv_heads, c.head_dim, torch.float32)
    batch, _ = lay_out(Step(0, [(seq, len(tokens))]), 4, "cpu", [range(len(tokens) - 1, len(tokens))])
    return model.hidden(batch, kv)[0]


class Spy(NgramProposer):
    """Guesses as ever, and notes which states it is shown beside those that it ought to be shown."""

    def __init__(self, engine):
        super().__init__(3, 1)
        self.engine, self.seen, self.without = engine, [], 0

    def strength(self, choices):
        for choice in choices:
            row = self.engine.rows.get(choice)
            self.without += row is None
            if row is not None:
                tokens = tuple(choice.seq.tokens[:-1])
                self.seen.append((tokens, self.engine.runner.states[row].clone()))
        return super().strength(choices)


CASES = ("plain", "graphs", "padded graphs", "chunks", "preempted", "forks", "forced", "overlap", "scored")


@pytest.mark.parametrize("case", CASES)
def test_the_states_are_those_that_the_last_tokens_were_drawn_from(case):
    switches = {
        "chunks": {"max_num_batched_tokens": 5},
        "preempted": {"block_size": 2, "num_blocks": 22, "prefix_cache": "none"},
        "overlap": {"overlap": True},
    }.get(case, {})
    engine = make_engine(**switches)
    if "graphs" in case:
        buckets = [3, 9, 30] if case.startswith("padded") else list(range(1, 30))
        engine.runner = CapturedRunner(engine.runner, buckets, 16, computed_anew)
    spy = Spy(engine)
    engine.speculator = Speculator(spy, 3)
    more = {
        "forks": {"n": 3, "temperature": 0.8, "seed": 1},
        "forced": {"regex": "(the (cat|dog) sat on the mat, ){2}[a-f]{2,9}"},
        "scored": {"logprobs": 1, "prompt_logprobs": 1},
    }.get(case, {})
    params = dataclasses.replace(GREEDY, max_tokens=24, **more)
    prompts = prompts_of(5, 9, 14)
    outputs = run(engine, [(p, params) for p in prompts], [0, 2, 3])
    if case not in ("forks", "forced"):
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.outputs[0].token_ids == expected("llama", prompt, params)
    assert len(spy.seen) > 12 and spy.without <= (8 if case == "chunks" else 2)  # a step may have no room for everyone
    if case == "preempted":
        assert engine.scheduler.stats()["preemptions"] > 0
    if case not in ("forced", "forks"):
        assert engine.speculator.accepted > 0
    with torch.inference_mode():
        for tokens, state in spy.seen:
            assert torch.allclose(state, last_state(tokens), atol=1e-4), len(tokens)


def test_an_answer_without_a_state_goes_without_guesses():
    engine = make_engine(speculate="head")
    requests = [engine.add(p, GREEDY) for p in prompts_of(5, 9)]
    engine.step()
    first, second = (request.answers[0] for request in requests)
    del engine.rows[first]
    strengths = engine.speculator.proposer.strength([first, second])
    assert strengths[0] == 0 < strengths[1]
    assert [len(g) for g in engine.speculator.proposer.propose([first, second], [2, 2])] in ([0, 1], [0, 2])


# -- guessing


def test_strength_is_the_odds():
    chances = (float("nan"), 0.0, 0.33, 0.34, 0.6, 0.7, 0.81, 0.9, 0.95, 1.0)
    assert [strength_of(chance) for chance in chances] == [0, 0, 0, 1, 1, 2, 4, 8, 16, 16]


def test_guesses_end_where_they_are_worth_less_than_the_limit_says():
    proposer = HeadProposer(random_head("llama"), make_engine())
    script = iter([[(7, 0.9)], [(8, 0.7)], [(9, 0.99)]])
    proposer.round = lambda states, rows, tokens: (states, next(script))
    proposer.states = torch.zeros(2, 4)
    proposer.first = {"a": (5, 0.8, 0), "b": (6, 0.5, 1)}
    assert proposer.propose(["a", "b", "c"], [4, 1, 3]) == [[5, 7, 8, 9], [6], []]  # 0.8 * 0.9 * 0.7 * .99 > 0.8 ** 4
    script = iter([[(7, 0.5), (8, 0.6)], [(9, 0.9)]])
    assert proposer.propose(["a", "b"], [2, 3]) == [[5], [6, 8, 9]]  # 0.8 * 0.5 < 0.8 ** 2


@pytest.mark.parametrize("by_numpy", (True, False))
def test_a_round_of_several_answers_is_each_by_itself(by_numpy):
    head = random_head("llama")
    proposer = HeadProposer(head, make_engine())
    assert proposer.by_numpy
    proposer.by_numpy = by_numpy
    states, tokens = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), [5, 17, 300]
    together, guesses = proposer.round(states, [2, 0, 3], tokens)
    for i, row in enumerate((2, 0, 3)):
        after, logits = head(states[row : row + 1], torch.tensor(tokens[i : i + 1]))
        assert torch.allclose(after[0], together[i], rtol=1e-4, atol=1e-2)  # of hundreds
        assert guesses[i] == (head.kept[logits.argmax()], pytest.approx(float(logits.softmax(1).max()), abs=1e-4))


@pytest.mark.parametrize("fields", ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}))
def test_drawn_answers_keep_their_distribution(fields):
    """Always the same logits, guesses that depend on the token: every place must be drawn from those logits."""
    engine = make_engine(num_blocks=2000, max_num_seqs=200)
    fixed_logits(engine.runner, FAVOURITES)
    head = DraftHead(drawn_weights(kept=list(FAVOURITES), seed=5), engine.model)
    engine.speculator = Speculator(HeadProposer(head, engine), 3)
    assert_drawn_from_favourites(engine, **fields)


@pytest.mark.parametrize("quant", ("int4", None))
def test_recorded_rounds_answer_as_computed_ones(folder, tmp_path, native, quant):
    path, answers = tmp_path / "head.safetensors", []
    options = {"quant": quant, "num_blocks": 100, "max_num_seqs": 4}
    for recorded in (False, True):
        llm = LLM(folder, **options)
        if not path.exists():
            written(path, llm.model)
        options["compile"] = recorded and quant is not None
        llm = LLM(folder, **options, speculate=f"head:{path}")
        llm.engine.speculator.step = None
        params = SamplingParams(temperature=0.7, seed=1, max_tokens=20, ignore_eos=True)
        outputs = llm.generate(prompts_of(5, 9, 3), params)
        answers.append(([o.outputs[0].token_ids for o in outputs], llm.stats()["drafted"], llm.stats()["accepted"]))
        assert llm.stats()["drafted"] > 0
    assert answers[0] == answers[1]


# -- the file


def test_a_file_brings_back_the_head(tmp_path):
    model = world()[2]
    weights = written(tmp_path / "h", model)
    found, about = read_head(tmp_path / "h")
    assert about["training"] == {"steps": 3} and about["target"] == "tiny"
    kept = weights.pop("kept")
    assert all(torch.equal(found[n], w.half()) for n, w in weights.items())
    head = load_head(tmp_path / "h", model)
    state, token = torch.randn(3, 64), torch.tensor([4, 5, 6])
    after, logits = head(state, token)
    wanted = head_step({n: w.half().float() for n, w in weights.items()}, state, model.embed.lookup(token))
    assert torch.allclose(after, wanted, atol=1e-3, rtol=1e-4)
    table = model.head.lookup(kept)
    assert torch.allclose(logits, norm(wanted, weights["out_norm"].half().float()) @ table.T, atol=1e-3, rtol=1e-3)
    assert torch.equal(head.kept, kept)


def test_a_head_of_another_model_is_refused_before_anything_runs(folder, tmp_path, monkeypatch):
    path = tmp_path / "h"
    strangers = {
        "hidden 96": {"hidden_size": 96},
        "vocab 352": {"vocab_size": 352},
        "fingerprint": {"seed": 7},
    }
    for cause, change in strangers.items():
        other = LLM(str(tiny.hf_folder(tmp_path / cause, "llama", **change)), **OPTIONS)
        written(path, other.model, "other")
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=f"'other', {cause}.*speculative.py train"):
            patch.setattr("model.Transformer.forward", lambda *args: pytest.fail("the model ran"))
            LLM(folder, **OPTIONS, compile=True, speculate=f"head:{path}")
    with pytest.raises(ValueError, match="'smollm2', hidden 576; this model has 64"):
        LLM(folder, **OPTIONS, speculate="head")
    with pytest.raises(ValueError, match="nothing cannot be read.*speculative.py train"):
        LLM(folder, **OPTIONS, speculate=f"head:{tmp_path}/nothing")
    assert len({fingerprint(LLM(str(tmp_path / cause), **OPTIONS).model) for cause in strangers}) == 3
    file = str(tiny.gguf_file(folder, tmp_path / "m.gguf", quant="Q8_0"))
    same = [LLM(folder, **OPTIONS), LLM(folder, quant="int4", **OPTIONS), LLM(file, **OPTIONS)]
    assert len({fingerprint(llm.model) for llm in same}) == 1


def test_damaged_heads_are_refused_by_cause(tmp_path):
    model, path = world()[2], tmp_path / "h"
    written(path, model)
    whole, weights, (_, about) = path.read_bytes(), load_file(str(path)), read_head(path)

    def refused(cause: str, tensors=weights, entry: object = about) -> None:
        save_file(weights | tensors, str(path), None if entry is None else {KEY: json.dumps(entry)})
        with pytest.raises(ValueError, match=f"h is (no|damaged).*{cause}"):
            load_head(path, model)

    for entry in (None, "{", [], [1], {"version": 2}):
        refused(f"draft head of version 1.*{KEY} entry", entry=entry)
    for name in ("target", "fingerprint", "hidden", "vocab", "kept", "training"):
        for wrong in ({}, {name: None}, {name: True}, {name: 0}):
            entry = {key: value for key, value in about.items() if key != name} | wrong
            refused(f"the '{name}' of its {KEY} entry is .*; get it again, or train", entry=entry)
    for name, w, cause in (
        ("down", torch.ones(64, 15).half(), r"tensor 'from_state' is torch.float16 \[32, 64\], not .* \[30, 64\]"),
        ("down", torch.tensor(1.0).half(), "its tensor 'down'"),
        ("down", weights["down"].float(), "'down' is torch.float32"),
        ("kept", weights["kept"].long(), "'kept' is torch.int64"),
        ("out_norm", torch.full((64,), float("nan")).half(), "'out_norm' holds NaN or infinity"),
        ("down", torch.full((64, 16), 1e9).half(), "'down' holds NaN or infinity"),
        ("more", torch.ones(1), "'more' is torch.float32 .*not one of a head"),
        ("kept", torch.arange(300, 340).int(), "outside the vocabulary"),
    ):
        refused(cause, {name: w})
    for content in (whole[:-100], b"version https://git-lfs"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read"):
            load_head(path, model)


# -- learning


@pytest.fixture(scope="module")
def decided(tmp_path_factory):
    """A model that is sure of what it says."""
    folder = tiny.hf_folder(tmp_path_factory.mktemp("m") / "m", "llama")
    weights = load_file(str(folder / "model.safetensors"))
    save_file(weights | {"lm_head.weight": weights["lm_head.weight"] * 4}, str(folder / "model.safetensors"))
    return str(folder)


SMALL = Settings("tiny", None, texts=6, tokens=40, steps=200, kept=320, width=32, batch=48, rate=2e-2, dropout=0.0)


@pytest.fixture(scope="module")
def trained(decided, tmp_path_factory):
    out = tmp_path_factory.mktemp("h") / "h"
    train(out, SMALL, lambda: LLM(decided, **OPTIONS))
    return out


def test_a_trained_head_is_right_more_often_than_a_random_one(decided, trained, tmp_path):
    weights, about = read_head(trained)
    assert about["training"]["steps"] == 200 and set(weights) == set(head_shapes(64, 32, 1))
    random, right = drawn_weights(width=32, kept=weights["kept"].tolist()), []
    save_head(tmp_path / "random", random, LLM(decided, **OPTIONS).model, "tiny", {})
    for path in (trained, tmp_path / "random"):
        llm = LLM(decided, **OPTIONS, speculate=f"head:{path}")
        llm.engine.speculator.step = None
        for text in training.requests(6, 0):
            llm.chat([{"role": "user", "content": text}], SamplingParams(temperature=0, max_tokens=40))
        right.append(llm.stats()["accepted"])
    assert right[0] > 30 > right[1]


def test_a_training_is_the_same_again_and_another_with_another_seed(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "PART", 4)
    files = []
    for seed in (0, 0, 1):
        settings = dataclasses.replace(SMALL, steps=25, tokens=20, seed=seed)
        train(tmp_path / "h", settings, lambda: LLM(folder, **OPTIONS))
        files.append(load_file(tmp_path / "h"))
    same, other = ([torch.equal(files[0][name], file[name]) for name in files[0]] for file in files[1:])
    assert all(same) and not all(other)


def test_where_nothing_can_be_written_nothing_is_trained(folder, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        train(tmp_path / "file" / "h", SMALL, lambda: LLM(folder, **OPTIONS))


def test_measuring_texts_are_not_training_texts():
    asked = "\n".join(training.requests(2000, 0))
    for text in (text for texts in HELD_OUT.values() for text in texts):
        assert " ".join(text.split()[:4]) not in asked


def test_measuring_counts_what_each_side_guessed(decided, trained):
    llm = LLM(decided, **OPTIONS, speculate=f"head:{trained}")
    llm.engine.speculator.step = None
    sides = {"plain": None, "ngram": Speculator(NgramProposer()), "head": llm.engine.speculator}
    rows = measure(llm, sides, batch=3, tokens=12, rounds=2)
    assert [row["side"] for row in rows] == list(sides) * 4 and all(row["same"] for row in rows)
    assert all(row["tokens_per_step"] == 1.0 and row["speedup"] == 1.0 for row in rows[::3])
    speculator = llm.engine.speculator
    assert speculator.drafted > 0 and any(row["tokens_per_step"] > 1 for row in rows[2::3])
    assert all(row["right"] <= 1.0 for row in rows)


def test_the_shipped_head_guesses_for_the_default_model(smollm2, native):
    """On requests it was not trained on: the tokens of plain decoding, in fewer steps."""
    llm = LLM(quant="int4", compile=True, num_blocks=200, threads=2, speculate="head")
    llm.engine.speculator.step = None
    asked = [texts[0] for texts in HELD_OUT.values()]
    params, steps, answers = SamplingParams(temperature=0, max_tokens=32), [], []
    for side in (llm.engine.speculator, None):
        llm.engine.speculator, before = side, llm.scheduler.stats()["steps"]
        answers.append([llm.chat([{"role": "user", "content": text}], params).outputs[0].token_ids for text in asked])
        steps.append(llm.scheduler.stats()["steps"] - before)
    assert answers[0] == answers[1]
    assert steps[0] < 0.85 * steps[1]


def test_an_engine_with_a_single_seat_can_time_its_head():
    engine = make_engine()
    cost = HeadProposer(random_head("llama"), engine).measure(1)
    assert cost.rows == [1, 2] and 0 < cost(1) <= cost(2)


def test_training_refuses_by_name(tmp_path, capsys):
    for flags in ("--steps 0", "--rate nan", "--rate 0.0", "--dropout 1.0", "--dropout nan"):
        assert main(["train", "--out", str(tmp_path / "a" / "h"), *flags.split()]) == 2
        assert f"error: {flags[2:].replace(' ', '=')}: a" in capsys.readouterr().err
    assert main(["train", "--out", str(tmp_path / "a" / "h"), "--model", "nothing"]) == 2
    assert "error: No model 'nothing'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", ["--speculate ngram", "--tokens 0", "--rounds 0", "--batch 1 -1", "--batch 9"])
def test_the_measurement_refuses_by_name(given, capsys):
    with pytest.raises(SystemExit):
        main(["measure", *given.split()])
    assert given.split()[0] in capsys.readouterr().err
