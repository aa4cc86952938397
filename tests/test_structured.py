"""Token masks against brute force, walks that cannot get stuck, where a text may end, and jumps over forced runs."""

import json
import random
import re

import hypothesis.strategies as st
import pytest
import torch
from grammar_walks import BYTES, EOS, PIECES, PIECES_TRIE, patterns, random_text
from hypothesis import given, settings

from dfa import START
from regular import GrammarError
from structured import TokenGuide, TokenTrie, compile_choice, compile_json_schema, compile_regex, guide_for


def brute_mask(guide: TokenGuide, state: int) -> list[bool]:
    """Allowed = the bytes can be walked one by one and acceptance is still reachable from where they lead."""
    dfa = guide.dfa
    alive = dfa.accepting.copy()
    while True:
        more = alive | alive[dfa.table].any(1)
        if (more == alive).all():
            break
        alive = more
    allowed = []
    for piece in guide.trie.vocab:
        here = state
        for byte in piece:
            here = int(dfa.table[here, dfa.byte_class[byte]])
        allowed.append(bool(piece) and here != 0 and bool(alive[here]))
    for eos in guide.eos_ids:
        allowed[eos] = bool(dfa.accepting[state])
    return allowed


@settings(max_examples=50)
@given(patterns)
def test_masks_equal_brute_force(pattern):
    guide = TokenGuide(compile_regex(pattern), PIECES_TRIE, [EOS])
    for state in range(START, min(len(guide.dfa.table), 12)):
        assert guide.mask(state).tolist() == brute_mask(guide, state)


def test_masks_equal_brute_force_on_the_default_vocabulary(smollm2):
    from checkpoint import open_checkpoint
    from tokenizer import Tokenizer

    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(smollm2))
    trie = TokenTrie.from_tokenizer(tokenizer)
    assert len(trie.vocab) == 49152
    schema = {"properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["name"]}
    rng = random.Random(0)
    for dfa in (compile_json_schema(schema), compile_regex(r"[\w.]+@[a-z]+\.(com|org)"), compile_regex("[😀-🙏]{2}")):
        guide = TokenGuide(dfa, trie, tokenizer.eos_token_ids)
        states = list(range(START, len(dfa.table)))
        for state in rng.sample(states, min(6, len(states))):
            assert guide.mask(state).tolist() == brute_mask(guide, state)
    assert not any(trie.vocab[i] for i in range(len(trie.vocab)) if tokenizer.is_special(i))


# Tokens


def test_choice_is_exact_and_F57_bad_choices_are_refused():
    guide = TokenGuide(compile_choice(["yes", "no", "nö", ""]), PIECES_TRIE, [EOS])
    rng = random.Random(0)
    assert {random_text(guide, rng).decode() for _ in range(60)} == {"yes", "no", "nö", ""}
    for bad in ("yes", [], [1], ["\ud800"]):
        with pytest.raises(GrammarError):
            compile_choice(bad)


def test_F58_characters_of_several_byte_tokens_are_produced():
    guide = TokenGuide(compile_regex("[😀-🙏]{2}"), PIECES_TRIE, [EOS])
    rng = random.Random(3)
    texts = {random_text(guide, rng).decode() for _ in range(50)}
    assert all(re.fullmatch("[😀-🙏]{2}", t) for t in texts) and len(texts) > 20
    assert TokenGuide(compile_regex(" a b"), PIECES_TRIE, [EOS]).mask(START)[PIECES.index(b" a")]


def test_F58_no_dead_end_where_single_bytes_are_missing():
    """Vocabulary without the byte 'c': 'abc' must be entered through the token "bc" only, and "ac" never begun."""
    vocab = [b"", b"a", b"b", b"bc", b"d", b"", b"\xc3", b"\xc3\xa9"]
    guide = TokenGuide(compile_regex("abc|ac|d|ab?é"), vocab, [EOS])
    rng = random.Random(0)
    assert {random_text(guide, rng).decode() for _ in range(80)} == {"abc", "d", "aé", "abé"}
    first = guide.advance(guide.start, 1)
    assert guide.mask(first).tolist() == [False, False, True, True, False, False, False, True]
    assert guide.walk(guide.start, [1, 6]) == [first]
    with pytest.raises(GrammarError, match="vocabulary cannot write"):
        TokenGuide(compile_regex("xyz"), vocab, [EOS])


def test_F58_completeness_counts_tokens_and_not_bytes():
    guide = TokenGuide(compile_regex("a(cc)?"), [b"", b"a", b"c"], [EOS])
    after = guide.advance(guide.start, 1)
    assert guide.is_accepting(after) and not guide.is_complete(after)
    guide = TokenGuide(compile_regex("a(cd)?"), [b"", b"a", b"c"], [EOS])
    after = guide.advance(guide.start, 1)
    assert guide.is_complete(after) and guide.mask(after).tolist() == [True, False, False]


def test_F59_end_of_sequence_only_where_the_automaton_accepts():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    vocab = BYTES + [b"</s>"]  # a second end id whose text must not count
    guide = TokenGuide(compile_json_schema(schema), vocab, [EOS, 257])
    state = guide.start
    for byte in b'{"a": "x</s>y"}':
        assert not guide.mask(state)[EOS] and not guide.mask(state)[257]
        assert guide.advance(state, 257) == 0
        state = guide.advance(state, byte + 1)
    assert guide.is_complete(state) and guide.mask(state).nonzero().flatten().tolist() == [EOS, 257]
    assert guide.advance(state, EOS) == state
    with pytest.raises(GrammarError, match="end-of-sequence"):
        TokenGuide(compile_regex("a"), vocab, [])


def test_F60_blanks_are_bounded_for_a_model_that_loves_them():
    """A stub that takes blanks whenever it may, and else the shortest way to the end."""
    vocab = BYTES + [b"  ", b"\n\n", b" \n", b"        "]
    blanks = [i for i, piece in enumerate(vocab) if piece and not piece.strip(b" \n\t")]
    closing = [b'"'[0] + 1, b"}"[0] + 1, b"]"[0] + 1, b":"[0] + 1, b"0"[0] + 1]
    schemas = [
        {"type": "object"},
        {"properties": {"a": {"type": "string"}, "b": {"type": "array"}}, "required": ["a", "b"]},
    ]
    for schema in schemas:
        guide = TokenGuide(compile_json_schema(json.dumps(schema)), vocab, [EOS])
        state, written = guide.start, b""
        for _ in range(200):
            allowed = guide.mask(state)
            token = next(i for i in [*blanks, EOS, *closing, *range(len(vocab))] if allowed[i])
            if token == EOS:
                break
            written, state = written + vocab[token], guide.advance(state, token)
        assert token == EOS and written.endswith(b"}")
        assert set(schema.get("required", [])) <= set(json.loads(written))


def test_dead_states_and_drafts():
    guide = TokenGuide(compile_regex("ab"), BYTES, [EOS])
    a, b = ord("a") + 1, ord("b") + 1
    assert guide.advance(guide.start, b) == 0 and guide.advance(guide.start, EOS) == 0
    assert len(guide.walk(guide.start, [a, b, a])) == 2 and guide.walk(guide.start, [b]) == []
    assert len(guide.walk(guide.start, [a, b, EOS])) == 3
    with pytest.raises(ValueError, match="already violated"):
        guide.mask(0)


def test_masks_are_kept_and_bounded(monkeypatch):
    monkeypatch.setattr("structured.KEPT_MASKS", 2)
    guide = TokenGuide(compile_regex("abcd"), BYTES, [EOS])
    first = guide.mask(1)
    assert guide.mask(1) is first and first.dtype == torch.bool
    guide.mask(2), guide.mask(3)
    assert len(guide._masks) == 2 and guide.mask(1) is not first


def test_guides_are_built_once_for_each_constraint_and_tokenizer():
    other = TokenTrie(BYTES)
    one = guide_for("regex", "a+", PIECES_TRIE, (EOS,))
    assert guide_for("regex", "a+", PIECES_TRIE, (EOS,)) is one and guide_for("regex", "a+", other, (EOS,)) is not one
    assert guide_for("choice", '["a+"]', PIECES_TRIE, (EOS,)).dfa.accepts(b"a+")
    assert guide_for("json_schema", '{"const": 1}', PIECES_TRIE, (EOS,)).dfa.accepts(b"1")


def test_logits_wider_than_the_vocabulary_and_special_tokens_are_masked():
    class Toy:
        vocab_size = 3

        def is_special(self, i):
            return i == 0

        def token_bytes(self, i):
            return [b"a", b"a", b"b"][i]

    guide = TokenGuide(compile_regex("a"), TokenTrie.from_tokenizer(Toy(), size=5), [0])
    assert guide.mask(guide.start).tolist() == [False, True, False, False, False]


# Jump-forward

WORDS = {
    b"name": 300,
    b'{"': 301,
    b'": ': 302,
    b'": "': 303,
    b' "': 304,
    b'",': 305,
    b"age": 306,
    b" a": 307,
    b"ab": 308,
}
JUMP_VOCAB = BYTES + [b""] * (300 - len(BYTES)) + list(WORDS)


def encode(text: str) -> list[int]:
    """Greedy: the longest word that fits, else a byte; what follows changes how a run ends, as in real tokenizers."""
    data, ids = text.encode(), []
    while data:
        word = max((w for w in WORDS if data.startswith(w)), key=len, default=data[:1])
        ids.append(WORDS.get(word, word[0] + 1))
        data = data[len(word) :]
    return ids


def test_jumps_append_what_the_tokenizer_would_write():
    schema = {"properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name", "age"]}
    guide = TokenGuide(compile_json_schema(schema, blanks="fixed"), JUMP_VOCAB, [EOS])
    assert guide.forced(guide.start) == b'{"name": "'
    assert guide.jump(guide.start, encode, "") == [301, 300, 303]
    state = guide.walk(guide.start, [301, 300, 303])[-1]
    assert guide.forced(state) == b"" and guide.jump(state, encode, '{"name": "') == []
    state = guide.dfa.run(state, b'x"')
    assert guide.forced(state) == b', "age": '
    assert guide.jump(state, encode, '{"name": "x"') == []  # the tokenizer would have joined the quote and the comma
    state = guide.dfa.run(state, b",")
    assert guide.jump(state, encode, '{"name": "x",') == [304, 306, 302]


def test_jumps_leave_out_a_last_token_that_may_merge():
    guide = TokenGuide(compile_regex("namea(b|c)"), JUMP_VOCAB, [EOS])
    assert guide.forced(guide.start) == b"namea" and guide.jump(guide.start, encode, "") == [300]
    guide = TokenGuide(compile_regex("namea"), JUMP_VOCAB, [EOS])
    assert guide.jump(guide.start, encode, "") == [300, ord("a") + 1]


def test_jumps_wait_where_a_token_reaches_across_the_beginning_of_the_run():
    guide = TokenGuide(compile_regex('x",,(b|c)'), JUMP_VOCAB, [EOS])
    state = guide.dfa.run(guide.start, b'x"')
    assert guide.forced(state) == b",," and guide.jump(state, encode, 'x"') == []
    assert guide.jump(guide.dfa.run(state, b","), encode, 'x",') == [ord(",") + 1]


def test_jumps_never_begin_or_end_inside_a_character():
    guide = TokenGuide(compile_regex("é[😀-🙏]x"), JUMP_VOCAB, [EOS])
    assert guide.forced(guide.start) == "é".encode() + b"\xf0\x9f"
    jumped = guide.jump(guide.start, encode, "")
    assert b"".join(JUMP_VOCAB[i] for i in jumped) in ("é".encode(), "é".encode()[:1])
    inside = guide.dfa.run(guide.start, "é".encode()[:1])
    assert guide.forced(inside)[0] & 0xC0 == 0x80 and guide.jump(inside, encode, "\ufffd") == []


def test_jumps_survive_a_tokenizer_that_puts_a_blank_in_front_and_never_use_special_ids():
    guide = TokenGuide(compile_regex("name"), JUMP_VOCAB, [EOS])
    assert guide.jump(guide.start, lambda text: encode(" " + text), "") == [300]
    assert guide.jump(guide.start, lambda text: encode(" " + text), "x") == [300]
    assert guide.jump(guide.start, lambda text: [EOS], "") == []
    assert guide.jump(guide.start, lambda text: [299, 10**6], "") == []


@settings(max_examples=80)
@given(
    st.lists(st.sampled_from(["name", "age", "x"]), min_size=1, max_size=3, unique=True),
    st.randoms(use_true_random=False),
)
def test_walks_with_jumps_give_valid_json(names, rng):
    schema = {"properties": {n: {"type": "integer"} for n in names}, "required": names}
    guide = TokenGuide(compile_json_schema(schema, rng.choice(["fixed", "flexible"])), JUMP_VOCAB, [EOS])
    state, written = guide.start, b""
    while not guide.is_complete(state):
        jumped = guide.jump(state, encode, written.decode())
        ids = jumped or [rng.choice(guide.mask(state).nonzero().flatten().tolist())]
        written += b"".join(JUMP_VOCAB[i] for i in ids)
        state = guide.walk(state, ids)[-1]
    assert list(json.loads(written)) == names
