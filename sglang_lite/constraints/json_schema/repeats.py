"""Limits on the number of equal items in a row in the lists of a generated text.

Set by the `repeats` parameter of a generation and the keyword `x-repeats`. Texts that
exceed the limit are still valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sglang_lite.constraints.json_schema.allowed_values import AllowedValues, may_have_lists
from sglang_lite.constraints.json_schema.keywords import REPEATS
from sglang_lite.protocol import (
    ArgumentList,
    Constraint,
    ConstraintError,
    Continuation,
    InOrder,
    JsonSchema,
    OneOf,
    ParameterError,
    Repeated,
    StructuralTag,
    TaggedObject,
)

_EXEMPT = b"-0123456789tfn"  # first bytes of numbers, booleans and null


@dataclass(frozen=True, slots=True)
class RepeatRules:
    """Rules about equal items in the lists of a JSON text.

    Attributes:
        schema: schema of the text.
        before: part of the text that is already written.
        limit: maximum number of equal items in a row, or None. Lists of numbers, booleans,
            null and enums are exempt.
    """

    schema: JsonSchema
    before: str
    limit: int | None

    def max_equal_items(self, path: Iterable[str | int], index: int, item: bytes) -> int | None:
        """Returns the maximum number of equal items in a row, or None for any number.

        Args:
            path: names and indices that lead to the list.
            index: index of an item in it.
            item: JSON text of the item.
        """
        allowed = AllowedValues.for_schema(self.schema)
        for step in path:
            allowed = (
                allowed.member(step) if isinstance(step, str) else allowed.narrow_to_item(step)
            )
        own = allowed.repeats
        if (
            self.limit is None
            or item[:1] in _EXEMPT
            or (item[:1] == b'"' and allowed.narrow_to_item(index).has_finite_strings)
        ):
            return own
        return self.limit if own is None else min(own, self.limit)


def build_repeat_rules(constraint: Constraint | None, limit: int | None) -> RepeatRules | None:
    """Returns the rules about equal items in the texts of a constraint, or None if there are none.

    Args:
        constraint: constraint of the text.
        limit: value of the parameter `repeats`.

    Raises:
        ParameterError: `limit` is given, but the text is not JSON that may have lists.
        ConstraintError: a schema inside another constraint has the keyword, which is not
            enforced there.
    """
    before = ""
    if isinstance(constraint, Continuation):
        if constraint.part is None:
            before = constraint.text
        constraint = constraint.whole if constraint.part is None else constraint.part
    if isinstance(constraint, JsonSchema):
        if limit is not None and not may_have_lists(constraint):
            raise _no_list_error("its schema has no list")
        asked = limit is not None or REPEATS in constraint.schema
        return RepeatRules(constraint, before, limit) if asked else None
    if limit is not None:
        raise _no_list_error(
            "the text is free" if constraint is None else "its constraint is no JSON schema"
        )
    if has_repeats_keyword(constraint):
        raise ConstraintError(
            f"{REPEATS} is enforced where a schema is the whole constraint, and not inside another one.",
            hint="Leave the keyword out, or generate the list by itself.",
        )
    return None


def has_repeats_keyword(constraint: Constraint | None) -> bool:
    """Returns True if a schema in a constraint has the keyword `x-repeats`."""
    return constraint is not None and any(
        REPEATS in each.schema for each in _schemas_inside(constraint)
    )


def _no_list_error(why: str) -> ParameterError:
    return ParameterError(
        "repeats",
        f"forbids equal items of a list, and {why}.",
        hint="Leave it out, or give gen a type or a schema with a list.",
    )


def _schemas_inside(constraint: Constraint) -> Iterator[JsonSchema]:
    """Yields the schemas inside a constraint."""
    inner: Sequence[Constraint] = ()
    match constraint:
        case JsonSchema():
            yield constraint
        case TaggedObject(schema) | ArgumentList(schema):
            yield schema
        case InOrder(parts):
            inner = parts
        case OneOf(options):
            inner = options
        case Repeated(item):
            inner = (item,)
        case StructuralTag(tags):
            inner = [tag.content for tag in tags]
    for each in inner:
        yield from _schemas_inside(each)
