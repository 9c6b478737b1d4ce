"""Rewards, classes and vectors over HTTP, of texts and of conversations, as vLLM and SGLang spell
them.
"""

import base64
import json

import httpx2
import numpy as np
import pytest
from transformers import LlamaForSequenceClassification, LlamaModel

import sglang_lite as sgl
from tests.runtime.models.tiny import randomise
from tests.server.conftest import TEMPLATE, byte_tokenizer, serving

TEXTS = ["the sea", "a cat sat and sat", "green"]
MESSAGES = [{"role": "user", "content": "a <|end|> b"}, {"role": "assistant", "content": "c"}]
# As a template of this kind writes it; what a message spells is no special token.
WRITTEN = ["<|begin|>", "<user>a ", "<|end|>", " b</user>\n<assistant>c</assistant>\n"]
LONG = {"role": "user", "content": "a" * 300}


def written(folder, kind, **config):
    config = kind.config_class(
        vocab_size=258, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=None, **config,
    )  # fmt: skip
    randomise(kind(config)).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"chat_template": "<|begin|>" + TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """Engines and addresses of a reward model, a classifier and an embedding model."""
    kinds = {"reward": (LlamaForSequenceClassification, {"num_labels": 1}),
             "classify": (LlamaForSequenceClassification, {"num_labels": 3}), "embed": (LlamaModel, {})}  # fmt: skip
    found, contexts = {}, []
    for name, (kind, config) in kinds.items():
        folder = tmp_path_factory.mktemp(name)
        written(folder, kind, **config)
        engine = sgl.Engine(folder, in_process=True, threads=1, device="cpu")
        context = serving(engine, served_model_name=name)
        contexts.append((context, engine))
        found[name] = engine, context.__enter__()
    yield found
    for context, engine in contexts:
        context.__exit__(None, None, None)
        engine.close()


def conversation(engine):
    """The token ids of MESSAGES."""
    spans = [engine.tokenizer.encode(text, first=False) for text in WRITTEN]
    spans[2] = [
        id for character in WRITTEN[2] for id in engine.tokenizer.encode(character, first=False)
    ]
    assert len(spans[0]) == 1
    return [id for span in spans for id in span]


@pytest.mark.parametrize("path", ["/classify", "/v1/classify", "/encode"])
def test_sglangs_routes_give_rewards_in_place_of_vectors(running, path):
    engine, url = running["reward"]
    expected = engine.reward(TEXTS)
    found = httpx2.post(f"{url}{path}", json={"text": TEXTS}, timeout=60).json()
    assert [each["embedding"] for each in found] == [
        [pytest.approx(reward, abs=1e-5)] for reward in expected
    ]
    one = httpx2.post(f"{url}{path}", json={"text": TEXTS[0]}, timeout=60).json()
    assert one["embedding"] == pytest.approx([expected[0]], abs=1e-5)
    assert one["meta_info"]["prompt_tokens"] == 7
    ids = engine.tokenizer.encode(TEXTS[1])
    assert httpx2.post(f"{url}{path}", json={"input_ids": ids}, timeout=60).json()[
        "embedding"
    ] == pytest.approx([expected[1]], abs=1e-5)


@pytest.mark.parametrize("form", ["float", "base64"])
def test_vllms_pooling_gives_numbers_as_they_are_or_probabilities(running, form):
    for name in ("reward", "classify"):
        engine, url = running[name]
        asked = {"input": TEXTS, "encoding_format": form}
        for activation, expected in (
            (False, np.reshape(engine.reward(TEXTS), (3, -1))),
            (None, [list(each["probs"].values()) for each in engine.classify(TEXTS)]),
        ):
            found = httpx2.post(
                f"{url}/pooling", json={**asked, "use_activation": activation}, timeout=60
            ).json()
            rows = [np.frombuffer(base64.b64decode(each["data"]), "<f4") if form == "base64" else each["data"]
                    for each in found["data"]]  # fmt: skip
            np.testing.assert_allclose(rows, expected, atol=1e-5)
            assert (found["model"], found["usage"]["prompt_tokens"]) == (name, 29)


def test_vllms_pooling_gives_vectors_of_an_embedding_model(running):
    engine, url = running["embed"]
    found = httpx2.post(
        f"{url}/pooling", json={"input": TEXTS, "dimensions": 8, "task": "embed"}, timeout=60
    ).json()
    expected = [each["embedding"] for each in engine.encode(TEXTS, dimensions=8)]
    np.testing.assert_allclose([each["data"] for each in found["data"]], expected, atol=1e-5)
    vector = httpx2.post(f"{url}/pooling", json={"messages": MESSAGES}, timeout=60).json()["data"][
        0
    ]["data"]
    np.testing.assert_allclose(vector, engine.encode(conversation(engine))["embedding"], atol=1e-5)


def test_conversations_are_written_by_the_chat_template(running):
    engine, url = running["reward"]
    ids = conversation(engine)
    asked = {"messages": MESSAGES, "use_activation": False}
    found = httpx2.post(f"{url}/pooling", json=asked, timeout=60).json()
    assert found["data"][0]["data"] == pytest.approx([engine.reward(ids)], abs=1e-5)
    assert found["usage"]["prompt_tokens"] == len(ids)
    more = httpx2.post(
        f"{url}/pooling", json={**asked, "add_generation_prompt": True}, timeout=60
    ).json()
    assert more["usage"]["prompt_tokens"] == len(ids) + len("<assistant>")
    cut = httpx2.post(
        f"{url}/pooling", json={**asked, "messages": [LONG], "truncate": True}, timeout=60
    ).json()
    assert cut["usage"]["prompt_tokens"] == 256
    unused = {
        "messages": [{**MESSAGES[0], "name": "a"}],
        "chat_template_kwargs": {"b": 1},
        "priority": 1,
    }
    answer = httpx2.post(f"{url}/pooling", json=unused, timeout=60)
    assert answer.headers["x-unused-fields"] == "priority, chat_template_kwargs.b, messages[0].name"
    engine, url = running["classify"]
    found = httpx2.post(f"{url}/classify", json={"messages": MESSAGES}, timeout=60).json()["data"]
    assert found[0]["probs"] == pytest.approx(
        list(engine.classify(ids)["probs"].values()), abs=1e-5
    )


@pytest.mark.parametrize(
    ("model", "path", "body", "message"),
    [
        ("reward", "/pooling", {}, "input: is missing"),
        (
            "reward",
            "/pooling",
            {"input": "a", "messages": MESSAGES},
            "input: and messages are both given",
        ),
        ("reward", "/pooling", {"input": ""}, "input[0]: is an empty text"),
        (
            "reward",
            "/pooling",
            {"input": "a", "dimensions": 1},
            "dimensions: reward gives a number for each label",
        ),
        (
            "reward",
            "/pooling",
            {"input": "a", "task": "embed"},
            "task: 'embed' is for models that give vectors",
        ),
        (
            "reward",
            "/pooling",
            {"input": "a", "add_generation_prompt": True},
            "add_generation_prompt: needs messages",
        ),
        (
            "reward",
            "/pooling",
            {"input": "a", "truncate_prompt_tokens": 3},
            "truncate_prompt_tokens: is not supported",
        ),
        ("reward", "/pooling", {"messages": []}, "messages: is empty"),
        (
            "reward",
            "/pooling",
            {"messages": [LONG]},
            "messages: has 315 tokens; the model reads 256",
        ),
        ("reward", "/pooling", {"input": "a", "model": "other"}, "'other' is not served"),
        ("reward", "/classify", {}, "input: is missing"),
        (
            "reward",
            "/classify",
            {"text": "a", "input": "b"},
            "input: input and text are given together",
        ),
        ("reward", "/classify", {"text": ["a", ""]}, "text[1]: is an empty text"),
        (
            "reward",
            "/classify",
            {"text": "a", "chat_template_kwargs": {}},
            "chat_template_kwargs: needs messages",
        ),
        (
            "reward",
            "/encode",
            {"text": "a", "dimensions": 1},
            "dimensions: reward gives a number for each label",
        ),
        ("embed", "/classify", {"text": "a"}, "gives embeddings"),
        (
            "embed",
            "/pooling",
            {"input": "a", "task": "classify"},
            "task: 'classify' is for models with labels",
        ),
        (
            "embed",
            "/pooling",
            {"input": "a", "use_activation": True},
            "use_activation: the model's vectors are not norm",
        ),
        (
            "embed",
            "/pooling",
            {"input": "a", "dimensions": 99},
            "dimensions: 99 is not between 1 and 32",
        ),
    ],
)
def test_what_can_not_be_read_is_refused_and_the_next_is_served(
    running, model, path, body, message
):
    _, url = running[model]
    refused = httpx2.post(f"{url}{path}", json=body, timeout=60)
    assert 400 <= refused.status_code < 500
    assert message in refused.text
    assert httpx2.get(f"{url}/ready", timeout=60).status_code == 200


@pytest.mark.parametrize("path", ["/classify", "/pooling"])
def test_a_model_that_generates_has_no_rewards(http, path):
    refused = http.post(path, json={"input": "a"})
    assert refused.status_code == 400
    assert "this needs an embedding model" in refused.text
