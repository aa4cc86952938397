"""Drafts from a model: a small one that has the same vocabulary, or the first layers of the large one itself.

The problem. Text that repeats nothing can only be guessed by something that knows the language: a model that is much
cheaper than the target and often agrees with it.

The idea. To a draft model, a request of the target is one more sequence that has to catch up. It keeps its keys and
values up to where the two agree, and computes the rest in the same step as its next guess:

    target     the cat sat on the mat .
    draft      the cat sat on his hat          agree on "the cat sat on": keep 4, compute "the mat ." and guess on
    round 1    compute [the mat .] of A, [x y] of B, ...        one flat run over all sequences, then one guess each
    round 2    compute the guess of A, the guess of B, ...      and so on, a guess for each sequence per round

A guess is drawn with the target's sampler, mask and uniform sample, so a copy of the target as its own draft is always
right; with verify="rejection" it is drawn independently, and its distribution is kept for the rejection rule.
Sources: Leviathan et al. 2023 (arXiv:2211.17192, section 2.1); the self-draft: Zhang et al. 2023 (arXiv:2309.08168).
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from compiled import ModelRunner
from engine import lay_out
from kv_paged import BlockPool, BlockTables
from model import Transformer
from radix import RadixCache
from request import Answer
from sampling import Sampled, draw, probabilities, sample
from scheduler import Sequence, Step
from speculative import GUESS
from tokenizer import Tokenizer


class Draft:
    """Guesses for one answer in the making: tokens `start` to `end` of `seq`, while it is not `done`."""

    def __init__(self, answer: Answer, limit: int, seq: Sequence):
        self.answer, self.limit, self.seq, self.start, self.done = answer, limit, seq, len(seq.tokens), False
        # They walk ahead of the answer's own.
        self.sampler, self.guide = answer.sampler.fork(answer.index), answer.guide and answer.guide.fork()

    def add(self, token: int | None) -> None:
        """One more guess; None: nothing can be drawn, which ends the draft."""
        self.done = token is None or token in self.answer.request.stop_ids
        if token is not None:
            self.seq.tokens.append(token)
            self.sampler.commit(token)
            if self.guide is not None:
                self.guide.commit(token)
                self.done |= self.guide.is_complete
            self.done |= len(self.seq.tokens) - self.start == self.limit


class DraftModel:
    """Proposes what a model says. vocab_size is the target's; at most max_tokens are computed in one round."""

    ROUNDS_TO_ASK = 0

    def __init__(self, runner: ModelRunner, vocab_size: int, rejection=False, max_tokens: int = 512):
        self.runner, self.model, self.kv, self.vocab_size = runner, runner.model, runner.kv, vocab_size
        self.rejection, self.max_tokens = rejection, max_tokens
        pool = BlockPool(self.kv.num_blocks, self.kv.block_size)
        self.tables = BlockTables(pool, RadixCache(pool))
        self.following: dict[Answer, tuple[Sequence, int]] = {}  # and how many tokens the target had last time

    def strength(self, answers: list[Answer]) -> list[int]:
        return [1] * len(answers)

    def backlog(self, answer: Answer) -> int:
        computed = self.following[answer][0].num_computed if answer in self.following else 0
        return max(0, len(answer.seq.tokens) - 1 - computed)

    def propose(self, answers: list[Answer], limits: list[int]) -> list[list[int]]:
        for answer in [a for a in self.following if a.finish_reason is not None or a.seq.state != "running"]:
            self.tables.release(self.following.pop(answer)[0])  # its full blocks stay in the prefix cache
        drafts: dict[Answer, Draft] = {}
        step, budget = Step(0), self.max_tokens
        for answer, limit in zip(answers, limits, strict=True):
            seq = self._follow(answer) if limit and budget else None
            n = min(seq.num_new, budget, self.tables.room(seq)) if seq is not None else 0
            if n > 0:
                drafts[answer] = Draft(answer, limit, seq)
                answer.guess_probs = []
                self._plan(step, seq, n)
                budget -= n
        drawing = list(drafts.values())
        while drawing:
            logits = self._compute(step)
            drawn = [draft for draft in drawing if draft.seq.num_new == 0]  # the others catch up next time
            step, drawing = Step(0), []
            for draft, row in zip(drawn, logits, strict=True):
                draft.add(self._draw(draft, row))
                if not draft.done and self.tables.room(draft.seq) > 0:
                    self._plan(step, draft.seq, 1)
                    drawing.append(draft)
        return [d.seq.tokens[d.start :] if (d := drafts.get(answer)) else [] for answer in answers]

    def _plan(self, step: Step, seq: Sequence, n: int) -> None:
        step.copies += self.tables.extend(seq, n)
        step.entries.append((seq, n))

    def _follow(self, answer: Answer) -> Sequence | None:
        """The draft's sequence for an answer, with the tokens that the target has now; None without memory for it."""
        tokens = answer.seq.tokens
        seq, known = self.following.get(answer, (None, 0))
        if max(tokens[known:], default=0) >= self.model.config.vocab_size:  # an id the draft has no embedding for
            return None
        if seq is None:
            seq = Sequence(list(tokens), answer.request.max_tokens, namespace=answer.seq.namespace)
            match = self.tables.find(seq)
            if not self.tables.start(seq, match, match.n_tokens):
                return None
            seq.num_computed = match.n_tokens
        else:
            same = known
            while same < min(len(tokens), len(seq.tokens)) and tokens[same] == seq.tokens[same]:
                same += 1
            same = min(same, len(tokens) - 1)  # the last token is computed again if need be, for its logits
            seq.tokens[same:] = tokens[same:]
            seq.num_computed = min(seq.num_computed, same)
            self.tables.cut(seq)
            self.tables.offer(seq)
        self.following[answer] = seq, len(tokens)
        return seq

    def _compute(self, step: Step) -> torch.Tensor:
        """One step of the draft; float32 logits [R, V] of those that have caught up, as wide as the target's."""
        self.kv.apply(step)
        ends = [(seq, seq.num_computed + n) for seq, n in step.entries]
        rows = [range(end - (end == len(seq.tokens)), end) for seq, end in ends]
        batch, _ = lay_out(step, self.kv.block_size, self.model.norm.weight.device, rows)
        logits = self.runner.run(batch).float()
        for seq, end in ends:
            seq.num_computed = end
        padding = max(0, self.vocab_size - logits.shape[1])
        return nn.functional.pad(logits, (0, padding), value=-torch.inf)[:, : self.vocab_size]

    def _draw(self, draft: Draft, row: torch.Tensor) -> int | None:
        """A guess from its logits [V], None if it allows none. For the rejection rule: drawn independently."""
        if draft.guide is not None and draft.guide.forced:
            if self.rejection:
                draft.answer.guess_probs.append(None)  # keeps its place, but what is forced is under no rule
            return draft.guide.forced[0]
        mask = draft.guide and draft.guide.mask()
        if not self.rejection:
            (result,) = sample(row[None], [draft.sampler], [mask])
            return result.token if isinstance(result, Sampled) else None
        try:
            q = probabilities(row, draft.sampler, mask)  # [V]
        except ValueError:
            return None
        draft.answer.guess_probs.append(q)
        return draw(q, draft.sampler.uniform(GUESS))


def first_layers(model: Transformer, k: int) -> Transformer:
    """The model with only its first k layers; every weight is shared."""
    if not 1 <= k < len(model.layers):
        raise ValueError(f"speculate='self:{k}': a draft has 1 to {len(model.layers) - 1} of this model's layers")
    twin = copy.copy(model)
    twin._modules = dict(model._modules)
    twin.layers, twin.cos_sin = nn.ModuleList(list(model.layers)[:k]), model.cos_sin[:k]
    return twin


def check_same_tokens(draft: Tokenizer, target: Tokenizer) -> None:
    """Refuse a draft whose ids mean something else; only padding may differ."""
    for i in range(max(draft.vocab_size, target.vocab_size)):
        both = (draft, target)
        there, here = ((t.token_bytes(i), t.is_special(i)) if i < t.vocab_size else (b"", False) for t in both)
        if there != here:
            raise ValueError(
                f"the draft model has another tokenizer: token {i} is {there[0]!r} there and {here[0]!r} in the "
                "target; choose a draft of the same family, or speculate='ngram'"
            )
