"""Interface between the writers of arrays and objects and the writers of their items and members."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

from sglang_lite.constraints.formal.nodes import Node, Ref
from sglang_lite.constraints.json_schema.formulas import Formula
from sglang_lite.constraints.json_schema.mask_rules import MaskedShapes
from sglang_lite.constraints.json_schema.reader import SchemaReader
from sglang_lite.constraints.json_schema.values import ArrayShape, ObjectShape


class ContainerWriter(Protocol):
    """Writes arrays and objects, as JSON (grammar_writer.py) or between tags (write_tagged.py).

    Attributes:
        reader: reader of the schema.
        opening, closing: text around the items of an array.
        comma: text between items.
        any_order: True if members may come in any order.
        plain: True if each number has exactly one spelling.
        masked_shapes: collects the shapes whose remaining rules masks enforce; None if masks
            enforce no rules.
    """

    reader: SchemaReader
    opening: Node
    closing: Node
    comma: Node
    any_order: bool
    plain: bool
    masked_shapes: MaskedShapes | None

    def rule(self, key: Hashable, body: Callable[[], Node]) -> Ref:
        """Returns a reference to the rule for a key. `body` computes the rule's body and is called
        later.
        """
        ...

    def number(self, shape: ArrayShape | ObjectShape) -> int:
        """Returns the number that identifies a shape in the keys of its rules."""
        ...

    def write_item(self, formula: Formula) -> Node:
        """Returns a node for the texts of an item whose value `formula` allows."""
        ...

    def write_unique_item(self, formula: Formula) -> Node:
        """Returns a node for the texts of an item that must differ from other items. Each number
        has exactly one spelling.
        """
        ...

    def write_listed_values(self, formula: Formula) -> Node:
        """Returns a regular node of the texts of a formula's values, with exactly one spelling for
        each value.

        Raises:
            ConstraintError: the values have no regular node, for example because objects may have
                unlisted names.
        """
        ...

    def member(self, names: Node, formula: Formula, *, first: bool) -> Node:
        """Returns a node for the texts of a member, including the text before its name."""
        ...

    def text_after_members(self, *, empty: bool) -> Node:
        """Returns a node for the text after the last member."""
        ...
