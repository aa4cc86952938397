"""One request from its prompt to its text: what a user hands in, what comes back, and when it ends.

The problem. The engine decides token after token, but a user reads characters, asks for several answers to one prompt,
and wants to know why each of them ended. Three things end an answer, and they can meet in one token:

    a stop token   EOS (of config, generation_config and tokenizer together) or one of stop_token_ids      "stop"
    a stop string  anywhere in the text, even spread over tokens; the user sees the text before it         "stop"
    a length       max_tokens, or the model's context                                                      "length"

The idea. Each fact has one owner. A `Request` owns one `Answer` for each text it asks for. An answer owns its sequence
(the tokens), its sampler (counts, random numbers), its guide (the automaton of a structured output) and its text. Each
decided token passes through all of them and yields a `Delta`; a stream is the concatenation of the deltas:

    tokens   "Hel" "lo" " W" "or" "ld" "</s>"
    deltas   "Hel" "lo"  ""   ""  " World"       stop=["Wonder"] holds " Wo" back until it cannot become a stop string

Left out: scheduling and memory (scheduler.py, kv_paged.py), and how a token is drawn (sampling.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from sampling import Sampled, SamplerState, SamplingParams, prompt_logprobs
from scheduler import Sequence
from tokenizer import StopChecker, Tokenizer


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


@dataclass(eq=False)  # two requests are never equal, whatever they hold
class Request:
    """A prompt and what is asked of it."""

    id: int
    seq: Sequence  # the one that computes the prompt
    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]  # end an answer: EOS unless ignored, and stop_token_ids
    tokenizer: Tokenizer
    prompt: str | None = None
    guide: Any = None  # the guide each answer starts from, if the output has a structure (structured.py)
    answers: list[Answer] = field(default_factory=list)
    search: Any = None  # the beam search that chooses this request's tokens (beam.py)
    prompt_logprobs: list[Sampled | None] | None = None  # of each prompt token, if asked for; of the first, None
    first_token: float | None = None
    finished_at: float | None = None

    def __post_init__(self):
        self.arrival = self.seq.arrival
        self.max_tokens = self.seq.max_tokens  # what the user, the context and the pool allow
        # How many answers are drawn: best_of of them, of which the n best are returned. A beam search draws none.
        beams = self.params.beam_width and self.max_tokens
        self.width = 1 if beams else self.params.best_of or self.params.n

    @property
    def finished(self) -> bool:
        return self.finished_at is not None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had."""
        return self.seq.num_cached

    def score_prompt(self, positions: range, logits: torch.Tensor) -> None:
        """logits [len(positions), vocab]: the row at p says how likely the prompt's token p + 1 was.

        Raises ValueError for a row without a distribution.
        """
        scored = len(self.prompt_logprobs)
        unscored = [p for p in positions if scored <= p + 1 < len(self.prompt_ids)]
        if unscored:
            rows = logits[unscored[0] - positions.start : unscored[-1] + 1 - positions.start]
            targets = [self.prompt_ids[p + 1] for p in unscored]
            scores = prompt_logprobs(rows, targets, self.params.prompt_logprobs)
            for score in scores:
                if isinstance(score, Exception):
                    raise score
            self.prompt_logprobs += scores

    def output(self) -> RequestOutput:
        answers = self.answers
        if self.width > self.params.n:  # best_of: the likeliest per token first
            answers = sorted(answers, key=lambda a: -a.cumulative_logprob / max(1, len(a.token_ids)))
        outputs = [answer.output(i) for i, answer in enumerate(answers[: self.params.n])]
        ttft_s = self.first_token and self.first_token - self.arrival
        total_s = self.finished_at and self.finished_at - self.arrival
        prompt = self.prompt, self.prompt_ids, self.prompt_logprobs
        return RequestOutput(self.id, *prompt, outputs, self.seq.num_cached, ttft_s, total_s)


@dataclass(eq=False, repr=False)
class Answer:
    """One answer in the making: the engine appends tokens to its sequence and tells it; it returns deltas."""

    request: Request
    index: int
    seq: Sequence
    sampler: SamplerState
    guide: Any = None
    guess_probs: list = field(default_factory=list)  # the distribution [V] each guess was drawn from (speculative.py)
    num_guessed: int = 0  # of this step's draft: guesses (not forced)
    num_right: int = 0  # and those of them that were right
    text: str = ""
    logprobs: list[Sampled] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    def __post_init__(self):
        params = self.request.params
        self.detokenizer = self.request.tokenizer.detokenizer(self.request.prompt_ids)
        if self.guide is not None:  # a structured text begins afresh, even where the prompt breaks off in a character
            self.detokenizer.finish()
        self.stops = StopChecker(params.stop, params.include_stop_str_in_output) if params.stop else None

    @property
    def token_ids(self) -> list[int]:
        """The tokens decided so far."""
        return self.seq.output

    @property
    def forced(self) -> list[int]:
        """Tokens that follow without being drawn."""
        return self.guide.forced if self.guide is not None else []

    def fork(self, index: int, seq: Sequence) -> Answer:
        """A parallel answer that has decided nothing yet, or another beam with the same past."""
        return Answer(self.request, index, seq, self.sampler.fork(index), self.guide and self.guide.fork())

    def rows_wanted(self, end: int) -> range:
        """The positions below `end`, computed in this step, whose logits are needed: of the last known token, the draft
        behind it (a forced token is known without, unless it is scored), and what is left of a prompt to score."""
        seq, params = self.seq, self.request.params
        first = end - 1 if end == len(seq.tokens) else end
        if seq.num_draft and (params.scored or not self.forced):
            first -= seq.num_draft
        if params.prompt_logprobs is not None and self.index == 0:
            scored = len(self.request.prompt_logprobs) - 1  # rows used so far: row p scores token p + 1
            if scored < min(end, seq.num_prompt - 1):
                first = min(first, max(seq.num_computed, scored))
        return range(first, end)

    def commit(self, token: int) -> None:
        """`token` is decided: count it, and move on in the guide."""
        self.sampler.commit(token)
        if self.guide is not None:
            self.guide.commit(token)

    def accept(self, sampled: Sampled) -> Delta:
        """The sequence has one more decided token: what may be shown now, and whether that was the end."""
        token, request = sampled.token, self.request
        self.commit(token)
        self.logprobs.append(sampled)
        self.cumulative_logprob += sampled.logprob or 0.0
        piece = "" if token in request.stop_ids else self.detokenizer.add([token])
        if token in request.stop_ids:
            self.finish_reason, self.stop_reason = "stop", token
        elif self.guide is not None and self.guide.is_complete:
            self.finish_reason = "stop"
        elif self.sampler.n_output >= request.max_tokens:
            self.finish_reason = "length"
        return self._delta(piece, sampled)

    def end(self, reason: str, error: str | None = None) -> Delta:
        """End without a token: aborted, failed, or nothing was to be generated."""
        self.finish_reason, self.error = reason, error
        try:
            return self._delta("")
        except Exception:
            if error is None:
                raise
            return Delta(self.request, self.index, "", [], [], reason, None, error)  # the text may be what went wrong

    def _delta(self, piece: str, sampled: Sampled | None = None) -> Delta:
        """Pass text through the stop checker; a stop string outranks a length that was reached in the same token."""
        ended = self.finish_reason is not None
        if ended:
            piece += self.detokenizer.finish()
        if self.stops is not None:
            special = "" if sampled is None else self.request.tokenizer.special_text(sampled.token)
            armed = self.sampler.n_output >= self.request.params.min_tokens  # before that, a stop string is only text
            piece, matched = self.stops.feed(piece, armed, special)
            if matched is not None:
                self.finish_reason, self.stop_reason = "stop", matched
            elif ended:
                piece += self.stops.flush()
        self.text += piece
        tokens, scores = ([], []) if sampled is None else ([sampled.token], [sampled])
        return Delta(self.request, self.index, piece, tokens, scores, self.finish_reason, self.stop_reason, self.error)

    def output(self, index: int) -> CompletionOutput:
        params = self.request.params
        total = self.cumulative_logprob if params.scored else None
        logprobs = self.logprobs if params.logprobs is not None else None
        end = self.finish_reason, self.stop_reason, self.error
        return CompletionOutput(index, self.text, self.seq.output, total, logprobs, *end)
