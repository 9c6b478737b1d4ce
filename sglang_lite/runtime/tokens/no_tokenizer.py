"""The place of a tokenizer where a checkpoint has none: token ids are all there is."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from sglang_lite.protocol import ParameterError, Span
from sglang_lite.runtime.tokens.tokenizer import Tokenizer


class NoTokenizer(Tokenizer):
    """A tokenizer whose tokens have no text: ids are decoded to nothing, and text is refused.

    Args:
        vocab_size: the model's.
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
