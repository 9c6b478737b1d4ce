"""Symbols of a body that is compiled: for its arguments, and for what its nodes bring."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeAlias

import msgspec

from sglang_lite.lang.state import user_location
from sglang_lite.lang.symbols import MARK, Recording, Symbol, TraceError, recording
from sglang_lite.program.nodes import Expressions, Fill, Text
from sglang_lite.protocol import Location

RUN_IT = "Run the program as it is: it is handed over in runs."


class CompileError(TraceError):
    """A program can't be compiled: its Python decides by, or works on, what only a run knows."""


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """Has marks stand for symbols in texts that are made inside, until `unmarked` finds them."""
    token = recording.set(Recording())
    try:
        yield
    finally:
        recording.reset(token)


def unmarked(text: str) -> list[str | Symbol]:
    """Texts and the symbols that marks between them stand for."""
    record = recording.get()
    if "\ue002" not in text or record is None:
        return [text]
    return [record.marks.get(part, part) for part in MARK.split(text) if part]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the value of a symbol comes from.

    Attributes:
        name: for errors.
        parts: of its text; None where Python makes that, as `why` says.
        source: number of the action whose variable it is, and which of that; None of an argument.
        steps: what is taken of the value: items (True) and attributes, by key.
    """

    name: str
    parts: tuple[str | Fill, ...] | None
    source: tuple[int, str] | None = None
    why: str = ""
    steps: tuple[tuple[bool, Any], ...] = ()

    @property
    def argument(self) -> str:
        """The argument that it is of; empty: of a node."""
        return re.split(r"[.\[]", self.name)[0] if self.source is None else ""

    def fills(self, where: Location | None, *, special: bool) -> list[str | Fill]:
        """The parts of its text. Raises CompileError: Python makes it."""
        steps = tuple([key for item, key in self.steps if item])
        if self.parts is None or len(steps) < len(self.steps):
            why = self.why or "attributes are of Python's objects, and data has none"
            raise CompileError(f"the text of {self.name} can't be compiled: {why}.", hint=RUN_IT, where=where)
        if steps and (len(self.parts) != 1 or isinstance(self.parts[0], str)):
            raise CompileError(f"{self.name}: no item of a scope's text can be compiled.", hint=RUN_IT, where=where)
        return [
            part if isinstance(part, str)
            else msgspec.structs.replace(part, steps=(*part.steps, *steps), special=special, where=where)
            for part in self.parts
        ]  # fmt: skip

    def value(self, of: ValueOf) -> Any:
        """The value in a run."""
        value = of(self.source, self.argument)
        for item, key in self.steps:
            value = value[key] if item else getattr(value, key)
        return value


# Gives the value of an action's variable, or of an argument.
ValueOf: TypeAlias = Callable[["tuple[int, str] | None", str], Any]


class _UnhashableError(CompileError, TypeError):
    pass


class Blank(Symbol):
    """A value that only a run knows. It has no names of its own without `_`: those are the value's."""

    __slots__ = ("_origin",)

    def __init__(self, origin: Origin) -> None:
        super().__init__(origin.name)
        self._origin = origin

    def _stepped(self, name: str, key: object, *, item: bool) -> Blank:
        steps = (*self._origin.steps, (item, key))
        return Blank(replace(self._origin, name=self._origin.name + name, steps=steps))

    def _part(self, kind: str, key: object) -> Symbol:
        return self._stepped(f".{key}", key, item=False)

    def __getattr__(self, name: str) -> Symbol:
        if name.startswith("_"):
            raise AttributeError(f"{self._name} has no attribute {name!r}")
        return self._part("attribute", name)

    name = property(lambda self: self._part("attribute", "name"))  # the value's, as every attribute is

    def __getitem__(self, key: object) -> Symbol:
        if type(key) is not int and type(key) is not str:
            self._refuse("take a part of it")
        return self._stepped(f"[{key!r}]", key, item=True)

    def __str__(self) -> str:
        if recording.get() is None:
            self._refuse("show it")
        return super().__str__()

    def __repr__(self) -> str:
        if recording.get() is not None:
            self._refuse("show it, or use it here")
        return f"Blank({self._name})"

    def _refuse(self, what: str, kind: type[TraceError] = TraceError) -> NoReturn:
        argument, hint = self._origin.argument, RUN_IT
        if argument:
            hint = f"Give it before: program.bind({argument}=…).compile(). Or run the program as it is."
        told = f"compiling can't {what}: {self._name} is only known when the program runs."
        raise (_UnhashableError if issubclass(kind, TypeError) else CompileError)(
            told, hint=hint, where=user_location()
        )


def origin_of(blank: Blank) -> Origin:
    return blank._origin  # noqa: SLF001 # names without _ are the user's


@dataclass(frozen=True, slots=True)
class _Text:
    """Text with symbols in it."""

    parts: tuple[Any, ...]


def kept(thing: Any) -> Any:
    """A value that the body gave, to be `resolved` later."""
    if isinstance(thing, Expressions):
        found = list(thing.walk())
        if all(isinstance(part, Text | Blank) for part in found):
            return _Text(tuple([part.text if isinstance(part, Text) else part for part in found]))
    if isinstance(thing, str):
        parts = unmarked(thing)
        return thing if (len(parts) < 2 and thing in parts) or not parts else _Text(tuple(parts))
    if type(thing) in (list, tuple, set):
        return type(thing)(map(kept, thing))
    if type(thing) is dict:
        return {key: kept(value) for key, value in thing.items()}
    return thing


def resolved(thing: Any, of: ValueOf) -> Any:
    """A value that the body gave, with what a run knows in place of symbols."""
    if isinstance(thing, Blank):
        return origin_of(thing).value(of)
    if isinstance(thing, _Text):
        return "".join([str(resolved(part, of)) for part in thing.parts])
    if type(thing) in (list, tuple, set):
        return type(thing)(resolved(each, of) for each in thing)
    if type(thing) is dict:
        return {key: resolved(value, of) for key, value in thing.items()}
    return thing
