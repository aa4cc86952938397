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
position i is drawn with a dart that depends on (seed, answer, i) only (sampling.py), so the row is simply sampled as
it would have been without any guess, and a guess is right when it IS the token. Nothing about the answer depends on
what was guessed, how much or whether: the same tokens, drawn or greedy, as without speculation. For a guess that is a
single token the chance of acceptance is the same p(guess) in both; for a guess drawn by a draft model it is higher
under the rejection rule by what the coupling of two draws with one dart loses, which verify="rejection" buys back at
the price of answers that repeat only in distribution.

How many? With acceptance rate a per guess, k guesses give 1 + a + ... + a^k tokens; k + 1 rows cost step(k + 1). The
`Speculator` is told step(), keeps a for every answer and strength of evidence, sorts the guesses of the whole batch by
their chance to count, and takes as many of the first as promise most tokens per second. That is none where text does
not repeat, and none in a batch so busy that even right guesses cost more than they win; there it does not even ask.
Everything else is tried on credit: what guesses win is put on an account, what they cost is taken off it, and with
nothing on it there are none. A hundredth of all tokens is paid in, so that text that repeats again is found out again:

    account   4 . . 3.5 . . 2.2 . . 0.9 . . -0.4     asking and wrong guesses use it up; then a few steps without, until
              0 . . 0.04 . . 0.08 . . ...            the hundredth has added up to a little, and it is asked once more

This file has the rules and the cheapest proposer: what followed the last occurrence of the latest few tokens (prompt
lookup). drafting/head.py has one that was trained for its target, drafting/draft_model.py those that are models.

Sources: Leviathan, Kalman and Matias 2023 (arXiv:2211.17192, section 2.3 and appendix A.1 for the rule, 3.3 for the
cost); Chen et al. 2023 (arXiv:2302.01318); Daliri, Musco and Suresh 2024 (arXiv:2408.07978) for coupled draws that do
not depend on the draft; prompt lookup: Saxena 2023 and LLMA (Yang et al. 2023, arXiv:2304.04487).
Left out: trees of guesses.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

import torch

from sampling import Sampled, draw, probabilities, process_logits, score

if TYPE_CHECKING:
    from request import Answer

VERDICT, RESIDUAL, GUESS = 1, 2, 3  # streams of sampling.uniform; 0 draws tokens
FADE, OVERALL_FADE = 0.9, 0.98  # how fast what was seen fades, of one answer and of all, per verified guess
CHECK_S = 0.2e-3  # seconds a step takes longer for having any guesses: laying them out, taking back what was wrong
MARGIN = 1.5  # of what guesses are thought to cost: an answer that gets ahead saves only a row of the steps to come
SURE = 0.95  # chance of the best guesses there are
CREDIT, MOST_CREDIT = 4.0, 8.0  # tokens that guesses may lose at first, and after having won ever so many
PASSES = 8  # over the sizes of a step, to time each
SHARE = 0.01  # of all tokens may be lost in finding out whether guesses pay


def rejection_sample(p: torch.Tensor, q: torch.Tensor, guess: int, verdict: float, residual: float) -> int:
    """A token distributed as p [V], given `guess` drawn from q [V]: the guess itself as often as can be.

    verdict and residual are independent numbers in [0, 1) that `guess` does not depend on. The result differs from the
    guess exactly when the guess was rejected.
    """
    if verdict * float(q[guess]) < float(p[guess]):
        return guess
    more = (p - q).clamp_(min=0)  # [V]; sums to the chance of rejection, so it is not all 0 here but for rounding
    return draw(more if float(more.amax()) > 0 else p, residual)


def verdict(answer: Answer, row: torch.Tensor, guess: int, mask: torch.Tensor | None) -> Sampled:
    """The next token of an answer under the rejection rule, from its raw logits [V] and the guess that is at stake."""
    state, params = answer.sampler, answer.request.params
    (p,) = probabilities(process_logits(row[None], [state], [mask]), [state])
    q = answer.guess_probs[answer.num_guessed - answer.seq.num_draft]
    token = rejection_sample(p, q, guess, state.uniform(VERDICT), state.uniform(RESIDUAL))
    return score(row, token, params.logprobs) if params.scored else Sampled(token)


Trim = Callable[["Answer", list[int]], list[int]]


class Proposer(Protocol):
    """Guesses what follows. May be wrong, late or empty; it must be cheap."""

    ROUNDS_TO_ASK = 0  # rounds of `draft` that `strength` takes, which are then spared in `propose`

    def strength(self, answers: list[Answer]) -> list[int]:
        """How good the evidence for a guess is now: 0 for none at all; equal numbers promise equally much."""

    def propose(self, answers: list[Answer], limits: list[int]) -> list[list[int]]:
        """For each answer up to so many tokens that may follow those of its sequence."""

    def backlog(self, answer: Answer) -> int:
        """Tokens of the answer that must be computed before the first guess."""
        return 0


class NgramProposer(Proposer):
    """What followed the last time that the latest tokens stood here: for text that quotes, edits or repeats.

        tokens    A B C D E ... x A B C         the latest three stood at the beginning, followed by D E ...
        guess                           D E

    Longest match first, and its length is the strength of the evidence: six tokens in a row are seldom followed by
    another seventh, one token nearly always. A guess may run into itself, so that a loop is continued for as long as
    one likes.
    """

    def __init__(self, longest: int = 6, shortest: int = 1):
        self.lengths = range(longest, shortest - 1, -1)
        self._seen: WeakKeyDictionary[Answer, tuple[int, dict]] = WeakKeyDictionary()

    def strength(self, answers: list[Answer]) -> list[int]:
        return [self._match(answer)[0] for answer in answers]

    def propose(self, answers: list[Answer], limits: list[int]) -> list[list[int]]:
        return [self._guess(answer, limit) if limit else [] for answer, limit in zip(answers, limits, strict=True)]

    def _match(self, answer: Answer) -> tuple[int, int]:
        """Length of the longest match, and the place after its last occurrence; 0, 0 without any."""
        tokens, index = answer.seq.tokens, self._index(answer)
        for n in self.lengths:
            place = index.get(tuple(tokens[-n:]))
            if place is not None:
                return n, place
        return 0, 0

    def _guess(self, answer: Answer, limit: int) -> list[int]:
        tokens, guess = answer.seq.tokens, []
        length, place = self._match(answer)
        for i in range(place, place + limit if length else place):
            guess.append(tokens[i] if i < len(tokens) else guess[i - len(tokens)])
        return guess

    def _index(self, answer: Answer) -> dict[tuple[int, ...], int]:
        """n-gram -> the place after its last occurrence, of all that end before the last token."""
        tokens = answer.seq.tokens
        done, index = self._seen.get(answer, (0, {}))
        for end in range(done + 1, len(tokens)):
            for n in self.lengths:
                if n <= end:
                    index[tuple(tokens[end - n : end])] = end
        self._seen[answer] = len(tokens) - 1, index
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
        budget_s: float = 0.4,
        before: Callable[[], object] | None = None,
    ) -> StepCost:
        """run(rows) computes a step; sizes are doubled until `most`, or until timing them takes the budget.

        Then all are timed in turn, PASSES times or until twice the budget is spent, and the shortest time of each
        counts: a moment in which the machine is busy elsewhere spoils one pass, and what matters is how the sizes
        compare. `before` is called, untimed, before each: what runs between two calls in earnest, and empties the
        caches.
        """
        seconds: dict[int, float] = {}

        def time_once(rows: int) -> None:
            if before is not None:
                before()
            began = time.perf_counter()
            run(rows)
            seconds[rows] = min(seconds.get(rows, math.inf), time.perf_counter() - began)

        rows = 1
        while rows <= 2 or (rows <= most and PASSES * sum(seconds.values()) < budget_s):
            run(rows)  # may have to record or compile something
            time_once(rows)
            rows *= 2
        sizes, start = list(seconds), time.perf_counter()
        for done in range(1, PASSES):
            if done > 1 and time.perf_counter() - start > 2 * budget_s:
                break
            for rows in sizes:
                time_once(rows)
        for rows in reversed(sizes):  # more rows never cost less, and a clock only ever adds
            seconds[rows] = min(seconds[rows], seconds.get(2 * rows, seconds[rows]))
        return cls(seconds)


@dataclass
class Record:
    """How guesses of one strength fared: right and wrong, fading."""

    right: float
    wrong: float

    @property
    def rate(self) -> float:
        return self.right / (self.right + self.wrong)

    def add(self, right: int, wrong: int, fade: float) -> None:
        fade **= right + wrong
        self.right, self.wrong = self.right * fade + right, self.wrong * fade + wrong


@dataclass
class Account:
    """What may be spent on guesses, in tokens: on all of them, and of that on trying such as are not thought to pay.

    More than so much is not kept, or a good past would pay for a long bad present.
    """

    asking: float = CREDIT
    trying: float = 0.0

    def pay_in(self, tokens: float) -> None:
        self.asking = min(self.asking + tokens, MOST_CREDIT)

    def pay_in_share(self, tokens: float) -> None:
        self.pay_in(SHARE * tokens)
        self.trying = min(self.trying + SHARE * tokens, MOST_CREDIT)


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
        self.records: WeakKeyDictionary[Answer, dict[int, Record]] = WeakKeyDictionary()
        self.last: WeakKeyDictionary[Answer, int] = WeakKeyDictionary()  # the step in which it was given guesses last
        self.asked: dict[Answer, int] = {}  # whose guesses are being verified, and their strength
        self.drafted = self.accepted = self.decodes = self.steps = 0
        self.accounts: dict[int, Account] = {}  # by the size of the batch in bits, for what pays depends on it
        self.account = Account()  # that of this step
        self.prices: dict[int, tuple[list[float], float]] = {}  # by the size of the batch
        self.hopeless: dict[int, bool] = {}  # likewise

    def propose(self, answers: list[Answer], rooms: list[int], trim: Trim | None = None) -> list[list[int]]:
        """Guesses for the answers that decode now; rooms: how many each may take.

        trim(answer, guess): what of a guess is possible at all. One that is not was wrong, and costs no row.
        """
        n = len(answers)
        self.decodes += n
        self.steps += 1
        self.asked = {}
        if not any(rooms) or (self.step is not None and not self._may_ask(n)):
            return [[] for _ in answers]
        strengths = self.proposer.strength(answers)
        longest = [min(room, self.most) if strength else 0 for room, strength in zip(rooms, strengths, strict=True)]
        records = [self._record(answer, strength) for answer, strength in zip(answers, strengths, strict=True)]
        limits = longest if self.step is None else self.plan(answers, records, longest)
        self.asked = dict(zip(answers, strengths, strict=True))
        guessing = [answer for answer, limit in zip(answers, limits, strict=True) if limit]
        missed = sum(map(self._missed, guessing))
        self.last.update(dict.fromkeys(guessing, self.steps))
        guesses = self.proposer.propose(answers, limits) if guessing else [[] for _ in answers]
        for i, answer in enumerate(answers):
            possible = guesses[i] if trim is None else trim(answer, guesses[i])
            if guesses[i] and not possible:
                self._learn(answer, right=0, wrong=1)
            guesses[i] = possible
        if self.step is not None:
            price = self.price(n, sum(map(len, guesses)), max(limits)) + self._price_of_reading(n, missed)
            self.account.asking -= price
        return guesses

    def _may_ask(self, answers: int) -> bool:
        """Open the account of a batch of this size, and see whether there is anything to win and something on it."""
        self.account = self.accounts.setdefault(answers.bit_length(), Account())
        self.account.pay_in_share(answers)
        return self.account.asking > 0 and not self.is_hopeless(answers)

    def _missed(self, answer: Answer) -> int:
        """Tokens that the proposer must compute for having made no guess lately. That it reads an answer once from its
        beginning is no price but an investment, made as soon as the answer is given its first guess."""
        silent = self.steps - 1 - self.last.get(answer, self.steps - 1)
        return min(silent, self.proposer.backlog(answer))

    def _price_of_reading(self, answers: int, tokens: int) -> float:
        """What it costs that the proposer computes so many tokens that it has missed."""
        if self.draft is None or not tokens:
            return 0.0
        return MARGIN * answers * (self.draft(answers + tokens) - self.draft(answers)) / self.step(answers)

    def price(self, answers: int, guesses: int, longest: int) -> float:
        """What a step costs more for `guesses`, of which one answer has the `longest`: in tokens it could have made."""
        rows, one_round = self._prices(answers)
        return rows[guesses] + one_round * max(longest, self.proposer.ROUNDS_TO_ASK)

    def _prices(self, answers: int) -> tuple[list[float], float]:
        """The price of the rows of 0, 1, 2, ... guesses, and of a round of the proposer."""
        if answers not in self.prices:
            alone = self.step(answers)
            tokens = MARGIN * answers / alone  # that a second is worth
            more = [self.step(answers + g) - alone + CHECK_S for g in range(1, answers * self.most + 1)]
            a_round = self.draft(answers) if self.draft is not None else 0.0
            self.prices[answers] = [0.0, *(tokens * seconds for seconds in more)], tokens * a_round
        return self.prices[answers]

    def is_hopeless(self, answers: int) -> bool:
        """Whether so many answers could win nothing by guesses, even by as many as pay best and nearly all right."""
        if answers not in self.hopeless:
            depths = [1 + g // answers for g in range(answers * self.most)]  # one for each, then a second for each, ...
            won = accumulate(SURE**depth for depth in depths)
            prices = (self.price(answers, g, depth) for g, depth in enumerate(depths, 1))
            self.hopeless[answers] = all(tokens <= price for tokens, price in zip(won, prices, strict=True))
        return self.hopeless[answers]

    def _record(self, answer: Answer, strength: int) -> Record:
        overall = self.overall.setdefault(strength, Record(2.0 * strength, 2.0))
        own = self.records.setdefault(answer, {})
        if strength not in own:
            own[strength] = Record(self.trust * overall.rate, self.trust * (1 - overall.rate))
        return own[strength]

    def plan(self, answers: list[Answer], records: list[Record], longest: list[int]) -> list[int]:
        """How many guesses each answer is given, of at most `longest`: those that together promise most for a second.

        And one to the answer that has gone longest without, when there is something on the account to try it with.
        """
        chances = []  # (chance that a guess is right together with all before it, its place among them, answer)
        for i, record in enumerate(records):
            chance = 1.0
            for place in range(1, longest[i] + 1):
                chance *= record.rate
                chances.append((chance, place, i))
        chances.sort(key=lambda entry: -entry[0])
        n, (rows, one_round) = len(records), self._prices(len(records))
        best, kept, tokens, deepest = 1.0, 0, 0.0, self.proposer.ROUNDS_TO_ASK  # what was asked is paid already
        for guesses, (chance, place, _) in enumerate(chances, 1):
            tokens, deepest = tokens + chance, max(deepest, place)
            price = rows[guesses] + one_round * (deepest - self.proposer.ROUNDS_TO_ASK)
            rate = (n + tokens) / (n + price)
            if rate > best:
                best, kept = rate, guesses
        limits = [0] * n
        for _, _, i in chances[:kept]:
            limits[i] += 1
        idle = [(self.last.get(c, 0), i) for i, c in enumerate(answers) if limits[i] == 0 < longest[i]]
        if idle:
            deepest, i = max(limits), min(idle)[1]
            price = self.price(n, kept + 1, max(deepest, 1)) - self.price(n, kept, deepest)
            price += self._price_of_reading(n, self.proposer.backlog(answers[i]))
            if self.account.trying > price:
                self.account.trying -= price
                limits[i] = 1
        return limits

    def observe(self, answer: Answer) -> None:
        """The guesses of an answer have been verified."""
        guessed, right = answer.num_guessed, answer.num_right
        wrong = int(right < guessed and answer.finish_reason is None)  # what comes after a wrong one was not tested
        self.drafted += guessed
        self.accepted += right
        self.account.pay_in(right)
        self._learn(answer, right, wrong)

    def _learn(self, answer: Answer, right: int, wrong: int) -> None:
        strength = self.asked[answer]
        self.records[answer][strength].add(right, wrong, FADE)
        self.overall[strength].add(right, wrong, OVERALL_FADE)

    def break_even(self) -> float | None:
        """The acceptance rate above which a single guess pays for one sequence alone."""
        if self.step is None:
            return None
        return self.price(1, 1, 1)

    def stats(self) -> dict[str, float | None]:
        """drafted and accepted guesses, tokens an answer gains per step, and the break-even acceptance rate."""
        return {
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tokens_per_step": 1 + self.accepted / self.decodes if self.decodes else 1.0,
            "break_even": self.break_even(),
        }


def main(argv: list[str] | None = None) -> int:
    """`python speculative.py train | measure`: the commands live in drafting/train.py, which needs the whole engine."""
    from drafting import train as train_head

    return train_head.main(argv)


if __name__ == "__main__":
    raise SystemExit(main())
