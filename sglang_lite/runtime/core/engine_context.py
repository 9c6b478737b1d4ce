"""Context of running requests: what they use of an engine. Does not refer to the engine itself, which ends when its
user drops it."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

from sglang_lite.runtime.core.constant_texts import ConstantTexts
from sglang_lite.runtime.core.open_requests import OpenRequests
from sglang_lite.runtime.core.request_builder import RequestBuilder
from sglang_lite.runtime.core.step_loop import StepLoop
from sglang_lite.runtime.structured_output.compiler import Compiler
from sglang_lite.runtime.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EngineContext:
    """Context of an engine's requests and programs.

    Attributes:
        loop: step loop; keeps the model until it ends.
        builder: builder of requests.
        open_requests: counter of open requests.
        compiler: compiler of grammars.
        encoder: executor for tokenisation, off the loop's thread.
        constants: token ids of texts between generations.
        tokenizer: tokenizer of the model.
        step_cost: number of additional tokens in a step that take about as long as one more step.
    """

    loop: StepLoop
    builder: RequestBuilder
    open_requests: OpenRequests
    compiler: Compiler
    encoder: Executor
    constants: ConstantTexts
    tokenizer: Tokenizer
    step_cost: float
