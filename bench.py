"""What the engine does in a second, measured so that two programs can be laid side by side.

    python bench.py decode --quant int4 --compile --prompt 512 --gen 128 --batch 1 8 32 --threads 2 --json
    python bench.py claims                           each mechanism against its switch turned off: benchmarks/claims.py
    python bench.py versus --quant int4 --compile --peer transformers --peer "python other_bench.py model.gguf"
    python bench.py start --quant int4 --compile     from the command to its first token
    python bench.py perplexity --quant int4          (benchmarks/quality.py)
    python bench.py profile --quant int4 --compile   (benchmarks/quality.py)
    python bench.py serve | simulate | size | plots  load over HTTP, the scheduler alone, what fits, the pictures
    python bench.py maskbench DIR                    how many real JSON schemas compile: benchmarks/maskbench.py

Prefill and decode are two numbers, always: prefill is bound by arithmetic, decode by the bytes of the weights. Both are
measured through the engine as a user drives it, scheduling, sampling and detokenising included:

    prefill   one prompt of --prompt tokens, nothing cached: its tokens over the time to its first answer token
    decode    --batch sequences with 16-token prompts, --gen tokens each: all their tokens over the time of the steps
              after the first, so that no prefill is in it

Every figure is printed for every repetition, never only the best one. `versus` alternates with other programs (A B C
A B C ...) that print the same JSON keys, because a shared machine drifts: only ratios within one run mean anything.
benchmarks/peers.py drives transformers and llama.cpp for it.
Every command takes --json: one object on stdout, and nothing else. A flag that a command cannot use is refused by name.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import kernels
from benchmarks import claims as bench_claims
from benchmarks import maskbench as bench_maskbench
from benchmarks import peers as bench_peers
from benchmarks import plots as bench_plots
from benchmarks import quality as bench_quality
from benchmarks import serve as bench_serve
from benchmarks import simulate
from benchmarks import size as bench_size
from benchmarks.lab import decode, prefill_rate
from benchmarks.peers import medians
from benchmarks.roofline import decode_floor, read_bandwidth
from formats.command_line import as_command, flag, given, refuse_unused
from generate import LLM, add_engine_flags, engine_arguments, engine_rules
from kv_paged import blocks_needed

SCORING = (  # what of the engine a perplexity depends on: one prompt is computed, and nothing is drawn
    "model quant dtype device block_size num_blocks kv_memory kv_dtype max_model_len max_num_batched_tokens reserve "
    "chunked kernels threads trace"
)


def measure(args: argparse.Namespace) -> dict:
    """The figures of `decode`: load_s, prefill_tok_s and, per batch size, decode_tok_s, one entry per repetition."""
    llm = LLM(**engine_arguments(args), quiet=False)
    check_room(llm, max(args.batch), args.gen)
    prefill_rate(llm, args.prompt, seed=0)  # warm-up: pages of the pool are touched, caches filled
    decode(llm, min(args.batch), 8)
    prefill = [prefill_rate(llm, args.prompt, seed=1 + i) for i in range(args.repeat)]
    decoded = {str(b): [decode(llm, b, args.gen)[0] for _ in range(args.repeat)] for b in args.batch}
    bandwidth = read_bandwidth(llm.device)
    return {
        "load_s": round(llm.load_s, 3),
        "prefill_tok_s": [round(rate, 1) for rate in prefill],
        "decode_tok_s": {b: [round(rate, 1) for rate in rates] for b, rates in decoded.items()},
        "weight_bytes": llm.model.step_bytes,
        "bandwidth_gb_s": round(bandwidth / 1e9, 2),
        "floor_tok_s": round(decode_floor(bandwidth, llm.model.step_bytes, 0), 1),
    }


def check_room(llm: LLM, batch: int, gen: int) -> None:
    """Refuse sequences that would end early or wait for each other: their rate would be that of another workload."""
    length, size = 16 + gen + 2, llm.kv.block_size
    if length > llm.max_model_len:
        raise ValueError(f"--gen {gen} after 16 tokens needs a context of {length}, not {llm.max_model_len}: lower it")
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if (seats := getattr(llm.scheduler, name)) < batch:
            raise ValueError(f"--batch {batch} sequences in one step do not fit in {flag(name)} {seats}: raise it")
    if (needed := batch * blocks_needed(length, size)) > llm.scheduler.pool.total:
        raise ValueError(
            f"--batch {batch} of {length} tokens needs {needed} blocks, and the pool has {llm.scheduler.pool.total}: "
            "lower --batch or --gen, or raise --num-blocks or --kv-memory"
        )


def run_decode(args: argparse.Namespace) -> int:
    result = measure(args)
    if args.json:
        print(json.dumps(result))
        return 0
    for name, value in medians(result).items():
        print(f"{name:12} {value:9.1f} tok/s")
    share = medians(result).get("decode x1", 0.0) / result["floor_tok_s"]
    print(
        f"floor        {result['floor_tok_s']:9.1f} tok/s for one sequence: {result['weight_bytes'] / 1e6:.0f} MB a "
        f"step at {result['bandwidth_gb_s']} GB/s; reached {share:.0%}"
    )
    return 0


def run_versus(args: argparse.Namespace) -> int:
    """Take turns with the peers and print medians, and the ratios of every round."""
    ours = [sys.executable, __file__, "decode", "--json", *args.forwarded]
    sizes = ["--prompt", str(args.prompt), "--gen", str(args.gen), "--repeat", str(args.repeat)]
    sizes += ["--threads", str(args.threads or 2), "--batch", *map(str, args.batch)]
    peers = bench_peers.commands(args.peer, args.model)
    rounds = []
    for i in range(args.rounds):
        found = {}
        for name, command in {"vitrine": ours, **peers}.items():
            print(f"round {i + 1}/{args.rounds}: {name} ...", file=sys.stderr, flush=True)
            found[name] = bench_peers.medians_of(name, [*command, *sizes], args.batch)
        rounds.append(found)
    rows = {}
    for row in rounds[0]["vitrine"]:
        rows[row] = {"vitrine": statistics.median(found["vitrine"][row] for found in rounds), "peers": {}}
        for name in peers:
            ratios = [round(found["vitrine"][row] / found[name][row], 2) for found in rounds]
            rate = statistics.median(found[name][row] for found in rounds)
            rows[row]["peers"][name] = {"tok_s": rate, "ratio": statistics.median(ratios), "ratios": ratios}
    if args.json:
        print(json.dumps(rows))
        return 0
    for name in peers:
        print(f"{'tok/s':12} {'vitrine':>9} {name:>16}   ratio (of each round)")
        for row, r in rows.items():
            peer = r["peers"][name]
            print(f"{row:12} {r['vitrine']:9.1f} {peer['tok_s']:16.1f}   {peer['ratio']:.2f} {peer['ratios']}")
    return 0


def run_perplexity(args: argparse.Namespace) -> int:
    results = bench_quality.run_perplexity(args, engine_arguments(args))
    if args.json:
        print(json.dumps(results))
        return 0
    base = next(iter(results.values()))["perplexity"]
    for name, r in results.items():
        rise = f"{r['perplexity'] / base - 1:+.2%}"
        print(f"{name:28} {r['perplexity']:8.4f} {rise:>8}   {r['weight_bytes'] / 1e6:6.1f} MB, {r['tokens']} tokens")
    return 0


def run_profile(args: argparse.Namespace) -> int:
    llm = LLM(**engine_arguments(args), quiet=False)
    check_room(llm, max(args.batch), args.gen)
    result = {}
    for batch in args.batch:
        result[str(batch)] = {"step": bench_quality.run_profile(llm, batch, args.gen)}
        if kernels.backend() == "native" and args.quant and llm.model.dtype == torch.float32:
            result[str(batch)]["kernels"] = bench_quality.profile_kernels(llm, batch, 16 + args.gen)
    if args.json:
        print(json.dumps(result))
        return 0
    for batch, parts in result.items():
        print(f"decode step, {batch} sequences: {parts['step'].pop('whole step'):.3f} ms")
        for name, ms in sorted(parts["step"].items(), key=lambda item: -item[1]):
            print(f"  {name:24} {ms:8.3f} ms")
        for name, (ms, rate) in parts.get("kernels", {}).items():
            print(f"    {name:22} {ms:8.3f} ms" + (f"  {rate:5.1f} GB/s" if rate else ""))
    return 0


def run_simulate(argv: list[str]) -> int:
    return simulate.main(argv if "--cost" in argv else ["--simulate", *argv])


OTHERS = {  # commands with a parser of their own: {name: (run, what it is)}
    "maskbench": (bench_maskbench.main, "how many real JSON schemas compile and are judged rightly"),
    "plots": (bench_plots.main, "draw the pictures of the README from what is measured and counted"),
    "serve": (bench_serve.main, "load a server and see what its clients wait for"),
    "simulate": (run_simulate, "drive the scheduler alone with a synthetic workload"),
    "size": (bench_size.main, "what a model needs, what fits, and the floors: nothing is loaded"),
}


def run_start(args: argparse.Namespace) -> int:
    """Seconds from the command to its first token and to its end, in turn with what importing torch alone takes."""
    prompt = "Once upon a time"
    threads = ["--threads", str(args.threads)] if args.threads else []
    command = [sys.executable, str(Path(__file__).with_name("generate.py")), *args.forwarded, *threads]
    command += ["--prompt", prompt, "--max-tokens", "4"]
    seconds: dict[str, list[float]] = {"first_token_s": [], "end_s": [], "import_torch_s": []}
    for round_ in range(args.repeat + 1):
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            got = len(child.stdout.read(len(prompt) + 1))
            first = time.perf_counter() - began
            child.stdout.read()
        end = time.perf_counter() - began
        if child.returncode or got <= len(prompt):
            raise ValueError(f"no token came: run {shlex.join(command)} to see why")
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        if round_:  # the first one warms the caches
            taken = (first, end, time.perf_counter() - began - end)
            for times, value in zip(seconds.values(), taken, strict=True):
                times.append(round(value, 3))
    if args.json:
        print(json.dumps(seconds))
        return 0
    for name, times in seconds.items():
        print(f"{name.removesuffix('_s').replace('_', ' '):12} {statistics.median(times):6.2f} s   {times}")
    return 0


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench.py", description="Measure the vitrine engine.")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run: Callable, about: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=about)
        sub.set_defaults(run=run, parser=sub)
        sub.add_argument("--json", action="store_true")
        add_engine_flags(sub)
        return sub

    decode = command("decode", run_decode, "tokens per second of prefill and of decode at several batch sizes")
    versus = command("versus", run_versus, "the same, in turn with another program")
    profile = command("profile", run_profile, "where the time of a decode step goes")
    text = command("perplexity", run_perplexity, "what quantised weights and activations cost in quality")
    start = command("start", run_start, "seconds from the command to the first token, with warm caches")
    start.add_argument("--repeat", type=int, default=5, metavar="N")
    for sub in (decode, versus):
        sub.add_argument("--prompt", type=int, default=512, metavar="N", help="prompt tokens of the prefill figure")
        sub.add_argument("--repeat", type=int, default=3, metavar="N")
    for sub, batches in ((decode, [1, 8, 32]), (versus, [1, 8, 32]), (profile, [1, 32])):
        sub.add_argument("--gen", type=int, default=128, metavar="N", help="tokens each sequence decodes")
        sub.add_argument("--batch", type=int, nargs="+", default=batches, metavar="B")
    versus.add_argument(
        "--peer",
        action="append",
        required=True,
        metavar="P",
        help="transformers, llama.cpp:PYTHON:FILE.gguf or a command that prints the keys of decode; may be repeated",
    )
    versus.add_argument("--rounds", type=int, default=3, metavar="N")
    bench_claims.add_flags(command("claims", bench_claims.run, "what was claimed, and what one switch buys here"))
    text.add_argument("--text", metavar="FILE", help="another text than data/alice.txt")
    for name, (_, about) in OTHERS.items():
        commands.add_parser(name, help=about, add_help=False)
    args = parser.parse_args(argv)
    args.given = given(args.parser, argv[1:], args)
    for name in ("prompt", "gen", "repeat", "rounds", "threads"):
        if (value := getattr(args, name, None)) is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    if min(getattr(args, "batch", [1])) < 1:
        parser.error(f"--batch takes sizes of at least 1, got {args.batch}")
    check_given(args)
    batches = getattr(args, "batch", [1])
    if "max_num_seqs" not in args.given:
        args.max_num_seqs = max(args.max_num_seqs, *batches)
    if "max_num_batched_tokens" not in args.given:
        args.max_num_batched_tokens = max(args.max_num_batched_tokens, getattr(args, "prompt", 1), *batches)
    args.forwarded = engine_flags(args)
    return args


def check_given(args: argparse.Namespace) -> None:
    """Refuse flags of the engine that this command would take and not use."""
    unscored = [name for name in engine_arguments(args) if name not in SCORING.split()]
    refuse_unused(
        args.given,
        (unscored, args.command != "perplexity", "a text is scored in one plain request; leave it out"),
        *(engine_rules(args) if args.command != "claims" else []),
        (["seed"], args.command == "claims", "prompts are the same each time and answers not drawn; leave it out"),
        (["trace"], args.command not in ("start", "versus"), "the engine's lines are not shown; leave it out"),
    )


def engine_flags(args: argparse.Namespace) -> list[str]:
    """The flags of the engine that were given, for a child process; its threads are passed on elsewhere."""
    flags = []
    for name, value in engine_arguments(args).items():
        if name in args.given and isinstance(value, bool):
            flags.append(flag(name) if value else flag("no_" + name))
        elif name in args.given and name != "threads":
            flags += [flag(name), str(value)]
    return flags


@as_command
def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] and argv[0] in OTHERS:
        return OTHERS[argv[0]][0](argv[1:])
    args = parse_arguments(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
