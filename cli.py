"""The command line of generate.py: stream an answer, hold a conversation, work through a file, and end with figures.

    python generate.py --compile --quant int4 --prompt "The capital of France is"
    python generate.py --chat
    python generate.py --prompts-file prompts.txt --json

Every argument of LLM and every field of SamplingParams is a flag of the same name, read from their signatures: what the
library accepts the command line accepts, and neither can drift from the other. stdout carries the answer (with --json
one JSON object), stderr everything else. The closing line puts the speed beside its floor (benchmarks/roofline.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import statistics
import sys
import time

from benchmarks.roofline import decode_floor, read_bandwidth
from formats.command_line import as_command, flag, given, refuse_unused, value_of
from generate import LLM
from kv_paged import block_bytes, parse_memory
from request import CompletionOutput, Request, RequestOutput
from sampling import SamplingParams

DEFAULT_PROMPT = "Once upon a time"
SHARED = ("seed",)  # also an argument of LLM, which draws each request's seed from it
JSON_FIELDS = ("logit_bias", "json_schema", "choice")  # given as JSON text
LIST_FIELDS = {"stop": str, "stop_token_ids": int}  # given as one or more words


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each argument of LLM; booleans also as --no-..."""
    group = parser.add_argument_group("engine (LLM)")
    for name, parameter in inspect.signature(LLM).parameters.items():
        if name == "quiet":
            continue
        kind = str(parameter.annotation)
        if kind == "bool":
            group.add_argument(flag(name), action=argparse.BooleanOptionalAction, default=parameter.default)
        elif name == "kv_memory":
            group.add_argument(
                flag(name), type=value_of(parse_memory), metavar="BYTES", help="for the page pool, e.g. 2G"
            )
        else:
            kind = int if kind.startswith("int") else str
            group.add_argument(flag(name), type=kind, default=parameter.default, help=f"default {parameter.default}")


def engine_rules(args: argparse.Namespace) -> list[tuple]:
    """What LLM takes and needs only beside something else: rules for `refuse_unused`."""
    drafts = (args.speculate or "").startswith(("draft:", "self:"))
    return [
        (["num_speculative_tokens"], args.speculate, "nothing is guessed; add --speculate"),
        (["verify"], drafts, "only a model's guesses have a distribution; add --speculate draft:M or self:K"),
    ]


def engine_arguments(args: argparse.Namespace) -> dict:
    return {name: getattr(args, name) for name in inspect.signature(LLM).parameters if hasattr(args, name)}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of SamplingParams. Greedy and 128 tokens unless told otherwise."""
    group = parser.add_argument_group("sampling (SamplingParams)")
    defaults = {"temperature": 0.0, "max_tokens": 128}
    for field in dataclasses.fields(SamplingParams):
        default = defaults.get(field.name, field.default)
        if field.name in SHARED:
            continue
        if field.name in JSON_FIELDS:
            group.add_argument(flag(field.name), type=value_of(json.loads), metavar="JSON")
        elif field.name in LIST_FIELDS:
            group.add_argument(flag(field.name), nargs="+", type=LIST_FIELDS[field.name], metavar="X")
        elif field.type is bool:
            group.add_argument(flag(field.name), action="store_true")
        else:
            kind = {"int": int, "float": float}.get(str(field.type).split(" ")[0], str)
            kind = {int: int, float: float}.get(field.type, kind)
            group.add_argument(flag(field.name), type=kind, default=default, help=f"default {default}")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    names = [field.name for field in dataclasses.fields(SamplingParams) if field.name not in SHARED]
    return SamplingParams(**{name: getattr(args, name) for name in names})


def figures(llm: LLM, request: Request) -> dict:
    """What --json prints about one finished request; the closing line is made of the same numbers."""
    result = request.output()
    answer = result.outputs[0]
    ids = answer.token_ids
    prompt_tokens, generated = len(request.prompt_ids), len(ids)
    ttft = (request.first_token or request.finished_at) - request.arrival
    decode_s = request.finished_at - request.arrival - ttft
    tpot = decode_s / (generated - 1) if generated > 1 else None
    layout = (llm.config.num_layers, 1, llm.config.num_kv_heads, llm.config.head_dim, llm.kv.data.element_size())
    per_token = block_bytes(*layout)  # KV bytes of one token
    bandwidth = read_bandwidth(llm.device)
    floor = decode_floor(bandwidth, llm.model.step_bytes, per_token * (prompt_tokens + generated / 2))
    computed = prompt_tokens - request.num_cached_tokens
    return (
        {
            "text": answer.text,
            "token_ids": ids,
            "finish_reason": answer.finish_reason,
            "prompt_tokens": prompt_tokens,
            "ttft_s": ttft,
            "tpot_s": tpot,
            "decode_tok_s": tpot and 1 / tpot,
            "prefill_tok_s": computed / ttft,
            "weight_bytes": llm.model.weight_bytes,
            "kv_bytes": per_token * (prompt_tokens + generated),
            "load_s": llm.load_s,
            "compile_s": llm.compile_s,
            "bandwidth_gb_s": bandwidth / 1e9,
            "floor_tok_s": floor,
            "floor_share": tpot and 1 / tpot / floor,
        }
        | details(result)
        | (llm.engine.speculator.stats() if llm.engine.speculator is not None else {})
    )


def details(result: RequestOutput) -> dict:
    """What only --json has room for: all answers if there are several, and log-probabilities if asked for."""
    more = {}
    if len(result.outputs) > 1 or result.outputs[0].logprobs is not None:
        more["outputs"] = [answer_dict(answer) for answer in result.outputs]
    if result.prompt_logprobs is not None:
        more["prompt_logprobs"] = [score and score._asdict() for score in result.prompt_logprobs]
    return more


def answer_dict(answer: CompletionOutput) -> dict:
    scores = answer.logprobs and [score._asdict() for score in answer.logprobs]
    return dataclasses.asdict(answer) | {"logprobs": scores}


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
    share = f["accepted"] / f["drafted"] if f["drafted"] else 0.0
    return (
        f" | {f['accepted']} of {f['drafted']} guesses accepted = {share:.0%}, {f['tokens_per_step']:.2f} tokens a step"
        f", one guess pays above {f['break_even']:.0%}"
    )


def stream_answer(llm: LLM, request: Request, out) -> None:
    """Run until `request` has ended, writing the text of its first answer as it comes. Interrupting aborts it.

    Of answers that compete (best_of) nobody knows which will be the first: it is written when all have ended.
    """
    competing = request.width > request.params.n
    try:
        while not request.finished:
            for delta in llm.engine.step():
                if delta.request is request and delta.index == 0 and not competing:
                    print(delta.text, end="", file=out, flush=True)
        if competing:
            print(request.output().outputs[0].text, end="", file=out, flush=True)
    finally:
        llm.engine.abort(request)


def run_prompt(llm: LLM, args: argparse.Namespace) -> int:
    request = llm.add(args.prompt, sampling_params(args))
    if not args.json:
        print(args.prompt, end="", flush=True)
    stream_answer(llm, request, sys.stderr if args.json else sys.stdout)
    print(file=sys.stderr if args.json else sys.stdout)
    answers = request.output().outputs
    for answer in answers[1:] if not args.json else []:
        print(f"\n[{answer.index}] {args.prompt}{answer.text}")
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        print(f"error: {failed[0]}", file=sys.stderr)
        return 1
    measured = figures(llm, request)
    if args.json:
        print(json.dumps(measured, ensure_ascii=False))
    else:
        print(closing_line(measured), file=sys.stderr)
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


def run_file(llm: LLM, args: argparse.Namespace, prompts: list[str]) -> int:
    """All prompts answered together. Prints one JSON object with --json, else the answers in order."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, sampling_params(args))
    seconds = time.perf_counter() - start
    tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    if args.json:
        answers = [
            {"prompt": o.prompt, "outputs": [answer_dict(a) for a in o.outputs], "ttft_s": o.ttft_s} | details(o)
            for o in outputs
        ]
        print(json.dumps({"answers": answers, "seconds": seconds, "tok_s": tokens / seconds}, ensure_ascii=False))
    else:
        for output in outputs:
            for answer in output.outputs:
                print(f"{output.prompt}{answer.text}\n")
    ttft = statistics.median(o.ttft_s for o in outputs if o.ttft_s is not None) if tokens else 0.0
    print(
        f"{len(prompts)} prompts, {tokens} tokens in {seconds:.1f} s = {tokens / seconds:.1f} tok/s, "
        f"median TTFT {ttft * 1e3:.0f} ms{speculation(llm.stats())}",
        file=sys.stderr,
    )
    return int(any(answer.error for output in outputs for answer in output.outputs))


def run_chat(llm: LLM, args: argparse.Namespace) -> int:
    """A conversation on the terminal. Its KV stays in the prefix cache, so a turn computes only what is new."""
    messages = [{"role": "system", "content": args.system}] if args.system else []
    print("An empty line or Ctrl-D ends the conversation, Ctrl-C an answer.", file=sys.stderr)
    while True:
        try:
            text = input("> ")
        except EOFError:
            return 0
        if not text.strip():
            return 0
        messages.append({"role": "user", "content": text})
        try:
            request = llm.add(llm.tokenizer.encode_chat(messages), sampling_params(args))
        except ValueError as error:  # the conversation outgrew the context, say: keep it, drop only this turn
            print(f"error: {error}", file=sys.stderr)
            messages.pop()
            continue
        try:
            stream_answer(llm, request, sys.stdout)
        except KeyboardInterrupt:
            pass
        print()
        messages.append({"role": "assistant", "content": request.answers[0].text})
        print(
            f"[{len(request.prompt_ids)} prompt tokens, {request.num_cached_tokens} of them cached]",
            file=sys.stderr,
        )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("generate.py", description="Generate text with the vitrine engine.")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prompt", help=f"text to continue (default {DEFAULT_PROMPT!r})")
    what.add_argument("--chat", action="store_true", help="an interactive conversation")
    what.add_argument("--prompts-file", metavar="F", help="one prompt on each line, answered together")
    parser.add_argument("--system", metavar="TEXT", help="the system message of --chat")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_engine_flags(parser)
    add_sampling_flags(parser)
    args = parser.parse_args(argv)
    if args.system is not None and not args.chat:
        parser.error("--system belongs to --chat")
    if args.json and args.chat:
        parser.error("--json and --chat do not go together")
    refuse_unused(
        given(parser, argv, args),
        *engine_rules(args),
        (["n"], not args.chat, "a conversation goes on from one answer; leave it out"),
        (["logprobs", "prompt_logprobs"], args.json, "only --json shows them; add it"),
    )
    args.prompt = DEFAULT_PROMPT if args.prompt is None else args.prompt
    return args


@as_command
def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    sampling_params(args)  # refuse before loading anything
    prompts = None if args.prompts_file is None else read_prompts(args.prompts_file)
    llm = LLM(**engine_arguments(args), quiet=False)
    if args.chat:
        return run_chat(llm, args)
    return run_prompt(llm, args) if prompts is None else run_file(llm, args, prompts)
