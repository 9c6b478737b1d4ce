"""Latent attention where it differs from other attention: both ways to compute it, forks, room, and what is refused."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM

from sglang_lite.bench.limits import Rates, ideal
from sglang_lite.bench.shapes import SHAPES
from sglang_lite.bench.workloads import Workload
from sglang_lite.protocol import ModelError, ParameterError
from sglang_lite.runtime.config import EngineConfig, Sizes
from sglang_lite.runtime.executor import memory
from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan, DecodeGroup, DecodeRows, ExtendRow
from sglang_lite.runtime.kernels.kv_layout import KVLayout, Plane
from sglang_lite.runtime.load import load_model
from sglang_lite.runtime.models.layers import latent
from sglang_lite.runtime.models.read_config import spec_from_config
from tests.runtime.models.test_families import DEEPSEEK, MSCALE, SHAPE, ask, asked, differences, engine, prompts
from tests.runtime.models.tiny import randomise, save
from tests.runtime.scripted import SteppedEngine, ended

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(folder, transformers' model)"""
    changes = DEEPSEEK | dict(q_lora_rank=None, rope_parameters=MSCALE, num_hidden_layers=2)
    reference = randomise(DeepseekV2ForCausalLM(DeepseekV2ForCausalLM.config_class(**SHAPE | changes)))
    return save(reference, tmp_path_factory.mktemp("model")), reference


def load(folder):
    return load_model(EngineConfig(model=str(folder), dtype="float32", device="cpu"), folder)


def test_a_request_that_was_put_back_gets_the_same_logits(tiny):
    folder, reference = tiny
    batch = prompts(9, 12, 8, 11)
    settings = {"page_size": 4, "step_tokens": 7, "max_running": 4, "max_total_tokens": 96, "context_length": 40}
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
        monkeypatch.setattr(latent, "_expands", lambda spec, row, expands=expands: expands)
        monkeypatch.setattr(latent, "_AT_ONCE", 2000)  # a head or two
        cache, hidden = model.allocate_cache(64), torch.empty(0)
        for start, end in ((0, cached), (cached, 50)):
            if end > start:
                plan = AttentionPlan(slots[start:end], (), (ExtendRow(0, end - start, slots[:end]),))
                hidden = model.forward(ids[start:end], torch.arange(start, end), plan, cache)
        results.append(hidden)
    assert (results[0] - results[1]).abs().max() <= 1e-4


def test_deterministic_logits_do_not_depend_on_company(tiny):
    folder, _ = tiny
    batch = prompts(9, 30, 17)
    with engine(folder, deterministic=True, prefix_cache=False, step_tokens=16) as running:
        alone = [ask(running, ids).result(timeout=30) for ids in batch]
        together = [future.result(timeout=30) for future in [ask(running, ids) for ids in batch]]
    for one, other in zip(alone, together):
        assert one.output_logprobs == other.output_logprobs
        assert one.prompt_logprobs == other.prompt_logprobs


def test_layers_that_draft_are_left_out_and_others_are_not(tmp_path):
    reference = randomise(DeepseekV3ForCausalLM(DeepseekV3ForCausalLM.config_class(**SHAPE | DEEPSEEK)))
    folder = save(reference, tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "model.layers.3.eh_proj.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    load(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ModelError, match=r"no place for model\.layers\.3\.eh_proj\.weight"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported with latent attention"),
        ({"norm_topk_prob": True}, "norm_topk_prob is not supported"),
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ({"kv_lora_rank": 0}, "`kv_lora_rank`: 0 is not between"),
        ({"qk_rope_head_dim": 7}, "7 numbers of a head can't be turned in pairs"),
    ],
    ids=str,
)
def test_a_config_is_refused_by_its_field(tiny, changes, message):
    config = json.loads((tiny[0] / "config.json").read_text())
    with pytest.raises(ModelError, match=message):
        spec_from_config(config | changes, "config.json")


def test_latents_in_eight_bits_are_refused(tiny, monkeypatch):
    monkeypatch.setattr("sglang_lite.runtime.load._computes_in_eight_bits", lambda device: True)
    with pytest.raises(ParameterError, match="kv_dtype: latents are stored as the model computes"):
        load_model(EngineConfig(model=str(tiny[0]), kv_dtype="fp8", device="cpu"), tiny[0])


@pytest.fixture
def pool_tokens(monkeypatch):
    """Tokens of the pool of DeepSeek-V2-Lite's shape on a card of 80 GiB, with this layout and so many heads."""
    spec = SHAPES["deepseek-v2-lite"]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (48 << 30, 80 << 30))

    def tokens(layout=spec.kv_layout, heads=16):
        half = SimpleNamespace(itemsize=2)
        model = SimpleNamespace(
            device=None, attention=replace(spec.layers[0].attention, heads=heads), vocab_size=spec.vocab_size,
            widest=20_000, token_bytes=2 * layout.numbers, precision=SimpleNamespace(compute=half, cache=half),
        )  # fmt: skip
        return memory.pool_tokens(model, 0.9, Sizes(256, 8192, 16), 16384)

    assert spec.kv_layout.numbers == 27 * 576
    return tokens


def test_a_pool_holds_eight_times_the_tokens_of_expanded_heads(pool_tokens):
    expanded = KVLayout(((Plane(16, 192), Plane(16, 128)),) * 27)
    assert pool_tokens() >= 8 * pool_tokens(expanded) > 0


def test_a_pool_keeps_room_for_parts_of_rows_but_for_none_of_prefixes(pool_tokens):
    """Room for 112 heads more: about three parts for each of 2 x 256 rows, not 16 of a prefix beside them."""
    taken = (pool_tokens(heads=16) - pool_tokens(heads=128)) * 2 * 27 * 576
    part = 112 * 578 * 4
    assert 2 * 256 * part <= taken <= 2 * 256 * 4 * part


def test_ideal_times_know_latents():
    """The figures that the shape's goals were set against, in milliseconds."""
    rates = Rates(copy=4.26e12, matmul=7.89e14)
    spec = SHAPES["deepseek-v2-lite"]
    for rows, milliseconds in ((1, 1.15), (64, 7.3)):
        two, three = (ideal(spec, Workload(0, (1000,) * rows, (count,) * rows), rates) for count in (2, 3))
        assert (three - two) * 1e3 == pytest.approx(milliseconds, rel=0.07)
