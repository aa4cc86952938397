"""What generate.py prints: an answer as it is made, many answers, and figures beside their floor.

stdout carries the answer (with --json one JSON object), stderr everything else. The closing line and --json show the
same numbers: time to the first token (TTFT), which arithmetic bounds, and time per later token (TPOT), which memory
bounds, beside the decode floor of benchmarks/roofline.py. Left out: colours.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable

from benchmarks.roofline import decode_floor, read_bandwidth
from formats.command_line import warn
from kv_paged import block_bytes
from request import CompletionOutput, Request, RequestOutput
from sampling import SamplingParams


def figures(llm, request: Request) -> dict:
    """What --json prints about one finished request; the closing line is made of the same numbers."""
    config, bandwidth = llm.config, read_bandwidth(llm.device)
    result, speculator = request.output(), llm.engine.speculator
    answer, prompt_tokens = result.outputs[0], len(request.prompt_ids)
    generated = len(answer.token_ids)
    ttft = (request.first_token or request.finished_at) - request.arrival
    tpot = (request.finished_at - request.arrival - ttft) / (generated - 1) if generated > 1 else None
    per_token = block_bytes(config.num_layers, 1, config.num_kv_heads, config.head_dim, llm.kv.data.element_size())
    floor = decode_floor(bandwidth, llm.model.step_bytes, per_token * (prompt_tokens + generated / 2))
    numbers = {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": prompt_tokens,
        "ttft_s": ttft,
        "tpot_s": tpot,
        "decode_tok_s": tpot and 1 / tpot,
        "prefill_tok_s": (prompt_tokens - request.num_cached_tokens) / ttft,
        "weight_bytes": llm.model.weight_bytes,
        "kv_bytes": per_token * (prompt_tokens + generated),
        "load_s": llm.load_s,
        "compile_s": llm.runner.seconds,
        "bandwidth_gb_s": bandwidth / 1e9,
        "floor_tok_s": floor,
        "floor_share": tpot and 1 / tpot / floor,
    }
    if len(result.outputs) > 1 or answer.logprobs is not None:
        numbers["outputs"] = answers_of(result)
    guesses = speculator.stats() if speculator is not None else {}
    return numbers | prompt_scores(result) | guesses


def answers_of(result: RequestOutput) -> list[dict]:
    def scores(answer: CompletionOutput) -> list[dict] | None:
        return answer.logprobs and [score._asdict() for score in answer.logprobs]

    return [dataclasses.asdict(answer) | {"logprobs": scores(answer)} for answer in result.outputs]


def prompt_scores(result: RequestOutput) -> dict:
    scores = result.prompt_logprobs
    return {} if scores is None else {"prompt_logprobs": [score and score._asdict() for score in scores]}


def print_json(value: dict) -> None:
    """One line of JSON; what stdout cannot encode is written in JSON's own escapes."""
    text = json.dumps(value, ensure_ascii=False)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text if text == text.encode(encoding, "replace").decode(encoding) else json.dumps(value))


def closing_line(f: dict) -> str:
    line = f"{f['prompt_tokens']} prompt tokens, TTFT {f['ttft_s'] * 1e3:.0f} ms ({f['prefill_tok_s']:.0f} tok/s)"
    if f["tpot_s"]:
        read = f["floor_share"] * f["bandwidth_gb_s"]
        line += (
            f" | {len(f['token_ids'])} tokens, TPOT {f['tpot_s'] * 1e3:.1f} ms, {f['decode_tok_s']:.1f} tok/s"
            f" | weights {f['weight_bytes'] / 1e6:.0f} MB, {read:.1f} GB/s of {f['bandwidth_gb_s']:.1f}"
            f" = {f['floor_share']:.0%} of the floor's {f['floor_tok_s']:.0f} tok/s"
        )
    return line + speculation(f)


def speculation(f: dict) -> str:
    """What guessing came to, if it was on: part of every closing line."""
    if "drafted" not in f:
        return ""
    return (
        f" | {f['accepted']} of {f['drafted']} guesses accepted = {f['accepted'] / (f['drafted'] or 1):.0%},"
        f" {f['tokens_per_step']:.2f} tokens a step, one guess pays above {f['break_even']:.0%}"
    )


def show(text: str, end: str = "") -> None:
    print(text, end=end, flush=True)


def stream_answer(llm, request: Request, write: Callable[..., None] = show) -> None:
    """Run until `request` has ended, writing the text of its first answer as it comes. Interrupting aborts it.

    Of answers that compete (best_of) nobody knows which will be the first: it is written when all have ended.
    """
    competing = request.width > request.params.n
    try:
        while not request.finished:
            for delta in llm.engine.step():
                if delta.request is request and delta.index == 0 and not competing:
                    write(delta.text, end="")
        write(request.output().outputs[0].text if competing else "")
    finally:
        llm.engine.abort(request)


def run_prompt(llm, args: argparse.Namespace, params: SamplingParams) -> int:
    request = llm.add(args.prompt, params)
    if not args.json:
        show(args.prompt)
    stream_answer(llm, request, warn if args.json else show)
    answers = request.output().outputs
    if not args.json:
        print()
        for answer in answers[1:]:
            print(f"\n[{answer.index}] {args.prompt}{answer.text}")
    if error := next((answer.error for answer in answers if answer.error), None):
        warn(f"error: {error}")
        return 1
    measured = figures(llm, request)
    if args.json:
        print_json(measured)
    else:
        warn(closing_line(measured))
    return 0


def read_prompts(path: str) -> list[str]:
    """The lines of a UTF-8 file that are not blank; a byte-order mark is not part of the first."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            prompts = [line.rstrip("\n") for line in file if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts-file {path!r} is not UTF-8 ({error}): convert it") from None
    if not prompts:
        raise ValueError(f"--prompts-file {path!r} holds no prompt: write one on each line")
    return prompts


def run_file(llm, args: argparse.Namespace, params: SamplingParams, prompts: list[str]) -> int:
    """All prompts answered together. Prints one JSON object with --json, else the answers in order."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    if args.json:
        answers = [
            {"prompt": o.prompt, "outputs": answers_of(o), "ttft_s": o.ttft_s} | prompt_scores(o) for o in outputs
        ]
        print_json({"answers": answers, "seconds": seconds, "tok_s": tokens / seconds})
    else:
        for output in outputs:
            for answer in output.outputs:
                print(f"{output.prompt}{answer.text}\n")
    ttft = statistics.median(o.ttft_s for o in outputs if o.ttft_s is not None) if tokens else 0.0
    warn(
        f"{len(prompts)} prompts, {tokens} tokens in {seconds:.1f} s = {tokens / seconds:.1f} tok/s, "
        f"median TTFT {ttft * 1e3:.0f} ms{speculation(llm.stats())}"
    )
    return int(any(answer.error for output in outputs for answer in output.outputs))
