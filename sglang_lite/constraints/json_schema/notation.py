"""The interface between what writes arrays and objects and what writes their items and members."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

from sglang_lite.constraints.formal.nodes import Node, Ref
from sglang_lite.constraints.json_schema.formulas import Formula
from sglang_lite.constraints.json_schema.reader import SchemaReader
from sglang_lite.constraints.json_schema.values import ArrayShape, ObjectShape
from sglang_lite.constraints.json_schema.watched import Watches


class Notation(Protocol):
    """Texts of arrays and objects, as JSON (writer.py) or between tags (write_tagged.py).

    Attributes:
        opening, closing: around the items of an array.
        comma: between them.
        any_order: members may come in any order.
        plain: each number is spelt in one way.
        watches: takes shapes of which the masks watch what the grammar does not say; None where nobody does.
    """

    reader: SchemaReader
    opening: Node
    closing: Node
    comma: Node
    any_order: bool
    plain: bool
    watches: Watches | None

    def rule(self, key: Hashable, body: Callable[[], Node]) -> Ref:
        """A reference to the rule of a key. Its body is worked out later."""
        ...

    def number(self, shape: ArrayShape | ObjectShape) -> int:
        """Number that stands for a shape in the keys of its rules."""
        ...

    def item(self, formula: Formula) -> Node:
        """The texts of an item."""
        ...

    def different_item(self, formula: Formula) -> Node:
        """The texts of an item that has to differ from others, its numbers spelt in one way."""
        ...

    def listed_texts(self, formula: Formula) -> Node:
        """The texts of a formula's values, each spelt in one way, as a regular node.

        Raises:
            ConstraintError: of such values there is none, as some have names that are not listed, say.
        """
        ...

    def member(self, names: Node, formula: Formula, *, first: bool) -> Node:
        """The texts of a member, with what stands before its name."""
        ...

    def end(self, *, empty: bool) -> Node:
        """Text after the last member."""
        ...
