"""Encoders against transformers' own, and what they refuse."""

import json
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import (
    BertForSequenceClassification,
    BertModel,
    RobertaForSequenceClassification,
    RobertaModel,
    XLMRobertaModel,
)

import sglang_lite as sgl
from sglang_lite.runtime.models.weights.folder import open_weight_folder
from tests.runtime.embedding.tiny import saved

TEXTS = [
    "the sea",
    "the sea is green and deep",
    "a cat sat",
    "cats and cats and cats",
    "the sea is deeper",
]
POOLINGS = {
    "mean": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False},
    "cls": {"pooling_mode_cls_token": True},
    "last": {"pooling_mode": "lasttoken"},
}


def enclosed(folder, *texts):
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.no_truncation()
    return backend.encode(*texts)


def hidden(model, folder, text):
    """float32 [T, H] of transformers' model, for one text by itself."""
    found = enclosed(folder, text)
    with torch.inference_mode():
        out = model(torch.tensor([found.ids]), token_type_ids=torch.tensor([found.type_ids]))
    return out.last_hidden_state[0]


def pooled(rows, kind):
    return {"mean": rows.mean(0), "cls": rows[0], "last": rows[-1]}[kind].numpy()


@pytest.mark.parametrize("kind", [BertModel, RobertaModel, XLMRobertaModel])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_embeddings_are_transformers_own(tmp_path, kind, pooling):
    model = saved(kind, tmp_path, pooling=POOLINGS[pooling])
    with sgl.Engine(tmp_path, in_process=True, threads=1, step_tokens=16) as engine:
        found = [each["embedding"] for each in engine.encode(TEXTS)]
    expected = [pooled(hidden(model, tmp_path, text), pooling) for text in TEXTS]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_model_of_berts_kind_takes_no_adapters(tmp_path):
    saved(BertModel, tmp_path)
    with pytest.raises(sgl.ParameterError, match=r"enable_lora: .* is of BERT's kind"):
        sgl.Engine(tmp_path, in_process=True, enable_lora=True)


@pytest.mark.parametrize("kind", [BertForSequenceClassification, RobertaForSequenceClassification])
def test_scores_and_classes_are_transformers_own(tmp_path, kind):
    pairs = list(pairwise(TEXTS))
    for labels in (1, 3):
        folder = tmp_path / str(labels)
        model = saved(kind, folder, num_labels=labels)
        logits = []
        for texts in pairs if labels == 1 else [(text,) for text in TEXTS]:
            found = enclosed(folder, *texts)
            with torch.inference_mode():
                logits.append(
                    model(
                        torch.tensor([found.ids]), token_type_ids=torch.tensor([found.type_ids])
                    ).logits[0]
                )
        with sgl.Engine(folder, in_process=True, threads=1) as engine:
            if labels == 1:
                np.testing.assert_allclose(
                    engine.score_pairs(pairs), torch.stack(logits)[:, 0].sigmoid(), atol=1e-5
                )
                assert [each["embedding"] for each in engine.rerank(pairs)] == engine.score_pairs(
                    pairs
                )
                with pytest.raises(sgl.CapabilityError, match="Use score_pairs or classify"):
                    engine.encode("the sea")
                continue
            for found, expected in zip(engine.classify(TEXTS), torch.stack(logits).softmax(1)):
                np.testing.assert_allclose(list(found["probs"].values()), expected, atol=1e-5)
                assert found["label"] == f"LABEL_{expected.argmax()}"
            with pytest.raises(sgl.CapabilityError, match=r"has 3 labels\. Use classify"):
                engine.score_pairs(pairs)


def test_normalised_and_shortened_vectors_have_length_one(tmp_path):
    saved(BertModel, tmp_path, pooling=POOLINGS["mean"], normalise=True)
    with sgl.Engine(tmp_path, in_process=True, threads=1) as engine:
        whole = engine.encode(TEXTS[0])["embedding"]
        part = engine.encode(TEXTS[0], dimensions=8)["embedding"]
    assert np.linalg.norm(whole) == pytest.approx(1)
    np.testing.assert_allclose(part, np.array(whole[:8]) / np.linalg.norm(whole[:8]), atol=1e-6)


def test_a_text_gives_the_same_beside_any_others_from_any_thread(tmp_path):
    saved(BertModel, tmp_path)
    with sgl.Engine(tmp_path, in_process=True, threads=1, step_tokens=24) as engine:
        alone = {text: engine.encode(text)["embedding"] for text in TEXTS}
        found, problems = {}, []

        def ask(number):
            try:
                texts = TEXTS[number % 5 :] + TEXTS[: number % 5]
                found[number] = list(zip(texts, engine.encode(texts)))
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems
        for pairs in found.values():
            for text, each in pairs:
                np.testing.assert_allclose(each["embedding"], alone[text], atol=1e-5)
        assert engine.stats()["texts"] == 5 + 16 * 5


def test_an_engine_in_a_process_of_its_own_gives_the_same(tmp_path):
    saved(BertModel, tmp_path, pooling=POOLINGS["mean"])
    with sgl.Engine(tmp_path, in_process=True, threads=1) as engine:
        expected = [each["embedding"] for each in engine.encode(TEXTS)]
    engine = sgl.Engine(tmp_path, threads=1)
    with engine:
        found = engine.encode(TEXTS)
        assert [each["embedding"] for each in found] == expected
        assert found[1]["meta_info"]["prompt_tokens"] == 8
        assert engine.stats()["texts"] == 5
        with pytest.raises(sgl.CapabilityError, match="generates no text"):
            engine.complete("the sea")
    with pytest.raises(sgl.EngineClosedError):
        engine.encode(TEXTS)


def test_long_texts_are_refused_or_cut(tmp_path):
    model = saved(BertModel, tmp_path)
    long = " ".join(["sea"] * 50)
    with sgl.Engine(tmp_path, in_process=True, threads=1) as engine:
        with pytest.raises(
            sgl.ParameterError, match=r"prompt\[1\]: has 52 tokens; the model reads 40"
        ):
            engine.encode(["the sea", long])
        found = engine.encode(long, truncate=True)
    assert found["meta_info"]["prompt_tokens"] == 40
    expected = pooled(hidden(model, tmp_path, " ".join(["sea"] * 38)), "mean")
    np.testing.assert_allclose(found["embedding"], expected, atol=1e-4)


def test_of_a_pair_the_longer_text_is_cut(tmp_path):
    saved(BertForSequenceClassification, tmp_path, num_labels=1)
    with sgl.Engine(tmp_path, in_process=True, threads=1) as engine:
        with pytest.raises(sgl.ParameterError, match=r"pairs\[0\]: has 56 tokens"):
            engine.score_pairs([("the sea is", " ".join(["sea"] * 50))])
        found = engine.score_pairs([("the sea is", " ".join(["sea"] * 50)), ("the sea is", " ".join(["sea"] * 34))],
                                   truncate=True)  # fmt: skip
    assert found[0] == pytest.approx(found[1], abs=1e-6)


def test_markup_of_a_text_is_text(tmp_path):
    saved(BertModel, tmp_path)
    with sgl.Engine(tmp_path, in_process=True, threads=1) as engine:
        assert engine.encode("the [SEP] sea")["meta_info"]["prompt_tokens"] > 5


def test_a_default_prompt_goes_before_each_text(tmp_path):
    model = saved(BertModel, tmp_path)
    prompts = {"prompts": {"query": "a cat ", "none": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with sgl.Engine(tmp_path, in_process=True, threads=1) as engine:
        found = engine.encode("sat")["embedding"]
    np.testing.assert_allclose(
        found, pooled(hidden(model, tmp_path, "a cat sat"), "mean"), atol=1e-4
    )


@pytest.mark.parametrize(
    ("texts", "message"),
    [([], "has no texts"), ("", "is an empty text"), (["the", 3], r"prompt\[1\]: 3 is no text"),
     ("\ud800", "unpaired surrogates")],
)  # fmt: skip
def test_what_is_no_text_is_refused(tmp_path, texts, message):
    saved(BertModel, tmp_path)
    with (
        sgl.Engine(tmp_path, in_process=True, threads=1) as engine,
        pytest.raises(sgl.ParameterError, match=message),
    ):
        engine.encode(texts)


@pytest.mark.parametrize(
    ("call", "given", "message"),
    [
        ("encode", 3, "prompt: int is not a list"),
        ("encode", None, "prompt: NoneType is not a list"),
        ("encode", {"a": 1}, "prompt: dict is not a list"),
        ("score_pairs", None, "pairs: NoneType is not a list"),
        ("score_pairs", "ab", "pairs: str is not a list"),
        ("score_pairs", [3], r"pairs\[0\]: .* is not a pair of texts"),
        ("score_pairs", [("a", "the"), {"a", "b"}], r"pairs\[1\]: .* is not a pair of texts"),
        ("score_pairs", [("a", "the", "sea")], r"pairs\[0\]: .* is not a pair of texts"),
    ],
)
def test_what_is_no_list_or_no_pair_is_refused_by_its_name(tmp_path, call, given, message):
    kind, config = (
        (BertModel, {}) if call == "encode" else (BertForSequenceClassification, {"num_labels": 1})
    )
    saved(kind, tmp_path, **config)
    with sgl.Engine(tmp_path, in_process=True, threads=1) as engine:
        with pytest.raises(sgl.ParameterError, match=message):
            getattr(engine, call)(given)
        assert getattr(engine, call)([("a", "the")] if call == "score_pairs" else ["a"])


@pytest.mark.parametrize("dimensions", [0, 33])
def test_dimensions_that_are_not_there_are_refused(tmp_path, dimensions):
    saved(BertModel, tmp_path)
    with (
        sgl.Engine(tmp_path, in_process=True, threads=1) as engine,
        pytest.raises(sgl.ParameterError, match="1 and 32"),
    ):
        engine.encode("the sea", dimensions=dimensions)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", {"hidden_act": "relu"}, "the activation 'relu' is not supported"),
        (
            "config.json",
            {"position_embedding_type": "relative_key"},
            "position_embedding_type 'relative_key'",
        ),
        ("config.json", {"is_decoder": True}, "is_decoder is set"),
        ("config.json", {"hidden_size": 34}, "can't be shared by 4 attention heads"),
        ("config.json", {"hidden_size": None}, "'hidden_size' is missing"),
        ("config.json", {"vocab_size": 99}, r"has shape \(15, 32\), the config says \(99, 32\)"),
        ("modules.json", [{"type": "sentence_transformers.models.LSTM"}], "modules of type 'LSTM'"),
        ("modules.json", 3, "no list of modules"),
        (
            "config_sentence_transformers.json",
            {"default_prompt_name": "query"},
            "no text of that name",
        ),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length"),
    ],
)
def test_folders_that_say_something_else_are_refused(tmp_path, file, content, message):
    saved(BertModel, tmp_path)
    path = tmp_path / file
    if file == "config.json":
        content = json.loads(path.read_text()) | content
    path.write_text(json.dumps(content))
    with pytest.raises(sgl.ModelError, match=message):
        sgl.Engine(tmp_path, in_process=True, threads=1)


def test_poolings_that_are_not_supported_are_refused(tmp_path):
    saved(BertModel, tmp_path, pooling={"pooling_mode_max_tokens": True})
    with pytest.raises(sgl.ModelError, match="pooling by pooling_mode_max_tokens is not supported"):
        sgl.Engine(tmp_path, in_process=True, threads=1)


def test_settings_of_generation_are_refused(tmp_path):
    saved(BertModel, tmp_path)
    for setting in (
        {"context_length": 8},
        {"deterministic": True},
        {"dtype": "int8"},
        {"max_running": 3},
        {"kv_dtype": "fp8"},
        {"page_size": 4},
        {"overlap": False},
        {"explain_cache_misses": True},
        {"jump_forward": "off"},
        {"speculation": "auto"},
        {"draft_tokens": 4},
        {"cuda_graphs": False},
        {"mem_fraction": 0.5},
        {"constraint_backend": "xgrammar"},
        {"compile_timeout_s": 3.0},
        {"compile_memory_mb": 512},
        {"enable_memory_saver": True},
        {"refuse_while_asleep": True},
        {"enable_hierarchical_cache": True},
        {"cpu_offload_gb": 1},
        {"seed": 3},
        {"model_impl": "transformers"},
        {"load_format": "gguf"},
    ):
        with pytest.raises(
            sgl.ParameterError, match=rf"{next(iter(setting))}: .*models that generate text"
        ):
            sgl.Engine(tmp_path, in_process=True, **setting)
    with pytest.raises(sgl.ParameterError, match=r"is_embedding: .* is an embedding model"):
        sgl.Engine(tmp_path, in_process=True, is_embedding=False)


def test_a_notebook_shows_an_engine_without_a_cache(tmp_path):
    saved(BertModel, tmp_path)
    with sgl.Engine(tmp_path, in_process=True) as engine:
        shown = engine._repr_html_()
    assert engine.model_name in shown
    assert "cache" not in shown


def test_a_tensor_that_is_missing_is_named(tmp_path):
    model = saved(BertModel, tmp_path)
    tensors = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if "layer.1.output.dense.bias" not in name
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert not open_weight_folder(tmp_path).has_tensor("encoder.layer.1.output.dense.bias")
    with pytest.raises(sgl.ModelError, match=r"'encoder.layer.1.output.dense.bias' is missing"):
        sgl.Engine(tmp_path, in_process=True)
