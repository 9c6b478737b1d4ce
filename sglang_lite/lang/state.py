"""State of a program: the parameter `s` of its body."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar, overload

from typing_extensions import TypeForm

from sglang_lite import wire
from sglang_lite.constraints.coerce import ConstraintLike, as_constraint, check_syntax
from sglang_lite.lang import text_streams
from sglang_lite.lang.argument_names import AttributeHints, explains_wrong_arguments
from sglang_lite.lang.backend.base import Backend
from sglang_lite.lang.checks import check_whole_number, refuse_position_ids_offset
from sglang_lite.lang.concurrency.loop import in_event_loop
from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.lang.confidence import Confidence
from sglang_lite.lang.exact import ExactShares, read_exact_shares
from sglang_lite.lang.execution.branch import Branch
from sglang_lite.lang.execution.push_down import expect_pause
from sglang_lite.lang.execution.reading import (
    afind_variable,
    all_messages,
    check_assignment,
    check_may_block,
    check_name,
    check_value_type,
    completion_variable,
    find_variable,
    read_confidence,
    read_nothing,
    transcript_text,
    wait_for_error,
)
from sglang_lite.lang.execution.run import BoundCall
from sglang_lite.lang.execution.streamed_body import StreamedBody
from sglang_lite.lang.expressions import AsyncProgram, BaseProgram, Named, R, VariableName
from sglang_lite.lang.results import collect_usages, meta_info, text_from_record
from sglang_lite.lang.runs import files
from sglang_lite.lang.runs.carried import CopiedValues, PickledValues, ValueCodec
from sglang_lite.lang.runs.rerun import rerun_branch
from sglang_lite.lang.runs.resume import prepare_resume
from sglang_lite.lang.runs.saving import (
    AbsentBackend,
    bind_saved_call,
    decode_saved_run,
    has_same_tokens,
    restore_branch,
    to_saved_run,
    truncate_run,
)
from sglang_lite.lang.runs.values import import_by_name
from sglang_lite.lang.scopes import Checkpoint, CopyScope, Scope
from sglang_lite.lang.state_group import ProgramStateGroup as ProgramStateGroup
from sglang_lite.lang.text_streams import SoFar
from sglang_lite.lang.tool_events import ToolEvent
from sglang_lite.lang.tracebacks import trim

# for modules that import states
from sglang_lite.lang.tracebacks import user_location as user_location
from sglang_lite.lang.unawaited import Unawaited, must_await
from sglang_lite.notebook.markup import shorten_text
from sglang_lite.notebook.output import in_kernel
from sglang_lite.program.nodes import (
    Expression,
    Expressions,
    GrammarBegin,
    GrammarEnd,
    ScopeBegin,
    ScopeEnd,
    TurnBegin,
    TurnEnd,
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
from sglang_lite.protocol.run_log import CallDecision, PendingCall
from sglang_lite.protocol.saved import SavedRun

if TYPE_CHECKING:
    from sglang_lite.compat.sglang.stream_executor import StreamExecutor
    from sglang_lite.lang.particles import Particles, Potential
    from sglang_lite.lang.runs.trajectory import Trajectory
    from sglang_lite.lang.trace import Trace

_NO_SELECTION = "Only sgl.select has scores of choices. For log-probabilities of tokens use gen(return_logprob=True)."

CURE_OF_COPIES = "Save it, and load it with a backend: state.save(path), sgl.load(path, backend=…)."

_T = TypeVar("_T")


class ProgramState(AttributeHints, Generic[R]):
    """State of a program. `s += …` adds to its text and `s["name"]` reads a variable. The
    generation or selection that was added (`person = sgl.gen("person", type=Person)`) can be used
    in place of the name; type checkers then know that `s[person]` is a Person.

    Adding never waits for the backend; reading waits for the value. Errors of nodes are raised by
    reads.

    In the body, a read sees what the program has at that line. The state that `run(stream=True)`
    returns belongs to the caller: reading from it or adding to it waits for the end of the body.
    `text_iter` follows the body while it runs, and `so_far` never waits.

    Attributes:
        branch: branch that the state reads and extends.
        streamed_body: body of the run, if this is the state held by the caller of a streamed run;
            otherwise None.
        restored: "tokens" if the state was loaded or copied and kept its tokens, "text" if only its
            text is the same; None for other states.
    """

    def __init__(self, branch: Branch) -> None:
        self.branch = branch
        self._ret_value: R = None  # type: ignore[assignment] # until the body has returned
        self.restored: Literal["tokens", "text"] | None = None
        self._submitted: Expression | None = None
        self.streamed_body: StreamedBody | None = None

    @property
    def ret_value(self) -> R:
        """Return value of the body, of type `R`. It is None inside the body, and if the body raised
        an exception or was cancelled.
        """
        body = self.streamed_body
        if body is not None and body.cancelled is None:
            self._await_body("the state once the body has ended")
            self._ret_value = body.ret_value()
        return self._ret_value

    @ret_value.setter
    def ret_value(self, value: R) -> None:
        self._ret_value = value

    @property
    def has_unawaited_body(self) -> bool:
        """True if the caller of a streamed run holds this state and has not yet waited for the end
        of the body.
        """
        return self.streamed_body is not None and not self.streamed_body.ended

    @property
    def branch_after_body(self) -> Branch:
        """Branch of the state. If the state belongs to the caller of a streamed run, reading this
        property first waits for the end of the body.
        """
        if self.streamed_body is not None:
            self._await_body()
        return self.branch

    def _await_body(self, instead: str = "await s.async_sync() first") -> None:
        """Waits until the body has ended, if this state belongs to the caller of a streamed run. If
        the caller may not block, the error suggests `instead`.
        """
        if self.streamed_body is not None:
            try:
                self.streamed_body.wait_for_end(instead)
            except KeyboardInterrupt:  # as in every read that waits
                self.cancel()
                raise

    @property
    def stream_executor(self) -> StreamExecutor:
        """Branch of the state, with the interface of SGLang's StreamExecutor."""
        from sglang_lite.compat.sglang.stream_executor import StreamExecutor

        return StreamExecutor(self.branch.player)

    # -------------------------------------------------------------------------------------- writing

    def __iadd__(self, other: str | Expression) -> ProgramState[R]:  # type: ignore[misc] # a sum only raises
        if other is None or other is not self._submitted:  # `s += s.user(…)` adds the turn once
            (self.branch_after_body if self.streamed_body else self.branch).submit_expression(
                other, user_location()
            )
        self._submitted = None
        return self

    def __add__(self, other: object) -> NoReturn:
        raise ProgramError(
            "`s + …` does not make a new state.",
            hint="Add to this one: s += …, or fork it.",
            where=user_location(),
        )

    @overload
    def system(self, expr: None = None) -> Scope: ...
    @overload
    def system(self, expr: str | Expression) -> Expressions: ...
    def system(self, expr: str | Expression | None = None) -> Scope | Expressions:
        """Adds a system turn with the content `expr`. Without `expr`, returns a context manager for
        the turn: `with s.system():`.
        """
        return self._add_turn("system", expr)

    @overload
    def user(self, expr: None = None) -> Scope: ...
    @overload
    def user(self, expr: str | Expression) -> Expressions: ...
    def user(self, expr: str | Expression | None = None) -> Scope | Expressions:
        """Adds a user turn with the content `expr`. Without `expr`, returns a context manager for
        the turn: `with s.user():`.
        """
        return self._add_turn("user", expr)

    @overload
    def assistant(self, expr: None = None) -> Scope: ...
    @overload
    def assistant(self, expr: str | Expression) -> Expressions: ...
    def assistant(self, expr: str | Expression | None = None) -> Scope | Expressions:
        """Adds an assistant turn with the content `expr`. Without `expr`, returns a context manager
        for the turn: `with s.assistant():`.
        """
        return self._add_turn("assistant", expr)

    def _add_turn(self, role: str, expr: str | Expression | None) -> Scope | Expressions:
        if expr is None:
            return Scope(self, TurnBegin(role), TurnEnd(role))
        turn = Expressions((TurnBegin(role), expr, TurnEnd(role)))
        self.branch_after_body.submit_expression(turn, user_location())
        self._submitted = turn
        return turn

    def var_scope(self, name: str) -> Scope:
        """Returns a context manager that collects the text added inside it into a variable: `with
        s.var_scope("x"):`.
        """
        check_name(name, user_location())
        return Scope(self, ScopeBegin(name), ScopeEnd(name))

    def grammar(self, constraint: ConstraintLike) -> Scope:
        """Returns a context manager that constrains several nodes together: all text added inside
        `with s.grammar(G):` must match G as a whole.

        A generation continues in G and completes it, unless it is ended earlier by `stop`,
        `max_tokens` or its own constraint, which applies in addition to G. A selection only takes
        choices that G allows. Turns, images and other grammars are not allowed inside. Branches
        forked inside continue in G, but only this state has to complete it.

        Args:
            constraint: constraint, of the kinds that `gen(constraint=…)` accepts.

        Raises:
            ConstraintError: the constraint is invalid, G does not allow a text inside, or the text
                is incomplete.
            CapabilityError: the backend only supports constraints on single generations.
        """
        return Scope(self, GrammarBegin(check_syntax(as_constraint(constraint))), GrammarEnd())

    def checkpoint(self) -> Checkpoint:
        """Returns a context manager that remembers this place: inside `with s.checkpoint() as c:`,
        `c.rollback()` returns to it.
        """
        return Checkpoint(self)

    @overload
    def call(
        self, program: AsyncProgram[_T], *args: UserValue, **kwargs: UserValue
    ) -> Awaitable[ProgramState[_T]]: ...
    @overload
    def call(
        self, program: BaseProgram[_T], *args: UserValue, **kwargs: UserValue
    ) -> ProgramState[_T]: ...
    def call(self, program: BaseProgram, *args: UserValue, **kwargs: UserValue) -> UserValue:
        """Runs a program separately on this state's backend and returns its state. In an event
        loop, an async program returns an awaitable of the state. The program gets a seed if this
        run has one, and ends when this run times out or is cancelled. Use `s += program(…)` to let
        the program continue this state's text.
        """
        if not isinstance(program, BaseProgram):
            raise ParameterError(
                "call",
                f"{program!r:.60} is not a program.",
                hint="Decorate it: @sgl.function.",
                where=user_location(),
            )
        executor = self.branch_after_body
        seed = executor.run.seed_for_path(executor.next_node_path())
        inherited = {"backend": executor.backend, "seed": None if isinstance(seed, Unset) else seed}
        if "backend" not in kwargs:
            inherited["priority"] = executor.run.settings.priority
        kwargs = {
            **{name: value for name, value in inherited.items() if name not in program.names},
            **kwargs,
        }
        if program.is_async and in_event_loop():
            return program.arun(*args, **kwargs)
        return program.run(*args, **kwargs)

    def set_var(self, name: str, value: object) -> None:
        check_assignment(name, value, user_location())
        self.branch_after_body.names.raise_if_removed(user_location())
        self.branch.names.declare(name, Variable.from_value(value))

    def __setitem__(self, name: str, value: object) -> None:
        self.set_var(name, value)

    def cancel(self) -> None:
        """Cancels this state and the branches forked from it, including their requests to the
        backend.

        Everything that the program has waited for is kept: values that were read, everything before
        them, and everything that a `join` in a parent branch has taken. Everything else is
        discarded, even if it has arrived: reading it raises RequestAbortedError, and so does
        reading anything added later. The outcome therefore does not depend on how fast the backend
        is.

        If the caller of a run with stream=True has not waited for its end, nothing stays, but
        `so_far()` returns what has arrived. From outside the body, cancelling is final. Inside the
        body, the rollback to a checkpoint undoes it if everything before was waited for.
        """
        error = RequestAbortedError("the program was cancelled.", where=user_location())
        follows = self.streamed_body is not None and self.streamed_body.cancel(error)
        self.branch.stop(error, waited=not follows)

    def expect_pause(self, seconds: float) -> None:
        """Announces that nothing will be added to this state for the given number of seconds. The
        engine may then evict the state's cached prefix. The pause begins when the last pending
        answer arrives, or immediately if none is pending. Has an effect only on an engine,
        including one behind a RuntimeEndpoint. Raises ParameterError if `seconds` is not a finite
        number >= 0.
        """
        expect_pause(self.branch.player.pushed, seconds, user_location())

    # -------------------------------------------------------------------------------------- reading
    # Ctrl-C during a read that waits cancels the state.

    @overload
    def __getitem__(self, name: str) -> UserValue: ...
    @overload
    def __getitem__(self, name: Named[_T]) -> _T: ...
    def __getitem__(self, name: VariableName) -> UserValue:
        """Returns the value of a variable, waiting until it is set.

        Raises:
            UnknownVariableError: the program has no variable of this name.
            SglError: the variable's node failed; the error names the line of the program.
            ProgramError: `name` is a generation or selection, and the value is not of its type.
        """
        if self.streamed_body is not None:
            self._await_body(f"await s.get({name!r})")
        variable = self.branch.names.variables.get(name) if type(name) is str else None
        if variable is None:
            variable = find_variable(self.branch.player, name, user_location())
        value = self._wait_for_value(variable, name)
        return value if type(name) is str else check_value_type(value, name)

    get_var = __getitem__
    __iter__ = None  # otherwise iteration would ask for s[0]

    @overload
    async def get(self, name: str) -> UserValue: ...
    @overload
    async def get(self, name: Named[_T]) -> _T: ...
    @must_await
    async def get(self, name: VariableName) -> UserValue:
        """Returns the value of a variable, like `s[name]`, for coroutines."""
        if self.streamed_body is not None:
            await self.streamed_body.await_end()
        variable = await afind_variable(self.branch.player, name, user_location())
        return check_value_type(await text_streams.read_variable(self.branch, variable), name)

    def value(self, name: str, type: TypeForm[_T]) -> _T:
        """Returns the value of a variable, like `s[name]`, with its type for type checkers.

        Args:
            type: Python type of the value; it is not converted.

        Raises:
            ProgramError: the value has another type.
        """
        value: _T = check_value_type(self[name], name, type)
        return value

    def raw(self, name: VariableName) -> UserValue:
        """Returns the text from which the value of a typed variable was read. For several samples,
        returns a list of texts. Values that have no such text are returned unchanged.
        """
        variable = find_variable(self.branch_after_body.player, name, user_location())
        value = self._wait_for_value(variable, name)  # and then the variable has its record
        return text_from_record(variable.record, value)

    def selection(self, name: VariableName) -> Selection:
        """Returns the scores of a `select`: each choice with its tokens and their
        log-probabilities. `picked` is the decision, and `probs` are the probabilities of the
        choices.
        """
        record = self._wait_for_record(name)
        if not isinstance(record, Selection):
            if isinstance(record, Generation) and "exact" in record.meta:
                raise ProgramError(
                    f"{name!r} was not selected by scores.",
                    hint="state.exact(name) has the probabilities of what sgl.exact chose.",
                    where=user_location(),
                )
            raise ProgramError(
                f"{name!r} is not a selection.", hint=_NO_SELECTION, where=user_location()
            )
        return record

    def confidence(self, name: VariableName, sample: int = 0) -> Confidence:
        """Returns the model's confidence in the value of a `gen(confidence=True)`, as a tree with
        the shape of the value. Choices in the value are scored now, by the backend that generated
        it. The confidence in the value of a `gen(exact=True)` is read from `exact(name)`.

        Args:
            sample: index of the sample, if the variable has several.

        Raises:
            ParameterError: there is no such sample.
            ProgramError: the variable is not a generation, or is free text, or has no scores: it
                was generated without `confidence=True`, or the state was loaded.
            SglError: the backend could not score choices.
        """
        variable = find_variable(self.branch_after_body.player, name, user_location())
        self._wait_for_value(variable, name)
        scored = read_confidence(self.branch.run, variable, name, sample, user_location())
        found: Confidence = self._wait_for_value(scored)
        return found

    def exact(self, name: VariableName, sample: int = 0) -> ExactShares:
        """Returns the probabilities from which a `gen(exact=True)` was drawn.

        Args:
            sample: index of the sample, if the variable has several.

        Raises:
            ParameterError: there is no such sample.
            ProgramError: the variable was not drawn exactly.
        """
        return read_exact_shares(self._wait_for_record(name), name, sample, user_location())

    def usage(self, name: VariableName | None = None) -> Usage:
        """Returns the usage of the node that made a variable, with tokens summed over samples and
        branches. Without a name, returns the usage of the whole run.

        The usage of the run includes forks and nodes that failed. `total_s` is then the time from
        the run's start to the end of its last node. While the body runs, only executed nodes are
        counted. Afterwards, waits for all branches, even unread ones. Raises the program's failure
        unless it was raised before.
        """
        if name is None:
            if (
                self.branch_after_body.player.failure is None
                or not self.branch.player.failure_reported
            ):
                self.sync()
            self._wait_for_branches()
            return self.branch.run.account.usage()
        return total_usage(collect_usages(self._wait_for_record(name)))

    def trace(self) -> Trace:
        """Returns the trace of this branch and the branches forked from it: the text, times and
        cost of each node, or its error. On the body's own state, that is the whole run. While the
        body runs, the trace has only executed nodes; afterwards, waits for all branches.
        """
        return self._wait_for_trace(thumbnails=True)

    def _wait_for_trace(self, *, thumbnails: bool) -> Trace:
        from sglang_lite.lang.runs.log import build_branch_trace

        player = self.branch_after_body.player
        if self.branch.run.body_open:
            self._check_may_wait(player.read_when_played(read_nothing))
            wait_for_error(player)
        else:
            completion_variable(player).wait()
        for each in player.tree():
            each.failure_reported = True
        return build_branch_trace(player, thumbnails=thumbnails)

    def trajectory(self) -> Trajectory:
        """Returns the token sequences of this branch and the branches forked from it, like
        `Trace.trajectory`.
        """
        return self._wait_for_trace(thumbnails=False).trajectory()

    def show(self, path: str | PathLike[str] | None = None) -> Path:
        """Writes the run's trace as an HTML page and opens it in a browser, or in a notebook below
        the cell.

        Args:
            path: file to write, or None for a new temporary file.

        Returns:
            Path of the file.
        """
        from sglang_lite.lang.runs.page import show_page

        return show_page(self.trace(), path)

    def _repr_html_(self) -> str:
        """Returns the trace as HTML, for notebooks. Does not wait for a coroutine body, which runs
        in the same event loop.
        """
        from sglang_lite.lang.runs.extract import render_extract
        from sglang_lite.lang.runs.log import build_branch_trace

        run = self.branch.run
        return render_extract(
            build_branch_trace(self.branch.player)
            if run.body_open and run.is_async
            else self.trace()
        )

    def _ipython_display_(self) -> None:
        """Displays the state in a notebook: for a run with stream=True, the text as it arrives and
        then the HTML of `_repr_html_`.
        """
        log = self.branch.player.log
        if log is None or log.closed or self.branch.run.is_async or not in_kernel():
            raise NotImplementedError  # IPython then uses `_repr_html_`
        text_streams.show_stream(self, self._repr_html_)

    def _wait_for_record(self, name: VariableName) -> Any:
        variable = find_variable(self.branch_after_body.player, name, user_location())
        self._wait_for_value(variable, name)
        return variable.record

    def __contains__(self, name: str) -> bool:
        """Returns True if the state has a variable of this name, even if the variable is not set
        yet.
        """
        return isinstance(name, str) and name in self.branch_after_body.names.variables

    def get_meta_info(self, name: VariableName) -> dict[str, Json] | None:
        """Returns the metadata that the backend reported for a variable, in SGLang's form, or None
        if the variable was set by hand or does not exist.
        """
        try:
            return meta_info(self._wait_for_record(name))
        except UnknownVariableError:
            return None

    def text(self) -> str:
        """Returns the whole text of the state, once everything that was added has been executed."""
        text: str = self._wait_for_value(
            self.branch_after_body.read_when_played(transcript_text, user_location())
        )
        return text

    def messages(self) -> list[dict[str, Json]]:
        """Returns the finished turns in the form of chat APIs, as a new list. Waits like `text`.
        Whitespace at the start of a turn's text is left out, as in SGLang.
        """
        messages: list[dict[str, Any]] = self._wait_for_value(
            self.branch_after_body.read_when_played(all_messages, user_location())
        )
        return messages

    def so_far(self) -> SoFar:
        """Returns the text and the variables that exist at this moment. Never blocks, so the result
        depends on when it is called. Also works while the run is in progress, and after it was
        cancelled or has failed.
        """
        return text_streams.so_far(self.branch)

    def sync(self) -> None:
        """Returns once everything added so far has been executed. Raises the program's error if it
        has failed.
        """
        self._wait_for_value(self.branch_after_body.read_when_played(read_nothing, user_location()))

    async def async_sync(self) -> None:
        """Returns once everything added so far has been executed, like `sync`, for coroutines."""
        if self.streamed_body is not None:
            await self.streamed_body.await_end()
        await text_streams.read_variable(
            self.branch, self.branch.read_when_played(read_nothing, user_location())
        )

    def error(self) -> SglError | None:
        """Returns the error of the program, or None if it has not failed. Waits like `sync`."""
        if self.streamed_body is not None and self.streamed_body.cancelled is not None:
            return self.streamed_body.cancelled
        self._check_may_wait(self.branch_after_body.player.read_when_played(read_nothing))
        return wait_for_error(self.branch.player)

    def _check_may_wait(self, variable: Variable, name: VariableName | None = None) -> None:
        if (
            self.branch.run.is_async
            and not variable.done
            and self.branch.player.has_waiting_operation
        ):
            what = f"await s.get({name!r})" if name is not None else "await s.async_sync() first"
            check_may_block(self.branch.run, what, user_location())

    def _wait_for_value(self, variable: Variable, name: VariableName | None = None) -> Any:
        self._check_may_wait(variable, name)
        try:
            return variable.wait()
        except KeyboardInterrupt:  # the reader no longer wants the result
            self.cancel()
            raise
        except SglError as error:
            self.branch.player.failure_reported = True
            trim(error)
            raise

    # ------------------------------------------------------------------------------------ streaming

    def text_iter(self, var_name: VariableName | None = None) -> Iterator[str]:
        """Yields the text of the program, or of a variable, in chunks as they arrive, always from
        the start. Without stream=True, yields the body's text in one chunk once it is complete, and
        then later additions as they arrive. If the body sets a name several times, the caller of a
        streamed run follows the first value. After waiting for the end, the caller gets the last
        value.
        """
        return text_streams.iter_pieces(self, var_name)

    @overload
    def text_async_iter(
        self, var_name: VariableName | None = None, return_meta_data: Literal[False] = False
    ) -> AsyncIterator[str]: ...
    @overload
    def text_async_iter(
        self, var_name: VariableName, return_meta_data: Literal[True]
    ) -> AsyncIterator[tuple[str, dict[str, Json]]]: ...
    @overload
    def text_async_iter(self, *, return_meta_data: Literal[True]) -> AsyncIterator[str]: ...
    def text_async_iter(
        self, var_name: VariableName | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[UserValue]:
        """Yields the same as `text_iter`, asynchronously. With a name and `return_meta_data`,
        yields pairs of text and metadata.
        """
        return text_streams.aiter_pieces(self, var_name, with_meta=return_meta_data)

    @overload
    def partial_iter(self, var_name: str) -> Iterator[UserValue]: ...
    @overload
    def partial_iter(self, var_name: Named[_T]) -> Iterator[_T]: ...
    def partial_iter(self, var_name: VariableName) -> Iterator[UserValue]:
        """Yields the values of a typed variable while its text is generated, and finally the whole
        value. Parts that are still missing are left out (None in a model or dataclass). Needs
        stream=True.
        """
        return text_streams.iter_partial_values(self, var_name)

    @overload
    def partial_async_iter(self, var_name: str) -> AsyncIterator[UserValue]: ...
    @overload
    def partial_async_iter(self, var_name: Named[_T]) -> AsyncIterator[_T]: ...
    def partial_async_iter(self, var_name: VariableName) -> AsyncIterator[UserValue]:
        """Yields the same as `partial_iter`, asynchronously."""
        return text_streams.aiter_partial_values(self, var_name)

    def events(self) -> Iterator[ToolEvent]:
        """Yields the events of `use_tools` in this run: turns, calls, results and answers. With
        stream=True, yields all events of the body as they happen. Otherwise, yields the events so
        far.
        """
        return text_streams.iter_events(self)

    def async_events(self) -> AsyncIterator[ToolEvent]:
        """Yields the same as `events`, asynchronously."""
        return text_streams.aiter_events(self)

    # ------------------------------------------------------------------------------------- branches

    @explains_wrong_arguments
    def fork(
        self, size: int = 1, position_ids_offset: list[int] | None = None
    ) -> ProgramStateGroup:
        """Returns a group of `size` states that continue from here, in parallel.

        Args:
            position_ids_offset: unused, as in SGLang; only None is accepted.
        """
        check_whole_number("size", size, 1, user_location())
        refuse_position_ids_offset(position_ids_offset, user_location())
        self.branch_after_body.names.raise_if_removed(user_location())
        children = [type(self)(child) for child in self.branch.fork(size, user_location())]
        return ProgramStateGroup(children, self)

    def particles(
        self, n: int, potential: Potential | None = None, *, resample: float = 0.5
    ) -> Particles:
        """Returns `n` weighted copies of the state. If a generation is added to them
        (`p += sgl.gen(…)`), each copy draws its own answer. The weight of a copy accounts for the
        probability that constraints exclude, and for the potential.

        Args:
            n: number of copies; at least 1.
            potential: function of a copy's state, called after every generation that is added. It
                returns how well the text fits so far: 0 excludes the copy, and larger is better.
            resample: copies are replaced with copies of others that have more weight when
                `effective_size` falls below this share of `n` (0 to 1; 0 never replaces any).

        Raises:
            ParameterError: an argument is invalid.
            ProgramError: a grammar over several nodes is open.
        """
        where = user_location()
        check_whole_number("n", n, 1, where)
        if potential is not None and not callable(potential):
            raise ParameterError(
                "potential", f"{potential!r:.60} is not a function of a state.", where=where
            )
        if isinstance(resample, bool) or not isinstance(resample, int | float):
            raise ParameterError("resample", f"{resample!r:.60} is not a number.", where=where)
        if not 0 <= resample <= 1:
            raise ParameterError("resample", f"{resample} is not between 0 and 1.", where=where)
        if self.branch_after_body.blocks.grammar is not None:
            raise ProgramError(
                "particles can't weigh text inside a grammar over several nodes.",
                hint="Give each generation a constraint of its own.",
                where=where,
            )
        from sglang_lite.lang.particles import Particles

        return Particles(self, n, potential, resample)

    def copy(self, position_ids_offset: list[int] | None = None) -> CopyScope:
        """Returns a context manager for a fork of the state: `with s.copy() as c:`. At the end of
        the block, the variables set in `c` are added to the state.
        """
        refuse_position_ids_offset(position_ids_offset, user_location())
        return CopyScope(self)

    def compact(
        self,
        keep: int = 4,
        *,
        max_tokens: int = 512,
        prompt: str | None = None,
        name: str = "summary",
    ) -> UserValue:
        """Shortens a long conversation: drops the turns between the system turns at the start and the
        last turns, and replaces them with a user turn that contains a summary written by the model.
        Waits for the summary. In a coroutine body, write `await s.compact()`.

        Afterwards, only the system turns are cached. `rerun`, `fork_at` and earlier values still
        work. Does nothing if there is no turn to drop, or only an earlier summary. If the
        compaction fails, the text does not change. If the template requires alternating roles and
        the first kept turn is a user turn, it is appended to the summary.

        Args:
            keep: number of turns to keep at the end; 0 for none. A question and its answer are two
                turns. If the first kept turn has the results of tool calls, the turn with the calls
                is kept, too.
            max_tokens: maximum number of tokens of the summary. A summary that this limit cuts is
                kept like other texts, with the finish reason "length". (If tools are shown and the
                model has no format for calls, the summary is written in JSON, and cutting it raises
                TruncatedError.)
            prompt: instruction for the summary; None for a text that asks for everything needed to
                continue.
            name: variable that holds the summary.

        Returns:
            The summary, or None if there was no turn to drop.

        Raises:
            ParameterError: an argument is invalid.
            ProgramError: a turn, a grammar or a scope is open, the text has no turns, or another task
                added to the state.
            CapabilityError: the backend has SGLang's blocking hooks.
            ValueValidationError: the summary is empty.
            TruncatedError: tools are shown, and `max_tokens` cut the summary.
            SglError: something added earlier has failed, or the summary has.
        """
        from sglang_lite.lang.compaction import Compactor

        branch = self.branch_after_body
        compactor = Compactor(branch, keep, max_tokens, prompt, name, user_location())
        if branch.run.is_async and in_event_loop():
            return Unawaited(compactor.arun(partial(text_streams.read_variable, branch)), "compact")
        return compactor.run(self._wait_for_value)

    # ------------------------------------------------------------------------ suspending and resuming

    def pending(self) -> list[PendingCall]:
        """Returns the tool calls at which the run was suspended, because they wait for approval or
        are in doubt. Returns an empty list if the run was not suspended. Waits for the end of the
        body.
        """
        return list(self.branch_after_body.run.pending)

    def resume(
        self, decisions: Iterable[CallDecision] | CallDecision, **settings: UserValue
    ) -> ProgramState[R]:
        """Resumes a suspended run: runs the body again, and reuses the answers and results that the
        run already has instead of calling models and tools again. The body's other effects, such as
        reading the clock, happen again.

        Args:
            decisions: decisions about calls of `pending()`, made with the calls' methods:
                `call.approve()`, `call.deny(reason)` or `call.give_result(text)`. The run is
                suspended again at calls without a decision.
            **settings: stream, timeout, wind_down, retries, push_down, priority, use_thread,
                max_cost and max_total_tokens, as for `run`. By default, `stream` is False, and the
                others are those of the suspended run. (A loaded state knows only its retries.)

        Returns:
            The state of the resumed run. Its usage counts only new requests.

        Raises:
            ProgramError: the run is not suspended, or was loaded without its program.
            ParameterError: a decision is not about a pending call, or changes arguments to invalid
                ones; a setting is unknown or has an invalid value.
            ResumeError: the body does something different than before, or the tools have changed.
        """
        resumed: ProgramState[R] = self._prepare_resume(decisions, settings).start()
        return resumed

    async def aresume(
        self, decisions: Iterable[CallDecision] | CallDecision, **settings: UserValue
    ) -> ProgramState[R]:
        """Resumes a suspended run like `resume`, for coroutines."""
        resumed: ProgramState[R] = await self._prepare_resume(decisions, settings).astart()
        return resumed

    def _prepare_resume(
        self, decisions: Iterable[CallDecision] | CallDecision, settings: dict[str, UserValue]
    ) -> Any:
        self.pending()
        self._wait_for_branches()
        return prepare_resume(self.branch.run, decisions, settings)

    # ------------------------------------------------------------------------- saving and rerunning

    def save(
        self, path: str | PathLike[str], *, cache: bool = False, secret: str | None = None
    ) -> None:
        """Writes the state to a file, from which `sgl.load` restores it in this or another process.
        The file contains the text with its tokens, the turns, variables and return value, and the
        answers of all nodes. Waits until everything has been executed.

        Args:
            cache: whether to also write the engine's KV cache of the text, to a file with ".kv"
                appended to the name.
            secret: text of 16 characters or more that authenticates the cache file, which is then
                written even without `cache`. `sgl.load` accepts the file with the same secret.

        Raises:
            CapabilityError: `cache` or `secret` is given, and the backend is not an engine of this
                program or has no hierarchical cache.
            ParameterError: a file can't be written, none of the text is cached, or `secret` is too
                short.
            ProgramError: a grammar or a scope is open, or a variable has a value that can't be
                saved.
            SglError: the program has failed; its error is raised.
        """
        saved = self._to_saved_run()
        if cache or secret is not None:
            prompt = self.branch.player.transcript.prompt()
            self.branch.backend.prefix_files.export_prefix(
                prompt, files.kv_file_path(path), secret=secret
            )
        files.write(path, wire.encode(saved))

    def rerun(self, at: str, value: str | None = None) -> ProgramState:
        """Runs the program again with a different answer for one node.

        A node at the same place in the program keeps its answer if its prompt, parameters and
        constraint are unchanged. All other nodes are requested again, and so are failed ones. (The
        whole body runs again, including nodes with their own `backend=` and programs that it runs
        separately.)

        Args:
            at: variable of the node; if several nodes have set it, the last one.
            value: text of the node's new answer; None to generate it again.

        Returns:
            The state of the new run. Its usage counts only the nodes that were executed again.

        Raises:
            ParameterError: no node of the body's own text set the variable, or the value is not
                possible for its node. In a run that was cancelled or has failed, nodes count even
                if they were never requested.
            ProgramError: the state was loaded without its program, its arguments are not plain
                data, or it is a branch of a fork.
            CapabilityError: the backend has SGLang's blocking hooks.
        """
        self.error()
        self._wait_for_branches()
        state: ProgramState = rerun_branch(self.branch, at, value)
        return state

    def fork_at(self, at: str, size: int = 1) -> ProgramStateGroup:
        """Returns a group of `size` states that continue right after the last node that set the
        variable `at`. Each state has the text and the variables as they were at that point, and is
        a separate run on the same backend.

        Raises:
            ParameterError: no node in the state's text set the variable.
        """
        check_whole_number("size", size, 1, user_location())
        states = list[ProgramState]()
        for i in range(size):
            values = CopiedValues()
            run = truncate_run(self._to_saved_run(values), at, i)
            states.append(ProgramState.from_saved(run, self.branch.backend, values, None))
        return ProgramStateGroup(states)

    def _to_saved_run(self, values: ValueCodec | None = None) -> SavedRun:
        self.sync()
        self._wait_for_branches()
        return to_saved_run(self.branch, self.ret_value, values=values)

    def _wait_for_branches(self) -> None:
        """Waits until all branches are finished, including branches that nobody reads. Does nothing
        while the body is running.
        """
        if not self.branch.run.body_open:
            completion_variable(self.branch.player).wait()

    @classmethod
    def from_saved(
        cls, saved: SavedRun, backend: Backend, values: ValueCodec, called: BoundCall | None
    ) -> ProgramState:
        """Creates a state from a saved run. The arguments are those of `restore_branch`."""
        branch, ret_value = restore_branch(saved, backend, values, called, cls)
        state = cls(branch)
        state.ret_value = ret_value
        state.restored = "tokens" if has_same_tokens(saved, backend) else "text"
        return state

    def __copy__(self) -> ProgramState:
        return self._copy_with_codec(CopiedValues.by_reference())

    def __deepcopy__(self, memo: dict[int, UserValue]) -> ProgramState:
        return self._copy_with_codec(CopiedValues.by_deep_copy(memo))

    def _copy_with_codec(self, values: ValueCodec) -> ProgramState:
        saved = self._to_saved_run(values)
        run = self.branch.run
        state = ProgramState.from_saved(saved, self.branch.backend, values, run.called)
        state.branch.run.unbound = run.unbound
        return state

    def __reduce__(self) -> tuple[object, ...]:
        called = self.branch.run.called
        values = PickledValues()
        data = wire.encode(self._to_saved_run(values))
        return unpickled, (data, values.others, None if called is None else called.program)

    def __format__(self, spec: str) -> str:
        """Raises ParameterError, because formatting a state into a string would insert the state's
        description instead of its text.
        """
        raise ParameterError(
            "+",
            "a state can't be written into a string.",
            hint='Write its text, s.text(), or a value, s["name"].',
            where=user_location(),
        )

    def __repr__(self) -> str:
        failure = self.branch.player.failure
        if self.has_unawaited_body:
            return f"ProgramState(so far: {shorten_text(self.so_far().text, 280)})"
        return f"ProgramState({shorten_text(self.text() if failure is None else f'failed: {failure}', 280)})"


def unpickled(data: bytes, others: list[UserValue], program: BaseProgram | None) -> ProgramState:
    """Restores a state from its pickle. The state has no backend.

    Args:
        others: values of variables that can't be saved in a file.
    """
    saved = decode_saved_run(data)
    called = bind_saved_call(saved, program, import_by_name)
    return ProgramState.from_saved(
        saved, AbsentBackend(saved, CURE_OF_COPIES), PickledValues(others), called
    )
