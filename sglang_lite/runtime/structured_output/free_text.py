"""Grammar of free text, for outputs in which only the thoughts are limited. Any token may come
anywhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.structured_output.base import Endings, LoneMatcher, Mask
from sglang_lite.runtime.structured_output.vocabulary import build_token_mask


class FreeText:
    """Grammar of free text, which also computes its masks.

    Args:
        vocab_size: number of the model's tokens, padding included.
    """

    name = ""
    size = 0
    sources: Sequence[str] = ()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    @cached_property
    def mask(self) -> Mask:
        """Mask that allows all tokens."""
        return build_token_mask(range(self.vocab_size), self.vocab_size)

    def masks(self, matchers: Sequence[FreeTextMatcher]) -> NDArray[np.int32]:
        return np.stack([self.mask] * len(matchers))

    def matcher(self) -> FreeTextMatcher:
        return FreeTextMatcher(self)

    def as_combinable(self) -> FreeText:
        return self

    def endings(self) -> Endings | None:
        return None


class FreeTextMatcher(LoneMatcher):
    """Position in free text. All positions are the same.

    Args:
        engine: the grammar.
    """

    error = ""
    complete = True
    finished = False

    def __init__(self, engine: FreeText) -> None:
        self.engine = engine

    @property
    def state_key(self) -> Hashable:
        return id(self.engine)

    def cached_mask(self) -> Mask:
        return self.engine.mask

    def copy(self) -> FreeTextMatcher:
        return self

    def accept(self, token: int) -> bool:
        return True

    def accept_text(self, text: bytes) -> bool:
        return True
