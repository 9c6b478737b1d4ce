"""Symbols, which stand in a trace for values that only a run has, and the log of the trace that they belong to.

A symbol can be added to a state and formatted into text (`f"{x}"` splits into the text and the symbol), and so can its
attributes and items, which are symbols too. Any other question, such as whether it is true, raises TraceError at the
line of the body, unless the trace explores: then a question with few possible answers is a decision, and the body is
run again for each answer. (Not detectable: `x is None`, `isinstance(x, …)` and `repr(x)`.)
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

from sglang_lite.lang.state import user_location
from sglang_lite.program.nodes import Expression, Expressions
from sglang_lite.protocol import Location, TraceError
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.sampling import Deferred

if TYPE_CHECKING:
    from sglang_lite.lang.backend.remote.shared_call import SharedCall
    from sglang_lite.lang.backend.remote.turn_plan import TurnPlan
    from sglang_lite.lang.expressions import SglGen, SglSelect
    from sglang_lite.lang.tracer import TracerProgramState

# Maximum number of steps of a trace; equals the limit on queued nodes in runtime/core/submission.py (a test compares
# them).
MAX_NODES: Final = 100_000
MAX_DECISIONS: Final = 64  # maximum number of decisions on a path


class EndlessError(TraceError):
    """The body adds nodes or makes decisions without end."""


class _UnhashableError(TraceError, TypeError):
    pass


class CutError(BaseException):
    """Ends a trace on purpose. A BaseException, so that bodies don't catch it."""


def is_limit(error: BaseException) -> bool:
    """Returns True if an error is a limit of tracing, not a fault of the body."""
    return isinstance(error, TraceError) and not isinstance(error, EndlessError)


@dataclass(frozen=True, slots=True, eq=False)
class TracedQuestion:
    """Question of the body whose answer only a run has.

    Attributes:
        symbol: symbol of the value that the question is about.
        question: question as written in Python.
        outcomes: all possible answers.
        outcome: index of the answer with which the trace continued.
    """

    symbol: Symbol
    question: str
    outcomes: tuple[str, ...]
    outcome: int


@dataclass(slots=True, eq=False)
class Entry:
    """Step of a trace.

    Attributes:
        state: state that the node was added to, or None for a decision.
        node: added node, or the decision.
        where: line of the user's code, or None if unknown.
        expression: user's expression of a generation or selection.
        states: states that a fork or a call has begun, or that a join ends.
        turn: plan of a generation's turn and the generation's index in it; only set in traces for `explain`.
        shared_call: call that a generation may share with other branches; only set in traces for `explain`.
    """

    state: TracerProgramState | None
    node: Expression | TracedQuestion
    where: Location | None
    expression: SglGen | SglSelect | None = None
    states: tuple[TracerProgramState, ...] = ()
    turn: tuple[TurnPlan, int] | None = None
    shared_call: SharedCall | None = None


@dataclass(slots=True, eq=False)
class TraceLog:
    """Log of a trace's steps in order, including those of inner programs.

    Attributes:
        forced: outcomes of the first decisions; later decisions take their first outcome. None if the trace does not
            explore.
        remaining_steps: number of steps that the trace may still make.
        entries: steps so far.
        marks: symbols by the marks that stand for them in texts.
        decisions: decisions so far.
        reads: symbols of the variables that the body has read.
        question_lines: lines of the body that ask questions.
        equal_values: values that symbols are known to be equal to on this path, by key of the symbol.
    """

    forced: tuple[int, ...] | None = None
    remaining_steps: int = MAX_NODES
    entries: list[Entry] = field(default_factory=list)
    marks: dict[str, Symbol] = field(default_factory=dict)
    decisions: list[TracedQuestion] = field(default_factory=list)
    reads: list[Symbol] = field(default_factory=list)
    question_lines: set[Location] = field(default_factory=set)
    equal_values: dict[Any, object] = field(default_factory=dict)
    _outcomes: dict[Any, int] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        self.step()
        self.entries.append(entry)

    def step(self) -> None:
        """Counts a step. Raises EndlessError if the trace has made too many."""
        self.remaining_steps -= 1
        if self.remaining_steps < 0:
            raise EndlessError(
                f"the body has added nodes or made decisions {MAX_NODES:,} times without ending.",
                hint="Bound each loop whose end depends on a run, as in `for step in range(8):`.",
                where=user_location(),
            )

    def decide(self, symbol: Symbol, question: str, outcomes: tuple[str, ...], key: object) -> int:
        """Index of a decision's outcome in this trace; the same question always has the same answer. Raises CutError if
        the path has too many decisions."""
        if (where := user_location()) is not None:
            self.question_lines.add(where)
        if key in self._outcomes:
            self.step()
            return self._outcomes[key]
        if len(self.decisions) == MAX_DECISIONS:
            raise CutError
        at = len(self.decisions)
        assert self.forced is not None
        outcome = self.forced[at] if at < len(self.forced) else 0
        decision = TracedQuestion(symbol, question, outcomes, outcome)
        self.decisions.append(decision)
        self.add(Entry(None, decision, where))
        self._outcomes[key] = outcome
        return outcome


recording: ContextVar[TraceLog | None] = ContextVar("sglang_lite_recording", default=None)
_numbers = itertools.count()
MARK: Final = re.compile("(\ue002[0-9]+\ue003)")


Steps: TypeAlias = tuple[tuple[str, object], ...]


class _RuntimeAttribute:
    """Descriptor for an attribute of the symbol itself. While a body is being traced, it returns the symbol of the
    value's attribute with that name instead."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, symbol: Symbol, owner: type[Symbol]) -> Any:
        return getattr(symbol, f"_{self._name}") if recording.get() is None else symbol.__getattr__(self._name)


class Symbol(Expression, Deferred):
    """Value that is not known before the program runs.

    Public attributes of a symbol are symbols of the value's attributes. This package therefore uses methods with two
    underscores on each side.

    Args:
        name: expression of the symbol in Python.
        parts_of: symbol of the whole value, and the steps from it to this part; None for a whole value.
    """

    __slots__ = ("_mark", "_name", "_parts_of")

    name = _RuntimeAttribute("name")

    def __init__(self, name: str, *, parts_of: tuple[Symbol, Steps] | None = None) -> None:
        self._name = name
        self._mark = ""
        self._parts_of: tuple[Symbol, Steps] = parts_of or (self, ())

    def _part(self, kind: str, key: object) -> Symbol:
        root, steps = self._parts_of
        name = self._name + (f".{key}" if kind == "attribute" else f"[{key!r}]")
        return type(self)(name, parts_of=(root, (*steps, (kind, key))))

    def __origin__(self) -> SymbolOrigin:
        root, steps = self._parts_of
        return SymbolOrigin(self._name, (), None, self) if root is self else replace(root.__origin__(), parts=steps)

    def __getattr__(self, name: str) -> Symbol:
        if name.startswith("_"):
            raise AttributeError(f"{self!r} has no attribute {name!r}")
        return self._part("attribute", name)

    def __getitem__(self, key: object) -> Symbol:
        return self._part("item", key)

    def __format__(self, spec: str) -> str:
        if spec:
            self.__refuse__("format it with a specification")
        return str(self)

    def __str__(self) -> str:
        """Mark that stands for the symbol in texts of a body that is being traced, until the text is added to a
        state."""
        record = recording.get()
        if record is None:
            return repr(self)
        self._mark = self._mark or f"\ue002{next(_numbers)}\ue003"
        record.marks[self._mark] = self
        return self._mark

    def __refuse__(self, what: str, kind: type[TraceError] = TraceError) -> NoReturn:
        raise kind(
            f"tracing can't {what}: {self!r} is only known when the program runs.",
            hint="Give the argument to trace(), or run the program.", where=user_location(),
        )  # fmt: skip

    # Questions, which are decisions if the trace explores.

    def _exploring(self) -> TraceLog | None:
        record = recording.get()
        return None if record is None or record.forced is None else record

    def _key(self) -> tuple[Any, ...]:
        return self._name, id(self._parts_of[0]) if isinstance(self, SglVariable) else 0

    def _choice(self, record: TraceLog) -> str | None:
        """Choice that a selection has made on this path, or None for the value of another node."""
        choices = self._choices if isinstance(self, SglVariable) else ()
        if not choices:
            return None
        return choices[record.decide(self, "", choices, (*self._key(), "choice"))]

    def _ask(self, what: str, question: str, answer: Callable[[Any], Any], *key: Any) -> bool:
        """Answer to a yes-or-no question. For the value of a selection it follows from the choice; for other values
        both answers are explored."""
        record = self._exploring()
        if record is None:
            self.__refuse__(what)
        choice = self._choice(record)
        if choice is not None:
            return bool(answer(choice))
        return not record.decide(self, question, ("True", "False"), (*self._key(), question, *key))

    def __bool__(self) -> bool:
        return self._ask("tell whether it is true", "", bool)

    def __eq__(self, other: object) -> bool:
        if other is self:
            return True
        if isinstance(other, Symbol):
            return self.__refuse__("compare it")
        record, key = self._exploring(), self._key()
        if record is not None and key in record.equal_values:
            return bool(record.equal_values[key] == other)
        same = self._ask("compare it", f"== {other!r:.60}", lambda value: value == other)
        if same and record is not None:
            record.equal_values[key] = other
        return same

    def _compare(self, compare: Callable[[Any, Any], Any], sign: str, other: object) -> bool:
        if isinstance(other, Symbol):
            self.__refuse__("compare it")
        return self._ask("compare it", f"{sign} {other!r:.60}", lambda value: compare(value, other))

    def __contains__(self, item: object) -> bool:
        return self._ask("tell what is in it", f"contains {item!r:.60}", lambda value: item in value)

    def __hash__(self) -> int:
        record = self._exploring()
        choice = None if record is None else self._choice(record)
        return self.__refuse__("look it up", _UnhashableError) if choice is None else hash(choice)

    # Questions that no path can answer.

    def __call__(self, *args: UserValue, **kwargs: UserValue) -> NoReturn:
        self.__refuse__("call it")

    def __add__(self, other: object) -> Expressions:
        return super().__add__(self._summand(other))

    def __radd__(self, other: object) -> Expressions:
        return super().__radd__(self._summand(other))

    def _summand(self, other: Any) -> Any:
        return other if isinstance(other, str | Expression) else self.__refuse__("calculate with it")

    def __len__(self) -> int:
        self.__refuse__("tell how long it is")

    def __iter__(self) -> UserValue:
        self.__refuse__("go through it")

    def __int__(self) -> int:
        self.__refuse__("turn it into a number")

    __index__ = __float__ = __int__


def _comparing(compare: Callable[[Any, Any], Any], sign: str) -> Callable[[Symbol, object], bool]:
    return lambda self, other: self._compare(compare, sign, other)


for _name, _sign in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">=")):
    setattr(Symbol, f"__{_name}__", _comparing(getattr(operator, _name), _sign))


def _calculating(self: Symbol, *_: object) -> NoReturn:
    self.__refuse__("calculate with it")


for _operator in ("sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "and", "or", "xor"):
    setattr(Symbol, f"__{_operator}__", _calculating)
    setattr(Symbol, f"__r{_operator}__", _calculating)
for _operator in ("neg", "pos", "abs", "invert", "round"):
    setattr(Symbol, f"__{_operator}__", _calculating)


class SglArgument(Symbol):
    """Argument that was not given."""

    __slots__ = ("_value",)

    value = _RuntimeAttribute("value")

    def __init__(self, name: str, value: object = None, *, parts_of: tuple[Symbol, Steps] | None = None) -> None:
        super().__init__(name, parts_of=parts_of)
        self._value = value

    def __repr__(self) -> str:
        return f"Argument(name={self._name!r})"


class SglVariable(Symbol):
    """Value of a node."""

    __slots__ = ("_choices", "_source")

    source = _RuntimeAttribute("source")

    def __init__(
        self,
        name: str,
        source: object = None,
        choices: tuple[str, ...] = (),
        *,
        parts_of: tuple[Symbol, Steps] | None = None,
    ) -> None:
        super().__init__(name, parts_of=parts_of)
        self._source = source
        self._choices = choices

    def __origin__(self) -> SymbolOrigin:
        found = super().__origin__()
        return replace(found, source=self._source) if found.symbol is self else found

    def __repr__(self) -> str:
        return f"Variable({self._name!r})"


@dataclass(frozen=True, slots=True)
class SymbolOrigin:
    """Origin of a symbol.

    Attributes:
        name: name of the argument or variable.
        parts: steps from the whole value to the symbol: ("attribute" or "item", name or key).
        source: node that makes the value, or None for an argument.
        symbol: symbol of the whole value.
    """

    name: str
    parts: Steps
    source: object
    symbol: Symbol


def origin(symbol: Symbol) -> SymbolOrigin:
    return symbol.__origin__()


def refuse(symbol: Symbol, what: str) -> NoReturn:
    """Raises the TraceError for a question that no trace can answer."""
    symbol.__refuse__(what)
