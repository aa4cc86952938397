"""Prefix caches: keep the KV blocks of finished work and find them again by the tokens they hold.

Problem. Requests begin alike: the same system prompt, the same conversation one turn later. Their K and V at those
positions are the same numbers, because attention only looks back; computing them again delays the first token.

Idea. When a sequence leaves, its full blocks stay in the pool, owned by a tree whose edges are runs of tokens. A new
prompt walks down from the root as far as its tokens agree and takes over the blocks it passes. A sequence locks the
path from its node up to the root, so only the unlocked leaves may be evicted, least recently used first.

    root ──[You are a helpful bot .]──┬──[Hi !]            unlocked leaf: may be evicted
            blocks 3 9   locks 2      ├──[What is | 2+2 ?]  locks 1: a running sequence stands here
                                      └──[Tell me | a joke] locks 1

Sources: Zheng et al., "SGLang" (NeurIPS 2024), section 3; `HashCache` is the automatic prefix caching of vLLM (its
design document). Left out: sharing inside a block (a match is cut to whole blocks), caches on disk or other hosts.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from kv_paged import BlockPool


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens below `parent`, the blocks that hold its K and V, and how many sequences stand on or below it."""

    parent: Node | None
    tokens: list[int]  # whole blocks: len(tokens) == len(blocks) * block_size
    blocks: list[int]
    depth: int  # blocks from the root to the end of this run
    number: int  # unique: breaks ties in the eviction queue
    key: Hashable = None  # of a root its namespace, else the key among its siblings (HashCache: in the table)
    children: dict[Hashable, Node] = field(default_factory=dict)
    locks: int = 0
    last_used: int = 0
    queued: bool = False  # whether the eviction queue holds an entry for it


class Match(NamedTuple):
    """Cached blocks, the tokens they hold, and the node they end at: valid until the cache changes, unless locked."""

    blocks: list[int]
    n_tokens: int
    handle: Node


class RadixCache:
    """The tree. A hit needs equal tokens after an equal prefix in the same namespace: any hashable value, but adapters
    and salts must be told apart by type, e.g. ("lora", "x") and ("salt", "x").

    The cache is one owner of each block it holds (BlockPool.share), a sequence that uses the block is another. A block
    enters when it is full and is never written again: who must write into it copies it first.
    """

    max_run: int | None = None  # blocks per node, None: as long as the run lasts

    def __init__(self, pool: BlockPool):
        self.pool, self.block_size = pool, pool.block_size
        self.roots: dict[Hashable, Node] = {}  # one per namespace in use
        self.num_blocks = 0  # blocks held
        self.num_evictable = 0  # blocks held that no sequence uses: those of unlocked nodes, counted as they change
        self.evicted = 0  # blocks evicted so far
        self._queue: list[tuple[int, int, Node]] = []  # heap of (last_used, number, leaf); at most one entry per node
        self._clock, self._numbers = count(1), count(1)

    def match(self, tokens: list[int], namespace: Hashable = None, limit: int | None = None) -> Match:
        """The longest cached prefix of tokens[:limit], in whole blocks. Splits a run so that it ends at a node."""
        node = self.roots.get(namespace) or Node(None, [], [], 0, next(self._numbers), namespace)  # stays once locked
        now, blocks = next(self._clock), []
        end = (len(tokens) if limit is None else min(limit, len(tokens))) // self.block_size
        while node.depth < end and (child := self._child(node, tokens)) is not None:
            same = self._common(child, tokens, end)
            node = child if same == len(child.blocks) else self._split(child, same)
            node.last_used = now
            blocks += node.blocks
        return Match(blocks, len(blocks) * self.block_size, node)

    def cached_length(self, tokens: list[int], namespace: Hashable = None, limit: int | None = None) -> int:
        """What match() would find, in tokens, without touching anything: for policies that only compare."""
        node, depth = self.roots.get(namespace), 0
        end = (len(tokens) if limit is None else min(limit, len(tokens))) // self.block_size
        while node is not None and depth < end and (child := self._child(node, tokens)) is not None:
            same = self._common(child, tokens, end)
            depth += same
            node = child if same == len(child.blocks) else None
        return depth * self.block_size

    def _common(self, child: Node, tokens: list[int], end: int) -> int:
        """Blocks of the child's run that agree with tokens[:end * block_size]; the first is known to agree."""
        size, start = self.block_size, child.depth - len(child.blocks)
        n, run = min(len(child.blocks), end - start), child.tokens
        if tokens[start * size : (start + n) * size] == (run if n == len(child.blocks) else run[: n * size]):
            return n
        same = 1
        while tokens[(start + same) * size : (start + same + 1) * size] == run[same * size : (same + 1) * size]:
            same += 1
        return same

    # ---- keeping

    def lock(self, node: Node, above: Node | None = None) -> None:
        """Protect the path from the node up to `above`, or with the root, from eviction: one lock per sequence."""
        while node is not above:
            if node.parent is None:
                self.roots[node.key] = node
            if node.locks == 0:
                self.num_evictable -= len(node.blocks)
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node, above: Node | None = None) -> None:
        """Take the caller's locks from the path away again."""
        while node is not above:
            assert node.locks, "unlocked more often than locked"
            node.locks -= 1
            node.last_used = next(self._clock)
            if node.locks == 0:
                self.num_evictable += len(node.blocks)
                self._offer(node)
            node = node.parent

    def insert(self, tokens: list[int], blocks: list[int], handle: Node) -> Match:
        """Keep `blocks`, which hold the first len(blocks) * block_size of `tokens` (all full, all computed).

        The handle, locked by the caller, is the end of what the cache already has of this sequence; the lock moves down
        to the handle that is returned, with the blocks the cache holds from the old one on: where it had these tokens
        already they are its own and not the caller's, who should use them and release the copies.
        """
        node, now, held = handle, next(self._clock), []
        while node.depth < len(blocks):
            child = self._child(node, tokens)
            if child is None:
                run = blocks[node.depth :][: self.max_run]
                node = self._append(node, tokens, run)
            else:
                same = self._common(child, tokens, len(blocks))
                node = child if same == len(child.blocks) else self._split(child, same)
                run = node.blocks
                self.lock(node, node.parent)
            node.last_used = now
            held += run
        return Match(held, len(held) * self.block_size, node)

    def _append(self, node: Node, tokens: list[int], run: list[int]) -> Node:
        """A new run below `node`; a leaf that only the caller stands on simply grows, so decoding makes no chains."""
        self.pool.share(run)
        self.num_blocks += len(run)
        start = node.depth * self.block_size
        new = tokens[start : start + len(run) * self.block_size]
        if self.max_run is None and node.parent is not None and not node.children and node.locks == 1:
            node.tokens += new
            node.blocks += run
            node.depth += len(run)
            return node
        child = Node(node, new, list(run), node.depth + len(run), next(self._numbers), locks=1)
        self._attach(child)
        return child

    def retreat(self, handle: Node, depth: int) -> Node:
        """Move a lock up its path to where `depth` blocks lie above; returns that node, the caller's new handle."""
        node = handle
        while node.depth - len(node.blocks) >= depth and node.parent is not None:
            self.unlock(node, node.parent)
            node = node.parent
        if node.depth > depth:
            lower = node
            node = self._split(lower, depth - (lower.depth - len(lower.blocks)))
            self.unlock(lower, node)
        return node

    def withdraw(self, handle: Node) -> Node | None:
        """Give up the last block of a run that only the caller stands on, so that the caller may write it again.

        Returns the caller's new handle; None (and nothing changes) if others stand there or have gone on from there.
        """
        if handle.children or handle.locks != 1 or not handle.blocks:
            return None
        return self._shorten(handle, 1)

    def evict(self, n_blocks: int) -> int:
        """Free up to n_blocks unlocked blocks, least recently used leaves first; returns how many were freed."""
        freed = 0
        while freed < n_blocks and self._queue:
            stamp, _, node = heapq.heappop(self._queue)
            node.queued = False
            if stamp == node.last_used:
                n = min(len(node.blocks), n_blocks - freed)
                freed += n
                self.num_evictable -= n
                node = self._shorten(node, n)
            self._offer(node)  # used since it was queued: it may be locked or have children by now
        self.evicted += freed
        return freed

    def _shorten(self, leaf: Node, n: int) -> Node:
        """Give up the last n blocks, so that no block below one that was freed stays. Returns what is the leaf now."""
        self.pool.release(leaf.blocks[-n:])
        self.num_blocks -= n
        leaf.depth -= n
        del leaf.blocks[-n:], leaf.tokens[-n * self.block_size :]
        if leaf.blocks:
            return leaf
        self._detach(leaf)
        return leaf.parent

    def _offer(self, node: Node) -> None:
        """Queue a node for eviction if it is an unlocked leaf. An unlocked root without children is dropped."""
        if node.locks or node.children:
            return
        if node.parent is None:
            if self.roots.get(node.key) is node:
                del self.roots[node.key]
        elif not node.queued:
            node.queued = True
            heapq.heappush(self._queue, (node.last_used, node.number, node))

    # ---- the tree itself

    def _split(self, node: Node, n: int) -> Node:
        """Cut a run after n blocks. The lower part stays the same object: sequences that stand on it keep their handle.

        before  parent ── node [a b c d]         after  parent ── upper [a b] ── node [c d]
        """
        size = self.block_size
        depth = node.depth - len(node.blocks) + n
        upper = Node(node.parent, node.tokens[: n * size], node.blocks[:n], depth, next(self._numbers))
        upper.locks, upper.last_used = node.locks, node.last_used
        self._attach(upper)  # takes the node's place under its parent: same first block, same key
        node.tokens, node.blocks, node.parent = node.tokens[n * size :], node.blocks[n:], upper
        self._attach(node)
        return upper

    def _child(self, node: Node, tokens: list[int]) -> Node | None:
        """The child whose first block equals the tokens that follow the node."""
        start = node.depth * self.block_size
        return node.children.get(tuple(tokens[start : start + self.block_size]))

    def _attach(self, node: Node) -> None:
        node.key = tuple(node.tokens[: self.block_size])
        node.parent.children[node.key] = node

    def _detach(self, node: Node) -> None:
        del node.parent.children[node.key]

    def snapshot(self, max_tokens: int = 16) -> list[dict]:
        """The tree as plain lists and dicts, for people to look at: one entry per namespace."""

        def picture(node: Node) -> dict:
            return {
                "tokens": node.tokens[:max_tokens],
                "n_tokens": len(node.tokens),
                "blocks": list(node.blocks),
                "locks": node.locks,
                "last_used": node.last_used,
                "children": [picture(child) for child in node.children.values()],
            }

        return [{"namespace": namespace, **picture(root)} for namespace, root in self.roots.items()]


class HashCache(RadixCache):
    """One block per node, found in one flat table: hash of (parent's key, the block's tokens) -> candidates.

    The hash is trusted for nothing: a candidate counts only if its tokens and its parent node are the right ones, so
    by induction its whole prefix is.
    """

    max_run, hash_function = 1, staticmethod(hash)

    def __init__(self, pool: BlockPool):
        super().__init__(pool)
        self.table: dict[Hashable, list[Node]] = {}

    def _child(self, node: Node, tokens: list[int]) -> Node | None:
        start = node.depth * self.block_size
        block = tokens[start : start + self.block_size]
        for candidate in self.table.get(self.hash_function((node.key, tuple(block))), ()):
            if candidate.parent is node and candidate.tokens == block:
                return candidate
        return None

    def _attach(self, node: Node) -> None:
        node.key = self.hash_function((node.parent.key, tuple(node.tokens)))
        self.table.setdefault(node.key, []).append(node)
        node.parent.children[node.number] = node

    def _detach(self, node: Node) -> None:
        same_key = self.table[node.key]
        same_key.remove(node)
        if not same_key:
            del self.table[node.key]
        del node.parent.children[node.number]


class NoCache(RadixCache):
    """Keeps nothing, so that every prompt is computed: what the others are compared with."""

    def insert(self, tokens: list[int], blocks: list[int], handle: Node) -> Match:
        return Match(blocks, len(blocks) * self.block_size, handle)


PREFIX_CACHES: dict[str, type[RadixCache]] = {"radix": RadixCache, "hash": HashCache, "none": NoCache}
