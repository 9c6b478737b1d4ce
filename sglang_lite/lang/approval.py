"""Approval of tool calls: reads the approver of each tool, and the approvers' decisions."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from sglang_lite.protocol import Location, ParameterError
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.run_log import CallDecision, PendingCall

Verdict: TypeAlias = bool | CallDecision | Literal["ask"]
Approver: TypeAlias = Literal["ask"] | Callable[[PendingCall], Verdict | Awaitable[Verdict]]
# One approver for all tools, or a mapping from tools (names or functions) to approvers. The type of
# its keys is invariant, so a narrower type would reject dicts that contain only names or only
# functions.
Approve: TypeAlias = Approver | Mapping[UserValue, Approver]

_CURE = 'Give "ask" or a function of the call, or a mapping from tools to those.'


def read_approvers(
    approve: Approve | None,
    tools: Sequence[Callable[..., UserValue]],
    where: Location | None,
    *,
    is_async: bool,
) -> dict[str, Approver]:
    """Returns the approver of each tool, by the tool's name. Raises ParameterError if `approve` is
    not a value that `use_tools` accepts.

    Args:
        is_async: whether the body can await an approver.
    """
    if approve is None:
        return {}
    names = [getattr(tool, "__name__", repr(tool)) for tool in tools]
    if not isinstance(approve, Mapping):
        found = dict.fromkeys(names, approve)
    else:
        found = dict[str, Approver]()
        for tool, each in approve.items():
            name = tool if isinstance(tool, str) else getattr(tool, "__name__", None)
            if name is None:
                raise ParameterError(
                    "approve",
                    f"{tool!r:.60} is no tool.",
                    hint="Give tools, or their names.",
                    where=where,
                )
            if name in found:
                raise ParameterError(
                    "approve",
                    f"it has the tool {name!r:.60} twice.",
                    hint="Give the tool or its name, not both.",
                    where=where,
                )
            found[name] = each
    for name, approver in found.items():
        if name not in names:
            raise ParameterError(
                "approve",
                f"{name!r:.60} is not one of the tools.",
                hint=f"The tools: {', '.join(names)}.",
                where=where,
            )
        if approver != "ask" and not callable(approver):
            raise ParameterError(
                "approve", f"{approver!r:.60} approves no calls.", hint=_CURE, where=where
            )
        if inspect.iscoroutinefunction(approver) and not is_async:
            raise ParameterError(
                "approve",
                f"{getattr(approver, '__name__', approver)!r} is a coroutine function, which this body can't await.",
                hint="Make it a plain function, or the body a coroutine function.",
                where=where,
            )
    return found


def read_verdict(verdict: object, call: PendingCall) -> CallDecision | None:
    """Converts an approver's result to a decision, or to None if the call has to wait for one.
    Raises ParameterError if the approver may not return this.
    """
    if verdict is True:
        return call.approve()
    if verdict is False:
        return call.deny()
    if verdict == "ask":
        return None
    if isinstance(verdict, CallDecision) and (verdict.run, verdict.call) == (call.run, call.call):
        return verdict
    raise ParameterError(
        "approve",
        f"the function returned {verdict!r:.60} for {call!r:.200}.",
        hint='Return True, False, "ask", or call.approve(…) or call.deny(reason).',
    )
