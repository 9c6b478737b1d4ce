"""Sets of JSON values as grammars of their texts, in one style.

Every lexeme is a scalar, `[`, `]`, `, `, `{}`, `}`, or a name with all that stands around it (`{"a": `, `, "a": `):
wherever two values may stand in one place, their lexemes end in the same places, so that an engine that reads lexemes
greedily (llguidance) reads exactly this language.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

from sglang_lite.constraints.languages import pruned
from sglang_lite.constraints.nodes import NOTHING, Language, Node, Ref, alternation, literal
from sglang_lite.constraints.normal import decimals
from sglang_lite.constraints.normal.formulas import At, Formula
from sglang_lite.constraints.normal.reader import Reader
from sglang_lite.constraints.normal.strings import quoted
from sglang_lite.constraints.normal.values import Arrays, Objects, Values
from sglang_lite.constraints.normal.write_arrays import array_text
from sglang_lite.constraints.normal.write_objects import object_text
from sglang_lite.protocol import ConstraintError

MAX_RULES = 30_000  # llguidance 1.9.1 takes 65,000 symbols, lexemes included


class Writer:
    """
    Args:
        reader: of the schema.
        separators: what stands between items, and after names.
    """

    def __init__(self, reader: Reader, separators: tuple[str, str]) -> None:
        self.reader = reader
        self.comma, self.colon = separators
        self._names: dict[Hashable, str] = {}
        self._numbers: dict[Arrays | Objects, int] = {}
        self._to_do: deque[tuple[str, Callable[[], Node]]] = deque()

    def language(self, formula: Formula) -> Language:
        """The texts of the values in a formula.

        Raises:
            ConstraintError: there are none, or something can't be enforced, with its JSON Pointer.
        """
        start = self.value(formula)
        rules: dict[str, Node] = {}
        while self._to_do:
            name, body = self._to_do.popleft()
            rules[name] = body()
            if len(rules) > MAX_RULES:
                raise ConstraintError(f"json_schema: too large: its grammar needs more than {MAX_RULES:,} rules.")
        return pruned(Language(start.name, rules, frozenset({start.name})))

    def rule(self, key: Hashable, body: Callable[[], Node]) -> Ref:
        """A reference to the rule of a key. Its body is worked out later."""
        if key not in self._names:
            self._names[key] = f"v{len(self._names)}"
            self._to_do.append((self._names[key], body))
        return Ref(self._names[key])

    def number(self, shape: Arrays | Objects) -> int:
        """What stands for a shape in the keys of its rules."""
        return self._numbers.setdefault(shape, len(self._numbers))

    def value(self, formula: Formula) -> Ref:
        """A reference to the texts of a formula's values."""
        return self.rule(formula, lambda: self._body(formula))

    def _body(self, formula: Formula) -> Node:
        try:
            return self._texts(self.reader.values(formula))
        except ConstraintError as error:
            if error.pointer is not None or not isinstance(formula, At):
                raise
            raise ConstraintError(error.message, pointer=formula.place.pointer, hint=error.hint) from error

    def _texts(self, values: Values) -> Node:
        options: list[Node] = [literal("null")] if values.null else []
        options += [literal(text) for value, text in ((True, "true"), (False, "false")) if value in values.booleans]
        options.append(decimals.texts(values.numbers))
        if values.strings != NOTHING:
            options.append(quoted(values.strings))
        options += [array_text(self, shape) for shape in values.arrays]
        options += [object_text(self, shape) for shape in values.objects]
        return alternation(options)
