"""Overlap scheduling: plan the next step while the model runs this one.

The problem. Between two steps the processor that computes waits for Python: tokens are turned into text, stops are
looked for, the next batch is chosen and laid out. On a fast accelerator that pause is a tenth of the step and more.

The idea. Which sequences the next step holds, and where their keys and values go, does not depend on which tokens this
step will draw. So the next step is planned on the assumption that every sequence goes on, with a placeholder where the
token is not known yet, and the placeholder is filled in the moment it is:

    model   |== step 1 ==|     |== step 2 ==|     |== step 3 ==|
    Python      plan 2    draw 1  accept 1     draw 2  accept 2
                         fill in   plan 3     fill in   plan 4

A sequence that turns out to have ended in step 1 is computed once too often in step 2; that row is thrown away. Its
blocks are free in the meantime and nobody can be given them before step 3. All bookkeeping still happens in the order
of the steps, so every answer is the one it would have been.

Whoever needs this step's tokens to know the next one's shape is not planned ahead: beams, guesses, structured answers,
scored prompts, prompts at all. A step that holds one of them, or that newcomers wait behind, is finished before the
next is planned, as Engine.step does without overlap.

Sources: SGLang's zero-overhead batch scheduler (release note of v0.4, 2024), NanoFlow (arXiv:2408.12757, section 4).
On a CPU the model already uses every core, so there is nothing to hide the planning behind; it is off unless asked for.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

import kernels
from model import Batch
from request import Answer, Delta
from sampling import Sampled
from sequence import Step

if TYPE_CHECKING:
    from engine import Engine

PLACEHOLDER = 0  # stands for a token until it is drawn; any id would do


@dataclass
class Flight:
    """A step that is being computed: every entry is one token of one answer, so row i of the logits is answers[i]'s."""

    step: Step
    answers: list[Answer]
    logits: Future


class Overlap:
    """Steps an engine so that the next decode step is planned and this one's text is made while the model runs."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="model")
        self.flight: Flight | None = None

    def step(self, deltas: list[Delta]) -> None:
        """As Engine.step; what was added to whom is in `deltas` even if this raises. Another step may be on its way."""
        engine = self.engine
        if self.flight is None:
            step, drafted = engine.plan()
            answers = self._plain_decodes(step)
            if answers is None or drafted:
                deltas += engine.run(step, drafted)
                return
            self._launch(step, answers, engine.lay_out(step, engine.wanted_rows(step)))
        flight = self.flight
        blanks, step, rows, batch = self._plan_next(flight)
        self.flight = None
        try:
            ready = [(answer, row) for row, answer in enumerate(flight.answers)]
            results = engine.pick(ready, flight.logits.result())
        except Exception as error:
            deltas += self._failed(flight, step, error)
            return
        for answer, result in zip(flight.answers, results, strict=True):
            if answer in blanks and isinstance(result, Sampled):
                answer.seq.tokens[-1] = result.token
                if blanks[answer] is not None:
                    batch.tokens[blanks[answer]] = result.token
        answers = self._plain_decodes(step) if step is not None else None
        if answers is not None:
            self._launch(step, answers, batch)
        for answer, result in zip(flight.answers, results, strict=True):
            engine.accept(answer, result, deltas, appended=answer in blanks)
        if step is not None and answers is None:  # somebody was preempted and computes more than one token again
            deltas += engine.run(step, [], rows, batch)

    def land(self) -> None:
        """Wait for a step that is on its way, and forget it: its memory is about to change hands."""
        if self.flight is not None:
            self.flight.logits.exception()
            self.flight = None

    def _plain_decodes(self, step: Step) -> list[Answer] | None:
        """The answers of a step in which each computes just its last token and needs nothing else; else None."""
        answers = [seq.answer for seq, n in step.entries if n == seq.num_new == 1]
        plain = len(answers) == len(step.entries) > 0 and all(self._plain(answer) for answer in answers)
        return answers if plain else None

    def _plain(self, answer: Answer) -> bool:
        request = answer.request
        whole = request.params.prompt_logprobs is None and len(request.answers) == request.width
        return whole and answer.guide is None and request.beams is None and request.max_tokens > 0

    def _plan_next(self, flight: Flight) -> tuple[dict[Answer, int | None], Step | None, list[range], Batch | None]:
        """Schedule the step after `flight`, as if none of its answers ended now unless by length.

        Returns the answers that got a placeholder with its row in the batch (None: not in the step), the step, its
        wanted rows and its batch; the step is None where it cannot be planned yet or has nothing to do.
        """
        engine, scheduler = self.engine, self.engine.scheduler
        if engine.speculator is not None or scheduler.waiting:
            return {}, None, [], None
        going_on = [c for c in flight.answers if c.finish_reason is None]
        going_on = [c for c in going_on if c.sampler.n_output + 1 < c.request.max_tokens]
        if not going_on:
            return {}, None, [], None
        for answer in going_on:
            answer.seq.tokens.append(PLACEHOLDER)
        step, _ = engine.plan()
        blanks: dict[Answer, int | None] = dict.fromkeys(going_on)
        if not step.entries:
            return blanks, None, [], None
        end = 0
        for seq, n in step.entries:
            end += n
            if seq.answer in blanks and n == seq.num_new:
                blanks[seq.answer] = end - 1
        rows = engine.wanted_rows(step)
        return blanks, step, rows, engine.lay_out(step, rows)

    def _launch(self, step: Step, answers: list[Answer], batch: Batch) -> None:
        @torch.inference_mode()
        def compute() -> torch.Tensor:
            kernels.use_device(self.engine.device)
            self.engine.kv.apply(step)
            return self.engine.run_model(batch)

        future = self.worker.submit(compute)
        self.engine.scheduler.computed(step)  # everything that reads those keys and values runs later
        self.flight = Flight(step, answers, future)

    def _failed(self, flight: Flight, planned: Step | None, error: Exception) -> list[Delta]:
        """End the requests of a step that raised and of the one planned behind it, whose blocks were not moved yet.

        What was cached on the strength of it is forgotten.
        """
        engine, steps = self.engine, [step for step in (planned, flight.step) if step is not None]
        for step in steps:
            engine.scheduler.fail(step)
        deltas = engine.fail([seq.answer.request for step in steps for seq, _ in step.entries], error)
        engine.scheduler.drop_cache()
        return deltas
