"""Creates the parts of an engine, such as adapters and images."""

from __future__ import annotations

from sglang_lite.runtime.adapters.engine_adapters import make_adapters
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.core.adapters_part import AdaptersPart, NoAdapters
from sglang_lite.runtime.core.engine_part import EnginePart
from sglang_lite.runtime.core.media_part import MediaPart
from sglang_lite.runtime.loading.load_model import LoadedModel


def make_parts(config: EngineConfig, loaded: LoadedModel) -> list[EnginePart]:
    """Creates the parts that an engine's model and configuration need. Allocates the memory of
    these parts, before the KV cache takes the rest.

    Raises:
        ParameterError: a setting does not fit the model.
        ModelError: an adapter can't be used.
    """
    adapters = make_adapters(config, loaded)
    parts: list[EnginePart] = [NoAdapters() if adapters is None else AdaptersPart(adapters)]
    if loaded.media is not None:
        parts.append(MediaPart(config, loaded, loaded.media))
    return parts
