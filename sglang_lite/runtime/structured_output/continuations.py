"""Finds what may continue a text, byte by byte, for grammars whose masks enforce more than the
grammar itself (ruled_grammar.py).
"""

from __future__ import annotations

from sglang_lite.constraints.byte_matcher import Completion
from sglang_lite.protocol import ConstraintError
from sglang_lite.runtime.structured_output.base import Matcher, next_mask

_MAX_FORCED = 10_000  # most bytes of forced text


def continuations(matcher: Matcher, text: str) -> Completion:
    """Returns the possible continuations of a text, like `ByteMatcher.completion`.

    Args:
        matcher: matcher at the start, with one token per byte.
        text: text that the grammar allows.

    Raises:
        ConstraintError: the text repeats a name or an item, or an object ends before all required
            names have come.
    """
    data = text.encode()
    for at, byte in enumerate(data):
        if byte not in _allowed_next_bytes(matcher):
            accepted = data[:at].decode("utf-8", "ignore")
            raise ConstraintError(
                f"{chr(byte)!r} is not allowed after {accepted[-40:]!r}: a name or an item would come again, or a name "
                "that has to come would be missing."
            )
        matcher.accept(byte)
    complete = matcher.complete
    forced = bytearray()
    while (
        len(allowed := _allowed_next_bytes(matcher)) == 1
        and not matcher.complete
        and len(forced) < _MAX_FORCED
    ):
        forced.append(allowed[0])
        matcher.accept(allowed[0])
    forced_text = forced.decode("utf-8", "ignore")
    if len(forced_text.encode()) < len(forced):  # the forced bytes end inside a character
        return Completion(forced_text, "", True, False, complete)
    follows = "".join(chr(byte) for byte in allowed if byte < 128)
    return Completion(
        forced_text, follows, any(byte >= 128 for byte in allowed), matcher.complete, complete
    )


def _allowed_next_bytes(matcher: Matcher) -> list[int]:
    """Returns the bytes that are allowed next."""
    if matcher.finished:
        return []
    mask = next_mask(matcher)
    return [byte for byte in range(256) if mask[byte >> 5] >> (byte & 31) & 1]
