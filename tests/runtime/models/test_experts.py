"""Mixture of experts: as checkpoints have them, at any router, and what is refused."""

import json
import re
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

import sglang_lite as sgl
from sglang_lite.protocol import ModelError, SamplingParams
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan, ExtendRow
from sglang_lite.runtime.loading.load_model import load_model
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.gpu_decoder import GpuDecoder
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.read_config import spec_from_config
from sglang_lite.runtime.models.read_gguf import spec_from_gguf
from sglang_lite.runtime.models.spec import ExpertsSpec, LayerSpec
from sglang_lite.runtime.models.weights.folder import open_weight_folder
from sglang_lite.runtime.models.weights.gguf import GgufSource
from sglang_lite.runtime.models.weights.gguf_file import GgufFile
from sglang_lite.runtime.models.weights.quantised_formats import Matrices
from sglang_lite.runtime.models.weights.source import EncodedMatrix, WeightSource
from tests.runtime.kernels import needs_kernels
from tests.runtime.kernels.test_kernels import DEVICE
from tests.runtime.models.tiny import VOCAB, randomise, save

EXPERTS, SIZE, HIDDEN = 4, 24, 32
CONFIG = Qwen3MoeConfig(
    vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, num_experts=EXPERTS, num_experts_per_tok=2,
    moe_intermediate_size=SIZE, eos_token_id=1, bos_token_id=0,
)  # fmt: skip
FLOAT32 = Precision(torch.float32, torch.float32, torch.float32)
BFLOAT16 = Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    return save(randomise(Qwen3MoeForCausalLM(CONFIG)), tmp_path / "model")


def load(folder):
    return load_model(EngineConfig(model=str(folder), device="cpu", dtype="float32"), folder).model


def logits(model, ids):
    """Logits of a prompt."""
    count, cache = len(ids), model.allocate_cache(len(ids))
    at = torch.arange(count)
    with torch.inference_mode():
        plan = AttentionPlan(at, (), (ExtendRow(0, count, slice(0, count)),))
        return model.logits(model.forward(torch.tensor(ids), at, plan, cache))


IDS = [5, 17, 3, 80, 22, 9, 41]


def stacked(state):
    """The checkpoint with each layer's experts in two tensors."""
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([state.pop(f"{experts}.{e}.{part}_proj.weight") for e in range(EXPERTS)])
            for part in ("gate", "up", "down")
        )
        state |= {f"{experts}.gate_up_proj": torch.cat((gate, up), 1), f"{experts}.down_proj": down}
    return state


def test_stacked_experts_are_those_of_a_split_checkpoint(folder):
    split = logits(load(folder), IDS)
    save_file(stacked(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    assert torch.equal(logits(load(folder), IDS), split)


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
ROUTER = "model.layers.0.mlp.gate.weight"
STACK = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop(EXPERT), f"the tensor '{EXPERT}' is missing"),
        (lambda state: state.update({EXPERT: torch.ones(SIZE - 1, HIDDEN)}), f"{EXPERT} has shape \\(23, 32\\), the config says"),
        (lambda state: state.update({EXPERT.replace("3", "4"): torch.ones(SIZE, HIDDEN)}), r"no place for .*experts\.4\.up_proj"),
        (lambda state: state.update({STACK: torch.ones(EXPERTS, 2 * SIZE, HIDDEN)}), f"both .* and {STACK} are there"),
        (lambda state: state[ROUTER].__setitem__((1, 5), float("nan")), f"{ROUTER} has NaN"),
        (lambda state: stacked(state).update({STACK: torch.ones(EXPERTS - 1, 2 * SIZE, HIDDEN)}), f"{STACK} has shape \\(3, 48, 32\\)"),
        (lambda state: stacked(state).pop(STACK), r"experts\.0\.gate_proj\.weight' is missing"),
    ],
)  # fmt: skip
def test_a_checkpoint_whose_experts_are_wrong_is_refused_by_its_tensor(folder, change, message):
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ModelError, match=message) as caught:
        load(folder)
    assert "\n" not in caught.value.args[0]


def test_an_expert_in_two_files_is_refused(folder):
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    save_file({EXPERT: state[EXPERT]}, folder / "two.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(
            {"weight_map": dict.fromkeys(state, "one.safetensors") | {EXPERT: "two.safetensors"}}
        )
    )
    with pytest.raises(ModelError, match=f"{EXPERT} is in one.safetensors, too"):
        load(folder)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (CONFIG, dict(num_experts_per_tok=5), "num_experts_per_tok is 5, and there are 4 experts"),
        (CONFIG, dict(num_experts="4"), "`num_experts`: '4' is no whole number"),
        (CONFIG, dict(moe_intermediate_size=0), "`moe_intermediate_size`: 0 is not between"),
        (
            Glm4MoeConfig(head_dim=64, n_routed_experts=8, n_group=3),
            {},
            "n_group 3 and topk_group 1 don't fit 8 experts",
        ),
        (
            Glm4MoeConfig(head_dim=64, n_routed_experts=8, n_group=4),
            dict(num_experts_per_tok=3),
            "topk_group leaves 2 experts",
        ),
    ],
)
def test_a_config_whose_experts_are_wrong_is_refused_by_its_field(config, change, message):
    name = type(config).__name__.replace("Config", "ForCausalLM")
    content = (
        json.loads(json.dumps(config.to_dict(), default=str)) | {"architectures": [name]} | change
    )
    with pytest.raises(ModelError, match=message):
        spec_from_config(content, "config.json")


def test_rows_do_not_change_each_other_where_there_is_one_path(folder):
    """An expert's product has as many rows as have chosen it."""
    with sgl.Engine(
        model=str(folder), dtype="bfloat16", deterministic=True, max_running=8, in_process=True
    ) as engine:
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, return_logprob=True)
        prompts = [[*IDS, i] for i in range(8)]
        alone = [engine.complete(ids, params) for ids in prompts]
        engine.flush_cache()
        together = [
            future.result(30) for future in [submitted(engine, ids, params) for ids in prompts]
        ]
    for one, other in zip(alone, together):
        assert one.token_ids == other.token_ids
        assert [e.logprob for e in one.output_logprobs] == [
            e.logprob for e in other.output_logprobs
        ]


def submitted(engine, ids, params):
    future = Future()
    engine.submit(ids, params, sink=future.set_result)
    return future


@needs_kernels
@pytest.mark.parametrize("stored", ["16 bits", "blocks"])
def test_experts_in_eight_bits_are_as_stored_or_near(tmp_path, stored):
    """As the kernels of a GPU take them: numbers, and a scale for each block of 128 by 128."""
    config = Qwen3MoeConfig(**CONFIG.to_dict() | dict(hidden_size=128, moe_intermediate_size=128))
    reference = randomise(Qwen3MoeForCausalLM(config))
    folder = save(reference, tmp_path / "model")
    expected = reference.state_dict()["model.layers.0.mlp.experts.gate_up_proj"]
    if stored == "blocks":
        state, scale = load_file(folder / "model.safetensors"), torch.rand(1, 1) + 0.5
        for name in [name for name in state if ".experts." in name]:
            state[name] = (state[name] * 50).to(torch.float8_e4m3fn)
            state[f"{name}_scale_inv"] = scale.clone()
        save_file(state, folder / "model.safetensors")
        expected = (expected * 50).to(torch.float8_e4m3fn).float() * scale
    eight = replace(BFLOAT16, fp8=stored == "16 bits", keep_fp8=True)
    spec = spec_from_config(json.loads((folder / "config.json").read_text()), "config.json")
    with torch.inference_mode():
        model = GpuDecoder(
            spec, open_weight_folder(folder, Matrices(block=(128, 128))), eight, DEVICE, 64
        )
    matrices = model.layers[0].feed_forward.matrices
    assert matrices.gate_up.dtype == matrices.down.dtype == torch.float8_e4m3fn
    scales = matrices.gate_up_scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    near = 0 if stored == "blocks" else 1 / 16
    torch.testing.assert_close(
        (matrices.gate_up.float() * scales).cpu(), expected, rtol=near, atol=near / 16
    )


class Upcycled(WeightSource):
    """A dense checkpoint whose feed-forwards are each of the experts of a Mixtral, with routers at
    random.
    """

    def __init__(self, source):
        super().__init__("upcycled", {})
        self._source, self._taken = source, {}

    def take_tensor(self, name, shape):
        if name.endswith("block_sparse_moe.gate.weight"):
            return torch.randn(shape, generator=torch.Generator().manual_seed(len(self._taken)))
        parts = {"w1": "gate", "w2": "down", "w3": "up"}
        name = re.sub(
            r"block_sparse_moe\.experts\.\d\.(w\d)",
            lambda match: f"mlp.{parts[match[1]]}_proj",
            name,
        )
        if name not in self._taken:
            weight = self._source.take_tensor(name, shape)
            self._taken[name] = (
                weight.decode(0, shape[0]) if isinstance(weight, EncodedMatrix) else weight
            )
        return self._taken[name]

    def check_all_used(self, may_ignore=()):
        pass

    def _read_stored(self, name, file):
        raise AssertionError("take() reads no file")


def test_a_dense_model_copied_into_experts_is_the_dense_model(model_file):
    """The first layers of SmolLM2, so that eight copies of each are small."""
    file = GgufFile(model_file)
    whole = spec_from_gguf(file.metadata, frozenset(file.tensors), "gguf")
    layers = whole.layers[:4]
    experts = ExpertsSpec(8, 2, layers[0].feed_forward.size, normalise=True)
    dense = replace(whole, layers=layers)
    sparse = replace(
        whole,
        architecture="mixtral",
        layers=tuple(LayerSpec(each.attention, experts) for each in layers),
    )
    ids = [i * 997 % whole.vocab_size for i in range(40)]
    with torch.inference_mode():
        expected, got = (
            logits(Decoder(spec, Upcycled(GgufSource(file, whole)), FLOAT32, CPU, 64), ids)
            for spec in (dense, sparse)
        )
    assert expected.abs().max() > 1
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)
