"""Results of tool calls, as texts for the model to read. Failures are described in the text."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from sglang_lite.lang.backend.token_counts import TiktokenEncoding, count_text_tokens
from sglang_lite.lang.failure_text import describe_failure
from sglang_lite.lang.tools import ReportedFailure, ToolCall, replace_half_pairs, tool_failure
from sglang_lite.protocol import (
    BudgetError,
    ParameterError,
    RequestAbortedError,
    ResumeError,
    ToolError,
)
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.run_log import PendingCall

OnToolError: TypeAlias = Literal["show", "raise"] | Callable[[ToolCall, Exception], str]

_MAX_COUNTED: Final = 1 << 20  # characters of a text that are tokenised to see whether it fits
_TOKEN: Final = 6  # characters; most tokens have less
# Errors that end the whole program, whatever raised them. A model could do nothing about them.
ENDS_PROGRAM = (BudgetError, RequestAbortedError, ResumeError)


@dataclass(frozen=True, slots=True)
class CallResult:
    """Result of a call.

    Attributes:
        text: text that the model reads.
        error: error of the call; None if it did not fail.
        pending: calls at which a program inside this call was suspended, so that this call has no
            result yet.
    """

    text: str
    error: ToolError | None = None
    pending: tuple[PendingCall, ...] = ()


def cut_middle(text: str, limit: int, tokenizer: TiktokenEncoding | None) -> str:
    """Shortens a text to at most `limit` tokens: a note replaces the middle of a longer text.

    Args:
        tokenizer: tokenizer of the model; None to estimate the number.
    """
    # no token has less than a byte
    if len(text.encode("utf-8", "replace")) <= limit:
        return text
    whole = count_text_tokens(text[:_MAX_COUNTED], tokenizer)
    if len(text) <= _MAX_COUNTED and whole <= limit:
        return text
    kept = min(len(text), limit * _TOKEN)
    while kept:
        head = text[: (kept + 1) // 2]
        tail = text[len(text) - kept // 2 :]
        left_out = f"\n[… {len(text) - kept:,} characters are left out …]\n"
        count = count_text_tokens(head + left_out + tail, tokenizer)
        if count <= limit:
            return head + left_out + tail
        kept = min(kept - 1, kept * limit // count)
    return "[… left out …]"


def finish_call(call: ToolCall, run: Callable[[], UserValue], policy: OnToolError) -> CallResult:
    """Runs a call and returns its result.

    Args:
        run: returns the tool's result, or raises the tool's exception.
        policy: whether a failure is shown to the model or raised, or a function that returns the
            text to show.

    Raises:
        ToolError: the tool failed, and the policy is "raise".
        BudgetError, RequestAbortedError: the tool raised it.
    """
    try:
        result = run()
        if isinstance(result, ReportedFailure):
            raise ToolError(result.removeprefix("Error: "))
        return CallResult(_result_as_text(call.name, result))
    except ENDS_PROGRAM:
        raise
    except Exception as error:  # a tool may raise anything
        return _show_failure(call, error, policy)


def _show_failure(call: ToolCall, error: Exception, policy: OnToolError) -> CallResult:
    failure = tool_failure(call.name, error)
    failure.__cause__ = error
    if policy == "raise":
        raise failure
    if policy == "show":
        return CallResult(f"Error: {text_for_model(error)}", failure)
    text = policy(call, error)
    if not isinstance(text, str):
        raise ParameterError(
            "on_tool_error",
            f"the function returned {type(text).__name__}, not the text for the model.",
        ) from error
    return CallResult(replace_half_pairs(text), failure)


def text_for_model(error: Exception) -> str:
    if isinstance(error, ToolError):  # written for the model
        return replace_half_pairs(error.message if error.shown is None else error.shown)
    return replace_half_pairs(describe_failure(error))


def _result_as_text(name: str, result: Any) -> str:
    """Converts a tool's result to text: JSON if the result can be written as JSON, otherwise
    `str(result)`. Raises ToolError if it has neither.
    """
    kind = type(result).__name__
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise ToolError(f"{name} returned a {kind}, which has no text. Let it return a list.")
    try:
        text = json.dumps(result, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that aren't strings, or a cycle
        text = _str_of_result(name, result)
    except Exception as error:
        raise _no_text_error(name, kind) from error
    return replace_half_pairs(text)


def _str_of_result(name: str, result: Any) -> str:
    try:
        return str(result)
    except Exception as error:  # a user's class may fail to be text
        raise _no_text_error(name, type(result).__name__) from error


def _no_text_error(name: str, kind: str) -> ToolError:
    return ToolError(f"{name} returned a value of type {kind}, which could not be written as text.")
