"""The files of a tokenizer in a Hugging Face folder, read strictly.

The problem. tokenizer.json, tokenizer_config.json, special_tokens_map.json and three places for chat templates say
parts of the same thing, by conventions of many years, and a part that is overlooked does not crash.

The idea. Each function reads one part, and names the file, the key and the value in whatever it refuses:

    tokenizer.json ──► read_library ──► decoding_of      how its pieces write bytes and spaces
    tokenizer_config.json, special_tokens_map.json ──► read_json, content_of, read_library
    chat_template.jinja, additional_chat_templates/, tokenizer_config.json, chat_template.json ──► read_templates

Left out: GGUF vocabularies (gguf_vocab.py), tokenizer.model without tokenizer.json.
"""

import json
import re
from pathlib import Path
from typing import Any

import tokenizers

from formats.folder_files import read_json

MOST_FILLERS = 10_000  # a damaged id must not become a vocabulary of that length


def decoding_of(library: tokenizers.Tokenizer) -> tuple[bool, str, bool]:
    """(byte-level?, the character that stands for a space, is one space at the start of a text dropped?)"""
    steps = steps_of(library.decoder)
    names = [step["type"] for step in steps]
    if (
        names == ["ByteLevel"]
        or not names
        and "ByteLevel" in [step["type"] for step in steps_of(library.pre_tokenizer)]
    ):
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


def steps_of(component: Any) -> list[dict]:
    """A decoder or pre-tokenizer of the library as its JSON definition, sequences flattened."""
    if component is None:
        return []
    definition = json.loads(component.__getstate__())
    return definition.get("decoders") or definition.get("pretokenizers") or [definition]


def read_library(folder: Path, added: dict[str, dict]) -> tokenizers.Tokenizer:
    """tokenizer.json with the tokens that tokenizer_config.json adds, by id, each under the id that is written.

    The library numbers added tokens in a row, whatever the file says: ids that no token has are given to fillers.
    """
    path = folder / "tokenizer.json"
    definition = read_json(
        path,
        f"{path} is missing: a folder needs tokenizer.json (transformers converts a tokenizer.model: "
        "AutoTokenizer.from_pretrained(folder).save_pretrained(folder))",
    )
    library = _library(path, definition)
    legal = isinstance(added, dict) and all(re.fullmatch("0|[1-9][0-9]{0,9}", i) for i in added)
    if not legal or not all(isinstance(token, dict) for token in added.values()):
        raise ValueError("tokenizer_config.json: added_tokens_decoder must map token ids to objects with their content")
    tokens = {token["id"]: token for token in definition.get("added_tokens") or ()}
    texts = {i: piece for piece, i in library.get_vocab(with_added_tokens=False).items()}
    texts |= {i: token["content"] for i, token in tokens.items()}
    ids = {text: i for i, text in texts.items()}
    for i, token in ((int(i), token) for i, token in added.items()):
        text = content_of(token, f"added_tokens_decoder[{i}]")
        if texts.setdefault(i, text) != text or ids.setdefault(text, i) != i:
            raise _misfit(text, i, f"{texts[i]!r} has it" if texts[i] != text else f"its id is {ids[text]}")
        tokens.setdefault(i, _token(**token))
    shifted = any(library.token_to_id(token["content"]) != i for i, token in tokens.items())
    if shifted:
        first, end = library.get_vocab_size(with_added_tokens=False), max(tokens)
        fillers = range(first, min(end, first + MOST_FILLERS))
        tokens = {i: _token(f"<|unused {i}|>", special=True) for i in fillers} | tokens
    if shifted or tokens.keys() - library.get_added_tokens_decoder().keys():
        definition["added_tokens"] = [{**token, "id": i} for i, token in sorted(tokens.items())]
        library = _library(path, definition)
    for i, token in tokens.items():
        if (found := library.token_to_id(token["content"])) != i:
            raise _misfit(token["content"], i, f"it would be {found}")
    return library


def _misfit(text: str, token_id: int, why: str) -> ValueError:
    found = f"{text!r} is added under the id {token_id}, but {why}"
    return ValueError(f"tokenizer.json, tokenizer_config.json: {found}: the files do not belong together")


def _library(path: Path, definition: dict) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(definition))
    except Exception as error:  # the library raises a bare Exception for every kind of bad file
        raise ValueError(f"{path} is not a tokenizer: {error}") from error


def _token(content: str, special=False, lstrip=False, rstrip=False, single_word=False, normalized=None, **_) -> dict:
    """An added token as tokenizer.json writes it."""
    normalized = not special if normalized is None else normalized
    blanks = {"lstrip": lstrip, "rstrip": rstrip, "single_word": single_word}
    return {"content": content, "special": special, "normalized": normalized, **blanks}


def content_of(token: Any, key: str) -> str:
    """Token strings are written plain or as an object with the string in "content"."""
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise ValueError(
            f"tokenizer_config.json: {key} is {token!r}; it must be a token's text, or an object with a content"
        )
    return content


def read_templates(folder: Path, config: dict) -> dict[str, str]:
    """Chat templates by name. A .jinja file wins over tokenizer_config.json, that over chat_template.json."""
    templates = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template") or {}
    if isinstance(templates, str):
        templates = {"default": templates}
    elif isinstance(templates, list) and all(isinstance(entry, dict) for entry in templates):
        templates = {entry.get("name"): entry.get("template") for entry in templates}
    if not isinstance(templates, dict) or not all(isinstance(text, str) for text in (*templates, *templates.values())):
        raise ValueError(f"{folder}: chat_template must be a text, or a list of objects with a name and a template")
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    for name, path in files.items():
        try:
            templates = {**templates, name: path.read_text(encoding="utf-8")}
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 ({error}): fetch it again") from None
    return templates
