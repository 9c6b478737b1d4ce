"""GPUs of ranks, on machines that have too few or unlike ones."""

import pytest
import torch

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.loading import rank_device


@pytest.fixture
def on_gpus(monkeypatch):
    """Makes a machine have GPUs of these names."""

    def having(*names):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
        monkeypatch.setattr(rank_device, "bus_address", lambda index: f"bus {index}")
        monkeypatch.setattr(rank_device, "bind_to_cores_near", bound.append)
        return bound

    bound: list[str] = []
    return having


def devices(**settings):
    config = EngineConfig.make(model="m", device="cuda", **settings)
    for rank in range(config.parallel.ranks):
        try:
            yield str(rank_device.rank_device(config, config.parallel.as_seen_by(rank)))
        except ParameterError as error:
            yield str(error)


def test_each_rank_has_a_gpu_of_its_own_and_runs_near_it(on_gpus):
    bound = on_gpus("H100", "H100", "A10", "H100")
    assert list(devices(tp_size=2)) == ["cuda:0", "cuda:1"]
    assert list(devices(pp_size=2, base_gpu_id=1, gpu_id_step=2)) == ["cuda:1", "cuda:3"]
    assert list(devices(tp_size=2, gpu_id_step=0)) == ["cuda:0", "cuda:0"]
    assert bound == ["bus 0", "bus 1", "bus 1", "bus 3", "bus 0", "bus 0"]


@pytest.mark.parametrize(("settings", "problem"), [
    (dict(tp_size=4), "tp_size: 4 ranks need GPUs 0, 1, 2, 3; there are 3."),
    (dict(pp_size=2, base_gpu_id=2), "pp_size: 2 ranks need GPUs 2, 3; there are 3."),
    (dict(tp_size=3), "tp_size: the ranks' GPUs differ: A10 and H100."),
], ids=str)  # fmt: skip
def test_all_ranks_refuse_too_few_gpus_and_unlike_ones_alike(settings, problem, on_gpus):
    bound = on_gpus("H100", "H100", "A10")
    told = list(devices(**settings))
    assert len(set(told)) == 1
    assert told[0].startswith(problem)
    assert not bound
