"""Operations on grammars: pruning, renaming and inlining rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from sglang_lite.constraints.formal.nodes import (
    EMPTY,
    NOTHING,
    Alternation,
    CharSet,
    Concat,
    Language,
    LiteralText,
    Node,
    Ref,
    Repeat,
    alternation,
    concat,
    map_children,
    references,
)
from sglang_lite.protocol import ConstraintError


def prune_rules(language: Language) -> Language:
    """Removes the rules that match no text or are not reachable from the start.

    Raises:
        ConstraintError: the language is empty.
    """
    rules = dict(language.rules)
    uses = {name: references(body) for name, body in rules.items()}
    productive = _productive_rules(rules, uses)
    if language.start not in productive:
        raise ConstraintError("the constraint contradicts itself: no text satisfies it.")
    if len(productive) < len(rules):
        rules = {
            name: _drop_dead_options(rules[name], productive)
            for name in rules
            if name in productive
        }
        uses = {name: references(body) for name, body in rules.items()}
    reachable = {language.start: rules[language.start]}
    for name in (queue := [language.start]):
        for each in sorted(uses[name]):
            if each not in reachable:
                reachable[each] = rules[each]
                queue.append(each)
    return Language(language.start, reachable, language.sealed & reachable.keys())


def contradiction(language: Language) -> list[str]:
    """Returns the names of rules that explain why a language is empty. They form a path from the
    start rule. Each rule is empty because of the next one, which is the only rule to blame.
    """
    rules = language.rules
    productive = _productive_rules(rules, {name: references(body) for name, body in rules.items()})
    path = [language.start]
    while True:
        missing = references(rules[path[-1]]) - productive
        to_blame = [name for name in missing if _can_match(rules[path[-1]], productive | {name})]
        if len(to_blame) != 1 or to_blame[0] in path:
            return path
        path += to_blame


MAX_REGULAR = 20_000  # characters and sets of the result


def inline_all_rules(language: Language) -> Node | None:
    """Returns the language as one node without rules, or None if a rule is recursive or the node
    would exceed `MAX_REGULAR`.
    """
    bodies: dict[str, tuple[Node, int]] = {}

    def body(name: str, open_rules: frozenset[str]) -> tuple[Node, int]:
        if name not in bodies:
            if name in open_rules:
                raise _NotRegular
            bodies[name] = substitute_rules(language.rules[name], open_rules | {name})
        return bodies[name]

    def substitute_rules(node: Node, open_rules: frozenset[str]) -> tuple[Node, int]:
        size = 1
        found = node
        match node:
            case Ref(name):
                return body(name, open_rules)
            case LiteralText(text):
                size = len(text)
            case Concat(parts) | Alternation(parts):
                substituted_parts = [substitute_rules(part, open_rules) for part in parts]
                size += sum(each for _, each in substituted_parts)
                nodes = [part for part, _ in substituted_parts]
                found = concat(*nodes) if isinstance(node, Concat) else alternation(nodes)
            case Repeat(inner, least, most):
                within, more = substitute_rules(inner, open_rules)
                found = Repeat(within, least, most)
                size = 1 + more
        if size > MAX_REGULAR:
            raise _NotRegular
        return found, size

    try:
        return body(language.start, frozenset())[0]
    except (_NotRegular, RecursionError):
        return None


class _NotRegular(Exception):  # noqa: N818 # never leaves this module
    """Raised inside `inline_all_rules` if a rule is recursive or the node is too large."""


def prefix_rule_names(language: Language, prefix: str) -> Language:
    """Adds a prefix to the names of a language's rules."""

    def name(node: Node) -> Node:
        return Ref(prefix + node.name) if isinstance(node, Ref) else map_children(node, name)

    rules = {prefix + old: name(body) for old, body in language.rules.items()}
    return Language(
        prefix + language.start, rules, frozenset(prefix + old for old in language.sealed)
    )


def referring_rules(uses: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Inverts references between rules: returns, for each rule, the names of the rules that refer
    to it.

    Args:
        uses: names of the rules that each rule refers to.
    """
    found: dict[str, list[str]] = {name: [] for name in uses}
    for name, used in uses.items():
        for each in used:
            found[each].append(name)
    return found


def _productive_rules(rules: Mapping[str, Node], uses: Mapping[str, Iterable[str]]) -> set[str]:
    """Returns the names of the rules that match some text. Intersections and complements are
    assumed to be non-empty.
    """
    referring = referring_rules(uses)
    productive: set[str] = set()
    queue = list(rules)[::-1]
    for name in queue:
        if name not in productive and _can_match(rules[name], productive):
            productive.add(name)
            queue += referring[name]
    return productive


def _can_match(node: Node, productive: set[str]) -> bool:
    match node:
        case CharSet(ranges):
            return bool(ranges)
        case Concat(parts):
            return all(_can_match(part, productive) for part in parts)
        case Alternation(options):
            return any(_can_match(option, productive) for option in options)
        case Repeat(inner, least, _):
            return least == 0 or _can_match(inner, productive)
        case Ref(name):
            return name in productive
    return True


def _drop_dead_options(node: Node, productive: set[str]) -> Node:
    match node:
        case Ref(name):
            return node if name in productive else NOTHING
        case Repeat(inner, least, most):
            reduced = _drop_dead_options(inner, productive)
            return (
                Repeat(reduced, least, most) if reduced != NOTHING else NOTHING if least else EMPTY
            )
    return map_children(node, partial(_drop_dead_options, productive=productive))
