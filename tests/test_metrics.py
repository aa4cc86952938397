"""What is counted, under which names, and whether Prometheus could read it."""

from types import SimpleNamespace

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from request import Delta
from serving.metrics import Metrics


class Request(SimpleNamespace):
    __hash__ = object.__hash__


def request(*reasons: str) -> Request:
    answers = [SimpleNamespace(finish_reason=r, token_ids=[1, 2]) for r in reasons]
    return Request(arrival=0.0, finished_at=4.0, prompt_ids=[1, 2, 3], answers=answers)


def delta(tokens: int, index: int = 0) -> Delta:
    return Delta(None, index, "", [7] * tokens, [])


def test_first_token_and_gaps_are_counted_per_answer():
    metrics, one = Metrics(["m"]), request("length", "stop")
    metrics.count("m", one, [delta(0)], 0.5)  # no token yet
    metrics.count("m", one, [delta(1), delta(1, index=1)], 1.0)
    metrics.count("m", one, [delta(1), delta(2)], 2.5)  # three at once, in two deltas: they share 1.5 s
    metrics.close("m", one)
    metrics.close("m", request("stop", "abort"))
    figures = {
        "time_to_first_token_seconds_count": 1,
        "time_to_first_token_seconds_sum": 1.0,
        "inter_token_seconds_count": 3,
        "inter_token_seconds_sum": 1.5,
        "generated_tokens_total": 5,
        "prompt_tokens_total": 6,
        "request_seconds_sum": 8.0,
        "request_generated_tokens_sum": 8,
    }
    assert {name: metrics.value(name, "m") for name in figures} == figures and not metrics._last
    assert [metrics.value("inter_token_seconds_bucket", "m", le=le) for le in ("0.2", "0.5")] == [0, 3]
    ended = {reason: metrics.value("requests_total", "m", reason=reason) for reason in ("stop", "length", "abort")}
    assert ended == {"stop": 0, "length": 1, "abort": 1}


def test_the_page_can_be_read_back_whatever_a_model_is_called():
    odd = 'a"b\\\n'
    metrics = Metrics([odd, "c"])
    metrics.stats = {odd: {"free": 3, "total": 8, "unknown": 1}, "c": {"free": 1}}
    page = generate_latest(metrics.registry).decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    names = {"vitrine_kv_blocks_free", "vitrine_kv_blocks", "vitrine_requests", "vitrine_inter_token_seconds"}
    assert names <= set(families) and "vitrine_steps" not in families and page.count("# TYPE") == len(families)
    free = {sample.labels["model"]: sample.value for sample in families["vitrine_kv_blocks_free"].samples}
    assert free == {odd: 3, "c": 1} and families["vitrine_requests"].type == "counter"
    assert families["process_resident_memory_bytes"].samples[0].value > 1e6
