"""What each mechanism was claimed to buy, and what it buys here: the engine with one switch flipped, row by row.

    python bench.py claims --out results               about ten minutes on two cores; goes on where it was interrupted
    python bench.py claims --only batching lpm --quick some of the rows, on smaller workloads

A figure from a paper belongs to its machine, model and workload. So each row has five things: what the papers say is in
papers.json, the rest is made by running the experiment:

    mechanism | claimed (source; setting) | measured here | floor | why they differ
                                                  |            `- the most it could give: steps, bytes, tokens
                                                  `- medians of A B A B, ratios taken within a round (lab.py)

Counts are the proof (they do not depend on the machine), the clock is what they are worth here. Answers are compared
wherever a switch must not change them. Left out: load over HTTP (serve.py), other programs (`bench.py versus`).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median

from benchmarks import guessing, scheduling, speed
from benchmarks.lab import FULL, QUICK, Lab
from formats.command_line import refuse_unused, warn
from generate import engine_arguments
from native.machine import usable_threads

RUNS = scheduling.EXPERIMENTS | speed.EXPERIMENTS | guessing.EXPERIMENTS
CLAIMS = json.loads(Path(__file__).with_name("papers.json").read_text(encoding="utf-8"))  # of most of them
FLIPPED = (
    "max_num_seqs max_num_batched_tokens policy prefix_cache preemption batching reserve chunked speculate overlap "
    "jump_forward kernels"
).split()


def measure(lab: Lab, name: str) -> dict:
    """One row, as it goes into the JSON."""
    paper, result = CLAIMS[name], RUNS[name](lab)
    groups: dict[str, list] = {}
    for side, data in result.sides.items():  # sides of one workload must answer alike
        groups.setdefault(side.rpartition(", ")[0], []).append(data.pop("answers"))
    alone = paper.get("alone")  # why the answers are not compared
    same = None if alone else all(answer == group[0] for group in groups.values() for answer in group)
    apart = "".join(f"; {name}: rounding differs" for name, group in groups.items() if not any(group))
    return {key: paper[key] for key in ("mechanism", "claim", "source", "setting")} | {
        "measured": result.measured,
        "floor": result.floor,
        "why": paper["why"],
        "same_answers": same,
        "answers": alone or f"{'' if same else 'NOT '}the same on all sides{apart}",
        "sides": result.sides,
    }


def measure_all(lab: Lab, names: list[str], result: dict, save: Callable[[], None]) -> None:
    """Put the rows that are not in `result` yet into it, one by one; `save` is called after each."""
    names = [name for name in names if name not in result["claims"]]
    for i, name in enumerate(names, 1):
        result["failed"].pop(name, None)
        began = time.perf_counter()
        try:
            result["claims"][name] = measure(lab, name)
            outcome = f"{time.perf_counter() - began:.0f} s"
        except Exception as error:  # whatever it is, it is the fault of this row alone
            result["failed"][name] = f"{type(error).__name__}: {error}"
            outcome = f"FAILED: {result['failed'][name]}"
        lab.close()
        result["claims"] = {key: result["claims"][key] for key in CLAIMS if key in result["claims"]}
        save()
        warn(f"{i}/{len(names)} {name}: {outcome}")


# ---- what is written


def columns(sides: dict[str, dict]) -> list[list[str]]:
    """A table of the sides: a header, then counts and clock readings, the latter as "median (least to most)"."""
    counts = list(dict.fromkeys(key for side in sides.values() for key in side["counted"]))
    clocks = list(dict.fromkeys(key for side in sides.values() for key in side["clock"]))
    table = [["", *counts, *clocks]]
    for name, side in sides.items():
        cells = [f"{side['counted'][key]:,}" if key in side["counted"] else "" for key in counts]
        for key in clocks:
            values = side["clock"].get(key)
            spread = f" ({min(values):.4g} to {max(values):.4g})" if values and len(values) > 1 else ""
            cells.append(f"{median(values):.4g}{spread}" if values else "")
        table.append([name, *cells])
    return table


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def as_markdown(result: dict) -> str:
    """The command, the machine, the table of all rows, and below it the sides of each."""
    head = ["mechanism", "claimed", "measured here", "floor", "why they differ"]
    out = ["# What each mechanism was claimed to buy, and buys here", ""]
    out += [f"`{result['command']}` on {result['machine']}.", "", line(head), line(["---"] * len(head))]
    for row in result["claims"].values():
        claim = f"{row['claim']} ({row['source']}; {row['setting']})"
        out.append(line([row["mechanism"], claim, row["measured"], row["floor"], row["why"]]))
    out += ["", "Clock readings are medians (least to most) of the rounds; counted work is the same in every round."]
    for name, row in result["claims"].items():
        table = columns(row["sides"])
        out += ["", f"## {name}", "", f"Answers: {row['answers']}.", ""]
        out += [line(table[0]), line(["---"] + ["---:"] * (len(table[0]) - 1)), *map(line, table[1:])]
    return "\n".join([*out, *(f"\n{name} failed: {cause}" for name, cause in result["failed"].items())]) + "\n"


def write(result: dict, folder: Path) -> None:
    """claims.json and claims.md. The JSON is replaced as a whole, or not at all: an interruption leaves it readable."""
    (folder / "claims.md").write_text(as_markdown(result), encoding="utf-8")
    part = folder / "claims.json.part"
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    part.replace(folder / "claims.json")


# ---- the command


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench.py claims` beside those of the engine, whose defaults become the fast ones."""
    names = list(CLAIMS)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="smaller workloads, one round")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep claims.json and claims.md there, row by row")
    parser.add_argument("--fresh", action="store_true", help="measure all rows again, whatever --out has")
    parser.add_argument("--machine", metavar="TEXT", help="how the files describe this machine")
    parser.set_defaults(quant="int4", compile=True)


def begin(args: argparse.Namespace, settings: dict) -> dict:
    """The result to go on with: what --out has, if it was measured with the same settings, else an empty one."""
    file = args.out and args.out / "claims.json"
    result = settings | {"command": "", "machine": "", "claims": {}, "failed": {}}
    if args.fresh or not file or not file.exists():
        return result
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
        result["claims"] = {name: row for name, row in before["claims"].items() if name in CLAIMS}
        as_markdown(result)  # fails where a row is damaged
        values = [
            (part, key, before[part].get(key), value) for part in settings for key, value in settings[part].items()
        ]
        differing = [f"{part} {key} {old!r} there, {new!r} now" for part, key, old, new in values if old != new]
        why = f"it has other settings: {'; '.join(differing)}" if differing else ""
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        why = f"it is no file of this command, or damaged ({type(error).__name__}: {error})"
    if why:
        raise ValueError(f"{file} cannot be continued, {why}. Use another --out, or --fresh to replace it")
    return result


def run(args: argparse.Namespace) -> int:
    """The command: measure, print, and write the files if asked."""
    refuse_unused(
        args.given,
        (FLIPPED, False, "the experiments set it themselves; leave it out"),
        (["fresh"], args.out, "it measures again what --out has; give --out as well"),
    )
    engine = {name: value for name, value in engine_arguments(args).items() if name not in FLIPPED}
    sizes = QUICK if args.quick else FULL
    result = begin(args, json.loads(json.dumps({"sizes": asdict(sizes), "engine": engine})))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    names = [name for name in CLAIMS if name in result["claims"] or name in args.only]
    flags = f" --only {' '.join(names)}" if len(names) < len(CLAIMS) else ""
    flags += " --quick" * args.quick + f" --model {args.model} --quant {args.quant}" + " --compile" * args.compile
    result["command"] = "python bench.py claims" + flags + f" --threads {args.threads}" * bool(args.threads)
    result["machine"] = args.machine or f"{os.cpu_count()} cores, {args.threads or usable_threads()[0]} threads"
    measure_all(Lab(engine, sizes), args.only, result, lambda: args.out and write(result, args.out))
    print(json.dumps(result) if args.json else as_markdown(result))
    return int(bool(result["failed"]))
