"""Logs the calls made by programs that a model wrote. A resumed run does not repeat a call whose
result was logged. A call that was begun but has no logged result waits for a decision.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from sglang_lite.errors import short_repr
from sglang_lite.lang.code_mode.calls import read_given_result
from sglang_lite.lang.execution.run import Run
from sglang_lite.lang.execution.run_log import (
    CallPlace,
    RunLog,
    current_call,
    difference_error,
)
from sglang_lite.lang.suspension import Suspension
from sglang_lite.lang.tools import is_idempotent
from sglang_lite.protocol import Generation, ParameterError, ProgramError
from sglang_lite.protocol.anything import Json, UserValue
from sglang_lite.protocol.run_log import (
    CallDecision,
    LoggedAnswer,
    LoggedCall,
    LoggedResult,
    PendingCall,
)

CALLS: Final = "code_calls"  # in the metadata of a generation
_PROGRAM: Final = "code_program"  # index of the program among all programs of its node


class ProgramLog:
    """View of a run's log for one program, which looks up and logs its calls one at a time.

    Args:
        run: run that the program is part of.
        node: path of the node that wrote the program.
        number: index of the program among all programs that the node wrote.
    """

    def __init__(self, run: Run, node: str, number: int) -> None:
        assert run.log is not None, "only programs of a run with a log have one"
        self._run = run
        self._log: RunLog = run.log
        self._prefix = _path_prefix(node, number)
        self._calls = 0
        self._path = ""

    def reach_call(self, tool: str, arguments: Json) -> LoggedResult | CallDecision | None:
        """Advances to the next call. Returns the call's logged result, or else the decision about
        it, or None if the log has neither.

        Raises:
            ResumeError: the log has a different call at this position.
        """
        self._path = f"{self._prefix}{self._calls}"
        self._calls += 1
        place = self._run.path, self._path
        logged = self._log.calls.get(place)
        now = json.dumps(arguments)
        if logged is not None and (logged.tool, logged.arguments) != (tool, now):
            raise difference_error(
                f"a program calls {logged.tool}({logged.arguments})", f"calls {tool}({now})"
            )
        return self._log.results.get(place) or self._log.decisions.get(place)

    @contextlib.contextmanager
    def begin(self, tool: str, arguments: Json) -> Iterator[None]:
        """Logs that the call made in the `with` block begins. Waits until the record is on the disk
        before the block is entered.
        """
        record = LoggedCall(self._run.path, self._path, tool, json.dumps(arguments))
        self._log.add(record, durable=True)
        token = current_call.set(CallPlace(self._run, self._path))
        try:
            yield
        finally:
            current_call.reset(token)

    def add_result(self, result: Json, error: str | None, *, raised: bool = False) -> None:
        """Logs the call's result or failure, and waits until the record is on the disk."""
        text = json.dumps(result)
        record = LoggedResult(self._run.path, self._path, text, error, raised)
        self._log.add(record, durable=True)

    def make_key(self) -> str:
        """Returns the idempotency key of the call."""
        return self._log.key_of(self._run.path, self._path)


def open_program_node(
    run: Run, node: str, functions: Mapping[str, Callable[..., UserValue]]
) -> None:
    """Suspends a resumed run if calls made by a node's program are in doubt. Called when the body
    adds the node.

    Args:
        node: path of the node.
        functions: the functions that its programs may call, by name.

    Raises:
        ProgramError: the run is part of a batch in a program that has a journal.
        Suspension: calls are in doubt, and may not be repeated.
        ParameterError: a decision about a call can't be used.
    """
    refuse_batch_in_journal(run)
    log = run.log
    if not run.is_logged or log is None or not log.replays:
        return
    for place in log.calls:
        if place[0] == run.path and place[1].startswith(f"{node}:"):
            log.reach(*place)
    answer = log.answers.get((run.path, node))
    if answer is None:
        return
    pending = list[PendingCall]()
    prefix = _path_prefix(node, _program_number(answer))
    for call in log.calls_in_doubt(run.path):
        function = functions.get(call.tool)
        if call.run != run.path or not call.call.startswith(prefix):
            continue
        if function is None or not is_idempotent(function):
            pending += [call, *log.calls_in_doubt(f"{call.run}{call.call}>")]
    _check_decisions(log, run.path, prefix, functions)
    if pending:
        run.pending = tuple(pending)
        raise Suspension(pending)


def refuse_batch_in_journal(run: Run) -> None:
    """Raises ProgramError if a run is part of a batch that a program with a journal runs. The
    journal could not tell the items apart.
    """
    inner: Run | None = run
    while inner is not None:
        outer = inner.outer
        if inner.is_item and outer is not None and outer.log is not None and outer.log.journal:
            path = short_repr(outer.log.journal.path)
            raise ProgramError(
                f"a batch inside a program can't be written to its journal {path}.",
                hint="Run its items one by one.",
            )
        inner = outer


def log_program(
    run: Run, node: str, name: str | None, question: tuple[str, str] | None, answer: Generation
) -> int:
    """Logs a program that is about to run, unless it was logged before. Returns the program's index
    among all programs that its node wrote.

    Args:
        name: variable of the node.
        question: digest of the node's question, and the end of the text before the node; None if
            the log already has an answer of the node.
        answer: the program.
    """
    log = run.log
    assert log is not None, "only programs of a run with a log are logged"
    before = log.answers.get((run.path, node))
    if before is not None:
        number = _program_number(before)
        if _PROGRAM in answer.meta or CALLS in answer.meta:  # the answer comes from the log
            return number
        number += 1
        question = before.asked, before.before
    else:
        number = 0
    assert question is not None, "a node without an answer in the log has one"
    meta = {name: value for name, value in answer.meta.items() if name != CALLS}
    program = msgspec.structs.replace(answer, meta={**meta, _PROGRAM: number})
    log.add(LoggedAnswer(run.path, node, name, *question, (program,)))
    log_recorded_calls(log, run.path, node, [answer], number)
    return number


def log_recorded_calls(
    log: RunLog, run: str, node: str, answers: Sequence[object], number: int = 0
) -> None:
    """Logs the calls that programs made before the log began, or in the run that a rerun repeats.

    Args:
        run: path of the run.
        answers: answers of the node; the calls are in their metadata.
        number: index of the program among all programs that the node wrote.
    """
    for answer in answers:
        calls = answer.meta.get(CALLS, ()) if isinstance(answer, Generation) else ()
        for i, each in enumerate(calls):
            path = f"{_path_prefix(node, number)}{i}"
            log.add(LoggedCall(run, path, each["tool"], json.dumps(each["arguments"])))
            if each["replayable"]:
                log.add(LoggedResult(run, path, json.dumps(each["result"]), each["error"]))


def strip_program_number(meta: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the metadata of an answer without the program's index, which only the log needs."""
    return {name: value for name, value in meta.items() if name != _PROGRAM}


def _path_prefix(node: str, number: int) -> str:
    return f"{node}:{number}."


def _program_number(answer: LoggedAnswer) -> int:
    first = answer.results[0]
    number: int = first.meta.get(_PROGRAM, 0) if isinstance(first, Generation) else 0
    return number


def _check_decisions(
    log: RunLog, run: str, prefix: str, functions: Mapping[str, Callable[..., UserValue]]
) -> None:
    """Raises ParameterError if a decision about a call of a program can't be used."""
    for (path, call), decision in list(log.decisions.items()):
        if path != run or not call.startswith(prefix):
            continue
        tool = log.calls[path, call].tool
        error = None
        if decision.arguments:
            error = ParameterError(
                "arguments",
                f"a program calls {tool}, so its arguments can't be changed.",
                hint="Approve it as it is, or deny it: the model then writes another program.",
            )
        elif decision.verdict == "result" and tool in functions:
            try:
                read_given_result(functions[tool], decision.text)
            except ValueError:
                error = ParameterError(
                    "text",
                    f"{short_repr(decision.text)} is not what {tool} returns.",
                    hint="Give its result as JSON.",
                )
        if error is not None:
            log.add(CallDecision(path, call, "withdraw"), durable=True)
            raise error


def describe_calls(made: Sequence[Mapping[str, Json]]) -> str:
    """Returns a sentence that tells the model which calls its rejected program made. The next
    program would make such calls again.

    Args:
        made: records of the calls.
    """
    shown = ", ".join(dict.fromkeys(each["tool"] for each in made))
    return f" {len(made)} calls were made already ({shown})." if made else ""
