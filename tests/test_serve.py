"""The server as the official client sees it: every parameter, both APIs, both ways of answering."""

import json
import math
import re
import socket
from types import SimpleNamespace

import openai
import pytest
from server_fixture import folder, make_llm, reasons, script, serving, text_of, tool_folder

from sampling import SamplingParams
from serve import main, named_models, parse_arguments

GREEDY = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server():
    with serving({"tiny": make_llm(policy="priority")}) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def direct(server, prompt, **params) -> str:
    """What the library answers, without a server."""
    outs = server.in_engine(lambda: server.llm().generate([prompt], SamplingParams(**params)))
    return outs[0].outputs[0].text


def test_models(server, client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "vitrine"


def test_completion_is_what_the_library_says_and_streams_the_same(server, client):
    expected = direct(server, "the cat", temperature=0, max_tokens=8, ignore_eos=True)
    answer = client.completions.create(model="tiny", prompt="the cat", **GREEDY)
    assert answer.choices[0].text == expected and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8 and answer.object == "text_completion"
    chunks = list(client.completions.create(model="tiny", prompt="the cat", stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]


def test_several_prompts_of_text_and_ids(server, client):
    prompts = ["the cat", "once upon"]
    answer = client.completions.create(model="tiny", prompt=prompts, n=2, seed=5, max_tokens=6)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    ids = [server.llm().tokenizer.encode(prompt) for prompt in prompts]
    again = client.completions.create(model="tiny", prompt=ids, n=2, seed=5, max_tokens=6)
    assert [c.text for c in again.choices] == [c.text for c in answer.choices]
    events = server.stream(prompt=prompts, n=2, seed=5, max_tokens=6)
    for choice in answer.choices:
        parts = [c for e in events[:-1] for c in e["choices"] if c["index"] == choice.index]
        assert "".join(part["text"] for part in parts) == choice.text
        assert reasons(events, choice.index) == [choice.finish_reason]


def test_n_best_of_and_beams(server, client):
    several = client.completions.create(model="tiny", prompt="the", n=3, seed=1, max_tokens=6)
    assert len({choice.text for choice in several.choices}) > 1
    best = client.completions.create(model="tiny", prompt="the", n=2, best_of=5, seed=1, max_tokens=6, logprobs=0)
    means = [sum(c.logprobs.token_logprobs) / len(c.logprobs.token_logprobs) for c in best.choices]
    assert len(means) == 2 and means[0] >= means[1]
    assert "cannot be streamed" in server.complete(expect=400, best_of=3, stream=True)["error"]["message"]
    beams = client.completions.create(model="tiny", prompt="the", n=2, max_tokens=4, extra_body={"beam_width": 3})
    assert len(beams.choices) == 2 and beams.choices[0].text != beams.choices[1].text
    streamed = server.stream(prompt="the", n=2, max_tokens=4, beam_width=3)
    assert text_of(streamed) == beams.choices[0].text


def test_sampling_parameters_reach_the_engine(server, client):
    params = dict(temperature=0.7, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.25, seed=11, max_tokens=12)
    extra = dict(top_k=40, min_p=0.5, typical_p=0.95, repetition_penalty=1.1, min_tokens=2, stop_token_ids=[300])
    extra["ignore_eos"] = True
    bias = {"40": 3.0, "41": -100}
    answer = client.completions.create(model="tiny", prompt="a", logit_bias=bias, extra_body=extra, **params)
    assert answer.choices[0].text == direct(server, "a", logit_bias=bias, **params, **extra)


@pytest.mark.parametrize(
    "name, value",
    [("temperature", 2), ("top_p", 0.01), ("seed", 3), ("presence_penalty", 2), ("frequency_penalty", 2)]
    + [("logit_bias", {"70": 100}), ("stop", ["e", "a", "t"]), ("max_completion_tokens", 3)],
)
def test_chat_parameters_change_what_they_should(server, client, name, value):
    messages = [{"role": "user", "content": "tell me of the cat"}]
    base = dict(seed=2, max_completion_tokens=24, temperature=1.2, extra_body={"ignore_eos": True})
    plain = client.chat.completions.create(model="tiny", messages=messages, **base)
    other = client.chat.completions.create(model="tiny", messages=messages, **(base | {name: value}))
    assert other.choices[0].message.content != plain.choices[0].message.content


def test_chat_and_its_stream(server, client):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, **GREEDY)
    message = answer.choices[0].message
    assert message.role == "assistant" and answer.object == "chat.completion"
    chunks = list(client.chat.completions.create(model="tiny", messages=messages, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    assert chunks[-1].choices[0].finish_reason == "length" and {c.id for c in chunks} == {chunks[0].id}
    assert answer.usage.prompt_tokens == len(server.llm().tokenizer.encode_chat(messages))


def test_chat_without_a_limit_runs_up_to_the_context(server):
    answer = server.chat("hi", temperature=0, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == server.llm().max_model_len
    assert answer["choices"][0]["finish_reason"] == "length"


def test_the_client_raises_its_own_exceptions(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="x", top_p=3)
    assert bad.value.param == "top_p" and "(0, 1]" in bad.value.message
    with pytest.raises(openai.BadRequestError, match="language models only"):
        client.embeddings.create(model="tiny", input="x")


def test_unknown_fields_are_named_and_unsupported_ones_refused(server):
    answer = server.http.post("/v1/completions", json={"prompt": "x", "max_token": 3, "store": True, "max_tokens": 1})
    assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == "max_token, store"
    answer = server.http.post(
        "/v1/completions", json={"prompt": "x", "max_tokens": 1} | {f"{i}" + "ä" * 90: 1 for i in range(200)}
    )
    assert len(answer.headers["x-ignored-fields"]) < 1300 and answer.headers["x-ignored-fields"].endswith(
        ", and 180 more"
    )
    assert "x-ignored-fields" not in server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).headers


def test_structures_under_other_names_are_not_passed_over(server):
    for name in ("guided_json", "json_schema", "guided_grammar"):  # never free text where a structure was asked for
        error = server.complete(expect=400, **{name: {"type": "object"}})["error"]
        assert error["param"] == name and "response_format" in error["message"]
    assert server.complete(guided_json=None, max_tokens=1)["choices"]


def test_only_programs_may_leave_out_that_a_body_is_json(server):
    for headers in ({"origin": "http://elsewhere"}, {"content-type": "text/plain"}):
        answer = server.http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
        assert answer.status_code == 400 and "Content-Type: application/json" in answer.json()["error"]["message"]
    assert server.http.post("/api/generate", content=b'{"prompt": "x", "stream": false}').json()["done"]


@pytest.mark.parametrize("stream", (False, True))
@pytest.mark.parametrize("name", ("", " edge ", "a\r\nX-Forged: 1", "\x7f", "\t", "ключ", "x" * 500))
def test_any_name_of_an_unknown_field_makes_a_legal_header(server, name, stream):
    body = {"prompt": "x", "max_tokens": 1, "stream": stream, name: 1}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 200 and "x-forged" not in answer.headers
    shown = answer.headers["x-ignored-fields"]
    assert shown == shown.strip() and len(shown) > 0 and shown.isascii()
    assert server.complete(expect=400, suffix="y")["error"]["code"] == "unsupported"
    assert server.complete(suffix=None, max_tokens=1)
    assert server.chat(expect=400, functions=[{"name": "f"}])["error"]["param"] == "functions"


def test_null_is_the_same_as_absent(server):
    names = ["max_tokens", "temperature", "stop", "n", "logit_bias", "stream", "stream_options", "seed", "user", "echo"]
    assert server.complete(**dict.fromkeys(names))["usage"]["completion_tokens"] <= 16


def test_priority_salt_and_user(server, caplog):
    server.complete(prompt="a shared beginning of some length", max_tokens=2, priority=-1, user="somebody\n")
    cached = server.complete(prompt="a shared beginning of some length", max_tokens=2)["usage"]["prompt_tokens_details"]
    assert cached["cached_tokens"] > 0
    salted = server.complete(prompt="a shared beginning of some length", max_tokens=2, cache_salt="x")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_log_has_no_prompt_unless_asked(server, caplog):
    with caplog.at_level("INFO", "vitrine"):
        server.complete(prompt="a secret", user="u1", max_tokens=2)
        assert "secret" not in caplog.text and "user='u1'" in caplog.text and "prompt=" in caplog.text
        server.app.state.service.log_prompts = True
        server.complete(prompt="a secret", max_tokens=2)
        server.app.state.service.log_prompts = False
    assert "a secret" in caplog.text


def test_structured_output(server, client):
    schema = {"type": "object", "properties": {"age": {"type": "integer"}, "ok": {"type": "boolean"}}}
    schema |= {"required": ["age", "ok"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    messages = [{"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, response_format=wanted, max_tokens=100)
    value = json.loads(answer.choices[0].message.content)
    assert isinstance(value["age"], int) and isinstance(value["ok"], bool)
    free = server.chat(response_format={"type": "json_object"}, max_tokens=400, logit_bias={"93": 5, "34": 2}, seed=1)
    assert free["choices"][0]["finish_reason"] == "length" or isinstance(
        json.loads(free["choices"][0]["message"]["content"]), dict
    )
    shaped = {"type": "json_object", "schema": schema}
    value = json.loads(server.chat(response_format=shaped, max_tokens=100)["choices"][0]["message"]["content"])
    assert isinstance(value["age"], int) and isinstance(value["ok"], bool)
    assert server.complete(regex="(yes|no)!", max_tokens=9)["choices"][0]["text"] in ("yes!", "no!")
    assert server.complete(choice=["red", "green"], max_tokens=9)["choices"][0]["text"] in ("red", "green")
    nested = server.complete(grammar='root ::= "(" root ")" | "x"', max_tokens=40, logit_bias={"120": 5})["choices"][0]
    assert nested["finish_reason"] == "length" or re.fullmatch(r"(\(*)x(\)*)", nested["text"])
    assert text_of(server.stream(prompt="x", choice=["red", "green"], temperature=0, max_tokens=9)) in ("red", "green")


@pytest.mark.parametrize(
    "shape",
    [
        {"regex": "("},
        {"grammar": "start: nothing"},
        {"regex": "a", "grammar": 'start: "a"'},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "yaml"}},
        {"choice": []},
        {"regex": "a", "choice": ["b"]},
    ],
)
def test_bad_structure_is_refused_before_it_is_queued(server, shape):
    steps = server.in_engine(server.llm().stats)["steps"]
    assert server.complete(expect=400, **shape)["error"]["type"] == "invalid_request_error"
    assert server.in_engine(server.llm().stats)["steps"] == steps


def test_tokenize_and_detokenize(server):
    tokens = server.post("/tokenize", prompt="the <|im_end|> cat")["tokens"]
    assert tokens == server.llm().tokenizer.encode("the <|im_end|> cat")
    assert server.post("/detokenize", tokens=tokens)["prompt"] == "the <|im_end|> cat"
    chat = server.post("/tokenize", messages=[{"role": "user", "content": "x"}])
    assert chat["tokens"] == server.llm().tokenizer.encode_chat([{"role": "user", "content": "x"}])
    assert chat["count"] == len(chat["tokens"]) and chat["max_model_len"] == 512
    server.post("/detokenize", expect=400, tokens=[99999])
    server.post("/tokenize", expect=400)


def test_health_and_metrics(server):
    assert server.http.get("/health").json() == {"status": "ok"}
    server.complete(max_tokens=4, ignore_eos=True)
    lines = server.http.get("/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    label = '{model="tiny"}'
    assert float(values[f"vitrine_generated_tokens_total{label}"]) >= 4
    assert float(values[f"vitrine_kv_blocks{label}"]) == 512
    bound = 'vitrine_time_to_first_token_seconds_bucket{le="+Inf",model="tiny"}'
    assert values[bound] == values[f"vitrine_time_to_first_token_seconds_count{label}"] != "0.0"
    kinds = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}
    assert kinds["vitrine_inter_token_seconds"] == "histogram" and kinds["vitrine_requests_running"] == "gauge"


def test_two_models_in_one_process():
    other = make_llm(folder("qwen2"), max_model_len=64)
    with serving({"tiny": make_llm(), "other": other}) as server:
        body = dict(temperature=0, max_tokens=6, ignore_eos=True)
        a, b = (server.complete(model=name, **body)["choices"][0]["text"] for name in ("tiny", "other"))
        assert a != b and [m["id"] for m in server.http.get("/v1/models").json()["data"]] == ["tiny", "other"]
        assert "'tiny', 'other'" in server.complete(expect=400)["error"]["message"]
        assert {m["name"] for m in server.http.get("/api/tags").json()["models"]} == {"tiny", "other"}


def test_api_key():
    with serving(api_key="s3cret") as server:
        assert server.http.get("/health").status_code == 200
        two = [("Authorization", "Bearer x"), ("Authorization", "Bearer s3cret")]  # of which none counts
        for headers in ({}, two, two[::-1], {"Authorization": "Bearer s3cre"}, {"Authorization": "Basic s3cret"}):
            answer = server.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        with openai.OpenAI(base_url=server.url + "/v1", api_key="s3cret") as client:
            assert client.completions.create(model="tiny", prompt="x", max_tokens=1).choices


def test_a_full_queue_answers_429_with_retry_after():
    with serving({"tiny": make_llm(max_num_seqs=1)}, max_queue=1) as server:
        with server.http.stream("POST", "/v1/completions", json=long_answer()) as first:
            lines = first.iter_lines()  # dropping it would close the connection
            next(lines)
            with server.http.stream("POST", "/v1/completions", json=long_answer()):
                refused = server.http.post("/v1/completions", json={"prompt": "x"})
                assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
                assert refused.json()["error"]["type"] == "rate_limit_error"
        server.wait_idle()
        assert server.complete(max_tokens=1)


def long_answer(**more) -> dict:
    return {"prompt": "the", "max_tokens": 480, "ignore_eos": True, "stream": True, "logit_bias": {"70": 50}} | more


def test_ollama(server):
    options = {"num_predict": 6, "temperature": 0}
    answer = server.http.post("/api/generate", json={"model": "tiny", "prompt": "hi", "options": options})
    events = [json.loads(line) for line in answer.text.splitlines()]
    whole = server.post("/api/generate", prompt="hi", stream=False, options=options)
    assert "".join(event["response"] for event in events) == whole["response"]
    assert [event["done"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["eval_count"] == whole["eval_count"] and whole["total_duration"] > 0
    chat = server.post("/api/chat", messages=[{"role": "user", "content": "hi"}], stream=False, options=options)
    assert chat["message"] == {"role": "assistant", "content": whole["response"]}
    raw = server.post("/api/generate", prompt="hi", raw=True, stream=False, options=options)
    assert raw["prompt_eval_count"] == len(server.llm().tokenizer.encode("hi")) < whole["prompt_eval_count"]
    assert server.post("/api/generate", expect=404, model="no", prompt="x")["error"].startswith("there is no model")
    assert "temperature" in server.post("/api/generate", 400, prompt="x", options={"temperature": -1})["error"]
    picture = [{"role": "user", "content": "hi", "images": ["aa"]}]
    assert "images" in server.post("/api/chat", 400, messages=picture)["error"]
    yes = server.post("/api/generate", prompt="x", stream=False, format={"type": "boolean"}, options={"num_predict": 9})
    assert json.loads(yes["response"]) in (True, False)


TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}


def test_tools_need_a_template_that_shows_them(server):
    assert "does not show tools" in server.chat(expect=400, tools=[TOOL])["error"]["message"]
    assert server.chat(expect=400, tools=[TOOL], tool_choice="sometimes")["error"]["param"] == "tool_choice"
    assert server.chat(tools=[TOOL], tool_choice="none", max_tokens=2)["choices"][0]["message"]["content"] is not None


@pytest.fixture(scope="module")
def tool_server():
    with serving({"tiny": make_llm(tool_folder())}) as running:
        yield running


def test_calls_in_the_text_become_calls(tool_server, monkeypatch):
    answer = 'Well. <tool_call>\n{"name": "get", "arguments": {"x": "é"}}\n</tool_call>'
    script(monkeypatch, {7: [*tool_server.llm().tokenizer.encode(answer), 2]})
    whole = tool_server.chat(tools=[TOOL], seed=7, max_tokens=300)["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] == "Well. "
    assert call["function"]["name"] == "get" and json.loads(call["function"]["arguments"]) == {"x": "é"}
    body = dict(messages=[{"role": "user", "content": "hi"}], tools=[TOOL], seed=7, max_tokens=300)
    events = tool_server.stream("/v1/chat/completions", **body)
    assert text_of(events) == "Well. " and reasons(events) == ["tool_calls"]
    deltas = [call for e in events[:-1] for c in e["choices"] for call in c["delta"].get("tool_calls", [])]
    assert [(d["index"], d["function"]) for d in deltas] == [(0, call["function"])]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get"}}])
def test_a_call_can_be_demanded(tool_server, choice):
    parameters = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get", "parameters": parameters}}
    with openai.OpenAI(base_url=tool_server.url + "/v1", api_key="none") as client:
        messages = [{"role": "user", "content": "weather?"}]
        answer = client.chat.completions.create(
            model="tiny", messages=messages, tools=[tool], tool_choice=choice, max_tokens=200
        )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get" and json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")


def test_logprobs_of_every_answer_are_finite_numbers(server):
    answer = server.complete(prompt="the", logprobs=20, max_tokens=3, logit_bias={"40": -100})
    assert all(math.isfinite(p) for p in answer["choices"][0]["logprobs"]["token_logprobs"])


def test_the_command_line():
    args = parse_arguments(["--model", "a", "--model", "b=c", "--quant", "int4", "--compile", "--port", "0"])
    assert args.models == ["a", "b=c"] and args.quant == "int4" and args.compile and args.host == "127.0.0.1"
    assert parse_arguments([]).models == ["smollm2"]
    assert named_models(["a", "b=x/c", "hub/d"]) == {"a": "a", "b": "x/c", "hub/d": "hub/d"}
    for bad in (["a", "a"], ["=x"], ["x="]):
        with pytest.raises(ValueError, match="NAME=MODEL"):
            named_models(bad)
    bad = [["--port", "65536"], ["--stall", "0"], ["--stall", "nan"], ["--drain", "inf"], ["--api-key", ""]]
    for flags in (["--port", "-1"], ["--max-body", "0"], ["--drain", "-3"], ["--no-such-flag"], *bad):
        with pytest.raises(SystemExit):
            parse_arguments(flags)
    with pytest.raises(ValueError, match="--verify would change nothing here"):
        parse_arguments(["--verify", "rejection"])
    assert main(["--model", "no-such-model"]) == 2


def test_an_address_that_is_taken_is_found_before_a_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--model", "no-such-model", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert f"127.0.0.1 port {port} (Address already in use): choose another" in error and "no-such-model" not in error
    assert main(["--model", "no-such-model", "--host", "nowhere.invalid"]) == 2
    assert "nowhere.invalid" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, warned",
    [
        (["--cors-origin", "*"], ["--cors-origin '*'"]),
        (["--host", "0.0.0.0", "--cors-origin", "*"], ["0.0.0.0", "--cors-origin '*'"]),
        (["--cors-origin", "*", "--api-key", "k"], []),
        (["--cors-origin", "http://page"], []),
    ],
)
def test_a_server_that_strangers_may_use_without_a_key_warns_in_a_line_for_each_reason(
    monkeypatch, capsys, flags, warned
):
    monkeypatch.setattr("serve.LLM", lambda **options: make_llm(options["model"]))
    monkeypatch.setattr("serve.Server", lambda *args: SimpleNamespace(run=lambda: None, started=True))
    assert main(["--model", str(folder()), "--port", "0", *flags]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert len(lines) == len(warned) and all(map(str.__contains__, lines, warned))


def test_the_key_may_come_from_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("VITRINE_API_KEY", "hidden")
    assert parse_arguments([]).api_key == "hidden" and parse_arguments(["--api-key", "shown"]).api_key == "shown"
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "all users of this machine see it here" in shown and "hidden" not in shown
