"""Regular expressions as automata over BYTES: a pattern becomes a table, and the past of a text one row of it.

A constraint such as "a date" is about characters; a language model writes tokens, and a token is a run of bytes that
may begin or end in the middle of a character. So a pattern becomes a tree, the tree a non-deterministic automaton (NFA)
over bytes, each set of NFA states that some text leads to one state of a deterministic automaton (DFA), and states with
the same future are merged. Bytes that no state tells apart share a column of the table.

      a(b|é)*      NFA (~ reads nothing)        DFA table (0 = dead, 1 = start, * accepting)
                   1 -a-> 2 ~> 3 -b-> 2                a   b   C3  A9
                          2 ~> 4 -C3-> 5 -A9-> 2   1   2   0   0   0
                          2 ~> end                 2*  0   2   3   0
                                                   3   0   0   0   2

Sources: Thompson (1968); Cox, Regular Expression Matching in the Wild (2010), for UTF-8; Rabin and Scott (1959) for the
subsets; Moore (1956) for the merging. Left out: captures (an automaton knows whether, not where), and states built only
when a text reaches them: a pattern whose automaton explodes, (a|b)*a(a|b){30}, is refused after a fixed amount of work.
"""

from __future__ import annotations

import itertools
import re
import re._constants as code  # Python's own reader of patterns gives the tree; what follows from it is done here
import re._parser
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

MAX_NFA_STATES = 120_000  # what bounded repeats may unroll to
MAX_DFA_STATES = 60_000
MAX_WORK = 1_000_000  # edges looked at by one subset construction
MERGE_WORK = 10_000_000  # table cells read while equal states are merged; a table that needs more stays unmerged
TOO_LONG = f"the pattern is too long: {{}} passes {MAX_NFA_STATES} positions; use smaller repeat bounds"
TOO_LARGE = (
    f"the automaton grows too large: {{}} needs more than {MAX_DFA_STATES} states or {MAX_WORK} edges; use smaller"
    " repeat bounds or fewer alternatives"
)
DEAD, START = 0, 1

Ranges = tuple[tuple[int, int], ...]  # code points, inclusive, sorted, disjoint
CHARACTERS: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))  # UTF-8 has no surrogates
UNSUPPORTED = {
    code.GROUPREF: "a back-reference",
    code.GROUPREF_EXISTS: "a conditional group",
    code.ASSERT: "look-ahead or look-behind",
    code.ASSERT_NOT: "look-ahead or look-behind",
    code.ATOMIC_GROUP: "an atomic group",
    code.POSSESSIVE_REPEAT: "a possessive repeat",
    code.AT: "a word boundary",
}


class GrammarError(ValueError):
    """A pattern, schema or grammar that is malformed, unsupported, impossible or too large; raised while compiling."""


def compile_regex(pattern: str) -> Dfa:
    """The automaton of the texts t with re.fullmatch(pattern, t). What it cannot do is refused by a GrammarError."""
    return to_dfa(parse(pattern))


def compile_choice(choices: Iterable[str]) -> Dfa:
    """The automaton of exactly the given texts. Raises GrammarError."""
    branches = [seq(*(chars([(ord(character), ord(character))]) for character in choice)) for choice in choices]
    if any(branch is EMPTY for branch in branches):
        raise GrammarError("a choice holds half a surrogate pair, which UTF-8 cannot write")
    return to_dfa(alt(*branches))


def ranges_of(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Sort and merge any (low, high) pairs."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def intersection(left: Ranges, right: Ranges) -> Ranges:
    return ranges_of((max(a, c), min(b, d)) for a, b in left for c, d in right if max(a, c) <= min(b, d))


def complement(ranges: Ranges) -> Ranges:
    """All characters that are not in `ranges`."""
    ends = [-1, *(end for low, high in ranges for end in (low, high)), 0x110000]
    gaps = [(a + 1, b - 1) for a, b in zip(ends[::2], ends[1::2], strict=True) if a + 1 <= b - 1]
    return intersection(tuple(gaps), CHARACTERS)


class Chars(NamedTuple):
    """One character out of a set."""

    ranges: Ranges


class Seq(NamedTuple):
    parts: tuple


class Alt(NamedTuple):
    parts: tuple


class Repeat(NamedTuple):
    """`node` from `low` to `high` times; high None = without end."""

    node: object
    low: int
    high: int | None


# Both are compared with `is`. A tree that matches nothing is EMPTY itself, so every NFA state can reach the end.
EPSILON, EMPTY = Seq(()), Alt(())  # the empty text, and no text at all


def chars(pairs: Iterable[tuple[int, int]]):
    ranges = intersection(ranges_of(pairs), CHARACTERS)
    return Chars(ranges) if ranges else EMPTY


def seq(*parts):
    if any(part is EMPTY for part in parts):
        return EMPTY
    flat = [p for part in parts for p in (part.parts if isinstance(part, Seq) else (part,))]
    return flat[0] if len(flat) == 1 else Seq(tuple(flat)) if flat else EPSILON


def alt(*parts):
    flat = [p for part in parts for p in (part.parts if isinstance(part, Alt) else (part,))]
    return flat[0] if len(flat) == 1 else Alt(tuple(flat)) if flat else EMPTY


def repeat(node, low: int, high: int | None = None):
    if node is EMPTY:
        return EMPTY if low else EPSILON
    if node is EPSILON or high == 0:
        return EPSILON
    if (most := max(low, high or 0)) > MAX_NFA_STATES:
        raise GrammarError(TOO_LONG.format(f"a repeat of {most}"))
    return node if (low, high) == (1, 1) else Repeat(node, low, high)


@lru_cache(maxsize=6)
def character_class(letter: str, flags: int) -> Ranges:
    """What `re` itself takes for \\d, \\w or \\s: it is asked, once, about every character."""
    everything = "".join(map(chr, range(0x110000)))
    runs = re.finditer(f"\\{letter}+", everything, flags & re.ASCII)
    return intersection(ranges_of((run.start(), run.end() - 1) for run in runs), CHARACTERS)


def parse(pattern: str) -> Chars | Seq | Alt | Repeat:
    """The tree of the texts that match `pattern` as a whole. Raises GrammarError."""
    name = f"regex {pattern[:57] + '...' if len(pattern) > 60 else pattern!r}"
    try:
        parsed = re._parser.parse(pattern)
        _, node, _ = _Reader(name).sequence(parsed, parsed.state.flags)
    except re.error as error:
        raise GrammarError(f"{name}, position {error.pos}: {error.msg}; the syntax is that of Python's re") from None
    except (OverflowError, RecursionError) as error:
        raise GrammarError(f"{name}: {error}; use smaller repeat bounds or fewer nested groups") from None
    if node is EMPTY:
        raise GrammarError(f"{name} matches no text at all; check its character classes")
    return node


class _Reader:
    """From Python's parsed patterns, lists of (operation, argument), to trees: (holds ^, tree, holds $).

    An anchor at an end of a whole match says nothing, and anywhere else it is refused."""

    def __init__(self, name: str) -> None:
        self.name = name

    def sequence(self, operations, flags: int):
        if unknown := flags & ~(re.ASCII | re.DOTALL | re.UNICODE | re.VERBOSE):
            raise self.unsupported(f"the flag {re.RegexFlag(unknown).name}")
        parts, holds_start, holds_end = [], False, False
        for operation, argument in operations:
            starts, part, ends = self.one(operation, argument, flags)
            if starts and parts or holds_end and part is not EPSILON:
                raise GrammarError(f"{self.name}: something stands {'before ^' if starts else 'after $'}; move it")
            holds_start, holds_end = holds_start or starts, holds_end or ends
            parts += [] if part is EPSILON else [part]
        return holds_start, seq(*parts), holds_end

    def one(self, operation, argument, flags: int):
        if operation is code.SUBPATTERN:
            _, added, removed, operations = argument
            return self.sequence(operations, (flags | added) & ~removed)
        if operation is code.BRANCH:
            starts, parts, ends = zip(*(self.sequence(branch, flags) for branch in argument[1]), strict=True)
            return any(starts), alt(*parts), any(ends)
        if operation in (code.MAX_REPEAT, code.MIN_REPEAT):  # lazy or not, the language is the same
            low, high, operations = argument
            starts, part, ends = self.sequence(operations, flags)
            if starts or ends:
                raise self.unsupported("an anchor inside a repeat")
            return False, repeat(part, low, None if high is code.MAXREPEAT else high), False
        if operation is code.AT and argument in (code.AT_BEGINNING, code.AT_BEGINNING_STRING):
            return True, EPSILON, False
        if operation is code.AT and argument in (code.AT_END, code.AT_END_STRING):
            return False, EPSILON, True
        if operation in UNSUPPORTED:
            raise self.unsupported(UNSUPPORTED[operation])
        return False, chars(self.characters(operation, argument, flags)), False

    def characters(self, operation, argument, flags: int) -> Ranges:
        """The set of an operation that reads one character, or of a part of a [class]."""
        if operation is code.ANY:
            return CHARACTERS if flags & re.DOTALL else complement(((10, 10),))
        if operation is code.IN:
            negated = argument[0][0] is code.NEGATE
            members = [self.characters(*member, flags) for member in argument[negated:]]
            ranges = ranges_of(pair for member in members for pair in member)
            return complement(ranges) if negated else ranges
        if operation is code.CATEGORY:
            *negated, name = str(argument).removeprefix("CATEGORY_").split("_")
            ranges = character_class(name[0].lower(), flags)  # DIGIT, SPACE or WORD
            return complement(ranges) if negated else ranges
        ranges = (argument,) if operation is code.RANGE else ((argument, argument),)
        return complement(ranges) if operation is code.NOT_LITERAL else ranges

    def unsupported(self, what: str) -> GrammarError:
        return GrammarError(f"{self.name}: {what} is not supported; spell the alternatives out")


def utf8_sequences(low: int, high: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """The characters low..high as byte-range sequences: U+0080..U+07FF is one, ([C2-DF], [80-BF])."""
    for last_of_length in (0x7F, 0x7FF, 0xFFFF):
        if low <= last_of_length < high:
            yield from utf8_sequences(low, last_of_length)
            yield from utf8_sequences(last_of_length + 1, high)
            return
    for tail in (0x3F, 0xFFF, 0x3FFFF) if high > 0x7F else ():  # the bits that the last 1, 2, 3 bytes carry
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


@lru_cache(maxsize=1024)
def utf8_trie(ranges: Ranges) -> tuple:
    """A set of characters as nested (low byte, high byte, rest), () at a character's end; equal rests are shared."""
    shared: dict[tuple, tuple] = {}

    def grow(sequences) -> tuple:
        if sequences[0] == ():
            return ()
        edges: list[tuple] = []
        for (low, high), group in itertools.groupby(sequences, key=lambda sequence: sequence[0]):
            child = grow([sequence[1:] for sequence in group])
            if edges and edges[-1][1] + 1 == low and edges[-1][2] is child:
                edges[-1] = (edges[-1][0], high, child)
            else:
                edges.append((low, high, child))
        return shared.setdefault(tuple(edges), tuple(edges))

    return grow([s for low, high in ranges for s in utf8_sequences(low, high)])


class Nfa:
    """Built from the end backwards: `build(node, after)` is the state from which `node` and then `after` is read."""

    def __init__(self) -> None:
        self.edges: list[list[tuple]] = [[]]  # state -> (low byte, high byte, target); state 0 is the end
        self.silent: list[list[int]] = [[]]  # state -> targets reached without reading

    def state(self, edges=(), silent=()) -> int:
        if len(self.edges) >= MAX_NFA_STATES:
            raise GrammarError(TOO_LONG.format("the unrolled pattern"))
        self.edges.append(list(edges))
        self.silent.append(list(silent))
        return len(self.edges) - 1

    def build(self, node, after: int) -> int:
        if isinstance(node, Chars):
            return self._trie(utf8_trie(node.ranges), after, {})
        if isinstance(node, Alt):
            return self.state(silent=[self.build(part, after) for part in node.parts])
        if isinstance(node, Seq):
            for part in reversed(node.parts):
                after = self.build(part, after)
            return after
        here = after
        if node.high is None:
            here = self.state(silent=[after])
            self.silent[here].append(self.build(node.node, here))
        for _ in range((node.high or node.low) - node.low):
            here = self.state(silent=[self.build(node.node, here), after])  # straight to `after`: closures stay small
        for _ in range(node.low):
            here = self.build(node.node, here)
        return here

    def _trie(self, trie: tuple, after: int, made: dict[int, int]) -> int:
        if trie == ():
            return after
        if id(trie) not in made:
            made[id(trie)] = self.state([(low, high, self._trie(rest, after, made)) for low, high, rest in trie])
        return made[id(trie)]


class Dfa:
    """table int32 [states, classes], byte_class uint8 [256], accepting bool [states]; state 0 is dead, 1 the start."""

    def __init__(self, table: np.ndarray, byte_class: np.ndarray, accepting: np.ndarray) -> None:
        columns, merged = np.unique(table, axis=1, return_inverse=True)  # equal columns become one
        self.table = np.ascontiguousarray(columns, dtype=np.int32)
        self.byte_class = merged.reshape(-1)[byte_class].astype(np.uint8)
        self.accepting = accepting
        self._flat = memoryview(self.table.reshape(-1))  # single numbers are read faster from it than from numpy
        self._class = self.byte_class.tolist()

    def run(self, state: int, data: bytes) -> int:
        """The state after `data`, DEAD once no continuation can match."""
        width = self.table.shape[1]
        for byte in data:
            state = self._flat[state * width + self._class[byte]]
        return state

    def accepts(self, data: bytes) -> bool:
        return bool(self.accepting[self.run(START, data)])


def to_dfa(node) -> Dfa:
    """The minimal automaton of a tree (or a correct larger one where merging would take too long)."""
    nfa = Nfa()
    start = nfa.build(node, 0)
    return merge_states(_subsets(nfa, start))


def _closures(nfa: Nfa) -> Callable[[int], frozenset[int]]:
    """state -> the states that silent edges reach from it; only those that read a byte or end the text matter."""
    known: dict[int, frozenset[int]] = {}
    work = 0

    def closure(state: int) -> frozenset[int]:
        nonlocal work
        if state not in known:
            seen, stack = {state}, [state]
            while stack:
                new = set(nfa.silent[stack.pop()]) - seen
                seen |= new
                stack += new
            work += len(seen)
            if work > MAX_WORK:
                raise GrammarError(TOO_LARGE.format("the optional parts that follow each other"))
            known[state] = frozenset(s for s in seen if s == 0 or nfa.edges[s])
        return known[state]

    return closure


def _subsets(nfa: Nfa, start: int) -> Dfa:
    """Every set of NFA states that some text leads to becomes one DFA state."""
    cuts = sorted({0, 256} | {e for edges in nfa.edges for low, high, _ in edges for e in (low, high + 1)})
    column = {cut: i for i, cut in enumerate(cuts)}
    edges = [[(column[low], column[high + 1], target) for low, high, target in state] for state in nfa.edges]
    closure = _closures(nfa)
    by_targets: dict[tuple, int] = {}  # two keys for one state: what edges lead to ...
    by_members: dict[frozenset, int] = {frozenset(): DEAD}  # ... and its closure
    members: list[frozenset[int]] = [frozenset()]

    def number(targets: tuple[int, ...]) -> int:
        if targets not in by_targets:
            union = frozenset().union(*map(closure, targets))
            if union not in by_members:
                by_members[union] = len(members)
                members.append(union)
            by_targets[targets] = by_members[union]
        return by_targets[targets]

    number((start,))
    rows, work = [[DEAD] * (len(cuts) - 1)], 0
    while len(rows) < len(members):
        row = [DEAD] * (len(cuts) - 1)
        leaving = sorted(edge for state in members[len(rows)] for edge in edges[state])
        work += len(members[len(rows)]) + len(leaving)
        for low, high, targets in _split(leaving):
            row[low:high] = [number(targets)] * (high - low)
            work += len(targets)
        rows.append(row)
        if len(members) > MAX_DFA_STATES or work > MAX_WORK:
            raise GrammarError(TOO_LARGE.format("the pattern's deterministic form"))
    byte_class = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
    return Dfa(np.array(rows, np.int32), byte_class, np.array([0 in m for m in members]))


def _split(edges: list[tuple]) -> Iterator[tuple]:
    """Sorted (low, high, target) that may overlap, as disjoint (low, high, targets)."""
    if all(a[1] <= b[0] for a, b in zip(edges, edges[1:], strict=False)):
        yield from ((low, high, (target,)) for low, high, target in edges)
        return
    points = sorted({p for low, high, _ in edges for p in (low, high)})
    for low, high in zip(points, points[1:], strict=False):
        targets = tuple(target for a, b, target in edges if a <= low and high <= b)
        if targets:
            yield low, high, targets


def merge_states(dfa: Dfa) -> Dfa:
    """Moore: begin with {accepting, not} and split blocks whose members step into different blocks, until none is."""
    table, accepting = dfa.table, dfa.accepting
    weights = np.random.default_rng(0).integers(1, 2**63, table.shape[1], dtype=np.uint64) | np.uint64(1)
    block = accepting.astype(np.int64)  # [states]
    block[DEAD] = 2
    count = len(np.unique(block))
    for _ in range(max(2, MERGE_WORK // table.size)):
        mixed = (block.astype(np.uint64)[table] * weights).sum(1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        _, block = np.unique(mixed + block.astype(np.uint64), return_inverse=True)
        if block.max() + 1 == count:
            break
        count = block.max() + 1
    else:
        return dfa  # a long chain (a{0,2000}x*) splits off one state a round: it is as good as minimal already
    _, member = np.unique(block, return_index=True)  # one member of each block
    same = (block[table] == block[table[member]][block]).all() and (accepting == accepting[member][block]).all()
    if not same:  # the rounds compared 64-bit sums: were two ever equal by chance, keep the larger automaton
        return dfa
    first = [block[DEAD], block[START]]  # the two fixed numbers
    member = member[[*first, *np.setdiff1d(np.arange(count), first)]]
    renumber = np.empty(count, np.int64)
    renumber[block[member]] = np.arange(count)
    return Dfa(renumber[block[table[member]]], dfa.byte_class, accepting[member])
