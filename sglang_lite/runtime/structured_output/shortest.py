"""Counts the tokens of a grammar's shortest text, to report a token limit that is too small for any
text.
"""

from __future__ import annotations

from sglang_lite.runtime.structured_output.base import CompiledGrammar


def fewest_tokens_above(grammar: CompiledGrammar, limit: int) -> int | None:
    """Returns the fewest tokens that a text of the grammar can have, if the number is known and
    more than `limit`, otherwise None. May take half a second the first time, so don't call it on
    the event loop's thread.
    """
    lengths = grammar.lengths()
    if lengths.known is not None and lengths.known <= limit:
        return None
    fewest = lengths.fewest
    return None if fewest is None or fewest <= limit else fewest
