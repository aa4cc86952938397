"""The load generator against a tiny server, and its arithmetic."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import folder, make_llm, serving

import bench_serve
from bench_serve import Answer, percentile, summary, wait_for_address


@pytest.fixture(scope="module")
def server():
    with serving({"tiny": make_llm(num_blocks=2000)}) as running:
        yield running


def figures(capsys, *flags: str) -> dict:
    code = bench_serve.main([*flags, "--json", "--requests", "6", "--prompt", "8", "--gen", "5"])
    result = json.loads(capsys.readouterr().out)
    assert code == int(result["failed"] > 0)
    return result


@pytest.mark.parametrize("arrival", [["--concurrency", "3"], ["--rate", "200"]])
@pytest.mark.parametrize("workload, answers", [("plain", 6), ("shared", 6), ("turns", 12)])
def test_every_workload_in_both_ways(server, capsys, arrival, workload, answers):
    hits = server.in_engine(server.llm().stats)["hit_tokens"]
    flags = ["--url", server.url, *arrival, "--workload", workload, "--turns", "2", "--shared", "40"]
    result = figures(capsys, *flags, "--ttft-bound", "1e9", "--tpot-bound", "1e9", "--load-seed", str(len(arrival[0])))
    assert (result["requests"], result["failed"]) == (answers, 0)
    assert result["tokens_s"] * result["seconds"] == pytest.approx(5 * answers)
    assert result["goodput_s"] == result["requests_s"] > 0
    assert 0 < result["ttft_s"]["p50"] <= result["ttft_s"]["p95"] <= result["ttft_s"]["p99"]
    found = server.in_engine(server.llm().stats)["hit_tokens"] - hits
    assert found > 5 * 40 if workload == "shared" else found > 0


def test_failures_are_counted_and_told(server, capsys):
    result = figures(capsys, "--url", server.url, "--prompt", "2000", "--concurrency", "2")
    assert result["failed"] == 0  # the later --prompt counts
    code = bench_serve.main(["--url", server.url, "--prompt", "2000", "--requests", "3"])
    said = capsys.readouterr().out
    assert code == 1 and "3 requests (3 failed)" in said and "400" in said
    assert bench_serve.main(["--url", "http://127.0.0.1:1"]) == 2 and "does not answer" in capsys.readouterr().err
    for flags in (["--rate", "0"], ["--requests", "0"], ["--url", "nothing"]):
        assert bench_serve.main(flags) == 2


def test_a_server_of_its_own_and_a_plot(tmp_path, capsys):
    flags = ["--model", str(folder()), "--threads", "1", "--kernels", "reference", "--plot", str(tmp_path / "x.png")]
    assert figures(capsys, *flags)["failed"] == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_server_that_does_not_start_says_why():
    with pytest.raises(ValueError, match="did not start: loading\nerror: no such model"):
        wait_for_address(SimpleNamespace(stderr=["loading\n", "error: no such model\n"]))


@given(st.lists(st.floats(0, 1e6), min_size=1), st.integers(1, 100))
def test_percentiles(values, q):
    value = percentile(values, q)
    assert value in values
    assert sum(v <= value for v in values) >= q / 100 * len(values) - 1e-9
    assert sum(v < value for v in values) < q / 100 * len(values) + 1e-9
    assert percentile([], q) is None


def test_goodput_counts_answers_within_both_bounds():
    quick, late, slow = Answer(0, [0.1, 0.2], 2), Answer(0, [3.0, 3.1], 2), Answer(0, [0.1, 2.1], 2)
    one_token, failed = Answer(0, [0.5], 1), Answer(0, error="x")
    result = summary([quick, late, slow, one_token, failed], 2.0, ttft_bound=1.0, tpot_bound=1.0)
    assert result["goodput_s"] == 1.0 and result["requests_s"] == 2.0 and result["failed"] == 1
    assert result["inter_token_s"]["p99"] == 2.0 and result["tokens_s"] == 3.5
