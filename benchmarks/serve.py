"""A crowd of clients for a server, and what they had to wait for.

    python bench.py serve --quant int4 --compile --concurrency 32 --requests 128          closed loop
    python bench.py serve --rate 4 --workload shared --ttft-bound 0.5 --plot load.png     Poisson arrivals
    python bench.py serve --rates 1 2 4 8 --quant int4 --compile                          latency against load
    python bench.py serve --concurrency 32 --quant int4 --compile --peer COMMAND          in turn with another engine
    python bench.py serve --url http://127.0.0.1:8080 --json                              another server

The problem. Tokens per second of a full batch say little about a service. Users wait for the first token, then read at
the pace of the others; both depend on the load, and an average hides those who waited longest.

The idea. Two ways of arriving, three kinds of traffic (plain, one shared beginning, conversations), percentiles.

    closed loop   C clients, each sends its next request when the last has ended: finds the greatest throughput
    Poisson       R requests a second, answered or not, as users do: finds the rate above which the queue grows

TTFT is from sending a request to its first token, TPOT the mean time of the tokens after it, inter-token the gap
between two chunks as they arrive. Goodput (Zhong et al., "DistServe", OSDI 2024, section 2) counts the requests per
second within both bounds. A --peer decodes as many sequences as there are clients. Left out: traces of real services.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks import peers as bench_peers
from formats.command_line import as_command, given, refuse_unused, warn
from native.machine import usable_threads

WORDS = "time year people way day man thing woman life child world school state family student group country".split()
QUANTILES = (50, 95, 99)
NOTHING = "the answer held no text"


@dataclass
class Answer:
    """What one request saw: seconds since it was sent, for each chunk with text; and how it ended."""

    sent: float
    chunks: list[float] = field(default_factory=list)
    tokens: int = 0
    text: str = ""
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.chunks[0]

    @property
    def tpot(self) -> float | None:
        return (self.chunks[-1] - self.chunks[0]) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False)]


# -- one request


async def ask(url: str, key: str | None, body: dict) -> Answer:
    """Stream one chat completion, recording when each piece arrives."""
    target = urlsplit(url)
    content = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST {target.path.rstrip('/')}/v1/chat/completions HTTP/1.1\r\nHost: {target.netloc}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\nConnection: close\r\n"
    head += f"Authorization: Bearer {key}\r\n\r\n" if key else "\r\n"
    answer = Answer(time.perf_counter())
    try:
        reader, writer = await asyncio.open_connection(target.hostname, target.port or 80, limit=1 << 20)
        try:
            writer.write(head.encode() + content)
            await read_answer(reader, answer)
        finally:
            writer.close()
    except (OSError, asyncio.IncompleteReadError, ValueError, LookupError, TypeError, AttributeError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    if answer.error is None and not answer.chunks:
        answer.error = NOTHING
    elif answer.error is None and not answer.tokens:
        answer.error = "the answer came without a count of its tokens (usage)"
    return answer


async def read_answer(reader: asyncio.StreamReader, answer: Answer) -> None:
    """Read a streamed answer in HTTP's chunked encoding, event by event."""
    status = await reader.readline()
    while (await reader.readline()).strip():
        pass
    if b" 200 " not in status:
        answer.error = status.decode("latin-1").strip() or "the connection was closed without an answer"
        return
    unread = b""
    while size := int(await reader.readline(), 16):
        unread += (await reader.readexactly(size + 2))[:-2]
        *events, unread = unread.split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                record(answer, json.loads(event[6:]))


def record(answer: Answer, event: dict) -> None:
    if "error" in event:
        answer.error = event["error"]["message"]
    text = "".join(choice["delta"].get("content") or "" for choice in event.get("choices", []))
    if text:
        answer.chunks.append(time.perf_counter() - answer.sent)
        answer.text += text
    if event.get("usage"):
        answer.tokens = int(event["usage"]["completion_tokens"])


# -- the crowd


def words(draw: random.Random, n: int) -> str:
    return " ".join(draw.choices(WORDS, k=n))


async def session(number: int, args: argparse.Namespace, url: str) -> list[Answer]:
    """What one client does once: a request, or with --workload turns a conversation of several."""
    draw = random.Random(f"{args.load_seed} {number}")
    shared = words(random.Random(args.load_seed), args.shared) + ". " if args.workload == "shared" else ""
    messages, answers = [], []
    for _ in range(args.turns if args.workload == "turns" else 1):
        messages.append({"role": "user", "content": f"{shared}{number}: {words(draw, args.prompt)}"})
        body = {"messages": messages, "max_tokens": args.gen, "temperature": 0, "ignore_eos": True}
        answers.append(await ask(url, args.api_key, body))
        if answers[-1].error:
            break
        messages.append({"role": "assistant", "content": answers[-1].text})
    return answers


async def crowd(
    args: argparse.Namespace, run: Callable[[int], Awaitable[list[Answer]]], rate: float | None, first: int
) -> list[Answer]:
    """All sessions, counted from `first`: at Poisson arrivals, or without a rate in closed loop."""
    answers: list[Answer] = []
    numbers = iter(range(first, first + args.requests))
    if rate:
        draw, tasks = random.Random(args.load_seed), []
        for number in numbers:
            tasks.append(asyncio.create_task(run(number)))
            await asyncio.sleep(draw.expovariate(rate))
        for done in await asyncio.gather(*tasks):
            answers += done
        return answers

    async def client() -> None:
        for number in numbers:
            answers.extend(await run(number))

    await asyncio.gather(*(client() for _ in range(args.concurrency)))
    return answers


# -- what it comes to


def percentile(values: list[float], q: float) -> float | None:
    """The smallest value that at least q percent of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q / 100 * len(ordered)) - 1)] if ordered else None


def summary(answers: list[Answer], seconds: float, ttft_bound: float, tpot_bound: float) -> dict:
    """The figures, as --json prints them. Times are in seconds."""
    good = [a for a in answers if a.error is None]
    columns = {"ttft_s": [a.ttft for a in good], "tpot_s": [a.tpot for a in good if a.tpot is not None]}
    columns["inter_token_s"] = [gap for answer in good for gap in answer.gaps]
    within = [a for a in good if a.ttft <= ttft_bound and (a.tpot is None or a.tpot <= tpot_bound)]
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
    } | {name: {f"p{q}": percentile(values, q) for q in QUANTILES} for name, values in columns.items()}


def in_ms(seconds: float | None) -> str:
    """A cell of a table; "-" where no answer came."""
    return f"{'-':>9}" if seconds is None else f"{seconds * 1e3:9.1f}"


def table(figures: dict) -> str:
    lines = [
        f"{figures['requests']} requests ({figures['failed']} failed) in {figures['seconds']:.1f} s: "
        f"{figures['requests_s']:.2f} requests/s, {figures['tokens_s']:.1f} tokens/s",
        f"goodput {figures['goodput_s']:.2f} requests/s with TTFT <= {figures['ttft_bound_s']} s and "
        f"TPOT <= {figures['tpot_bound_s']} s",
        f"{'':12} {'p50':>9} {'p95':>9} {'p99':>9}   ms",
    ]
    for name in ("ttft_s", "tpot_s", "inter_token_s"):
        row = [figures[name][f"p{q}"] for q in QUANTILES]
        cells = " ".join(map(in_ms, row))
        lines.append(f"{name.removesuffix('_s'):12} {cells}")
    before, after = figures["server_bytes"]
    if before and after:
        lines.append(f"memory of the server {before / 1e6:.0f} MB before, {after / 1e6:.0f} MB after")
    return "\n".join([*lines, *figures["errors"]])


def plot(answers: list[Answer], path: Path) -> None:
    """Cumulative shares of TTFT and of inter-token gaps: how many waited at most so long."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    good = [answer for answer in answers if answer.error is None]
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for panel, title, values in (
        (panels[0], "time to first token", [answer.ttft for answer in good]),
        (panels[1], "between two chunks", [gap for answer in good for gap in answer.gaps]),
    ):
        panel.ecdf([value * 1e3 for value in values] or [0.0])
        panel.set(title=title, xlabel="ms", ylabel="share that waited at most so long", xscale="log")
        panel.grid(alpha=0.3)
    figure.savefig(path)


# -- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench.py serve`, beside those of the engine."""
    parser.add_argument("--url", help="of a running server; without it serve.py is started with the engine's flags")
    parser.add_argument("--model", action="append", metavar="M", help="of the server that is started, and of a peer")
    parser.add_argument("--api-key", metavar="KEY")
    parser.add_argument("--workload", choices=("plain", "shared", "turns"), default="plain")
    parser.add_argument("--concurrency", type=int, default=8, metavar="C", help="clients in closed loop")
    parser.add_argument("--rate", type=float, metavar="R", help="Poisson arrivals per second, instead of a closed loop")
    parser.add_argument("--rates", type=float, nargs="+", metavar="R", help="one rate after another")
    parser.add_argument("--requests", type=int, default=64, metavar="N", help="sessions in all, or of each rate")
    parser.add_argument("--prompt", type=int, default=64, metavar="N", help="words of a message")
    parser.add_argument("--gen", type=int, default=64, metavar="N", help="tokens of an answer")
    parser.add_argument("--shared", type=int, default=256, metavar="N", help="words of the common beginning")
    parser.add_argument("--turns", type=int, default=4, metavar="N", help="turns of a conversation")
    parser.add_argument("--ttft-bound", type=float, default=1.0, metavar="S", help="for goodput")
    parser.add_argument("--tpot-bound", type=float, default=0.1, metavar="S", help="for goodput")
    parser.add_argument("--load-seed", type=int, default=0, metavar="N", help="of the traffic")
    parser.add_argument("--peer", action="append", metavar="P", help="another engine, as in versus; may be repeated")
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of server and peers (default 2)")
    parser.add_argument("--threads", type=int, metavar="N", help="of the server and of the peers; default: all")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true")


def check_arguments(args: argparse.Namespace, engine_flags: list[str], words: set[str]) -> None:
    """Refuse values that mean nothing, and flags (`words`: those given) that do not belong to this load."""
    refuse_unused(
        words,
        (["shared"], args.workload == "shared", "add --workload shared"),
        (["turns"], args.workload == "turns", "add --workload turns"),
        (["concurrency"], args.rate is None and args.rates is None, "at a rate there is no such limit; leave it out"),
        (["rounds"], args.peer, "it counts turns with a --peer; name one"),
    )
    for name in ("concurrency", "requests", "prompt", "gen", "shared", "turns", "rounds", "threads"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name}={getattr(args, name)}: must be at least 1")
    for rate in [*([] if args.rate is None else [args.rate]), *(args.rates or [])]:
        if not 0 < rate < math.inf:
            raise ValueError(f"a rate of {rate}: must be a positive number of requests per second")
    for name in ("ttft_bound", "tpot_bound"):
        if not 0 < getattr(args, name) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')}={getattr(args, name)}: must be a positive number of seconds")
    if args.url and (urlsplit(args.url).scheme != "http" or not urlsplit(args.url).hostname):
        raise ValueError(f"--url={args.url!r}: must look like http://127.0.0.1:8000")
    if args.plot and not args.plot.parent.is_dir():
        raise ValueError(f"--plot={str(args.plot)!r}: there is no folder {str(args.plot.parent)!r}")
    own = [f"--{name}" for name in ("model", "threads") if getattr(args, name) is not None and not args.peer]
    if args.url and engine_flags + own:
        raise ValueError(f"{' '.join(engine_flags + own)}: the server at --url has its own settings; leave them out")
    if sum(map(bool, (args.rate, args.rates, args.peer))) > 1:
        raise ValueError("--rate, --rates and --peer (a closed loop) are three ways to load a server: choose one")
    if args.plot and (args.rates or args.peer):
        raise ValueError("--plot draws one load: leave out --rates and --peer")


def measure(args: argparse.Namespace, url: str, rate: float | None = None, first: int = 0) -> tuple[dict, list[Answer]]:
    """Send the load and sum up. One request goes first, unmeasured: it warms caches up."""

    async def load() -> tuple[list[Answer], float]:
        warm = await ask(url, args.api_key, {"messages": [{"role": "user", "content": "warm-up"}], "max_tokens": 4})
        if warm.error not in (None, NOTHING):
            raise ValueError(f"{url} does not answer: {warm.error}")
        start = time.perf_counter()
        answers = await crowd(args, lambda number: session(number, args, url), rate, first)
        return answers, time.perf_counter() - start

    before = resident_bytes(url, args.api_key)
    answers, seconds = asyncio.run(load())
    held = {"server_bytes": [before, resident_bytes(url, args.api_key)]}
    return summary(answers, seconds, args.ttft_bound, args.tpot_bound) | held, answers


def resident_bytes(url: str, key: str | None) -> int | None:
    """What the server's /metrics says of its memory; None if it has none, or says nothing of it."""
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {key}"} if key else {})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as the load itself goes
    try:
        with direct.open(request, timeout=10) as answer:
            size = re.search(r"^process_resident_memory_bytes (\S+)$", answer.read().decode(), re.MULTILINE)
    except (OSError, ValueError):
        return None
    return int(float(size[1])) if size else None


def sweep(args: argparse.Namespace, url: str) -> dict:
    """{"rates": [the figures of each]}; no prompt comes twice, so that no rate finds the cache of another."""
    rows = []
    for i, rate in enumerate(args.rates):
        warn(f"{rate:g} requests a second ...")
        rows.append({"rate": rate} | measure(args, url, rate, i * args.requests)[0])
    return {"rates": rows}


def in_turn_with_peers(args: argparse.Namespace, url: str) -> dict:
    """The closed loop in turn with the peers: {"rounds": [figures], "peers": {name: {tok_s, ratio, ratios}}}."""
    peers = bench_peers.commands(args.peer, args.model[0] if args.model else "smollm2")
    sizes = ["--prompt", "64", "--gen", str(args.gen), "--repeat", "1", "--batch", str(args.concurrency)]
    sizes += ["--threads", str(args.threads or usable_threads()[0])]
    rounds, rates = [], {name: [] for name in peers}
    for i in range(args.rounds or 2):
        warn(f"round {i + 1} ...")
        rounds.append(measure(args, url, first=i * args.requests)[0])
        for name, command in peers.items():
            rows = bench_peers.medians_of(name, [*command, *sizes], [args.concurrency])
            rates[name].append(rows[f"decode x{args.concurrency}"])
    beside = {}
    for name, tok_s in rates.items():
        ratios = [round(ours["tokens_s"] / theirs, 2) for ours, theirs in zip(rounds, tok_s, strict=True)]
        beside[name] = {"tok_s": tok_s, "ratio": statistics.median(ratios), "ratios": ratios}
    return {"rounds": rounds, "peers": beside}


def as_text(result: dict) -> str:
    """What is printed without --json: of one load, of several rates, or of rounds with peers."""
    if "rates" in result:
        lines = [f"{'rate':>8} {'failed':>7} {'tok/s':>8} {'goodput':>8}   TTFT p50, p95 ms     TPOT p50, p95 ms"]
        for row in result["rates"]:
            a, b, c, d = (in_ms(row[name][q]) for name in ("ttft_s", "tpot_s") for q in ("p50", "p95"))
            head = f"{row['rate']:8g} {row['failed']:7} {row['tokens_s']:8.1f} {row['goodput_s']:8.2f}"
            lines.append(f"{head}  {a} {b}  {c} {d}")
        return "\n".join(lines)
    if "peers" not in result:
        return table(result)
    ours = [round(figures["tokens_s"], 1) for figures in result["rounds"]]
    lines = [table(figures) + "\n" for figures in result["rounds"]] + [f"server {ours} tok/s"]
    for name, peer in result["peers"].items():
        lines.append(f"{name} {peer['tok_s']} tok/s: the server has {peer['ratio']:.2f} of it {peer['ratios']}")
    return "\n".join(lines)


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


def run(args: argparse.Namespace, engine_flags: list[str]) -> int:
    """Measure the server at --url, or one that is started for it."""
    with server(args, engine_flags) as url:
        if args.rates or args.peer:
            result = sweep(args, url) if args.rates else in_turn_with_peers(args, url)
        else:
            result, answers = measure(args, url, args.rate)
    if args.plot:
        plot(answers, args.plot)
    print(json.dumps(result) if args.json else as_text(result))
    return int(any(figures["failed"] for figures in result.get("rates") or result.get("rounds") or [result]))


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
    parser = argparse.ArgumentParser(
        "benchmarks/serve.py", description="Load a server; all other flags go to serve.py.", allow_abbrev=False
    )
    add_arguments(parser)
    args, engine_flags = parser.parse_known_args(argv)
    check_arguments(args, engine_flags, given(parser, argv, args))
    return run(args, engine_flags)


if __name__ == "__main__":
    sys.exit(main())
