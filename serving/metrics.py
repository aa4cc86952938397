"""What the server counts, and the text in which Prometheus reads it.

The problem. "Is it slow?" has no answer in an average. A user waits for the first token (TTFT) and then reads at the
pace of the tokens that follow; one stalled answer in twenty does not move a mean, but it is what people complain about.

The idea. Histograms: for each bound, how many waits were at most that long. They cost a few integers however many
requests there were, they can be added over servers, and any percentile can be read off them later.

    vitrine_time_to_first_token_seconds_bucket{model="smollm2",le="0.1"} 17     17 requests waited at most 0.1 s
    vitrine_time_to_first_token_seconds_bucket{model="smollm2",le="0.25"} 40    23 more at most 0.25 s
    ..._sum 6.1   ..._count 41

Counters only grow (a rate is what the reader makes of two looks); gauges are read off the scheduler at the moment of
asking. The engine thread writes and the event loop reads without a lock: each number is replaced whole, so a reader can
at worst see one that is a moment old.

Source: the Prometheus text exposition format 0.0.4 (its documentation, "Exposition formats"). Left out: the library
that writes it, and exemplars.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from request import Delta, Request

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)

# What the scheduler reports: (its name there, the name here, kind, meaning).
SCHEDULER = (
    ("running", "requests_running", "gauge", "Sequences that hold a seat in the batch."),
    ("waiting", "requests_waiting", "gauge", "Sequences that wait for one, preempted ones included."),
    ("free", "kv_blocks_free", "gauge", "KV blocks that nobody uses."),
    ("cached", "kv_blocks_cached", "gauge", "KV blocks that only the prefix cache holds."),
    ("live", "kv_blocks_live", "gauge", "KV blocks that running sequences use."),
    ("total", "kv_blocks", "gauge", "KV blocks there are."),
    ("steps", "steps_total", "counter", "Steps of the engine."),
    ("preemptions", "preemptions_total", "counter", "Times a sequence was made to give its blocks back."),
    ("swaps", "swaps_total", "counter", "Those of them that were moved to host memory."),
    ("prompt_tokens", "prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache."),
    ("hit_tokens", "prefix_cache_hits_total", "counter", "Those of them that were found there."),
    ("evicted_blocks", "evicted_blocks_total", "counter", "Blocks the prefix cache had to give up."),
    ("drafted", "drafted_tokens_total", "counter", "Tokens guessed by speculation."),
    ("accepted", "accepted_drafts_total", "counter", "Those of them that were right."),
)


class Histogram:
    """How many observations were at most each bound, their sum and their number."""

    def __init__(self, bounds: Iterable[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)  # not yet cumulative; the last is +Inf
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str, labels: str) -> list[str]:
        out, total = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            out.append(f'{name}_bucket{{{labels},le="{bound}"}} {total}')
        return [*out, f"{name}_sum{{{labels}}} {self.sum}", f"{name}_count{{{labels}}} {total}"]


class Metrics:
    """The counts of one model, written by the engine thread."""

    def __init__(self):
        self.finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}  # requests, by how they ended
        self.prompt_tokens = self.generated_tokens = 0
        self.histograms = {
            "time_to_first_token_seconds": (Histogram(SECONDS), "From the arrival of a request to its first token."),
            "inter_token_seconds": (Histogram(SHORT), "Between two tokens of an answer that follow each other."),
            "request_seconds": (Histogram(SECONDS), "From the arrival of a request to its last token."),
            "request_prompt_tokens": (Histogram(TOKENS), "Length of prompts."),
            "request_generated_tokens": (Histogram(TOKENS), "Length of all answers to a prompt together."),
        }
        self._last: dict[int, dict[int, float]] = {}  # request id -> answer -> when its latest token came

    def count(self, request: Request, deltas: list[Delta], now: float) -> None:
        """What one step added to one request."""
        last = self._last.get(request.id)
        if last is None:
            last = self._last[request.id] = {}
        tokens: dict[int, int] = {}
        for delta in deltas:
            tokens[delta.index] = tokens.get(delta.index, 0) + len(delta.token_ids)
        for index, n in tokens.items():
            if n and not last:
                self._observe("time_to_first_token_seconds", now - request.arrival)
            if index in last:
                for _ in range(n):  # several that came at once share the wait
                    self._observe("inter_token_seconds", (now - last[index]) / n)
            if n:
                last[index] = now
            self.generated_tokens += n

    def close(self, request: Request) -> None:
        """A request has ended."""
        self._last.pop(request.id, None)
        reasons = [choice.finish_reason for choice in request.answers]
        self.finished[next((r for r in reasons if r in ("error", "abort")), reasons[0])] += 1
        self.prompt_tokens += len(request.prompt_ids)
        self._observe("request_seconds", request.finished_at - request.arrival)
        self._observe("request_prompt_tokens", len(request.prompt_ids))
        self._observe("request_generated_tokens", sum(len(choice.token_ids) for choice in request.answers))

    def _observe(self, name: str, value: float) -> None:
        self.histograms[name][0].observe(value)


def resident_bytes() -> int | None:
    """Bytes of this process that lie in memory; None where there is no /proc to ask."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def exposition(models: Mapping[str, tuple[Metrics, Mapping[str, float]]]) -> str:
    """The page at /metrics: for each model its counts and what its scheduler reports."""
    families: dict[str, tuple[str, str, list[str]]] = {}

    def add(name: str, kind: str, meaning: str, lines: list[str]) -> None:
        families.setdefault(f"vitrine_{name}", (kind, meaning, []))[2].extend(lines)

    for model, (metrics, stats) in models.items():
        labels = 'model="{}"'.format(model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
        for key, name, kind, meaning in SCHEDULER:
            if key in stats:
                add(name, kind, meaning, [f"vitrine_{name}{{{labels}}} {stats[key]}"])
        for name, value, meaning in (
            ("prompt_tokens_total", metrics.prompt_tokens, "Prompt tokens of requests that have ended."),
            ("generated_tokens_total", metrics.generated_tokens, "Tokens generated."),
        ):
            add(name, "counter", meaning, [f"vitrine_{name}{{{labels}}} {value}"])
        reasons = [f'vitrine_requests_total{{{labels},reason="{r}"}} {n}' for r, n in metrics.finished.items()]
        add("requests_total", "counter", "Requests that have ended, by reason.", reasons)
        for name, (histogram, meaning) in metrics.histograms.items():
            add(name, "histogram", meaning, histogram.lines(f"vitrine_{name}", labels))
    held = resident_bytes()
    if held is not None:
        name = "process_resident_memory_bytes"  # the name every Prometheus client uses for it
        families[name] = "gauge", "Memory of the process that lies in RAM.", [f"{name} {held}"]
    out = []
    for name, (kind, meaning, lines) in families.items():
        out += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", *lines]
    return "\n".join(out) + "\n"
