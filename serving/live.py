"""The engine seen live: snapshots of blocks, batch and tree for the page at `/`, made only while somebody looks.

The first watcher makes a recorder an observer of the engine, so each step leaves one short row. Ten times a second each
watcher has the engine thread make a snapshot of pool and tree between two steps; a slow one gets fewer and delays
nobody. With the last watcher the recorder is taken away again.

    engine thread    step  step  step  step | look |  step  step ...
                      │row  │row  │row        │
                      └─────┴─────┴───────────┴──► {"steps": [rows], "refs", "sequences", "tree", "stats"} ──► a watcher

Source: Kwon et al. 2023, figure 6, for the picture of blocks with owners. Left out: history (the page keeps its own),
and the contents of the blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from functools import partial
from itertools import groupby

from scheduler import Sequence, Step
from serving.engine_thread import EngineThread, Served
from serving.guard import sse

SECONDS = 0.1  # between snapshots
STEPS_KEPT = 400
NODES_SHOWN = 120  # of the prefix tree
QUEUE_SHOWN = 24


def step_row(step: Step, number: int) -> dict:
    """One step as the batch chart shows it. To be made before its tokens are counted as computed."""
    kinds = ["prefill" if s.num_computed < s.num_prompt else "decode" if n == 1 else "several" for s, n in step.entries]
    return {
        "number": number,
        "entries": [[seq.id, kind, n] for kind, (seq, n) in zip(kinds, step.entries, strict=True)],
        "cached": [[seq.id, n] for seq, n in step.cached if n],
        "preempted": [seq.id for seq in step.preempted],
        "copies": len(step.copies),
    }


def ranges(blocks: list[int]) -> list[list[int]]:
    """Block numbers in order of use as [first, how many] runs: [4, 5, 6, 9] -> [[4, 3], [9, 1]]."""
    runs = groupby(enumerate(blocks), key=lambda pair: pair[1] - pair[0])
    return [[(run := [block for _, block in group])[0], len(run)] for _, group in runs]


def sequence_row(seq: Sequence) -> dict:
    return {
        "id": seq.id,
        "group": seq.group,
        "state": seq.state,
        "prompt": seq.num_prompt,
        "tokens": len(seq.tokens),
        "computed": seq.num_computed,
        "cached": seq.num_cached,
        "preemptions": seq.preemptions,
        "blocks": ranges(seq.block_table),
    }


def tree_rows(served: Served) -> list[dict]:
    """The prefix tree as a flat list in depth-first order, cut after NODES_SHOWN nodes."""
    cache, tokenizer = served.llm.scheduler.cache, served.llm.tokenizer
    rows: list[dict] = []

    def visit(node: dict, depth: int, label: str) -> None:
        if len(rows) >= NODES_SHOWN:
            return
        row = {"depth": depth, "label": label, "n_tokens": node["n_tokens"], "locks": node["locks"]}
        rows.append(row | {"used": node["last_used"], "blocks": ranges(node["blocks"])})
        for child in sorted(node["children"], key=lambda child: -child["last_used"]):
            visit(child, depth + 1, tokenizer.decode(child["tokens"], skip_special_tokens=False))

    for root in cache.snapshot(12):
        visit(root, 0, "root" if root["namespace"] is None else f"root {root['namespace']}")
    return rows


class Recorder:
    """The latest steps of one model, while anybody watches it. All of it runs in the engine thread."""

    def __init__(self, served: Served):
        self.served, self.observers = served, served.llm.engine.observers
        self.rows: deque[dict] = deque(maxlen=STEPS_KEPT)
        self.steps = self.watchers = 0

    def join(self) -> int:
        """One more watcher; the number of the last step before it came."""
        self.watchers += 1
        if self.watchers == 1:
            self.observers.append(self.record)
        return self.steps

    def record(self, step: Step) -> None:
        self.steps += 1
        self.rows.append(step_row(step, self.steps))

    def leave(self) -> None:
        self.watchers -= 1
        if not self.watchers and self.record in self.observers:  # the engine lets go of one that failed
            self.observers.remove(self.record)

    def snapshot(self, seen: int, generated: int) -> dict:
        """The engine now, and its steps after number `seen`."""
        scheduler = self.served.llm.scheduler
        return {
            "model": self.served.name,
            "time": time.time(),
            "block_size": scheduler.block_size,
            "budget": scheduler.max_num_batched_tokens,
            "seats": scheduler.max_num_seqs,
            "steps": [row for row in self.rows if row["number"] > seen],
            "refs": "".join(str(min(count, 9)) for count in scheduler.pool.refs),
            "sequences": [sequence_row(s) for s in scheduler.running[::-1] + scheduler.waiting[-QUEUE_SHOWN:][::-1]],
            "tree": tree_rows(self.served),
            "stats": self.served.llm.stats() | {"generated_tokens": generated},
        }


class Live:
    """The streams of all watchers."""

    def __init__(self, engine: EngineThread):
        self.engine = engine
        self.recorders = {name: Recorder(served) for name, served in engine.models.items()}
        self.closing = False  # set it, and all streams end: the server stops

    async def events(self, served: Served) -> AsyncGenerator[bytes]:
        """Snapshots as server-sent events, until the client leaves or the server stops."""
        recorder = self.recorders[served.name]
        seen = await self.engine.call(recorder.join)
        try:
            while not self.closing:
                generated = int(self.engine.metrics.value("generated_tokens_total", served.name))
                snapshot = await self.engine.call(partial(recorder.snapshot, seen, generated))
                seen = snapshot["steps"][-1]["number"] if snapshot["steps"] else seen
                yield sse(snapshot)
                await asyncio.sleep(SECONDS)
        finally:
            self.engine.send(recorder.leave)
