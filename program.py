"""Programs over a model: text, holes to fill in, choices, and branches that share their trunk.

An application extracts fields one after the other, weighs three plans, classifies a hundred lines by the same examples.
As separate prompts all of that computes the same beginnings again. So a program is a text that grows: `gen` is a hole
that the model fills in, `select` one that only certain texts fit. A fork copies the text so far; its keys and values
are in the radix cache. Nothing runs before a value is read; then programs fill their holes in one batch.

    p = Program(llm, "Q: How do I get to the island?\\nPlan:")
                                                 ┌─ gen("plan") ─ " Rate it:" ─ gen("score")    branches[0]
    p ── trunk: computed once, then cached ── fork ─ gen("plan") ─ " Rate it:" ─ gen("score")    branches[1]
    p.join(branches)      p["plan"] is now the list of plans, p["score"] of scores

Each part is tokenised by itself, so a trunk is the beginning of its branches in tokens too; a blank belongs to the word
after it: "Answer:" and not "Answer: " before a hole. Source: Zheng et al., "SGLang" (2024), section 2.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from generate import LLM
from request import CompletionOutput, Request
from sampling import SamplingParams


@dataclass
class Hole:
    """What `gen` and `select` append: one request, or one for each candidate."""

    name: str | None
    params: SamplingParams
    candidates: tuple[str, ...] = ()


def gen(name: str | None = None, max_tokens: int = 64, temperature: float = 0.0, **fields: Any) -> Hole:
    """A hole for the model to fill in. fields: any of SamplingParams (stop, regex, json_schema, seed, ...) but n."""
    return Hole(name, SamplingParams(max_tokens=max_tokens, temperature=temperature, **fields))


def select(name: str | None, candidates: Sequence[str]) -> Hole:
    """The likeliest of some texts, by mean log-probability per token."""
    SamplingParams(choice=candidates)  # refuses what is no list of texts
    return Hole(name, SamplingParams(), tuple(candidates))


class Program:
    """A growing text and the values of its holes, beginning with a text or with a conversation to be answered."""

    def __init__(self, llm: LLM, start: str | list[dict] = ""):
        self.llm, self.ids, self.text = llm, [], ""
        self.values: dict[str, Any] = {}
        self.pending: list[str | Hole] = []
        self.prompt_tokens = self.cached_tokens = 0  # read by its requests, and of these already in the cache
        if isinstance(start, str):
            self._add_text(start)
        else:
            self.ids = llm.tokenizer.encode_chat(start)

    def __iadd__(self, part: str | Hole) -> Program:
        """Append a text or a hole. Nothing runs yet."""
        if not isinstance(part, (str, Hole)):
            raise ValueError(f"a program is made of texts, gen() and select(), not of {type(part).__name__}")
        self.pending.append(part)
        return self

    def __getitem__(self, name: str) -> Any:
        """The value of a hole; runs the program up to its end if need be."""
        if name not in self.values:
            run([self])
        if name not in self.values:
            raise KeyError(f"this program has no hole named {name!r}; it has {', '.join(self.values) or 'none'}")
        return self.values[name]

    def __str__(self) -> str:
        run([self])
        return self.text

    def fork(self, n: int) -> list[Program]:
        """n programs that go on from here. The text so far is computed once, for all of them."""
        if n < 1:
            raise ValueError(f"fork({n}): at least 1 branch")
        run([self])
        if self.ids:
            self.llm.generate([list(self.ids)], SamplingParams(max_tokens=0))
        branches = [copy.copy(self) for _ in range(n)]
        for branch in branches:
            branch.ids, branch.values, branch.pending = list(self.ids), dict(self.values), []
            branch.prompt_tokens = branch.cached_tokens = 0
        return branches

    def join(self, branches: Sequence[Program]) -> Program:
        """Run the branches together. Each hole that is theirs becomes a value of this program, the list of all."""
        run(branches)
        for name in {name: None for branch in branches for name in branch.values if name not in self.values}:
            self.values[name] = [branch.values.get(name) for branch in branches]
        self.prompt_tokens += sum(branch.prompt_tokens for branch in branches)
        self.cached_tokens += sum(branch.cached_tokens for branch in branches)
        return self

    def _add_text(self, text: str) -> None:
        if text:
            self.ids += self.llm.tokenizer.encode(text, add_special_tokens=not self.ids)
            self.text += text

    def _next_hole(self) -> Hole | None:
        while self.pending:
            if isinstance(part := self.pending.pop(0), Hole):
                return part
            self._add_text(part)
        return None

    def _fill(self, hole: Hole, answer: CompletionOutput) -> None:
        if hole.name is not None:
            self.values[hole.name] = answer.text
        tokenizer = self.llm.tokenizer
        ids = [token for token in answer.token_ids if token not in self.llm.engine.eos_token_ids]
        if tokenizer.decode(ids) != answer.text:  # a stop string was cut off: the text counts
            ids = tokenizer.encode(answer.text, add_special_tokens=False) if answer.text else []
        self.ids += ids
        self.text += answer.text


def fill(program: Program) -> Iterator[None]:
    """Fill in the holes of a program; yields when it needs a step of the engine. Closing it aborts what is asked."""
    engine = program.llm.engine
    while hole := program._next_hole():
        # `select` asks which text is likeliest: for each candidate the engine generates exactly that text (a choice of
        # one: all its tokens are forced, computed in one step and given their log-probabilities), with room for more
        # tokens than it can have.
        scores = [
            SamplingParams(choice=[text], max_tokens=4 * len(text.encode()) + 1, temperature=0, logprobs=0)
            for text in dict.fromkeys(hole.candidates)
        ]
        requests: list[Request] = []
        try:
            for params in scores or [hole.params]:
                requests.append(program.llm.add(list(program.ids), params))
                while not requests[0].finished:  # the others will find the text before the hole in the cache
                    yield
            while not all(request.finished for request in requests):
                yield
        finally:
            for request in requests:
                engine.abort(request)
        program.prompt_tokens += sum(len(request.prompt_ids) for request in requests)
        program.cached_tokens += sum(request.num_cached_tokens for request in requests)
        answers = [request.output().outputs[0] for request in requests]
        if errors := [answer.error for answer in answers if answer.error is not None]:
            raise RuntimeError(f"a hole could not be filled in: {errors[0]}")
        if scores:
            answers.sort(key=lambda answer: -answer.cumulative_logprob / len(answer.token_ids))
        program._fill(hole, answers[0])


def run(programs: Sequence[Program]) -> None:
    """Fill in all holes of some programs over the same model, side by side."""
    waiting = [fill(program) for program in programs]
    try:
        while waiting := [filling for filling in waiting if next(filling, "filled") != "filled"]:
            programs[0].llm.engine.step()
    finally:
        for filling in waiting:
            filling.close()
