"""Reruns of a program, which keep the answers of an earlier run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sglang_lite.lang.backend.base import unsupported_feature_error
from sglang_lite.lang.execution.branch import Branch
from sglang_lite.lang.execution.kept import Kept
from sglang_lite.lang.execution.operations import REASONING_SUFFIX, AnswerOp
from sglang_lite.lang.execution.reading import call_when_done
from sglang_lite.lang.runs.log import collect_branch_answers
from sglang_lite.lang.tracebacks import trimmed, user_location
from sglang_lite.protocol import ParameterError, ProgramError, TraceNode
from sglang_lite.protocol.anything import UserValue


def rerun_branch(branch: Branch, at: str, value: str | None) -> UserValue:
    """Runs the program of a branch again and returns the new state. Everything in the branch must
    already have been executed. Takes the arguments of `ProgramState.rerun` and raises its errors.
    """
    run = branch.run
    called = branch.run.called
    if called is None:
        raise ProgramError(
            "this state has no program to run again.",
            hint="Load it with sgl.load(path, program, backend=…); its run's arguments must be plain data.",
            where=user_location(),
        )
    if not run.backend.capabilities.reads_prompts:
        raise unsupported_feature_error(
            run.backend,
            "rerun",
            "running a state again",
            "Run the program instead.",
            user_location(),
        )
    if branch.path:
        raise ProgramError(
            "a branch of a fork can't run again by itself.",
            hint="Run the state of the whole program again.",
            where=user_location(),
        )
    kept = _kept_answers(branch, at, value)
    budget = None if run.settings.budget is None else run.settings.budget.copy_without_usage()
    settings = replace(run.settings, stream=False, budget=budget)
    with trimmed:
        call = called.program.prepare_run(
            called.args, dict(called.kwargs), {"backend": run.backend}, settings, kept
        )
        state: Any = call.run()  # a ProgramState, which imports this module
    if value is None:
        return state
    player = state.branch.player
    call_when_done(player, partial(kept.taken.set, False))
    try:
        taken = kept.taken.wait()
        refused = player.failure
        if not taken and isinstance(refused, ParameterError) and refused.parameter == "value":
            raise refused  # the end of the program was reported first
    except KeyboardInterrupt:  # like in every read that waits
        state.cancel()
        raise
    except ParameterError:
        for each in player.tree():
            each.failure_reported = True
        raise
    if not taken and player.failure is None and kept.node not in _node_paths(state.branch):
        raise ParameterError(
            "at", f"the program did not ask for {at!r} again.", where=user_location()
        )
    return state


def _kept_answers(branch: Branch, at: str, value: str | None) -> Kept:
    """Returns the answers of the earlier run that a rerun may reuse. Takes the arguments of
    `rerun_branch` and raises its errors.
    """
    answers = (*branch.run.remembered, *collect_branch_answers(branch.player))
    nodes = _nodes_by_name(branch, answers)
    if at not in nodes:
        raise _unknown_node_error(branch, at, nodes, answers)
    if value is not None and not isinstance(value, str):
        raise ParameterError(
            "value",
            f"{value!r:.60} is not a string.",
            hint="Give the text that the model would have written.",
        )
    earlier = () if branch.run.kept is None else branch.run.kept.answers.values()
    return Kept((*earlier, *answers), nodes[at], value)


def _nodes_by_name(branch: Branch, answers: Sequence[TraceNode]) -> dict[str, str]:
    """Maps each variable name to the path of the last node that set it. Considers only nodes that
    the body added to the state's own text, including nodes that were not executed because the state
    was cancelled or has failed.

    Args:
        answers: the nodes that were executed.
    """
    names = {each.node: each.name for each in answers}
    late = {op.variable.node for op in _answers_added_after_body(branch)}
    # A generation's reasoning has the same node, and was declared before it.
    unplayed = {
        variable.node: name
        for name, variable in branch.names.all_declarations()
        if variable.error_or_none() is not None and variable.node not in late
    }
    names = {**unplayed, **names}
    return {
        name: each.node
        for name, each in branch.names.all_declarations()
        if each.node and names.get(each.node) == name
    }


def _answers_added_after_body(branch: Branch) -> Iterator[AnswerOp]:
    """Yields the generations and selections that were added to the state after the body had ended."""
    for op in branch.player.played:
        if isinstance(op, AnswerOp) and not op.in_body:
            yield op


def _node_paths(branch: Branch) -> set[str]:
    """Returns the paths of all nodes that have set a variable of a state."""
    return {variable.node for _, variable in branch.names.all_declarations()}


def _generation_name_from_reasoning(name: str) -> str:
    """Returns the name of the generation whose reasoning is in the variable `name`. Returns "" if
    `name` is not the name of a reasoning variable.
    """
    return name.removesuffix(REASONING_SUFFIX) if name.endswith(REASONING_SUFFIX) else ""


def _unknown_node_error(
    branch: Branch, at: str, nodes: Mapping[str, str], answers: Sequence[TraceNode]
) -> ParameterError:
    """Returns the error for a name that no node of the state's text has set. The error says where
    else the name was set, if anywhere, and suggests what to do.
    """
    known = f"Nodes set: {', '.join(map(repr, nodes)) or 'none'}."
    failure = branch.player.failure
    why = ""
    hint = ""
    if any(op.node.name == at for op in _answers_added_after_body(branch)):
        why = ": it was added after the end of the body"
        hint = "Add it to the state of the rerun, or continue from a node: state.fork_at(…)."
    elif _generation_name_from_reasoning(at) in nodes:
        why = f": it is the reasoning of {_generation_name_from_reasoning(at)!r}"
        hint = f"Give at={_generation_name_from_reasoning(at)!r}."
    elif at in branch.names.variables:
        why = ": the body has set it to a value, or to the text of a scope"
        hint = "Change the node that the value comes from."
    elif any(at in child.names.own_variables_by_name() for child in branch.player.tree()[1:]):
        why = ": nodes of branches did, which one name can't tell apart"
        hint = "Change a node of the state's own text, before the fork or after the join."
    elif any(each.name == at for each in answers):
        why = ": a rollback has removed the one that did"
        hint = "Change a node before the checkpoint, or run the program again."
    elif failure is not None:
        why = f" before the run ended with {type(failure).__name__}"
        hint = (
            "Nodes behind that place are not known: change one before it, or run the program again."
        )
    return ParameterError("at", f"no node of the program set {at!r:.60}{why}. {known}", hint=hint)
