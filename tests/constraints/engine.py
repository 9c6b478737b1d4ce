"""A compiled constraint asked about whole texts, with a token for every byte."""

from functools import lru_cache

from sglang_lite.protocol import ConstraintError
from sglang_lite.runtime.structured_output.base import masks_allow_tokens
from sglang_lite.runtime.structured_output.llguidance import LlguidanceEngine
from sglang_lite.runtime.structured_output.ruled_grammar import extract_mask_rules, with_mask_rules


@lru_cache(maxsize=1)
def byte_engine():
    return LlguidanceEngine(None)


@lru_cache(maxsize=4)
def compiled(constraint):
    """The grammar and None, or None and the error that refuses it."""
    try:
        grammar = byte_engine().compile(constraint)
        return with_mask_rules(
            grammar, byte_engine().ending_tokens, extract_mask_rules(constraint)
        ), None
    except ConstraintError as error:
        return None, error


def accepts(grammar, text):
    """The masks allow the text and then its end."""
    return masks_allow_tokens(grammar, byte_engine().encode(text))
