"""States, their executor and what is done with programs, for SGLang's users to import."""

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.execution.stream_executor import StreamExecutor as StreamExecutor
from sglang_lite.lang.function import SglFunction
from sglang_lite.lang.state import ProgramState as ProgramState
from sglang_lite.lang.state import ProgramStateGroup as ProgramStateGroup


def cache_program(program: SglFunction, backend: BaseBackend) -> None:
    """Tells a backend the constant text that a program starts with: `program.cache(backend)`."""
    program.cache(backend)
