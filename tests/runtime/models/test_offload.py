"""Weights of a decoder's last layers that the host has: each layer has its own when it is computed."""

from __future__ import annotations

import pytest
import torch

import sglang_lite as sgl
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.loading import load_model as load
from sglang_lite.runtime.loading.model_files import read_spec
from sglang_lite.runtime.models.gpu_decoder import GpuDecoder
from sglang_lite.runtime.models.offload import Offload, first_offloaded, tensors_within
from sglang_lite.runtime.models.spec import ModelSpec
from tests.runtime.kernels import needs_interpreter, needs_kernels
from tests.runtime.models.test_families import FAMILIES, SHAPE, ask, engine
from tests.runtime.models.tiny import randomise, save

CPU = torch.device("cpu")
LAYERS = 7


@pytest.fixture
def folder(request, tmp_path):
    kind, changes = FAMILIES[getattr(request, "param", "llama-biases")]
    return save(randomise(kind(kind.config_class(**SHAPE | changes | {"num_hidden_layers": LAYERS}))), tmp_path)


def decoder(folder, offload=None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "Decoder", GpuDecoder)
        patch.setattr(load, "_offload", lambda *_: offload)
        model = load.load_model(EngineConfig(model=str(folder), device="cpu", dtype="float32"), folder).model
    assert isinstance(model, GpuDecoder)
    return model


def tensors_of(model, layer):
    """Tensors of a layer, without the scratch memory that all share."""
    return list(tensors_within(layer, {id(each) for each in vars(model.linears).values()}))


@needs_kernels
@pytest.mark.sampled(12)
@pytest.mark.parametrize("folder", ["llama-biases", "qwen2-moe", "deepseek-v2", "gemma2"], indirect=True)
@pytest.mark.parametrize(("first", "group"), [(0, 1), (2, 1), (1, 2), (2, 3), (5, 4), (6, 1)])
def test_each_layer_has_its_weights_when_it_is_computed(folder, first, group):
    plain = decoder(folder)
    offload = Offload(CPU, first, group)
    model = decoder(folder, offload)
    with torch.inference_mode():
        for _ in range(2):
            for layer, wanted in zip(offload.stream(model.layers), plain.layers, strict=True):
                assert all(map(torch.equal, tensors_of(model, layer), tensors_of(plain, wanted)))


@needs_kernels
@needs_interpreter
def test_answers_are_those_of_an_engine_with_all_weights_on_the_device(folder, monkeypatch):
    settings = {"page_size": 4, "max_total_tokens": 400, "threads": 1, "max_running": 2, "device": "cpu"}
    monkeypatch.setattr(load, "Decoder", GpuDecoder)
    with engine(folder, **settings) as running:
        expected = ask(running, [5, 7, 11], most=2).result(timeout=300)
    monkeypatch.setattr(load, "_offload", lambda *_: Offload(CPU, 2, 2))
    with engine(folder, **settings) as running:
        found = ask(running, [5, 7, 11], most=2).result(timeout=300)
        assert (found.token_ids, found.output_logprobs) == (expected.token_ids, expected.output_logprobs)
        with pytest.raises(sgl.ModelError, match=r"weights in the host's memory \(cpu_offload_gb\) can't be replaced"):
            running.update_weights(str(folder))


@needs_kernels
def test_places_on_the_device_are_two_groups(folder):
    plain = decoder(folder)
    whole = sum(tensor.nbytes for tensor in tensors_of(plain, plain.layers[0]))
    model = decoder(folder, Offload(CPU, 1, 2))
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
                for layer in model.layers[1:] for each in tensors_of(model, layer)}  # fmt: skip
    assert len(storages) == 1
    assert whole * 4 <= sum(storages.values()) < whole * 6


def test_the_fewest_last_layers_are_in_the_hosts_memory(folder):
    spec = read_spec(folder)
    assert isinstance(spec, ModelSpec)
    of_one = spec.layers[0].weight_elements(spec.hidden_size)
    item = (1 << 30) / of_one  # a layer has a GiB
    assert [first_offloaded(spec, count, item) for count in (1, 3, LAYERS)] == [LAYERS - 1, LAYERS - 3, 0]
    assert first_offloaded(spec, 3, item * 1.1) == LAYERS - 3
    with pytest.raises(sgl.ParameterError, match=r"8 is more than the 7.0 GiB of the layers"):
        first_offloaded(spec, 8, item)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"cpu_offload_gb": 1}, "the weights of an engine on a CPU are in the host's memory"),
        ({"cpu_offload_gb": -1}, "-1 is not a whole number of at least 0"),
        ({"cpu_offload_gb": 1, "offload_group_size": 0}, "0 is not a whole number of at least 1"),
        ({"offload_group_size": 2}, "is for weights in the host's memory"),
        ({"cpu_offload_gb": 1, "enable_memory_saver": True}, "is not here with enable_memory_saver"),
        ({"cpu_offload_gb": 1, "tp_size": 2}, "is not here with tp_size=2"),
    ],
)
def test_settings_that_do_not_go_are_named(settings, why, folder):
    with pytest.raises(sgl.ParameterError, match=why):
        engine(folder, device="cpu", **settings) if "tp_size" not in settings else EngineConfig(**settings)
