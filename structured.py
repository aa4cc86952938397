"""Structured output: an automaton over bytes becomes, at every step, the set of tokens that may come next.

Problem. A model asked for JSON gives JSON most of the time. Checking afterwards and asking again costs whole answers;
the way to be certain is to take away, before each draw, every token after which the text could no longer be
completed. A vocabulary has 50 000 tokens, and a step has a millisecond or so to spare.

Idea. All that matters of the text so far is one DFA state. The tokens form a trie: stepping the automaton once over
all nodes of the trie, level by level, tells for all tokens at once in which state they would leave it; those that
leave it alive are allowed. The answer depends on the state only, so each state is worked out once and kept.

      state 7, expecting   (true|null)          trie level 1     level 2      level 3 ...
      "t" "n" "tr" "true" "nul" "x" ...         t->8  n->9  x->dead
                                                       tr->10  nu->11 ...
      mask(7)  = 1 for t, tr, true, n, nul, null; 0 for the rest; end-of-sequence is 1 only where the automaton accepts.

Jump-forward. Where only one continuation exists (`{"name": "` in most schemas), nothing needs to be sampled: the
bytes are known and their tokens are appended and computed in one step, like a prompt. Which tokens? Those the
tokenizer itself would write, since the model was trained on them. So the forced run is encoded together with the text
before it and with some of the texts that may follow it, and only tokens on which all these encodings agree, and which
lie wholly inside the run, are appended (`TokenGuide.jump`).

Never a dead end. Every state of the automaton can reach acceptance by bytes. By TOKENS it can if each byte is a token
of its own, as in byte-level vocabularies; for others `TokenGuide` works out from which states the vocabulary can
still finish, and leaves out tokens that lead elsewhere.

Sources: Willard and Louf, Efficient Guided Generation for Large Language Models (2023), section 3, for the index of
states; Zheng et al., SGLang (2024), section 4, "Efficient Constrained Decoding with Compressed Finite State Machine",
for the jumps.

Left out: context-free grammars with a stack (nesting is bounded instead), and masks on the accelerator.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch

from dfa import DEAD, START, Dfa, to_dfa
from json_schema import compile_json_schema
from regex_syntax import parse
from regular import GrammarError, alt, text

__all__ = [
    "GrammarError",
    "TokenGuide",
    "TokenTrie",
    "compile_choice",
    "compile_json_schema",
    "compile_regex",
    "guide_for",
]

KEPT_MASKS = 1024  # per guide; 48 MiB for 49 152 tokens
UNSURE_STATES = 4096  # states worked out token by token where single bytes are missing from the vocabulary
PROBES = 12  # different next bytes tried after a forced run
CONTEXT = 64  # characters of earlier text that are encoded again in front of a forced run


def compile_regex(pattern: str) -> Dfa:
    """The texts t with re.fullmatch(pattern, t). Raises GrammarError; `regex_syntax.py` states the dialect."""
    dfa = to_dfa(parse(pattern))
    if dfa.is_empty:
        raise GrammarError(f"regex {pattern[:60]!r} matches no text at all; check its character classes")
    return dfa


def compile_choice(choices: Sequence[str]) -> Dfa:
    """Exactly one of the given texts."""
    if isinstance(choices, str) or not choices or not all(isinstance(c, str) for c in choices):
        raise GrammarError(f"choice must be a non-empty list of strings, not {str(choices)[:60]!r}")
    for choice in choices:
        if any(0xD800 <= ord(c) <= 0xDFFF for c in choice):
            raise GrammarError(f"choice {choice[:60]!r} holds half a surrogate pair, which UTF-8 cannot write")
    return to_dfa(alt(*map(text, choices)))


COMPILERS: dict[str, Callable[[str], Dfa]] = {
    "regex": compile_regex,
    "json_schema": compile_json_schema,
    "choice": lambda listed: compile_choice(json.loads(listed)),
}


@lru_cache(maxsize=64)
def guide_for(kind: str, source: str, trie: TokenTrie, eos_ids: tuple[int, ...]) -> TokenGuide:
    """The guide of a constraint, built once per (kind, text, tokenizer). Raises GrammarError.

    kind: "regex" (source: the pattern), "json_schema" (the schema as JSON text), "choice" (a JSON list of strings)."""
    return TokenGuide(COMPILERS[kind](source), trie, eos_ids)


class TokenTrie:
    """A vocabulary as a trie of bytes, level by level; one for each tokenizer, shared by all its guides.

    vocab[i] is what token i writes, b"" if it must never be generated (special, control, unknown, padding)."""

    def __init__(self, vocab: Sequence[bytes]) -> None:
        self.vocab = list(vocab)
        ids = sorted((i for i, piece in enumerate(self.vocab) if piece), key=self.vocab.__getitem__)
        length = np.array([len(self.vocab[i]) for i in ids], np.int64)  # [tokens]
        offset = np.cumsum(length) - length
        joined = np.frombuffer(b"".join(self.vocab[i] for i in ids) or b"\0", np.uint8)
        self.levels: list[tuple[np.ndarray, np.ndarray]] = []  # per level: parent (in the level above), byte
        self.end_node = np.zeros(
            len(self.vocab), np.int64
        )  # [V] node at which a token ends, counted over all levels; 0 = none
        ids, alive, node, total = np.array(ids, np.int64), np.arange(len(ids)), np.zeros(len(ids), np.int64), 1
        while len(alive):
            byte = joined[offset[alive] + len(self.levels)]
            key = node[alive] * 256 + byte  # sorted, because the tokens are: equal prefixes are neighbours
            new = np.concatenate([[True], key[1:] != key[:-1]])
            node[alive] = np.cumsum(new) - 1
            self.levels.append((key[new] // 256, byte[new]))
            ending = alive[length[alive] == len(self.levels)]
            self.end_node[ids[ending]] = total + node[ending]
            total += int(new.sum())
            alive = alive[length[alive] > len(self.levels)]
        self.num_nodes = total
        self.single_bytes = {piece[0] for piece in self.vocab if len(piece) == 1}

    @classmethod
    def from_tokenizer(cls, tokenizer, size: int | None = None) -> TokenTrie:
        """From token_bytes(id), is_special(id) and vocab_size; `size` = the width of the logits if that is larger."""
        known = tokenizer.vocab_size
        pieces = [b"" if tokenizer.is_special(i) else tokenizer.token_bytes(i) for i in range(known)]
        return cls(pieces + [b""] * ((size or known) - known))


class TokenGuide:
    """Walks one automaton with the tokens of one vocabulary. It belongs to no request: a state is an int, 0 is dead."""

    start = START

    def __init__(self, dfa: Dfa, vocab: Sequence[bytes] | TokenTrie, eos_ids: Iterable[int]) -> None:
        self.dfa = dfa
        self.trie = vocab if isinstance(vocab, TokenTrie) else TokenTrie(vocab)
        self.eos_ids = tuple(eos_ids)
        self._eos = np.array([i for i in self.eos_ids if 0 <= i < len(self.trie.vocab)], np.int64)
        if not len(self._eos):
            raise GrammarError(
                f"no end-of-sequence id within the vocabulary (given: {self.eos_ids}): nothing could ever end"
            )
        self._masks: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._runs: dict[int, tuple[bytes, int]] = {}
        self._followers: dict[int, list[str]] = {}
        self.can_finish = self._finishing()  # bool [states]
        if not self.can_finish[START]:
            raise GrammarError(
                "this vocabulary cannot write any text that the constraint allows: bytes are missing from it"
            )

    # The state after a token, and which tokens there may be

    def advance(self, state: int, token_id: int) -> int:
        """The state after a token, DEAD if it was not allowed. End-of-sequence leaves an accepting state as it is."""
        if token_id in self.eos_ids:
            return state if self.is_accepting(state) else DEAD
        piece = self.trie.vocab[token_id]
        after = self.dfa.run(state, piece) if piece else DEAD
        return after if self.can_finish[after] else DEAD

    def walk(self, state: int, token_ids: Iterable[int]) -> list[int]:
        """The states after each of the tokens, ending before the first that is not allowed: what a draft may keep."""
        states = []
        for token_id in token_ids:
            state = self.advance(state, token_id)
            if state == DEAD:
                break
            states.append(state)
        return states

    def mask(self, state: int) -> torch.Tensor:
        """bool [V], True = allowed. Shared and kept: not to be written to."""
        known = self._masks.get(state)
        if known is not None:
            self._masks.move_to_end(state)
            return known
        if state == DEAD:
            raise ValueError(
                "the constraint was already violated (state 0): no token is allowed; sample from the mask only"
            )
        allowed = self.can_finish[self._after_tokens(state)]  # [V]
        allowed[self._eos] = self.dfa.accepting[state]
        self._masks[state] = mask = torch.from_numpy(allowed)
        if len(self._masks) > KEPT_MASKS:
            self._masks.popitem(last=False)
        return mask

    def is_accepting(self, state: int) -> bool:
        return bool(self.dfa.accepting[state])

    def is_complete(self, state: int) -> bool:
        """The text is finished and nothing may be added: only an end-of-sequence id is left."""
        if not self.dfa.accepting[state]:
            return False
        if not self.dfa.table[state].any():
            return True
        return self._unsure and int(self.mask(state).sum()) == len(self._eos)

    def _after_tokens(self, state: int) -> np.ndarray:
        """int32 [V]: the state in which each token would leave the automaton."""
        width = self.dfa.table.shape[1]
        table = self.dfa.table.reshape(-1)
        reached = np.zeros(self.trie.num_nodes, np.int32)
        above, first = np.array([state], np.int32), 1
        for parent, byte in self.trie.levels:
            above = table[above[parent] * width + self.dfa.byte_class[byte]]
            if not above.any():
                break
            reached[first : first + len(above)] = above
            first += len(above)
        return reached[self.trie.end_node]

    def _finishing(self) -> np.ndarray:
        """bool [states]: from where the tokens at hand can reach acceptance. DEAD is False."""
        table, count = self.dfa.table, len(self.dfa.table)
        wanted = {b for b in range(256) if table[:, self.dfa.byte_class[b]].any()}
        self._unsure = not wanted <= self.trie.single_bytes
        everything = np.ones(count, bool)
        everything[DEAD] = False
        if not self._unsure:
            return everything
        columns = np.unique(self.dfa.byte_class[sorted(wanted & self.trie.single_bytes)])
        single = table[:, columns]  # steps that one-byte tokens can take
        good = self.dfa.accepting.copy()
        while True:
            more = good | good[single].any(1)
            if (more == good).all():
                break
            good = more
        doubtful = np.flatnonzero(everything & ~good).tolist()
        if len(doubtful) > UNSURE_STATES:
            raise GrammarError(
                f"the vocabulary lacks single-byte tokens and the constraint has {len(doubtful)} states that need them,"
                f" more than {UNSURE_STATES}; use a simpler constraint or a byte-level tokenizer"
            )
        after = {state: np.unique(self._after_tokens(state)) for state in doubtful}
        while True:
            found = [state for state in doubtful if not good[state] and good[after[state]].any()]
            if not found:
                return good
            good[found] = True

    # Forced runs

    def forced(self, state: int) -> bytes:
        """The bytes that must come next: as long as the text may not end and only one byte continues it."""
        return self._forced_run(state)[0]

    def _forced_run(self, state: int) -> tuple[bytes, int]:
        if state not in self._runs:
            run, here = bytearray(), state
            while not self.dfa.accepting[here] and len(following := self._next_bytes(here)) == 1:
                run += following
                here = self.dfa.run(here, following)
            self._runs[state] = bytes(run), here
        return self._runs[state]

    def _next_bytes(self, state: int) -> bytes:
        return np.flatnonzero(self.dfa.table[state][self.dfa.byte_class]).astype(np.uint8).tobytes()

    def jump(self, state: int, encode: Callable[[str], list[int]], before: str) -> list[int]:
        """Tokens that may be appended without sampling, [] if none may.

        encode: text -> ids without special tokens. before: the text that precedes, with the prompt's end if the answer
        continues it. Nothing is returned where the run begins inside a character, where the tokenizer would join its
        beginning with `before`, or where its tokens depend on what follows: then the model draws one token, from a mask
        that allows beginnings of the run only, and the next call goes on from there.
        """
        run, after = self._forced_run(state)
        if not run or run[0] & 0xC0 == 0x80:
            return []
        sure = run.decode("utf-8", errors="ignore")  # a character cut off at the end is left out
        context = before[-CONTEXT:]
        skip, end = len(context.encode()), len(context.encode()) + len(sure.encode())
        agreed: list[int] | None = None
        for more in self._probes(after) if len(sure.encode()) == len(run) else [""]:
            inside = self._inside(encode(context + sure + more), (context + sure + more).encode(), skip, end)
            agreed = inside if agreed is None else _common(agreed, inside)
        if len(sure.encode()) < len(run):
            agreed = agreed[:-1]
        return agreed if agreed and len(self.walk(state, agreed)) == len(agreed) else []

    def _probes(self, state: int) -> list[str]:
        """Beginnings of what may follow a forced run: "" if the text may end, one for each of several next bytes."""
        if state not in self._followers:
            following = self._next_bytes(state)
            probes = [""] if self.dfa.accepting[state] else []
            for byte in following[:: max(1, len(following) // PROBES)]:
                run, here = bytearray([byte]), self.dfa.run(state, bytes([byte]))
                while len(run) < 8 and len(more := self._next_bytes(here)):
                    run += more[-1:]
                    here = self.dfa.run(here, more[-1:])
                probes.append(run.decode("utf-8", errors="ignore"))
            self._followers[state] = probes
        return self._followers[state]

    def _inside(self, ids: list[int], whole: bytes, skip: int, end: int) -> list[int]:
        """The tokens of `ids` that lie within whole[skip:end], if one of them begins exactly at `skip`."""
        pieces = [self.trie.vocab[i] if 0 <= i < len(self.trie.vocab) else b"" for i in ids]
        joined = b"".join(pieces)
        blank = int(joined.startswith(b" ") and joined[1 : end + 1] == whole[:end])  # some tokenizers put one in front
        if joined[blank : end + blank] != whole[:end]:
            return []
        place, found, begun = -blank, [], False
        for token_id, piece in zip(ids, pieces, strict=True):
            begun = begun or place == skip
            if begun and place + len(piece) <= end and piece:
                found.append(token_id)
            place += len(piece)
        return found


def _common(left: list[int], right: list[int]) -> list[int]:
    length = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return left[:length]
