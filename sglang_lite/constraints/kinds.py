"""Converts any constraint record, however nested, to its language."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from sglang_lite.constraints.formal.automaton import is_empty
from sglang_lite.constraints.formal.grammars import prefix_rule_names, prune_rules
from sglang_lite.constraints.formal.nodes import (
    ANY_CHAR,
    ANY_TEXT,
    NOTHING,
    Language,
    Node,
    Ref,
    Repeat,
    alternation,
    complement,
    concat,
    intersection,
    literal,
    repeat,
)
from sglang_lite.constraints.json_schema.normal_form import (
    build_arguments_language,
    build_tagged_language,
    normalise,
    normalise_embedded_schema,
)
from sglang_lite.constraints.limits import convert_limit_errors
from sglang_lite.constraints.memo import memoize
from sglang_lite.constraints.number_text import PATTERNS
from sglang_lite.constraints.syntax import gbnf, lark
from sglang_lite.constraints.syntax.regex import parse
from sglang_lite.protocol import (
    ArgumentList,
    Choices,
    Constraint,
    ConstraintError,
    Continuation,
    Ebnf,
    InOrder,
    JsonSchema,
    Lark,
    Number,
    OneOf,
    Regex,
    Repeated,
    StructuralTag,
    TaggedObject,
)

_Other: TypeAlias = (
    Ebnf
    | Lark
    | Regex
    | Number
    | Choices
    | Continuation
    | StructuralTag
    | InOrder
    | OneOf
    | Repeated
)
_START = "start"


def language_for_constraint(constraint: Constraint) -> Language:
    """Returns the language of the texts that a constraint allows. JSON texts are limited to the
    style in which JSON is generated.

    Raises:
        ConstraintError: the constraint is not valid, no text satisfies it, or it can't be enforced.
    """
    with convert_limit_errors("the constraint"):
        match constraint:
            case JsonSchema():
                return normalise(constraint).language
            case TaggedObject(schema, tags):
                return build_tagged_language(schema, tags)
            case ArgumentList(schema, notation):
                return build_arguments_language(schema, notation)
        return _build_constraint_language(constraint)


@memoize
def _build_constraint_language(constraint: _Other) -> Language:
    match constraint:
        case Ebnf(text):
            return prune_rules(gbnf.parse(text))
        case Lark(text):
            outer, schemas = lark.parse(text)
            return prune_rules(
                _embed_languages(
                    outer, {name: _embedded_language(schema) for name, schema in schemas.items()}
                )
            )
        case Regex(pattern):
            return prune_rules(Language(_START, {_START: parse(pattern)}))
        case Number(kind):
            return language_for_constraint(Regex(PATTERNS[kind]))
        case Choices(options):
            return prune_rules(Language(_START, {_START: alternation(map(literal, options))}))
        case Continuation():
            raise ConstraintError(
                "a Continuation can't be compiled by itself: it is the remainder of a grammar over several nodes.",
                hint="Use the whole grammar.",
            )
    parts = _constraint_parts(constraint)
    names = {f"{i}": _embedded_language(part) for i, part in enumerate(parts)}
    outer = Language(_START, _combine_part_rules(constraint, [Ref(name) for name in names]))
    return prune_rules(_embed_languages(outer, names))


def _constraint_parts(
    constraint: StructuralTag | InOrder | OneOf | Repeated,
) -> Iterable[Constraint]:
    match constraint:
        case InOrder(parts):
            return parts
        case OneOf(options):
            return options
        case Repeated(item):
            return (item,)
        case StructuralTag(tags):
            return [tag.content for tag in tags]


def _combine_part_rules(
    constraint: StructuralTag | InOrder | OneOf | Repeated, refs: list[Ref]
) -> dict[str, Node]:
    match constraint:
        case InOrder():
            return {_START: concat(*refs)}
        case OneOf():
            return {_START: alternation(refs)}
        case Repeated(_, least, most):
            if least < 0 or (most is not None and most < least):
                raise ConstraintError(f"repeated: from {least} to {most} times is not possible.")
            return {_START: repeat(refs[0], least, most)}
        case StructuralTag():
            return _structural_tag_rules(constraint, refs)


def _structural_tag_rules(constraint: StructuralTag, contents: list[Ref]) -> dict[str, Node]:
    """Returns the rules of a structural tag: free text without triggers, interrupted by tags. Each
    tag starts at the first trigger in the remaining text.
    """
    triggers = list(dict.fromkeys(constraint.triggers))
    if not triggers or "" in triggers:
        raise ConstraintError(
            "structural_tag: `triggers` needs at least one string, and none may be empty."
        )
    for tag in constraint.tags:
        if not tag.begin.startswith(tuple(triggers)):
            raise ConstraintError(f"structural_tag: no trigger begins {tag.begin!r}.")
    found = concat(ANY_TEXT, alternation(map(literal, triggers)))
    excluded = concat(ANY_TEXT, alternation(map(literal, constraint.excludes)), ANY_TEXT)
    options = []
    for trigger in triggers:
        until = intersection(
            concat(ANY_TEXT, literal(trigger)), complement(concat(found, ANY_CHAR, ANY_TEXT))
        )
        until = intersection(until, complement(excluded))
        tags = [
            concat(literal(tag.begin.removeprefix(trigger)), content, literal(tag.end))
            for tag, content in zip(constraint.tags, contents)
            if tag.begin.startswith(trigger)
        ]
        options.append(concat(NOTHING if is_empty(until) else until, alternation(tags)))
    text = intersection(complement(concat(found, ANY_TEXT)), complement(excluded))
    one = Ref("tag")
    least = int(constraint.at_least_one)
    if constraint.stop_after_first:
        whole = alternation([one, *([] if least else [text])])
    else:
        whole = concat(Repeat(one, least, None), text)
    return {_START: whole, "tag": alternation(options)}


def _embedded_language(constraint: Constraint) -> Language:
    if not isinstance(constraint, JsonSchema):
        return language_for_constraint(constraint)
    form = normalise_embedded_schema(constraint)
    if form.checked and constraint.enforce != "unchecked":
        pointer, problem = form.checked[0]
        raise ConstraintError(
            f"json_schema: {problem}",
            pointer=pointer,
            hint="Inside another constraint nothing is left to be checked.",
        )
    return form.language


def _embed_languages(outer: Language, inner: dict[str, Language]) -> Language:
    """Adds inner languages to an outer one. Each gets the rule name by which the outer language
    refers to it.
    """
    rules = dict(outer.rules)
    sealed = set(outer.sealed)
    for name, language in inner.items():
        own = prefix_rule_names(language, f"{name}.")
        rules |= {**own.rules, name: Ref(own.start)}
        sealed |= own.sealed
    return Language(outer.start, rules, frozenset(sealed))
