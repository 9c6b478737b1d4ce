"""Checkpoints as quantisation tools pack them are the models that their numbers and scales
describe.
"""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity, profile
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import sglang_lite as sgl
from sglang_lite.runtime.kernels.experts import ExpertMatrices, apply_experts
from sglang_lite.runtime.kernels.packed_products import decode_weight
from sglang_lite.runtime.kernels.packed_weight import PackedWeight
from sglang_lite.runtime.loading.description import describe
from sglang_lite.runtime.loading.load_model import precision
from sglang_lite.runtime.models.gpu_decoder import GpuDecoder
from sglang_lite.runtime.models.layers.expert_stacker import ExpertStacker
from sglang_lite.runtime.models.layers.gpu_linear import GpuLinear
from sglang_lite.runtime.models.layers.linear import Bf16Linear, DenseLinear, load_block_library
from sglang_lite.runtime.models.layers.linear_builder import LinearBuilder
from sglang_lite.runtime.models.layers.packed_linear import PackedLinear, pack_matrix
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.read_config import spec_from_config
from sglang_lite.runtime.models.weights.folder import open_weight_folder
from sglang_lite.runtime.models.weights.fp4 import Mxfp4Experts
from sglang_lite.runtime.models.weights.quantised_formats import (
    parse_quantization_config,
    read_quantisation,
)
from sglang_lite.runtime.models.weights.rounding import NF4, ROUNDINGS, round_matrix
from tests.runtime.kernels import needs_kernels
from tests.runtime.kernels.test_kernels import DEVICE
from tests.runtime.models.packings import (
    FORMATS,
    MIXED,
    TINY,
    beside,
    declare,
    eight,
    eight_bit_floats,
    gptq,
    mxfp4,
    packed,
    write,
)  # fmt: skip
from tests.runtime.models.test_fp8 import engine, expected_of, logprobs
from tests.runtime.models.test_gpu_decoder import hidden_states
from tests.runtime.models.tiny import VOCAB, randomise, save

CPU = torch.device("cpu")
HALF = Precision(torch.float16, torch.float16, torch.float16, packed=True)
FLOAT_IN_BLOCKS = Precision(torch.float32, torch.float32, torch.float32, blocks=True)
TOLD = "quantised matrices are decoded while they are loaded (docs/models.md, Formats of weights)."


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", FORMATS | MIXED)
def test_its_matrices_have_the_values_that_the_tool_computes(tmp_path, name):
    folder, reference = write(tmp_path, (FORMATS | MIXED)[name])
    source = open_weight_folder(folder, read_quantisation(folder).matrices)
    for stored, weight in reference.state_dict().items():
        found = source.take_tensor(stored, tuple(weight.shape))
        values = found if isinstance(found, torch.Tensor) else found.decode(0, len(weight))
        assert torch.equal(values, weight) or torch.allclose(values, weight, rtol=3e-7, atol=0), (
            stored
        )
    source.check_all_used()


@pytest.mark.parametrize(
    ("device", "dtype", "invariant", "kept"),
    [("cuda", "auto", False, True), ("cuda", "float32", False, False), ("cuda", "auto", True, False),
     ("cpu", "auto", False, False)],
)  # fmt: skip
def test_a_gpu_keeps_them_packed_in_sixteen_bits(monkeypatch, device, dtype, invariant, kept):
    monkeypatch.setattr(
        "sglang_lite.runtime.loading.load_model.computes_in_eight_bits", lambda _: False
    )
    assert (
        precision(dtype, torch.device(device), batch_invariant=invariant, packed=True).packed
        == kept
    )


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", FORMATS | MIXED)
def test_it_is_the_model_that_it_describes(tmp_path, name):
    form = (FORMATS | MIXED)[name]
    folder, reference = write(tmp_path, form)
    assert not describe(str(folder)).refused
    with engine(folder, quantization=form.names[-1]) as running:
        assert logprobs(running) == pytest.approx(expected_of(reference), abs=1e-5)
    # by the kernel for its blocks, where there is one
    with engine(folder, dtype="auto") as running:
        assert logprobs(running) == pytest.approx(expected_of(reference), abs=0.1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMATS)
def test_a_cpu_multiplies_it_without_decoding(tmp_path, name):
    if load_block_library() is None:
        pytest.skip("needs AVX2 and a C++ compiler")
    folder, reference = write(tmp_path, FORMATS[name])
    source = open_weight_folder(folder, read_quantisation(folder).matrices)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    weights = [reference.state_dict()[name] for name in names]
    parts = [source.take_tensor(name, tuple(weight.shape)) for name, weight in zip(names, weights)]
    product = LinearBuilder(FLOAT_IN_BLOCKS, CPU, fused=False).build_linear(parts, None)
    assert isinstance(product, DenseLinear | Bf16Linear) == FORMATS[name].wide
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    expected = x @ torch.cat(weights).t()
    assert torch.allclose(product(x), expected, rtol=0, atol=2e-3 * expected.abs().max().item())


@pytest.mark.parametrize("name", ["gptq", "nf4", "fp4"])
def test_a_cpu_that_decodes_says_so(tmp_path, name, caplog):
    if load_block_library() is None:
        pytest.skip("no compiler")
    folder, reference = write(tmp_path, FORMATS[name])
    source = open_weight_folder(folder, read_quantisation(folder).matrices)
    weight = "model.layers.0.self_attn.q_proj.weight"
    parts = [source.take_tensor(weight, tuple(reference.state_dict()[weight].shape))]
    builder = LinearBuilder(FLOAT_IN_BLOCKS, CPU, fused=False)
    with caplog.at_level("INFO", "sglang_lite"):
        builder.build_linear(parts, None)
        builder.build_linear(parts, None)
    assert caplog.messages == ([TOLD] if FORMATS[name].wide else [])


PACKED = (
    "gptq",
    "gptq, zeros",
    "gptq, reordered",
    "awq",
    "compressed-tensors",
    "nvfp4",
    "mxfp4",
    "nf4",
    "fp4",
)


@needs_kernels
@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", [*PACKED, "gptq, 8 bits"])
def test_a_gpu_keeps_four_bits(tmp_path, name, caplog):
    """And computes what it does with the decoded matrices, with one row and with several."""
    folder, _ = write(tmp_path, FORMATS[name])
    spec = spec_from_config(json.loads((folder / "config.json").read_text()), "config.json")
    half = Precision(torch.float16, torch.float16, torch.float16, packed=True)

    def model():
        with torch.inference_mode():
            return GpuDecoder(
                spec,
                open_weight_folder(folder, read_quantisation(folder).matrices),
                half,
                DEVICE,
                64,
            )

    packed = model()
    products = [
        (layer.qkv, layer.output, layer.feed_forward.gate_up, layer.feed_forward.down)
        for layer in packed.layers
    ]
    assert {type(product) for each in products for product in each} == {
        PackedLinear if name in PACKED else GpuLinear
    }
    assert type(packed.head) is GpuLinear
    half = replace(half, packed=False)
    caplog.clear()
    with caplog.at_level("INFO", "sglang_lite"):
        plain = model()
    assert caplog.messages == [TOLD]
    assert type(plain.layers[0].qkv) is GpuLinear
    for rows in (1, 3):
        found, expected = hidden_states(packed, rows), hidden_states(plain, rows)
        assert ((found - expected).abs().max() / expected.abs().max()).item() < 0.01


def changed(folder, change):
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors"
    )


UP = "model.layers.1.mlp.up_proj"


def without(part):
    return lambda state: state.pop(UP + part)


def add(part, tensor):
    return lambda state: state.update({UP + part: tensor})


def put(part, change):
    return lambda state: state.update({UP + part: change(state[UP + part])})


NF4_STATE = ".weight.quant_state.bitsandbytes__nf4"


def state_with(stored, **changes):
    """A quant_state with other entries."""
    return torch.tensor(
        list(json.dumps(json.loads(bytes(stored.tolist())) | changes).encode()), dtype=torch.uint8
    )


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("gptq", without(".scales"), r"up_proj.qweight is there, but .*up_proj.scales is missing"),
        ("awq", without(".qzeros"), r"up_proj.qweight is there, but .*up_proj.qzeros is missing"),
        (
            "compressed-tensors",
            without(".weight_shape"),
            "weight_packed is there, but .*weight_shape is missing",
        ),
        (
            "nf4",
            without(".weight.absmax"),
            "quant_state.bitsandbytes__nf4 is there, but .*absmax is missing",
        ),
        (
            "gptq",
            put(".scales", lambda t: t * 0),
            "up_proj.weight: a scale is zero, infinite or not a number",
        ),
        (
            "awq",
            put(".scales", lambda t: t * float("nan")),
            "a scale is zero, infinite or not a number",
        ),
        (
            "nvfp4",
            put(".weight_global_scale", lambda t: t * 0),
            "a scale is zero, infinite or not a number",
        ),
        (
            "gptq",
            put(".g_idx", lambda t: t + 1),
            "g_idx does not put 32 inputs into each of 2 groups",
        ),
        ("gptq", put(".g_idx", lambda t: t.float()), "g_idx is torch.float32"),
        ("gptq", put(".qweight", lambda t: t.long()), "words of int32 hold .* not torch.int64"),
        (
            "awq",
            put(".qweight", lambda t: t.to(torch.int16)),
            "words of int32 hold .* not torch.int16",
        ),
        (
            "compressed-tensors",
            put(".weight_packed", lambda t: t[:, :-1]),
            "7 words and 2 scales hold no row of 64",
        ),
        ("compressed-tensors, bytes", put(".weight", lambda t: t.float()), "declares int8"),
        (
            "gptq",
            put(".scales", lambda t: t.repeat(2, 1)),
            "4 scales for a row of 64 .* declares groups of 32",
        ),
        (
            "nf4",
            put(".weight.quant_state.bitsandbytes__nf4", lambda t: t[:9]),
            "quant_state can't be understood",
        ),
        ("nvfp4", put(".weight_packed", lambda t: t.int()), "numbers of 4 bits are torch.int32"),
        ("mxfp4", put(".weight_scale", lambda t: t.float()), "scales are torch.float32"),
        ("bitsandbytes, 8 bits", put(".SCB", lambda t: t[:3]), "SCB of"),
        (
            "gptq",
            put(".scales", lambda t: t * float("inf")),
            "a scale is zero, infinite or not a number",
        ),
        (
            "gptq",
            put(".scales", lambda t: t.bool()),
            "scales are torch.bool, no floating-point numbers",
        ),
        (
            "nvfp4 of Model Optimizer",
            put(".weight_scale_2", lambda t: t * 0),
            "a scale is zero, infinite or not a number",
        ),
        (
            "nvfp4 of Model Optimizer",
            put(".weight_scale_2", lambda t: torch.ones(3)),
            "the scale of its scales has shape",
        ),
        (
            "nf4",
            put(NF4_STATE, lambda t: state_with(t, blocksize=0)),
            "quant_state can't be understood",
        ),
        (
            "nf4",
            put(".weight.quant_map", lambda t: t * float("nan")),
            "quant_map has a number that is infinite, or none",
        ),
        ("gptq, a scale a row", put(".qweight", lambda t: t[:0]), "up_proj.weight: "),
        ("awq", put(".qzeros", lambda t: t[:0]), "up_proj.weight: "),
        ("compressed-tensors", put(".weight_shape", lambda t: t.double()), "up_proj.weight: "),
        ("torchao", put("._weight_zero_point", lambda t: t[:, :1]), "_weight_zero_point has shape"),
        (
            "torchao, floats",
            put("._weight_scale", lambda t: t * float("inf")),
            "a scale is zero, infinite or not",
        ),
        (
            "nf4, scales in 8 bits",
            put(".weight.nested_quant_map", lambda t: t[:9]),
            "nested_quant_map has another length",
        ),
        (
            "nf4, scales in 8 bits",
            put(".weight.nested_absmax", lambda t: t[:0]),
            "nested_quant_map has another length",
        ),
        (
            "compressed-tensors, bytes",
            add(".weight_zero_point", torch.zeros(3, 1, dtype=torch.int8)),
            "weight_zero_point has",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, form, change, message):
    folder, _ = write(tmp_path, FORMATS[form])
    changed(folder, change)
    with pytest.raises(sgl.ModelError, match=message) as raised:
        engine(folder)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (gptq().config | {"bits": "4"}, "bits is '4', not one of 2, 3, 4, 8"),
        (gptq().config | {"bits": 5}, "bits is 5"),
        (gptq().config | {"group_size": 0}, "group_size is 0"),
        (gptq().config | {"group_size": "32"}, "group_size is '32'"),
        (
            gptq().config | {"group_size": 48},
            "groups of 48 don't divide 64 inputs; \\[16, 32, 64\\] would",
        ),
        (
            gptq().config | {"group_size": 16},
            "2 scales for a row of 64 inputs, and .* declares groups of 16",
        ),
        (
            gptq().config | {"checkpoint_format": "marlin"},
            "'gptq' \\(checkpoint_format 'marlin'\\) are not supported",
        ),
        (gptq().config | {"dynamic": {"+:.*": {"bits": 5}}}, "bits is 5, not one of 2, 3, 4, 8"),
        (
            gptq(4, 16).config | {"dynamic": {"+:.*": {"bits": 8}}},
            "2 scales for a row of 64 inputs, and .* groups of 16",
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "W4A8"}},
            },
            "'modelopt' \\(MIXED_PRECISION with W4A8\\) are not",
        ),
        (
            beside(packed(), mxfp4()).config,
            "'compressed-tensors' \\(mxfp4 and integers in one checkpoint\\) are not",
        ),
        (beside(eight(), eight_bit_floats()).config, "integers and 8-bit floats in one checkpoint"),
        (FORMATS["awq"].config, "8 words of int32 hold 64 numbers of 4 bits, not"),
        (FORMATS["awq"].config | {"version": "gemv"}, "'awq' \\(version 'gemv'\\)"),
        (packed().config, "packed by compressed-tensors, but no tensor is named ….weight_packed"),
        (packed().config | {"sparsity_config": {"format": "sparse-24"}}, "sparse: sparse-24"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit is None"),
        (
            {"quant_method": "torchao", "quant_type": "int4_weight_only"},
            "'torchao' \\(int4_weight_only\\) are not",
        ),
        ({"quant_method": "quark"}, "'quark' are not supported.* Supported are .*gptq, awq"),
        ({}, "q_proj.weight' is missing. Beside it there are .*qweight.*quantization_config"),
    ],
    ids=str,
)
def test_declarations_that_contradict_the_tensors_are_named(tmp_path, config, message):
    folder, _ = write(tmp_path, FORMATS["gptq"])
    declare(folder, config)
    with pytest.raises(sgl.ModelError, match=message):
        engine(folder)


def test_two_declarations(tmp_path):
    folder, _ = write(tmp_path, FORMATS["gptq"])
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "NVFP4"}})
    )
    with pytest.raises(
        sgl.ModelError, match=r"config.json and .*hf_quant_config.json declare two quantisations"
    ):
        engine(folder)


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("gptq", "awq"),
        ("nvfp4", "w8a8_int8"),
        ("compressed-tensors, 8 bits", "w8a8_int8"),
        (None, "gptq"),
    ],
)
def test_a_name_that_contradicts_the_folder_is_refused(tmp_path, form, name):
    folder, _ = write(tmp_path, FORMATS[form or "gptq"])
    if form is None:
        declare(folder, None)
    with pytest.raises(
        sgl.ParameterError, match=f"quantization: '{name}' contradicts .*config.json"
    ):
        engine(folder, quantization=name)


def test_experts_in_mxfp4(tmp_path):
    """As gpt-oss publishes them; transformers' own reading of the numbers is what they describe."""
    config = GptOssConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=9,
        max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=None, tie_word_embeddings=False,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    reference = randomise(GptOssForCausalLM(config))
    save(reference, tmp_path)
    generator, state = torch.Generator().manual_seed(0), {}
    for name, weight in reference.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            state[name] = weight.contiguous()
            continue
        experts, inputs, outputs = weight.shape
        shape = experts, outputs, inputs // 32, 16
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, shape[:-1], dtype=torch.uint8, generator=generator)
        weight.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(state, tmp_path / "model.safetensors")
    declare(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    assert not describe(str(tmp_path)).refused
    with engine(tmp_path, quantization="mxfp4") as running:
        assert logprobs(running) == pytest.approx(expected_of(reference), abs=1e-4)
    with engine(tmp_path, dtype="auto") as running:
        assert logprobs(running) == pytest.approx(expected_of(reference), abs=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("form", "settings"),
    [
        *(
            (
                "pack-quantized",
                {
                    "num_bits": bits,
                    "strategy": strategy,
                    "group_size": group,
                    "symmetric": symmetric,
                },
            )
            for bits in (3, 4, 8)
            for strategy, group in (("group", 32), ("channel", None))
            for symmetric in (True, False)
        ),
        *(
            (
                "pack-quantized",
                {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": symmetric},
            )
            for symmetric in (True, False)
        ),
        ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
        (
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        ),
        (
            "mxfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        ),
    ],
    ids=str,
)
def test_what_compressed_tensors_packs_it_unpacks_equally(form, settings, dtype):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    scales = {"nvfp4-pack-quantized": torch.float8_e4m3fn, "mxfp4-pack-quantized": torch.uint8}.get(
        form
    )
    args = QuantizationArgs(
        **{"type": "int", **settings, "scale_dtype": scales, "zp_dtype": scales}
    )
    activations = QuantizationArgs(num_bits=8) if form == "int-quantized" else None
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations)
    blocks = weight.view(48, -1, args.group_size or 256)
    whole = (
        {"global_scale": (448 * 6 / weight.abs().max()).float().reshape(1)}
        if "nvfp4" in form
        else {}
    )
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, **whole)
    given = {"weight": weight, "weight_scale": scale} | {
        f"weight_{name}": value for name, value in whole.items()
    }
    if not args.symmetric:
        given["weight_zero_point"] = zero
    tool = BaseCompressor.get_value_from_registry(form)
    stored = tool.compress(given, scheme)
    theirs = tool.decompress(dict(stored), scheme)["weight"]
    group = {"weights": args.model_dump(mode="json"), "targets": ["Linear"]}
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
    }
    packing = next(
        p
        for p in parse_quantization_config(config, "").packings
        if p.parts[0].lstrip(".") in stored
    )
    ours = packing.read({f".{name}": tensor.detach() for name, tensor in stored.items()}).decode(
        0, 48
    )
    if theirs.dtype == torch.float32:  # scales of 24 bits: a sum is rounded once more
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)
    else:
        assert torch.equal(ours.to(theirs.dtype), theirs)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMATS)
def test_a_description_counts_what_is_kept(tmp_path, name, monkeypatch):
    """On a CPU without bfloat16: all numbers of blocks that it multiplies, and float32 for the
    rest.
    """
    folder, _ = write(tmp_path, FORMATS[name])
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    found, plain = (
        describe(str(folder)),
        4 * sum(t.numel() for t in Qwen3ForCausalLM(TINY).parameters()),
    )
    assert found.formats[0] == FORMATS[name].names[0]
    assert found.loaded_bytes is not None
    if load_block_library() is not None:
        assert found.products == (
            "decoded while loading" if FORMATS[name].wide else "as they are stored"
        )
        assert (found.loaded_bytes == plain) == FORMATS[name].wide
        assert FORMATS[name].wide or found.loaded_bytes < 0.7 * plain


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMATS)
def test_a_description_counts_what_a_gpu_keeps(tmp_path, name, monkeypatch):
    """Layers' matrices of up to 4 bits as they are, with their scales, and 16 bits for the rest."""
    folder, _ = write(tmp_path, FORMATS[name])
    monkeypatch.setattr(
        "sglang_lite.runtime.loading.description.pick_device", lambda _: torch.device("cuda")
    )
    monkeypatch.setattr(
        "sglang_lite.runtime.loading.load_model.computes_in_eight_bits", lambda _: False
    )
    found, named = describe(str(folder)), dict(Qwen3ForCausalLM(TINY).named_parameters())
    matrices = sum(t.numel() for n, t in named.items() if t.ndim == 2 and "layers" in n)
    plain = 2 * sum(t.numel() for t in named.values())
    few = name.partition(",")[0] in KEPT_BY_A_GPU and not name.partition(",")[2].startswith(
        (" 8 bits", " bytes")
    )
    integers = name == "compressed-tensors, bytes"
    assert found.products.startswith(
        "in 4 bits" if few else "as 8-bit" if integers else "decoded while loading"
    )
    assert found.loaded_bytes is not None
    saved = (plain - found.loaded_bytes) / matrices  # bytes of each of their 2
    assert 1.3 < saved < 1.5 if few else saved == integers


KEPT_BY_A_GPU = (
    "gptq",
    "awq",
    "compressed-tensors",
    "nf4",
    "fp4",
    "nvfp4",
    "nvfp4 of Model Optimizer",
    "mxfp4",
)


@pytest.mark.parametrize("to", ROUNDINGS)
def test_a_plain_checkpoint_is_rounded_while_it_is_loaded(tmp_path, to):
    reference = randomise(Qwen3ForCausalLM(TINY))
    save(reference, tmp_path)
    plain = expected_of(reference)
    for name, weight in reference.state_dict().items():
        if weight.ndim == 2 and "layers" in name:
            weight.copy_(round_matrix(weight, to, 32).decode(0, len(weight)))
    with engine(tmp_path, quantization=to, dtype="auto") as running:
        found = logprobs(running)
    assert found == pytest.approx(expected_of(reference), abs=0.1)
    assert to == "int8" or found != pytest.approx(plain, abs=0.1)


def test_rounding_to_the_nearest_number():
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    largest = weight.view(32, 4, 64).abs().amax(-1, keepdim=True)
    for blocks, step in (
        (round_matrix(weight, "int8", 64), 1 / 127),
        (round_matrix(weight, "int4", 64), 1 / 7),
    ):
        error = (blocks.decode(0, 32) - weight).view(32, 4, 64).abs()
        assert (error <= largest * step * 0.51 + 1e-6).all()
    blocks, book = round_matrix(weight, "nf4", 64), torch.tensor(NF4)
    nearest = (weight.view(32, 4, 64, 1) / blocks.scale[..., None, None] - book).abs().argmin(-1)
    assert (blocks.q.view(32, 4, 64) == nearest).float().mean() > 0.999  # ties
    assert torch.equal(
        round_matrix(torch.zeros(4, 64), "int4", 32).decode(0, 4), torch.zeros(4, 64)
    )


def bytes_held(profiled):
    """Bytes of tensors that were made while profiling and are held, after each change."""
    events = [
        each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"
    ]
    return list(
        itertools.accumulate(
            each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())
        )
    )


@pytest.mark.parametrize("to", ROUNDINGS)
def test_rounding_takes_little_memory(to):
    """Beside its result less than another such matrix in 16 bits; a float32 copy alone would be
    two.
    """
    weight = torch.zeros(4096, 4096, dtype=torch.bfloat16)
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        blocks = round_matrix(weight, to, 128)
    held = bytes_held(profiled)
    assert held[-1] == sum(
        part.nbytes for part in (blocks.q, blocks.scale, blocks.minimum) if part is not None
    )
    assert max(held) < held[-1] + weight.nbytes


@needs_kernels
def test_packing_a_layer_takes_little_memory(monkeypatch):
    """Beside its result less than 1.1 layers in 16 bits, with the largest matrix, of which a GPU
    gets a copy first.
    """
    rounding = "sglang_lite.runtime.models.weights.rounding"
    # a small part of a matrix, as of a large model's
    monkeypatch.setattr(f"{rounding}._AT_ONCE", 1 << 15)
    monkeypatch.setattr(f"{rounding}._NARROWEST", 128)  # a GPU's groups
    shapes = [[(768, 512)], [(512, 512)], [(1792, 512), (1792, 512)], [(512, 1792)]]
    products = [[torch.randn(shape).bfloat16() for shape in each] for each in shapes]
    builder = LinearBuilder(replace(HALF, rounding="int4"), DEVICE, fused=True)
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        made = [builder.build_linear([*parts], None) for parts in products]
    assert {type(each) for each in made} == {PackedLinear}
    held = bytes_held(profiled)
    sizes = [part.nbytes for parts in products for part in parts]
    assert max(held) - held[-1] + max(sizes) < 1.1 * sum(sizes)


@needs_kernels
def test_packing_experts_takes_the_memory_of_one(monkeypatch):
    """Beside their result less than an eighth of the layer in 16 bits: one expert of 16, and its
    parts on their way to a GPU.
    """
    monkeypatch.setattr("sglang_lite.runtime.models.weights.rounding._AT_ONCE", 1 << 15)
    gate_up, down = (
        rounded_experts(16, 2 * 192, 256),
        [parts[:1] for parts in rounded_experts(16, 2 * 256, 192)],
    )
    stacker = ExpertStacker(replace(HALF, rounding="int4"), DEVICE)
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        made = stacker.build_matrices(gate_up, down, None, None)
    assert isinstance(made.gate_up, PackedWeight)
    held = bytes_held(profiled)
    numbers = sum(part.numel() for parts in (*gate_up, *down) for part in parts)
    assert max(held) - held[-1] < 2 * numbers / 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"quantization": "int4", "dtype": "float32"},
            "'int4' goes with 16 bits, not with dtype float32",
        ),
        ({"quantization": "int3"}, "quantization: 'int3' is not one of"),
    ],
)
def test_rounding_that_is_refused(tmp_path, settings, message):
    save(randomise(Qwen3ForCausalLM(TINY)), tmp_path)
    with pytest.raises(sgl.ParameterError, match=message):
        engine(tmp_path, **settings)


def test_what_is_quantised_is_not_quantised_again(tmp_path):
    folder, _ = write(tmp_path, FORMATS["gptq"])
    with pytest.raises(
        sgl.ParameterError, match=r"'int4' contradicts .*config.json, which declares gptq"
    ):
        engine(folder, quantization="int4", dtype="auto")


def test_widths_that_no_group_divides_are_not_rounded(tmp_path):
    config = Qwen3Config(**{**TINY.to_dict(), "hidden_size": 48})
    save(randomise(Qwen3ForCausalLM(config)), tmp_path)
    with pytest.raises(
        sgl.ModelError, match="a matrix with 48 inputs can't be quantised: no multiple of 32"
    ):
        engine(tmp_path, quantization="int4", dtype="auto")


def mxfp4_experts(experts, outputs, inputs):
    numbers = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    stack = Mxfp4Experts(numbers, torch.randint(118, 122, numbers.shape[:3], dtype=torch.uint8))
    return [
        [stack.matrix(expert, slice(first, None, 2)) for first in (0, 1)]
        for expert in range(experts)
    ]


def rounded_experts(experts, outputs, inputs):
    return [[torch.randn(outputs // 2, inputs) / 8 for _ in range(2)] for _ in range(experts)]


@needs_kernels
@pytest.mark.sampled(6)
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize(
    ("made", "formats"),
    [
        (mxfp4_experts, {"packed": True}),
        (rounded_experts, {"rounding": "nf4"}),
        (rounded_experts, {"rounding": "int4"}),
    ],
)
def test_a_gpu_keeps_experts_in_four_bits(made, formats, tokens, caplog):
    """And computes what it does with the decoded matrices; if it decodes them, it says so."""
    torch.manual_seed(0)
    gate_up, down = made(5, 2 * 96, 64), made(5, 64, 96)
    half = Precision(torch.float16, torch.float16, torch.float16, **formats)
    own = ExpertStacker(half, DEVICE).build_matrices(gate_up, down, None, None)
    assert isinstance(own.gate_up, PackedWeight)
    assert isinstance(own.down, PackedWeight)
    gates, downs = (
        decode_weight(each, torch.float16).view(5, -1, each.inputs)
        for each in (own.gate_up, own.down)
    )
    wide = ExpertMatrices(gates, downs)
    if "packed" in formats:
        with caplog.at_level("INFO", "sglang_lite"):
            plain = ExpertStacker(replace(half, packed=False), DEVICE).build_matrices(
                gate_up, down, None, None
            )
        assert caplog.messages == [TOLD.replace("matrices", "experts")]
        assert isinstance(plain.gate_up, torch.Tensor)
        assert isinstance(plain.down, torch.Tensor)
        assert torch.equal(gates, plain.gate_up)
        assert torch.equal(downs, plain.down)
    x = torch.randn(tokens, 64, device=DEVICE).half()
    ids, weights = (
        torch.randint(0, 5, (tokens, 2), dtype=torch.int32, device=DEVICE),
        torch.rand(tokens, 2, device=DEVICE),
    )
    found, expected = (
        apply_experts(x, ids, weights, each, "silu").double() for each in (own, wide)
    )
    assert (found - expected).norm() < 5e-3 * expected.norm()


@needs_kernels
@pytest.mark.parametrize("to", ["int4", "nf4"])
def test_a_block_of_zeros_is_rounded_as_others_are(to):
    weight = torch.randn(8, 256)
    weight[3, :128] = 0
    matrix = pack_matrix([round_matrix(weight, to, 128)], DEVICE)
    assert matrix is not None
    assert not decode_weight(matrix, torch.float16)[3, :128].any()


@needs_kernels
def test_experts_that_a_gpu_does_not_round_are_told_once(caplog):
    half = Precision(torch.float16, torch.float16, torch.float16, rounding="int4")
    stacker = ExpertStacker(half, DEVICE)
    for _ in range(2):
        made = stacker.build_matrices([[torch.ones(8, 32)]], [[torch.ones(32, 4)]], None, None)
        assert made.gate_up.dtype == torch.float16
    assert caplog.messages == ["experts stay in 16 bits: a GPU has no kernel for them in int4."]
