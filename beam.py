"""Beam search: keep the B likeliest answers so far, not the likeliest next token.

The greedy token of each step need not lie on the likeliest sequence. So hold B partial answers, extend each by every
token, and keep the B best of all B x vocab sums of log-probabilities. Paged KV makes it nearly free: a beam with two
candidates among them is forked and shares its past, one with none gives its blocks back.

    scores        A -1.0 ─┬─ "cat" -1.4   kept, A goes on
                          └─ "dog" -1.6   kept, a fork of A
                  B -1.5 ─┬─ "</s>" -1.9  a finished answer, it leaves the search
                          └─ "ran" -3.0   dropped; B has no candidate and gives its blocks back

Finished answers are ranked by log-probability over length (Wu et al. 2016, arXiv:1609.08144, section 7). The search
ends when no live beam can beat the B best of them, since sums only fall. Sources: Sutskever et al. 2014; vLLM (Kwon et
al. 2023, section 4.4). Left out: diverse beams, sampling inside, stop strings (refused: they lie in text).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from request import Answer, Delta, Request
from sampling import Sampled, SamplerState, best_ids, constrain, row_error, score
from scheduler import Sequence


@dataclass
class Candidate:
    """One kept continuation: `parent` goes on with `sampled`, its sum of log-probabilities is then `score`."""

    parent: Answer
    sampled: Sampled
    score: float


class BeamSearch:
    """The search of one request: collects a row of logits for each live beam, then says who goes on with what."""

    def __init__(self, request: Request, first: Answer):
        self.request, self.width = request, request.params.beam_width
        self.live: dict[Answer, float] = {first: 0.0}  # beam -> its sum of log-probabilities
        self.pending: dict[Answer, torch.Tensor] = {}  # beam -> raw logits [V] of its next token
        self.finished: list[tuple[float, list[Sampled]]] = []  # (rank score, all tokens of the answer)

    def offer(self, beam: Answer, logits: torch.Tensor) -> bool:
        """Give a live beam its row; True once all have theirs. An early beam waits, with nothing to compute."""
        self.pending[beam] = logits
        return len(self.pending) == len(self.live)

    def advance(self, fork: Callable[[Answer], Answer], finish: Callable[[Sequence], None]) -> list[Delta]:
        """One step of the search. Returns nothing until it ends, then each answer in one delta.

        fork(beam) makes another beam with the same past, finish(sequence) gives its blocks back."""
        candidates = self.choose()
        if not candidates and not self.finished:
            raise ValueError("no continuation is possible: logit_bias or the structure forbids every token")
        self.request.first_token = self.request.first_token or time.perf_counter()
        beams: dict[Answer, Candidate] = {}
        for candidate in candidates:  # the first goes on in its parent's sequence, the others in forks of it
            parent = candidate.parent
            beam = fork(parent) if parent in beams else parent
            beam.logprobs = list(parent.logprobs)
            beams[beam] = candidate
        for beam in self.live:
            if beam not in beams:
                finish(beam.seq)
        for beam, candidate in beams.items():
            beam.commit(candidate.sampled.token)
            beam.seq.tokens.append(candidate.sampled.token)
            beam.logprobs.append(candidate.sampled)
        self.live = {beam: candidate.score for beam, candidate in beams.items()}
        if beams:
            self.request.answers = list(beams)
            return []
        self.request.answers, deltas = self.answers()
        return deltas

    def choose(self) -> list[Candidate]:
        """The candidates of this step, best first; none: the search is over. Raises ValueError for unusable logits."""
        beams = list(self.live)
        raw = torch.stack([self.pending.pop(beam) for beam in beams]).float()  # [B, V]
        processed = raw.clone()
        for beam, raw_row, row in zip(beams, raw, processed, strict=True):
            constrain(row, beam.sampler, beam.guide and beam.guide.mask())
            if error := row_error(float(raw_row.amax()), float(row.amax())):
                raise error
        best = beam_step(processed.double().log_softmax(-1), list(self.live.values()), 2 * self.width)
        candidates = []
        for rank, (b, token, total) in enumerate(best):
            sampled = score(raw[b], token, self.request.params.logprobs)
            guide = beams[b].guide
            if token in self.request.stop_ids or (guide is not None and guide.completes(token)):
                if rank < self.width:
                    self._finish(beams[b], sampled, total)
            elif len(candidates) < self.width:
                candidates.append(Candidate(beams[b], sampled, total))
        if beams[0].sampler.n_output + 1 == self.request.max_tokens:
            for candidate in candidates:
                self._finish(candidate.parent, candidate.sampled, candidate.score)
            return []
        return [] if self._settled(candidates) else candidates

    def _finish(self, beam: Answer, last: Sampled, total: float) -> None:
        answer = [*beam.logprobs, last]
        self.finished.append((total / len(answer), answer))  # a sum alone would favour short answers

    def _settled(self, candidates: list[Candidate]) -> bool:
        """Whether even the best candidate, at the greatest length, would rank below `width` finished answers."""
        if len(self.finished) < self.width or not candidates:
            return not candidates
        worst_kept = sorted(rank for rank, _ in self.finished)[-self.width]
        return candidates[0].score / self.request.max_tokens <= worst_kept

    def answers(self) -> tuple[list[Answer], list[Delta]]:
        """The n best finished answers, and a delta for each with its text in one."""
        request = self.request
        best = sorted(self.finished, key=lambda item: -item[0])[: request.params.n]
        answers, deltas = [], []
        for index, (_, tokens) in enumerate(best):
            sequence = Sequence(list(request.prompt_ids), request.max_tokens)
            guide = request.guide and request.guide.fork()
            answer = Answer(request, index, sequence, SamplerState(request.params, request.prompt_ids), guide)
            for sampled in tokens:
                sequence.tokens.append(sampled.token)
                answer.accept(sampled)
            answers.append(answer)
            text = answer.text, answer.token_ids, answer.logprobs
            deltas.append(Delta(request, index, *text, answer.finish_reason, answer.stop_reason))
        return answers, deltas


def beam_step(logprobs: torch.Tensor, scores: list[float], n: int) -> list[tuple[int, int, float]]:
    """The n best continuations of B beams: next token's logprobs [B, V], scores [B] so far -> (beam, token, score).

    Best first; ties go to the lower beam, then the lower id; impossible ones (-inf) are not returned. Ask for 2B: even
    if each beam's best is EOS and leaves the search, B others remain to go on with.
    """
    total = logprobs.double() + torch.tensor(scores, dtype=torch.float64, device=logprobs.device)[:, None]  # [B, V]
    flat = total.flatten()
    ids = best_ids(flat, n)
    pairs = zip(ids.tolist(), flat[ids].tolist(), strict=True)
    return [(i // logprobs.shape[1], i % logprobs.shape[1], value) for i, value in pairs if value > -math.inf]
