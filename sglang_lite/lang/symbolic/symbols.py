"""Symbols for values that are only known at run time. A trace uses them in place of the values.

A symbol can be added to a state and formatted into text (`f"{x}"` splits into the text and the
symbol). So can its attributes and items, which are symbols too. Any other question about it, such
as whether it is true, raises TraceError at the line of the body, unless the trace explores: then
a question with few possible answers is a decision, and the body is run again for each answer.
(Not detectable: `x is None`, `isinstance(x, …)` and `repr(x)`.)
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable
from contextvars import ContextVar
from functools import partialmethod
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from sglang_lite.lang.state import user_location
from sglang_lite.program.graph import AccessStep
from sglang_lite.program.nodes import Expression, Expressions
from sglang_lite.protocol import TraceError
from sglang_lite.protocol.parameter import Deferred

if TYPE_CHECKING:
    from sglang_lite.lang.symbolic.recorder import TracedWay

# Path being traced in this context.
traced_way: ContextVar[TracedWay | None] = ContextVar("sglang_lite_traced_way", default=None)
# stands for a symbol in a text that has not been added to a state yet
MARK: Final = re.compile("(\ue002[0-9]+\ue003)")
_numbers = itertools.count()


class SymbolOrigin(NamedTuple):
    """Origin of a symbol. This is an argument or the value of a node, and the attributes and items
    that lead from there to the symbol.

    Attributes:
        name: name of the argument or variable.
        parts: steps from the whole value to the symbol.
        source: node that makes the value, or None for an argument.
    """

    name: str
    parts: tuple[AccessStep, ...] = ()
    source: object = None


class _UnhashableError(TraceError, TypeError):
    pass


class _RuntimeAttribute:
    """Descriptor for an attribute of the symbol itself. While a body is being traced, it returns
    the symbol of the value's attribute of this name instead.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, symbol: Symbol, owner: type[Symbol]) -> Any:
        return (
            getattr(symbol, f"_{self._name}")
            if traced_way.get() is None
            else symbol.__getattr__(self._name)
        )


class Symbol(Expression, Deferred):
    """Value that is not known before the program runs.

    A public attribute of a symbol is the symbol of the value's attribute with that name. Methods
    that this package calls on symbols therefore have names like `__origin__`.

    Args:
        name: Python expression for the symbol.
        origin: origin of the symbol; None for a whole argument.
    """

    __slots__ = ("_mark", "_name", "_origin")

    name = _RuntimeAttribute("name")

    def __init__(self, name: str, *, origin: SymbolOrigin | None = None) -> None:
        self._name = name
        self._mark = ""
        self._origin = origin or SymbolOrigin(name)

    def __origin__(self) -> SymbolOrigin:
        return self._origin

    def _derive_part(self, name: str, step: AccessStep) -> Symbol:
        whole, parts, source = self._origin
        return type(self)(name, origin=SymbolOrigin(whole, (*parts, step), source))

    def __getattr__(self, name: str) -> Symbol:
        if name.startswith("_"):
            raise AttributeError(f"{self!r} has no attribute {name!r}")
        return self._derive_part(f"{self._name}.{name}", ("attribute", name))

    def __getitem__(self, key: object) -> Symbol:
        step: AccessStep = ("item", key) if type(key) in (str, int) else ("other", f"{key!r:.60}")  # type: ignore[assignment] # a str or an int
        return self._derive_part(f"{self._name}[{key!r}]", step)

    def __format__(self, spec: str) -> str:
        if spec:
            self.__refuse__("format it with a specification")
        return str(self)

    def __str__(self) -> str:
        """Returns a mark that stands for the symbol in a text until the text is added to a state.
        Outside a traced body, returns the repr.
        """
        way = traced_way.get()
        if way is None:
            return repr(self)
        self._mark = self._mark or f"\ue002{next(_numbers)}\ue003"
        way.marks[self._mark] = self
        return self._mark

    def __refuse__(self, what: str, kind: type[TraceError] = TraceError) -> NoReturn:
        """Raises the error for a question that a trace can't answer."""
        raise kind(
            f"tracing can't {what}: {self!r} is only known when the program runs.",
            hint="Give the argument to trace(), or run the program.",
            where=user_location(),
        )

    # Questions about the value; they are decisions if the trace explores.

    def _identity_key(self) -> tuple[Any, ...]:
        return self._name, id(self._origin.source)

    def _decide_choice(self, way: TracedWay) -> str | None:
        """Returns the choice that a selection has made on this path. Returns None if the symbol is
        not the value of a selection, or if the choices are unknown.
        """
        choices = self._choices if isinstance(self, SglVariable) else ()
        if not choices:
            return None
        return choices[way.choose_outcome(self, "", choices, (*self._identity_key(), "choice"))]

    def _answer_yes_or_no(self, what: str, question: str, answer: Callable[[Any], Any]) -> bool:
        """Answers a yes-or-no question about the symbol. For the value of a selection, the choice
        on this path determines the answer. For other values, both answers are explored.
        """
        way = _current_explored_path()
        if way is None:
            self.__refuse__(what)
        choice = self._decide_choice(way)
        if choice is not None:
            return bool(answer(choice))
        return not way.choose_outcome(
            self, question, ("True", "False"), (*self._identity_key(), question)
        )

    def __bool__(self) -> bool:
        return self._answer_yes_or_no("tell whether it is true", "", bool)

    def __eq__(self, other: object) -> bool:
        if other is self:
            return True
        if isinstance(other, Symbol):
            return self.__refuse__("compare it")
        way = _current_explored_path()
        key = self._identity_key()
        if way is not None and key in way.equal_values:
            return bool(way.equal_values[key] == other)
        same = self._answer_yes_or_no(
            "compare it", f"== {other!r:.60}", lambda value: value == other
        )
        if same and way is not None:
            way.equal_values[key] = other
        return same

    def _answer_comparison(
        self, compare: Callable[[Any, Any], Any], sign: str, other: object
    ) -> bool:
        if isinstance(other, Symbol):
            self.__refuse__("compare it")
        return self._answer_yes_or_no(
            "compare it", f"{sign} {other!r:.60}", lambda value: compare(value, other)
        )

    __lt__ = partialmethod(_answer_comparison, operator.lt, "<")
    __le__ = partialmethod(_answer_comparison, operator.le, "<=")
    __gt__ = partialmethod(_answer_comparison, operator.gt, ">")
    __ge__ = partialmethod(_answer_comparison, operator.ge, ">=")

    def __contains__(self, item: object) -> bool:
        return self._answer_yes_or_no(
            "tell what is in it", f"contains {item!r:.60}", lambda value: item in value
        )

    def __hash__(self) -> int:
        way = _current_explored_path()
        choice = None if way is None else self._decide_choice(way)
        return self.__refuse__("look it up", _UnhashableError) if choice is None else hash(choice)

    def __add__(self, other: object) -> Expressions:
        return super().__add__(_check_summand(self, other))

    def __radd__(self, other: object) -> Expressions:
        return super().__radd__(_check_summand(self, other))


def _current_explored_path() -> TracedWay | None:
    way = traced_way.get()
    return None if way is None or way.forced is None else way


def _check_summand(symbol: Symbol, other: Any) -> Any:
    return other if isinstance(other, str | Expression) else symbol.__refuse__("calculate with it")


_BINARY = (
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "divmod",
    "pow",
    "and",
    "or",
    "xor",
)
# Operations that no trace can carry out, by the name of their method.
_REFUSED = {
    "call": "call it",
    "len": "tell how long it is",
    "iter": "go through it",
    **dict.fromkeys(("int", "index", "float"), "turn it into a number"),
    **dict.fromkeys(("neg", "pos", "abs", "invert", "round"), "calculate with it"),
    **dict.fromkeys((*_BINARY, *(f"r{each}" for each in _BINARY)), "calculate with it"),
}


def _refusal_method(what: str) -> Callable[..., NoReturn]:
    def raise_refusal(symbol: Symbol, *_: object, **__: object) -> NoReturn:
        symbol.__refuse__(what)

    return raise_refusal


for _operator, _what in _REFUSED.items():
    setattr(Symbol, f"__{_operator}__", _refusal_method(_what))


class SglArgument(Symbol):
    """Symbol for an argument that was not given to the trace."""

    __slots__ = ("_value",)

    value = _RuntimeAttribute("value")

    def __init__(
        self, name: str, value: object = None, *, origin: SymbolOrigin | None = None
    ) -> None:
        super().__init__(name, origin=origin)
        self._value = value

    def __repr__(self) -> str:
        return f"Argument(name={self._name!r})"


class SglVariable(Symbol):
    """Symbol for the value of a node. `choices` contains its possible values, or nothing if they
    are unknown.
    """

    __slots__ = ("_choices", "_source")

    source = _RuntimeAttribute("source")

    def __init__(
        self,
        name: str,
        source: object = None,
        choices: tuple[str, ...] = (),
        *,
        origin: SymbolOrigin | None = None,
    ) -> None:
        super().__init__(name, origin=origin or SymbolOrigin(name, source=source))
        self._source = source
        self._choices = choices

    def __repr__(self) -> str:
        return f"Variable({self._name!r})"
