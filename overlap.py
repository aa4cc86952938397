"""Overlap scheduling: plan the next step while the model runs this one.

Between two steps the processor that computes waits for Python. But which sequences the next step holds, and where their
keys and values go, does not depend on which tokens this step will draw. So the next step is planned as if every
sequence went on, with a placeholder, a draft of one token, that is overwritten the moment the token is drawn.

    model   |== step 1 ==|     |== step 2 ==|     |== step 3 ==|
    Python      plan 2    draw 1  accept 1     draw 2  accept 2
                         fill in   plan 3     fill in   plan 4

A sequence that turns out to have ended in step 1 is computed once too often in step 2; its blocks are given to nobody
before step 3. Steps whose shape depends on the tokens of this one (beams, guesses, structures, prompts) are not planned
ahead. Sources: SGLang v0.4 (2024), NanoFlow (arXiv:2408.12757, section 4). On a CPU the model uses every core already.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

import kernels
from engine import Computed, Engine, lay_out
from model import Batch
from request import Answer, Delta
from sampling import Sampled
from scheduler import Step

PLACEHOLDER = 0  # stands for a token until it is drawn; any id would do


@dataclass
class Flight:
    """A step that is being computed: every entry is one token of one answer; row i of the logits is answers[i]'s."""

    step: Step
    answers: list[Answer]
    logits: Future


@dataclass
class NextStep:
    """A step planned behind one that is being computed, laid out with placeholders."""

    step: Step
    planned: tuple[Batch, list[Computed]]
    row_of: dict[Answer, int]  # the row of the batch that holds an answer's placeholder


class OverlapEngine(Engine):
    """An engine whose next decode step is planned, and whose text is made, while the model runs."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="model")
        self.flight: Flight | None = None

    def advance(self, deltas: list[Delta]) -> None:
        """As Engine.advance; another step may be on its way when it returns."""
        if self.flight is None:
            step = self.plan()
            answers = [] if self.drafts.drafted else plain_decodes(step)
            if not answers:
                self.run(step, deltas)
                return
            self.launch(step, answers, self.lay_out(step)[0])
        flight = self.flight
        following = self.plan_next(flight)
        self.flight = None
        try:
            ready = {answer: row + answer.seq.num_draft for row, answer in enumerate(flight.answers)}
            results = self.pick(ready, flight.logits.result())
        except Exception as error:
            self.fail_both(flight.step, following and following.step, error, deltas)
            return
        for answer, result in results.items():
            if answer.seq.num_draft and isinstance(result, Sampled):
                answer.seq.tokens[-1] = result.token
                if following is not None and answer in following.row_of:
                    following.planned[0].tokens[following.row_of[answer]] = result.token
        answers = plain_decodes(following.step) if following is not None else []
        if answers:
            self.launch(following.step, answers, following.planned[0])
        for answer, result in results.items():
            self.accept(answer, result, deltas)
        if following is not None and not answers:  # a preempted sequence computes more than one token again
            self.run(following.step, deltas, following.planned)

    def discard(self) -> None:
        """Wait for a step that is on its way, and forget it: its memory is about to change hands."""
        if self.flight is not None:
            self.flight.logits.exception()
            self.flight = None

    def plan_next(self, flight: Flight) -> NextStep | None:
        """Schedule the step after `flight`, as if its answers ended by length only; None where that is too early."""
        if self.speculator is not None or self.scheduler.waiting:
            return None
        going_on = [a for a in flight.answers if a.finish_reason is None]
        going_on = [a for a in going_on if a.sampler.n_output + 1 < a.request.max_tokens]
        if not going_on:
            return None
        for answer in going_on:
            answer.seq.tokens.append(PLACEHOLDER)
            answer.seq.num_draft = 1
        step = self.plan()
        if not step.entries:
            return None
        row_of, end = {}, 0
        for seq, n in step.entries:
            end += n
            if seq.num_draft and n == seq.num_new:
                row_of[seq.answer] = end - 1
        ends = [(seq.num_computed + n, len(seq.tokens)) for seq, n in step.entries]
        rows = [range(end - (end == known), end) for end, known in ends]  # a placeholder is no draft to check
        return NextStep(step, self.lay_out(step, rows), row_of)

    def lay_out(self, step: Step, rows: list[range] | None = None) -> tuple[Batch, list[Computed]]:
        return lay_out(step, self.scheduler.block_size, self.model.norm.weight.device, rows)

    def launch(self, step: Step, answers: list[Answer], batch: Batch) -> None:
        @torch.inference_mode()
        def compute() -> torch.Tensor:
            kernels.use_device(self.device)
            self.kv.apply(step)
            return self.runner.run(batch)

        future = self.worker.submit(compute)
        self.scheduler.computed(step)  # everything that reads those keys and values runs later
        self.flight = Flight(step, answers, future)

    def fail_both(self, step: Step, following: Step | None, error: Exception, deltas: list[Delta]) -> None:
        """End the requests of a step that raised and of the one planned behind it; forget what was cached on it."""
        steps = [following, step] if following is not None else [step]
        for failed in steps:
            self.scheduler.fail(failed)
        self.fail([seq.answer.request for failed in steps for seq, _ in failed.entries], error, deltas)
        self.scheduler.drop_cache()


def plain_decodes(step: Step) -> list[Answer]:
    """The answers of a step in which each computes just its last token and needs nothing else; else none."""
    answers = [seq.answer for seq, n in step.entries if n == seq.num_new == 1]
    return answers if len(answers) == len(step.entries) and all(map(is_plain, answers)) else []


def is_plain(answer: Answer) -> bool:
    request = answer.request
    forked = request.params.prompt_logprobs is None and len(request.answers) == request.width
    return forked and answer.guide is None and request.search is None and request.max_tokens > 0
