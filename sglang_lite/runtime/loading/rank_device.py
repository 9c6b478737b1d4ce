"""Chooses the GPU of each of an engine's ranks."""

from __future__ import annotations

import torch

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.host.numa import bind_to_cores_near
from sglang_lite.runtime.kernels.driver import bus_address
from sglang_lite.runtime.parallel.layout import Parallel


def rank_device(config: EngineConfig, parallel: Parallel) -> torch.device:
    """Returns the GPU of a rank, and binds the calling thread to the cores near it. If any rank has
    no GPU or the GPUs differ, all ranks raise the same error.

    Raises:
        ParameterError: a rank has no GPU, or the GPUs differ.
    """
    indices = [
        config.base_gpu_id + config.gpu_id_step * place for place in range(parallel.ranks_per_node)
    ]
    count = torch.cuda.device_count()
    if max(indices) >= count:
        named = ", ".join(map(str, dict.fromkeys(indices)))
        raise ParameterError(
            parallel.setting,
            f"{parallel.ranks_per_node} ranks need GPUs {named}; there are {count}.",
            hint='Use fewer ranks, or device="cpu".',
        )
    kinds = sorted({torch.cuda.get_device_name(index) for index in indices})
    if len(kinds) > 1:
        problem = f"the ranks' GPUs differ: {' and '.join(kinds)}."
        raise ParameterError(parallel.setting, problem, hint="Use GPUs of one kind.")
    own = indices[parallel.rank % parallel.ranks_per_node]
    bind_to_cores_near(bus_address(own))
    return torch.device("cuda", own)
