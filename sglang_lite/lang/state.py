"""State of a program: the parameter `s` of its body."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar, overload

from typing_extensions import TypeForm

from sglang_lite import wire
from sglang_lite.constraints.coerce import ConstraintLike, as_constraint, check_syntax
from sglang_lite.kernel import in_kernel
from sglang_lite.lang import text_streams
from sglang_lite.lang.argument_names import AttributeHints, explains_wrong_arguments
from sglang_lite.lang.backend.base import Backend
from sglang_lite.lang.checks import check_no_offset, check_whole
from sglang_lite.lang.concurrency.loop import in_event_loop
from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.lang.confidence import Confidence
from sglang_lite.lang.execution.branch import Branch
from sglang_lite.lang.execution.push_down import expect_pause
from sglang_lite.lang.execution.reading import (
    afind_variable,
    all_messages,
    check_assignment,
    check_may_block,
    check_name,
    checked,
    find_variable,
    finished,
    nothing,
    read_confidence,
    wait_for_error,
    whole_text,
)
from sglang_lite.lang.execution.run import BoundCall
from sglang_lite.lang.execution.streamed_body import StreamedBody
from sglang_lite.lang.expressions import AsyncProgram, BaseProgram, Named, R, VariableName
from sglang_lite.lang.results import meta_info, text_of, usages_of
from sglang_lite.lang.runs import files
from sglang_lite.lang.runs.carried import CopiedValues, PickledValues, ValueCodec
from sglang_lite.lang.runs.rerun import run_again
from sglang_lite.lang.runs.saving import (
    AbsentBackend,
    bound_call,
    branch_of,
    decoded,
    run_until,
    same_tokens,
    saved_run,
)
from sglang_lite.lang.runs.values import import_by_name
from sglang_lite.lang.scopes import Checkpoint, CopyScope, Scope
from sglang_lite.lang.state_group import ProgramStateGroup as ProgramStateGroup
from sglang_lite.lang.text_streams import SoFar
from sglang_lite.lang.tracebacks import trim

# for modules that import states
from sglang_lite.lang.tracebacks import user_location as user_location
from sglang_lite.lang.unawaited import must_await
from sglang_lite.markup import cut
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
    from sglang_lite.compat.sglang.stream_executor import StreamExecutor
    from sglang_lite.lang.runs.trajectory import Trajectory
    from sglang_lite.lang.trace import Trace

_NO_SELECTION = "Only sgl.select has scores of choices. For log-probabilities of tokens use gen(return_logprob=True)."

CURE_OF_COPIES = "Save it, and load it with a backend: state.save(path), sgl.load(path, backend=…)."

_T = TypeVar("_T")


class ProgramState(AttributeHints, Generic[R]):
    """State of a program: `s += …` adds to its text, `s["name"]` reads a variable. The generation
    or selection that was added (`person = sgl.gen("person", type=Person)`) can stand for the name:
    `s[person]` is a Person for type checkers, too.

    Adding returns at once; reading waits for the value. Errors of nodes are raised by reads.

    The body reads what the program has at that line. The state that `run(stream=True)` returns is
    its caller's: reading from it and adding to it wait for the end of the body. `text_iter` follows
    the body, and `so_far` never waits.

    Attributes:
        branch: branch that the state reads and extends.
        streamed_body: body of the run, if this is the state that the caller of a streamed run has;
            else None.
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
        """Return value of the body, of type `R`; None for the body itself, and if it has raised or
        was cancelled.
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
    def follows_body(self) -> bool:
        """True if this is its caller's state of a streamed run, and the caller has not waited for
        the body's end.
        """
        return self.streamed_body is not None and not self.streamed_body.ended

    @property
    def whole_branch(self) -> Branch:
        """Branch of the state, at the end of the body for the caller of a streamed run, who waits
        for that.
        """
        if self.streamed_body is not None:
            self._await_body()
        return self.branch

    def _await_body(self, instead: str = "await s.async_sync() first") -> None:
        """Waits as `StreamedBody.wait`, if this is its caller's state of a streamed run."""
        if self.streamed_body is not None:
            try:
                self.streamed_body.wait(instead)
            except KeyboardInterrupt:  # as in every read that waits
                self.cancel()
                raise

    @property
    def stream_executor(self) -> StreamExecutor:
        """Branch of the state, with the interface of SGLang's StreamExecutor."""
        from sglang_lite.compat.sglang.stream_executor import StreamExecutor

        return StreamExecutor(self.branch.player)

    # -------------------------------------------------------------------------------------- writing

    def __iadd__(self, other: str | Expression) -> ProgramState[R]:  # type: ignore[misc] # a sum is only refused
        if other is None or other is not self._submitted:  # `s += s.user(…)` adds the turn once
            (self.whole_branch if self.streamed_body else self.branch).submit(
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
        """Adds a system turn with the content `expr`; without it, returns a context manager: `with
        s.system():`.
        """
        return self._turn("system", expr)

    @overload
    def user(self, expr: None = None) -> Scope: ...
    @overload
    def user(self, expr: str | Expression) -> Expressions: ...
    def user(self, expr: str | Expression | None = None) -> Scope | Expressions:
        """Adds a user turn with the content `expr`; without it, returns a context manager: `with
        s.user():`.
        """
        return self._turn("user", expr)

    @overload
    def assistant(self, expr: None = None) -> Scope: ...
    @overload
    def assistant(self, expr: str | Expression) -> Expressions: ...
    def assistant(self, expr: str | Expression | None = None) -> Scope | Expressions:
        """Adds an assistant turn with the content `expr`; without it, returns a context manager:
        `with s.assistant():`.
        """
        return self._turn("assistant", expr)

    def _turn(self, role: str, expr: str | Expression | None) -> Scope | Expressions:
        if expr is None:
            return Scope(self, TurnBegin(role), TurnEnd(role))
        turn = Expressions((TurnBegin(role), expr, TurnEnd(role)))
        self.whole_branch.submit(turn, user_location())
        self._submitted = turn
        return turn

    def var_scope(self, name: str) -> Scope:
        """Context manager that collects the text added inside into a variable: `with
        s.var_scope("x"):`.
        """
        check_name(name, user_location())
        return Scope(self, ScopeBegin(name), ScopeEnd(name))

    def grammar(self, constraint: ConstraintLike) -> Scope:
        """Context manager that constrains several nodes: all text added inside `with s.grammar(G):`
        is together in G.

        A generation continues in G and completes it, unless it ends earlier: by `stop`, by
        `max_tokens`, or by its own constraint, which applies in addition to G. A selection takes no
        choice that G does not allow. Turns, images and further grammars can't be inside; branches
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
        """Context manager that remembers this place: in `with s.checkpoint() as c:`, `c.rollback()`
        returns to it.
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
        """Runs another program by itself, on this state's backend, and returns its state (for an
        async program in an event loop, an awaitable of the state). The program has a seed if this
        run has one, and ends with this run: at its timeout, or when it is cancelled. Use `s +=
        program(…)` to let the program continue this state's text.
        """
        if not isinstance(program, BaseProgram):
            raise ParameterError(
                "call",
                f"{program!r:.60} is not a program.",
                hint="Decorate it: @sgl.function.",
                where=user_location(),
            )
        executor = self.whole_branch
        seed = executor.run.seed_of(executor.next_node_path())
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
        self.whole_branch.names.check(user_location())
        self.branch.names.declare(name, Variable.of(value))

    def __setitem__(self, name: str, value: object) -> None:
        self.set_var(name, value)

    def cancel(self) -> None:
        """Ends this state and its branches here, including the backend's requests.

        What somebody has waited for stays: values that were read, everything before them, and what
        a `join` further up has taken. All else is taken away, even if it has come: reading it
        raises RequestAbortedError, as does reading what is added afterwards. So the outcome does
        not depend on how fast the backend is.

        The caller of a run with stream=True who has not waited for its end keeps nothing;
        `so_far()` has what came. From outside the body this is final. Inside, the rollback to a
        checkpoint undoes it, if everything before was waited for.
        """
        error = RequestAbortedError("the program was cancelled.", where=user_location())
        follows = self.streamed_body is not None and self.streamed_body.cancel(error)
        self.branch.stop(error, waited=not follows)

    def expect_pause(self, seconds: float) -> None:
        """Tells an engine (also behind RuntimeEndpoint) for how long nothing will be added to this
        state, from its last answer or, if that is there, from now on: for so long its cached prefix
        may go to others. Other backends keep none, and are not told. Raises ParameterError if
        `seconds` is not a finite number >= 0.
        """
        expect_pause(self.branch.player.pushed, seconds, user_location())

    # -------------------------------------------------------------------------------------- reading
    # Ctrl-C in a read that waits cancels the state.

    @overload
    def __getitem__(self, name: str) -> UserValue: ...
    @overload
    def __getitem__(self, name: Named[_T]) -> _T: ...
    def __getitem__(self, name: VariableName) -> UserValue:
        """Value of a variable; waits until it is set.

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
        value = self._wait(variable, name)
        return value if type(name) is str else checked(value, name)

    get_var = __getitem__
    __iter__ = None  # otherwise iteration would ask for s[0]

    @overload
    async def get(self, name: str) -> UserValue: ...
    @overload
    async def get(self, name: Named[_T]) -> _T: ...
    @must_await
    async def get(self, name: VariableName) -> UserValue:
        """Value of a variable, like `s[name]`, for coroutines."""
        if self.streamed_body is not None:
            await self.streamed_body.get()
        variable = await afind_variable(self.branch.player, name, user_location())
        return checked(await text_streams.read(self.branch, variable), name)

    def value(self, name: str, type: TypeForm[_T]) -> _T:
        """Value of a variable, like `s[name]`, with its type for type checkers.

        Args:
            type: Python type of the value; it is not converted.

        Raises:
            ProgramError: the value has another type.
        """
        value: _T = checked(self[name], name, type)
        return value

    def raw(self, name: VariableName) -> UserValue:
        """Text from which a typed variable was read, or a list for several samples; returns other
        values unchanged.
        """
        variable = find_variable(self.whole_branch.player, name, user_location())
        value = self._wait(variable, name)  # and then the variable has its record
        return text_of(variable.record, value)

    def selection(self, name: VariableName) -> Selection:
        """Scores of a `select`: each choice with its tokens and their log-probabilities. `picked`
        is the decision, `probs` are the choices' probabilities.
        """
        record = self._record(name)
        if not isinstance(record, Selection):
            raise ProgramError(
                f"{name!r} is not a selection.", hint=_NO_SELECTION, where=user_location()
            )
        return record

    def confidence(self, name: VariableName, sample: int = 0) -> Confidence:
        """Confidence of the model in the value of a `gen(confidence=True)`, as a tree of the
        value's shape. Choices in it are scored now, by the backend that generated it.

        Args:
            sample: index of the sample, if the variable has several.

        Raises:
            ParameterError: there is no such sample.
            ProgramError: the variable is no generation, or free text, or has no scores: it was
                generated without `confidence=True`, or the state was loaded.
            SglError: the backend could not score choices.
        """
        variable = find_variable(self.whole_branch.player, name, user_location())
        self._wait(variable, name)
        scored = read_confidence(self.branch.run, variable, name, sample, user_location())
        found: Confidence = self._wait(scored)
        return found

    def usage(self, name: VariableName | None = None) -> Usage:
        """Usage of the node that made a variable (tokens summed over samples and branches), or
        without a name of the whole run, including forks and nodes that failed; `total_s` is then
        the time from its start to the end of its last node. While the body runs, only played nodes
        are counted; afterwards, waits for all branches, even unread ones. A failure is raised
        unless it was before.
        """
        if name is None:
            if self.whole_branch.player.failure is None or not self.branch.player.failure_reported:
                self.sync()
            self._wait_for_branches()
            return self.branch.run.account.usage()
        return total_usage(usages_of(self._record(name)))

    def trace(self) -> Trace:
        """Trace of this branch and those forked from it, for the body's own state of the run: text,
        times and cost of each node, or its error. While the body runs, only of played nodes;
        afterwards, waits for all branches.
        """
        return self._trace(thumbnails=True)

    def _trace(self, *, thumbnails: bool) -> Trace:
        from sglang_lite.lang.runs.log import trace_of

        player = self.whole_branch.player
        if self.branch.run.body_open:
            self._may_wait(player.read(nothing))
            wait_for_error(player)
        else:
            finished(player).wait()
        for each in player.tree():
            each.failure_reported = True
        return trace_of(player, thumbnails=thumbnails)

    def trajectory(self) -> Trajectory:
        """Token sequences of this branch and those forked from it, as `Trace.trajectory`."""
        return self._trace(thumbnails=False).trajectory()

    def show(self, path: str | PathLike[str] | None = None) -> Path:
        """Writes the run's trace as an HTML page and opens it in a browser, or in a notebook below
        the cell.

        Args:
            path: file to write, or None for a new temporary file.

        Returns:
            Path of the file.
        """
        from sglang_lite.lang.runs.page import show

        return show(self.trace(), path)

    def _repr_html_(self) -> str:
        """HTML of the trace, for notebooks. It can't wait for a coroutine body, which runs in the
        same event loop.
        """
        from sglang_lite.lang.runs.extract import extract
        from sglang_lite.lang.runs.log import trace_of

        run = self.branch.run
        return extract(
            trace_of(self.branch.player) if run.body_open and run.is_async else self.trace()
        )

    def _ipython_display_(self) -> None:
        """Shows the state in a notebook: of a run with stream=True the text as it comes, then as
        `_repr_html_`.
        """
        log = self.branch.player.log
        if log is None or log.closed or self.branch.run.is_async or not in_kernel():
            raise NotImplementedError  # then IPython takes `_repr_html_`
        text_streams.show(self, self._repr_html_)

    def _record(self, name: VariableName) -> Any:
        variable = find_variable(self.whole_branch.player, name, user_location())
        self._wait(variable, name)
        return variable.record

    def __contains__(self, name: str) -> bool:
        """True if the state has a variable of this name, even if the variable is not set yet."""
        return isinstance(name, str) and name in self.whole_branch.names.variables

    def get_meta_info(self, name: VariableName) -> dict[str, Json] | None:
        """Metadata that the backend reported for a variable, in SGLang's form. None if the variable
        was set by hand or does not exist.
        """
        try:
            return meta_info(self._record(name))
        except UnknownVariableError:
            return None

    def text(self) -> str:
        """Whole text of what was added; waits until that has been executed."""
        text: str = self._wait(self.whole_branch.read(whole_text, user_location()))
        return text

    def messages(self) -> list[dict[str, Json]]:
        """Finished turns in the form of chat APIs, as a new list; waits like `text`. Blanks and
        line ends that a turn's text begins with are left out, as in SGLang.
        """
        messages: list[dict[str, Any]] = self._wait(
            self.whole_branch.read(all_messages, user_location())
        )
        return messages

    def so_far(self) -> SoFar:
        """Returns the text and the variables that there are at this moment, also of a run that is
        under way, was cancelled or has failed. Never blocks, so the result depends on when it is
        called; all other readers wait.
        """
        return text_streams.so_far(self.branch)

    def sync(self) -> None:
        """Waits until everything added so far has been executed. Raises the program's error if it
        has failed.
        """
        self._wait(self.whole_branch.read(nothing, user_location()))

    async def async_sync(self) -> None:
        """Waits like `sync`, for coroutines."""
        if self.streamed_body is not None:
            await self.streamed_body.get()
        await text_streams.read(self.branch, self.branch.read(nothing, user_location()))

    def error(self) -> SglError | None:
        """Error of the program, or None if it has not failed. Waits like `sync`."""
        if self.streamed_body is not None and self.streamed_body.cancelled is not None:
            return self.streamed_body.cancelled
        self._may_wait(self.whole_branch.player.read(nothing))
        return wait_for_error(self.branch.player)

    def _may_wait(self, variable: Variable, name: VariableName | None = None) -> None:
        if self.branch.run.is_async and not variable.done and self.branch.player.has_to_wait:
            what = f"await s.get({name!r})" if name is not None else "await s.async_sync() first"
            check_may_block(self.branch.run, what, user_location())

    def _wait(self, variable: Variable, name: VariableName | None = None) -> Any:
        self._may_wait(variable, name)
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
        the start. In a run without stream=True, yields the text of the body in one chunk once it is
        complete; what is added then comes as it arrives. Of a name that the body sets several
        times, the caller of a streamed run follows the first value; once it has waited for the end,
        the last.
        """
        return text_streams.pieces(self, var_name)

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
        """Async version of `text_iter`. With a name and `return_meta_data`, yields pairs of text
        and metadata.
        """
        return text_streams.apieces(self, var_name, with_meta=return_meta_data)

    @overload
    def partial_iter(self, var_name: str) -> Iterator[UserValue]: ...
    @overload
    def partial_iter(self, var_name: Named[_T]) -> Iterator[_T]: ...
    def partial_iter(self, var_name: VariableName) -> Iterator[UserValue]:
        """Yields the values of a typed variable while its text is generated, without parts that are
        still missing (None in a model or dataclass), and finally the whole value. Needs
        stream=True.
        """
        return text_streams.values(self, var_name)

    @overload
    def partial_async_iter(self, var_name: str) -> AsyncIterator[UserValue]: ...
    @overload
    def partial_async_iter(self, var_name: Named[_T]) -> AsyncIterator[_T]: ...
    def partial_async_iter(self, var_name: VariableName) -> AsyncIterator[UserValue]:
        """Async version of `partial_iter`."""
        return text_streams.avalues(self, var_name)

    # ------------------------------------------------------------------------------------- branches

    @explains_wrong_arguments
    def fork(
        self, size: int = 1, position_ids_offset: list[int] | None = None
    ) -> ProgramStateGroup:
        """Group of `size` states that continue from here, in parallel.

        Args:
            position_ids_offset: unused, as in SGLang; only None is accepted.
        """
        check_whole("size", size, 1, user_location())
        check_no_offset(position_ids_offset, user_location())
        self.whole_branch.names.check(user_location())
        children = [type(self)(child) for child in self.branch.fork(size, user_location())]
        return ProgramStateGroup(children, self)

    def copy(self, position_ids_offset: list[int] | None = None) -> CopyScope:
        """Context manager for a branch: in `with s.copy() as c:`, `c` is a fork of the state, whose
        new variables become the state's at the end.
        """
        check_no_offset(position_ids_offset, user_location())
        return CopyScope(self)

    # ---------------------------------------------------------------------------------------- again

    def save(
        self, path: str | PathLike[str], *, cache: bool = False, secret: str | None = None
    ) -> None:
        """Writes the state to a file from which `sgl.load` restores it, also in another process:
        text with its tokens, turns, variables, return value, and the answers of all nodes. Waits
        until everything has been played.

        Args:
            cache: whether to write what the engine has computed for the text, too, to a file of the
                name and ".kv".
            secret: as `cache`, but under a text of 16 characters or more, with which `sgl.load`
                takes the file.

        Raises:
            CapabilityError: one of them, and the backend is no engine of this program, or has no
                hierarchical cache.
            ParameterError: a file can't be written, nothing of the text is cached, or `secret` is
                too short.
            ProgramError: a grammar or a scope is open, or a variable has a value that can't be
                saved.
            SglError: the program has failed; its error is raised.
        """
        saved = self._saved()
        if cache or secret is not None:
            prompt = self.branch.player.transcript.prompt()
            self.branch.backend.prefix_files.export_prefix(
                prompt, files.prefix_path(path), secret=secret
            )
        files.write(path, wire.encode(saved))

    def rerun(self, at: str, value: str | None = None) -> ProgramState:
        """Runs the program again with a different answer of one node. A node at the same place in
        the program whose prompt, parameters and constraint are unchanged keeps its answer; others
        are requested again, as are failed nodes. (The whole body runs again, including nodes with
        their own `backend=` and programs that it runs by themselves.)

        Args:
            at: variable of the node; of the last one, if several nodes have set it.
            value: text of the node's new answer; None to generate it again.

        Returns:
            The state of the new run. Its usage counts only the nodes that were executed again.

        Raises:
            ParameterError: no node of the body's own text set the variable (nodes of a run that was
                cancelled, or has failed, count even if they were never asked for), or the value is
                not possible for its node.
            ProgramError: the state was loaded without its program, or its arguments are not plain
                data; or it is a branch of a fork.
            CapabilityError: the backend has SGLang's blocking hooks.
        """
        self.error()
        self._wait_for_branches()
        state: ProgramState = run_again(self.branch, at, value)
        return state

    def fork_at(self, at: str, size: int = 1) -> ProgramStateGroup:
        """Group of `size` states that continue after the last node that set the variable `at`, with
        the text and the variables of that place and on the same backend. Each state is a separate
        run.

        Raises:
            ParameterError: no node in the state's text set the variable.
        """
        check_whole("size", size, 1, user_location())
        states = list[ProgramState]()
        for i in range(size):
            values = CopiedValues()
            run = run_until(self._saved(values), at, i)
            states.append(ProgramState.from_saved(run, self.branch.backend, values, None))
        return ProgramStateGroup(states)

    def _saved(self, values: ValueCodec | None = None) -> SavedRun:
        self.sync()
        self._wait_for_branches()
        return saved_run(self.branch, self.ret_value, values=values)

    def _wait_for_branches(self) -> None:
        """Waits for all branches, even unread ones, once the body has ended and can't fork more."""
        if not self.branch.run.body_open:
            finished(self.branch.player).wait()

    @classmethod
    def from_saved(
        cls, saved: SavedRun, backend: Backend, values: ValueCodec, called: BoundCall | None
    ) -> ProgramState:
        """State made from a saved run; arguments as for `branch_of`."""
        branch, ret_value = branch_of(saved, backend, values, called, cls)
        state = cls(branch)
        state.ret_value = ret_value
        state.restored = "tokens" if same_tokens(saved, backend) else "text"
        return state

    def __copy__(self) -> ProgramState:
        return self._copied(CopiedValues.shared())

    def __deepcopy__(self, memo: dict[int, UserValue]) -> ProgramState:
        return self._copied(CopiedValues.deep(memo))

    def _copied(self, values: ValueCodec) -> ProgramState:
        saved = self._saved(values)
        run = self.branch.run
        state = ProgramState.from_saved(saved, self.branch.backend, values, run.called)
        state.branch.run.unbound = run.unbound
        return state

    def __reduce__(self) -> tuple[object, ...]:
        called = self.branch.run.called
        values = PickledValues()
        data = wire.encode(self._saved(values))
        return unpickled, (data, values.others, None if called is None else called.program)

    def __format__(self, spec: str) -> str:
        """Raises ParameterError: a state formatted into a string would be its description, not its
        text.
        """
        raise ParameterError(
            "+",
            "a state can't be written into a string.",
            hint='Write its text, s.text(), or a value, s["name"].',
            where=user_location(),
        )

    def __repr__(self) -> str:
        failure = self.branch.player.failure
        if self.follows_body:
            return f"ProgramState(so far: {cut(self.so_far().text, 280)})"
        return f"ProgramState({cut(self.text() if failure is None else f'failed: {failure}', 280)})"


def unpickled(data: bytes, others: list[UserValue], program: BaseProgram | None) -> ProgramState:
    """State from a pickle, which has no backend.

    Args:
        others: values of variables that a file could not have.
    """
    saved = decoded(data)
    called = bound_call(saved, program, import_by_name)
    return ProgramState.from_saved(
        saved, AbsentBackend(saved, CURE_OF_COPIES), PickledValues(others), called
    )
