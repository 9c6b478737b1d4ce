"""The continuation of a text, by masks of bytes: they watch what no grammar says (unique_names.py)."""

from __future__ import annotations

from sglang_lite.constraints.byte_matcher import Completion
from sglang_lite.protocol import ConstraintError
from sglang_lite.runtime.structured_output.base import Matcher, next_mask

_MAX_FORCED = 10_000  # bytes


def ahead(matcher: Matcher, text: str) -> Completion:
    """Continuation of a text that the grammar allows, as `ByteMatcher.ahead` tells it.

    Args:
        matcher: at the start, with a token for every byte.

    Raises:
        ConstraintError: something in the text comes again, or an object ends before all names came that have to.
    """
    data = text.encode()
    for at, byte in enumerate(data):
        if byte not in _allowed(matcher):
            taken = data[:at].decode("utf-8", "ignore")
            raise ConstraintError(
                f"{chr(byte)!r} is not allowed after {taken[-40:]!r}: a name or an item would come again, or a name "
                "that has to come would be missing."
            )
        matcher.accept(byte)
    complete, forced = matcher.complete, bytearray()
    while len(allowed := _allowed(matcher)) == 1 and not matcher.complete and len(forced) < _MAX_FORCED:
        forced.append(allowed[0])
        matcher.accept(allowed[0])
    known = forced.decode("utf-8", "ignore")
    if len(known.encode()) < len(forced):  # of a character only the beginning is forced
        return Completion(known, "", True, False, complete)
    follows = "".join(chr(byte) for byte in allowed if byte < 128)
    return Completion(known, follows, any(byte >= 128 for byte in allowed), matcher.complete, complete)


def _allowed(matcher: Matcher) -> list[int]:
    """The bytes that may come next."""
    if matcher.finished:
        return []
    mask = next_mask(matcher)
    return [byte for byte in range(256) if mask[byte >> 5] >> (byte & 31) & 1]
