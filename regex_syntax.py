"""The text of a regular expression -> a tree of `regular.py`.

Problem. "Supports regular expressions" means something else in every program, and the difference shows as wrong
output.

Idea. Say exactly which language is meant, and refuse by name whatever is not in it. The reference is Python's `re` on
`str`, whole match: the automaton accepts a text exactly when `re.fullmatch(pattern, text)` does. A recursive-descent
parser follows the grammar below; every function reads what its name says and leaves the position behind it.

      pattern  = flags? branches              flags = (?a) | (?s) | (?as)      ASCII classes; dot matches newline
      branches = sequence ("|" sequence)*
      sequence = (atom times?)*               times = * | + | ? | {m} | {m,} | {m,n} | {,n}, and a lazy ? after it
      atom     = character | . | [class] | escape | ^ | $ | \\A | \\Z | ( branches ) | (?: ) | (?P<name> )

| construct | meaning |
|---|---|
| .            | any character but newline |
| \\d \\w \\s  | Unicode, as in `re` (ASCII after (?a)); \\D \\W \\S their complements |
| escapes      | \\n \\t \\r \\f \\v \\a \\0 \\xhh \\uhhhh \\Uhhhhhhhh, and any punctuation |
| lazy repeats | the same language as greedy ones |
| ^ \\A, $ \\Z | allowed where nothing can stand before (after) them; no-ops in a whole match |
| refused      | back-references, look-around, conditionals, atomic and possessive parts, \\b, \\p, other flags |

`pattern` in JSON Schema is a search, not a whole match, and is written in ECMAScript's dialect. `parse(...,
search=True)` therefore surrounds unanchored ends with "anything", and reads every class in both dialects and keeps
what BOTH contain (\\d is 0-9, \\W is what neither calls a word character), so that a validator of either kind agrees
with what was generated.

Sources: the Python library reference, "re: Regular expression operations"; ECMA-262 section 22.2 (patterns).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from regular import (
    CHARACTERS,
    EPSILON,
    Alt,
    GrammarError,
    Node,
    Ranges,
    Repeat,
    Seq,
    alt,
    chars,
    complement,
    intersection,
    ranges_of,
    repeat,
    seq,
)

MAX_NESTING = 100  # groups inside groups; Python's own stack would end at about a thousand
ANYTHING = repeat(chars(CHARACTERS), 0)
NEWLINE = ranges_of([(10, 10)])
ECMA_NEWLINES = ranges_of([(10, 10), (13, 13), (0x2028, 0x2029)])
SIMPLE_ESCAPES = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "a": 7}
ASCII_CLASSES = {
    "d": ranges_of([(48, 57)]),
    "w": ranges_of([(48, 57), (65, 90), (95, 95), (97, 122)]),
    "s": ranges_of([(9, 13), (32, 32)]),
}


@dataclass(frozen=True, eq=False)
class Anchor:
    """^ (start) or $, until `_ends` has decided what it means where it stands."""

    start: bool


@lru_cache(maxsize=3)
def _unicode_class(letter: str) -> Ranges:
    """What `re` itself takes for \\d, \\w or \\s: it is asked, once, about every character."""
    everything = "".join(map(chr, range(0x110000)))
    return intersection(
        ranges_of((m.start(), m.end() - 1) for m in re.finditer(f"\\{letter}+", everything)), CHARACTERS
    )


def parse(pattern: str, search: bool = False) -> Node:
    """The tree of the texts that match `pattern` whole or, with `search`, contain a match. Raises GrammarError."""
    if not isinstance(pattern, str):
        raise GrammarError(f"a regex is a string, not {type(pattern).__name__}")
    node = _Parser(pattern, search).pattern()
    branches = []
    for at_start, body, at_end in _ends(node, pattern):
        before = EPSILON if at_start or not search else ANYTHING
        after = EPSILON if at_end or not search else ANYTHING
        branches.append(seq(before, body, after))
    return alt(*branches)


def _has_anchor(node) -> bool:
    if isinstance(node, Repeat):
        return _has_anchor(node.node)
    return isinstance(node, Anchor) or isinstance(node, Seq | Alt) and any(map(_has_anchor, node.parts))


def _ends(node, pattern: str) -> list[tuple[bool, Node, bool]]:
    """Alternatives of (tied to the start, what is read, tied to the end), free of anchors."""
    if not _has_anchor(node):
        return [(False, node, False)]
    if isinstance(node, Anchor):
        return [(node.start, EPSILON, not node.start)]
    if isinstance(node, Alt):
        return [branch for part in node.parts for branch in _ends(part, pattern)]
    if isinstance(node, Repeat):
        raise GrammarError(
            f"regex {_short(pattern)}: an anchor (^ $ \\A \\Z) inside a repeat is not supported; move it out"
        )
    found = [(False, EPSILON, False)]
    for part in node.parts:
        longer = []
        for at_start, body, at_end in found:
            for starts, more, ends in _ends(part, pattern):
                if starts and body is not EPSILON or at_end and more is not EPSILON:
                    side = "before ^" if starts and body is not EPSILON else "after $"
                    raise GrammarError(f"regex {_short(pattern)}: something stands {side}; anchors belong at the ends")
                longer.append((at_start or starts, seq(body, more), at_end or ends))
        found = longer
    return found


def _short(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 60 else pattern[:57] + "...")


class _Parser:
    def __init__(self, pattern: str, search: bool) -> None:
        self.source, self.at, self.depth = pattern, 0, 0
        self.ascii = self.dot_all = False
        self.both = search  # read classes in both dialects

    def fail(self, problem: str, remedy: str, at: int | None = None) -> GrammarError:
        position = self.at if at is None else at
        return GrammarError(f"regex {_short(self.source)}, position {position}: {problem}; {remedy}")

    def peek(self, token: str) -> bool:
        return self.source.startswith(token, self.at)

    def take(self, token: str) -> bool:
        if self.peek(token):
            self.at += len(token)
            return True
        return False

    def pattern(self) -> Node:
        if flags := re.match(r"\(\?([A-Za-z]+)\)", self.source):
            if unknown := set(flags[1]) - set("as"):
                raise self.fail(
                    f"the flag {min(unknown)!r} is not supported", "only a (ASCII) and s (dot matches all) are"
                )
            self.ascii, self.dot_all = "a" in flags[1], "s" in flags[1]
            self.at = flags.end()
        node = self.branches()
        if self.at < len(self.source):
            raise self.fail("unbalanced ')'", "write \\) for the character")
        return node

    def branches(self) -> Node:
        parts = [self.sequence()]
        while self.take("|"):
            parts.append(self.sequence())
        return alt(*parts)

    def sequence(self) -> Node:
        parts = []
        while self.at < len(self.source) and not self.peek("|") and not self.peek(")"):
            parts.append(self.times(self.atom()))
        return seq(*parts)

    def times(self, atom: Node) -> Node:
        bounds = self.bounds()
        if bounds is None:
            return atom
        low, high = bounds
        if isinstance(atom, Anchor):
            raise self.fail("a repeat of an anchor", "anchors hold once", self.at - 1)
        if high is not None and high < low:
            raise self.fail(f"a repeat of at least {low} and at most {high}", "the first bound is the smaller one")
        if self.take("+"):
            raise self.fail("possessive repeats (*+ ++ ?+) are not supported", "leave the last + out", self.at - 1)
        self.take("?")
        begin = self.at
        if self.bounds() is not None:
            raise self.fail("two repeats in a row", "put a group around the first: (?:...)", begin)
        return repeat(atom, low, high)

    def bounds(self) -> tuple[int, int | None] | None:
        for mark, low, high in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self.take(mark):
                return low, high
        braces = re.compile(r"\{([0-9]{0,9})(,?)([0-9]{0,9})\}").match(self.source, self.at)
        if not braces or braces[0] == "{}":  # as in `re`, braces that are no repeat are characters
            return None
        self.at = braces.end()
        low = int(braces[1] or 0)
        return low, int(braces[3]) if braces[3] else None if braces[2] else low

    def atom(self) -> Node:
        here = self.source[self.at]
        if here in "*+?" or self.peek("{") and self.bounds() is not None:
            raise self.fail("a repeat with nothing to repeat", "write \\* \\+ \\? \\{ for the characters")
        self.at += 1
        if here == "(":
            return self.group()
        if here == "[":
            return chars(self.in_dialects(self.char_class))
        if here == ".":
            return chars(self.in_dialects(self.dot))
        if here in "^$":
            return Anchor(here == "^")
        if here == "\\":
            if self.peek("A") or self.peek("Z"):
                self.at += 1
                return Anchor(self.source[self.at - 1] == "A")
            return chars(self.in_dialects(self.escape))
        return chars(self.single(ord(here)))

    def group(self) -> Node:
        begin = self.at - 1
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise self.fail(f"more than {MAX_NESTING} nested groups", "flatten the pattern")
        if self.take("?"):
            named = re.compile(r"P?<[A-Za-z_]\w*>").match(self.source, self.at)
            if named:
                self.at = named.end()
            elif not self.take(":"):
                raise self.fail(*self.unsupported_group(), begin)
        node = self.branches()
        if not self.take(")"):
            raise self.fail("the group opened here is never closed", "add ')' or write \\( for the character", begin)
        self.depth -= 1
        return node

    def unsupported_group(self) -> tuple[str, str]:
        for mark, name in (
            ("<=", "look-behind"),
            ("<!", "look-behind"),
            ("=", "look-ahead"),
            ("!", "look-ahead"),
            ("P=", "a named back-reference"),
            ("(", "a conditional group"),
            (">", "an atomic group"),
            ("#", "a comment group"),
        ):
            if self.peek(mark):
                return f"{name} '(?{mark}' is not supported", "spell the alternatives out"
        return (
            "an unknown or unsupported group '(?'",
            "use (...), (?:...), (?P<name>...), or (?a) (?s) at the very beginning",
        )

    def in_dialects(self, read) -> Ranges:
        """What `read(ascii)` finds; where two dialects are served, what it finds in both."""
        if not self.both:
            return read(self.ascii)
        begin = self.at
        narrow = read(True)
        self.at = begin
        return intersection(narrow, read(False))

    def dot(self, ascii_only: bool) -> Ranges:
        if self.dot_all:
            return CHARACTERS
        return complement(ECMA_NEWLINES if self.both else NEWLINE)

    def single(self, code: int) -> Ranges:
        if 0xD800 <= code <= 0xDFFF or code > 0x10FFFF:
            raise self.fail(f"U+{code:04X} is not a character", "write the character itself, or \\U and eight digits")
        return ((code, code),)

    def escape(self, ascii_only: bool, in_class: bool = False) -> Ranges:
        """What follows a backslash, as a set; one character is a set of one."""
        begin = self.at - 1
        if self.at == len(self.source):
            raise self.fail("nothing follows the backslash", "write \\\\ for the character", begin)
        letter = self.source[self.at]
        self.at += 1
        if letter.lower() in ASCII_CLASSES:
            found = ASCII_CLASSES[letter.lower()] if ascii_only else _unicode_class(letter.lower())
            return complement(found) if letter.isupper() else found
        if letter in SIMPLE_ESCAPES:
            return self.single(SIMPLE_ESCAPES[letter])
        if letter == "b" and in_class:
            return self.single(8)
        if letter in "xuU":
            length = {"x": 2, "u": 4, "U": 8}[letter]
            digits = self.source[self.at : self.at + length]
            if not re.fullmatch(f"[0-9A-Fa-f]{{{length}}}", digits):
                raise self.fail(f"\\{letter} is not followed by {length} hexadecimal digits", "pad with zeros", begin)
            self.at += length
            return self.single(int(digits, 16))
        if letter == "0":
            octal = re.compile("[0-7]{0,2}").match(self.source, self.at)
            self.at = octal.end()
            return self.single(int("0" + octal[0], 8))
        if letter in "123456789":
            raise self.fail(
                f"the back-reference \\{letter} is not supported", "no automaton can remember; repeat it", begin
            )
        if letter.isascii() and letter.isalpha():
            name = {
                "b": "a word boundary",
                "B": "a word boundary",
                "p": "a Unicode property",
                "P": "a Unicode property",
            }
            what = name.get(letter, "this escape")
            raise self.fail(f"\\{letter} ({what}) is not supported", "use a character class", begin)
        return self.single(ord(letter))

    def char_class(self, ascii_only: bool) -> Ranges:
        begin = self.at - 1
        negated = self.take("^")
        found: list[tuple[int, int]] = []
        first = True
        while first or not self.peek("]"):
            first = False
            low = self.class_item(ascii_only, begin)
            if self.peek("-") and not self.peek("-]"):
                self.at += 1
                high = self.class_item(ascii_only, begin)
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or high[0][0] != high[0][1]:
                    raise self.fail("a range needs one character at each end", "write \\- for the character", begin)
                if high[0][0] < low[0][0]:
                    raise self.fail("a range whose end is before its beginning", "swap the ends", begin)
                low = ((low[0][0], high[0][0]),)
            found.extend(low)
        self.at += 1
        ranges = ranges_of(found)
        return complement(ranges) if negated else ranges

    def class_item(self, ascii_only: bool, begin: int) -> Ranges:
        if self.at >= len(self.source):
            raise self.fail("the class opened here is never closed", "add ']' or write \\[ for the character", begin)
        here = self.source[self.at]
        self.at += 1
        return self.escape(ascii_only, in_class=True) if here == "\\" else self.single(ord(here))
