"""Rounding by what matrices are multiplied with: their inputs are seen, and less is lost."""

import json

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
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
from tests.runtime.models.test_fp8 import engine, expected_of, logprobs
from tests.runtime.models.tiny import VOCAB, randomise, save

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
MODELS = {
    "biases, and heads that share values": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "norms of 1 + weight": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16)),
    "products in one tensor": lambda: Phi3ForCausalLM(Phi3Config(**SIZES)),
    "a convolution": lambda: Lfm2ForCausalLM(
        Lfm2Config(**SIZES, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)
    ),
}
TEXTS = ["".join(chr(33 + (i * i * k + i) % 90) for i in range(60)) for k in range(1, 5)]


NORMS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "operator_norm.weight",
    "ffn_norm.weight",
)


def uneven(model):
    """A few inputs of every product are large."""
    randomise(model)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(NORMS) and tensor.ndim == 1:
                tensor[::13] += 12
    return model


def spec_of(folder):
    spec = read_spec(folder)
    assert isinstance(spec, ModelSpec)
    return spec


def states(folder):
    """Hidden states of all tokens of the texts."""
    loaded, found = load_model(EngineConfig(device="cpu", dtype="float32"), folder), []
    for ids in map(loaded.tokenizer.encode, TEXTS):
        at = torch.arange(len(ids))
        plan = AttentionPlan(at, (), (ExtendRow(0, len(ids), slice(0, len(ids))),))
        found.append(
            loaded.model.forward(torch.tensor(ids), at, plan, loaded.model.allocate_cache(len(ids)))
        )
    return torch.cat(found)


@pytest.mark.parametrize("rows", [1, 130, 4096])
@pytest.mark.parametrize("name", MODELS)
def test_moments_are_those_of_what_transformers_multiplies(tmp_path, monkeypatch, name, rows):
    reference = uneven(MODELS[name]()).eval()
    folder, expected = save(reference, tmp_path / "model"), {}

    def add(path):
        def hook(_, inputs):
            x = inputs[0].flatten(0, 1)
            expected[path] = expected.get(path, 0) + x.t() @ x

        return hook

    for path, linear in reference.named_modules():
        if isinstance(linear, torch.nn.Linear) and path != "lm_head":
            linear.register_forward_pre_hook(add(path))
    tokenizer = load_model(EngineConfig(device="cpu"), folder).tokenizer
    with torch.no_grad():
        for text in TEXTS:
            reference.model(torch.tensor([tokenizer.encode(text)]))
    found = {}
    monkeypatch.setattr(module, "_ROWS", rows)

    def take(names, moments):
        found.update(dict.fromkeys(names, moments))

    calibrate(folder, spec_of(folder), TEXTS, take, tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {"model"}
    assert {f"{path}.weight" for path in expected} == found.keys()
    for path, moments in expected.items():
        assert (found[f"{path}.weight"] - moments).norm() < 1e-4 * moments.norm()


class Peak(TorchDispatchMode):
    """Counts the bytes of all tensors that operators have made, and that are there yet.

    Attributes:
        most: the largest count.
    """

    def __init__(self):
        super().__init__()
        self.most, self._live = 0, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                self._live[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self._live = {
            place: (ref, size) for place, (ref, size) in self._live.items() if not ref.expired()
        }
        self.most = max(self.most, sum(size for _, size in self._live.values()))
        return made


def test_ten_times_the_texts_take_no_more_memory(tmp_path):
    sizes = SIZES | {"intermediate_size": 512, "num_hidden_layers": 3}
    folder = save(uneven(Qwen2ForCausalLM(Qwen2Config(**sizes))), tmp_path / "model")

    def peak(texts):
        with Peak() as counted:
            calibrate(folder, spec_of(folder), texts, lambda *_: None, tmp_path)
        return counted.most

    text = "".join(chr(33 + i * i % 90) for i in range(250))
    few, many = peak([text] * 16), peak([text] * 160)
    assert few > 4000 * 512 * 4  # rows of a batch are counted
    assert many < 1.05 * few


@torch.inference_mode()
@pytest.mark.parametrize("name", MODELS)
def test_less_is_lost(tmp_path, name):
    folder = save(uneven(MODELS[name]()), tmp_path / "model")
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join([json.dumps({"text": TEXTS[0]}), "", *map(json.dumps, TEXTS[1:])]))
    quantise(str(folder), tmp_path / "plain", group=32)
    options = ["--group", "32", "--calibrate", str(texts), "--out", str(tmp_path / "calibrated")]
    assert main(["quantize", str(folder), *options]) == 0

    exact, plain, calibrated = map(states, (folder, tmp_path / "plain", tmp_path / "calibrated"))
    assert (calibrated - exact).norm() < 0.7 * (plain - exact).norm()


def test_transformers_computes_the_same_of_what_is_calibrated(tmp_path):
    folder = save(uneven(MODELS["biases, and heads that share values"]()), tmp_path / "model")
    texts, out = tmp_path / "texts.jsonl", tmp_path / "out"
    texts.write_text("\n".join(map(json.dumps, TEXTS)))
    quantise(str(folder), out, group=32, texts=texts)
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with engine(out) as running:
        assert logprobs(running) == pytest.approx(expected_of(theirs), abs=1e-4)


def test_inputs_that_are_not_finite_are_named(tmp_path):
    model = uneven(MODELS["biases, and heads that share values"]())
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.fill_(torch.inf)
    folder = save(model, tmp_path / "model")
    with pytest.raises(
        sgl.ModelError, match=r"model\.layers\.1\.mlp\.down_proj: its inputs are not finite"
    ):
        calibrate(folder, spec_of(folder), TEXTS, lambda *_: None, tmp_path)


def test_inputs_that_are_too_many_for_the_memory_are_named(tmp_path, monkeypatch):
    folder = save(uneven(MODELS["biases, and heads that share values"]()), tmp_path / "model")
    free = iter([1 << 40, *[66_000] * 3, 0])  # for the model, then for each product
    monkeypatch.setattr("sglang_lite.runtime.models.memory_check.free_bytes", lambda _: next(free))
    with pytest.raises(
        sgl.ModelError, match=r"layers\.0\.mlp\.down_proj: needs .*moments of 96 inputs"
    ):
        calibrate(folder, spec_of(folder), TEXTS, lambda *_: None, tmp_path)


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
