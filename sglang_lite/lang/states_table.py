"""Table of several runs or branches, for notebooks. Each has a row with the values of its
variables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from sglang_lite.notebook.markup import Markup, element, notebook_html, shorten_text, table_of_rows
from sglang_lite.protocol.anything import UserValue

if TYPE_CHECKING:
    from sglang_lite.lang.concurrency.variables import Variable
    from sglang_lite.lang.execution.branch import Branch


class _State(Protocol):
    """Attributes of a program's state that the table reads."""

    branch: Branch


def states_table(results: Sequence[_State | Exception | UserValue], *, of_runs: bool) -> Markup:
    """Returns a summary of states for a notebook: how many there are, how many of them failed, and
    a table.
    """
    failed = sum(_failure_of_result(each) is not None for each in results)
    counts = f"{len(results):,} {'runs' if of_runs else 'branches'}" + f", {failed:,} failed" * (
        failed > 0
    )
    return notebook_html(
        element("p", counts), build_results_table(dict(enumerate(results)), of_runs=of_runs)
    )


def build_results_table(
    results: Mapping[int, _State | Exception | UserValue], *, of_runs: bool
) -> Markup:
    """Returns a table with one row for each state, or for each error that a run ended with. Shows
    only values that have arrived, and never blocks.

    Args:
        results: states or errors, by row number.
        of_runs: True if these are runs, whose tokens and error get columns; False for branches.
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


def _failure_of_result(result: _State | Exception) -> BaseException | None:
    return result if isinstance(result, Exception) else result.branch.player.failure


def _usage_and_error(result: _State | Exception) -> Iterator[str]:
    """Yields the last two cells of a run's row: its numbers of prompt and generated tokens, and its
    error.
    """
    error = _failure_of_result(result)
    if isinstance(result, Exception):
        yield ""
    else:
        usage = result.branch.run.account.usage()
        yield f"{usage.prompt_tokens:,} + {usage.completion_tokens:,}"
    yield "" if error is None else f"{type(error).__name__}: {error}"
