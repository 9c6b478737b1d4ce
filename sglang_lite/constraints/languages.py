"""Working on whole languages: which rules are of use, what the parts of one text are."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_lite.constraints.nodes import (
    EMPTY,
    NOTHING,
    Alternation,
    CharSet,
    Concat,
    Language,
    Node,
    Ref,
    Repeat,
    alternation,
    concat,
    references,
)
from sglang_lite.protocol import ConstraintError


def pruned(language: Language) -> Language:
    """The same language without rules that make no text or that nothing needs.

    Raises:
        ConstraintError: no text is in it.
    """
    uses = {name: references(body) for name, body in language.rules.items()}
    productive = _productive(language.rules, uses)
    if language.start not in productive:
        raise ConstraintError("the constraint contradicts itself: no text satisfies it.")
    rules = dict(language.rules)
    if len(productive) < len(rules):
        rules = {name: _without_dead(rules[name], productive) for name in rules if name in productive}
    kept = {language.start: rules[language.start]}
    for name in (queue := [language.start]):
        for each in references(rules[name]) if rules[name] is not language.rules[name] else uses[name]:
            if each not in kept:
                kept[each] = rules[each]
                queue.append(each)
    return Language(language.start, kept, language.sealed & kept.keys())


def renamed(language: Language, prefix: str) -> Language:
    """The same language with other names of rules."""

    def name(node: Node) -> Node:
        match node:
            case Ref(old):
                return Ref(prefix + old)
            case Concat(parts):
                return Concat(tuple(map(name, parts)))
            case Alternation(options):
                return Alternation(tuple(map(name, options)))
            case Repeat(inner, least, most):
                return Repeat(name(inner), least, most)
        return node

    rules = {prefix + old: name(body) for old, body in language.rules.items()}
    return Language(prefix + language.start, rules, frozenset(prefix + old for old in language.sealed))


def _productive(rules: Mapping[str, Node], uses: Mapping[str, set[str]]) -> set[str]:
    """The rules that make some text. Intersections and complements are taken to do."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, used in uses.items():
        for each in used:
            users[each].append(name)
    productive: set[str] = set()
    queue = list(rules)[::-1]
    for name in queue:
        if name not in productive and _makes(rules[name], productive):
            productive.add(name)
            queue += users[name]
    return productive


def _makes(node: Node, productive: set[str]) -> bool:
    match node:
        case CharSet(ranges):
            return bool(ranges)
        case Concat(parts):
            return all(_makes(part, productive) for part in parts)
        case Alternation(options):
            return any(_makes(option, productive) for option in options)
        case Repeat(inner, least, _):
            return least == 0 or _makes(inner, productive)
        case Ref(name):
            return name in productive
    return True


def _without_dead(node: Node, productive: set[str]) -> Node:
    match node:
        case Ref(name):
            return node if name in productive else NOTHING
        case Concat(parts):
            return concat(*(_without_dead(part, productive) for part in parts))
        case Alternation(options):
            return alternation(_without_dead(option, productive) for option in options)
        case Repeat(inner, least, most):
            kept = _without_dead(inner, productive)
            return Repeat(kept, least, most) if kept != NOTHING else NOTHING if least else EMPTY
    return node
