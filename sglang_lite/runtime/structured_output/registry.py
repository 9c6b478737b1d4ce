"""Registry of the grammar engines by name.

An engine is a module in this folder. Its name goes into `ConstraintBackend` and `make_engine`, its
package into `LIBRARIES`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.host.installed import is_installed

if TYPE_CHECKING:
    from sglang_lite.runtime.structured_output.base import GrammarEngine
    from sglang_lite.runtime.structured_output.vocabulary import Vocabulary
    from sglang_lite.runtime.tokens.tokenizer import Tokenizer

ConstraintBackend = Literal["auto", "llguidance", "xgrammar", "outlines"]
# packages whose versions are part of a cached grammar's key
LIBRARIES = ("llguidance", "xgrammar", "outlines-core")


def make_engine(
    name: str,
    vocabulary: Vocabulary,
    tokenizer: Tokenizer | None = None,
    threads: int = 1,
    *,
    tracked: bool = False,
) -> GrammarEngine:
    """Returns a new engine. Only this function imports the engines' libraries.

    Args:
        name: a ConstraintBackend.
        vocabulary: vocabulary of the model.
        tokenizer: tokenizer of the model, or None for an engine that is used only to `prepare`.
        threads: number of threads that compute masks concurrently.
        tracked: whether `Matcher.state_key` should identify texts in the same state as often as
            possible.

    Raises:
        ParameterError: the engine's library is not installed.
    """
    library = {"xgrammar": "xgrammar", "outlines": "outlines_core"}.get(name)
    if library is not None and not is_installed(library):
        raise ParameterError(
            "constraint_backend",
            f"{name!r} needs the package {library}, which is not installed.",
            hint="pip install 'sglang-lite[local]'.",
        )
    match name:
        case "xgrammar":
            from sglang_lite.runtime.structured_output.xgrammar import XgrammarEngine

            return XgrammarEngine(
                vocabulary, None if tokenizer is None else partial(tokenizer.encode, first=False)
            )
        case "outlines":
            from sglang_lite.runtime.structured_output.outlines import OutlinesEngine

            return OutlinesEngine(vocabulary)
        case "llguidance" | "auto":
            from sglang_lite.runtime.structured_output.llguidance import LlguidanceEngine

            if tokenizer is None:
                # slow constraints are slow with any vocabulary, so bytes will do
                return LlguidanceEngine(None)
            return LlguidanceEngine(
                tokenizer, vocabulary.size, vocabulary.eos_ids, threads, tracked=tracked
            )
    raise AssertionError(f"no engine {name!r}")
