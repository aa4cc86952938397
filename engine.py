"""The step loop: everything meets here, and there is only one way through.

The problem. Prefill, decode, chunks, prefix hits, preempted and forked requests must share one machine, and no answer
may depend on what else was running.

The idea is the whole engine: catch up. A sequence knows its tokens and how many of them are in the cache. A step is

    extend     guesses and forced tokens become ordinary tokens that are not computed yet  (speculative.py)
    schedule   which sequences compute how many of their missing tokens                    (scheduler.py)
    lay out    those tokens as one flat run, with positions, slots and page tables         (here)
    run        the model once over the run                                                 (model.py, compiled.py)
    decide     the next token wherever the last known one was computed                     (sampling.py)
    accept     it: text, stop, end; finished sequences give back their blocks              (request.py)

and nothing asks which "mode" it is in. Parallel answers (n > 1) are one sequence until its prompt is computed; the row
of logits that follows is sampled n times, and n - 1 forks share the prompt's blocks. Who decides is a list: prompts are
scored, beams are searched (beam.py), all other rows are sampled.

Sources: Orca (Yu et al. 2022, section 4) and vLLM (Kwon et al. 2023, section 4; 4.3 for slots and block tables).
Left out: threads; the engine is driven by whoever calls step().
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import NamedTuple

import torch

import kernels
from beam import BeamSearch
from compiled import ModelRunner
from formats.command_line import warn
from formats.fields import ParameterError
from model import Batch
from request import Answer, Delta, Request
from sampling import Sampled, SamplerState, SamplingParams, prompt_logprobs, sample
from scheduler import Scheduler, Sequence, Step
from speculative import Drafts, verdict
from structured import Guides
from tokenizer import Tokenizer


class Computed(NamedTuple):
    """An entry of a step that has logits: those of `positions` are the rows `first` to `last`."""

    answer: Answer
    positions: range
    first: int
    last: int


class Engine:
    """Runs requests to their end, a step at a time. Not thread-safe: one thread adds, steps and aborts."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        seed: int = 0,
        trace: Callable[[str], None] | None = None,
        jump_forward: bool = True,
    ):
        self.runner, self.model, self.kv = runner, runner.model, runner.kv
        self.scheduler, self.tokenizer, self.eos_token_ids = scheduler, tokenizer, eos_token_ids
        self.observers: list[Callable[[Step], None]] = []  # are shown each step before it is computed
        if trace is not None:
            self.observers.append(lambda step: trace(step.describe()))
        self.device = self.model.norm.weight.device
        self.seeds = random.Random(seed)  # for requests that bring none
        self.ids = itertools.count()
        self.requests: dict[int, Request] = {}
        self.guides = Guides(tokenizer, self.model.config.vocab_size, eos_token_ids, jump_forward)
        self.drafts = Drafts()
        self.deciders = [self.draw_tokens]  # and those that requests have brought: score_prompts, search_beams
        self.rows: dict[Answer, int] = {}  # of the last step: where the latest token of each was drawn

    # -- requests come and go

    def add(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        prompt: str | None = None,
        priority: int = 0,
        namespace: Hashable = None,
    ) -> Request:
        """Queue a request. Raises ValueError, with nothing queued, if it could never be served."""
        self._check(prompt_ids, params, priority, namespace)
        guide = self.guides.answer(params, prompt_ids) if params.structured else None
        key = None if namespace is None else (type(namespace), namespace)  # 1, True and 1.0 are equal
        seq = Sequence(list(prompt_ids), params.max_tokens, None, priority, time.perf_counter(), key)
        seq.read_cache = params.prompt_logprobs is None  # a cached prompt token has no logits to score
        seq.width = params.beam_width or 1
        self.scheduler.add(seq)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        request = Request(next(self.ids), seq, list(prompt_ids), params, stop_ids, self.tokenizer, prompt, guide)
        seed = self.seeds.getrandbits(63) if params.seed is None else params.seed
        sampler = SamplerState(params, prompt_ids, 0, seed, sorted(self.eos_token_ids))
        seq.answer = Answer(request, 0, seq, sampler, guide and guide.fork())
        request.answers.append(seq.answer)
        if params.beam_width and request.max_tokens:
            request.search = BeamSearch(request, seq.answer)
            self._use(self.search_beams)
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]  # nothing predicts the first token
            self._use(self.score_prompts)
        self.requests[request.id] = request
        return request

    def abort(self, request: Request) -> list[Delta]:
        """Stop a request wherever it is; its blocks are free at once. Finished or unknown: nothing happens."""
        return self._end(request, "abort") if self.requests.get(request.id) is request else []

    def _use(self, decider: Callable) -> None:
        if decider not in self.deciders:
            self.deciders.insert(0, decider)

    def _check(self, prompt_ids: list[int], params: SamplingParams, priority: int, namespace: Hashable) -> None:
        vocab = self.model.config.vocab_size
        if not prompt_ids:
            raise ValueError("prompt is empty: give at least one token (this tokenizer adds no BOS of its own)")
        ids = {"prompt": prompt_ids, "logit_bias": params.logit_bias, "stop_token_ids": params.stop_token_ids}
        for name, tokens in ids.items():
            for token in tokens:
                if type(token) is not int or not 0 <= token < vocab:
                    raise ParameterError(name, token, f"a token id: an integer from 0 to {vocab - 1}")
        if type(priority) is not int:
            raise ValueError(f"priority={priority!r}: must be an integer, since requests are ordered by it")
        try:
            hash(namespace)
        except TypeError:
            raise ValueError(f"namespace={namespace!r}: must be hashable, such as a text") from None
        if params.beam_width and params.stop:
            raise ValueError(f"stop={params.stop} with beam_width: a beam search ends at tokens; use stop_token_ids")

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_unfinished()

    @property
    def speculator(self):
        """Who guesses (drafting/budget.py); may be exchanged between two steps."""
        return self.drafts.speculator

    @speculator.setter
    def speculator(self, speculator) -> None:
        self.drafts.speculator = speculator

    # -- one step

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        """Compute one step and return what it added to whom. Whatever goes wrong ends requests, never the engine."""
        deltas: list[Delta] = []
        if self.device.type == "cuda":
            kernels.use_device(self.device)
        try:
            self.advance(deltas)
        except Exception as error:  # outside the model's part of a step, so no entry of its plan can be trusted
            self.discard()
            self.fail(self.requests.values(), error, deltas)
            self.scheduler.drop_cache()
        return deltas

    def advance(self, deltas: list[Delta]) -> None:
        """One step, in the order of the docstring above; overlap.py has another. An end is in `deltas` at once."""
        self.run(self.plan(), deltas)

    def discard(self) -> None:
        """Forget a step that is on its way; here there is none."""

    def plan(self) -> Step:
        self.drafts.drafted = []
        if self.drafts.speculator is not None or self.drafts.jumping:
            self.drafts.extend(self.scheduler.running[::-1])  # a trained head reads self.rows
        self.rows.clear()
        step = self.scheduler.schedule()
        if self.drafts.drafted:
            self.drafts.trim(step, self.scheduler)
        if self.observers:
            self.show(step)
        return step

    def show(self, step: Step) -> None:
        for observe in self.observers[:]:
            try:
                observe(step)
            except Exception as error:
                warn(f"an observer of steps is switched off: {type(error).__name__}: {error}")
                self.observers.remove(observe)

    def run(self, step: Step, deltas: list[Delta], planned: tuple[Batch, list[Computed]] | None = None) -> None:
        """Compute a step, which may be laid out already, and decide what follows."""
        if not step.entries:
            return
        try:
            self.kv.apply(step)
            batch, computed = planned or lay_out(step, self.scheduler.block_size, self.model.norm.weight.device)
            logits = self.runner.run(batch)
            self.scheduler.computed(step)
            for decide in self.deciders:
                decide(computed, logits, deltas)
            if self.drafts.drafted:
                self.drafts.observe()
        except Exception as error:  # whatever went wrong, it went wrong for the requests of this step
            self.scheduler.fail(step)
            self.fail([seq.answer.request for seq, _ in step.entries], error, deltas)

    # -- who decides: each reads the rows of its own kind

    def score_prompts(self, computed: list[Computed], logits: torch.Tensor, deltas: list[Delta]) -> None:
        for answer, positions, first, last in computed:
            request = answer.request
            if request.params.prompt_logprobs is not None and answer.index == 0:
                try:
                    request.score_prompt(positions, logits[first : last + 1])
                except ValueError as error:
                    self._end(request, "error", str(error), deltas)

    def search_beams(self, computed: list[Computed], logits: torch.Tensor, deltas: list[Delta]) -> None:
        for each in computed:
            request, search = each.answer.request, each.answer.request.search
            if search is None or each.answer.seq.num_new or request.finished:
                continue
            try:
                if search.offer(each.answer, logits[each.last].clone()):
                    deltas += search.advance(lambda beam, request=request: self.fork(beam), self.scheduler.finish)
                    self._close_if_finished(request)
            except Exception as error:
                self.fail([request], error, deltas)

    def draw_tokens(self, computed: list[Computed], logits: torch.Tensor, deltas: list[Delta]) -> None:
        """Where the last known token was computed: sample, check the draft against it, accept, and go on behind it."""
        ready: dict[Answer, int] = {}  # and the last row of each
        for each in computed:
            answer, request = each.answer, each.answer.request
            if answer.seq.num_new == 0 and request.search is None and answer.finish_reason is None:
                ready[answer] = each.last
                while len(request.answers) < request.width:
                    ready[self.fork(answer)] = each.last
        while ready:
            results, following = self.pick(ready, logits), {}
            for answer, result in results.items():
                if self.accept(answer, result, deltas):
                    following[answer] = ready[answer]
            ready = following

    def pick(self, ready: dict[Answer, int], logits: torch.Tensor) -> dict[Answer, Sampled | ValueError]:
        """The next token of each answer: the forced one, or drawn from its row. A draft's rows end at the last one."""
        results: dict[Answer, Sampled | ValueError] = dict.fromkeys(ready)
        drawn, samplers, masks, rows = [], [], [], []
        for answer, last in ready.items():
            row = self.rows[answer] = last - answer.seq.num_draft
            forced, params = answer.forced, answer.request.params
            if not forced:
                drawn.append(answer)
                samplers.append(answer.sampler)
                masks.append(answer.guide and answer.guide.mask())
                rows.append(row)
            elif params.scored:
                (results[answer],) = prompt_logprobs(logits[row : row + 1], forced[:1], params.logprobs or 0)
            else:
                results[answer] = Sampled(forced[0])
        sampled = sample(logits, samplers, masks, rows) if drawn else []
        for answer, row, mask, result in zip(drawn, rows, masks, sampled, strict=True):
            if answer.guess_probs and answer.seq.num_draft and isinstance(result, Sampled):
                result = verdict(answer, logits[row].float(), answer.seq.tokens[-answer.seq.num_draft], mask)
            results[answer] = result
        return results

    def accept(self, answer: Answer, result: Sampled | ValueError, deltas: list[Delta]) -> bool:
        """Give an answer its token. Returns whether its draft had it, so that its next row holds good too."""
        request = answer.request
        if answer.finish_reason is not None:  # a sibling's bad row ended the request a moment ago
            return False
        if request.max_tokens == 0 or isinstance(result, Exception):
            reason, error = ("length", None) if request.max_tokens == 0 else ("error", str(result))
            self._end(request, reason, error, deltas)
            return False
        try:
            right = answer.seq.num_draft > 0 and self.drafts.verify(answer, result.token, self.scheduler)
            if not right:
                answer.seq.tokens.append(result.token)
            deltas.append(answer.accept(result))
        except Exception as error:  # whatever it is, it is the fault of this request alone
            self.fail([request], error, deltas)
            return False
        request.first_token = request.first_token or time.perf_counter()
        if answer.forced:
            self.drafts.jumping.add(answer)
        if answer.finish_reason is not None:
            if answer.seq.num_draft:
                self.scheduler.truncate(answer.seq, len(answer.seq.tokens) - answer.seq.num_draft)
            self.scheduler.finish(answer.seq)
            self._close_if_finished(request)
        return right and answer.finish_reason is None

    def fork(self, answer: Answer) -> Answer:
        """One more answer with the same past; it shares all blocks until it writes."""
        request = answer.request
        child = self.scheduler.fork(answer.seq)
        child.answer = answer.fork(len(request.answers), child)
        request.answers.append(child.answer)
        return child.answer

    # -- ends

    def fail(self, requests: Iterable[Request], error: Exception, deltas: list[Delta]) -> None:
        """End requests with the cause; one that is named more than once, for its several answers, ends once."""
        cause, requests = f"{type(error).__name__}: {error}", list(dict.fromkeys(requests))
        warn(f"{len(requests)} request(s) failed: {cause}")
        for request in requests:
            self._end(request, "error", cause, deltas)

    def _end(
        self, request: Request, reason: str, error: str | None = None, deltas: list[Delta] | None = None
    ) -> list[Delta]:
        """End all unfinished answers of a request without another token."""
        deltas = [] if deltas is None else deltas
        for answer in request.answers:
            if answer.finish_reason is None:
                self.scheduler.finish(answer.seq, keep=reason != "error")  # what failed is not cached
                deltas.append(answer.end(reason, error))
        self._close_if_finished(request)
        return deltas

    def _close_if_finished(self, request: Request) -> None:
        if all(answer.finish_reason for answer in request.answers):
            request.finished_at = time.perf_counter()
            self.requests.pop(request.id, None)


# What `lay_out` makes of a step of two sequences, with pages of five tokens:
#
#     step       A: tokens 4..8, pages [7, 2]   B: token 9, pages [5, 1, 3]
#     tokens     [ a4 a5 a6 a7 a8 | b9 ]        positions [ 4 5 6 7 8 | 9 ]
#     slots      [ 39 10 11 12 13 |  9 ]        page of the position * 5 + offset in the page
#     tables     [[7 2 0], [5 1 3]]             padded with block 0, which is never handed out


def lay_out(step: Step, block_size: int, device, rows: list[range] | None = None) -> tuple[Batch, list[Computed]]:
    """The tokens of a step as one flat run, and who gets logits: of the positions `rows`, or as each answer says."""
    tokens, positions, slots, starts, tables, lens, logit_rows, computed = [], [], [], [0], [], [], [], []
    for i, (seq, n) in enumerate(step.entries):
        start, end, table = seq.num_computed, seq.num_computed + n, seq.block_table
        read = seq.answer.rows_wanted(end) if rows is None else rows[i]
        if read:
            row = starts[-1] - start  # of the run, at position 0
            computed.append(Computed(seq.answer, read, len(logit_rows), len(logit_rows) + len(read) - 1))
            logit_rows += range(row + read.start, row + read.stop)
        tokens += seq.tokens[start:end]
        positions += range(start, end)
        for p in range(start, end):
            slots.append(table[p // block_size] * block_size + p % block_size)
        starts.append(starts[-1] + n)
        tables.append(table)
        lens.append(end)
    one_each = len(logit_rows) == len(tokens) == len(tables)
    if len(tables) == 1:  # torch.compile takes a size of one for a constant, so an empty sequence pads the batch
        tables, lens, starts = [*tables, []], [*lens, 0], [*starts, *starts[-1:]]
    width = max(2, len(max(tables, key=len)))
    for s, table in enumerate(tables):
        tables[s] = table + [0] * (width - len(table))
    flat = torch.tensor([tokens, positions, slots], device=device)  # int64 [3, T]
    int32 = partial(torch.tensor, dtype=torch.int32, device=device)
    rows_read = torch.tensor(logit_rows, dtype=torch.int64, device=device)
    return Batch(*flat.unbind(), int32(tables), int32(starts), int32(lens), rows_read, one_each), computed
