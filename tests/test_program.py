"""Programs: holes are filled as plain requests would be, branches share their trunk, and the examples run."""

import json

import jsonschema
import pytest
import tiny
from test_naive import weights_of

import naive
from checkpoint import open_checkpoint
from examples import few_shot_classification, json_extraction, tree_of_thought
from generate import LLM
from program import Program, gen, run, select
from sampling import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.hf_folder(tmp_path_factory.mktemp("m") / "m", "llama")


@pytest.fixture
def llm(folder):
    return LLM(str(folder), kernels="reference", num_blocks=200, block_size=4)


def test_holes_are_filled_in_turn(llm):
    program = Program(llm, "the cat")
    program += gen("first", max_tokens=4, ignore_eos=True)
    program += " and the dog"
    program += gen("second", max_tokens=4, ignore_eos=True)
    assert program.pending and not program.values  # nothing runs before it is asked for
    text = str(program)
    assert text == "the cat" + program["first"] + " and the dog" + program["second"]
    encode = llm.tokenizer.encode
    (first,) = llm.generate(["the cat"], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert program["first"] == first.outputs[0].text
    ids = encode("the cat") + first.outputs[0].token_ids + encode(" and the dog", add_special_tokens=False)
    (second,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert program["second"] == second.outputs[0].text
    with pytest.raises(KeyError, match="no hole named 'third'.*first, second"):
        program["third"]


def test_select_takes_the_likeliest_text_per_token(llm, folder):
    candidates = [" the cat", " hello world", " sat on the mat and the dog", "!", " a"]
    ckpt = open_checkpoint(folder)
    weights = weights_of(ckpt)
    for start in ("the dog", "once upon a time", "def add"):
        program = Program(llm, start)
        program += select("x", candidates)
        means = []
        for candidate in candidates:
            prompt, ids = llm.tokenizer.encode(start), llm.tokenizer.encode(candidate, add_special_tokens=False)
            rows = naive.forward(weights, ckpt.config, prompt + ids).log_softmax(-1)
            means.append(sum(float(rows[len(prompt) - 1 + i, t]) for i, t in enumerate(ids)) / len(ids))
        assert program["x"] == candidates[means.index(max(means))]
        assert str(program) == start + program["x"]
    llm.scheduler.drop_cache()
    program = Program(llm, "once upon a time there was a little engine")
    program += select("x", candidates)
    run([program])
    assert program.cached_tokens >= 4 * (len(candidates) - 1)  # all but the first find the text before the hole


def test_branches_share_their_trunk(llm):
    trunk = Program(llm, "once upon a time there was a little engine that could serve them all")
    trunk += gen("more", max_tokens=8, ignore_eos=True)
    branches = trunk.fork(3)
    shared = len(branches[0].ids)
    for i, branch in enumerate(branches):
        branch += f" {i}:"
        branch += gen("idea", max_tokens=5, temperature=1.0, seed=i, ignore_eos=True)
    trunk.join(branches)
    assert len(trunk["idea"]) == 3 == len(set(trunk["idea"])) and isinstance(trunk["more"], str)
    for branch in branches:
        assert branch.cached_tokens >= (shared - 1) // 4 * 4 > 0  # all whole blocks of the trunk
        assert branch.prompt_tokens - branch.cached_tokens < 12
    assert llm.stats()["live"] == 0


def test_programs_run_side_by_side(llm):
    programs = [Program(llm, text) for text in ("the cat", "hello", "def add")]
    for program in programs:
        program += gen("a", max_tokens=10, ignore_eos=True)
        program += gen("b", max_tokens=10, ignore_eos=True)
    before = llm.stats()["steps"]
    run(programs)
    assert llm.stats()["steps"] - before <= 24  # not three times as many
    alone = Program(llm, "hello")
    alone += gen("a", max_tokens=10, ignore_eos=True)
    assert alone["a"] == programs[1]["a"]


def test_a_stop_string_is_not_part_of_the_text(llm):
    plain = Program(llm, "the cat")
    plain += gen("x", max_tokens=12, ignore_eos=True)
    stop = plain["x"][4:6]
    program = Program(llm, "the cat")
    program += gen("x", max_tokens=12, ignore_eos=True, stop=stop)
    program += "|"
    program += gen("y", max_tokens=3, ignore_eos=True)
    assert stop not in program["x"] and str(program) == "the cat" + program["x"] + "|" + program["y"]
    assert llm.tokenizer.decode(program.ids) == str(program)


def test_wrong_parts_are_refused_and_leave_nothing_behind(llm):
    program = Program(llm, "the cat")
    with pytest.raises(ValueError, match="made of texts"):
        program += 7
    for wrong in (lambda: gen("x", temperature=-1), lambda: select("x", []), lambda: program.fork(0)):
        with pytest.raises(ValueError):
            wrong()
    program += gen("x", regex="(")
    with pytest.raises(ValueError):
        program["x"]
    empty = Program(llm)
    empty += gen("x")
    with pytest.raises(ValueError, match="empty"):
        empty["x"]
    assert llm.stats()["live"] == 0 and not llm.engine.requests


def test_a_conversation_can_be_a_trunk(llm):
    program = Program(llm, [{"role": "user", "content": "hello"}])
    program += gen("reply", max_tokens=3, ignore_eos=True)
    reply = llm.chat(
        [{"role": "user", "content": "hello"}], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    )
    assert program["reply"] == reply.outputs[0].text


def test_the_examples_run_and_share_their_trunks(llm):
    labels, program = few_shot_classification.classify(llm)
    assert len(labels) == len(few_shot_classification.LINES) and set(labels) <= {"positive", "negative"}
    assert program.cached_tokens > program.prompt_tokens / 2
    records, program = json_extraction.extract(llm)
    for record in records:
        jsonschema.validate(record, json_extraction.SCHEMA)
    assert program.cached_tokens > 0
    thought = tree_of_thought.think(llm, width=4)
    assert len(thought["idea"]) == 4 and thought["best"] in [idea.strip() for idea in thought["idea"]]
    assert thought["answer"] and json.dumps(thought["grade"])
