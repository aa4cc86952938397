"""Drafts: tokens at the end of a sequence that are computed before they are decided.

The problem. Two kinds of token are worth computing early: guesses, which may be wrong (speculative.py), and those that
a grammar forces, which are certain and only wait for their turn (guided.py). Both should share the steps of everybody
else, and whatever was not computed or not right must leave no trace: not in the tokens, not in the pool.

The idea. Append them. The last `num_draft` tokens of a sequence are its draft; scheduler, layout and model take them
for tokens like any others, to be caught up with. After the step each row from the last decided token on is sampled as
it would have been anyway, and says whether the draft had gone on in the same way:

    append             ... the cat | sat  on   his  hat    a draft of four behind "cat", which is still to be computed
    drop_unscheduled   ... the cat | sat  on   his         the step has room for four rows: "hat" is forgotten
    rows say                   sat   on   the  .           "cat" is followed by "sat", "sat" by "on", "on" by "the"
    settle             ... the cat   sat  on   the         two were right; "his" goes, and so do its key and value

So a step gives one token more than the draft had right, and a sequence without a draft is the case of none. Forced
tokens are always right: nothing is drawn for them, and their rows need no logits unless log-probabilities are wanted.

A draft is a luxury. The scheduler cuts it to the budget and the blocks there are and preempts nobody to fit in more of
it; it leaves room for the one token that the last row gives; and if whoever guesses raises, there are no more guesses.

Sources: Leviathan et al. 2023 (arXiv:2211.17192, algorithm 1) for guesses; Zheng et al., SGLang (2024), section 4, for
forced tokens. Left out: what to guess and how much (speculative.py), and what is forced (structured.py); guesses behind
forced tokens; drafts of beams, whose next tokens are chosen among all of them.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drafting.budget import Speculator
    from request import Answer
    from scheduler import Scheduler
    from sequence import Step


class Drafts:
    """The drafts that a scheduler's running sequences carry. `speculator` guesses; None: only what is forced."""

    def __init__(self, scheduler: Scheduler, speculator: Speculator | None = None):
        self.scheduler, self.speculator = scheduler, speculator
        self.jumping: set[Answer] = set()  # have forced tokens that may be appended

    def append(self) -> list[Answer]:
        """Let sequences that only lack their last token carry a draft behind it. Returns the answers that do."""
        if not self.jumping and self.speculator is None:
            return []
        self.jumping = {answer for answer in self.jumping if answer.forced and answer.finish_reason is None}
        able = [s.answer for s in self.scheduler.running if s.num_new == 1 and s.answer.sampler.n_output]
        able = [answer for answer in able if answer.request.beams is None]
        drafts = {answer: answer.forced for answer in able if answer.forced}
        guesses = [answer for answer in able if not answer.forced] if self.speculator is not None else []
        if guesses:
            drafts |= zip(guesses, self._guess(guesses), strict=True)
        for answer, draft in drafts.items():
            draft = draft[: room(answer)]
            answer.seq.num_draft, answer.num_right = len(draft), 0
            answer.num_guessed = 0 if answer.forced else len(draft)
            answer.seq.tokens += draft
        return [answer for answer in drafts if answer.seq.num_draft]

    def drop_unscheduled(self, step: Step, drafted: list[Answer]) -> None:
        """What this step does not compute of a draft is forgotten: for want of budget or blocks, or preempted."""
        scheduled = {seq.id: n for seq, n in step.entries} if drafted else {}
        for answer in drafted:
            seq = answer.seq
            known = len(seq.tokens) - seq.num_draft
            kept = max(known, min(len(seq.tokens), seq.num_computed + scheduled.get(seq.id, 0)))
            self.scheduler.truncate(seq, kept)
            answer.num_guessed = min(answer.num_guessed, seq.num_draft)

    def settle(self, answer: Answer, token: int) -> bool:
        """A answer has accepted `token`. Returns whether its draft had it too, so that the next row holds good as well.

        If not, or if this was the end, nothing is left of the draft, and `token` is still to be appended.
        """
        if answer.forced:
            self.jumping.add(answer)
        seq = answer.seq
        if not seq.num_draft:
            return False
        place = len(seq.tokens) - seq.num_draft
        if seq.tokens[place] == token:
            answer.num_right += 1
            if answer.finish_reason is None:
                seq.num_draft -= 1
                return True
        self.scheduler.truncate(seq, place)
        return False

    def observe(self, drafted: list[Answer]) -> None:
        """Tell the speculator how its guesses fared."""
        try:
            for answer in drafted:
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
        note(f"speculation is switched off: {type(error).__name__}: {error}")
        self.speculator = None


def room(answer: Answer) -> int:
    """Tokens a draft may have: the row after the last of them gives one more, and then the answer may be full."""
    return answer.request.max_tokens - answer.sampler.n_output - 1


def possible(answer: Answer, guess: list[int]) -> list[int]:
    """What of a guess the structure of an answer leaves."""
    return guess if answer.guide is None else answer.guide.trim(guess)


def rows_to_read(answer: Answer) -> int:
    """Tokens of the draft whose rows are read; forced ones are known without, unless they are to be scored."""
    return 0 if answer.forced and not answer.request.params.scored else answer.seq.num_draft


def note(line: str) -> None:
    """Say something on stderr, if anyone still listens there."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:  # print would take None for stdout
            print(line, file=sys.stderr)
