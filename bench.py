"""What the engine does in a second, measured so that two programs can be laid side by side.

    python bench.py decode --quant int4 --compile --prompt 512 --gen 128 --batch 1 8 32 --threads 2 --json
    python bench.py claims                           each mechanism against its switch turned off
    python bench.py versus --quant int4 --compile --peer transformers --peer "python other_bench.py model.gguf"
    python bench.py start | perplexity | profile     seconds to the first token, quality, where a step's time goes
    python bench.py serve | simulate | size | plots | maskbench DIR          (each has a file in benchmarks/)

Prefill is bound by arithmetic, decode by the bytes of the weights, so they are two numbers, always. Both are measured
as a user drives the engine: one prompt of --prompt tokens to its first answer token, and --batch sequences with
16-token prompts, --gen tokens each, without the step that computes the prompts.

`versus` alternates with programs that print the same JSON keys, because a shared machine drifts: only ratios within one
run mean anything. With --json stdout is one object. A flag that a command cannot use is refused by name.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

from benchmarks import claims, maskbench, peers, plots, quality, serve, simulate, size
from benchmarks.figures import lines
from benchmarks.lab import decode, prefill_rate
from benchmarks.roofline import decode_floor, read_bandwidth
from formats.command_line import as_command, flag, given, refuse_unused, value_of
from generate import LLM, add_engine_flags, engine_arguments, engine_rules
from kv_paged import blocks_needed

SCORING = (  # what of the engine a perplexity depends on: one prompt is computed, and nothing is drawn
    "model quant dtype device block_size num_blocks kv_memory kv_dtype max_model_len max_num_batched_tokens reserve "
    "chunked kernels threads trace"
)


def measure(args: argparse.Namespace) -> dict:
    """The figures of `decode`: load_s, prefill_tok_s and, per batch size, decode_tok_s, one entry per repetition."""
    llm = open_engine(args)
    prefill_rate(llm, args.prompt, seed=0)  # warm-up: pages of the pool are touched, caches filled
    decode(llm, min(args.batch), 8)
    times, bandwidth = range(args.repeat), read_bandwidth(llm.device)
    return {
        "load_s": round(llm.load_s, 3),
        "prefill_tok_s": [round(prefill_rate(llm, args.prompt, seed=1 + i), 1) for i in times],
        "decode_tok_s": {str(b): [round(decode(llm, b, args.gen)[0], 1) for _ in times] for b in args.batch},
        "weight_bytes": llm.model.step_bytes,
        "bandwidth_gb_s": round(bandwidth / 1e9, 2),
        "floor_tok_s": round(decode_floor(bandwidth, llm.model.step_bytes, 0), 1),
    }


def open_engine(args: argparse.Namespace) -> LLM:
    """Refuses sequences that would end early or wait for each other: their rate would be that of another workload."""
    llm = LLM(**engine_arguments(args), quiet=False)
    batch, length, scheduler = max(args.batch), 16 + args.gen + 2, llm.scheduler
    if length > llm.max_model_len:
        raise ValueError(f"--gen {args.gen} after 16 tokens needs a context of {length}, not {llm.max_model_len}")
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if (limit := getattr(scheduler, name)) < batch:
            raise ValueError(f"--batch {batch} sequences in one step do not fit in {flag(name)} {limit}: raise it")
    if (needed := batch * blocks_needed(length, llm.kv.block_size)) > scheduler.pool.total:
        raise ValueError(
            f"--batch {batch} of {length} tokens needs {needed} blocks, and the pool has {scheduler.pool.total}: "
            "lower --batch or --gen, or raise --num-blocks or --kv-memory"
        )
    return llm


def decode_text(result: dict) -> str:
    rates, floor = peers.medians(result), result["floor_tok_s"]
    share = f"{rates['decode x1'] / floor:.0%}" if "decode x1" in rates else None
    names = ("weight_bytes", "bandwidth_gb_s", "floor_tok_s")
    return lines(rates | {name: result[name] for name in names} | {"reached by one sequence": share})


def versus(args: argparse.Namespace) -> dict:
    sizes = ["--prompt", args.prompt, "--gen", args.gen, "--repeat", args.repeat, "--threads", args.threads or 2]
    ours = [sys.executable, __file__, "decode", "--json", *args.forwarded]
    others = peers.commands(args.peer, args.model)
    return peers.in_turn(ours, others, [*map(str, [*sizes, "--batch", *args.batch])], args.batch, args.rounds)


def profile(args: argparse.Namespace) -> dict:
    llm = open_engine(args)
    return {str(batch): quality.profile(llm, batch, args.gen) for batch in args.batch}


# {command: (figures, as text, what it is)}; a command without a text prints for itself and returns its exit code
COMMANDS: dict[str, tuple[Callable, Callable | None, str]] = {
    "decode": (measure, decode_text, "tokens per second of prefill and of decode at several batch sizes"),
    "versus": (versus, peers.versus_table, "the same, in turn with another program"),
    "profile": (profile, quality.profile_table, "where the time of a decode step goes"),
    "perplexity": (quality.perplexities, quality.quality_table, "what quantised weights and activations cost"),
    "start": (quality.start, lines, "seconds from the command to the first token, with warm caches"),
    "claims": (claims.run, None, "what was claimed, and what one switch buys here"),
}
OTHERS = {  # commands with a parser of their own: {name: (run, what it is)}
    "maskbench": (maskbench.main, "how many real JSON schemas compile and are judged rightly"),
    "plots": (plots.main, "draw the pictures of the README from what is measured and counted"),
    "serve": (serve.main, "load a server and see what its clients wait for"),
    "simulate": (simulate.main, "drive the scheduler alone with a synthetic workload"),
    "size": (size.main, "what a model needs, what fits, and the floors: nothing is loaded"),
}


def count(text: str) -> int:
    if int(text) < 1:
        raise ValueError("must be at least 1")
    return int(text)


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench.py", description="Measure the vitrine engine.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, about) in OTHERS.items():
        commands.add_parser(name, help=about, add_help=False)
    subs = {name: commands.add_parser(name, help=about) for name, (*_, about) in COMMANDS.items()}
    for sub in subs.values():
        sub.set_defaults(parser=sub)
        sub.add_argument("--json", action="store_true")
        add_engine_flags(sub)
    for names, word, default, text in (
        ("decode versus", "prompt", 512, "prompt tokens of the prefill"),
        ("decode versus profile", "gen", 128, "tokens each sequence decodes"),
        ("decode versus start", "repeat", 3, None),
        ("decode versus profile", "batch", [1, 8, 32], "sequences at once"),
        ("versus", "rounds", 3, None),
    ):
        many = {"nargs": "+"} if word == "batch" else {}
        for name in names.split():
            subs[name].add_argument(f"--{word}", type=value_of(count), default=default, metavar="N", help=text, **many)
    peer = "transformers, llama.cpp:PYTHON:FILE.gguf or a command that prints the keys of decode; may be repeated"
    subs["versus"].add_argument("--peer", action="append", required=True, metavar="P", help=peer)
    subs["perplexity"].add_argument("--text", metavar="FILE", help="another text than data/alice.txt")
    claims.add_flags(subs["claims"])
    args = parser.parse_args(argv)
    args.given, batches = given(args.parser, argv[1:], args), getattr(args, "batch", [1])
    check_given(args)
    for name, least in (("max_num_seqs", 1), ("max_num_batched_tokens", getattr(args, "prompt", 1))):
        if name not in args.given:
            setattr(args, name, max(getattr(args, name), least, *batches))
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
    run, as_text, _ = COMMANDS[args.command]
    result = run(args)
    if as_text is None:
        return result
    print(json.dumps(result) if args.json else as_text(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
