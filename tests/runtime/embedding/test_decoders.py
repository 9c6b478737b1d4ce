"""Decoders that read texts (embeddings, rewards, classes) against transformers' own."""

import hashlib
import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer

import sglang_lite as sgl
from sglang_lite.runtime.loading.model_files import open_model_files
from tests.runtime.models.tiny import VOCAB, randomise, save

TEXTS = ["the-sea", "a", "the-sea-is-green-and-deep", "cats", "the-sea-is-deeper", "dogs"]
SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    pad_token_id=None,
)  # fmt: skip
FAMILIES: dict[str, dict] = {
    "Llama": {},
    "Mistral": {"sliding_window": 5},
    "Qwen2": {},
    "Qwen3": {},
    "Gemma": {},
    "Gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 8},
    "Gemma3Text": {"sliding_window": 5, "query_pre_attn_scalar": 8},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Phi": {"qk_layernorm": True},
    "Olmo": {},
}


# Decoders that read in both directions: their config, as transformers reads it.
BOTH_WAYS: dict[str, dict] = {
    "Llama": {"is_causal": False},
    "Qwen2": {"is_causal": False},
    "Qwen3": {
        "is_causal": False,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "Mistral": {"is_causal": False},
    "Gemma2": {"is_causal": False},
    "Gemma3Text": {"use_bidirectional_attention": True, "sliding_window": 6},
}


def written(folder, family, head, **config):
    """A model of transformers' class, random, with its folder."""
    kind = getattr(transformers, family + head)
    return written_as(folder, kind, **SIZES | FAMILIES[family] | config)


def written_as(folder, kind, **config):
    model = randomise(kind(kind.config_class(**config)))
    save(model, folder)
    return model


def modules(folder, *more, pooling="lasttoken"):
    """Files of sentence-transformers: pooling, and modules behind it by type and config."""
    listed = [
        {"path": "", "type": "models.Transformer"},
        {"path": "1_Pooling", "type": "models.Pooling"},
    ]
    configs = [None, {"pooling_mode": pooling, "word_embedding_dimension": 32}]
    for kind, config in more:
        listed.append({"path": f"{len(listed)}_{kind}", "type": f"models.{kind}"})
        configs.append(config)
    for module, config in zip(listed, configs):
        if config is not None:
            (folder / module["path"]).mkdir()
            (folder / module["path"] / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(listed))


def ids_of(folder, text):
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids


def hidden(model, folder, text):
    """float32 [T, H] of transformers' model, for one text by itself."""
    with torch.inference_mode():
        return model(torch.tensor([ids_of(folder, text)])).last_hidden_state[0]


def running(folder, **settings):
    return sgl.Engine(folder, in_process=True, threads=1, device="cpu", **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_is_its_last_tokens_hidden_state(tmp_path, family):
    model = written(tmp_path, family, "Model")
    expected = [hidden(model, tmp_path, text)[-1].numpy() for text in TEXTS]
    with running(tmp_path, step_tokens=24) as engine:
        found = [each["embedding"] for each in engine.encode(TEXTS)]
        assert engine.get_model_info()["is_generation"] is False
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("family", BOTH_WAYS)
def test_texts_are_read_in_both_directions_where_the_config_says_so(tmp_path, family):
    model = written(tmp_path, family, "Model", attn_implementation="eager", **BOTH_WAYS[family])
    modules(tmp_path, pooling="mean")
    texts = [*TEXTS, "a" * 40]
    expected = [hidden(model, tmp_path, text).mean(0).numpy() for text in texts]
    with running(tmp_path, step_tokens=48) as engine:
        found = [each["embedding"] for each in engine.encode(texts)]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_language_model_that_reads_in_both_directions_generates_nothing(tmp_path):
    model = written(tmp_path, "Qwen2", "ForCausalLM", attn_implementation="eager", is_causal=False)
    with running(tmp_path) as engine:
        found = engine.encode("the-sea")["embedding"]
        with pytest.raises(sgl.CapabilityError, match="generates no text"):
            engine.complete("a")
    np.testing.assert_allclose(found, hidden(model.model, tmp_path, "the-sea")[-1], atol=1e-4)
    with pytest.raises(sgl.ModelError, match="reads texts in both directions: it generates none"):
        open_model_files(tmp_path)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "Gemma2",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention is not supported for this arch",
        ),
        ("Qwen2", {"is_causal": "no"}, "`is_causal`: 'no' is no true or false"),
    ],
)
def test_both_directions_that_are_not_supported_are_refused(tmp_path, family, change, message):
    written(tmp_path, family, "Model")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(sgl.ModelError, match=message):
        running(tmp_path)


def test_a_whole_language_model_with_modules_gives_embeddings(tmp_path):
    model = written(tmp_path, "Qwen3", "ForCausalLM", tie_word_embeddings=False)
    modules(tmp_path, ("Normalize", None))
    expected = torch.stack([hidden(model.model, tmp_path, text)[-1] for text in TEXTS])
    with running(tmp_path) as engine:
        found = [each["embedding"] for each in engine.encode(TEXTS)]
        with pytest.raises(sgl.CapabilityError, match=r"generates no text.*Use Engine\.encode"):
            engine.complete("a")
    np.testing.assert_allclose(found, torch.nn.functional.normalize(expected), atol=1e-5)


def test_the_mean_and_dense_modules_come_behind(tmp_path):
    model = written(tmp_path, "Llama", "Model")
    sizes = {
        "in_features": 32,
        "out_features": 12,
        "bias": True,
        "activation_function": "torch.nn.modules.Tanh",
    }
    last = {
        **sizes,
        "in_features": 12,
        "out_features": 8,
        "bias": False,
        "activation_function": "x.Identity",
    }
    modules(tmp_path, ("Dense", sizes), ("Dense", last), ("Normalize", None), pooling="mean")
    random = torch.Generator().manual_seed(0)
    first = {
        "linear.weight": torch.randn(12, 32, generator=random),
        "linear.bias": torch.randn(12, generator=random),
    }
    second = {"linear.weight": torch.randn(8, 12, generator=random)}
    save_file(first, tmp_path / "2_Dense" / "model.safetensors")
    save_file(second, tmp_path / "3_Dense" / "model.safetensors")
    means = torch.stack([hidden(model, tmp_path, text).mean(0) for text in TEXTS])
    expected = (
        torch.tanh(means @ first["linear.weight"].T + first["linear.bias"])
        @ second["linear.weight"].T
    )
    with running(tmp_path) as engine:
        found = [each["embedding"] for each in engine.encode(TEXTS)]
        assert len(engine.encode("a", dimensions=8)["embedding"]) == 8
        with pytest.raises(sgl.ParameterError, match="1 and 8"):
            engine.encode("a", dimensions=9)
    np.testing.assert_allclose(found, torch.nn.functional.normalize(expected), atol=1e-5)
    listed = tmp_path / "sums"
    listed.write_text(
        f"{hashlib.sha256((tmp_path / 'model.safetensors').read_bytes()).hexdigest()}  model.safetensors"
    )
    with pytest.raises(
        sgl.ModelError, match=r"no sum of 2_Dense/model.safetensors \(2 of 3 files\)"
    ):
        running(tmp_path, model_checksum=str(listed))


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2"])
@pytest.mark.parametrize("labels", [1, 3])
def test_rewards_and_classes_are_transformers_own(tmp_path, family, labels):
    model = written(tmp_path, family, "ForSequenceClassification", num_labels=labels)
    with torch.inference_mode():
        expected = torch.cat(
            [model(torch.tensor([ids_of(tmp_path, text)])).logits for text in TEXTS]
        )
    with running(tmp_path) as engine:
        found = engine.reward(TEXTS)
        np.testing.assert_allclose(found, expected[:, 0] if labels == 1 else expected, atol=1e-4)
        assert engine.reward(TEXTS[0]) == found[0]
        shares = [list(each["probs"].values()) for each in engine.classify(TEXTS)]
        np.testing.assert_allclose(
            shares, expected.sigmoid() if labels == 1 else expected.softmax(1), atol=1e-4
        )
        with pytest.raises(sgl.CapabilityError, match="gives scores or classes"):
            engine.encode("a")
        if labels == 1:
            with torch.inference_mode():
                ids = ids_of(tmp_path, "the-sea") + ids_of(tmp_path, "cats")
                logit = model(torch.tensor([ids])).logits[0, 0]
            assert engine.score_pairs([("the-sea", "cats")]) == pytest.approx(
                [logit.sigmoid().item()], abs=1e-4
            )


def test_ids_are_read_as_they_are(tmp_path):
    written(tmp_path, "Llama", "Model")
    ids = [ids_of(tmp_path, text) for text in TEXTS]
    with running(tmp_path) as engine:
        expected = [each["embedding"] for each in engine.encode(TEXTS)]
        assert [each["embedding"] for each in engine.encode(ids)] == expected
        assert engine.encode(ids[0])["meta_info"]["prompt_tokens"] == 7
        assert engine.encode([TEXTS[0], ids[1]])[1]["embedding"] == pytest.approx(
            expected[1], abs=1e-5
        )
        with pytest.raises(sgl.ParameterError, match=r"prompt\[1\]: 96 is no token id \(0 to 95\)"):
            engine.encode([[3], [96]])
        with pytest.raises(
            sgl.ParameterError, match=r"prompt\[0\]: has 65 tokens; the model reads 64"
        ):
            engine.encode([3] * 65)
        cut = engine.encode([3] * 65, truncate=True)["embedding"]
        assert cut == pytest.approx(engine.encode([3] * 64)["embedding"], abs=1e-5)
        with pytest.raises(
            sgl.ParameterError, match=r"prompt\[0\]: \[\] is no text, and no list of token ids"
        ):
            engine.encode([[]])


def test_instructions_are_the_folders_prompts(tmp_path):
    model = written(tmp_path, "Qwen2", "Model")
    prompts = {"prompts": {"query": "Find:", "document": ""}}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with running(tmp_path) as engine:
        plain, asked = (
            engine.encode("cats")["embedding"],
            engine.encode("cats", prompt_name="query")["embedding"],
        )
        with pytest.raises(
            sgl.ParameterError, match=r"prompt_name: 'passage' is none .*'query', 'document'"
        ):
            engine.encode("cats", prompt_name="passage")
    np.testing.assert_allclose(plain, hidden(model, tmp_path, "cats")[-1], atol=1e-4)
    np.testing.assert_allclose(asked, hidden(model, tmp_path, "Find:cats")[-1], atol=1e-4)


def test_texts_end_as_the_folder_says(tmp_path):
    model = written(tmp_path, "Mistral", "Model")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"] = [
        {"id": 90, "content": "{", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
    ]  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "{", "add_eos_token": True})
    )
    with torch.inference_mode():
        out = model(torch.tensor([[*ids_of(tmp_path, "cats"), 90]])).last_hidden_state[0, -1]
    with running(tmp_path) as engine:
        found = engine.encode("cats")
    assert found["meta_info"]["prompt_tokens"] == 5
    np.testing.assert_allclose(found["embedding"], out, atol=1e-4)


def test_a_process_of_its_own_gives_the_same(tmp_path):
    written(tmp_path, "Qwen3", "ForSequenceClassification", num_labels=1)
    with running(tmp_path) as engine:
        expected = engine.reward(TEXTS)
    with sgl.Engine(tmp_path, threads=1, device="cpu") as engine:
        assert engine.reward(TEXTS) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 2}, "the model has no place for model.layers.2"),
        ({"num_hidden_layers": 4}, "'model.layers.3.input_layernorm.weight' is missing"),
    ],
)
def test_folders_that_say_something_else_are_refused(tmp_path, change, message):
    written(tmp_path, "Gemma3Text", "Model")
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    content.pop("layer_types")
    file.write_text(json.dumps(content | change))
    with pytest.raises(sgl.ModelError, match=message):
        running(tmp_path)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            ("Dense", {"in_features": 31, "out_features": 8}),
            "in_features is 31, and what comes has 32 numbers",
        ),
        (
            ("Dense", {"in_features": 32, "out_features": 8, "activation_function": "a.Softmax"}),
            "activation Softmax",
        ),
        (("LSTM", {}), "modules of type 'LSTM' are not supported"),
        (
            ("Pooling", {"pooling_mode": "cls", "include_prompt": False}),
            "include_prompt false is not supported",
        ),
    ],
)
def test_modules_that_are_not_supported_are_refused(tmp_path, module, message):
    written(tmp_path, "Llama", "Model")
    modules(tmp_path, module)
    with pytest.raises(sgl.ModelError, match=message):
        running(tmp_path)


def test_modules_in_another_order_are_refused(tmp_path):
    written(tmp_path, "Llama", "Model")
    modules(tmp_path, ("Normalize", None), ("Dense", {"in_features": 32, "out_features": 8}))
    with pytest.raises(
        sgl.ModelError, match="modules in the order Transformer, Pooling, Normalize, Dense"
    ):
        running(tmp_path)
