"""Text -> ids: what stands around a text, the files of a folder, and GGUF vocabularies against the library and against
llama.cpp's recorded ids."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from tiny_tokenizer import CHATML, SPECIALS, byte_level_library, folder, gguf_metadata, texts, tiny
from tokenizers import Regex, decoders, processors

from formats import gguf_vocab
from tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"

# ---- what stands around a text ----


def template_writing_bos() -> str:
    return "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


def test_one_bos_on_chat_and_on_plain_text(tmp_path):
    library = byte_level_library()
    bos = library.token_to_id("<s>")
    library.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", bos)])
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": template_writing_bos()}
    for add_bos in ({}, {"add_bos_token": True}):
        tokenizer = Tokenizer.from_folder(folder(tmp_path, library, **config, **add_bos))
        check_one_bos(tokenizer, bos)


def test_one_bos_from_gguf():
    metadata = gguf_metadata("gpt2", add_bos_token=True) | {"tokenizer.chat_template": template_writing_bos()}
    tokenizer = Tokenizer.from_gguf(metadata)
    check_one_bos(tokenizer, metadata["tokenizer.ggml.bos_token_id"])
    sentencepiece = Tokenizer.from_gguf(gguf_metadata("llama") | {"tokenizer.chat_template": template_writing_bos()})
    check_one_bos(sentencepiece, 1)  # the family's default is to add it


def check_one_bos(tokenizer: Tokenizer, bos: int) -> None:
    assert tokenizer.encode("hi").count(bos) == 1 and tokenizer.encode("hi")[0] == bos
    assert tokenizer.encode("<s>hi").count(bos) == 1
    assert tokenizer.encode("hi", add_special_tokens=False).count(bos) == 0
    chat = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert chat.count(bos) == 1 and chat[0] == bos


def test_add_bos_false_is_honoured_and_nothing_is_stripped(tmp_path):
    library = byte_level_library()
    bos = library.token_to_id("<s>")
    library.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", bos)])
    config = {"bos_token": "<s>", "add_bos_token": False, "chat_template": template_writing_bos()}
    hf = Tokenizer.from_folder(folder(tmp_path, library, **config))
    metadata = gguf_metadata("llama", add_bos_token=False) | {"tokenizer.chat_template": template_writing_bos()}
    for tokenizer in (hf, Tokenizer.from_gguf(metadata)):
        assert tokenizer.bos_token_id not in tokenizer.encode("hi")
        messages = [{"role": "user", "content": "hi"}]
        assert tokenizer.apply_chat_template(messages) == "<s>hi"
        assert tokenizer.encode_chat(messages)[0] == tokenizer.bos_token_id


def test_add_eos_and_the_post_processor(tmp_path):
    library = byte_level_library()
    ids = {t: library.token_to_id(t) for t in SPECIALS}
    library.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[(t, ids[t]) for t in ids])
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    plain = Tokenizer.from_folder(folder(tmp_path, library, **names))
    assert plain.encode("a")[0] == ids["<s>"] and plain.encode("a")[-1] == ids["</s>"]
    off = Tokenizer.from_folder(folder(tmp_path, library, **names, add_eos_token=False))
    assert off.encode("a") == plain.encode("a")[:-1]
    with pytest.raises(ValueError, match="add_bos_token is true"):
        Tokenizer.from_folder(folder(tmp_path, library, add_bos_token=True))


# ---- the files of a folder ----


def test_training_truncation_in_tokenizer_json_is_ignored(tmp_path):
    library = byte_level_library()
    library.enable_truncation(4)
    library.enable_padding(length=8)
    tokenizer = Tokenizer.from_folder(folder(tmp_path, library))
    assert tokenizer.decode(tokenizer.encode("a long text")) == "a long text"


def test_added_tokens_get_their_written_ids_also_behind_a_gap(tmp_path):
    n = byte_level_library().get_vocab_size()
    for i in (n, n + 5):
        added = {str(i): {"content": "<new>", "special": True}}
        tokenizer = Tokenizer.from_folder(folder(tmp_path, byte_level_library(), added_tokens_decoder=added))
        assert tokenizer.encode("a<new>")[-1] == i and tokenizer.is_special(i) and tokenizer.vocab_size == i + 1
        assert tokenizer.decode(range(n, i)) == ""  # ids that no token has
    definition = json.loads((tmp_path / "tokenizer.json").read_text())
    definition["added_tokens"][-1]["id"] += 3  # in tokenizer.json itself
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    assert Tokenizer.from_folder(tmp_path).encode("<think>") == [n - 1 + 3]
    new = {"content": "<new>"}
    texts = {"0": "<s>", "1000000000": "<far>", "70": "<new>", str(n - 1): "<new>", str(n): "a"}
    for wrong in ({str(n): new, str(n + 1): new}, *({i: {"content": text}} for i, text in texts.items())):
        with pytest.raises(ValueError, match="do not belong together"):
            Tokenizer.from_folder(folder(tmp_path, byte_level_library(), added_tokens_decoder=wrong))


def test_a_piece_of_the_vocabulary_may_be_declared_special(tmp_path):
    piece = {"content": "the", "special": True}
    i = byte_level_library().token_to_id("the")
    tokenizer = Tokenizer.from_folder(folder(tmp_path, byte_level_library(), added_tokens_decoder={str(i): piece}))
    assert tokenizer.is_special(i) and tokenizer.encode("xthe")[-1] == i and tokenizer.decode([i]) == ""


def test_specials_come_from_the_config_or_the_map(tmp_path):
    path = folder(tmp_path, byte_level_library(), eos_token={"content": "</s>", "special": True})
    (path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<s>"}))
    tokenizer = Tokenizer.from_checkpoint(SimpleNamespace(gguf=None, path=path))
    assert tokenizer.bos_token_id == tokenizer._library.token_to_id("<s>")
    assert tokenizer.eos_token_ids == (tokenizer._library.token_to_id("</s>"),)
    with pytest.raises(ValueError, match="no token is spelled so"):
        Tokenizer.from_folder(folder(tmp_path, byte_level_library(), eos_token="<nowhere>"))


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda path: (path / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda path: (path / "tokenizer.json").write_text("{}"), "is not a tokenizer"),
        (lambda path: (path / "tokenizer_config.json").write_text("{"), "is not valid JSON"),
        (lambda path: (path / "tokenizer_config.json").write_text('{"a":' + "[" * 100_000), "is not valid JSON"),
        (lambda path: (path / "tokenizer_config.json").write_text("[]"), "an object was expected"),
        (lambda path: (path / "tokenizer_config.json").write_text('{"eos_token": ["</s>"]}'), "eos_token is"),
        (lambda path: (path / "tokenizer_config.json").write_text('{"bos_token": {"a": 1}}'), "bos_token is"),
        (lambda path: (path / "tokenizer_config.json").write_text('{"chat_template": 5}'), "chat_template must be"),
        (lambda path: (path / "tokenizer_config.json").write_text('{"chat_template": ["a"]}'), "chat_template must be"),
        (
            lambda path: (path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "a"}]}'),
            "must be a text",
        ),
        (lambda path: (path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"5": "a"}}'), "must map"),
        (lambda path: (path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"٥": {}}}'), "must map"),
        (lambda path: (path / "chat_template.jinja").write_bytes(b"\xff\xfe"), "chat_template.jinja is not UTF-8"),
    ],
)
def test_bad_files_are_named(tmp_path, spoil, message):
    path = folder(tmp_path, byte_level_library())
    spoil(path)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_folder(path)


@pytest.mark.parametrize(
    "decoder",
    [decoders.WordPiece(), decoders.Sequence([decoders.Replace(Regex("▁"), " "), decoders.Fuse()])],
)
def test_unknown_decoders_are_refused(decoder):
    library = byte_level_library()
    library.decoder = decoder
    with pytest.raises(ValueError, match="WordPiece|Replace"):
        Tokenizer(library, {}, {})


def test_a_lone_surrogate_is_refused_wherever_a_text_has_it():
    half, user, tokenizer = "a\ud800", {"role": "user", "content": "hi"}, tiny("bytes")
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode(half)
    call = {"function": {"name": "f", "arguments": json.dumps({"a": half})}}
    template = CHATML + "{{ extra }}{% for m in messages %}{{ m.tool_calls }}{% endfor %}{{ tools }}"
    tokenizer = Tokenizer(byte_level_library(), {}, {"default": template})
    for messages, options in (
        ([user | {"content": half}], {}),
        ([user | {"content": [{"type": "text", "text": half}]}], {}),
        ([user | {"role": half}], {}),
        ([user | {"tool_calls": [call]}], {}),
        ([user], {"extra": half}),
        ([user], {"tools": [{half: 1}]}),
    ):
        with pytest.raises(ValueError, match="surrogate"):
            tokenizer.encode_chat(messages, **options)


def test_saved_folder_makes_the_same_tokenizer(tmp_path):
    metadata = gguf_metadata("llama") | {"tokenizer.chat_template": CHATML, "tokenizer.chat_template.tool_use": "T"}
    for n, one in enumerate([tiny("bytes"), tiny("first"), Tokenizer.from_gguf(metadata)]):
        one.save(tmp_path / str(n))
        two = Tokenizer.from_folder(tmp_path / str(n))
        text = "the cat<think> 😀</s> is"
        assert one.encode(text) == two.encode(text) and one.decode(one.encode(text)) == two.decode(two.encode(text))
        assert (one.bos_token_id, one.eos_token_ids) == (two.bos_token_id, two.eos_token_ids)
        assert one.encode_chat([{"role": "user", "content": text}]) == two.encode_chat(
            [{"role": "user", "content": text}]
        )


# ---- GGUF vocabularies ----


@given(text=texts)
def test_gguf_equals_tokenizer_json(text):
    for model, library in (("gpt2", cached_library("bytes")), ("llama", cached_library("meta"))):
        assert cached_gguf(model).encode(text, add_special_tokens=False) == library.encode(text, False).ids


@functools.cache
def cached_gguf(model: str) -> Tokenizer:
    return Tokenizer.from_gguf(gguf_metadata(model))


def cached_library(kind: str):
    library = tiny(kind)._library
    return SimpleNamespace(encode=lambda text, special: library.encode(text, add_special_tokens=special))


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_control_and_user_defined_tokens_are_one_id_each(model):
    tokenizer = cached_gguf(model)
    tokens = gguf_metadata(model)["tokenizer.ggml.tokens"]
    ids = tokenizer.encode("a<think>b<|im_end|>c")
    for text, special in (("<think>", False), ("<|im_end|>", True)):
        assert ids.count(tokens.index(text)) == 1 and tokenizer.is_special(tokens.index(text)) == special
    same = tiny("bytes" if model == "gpt2" else "meta").encode("a<think>b<|im_end|>c", add_special_tokens=False)
    assert tokenizer.encode("a<think>b<|im_end|>c", add_special_tokens=False) == same


def test_gguf_ends_of_text_are_collected():
    metadata = gguf_metadata("gpt2")
    tokens = metadata["tokenizer.ggml.tokens"]
    eos, eot, eom = (tokens.index(text) for text in ("</s>", "<|im_end|>", "<|im_start|>"))
    more = {"tokenizer.ggml.eot_token_id": eot, "tokenizer.ggml.eom_token_id": eom}
    assert Tokenizer.from_gguf(metadata | more).eos_token_ids == (eos, eot, eom)
    assert Tokenizer.from_gguf(metadata | more | {"tokenizer.ggml.eot_token_id": eos}).eos_token_ids == (eos, eom)


def test_gguf_scores_decide_what_is_merged_first():
    """ "abc": "ab" + "c" or "a" + "bc", whichever union has the better score, in whatever order the pieces stand."""
    metadata = gguf_metadata("llama", add_space_prefix=False)
    tokens = [*metadata["tokenizer.ggml.tokens"], "ab", "bc"]
    types = [*metadata["tokenizer.ggml.token_type"], 1, 1]
    for better, expected in (("ab", ["ab", "c"]), ("bc", ["a", "bc"])):
        scores = [*metadata["tokenizer.ggml.scores"], *(5.0 if piece == better else 1.0 for piece in ("ab", "bc"))]
        new = {"tokens": tokens, "token_type": types, "scores": scores}
        tokenizer = Tokenizer.from_gguf(gguf_metadata("llama", add_space_prefix=False, **new))
        assert [tokens[i] for i in tokenizer.encode("abc", add_special_tokens=False)] == expected


def test_gguf_space_prefix_is_a_switch():
    with_prefix, without = (
        Tokenizer.from_gguf(gguf_metadata("llama", add_space_prefix=flag)) for flag in (True, False)
    )
    tokens = gguf_metadata("llama")["tokenizer.ggml.tokens"]
    assert with_prefix.encode("the")[1:] == [tokens.index("▁the")]
    assert without.encode("the") == [1, tokens.index("t"), tokens.index("he")]
    assert with_prefix.decode(with_prefix.encode("the")) == without.decode(without.encode("the")) == "the"
    assert without.decode(without.encode(" the")) == " the"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": "bert"}, "'bert'"),
        ({"model": None}, "None"),
        ({"pre": "martian"}, "'martian'"),
        ({"tokens": []}, "no vocabulary"),
        ({"token_type": [1]}, "token_type has 1 entries"),
        ({"bos_token_id": 10**6}, "bos_token_id is 1000000"),
        ({"merges": ["zzz qqq"]}, "does not fit together"),
        ({"merges": 5}, "merges is no list of str but 5"),
        ({"merges": [5]}, "merges is no list of str"),
        ({"token_type": 1.5}, "token_type is no list of int"),
        ({"pre": ["gpt-2"]}, "pre is no text"),
        ({"eot_token_id": "2"}, "eot_token_id is no token id but '2'"),
        ({"eos_token_id": 1.5}, "eos_token_id is no token id but 1.5"),
    ],
)
def test_gguf_vocabularies_that_cannot_be_read_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(gguf_metadata("gpt2", **changes))


def test_a_sentencepiece_vocabulary_with_damaged_settings_is_refused_by_name():
    for changes, message in (
        ({"unknown_token_id": 10**9}, "unknown_token_id is"),
        ({"scores": 5}, "scores is no list"),
    ):
        with pytest.raises(ValueError, match=message):
            Tokenizer.from_gguf(gguf_metadata("llama", **changes))
    with pytest.raises(ValueError, match="chat_template is no text"):
        Tokenizer.from_gguf(gguf_metadata("llama") | {"tokenizer.chat_template": [1]})


@pytest.mark.parametrize("pre", sorted(gguf_vocab.PRE_TOKENIZERS))
@given(text=texts)
@settings(max_examples=25)
def test_every_known_cut_loses_no_text(pre, text):
    tokenizer = cached_pre(pre)
    text = text.replace("<", "")
    ids = tokenizer.encode(text, add_special_tokens=False)
    if pre != "qwen2":  # Qwen's own tokenizer composes characters (NFC)
        assert tokenizer.decode(ids) == text


@functools.cache
def cached_pre(pre: str) -> Tokenizer:
    return Tokenizer.from_gguf(gguf_metadata("gpt2", pre=pre))


@pytest.mark.parametrize(
    "pre, digits", [("gpt-2", [5]), ("smollm", [1] * 5), ("llama-bpe", [3, 2]), ("qwen2", [1] * 5)]
)
def test_cuts_differ_in_digits(pre, digits):
    pieces = cached_pre(pre)._library.pre_tokenizer.pre_tokenize_str("12345")
    assert [end - start for _, (start, end) in pieces] == digits


def test_default_model_equals_llama_cpp_on_recorded_texts(smollm2):
    """The data file names the command that made it."""
    from formats import gguf

    tokenizer = Tokenizer.from_gguf(gguf.File(smollm2).metadata)
    pairs = json.loads((DATA / "smollm2_tokens.json").read_text())["pairs"]
    assert len(pairs) > 100
    for text, ids in pairs:
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
