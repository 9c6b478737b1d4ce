"""Another run of a program, which keeps the answers of an earlier one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from sglang_lite.lang.backend.base import refusal
from sglang_lite.lang.execution.branch import Branch
from sglang_lite.lang.execution.kept import Kept
from sglang_lite.lang.execution.reading import when_finished
from sglang_lite.lang.runs.log import answers_of
from sglang_lite.lang.tracebacks import trimmed, user_location
from sglang_lite.protocol import ParameterError, ProgramError
from sglang_lite.protocol.anything import UserValue


def run_again(branch: Branch, at: str, value: str | None) -> UserValue:
    """State of a rerun; arguments and errors as of `ProgramState.rerun`. Everything in the branch has been played."""
    run, called = branch.run, branch.run.called
    if called is None:
        raise ProgramError(
            "this state has no program to run again.",
            hint="Load it with sgl.load(path, program); its run's arguments must be plain data.",
            where=user_location(),
        )  # fmt: skip
    if not run.backend.capabilities.reads_prompts:
        raise refusal(run.backend, "rerun", "running a state again", "Run the program instead.", user_location())
    if branch.path:
        raise ProgramError(
            "a branch of a fork can't run again by itself.", hint="Run the state of the whole program again.",
            where=user_location(),
        )  # fmt: skip
    kept = _kept(branch, at, value)
    budget = None if run.settings.budget is None else run.settings.budget.afresh()
    settings = replace(run.settings, stream=False, budget=budget)
    with trimmed:
        call = called.program.prepared(called.args, dict(called.kwargs), {"backend": run.backend}, settings, kept)
        state: Any = call.run()  # a ProgramState, which imports this module
    if value is None:
        return state
    player = state.branch.player
    when_finished(player, partial(kept.taken.set, False))
    try:
        taken = kept.taken.wait()
        refused = player.failure
        if not taken and isinstance(refused, ParameterError) and refused.parameter == "value":
            raise refused  # the program's end was told first
    except KeyboardInterrupt:  # as in every read that waits
        state.cancel()
        raise
    except ParameterError:
        for each in player.tree():
            each.failure_reported = True
        raise
    if not taken and player.failure is None:
        raise ParameterError("at", f"the program did not ask for {at!r} again.", where=user_location())
    return state


def _kept(branch: Branch, at: str, value: str | None) -> Kept:
    """Answers that a rerun keeps; arguments and errors as of `run_again`."""
    answers = (*branch.run.remembered, *answers_of(branch.player))
    names = {each.node: each.name for each in answers}
    nodes = {name: each.node for name, each in branch.names.declared() if names.get(each.node) == name}
    if at not in nodes:
        known = ", ".join(map(repr, nodes)) or "none"
        raise ParameterError("at", f"no node of the program set {at!r:.60}. Nodes set: {known}.")
    if value is not None and not isinstance(value, str):
        raise ParameterError(
            "value", f"{value!r:.60} is not a string.", hint="Give the text that the model would have written."
        )
    earlier = () if branch.run.kept is None else branch.run.kept.answers.values()
    return Kept((*earlier, *answers), nodes[at], value)
