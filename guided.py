"""One answer's walk through an automaton: what structured output means to the engine.

The problem. structured.py knows which tokens may follow in which state of an automaton. An engine has to keep that
state for each answer, in step with its tokens, through forks, beams, preemptions and guesses that are taken back.

The idea. A `GuidedAnswer` hangs on a `Answer` and moves when a token is accepted, so nothing ever has to be undone:

    state ──mask()──► sample ──► accepted token ──commit()──► state' ──► is_complete: nothing may follow, the end
                                                                └──────► forced: tokens that follow without being drawn

`forced` is jump-forward. Where only one run of text can follow, its tokens are decided at once; they are appended to
the sequence as guesses are (drafts.py) and accepted when they have been computed, so that they have log-probabilities
like any other token. Which tokens they are depends on the text alone, never on who else is running:

    sampled   {"            name              ": "          A  d  a     "        four decisions where there were
    forced      {"name": "                              , "age":                 nine tokens, and as many steps less

An answer ends as soon as its text is complete, without waiting for an end-of-sequence token, min_tokens or not.
End-of-sequence ids are allowed exactly where the automaton accepts; under ignore_eos nowhere.

Sources: Zheng et al., SGLang (2024), section 4. Left out: everything about automata (structured.py).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable

import torch

from sampling import SamplingParams
from structured import TokenGuide, TokenTrie, guide_for
from tokenizer import Tokenizer

TAIL = 32  # tokens of earlier text that jumps look at: which tokens a text becomes depends on what stands before it


class Guides:
    """The guides of one model's requests. The vocabulary's trie is built when the first request needs it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int], jump_forward: bool = True):
        self.tokenizer, self.vocab_size, self.jump_forward = tokenizer, vocab_size, jump_forward
        self.eos_token_ids = frozenset(eos_token_ids)
        self._trie: TokenTrie | None = None

    @property
    def trie(self) -> TokenTrie:
        """Of exactly the ids that logits are computed for."""
        if self._trie is None:
            whole = TokenTrie.from_tokenizer(self.tokenizer, max(self.vocab_size, self.tokenizer.vocab_size))
            beyond = len(whole.vocab) > self.vocab_size  # a tokenizer may know ids that the model has no logits for
            self._trie = TokenTrie(whole.vocab[: self.vocab_size]) if beyond else whole
        return self._trie

    def answer(self, params: SamplingParams, prompt_ids: list[int]) -> GuidedAnswer | None:
        """The start of an answer with these parameters; None if they ask for no structure. Raises GrammarError."""
        if params.regex is not None:
            kind, source = "regex", params.regex
        elif params.json_schema is not None:
            kind, source = "json_schema", json.dumps(params.json_schema)
        elif params.choice is not None:
            kind, source = "choice", json.dumps(params.choice)
        else:
            return None
        # A stop token without text, <|im_end|> say, can only mean the end.
        ends = self.eos_token_ids | {i for i in params.stop_token_ids if not self.trie.vocab[i]}
        guide = guide_for(kind, source, self.trie, tuple(sorted(ends)))
        return GuidedAnswer(self, guide, list(prompt_ids[-TAIL:]), params.ignore_eos)


class GuidedAnswer:
    """The state of one answer in its guide."""

    def __init__(self, guides: Guides, guide: TokenGuide, tail: list[int], ignore_eos: bool):
        self.guides, self.guide, self.tail, self.ignore_eos = guides, guide, tail, ignore_eos
        self.state = guide.start
        self.forced: list[int] = []  # decided, but not accepted yet
        self._jump()

    def fork(self) -> GuidedAnswer:
        twin = copy.copy(self)
        twin.tail, twin.forced = self.tail.copy(), self.forced.copy()
        return twin

    @property
    def is_complete(self) -> bool:
        """Nothing may follow any more."""
        return self.guide.is_complete(self.state)

    def completes(self, token: int) -> bool:
        """Whether the text would be complete after one more token."""
        return self.guide.is_complete(self.guide.advance(self.state, token))

    def mask(self) -> torch.Tensor:
        """bool [V]: what may follow. Not to be written to."""
        allowed = self.guide.mask(self.state)
        if not self.ignore_eos or self.is_complete:
            return allowed
        allowed = allowed.clone()
        allowed[[i for i in self.guides.eos_token_ids if i < len(allowed)]] = False
        return allowed

    def trim(self, guess: list[int]) -> list[int]:
        """The beginning of a guess that the constraint allows."""
        return guess[: len(self.guide.walk(self.state, guess))]

    def commit(self, token: int) -> None:
        """`token` was accepted; the first forced one, if any are waiting."""
        self.state = self.guide.advance(self.state, token)
        if self.forced:
            del self.forced[0]
        if self.guides.jump_forward:
            self.tail = [*self.tail[1 - TAIL :], token]
            if not self.forced:
                self._jump()

    def _jump(self) -> None:
        if self.guides.jump_forward and self.guide.forced(self.state):
            tokenizer = self.guides.tokenizer
            before = tokenizer.decode(self.tail)
            encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
            self.forced = self.guide.jump(self.state, encode, before)
