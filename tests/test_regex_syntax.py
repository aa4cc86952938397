"""Regular expressions: the automaton against Python's `re`, refusals by name, and the algebra of automata."""

import random
import re

import hypothesis.strategies as st
import numpy as np
import pytest
from grammar_walks import ALPHABET, EOS, PIECES_TRIE, patterns, random_text
from hypothesis import given, settings

from dfa import MAX_DFA_STATES, START, product, to_dfa
from regex_syntax import parse
from regular import CHARACTERS, GrammarError, complement, intersection, ranges_of, utf8_sequences
from structured import TokenGuide, compile_regex


@settings(max_examples=220)
@given(patterns, st.data())
def test_drawn_patterns_agree_with_re(pattern, data):
    dfa = compile_regex(pattern)
    guide = TokenGuide(dfa, PIECES_TRIE, [EOS])
    rng = random.Random(pattern)
    for _ in range(3):
        written = random_text(guide, rng)
        if written is not None:
            assert re.fullmatch(pattern, written.decode()), (pattern, written)
    wanted = data.draw(st.from_regex(pattern, fullmatch=True))
    if not any(0xD800 <= ord(c) <= 0xDFFF for c in wanted):
        assert dfa.accepts(wanted.encode()), (pattern, wanted)
    other = data.draw(st.text(ALPHABET, max_size=6))
    assert dfa.accepts(other.encode()) == bool(re.fullmatch(pattern, other)), (pattern, other)


# The stated subset

ACCEPTED = [
    (r"a{,2}", ["", "aa"], ["aaa"]),
    (r"a{x}", ["a{x}"], ["a"]),
    (r"x{}", ["x{}"], ["x"]),
    (r"(?P<y>ab|c)+?", ["abc", "c"], [""]),
    (r"^a$|\Ab\Z", ["a", "b"], ["ab"]),
    (r"(^a|b)(c|$)", ["ac", "a", "bc", "b"], ["c"]),
    (r"[]a]", ["]", "a"], ["b"]),
    (r"[^]a]", ["b"], ["]"]),
    (r"[a-]", ["-", "a"], ["b"]),
    (r"[\b]", ["\b"], ["b"]),
    (r"\x41é\U0001F600\0", ["Aé😀\0"], ["A"]),
    (r".", ["é", "\r"], ["\n", ""]),
    (r"(?s).", ["\n"], ["ab"]),
    (r"(?a)\w\d", ["a1"], ["é1", "a١"]),
    (r"\w\d", ["é١"], ["- "]),
    (r"\.\*\/", [".*/"], ["a*/"]),
    ("", [""], ["a"]),
]


@pytest.mark.parametrize("pattern, accepted, rejected", ACCEPTED)
def test_stated_constructs(pattern, accepted, rejected):
    dfa = compile_regex(pattern)
    for text in accepted:
        assert re.fullmatch(pattern, text) and dfa.accepts(text.encode()), text
    for text in rejected:
        assert not re.fullmatch(pattern, text) and not dfa.accepts(text.encode()), text


REFUSED = [
    ("(", "never closed"),
    (")", "unbalanced"),
    ("[a", "never closed"),
    ("*a", "nothing to repeat"),
    ("a**", "two repeats"),
    ("a{3,2}", "at least 3"),
    ("[z-a]", "before its beginning"),
    (r"[a-\d]", "one character"),
    (r"(a)\1", "back-reference"),
    ("(?P<n>a)(?P=n)", "back-reference"),
    ("(?=a)b", "look-ahead"),
    ("(?!a)b", "look-ahead"),
    ("(?<=a)b", "look-behind"),
    ("(?<!a)b", "look-behind"),
    ("(a)?(?(1)b|c)", "conditional"),
    ("(?>a)", "atomic"),
    ("a++", "possessive"),
    (r"a\b", "word boundary"),
    (r"\p{L}", "Unicode property"),
    (r"\q", "not supported"),
    ("(?i)a", "flag"),
    ("a^b", "before \\^"),
    ("a$b", "after \\$"),
    ("(^a)*", "anchor"),
    ("^*", "anchor"),
    (r"\x4", "hexadecimal"),
    ("a\\", "backslash"),
    (r"\ud83d", "not a character"),
    ("(" * 200 + ")" * 200, "nested"),
    ("[^\\s\\S]", "no text at all"),
]


@pytest.mark.parametrize("pattern, message", REFUSED)
def test_F57_malformed_or_unsupported_patterns_are_refused_by_name(pattern, message):
    with pytest.raises(GrammarError, match=message):
        compile_regex(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["(a|b)*a(a|b){30}", "((a{0,300}){0,300}){0,300}", "(.*a){500}b", "(a?){3000}", "a{999999}", "(?:a{1,900}){900}"],
)
def test_F57_exploding_patterns_are_refused_after_bounded_work(pattern):
    with pytest.raises(GrammarError, match="too large|too long"):
        compile_regex(pattern)


def test_F57_patterns_that_only_backtracking_finds_hard_are_easy():
    assert len(compile_regex("(x+x+)+y").table) == 5 and len(compile_regex("(a*)*b").table) == 3


# The automata themselves


def test_every_character_has_its_own_utf8_sequence():
    rng = random.Random(1)
    for _ in range(60):
        low = rng.choice([0, 0x7E, 0x7FF, 0x800, 0xFFFF, 0x10000, rng.randrange(0xD000)])
        high = min(low + rng.choice([0, 1, 70, 5000]), 0xD7FF if low < 0xD800 else 0x10FFFF)
        sequences = list(utf8_sequences(low, high))
        for code in {low, high, (low + high) // 2}:
            encoded = chr(code).encode()
            fitting = [
                s
                for s in sequences
                if len(s) == len(encoded) and all(a <= b <= c for (a, c), b in zip(s, encoded, strict=True))
            ]
            assert len(fitting) == 1
        count = sum(int(np.prod([c - a + 1 for a, c in s])) for s in sequences)
        assert count == high - low + 1


def test_character_sets_are_a_boolean_algebra():
    some = ranges_of([(5, 9), (0, 3), (4, 4), (100, 0xD800)])
    assert some == ((0, 9), (100, 0xD800))
    assert complement(complement(ranges_of([(5, 90)]))) == ((5, 90),)
    assert intersection(complement(((0, 9),)), ((5, 20),)) == ((10, 20),)
    assert complement(()) == CHARACTERS


@settings(max_examples=40)
@given(patterns, patterns, st.lists(st.text(ALPHABET, max_size=4), max_size=8))
def test_products_are_and_and_but_not(left, right, texts):
    a, b = compile_regex(left), compile_regex(right)
    both, only = product(a, b), product(a, b, minus=True)
    for text in texts:
        data = text.encode()
        assert both.accepts(data) == (a.accepts(data) and b.accepts(data))
        assert only.accepts(data) == (a.accepts(data) and not b.accepts(data))
    for dfa in (both, only):
        if not dfa.is_empty:
            assert TokenGuide(dfa, PIECES_TRIE, [EOS]).mask(START).any()
            assert all(dfa.accepting[s] or dfa.table[s].any() for s in range(START, len(dfa.table)))


@settings(max_examples=60)
@given(patterns)
def test_automata_are_minimal_and_without_dead_ends(pattern):
    """Every two states are told apart by some text: pairs are marked backwards from acceptance (table filling)."""
    dfa = compile_regex(pattern)
    count = len(dfa.table)
    if count > 60:
        return
    apart = dfa.accepting[:, None] != dfa.accepting[None, :]
    for _ in range(count):
        apart |= apart[dfa.table[:, None, :], dfa.table[None, :, :]].any(2)
    assert (apart | np.eye(count, dtype=bool)).all()


def test_searches_keep_what_python_and_ecmascript_have_in_common():
    accepts = to_dfa(parse(r"^\d+$", search=True)).accepts
    assert accepts(b"12") and not accepts("١".encode()) and not accepts(b"12\n")
    accepts = to_dfa(parse("a.c", search=True)).accepts
    assert accepts(b"xxabcyy\n") and not accepts("a\u2028c".encode()) and not accepts(b"ac")
    accepts = to_dfa(parse(r"[^\w]", search=True)).accepts
    assert accepts(b"a-") and not accepts("é".encode())


def test_long_bounds_stay_within_the_limits():
    dfa = compile_regex("[a-z]{0,2000}")
    assert len(dfa.table) < MAX_DFA_STATES and dfa.accepts(b"x" * 2000) and not dfa.accepts(b"x" * 2001)
