"""Regular expressions as automata over BYTES: a pattern becomes a table, and the past of a text one row of it.

A constraint such as "a date" is about characters; a language model writes tokens, and a token is a run of bytes that
may begin or end in the middle of a character. So a pattern becomes a non-deterministic automaton (NFA) over bytes, each
set of NFA states that some text leads to one state of a deterministic automaton (DFA), and states with the same future
are merged. Bytes that no state tells apart share a column of the table.

      a(b|é)*      NFA (~ reads nothing)        DFA table (0 = dead, 1 = start, * accepting)
                   1 -a-> 2 ~> 3 -b-> 2                a   b   C3  A9
                          2 ~> 4 -C3-> 5 -A9-> 2   1   2   0   0   0
                          2 ~> end                 2*  0   2   3   0
                                                   3   0   0   0   2

Sources: Thompson (1968); Rabin and Scott (1959) for the subsets; Moore (1956) for the merging. Left out: captures, and
states built only when a text reaches them: a pattern that explodes, (a|b)*a(a|b){30}, is refused after bounded work.
"""

from __future__ import annotations

import re
import re._constants as code  # Python's own reader of patterns gives the tree; what follows from it is done here
import re._parser
from collections.abc import Iterable, Iterator
from functools import lru_cache

import numpy as np

MAX_NFA_STATES = 120_000  # what bounded repeats may unroll to
TOO_LONG = f"too long: unrolled it passes {MAX_NFA_STATES} positions; use smaller repeat bounds"
MAX_DFA_STATES = 60_000
MAX_WORK = 1_000_000  # edges looked at by one subset construction
MERGE_WORK = 10_000_000  # table cells read while equal states are merged; a table that needs more stays unmerged
DEAD, START = 0, 1  # states of a DFA
END = 0  # of an NFA

Ranges = tuple[tuple[int, int], ...]  # code points, inclusive, sorted, disjoint
# The characters that UTF-8 writes with 1, 2, 3, 3 and 4 bytes; it has no surrogates.
UTF8: Ranges = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF))
UNSUPPORTED = {
    code.GROUPREF: "a back-reference",
    code.GROUPREF_EXISTS: "a conditional group",
    code.ASSERT: "look-ahead or look-behind",
    code.ASSERT_NOT: "look-ahead or look-behind",
    code.ATOMIC_GROUP: "an atomic group",
    code.POSSESSIVE_REPEAT: "a possessive repeat",
    code.AT: "a word boundary",
}
ANCHORS = {code.AT_BEGINNING: "before ^", code.AT_BEGINNING_STRING: "before ^"}
ANCHORS |= {code.AT_END: "after $", code.AT_END_STRING: "after $"}


class GrammarError(ValueError):
    """A pattern, schema or grammar that is malformed, unsupported, impossible or too large; raised while compiling."""


def compile_regex(pattern: str) -> Dfa:
    """The automaton of the texts t with re.fullmatch(pattern, t). What it cannot do is refused by a GrammarError."""
    nfa = Nfa(f"regex {pattern[:57] + '...' if len(pattern) > 60 else pattern!r}")
    try:
        parsed = re._parser.parse(pattern)
        start = nfa.sequence(parsed, parsed.state.flags, END)
    except re.error as error:
        raise nfa.refused(f"position {error.pos}: {error.msg}; the syntax is that of Python's re") from None
    except (OverflowError, RecursionError) as error:
        raise nfa.refused(f"{error}; use smaller repeat bounds or fewer nested groups") from None
    if start is None:
        raise nfa.refused("it matches no text at all; check its character classes")
    return merge_states(subsets(nfa, start))


def compile_choice(choices: Iterable[str]) -> Dfa:
    """The automaton of exactly the given texts. Raises GrammarError."""
    nfa, starts = Nfa("choice"), []
    for choice in choices:
        here = END
        for byte in reversed(choice.encode()):
            here = nfa.state([(byte, byte, here)])
        starts.append(here)
    return merge_states(subsets(nfa, nfa.state(silent=starts)))


def ranges_of(pairs: Iterable[tuple[int, int]]) -> Ranges:
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
    ends = [-1, *(end for pair in ranges for end in pair), 0x110000]
    return tuple((a + 1, b - 1) for a, b in zip(ends[::2], ends[1::2], strict=True) if a + 1 < b)


@lru_cache(maxsize=6)
def character_class(letter: str, flags: int) -> Ranges:
    """What `re` itself takes for \\d, \\w or \\s: it is asked, once, about every character."""
    runs = re.finditer(f"\\{letter}+", "".join(map(chr, range(0x110000))), flags & re.ASCII)
    return ranges_of((run.start(), run.end() - 1) for run in runs)


def characters(operation, argument, flags: int) -> Ranges:
    """The set of an operation that reads one character, or of a part of a [class]."""
    if operation is code.ANY:
        return complement(() if flags & re.DOTALL else ((10, 10),))
    if operation is code.IN:
        negated = argument[0][0] is code.NEGATE
        ranges = ranges_of(pair for member in argument[negated:] for pair in characters(*member, flags))
        return complement(ranges) if negated else ranges
    if operation is code.CATEGORY:
        *negated, name = str(argument).removeprefix("CATEGORY_").split("_")
        ranges = character_class(name[0].lower(), flags)  # DIGIT, SPACE or WORD
        return complement(ranges) if negated else ranges
    ranges = (argument,) if operation is code.RANGE else ((argument, argument),)
    return complement(ranges) if operation is code.NOT_LITERAL else ranges


def utf8_trie(ranges: Ranges) -> tuple:
    """A set of characters as nested (low byte, high byte, rest), () at a character's end."""
    cut = [(max(a, low), min(b, high)) for a, b in ranges for low, high in UTF8 if max(a, low) <= min(b, high)]
    return byte_trie(tuple((chr(low).encode(), chr(high).encode()) for low, high in cut))


@lru_cache(maxsize=1 << 14)  # and so equal rests are one object
def byte_trie(pairs: tuple[tuple[bytes, bytes], ...]) -> tuple:
    """The trie of all bytes from `low` to `high`, of equal length, for some sorted pairs of them."""
    if pairs == ((b"", b""),):
        return ()
    rests: dict[int, list] = {}  # first byte -> pairs of what follows it
    for low, high in pairs:
        for byte in range(low[0], high[0] + 1):
            least = low[1:] if byte == low[0] else b"\x80" * len(low[1:])
            most = high[1:] if byte == high[0] else b"\xbf" * len(low[1:])
            rests.setdefault(byte, []).append((least, most))
    edges: list[tuple] = []
    for byte, rest in rests.items():
        child = byte_trie(tuple(rest))
        begin = edges.pop()[0] if edges and edges[-1][1:] == (byte - 1, child) else byte
        edges.append((begin, byte, child))
    return tuple(edges)


class Nfa:
    """Built from the end backwards: each method is given the state `after` and returns that from which its part, and
    then what comes after, is read. None is no way on: what matches nothing has no states, so all states reach the end.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.edges: list[list[tuple]] = [[]]  # state -> (low byte, high byte, target)
        self.silent: list[list[int]] = [[]]  # state -> targets reached without reading
        self.tries: dict[int, tuple] = {}  # by operation: a repeat reads the same one many times

    def refused(self, why: str) -> GrammarError:
        return GrammarError(f"{self.name}: {why}")

    def state(self, edges: Iterable[tuple] = (), silent: Iterable[int] = ()) -> int:
        if len(self.edges) >= MAX_NFA_STATES:
            raise self.refused(TOO_LONG)
        self.edges.append(list(edges))
        self.silent.append(list(silent))
        return len(self.edges) - 1

    def sequence(self, operations, flags: int, after: int | None, first: bool = True, last: bool = True) -> int | None:
        """Operations as `re` parses them; first, last: nothing is read before, after them."""
        if unknown := flags & ~(re.ASCII | re.DOTALL | re.UNICODE | re.VERBOSE):
            raise self.refused(f"the flag {re.RegexFlag(unknown).name} is not supported; spell the alternatives out")
        reading = [i for i in range(len(operations)) if operations[i : i + 1].getwidth()[1]] or [0]
        for i in reversed(range(len(operations))):
            if after is None:
                break
            after = self.one(operations[i], flags, after, first and i <= reading[0], last and i >= reading[-1])
        return after

    def one(self, operation: tuple, flags: int, after: int, first: bool, last: bool) -> int | None:
        kind, argument = operation
        if kind is code.SUBPATTERN:
            _, added, removed, operations = argument
            return self.sequence(operations, (flags | added) & ~removed, after, first, last)
        if kind is code.BRANCH:
            starts = [self.sequence(branch, flags, after, first, last) for branch in argument[1]]
            starts = [start for start in starts if start is not None]
            return self.state(silent=starts) if starts else None
        if kind in (code.MAX_REPEAT, code.MIN_REPEAT):  # lazy or not, the language is the same
            return self.repeat(*argument, flags, after)
        if kind is code.AT and argument in ANCHORS:  # at an end of a whole match it says nothing
            if not (first if ANCHORS[argument] == "before ^" else last):
                raise self.refused(f"an anchor in a repeat, or something {ANCHORS[argument]}; move it")
            return after
        if kind in UNSUPPORTED:
            raise self.refused(f"{UNSUPPORTED[kind]} is not supported; spell the alternatives out")
        if id(operation) not in self.tries:
            self.tries[id(operation)] = utf8_trie(characters(kind, argument, flags))
        trie = self.tries[id(operation)]
        return self.read(trie, after, {}) if trie else None

    def repeat(self, low: int, high: int, operations, flags: int, after: int) -> int | None:
        def once(after: int) -> int | None:
            return self.sequence(operations, flags, after, False, False)

        here = after
        if high is code.MAXREPEAT:
            here, high = self.state(silent=[after]), low
            if (start := once(here)) is not None:
                self.silent[here].append(start)
        if high * operations.getwidth()[0] > MAX_NFA_STATES:
            raise self.refused(TOO_LONG)
        for i in range(high):
            if (start := once(here)) is None:
                return None if low else after
            if start == here:  # nothing was read, and nothing will be
                break
            # An optional one may be left out straight to `after`: few silent edges follow each other.
            here = self.state(silent=[start, after]) if i < high - low else start
        return here

    def read(self, trie: tuple, after: int, made: dict[int, int]) -> int:
        if trie == ():
            return after
        if id(trie) not in made:
            made[id(trie)] = self.state([(low, high, self.read(rest, after, made)) for low, high, rest in trie])
        return made[id(trie)]

    def reach(self, states: Iterable[int]) -> set[int]:
        """With what silent edges reach from these states."""
        seen, stack = set(states), list(states)
        while stack:
            new = set(self.silent[stack.pop()]) - seen
            seen |= new
            stack += new
        return seen


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


def subsets(nfa: Nfa, start: int) -> Dfa:
    """Every set of NFA states that some text leads to becomes one DFA state."""
    cuts = sorted({0, 256} | {e for edges in nfa.edges for low, high, _ in edges for e in (low, high + 1)})
    column = {cut: i for i, cut in enumerate(cuts)}
    edges = [[(column[low], column[high + 1], target) for low, high, target in state] for state in nfa.edges]
    # DFA state -> those of its NFA states that read a byte or are the end
    members: list[frozenset[int]] = [frozenset()]
    by_members: dict[frozenset, int] = {members[0]: DEAD}
    by_targets: dict[tuple, int] = {}  # the same by what edges lead to
    work = 0

    def number(targets: tuple[int, ...]) -> int:
        nonlocal work
        if targets not in by_targets:
            reached = nfa.reach(targets)
            work += len(reached)
            union = frozenset(s for s in reached if s == END or edges[s])
            if union not in by_members:
                by_members[union] = len(members)
                members.append(union)
            by_targets[targets] = by_members[union]
        return by_targets[targets]

    number((start,))
    rows = [[DEAD] * (len(cuts) - 1)]
    while len(rows) < len(members):
        row = [DEAD] * (len(cuts) - 1)
        leaving = sorted(edge for state in members[len(rows)] for edge in edges[state])
        work += len(members[len(rows)]) + len(leaving)
        for low, high, targets in disjoint(leaving):
            row[low:high] = [number(targets)] * (high - low)
            work += len(targets)
            if len(members) > MAX_DFA_STATES or work > MAX_WORK:
                raise nfa.refused(
                    f"the automaton grows too large: more than {MAX_DFA_STATES} states or {MAX_WORK} edges;"
                    " use smaller repeat bounds or fewer alternatives"
                )
        rows.append(row)
    byte_class = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
    return Dfa(np.array(rows, np.int32), byte_class, np.array([END in m for m in members]))


def disjoint(edges: list[tuple]) -> Iterator[tuple]:
    """Sorted (low, high, target) that may overlap, as disjoint (low, high, targets)."""
    if all(a[1] <= b[0] for a, b in zip(edges, edges[1:], strict=False)):
        yield from ((low, high, (target,)) for low, high, target in edges)
        return
    points = sorted({p for low, high, _ in edges for p in (low, high)})
    for low, high in zip(points, points[1:], strict=False):
        if targets := tuple(target for a, b, target in edges if a <= low and high <= b):
            yield low, high, targets


def merge_states(dfa: Dfa) -> Dfa:
    """Moore: begin with {accepting, not} and split blocks whose members step into different blocks, until none is."""
    table, accepting = dfa.table, dfa.accepting
    weights = np.random.default_rng(0).integers(1, 2**63, table.shape[1], dtype=np.uint64) | np.uint64(1)
    block, count = accepting.astype(np.int64), 2  # [states]
    block[DEAD] = 2
    for _ in range(max(2, MERGE_WORK // table.size)):
        mixed = (block.astype(np.uint64)[table] * weights).sum(1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        _, member, block = np.unique(mixed + block.astype(np.uint64), return_index=True, return_inverse=True)
        if len(member) == count:
            break
        count = len(member)
    else:
        return dfa  # a long chain (a{0,2000}x*) splits off one state a round: it is as good as minimal already
    same = (block[table] == block[table[member]][block]).all() and (accepting == accepting[member][block]).all()
    if not same:  # the rounds compared 64-bit sums: were two ever equal by chance, keep the larger automaton
        return dfa
    order = np.concatenate([block[:2], np.setdiff1d(np.arange(count), block[:2])])  # DEAD and START keep their numbers
    return Dfa(np.argsort(order)[block[table[member[order]]]], dfa.byte_class, accepting[member[order]])
