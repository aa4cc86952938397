"""Paged KV memory: fixed-size blocks, block tables, reference counts, copy-on-write, swap.

Problem. Every token of a running request keeps one key and one value per layer and head, and nobody knows beforehand
how long an answer gets. A contiguous slab for the longest answer stays mostly empty while other requests wait.

Idea. As an operating system does: cut memory into blocks of `block_size` tokens, hand them out one by one as a sequence
grows, and let a list, the block table, say where each part of it lies. Two tables may name the same block: a reference
count says how many do, and a shared block is copied before it is written.

    sequence A  tokens  the cat sat on | the mat      block_table [3, 1]     block       1       2       3       4
    sequence B  (fork)  the cat sat on | the sofa     block_table [3, 4]     references  1     free      2       1

    slot of token position p  =  block_table[p // block_size] * block_size + p % block_size

Block 0 is never handed out: rows of a batch that are only padding write there, so they cannot touch live state.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (SOSP 2023),
section 4. Left out: who gets blocks and when (scheduler.py), blocks of unequal size, KV in fewer bits.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DEFAULT_MEMORY_SHARE = 0.25  # of the memory that is free when the engine starts, unless the user names a budget


class OutOfBlocks(RuntimeError):
    """The pool cannot give that many blocks; the caller must evict, preempt or wait. The pool is unchanged."""


def blocks_needed(n_tokens: int, block_size: int) -> int:
    """Blocks that hold `n_tokens` tokens."""
    return -(-n_tokens // block_size)


class BlockPool:
    """Which blocks are free, and how many owners each of the others has. Integers only, no tensors.

    An owner is anything that must be able to read the block later: a sequence (through its block table) or the prefix
    cache. `allocate` makes a first owner, `share` adds one, `release` takes one away and frees the block with the last.
    """

    def __init__(self, num_blocks: int, block_size: int):
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: a pool needs at least 2 (block 0 is set aside for padding)")
        if block_size < 1:
            raise ValueError(f"block_size={block_size}: must be at least 1 token")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.total = num_blocks - 1  # blocks that can ever be handed out: block 0 is not among them
        self.refs = [0] * num_blocks  # owners per block; readers outside this class must not write it
        self.refs[0] = 1  # block 0 belongs to padding for ever
        self._free = list(range(num_blocks - 1, 0, -1))  # a stack: the block freed last is the warmest in the caches

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Take `n` free blocks, in any physical order, each with one owner. Short: OutOfBlocks, and none is taken."""
        rest = len(self._free) - max(0, n)
        if rest < 0:
            raise OutOfBlocks(f"{n} blocks wanted, {len(self._free)} of {self.total} free")
        taken = self._free[rest:][::-1]
        del self._free[rest:]
        for block in taken:
            self.refs[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each block."""
        refs = self.refs
        for block in blocks:
            assert block and refs[block], f"block {block} is not in use and cannot be shared"
            refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One owner less for each block; a block without owners is free again."""
        refs, free = self.refs, self._free
        for block in blocks:
            assert block and refs[block], f"block {block} is released more often than taken"
            refs[block] -= 1
            if refs[block] == 0:
                free.append(block)


class BlockTables:
    """Which blocks each sequence holds. Every change of a block table goes through here and keeps this true:

        tokens        | 0 .. 15 | 16 .. 31 | 32 .. 40        block_size 16, num_computed 41
        block_table   |    7    |    3     |    9
        owners        | seq+cache  seq+cache  seq only       the cache stands at depth 2 = seq.handle.depth
                                                ^ written next: must have one owner, else a copy is made first

    The table covers the computed tokens and, between schedule() and computed(), those of the step. Its first
    seq.handle.depth blocks are the prefix cache's own, and the sequence holds the lock on that path: a block of the
    cache is locked exactly when a sequence holds it. free + cached + live == total, where the cache alone owns the
    cached ones. `cache` is a radix.RadixCache, `seq` a scheduler.Sequence.
    """

    def __init__(self, pool: BlockPool, cache):
        self.pool, self.cache, self.block_size = pool, cache, pool.block_size

    @property
    def available(self) -> int:
        return self.pool.num_free + self.cache.num_evictable

    def find(self, seq):
        """The cached prefix (radix.Match) that a waiting sequence can start from, leaving a token to compute."""
        limit = len(seq.tokens) - 1 if seq.read_cache and seq.state != "swapped" else 0
        return self.cache.match(seq.tokens, seq.namespace, limit)

    def start(self, seq, match, n_tokens: int, reserve: int = 0) -> bool:
        """Blocks for the first n_tokens of a sequence, the matched ones first; False, with nothing taken, unless there
        is room for all its known tokens and `reserve` blocks more."""
        self.cache.lock(match.handle)  # before it counts: what it stands on cannot be evicted for the rest
        if blocks_needed(len(seq.tokens), self.block_size) - len(match.blocks) + reserve > self.available:
            self.cache.unlock(match.handle)
            return False
        self.pool.share(match.blocks)
        own = self._allocate(blocks_needed(n_tokens, self.block_size) - len(match.blocks))
        seq.block_table, seq.handle = match.blocks + own, match.handle
        return True

    def room(self, seq) -> int:
        """Tokens the sequence could write now: in what it holds and in what free or evictable blocks would add."""
        blocks = self.available - len(self._shared(seq))
        return (len(seq.block_table) + blocks) * self.block_size - seq.num_computed if blocks >= 0 else 0

    def extend(self, seq, n: int) -> list[tuple[int, int]]:
        """Own the blocks for n more tokens. Returns the copies (source, target) to make before anything is written."""
        table, copies = seq.block_table, []
        for i in self._shared(seq):
            (own,) = self._allocate(1)
            copies.append((table[i], own))
            if seq.handle.depth > i:
                seq.handle = self.cache.retreat(seq.handle, i)
            self.pool.release([table[i]])
            table[i] = own
        table += self._allocate(blocks_needed(seq.num_computed + n, self.block_size) - len(table))
        return copies

    def cut(self, seq) -> None:
        """After num_computed went down: release the blocks that hold nothing any more, stand no deeper in the cache."""
        keep, full = blocks_needed(seq.num_computed, self.block_size), seq.num_computed // self.block_size
        self.pool.release(seq.block_table[keep:])
        del seq.block_table[keep:]
        if seq.handle.depth > full:
            seq.handle = self.cache.retreat(seq.handle, keep)
            if keep > full:  # the last block is cached and will be written: take it back, or extend() copies it
                seq.handle = self.cache.withdraw(seq.handle) or seq.handle

    def fork(self, seq, child) -> None:
        """The child names the same blocks and becomes their owner too."""
        self.offer(seq)  # now, so that both stand on what it fills: offered later by one, it would seem evictable
        child.num_computed, child.block_table, child.handle = seq.num_computed, list(seq.block_table), seq.handle
        self.pool.share(child.block_table)
        self.cache.lock(child.handle)

    def offer(self, seq) -> None:
        """Give the cache the full computed blocks it does not have yet; where it has equal ones, use those instead."""
        full, known = seq.num_computed // self.block_size, seq.handle.depth
        if full <= known:
            return
        match = self.cache.insert(seq.tokens, seq.block_table[:full], seq.handle)
        seq.handle = match.handle
        own = seq.block_table[known:full]
        if match.blocks != own:
            self.pool.share(match.blocks)
            self.pool.release(own)
            seq.block_table[known:full] = match.blocks

    def release(self, seq, keep: bool = True) -> None:
        """Let go of all blocks of a sequence; with `keep` the cache is offered the full ones."""
        if keep:
            self.offer(seq)
        self.cache.unlock(seq.handle)
        self.pool.release(seq.block_table)
        seq.block_table, seq.handle = [], None

    def _shared(self, seq) -> list[int]:
        """Indices in the block table that will be written but have other owners too."""
        first, table, refs = seq.num_computed // self.block_size, seq.block_table, self.pool.refs
        return [i for i in range(first, len(table)) if refs[table[i]] > 1]

    def _allocate(self, n: int) -> list[int]:
        if n > self.pool.num_free:
            self.cache.evict(n - self.pool.num_free)
        return self.pool.allocate(n)

    def balance(self, running) -> dict[str, int]:
        """free, cached, live and total in blocks, free + cached + live == total; kv_tokens: tokens in live blocks."""
        size, partial = self.block_size, {}  # partial: block that may not be full -> its index in the tables
        for seq in running:
            first = max(seq.num_computed // size, seq.handle.depth)
            partial |= {seq.block_table[i]: i for i in range(first, len(seq.block_table))}
        empty = 0
        for block, i in partial.items():
            owners = [seq for seq in running if seq.block_table[i : i + 1] == [block]]
            empty += size - min(size, max(0, max(seq.num_computed for seq in owners) - i * size))
        free, cached, total = self.pool.num_free, self.cache.num_evictable, self.pool.total
        live = total - free - cached
        return {"free": free, "cached": cached, "live": live, "total": total, "kv_tokens": live * size - empty}


class KVCache:
    """The tensors behind the pool: keys and values of every layer, in blocks.

    data  [layers, 2, num_blocks, kv_heads, block_size, head_dim], index 0 of the second axis is K, 1 is V.
    A block keeps its kv_heads outermost so that one head's keys of a block are one contiguous run for attention.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
    ):
        import torch

        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (num_layers, 2, num_blocks, kv_heads, block_size, head_dim)
        if torch.device(device).type == "cpu":
            # Zeroed pages of an anonymous map exist only once touched: a large pool costs no time and no memory until
            # it is used. Zeros (not garbage) because a masked weight of 0 times a stray NaN would still be NaN.
            nbytes = block_bytes(num_layers, 1, kv_heads, head_dim, dtype.itemsize) * num_blocks * block_size
            private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
            self.data = torch.frombuffer(mmap.mmap(-1, nbytes, **private), dtype=torch.uint8).view(dtype).view(shape)
        else:
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        # K and V of each layer, [num_blocks, kv_heads, block_size, head_dim] each, as storages of their own. To
        # torch.compile two views of one storage, written by one graph, are one input, which it copies as a whole before
        # the write and back after it: the pool of a layer, each step.
        self.layers = [(torch.from_dlpack(keys), torch.from_dlpack(values)) for keys, values in self.data]

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def apply(self, step) -> None:
        """The block moves of a scheduler.Step: first what leaves, then the copies, then what returns."""
        for seq, blocks in step.swap_out:
            seq.host = self.swap_out(blocks)
        if step.copies:
            self.copy_blocks(step.copies)
        for seq, blocks in step.swap_in:
            self.swap_in(seq.host, blocks)
            seq.host = None

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (src, dst) in all layers, for copy-on-write. All sources are read before any write."""
        src, dst = [s for s, _ in pairs], [d for _, d in pairs]
        self.data[:, :, dst] = self.data[:, :, src]

    def swap_out(self, blocks: Sequence[int]) -> torch.Tensor:
        """A host copy [layers, 2, len(blocks), kv_heads, block_size, head_dim] of these blocks, in this order."""
        return self.data[:, :, list(blocks)].to("cpu")

    def swap_in(self, handle: torch.Tensor, blocks: Sequence[int]) -> None:
        """Write the first len(blocks) blocks of a host copy back, to wherever the sequence now lives."""
        self.data[:, :, list(blocks)] = handle[:, :, : len(blocks)].to(self.data.device)


# ---- sizing: from bytes to blocks


def block_bytes(num_layers: int, block_size: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes of one block: 2 (K and V) x layers x tokens x kv_heads x head_dim x bytes per element."""
    return 2 * num_layers * block_size * kv_heads * head_dim * itemsize


def blocks_for_budget(
    budget: int | None, num_layers: int, block_size: int, kv_heads: int, head_dim: int, itemsize: int, free: int = 0
) -> int:
    """num_blocks (block 0 included) for a budget in bytes; None means DEFAULT_MEMORY_SHARE of `free` bytes.

    Raises ValueError if the budget does not hold the padding block and one more.
    """
    per_block = block_bytes(num_layers, block_size, kv_heads, head_dim, itemsize)
    if budget is None:
        budget = int(free * DEFAULT_MEMORY_SHARE)
    if budget < 2 * per_block:
        raise ValueError(
            f"KV memory of {budget:,} bytes holds {max(budget, 0) // per_block} blocks of {per_block:,} bytes, but 2 "
            "are the least; raise --kv-memory or lower block_size"
        )
    return budget // per_block


def parse_memory(text: str) -> int:
    """Bytes from "512M", "2G", "1.5GiB" or a plain number; K, M, G, T are powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match or float(match.group(1)) <= 0:
        raise ValueError(f"memory size {text!r}: write a positive number with K, M, G or T, such as 512M or 2G")
    return int(float(match.group(1)) * 1024 ** " KMGT".index(match.group(2).upper() or " "))


def describe_capacity(pool: BlockPool, max_model_len: int, bytes_per_block: int) -> str:
    """The line printed at start-up: what the pool holds, in tokens and in requests of full length."""
    tokens = pool.total * pool.block_size
    return (
        f"KV pool: {pool.total:,} blocks of {pool.block_size} tokens = {tokens:,} tokens "
        f"({pool.num_blocks * bytes_per_block / 2**20:,.0f} MiB) = {tokens / max_model_len:,.1f} requests of the full "
        f"{max_model_len:,} tokens"
    )
