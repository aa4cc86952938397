"""The engine seen live: snapshots of blocks, batch and tree for the page at `/`, made only while somebody looks.

The problem. Paging, sharing, chunks and preemption are easy to say and hard to believe. A student should see a block
change its owner. But the engine's loop is no place for pictures: a snapshot costs more than a small step.

The idea. Watching is a subscription. The first watcher puts a recorder around the scheduler's `schedule`, so each step
leaves one short row; ten times a second the engine thread adds a snapshot of pool and tree, and the event
loop hands it to every watcher. With the last watcher all of it is taken away again, and nothing is left to pay for.

    engine thread    step  step  step  step | look |  step  step ...
                      │row  │row  │row        │
                      └─────┴─────┴───────────┴──► {"steps": [rows], "refs", "sequences", "tree", "stats"}
                                                          └─► latest ──► each watcher, at its own pace

A watcher that reads slowly misses snapshots, never delays one: it is always given the latest, with the rows of the
steps since its last one, of which only the newest STEPS_KEPT are kept.

Source: none; the picture of blocks with owners is that of Kwon et al. 2023, figure 6. Left out: history (the page keeps
its own), and the contents of the blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from itertools import groupby

from sequence import Sequence, Step
from serving.engine_thread import EngineThread, Served
from serving.guard import sse

SECONDS = 0.1  # between snapshots
STEPS_KEPT = 400
NODES_SHOWN = 120  # of the prefix tree
QUEUE_SHOWN = 24


def step_row(step: Step, number: int) -> dict:
    """One step as the batch chart shows it. To be made before its tokens are counted as computed."""
    entries = []
    for seq, n in step.entries:
        kind = "prefill" if seq.num_computed < seq.num_prompt else "decode" if n == 1 else "several"
        entries.append([seq.id, kind, n])
    return {
        "number": number,
        "entries": entries,
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

    for root in cache.snapshot(12) if cache is not None else []:
        visit(root, 0, "root" if root["namespace"] is None else f"root {root['namespace']}")
    return rows


class Watch:
    """One model under observation. `look` runs in the engine thread, the rest in the event loop."""

    def __init__(self, served: Served):
        self.served = served
        self.rows: deque[dict] = deque(maxlen=STEPS_KEPT)
        self.count = 0
        self.watchers: set[asyncio.Event] = set()
        self.latest: dict = {}
        self._looked = 0.0

    def attach(self) -> None:
        """Put the recorder around `schedule`. In the engine thread."""
        plan = self.served.llm.scheduler.schedule

        def schedule() -> Step:
            step = plan()
            self.count += 1
            self.rows.append(step_row(step, self.count))
            return step

        self.served.llm.scheduler.schedule = schedule

    def detach(self) -> None:
        del self.served.llm.scheduler.schedule

    def look(self) -> dict | None:
        """A snapshot, if it is time for one."""
        now = time.perf_counter()
        if now - self._looked < SECONDS:
            return None
        self._looked = now
        scheduler, metrics = self.served.llm.scheduler, self.served.metrics
        waiting = scheduler.waiting.window(QUEUE_SHOWN)
        return {
            "model": self.served.name,
            "time": time.time(),
            "block_size": scheduler.block_size,
            "budget": scheduler.max_num_batched_tokens,
            "seats": scheduler.max_num_seqs,
            "steps": list(self.rows),
            "refs": "".join(str(min(count, 9)) for count in scheduler.pool.refs),
            "sequences": [sequence_row(seq) for seq in [*scheduler.running, *waiting]],
            "tree": tree_rows(self.served),
            "stats": self.served.llm.stats() | {"generated_tokens": metrics.generated_tokens},
        }


class Live:
    """Who watches which model, and the stream that each watcher gets."""

    def __init__(self, engine: EngineThread):
        self.engine = engine
        self.watches: dict[str, Watch] = {}
        self.closing = False

    async def events(self, served: Served) -> AsyncGenerator[bytes]:
        """Snapshots as server-sent events, until the client leaves or the server stops."""
        news = asyncio.Event()
        watch = await self._join(served, news)
        seen = watch.count
        try:
            while not self.closing:
                await news.wait()
                news.clear()
                if watch.latest:
                    rows = [row for row in watch.latest["steps"] if row["number"] > seen]
                    seen = rows[-1]["number"] if rows else seen
                    yield sse(watch.latest | {"steps": rows})
        finally:
            self._part(watch, news)

    def close(self) -> None:
        """End all streams: the server stops."""
        self.closing = True
        for watch in self.watches.values():
            for news in watch.watchers:
                news.set()

    async def _join(self, served: Served, news: asyncio.Event) -> Watch:
        watch = self.watches.get(served.name)
        if watch is None:
            watch = self.watches[served.name] = Watch(served)
            self.engine.observer = self._observe  # first: the letter wakes the engine thread, which then stays awake
            await self.engine.call(watch.attach)
        watch.watchers.add(news)
        return watch

    def _part(self, watch: Watch, news: asyncio.Event) -> None:
        watch.watchers.discard(news)
        if not watch.watchers and self.watches.pop(watch.served.name, None):
            if not self.watches:
                self.engine.observer = None
            self.engine.send(watch.detach)

    def _observe(self) -> None:
        """In the engine thread, after every turn."""
        for watch in list(self.watches.values()):
            snapshot = watch.look()
            if snapshot is not None:
                self.engine.post(lambda w=watch, s=snapshot: self._publish(w, s))

    @staticmethod
    def _publish(watch: Watch, snapshot: dict) -> None:
        watch.latest = snapshot
        for news in watch.watchers:
            news.set()
