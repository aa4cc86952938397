"""What stands between a socket and the engine: errors with one shape, limits, the key, and answers that may be left.

The problem. Whatever a stranger sends must cost little and end in a clear answer: fifty megabytes of body, JSON that is
none, a wrong key, a reader who stops reading. A framework's own answers are plain texts that echo the input.

    socket ─► HeaderLimit: 408 ─► Guard: 401 no key, 403 another host, ─► routes: 400 404 429 503 ─► EventStream
              until they are            413 and 408 for the body           ApiError, in the shape     stops when the
              there; CORS behind                                           of the API that is called  client leaves

A web page of another origin cannot use a server on loopback: a body must be declared as JSON, which a browser sends to
another origin only after a preflight, and that is answered only for the origins of --cors-origin. Programs, which send
no Origin, need not declare theirs. Source: OpenAI's API reference, "Error codes". Left out: TLS, rates per client, and
a bound on the time that a body which trickles in may take (put a proxy in front).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from uvicorn.protocols.http.auto import AutoHTTPProtocol

log = logging.getLogger("vitrine")

LONGEST_MESSAGE = 2000  # characters of an error message
MOST_VALUES = 1 << 18  # in a body, more than ids of a prompt: reading as many takes a tenth of a second
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
OPEN_PATHS = ("/", "/health")  # no key needed: a static page, and whether the server is up


class ApiError(Exception):
    """An answer that is an error: status, what is wrong, which field, a code for programs, and further headers."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None, **headers: str):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers


def error_body(error: ApiError, path: str = "") -> dict:
    """OpenAI's error object, or Ollama's. Lone surrogates, which JSON can carry and UTF-8 cannot, are replaced."""
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    message = error.message[:LONGEST_MESSAGE].encode("utf-8", "replace").decode()
    if path.startswith("/api/"):
        return {"error": message}
    return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}


def error_response(path: str, error: ApiError) -> JSONResponse:
    headers = {name.replace("_", "-"): value for name, value in error.headers.items()}
    return JSONResponse(error_body(error, path), error.status, headers)


def as_api_error(error: Exception, path: str = "", method: str = "") -> ApiError:
    """What a client is told about an exception. A ValueError is the fault of the request, and says what to change."""
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, HTTPException):
        if error.status_code == 405:
            methods = set(error.headers["Allow"].split(", "))
            allowed = ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
            return ApiError(405, f"{path[:100]} does not take {method[:20]}, but {allowed}", Allow=allowed)
        return ApiError(error.status_code, f"{error.detail}: {method[:20]} {path[:100]}")
    if isinstance(error, ValueError):
        return ApiError(400, str(error), getattr(error, "field", None))
    return internal_error(error)


def internal_error(error: Exception) -> ApiError:
    """What is told of an exception while an answer is made: that is never the fault of the request."""
    return error if isinstance(error, ApiError) else ApiError(500, f"internal error: {type(error).__name__}")


def _validation_error(error: RequestValidationError) -> ApiError:
    """The first few things that are wrong with a body, without repeating the body."""
    errors, messages, fields = error.errors(), [], []
    for item in errors[:3]:
        value = item.get("input")
        if isinstance(value, bytes):  # never parsed
            return ApiError(400, "the body was not declared as JSON: send the header 'Content-Type: application/json'")
        fields.append(".".join(str(part) for part in item["loc"] if part != "body")[:100])
        shown = f", got {value!r:.60}" if isinstance(value, (str, int, float)) else ""
        messages.append(f"{fields[-1] or 'body'}: {item['msg'][:200]}{shown}")
    if len(errors) > 3:
        messages.append(f"and {len(errors) - 3} more")
    return ApiError(400, "; ".join(messages), next(filter(None, fields), None))


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """Exception handler of the application."""
    return error_response(request.url.path, as_api_error(error, request.url.path, request.method))


class HeaderLimit(AutoHTTPProtocol):
    """A connection to uvicorn that ends unless a request's headers are whole `patience` seconds after they began.

    uvicorn itself bounds only the silence between two requests. The clock also runs while the rest of a refused body
    arrives: a client that is still sending has so long to read why; closing at once would take the answer from it.
    A connection beyond the `most` that there are file descriptors for ends at once, with a line a minute in the log.
    """

    warned = -60.0  # when the last line was written

    def __init__(self, *args, patience: float, most: int, **kwargs):
        super().__init__(*args, **kwargs)
        self.patience, self.most, self.deadline = patience, most, None

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > self.most:
            transport.abort()
            if self.loop.time() >= HeaderLimit.warned + 60:
                HeaderLimit.warned = self.loop.time()
                log.warning("%d connections are open; more are closed at once: raise `ulimit -n`", self.most)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._watch(closed=True)

    def _watch(self, closed: bool = False) -> None:
        if closed or (self.cycle is not None and not self.cycle.response_complete):  # a request is being answered
            if self.deadline is not None:
                self.deadline.cancel()
            self.deadline = None
        elif self.deadline is None:
            self.deadline = self.loop.call_later(self.patience, self._give_up)

    def _give_up(self) -> None:
        self._refuse(ApiError(408, f"no whole headers arrived in {self.patience} s: send them again"))

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to bytes that are no HTTP, a broken chunk say: it fails where an answer has begun."""
        self._refuse(ApiError(400, f"{msg} Its head or a chunk of its body is malformed: send it again, whole."))

    def _refuse(self, error: ApiError) -> None:
        """End the connection, with an answer if it has had none, for which a client might take this one."""
        if (self.cycle is None or not self.cycle.response_started) and not self.transport.is_closing():
            body = json.dumps(error_body(error)).encode()
            head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()


class Guard:
    """Lets a request through whose path and headers pass `check`, and whose body is at most `limit` bytes.

    The check comes first (a dependency of FastAPI's would run after the body was parsed). A body that pauses for
    `patience` seconds while it arrives is refused: it holds a connection and its memory. HEAD is GET without a body.
    """

    def __init__(self, app, limit: int, patience: float, check: Callable[[str, Headers], None]):
        self.app, self.limit, self.patience, self.check = app, limit, patience, check

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        try:
            self.check(scope["path"], headers)
            body = await self._read(receive, headers.get("content-length", ""))
        except ApiError as error:
            return await error_response(scope["path"], error)(scope, receive, send)
        if "content-type" not in headers and "origin" not in headers:
            scope = scope | {"headers": [*scope["headers"], (b"content-type", b"application/json")]}
        messages = iter([{"type": "http.request", "body": body}])

        async def replayed():
            return next(messages, None) or await receive()

        async def send_head(message) -> None:
            if message["type"] == "http.response.start":  # the end of the answer: a stream takes its reader for gone
                await send(message)
                await send({"type": "http.response.body"})

        if scope["method"] == "HEAD":
            return await self.app(scope | {"method": "GET"}, replayed, send_head)
        await self.app(scope, replayed, send)

    async def _read(self, receive, declared: str) -> bytes:
        """The body. One that is too long is refused at once if its length is declared, else as soon as it is."""
        body, more, too_long = bytearray(), True, declared.isdigit() and int(declared[:19]) > self.limit
        while more and not too_long:
            part = asyncio.ensure_future(receive())
            # (asyncio.wait and not wait_for, which before Python 3.12 can swallow a cancellation.)
            if not (await asyncio.wait([part], timeout=self.patience))[0]:
                part.cancel()
                message = f"nothing more of the body arrived for {self.patience} s: send it again"
                raise ApiError(408, message, Connection="close")  # not kept for the rest of the body
            body += part.result().get("body", b"")
            more, too_long = part.result().get("more_body", False), len(body) > self.limit
        if too_long:
            remedy = "send less, or start the server with a larger --max-body"
            raise ApiError(413, f"the body is longer than {self.limit} bytes; {remedy}")
        if sum(map(body.count, (b",", b"[", b"{"))) > MOST_VALUES:
            remedy = "commas and opening brackets; send fewer values"
            raise ApiError(400, f"the body has more than {MOST_VALUES:,} {remedy}")
        return bytes(body)


def needs_key(key: str) -> Callable[[str, Headers], None]:
    """The check for `Authorization: Bearer KEY`. Digests are compared, in constant time."""
    digest = hashlib.sha256(key.encode()).digest()

    def check(path: str, headers: Headers) -> None:
        several = headers.getlist("authorization")
        scheme, _, sent = (several[0] if len(several) == 1 else "").encode("latin-1").partition(b" ")
        right = hmac.compare_digest(hashlib.sha256(sent.strip()).digest(), digest)
        if path not in OPEN_PATHS and not (scheme.lower() == b"bearer" and right):
            message = "this server needs its key: send one header 'Authorization: Bearer KEY'"
            raise ApiError(401, message, None, "invalid_api_key", WWW_Authenticate="Bearer")

    return check


def local_only(path: str, headers: Headers) -> None:
    """The check that a request names this machine as its owner would: for servers on loopback that have no key.

    A page of another site can have its own name resolve to 127.0.0.1 ("DNS rebinding") and is then, for the browser, of
    the same origin as this server. Its name is still in the Host header. Addresses and "localhost" cannot be bent so.
    (Starlette's TrustedHostMiddleware compares with a list of names, and cannot say "any address".)
    """
    try:
        name = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        if name != "localhost":
            ipaddress.ip_address(name)
    except ValueError:
        remedy = "to reach it by another name start it with --api-key"
        raise ApiError(403, f"this server answers to localhost only; {remedy}") from None


class EventStream(Response):
    """An answer that is sent piece by piece, until it ends, its client leaves, or does not read for `stall` seconds
    (`send` waits while the socket's buffer is full). `leave` is called however it ends."""

    def __init__(
        self, events: AsyncGenerator[bytes], leave: Callable[[], None], media_type: str, stall: float, headers: Mapping
    ):
        self.events, self.leave, self.stall = events, leave, stall
        self.status_code, self.media_type, self.background = 200, media_type, None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})

    async def __call__(self, scope, receive, send) -> None:
        try:
            await until_left(receive, self._write(send))
        finally:
            self.leave()

    async def _write(self, send) -> None:
        """Stalled, it cancels itself: the server closes a connection whose answer was never completed."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self.events):
            async for piece in self.events:
                stalled = loop.call_later(self.stall, task.cancel)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                stalled.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def streamed(media_type: str) -> dict:
    """The `responses` of a route that may answer in a stream, for the OpenAPI document."""
    return {200: {"content": {media_type: {"schema": {"type": "string"}}}}}


async def until_left(receive, work: Awaitable):
    """The result of `work`, or None if it is given up or the client disconnects first; then it is cancelled."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass  # the rest of a body

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(left())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() and not tasks[0].cancelled() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def parts(value: Any) -> Iterator[Any]:
    """A value, and all that it holds if it is a list or an object: names and values, at every depth."""
    waiting = [value]
    while waiting:
        yield (value := waiting.pop())
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value


def size(value: Any) -> int:
    """Of nested lists and objects: characters of all texts, and 1 for any other value."""
    return sum(len(part) if isinstance(part, str) else 1 for part in parts(value))


def sse(data: dict | str) -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()
