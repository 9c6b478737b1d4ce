"""Ranks as actors on a Ray cluster: what they answer, what they give back, and a cluster that has
no room.
"""

import sys
from unittest.mock import MagicMock

import pytest

import sglang_lite as sgl
from sglang_lite.protocol import BackendError, CapabilityError, ParameterError, SamplingParams
from sglang_lite.runtime.config import EngineConfig
from tests.waiting import until

SETTINGS = dict(device="cpu", dtype="float32", max_total_tokens=4096, use_ray=True)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize(("settings", "message"), [
    (dict(use_ray=True), "use_ray: is for several ranks. Add tp_size"),
    (dict(use_ray=True, tp_size=2, nnodes=2, dist_init_addr="a:5000"), "nnodes: is not here with use_ray=True"),
    (dict(use_ray=True, tp_size=2, dp_size=2), "dp_size: is not here with use_ray=True"),
    (dict(use_ray=True, tp_size=2, restart=True), "restart: is not here with use_ray=True"),
])  # fmt: skip
def test_settings_that_do_not_go_with_ray_are_refused_by_name(settings, message):
    with pytest.raises(ParameterError, match=message):
        EngineConfig.make(**settings)


def test_ray_that_is_not_installed_is_named(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(CapabilityError, match=r"sglang-lite\[ray\]"):
        sgl.Engine(folders[0], **SETTINGS, tp_size=2)


@pytest.mark.parametrize("failure", [RuntimeError("the cluster has gone"), KeyboardInterrupt()])
def test_room_is_given_back_whatever_ends_the_wait_for_it(folders, monkeypatch, failure):
    ray = MagicMock()
    ray.exceptions.GetTimeoutError = TimeoutError
    ray.cluster_resources.return_value = {}
    ray.util.get_node_ip_address.return_value = "127.0.0.1"
    ray.get.side_effect = failure
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(type(failure)):
        sgl.Engine(folders[0], **SETTINGS, tp_size=2)
    ray.util.remove_placement_group.assert_called_once_with(ray.util.placement_group.return_value)


@pytest.fixture(scope="module")
def ray():
    """Ray, connected to a cluster of two nodes on this machine with a CPU each."""
    found = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("RAY_worker_niceness", "0")  # or other tests come first
    memory = {"object_store_memory": 80 * 2**20}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **memory}
    )
    cluster.add_node(num_cpus=1, **memory)
    found.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield found
    found.shutdown()
    cluster.shutdown()
    monkeypatch.undo()


def reserved(ray):
    return [
        each for each in ray.util.placement_group_table().values() if each["state"] != "REMOVED"
    ]


@pytest.mark.slow
def test_actors_answer_like_one_process_and_give_all_back(ray, folders, own):
    prompts = ["ab", "abc" * 20, "b"]
    with sgl.Engine(folders[0], **SETTINGS, tp_size=2) as engine:
        assert [engine.complete(p, GREEDY).text for p in prompts] == [
            own.complete(p, GREEDY).text for p in prompts
        ]
        assert [each["node"] for each in engine.stats()["ranks"]] == [0, 1]
        assert len(reserved(ray)) == 1
    until(lambda: not reserved(ray))
    with pytest.raises(
        BackendError, match=r"the cluster has had no room for 4 ranks within 1 s.*Each needs a CPU"
    ):
        sgl.Engine(folders[0], **SETTINGS, tp_size=4, dist_timeout=1)
    until(lambda: not reserved(ray))
    with pytest.raises(ParameterError, match="context_length: 9999999 is more than the model's"):
        sgl.Engine(folders[0], **SETTINGS, tp_size=2, context_length=9_999_999)
    until(lambda: not reserved(ray))
