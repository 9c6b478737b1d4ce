"""Embeddings, reranking and classes over HTTP, with OpenAI's own client and without."""

import base64

import httpx2
import numpy as np
import openai
import pytest
from transformers import BertForSequenceClassification, BertModel

import sglang_lite as sgl
from tests.runtime.embedding.tiny import saved
from tests.server.conftest import serving

TEXTS = ["the sea", "a cat sat and sat", "green"]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """Engines and addresses of an embedding model, a reranker and a classifier."""
    found = {}
    kinds = {"embed": (BertModel, {}), "rerank": (BertForSequenceClassification, {"num_labels": 1}),
             "classify": (BertForSequenceClassification, {"num_labels": 3})}  # fmt: skip
    contexts = []
    for name, (kind, config) in kinds.items():
        folder = tmp_path_factory.mktemp(name)
        saved(kind, folder, **config)
        engine = sgl.Engine(folder, in_process=True, threads=1)
        context = serving(engine, served_model_name=name)
        contexts.append((context, engine))
        found[name] = engine, context.__enter__()
    yield found
    for context, engine in contexts:
        context.__exit__(None, None, None)
        engine.close()


@pytest.mark.parametrize("form", ["float", "base64"])
def test_openais_client_gets_the_engines_embeddings(running, form):
    engine, url = running["embed"]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        found = client.embeddings.create(
            input=TEXTS, model="embed", dimensions=8, encoding_format=form
        )
    rows = [
        np.frombuffer(base64.b64decode(each.embedding), "<f4")
        if isinstance(each.embedding, str)
        else each.embedding
        for each in found.data
    ]
    expected = [each["embedding"] for each in engine.encode(TEXTS, dimensions=8)]
    np.testing.assert_allclose(rows, expected, atol=1e-6)
    assert (found.model, found.usage.prompt_tokens, found.usage.total_tokens) == ("embed", 14, 14)


def test_embeddings_are_the_same_if_another_process_reads_the_body(running):
    engine, here = running["embed"]
    with serving(engine, large_body_kb=0) as apart:
        for body in ({"input": TEXTS}, {"input": [[4, 5], [7]]}, {"input": "the", "prompt_name": "query"},
                     {"input": [""]}):  # fmt: skip
            expected = httpx2.post(f"{here}/v1/embeddings", json=body).json()
            found = httpx2.post(f"{apart}/v1/embeddings", json=body, timeout=60).json()
            assert {**found, "model": None} == {**expected, "model": None}
        documents = {"query": "the", "documents": TEXTS}
        # as of a model that embeds
        assert httpx2.post(f"{apart}/v1/rerank", json=documents).status_code == 400


def test_what_the_model_is_can_be_asked(running):
    _, url = running["embed"]
    info = httpx2.get(f"{url}/model_info", timeout=60).json()
    assert (info["served_model_name"], info["is_generation"]) == ("embed", False)


def test_ids_are_read_in_place_of_texts(running):
    engine, url = running["embed"]
    expected = [engine.encode([4, 5])["embedding"], engine.encode([7])["embedding"]]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        found = client.embeddings.create(input=[[4, 5], [7]], model="embed")
        one = client.embeddings.create(input=[4, 5], model="embed")
    np.testing.assert_allclose([each.embedding for each in found.data], expected, atol=1e-6)
    np.testing.assert_allclose([each.embedding for each in one.data], expected[:1], atol=1e-6)
    found = httpx2.post(f"{url}/encode", json={"input_ids": [[4, 5], [7]]}, timeout=60).json()
    np.testing.assert_allclose([each["embedding"] for each in found], expected, atol=1e-6)
    for body, message in (
        ({"input_ids": [99]}, "input_ids[0]: 99 is no token id (0 to 14)."),
        ({"text": "the", "input_ids": [4]}, "text: and input_ids are both given."),
        ({}, "text: is missing."),
        (
            {"text": "the", "prompt_name": "query"},
            "prompt_name: 'query' is none of the model's prompts (none).",
        ),
    ):
        refused = httpx2.post(f"{url}/encode", json=body, timeout=60)
        assert refused.status_code == 400
        assert message in refused.text


def test_sglangs_route_has_its_shape(running):
    engine, url = running["embed"]
    found = httpx2.post(f"{url}/encode", json={"text": "the sea"}, timeout=60).json()
    np.testing.assert_allclose(found["embedding"], engine.encode("the sea")["embedding"], atol=1e-6)
    assert found["meta_info"]["prompt_tokens"] == 4
    assert [
        len(each["embedding"])
        for each in httpx2.post(f"{url}/encode", json={"text": TEXTS}, timeout=60).json()
    ] == [32] * 3


def test_documents_are_ordered_by_their_scores(running):
    engine, url = running["rerank"]
    scores = engine.score_pairs([("the sea", text) for text in TEXTS])
    order = sorted(range(3), key=lambda i: -scores[i])
    asked = {"query": "the sea", "documents": TEXTS, "top_n": 2, "model": "rerank"}
    found = httpx2.post(f"{url}/v1/rerank", json=asked, timeout=60).json()
    assert [each["index"] for each in found["results"]] == order[:2]
    assert [each["relevance_score"] for each in found["results"]] == pytest.approx(
        [scores[i] for i in order[:2]]
    )
    assert [each["document"]["text"] for each in found["results"]] == [TEXTS[i] for i in order[:2]]
    pairs = httpx2.post(
        f"{url}/v1/score", json={"text_1": "the sea", "text_2": TEXTS}, timeout=60
    ).json()
    assert [each["score"] for each in pairs["data"]] == pytest.approx(scores)


def test_labels_are_the_engines(running):
    engine, url = running["classify"]
    found = httpx2.post(f"{url}/classify", json={"input": TEXTS}, timeout=60).json()["data"]
    for each, expected in zip(found, engine.classify(TEXTS)):
        assert (each["label"], each["num_classes"]) == (expected["label"], 3)
        assert each["probs"] == pytest.approx(list(expected["probs"].values()))


@pytest.mark.parametrize(
    ("model", "path", "body", "message"),
    [
        ("embed", "/v1/embeddings", {"input": ""}, "input[0]: is an empty text"),
        ("embed", "/v1/embeddings", {"input": []}, "input: has 0 texts"),
        (
            "embed",
            "/v1/embeddings",
            {"input": "sea " * 60},
            "input[0]: has 62 tokens; the model reads 40",
        ),
        ("embed", "/v1/embeddings", {"input": [1, 99]}, "input[0]: 99 is no token id (0 to 14)"),
        (
            "embed",
            "/v1/embeddings",
            {"input": "a", "dimensions": 99},
            "dimensions: 99 is not between 1 and 32",
        ),
        ("embed", "/v1/embeddings", {"input": "a", "model": "other"}, "'other' is not served"),
        ("embed", "/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("embed", "/v1/rerank", {"query": "a", "documents": ["b"]}, "gives embeddings"),
        ("embed", "/v1/completions", {"model": "embed", "prompt": "a"}, "generates no text"),
        (
            "rerank",
            "/v1/rerank",
            {"query": "a", "documents": ["b", ""]},
            "documents[1]: is an empty text",
        ),
        ("rerank", "/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        (
            "rerank",
            "/v1/score",
            {"text_1": ["a"], "text_2": ["a", "b"]},
            "text_2: has 2 texts, but text_1 has 1",
        ),
        ("rerank", "/v1/score", {"text_1": "a"}, "text_2: is missing"),
        ("rerank", "/v1/embeddings", {"input": "a"}, "gives scores or classes"),
        ("classify", "/v1/rerank", {"query": "a", "documents": ["b"]}, "has 3 labels"),
    ],
)
def test_what_can_not_be_read_is_refused_and_the_next_is_served(
    running, model, path, body, message
):
    _, url = running[model]
    refused = httpx2.post(f"{url}{path}", json=body, timeout=60)
    assert 400 <= refused.status_code < 500
    assert message in refused.text
    assert httpx2.get(f"{url}/health_generate", timeout=60).status_code == 200
    assert httpx2.get(f"{url}/ready", timeout=60).status_code == 200
    assert httpx2.get(f"{url}/v1/loads", timeout=60).status_code == 200
