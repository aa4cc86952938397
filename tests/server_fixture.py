"""A real server for tests: uvicorn on a free port of loopback, in a thread, over a tiny random model."""

from __future__ import annotations

import asyncio
import functools
import json
import shutil
import socket
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import httpx
import tiny

import engine as engine_module
from generate import LLM
from sampling import Sampled, score
from serving.app import Server, build_app


@functools.cache
def folder(arch: str = "llama", **overrides):
    return tiny.hf_folder(tempfile.mkdtemp() + "/m", arch, **overrides)


@functools.cache
def tool_folder():
    """A model whose template lists tools and prints calls the way Qwen's does."""
    path = Path(tempfile.mkdtemp()) / "m"
    shutil.copytree(folder(), path)
    template = (
        "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (path / "chat_template.jinja").write_text(template)
    return path


def make_llm(model=None, **options) -> LLM:
    options = {"threads": 1, "block_size": 4, "num_blocks": 512, "max_num_seqs": 8, "kernels": "reference"} | options
    return LLM(str(model or folder()), **options)


class Running:
    """A running server: its address, the application's parts, and a client."""

    def __init__(self, models: dict[str, LLM], drain: float = 5.0, **options):
        self.app = build_app(models, **options)
        self.started = threading.Event()
        self.server = Server(self.app, "127.0.0.1", 0, drain, self._announce)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve()), daemon=True)
        self.thread.start()
        assert self.started.wait(30)
        self.http = httpx.Client(base_url=self.url, timeout=30, trust_env=False)
        self.engine = self.app.state.engine

    def _announce(self, address: str) -> None:
        self.url, self.port, self.loop = address, int(address.rsplit(":", 1)[1]), asyncio.get_running_loop()
        self.started.set()

    def in_engine(self, function):
        """Run a function in the engine thread, between two steps."""
        return asyncio.run_coroutine_threadsafe(self.engine.call(function), self.loop).result(30)

    def llm(self, name: str | None = None) -> LLM:
        return self.app.state.service.model(name).llm

    def complete(self, prompt="the cat", expect: int = 200, **body):
        """POST /v1/completions; the JSON of the answer."""
        return self.post("/v1/completions", expect, prompt=prompt, **body)

    def chat(self, content="hi", expect: int = 200, **body):
        messages = body.pop("messages", [{"role": "user", "content": content}])
        return self.post("/v1/chat/completions", expect, messages=messages, **body)

    def post(self, path: str, expect: int = 200, **body) -> dict:
        answer = self.http.post(path, json=body)
        assert answer.status_code == expect, answer.text[:500]
        return answer.json()

    def stream(self, path: str = "/v1/completions", **body) -> list[dict | str]:
        """The events of a stream, parsed; the last is "[DONE]" if it ended well."""
        with self.http.stream("POST", path, json={"stream": True} | body) as answer:
            assert answer.status_code == 200, answer.read()
            data = answer.read().decode()
        events = [line.removeprefix("data: ") for line in data.split("\n\n") if line]
        return [event if event == "[DONE]" else json.loads(event) for event in events]

    def wait_idle(self) -> dict:
        """Wait until no request is open, and return the scheduler's figures, which must balance."""
        for _ in range(3000):
            busy = self.in_engine(lambda: any(s.llm.engine.has_work for s in self.engine.models.values()))
            if not busy:
                break
            threading.Event().wait(0.01)
        assert not busy
        stats = self.in_engine(self.llm().stats)
        assert stats["live"] == 0 and stats["free"] + stats["cached"] == stats["total"]
        return stats

    def stop(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()


@contextmanager
def serving(models: dict[str, LLM] | None = None, **options):
    running = Running(models or {"tiny": make_llm()}, **options)
    try:
        yield running
    finally:
        running.stop()


def text_of(events: list) -> str:
    """The text of choice 0 in a stream of either API."""
    out = ""
    for event in events:
        for choice in event["choices"] if isinstance(event, dict) else ():
            if choice["index"] == 0:
                out += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    return out


def reasons(events: list, index: int = 0) -> list:
    choices = [c for event in events if isinstance(event, dict) for c in event["choices"] if c["index"] == index]
    return [c["finish_reason"] for c in choices if c["finish_reason"] is not None]


def script(monkeypatch, scripts: dict[int, list[int]]) -> None:
    """Requests whose seed is a key of `scripts` get its tokens, one after the other, with their true scores."""
    real = engine_module.sample

    def sample(logits, states, *args):
        results = real(logits, states, *args)
        for i, state in enumerate(states):
            ids = scripts.get(state.params.seed)
            if ids is not None and state.n_output < len(ids):
                token = ids[state.n_output]
                k = state.params.logprobs
                results[i] = Sampled(token) if k is None else score(logits[i].float(), token, k)
        return results

    monkeypatch.setattr(engine_module, "sample", sample)


def raw_request(port: int, data: bytes) -> socket.socket:
    """A socket on which `data` has been sent."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(data)
    return connection


def http_bytes(path: str, body: dict) -> bytes:
    """A POST request as bytes."""
    content = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    return "\r\n".join([*head, f"Content-Length: {len(content)}", "", ""]).encode() + content
