"""The application: protocols, status and page around one engine thread, and a server that ends cleanly.

    LLMs ─► EngineThread ─► Service ─┬─► openai_routes     /v1/... /tokenize /detokenize
                     │               ├─► responses_routes  /v1/responses
                     │               └─► ollama_routes     /api/...
                     ├─► metrics     /metrics /health
                     └─► Live        / and /live/events
    around all: CORS (only if asked), Guard (the key if set, else this machine's names only; the size of the body)

SIGTERM or Ctrl-C closes the port; new requests on open connections get 503, what runs or waits goes on for --drain
seconds, and what is left then ends with an error that says so. Left out: several processes (a balancer reads /health).
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import uvicorn
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from generate import LLM
from serving.engine_thread import EngineThread
from serving.guard import ApiError, EventStream, Guard, HeaderLimit, local_only, needs_key, on_error, streamed
from serving.live import Live
from serving.ollama_api import ollama_routes
from serving.openai_api import openai_routes
from serving.responses_api import responses_routes
from serving.service import Limits, Service

PAGE = Path(__file__).with_name("live.html")
# The page is one file: its own script and style, and no connection but to this server.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
REFUSALS = (400, 404, 405, 408, 413, 429, 500, 503)  # statuses of what is posted
LAST_WORDS_S = 2.0  # after the drain: time for errors to reach their clients
MOST_DESCRIPTORS, SPARE_DESCRIPTORS = 1 << 16, 16  # spared for files; all others are for connections


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
        service.close()

    elsewhere = {"docs_url": None, "redoc_url": None}  # pages of the framework that load scripts from other sites
    app = FastAPI(title="vitrine", description="An LLM engine under glass.", lifespan=lifespan, **elsewhere)
    app.state.engine, app.state.service, app.state.live = engine, service, live
    add_status_routes(app, service, live)
    routers = openai_routes(service), responses_routes(service), ollama_routes(service)
    for router in (app.router, *routers):
        document_errors(router)
    for router in routers:
        app.include_router(router)
    for kind in (ApiError, ValueError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)
    check = needs_key(api_key) if api_key else local_only if local else lambda path, headers: None
    app.add_middleware(Guard, limit=limits.max_body, patience=limits.stall_seconds, check=check)
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
        """Counts and histograms as Prometheus reads them, as of the last finished step."""
        await engine.measure()
        return PlainTextResponse(generate_latest(engine.metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @app.get("/live/events", response_class=Response, responses=streamed("text/event-stream"))
    async def live_events(model: str | None = None) -> EventStream:
        """Snapshots of one model's engine, as server-sent events."""
        events = live.events(service.model(model))
        return EventStream(events, lambda: None, "text/event-stream", service.limits.stall_seconds, {})

    @app.get("/", include_in_schema=False, response_model=None)
    async def page() -> FileResponse:
        return FileResponse(PAGE, headers={"Cache-Control": "no-cache", "Content-Security-Policy": POLICY})


def document_errors(router: APIRouter) -> None:
    """Let the OpenAPI document say what each route refuses, and how; of itself it says 422, which is never sent."""
    text = {"type": "string"}
    error = {"type": "object", "properties": {"message": text, "type": text, "param": {}, "code": {}}}
    for route in router.routes:
        if isinstance(route, APIRoute):
            shape = {"type": "object", "properties": {"error": text if route.path.startswith("/api/") else error}}
            told = {"content": {"application/json": {"schema": shape}}}
            statuses = REFUSALS if "POST" in route.methods else (400, 404, 405, 503)
            route.responses |= {status: told for status in ("default", *statuses)}  # "default" keeps 422 out


class Server(uvicorn.Server):
    """uvicorn's server with an end that drains, and that a signal does not turn into a crash."""

    def __init__(self, app: FastAPI, host: str, port: int, drain: float, announce: Callable[[str], None]):
        self.app, self.drain, self.announce = app, drain, announce
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        soft = max(soft, MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        free = soft - len(os.listdir("/dev/fd")) - SPARE_DESCRIPTORS
        backlog = max(1, min(2048, free // 8))  # asyncio accepts so many, several times, before it can be told to stop
        patience = app.state.service.limits.stall_seconds
        config = uvicorn.Config(
            app,
            host,
            port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=int(drain + LAST_WORDS_S) + 1,
            timeout_keep_alive=30,
            http=partial(HeaderLimit, patience=patience, most=max(1, free - 4 * backlog)),
            backlog=backlog,
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
        engine = self.app.state.engine
        reason = f"the server is shutting down and the answer took longer than {self.drain} s"
        engine.draining = self.app.state.live.closing = True
        deadline = asyncio.get_running_loop().call_later(self.drain, engine.abort_all, reason)
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()
