"""Which engine enforces a constraint fastest.

Measured on SmolLM2's 49,152 tokens, one mask and one accepted token, microseconds, llguidance / xgrammar:
a date 10 / 3, words 125 / 14, three choices 38 / 9, sums with parentheses 6 / 4, Unicode words 96 / 9, text around tags
110 / 4. But a counted repeat costs xgrammar a look at every token in each step (a string of up to 16 characters or
escapes 86 / 10,600, eight words of up to 8 letters 240 / 4,200), and it compiles them slowly (200 characters:
2 ms / 1.4 s). Values of schemas have such repeats, and llguidance compiles any schema in milliseconds.
"""

from __future__ import annotations

from sglang_lite.constraints.compose import language_of
from sglang_lite.constraints.nodes import CharSet, Node, Repeat, Text, children
from sglang_lite.protocol import Constraint, JsonSchema, Lark

MAX_COUNT = 4  # of repeats, nested ones multiplied
MAX_SIZE = 2_000  # characters and sets


def fastest(constraint: Constraint) -> str:
    """The name of the engine.

    Raises:
        ConstraintError: the constraint is not valid.
    """
    if isinstance(constraint, JsonSchema | Lark):
        return "llguidance"
    rules = language_of(constraint).rules.values()
    if sum(map(_size, rules)) > MAX_SIZE or max(map(_most_repeated, rules)) > MAX_COUNT:
        return "llguidance"
    return "xgrammar"


def _size(node: Node) -> int:
    if isinstance(node, Text):
        return len(node.text)
    return 1 + sum(map(_size, children(node)))


def _most_repeated(node: Node) -> int:
    """The highest count, those of repeats within repeats multiplied."""
    inner = max(map(_most_repeated, children(node)), default=1)
    match node:
        case Repeat(CharSet(), least, most) if most is None and least <= 1:
            return 1
        case Repeat(_, least, most):
            return inner * max(least, most or 1)
    return inner
