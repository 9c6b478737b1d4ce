"""Ollama's protocol, by its official client."""

import json

import httpx2
import numpy as np
import ollama
import pydantic
import pytest
from ollama import _types as types
from transformers import BertModel

import sglang_lite as sgl
from sglang_lite.server.ollama import catalog, ollama_request
from tests.runtime.embedding.tiny import saved
from tests.runtime.media.seeing import CHAT, png, save_seeing, seen
from tests.server.conftest import serving
from tests.server.scripted import Scripted

USER: list = [{"role": "user", "content": "a quick brown fox"}]
POINT = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2]}},
    "required": ["x"],
    "additionalProperties": False,
}
GREEDY = {"temperature": 0, "num_predict": 12}
THINKS = "{% for m in messages %}{{ m.content }}{{ m.reasoning_content }}{% endfor %}{{ enable_thinking }}<think>"


@pytest.fixture(scope="module")
def name(engine):
    return engine.model_name


@pytest.fixture(scope="module")
def client(url):
    with ollama.Client(url) as client:
        yield client


def weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: name of the city
    """
    return city


def test_an_answer_is_what_the_engine_says_to_the_rendered_messages(client, engine, name):
    found = client.chat(name, USER, options=GREEDY)
    text = engine.chat_template().render(USER, add_generation_prompt=True)
    alone = engine.generate(text, {"max_new_tokens": 12, "temperature": 0})
    assert found.message.content == alone["text"]
    assert (found.message.role, found.done, found.model) == ("assistant", True, name)
    assert (found.eval_count, found.prompt_eval_count) == (
        len(alone["output_ids"]),
        alone["meta_info"]["prompt_tokens"],
    )
    assert found.done_reason == alone["meta_info"]["finish_reason"]["type"]
    assert found.total_duration >= found.prompt_eval_duration + found.eval_duration > 0


def test_a_stream_says_the_same_in_lines_of_json(client, http, name):
    whole = client.chat(name, USER, options=GREEDY)
    parts = list(client.chat(name, USER, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count
    body = {"model": name, "messages": USER, "options": GREEDY}
    response = http.post("/api/chat", json=body)  # a stream unless it says otherwise
    assert response.headers["content-type"] == "application/x-ndjson"
    assert json.loads(response.text.splitlines()[-1])["done"] is True


def test_a_prompt_is_a_users_message_and_a_raw_one_the_whole_text(client, engine, name):
    asked = client.generate(name, USER[0]["content"], system="be brief", options=GREEDY)
    chat = client.chat(name, [{"role": "system", "content": "be brief"}, *USER], options=GREEDY)
    assert asked.response == chat.message.content
    raw = client.generate(name, "a<|end|>b", raw=True, options=GREEDY)
    assert (
        raw.response
        == engine.generate("a<|end|>b", {"max_new_tokens": 12, "temperature": 0})["text"]
    )
    parts = list(
        client.generate(name, USER[0]["content"], system="be brief", options=GREEDY, stream=True)
    )
    assert "".join(part.response for part in parts) == asked.response


def test_a_message_of_the_assistant_at_the_end_is_continued(client, engine, name):
    begun = [*USER, {"role": "assistant", "content": "it ju"}]
    text = engine.chat_template().render(begun).rpartition("</assistant>")[0]
    expected = engine.generate(text, {"max_new_tokens": 12, "temperature": 0})["text"]
    assert client.chat(name, begun, options=GREEDY).message.content == expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_holds_the_answer(client, name, stream):
    class Point(pydantic.BaseModel, extra="forbid"):
        x: int = pydantic.Field(ge=1, le=2)

    for schema in (Point.model_json_schema(), POINT):
        found = client.chat(name, USER, format=schema, stream=stream)
        text = "".join(part.message.content for part in found) if stream else found.message.content
        assert Point.model_validate_json(text).x in (1, 2)
    found = client.generate(name, "a", format="json", options={"num_predict": 100, "seed": 1})
    assert found.done_reason == "length" or isinstance(json.loads(found.response), dict)


def test_options_are_the_engines_parameters(engine, name):
    scripted = Scripted(engine, ["a"])
    options = {
        "num_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 5, "stop": ["x", "y"],
        "repeat_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.2,
    }  # fmt: skip
    with serving(scripted) as url, ollama.Client(url) as client:
        client.chat(name, USER, options=options)
        client.chat(
            name, USER, options={"num_predict": -1, "seed": -1, "num_gpu": 1, "mirostat": 0}
        )
    (_, given, _), (_, plain, _) = scripted.asked[-2:]
    assert given.max_tokens == 7
    for parameter in (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
    ):
        assert getattr(given, parameter) == options[parameter]
    assert (given.repetition_penalty, tuple(given.stop)) == (1.2, ("x", "y"))
    assert (plain.max_tokens, plain.seed) == (engine.context_length, sgl.SamplingParams().seed)


def test_what_has_no_effect_is_reported(http, name):
    body = {
        "model": name, "prompt": "a", "stream": False, "keep_alive": "5m",
        "options": {"num_predict": 1, "num_ctx": 4096, "repeat_last_n": 64},
    }  # fmt: skip
    told = http.post("/api/generate", json=body).headers["x-unused-fields"]
    assert told == "keep_alive, options.num_ctx, options.repeat_last_n"
    # which this model's template doesn't show
    messages = [{"role": "tool", "content": "3", "tool_name": "add"}]
    body = {"model": name, "messages": messages, "stream": False, "options": {"num_predict": 1}}
    assert http.post("/api/chat", json=body).headers["x-unused-fields"] == "messages[0].tool_name"


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_are_told_whole(engine, name, stream):
    said = [
        'hm <tool_call>\n{"name": "wea',
        'ther", "arguments": {"city": "Ro',
        'me"}}\n</tool_call>',
    ]
    messages = [
        *USER, {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Bari"}}}]},
        {"role": "tool", "content": "sun", "tool_name": "weather"},
    ]  # fmt: skip
    with serving(Scripted(engine, said)) as url, ollama.Client(url) as client:
        found = client.chat(name, messages, tools=[weather], stream=stream)
        parts = list(found) if stream else [found]
    (call,) = [call for part in parts for call in part.message.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Rome"})
    assert "".join(part.message.content for part in parts).strip() == "hm"
    assert parts[-1].done_reason == "stop"


@pytest.mark.parametrize("end", "\x85\u2028\u2029")
def test_a_line_end_of_unicode_ends_no_line(engine, name, end):
    with serving(Scripted(engine, [f"one{end}two"])) as url, ollama.Client(url) as client:
        chat = [part.message.content for part in client.chat(name, USER, stream=True)]
        assert "".join(chat) == f"one{end}two"
        assert (
            "".join(part.response for part in client.generate(name, "a", stream=True))
            == f"one{end}two"
        )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cut", ['{"na', '{"name": "weather", "arguments": {"ci'])
def test_a_whole_call_before_one_that_a_limit_cuts_is_told(engine, name, stream, cut):
    said = [
        f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "Rome"}}}}\n</tool_call>\n<tool_call>\n{cut}'
    ]
    with serving(Scripted(engine, said, finish="length")) as url, ollama.Client(url) as client:
        found = client.chat(name, USER, tools=[weather], stream=stream)
        parts = list(found) if stream else [found]
    (call,) = [call for part in parts for call in part.message.tool_calls or ()]
    assert (call.function.arguments, parts[-1].done_reason) == ({"city": "Rome"}, "length")


def test_a_union_of_types_is_a_list_of_them(engine, name):
    def pick(one: int | str, other: float):
        """Picks."""

    scripted = Scripted(engine, ["a"], template="{{ tools | tojson }}")
    with serving(scripted) as url, ollama.Client(url) as client:
        client.chat(name, USER, tools=[pick])
    ((prompt, *_),) = scripted.asked[-1:]
    (tool,) = json.loads(prompt.text)
    types = {
        name: each["type"] for name, each in tool["function"]["parameters"]["properties"].items()
    }
    assert (sorted(types["one"]), types["other"]) == (["integer", "string"], "number")


@pytest.mark.parametrize("arguments", ['{"n": 1e400}', '{"n": "\\ud800"}'])
def test_a_call_that_cant_be_read_is_an_error_in_a_stream_too(engine, name, arguments):
    said = [f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>']
    with serving(Scripted(engine, said)) as url, ollama.Client(url) as client:
        for stream in (False, True):
            with pytest.raises(
                ollama.ResponseError, match="the model's call of weather can't be read"
            ):
                list(client.chat(name, USER, tools=[weather], stream=stream))


def test_a_call_that_a_limit_cuts_is_no_call(engine, name):
    said = ['<tool_call>\n{"name": "weather", "arguments": {"ci']
    with serving(Scripted(engine, said, finish="length")) as url, ollama.Client(url) as client:
        found = client.chat(name, USER, tools=[weather])
    assert (found.message.tool_calls, found.done_reason) == (None, "length")


def test_thoughts_are_apart(engine, name):
    scripted = Scripted(engine, ["I th", "ink</think>so"], template=THINKS)
    with serving(scripted, reasoning_parser="qwen3") as url, ollama.Client(url) as client:
        found = client.chat(name, USER, think=True)
        parts = list(client.generate(name, "a", think=True, stream=True))
        assert "thinking" in client.show(name).capabilities
    assert (found.message.thinking, found.message.content) == ("I think", "so")
    assert ("".join(part.thinking or "" for part in parts), "".join(p.response for p in parts)) == (
        "I think",
        "so",
    )


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_told_of_every_token(client, name, stream):
    options = {"num_predict": 5, "temperature": 0}
    found = client.chat(name, USER, logprobs=True, top_logprobs=2, options=options, stream=stream)
    parts = list(found) if stream else [found]
    entries = [entry for part in parts for entry in part.logprobs or ()]
    assert len(entries) == parts[-1].eval_count
    assert all(
        entry.logprob == entry.top_logprobs[0].logprob and len(entry.top_logprobs) == 2
        for entry in entries
    )


@pytest.mark.parametrize("ask", [dict(messages=[]), dict(prompt="")])
def test_without_a_prompt_it_is_loaded(client, name, ask):
    found = client.chat(name, **ask) if "messages" in ask else client.generate(name, **ask)
    assert (found.done, found.done_reason) == (True, "load")


def test_null_is_a_field_that_is_not_given(http, name):
    for path, body in (
        ("chat", {"messages": None}),
        ("generate", {"prompt": None, "raw": None, "stream": False}),
    ):
        assert (
            http.post(f"/api/{path}", json={"model": name, **body}).json()["done_reason"] == "load"
        )
    body = {"model": name, "prompt": "a", "stream": None, "options": {"num_predict": 1}}
    assert http.post("/api/generate", json=body).headers["content-type"] == "application/x-ndjson"


@pytest.mark.parametrize(("path", "body", "status", "told"), [
    ("chat", {"model": "other"}, 404, "'other' is not served"),
    ("chat", {}, 400, "model: is missing"),
    ("chat", {"messages": [{"role": "robot"}]}, 400, "messages[0].role"),
    ("chat", {"mesages": []}, 400, "Did you mean messages?"),
    ("chat", {"messages": USER, "format": "xml"}, 400, "neither json nor a JSON Schema"),
    ("chat", {"messages": USER, "format": {"type": "nothing"}}, 400, "type"),
    ("chat", {"messages": USER, "options": {"temprature": 1}}, 400, "options.temprature: is not a field"),
    ("chat", {"messages": USER, "options": {"temprature": 1}}, 400, "Did you mean temperature?"),
    ("chat", {"messages": USER, "options": {"num_predict": "a"}}, 400, "options.num_predict: expected"),
    ("chat", {"messages": USER, "options": {"mirostat": 2}}, 400, "mirostat: is not supported"),
    ("chat", {"messages": USER, "options": {"temperature": -1}}, 400, "options.temperature: -1"),
    ("chat", {"messages": USER, "options": {"repeat_penalty": 5}}, 400, "options.repeat_penalty: 5"),
    ("chat", {"messages": USER, "logprobs": True, "top_logprobs": -1}, 400, "top_logprobs: -1"),
    ("chat", {"messages": USER, "top_logprobs": 1}, 400, "needs logprobs"),
    ("chat", {"messages": [{"role": "user", "images": ["aGk="]}]}, 400, "messages[0].images[0]"),
    ("generate", {"prompt": "a", "suffix": "b"}, 400, "suffix: is not supported"),
    ("generate", {"prompt": "a", "raw": True, "system": "b"}, 400, "system: can't be combined with raw"),
    ("embed", {"input": "a"}, 400, "generates text"),
    ("show", {}, 400, "model: is missing"), ("show", {"name": "other"}, 404, "'other' is not served"),
    ("pull", {"name": "x"}, 501, "Ollama's"), ("blobs/sha256:0", {}, 501, "Ollama's"),
])  # fmt: skip
def test_an_error_is_one_text(http, name, path, body, status, told):
    body = body if path in ("show", "pull") or not body else {"model": name, **body}
    response = http.post(f"/api/{path}", json=body)
    assert response.status_code == status
    assert told in response.json()["error"]


def test_an_error_in_a_stream_is_its_last_line(engine, name):
    scripted = Scripted(engine, ["a", sgl.BackendError("it broke.")])
    with (
        serving(scripted) as url,
        ollama.Client(url) as client,
        pytest.raises(ollama.ResponseError, match="it broke"),
    ):
        list(client.chat(name, USER, stream=True))


def test_the_catalog(client, engine, name):
    (model,) = client.list().models
    (running,) = client.ps().models
    assert (model.model, running.model, model.digest) == (name, name, running.digest)
    assert model.size > 1000
    assert (model.details.family, model.details.format) == ("llama", "safetensors")
    assert model.details.quantization_level == "F32"
    assert running.context_length == engine.context_length
    shown = client.show(f"{name}:latest")
    assert shown.capabilities == ["completion", "tools"]
    assert shown.template == engine.chat_template().source
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.context_length"] == engine.context_length
    assert client.chat(f"{name}:latest", USER, options=GREEDY).model == f"{name}:latest"


def test_a_key_is_asked_for(engine, name):
    with serving(engine, api_key=("secret",)) as url:
        assert httpx2.head(url).status_code == 200  # how Ollama's programs look for a server
        with (
            ollama.Client(url) as client,
            pytest.raises(ollama.ResponseError, match="key is missing") as refused,
        ):
            client.list()
        assert refused.value.status_code == 401
        with ollama.Client(url, headers={"authorization": "Bearer secret"}) as client:
            assert client.list().models[0].model == name


def test_embeddings(tmp_path):
    saved(BertModel, tmp_path)
    with (
        sgl.Engine(tmp_path, in_process=True, threads=1) as engine,
        serving(engine, served_model_name="embed") as url,
        ollama.Client(url) as client,
    ):
        found = client.embed("embed", ["the sea", "a cat"], dimensions=8)
        one = client.embed("embed", "the sea")
        older = client.embeddings("embed", "the sea")
        assert client.show("embed").capabilities == ["embedding"]
        assert client.embed("embed", []).embeddings == []
        rows = np.array(
            [each["embedding"] for each in engine.encode(["the sea", "a cat"], dimensions=8)]
        )
        plain = engine.encode("the sea")["embedding"]
    np.testing.assert_allclose(
        found.embeddings, rows / np.linalg.norm(rows, axis=1, keepdims=True), atol=1e-6
    )
    np.testing.assert_allclose(np.linalg.norm(one.embeddings[0]), 1, atol=1e-6)
    np.testing.assert_allclose(older.embedding, plain, atol=1e-6)
    assert found.prompt_eval_count > one.prompt_eval_count


def test_images_of_a_message_come_before_its_text(tmp_path):
    save_seeing("llava", tmp_path)
    with sgl.Engine(
        str(tmp_path), in_process=True, dtype="float32", device="cpu", chat_template=CHAT
    ) as engine:
        image = png(40, 30)
        with serving(engine, served_model_name="sees") as url, ollama.Client(url) as client:
            message = {"role": "user", "content": "hi", "images": [image]}
            found = client.chat("sees", [message], options={"num_predict": 4, "temperature": 0})
            asked = client.generate(
                "sees", "hi", images=[image], options={"num_predict": 4, "temperature": 0}
            )
            assert "vision" in client.show("sees").capabilities
        expected = engine.complete(
            seen("u:", image, "hi;a:"), sgl.SamplingParams(max_tokens=4, temperature=0)
        )
    assert found.message.content == asked.response == expected.text
    assert found.prompt_eval_count == expected.usage.prompt_tokens


@pytest.mark.parametrize(("kind", "known"), [
    (types.ChatRequest, ollama_request.CHAT), (types.GenerateRequest, ollama_request.GENERATE), (types.EmbedRequest, catalog.EMBED),
    (types.EmbeddingsRequest, catalog.EMBEDDINGS), (types.ShowRequest, catalog.SHOW), (types.Options, ollama_request.OPTIONS),
])  # fmt: skip
def test_the_fields_of_the_client_are_known(kind, known):
    assert set(kind.model_fields) <= {*known.known, *known.neutral, *known.refused}
