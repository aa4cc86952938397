"""How many real JSON schemas compile, and whether what they then allow is right: MaskBench.

    python bench.py maskbench DIR [--model smollm2] [--json]

Each file of DIR holds a schema and instances. A schema is right when every valid instance, as the tokenizer writes it,
can be generated to its end, and no invalid one can. Along the valid ones each mask is timed. A schema that is refused
counts as not compiled: a server answers it with an error, never with free text.

Source: guidance-ai/jsonschemabench, `maskbench/data`. Left out: its time limits, and other engines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from automata import GrammarError
from benchmarks.figures import lines
from checkpoint import open_checkpoint
from formats.command_line import as_command
from structured import Guides
from tokenizer import Tokenizer


def judge(guides: Guides, case: dict) -> dict | None:
    """One file: seconds to compile, microseconds of each mask, and how many instances were judged wrongly."""
    began = time.perf_counter()
    try:
        start, _ = guides.compile("json_schema", json.dumps(case["schema"]))
    except GrammarError:
        return None
    result = {"compile_s": time.perf_counter() - began, "masks_us": [], "too_strict": 0, "too_lenient": 0}
    for test in case["tests"]:
        matcher, allowed = start.fork(), True
        for token in guides.encode(json.dumps(test["data"], ensure_ascii=False)):
            if test["valid"]:
                began = time.perf_counter()
                matcher.allowed()
                result["masks_us"].append((time.perf_counter() - began) * 1e6)
            if not (allowed := matcher.advance(token)):
                break
        allowed = allowed and matcher.may_end
        result["too_strict"] += test["valid"] and not allowed
        result["too_lenient"] += allowed and not test["valid"]
    return result


def measure(folder: Path, model: str) -> dict:
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(model))
    guides = Guides(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    guides.compile("json_schema", "{}")  # the vocabulary is prepared before
    results = [judge(guides, json.loads(file.read_text(encoding="utf-8"))) for file in sorted(folder.glob("*.json"))]
    if not results:
        raise ValueError(f"{folder} holds no .json files; download maskbench/data of guidance-ai/jsonschemabench")
    compiled = [result for result in results if result is not None]
    masks = [us for result in compiled for us in result["masks_us"]]
    return {
        "schemas": len(results),
        "compiled": len(compiled),
        "right": sum(not result["too_strict"] and not result["too_lenient"] for result in compiled),
        "refuse_a_valid_instance": sum(result["too_strict"] > 0 for result in compiled),
        "accept_an_invalid_instance": sum(result["too_lenient"] > 0 for result in compiled),
        "compile_ms": round(statistics.median(r["compile_s"] for r in compiled) * 1e3, 3) if compiled else None,
        "mask_us": round(statistics.median(masks), 1) if masks else None,
    }


@as_command
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.py maskbench", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2", help="whose tokenizer; default smollm2")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    figures = measure(args.folder, args.model)
    print(json.dumps(figures) if args.json else lines(figures))
    return 0
