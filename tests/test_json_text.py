"""How JSON values are spelled: bounds on numbers, formats, one spelling for each value, blanks."""

import datetime
import ipaddress
import json
import random
import uuid
from decimal import Decimal

import hypothesis.strategies as st
import jsonschema
import pytest
from grammar_walks import EOS, JSON_TRIE, random_text
from hypothesis import given, settings

from json_text import FORMATS
from regular import GrammarError
from structured import TokenGuide, compile_json_schema


@settings(max_examples=80)
@given(
    st.decimals(-2000, 2000, places=2) | st.integers(-300, 300),
    st.decimals(0, 500, places=1) | st.integers(0, 50),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.lists(st.decimals(-2500, 2500, places=3) | st.integers(-400, 400), max_size=12),
)
def test_bounds_on_numbers(low, width, low_open, high_open, integer, values):
    low, high = float(low), float(Decimal(low) + Decimal(width))  # exact, so that no bound has 17 digits
    schema = {
        "type": "integer" if integer else "number",
        "exclusiveMinimum" if low_open else "minimum": low,
        "exclusiveMaximum" if high_open else "maximum": high,
    }
    try:
        dfa = compile_json_schema(schema)
    except GrammarError:
        assert (
            low == high
            and (low_open or high_open)
            or integer
            and not any(jsonschema.Draft202012Validator(schema).is_valid(v) for v in range(int(low) - 1, int(high) + 2))
        )
        return
    validator = jsonschema.Draft202012Validator(schema)
    for value in [*values, low, high]:
        spelled = f"{value:f}" if not isinstance(value, float) else repr(value)
        value = json.loads(spelled)
        if integer and spelled.endswith(".0"):
            spelled = spelled[:-2]
        if integer and "." in spelled:
            continue
        spelled = {"-0": "0", "-0.0": "0.0"}.get(spelled, spelled)
        if not (spelled.startswith("-") and value == 0):
            assert dfa.accepts(spelled.encode()) == validator.is_valid(value), spelled
    rng = random.Random(0)
    guide = TokenGuide(dfa, JSON_TRIE, [EOS])
    for _ in range(4):
        written = random_text(guide, rng)
        assert written is not None and validator.is_valid(json.loads(written)), written


FORMAT_CASES = {
    "date": (
        ["2024-02-29", "2000-02-29", "0001-01-01", "1999-12-31"],
        ["2023-02-29", "1900-02-29", "2024-13-01", "2024-04-31", "24-1-1"],
    ),
    "time": (["00:00:00Z", "23:59:59.123+05:30"], ["24:00:00Z", "12:00:00", "12:60:00Z"]),
    "date-time": (["2024-02-29T12:00:00Z", "1999-12-31T23:59:59.5-11:00"], ["2024-02-29", "2024-02-29 12:00:00Z"]),
    "duration": (
        ["P1Y2M3D", "P3D", "PT5M", "P1DT2H3M4S", "P4W", "P2MT1S", "PT0S"],
        ["P", "PT", "1D", "P1Y2D", "P1W2D", "PT1H2S", "P1S", "P1DT"],
    ),
    "uuid": (
        ["123e4567-e89b-12d3-a456-426614174000"],
        ["123e4567e89b12d3a456426614174000", "g23e4567-e89b-12d3-a456-426614174000"],
    ),
    "email": (["joe.bloggs@example.com", "a+b@x-y.co.uk"], ["joe", "@x.com", "a@b", ".a@x.com", "a b@x.com"]),
    "ipv4": (["127.0.0.1", "255.255.255.0"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
    "hostname": (["localhost", "a-b.example.org"], ["-a", "a..b", "a_b"]),
    "ipv6": (
        ["::1", "::", "fe80::1:2", "1:2:3:4:5:6:7:8", "1::", "2001:db8::ff"],
        ["1:2:3", "1::2::3", ":::", "12345::"],
    ),
}
FORMAT_READERS = {
    "date": datetime.date.fromisoformat,
    "time": lambda t: datetime.time.fromisoformat(t),
    "date-time": datetime.datetime.fromisoformat,
    "uuid": uuid.UUID,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
}


def test_every_format_has_its_cases():
    assert FORMAT_CASES.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name):
    dfa = compile_json_schema({"type": "string", "format": name})
    good, bad = FORMAT_CASES[name]
    for value in good:
        assert dfa.accepts(json.dumps(value).encode()), value
    for value in bad:
        assert not dfa.accepts(json.dumps(value).encode()), value
    guide, rng = TokenGuide(dfa, JSON_TRIE, [EOS]), random.Random(0)
    for _ in range(30):
        written = random_text(guide, rng)
        value = json.loads(written)
        if name in FORMAT_READERS:
            FORMAT_READERS[name](value)
        if name != "time":  # jsonschema's is the one of draft 3, without a zone
            jsonschema.validate(value, {"format": name}, format_checker=jsonschema.FormatChecker())


def test_F60_blanks_have_bounded_runs_and_none_around_the_value():
    dfa = compile_json_schema({"properties": {"a": {"type": "string"}}})
    assert dfa.accepts(b'{\n        "a": "x"\n}')
    for bad in (
        b'{\n\n"a":"x"}',
        b'{  "a":"x"}',
        b'{\n             "a":"x"}',
        b'{"a" :"x"}',
        b'{"a":"x"} ',
        b' {"a":"x"}',
        b'{\t"a":"x"}',
    ):
        assert not dfa.accepts(bad), bad
    assert dfa.accepts(b'{"a": "' + b" " * 16 + b'"}') and not dfa.accepts(b'{"a": "' + b" " * 17 + b'"}')


def test_each_value_has_one_spelling():
    dfa = compile_json_schema({"type": "string"})
    for bad in (
        rb'"\u0041"',
        rb'"\/"',
        rb'"\u000a"',
        rb'"\u001F"',
        b'"\n"',
        b'"\xff"',
        b'"\xed\xa0\x80"',
        b'"a',
        rb'"\x"',
    ):
        assert not dfa.accepts(bad), bad
    numbers = compile_json_schema({"type": "number"})
    for bad in (b"01", b"1.", b".5", b"+1", b"1e", b"1e400", b"--1", b"NaN", b"1" * 20, b"0." + b"0" * 18):
        assert not numbers.accepts(bad), bad
    assert not compile_json_schema({"minimum": -1}).accepts(b"-0")
