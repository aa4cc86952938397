"""One request must not harm the others: what is too large is refused unread, what is long delays nobody."""

import json
import re
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from server_fixture import folder, make_llm, raw_request, script, serving, tool_folder

from serving import engine_thread

MANY = 40_000


@pytest.fixture(scope="module")
def server():
    with serving({"tiny": make_llm(tool_folder(), max_num_batched_tokens=16)}) as running:
        yield running


def chat(**more) -> dict:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1} | more


TOOL = {"type": "function", "function": {"name": "f", "strict": True}}


def say(content) -> dict:
    return {"messages": [{"role": "user", "content": content}]}


LARGE = [
    *((path, say("a" * 4_000_000)) for path in ("/v1/chat/completions", "/api/chat", "/tokenize")),
    ("/v1/chat/completions", say("😀" * 1_000_000)),
    ("/v1/responses", {"input": "a" * 4_000_000}),
    ("/api/generate", {"prompt": "a", "system": "a" * 4_000_000}),
    ("/v1/chat/completions", chat(chat_template_kwargs={"a": ["b"] * MANY * 3})),
    ("/v1/chat/completions", {"messages": [{}] * MANY}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [0.5] * MANY}]}),
    *(("/v1/completions", {"prompt": [item] * MANY}) for item in ({}, 0.5, "x", ["x"], [[]], [5], 5)),
    *(("/v1/completions", {"prompt": "x", name: list(range(MANY))}) for name in ("stop", "stop_token_ids", "choice")),
    ("/v1/completions", {"prompt": "x", "logit_bias": {str(i): 1 for i in range(MANY)}}),
    ("/v1/completions", {"prompt": "x"} | {f"unknown{i}": i for i in range(MANY)}),
    ("/v1/completions", {"prompt": "x", "regex": "a" * 1_000_000}),
    (
        "/v1/completions",
        {"prompt": "x", "response_format": {"type": "json_object", "schema": {"enum": ["a" * 9] * MANY}}},
    ),
    ("/api/chat", chat(options={f"unknown{i}": i for i in range(MANY)})),
    ("/detokenize", {"tokens": [0.5] * MANY}),
]


@pytest.mark.parametrize("path, body", LARGE)
def test_what_is_too_large_is_refused_at_once_and_briefly(server, path, body):
    start = time.perf_counter()
    answer = server.http.post(path, content=json.dumps(body, ensure_ascii=False))
    assert answer.status_code == 400 and time.perf_counter() - start < 1, "milliseconds on a quiet machine"
    assert len(answer.content) < 1000


def test_a_body_of_too_many_values_is_not_even_parsed(server):
    for path in ("/v1/completions", "/api/chat", "/tokenize"):
        answer = server.http.post(path, content=b"[" + b"0," * (1 << 18))
        assert answer.status_code == 400 and "commas" in answer.text


def test_a_long_text_that_may_fit_delays_nobody(server):
    """The library holds the interpreter for as long as it encodes a single text."""
    text, gaps, done = "the cat 😀" * 4_000, [], threading.Event()  # in pieces of one token each
    monitor = threading.Thread(target=lambda: gaps.extend(pauses(done)))
    monitor.start()
    for _ in range(5):
        server.llm().tokenizer.encode(text * 5)
    done.set()
    monitor.join()
    assert max(gaps) < 0.1


def pauses(done: threading.Event):
    last = time.perf_counter()
    while not done.is_set():
        time.sleep(0.001)
        now = time.perf_counter()
        yield now - last
        last = now


# ---- silence


@pytest.mark.parametrize(
    "path, opening, waiting",
    [
        ("/v1/chat/completions", b'"role":"assistant"', b": no token yet\n\n"),
        ("/v1/responses", b"response.in_progress", b": no token yet\n\n"),
        ("/api/chat", b"", b'"done": false}\n'),
    ],
)
def test_a_long_prefill_is_not_silent(server, monkeypatch, path, opening, waiting):
    monkeypatch.setattr(engine_thread, "QUIET_S", 0.02)
    engine, release = server.llm().engine, threading.Event()
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: release.wait(30) and step())
    body = {"input": "hi"} if "responses" in path else {"messages": [{"role": "user", "content": "hi"}]}
    more = {"max_output_tokens": 1} if "responses" in path else {"max_tokens": 1, "options": {"num_predict": 1}}
    with server.http.stream("POST", path, json=body | more | {"stream": True}) as answer:
        pieces, sent = answer.iter_bytes(), b""
        while sent.count(waiting) < 2:
            sent += next(pieces)
        assert opening in sent.partition(waiting)[0], "the role is there before the first token"
        assert b"vitrine_requests_waiting" in server.http.get("/metrics").content, "it does not wait for the step"
        release.set()
        assert re.search(rb"\[DONE\]|response.incomplete|\"done\": true", b"".join(pieces))


# ---- every field is obeyed, refused or named


@pytest.mark.parametrize(
    "path, more, named",
    [
        ("/api/chat", {"options": {"num_ctx": 9, "seed": 1, "mirostat": 2}}, "options.num_ctx, options.mirostat"),
        ("/v1/chat/completions", {"response_format": {"type": "text", "strict": True}}, "response_format.strict"),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "null"}, "x": 1}}, "y": 2},
            "y, response_format.json_schema.x",
        ),
        ("/v1/chat/completions", {"stream": True, "stream_options": {"obfuscate": 1}}, "stream_options.obfuscate"),
        ("/v1/chat/completions", {"tools": [TOOL, TOOL]}, "tools.function.strict"),
    ],
)
def test_unknown_fields_within_a_field_are_named(server, path, more, named):
    named = named if path.startswith("/v1") else f"max_tokens, {named}"
    assert server.http.post(path, json=chat() | more).headers["X-Ignored-Fields"] == named


@pytest.mark.parametrize(
    "path, more, field",
    [
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
            "response",
        ),
        (
            "/v1/chat/completions",
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]},
            "tools",
        ),
        ("/v1/chat/completions", {"response_format": {"type": "text", "schema": {}}}, "response_format"),
        ("/api/chat", {"tools": [{}]}, "tools"),
        ("/api/chat", {"images": ["a"]}, "images"),
        ("/api/generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template"),
        ("/api/generate", {"prompt": "x", "context": [1]}, "context"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/api/generate", {"prompt": "x", "raw": True, "system": "y"}, "system"),
        ("/tokenize", {"add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": None, "prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        (
            "/v1/chat/completions",
            {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
        ),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_name(server, path, more, field):
    answer = server.http.post(path, json=chat() | more)
    assert answer.status_code == 400 and field in answer.text


def test_a_developer_is_the_system_and_no_content_is_empty(server):
    def tokens(role, content) -> list[int]:
        return server.post("/tokenize", messages=[{"role": role, "content": content}])["tokens"]

    assert tokens("developer", "be brief") == tokens("system", "be brief")
    assert tokens("user", None) == tokens("user", "")


# ---- tools


def tool(name: str, parameters=None) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_one_call_at_a_time_if_so_asked(server, monkeypatch):
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    script(monkeypatch, {7: [*server.llm().tokenizer.encode(call * 2), 2]})
    body = chat(tools=[tool("f")], seed=7, max_tokens=200)
    for parallel, calls in ((True, 2), (False, 1)):
        message = server.chat(**body, parallel_tool_calls=parallel)["choices"][0]["message"]
        assert len(message["tool_calls"]) == calls


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_tool_without_parameters_is_called_with_none(server, parameters, choice):
    answer = server.chat(tools=[tool("f", parameters)], tool_choice=choice, seed=1, max_tokens=200)["choices"][0]
    assert answer["message"]["tool_calls"][0]["function"]["arguments"] == "{}"


def test_an_error_in_one_of_many_tools_names_it(server):
    for wrong in ({"properties": {"a": {"type": "foo"}}}, {"properties": {"a": {"$ref": "#/nowhere"}}}):
        tools = [tool("good"), tool("wrong", wrong), tool("fine")]
        error = server.chat(expect=400, tools=tools, tool_choice="required")["error"]
        assert "'wrong'" in error["message"] and error["param"] == "tools"


# ---- file descriptors


def test_out_of_descriptors_is_one_line_and_the_service_goes_on():
    command = (
        f"ulimit -n 64; exec {sys.executable} serve.py --model {folder()} --port 0 --threads 1 --kernels reference"
    )
    root = Path(__file__).parent.parent
    with subprocess.Popen(["sh", "-c", command], cwd=root, stderr=subprocess.PIPE, text=True) as child:
        try:
            port = next(int(found[1]) for line in child.stderr if (found := re.search(r"127.0.0.1:(\d+)/v1", line)))
            idle = [raw_request(port, b"") for _ in range(60)]
            for _ in range(3):
                time.sleep(0.5)
                idle.append(raw_request(port, b""))
            for connection in idle:
                connection.close()
            for _ in range(20):
                with suppress(OSError):
                    client = raw_request(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    if b"200 OK" in client.recv(1000):
                        break
                time.sleep(0.2)
            else:
                pytest.fail("the service does not go on")
        finally:
            child.terminate()
        (line,) = child.stderr.read().splitlines()
        assert "connections are open" in line
