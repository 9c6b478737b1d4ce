"""Shares of ranks cover everything once, and what can't be shared is refused by name."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.models.parameter_tensors import ParameterTensors
from sglang_lite.runtime.models.parameters import parameters
from sglang_lite.runtime.models.read_config import spec_from_config
from sglang_lite.runtime.models.sharding import (
    head_shares,
    rank_part_of_parameter,
    rank_spec,
    stage_layers,
    vocabulary_part,
)
from sglang_lite.runtime.models.spec import NO_ROPE, AttentionSpec
from sglang_lite.runtime.models.weights.source import WeightSource
from sglang_lite.runtime.parallel.layout import Parallel
from tests.runtime.models.test_families import FAMILIES, SHAPE

SHARED = dict(tp_size=2, dp_size=2, enable_dp_attention=True)


def ranks(tp, ep=1):
    return [Parallel(tp=tp, ep=ep, rank=rank) for rank in range(tp)]


def spec_of(name):
    model, changes = FAMILIES[name]
    config = model.config_class(**SHAPE | changes).to_dict()
    return spec_from_config(config | {"architectures": [model.__name__]}, "config")


@given(st.integers(1, 200), st.integers(1, 9))
def test_shares_are_consecutive_even_and_cover_all(count, tp):
    shares = [rank.share(count) for rank in ranks(tp)]
    assert [unit for share in shares for unit in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 60))
def test_each_expert_is_on_the_ranks_of_one_group(ep, each, more):
    count, layout = ep + more, ranks(ep * each, ep)
    own = [rank.experts(count) for rank in layout]
    assert [expert for rank in own[::each] for expert in rank] == list(range(count))
    assert all(experts == own[i - i % each] for i, experts in enumerate(own))
    assert [rank.same_experts for rank in layout] == ranks(each) * ep


@given(st.lists(st.sampled_from([0, 1]), min_size=1, max_size=30), st.data())
def test_stages_have_runs_of_layers_with_about_as_many_weights(kinds, data):
    base = spec_of("qwen3-moe")
    spec = replace(base, layers=tuple(base.layers[kind] for kind in kinds))
    pp = data.draw(st.integers(1, len(kinds)))
    runs = [stage_layers(spec, Parallel(pp=pp, rank=rank)) for rank in range(pp)]
    assert [layer for run in runs for layer in run] == list(range(len(kinds)))
    assert all(runs)
    costs = [layer.weight_elements(base.hidden_size) for layer in spec.layers]
    assert max(sum(costs[i] for i in run) for run in runs) <= sum(costs) / pp + max(costs)


@given(st.integers(1, 500), st.integers(1, 5), st.sampled_from([1, 7, 64]))
def test_parts_of_the_vocabulary_are_blocks_or_the_whole(size, tp, block):
    parts = [vocabulary_part(size, rank, block) for rank in ranks(tp)]
    if all(part == range(size) for part in parts):
        return
    assert [token for part in parts for token in part] == list(range(size))
    assert all(parts) and all(part.start % block == 0 for part in parts)  # noqa: PT018  # one statement of each part


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_each_head_is_computed_once_with_the_keys_that_it_reads(kv_heads, queries, tp):
    a = AttentionSpec(kv_heads * queries, kv_heads, 8, 8, 1.0, NO_ROPE)
    if a.heads < tp or (kv_heads < tp and tp % kv_heads):
        return  # refused
    shares = [head_shares(a, rank) for rank in ranks(tp)]
    assert [head for heads, _ in shares for head in heads] == list(range(a.heads))
    for heads, kv in shares:
        assert len(heads) % len(kv) == 0
        assert [kv[i * len(kv) // len(heads)] for i in range(len(heads))] == [
            head // queries for head in heads
        ]


@pytest.mark.parametrize(
    "name", ["phi3", "qwen2-moe", "gpt-oss", "deepseek-v2", "cohere-norms", "olmo2"]
)
@pytest.mark.parametrize("ep", [1, 2])
def test_the_parts_of_a_parameter_cover_it(name, ep):
    spec = spec_of(name)
    for parameter in parameters(spec):
        layout = ranks(2)
        if ep > 1 and parameter.expert is not None:
            layout = ranks(4, ep)
            own = parameter.expert // (spec.layers[parameter.layer].feed_forward.count // 2) * 2
            parts = [rank_part_of_parameter(parameter, spec, rank) for rank in layout]
            assert all(part.size == 0 for i, part in enumerate(parts) if i not in (own, own + 1))
            layout = layout[own : own + 2]
        parts = [rank_part_of_parameter(parameter, spec, rank) for rank in layout]
        if any(part is None for part in parts):
            assert all(
                part is None or (part.size == 0 and parameter.role.endswith("_bias"))
                for part in parts
            )
            continue
        found = [i for part in parts if part is not None for i in range(part.start, part.stop)]
        axis = 1 if parts[0] is not None and parts[0].axis == "inputs" else 0
        assert found == list(range(parameter.shape[axis])), parameter.role


@pytest.mark.parametrize("name", ["phi3", "qwen2-moe", "gpt-oss", "deepseek-v2"])
def test_replicas_that_share_feed_forwards_have_all_else_whole(name):
    spec, own = spec_of(name), Parallel(tp=2, dp=2)
    for parameter in parameters(spec):
        fed = ".mlp." in parameter.slices[0].name
        assert rank_part_of_parameter(parameter, spec, own) == (
            rank_part_of_parameter(parameter, spec, Parallel(tp=2)) if fed else None
        ) or (
            parameter.layer is None
            and rank_part_of_parameter(parameter, spec, own).size == spec.vocab_size
        ), parameter.role
    layers = zip(rank_spec(spec, own, even=True).layers, spec.layers, strict=True)
    assert all(part.attention == whole.attention for part, whole in layers)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(tp_size=0), "tp_size: 0 is not a whole number from 1 to 1024"),
        (dict(tp_size=2.0), "tp_size: 2.0 is not a whole number"),
        (dict(tp_size=None), "tp_size: None is not a whole number"),
        (dict(ep_size=2), "ep_size: 2 does not divide tp_size=1. It can be 1"),
        (dict(tp_size=6, ep_size=4), "ep_size: 4 does not divide tp_size=6. It can be 1, 2, 3, 6"),
        (dict(tp_size=2, ep_size=0), "ep_size: 0 is not a whole number"),
        (dict(enable_eplb=True), "enable_eplb: is for ep_size above 1. Add ep_size"),
        (
            dict(tp_size=2, ep_num_redundant_experts=1),
            "ep_num_redundant_experts: is for ep_size above 1",
        ),
        (dict(init_expert_location="a.json"), "init_expert_location: is for ep_size above 1"),
        (
            dict(ep_num_redundant_experts=-1),
            "ep_num_redundant_experts: -1 is not a whole number of at least 0",
        ),
        (
            dict(eplb_rebalance_num_iterations=0),
            "eplb_rebalance_num_iterations: 0 is not a whole number of at least 1",
        ),
        (
            dict(eplb_algorithm="best"),
            "eplb_algorithm: 'best' is not one of auto, deepseek, deepseek_hierarchical",
        ),
        (
            dict(tp_size=2, ep_size=2, pp_size=2, enable_eplb=True),
            "enable_eplb: is not here with pp_size=2",
        ),
        (dict(pp_size=2, enable_lora=True), "enable_lora: is not here with pp_size=2"),
        (dict(seed="a"), "seed: 'a' is not a whole number of at least 0"),
        (dict(seed=-1), "seed: -1 is not a whole number of at least 0"),
        (dict(seed=1 << 64), "seed: 18446744073709551616 is more than"),
        (dict(tp_size=True), "tp_size: True is not a whole number"),
        (
            dict(tp_size=2, deterministic=True),
            "deterministic: is not here with tp_size=2. Leave one out",
        ),
        (dict(tp_size=2, in_process=True), "in_process: is not here with tp_size=2"),
        (dict(tp_size=2, enable_lora=True), "enable_lora: is not here with tp_size=2"),
        (dict(tp_size=2, kv_dtype="fp8"), "kv_dtype: is not here with tp_size=2"),
        (
            dict(enable_dp_attention=True),
            "enable_dp_attention: is for several replicas. Add dp_size",
        ),
        (dict(tp_size=2, enable_dp_attention=True), "enable_dp_attention: is for several replicas"),
        (SHARED | dict(tp_size=1), "tp_size: 1 is not dp_size=2.* Use tp_size=2"),
        (SHARED | dict(tp_size=4), "tp_size: 4 is not dp_size=2.* Use tp_size=2"),
        (SHARED | dict(dp_size=2.0), "dp_size: 2.0 is not a whole number"),
        (SHARED | dict(ep_size=3), "ep_size: 3 does not divide tp_size=2"),
        (SHARED | dict(pp_size=2), "pp_size: is not here with enable_dp_attention"),
        (SHARED | dict(restart=True), "restart: is not here with enable_dp_attention"),
        (SHARED | dict(use_ray=True), "use_ray: is not here with enable_dp_attention"),
        (
            SHARED | dict(ep_size=2, enable_eplb=True),
            "enable_eplb: is not here with enable_dp_attention",
        ),
        (
            SHARED | dict(nnodes=2, dist_init_addr="a:1"),
            "nnodes: is not here with enable_dp_attention",
        ),
        (SHARED | dict(deterministic=True), "deterministic: is not here with tp_size=2"),
        (SHARED | dict(in_process=True), "dp_size: is for an engine in its own process"),
        (dict(enable_dp_attention="yes"), "enable_dp_attention: 'yes' is not one of True, False"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(settings, message):
    with pytest.raises(ParameterError, match=message):
        EngineConfig.make(**settings)


@pytest.mark.parametrize(
    ("tp", "even", "message"),
    [
        (3, False, "3 ranks can't share 4 heads with 2 of keys and values. It can be 1, 2, 4"),
        (8, False, "8 ranks can't share 4 heads"),
        (8, True, "8 ranks can't share 4 heads"),
    ],
)
def test_sizes_that_divide_nothing_are_refused_with_those_that_work(tp, even, message):
    with pytest.raises(ParameterError, match=f"tp_size: {message}"):
        rank_spec(spec_of("qwen2"), Parallel(tp=tp), even=even)


@pytest.mark.parametrize(
    ("name", "tp", "ep", "message"),
    [
        ("qwen2", 2, 2, "ep_size: the model has no experts. Leave it out"),
        ("mixtral", 8, 8, "ep_size: 8 is more than the model's 6 experts"),
        (
            "mixtral",
            12,
            6,
            "tp_size: 12 ranks can't share 4 heads with 2 of keys and values. It can be 1.",
        ),
        (
            "mixtral",
            16,
            2,
            "tp_size: 16 ranks can't share 4 heads with 2 of keys and values. It can be 2, 4.",
        ),
    ],
)
def test_experts_that_can_not_be_shared_out_are_refused_by_name(name, tp, ep, message):
    with pytest.raises(ParameterError, match=message):
        rank_spec(spec_of(name), Parallel(tp=tp, ep=ep), even=False)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(
        ParameterError, match=r"pp_size: 4 is more than the model's 3 layers\. Take a smaller one"
    ):
        rank_spec(spec_of("qwen2"), Parallel(pp=4), even=False)


class OnAnotherDevice(WeightSource):
    """Source of tensors that are not in the host's memory."""

    def take_tensor(self, name, shape):
        return torch.empty(shape, device="meta")

    def _read_stored(self, name, file):
        raise AssertionError("take() needs no file")


def test_a_rank_keeps_no_more_of_a_tensor_on_a_device_than_its_part():
    spec, rank = spec_of("llama-2"), Parallel(tp=2)
    tensors = ParameterTensors(
        OnAnotherDevice("none", {}), partial(rank_part_of_parameter, spec=spec, parallel=rank)
    )
    for parameter in parameters(spec):
        own = tensors.take_parameter(parameter)
        assert own.is_contiguous()
        assert own.untyped_storage().nbytes() == own.nbytes
