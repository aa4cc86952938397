"""Fields of a frozen dataclass that declare their rule: what is legal, in which form it is stored, and a line of help.

The problem. A field that is accepted and then ignored, coerced or misread is the worst kind of wrong: `top_p=True` runs
as 1, `max_tokens="256"` fails deep in a step and takes the batch along.

The idea. Default, rule, error text and help of a field stand in one line, so that check and documentation cannot drift
apart, and command lines and servers make their own fields from it:

    top_p: float = real(1.0, "(0, 1]", "1 is off", "keep the fewest ...")      metadata: kind, rule, help
        normal_form("top_p", 1.5, **rule)  ──► ParameterError: top_p=1.5 is not allowed: it must be a number ...

Left out: rules between fields (the dataclass checks those).
"""

import json
import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import field
from numbers import Integral, Real
from typing import Any

INF = math.inf


class ParameterError(ValueError):
    """A field of SamplingParams holds what it must not; `field` names it."""

    def __init__(self, field: str, value: Any, allowed: str):
        self.field = field
        try:
            shown = reprlib.repr(value)  # bounded: an error must not echo a megabyte of bad input
        except ValueError:  # an integer of too many digits to print
            shown = f"<{type(value).__name__}>"
        super().__init__(f"{field}={shown} is not allowed: it must be {allowed}")


SURROGATE = re.compile("[\ud800-\udfff]")  # half a character: JSON can write it, UTF-8 and so a tokenizer cannot
ALLOWED = {  # by kind
    "switch": "True or False",
    "text": "None or a non-empty string without lone surrogates",
    "strings": "None, a non-empty string or a list of them, without lone surrogates",
    "choice": "None or a non-empty list of non-empty strings without lone surrogates",
    "ids": "None or a list of token ids, each an integer >= 0",
    "bias": "None or a dict from token ids (integers >= 0) to numbers in [-100, 100]",
    "schema": "None, a JSON Schema as a dict, or the JSON text of one, without lone surrogates",
}


def option(default: Any, kind: str, meaning: str, allowed: str = "", low: float = 0, high: float = INF) -> Any:
    """A field of SamplingParams. None is legal where `allowed` begins with it, numbers from low to high."""
    rule = {"kind": kind, "allowed": allowed or ALLOWED[kind], "low": low, "high": high}
    return field(default=default, metadata={"kind": kind, "rule": rule, "help": f"{meaning}; {rule['allowed']}"})


def integer(default: int | None, low: int, high: float, meaning: str, none: bool = False) -> Any:
    """An integer; None is legal if it is the default or `none` says so."""
    allowed = f"an integer >= {low}" if high == INF else f"an integer from {low} to {high}"
    return option(default, "integer", meaning, ("None or " if none or default is None else "") + allowed, low, high)


def real(default: float, interval: str, note: str, meaning: str) -> Any:
    """A number of an interval such as "(0, 1]"."""
    low, high = map(float, interval[1:-1].split(","))
    low = math.nextafter(low, high) if interval[0] == "(" else low
    return option(default, "real", meaning, f"a number in {interval} ({note})", low, high)


def normal_form(name: str, value: Any, kind: str, allowed: str, low: float = 0, high: float = INF) -> Any:
    """A value as its field stores it. ParameterError if it is not legal."""
    match kind, value:
        case "real" | "integer" | "token", bool():
            pass
        case _, None if allowed.startswith("None") and kind != "token":
            return {"strings": (), "ids": (), "bias": {}}.get(kind)
        case "real", Real() if low <= value <= high:  # NaN lies in no interval
            return float(value)
        case "integer" | "token", Integral() if low <= value <= high:
            return int(value)
        case "switch", bool():
            return value
        case "text", str() if _is_text(value):
            return value
        case "strings", str() if _is_text(value):
            return (value,)
        case "strings" | "choice", list() | tuple() if all(map(_is_text, value)):
            if value or kind == "strings":
                return tuple(value)
        case "ids", list() | tuple():
            return tuple(normal_form(name, token, "token", allowed) for token in value)
        case "bias", Mapping():
            return _bias(name, value, allowed)
        case "schema", str() | dict():
            return _schema(name, value, allowed)
    raise ParameterError(name, value, allowed)


def _bias(name: str, value: Mapping, allowed: str) -> dict[int, float]:
    """Token id -> bias. Keys as integers, or as strings of plain digits, for JSON has no other keys."""
    bias: dict[int, float] = {}
    for key, number in value.items():
        token = int(key) if isinstance(key, str) and re.fullmatch(r"[0-9]{1,18}", key) else key
        token = normal_form(name, token, "token", allowed)
        if token in bias:
            raise ParameterError(name, value, f"given once for each token, and {token} occurs twice")
        bias[token] = normal_form(name, number, "real", f"a number in [-100, 100] for token {token}", -100, 100)
    return bias


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and not SURROGATE.search(value)


def _schema(name: str, value: str | dict, allowed: str) -> dict:
    """A copy of its own, for the caller may go on editing theirs."""
    try:
        schema = json.loads(value if isinstance(value, str) else json.dumps(value))
        text = json.dumps(schema, ensure_ascii=False)
    except RecursionError:
        raise ParameterError(name, value, f"{allowed}; this one is nested too deeply") from None
    except (ValueError, TypeError) as error:
        raise ParameterError(name, value, f"{allowed}; this is no JSON ({error})") from None
    if not isinstance(schema, dict) or SURROGATE.search(text):
        raise ParameterError(name, value, allowed)
    return schema
