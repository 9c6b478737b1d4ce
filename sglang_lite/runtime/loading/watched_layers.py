"""Creates the object that observes a model's layers, for the tensor dumps or NVTX markers that the
config asks for.
"""

from __future__ import annotations

import torch

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.models.layer_watch import LayerWatch
from sglang_lite.runtime.models.sharding import stage_layers
from sglang_lite.runtime.models.spec import ModelSpec
from sglang_lite.runtime.parallel.layout import Parallel


def make_layer_watch(
    config: EngineConfig, spec: ModelSpec, parallel: Parallel, device: torch.device
) -> LayerWatch:
    """Returns the `LayerWatch` of a rank's layers, as configured.

    Raises:
        ParameterError: the model has no layer with a requested number.
    """
    for number in config.debug_tensor_dump_layers or ():
        if number >= len(spec.layers):
            problem = f"{number} is none of the model's layers, 0 to {len(spec.layers) - 1}."
            raise ParameterError("debug_tensor_dump_layers", problem, hint="Leave it out for all.")
    marks = device if config.enable_layerwise_nvtx_marker else None
    return LayerWatch(stage_layers(spec, parallel), marks, config.debug_tensor_dump_layers)
