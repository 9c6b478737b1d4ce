"""Converts errors to records and back."""

from __future__ import annotations

from typing import Any, Final

from sglang_lite import errors
from sglang_lite.errors import Location, SglError, WireError, restored
from sglang_lite.protocol.results import Failure as Failure
from sglang_lite.wire.limits import LIMITS
from sglang_lite.wire.plain_data import is_plain

ERRORS: Final[dict[str, type[SglError]]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, SglError)
}
# members that a class adds, and whether they are required
_OWN: Final[dict[type[SglError], dict[str, bool]]] = {
    errors.ParameterError: {"parameter": True},
    errors.CapabilityError: {"parameter": False},
    errors.ConstraintError: {"pointer": False},
    WireError: {"pointer": True},
    errors.ValueValidationError: {"text": True, "value": False},
    errors.CodeError: {"text": True, "value": False},
    errors.TruncatedError: {"text": True, "value": False, "left_out": True, "max_tokens": False},
    errors.RequestAbortedError: {"partial": False},
    errors.BatchError: {"results": True},
    errors.BudgetError: {"limit": True},
}
_LONGEST_TEXT = 100_000  # maximum number of characters of each text
_LONGEST_REPR = 200


def as_failure(error: SglError) -> Failure:
    kind: Any = next(kind for kind in type(error).__mro__ if ERRORS.get(kind.__name__) is kind)
    own: dict[str, Any] = {name: getattr(error, name, None) for name in _OWN.get(kind, ())}
    for name in ("parameter", "pointer", "text", "limit"):
        if own.get(name) is not None:
            own[name] = _sendable_text(own[name])
    if not is_plain(own.get("value"), LIMITS):
        own["value"] = _sendable_text(f"{own['value']!r:.{_LONGEST_REPR}}")
    if "results" in own:
        own["results"] = tuple(_result_failure(each) for each in own["results"] or ())
    notes = [_sendable_text(note) for note in getattr(error, "__notes__", ())]
    if error.__cause__ is not None:
        notes.append(_sendable_text(f"Caused by {_type_and_text(error.__cause__)}"))
    return Failure(
        type=kind.__name__,
        message=_sendable_text(error.message),
        hint=_sendable_text(error.hint),
        where=None
        if error.where is None
        else (
            _sendable_text(error.where.file),
            error.where.line,
            _sendable_text(error.where.function),
        ),
        notes=tuple(notes),
        **own,
    )


def _result_failure(result: object) -> Failure | None:
    if isinstance(result, BaseException) and not isinstance(result, SglError):
        return as_failure(errors.ProgramError(_type_and_text(result)))
    return as_failure(result) if isinstance(result, SglError) else None


def _type_and_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _sendable_text(text: object) -> str:
    return str(text)[:_LONGEST_TEXT].encode("utf-8", "backslashreplace").decode()


def as_error(failure: Failure) -> SglError:
    """Returns the error that a record describes.

    Raises:
        WireError: the error's class is unknown, a required member is missing, or a member does not
            belong to the class.
    """
    kind = ERRORS.get(failure.type)
    if kind is None:
        what = f"{failure.type!r:.80} is not the name of an error"
        raise WireError(what, pointer="/data/type", hint=f"Use {', '.join(ERRORS)}.")
    names = _OWN.get(kind, {})
    own: dict[str, Any] = {}
    for name in (
        "parameter",
        "pointer",
        "text",
        "value",
        "partial",
        "results",
        "limit",
        "left_out",
        "max_tokens",
    ):
        value = getattr(failure, name)
        if value is not None and name not in names:
            raise WireError(
                f"a {kind.__name__} has no `{name}`", pointer=f"/data/{name}", hint="Leave it out."
            )
        if value is None and names.get(name):
            raise WireError(f"`{name}` is missing: a {kind.__name__} requires it", pointer="/data")
        if name in names:
            own[name] = value
    if failure.results is not None:
        own["results"] = [each and as_error(each) for each in failure.results]
    if kind is errors.BudgetError:
        own["state"] = None
    where = None if failure.where is None else Location(*failure.where)
    attributes = {"message": failure.message, "hint": failure.hint, "where": where, **own}
    error = restored(kind, (failure.message,), attributes)
    for note in failure.notes:
        error.add_note(note)
    return error
