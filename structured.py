"""Structured output: a regex, a JSON schema or a grammar becomes, at every step, the set of tokens that may come next.

Every token after which the text could no longer be completed is taken away before each draw. For a regular language,
all that matters of the text so far is one state of an automaton (automata.py). The tokens form a trie; stepping the
automaton over it tells for all of them where they lead:

      state 7, expecting   (true|null)          trie level 1     level 2      level 3 ...
      "t" "n" "tr" "true" "nul" "x" ...         t->8  n->9  x->dead
                                                       tr->10  nu->11 ...
      mask(7)  = 1 for t, tr, true, n, nul, null; 0 for the rest; end-of-sequence is 1 only where the text may end.

JSON Schema and context-free grammars need a stack instead of a state: llguidance has it, behind the same methods. Where
only one text can follow (`"name": "` in most schemas) its tokens are appended without sampling (jump-forward).

Sources: Willard and Louf (2023), section 3; Zheng et al., SGLang (2024), section 4. Left out: masks on the accelerator.
"""

from __future__ import annotations

import copy
import itertools
import json
import os.path
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import numpy as np
import torch

from automata import DEAD, START, Dfa, GrammarError, compile_choice, compile_regex
from formats.grammars import GrammarMatcher, Vocabulary, compile_grammar
from sampling import SamplingParams
from tokenizer import Tokenizer

COMPILED_BYTES = 128 << 10  # what a compiled grammar takes beside 16 times its text
CACHE_BYTES = 64 << 20  # for everything compiled, and for the masks of automata
UNSURE_STATES = 4096  # states worked out token by token where single bytes are missing from the vocabulary
MAX_RUN = 512  # bytes appended at once; a longer run goes on behind them
PROBES = 12  # different next bytes tried after a forced run
TAIL = 32  # tokens of earlier text that are encoded again in front of a forced run


class ByteCache:
    """The values used last, as many as fit into `budget` bytes."""

    def __init__(self, budget: int = CACHE_BYTES) -> None:
        self.budget, self.size = budget, 0
        self._entries: OrderedDict[tuple, tuple[object, int]] = OrderedDict()
        self._lock = threading.Lock()  # a server compiles beside the engine's thread

    def get(self, key: tuple, make: Callable[[], tuple[object, int]]):
        """The value of a key. `make` returns it with its size in bytes if it has to be made."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key][0]
        value, size = make()
        with self._lock:
            if key not in self._entries:
                self._entries[key] = value, size
                self.size += size
            while self.size > self.budget and len(self._entries) > 1:
                self.size -= self._entries.popitem(last=False)[1][1]
        return value


class TokenTrie:
    """A vocabulary as a trie of bytes, level by level; one for each tokenizer, shared by all its guides.

    vocab[i] is what token i writes, b"" if it must never be generated (special, control, unknown, padding)."""

    def __init__(self, vocab: Sequence[bytes]) -> None:
        self.vocab = list(vocab)
        self.single_bytes = {piece[0] for piece in self.vocab if len(piece) == 1}
        self.writes = np.array([bool(piece) for piece in self.vocab])  # bool [V]
        self.order = np.array(sorted(np.flatnonzero(self.writes).tolist(), key=self.vocab.__getitem__), np.int64)
        length = np.array([len(self.vocab[i]) for i in self.order], np.int64)  # [tokens]
        offset = np.cumsum(length) - length
        joined = np.frombuffer(b"".join(self.vocab[i] for i in self.order) or b"\0", np.uint8)
        self.first_byte = joined[offset] if len(offset) else joined[:0]  # uint8 [tokens], ascending
        self.levels: list[tuple[np.ndarray, np.ndarray]] = []  # per level: parent (in the level above), byte
        self.end_node = np.zeros(len(self.vocab), np.int64)  # [V] where a token ends, over all levels; 0 = nowhere
        alive, node, total = np.arange(len(self.order)), np.zeros(len(self.order), np.int64), 1
        while len(alive):
            byte = joined[offset[alive] + len(self.levels)]
            key = node[alive] * 256 + byte  # sorted, because the tokens are: equal prefixes are neighbours
            new = np.concatenate([[True], key[1:] != key[:-1]])
            node[alive] = np.cumsum(new) - 1
            self.levels.append((key[new] // 256, byte[new]))
            ending = alive[length[alive] == len(self.levels)]
            self.end_node[self.order[ending]] = total + node[ending]
            total += int(new.sum())
            alive = alive[length[alive] > len(self.levels)]
        self.num_nodes = total
        self.id_of = {self.vocab[i]: i for i in self.order.tolist()}

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, size: int) -> TokenTrie:
        """The first `size` ids: those that logits are computed for, which may be more or fewer than the tokenizer's."""
        known = min(size, tokenizer.vocab_size)
        pieces = [b"" if tokenizer.is_special(i) else tokenizer.token_bytes(i) for i in range(known)]
        return cls(pieces + [b""] * (size - known))

    def within(self, ids: list[int], text: bytes, begin: int, end: int) -> list[int]:
        """Of the tokens that write `text`, those that lie in text[begin:end], if one of them begins there exactly."""
        pieces = [self.vocab[i] if 0 <= i < len(self.vocab) else b"" for i in ids]
        joined = b"".join(pieces)
        blank = int(joined.startswith(b" ") and joined[1 : end + 1] == text[:end])  # some tokenizers put one in front
        if joined[blank : end + blank] != text[:end]:
            return []
        at, inside = -blank, []
        for token, piece in zip(ids, pieces, strict=True):
            if piece and (inside or at == begin) and at + len(piece) <= end:
                inside.append(token)
            at += len(piece)
        return inside

    def examples(self, allowed: np.ndarray) -> list[int]:
        """A few of the allowed tokens, with different first bytes."""
        ids = self.order[allowed[self.order]]
        last_of_byte = np.flatnonzero(np.diff(self.first_byte[allowed[self.order]], append=np.uint8(0)))
        return [int(ids[i]) for i in last_of_byte[:: max(1, len(last_of_byte) // PROBES)]]


class TokenAutomaton:
    """One automaton and one vocabulary: which tokens may follow in which state. It belongs to no request."""

    _numbers = itertools.count()

    def __init__(self, dfa: Dfa, trie: TokenTrie, cache: ByteCache) -> None:
        self.dfa, self.trie, self.cache = dfa, trie, cache
        self.number = next(self._numbers)  # names its masks in the cache, without keeping it there itself
        live = (dfa.table != DEAD)[:, dfa.byte_class]  # [states, 256] which bytes may come next
        self.only_byte = np.where((live.sum(1) == 1) & ~dfa.accepting, live.argmax(1), -1)  # [states]
        # Every state can finish by bytes, and so by tokens where each byte is a token.
        self.lacks_bytes = bool(live[:, sorted(set(range(256)) - trie.single_bytes)].any())
        self.can_finish = self._finishing() if self.lacks_bytes else np.arange(len(live)) != DEAD  # bool [states]
        if not self.can_finish[START]:
            raise GrammarError("this vocabulary cannot write any text that the constraint allows: it lacks bytes")

    def allowed(self, state: int) -> np.ndarray:
        """bool [V]: the tokens that leave the automaton in a state from which the vocabulary can still finish."""
        size = len(self.trie.vocab)

        def make() -> tuple[np.ndarray, int]:
            return np.packbits(self.can_finish[self._after_tokens(state)]), size // 8 + 256

        return np.unpackbits(self.cache.get((self.number, state), make), count=size).view(bool)

    def _after_tokens(self, state: int) -> np.ndarray:
        """int32 [V]: the state in which each token would leave the automaton."""
        width, table = self.dfa.table.shape[1], self.dfa.table.reshape(-1)
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
        """From where the tokens at hand can reach acceptance, worked out for each state of a small automaton."""
        states, good = range(START, len(self.dfa.table)), self.dfa.accepting.copy()
        if len(states) > UNSURE_STATES:
            raise GrammarError(
                f"the vocabulary lacks single-byte tokens, and the constraint has {len(states)} states, more than"
                f" {UNSURE_STATES}; use a simpler constraint or a byte-level tokenizer"
            )
        after = {state: np.unique(self._after_tokens(state)) for state in states}
        while more := [state for state in states if not good[state] and good[after[state]].any()]:
            good[more] = True
        return good


class AutomatonMatcher:
    """A walk through a token automaton; all it has to remember is the state."""

    def __init__(self, automaton: TokenAutomaton, state: int = START) -> None:
        self.automaton, self.state = automaton, state

    def fork(self) -> AutomatonMatcher:
        return AutomatonMatcher(self.automaton, self.state)

    def allowed(self) -> np.ndarray:
        """bool [V], a fresh array: the tokens that may follow, end-of-sequence not among them."""
        return self.automaton.allowed(self.state)

    def advance(self, token: int) -> bool:
        """Step over a token; False (and no way on) if it was not allowed."""
        piece = self.automaton.trie.vocab[token]
        after = self.automaton.dfa.run(self.state, piece) if piece else DEAD
        self.state = after if self.automaton.can_finish[after] else DEAD
        return self.state != DEAD

    @property
    def may_end(self) -> bool:
        return bool(self.automaton.dfa.accepting[self.state])

    @property
    def is_complete(self) -> bool:
        """The text may end and nothing may be added."""
        further = self.automaton.dfa.table[self.state].any()
        return self.may_end and not (further and (not self.automaton.lacks_bytes or self.allowed().any()))

    def forced_bytes(self) -> bytes:
        """What must come next: as long as the text may not end and only one byte continues it."""
        run, state = bytearray(), self.state
        while (byte := self.automaton.only_byte[state]) >= 0:
            run.append(byte)
            state = self.automaton.dfa.run(state, run[-1:])
        return bytes(run)

    def after_bytes(self, run: bytes) -> AutomatonMatcher:
        return AutomatonMatcher(self.automaton, self.automaton.dfa.run(self.state, run))


class Guides:
    """The guides of one model's requests. Vocabulary and grammars are prepared when the first request needs them."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int], jump_forward: bool = True):
        self.tokenizer, self.vocab_size, self.jump_forward = tokenizer, vocab_size, jump_forward
        self.eos_token_ids = frozenset(eos_token_ids)
        self.cache = ByteCache()

    @cached_property
    def trie(self) -> TokenTrie:
        return TokenTrie.from_tokenizer(self.tokenizer, self.vocab_size)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.trie, self.encode, self.eos_token_ids)

    def answer(self, params: SamplingParams, prompt_ids: list[int]) -> Guide | None:
        """The start of an answer with these parameters; None if they ask for no structure. Raises GrammarError."""
        for kind in ("regex", "choice", "json_schema", "grammar"):
            if (source := getattr(params, kind)) is not None:
                matcher = self.matcher(kind, source if isinstance(source, str) else json.dumps(source))
                return Guide(self, matcher, params, list(prompt_ids[-TAIL:]))
        return None

    def matcher(self, kind: str, source: str) -> AutomatonMatcher | GrammarMatcher:
        """Compiled once for each constraint, as long as it is in use; a choice comes as a JSON list."""
        return self.cache.get((kind, source), lambda: self.compile(kind, source)).fork()

    def compile(self, kind: str, source: str) -> tuple[AutomatonMatcher | GrammarMatcher, int]:
        """A matcher at its start, and how many bytes it takes. Raises GrammarError."""
        if kind in ("regex", "choice"):
            dfa = compile_regex(source) if kind == "regex" else compile_choice(json.loads(source))
            automaton = TokenAutomaton(dfa, self.trie, self.cache)
            return AutomatonMatcher(automaton), dfa.table.nbytes + 4 * len(dfa.table) + len(source) + 4096
        return compile_grammar(kind, source, self.vocabulary), COMPILED_BYTES + 16 * len(source)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


class Guide:
    """One answer's walk. It moves when a token is accepted, so nothing ever has to be undone:

    mask() ─> sample ─> accepted token ─> commit() ─> is_complete: nothing may follow, the answer ends at once
                                                  └─> forced: tokens appended as guesses are, committed when computed
    """

    def __init__(self, guides: Guides, matcher: AutomatonMatcher | GrammarMatcher, params: SamplingParams, tail: list):
        self.guides, self.matcher, self.tail = guides, matcher, tail
        # a stop token without text, <|im_end|> say, can only mean the end
        stops = {i for i in params.stop_token_ids if i < guides.vocab_size and not guides.trie.writes[i]}
        self.ends = {i for i in guides.eos_token_ids if i < guides.vocab_size} | stops
        self.ends_before_complete = stops if params.ignore_eos else self.ends
        if not self.ends:
            raise GrammarError(f"no end-of-sequence id is below the vocabulary size {guides.vocab_size}")
        self.forced: list[int] = []  # decided, but not accepted yet
        self._prepare()

    def fork(self) -> Guide:
        twin = copy.copy(self)
        twin.matcher, twin.tail, twin.forced = self.matcher.fork(), self.tail.copy(), self.forced.copy()
        return twin

    @property
    def is_complete(self) -> bool:
        return self.matcher.is_complete

    def completes(self, token: int) -> bool:
        """Whether the text would be complete after one more token."""
        after = self.matcher.fork()
        return self._advance(after, token) and after.is_complete

    def mask(self) -> torch.Tensor:
        """bool [V]: what may follow. Not to be written to."""
        if self._mask is None:
            allowed = self.matcher.allowed()  # [V]
            allowed[list(self.ends)] = False  # even one that has a text
            if self.matcher.may_end:
                allowed[list(self.ends if self.is_complete else self.ends_before_complete)] = True
            elif not allowed.any():
                raise GrammarError("the constraint allows no token: its text or the vocabulary leads nowhere")
            self._mask = torch.from_numpy(allowed)
        return self._mask

    def trim(self, guess: list[int]) -> list[int]:
        """The beginning of a guess that the constraint allows."""
        walker = self.matcher.fork()
        return list(itertools.takewhile(lambda token: self._advance(walker, token), guess))

    def commit(self, token: int) -> None:
        """`token` was accepted; the first forced one, if any are waiting. Raises GrammarError if nothing may follow."""
        self._advance(self.matcher, token)
        if self.forced:
            del self.forced[0]
        self.tail = [*self.tail[1 - TAIL :], token]
        self._prepare()

    def _advance(self, matcher: AutomatonMatcher | GrammarMatcher, token: int) -> bool:
        """Over a token; an end leaves a text that may end as it is."""
        return matcher.may_end if token in self.ends else matcher.advance(token)

    def _prepare(self) -> None:
        """What the next step needs. A grammar that fails does so here, where it ends no other request."""
        self._mask = None
        if self.guides.jump_forward and not self.forced:
            self.forced = self._jump()
        if not self.forced and not self.is_complete:
            self.mask()

    def _jump(self) -> list[int]:
        """Tokens that may be appended without sampling: those that the tokenizer itself would write.

        The forced run is encoded with the text before it and with several texts that may follow, and kept as far as all
        agree; nothing of a run that begins inside a character, or whose first token holds some of the text before it.
        """
        forced = self.matcher.forced_bytes()
        run = forced[:MAX_RUN]
        if not run or run[0] & 0xC0 == 0x80:
            return []
        sure = run.decode("utf-8", errors="ignore")  # a character cut off at the end is left out
        before, cut_off = self.guides.tokenizer.decode(self.tail), len(sure.encode()) < len(forced)
        begin, end = len(before.encode()), len((before + sure).encode())
        encodings = []
        for more in [""] if cut_off else self._continuations(run):
            text = before + sure + more
            encodings.append(self.guides.trie.within(self.guides.encode(text), text.encode(), begin, end))
        agreed = os.path.commonprefix(encodings)  # of lists as of texts
        agreed = agreed[:-1] if cut_off else agreed  # what is cut off may be written with the last one
        return agreed if len(self.trim(agreed)) == len(agreed) else []

    def _continuations(self, run: bytes) -> list[str]:
        """Beginnings of what may follow a forced run, and "" if the text may end there."""
        after = self.matcher.after_bytes(run)
        texts = [b""] if after.may_end else []
        for token in [] if after.is_complete else self.guides.trie.examples(after.allowed()):
            further = after.fork()
            further.advance(token)
            texts.append(self.guides.trie.vocab[token] + further.forced_bytes()[:8])
        return [text.decode("utf-8", errors="ignore") for text in texts]
