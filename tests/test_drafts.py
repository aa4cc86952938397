"""Drafts without a model: what is carried, what a step has room for, and that nothing stays of what was wrong."""

from types import SimpleNamespace

import pytest

from kv_paged import BlockPool
from request import Answer
from scheduler import Scheduler, Sequence
from speculative import Drafts

THE, CAT, SAT, ON, HIS, HAT = range(6)


class Guesser:
    """A speculator that always guesses the same, and notes what it was asked and told."""

    def __init__(self, *guess):
        self.guess, self.rooms, self.seen = list(guess), [], []

    def propose(self, answers, rooms, trim):
        self.rooms.append(rooms)
        return [self.guess for _ in answers]

    def observe(self, answer):
        self.seen.append((answer.num_guessed, answer.num_right))


def decoding(speculator, budget=4, max_tokens=20, forced=None):
    """An answer that has computed "the" and decided "cat", in a pool with pages of two tokens."""
    scheduler = Scheduler(BlockPool(12, 2), max_num_batched_tokens=budget)
    seq = Sequence([THE], 20)
    scheduler.add(seq)
    scheduler.computed(scheduler.schedule())
    seq.tokens.append(CAT)
    params = SimpleNamespace(scored=False, prompt_logprobs=None)
    answer = seq.answer = Answer.__new__(Answer)  # of which drafts know only this
    answer.seq, answer.guide, answer.finish_reason, answer.index = (
        seq,
        forced and SimpleNamespace(forced=forced),
        None,
        0,
    )
    answer.sampler = SimpleNamespace(n_output=1)
    answer.request = SimpleNamespace(search=None, max_tokens=max_tokens, params=params)
    return Drafts(speculator), scheduler, answer


def rows_read(answer) -> int:
    return len(answer.rows_wanted(len(answer.seq.tokens))) - 1  # behind the last decided token's


def compute(drafts, scheduler):
    drafts.extend(scheduler.running)
    step = scheduler.schedule()
    drafts.trim(step, scheduler)
    scheduler.computed(step)
    return drafts.drafted


def test_the_picture():
    guesser = Guesser(SAT, ON, HIS, HAT)
    drafts, scheduler, answer = decoding(guesser)
    assert compute(drafts, scheduler) == [answer]
    assert answer.seq.tokens == [THE, CAT, SAT, ON, HIS], "the budget of four has no row for the hat"
    assert answer.seq.num_draft == answer.num_guessed == rows_read(answer) == 3
    assert [drafts.verify(answer, token, scheduler) for token in (SAT, ON, THE)] == [True, True, False]
    assert answer.seq.tokens == [THE, CAT, SAT, ON] and answer.seq.num_computed == 4 and answer.seq.num_draft == 0
    assert len(answer.seq.block_table) == 2, "the page of what was wrong is free again"
    drafts.observe()
    assert guesser.seen == [(3, 2)]


@pytest.mark.parametrize("max_tokens, carried", [(20, 3), (4, 2), (2, 0)])
def test_a_draft_leaves_room_for_the_token_of_its_last_row(max_tokens, carried):
    guesser = Guesser(SAT, ON, HIS)
    drafts, scheduler, answer = decoding(guesser, max_tokens=max_tokens)
    drafts.extend(scheduler.running)
    assert drafts.drafted == [answer] * bool(carried) and guesser.rooms == [[max_tokens - 2]]
    assert answer.seq.tokens == [THE, CAT, SAT, ON, HIS][: 2 + carried]


def test_a_sequence_that_is_not_in_the_step_carries_nothing():
    drafts, scheduler, answer = decoding(Guesser(SAT, ON))
    drafts.extend(scheduler.running)
    drafts.trim(SimpleNamespace(entries=[]), scheduler)
    assert answer.seq.tokens == [THE, CAT] and answer.seq.num_draft == answer.num_guessed == 0


def test_forced_tokens_are_carried_instead_of_guesses_and_read_only_to_be_scored():
    guesser = Guesser(HIS, HAT)
    drafts, scheduler, answer = decoding(guesser, forced=[SAT, ON])
    drafts.jumping.add(answer)
    assert compute(drafts, scheduler) == [answer] and not guesser.rooms
    assert answer.seq.tokens == [THE, CAT, SAT, ON] and answer.seq.num_draft == 2 and answer.num_guessed == 0
    assert rows_read(answer) == 0
    answer.request.params.scored = True
    assert rows_read(answer) == 2


@pytest.mark.parametrize("broken", ["propose", "observe"])
def test_who_fails_to_guess_is_not_asked_again(broken, capsys):
    guesser = Guesser(SAT)
    drafts, scheduler, answer = decoding(guesser)
    setattr(guesser, broken, lambda *args: 1 / 0)
    compute(drafts, scheduler)
    drafts.observe()
    assert drafts.speculator is None and "speculation is switched off: ZeroDivisionError" in capsys.readouterr().err
    carried = int(broken == "observe")
    assert answer.seq.num_draft == carried and answer.seq.tokens == [THE, CAT, SAT][: 2 + carried]
