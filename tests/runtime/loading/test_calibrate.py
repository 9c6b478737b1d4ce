"""Scaling by activations: the model computes the same, and rounding costs it less."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import sglang_lite as sgl
from sglang_lite.cli import main
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan, ExtendRow
from sglang_lite.runtime.loading import calibrate as module
from sglang_lite.runtime.loading.calibrate import calibrate, read_texts
from sglang_lite.runtime.loading.load_model import load_model
from sglang_lite.runtime.loading.model_files import read_spec
from sglang_lite.runtime.loading.quantise import quantise
from sglang_lite.runtime.models.spec import ModelSpec
from tests.runtime.models.tiny import VOCAB, randomise, save

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
MODELS = {
    "biases, and heads that share values": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "norms of 1 + weight": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16)),
    "products in one tensor": lambda: Phi3ForCausalLM(Phi3Config(**SIZES)),
}
TEXTS = ["".join(chr(33 + (i * i * k + i) % 90) for i in range(60)) for k in range(1, 5)]


def uneven(model):
    """A few inputs of every product are large."""
    randomise(model)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")) and tensor.ndim == 1:
                tensor[::13] += 12
    return model


def states(folder):
    """Hidden states of all tokens of the texts."""
    loaded, found = load_model(EngineConfig(device="cpu", dtype="float32"), folder), []
    for ids in map(loaded.tokenizer.encode, TEXTS):
        at = torch.arange(len(ids))
        plan = AttentionPlan(at, (), (ExtendRow(0, len(ids), slice(0, len(ids))),))
        found.append(loaded.model.forward(torch.tensor(ids), at, plan, loaded.model.allocate_cache(len(ids))))
    return torch.cat(found)


@pytest.mark.parametrize("name", MODELS)
def test_the_model_computes_the_same(tmp_path, name):
    folder = save(uneven(MODELS[name]()), tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    spec = read_spec(folder)
    assert isinstance(spec, ModelSpec)
    scaling = calibrate(
        folder, spec, TEXTS, state.__getitem__, lambda matrix: (matrix * 2).round() / 2
    )  # a coarse rounding, so that factors are worth it
    assert {name.split(".")[-3:][1] for name in scaling.divided} & {"v_proj", "qkv_proj"}
    scaled = {name: scaling.scaled(name, tensor.clone()) for name, tensor in state.items()}
    changed = [name for name in state if not torch.equal(scaled[name], state[name])]
    assert {name.split(".")[2] for name in changed if ".layers." in name} == {"0", "1"}
    ids = torch.tensor([[5, 17, 3, 80, 22, 9, 41, 77]])
    model = MODELS[name]().eval()
    found = []
    for weights in (state, scaled):
        model.load_state_dict(weights, strict=False)
        with torch.no_grad():
            found.append(model(ids).logits.log_softmax(-1))
    assert (found[0] - found[1]).abs().max() < 1e-4


@torch.inference_mode()
def test_less_is_lost(tmp_path):
    folder = save(uneven(MODELS["biases, and heads that share values"]()), tmp_path / "model")
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join([json.dumps({"text": TEXTS[0]}), "", *map(json.dumps, TEXTS[1:])]))
    quantise(str(folder), tmp_path / "plain", group=32)
    assert (
        main(["quantize", str(folder), "--group", "32", "--calibrate", str(texts), "--out", str(tmp_path / "awq")]) == 0
    )

    exact, plain, scaled = map(states, (folder, tmp_path / "plain", tmp_path / "awq"))
    assert (scaled - exact).norm() < 0.9 * (plain - exact).norm()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "can't be read"),
        ("\n", "has no text"),
        ('"a"\n{"prompt": "b"}', 'line 2 is no JSON string and no object with a string "text"'),
        ("plain words", "line 1 is no JSON string"),
    ],
)
def test_texts_that_can_not_be_read_are_named(tmp_path, content, message):
    file = tmp_path / "texts.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(sgl.ParameterError, match=f"calibrate: .*{message}"):
        read_texts(file)


def test_few_of_many_texts_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_TEXTS", 2)
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, TEXTS)))
    assert read_texts(tmp_path / "texts.jsonl") == TEXTS[:2]
