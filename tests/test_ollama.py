"""What Ollama's clients send beside prompts and conversations."""

import pytest
from server_fixture import make_llm, serving, tool_folder

HI = {"messages": [{"role": "user", "content": "hi"}], "stream": False, "options": {"num_predict": 2.0, "seed": 42.0}}


@pytest.fixture(scope="module")
def server():
    with serving({"tiny": make_llm(tool_folder())}) as running:
        yield running


def test_a_body_without_a_prompt_loads_the_model(server):
    assert server.post("/api/generate", model="tiny")["done_reason"] == "load"
    assert server.post("/api/generate", model="tiny", prompt="", keep_alive=0)["done_reason"] == "unload"
    answer = server.post("/api/chat", model="tiny", messages=[], keep_alive="5m")
    assert answer["done"] and answer["message"] == {"role": "assistant", "content": ""}
    assert server.post("/api/chat", messages=None, keep_alive="0s")["done_reason"] == "unload"
    assert "no model" in server.post("/api/generate", 404, model="other")["error"]
    assert "format" in server.post("/api/generate", 400, prompt=None, format="xml")["error"]


@pytest.mark.parametrize("more", [{}, {"model": "tiny:latest"}, {"format": ""}, {"format": None}, {"keep_alive": "1h"}])
def test_what_clients_send_out_of_habit_is_served(server, more):
    answer = server.post("/api/chat", **HI | more)
    assert answer["eval_count"] == 2 and answer["model"] == "tiny"


def test_models_are_listed_and_shown(server):
    (listed,), (loaded,) = (server.http.get(f"/api/{path}").json()["models"] for path in ("tags", "ps"))
    assert listed["name"] == loaded["name"] == "tiny" and listed["size"] > 0 and loaded["expires_at"]
    shown = server.post("/api/show", name="tiny:latest")
    assert shown["capabilities"] == ["completion"] and shown["model_info"]["llama.context_length"] == 512
    assert server.http.get("/api/version").json()["version"]


@pytest.mark.parametrize("action", ["pull", "create", "copy", "push", "embed", "embeddings"])
def test_what_this_server_does_not_do_is_a_sentence(server, action):
    assert f"/api/{action} is not supported: " in server.post(f"/api/{action}", 400, model="x")["error"]
    assert "/api/delete" in server.http.request("DELETE", "/api/delete", json={}).json()["error"]


def test_the_pace_of_one_token_is_no_faster_than_its_answer(server):
    one = server.post("/api/chat", **HI | {"options": {"num_predict": 1}})
    assert one["eval_count"] == 1 and one["prompt_eval_duration"] <= one["eval_duration"] <= one["total_duration"]


def test_an_address_that_does_not_exist_is_named(server):
    assert server.http.get("/api/nowhere").json()["error"] == "Not Found: GET /api/nowhere"
    for path, allowed in {"/v1/models": "GET, HEAD", "/": "GET, HEAD", "/openapi.json": "GET, HEAD"}.items():
        assert server.http.put(path).headers["allow"] == allowed
        assert (server.http.head(path).status_code, server.http.head(path).content) == (200, b"")
    assert server.http.head("/live/events").status_code == 200, "it ends, as a stream without a reader does"
    wrong = server.http.head("/v1/completions")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"


def test_the_document_says_what_is_sent(server):
    document = server.http.get("/openapi.json")
    assert "422" not in document.text and "ValidationError" not in document.text
    for path, operations in document.json()["paths"].items():
        told = next(iter(operations.values()))["responses"]
        assert set(told) >= ({"400", "404", "405", "408", "413", "429", "503"} if "post" in operations else {"405"})
        error = told["405"]["content"]["application/json"]["schema"]["properties"]["error"]["type"]
        assert error == ("string" if path.startswith("/api/") else "object")
        streams = ("completions", "/v1/responses", "/live/events", "/api/generate", "/api/chat")
        media = "application/x-ndjson" if path.startswith("/api/") else "text/event-stream"
        assert (media in told["200"]["content"]) == path.endswith(streams)
    assert server.http.get("/docs").status_code == 404, "a page that loads scripts from elsewhere"
