"""The error family: every error that this package raises on purpose, and places in the user's program."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_lite.protocol.results import Generation, Usage


def shown(value: object) -> str:
    """A value for an error message: short, however large it is."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python prints no whole number of more than 4,300 digits
        return "a huge number"


class Location:
    """A place in the user's program.

    Attributes:
        at: a code object and the offset of an instruction, so that taking a place costs nothing; file, line and
            function once they were asked for.
    """

    __slots__ = ("at",)

    def __init__(self, code: CodeType, instruction: int) -> None:
        self.at: tuple[CodeType, int] | tuple[str, int, str] = (code, instruction)

    @classmethod
    def named(cls, file: str, line: int, function: str) -> Location:
        """A place by its names: in another process, say."""
        found = cls.__new__(cls)
        found.at = file, line, function
        return found

    @property
    def names(self) -> tuple[str, int, str]:
        """File, line and function."""
        if len(self.at) == 2:
            code, instruction = self.at
            lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
            self.at = code.co_filename, next(lines, None) or code.co_firstlineno, code.co_qualname
        return self.at

    @property
    def file(self) -> str:
        return self.names[0]

    @property
    def line(self) -> int:
        return self.names[1]

    @property
    def function(self) -> str:
        return self.names[2]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Location) and self.names == other.names

    def __hash__(self) -> int:
        return hash(self.names)

    def __reduce__(self) -> tuple[object, ...]:
        return Location.named, self.names  # code can't be pickled

    def __repr__(self) -> str:
        return f"Location({self})"

    def __str__(self) -> str:
        file, line, function = self.names
        return f"{file}:{line} in {function}"


@dataclass(frozen=True, slots=True)
class Origin:
    """Call to a provider that an error comes from; None for what is not known.

    Attributes:
        request_id: as the provider's support asks for it: of the request, or of its answer.
        node: name of the node that asked.
    """

    provider: str
    model: str
    request_id: str | None = None
    node: str | None = None

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Origin | None:  # JSON
        """The call that an answer with this metadata comes from; None: it is not a provider's."""
        return cls(meta["provider"], str(meta.get("model")), meta.get("id")) if "provider" in meta else None


class SglError(Exception):
    """Base of every error this package raises on purpose.

    Args:
        message: what was wrong, naming the parameter, file, JSON Pointer or variable.
        hint: what the reader can do about it.
        where: the line of the user's program, when one is known.

    Attributes:
        retryable: the same may succeed later.
        origin: the call to a provider that failed, or whose answer will not do; None where it was none.
        usage: of a call that failed after it was answered; None: nobody knows of any.
    """

    retryable: bool = False
    origin: Origin | None = None
    usage: Usage | None = None

    def __init__(self, message: str, *, hint: str = "", where: Location | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.where = where

    def __copy__(self) -> SglError:
        return restored(type(self), self.args, self.__dict__)

    def __reduce__(self) -> tuple[object, ...]:
        return restored, (type(self), self.args, self.__dict__)  # by attributes, as constructors differ

    def __str__(self) -> str:
        text = self.message
        if self.hint:
            text += f" {self.hint}" if text.endswith((".", "!", "?", "^")) else f". {self.hint}"
        if self.where is not None:
            text += f" [{self.where}]"
        return text


def restored(
    kind: type[SglError], args: tuple[Any, ...], attributes: Mapping[str, Any]
) -> SglError:  # whatever the kind of error has
    """An error with these attributes; its constructor is not called."""
    error = kind.__new__(kind, *args)
    error.args = args  # which OSError's __new__ leaves to its constructor
    error.__dict__.update(attributes)
    return error


class ParameterError(SglError, ValueError):
    """A parameter of a public function has a value that can't be honoured. Raised before anything runs."""

    def __init__(self, parameter: str, problem: str, *, hint: str = "", where: Location | None = None) -> None:
        super().__init__(f"{parameter}: {problem}", hint=hint, where=where)
        self.parameter = parameter


class ConstraintError(SglError, ValueError):
    """A regex, schema or grammar is invalid or can't be enforced. `pointer` is a JSON Pointer into a schema."""

    def __init__(
        self, message: str, *, pointer: str | None = None, hint: str = "", where: Location | None = None
    ) -> None:
        if pointer is not None:
            message = f"{message.removesuffix('.')} (at {pointer or '/'})"
        super().__init__(message, hint=hint, where=where)
        self.pointer = pointer


class WireError(SglError, ValueError):
    """Data from outside is no record, or a record can't be told as data. `pointer` is a JSON Pointer to the place."""

    def __init__(self, message: str, *, pointer: str = "", hint: str = "") -> None:
        super().__init__(f"wire: {message.removesuffix('.')} (at {pointer or '/'})", hint=hint)
        self.pointer = pointer


class TemplateError(SglError, ValueError):
    """A chat template is missing, fails to render or can't be rendered turn by turn."""


class ModelError(SglError):
    """A model can't be found, read or run: names the file, what was found and what is supported."""


class DownloadError(ModelError):
    """Fetching a model failed: network, disk or a hash that does not match."""


class CapabilityError(SglError):
    """A program needs what its backend can't do. Raised before the first call that would need it.

    Attributes:
        parameter: what asks for it, where that is a parameter, or a place in a request.
    """

    def __init__(
        self, message: str, *, parameter: str | None = None, hint: str = "", where: Location | None = None
    ) -> None:
        super().__init__(message if parameter is None else f"{parameter}: {message}", hint=hint, where=where)
        self.parameter = parameter


class ProgramError(SglError):
    """A node of a program failed with a foreign exception (the `__cause__`), or the program was misused."""


class UnknownVariableError(ProgramError, KeyError):
    """A program has no variable of this name."""

    __str__ = SglError.__str__  # KeyError would print the repr of the message


class TraceError(ProgramError):
    """The body decides by a value that only a run has, or it does not end."""


class CompileError(TraceError):
    """A program can't be compiled: its Python decides by, or works on, what only a run knows."""


class ValueValidationError(SglError, ValueError):
    """Generated text does not make a value of the type asked for.

    Attributes:
        text: what the model wrote.
        value: the parsed value that failed validation, None when the text did not even parse.
    """

    def __init__(
        self, message: str, *, text: str, value: object = None, hint: str = "", where: Location | None = None
    ) -> None:
        super().__init__(message, hint=hint, where=where)
        self.text = text
        self.value = value


class BudgetError(SglError):
    """A call was not made, as it could have gone beyond a limit of its run: `max_cost` or `max_total_tokens`.

    Attributes:
        limit: its name.
        state: the state of the run, with all that was done before; None where there is none (in another process).
    """

    def __init__(self, limit: str, problem: str, *, hint: str = "", where: Location | None = None) -> None:
        super().__init__(f"{limit}: {problem}", hint=hint, where=where)
        self.limit = limit
        self.state: Any = None

    def __reduce__(self) -> tuple[object, ...]:
        return restored, (type(self), self.args, {**self.__dict__, "state": None})  # it stays with its backend


class BackendError(SglError):
    """A backend failed to answer.

    Attributes:
        retry_after: seconds after which the provider wants to be asked again; None: it does not say.
    """

    retry_after: float | None = None


class RequestTimeoutError(BackendError, TimeoutError):
    """A node or run took longer than its `timeout`."""

    retryable = True


class RequestAbortedError(BackendError):
    """The request was aborted before it finished.

    Attributes:
        partial: the result up to there, its `finish_reason` "abort"; None where no single generation was aborted.
    """

    partial: Generation | None = None


class OverloadedError(BackendError):
    """A queue or memory limit refused the request; trying again later may work."""

    retryable = True


class RefusalError(BackendError):
    """The model, or a filter of its provider, declined to answer."""


class EngineClosedError(BackendError):
    """The engine was closed, or its loop stopped after a crash (the `__cause__`)."""


class BatchError(ProgramError):
    """Some programs of a batch failed.

    Attributes:
        results: one entry per item, in input order: the state, or the exception that ended it.
    """

    def __init__(
        self, message: str, results: Sequence[object], *, hint: str = "", where: Location | None = None
    ) -> None:
        super().__init__(message, hint=hint, where=where)
        self.results = list(results)
