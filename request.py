"""One request from its prompt to its text: what a user hands in, what comes back, and when it ends.

The problem. The engine decides token after token, but a user reads characters, asks for several answers to one prompt,
and wants to be told why each of them ended. Three things end an answer, and they can meet in one token:

    a stop token   EOS (of config, generation_config and tokenizer together) or one of stop_token_ids     "stop"
    a stop string  anywhere in the text, even spread over tokens; the text before it is all the user sees  "stop"
    a length       max_tokens, or the model's context                                                    "length"

The idea. A `Request` owns one `Answer` per parallel answer. A answer is a chain: token -> sampler state (penalties,
random numbers) -> automaton, if the output has a structure (guided.py; a complete text ends the answer) -> incremental
detokeniser (never half a character) -> stop checker (holds back what may become a stop string) -> text that is safe to
show. Each accepted token yields a `Delta`; a stream is the concatenation of deltas, so it cannot differ from the whole.

    tokens   "Hel" "lo" " W" "or" "ld" "</s>"
    deltas   "Hel" "lo"  ""   ""  " World"  (stop=["Wonder"] held " Wo" back until it could not be one)

Left out: anything about scheduling or memory (scheduler.py, kv_paged.py), and what is random (sampling.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sampling import Sampled, SamplerState, SamplingParams
from tokenizer import StopChecker, Tokenizer

if TYPE_CHECKING:
    from beam import BeamSearch
    from guided import GuidedAnswer
    from sequence import Sequence


@dataclass
class CompletionOutput:
    """One answer. `finish_reason` is "stop", "length", "abort" or "error"; `stop_reason` is what stopped it."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[Sampled] | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass
class RequestOutput:
    """All answers to one prompt, as vLLM arranges them. Times are seconds from its arrival, None if not reached."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Sampled | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    ttft_s: float | None
    total_s: float | None


@dataclass
class Delta:
    """What one step added to one answer: text that is safe to show, the tokens decided, and the end, if it came."""

    request: Request
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Sampled]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass(eq=False)  # a request is itself, whatever another one says
class Request:
    """A prompt and what is asked of it. `max_tokens` is what both the user and the context allow."""

    id: int
    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]  # end an answer: EOS unless ignored, and stop_token_ids
    tokenizer: Tokenizer
    prompt: str | None = None
    answers: list[Answer] = field(default_factory=list)
    prompt_logprobs: list[Sampled | None] = field(default_factory=lambda: [None])  # nothing predicts the first token
    seq: Sequence | None = None  # the one that computes the prompt
    arrival: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    finished_at: float | None = None
    beams: BeamSearch | None = None  # of beam.py
    guide: GuidedAnswer | None = None  # where every answer starts, if the output has a structure

    @property
    def finished(self) -> bool:
        return all(answer.finish_reason is not None for answer in self.answers)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had."""
        return self.seq.num_cached

    @property
    def width(self) -> int:
        """How many answers are drawn: best_of of them, of which the n best are returned. A beam search draws none."""
        return 1 if self.params.beam_width and self.max_tokens else self.params.best_of or self.params.n

    def output(self) -> RequestOutput:
        answers = self.answers
        if self.width > self.params.n:  # best_of: the likeliest per token first
            answers = sorted(answers, key=lambda c: -c.cumulative_logprob / max(1, len(c.token_ids)))
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            prompt_logprobs=self.prompt_logprobs if self.params.prompt_logprobs is not None else None,
            outputs=[answer.output(i) for i, answer in enumerate(answers[: self.params.n])],
            num_cached_tokens=self.num_cached_tokens,
            ttft_s=self.first_token and self.first_token - self.arrival,
            total_s=self.finished_at and self.finished_at - self.arrival,
        )


class Answer:
    """One answer in the making: the engine feeds it sampled tokens, it answers with deltas until it has ended."""

    def __init__(self, request: Request, index: int, seq, sampler: SamplerState, guided: GuidedAnswer | None = None):
        self.request, self.index, self.seq, self.sampler = request, index, seq, sampler
        self.guide = guided or (request.guide and request.guide.fork())
        self.guess_probs: list = []  # the distribution [V] that each guess was drawn from, for the rejection rule
        self.num_guessed = self.num_right = 0  # of this step's draft: guesses (not forced), and those that were right
        params = request.params
        self.detokenizer = request.tokenizer.detokenizer(request.prompt_ids)
        if self.guide is not None:  # a structured text begins afresh, even where the prompt breaks off in a character
            self.detokenizer.finish()
        self.stops = StopChecker(list(params.stop), params.include_stop_str_in_output)
        self.text = ""
        self.logprobs: list[Sampled] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None

    @property
    def token_ids(self) -> list[int]:
        return self.sampler.output

    @property
    def forced(self) -> list[int]:
        """Tokens that follow without being drawn."""
        return self.guide.forced if self.guide is not None else []

    def fork(self, index: int, seq: Sequence) -> Answer:
        """A parallel answer that has decided nothing yet, or another beam with the same past."""
        return Answer(self.request, index, seq, self.sampler.fork(index), self.guide and self.guide.fork())

    def commit(self, token: int) -> None:
        """`token` is decided."""
        self.sampler.commit(token)
        if self.guide is not None:
            self.guide.commit(token)

    def accept(self, sampled: Sampled) -> Delta:
        """One more token is decided: what may be shown now, and whether that was the end."""
        token, request = sampled.token, self.request
        self.commit(token)
        self.logprobs.append(sampled)
        self.cumulative_logprob += sampled.logprob or 0.0
        piece = "" if token in request.stop_ids else self.detokenizer.add([token])
        if token in request.stop_ids:
            self.finish_reason, self.stop_reason = "stop", token
        elif self.guide is not None and self.guide.is_complete:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= request.max_tokens:
            self.finish_reason = "length"
        return self._delta(piece, [sampled])

    def end(self, reason: str, error: str | None = None) -> Delta:
        """End without a token: aborted, failed, or nothing was to be generated."""
        self.finish_reason, self.error = reason, error
        try:
            return self._delta("", [])
        except Exception:
            if error is None:
                raise
            return Delta(self.request, self.index, "", [], [], reason, None, error)  # the text may be what went wrong

    def _delta(self, piece: str, sampled: list[Sampled]) -> Delta:
        """Pass text through the stop checker; a stop string outranks a length that was reached in the same token."""
        ended = self.finish_reason is not None
        if ended:
            piece += self.detokenizer.finish()
        armed = len(self.token_ids) >= self.request.params.min_tokens  # before that, a stop string is only text
        piece, matched = self.stops.feed(piece, armed)
        if matched is not None:
            self.finish_reason, self.stop_reason = "stop", matched
        elif ended:
            piece += self.stops.flush()
        self.text += piece
        tokens = [s.token for s in sampled]
        return Delta(self.request, self.index, piece, tokens, sampled, self.finish_reason, self.stop_reason, self.error)

    def output(self, index: int) -> CompletionOutput:
        params = self.request.params
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=list(self.token_ids),
            cumulative_logprob=self.cumulative_logprob if params.scored else None,
            logprobs=self.logprobs if params.logprobs is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
        )
