"""Drafts: tokens at the end of a sequence that are computed before they are decided.

The problem. Two kinds of token are worth computing early: guesses, which may be wrong (speculative.py), and those that
a grammar forces, which are certain (structured.py). Both should share the steps of everybody else, and whatever was not
computed or not right must leave no trace: not in the tokens, not in the pool.

The idea. Append them. The last `num_draft` tokens of a sequence are its draft; scheduler, layout and model compute them
like any others. After the step each row from the last decided token on is sampled as it would have been anyway, and
says whether the draft had gone on in the same way:

    extend       ... the cat | sat  on   his  hat    a draft of four behind "cat", which is still to be computed
    trim         ... the cat | sat  on   his         the step has room for four rows: "hat" is forgotten
    rows say                   sat   on   the  .     "cat" is followed by "sat", "sat" by "on", "on" by "the"
    settle       ... the cat   sat  on   the         two were right; "his" goes, and so do its key and value

So a step gives one token more than the draft had right, and a sequence without a draft is the case of none. The
scheduler cuts a draft to the budget and to the free blocks, and preempts nobody for the sake of one.

Sources: Leviathan et al. 2023 (arXiv:2211.17192, algorithm 1) for guesses; Zheng et al., SGLang (2024), section 4, for
forced tokens. Left out: guesses behind forced tokens; drafts of beams, whose tokens are chosen among all of them.
"""

from __future__ import annotations

from formats.command_line import warn
from request import Answer
from scheduler import Scheduler, Step


class Drafts:
    """The drafts of running sequences. `speculator` guesses (drafting/budget.py); None: only what is forced."""

    def __init__(self, speculator=None):
        self.speculator = speculator
        self.jumping: set[Answer] = set()  # have forced tokens that may be appended
        self.drafted: list[Answer] = []  # carry a draft in this step

    def extend(self, running: list) -> None:
        """Let sequences that only lack their last token carry a draft behind it."""
        self.drafted = []
        if not self.jumping and self.speculator is None:
            return
        self.jumping = {answer for answer in self.jumping if answer.forced and answer.finish_reason is None}
        able = [seq.answer for seq in running if seq.num_new == 1 and seq.answer.sampler.n_output]
        able = [answer for answer in able if answer.request.search is None]
        drafts = {answer: answer.forced for answer in able if answer.forced}
        guessing = [answer for answer in able if not answer.forced] if self.speculator is not None else []
        if guessing:
            drafts |= zip(guessing, self._guess(guessing), strict=True)
        for answer, draft in drafts.items():
            draft = draft[: room(answer)]
            answer.seq.tokens += draft
            answer.seq.num_draft = len(draft)
            answer.num_guessed, answer.num_right = 0 if answer.forced else len(draft), 0
            if draft:
                self.drafted.append(answer)

    def trim(self, step: Step, scheduler: Scheduler) -> None:
        """What this step does not compute of a draft is forgotten: for want of budget or blocks, or preempted."""
        if not self.drafted:
            return
        scheduled = {seq: n for seq, n in step.entries}
        for answer in self.drafted:
            seq = answer.seq
            decided = len(seq.tokens) - seq.num_draft
            computed = min(len(seq.tokens), seq.num_computed + scheduled.get(seq, 0))
            scheduler.truncate(seq, max(decided, computed))
            answer.num_guessed = min(answer.num_guessed, seq.num_draft)

    def settle(self, answer: Answer, token: int, scheduler: Scheduler) -> bool:
        """`token` follows. It becomes the next decided one of the sequence; a draft that had another one is gone.

        Returns whether the draft had it, so that the row behind it holds good as well.
        """
        seq = answer.seq
        if seq.num_draft:
            first = len(seq.tokens) - seq.num_draft
            if seq.tokens[first] == token:
                seq.num_draft -= 1
                answer.num_right += 1
                return True
            scheduler.truncate(seq, first)
            answer.guess_probs = []
        seq.tokens.append(token)
        return False

    def observe(self) -> None:
        """Tell the speculator how its guesses fared."""
        try:
            for answer in self.drafted:
                if answer.num_guessed:
                    self.speculator.observe(answer)
        except Exception as error:
            self._stop_guessing(error)

    def _guess(self, answers: list[Answer]) -> list[list[int]]:
        try:
            return self.speculator.propose(answers, [room(answer) for answer in answers], possible)
        except Exception as error:
            self._stop_guessing(error)
            return [[] for _ in answers]

    def _stop_guessing(self, error: Exception) -> None:
        warn(f"speculation is switched off: {type(error).__name__}: {error}")
        self.speculator = None


def room(answer: Answer) -> int:
    """Tokens a draft may have: the row after the last of them gives one more, and then the answer may be full."""
    return answer.request.max_tokens - answer.sampler.n_output - 1


def possible(answer: Answer, guess: list[int]) -> list[int]:
    """What of a guess the structure of an answer allows."""
    return guess if answer.guide is None else answer.guide.trim(guess)
