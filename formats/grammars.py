"""JSON Schema, Lark and GBNF grammars through llguidance: what is read and refused, and a walk through its parser.

The library compiles a schema in a millisecond, but it trusts whoever calls it. So it is told to refuse, by name, what
it does not enforce; what it would never finish compiling is refused beforehand (check_schema); and an error of its
parser, whose mask would then allow the end of the text, is raised as one.

      schema, Lark, GBNF --> checks --> LLMatcher, compiled once --> GrammarMatcher, one copy an answer

Properties come in the order in which the schema declares them; others may follow unless additionalProperties is false.
Of 160 schemas of MaskBench 128 compile, 0.7 ms each, and all instances of these are judged rightly (`python bench.py
maskbench DIR`). Source: the documentation of llguidance (syntax.md, json_schema.md). Left out: its own forced tokens
(structured.py finds them for both engines), and special tokens in a grammar, which are never allowed.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import accumulate

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark

from automata import GrammarError

NEEDED_BYTES = set(range(0x20, 0xC0)) - {0x7F}  # ASCII, and what finishes a character that some token has begun
# What llguidance is told, whatever a schema's own "x-guidance" says: a keyword that it does not enforce is an error,
# and blanks are bounded (none, a space, or a line break and its indentation): a small model may repeat them for ever.
JSON_OPTIONS = {"lenient": False, "coerce_one_of": False, "item_separator": ",", "key_separator": ":"}
JSON_OPTIONS |= {"whitespace_flexible": True, "whitespace_pattern": r"( |\n {0,12})"}
LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, max_grammar_size=40_000, verbose_errors=False)
# What is as large as these limits allow compiles within a second, or ends in an error of the library.
MAX_SCHEMA, MAX_GRAMMAR = 256 << 10, 64 << 10  # characters
MAX_KEYS = 2_000  # of one object: the library compares all properties with each other
MAX_DEPTH = 1_000  # the library recurses from rule to rule and from $ref to $ref; at about 2,000 the process dies
MAX_INTERSECTED = 8  # regular expressions asked of one text: the product of their automata
MAX_PATTERN_NAMES = 100  # patternProperties, each compared with all others
MAX_MULTIPLE = 20_000  # a divisor becomes an automaton with a state a remainder
MAX_FORCED = 512  # bytes of a forced run that are encoded to find its first token
INTEGER_FORMATS = {"int32": 2**31, "int64": 2**63}  # the library takes them for annotations
VALUES = {"const", "enum", "default", "examples"}  # keywords that hold values
NAMED = {"properties", "patternProperties", "$defs", "definitions"}  # and that hold schemas by name
ALTERNATIVES = {"$ref", "anyOf", "oneOf"}  # merged with what stands beside them, except these:
NEUTRAL = {"$schema", "$id", "$defs", "definitions", "$comment", "title", "description", "default", "examples", "type"}
STRING_OR_COMMENT = re.compile(r'"(\\.|[^"\\\n])*"?|//[^\n]*|/(\\.|[^/\\\n])+/?')


class Vocabulary:
    """The tokens as llguidance wants them: `tokens` for its parsers. trie: structured.TokenTrie."""

    bos_token_id = None

    def __init__(self, trie, encode: Callable[[str], list[int]], eos_token_ids: Iterable[int]) -> None:
        if not NEEDED_BYTES <= trie.single_bytes:
            raise GrammarError("json_schema and grammar need a vocabulary with a token for each byte; use a regex")
        self.trie, self.tokens, self.encode = trie, trie.vocab, encode
        ends = sorted(i for i in eos_token_ids if i < len(trie.vocab)) or [0]
        self.eos_token_id = ends[0]
        self.special_token_ids = np.flatnonzero(~trie.writes).tolist()
        self.longest = max(map(len, trie.vocab))
        self.parser_tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self), len(trie.vocab), ends)

    def __call__(self, data: bytes) -> list[int]:
        """Tokens that write exactly the beginning of `data`: masks of forced bytes are made from the first of them."""
        data = data[:MAX_FORCED]
        text = data.decode("utf-8", errors="ignore")
        data = text.encode() if data.startswith(text.encode()) and text else data
        for before in ("", "\n"):  # some tokenizers put a blank before a text, but not within it
            encoded, begin = before.encode() + data, len(before)
            inside = self.trie.within(self.encode(before + text), encoded, begin, len(encoded))
            if b"".join(self.trie.vocab[i] for i in inside) == data:
                return inside
        ids = []
        while data:  # the longest token that fits
            piece = next(data[:n] for n in range(self.longest, 0, -1) if data[:n] in self.trie.id_of)
            ids.append(self.trie.id_of[piece])
            data = data[len(piece) :]
        return ids


class GrammarMatcher:
    """The same as structured.AutomatonMatcher for a grammar or a JSON schema: a walk of llguidance's parser.

    Where bytes are forced, its masks allow only the first token that the tokenizer would write for them."""

    def __init__(self, parser: llguidance.LLMatcher, vocabulary: Vocabulary) -> None:
        self.parser, self.vocabulary = parser, vocabulary
        self._allowed: np.ndarray | None = None  # at the current position, once it is known

    def fork(self) -> GrammarMatcher:
        return GrammarMatcher(self.parser.deep_copy(), self.vocabulary)

    def allowed(self) -> np.ndarray:
        if self._allowed is None:
            bits = np.frombuffer(self.parser.compute_bitmask(), np.uint8)
            if self.parser.is_error():  # its mask would allow end-of-sequence
                raise GrammarError(f"the grammar cannot go on: {reason(self.parser)}")
            writes = self.vocabulary.trie.writes  # bool [V]
            self._allowed = np.unpackbits(bits, bitorder="little", count=len(writes)).view(bool) & writes
        return self._allowed.copy()

    def advance(self, token: int) -> bool:
        self._allowed = None
        writes = bool(self.vocabulary.trie.writes[token])
        return writes and not self.parser.is_stopped() and self.parser.consume_token(token)

    @property
    def may_end(self) -> bool:
        return self.parser.is_accepting()

    @property
    def is_complete(self) -> bool:  # the empty text is, without having stopped the parser
        return self.may_end and (self.parser.is_stopped() or not self.allowed().any())

    def forced_bytes(self) -> bytes:
        return self.parser.compute_ff_bytes()

    def after_bytes(self, run: bytes) -> GrammarMatcher:
        after = self.fork()
        after.parser.consume_tokens(self.vocabulary(run))
        return after


def reason(parser: llguidance.LLMatcher) -> str:
    """Its error, without the state and the trace that may follow."""
    text = re.split(r"\n<|\n\n", parser.get_error())[0].strip()[:400] or str(parser.stop_reason())
    if text.startswith("NoExtension"):
        return "it allows no text at all; relax the parts that contradict each other"
    return re.sub("Enable 'coerce_one_of'.*", "Use anyOf, or branches that differ in type or in a required const", text)


def compile_grammar(kind: str, source: str, vocabulary: Vocabulary) -> GrammarMatcher:
    """A matcher at its start. kind: "json_schema" (source: its JSON text) or "grammar" (Lark or GBNF)."""
    limit = MAX_SCHEMA if kind == "json_schema" else MAX_GRAMMAR
    if len(source) > limit:
        raise GrammarError(f"{kind} has {len(source)} characters, more than {limit}; use a smaller one")
    name, read = "the JSON schema", json_grammar
    if kind == "grammar":
        name, read = "the Lark grammar (GBNF would have a rule root)", lark_grammar
        if re.search(r"^[ \t]*root\s*::=", source, re.MULTILINE):
            name, read = "the GBNF grammar", gbnf_grammar
    try:
        grammar = read(source)
    except RecursionError:
        raise GrammarError(f"{name} is nested too deeply; flatten it") from None
    except ValueError as error:
        raise GrammarError(f"{name} cannot be used: {error}") from None
    parser = llguidance.LLMatcher(vocabulary.parser_tokens, grammar, log_level=0, limits=LIMITS)
    if not parser.is_error():
        parser.compute_bitmask()
    if parser.is_error():
        raise GrammarError(f"{name} cannot be used: {reason(parser)}")
    return GrammarMatcher(parser, vocabulary)


def json_grammar(source: str) -> str:
    schema = json.loads(source)
    check_schema(schema)
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(enforced(schema)), overrides=JSON_OPTIONS)


def gbnf_grammar(source: str) -> str:
    try:
        return lark_grammar(gbnf_to_lark(source))
    except Exception as error:  # the converter raises bare exceptions
        raise GrammarError(f"{type(error).__name__}: {error}"[:200]) from None


def lark_grammar(lark: str) -> str:
    for begin in re.finditer(r"%json\s*(?=\{)", lark):
        with contextlib.suppress(json.JSONDecodeError):  # the compiler says it with the line
            check_schema(json.JSONDecoder().raw_decode(lark, begin.end())[0])
    rules = STRING_OR_COMMENT.sub("", lark)
    if special := re.search(r"<[^<>\s]+>", rules):
        raise GrammarError(f"it names the special token {special[0]}, which is never allowed; write a text")
    if rules.count("&") > MAX_INTERSECTED:
        raise GrammarError(f"it intersects more than {MAX_INTERSECTED} expressions (&); use fewer")
    if sum(map(rules.count, ":([")) > MAX_DEPTH:
        raise GrammarError(f"it has more than {MAX_DEPTH} rules and groups; use fewer")
    return llguidance.LLMatcher.grammar_from_lark(lark)


def enforced(schema, named: bool = False):
    """The schema, or the schemas by name, with integer formats as ranges, and without a `$schema` that is no draft."""
    if isinstance(schema, list):
        return [enforced(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if named:
        return {name: enforced(part) for name, part in schema.items()}
    schema = {key: part if key in VALUES else enforced(part, key in NAMED) for key, part in schema.items()}
    if "json-schema.org" not in str(schema.get("$schema", "json-schema.org")):
        del schema["$schema"]
    limit, others = INTEGER_FORMATS.get(str(schema.get("format"))), schema.get("allOf", [])
    if limit and isinstance(others, list):
        schema["allOf"] = [*others, {"minimum": -limit, "maximum": limit - 1}]
    return schema


def check_schema(root) -> None:
    """Refuse what the library would run out of time, memory or stack on, and what it does not enforce.

    Work explodes where several schemas are merged into one automaton, by allOf or by what stands beside a $ref. Names
    and references decide which of them meet; here all are taken to meet as soon as something is merged.
    """
    seen: dict[str, set] = {"pattern": set(), "multipleOf": set(), "$ref": set()}  # their values
    names, merged, nodes = set(), False, [root]  # nodes: objects and lists, each behind the one it is in
    for node in nodes:
        if isinstance(node, dict):
            check_object(node)
            for keyword, values in seen.items():
                values |= {node[keyword]} if type(node.get(keyword)) in (str, int, float) else set()
            names |= set(node["patternProperties"]) if isinstance(node.get("patternProperties"), dict) else set()
            merged |= "allOf" in node or not ALTERNATIVES.isdisjoint(node) and len(node.keys() - NEUTRAL) > 1
        nodes += containers(node)
    if merged and len(seen["pattern"]) > MAX_INTERSECTED or len(names) > MAX_PATTERN_NAMES:
        limits = f"{MAX_INTERSECTED} patterns while it merges schemas, or {MAX_PATTERN_NAMES} patternProperties"
        raise GrammarError(f"it holds more than {limits}; use fewer")
    divisors = [d for d in seen["multipleOf"] if not isinstance(d, str) and 0 < d < math.inf]
    multiples = {Fraction(str(divisor)).numerator for divisor in divisors}
    if any(work > MAX_MULTIPLE for work in accumulate(multiples, math.lcm if merged else operator.add)):
        raise GrammarError(f"what it demands by multipleOf passes {MAX_MULTIPLE} in all; use smaller or fewer ones")
    depth: dict[int, int] = {}  # of the object with that id
    for node in reversed(nodes):
        depth[id(node)] = 1 + max((depth[id(part)] for part in containers(node)), default=0)
    if sum(depth[id(referenced(root, str(reference)))] for reference in seen["$ref"]) > MAX_DEPTH:
        raise GrammarError(f"its references lead more than {MAX_DEPTH} levels deep; use fewer")


def containers(node: dict | list) -> list[dict | list]:
    return [part for part in (node.values() if isinstance(node, dict) else node) if isinstance(part, dict | list)]


def referenced(root: dict, reference: str) -> dict | list:
    """What a $ref leads to; the whole schema, if it is no plain path."""
    node = root
    for step in reference.removeprefix("#/").split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        node = node.get(step) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else root


def check_object(schema: dict) -> None:
    lists = [schema[key] for key in ("properties", "required") if isinstance(schema.get(key), dict | list)]
    named, least = {str(name) for names in lists for name in names}, schema.get("minProperties")
    if max(len(schema), len(named)) > MAX_KEYS:
        raise GrammarError(f"an object in it has more than {MAX_KEYS} keys; use fewer")
    if type(least) is int and least > len(named) + 1:
        raise GrammarError(
            "minProperties asks for several undeclared properties with different names, which no grammar can promise; "
            "declare them in properties"
        )
