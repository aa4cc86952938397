"""Text to ids and back.

The problem. Every model has its own alphabet of tokens, its own rule for what stands at the beginning, its own control
tokens. All of it is data in the model's files, spread over two containers and many years of conventions, and every
mistake is silent: a doubled BOS, a control token that falls into pieces, a user's text that becomes one.

The idea. The `tokenizers` library does the merging (byte-pair encoding, Sennrich et al. 2016). This file decides what
the library leaves open: where the vocabulary comes from, what is put around a text, what a user may spell, and what
bytes an id stands for.

    tokenizer.json, tokenizer_config.json --+                    encode        "hi"    -> [BOS] 5303      plain text
    GGUF metadata -- gguf_vocab.py ---------+--> Tokenizer ----- encode_chat   messages -> the template's ids, no more
    chat_template.jinja -- formats/chat_template.py +                    token_bytes   5303    -> b"hi"
                                                                 detokenizer   ids, a few at a time -> whole characters

Beginnings. `encode` adds what the model's files ask for: BOS where the tokenizer normally adds it, once, and never if
`add_bos_token` is false. A text that already spells BOS at its start gets no second one. `encode_chat` adds and takes
away nothing: the template has written every control token itself.

Who may spell a control token. In `encode` (plain completion) a control string in the text becomes its id, since
whoever completes raw text lays out the prompt himself. In `encode_chat` only the template may: the same string inside
a message is encoded as ordinary characters, so that no message can end its turn and open another. Added tokens that
are not control tokens (<think>) are found everywhere.

Bytes. An id stands for bytes, not for text: half an emoji is a token. Byte-level vocabularies write each byte as one
printable character; SentencePiece ones write a space as "▁" and odd bytes as "<0xE2>". Ids beyond the tokenizer (a
model's vocabulary is often padded) stand for no bytes at all.

Imports of ours: detokenizer.py, gguf_vocab.py and chat_template.py, the three ideas that this one is made of.
Left out: tokenizer.model without tokenizer.json (convert it with transformers), WordPiece and word-level vocabularies.
"""

import functools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from detokenizer import Detokenizer, StopChecker
from formats import gguf_vocab
from formats.chat_template import ChatTemplate, ControlStrings, Shield
from formats.template_sandbox import TemplateError

__all__ = ["Detokenizer", "StopChecker", "TemplateError", "Tokenizer"]

BLANKS = re.compile(r"\s*")
SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token")


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
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = max(self._pieces, default=-1) + 1
        self.bos_token_id = self._id("bos_token")
        eos = self._id("eos_token")
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(([] if eos is None else [eos]) + list(eos_ids)))
        self._byte_level, self._space, self._strip_first_space = _decoding(library)
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
        library = _read_library(folder / "tokenizer.json")
        config = _read_json(folder / "tokenizer_config.json")
        _add_missing_tokens(library, config.get("added_tokens_decoder") or {})
        named = _read_json(folder / "special_tokens_map.json") | config
        specials = {key: _content(named[key], key) for key in SPECIAL_KEYS if named.get(key) is not None}
        templates = _read_templates(folder, config)
        return cls(library, specials, templates, config.get("add_bos_token"), config.get("add_eos_token"))

    @classmethod
    def from_gguf(cls, metadata: Mapping) -> "Tokenizer":
        """From a GGUF file's metadata (keys as in the file: "tokenizer.ggml.tokens" ...)."""
        library, add_bos = gguf_vocab.build(metadata)
        tokens = metadata["tokenizer.ggml.tokens"]

        def token_id(name: str) -> int | None:
            i = metadata.get(f"tokenizer.ggml.{name}_token_id")
            if i is not None and not 0 <= i < len(tokens):
                raise ValueError(f"tokenizer.ggml.{name}_token_id is {i}, but the file has {len(tokens)} tokens")
            return i

        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        specials = {key: tokens[i] for key, name in names.items() if (i := token_id(name)) is not None}
        templates = {
            key.removeprefix("tokenizer.chat_template").lstrip(".") or "default": source
            for key, source in metadata.items()
            if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template.")
        }
        add_bos = metadata.get("tokenizer.ggml.add_bos_token", add_bos and "bos_token" in specials)
        eos_ids = [i for name in ("eos", "eot", "eom") if (i := token_id(name)) is not None]
        return cls(library, specials, templates, add_bos, metadata.get("tokenizer.ggml.add_eos_token", False), eos_ids)

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json into a folder, so that `from_folder` makes the same again
        (further EOS ids belong in generation_config.json, which is not written here)."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        self._library.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = dict(self._specials)
        config["add_bos_token"] = self.bos_token_id is not None and self.bos_token_id in self._before
        config["add_eos_token"] = bool(self._after) and self._after[-1] in self.eos_token_ids
        config["clean_up_tokenization_spaces"] = False
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        if self._template.sources:
            config["chat_template"] = [{"name": k, "template": v} for k, v in self._template.sources.items()]
        text = json.dumps(config, ensure_ascii=False, indent=2)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    # ---- text to ids ----

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a plain text, by default with what the model's files put around it. Control strings become ids."""
        ids = _ids(self._library, text)
        if not add_special_tokens:
            return ids
        before = self._before
        if before and ids[:1] == [self.bos_token_id] == before[:1]:
            before = before[1:]
        return [*before, *ids, *self._after]

    @property
    def has_chat_template(self) -> bool:
        return bool(self._template.sources)

    def apply_chat_template(self, messages: list[dict], **options: Any) -> str:
        """The prompt for a conversation as text. Options, and raising TemplateError: see ChatTemplate.render."""
        shield = Shield()
        return shield.reveal(self._template.render(messages, shield=shield, **options))

    def encode_chat(self, messages: list[dict], **options: Any) -> list[int]:
        """The prompt for a conversation as ids: the template's control tokens, and nobody else's.

        Options, and raising TemplateError: see ChatTemplate.render.
        """
        shield = Shield(self._controls)
        text = self._template.render(messages, shield=shield, **options)
        return self._encode_shielded(text, shield) if shield.used else self.encode(text, add_special_tokens=False)

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
        return _ids(self._literal if first else self._literal_inside, text) if text else []

    @functools.cached_property
    def _controls(self) -> ControlStrings:
        return ControlStrings(self._added[i].content for i in self._special_ids)

    @functools.cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """A second copy that finds no control tokens (a switch on the first would race with other threads)."""
        return _literal_copy(self._library.to_str())

    @functools.cached_property
    def _literal_inside(self) -> tokenizers.Tokenizer:
        """The same for a piece of text that does not begin the prompt: there SentencePiece adds no space."""
        inside = self._library.to_str().replace('"prepend_scheme":"first"', '"prepend_scheme":"never"')
        return _literal_copy(inside)

    # ---- ids to text ----

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes an id adds to a text; b"" for ids that the tokenizer does not have."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._compute_bytes(token_id)
        return self._bytes[token_id]

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token: one that text output leaves out."""
        return token_id in self._special_ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ids. Bytes that are no UTF-8 become U+FFFD."""
        stream = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return stream.add(ids) + stream.finish()

    def detokenizer(self, prompt_ids: Iterable[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """A decoder for ids that follow `prompt_ids`."""
        to_bytes = self._shown_bytes if skip_special_tokens else self.token_bytes
        return Detokenizer(to_bytes, prompt_ids, self._strip_first_space)

    def _shown_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._special_ids else self.token_bytes(token_id)

    def _compute_bytes(self, token_id: int) -> bytes:
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
        for wanted, token_id, key in ((add_bos, self.bos_token_id, "bos"), (add_eos, self._id("eos_token"), "eos")):
            if wanted and token_id is None:
                raise ValueError(f"add_{key}_token is true, but the tokenizer's files name no {key}_token")
        if add_bos is not None:
            before = [i for i in before if i != self.bos_token_id]
            before = [self.bos_token_id, *before] if add_bos else before
        if add_eos is not None:
            after = [i for i in after if i not in self.eos_token_ids]
            after = [*after, self.eos_token_ids[0]] if add_eos else after
        return before, after


def _bytes_of_characters() -> dict[str, bytes]:
    """How byte-level vocabularies write bytes: printable Latin-1 as itself, the other 68 from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): bytes([byte]) for byte in printable}
    return characters | {chr(0x100 + n): bytes([byte]) for n, byte in enumerate(others)}


BYTE_OF = _bytes_of_characters()


def _ids(library: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        return library.encode(text, add_special_tokens=False).ids
    except (TypeError, UnicodeEncodeError) as error:
        raise ValueError(f"{text!r:.80} cannot be encoded: it must be a string without lone surrogates") from error


def _literal_copy(definition: str) -> tokenizers.Tokenizer:
    copy = tokenizers.Tokenizer.from_str(definition)
    copy.encode_special_tokens = True
    return copy


def _decoding(library: tokenizers.Tokenizer) -> tuple[bool, str, bool]:
    """(byte-level?, the character that stands for a space, is one space at the start of a text dropped?)"""
    steps = _steps(library.decoder)
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"] or not names and "ByteLevel" in [step["type"] for step in _steps(library.pre_tokenizer)]:
        return True, "", False
    if names == ["Metaspace"]:
        return False, steps[0]["replacement"], steps[0].get("prepend_scheme", "always") != "never"
    if names and set(names) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        spaces = [s["pattern"].get("String") for s in steps if s["type"] == "Replace" and s["content"] == " "]
        stripped = [step for step in steps if step["type"] == "Strip"]
        plain = all((s["content"], s["stop"]) == (" ", 0) and s["start"] <= 1 for s in stripped)
        if len(spaces) == 1 and spaces[0] and plain:
            return False, spaces[0], any(step["start"] for step in stripped)
    raise ValueError(
        f"tokenizer.json: the decoder {names or None} is not supported, only ByteLevel, Metaspace and the "
        "SentencePiece sequence (Replace, ByteFallback, Fuse, Strip) are"
    )


def _steps(component: Any) -> list[dict]:
    """A decoder or pre-tokenizer of the library as its JSON definition, sequences flattened."""
    if component is None:
        return []
    definition = json.loads(component.__getstate__())
    return definition.get("decoders") or definition.get("pretokenizers") or [definition]


# ---- the files of an HF folder ----


def _read_library(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ValueError(
            f"{path} is missing: a folder needs tokenizer.json (transformers converts a tokenizer.model: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder))"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for every kind of bad file
        raise ValueError(f"{path} is not a tokenizer: {error}") from error


def _read_json(path: Path) -> dict:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def _content(token: Any, key: str) -> str:
    """Token strings are written plain or as an object with the string in "content"."""
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise ValueError(
            f"tokenizer_config.json: {key} is {token!r}; it must be a token's text, or an object with a content"
        )
    return content


def _add_missing_tokens(library: tokenizers.Tokenizer, added: dict[str, dict]) -> None:
    """tokenizer_config.json may list added tokens that tokenizer.json lacks; each must get the id that is written."""
    if not isinstance(added, dict) or not all(i.isdecimal() and isinstance(token, dict) for i, token in added.items()):
        raise ValueError("tokenizer_config.json: added_tokens_decoder must map token ids to objects with their content")
    for token_id, token in sorted(added.items(), key=lambda item: int(item[0])):
        _content(token, f"added_tokens_decoder[{token_id}]")
        if library.token_to_id(token["content"]) is None:
            flags = {
                key: token[key] for key in ("special", "lstrip", "rstrip", "single_word", "normalized") if key in token
            }
            library.add_tokens([tokenizers.AddedToken(token["content"], **flags)])
        if library.token_to_id(token["content"]) != int(token_id):
            raise ValueError(
                f"tokenizer_config.json gives {token['content']!r} the id {token_id}, tokenizer.json "
                f"{library.token_to_id(token['content'])}: the files do not belong together"
            )


def _read_templates(folder: Path, config: dict) -> dict[str, str]:
    """Chat templates by name. A .jinja file wins over tokenizer_config.json, that over chat_template.json."""
    given = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template") or {}
    if isinstance(given, str):
        given = {"default": given}
    elif isinstance(given, list) and all(isinstance(entry, dict) for entry in given):
        given = {entry.get("name"): entry.get("template") for entry in given}
    if not isinstance(given, dict) or not all(isinstance(text, str) for text in (*given, *given.values())):
        raise ValueError(f"{folder}: chat_template must be a text, or a list of objects with a name and a template")
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    for name, path in files.items():
        try:
            given = {**given, name: path.read_text(encoding="utf-8")}
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 ({error}): fetch it again") from None
    return given
