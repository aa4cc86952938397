"""Guesses change no answer and no distribution, leave no trace in memory, and are only made where they pay."""

import dataclasses
import math
import re
from types import SimpleNamespace

import pytest
import tiny
import torch
from test_engine import GREEDY, assert_all_free, expected, make_engine, prompts_of, run, world

from compiled import CapturedRunner
from drafting.budget import CREDIT, MARGIN, MOST_CREDIT, SHARE, Record, Speculator, StepCost
from drafting.draft_model import check_same_tokens, first_layers
from generate import LLM
from kv_paged import blocks_needed
from sampling import SamplerState, SamplingParams, draw, probabilities
from speculative import GUESS, NgramProposer, rejection_sample, verdict
from tokenizer import Tokenizer

PROPOSERS = ("ngram", "head", "copy", "stranger", "self:1")


def surprise(counts: list[int], p: list[float]) -> float:
    """Pearson's statistic in standard deviations above its mean; tokens that p never gives must not occur."""
    total, statistic, cells = sum(counts), 0.0, 0
    for count, chance in zip(counts, p, strict=True):
        if chance == 0:
            assert count == 0
        else:
            statistic += (count - total * chance) ** 2 / (total * chance)
            cells += 1
    free = max(1, cells - 1)
    return (statistic - free) / math.sqrt(2 * free)


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
    generator = torch.Generator().manual_seed(len(str(fields)))
    target, draft = torch.randn(2, vocab, generator=generator) * 1.5
    counts = [0] * vocab
    for seed in range(2500):
        state = SamplerState(SamplingParams(seed=seed, **fields), [0, 1, 1], 0)
        for token in (3, 4, 3):
            state.commit(token)
        if drawn:
            q = probabilities(draft, state)
        else:  # a proposer that is certain of one token
            q = torch.zeros(vocab, dtype=torch.float64)
            q[int(draft.argmax())] = 1.0
        guess = draw(q, state.uniform(GUESS))
        choice = SimpleNamespace(
            sampler=state,
            request=SimpleNamespace(params=state.params),
            guess_probs=[q],
            num_guessed=1,
            seq=SimpleNamespace(num_draft=1),
        )
        counts[verdict(choice, target, guess, None).token] += 1
    p = probabilities(target, state)
    assert surprise(counts, p.tolist()) < 5


def test_rejection_accepts_as_often_as_can_be():
    p, q = (torch.tensor(x, dtype=torch.float64) for x in ([0.5, 0.3, 0.2, 0], [0.1, 0.6, 0.1, 0.2]))
    grid = [(i + 0.5) / 1000 for i in range(1000)]
    accepted = sum(float(q[g]) * sum(rejection_sample(p, q, g, u, 0.5) == g for u in grid) / 1000 for g in range(4))
    assert accepted == pytest.approx(float(torch.minimum(p, q).sum()), abs=2e-3)
    assert rejection_sample(p, p, 1, 0.999, 0.0) == 1
    assert {rejection_sample(p, q, 3, 0.0, u) for u in grid} == {0, 2}  # where p has more than q


def assert_drawn_from(engine, p: list[float], **fields):
    """Each of the five places of 600 answers is distributed over the tokens 10 to 15 as p says."""
    counts = [[0] * 6 for _ in range(5)]
    for seed in range(6):
        params = SamplingParams(n=100, seed=seed, max_tokens=5, ignore_eos=True, **fields)
        (output,) = run(engine, [([5, 6], params)])
        for answer in output.outputs:
            for place, token in enumerate(answer.token_ids):
                counts[place][token - 10] += 1
    for count in counts:
        assert surprise(count, p) < 5


def fixed_logits(engine, favourites: dict[int, float]):
    row = torch.full((320,), -50.0)
    for token, value in favourites.items():
        row[token] = value
    engine.runner.run = lambda batch: row.repeat(len(batch.logit_rows), 1)


@pytest.mark.parametrize("fields", ({}, {"typical_p": 0.75}))
def test_rejection_through_the_engine_leaves_the_distribution_as_it_is(fields):
    engine = make_engine(speculate="copy", rejection=True, num_blocks=2000, max_num_seqs=200)
    favourites = {10: 1.0, 11: 0.4, 12: 0.0, 13: -0.5, 14: 0.9, 15: -2.0}
    fixed_logits(engine, favourites)
    fixed_logits(engine.speculator.proposer, {10: -0.5, 11: 1.4, 12: 0.3, 13: 0.9, 14: -1.0, 16: 0.5})
    p = probabilities(torch.tensor(list(favourites.values())), SamplerState(SamplingParams(**fields), []))
    assert_drawn_from(engine, p.tolist(), **fields)
    overlap = 0.1 < engine.speculator.accepted / engine.speculator.drafted < 0.7
    assert overlap, engine.speculator.stats()


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


def test_a_structured_answer_is_guessed_within_its_structure():
    params = SamplingParams(temperature=0.8, seed=2, max_tokens=40, regex="(the (cat|dog) sat, ){3}end")
    engine = make_engine(speculate="copy", jump_forward=False)
    requests = [(p, params) for p in prompts_of(4, 6)]
    for (prompt, _), output in zip(requests, run(engine, requests), strict=True):
        assert output.outputs[0].token_ids == expected("llama", prompt, params, jump=False)
    assert engine.speculator.accepted == engine.speculator.drafted > 0


@pytest.mark.parametrize("jump", (True, False))
def test_the_rejection_rule_keeps_to_a_structure(jump):
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=50, n=4, regex="((the|a) (cat|dog) sat, ){3}end")
    engine = make_engine(speculate="stranger", rejection=True, jump_forward=jump)
    for output in run(engine, [(p, params) for p in prompts_of(4, 6)]):
        for answer in output.outputs:
            assert answer.finish_reason == "stop" and re.fullmatch(params.regex, answer.text)
    assert engine.speculator.drafted > 0


# -- failures and refusals ---------------------------------------------------------------------------------------


def test_a_proposer_that_fails_is_done_without(capsys):
    engine = make_engine(speculate="ngram")
    engine.speculator.proposer.propose = lambda choices, limits: 1 / 0
    request = engine.add(prompts_of(5)[0], GREEDY)
    while engine.has_work:
        engine.step()
    assert engine.speculator is None and "ZeroDivisionError" in capsys.readouterr().err
    assert request.output().outputs[0].token_ids == expected("llama", request.prompt_ids, GREEDY)
    assert_all_free(engine)


def test_a_draft_without_memory_leaves_the_target_alone():
    engine = make_engine(speculate="copy", num_blocks=60)
    proposer = engine.speculator.proposer
    held = proposer.tables.pool.allocate(56)  # room for one of the two, if at all
    params = dataclasses.replace(GREEDY, max_tokens=20)
    requests = [engine.add(p, params) for p in prompts_of(8, 9)]
    while engine.has_work:
        engine.step()
    assert all(r.output().outputs[0].token_ids == expected("llama", r.prompt_ids, params) for r in requests)
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
    library = (target / "tokenizer.json").read_text(encoding="utf-8")
    for file, text in (("tokenizer.json", library.replace('"a":', '"\u0000":', 1).replace('"b":', '"a":', 1)),):
        (padded / file).write_text(text.replace('"\u0000":', '"b":', 1), encoding="utf-8")
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


def test_first_layers_share_their_weights():
    model = world()[2]
    draft = first_layers(model, 1)
    assert len(draft.layers) == 1 and len(model.layers) == 2 and draft.layers[0] is model.layers[0]


# -- how much to guess -------------------------------------------------------------------------------------------


def ngrams(tokens: list[int], limit: int, longest=3, shortest=1) -> tuple[int, list[int]]:
    choice = SimpleChoice(tokens)
    proposer = NgramProposer(longest, shortest)
    return proposer.strength([choice])[0], proposer.propose([choice], [limit])[0]


class SimpleChoice:
    finish_reason = None

    def __init__(self, tokens):
        self.seq = SimpleNamespace(tokens=tokens)


def test_ngrams_find_the_latest_longest_match():
    assert ngrams([1, 2, 3, 9, 9, 2, 3, 7, 1, 2, 3], 2) == (3, [9, 9])
    assert ngrams([2, 3, 5, 2, 3, 7, 1, 2, 3], 1) == (2, [7])
    assert ngrams([1, 2, 3], 4) == (0, [])
    assert ngrams([4, 8, 8], 5) == (1, [8] * 5)  # runs into itself
    assert ngrams([1, 2, 1, 2], 5) == (2, [1, 2, 1, 2, 1])


def test_ngrams_follow_a_growing_sequence():
    choice, proposer = SimpleChoice([1, 2]), NgramProposer(2, 2)
    assert proposer.propose([choice], [3]) == [[]]
    choice.seq.tokens += [3, 1, 2]
    assert proposer.propose([choice], [3]) == [[3, 1, 2]]
    choice.seq.tokens += [4, 1, 2]
    assert proposer.propose([choice], [2]) == [[4, 1]]


def observe(speculator: Speculator, choices: list, right: int) -> list[int]:
    """One step in which of every guess so many tokens were right. Returns the lengths of the guesses."""
    guesses = speculator.propose(choices, [99] * len(choices))
    for choice, guess in zip(choices, guesses, strict=True):
        choice.num_guessed, choice.num_right = len(guess), min(right, len(guess))
        if guess:
            speculator.observe(choice)
    return [len(guess) for guess in guesses]


def always_matching() -> SimpleChoice:
    return SimpleChoice([1, 2, 3, 1, 2, 3])


def test_guesses_grow_where_they_are_right_and_cease_where_they_are_not():
    good, bad = (Speculator(NgramProposer(), 6, lambda rows: 10 + rows) for _ in range(2))
    a, b = always_matching(), always_matching()
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
    proposer = NgramProposer()
    proposer.ROUNDS_TO_ASK = 1
    speculator = Speculator(proposer, 6, lambda rows: 10.0 + 3.0 * rows, draft)
    choices, spent, dearest = [always_matching() for _ in range(answers)], 0.0, 0.0
    for turn in range(2000):
        before = speculator.account.asking
        lengths = observe(speculator, choices, right if turn % 7 == 0 else 0)
        price = speculator.price(answers, sum(lengths), max(lengths)) if speculator.strengths else 0.0
        assert before + SHARE * answers > 0 or turn == 0 or not speculator.strengths, "asked on an empty account"
        spent, dearest = spent + price, max(dearest, price)
        assert speculator.account.asking > -dearest
    assert spent <= CREDIT + dearest + SHARE * answers * 2000 + speculator.accepted


def test_a_good_past_does_not_pay_for_a_long_bad_present():
    spent = []
    for good in (0, 5000):
        speculator = Speculator(NgramProposer(), 6, lambda rows: 10.0 + rows)
        a = always_matching()
        for _ in range(good):
            observe(speculator, [a], 9)
        spent.append(sum(speculator.price(1, *observe(speculator, [a], 0) * 2) for _ in range(300)))
    assert spent[1] <= MOST_CREDIT + SHARE * 300 + speculator.price(1, 6, 6), spent
    assert spent[0] < spent[1], "but it pays for a while"


def test_answers_that_are_not_thought_to_pay_are_tried_in_turn():
    speculator = Speculator(NgramProposer(), 6, lambda rows: 10.0 + rows)
    choices = [always_matching() for _ in range(3)]
    tried = [observe(speculator, choices, 0) for _ in range(3000)][500:]
    order = [lengths.index(1) for lengths in tried if sum(lengths) == 1]
    assert len(order) > 50 and order[:9] in ([0, 1, 2] * 3, [1, 2, 0] * 3, [2, 0, 1] * 3)


def test_what_does_not_pay_in_a_batch_silences_nobody_alone():
    proposer = NgramProposer()
    proposer.ROUNDS_TO_ASK = 1
    speculator = Speculator(proposer, 6, lambda rows: 10.0 + rows, lambda rows: 0.5)
    choices, alone = [always_matching() for _ in range(8)], always_matching()
    for _ in range(500):
        observe(speculator, choices, 0)
    assert speculator.account.asking < 1
    observe(speculator, [alone], 9)
    assert speculator.strengths, "one answer has an account of its own"


def test_an_answer_that_wins_does_not_pay_for_tries_of_others():
    speculator = Speculator(NgramProposer(), 6, lambda rows: 10.0 + rows)
    good, bad = (SimpleChoice(tokens) for tokens in ([1, 2, 3, 1, 2, 3], [5, 6, 7, 5, 6, 7]))
    guessed = []
    for _ in range(1000):
        guesses = speculator.propose([good, bad], [99, 99])
        guessed.append(len(guesses[1]))
        for choice, guess, right in ((good, guesses[0], 9), (bad, guesses[1], 0)):
            choice.num_guessed, choice.num_right = len(guess), min(right, len(guess))
            if guess:
                speculator.observe(choice)
    assert speculator.account.asking > 1
    assert 0 < sum(guessed[100:]) <= SHARE * 2 * 1000 / (speculator.price(2, 1, 1) - speculator.price(2, 0, 0)) * 2


def test_a_proposer_that_works_and_says_nothing_is_paid_all_the_same():
    speculator = Speculator(NgramProposer(), 6, lambda rows: 10.0 + rows, lambda rows: 1.0)
    speculator.proposer.propose = lambda choices, limits: [[] for _ in choices]  # still busy reading
    a = always_matching()
    asked = sum(bool(speculator.propose([a], [99]) and speculator.strengths) for _ in range(300))
    assert 5 < asked < 150


def test_guesses_that_are_impossible_count_as_wrong_and_cost_no_row():
    speculator = Speculator(NgramProposer(), 6, lambda rows: 10.0 + rows)
    a, lengths = always_matching(), []
    for _ in range(100):
        lengths.append(len(speculator.propose([a], [99], lambda choice, guess: [])[0]))
    (record,) = speculator.records[a].values()
    assert set(lengths) == {0} and record.rate < 0.1 and speculator.account.asking >= CREDIT


def test_guesses_stop_where_rows_are_not_free():
    free, dear = (Speculator(NgramProposer(), 6, step) for step in (lambda rows: 10.0, lambda rows: 10.0 * rows))
    choices = [always_matching() for _ in range(3)]
    for _ in range(5):
        assert observe(free, choices, 9) == [6] * 3
        assert observe(dear, choices, 9) == [0] * 3
    crowded = Speculator(NgramProposer(), 6, lambda rows: 10.0 + max(0, rows - 4) * 5)
    assert sum(observe(crowded, choices, 9)) == 1  # the fourth row is free, the fifth is not worth it
    found = Speculator(NgramProposer(), 6, lambda rows: 10.0 + rows, lambda rows: 2.0).break_even()
    assert found == pytest.approx(MARGIN * 3 / 11, rel=1e-3)


def test_a_batch_in_which_even_right_guesses_cost_is_not_asked_at_all():
    """Eight rows keep the machine busy, two do not: the proposer is asked by the two only, right as it always is."""
    speculator = Speculator(NgramProposer(), 6, lambda rows: 10.0 + max(0, rows - 7) * 9, lambda rows: 0.01)
    choices, asked = [always_matching() for _ in range(8)], []
    strength = speculator.proposer.strength
    speculator.proposer.strength = lambda choices: asked.append(len(choices)) or strength(choices)
    for _ in range(500):
        assert observe(speculator, choices, 9) == [0] * 8
        assert sum(observe(speculator, choices[:2], 9)) in (5, 6), "up to the seventh row, and seldom one to try"
    assert asked == [2] * 500


def test_draft_costs_count():
    cheap, dear = (Speculator(NgramProposer(), 6, lambda r: 10 + r, lambda r, s=s: s) for s in (0.1, 30.0))
    a = always_matching()
    assert observe(cheap, [a], 9)[0] > 0 == observe(dear, [a], 9)[0]


def test_what_a_draft_missed_is_paid_for_and_a_prompt_read_once_is_not():
    proposer = NgramProposer()
    proposer.backlog = lambda choice: 50
    speculator = Speculator(proposer, 6, lambda rows: 100.0 + rows, lambda rows: 1.0 + rows)
    a, left = always_matching(), []
    speculator.accounts[1] = speculator.account  # of one answer
    for silent in (0, 0, 20):
        speculator.steps += silent
        speculator.account.asking = MOST_CREDIT
        (guess,) = speculator.propose([a], [99])
        left.append(MOST_CREDIT - speculator.account.asking - speculator.price(1, len(guess), len(guess)))
    assert left == pytest.approx([0, 0, MARGIN * 20 / 101])


def test_an_answer_far_behind_is_seldom_tried():
    """A draft model that has not read a long prompt would have to, for a single guess that is not thought to pay."""
    tries = []
    for backlog in (0, 500):
        proposer = NgramProposer()
        proposer.backlog = lambda choice, tokens=backlog: tokens
        speculator = Speculator(proposer, 6, lambda rows: 10.0 + rows, lambda rows: 2.0 + rows)
        a = always_matching()
        guessed = [bool(observe(speculator, [a], 0)[0]) for _ in range(2000)]
        tries.append(sum(guessed[100:]))
    assert tries[0] > 10 and tries[1] == 0


def test_a_proposer_that_only_costs_is_hardly_asked_until_it_is_right_again():
    """Its guesses are never right, and even to say that it has none takes it a part of a step."""
    proposer = NgramProposer()
    proposer.ROUNDS_TO_ASK = 1
    speculator = Speculator(proposer, 6, lambda rows: 10.0 + rows, lambda rows: 0.7)
    choices, asked = [always_matching() for _ in range(4)], []
    strength = proposer.strength
    proposer.strength = lambda choices: asked.append(turn) or strength(choices)
    for turn in range(1000):  # noqa: B007
        observe(speculator, choices, 0)
    late = sum(turn >= 100 for turn in asked)
    assert 0 < late <= 900 * SHARE * 4 / speculator.price(4, 0, 0)
    for turn in range(1000, 1400):  # noqa: B007
        observe(speculator, choices, 9)
    assert asked[-100:] == list(range(1300, 1400)), "a proposer that is right again is asked again"


def test_an_answers_own_record_counts_as_much_as_the_proposer_is_to_be_trusted():
    """One wrong guess ends those of an answer whose proposer knows little of it, and not of one that knows it all."""
    hasty, calm = (Speculator(NgramProposer(), 1, lambda rows: 10 + 6 * rows, trust=trust) for trust in (2.0, 40.0))
    a, b = always_matching(), always_matching()
    for speculator, choice in ((hasty, a), (calm, b)):
        speculator.overall[3] = Record(70.0, 30.0)  # right seven times in ten
        assert observe(speculator, [choice], 0) == [1]
    assert (observe(hasty, [a], 0), observe(calm, [b], 0)) == ([0], [1])


def test_step_costs_are_interpolated_and_never_fall(monkeypatch):
    calls = []
    cost = StepCost.measure(calls.append, 8)
    assert sorted(set(calls)) == [1, 2, 4, 8] and cost.seconds == sorted(cost.seconds)
    late = iter([9.0, 9.0, 9.0, *[1.0] * 99])  # seconds of each call: a busy moment spoils the first size only
    clock = [0.0]
    with monkeypatch.context() as patch:
        patch.setattr("time.perf_counter", lambda: clock[0])
        cost = StepCost.measure(lambda rows: clock.__setitem__(0, clock[0] + next(late)), 8, budget_s=1e9)
    assert cost.seconds == [1.0] * 4
    late = iter([*[1.0] * 4, *[9.0] * 4, *[1.0] * 99])  # or the second one, to which no larger size gives the lie
    with monkeypatch.context() as patch:
        patch.setattr("time.perf_counter", lambda: clock[0])
        cost = StepCost.measure(lambda rows: clock.__setitem__(0, clock[0] + next(late)), 2, budget_s=1e9)
    assert cost.seconds == [1.0] * 2
    slow = iter(range(10**6))  # every look at the clock is a second later than the last
    with monkeypatch.context() as patch:
        patch.setattr("time.perf_counter", lambda: float(next(slow)))
        calls = []
        StepCost.measure(calls.append, 8, budget_s=0.4)
    assert calls == [1, 1, 2, 2, 1, 2], "slow steps are measured twice and no more"
    calls = []
    StepCost.measure(lambda rows: calls.append("run"), 2, before=lambda: calls.append("before"))
    timed = "".join(
        call[0] for call in calls
    )  # but for the first call of each size, which may have to record something
    assert "br" * 3 in timed and timed.count("r") == timed.count("b") + 2
    cost = StepCost({1: 1.0, 2: 2.0, 4: 3.0})
    assert [cost(rows) for rows in (1, 2, 3, 4, 8)] == [1, 2, 2.5, 3, 5]


# -- compiled steps ----------------------------------------------------------------------------------------------


def test_several_tokens_of_a_sequence_replay_as_sequences_of_one():
    answers = []
    for captured in (False, True):
        engine = make_engine(speculate="copy")
        if captured:

            def capture(run):
                output = run()
                return output, lambda: output.copy_(run())

            engine.runner = CapturedRunner(engine.runner, [4, 9, 30], 16, capture)
        params = SamplingParams(temperature=0.7, seed=1, max_tokens=20, ignore_eos=True, prompt_logprobs=0)
        outputs = run(engine, [(p, params) for p in prompts_of(5, 3, 40)])
        answers.append([output.outputs[0].token_ids for output in outputs])
        if captured:
            assert set(engine.runner.recorded) == {4, 9, 30}
    assert answers[0] == answers[1]
