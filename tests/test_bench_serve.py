"""The load generator against a tiny server, and its arithmetic."""

import asyncio
import itertools
import json
import re
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_fixture import folder, make_llm, serving

from benchmarks import serve as bench_serve
from benchmarks.figures import spread
from benchmarks.serve import Answer, summary, wait_for_address
from serving.guard import ApiError


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
    found = server.in_engine(server.llm().stats)["hit_tokens"] - hits
    assert found > 5 * 40 if workload == "shared" else found > 0


def test_failures_are_counted_and_told(server, capsys):
    """In every kind of load, with the cause; what was never observed has no figure."""
    flags = ["--url", server.url, "--prompt", "2000", "--requests", "3"]
    assert bench_serve.main(flags) == 1
    said = capsys.readouterr()
    assert re.search(r"^failed +3$", said.out, re.MULTILINE) and re.search(r"^ttft_s +mean -  p50 -", said.out, re.M)
    assert "400" in said.err
    assert bench_serve.main([*flags, "--rates", "100", "200", "--gen", "1"]) == 1
    said = capsys.readouterr()
    head, *rows = (line.split() for line in said.out.splitlines())
    assert head[:4] == ["rate", "failed", "tok/s", "goodput"]
    assert rows == [[rate, "3", "0", "0", "-", "-", "-", "-"] for rate in ("100", "200")] and "400" in said.err
    assert bench_serve.main([*flags, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["failed"] == 3 and "400" in result["errors"][0] and set(result["ttft_s"].values()) == {None}


def test_a_row_says_how_many_requests_were_refused_and_times_the_others(server, capsys, monkeypatch):
    service, turn = server.app.state.service, itertools.count()
    submit = service.submit

    async def every_second(*args, **routing):
        if args[2].max_tokens == 5 and next(turn) % 2:  # (the warm-up asks for 4)
            raise ApiError(429, "full", Retry_After="1")
        return await submit(*args, **routing)

    monkeypatch.setattr(service, "submit", every_second)
    flags = ["--prompt", "8", "--gen", "5", "--requests", "6"]
    assert bench_serve.main(["--url", server.url, "--rates", "100", "200", *flags]) == 1
    said = capsys.readouterr()
    head, *rows = (line.split() for line in said.out.splitlines())
    assert [dict(zip(head, row, strict=True))["failed"] for row in rows] == ["3", "3"] and "429" in said.err
    assert not any("-" in row or "0" in row[2:] for row in rows), "the others were answered"


def test_answers_of_one_token_have_no_time_per_token(server, capsys):
    assert bench_serve.main(["--url", server.url, "--rates", "100", "--gen", "1", "--requests", "2"]) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row[1] == "0" and row[-2:] == ["-", "-"] and "-" not in row[:-2]


def test_latency_against_load(server, capsys):
    hits = server.in_engine(server.llm().stats)["hit_tokens"]
    flags = ["--url", server.url, "--rates", "100", "200", "--load-seed", "7", "--requests", "4", "--gen", "5"]
    assert bench_serve.main([*flags, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rates"]
    assert [(row["rate"], row["requests"], row["failed"]) for row in rows] == [(100, 4, 0), (200, 4, 0)]
    assert all(0 < row[name]["p50"] <= row[name]["p95"] for row in rows for name in ("ttft_s", "tpot_s"))
    template = server.in_engine(server.llm().stats)["hit_tokens"] - hits
    assert template < 8 * 64  # the template's beginning at most: no prompt was sent twice
    assert bench_serve.main(flags) == 0 and "ttft_p95_s" in capsys.readouterr().out


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
    assert bench_serve.main(flags) == 0 and "peer  tok_s 6, 6  ratio" in capsys.readouterr().out


OTHERS = ["--url", "http://127.0.0.1:1"]


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--rates", "1", "-2"], "--rates=-2.0: must be a positive number"),
        (["--rate", "0"], "--rate=0.0: must be a positive number"),
        (["--requests", "0"], "--requests=0: must be a positive number"),
        (["--ttft-bound", "nan"], "--ttft-bound=nan"),
        (["--tpot-bound", "-1"], "--tpot-bound=-1.0"),
        (["--url", "nothing"], "--url='nothing': must look like"),
        (["--url", "https://h"], "--url='https://h': must look like"),
        (["--rounds", "2"], "--rounds would change nothing here: it counts turns with a --peer; name one"),
        (["--turns", "4"], "--turns would change nothing here: add --workload turns"),
        (["--workload", "turns", "--shared", "9"], "--shared would change nothing here: add --workload shared"),
        (["--rate", "4", "--concurrency", "8"], "--concurrency would change nothing"),
        (["--rates", "4", "--concurrency", "8"], "--concurrency would change nothing"),
        ([*OTHERS, "--quant", "int4"], "--quant int4: the server at --url"),
        ([*OTHERS, "--threads", "2"], "--threads would change nothing here: the server at --url"),
        (OTHERS, "does not answer"),
    ],
)
def test_loads_that_mean_nothing_are_refused(flags, said, capsys):
    assert bench_serve.main(flags) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--rate", "2"], ["--peer", "transformers"]])
def test_a_server_is_loaded_in_one_way(flags, capsys):
    with pytest.raises(SystemExit):
        bench_serve.main(["--rates", "1", *flags])
    assert "not allowed with argument" in capsys.readouterr().err


def test_a_server_of_its_own_has_the_key_that_clients_send():
    args = SimpleNamespace(url=None, model=[str(folder())], threads=1, api_key="secret")
    with bench_serve.server(args, ["--kernels", "reference"]) as url:
        assert "401" in asyncio.run(bench_serve.ask(url, None, {})).error
        assert "400" in asyncio.run(bench_serve.ask(url, "secret", {})).error
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True}
        assert asyncio.run(bench_serve.ask(url, "secret", body)).tokens == 3


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
        (b"HTTP/1.1 200 OK\r\n\r\n{}", "invalid literal"),
        (chunked('{"error": "boom"}'), "TypeError"),
        (chunked('{"choices": [{"text": "x"}]}'), "KeyError"),
        (chunked('{"choices": null}'), "TypeError"),
        (chunked(TEXT), "without a count of its tokens"),
        (chunked(TEXT, '{"choices": [], "usage": {"completion_tokens": "x"}}'), "invalid literal"),
        (chunked(TEXT)[:-5], "invalid literal"),
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


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles(values):
    found = spread(values)
    for q in (50, 95, 99):
        value = found[f"p{q}"]
        assert sum(v <= value for v in values) * 100 >= q * len(values)
        assert value in values and sum(v < value for v in values) * 100 < q * len(values)
    assert found["max"] == max(values) and set(spread([]).values()) == {None}


def test_goodput_counts_answers_within_both_bounds():
    quick, late, slow = Answer(0, [0.1, 0.2], 2), Answer(0, [3.0, 3.1], 2), Answer(0, [0.1, 2.1], 2)
    one_token, failed = Answer(0, [0.5], 1), Answer(0, error="x")
    result = summary([quick, late, slow, one_token, failed], 2.0, ttft_bound=1.0, tpot_bound=1.0)
    assert result["goodput_s"] == 1.0 and result["requests_s"] == 2.0 and result["failed"] == 1
    assert result["inter_token_s"]["p99"] == 2.0 and result["tokens_s"] == 3.5
