"""The load generator against a tiny server, and its arithmetic."""

import asyncio
import json
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_fixture import folder, make_llm, serving

from benchmarks import serve as bench_serve
from benchmarks.serve import Answer, percentile, summary, wait_for_address


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
    flags = ["--url", server.url, *arrival, "--workload", workload]
    flags += {"plain": [], "shared": ["--shared", "40"], "turns": ["--turns", "2"]}[workload]
    result = figures(capsys, *flags, "--ttft-bound", "1e9", "--tpot-bound", "1e9", "--load-seed", str(len(arrival[0])))
    assert (result["requests"], result["failed"]) == (answers, 0)
    assert result["tokens_s"] * result["seconds"] == pytest.approx(5 * answers)
    assert result["goodput_s"] == result["requests_s"] > 0
    assert 0 < result["ttft_s"]["p50"] <= result["ttft_s"]["p95"] <= result["ttft_s"]["p99"]
    assert min(result["server_bytes"]) > 1e6 and "memory of the server" in bench_serve.table(result)
    found = server.in_engine(server.llm().stats)["hit_tokens"] - hits
    assert found > 5 * 40 if workload == "shared" else found > 0


def test_failures_are_counted_and_told(server, capsys):
    result = figures(capsys, "--url", server.url, "--prompt", "2000", "--concurrency", "2")
    assert result["failed"] == 0  # the later --prompt counts
    code = bench_serve.main(["--url", server.url, "--prompt", "2000", "--requests", "3"])
    said = capsys.readouterr().out
    assert code == 1 and "3 requests (3 failed)" in said and "400" in said
    assert bench_serve.main(["--url", "http://127.0.0.1:1"]) == 2 and "does not answer" in capsys.readouterr().err
    bad = (["--ttft-bound", "nan"], ["--tpot-bound", "-1"], ["--plot", "/no/such/folder/a.svg"], ["--url", "https://h"])
    for flags in (["--rate", "0"], ["--requests", "0"], ["--url", "nothing"], *bad):
        assert bench_serve.main(flags) == 2


def test_latency_against_load(server, capsys):
    hits = server.in_engine(server.llm().stats)["hit_tokens"]
    flags = ["--url", server.url, "--rates", "100", "200", "--load-seed", "7", "--requests", "4", "--gen", "5"]
    assert bench_serve.main([*flags, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rates"]
    assert [(row["rate"], row["requests"], row["failed"]) for row in rows] == [(100, 4, 0), (200, 4, 0)]
    assert all(0 < row[name]["p50"] <= row[name]["p95"] for row in rows for name in ("ttft_s", "tpot_s"))
    template = server.in_engine(server.llm().stats)["hit_tokens"] - hits
    assert template < 8 * 64  # the template's beginning at most: no prompt was sent twice
    assert bench_serve.main(flags) == 0 and "TTFT p50, p95" in capsys.readouterr().out


def test_a_rate_at_which_every_request_fails_has_no_times(server, capsys):
    flags = ["--url", server.url, "--rates", "100", "--prompt", "2000", "--requests", "2"]
    assert bench_serve.main(flags) == 1
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["rate", "failed", "tok/s", "goodput"]
    assert row.split() == ["100", "2", "0.0", "0.00", "-", "-", "-", "-"]


def test_a_peer_takes_turns_with_the_server(server, tmp_path, capsys):
    log, peer = tmp_path / "log", tmp_path / "peer.py"
    peer.write_text(
        f"import json, sys\nopen({str(log)!r}, 'a').write(' '.join(sys.argv[1:]) + chr(10))\n"
        "print(json.dumps({'prefill_tok_s': [1.0], 'decode_tok_s': {'3': [5.0, 7.0]}}))\n"
    )
    flags = ["--url", server.url, "--concurrency", "3", "--peer", f"{sys.executable} {peer}", "--threads", "1"]
    flags += ["--requests", "6", "--gen", "5", "--rounds", "2"]
    assert bench_serve.main([*flags, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    found = result["peers"]["peer"]
    assert [figures["requests"] for figures in result["rounds"]] == [6, 6] and found["tok_s"] == [6.0, 6.0]
    assert found["ratios"] == [round(figures["tokens_s"] / 6, 2) for figures in result["rounds"]]
    calls = log.read_text().splitlines()
    assert len(calls) == 2 and "--gen 5 --repeat 1 --batch 3 --threads 1" in calls[0]
    assert bench_serve.main(flags) == 0 and "peer [6.0, 6.0] tok/s: the server has" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--rates", "1", "-2"], "a rate of -2.0"),
        (["--rates", "1", "--rate", "2"], "choose one"),
        (["--rates", "1", "--peer", "transformers"], "choose one"),
        (["--rates", "1", "--plot", "x.png"], "--plot draws one load"),
        (["--rounds", "2"], "--rounds would change nothing here: it counts turns with a --peer; name one"),
        (["--turns", "4"], "--turns would change nothing here: add --workload turns"),
        (["--workload", "turns", "--shared", "9"], "--shared would change nothing here: add --workload shared"),
        (["--rate", "4", "--concurrency", "8"], "--concurrency would change nothing"),
        (["--rates", "4", "--concurrency", "8"], "--concurrency would change nothing"),
        (["--url", "http://127.0.0.1:1", "--quant", "int4"], "--quant int4: the server at --url"),
        (["--url", "http://127.0.0.1:1", "--threads", "2"], "threads: the server at --url"),
    ],
)
def test_loads_that_contradict_each_other(flags, said, capsys):
    assert bench_serve.main(flags) == 2
    assert said in capsys.readouterr().err


def test_a_server_of_its_own_and_a_plot(tmp_path, capsys):
    flags = ["--model", str(folder()), "--threads", "1", "--kernels", "reference", "--plot", str(tmp_path / "x.png")]
    assert figures(capsys, *flags)["failed"] == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_server_of_its_own_has_the_key_that_clients_send():
    args = SimpleNamespace(url=None, model=[str(folder())], threads=1, api_key="secret")
    with bench_serve.server(args, ["--kernels", "reference"]) as url:
        assert "401" in asyncio.run(bench_serve.ask(url, None, {})).error
        assert "400" in asyncio.run(bench_serve.ask(url, "secret", {})).error


def test_a_server_that_does_not_start_says_why():
    with pytest.raises(ValueError, match="did not start: loading\nerror: no such model"):
        wait_for_address(SimpleNamespace(stderr=["loading\n", "error: no such model\n"]))


def chunked(*events: str) -> bytes:
    parts = [f"data: {event}\n\n".encode() for event in events]
    return b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


TEXT = '{"choices": [{"delta": {"content": "x"}}]}'


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        (b"", "closed without an answer"),
        (b"HTTP/1.1 500 \xff\r\n\r\n", "500"),
        (b"HTTP/1.1 200 OK\r\n\r\n{}", "ValueError"),
        (chunked('{"error": "boom"}'), "TypeError"),
        (chunked('{"choices": [{"text": "x"}]}'), "KeyError"),
        (chunked('{"choices": null}'), "TypeError"),
        (chunked(TEXT), "without a count of its tokens"),
        (chunked(TEXT, '{"choices": [], "usage": {"completion_tokens": "x"}}'), "ValueError"),
        (chunked(TEXT)[:-5], "ValueError"),
    ],
)
def test_what_another_server_says_is_no_traceback(reply, cause):
    async def exchange() -> Answer:
        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(reply)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as other:
            return await bench_serve.ask(f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}", None, {})

    assert cause in asyncio.run(exchange()).error


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
