"""The server: models behind OpenAI's API, on one engine thread, with a page that shows the engine at work.

    python serve.py --compile --quant int4
    python serve.py --model smollm2 --model tiny=path/to/folder --port 8080 --api-key SECRET

and then, with any client of OpenAI's: base_url="http://127.0.0.1:8000/v1". The page is at http://127.0.0.1:8000/.

The problem. Between a research engine and something people can use stand the dull things: addresses, keys, limits, a
clean end.

The idea. This file only puts together what the others do, and says when things begin and end:

    LLMs ─► EngineThread ─► Service ─┬─► OpenAIApi   /v1/... /tokenize /detokenize
                     │               └─► OllamaApi   /api/...
                     ├─► metrics     /metrics /health
                     └─► Live        / and /live/events
    around all: CORS (only if asked), ApiKey (if set, else LocalHost), BodyLimit

The end. SIGTERM or Ctrl-C: the port is closed and new requests on open connections get 503; what runs or waits goes on
for --drain seconds; what is left then ends with an error that says so. Exit code 0. A second Ctrl-C ends at once.

Left out: several processes. One engine uses all cores; to serve from several machines put a balancer in front, by
/health and Retry-After.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from formats.command_line import as_command, given, refuse_unused
from generate import LLM, add_engine_flags, engine_arguments, engine_rules
from serving.engine_thread import EngineThread
from serving.guard import ApiError, BodyLimit, EventStream, Gate, HeaderLimit, local_only, needs_key, on_error
from serving.live import Live
from serving.ollama_api import ollama_routes
from serving.openai_api import openai_routes
from serving.service import Limits, Service

PAGE = Path(__file__).parent / "serving" / "live.html"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
LAST_WORDS_S = 2.0  # after the drain: time for errors to reach their clients


def build_app(
    models: dict[str, LLM],
    limits: Limits | None = None,
    max_queue: int = 1024,
    api_key: str | None = None,
    cors_origins: tuple[str, ...] = (),
    log_prompts: bool = False,
    local: bool = False,
) -> FastAPI:
    """The application; `app.state` holds its parts: engine, service, live. `local`: answer to localhost only."""
    limits = limits or Limits()
    engine = EngineThread(models, max_queue)
    service, live = Service(engine, limits, log_prompts), Live(engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        engine.start()
        yield
        await engine.stop()
        service.helpers.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="vitrine", description="An LLM engine under glass.", lifespan=lifespan, redoc_url=None)
    app.state.engine, app.state.service, app.state.live = engine, service, live
    app.include_router(openai_routes(service))
    app.include_router(ollama_routes(service))
    add_status_routes(app, service, live)
    for kind in (ApiError, ValueError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_middleware(BodyLimit, limit=limits.max_body, patience=limits.stall_seconds)
    if api_key:
        app.add_middleware(Gate, check=needs_key(api_key))
    elif local:
        app.add_middleware(Gate, check=local_only)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "X-Ignored-Fields"],
        )
    return app


def add_status_routes(app: FastAPI, service: Service, live: Live) -> None:
    """Health, metrics, and the page with its stream."""
    engine = service.engine

    @app.get("/health", response_model=None)
    async def health() -> Response:
        """200 while requests are taken, 503 while the server drains or after a failure."""
        state = "draining" if engine.draining else "ok" if engine.alive else "failed"
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Counts and histograms as Prometheus reads them."""
        engine.metrics.stats = await engine.call(lambda: {s.name: s.llm.stats() for s in engine.models.values()})
        return PlainTextResponse(generate_latest(engine.metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @app.get("/live/events", response_model=None)
    async def live_events(model: str | None = None) -> EventStream:
        """Snapshots of one model's engine, as server-sent events."""
        events = live.events(service.model(model))
        return EventStream(events, lambda: None, "text/event-stream", service.limits.stall_seconds, {})

    @app.get("/", include_in_schema=False, response_model=None)
    async def page() -> FileResponse:
        return FileResponse(PAGE, headers={"Cache-Control": "no-cache", "Content-Security-Policy": POLICY})


# The page is one file: its own script and style, and no connection but to this server.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Server(uvicorn.Server):
    """uvicorn's server with an end that drains, and that a signal does not turn into a crash."""

    def __init__(self, app: FastAPI, host: str, port: int, drain: float, announce: Callable[[str], None]):
        self.app, self.drain, self.announce = app, drain, announce
        config = uvicorn.Config(
            app,
            host,
            port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=int(drain + LAST_WORDS_S) + 1,
            timeout_keep_alive=30,
            http=partial(HeaderLimit, patience=app.state.service.limits.stall_seconds),
        )
        super().__init__(config)

    @contextmanager
    def capture_signals(self):
        """As in uvicorn, but the signal is not raised again after a clean end."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.announce(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    async def shutdown(self, sockets=None) -> None:
        state = self.app.state
        state.engine.draining = True
        state.live.closing = True
        deadline = asyncio.get_running_loop().call_later(self.drain, self._end_all)
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()

    def _end_all(self) -> None:
        self.app.state.engine.abort_all(f"the server is shutting down and the answer took longer than {self.drain} s")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    about = "Serve models over HTTP, as OpenAI's API. --model [NAME=]M may be given several times."
    parser = argparse.ArgumentParser("serve.py", description=about, allow_abbrev=False)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 is everywhere (set a key)")
    group.add_argument("--port", type=int, default=8000)
    group.add_argument(
        "--api-key", default=os.environ.get("VITRINE_API_KEY") or None, metavar="KEY", help="or $VITRINE_API_KEY"
    )
    group.add_argument(
        "--cors-origin", action="append", default=[], metavar="ORIGIN", help="allow pages of this origin"
    )
    group.add_argument("--max-queue", type=int, default=1024, metavar="N", help="requests that may wait, per model")
    group.add_argument("--max-body", type=int, default=Limits.max_body, metavar="BYTES")
    group.add_argument("--max-choices", type=int, default=Limits.max_choices, metavar="N", help="answers per request")
    group.add_argument(
        "--stall",
        type=float,
        default=Limits.stall_seconds,
        metavar="S",
        help="for clients who stop reading, or sending",
    )
    group.add_argument("--drain", type=float, default=30.0, metavar="S", help="for open requests at the end")
    group.add_argument("--log-prompts", action="store_true", help="write prompts and answers to the log")
    add_engine_flags(parser)
    several = argparse.ArgumentParser(add_help=False, allow_abbrev=False)  # the one flag that means more here
    several.add_argument("--model", action="append")
    named, rest = several.parse_known_args(argv)
    args = parser.parse_args(rest)
    refuse_unused(given(parser, rest, args), *engine_rules(args))
    args.models = named.model or [args.model]
    if not args.stall > 0:
        parser.error(f"--stall must be more than 0, got {args.stall}")
    for name, most in (("port", 65535), ("max_queue", 1e9), ("drain", 1e9)):
        if not 0 <= getattr(args, name) <= most:  # (a NaN is not)
            parser.error(f"--{name.replace('_', '-')} must be from 0 to {most:,.0f}, got {getattr(args, name)}")
    if args.api_key is not None and (not args.api_key or args.api_key != args.api_key.strip()):
        parser.error("--api-key must not be empty, nor begin or end with a space: no client could send it")
    for name in ("max_body", "max_choices"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    return args


def named_models(given: list[str]) -> dict[str, str]:
    """["smollm2", "tiny=path/to/m", "path/to/n"] -> {"smollm2": ..., "tiny": ..., "n": ...}"""
    named: dict[str, str] = {}
    for text in given:
        name, separator, model = text.partition("=")
        if not separator:
            name, model = Path(text).name if Path(text).exists() else text, text
        if not name or not model or name in named:
            raise ValueError(f"--model {text!r}: each needs a name of its own; write NAME=MODEL")
        named[name] = model
    return named


@as_command
def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    models = {}
    for name, model in named_models(args.models).items():
        models[name] = LLM(**(engine_arguments(args) | {"model": model}), quiet=False)
    limits = Limits(args.max_body, args.max_choices, args.stall)
    local = args.host in LOOPBACK
    app = build_app(models, limits, args.max_queue, args.api_key, tuple(args.cors_origin), args.log_prompts, local)
    if not local and not args.api_key:
        print(f"warning: {args.host} can be reached from outside, and there is no --api-key", file=sys.stderr)

    def announce(address: str) -> None:
        print(f"{address}/v1 serves {', '.join(models)}; the page is at {address}/", file=sys.stderr, flush=True)

    server = Server(app, args.host, args.port, args.drain, announce)
    server.run()
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
