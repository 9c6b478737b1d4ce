"""States, their executor and what is done with programs, for SGLang's users to import."""

from sglang_lite.compat.sglang.programs import cache_program
from sglang_lite.lang.execution.stream_executor import StreamExecutor
from sglang_lite.lang.state import ProgramState, ProgramStateGroup

__all__ = ["ProgramState", "ProgramStateGroup", "StreamExecutor", "cache_program"]
