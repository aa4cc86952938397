"""Text to ids and back, while the tokens are still arriving.

The problem. Every mistake here is silent: a doubled BOS, a user's text that becomes a control token. And a token is a
run of *bytes*, whose edges fall in the middle of an emoji or of a stop string.

The idea. The `tokenizers` library does the merging (byte-pair encoding, Sennrich et al. 2016). This file decides what
stands around a text, what a user may spell, which bytes an id adds, and when a character or a stop string is complete:

    ids           [ 9906, 61496, 222, 43 ]
    bytes         "hi " F0 9F | 98 | 80 "S" ...
    Detokenizer   "hi "   ""    "😀S"               an unfinished character waits here
    StopChecker   "hi "   ""    "😀" (holds "S")    "S" may begin the stop string "STOP"

Left out: clean-up of spaces before punctuation (it rewrites text that was already sent); tokenizer.model without
tokenizer.json (convert it with transformers); WordPiece and word-level vocabularies.
"""

import codecs
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import repeat
from pathlib import Path
from typing import Any

import tokenizers

from formats import gguf_vocab
from formats.chat_template import ChatTemplate, ControlStrings, Shield
from formats.tokenizer_files import content_of, decoding_of, read_json, read_library, read_templates

BLANKS = re.compile(r"\s*")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the library's threads would compete with the engine's
SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token")


class Detokenizer:
    """Text of a growing sequence of ids; nothing is decoded twice, and the pieces joined are the text of the whole.

    Bytes that never become a character turn into U+FFFD as soon as this is certain (Unicode Standard, section 3.9).
    `to_bytes` maps an id to the bytes it adds. The prompt is not reported, but it decides whether one space at the
    start is still to be dropped (`strip_first_space`: SentencePiece writes it) and which bytes it left unfinished.
    """

    def __init__(self, to_bytes: Callable[[int], bytes], prompt_ids: Iterable[int] = (), strip_first_space=False):
        self._to_bytes = to_bytes
        self._strip = strip_first_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.add(prompt_ids)

    def add(self, token_ids: Iterable[int]) -> str:
        """The text that these ids made certain: whole characters only; "" while a character is unfinished."""
        data = b"".join(map(self._to_bytes, token_ids))
        if self._strip and data:
            data = data.removeprefix(b" ")
            self._strip = False
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What is still held back: U+FFFD for a character that will never be completed, else ""."""
        return self._utf8.decode(b"", final=True)

    def gap(self, token_id: int) -> int:
        """How many U+FFFD this id's text will stand behind, as it cannot continue the character that is unfinished."""
        waiting, first = self._utf8.getstate()[0], self._to_bytes(token_id)[:1]
        try:
            codecs.getincrementaldecoder("utf-8")().decode(waiting + first)
        except UnicodeDecodeError:
            return len(waiting.decode(errors="replace"))
        return 0


class StopChecker:
    """Ends a text at the first stop string, without ever showing a piece of it.

    The match that *completes* first wins, and of two that complete at the same character the longer one: so the answer
    is the one a reader of single characters would give, however the text is cut into chunks. `include_stop_str` shows
    the matched string, too. Raises ValueError for an empty stop string: it would match everything at once.

    Special tokens add no text, and still count: what stops is in the text with them, or in the text without. So the
    characters of both wait in one list, and each says whether it is shown.
    """

    def __init__(self, stop: str | Iterable[str] | None = (), include_stop_str: bool = False):
        self._stops = [stop] if isinstance(stop, str) else list(stop or ())
        if not all(self._stops):
            raise ValueError("stop holds an empty string: each needs at least one character; leave it out")
        self._include = include_stop_str
        # The longest run of characters that can be a beginning of a stop string without being all of it.
        self._longest = max(map(len, self._stops), default=1) - 1
        self._held: list[tuple[str, bool]] = []  # from a proper beginning of some stop string on
        self.matched: str | None = None

    def feed(self, text: str, armed: bool = True, special: str = "") -> tuple[str, str | None]:
        """Text that is safe to show now, and the stop string that ended it (None: go on).

        `special` is the spelling of a special token behind the text. With `armed=False` nothing is looked for and
        everything is released (a request below its `min_tokens`): a stop string that began there never matches. After
        a match all further text is swallowed.
        """
        if self.matched is not None:
            return "", self.matched
        waiting = self._held + [(character, True) for character in text] + [(character, False) for character in special]
        first, matches = len(waiting), []  # first: where a stop string may have begun
        for places in (range(first), [i for i, (_, shown) in enumerate(waiting) if shown]) if armed else ():
            read = "".join(waiting[i][0] for i in places)
            starts = ((stop, read.find(stop)) for stop in self._stops)
            matches += [(places[at + len(stop) - 1], places[at], stop) for stop, at in starts if at >= 0]
            for length in range(min(self._longest, len(read)), 0, -1):
                if any(map(str.startswith, self._stops, repeat(read[-length:]))):
                    first = min(first, places[-length])
                    break
        if matches:
            _, first, self.matched = min(matches)
        shown, self._held = _shown(waiting[:first]), waiting[first:]
        return shown + (self.matched if self.matched and self._include else ""), self.matched

    def flush(self) -> str:
        """At the end of the text: what was held back after all did not become a stop string."""
        held, self._held = self._held, []
        return "" if self.matched else _shown(held)


def _shown(characters: list[tuple[str, bool]]) -> str:
    return "".join(character for character, shown in characters if shown)


class Tokenizer:
    """One model's tokenizer; make it with `from_checkpoint`, `from_folder` or `from_gguf`.

    `specials` maps "bos_token", "eos_token" ... to their strings; `eos_ids` are further ids that end a text; `add_bos`
    and `add_eos` overrule what the library's own post-processor does (None: leave it).
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        specials: Mapping[str, str],
        templates: Mapping[str, str],
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        eos_ids: Iterable[int] = (),
    ):
        library.no_truncation()  # tokenizer.json may carry a training length that would cut prompts silently
        library.no_padding()
        self._library = library
        self._specials = dict(specials)
        self._pieces = {i: piece for piece, i in library.get_vocab(with_added_tokens=True).items()}
        self._added = library.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.token_bytes = functools.cache(self._token_bytes)
        self._shown_bytes = functools.cache(lambda i: b"" if i in self._special_ids else self._token_bytes(i))
        self.vocab_size = max(self._pieces, default=-1) + 1
        self.bos_token_id = self._id("bos_token")
        eos = self._id("eos_token")
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(([] if eos is None else [eos]) + list(eos_ids)))
        self._byte_level, self._space, self._strip_first_space = decoding_of(library)
        self._before, self._after = self._surroundings(add_bos, add_eos)
        self._template = ChatTemplate(templates, self._specials)

    @classmethod
    def from_checkpoint(cls, checkpoint: Any) -> "Tokenizer":
        """From an open checkpoint: its GGUF metadata, or the files in its folder."""
        if checkpoint.gguf is not None:
            return cls.from_gguf(checkpoint.gguf.metadata)
        return cls.from_folder(checkpoint.path)

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """From an HF folder. Raises ValueError naming the file that is missing or wrong."""
        folder = Path(path)
        config = read_json(folder / "tokenizer_config.json")
        library = read_library(folder, config.get("added_tokens_decoder") or {})
        named = read_json(folder / "special_tokens_map.json") | config
        specials = {key: content_of(named[key], key) for key in SPECIAL_KEYS if named.get(key) is not None}
        templates = read_templates(folder, config)
        return cls(library, specials, templates, config.get("add_bos_token"), config.get("add_eos_token"))

    @classmethod
    def from_gguf(cls, metadata: Mapping) -> "Tokenizer":
        """From a GGUF file's metadata (keys as in the file: "tokenizer.ggml.tokens" ...)."""
        library, add_bos = gguf_vocab.build(metadata)
        tokens, ids = metadata["tokenizer.ggml.tokens"], {}
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
            ids[name] = metadata.get(f"tokenizer.ggml.{name}_token_id")
            if ids[name] is not None and not 0 <= ids[name] < len(tokens):
                raise ValueError(
                    f"tokenizer.ggml.{name}_token_id is {ids[name]}, but the file has {len(tokens)} tokens"
                )
        names = zip(SPECIAL_KEYS, ("bos", "eos", "unknown", "padding"), strict=True)
        specials = {key: tokens[ids[name]] for key, name in names if ids[name] is not None}
        templates = {
            key.removeprefix("tokenizer.chat_template").lstrip(".") or "default": source
            for key, source in metadata.items()
            if gguf_vocab.TEMPLATE.fullmatch(key)
        }
        add_bos = metadata.get("tokenizer.ggml.add_bos_token", add_bos and "bos_token" in specials)
        add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
        eos_ids = [ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None]
        return cls(library, specials, templates, add_bos, add_eos, eos_ids)

    def save(self, path: str | Path) -> None:
        """Write what `from_folder` needs to make the same again, but for further EOS ids (generation_config.json)."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        self._library.save(str(folder / "tokenizer.json"))
        config = self._specials | {
            "add_bos_token": self.bos_token_id is not None and self.bos_token_id in self._before,
            "add_eos_token": bool(self._after) and self._after[-1] in self.eos_token_ids,
            "clean_up_tokenization_spaces": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        if self.has_chat_template:
            config["chat_template"] = [{"name": k, "template": v} for k, v in self._template.sources.items()]
        text = json.dumps(config, ensure_ascii=False, indent=2)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    # ---- text to ids ----

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a plain text, by default with what the model's files put around it. Control strings become ids."""
        ids = _ids(self._library, text)
        if not add_special_tokens:
            return ids
        doubled = self._before and ids[:1] == [self.bos_token_id] == self._before[:1]
        return [*self._before[1 if doubled else 0 :], *ids, *self._after]

    @property
    def has_chat_template(self) -> bool:
        return bool(self._template.sources)

    def apply_chat_template(self, messages: list[dict], **options: Any) -> str:
        """The prompt for a conversation as text. Options, and raising TemplateError: see ChatTemplate.render."""
        shield = Shield()
        return shield.reveal(self._template.render(messages, shield=shield, **options))

    def encode_chat(self, messages: list[dict], **options: Any) -> list[int]:
        """The same as ids: the template's control tokens, and nobody else's."""
        shield = Shield(self._controls)
        text = self._template.render(messages, shield=shield, **options)
        return self._encode_shielded(text, shield) if shield.marks else self.encode(text, add_special_tokens=False)

    def _encode_shielded(self, text: str, shield: Shield) -> list[int]:
        """Cut at the control strings that the template wrote; what lies between is text, whatever it spells."""
        ids: list[int] = []
        at = 0
        for match in self._controls.spelled.finditer(text):
            token_id = self._library.token_to_id(match[0])
            before = text[at : match.start()]
            # Some control tokens swallow the blanks beside them.
            before = before.rstrip() if self._added[token_id].lstrip else before
            ids += [*self._encode_literally(shield.reveal(before), first=at == 0), token_id]
            at = BLANKS.match(text, match.end()).end() if self._added[token_id].rstrip else match.end()
        return ids + self._encode_literally(shield.reveal(text[at:]), first=at == 0)

    def _encode_literally(self, text: str, first: bool) -> list[int]:
        return _ids(self._literal[first], text) if text else []

    @functools.cached_property
    def _controls(self) -> ControlStrings:
        return ControlStrings(self._added[i].content for i in self._special_ids)

    @functools.cached_property
    def _literal(self) -> list[tokenizers.Tokenizer]:
        """Copies that find no control tokens (a switch on the one would race with other threads): for a piece of text
        that does not begin the prompt, where SentencePiece adds no space, and for one that does."""
        begins = self._library.to_str()
        inside = begins.replace('"prepend_scheme":"first"', '"prepend_scheme":"never"')
        copies = {text: tokenizers.Tokenizer.from_str(text) for text in (inside, begins)}
        for copy in copies.values():
            copy.encode_special_tokens = True
        return [copies[inside], copies[begins]]

    # ---- ids to text ----

    def is_special(self, token_id: int) -> bool:
        """Whether text output leaves the id out."""
        return token_id in self._special_ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ids. Bytes that are no UTF-8 become U+FFFD."""
        stream = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return stream.add(ids) + stream.finish()

    def detokenizer(self, prompt_ids: Iterable[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """A decoder for ids that follow `prompt_ids`."""
        to_bytes = self._shown_bytes if skip_special_tokens else self.token_bytes
        return Detokenizer(to_bytes, prompt_ids, self._strip_first_space)

    def special_text(self, token_id: int) -> str:
        """How a special token is spelled; "" for any other."""
        return self._added[token_id].content if token_id in self._special_ids else ""

    def _token_bytes(self, token_id: int) -> bytes:
        """The bytes an id adds to a text; b"" for ids that the tokenizer does not have."""
        if token_id in self._added:
            return self._added[token_id].content.encode()
        piece = self._pieces.get(token_id, "")
        if self._byte_level:
            return b"".join(BYTE_OF.get(character) or character.encode() for character in piece)
        if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
            return bytes.fromhex(byte[1])
        return piece.replace(self._space, " ").encode()

    # ---- what the files ask for ----

    def _id(self, key: str) -> int | None:
        if key not in self._specials:
            return None
        token_id = self._library.token_to_id(self._specials[key])
        if token_id is None:
            raise ValueError(f"the tokenizer's files name {self._specials[key]!r} as {key}, but no token is spelled so")
        return token_id

    def _surroundings(self, add_bos: bool | None, add_eos: bool | None) -> tuple[list[int], list[int]]:
        """The ids before and after a plain text."""
        bare, full = _ids(self._library, "a"), self._library.encode("a", add_special_tokens=True).ids
        starts = (n for n in range(len(full) - len(bare) + 1) if full[n : n + len(bare)] == bare)
        start = next(starts, 0) if bare else len(full)
        before, after = full[:start], full[start + len(bare) :]
        for wanted, key in ((add_bos, "bos_token"), (add_eos, "eos_token")):
            if wanted and key not in self._specials:
                raise ValueError(f"add_{key} is true, but the tokenizer's files name no {key}")
        if add_bos is not None:
            before = [self.bos_token_id] * bool(add_bos) + [i for i in before if i != self.bos_token_id]
        if add_eos is not None:
            after = [i for i in after if i not in self.eos_token_ids] + [*self.eos_token_ids[:1]] * bool(add_eos)
        return before, after


# How byte-level vocabularies write bytes: printable Latin-1 as itself, the other 68 from U+0100 on.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_OF = {chr(byte): bytes([byte]) for byte in PRINTABLE}
BYTE_OF |= {chr(0x100 + n): bytes([byte]) for n, byte in enumerate(OTHERS)}


def _ids(library: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        if len(text) > 1000:  # other threads run while a batch is encoded, but not beside a single text
            return library.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return library.encode(text, add_special_tokens=False).ids
    except (TypeError, UnicodeEncodeError) as error:
        raise ValueError(f"{text!r:.80} cannot be encoded: it must be a string without lone surrogates") from error
