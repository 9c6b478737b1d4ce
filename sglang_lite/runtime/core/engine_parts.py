"""What requests under way refer to instead of their engine, so that an engine ends when nobody else refers to it."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

from sglang_lite.runtime.core.request_builder import Intake
from sglang_lite.runtime.core.step_loop import StepLoop
from sglang_lite.runtime.structured_output.compiler import Compiler
from sglang_lite.runtime.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Core:
    """
    Attributes:
        loop: runs requests; has the model until it ends.
        intake: makes requests.
        compiler: makes grammars.
        encoder: runs what tokenises, off the loop's thread.
        tokenizer: the model's.
        vocab_size: the model's.
    """

    loop: StepLoop
    intake: Intake
    compiler: Compiler
    encoder: Executor
    tokenizer: Tokenizer
    vocab_size: int
