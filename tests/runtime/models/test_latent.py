"""Latent attention where it differs from other attention: both ways to compute it, forks, room, and
what is refused.
"""

import json
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM

from sglang_lite.bench.limits import Rates, estimate_minimum_seconds
from sglang_lite.bench.shapes import SHAPES
from sglang_lite.bench.workloads import Workload
from sglang_lite.protocol import ModelError
from sglang_lite.runtime.attention import expanded
from sglang_lite.runtime.attention import latent as attention_of_latents
from sglang_lite.runtime.capacity import Sizes
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.executor import kv_pool_size, prefix_groups
from sglang_lite.runtime.kernels.attention_metadata import (
    AttentionPlan,
    DecodeGroup,
    DecodeRows,
    ExtendRow,
)
from sglang_lite.runtime.kernels.kv_layout import KVLayout, Plane
from sglang_lite.runtime.kernels.reference import prefill_attention_hopper
from sglang_lite.runtime.loading import load_model as load_module
from sglang_lite.runtime.loading.load_model import load_model
from sglang_lite.runtime.models.gpu_decoder import GpuDecoder
from sglang_lite.runtime.models.layers import latent
from sglang_lite.runtime.models.read_config import spec_from_config
from tests.runtime.kernels import needs_kernels
from tests.runtime.models.test_families import (
    DEEPSEEK,
    MSCALE,
    SHAPE,
    ask,
    asked,
    differences,
    engine,
    prompts,
)
from tests.runtime.models.tiny import randomise, save
from tests.runtime.scripted import SteppedEngine, ended

# Mean distance of log-probabilities of latents in 8 bits; in the interpreter a number that is
# rounded up may come out as half.
NEAR = 0.2 if torch.cuda.is_available() else 0.45


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(folder, transformers' model)"""
    changes = DEEPSEEK | dict(q_lora_rank=None, rope_parameters=MSCALE, num_hidden_layers=2)
    reference = randomise(
        DeepseekV2ForCausalLM(DeepseekV2ForCausalLM.config_class(**SHAPE | changes))
    )
    return save(reference, tmp_path_factory.mktemp("model")), reference


def load(folder):
    return load_model(EngineConfig(model=str(folder), dtype="float32", device="cpu"), folder)


def test_a_request_that_was_put_back_gets_the_same_logits(tiny):
    folder, reference = tiny
    batch = prompts(9, 12, 8, 11)
    settings = {
        "page_size": 4,
        "step_tokens": 7,
        "max_running": 4,
        "max_total_tokens": 96,
        "context_length": 40,
    }
    stepped = SteppedEngine(model=load(folder), retract_every=3, **settings)
    started = [stepped.start(ids, asked()) for ids in batch]
    stepped.drain()
    generations = [ended(events) for _, events in started]
    assert sum(generation.meta["num_retractions"] for generation in generations) > 0
    for generation, ids in zip(generations, batch):
        assert differences(reference, ids, generation).max() <= 1e-4


@torch.inference_mode()
def test_a_fork_that_got_a_copy_of_latents_continues_as_its_parent(tiny):
    folder, reference = tiny
    model = load(folder).model
    (ids,) = prompts(14)
    branches = torch.tensor([[*ids[:10], *ids[10:12]], [*ids[:10], *ids[12:]]])
    cache = model.allocate_cache(40)
    slots = torch.tensor([[*range(3, 13), 20, 21], [*range(25, 35), 1, 2]])
    plan = AttentionPlan(slots[0, :10], (), (ExtendRow(0, 10, slots[0, :10]),))
    model.forward(branches[0, :10], torch.arange(10), plan, cache)
    model.copy_slots(cache, slots[0, :10], slots[1, :10])
    for at in (10, 11):
        both = DecodeRows(slots[:, : at + 1], torch.tensor([at + 1, at + 1]), ragged=False)
        plan = AttentionPlan(slots[:, at], (DecodeGroup(slice(0, 2), both),), ())
        hidden = model.forward(branches[:, at], torch.tensor([at, at]), plan, cache)
        assert (model.logits(hidden) - reference(branches).logits[:, at]).abs().max() <= 1e-4


@torch.inference_mode()
@pytest.mark.parametrize("cached", [0, 30])
def test_absorbed_and_expanded_give_the_same(tiny, cached, monkeypatch):
    folder, _ = tiny
    model = load(folder).model
    ids, slots = torch.tensor(prompts(50)[0]), torch.randperm(64)[:50]
    results = []
    for expands in (True, False):
        monkeypatch.setattr(latent, "expands", lambda spec, row, expands=expands: expands)
        monkeypatch.setattr(latent, "MAX_EXPANDED", 2000)  # a head or two
        cache, hidden = model.allocate_cache(64), torch.empty(0)
        for start, end in ((0, cached), (cached, 50)):
            if end > start:
                plan = AttentionPlan(
                    slots[start:end], (), (ExtendRow(0, end - start, slots[:end]),)
                )
                hidden = model.forward(ids[start:end], torch.arange(start, end), plan, cache)
        results.append(hidden)
    assert (results[0] - results[1]).abs().max() <= 1e-4


def test_deterministic_logits_do_not_depend_on_company(tiny):
    folder, _ = tiny
    batch = prompts(9, 30, 17)
    with engine(
        folder, device="cpu", deterministic=True, prefix_cache=False, step_tokens=16
    ) as running:
        alone = [ask(running, ids).result(timeout=30) for ids in batch]
        together = [future.result(timeout=30) for future in [ask(running, ids) for ids in batch]]
    for one, other in zip(alone, together):
        assert one.output_logprobs == other.output_logprobs
        assert one.prompt_logprobs == other.prompt_logprobs


def test_layers_that_draft_are_left_out_and_others_are_not(tmp_path):
    reference = randomise(
        DeepseekV3ForCausalLM(DeepseekV3ForCausalLM.config_class(**SHAPE | DEEPSEEK))
    )
    folder = save(reference, tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {**weights, "model.layers.3.eh_proj.weight": torch.ones(2, 2)}, folder / "model.safetensors"
    )
    load(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ModelError, match=r"no place for model\.layers\.3\.eh_proj\.weight"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor is not supported with latent attention",
        ),
        ({"norm_topk_prob": True}, "norm_topk_prob is not supported"),
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ({"kv_lora_rank": 0}, "`kv_lora_rank`: 0 is not between"),
        ({"qk_rope_head_dim": 7}, "7 elements of a head can't be rotated in pairs"),
    ],
    ids=str,
)
def test_a_config_is_refused_by_its_field(tiny, changes, message):
    config = json.loads((tiny[0] / "config.json").read_text())
    with pytest.raises(ModelError, match=message):
        spec_from_config(config | changes, "config.json")


FUSED = pytest.param("triton", marks=needs_kernels), pytest.param("torch", marks=needs_kernels)


def ours(monkeypatch, attention):
    """Settings of an engine with the CPU's decoder, or the GPU's with a backend of attention."""
    if attention == "cpu":
        return {"device": "cpu"}
    if not torch.cuda.is_available():
        monkeypatch.setattr(load_module, "Decoder", GpuDecoder)
    return {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "attention_backend": attention,
    }


@pytest.fixture(scope="module")
def unlike(tmp_path_factory):
    """(folder, transformers' model), dense, whose latents are 100,000 times smaller than the keys'
    turned parts.
    """
    changes = DEEPSEEK | dict(
        q_lora_rank=None, rope_parameters=MSCALE, num_hidden_layers=2, first_k_dense_replace=2
    )
    reference = randomise(
        DeepseekV2ForCausalLM(DeepseekV2ForCausalLM.config_class(**SHAPE | changes))
    )
    with torch.no_grad():
        for layer in reference.model.layers:
            layer.self_attn.kv_a_layernorm.weight *= 1e-5
            layer.self_attn.kv_b_proj.weight *= 1e5
    return save(reference, tmp_path_factory.mktemp("unlike")), reference


@pytest.mark.sampled(3)
@pytest.mark.parametrize("attention", ["cpu", *FUSED])
def test_latents_in_eight_bits_stay_near(unlike, attention, monkeypatch):
    """Stored by one scale for both parts, latents would be nothing, and the mean distance 1.8."""
    folder, reference = unlike
    monkeypatch.setattr(load_module, "computes_in_eight_bits", lambda device: True)
    with engine(folder, kv_dtype="fp8", step_tokens=7, **ours(monkeypatch, attention)) as running:
        generations = [
            (ids, ask(running, ids, most=2).result(timeout=60)) for ids in prompts(9, 30)
        ]
    for ids, generation in generations:
        assert differences(reference, ids, generation).mean() <= NEAR


@needs_kernels
def test_rows_that_begin_in_a_step_make_keys_and_values_of_their_latents(tiny, monkeypatch):
    """Beside rows that are decoded, and before some that see what is cached. The kernel is for
    Hopper GPUs: its twin.
    """
    folder, reference = tiny
    attend = Mock(wraps=prefill_attention_hopper.uncached_attention_hopper)
    kernels = SimpleNamespace(
        supports_uncached=lambda plan, dtype, *sizes: sizes == (12, 8, 10),
        uncached_attention_hopper=attend,
    )
    monkeypatch.setattr(expanded, "hopper_kernels", lambda card, module: kernels)
    monkeypatch.setattr(expanded, "MIN_EXPANDED_TOKENS", 2)
    settings = ours(monkeypatch, "triton") | {
        "step_tokens": 20,
        "page_size": 4,
        "cuda_graphs": False,
    }
    batch = prompts(10, 12, 35, 9)
    with engine(folder, **settings) as running:
        generations = [
            future.result(timeout=60) for future in [ask(running, ids, most=3) for ids in batch]
        ]
        again = ask(running, [*batch[0], 3, 1, 4], prompt=False, most=2).result(timeout=60)
    assert again.usage.cached_tokens
    for ids, generation in [*zip(batch, generations), ([*batch[0], 3, 1, 4], again)]:
        assert differences(reference, ids, generation).max() <= 1e-4
    decoding = {call.args[4].decoding for call in attend.call_args_list}
    assert 0 in decoding
    assert max(decoding) > 0


@needs_kernels
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_rows_that_share_a_prefix_read_its_latents_together(unlike, kv_dtype, monkeypatch):
    folder, reference = unlike
    monkeypatch.setattr(prefix_groups, "MIN_SAVED_TOKENS", 1)
    monkeypatch.setattr(load_module, "computes_in_eight_bits", lambda device: True)
    read = Mock(wraps=attention_of_latents.latent_prefix)
    monkeypatch.setattr(attention_of_latents, "latent_prefix", read)
    (prefix,) = prompts(24)
    batch = [[*prefix, *ids] for ids in prompts(3, 5, 2)]
    settings = ours(monkeypatch, "triton") | {
        "kv_dtype": kv_dtype,
        "page_size": 4,
        "cuda_graphs": False,
    }
    with engine(folder, **settings) as running:
        ask(running, prefix, most=1).result(timeout=60)
        futures = [ask(running, ids, prompt=False, most=3) for ids in batch]
        generations = [future.result(timeout=60) for future in futures]
    assert read.called
    for ids, generation in zip(batch, generations):
        assert differences(reference, ids, generation).mean() <= (
            1e-4 if kv_dtype == "auto" else NEAR
        )


@pytest.fixture
def pool_tokens(monkeypatch):
    """Tokens of the pool of DeepSeek-V2-Lite's shape on a card of 80 GiB, with this layout and so
    many heads.
    """
    spec = SHAPES["deepseek-v2-lite"]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (48 << 30, 80 << 30))

    def tokens(layout=spec.kv_layout, heads=16):
        half = SimpleNamespace(itemsize=2)
        model = SimpleNamespace(
            device=None, spec=None, attentions=(replace(spec.layers[0].attention, heads=heads),), vocab_size=spec.vocab_size,
            active_parameters=2 * 10**9, activation_elements=20_000, shares_prefixes=heads < 64, token_bytes=2 * layout.numbers,
            state_bytes=0,
            precision=SimpleNamespace(compute=half, cache=half, batch_invariant=False),
        )  # fmt: skip
        sizes = Sizes(256, 8192, 16)
        room = kv_pool_size.cache_room(model, 0.9, sizes, 16384)
        return kv_pool_size.pool_tokens(model, room, sizes, 16384)

    assert spec.kv_layout.numbers == 27 * 576
    return tokens


def test_a_pool_holds_eight_times_the_tokens_of_expanded_heads(pool_tokens):
    expanded = KVLayout(((Plane(16, 192), Plane(16, 128)),) * 27)
    assert pool_tokens() >= 8 * pool_tokens(expanded) > 0


def test_a_pool_has_no_more_token_slots_than_kernels_can_number(pool_tokens):
    one_number = KVLayout(((Plane(1, 1),),))
    assert 2**31 - 64 < pool_tokens(one_number) < 2**31 - 16


@pytest.mark.parametrize(("few", "many", "parts"), [(64, 128, 3), (16, 48, 19)])
def test_a_pool_keeps_room_for_parts_of_rows_and_of_prefixes_that_are_shared(
    pool_tokens, few, many, parts
):
    """Room for so many heads more: about three parts for each of 2 x 256 rows, and 16 of a prefix
    beside them.
    """
    taken = (pool_tokens(heads=few) - pool_tokens(heads=many)) * 2 * 27 * 576
    part = 2 * 256 * (many - few) * 578 * 4
    assert (parts - 1) * part <= taken <= (parts + 1) * part


def test_ideal_times_know_latents():
    """The figures that the shape's goals were set against, in milliseconds."""
    rates = Rates(bytes_per_s=4.26e12, flops_per_s=7.89e14)
    spec = SHAPES["deepseek-v2-lite"]
    for rows, milliseconds in ((1, 1.15), (64, 7.3)):
        two, three = (
            estimate_minimum_seconds(spec, Workload(0, (1000,) * rows, (count,) * rows), rates)
            for count in (2, 3)
        )
        assert (three - two) * 1e3 == pytest.approx(milliseconds, rel=0.07)


def test_ideal_times_with_weights_in_eight_bits_count_latents_in_sixteen():
    """8,000 more tokens that a step reads take the same time, whatever the weights' format."""
    rates, spec = Rates(bytes_per_s=4.26e12, flops_per_s=7.89e14), SHAPES["deepseek-v2-lite"]

    def step(length, bits):
        two, three = (
            estimate_minimum_seconds(spec, Workload(0, (length,), (count,)), rates, bits=bits)
            for count in (2, 3)
        )
        return three - two

    assert step(9000, 8) - step(1000, 8) == pytest.approx(step(9000, 16) - step(1000, 16), rel=1e-6)
    assert step(1000, 8) < step(1000, 16)
