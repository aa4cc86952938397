"""What a draft head learns from: texts that the target writes itself, and the hidden states it had while writing.

The problem. A head must say what this model would say next, not what people would. Any text would do as a beginning,
but its continuation has to be the model's own, and beside every token the head wants the state it was drawn from.

The idea. Let the engine answer requests composed of subjects and instructions (data/requests.json) under a speculator
that guesses nothing, but keeps the states it is shown (`Recorder`).

    request    "Give three facts about bees."             greedy, or at temperature 0.7: both are asked of a model
    tokens        Bees  are   social  ins  ects  ...
    states     s0    s1    s2      s3    s4              row i: token i was drawn from state i

A text depends on nothing but the seed and its number. The requests for measuring (`HELD_OUT`) have subjects and
instructions that no training request has.
Source: self-distillation as in Medusa, Cai et al. 2024 (arXiv:2401.10774, section 2.3.2). Left out: real conversations.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

from engine import Engine
from formats.command_line import warn
from generate import LLM
from request import Answer
from sampling import SamplingParams

PART = 64  # texts that are written side by side
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

    def __init__(self, engine: Engine):
        self.engine = engine
        self.states: dict[Answer, list[torch.Tensor]] = {}

    def propose(self, answers: list[Answer], *_) -> list[list[int]]:
        for answer in answers:
            if answer in self.engine.rows:
                state = self.engine.runner.states[self.engine.rows[answer]]
                self.states.setdefault(answer, []).append(state.half().cpu())
        return [[] for _ in answers]


def write_texts(llm: LLM, texts: int, tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """Answers to requests as tokens int64 [T], their states float16 [T, hidden], and lengths of the texts."""
    asked, written = requests(texts, seed), {"tokens": [], "states": [], "lengths": []}
    for start in range(0, texts, PART):
        recorder, answers = Recorder(llm.engine), []
        llm.engine.speculator = recorder
        for i, text in enumerate(asked[start : start + PART], start):
            params = SamplingParams(temperature=TEMPERATURES[i % 2], max_tokens=tokens, seed=(seed << 32) + i)
            ids = llm.tokenizer.encode_chat([{"role": "user", "content": text}])
            answers.append(llm.add(ids, params).answers[0])
        while llm.engine.has_work:
            llm.engine.step()
        for answer in answers:
            if answer.error:
                raise ValueError(f"the model could not answer a request of the training text: {answer.error}")
            # None for an answer that ended at its first token; the last token's state has been overwritten.
            if states := recorder.states.get(answer):
                written["tokens"].append(torch.tensor(answer.token_ids[: len(states)]))
                written["states"].append(torch.stack(states))
                written["lengths"].append(torch.tensor([len(states)]))
        warn(f"texts {start + len(answers):,} of {texts:,}")
    llm.engine.speculator = None
    return {name: torch.cat(parts) for name, parts in written.items()}
