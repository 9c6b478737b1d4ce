"""Table of several runs or branches for notebooks: a row each, with the values of its variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from sglang_lite.markup import Markup, cut, element, fragment, table
from sglang_lite.protocol.anything import UserValue

if TYPE_CHECKING:
    from sglang_lite.lang.concurrency.variables import Variable
    from sglang_lite.lang.state import ProgramState


def states_table(
    results: Sequence[ProgramState | Exception | UserValue], *, of_runs: bool
) -> Markup:
    """Number of states, and their `rows_table`."""
    failed = sum(_error(each) is not None for each in results)
    counts = f"{len(results):,} {'runs' if of_runs else 'branches'}" + f", {failed:,} failed" * (
        failed > 0
    )
    return fragment(element("p", counts), rows_table(dict(enumerate(results)), of_runs=of_runs))


def rows_table(
    results: Mapping[int, ProgramState | Exception | UserValue], *, of_runs: bool
) -> Markup:
    """Table of states by their numbers, and of the errors in the place of some. Shows what is
    there, and waits for nothing.

    Args:
        of_runs: whether each state is that of a run, whose tokens and error have columns; else of a
            branch.
    """
    variables = {
        i: {} if isinstance(each, Exception) else each.branch.names.variables
        for i, each in results.items()
    }
    names = [*dict.fromkeys(name for own in variables.values() for name in own)]
    head = ["", *names, *(("tokens", "error") if of_runs else ())]
    rows = ([i, *(_shown(own.get(name)) for name in names)] for i, own in variables.items())
    if of_runs:
        rows = ([*row, *_of_run(result)] for row, result in zip(rows, results.values()))
    return table(head, rows)


def _shown(variable: Variable | None) -> str:
    if variable is None:
        return ""
    if not variable.done:
        return "…"
    error = variable.error()
    return cut(str(variable.result()) if error is None else f"{type(error).__name__}", 4000)


def _error(result: ProgramState | Exception) -> BaseException | None:
    return result if isinstance(result, Exception) else result.branch.player.failure


def _of_run(result: ProgramState | Exception) -> Iterator[str]:
    """Yields the tokens of a run, in and out, and its error."""
    error = _error(result)
    if isinstance(result, Exception):
        yield ""
    else:
        usage = result.branch.run.account.usage()
        yield f"{usage.prompt_tokens:,} + {usage.completion_tokens:,}"
    yield "" if error is None else f"{type(error).__name__}: {error}"
