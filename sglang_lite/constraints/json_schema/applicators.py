"""Keywords that apply other schemas. Each narrows the set of values that the preceding keywords
left.

Source: JSON Schema draft 2020-12, core, 10.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from itertools import combinations

from sglang_lite.constraints.json_schema.document import SchemaLocation
from sglang_lite.constraints.json_schema.formulas import ValidAt
from sglang_lite.constraints.json_schema.keywords import Context, Schema
from sglang_lite.constraints.json_schema.values import (
    ANY_VALUE,
    NO_VALUE,
    Member,
    ObjectShape,
    ValueSet,
)
from sglang_lite.protocol import ConstraintError

MAX_TOGETHER = 6  # maximum number of branches of an anyOf whose evaluated members are distinguished


def _apply_ref(
    context: Context,
    values: ValueSet,
    schema: Schema,
    location: SchemaLocation,
    keyword: str,
    track_evaluated: bool,
) -> ValueSet:
    return context.algebra.intersect_value_sets(
        values,
        context.values(
            ValidAt(context.document.resolve_reference_at(location, keyword)), track_evaluated
        ),
    )


def _evaluate_branches(
    context: Context, schema: Schema, location: SchemaLocation, keyword: str, track_evaluated: bool
) -> list[ValueSet]:
    return [
        context.values(context.formula_below(location, keyword, i), track_evaluated)
        for i in range(len(schema[keyword]))
    ]


def _apply_all_of(
    context: Context,
    values: ValueSet,
    schema: Schema,
    location: SchemaLocation,
    keyword: str,
    track_evaluated: bool,
) -> ValueSet:
    return reduce(
        context.algebra.intersect_value_sets,
        _evaluate_branches(context, schema, location, keyword, track_evaluated),
        values,
    )


def _apply_any_of(
    context: Context,
    values: ValueSet,
    schema: Schema,
    location: SchemaLocation,
    keyword: str,
    track_evaluated: bool,
) -> ValueSet:
    branches = _evaluate_branches(context, schema, location, keyword, track_evaluated)
    if not track_evaluated and all(
        shape.only_names_members for each in branches for shape in each.objects
    ):
        # stays separate from other choices
        return context.algebra.intersect_value_sets(
            values, context.algebra.unite_value_sets(branches)
        )
    branches = [context.algebra.intersect_value_sets(values, each) for each in branches]
    if not track_evaluated:
        return context.algebra.unite_value_sets(branches)
    if len(branches) > MAX_TOGETHER:
        raise ConstraintError(
            f"json_schema: more than {MAX_TOGETHER} branches under unevaluatedProperties or -Items."
        )
    together = []  # a value that fits several branches is evaluated by all of them
    for count in range(1, len(branches) + 1):
        together += [
            reduce(context.algebra.intersect_value_sets, some)
            for some in combinations(branches, count)
        ]
    return context.algebra.unite_value_sets(together)


def _apply_one_of(
    context: Context,
    values: ValueSet,
    schema: Schema,
    location: SchemaLocation,
    keyword: str,
    track_evaluated: bool,
) -> ValueSet:
    branches = [
        context.algebra.intersect_value_sets(values, each)
        for each in _evaluate_branches(context, schema, location, keyword, track_evaluated)
    ]
    if (
        context.pointer_if_enforced(location, keyword) is None
    ):  # ignored: at least one branch must fit, and others may
        return context.algebra.unite_value_sets(branches)
    plain = _evaluate_branches(context, schema, location, keyword, False)
    alone = []
    for i, branch in enumerate(branches):
        for j, other in enumerate(plain):
            if i != j:
                branch = context.algebra.subtract_set(branch, other)
        alone.append(branch)
    return context.algebra.unite_value_sets(alone)


def _apply_not(
    context: Context,
    values: ValueSet,
    schema: Schema,
    location: SchemaLocation,
    keyword: str,
    track_evaluated: bool,
) -> ValueSet:
    return context.algebra.subtract_set(
        values, context.values(context.formula_below(location, keyword))
    )


def _apply_if(
    context: Context,
    values: ValueSet,
    schema: Schema,
    location: SchemaLocation,
    keyword: str,
    track_evaluated: bool,
) -> ValueSet:
    condition = context.formula_below(location, "if")
    then, otherwise = (
        context.values(context.formula_below(location, word), track_evaluated)
        if word in schema
        else ANY_VALUE
        for word in ("then", "else")
    )
    algebra = context.algebra
    plain = context.values(condition)
    if all(shape.only_names_members for shape in plain.objects) and plain.arrays in (
        (),
        ANY_VALUE.arrays,
    ):
        met = algebra.intersect_value_sets(context.values(condition, track_evaluated), then)
        unmet = algebra.intersect_value_sets(algebra.complement_values(plain), otherwise)
        # stays separate from other conditions
        return algebra.intersect_value_sets(values, algebra.unite_value_sets([met, unmet]))
    met = algebra.intersect_value_sets(values, context.values(condition, track_evaluated))
    unmet = algebra.subtract_set(values, plain)
    return algebra.unite_value_sets(
        [algebra.intersect_value_sets(met, then), algebra.intersect_value_sets(unmet, otherwise)]
    )


def _apply_dependencies(
    context: Context,
    values: ValueSet,
    schema: Schema,
    location: SchemaLocation,
    keyword: str,
    track_evaluated: bool,
) -> ValueSet:
    for name, requirement in schema[keyword].items():
        if isinstance(requirement, list):
            # The members that a member requires are written before it.
            needed = ObjectShape(
                tuple(Member(each, True, True) for each in dict.fromkeys((*requirement, name)))
            )
            present = replace(NO_VALUE, objects=(needed,))
        else:
            present = replace(NO_VALUE, objects=(ObjectShape((Member(name, True, True),)),))
            present = context.algebra.intersect_value_sets(
                context.values(context.formula_below(location, keyword, name), track_evaluated),
                present,
            )
        absent = replace(ANY_VALUE, objects=(ObjectShape((Member(name, False, False),)),))
        values = context.algebra.intersect_value_sets(
            values, context.algebra.unite_value_sets([present, absent])
        )
    return values


APPLICATORS: dict[
    str, Callable[[Context, ValueSet, Schema, SchemaLocation, str, bool], ValueSet]
] = {
    "$ref": _apply_ref,
    "$dynamicRef": _apply_ref,
    "$recursiveRef": _apply_ref,
    "allOf": _apply_all_of,
    "anyOf": _apply_any_of,
    "dependentRequired": _apply_dependencies,
    "dependentSchemas": _apply_dependencies,
    "dependencies": _apply_dependencies,
    "if": _apply_if,
    "not": _apply_not,
    "oneOf": _apply_one_of,
}
