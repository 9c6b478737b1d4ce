"""`@function`: a program, and the ways to run it."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from sglang_lite.lang.argument_names import name_meant, no_such_argument, tells_names
from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.backend.default import BackendLike, backend_for
from sglang_lite.lang.batch_pools import async_pool_of, pool_of
from sglang_lite.lang.batches import batch
from sglang_lite.lang.batches.batch import BatchPlan, Cluster, OnError
from sglang_lite.lang.body_run import BodyRun, start_thread
from sglang_lite.lang.checks import check_flags
from sglang_lite.lang.execution.api_speculation import ApiSpeculation
from sglang_lite.lang.execution.reading import finished
from sglang_lite.lang.execution.run import BoundCall, Run, RunSettings, current_run
from sglang_lite.lang.expressions import BaseProgram
from sglang_lite.lang.global_config import global_config
from sglang_lite.lang.nested_call import NestedCall
from sglang_lite.lang.pickled import pickled
from sglang_lite.lang.run_options import DefaultFloat, DefaultInt, backend_of, inherit, is_said, settings_of
from sglang_lite.lang.state import ProgramState, in_event_loop, user_location
from sglang_lite.lang.tracebacks import trim
from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.anything import UserValue

if TYPE_CHECKING:
    from sglang_lite.lang.compilation.compiled import Compiled
    from sglang_lite.lang.compilation.held_row import HeldRow
    from sglang_lite.lang.compilation.whole_row import CompiledCall
    from sglang_lite.program.compiled import CompiledProgram

_P = ParamSpec("_P")
_T = TypeVar("_T")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class _Trimmed:
    """`with`: what is raised inside shows the user's frames."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            trim(error)


_trimmed = _Trimmed()


def with_signature_of(method: Callable[_P, UserValue]) -> Callable[[Callable[..., _T]], Callable[_P, _T]]:
    """Decorator that copies `method`'s signature, for wrappers that take *args and **kwargs."""

    def given(twin: Callable[..., _T]) -> Callable[_P, _T]:
        twin.__signature__ = inspect.signature(method)  # type: ignore[attr-defined] # where `inspect` looks
        return twin

    return given


class SglFunction(BaseProgram):
    """A program.

    Args:
        func: a function or coroutine function; its first parameter is the state.
        num_api_spec_tokens: on a backend that is asked generation by generation over an API, how many tokens a call
            may generate ahead, for the generations that the same statement adds to the same turn (docs/backends.md);
            None: it does not.
        bind_arguments: arguments given already; those given later win.

    Attributes:
        arg_names: names of its positional parameters, without the state.
        arg_defaults: defaults of the last of them.
        is_async: the body is a coroutine function.
        options: names of the parameters of `run` that are none of its own.
        speculation: on the calls of an API: what it has found, missed, saved and thrown away so far.

    Raises:
        ParameterError: `func` is no function of a state, or `num_api_spec_tokens` no number above 0.
    """

    def __init__(
        self,
        func: Callable[..., UserValue],
        num_api_spec_tokens: int | None = None,
        bind_arguments: Mapping[str, UserValue] | None = None,
    ) -> None:
        self.name: str = getattr(func, "__name__", repr(func))
        parameters = _parameters_of(func, self.name)
        self._of_instances = parameters[0].name == "self"
        self.func = func
        self.compiled: Compiled | None = None  # set by `compile`
        self.num_api_spec_tokens = num_api_spec_tokens
        self.speculation = ApiSpeculation(_checked_tokens(num_api_spec_tokens))
        self.bind_arguments = dict(bind_arguments or {})
        in_order = [p for p in parameters[1:] if p.kind in _POSITIONAL]
        self.arg_names = [p.name for p in in_order]
        self.arg_defaults = [p.default for p in in_order if p.default is not p.empty]
        self.is_async = inspect.iscoroutinefunction(func)
        self.signature = inspect.Signature(parameters[1:])
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self.names = frozenset(p.name for p in parameters[1:] if p.kind not in variable)
        self.options = _RUN_DEFAULTS.keys() - self.names
        self._shadowed = self.names & _RUN_DEFAULTS.keys()
        functools.update_wrapper(self, func)

    def __get__(self, instance: object, owner: type | None = None) -> SglFunction:
        """The program of an instance, where its class defines it with `self` before the state; else the program."""
        if instance is None or not self._of_instances:
            return self
        own = SglFunction(MethodType(self.func, instance), self.num_api_spec_tokens, self.bind_arguments)
        own.speculation = self.speculation
        return own

    def bind(self, **kwargs: UserValue) -> SglFunction:
        """The program with some arguments given.

        Raises:
            ParameterError: it has no parameter of such a name.
        """
        try:
            self.signature.bind_partial(**kwargs)
        except TypeError as error:
            raise ParameterError("bind", f"{self.name}: {error}.", where=user_location()) from error
        return SglFunction(self.func, self.num_api_spec_tokens, {**self.bind_arguments, **kwargs})

    def __call__(self, *args: UserValue, **kwargs: UserValue) -> UserValue:
        """`run`; inside another program's body an expression: `s += program(…)` continues that state's text, and
        reading from it (`program(…)["x"]`) runs it by itself."""
        from sglang_lite.lang.tracer import TracingScope

        if current_run.get() is not None:
            return NestedCall(self, args, kwargs)
        scope = TracingScope.get_current_scope()
        if scope is not None:
            arguments = dict(self.signature.bind(*args, **kwargs).arguments)
            return self.trace(**arguments, backend=scope.tracer_state.branch.backend)
        return self.run(*args, **kwargs)

    def run(
        self,
        *args: UserValue,
        max_new_tokens: int = DefaultInt(128),
        n: int = DefaultInt(1),
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop_regex: str | Sequence[str] | None = None,
        temperature: float = DefaultFloat(1.0),
        top_p: float = DefaultFloat(1.0),
        top_k: int = DefaultInt(-1),
        min_p: float = DefaultFloat(0.0),
        frequency_penalty: float = DefaultFloat(0.0),
        presence_penalty: float = DefaultFloat(0.0),
        ignore_eos: bool = False,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None,
        stream: bool = False,
        backend: BackendLike | None = None,
        use_thread: bool = True,
        seed: int | None = None,
        timeout: float | None = None,
        retries: int = 0,
        push_down: bool = True,
        priority: int = DefaultInt(0),
        max_cost: float | None = None,
        max_total_tokens: int | None = None,
        **kwargs: UserValue,
    ) -> ProgramState:
        """Runs the program.

        Args:
            *args, **kwargs: the program's own arguments. They win over settings of the same name.
            max_new_tokens … return_text_in_logprobs: defaults for its generations, each as `gen` has it.
            stream: return at once and let `text_iter` follow the text to the end of the program. (`text`, `messages`
                and `sync` go as far as the body has come.)
            backend: the backend; None: that of the enclosing program, else the default.
            use_thread: False: return only when everything has been executed.
            seed: of the run. Every generation, and every program that the body runs by itself, derives its own seed
                from it, by its place in the program.
            timeout: seconds for the whole run, programs inside it included. Nodes that are not finished by then fail
                with RequestTimeoutError.
            retries: number of attempts after the first, if the backend of a generation or selection fails.
            push_down: hand the run to its backend as one program, if that plays programs (the engine does). False:
                request it node by node, which gives the same results, but slower: to debug, or to measure.
            priority: of the run at an engine whose policy is "priority": higher ones are admitted first. It also
                applies to programs that the body runs by themselves.
            max_cost, max_total_tokens: limits on the dollars, and on the tokens of prompts and answers, of the run,
                programs inside it included. A call that could exceed one is not made: it fails with BudgetError, which
                has the state. With a limit, the run is requested node by node (docs/backends.md).

        Returns:
            The state, when the body has returned. Reading from it waits for what is still being generated.
        """
        options = dict(locals())
        del options["self"], options["args"], options["kwargs"]
        inside = current_run.get()
        if inside is not None and (handed := _compiled_symbol(inside, self, args, kwargs, options)) is not None:
            return handed  # type: ignore[no-any-return] # it stands for a state
        own = self._split_options(args, kwargs, options)
        check_flags(use_thread=options["use_thread"])
        call = self.prepared(args, own, options)
        with _trimmed:
            if isinstance(call, BodyRun) and options["stream"]:
                start_thread(call.run_streaming)
            else:
                self._run_here(call)
        if not (options["use_thread"] or options["stream"]):
            finished(call.state.branch.player).wait()
            call.state.error()
        if global_config.verbosity >= 2 and not options["stream"]:
            print(call.state.text())
        return call.state

    @with_signature_of(run)
    async def arun(self, *args: UserValue, **kwargs: UserValue) -> ProgramState:
        """`run` for coroutines. It returns when everything has been executed; with stream=True at once, while the
        body continues as a task of this event loop. The body of a plain function runs in a thread."""
        own = {name: value for name, value in kwargs.items() if name not in _RUN_DEFAULTS}
        options = {**_RUN_DEFAULTS, **{name: value for name, value in kwargs.items() if name in _RUN_DEFAULTS}}
        own = self._split_options(args, own, options)
        call = self.prepared(args, own, options)
        if not isinstance(call, BodyRun) or not options["stream"]:
            with _trimmed:
                await call.arun()
        elif self.is_async:
            run = call.state.branch.run
            run.body, run.loop = asyncio.ensure_future(call.arun_streaming()), asyncio.get_running_loop()
        else:
            start_thread(call.run_streaming)
        return call.state

    @tells_names
    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, UserValue] | Sequence[UserValue]],
        *,
        max_new_tokens: int = DefaultInt(128),
        n: int = DefaultInt(1),
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop_regex: str | Sequence[str] | None = None,
        temperature: float = DefaultFloat(1.0),
        top_p: float = DefaultFloat(1.0),
        top_k: int = DefaultInt(-1),
        min_p: float = DefaultFloat(0.0),
        frequency_penalty: float = DefaultFloat(0.0),
        presence_penalty: float = DefaultFloat(0.0),
        ignore_eos: bool = False,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None,
        backend: BackendLike | None = None,
        num_threads: str | int = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        seed: int | None = None,
        timeout: float | None = None,
        retries: int = 0,
        push_down: bool = True,
        priority: int = DefaultInt(0),
        max_cost: float | None = None,
        max_total_tokens: int | None = None,
        on_error: OnError = "raise",
        ordered: bool = True,
        checkpoint: str | Path | None = None,
        version: str | int | None = None,
        skip_damaged: bool = False,
        cluster: Cluster | None = None,
    ) -> UserValue:
        """Runs the program once for each item.

        Args:
            batch_kwargs: each run's arguments: by name (a mapping) or in order (a sequence). They are not changed.
            max_new_tokens … return_text_in_logprobs, backend, seed, timeout, retries, priority: as for `run`, for every
                item.
            max_cost, max_total_tokens: as for `run`, for all items together.
            num_threads: most programs that run at a time; "auto": 96, or 16 per CPU if that is more.
            progress_bar: show a progress bar, with tokens per second and the share of cached prompt tokens.
            generator_style: return an iterator of states. It starts num_threads programs, and more as states are
                consumed. If it is left before its end, it stops running programs, as an interrupt (Ctrl-C) does.
            on_error: what happens to a failed program. "raise": BatchError after all have finished (an iterator raises
                the error itself, in its turn). "return": its exception is its result. "skip": it is left out.
            ordered: whether an iterator yields in the order of the items; False yields (index, state) as they finish.
            checkpoint: a file that keeps finished items: run again, the batch continues where it was stopped. The file
                is refused after anything has changed that results depend on: arguments, settings and backend, and the
                program's code and every value that it reads, functions that it calls included (of installed packages
                the names alone; another version of Python counts as a change). Only one run can have it open.
            version: of the program: compared instead of its code and what it reads, where those can't be compared or
                have changed without a meaning.
            skip_damaged: run the items of damaged lines of the checkpoint again, instead of refusing the file.
            cluster: engines of other machines to run on instead of a backend: `sglang_lite.ray.RayOptions`. States have
                then what a checkpoint keeps of them.

        Returns:
            The states in the order of the items, executed to the end.

        Raises:
            BatchError: some program failed (on_error="raise"); it carries all results.
            ProgramError: the checkpoint's file is of another batch, damaged, or open in another run.
        """
        plan = self._plan(batch_kwargs, locals())
        make_pool = functools.partial(pool_of, self, plan, until_released=plan.iterates)
        outcomes = batch.iterate(make_pool, plan)
        if plan.iterates:
            return batch.yield_results(plan, outcomes)
        with plan:
            return batch.results_of(plan, dict(outcomes))

    @with_signature_of(run_batch)
    async def arun_batch(self, batch_kwargs: object, **options: UserValue) -> UserValue:
        """`run_batch` for coroutines; with generator_style=True (or ordered=False) it returns an async iterator."""
        for name in options.keys() - _BATCH_DEFAULTS.keys():
            raise no_such_argument("arun_batch", name, _BATCH_DEFAULTS)
        plan = self._plan(batch_kwargs, {**_BATCH_DEFAULTS, **options})
        outcomes = batch.aiterate(functools.partial(async_pool_of, self, plan, until_released=True), plan)
        if plan.iterates:
            return batch.ayield_results(plan, outcomes)
        with plan:
            return batch.results_of(plan, {index: outcome async for index, outcome in outcomes})

    def run_again(self, called: BoundCall, backend: BaseBackend, settings: RunSettings) -> ProgramState:
        """Runs it once more, as it was called, on another backend."""
        budget = None if settings.budget is None else settings.budget.afresh()
        with _trimmed:
            settings = replace(settings, stream=False, budget=budget)
            call = BodyRun(self, called.args, dict(called.kwargs), backend, settings)
            return self._run_here(call)

    def _run_here(self, call: BodyRun | CompiledCall | HeldRow) -> ProgramState:
        """Runs a call's body; in a thread where it needs an event loop and this one has its own."""
        run = call.run_in_thread if self.is_async and in_event_loop() else call.run
        run()
        return call.state

    def __reduce__(self) -> tuple[object, ...]:
        return pickled(self, SglFunction)

    def trace(
        self, *, backend: BackendLike | None = None, explore: int | None = None, **kwargs: UserValue
    ) -> UserValue:
        """Runs the body once without a backend and records its nodes. Arguments not given are symbols, which can be
        added and formatted into text; a body that decides by one raises TraceError at that line.

        Args:
            explore: run it again for each way that it can continue, so many times at most: where it asks whether a
                symbol is true, equal to something, less or more, both in turn; a selection's value is each of its
                choices. Other questions (how long it is, what is in it in turn) remain errors.

        Returns:
            A TracerProgramState, of the first way: `.graph()` (docs/graph.md), `.nodes`, `.variables`, `.child_states`,
            `.ret_value`, `.flatten_nodes()`; `.paths` are all ways that were followed, `.complete` tells whether there
            are no others.
        """
        from sglang_lite.lang.tracer import trace_program

        chosen = None if backend is None else backend_for(backend)
        return trace_program(self, {**self.bind_arguments, **kwargs}, chosen, explore)

    @tells_names
    def compile(self, backend: BackendLike | None = None, *, saved: CompiledProgram | None = None) -> SglFunction:
        """The program compiled: its body is run once with symbols for its arguments, and no more. Runs of what is
        returned are filled with their arguments and played as a whole, with the same results; where your Python has a
        say (`check=`, a tool, a method of choosing or a backend of its own), from one such hold to the next. Runs with
        `stream=True`, `retries=`, a budget or `push_down=False`, and on backends that play no programs, run the body.

        Arguments are then data: None, bools, numbers, texts, lists and dictionaries of such. Those that were bound
        (`bind`) are constants.

        Args:
            backend: that it will run on. Without one it is compiled to see that it can be; it is compiled for each
                backend that it is run on in any case.
            saved: `compiled.program` of an earlier process, to be the same as now.

        Returns:
            A program; `.compiled.program` is what it is as data.

        Raises:
            CompileError: its Python decides by what only a run knows; the error names the line.
            ProgramError: `saved` is another program; the error names the first difference.
        """
        from sglang_lite.lang.compilation.compiled import Compiled
        from sglang_lite.lang.tracer import NoBackend

        twin = SglFunction(self.func, self.num_api_spec_tokens, self.bind_arguments)
        twin.compiled = Compiled(twin)
        specialized = twin.compiled.specialized(NoBackend() if backend is None else backend_for(backend), RunSettings())
        if saved is not None:
            twin.compiled.check_saved(saved, specialized)
        return twin

    def cache(self, backend: BackendLike | None = None) -> None:
        """Tells the backend the constant text that the program starts with, if it is longer than 64 characters."""
        from sglang_lite.lang.tracer import extract_prefix_by_tracing

        chosen = backend_for(backend)
        prefix = extract_prefix_by_tracing(self, chosen)
        if len(prefix) > 64:
            chosen.cache_prefix(prefix)

    def prepared(
        self,
        args: Sequence[UserValue],
        kwargs: dict[str, UserValue],
        options: Mapping[str, UserValue],
        settings: RunSettings | None = None,
    ) -> BodyRun | CompiledCall | HeldRow:
        """A run that has not begun. `settings` are what the options come to, where that is known. Raises
        ParameterError: an argument or option does not fit."""
        bound = self.bound(args, kwargs, "run")
        try:
            if self.compiled is not None:
                given = settings or settings_of(options, _RUN_DEFAULTS)
                call = self.compiled.call(args, bound, backend_of(options), given)
                if call is not None:
                    return call
            return BodyRun(self, args, bound, backend_of(options), settings or settings_of(options, _RUN_DEFAULTS))
        except ParameterError as error:
            error.where = error.where or user_location()
            raise

    def _plan(self, batch_kwargs: Any, given: Mapping[str, Any]) -> BatchPlan:
        options = {**_RUN_DEFAULTS, **{name: given[name] for name in _BATCH_DEFAULTS}}
        inherit(options)
        return batch.plan_of(self, batch_kwargs, options, _RUN_DEFAULTS)

    def bound(self, args: Sequence[UserValue], kwargs: dict[str, UserValue], what: str) -> dict[str, UserValue]:
        """The keyword arguments of a call, those given by `bind` included.

        Raises:
            ParameterError: they don't fit the program.
        """
        if self.bind_arguments:
            given = {k: v for k, v in self.bind_arguments.items() if k not in self.arg_names[: len(args)]}
            kwargs = {**given, **kwargs}
        if args or len(kwargs) != len(self.names) or not kwargs.keys() <= self.names:  # else they plainly fit
            try:
                self.signature.bind(*args, **kwargs)
            except TypeError as error:
                raise _misfit(self, kwargs, what, error) from error
        return kwargs

    def _split_options(self, args: Sequence[Any], kwargs: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of the program: `kwargs`, and the values of options whose names are also its parameters'.
        These options return to their defaults; seed and priority are filled in from an enclosing run."""
        own = kwargs
        if self._shadowed:
            own = dict(kwargs)
            given_otherwise = {*self.arg_names[: len(args)], *self.bind_arguments}
            for name in self._shadowed:
                value, default = options[name], _RUN_DEFAULTS[name]
                required = self.signature.parameters[name].default is inspect.Parameter.empty
                if is_said(value, default):
                    own[name] = value
                elif required and name not in given_otherwise and type(default) not in (DefaultInt, DefaultFloat):
                    own[name] = value  # None or False, which may have been said
                options[name] = default
        inherit(options)
        return own


def _compiled_symbol(
    inside: Run, program: SglFunction, args: Sequence[Any], kwargs: dict[str, Any], given: Mapping[str, Any]
) -> Any:
    """Symbol of a run's state, where it is inside a body that is compiled; None elsewhere."""
    said = {name: given[name] for name, default in _RUN_DEFAULTS.items() if is_said(given[name], default)}
    return inside.record_call(program.name, program.run, args, {**kwargs, **said})


def _misfit(program: SglFunction, given: Collection[str], what: str, error: TypeError) -> ParameterError:
    """The error of arguments that do not fit, with those that may be misspelt."""
    unknown = [name for name in given if name not in program.names]
    told, hint = f"{program.name}: {error}", ""
    if unknown:
        known = [*program.signature.parameters, *(sorted(program.options) if what == "run" else ())]
        hint = name_meant(str(unknown[0]), known)
        if "missing" in str(error):
            told += f", and was given {', '.join(map(repr, unknown))}"
    return ParameterError(what, f"{told}.", hint=hint, where=user_location())


def _parameters_of(func: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    """Parameters of a program's function, the state's first. Raises ParameterError: it can't be a program."""
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
            "function", f"{name} has no parameter for the state.", hint="Define it as `def program(s, …):`."
        )
    if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
        raise ParameterError(
            "function", f"{name} contains `yield`, so calling it would not run its body.",
            hint="Add to the state, or return a value. To stream, call run(stream=True).", where=user_location(),
        )  # fmt: skip
    return parameters


def _checked_tokens(tokens: int | None) -> int | None:
    if tokens is None or (isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0):
        return tokens
    raise ParameterError(
        "num_api_spec_tokens", f"{tokens!r:.60} is not a number of tokens above 0.", hint="Give one, or None.",
        where=user_location(),
    )  # fmt: skip


def _defaults(method: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(method).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


_RUN_DEFAULTS = _defaults(SglFunction.run)
_BATCH_DEFAULTS = _defaults(SglFunction.run_batch)
