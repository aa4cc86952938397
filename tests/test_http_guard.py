"""The layers between socket and engine, with a socket that is a pair of functions."""

import asyncio

import pytest
from fastapi.exceptions import RequestValidationError

from formats.chat_template import TemplateError
from sampling import ParameterError
from serving.guard import (
    ApiError,
    EventStream,
    Guard,
    as_api_error,
    error_body,
    error_response,
    local_only,
    sse,
    until_left,
)


class Client:
    """Receives the answer; leaves after `patience` pieces, or never takes more than `reads` of them.

    The piece at which it leaves is taken `turns` turns of the event loop later.
    """

    def __init__(self, patience: int | None = None, reads: int | None = None, turns: int = 0):
        self.patience, self.reads, self.turns = patience, reads, turns
        self.got: list[bytes] = []
        self.gone = asyncio.Event()

    async def receive(self) -> dict:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        if message["type"] == "http.response.body":
            self.got.append(message["body"])
            if len(self.got) == self.patience:
                self.gone.set()
                for _ in range(self.turns):
                    await asyncio.sleep(0)
            if len(self.got) == self.reads:
                await asyncio.Event().wait()


def stream(client: Client, pieces: int, stall: float = 60.0) -> tuple[int, int, bool]:
    """Stream to the client: (pieces made, calls of leave, was the generator closed)."""
    made, left, closed = [], [], []

    async def events():
        try:
            for i in range(pieces):
                await asyncio.sleep(0)
                made.append(i)
                yield b"x"
        finally:
            closed.append(True)

    async def main() -> None:
        client.gone = asyncio.Event()
        answer = EventStream(events(), lambda: left.append(True), "text/event-stream", stall, {})
        await answer({}, client.receive, client.send)

    asyncio.run(main())
    return len(made), len(left), bool(closed)


def test_a_stream_runs_to_its_end():
    client = Client()
    assert stream(client, 5) == (5, 1, True) and client.got == [b"x"] * 5 + [b""]


@pytest.mark.parametrize("turns", range(6))
def test_a_client_that_leaves_while_a_piece_is_sent_stops_the_stream(turns):
    made, left, closed = stream(Client(patience=2, turns=turns), 10_000)
    assert made <= 6 and left == 1 and closed


def test_a_reader_who_stops_is_taken_for_gone():
    client = Client(reads=2)
    assert stream(client, 10_000, stall=0.01) == (2, 1, True)
    assert client.got == [b"x"] * 2  # the answer was not completed, so that the connection is closed


def test_until_left_returns_what_the_work_returns_and_raises_what_it_raises():
    async def never():
        await asyncio.Event().wait()

    async def work():
        return 3

    async def broken():
        raise KeyError("x")

    assert asyncio.run(until_left(never, work())) == 3
    with pytest.raises(KeyError):
        asyncio.run(until_left(never, broken()))


@pytest.mark.parametrize(
    "error, status, param",
    [
        (ParameterError("top_p", 3, "less"), 400, "top_p"),
        (TemplateError("no"), 400, None),
        (ApiError(429, "full", Retry_After="3"), 429, None),
        (ApiError(404, "x", "model"), 404, "model"),
        (RuntimeError("secret detail"), 500, None),
        (RequestValidationError([{"loc": ("body", "n"), "msg": "bad", "input": "y" * 9999}] * 50), 400, "n"),
    ],
)
def test_errors_and_their_status(error, status, param):
    told = as_api_error(error)
    assert (told.status, told.param) == (status, param) and len(told.message) < 2000
    assert "secret" not in told.message
    answer = error_response("/v1/x", told)
    assert answer.status_code == status and ("retry-after" in answer.headers) == (status == 429)
    assert b'"error":"' in error_response("/api/x", told).body


def test_error_bodies_can_always_be_written():
    body = error_body(ApiError(400, "\ud800" * 5000))
    assert len(sse(body)) < 3000 and body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "host, passes",
    [
        (b"localhost", True),
        (b"localhost:8000", True),
        (b"127.0.0.1:8000", True),
        (b"[::1]:8000", True),
        (b"10.0.0.7", True),
    ]
    + [(b"evil.example", False), (b"evil.example:8000", False), (b"localhost.evil.example", False), (b"", False)]
    + [(b"[", False), (b"127.0.0.1.evil", False), (b"\xff", False)],
)
def test_a_local_server_answers_to_no_other_name(host, passes):
    """Against DNS rebinding: a page whose name resolves to this machine still sends its name."""
    answers = []

    async def app(scope, receive, send):
        answers.append(200)

    async def receive():
        return {"type": "http.request", "body": b""}

    async def send(message):
        answers.extend([message["status"]] if "status" in message else [])

    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": [(b"host", host)]}
    asyncio.run(Guard(app, 9, 9.0, local_only)(scope, receive, send))
    assert answers == [200 if passes else 403]
