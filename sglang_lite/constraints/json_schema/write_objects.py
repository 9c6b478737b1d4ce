"""Grammar of objects: members named in the schema in its order, then other members in any order.

The named members are halved recursively, so that rules for thousands of them nest only a
dozen levels deep. If members are counted, some must meet `requirements`, or there are
choices, each rule stands for a position between members instead: the count, the
requirements met so far and the chosen alternative. The members of one choice are written
one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from sglang_lite.constraints.formal.counting import count_texts
from sglang_lite.constraints.formal.nodes import (
    ANY_TEXT,
    NOTHING,
    Node,
    Ref,
    alternation,
    concat,
    literal,
    optional,
    repeat,
)
from sglang_lite.constraints.json_schema.container_writer import ContainerWriter
from sglang_lite.constraints.json_schema.formulas import all_of
from sglang_lite.constraints.json_schema.requirements import (
    Met,
    Requirement,
    drop_implied_requirements,
    value_formulas,
)
from sglang_lite.constraints.json_schema.values import Member, ObjectShape, intersection_of_strings
from sglang_lite.constraints.json_schema.write_any_order import (
    AnyOrder,
    has_unlisted_names,
    leave_finite_names_to_masks,
    leave_names_to_masks,
)
from sglang_lite.protocol import ConstraintError

MAX_COUNTED = 300  # maximum number of named members if members are counted


def write_object(writer: ContainerWriter, shape: ObjectShape, *, alone: bool = True) -> Node:
    """Returns a node for the texts of the objects of a shape.

    Args:
        alone: whether no other shape of objects is possible in this place.

    Raises:
        ConstraintError: the shape has too many members to count or to write in any order.
    """
    if shape.requires_too_many_members() or any(
        member.required and member.formula is False for member in shape.members
    ):
        return NOTHING
    if writer.any_order and not shape.choices:
        return AnyOrder(writer, shape.expand_finite_names()).build_object_texts(alone=alone)
    object_writer = _ObjectWriter(writer, shape.expand_finite_names())
    by_position = object_writer.counts or shape.requirements or shape.choices
    return object_writer.write_by_position() if by_position else object_writer.write_by_halves()


class _ObjectWriter:
    def __init__(self, writer: ContainerWriter, shape: ObjectShape) -> None:
        self._writer = writer
        self._shape = shape
        self._number = writer.number(shape)
        self._members = [member for member in shape.members if member.formula is not False]
        self._others = shape.others_outside_members()
        self._requirements = drop_implied_requirements(shape.requirements)
        required = sum(member.required for member in self._members)
        self._choice_of = {
            m.name: i for i, choice in enumerate(shape.choices) for s in choice for m in s.members
        }
        self._least = shape.least if shape.least > required else 0
        self._most = shape.most if self._others or (shape.most or 0) < len(self._members) else None
        # otherwise it only matters whether a member was written
        self._exact = self._least > 1 or self._most is not None
        self.counts = bool(self._members) and self._exact
        if self._others:
            leave_finite_names_to_masks(writer, self._shape, self._others)
            self._guard_against_repeated_names(required)

    def _guard_against_repeated_names(self, required: int) -> None:
        """Leaves the names to the masks if a repeated name could break counts or requirements.

        The grammar can't exclude repeated names, and a JSON parser keeps only the last value of a
        name. Raises ConstraintError if no masks check the names.
        """
        counting = self._shape.least - required > 1 and self._shape.count_pointer is not None
        if (
            counting
            and self._writer.masked_shapes is not None
            and has_unlisted_names(self._others, self._shape.least)
        ):
            leave_names_to_masks(self._writer, self._shape, self._others)
        elif counting:
            raise ConstraintError(
                "json_schema: the number of members can't be enforced: unlisted names may repeat.",
                pointer=self._shape.count_pointer,
                hint="List the names in properties or propertyNames, or set enforce='best_effort'.",
            )
        requirements = [
            intersection_of_strings(names, self._shape.unlisted_names_language)
            for names, _ in self._requirements
        ]
        if not any(
            intersection_of_strings(a, b) != NOTHING for a, b in combinations(requirements, 2)
        ):
            return
        if self._writer.masked_shapes is not None and all(
            count_texts(names).count is None for names in requirements
        ):
            leave_names_to_masks(self._writer, self._shape, self._others)
        else:
            raise ConstraintError(
                "json_schema: several members whose names match patterns are required (by negations), and nothing "
                "keeps their names different.",
                hint="List the possible names in properties.",
            )

    # ---------------------------------------------------------------------- named members by halves

    def write_by_halves(self) -> Node:
        members = self._members
        options = (
            [concat(self._write_first_members(0, len(members)), self._write_unlisted_members(1))]
            if members
            else []
        )
        if not any(member.required for member in members):
            options.append(self._write_unlisted_members(0))
        return alternation(options)

    def _write_object_member(self, index: int, count: int) -> Node:
        member = self._members[index]
        return self._writer.member(literal(member.name), member.formula, first=not count)

    def _write_first_members(self, start: int, end: int) -> Node:
        """Returns a node for the texts of the named members from `start` to `end` at the beginning
        of an object. At least one of them is present.
        """
        if end - start == 1:
            return self._write_object_member(start, 0)
        return self._writer.rule(
            (self._number, "first", start, end), lambda: self._write_first_half(start, end)
        )

    def _write_first_half(self, start: int, end: int) -> Node:
        middle = (start + end) // 2
        options = [
            concat(self._write_first_members(start, middle), self._write_more_members(middle, end))
        ]
        if not any(member.required for member in self._members[start:middle]):
            options.append(self._write_first_members(middle, end))
        return alternation(options)

    def _write_more_members(self, start: int, end: int) -> Node:
        """Returns a node for the texts of the named members from `start` to `end`, which come after
        other members.
        """
        if end - start == 1:
            member = self._write_object_member(start, 1)
            return member if self._members[start].required else optional(member)
        middle = (start + end) // 2
        key = self._number, "more", start, end
        return self._writer.rule(
            key,
            lambda: concat(
                self._write_more_members(start, middle), self._write_more_members(middle, end)
            ),
        )

    def _write_unlisted_members(self, count: int, met: Met = frozenset()) -> Node:
        """Returns a node for the texts of unlisted members and the end of the object, after `count`
        other members. Members that meet requirements come last, so that no later member can repeat
        their names.
        """
        unmet = [requirement for i, requirement in enumerate(self._requirements) if i not in met]
        least = max(0, self._least - count - len(unmet))
        most = None if self._most is None else self._most - count - len(unmet)
        options = (
            [self._write_object_end(count, unmet)]
            if least == 0 and (most is None or most >= 0)
            else []
        )
        if self._others and (most is None or most > 0):
            more = repeat(
                self._write_requirement_member(1),
                max(0, least - 1),
                None if most is None else most - 1,
            )
            options.append(
                concat(
                    self._write_requirement_member(count), more, self._write_object_end(1, unmet)
                )
            )
        return alternation(options)

    def _write_requirement_member(
        self, count: int, requirement: Requirement = (ANY_TEXT, True)
    ) -> Node:
        """Returns a node for the texts of an unlisted member that meets a requirement."""
        return alternation(
            self._writer.member(part, all_of(formula, requirement[1]), first=not count)
            for names, formula in self._others
            if (part := intersection_of_strings(names, requirement[0])) != NOTHING
        )

    def _write_object_end(self, count: int, unmet: Sequence[Requirement] = ()) -> Node:
        """Returns a node for the texts of members that meet the given requirements, and the end of
        the object.
        """
        parts = [
            self._write_requirement_member(count + i, requirement)
            for i, requirement in enumerate(unmet)
        ]
        return concat(*parts, self._writer.text_after_members(empty=not count and not unmet))

    # ------------------------------------------------------------------------- positions and counts

    def write_by_position(self) -> Node:
        if len(self._members) > MAX_COUNTED:
            raise ConstraintError(
                f"json_schema: more than {MAX_COUNTED} properties can't be counted."
            )
        return self._member_position_rule(0, 0, frozenset())

    def _member_position_rule(
        self, index: int, count: int, met: Met, chosen: int | None = None
    ) -> Ref:
        """Returns a reference to the rule for a position between members, where the named members
        from `index` on may follow.

        Args:
            chosen: alternative of the current choice that holds, or None if none is chosen yet.
        """
        key = self._number, index, count, met, chosen
        return self._writer.rule(
            key, lambda: self._write_member_position(index, count, met, chosen)
        )

    def _write_member_position(self, index: int, count: int, met: Met, chosen: int | None) -> Node:
        if index == len(self._members):
            return self._write_unlisted_members(count, met)
        member = self._members[index]
        choice = self._choice_of.get(member.name)
        if choice is not None:
            alternatives = self._shape.choices[choice]
            if chosen is None:
                return alternation(
                    self._member_position_rule(index, count, met, i)
                    for i in range(len(alternatives))
                )
            own = next((m for m in alternatives[chosen].members if m.name == member.name), None)
            if own is not None:
                member = Member(
                    member.name,
                    all_of(member.formula, own.formula),
                    member.required or own.required,
                )
            if (
                index + 1 == len(self._members)
                or self._choice_of.get(self._members[index + 1].name) != choice
            ):
                chosen = None
        options: list[Node] = []
        if member.formula is not False and (self._most is None or count < self._most):
            name = literal(member.name)
            now = count + 1 if self._exact else 1
            options += [
                concat(
                    self._writer.member(name, formula, first=not count),
                    self._member_position_rule(index + 1, now, now_met, chosen),
                )
                for formula, now_met in value_formulas(member, self._requirements, met)
            ]
        if not member.required:
            options.append(self._member_position_rule(index + 1, count, met, chosen))
        return alternation(options)
