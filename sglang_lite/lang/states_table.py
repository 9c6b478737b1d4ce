"""Table of several runs or branches for notebooks, with one row each and the values of its
variables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from sglang_lite.notebook.markup import Markup, element, fragment, shorten_text, table_of_rows
from sglang_lite.protocol.anything import UserValue

if TYPE_CHECKING:
    from sglang_lite.lang.concurrency.variables import Variable
    from sglang_lite.lang.state import ProgramState


def states_table(
    results: Sequence[ProgramState | Exception | UserValue], *, of_runs: bool
) -> Markup:
    """Returns the number of states, the number of those that failed, and their `rows_table`."""
    failed = sum(_failure_of_result(each) is not None for each in results)
    counts = f"{len(results):,} {'runs' if of_runs else 'branches'}" + f", {failed:,} failed" * (
        failed > 0
    )
    return fragment(element("p", counts), rows_table(dict(enumerate(results)), of_runs=of_runs))


def rows_table(
    results: Mapping[int, ProgramState | Exception | UserValue], *, of_runs: bool
) -> Markup:
    """Returns a table of states by their numbers, some of which may be errors instead. Shows only
    values that have arrived, and never blocks.

    Args:
        of_runs: whether each state belongs to a run, whose tokens and error get columns, or to a
            branch.
    """
    variables = {
        i: {} if isinstance(each, Exception) else each.branch.names.variables
        for i, each in results.items()
    }
    names = [*dict.fromkeys(name for own in variables.values() for name in own)]
    head = ["", *names, *(("tokens", "error") if of_runs else ())]
    rows = (
        [i, *(_format_variable(own.get(name)) for name in names)] for i, own in variables.items()
    )
    if of_runs:
        rows = ([*row, *_usage_and_error(result)] for row, result in zip(rows, results.values()))
    return table_of_rows(head, rows)


def _format_variable(variable: Variable | None) -> str:
    if variable is None:
        return ""
    if not variable.done:
        return "…"
    error = variable.error_or_none()
    return shorten_text(
        str(variable.result()) if error is None else f"{type(error).__name__}", 4000
    )


def _failure_of_result(result: ProgramState | Exception) -> BaseException | None:
    return result if isinstance(result, Exception) else result.branch.player.failure


def _usage_and_error(result: ProgramState | Exception) -> Iterator[str]:
    """Yields the tokens of a run, in and out, and its error."""
    error = _failure_of_result(result)
    if isinstance(result, Exception):
        yield ""
    else:
        usage = result.branch.run.account.usage()
        yield f"{usage.prompt_tokens:,} + {usage.completion_tokens:,}"
    yield "" if error is None else f"{type(error).__name__}: {error}"
