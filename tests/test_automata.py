"""Regular expressions: the automaton against Python's `re` and against llguidance, refusals by name, minimality."""

import random
import re

import hypothesis.strategies as st
import numpy as np
import pytest
from grammar_walks import ALPHABET, PIECE_GUIDES, guide_for, patterns, random_text
from hypothesis import given, settings

from automata import (
    MAX_DFA_STATES,
    GrammarError,
    compile_choice,
    compile_regex,
    complement,
    ranges_of,
    utf8_trie,
)


@settings(max_examples=200)
@given(patterns, st.data())
def test_drawn_patterns_agree_with_re(pattern, data):
    dfa = compile_regex(pattern)
    guide = guide_for(PIECE_GUIDES, regex=pattern)
    rng = random.Random(pattern)
    for _ in range(3):
        written = random_text(guide, rng)
        assert written is None or re.fullmatch(pattern, written), (pattern, written)
    wanted = data.draw(st.from_regex(pattern, fullmatch=True))
    if not any(0xD800 <= ord(c) <= 0xDFFF for c in wanted):
        assert dfa.accepts(wanted.encode()), (pattern, wanted)
    other = data.draw(st.text(ALPHABET, max_size=6))
    assert dfa.accepts(other.encode()) == bool(re.fullmatch(pattern, other)), (pattern, other)


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
    (r"(?s:.)x", ["\nx"], ["x"]),
    (r"(?x) a  b # comment", ["ab"], ["a b"]),
    (r"\x41é\U0001F600\0", ["Aé😀\0"], ["A"]),
    (r".", ["é", "\r"], ["\n", ""]),
    (r"(?s).", ["\n"], ["ab"]),
    (r"(?a)\w\d", ["a1"], ["é1", "a١"]),
    (r"\w\d", ["é١"], ["- "]),
    (r"\.\*\/", [".*/"], ["a*/"]),
    (r"(){9}(|){3}(()*){,4}", [""], ["a"]),
    ("", [""], ["a"]),
]


@pytest.mark.parametrize("pattern, accepted, rejected", ACCEPTED)
def test_stated_constructs(pattern, accepted, rejected):
    dfa = compile_regex(pattern)
    for text in accepted:
        assert re.fullmatch(pattern, text) and dfa.accepts(text.encode()), text
    for text in rejected:
        assert not re.fullmatch(pattern, text) and not dfa.accepts(text.encode()), text


REFUSED = {
    "position 0: missing \\)": ["("],
    "unbalanced": [")"],
    "unterminated character set": ["[a"],
    "nothing to repeat": ["*a", "^*"],
    "multiple repeat": ["a**"],
    "min repeat greater": ["a{3,2}"],
    "bad character range": ["[z-a]", r"[a-\d]"],
    "back-reference": [r"(a)\1", "(?P<n>a)(?P=n)"],
    "look-ahead": ["(?=a)b", "(?!a)b"],
    "look-behind": ["(?<=a)b", "(?<!a)b"],
    "conditional": ["(a)?(?(1)b|c)"],
    "atomic": ["(?>a)"],
    "possessive": ["a++"],
    "word boundary": [r"a\b", r"a\B"],
    "bad escape": [r"\p{L}", r"\q", "a\\"],
    "flag IGNORECASE": ["(?i)a", "(?i:a)"],
    "flag MULTILINE": ["(?m)^a"],
    "before \\^": ["a^b", "(a|b)(^c|d)"],
    "after \\$": ["a$b", "(a$|b)c"],
    "anchor": ["(^a)*", "($)?"],
    "incomplete escape": [r"\x4"],
    "nested": ["(" * 5000 + ")" * 5000],
    "no text at all": ["[^\\s\\S]", r"\ud83d"],
    "too large": ["a{99999999999999}"],
}


@pytest.mark.parametrize("message, pattern", [(message, p) for message, listed in REFUSED.items() for p in listed])
def test_malformed_or_unsupported_patterns_are_refused_by_name(message, pattern):
    with pytest.raises(GrammarError, match=message):
        compile_regex(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["(a|b)*a(a|b){30}", "((a{0,300}){0,300}){0,300}", "(.*a){500}b", "(a?){3000}", "a{999999}", "(?:a{1,900}){900}"],
)
def test_exploding_patterns_are_refused_after_bounded_work(pattern):
    with pytest.raises(GrammarError, match="too large|too long"):
        compile_regex(pattern)


def test_patterns_that_only_backtracking_finds_hard_are_easy():
    assert len(compile_regex("(x+x+)+y").table) == 5 and len(compile_regex("(a*)*b").table) == 3


def written(trie: tuple) -> list[bytes]:
    return [bytes([b]) + rest for low, high, more in trie for b in range(low, high + 1) for rest in written(more)] or [
        b""
    ]


def test_the_trie_of_some_characters_writes_each_of_them_and_nothing_else():
    rng = random.Random(1)
    for _ in range(60):
        low = rng.choice([0, 0x7E, 0x7FF, 0x800, 0xD7F0, 0xFFFF, 0x10000, rng.randrange(0xD000)])
        near = ranges_of([(low, low + rng.choice([0, 1, 70, 2000, 5000])), (low + 99, low + 99), (0x10FFFE, 0x10FFFF)])
        codes = [code for a, b in near for code in range(a, b + 1) if not 0xD800 <= code <= 0xDFFF]
        assert written(utf8_trie(near)) == [chr(code).encode() for code in codes]
    assert ranges_of([(5, 9), (0, 3), (4, 4), (100, 200)]) == ((0, 9), (100, 200))
    assert complement(complement(((5, 90),))) == ((5, 90),) and complement(()) == ((0, 0x10FFFF),)


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


def test_long_bounds_stay_within_the_limits():
    assert len(compile_regex("(" * 30 + "a" + ")*" * 30).table) == 2  # and groups that are nested cost no more each
    assert compile_regex(r"((?:[^\s\S])?){4000000000}a").accepts(b"a")  # nothing need not be read so often
    dfa = compile_regex("[a-z]{0,2000}")
    assert len(dfa.table) < MAX_DFA_STATES and dfa.accepts(b"x" * 2000) and not dfa.accepts(b"x" * 2001)


def test_choice_is_exact():
    dfa = compile_choice(["yes", "no", "nö", ""])
    assert [dfa.accepts(text.encode()) for text in ("yes", "no", "nö", "", "n", "yesno")] == [True] * 4 + [False] * 2
