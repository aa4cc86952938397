"""What a draft head learns from: texts that the target writes itself, and the hidden states it had while writing.

The problem. A head must say what this model would say next, not what people would. Any text would do as a beginning,
but its continuation has to be the model's own, and beside every token the head wants the state it was drawn from.

The idea. Let the engine answer requests composed of subjects and instructions (data/requests.json) under a speculator
that guesses nothing, but keeps the states it is shown (`Recorder`).

    request    "Give three facts about bees."             greedy, or at temperature 0.7: both are asked of a model
    tokens        Bees  are   social  ins  ects  ...
    states     s0    s1    s2      s3    s4              row i: token i was drawn from state i

Texts are written shard by shard, each from nothing but the seed and its number, so an interrupted run goes on where it
stopped. The requests for measuring (`HELD_OUT`) have subjects and instructions that no training request has.
Source: self-distillation as in Medusa, Cai et al. 2024 (arXiv:2401.10774, section 2.3.2). Left out: real conversations.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from formats.command_line import warn
from generate import LLM
from request import Answer
from sampling import SamplingParams

SHARD = 64  # texts
TEMPERATURES = (0.0, 0.7)
KINDS = ("chat", "chat", "chat", "story", "story", "summary", "code")
DATA = json.loads((Path(__file__).parent.parent / "data" / "requests.json").read_text(encoding="utf-8"))
HELD_OUT: dict[str, list[str]] = DATA["held_out"]  # by kind


def requests(n: int, seed: int) -> list[str]:
    """n requests, the same for the same seed, of all kinds."""
    draw = random.Random(seed)

    def compose(form: str) -> str:
        form = form.replace("{text}", draw.choice(DATA["passages"])).replace("{task}", draw.choice(DATA["tasks"]))
        while "{}" in form:
            form = form.replace("{}", draw.choice(DATA["subjects"]), 1)
        return form

    return [compose(draw.choice(DATA["asked"][KINDS[i % len(KINDS)]])) for i in range(n)]


class Recorder:
    """A speculator that guesses nothing and keeps, for every answer, the states its tokens were drawn from."""

    def __init__(self, llm: LLM):
        self.engine = llm.engine
        self.states: dict[Answer, list[torch.Tensor]] = {}

    def propose(self, answers: list[Answer], *_) -> list[list[int]]:
        for answer in answers:
            if answer in self.engine.rows:
                state = self.engine.runner.states[self.engine.rows[answer]]
                self.states.setdefault(answer, []).append(state.half().cpu())
        return [[] for _ in answers]


def write_shard(llm: LLM, path: Path, asked: list[str], tokens: int, seed: int) -> None:
    """Answer the requests, and save tokens int32 [T], their states float16 [T, hidden], and lengths of the texts."""
    recorder = llm.engine.speculator = Recorder(llm)
    answers = []
    for i, text in enumerate(asked):
        params = SamplingParams(temperature=TEMPERATURES[i % 2], max_tokens=tokens, seed=seed + i)
        ids = llm.tokenizer.encode_chat([{"role": "user", "content": text}])
        answers.append(llm.add(ids, params).answers[0])
    while llm.engine.has_work:
        llm.engine.step()
    llm.engine.speculator = None
    if failed := next((answer.error for answer in answers if answer.error), None):
        raise ValueError(f"the model could not answer a request of the training text: {failed}")
    # An answer that ended at its first token has no states; the last token's of the others has been overwritten.
    states = {answer: torch.stack(recorder.states[answer]) for answer in answers if answer in recorder.states}
    drawn = [token for answer, rows in states.items() for token in answer.token_ids[: len(rows)]]
    shard = {
        "tokens": torch.tensor(drawn, dtype=torch.int32),
        "states": torch.cat([torch.empty(0, llm.config.hidden_size, dtype=torch.float16), *states.values()]),
        "lengths": torch.tensor([len(rows) for rows in states.values()], dtype=torch.int32),
    }
    partial = path.with_suffix(".partial")
    save_file(shard, str(partial))
    os.replace(partial, path)


def write_texts(llm: LLM, folder: Path, texts: int, tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """All shards of the training texts, those that are there already left alone; then as one, in order."""
    asked, shards = requests(texts, seed), []
    for start in range(0, texts, SHARD):
        path = folder / f"texts-{start // SHARD:04}.safetensors"
        if not path.exists():
            write_shard(llm, path, asked[start : start + SHARD], tokens, (seed << 32) + start)
            warn(f"texts {min(texts, start + SHARD):,} of {texts:,}")
        shards.append(load_file(str(path)))
    return {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}
