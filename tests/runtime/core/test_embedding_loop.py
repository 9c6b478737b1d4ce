"""The loop of an encoder, with one that fails."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_lite.protocol import EngineClosedError
from sglang_lite.runtime.core.embedding_core import EmbeddingLoop
from sglang_lite.runtime.embedding.request import EncodeRequest


class Panic(BaseException):
    """As an extension written in Rust raises it: no Exception."""


class Panicking:
    spec = SimpleNamespace(width=4)

    def __call__(self, *_):
        raise Panic


def test_texts_of_a_step_that_panics_fail_with_those_that_wait():
    encoder: Any = Panicking()
    loop = EmbeddingLoop(encoder, step_tokens=2, adapters=None)
    tokens = np.ones(2, np.int32)
    futures: list[Future] = [Future() for _ in range(2)]
    for future in futures:
        loop.submit_texts(EncodeRequest(tokens, tokens, np.array([2], np.int32)), [None], future)
    with pytest.raises(Panic):
        loop.run()
    for future in futures:
        assert isinstance(future.exception(timeout=0), EngineClosedError)
