"""Adapters of decoders that read texts, against peft's."""

import httpx2
import numpy as np
import pytest

import sglang_lite as sgl
from tests.runtime.embedding.test_decoders import TEXTS, ids_of, modules, running, written
from tests.runtime.models.adapters import Adapted
from tests.server.conftest import serving

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # that peft reads
RANKS = {"one": 4, "two": 16, "three": 8}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """(folder of a model that gives vectors, peft's model of its adapters)"""
    folder = tmp_path_factory.mktemp("llama")
    model = written(folder / "base", "Llama", "Model")
    return folder / "base", Adapted(
        model, folder, {name: {"r": rank} for name, rank in RANKS.items()}
    )


def vector(llama, text, name):
    folder, reference = llama
    return reference.output(ids_of(folder, text), name).last_hidden_state[0, -1].numpy()


def engine_of(llama, **settings):
    folder, reference = llama
    return running(
        folder, lora_paths={name: str(path) for name, path in reference.folders.items()}, **settings
    )


@pytest.mark.parametrize(
    "settings", [{}, {"max_loras_per_batch": 1}, {"step_tokens": 8, "max_loaded_loras": 8}]
)
def test_texts_of_several_adapters_are_peft_s_own(llama, settings):
    names = ["one", None, "two", "three", "one", "two"]
    with engine_of(llama, **settings) as engine:
        found = [each["embedding"] for each in engine.encode(TEXTS, lora_path=names)]
        alone = engine.encode(TEXTS[0], lora_path="two")["embedding"]
        plain = [each["embedding"] for each in engine.encode(TEXTS)]
    expected = [vector(llama, text, name) for text, name in zip(TEXTS, names)]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_allclose(alone, vector(llama, TEXTS[0], "two"), atol=1e-4)
    np.testing.assert_allclose(plain, [vector(llama, text, None) for text in TEXTS], atol=1e-4)
    assert np.abs(expected[0] - vector(llama, TEXTS[0], None)).max() > 0.1


@pytest.mark.parametrize("family", ["Qwen2", "Gemma2"])
def test_adapters_of_a_family_that_reads_both_ways(tmp_path, family):
    model = written(
        tmp_path / "base", family, "Model", attn_implementation="eager", is_causal=False
    )
    modules(tmp_path / "base", pooling="mean")
    reference = Adapted(model, tmp_path, {"it": {"r": 8}})
    with running(tmp_path / "base", lora_paths={"it": str(reference.folders["it"])}) as engine:
        found = [each["embedding"] for each in engine.encode(TEXTS, lora_path="it")]
    expected = [
        reference.output(ids_of(tmp_path / "base", text), "it").last_hidden_state[0].mean(0)
        for text in TEXTS
    ]
    np.testing.assert_allclose(found, np.stack(expected), atol=1e-4)


def test_classes_and_rewards_with_an_adapter(tmp_path):
    model = written(tmp_path / "base", "Llama", "ForSequenceClassification", num_labels=3)
    reference = Adapted(
        model, tmp_path, {"it": {"r": 8, "target_modules": ["q_proj", "down_proj"]}}
    )
    logits = [reference.output(ids_of(tmp_path / "base", text), "it").logits[0] for text in TEXTS]
    with running(tmp_path / "base", lora_paths={"it": str(reference.folders["it"])}) as engine:
        np.testing.assert_allclose(
            engine.reward(TEXTS, lora_path="it"), np.stack(logits), atol=1e-4
        )
        shares = [list(each["probs"].values()) for each in engine.classify(TEXTS, lora_path="it")]
    np.testing.assert_allclose(shares, np.stack([each.softmax(0) for each in logits]), atol=1e-4)


def test_pairs_are_scored_with_an_adapter(tmp_path):
    model = written(tmp_path / "base", "Llama", "ForSequenceClassification", num_labels=1)
    reference = Adapted(
        model, tmp_path, {"it": {"r": 8, "target_modules": ["q_proj", "down_proj"]}}
    )
    names, documents = ("it", None), ["cats", "dogs"]
    expected = [  # a decoder reads both texts of a pair as one
        [
            float(
                reference.output(ids_of(tmp_path / "base", "the-sea" + each), name)
                .logits[0]
                .sigmoid()
            )
            for each in documents
        ]
        for name in names
    ]
    paths = {"it": str(reference.folders["it"])}
    with (
        running(tmp_path / "base", lora_paths=paths) as engine,
        serving(engine, served_model_name="base") as url,
    ):
        for name, scores in zip(names, expected):
            pairs = [("the-sea", each) for each in documents]
            assert engine.score_pairs(pairs, lora_path=name) == pytest.approx(scores, abs=1e-4)
            body = {"query": "the-sea", "documents": documents, "model": name and f"base:{name}"}
            answer = httpx2.post(f"{url}/v1/rerank", json=body).json()
            assert answer["model"] == (name or "base")
            found = {each["index"]: each["relevance_score"] for each in answer["results"]}
            assert [found[i] for i in range(2)] == pytest.approx(scores, abs=1e-4)
            answer = httpx2.post(
                f"{url}/classify", json={"input": ["the-seacats"], "model": name or "base"}
            ).json()
            assert (answer["model"], answer["data"][0]["probs"]) == (
                name or "base",
                pytest.approx([scores[0]], abs=1e-4),
            )
    assert expected[0] != pytest.approx(expected[1], abs=0.01)


def test_a_late_adapter_reads_a_text_from_its_invocation_on(tmp_path):
    base = tmp_path / "base"
    # peft has late adapters of language models alone
    causal = written(base, "Llama", "ForCausalLM")
    late = {"r": 8, "alora_invocation_tokens": ids_of(base, "is"), "task_type": "CAUSAL_LM"}
    reference = Adapted(causal, tmp_path, {"late": late})
    modules(base, pooling="mean")  # so that it gives vectors
    texts = ["the-sea-is-deep", "is-the-sea", "cats"]
    with running(base, lora_paths={"late": str(reference.folders["late"])}) as engine:
        found = [each["embedding"] for each in engine.encode(texts, lora_path="late")]
        (*_, plain) = [each["embedding"] for each in engine.encode(texts)]
    for text, vector in zip(texts, found):
        states = reference.output(
            ids_of(base, text), "late", output_hidden_states=True
        ).hidden_states[-1]
        np.testing.assert_allclose(vector, states[0].mean(0), atol=1e-4)
    np.testing.assert_allclose(found[-1], plain, atol=1e-6)


def test_adapters_come_and_go_while_texts_are_read(llama):
    folder, reference = llama
    with running(folder, enable_lora=True, max_lora_rank=16) as engine:
        with pytest.raises(sgl.ParameterError, match="there is no adapter 'one'"):
            engine.encode("a", lora_path="one")
        engine.load_lora_adapter("one", reference.folders["one"])
        assert [each["lora_name"] for each in engine.loras()] == ["one"]
        np.testing.assert_allclose(
            engine.encode("a", lora_path="one")["embedding"], vector(llama, "a", "one"), atol=1e-4
        )
        assert engine.stats()["adapters_resident"] == 1
        engine.unload_lora_adapter("one")
        assert (engine.loras(), engine.stats()["adapters_resident"]) == ([], 0)
        engine.load_lora_adapter("one", reference.folders["two"])
        np.testing.assert_allclose(
            engine.encode("a", lora_path="one")["embedding"], vector(llama, "a", "two"), atol=1e-4
        )


def test_names_that_are_none_are_refused(llama):
    with engine_of(llama) as engine:
        with pytest.raises(sgl.ParameterError, match="lora_path: has 1 names for 2 texts"):
            engine.encode(["a", "cats"], lora_path=["one"])
        with pytest.raises(sgl.ParameterError, match="lora_path: 3 is no name"):
            engine.encode(["a"], lora_path=[3])
    with (
        running(llama[0]) as engine,
        pytest.raises(sgl.ParameterError, match="was made without adapters"),
    ):
        engine.encode("a", lora_path="one")


def test_requests_of_a_server_name_adapters(llama):
    folder, reference = llama
    paths = {name: str(path) for name, path in reference.folders.items()}
    # in a process of its own
    engine = sgl.Engine(folder, threads=1, device="cpu", lora_paths=paths)
    with (
        engine,
        serving(engine, served_model_name="base") as url,
        httpx2.Client(base_url=url, timeout=60) as http,
    ):
        for path, body in {
            "/v1/embeddings": {"input": "a", "model": "base:two"}, "/pooling": {"input": "a", "model": "two"},
            "/api/embeddings": {"prompt": "a", "model": "two"}, "/encode": {"text": "a", "lora_path": "two"},
        }.items():  # fmt: skip
            answer = http.post(path, json=body).json()
            (found,) = answer.get("data", [answer])
            vector_found = found.get("embedding") or found["data"]
            np.testing.assert_allclose(
                vector_found, vector(llama, "a", "two"), atol=1e-4, err_msg=path
            )
            assert answer.get("model", "two") == "two"
        several = http.post(
            "/encode", json={"text": ["a", "cats"], "lora_path": [None, "one"]}
        ).json()
        expected = [vector(llama, "a", None), vector(llama, "cats", "one")]
        np.testing.assert_allclose([each["embedding"] for each in several], expected, atol=1e-4)
        missing = http.post("/v1/embeddings", json={"input": "a", "model": "base:four"})
        assert (missing.status_code, "with the adapters 'one', 'two', 'three'" in missing.text) == (
            404,
            True,
        )
