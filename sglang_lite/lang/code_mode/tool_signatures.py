"""Signatures of the functions that a program may call, as the grammar and the type checker need them."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sglang_lite.lang.code_mode.builtin_types import BUILTINS
from sglang_lite.lang.code_mode.static_types import (
    ANY,
    StaticType,
    limit_size,
    resolve_reference,
    type_of_result,
    type_of_schema,
)
from sglang_lite.lang.tools import SchemaTool, Toolbox, check_tools, place_of_function
from sglang_lite.protocol import Location, ParameterError
from sglang_lite.protocol.anything import UserValue

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class ToolParameter:
    """Parameter of a function.

    Attributes:
        name: its name.
        type: type of the arguments.
        required: whether it has no default.
        default: the default as text for the model; "" if it has none.
    """

    name: str
    type: StaticType
    required: bool
    default: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class ToolSignature:
    """Function that a program may call.

    Attributes:
        name: name in programs.
        function: the function.
        reader: reads its arguments, as in `Toolbox.tools`.
        parameters: its parameters, in order.
        result: type of its results.
        positional: whether arguments may be given without their names.
    """

    name: str
    function: Callable[..., UserValue]
    reader: Any  # pydantic's TypeAdapter, or the SchemaTool itself
    parameters: tuple[ToolParameter, ...]
    result: StaticType
    positional: bool

    def takes_one(self) -> bool:
        """Returns whether it can be called with one argument, without a name."""
        required = [each.required for each in self.parameters]
        return self.positional and bool(required) and not any(required[1:])

    def __str__(self) -> str:
        inside = ", ".join(
            f"{each.name}: {each.type}" + (f" = {each.default}" if each.default else "")
            for each in self.parameters
        )
        if not self.positional and inside:
            inside = f"*, {inside}"
        return f"{self.name}({inside}) -> {self.result}"


def read_signatures(
    tools: Sequence[Callable[..., UserValue]], where: Location | None
) -> Mapping[str, ToolSignature]:
    """Returns the signatures of functions by their names in programs.

    Raises:
        ParameterError: a function can't be called by a program.
    """
    check_tools(tools, where)
    for tool in tools:
        _check_parameters(tool, where)
    toolbox = Toolbox.for_tools(tools, "required")
    found: dict[str, ToolSignature] = {}
    for name, (function, reader) in toolbox.tools.items():
        own = name.replace("-", "_").replace(".", "_")
        problem = f"{name!r} can't be the name of a function in a program."
        if own in found:
            first = getattr(found[own].function, "__name__", own)
            problem = f"{first!r} and {name!r} are both {own} in a program."
        if not _NAME.fullmatch(own) or keyword.iskeyword(own) or own in BUILTINS or own in found:
            raise ParameterError(
                "code",
                problem,
                hint="Wrap it in a function with another name.",
                where=where,
            )
        schema = toolbox.schemas[name]
        shared = toolbox.shared if "$defs" in toolbox.shared else schema
        found[own] = ToolSignature(
            own,
            function,
            reader,
            tuple(_read_parameters(own, function, schema, shared, where)),
            _type_of_results(function),
            positional=not isinstance(function, SchemaTool),
        )
    return found


def _type_of_results(function: Callable[..., UserValue]) -> StaticType:
    if not isinstance(function, SchemaTool):
        return type_of_result(function)
    schema = function.result_schema
    return ANY if schema is None else limit_size(type_of_schema(schema, schema, known={}))


def _check_parameters(function: Callable[..., UserValue], where: Location | None) -> None:
    """Raises ParameterError with the function's location if a program can't call the function."""
    name = f"{getattr(function, '__name__', repr(function))}{place_of_function(function)}"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ParameterError(
            "code",
            f"{name} is a generator, so a call has no result.",
            hint="Return a list instead of yielding its items.",
            where=where,
        )
    try:
        Toolbox.for_tools([function], "required")
    except ParameterError as error:
        cure = "Annotate each parameter with a type that JSON has values of, and write no *args: a list instead."
        raise ParameterError(
            "code", f"{name}: {error.message}", hint=error.hint or cure, where=where
        ) from error


def _read_parameters(
    name: str,
    function: Callable[..., UserValue],
    schema: Mapping[str, UserValue],
    shared: Mapping[str, UserValue],
    where: Location | None,
) -> list[ToolParameter]:
    if "$ref" in schema:
        resolved = resolve_reference(str(schema["$ref"]), shared)
        schema = resolved if isinstance(resolved, Mapping) else schema
    members = schema.get("properties", {})
    required = frozenset(schema.get("required", ()))
    defaults = {} if isinstance(function, SchemaTool) else inspect.signature(function).parameters
    parameters = []
    for each, own in members.items():
        if not _NAME.fullmatch(each) or keyword.iskeyword(each):
            raise ParameterError(
                "code",
                f"{name}: {each!r} can't be the name of an argument in a program.",
                hint="Wrap it in a function with other names.",
                where=where,
            )
        default = ""
        if each not in required:
            default = repr(defaults[each].default) if each in defaults else "…"
        kind = type_of_schema(own, shared)
        parameters.append(ToolParameter(each, kind, each in required, default))
    return parameters
