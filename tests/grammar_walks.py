"""What the tests of structured output share: toy vocabularies, drawn patterns, and walks through the masks."""

import random
import re

import hypothesis.strategies as st

from structured import TokenGuide, TokenTrie

EOS = 0
BYTES = [b""] + [bytes([b]) for b in range(256)]  # id 0 ends, id b + 1 writes byte b
WHOLE = ("ab", "abc", "1", "12", "é", " a", "  ", "\n", '"', '":', '{"', "true", "null", "😀", "aé")
PIECES = BYTES + [word.encode() for word in WHOLE]
PIECES += ["é".encode()[:1], "😀".encode()[:2], "😀".encode()[1:], b"a\xc3", b"\xa9b"]


def random_text(guide: TokenGuide, rng: random.Random, limit: int = 400) -> bytes | None:
    """A text drawn through the masks alone; None when `limit` tokens did not suffice; it ends early where it may."""
    state, written = guide.start, b""
    for _ in range(limit):
        ids = guide.mask(state).nonzero().flatten().tolist()
        assert ids, "a dead end"
        if guide.is_complete(state):
            assert ids == [EOS]
        if EOS in ids and rng.random() < 0.5:
            return written
        token = rng.choice([i for i in ids if i != EOS] or [EOS])
        if token == EOS:
            return written
        written += guide.trie.vocab[token]
        state = guide.advance(state, token)
        assert state
    return None


ALPHABET = "abcé😀01-_ \n"
literals = st.sampled_from([re.escape(c) for c in ALPHABET] + [r"\x41", r"é", r"\t"])
shorthands = st.sampled_from([r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", "."])
class_items = st.one_of(
    st.sampled_from(["a-c", "0-5", "é-ü", "😀-🙏", r"\d", r"\w", r"\S", r"\-", r"\]"]),
    st.sampled_from(list("abcé😀_ ")),
)
classes = st.builds(
    lambda neg, items: f"[{neg}{''.join(items)}]",
    st.sampled_from(["", "^"]),
    st.lists(class_items, min_size=1, max_size=3),
)
quantifiers = st.sampled_from(["?", "*", "+", "{2}", "{1,3}", "{,2}", "{2,}", "*?", "+?", "??", "{1,2}?"])


def grow(inner):
    groups = st.builds(lambda kind, body: f"({kind}{body})", st.sampled_from(["", "?:"]), inner)
    return st.one_of(
        st.builds(lambda parts: "".join(parts), st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda parts: f"(?:{'|'.join(parts)})", st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda body, times: f"{body}{times}", st.one_of(literals, shorthands, classes, groups), quantifiers),
    )


patterns = st.recursive(st.one_of(literals, classes, shorthands), grow, max_leaves=6)


PIECES_TRIE = TokenTrie(PIECES)
JSON_WORDS = (
    '", "',
    '": ',
    "true",
    "false",
    "null",
    "12",
    "0.5",
    "ab",
    "  ",
    "\n    ",
    "}}",
    "]}",
    "é",
    "😀",
    '\\"',
    "-1",
    "[[",
    '{"',
)
JSON_TRIE = TokenTrie(BYTES + [word.encode() for word in JSON_WORDS])
