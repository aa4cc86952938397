"""The algebra of plain JSON schemas: reading one, merging two that must both hold, and telling whether two can both
hold.

Problem. `allOf`, a keyword beside a `$ref`, and a keyword beside an `anyOf` all say "and"; `oneOf` says "and not the
others". An automaton is written from ONE plain schema, so "and" has to be worked out on the schemas themselves.

Idea. Every keyword has its own way to be joined with itself, and keywords that look at each other are settled first:

      minimum          the larger one                      required      all names of both
      type             what both list; integer is in number    enum      the values in both
      pattern, format  a list: all of them must match      properties    per name: {allOf: [left, right]}

      additionalProperties of one side also governs the names that only the other side declares.

Two schemas are certainly disjoint if for every type that both allow something keeps them apart: different constants,
ranges or lengths that do not meet, or, for objects, a property that both require and whose schemas are disjoint, or
that one requires and the other forbids. "Certainly" is one-sided: what cannot be shown counts as overlapping.

Source: JSON Schema 2020-12 Core, section 10.2.1 (allOf, anyOf, oneOf), 10.3 (applying schemas to children).

Left out: `not`, conditions, and every assertion that counts or compares several children (contains, uniqueItems,
dependent*).
"""

from __future__ import annotations

import json
import math
from decimal import Decimal
from functools import lru_cache

from dfa import Dfa, to_dfa
from json_text import FORMATS, MAX_MULTIPLE, string
from regular import GrammarError, Node

TYPES = ("null", "boolean", "object", "array", "string", "integer", "number")
COMBINING = {"$ref", "allOf", "anyOf", "oneOf"}
IGNORED = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
    *("contentMediaType", "contentEncoding", "contentSchema"),
    *("$schema", "$id", "$comment", "$anchor", "$defs", "definitions"),
}
NUMBER_FORMATS = {"int32": 2**31, "int64": 2**63, "float": None, "double": None}  # OpenAPI's: values are below that
KEYWORDS_OF = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "low", "high"},
    "array": {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"},
    "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties"},
}
KNOWN = {"type", "enum", "const"}.union(*KEYWORDS_OF.values()) - {"low", "high"}
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


# Reading


def normalise(schema, where: str) -> dict:
    """The plain part of a schema, checked, in a form that merges: type as a set, const as enum, pattern and format as
    tuples, bounds as low and high = (Decimal, open)."""
    if not isinstance(schema, dict):
        raise GrammarError(f"{where}: a schema is an object, true or false, not {str(schema)[:60]!r}")
    for keyword in schema:
        if keyword not in KNOWN | COMBINING | IGNORED and not keyword.startswith("x-"):
            raise GrammarError(
                f"{where}: the keyword {keyword[:60]!r} is not supported; remove it, or say it with the supported ones"
            )
    plain = {k: v for k, v in schema.items() if k in KNOWN}
    if "type" in plain:
        plain["type"] = _types(plain["type"], where)
    if "const" in plain:
        value = plain.pop("const")
        plain["enum"] = [v for v in plain.get("enum", [value]) if same(v, value)]
    elif not isinstance(plain.get("enum", []), list):
        raise GrammarError(f"{where}/enum: must be a list of values, not {str(plain['enum'])[:60]!r}")
    for keyword in COUNTS:
        if keyword in plain:
            plain[keyword] = _count(plain[keyword], f"{where}/{keyword}")
    _read_numbers(plain, where)
    _read_strings(plain, where)
    _read_children(plain, where)
    return plain


def _types(value, where: str) -> frozenset[str]:
    names = value if isinstance(value, list) else [value]
    for name in names:
        if name not in TYPES:
            raise GrammarError(f"{where}/type: {name!r} is not a JSON type; use one of {', '.join(TYPES)}")
    return frozenset(names) - ({"integer"} if "number" in names else set())


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _count(value, where: str) -> int:
    if not _is_number(value) or value < 0 or value != int(value):
        raise GrammarError(f"{where}: must be a whole number of at least 0, not {value!r}")
    return int(value)


def _read_strings(plain: dict, where: str) -> None:
    for keyword in ("pattern", "format"):
        if keyword in plain:
            if not isinstance(plain[keyword], str):
                raise GrammarError(f"{where}/{keyword}: must be a string, not {plain[keyword]!r}")
            plain[keyword] = (plain[keyword],)
    for name in plain.get("format", ()):
        if name not in FORMATS:
            raise GrammarError(
                f"{where}/format: {name!r} is not supported; use one of {', '.join(FORMATS)}, or a pattern"
            )


def _read_numbers(plain: dict, where: str) -> None:
    for keyword, side, is_open in (
        ("minimum", "low", False),
        ("exclusiveMinimum", "low", True),
        ("maximum", "high", False),
        ("exclusiveMaximum", "high", True),
    ):
        if keyword in plain:
            value = plain.pop(keyword)
            if not _is_number(value):
                raise GrammarError(f"{where}/{keyword}: must be a finite number, not {value!r}")
            bound = (Decimal(repr(value)), is_open)
            plain[side] = _tighter(side, plain[side], bound) if side in plain else bound
    if plain.get("type", {"string"}) <= {"integer", "number", "null"} and plain.get("format") in [*NUMBER_FORMATS]:
        if limit := NUMBER_FORMATS[plain.pop("format")]:
            for side, bound in (("low", Decimal(-limit)), ("high", Decimal(limit - 1))):
                plain[side] = _tighter(side, plain.get(side, (bound, False)), (bound, False))
    if "multipleOf" in plain:
        value = plain["multipleOf"]
        if not _is_number(value) or value <= 0:
            raise GrammarError(f"{where}/multipleOf: must be a number above 0, not {value!r}")
        if value != int(value) or value > MAX_MULTIPLE:
            raise GrammarError(
                f"{where}/multipleOf: {value!r} is not supported; whole numbers up to {MAX_MULTIPLE} are"
            )
        plain["multipleOf"] = int(value)


def _read_children(plain: dict, where: str) -> None:
    if isinstance(plain.get("items"), list):  # a tuple, as it was written before 2020-12
        plain["prefixItems"] = plain.pop("items")
        if "additionalItems" in plain:
            plain["items"] = plain["additionalItems"]
    plain.pop("additionalItems", None)  # without a tuple it says nothing
    if not isinstance(plain.get("prefixItems", []), list):
        raise GrammarError(f"{where}/prefixItems: must be a list of schemas")
    if not isinstance(plain.get("properties", {}), dict):
        raise GrammarError(f"{where}/properties: must be an object of schemas")
    required = plain.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise GrammarError(f"{where}/required: must be a list of property names, not {str(required)[:60]!r}")
    if plain.pop("uniqueItems", False) and plain.get("maxItems", 2) > 1:
        raise GrammarError(
            f"{where}/uniqueItems: no automaton can compare items with each other; remove it or set maxItems to 1"
        )


def types_of(plain: dict) -> frozenset[str] | None:
    """The types to generate: those listed, or those that the keywords are about; None if nothing says anything."""
    if "type" in plain:
        return plain["type"]
    return frozenset(name for name, keywords in KEYWORDS_OF.items() if keywords & plain.keys()) or None


# Values


def same(left, right) -> bool:
    """JSON equality: 1 is 1.0, and true is not 1."""
    return _key(left) == _key(right)


def _key(value):
    if isinstance(value, list):
        return ("array", *map(_key, value))
    if isinstance(value, dict):
        return ("object", frozenset((name, _key(item)) for name, item in value.items()))
    return ("number", value) if _is_number(value) else (type(value).__name__, value)


def _type_name(value) -> str:
    if _is_number(value):
        return "integer" if value == int(value) else "number"
    names = {bool: "boolean", str: "string", list: "array", dict: "object", type(None): "null"}
    return names.get(type(value), "number")


def _allows_type(types: frozenset[str], name: str) -> bool:
    return name in types or name == "integer" and "number" in types


def satisfies(value, plain: dict, where: str) -> bool:
    """Whether a constant meets the keywords beside its enum."""
    name = _type_name(value)
    if "type" in plain and not _allows_type(plain["type"], name):
        return False
    beside = plain.keys() & KEYWORDS_OF.get("number" if name == "integer" else name, set())
    if not beside:
        return True
    if name in ("array", "object"):
        raise GrammarError(
            f"{where}: {min(beside)} beside an enum of arrays or objects is not supported; shorten the enum"
        )
    if name == "string":
        return _string_automaton(string_of(plain)).accepts(
            json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
        )
    exact = Decimal(repr(value))
    (low, low_open), (high, high_open) = plain.get("low", (exact, False)), plain.get("high", (exact, False))
    above = exact > low or exact == low and not low_open
    below = exact < high or exact == high and not high_open
    return above and below and value % plain.get("multipleOf", 1 if name == "integer" else value or 1) == 0


@lru_cache(maxsize=16)
def _string_automaton(node: Node) -> Dfa:
    return to_dfa(node)


def string_of(plain: dict) -> Node:
    return string(plain.get("minLength", 0), plain.get("maxLength"), plain.get("pattern", ()), plain.get("format", ()))


# Both at once


def _tighter(side: str, left: tuple[Decimal, bool], right: tuple[Decimal, bool]) -> tuple[Decimal, bool]:
    if left[0] == right[0]:
        return left[0], left[1] or right[1]
    return max(left, right) if side == "low" else min(left, right)


def merge(left: dict, right: dict) -> dict | None:
    """The plain schema of the values that meet both, None if their types or constants exclude each other."""
    merged = left | right
    for keyword in left.keys() & right.keys():
        a, b = left[keyword], right[keyword]
        if keyword == "type":
            merged[keyword] = frozenset(n for n in a | b if _allows_type(a, n) and _allows_type(b, n))
        elif keyword == "enum":
            keys = set(map(_key, b))
            merged[keyword] = [v for v in a if _key(v) in keys]
        elif keyword in ("low", "high"):
            merged[keyword] = _tighter(keyword, a, b)
        elif keyword in COUNTS:
            merged[keyword] = max(a, b) if keyword.startswith("min") else min(a, b)
        elif keyword == "multipleOf":
            merged[keyword] = math.lcm(a, b)
        elif keyword in ("pattern", "format"):
            merged[keyword] = (*a, *(entry for entry in b if entry not in a))
        elif keyword == "required":
            merged[keyword] = [*a, *(name for name in b if name not in a)]
        elif keyword in ("additionalProperties", "items"):
            merged[keyword] = {"allOf": [a, b]}
    if "properties" in merged:
        names = [*left.get("properties", {}), *right.get("properties", {})]
        merged["properties"] = {name: _both(_child(left, name), _child(right, name)) for name in names}
    if "prefixItems" in merged:
        length = max(len(left.get("prefixItems", [])), len(right.get("prefixItems", [])))
        merged["prefixItems"] = [_both(_item(left, i), _item(right, i)) for i in range(length)]
    impossible = merged.get("type") == frozenset() or merged.get("enum") == []
    return None if impossible else merged


def _child(plain: dict, name: str):
    """What a plain schema says about one property."""
    return plain.get("properties", {}).get(name, plain.get("additionalProperties", True))


def _item(plain: dict, index: int):
    prefix = plain.get("prefixItems", [])
    return prefix[index] if index < len(prefix) else plain.get("items", True)


def _both(left, right):
    if left is True or right is True:
        return right if left is True else left
    return {"allOf": [left, right]}


# Never at once


def escapes(left: dict, right: dict, branches, left_trail: tuple, right_trail: tuple) -> bool:
    """Whether certainly no value that is generated for `left` is valid for `right`.

    branches(schema, where, trail) resolves the schemas of properties (it is the compiler's)."""
    if "enum" in left or "enum" in right:
        values = [v for v in left.get("enum", right.get("enum")) if _may_hold(v, left) and _may_hold(v, right)]
        keys = set(map(_key, right.get("enum", values)))
        return not any(_key(v) in keys for v in values)
    common = _expanded(types_of(left) or frozenset(TYPES)) & _expanded(right.get("type", frozenset(TYPES)))
    for name in common:
        if name == "object":
            apart = _objects_apart(left, right, branches, left_trail, right_trail)
        elif name in ("integer", "number"):
            apart = _ranges_apart(left, right) or _ranges_apart(right, left)
        else:
            least, most = {"string": ("minLength", "maxLength"), "array": ("minItems", "maxItems")}.get(name, ("", ""))
            apart = any(a.get(most, math.inf) < b.get(least, 0) for a, b in ((left, right), (right, left)))
        if not apart:
            return False
    return True


def _may_hold(value, plain: dict) -> bool:
    if isinstance(value, list | dict):
        return "type" not in plain or _type_name(value) in plain["type"]
    return satisfies(value, plain, "#")


def _expanded(types: frozenset[str]) -> frozenset[str]:
    return types | {"integer"} if "number" in types else types


def _ranges_apart(lower: dict, upper: dict) -> bool:
    if "high" not in lower or "low" not in upper:
        return False
    (high, high_open), (low, low_open) = lower["high"], upper["low"]
    return high < low or high == low and (high_open or low_open)


def _objects_apart(left: dict, right: dict, branches, left_trail: tuple, right_trail: tuple) -> bool:
    closed = [name for name, schema in left.get("properties", {}).items() if schema is False]
    if any(name in closed for name in right.get("required", [])):
        return True
    for name in left.get("required", []):
        mine = branches(_child(left, name), f"#/{name}", left_trail)
        theirs = branches(_child(right, name), f"#/{name}", right_trail)
        if all(escapes(a, b, branches, s, t) for a, s in mine for b, t in theirs):
            return True
    return False


def close_against(left: dict, right: dict) -> dict | None:
    """`left` narrowed so that it lacks a property that `right` requires; None if it requires them all itself."""
    names = [name for name in right.get("required", []) if name not in left.get("required", [])]
    return left | {"properties": left.get("properties", {}) | {names[0]: False}} if names else None
