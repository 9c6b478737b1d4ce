"""Token ids of the texts between a program's generations: encoded once per text, off the loop's thread."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial

from sglang_lite.protocol import Span

_KEPT = 4096  # number of texts
_LONGEST = 2048  # characters of a text that is kept


class ConstantTexts:
    """Texts that follow generated tokens, with their ids. Used on the loop's thread.

    Args:
        encode: function that encodes spans which follow other text.
        encoder: executor that it runs on.
    """

    def __init__(self, encode: Callable[[Sequence[Span]], array[int]], encoder: Executor) -> None:
        self._encode, self._encoder = encode, encoder
        self._ids: dict[tuple[Span, ...], Future[array[int]]] = {}

    def ids(self, spans: Sequence[Span]) -> Future[array[int]]:
        """Token ids of a text, which must not be changed. Texts of the same program in a batch share them."""
        key = tuple(spans)
        found = self._ids.get(key)
        if found is None:
            found = self._submit(spans)
            if sum(len(span.text) for span in spans) <= _LONGEST:
                if len(self._ids) >= _KEPT:
                    del self._ids[next(iter(self._ids))]
                self._ids[key] = found
        return found

    def _submit(self, spans: Sequence[Span]) -> Future[array[int]]:
        try:
            return self._encoder.submit(partial(self._encode, spans))
        except RuntimeError as error:  # the engine is closed
            failed: Future[array[int]] = Future()
            failed.set_exception(error)
            return failed
