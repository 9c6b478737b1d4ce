"""Exact checks of texts against constraints, without a grammar engine."""

from __future__ import annotations

from sglang_lite.constraints.formal.automaton import accepts, is_empty
from sglang_lite.constraints.formal.earley import recognises
from sglang_lite.constraints.formal.grammars import inline_all_rules
from sglang_lite.constraints.formal.nodes import ANY_TEXT, concat, intersection, literal
from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.constraints.schema import parse_json
from sglang_lite.protocol import Constraint, ConstraintError, JsonSchema, ValueValidationError
from sglang_lite.protocol.anything import UserValue


def matches(constraint: Constraint, text: str) -> bool:
    """Returns True if a constraint allows a text. JSON may have any whitespace and any member
    order, unless it is part of another constraint.

    Raises:
        ConstraintError: the constraint is not valid or can't be enforced.
    """
    language = language_for_constraint(constraint)
    if isinstance(constraint, JsonSchema):
        try:
            parse_json(constraint, text)
        except ValueValidationError:
            return False
        return True
    body = language.rules[language.start]
    return recognises(language, text) if body.has_refs else accepts(body, text)


def validate(constraint: Constraint, text: str) -> UserValue:
    """Returns the value of a finished text: the parsed JSON for a JSON schema, else the text
    itself.

    Raises:
        ValueValidationError: the constraint does not allow the text.
        ConstraintError: the constraint is not valid or, unless it is a JSON schema, can't be
            enforced.
    """
    if isinstance(constraint, JsonSchema):
        return parse_json(constraint, text)
    if not matches(constraint, text):
        raise ValueValidationError(f"{text!r} is not what {constraint!r} allows.", text=text)
    return text


def may_contain(constraint: Constraint, text: str) -> bool | None:
    """Returns whether a constraint allows some text that contains `text`, or None if the constraint
    is not a regular language or is too large to decide.

    Raises:
        ConstraintError: the constraint is not valid or can't be enforced.
    """
    body = inline_all_rules(language_for_constraint(constraint))
    if body is None:
        return None
    try:
        return not is_empty(intersection(body, concat(ANY_TEXT, literal(text), ANY_TEXT)))
    except ConstraintError:  # the automaton is too large
        return None
