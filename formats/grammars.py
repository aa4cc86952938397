"""JSON Schema, Lark and GBNF grammars through llguidance: what is read and refused, and a walk through its parser.

The library compiles a schema in a millisecond, but it trusts whoever calls it. So it is told to refuse, by name, what
it does not enforce; what it would never finish compiling is refused beforehand (check_schema); and an error of its
parser, whose mask would then allow the end of the text, is raised as one.

      schema, Lark, GBNF --> checks --> LLMatcher, compiled once --> GrammarMatcher, one copy an answer

Properties come in the order in which the schema declares them; others may follow unless additionalProperties is false.
Of 160 schemas of MaskBench 128 compile, 0.7 ms each, and all instances of these are judged rightly (`python bench.py
maskbench DIR`). The others are refused: not, dependencies, overlapping oneOf, unknown formats.

Source: the documentation of llguidance (syntax.md, json_schema.md). Left out: its own forced tokens (structured.py
finds them for both engines), and special tokens in a grammar, which are never allowed.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from fractions import Fraction

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from automata import GrammarError

NEEDED_BYTES = set(range(0x20, 0xC0)) - {0x7F}  # ASCII, and what finishes a character that some token has begun
# What llguidance is told, whatever a schema's own "x-guidance" says: a keyword that it does not enforce is an error,
# and blanks are bounded (none, a space, or a line break and its indentation): a small model may repeat them for ever.
JSON_OPTIONS = {"lenient": False, "coerce_one_of": False, "item_separator": ",", "key_separator": ":"}
JSON_OPTIONS |= {"whitespace_flexible": True, "whitespace_pattern": r"( |\n {0,12})"}
LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
MAX_SCHEMA, MAX_GRAMMAR = 4 << 20, 256 << 10  # characters
MAX_FORCED = 512  # bytes of a forced run that are encoded to find its first token
INTEGER_FORMATS = {"int32": 2**31, "int64": 2**63}  # the library takes them for annotations
MAX_INTERSECTED, MAX_MULTIPLE, MAX_VISITS = 12, 20_000, 20_000  # what the library would not finish: see check_schema


class Vocabulary:
    """The tokens as llguidance wants them: `tokens` for its parsers. trie: structured.TokenTrie."""

    bos_token_id = None

    def __init__(self, trie, encode: Callable[[str], list[int]], eos_token_ids: Iterable[int]) -> None:
        if not NEEDED_BYTES <= trie.single_bytes:
            raise GrammarError("json_schema and grammar need a vocabulary with a token for each byte; use a regex")
        self.trie, self.tokens, self.encode = trie, trie.vocab, encode
        ends = sorted(i for i in eos_token_ids if i < len(trie.vocab))
        self.eos_token_id = ends[0] if ends else 0
        self.special_token_ids = np.flatnonzero(~trie.writes).tolist()
        self.longest = max(map(len, trie.vocab))
        wrapper = llguidance.TokenizerWrapper(self)
        self.parser_tokens = llguidance.LLTokenizer(wrapper, len(trie.vocab), ends or [0])

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
    """The same for a context-free grammar or a JSON schema: a walk of llguidance's parser.

    Where bytes are forced, its masks allow only the first token that the tokenizer would write for them."""

    def __init__(self, parser: llguidance.LLMatcher, vocabulary: Vocabulary) -> None:
        self.parser, self.vocabulary, self.trie = parser, vocabulary, vocabulary.trie
        self._allowed: np.ndarray | None = None  # at the current position, once it is known

    def fork(self) -> GrammarMatcher:
        return GrammarMatcher(self.parser.deep_copy(), self.vocabulary)

    def allowed(self) -> np.ndarray:
        if self._allowed is None:
            bits = np.frombuffer(self.parser.compute_bitmask(), np.uint8)
            if self.parser.is_error():  # its mask would allow end-of-sequence
                raise GrammarError(f"the grammar cannot go on: {reason(self.parser)}")
            bools = np.unpackbits(bits, bitorder="little", count=len(self.trie.vocab)).view(bool)
            self._allowed = bools & self.trie.writes
        return self._allowed.copy()

    def advance(self, token: int) -> bool:
        self._allowed = None
        return bool(self.trie.writes[token]) and not self.parser.is_stopped() and self.parser.consume_token(token)

    @property
    def may_end(self) -> bool:
        return self.parser.is_accepting()

    @property
    def is_complete(self) -> bool:
        if not self.may_end:
            return False
        return self.parser.is_stopped() or not self.allowed().any()  # the empty text has not stopped it

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
    if kind == "json_schema":
        return _compile(_json_grammar(source), "the JSON schema", vocabulary)
    if is_lark_syntax(source):
        return _compile(_lark_grammar(source), "the Lark grammar", vocabulary)
    try:
        lark = gbnf_to_lark(source)
    except Exception as error:  # the converter raises bare exceptions
        gbnf = f"{type(error).__name__}: {error}"[:200]
        try:
            return _compile(_lark_grammar(source), "it", vocabulary)
        except GrammarError as error:
            raise GrammarError(f"the grammar is neither GBNF ({gbnf}) nor Lark ({error})") from None
    return _compile(_lark_grammar(lark), "the GBNF grammar", vocabulary)


def _compile(grammar: str, name: str, vocabulary: Vocabulary) -> GrammarMatcher:
    parser = llguidance.LLMatcher(vocabulary.parser_tokens, grammar, log_level=0, limits=LIMITS)
    if not parser.is_error():
        parser.compute_bitmask()
    if parser.is_error():
        raise GrammarError(f"{name} cannot be used: {reason(parser)}")
    return GrammarMatcher(parser, vocabulary)


def _json_grammar(source: str) -> str:
    try:
        schema = _enforced(json.loads(source))
        check_schema(schema)
        return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_OPTIONS)
    except RecursionError:
        raise GrammarError("the JSON schema is nested too deeply; flatten it") from None
    except GrammarError:
        raise
    except ValueError as error:
        raise GrammarError(f"the JSON schema cannot be used: {error}") from None


def _enforced(schema):
    """The schema with integer formats as ranges, and without a `$schema` that is no draft of the standard."""
    if isinstance(schema, list):
        return [_enforced(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: part if key in ("const", "enum") else _enforced(part) for key, part in schema.items()}
    if "json-schema.org" not in str(schema.get("$schema", "json-schema.org")):
        del schema["$schema"]
    if isinstance(schema.get("format"), str) and (limit := INTEGER_FORMATS.get(schema["format"])):
        schema["allOf"] = [*schema.get("allOf", []), {"minimum": -limit, "maximum": limit - 1}]
    return schema


def _lark_grammar(lark: str) -> str:
    for found in re.finditer(r"%json\s*(?=\{)", lark):
        try:
            check_schema(json.JSONDecoder().raw_decode(lark, found.end())[0])
        except json.JSONDecodeError:
            pass  # the compiler says it with the line
    rules = re.sub(r'"(\\.|[^"\\])*"|/(\\.|[^/\\])+/', "", lark)
    if special := re.search(r"<[^>\s]+>", rules):
        raise GrammarError(f"the grammar names the special token {special[0]}, which is never allowed; write a text")
    if rules.count("&") > MAX_INTERSECTED:
        raise GrammarError(f"the grammar intersects more than {MAX_INTERSECTED} expressions (&); use fewer")
    return llguidance.LLMatcher.grammar_from_lark(lark)


def check_schema(root: dict) -> None:
    """Refuse what the library would run out of time or memory on: many patterns, or multiples, of one value at once.

    A value is named by the properties that lead to it; allOf and $ref add to what is asked of the same value."""
    patterns: Counter[tuple] = Counter()
    multiples: dict[tuple, Fraction] = {}
    todo: list[tuple] = [(root, (), False, frozenset())]  # schema, value, whether it is merged, $refs on the way to it
    for _ in range(MAX_VISITS):
        if not todo:
            return
        schema, value, merged, refs = todo.pop()
        if not isinstance(schema, dict):
            continue
        patterns[value] += "pattern" in schema
        divisor = schema.get("multipleOf")
        if isinstance(divisor, int | float) and math.isfinite(divisor) and divisor > 0:
            a, b = multiples.get(value, Fraction(1)), Fraction(str(divisor))
            scale = math.lcm(a.denominator, b.denominator)
            multiples[value] = Fraction(math.lcm(int(a * scale), int(b * scale)), scale)
            if max(b.numerator, multiples[value].numerator) > MAX_MULTIPLE:
                raise GrammarError(f"multipleOf {divisor} (or several of one value together) passes {MAX_MULTIPLE}")
        if patterns[value] > MAX_INTERSECTED or len(schema.get("patternProperties") or ()) > 100:
            raise GrammarError(
                f"the JSON schema has more than {MAX_INTERSECTED} patterns for one value, or 100 patternProperties"
            )
        named = {*(schema.get("properties") or ()), *(schema.get("required") or ())}
        if isinstance(least := schema.get("minProperties"), int) and least > len(named) + 1:
            raise GrammarError(
                f"minProperties {least} asks for {least - len(named)} undeclared properties with different names, which"
                " no grammar can promise; declare them in properties"
            )
        reference = schema.get("$ref")
        merged = merged or "allOf" in schema or isinstance(reference, str) and len(schema) > 1
        for key, part in schema.items():
            if isinstance(part, dict) and key in ("properties", "patternProperties"):
                todo += [(inner, (*value, name), merged, refs) for name, inner in part.items()]
            elif isinstance(part, list) and key in ("allOf", "anyOf", "oneOf"):
                todo += [(inner, value if merged else (*value, i), merged, refs) for i, inner in enumerate(part)]
            elif key in ("items", "additionalProperties"):
                todo.append((part, (*value, f"/{key}"), merged, refs))
        if isinstance(reference, str) and reference.startswith("#") and reference not in refs:
            target = root
            for step in reference.split("/")[1:]:
                target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
            todo.append((target, value, merged, refs | {reference}))
