"""Field cases through the server: what has broken elsewhere, asked of a running one over its socket."""

import json
import shutil

import pytest
import tiny
import tiny_tokenizer
from server_fixture import folder, make_llm, reasons, script, serving, text_of

SEED = 7  # of scripted answers
EOS = 2


@pytest.fixture(scope="module")
def server():
    with serving({"tiny": make_llm()}) as running:
        yield running


@pytest.fixture
def scripted(server, monkeypatch):
    """Fix what the model answers to requests with seed=SEED: pieces of text, or token ids."""

    def fix(*pieces) -> dict:
        encode = server.llm().tokenizer.encode
        ids = [i for piece in pieces for i in ([piece] if isinstance(piece, int) else encode(piece))]
        script(monkeypatch, {SEED: ids})
        return {"seed": SEED, "max_tokens": len(ids)}

    return fix


def with_template(path, template: str | None):
    """A copy of the tiny model with this chat template, or with none."""
    shutil.copytree(folder(), path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


# ---- detok-stream


def test_no_half_characters_in_a_stream(server, scripted):
    text = "ďábel 😀 你好"
    body = scripted(text)
    assert server.complete(**body)["choices"][0]["text"] == text
    events = server.stream(prompt="the", **body)
    assert text_of(events) == text and "\ufffd" not in json.dumps(events, ensure_ascii=False)


@pytest.mark.parametrize("kind, clean_up", [("meta", False), ("bytes", True)])
def test_spaces_survive_the_stream(tmp_path, monkeypatch, kind, clean_up):
    text = " the cat. It is x != y ."
    library = tiny_tokenizer.metaspace_library() if kind == "meta" else tiny_tokenizer.byte_level_library()
    path = tiny.hf_folder(tmp_path / "m", "llama", tokenizer=False, vocab_size=352)
    tiny_tokenizer.folder(path, library, eos_token="</s>", bos_token="<s>", clean_up_tokenization_spaces=clean_up)
    with serving({"tiny": make_llm(path)}) as server:
        tokenizer = server.llm().tokenizer
        prompt = tokenizer.encode("the cat", add_special_tokens=False)
        whole = tokenizer.encode("the cat" + text, add_special_tokens=False)
        assert whole[: len(prompt)] == prompt
        script(monkeypatch, {SEED: whole[len(prompt) :]})
        body = {"prompt": prompt, "seed": SEED, "max_tokens": len(whole) - len(prompt)}
        assert server.complete(**body)["choices"][0]["text"] == text
        assert text_of(server.stream(**body)) == text


# ---- template-input


def test_what_the_template_says_is_a_400(tmp_path):
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    )
    path = with_template(tmp_path / "m", template + "{{ m.content }}{% endfor %}")
    with serving({"tiny": make_llm(path)}) as server:
        error = server.chat(expect=400, messages=[{"role": "system", "content": "x"}])["error"]
        assert "no system role here" in error["message"] and error["type"] == "invalid_request_error"
        assert server.chat("fine", max_tokens=2)
        broken = [{"role": "user"}], [{"content": "x"}], [3], [{"role": "user", "content": [{"type": "image_url"}]}]
        for messages in broken:
            server.chat(expect=400, messages=messages)


def test_no_template_is_a_clear_400_and_completions_work(tmp_path):
    with serving({"tiny": make_llm(with_template(tmp_path / "m", None))}) as server:
        assert "no chat template" in server.chat(expect=400)["error"]["message"]
        assert server.complete(max_tokens=2) and server.post("/api/generate", prompt="hi", stream=False)


def test_text_parts_are_joined(server):
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    ids = [server.post("/tokenize", messages=[{"role": "user", "content": c}])["tokens"] for c in (parts, "A\nB")]
    assert ids[0] == ids[1]
    assert server.chat(messages=[{"role": "user", "content": parts}], max_tokens=2)["usage"]["prompt_tokens"] == len(
        ids[0]
    )


def test_a_template_file_is_found(tmp_path):
    with serving({"tiny": make_llm(with_template(tmp_path / "m", "{{ messages[0].content }}"))}) as server:
        tokens = server.post("/tokenize", messages=[{"role": "user", "content": "hello"}])["tokens"]
        assert server.llm().tokenizer.decode(tokens) == "hello"


def test_a_prefilled_answer_is_continued(server):
    messages = [{"role": "user", "content": "greet"}, {"role": "assistant", "content": "Hi John,"}]
    tokens = server.post("/tokenize", messages=messages, continue_final_message=True)["tokens"]
    assert server.post("/detokenize", tokens=tokens)["prompt"].endswith("assistant\nHi John,")
    answer = server.chat(messages=messages, continue_final_message=True, max_tokens=2)
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    both = server.chat(expect=400, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert "exclude each other" in both["error"]["message"]


# ---- stop-match


@pytest.mark.parametrize("logprobs", [None, 1])
def test_nothing_of_a_stop_string_is_seen(server, scripted, logprobs):
    body = scripted("A", "or", "er", "F", " and more") | {"stop": "orerF", "logprobs": logprobs}
    whole = server.complete(**body)["choices"][0]
    assert whole["text"] == "A" and whole["finish_reason"] == "stop" and whole["stop_reason"] == "orerF"
    events = server.stream(prompt="the", **body)
    assert text_of(events) == "A" and reasons(events) == ["stop"] and events[-1] == "[DONE]"
    if logprobs:
        assert whole["logprobs"]["tokens"] == ["A"]
        assert [t for e in events[:-1] for t in e["choices"][0]["logprobs"]["tokens"]] == ["A"]
    almost = server.complete(**(body | {"stop": "orerX"}))["choices"][0]
    assert almost["text"].startswith("AorerF and")


def test_an_empty_stop_string_is_refused_and_none_means_none(server, scripted):
    for stop in ("", [""], ["a", ""]):
        assert server.complete(expect=400, stop=stop)["error"]["param"] == "stop"
    body = scripted("hello")
    assert {server.complete(stop=stop, **body)["choices"][0]["text"] for stop in (None, [])} == {"hello"}


def test_min_tokens_outlasts_eos_and_stop_strings(server, scripted):
    forced = server.complete(logit_bias={"2": 100}, min_tokens=4, max_tokens=9)
    assert forced["usage"]["completion_tokens"] == 5 and forced["choices"][0]["finish_reason"] == "stop"
    body = scripted("a", "b", "c", "d", "b", "e")
    assert server.complete(stop="b", **body)["choices"][0]["text"] == "a"
    assert server.complete(stop="b", min_tokens=4, **body)["choices"][0]["text"] == "abcd"


# ---- logprob-format


def test_chat_logprobs_name_bytes(server, scripted):
    body = scripted("x", "😀", EOS) | {"logprobs": True, "top_logprobs": 2}
    choice = server.chat(**body)["choices"][0]
    content = choice["logprobs"]["content"]
    assert choice["message"]["content"] == "x😀" and choice["finish_reason"] == "stop"
    assert b"".join(bytes(entry["bytes"]) for entry in content) == "x😀".encode()
    assert len(content) >= 4 and all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert content[1]["token"].startswith("bytes:\\xf0") and all(entry["token"] for entry in content)
    assert all(entry["logprob"] < 0 for entry in content)
    messages = [{"role": "user", "content": "hi"}]
    events = server.stream("/v1/chat/completions", messages=messages, **body)
    streamed = [c["logprobs"]["content"] for e in events[:-1] for c in e["choices"] if c["logprobs"]]
    assert [entry["token"] for part in streamed for entry in part] == [entry["token"] for entry in content]
    none = server.chat(**(body | {"top_logprobs": 0}))["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in none] == [[]] * len(content)
    assert server.chat(**(body | {"logprobs": False, "top_logprobs": None}))["choices"][0]["logprobs"] is None
    assert server.chat(expect=400, top_logprobs=2)["error"]["param"] == "top_logprobs"


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs(server, max_tokens):
    prompt = "a b <|im_end|>c"
    choice = server.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, ignore_eos=True)["choices"][0]
    names, text, logprobs = choice["logprobs"]["tokens"], choice["text"], choice["logprobs"]
    ids = server.llm().tokenizer.encode(prompt)
    assert text.startswith(prompt) and len(names) == len(ids) + max_tokens and choice["finish_reason"] == "length"
    assert logprobs["token_logprobs"][0] is None and all(p <= 0 for p in logprobs["token_logprobs"][1:])
    assert logprobs["top_logprobs"][0] is None and all(len(top) in (1, 2) for top in logprobs["top_logprobs"][1:])
    for name, place in zip(names[: len(ids)], logprobs["text_offset"], strict=False):
        assert text[place:].startswith(name)
    body = dict(prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, ignore_eos=True, temperature=0)
    events, whole = server.stream(**body), server.complete(**body)["choices"][0]
    assert text_of(events) == whole["text"]
    parts = [e["choices"][0]["logprobs"] for e in events[:-1]]
    for key in ("tokens", "text_offset"):
        assert [x for part in parts for x in part[key]] == whole["logprobs"][key]


def test_echo_without_an_answer_is_the_prompt(server):
    whole = server.complete(prompt="a b c", echo=True, max_tokens=0)
    assert whole["choices"][0]["text"] == "a b c" and whole["usage"]["completion_tokens"] == 0
    ids = server.llm().tokenizer.encode("a b c")
    assert server.complete(prompt=ids, echo=True, max_tokens=0)["choices"][0]["text"] == "a b c"


# ---- length-limits


def test_an_empty_prompt_is_refused(server):
    for prompt in ("", [""], [], [[]], ["a", ""], [[1], []]):
        assert server.complete(expect=400, prompt=prompt)["error"]["param"] in ("prompt", None)
    server.chat(expect=400, messages=[])
    assert server.complete(max_tokens=1)


def test_prompts_at_the_edge_of_the_context():
    with serving({"tiny": make_llm(max_model_len=64)}) as server:
        fits = server.complete(prompt=[5] * 63, max_tokens=1, ignore_eos=True)
        assert fits["choices"][0]["finish_reason"] == "length" and fits["usage"]["completion_tokens"] == 1
        for max_tokens in (1, None, 10000):
            for length in (64, 65, 5000):
                error = server.complete(expect=400, prompt=[5] * length, max_tokens=max_tokens)["error"]
                assert f"{length} tokens" in error["message"] and "64" in error["message"]
        for max_tokens in (10000, 64):
            long = server.complete(prompt=[5] * 10, max_tokens=max_tokens, ignore_eos=True)
            assert long["usage"]["total_tokens"] == 64 and long["choices"][0]["finish_reason"] == "length"
        assert "context" in server.complete(expect=400, prompt="word " * 40000)["error"]["message"]
        assert "context" in server.chat("word " * 4000, expect=400)["error"]["message"]


# ---- usage-finish


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("n", [1, 2])
def test_usage_in_a_stream_only_if_asked(server, path, n):
    body = {"n": n, "seed": 3, "max_tokens": 5, "stream": True}
    body |= {"prompt": "hi"} if "chat" not in path else {"messages": [{"role": "user", "content": "hi"}]}
    expected = server.post(path, **(body | {"stream": False}))["usage"]
    asked = server.stream(path, stream_options={"include_usage": True}, **body)
    assert asked[-2]["choices"] == [] and asked[-2]["usage"]["total_tokens"] == expected["total_tokens"]
    assert asked[-2]["usage"]["completion_tokens"] == expected["completion_tokens"]
    assert all(event["usage"] is None and event["choices"] for event in asked[:-2])
    for options in (None, {"include_usage": False}):
        events = server.stream(path, stream_options=options, **body)
        assert all("usage" not in event and event["choices"] for event in events[:-1])
    server.post(path, expect=400, **(body | {"stream": False, "stream_options": {"include_usage": True}}))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "pieces, more, reason",
    [
        (["ab", EOS], {"max_tokens": 9}, "stop"),
        (["ab", "x", "cd"], {"stop": ["x"]}, "stop"),
        (["abcd"], {}, "length"),
        (["ab", EOS], {}, "stop"),  # EOS exactly at max_tokens
    ],
)
def test_one_finish_reason_and_one_done(server, scripted, path, pieces, more, reason):
    body = scripted(*pieces) | more
    body |= {"prompt": "hi"} if "chat" not in path else {"messages": [{"role": "user", "content": "hi"}]}
    events = server.stream(path, **body)
    assert reasons(events) == [reason] and events.count("[DONE]") == 1 and events[-1] == "[DONE]"
    assert server.post(path, **body)["choices"][0]["finish_reason"] == reason


# ---- http-validate, http-compat


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/api/chat"])
def test_bodies_that_are_none(server, path):
    json_type = {"content-type": "application/json"}
    cases = [
        (b, json_type) for b in (b'{"a":1, x}', b"[]", b"null", b'"str"', b"", b"\xff\xfe", b"[" * 100_000, b"1e400")
    ]
    cases += [(b'{"prompt": "x"', {}), (b"prompt=x", {"content-type": "application/x-www-form-urlencoded"})]
    for content, headers in cases:
        answer = server.http.post(path, content=content, headers=headers)
        assert 400 <= answer.status_code < 500, (content[:20], answer.text)
        error = answer.json()["error"]
        assert error if path.startswith("/api/") else error["message"] and error["type"] == "invalid_request_error"
        assert "Traceback" not in answer.text and len(answer.content) < 10_000
    assert server.http.get(path).status_code == 405 and server.http.get("/nothing").json()["error"]["message"]


@pytest.mark.parametrize(
    "field, value",
    [("max_tokens", v) for v in ("256", -5, 1.5, True)]
    + [("stream", "yes"), ("stream", 1), ("n", 0), ("n", 10**30), ("echo", "x"), ("prompt", 5), ("prompt", [1, "a"])]
    + [("prompt", [2**70]), ("seed", 2**63), ("stop", [1]), ("logit_bias", []), ("best_of", 0), ("user", 3)]
    + [("top_k", 1.5), ("temperature", "1"), ("priority", 2**40), ("model", 7)],
)
def test_wrong_types_are_typed_errors(server, field, value):
    answer = server.http.post(
        "/v1/completions",
        content=json.dumps({"prompt": "x", "max_tokens": 1} | {field: value}),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 400 and field in (answer.json()["error"]["param"] or answer.json()["error"]["message"])


def test_numbers_that_are_none_and_errors_that_stay_small(server):
    headers = {"content-type": "application/json"}
    for number in ("NaN", "Infinity", "-Infinity", "1e400", "1" * 5000):
        content = '{"prompt": "x", "temperature": ' + number + "}"
        answer = server.http.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == 400, number
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = server.http.post(path, json={"prompt": ["x" * 100_000, 3], "messages": [3] * 5000, "x" * 5000: 1})
        assert answer.status_code == 400 and len(answer.content) < 10_000


def test_bad_logit_bias_keys(server):
    for bias in ({"AI": -100}, {"999999": 5}, {"-1": 1}, {"1": 1000}, {"1": "x"}):
        assert "logit_bias" in server.complete(expect=400, logit_bias=bias)["error"]["param"]
    assert server.complete(logit_bias={}, max_tokens=2)["usage"]["completion_tokens"] <= 2


def test_counts_beyond_all_bounds(server):
    for body in ({"n": 100000}, {"best_of": 100000}, {"logprobs": 100000}, {"prompt": ["x"] * 200}, {"top_k": -5}):
        server.complete(expect=400, **body)
    server.complete(expect=400, prompt=["x"] * 20, n=20)
    server.chat(expect=400, logprobs=True, top_logprobs=100000)


def test_unknown_models_and_no_model(server):
    for answer in (
        server.complete(expect=404, model="no-such-model"),
        server.chat(expect=404, model="no-such-model"),
        server.http.get("/v1/models/no-such-model").json(),
    ):
        assert answer["error"]["code"] == "model_not_found"
        assert "'no-such-model'" in answer["error"]["message"] and "'tiny'" in answer["error"]["message"]
    assert server.complete(max_tokens=1)["model"] == "tiny"  # the only one, under its real name


def test_preflight_and_header_on_the_stream(server):
    asked = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization, content-type"
    with serving(cors_origins=("http://page",), api_key="k") as open_server:
        preflight = open_server.http.options("/v1/chat/completions", headers=asked)
        assert preflight.status_code in (200, 204)
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        assert preflight.headers["access-control-allow-origin"] == "http://page"
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 3}
        headers = {"Origin": "http://page", "Authorization": "Bearer k"}
        answer = open_server.http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "http://page"
        other = open_server.http.options("/v1/models", headers=asked | {"Origin": "http://evil"})
        assert "access-control-allow-origin" not in other.headers
    closed = server.http.options("/v1/chat/completions", headers=asked)
    assert "access-control-allow-origin" not in closed.headers
