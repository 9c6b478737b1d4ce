"""Programs that `@function` makes, and the ways to run them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from types import MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    NoReturn,
    TypeAlias,
    Unpack,
    overload,
)

from typing_extensions import ParamSpec

from sglang_lite.lang.argument_names import explains_wrong_arguments, suggest_argument
from sglang_lite.lang.backend.default import BackendLike, backend_for
from sglang_lite.lang.backend.planning import ApiDrafts
from sglang_lite.lang.batches import batch
from sglang_lite.lang.batches.batch import BatchOptions, Given, OnError, batch_keywords
from sglang_lite.lang.body_run import BodyRun
from sglang_lite.lang.checks import check_booleans, check_whole_number
from sglang_lite.lang.execution.kept import Kept
from sglang_lite.lang.execution.run import RunSettings, current_run
from sglang_lite.lang.execution.run_log import RunLog
from sglang_lite.lang.expressions import AsyncProgram, BaseProgram, R
from sglang_lite.lang.program_call import ProgramCall
from sglang_lite.lang.run_options import (
    RUN_OPTIONS,
    convert_to_settings,
    inherit_options,
    resolve_run_backend,
    run_keywords,
    run_options,
    with_signature_of,
)
from sglang_lite.lang.runs.journal import read_journal_options
from sglang_lite.lang.runs.values import import_by_name
from sglang_lite.lang.state import ProgramState, user_location
from sglang_lite.notebook.markup import element, notebook_html, shorten_text
from sglang_lite.protocol import CompileError, ParameterError, ProgramError
from sglang_lite.protocol.anything import UserValue

if TYPE_CHECKING:
    from sglang_lite.lang.tracer import TracerProgramState


P = ParamSpec("P", default=...)
_P = ParamSpec("_P")
_Outcome: TypeAlias = ProgramState[R] | Exception  # outcome of an item with on_error="return"
# values of on_error for which no result is an exception
_Raised: TypeAlias = Literal["raise", "skip"]
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class SglFunction(BaseProgram[R], Generic[P, R]):
    """Program: a Python function that adds to a state, and the methods that run it. `P` stands for
    the function's parameters without the state, and `R` for its return value, `state.ret_value`.

    Args:
        func: function or coroutine function whose first parameter is the state.
        num_api_spec_tokens: number of tokens that an API call may generate ahead, for further
            generations that the same statement adds to the same turn (docs/backends.md); None for
            no drafts.
        bind_arguments: arguments given in advance; arguments of a call override them.
        untrusted_arguments: whether control tokens spelled in an argument's value are plain text
            wherever the body writes text, even outside turns, where text can otherwise contain
            control tokens (docs/programs.md). A token is then plain text even if the body's own
            text spells it, too. Values are searched in texts, lists, dicts, dataclasses and
            pydantic models.

    Attributes:
        arg_names: names of the positional parameters, without the state.
        arg_defaults: defaults of the last of these parameters.
        is_async: whether the body is a coroutine function.
        options: names of the parameters of `run` that are not also parameters of the program.
        api_drafts: results of drafts on API calls so far: drafts found and missed, and tokens saved
            and thrown away.

    Raises:
        ParameterError: `func` can't be a program, or `num_api_spec_tokens` is not a whole number
            above 0.
    """

    def __init__(
        self,
        func: Callable[..., UserValue],
        num_api_spec_tokens: int | None = None,
        bind_arguments: Mapping[str, UserValue] | None = None,
        untrusted_arguments: bool = False,
    ) -> None:
        check_booleans(untrusted_arguments=untrusted_arguments)
        self.untrusted_arguments = untrusted_arguments
        self.name: str = getattr(func, "__name__", repr(func))
        parameters = _program_parameters(func, self.name)
        self._of_instances = parameters[0].name == "self"
        self.func = func
        if num_api_spec_tokens is not None:
            check_whole_number(
                "num_api_spec_tokens",
                num_api_spec_tokens,
                1,
                user_location(),
                hint="Give one, or None.",
            )
        self.num_api_spec_tokens = num_api_spec_tokens
        self.api_drafts = ApiDrafts(num_api_spec_tokens)
        self.bind_arguments = dict(bind_arguments or {})
        in_order = [p for p in parameters[1:] if p.kind in _POSITIONAL]
        self.arg_names = [p.name for p in in_order]
        self.arg_defaults = [p.default for p in in_order if p.default is not p.empty]
        self.is_async = inspect.iscoroutinefunction(func)
        self.signature = inspect.Signature(parameters[1:])
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        named = [p for p in parameters[1:] if p.kind not in variable]
        self.names = frozenset(p.name for p in named)
        self._required = {p.name for p in named if p.default is p.empty}
        self.options = RUN_OPTIONS - self.names
        functools.update_wrapper(self, func)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> SglFunction[P, R]: ...
    @overload  # a method: its parameters are self, the state and its own
    def __get__(
        self: SglFunction[Concatenate[ProgramState, _P], R],
        instance: object,
        owner: type | None = None,
    ) -> SglFunction[_P, R]: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> SglFunction[P, R]: ...
    def __get__(self, instance: object, owner: type | None = None) -> SglFunction:
        """Returns the program bound to an instance if the first parameter of its function is
        `self`. Otherwise returns the program itself.
        """
        if instance is None or not self._of_instances:
            return self
        own = SglFunction(
            MethodType(self.func, instance),
            self.num_api_spec_tokens,
            self.bind_arguments,
            self.untrusted_arguments,
        )
        own.api_drafts = self.api_drafts
        return own

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> BoundFunction[R]:
        """Returns a program with arguments given in advance, which the arguments of a call
        override. Any subset of the arguments is accepted at run time, but type checkers require all
        of them. (They accept a subset in `functools.partial(program, …)`.)

        Raises:
            ParameterError: the program has no parameter with the name of an argument.
        """
        given = {**dict(zip(self.arg_names, args)), **kwargs}
        try:
            self.signature.bind_partial(*args, **kwargs)
            self.signature.bind_partial(**given)
        except TypeError as error:
            raise ParameterError("bind", f"{self.name}: {error}.", where=user_location()) from error
        if len(args) > len(self.arg_names):
            raise ParameterError(
                "bind",
                f"{self.name}: only arguments with a name can be given.",
                where=user_location(),
            )
        bound = {**self.bind_arguments, **given}
        return BoundFunction(self.func, self.num_api_spec_tokens, bound, self.untrusted_arguments)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> ProgramCall[R]:
        """Returns a call of the program. `s += program(…)` continues the text of another program's
        state. `program(…).run(…)` and reading from the call (`program(…)["x"]`) run the program
        separately.
        """
        from sglang_lite.lang.tracer import TracingScope, trace_call

        if current_run.get() is None and TracingScope.get_current_scope() is not None:
            return trace_call(self, args, kwargs)  # type: ignore[return-value] # it reads like a call
        own, options = _split_options(self, kwargs)
        self.bind_call(args, own, "call")
        return ProgramCall(self, args, own, options)

    @with_signature_of(run_keywords)
    def run(self, *args: UserValue, **kwargs: UserValue) -> ProgramState[R]:
        """Runs the program.

        Args:
            *args, **kwargs: arguments of the program, which take precedence over options of the
                same name.
            max_new_tokens … lora_path: defaults of the program's generations, as in `gen`.
            stream: whether to return immediately, so that `text_iter` can follow the text to the
                end of the program. All other readers of the returned state wait for the end of the
                body, except `so_far()`.
            backend: backend of the run; None for the backend of the enclosing program, or the
                default backend if there is none.
            use_thread: whether to return as soon as the body has returned; False waits until all
                nodes are executed.
            seed: seed of the run. Each generation, and each program that the body runs separately,
                derives its own seed from it and its place in the program.
            timeout: seconds for the whole run, including programs inside it. Nodes that are not
                finished by then fail with RequestTimeoutError. If this error ends the body, its
                `state` has everything that was finished.
            wind_down: seconds after the timeout in which generations, including new ones, end at
                the first position where a limit may cut them, with the finish reason "length": text
                after its next token, JSON where closing brackets complete it, and everything else
                where it ends anyway. Nodes that are not finished after these seconds fail. Needs an
                engine, in this process or behind a server of this package.
            retries: number of attempts after the first if the backend fails in a generation or
                selection.
            push_down: whether to send the run to the backend as one program, if the backend
                executes programs (the engine does). False requests each node separately, which is
                slower and gives the same results, for debugging and measuring.
            priority: priority of the run at an engine whose policy is "priority"; higher values are
                admitted first. It also applies to programs that the body runs separately on the
                same backend.
            max_cost, max_total_tokens: limits on the dollars, and on the tokens of prompts and
                answers, that the run may use, including programs inside it. A call that could
                exceed a limit is not made and fails with BudgetError, which has the state. With a
                limit, the run is requested node by node (docs/backends.md).
            shortened: what happens to constrained answers that a limit cuts, as in `gen`. Applies
                to generations that don't set it themselves.
            journal: file to which answers, and calls of tools with their results, are written
                before the run goes on. If the file exists, the run continues where it stopped: it
                must be of the same program, arguments, seed and parameters (docs/agents.md).
            secret: text of 16 characters or more that authenticates the journal's lines. Without a
                secret, only damaged lines are detected.

        Returns:
            The state, when the body has returned, or was suspended (`state.pending()`). Reading
            from it waits for answers that are still being generated.
        """
        return self.prepare_run(args, *_split_options(self, kwargs)).start()

    @with_signature_of(run_keywords)
    async def arun(self, *args: UserValue, **kwargs: UserValue) -> ProgramState[R]:
        """Runs the program like `run`, for coroutines. Returns when everything has been executed.
        With stream=True, it returns immediately, and a coroutine body continues as a task of this
        event loop. A body that is not a coroutine runs in a thread.
        """
        return await self.prepare_run(args, *_split_options(self, kwargs)).astart()

    @overload
    def run_batch(
        self,
        batch_kwargs: Iterable[Given],
        *,
        on_error: _Raised = "raise",
        **options: Unpack[batch.Listed],
    ) -> list[ProgramState[R]]: ...
    @overload
    def run_batch(
        self, batch_kwargs: Iterable[Given], *, on_error: OnError, **options: Unpack[batch.Listed]
    ) -> list[_Outcome[R]]: ...
    @overload
    def run_batch(
        self,
        batch_kwargs: Iterable[Given],
        *,
        on_error: _Raised = "raise",
        **options: Unpack[batch.Iterated],
    ) -> Iterator[ProgramState[R]]: ...
    @overload
    def run_batch(
        self, batch_kwargs: Iterable[Given], *, on_error: OnError, **options: Unpack[batch.Iterated]
    ) -> Iterator[_Outcome[R]]: ...
    @overload
    def run_batch(
        self,
        batch_kwargs: Iterable[Given],
        *,
        on_error: _Raised = "raise",
        **options: Unpack[batch.Unordered],
    ) -> Iterator[tuple[int, ProgramState[R]]]: ...
    @overload
    def run_batch(
        self,
        batch_kwargs: Iterable[Given],
        *,
        on_error: OnError,
        **options: Unpack[batch.Unordered],
    ) -> Iterator[tuple[int, _Outcome[R]]]: ...
    @overload
    def run_batch(
        self,
        batch_kwargs: Iterable[Given],
        *,
        on_error: OnError = "raise",
        generator_style: bool = False,
        ordered: bool = True,
        **options: Unpack[BatchOptions],
    ) -> list[_Outcome[R]] | Iterator[_Outcome[R]] | Iterator[tuple[int, _Outcome[R]]]: ...
    @explains_wrong_arguments
    @with_signature_of(batch_keywords)
    def run_batch(self, batch_kwargs: UserValue, **given: UserValue) -> UserValue:
        """Runs the program once for each item.

        Args:
            batch_kwargs: arguments of each run, by name (a mapping) or in order (a sequence). They
                are not changed.
            max_new_tokens … lora_path, backend, seed, timeout, wind_down, retries, push_down,
                priority, shortened: as for `run`, for each item. With a seed, equal items therefore
                have equal answers, and a warning is given; `s.fork(n)` or `gen(n=…)` draws several
                answers for one item.
            max_cost, max_total_tokens: as for `run`, for all items together.
            num_threads: maximum number of programs that run at the same time; "auto" for 96, or 16
                per CPU up to 256.
            progress_bar: whether to show a progress bar, with tokens per second and the share of
                cached prompt tokens.
            generator_style: whether to return an iterator of states. It starts num_threads
                programs, and more as states are consumed. Leaving it before its end stops the
                running programs, and so does an interrupt (Ctrl-C).
            on_error: result of a failed program. "raise": BatchError after all programs have
                finished (an iterator raises the program's error when its turn comes). "return": its
                exception. "skip": none.
            ordered: whether an iterator yields in the order of the items; False yields (index,
                state) as they finish.
            checkpoint: file that keeps finished items, so that a batch that is run again continues
                where it was stopped. The file is rejected if anything has changed that results
                depend on: arguments, settings, the backend, the program's code, and every value and
                function that the code uses. Of installed packages, only the names are compared. A
                different version of Python counts as a change. Only one run can have the file open.
            version: version of the program, which is compared instead of its code and the values
                that the code reads. Use it for code that can't be compared, or if changes of the
                code don't affect results.
            skip_damaged: whether to run items of damaged checkpoint lines again, instead of
                rejecting the file.
            secret: text of 16 characters or more that authenticates the checkpoint file's lines.
                Lines that were written or changed without the secret are then rejected. Without a
                secret, only damaged lines are detected.
            cluster: engines on other machines that run the items instead of a backend, as
                `sglang_lite.ray.RayOptions`. The states then contain only the data that a
                checkpoint stores.

        Returns:
            The states in the order of the items, executed to the end.

        Raises:
            BatchError: a program failed, and on_error is "raise"; the error carries all results.
            ProgramError: the checkpoint file belongs to another batch, is damaged or changed, was
                written under another secret, or is open in another run.
            ParameterError: an item or an option is invalid, or the checkpoint file can't be
                written.
        """
        plan = batch.prepare_batch(self, "run_batch", batch_kwargs, given)
        if plan.yields_states:
            return batch.yield_results(plan, batch.iterate_outcomes(plan))
        with plan:
            outcomes = (
                batch.gather_outcomes(plan)
                if plan.progress is None
                else dict(batch.iterate_outcomes(plan))
            )
            return batch.collect_results(plan, outcomes)

    @overload
    async def arun_batch(
        self,
        batch_kwargs: Iterable[Given],
        *,
        on_error: _Raised = "raise",
        **options: Unpack[batch.Listed],
    ) -> list[ProgramState[R]]: ...
    @overload
    async def arun_batch(
        self, batch_kwargs: Iterable[Given], *, on_error: OnError, **options: Unpack[batch.Listed]
    ) -> list[_Outcome[R]]: ...
    @overload
    async def arun_batch(
        self,
        batch_kwargs: Iterable[Given],
        *,
        on_error: _Raised = "raise",
        **options: Unpack[batch.Iterated],
    ) -> AsyncIterator[ProgramState[R]]: ...
    @overload
    async def arun_batch(
        self, batch_kwargs: Iterable[Given], *, on_error: OnError, **options: Unpack[batch.Iterated]
    ) -> AsyncIterator[_Outcome[R]]: ...
    @overload
    async def arun_batch(
        self,
        batch_kwargs: Iterable[Given],
        *,
        on_error: _Raised = "raise",
        **options: Unpack[batch.Unordered],
    ) -> AsyncIterator[tuple[int, ProgramState[R]]]: ...
    @overload
    async def arun_batch(
        self,
        batch_kwargs: Iterable[Given],
        *,
        on_error: OnError,
        **options: Unpack[batch.Unordered],
    ) -> AsyncIterator[tuple[int, _Outcome[R]]]: ...
    @overload
    async def arun_batch(
        self,
        batch_kwargs: Iterable[Given],
        *,
        on_error: OnError = "raise",
        generator_style: bool = False,
        ordered: bool = True,
        **options: Unpack[BatchOptions],
    ) -> (
        list[_Outcome[R]] | AsyncIterator[_Outcome[R]] | AsyncIterator[tuple[int, _Outcome[R]]]
    ): ...
    @with_signature_of(batch_keywords)
    async def arun_batch(self, batch_kwargs: UserValue, **given: UserValue) -> UserValue:
        """Runs the program once for each item, like `run_batch`, for coroutines. With
        generator_style=True or ordered=False, returns an async iterator.
        """
        plan = batch.prepare_batch(self, "arun_batch", batch_kwargs, given)
        outcomes = batch.aiterate_outcomes(plan)
        if plan.yields_states:
            return batch.ayield_results(plan, outcomes)
        with plan:
            return batch.collect_results(
                plan, {index: outcome async for index, outcome in outcomes}
            )

    def __reduce__(self) -> tuple[object, ...]:
        return _reduce_program(self)

    def __repr__(self) -> str:
        return f"SglFunction({shorten_text(f'{self.name}{_signature_with_bound(self)}', 280)})"

    def _repr_html_(self) -> str:
        """Returns the program's signature and graph as HTML, for notebooks. Traces the body with
        `trace(explore=8)`.
        """
        try:
            graph: UserValue = self.trace(explore=8).graph().svg()
        except Exception as error:  # raised by the body, which may need values that a trace lacks
            graph = element("p", f"no graph: {error}")
        title = element("b", f"{self.name}{self.signature}")
        return notebook_html(title, element("p", inspect.getdoc(self.func) or ""), graph)

    def trace(
        self, *, backend: BackendLike | None = None, explore: int | None = None, **kwargs: UserValue
    ) -> TracerProgramState:
        """Runs the body once without executing its nodes, and records them. Arguments not given are
        symbols, which can be added and formatted into text; a body that decides by a symbol raises
        TraceError at that line.

        Args:
            backend: backend whose chat template and capabilities apply; None for the ChatML
                template and no limits.
            explore: maximum number of paths through the body to follow. If the body asks whether a
                symbol is true, or compares it with a value, both answers are followed; the value of
                a selection takes each of its choices. Other questions about a symbol, such as its
                length, remain errors. None follows one path, and all questions are errors.

        Returns:
            A TracerProgramState of the first path, with `.graph()` (docs/graph.md), `.nodes`,
            `.variables`, `.child_states`, `.ret_value` and `.flatten_nodes()`. `.paths` has all
            paths that were followed, and `.complete` is True if no other paths exist.
        """
        from sglang_lite.lang.tracer import trace_program

        chosen = None if backend is None else backend_for(backend)
        return trace_program(self, {**self.bind_arguments, **kwargs}, chosen, explore)

    def compile(self, *args: UserValue, **kwargs: UserValue) -> NoReturn:
        """Raises CompileError. SGLang's `compile` is not needed: `run_batch` needs no preparation,
        and `trace` returns the program as data.
        """
        raise CompileError(
            f"{self.name}.compile: programs are not compiled any more.",
            hint="Leave .compile() out: run and run_batch give the same results. trace().graph() shows the program.",
            where=user_location(),
        )

    def cache(self, backend: BackendLike | None = None) -> None:
        """Lets the backend cache the constant text that the program starts with, if it is longer
        than 64 characters.
        """
        from sglang_lite.lang.tracer import extract_prefix_by_tracing

        chosen = backend_for(backend)
        prefix = extract_prefix_by_tracing(self, chosen)
        if len(prefix) > 64:
            cache: Callable[[str], object] | None = getattr(chosen, "cache_prefix", None)
            if cache is not None:
                cache(prefix)

    def prepare_run(
        self,
        args: Sequence[UserValue],
        kwargs: dict[str, UserValue],
        options: Mapping[str, UserValue],
        settings: RunSettings | None = None,
        kept: Kept | None = None,
        log: RunLog | None = None,
        *,
        is_item: bool = False,
    ) -> BodyRun:
        """Creates a run of the program without starting it. `settings` are the run's settings,
        derived from the options if None; `kept` holds the answers that a rerun keeps, and `log` is
        the log of a run to resume. Raises ParameterError if an argument or option does not fit.
        """
        bound = self.bind_call(args, kwargs, "run")
        try:
            settings = settings or convert_to_settings(inherit_options(options))
            journal = None
            if "journal" in options or "secret" in options:
                journal = read_journal_options(options.get("journal"), options.get("secret"))
            backend = resolve_run_backend(options)
            return BodyRun(
                self, args, bound, backend, settings, kept, log, journal, is_item=is_item
            )
        except ParameterError as error:
            error.where = error.where or user_location()
            raise

    def bind_call(
        self, args: Sequence[UserValue], kwargs: dict[str, UserValue], what: str
    ) -> dict[str, UserValue]:
        if self.bind_arguments:
            kwargs = {
                k: v for k, v in self.bind_arguments.items() if k not in self.arg_names[: len(args)]
            } | kwargs
        given = {*self.arg_names[: len(args)], *kwargs}
        # otherwise they fit
        if len(given) < len(args) + len(kwargs) or not self._required <= given <= self.names:
            try:
                self.signature.bind(*args, **kwargs)
            except TypeError as error:
                raise _argument_error(self, args, kwargs, what, error) from error
        return kwargs


def _signature_with_bound(program: SglFunction) -> inspect.Signature:
    """Returns the signature without annotations, and with the values of bound arguments as
    defaults.
    """
    bound = program.bind_arguments
    parameters = program.signature.parameters.values()
    return inspect.Signature(
        [p.replace(default=bound.get(p.name, p.default), annotation=p.empty) for p in parameters],
        __validate_parameters__=False,  # a parameter after a bound one may have no default
    )


class BoundFunction(SglFunction[[], R]):
    """Program with arguments given in advance, by `bind`."""

    if TYPE_CHECKING:  # there are no arguments that a misspelt option could be meant for

        @with_signature_of(run_options)
        def run(self, **options: UserValue) -> ProgramState[R]: ...  # type: ignore[override] # no arguments

        @with_signature_of(run_options)
        async def arun(self, **options: UserValue) -> ProgramState[R]: ...  # type: ignore[override] # as above


if TYPE_CHECKING:

    class AsyncFunction(SglFunction[P, R], AsyncProgram[R]):
        """SglFunction of a coroutine function."""


def _split_options(
    program: SglFunction, given: Mapping[str, UserValue]
) -> tuple[dict[str, UserValue], dict[str, UserValue]]:
    """Splits the keyword arguments of a call into arguments of the program and options. If a name
    could be either, it is an argument.
    """
    own = dict[str, UserValue]()
    options = dict[str, UserValue]()
    for name, value in given.items():
        (options if name in program.options else own)[name] = value
    return own, options


def _argument_error(
    program: SglFunction,
    args: Sequence[UserValue],
    arguments: Collection[str],
    what: str,
    error: TypeError,
) -> ParameterError:
    """Returns the error for a call whose arguments don't fit. Its hint suggests the right spelling
    of a misspelt name.
    """
    unknown = [name for name in arguments if name not in program.names]
    problem = f"{program.name}: {error}"
    hint = ""
    if unknown:
        own = [*program.signature.parameters]
        hint = suggest_argument(
            str(unknown[0]), [*own, *(sorted(program.options) if what == "run" else ())]
        )
        if not hint:
            hint = f"Its arguments: {', '.join(own) or 'none'}."
            hint += f" (Settings of a run: help({program.name}.run).)" if what == "run" else ""
        if what.startswith("batch_kwargs") and "missing" not in str(error):
            hint += f" Leave other columns out: {{name: row[name] for name in {[*program.arg_names]!r}}}."
        if "missing" in str(error):
            problem += f", and was given {', '.join(map(repr, unknown))}"
    elif what == "call" and args and isinstance(args[0], ProgramState):
        hint = f"The state is not an argument: s += {program.name}(…) continues it."
    elif what == "run" and "too many positional" in str(error):
        hint = "A run's own settings are given by name: run(…, backend=…)."
    return ParameterError(what, f"{problem}.", hint=hint, where=user_location())


def _program_parameters(func: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    """Returns the parameters of a program's function, beginning with the state. Raises
    ParameterError if the function can't be a program.
    """
    try:
        parameters = list(inspect.signature(func).parameters.values())
    except (TypeError, ValueError) as error:
        raise ParameterError(
            "function",
            f"{func!r:.60} is not a Python function.",
            hint="Decorate `def program(s, …):`.",
            where=user_location(),
        ) from error
    if not parameters or parameters[0].kind not in _POSITIONAL:
        raise ParameterError(
            "function",
            f"{name} has no parameter for the state.",
            hint="Define it as `def program(s, …):`.",
        )
    if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
        raise ParameterError(
            "function",
            f"{name} contains `yield`, so calling it would not run its body.",
            hint="Add to the state, or return a value. To stream, call run(stream=True).",
            where=user_location(),
        )
    return parameters


def _reduce_program(program: SglFunction) -> tuple[object, ...]:
    """Implements `__reduce__` of a program. The result identifies the program by the name of its
    function, or by a method's name and the instance.

    Raises:
        ProgramError: the program can't be found by its name, so another process could not load it.
    """
    func = program.func
    if isinstance(func, MethodType):
        return _unpickle_program, (
            func.__self__,
            func.__name__,
            program.bind_arguments,
            program.untrusted_arguments,
        )
    name = f"{func.__module__}:{func.__qualname__}"
    try:
        found = import_by_name(name)
    except (ImportError, AttributeError):
        found = None
    if found is not func and not (isinstance(found, SglFunction) and found.func is func):
        raise ProgramError(
            f"the program {program.name!r} can't be pickled: its module has no program of this name.",
            hint="Define it at the top of a module, or as a method of a class there.",
        )
    return _unpickle_program, (None, name, program.bind_arguments, program.untrusted_arguments)


def _unpickle_program(
    instance: object, name: str, bound: dict[str, Any], untrusted: bool = False
) -> SglFunction:
    found: Any = import_by_name(name) if instance is None else getattr(instance, name)
    program = (
        found
        if isinstance(found, SglFunction)
        else SglFunction(found, untrusted_arguments=untrusted)
    )
    return program.bind(**bound) if bound else program
