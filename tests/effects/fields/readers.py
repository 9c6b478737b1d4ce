"""Cases of routes of models that read texts, and of scores."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from tests.effects.fields.case import OMIT, Ask, Case, Door, at, differs, refused, reported
from tests.effects.fields.openai import USER


def scores_differ(ask: Ask) -> bool:
    """Returns whether scores differ by more than rounding, which depends on what is cached."""
    pairs = zip(np.ravel(ask().get("scores")), np.ravel(ask.without().get("scores")), strict=True)
    return any(abs(given - without) > 1e-4 for given, without in pairs)


LONG = "a b " * 300
QUERY: dict[str, Any] = {"query": "ab", "items": ["c", "d"], "label_token_ids": [66, 67]}
PAIR: dict[str, Any] = dict.fromkeys(QUERY, OMIT) | {"text_1": "a", "text_2": "b"}
OWN: dict[str, Any] = dict.fromkeys(QUERY, OMIT) | {"prompt": "ab", "continuations": ["c", "d"]}

DOORS = {
    "ScoreRequest": Door("/v1/score", QUERY),
    "EmbeddingsRequest": Door("/v1/embeddings", {"input": "the sea"}),
    "EncodeBody": Door("/encode", {"text": "the sea"}),
    "RerankRequest": Door("/v1/rerank", {"query": "the", "documents": ["the sea", "green"]}),
    "ClassifyRequest": Door("/classify", {"input": "the sea"}),
    "PoolingRequest": Door("/pooling", {"input": "the sea"}),
    "OllamaEmbed": Door("/api/embed", {"model": "", "input": "the sea"}),
    "OllamaEmbeddings": Door("/api/embeddings", {"model": "", "prompt": "the sea"}),
}


def is_base64(path: str) -> Any:
    return lambda ask: (
        isinstance(found := ask().get(path), str) and len(base64.b64decode(found)) > 0
    )


def accepted(ask: Ask) -> bool:
    """Whether a text that is too long is cut."""
    return ask().status == 200


def scores_like_pairs(ask: Ask) -> bool:
    """Whether a document has the score that it has as the second text of a pair."""
    pairs = ask.send("/v1/score", {"text_1": "green", "text_2": ["the sea", "green"]}).get("data")
    scores = {each["index"]: each["relevance_score"] for each in ask().get("results")}
    return all(abs(scores[each["index"]] - each["score"]) < 1e-5 for each in pairs)


def has_openais_vector(ask: Ask) -> bool:
    expected = ask.send("/v1/embeddings", {"input": "green"}).get("data.0.embedding")
    return max(abs(a - b) for a, b in zip(ask().get("embedding"), expected)) < 1e-5


CUT = Case(True, accepted, {"input": LONG}, server="embedder")
SCORE = {
    "model": Case("another", refused(404)),
    "prompt": Case("ab", differs("scores"), OWN),
    "continuations": Case(["c", "d"], lambda ask: ask().get("scores.0.text") == "c", OWN),
    "query": Case("cd", at("object", "scoring")),
    "items": Case(["c"], at("scores.#", 1)),
    "label_token_ids": Case([66, 67, 68], lambda ask: len(ask().get("scores.0")) == 3),
    "apply_softmax": Case(True, lambda ask: abs(sum(ask().get("scores.0")) - 1) < 1e-4),
    "item_first": Case(True, scores_differ),
    "text_1": Case("a", lambda ask: ask().get("data.0.object") == "score", PAIR, server="reranker"),
    "text_2": Case("b", lambda ask: ask().get("data.0.object") == "score", PAIR, server="reranker"),
}
EMBEDDINGS = {
    "input": Case("green", at("data.#", 1), server="embedder", empty=[]),
    "model": Case("another", refused(404), server="embedder"),
    "dimensions": Case(8, at("data.0.embedding.#", 8), server="embedder"),
    "encoding_format": Case("base64", is_base64("data.0.embedding"), server="embedder"),
    "prompt_name": Case("query", refused(word="prompt_name"), server="embedder"),
    "truncate": CUT,
}
ENCODE = {
    "text": Case("green", lambda ask: ask().get("embedding.#") > 0, server="embedder"),
    "input_ids": Case(
        [4, 5], lambda ask: ask().get("embedding.#") > 0, {"text": OMIT}, server="embedder"
    ),
    "dimensions": Case(8, at("embedding.#", 8), server="embedder"),
    "prompt_name": Case("query", refused(word="prompt_name"), server="embedder"),
    "truncate": Case(True, accepted, {"text": LONG}, server="embedder"),
    "lora_path": Case("another", lambda ask: ask().status >= 400, server="embedder"),
}
RERANK = {
    "query": Case("green", scores_like_pairs, server="reranker", empty="the"),
    "documents": Case(["a"], at("results.#", 1), server="reranker", empty=["a", "b"]),
    "model": Case("another", refused(404), server="reranker"),
    "top_n": Case(1, at("results.#", 1), server="reranker"),
    "return_documents": Case(False, at("results.0.document", None), server="reranker"),
    "truncate": Case(True, accepted, {"documents": [LONG]}, server="reranker"),
}
OF_EITHER = {
    "input": Case("green", at("data.#", 1)),
    "messages": Case(USER, at("data.#", 1), {"input": OMIT}),
    "add_generation_prompt": Case(
        True, differs("usage.prompt_tokens"), {"input": OMIT, "messages": USER}
    ),
    "chat_template_kwargs": Case(
        {"tone": "kind"}, differs("usage.prompt_tokens"), {"input": OMIT, "messages": USER}
    ),
    "priority": Case(5, reported("priority")),
    "model": Case("another", refused(404)),
    "truncate": Case(True, accepted, {"input": LONG}),
}


def of(server: str, cases: dict[str, Case]) -> dict[str, Case]:
    return {
        name: Case(case.value, case.shows, case.beside, server, case.empty)
        for name, case in cases.items()
    }


POOLING = {
    **of("pooler", OF_EITHER),
    "task": Case("classify", refused(word="task"), server="pooler"),
    "use_activation": Case(False, differs("data.0.data"), server="classifier"),
    "dimensions": Case(8, at("data.0.data.#", 8), server="pooler"),
    "encoding_format": Case("base64", is_base64("data.0.data"), server="pooler"),
}
CLASSIFY = {
    **of("classifier", OF_EITHER),
    "text": Case(
        "green", lambda ask: "embedding" in ask().body, {"input": OMIT}, server="classifier"
    ),
    "input_ids": Case(
        [4, 5], lambda ask: "embedding" in ask().body, {"input": OMIT}, server="classifier"
    ),
}
OLLAMA = {
    "model": Case("another", refused(404), server="embedder", empty=""),
    "options": Case({"num_ctx": 64}, reported("options.num_ctx"), server="embedder"),
    "keep_alive": Case("5m", reported("keep_alive"), server="embedder"),
}
CASES = {
    "ScoreRequest": SCORE, "EmbeddingsRequest": EMBEDDINGS, "EncodeBody": ENCODE, "RerankRequest": RERANK,
    "PoolingRequest": POOLING, "ClassifyRequest": CLASSIFY,
    "OllamaEmbed": {
        **OLLAMA, "input": Case("green", at("embeddings.#", 1), server="embedder", empty=[]),
        "truncate": Case(False, refused(), {"input": LONG}, server="embedder"),
        "dimensions": Case(8, lambda ask: len(ask().get("embeddings.0")) == 8, server="embedder"),
    },
    "OllamaEmbeddings": {
        **OLLAMA, "truncate": Case(False, refused(), {"prompt": LONG}, server="embedder"), "prompt": Case("green", has_openais_vector, server="embedder", empty="the"),
    },
}  # fmt: skip
