"""Minimum number of tokens that end within a text, whatever comes before and after it. Used as a
lower bound in searches.
"""

from __future__ import annotations

from collections.abc import Mapping

from sglang_lite.constraints.formal.grammars import referring_rules
from sglang_lite.constraints.formal.nodes import (
    Alternation,
    Concat,
    Intersection,
    LiteralText,
    Node,
    Ref,
    Repeat,
    references,
)
from sglang_lite.runtime.structured_output.token_rests import TokenRests

_MANY = 1 << 30


class LeastEnds:
    """Minimum number of tokens that end inside any text of a rule. Inside means after the text's
    first byte and before its last one.

    Args:
        rules: bodies of the rules by name.
        tokens: tokens of the vocabulary.
    """

    def __init__(self, rules: Mapping[str, Node], tokens: TokenRests) -> None:
        self._tokens = tokens
        # keeps the node alive, so that its id is not reused
        self._of: dict[int, tuple[Node, int]] = {}
        self._rules = dict.fromkeys(rules, _MANY)
        used = {name: references(body) for name, body in rules.items()}
        users = referring_rules(used)
        queue = dict.fromkeys(rules)
        while queue:  # approaches the solution from above
            name = queue.popitem()[0]
            found = self._count_in_node(rules[name])
            if found < self._rules[name]:
                self._rules[name] = found
                queue.update(dict.fromkeys(users[name]))

    def ends_within_rule(self, name: str) -> int:
        return self._rules[name]

    def ends_within_node(self, node: Node) -> int:
        found = self._of.get(id(node))
        if found is None:
            found = self._of[id(node)] = node, self._count_in_node(node)
        return found[1]

    def _count_in_node(self, node: Node) -> int:
        match node:
            case LiteralText(text):
                return self._tokens.fewest_ends_inside(text)
            case Ref(name):
                return self._rules[name]
            case Concat(parts):
                return min(sum(map(self._count_in_child, parts)), _MANY)
            case Alternation(options):
                return min(map(self._count_in_child, options), default=_MANY)
            case Intersection(parts):
                return max(map(self._count_in_child, parts), default=0)
            case Repeat(inner, least, _):
                return min(least * self._count_in_child(inner), _MANY) if least else 0
        return 0

    def _count_in_child(self, node: Node) -> int:
        return self._count_in_node(node) if node.has_refs else self.ends_within_node(node)
