"""Runs a program that a model wrote for `gen(code=…)` in a new thread, and records its calls."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import msgspec

from sglang_lite.lang.code_mode.calls import CodeCall
from sglang_lite.lang.code_mode.code_tools import CheckedProgram, CodeTools
from sglang_lite.lang.concurrency.pool import run_on_other_thread
from sglang_lite.lang.execution.answer_log import digest_question
from sglang_lite.lang.execution.base_player import BasePlayer
from sglang_lite.lang.execution.operations import GenOp
from sglang_lite.lang.execution.program_log import (
    CALLS,
    ProgramLog,
    describe_calls,
    log_program,
    strip_program_number,
)
from sglang_lite.lang.tool_events import ToolEvent
from sglang_lite.lang.tools import ToolCall
from sglang_lite.protocol import CodeError, Generation, ToolError
from sglang_lite.protocol.anything import Json, UserValue


async def run_code(
    player: BasePlayer,
    op: GenOp,
    code: CodeTools,
    answers: list[Generation],
    program: CheckedProgram,
) -> UserValue:
    """Runs a program and returns its result.

    Args:
        code: the functions that the program may call.
        answers: list with the sample, whose metadata get a record of the calls, even if the program
            fails. If a sample kept from an earlier run already has such a record, the recorded
            calls are not made again.

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

    log = _open_log(player, op, answer)
    recorded = _find_replayable(answer.meta.get(CALLS)) if log is None else ()
    run = partial(code.run, program, stopped, made, note, recorded, log)
    try:
        return await run_on_other_thread(_start_thread, run)
    except CodeError as error:
        error.hint += describe_calls([{"tool": each.tool} for each in made])
        raise
    finally:
        stopped.set()
        began = player.run.account.started
        calls = [_as_record(each, began) for each in made]
        meta = {**strip_program_number(answer.meta), CALLS: calls}
        answers[0] = msgspec.structs.replace(answer, meta=meta)


def _open_log(player: BasePlayer, op: GenOp, answer: Generation) -> ProgramLog | None:
    """Logs a program that is about to run. Returns the log for its calls, or None if its run is not
    logged.
    """
    run = player.run
    if not run.is_logged or run.log is None or not op.in_body:
        return None
    node = op.variable.node
    number = log_program(run, node, op.node.name, digest_question(player, op), answer)
    return ProgramLog(run, node, number)


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
    """Returns the recorded calls that come before the first call whose result was not recorded."""
    found: list[dict[str, Json]] = []
    for each in recorded or ():
        if not each["replayable"]:
            break
        found.append(each)
    return found
