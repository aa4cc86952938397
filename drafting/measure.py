"""Measure a draft head beside n-grams and plain decoding, on requests that no training text begins with.

Problem. A head is worth what it saves on text it has never seen, on this machine, at this batch size; and a clock that
drifts must not decide.

Idea. Answer the held-out requests of each kind with each side's guesses in turn, and compare round by round:

    round 1   plain   ngram   head      round 2   plain   ngram   head      speed-up: median of plain / side
    every side must give the same tokens: guesses are verified, so only the time may differ

Left out: prompts of a length that matters (the clock starts when all answers have their first token).
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import kernels
from drafting.budget import Speculator
from drafting.texts import held_out
from generate import LLM
from sampling import SamplingParams
from speculative import NgramProposer


@dataclass
class Decoded:
    """The held-out requests of a kind, answered once."""

    seconds: float
    answers: list[list[int]]
    counts: tuple[int, int, int]  # guesses accepted, guesses made, tokens an answer would have got without


def measure(llm: LLM, sides: dict[str, Speculator | None], batch: int, tokens: int, rounds: int) -> list[dict]:
    """Answer the held-out requests with each side's guesses in turn; a row for each kind of request and side.

    The first side is what the others' speed-up is over, round by round (the median).
    """
    rows = []
    for kind, asked in held_out().items():
        prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in asked]
        runs: dict[str, list[Decoded]] = {side: [] for side in sides}
        for turn in range(1 + rounds):
            for side, speculator in sides.items():
                llm.engine.speculator = speculator
                run = decode(llm, prompts, batch, tokens)
                if turn:  # the first one records steps of sizes that have not come up yet
                    runs[side].append(run)
        first = next(iter(runs.values()))
        for side, those in runs.items():
            accepted, drafted, decodes = (sum(counts) for counts in zip(*(run.counts for run in those), strict=True))
            row = {"kind": kind, "batch": batch, "side": side}
            row["speedup"] = statistics.median(a.seconds / b.seconds for a, b in zip(first, those, strict=True))
            row["tokens_per_step"] = 1 + accepted / max(1, decodes)
            row["right"] = accepted / max(1, drafted)
            row["same"] = all(run.answers == first[0].answers for run in those)
            rows.append(row)
    return rows


def decode(llm: LLM, prompts: list[list[int]], batch: int, tokens: int) -> Decoded:
    """Greedy answers, so many prompts at a time. The clock runs from when all of them have their first token.

    With one thread it is the processor's, which other programs disturb much less than the one on the wall.
    """
    clock = time.process_time if kernels.threads() == 1 else time.perf_counter
    params, speculator = SamplingParams(temperature=0, max_tokens=tokens), llm.engine.speculator
    before = counts_of(speculator)
    seconds, answers = 0.0, []
    llm.scheduler.drop_cache()
    for start in range(0, len(prompts), batch):
        requests = [llm.add(prompt, params) for prompt in prompts[start : start + batch]]
        while not all(request.first_token or request.finished for request in requests):
            llm.engine.step()
        began = clock()
        while llm.engine.has_work:
            llm.engine.step()
        seconds += clock() - began
        answers += [request.answers[0].token_ids for request in requests]
    return Decoded(seconds, answers, tuple(b - a for a, b in zip(before, counts_of(speculator), strict=True)))


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
            figures = f"{row['speedup']:9.2f}x{row['tokens_per_step']:13.2f}{row['right']:7.0%}"
            print(
                f"{row['kind']:9}{batch:6}{figures}  {'same   ' if row['same'] else 'DIFFER '}  {row['side']}",
                flush=True,
            )
