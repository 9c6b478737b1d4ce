"""Engines on packed folders: new weights keep the format, rows don't depend on their batch, and
grammars hold.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, Qwen3ForCausalLM

import sglang_lite as sgl
from sglang_lite.protocol import Regex, SamplingParams
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.loading import load_model as load
from sglang_lite.runtime.loading.description import describe
from sglang_lite.runtime.loading.load_model import load_model, precision
from sglang_lite.runtime.models.gpu_decoder import GpuDecoder
from sglang_lite.runtime.models.layers.eight_bit_linear import Fp8Linear, GpuInt8Linear
from sglang_lite.runtime.models.layers.gpu_linear import GpuLinear, SideBySide
from sglang_lite.runtime.models.layers.invariant_linear import InvariantLinear
from sglang_lite.runtime.models.layers.linear import StackedProducts, load_block_library
from sglang_lite.runtime.models.layers.linear_builder import LinearBuilder
from sglang_lite.runtime.models.layers.packed_linear import PackedLinear
from sglang_lite.runtime.models.new_weights import StagedWeights
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.read_config import spec_from_config
from sglang_lite.runtime.models.weights.blocks import Blocks
from sglang_lite.runtime.models.weights.folder import open_weight_folder
from sglang_lite.runtime.models.weights.quantised_formats import read_quantisation
from tests.runtime.kernels import needs_kernels
from tests.runtime.kernels.test_kernels import DEVICE, apply_activation, close, normal
from tests.runtime.models.packings import FORMATS, MIXED, TINY, write
from tests.runtime.models.test_families import ask, prompts
from tests.runtime.models.test_fp8 import engine
from tests.runtime.models.test_new_weights import all_tensors, told
from tests.runtime.models.test_weights import TINY as LLAMA
from tests.runtime.models.test_weights import write_gguf
from tests.runtime.models.tiny import randomise, save

CPU = torch.device("cpu")
HALF = Precision(torch.float16, torch.float16, torch.float16, packed=True)
Q = "model.layers.0.self_attn.q_proj"


def folder_of(form, at):
    """Folder in a format of `packings.py`, or in 16 bits for "int4", which rounds it while it is
    loaded.
    """
    if form == "int4":
        return save(randomise(Qwen3ForCausalLM(TINY)), at)
    return write(at, FORMATS[form])[0]


def scaled_copy(folder, to):
    """Copy of a folder whose floats are 0.75 times as large: scales, norms and what is in 16 bits."""
    shutil.copytree(folder, to)
    state = load_file(folder / "model.safetensors")
    save_file(
        {
            name: each * 0.75 if each.is_floating_point() and each.itemsize > 1 else each
            for name, each in state.items()
        },
        to / "model.safetensors",
    )
    return to


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "form", ["gptq", "gptq, reordered", "awq", "compressed-tensors", "nf4", "nvfp4", "int4"]
)
def test_new_weights_are_kept_in_the_format(tmp_path, form):
    old = folder_of(form, tmp_path / "old")
    new, settings = scaled_copy(old, tmp_path / "new"), {"dtype": "auto"}
    if form == "int4":
        settings["quantization"] = form
    with engine(new, **settings) as running:
        expected = told(running)
    with engine(old, **settings) as running:
        before = told(running)
        assert before != expected
        running.update_weights(str(new))
        assert told(running) == expected
        given = load_file(old / "model.safetensors")
        some = {name: each for name, each in given.items() if name.startswith(Q)}
        # of which the first has a plain tensor, and the second is decoded
        if form not in ("int4", "nf4"):
            with pytest.raises(
                sgl.ModelError, match="in fewer bits in this engine, and can't be read back"
            ):
                running.update_weights_from_tensor(some)
            assert told(running) == expected
        running.update_weights_from_tensor(given)
        assert told(running) == before


def gpu_decoder(folder):
    """Decoder of a GPU that keeps what is packed; nobody runs its kernels."""
    spec = spec_from_config(json.loads((folder / "config.json").read_text()), "config.json")
    with torch.inference_mode():
        return GpuDecoder(
            spec, open_weight_folder(folder, read_quantisation(folder).matrices), HALF, DEVICE, 64
        )


def stage(model, folder):
    return StagedWeights(
        model, lambda: open_weight_folder(folder, read_quantisation(folder).matrices), whole=True
    )


@needs_kernels
@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["gptq", "gptq, reordered", "awq", "nf4", "nvfp4"])
def test_new_weights_overwrite_packed_ones_of_a_gpu(tmp_path, form):
    old = folder_of(form, tmp_path / "old")
    new = scaled_copy(old, tmp_path / "new")
    running, expected = gpu_decoder(old), all_tensors(gpu_decoder(new))
    assert type(running.layers[0].qkv) is PackedLinear
    found = all_tensors(running)
    addresses = [tensor.data_ptr() for tensor in found.values()]
    assert any(not torch.equal(found[key], expected[key]) for key in found)
    with torch.inference_mode():
        stage(running, new).write_to_model()
    found = all_tensors(running)
    assert [tensor.data_ptr() for tensor in found.values()] == addresses
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


@needs_kernels
def test_weights_in_another_format_are_refused_where_addresses_stay(tmp_path):
    running = gpu_decoder(folder_of("gptq", tmp_path / "gptq"))
    with (
        torch.inference_mode(),
        pytest.raises(sgl.ModelError, match="have another form than the running ones"),
    ):
        stage(running, folder_of("nf4", tmp_path / "nf4"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["gptq, reordered", "nvfp4"])
def test_a_row_has_the_same_bits_in_every_batch(tmp_path, form):
    batch = prompts(20, 9, 33, 5)
    with engine(
        folder_of(form, tmp_path), dtype="auto", deterministic=True, max_running=4
    ) as running:
        together = [
            each.result(timeout=60) for each in [ask(running, ids, most=4) for ids in batch]
        ]
        alone = [ask(running, ids, most=4).result(timeout=60) for ids in batch]
    for one, other in zip(together, alone):
        assert one.token_ids == other.token_ids
        assert one.output_logprobs == other.output_logprobs


@needs_kernels
def test_a_deterministic_gpu_decodes_a_packed_folder(tmp_path):
    """And multiplies as it does a plain one, whose rows have the same bits in every batch."""
    folder, reference = write(tmp_path, FORMATS["gptq"])
    source = open_weight_folder(folder, read_quantisation(folder).matrices)
    part = source.take_tensor(f"{Q}.weight", (64, 64))
    alike = Precision(torch.float16, torch.float16, torch.float16, batch_invariant=True)
    made = LinearBuilder(alike, DEVICE, fused=True).build_linear([part], None)
    assert type(made) is InvariantLinear
    assert torch.equal(made.weight, reference.state_dict()[f"{Q}.weight"].half().to(DEVICE))


def two_orders(folder):
    """Matrices that a layer multiplies together, whose inputs are in two orders, and their values."""
    source = open_weight_folder(folder, read_quantisation(folder).matrices)
    first = source.take_tensor(f"{Q}.weight", (64, 64))
    assert isinstance(first, Blocks)
    assert first.order is not None
    parts = [first, Blocks(first.q, first.scale, first.minimum, order=first.order.flip(0))]
    return parts, torch.cat([part.decode(0, 64) for part in parts])


def blocks_of_four_bits():
    """Matrix [64, 64] in groups of 32, and its values."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 16, (64, 64), dtype=torch.uint8, generator=generator)
    scale = torch.rand(64, 2, generator=generator).add(0.5).div(16).half().float()
    blocks = Blocks(numbers, scale, -8 * scale)
    return blocks, blocks.decode(0, 64)


def test_orders_that_differ_in_a_product_are_multiplied_apart(tmp_path):
    if load_block_library() is None:
        pytest.skip("needs AVX2 and a C++ compiler")
    parts, values = two_orders(folder_of("gptq, reordered", tmp_path))
    precision = Precision(torch.float32, torch.float32, torch.float32, blocks=True)
    product = LinearBuilder(precision, CPU, fused=False).build_linear(parts, None)
    assert type(product) is StackedProducts
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    expected = x @ values.t()
    assert torch.allclose(product(x), expected, rtol=0, atol=2e-3 * expected.abs().max().item())


@needs_kernels
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_formats_that_differ_in_a_product_are_multiplied_apart_on_a_gpu(tmp_path, rows):
    """Two orders of inputs, and 16 bits; with a norm before and a gate after them."""
    parts, values = two_orders(folder_of("gptq, reordered", tmp_path))
    parts.append(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) / 8)
    values = torch.cat((values, parts[2]))
    values, bias = values.to(DEVICE, torch.float64), normal(192, dtype=torch.float16)
    made = LinearBuilder(HALF, DEVICE, fused=True).build_linear(parts, bias)
    assert type(made) is SideBySide
    assert [type(product) for product in made.products] == [PackedLinear, PackedLinear, GpuLinear]
    x = normal(rows, 64, dtype=torch.float16)
    expected = torch.nn.functional.linear(x.double(), values, bias.double())
    for found in (
        made(x),
        made.multiply_into(x, torch.empty_like(expected, dtype=x.dtype)),
        *made.multiply_in_parts(x)[:1],
    ):
        close(found / 4, expected / 4, torch.float16)
    close(
        made.multiply_gated(x, "silu", eight=None),
        apply_activation(expected, "silu"),
        torch.float16,
    )


@needs_kernels
@pytest.mark.parametrize("gate", ["", "silu"])
def test_two_formats_take_the_norm_before_a_single_row(gate):
    blocks, values = blocks_of_four_bits()
    wide = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) / 8
    made = LinearBuilder(HALF, DEVICE, fused=True).build_linear([blocks, wide], None)
    assert type(made) is SideBySide
    assert made.fuses_one
    x, residual, norm = (normal(size, 64, dtype=torch.float16) for size in (1, 1, 1))
    y, total = made.multiply_single_row(x, residual=residual, norm=norm[0], eps=1e-5, gate=gate)
    assert torch.equal(total, x + residual)
    normed = torch.nn.functional.rms_norm(total.double(), (64,), norm[0].double(), 1e-5)
    expected = normed @ torch.cat((values, wide)).to(DEVICE, torch.float64).t()
    close(y / 16, (apply_activation(expected, gate) if gate else expected) / 16, torch.float16)


INTEGERS = "compressed-tensors, bytes"
FP4 = "FP4 numbers become 16 bits within products: only weights are in 4 bits (docs/models.md)."


@needs_kernels
@pytest.mark.parametrize(
    ("form", "named", "kept"),
    [
        (INTEGERS, None, GpuInt8Linear),
        (INTEGERS, "w8a8_int8", GpuInt8Linear),
        (INTEGERS, "compressed-tensors", GpuLinear),
        (f"{INTEGERS} of weights alone", None, GpuLinear),
        (f"{INTEGERS} of weights alone", "w8a8_int8", GpuInt8Linear),
        ("gptq", None, PackedLinear),
        ("nvfp4", None, PackedLinear),
    ],
)
def test_a_gpu_keeps_what_the_folder_declares(tmp_path, monkeypatch, caplog, form, named, kept):
    folder = folder_of(form, tmp_path)
    as_on_a_gpu(monkeypatch)
    with caplog.at_level("INFO", "sglang_lite"):
        loaded = load_model(
            EngineConfig(model=str(folder), device="cpu", quantization=named), folder, iter
        )
    assert type(loaded.model.layers[0].qkv) is kept
    assert caplog.messages.count(FP4) == (form == "nvfp4")


@needs_kernels
def test_a_gpu_keeps_both_formats_of_a_folder(tmp_path, monkeypatch):
    folder, _ = write(tmp_path, MIXED["integers of 4 bits and floats"])
    as_on_a_gpu(monkeypatch, eight_bits=True)
    layer = load_model(EngineConfig(model=str(folder), device="cpu"), folder, iter).model.layers[0]
    assert [type(product) for product in layer.qkv.products] == [Fp8Linear, PackedLinear]
    assert (type(layer.output), type(layer.feed_forward.gate_up)) == (Fp8Linear, PackedLinear)


@needs_kernels
@pytest.mark.parametrize(("kind", "kept"), [("Q4_0", PackedLinear), ("Q8_0", GpuLinear)])
def test_a_gpu_keeps_four_bits_of_a_gguf_file(tmp_path, monkeypatch, kind, kept):
    torch.manual_seed(0)
    path = write_gguf(tmp_path / "tiny.gguf", LlamaForCausalLM(LLAMA).eval(), kind)
    monkeypatch.setattr(
        "sglang_lite.runtime.loading.description.pick_device", lambda _: torch.device("cuda")
    )
    monkeypatch.setattr(
        "sglang_lite.runtime.loading.load_model.computes_in_eight_bits", lambda _: False
    )
    assert describe(str(path)).products.startswith(
        "in 4 bits" if kind == "Q4_0" else "decoded while loading"
    )
    as_on_a_gpu(monkeypatch)
    loaded = load_model(EngineConfig(model=str(path), device="cpu"), path, iter)
    products = [
        loaded.model.head,
        *(each for layer in loaded.model.layers for each in (layer.qkv, layer.output)),
    ]
    assert {type(each) for each in products} == {kept}


def as_on_a_gpu(monkeypatch, *, eight_bits=False):
    """Has models loaded on the CPU in the formats, and with the layers, of a GPU; nobody runs their
    kernels.
    """
    gpu = torch.device("cuda")
    monkeypatch.setattr(load, "Decoder", GpuDecoder)
    monkeypatch.setattr(load, "computes_in_eight_bits", lambda _: eight_bits)
    monkeypatch.setattr(
        load, "precision", lambda dtype, _, **settings: precision(dtype, gpu, **settings)
    )


CALL = Regex(r"look_it_up:[a-e]{4};then_answer:([0-4]{3}|none)")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["gptq", "compressed-tensors"])
def test_answers_under_a_grammar_are_those_of_the_decoded_model(tmp_path, form):
    """Whose forced text is read at once, and where it is not."""
    packed, reference = write(tmp_path / "packed", FORMATS[form])
    plain = save(reference, tmp_path / "plain")
    params = SamplingParams(max_tokens=60, temperature=0)
    found = []
    for folder, settings in (
        (plain, {}), (packed, {}), (packed, {"jump_forward": "off"}), (packed, {"dtype": "auto"}),
    ):  # fmt: skip
        with engine(folder, **settings) as running:
            found.append(running.complete([5, 6, 7], params, constraint=CALL))
    assert {each.text for each in found} == {found[0].text}
    assert [each.usage.forced_tokens > 20 for each in found] == [True, True, False, True]
