"""Digests of everything that a program's results depend on. They are equal in all processes that
use the same version of Python.

A function's digest covers its code, its constants and defaults, and everything that it reads:
closures, globals, and recursively the functions and classes among them. Of installed packages only
names are compared, because their versions are not part of the program.
"""

from __future__ import annotations

import asyncio
import copyreg
import dis
import enum
import hashlib
import importlib
import os
import random
import sys
import threading
from collections.abc import Iterator, Mapping
from types import (
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import msgspec

from sglang_lite.lang.backend.base import Backend
from sglang_lite.lang.backend.default import as_backend, is_engine
from sglang_lite.lang.expressions import BaseProgram
from sglang_lite.lang.tracebacks import LIBRARIES
from sglang_lite.program.nodes import BaseNode

_PLAIN = (type(None), bool, int, float, complex, str, type(...), type(NotImplemented))
# Synchronisation primitives: programs read no values from them.
_GUARDS = (
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Semaphore,
    asyncio.Lock,
    asyncio.Semaphore,
)
# State of the random module: like os.environ, it differs in every process.
_CHANCE = getattr(random.random, "__self__", None)
# Dunder attributes that describe a class's fields.
_CLASS_FIELDS = ("__annotations__", "__dataclass_fields__", "__pydantic_fields__")


class UnreadableError(Exception):
    """Raised for a value that can't be compared because its content can't be read. `kind` is the
    name of its type.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class Fingerprint:
    """Digests of values. Each has a description as its key.

    Attributes:
        parts: digests by description ("the body", "the code of helper" …).
        unreadable: type names of the values that could not be read, by description.
    """

    def __init__(self) -> None:
        self.parts: dict[str, str] = {}
        self.unreadable: dict[str, str] = {}
        # part names of the functions and classes that were read, by id
        self._names: dict[int, str] = {}
        self._alive: list[Any] = []  # keeps values alive, so that no id is reused
        self._open: list[int] = []  # ids of the values being read, which may contain themselves
        self._package = ""

    def add_digest(self, name: str, value: object) -> None:
        """Adds the digest of a value under a description."""
        try:
            self.parts[name] = self._digest_value(value)
        except UnreadableError as error:
            self.unreadable[name] = error.kind
        except RecursionError:
            self.unreadable[name] = f"{type(value).__name__} of too many levels"

    def add_program(self, function: object) -> None:
        """Adds a program's body. Functions of the body's package are read in full, even if the
        package is installed.
        """
        self._package = (getattr(function, "__module__", None) or "").partition(".")[0]
        self.add_digest("the body", function)

    def _reserve_name(self, value: Any, words: str) -> str:
        name = words
        number = 1
        while name in self.parts or name in self._names.values():
            number += 1
            name = f"{words} ({number})"
        self._names[id(value)] = name
        self._alive.append(value)
        return name

    def _digest_value(self, value: Any) -> str:
        kind: Any = type(value)
        if kind in _PLAIN:
            return _digest(kind.__name__, repr(value))
        if kind in (bytes, bytearray):
            return _digest(kind.__name__, bytes(value))
        if id(value) in self._open:
            return _digest("inside", str(len(self._open) - self._open.index(id(value))))
        self._open.append(id(value))
        try:
            return _digest(kind.__qualname__, *self._content_digests(value))
        finally:
            self._open.pop()

    def _content_digests(self, value: Any) -> Iterator[str]:
        """Yields digests and names that distinguish a value from others of its type."""
        match value:
            case FunctionType():
                yield self._add_function(value)
            case BaseProgram():
                yield from (
                    self._digest_value(value.func),
                    self._digest_value(value.bind_arguments),
                )
            case CodeType():
                yield from self._code_digests(value)
            case ModuleType():
                yield value.__name__
            case type():
                yield self._add_class(value)
            case BaseNode() if value.where is not None:  # moving a line changes no answer
                yield from self._pickle_digests(msgspec.structs.replace(value, where=None))
            case Backend():
                yield self._digest_value(value.identity())
            case MethodType() | classmethod() | staticmethod():
                yield self._digest_value(value.__func__)
                if isinstance(value, MethodType):
                    yield self._digest_value(value.__self__)
            case property():
                yield from map(self._digest_value, (value.fget, value.fset, value.fdel))
            case list() | tuple() if type(value) in (list, tuple):
                yield from map(self._digest_value, value)
            case set() | frozenset() if type(value) in (set, frozenset):
                yield from sorted(map(self._digest_value, value))
            case dict() | MappingProxyType() if type(value) in (dict, MappingProxyType):
                for key, item in value.items():
                    yield from (self._digest_value(key), self._digest_value(item))
            case _ if isinstance(value, _GUARDS) or value is _CHANCE or value is os.environ:
                return
            case _ if callable(getattr(value, "__wrapped__", None)):  # lru_cache, for example
                yield self._digest_value(value.__wrapped__)
            case _ if is_engine(value):
                yield self._digest_value(as_backend(value).identity())
            case _:
                yield from self._pickle_digests(value)

    def _pickle_digests(self, value: Any) -> Iterator[str]:
        """Yields digests of the parts that pickle would store for an object."""
        kind = type(value)
        try:
            reduce = copyreg.dispatch_table.get(kind)
            reduced: Any = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception as error:  # __reduce__ is the object's own code
            raise UnreadableError(kind.__name__) from error
        if isinstance(reduced, str):  # name of a global in its module
            yield from (kind.__module__, reduced)
            return
        for part in reduced[:3]:
            yield self._digest_value(part)
        for items in reduced[3:5]:
            yield self._digest_value(None if items is None else list(items))

    def _code_digests(self, code: CodeType) -> Iterator[str]:
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        yield from map(
            self._digest_value,
            (code.co_name, code.co_code, code.co_exceptiontable, code.co_flags, *names),
        )
        yield from map(self._digest_value, code.co_consts)

    def _add_function(self, function: FunctionType) -> str:
        """Adds a function's code, and the values that it reads, as parts. Returns the name of the
        part with the code. For a function of an installed package, adds nothing and returns its
        qualified name.
        """
        existing = self._names.get(id(function))
        if existing is not None:
            return existing
        module = function.__module__ or ""
        qualname = function.__qualname__
        installed = self._is_installed(module, function.__code__.co_filename)
        if installed and "<" not in qualname:
            return f"{module}.{qualname}"
        short = qualname.rpartition("<locals>.")[2]
        name = self._reserve_name(function, f"the code of {short}")
        self.parts[name] = ""  # reserves the name: functions may call each other
        self.parts[name] = self._digest_value(function.__code__)
        for read, value in _values_read_by(
            function, follow=not installed, own=self._is_own_module
        ).items():
            self.add_digest(f"{read} in {short}{name.removeprefix(f'the code of {short}')}", value)
        return name

    def _add_class(self, kind: type) -> str:
        """Adds a class's bases, and the members defined in its body, as parts. Returns the name of
        the part with the bases. For a class of an installed package, adds nothing and returns its
        qualified name.
        """
        existing = self._names.get(id(kind))
        if existing is not None:
            return existing
        module = kind.__module__
        if self._is_installed(module, getattr(sys.modules.get(module), "__file__", None)):
            return f"{module}.{kind.__qualname__}"
        name = self._reserve_name(kind, f"the class {kind.__name__}")
        self.parts[name] = _digest(*map(self._digest_value, kind.__bases__))
        members = {
            key: value for key, value in vars(kind).items() if _is_defined_in_body(key, value)
        }
        if issubclass(kind, enum.Enum):
            members = {key: member.value for key, member in kind.__members__.items()}
        for key, value in members.items():
            self.add_digest(f"{key} of {name.removeprefix('the ')}", value)
        return name

    def _is_own_module(self, module: ModuleType) -> bool:
        return not self._is_installed(module.__name__, getattr(module, "__file__", None))

    def _is_installed(self, module: str, file: str | None) -> bool:
        """Returns True if a module belongs to an installed package, not to the program."""
        package = module.partition(".")[0]
        if package == "sglang_lite":
            return True
        if package == self._package or package == "__main__":
            return False
        return file.startswith(LIBRARIES) if file is not None else module in sys.modules


def _digest(*parts: str | bytes) -> str:
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        content = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        found.update(f"{len(content)}:".encode() + content)
    return found.hexdigest()


def digest(value: object) -> str:
    """Returns the digest of plain data, and of the functions and objects in it.

    Raises:
        UnreadableError: a value in it has no comparable content.
    """
    found = Fingerprint()
    found.add_digest("", value)
    for kind in found.unreadable.values():
        raise UnreadableError(kind)
    return _digest(*(f"{name}={part}" for name, part in found.parts.items()))


def _is_defined_in_body(key: str, value: Any) -> bool:
    """Returns True if a member was defined in the class's body, rather than added by Python or a
    library.
    """
    if isinstance(value, GetSetDescriptorType | MemberDescriptorType) or key == "_abc_impl":
        return False
    dunder = key.startswith("__") and key.endswith("__")
    return (
        not dunder
        or key in _CLASS_FIELDS
        or isinstance(value, FunctionType | classmethod | staticmethod)
    )


def _nested_code(code: CodeType) -> Iterator[CodeType]:
    """Yields a function's code and that of all functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested_code(constant)


def _values_read_by(function: FunctionType, *, follow: bool, own: Any) -> dict[str, Any]:
    """Returns the values that a function reads besides its arguments, by name. Names that the
    function itself assigns are left out, because they are its own state.

    Args:
        follow: whether to include globals and imported modules.
        own: function that returns True for a module of the program. The attributes that are read
            from such a module are included. Of other modules, only the name is.
    """
    codes = list(_nested_code(function.__code__))
    steps = [step for code in codes for step in dis.get_instructions(code)]
    stored = {step.argval for step in steps if step.opname in ("STORE_GLOBAL", "STORE_DEREF")}
    read: dict[str, Any] = {}
    for i, value in enumerate(function.__defaults__ or ()):
        read[f"default {i + 1}"] = value
    for name, value in sorted((function.__kwdefaults__ or {}).items()):
        read[f"the default of {name}"] = value
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        if name not in stored:
            try:
                read[name] = cell.cell_contents
            except ValueError:  # the variable is not assigned yet
                read[name] = None
    if not follow:
        return read
    namespace: Mapping[str, Any] = function.__globals__
    loaded = sorted(
        {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")} - stored
    )
    read.update({name: namespace[name] for name in loaded if name in namespace})
    modules = [(name, value) for name, value in read.items() if isinstance(value, ModuleType)]
    modules += [
        (module.__name__, module)
        for module in _imported_modules(steps, namespace.get("__package__"))
    ]
    names = sorted({name for code in codes for name in code.co_names})
    seen = set[int]()
    while modules:
        name, module = modules.pop(0)
        if id(module) in seen or not own(module):
            continue
        seen.add(id(module))
        found = {
            f"{name}.{attribute}": vars(module)[attribute]
            for attribute in names
            if attribute in vars(module)
        }
        read.update(found)
        modules += [
            (inner, value) for inner, value in found.items() if isinstance(value, ModuleType)
        ]
    return read


def _imported_modules(steps: list[dis.Instruction], package: str | None) -> Iterator[ModuleType]:
    """Yields the modules named by a function's own import statements."""
    for level, names, step in zip(steps, steps[1:], steps[2:]):
        if step.opname != "IMPORT_NAME":
            continue
        try:
            base = importlib.import_module("." * int(level.argval or 0) + step.argval, package)
        except Exception:  # the body itself raises this error when it runs the import
            continue
        yield base
        for name in names.argval or ():
            inner = sys.modules.get(f"{base.__name__}.{name}")
            if inner is not None:
                yield inner
