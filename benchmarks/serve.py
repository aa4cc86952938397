"""A crowd of clients for a server, and what they had to wait for.

    python bench.py serve --quant int4 --compile --concurrency 32 --requests 128          closed loop
    python bench.py serve --rates 1 2 4 8 --workload shared --ttft-bound 0.5              latency against load
    python bench.py serve --concurrency 32 --quant int4 --compile --peer COMMAND          in turn with another engine
    python bench.py serve --url http://127.0.0.1:8080 --json                              another server

The problem. Users wait for the first token, then read at the pace of the others; both depend on the load, and an
average hides those who waited longest.

The idea. Three kinds of traffic arrive in one of two ways. A closed loop (C clients, each sends its next request when
its last has ended) finds the greatest throughput; Poisson arrivals, answered or not, the rate at which a queue grows.

TTFT is from sending a request to its first token, TPOT the mean time of the tokens after it. Goodput (Zhong et al.,
"DistServe", OSDI 2024) counts requests per second within bounds on both. Left out: traces of real services.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks import peers as bench_peers
from benchmarks.figures import lines, ratios, spread, table
from formats.command_line import as_command, flag, given, refuse_unused, warn
from native.machine import usable_threads

WORDS = "time year people way day man thing woman life child world school state family student group country".split()
NO_TEXT = "the answer held no text"


@dataclass
class Answer:
    """What one request saw: seconds since it was sent, for each chunk with text; and how it ended."""

    sent: float
    chunks: list[float] = field(default_factory=list)
    tokens: int = 0
    text: str = ""
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        return (self.chunks[-1] - self.chunks[0]) / (self.tokens - 1) if self.tokens > 1 else None


async def ask(url: str, key: str | None, body: dict) -> Answer:
    """Stream one chat completion, recording when each piece arrives. Plain HTTP: a client library would cost more."""
    target, answer = urlsplit(url), Answer(time.perf_counter())
    content = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST {target.path.rstrip('/')}/v1/chat/completions HTTP/1.1\r\nHost: {target.netloc}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\nConnection: close\r\n"
    head += f"Authorization: Bearer {key}\r\n\r\n" if key else "\r\n"
    try:
        reader, writer = await asyncio.open_connection(target.hostname, target.port or 80, limit=1 << 20)
        with contextlib.closing(writer):
            writer.write(head.encode() + content)
            await read_answer(reader, answer)
        if not answer.chunks:
            raise ValueError(NO_TEXT)
        if not answer.tokens:
            raise ValueError("the answer came without a count of its tokens (usage)")
    except Exception as error:  # whatever another server says, or leaves out, is a failure of this request alone
        answer.error = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
    return answer


async def read_answer(reader: asyncio.StreamReader, answer: Answer) -> None:
    """Read a streamed answer in HTTP's chunked encoding, event by event."""
    status, unread = await reader.readline(), b""
    if b" 200 " not in status:
        raise ValueError(status.decode("latin-1").strip() or "the connection was closed without an answer")
    while (await reader.readline()).strip():
        pass  # the other headers
    while size := int(await reader.readline(), 16):
        unread += (await reader.readexactly(size + 2))[:-2]
        *events, unread = unread.split(b"\n\n")
        for event in (json.loads(event[6:]) for event in events if event.startswith(b"data: {")):
            if "error" in event:
                raise ValueError(event["error"]["message"])
            text = "".join(choice["delta"].get("content") or "" for choice in event.get("choices", []))
            if text:
                answer.chunks.append(time.perf_counter() - answer.sent)
                answer.text += text
            if event.get("usage"):
                answer.tokens = int(event["usage"]["completion_tokens"])


async def session(number: int, args: argparse.Namespace, url: str) -> list[Answer]:
    """What one client does once: a request, or with --workload turns a conversation of several."""

    def words(draw: random.Random, n: int) -> str:
        return " ".join(draw.choices(WORDS, k=n))

    draw, messages, answers = random.Random(f"{args.load_seed} {number}"), [], []
    shared = words(random.Random(args.load_seed), args.shared) + ". " if args.workload == "shared" else ""
    for _ in range(args.turns if args.workload == "turns" else 1):
        messages.append({"role": "user", "content": f"{shared}{number}: {words(draw, args.prompt)}"})
        body = {"messages": messages, "max_tokens": args.gen, "temperature": 0, "ignore_eos": True}
        answers.append(await ask(url, args.api_key, body))
        if answers[-1].error:
            break
        messages.append({"role": "assistant", "content": answers[-1].text})
    return answers


async def crowd(args: argparse.Namespace, url: str, rate: float | None, first: int) -> list[Answer]:
    """All sessions, counted from `first`: at Poisson arrivals, or without a rate in closed loop."""
    numbers, sessions = iter(range(first, first + args.requests)), []

    async def client() -> list[Answer]:
        return [answer for number in numbers for answer in await session(number, args, url)]

    if rate is None:
        sessions = [client() for _ in range(args.concurrency)]
    else:
        draw = random.Random(args.load_seed)
        for number in numbers:
            sessions.append(asyncio.create_task(session(number, args, url)))
            await asyncio.sleep(draw.expovariate(rate))
    return [answer for answers in await asyncio.gather(*sessions) for answer in answers]


def measure(args: argparse.Namespace, url: str, rate: float | None = None, first: int = 0) -> dict:
    """Send the load and sum up. One request goes first, unmeasured: it warms caches up."""

    async def load() -> dict:
        warm = await ask(url, args.api_key, {"messages": [{"role": "user", "content": "warm-up"}], "max_tokens": 4})
        if warm.error not in (None, NO_TEXT):
            raise ValueError(f"{url} does not answer: {warm.error}")
        start = time.perf_counter()
        answers = await crowd(args, url, rate, first)
        return summary(answers, time.perf_counter() - start, args.ttft_bound, args.tpot_bound)

    return asyncio.run(load())


def summary(answers: list[Answer], seconds: float, ttft_bound: float, tpot_bound: float) -> dict:
    """The figures, as --json prints them. Times are in seconds, and None where no answer has one."""
    good = [a for a in answers if a.error is None]
    gaps = [b - a for answer in good for a, b in zip(answer.chunks, answer.chunks[1:], strict=False)]
    within = [a for a in good if a.chunks[0] <= ttft_bound and (a.tpot is None or a.tpot <= tpot_bound)]
    return {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "errors": sorted({answer.error for answer in answers if answer.error})[:5],
        "seconds": seconds,
        "requests_s": len(good) / seconds,
        "tokens_s": sum(answer.tokens for answer in good) / seconds,
        "goodput_s": len(within) / seconds,
        "ttft_bound_s": ttft_bound,
        "tpot_bound_s": tpot_bound,
        "ttft_s": spread(a.chunks[0] for a in good),
        "tpot_s": spread(a.tpot for a in good if a.tpot is not None),
        "inter_token_s": spread(gaps),
    }


def in_turn_with_peers(args: argparse.Namespace, url: str) -> dict:
    """The closed loop in turn with the peers: {"rounds": [figures], "peers": {name: {tok_s, ratio, ratios}}}."""
    peers = bench_peers.commands(args.peer, args.model[0] if args.model else "smollm2")
    sizes = ["--prompt", "64", "--gen", str(args.gen), "--repeat", "1", "--batch", str(args.concurrency)]
    sizes += ["--threads", str(args.threads or usable_threads()[0])]
    rounds, rates = [], {name: [] for name in peers}
    for i in range(args.rounds or 2):
        warn(f"round {i + 1} ...")
        rounds.append(measure(args, url, first=i * args.requests))
        for name, command in peers.items():
            rows = bench_peers.medians_of(name, [*command, *sizes], [args.concurrency])
            rates[name].append(rows[f"decode x{args.concurrency}"])
    ours = [figures["tokens_s"] for figures in rounds]
    return {"rounds": rounds, "peers": {n: {"tok_s": r} | ratios(ours, r) for n, r in rates.items()}}


def as_text(result: dict) -> str:
    """What is printed without --json: of one load, of several rates, or of rounds with peers."""

    def row(load: dict) -> dict:
        row = {"failed": load["failed"], "tok/s": load["tokens_s"], "goodput": load["goodput_s"]}
        return row | {f"{name}_{q}_s": load[f"{name}_s"][q] for name in ("ttft", "tpot") for q in ("p50", "p95")}

    if "rates" in result:
        return table([{"rate": load["rate"]} | row(load) for load in result["rates"]])
    if "peers" in result:
        return f"{table([row(load) for load in result['rounds']])}\n{lines(result['peers'])}"
    return lines(result)


# -- the command


def parser_of_flags() -> argparse.ArgumentParser:
    """The flags of `bench.py serve`, beside those of the engine."""
    about = "Load a server; all other flags go to serve.py."
    parser = argparse.ArgumentParser("bench.py serve", description=about, allow_abbrev=False)
    parser.add_argument("--url", help="of a running server; without it serve.py is started with the engine's flags")
    parser.add_argument("--model", action="append", metavar="M", help="of the server that is started, and of a peer")
    parser.add_argument("--api-key", metavar="KEY")
    parser.add_argument("--workload", choices=("plain", "shared", "turns"), default="plain")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--rate", type=float, metavar="R", help="Poisson arrivals per second, instead of a closed loop")
    load.add_argument("--rates", type=float, nargs="+", metavar="R", help="one rate after another")
    load.add_argument("--peer", action="append", metavar="P", help="another engine, as in versus; may be repeated")
    for name, default, text in (
        ("concurrency", 8, "clients in closed loop"),
        ("requests", 64, "sessions in all, or of each rate"),
        ("prompt", 64, "words of a message"),
        ("gen", 64, "tokens of an answer"),
        ("shared", 256, "words of the common beginning"),
        ("turns", 4, "turns of a conversation"),
        ("load-seed", 0, "of the traffic"),
        ("rounds", None, "turns of server and peers (default 2)"),
        ("threads", None, "of the server and of the peers; default: all"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    parser.add_argument("--ttft-bound", type=float, default=1.0, metavar="S", help="for goodput")
    parser.add_argument("--tpot-bound", type=float, default=0.1, metavar="S", help="for goodput")
    parser.add_argument("--json", action="store_true")
    return parser


def check(args: argparse.Namespace, words: set[str], engine_flags: list[str]) -> None:
    """Refuse values that mean nothing, and flags (`words`: those given) that do not belong to this load."""
    at_a_rate = args.rate is not None or args.rates is not None
    refuse_unused(
        words,
        (["shared"], args.workload == "shared", "add --workload shared"),
        (["turns"], args.workload == "turns", "add --workload turns"),
        (["concurrency"], not at_a_rate, "at a rate there is no such limit; leave it out"),
        (["rounds"], args.peer, "it counts turns with a --peer; name one"),
        (["model", "threads"], not args.url or args.peer, "the server at --url has its own settings; leave them out"),
    )
    for name in words - {"load_seed"}:
        value = getattr(args, name)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, (int, float)) and not 0 < number < math.inf:
                raise ValueError(f"{flag(name)}={number}: must be a positive number")
    if args.url and (urlsplit(args.url).scheme != "http" or not urlsplit(args.url).hostname):
        raise ValueError(f"--url={args.url!r}: must look like http://127.0.0.1:8000")
    if args.url and engine_flags:
        raise ValueError(f"{' '.join(engine_flags)}: the server at --url has its own settings; leave them out")


@contextlib.contextmanager
def server(args: argparse.Namespace, engine_flags: list[str]) -> Iterator[str]:
    """The address of the server at --url, or of one that is started with the engine's flags and ended afterwards."""
    if args.url:
        yield args.url.rstrip("/").removesuffix("/v1")
        return
    command = [sys.executable, str(Path(__file__).parent.parent / "serve.py"), "--port", "0", *engine_flags]
    command += [word for model in args.model or [] for word in ("--model", model)]
    command += ["--threads", str(args.threads)] if args.threads else []
    command += ["--api-key", args.api_key] if args.api_key else []
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield wait_for_address(child)
    finally:
        child.terminate()
        child.wait()


def wait_for_address(child: subprocess.Popen) -> str:
    """The address that a starting serve.py announces; its log is read on by a thread, so that it never blocks."""
    log = []
    for line in child.stderr:
        log.append(line)
        if address := re.search(r"(http://\S+)/v1 serves", line):
            threading.Thread(target=child.stderr.read, daemon=True).start()
            return address[1]
    raise ValueError(f"serve.py did not start: {''.join(log)[-500:].strip()}")


@as_command
def main(argv: list[str] | None = None) -> int:
    parser = parser_of_flags()
    args, engine_flags = parser.parse_known_args(argv)
    check(args, given(parser, argv, args), engine_flags)
    with server(args, engine_flags) as url:
        if args.peer:
            result = in_turn_with_peers(args, url)
        elif args.rates:  # no prompt comes twice, so that no rate finds the cache of another
            loads = enumerate(args.rates)
            result = {"rates": [{"rate": rate} | measure(args, url, rate, i * args.requests) for i, rate in loads]}
        else:
            result = measure(args, url, args.rate)
    print(json.dumps(result) if args.json else as_text(result))
    failures = [load for load in result.get("rates") or result.get("rounds") or [result] if load["failed"]]
    if failures and not args.json:
        warn(f"failed: {'; '.join(sorted({error for load in failures for error in load['errors']}))}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
