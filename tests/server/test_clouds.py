"""Routes of clouds answer as the routes whose form they have."""

import pytest

PARAMETERS = {"sampling_params": {"max_new_tokens": 6, "temperature": 0}}


def test_sagemakers_requests_are_chats(http):
    body = {"messages": [{"role": "user", "content": "a quick"}], "max_tokens": 6, "temperature": 0}
    found, expected = (
        http.post(path, json=body).json() for path in ("/invocations", "/v1/chat/completions")
    )
    assert found["choices"] == expected["choices"]
    assert http.post("/invocations", json={**body, "stream": True}).text.endswith(
        "data: [DONE]\n\n"
    )
    assert http.get("/ping").status_code == 200
    assert http.post("/invocations", json={"messages": 3}).json()["error"]["param"] == "messages"


@pytest.mark.parametrize("instances", [
    [{"text": "a quick"}, {"text": "the"}], [{"input_ids": [5, 6, 7]}, {"input_ids": [9]}], [{"text": "a"}],
])  # fmt: skip
def test_vertexs_instances_are_prompts(http, instances):
    name = next(iter(instances[0]))
    found = http.post("/vertex_generate", json={"instances": instances, "parameters": PARAMETERS})
    expected = http.post("/generate", json={name: [each[name] for each in instances], **PARAMETERS})
    assert [each["text"] for each in found.json()["predictions"]] == [
        each["text"] for each in expected.json()
    ]


@pytest.mark.parametrize(("body", "told"), [
    ({"instances": []}, "instances: is empty"),
    ({"instances": [{"text": "a"}], "parameters": {"stream": True}}, "parameters.stream"),
    ({"instances": [{"txt": "a"}]}, "txt"), ({}, "instances: is missing"), ({"instances": [{}]}, "instances: need a text each"),
    ({"instances": [{"text": "a"}, {"input_ids": [5]}]}, "instances: need"),
    ({"instances": [{"text": "a"}, {}]}, "text"),
])  # fmt: skip
def test_a_mistake_of_vertexs_is_told(http, body, told):
    response = http.post("/vertex_generate", json=body)
    assert response.status_code == 400
    assert told in response.json()["error"]["message"]
