"""Functions on programs that SGLang's users import from its interpreter."""

from __future__ import annotations

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.function import SglFunction


def cache_program(program: SglFunction, backend: BaseBackend) -> None:
    """Tells a backend the constant text that a program starts with: `program.cache(backend)`."""
    program.cache(backend)
