"""Which blocks a sequence holds: growing, sharing, copying on write, leaving blocks to the prefix cache.

Problem. A block may have several owners at once (a fork, the prefix cache), and each step some sequences grow, some
leave and some are cut back. One forgotten or doubled reference, and a block is lost or overwritten under somebody.

Idea. Every change of a block table goes through the few functions of this file, and each keeps this true:

    tokens        | 0 .. 15 | 16 .. 31 | 32 .. 40        block_size 16, num_computed 41
    block_table   |    7    |    3     |    9
    owners        | seq+cache  seq+cache  seq only       the cache stands at depth 2 = seq.handle.depth
                                            ^ written next: must have one owner, else a copy is made first

- The table covers the computed tokens and, between schedule() and computed(), those of the step.
- The first seq.handle.depth blocks are the prefix cache's own, and the sequence holds the lock on that path: a block
  of the cache is locked exactly when a sequence holds it.
- free + cached + live == total: cached blocks are those owned by the cache alone, live those of any sequence.

Source: Kwon et al., "PagedAttention" (SOSP 2023), section 4.4; Zheng et al., "SGLang" (NeurIPS 2024), section 3.

Left out: who is entitled to blocks (scheduler.py) and the tensors (kv_paged.KVCache).
"""

from __future__ import annotations

from kv_paged import BlockPool, OutOfBlocks, blocks_needed
from radix import Match, RadixCache
from sequence import Sequence


class BlockTables:
    """The block tables of all sequences over one pool and, optionally, one prefix cache.

    contiguous: adjacent blocks for a sequence's greatest length, taken at its start; nothing grows, nothing is shared.
    """

    def __init__(self, pool: BlockPool, cache: RadixCache | None, contiguous: bool = False):
        self.pool, self.cache, self.contiguous = pool, cache, contiguous
        self.block_size = pool.block_size

    @property
    def cached(self) -> int:
        """Blocks that only the prefix cache owns: they can be had by evicting."""
        return self.cache.num_evictable if self.cache is not None else 0

    @property
    def available(self) -> int:
        return self.pool.num_free + self.cached

    # ---- a sequence starts, grows, is cut, leaves

    def find(self, seq: Sequence) -> Match | None:
        """The cached prefix a waiting sequence can start from, locked; at least one token is left to compute."""
        if self.cache is None:
            return None
        limit = len(seq.tokens) - 1 if seq.read_cache and seq.state != "swapped" else 0
        match = self.cache.match(seq.tokens, seq.namespace, limit)
        self.cache.lock(match.handle)
        return match

    def start(self, seq: Sequence, match: Match | None, n_tokens: int, slots: int, reserve: int) -> bool:
        """Blocks for the first n_tokens of a sequence, the matched ones first.

        False, and nothing held, unless there is room for all its known tokens and `reserve` blocks more (contiguous:
        for its `slots` tokens).
        """
        shared = match.blocks if match else []
        table = None
        if self.contiguous:
            try:
                table = self.pool.allocate_run(blocks_needed(slots, self.block_size))
            except OutOfBlocks:
                pass
        elif blocks_needed(len(seq.tokens), self.block_size) - len(shared) + reserve <= self.available:
            self.pool.share(shared)
            table = shared + self._allocate(blocks_needed(n_tokens, self.block_size) - len(shared))
        if table is None:
            return False
        seq.block_table, seq.handle = table, match.handle if match else None
        return True

    def room(self, seq: Sequence) -> int:
        """Tokens the sequence could write now: in what it holds and in what free or evictable blocks would add."""
        held = len(seq.block_table) * self.block_size - seq.num_computed
        if self.contiguous:
            return held
        blocks = self.available - len(self._shared(seq))
        return held + blocks * self.block_size if blocks >= 0 else 0

    def extend(self, seq: Sequence, n: int) -> list[tuple[int, int]]:
        """Own the blocks for n more tokens. Returns the copies (source, target) to make before anything is written."""
        table, copies = seq.block_table, []
        for i in self._shared(seq):
            (own,) = self._allocate(1)
            copies.append((table[i], own))
            if self.cache is not None and seq.handle.depth > i:
                seq.handle = self.cache.retreat(seq.handle, i)
            self.pool.release([table[i]])
            table[i] = own
        table += self._allocate(blocks_needed(seq.num_computed + n, self.block_size) - len(table))
        return copies

    def cut(self, seq: Sequence) -> None:
        """After num_computed went down: release the blocks that hold nothing any more, stand no deeper in the cache."""
        if self.contiguous:
            return
        keep, full = blocks_needed(seq.num_computed, self.block_size), seq.num_computed // self.block_size
        self.pool.release(seq.block_table[keep:])
        del seq.block_table[keep:]
        if self.cache is None or seq.handle.depth <= full:
            return
        seq.handle = self.cache.retreat(seq.handle, keep)
        if keep > full:  # the last block is cached and about to be written: have it back, or copy it in extend()
            seq.handle = self.cache.withdraw(seq.handle) or seq.handle

    def fork(self, seq: Sequence, child: Sequence) -> None:
        """The child points at the same blocks and becomes their owner too.

        The cache is offered the full ones first, so that both stand on them. Offered later by one of the two, they
        would count as evictable while the other still uses them.
        """
        self.offer(seq)
        child.num_computed, child.block_table, child.handle = seq.num_computed, list(seq.block_table), seq.handle
        self.pool.share(child.block_table)
        if self.cache is not None:
            self.cache.lock(child.handle)

    def offer(self, seq: Sequence) -> None:
        """Give the cache the full computed blocks it does not have yet; where it has equal ones, use those instead."""
        if self.cache is None:
            return
        full, known = seq.num_computed // self.block_size, seq.handle.depth
        if full <= known:
            return
        match = self.cache.insert(seq.tokens, seq.block_table[:full], seq.namespace, seq.handle)
        seq.handle = match.handle
        own = seq.block_table[known:full]
        if match.blocks != own:
            self.pool.share(match.blocks)
            self.pool.release(own)
            seq.block_table[known:full] = match.blocks

    def release(self, seq: Sequence, keep: bool = True) -> None:
        """Let go of all blocks of a sequence; with `keep` the cache is offered the full ones."""
        if keep:
            self.offer(seq)
        if self.cache is not None:
            self.cache.unlock(seq.handle)
            seq.handle = None
        self.pool.release(seq.block_table)
        seq.block_table = []

    # ---- inside

    def _shared(self, seq: Sequence) -> list[int]:
        """Places in the block table that will be written but have other owners too."""
        first, table, refs = seq.num_computed // self.block_size, seq.block_table, self.pool.refs
        return [i for i in range(first, len(table)) if refs[table[i]] > 1]

    def _allocate(self, n: int) -> list[int]:
        if self.cache is not None and n > self.pool.num_free:
            self.cache.evict(n - self.pool.num_free)
        return self.pool.allocate(n)

    def balance(self, running: list[Sequence]) -> dict[str, int]:
        """free, cached, live and total in blocks, free + cached + live == total; kv_tokens: tokens in live blocks."""
        size, place = self.block_size, {}  # block -> its place in the tables, for the blocks that may not be full
        for seq in running:
            first = max(seq.num_computed // size, seq.handle.depth if seq.handle else 0)
            place |= {seq.block_table[i]: i for i in range(first, len(seq.block_table))}
        empty = 0
        for block, i in place.items():
            owners = [seq for seq in running if seq.block_table[i : i + 1] == [block]]
            empty += size - min(size, max(0, max(seq.num_computed for seq in owners) - i * size))
        free, cached, total = self.pool.num_free, self.cached, self.pool.total
        live = total - free - cached
        return {
            "free": free,
            "cached": cached,
            "live": live,
            "total": total,
            "kv_tokens": live * size - empty,
        }
