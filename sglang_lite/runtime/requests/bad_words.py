"""Tokens that would complete a bad word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class BadWords:
    """Sequences of tokens that an output may not have.

    Attributes:
        endings: last tokens of the sequences, by the tokens before them.
        lengths: numbers of tokens before the last one.
    """

    endings: Mapping[tuple[int, ...], tuple[int, ...]]
    lengths: tuple[int, ...]

    @classmethod
    def of_texts(cls, texts: Sequence[str], tokenizer: Tokenizer) -> BadWords:
        """Encodes each text with and without a space before it, like vLLM.

        Raises:
            ParameterError: the model has no tokenizer.
        """
        if texts and not tokenizer.knows_text:
            raise ParameterError("bad_words", "are texts, and the model has no tokenizer.")
        endings: dict[tuple[int, ...], tuple[int, ...]] = {}
        for text in texts:
            for spelled in (text.lstrip(), f" {text.lstrip()}"):
                *before, last = tokenizer.encode(spelled, first=False) or (None,)
                if last is not None:
                    endings[(*before,)] = (*endings.get((*before,), ()), last)
        return cls(endings, tuple(sorted({len(before) for before in endings})))

    def find_endings(self, output: Ints) -> tuple[int, ...]:
        """Returns the tokens that would complete a sequence after an output's tokens."""
        found: tuple[int, ...] = ()
        for length in self.lengths:
            if length <= len(output):
                before = tuple(output[len(output) - length :].tolist())
                found += self.endings.get(before, ())
        return found
