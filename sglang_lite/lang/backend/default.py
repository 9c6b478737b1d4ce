"""Chooses the backend that a program runs on."""

from __future__ import annotations

import logging
import os
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from sglang_lite.lang.backend.base import EVENTS, Backend
from sglang_lite.lang.global_config import global_config
from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.anything import Json

if TYPE_CHECKING:
    from sglang_lite.compat.sglang.runtime import Runtime
    from sglang_lite.engine.engine import Engine

logger = logging.getLogger("sglang_lite")
_starting = threading.Lock()
if TYPE_CHECKING:
    BackendLike: TypeAlias = Backend | Engine | Runtime
else:
    BackendLike = Backend  # for `typing.get_type_hints`: the language imports no engine


def _replace_lock_after_fork() -> None:
    global _starting
    _starting = threading.Lock()


os.register_at_fork(
    after_in_child=_replace_lock_after_fork
)  # a thread that the fork did not copy may hold the lock


# Names of SGLang's hooks, which only user-defined backends have.
_HOOKS = ("generate", "generate_stream", "select", *EVENTS)


def as_backend(value: object) -> Backend:
    """Converts a user's value to a backend that can run programs. Works like `coerce_backend`, but
    also wraps backends that have SGLang's hooks.
    """
    backend = value if isinstance(value, Backend) else coerce_backend(value)
    kind: Any = type(backend)  # mypy takes no type for hashable
    if not _has_sglang_hooks(kind):
        return backend
    from sglang_lite.compat.sglang.hooks import adapt_hooks

    return adapt_hooks(backend)


@lru_cache(maxsize=1024)
def _has_sglang_hooks(kind: type) -> bool:
    return any(hasattr(kind, hook) for hook in _HOOKS)


def coerce_backend(value: object) -> Backend:
    """Converts a user's value to a backend. Accepts a backend, an engine, or a started server
    (Runtime).

    Raises:
        ParameterError: the value is none of these.
    """
    if isinstance(value, Backend):
        return value
    if is_engine(value):
        from sglang_lite.lang.backend.local import LocalBackend

        return LocalBackend(value)
    endpoint = getattr(value, "endpoint", None)  # attribute of a Runtime
    if isinstance(endpoint, Backend):
        return endpoint
    hint = "Give an sgl.Engine or a BaseBackend."
    if isinstance(value, str):
        name = value[:60]
        hint = (
            f"For a local model, use sgl.Engine({name!r}). For an API, sgl.OpenAI({name!r}) or "
            f"sgl.Anthropic({name!r})."
        )
    elif isinstance(value, type):
        hint = f"Make an instance: {value.__name__}(…)."
    raise ParameterError("backend", f"a {type(value).__name__} is not a backend.", hint=hint)


def is_engine(value: object) -> TypeGuard[Engine]:
    """Returns True if a value is an engine. Compares the names of modules, because the language
    must not import the runtime.
    """
    kind: Any = type(value)  # as above
    return _is_engine_class(kind)


@lru_cache(maxsize=1024)
def _is_engine_class(kind: type) -> bool:
    return any(each.__module__ == "sglang_lite.engine.engine" for each in kind.__mro__)


def backend_for(value: object = None) -> Backend:
    """Returns the backend for a user's value. Without a value, returns the default backend. If no
    default backend is set, starts the default engine on first use.
    """
    if value is not None:
        return as_backend(value)
    if global_config.default_backend is None:
        with _starting:
            if global_config.default_backend is None:
                from sglang_lite.lang.backend.local import default_engine

                logger.warning(
                    "No backend is set, so the default engine is started (sgl.set_default_backend sets one)."
                )
                global_config.default_backend = default_engine()
    return as_backend(global_config.default_backend)


def identity_for(value: object = None) -> tuple[Json, ...]:
    """Returns the identity of the backend that `backend_for` would return, without starting the
    default engine.
    """
    if value is None and global_config.default_backend is None:
        from sglang_lite.lang.backend.local import default_identity

        return default_identity()
    return backend_for(value).identity()


def set_default_backend(backend: BackendLike | None) -> None:
    """Sets the backend of programs that are run without one: an Engine or a BaseBackend, or None
    for the default engine.
    """
    global_config.default_backend = None if backend is None else coerce_backend(backend)


def flush_cache(backend: BackendLike | None = None) -> bool:
    """Drops the cached prefixes of a backend, by default the default backend. Returns False if no
    backend is set or if it reports that it flushed nothing.
    """
    chosen = backend if backend is not None else global_config.default_backend
    return bool(as_backend(chosen).flush_cache()) if chosen is not None else False


def get_server_info(backend: BackendLike | None = None) -> dict[str, Json] | None:
    """Returns information about the server or engine behind a backend, by default the default
    backend. Returns None if no backend is set or if it has no information.
    """
    chosen = backend if backend is not None else global_config.default_backend
    return as_backend(chosen).get_server_info() if chosen is not None else None
