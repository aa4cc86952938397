"""Train a draft head; measure it beside n-grams and plain decoding, on requests that no training text begins with.

    python speculative.py train --out head.safetensors
    python speculative.py measure --speculate head:head.safetensors

The problem. A head is worth what it saves on text it has never seen, on this machine, at this batch size; and a clock
that drifts must not decide.

The idea. Answer the held-out requests of each kind with each side's guesses in turn, and compare round by round:

    round 1   plain   ngram   head      round 2   plain   ngram   head      speed-up: median of plain / side
    every side must give the same tokens: guesses are verified, so only the time may differ

Left out: prompts of a length that matters (the clock starts when all answers have their first token).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import kernels
from drafting.budget import Speculator
from drafting.train import DATA, Settings, train
from formats.command_line import as_command, value_of
from generate import LLM
from sampling import SamplingParams
from speculative import NgramProposer

HELD_OUT: dict[str, list[str]] = DATA["held_out"]  # requests by kind; subjects and tasks are none of the training's


def measure(llm: LLM, sides: dict[str, Speculator | None], batch: int, tokens: int, rounds: int) -> list[dict]:
    """Answer the held-out requests with each side's guesses in turn; a row for each kind of request and side.

    The first side is what the others' speed-up is over, round by round (the median).
    """
    rows = []
    for kind, asked in HELD_OUT.items():
        prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in asked]
        before = {side: counts_of(speculator) for side, speculator in sides.items()}
        seconds, answers = {side: [] for side in sides}, {side: [] for side in sides}
        for turn in range(1 + rounds):
            for side, speculator in sides.items():
                llm.engine.speculator = speculator
                took, given = decode(llm, prompts, batch, tokens)
                answers[side].append(given)
                if turn:  # the first one records steps of sizes that have not come up yet
                    seconds[side].append(took)
        first = next(iter(sides))
        for side, speculator in sides.items():
            accepted, drafted, decodes = (b - a for a, b in zip(before[side], counts_of(speculator), strict=True))
            row = {"kind": kind, "batch": batch, "side": side}
            row["speedup"] = statistics.median(a / b for a, b in zip(seconds[first], seconds[side], strict=True))
            row["tokens_per_step"] = 1 + accepted / max(1, decodes)
            row["right"] = accepted / max(1, drafted)
            row["same"] = all(given == answers[first][0] for given in answers[side])
            rows.append(row)
    return rows


def decode(llm: LLM, prompts: list[list[int]], batch: int, tokens: int) -> tuple[float, list[list[int]]]:
    """Greedy answers, so many prompts at a time, and their seconds from when all of them have their first token.

    With one thread the clock is the processor's, which other programs disturb much less than the one on the wall.
    """
    clock = time.process_time if kernels.threads() == 1 else time.perf_counter
    seconds, answers = 0.0, []
    llm.scheduler.drop_cache()
    for start in range(0, len(prompts), batch):
        params = SamplingParams(temperature=0, max_tokens=tokens)
        requests = [llm.add(prompt, params) for prompt in prompts[start : start + batch]]
        while not all(request.first_token or request.finished for request in requests):
            llm.engine.step()
        began = clock()
        while llm.engine.has_work:
            llm.engine.step()
        seconds += clock() - began
        answers += [request.answers[0].token_ids for request in requests]
    return seconds, answers


def counts_of(speculator: Speculator | None) -> tuple[int, int, int]:
    return (0, 0, 0) if speculator is None else (speculator.accepted, speculator.drafted, speculator.decodes)


def run_measure(args: argparse.Namespace) -> None:
    llm = LLM(args.model, quant=args.quant, compile=True, threads=args.threads, speculate=args.speculate)
    head = llm.engine.speculator
    sides = {"plain": None, "ngram": Speculator(NgramProposer(), head.most, head.step), args.speculate: head}
    one, two, draft = (seconds * 1e3 for seconds in (head.step(1), head.step(2), head.draft(1)))
    print(f"a step of one row {one:.1f} ms, of two {two:.1f} ms, a round of the head {draft:.2f} ms")
    print("requests  batch  speed-up  tokens/step  right  answers  guesses")
    for batch in args.batch:
        for row in measure(llm, sides, batch, args.tokens, args.rounds):
            row["answers"] = "same" if row["same"] else "DIFFER"
            line = "{kind:9}{batch:6}{speedup:9.2f}x{tokens_per_step:13.2f}{right:7.0%}  {answers:7}  {side}"
            print(line.format(**row), flush=True)


def run_train(args: argparse.Namespace) -> None:
    settings = Settings(**{name: getattr(args, name) for name in asdict(Settings())})
    train(args.out, settings, lambda: LLM(settings.model, quant=settings.quant, compile=True, threads=args.threads))
    print(f"{args.out}: {Path(args.out).stat().st_size / 1e6:.1f} MB")


def a_head(text: str) -> str:
    if text.partition(":")[0] != "head":
        raise ValueError("head or head:<file>; n-grams are measured beside it anyway")
    return text


def positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError("at least 1")
    return int(text)


@as_command
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("speculative.py", description="Train a draft head, and measure it.")
    commands = parser.add_subparsers(required=True)
    learn = commands.add_parser("train", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    learn.add_argument("--out", required=True, metavar="F", help="the file to write")
    for name, value in asdict(Settings()).items():
        learn.add_argument(f"--{name}", type=type(value), default=value)
    look = commands.add_parser("measure", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    look.add_argument("--speculate", type=value_of(a_head), default="head", help="the head: head or head:<file>")
    look.add_argument("--model", default="smollm2")
    look.add_argument("--quant", default="int4")
    asked = min(map(len, HELD_OUT.values()))
    look.add_argument("--batch", type=int, choices=range(1, asked + 1), nargs="+", default=[1, 8], metavar="N")
    look.add_argument("--tokens", type=value_of(positive), default=128, help="of an answer, at most")
    look.add_argument("--rounds", type=value_of(positive), default=3)
    for command, run in ((learn, run_train), (look, run_measure)):
        command.add_argument("--threads", type=int, help="as many as there are processors")
        command.set_defaults(run=run)
    args = parser.parse_args(argv)
    args.run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
