"""Structured output: masks against brute force, where a text may end, jumps, the cache, and whole answers."""

import dataclasses
import json
import random
import re

import hypothesis.strategies as st
import jsonschema
import pytest
import torch
from grammar_walks import (
    BYTE_GUIDES,
    BYTES,
    EOS,
    PIECE_GUIDES,
    PIECES,
    guide_for,
    patterns,
    random_text,
    toy_guides,
)
from hypothesis import given, settings
from test_engine import assert_all_free, drain, expected, make_engine, prompts_of, run, world

from automata import START, Dfa, GrammarError
from sampling import SamplingParams
from structured import ByteCache, Guides, TokenTrie


def brute_mask(dfa: Dfa, vocab: list[bytes], state: int) -> list[bool]:
    """Allowed = the bytes can be walked one by one and acceptance is still reachable from where they lead."""
    alive = dfa.accepting.copy()
    while True:
        more = alive | alive[dfa.table].any(1)
        if (more == alive).all():
            break
        alive = more
    ends = [dfa.run(state, piece) for piece in vocab]
    return [bool(piece) and end != 0 and bool(alive[end]) for piece, end in zip(vocab, ends, strict=True)]


@settings(max_examples=50)
@given(patterns)
def test_masks_equal_brute_force(pattern):
    automaton = guide_for(PIECE_GUIDES, regex=pattern).matcher.automaton
    for state in range(START, min(len(automaton.dfa.table), 12)):
        assert automaton.allowed(state).tolist() == brute_mask(automaton.dfa, PIECES, state)


def test_masks_equal_brute_force_on_the_default_vocabulary(smollm2):
    from checkpoint import open_checkpoint
    from tokenizer import Tokenizer

    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(smollm2))
    trie = TokenTrie.from_tokenizer(tokenizer, 49152)
    guides = toy_guides(trie.vocab, tokenizer.eos_token_ids)
    rng = random.Random(0)
    for pattern in (r'\{"name": "[^"\\]*"(, "n": -?\d+)?\}', r"[\w.]+@[a-z]+\.(com|org)", "[😀-🙏]{2}"):
        automaton = guide_for(guides, regex=pattern).matcher.automaton
        states = list(range(START, len(automaton.dfa.table)))
        for state in rng.sample(states, min(6, len(states))):
            assert automaton.allowed(state).tolist() == brute_mask(automaton.dfa, trie.vocab, state)
    assert not any(trie.vocab[i] for i in range(len(trie.vocab)) if tokenizer.is_special(i))
    schema = {"type": "object", "properties": {"n": {"enum": [1, "é😀"]}}, "required": ["n"]}
    guide = guide_for(Guides(tokenizer, 49152, tokenizer.eos_token_ids), json_schema=schema)
    ids = tokenizer.encode('{"n": "é😀"}', add_special_tokens=False)
    assert guide.trim([*ids, *tokenizer.eos_token_ids]) == [*ids, *tokenizer.eos_token_ids]


@settings(max_examples=120, deadline=None)
@given(patterns.filter(lambda p: not re.search(r"\\[wWsS]", p)), st.randoms(use_true_random=False))
def test_both_engines_have_the_same_masks_at_each_step(pattern, rng):
    """Unicode's tables of letters and blanks differ from Python's; where bytes are forced the library allows less."""
    rust = re.sub(r"\{,(\d)", r"{0,\1", pattern)  # Rust reads {,2} as text
    rust = rust.replace("\\\n", "\n").replace("\n", "\\n").replace("/", r"\/")  # a Lark expression is one line
    own, library = guide_for(PIECE_GUIDES, regex=pattern), guide_for(PIECE_GUIDES, grammar=f"start: /{rust}/")
    for _ in range(12):
        assert own.matcher.may_end == library.matcher.may_end and own.is_complete == library.is_complete
        mine, theirs = own.mask(), library.mask()
        if library.matcher.forced_bytes():
            assert not (theirs & ~mine).any() and theirs.any()
        else:
            assert mine.tolist() == theirs.tolist(), pattern
        choices = [i for i in theirs.nonzero().flatten().tolist() if i != EOS]
        if not choices:
            break
        token = rng.choice(choices)
        own.commit(token), library.commit(token)
    assert own.matcher.forced_bytes() == library.matcher.forced_bytes()


def test_characters_of_several_byte_tokens_are_produced():
    rng = random.Random(3)
    texts = {random_text(guide_for(PIECE_GUIDES, regex="[😀-🙏]{2}"), rng) for _ in range(50)}
    assert all(re.fullmatch("[😀-🙏]{2}", text) for text in texts) and len(texts) > 20
    assert guide_for(PIECE_GUIDES, regex=" a b").mask()[PIECES.index(b" a")]


def test_no_dead_end_where_single_bytes_are_missing():
    """Vocabulary without the byte 'c': 'abc' must be entered through the token "bc" only, and "ac" never begun."""
    guides = toy_guides([b"", b"a", b"b", b"bc", b"d", b"", b"\xc3", b"\xc3\xa9"])
    guide, rng = guide_for(guides, regex="abc|ac|d|ab?é"), random.Random(0)
    assert {random_text(guide, rng) for _ in range(80)} == {"abc", "d", "aé", "abé"}
    assert guide.trim([1, 6]) == [1]
    guide.commit(1)
    assert guide.mask().tolist() == [False, False, True, True, False, False, False, True]
    with pytest.raises(GrammarError, match="vocabulary cannot write"):
        guide_for(guides, regex="xyz")
    with pytest.raises(GrammarError, match="a token for each byte"):
        guide_for(guides, json_schema={})


@pytest.mark.parametrize("pattern, complete", [("a(cc)?", False), ("a(cd)?", True)])
def test_completeness_counts_tokens_and_not_bytes(pattern, complete):
    guide = guide_for(toy_guides([b"", b"a", b"c"]), regex=pattern)
    guide.commit(1)
    assert guide.matcher.may_end and guide.is_complete == complete
    if complete:
        assert guide.mask().tolist() == [True, False, False]


CLOSED = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize("shape", [{"regex": '\\{"a": "[^"]*"\\}'}, {"json_schema": CLOSED}])
def test_end_of_sequence_only_where_the_text_may_end(shape):
    vocab = BYTES + [b"</s>"]  # a second end id whose text must not count
    guide = guide_for(toy_guides(vocab, [EOS, 257]), **shape)
    for byte in b'{"a": "x</s>y"}':
        assert not guide.mask()[EOS] and not guide.mask()[257] and guide.trim([257]) == []
        assert not guide.completes(257)
        guide.commit(byte + 1)
    assert guide.is_complete and guide.mask().nonzero().flatten().tolist() == [EOS, 257]
    assert guide.trim([EOS, 257]) == [EOS, 257] and guide.completes(EOS)
    with pytest.raises(GrammarError, match="end-of-sequence"):
        guide_for(toy_guides(vocab, []), regex="a")


@pytest.mark.parametrize("shape", [{"regex": "ab"}, {"grammar": 'start: "ab"'}])
def test_guesses_are_trimmed_forks_are_independent_and_what_is_not_allowed_fails(shape):
    guide = guide_for(BYTE_GUIDES, **shape)
    a, b = ord("a") + 1, ord("b") + 1
    assert guide.trim([b]) == guide.trim([EOS]) == [] and guide.trim([a, b, a]) == [a, b]
    assert guide.trim([a, b, EOS]) == [a, b, EOS] and not guide.completes(a)
    twin = guide.fork()
    twin.commit(a)
    assert twin.completes(b) and guide.trim([a]) == [a] and twin.trim([a]) == []
    with pytest.raises(GrammarError):
        twin.commit(a)
    with pytest.raises(GrammarError):
        guide.commit(b)


def test_logits_wider_or_narrower_than_the_vocabulary_and_special_tokens_are_masked():
    for size, mask in ((5, [False, True, False, False, False]), (2, [False, True])):
        for shape in ({"regex": "a"}, {"regex": "(a|b)"})[: 2 if size == 2 else 1]:
            assert guide_for(toy_guides([b"", b"a", b"b"], size=size), **shape).mask().tolist() == mask


def test_compiled_once_while_in_use():
    guides = toy_guides(PIECES)
    for kind, source in (("regex", "a+"), ("choice", '["a+"]'), ("json_schema", '{"const": 1}')):
        sizes = [guides.cache.size for _ in range(2) if guides.matcher(kind, source)]
        assert sizes[0] == sizes[1] > 0
    one, other = guide_for(guides, regex="a+").matcher, guide_for(guides, regex="a+").matcher
    assert one.automaton is other.automaton


def test_hundreds_of_distinct_constraints_stay_within_the_budget():
    guides = toy_guides(PIECES)
    guides.cache = cache = ByteCache(2 << 20)
    rng = random.Random(0)
    for i in range(300):
        shapes = [{"regex": f"[a-z]{{1,9}} {i} [0-9]{{3}}"}, {"json_schema": {"enum": [i, f"é{i}"], "title": "x" * i}}]
        for shape in shapes:
            assert str(i) in random_text(guide_for(guides, **shape), rng)
            assert cache.size <= cache.budget and cache.size == sum(size for _, size in cache._entries.values())
    masks = [key for key in cache._entries if isinstance(key[0], int)]
    assert masks and len(masks) < len(cache._entries)  # masks and compiled constraints share it


JUMP_VOCAB = BYTES + [b"name", b'{"', b'": ', b'": "', b' "', b'",', b"age", b" a", b"ab"]
JUMPS, ID = toy_guides(JUMP_VOCAB, jump=True), {piece: i for i, piece in enumerate(JUMP_VOCAB)}
PERSON = r'\{"name": "[a-z]*", "age": [0-9]+\}'


def forced_after(text: str, guides=JUMPS, **shape) -> list[bytes]:
    """The forced tokens after a text that was drawn byte by byte."""
    guide = guide_for(guides, **shape)
    for byte in text.encode():
        guide.forced = []
        guide.commit(byte + 1)
    return [JUMP_VOCAB[i] for i in guide.forced]


def test_jumps_append_what_the_tokenizer_would_write():
    assert forced_after("", regex=PERSON) == [b'{"', b"name", b'": "']
    assert forced_after('{"name": "', regex=PERSON) == []
    assert forced_after('{"name": "x"', regex=PERSON) == []  # the tokenizer would have joined quote and comma
    assert forced_after('{"name": "x",', regex=PERSON) == [b' "', b"age", b'": ']
    schema = {"properties": {"name": {"enum": [1, 2]}}, "required": ["name"], "additionalProperties": False}
    assert forced_after('{"', json_schema={"type": "object"} | schema) == [b"name", b'"']


@pytest.mark.parametrize("kind", ["regex", "grammar"])
def test_jumps_leave_out_what_may_merge_and_never_begin_or_end_inside_a_character(kind):
    def after(text: str, pattern: str, guides=JUMPS) -> list[bytes]:
        return forced_after(text, guides, **{kind: pattern if kind == "regex" else f"start: /{pattern}/"})

    assert after("", "namea(b|c)") == after("", "namea(A|b)") == [b"name"] and after("", "namea") == [b"name", b"a"]
    assert after('x"', 'x",,(b|c)') == [] and after('x",', 'x",,(b|c)') == [b","]
    assert b"".join(after("", "é[😀-🙏]x")) in ("é".encode(), "é".encode()[:1])
    blanks = toy_guides(JUMP_VOCAB, jump=True, blank=True)  # a tokenizer that puts a blank in front of every text
    assert after("", "name", blanks) == after("n", "nname", blanks) == [b"name"]


def test_long_forced_runs_are_appended_in_parts():
    for shape in ({"regex": "(ab){2000}"}, {"grammar": "start: /(ab){2000}/"}):
        guide, steps = guide_for(JUMPS, **shape), 0
        while not guide.is_complete:
            assert len(guide.forced) <= 512
            guide.commit(guide.forced[0] if guide.forced else ID[b"ab"])
            steps += 1
        assert steps == 2000


def test_a_run_that_is_cut_off_leaves_out_its_last_token(monkeypatch):
    monkeypatch.setattr("structured.MAX_RUN", 3)
    for shape in ({"regex": "(ab){3}"}, {"grammar": "start: /(ab){3}/"}):
        assert forced_after("", **shape) == [b"ab"]  # of "aba"; what follows the last a is written with it


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
END = 2
DRAWN = SamplingParams(temperature=1.0, seed=1, max_tokens=60)


def answers_to(requests, **switches) -> list:
    return [answer for output in run(make_engine(**switches), requests) for answer in output.outputs]


@pytest.mark.parametrize("jump", (True, False))
@pytest.mark.parametrize("switches", ({}, {"block_size": 2, "num_blocks": 33, "preemption": "swap"}))
def test_every_finished_answer_is_valid(jump, switches):
    shapes = [{"n": 2, "json_schema": SCHEMA}, {"regex": r"(\d{1,3}\.){3}\d{1,3}", "logprobs": 1}]
    shapes += [{"choice": ["yes", "yes, sir", "no"], "temperature": 0}, {"grammar": 'root ::= "(" root ")" | [a-c]'}]
    requests = [(p, dataclasses.replace(DRAWN, **shape)) for shape in shapes for p in prompts_of(3, 4, 5)]
    engine = make_engine(jump_forward=jump, **switches)
    outputs = run(engine, requests)
    if switches:
        assert engine.scheduler.stats()["preemptions"] > 0
    for output in outputs[:3]:
        for answer in output.outputs:
            assert answer.finish_reason == "stop"
            jsonschema.validate(json.loads(answer.text), SCHEMA)
    for output in outputs[3:6]:
        assert re.fullmatch(r"(\d{1,3}\.){3}\d{1,3}", output.outputs[0].text)
        assert len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids)
    assert all(output.outputs[0].text in ("yes", "yes, sir", "no") for output in outputs[6:9])
    for output in outputs[9:]:
        assert re.fullmatch(r"(\(*)[a-c](\)*)", text := output.outputs[0].text) and text.count("(") == text.count(")")


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
    found = answers_to([([5, 6], params)])
    assert len({answer.text for answer in found}) > 1
    for choice, answer in enumerate(found):
        assert answer.token_ids == expected("llama", [5, 6], params, choice) and re.fullmatch(params.regex, answer.text)


def test_forced_tokens_have_their_logprobs():
    params = SamplingParams(temperature=0, max_tokens=50, regex="the cat sat on the (mat|log)", logprobs=2)
    scored = answers_to([([5, 6], params)])[0]
    assert scored.token_ids == answers_to([([5, 6], dataclasses.replace(params, logprobs=None))])[0].token_ids
    prompt = [5, 6, *scored.token_ids]
    score = SamplingParams(max_tokens=0, prompt_logprobs=2)
    (truth,) = run(make_engine(), [(prompt, score)])
    for got, wanted in zip(scored.logprobs, truth.prompt_logprobs[2:], strict=True):
        assert got.token == wanted.token and got.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert [token for token, _ in got.top] == [token for token, _ in wanted.top]


def test_forced_tokens_stop_at_max_tokens_and_at_stop_strings():
    regex = "once upon a time there was a little engine"
    for limit in (1, 2, 5):
        (answer,) = answers_to([([5, 6], SamplingParams(max_tokens=limit, regex=regex))])
        assert len(answer.token_ids) == limit and answer.finish_reason == "length" and regex.startswith(answer.text)
    (answer,) = answers_to([([5, 6], SamplingParams(max_tokens=50, regex=regex, stop=["time"]))])
    assert answer.text == "once upon a " and answer.stop_reason == "time"


@pytest.mark.parametrize("bad", ({"regex": "("}, {"json_schema": {"type": "foo"}}, {"grammar": "start: nothing"}))
def test_unusable_constraints_are_refused_and_others_unharmed(bad):
    engine = make_engine()
    other = engine.add([5, 6], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    with pytest.raises(GrammarError):
        engine.add([5, 6], SamplingParams(**bad))
    assert len(engine.requests) == 1 == len(engine.scheduler.sequences)
    drain(engine)
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


def test_a_model_that_wants_the_end_gets_it_only_where_the_text_may_end():
    schema = {"type": "string", "minLength": 3, "maxLength": 6}
    params = SamplingParams(temperature=0, json_schema=schema, max_tokens=40)
    (output,) = run(always(make_engine(), END), [([5, 6], params)])
    jsonschema.validate(json.loads(output.outputs[0].text), schema)
    assert output.outputs[0].finish_reason == "stop" and END not in output.outputs[0].token_ids


@pytest.mark.parametrize("more", ({}, {"ignore_eos": True}, {"logprobs": 0}, {"beam_width": 2}))
def test_a_complete_text_ends_before_min_tokens(more):
    params = SamplingParams(temperature=0, json_schema={"const": 7}, min_tokens=50, max_tokens=60, **more)
    (answer,) = answers_to([([5, 6], params)])
    assert answer.text == "7" and answer.finish_reason == "stop" and answer.token_ids.count(END) == 0


def test_ignore_eos_goes_on_while_the_text_can():
    (ended,) = run(always(make_engine(), END), [([5, 6], SamplingParams(temperature=0, regex="a*"))])
    assert ended.outputs[0].token_ids == [END] and ended.outputs[0].finish_reason == "stop"
    params = SamplingParams(temperature=0, regex="a*", ignore_eos=True, max_tokens=5)
    (output,) = run(always(make_engine(), END), [([5, 6], params)])
    assert re.fullmatch("a+", output.outputs[0].text) and output.outputs[0].finish_reason == "length"


def test_an_empty_text_ends_at_once():
    (answer,) = answers_to([([5, 6], SamplingParams(regex="(x{0})", ignore_eos=True))])
    assert answer.text == "" and answer.finish_reason == "stop"


def test_beams_keep_to_the_structure():
    params = SamplingParams(beam_width=3, n=3, temperature=0, max_tokens=30, choice=["the cat", "the dog", "hello"])
    found = answers_to([(prompts_of(5)[0], params)])
    assert len({tuple(answer.token_ids) for answer in found}) == len(found) == 3
    assert all(answer.text in params.choice and answer.finish_reason == "stop" for answer in found)
    assert all(a.finish_reason for a in answers_to([([5, 6], dataclasses.replace(params, choice=["x"], n=1))]))


def test_stop_token_without_text_ends_only_where_the_text_may():
    mark = next(i for i in range(3) if i != END and i not in make_engine().eos_token_ids)
    params = SamplingParams(temperature=0, regex="ab*", stop_token_ids=[mark], max_tokens=10)
    (output,) = run(always(make_engine(), mark), [([5, 6], params)])
    assert output.outputs[0].text == "a" and output.outputs[0].stop_reason == mark


def test_a_grammar_that_fails_on_the_way_ends_its_own_request_alone(monkeypatch):
    engine = make_engine()
    bad = engine.add([5, 6], SamplingParams(temperature=0, json_schema=SCHEMA, max_tokens=40))
    other = engine.add([5, 6], SamplingParams(temperature=0, json_schema=SCHEMA, max_tokens=40))
    commit = type(bad.guide).commit

    def failing(guide, token):
        commit(guide, token)
        if guide is bad.answers[0].guide:
            guide.matcher.parser.consume_token(3)  # what the parser cannot take leaves it in its state of error
            guide._prepare()

    monkeypatch.setattr(type(bad.guide), "commit", failing)
    drain(engine)
    ended = bad.output().outputs[0]
    assert ended.finish_reason == "error" and "the grammar cannot go on" in ended.error
    jsonschema.validate(json.loads(other.output().outputs[0].text), SCHEMA)
    assert_all_free(engine)
