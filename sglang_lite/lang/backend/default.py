"""Which backend a program runs on."""

from __future__ import annotations

import logging
import threading
from typing import Any

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.global_config import global_config
from sglang_lite.protocol import ParameterError

logger = logging.getLogger("sglang_lite")
_starting = threading.Lock()


def as_backend(value: Any) -> BaseBackend:
    """A backend for what the user gave: a backend, or an engine of this process.

    Raises:
        ParameterError: it is neither.
    """
    if isinstance(value, BaseBackend):
        return value
    if type(value).__module__.startswith("sglang_lite.runtime"):
        from sglang_lite.lang.backend.local import LocalBackend

        return LocalBackend(value)
    raise ParameterError(
        "backend", f"a {type(value).__name__} is no backend.", hint="Give an sgl.Engine or a BaseBackend."
    )


def backend_for(value: Any = None) -> BaseBackend:
    """The backend given, else the default one; where none was set, the default engine, started on first use."""
    if value is not None:
        return as_backend(value)
    if global_config.default_backend is None:
        with _starting:
            if global_config.default_backend is None:
                from sglang_lite.lang.backend.local import default_engine

                logger.warning("No backend is set: starting the default engine (sgl.set_default_backend sets one).")
                global_config.default_backend = default_engine()
    return as_backend(global_config.default_backend)
