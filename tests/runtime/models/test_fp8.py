"""Checkpoints in 8-bit floating point, in every published form, are the model that their numbers
and scales describe.
"""

import json
import shutil
from concurrent.futures import Future

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

import sglang_lite as sgl
from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.loading import load_model as load
from sglang_lite.runtime.loading.load_model import load_model
from sglang_lite.runtime.models.gpu_decoder import GpuDecoder
from sglang_lite.runtime.models.layers import linear
from sglang_lite.runtime.models.layers.eight_bit_linear import Fp8Linear
from sglang_lite.runtime.models.layers.gpu_linear import GpuLinear
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.read_config import spec_from_config
from sglang_lite.runtime.models.weights.folder import open_weight_folder
from sglang_lite.runtime.models.weights.quantised_formats import Matrices
from tests.runtime.kernels import needs_gpu, needs_kernels
from tests.runtime.models.tiny import VOCAB, randomise, save

TINY = Qwen3Config(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
    pad_token_id=None, tie_word_embeddings=False,
)  # fmt: skip
PROMPT = [5, 17, 3, 80, 22, 9, 41, 77]
BLOCK = (32, 32)  # that fits neither 48 nor 80


def compressed(strategy="channel", **weights):
    group = {
        "weights": {"type": "float", "num_bits": 8, "strategy": strategy, **weights},
        "targets": ["Linear"],
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }


# What a config says, by what its scales belong to.
CONFIGS = {
    "tensor": [
        {"quant_method": "fp8", "activation_scheme": "static"},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        compressed("tensor"),
    ],
    "channel": [
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        compressed("channel"),
    ],
    "block": [
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(BLOCK),
        },
        compressed("block", block_structure=list(BLOCK)),
    ],
}


def scales_of(weight, kind):
    """float32, as a checkpoint stores them, and spread over the matrix."""
    rows, columns = weight.shape
    size = {"tensor": (rows, columns), "channel": (1, columns), "block": BLOCK}[kind]
    grid = -(-rows // size[0]), -(-columns // size[1])
    scales = torch.zeros(grid)
    for i in range(grid[0]):
        for j in range(grid[1]):
            part = weight[i * size[0] : (i + 1) * size[0], j * size[1] : (j + 1) * size[1]]
            scales[i, j] = part.abs().max() / 448
    spread = scales.repeat_interleave(size[0], 0).repeat_interleave(size[1], 1)[:rows, :columns]
    return (scales.reshape(()) if kind == "tensor" else scales), spread


def write(folder, config, kind, **more):
    """A checkpoint of that kind; returns it, and transformers' model of the same values."""
    reference = randomise(Qwen3ForCausalLM(TINY))
    save(reference, folder)
    state = {}
    for name, weight in reference.state_dict().items():
        if weight.ndim == 1 or "layers" not in name:
            state[name] = weight.contiguous()
            continue
        scales, spread = scales_of(weight, kind)
        state[name] = (weight / spread).to(torch.float8_e4m3fn)
        state[
            f"{name}_scale"
            + ("_inv" if kind == "block" and config["quant_method"] == "fp8" else "")
        ] = scales
        weight.copy_(state[name].float() * spread)
    save_file({**state, **more}, folder / "model.safetensors")
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"quantization_config": config}))
    return folder, reference


def logprobs(engine):
    future = Future()
    params = SamplingParams(max_tokens=0, return_logprob=True, logprob_start_len=1)
    engine.submit(PROMPT, params, sink=future.set_result)
    return [entry.logprob for entry in future.result(timeout=60).prompt_logprobs]


def expected_of(reference):
    with torch.no_grad():
        rows = reference(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return [rows[i, token].item() for i, token in enumerate(PROMPT[1:])]


def engine(folder, **settings):
    return sgl.Engine(
        **{"model": str(folder), "dtype": "float32", "device": "cpu", "max_running": 2, **settings},
        in_process=True,
    )


@pytest.mark.parametrize(
    ("kind", "config"), [(kind, config) for kind, some in CONFIGS.items() for config in some]
)
def test_it_is_the_model_that_it_describes(tmp_path, kind, config, monkeypatch):
    # rows of a piece: no block begins with each
    monkeypatch.setattr(linear, "MAX_CONVERTED", 48 * 20)
    more = {"model.layers.0.self_attn.q_proj.input_scale": torch.tensor(0.02)}
    folder, reference = write(tmp_path, config, kind, **more)
    with engine(folder) as running:
        assert logprobs(running) == pytest.approx(expected_of(reference), abs=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "config"), [(kind, some[0]) for kind, some in CONFIGS.items()])
def test_a_checkpoint_takes_the_place_of_another_in_a_running_engine(tmp_path, kind, config):
    old, _ = write(tmp_path / "old", config, kind)
    shutil.copytree(old, tmp_path / "new")
    state = load_file(old / "model.safetensors")
    changed = {name: each * 0.8 if each.itemsize > 1 else each for name, each in state.items()}
    save_file(changed, tmp_path / "new" / "model.safetensors")
    with engine(tmp_path / "new") as running:
        expected = logprobs(running)
    with engine(old) as running:
        before = logprobs(running)
        assert before != expected
        running.update_weights(str(tmp_path / "new"))
        assert logprobs(running) == expected
        running.update_weights_from_tensor(state)
        assert logprobs(running) == before


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_in_other_formats_of_a_cpu(tmp_path, dtype):
    if dtype == "int8" and not torch.cpu._is_vnni_supported():  # noqa: SLF001 # torch has no other name for it
        pytest.skip("no VNNI")
    folder, reference = write(tmp_path, CONFIGS["block"][0], "block")
    with engine(folder, dtype=dtype) as running:
        assert logprobs(running) == pytest.approx(expected_of(reference), abs=0.3)


def test_what_model_optimizer_says_in_a_file_of_its_own(tmp_path):
    folder, reference = write(tmp_path, CONFIGS["tensor"][1], "tensor")
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    theirs = folder / "hf_quant_config.json"
    theirs.write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}})
    )
    with engine(folder) as running:
        assert logprobs(running) == pytest.approx(expected_of(reference), abs=1e-5)
    for said, message in (
        ({"quant_algo": "W4A8"}, r"'modelopt' \(W4A8\)"),
        ("FP8", "can't be understood"),
    ):
        theirs.write_text(json.dumps({"quantization": said}))
        with pytest.raises(sgl.ModelError, match=rf"hf_quant_config.json: .*{message}"):
            engine(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bits": 4}, "'unknown'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"'fp8' \(e5m2\)"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, r"'modelopt' \(W4A8\)"),
        (
            compressed("block", type="int"),
            r"'compressed-tensors' \(int, 8 bits, a scale for each block\)",
        ),
        (
            compressed("group", num_bits=4),
            r"'compressed-tensors' \(float, 4 bits, a scale for each group\)",
        ),
        ({**compressed(), "transform_config": {"x": 1}}, "rotated"),
        ("fp8", "`quantization_config`: 'fp8' is no JSON object"),
        ({"quant_method": "compressed-tensors"}, "can't be understood.*config_groups"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "can't be understood"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "can't be understood"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(tmp_path, config, message):
    folder, _ = write(tmp_path, CONFIGS["tensor"][0], "tensor")
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"quantization_config": config}))
    with pytest.raises(sgl.ModelError, match=f"config.json: .*{message}"):
        engine(folder)


def test_scales_that_are_missing_or_fit_nothing(tmp_path):
    folder, _ = write(tmp_path, CONFIGS["channel"][0], "channel")
    state = {
        name: tensor
        for name, tensor in open_state(folder).items()
        if "1.mlp.up_proj.weight_scale" not in name
    }
    save_file(state, folder / "model.safetensors")
    with pytest.raises(
        sgl.ModelError, match=r"1.mlp.up_proj.weight is in 8 bits, but .*weight_scale .* is missing"
    ):
        engine(folder)
    save_file(
        state | {"model.layers.1.mlp.up_proj.weight_scale": torch.ones(3)},
        folder / "model.safetensors",
    )
    with pytest.raises(
        sgl.ModelError, match=r"up_proj.weight: scales of shape \(3,\) fit no matrix of 80 by 48"
    ):
        engine(folder)


def open_state(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def kv_scales(folder, monkeypatch, **settings):
    """[side, layer, KV head] as they are used."""
    monkeypatch.setattr(load, "computes_in_eight_bits", lambda device: True)
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", kv_dtype="fp8", **settings
    )
    scales = load_model(config, folder).model.allocate_cache(1).scales
    return torch.stack([torch.stack(side) for side in (scales.k, scales.v)])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "names",
    [("k_scale", "v_scale"), ("attn.k_scale", "attn.v_scale"), ("k_proj.k_scale", "v_proj.v_scale"),
     ("qkv_proj.k_scale", "qkv_proj.v_scale"), ("k_proj.output_scale", "v_proj.output_scale")],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 1, 1)])
def test_scales_of_keys_and_values_are_rounded_up(tmp_path, names, shape, monkeypatch):
    """Of a tensor, or of each KV head. Those that are not there are found."""
    first, second = (f"model.layers.{i}.self_attn.{name}" for i, name in enumerate(names))
    folder, reference = write(tmp_path, CONFIGS["tensor"][1], "tensor")
    expected = kv_scales(folder, monkeypatch)
    expected[0, 0], expected[1, 1] = 0.5, torch.tensor([2.0, 4.0])
    given = {first: torch.tensor(0.3), second: torch.tensor([2.0, 3.0]).view(shape)}
    save_file(open_state(folder) | given, folder / "model.safetensors")
    assert torch.equal(kv_scales(folder, monkeypatch), expected)
    with engine(folder) as running:  # where they have 32 bits, nothing is divided
        assert logprobs(running) == pytest.approx(expected_of(reference), abs=1e-5)


def test_a_scale_of_keys_and_values_together(tmp_path, monkeypatch):
    scales = {f"model.layers.{i}.self_attn.kv_scale": torch.tensor([0.7 + i]) for i in range(2)}
    folder, _ = write(tmp_path, CONFIGS["tensor"][0], "tensor", **scales)
    assert kv_scales(folder, monkeypatch).tolist() == [[[1, 1], [2, 2]]] * 2


def scales_file(tmp_path, factors, dtype="float8_e4m3fn"):
    file = tmp_path / "kv.json"
    file.write_text(
        json.dumps({"model_type": "llama", "kv_cache": {"dtype": dtype, "scaling_factor": factors}})
    )
    return str(file)


def test_scales_of_a_file_count_before_those_of_the_checkpoint(tmp_path, monkeypatch):
    own = {f"model.layers.{i}.self_attn.kv_scale": torch.tensor([8.0]) for i in range(2)}
    folder, _ = write(tmp_path, CONFIGS["tensor"][0], "tensor", **own)
    file = scales_file(tmp_path, {"0": {"0": 0.5, "1": 3}})
    assert (
        kv_scales(folder, monkeypatch, quantization_param_path=file).tolist()
        == [[[0.5, 0.5], [4, 4]]] * 2
    )
    with pytest.raises(
        sgl.ParameterError, match=r"quantization_param_path: scales are for .* 8 bits"
    ):
        EngineConfig(quantization_param_path=file)


@pytest.mark.parametrize(
    ("factors", "problem"),
    [
        ({"0": {"0": 1.0}}, "has 1 layers, and the model 0 to 1"),
        ({"0": {"0": 1.0, "1": 0}}, "scale of layer 1 is 0.0"),
        ({"0": {"0": 1.0, "1": float("nan")}}, "scale of layer 1 is nan"),
        ({"0": {"0": 1.0, "1": 1.0}, "1": {"0": 1.0, "1": 1.0}}, "of 2 devices"),
        ({"1": {"0": 1.0}}, "no scales .* can be read: KeyError"),
        ({"0": {"first": 1.0}}, "no scales .* can be read: ValueError"),
        ([1.0, 1.0], "no scales .* can be read: TypeError"),
        (None, "no scales .* can be read: TypeError"),
    ],
)
def test_a_file_of_scales_that_are_none(tmp_path, factors, problem, monkeypatch):
    folder, _ = write(tmp_path, CONFIGS["tensor"][0], "tensor")
    with pytest.raises(sgl.ModelError, match=rf"kv\.json: .*{problem}"):
        kv_scales(folder, monkeypatch, quantization_param_path=scales_file(tmp_path, factors))


def test_a_file_of_scales_that_can_not_be_read(tmp_path, monkeypatch):
    folder, _ = write(tmp_path, CONFIGS["tensor"][0], "tensor")
    with pytest.raises(sgl.ModelError, match=r"missing\.json: .*FileNotFoundError"):
        kv_scales(folder, monkeypatch, quantization_param_path=str(tmp_path / "missing.json"))
    (tmp_path / "kv.json").write_text("{")
    with pytest.raises(sgl.ModelError, match=r"kv\.json: .*JSONDecodeError"):
        kv_scales(folder, monkeypatch, quantization_param_path=str(tmp_path / "kv.json"))
    with pytest.raises(sgl.ModelError, match=r"kv_cache\.dtype is 'int8'"):
        kv_scales(
            folder,
            monkeypatch,
            quantization_param_path=scales_file(tmp_path, {"0": {"0": 1, "1": 1}}, "int8"),
        )


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), [1.0, 1.0, 1.0]])
def test_scales_of_keys_and_values_that_are_none(tmp_path, scale, monkeypatch):
    name = "model.layers.1.self_attn.k_scale"
    folder, _ = write(tmp_path, CONFIGS["tensor"][1], "tensor", **{name: torch.tensor(scale)})
    with pytest.raises(
        sgl.ModelError, match=r"1.self_attn.k_scale is not one number above 0, nor .* 2 KV heads"
    ):
        kv_scales(folder, monkeypatch)


@needs_kernels
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_product_in_eight_bits_takes_the_numbers_as_they_are(tmp_path, kind):
    """Exactly, where each output has one scale; nearly, where it has several."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder, reference = write(tmp_path, CONFIGS[kind][0], kind)
    stored, source = open_state(folder), open_weight_folder(folder, Matrices(block=BLOCK))
    names = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")]
    product = Fp8Linear([source.take_tensor(name, (80, 48)) for name in names], None, device)
    ours = product.weight.float() * product.scales.unsqueeze(1)
    theirs = torch.cat([reference.state_dict()[name] for name in names]).to(device)
    if kind == "block":
        largest = theirs.abs().amax(1, keepdim=True)
        limit = theirs.abs() / 16 + largest / 448 * 2**-9
        if device.type == "cpu":  # Triton's interpreter loses what is carried into an odd exponent
            limit = largest / 7
        assert ((ours - theirs).abs() <= limit).all()
    else:
        numbers = torch.cat([stored[name].view(torch.uint8) for name in names])
        assert torch.equal(product.weight.view(torch.uint8).cpu(), numbers)
        assert torch.equal(ours, theirs)


@needs_kernels
def test_a_device_keeps_eight_bits_of_what_has_them(tmp_path):
    """A layer that a checkpoint leaves in 16 bits was left so for a reason."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder, reference = write(tmp_path, CONFIGS["channel"][0], "channel")
    name = "model.layers.1.mlp.down_proj.weight"
    state = open_state(folder) | {name: reference.state_dict()[name].clone()}
    state.pop(f"{name}_scale")
    save_file(state, folder / "model.safetensors")
    spec = spec_from_config(json.loads((folder / "config.json").read_text()), "config.json")
    precision = Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16, keep_fp8=True)
    with torch.inference_mode():
        model = GpuDecoder(spec, open_weight_folder(folder), precision, device, 64)
    kinds = [
        [
            type(x)
            for x in (layer.qkv, layer.output, layer.feed_forward.gate_up, layer.feed_forward.down)
        ]
        for layer in model.layers
    ]
    assert kinds == [[Fp8Linear] * 4, [Fp8Linear] * 3 + [GpuLinear]]
    assert type(model.head) is GpuLinear


@needs_gpu
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_device_computes_in_them(tmp_path, kind):
    folder, reference = write(tmp_path, CONFIGS[kind][0], kind)
    expected = expected_of(reference)
    with engine(folder, device="cuda", max_total_tokens=500) as running:
        # dequantised, as the CPU does
        assert logprobs(running) == pytest.approx(expected, abs=1e-3)
    loaded = load_model(EngineConfig(model=str(folder), device="cuda", compile_processes=0), folder)
    assert all(isinstance(layer.qkv, Fp8Linear) for layer in loaded.model.layers)
    with engine(folder, device="cuda", dtype="auto", max_total_tokens=500) as running:
        gaps = [abs(a - b) for a, b in zip(logprobs(running), expected)]
        assert sum(gaps) / len(gaps) < 0.3
