"""The vocabulary inside a GGUF file, made into a tokenizer.

The problem. A GGUF file carries no tokenizer.json. It carries a list of pieces, their types, and either merges or
scores; how text is cut before merging is only *named* (`tokenizer.ggml.pre`). A reader that guesses cuts text where
the model never saw it cut, and answers get worse without any error.

The idea. Two families cover the supported architectures, and both are byte-pair encoding (Sennrich et al. 2016,
section 3.2): start from small pieces, join the best neighbours again and again. They differ in what a small piece is.

    model "gpt2"   bytes, each written as one printable character   " café" -> Ġ c a f Ã ©       merges: given, in order
    model "llama"  characters, a space is "▁", unknown ones bytes   " café" -> ▁ c a f é         merges: from the scores
    types          1 normal   2 unknown   3 control   4 user-defined   5 unused   6 byte (3, 4: exactly one id each)

SentencePiece's scores are the same as a list of merges: every way to cut a piece in two known pieces, sorted by the
score of the whole.

Source: ggml's GGUF specification, "Tokenizer"; the cutting expressions are those of the models' own tokenizer.json.
Left out: unigram, WordPiece and RWKV vocabularies; an unknown name is refused.
"""

import re
from collections.abc import Mapping
from functools import partial

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from formats.command_line import warn

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
SPACE = "▁"

# What follows the contractions and the words: punctuation with its line ends, then blanks. Llama 3 and Qwen share it.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"|\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _cut(pattern: str):
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2(*before):
    return pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def _digits_then_gpt2():
    return _gpt2(pre_tokenizers.Digits(individual_digits=True))


# tokenizer.ggml.pre -> (how to cut, whole words that are in the vocabulary stay unmerged, BOS is normally added)
PRE_TOKENIZERS = {
    "gpt-2": (_gpt2, False, False),
    **dict.fromkeys(("smollm", "starcoder"), (_digits_then_gpt2, False, False)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), (partial(_cut, _LLAMA3), True, True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (partial(_cut, _QWEN2), False, False)),
    "tekken": (partial(_cut, _TEKKEN), True, True),
}
LISTS = {"tokens": str, "token_type": int, "merges": str, "scores": float}
TEXTS = ("model", "pre")
TEMPLATE = re.compile(r"tokenizer\.chat_template(\..*)?")  # the plural lists the names of the named ones


def check(metadata: Mapping) -> None:
    """Refuse settings of another type than they are read as: a damaged file, or one written by hand."""
    for key, value in metadata.items():
        if value is None or not key.startswith("tokenizer."):
            continue
        name = key.removeprefix("tokenizer.ggml.")
        if name in LISTS and not (isinstance(value, list) and all(type(item) is LISTS[name] for item in value)):
            wrong = f"list of {LISTS[name].__name__}"
        elif (name in TEXTS or TEMPLATE.fullmatch(key)) and not isinstance(value, str):
            wrong = "text"
        elif name.endswith("_token_id") and type(value) is not int:
            wrong = "token id"
        else:
            continue
        raise ValueError(f"{key} is no {wrong} but {repr(value)[:60]}: damaged file")


def build(metadata: Mapping) -> tuple[Tokenizer, bool]:
    """The tokenizer of a GGUF file's metadata, and whether its family normally begins a text with BOS.

    Raises ValueError for a vocabulary that is missing or of a kind not known here.
    """
    check(metadata)
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if model not in ("gpt2", "llama"):
        raise ValueError(
            f"tokenizer.ggml.model is {model!r}: only 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE) are "
            "read; use the model's HF folder with its tokenizer.json"
        )
    if not tokens:
        raise ValueError("tokenizer.ggml.tokens is missing or empty: this GGUF file holds no vocabulary")
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens: damaged file")
    library, add_bos = (_byte_level if model == "gpt2" else _sentencepiece)(metadata, tokens, types)
    added = [(text, kind) for text, kind in zip(tokens, types, strict=True) if kind in (UNKNOWN, CONTROL, USER_DEFINED)]
    library.add_tokens(
        [AddedToken(text, special=kind != USER_DEFINED, normalized=False) for text, kind in added if text]
    )
    return library, add_bos


def _byte_level(metadata: Mapping, tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre is None:
        warn("warning: the file has no tokenizer.ggml.pre; its text is cut as gpt-2's, which may not be what it needs")
        pre = "gpt-2"
    if pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre is {pre!r}: how it cuts text is not known here (known: {', '.join(PRE_TOKENIZERS)}); "
            "use the model's HF folder with its tokenizer.json"
        )
    cut, keep_words, add_bos = PRE_TOKENIZERS[pre]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or ()]
    library = Tokenizer(_model(tokens, merges, ignore_merges=keep_words))
    if pre == "qwen2":
        library.normalizer = normalizers.NFC()
    library.pre_tokenizer = cut()
    library.decoder = decoders.ByteLevel()
    return library, add_bos


def _sentencepiece(metadata: Mapping, tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ValueError(f"tokenizer.ggml.scores does not hold one score for each of the {len(tokens)} tokens")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not 0 <= unknown < len(tokens):
        raise ValueError(f"tokenizer.ggml.unknown_token_id is {unknown}, but the file has {len(tokens)} tokens")
    library = Tokenizer(
        _model(tokens, _merges(tokens, types, scores), unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = [normalizers.Replace(" ", SPACE)]
    library.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *spaces] if prefix else spaces)
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    library.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return library, True


def _merges(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Every cut of a normal piece into two normal pieces, best-scored whole first."""
    score = {text: scores[i] for i, text in enumerate(tokens) if types[i] == NORMAL}
    pairs = [
        (text[:cut], text[cut:])
        for text in score
        for cut in range(1, len(text))
        if text[:cut] in score and text[cut:] in score
    ]
    return sorted(pairs, key=lambda pair: -score[pair[0] + pair[1]])


def _model(tokens: list[str], merges: list[tuple[str, str]], **options) -> models.BPE:
    vocabulary = {text: i for i, text in reversed(list(enumerate(tokens)))}  # of equal pieces the first id counts
    try:
        return models.BPE(vocabulary, merges, **options)
    except Exception as error:  # the library raises a bare Exception, e.g. for a merge of unknown pieces
        raise ValueError(f"the GGUF vocabulary does not fit together: {error}") from error
