"""Scheduling: which sequences get how many tokens this step.

Problem. Requests arrive at any time, are of any length and end when they like, but the model runs best over many
tokens at once and memory holds only so many of them. A batch fixed at the start leaves seats empty while its longest
member finishes.

Idea. Decide anew before every step. A sequence is its tokens and `num_computed`, how many of them have K and V in the
pool; a step is a list of (sequence, n): compute n more. Prefill, decode, a chunk, a resumed request and the check of
guessed tokens differ only in n, so one token budget can be filled from all of them:

    budget 16   | A 1 | B 1 | C 1 |  D, chunk 9 of 40  |  E, new, 4   |
                 decodes first      prompts under way    then waiting

                     admitted                     finish, abort
      add ─► waiting ─────────► running ───────────────────────► finished
                ▲                 │ out of blocks: the youngest leaves
                └─────────────────┘ recompute: blocks released, num_computed = 0, tokens kept
                                    swap: blocks copied to the host, num_computed kept, state "swapped"

Rules
- Running sequences are ranked (oldest first, or by priority). Who needs a block takes a free one, then an unused one
  of the prefix cache, then makes the lowest-ranked sequence not yet in this step leave. A sequence never makes a
  better-ranked one leave; it waits its turn with its blocks. The best-ranked one therefore always gets on, so all do.
- A caught-up sequence without a new token is idle and keeps its blocks (a beam waits for the others of its search).
  If nobody else can go on, the lowest-ranked leaves until somebody can.
- add() refuses what could not finish alone in the empty pool. A prompt must leave room for one token: num_prompt
  below max_model_len. Its last token is never computed, so length L needs L - 1 slots.
- Admission is in order and waits for room for all known tokens and a small reserve, so that a newcomer is not thrown
  out at once. There is budget for a newcomer only after the prompts under way had theirs, so their blocks need no
  count of their own. After a preemption nobody is admitted in that step.
- Who was preempted goes to the head of the queue. A fork that finds no seat starts as if preempted.
- Blocks are offered to the cache when the next step is planned, or when the sequence leaves: rejected guesses are
  gone by then. A block somebody else can read is never written: Step.copies says which copies to make first.

The engine's part of a step, in this order: swap_out, copies, swap_in, run, computed(step), then per sequence append
tokens, truncate, fork, finish. If it raises: fail(step). A step cannot be run twice.

Cost. A step costs time in proportion to the running sequences and the blocks that fill, not to the queue: waiting
sequences lie in a heap, and a policy that must compare them (lpm) looks at the LPM_WINDOW oldest only.

Sources: Yu et al., "Orca" (OSDI 2022), section 3 (iteration-level scheduling); Kwon et al., "PagedAttention" (SOSP
2023), section 4.5 (preemption); Agrawal et al., "Sarathi-Serve" (OSDI 2024), section 4 (chunks in one token budget);
Zheng et al., "SGLang" (NeurIPS 2024), section 3 (longest prefix first).

Left out: preempting a running sequence for a better waiting one, packing around a request that does not fit yet,
fairness between users, and deadlines.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable

from block_tables import BlockTables
from kv_paged import BlockPool, blocks_needed
from policies import POLICIES, Waiting
from radix import RadixCache
from sequence import RequestTooLong, Sequence, Step

__all__ = ["RequestTooLong", "Scheduler", "Sequence", "Step"]

PREEMPTIONS, BATCHINGS, RESERVES = ("recompute", "swap"), ("continuous", "static"), ("paged", "contiguous")


class Scheduler:
    """Owns the sequences, their block tables and the plan of each step. Plain integers; never touches a tensor.

    reserve="contiguous" gives each sequence adjacent blocks for its greatest length at admission, and shares nothing.
    batching="static" admits nobody until the whole batch has finished. watermark: share of the pool kept free at
    admission. max_swap_blocks: host blocks for preemption="swap" (None: no limit); past it, recompute.
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
        batching: str = "continuous",
        reserve: str = "paged",
        watermark: float = 0.01,
        max_swap_blocks: int | None = None,
    ):
        for name, value, allowed in (
            ("policy", policy, tuple(POLICIES)),
            ("preemption", preemption, PREEMPTIONS),
            ("batching", batching, BATCHINGS),
            ("reserve", reserve, RESERVES),
        ):
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: must be one of {', '.join(allowed)}")
        for name, value, least in (
            ("max_num_seqs", max_num_seqs, 1),
            ("max_num_batched_tokens", max_num_batched_tokens, 1),
            ("max_model_len", max_model_len, 2),
        ):
            if value < least:
                raise ValueError(f"{name}={value}: must be at least {least}")
        if not 0 <= watermark < 1:
            raise ValueError(f"watermark={watermark}: must be a share of the pool, at least 0 and below 1")
        if not chunked and max_num_batched_tokens < max_model_len:
            raise ValueError(
                f"chunked=False computes a prompt in one step, so max_num_batched_tokens={max_num_batched_tokens} must "
                f"reach max_model_len={max_model_len}; raise the one, lower the other, or turn chunking on"
            )
        if reserve == "contiguous" and cache is not None:
            raise ValueError('reserve="contiguous" cannot share blocks; turn the prefix cache off (cache=None)')
        self.tables = BlockTables(pool, cache, reserve == "contiguous")
        self.pool, self.cache, self.block_size = pool, cache, pool.block_size
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_model_len, self.policy = max_model_len, POLICIES[policy]
        self.preemption, self.chunked = preemption, chunked
        self.static = batching == "static"
        self.reserve_blocks, self.max_swap_blocks = int(watermark * pool.total), max_swap_blocks
        self.sequences: dict[Hashable, Sequence] = {}  # every sequence not finished
        self.running: list[Sequence] = []  # in order of rank
        self.waiting = Waiting()
        self._filled: list[Sequence] = []  # have full blocks the cache has not been offered
        self._filling = True  # static batching: the batch still takes sequences
        self.steps = self.preemptions = self.swaps = self.copies = 0
        self.prompt_tokens = self.hit_tokens = self.recomputed_tokens = self.swapped_blocks = 0

    # ---- the life of a sequence

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. Raises RequestTooLong if it could never finish, ValueError if it makes no sense."""
        if seq.id in self.sequences:
            raise ValueError(f"sequence id {seq.id!r} is already in use; finish or abort that one first")
        if seq.state != "new" or not seq.tokens:
            raise ValueError(
                f"sequence {seq.id!r} must be new (is {seq.state}) and have a prompt of at least one token"
            )
        if seq.max_tokens < 1:
            raise ValueError(f"max_tokens={seq.max_tokens}: must be at least 1")
        if seq.num_prompt >= self.max_model_len:
            raise RequestTooLong(
                f"prompt of {seq.num_prompt} tokens leaves no room for an answer in a context of max_model_len="
                f"{self.max_model_len}; at most {self.max_model_len - 1} fit"
            )
        slots, held = self._slots(seq), self.pool.total * self.block_size
        if slots > held:
            raise RequestTooLong(
                f"prompt of {seq.num_prompt} tokens with max_tokens={seq.max_tokens} needs KV memory for {slots} "
                f"tokens, but the whole pool holds {held}; lower max_tokens or max_model_len, or raise --kv-memory"
            )
        self.sequences[seq.id] = seq
        seq.rank = (self.policy.level(seq), seq.arrival, seq.number, seq.number)
        self._wait(seq)

    def finish(self, seq: Sequence) -> None:
        """The sequence is done: the cache keeps its full blocks, the rest is free. Done already: nothing happens."""
        self._end(seq, keep=True)

    def abort(self, seq_or_id: Sequence | Hashable) -> None:
        """End a sequence at any moment, offering nothing more to the cache. Unknown or done: nothing happens."""
        seq = seq_or_id if isinstance(seq_or_id, Sequence) else self.sequences.get(seq_or_id)
        if seq is not None:
            self._end(seq, keep=False)

    def fail(self, step: Step) -> list[Sequence]:
        """The step raised: end its sequences and return them. What its blocks hold is unknown and is not cached.

        Sequences it was to swap out, but whose copy was never made, start over.
        """
        failed = [seq for seq, _ in step.entries if seq.state == "running"]
        for seq in failed:
            self._end(seq, keep=False)
        for seq, _ in step.swap_out:
            if seq.state == "swapped" and seq.host is None:
                self._leave_host(seq)
                seq.state, seq.lost, seq.num_computed = "waiting", seq.num_computed, 0
        return failed

    def _end(self, seq: Sequence, keep: bool) -> None:
        if self.sequences.get(seq.id) is not seq:
            return
        del self.sequences[seq.id]
        if seq.state == "running":
            self.running.remove(seq)
            self.tables.release(seq, keep)
        else:
            self.waiting.remove(seq)
            self._leave_host(seq)
        seq.state, seq.host = "finished", None

    def fork(self, seq: Sequence, id: Hashable = None) -> Sequence:
        """A second sequence with the same tokens, sharing every block until one of the two writes.

        It runs at once if the parent runs and a seat is free; otherwise it waits at the head of the queue and computes
        its tokens again (or finds them in the prefix cache).
        """
        if self.sequences.get(seq.id) is not seq:
            raise ValueError(f"sequence {seq.id!r} is not in the scheduler and cannot be forked")
        if id is not None and id in self.sequences:
            raise ValueError(f"sequence id {id!r} is already in use; finish or abort that one first")
        child = Sequence(
            list(seq.tokens), seq.max_tokens, id, seq.priority, seq.arrival, seq.namespace, seq.read_cache, seq.answer
        )
        child.num_prompt, child.group, child.num_cached = seq.num_prompt, seq.group, seq.num_cached
        child.num_draft = seq.num_draft
        child.started = child.resumed = seq.started
        child.rank = (*seq.rank[:3], child.number)
        self.sequences[child.id] = child
        if seq.state == "running" and not self.tables.contiguous and len(self.running) < self.max_num_seqs:
            self.tables.fork(seq, child)
            self._run(child)
        else:
            self._wait(child)
        return child

    def truncate(self, seq: Sequence, n_tokens: int) -> None:
        """Keep the first n_tokens tokens: take back guesses. Blocks that hold nothing any more are released."""
        if not 1 <= n_tokens <= len(seq.tokens):
            raise ValueError(f"cannot keep {n_tokens} of {len(seq.tokens)} tokens of sequence {seq.id!r}")
        seq.num_draft = max(0, seq.num_draft - (len(seq.tokens) - n_tokens))
        del seq.tokens[n_tokens:]
        if seq.num_computed > n_tokens:
            seq.num_computed = n_tokens
            if seq.state == "running":
                self.tables.cut(seq)

    # ---- planning a step

    def schedule(self) -> Step:
        """Plan one step. Blocks for every token in it are in the block tables when this returns."""
        self.steps += 1
        step = Step(self.steps)
        for seq in self._filled:
            if seq.state == "running":
                self.tables.offer(seq)
        self._filled.clear()
        budget = self._continue_running(step)
        if self.waiting and not step.preempted and not step.stalled:
            self._admit(step, budget)
        while self.running and not step.entries and (self.waiting or step.stalled):
            # All that run wait for others to catch up (the beams of a search), who wait for their seats or blocks.
            # Relatives are neighbours in rank, so this ends with the best-ranked group together in the pool.
            for seq in self.running[:] if self.tables.contiguous else self.running[-1:]:  # slabs: move all together
                self._preempt(seq, step)
            self._admit(step, budget)
        if self.waiting and not step.entries:
            raise RuntimeError("no waiting sequence fits an empty pool: one was extended beyond what add() allowed")
        step.balance = (self.pool.num_free, self.tables.cached, self.pool.total, len(self.running), len(self.waiting))
        return step

    def _continue_running(self, step: Step) -> int:
        """Tokens for running sequences: decodes, then prompts under way, each by rank. Returns the budget left."""
        size, refs = self.block_size, self.pool.refs
        budget, prompts = self.max_num_batched_tokens, []
        for seq in list(self.running):
            table, start = seq.block_table, seq.num_computed
            n = len(seq.tokens) - start
            if n - seq.num_draft > 1:  # a draft rides along with the decode it belongs to
                prompts.append(seq)
            elif n and budget and seq.state == "running":
                if n > budget or start + n > len(table) * size or refs[table[start // size]] > 1:
                    n = self._make_room(seq, min(n, budget), step)
                if n:
                    seq.step = step.number
                    step.entries.append((seq, n))
                    budget -= n
        for seq in prompts:
            if budget and seq.state == "running" and (n := self._make_room(seq, min(seq.num_new, budget), step)):
                seq.step = step.number
                step.entries.append((seq, n))
                budget -= n
        return budget

    def _make_room(self, seq: Sequence, n: int, step: Step) -> int:
        """Blocks for up to n more tokens of a running sequence; preempts if not even one fits. Returns how many."""
        while (room := self.tables.room(seq)) < 1:
            victim = next((s for s in reversed(self.running) if s.step != step.number), seq)
            if victim is seq:  # all others left are better ranked, or in the step
                step.stalled = True
                return 0
            self._preempt(victim, step)
        n = min(n, room)
        copies = self.tables.extend(seq, n)
        step.copies += copies
        self.copies += len(copies)
        return n

    def _preempt(self, seq: Sequence, step: Step) -> None:
        """Take a running sequence's blocks away and put it at the head of the queue. Tokens are kept."""
        self.running.remove(seq)
        used = seq.block_table[: blocks_needed(seq.num_computed, self.block_size)]
        self.tables.release(seq)
        fits = self.max_swap_blocks is None or self.swapped_blocks + len(used) <= self.max_swap_blocks
        if self.preemption == "swap" and used and fits and seq.num_new:  # without work it would never be swapped in
            seq.state, seq.num_host_blocks = "swapped", len(used)
            self.swapped_blocks += len(used)
            self.swaps += 1
            step.swap_out.append((seq, used))
        else:
            seq.lost, seq.num_computed = seq.num_computed, 0
        seq.resumed = True
        seq.preemptions += 1
        self.preemptions += 1
        step.preempted.append(seq)
        self._wait(seq)

    def _admit(self, step: Step, budget: int) -> None:
        """Start waiting sequences while seats, tokens and blocks last, in order: who does not fit holds up the rest."""
        if not self.running:
            self._filling = True
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            seq = self.policy.select(self.waiting, self.cache)
            if self.static and not self._filling and not seq.resumed:
                return
            reserve = self.reserve_blocks if step.entries else 0  # with nobody to protect, anything goes
            n = self._start(seq, budget, reserve, step)
            if n == 0:
                break
            budget -= n
        self._filling = budget == 0 and len(self.waiting) > 0  # a batch is closed by want of anything but tokens

    def _start(self, seq: Sequence, budget: int, reserve: int, step: Step) -> int:
        """Give a waiting sequence its blocks and its first tokens, and return how many; 0 if it must wait on."""
        match = self.tables.find(seq)
        found = match.n_tokens if match else 0
        computed = seq.num_computed if seq.state == "swapped" else found
        n = min(len(seq.tokens) - computed, budget)
        whole = self.chunked or n == len(seq.tokens) - computed
        if not whole or not self.tables.start(seq, match, computed + n, self._slots(seq), reserve):
            if match:
                self.cache.unlock(match.handle)
            return 0
        oldest = self.waiting.first()
        oldest.passed_over += oldest is not seq
        self.waiting.remove(seq)
        if seq.state == "swapped":
            step.swap_in.append((seq, seq.block_table[: blocks_needed(computed, self.block_size)]))
            self._leave_host(seq)
        elif seq.started:
            self.recomputed_tokens += max(0, seq.lost - found)
        else:
            seq.started, seq.num_cached = True, found
            self.prompt_tokens += seq.num_prompt
            self.hit_tokens += found
        seq.num_computed = computed
        step.cached.append((seq, found))
        self._run(seq)
        seq.step = step.number
        step.entries.append((seq, n))
        return n

    # ---- after a step

    def computed(self, step: Step) -> None:
        """The step ran: its tokens have K and V now. Sequences that left in the meantime are passed over."""
        size, caching = self.block_size, self.cache is not None
        for seq, n in step.entries:
            if seq.state == "running":
                before = seq.num_computed
                seq.num_computed = after = before + n
                if caching and before // size != after // size:
                    self._filled.append(seq)

    def has_unfinished(self) -> bool:
        return bool(self.sequences)

    def drop_cache(self) -> int:
        """Forget every cached block that no sequence uses; returns how many."""
        return self.cache.evict(self.tables.cached) if self.cache is not None else 0

    def stats(self) -> dict[str, int]:
        """The pool's balance now (BlockTables.balance) and counters since the start."""
        return self.tables.balance(self.running) | {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "swapped_blocks": self.swapped_blocks,
            "steps": self.steps,
            "preemptions": self.preemptions,
            "swaps": self.swaps,
            "copies": self.copies,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "evicted_blocks": self.cache.evicted if self.cache is not None else 0,
        }

    # ---- inside

    def _slots(self, seq: Sequence) -> int:
        """KV slots a sequence needs at its greatest length; its last token is never computed."""
        return min(seq.num_prompt + seq.max_tokens, self.max_model_len) - 1

    def _wait(self, seq: Sequence) -> None:
        if seq.state != "swapped":
            seq.state = "waiting"
        level, *place = seq.rank
        self.waiting.push((level, not seq.resumed, *place), seq)

    def _run(self, seq: Sequence) -> None:
        seq.state = "running"
        insort(self.running, seq, key=lambda s: s.rank)

    def _leave_host(self, seq: Sequence) -> None:
        self.swapped_blocks -= seq.num_host_blocks
        seq.num_host_blocks = 0


if __name__ == "__main__":
    from benchmarks import simulate

    raise SystemExit(simulate.main())
