"""Holding texts against constraints, exactly and without an engine."""

from __future__ import annotations

from sglang_lite.constraints.formal.automaton import accepts, is_empty
from sglang_lite.constraints.formal.earley import recognises
from sglang_lite.constraints.formal.grammars import regular
from sglang_lite.constraints.formal.nodes import ANY_TEXT, concat, intersection, literal
from sglang_lite.constraints.language import language_of
from sglang_lite.constraints.schema import parse_json
from sglang_lite.protocol import Constraint, ConstraintError, JsonSchema, ValueValidationError
from sglang_lite.protocol.anything import UserValue


def matches(constraint: Constraint, text: str) -> bool:
    """Tells whether a constraint allows a text. JSON may have any blanks and any order of members, unless it is part of
    another constraint.

    Raises:
        ConstraintError: a constraint that is not valid or can't be enforced.
    """
    language = language_of(constraint)
    if isinstance(constraint, JsonSchema):
        try:
            parse_json(constraint, text)
        except ValueValidationError:
            return False
        return True
    body = language.rules[language.start]
    return recognises(language, text) if body.refers else accepts(body, text)


def validate(constraint: Constraint, text: str) -> UserValue:
    """The value of a finished text: for a JSON schema what it spells, else the text.

    Raises:
        ValueValidationError: the text is not what the constraint allows.
        ConstraintError: as `matches`; but a schema need not be enforceable.
    """
    if isinstance(constraint, JsonSchema):
        return parse_json(constraint, text)
    if not matches(constraint, text):
        raise ValueValidationError(f"{text!r} is not what {constraint!r} allows.", text=text)
    return text


def may_contain(constraint: Constraint, text: str) -> bool | None:
    """Tells whether a text that a constraint allows can have `text` in it; None: the constraint is no regular language,
    or too large to tell.

    Raises:
        ConstraintError: a constraint that is not valid or can't be enforced.
    """
    body = regular(language_of(constraint))
    if body is None:
        return None
    try:
        return not is_empty(intersection(body, concat(ANY_TEXT, literal(text), ANY_TEXT)))
    except ConstraintError:  # too complex
        return None
