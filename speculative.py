"""Speculative decoding: guess cheaply, verify exactly.

The problem. One sequence decodes one token per step, and a step reads every weight to compute a single row. Five rows
would cost little more, but the fifth cannot be computed before the fourth token is known.

The idea. Guess it. The last `num_draft` tokens of a sequence are a draft: guesses, or tokens that a grammar forces.
Scheduler, layout and model compute them like any others, and each row then says what really follows:

    extend       ... the cat | sat  on   his  hat    a draft of four behind "cat", which is still to be computed
    trim         ... the cat | sat  on   his         the step has room for four rows: "hat" is forgotten
    rows say                   sat   on   the  .     two guesses were right, the third row says "the"
    verify       ... the cat   sat  on   the         three tokens from one step; "his", its key and its value are gone

By default each row is sampled with the uniform sample u of (seed, answer, position), as without guesses: a guess is
right if it is what comes out, so answers stay the same token by token. `rejection_sample` keeps only the distribution.

Sources: Leviathan, Kalman and Matias 2023 (arXiv:2211.17192, appendix A.1); coupled draws: Daliri, Musco and Suresh
2024 (arXiv:2408.07978); prompt lookup: Saxena 2023. Left out: trees of guesses.
"""

from __future__ import annotations

import contextlib
import runpy
from weakref import WeakKeyDictionary

import torch

from formats.command_line import warn
from request import Answer
from sampling import Sampled, draw, probabilities, score
from scheduler import Scheduler, Step

VERDICT, RESIDUAL, GUESS = 1, 2, 3  # streams of SamplerState.uniform; 0 draws tokens


def rejection_sample(p: torch.Tensor, q: torch.Tensor, guess: int, verdict: float, residual: float) -> int:
    """A token distributed as p [V], given `guess` drawn from q [V]: the guess itself as often as can be.

    verdict and residual are independent numbers in [0, 1) that `guess` does not depend on.
    """
    if verdict * float(q[guess]) < float(p[guess]):
        return guess
    more = (p - q).clamp_(min=0)  # [V]; sums to the chance of rejection, so it is not all 0 here but for rounding
    return draw(more if float(more.amax()) > 0 else p, residual)


def verdict(answer: Answer, row: torch.Tensor, guess: int, mask: torch.Tensor | None) -> Sampled:
    """The next token of an answer under the rejection rule, from its raw logits [V] and the guess that is at stake."""
    state, params = answer.sampler, answer.request.params
    p = probabilities(row, state, mask)  # [V]
    q = answer.guess_probs[answer.num_guessed - answer.seq.num_draft]
    token = rejection_sample(p, q, guess, state.uniform(VERDICT), state.uniform(RESIDUAL))
    return score(row, token, params.logprobs) if params.scored else Sampled(token)


class NgramProposer:
    """What followed the last time that the latest tokens stood here: for text that quotes, edits or repeats.

        tokens    A B C D E ... x A B C         the latest three stood at the beginning, followed by D E ...
        guess                           D E

    Longest match first: six tokens in a row are seldom followed by another seventh, one token nearly always. A guess
    may run into itself, so that a loop is continued for as long as one likes.

    A proposer has these three methods and ROUNDS_TO_ASK. It may be wrong, late or empty; it must be cheap.
    """

    ROUNDS_TO_ASK = 0  # rounds of a model that `strength` takes, which are then spared in `propose`

    def __init__(self, longest: int = 6, shortest: int = 1):
        self.lengths = range(longest, shortest - 1, -1)
        self.indices: WeakKeyDictionary[Answer, tuple[int, dict]] = WeakKeyDictionary()

    def strength(self, answers: list[Answer]) -> list[int]:
        """How good the evidence for a guess is now: 0 for none at all; equal numbers promise equally much."""
        return [self.match(answer)[0] for answer in answers]

    def propose(self, answers: list[Answer], limits: list[int]) -> list[list[int]]:
        """For each answer up to so many tokens that may follow those of its sequence."""
        guesses = []
        for answer, limit in zip(answers, limits, strict=True):
            tokens, guess = answer.seq.tokens, []
            length, after = self.match(answer) if limit else (0, 0)
            for i in range(after, after + limit if length else after):
                guess.append(tokens[i] if i < len(tokens) else guess[i - len(tokens)])
            guesses.append(guess)
        return guesses

    def backlog(self, answer: Answer) -> int:
        """Tokens of the answer that must be computed before the first guess."""
        return 0

    def match(self, answer: Answer) -> tuple[int, int]:
        """Length of the longest match, and the index after its last occurrence; 0, 0 without any."""
        tokens = answer.seq.tokens
        done, index = self.indices.get(answer, (0, {}))  # n-gram -> index after it, where it stood last but at the end
        for end in range(done + 1, len(tokens)):
            for n in self.lengths:
                if n <= end:
                    index[tuple(tokens[end - n : end])] = end
        self.indices[answer] = len(tokens) - 1, index
        for n in self.lengths:
            after = index.get(tuple(tokens[-n:]))
            if after is not None:
                return n, after
        return 0, 0


class Drafts:
    """The drafts of running sequences. `speculator` guesses (drafting/budget.py); None: only what is forced."""

    def __init__(self, speculator=None):
        self.speculator = speculator
        self.jumping: set[Answer] = set()  # have forced tokens that may be appended
        self.drafted: list[Answer] = []  # carry a draft in this step

    def extend(self, running: list) -> None:
        """Let sequences that only lack their last token carry a draft behind it."""
        self.jumping = {answer for answer in self.jumping if answer.forced and answer.finish_reason is None}
        able = [seq.answer for seq in running if seq.num_new == 1 and seq.answer.sampler.n_output]
        able = [answer for answer in able if answer.request.search is None]
        drafts = {answer: answer.forced for answer in able if answer.forced}
        guessing = [answer for answer in able if not answer.forced]
        if guessing and self.speculator is not None:
            with self.asking():
                rooms = [room(answer) for answer in guessing]
                drafts |= zip(guessing, self.speculator.propose(guessing, rooms, possible), strict=True)
        for answer, draft in drafts.items():
            draft = draft[: room(answer)]
            answer.seq.tokens += draft
            answer.seq.num_draft = len(draft)
            answer.num_guessed, answer.num_right = 0 if answer.forced else len(draft), 0
            if draft:
                self.drafted.append(answer)

    def trim(self, step: Step, scheduler: Scheduler) -> None:
        """What this step does not compute of a draft is forgotten: for want of budget or blocks, or preempted."""
        scheduled = dict(step.entries)
        for answer in self.drafted:
            seq, known = answer.seq, len(answer.seq.tokens)
            computed = min(known, seq.num_computed + scheduled.get(seq, 0))
            scheduler.truncate(seq, max(known - seq.num_draft, computed))
            answer.num_guessed = min(answer.num_guessed, seq.num_draft)

    def verify(self, answer: Answer, token: int, scheduler: Scheduler) -> bool:
        """Whether the draft of an answer has the `token` that follows: then it is decided, else the draft is gone."""
        seq = answer.seq
        first = len(seq.tokens) - seq.num_draft
        if seq.tokens[first] == token:
            seq.num_draft -= 1
            answer.num_right += 1
            return True
        scheduler.truncate(seq, first)
        answer.guess_probs = []
        return False

    def observe(self) -> None:
        """Tell the speculator how its guesses fared."""
        with self.asking():
            for answer in self.drafted:
                if answer.num_guessed:
                    self.speculator.observe(answer)

    @contextlib.contextmanager
    def asking(self):
        """Who fails to guess is not asked again."""
        try:
            yield
        except Exception as error:
            warn(f"speculation is switched off: {type(error).__name__}: {error}")
            self.speculator = None


def room(answer: Answer) -> int:
    """Tokens a draft may have: the row after the last of them gives one more, and then the answer may be full."""
    return answer.request.max_tokens - answer.sampler.n_output - 1


def possible(answer: Answer, guess: list[int]) -> list[int]:
    """What of a guess the structure of an answer allows."""
    return guess if answer.guide is None else answer.guide.trim(guess)


if __name__ == "__main__":  # by name, since the commands import the engine, which imports this file
    runpy.run_module("drafting.command", run_name="__main__")
