"""What the server counts for Prometheus, in one registry for each application.

An average hides the one stalled answer in twenty, so waits are kept as histograms: for each bound, how many were at
most that long. They can be added over servers, and any percentile can be read off them.

    vitrine_time_to_first_token_seconds_bucket{le="0.1",model="smollm2"} 17.0     17 requests waited at most 0.1 s
    vitrine_time_to_first_token_seconds_bucket{le="0.25",model="smollm2"} 40.0    23 more at most 0.25 s

The engine thread counts, and leaves the figures of the schedulers here after each step. Left out: exemplars.
"""

from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from request import Delta, Request

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
SCHEDULER = (  # what it reports: its name there, the name here, the meaning
    ("running", "requests_running", "Sequences that hold a slot in the batch."),
    ("waiting", "requests_waiting", "Sequences that wait for one, preempted ones included."),
    ("free", "kv_blocks_free", "KV blocks that nobody uses."),
    ("cached", "kv_blocks_cached", "KV blocks that only the prefix cache holds."),
    ("live", "kv_blocks_live", "KV blocks that running sequences use."),
    ("total", "kv_blocks", "KV blocks there are."),
    ("steps", "steps_total", "Steps of the engine."),
    ("preemptions", "preemptions_total", "Times a sequence was made to give its blocks back."),
    ("swaps", "swaps_total", "Those of them that were moved to host memory."),
    ("prompt_tokens", "prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
    ("hit_tokens", "prefix_cache_hits_total", "Those of them that were found there."),
    ("evicted_blocks", "evicted_blocks_total", "Blocks the prefix cache had to give up."),
    ("drafted", "drafted_tokens_total", "Tokens guessed by speculation."),
    ("accepted", "accepted_drafts_total", "Those of them that were right."),
)
disable_created_metrics()  # else the library adds a family to each counter and histogram: when it began


class Metrics:
    """The counts of a server's models, each under its own label."""

    def __init__(self, models: Iterable[str]):
        self.registry, self.stats = CollectorRegistry(), {}  # stats: model -> what its scheduler reported last
        self._last: dict[Request, dict[int, float]] = {}  # answer -> when its latest token came
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        options = {"labelnames": ["model"], "namespace": "vitrine", "registry": self.registry}
        new, first = partial(Histogram, **options), "From the arrival of a request to its first token."
        self.first = new("time_to_first_token_seconds", first, buckets=SECONDS)
        self.gap = new("inter_token_seconds", "Between two tokens of an answer that follow each other.", buckets=SHORT)
        self.seconds = new("request_seconds", "From the arrival of a request to its last token.", buckets=SECONDS)
        self.prompt = new("request_prompt_tokens", "Length of prompts.", buckets=TOKENS)
        self.answers = new("request_generated_tokens", "Length of all answers to a prompt together.", buckets=TOKENS)
        self.prompts = Counter("prompt_tokens_total", "Prompt tokens of requests that have ended.", **options)
        self.generated = Counter("generated_tokens_total", "Tokens generated.", **options)
        options["labelnames"] = ["model", "reason"]
        self.ended = Counter("requests_total", "Requests that have ended, by reason.", **options)
        for model in models:  # so that the page shows what is still 0
            for family in (self.first, self.gap, self.seconds, self.prompt, self.answers, self.prompts, self.generated):
                family.labels(model)
            for reason in ("stop", "length", "abort", "error"):
                self.ended.labels(model, reason)

    def collect(self) -> Iterator[Metric]:
        """The schedulers' figures; the registry calls this."""
        for key, name, meaning in SCHEDULER:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(f"vitrine_{name}", meaning, labels=["model"])
            for model, stats in self.stats.items():
                if key in stats:
                    family.add_metric([model], stats[key])
            if family.samples:
                yield family

    def count(self, model: str, request: Request, deltas: list[Delta], now: float) -> None:
        """What one step added to one request."""
        last, tokens = self._last.setdefault(request, {}), Tally()
        for delta in deltas:
            tokens[delta.index] += len(delta.token_ids)
        for index, n in tokens.items():
            if n and not last:
                self.first.labels(model).observe(now - request.arrival)
            for _ in range(n if index in last else 0):  # tokens that came at once share the wait
                self.gap.labels(model).observe((now - last[index]) / n)
            if n:
                last[index] = now
        self.generated.labels(model).inc(tokens.total())

    def close(self, model: str, request: Request) -> None:
        """A request has ended."""
        self._last.pop(request, None)
        reasons = [answer.finish_reason for answer in request.answers]
        self.ended.labels(model, next((r for r in reasons if r in ("error", "abort")), reasons[0])).inc()
        self.prompts.labels(model).inc(len(request.prompt_ids))
        self.seconds.labels(model).observe(request.finished_at - request.arrival)
        self.prompt.labels(model).observe(len(request.prompt_ids))
        self.answers.labels(model).observe(sum(len(answer.token_ids) for answer in request.answers))

    def value(self, name: str, model: str, **labels: str) -> float:
        """One figure of the page."""
        return self.registry.get_sample_value(f"vitrine_{name}", {"model": model} | labels)
