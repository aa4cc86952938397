"""Speculative decoding: guess cheaply, verify exactly.

The problem. One sequence decodes one token per step, and a step reads every weight to compute a single row. Five rows
would cost little more, but the fifth cannot be computed before the fourth token is known.

The idea. Guess it. Something cheap proposes k tokens; one step computes them all as if they were known, and each row
then says what really follows. What was guessed right is kept, the first wrong guess is replaced, the rest dropped:

    known      the cat sat on |  the   mat   and            k = 3 guesses, k + 1 = 4 rows in one step
    rows say                  v   the   mat   .    x        row after "mat" says "." instead of "and":
    result     the cat sat on     the   mat   .             three tokens from one step

Exactness. The rule "accept a guess with probability min(1, p/q), else draw from what p has more than q" leaves the
distribution of the output as it was (`rejection_sample`). This engine can do better than the distribution. The token of
position i is drawn with a dart that depends on (seed, choice, i) only (sampling.py), so the row is simply sampled as
it would have been without any guess, and a guess is right when it IS the token. Nothing about the answer depends on
what was guessed, how much or whether: the same tokens, drawn or greedy, as without speculation. For a guess that is a
single token the chance of acceptance is the same p(guess) in both; for a guess drawn by a draft model it is higher
under the rejection rule by what the coupling of two draws with one dart loses, which verify="rejection" buys back at
the price of answers that repeat only in distribution.

How many? With acceptance rate a per guess, k guesses give 1 + a + ... + a^k tokens; k + 1 rows cost step(k + 1). The
`Speculator` measures step() once, keeps a for every answer and strength of evidence, and adds guesses in order of their
chance to count, over the whole batch, for as long as one more raises tokens per second. A busy batch has no idle
arithmetic left to guess with, and text without repetition none to gain: there it adds none, and tries again from time
to time. It also keeps a balance of tokens won and spent, and does not even ask for guesses while they only cost.

This file has the rules and the cheapest proposer: what followed the last occurrence of the latest few tokens (prompt
lookup). draft_head.py has one that was trained for its target, draft_model.py those that are models.

Sources: Leviathan, Kalman and Matias 2023 (arXiv:2211.17192, section 2.3 and appendix A.1 for the rule, 3.3 for the
cost); Chen et al. 2023 (arXiv:2302.01318); Daliri, Musco and Suresh 2024 (arXiv:2408.07978) for coupled draws that do
not depend on the draft; prompt lookup: Saxena 2023 and LLMA (Yang et al. 2023, arXiv:2304.04487).
Left out: trees of guesses.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from request import Choice
from sampling import Sampled, draw, probabilities, process_logits, score

VERDICT, RESIDUAL, GUESS = 1, 2, 3  # streams of sampling.uniform; 0 draws tokens
FADE, OVERALL_FADE = 0.9, 0.98  # how fast what was seen fades, of one answer and of all, per verified guess
ROW_MARGIN = 1.5  # what a guess costs, against its row of the step: it is also laid out, drawn from and taken back
DEBT = 8.0  # tokens that guesses may have cost on balance before the proposer is given a rest
PROBE_AFTER = 8, 128  # steps without a guess before one is tried again: at first, at most


def rejection_sample(p: torch.Tensor, q: torch.Tensor, guess: int, verdict: float, residual: float) -> int:
    """A token distributed as p [V], given `guess` drawn from q [V]: the guess itself as often as can be.

    verdict and residual are independent numbers in [0, 1) that `guess` does not depend on. The result differs from the
    guess exactly when the guess was rejected.
    """
    if verdict * float(q[guess]) < float(p[guess]):
        return guess
    more = (p - q).clamp_(min=0)  # [V]; sums to the chance of rejection, so it is not all 0 here but for rounding
    return draw(more if float(more.amax()) > 0 else p, residual)


def verdict(choice: Choice, row: torch.Tensor, guess: int, mask: torch.Tensor | None) -> Sampled:
    """The next token of an answer under the rejection rule, from its raw logits [V] and the guess that is at stake."""
    state, params = choice.state, choice.request.params
    (p,) = probabilities(process_logits(row[None], [state], [mask]), [state])
    q = choice.guess_probs[choice.num_guessed - choice.num_draft]
    token = rejection_sample(p, q, guess, state.uniform(VERDICT), state.uniform(RESIDUAL))
    return score(row, token, params.logprobs) if params.scored else Sampled(token)


class Proposer(Protocol):
    """Guesses what follows. May be wrong, late or empty; it must be cheap."""

    def strength(self, choices: list[Choice]) -> list[int]:
        """How good the evidence for a guess is now: 0 for none at all; equal numbers promise equally much."""

    def propose(self, choices: list[Choice], limits: list[int]) -> list[list[int]]:
        """For each answer up to so many tokens that may follow those of its sequence."""


class NgramProposer:
    """What followed the last time that the latest tokens stood here: for text that quotes, edits or repeats.

        tokens    A B C D E ... x A B C         the latest three stood at the beginning, followed by D E ...
        guess                           D E

    Longest match first, and its length is the strength of the evidence: six tokens in a row are seldom followed by
    another seventh, one token nearly always. A guess may run into itself, so that a loop is continued for as long as
    one likes.
    """

    def __init__(self, longest: int = 6, shortest: int = 1):
        self.lengths = range(longest, shortest - 1, -1)
        self._seen: WeakKeyDictionary[Choice, tuple[int, dict]] = WeakKeyDictionary()

    def strength(self, choices: list[Choice]) -> list[int]:
        return [self._match(choice)[0] for choice in choices]

    def propose(self, choices: list[Choice], limits: list[int]) -> list[list[int]]:
        return [self._guess(choice, limit) if limit else [] for choice, limit in zip(choices, limits, strict=True)]

    def _match(self, choice: Choice) -> tuple[int, int]:
        """Length of the longest match, and the place after its last occurrence; 0, 0 without any."""
        tokens, index = choice.seq.tokens, self._index(choice)
        for n in self.lengths:
            place = index.get(tuple(tokens[-n:]))
            if place is not None:
                return n, place
        return 0, 0

    def _guess(self, choice: Choice, limit: int) -> list[int]:
        tokens, guess = choice.seq.tokens, []
        length, place = self._match(choice)
        for i in range(place, place + limit if length else place):
            guess.append(tokens[i] if i < len(tokens) else guess[i - len(tokens)])
        return guess

    def _index(self, choice: Choice) -> dict[tuple[int, ...], int]:
        """n-gram -> the place after its last occurrence, of all that end before the last token."""
        tokens = choice.seq.tokens
        done, index = self._seen.get(choice, (0, {}))
        for end in range(done + 1, len(tokens)):
            for n in self.lengths:
                if n <= end:
                    index[tuple(tokens[end - n : end])] = end
        self._seen[choice] = len(tokens) - 1, index
        return index


class StepCost:
    """Seconds of one model step as a function of its rows, measured at a few sizes and interpolated."""

    def __init__(self, seconds: dict[int, float]):
        self.rows, self.seconds = list(seconds), list(seconds.values())

    def __call__(self, rows: int) -> float:
        i = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        (x0, x1), (y0, y1) = self.rows[i - 1 : i + 1], self.seconds[i - 1 : i + 1]
        return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)

    @classmethod
    def measure(
        cls,
        run: Callable[[int], object],
        most: int,
        budget_s: float = 0.5,
        before: Callable[[], object] | None = None,
    ) -> StepCost:
        """run(rows) computes a step; sizes are doubled until `most` or until the budget is spent.

        Then all are timed once more, since a moment in which the machine is busy elsewhere seldom lasts so long.
        `before` is called, untimed, before each: what runs between two calls in earnest, and empties the caches.
        """

        def best(rows: int) -> float:
            times: list[float] = []
            while len(times) < 3 or (len(times) < 20 and sum(times) < 0.03):
                if before is not None:
                    before()
                began = time.perf_counter()
                run(rows)
                times.append(time.perf_counter() - began)
            return min(times)

        seconds: dict[int, float] = {}
        rows, start = 1, time.perf_counter()
        while rows <= 2 or (rows <= most and time.perf_counter() - start < budget_s):
            run(rows)  # may have to record or compile something
            seconds[rows] = best(rows)
            rows *= 2
        seconds = {rows: min(found, best(rows)) for rows, found in seconds.items()}
        for rows in reversed(list(seconds)):  # more rows never cost less, and a clock only ever adds
            seconds[rows] = min(seconds[rows], seconds.get(2 * rows, seconds[rows]))
        return cls(seconds)


@dataclass
class Record:
    """How guesses of one strength fared: right and wrong (fading), and how long none has been made."""

    right: float
    wrong: float
    idle: int = 0
    patience: int = PROBE_AFTER[0]

    @property
    def rate(self) -> float:
        return self.right / (self.right + self.wrong)

    def add(self, right: int, wrong: int, fade: float) -> None:
        fade **= right + wrong
        self.right, self.wrong = self.right * fade + right, self.wrong * fade + wrong
        first, most = PROBE_AFTER
        self.patience = first if right else min(2 * self.patience, most)


class Speculator:
    """Decides how much to guess, asks the proposer, and keeps the books.

    step, draft: seconds of a target step of so many rows, and of a round of the proposer that guesses one token for so
    many answers. Without them every answer is given `most` guesses, whatever comes of it. trust: so many guesses of its
    own weigh as much with an answer as all that the others have seen.
    """

    TRUST = 2.0

    def __init__(
        self,
        proposer: Proposer,
        most: int = 5,
        step: Callable[[int], float] | None = None,
        draft: Callable[[int], float] | None = None,
        trust: float = TRUST,
    ):
        self.proposer, self.most, self.step, self.draft, self.trust = proposer, most, step, draft, trust
        self.overall: dict[int, Record] = {}  # by strength, of all answers: what to expect of a new one
        self.records: WeakKeyDictionary[Choice, dict[int, Record]] = WeakKeyDictionary()
        self.asked: dict[Choice, int] = {}  # whose guesses are being verified, and their strength
        self.drafted = self.accepted = self.decodes = 0
        self.balance, self.resting, self.patience = 0.0, 0, PROBE_AFTER[0]  # tokens gained lately; steps not to ask in

    def propose(self, choices: list[Choice], rooms: list[int]) -> list[list[int]]:
        """Guesses for the answers that decode now; rooms: how many each may take."""
        self.decodes += len(choices)
        if self.resting:
            self.resting -= 1
            for record in (record for choice in choices for record in self.records.get(choice, {}).values()):
                record.idle += 1
            return [[] for _ in choices]
        strengths = self.proposer.strength(choices)
        longest = [min(room, self.most) if strength else 0 for room, strength in zip(rooms, strengths, strict=True)]
        records = [self._record(choice, strength) for choice, strength in zip(choices, strengths, strict=True)]
        limits = longest if self.step is None else self.plan(records, longest)
        self.asked = dict(zip(choices, strengths, strict=True))
        guesses = self.proposer.propose(choices, limits) if any(limits) else [[] for _ in choices]
        if self.step is not None:
            self._pay([len(guess) for guess in guesses])
        return guesses

    def _pay(self, lengths: list[int]) -> None:
        """Take what guesses of these lengths cost off the balance, as tokens that plain steps would have made.

        Even finding out that nothing is worth guessing costs a round. When the debt is too high the proposer is not
        asked for a while, and for twice as long if nothing has come of it since the last time.
        """
        rows = len(lengths)
        seconds = ROW_MARGIN * (self.step(rows + sum(lengths)) - self.step(rows))
        if self.draft is not None:
            seconds += ROW_MARGIN * max(1, *lengths) * self.draft(rows)
        self.balance -= seconds * rows / self.step(rows)
        if self.balance < -DEBT:
            self.resting, self.balance = self.patience, 0.0
            self.patience = min(2 * self.patience, PROBE_AFTER[1])

    def _record(self, choice: Choice, strength: int) -> Record:
        overall = self.overall.setdefault(strength, Record(2.0 * strength, 2.0))
        own = self.records.setdefault(choice, {})
        if strength not in own:
            own[strength] = Record(self.trust * overall.rate, self.trust * (1 - overall.rate))
        return own[strength]

    def plan(self, records: list[Record], longest: list[int]) -> list[int]:
        """How many guesses each answer is given, of at most `longest`."""
        chances = []  # (chance that the guess is right together with all before it, answer)
        for i, record in enumerate(records):
            chance = 1.0
            for _ in range(longest[i]):
                chance *= record.rate
                chances.append((chance, i))
        chances.sort(key=lambda pair: -pair[0])
        rows, tokens, seconds = len(records), float(len(records)), self.step(len(records))
        guess_s = self.draft(rows) / rows if self.draft else 0.0
        limits = [0] * len(records)
        for chance, i in chances:
            more = ROW_MARGIN * (self.step(rows + 1) - self.step(rows)) + guess_s
            if chance * seconds <= more * tokens:
                break
            limits[i] += 1
            rows, tokens, seconds = rows + 1, tokens + chance, seconds + more
        for i, record in enumerate(records):
            if limits[i] == 0 < longest[i]:
                record.idle += 1
                limits[i] = int(record.idle > record.patience)
            if limits[i]:
                record.idle = 0
        return limits

    def observe(self, choice: Choice) -> None:
        """The guesses of an answer have been verified."""
        guessed, right = choice.num_guessed, choice.num_right
        wrong = int(right < guessed and choice.finish_reason is None)  # what comes after a wrong one was not tested
        self.drafted += guessed
        self.accepted += right
        self.balance = min(self.balance + right, DEBT)
        if self.balance > 0:
            self.patience = PROBE_AFTER[0]
        strength = self.asked[choice]
        self.records[choice][strength].add(right, wrong, FADE)
        self.overall[strength].add(right, wrong, OVERALL_FADE)

    def break_even(self) -> float | None:
        """The acceptance rate above which a single guess pays for one sequence alone."""
        if self.step is None:
            return None
        more = ROW_MARGIN * (self.step(2) - self.step(1)) + (self.draft(1) if self.draft else 0.0)
        return more / self.step(1)

    def stats(self) -> dict[str, float | None]:
        """drafted and accepted guesses, tokens an answer gains per step, and the break-even acceptance rate."""
        return {
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tokens_per_step": 1 + self.accepted / self.decodes if self.decodes else 1.0,
            "break_even": self.break_even(),
        }


def main(argv: list[str] | None = None) -> int:
    """`python speculative.py train | measure`: the commands live in train_head.py, which needs the whole engine."""
    import train_head

    return train_head.main(argv)


if __name__ == "__main__":
    raise SystemExit(main())
