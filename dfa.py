"""From a tree to a small deterministic automaton (DFA): the whole past of a text becomes one integer.

Problem. The non-deterministic automaton of `regular.py` is in several states at once, and which of them matter
changes with every byte. A mask over a vocabulary of 50 000 tokens cannot be afforded per set of states.

Idea. Each set of NFA states that some text leads to becomes ONE state (subset construction). States with the same
future are merged. Bytes that no state tells apart share a column, so the table is [states, classes] and not [states,
256].

      NFA of a(b|é)*                         table (0 = dead, 1 = start, * accepting)
      1 -a-> 2 ~> 3 -b-> 2                        a   b   C3  A9
             2 ~> 4 -C3-> 5 -A9-> 2          1    2   0   0   0
             2 ~> end                        2*   0   2   3   0
                                             3    0   0   0   2

Everything is bounded by counts and never by a clock: a pattern whose automaton would explode, such as
(a|b)*a(a|b){30}, is refused after a fixed amount of work, the same on every machine.

Sources: M. Rabin and D. Scott, Finite Automata and Their Decision Problems (1959) for the subsets;
E. Moore, Gedanken-experiments on Sequential Machines (1956) for the merging.

Left out: building states only when a text reaches them (a lazy DFA): then an explosion would show in the middle of a
request.
"""

from __future__ import annotations

import numpy as np

from regular import EMPTY, GrammarError, Machine, Nfa, Node

MAX_DFA_STATES = 60_000
MAX_WORK = 1_000_000  # edges looked at by one subset construction
MAX_CELLS = 3_000_000  # table cells of one product
MERGE_WORK = 10_000_000  # table cells read by the merging of equal states; a table that needs more stays unmerged
DEAD, START = 0, 1


def too_large(what: str) -> GrammarError:
    return GrammarError(
        f"the automaton grows too large: {what} needs more than {MAX_DFA_STATES} states or {MAX_WORK} edges;"
        " use smaller repeat bounds, shallower nesting or fewer overlapping alternatives"
    )


class Dfa:
    """table int32 [states, classes], byte_class uint8 [256], accepting bool [states]; state 0 is dead, 1 the start."""

    def __init__(self, table: np.ndarray, byte_class: np.ndarray, accepting: np.ndarray, cost: int = 0) -> None:
        # bytes that no state tells apart share a column
        columns, merged = np.unique(table, axis=1, return_inverse=True)
        self.table = np.ascontiguousarray(columns, dtype=np.int32)
        self.byte_class = merged.reshape(-1)[byte_class].astype(np.uint8)
        self.accepting = accepting
        self.cost = cost  # edges looked at while it was built
        self._flat = memoryview(self.table.reshape(-1))  # single numbers are read faster from it than from numpy
        self._class = self.byte_class.tolist()
        self._ranges: list[list[tuple[int, int, int]]] | None = None

    @property
    def is_empty(self) -> bool:
        return not self.accepting[START] and not self.table[START].any()

    def byte_ranges(self) -> list[list[tuple[int, int, int]]]:
        """The edges of each state as (low byte, high byte, target)."""
        if self._ranges is None:
            whole = self.table[:, self.byte_class]  # [states, 256]
            edge = np.ones(whole.shape, bool)  # where a run of equal targets begins
            edge[:, 1:] = whole[:, 1:] != whole[:, :-1]
            state, low = np.nonzero(edge)
            high = np.append(low[1:], 256) - 1
            high[high < 0] = 255
            self._ranges = [[] for _ in whole]
            for s, a, b, target in zip(*(v.tolist() for v in (state, low, high, whole[edge])), strict=True):
                if target != DEAD:
                    self._ranges[s].append((a, b, target))
        return self._ranges

    def run(self, state: int, data: bytes) -> int:
        """The state after `data`, DEAD once no continuation can match."""
        width = self.table.shape[1]
        for byte in data:
            state = self._flat[state * width + self._class[byte]]
        return state

    def accepts(self, data: bytes) -> bool:
        return bool(self.accepting[self.run(START, data)])


def to_dfa(node: Node) -> Dfa:
    """The minimal automaton of a tree (or a correct larger one where merging would take too long)."""
    if node is EMPTY:
        return Dfa(np.zeros((2, 1), np.int32), np.zeros(256, np.uint8), np.zeros(2, bool))
    if isinstance(node, Machine):
        return node.dfa
    nfa = Nfa()
    start = nfa.build(node, 0)
    return merge_states(_subsets(nfa, start))


def _closures(nfa: Nfa):
    """state -> the states that silent edges reach from it; only those that read a byte or end the text matter."""
    known: dict[int, frozenset[int]] = {}
    work = 0

    def closure(state: int) -> frozenset[int]:
        nonlocal work
        if state not in known:
            seen, stack = {state}, [state]
            while stack:
                for target in nfa.silent[stack.pop()]:
                    if target not in seen:
                        seen.add(target)
                        stack.append(target)
            work += len(seen)
            if work > MAX_WORK:
                raise too_large("the optional parts that follow each other")
            known[state] = frozenset(s for s in seen if s == 0 or nfa.edges[s]) if len(seen) > 1 else frozenset(seen)
        return known[state]

    return closure


def _subsets(nfa: Nfa, start: int) -> Dfa:
    """Every set of NFA states that some text leads to becomes one DFA state."""
    cuts = sorted({0, 256} | {e for edges in nfa.edges for low, high, _ in edges for e in (low, high + 1)})
    column = {cut: i for i, cut in enumerate(cuts)}
    edges = [[(column[low], column[high + 1], target) for low, high, target in state] for state in nfa.edges]
    closure = _closures(nfa)
    by_targets: dict[tuple, int] = {}  # two keys for one state: what edges lead to ...
    by_members: dict[frozenset, int] = {}  # ... and its closure
    members: list[frozenset[int]] = [frozenset()]

    def number(targets: tuple[int, ...]) -> int:
        if targets not in by_targets:
            whole = closure(targets[0]) if len(targets) == 1 else frozenset().union(*map(closure, targets))
            if whole not in by_members:
                by_members[whole] = len(members)
                members.append(whole)
            by_targets[targets] = by_members[whole]
        return by_targets[targets]

    number((start,))
    rows, work, done = [[0] * (len(cuts) - 1)], 0, 1
    while done < len(members):
        row = [0] * (len(cuts) - 1)
        leaving = [edge for state in members[done] for edge in edges[state]]
        if len(members[done]) > 1:
            leaving.sort()
        overlap = any(a[1] > b[0] for a, b in zip(leaving, leaving[1:], strict=False))
        pieces = _split(leaving) if overlap else [(low, high, (target,)) for low, high, target in leaving]
        for low, high, targets in pieces:
            row[low:high] = [number(targets)] * (high - low)
            work += len(targets)
        rows.append(row)
        work += len(members[done]) + len(leaving)
        done += 1
        if len(members) > MAX_DFA_STATES or work > MAX_WORK:
            raise too_large("the pattern's deterministic form")
    widths = np.diff(cuts)
    byte_class = np.repeat(np.arange(len(widths)), widths).astype(np.uint8)
    return Dfa(np.array(rows, np.int32), byte_class, np.array([0 in m for m in members]), work)


def _split(edges):
    """Overlapping (low, high, target) as disjoint (low, high, targets)."""
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
    order = np.full(count, -1, np.int64)
    order[block[DEAD]], order[block[START]] = DEAD, START
    others = np.flatnonzero(order < 0)
    order[others] = np.arange(2, 2 + len(others))
    merged = np.empty((count, table.shape[1]), np.int32)
    merged[order] = order[block[table[member]]]
    ends = np.empty(count, bool)
    ends[order] = accepting[member]
    return Dfa(merged, dfa.byte_class, ends, dfa.cost)


def product(left: Dfa, right: Dfa, minus: bool = False) -> Dfa:
    """The texts that both accept; with `minus`, those that `left` accepts and `right` does not."""
    pairs = left.byte_class.astype(np.int64) * 256 + right.byte_class
    classes, byte_class = np.unique(pairs, return_inverse=True)
    left_rows, right_rows = left.table[:, classes // 256], right.table[:, classes % 256]
    numbers, todo, rows = {(START, START): START}, [(START, START)], [[0] * len(classes)]
    for a, b in todo:  # grows while it is read
        row = []
        for step in zip(left_rows[a].tolist(), right_rows[b].tolist(), strict=True):
            if step[0] == DEAD or (step[1] == DEAD and not minus):
                row.append(DEAD)
                continue
            if step not in numbers:
                numbers[step] = len(todo) + 1
                todo.append(step)
            row.append(numbers[step])
        rows.append(row)
        if len(todo) > MAX_DFA_STATES or len(todo) * len(classes) > MAX_CELLS:
            raise too_large("a combination of two constraints")
    a, b = np.array([(DEAD, DEAD), *todo]).T
    accepting = left.accepting[a] & (right.accepting[b] ^ minus)
    cost = left.cost + right.cost + len(todo) * len(classes)
    return merge_states(_trim(Dfa(np.array(rows, np.int32), byte_class, accepting, cost)))


def _trim(dfa: Dfa) -> Dfa:
    """Edges into states that can no longer accept become dead ones; a product has such states, a tree has none."""
    count = len(dfa.table)
    source, target = np.divmod(np.unique(np.arange(count)[:, None] * count + dfa.table), count)
    into: list[list[int]] = [[] for _ in range(count)]
    for s, t in zip(source.tolist(), target.tolist(), strict=True):
        into[t].append(s)
    live = dfa.accepting.copy()
    todo = np.flatnonzero(live).tolist()
    while todo:
        for s in into[todo.pop()]:
            if not live[s]:
                live[s] = True
                todo.append(s)
    table = np.where(live[dfa.table] & live[:, None], dfa.table, DEAD)
    kept = live.copy()
    kept[[DEAD, START]] = True  # the two fixed numbers stay, whatever else goes
    renumber = np.cumsum(kept) - 1
    return Dfa(renumber[table[kept]], dfa.byte_class, dfa.accepting[kept], dfa.cost)
