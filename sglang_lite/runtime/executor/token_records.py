"""Records the experts and hidden states of tokens next to their keys and values in the KV cache.
The records live as long as the cache pages, and serve every request that reads those tokens from
the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang_lite.protocol import ParameterError, RecordName, TokenArray
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.model import Model
from sglang_lite.runtime.models.spec import ExpertsSpec

if TYPE_CHECKING:
    from sglang_lite.runtime.config import EngineConfig


def enable_recording(model: Model, config: EngineConfig) -> None:
    """Makes a model's caches record experts or hidden states, as the config requests. Must be
    called before the caches are allocated.

    Raises:
        ParameterError: the model has no experts, or transformers' code runs it.
    """
    for name, asked in (
        ("enable_return_routed_experts", config.enable_return_routed_experts),
        ("enable_return_hidden_states", config.enable_return_hidden_states),
    ):
        if not asked:
            continue
        if not isinstance(model, Decoder):
            raise ParameterError(
                name, "transformers' code runs this model, without it.", hint="Leave it out."
            )
        spec = model.spec
        if name == "enable_return_hidden_states":
            model.recorded["hidden"] = 1, spec.hidden_size, model.precision.compute
            continue
        fed = (layer.feed_forward for layer in spec.layers)
        most = max((each.top_k for each in fed if isinstance(each, ExpertsSpec)), default=0)
        if not most:
            raise ParameterError(name, "this model has no experts.", hint="Leave it out.")
        model.recorded["experts"] = len(spec.layers), most, torch.int32


def read_records(
    cache: KVCache, token_slots: Ints, names: Iterable[RecordName]
) -> dict[str, TokenArray]:
    """Returns values that a cache has recorded for the tokens in `token_slots`, int32 [N], such as
    the experts they chose. There is one array for each of `names`.
    """
    planes = {"routed_experts": cache.experts, "hidden_states": cache.hidden}
    found: dict[str, TokenArray] = {}
    for name in names:
        plane = planes[name]
        assert plane is not None, "requests for what isn't recorded are refused"
        at = torch.from_numpy(token_slots.astype(np.int64)).to(plane.device)
        rows = plane.index_select(1, at).cpu()
        array = (
            (rows.transpose(0, 1) if name == "routed_experts" else rows[0].float())
            .contiguous()
            .numpy()
        )
        found[name] = TokenArray(
            array.shape, "int32" if name == "routed_experts" else "float32", array.tobytes()
        )
    return found
