"""JSON Schema -> automaton: every text it accepts is JSON that the schema validates.

Problem. A schema is a set of tests on a finished value; tests combine freely, refer to each other and ignore what
they do not know. A generator needs the opposite: a list of what may be written next. What cannot be turned around
must be refused BEFORE the request runs; a keyword that is read and dropped is an unconstrained answer with a valid
face.

Idea. Bring the schema into the form "one of these plain schemas", where a plain one has neither references nor
combinations, and then write each plain schema down as a tree, type by type.

      {allOf: [A, {anyOf: [B, C]}]}      ->  A+B  |  A+C          (json_merge.py says what + is, keyword by keyword)
      {type: object,                     ->  { "a": <integer> (, "b": <string>)? }
       properties: {a: integer, b: string}, required: [a]}

The choices made where a schema says more than can or should be generated (each keeps the output valid; some texts are
not generated):

| where | choice |
|---|---|
| order of properties | as declared, additional ones last |
| additionalProperties absent | any if `properties` is absent too, or names too few for minProperties; else none |
| items absent | none after prefixItems, else any |
| type absent | the types that the other keywords speak of; with none, any value |
| any value | nested at most 4 deep |
| $ref | local ones; through the same one at most 4 times inside itself, then that branch is closed |
| oneOf | anyOf, if types, constants, ranges or a required property keep its branches apart, or can be made to |
| format | date, time, date-time, duration, uuid, email, ipv4, ipv6, hostname: enforced, not annotations |
| format of numbers | int32, int64 (a range each), float, double |
| pattern | a search, in what Python and ECMAScript have in common (`regex_syntax.py`) |
| multipleOf | integers up to 1000; a `number` with it is written as an integer |
| spelling and blanks | `json_text.py` |

Refused by name: not, if/then/else, patternProperties, propertyNames, contains, unevaluated*, dependent*, uniqueItems,
remote and dynamic references, other formats, and every keyword not known at all, unless it begins with x-. Ignored,
because they constrain nothing: title, description, default, examples, deprecated, readOnly, writeOnly, discriminator,
content*, $schema, $id, $comment, $anchor, $defs, definitions.

Source: JSON Schema 2020-12 (Core, sections 8 and 10; Validation, section 6); tuples of draft 7 (`items` as a list)
are read as well.
"""

from __future__ import annotations

import json
from functools import lru_cache
from urllib.parse import unquote

from dfa import MAX_WORK, Dfa, to_dfa
from json_merge import close_against, escapes, merge, normalise, satisfies, string_of, types_of
from json_text import (
    AFTER_MARK,
    BLANKS,
    array,
    constant,
    enclosed,
    free_integer,
    free_number,
    number,
    object_of,
    string,
)
from regular import EMPTY, GrammarError, Machine, Node, alt, machine, repeat, seq, text

ANY_DEPTH, REFERENCE_DEPTH = 4, 4
MAX_VISITS, MAX_BRANCHES = 30_000, 256  # schemas looked at, plain schemas one schema may become


def compile_json_schema(schema: dict | bool | str, blanks: str = "flexible") -> Dfa:
    """The texts of the values that a schema (or its JSON text) allows. {"type": "object"} is "any JSON object".

    blanks: "flexible" = any of the bounded layouts of `json_text.py`; "fixed" = `{"a": 1, "b": [2, 3]}`, which
    leaves longer forced runs. Raises GrammarError with the place in the schema, a JSON pointer, and the remedy.
    """
    if blanks not in BLANKS:
        raise GrammarError(f"blanks must be one of {sorted(BLANKS)}, not {blanks!r}")
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the JSON schema is not JSON: {error}") from None
    try:
        node = _Compiler(schema, blanks).value(schema, "#", ())
        if node is EMPTY:
            raise GrammarError(
                "the JSON schema allows no value (or only values nested deeper than references are followed,"
                f" {REFERENCE_DEPTH} times); relax the keywords that contradict each other"
            )
        return to_dfa(node)
    except RecursionError:
        raise GrammarError("the JSON schema is nested too deeply; flatten it") from None


@lru_cache(maxsize=16)
def any_value(depth: int, blanks: str) -> Node:
    """Any JSON value with at most `depth` levels of arrays and objects."""
    scalars = [text("null"), text("true"), text("false"), free_number(), string()]
    if depth == 0:
        return alt(*scalars)
    inner = any_value(depth - 1, blanks)
    nested = [array([(inner, 0, None)], blanks), object_of([(string(), inner, 0, None)], blanks)]
    return machine(to_dfa(alt(*scalars, *nested)))


def overlapping(where: str, i: int, j: int) -> GrammarError:
    return GrammarError(
        f"{where}/oneOf: branches {i} and {j} may both hold for one value, which oneOf forbids; use anyOf, or give each"
        " branch a required property with a const of its own"
    )


def too_many(where: str) -> GrammarError:
    return GrammarError(
        f"{where}: more than {MAX_BRANCHES} combinations of alternatives; use fewer, or enum for constants"
    )


class _Compiler:
    def __init__(self, root, blanks: str) -> None:
        self.root, self.blanks, self.visits, self.work = root, blanks, 0, 0

    def value(self, schema, where: str, trail: tuple[str, ...]) -> Node:
        """The tree of a schema found at `where`, reached through the references of `trail`."""
        return alt(*(self.plain(plain, where, trail) for plain, trail in self.branches(schema, where, trail)))

    # References and combinations

    def branches(self, schema, where: str, trail: tuple[str, ...]) -> list[tuple[dict, tuple[str, ...]]]:
        """A schema as alternatives without references or combinations, each with its trail."""
        self.visits += 1
        if self.visits > MAX_VISITS:
            raise GrammarError(
                f"{where}: the schema unfolds to more than {MAX_VISITS} parts; use fewer recursive references"
            )
        if isinstance(schema, bool):
            return [({}, trail)] if schema else []
        found = [(normalise(schema, where), trail)]
        if "$ref" in schema:
            reference = schema["$ref"]
            if trail.count(reference) >= REFERENCE_DEPTH:
                return []
            target = self.resolve(reference, where)
            found = self.combine(found, self.branches(target, reference, (*trail, reference)), where)
        for i, part in enumerate(self.listed(schema, "allOf", where)):
            found = self.combine(found, self.branches(part, f"{where}/allOf/{i}", trail), where)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                parts = self.listed(schema, keyword, where)
                options = [self.branches(p, f"{where}/{keyword}/{i}", trail) for i, p in enumerate(parts)]
                options = [self.combine(found, option, where) for option in options]
                if keyword == "oneOf":
                    self.separate(options, where)
                found = [branch for option in options for branch in option]
                if len(found) > MAX_BRANCHES:
                    raise too_many(where)
        return found

    def listed(self, schema: dict, keyword: str, where: str) -> list:
        parts = schema.get(keyword, [])
        if not isinstance(parts, list) or keyword in schema and not parts:
            raise GrammarError(f"{where}/{keyword}: must be a non-empty list of schemas, not {str(parts)[:60]!r}")
        return parts

    def combine(self, left: list, right: list, where: str) -> list:
        if len(left) * len(right) > MAX_BRANCHES:
            raise too_many(where)
        merged = [(merge(a, b), max(s, t, key=len)) for a, s in left for b, t in right]
        return [(plain, trail) for plain, trail in merged if plain is not None]

    def separate(self, options: list, where: str) -> None:
        """Make the branches of a oneOf disjoint, in place, closing one to a property the other requires; or refuse."""
        unclosed = [list(option) for option in options]  # the value must not be valid for these
        for i, option in enumerate(options):
            for j, other in enumerate(unclosed):
                for place, (left, s) in enumerate(option if i != j else []):
                    for right, t in other:
                        if not escapes(left, right, self.branches, s, t):
                            left = close_against(left, right)
                            if left is None or not escapes(left, right, self.branches, s, t):
                                raise overlapping(where, i, j)
                            option[place] = left, s

    def resolve(self, reference, where: str):
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise GrammarError(
                f"{where}/$ref: {reference!r} is not supported; only '#' and '#/...' within the schema are"
            )
        target = self.root
        for step in reference.split("/")[1:]:
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
            elif isinstance(target, dict) and step in target:
                target = target[step]
            else:
                raise GrammarError(
                    f"{where}/$ref: {reference!r} leads nowhere ({step!r} is missing); add it under $defs"
                )
        return target

    # Plain schemas

    def plain(self, plain: dict, where: str, trail: tuple[str, ...]) -> Node:
        if "enum" in plain:
            return alt(*(constant(v, self.blanks) for v in plain["enum"] if satisfies(v, plain, where)))
        types = types_of(plain)
        if types is None:
            return any_value(ANY_DEPTH, self.blanks)
        writers = {
            "null": lambda: text("null"),
            "boolean": lambda: alt(text("true"), text("false")),
            "integer": lambda: self.number(plain, integer=True),
            "number": lambda: self.number(plain, integer="multipleOf" in plain),
            "string": lambda: self.counted(string_of(plain), where),
            "array": lambda: self.array(plain, where, trail),
            "object": lambda: self.object(plain, where, trail),
        }
        return alt(*(writers[name]() for name in writers if name in types))

    def counted(self, node: Node, where: str) -> Node:
        """A string, whose automata are already built: many patterns that are each within the limits may be too many."""
        self.work += sum(part.dfa.cost for part in node.parts if isinstance(part, Machine))
        if self.work > MAX_WORK:
            raise GrammarError(
                f"{where}: the patterns up to here are too large taken together; use fewer or simpler ones"
            )
        return node

    def number(self, plain: dict, integer: bool) -> Node:
        low, low_open = plain.get("low", (None, False))
        high, high_open = plain.get("high", (None, False))
        multiple = plain.get("multipleOf", 1)
        if low is None and high is None and multiple == 1:
            return free_integer() if integer else free_number()
        return number(low, high, low_open, high_open, integer, multiple)

    def array(self, plain: dict, where: str, trail: tuple[str, ...]) -> Node:
        low, high = plain.get("minItems", 0), plain.get("maxItems")
        prefix = plain.get("prefixItems", [])[:high]
        rest = plain.get("items", not prefix or low > len(prefix))
        nodes = [self.value(part, f"{where}/prefixItems/{i}", trail) for i, part in enumerate(prefix)]
        if high is None or high > len(prefix):
            item = self.inner_value(rest, f"{where}/items", trail)
        else:
            item = EMPTY
        if not nodes:
            return array([(item, low, high)], self.blanks)
        comma = seq(text(","), AFTER_MARK[self.blanks])
        tail = repeat(seq(comma, item), max(0, low - len(nodes)), None if high is None else high - len(nodes))
        for i, node in reversed(
            list(enumerate(nodes))
        ):  # a later item never without the earlier ones: (a(, b(, c)?)?)?
            tail = seq(comma, node, tail) if i else seq(node, tail)
            tail = tail if i < low else repeat(tail, 0, 1)
        return enclosed("[", tail, "]", self.blanks)

    def object(self, plain: dict, where: str, trail: tuple[str, ...]) -> Node:
        declared = plain.get("properties", {})
        required = plain.get("required", [])
        short = plain.get("minProperties", 0) > len({*declared, *required})  # only undeclared ones can make up for it
        extra = plain.get("additionalProperties", "properties" not in plain or short)
        undeclared = {name: plain.get("additionalProperties", True) for name in required if name not in declared}
        members = []
        for name, schema in (declared | undeclared).items():
            value = self.inner_value(schema, f"{where}/properties/{name}", trail)
            members.append((constant(name, self.blanks), value, int(name in required), 1))
        low, high = self.extra_bounds(plain, [m[2] for m in members if m[1] is not EMPTY], extra is not False, where)
        if extra is not False and high != 0:
            key = self.counted(string(without=tuple(declared | undeclared)), where)
            members.append((key, self.inner_value(extra, f"{where}/additionalProperties", trail), low, high))
        elif low:
            return EMPTY
        return object_of(members, self.blanks)

    def inner_value(self, schema, where: str, trail: tuple[str, ...]) -> Node:
        """One level of a value about which nothing is said is used up by the array or object around it."""
        return any_value(ANY_DEPTH - 1, self.blanks) if schema is True else self.value(schema, where, trail)

    def extra_bounds(self, plain: dict, always: list[int], open_ended: bool, where: str) -> tuple[int, int | None]:
        """How many undeclared properties minProperties and maxProperties leave, if the optional ones do not matter."""
        least, most = plain.get("minProperties", 0), plain.get("maxProperties")
        fixed = all(always)
        low, high = max(0, least - sum(always)), None if most is None else most - sum(always)
        if high is not None and high < 0:
            return 1, 0  # contradictory: more required properties than allowed ones
        if low and not fixed or high is not None and not fixed and (open_ended or most < len(always)):
            raise GrammarError(
                f"{where}: minProperties or maxProperties beside optional properties is not supported; require them"
            )
        if low > 1:
            raise GrammarError(
                f"{where}/minProperties: {least} asks for {low} undeclared properties with different names, which no"
                " automaton can promise; declare them in properties"
            )
        return low, high
