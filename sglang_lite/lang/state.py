"""`s` of a user's function: the state of a program."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from sglang_lite import wire
from sglang_lite.constraints.coerce import ConstraintLike, as_constraint, check_syntax
from sglang_lite.lang import text_streams
from sglang_lite.lang.argument_names import TellsFunctions, tells_names
from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.checks import check_whole
from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.lang.execution.branch import Branch
from sglang_lite.lang.execution.reading import (
    afind_variable,
    all_messages,
    check_name,
    error_of,
    find_variable,
    finished,
    may_block,
    nothing,
    whole_text,
)
from sglang_lite.lang.execution.run import current_run
from sglang_lite.lang.execution.stream_executor import StreamExecutor
from sglang_lite.lang.expressions import BaseProgram
from sglang_lite.lang.results import meta_info, probabilities, usages_of
from sglang_lite.lang.saved.kept_values import import_by_name
from sglang_lite.lang.saved.rerun import RememberingBackend, answers_of, with_value
from sglang_lite.lang.saved.runs import AbsentBackend, branch_of, run_until, same_tokens, saved_run, write
from sglang_lite.lang.scopes import Checkpoint, CopyScope, Scope
from sglang_lite.lang.state_group import ProgramStateGroup as ProgramStateGroup
from sglang_lite.lang.tracebacks import trim
from sglang_lite.lang.tracebacks import user_location as user_location  # for all that know a state
from sglang_lite.program.nodes import (
    Expression,
    Expressions,
    GrammarBegin,
    GrammarEnd,
    ScopeBegin,
    ScopeEnd,
    TurnBegin,
    TurnEnd,
    as_expression,
)
from sglang_lite.protocol import (
    Generation,
    ParameterError,
    ProgramError,
    RequestAbortedError,
    Selection,
    SglError,
    UnknownVariableError,
    Unset,
    Usage,
    total_usage,
)
from sglang_lite.protocol.anything import Json, UserValue
from sglang_lite.protocol.saved import SavedRun

if TYPE_CHECKING:
    from sglang_lite.lang.trace import Trace


class ProgramState(TellsFunctions):
    """The state of a program: `s += …` adds to its text, `s["name"]` reads a variable.

    Adding returns at once; reading waits. Errors are raised by reads.

    Attributes:
        ret_value: what the body returned.
        branch: the branch behind it.
        restored: of a state that was loaded or copied, whether its tokens are what they were, or only the text; None:
            it was not.
    """

    def __init__(self, branch: Branch) -> None:
        self.branch = branch
        self.ret_value: Any = None
        self.restored: Literal["tokens", "text"] | None = None
        self._submitted: Expression | None = None

    @property
    def stream_executor(self) -> StreamExecutor:
        """The branch, as SGLang's users know it."""
        return StreamExecutor(self.branch.player)

    # ------------------------------------------------------------------------------------------ writing

    def __iadd__(self, other: str | Expression) -> ProgramState:  # type: ignore[misc] # a sum is only refused
        if other is None or other is not self._submitted:  # `s += s.user(…)` adds the turn once
            self.branch.submit(other, user_location())
        self._submitted = None
        return self

    def __add__(self, other: object) -> NoReturn:
        raise ProgramError(
            "`s + …` does not make a new state.", hint="Add to this one: s += …, or fork it.", where=user_location()
        )

    def system(self, expr: str | Expression | None = None) -> UserValue:
        """A system turn: of `expr`, or of what is added inside `with s.system():`."""
        return self._turn("system", expr)

    def user(self, expr: str | Expression | None = None) -> UserValue:
        """A user turn."""
        return self._turn("user", expr)

    def assistant(self, expr: str | Expression | None = None) -> UserValue:
        """An assistant turn."""
        return self._turn("assistant", expr)

    def _turn(self, role: str, expr: str | Expression | None) -> Any:
        if expr is None:
            return Scope(self, TurnBegin(role), TurnEnd(role))
        turn = Expressions((TurnBegin(role), as_expression(expr), TurnEnd(role)))
        self.branch.submit(turn, user_location())
        self._submitted = turn
        return turn

    def var_scope(self, name: str) -> Scope:
        """`with s.var_scope("x"):` collects the text added inside into a variable."""
        check_name(name, user_location())
        return Scope(self, ScopeBegin(name), ScopeEnd(name))

    def grammar(self, constraint: ConstraintLike) -> Scope:
        """`with s.grammar(G):` all text added inside, generated or not, is together in the language of G.

        A generation continues in G, and completes it unless it ends sooner: by its `stop`, `max_tokens`, or a
        constraint of its own, which holds beside G. A selection takes no choice that G does not allow. Turns, images
        and further grammars can't be inside; branches forked inside continue in G, and only this one has to complete
        it.

        Args:
            constraint: what `gen(constraint=…)` takes.

        Raises:
            ConstraintError: an invalid constraint; inside, text that G does not allow; at its end, what is missing.
            CapabilityError: the backend only takes constraints on single generations.
        """
        return Scope(self, GrammarBegin(check_syntax(as_constraint(constraint))), GrammarEnd())

    def checkpoint(self) -> Checkpoint:
        """`with s.checkpoint() as c:` remembers this place; `c.rollback()` returns to it."""
        return Checkpoint(self)

    def call(self, program: BaseProgram, *args: UserValue, **kwargs: UserValue) -> UserValue:
        """Runs another program by itself, on this one's backend, and returns its state (of an async program: an
        awaitable of it). It has a seed if this one has, and ends with it: by its timeout, or when it is cancelled.
        `s += program(…)` instead lets it continue this state's text."""
        if not isinstance(program, BaseProgram):
            raise ParameterError(
                "call", f"{program!r:.60} is not a program.", hint="Decorate it: @sgl.function.", where=user_location()
            )
        executor = self.branch
        seed = executor.node_seed()
        inherited = {"backend": executor.backend, "seed": None if isinstance(seed, Unset) else seed}
        if "backend" not in kwargs:
            inherited["priority"] = executor.run.settings.priority
        kwargs = {**{name: value for name, value in inherited.items() if name not in program.names}, **kwargs}
        if program.is_async and in_event_loop():
            return program.arun(*args, **kwargs)
        return program.run(*args, **kwargs)

    def set_var(self, name: str, value: object) -> None:
        check_name(name, user_location())
        self.branch.names.declare(name, Variable.of(value))

    def __setitem__(self, name: str, value: object) -> None:
        self.set_var(name, value)

    def cancel(self) -> None:
        """Stops all running work, here and in the branches, down to the backend's requests. What was not
        finished raises RequestAbortedError when it is read. From outside of the body it is final; inside, a
        checkpoint's rollback continues from before."""
        self.branch.stop(RequestAbortedError("the program was cancelled.", where=user_location()))

    # ------------------------------------------------------------------------------------------ reading
    # Ctrl-C in a reading that waits cancels the state.

    def __getitem__(self, name: str) -> UserValue:
        """The variable's value, when it has one.

        Raises:
            UnknownVariableError: there is no such variable.
            SglError: the node that makes it has failed; the error names the line of the program.
        """
        variable = self.branch.names.variables.get(name) if type(name) is str else None
        if variable is None:
            variable = find_variable(self.branch.player, name, user_location())
        return self._wait(variable, name)

    get_var = __getitem__

    async def get(self, name: str) -> UserValue:
        """`s[name]` for async programs."""
        return await self._await(await afind_variable(self.branch.player, name, user_location()))

    def raw(self, name: str) -> UserValue:
        """The text of a variable, from which a typed value was read. With several samples, a list."""
        value = self[name]
        return _text_of(find_variable(self.branch.player, name).record, value)

    def probs(self, name: str) -> dict[str, float]:
        """Probability of each choice of a `select`, made from the summed log-probabilities of its tokens.

        The largest need not be the decision: token_length_normalized, the default method, compares means per token.
        """
        return probabilities(self.selection(name))

    def selection(self, name: str) -> Selection:
        """Selection that a `select` made: every choice with its tokens and their log-probabilities."""
        record = self._record(name)
        if not isinstance(record, tuple):
            raise ProgramError(f"{name!r} is not a selection.", where=user_location())
        found: Selection = record[0]
        return found

    def usage(self, name: str | None = None) -> Usage:
        """Tokens and times of the node behind a variable (summed over samples and branches), or of the whole run,
        forks included: then `total_s` is from its start to the end of its last node. While the body runs it is of what
        has been played; afterwards it waits for all branches, those that nobody has read too."""
        if name is None:
            self.sync()
            self._wait_for_branches()
            return self.branch.run.account.usage()
        return total_usage(usages_of(self._record(name)))

    def trace(self) -> Trace:
        """Trace of this branch and of those forked from it: what each node has said, when and at what cost. Of the
        state that the body was given it is the trace of the whole run. While the body runs it is of what has been
        played; afterwards it waits for all branches. Nodes that failed tell so: nothing is raised for them."""
        from sglang_lite.lang.trace.log import trace_of

        player = self.branch.player
        if self.branch.run.body_open:
            self._may_wait(self.branch.read(nothing, user_location()))
            error_of(player)
        else:
            finished(player).wait()
        for each in player.tree():
            each.mark_failure_reported()
        return trace_of(player)

    def show(self, path: str | PathLike[str] | None = None) -> Path:
        """Writes the run's trace as one HTML page, which needs nothing from elsewhere, and opens it in a browser.

        Args:
            path: the file; None: a fresh one among the temporary files.

        Returns:
            The file.
        """
        from sglang_lite.lang.trace.page import show

        return show(self.trace(), path)

    def _repr_html_(self) -> str:
        """The trace in a notebook."""
        from sglang_lite.lang.trace.page import extract

        return extract(self.trace())

    def _record(self, name: str) -> Any:
        variable = find_variable(self.branch.player, name, user_location())
        self._wait(variable, name)
        return variable.record

    def __contains__(self, name: str) -> bool:
        """Tells whether there is such a variable; it may not have its value yet."""
        return isinstance(name, str) and name in self.branch.names.variables

    def get_meta_info(self, name: str) -> dict[str, Json] | None:
        """Metadata that the backend reported about a variable, in SGLang's shape; None for variables set by hand, and
        where there is no such variable."""
        try:
            return meta_info(self._record(name))
        except UnknownVariableError:
            return None

    def text(self) -> str:
        """The whole text so far."""
        text: str = self._wait(self.branch.read(whole_text, user_location()))
        return text

    def messages(self) -> list[dict[str, Json]]:
        """The finished turns, as chat APIs take them. A fresh list."""
        messages: list[dict[str, Any]] = self._wait(self.branch.read(all_messages, user_location()))
        return messages

    def sync(self) -> None:
        """Waits until everything added so far has been executed. Raises the error of the program, if it failed."""
        self._wait(self.branch.read(nothing, user_location()))

    async def async_sync(self) -> None:
        """`sync` for coroutines."""
        await self._await(self.branch.read(nothing, user_location()))

    def error(self) -> SglError | None:
        """The error; None if the program did not fail. Waits like `sync`; outside of the body of a run with
        stream=True until that has ended."""
        if self.branch.player.log is not None and current_run.get() is not self.branch.run:
            try:
                text_streams.follow(self)
            except KeyboardInterrupt:  # as in any reading
                self.cancel()
                raise
        self._may_wait(self.branch.read(nothing, user_location()))
        return error_of(self.branch.player)

    def _may_wait(self, variable: Variable, name: str | None = None) -> None:
        if not variable.done and self.branch.run.is_async and self.branch.player.waits:
            what = f"await s.get({name!r})" if name is not None else "await s.async_sync() first"
            may_block(self.branch.run, what, user_location())

    def _wait(self, variable: Variable, name: str | None = None) -> Any:
        self._may_wait(variable, name)
        try:
            return variable.wait()
        except KeyboardInterrupt:  # who waited for it does not want it any more
            self.cancel()
            raise
        except SglError as error:
            self.branch.player.mark_failure_reported()
            trim(error)
            raise

    async def _await(self, variable: Variable) -> Any:
        try:
            return await variable.get()
        except SglError as error:
            self.branch.player.mark_failure_reported()
            trim(error)
            raise

    # --------------------------------------------------------------------------------------- streaming

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """The text, or a variable's, in pieces as they arrive, always from the start. Of a program that was not
        run with stream=True: in one piece, when it is there."""
        return text_streams.pieces(self, var_name)

    def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Json]:
        """`text_iter` for coroutines. With a name and `return_meta_data`: (text, metadata) pairs."""
        return text_streams.apieces(self, var_name, with_meta=return_meta_data)

    def partial_iter(self, var_name: str) -> Iterator[UserValue]:
        """A typed variable while it is written: each time the text allows it, the value so far, with what has not come
        yet left out (None in a model or dataclass); at the end the value itself. Needs stream=True."""
        return text_streams.values(self, var_name)

    def partial_async_iter(self, var_name: str) -> AsyncIterator[UserValue]:
        """`partial_iter` for coroutines."""
        return text_streams.avalues(self, var_name)

    # ----------------------------------------------------------------------------------------- branches

    @tells_names
    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> ProgramStateGroup:
        """`size` states that continue from here, in parallel.

        Args:
            position_ids_offset: SGLang never used it; only None is accepted.
        """
        check_whole("size", size, 1, user_location())
        _refuse_offset(position_ids_offset)
        children = [ProgramState(child) for child in self.branch.fork(size, user_location())]
        return ProgramStateGroup(children, self)

    def copy(self, position_ids_offset: list[int] | None = None) -> CopyScope:
        """`with s.copy() as c:` works on a branch; the variables it makes are the state's own afterwards."""
        _refuse_offset(position_ids_offset)
        return CopyScope(self)

    # ------------------------------------------------------------------------------------------- again

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the state to a file, from which `sgl.load` makes it again, here or in another process: text with its
        tokens, turns, variables, what the body returned, and the answers of all nodes. Waits until all is played.

        Raises:
            ParameterError: the file can't be written.
            ProgramError: a grammar or a scope is open, or a variable has a value that can't be saved.
            SglError: that the state has failed with.
        """
        write(self._saved(), path)

    def rerun(self, at: str, value: str | None = None) -> ProgramState:
        """Runs the program again where the answer of a node is another one. Nodes whose prompt, parameters and
        constraint are what they were keep their answers; others are asked, those too that had failed. (The body runs
        again as a whole; nodes with a `backend=` of their own, and programs that it runs by themselves, are asked
        again.)

        Args:
            at: the variable of the node.
            value: text of its new answer; None: the backend generates it again.

        Returns:
            The state of the new run. Its usage is that of the nodes that were asked.

        Raises:
            ParameterError: no node set that variable, or its node can't have this value.
            ProgramError: the state was loaded without its program, or its arguments are not plain data.
        """
        run = self.branch.run
        if run.called is None:
            raise ProgramError(
                "this state has no program to run again.",
                hint="Load it with sgl.load(path, program); its run's arguments must be plain data.",
                where=user_location(),
            )  # fmt: skip
        if run.backend.blocking:
            raise run.backend.refusal("rerun", "running a state again", "Run the program instead.", user_location())
        self.error()
        self._wait_for_branches()
        answers = with_value((*run.remembered, *answers_of(self.branch.player)), at, value)
        backend = RememberingBackend(run.backend, answers)
        state: ProgramState = run.called.program.run_again(run.called, backend, run.settings)
        return state

    def fork_at(self, at: str, size: int = 1) -> ProgramStateGroup:
        """`size` states that continue from where a node had given its variable a value: with the text and variables up
        to there, on the same backend, each a run of its own.

        Raises:
            ParameterError: no node in the state's text set that variable.
        """
        check_whole("size", size, 1, user_location())
        saved, backend = self._saved(), self.branch.backend
        paths = [f"{self.branch.path}/{at}.{i}" for i in range(size)]
        return ProgramStateGroup(
            [ProgramState.made(run_until(saved, at, path), backend, import_by_name, None) for path in paths]
        )

    def _saved(self) -> SavedRun:
        self.sync()
        self._wait_for_branches()
        return saved_run(self.branch, self.ret_value)

    def _wait_for_branches(self) -> None:
        """Waits for branches that nobody has read, where no more of them can come."""
        if not self.branch.run.body_open:
            finished(self.branch.player).wait()

    @classmethod
    def made(
        cls, saved: SavedRun, backend: BaseBackend, find: Callable[[str], UserValue], program: BaseProgram | None
    ) -> ProgramState:
        """A state of what was saved; as `branch_of`."""
        branch, ret_value = branch_of(saved, backend, find, program)
        state = cls(branch)
        state.ret_value, state.restored = ret_value, "tokens" if same_tokens(saved, backend) else "text"
        return state

    def __deepcopy__(self, memo: object) -> ProgramState:
        called = self.branch.run.called
        program = None if called is None else called.program
        return ProgramState.made(self._saved(), self.branch.backend, import_by_name, program)

    def __reduce__(self) -> tuple[object, ...]:
        called = self.branch.run.called
        return unpickled, (wire.encode(self._saved()), None if called is None else called.program)

    def __repr__(self) -> str:
        failure = self.branch.player.failure
        return f"ProgramState({self.text()})" if failure is None else f"ProgramState(failed: {failure})"


def _refuse_offset(offset: object) -> None:
    if offset is not None:
        raise ParameterError("position_ids_offset", "has no effect.", hint="Leave it out.", where=user_location())


def unpickled(data: bytes, program: BaseProgram | None) -> ProgramState:
    """A state that was pickled. It has no backend."""
    saved = wire.decode(data)
    assert isinstance(saved, SavedRun)
    return ProgramState.made(saved, AbsentBackend(), import_by_name, program)


def _text_of(record: Any, value: Any) -> Any:
    """The text that a record holds; of a gathered or sampled list, the texts; else the value itself."""
    if isinstance(record, Generation):
        return record.text
    if isinstance(record, list) and isinstance(value, list) and len(value) == len(record):
        return [_text_of(r, v) for r, v in zip(record, value)]
    return value


def in_event_loop() -> bool:
    """Tells whether this thread is running an event loop right now."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
