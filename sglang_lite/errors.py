"""Exceptions that this package raises deliberately, and locations in the user's program."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


def short_repr(value: object) -> str:
    """Returns a short representation of a value for error messages."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return "a huge number"


def with_article(word: str) -> str:
    """Puts "a" or "an" before a word, which may be quoted."""
    return f"{'an' if word.lstrip(chr(39))[:1] in tuple('aeioAEIO') else 'a'} {word}"


class Location(NamedTuple):
    """Location in the user's program: file, line number and qualified name of the function."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class Origin:
    """The call to a provider that an error comes from.

    Attributes:
        provider: name of the provider.
        model: name of the model.
        request_id: id of the request or of its answer, for the provider's support; None if unknown.
        node: name of the node that made the call; None if unknown.
    """

    provider: str
    model: str
    request_id: str | None = None
    node: str | None = None

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Origin | None:  # JSON
        """Builds the origin of an answer from its metadata. Returns None if the answer did not come
        from a provider.
        """
        return (
            cls(meta["provider"], str(meta.get("model")), meta.get("id"))
            if "provider" in meta
            else None
        )


class SglError(Exception):
    """Base of all exceptions that this package raises deliberately.

    Args:
        message: description of the problem, which names the parameter, file, JSON Pointer or
            variable.
        hint: advice for the reader, or an empty string.
        where: location in the user's program, or None if unknown.

    Attributes:
        retryable: whether the same operation may succeed later.
        origin: call to a provider that failed or whose answer was invalid; None for other errors.
        usage: usage of a call that failed after it was answered; None if unknown.
    """

    retryable: bool = False
    origin: Origin | None = None
    usage: Any = None  # a protocol.Usage; records import errors, so errors can't import records

    def __init__(self, message: str, *, hint: str = "", where: Location | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.where = where

    def __copy__(self) -> SglError:
        return restored(type(self), self.args, self.__dict__)

    def __reduce__(self) -> tuple[object, ...]:
        # not through constructors, which differ
        return restored, (type(self), self.args, self.__dict__)

    def __str__(self) -> str:
        text = self.message
        if self.hint:
            text += f" {self.hint}" if text.endswith((".", "!", "?", "^")) else f". {self.hint}"
        if self.where is not None:
            text += f" [{self.where}]"
        return text


def restored(
    kind: type[SglError], args: tuple[Any, ...], attributes: Mapping[str, Any]
) -> SglError:  # depends on the kind of error
    """Creates an error with the given attributes, without calling its constructor. Used to unpickle
    errors.
    """
    error = kind.__new__(kind, *args)
    error.args = args  # OSError's __new__ does not set them
    error.__dict__.update(attributes)
    return error


class ParameterError(SglError, ValueError):
    """Raised if a parameter of a public function has a value that can't be honoured. It is raised
    before anything runs.
    """

    def __init__(
        self, parameter: str, problem: str, *, hint: str = "", where: Location | None = None
    ) -> None:
        super().__init__(f"{parameter}: {problem}", hint=hint, where=where)
        self.parameter = parameter


class ConstraintError(SglError, ValueError):
    """Raised if a regex, schema or grammar is invalid or can't be enforced. `pointer` is a JSON
    Pointer to the fault in a schema, or None if there is none.
    """

    def __init__(
        self,
        message: str,
        *,
        pointer: str | None = None,
        hint: str = "",
        where: Location | None = None,
    ) -> None:
        if pointer is not None:
            message = f"{message.removesuffix('.')} (at {pointer or '/'})"
        super().__init__(message, hint=hint, where=where)
        self.pointer = pointer


class WireError(SglError, ValueError):
    """Raised if external data can't be decoded as a record, or a record can't be encoded. `pointer`
    is a JSON Pointer to the invalid part.
    """

    def __init__(self, message: str, *, pointer: str = "", hint: str = "") -> None:
        super().__init__(f"wire: {message.removesuffix('.')} (at {pointer or '/'})", hint=hint)
        self.pointer = pointer


class TemplateError(SglError, ValueError):
    """Raised if a chat template is missing, fails to render or can't be rendered turn by turn."""


class ModelError(SglError):
    """Raised if a model can't be found, read or run. The message names the file, what was found and
    what is supported.
    """


class DownloadError(ModelError):
    """Raised if a download fails: a network or disk error, or a hash that does not match."""


class CapabilityError(SglError):
    """Raised if a program needs a feature that its backend lacks. It is raised before the first
    call that would need the feature.

    Attributes:
        parameter: parameter, or location in a request, that needs the feature; None for other
            causes.
    """

    def __init__(
        self,
        message: str,
        *,
        parameter: str | None = None,
        hint: str = "",
        where: Location | None = None,
    ) -> None:
        super().__init__(
            message if parameter is None else f"{parameter}: {message}", hint=hint, where=where
        )
        self.parameter = parameter


class ProgramError(SglError):
    """Raised if a node of a program fails because other code raised an exception (the `__cause__`).
    Also raised if a program is misused.
    """


class ResumeError(ProgramError):
    """Raised if a resumed run does something other than what its log records, or has other tools.
    The message shows both.
    """


class UnknownVariableError(ProgramError, KeyError):
    """Raised if a program has no variable with the requested name."""

    __str__ = SglError.__str__  # KeyError would print the repr of the message


class TraceError(ProgramError):
    """Raised while tracing a program whose body never ends, branches on a value that is known only
    in a run, or passes such a value as a tool.
    """


class CompileError(TraceError):
    """Kept for compatibility: raised by `compile`, because programs are no longer compiled."""


class ToolError(ProgramError):
    """Raised if a tool fails (its exception is the `__cause__`), or if `use_tools` ends without an
    answer. Tools may raise it themselves: the model reads its message as it is, while messages of
    other exceptions are redacted.

    Args:
        shown: text for the model to read instead of the message; None for the message.

    Attributes:
        tool: name of the tool that failed; None if no tool did.
        limit: limit of `use_tools` that ended it: "max_steps" or "max_failures"; None for others.
        state: state to which `use_tools` added, with everything that was done before; None if
            something else raised the error, or if it comes from another process, as are the other
            attributes then.
    """

    shown: str | None = None
    tool: str | None = None
    limit: str | None = None
    state: Any = None  # a ProgramState; the language imports errors

    def __init__(
        self,
        message: str,
        *,
        shown: str | None = None,
        tool: str | None = None,
        limit: str | None = None,
        hint: str = "",
        where: Location | None = None,
    ) -> None:
        super().__init__(message, hint=hint, where=where)
        given = {"shown": shown, "tool": tool, "limit": limit}
        self.__dict__.update({name: value for name, value in given.items() if value is not None})

    def __reduce__(self) -> tuple[object, ...]:
        # a state can't leave its process
        return restored, (type(self), self.args, {**self.__dict__, "state": None})


class ValueValidationError(SglError, ValueError):
    """Raised if a generated text is not a value of the requested type.

    Attributes:
        text: text that the model wrote.
        value: parsed value that failed validation, or None if the text could not be parsed.
    """

    def __init__(
        self,
        message: str,
        *,
        text: str,
        value: object = None,
        hint: str = "",
        where: Location | None = None,
    ) -> None:
        super().__init__(message, hint=hint, where=where)
        self.text = text
        self.value = value


class CodeError(ValueValidationError):
    """Raised if a program that a model wrote, for `gen(code=…)`, is not valid or fails.

    Attributes:
        text: the program, as the model wrote it.
        line: line of the program, from 1; None if the error comes from another process.
        kind: what happened: "syntax" or "type" if nothing was run; "limit"; "tool" if a function
            raised an exception; "argument" if an argument is not valid; otherwise the name of the
            exception that Python would raise. None if the error comes from another process.
    """

    line: int | None = None
    kind: str | None = None

    def __init__(
        self,
        message: str,
        *,
        text: str,
        line: int | None = None,
        kind: str | None = None,
        value: object = None,
        hint: str = "",
        where: Location | None = None,
    ) -> None:
        super().__init__(message, text=text, value=value, hint=hint, where=where)
        given = {"line": line, "kind": kind}
        self.__dict__.update({name: found for name, found in given.items() if found is not None})


class TruncatedError(ValueValidationError):
    """Raised if a limit cut an answer before its value was complete. See the argument `shortened`
    of `gen`.

    Attributes:
        text: the answer: a shorter value if closing brackets could complete it, else the text as it
            was cut.
        value: the known part of the value: of the requested type if possible, else plain data; None
            if nothing is known. Each number, string … in it is as the model wrote it.
        left_out: JSON Pointers of the first values that are missing; "" if there is no value.
        max_tokens: a limit that is likely to suffice, or None if unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        text: str,
        value: object = None,
        left_out: tuple[str, ...] = ("",),
        max_tokens: int | None = None,
        hint: str = "",
        where: Location | None = None,
    ) -> None:
        super().__init__(message, text=text, value=value, hint=hint, where=where)
        self.left_out = left_out
        self.max_tokens = max_tokens


class BudgetError(SglError):
    """Raised instead of making a call that could exceed a limit of its run: `max_cost` or
    `max_total_tokens`.

    Attributes:
        limit: name of the limit.
        state: state of the run, with everything that was done before; None if the run has no state
            or the error comes from another process.
    """

    def __init__(
        self, limit: str, problem: str, *, hint: str = "", where: Location | None = None
    ) -> None:
        super().__init__(f"{limit}: {problem}", hint=hint, where=where)
        self.limit = limit
        self.state: Any = None

    def __reduce__(self) -> tuple[object, ...]:
        # a state can't leave its process
        return restored, (type(self), self.args, {**self.__dict__, "state": None})


class BackendError(SglError):
    """Raised if a backend fails to answer.

    Attributes:
        retry_after: seconds after which the provider accepts a retry; None if it did not specify
            any.
    """

    retry_after: float | None = None


class RequestTimeoutError(BackendError, TimeoutError):
    """Raised if a node or run takes longer than its `timeout`.

    Attributes:
        state: state of the run, with everything finished so far, if the run's timeout ended its
            body; else None. It is dropped when the error is pickled.
    """

    retryable = True
    state: Any = None

    def __reduce__(self) -> tuple[object, ...]:
        return restored, (type(self), self.args, {**self.__dict__, "state": None})


class RequestAbortedError(BackendError):
    """Raised if a request is aborted before it has finished.

    Attributes:
        partial: result so far, with the finish reason "abort"; for a selection, only its usage;
            None for a program, whose generations and selections have their own.
    """

    partial: Any = None  # a protocol.Generation, as above


class OverloadedError(BackendError):
    """Raised if a request is rejected because of a queue or memory limit. A later retry may
    succeed.
    """

    retryable = True


class RefusalError(BackendError):
    """Raised if the model, or a filter of its provider, declines to answer."""


class EngineClosedError(BackendError):
    """Raised if the engine has been closed, or its loop has crashed (the `__cause__`)."""


class BatchError(ProgramError):
    """Raised at the end of a batch in which programs have failed.

    Attributes:
        results: for each item, in input order, its state or the exception that ended it.
    """

    def __init__(
        self,
        message: str,
        results: Sequence[object],
        *,
        hint: str = "",
        where: Location | None = None,
    ) -> None:
        super().__init__(message, hint=hint, where=where)
        # one that notebooks show
        self.results = results if isinstance(results, list) else list(results)


def redact_address(url: str) -> str:
    """Removes the parts of a URL that may be secret: user name and password, query and fragment."""
    return re.sub(r"^([^:/?#]*://)[^/?#]*@", r"\1", re.split("[?#]", url, maxsplit=1)[0])
