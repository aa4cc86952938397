"""From token ids back to text, while the tokens are still arriving.

The problem. A token is a run of *bytes*, and its edges fall where the training corpus put them: in the middle of an
emoji, before a space, inside a stop string. Whoever decodes each token alone and glues the strings together prints
U+FFFD for half a character, loses the spaces that SentencePiece keeps at the front of words, and streams the first
half of a stop string that should never have been seen.

The idea. Two small machines in a row. The first turns ids into bytes and bytes into characters, and keeps what is not
a whole character yet. The second passes text on, and keeps what may be the beginning of a stop string.

    ids      [ 9906, 61496, 222, 43 ]
    bytes    "hi " F0 9F | 98 | 80 "S" ...
    Detokenizer   "hi "   ""    "😀S"            <- an unfinished character waits here
    StopChecker   "hi "   ""    "😀" (holds "S") <- "S" may begin the stop string "STOP"

Each token costs its own length, however long the text has grown: nothing is decoded twice. (The usual way, decoding a
sliding window of ids with and without the newest one, costs more and is exact only for windows that are wide enough.)

Exactness. Whatever the grouping of the ids, the pieces joined equal the decoding of the whole, because UTF-8 decoding
of a byte string does not depend on how the bytes arrived. Bytes that never become a character turn into U+FFFD, by the
rule of the Unicode Standard, section 3.9 ("maximal subparts"), as soon as this is certain and not before.

Left out: clean-up of spaces before punctuation (`clean_up_tokenization_spaces`). It rewrites text that was already
sent, and it makes "x != y ." come back as another string than went in.
"""

import codecs
from collections.abc import Callable, Iterable


class Detokenizer:
    """Text of a growing sequence of ids.

    `to_bytes` maps an id to the bytes it contributes (b"" for ids to be skipped and for ids beyond the vocabulary).
    `strip_first_space` drops one space at the very start of the text: SentencePiece writes one before the first word.
    The prompt is consumed first and not reported, but it decides two things at the seam: whether that first space is
    still to come, and which bytes of a character the prompt has already supplied.
    """

    def __init__(self, to_bytes: Callable[[int], bytes], prompt_ids: Iterable[int] = (), strip_first_space=False):
        self._to_bytes = to_bytes
        self._strip = strip_first_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._decode(prompt_ids)
        self._chunks: list[str] = []

    def add(self, token_ids: Iterable[int]) -> str:
        """The text that these ids made certain: whole characters only; "" while a character is unfinished."""
        return self._keep(self._decode(token_ids))

    def finish(self) -> str:
        """What is still held back: U+FFFD for a character that will never be completed, else ""."""
        return self._keep(self._utf8.decode(b"", final=True))

    def gap(self, token_id: int) -> int:
        """How many U+FFFD this id's text will stand behind, as it cannot continue the character that is unfinished."""
        waiting, first = self._utf8.getstate()[0], self._to_bytes(token_id)[:1]
        try:
            codecs.getincrementaldecoder("utf-8")().decode(waiting + first)
        except UnicodeDecodeError:
            return len(waiting.decode(errors="replace"))
        return 0

    @property
    def text(self) -> str:
        """Everything reported so far."""
        self._chunks = ["".join(self._chunks)]
        return self._chunks[0]

    def _decode(self, token_ids: Iterable[int]) -> str:
        data = b"".join(map(self._to_bytes, token_ids))
        if self._strip and data:
            data = data.removeprefix(b" ")
            self._strip = False
        return self._utf8.decode(data)

    def _keep(self, text: str) -> str:
        self._chunks.append(text)
        return text


class StopChecker:
    """Ends a text at the first stop string, without ever showing a piece of it.

    The match that *completes* first wins, and of two that complete at the same character the longer one: so the answer
    is the one a reader of single characters would give, however the text is cut into chunks.

    `include_stop_str` lets the matched string itself through. Raises ValueError for an empty stop string: it would
    match everything at once.
    """

    def __init__(self, stop: str | list[str] | None = None, include_stop_str: bool = False):
        stops = [stop] if isinstance(stop, str) else list(stop or ())
        for item in stops:
            if not isinstance(item, str) or not item:
                raise ValueError(f"stop holds {item!r}: every stop string needs at least one character; leave it out")
        self._stops = stops
        self._include = include_stop_str
        # The longest run of characters that can be a beginning of a stop string without being all of it.
        self._longest = max((len(item) - 1 for item in stops), default=0)
        self._held = ""  # a proper beginning of some stop string, not released yet
        self.matched: str | None = None

    def feed(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """Text that is safe to show now, and the stop string that ended it (None: go on).

        With `armed=False` nothing is looked for and everything is released (a request below its `min_tokens`): a stop
        string that began there never matches. After a match all further text is swallowed.
        """
        if self.matched is not None:
            return "", self.matched
        text = self._held + text
        self._held = ""
        if not armed:
            return text, None
        if match := self._first_match(text):
            start, end = match
            self.matched = text[start:end]
            return text[: end if self._include else start], self.matched
        keep = self._possible_beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """At the end of the text: what was held back after all did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int] | None:
        found = [(start + len(item), start) for item in self._stops if (start := text.find(item)) >= 0]
        if not found:
            return None
        end, start = min(found)
        return start, end

    def _possible_beginning(self, text: str) -> int:
        for length in range(min(self._longest, len(text)), 0, -1):
            tail = text[-length:]
            if any(item.startswith(tail) for item in self._stops):
                return length
        return 0
