"""Who of the waiting goes next: fcfs, priority, longest prefix first.

Problem. With room for one more request, the choice among the waiting decides who waits how long, and also how much
there is to compute: a request whose beginning lies in the prefix cache now may find it evicted a minute later.

Idea. A policy is two small functions: a level (sequences are ranked by level, then arrival) and a choice among the
waiting. The rank also says who is preempted: the last in rank leaves first.

    waiting, by rank    A . . . . . . | . . .            fcfs, priority: the head, A
                        '-- window --'                   lpm: the longest cached prefix in the window; A itself once
                                                              LPM_PATIENCE others went before it

The queue is a heap, so adding, taking and leaving cost O(log n) with 100,000 waiting as with ten; lpm compares the
LPM_WINDOW oldest only, because a look at everybody in every step would cost more than the hits save. Starvation is
bounded: the head is passed over at most LPM_PATIENCE times, so place k in the queue is served after at most
k * (LPM_PATIENCE + 1) admissions.

Source: Zheng et al., "SGLang" (NeurIPS 2024), section 3, cache-aware scheduling. The window and the patience are ours.

Left out: shortest job first (nobody knows the length of an answer), fairness between users, deadlines.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from sequence import Sequence

if TYPE_CHECKING:
    from radix import RadixCache

LPM_WINDOW = 32  # waiting sequences that lpm compares
LPM_PATIENCE = 16  # times the oldest of them may be passed over before it goes first


class Waiting:
    """The waiting sequences in order of a key: a heap, with entries of those that left early skipped when met."""

    def __init__(self):
        self._heap: list[tuple[tuple, int, Sequence]] = []
        self._live: dict[Sequence, int] = {}  # sequence -> number of its valid entry
        self._pushes = count()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._live)

    def push(self, key: tuple, seq: Sequence) -> None:
        self._live[seq] = entry = next(self._pushes)
        heapq.heappush(self._heap, (key, entry, seq))

    def remove(self, seq: Sequence) -> None:
        del self._live[seq]
        if len(self._heap) > 2 * len(self._live) + 64:  # mostly dead: rebuild, at a cost already paid by the removals
            self._heap = [entry for entry in self._heap if self._live.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def first(self) -> Sequence:
        """The head of the queue (which must not be empty)."""
        while self._live.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def window(self, n: int) -> list[Sequence]:
        """The first n in order, without taking them out: walks down from the top of the heap, O(n log n)."""
        found, frontier = [], [(self._heap[0], 0)] if self._heap else []
        while frontier and len(found) < n:
            (_, number, seq), i = heapq.heappop(frontier)
            if self._live.get(seq) == number:
                found.append(seq)
            for child in (2 * i + 1, 2 * i + 2):
                if child < len(self._heap):
                    heapq.heappush(frontier, (self._heap[child], child))
        return found


class Policy(NamedTuple):
    level: Callable[[Sequence], int]  # sequences are ranked by level, then arrival
    select: Callable[[Waiting, RadixCache | None], Sequence]


def in_order(waiting: Waiting, cache: RadixCache | None) -> Sequence:
    """The head of the queue."""
    return waiting.first()


def longest_prefix(waiting: Waiting, cache: RadixCache | None) -> Sequence:
    """The one with the most cached tokens; the oldest after LPM_PATIENCE others went before it."""
    oldest = waiting.first()
    if cache is None or oldest.resumed or oldest.passed_over >= LPM_PATIENCE:
        return oldest
    return max(waiting.window(LPM_WINDOW), key=lambda s: cache.cached_length(s.tokens, s.namespace, len(s.tokens) - 1))


POLICIES = {
    "fcfs": Policy(lambda seq: 0, in_order),
    "priority": Policy(lambda seq: seq.priority, in_order),
    "lpm": Policy(lambda seq: 0, longest_prefix),
}
