"""Scheduling: which sequences compute how many tokens this step.

Problem. Requests arrive and end at any time, but the model runs best over many tokens at once and memory holds only so
many. A batch that is fixed at the start leaves batch slots empty while its longest member finishes.

Idea. Decide anew before every step. A `Sequence` is its tokens and `num_computed`, how many of them have K and V in the
pool; a `Step` is a list of (sequence, n): compute n more. Whatever happened to a sequence, it only has to catch up:

    decode                            n = 1                                   _decode
    verify k drafted tokens           n = k + 1                               _decode
    prefill, resume                   n = all that is missing                 _continue, or _start if it waited
    chunked prefill                   n = what the budget leaves              _continue, _start
    prefix-cache hit                  num_computed starts at the match        _start
    preemption (recompute, swap)      num_computed = 0, or kept on the host   _preempt

    budget 16   | A 1 | B 1 | C 1 |  D, chunk 9 of 40  |  E, new, 4  |
                  decodes first      prompts under way    then waiting

Sources: "Orca" (OSDI 2022), section 3; "PagedAttention" (SOSP 2023), section 4.5 (preemption); "Sarathi-Serve" (OSDI
2024), section 4 (chunks); "SGLang" (NeurIPS 2024), section 3 (longest prefix first). Left out: preempting a sequence
for a better waiting one, packing around a request that does not fit yet, fairness between users, deadlines.
"""

from __future__ import annotations

import runpy
from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple

from kv_paged import BlockPool, BlockTables, blocks_needed
from radix import NoCache, Node, RadixCache

POLICIES = ("fcfs", "priority", "lpm")  # "priority": the lower number also ranks better whatever its arrival
PREEMPTIONS = ("recompute", "swap")
WATERMARK = 0.01  # share of the pool that an admission leaves free, so that a newcomer is not preempted at once
LPM_WINDOW = 32  # waiting sequences that lpm compares: comparing all of them every step would cost more than it saves
LPM_PATIENCE = 16  # times the oldest may be passed over: place k is served after k * (LPM_PATIENCE + 1) admissions

_numbers = count()


class RequestTooLong(ValueError):
    """A request that could never finish with this pool and context length."""


class Rank(NamedTuple):
    """Greater is better: who has run before goes first, then the earlier arrival. Relatives are neighbours."""

    level: int
    started: bool  # has been admitted at least once, or was forked from one that has
    arrival: float
    group: int
    number: int


by_rank = attrgetter("rank")


@dataclass(eq=False)
class Sequence:
    """One stream of tokens: the prompt, then whatever was decided, then `num_draft` tokens that are not decided yet.

    max_tokens: of the answer; None: as many as fit. priority: lower goes first (policy "priority"). width: how many
    sequences of this length must run side by side, as beams do. namespace: what may share cached prefixes, e.g.
    ("lora", "x"). read_cache=False computes every prompt token, for callers that need all their logits.
    """

    tokens: list[int]
    max_tokens: int | None
    id: Hashable = None  # None: a number of its own
    priority: int = 0
    arrival: float = 0.0
    namespace: Hashable = None
    read_cache: bool = True
    width: int = 1
    answer: Any = None  # the engine's own

    def __post_init__(self):
        self.number = next(_numbers)
        self.id = self.number if self.id is None else self.id
        self.group = self.id  # id of the sequence that this one and its relatives were forked from
        self.num_prompt = len(self.tokens)
        self.num_computed = 0  # tokens whose K and V are in the pool (or on the host)
        self.num_draft = 0  # undecided tokens at the end: guesses, or forced tokens that nobody has accepted yet
        self.num_cached = 0  # prompt tokens that the prefix cache had at the first admission
        self.block_table: list[int] = []
        self.handle: Node | None = None  # the node of the prefix cache it stands on, locked while set
        self.host: Any = None  # swapped: the copy of its blocks
        self.state = "new"  # new, waiting, running, swapped, finished
        self.rank: Rank | None = None  # set when it is queued
        self.step = 0  # the last step it was given tokens in
        # preemptions; tokens computed before the last one by recompute; times lpm passed over it while the oldest
        self.preemptions = self.lost = self.passed_over = 0

    @property
    def num_new(self) -> int:
        """Tokens still to compute."""
        return len(self.tokens) - self.num_computed

    @property
    def output(self) -> list[int]:
        """The output tokens that are decided."""
        return self.tokens[self.num_prompt : len(self.tokens) - self.num_draft]


@dataclass
class Step:
    """What the engine does next, in this order: swap_out, copies, swap_in (KVCache.apply), run, computed(step); then
    for each sequence append, truncate, fork or finish. If it raises: fail(step). A step cannot be run twice."""

    number: int
    entries: list[tuple[Sequence, int]] = field(default_factory=list)  # (sequence, tokens to compute)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source block, target block)
    swap_out: list[tuple[Sequence, list[int]]] = field(default_factory=list)  # seq.host = copy of these blocks
    swap_in: list[tuple[Sequence, list[int]]] = field(default_factory=list)  # these blocks = copy of seq.host
    preempted: list[Sequence] = field(default_factory=list)
    cached: list[tuple[Sequence, int]] = field(default_factory=list)  # admitted now, tokens of its cached prefix
    stalled: bool = False  # a running sequence got no block
    balance: tuple[int, ...] = (0, 0, 0, 0, 0)  # blocks free, cached, total; sequences running, waiting
    budget: int = 0  # tokens that may still be added

    @property
    def num_tokens(self) -> int:
        return sum(n for _, n in self.entries)

    def add(self, seq: Sequence, n: int) -> None:
        self.entries.append((seq, n))
        self.budget -= n
        seq.step = self.number

    def describe(self) -> str:
        """One line for --trace. To be read before computed()."""
        out = [f"step {self.number}: {self.num_tokens} tokens"]
        decodes = [str(s.id) for s, n in self.entries if n == 1 and s.num_computed >= s.num_prompt]
        if decodes:
            out.append("decode " + " ".join(decodes))
        for s, n in self.entries:
            if n > 1 or s.num_computed < s.num_prompt:
                kind = "prefill" if s.num_computed < s.num_prompt else "catch up"
                out.append(f"{kind} {s.id} [{s.num_computed}:{s.num_computed + n}] of {len(s.tokens)}")
        out += [f"cached {s.id} {n}" for s, n in self.cached if n]
        out += [f"copy {src}->{dst}" for src, dst in self.copies]
        out += [f"swap in {s.id}" for s, _ in self.swap_in]
        out += [f"preempt {s.id} ({'swap' if s.state == 'swapped' else 'recompute'})" for s in self.preempted]
        out.append("free {} cached {} of {}, running {} waiting {}".format(*self.balance))
        return " | ".join(out)


def longest_prefix(waiting: list[Sequence], cache: RadixCache) -> Sequence:
    """Policy lpm: the one with the most cached tokens; the oldest after LPM_PATIENCE others went before it."""
    oldest = waiting[-1]
    if oldest.rank.started or oldest.passed_over >= LPM_PATIENCE:
        return oldest
    first = waiting[: -LPM_WINDOW - 1 : -1]
    return max(first, key=lambda s: cache.cached_length(s.tokens, s.namespace, len(s.tokens) - 1))


class Scheduler:
    """Owns the sequences, their block tables and the plan of each step. Plain integers; never touches a tensor.

                   admitted                     finish, abort
    add ─► waiting ─────────► running ───────────────────────► finished
              ▲                 │ out of blocks: the lowest-ranked sequence is preempted
              └─────────────────┘ recompute: blocks released, num_computed = 0, tokens kept
                                  swap: blocks copied to the host, num_computed kept, state "swapped"
    """

    def __init__(
        self,
        pool: BlockPool,
        cache: RadixCache | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        max_model_len: int = 2048,
        policy: str = "fcfs",
        preemption: str = "recompute",
        chunked: bool = True,
    ):
        if not chunked and max_num_batched_tokens < max_model_len:
            raise ValueError(
                f"chunked=False computes a prompt in one step, so max_num_batched_tokens={max_num_batched_tokens} must "
                f"reach max_model_len={max_model_len}; raise the one, lower the other, or turn chunking on"
            )
        self.pool, self.cache, self.block_size = pool, cache or NoCache(pool), pool.block_size
        self.tables = BlockTables(pool, self.cache)
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_model_len, self.policy = max_model_len, policy
        self.preemption, self.chunked = preemption, chunked
        self.reserve_blocks = int(WATERMARK * pool.total)
        self.sequences: dict[Hashable, Sequence] = {}  # every sequence not finished
        self.running: list[Sequence] = []  # in order of rank, the best last
        self.waiting: list[Sequence] = []  # too: taking the best costs the same with 100,000 behind it as with ten
        self._filled: list[Sequence] = []  # have full blocks the cache has not been offered
        self.steps = self.preemptions = self.swaps = self.copies = 0
        self.prompt_tokens = self.hit_tokens = self.recomputed_tokens = 0

    # ---- the life of a sequence

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. Raises RequestTooLong if it could never finish, even alone in the empty pool."""
        assert seq.state == "new" and seq.id not in self.sequences and seq.tokens
        room, capacity = self.max_model_len - seq.num_prompt, self.pool.total * self.block_size
        if room < 1:
            raise RequestTooLong(
                f"prompt of {seq.num_prompt} tokens leaves no room for an answer in a context of max_model_len="
                f"{self.max_model_len}; at most {self.max_model_len - 1} fit"
            )
        most = max(1, capacity + 1 - seq.num_prompt) if seq.max_tokens is None else seq.max_tokens
        seq.max_tokens = min(most, room)
        slots = seq.num_prompt + max(1, seq.max_tokens) - 1  # the last token is never computed
        if seq.width > self.max_num_seqs:
            limit = f"max_num_seqs={self.max_num_seqs}: lower the one or raise the other"
            raise RequestTooLong(f"beam_width={seq.width} sequences run side by side, more than {limit}")
        if seq.width * blocks_needed(slots, self.block_size) > self.pool.total:
            beams = f" for each of {seq.width} beams" if seq.width > 1 else ""
            raise RequestTooLong(
                f"prompt of {seq.num_prompt} tokens with max_tokens={seq.max_tokens} needs KV memory for {slots} tokens"
                f"{beams}, but the whole pool holds {capacity}; lower max_tokens{beams and ', beam_width'} or "
                "max_model_len, or raise --kv-memory"
            )
        self.sequences[seq.id] = seq
        level = -seq.priority if self.policy == "priority" else 0
        seq.rank, seq.state = Rank(level, False, -seq.arrival, -seq.number, -seq.number), "waiting"
        insort(self.waiting, seq, key=by_rank)

    def finish(self, seq: Sequence, keep: bool = True) -> None:
        """End a sequence at any moment; with `keep` the cache gets its full blocks. Ended already: nothing happens."""
        if self.sequences.get(seq.id) is not seq:
            return
        del self.sequences[seq.id]
        if seq.state == "running":
            self.running.remove(seq)
            self.tables.release(seq, keep)
        else:
            self._unqueue(seq)
        seq.state, seq.host = "finished", None

    def fail(self, step: Step) -> list[Sequence]:
        """The step raised: end its sequences and return them. What its blocks hold is unknown and is not cached."""
        failed = [seq for seq, _ in step.entries if seq.state == "running"]
        for seq in failed:
            self.finish(seq, keep=False)
        for seq, _ in step.swap_out:
            if seq.state == "swapped" and seq.host is None:  # its copy was never made: it starts over
                seq.state, seq.lost, seq.num_computed = "waiting", seq.num_computed, 0
        return failed

    def fork(self, seq: Sequence) -> Sequence:
        """A second sequence with the same tokens, sharing every block until one of the two writes.

        It runs at once if the parent runs and a batch slot is free; otherwise it waits at the head of the queue, as if
        preempted, and computes its tokens again (or takes them from the prefix cache).
        """
        child = replace(seq, tokens=list(seq.tokens), id=None)
        child.num_prompt, child.num_draft, child.num_cached = seq.num_prompt, seq.num_draft, seq.num_cached
        child.group, child.rank = seq.group, seq.rank._replace(number=-child.number)
        self.sequences[child.id] = child
        if self._can_share(seq):
            self.tables.fork(seq, child)
            self._run(child)
        else:
            child.state = "waiting"
            insort(self.waiting, child, key=by_rank)
        return child

    def _can_share(self, parent: Sequence) -> bool:
        return parent.state == "running" and len(self.running) < self.max_num_seqs

    def truncate(self, seq: Sequence, n_tokens: int) -> None:
        """Keep the first n_tokens tokens: rejects a draft. Blocks that hold nothing any more are released."""
        assert 1 <= n_tokens <= len(seq.tokens)
        seq.num_draft = max(0, seq.num_draft - (len(seq.tokens) - n_tokens))
        del seq.tokens[n_tokens:]
        if seq.num_computed > n_tokens:
            seq.num_computed = n_tokens
            if seq.state == "running":
                self.tables.cut(seq)

    # ---- planning a step

    def schedule(self) -> Step:
        """Plan one step: each sequence in it catches up by n tokens, for which its block table has room on return."""
        self.steps += 1
        step = Step(self.steps, budget=self.max_num_batched_tokens)
        for seq in self._filled:  # offered to the cache now: rejected drafts are gone
            if seq.state == "running":
                self.tables.offer(seq)
        self._filled.clear()
        for seq in self._decode(step):
            self._continue(seq, step)
        if not step.preempted and not step.stalled:  # who lacks blocks now would be preempted for a newcomer's sake
            self._admit(step)
        while self.running and not step.entries and (self.waiting or step.stalled):
            # All that run wait for others to catch up (the beams of a search), and those wait for slots or blocks.
            # Relatives are neighbours in rank, so this ends with the best-ranked group together in the pool.
            for seq in self._lowest_ranked():
                self._preempt(seq, step)
            self._admit(step)
        assert step.entries or not self.waiting, "a sequence was extended beyond what add() allowed"
        free, cached = self.pool.num_free, self.cache.num_evictable
        step.balance = (free, cached, self.pool.total, len(self.running), len(self.waiting))
        return step

    def _decode(self, step: Step) -> list[Sequence]:
        """Every running sequence that lacks but its last token and the draft behind it, best first. Returns those that
        lack more; one that lacks none keeps its blocks and waits, as a beam does for the others."""
        size, refs, behind = self.block_size, self.pool.refs, []
        for seq in self.running[::-1]:  # a copy, since some of them may be preempted
            table, start = seq.block_table, seq.num_computed
            n = len(seq.tokens) - start
            if n - seq.num_draft > 1:
                behind.append(seq)
            elif n and n <= step.budget and start + n <= len(table) * size and refs[table[start // size]] == 1:
                step.add(seq, n)  # nearly always so: it alone owns the block it writes (a preempted one has no table)
            elif n:
                self._continue(seq, step)
        return behind

    def _continue(self, seq: Sequence, step: Step) -> None:
        """As many of a running sequence's missing tokens as budget and blocks allow; preempts if not one fits.

        It never preempts a better-ranked sequence or one in the step: it waits its turn and keeps its blocks. The
        best-ranked sequence therefore always gets on, so in the end all do.
        """
        if not step.budget or seq.state != "running":
            return
        while (room := self.tables.room(seq)) < 1:
            victim = next((s for s in self.running if s.step != step.number), seq)
            if victim is seq:
                step.stalled = True
                return
            self._preempt(victim, step)
        n = min(seq.num_new, step.budget, room)
        copies = self.tables.extend(seq, n)
        step.copies += copies
        self.copies += len(copies)
        step.add(seq, n)

    def _preempt(self, seq: Sequence, step: Step) -> None:
        """Take a running sequence's blocks away and put it at the head of the queue. Tokens are kept."""
        self.running.remove(seq)
        used = seq.block_table[: blocks_needed(seq.num_computed, self.block_size)]
        self.tables.release(seq)
        if self.preemption == "swap" and used and seq.num_new:  # without work it would never be swapped in
            seq.state = "swapped"
            self.swaps += 1
            step.swap_out.append((seq, used))
        else:
            seq.state, seq.lost, seq.num_computed = "waiting", seq.num_computed, 0
        seq.preemptions += 1
        self.preemptions += 1
        step.preempted.append(seq)
        insort(self.waiting, seq, key=by_rank)

    def _lowest_ranked(self) -> list[Sequence]:
        return self.running[:1]

    def _unqueue(self, seq: Sequence) -> None:
        last = self.waiting[-1] is seq
        del self.waiting[-1 if last else bisect_left(self.waiting, seq.rank, key=by_rank)]

    def _admit(self, step: Step) -> None:
        """Start waiting sequences while batch slots, tokens and blocks last; one that does not fit holds up all."""
        while self.waiting and step.budget and len(self.running) < self.max_num_seqs:
            best = longest_prefix(self.waiting, self.cache) if self.policy == "lpm" else self.waiting[-1]
            if not self._start(best, step):
                return

    def _start(self, seq: Sequence, step: Step) -> bool:
        """Give a waiting sequence its blocks and its first tokens; False if it must go on waiting."""
        match = self.tables.find(seq)
        computed = seq.num_computed if seq.state == "swapped" else match.n_tokens
        missing = len(seq.tokens) - computed
        n = min(missing, step.budget)
        if not self.chunked and n < missing:
            return False
        reserve = self.reserve_blocks if step.entries else 0  # with nobody else in the step, nobody is disturbed
        if not self.tables.start(seq, match, computed + n, reserve):
            return False
        self.waiting[-1].passed_over += self.waiting[-1] is not seq
        self._unqueue(seq)
        if seq.state == "swapped":
            step.swap_in.append((seq, seq.block_table[: blocks_needed(computed, self.block_size)]))
        elif seq.rank.started:
            self.recomputed_tokens += max(0, seq.lost - computed)
        else:
            seq.rank, seq.num_cached = Rank(seq.rank.level, True, *seq.rank[2:]), computed
            self.prompt_tokens += seq.num_prompt
            self.hit_tokens += computed
        seq.num_computed = computed
        step.cached.append((seq, match.n_tokens))
        self._run(seq)
        step.add(seq, n)
        return True

    def _run(self, seq: Sequence) -> None:
        seq.state = "running"
        insort(self.running, seq, key=by_rank)

    # ---- after a step

    def computed(self, step: Step) -> None:
        """The step ran: its tokens have K and V now. (If a sequence ended meanwhile, nobody reads its count.)"""
        size = self.block_size
        for seq, n in step.entries:
            before = seq.num_computed
            seq.num_computed = after = before + n
            if before // size != after // size:
                self._filled.append(seq)

    def has_unfinished(self) -> bool:
        return bool(self.sequences)

    def drop_cache(self) -> int:
        """Forget every cached block that no sequence uses; returns how many."""
        return self.cache.evict(self.cache.num_evictable)

    def stats(self) -> dict[str, int]:
        """The pool's balance now (BlockTables.balance) and counters since the start."""
        swapped = (seq for seq in self.waiting if seq.state == "swapped")
        counters = ("steps", "preemptions", "swaps", "copies", "prompt_tokens", "hit_tokens", "recomputed_tokens")
        return {
            **self.tables.balance(self.running),
            "running": len(self.running),
            "waiting": len(self.waiting),
            "swapped_blocks": sum(blocks_needed(seq.num_computed, self.block_size) for seq in swapped),
            **{name: getattr(self, name) for name in counters},
            "evicted_blocks": self.cache.evicted,
        }


if __name__ == "__main__":
    runpy.run_module("benchmarks.simulate", run_name="__main__")  # not an import: simulate imports this file
