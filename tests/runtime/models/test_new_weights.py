"""Weights that replace those of a loaded model: equal to a model that was loaded with them, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import sglang_lite as sgl
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.loading import load_model as load
from sglang_lite.runtime.models.gpu_decoder import GpuDecoder
from sglang_lite.runtime.models.new_weights import StagedWeights, tensor_pairs
from sglang_lite.runtime.models.weights.folder import TensorSource
from sglang_lite.runtime.models.weights.source import WeightSource
from tests.runtime.kernels import needs_kernels
from tests.runtime.models.test_families import FAMILIES, SHAPE
from tests.runtime.models.tiny import randomise, save


def pair(name: str, root: Path) -> list[Path]:
    """Folders of two models of a family with different weights."""
    kind, changes = FAMILIES[name]
    if isinstance(kind, str):
        transformers = pytest.importorskip("transformers")
        kind = getattr(transformers, kind, None) or pytest.skip("transformers has none")
    folders = []
    for scale, folder in ((1.0, "old"), (0.8, "new")):
        model = randomise(kind(kind.config_class(**SHAPE | changes)))
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.mul_(scale)
        folders.append(save(model, root / folder))
    return folders


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def opener_of(tensors: dict[str, torch.Tensor]) -> Callable[[], WeightSource]:
    return lambda: TensorSource("the test", tensors)


@pytest.fixture(scope="module")
def llamas(tmp_path_factory):
    return pair("llama-biases", tmp_path_factory.mktemp("llamas"))


def gpu_decoder(folder: Path, **settings: Any) -> GpuDecoder:
    """The decoder of a GPU, whose kernels nobody runs."""
    model = load.load_model(EngineConfig(model=str(folder), device="cpu", dtype="float32", **settings), folder).model
    assert isinstance(model, GpuDecoder)
    return model


def all_tensors(model: GpuDecoder) -> dict[str, torch.Tensor]:
    whole = [model.embedding, model.head, model.norm, model.layers]
    scratch = {id(each): each for each in vars(model.linears).values()}  # which all linear layers share
    return {f"{i}": old for i, (old, _) in enumerate(tensor_pairs(whole, copy.deepcopy(whole, scratch), ""))}


@needs_kernels
@pytest.mark.parametrize("name", ["llama-biases", "deepseek-v2", "qwen2-moe", "gpt-neox", "gpt-oss", "gemma3"])
def test_new_weights_overwrite_those_of_a_gpu(name, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "Decoder", GpuDecoder)
    old, new = pair(name, tmp_path)
    running, expected = gpu_decoder(old), all_tensors(gpu_decoder(new))
    found = all_tensors(running)
    addresses = [tensor.data_ptr() for tensor in found.values()]
    given = list(tensors_of(new).items())
    for start in range(0, len(given), 3):
        opener = opener_of(dict(given[start : start + 3]))
        with torch.inference_mode():
            StagedWeights(running, opener, whole=False).write()
    assert [tensor.data_ptr() for tensor in all_tensors(running).values()] == addresses
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


@pytest.fixture
def other_head(tmp_path):
    """Folder of a model with one table for embedding and head, and tensors with two."""
    old, _ = pair("gemma", tmp_path)
    table = tensors_of(old)["model.embed_tokens.weight"]
    return old, {"model.embed_tokens.weight": table, "lm_head.weight": table * 0.5}


@needs_kernels
def test_a_head_of_its_own_is_refused_where_addresses_stay(other_head, monkeypatch):
    monkeypatch.setattr(load, "Decoder", GpuDecoder)
    old, tensors = other_head
    running = gpu_decoder(old)
    with torch.inference_mode(), pytest.raises(sgl.ModelError, match="one table for both"):
        StagedWeights(running, opener_of(tensors), whole=False)


@needs_kernels
def test_a_matrix_of_another_form_is_refused_where_addresses_stay(llamas, monkeypatch):
    monkeypatch.setattr(load, "Decoder", GpuDecoder)
    running = gpu_decoder(llamas[0])
    linear = running.layers[0].output
    monkeypatch.setattr(linear, "bias", None)
    opener = opener_of(tensors_of(llamas[1]))
    with torch.inference_mode(), pytest.raises(sgl.ModelError, match=r"layer 0, output: .* another form"):
        StagedWeights(running, opener, whole=False)
