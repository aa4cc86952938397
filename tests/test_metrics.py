"""What is counted, and whether Prometheus could read it."""

import re
from types import SimpleNamespace

from request import Delta
from serving.metrics import Histogram, Metrics, exposition


def request(number: int = 1, arrival: float = 0.0, reasons=("length",)):
    choices = [SimpleNamespace(finish_reason=r, token_ids=[1, 2]) for r in reasons]
    return SimpleNamespace(id=number, arrival=arrival, finished_at=4.0, prompt_ids=[1, 2, 3], answers=choices)


def delta(tokens: int, index: int = 0) -> Delta:
    return Delta(None, index, "", [7] * tokens, [])


def test_a_histogram_counts_up_to_and_including_each_bound():
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 9):
        histogram.observe(value)
    assert histogram.lines("h", 'a="b"') == [
        'h_bucket{a="b",le="1"} 2',
        'h_bucket{a="b",le="2"} 4',
        'h_bucket{a="b",le="+Inf"} 5',
        'h_sum{a="b"} 14.0',
        'h_count{a="b"} 5',
    ]


def test_first_token_and_gaps_per_answer():
    metrics, one = Metrics(), request(reasons=("length", "stop"))
    metrics.count(one, [delta(0)], 0.5)  # no token yet
    metrics.count(one, [delta(1), delta(1, index=1)], 1.0)
    metrics.count(one, [delta(1), delta(2)], 2.5)  # three at once, in two deltas: they share 1.5 s
    first, gaps = (metrics.histograms[n][0] for n in ("time_to_first_token_seconds", "inter_token_seconds"))
    assert (sum(first.counts), first.sum) == (1, 1.0)
    assert (sum(gaps.counts), gaps.sum) == (3, 1.5) and gaps.counts[gaps.bounds.index(0.5)] == 3
    assert metrics.generated_tokens == 5
    metrics.close(one)
    assert metrics.finished["length"] == 1 and not metrics._last
    metrics.close(request(2, reasons=("stop", "abort")))
    assert metrics.finished["abort"] == 1


def test_the_page_is_well_formed_and_escapes_names():
    page = exposition({'a"b\\\n': (Metrics(), {"free": 3, "total": 8, "unknown": 1}), "c": (Metrics(), {"free": 1})})
    line = re.compile(r'[a-z_]+\{model="(?:[^"\\\n]|\\.)*"(,\w+="[^"]*")?\} [0-9.e+-]+')
    seen = set()
    for text in page.splitlines():
        if text.startswith("# TYPE"):
            assert text.split()[2] not in seen, "a family must come in one piece"
            seen.add(text.split()[2])
        elif not text.startswith("#"):
            assert line.fullmatch(text) or re.fullmatch(r"process_resident_memory_bytes [1-9][0-9]{6,}", text), text
    assert page.endswith("\n") and 'vitrine_kv_blocks_free{model="a\\"b\\\\\\n"} 3' in page
