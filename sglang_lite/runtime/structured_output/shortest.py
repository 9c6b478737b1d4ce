"""Fewest tokens of a grammar's texts, to report a limit that is too small for any of them."""

from __future__ import annotations

from sglang_lite.runtime.structured_output.base import CompiledGrammar


def fewest_tokens_above(grammar: CompiledGrammar, limit: int) -> int | None:
    """Returns the fewest tokens of a grammar's texts if that is more than `limit`, else None. May
    take half a second the first time, so don't call it on the event loop's thread.
    """
    lengths = grammar.lengths()
    if lengths.known is not None and lengths.known <= limit:
        return None
    fewest = lengths.fewest
    return None if fewest is None or fewest <= limit else fewest
