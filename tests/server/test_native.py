"""SGLang's native protocol over HTTP: what the engine answers, as JSON."""

import json
import re
from itertools import pairwise
from pathlib import Path

import httpx2
import pytest

from tests.server.conftest import serving
from tests.waiting import until

GREEDY = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}


def events(response):
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_text_is_continued_as_the_engine_does(http, engine):
    answer = http.post("/generate", json={"text": "a quick", "sampling_params": GREEDY}).json()
    alone = engine.generate("a quick", GREEDY)
    assert (answer["text"], answer["output_ids"]) == (alone["text"], alone["output_ids"])
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 8}


def test_a_batch_is_a_list_in_order(http, engine):
    texts = ["a", "bc", "d e"]
    answers = http.post("/generate", json={"text": texts, "sampling_params": GREEDY}).json()
    assert [a["output_ids"] for a in answers] == [
        a["output_ids"] for a in engine.generate(texts, GREEDY)
    ]


def test_a_stream_has_all_so_far_in_each_event(http, engine):
    body = {"text": "a quick", "sampling_params": GREEDY, "stream": True, "return_logprob": True}
    found = events(http.post("/generate", json=body))
    alone = engine.generate("a quick", GREEDY)
    assert found[-1]["output_ids"] == alone["output_ids"]
    for one, next_one in pairwise(found):
        assert next_one["text"].startswith(one["text"])
        assert next_one["output_ids"][: len(one["output_ids"])] == one["output_ids"]
    assert len(found[-1]["meta_info"]["output_token_logprobs"]) == 8


def test_no_tokens_have_the_log_probabilities_of_the_next_one(http):
    body = {
        "text": "a quick",
        "return_logprob": True,
        "top_logprobs_num": 3,
        "return_text_in_logprobs": True,
    }
    none, one = (
        http.post("/generate", json={**body, "sampling_params": {"max_new_tokens": count}}).json()
        for count in (0, 1)
    )
    assert none["meta_info"]["output_top_logprobs"] == one["meta_info"]["output_top_logprobs"]
    assert len(none["meta_info"]["output_top_logprobs"][0]) == 3
    assert (none["text"], none["output_ids"], none["meta_info"]["completion_tokens"]) == ("", [], 0)


def test_several_samples_come_with_their_index(http):
    body = {"text": "a", "sampling_params": {**GREEDY, "n": 2}, "stream": True}
    assert {each["index"] for each in events(http.post("/generate", json=body))} == {0, 1}


def test_an_engine_whose_process_is_stopped_is_not_healthy(http, engine, monkeypatch):
    monkeypatch.setattr(type(engine.core), "responds", False)
    assert http.get("/health").status_code == 503
    monkeypatch.undo()
    assert http.get("/health").status_code == 200


def test_what_the_server_is_can_be_asked(http, engine):
    info = http.get("/get_model_info").json()
    assert (info["served_model_name"], info["is_generation"]) == (engine.model_name, True)
    assert (Path(info["tokenizer_path"]) / "tokenizer.json").is_file()
    assert http.get("/model_info").json() == info
    assert http.get("/ready").status_code == http.get("/health_generate").status_code == 200
    assert http.get("/server_info").json()["sglang_lite"]["program"]
    assert http.get("/v1/models").json()["data"][0]["id"] == engine.model_name
    assert http.get("/health").status_code == http.get("/ping").status_code == 200
    assert http.get("/v1/loads").json()["loads"][0]["num_running_reqs"] == 0
    # as a gateway does all the time
    asked = http.get("/v1/loads", params={"include": "core,queues"})
    assert asked.json()["loads"][0]["num_total_reqs"] == 0
    assert "x-unused-fields" not in asked.headers
    assert "sglang_lite_steps" in http.get("/metrics").text
    assert http.post("/flush_cache").status_code == 200


def test_text_and_ids_are_turned_into_each_other(http, engine):
    found = http.post("/tokenize", json={"prompt": "a quick"}).json()
    assert found["tokens"] == engine.tokenizer.encode("a quick")
    assert found["count"] == len(found["tokens"])
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {
        "text": engine.tokenizer.decode(found["tokens"])
    }
    both = http.post("/tokenize", json={"prompt": ["a", "b"]}).json()
    assert http.post("/detokenize", json={"tokens": both["tokens"]}).json() == {"text": ["a", "b"]}


def test_an_error_names_what_is_wrong(http):
    for body, parameter in (
        ({"text": "a", "sampling_params": {"temprature": 1}}, "temprature"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
        ({"text": "a", "input_ids": [1]}, "prompt"),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states"),
        ({"text": 3}, "text"),
        ({"text": "a", "sampling_parms": {}}, "sampling_parms"),
    ):
        response = http.post("/generate", json=body)
        assert response.status_code == 400, body
        error = response.json()["error"]
        assert error["param"] == parameter, error
        assert not error["retryable"]
    hinted = http.post("/generate", json={"text": "a", "sampling_parms": {}}).json()["error"][
        "message"
    ]
    assert "sampling_params?" in hinted
    for prompt in ("a", ["a"]):
        error = http.post("/generate", json={"prompt": prompt}).json()["error"]
        assert error["param"] == "prompt"
        assert "Text is `text` here" in error["message"]
    error = http.post(
        "/generate", json={"text": "a", "response_format": {"type": "json_object"}}
    ).json()["error"]
    assert "sampling_params.json_schema" in error["message"]


def test_a_batch_with_a_bad_request_is_refused_as_that_one(http):
    params = [GREEDY, {**GREEDY, "regex": "("}]
    answer = http.post("/generate", json={"text": ["a", "b"], "sampling_params": params})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, 400)
    assert "1 of 2 requests failed; the first at index 1: " in error["message"]
    assert http.post("/generate", json={"text": "a", "sampling_params": GREEDY}).status_code == 200


def test_fields_that_gateways_add_are_taken(http):
    added = {
        "model": None, "log_metrics": True, "no_logs": False, "background": False, "return_bytes": False,
        "return_entropy": False, "return_hidden_states": False, "rid": None, "session_params": None,
    }  # fmt: skip
    response = http.post("/generate", json={"text": "a", "sampling_params": GREEDY, **added})
    assert response.status_code == 200


def test_parameters_of_an_address_that_nothing_depends_on_are_named(http):
    body = {"prompt": "a"}
    assert (
        http.post("/tokenize?timeout=5&more=", json=body).headers["x-unused-fields"]
        == "timeout, more"
    )
    assert http.get("/v1/models?limit=20").headers["x-unused-fields"] == "limit"
    assert "x-unused-fields" not in http.post("/tokenize?beta=true", json=body).headers


def test_load_has_the_shape_that_older_gateways_add_up(http):
    nothing = {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}
    # the server's own first request may still run
    until(lambda: http.get("/get_load").json() == [nothing])


def test_the_counts_of_each_replica_can_be_asked_alone(http, engine):
    (counts,) = http.get("/internal_state").json()["internal_states"]
    assert (counts["dp_rank"], counts.keys() - {"dp_rank"}) == (0, engine.stats().keys())


def test_a_stream_may_have_what_is_new_in_each_event(engine):
    body = {"text": "a quick", "sampling_params": GREEDY, "stream": True, "return_logprob": True}
    with serving(engine, incremental_streaming_output=True) as url:
        assert httpx2.get(f"{url}/server_info", timeout=60).json()["incremental_streaming_output"]
        found = events(httpx2.post(f"{url}/generate", json=body, timeout=60))
    alone = engine.generate("a quick", GREEDY, return_logprob=True)
    assert "".join(each["text"] for each in found) == alone["text"]
    assert [token for each in found for token in each["output_ids"]] == alone["output_ids"]
    told = [token for each in found for _, token, _ in each["meta_info"]["output_token_logprobs"]]
    assert told == alone["output_ids"]
    assert [each["meta_info"]["completion_tokens"] for each in found][-1] == 8


def test_answers_are_taken_apart(http):
    text = 'so<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {}}} for name in ("e", "f")
    ]
    asked = {"text": text, "tools": tools, "tool_call_parser": "qwen25"}
    found = http.post("/parse_function_call", json=asked).json()
    (call,) = found["calls"]
    assert (found["normal_text"], call["tool_index"], call["name"]) == ("so", 1, "f")
    assert json.loads(call["parameters"]) == {"x": 1}
    asked = {"text": "<think>why</think>so", "reasoning_parser": "qwen3"}
    assert http.post("/separate_reasoning", json=asked).json() == {
        "reasoning_text": "why",
        "text": "so",
    }
    for path in ("/separate_reasoning", "/parse_function_call"):
        refused = http.post(
            path,
            json={"text": "a", "tools": [], "tool_call_parser": "no", "reasoning_parser": "no"},
        )
        assert refused.status_code == 400


def test_weights_are_replaced_from_a_folder_or_stay(http, engine, folder, tmp_path):
    before = http.post("/generate", json={"text": "a quick", "sampling_params": GREEDY}).json()[
        "output_ids"
    ]
    missing = http.post("/update_weights_from_disk", json={"model_path": str(tmp_path / "none")})
    assert (missing.status_code, missing.json()["success"]) == (400, False)
    replaced = http.post("/update_weights_from_disk", json={"model_path": folder})
    assert (replaced.status_code, replaced.json()["success"]) == (200, True)
    assert (
        http.post("/generate", json={"text": "a quick", "sampling_params": GREEDY}).json()[
            "output_ids"
        ]
        == before
    )


@pytest.mark.parametrize("given", [None, "", "x" * 129, "\u00e9", "mine-1"])
def test_a_request_keeps_its_id_or_is_given_one(http, given):
    headers = {} if given is None else {"x-request-id": given.encode("latin-1")}
    found = http.get("/ping", headers=headers).headers["x-request-id"]
    assert found == given if given == "mine-1" else re.fullmatch("[0-9a-f]{32}", found)


def test_the_pattern_of_a_path_is_a_path_like_any_other(http):
    """With braces, as a client sends it that has forgotten to fill it in."""
    found = http.get("/v1/models/{model:path}")
    assert (found.status_code, found.json()["error"]["code"]) == (404, "not_found")
