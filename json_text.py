"""How JSON values are spelled: strings, numbers, formats and blanks as trees of `regular.py`.

Problem. A schema speaks about values ("at most 5 characters", "between 0 and 0.5", "matches ^a"), an automaton reads
their spelling: quotes, escapes, digits. One value has many spellings ("a" is also "\\u0061"), and some of them never
end (0.000..., endless blanks), which a small model that has begun to repeat itself will find.

Idea. One spelling for each value wherever that is possible, and a bound on everything that carries no information:

| value | spelling |
|---|---|
| character   | itself; only quote, backslash and controls escaped: by one letter where there is one, else as \\u00XX |
| free string | any characters, but at most 16 blanks in a row |
| integer     | no leading zero, at most 19 digits (64 bits) |
| number      | integer part, at most 17 digits after the point, an exponent of at most 2 digits |
| number with bounds | no exponent, so few digits that two different spellings never round to one float64 |
| blanks      | around values: nothing, a space, or a line break and at most 12 spaces; none before or after all |

Bounds on numbers become digit by digit comparisons. For values up to 37.5, with the same number of digits before the
point:

      [0-2] any digits            first digit smaller: the rest is free
      3 [0-6] any                 first equal, second smaller
      37 (.[0-4] any  |  .5 0*)   all equal: on to the fraction

Every text with fewer digits before the point is smaller. Both bounds together are the product of two automata.

Sources: RFC 8259 (JSON), sections 6 and 7; RFC 3339 (date and time; durations: appendix A); RFC 4122 (uuid); RFC 4291
section 2.2 (IPv6); RFC 5321 section 4.1.2 for the mailbox, of which quoted local parts and address literals are left
out.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal
from functools import lru_cache

import numpy as np

from dfa import Dfa, product, to_dfa
from regex_syntax import parse
from regular import (
    CHARACTERS,
    EMPTY,
    EPSILON,
    Alt,
    Chars,
    GrammarError,
    Join,
    Node,
    Repeat,
    Seq,
    alt,
    chars,
    complement,
    intersection,
    join,
    machine,
    ranges_of,
    repeat,
    seq,
    text,
)

INTEGER_DIGITS, FRACTION_DIGITS, FLOAT_DIGITS = 19, 17, 15
MAX_BLANKS_IN_STRING, MAX_INDENT = 16, 12
MAX_MULTIPLE = 1000
SHORT_ESCAPES = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
MUST_ESCAPE = ranges_of([(0, 31), (34, 34), (92, 92)])
DIGIT = chars([(48, 57)])
BLANKS = {
    "flexible": alt(EPSILON, text(" "), seq(text("\n"), repeat(text(" "), 0, MAX_INDENT))),
    "fixed": EPSILON,
}
AFTER_MARK = {"flexible": BLANKS["flexible"], "fixed": text(" ")}  # after a comma or a colon

YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
DAYS = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
DATE = f"({YEAR}-{DAYS}|{LEAP_YEAR}-02-29)"
CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"{CLOCK}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{CLOCK})"
COUNT = "[0-9]{1,6}"
SPAN = f"({COUNT}Y({COUNT}M({COUNT}D)?)?|{COUNT}M({COUNT}D)?|{COUNT}D)"  # no unit is skipped: P1Y2D is none
CLOCK_SPAN = f"T({COUNT}H({COUNT}M({COUNT}S)?)?|{COUNT}M({COUNT}S)?|{COUNT}S)"
LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,16}"
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "duration": f"P({SPAN}({CLOCK_SPAN})?|{CLOCK_SPAN}|{COUNT}W)",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "email": rf"{ATOM}(\.{ATOM}){{0,2}}@{LABEL}(\.{LABEL}){{1,2}}",
    "ipv4": rf"{OCTET}(\.{OCTET}){{3}}",
    "hostname": rf"{LABEL}(\.{LABEL}){{0,2}}",
    "ipv6": "|".join(
        ["([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}", "::([0-9a-fA-F]{1,4}:){0,6}[0-9a-fA-F]{1,4}", "::"]
        + [f"([0-9a-fA-F]{{1,4}}:){{{n}}}(:[0-9a-fA-F]{{1,4}}){{1,{7 - n}}}" for n in range(1, 7)]
        + ["([0-9a-fA-F]{1,4}:){1,7}:"]
    ),
}


# Strings


def escaped(node: Node) -> Node:
    """The same texts as they stand between the quotes of a JSON string."""
    if isinstance(node, Chars):
        plain = chars(intersection(node.ranges, complement(MUST_ESCAPE)))
        codes = [c for low, high in intersection(node.ranges, MUST_ESCAPE) for c in range(low, high + 1)]
        return alt(plain, *(text("\\" + SHORT_ESCAPES.get(c, f"u{c:04x}")) for c in codes))
    if isinstance(node, Seq):
        return seq(*map(escaped, node.parts))
    if isinstance(node, Alt):
        return alt(*map(escaped, node.parts))
    if isinstance(node, Repeat):
        return repeat(escaped(node.node), node.low, node.high)
    raise TypeError(f"{type(node).__name__} is already a spelling")


@lru_cache(maxsize=1)
def character() -> Node:
    return machine(to_dfa(escaped(Chars(CHARACTERS))))


@lru_cache(maxsize=1)
def free_content() -> Dfa:
    """The content of a string without any constraint."""
    blank = repeat(text(" "), 0, MAX_BLANKS_IN_STRING)
    other = escaped(Chars(intersection(CHARACTERS, complement(((32, 32),)))))
    return to_dfa(seq(repeat(seq(blank, other), 0), blank))


@lru_cache(maxsize=64)
def string(min_length: int = 0, max_length: int | None = None, patterns=(), formats=(), without=()) -> Node:
    """A quoted string. `without` are contents it must not have (the property names already taken). All are tuples."""
    parts = [to_dfa(escaped(parse(pattern, search=True))) for pattern in patterns]
    parts += [to_dfa(escaped(parse(FORMATS[name]))) for name in formats]
    if without:
        parts.append(product(free_content(), to_dfa(alt(*(escaped(text(name)) for name in without))), minus=True))
    if min_length or max_length is not None:
        bounded = repeat(character(), min_length, max_length)
        if not parts:
            return quoted(bounded)
        parts.append(to_dfa(bounded))
    content = parts[0] if parts else free_content()
    for part in parts[1:]:
        content = product(content, part)
    return quoted(machine(content))


def quoted(content: Node) -> Node:
    return seq(text('"'), content, text('"'))


# Composite values and constants


def array(items, blanks: str) -> Node:
    """items: (node, low, high) in order."""
    return enclosed("[", join(items, seq(text(","), AFTER_MARK[blanks])), "]", blanks)


def object_of(members, blanks: str) -> Node:
    """members: (name as a node, value, low, high) in order."""
    colon = seq(text(":"), AFTER_MARK[blanks])
    pairs = [(seq(name, colon, value), low, high) for name, value, low, high in members]
    return enclosed("{", join(pairs, seq(text(","), AFTER_MARK[blanks])), "}", blanks)


def enclosed(opening: str, content: Node, closing: str, blanks: str) -> Node:
    if isinstance(content, Join) and not content.items:
        return text(opening + closing)
    return seq(text(opening), BLANKS[blanks], content, BLANKS[blanks], text(closing))


def constant(value, blanks: str) -> Node:
    """One JSON value."""
    if isinstance(value, list):
        return array([(constant(item, blanks), 1, 1) for item in value], blanks)
    if isinstance(value, dict):
        return object_of([(constant(k, blanks), constant(v, blanks), 1, 1) for k, v in value.items()], blanks)
    if isinstance(value, float) and not math.isfinite(value):
        raise GrammarError(f"the constant {value} is not a JSON number")
    if isinstance(value, str) and any(0xD800 <= ord(c) <= 0xDFFF for c in value):
        raise GrammarError(f"the constant {value[:60]!r} holds half a surrogate pair, which UTF-8 cannot write")
    return quoted(escaped(text(value))) if isinstance(value, str) else text(json.dumps(value))


# Numbers


def integer_text(digits: int = INTEGER_DIGITS) -> Node:
    return alt(text("0"), seq(chars([(49, 57)]), repeat(DIGIT, 0, digits - 1)))


@lru_cache(maxsize=1)
def free_number() -> Node:
    fraction = seq(text("."), repeat(DIGIT, 1, FRACTION_DIGITS))
    exponent = seq(chars([(69, 69), (101, 101)]), repeat(chars([(43, 43), (45, 45)]), 0, 1), repeat(DIGIT, 1, 2))
    return machine(to_dfa(seq(repeat(text("-"), 0, 1), integer_text(), repeat(fraction, 0, 1), repeat(exponent, 0, 1))))


def free_integer() -> Node:
    return seq(repeat(text("-"), 0, 1), integer_text())


def number(
    low: Decimal | None, high: Decimal | None, low_open: bool, high_open: bool, integer: bool, multiple: int = 1
):
    """Numbers between two bounds (None = none), open = the bound itself is left out; `multiple` only with `integer`."""
    upwards = _magnitudes(low, high, low_open, high_open, integer, multiple)
    zero = high is None or high >= 0  # zero is written without a sign
    mirrored = (Decimal(0) if zero else -high, None if low is None else -low, zero or high_open, low_open)
    return alt(upwards, seq(text("-"), _magnitudes(*mirrored, integer, multiple)))


def _magnitudes(low, high, low_open, high_open, integer: bool, multiple: int) -> Node:
    """The numbers >= 0 between two bounds."""
    if high is not None and (high < 0 or high == 0 and high_open):
        return EMPTY
    if low is not None and (low < 0 or low == 0 and not low_open):
        low = None
    if low is not None and low >= 10**INTEGER_DIGITS:
        return EMPTY
    if high is not None and high >= 10**INTEGER_DIGITS:
        high = None  # above everything that is written
    whole = max([len(_digits(b)[0]) for b in (low, high) if b is not None], default=1)
    places = 0 if integer else max(0, FLOAT_DIGITS - whole)
    fraction = repeat(seq(text("."), repeat(DIGIT, 1, places)), 0, 1) if places else EPSILON
    found = to_dfa(seq(integer_text(), fraction))
    if low is not None:
        found = product(found, to_dfa(_compared(low, low_open, above=True)))
    if high is not None:
        found = product(found, to_dfa(_compared(high, high_open, above=False)))
    if multiple > 1:
        found = product(found, _multiples(multiple))
    return machine(found)


def _digits(bound: Decimal) -> tuple[str, str]:
    whole, _, fraction = f"{abs(bound):f}".partition(".")
    return whole.lstrip("0") or "0", fraction.rstrip("0")


def _compared(bound: Decimal, is_open: bool, above: bool) -> Node:
    """Decimal texts without leading zeros whose value is above (or below) a bound >= 0."""
    whole, fraction = _digits(bound)
    tail = repeat(seq(text("."), repeat(DIGIT, 1)), 0, 1)  # any fraction or none
    longer = repeat(DIGIT, len(whole) + 1)
    shorter = repeat(DIGIT, 1, len(whole) - 1)
    found = [seq(longer if above else shorter, tail)]
    for place, digit in enumerate(whole):
        found.append(
            seq(text(whole[:place]), _beyond(digit, above), repeat(DIGIT, *[len(whole) - place - 1] * 2), tail)
        )
    zeros = repeat(text("0"), 0)
    for place, digit in enumerate(fraction):
        found.append(seq(text(f"{whole}.{fraction[:place]}"), _beyond(digit, above), repeat(DIGIT, 0)))
        if not above:  # a fraction that ends early is smaller: 0.5 < 0.52
            found.append(text(f"{whole}.{fraction[:place]}" if place else whole))
    if above:
        found.append(seq(text(f"{whole}.{fraction}"), zeros, chars([(49, 57)]), repeat(DIGIT, 0)))
    if not is_open:
        found.append(seq(text(f"{whole}.{fraction}"), zeros) if fraction else seq(text(whole), _zero_fraction(zeros)))
    return alt(*found)


def _zero_fraction(zeros: Node) -> Node:
    return repeat(seq(text("."), zeros), 0, 1)


def _beyond(digit: str, above: bool) -> Node:
    low, high = (ord(digit) + 1, 57) if above else (48, ord(digit) - 1)
    return chars([(low, high)]) if low <= high else EMPTY


def _multiples(divisor: int) -> Dfa:
    """Digit strings divisible by `divisor`: the state is the remainder r, a digit d leads to (10 r + d) % divisor."""
    remainder = (10 * np.arange(divisor)[:, None] + np.arange(10)) % divisor  # [divisor, 10]
    table = np.zeros(
        (divisor + 2, 11), np.int32
    )  # state r + 2 holds remainder r, state 1 nothing yet; column 10: no digit
    table[2:, :10] = remainder + 2
    table[1, :10] = np.arange(10) % divisor + 2
    byte_class = np.full(256, 10, np.uint8)
    byte_class[48:58] = np.arange(10)
    return Dfa(table, byte_class, np.arange(divisor + 2) == 2)
