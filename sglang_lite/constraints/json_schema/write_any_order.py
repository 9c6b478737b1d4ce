"""Grammar of objects whose members come in any order.

Rules remember which members have been written: all members if they are few, or the
required ones if further names are unlimited. If that is too much for a grammar, the
grammar lets members repeat and the masks check the names (mask_rules.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from sglang_lite.constraints.formal.automaton import accepts
from sglang_lite.constraints.formal.counting import count_texts
from sglang_lite.constraints.formal.nodes import (
    NOTHING,
    Complement,
    Node,
    Ref,
    alternation,
    concat,
    literal,
    literal_texts,
    repeat,
)
from sglang_lite.constraints.json_schema.container_writer import ContainerWriter
from sglang_lite.constraints.json_schema.formulas import Formula, all_of
from sglang_lite.constraints.json_schema.mask_rules import (
    UNIQUE_NAMES_ONLY,
    DistinctNames,
    build_name_rule,
)
from sglang_lite.constraints.json_schema.requirements import (
    Met,
    drop_implied_requirements,
    subsets,
    value_formulas,
)
from sglang_lite.constraints.json_schema.values import ObjectShape, intersection_of_strings
from sglang_lite.protocol import ConstraintError

MAX_ANY_ORDER = 400  # maximum number of named members in any order
MAX_REMEMBERED = 8  # maximum number of members whose presence a grammar remembers
UNLIMITED_NAMES = 10**9  # this many names count as unlimited
MAX_REQUIREMENTS = 4  # maximum number of requirements (required members whose names match patterns)
_MAX_REQUIRED_IF_ALONE = 4  # up to this many required members, remembering costs less than masks

_Other = tuple[Node, Formula]
_Written = frozenset[int]


def leave_names_to_masks(
    writer: ContainerWriter,
    shape: ObjectShape,
    others: Sequence[_Other],
    *,
    in_any_order: bool = False,
) -> None:
    """Lets the masks check the names in a shape's objects: no name occurs twice and, if
    `in_any_order`, all required names are present.
    """
    assert writer.masked_shapes is not None
    rule = UNIQUE_NAMES_ONLY
    if in_any_order:
        rule = build_name_rule(shape)
    elif any(map(_may_exhaust_names, others)):
        rule = _rule_for_names_only(shape)
    writer.masked_shapes.names[shape] = rule, None if in_any_order else shape.count_pointer


def leave_finite_names_to_masks(
    writer: ContainerWriter, shape: ObjectShape, others: Sequence[_Other]
) -> None:
    """Lets the masks reject the beginning of a name if every name with this beginning is used, such
    as a second `"0"` in a dictionary with integer keys. Does nothing if the names never run out or
    are too complex to count.
    """
    if writer.masked_shapes is None or not any(map(_may_exhaust_names, others)):
        return
    rule = _rule_for_names_only(shape)
    with suppress(ConstraintError):
        count_texts(rule.names)
        writer.masked_shapes.scarce_names[shape] = rule


def _rule_for_names_only(shape: ObjectShape) -> DistinctNames:
    return replace(build_name_rule(shape), required=frozenset(), least=0)


def _may_exhaust_names(other: _Other) -> bool:
    """Returns True if names may run out, because some beginning has only finitely many names."""
    names, _ = other
    # the usual case of open objects
    if isinstance(names, Complement) and literal_texts(names.node) is not None:
        return False
    try:
        return not count_texts(names).endless
    except ConstraintError:  # too complex
        return False


def has_unlisted_names(others: Sequence[_Other], least: int) -> bool:
    """Returns True if the languages in `others` together contain at least `least` names."""
    counts = [_count_names(names) for names, _ in others]
    return None in counts or sum(count or 0 for count in counts) >= least


def _count_names(names: Node) -> int | None:
    # the usual case of open objects
    if isinstance(names, Complement) and literal_texts(names.node) is not None:
        return None
    return count_texts(names).count


class AnyOrder:
    """Writes the objects of a shape with members in any order.

    Args:
        writer: writer of the whole JSON text.
        shape: shape whose names are listed as members wherever they are finitely many.
    """

    def __init__(self, writer: ContainerWriter, shape: ObjectShape) -> None:
        self._writer = writer
        self._shape = shape
        self._number = writer.number(shape)
        self._members = [member for member in shape.members if member.formula is not False]
        self._required = frozenset(i for i, member in enumerate(self._members) if member.required)
        self._others = shape.others_outside_members()
        self._requirements = drop_implied_requirements(shape.requirements)
        self._most = shape.most if self._others or (shape.most or 0) < len(self._members) else None
        self._least = shape.least  # minimum that the grammar itself counts
        self._remembered: _Written = frozenset()

    def build_object_texts(self, *, alone: bool) -> Node:
        """Returns a node for the texts of the objects.

        Args:
            alone: whether no other shape of objects is possible in this place.

        Raises:
            ConstraintError: the shape has too many members or requirements, or its counts can't
                be enforced in any order.
        """
        shape = self._shape
        count = len(self._members)
        if count > MAX_ANY_ORDER:
            raise _order_refusal_error(
                f"{count} members; at most {MAX_ANY_ORDER} can be in any order"
            )
        if len(self._requirements) > MAX_REQUIREMENTS:
            raise _order_refusal_error(
                f"{len(self._requirements)} members whose names match patterns are required (by negations); at most "
                f"{MAX_REQUIREMENTS} can be in any order"
            )
        unlimited = bool(self._others) and has_unlisted_names(self._others, UNLIMITED_NAMES)
        few = len(self._required) <= (_MAX_REQUIRED_IF_ALONE if alone else MAX_REMEMBERED)
        if not self._others and count <= MAX_REMEMBERED:
            self._remembered = frozenset(range(count))
        elif unlimited and self._most is None and shape.least <= 1 and few:
            self._remembered = self._required
            self._check_requirements()
            if self._requirements and self._writer.masked_shapes is not None:
                leave_names_to_masks(self._writer, shape, self._others)
            else:
                leave_finite_names_to_masks(self._writer, shape, self._others)
        else:
            return self._text_checked_by_masks()
        return self._position_rule(frozenset(), frozenset(), empty=True)

    def _check_requirements(self) -> None:
        """Raises ConstraintError for requirements that can't be enforced in any order. Their names
        might run out, or be repeated where masks don't check names.
        """
        if not self._requirements:
            return
        if self._writer.masked_shapes is None:
            raise _order_refusal_error(
                "inside another constraint, required members whose names match patterns can't be in any order"
            )
        for i in range(len(self._requirements)):
            if not has_unlisted_names(
                self._unlisted_names_meeting(frozenset({i})), UNLIMITED_NAMES
            ):
                raise _order_refusal_error(
                    "a required member whose pattern has few names can't be in any order"
                )

    def _text_checked_by_masks(self) -> Node:
        """Returns a node for texts in which the grammar lets members repeat; masks check names."""
        if self._most is not None and (self._required or self._requirements):
            raise _order_refusal_error(
                "maxProperties can't be enforced for required members in any order"
            )
        if self._writer.masked_shapes is None:
            raise _order_refusal_error(
                f"inside another constraint, at most {MAX_REMEMBERED} members can be in any order"
            )
        self._check_requirements()
        leave_names_to_masks(self._writer, self._shape, self._others, in_any_order=True)
        self._least = min(1, self._least)
        if self._requirements:
            return self._position_rule(frozenset(), frozenset(), empty=True)
        more = repeat(
            self._write_any_member(first=False), 0, None if self._most is None else self._most - 1
        )
        some = concat(
            self._write_any_member(first=True), more, self._writer.text_after_members(empty=False)
        )
        none = (
            NOTHING
            if self._required or self._shape.least
            else self._writer.text_after_members(empty=True)
        )
        return alternation([none, NOTHING if self._most == 0 else some])

    # -------------------------------------------------------------------------------------- members

    def _write_any_member(self, met: Met = frozenset(), *, first: bool) -> Node:
        """Returns a node for the texts of one member that the grammar does not keep track of. Its
        name may be listed or unlisted.

        Args:
            met: requirements that the member meets.
        """

        def body() -> Node:
            free = (i for i in range(len(self._members)) if i not in self._remembered)
            named = [
                self._write_listed_member(i, met, first=first)
                for i in free
                if self._name_may_meet(self._members[i].name, met)
            ]
            others = (
                self._writer.member(names, f, first=first)
                for names, f in self._unlisted_names_meeting(met)
            )
            return alternation([*named, *others])

        return self._writer.rule((self._number, "any", met, first), body)

    def _name_may_meet(self, name: str, requirements: Met) -> bool:
        return all(accepts(self._requirements[i][0], name) for i in requirements)

    def _unlisted_names_meeting(self, requirements: Met) -> list[_Other]:
        """Returns the unlisted names that meet all of the given requirements, as languages. Each
        comes with the formula of the members' values.
        """
        found = []
        for names, formula in self._others:
            for i in requirements:
                names = intersection_of_strings(names, self._requirements[i][0])
                formula = all_of(formula, self._requirements[i][1])
            if names != NOTHING and not self._writer.reader.is_known_empty(formula):
                found.append((names, formula))
        return found

    def _write_listed_member(self, index: int, met: Met = frozenset(), *, first: bool) -> Node:
        member = self._members[index]
        formula = all_of(member.formula, *(self._requirements[i][1] for i in sorted(met)))
        return self._writer.member(literal(member.name), formula, first=first)

    # ------------------------------------------------------------------------------------ positions

    def _position_rule(self, written: _Written, met: Met, *, empty: bool) -> Ref:
        """Returns a reference to the rule for the position after some members.

        Args:
            written: remembered members that have been written.
            met: requirements that have been met.
            empty: whether no member has been written.
        """
        return self._writer.rule(
            (self._number, "position", written, met, empty),
            lambda: self._write_position_body(written, met, empty=empty),
        )

    def _write_position_body(self, written: _Written, met: Met, *, empty: bool) -> Node:
        options: list[Node] = []
        required = self._required & self._remembered
        if (
            required <= written
            and len(met) == len(self._requirements)
            and max(len(written), int(not empty)) >= self._least
        ):
            options.append(self._writer.text_after_members(empty=empty))
        for i in sorted(self._remembered - written):
            now = written | {i}
            if self._most is None or len(now) + len(required - now) <= self._most:
                for formula, now_met in value_formulas(self._members[i], self._requirements, met):
                    member = self._writer.member(
                        literal(self._members[i].name), formula, first=empty
                    )
                    options.append(concat(member, self._position_rule(now, now_met, empty=False)))
        if self._others or len(self._remembered) < len(self._members):
            unmet = [i for i in range(len(self._requirements)) if i not in met]
            options += (
                concat(
                    self._write_any_member(more, first=empty),
                    self._position_rule(written, met | more, empty=False),
                )
                for more in subsets(unmet)
            )
        return alternation(options)


def _order_refusal_error(problem: str) -> ConstraintError:
    return ConstraintError(
        f"json_schema: {problem}.",
        hint="Use order='schema', and list the members in the wanted order.",
    )
