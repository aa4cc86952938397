"""Guesses change no answer and no distribution, leave no trace in memory, and are only made where they pay."""

import dataclasses
import math
import re
from types import SimpleNamespace

import pytest
import tiny
import torch
from sampling_rows import normal, state
from test_engine import GREEDY, assert_all_free, drain, expected, make_engine, prompts_of, run

from compiled import CapturedRunner
from drafting.budget import CREDIT, MARGIN, MOST_CREDIT, SHARE, Record, Speculator, StepCost
from drafting.draft_model import check_same_tokens
from drafting.head import computed_anew
from generate import LLM
from kv_paged import blocks_needed
from sampling import SamplingParams, draw, probabilities
from speculative import GUESS, NgramProposer, rejection_sample, verdict
from tokenizer import Tokenizer

PROPOSERS = ("ngram", "head", "copy", "stranger", "self:1")


def surprise(counts: list[int], p: list[float]) -> float:
    """Pearson's statistic in standard deviations above its mean; tokens that p never gives must not occur."""
    total, free = sum(counts), max(1, sum(chance > 0 for chance in p) - 1)
    assert not any(count for count, chance in zip(counts, p, strict=True) if chance == 0)
    parts = ((n - total * chance) ** 2 / (total * chance) for n, chance in zip(counts, p, strict=True) if chance)
    return (sum(parts) - free) / math.sqrt(2 * free)


# -- exactness ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    (
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.4, "top_k": 3},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.0, "typical_p": 0.7},
        {"temperature": 1.0, "repetition_penalty": 1.8, "frequency_penalty": 0.9, "presence_penalty": 0.4},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.05, "logit_bias": {2: 1.5}},
    ),
)
@pytest.mark.parametrize("drawn", (True, False))
def test_the_rejection_rule_leaves_the_distribution_as_it_is(fields, drawn):
    vocab = 6 + len(fields)
    target, draft = normal(2, vocab, len(str(fields)), spread=1.5)
    counts = [0] * vocab
    for seed in range(2500):
        sampler = state([0, 1, 1], (3, 4, 3), seed=seed, **fields)
        q = probabilities(draft, sampler)
        if not drawn:  # a proposer that is certain of one token
            q = (torch.arange(vocab) == int(draft.argmax())).double()
        answer = SimpleNamespace(sampler=sampler, request=SimpleNamespace(params=sampler.params), guess_probs=[q])
        answer.num_guessed, answer.seq = 1, SimpleNamespace(num_draft=1)
        counts[verdict(answer, target, draw(q, sampler.uniform(GUESS)), None).token] += 1
    assert surprise(counts, probabilities(target, sampler).tolist()) < 5


def test_rejection_accepts_as_often_as_can_be():
    p, q = (torch.tensor(x, dtype=torch.float64) for x in ([0.5, 0.3, 0.2, 0], [0.1, 0.6, 0.1, 0.2]))
    grid = [(i + 0.5) / 1000 for i in range(1000)]
    accepted = sum(float(q[g]) * sum(rejection_sample(p, q, g, u, 0.5) == g for u in grid) / 1000 for g in range(4))
    assert accepted == pytest.approx(float(torch.minimum(p, q).sum()), abs=2e-3)
    assert rejection_sample(p, p, 1, 0.999, 0.0) == 1
    assert {rejection_sample(p, q, 3, 0.0, u) for u in grid} == {0, 2}  # where p has more than q


FAVOURITES = {10: 1.0, 11: 0.4, 12: 0.0, 13: -0.5, 14: 0.9, 15: -2.0}  # token: its logit


def fixed_logits(runner, favourites: dict[int, float]):
    """Let a runner answer every row with these logits."""
    row = torch.full((320,), -50.0)
    row[list(favourites)] = torch.tensor(list(favourites.values()))

    def run_model(batch):
        runner.states = torch.ones(len(batch.logit_rows), 64)
        return row.repeat(len(batch.logit_rows), 1)

    runner.run = run_model


def assert_drawn_from_favourites(engine, **fields):
    """Each of the five places of 600 answers is distributed over the favourites as without guesses, some of which
    were right."""
    p = probabilities(torch.tensor(list(FAVOURITES.values())), state(**fields)).tolist()
    counts = [[0] * 6 for _ in range(5)]
    for seed in range(6):
        params = SamplingParams(n=100, seed=seed, max_tokens=5, ignore_eos=True, **fields)
        (output,) = run(engine, [([5, 6], params)])
        for answer in output.outputs:
            for place, token in enumerate(answer.token_ids):
                counts[place][token - 10] += 1
    assert all(surprise(count, p) < 5 for count in counts)
    assert 0.02 < engine.speculator.accepted / engine.speculator.drafted < 0.7, engine.speculator.stats()


@pytest.mark.parametrize("fields", ({}, {"typical_p": 0.75}))
def test_rejection_through_the_engine_leaves_the_distribution_as_it_is(fields):
    engine = make_engine(speculate="copy", rejection=True, num_blocks=2000, max_num_seqs=200)
    fixed_logits(engine.runner, FAVOURITES)
    fixed_logits(engine.speculator.proposer.runner, {10: -0.5, 11: 1.4, 12: 0.3, 13: 0.9, 14: -1.0, 16: 0.5})
    assert_drawn_from_favourites(engine, **fields)


@pytest.mark.parametrize("rejection", (False, True))
@pytest.mark.parametrize("speculate", PROPOSERS)
def test_greedy_answers_are_the_same_whoever_guesses(speculate, rejection):
    prompts = prompts_of(3, 9, 14)
    params = dataclasses.replace(GREEDY, max_tokens=24)
    engine = make_engine(speculate=speculate, rejection=rejection)
    outputs = run(engine, [(p, params) for p in prompts])
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == expected("llama", prompt, params)
    assert engine.speculator.drafted > 0


@pytest.mark.parametrize("temperature", (0, 1.0))
@pytest.mark.parametrize("most", (1, 3, 5))
def test_a_copy_is_always_right_and_memory_exact(most, temperature):
    engine = make_engine(speculate="copy", most=most)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=25, ignore_eos=True, frequency_penalty=0.3)
    requests = [engine.add(p, params) for p in prompts_of(5, 8)]
    while engine.has_work:
        engine.step()
        for seq in engine.scheduler.running:
            if seq.answer.sampler.n_output:
                assert seq.num_computed == len(seq.tokens) - 1
                assert len(seq.block_table) == blocks_needed(seq.num_computed, 4)
                behind = engine.speculator.proposer.backlog(seq.answer)
                assert behind == (1 if seq.answer in engine.speculator.proposer.following else seq.num_computed)
        for seq, known in engine.speculator.proposer.following.values():
            assert len(seq.block_table) == blocks_needed(seq.num_computed, 4) and known <= len(seq.tokens)
    assert engine.speculator.accepted == engine.speculator.drafted > 0
    steps = engine.scheduler.stats()["steps"]
    assert steps == 1 + math.ceil(24 / (most + 1))
    assert all(r.output().outputs[0].token_ids == expected("llama", r.prompt_ids, params) for r in requests)
    assert_all_free(engine)


def test_a_draft_ends_where_the_answer_does():
    engine, (prompt,) = make_engine(speculate="copy", most=5), prompts_of(5)
    first, second, stop, *_ = expected("llama", prompt, GREEDY)
    (output,) = run(engine, [(prompt, dataclasses.replace(GREEDY, stop_token_ids=[stop]))])
    assert output.outputs[0].token_ids == [first, second, stop] and stop not in (first, second)
    assert engine.speculator.accepted == engine.speculator.drafted == 2


@pytest.mark.parametrize("speculate", ("stranger", "self:1"))
def test_a_draft_that_was_wrong_guesses_as_one_that_starts_anew(speculate):
    """Whatever was taken back: the draft's tokens, keys and values are those of a draft that never guessed before."""
    engine = make_engine(speculate=speculate)
    proposer, compared = engine.speculator.proposer, []
    propose = proposer.propose

    def checked(choices, limits):
        if choices and len(compared) % 3 == 1:  # now and then the target goes on alone after a rejection
            compared.append([])
            return [[] for _ in choices]
        fresh = make_engine(speculate=speculate).speculator.proposer.propose(choices, limits)
        guesses = propose(choices, limits)
        assert guesses == fresh
        compared.append(guesses)
        return guesses

    proposer.propose = checked
    params = SamplingParams(temperature=0.6, seed=1, max_tokens=13, ignore_eos=True, repetition_penalty=1.2)
    run(engine, [(p, params) for p in prompts_of(4, 7)])  # short enough for a fresh draft to catch up in one round
    assert len(compared) > 5 and engine.speculator.accepted < engine.speculator.drafted


@pytest.mark.parametrize("speculate", PROPOSERS)
def test_logprobs_stops_and_streams_are_those_of_plain_decoding(speculate):
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=30, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    prompts = prompts_of(7, 12)
    plain = run(make_engine(), [(p, params) for p in prompts])
    stop = plain[0].outputs[0].text[5:8]
    for fields in ({}, {"stop": [stop]}, {"stop": [stop], "n": 3}):
        asked = [(p, dataclasses.replace(params, **fields)) for p in prompts]
        engine, streams = make_engine(speculate=speculate), {}
        added = [engine.add(*request) for request in asked]
        while engine.has_work:
            for delta in engine.step():
                key = delta.request.id, delta.index
                streams[key] = streams.get(key, "") + delta.text
        for request, wanted in zip(added, run(make_engine(), asked), strict=True):
            got = request.output()
            for a, b in zip(got.outputs, wanted.outputs, strict=True):
                assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
                assert streams[request.id, a.index] == a.text
                assert [s.logprob for s in a.logprobs] == pytest.approx([s.logprob for s in b.logprobs], abs=1e-4)
            for a, b in zip(got.prompt_logprobs[1:], wanted.prompt_logprobs[1:], strict=True):
                assert a.token == b.token and a.logprob == pytest.approx(b.logprob, abs=1e-4)


@pytest.mark.parametrize("jump", (True, False))
@pytest.mark.parametrize("speculate, rejection", (("copy", False), ("stranger", True)))
def test_a_structured_answer_is_guessed_within_its_structure(speculate, rejection, jump):
    params = SamplingParams(temperature=0.8, seed=2, max_tokens=50, regex="((the|a) (cat|dog) sat, ){3}end")
    engine, prompts = make_engine(speculate=speculate, rejection=rejection, jump_forward=jump), prompts_of(4, 6)
    propose = engine.speculator.proposer.propose

    def checked(answers, limits):
        guesses = propose(answers, limits)
        for answer, guess in zip(answers, guesses, strict=True):
            assert not guess or len(answer.guess_probs) == rejection * len(guess), "one for each, if for any"
        return guesses

    engine.speculator.proposer.propose = checked
    for prompt, output in zip(prompts, run(engine, [(p, params) for p in prompts]), strict=True):
        answer = output.outputs[0]
        assert answer.finish_reason == "stop" and re.fullmatch(params.regex, answer.text)
        assert rejection or answer.token_ids == expected("llama", prompt, params, jump=jump)
    assert engine.speculator.drafted > 0 and (rejection or engine.speculator.accepted == engine.speculator.drafted)


# -- failures and refusals ---------------------------------------------------------------------------------------


def test_a_draft_without_memory_leaves_the_target_alone():
    engine = make_engine(speculate="copy", num_blocks=60, most=6)
    proposer = engine.speculator.proposer
    held = proposer.tables.pool.allocate(56)  # room for one of the two, if at all
    params = dataclasses.replace(GREEDY, max_tokens=20)
    requests = [engine.add(p, params) for p in prompts_of(8, 9)]
    drain(engine)
    assert all(r.output().outputs[0].token_ids == expected("llama", r.prompt_ids, params) for r in requests)
    assert engine.speculator is not None
    proposer.tables.pool.release(held)
    assert_all_free(engine)


def test_padding_may_differ_but_not_the_tokens(tmp_path):
    target = tiny.hf_folder(tmp_path / "target", "llama")
    padded = tiny.hf_folder(tmp_path / "padded", "llama", seed=1, vocab_size=384)
    shorter = tiny.hf_folder(tmp_path / "shorter", "llama", seed=1, vocab_size=Tokenizer.from_folder(target).vocab_size)
    plain = LLM(str(target), kernels="reference", num_blocks=40)
    params = dataclasses.replace(GREEDY, logit_bias={319: 1})
    for draft in (padded, shorter):
        llm = LLM(str(target), kernels="reference", num_blocks=40, speculate=f"draft:{draft}")
        llm.engine.speculator.step = None  # guess, whether it pays or not
        for prompt in ("the cat sat", [5, 319, 6]):
            answers = [m.generate([prompt], params)[0].outputs[0].token_ids for m in (llm, plain)]
            assert answers[0] == answers[1]
        assert llm.stats()["drafted"] > 0
    text = (target / "tokenizer.json").read_text(encoding="utf-8")
    swapped = text.replace('"a":', '"?":', 1).replace('"b":', '"a":', 1).replace('"?":', '"b":', 1)
    (padded / "tokenizer.json").write_text(swapped, encoding="utf-8")
    with pytest.raises(ValueError, match="another tokenizer.*same family"):
        LLM(str(target), kernels="reference", num_blocks=40, speculate=f"draft:{padded}")
    check_same_tokens(plain.tokenizer, plain.tokenizer)


def test_a_quantised_copy_can_be_the_draft(tmp_path):
    folder = str(tiny.hf_folder(tmp_path / "m", "llama"))
    options = {"kernels": "reference", "num_blocks": 40}
    plain = LLM(folder, **options)
    llm = LLM(folder, **options, speculate=f"draft:{folder}", draft_quant="int8")
    assert llm.engine.speculator.proposer.model.weight_bytes < llm.model.weight_bytes / 2
    llm.engine.speculator.step = None
    params = dataclasses.replace(GREEDY, max_tokens=24)
    a, b = (m.generate(["the cat sat"], params)[0].outputs[0].token_ids for m in (llm, plain))
    assert a == b and llm.stats()["accepted"] > 0.5 * llm.stats()["drafted"]
    with pytest.raises(ValueError, match="draft_quant='int8' needs speculate='draft:"):
        LLM(folder, **options, draft_quant="int8")
    with pytest.raises(ValueError, match="num_speculative_tokens=0"):
        LLM(folder, **options, speculate="ngram", num_speculative_tokens=0)


@pytest.mark.parametrize("wrong", ("ngrams", "self:0", "self:2", "self:x", "draft:", "ngram:3", "head:", "heads"))
def test_unknown_proposers_are_refused_by_name(tmp_path, wrong):
    folder = tiny.hf_folder(tmp_path / "m", "llama")
    with pytest.raises(ValueError, match=f"speculate='{wrong}'"):
        LLM(str(folder), kernels="reference", num_blocks=20, speculate=wrong)


# -- how much to guess -------------------------------------------------------------------------------------------


class SimpleAnswer:
    """What guessing knows of an answer; these tokens always have something to go on with."""

    finish_reason = None

    def __init__(self, tokens=(1, 2, 3, 1, 2, 3)):
        self.seq = SimpleNamespace(tokens=list(tokens))


def ngrams(tokens: list[int], limit: int) -> tuple[int, list[int]]:
    answer, proposer = SimpleAnswer(tokens), NgramProposer(3, 1)
    return proposer.strength([answer])[0], proposer.propose([answer], [limit])[0]


def test_ngrams_find_the_latest_longest_match_and_follow_a_growing_sequence():
    assert ngrams([1, 2, 3, 9, 9, 2, 3, 7, 1, 2, 3], 2) == (3, [9, 9])
    assert ngrams([2, 3, 5, 2, 3, 7, 1, 2, 3], 1) == (2, [7])
    assert ngrams([1, 2, 3], 4) == (0, [])
    assert ngrams([4, 8, 8], 5) == (1, [8] * 5)  # runs into itself
    assert ngrams([1, 2, 1, 2], 5) == (2, [1, 2, 1, 2, 1])
    answer, proposer = SimpleAnswer([1, 2]), NgramProposer(2, 2)
    assert proposer.propose([answer], [3]) == [[]]
    answer.seq.tokens += [3, 1, 2]
    assert proposer.propose([answer], [3]) == [[3, 1, 2]]
    answer.seq.tokens += [4, 1, 2]
    assert proposer.propose([answer], [2]) == [[4, 1]]


def make(step=lambda rows: 10.0 + rows, draft=None, most=6, rounds=0, backlog=0, **options) -> Speculator:
    """A speculator over n-grams for which a model's `rounds` to ask and its `backlog` are made up."""
    proposer = NgramProposer()
    proposer.ROUNDS_TO_ASK, proposer.backlog = rounds, lambda answer: backlog
    return Speculator(proposer, most, step, draft, **options)


def observe(speculator: Speculator, answers: list, *right: int) -> list[int]:
    """One step in which so many tokens of each guess were right. Returns the lengths of the guesses."""
    guesses = speculator.propose(answers, [99] * len(answers))
    for i, (answer, guess) in enumerate(zip(answers, guesses, strict=True)):
        answer.num_guessed, answer.num_right = len(guess), min(right[i % len(right)], len(guess))
        if guess:
            speculator.observe(answer)
    return [len(guess) for guess in guesses]


def asked(speculator: Speculator) -> list[int]:
    """How many answers the proposer was asked about, call by call."""
    calls, strength = [], speculator.proposer.strength
    speculator.proposer.strength = lambda answers: calls.append(len(answers)) or strength(answers)
    return calls


def test_guesses_grow_where_they_are_right_and_cease_where_they_are_not():
    good, bad, a, b = make(), make(), SimpleAnswer(), SimpleAnswer()
    lengths = [(observe(good, [a], 9)[0], observe(bad, [b], 0)[0]) for _ in range(1000)]
    assert lengths[-1][0] == 6 == lengths[20][0]
    late = [length for _, length in lengths[100:]]
    assert 0 < sum(late) <= len(lengths) * SHARE / bad.price(1, 1, 1) and set(late) == {0, 1}  # a probe now and then
    assert [observe(bad, [b], 9)[0] for _ in range(600)][-1] == 6  # and a probe that succeeds brings them back


@pytest.mark.parametrize("answers", [1, 3, 8])
@pytest.mark.parametrize("draft", [None, lambda rows: 1.0 + 0.1 * rows])
@pytest.mark.parametrize("right", [0, 1])
def test_what_guesses_lose_is_bounded_whatever_they_are_worth(answers, draft, right):
    """By the credit, the share of all tokens, and the one step that overdraws the account."""
    speculator = make(lambda rows: 10.0 + 3.0 * rows, draft, rounds=1)
    choices, spent, dearest = [SimpleAnswer() for _ in range(answers)], 0.0, 0.0
    for turn in range(2000):
        before = speculator.accounts[speculator.batch]
        lengths = observe(speculator, choices, right if turn % 7 == 0 else 0)
        price = speculator.price(answers, sum(lengths), max(lengths)) if speculator.strengths else 0.0
        assert before + SHARE * answers > 0 or turn == 0 or not speculator.strengths, "asked on an empty account"
        spent, dearest = spent + price, max(dearest, price)
        assert speculator.accounts[speculator.batch] > -dearest
    assert spent <= CREDIT + dearest + SHARE * answers * 2000 + speculator.accepted


def test_a_good_past_does_not_pay_for_a_long_bad_present():
    spent = []
    for good in (0, 5000):
        speculator, answer = make(), SimpleAnswer()
        for _ in range(good):
            observe(speculator, [answer], 9)
        spent.append(sum(speculator.price(1, *observe(speculator, [answer], 0) * 2) for _ in range(300)))
    assert spent[1] <= MOST_CREDIT + SHARE * 300 + speculator.price(1, 6, 6), spent
    assert spent[0] < spent[1], "but it pays for a while"


def test_answers_that_are_not_thought_to_pay_are_tried_in_turn():
    speculator, answers = make(), [SimpleAnswer() for _ in range(3)]
    tried = [observe(speculator, answers, 0) for _ in range(3000)][500:]
    order = [lengths.index(1) for lengths in tried if sum(lengths) == 1]
    assert len(order) > 50 and order[:9] in ([0, 1, 2] * 3, [1, 2, 0] * 3, [2, 0, 1] * 3)
    new = SimpleAnswer()
    assert not any(observe(speculator, [new], 0)[0] for _ in range(9)), "a new one has to earn it first"


def test_what_does_not_pay_in_a_batch_silences_nobody_alone():
    speculator, answers = make(draft=lambda rows: 0.5, rounds=1), [SimpleAnswer() for _ in range(8)]
    for _ in range(500):
        observe(speculator, answers, 0)
    assert speculator.accounts[speculator.batch] < 1
    observe(speculator, [SimpleAnswer()], 9)
    assert speculator.strengths, "one answer has an account of its own"


def test_an_answer_that_wins_does_not_pay_for_tries_of_others():
    speculator, answers = make(), [SimpleAnswer(), SimpleAnswer([5, 6, 7, 5, 6, 7])]
    guessed = [observe(speculator, answers, 9, 0)[1] for _ in range(1000)]
    assert speculator.accounts[speculator.batch] > 1
    assert 0 < sum(guessed[100:]) <= SHARE * 2 * 1000 / (speculator.price(2, 1, 1) - speculator.price(2, 0, 0)) * 2


def test_a_proposer_that_works_and_says_nothing_is_paid_all_the_same():
    speculator = make(draft=lambda rows: 1.0)
    speculator.proposer.propose = lambda answers, limits: [[] for _ in answers]  # still busy reading
    calls, answer = asked(speculator), SimpleAnswer()
    for _ in range(300):
        observe(speculator, [answer], 0)
    assert 5 < len(calls) < 150


def test_guesses_that_are_impossible_count_as_wrong_and_cost_no_row():
    speculator, answer = make(), SimpleAnswer()
    lengths = {len(speculator.propose([answer], [99], lambda answer, guess: [])[0]) for _ in range(100)}
    (record,) = speculator.records[answer].values()
    assert lengths == {0} and record.rate < 0.1 and speculator.accounts[speculator.batch] >= CREDIT


def test_guesses_stop_where_rows_or_rounds_are_not_free():
    answers = [SimpleAnswer() for _ in range(3)]
    free, dear = make(lambda rows: 10.0), make(lambda rows: 10.0 * rows)
    for _ in range(5):
        assert observe(free, answers, 9) == [6] * 3
        assert observe(dear, answers, 9) == [0] * 3
    crowded = make(lambda rows: 10.0 + max(0, rows - 4) * 5)
    assert sum(observe(crowded, answers, 9)) == 1  # the fourth row is free, the fifth is not worth it
    assert make(draft=lambda rows: 2.0).break_even() == pytest.approx(MARGIN * 3 / 11, rel=1e-3)
    cheap, dear = make(draft=lambda rows: 0.1), make(draft=lambda rows: 30.0)
    assert observe(cheap, answers[:1], 9)[0] > 0 == observe(dear, answers[:1], 9)[0]
    asking = make(lambda rows: 10.0, lambda rows: 6.0, rounds=1)
    asking.overall[3] = Record(60.0, 40.0)
    assert observe(asking, answers[:1], 9) == [1], "the first round was made by asking"


def test_what_follows_the_end_of_an_answer_was_not_wrong():
    speculator, answer = make(), SimpleAnswer()
    (guess,) = speculator.propose([answer], [99])
    answer.num_guessed, answer.num_right, answer.finish_reason = len(guess), 1, "stop"
    before = speculator.overall[3].rate
    speculator.observe(answer)
    assert len(guess) > 1 and speculator.overall[3].rate > before


def test_a_batch_in_which_even_right_guesses_cost_is_not_asked_at_all():
    """Eight rows keep the machine busy, two do not: the proposer is asked by the two only, right as it always is."""
    speculator = make(lambda rows: 10.0 + max(0, rows - 7) * 9, lambda rows: 0.01)
    answers, calls = [SimpleAnswer() for _ in range(8)], asked(speculator)
    for _ in range(500):
        assert observe(speculator, answers, 9) == [0] * 8
        assert sum(observe(speculator, answers[:2], 9)) in (5, 6), "up to the seventh row, and seldom one to try"
    assert calls == [2] * 500


def test_what_a_draft_missed_is_paid_for_and_a_prompt_read_once_is_not():
    speculator = make(lambda rows: 100.0 + rows, lambda rows: 1.0 + rows, backlog=50)
    answer, left = SimpleAnswer(), []
    speculator.batch = 1  # of one answer
    for silent in (0, 0, 20):
        speculator.steps += silent
        speculator.accounts[speculator.batch] = MOST_CREDIT
        (guess,) = speculator.propose([answer], [99])
        left.append(MOST_CREDIT - speculator.accounts[speculator.batch] - speculator.price(1, len(guess), len(guess)))
    assert left == pytest.approx([0, 0, MARGIN * 20 / 101])


def test_an_answer_far_behind_is_seldom_tried():
    """A draft model that has not read a long prompt would have to, for a single guess that is not thought to pay."""
    tries = []
    for backlog in (0, 500):
        speculator, answer = make(draft=lambda rows: 2.0 + rows, backlog=backlog), SimpleAnswer()
        tries.append(sum([observe(speculator, [answer], 0)[0] > 0 for _ in range(2000)][100:]))
    assert tries[0] > 10 and tries[1] == 0


def test_a_proposer_that_only_costs_is_hardly_asked_until_it_is_right_again():
    """Its guesses are never right, and even to say that it has none takes it a part of a step."""
    speculator, answers = make(draft=lambda rows: 0.7, rounds=1), [SimpleAnswer() for _ in range(4)]
    calls, counts = asked(speculator), []
    for turn in range(1400):
        observe(speculator, answers, 0 if turn < 1000 else 9)
        counts.append(len(calls))
    assert 0 < counts[999] - counts[99] <= 900 * SHARE * 4 / speculator.price(4, 0, 0)
    assert counts[1399] - counts[1299] == 100, "a proposer that is right again is asked again"


def test_an_answers_own_record_counts_as_much_as_the_proposer_is_to_be_trusted():
    """One wrong guess ends those of an answer whose proposer knows little of it, and not of one that knows it all."""
    hasty, calm = (make(lambda rows: 10 + 6 * rows, most=1, trust=trust) for trust in (2.0, 40.0))
    a, b = SimpleAnswer(), SimpleAnswer()
    for speculator, answer in ((hasty, a), (calm, b)):
        speculator.overall[3] = Record(70.0, 30.0)  # right seven times in ten
        assert observe(speculator, [answer], 0) == [1]
    assert (observe(hasty, [a], 0), observe(calm, [b], 0)) == ([0], [1])


@pytest.mark.parametrize(
    "most, calls",
    [
        (8, [9.0, 9.0, 9.0]),  # a busy moment spoils the first size only
        (2, [1.0] * 4 + [9.0] * 4),  # or the second one, to which no larger size gives the lie
    ],
)
def test_a_busy_moment_does_not_count_as_the_cost_of_a_step(monkeypatch, most, calls):
    clock, seconds = [0.0], iter([*calls, *[1.0] * 99])
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    cost = StepCost.measure(lambda rows: clock.__setitem__(0, clock[0] + next(seconds)), most, budget_s=1e9)
    assert set(cost.seconds) == {1.0}


def test_step_costs_are_interpolated_and_never_fall(monkeypatch):
    calls = []
    cost = StepCost.measure(calls.append, 8)
    assert sorted(set(calls)) == [1, 2, 4, 8] and cost.seconds == sorted(cost.seconds)
    calls = []
    StepCost.measure(lambda rows: calls.append("run"), 2, before=lambda: calls.append("before"))
    # But for the first call of each size, which may have to record something.
    assert calls[-6:] == ["before", "run"] * 3 and calls.count("run") == calls.count("before") + 2
    cost = StepCost({1: 1.0, 2: 2.0, 4: 3.0})
    assert [cost(rows) for rows in (1, 2, 3, 4, 8)] == [1, 2, 2.5, 3, 5]
    slow, calls = iter(range(10**6)), []  # every look at the clock is a second later than the last
    monkeypatch.setattr("time.perf_counter", lambda: float(next(slow)))
    StepCost.measure(calls.append, 8, budget_s=0.4)
    assert calls == [1, 1, 2, 2, 1, 2], "slow steps are measured twice and no more"


# -- compiled steps ----------------------------------------------------------------------------------------------


def test_several_tokens_of_a_sequence_replay_as_sequences_of_one():
    answers = []
    for captured in (False, True):
        engine = make_engine(speculate="copy")
        if captured:
            engine.runner = CapturedRunner(engine.runner, [4, 9, 30], 16, computed_anew)
        params = SamplingParams(temperature=0.7, seed=1, max_tokens=20, ignore_eos=True, prompt_logprobs=0)
        outputs = run(engine, [(p, params) for p in prompts_of(5, 3, 40)])
        answers.append([output.outputs[0].token_ids for output in outputs])
        if captured:
            assert set(engine.runner.recorded) == {4, 9, 30}
    assert answers[0] == answers[1]
