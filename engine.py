"""The step loop: everything meets here, and there is only one way through.

The problem. Prefill, decode, chunks, prefix hits, preempted and forked requests must share one machine, and no answer
may depend on what else was running.

The idea is the whole engine: catch up. A sequence knows its tokens and how many of them are in the cache. A step is

    schedule   which sequences compute how many of their missing tokens                 (scheduler.py)
    lay out    those tokens as one flat run, with positions, slots and page tables      (layout.py)
    run        the model once over the run                                             (model.py)
    sample     wherever the last known token of a sequence was computed                (sampling.py)
    accept     the new token: text, stop, end; finished sequences give back their blocks (request.py)

and nothing asks which "mode" it is in. Guesses and forced tokens are carried at the end of a sequence and computed like
known ones; as long as the token comes out that stands there, the next row holds good too (drafts.py). Parallel answers
(n > 1) are one sequence until its prompt is computed; the row of logits that follows is sampled n times and n - 1 forks
share the prompt's blocks. A beam search is the same with another answer among the candidates (beam.py).

Failures stay where they belong: a request that is wrong is refused before it is queued, a row of bad logits ends its
own request, a step that raises ends the requests in it. The others go on, and every block is accounted for.

Sources: Orca (Yu et al. 2022, section 4), vLLM (Kwon et al. 2023, section 4). Left out: threads; the engine is driven
by whoever calls step().
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Hashable, Iterable

import torch

import kernels
from beam import BeamSearch, Candidate
from drafting.budget import Speculator
from drafts import Drafts, note, rows_to_read
from guided import Guides
from kv_paged import KVCache, blocks_needed
from layout import build_batch
from model import Batch, Transformer
from overlap import Overlap
from request import Answer, Delta, Request
from sampling import Sampled, SamplerState, SamplingParams, prompt_logprobs, sample
from scheduler import Scheduler, Sequence, Step
from speculative import verdict
from tokenizer import Tokenizer


class Engine:
    """Runs requests to their end, a step at a time. Not thread-safe: one thread adds, steps and aborts."""

    def __init__(
        self,
        model: Transformer,
        kv: KVCache,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        seed: int = 0,
        trace: Callable[[str], None] | None = None,
        jump_forward: bool = True,
        speculator: Speculator | None = None,
        overlap: bool = False,
    ):
        self.model, self.kv, self.tokenizer = model, kv, tokenizer
        self.eos_token_ids, self.trace = eos_token_ids, trace
        self.device = model.norm.device
        self.run_model: Callable[[Batch], torch.Tensor] = lambda batch: model(batch, kv)
        self.seeds = random.Random(seed)  # for requests that bring none
        self.ids = itertools.count()
        self.requests: dict[int, Request] = {}
        self.guides = Guides(tokenizer, model.config.vocab_size, eos_token_ids, jump_forward)
        self.drafts = Drafts(scheduler, speculator)
        self.overlap = Overlap(self) if overlap else None
        self.rows: dict[Answer, int] = {}  # of the last step: where the latest token of each was drawn, for who guesses

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
        vocab, context = self.model.config.vocab_size, self.scheduler.max_model_len
        if not prompt_ids:
            raise ValueError("prompt is empty: give at least one token (this tokenizer adds no BOS of its own)")
        for token in prompt_ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                raise ValueError(
                    f"prompt token {token!r} is not an id of this model: ids are integers 0 to {vocab - 1}"
                )
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority={priority!r}: must be an integer, since requests are ordered by it")
        try:
            hash(namespace)
        except TypeError:
            raise ValueError(f"namespace={namespace!r}: must be hashable, such as a text") from None
        params.check_vocab(vocab)
        room = max(context - len(prompt_ids), 1)  # a prompt that is too long is the scheduler's to refuse
        held = self.scheduler.pool.total * self.scheduler.block_size  # tokens; the last one of an answer needs no place
        fits = min(room, max(held + 1 - len(prompt_ids), 1))
        limit = fits if params.max_tokens is None else min(params.max_tokens, room)
        self._check_beams(params, len(prompt_ids) + limit)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        request = Request(next(self.ids), list(prompt_ids), params, limit, stop_ids, self.tokenizer, prompt)
        request.guide = self.guides.answer(params, prompt_ids)
        seq = Sequence(
            list(prompt_ids),
            max(limit, 1),
            priority=priority,
            arrival=request.arrival,
            namespace=None if namespace is None else (type(namespace), namespace),  # 1, True and 1.0 are equal
            read_cache=params.prompt_logprobs is None,  # a cached prompt token has no logits to score
        )
        self.scheduler.add(seq)
        seed = self.seeds.getrandbits(63) if params.seed is None else params.seed
        state = SamplerState(params, prompt_ids, 0, seed, sorted(self.eos_token_ids))
        seq.answer = Answer(request, 0, seq, state)
        request.seq = seq
        request.answers.append(seq.answer)
        if params.beam_width:
            request.beams = BeamSearch(request, seq.answer)
        self.requests[request.id] = request
        return request

    def abort(self, request: Request) -> list[Delta]:
        """Stop a request wherever it is; its blocks are free at once. Finished or unknown: nothing happens."""
        return self._end(request, "abort") if self.requests.get(request.id) is request else []

    def _check_beams(self, params: SamplingParams, length: int) -> None:
        """All beams of a search must run side by side, or those in the pool would wait for those outside it."""
        if params.beam_width is None:
            return
        if params.stop:
            raise ValueError(f"stop={params.stop} with beam_width: a beam search ends at tokens; use stop_token_ids")
        scheduler = self.scheduler
        needed = params.beam_width * blocks_needed(length, scheduler.block_size)
        if params.beam_width > scheduler.max_num_seqs or needed > scheduler.pool.total:
            raise ValueError(
                f"beam_width={params.beam_width} at {length} tokens needs as many seats and {needed} blocks; there are "
                f"max_num_seqs={scheduler.max_num_seqs} and {scheduler.pool.total} blocks: lower beam_width or "
                "max_tokens, or raise max_num_seqs or --kv-memory"
            )

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_unfinished()

    @property
    def scheduler(self) -> Scheduler:
        """Who decides what is computed; may be exchanged while nothing runs."""
        return self.drafts.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Scheduler) -> None:
        self.drafts.scheduler = scheduler

    @property
    def speculator(self) -> Speculator | None:
        """Who guesses; may be exchanged between two steps."""
        return self.drafts.speculator

    @speculator.setter
    def speculator(self, speculator: Speculator | None) -> None:
        self.drafts.speculator = speculator

    # -- one step

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        """Compute one step and return what it added to whom. Whatever goes wrong ends requests, never the engine."""
        kernels.use_device(self.device)
        deltas: list[Delta] = []
        try:
            if self.overlap is None:
                deltas += self.run(*self.plan())
            else:
                self.overlap.step(deltas)
        except Exception as error:  # not in the model's part of the step, so nobody's place in the plan can be trusted
            if self.overlap is not None:
                self.overlap.land()
            deltas += self.fail(self.requests.values(), error)
            self.scheduler.drop_cache()
        return deltas

    def plan(self) -> tuple[Step, list[Answer]]:
        """Choose the next step; also the answers that carry a draft."""
        drafted = self.drafts.append()
        self.rows.clear()
        step = self.scheduler.schedule()
        self.drafts.drop_unscheduled(step, drafted)
        if self.trace:
            try:
                self.trace(step.describe())
            except Exception as error:
                note(f"the trace is switched off: {type(error).__name__}: {error}")
                self.trace = None
        return step, drafted

    def run(
        self, step: Step, drafted: list[Answer], rows: list[range] | None = None, batch: Batch | None = None
    ) -> list[Delta]:
        """Compute a planned step, which may be laid out already, draw what is to be drawn, and accept it."""
        if not step.entries:
            return []
        deltas: list[Delta] = []
        try:
            self.kv.apply(step)
            rows = self.wanted_rows(step) if rows is None else rows
            logits = self.run_model(self.lay_out(step, rows) if batch is None else batch)
            self.scheduler.computed(step)
            searches, ready = self._read_logits(step, rows, logits, deltas)
            while ready:
                results = self.pick(ready, logits)
                ready = [r for r, result in zip(ready, results, strict=True) if self.accept(r[0], result, deltas)]
        except Exception as error:  # whatever went wrong, it went wrong for the requests of this step
            self.scheduler.fail(step)
            return deltas + self.fail([seq.answer.request for seq, _ in step.entries], error)
        self.drafts.observe(drafted)
        for request in searches:
            try:
                deltas += self._advance_beams(request)
            except Exception as error:
                deltas += self.fail([request], error)
        return deltas

    def lay_out(self, step: Step, rows: list[range]) -> Batch:
        """The batch of a step; `rows` as `wanted_rows` has them."""
        return build_batch(step, rows, self.scheduler.block_size, self.model.norm.device)

    def wanted_rows(self, step: Step) -> list[range]:
        """For each entry, the positions whose logits are needed: the last known token, a draft, a prompt to score."""
        wanted = []
        for seq, n in step.entries:
            start, end, request = seq.num_computed, seq.num_computed + n, seq.answer.request
            first = (end - 1 if end == len(seq.tokens) else end) - rows_to_read(seq.answer)
            if request.params.prompt_logprobs is not None and seq.answer.index == 0:
                scored = len(request.prompt_logprobs) - 1  # rows used so far: row p scores token p + 1
                if scored < min(end, seq.num_prompt - 1):
                    first = min(first, max(start, scored))
            wanted.append(range(first, end))
        return wanted

    def _read_logits(
        self, step: Step, rows: list[range], logits: torch.Tensor, deltas: list[Delta]
    ) -> tuple[list[Request], list[tuple]]:
        """Score prompts (one that cannot be is an end, in `deltas`), fork parallel answers, and see who has caught up.

        Returns the beam searches that now have all their logits, and (answer, its last row) of everyone else.
        """
        searches, ready, row = [], [], 0
        for (seq, _), wanted in zip(step.entries, rows, strict=True):
            answer, request, start = seq.answer, seq.answer.request, row
            row += len(wanted)
            if request.params.prompt_logprobs is not None and wanted:
                bad = self._score_prompt(request, wanted, logits[start:row])
                if bad is not None:
                    deltas += self._end(request, "error", str(bad))
                    continue
            if seq.num_new == 0 and request.beams is not None and request.max_tokens > 0:
                if request.beams.offer(answer, logits[row - 1].clone()):
                    searches.append(request)
            elif seq.num_new == 0 and answer.finish_reason is None:
                caught_up = [answer]
                while len(request.answers) < request.width:
                    caught_up.append(self._fork(request, seq))
                ready += [(each, row - 1) for each in caught_up]
        return searches, ready

    def pick(self, ready: list[tuple[Answer, int]], logits: torch.Tensor) -> list[Sampled | ValueError]:
        """The next token of each answer: the forced one, or drawn from its row. A draft's rows end at the last one."""
        results: list[Sampled | ValueError | None] = [None] * len(ready)
        drawn, rows = [], []
        for i, (answer, last) in enumerate(ready):
            row, params = last - answer.seq.num_draft, answer.request.params
            self.rows[answer] = row
            if not answer.forced:
                drawn.append(i)
                rows.append(row)
            elif params.scored:
                (results[i],) = prompt_logprobs(logits[row : row + 1], answer.forced[:1], params.logprobs or 0)
            else:
                results[i] = Sampled(answer.forced[0])
        if drawn:
            answers = [ready[i][0] for i in drawn]
            masks = [answer.guide and answer.guide.mask() for answer in answers]
            sampled = sample(logits, [answer.sampler for answer in answers], masks, rows)
            for i, answer, row, mask, result in zip(drawn, answers, rows, masks, sampled, strict=True):
                if answer.seq.num_draft and answer.guess_probs and isinstance(result, Sampled):
                    result = verdict(answer, logits[row].float(), answer.seq.tokens[-answer.seq.num_draft], mask)
                results[i] = result
        return results

    def _advance_beams(self, request: Request) -> list[Delta]:
        """One step of a search: candidates go on or are forked off, beams without one end, and so may the search."""
        search = request.beams
        candidates = search.choose()
        if not candidates and not search.finished:
            raise ValueError("no continuation is possible: logit_bias or the structure forbids every token")
        request.first_token = request.first_token or time.perf_counter()
        beams: dict[Answer, Candidate] = {}
        for candidate in candidates:  # the first candidate goes on in its parent's sequence, the others in forks of it
            beam = self._fork(request, candidate.parent.seq) if candidate.parent in beams else candidate.parent
            beam.logprobs = list(candidate.parent.logprobs)
            beams[beam] = candidate
        for beam in search.live:
            if beam not in beams:
                self.scheduler.finish(beam.seq)
        for beam, candidate in beams.items():
            beam.commit(candidate.sampled.token)
            beam.seq.tokens.append(candidate.sampled.token)
            beam.logprobs.append(candidate.sampled)
        search.live = {beam: candidate.score for beam, candidate in beams.items()}
        if beams:
            request.answers = list(beams)
            return []
        request.answers, deltas = search.answers()
        self._close_if_finished(request)
        return deltas

    def accept(self, answer: Answer, result: Sampled | ValueError, deltas: list[Delta], appended: bool = False) -> bool:
        """Give a answer its token. Returns whether its draft had it, so that its next row holds good too.

        Whatever goes wrong here is the fault of this request alone.
        """
        request, seq = answer.request, answer.seq
        if answer.finish_reason is not None:  # a sibling's bad row ended the request a moment ago
            return False
        if request.max_tokens == 0 or isinstance(result, Exception):
            deltas += (
                self._end(request, "length") if request.max_tokens == 0 else self._end(request, "error", str(result))
            )
            return False
        try:
            deltas.append(answer.accept(result))
        except Exception as error:
            deltas += self.fail([request], error)
            return False
        request.first_token = request.first_token or time.perf_counter()
        if self.drafts.settle(answer, result.token):
            return True
        if not appended:
            seq.tokens.append(result.token)
        if answer.finish_reason is not None:
            self.scheduler.finish(seq)
            self._close_if_finished(request)
        return False

    def _score_prompt(self, request: Request, wanted: range, logits: torch.Tensor) -> ValueError | None:
        """Row p of the prompt says how likely its token p + 1 was. Returns what is wrong with a row of them, if any."""
        done = len(request.prompt_logprobs)
        positions = [p for p in wanted if done <= p + 1 < len(request.prompt_ids)]
        if positions:
            rows = logits[positions[0] - wanted.start : positions[-1] + 1 - wanted.start]
            targets = [request.prompt_ids[p + 1] for p in positions]
            scores = prompt_logprobs(rows, targets, request.params.prompt_logprobs)
            bad = next((s for s in scores if isinstance(s, Exception)), None)
            if bad is not None:
                return bad
            request.prompt_logprobs += scores
        return None

    def _fork(self, request: Request, seq: Sequence) -> Answer:
        """One more parallel answer from the same computed prompt; it shares all blocks until it writes."""
        child = self.scheduler.fork(seq)
        index = len(request.answers)
        child.answer = seq.answer.fork(index, child)
        request.answers.append(child.answer)
        return child.answer

    def fail(self, requests: Iterable[Request], error: Exception) -> list[Delta]:
        """End requests with the cause; one that is named more than once, for its several answers, ends once."""
        cause, requests = f"{type(error).__name__}: {error}", list(dict.fromkeys(requests))
        note(f"{len(requests)} request(s) failed: {cause}")
        return [delta for request in requests for delta in self._end(request, "error", cause)]

    def _end(self, request: Request, reason: str, error: str | None = None) -> list[Delta]:
        """End all unfinished answers of a request without another token."""
        deltas = []
        leave = self.scheduler.abort if reason == "error" else self.scheduler.finish  # what failed is not cached
        for answer in request.answers:
            if answer.finish_reason is None:
                leave(answer.seq)
                deltas.append(answer.end(reason, error))
        self._close_if_finished(request)
        return deltas

    def _close_if_finished(self, request: Request) -> None:
        if request.finished:
            request.finished_at = time.perf_counter()
            self.requests.pop(request.id, None)
