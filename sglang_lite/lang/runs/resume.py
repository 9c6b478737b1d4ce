"""Resumes runs that were suspended at calls of tools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from sglang_lite.lang.argument_names import unknown_argument_error
from sglang_lite.lang.execution.branch import Branch
from sglang_lite.lang.execution.program_log import log_recorded_calls
from sglang_lite.lang.execution.run import Run, RunSettings
from sglang_lite.lang.execution.run_log import RunLog
from sglang_lite.lang.run_options import RUN_OPTIONS, convert_to_settings
from sglang_lite.lang.runs.log import collect_branch_answers
from sglang_lite.lang.tracebacks import user_location
from sglang_lite.protocol import ParameterError, ProgramError, ResumeError, SglError
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.run_log import CallDecision, LoggedAnswer, LoggedCall, LoggedResult

_LIMITS: Final = {"max_cost", "max_total_tokens"}
_SETTINGS: Final = {
    "stream",
    "timeout",
    "wind_down",
    "retries",
    "push_down",
    "priority",
    "use_thread",
    *_LIMITS,
}


def complete_log(branch: Branch) -> None:
    """Adds to the log of a suspended run those answers that arrived before the log began."""
    run = branch.run
    log = run.log
    assert log is not None, "only a run with calls is suspended"
    for each in collect_branch_answers(branch.player):
        if each.asked and each.results and (run.path, each.node) not in log.answers:
            log.add(LoggedAnswer(run.path, each.node, each.name, each.asked, "", each.results))
            log_recorded_calls(log, run.path, each.node, each.results)


def prepare_resume(
    run: Run, decisions: Iterable[CallDecision] | CallDecision, settings: Mapping[str, UserValue]
) -> Any:  # a BodyRun, which imports this module
    """Returns a BodyRun that resumes a suspended run.

    Args:
        decisions: decisions about the run's pending calls.
        settings: settings that replace those of the suspended run, by name.

    Raises:
        ProgramError: the run is not suspended, or was loaded without its program.
        ResumeError: another run with the same journal has begun a call since this one was
            suspended.
        ParameterError: a decision is not about one of the pending calls, or a setting is unknown or
            has an invalid value.
    """
    where = user_location()
    log = run.log
    if not run.pending or log is None:
        raise ProgramError("this run is not suspended: no call waits for a decision.", where=where)
    called = run.called
    if called is None:
        raise ProgramError(
            "this state has no program to resume.",
            hint="Load it with sgl.load(path, program, backend=…); its run's arguments must be plain data.",
            where=where,
        )
    found = _check_decisions(run, decisions)
    resumed = _read_settings(run.settings, settings)
    options: dict[str, UserValue] = {"backend": run.backend}
    continued = None
    if log.journal is None:
        continued = RunLog(log.identity, (*log.records, *found))
    else:
        log.close()
        options |= {"journal": log.journal.path, "secret": log.journal.secret}
    body: Any = called.program.prepare_run(
        called.args, dict(called.kwargs), options, resumed, None, continued
    )
    if continued is None:
        reopened = body.state.branch.run.log
        try:
            _refuse_old_decisions(found, log, reopened)
            for decision in found:
                reopened.add(decision, durable=True)
        except SglError:
            with body:  # ends it
                raise
    return body


def _refuse_old_decisions(
    decisions: Sequence[CallDecision], before: RunLog, reopened: RunLog
) -> None:
    """Raises ResumeError if a call to which a decision applies was begun after the suspension.

    Args:
        before: log of the suspended run.
        reopened: the same log, read again from its journal.
    """
    for decision in decisions:
        place = decision.run, decision.call
        if _count_records(before, place) < _count_records(reopened, place):
            raise ResumeError(
                f"the call {decision.call} was begun meanwhile, by another run with this journal.",
                hint="Run the program with the journal again, and decide about the calls that then wait.",
                where=user_location(),
            )


def _count_records(log: RunLog, place: tuple[str, str]) -> int:
    """Counts the records in a log that say that a call was begun or has a result."""
    return sum(
        isinstance(each, LoggedCall | LoggedResult) and (each.run, each.call) == place
        for each in log.records
    )


def _read_settings(before: RunSettings, given: Mapping[str, UserValue]) -> RunSettings:
    """Returns the settings of a resumed run, checked like those of `run`.

    Args:
        before: settings of the suspended run.
        given: settings that replace those, by name.
    """
    for name in given:
        if name in RUN_OPTIONS and name not in _SETTINGS:
            raise ParameterError(
                name,
                "a resumed run keeps what the suspended run had.",
                hint="Leave it out, or begin a new run.",
                where=user_location(),
            )
        if name not in _SETTINGS:
            raise unknown_argument_error("resume", name, _SETTINGS)
    options = {name: getattr(before, name) for name in _SETTINGS if name not in _LIMITS}
    options |= {"stream": False, "shortened": before.shortened}
    budget = before.budget
    if budget is not None:
        options |= {"max_cost": budget.max_cost, "max_total_tokens": budget.max_total_tokens}
    try:
        resumed = convert_to_settings({**options, **given})
    except ParameterError as error:
        error.where = error.where or user_location()
        raise
    if budget is not None and not given.keys() & _LIMITS:
        budget = budget.copy_without_usage()
    else:
        budget = resumed.budget
    return replace(resumed, params=before.params, seed=before.seed, budget=budget)


def _check_decisions(
    run: Run, decisions: Iterable[CallDecision] | CallDecision
) -> list[CallDecision]:
    if isinstance(decisions, CallDecision):
        decisions = [decisions]
    found = list[CallDecision]()
    left = {(call.run, call.call) for call in run.pending}
    for decision in decisions:
        if not isinstance(decision, CallDecision):
            raise ParameterError(
                "decisions",
                f"{decision!r:.60} is no decision.",
                hint="Give [call.approve() for call in state.pending()].",
                where=user_location(),
            )
        if (decision.run, decision.call) not in left:
            raise ParameterError(
                "decisions",
                f"{decision!r:.200} is about no call that waits here, or is the second one about it.",
                hint="state.pending() lists the calls.",
                where=user_location(),
            )
        left.remove((decision.run, decision.call))
        found.append(decision)
    if not found:
        raise ParameterError(
            "decisions",
            "there is none.",
            hint="Decide about state.pending().",
            where=user_location(),
        )
    return found
