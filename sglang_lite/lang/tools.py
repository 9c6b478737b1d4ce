"""Tools: Python functions that the model may call.

`gen(tools=[…])` constrains the model to write either a call, with arguments that fit the function's
signature, or an answer. Calls have the format that the model was trained with if its chat template
reveals a known one; otherwise they are JSON objects.
"""

from __future__ import annotations

import inspect
import json
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Final, Literal, NoReturn, NotRequired, TypeVar

from typing_extensions import TypedDict

from sglang_lite.constraints.json_schema.quotes import without_documents
from sglang_lite.constraints.json_schema.validator import (
    raise_if_uncheckable,
    violations,
)
from sglang_lite.constraints.python_types.readable import make_readable
from sglang_lite.constraints.python_types.value_type import ValueType
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import (
    ConstraintError,
    JsonSchema,
    Location,
    ParameterError,
    PromptTools,
    ToolError,
    ValueValidationError,
)
from sglang_lite.protocol.anything import Json, UserValue
from sglang_lite.protocol.parameter import check_known
from sglang_lite.text.chat_format import Tool
from sglang_lite.text.chat_template import to_json
from sglang_lite.text.tool_calls import calls_constraint, parse_answer
from sglang_lite.text.tool_use import Function, arguments_schema, tool_use_schema

# parameter through which a tool receives the idempotency key of a call; hidden from models
IDEMPOTENCY_KEY: Final = "idempotency_key"
_Tool = TypeVar("_Tool", bound=Callable[..., Any])


def idempotent(tool: _Tool) -> _Tool:
    """Marks a tool whose calls can be repeated without further effects, such as a tool that only
    reads. A resumed run repeats such a call if the run was killed during the call. Used as a
    decorator, or called with a tool of an MCP server.

    Raises:
        ParameterError: `tool` is a method, which can't be marked.
    """
    try:
        tool.__idempotent__ = True  # type: ignore[attr-defined] # read by `is_idempotent`
    except AttributeError as error:
        raise ParameterError(
            "tool", f"{tool!r:.60} can't be marked.", hint="Wrap it in a function."
        ) from error
    return tool


def is_idempotent(tool: Callable[..., UserValue]) -> bool:
    """Returns True if a tool's calls may be repeated: the tool is marked as idempotent, or it takes
    an idempotency key.
    """
    return getattr(tool, "__idempotent__", False) or takes_key(tool)


def takes_key(tool: Callable[..., UserValue]) -> bool:
    """Returns True if a function has the parameter for the key of a call."""
    try:
        return IDEMPOTENCY_KEY in _signature(tool).parameters
    except (TypeError, ValueError):  # some functions written in C
        return False


_signatures = weakref.WeakKeyDictionary[Callable[..., Any], inspect.Signature]()


def _signature(tool: Callable[..., UserValue]) -> inspect.Signature:
    """Returns a function's signature, which is read anew only for a function that is not known."""
    try:
        known = _signatures.get(tool)
        if known is None:
            known = _signatures[tool] = inspect.signature(tool)
        return known
    except TypeError:  # can't be hashed or weakly referenced
        return inspect.signature(tool)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Call of a tool, written by the model.

    Attributes:
        name: name of the function.
        arguments: arguments by name, as values of the annotated types; defaults are filled in.
        function: the function.
        written: arguments in JSON, as the model wrote them, with the defaults that JSON can keep;
            "" if the call can't be made, or was not made by `use_tools` or `gen`.
    """

    name: str
    arguments: dict[str, Any]
    function: Callable[..., Any] = field(repr=False, compare=False)
    written: str = field(default="", repr=False, compare=False)

    def run(self) -> UserValue:
        """Calls the function and returns its result. For an async function, the result is a
        coroutine.

        Raises:
            ToolError: the function raised an exception.
        """
        own = {IDEMPOTENCY_KEY: uuid.uuid4().hex} if takes_key(self.function) else {}
        try:
            return self.function(**self.arguments, **own)
        except Exception as error:  # a tool may raise anything
            raise tool_failure(self.name, error) from error


def tool_failure(name: str, error: Exception) -> ToolError:
    """Returns the error for a tool that raised an exception."""
    if isinstance(error, ToolError):
        return ToolError(f"the tool {name} failed: {replace_half_pairs(error.message)}", tool=name)
    try:
        problem = f"{type(error).__name__}: {error}"
    except Exception:  # its `__str__` fails, too
        problem = type(error).__name__
    problem = replace_half_pairs(problem)
    return ToolError(f"the tool {name} raised {problem}", tool=name)


def replace_half_pairs(text: str) -> str:
    """Replaces each unpaired surrogate in a text with a question mark, because models and files
    accept only valid Unicode.
    """
    return text.encode("utf-8", "replace").decode()


class ReportedFailure(str):
    """Result of a tool that failed and describes its failure to the model."""

    __slots__ = ()


class InvalidCall:
    """Substitute for the function of a call that can't be made, because the model named a tool that
    does not exist or gave invalid arguments. Calling it raises a ToolError with the reason.

    Args:
        problem: text for the model.
    """

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def __call__(self, /, **arguments: Json) -> NoReturn:
        raise ToolError(self._problem)


@dataclass(frozen=True, slots=True, eq=False)
class Toolbox:
    """Set of tools that a generation may use.

    Attributes:
        tools: by name, each function and the pydantic TypeAdapter of its arguments.
        schemas: by name, the JSON schema of each function's arguments.
        shared: definitions that the schemas refer to.
        shown: all tools of the generation, in the form that chat templates and chat APIs expect.
        written: `shown` as JSON texts.
        choice: "auto"; "required" if the model has to call a tool; "named" if it has to call the
            only tool exactly once; or "none" if the prompt shows the tools but the model may not
            call them.
        parallel: whether one turn may contain several calls; values are then lists of calls.
        keeps_invalid: whether a call that can't be made is a value, with an `InvalidCall` as its
            function. Otherwise its text is not a value.
        value_types: types that `value_type` has built, by their family.
    """

    tools: Mapping[str, tuple[Callable[..., Any], Any]]
    schemas: Mapping[str, Any]
    shared: Mapping[str, Any]
    shown: tuple[Mapping[str, Json], ...]
    written: tuple[str, ...]
    choice: Literal["auto", "required", "named", "none"]
    parallel: bool = False
    keeps_invalid: bool = False
    value_types: dict[str | None, ValueType] = field(default_factory=dict, init=False, repr=False)

    @staticmethod
    def for_tools(
        tools: Sequence[Callable[..., UserValue]],
        choice: str | Callable[..., UserValue],
        *,
        parallel: bool = False,
    ) -> Toolbox:
        """Builds the toolbox of a generation.

        Args:
            tools: functions with annotated parameters.
            choice: "auto", "required", "none", or a tool (or its name) that has to be called
                exactly once.
            parallel: whether one turn may contain several calls.

        Raises:
            ParameterError: `tools` is empty, two tools have the same name, a parameter has no type
                or one that can't be written as JSON, or `choice` is invalid.
        """
        check_tools(tools)
        by_name: dict[str, Callable[..., Any]] = {}
        for tool in tools:
            name = getattr(tool, "__name__", "")
            if not callable(tool) or not name:
                check_known("tools", tool)
                raise ParameterError(
                    "tools",
                    f"{tool!r:.60} is not a named function.",
                    hint="Give functions: tools=[search].",
                )
            if name in by_name:
                raise _same_name_error(name, by_name[name], tool)
            by_name[name] = tool
        described = shown = _describe_with_cache(tuple(by_name.values()))
        chosen = choice if isinstance(choice, str) else getattr(choice, "__name__", "")
        if chosen in by_name:
            by_name = {chosen: by_name[chosen]}
            described = _describe_with_cache((by_name[chosen],))
        elif choice not in ("auto", "required", "none"):
            raise ParameterError(
                "tool_choice", f"{choice!r} is not 'auto', 'required', 'none' or one of the tools."
            )
        mode: Literal["auto", "required", "named", "none"] = "named"
        if chosen not in by_name:
            mode = "auto" if choice == "auto" else "none" if choice == "none" else "required"
        pairs = {name: (tool, described.readers[name]) for name, tool in by_name.items()}
        return Toolbox(
            pairs,
            described.schemas,
            described.shared,
            shown.shown,
            shown.written,
            mode,
            parallel,
        )

    def to_prompt_tools(self, family: str | None) -> PromptTools:
        """Returns the tools in the form that prompts contain. For `family`, see `value_type`."""
        return PromptTools(self.written, family, self.parallel)

    def value_type(self, family: str | None) -> ValueType:
        """Returns the type of the text that a generation with these tools writes. Its values are
        ToolCall (a list of them with `parallel`) for calls, or str for an answer.

        Args:
            family: name of a format for calls (see text.tool_formats); None for one JSON object.
        """
        if family not in self.value_types:
            self.value_types[family] = self._build_value_type(family)
        return self.value_types[family]

    def _build_value_type(self, family: str | None) -> ValueType:
        if family is not None:
            schemas = {
                name: json_schema({**self.shared, **schema})
                for name, schema in self.schemas.items()
            }
            constraint = calls_constraint(family, schemas, self.choice, parallel=self.parallel)
            return ValueType(None, constraint, partial(self._parse_family_answer, family, schemas))
        functions = [
            Function(name, inspect.getdoc(self.tools[name][0]) or "", schema)
            for name, schema in self.schemas.items()
        ]
        schema = tool_use_schema(
            functions,
            self.shared,
            choice="required" if self.choice == "named" else self.choice,
            parallel=self.parallel,
            once=self.choice == "named",
        )
        return ValueType(None, schema, self._parse_json_answer)

    def _parse_family_answer(
        self, family: str, schemas: Mapping[str, JsonSchema], text: str
    ) -> ToolCall | list[ToolCall] | str:
        answer = parse_answer(family, text, tools=schemas, parallel=self.parallel)
        if self.choice == "none":  # an object that only looks like a call is text
            return text if answer.calls or not answer.complete else answer.content
        if not answer.complete or (self.choice != "auto" and not answer.calls):
            raise ValueValidationError("the text ends in the middle of a tool call.", text=text)
        if not answer.calls:
            return answer.content
        calls = [self._parse_call(call.name, call.arguments, text) for call in answer.calls]
        return calls if self.parallel else calls[0]

    def _parse_json_answer(self, text: str) -> ToolCall | list[ToolCall] | str:
        try:
            value = json.loads(text)
            if "answer" in value:
                return str(value["answer"])
            entries = value["calls"] if self.parallel else [value]
            calls = [(call["tool"], call["arguments"]) for call in entries]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueValidationError(
                f"the text is neither a tool call nor an answer: {error}", text=text
            ) from error
        if self.choice == "none":
            names = " and ".join([repr(name) for name, _ in calls])
            raise ValueValidationError(
                f"the model called {names}, where only an answer is allowed.", text=text
            )
        found = [self._check_call(name, arguments, text) for name, arguments in calls]
        return found if self.parallel else found[0]

    def _explain_invalid_call(self, name: str, error: Exception) -> str:
        """Explains to the model why a call can't be made."""
        from pydantic import ValidationError

        if name not in self.tools:
            return f"there is no tool {name[:60]!r}. The tools are: {', '.join(self.tools)}."
        if not isinstance(error, ValidationError):
            return f"the arguments of {name} are not valid: {error}"
        problems = [
            f"{'.'.join(map(str, each['loc'])) or 'arguments'}: {each['msg']}"
            for each in error.errors(include_url=False, include_context=False, include_input=False)
        ]
        return f"the arguments of {name} are not valid: {'; '.join(problems)}"

    def _parse_call(self, name: str, arguments: str, text: str) -> ToolCall:
        try:
            given = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return self._reject_call(name, {}, error, text)
        return self._check_call(name, given, text)

    def _check_call(self, name: str, given: Json, text: str) -> ToolCall:
        from pydantic import ValidationError

        try:
            return self._make_call(name, given)
        except (KeyError, TypeError, ValueError, ValidationError, RecursionError) as error:
            written = given if isinstance(given, dict) else {}
            return self._reject_call(name, written, error, text)

    def _reject_call(
        self, name: str, written: dict[str, Any], error: Exception, text: str
    ) -> ToolCall:
        """Returns an invalid call if such calls are kept. Otherwise raises ValueValidationError."""
        if self.keeps_invalid:
            return ToolCall(name, written, InvalidCall(self._explain_invalid_call(name, error)))
        raise ValueValidationError(
            f"the text is neither a tool call nor an answer: {error}", text=text
        ) from error

    def make_call(self, name: str, arguments: str) -> ToolCall:
        """Creates a call of a tool from its name and its arguments in JSON. Raises KeyError if
        there is no such tool, and ValueError or TypeError if the arguments do not fit the tool.
        """
        return self._make_call(name, json.loads(arguments))

    def _make_call(self, name: str, given: Any) -> ToolCall:
        tool, reader = self.tools[name]
        written = _write_json(given)
        values = reader.validate_json(written)
        if isinstance(tool, SchemaTool):
            return ToolCall(name, values, tool, written)
        bound = _signature(tool).bind_partial(**values)
        bound.apply_defaults()
        bound.arguments.pop(IDEMPOTENCY_KEY, None)
        if list(given) != list(bound.arguments):
            written = _write_json(_add_defaults(given, bound.arguments, reader))
        return ToolCall(name, dict(bound.arguments), tool, written)


def _same_name_error(
    name: str, first: Callable[..., UserValue], second: Callable[..., UserValue]
) -> ParameterError:
    places = [
        (each.origin or "a tool with a schema")
        if isinstance(each, SchemaTool)
        else f"the function{place_of_function(each)}"
        for each in (first, second)
    ]
    problem = f"two tools are called {name!r}, of {' and of '.join(places)}."
    if not any(isinstance(each, SchemaTool) and each.origin for each in (first, second)):
        return ParameterError("tools", problem, hint="Rename one of them.")
    return ParameterError(
        "tools",
        problem,
        hint='Put a text before the names of a server\'s tools: sgl.mcp(…, prefix="other_").',
    )


def place_of_function(function: Callable[..., UserValue]) -> str:
    """Returns file and line of a function, in parentheses after a blank, or "" if unknown."""
    code = getattr(function, "__code__", None)
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"


@dataclass(frozen=True, slots=True)
class _Described:
    """Description of tools, built from their signatures and docstrings. For its attributes, see
    `Toolbox`.
    """

    readers: Mapping[str, Any]
    schemas: Mapping[str, Any]
    shared: Mapping[str, Any]
    shown: tuple[Mapping[str, Json], ...]
    written: tuple[str, ...]


def _describe_with_cache(tools: tuple[Callable[..., Any], ...]) -> _Described:
    """Describes tools. The description is cached as long as the tools exist. Raises ParameterError
    like `Toolbox.for_tools`.
    """
    try:
        keys = tuple((weakref.ref(tool), tool.__doc__) for tool in tools)
        hash(keys)
    except TypeError:  # can't be weakly referenced or hashed
        return _describe(tools)
    return _describe_by_keys(keys)


@lru_cache(maxsize=64)
def _describe_by_keys(
    keys: tuple[tuple[weakref.ref[Callable[..., Any]], str | None], ...],
) -> _Described:
    return _describe([tool for reference, _ in keys if (tool := reference()) is not None])


def _describe(tools: Sequence[Callable[..., Any]]) -> _Described:
    # pydantic is slow to import
    from sglang_lite.constraints.python_types.pydantic_schema import schemas_of

    own = {tool.__name__: tool for tool in tools if isinstance(tool, SchemaTool)}
    readers = {
        tool.__name__: _build_arguments_adapter(tool) for tool in tools if tool.__name__ not in own
    }
    found, shared = schemas_of(list(readers.items()))
    found |= {name: dict(tool.schema) for name, tool in own.items()}
    schemas = {tool.__name__: found[tool.__name__] for tool in tools}
    shown = tuple(
        Tool(
            tool.__name__,
            inspect.getdoc(tool) or "",
            _schema_for_models(arguments_schema(schema, shared)),
        ).shown
        for tool, schema in zip(tools, schemas.values())
    )
    return _Described({**readers, **own}, schemas, shared, shown, tuple(map(to_json, shown)))


def _write_json(value: Json) -> str:
    """Returns a value as JSON text, or as ASCII JSON if it contains an unpaired surrogate."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if replace_half_pairs(text) == text:
        return text
    return json.dumps(value, separators=(",", ":"))


def _add_defaults(
    given: Mapping[str, Json], used: Mapping[str, UserValue], reader: Any
) -> dict[str, Json]:
    """Returns the given arguments and the defaults of the others, in the order of the parameters.
    Leaves out defaults that JSON can't preserve, such as a pydantic secret.

    Args:
        used: all arguments as values.
        reader: pydantic TypeAdapter of the arguments.
    """
    from pydantic_core import to_json as dump

    found = dict[str, Json]()
    for name, value in used.items():
        if name in given:
            found[name] = given[name]
            continue
        try:
            data = json.loads(dump(value, inf_nan_mode="strings"))
            again = reader.validate_json(_write_json({**given, name: data}))[name]
            if type(again) is type(value) and bool(again == value):
                found[name] = data
        except Exception:  # a user's class may raise anything
            continue
    return found


def check_tools(tools: object, where: Location | None = None) -> None:
    """Raises ParameterError if `tools` is not a list or is empty."""
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ParameterError(
            "tools",
            f"{tools!r:.60} is not a list of functions.",
            hint="Give a list: tools=[search].",
            where=where,
        )
    if not tools:
        raise ParameterError(
            "tools", "the list is empty.", hint="Give at least one function.", where=where
        )


def tool_schemas(tools: Sequence[Callable[..., UserValue]]) -> list[Mapping[str, Json]]:
    """Returns tools in the form that chat templates and chat APIs expect: `{"type": "function",
    "function": {"name", "description", "parameters"}}`, with the docstring and the JSON Schema of
    the parameters. `gen(tools=…)` shows them to a model in this form.

    Raises:
        ParameterError: as for `gen(tools=…)`.
    """
    # callers may modify the result, but descriptions are cached
    return deepcopy([*Toolbox.for_tools(tools, "auto").shown])


def _schema_for_models(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a tool's arguments in the form shown to models. It contains only the
    keys that models know, in their usual order. Documents that arguments may quote are left out.
    """
    names = ("type", "properties", "required", "$defs")
    return {name: without_documents(schema[name]) for name in names if name in schema}


def _drop_title(schema: dict[str, Any]) -> None:
    """Drops a schema's auto-generated title, which would cost tokens in every prompt."""
    schema.pop("title", None)


def _build_arguments_adapter(tool: Callable[..., Any]) -> Any:
    """Returns the pydantic TypeAdapter of a function's keyword arguments. Raises ParameterError if
    the signature can't be used.
    """
    from pydantic import PydanticUserError, TypeAdapter, with_config

    from sglang_lite.constraints.python_types.pydantic_schema import schema_of

    fields: dict[str, Any] = {}
    try:
        parameters = inspect.signature(tool).parameters.values()
    except (TypeError, ValueError) as error:  # some functions written in C
        raise ParameterError(
            "tools", f"{tool.__name__} has no signature.", hint="Wrap it in a function."
        ) from error
    try:
        hints = inspect.get_annotations(tool, eval_str=True)
        for parameter in parameters:
            if parameter.kind in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
                parameter.POSITIONAL_ONLY,
            ):
                raise ParameterError(
                    "tools", f"{tool.__name__}: the parameter {parameter} can't be given by name."
                )
            if parameter.name == IDEMPOTENCY_KEY:
                continue
            if parameter.name not in hints:
                problem = f"{tool.__name__}: the parameter {parameter.name} has no type."
                raise ParameterError(
                    "tools", problem, hint=f"Annotate it, e.g. {parameter.name}: str."
                )
            kind = make_readable(hints[parameter.name])
            fields[parameter.name] = (
                kind if parameter.default is parameter.empty else NotRequired[kind]
            )
        arguments: Any = TypedDict(f"{tool.__name__}_arguments", fields)  # type: ignore[misc] # made at run time
        forbid_others = with_config({"extra": "forbid", "json_schema_extra": _drop_title})
        adapter = TypeAdapter(forbid_others(arguments))
        schema_of(adapter, tool.__name__)
    except (ConstraintError, PydanticUserError, NameError, TypeError) as error:
        raise ParameterError(
            "tools", f"{tool.__name__}: a parameter's type can't be written as JSON: {error}"
        ) from error
    return adapter


# Keywords with which a schema may allow members that `properties` does not name.
_ALLOW_MORE = (
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "$ref",
    "anyOf",
    "oneOf",
    "allOf",
    "if",
    "dependentSchemas",
    "$dynamicRef",
)


class SchemaTool:
    """Tool for `gen(tools=…)` and `use_tools`, described by a JSON schema.

    Args:
        name: name of the tool.
        description: text that describes it to the model.
        schema: JSON schema of the arguments, an object. Members that it does not name are rejected,
            unless the schema defines which are allowed.
        call: function that takes the arguments as one dictionary.
        start: starts such a call and returns its future, which can be cancelled; None if calls
            only run in the caller's thread.
        result_schema: JSON schema of the results; None if they can be anything.
        origin: where the tool comes from, for messages.

    Raises:
        ParameterError: `schema` does not describe an object or can't be enforced on a model, or
            results can't be checked against `result_schema`.
    """

    def __init__(
        self,
        name: str,
        description: str,
        schema: Mapping[str, Json],
        call: Callable[[dict[str, Json]], UserValue],
        start: Callable[[dict[str, Json]], Future[Json]] | None = None,
        *,
        result_schema: Mapping[str, Json] | None = None,
        origin: str = "",
    ) -> None:
        own = forbid_extra_members(
            {key: value for key, value in schema.items() if key != "$schema"}
        )
        if own.get("type", "object") != "object":
            raise ParameterError("tools", f"{name}: its schema is not that of an object.")
        self.__name__ = name
        self.__doc__ = description
        self.schema: Mapping[str, Json] = {"$id": f"tool:{name}", **own, "type": "object"}
        self.result_schema = result_schema
        self._result_constraint = read_result_schema(name, result_schema)
        self.origin = origin
        self._call = call
        self._start = start
        try:
            self._constraint = json_schema(self.schema)
            raise_if_uncheckable(self._constraint)
        except ConstraintError as error:
            problem = f"{name}: its schema can't be used: {error.message}"
            raise ParameterError("tools", problem, hint=error.hint) from error

    def __repr__(self) -> str:
        return f"SchemaTool({self.__name__!r})"

    def __call__(self, /, **arguments: Json) -> UserValue:
        return self._call(arguments)

    @property
    def can_start(self) -> bool:
        """True if calls can be started without waiting for them."""
        return self._start is not None

    def start(self, arguments: dict[str, Json]) -> Future[Json]:
        """Starts a call and returns its future. Only allowed if `can_start` is True."""
        assert self._start is not None
        return self._start(arguments)

    def validate_json(self, text: str) -> dict[str, Json]:
        """Parses arguments from a JSON text and checks them against the schema.

        Raises:
            ValueError: the text is not JSON, or does not fit the schema.
        """
        value = json.loads(text)
        for violation in violations(self._constraint, value):
            raise ValueError(str(violation.message))
        assert isinstance(value, dict)
        return value

    def read_result(self, text: str) -> Json:
        """Parses a result that the user supplies as JSON, or else takes the text itself as the
        result. Raises ValueError if the result does not fit the schema of the results.
        """
        values: list[Json] = [text]
        with suppress(ValueError):
            values.insert(0, json.loads(text))
        if self._result_constraint is None:
            return values[0]
        for value in values:
            if not any(violations(self._result_constraint, value)):
                return value
        raise ValueError(f"{text!r:.60} does not fit the schema of the results.")

    @property
    def parameters(self) -> str:
        """Names and types of the parameters, formatted like a signature."""
        properties = self.schema.get("properties", {})
        required = self.schema.get("required", [])
        shown = [
            f"{name}{'' if name in required else '?'}: {_type(each)}"
            for name, each in properties.items()
        ]
        return f"({', '.join(shown)})"


def read_result_schema(name: str, schema: Mapping[str, Json] | None) -> JsonSchema | None:
    """Returns the constraint for a tool's results; None if they can be anything. Raises
    ParameterError if the schema is invalid, or has a pattern that can't be checked in linear time.
    """
    if schema is None:
        return None
    try:
        constraint = json_schema(schema, format="annotate")
        raise_if_uncheckable(constraint)
    except ConstraintError as error:
        problem = f"{name}: the schema of its results can't be used: {error.message:.200}"
        raise ParameterError("tools", problem, hint=error.hint) from error
    return constraint


def forbid_extra_members(schema: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the schema of a tool's arguments, changed to forbid members that it does not name.
    Leaves the schema unchanged if it defines itself which other members are allowed.
    """
    if schema.keys().isdisjoint(_ALLOW_MORE) and {*schema.get("required", ())} <= {
        *schema.get("properties", ())
    }:
        return {**schema, "additionalProperties": False}
    return dict(schema)


def _type(schema: Json) -> str:
    found = schema.get("type", "any") if isinstance(schema, dict) else "any"
    return " | ".join(found) if isinstance(found, list) else str(found)
