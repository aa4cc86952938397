"""/v1/responses as the official client sees it."""

import json

import openai
import pytest
from server_fixture import make_llm, script, serving, tool_folder

from serving.responses_api import ResponsesBody


@pytest.fixture(scope="module")
def server():
    with serving({"tiny": make_llm()}) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


HI = [{"role": "user", "content": "hi"}]
PLACE = {"properties": {"city": {"enum": ["Rome", "Bern"]}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "parameters": PLACE}
ANSWER = {"temperature": 0, "max_output_tokens": 8}


def test_a_response_is_what_the_chat_answers_and_streams_the_same(client):
    chat = client.chat.completions.create(model="tiny", messages=HI, temperature=0, max_tokens=8)
    response = client.responses.create(model="tiny", input="hi", metadata={"a": "b"}, **ANSWER)
    assert response.output_text == chat.choices[0].message.content and response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens" and response.metadata == {"a": "b"}
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens) == (chat.usage.prompt_tokens, 8) and usage.total_tokens > 8
    events = list(client.responses.create(model="tiny", input=HI, stream=True, **ANSWER))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == response.output_text
    kinds = [event.type.removeprefix("response.") for event in events if "delta" not in event.type]
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds == [*begin, "output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert events[-1].response.output_text == response.output_text and events[-1].response.usage.output_tokens == 8


def test_instructions_and_items_are_turns_of_the_chat():
    call = {"name": "f", "arguments": "{}"}
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "content": [{"text": "d"}, {"type": "output_text", "text": "e"}]},
        {"type": "function_call", "call_id": "1", **call},
        {"type": "function_call", "call_id": "2", **call},
        {"type": "function_call_output", "call_id": "1", "output": "c"},
        {"type": "function_call", "call_id": "3", **call},
    ]
    one, two, three = ({"id": i, "type": "function", "function": call} for i in "123")
    assert ResponsesBody(input=items, instructions="z").messages() == [
        {"role": "system", "content": "z"},
        {"role": "developer", "content": "a"},
        {"role": "assistant", "content": "de", "tool_calls": [one, two]},
        {"role": "tool", "tool_call_id": "1", "content": "c"},
        {"role": "assistant", "content": "", "tool_calls": [three]},
    ]


def test_calls_are_items_behind_the_text(monkeypatch):
    with serving({"tiny": make_llm(tool_folder())}) as running:
        forced = running.post("/v1/responses", input="hi", tools=[WEATHER], tool_choice="required", seed=1)
        (item,) = forced["output"]
        assert item["name"] == "weather" and json.loads(item["arguments"])["city"] in ("Rome", "Bern")
        text = 'Well. <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call> More.'
        script(monkeypatch, {7: [*running.llm().tokenizer.encode(text), 2]})
        with openai.OpenAI(base_url=running.url + "/v1", api_key="none") as client:
            asked = {"model": "tiny", "input": "hi", "tools": [WEATHER], "extra_body": {"seed": 7}}
            events = list(client.responses.create(stream=True, **asked))
            message, call, more = client.responses.create(**asked).output
    assert message.content[0].text == "Well. " and json.loads(call.arguments) == {"city": "Rome"}
    assert more.content[0].text.strip() == "More."
    assert [item.type for item in events[-1].response.output] == ["message", "function_call", "message"]
    assert [e.delta for e in events if e.type == "response.function_call_arguments.delta"] == [call.arguments]


def test_an_output_follows_its_format(client):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    response = client.responses.create(model="tiny", input="hi", text=form, extra_body={"seed": 2})
    assert set(json.loads(response.output_text)) == {"a"} and response.status == "completed"


def test_scores_stand_beside_their_text(client):
    response = client.responses.create(
        model="tiny", input="hi", include=["message.output_text.logprobs"], top_logprobs=2, **ANSWER
    )
    (part,) = response.output[0].content
    assert b"".join(bytes(score.bytes) for score in part.logprobs).decode(errors="replace") == part.text
    assert all(len(score.top_logprobs) == 2 for score in part.logprobs)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("store", True), ("background", True), ("truncation", "auto"), ("previous_response_id", "resp_1")],
        *[("reasoning", {"effort": "low"}), ("tools", [{"type": "web_search"}]), ("include", ["file_search_call"])],
        *[("text", {"verbosity": "low"}), ("text", {"format": {"type": "json_schema", "name": "x"}})],
        *[("max_output_tokens", 0), ("tool_choice", "required"), ("temperature", 9e9)],
        *[("input", []), ("input", [{"type": "item_reference", "id": "x"}])],
        *[("input", [{"role": "user", "content": "x", "images": ["a"]}])],
        *[("input", [{"role": "user", "content": [{"type": "input_image", "text": "hi"}]}])],
    ],
)
def test_what_a_response_cannot_have_is_refused_by_name(server, field, value):
    error = server.post("/v1/responses", 400, **{"input": "hi"} | {field: value})["error"]
    assert field in f"{error['param']} {error['message']}", error


def test_unknown_fields_are_named(server):
    answer = server.http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 1, "shoe_size": 3})
    assert answer.headers["X-Ignored-Fields"] == "shoe_size"


def test_half_a_character_is_refused_in_every_text(server):
    for field in (b"user", b"instructions", b"prompt", b"cache_salt", b"metadata"):
        value = rb'{"a": "\ud800"}' if field == b"metadata" else rb'"\ud800"'
        path = "/v1/completions" if field in (b"cache_salt", b"prompt") else "/v1/responses"
        body = b'{"input": "hi", "prompt": "hi", "%s": %s}' % (field, value)
        answer = server.http.post(path, content=body)
        assert answer.status_code == 400 and field.decode() in answer.json()["error"]["message"]


def test_nulls_ask_for_nothing(server):
    item = {"type": None, "role": "user", "content": None}
    body = {"reasoning": {"effort": None, "summary": None}, "store": None, "text": None, "max_output_tokens": 1}
    assert server.post("/v1/responses", input=[item], **body)["status"] == "incomplete"


def test_a_schema_beside_json_object_is_obeyed(server):
    schema = {"properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    text = {"format": {"type": "json_object", "schema": {"type": "object"} | schema}}
    answer = server.post("/v1/responses", input="hi", text=text, seed=1)
    assert json.loads(answer["output"][0]["content"][0]["text"]) == {"a": 1}
    error = server.post("/v1/responses", 400, input="hi", text={"format": {"type": "text", "schema": schema}})["error"]
    assert "only beside json_object" in error["message"]
