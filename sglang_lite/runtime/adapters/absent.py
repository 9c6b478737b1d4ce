"""Stand-ins for methods of `EngineAdapters` in an engine without adapters. They reject requests
that name one. Imports nothing heavy.
"""

from __future__ import annotations

from typing import NoReturn

from sglang_lite.protocol import ParameterError


def reject_adapter_name(name: str | None) -> None:
    """Stands in for `EngineAdapters.adapter_for` in an engine without adapters.

    Raises:
        ParameterError: the request names an adapter.
    """
    if name is not None:
        raise_no_adapters()


def raise_no_adapters(*_: object, **__: object) -> NoReturn:
    """Stands in for methods of `EngineAdapters` in an engine without adapters.

    Raises:
        ParameterError: always.
    """
    raise ParameterError(
        "lora_path", "the engine was made without adapters.", hint="Make it with enable_lora=True."
    )
