"""The grammar engines by name.

An engine is a file in this folder; its name goes into `ConstraintBackend` and `make_engine`, its package into
`LIBRARIES`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from sglang_lite.runtime.structured_output.base import GrammarEngine
    from sglang_lite.runtime.structured_output.vocabulary import Vocabulary
    from sglang_lite.runtime.tokens.tokenizer import Tokenizer

ConstraintBackend = Literal["auto", "llguidance", "xgrammar", "outlines"]
LIBRARIES = ("llguidance", "xgrammar", "outlines-core")  # their packages, whose versions grammars on disk depend on


def make_engine(
    name: str, vocabulary: Vocabulary, tokenizer: Tokenizer | None = None, threads: int = 1
) -> GrammarEngine:
    """The engine of that name. Its library is imported here and nowhere else.

    Args:
        name: one of ConstraintBackend but "auto".
        vocabulary: the model's.
        tokenizer: the model's; None: the engine is to `prepare` alone.
        threads: that make masks at a time.
    """
    match name:
        case "xgrammar":
            from sglang_lite.runtime.structured_output.xgrammar import XgrammarEngine

            return XgrammarEngine(vocabulary, None if tokenizer is None else partial(tokenizer.encode, first=False))
        case "outlines":
            from sglang_lite.runtime.structured_output.outlines import OutlinesEngine

            return OutlinesEngine(vocabulary)
        case "llguidance":
            from sglang_lite.runtime.structured_output.llguidance import LlguidanceEngine

            if tokenizer is None:
                return LlguidanceEngine(None)  # what takes long does so whatever the tokens
            return LlguidanceEngine(tokenizer, vocabulary.size, vocabulary.eos_ids, threads)
    raise AssertionError(f"no engine {name!r}")
