"""What a draft head learns from: texts that the target writes itself, and the hidden states it had while writing.

Problem. A head must say what this model would say next, not what people would. Any text would do as a beginning, but
its continuation has to be the model's own, and beside every token the head wants the state it was drawn from.

Idea. Let the engine answer requests composed of subjects and instructions (data/requests.json) under a proposer that
guesses nothing, but keeps the states it is shown (`Recorder`).

    request    "Give three facts about bees."             greedy, or at temperature 0.7: both are asked of a model
    tokens        Bees  are   social  ins  ects  ...
    states     s0    s1    s2      s3    s4              row i: token i was drawn from state i

Texts are written shard by shard, each from nothing but the seed and its number, so an interrupted run goes on where it
stopped and ends with the same files. The requests for measuring (`held_out`) have subjects and instructions that no
training request has.

Source: self-distillation data as in Medusa, Cai et al. 2024 (arXiv:2401.10774, section 2.3.2). Left out: real
conversations, which would have to be fetched.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from drafting.budget import Speculator
from generate import LLM
from request import Answer
from sampling import SamplingParams

SHARD = 64  # texts
TEMPERATURES = (0.0, 0.7)

DATA = json.loads((Path(__file__).parent.parent / "data" / "requests.json").read_text(encoding="utf-8"))


def requests(n: int, seed: int) -> list[str]:
    """n requests, the same for the same seed, of all kinds."""
    draw = random.Random(seed)

    def compose(form: str) -> str:
        form = form.replace("{text}", draw.choice(DATA["passages"])).replace("{task}", draw.choice(DATA["tasks"]))
        while "{}" in form:
            form = form.replace("{}", draw.choice(DATA["subjects"]), 1)
        return form

    kinds = ("chat", "chat", "chat", "story", "story", "summary", "code")
    return [compose(draw.choice(DATA["asked"][kinds[i % len(kinds)]])) for i in range(n)]


def held_out() -> dict[str, list[str]]:
    """Requests by kind that no training text begins with, and whose subjects and tasks none of them has."""
    return DATA["held_out"]


class Recorder:
    """A proposer that guesses nothing and keeps, for every answer, the states its tokens were drawn from."""

    def __init__(self, llm: LLM):
        self.llm = llm
        self.states: dict[Answer, list[torch.Tensor]] = {}

    def strength(self, answers: list[Answer]) -> list[int]:
        rows = self.llm.engine.rows
        for answer in answers:
            if answer in rows:
                self.states.setdefault(answer, []).append(self.llm.engine.runner.states[rows[answer]].half().cpu())
        return [0] * len(answers)

    def propose(self, answers: list[Answer], limits: list[int]) -> list[list[int]]:
        raise AssertionError("an answer without evidence is given no guesses")


def write_shard(llm: LLM, path: Path, asked: list[str], tokens: int, seed: int) -> None:
    """Answer the requests, and save tokens int32 [T], their states float16 [T, hidden], and lengths of the texts."""
    recorder = Recorder(llm)
    llm.engine.speculator = Speculator(recorder)
    answers = []
    for i, text in enumerate(asked):
        params = SamplingParams(temperature=TEMPERATURES[i % 2], max_tokens=tokens, seed=seed + i)
        ids = llm.tokenizer.encode_chat([{"role": "user", "content": text}])
        answers.append(llm.add(ids, params).answers[0])
    while llm.engine.has_work:
        llm.engine.step()
    llm.engine.speculator = None
    failed = next((answer.error for answer in answers if answer.error), None)
    if failed:
        raise ValueError(f"the model could not answer a request of the training text: {failed}")
    answers = [answer for answer in answers if answer in recorder.states]  # others ended at their first token
    states = [torch.stack(recorder.states[answer]) for answer in answers]  # the last token's has been overwritten
    drawn = [token for c, s in zip(answers, states, strict=True) for token in c.token_ids[: len(s)]]
    shard = {
        "tokens": torch.tensor(drawn, dtype=torch.int32),
        "states": torch.cat(states) if states else torch.empty(0, llm.config.hidden_size, dtype=torch.float16),
        "lengths": torch.tensor([len(s) for s in states], dtype=torch.int32),
    }
    partial = path.with_suffix(".partial")
    save_file(shard, str(partial))
    os.replace(partial, path)


def write_texts(
    llm: LLM, folder: Path, texts: int, tokens: int, seed: int, progress: Callable[[int, int], None]
) -> dict[str, torch.Tensor]:
    """All shards of the training texts, those that are there already left alone; then as one, in order."""
    asked = requests(texts, seed)
    paths = [folder / f"texts-{start // SHARD:04}.safetensors" for start in range(0, texts, SHARD)]
    for i, path in enumerate(paths):
        if not path.exists():
            part = asked[i * SHARD : (i + 1) * SHARD]
            write_shard(llm, path, part, tokens, (seed << 32) + i * SHARD)
            progress(min(texts, (i + 1) * SHARD), texts)
    shards = [load_file(str(path)) for path in paths]
    return {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}
