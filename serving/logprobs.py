"""Log-probabilities as the two APIs return them: which tokens, under which names, at which place in the text.

A token is bytes, and may be a third of an emoji; what is returned beside the text must name it without U+FFFD, say
where in the text it stands, and must not show a token of a stop string whose text was withheld. So a token's offset is
where its first character will stand once it is whole, and it is let out when the text has been shown up to there:

    tokens      "A"  "BC"  "DE"  "F"            stop = "BCDEF"
    offset       0    1     3     5
    shown text  "A"  (BC, DE held back, then withheld)      -> only "A" is let out

The token that ended the answer (EOS) is left out. The bytes of all entries joined are the bytes of the text.
Source: OpenAI's API reference, `logprobs`. Left out: token ids, which the APIs have no field for.
"""

from __future__ import annotations

from collections import deque

from request import Delta, Request
from sampling import Sampled
from tokenizer import Tokenizer

LEAST = -9999.0  # JSON knows no -inf; OpenAI's own value for "practically never"


class ShownTokens:
    """The tokens of one answer with their offsets, let out as the text is shown."""

    def __init__(self, request: Request):
        self._decoder = request.tokenizer.detokenizer(request.prompt_ids)
        if request.guide is not None:  # as in the answer itself: its text begins afresh
            self._decoder.finish()
        self._decoded = self._shown = 0  # characters
        self._waiting: deque[tuple[Sampled, int]] = deque()

    def feed(self, delta: Delta) -> list[tuple[Sampled, int]]:
        """The tokens that this delta's text shows, each with the offset of its first character."""
        for sampled in delta.logprobs:
            self._waiting.append((sampled, self._decoded + self._decoder.gap(sampled.token)))
            self._decoded += len(self._decoder.add([sampled.token]))
        self._shown += len(delta.text)
        end = self._shown
        if delta.finish_reason is not None and not isinstance(delta.stop_reason, str):
            end = self._decoded + 1  # everything was shown, but for the token that ended it
            if isinstance(delta.stop_reason, int) and self._waiting:
                self._waiting.pop()
        shown = []
        while self._waiting and self._waiting[0][1] < end:
            shown.append(self._waiting.popleft())
        return shown


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; one that is no whole characters as bytes:\\x.., an id the tokenizer does not know as <id N>."""
    data = tokenizer.token_bytes(token)
    if not data:
        return f"<id {token}>"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict:
    data = None if tokenizer.is_special(token) else list(tokenizer.token_bytes(token))
    return {"token": token_name(tokenizer, token), "logprob": max(logprob, LEAST), "bytes": data}


def chat_logprobs(tokenizer: Tokenizer, tokens: list[tuple[Sampled, int]]) -> dict:
    """The schema of the chat API."""
    content = []
    for sampled, _ in tokens:
        top = [_entry(tokenizer, *pair) for pair in sampled.top or ()]
        content.append(_entry(tokenizer, sampled.token, sampled.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, tokens: list[tuple[int, Sampled | None, int]], top: bool) -> dict:
    """The schema of the completion API: four lists side by side. `tokens` holds (id, score, offset in the text); the
    first of a prompt has no score. With `top`, the best tokens are returned, and the one that was drawn."""
    best: list[dict[str, float] | None] = []
    for _, sampled, _ in tokens:
        pairs = [] if sampled is None else [*(sampled.top or ()), (sampled.token, sampled.logprob)]
        best.append({token_name(tokenizer, t): max(p, LEAST) for t, p in pairs} if pairs else None)
    return {
        "tokens": [token_name(tokenizer, token) for token, _, _ in tokens],
        "token_logprobs": [None if sampled is None else max(sampled.logprob, LEAST) for _, sampled, _ in tokens],
        "top_logprobs": best if top else None,
        "text_offset": [offset for _, _, offset in tokens],
    }


def prompt_offsets(tokenizer: Tokenizer, ids: list[int], prompt: str | None) -> tuple[str, list[int]]:
    """The text of a prompt as it is echoed, and the offset of each of its tokens in it. What the tokenizer put around a
    text (BOS) takes no room in it; control strings that the text itself spells do."""
    shown = range(len(ids))
    if prompt is not None:
        bare = tokenizer.encode(prompt, add_special_tokens=False)
        starts = (i for i in range(len(ids) - len(bare) + 1) if ids[i : i + len(bare)] == bare)
        start = next(starts, 0)
        shown = range(start, start + len(bare))
    decoder = tokenizer.detokenizer(skip_special_tokens=False)
    offsets, text = [], ""
    for i, token in enumerate(ids):
        offsets.append(len(text) + (decoder.gap(token) if i in shown else 0))
        text += decoder.add([token]) if i in shown else ""
    return text + decoder.finish(), offsets
