"""Two tiny tokenizers, one of each family, made on the spot: byte-level BPE, and SentencePiece pieces with byte
fallback, the latter in the ways that files spell it. With them, what a GGUF file would hold for the same."""

import functools
import json
from pathlib import Path

import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from formats import gguf_vocab
from tokenizer import BYTE_OF, Tokenizer

SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
texts = st.text(max_size=40) | st.text(alphabet=" .\n▁aáthe😀你ď́<|im_end>", max_size=40)


def byte_level_library() -> tokenizers.Tokenizer:
    vocab = {c: i for i, c in enumerate(BYTE_OF)}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "x"), ("ð", "Ł"), ("i", "m")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    library = tokenizers.Tokenizer(models.BPE(vocab, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    library.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return library


def sentencepiece_pieces() -> tuple[list[str], list[float], list[int]]:
    """Pieces, scores and GGUF types of a small SentencePiece vocabulary with byte fallback."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    types = [2, 3, 3, *[6] * 256]
    words = ["▁t", "he", "▁the", "▁c", "at", "▁cat", "▁I", "▁It", "▁i", "▁is", "▁▁", "á"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyzI.,=!<>/|_"]
    pieces += words + letters + ["<|im_start|>", "<|im_end|>", "<think>"]
    types += [1] * len(words + letters) + [3, 3, 4]
    return pieces, [-float(i) for i in range(len(pieces))], types


def metaspace_library(scheme: str | None = None) -> tokenizers.Tokenizer:
    """As in a tokenizer.json: with the old normalizer (scheme None) or with the Metaspace pre-tokenizer."""
    pieces, scores, types = sentencepiece_pieces()
    merges = gguf_vocab._merges(pieces, types, scores)
    vocab = {piece: i for i, piece in enumerate(pieces)}
    library = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    strip = [decoders.Strip(" ", 1, 0)]
    if scheme is None:
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        strip = strip if scheme != "never" else []
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    special = ["<unk>", *SPECIALS]
    library.add_tokens([AddedToken(t, special=t in special, normalized=False) for t in [*special, "<think>"]])
    return library


@functools.cache
def tiny(kind: str) -> Tokenizer:
    library = byte_level_library() if kind == "bytes" else metaspace_library({"meta": None}.get(kind, kind))
    return Tokenizer(library, {"bos_token": "<s>", "eos_token": "</s>"}, {"default": CHATML}, add_bos=True)


KINDS = ["bytes", "meta", "first", "never"]


def folder(path: Path, library: tokenizers.Tokenizer, **config) -> Path:
    path.mkdir(exist_ok=True)
    library.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def gguf_metadata(model: str, /, **keys) -> dict:
    """What a GGUF file holds for the tiny tokenizers."""
    if model == "llama":
        tokens, scores, types = sentencepiece_pieces()
        own = {"scores": scores, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    else:
        library = byte_level_library()
        tokens = [library.id_to_token(i) for i in range(library.get_vocab_size())]
        types = [3 if t in SPECIALS else 4 if t == "<think>" else 1 for t in tokens]
        merges = json.loads(library.to_str())["model"]["merges"]
        own = {"merges": [" ".join(merge) for merge in merges], "pre": "gpt-2"}
        own |= {"bos_token_id": tokens.index("<s>"), "eos_token_id": tokens.index("</s>")}
    own |= {"model": model, "tokens": tokens, "token_type": types} | keys
    return {f"tokenizer.ggml.{key}": value for key, value in own.items()}
