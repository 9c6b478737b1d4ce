"""Folders that quantisation libraries write have the values that the libraries compute."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    TorchAoConfig,
)

from sglang_lite.runtime.models.weights.folder import open_weight_folder
from sglang_lite.runtime.models.weights.quantised_formats import read_quantisation
from tests.runtime.models.packings import TINY
from tests.runtime.models.tiny import randomise, save

for package in ("bitsandbytes", "torchao"):
    pytest.importorskip(
        package, reason=f"{package} is not installed: `make test-quantisers` installs it"
    )

WIDE = Qwen3Config(
    **{**TINY.to_dict(), "hidden_size": 256, "intermediate_size": 384, "head_dim": 32}
)


def of_torchao(kind, **settings):
    from torchao import quantization

    if "group" in settings:
        settings["granularity"] = quantization.PerGroup(settings.pop("group"))
    return TorchAoConfig(getattr(quantization, kind)(**settings))


def dequantised(weight):
    return weight.dequantize()


def four_bits(weight):
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, weight.quant_state)


def eight_bits(weight):
    from bitsandbytes.functional import int8_vectorwise_dequant

    return int8_vectorwise_dequant(weight.CB, weight.SCB)


FORMATS = {
    "nf4": (lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"), four_bits),
    "nf4, scales in 8 bits": (
        lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
        four_bits,
    ),
    "fp4": (lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4"), four_bits),
    "fp4, scales in 8 bits": (
        lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True),
        four_bits,
    ),
    "bitsandbytes, 8 bits": (lambda: BitsAndBytesConfig(load_in_8bit=True), eight_bits),
    "torchao, 8 bits": (lambda: of_torchao("Int8WeightOnlyConfig", version=2), dequantised),
    "torchao, 8 bits and activations": (
        lambda: of_torchao("Int8DynamicActivationInt8WeightConfig", version=2), dequantised,
    ),
    **{
        f"torchao, {bits} bits in groups": (
            lambda bits=bits: of_torchao("IntxWeightOnlyConfig", weight_dtype=getattr(torch, f"int{bits}"), group=128),
            dequantised,
        ) for bits in (2, 3, 4, 8)
    },
    "torchao, 8-bit floats": (lambda: of_torchao("Float8WeightOnlyConfig"), dequantised),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    save(randomise(Qwen3ForCausalLM(WIDE)), folder)
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_has_the_values_that_its_library_computes(plain, tmp_path, name):
    config, values = FORMATS[name]
    theirs = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=config(), dtype=torch.float32
    )
    theirs.save_pretrained(tmp_path)
    source = open_weight_folder(tmp_path, read_quantisation(tmp_path).matrices)
    compared = 0
    for module, linear in theirs.model.layers.named_modules(prefix="model.layers"):
        if isinstance(linear, torch.nn.Linear):
            shape = linear.out_features, linear.in_features
            found = source.take_tensor(f"{module}.weight", shape)
            ours, expected = found.decode(0, shape[0]), values(linear.weight)
            if values is eight_bits:  # which multiplies by scales before it divides by 127
                assert torch.allclose(ours, expected, rtol=3e-7, atol=0), module
            else:
                assert torch.equal(ours, expected), module
            compared += 1
    assert compared == 14
