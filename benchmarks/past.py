"""The engines of the past, kept only to be compared with: batches fixed at the start, one slab of memory a request.

Problem. Continuous batching and paging are easy to take for granted. What they buy shows only beside what came before.

Idea. Change as little of the real scheduler as the old way differs in:

    static       A ████████████████   B ██████░░░░░░░░░░   C waits until A and B have both ended
    contiguous   A ██████░░░░░░░░░░   blocks for the longest answer it may give, adjacent, from its first step on

Source: Yu et al., "Orca" (OSDI 2022), section 3.1, and Kwon et al., "PagedAttention" (SOSP 2023), section 3.1, describe
both. Left out: padding a batch to a rectangle (benchmarks/scheduling.py).
"""

from __future__ import annotations

from kv_paged import BlockPool, BlockTables, blocks_needed
from radix import NoCache
from scheduler import Scheduler, Sequence, Step

BATCHINGS, RESERVES = ("continuous", "static"), ("paged", "contiguous")


class StaticScheduler(Scheduler):
    """Admits nobody until the whole batch has ended."""

    filling = True  # the batch still takes sequences

    def _admit(self, step: Step) -> None:
        self.filling = self.filling or not self.running
        super()._admit(step)
        self.filling = self.filling and step.budget == 0 and bool(self.waiting)  # only want of tokens leaves it open

    def _start(self, seq: Sequence, step: Step) -> bool:
        return (self.filling or seq.rank.started) and super()._start(seq, step)


class SlabTables(BlockTables):
    """Adjacent blocks for a sequence's greatest length, taken at its start: nothing grows and nothing is shared."""

    def start(self, seq: Sequence, match, n_tokens: int, reserve: int = 0) -> bool:
        slots = seq.num_prompt + seq.max_tokens - 1
        seq.block_table = allocate_run(self.pool, blocks_needed(slots, self.block_size))
        if seq.block_table:
            self.cache.lock(match.handle)
            seq.handle = match.handle
        return bool(seq.block_table)

    def room(self, seq: Sequence) -> int:
        return len(seq.block_table) * self.block_size - seq.num_computed

    def cut(self, seq: Sequence) -> None:
        """A slab keeps its size."""


class SlabScheduler(Scheduler):
    """Gives each sequence a slab. A fork starts as if preempted."""

    def __init__(self, pool: BlockPool, cache=None, *limits, **switches):
        if not isinstance(cache, NoCache | None):
            raise ValueError('reserve="contiguous" cannot share blocks; turn the prefix cache off')
        super().__init__(pool, cache, *limits, **switches)
        self.tables = SlabTables(pool, self.cache)

    def _can_share(self, parent: Sequence) -> bool:
        return False

    def _lowest_ranked(self) -> list[Sequence]:
        return self.running[:]  # free slots between slabs may be too short for any other: all must move


class StaticSlabScheduler(StaticScheduler, SlabScheduler):
    pass


def allocate_run(pool: BlockPool, n: int) -> list[int]:
    """n adjacent blocks, first fit; none if no gap is long enough, even where the free blocks together would be."""
    free = sorted(pool.allocate(pool.num_free))
    starts = (i for i in range(len(free) - n + 1) if free[i + n - 1] - free[i] == n - 1)
    start = next(starts, len(free))
    pool.release(reversed(free[:start] + free[start + n :]))
    return free[start : start + n]


def scheduler_class(batching: str = "continuous", reserve: str = "paged") -> type[Scheduler]:
    if reserve == "paged":
        return Scheduler if batching == "continuous" else StaticScheduler
    return SlabScheduler if batching == "continuous" else StaticSlabScheduler
