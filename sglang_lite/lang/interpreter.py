"""States and their executor, for SGLang's users to import."""

from sglang_lite.lang.execution.stream_executor import StreamExecutor
from sglang_lite.lang.state import ProgramState, ProgramStateGroup

__all__ = ["ProgramState", "ProgramStateGroup", "StreamExecutor"]
