"""Parts of an engine that running requests use. These parts hold no reference to the engine itself,
so the engine ends when its user drops it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import lru_cache, partial

from sglang_lite.protocol import Span
from sglang_lite.runtime.core.engine_sessions import EngineSessions
from sglang_lite.runtime.core.open_requests import OpenRequests
from sglang_lite.runtime.core.request_builder import RequestBuilder
from sglang_lite.runtime.core.step_loop import StepLoop
from sglang_lite.runtime.structured_output.compiler import Compiler
from sglang_lite.runtime.tokens.tokenizer import Tokenizer

_KEPT = 4096  # maximum number of cached texts
_LONGEST = 2048  # maximum number of characters of a cached text


class ConstantTexts:
    """Encodes constant texts that follow generated tokens, and caches their token ids. Used on the
    loop's thread.

    Args:
        encode: function that encodes spans which follow other text.
        encoder: executor that `encode` runs on.
    """

    def __init__(self, encode: Callable[[Sequence[Span]], array[int]], encoder: Executor) -> None:
        self._submit = partial(_submit, encode, encoder)
        self._kept = lru_cache(_KEPT)(self._submit)

    def encode_constant(self, spans: Sequence[Span]) -> Future[array[int]]:
        """Returns a future of a text's token ids. The ids of short texts are cached and shared by
        programs with the same text, so they must not be changed.
        """
        is_short = sum(len(span.text) for span in spans) <= _LONGEST
        return self._kept(tuple(spans)) if is_short else self._submit(spans)


def _submit(
    encode: Callable[[Sequence[Span]], array[int]], encoder: Executor, spans: Sequence[Span]
) -> Future[array[int]]:
    try:
        return encoder.submit(encode, spans)
    except RuntimeError as error:  # the engine is closed
        failed: Future[array[int]] = Future()
        failed.set_exception(error)
        return failed


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
        sessions: sessions of the server's clients.
        step_cost: number of additional tokens in a step that take about as long as one more step.
    """

    loop: StepLoop
    builder: RequestBuilder
    open_requests: OpenRequests
    compiler: Compiler
    encoder: Executor
    constants: ConstantTexts
    tokenizer: Tokenizer
    sessions: EngineSessions
    step_cost: float
