"""Runs the program that a model wrote for `gen(code=…)`, on a thread of its own, and records its calls."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec

from sglang_lite.lang.code_mode.calls import CodeCall
from sglang_lite.lang.code_mode.code_tools import CheckedProgram, CodeTools
from sglang_lite.lang.concurrency.pool import run_on_other_thread
from sglang_lite.lang.execution.base_player import BasePlayer
from sglang_lite.lang.execution.operations import GenOp
from sglang_lite.lang.tool_events import ToolEvent
from sglang_lite.lang.tools import ToolCall
from sglang_lite.protocol import CodeError, Generation, ToolError
from sglang_lite.protocol.anything import Json, UserValue

CALLS: Final = "code_calls"  # in the metadata of a generation


async def run_code(
    player: BasePlayer,
    op: GenOp,
    code: CodeTools,
    answers: list[Generation],
    program: CheckedProgram,
) -> UserValue:
    """Runs a program and returns its result.

    Args:
        code: the functions that it may call.
        answers: the sample. It gets a record of the calls in its metadata, also if the program
            fails. If it has one already, as it is kept from an earlier run, these calls are not made
            again.

    Raises:
        CodeError: the program fails.
        ToolError: a function failed, with `on_tool_error="raise"`.
    """
    (answer,) = answers
    stopped = threading.Event()
    made: list[CodeCall] = []
    name = op.node.name or ""

    def note(call: ToolCall, record: CodeCall | None) -> None:
        if record is None:
            event = ToolEvent("call", name, call)
        else:
            error = None if record.error is None else ToolError(record.error, tool=call.name)
            event = ToolEvent("result", name, call, f"{record.error or record.result}", error)
        player.run.record_event(event)

    recorded = _find_replayable(answer.meta.get(CALLS))
    run = partial(code.run, program, stopped, made, note, recorded)
    try:
        return await run_on_other_thread(_start_thread, run)
    except CodeError as error:
        error.hint += _tell_calls(made)
        raise
    finally:
        stopped.set()
        began = player.run.account.started
        calls = [_as_record(each, began) for each in made]
        answers[0] = msgspec.structs.replace(answer, meta={**answer.meta, CALLS: calls})


def _start_thread(job: object) -> None:
    assert callable(job)
    threading.Thread(target=job, name="sglang_lite-code", daemon=True).start()


def _as_record(call: CodeCall, began: float) -> dict[str, Json]:
    """Returns the record of a call for the metadata, with times in seconds since the run began."""
    return {
        "tool": call.tool,
        "line": call.line,
        "arguments": call.arguments,
        "result": call.result,
        "replayable": call.replayable,
        "error": call.error,
        "start": call.started - began,
        "end": call.ended - began,
    }


def _find_replayable(recorded: Json) -> Sequence[dict[str, Json]]:
    """Returns the calls of an earlier run up to the first whose result was not kept."""
    found: list[dict[str, Json]] = []
    for each in recorded or ():
        if not each["replayable"]:
            break
        found.append(each)
    return found


def _tell_calls(made: Sequence[CodeCall]) -> str:
    """Tells the model which calls its failed program has made: a new one makes them again."""
    shown = ", ".join(dict.fromkeys(each.tool for each in made))
    return f" {len(made)} calls were made already ({shown})." if made else ""
