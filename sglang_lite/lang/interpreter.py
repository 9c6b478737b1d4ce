"""States, their executor and `cache_program`, at SGLang's module path."""

from sglang_lite.compat.sglang.stream_executor import StreamExecutor as StreamExecutor
from sglang_lite.lang.backend.base import Backend
from sglang_lite.lang.function import SglFunction
from sglang_lite.lang.state import ProgramState as ProgramState
from sglang_lite.lang.state import ProgramStateGroup as ProgramStateGroup


def cache_program(program: SglFunction, backend: Backend) -> None:
    """Asks a backend to cache the constant text that a program starts with, like
    `program.cache(backend)`.
    """
    program.cache(backend)
