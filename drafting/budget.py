"""How many guesses pay: none where they cost more than they win.

The problem. With acceptance rate a per guess, k guesses give 1 + a + ... + a^k tokens a step, but k + 1 rows cost more
than one, and so does asking the proposer. In text that does not repeat, or a busy batch, guesses make everybody slower.

The idea. The `Speculator` knows what a step costs by its rows (`StepCost`) and estimates a for every answer and
strength of evidence (`Record`). It sorts the guesses of the whole batch by the chance that they and all before them are
right, and takes as many of the first as promise most tokens a second. Estimates go wrong, so guesses have an account:
what they win is paid in, what they cost is taken off, and without a balance there are none. A hundredth of all tokens
is paid in too, so that text which begins to repeat is found out:

    balance   4 . . 3.5 . . 2.2 . . 0.9 . . -0.4     wrong guesses use it up; then a few steps without any, until
              0 . . 0.04 . . 0.08 . . ...            the hundredth has added up to a little, and one more is tried

Source: Leviathan, Kalman and Matias 2023 (arXiv:2211.17192, section 3.3) for the cost; the account is our own.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from request import Answer

FADE, OVERALL_FADE = 0.9, 0.98  # how fast what was seen fades, of one answer and of all, per verified guess
CHECK_S = 0.2e-3  # seconds a step takes longer for having any guesses: laying them out, taking back what was wrong
MARGIN = 1.5  # of what guesses are thought to cost: an answer that gets ahead saves only a row of the steps to come
BEST_CHANCE = 0.95  # of the best guesses there are
CREDIT, MOST_CREDIT = 4.0, 8.0  # tokens that guesses may lose at first, and after having won ever so many
PASSES = 8  # over the sizes of a step; the shortest time of each counts, on a machine that is busy elsewhere
SHARE = 0.01  # of all tokens, and of those of an answer that is tried, may be lost in finding out what pays

Seconds = Callable[[int], float]  # of a number of rows


class StepCost:
    """Seconds of one model step as a function of its rows, measured at a few sizes and interpolated."""

    def __init__(self, seconds: dict[int, float]):
        self.rows, self.seconds = list(seconds), list(seconds.values())

    def __call__(self, rows: int) -> float:
        i = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        (x0, x1), (y0, y1) = self.rows[i - 1 : i + 1], self.seconds[i - 1 : i + 1]
        return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)

    @classmethod
    def measure(cls, run: Callable[[int], object], most: int, budget_s=0.4, before=lambda: None) -> StepCost:
        """run(rows) computes a step; sizes are doubled until `most`, or until timing them takes the budget.

        before() runs untimed before each call, to empty the caches as other work in a step does.
        """
        seconds: dict[int, float] = {}

        def time_once(rows: int) -> None:
            before()
            start = time.perf_counter()
            run(rows)
            seconds[rows] = min(seconds.get(rows, math.inf), time.perf_counter() - start)

        rows = 1
        while rows <= 2 or (rows <= most and PASSES * sum(seconds.values()) < budget_s):
            run(rows)  # may have to record or compile something
            time_once(rows)
            rows *= 2
        passes = min(PASSES, max(2, int(2 * budget_s / sum(seconds.values()))))
        for rows in list(seconds) * (passes - 1):
            time_once(rows)
        for rows in reversed(seconds):  # more rows never cost less, and a clock only ever adds
            seconds[rows] = min(seconds[rows], seconds.get(2 * rows, seconds[rows]))
        return cls(seconds)


@dataclass
class Record:
    """How many guesses of one strength were right and wrong; old ones fade."""

    right: float
    wrong: float

    @property
    def rate(self) -> float:
        return self.right / (self.right + self.wrong)

    def add(self, right: int, wrong: int, fade: float) -> None:
        fade **= right + wrong
        self.right, self.wrong = self.right * fade + right, self.wrong * fade + wrong


class Speculator:
    """Decides how much to guess, asks the proposer, and keeps the accounts.

    step: seconds of a target step of so many rows (None: always guess). draft: seconds of a round of the proposer, a
    guess for so many answers. trust: verified guesses of an answer's own that weigh as much as those of all others.
    Prices are in tokens: a second costs the tokens that the batch makes in it without guesses.
    """

    TRUST = 2.0

    def __init__(self, proposer, most=5, step: Seconds | None = None, draft: Seconds | None = None, trust=TRUST):
        self.proposer, self.most, self.step, self.trust = proposer, most, step, trust
        self.draft = draft or (lambda answers: 0.0)
        self.overall: dict[int, Record] = {}  # by strength, of all answers: what to expect of a new one
        self.records: WeakKeyDictionary[Answer, dict[int, Record]] = WeakKeyDictionary()
        self.last: WeakKeyDictionary[Answer, int] = WeakKeyDictionary()  # the step in which it was given guesses last
        self.strengths: dict[Answer, int] = {}  # of the evidence for the guesses of this step
        self.drafted = self.accepted = self.decodes = self.steps = 0
        self.accounts = defaultdict(lambda: CREDIT)  # tokens that may be lost; what pays depends on the batch:
        self.batch = 0  # the bit length of its size, in this step
        self.known: dict[int, tuple[list[float], float, bool]] = {}  # prices, by the size of the batch

    def propose(self, answers: list[Answer], rooms: list[int], trim=lambda answer, guess: guess) -> list[list[int]]:
        """Guesses for the answers that decode now; rooms: how many each may take.

        trim(answer, guess): what of a guess is possible at all. One that is not was wrong, and costs no row.
        """
        n, guesses = len(answers), [[] for _ in answers]
        self.decodes += n
        self.steps += 1
        self.strengths = {}
        if self.step is not None:
            self.batch = n.bit_length()
            self._pay_in(SHARE * n)
        if not any(rooms) or (self.step is not None and not (self.accounts[self.batch] > 0 and self._prices(n)[2])):
            return guesses
        self.strengths = dict(zip(answers, self.proposer.strength(answers), strict=True))
        limits = [min(r, self.most) if self.strengths[a] else 0 for a, r in zip(answers, rooms, strict=True)]
        if self.step is not None:
            limits = self.plan(answers, limits)
        guessing = [answer for answer, limit in zip(answers, limits, strict=True) if limit]
        # To read a prompt before an answer's first guess does not count: it happens once, however many guesses follow.
        missed = sum(min(self._silent(answer), self.proposer.backlog(answer)) for answer in guessing)
        self.last.update(dict.fromkeys(guessing, self.steps))
        if guessing:
            guesses = self.proposer.propose(answers, limits)
        possible = [trim(answer, guess) for answer, guess in zip(answers, guesses, strict=True)]
        for answer, guess, rest in zip(answers, guesses, possible, strict=True):
            if guess and not rest:
                self._learn(answer, right=0, wrong=1)
        if self.step is not None:
            self.accounts[self.batch] -= self.price(n, sum(map(len, possible)), max(limits), missed)
        return possible

    def observe(self, answer: Answer) -> None:
        """The guesses of an answer have been verified."""
        guessed, right = answer.num_guessed, answer.num_right
        self.drafted += guessed
        self.accepted += right
        self._pay_in(right)
        # What comes after a wrong one was not tested.
        self._learn(answer, right, int(right < guessed and answer.finish_reason is None))

    def plan(self, answers: list[Answer], longest: list[int]) -> list[int]:
        """How many guesses each answer is given, of at most `longest`: those that together promise most for a second,
        and one to the answer that has gone longest without, if its share of the tokens since then pays for a try."""
        n, limits = len(answers), [0] * len(answers)
        chances = [  # (chance that a guess is right together with all before it, its number among them, answer)
            (rate**depth, depth, i)
            for i, rate in enumerate(self._record(answer).rate for answer in answers)
            for depth in range(1, longest[i] + 1)
        ]
        chances.sort(key=lambda entry: -entry[0])
        num_guesses = most_worth(n, chances, *self._prices(n)[:2], self.proposer.ROUNDS_TO_ASK)
        for _, _, i in chances[:num_guesses]:
            limits[i] += 1
        idle = [(-self._silent(answer), i) for i, answer in enumerate(answers) if limits[i] == 0 < longest[i]]
        if idle:
            deepest, (silent, i) = max(limits), min(idle)
            price = self.price(n, num_guesses + 1, max(deepest, 1), self.proposer.backlog(answers[i]))
            price -= self.price(n, num_guesses, deepest)
            limits[i] = int(-silent * SHARE > price)
        return limits

    def _silent(self, answer: Answer) -> int:
        """For how many steps an answer has gone without guesses."""
        return self.steps - 1 - self.last.setdefault(answer, self.steps - 1)

    def _pay_in(self, tokens: float) -> None:  # up to a limit, or a good past would pay for a long bad present
        self.accounts[self.batch] = min(self.accounts[self.batch] + tokens, MOST_CREDIT)

    def price(self, n: int, guesses: int, longest: int, reading: int = 0) -> float:
        """What a step of n answers costs more for `guesses`, of which one answer has the `longest`; reading: tokens
        that the proposer has to catch up with first."""
        rows, one_round, _ = self._prices(n)
        caught_up = MARGIN * n * (self.draft(n + reading) - self.draft(n)) / self.step(n) if reading else 0.0
        return rows[guesses] + one_round * max(longest, self.proposer.ROUNDS_TO_ASK) + caught_up

    def _prices(self, n: int) -> tuple[list[float], float, bool]:
        """The price of the rows of 0, 1, 2, ... guesses, that of a round, and whether any guesses can pay."""
        if n not in self.known:
            tokens = MARGIN * n / self.step(n)  # that a second is worth
            more = [self.step(n + g) - self.step(n) + CHECK_S for g in range(1, n * self.most + 1)]
            rows, one_round = [0.0, *(tokens * seconds for seconds in more)], tokens * self.draft(n)
            depths = [1 + g // n for g in range(n * self.most)]  # a nearly certain guess for each, then a second, ...
            best = most_worth(n, [(BEST_CHANCE**depth, depth, 0) for depth in depths], rows, one_round, 0)
            self.known[n] = rows, one_round, best > 0
        return self.known[n]

    def _record(self, answer: Answer) -> Record:
        """Of an answer's guesses of the present strength; a new one expects what the others had."""
        strength = self.strengths[answer]
        overall = self.overall.setdefault(strength, Record(2.0 * strength, 2.0))
        expected = Record(self.trust * overall.rate, self.trust * (1 - overall.rate))
        return self.records.setdefault(answer, {}).setdefault(strength, expected)

    def _learn(self, answer: Answer, right: int, wrong: int) -> None:
        self._record(answer).add(right, wrong, FADE)
        self.overall[self.strengths[answer]].add(right, wrong, OVERALL_FADE)

    def break_even(self) -> float | None:
        """The acceptance rate above which a single guess pays for one sequence alone; None if costs are unknown."""
        return None if self.step is None else self.price(1, 1, 1)

    def stats(self) -> dict[str, float | None]:
        """drafted and accepted guesses, tokens an answer gains per step, and the break-even acceptance rate."""
        gained = self.accepted / max(1, self.decodes)
        counts = {"drafted": self.drafted, "accepted": self.accepted}
        return counts | {"tokens_per_step": 1 + gained, "break_even": self.break_even()}


def most_worth(n: int, chances: list[tuple], rows: list[float], one_round: float, asking_rounds: int) -> int:
    """How many of the guesses, the likeliest first, give n answers most tokens a second; 0: any would cost some."""
    best_rate, num_guesses, tokens, deepest = 1.0, 0, 0.0, asking_rounds
    for guesses, (chance, depth, _) in enumerate(chances, 1):
        tokens, deepest = tokens + chance, max(deepest, depth)
        rate = (n + tokens) / (n + rows[guesses] + one_round * (deepest - asking_rounds))
        if rate > best_rate:
            best_rate, num_guesses = rate, guesses
    return num_guesses
