"""What the tests of structured output share: toy tokenizers, drawn patterns, and walks through the masks."""

import random
import re

import hypothesis.strategies as st

from sampling import SamplingParams
from structured import Guide, Guides

EOS = 0
BYTES = [b""] + [bytes([b]) for b in range(256)]  # id 0 ends, id b + 1 writes byte b
PIECES = ["ab", "abc", "1", "12", "é", " a", "  ", "\n", '"', '":', '{"', "true", "null", "😀", "aé"]
PIECES = BYTES + [piece.encode() for piece in PIECES]
PIECES += ["é".encode()[:1], "😀".encode()[:2], "😀".encode()[1:], b"a\xc3", b"\xa9b"]
JSON_PIECES = '", "|": |true|false|null|12|0.5|ab|  |\n    |}}|]}|é|😀|\\"|-1|[[|{"'.split("|")
JSON_PIECES = BYTES + [piece.encode() for piece in JSON_PIECES]


class ToyTokenizer:
    """Writes the longest piece that fits; what follows changes how a run ends, as in real tokenizers."""

    def __init__(self, vocab: list[bytes], blank: bool = False) -> None:
        self.vocab, self.vocab_size, self.blank = vocab, len(vocab), blank
        self.by_length = sorted((i for i, piece in enumerate(vocab) if piece), key=lambda i: -len(vocab[i]))

    def is_special(self, i: int) -> bool:
        return not self.vocab[i]

    def token_bytes(self, i: int) -> bytes:
        return self.vocab[i]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        data, ids = (" " * self.blank + text).encode(), []
        while data:
            ids.append(next(i for i in self.by_length if data.startswith(self.vocab[i])))
            data = data[len(self.vocab[ids[-1]]) :]
        return ids

    def decode(self, ids) -> str:
        return b"".join(self.vocab[i] for i in ids).decode(errors="replace")


def toy_guides(vocab: list[bytes], ends=(EOS,), jump: bool = False, size: int | None = None, **options) -> Guides:
    return Guides(ToyTokenizer(vocab, **options), size or len(vocab), ends, jump_forward=jump)


BYTE_GUIDES, PIECE_GUIDES, JSON_GUIDES = toy_guides(BYTES), toy_guides(PIECES), toy_guides(JSON_PIECES)


def guide_for(guides: Guides, prompt=(), ignore_eos: bool = False, **shape) -> Guide:
    return guides.answer(SamplingParams(ignore_eos=ignore_eos, **shape), list(prompt))


def accepts(guides: Guides, text: str | bytes, **shape) -> bool:
    """Whether the whole text may be written, byte by byte, and end there."""
    guide = guide_for(guides, **shape)
    ids = [byte + 1 for byte in (text.encode() if isinstance(text, str) else text)]
    return guide.trim([*ids, EOS]) == [*ids, EOS]


def random_text(guide: Guide, rng: random.Random, limit: int = 400) -> str | None:
    """A text drawn through the masks alone; None when `limit` tokens did not suffice; it ends early where it may."""
    guide, written = guide.fork(), b""
    for _ in range(limit):
        if guide.is_complete:
            return written.decode()
        ids = guide.mask().nonzero().flatten().tolist()
        assert ids, "a dead end"
        if EOS in ids and (rng.random() < 0.5 or ids == [EOS]):
            return written.decode()
        token = rng.choice([i for i in ids if i != EOS])
        written += guide.guides.trie.vocab[token]
        guide.commit(token)
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
