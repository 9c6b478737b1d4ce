"""Token limits that are high enough for the values of a constraint."""

from __future__ import annotations

from sglang_lite.constraints.formal.lengths import most_bytes
from sglang_lite.constraints.formal.shortest_texts import ShortestTexts
from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.constraints.memo import memoize
from sglang_lite.protocol import Constraint, ConstraintError

_MINIMUM = 1_024  # tokens, if the texts have no maximum length
_TIMES_SHORTEST = 8  # tokens per byte of the shortest text
_MAXIMUM = 16_384  # tokens; longer texts count as unbounded


@memoize
def estimate_max_answer_tokens(constraint: Constraint) -> int | None:
    """Estimates how many tokens a text of a constraint needs at most. If the constraint sets no
    limit, or a very high one, the number is enough for most texts, but not for all. Returns None if
    the constraint can't be enforced.
    """
    try:
        language = language_for_constraint(constraint)
        most = most_bytes(language.rules, language.start)
        if most is not None and most < _MAXIMUM:
            return most + 1  # for the token that ends the text
        shortest = ShortestTexts(language.rules).find_shortest_text(language.start)
    except (ConstraintError, RecursionError):
        return None
    least = 0 if shortest is None else len(shortest.encode("utf-8", "surrogatepass"))
    return min(max(_MINIMUM, _TIMES_SHORTEST * least), _MAXIMUM)
