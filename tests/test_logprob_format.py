"""Tokens beside their text: names, places, and what is let out when."""

from types import SimpleNamespace

from hypothesis import given
from tiny_tokenizer import texts, tiny

from request import Delta
from sampling import Sampled
from serving.logprobs import LEAST, ShownTokens, chat_logprobs, completion_logprobs, prompt_offsets, token_name

TOKENIZER = tiny("bytes")


def shown_tokens(prompt: str = "") -> ShownTokens:
    return ShownTokens(SimpleNamespace(tokenizer=TOKENIZER, prompt_ids=TOKENIZER.encode(prompt, False), guide=None))


def delta(text: str, ids, reason=None, stop=None) -> Delta:
    return Delta(None, 0, text, list(ids), [Sampled(i, -1.0, 1, []) for i in ids], reason, stop)


def names(out) -> list[tuple[str, int]]:
    return [(token_name(TOKENIZER, sampled.token), place) for sampled, place in out]


def test_tokens_are_let_out_with_their_text():
    x, *smile = TOKENIZER.encode("x😀", False)
    y = TOKENIZER.encode("y", False)[0]
    path = shown_tokens()
    assert names(path.feed(delta("x", [x]))) == [("x", 0)]
    assert path.feed(delta("", smile[:2])) == []
    out = names(path.feed(delta("😀", [*smile[2:], y], None)))  # "y" is held back by a stop string
    assert [place for _, place in out] == [1] * len(smile) and out[0][0].startswith("bytes:\\xf0")
    assert path.feed(delta("", [], "stop", "yz")) == []  # it was the beginning of the stop string


def test_the_token_that_ends_is_left_out_and_held_text_is_let_out():
    x, y = TOKENIZER.encode("xy", False)
    assert names(shown_tokens().feed(delta("xy", [x, y, 1], "stop", 1))) == [("x", 0), ("y", 1)]
    assert names(shown_tokens().feed(delta("xy", [x, y], "length"))) == [("x", 0), ("y", 1)]


def test_a_token_behind_a_broken_character_is_placed_and_withheld_with_its_own_text():
    x, y, *smile = TOKENIZER.encode("xy😀", False)
    ids = [x, smile[0], y, smile[0], smile[0], x]
    shown = TOKENIZER.decode(ids)
    assert shown == "x\ufffdy\ufffd\ufffdx"
    out = names(shown_tokens().feed(delta(shown, ids, "length")))
    assert [place for _, place in out] == [0, 1, 2, 3, 4, 5]
    assert (
        names(shown_tokens().feed(delta("x\ufffd", ids[:3], "stop", "y")))[-1][1] == 1
    )  # the stop string's token is not told
    assert prompt_offsets(TOKENIZER, ids, None) == (shown, [0, 1, 2, 3, 4, 5])
    surrogate = [next(i for i in range(300) if TOKENIZER.token_bytes(i) == byte) for byte in (b"\xed", b"\xbe")]
    out = names(shown_tokens().feed(delta("\ufffd\ufffdx", [*surrogate, x], "length")))
    assert out[-1] == ("x", 2)


def test_a_structured_answer_does_not_finish_the_prompts_character():
    smile = TOKENIZER.encode("😀", False)
    (x,) = TOKENIZER.encode("x", False)
    for guided, place in ((object(), 0), (None, 1)):
        path = ShownTokens(SimpleNamespace(tokenizer=TOKENIZER, prompt_ids=smile[:1], guide=guided))
        assert names(path.feed(delta("x" if guided else "\ufffdx", [x], "length"))) == [("x", place)]


@given(texts)
def test_joined_bytes_are_the_text_and_places_are_where_it_stands(text):
    ids = TOKENIZER.encode(text, False)
    shown = TOKENIZER.decode(ids)
    out = shown_tokens().feed(delta(shown, ids, "length"))
    content = chat_logprobs(TOKENIZER, out)["content"]
    assert b"".join(bytes(entry["bytes"] or []) for entry in content) == shown.encode()
    table = completion_logprobs(TOKENIZER, [(s.token, s, place) for s, place in out], top=False)
    assert table["text_offset"] == sorted(table["text_offset"]) and table["top_logprobs"] is None
    for name, place, (sampled, _) in zip(table["tokens"], table["text_offset"], out, strict=True):
        if not name.startswith("bytes:") and not TOKENIZER.is_special(sampled.token):
            assert shown[place:].startswith(name)


@given(texts.filter(bool))
def test_a_prompt_is_echoed_as_it_was_written(text):
    ids = TOKENIZER.encode(text)
    shown, places = prompt_offsets(TOKENIZER, ids, text)
    assert shown == text and len(places) == len(ids) and places[0] == 0


def test_unlikely_and_unknown_tokens():
    sampled = Sampled(9999, float("-inf"), 9, [(5, -1.0)])
    table = completion_logprobs(TOKENIZER, [(9999, sampled, 10), (5, None, 10)], top=True)
    assert table["tokens"][0] == "<id 9999>" and table["token_logprobs"] == [LEAST, None]
    assert table["top_logprobs"][0]["<id 9999>"] == LEAST and table["top_logprobs"][1] is None
    assert table["text_offset"] == [10, 10]
    special = chat_logprobs(TOKENIZER, [(Sampled(TOKENIZER.eos_token_ids[0], -1.0, 1, []), 0)])
    assert special["content"][0]["bytes"] is None
