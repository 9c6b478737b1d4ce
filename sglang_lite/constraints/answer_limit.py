"""Limits of tokens that suffice for the values of a constraint."""

from __future__ import annotations

from sglang_lite.constraints.formal.lengths import most_bytes
from sglang_lite.constraints.formal.shortest_texts import ShortestTexts
from sglang_lite.constraints.kinds import language_of
from sglang_lite.constraints.memo import memoized
from sglang_lite.protocol import Constraint, ConstraintError

_MINIMUM = 1_024  # tokens, if the texts have no greatest length
_TIMES_SHORTEST = 8  # tokens for a byte of the shortest text
_MAXIMUM = 16_384  # tokens: texts that may be longer count as endless


@memoized
def answer_limit(constraint: Constraint) -> int | None:
    """Returns a number of tokens that suffices for all texts of a constraint if they have a greatest length, else for
    most. None if the constraint can't be enforced."""
    try:
        language = language_of(constraint)
        most = most_bytes(language.rules, language.start)
        if most is not None and most < _MAXIMUM:
            return most + 1  # for the token that ends the text
        shortest = ShortestTexts(language.rules).text(language.start)
    except (ConstraintError, RecursionError):
        return None
    least = 0 if shortest is None else len(shortest.encode("utf-8", "surrogatepass"))
    return min(max(_MINIMUM, _TIMES_SHORTEST * least), _MAXIMUM)
