"""Symbols of a body that is being compiled: placeholders for its arguments and for the values of its nodes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn, TypeAlias, cast

import msgspec

from sglang_lite.lang.state import user_location
from sglang_lite.lang.symbolic.symbols import MARK, Symbol, TraceLog, recording
from sglang_lite.program.control_flow import evaluate
from sglang_lite.program.nodes import Condition, Expressions, Fill, Path, Scalar, Sign, Text
from sglang_lite.protocol import CompileError, Location, TraceError
from sglang_lite.protocol.anything import UserValue

RUN_IT = "Run the program without compiling it."
OR_RUN_IT = "Or run the program without compiling it."  # follows another hint
_IN_DATA = "it reads an attribute, which only Python's objects have"
MOST_DECISIONS: Final = 128  # on one way through the body


@dataclass(slots=True, eq=False)
class Deciding(TraceLog):
    """Log of one run of a body that is being compiled, and the outcomes of its decisions by values that only a run
    knows. The body is run again for each other way through it.

    Attributes:
        ways: outcomes of the first decisions (0: the condition holds, 1: it does not); later decisions have outcome 0.
        cut: called with the condition and the paths of each decision when it is made.
        hold: returns the Fill that stands in the program for a value that only the caller's Python can compute.
        record_call: records a call that the caller's Python makes in a run, and returns the symbol of its result.
            Arguments: name for errors, number of the branch whose state has the method (None for a function), function
            or name of the method, positional and keyword arguments.
        taken: outcome of each decision.
        open: for each decision, whether it has another outcome.
    """

    ways: tuple[int, ...] = ()
    cut: Callable[[Condition | None, tuple[Path, ...]], None] = lambda condition, after: None
    hold: Callable[[CompileSymbolSource], Fill] = lambda origin: Fill(hold=0)
    record_call: Callable[[str, int | None, Any, Sequence[Any], Mapping[str, Any]], Any] = lambda *call: None
    taken: list[int] = field(default_factory=list)
    open: list[bool] = field(default_factory=list)
    _answers: dict[Condition, bool] = field(default_factory=dict)
    _possible: dict[Fill, tuple[Scalar, ...]] = field(default_factory=dict)  # possible values of a fill, if known

    def ask(self, condition: Condition, values: tuple[Scalar, ...]) -> bool:
        """Answer to a question: the same as before if it was asked before, the only possible one if the possible values
        leave no other, else the outcome of a new decision.

        Args:
            values: possible values of the left side; empty if they are not known.
        """
        self.step()
        right, constant = condition.right, not isinstance(condition.right, Fill)
        possible = self._possible.get(condition.left, values)
        if possible and constant:
            answers = {evaluate(condition, value, right) for value in possible}
            if len(answers) == 1:
                return answers.pop()
        if condition not in self._answers:
            found = self._answers[condition] = self._next(condition, ()) == 0
            if possible and constant:
                self._possible[condition.left] = tuple([v for v in possible if evaluate(condition, v, right) is found])
            elif found and condition.sign == "==" and constant:
                self._possible[condition.left] = (cast(Scalar, right),)
        return self._answers[condition]

    def step(self) -> None:
        self.remaining_steps -= 1
        if self.remaining_steps < 0:
            raise CompileError(
                "the body makes decisions without an end.", hint=f"Bound its loops. {OR_RUN_IT}", where=user_location()
            )

    def wait(self, after: tuple[Path, ...]) -> None:
        """Makes the nodes that follow wait for the values of other nodes.

        Args:
            after: paths of these nodes.
        """
        self._next(None, after)

    def _next(self, condition: Condition | None, after: tuple[Path, ...]) -> int:
        at = len(self.taken)
        if at == MOST_DECISIONS:
            told = f"the body makes more than {MOST_DECISIONS} decisions by values that only a run knows."
            hint = f"Bound the loop, as in `for step in range(8):`. {OR_RUN_IT}"
            raise CompileError(told, hint=hint, where=user_location())
        taken = self.ways[at] if at < len(self.ways) else 0
        self.taken.append(taken)
        self.open.append(condition is not None)
        self.cut(condition, after)
        return taken


@contextlib.contextmanager
def marking(record: Deciding) -> Iterator[None]:
    """Context manager in which symbols are formatted into texts as marks, which `unmarked` turns into symbols again."""
    token = recording.set(record)
    try:
        yield
    finally:
        recording.reset(token)


def unmarked(text: str) -> list[str | Symbol]:
    """Splits a text at its marks, into constant texts and the symbols that the marks stand for."""
    record = recording.get()
    if "\ue002" not in text or record is None:
        return [text]
    return [record.marks.get(part, part) for part in MARK.split(text) if part]


@dataclass(frozen=True, slots=True)
class CompileSymbolSource:
    """Source of a symbol's value.

    Attributes:
        name: expression of the value, for errors.
        parts: parts of the value's text, or None if only Python can make the text, for the reason in `why`.
        source: number of the action that makes the variable, and the variable's name; None for an argument.
        why: reason for which only Python can make the text, as part of an error message.
        steps: steps from the variable or argument to the value: (True, key) for an item, (False, name) for an
            attribute.
        values: possible values; empty if they are not known.
    """

    name: str
    parts: tuple[str | Fill, ...] | None
    source: tuple[int, str] | None = None
    why: str = ""
    steps: tuple[tuple[bool, Any], ...] = ()
    values: tuple[Scalar, ...] = ()

    @property
    def argument(self) -> str:
        """Name of the argument that the value belongs to; empty for the value of a node."""
        return re.split(r"[.\[]", self.name)[0] if self.source is None else ""

    @property
    def is_read(self) -> bool:
        """True if the value is read from a node's text by a built-in reader ("int", "float", "bool")."""
        match self.parts:
            case (Fill(read=str()),):
                return all(item for item, _ in self.steps)
        return False

    def fills(self, where: Location | None, *, special: bool) -> list[str | Fill]:
        """Parts of the value's text, with fills for unknown parts. Raises CompileError if the value is an attribute of
        an argument, which only Python can read."""
        steps = tuple([key for item, key in self.steps if item])
        if self.argument and len(steps) < len(self.steps):
            raise CompileError(f"the text of {self.name} can't be compiled: {_IN_DATA}.", hint=RUN_IT, where=where)
        single = self.parts is not None and len(self.parts) == 1 and isinstance(self.parts[0], Fill)
        if self.parts is None or len(steps) < len(self.steps) or (steps and not single):
            return [msgspec.structs.replace(self._hold(), special=special, where=where)]
        return [
            part if isinstance(part, str)
            else msgspec.structs.replace(part, steps=(*part.steps, *steps), special=special, where=where)
            for part in self.parts
        ]  # fmt: skip

    def _hold(self) -> Fill:
        """Fill that stands for the value in the program; the caller's Python computes the value in a run."""
        record = recording.get()
        assert isinstance(record, Deciding)
        return record.hold(self)

    def fill(self) -> Fill | None:
        """Fill that stands for the value in a condition; None if the value is an attribute of an argument, which only
        Python can read."""
        match self.parts:
            case (Fill() as part,) if all(item for item, _ in self.steps):
                steps = (*part.steps, *(key for _, key in self.steps))
                return msgspec.structs.replace(part, steps=steps, special=True, where=user_location())
        return None if self.argument else msgspec.structs.replace(self._hold(), where=user_location())

    def value(self, of: ValueOf) -> UserValue:
        """Value in a run, in which `of` gives the values of variables and arguments."""
        value = of(self.source, self.argument)
        for item, key in self.steps:
            value = value[key] if item else getattr(value, key)
        return value


# Function from a variable (number of the action, name) or None, and the name of an argument, to the value.
ValueOf: TypeAlias = Callable[["tuple[int, str] | None", str], Any]


class _UnhashableError(CompileError, TypeError):
    pass


class CompileSymbol(Symbol):
    """Symbol of a value that only a run knows. Its own attributes begin with `_`; all others are the value's."""

    __slots__ = ("__comes_from__",)

    def __init__(self, origin: CompileSymbolSource) -> None:
        super().__init__(origin.name)
        self.__comes_from__ = origin

    def _stepped(self, name: str, key: object, *, item: bool) -> CompileSymbol:
        steps = (*self.__comes_from__.steps, (item, key))
        return CompileSymbol(replace(self.__comes_from__, name=self.__comes_from__.name + name, steps=steps, values=()))

    def _part(self, kind: str, key: object) -> Symbol:
        return self._stepped(f".{key}", key, item=False)

    def __getattr__(self, name: str) -> Symbol:
        if name.startswith("_"):
            raise AttributeError(f"{self._name} has no attribute {name!r}")
        return self._part("attribute", name)

    name = property(lambda self: self._part("attribute", "name"))  # an attribute of the value

    def __getitem__(self, key: object) -> Symbol:
        if type(key) is not int and type(key) is not str:
            self.__refuse__("take a part of it")
        return self._stepped(f"[{key!r}]", key, item=True)

    def __call__(self, *args: UserValue, **kwargs: UserValue) -> UserValue:
        record = recording.get()
        if self.__comes_from__.argument or not isinstance(record, Deciding):
            self.__refuse__("call it")
        return record.record_call(self._name, None, self, args, kwargs)

    # Questions, which become decisions of the compiled program.

    def __bool__(self) -> bool:
        return self._decide("tell whether it is true", "true", None)

    def __eq__(self, other: object) -> bool:
        return other is self or self._decide("compare it", "==", other)

    def _compare(self, compare: Callable[[Any, Any], Any], sign: Any, other: object) -> bool:
        return self._decide("compare it", sign, other)

    def __contains__(self, item: object) -> bool:
        return self._decide("tell what is in it", "contains", item)

    def __hash__(self) -> int:
        *others, last = self.__comes_from__.values or (None,)
        if last is None:
            self.__refuse__("look it up", _UnhashableError)
        return hash(next((value for value in others if self == value), last))

    def _decide(self, what: str, sign: Sign, other: object) -> bool:
        record, left, right = recording.get(), self.__comes_from__.fill(), _operand(other)
        if not isinstance(record, Deciding) or left is None or right is _NO_OPERAND:
            self.__refuse__(what, why=self.__comes_from__.why)
        values = self.__comes_from__.values
        if left.argument is not None and isinstance(right, Fill) and right.argument is None:  # a node is on the left
            left, sign, right, values = right, _TURNED[sign], left, ()
        return record.ask(Condition(left, sign, cast(Any, right)), values)

    def __str__(self) -> str:
        if recording.get() is None:
            self.__refuse__("show it")
        return super().__str__()

    def __repr__(self) -> str:
        if recording.get() is not None:
            self.__refuse__("show it, or use it here")
        return f"CompileSymbol({self._name})"

    def __refuse__(self, what: str, kind: type[TraceError] = TraceError, why: str = "") -> NoReturn:
        argument, hint = self.__comes_from__.argument, RUN_IT
        if argument:
            hint = f"Bind it before: program.bind({argument}=…).compile(). {OR_RUN_IT}"
        told = f"compiling can't {what}: {self._name} is only known when the program runs{why and f', as {why}'}."
        raise (_UnhashableError if issubclass(kind, TypeError) else CompileError)(
            told, hint=hint, where=user_location()
        )


def later(function: Callable[..., UserValue], *args: UserValue) -> UserValue:
    """Result of a function. If an argument is a symbol of a body that is being compiled, records the call for a run
    instead, and returns the symbol of its result."""
    record = recording.get()
    if isinstance(record, Deciding) and any(isinstance(each, CompileSymbol) for each in args):
        return record.record_call(getattr(function, "__name__", "a function"), None, function, args, {})
    return function(*args)


_NO_OPERAND: Any = object()
_TURNED: dict[Sign, Sign] = {"==": "==", "<": ">", "<=": ">=", ">": "<", ">=": "<=", "contains": "in"}


def _operand(other: object) -> Any:
    """Right side of a condition, or _NO_OPERAND if the value can't be part of a condition."""
    if isinstance(other, str) and len(parts := unmarked(other)) == 1 and isinstance(parts[0], CompileSymbol):
        other = parts[0]
    if isinstance(other, CompileSymbol):
        return origin_of(other).fill() or _NO_OPERAND
    if other is None or type(other) in (int, float, bool) or (type(other) is str and "\ue002" not in other):
        return other
    return _NO_OPERAND


def origin_of(blank: CompileSymbol) -> CompileSymbolSource:
    return blank.__comes_from__


@dataclass(frozen=True, slots=True)
class _Text:
    """Text that contains symbols, as a sequence of strings and symbols."""

    parts: tuple[Any, ...]


def kept(thing: UserValue) -> UserValue:
    """Value that the body passed to a state or call, in a form that `resolved` can complete in a run: texts are split
    at marks, also inside lists, tuples, sets and dictionaries."""
    if isinstance(thing, Expressions):
        found = list(thing.walk())
        if all(isinstance(part, Text | CompileSymbol) for part in found):
            return _Text(tuple([part.text if isinstance(part, Text) else part for part in found]))
    if isinstance(thing, str):
        parts = unmarked(thing)
        return _Text(tuple(parts)) if any(isinstance(part, Symbol) for part in parts) else thing
    if type(thing) in (list, tuple, set):
        return type(thing)(map(kept, thing))
    if type(thing) is dict:
        return {key: kept(value) for key, value in thing.items()}
    return thing


def resolved(thing: UserValue, of: ValueOf) -> UserValue:
    """Value that `kept` returned, with the values of a run in place of symbols."""
    if isinstance(thing, CompileSymbol):
        return origin_of(thing).value(of)
    if isinstance(thing, _Text):
        return "".join([str(resolved(part, of)) for part in thing.parts])
    if type(thing) in (list, tuple, set):
        return type(thing)(resolved(each, of) for each in thing)
    if type(thing) is dict:
        return {key: resolved(value, of) for key, value in thing.items()}
    return thing
