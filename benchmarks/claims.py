"""What each mechanism was claimed to buy, and what it buys here: the engine with one switch flipped, row by row.

    python bench.py claims --out results               about ten minutes on two cores; goes on where it was interrupted
    python bench.py claims --only batching lpm --quick some of the rows, on smaller workloads
    python bench.py claims --out results --readme FILE also writes the table into FILE, between its two marks

Problem. A figure from a paper belongs to its machine, model and workload. Alone, it says neither whether the mechanism
works here nor what would be left to gain.

Idea. Five things in each row. What the papers say is in papers.json; the rest is made by running the experiment:

    mechanism | claimed (source; setting) | measured here | floor | why they differ
                                                  |            `- the most it could give: steps, bytes, tokens
                                                  `- medians of A B A B, ratios taken within a round (lab.py)

Counts are the proof (they do not depend on the machine), the clock is what they are worth here. Answers are compared
wherever a switch must not change them. With --out every row is on disk as soon as it is finished.
Left out: load over HTTP (serve.py), other programs (`bench.py versus`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from benchmarks import guessing, mapping, scheduling, speed
from benchmarks.lab import FULL, QUICK, Lab, median
from formats.command_line import refuse_unused, warn
from generate import engine_arguments
from native.machine import usable_threads


@dataclass(frozen=True)
class Claim:
    """A row of the table: what is switched, what was claimed for it, and why a small machine may see something else.

    setting: where the claim was measured. seconds: what the experiment takes in full on two cores, for the progress
    bar. alone: why the answers of its sides are not compared; None where they must be the same.
    """

    run: Callable[[Lab], scheduling.Result]
    mechanism: str
    claim: str
    source: str
    setting: str
    why: str
    seconds: int
    alone: str | None = None


RUNS = scheduling.EXPERIMENTS | speed.EXPERIMENTS | {"mmap": mapping.mapped_weights} | guessing.EXPERIMENTS
PAPERS = json.loads(Path(__file__).with_name("papers.json").read_text(encoding="utf-8"))
CLAIMS = {name: Claim(run, **PAPERS[name]) for name, run in RUNS.items()}
FLIPPED = (
    "max_num_seqs max_num_batched_tokens policy prefix_cache preemption batching reserve chunked speculate overlap "
    "jump_forward kernels"
)
BEGIN, END = "<!-- claims: bench.py claims --readme writes what follows -->", "<!-- end of claims -->"


class Progress:
    """One line on stderr: which row of how many, what runs, the time so far, and about how much is left."""

    def __init__(self, names: list[str], out: TextIO | None = None):
        self.names, self.out = names, sys.stderr if out is None else out
        self.live = self.out.isatty()
        self.done: list[str] = []
        self.began = time.perf_counter()

    def tick(self, label: str) -> None:
        """Tell what the current row is doing; only a terminal is told."""
        if self.live:
            self._write(f"{self.names[len(self.done)]}: {label}")

    def end(self, outcome: str) -> None:
        """The current row is finished; `outcome` says how."""
        name = self.names[len(self.done)]
        self.done.append(name)
        self._write(f"{name}: {outcome}")
        if self.live:
            print(file=self.out)

    def _write(self, what: str) -> None:
        n, total = len(self.done), len(self.names)
        line = f"{n}/{total} {what} | {clock(time.perf_counter() - self.began)}{self._rest()}"
        if self.live:
            bar = "#" * (10 * n // total) + "-" * (10 - 10 * n // total)
            width = shutil.get_terminal_size().columns - 1
            print("\r" + f"[{bar}] {line}"[:width].ljust(width), end="", file=self.out, flush=True)
        else:
            print(line, file=self.out, flush=True)

    def _rest(self) -> str:
        """From how long the finished rows took, beside how long they were expected to take."""
        expected = [sum(CLAIMS[name].seconds for name in part) for part in (self.done, self.names[len(self.done) :])]
        if not all(expected):
            return ""
        return f", about {clock((time.perf_counter() - self.began) / expected[0] * expected[1])} to go"


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def measure(lab: Lab, name: str) -> dict:
    """One row, as it goes into the JSON."""
    claim = CLAIMS[name]
    try:
        sides, measured, floor = claim.run(lab)
    finally:
        lab.close()
    groups: dict[str, list] = {}
    for side, data in sides.items():  # sides of one workload must answer alike
        groups.setdefault(side.rpartition(", ")[0], []).append(data.pop("answers"))
    same = None if claim.alone else all(answer == group[0] for group in groups.values() for answer in group)
    apart = "".join(f"; {name}: rounding differs" for name, group in groups.items() if not any(group))
    return {key: getattr(claim, key) for key in ("mechanism", "claim", "source", "setting")} | {
        "measured": measured,
        "floor": floor,
        "why": claim.why,
        "same_answers": same,
        "answers": claim.alone or f"{'' if same else 'NOT '}the same on all sides{apart}",
        "sides": sides,
    }


def measure_all(lab: Lab, names: list[str], result: dict, save: Callable[[], None]) -> None:
    """Put the rows that are not in `result` yet into it, one by one; `save` is called after each."""
    progress = Progress([name for name in names if name not in result["claims"]])
    lab.tick = progress.tick
    for name in progress.names:
        result["failed"].pop(name, None)
        began = time.perf_counter()
        try:
            result["claims"][name] = measure(lab, name)
            outcome = f"{time.perf_counter() - began:.0f} s"
        except Exception as error:  # whatever it is, it is the fault of this row alone
            result["failed"][name] = f"{type(error).__name__}: {error}"
            outcome = f"FAILED: {result['failed'][name]}"
        result["claims"] = {key: result["claims"][key] for key in CLAIMS if key in result["claims"]}
        save()
        progress.end(outcome)


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


def as_text(result: dict) -> str:
    out = []
    for name, row in result["claims"].items():
        out += [f"== {name}: {row['mechanism']}", f"   claimed   {row['claim']} [{row['source']}; {row['setting']}]"]
        out += [f"   {key:9} {row[key]}" for key in ("measured", "floor", "why", "answers")] + [""]
        table = columns(row["sides"])
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        out += ["   " + "  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in table] + [""]
    return "\n".join(out + [f"{name} failed: {cause}" for name, cause in result["failed"].items()])


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def summary(result: dict) -> str:
    """The command, the machine and the short table: what stands in the README too."""
    head = ["mechanism", "claimed", "measured here", "floor", "why they differ"]
    out = [f"`{result['command']}` on {result['machine']}.", "", line(head), line(["---"] * len(head))]
    for row in result["claims"].values():
        claim = f"{row['claim']} ({row['source']}; {row['setting']})"
        out.append(line([row["mechanism"], claim, row["measured"], row["floor"], row["why"]]))
    return "\n".join(out) + "\n"


def as_markdown(result: dict) -> str:
    out = ["# What each mechanism was claimed to buy, and buys here", "", summary(result)]
    out += ["Clock readings are medians (least to most) of the rounds; counted work is the same in every round."]
    for name, row in result["claims"].items():
        table = columns(row["sides"])
        out += ["", f"## {name}", "", f"Answers: {row['answers']}.", ""]
        out += [line(table[0]), line(["---"] + ["---:"] * (len(table[0]) - 1)), *map(line, table[1:])]
    return "\n".join(out) + "\n"


def with_summary(text: str, result: dict) -> str:
    """A README with its block between the two marks replaced. Raises ValueError where a mark or a row is missing."""
    check_readme(text, list(result["claims"]))
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n{summary(result)}{END}{after}"


def check_readme(text: str, names: list[str]) -> None:
    """Refuse to write a table of these rows where one is missing, or without the marks to write between."""
    missing = [name for name in CLAIMS if name not in names]
    if missing:
        raise ValueError(f"--readme shows all rows, and there would be no {', '.join(missing)}: measure them too")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"--readme needs one line {BEGIN!r} and after it one line {END!r}, to write between them")


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
    parser.add_argument("--fresh", action="store_true", help="measure rows again that --out already has")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="write the table into this file as well")
    parser.add_argument("--machine", metavar="TEXT", help="how the files describe this machine")
    parser.set_defaults(quant="int4", compile=True)


def check_flags(args: argparse.Namespace) -> None:
    shown = args.out or args.readme or args.json
    refuse_unused(
        args.given,
        (FLIPPED.split(), False, "the experiments set it themselves; leave it out"),
        (["fresh"], args.out, "it measures again what --out has; give --out as well"),
        (["machine"], shown, "only files and JSON say it; add --out, --readme or --json"),
    )


def begin(args: argparse.Namespace, settings: dict) -> dict:
    """The result to go on with: what --out has, if it was measured with the same settings, else an empty one."""
    file = args.out / "claims.json" if args.out else None
    fresh = settings | {"command": "", "machine": "", "claims": {}, "failed": {}}
    if file is None or not file.exists():
        return fresh
    rows, why = {}, ""
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
        differing = [f"{k} {v!r} there, {settings[k]!r} now" for k, v in before.items() if settings.get(k, v) != v]
        rows = {name: row for name, row in before["claims"].items() if name in CLAIMS}
        as_markdown(fresh | {"claims": rows})  # fails where a row is damaged
        why = f"it has other settings: {'; '.join(differing)}" if differing else ""
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        why = f"it is no file of this command, or damaged ({type(error).__name__}: {error})"
    if why and not args.fresh:
        raise ValueError(f"{file} cannot be continued, {why}. Use another --out, or --fresh to replace it")
    if why:
        warn(f"{file}: replaced, {why}")
        return fresh
    again = set(args.only) if args.fresh else set()
    return fresh | {"claims": {name: row for name, row in rows.items() if name not in again}}


def describe_command(args: argparse.Namespace, names: list[str]) -> str:
    flags = f" --only {' '.join(names)}" if set(names) != set(CLAIMS) else ""
    flags += " --quick" * args.quick + f" --model {args.model} --quant {args.quant}" + " --compile" * args.compile
    return "python bench.py claims" + flags + f" --threads {args.threads}" * bool(args.threads)


def run(args: argparse.Namespace) -> int:
    """The command: measure, print, and write the files if asked."""
    check_flags(args)
    engine = {name: value for name, value in engine_arguments(args).items() if name not in FLIPPED.split()}
    sizes = QUICK if args.quick else FULL
    result = begin(args, json.loads(json.dumps({"sizes": asdict(sizes), "engine": engine})))
    if args.readme:  # whatever is wrong with it is said before ten minutes of measuring
        check_readme(args.readme.read_text(encoding="utf-8"), [*result["claims"], *args.only])
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    result["machine"] = args.machine or f"{os.cpu_count()} cores, {args.threads or usable_threads()[0]} threads"

    def save() -> None:
        result["command"] = describe_command(args, list(result["claims"]))
        if args.out:
            write(result, args.out)

    interrupted = False
    try:
        measure_all(Lab(engine, sizes), args.only, result, save)
    except KeyboardInterrupt:
        interrupted = True
        where = f"in {args.out}; the same command goes on from there" if args.out else "below; --out would keep them"
        warn(f"\ninterrupted: {len(result['claims'])} finished rows are {where}")
    save()
    if args.readme and not interrupted and not result["failed"]:
        text = with_summary(args.readme.read_text(encoding="utf-8"), result)
        args.readme.write_text(text, encoding="utf-8")
    print(json.dumps(result) if args.json else as_text(result))
    return 130 if interrupted else int(bool(result["failed"]))
