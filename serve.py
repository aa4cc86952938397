"""The server: models over HTTP, as OpenAI's API and Ollama's.

    python serve.py --compile --quant int4
    python serve.py --model smollm2 --model other=path/to/folder --host 0.0.0.0 --api-key SECRET

and then, with any client of OpenAI's: base_url="http://127.0.0.1:8000/v1". The page is at http://127.0.0.1:8000/.

The idea. One thread owns the engine and steps it as long as there is work; the web framework's event loop only passes
requests to it and deltas back (serving/engine_thread.py), so every client joins the same batch:

    client ──► event loop ── request ──► engine thread: add, step, step, step ...
           ◄── chunks      ◄── deltas ──┘                   32 clients are 32 sequences of one batch

Exit code 0 after a clean end, 2 for what makes no sense. A second Ctrl-C ends at once.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import socket
import sys
from pathlib import Path

from formats.command_line import as_command, given, refuse_unused, warn
from generate import LLM, add_engine_flags, engine_arguments, engine_rules
from serving.app import Server, build_app
from serving.service import Limits

LOOPBACK = ("127.0.0.1", "::1", "localhost")
NUMBERS = (  # flag, type, default, least, most, its unit, help
    ("port", int, 8000, 0, 65535, None, "0 takes a free one"),
    ("max-queue", int, 1024, 0, 10**9, "N", "requests that may wait, per model"),
    ("max-body", int, Limits.max_body, 1, 10**12, "BYTES", "of a request"),
    ("max-choices", int, Limits.max_choices, 1, 10**9, "N", "answers per request"),
    ("stall", float, Limits.stall_seconds, 1e-3, 1e9, "S", "for clients who stop reading, or sending"),
    ("drain", float, 30.0, 0, 1e9, "S", "for open requests at the end"),
)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    about = "Serve models over HTTP, as OpenAI's API. --model [NAME=]M may be given several times."
    parser = argparse.ArgumentParser("serve.py", description=about, allow_abbrev=False)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 is everywhere (set a key)")
    key = os.environ.get("VITRINE_API_KEY") or None
    seen = "what clients must send; all users of this machine see it here, but not in $VITRINE_API_KEY"
    group.add_argument("--api-key", default=key, metavar="KEY", help=seen)
    cors = "allow pages of this origin"
    group.add_argument("--cors-origin", action="append", default=[], metavar="ORIGIN", help=cors)
    group.add_argument("--log-prompts", action="store_true", help="write prompts and answers to the log")
    for flag, kind, default, _, _, unit, meaning in NUMBERS:
        group.add_argument(f"--{flag}", type=kind, default=default, metavar=unit, help=meaning)
    add_engine_flags(parser)
    several = argparse.ArgumentParser(add_help=False, allow_abbrev=False)  # the one flag that means more here
    several.add_argument("--model", action="append")
    named, rest = several.parse_known_args(argv)
    args = parser.parse_args(rest)
    refuse_unused(given(parser, rest, args), *engine_rules(args))
    args.models = named.model or [args.model]
    for flag, _, _, least, most, _, _ in NUMBERS:
        value = getattr(args, flag.replace("-", "_"))
        if not least <= value <= most:  # (a NaN is not)
            parser.error(f"--{flag} must be from {least:,} to {most:,}, got {value}")
    if args.api_key is not None and (not args.api_key or args.api_key != args.api_key.strip()):
        parser.error("--api-key must not be empty, nor begin or end with a space: no client could send it")
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


def check_free(host: str, port: int) -> None:
    """Raise ValueError if nobody can listen there: found out later, the model would have been loaded in vain."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        remedy = "choose another --host or --port (0 takes a free one)"
        raise ValueError(f"the server cannot listen at {host} port {port} ({error.strerror}): {remedy}") from None


@as_command
def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    check_free(args.host, args.port)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    models = {}
    for name, model in named_models(args.models).items():
        models[name] = LLM(**(engine_arguments(args) | {"model": model}), quiet=False)
    gc.freeze()  # what was loaded stays: collections need not look at it again
    limits, local = Limits(args.max_body, args.max_choices, args.stall), args.host in LOOPBACK
    app = build_app(models, limits, args.max_queue, args.api_key, tuple(args.cors_origin), args.log_prompts, local)
    if not local and not args.api_key:
        warn(f"warning: {args.host} can be reached from outside, and there is no --api-key")
    if "*" in args.cors_origin and not args.api_key:
        warn("warning: --cors-origin '*' lets the pages of every site use this server, and there is no --api-key")

    def announce(address: str) -> None:
        warn(f"{address}/v1 serves {', '.join(models)}; the page is at {address}/")

    server = Server(app, args.host, args.port, args.drain, announce)
    server.run()
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
