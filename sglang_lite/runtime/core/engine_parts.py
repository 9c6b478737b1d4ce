"""Parts of an engine that requests under way refer to instead of it: it ends when nobody else refers to it."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

from sglang_lite.runtime.core.open_requests import OpenRequests
from sglang_lite.runtime.core.request_builder import RequestBuilder
from sglang_lite.runtime.core.step_loop import StepLoop
from sglang_lite.runtime.structured_output.compiler import Compiler
from sglang_lite.runtime.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EngineParts:
    """
    Attributes:
        loop: runs requests; has the model until it ends.
        builder: makes them.
        open: counts them.
        compiler: makes grammars.
        encoder: runs what tokenises, off the loop's thread.
        tokenizer: the model's.
        step_cost: tokens more in a step that take about as long as one step more.
    """

    loop: StepLoop
    builder: RequestBuilder
    open: OpenRequests
    compiler: Compiler
    encoder: Executor
    tokenizer: Tokenizer
    step_cost: float
