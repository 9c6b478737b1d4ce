"""Weights of a decoder's last layers that the host has: each layer has its own when it is computed."""

from __future__ import annotations

import pytest
import torch

import sglang_lite as sgl
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.loading import load_model as load
from sglang_lite.runtime.loading.model_files import read_spec
from sglang_lite.runtime.loading.quantise import quantise
from sglang_lite.runtime.models.gpu_decoder import GpuDecoder
from sglang_lite.runtime.models.offload import Offload, check_offload_size, tensors_within
from sglang_lite.runtime.models.spec import ModelSpec
from tests.runtime.kernels import INTERPRETED, needs_interpreter, needs_kernels
from tests.runtime.models.test_families import FAMILIES, SHAPE, ask, engine
from tests.runtime.models.tiny import randomise, save

CPU = torch.device("cpu")
LAYERS = 7


@pytest.fixture
def folder(request, tmp_path):
    kind, changes = FAMILIES[getattr(request, "param", "llama-biases")]
    return save(
        randomise(kind(kind.config_class(**SHAPE | changes | {"num_hidden_layers": LAYERS}))),
        tmp_path,
    )


def decoder(folder, offload=None, **settings):
    settings = {"dtype": "float32", **settings}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "Decoder", GpuDecoder)
        patch.setattr(load, "_offload", lambda *_: offload)
        patch.setattr(load, "computes_in_eight_bits", lambda _: True)
        model = load.load_model(
            EngineConfig(model=str(folder), device="cpu", **settings), folder
        ).model
    assert isinstance(model, GpuDecoder)
    return model


def tensors_of(model, layer):
    """Tensors of a layer, without the scratch memory that all share."""
    return list(tensors_within(layer, {id(each) for each in vars(model.linears).values()}))


def bytes_of(model, layers):
    """Bytes of the storages of some layers of a model that is on the device as a whole."""
    stored = (each.untyped_storage() for layer in layers for each in tensors_of(model, layer))
    return sum({each.data_ptr(): each.nbytes() for each in stored}.values())


@needs_kernels
@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "folder", ["llama-biases", "qwen2-moe", "deepseek-v2", "gemma2"], indirect=True
)
@pytest.mark.parametrize(("first", "group"), [(0, 1), (2, 1), (1, 2), (2, 3), (5, 4), (6, 1)])
def test_each_layer_has_its_weights_when_it_is_computed(folder, first, group):
    plain = decoder(folder)
    offload = Offload(CPU, bytes_of(plain, plain.layers[first:]), group)
    model = decoder(folder, offload)
    with torch.inference_mode():
        for _ in range(2):
            for layer, wanted in zip(offload.stream(model.layers), plain.layers, strict=True):
                assert all(map(torch.equal, tensors_of(model, layer), tensors_of(plain, wanted)))


@needs_kernels
def test_places_on_the_device_are_two_groups(folder):
    plain = decoder(folder)
    whole = sum(tensor.nbytes for tensor in tensors_of(plain, plain.layers[0]))
    model = decoder(folder, Offload(CPU, whole * (LAYERS - 1), 2))
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
                for layer in model.layers[1:] for each in tensors_of(model, layer)}  # fmt: skip
    assert len(storages) == 1
    assert whole * 4 <= sum(storages.values()) < whole * 6


FORMATS = {
    "16 bits": (lambda folder: folder, {"dtype": "bfloat16"}),
    "packed in 4 bits": (lambda folder: quantised(folder, "int4"), {}),
    "packed in 8 bits": (lambda folder: quantised(folder, "int8"), {}),
    "rounded while loading, to 4 bits": (
        lambda folder: folder,
        {"quantization": "int4", "dtype": "bfloat16"},
    ),
    "rounded while loading, to 8 bits": (
        lambda folder: folder,
        {"quantization": "int8", "dtype": "bfloat16"},
    ),
    "fp8": (lambda folder: folder, {"quantization": "fp8", "dtype": "bfloat16"}),
}


def saved_model(folder):
    """Saves a model whose matrices can be packed."""
    kind, changes = FAMILIES["llama-2"]
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS}
    return save(randomise(kind(kind.config_class(**SHAPE | changes | sizes))), folder)


def quantised(folder, to):
    quantise(str(folder), folder / to, to=to, group=32)
    return folder / to


@needs_kernels
@needs_interpreter
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["float32", *FORMATS])
def test_answers_are_those_of_an_engine_with_all_weights_on_the_device(tmp_path, monkeypatch, name):
    change, weights = FORMATS.get(name, (lambda folder: folder, {}))
    folder = change(saved_model(tmp_path))
    settings = {
        "page_size": 4,
        "max_total_tokens": 400,
        "threads": 1,
        "max_running": 2,
        "device": "cpu",
        **weights,
    }
    monkeypatch.setattr(load, "Decoder", GpuDecoder)
    monkeypatch.setattr(load, "computes_in_eight_bits", lambda _: True)
    with engine(folder, **settings) as running:
        expected = ask(running, [5, 7, 11], most=2).result(timeout=300)
    plain = decoder(folder, **weights)
    monkeypatch.setattr(
        load, "_offload", lambda *_: Offload(CPU, bytes_of(plain, plain.layers[2:]), 2)
    )
    with engine(folder, **settings) as running:
        found = ask(running, [5, 7, 11], most=2).result(timeout=300)
        assert (found.token_ids, found.output_logprobs) == (
            expected.token_ids,
            expected.output_logprobs,
        )
        with pytest.raises(
            sgl.ModelError,
            match=r"weights in the host's memory \(cpu_offload_gb\) can't be replaced",
        ):
            running.update_weights(str(folder))


@needs_kernels
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMATS)
def test_the_fewest_last_layers_are_taken_by_the_bytes_that_they_have(tmp_path, name):
    if name == "fp8" and not INTERPRETED:
        pytest.skip("numbers are rounded by a kernel, which needs Triton's interpreter on a CPU")
    change, settings = FORMATS[name]
    made = change(saved_model(tmp_path))
    plain = decoder(made, **settings)
    for first in (LAYERS - 1, 2, 0):
        wanted = bytes_of(plain, plain.layers[first:])
        for least, count in (
            (wanted, LAYERS - first),
            (wanted - 1, LAYERS - first),
            (wanted + 1, LAYERS - first + 1),
        ):
            if count > LAYERS:
                continue
            model = decoder(made, Offload(CPU, least, 1), **settings)
            places = [
                {each.untyped_storage().data_ptr() for each in tensors_of(model, layer)}
                for layer in model.layers
            ]
            assert [len(each) == 1 for each in places] == [
                i >= LAYERS - count for i in range(LAYERS)
            ]


@needs_kernels
def test_more_than_the_layers_have_is_refused_before_they_are_read_or_when_they_are(folder):
    spec = read_spec(folder)
    assert isinstance(spec, ModelSpec)
    item = (1 << 30) / spec.layers[0].weight_elements(spec.hidden_size)  # a layer has a GiB
    check_offload_size(spec, LAYERS, item)
    with pytest.raises(
        sgl.ParameterError, match=r"cpu_offload_gb: 8 is more than the 7.0 GiB of the layers"
    ):
        check_offload_size(spec, 8, item)
    with pytest.raises(
        sgl.ParameterError, match=r"cpu_offload_gb: 1 is more than the 0.0 GiB of the layers"
    ):
        decoder(folder, Offload(CPU, 1 << 30, 1))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"cpu_offload_gb": 1}, "the weights of an engine on a CPU are in the host's memory"),
        ({"cpu_offload_gb": -1}, "-1 is not a whole number of at least 0"),
        ({"cpu_offload_gb": 1, "offload_group_size": 0}, "0 is not a whole number of at least 1"),
        ({"offload_group_size": 2}, "is for weights in the host's memory"),
        (
            {"cpu_offload_gb": 1, "enable_memory_saver": True},
            "is not here with enable_memory_saver",
        ),
        ({"cpu_offload_gb": 1, "tp_size": 2}, "is not here with tp_size=2"),
    ],
)
def test_settings_that_do_not_go_are_named(settings, why, folder):
    with pytest.raises(sgl.ParameterError, match=why):
        engine(folder, device="cpu", **settings) if "tp_size" not in settings else EngineConfig(
            **settings
        )
