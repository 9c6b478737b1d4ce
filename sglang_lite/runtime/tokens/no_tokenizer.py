"""Substitute for the tokenizer of a checkpoint that has none: only token ids can be used."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from sglang_lite.protocol import ParameterError, Span
from sglang_lite.runtime.tokens.tokenizer import Tokenizer


class NoTokenizer(Tokenizer):
    """Tokenizer whose tokens have no text: ids decode to nothing, and text is refused.

    Args:
        vocab_size: size of the model's vocabulary.
    """

    knows_text = False

    def __init__(self, vocab_size: int) -> None:
        super().__init__(Backend(BPE()), [b""] * vocab_size, ())

    def encode_spans(self, spans: Iterable[Span], *, first: bool = True) -> array[int]:
        if any(span.text for span in spans):
            raise ParameterError(
                "prompt", "is text, and the model has no tokenizer (skip_tokenizer_init).", hint="Give input_ids."
            )
        return array("i")
