"""What the scheduler and the engine pass to each other: a sequence, and the plan of one step.

Problem. Prefill, decode, a chunk of a prompt, the continuation of a preempted request, the check of guessed tokens: if
each were a state of its own, every feature would have to know all the others.

Idea. A sequence is its tokens (the prompt, then whatever was decided) and how many of them have K and V in the pool.
Whatever happened to it, what is left to do is always the same: catch up.

    tokens        [ p0 p1 p2 p3 p4 p5 p6 p7 | o0 o1 o2 ]         num_prompt = 8
    in the pool     =============================== .            num_computed = 10
                                                    ^ num_new = 1: this is decoding
    preempted       . . . . . . . . . . . . . . . . .            num_computed = 0, num_new = 11: nothing else changes

Source: Yu et al., "Orca" (OSDI 2022), section 3, treats the iteration as the unit of scheduling; counting computed
tokens instead of naming phases is how vLLM's second engine (V1) words it.

Left out: how a sequence is sampled (the engine hangs its own object on `answer`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from radix import Node

_numbers = count()


class RequestTooLong(ValueError):
    """A request that could never finish with this pool and context length."""


@dataclass(eq=False)
class Sequence:
    """One stream of tokens on its way through the engine: the prompt, then whatever was decided.

    priority: lower goes first (policy "priority"). namespace: what may share cached prefixes, e.g. ("lora", "x").
    read_cache=False computes every prompt token, for callers that need all their logits. answer: the engine's own.
    """

    tokens: list[int]
    max_tokens: int
    id: Hashable = None  # None: a number of its own
    priority: int = 0
    arrival: float = 0.0
    namespace: Hashable = None
    read_cache: bool = True
    answer: Any = None

    num_prompt: int = field(init=False)
    num_computed: int = field(init=False, default=0)  # tokens whose K and V are in the pool (or on the host)
    num_draft: int = field(init=False, default=0)  # undecided tokens at the end: guesses, or forced ones to come
    block_table: list[int] = field(init=False, default_factory=list)
    state: str = field(init=False, default="new")  # new, waiting, running, swapped, finished
    host: Any = field(init=False, default=None)  # swapped: the engine's copy of the blocks
    group: Hashable = field(init=False)  # id of the sequence that this one and its relatives were forked from
    num_cached: int = field(init=False, default=0)  # prompt tokens found in the prefix cache at first admission
    preemptions: int = field(init=False, default=0)
    resumed: bool = field(init=False, default=False)  # has run before, or was forked from one that runs
    started: bool = field(init=False, default=False)  # has been admitted at least once

    def __post_init__(self):
        self.number = next(_numbers)
        self.id = self.number if self.id is None else self.id
        self.group = self.id
        self.num_prompt = len(self.tokens)
        self.handle: Node | None = None  # where in the prefix cache this sequence stands; locked while set
        self.rank: tuple = ()  # (level, arrival, number of the first of its group, number): smaller is better
        self.step = 0  # the last step it was given tokens in
        self.passed_over = 0  # by lpm, while it was the oldest
        self.lost = 0  # tokens computed before the last preemption by recompute
        self.num_host_blocks = 0

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
    """What the engine does next: see the order in the module's docstring."""

    number: int
    entries: list[tuple[Sequence, int]] = field(default_factory=list)  # (sequence, tokens to compute)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source block, target block)
    swap_out: list[tuple[Sequence, list[int]]] = field(default_factory=list)  # seq.host = kv.swap_out(blocks)
    swap_in: list[tuple[Sequence, list[int]]] = field(default_factory=list)  # kv.swap_in(seq.host, blocks)
    preempted: list[Sequence] = field(default_factory=list)
    cached: list[tuple[Sequence, int]] = field(default_factory=list)  # admitted now, tokens found in the cache
    stalled: bool = False  # a running sequence found no block
    balance: tuple[int, ...] = (0, 0, 0, 0, 0)  # blocks free, cached, total; sequences running, waiting

    @property
    def num_tokens(self) -> int:
        return sum(n for _, n in self.entries)

    def describe(self) -> str:
        """One line for --trace. To be read before computed()."""
        out = [f"step {self.number}: {self.num_tokens} tokens"]
        decodes = [str(s.id) for s, n in self.entries if n == 1 and s.num_computed >= s.num_prompt]
        if decodes:
            out.append("decode " + " ".join(decodes))
        for s, n in self.entries:
            if not (n == 1 and s.num_computed >= s.num_prompt):
                kind = "prefill" if s.num_computed < s.num_prompt else "catch up"
                out.append(f"{kind} {s.id} [{s.num_computed}:{s.num_computed + n}] of {len(s.tokens)}")
        out += [f"cached {s.id} {n}" for s, n in self.cached if n]
        out += [f"copy {src}->{dst}" for src, dst in self.copies]
        out += [f"swap in {s.id}" for s, _ in self.swap_in]
        out += [f"preempt {s.id} ({'swap' if s.state == 'swapped' else 'recompute'})" for s in self.preempted]
        out.append("free {} cached {} of {}, running {} waiting {}".format(*self.balance))
        return " | ".join(out)
