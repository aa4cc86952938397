"""Regular languages as trees, and trees as non-deterministic automata over BYTES.

Problem. A constraint such as "a date" is about characters, a language model writes tokens, and a token is a run of
bytes that may begin or end in the middle of a character. Whoever walks characters can never say whether half an emoji
is a legal beginning.

Idea. Work on bytes throughout. A set of characters becomes a little trie of UTF-8 byte ranges; sequence, choice and
repetition become a non-deterministic automaton (NFA) with silent edges. `dfa.py` makes it deterministic.

      tree                     NFA (silent edges: ~)

      a(b|é)*           1 -a-> 2 ~> 3 -b-> 2
                               2 ~> 4 -C3-> 5 -A9-> 2
                               2 ~> end

No dead ends. A tree that can match nothing is dropped while the tree is built (`seq` with an impossible part is
impossible, `alt` forgets it), so every NFA state can reach the end, and so can every state of the deterministic
automaton but the dead one.

Source: K. Thompson, Regular Expression Search Algorithm (CACM 1968); the splitting of character ranges into byte
ranges is the one Thompson wrote for UTF-8 in grep, told by R. Cox, Regular Expression Matching in the Wild (2010),
section "UTF-8".

Left out: captures (an automaton knows whether, not where) and counters (a{2000} really is 2000 copies).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # dfa.py builds on this file; the finished automaton is only a guest here
    from dfa import Dfa

MAX_NFA_STATES = 120_000  # what bounded repeats may unroll to

Ranges = tuple[tuple[int, int], ...]  # code points, inclusive, sorted, disjoint
CHARACTERS: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))  # UTF-8 has no surrogates


class GrammarError(ValueError):
    """A pattern or schema that is malformed, unsupported, impossible or too large; raised while compiling."""


# sets of characters


def ranges_of(pairs) -> Ranges:
    """Sort and merge any (low, high) pairs."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """All characters that are not in `ranges`."""
    gaps, begin = [], 0
    for low, high in ranges:
        if low > begin:
            gaps.append((begin, low - 1))
        begin = high + 1
    if begin <= 0x10FFFF:
        gaps.append((begin, 0x10FFFF))
    return intersection(tuple(gaps), CHARACTERS)


def intersection(left: Ranges, right: Ranges) -> Ranges:
    return ranges_of((max(a, c), min(b, d)) for a, b in left for c, d in right if max(a, c) <= min(b, d))


# the tree


@dataclass(frozen=True, eq=False)
class Chars:
    """One character out of a set."""

    ranges: Ranges


@dataclass(frozen=True, eq=False)
class Seq:
    parts: tuple


@dataclass(frozen=True, eq=False)
class Alt:
    parts: tuple


@dataclass(frozen=True, eq=False)
class Repeat:
    """`node` from `low` to `high` times; high None = without end."""

    node: object
    low: int
    high: int | None


@dataclass(frozen=True, eq=False)
class Join:
    """Items in order, each (node, low, high) times, `separator` between those that are there."""

    items: tuple
    separator: object


@dataclass(frozen=True, eq=False)
class Machine:
    """A finished automaton used as a part of a larger one (products, remainders)."""

    dfa: Dfa


Node = Chars | Seq | Alt | Repeat | Join | Machine
EPSILON = Seq(())  # the empty text
EMPTY = Alt(())  # no text at all


def chars(ranges) -> Node:
    found = intersection(ranges_of(ranges), CHARACTERS)
    return Chars(found) if found else EMPTY


def text(literal: str) -> Node:
    return seq(*(chars([(ord(c), ord(c))]) for c in literal))


def seq(*parts: Node) -> Node:
    if any(part is EMPTY for part in parts):
        return EMPTY
    flat = [p for part in parts for p in (part.parts if isinstance(part, Seq) else (part,))]
    return flat[0] if len(flat) == 1 else Seq(tuple(flat)) if flat else EPSILON


def alt(*parts: Node) -> Node:
    flat = [p for part in parts for p in (part.parts if isinstance(part, Alt) else (part,))]
    return flat[0] if len(flat) == 1 else Alt(tuple(flat)) if flat else EMPTY


def repeat(node: Node, low: int, high: int | None = None) -> Node:
    if high is not None and high < low:
        return EMPTY
    if node is EMPTY:
        return EMPTY if low else EPSILON
    if node is EPSILON or high == 0:
        return EPSILON
    if max(low, high or 0) > MAX_NFA_STATES:
        raise too_long(f"a repeat of {max(low, high or 0)}")
    return node if (low, high) == (1, 1) else Repeat(node, low, high)


def join(items, separator: Node) -> Node:
    """`items` of (node, low, high). An impossible optional item is left out, an impossible required one spoils all."""
    if any(node is EMPTY and low for node, low, _ in items) or any(h is not None and h < low for _, low, h in items):
        return EMPTY
    return Join(tuple((n, low, high) for n, low, high in items if n is not EMPTY and high != 0), separator)


def machine(dfa: Dfa) -> Node:
    return EMPTY if dfa.is_empty else Machine(dfa)


def too_long(what: str) -> GrammarError:
    return GrammarError(f"the pattern is too long: {what} passes {MAX_NFA_STATES} positions; use smaller repeat bounds")


# characters as bytes


def utf8_sequences(low: int, high: int):
    """The characters low..high as byte-range sequences: U+0080..U+07FF is one, ([C2-DF], [80-BF])."""
    for last_of_length in (0x7F, 0x7FF, 0xFFFF):
        if low <= last_of_length < high:
            yield from utf8_sequences(low, last_of_length)
            yield from utf8_sequences(last_of_length + 1, high)
            return
    if high > 0x7F:
        for tail in (0x3F, 0xFFF, 0x3FFFF):  # the bits that the last 1, 2, 3 bytes carry
            if low & ~tail == high & ~tail:
                break  # equal leading bytes: only the tail varies, and shorter tails were made full below
            if low & tail:  # a ragged beginning
                yield from utf8_sequences(low, low | tail)
                yield from utf8_sequences((low | tail) + 1, high)
                return
            if high & tail != tail:  # a ragged end
                yield from utf8_sequences(low, (high & ~tail) - 1)
                yield from utf8_sequences(high & ~tail, high)
                return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))


@lru_cache(maxsize=4096)
def utf8_trie(ranges: Ranges) -> tuple:
    """A set of characters as nested (low byte, high byte, rest), () at a character's end; equal rests are shared."""
    shared: dict[tuple, tuple] = {}

    def grow(sequences) -> tuple:
        if sequences[0] == ():
            return ()
        by_first: dict[tuple, list] = {}
        for first, *rest in sequences:
            by_first.setdefault(first, []).append(tuple(rest))
        edges: list[tuple] = []
        for (low, high), rests in by_first.items():
            child = grow(rests)
            if edges and edges[-1][1] + 1 == low and edges[-1][2] is child:
                edges[-1] = (edges[-1][0], high, child)
            else:
                edges.append((low, high, child))
        return shared.setdefault(tuple(edges), tuple(edges))

    return grow([s for low, high in ranges for s in utf8_sequences(low, high)])


# tree -> NFA


class Nfa:
    """Built from the end backwards: `build(node, after)` is the state from which `node` and then `after` is read."""

    def __init__(self) -> None:
        self.edges: list[list[tuple[int, int, int]]] = [
            []
        ]  # state -> (low byte, high byte, target); state 0 is the end
        self.silent: list[list[int]] = [[]]  # state -> targets reached without reading

    def state(self, edges=(), silent=()) -> int:
        if len(self.edges) >= MAX_NFA_STATES:
            raise too_long("the unrolled pattern")
        self.edges.append(list(edges))
        self.silent.append(list(silent))
        return len(self.edges) - 1

    def build(self, node: Node, after: int) -> int:
        if isinstance(node, Chars):
            return self._trie(utf8_trie(node.ranges), after, {})
        if isinstance(node, Seq):
            for part in reversed(node.parts):
                after = self.build(part, after)
            return after
        if isinstance(node, Alt):
            return self.state(silent=[self.build(part, after) for part in node.parts])
        if isinstance(node, Repeat):
            return self._repeat(node, after)
        if isinstance(node, Join):
            return self._join(node, after)
        return self._machine(node.dfa, after)

    def _trie(self, trie: tuple, after: int, made: dict[int, int]) -> int:
        if trie == ():
            return after
        if id(trie) not in made:
            made[id(trie)] = self.state([(low, high, self._trie(rest, after, made)) for low, high, rest in trie])
        return made[id(trie)]

    def _repeat(self, node: Repeat, after: int) -> int:
        if node.high is None:
            loop = self.state(silent=[after])
            self.silent[loop].append(self.build(node.node, loop))
            here = loop
        else:
            here = after
            for _ in range(
                node.high - node.low
            ):  # each optional copy may leave to `after` directly, so closures stay small
                here = self.state(silent=[self.build(node.node, here), after])
        for _ in range(node.low):
            here = self.build(node.node, here)
        return here

    def _join(self, node: Join, after: int) -> int:
        """Two tracks: `first` = nothing written yet, `later` = something was, so a separator precedes the next item.
        Both enter the same copy of an item, so n optional items cost n copies and not 2^n."""
        first = later = after
        for item, low, high in reversed(node.items):
            first_end, later_end = first, later
            if high is None:
                loop = self.state(silent=[later_end])
                entry = self.build(item, loop)
                self.silent[loop].append(self.build(node.separator, entry))
                first, later = self.state(silent=[entry, first_end]), loop
            else:
                for _ in range(high - low):
                    entry = self.build(item, later)
                    first = self.state(silent=[entry, first_end])
                    later = self.state(silent=[self.build(node.separator, entry), later_end])
            for _ in range(low):
                first = self.build(item, later)
                later = self.build(node.separator, first)
        return first

    def _machine(self, dfa: Dfa, after: int) -> int:
        states = [0] + [self.state() for _ in range(len(dfa.table) - 1)]
        for number, leaving in enumerate(dfa.byte_ranges()):
            self.edges[states[number]] += [(low, high, states[target]) for low, high, target in leaving]
            if dfa.accepting[number]:
                self.silent[states[number]].append(after)
        return states[1]
