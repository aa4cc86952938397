"""Structured output through the whole engine: every answer valid, ended where it is complete, and jumps that show."""

import dataclasses
import json
import re

import jsonschema
import pytest
import torch
from test_engine import assert_all_free, expected, make_engine, prompts_of, run, world

from sampling import SamplingParams
from structured import GrammarError

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
EOS = 2
DRAWN = SamplingParams(temperature=1.0, seed=1, max_tokens=60)


def answers(requests, **switches) -> list:
    return [answer for output in run(make_engine(**switches), requests) for answer in output.outputs]


@pytest.mark.parametrize("jump", (True, False))
@pytest.mark.parametrize("switches", ({}, {"block_size": 2, "num_blocks": 33, "preemption": "swap"}))
def test_every_finished_answer_is_valid(jump, switches):
    prompts = prompts_of(3, 4, 5)
    requests = [(p, dataclasses.replace(DRAWN, n=2, json_schema=PERSON, seed=i)) for i, p in enumerate(prompts)]
    requests += [(p, dataclasses.replace(DRAWN, regex=r"(\d{1,3}\.){3}\d{1,3}", logprobs=1)) for p in prompts]
    requests += [(p, dataclasses.replace(DRAWN, choice=["yes", "yes, sir", "no"], temperature=0)) for p in prompts]
    engine = make_engine(jump_forward=jump, **switches)
    outputs = run(engine, requests)
    if switches:
        assert engine.scheduler.stats()["preemptions"] > 0
    for output in outputs[:3]:
        for answer in output.outputs:
            assert answer.finish_reason == "stop"
            jsonschema.validate(json.loads(answer.text), PERSON)
    for output in outputs[3:6]:
        assert re.fullmatch(r"(\d{1,3}\.){3}\d{1,3}", output.outputs[0].text)
        assert len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids)
    assert all(output.outputs[0].text in ("yes", "yes, sir", "no") for output in outputs[6:])


def test_jumps_save_steps_and_write_what_the_tokenizer_would():
    params = SamplingParams(temperature=0, max_tokens=50, regex="(once upon a time there was|def add) a (cat|dog)")
    engines = [make_engine(jump_forward=jump) for jump in (True, False)]
    outputs = [run(engine, [([5, 6], params)])[0].outputs[0] for engine in engines]
    tokenizer = world()[3]
    assert all(re.fullmatch(params.regex, output.text) for output in outputs)
    jumped = outputs[0]
    assert jumped.token_ids == tokenizer.encode(jumped.text, add_special_tokens=False)
    assert engines[0].scheduler.stats()["steps"] < len(jumped.token_ids)
    assert engines[1].scheduler.stats()["steps"] >= len(outputs[1].token_ids)


def test_parallel_answers_jump_on_their_own():
    params = dataclasses.replace(DRAWN, n=3, regex="once upon a time there was (a|the|no) (cat|dog|log)")
    found = answers([([5, 6], params)])
    assert len({answer.text for answer in found}) > 1
    for choice, answer in enumerate(found):
        assert answer.token_ids == expected("llama", [5, 6], params, choice) and re.fullmatch(params.regex, answer.text)


def test_forced_tokens_have_their_logprobs():
    params = SamplingParams(temperature=0, max_tokens=50, regex="the cat sat on the (mat|log)", logprobs=2)
    scored = answers([([5, 6], params)])[0]
    assert scored.token_ids == answers([([5, 6], dataclasses.replace(params, logprobs=None))])[0].token_ids
    prompt = [5, 6, *scored.token_ids]
    score = SamplingParams(max_tokens=0, prompt_logprobs=2)
    (truth,) = run(make_engine(), [(prompt, score)])
    for got, wanted in zip(scored.logprobs, truth.prompt_logprobs[2:], strict=True):
        assert got.token == wanted.token and got.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert [token for token, _ in got.top] == [token for token, _ in wanted.top]


def test_forced_tokens_stop_at_max_tokens_and_at_stop_strings():
    regex = "once upon a time there was a little engine"
    for limit in (1, 2, 5):
        (answer,) = answers([([5, 6], SamplingParams(max_tokens=limit, regex=regex))])
        assert len(answer.token_ids) == limit and answer.finish_reason == "length" and regex.startswith(answer.text)
    (answer,) = answers([([5, 6], SamplingParams(max_tokens=50, regex=regex, stop=["time"]))])
    assert answer.text == "once upon a " and answer.stop_reason == "time"


@pytest.mark.parametrize("budget", (1, 2, 3))
def test_forced_runs_longer_than_the_token_budget(budget):
    params = SamplingParams(temperature=0, max_tokens=40, regex="once upon a time there was (a|the) engine that served")
    requests = [(p, params) for p in prompts_of(4, 6)]
    for (prompt, _), answer in zip(requests, answers(requests, max_num_batched_tokens=budget), strict=True):
        assert answer.token_ids == expected("llama", prompt, params) and re.fullmatch(params.regex, answer.text)


@pytest.mark.parametrize(
    "bad",
    (
        {"regex": "("},
        {"regex": "(?=a)b"},
        {"regex": "a{1000000}"},
        {"json_schema": {"type": "foo"}},
        {"json_schema": {"type": "string", "pattern": "("}},
        {"json_schema": {"unevaluatedItems": False}},
    ),
)
def test_F57_unusable_constraints_are_refused_and_others_unharmed(bad):
    engine = make_engine()
    other = engine.add([5, 6], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    with pytest.raises(GrammarError):
        engine.add([5, 6], SamplingParams(**bad))
    assert len(engine.requests) == 1 == len(engine.scheduler.sequences)
    while engine.has_work:
        engine.step()
    assert len(other.output().outputs[0].token_ids) == 4
    assert_all_free(engine)


def always(engine, token: int):
    """A model that wants nothing but `token`."""

    def run_model(batch):
        logits = torch.zeros(len(batch.logit_rows), 320)
        logits[:, token] = 50.0
        return logits

    engine.runner.run = run_model
    return engine


def test_F59_end_of_sequence_only_where_the_text_may_end():
    schema = {"type": "string", "minLength": 3, "maxLength": 6}
    engine = always(make_engine(), EOS)
    (output,) = run(engine, [([5, 6], SamplingParams(temperature=0, json_schema=schema, max_tokens=40))])
    jsonschema.validate(json.loads(output.outputs[0].text), schema)
    assert output.outputs[0].finish_reason == "stop" and EOS not in output.outputs[0].token_ids


@pytest.mark.parametrize("more", ({}, {"ignore_eos": True}, {"logprobs": 0}, {"beam_width": 2}))
def test_F59_a_complete_text_ends_before_min_tokens(more):
    params = SamplingParams(temperature=0, json_schema={"const": 7}, min_tokens=50, max_tokens=60, **more)
    (answer,) = answers([([5, 6], params)])
    assert answer.text == "7" and answer.finish_reason == "stop" and answer.token_ids.count(EOS) == 0


def test_ignore_eos_goes_on_while_the_text_can():
    (ended,) = run(always(make_engine(), EOS), [([5, 6], SamplingParams(temperature=0, regex="a*"))])
    assert ended.outputs[0].token_ids == [EOS] and ended.outputs[0].finish_reason == "stop"
    params = SamplingParams(temperature=0, regex="a*", ignore_eos=True, max_tokens=5)
    (output,) = run(always(make_engine(), EOS), [([5, 6], params)])
    assert re.fullmatch("a+", output.outputs[0].text) and output.outputs[0].finish_reason == "length"


def test_an_empty_text_ends_at_once():
    (answer,) = answers([([5, 6], SamplingParams(regex="(x{0})", ignore_eos=True))])
    assert answer.text == "" and answer.finish_reason == "stop"


@pytest.mark.parametrize("blank", ("\n", "  "))
@pytest.mark.parametrize("schema", ({"type": "object"}, PERSON))
def test_F60_blanks_cannot_go_on_for_ever(blank, schema):
    token = world()[3].encode(blank, add_special_tokens=False)[0]
    params = SamplingParams(temperature=0, json_schema=schema, max_tokens=200)
    engine = always(make_engine(max_model_len=300), token)
    (output,) = run(engine, [([5, 6], params)])
    text = output.outputs[0].text
    jsonschema.validate(json.loads(text), schema)
    assert output.outputs[0].finish_reason == "stop" and text == text.rstrip() and not re.search(r"\s{9}", text)


def test_beams_keep_to_the_structure():
    params = SamplingParams(beam_width=3, n=3, temperature=0, max_tokens=30, choice=["the cat", "the dog", "hello"])
    found = answers([(prompts_of(5)[0], params)])
    assert len({tuple(answer.token_ids) for answer in found}) == len(found) == 3
    assert all(answer.text in params.choice and answer.finish_reason == "stop" for answer in found)
    assert all(a.finish_reason for a in answers([([5, 6], dataclasses.replace(params, choice=["x"], n=1))]))


def test_stop_token_without_text_ends_only_where_the_text_may():
    mark = next(i for i in range(3) if i != EOS and i not in make_engine().eos_token_ids)
    params = SamplingParams(temperature=0, regex="ab*", stop_token_ids=[mark], max_tokens=10)
    (output,) = run(always(make_engine(), mark), [([5, 6], params)])
    assert output.outputs[0].text == "a" and output.outputs[0].stop_reason == mark
