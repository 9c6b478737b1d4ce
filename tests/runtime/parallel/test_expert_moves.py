"""Experts that have copies, and move between ranks while requests run, give the tokens of one
process.
"""

import json

import pytest

from sglang_lite.protocol import CapabilityError, ParameterError
from sglang_lite.runtime.models.layers.experts import Experts
from sglang_lite.runtime.parallel.layout import Parallel
from tests.runtime.models.test_families import engine
from tests.runtime.parallel.test_cuts import folder_of
from tests.runtime.parallel.test_random_requests import SETTINGS, tokens_of
from tests.runtime.parallel.threads import engine_of_ranks

BALANCED = dict(tp_size=2, ep_size=2, enable_eplb=True, ep_num_redundant_experts=2)


def started(folder, meeting, loading, **settings):
    layout = Parallel(tp=loading["tp_size"], ep=loading["ep_size"])
    return engine_of_ranks(folder, layout, meeting, loading, **SETTINGS | settings)


@pytest.mark.parametrize("name", ["olmoe", "deepseek-v2"])
@pytest.mark.sampled(2)
def test_requests_get_the_same_tokens_while_experts_move(name, tmp_path):
    folder = folder_of(name, tmp_path / "model")
    counted = dict(expert_distribution_recorder_mode="stat")
    with engine(folder, **SETTINGS, **counted) as whole:
        with pytest.raises(ParameterError, match="none has been started"):
            whole.dump_expert_distribution_record()
        whole.start_expert_distribution_record()
        expected = tokens_of(whole, 0)
        whole.stop_expert_distribution_record()
        record = whole.dump_expert_distribution_record()
        tokens_of(whole, 1)
        assert whole.dump_expert_distribution_record() == record
    rows = [sum(layer) for layer in record["logical_count"] if layer]
    assert len(set(rows)) == 1
    assert rows[0] % 3 == 0
    with started(folder, tmp_path / "meeting", BALANCED, eplb_rebalance_num_iterations=2) as ranks:
        found = tokens_of(ranks, 0)
        assert ranks.stats()["expert_layers_moved"] > 3
    both = [(a, b) for a, b in zip(found, expected) if a is not None and b is not None]
    assert [a for a, _ in both] == [b for _, b in both]
    # What was recorded is where a later engine begins.
    (tmp_path / "record.json").write_text(json.dumps(record))
    settings = dict(
        tp_size=2,
        ep_size=2,
        ep_num_redundant_experts=2,
        init_expert_location=str(tmp_path / "record.json"),
    )
    with started(folder, tmp_path / "again", settings) as ranks:
        found = tokens_of(ranks, 0)
    both = [(a, b) for a, b in zip(found, expected) if a is not None and b is not None]
    assert [a for a, _ in both] == [b for _, b in both]


def test_a_record_needs_experts_that_are_counted(tmp_path):
    with (
        engine(folder_of("olmoe", tmp_path / "model"), **SETTINGS) as running,
        pytest.raises(CapabilityError, match="which experts are chosen is not counted"),
    ):
        running.start_expert_distribution_record()
    dense = folder_of("qwen3", tmp_path / "dense")
    with (
        engine(dense, **SETTINGS, expert_distribution_recorder_mode="stat") as running,
        pytest.raises(CapabilityError, match="the model has no experts"),
    ):
        running.start_expert_distribution_record()


@pytest.mark.parametrize(("changes", "message"), [
    (dict(ep_num_redundant_experts=1), "ep_num_redundant_experts: 8 experts and 1 copies can't be shared out evenly to 2"),
    (dict(ep_num_redundant_experts=10), "ep_num_redundant_experts: 8 experts and 10 copies"),
    (dict(init_expert_location="nowhere.json"), "init_expert_location: nowhere.json: .*No such file"),
    (dict(init_expert_location="{"), "init_expert_location: {: Expecting property name"),
    (dict(init_expert_location='{"physical_to_logical_map": [[0]]}'), "it must have a list for each of 3 layers"),
    (dict(init_expert_location='{"logical_count": 3}'), "init_expert_location: .*not iterable"),
    (dict(init_expert_location=json.dumps({"physical_to_logical_map": [[0] * 10] * 3})), "a layer lacks an expert"),
    (dict(init_expert_location=json.dumps({"logical_count": [[-1] * 8] * 3})), "something other than non-negative integers"),
], ids=str)  # fmt: skip
def test_placements_that_do_not_fit_are_refused_by_name(changes, message, tmp_path):
    with pytest.raises(ParameterError, match=message):
        started(folder_of("olmoe", tmp_path / "model"), tmp_path / "meeting", BALANCED | changes)


def test_a_rank_has_memory_for_its_experts_alone(tmp_path):
    with started(folder_of("olmoe", tmp_path / "model"), tmp_path / "meeting", BALANCED) as ranks:
        layers = ranks.core.runner.model.layers
        assert all(isinstance(layer.feed_forward, Experts) for layer in layers)
        assert {len(layer.feed_forward.experts) for layer in layers} == {5}
