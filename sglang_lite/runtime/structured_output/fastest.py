"""Choice of the grammar engine that enforces a constraint fastest.

Mean microseconds for a mask and an accepted token, measured with Qwen's 151,936 tokens on two cores: for one request,
and per request for 64 requests with the same constraint, which share llguidance's masks (mask_cache.py):

| | llguidance | xgrammar |
|---|---|---|
| a date | 36, 3 | 9, 11 |
| three choices | 58, 6 | 14, 11 |
| a number | 19, 3 | 11, 12 |
| sums with parentheses | 12, 3 | 9, 20 |
| words up to a full stop | 88, 4 | 105, 132 |
| names and sums of a small language | 92, 4 | 263, 235 |
| text around tags | 339, 10 | 18, 19 |

For a single request the time does not matter, as its masks are made while the forward runs. A counted repeat costs
xgrammar a look at every token in each step (a string of up to 16 characters: 86 us by llguidance, 10,600 by xgrammar),
and it compiles them slowly (200 characters: 2 ms and 1.4 s). So does a place where the text may end or continue with
letters. Tags may contain both.
"""

from __future__ import annotations

from sglang_lite.constraints.formal.charsets import ALL
from sglang_lite.constraints.formal.nodes import (
    Alternation,
    CharSet,
    Concat,
    Language,
    LiteralText,
    Node,
    Ref,
    Repeat,
    children,
)
from sglang_lite.constraints.language import language_of
from sglang_lite.protocol import Constraint, StructuralTag

MAX_COUNT = 4  # largest count of repeats, multiplied if nested
MAX_SIZE = 2_000  # most characters and character sets of a language


def fastest(constraint: Constraint) -> str:
    """Returns the name of the fastest engine for a constraint.

    Raises:
        ConstraintError: the constraint is not valid.
    """
    if not isinstance(constraint, StructuralTag):
        return "llguidance"
    language = language_of(constraint)
    rules = language.rules.values()
    if sum(map(_size, rules)) > MAX_SIZE or max(map(_most_repeated, rules)) > MAX_COUNT or _ends_in_words(language):
        return "llguidance"
    return "xgrammar"


def _size(node: Node) -> int:
    if isinstance(node, LiteralText):
        return len(node.text)
    return 1 + sum(map(_size, children(node)))


def _most_repeated(node: Node) -> int:
    """Largest count of a repeat, with the counts of nested repeats multiplied."""
    inner = max(map(_most_repeated, children(node)), default=1)
    match node:
        case Repeat(CharSet(), least, most) if most is None and least <= 1:
            return 1
        case Repeat(_, least, most):
            return inner * max(least, most or 1)
    return inner


def _ends_in_words(language: Language) -> bool:
    """True if the text may end inside an unbounded repeat of letters.

    A part that may be empty in another way than by a repeat is taken to be non-empty: the result only affects speed.
    """
    seen: set[str] = set()
    stack: list[Node] = [Ref(language.start)]
    while stack:
        match stack.pop():
            case Ref(name) if name not in seen:
                seen.add(name)
                stack.append(language.rules[name])
            case Repeat(inner, _, most):
                if most is None and _has_letters(inner):
                    return True
                stack.append(inner)
            case Alternation(options):
                stack += options
            case Concat(parts):
                for part in reversed(parts):
                    stack.append(part)
                    if not (isinstance(part, Repeat) and part.least == 0):
                        break
    return False


def _has_letters(node: Node) -> bool:
    if isinstance(node, CharSet):
        return node.ranges != ALL and any(low <= ord("a") and high >= ord("m") for low, high in node.ranges)
    return any(map(_has_letters, children(node)))
