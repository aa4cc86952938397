"""Clients that leave, read slowly or crowd in, engines that fail, and the end: what must not hurt anybody else."""

import asyncio
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import hypothesis
import pytest
import schemathesis
from server_fixture import folder, http_bytes, make_llm, raw_request, reasons, script, serving, text_of

import engine as engine_module
from request import Request
from sampling import SamplingParams
from serving.engine_thread import Job
from serving.service import Limits

LONG = {"prompt": "the", "max_tokens": 5000, "ignore_eos": True, "logit_bias": {"70": 100}}


def long_llm(**options):
    """Room for answers that take a while: 5000 tokens and more."""
    options = {"num_blocks": 2048, "block_size": 16} | options
    return make_llm(folder(max_position_embeddings=8192), **options)


@pytest.fixture(scope="module")
def server():
    with serving({"tiny": long_llm(max_num_seqs=2, max_num_batched_tokens=16)}) as running:
        yield running


def ended(server, reason: str) -> int:
    return server.engine.metrics.value("requests_total", "tiny", reason=reason)


# ---- abort-leak


@pytest.mark.parametrize("when", ["streaming", "waiting for the answer", "queued", "prefilling"])
def test_a_client_that_leaves_frees_everything(server, when):
    server.wait_idle()
    before, generated = ended(server, "abort"), server.engine.metrics.value("generated_tokens_total", "tiny")
    crowd = [raw_request(server.port, http_bytes("/v1/completions", LONG | {"stream": True})) for _ in range(2)]
    crowd = crowd if when == "queued" else [c.close() for c in crowd][:0]
    body = LONG | {"stream": when == "streaming"}
    if when == "prefilling":
        body["prompt"] = [5] * 3000  # 16 tokens a step
    client = raw_request(server.port, http_bytes("/v1/completions", body))
    if when == "streaming":
        assert b"200 OK" in client.recv(100)
    expected = 3 if when == "queued" else 1
    for _ in range(3000):  # until it is known to the engine
        if server.in_engine(lambda: len(server.llm().engine.requests)) >= expected:
            break
    client.close()
    for connection in crowd:
        connection.close()
    server.wait_idle()
    assert ended(server, "abort") >= before + expected
    if when == "prefilling":
        grown = server.engine.metrics.value("generated_tokens_total", "tiny") - generated
        assert grown < 5000
    assert server.complete(max_tokens=2)["usage"]["completion_tokens"] <= 2


def test_abort_after_the_end_twice_and_of_nothing(server):
    server.complete(max_tokens=2)

    async def again() -> None:
        served = server.engine.models["tiny"]
        job = await server.engine.submit(served, [([5, 6], None)], SamplingParams(max_tokens=2, ignore_eos=True))
        await job.ended.wait()
        server.engine.abort(job)
        server.engine.send(lambda: served.llm.engine.abort(job.requests[0]))
        server.engine.send(lambda: served.llm.engine.abort(job.requests[0]))
        server.engine.abort(Job(served, 0, True))

    asyncio.run_coroutine_threadsafe(again(), server.loop).result(30)
    server.wait_idle()
    assert server.complete(max_tokens=2) and server.http.get("/health").status_code == 200


# ---- engine-survival


def test_a_step_that_raises_ends_its_requests_and_no_others(server, monkeypatch):
    real, failures = engine_module.sample, []

    def sample(logits, states, *args):
        if len(states) == 2 and not failures:
            failures.append(True)
            raise RuntimeError("injected")
        return real(logits, states, *args)

    monkeypatch.setattr(engine_module, "sample", sample)
    answers = {}

    def ask(i: int) -> None:
        answers[i] = server.http.post("/v1/completions", json={"prompt": "the", "max_tokens": 300, "ignore_eos": True})

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    codes = sorted(answer.status_code for answer in answers.values())
    assert codes == [200, 500, 500]  # two ran together, the third waited for a seat
    failed = next(answer for answer in answers.values() if answer.status_code == 500)
    assert "injected" in failed.json()["error"]["message"] and "Traceback" not in failed.text
    server.wait_idle()
    assert server.complete(max_tokens=2)


def test_a_scheduler_that_raises_once(server, monkeypatch):
    scheduler = server.llm().scheduler
    real, failures = type(scheduler).schedule, []

    def schedule(self):
        if not failures:
            failures.append(True)
            raise RuntimeError("no plan")
        return real(self)

    monkeypatch.setattr(type(scheduler), "schedule", schedule)
    assert "no plan" in server.complete(expect=500)["error"]["message"]
    assert server.complete(max_tokens=2) and server.http.get("/health").status_code == 200


def test_an_engine_that_cannot_even_give_up_is_taken_out_of_service(monkeypatch):
    with serving() as server:
        engine = server.llm().engine
        monkeypatch.setattr(engine, "step", lambda: 1 / 0)
        monkeypatch.setattr(engine, "abort", lambda request: 1 / 0)
        assert "ZeroDivisionError" in server.complete(expect=503)["error"]["message"]
        assert server.http.get("/health").status_code == 503
        assert "must be restarted" in server.complete(expect=503)["error"]["message"]


# ---- http-limits, http-stream


@pytest.mark.parametrize("declared", [True, False])
def test_a_huge_body_is_refused_while_it_arrives(server, declared):
    size = 50_000_000
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n\r\n" % size if declared else b"Transfer-Encoding: chunked\r\n\r\n"
    client = raw_request(server.port, head)
    part = b"x" * 65536
    sent = 0
    try:
        while sent < size:
            client.sendall(part if declared else b"%x\r\n%s\r\n" % (len(part), part))
            sent += len(part)
            if sent == 10 * len(part):
                assert server.http.get("/health").status_code == 200
    except OSError:  # the server need not read to the end
        pass
    assert client.recv(4096).startswith(b"HTTP/1.1 413")
    client.close()
    assert server.complete(max_tokens=1)


def test_a_body_that_stops_arriving_is_refused_and_delays_nobody():
    with serving(limits=Limits(stall_seconds=0.2)) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        clients = [raw_request(server.port, head + b'Content-Length: 500\r\n\r\n{"prompt"') for _ in range(20)]
        assert server.complete(max_tokens=1)
        for client in clients:
            answer = client.makefile("rb").read()  # until its connection is closed
            assert answer.startswith(b"HTTP/1.1 408") and b"\r\nconnection: close\r\n" in answer
            assert b"nothing more of the body" in answer
            client.close()
        assert server.complete(max_tokens=1)


def trickle(client: socket.socket, piece: bytes) -> bytes:
    """Send a piece whenever nothing came back for a moment, until the server closes; what it said."""
    said = b""
    client.settimeout(0.02)
    for _ in range(500):
        try:
            client.sendall(piece)
            got = client.recv(4096)
        except TimeoutError:
            continue
        except OSError:
            return said
        if not got:
            return said
        said += got
    pytest.fail("the server never closed the connection")


HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"


def test_headers_that_trickle_in_are_refused_and_delay_nobody():
    with serving(limits=Limits(stall_seconds=0.3)) as server:
        for begun, piece in ((b"", b""), (b"", b"G"), (HEAD + b"X-Slow: ", b"x")):
            client = raw_request(server.port, begun)
            assert server.complete(max_tokens=1)
            said = trickle(client, piece)
            assert (
                said.startswith(b"HTTP/1.1 408") and b'"error"' in said and b"no whole headers arrived in 0.3 s" in said
            )
            client.close()
        client = raw_request(server.port, HEAD + b"\r\n")
        said = client.recv(4096)
        client.sendall(HEAD)  # the second request on a connection is held to it as well
        said += trickle(client, b"")
        assert said.startswith(b"HTTP/1.1 200") and said.count(b"HTTP/1.1") == 1
        client.close()


def test_the_connection_of_a_refused_body_ends():
    with serving(limits=Limits(max_body=100, stall_seconds=0.3)) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        for length in (b"Transfer-Encoding: chunked\r\n\r\n", b"Content-Length: 100000\r\n\r\n"):
            client = raw_request(server.port, head + length)
            said = trickle(client, b"65\r\n" + b"x" * 101 + b"\r\n")
            assert said.startswith(b"HTTP/1.1 413") and said.count(b"HTTP/1.1") == 1
            client.close()


@pytest.mark.parametrize(
    "before, status", [(b"", b"400"), (b"5\r\n12345\r\n", b"400"), (b"65\r\n%101d\r\n" % 0, b"413")]
)
def test_a_broken_chunk_ends_in_one_answer_and_no_traceback(caplog, before, status):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serving(limits=Limits(max_body=100)) as server:
        client = raw_request(server.port, head + before)
        said = client.recv(1 << 16) if status == b"413" else b""
        client.sendall(b"no length\r\n")
        while piece := client.recv(1 << 16):
            said += piece
    assert said.startswith(b"HTTP/1.1 " + status) and said.count(b"HTTP/1.1") == 1
    assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_guesses_of_speculation_are_counted():
    llm = make_llm(speculate="ngram", num_speculative_tokens=3)
    with serving({"tiny": llm}) as server:
        server.complete(
            "the cat sat on the cat sat on", max_tokens=40, temperature=0, ignore_eos=True, logit_bias={"70": 100}
        )
        page = server.http.get("/metrics").text
        counts = {
            name: float(re.search(rf"^vitrine_{name}{{.*}} (.*)$", page, re.MULTILINE)[1])
            for name in ("drafted_tokens_total", "accepted_drafts_total")
        }
    assert counts["drafted_tokens_total"] >= counts["accepted_drafts_total"] > 0
    assert counts["accepted_drafts_total"] == llm.stats()["accepted"]


def test_streams_that_end_in_a_step_of_several_tokens_get_all_of_them():
    llm = make_llm(speculate="ngram", num_speculative_tokens=3)
    llm.engine.speculator.step = None  # guess whatever it costs
    body = {"prompt": ["the cat sat on the cat sat on", "the dog sat on the dog"], "temperature": 0, "ignore_eos": True}
    body |= {"max_tokens": 22, "logit_bias": {"70": 100}}  # 1 + 1 + 5 steps of 4, the last of them together
    with serving({"tiny": llm}) as server:
        whole = server.complete(**body)
        events = [event["choices"][0] for event in server.stream(**body) if event != "[DONE]"]
        page = server.http.get("/metrics").text
    for choice in whole["choices"]:
        mine = [event for event in events if event["index"] == choice["index"]]
        assert "".join(event["text"] for event in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"] == "length"
    assert llm.stats()["accepted"] == 2 * 2 * 15
    assert re.search(r"^vitrine_generated_tokens_total{.*} 88.0$", page, re.MULTILINE), "2 x 2 answers of 22 tokens"


def test_a_slow_reader_gets_every_byte_and_delays_nobody(server, monkeypatch):
    text = "日本語😀é" * 40
    ids = server.llm().tokenizer.encode(text)
    script(monkeypatch, {7: ids})
    body = {"prompt": "the", "seed": 7, "max_tokens": len(ids), "stream": True}
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect(("127.0.0.1", server.port))
    client.sendall(http_bytes("/v1/completions", body))
    assert server.complete(max_tokens=5, ignore_eos=True)["usage"]["completion_tokens"] == 5
    server.wait_idle()  # it was computed to its end, though nobody read it
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data += client.recv(1000)
    client.close()
    events = [json.loads(e) for e in re.findall(r"data: (\{.*\})\n", dechunked(data.partition(b"\r\n\r\n")[2]))]
    assert text_of(events) == text


def dechunked(data: bytes) -> str:
    """The content of a body in HTTP's chunked encoding."""
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        out, data = out + data[: int(size, 16)], data[int(size, 16) + 2 :]
    return out.decode()


def test_an_error_in_the_middle_is_the_last_event(server, monkeypatch):
    real = engine_module.sample

    def sample(logits, states, *args):
        results = real(logits, states, *args)
        bad = [s.params.seed == 9 and s.n_output == 3 for s in states]
        return [ValueError("injected") if b else r for b, r in zip(bad, results, strict=True)]

    monkeypatch.setattr(engine_module, "sample", sample)
    events = server.stream(prompt="the", seed=9, max_tokens=10, ignore_eos=True)
    assert "injected" in events[-1]["error"]["message"] and "[DONE]" not in events and reasons(events[:-1]) == []
    lines = server.http.post("/api/generate", json={"prompt": "the", "options": {"seed": 9}}).text.splitlines()
    assert json.loads(lines[-1]) == {"error": "injected"}
    assert server.complete(seed=9, max_tokens=10, ignore_eos=True, expect=500)["error"]["type"] == "server_error"


# ---- http-shutdown


def test_sigterm_loses_no_accepted_request():
    command = [sys.executable, "serve.py", "--model", str(folder(max_position_embeddings=8192)), "--port", "0"]
    command += ["--threads", "1", "--max-num-seqs", "1", "--drain", "60", "--kernels", "reference"]
    root = Path(__file__).parent.parent
    child = subprocess.Popen(
        command, cwd=root, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    )
    try:
        port = None
        for line in child.stderr:
            if found := re.search(r"http://127.0.0.1:(\d+)/v1", line):
                port = int(found[1])
                break
        assert port
        body = LONG | {"stream": True, "max_tokens": 600}
        clients = [raw_request(port, http_bytes("/v1/completions", body)) for _ in range(2)]
        first = clients[0].recv(10_000)
        assert b"200 OK" in first
        while b"200 OK" not in (second := clients[1].recv(10_000)):
            pass
        child.send_signal(signal.SIGTERM)
        rest = [client.makefile("rb").read() for client in clients]
        for data in (first + rest[0], second + rest[1]):
            assert data.count(b"data: [DONE]") == 1 and data.count(b'"finish_reason":"length"') == 1
        with pytest.raises(OSError):
            raw_request(port, b"GET / HTTP/1.1\r\n\r\n").recv(1)
        assert child.wait(30) == 0
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))
    finally:
        child.kill()
        child.stderr.close()


def test_what_does_not_fit_the_drain_ends_with_an_error():
    with serving({"tiny": long_llm(max_num_seqs=1)}, drain=0.2) as server:
        clients = [raw_request(server.port, http_bytes("/v1/completions", LONG | {"stream": s})) for s in (True, False)]
        assert b"200 OK" in clients[0].recv(100)
        for _ in range(3000):
            if server.in_engine(lambda: len(server.llm().engine.requests)) == 2:
                break
    data = [client.makefile("rb").read() for client in clients]
    assert b'data: {"error"' in data[0] and b"shutting down" in data[0] and b"[DONE]" not in data[0]
    assert data[1].startswith(b"HTTP/1.1 503") and b"retry-after: 10" in data[1]


def test_a_draining_server_refuses_on_open_connections(server):
    server.engine.draining = True
    try:
        answer = server.http.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert server.http.get("/health").json() == {"status": "draining"}
    finally:
        server.engine.draining = False


# ---- load


def test_500_streams_a_third_leave_and_some_send_nonsense():
    llm = make_llm(num_blocks=400, max_num_seqs=32, max_num_batched_tokens=128, kernels="native")
    prompts = [f"{'once upon a time ' * (i % 3)}prompt number {i}" for i in range(25)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    solo = [llm.generate([prompt], params)[0].outputs[0].text for prompt in prompts]
    llm.scheduler.drop_cache()
    with serving({"tiny": llm}) as server:
        outcomes = asyncio.run(crowd(server.port, prompts))
        stats = server.wait_idle()
    kinds = [kind for kind, *_ in outcomes]
    assert kinds.count("left") == 167 and kinds.count("nonsense") == 83 and kinds.count("answer") == 250
    for kind, prompt, status, text in outcomes:
        assert status == (400 if kind == "nonsense" else 200), (kind, prompt, status)
        if kind == "answer":
            assert text == solo[prompts.index(prompt)]
    assert stats["live"] == 0 and stats["waiting"] == 0


async def crowd(port: int, prompts: list[str]) -> list[tuple]:
    """500 clients at once: of each six, two leave after a chunk, one sends nonsense, three read to the end."""
    arrived = asyncio.Semaphore(250)  # of their sockets, two each in this process

    async def client(i: int) -> tuple:
        kind = ("left", "answer", "nonsense", "answer", "left", "answer")[i % 6]
        prompt = prompts[i % len(prompts)]
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": True, "stream": True}
        if kind == "nonsense":
            body |= ({"top_p": 7}, {"max_tokens": "many"}, {"prompt": [[]]}, {"logit_bias": {"AI": 1}})[i % 4]
        async with arrived:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(http_bytes("/v1/completions", body).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
            data = await reader.read(1) if kind == "left" else await reader.read()
            if kind == "left":
                data += await reader.readuntil(b"\r\n\r\n")
            writer.close()
        head, _, rest = data.partition(b"\r\n\r\n")
        text = ""
        if kind == "answer":
            text = text_of([json.loads(e) for e in re.findall(r"data: (\{.*\})\n", dechunked(rest))])
        return kind, prompt, int(head.split()[1]), text

    return await asyncio.gather(*map(client, range(500)))


def test_nothing_stays_behind_after_many_requests(server):
    before = alive()
    for i in range(60):
        server.complete(prompt=f"number {i}", max_tokens=2, logprobs=2, n=2)
        server.stream(prompt=f"number {i}", max_tokens=2, stop="q")
    server.wait_idle()
    served = server.engine.models["tiny"]
    assert not served.jobs and served.open == 0 and not server.engine.metrics._last and not served.llm.engine.requests
    assert alive() <= before + 2  # the last one may still hang on the connection


def alive() -> int:
    gc.collect()
    return sum(type(o) in (Job, Request) for o in gc.get_objects())


# ---- the OpenAPI document, fuzzed


def test_no_request_that_the_document_describes_gives_a_server_error():
    llm = make_llm(max_model_len=48, max_num_seqs=16)
    with serving({"tiny": llm}, limits=Limits(max_choices=8)) as server:
        schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
        tried = set()
        for operation in schema.get_all_operations():
            operation = operation.ok()
            if operation.path == "/live/events":  # never ends
                continue

            @hypothesis.settings(
                max_examples=12, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
            )
            @hypothesis.seed(0)
            @hypothesis.given(case=operation.as_strategy())
            def fuzz(case):
                answer = case.call(base_url=server.url)
                assert answer.status_code < 500, answer.text
                tried.add(case.operation.path)

            fuzz()
        assert {"/v1/completions", "/v1/chat/completions", "/api/chat", "/tokenize", "/metrics"} <= tried
        server.wait_idle()
