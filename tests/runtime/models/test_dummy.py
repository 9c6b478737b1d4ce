"""Random weights in the format that a folder declares."""

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM, Phi3Config, Phi3ForCausalLM

from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.models.layers.eight_bit_linear import GpuInt8Linear
from sglang_lite.runtime.models.layers.linear_builder import LinearBuilder
from sglang_lite.runtime.models.layers.packed_linear import PackedLinear
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.weights.blocks import Blocks
from sglang_lite.runtime.models.weights.dummy import DummySource
from sglang_lite.runtime.models.weights.fp8 import ScaledRows
from sglang_lite.runtime.models.weights.quantised_formats import Q4_K, parse_quantization_config
from tests.runtime.kernels import needs_kernels
from tests.runtime.kernels.test_kernels import DEVICE
from tests.runtime.models.packings import FORMATS, declare
from tests.runtime.models.test_fp8 import engine
from tests.runtime.models.tiny import VOCAB, randomise, save

NAME, CPU = "model.layers.3.self_attn.q_proj.weight", torch.device("cpu")


@pytest.mark.parametrize("name", [*FORMATS, "gguf"])
def test_matrices_of_layers_are_stored_as_declared(name):
    matrices = (
        Q4_K if name == "gguf" else parse_quantization_config(FORMATS[name].config, "config.json")
    )
    source = DummySource(CPU, matrices)
    assert source.has_packed_matrices
    found = source.take_tensor(NAME, (64, 256))
    assert isinstance(found, ScaledRows if matrices.scales else Blocks)
    values = found.decode(0, 64)
    assert values.std().item() == pytest.approx(0.02, rel=0.05)
    assert abs(values.mean().item()) < 0.005
    for plain in ("lm_head.weight", "model.embed_tokens.weight", "model.layers.3.mlp.gate.weight"):
        assert isinstance(source.take_tensor(plain, (64, 256)), torch.Tensor)


@needs_kernels
@pytest.mark.parametrize(
    ("config", "kind", "formats"),
    [
        (FORMATS["compressed-tensors, bytes"].config, GpuInt8Linear, {"int8": True}),
        (FORMATS["gptq"].config, PackedLinear, {}),
        (FORMATS["nf4"].config, PackedLinear, {}),
    ],
    ids=str,
)
def test_a_gpu_multiplies_them_as_stored(config, kind, formats):
    half = Precision(torch.float16, torch.float16, torch.float16, packed=True, **formats)
    part = DummySource(DEVICE, parse_quantization_config(config, "config.json")).take_tensor(
        NAME, (64, 256)
    )
    assert type(LinearBuilder(half, DEVICE, fused=True).build_linear([part], None)) is kind


def runs(folder, **settings):
    with engine(folder, load_format="dummy", **settings) as running:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        return len(running.complete([5, 6, 7], params).token_ids) == 3


def test_matrices_in_eight_bit_floats_and_stacks_of_experts():
    fp8 = parse_quantization_config(
        {"quant_method": "fp8", "weight_block_size": [128, 128]}, "config.json"
    )
    assert DummySource(CPU, fp8).take_tensor(NAME, (256, 256)).decode(
        0, 256
    ).std().item() == pytest.approx(0.02, rel=0.05)
    mxfp4 = parse_quantization_config({"quant_method": "mxfp4"}, "config.json")
    stack = DummySource(CPU, mxfp4).take_tensor_or_stack(
        "model.layers.0.mlp.experts.gate_up_proj", (4, 64, 96)
    )
    assert stack.shape == (4, 64, 96)
    assert stack.matrix(1, slice(0, None, 2)).decode(0, 48).std().item() == pytest.approx(
        0.02, rel=0.5
    )


SIZES = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=None,
)  # fmt: skip


def test_models_that_store_several_matrices_in_one_tensor(tmp_path):
    assert runs(save(randomise(Phi3ForCausalLM(Phi3Config(**SIZES))), tmp_path))
    declare(tmp_path, FORMATS["gptq"].config)
    assert runs(tmp_path, quantization="gptq")


def test_experts_in_mxfp4(tmp_path):
    config = GptOssConfig(**SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2)
    save(randomise(GptOssForCausalLM(config)), tmp_path)
    declare(tmp_path, {"quant_method": "mxfp4"})
    assert runs(tmp_path, quantization="mxfp4")


def drawn_in_order(names, seed=0):
    """Returns tensors by name, read in this order."""
    source = DummySource(CPU, seed=seed)
    found = {name: source.take_tensor(name, (8, 16)) for name in names}
    return {name: each for name, each in found.items() if isinstance(each, torch.Tensor)}


def test_a_tensor_does_not_depend_on_what_was_read_before_it():
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(3)]
    first, last, other = (
        drawn_in_order(names),
        drawn_in_order(names[::-1]),
        drawn_in_order(names, seed=1),
    )
    assert all(torch.equal(first[name], last[name]) for name in names)
    assert not torch.equal(first[names[0]], first[names[1]])
    assert not torch.equal(first[names[0]], other[names[0]])
