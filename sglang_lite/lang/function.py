"""`@function`: a program, and the ways to run it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import numbers
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from sglang_lite.lang import batch
from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.backend.default import backend_for
from sglang_lite.lang.batch import AsyncCrew, Crew, OnError, Report
from sglang_lite.lang.call import Call, returned, start_thread
from sglang_lite.lang.checkpoint import BatchFile, batch_parts
from sglang_lite.lang.execution.run import NO_PARAMS, RunSettings, current_run
from sglang_lite.lang.expressions import BaseProgram, SglCall
from sglang_lite.lang.global_config import global_config
from sglang_lite.lang.params import check_flags, check_limits, run_params
from sglang_lite.lang.state import ProgramState, in_event_loop, user_location
from sglang_lite.lang.tracebacks import trim
from sglang_lite.protocol import ParameterError, ProgramError, SamplingParams
from sglang_lite.protocol.sampling import named

logger = logging.getLogger("sglang_lite")

Item: TypeAlias = "tuple[Sequence[Any], dict[str, Any]]"  # positional and keyword arguments of a run


@dataclass(frozen=True, slots=True)
class _Plan:
    """A batch: its items, what holds for all of them, how many may be under way, the file that keeps outcomes, and
    those it has already."""

    items: list[Item]
    settings: RunSettings
    window: int
    file: BatchFile | None
    known: Mapping[int, batch.Outcome]

    @property
    def left(self) -> list[tuple[int, Item]]:
        return [(i, item) for i, item in enumerate(self.items) if i not in self.known]

    def __enter__(self) -> None:
        """The batch runs; at its end, however it ends, others can have the file."""

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()


class _Trimmed:
    """`with`: what is raised inside shows the user's frames."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            trim(error)


_trimmed = _Trimmed()


class _Int(int):
    """A default that a signature shows, and that can be told from the same value said by a user."""


class _Float(float):
    """See _Int."""


class SglFunction(BaseProgram):
    """A program.

    Args:
        func: a function or coroutine function; its first parameter is the state.
        num_api_spec_tokens: SGLang's hint for speculation on remote APIs. It never changes a result, and no backend
            speculates, so it has no effect.
        bind_arguments: arguments given already; those given later win.

    Attributes:
        arg_names: names of its positional parameters, without the state.
        arg_defaults: defaults of the last of them.
        is_async: the body is a coroutine function.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        num_api_spec_tokens: int | None = None,
        bind_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.name: str = getattr(func, "__name__", repr(func))
        try:
            parameters = list(inspect.signature(func).parameters.values())
        except (TypeError, ValueError) as error:
            raise ParameterError(
                "function", f"{func!r:.60} is no Python function.", hint="def program(s, …):", where=user_location()
            ) from error
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if not parameters or parameters[0].kind not in positional:
            raise ParameterError("function", f"{self.name} has no parameter for the state.", hint="def program(s, …):")
        if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            raise ParameterError(
                "function", f"{self.name} has a `yield`, so that calling it would run nothing of it.",
                hint="Add to the state or return; readers follow a run with stream=True.", where=user_location(),
            )  # fmt: skip
        self.func = func
        self.num_api_spec_tokens = num_api_spec_tokens
        self.bind_arguments = dict(bind_arguments or {})
        self.arg_names = [p.name for p in parameters[1:] if p.kind in positional]
        self.arg_defaults = [p.default for p in parameters[1:] if p.kind in positional and p.default is not p.empty]
        self.is_async = inspect.iscoroutinefunction(func)
        self.signature = inspect.Signature(parameters[1:])
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self.names = frozenset(p.name for p in parameters[1:] if p.kind not in variable)
        self._shadowed = self.names & _RUN_DEFAULTS.keys()
        functools.update_wrapper(self, func)

    def bind(self, **kwargs: Any) -> SglFunction:
        """The program with some arguments given.

        Raises:
            ParameterError: it has no parameter of such a name.
        """
        try:
            self.signature.bind_partial(**kwargs)
        except TypeError as error:
            raise ParameterError("bind", f"{self.name}: {error}.", where=user_location()) from error
        return SglFunction(self.func, self.num_api_spec_tokens, {**self.bind_arguments, **kwargs})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`run`; inside another program's body an expression: `s += program(…)` goes on with that state's text, and
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
        *args: Any,
        max_new_tokens: int = _Int(128),
        n: int = _Int(1),
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop_regex: str | Sequence[str] | None = None,
        temperature: float = _Float(1.0),
        top_p: float = _Float(1.0),
        top_k: int = _Int(-1),
        min_p: float = _Float(0.0),
        frequency_penalty: float = _Float(0.0),
        presence_penalty: float = _Float(0.0),
        ignore_eos: bool = False,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None,
        stream: bool = False,
        backend: Any = None,
        use_thread: bool = True,
        seed: int | None = None,
        timeout: float | None = None,
        retries: int = 0,
        push_down: bool = True,
        **kwargs: Any,
    ) -> ProgramState:
        """Runs the program.

        Args:
            *args, **kwargs: the program's own arguments. They win over settings of the same name.
            max_new_tokens … return_text_in_logprobs: defaults for its generations, each as `gen` has it.
            stream: return at once and let `text_iter` follow the text to the end of the program. (`text`, `messages`
                and `sync` go as far as the body has come.)
            backend: what to run on; else that of the enclosing program, else the default.
            use_thread: False waits until everything has been executed.
            seed: from which every generation gets its own, by its place in the program, and so does every program that
                the body runs by itself.
            timeout: seconds for the whole run, programs inside it included; what is not finished then fails with
                RequestTimeoutError.
            retries: how often a generation or selection whose backend failed is tried again.
            push_down: hand the run to its backend as one program, where that plays programs (the engine does); False
                asks it node by node, which gives the same, slower: to find mistakes, or to measure.

        Returns:
            The state, when the body has returned. Reading from it waits for what is still being generated.
        """
        own, options = self._sorted(args, kwargs, locals())
        check_flags(use_thread=options["use_thread"])
        call = self._call(args, own, options)
        with _trimmed:
            if options["stream"]:
                start_thread(call.run_streaming)
            elif self.is_async and in_event_loop():
                call.run_in_thread()
            else:
                call.run()
        if not (options["use_thread"] or options["stream"]):
            call.state.branch.player.finished().wait()
            call.state.error()
        if global_config.verbosity >= 2 and not options["stream"]:
            print(call.state.text())
        return call.state

    async def arun(
        self,
        *args: Any,
        max_new_tokens: int = _Int(128),
        n: int = _Int(1),
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop_regex: str | Sequence[str] | None = None,
        temperature: float = _Float(1.0),
        top_p: float = _Float(1.0),
        top_k: int = _Int(-1),
        min_p: float = _Float(0.0),
        frequency_penalty: float = _Float(0.0),
        presence_penalty: float = _Float(0.0),
        ignore_eos: bool = False,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None,
        stream: bool = False,
        backend: Any = None,
        use_thread: bool = True,
        seed: int | None = None,
        timeout: float | None = None,
        retries: int = 0,
        push_down: bool = True,
        **kwargs: Any,
    ) -> ProgramState:
        """`run` for coroutines. It returns when everything has been executed; with stream=True at once, while the
        body goes on as a task of this event loop. The body of a plain function runs in a thread."""
        own, options = self._sorted(args, kwargs, locals())
        call = self._call(args, own, options)
        if not options["stream"]:
            with _trimmed:
                await call.arun()
        elif self.is_async:
            run = call.state.branch.run
            run.body, run.loop = asyncio.ensure_future(call.arun_streaming()), asyncio.get_running_loop()
        else:
            start_thread(call.run_streaming)
        return call.state

    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        max_new_tokens: int = _Int(128),
        n: int = _Int(1),
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop_regex: str | Sequence[str] | None = None,
        temperature: float = _Float(1.0),
        top_p: float = _Float(1.0),
        top_k: int = _Int(-1),
        min_p: float = _Float(0.0),
        frequency_penalty: float = _Float(0.0),
        presence_penalty: float = _Float(0.0),
        ignore_eos: bool = False,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None,
        backend: Any = None,
        num_threads: str | int = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        seed: int | None = None,
        timeout: float | None = None,
        retries: int = 0,
        push_down: bool = True,
        on_error: OnError = "raise",
        ordered: bool = True,
        checkpoint: str | Path | None = None,
        version: str | int | None = None,
        skip_damaged: bool = False,
    ) -> Any:
        """Runs the program once for each item.

        Args:
            batch_kwargs: each run's arguments: by name (a mapping) or in order (a sequence). They are not changed.
            max_new_tokens … return_text_in_logprobs, backend, seed, timeout, retries: as for `run`, for every item.
            num_threads: how many programs are under way at a time; "auto": 96, or 16 a CPU if that is more.
            progress_bar: show one, with tokens per second and the share of prompt tokens that were cached.
            generator_style: return an iterator of states. It starts what fits into the window, and more as the
                consumer asks. Left before its end it stops what is under way, as an interrupt (Ctrl-C) does.
            on_error: what a failed program does: "raise" BatchError after all have finished (from an iterator: the
                error itself, when its turn comes), "return" the exception in its place, "skip" leave it out.
            ordered: whether an iterator yields in the order of the items; False yields (index, state) as they finish.
            checkpoint: a file that keeps finished items: run again, the batch goes on where it was stopped. The file
                is refused after anything has changed that results depend on: arguments, settings and backend, and the
                program's code and every value that it reads, functions that it calls included (of installed packages
                the names alone; another version of Python counts as a change). Only one run can have it open.
            version: of the program: compared instead of its code and what it reads, where those can't be compared or
                have changed without a meaning.
            skip_damaged: run the items of damaged lines of the file again, instead of refusing it.

        Returns:
            The states in the order of the items, executed to the end.

        Raises:
            BatchError: some program failed (on_error="raise"); it carries all results.
            ProgramError: the checkpoint's file is of another batch, damaged, or open in another run.
        """
        options = _with_seed({name: value for name, value in locals().items() if name in _BATCH_DEFAULTS})
        plan = self._plan(
            batch_kwargs, options, num_threads, on_error, checkpoint, version, skip_damaged=skip_damaged,
            progress_bar=progress_bar, generator_style=generator_style, ordered=ordered,
        )  # fmt: skip
        crew = self._crew({**_RUN_DEFAULTS, **options}, plan)
        progress = batch.Progress(len(plan.items), len(plan.known)) if progress_bar else None
        if generator_style or not ordered:
            outcomes = batch.iterate(functools.partial(crew, True), len(plan.left), plan.known, ordered, progress)
            return _passed(plan, outcomes, on_error, ordered)
        with plan:
            results = {**plan.known, **batch.all_results(functools.partial(crew, False), len(plan.left), progress)}
        if progress is not None:
            progress.close()
        return batch.settle([results[i] for i in range(len(plan.items))], on_error)

    async def arun_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        max_new_tokens: int = _Int(128),
        n: int = _Int(1),
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop_regex: str | Sequence[str] | None = None,
        temperature: float = _Float(1.0),
        top_p: float = _Float(1.0),
        top_k: int = _Int(-1),
        min_p: float = _Float(0.0),
        frequency_penalty: float = _Float(0.0),
        presence_penalty: float = _Float(0.0),
        ignore_eos: bool = False,
        return_logprob: bool | None = None,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        return_text_in_logprobs: bool | None = None,
        backend: Any = None,
        num_threads: str | int = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        seed: int | None = None,
        timeout: float | None = None,
        retries: int = 0,
        push_down: bool = True,
        on_error: OnError = "raise",
        ordered: bool = True,
        checkpoint: str | Path | None = None,
        version: str | int | None = None,
        skip_damaged: bool = False,
    ) -> Any:
        """`run_batch` for coroutines; with generator_style=True (or ordered=False) it returns an async iterator."""
        options = _with_seed({name: value for name, value in locals().items() if name in _BATCH_DEFAULTS})
        plan = self._plan(
            batch_kwargs, options, num_threads, on_error, checkpoint, version, skip_damaged=skip_damaged,
            progress_bar=progress_bar, generator_style=generator_style, ordered=ordered,
        )  # fmt: skip
        crew = functools.partial(self._async_crew({**_RUN_DEFAULTS, **options}, plan), True)
        progress = batch.Progress(len(plan.items), len(plan.known)) if progress_bar else None
        if generator_style or not ordered:
            outcomes = batch.aiterate(crew, len(plan.left), plan.known, ordered, progress)
            return _apassed(plan, outcomes, on_error, ordered)
        with plan:
            outcomes = batch.aiterate(crew, len(plan.left), plan.known, False, progress)
            results = {i: outcome async for i, outcome in outcomes}
        return batch.settle([results[i] for i in range(len(plan.items))], on_error)

    def _plan(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        options: dict[str, Any],
        num_threads: str | int,
        on_error: OnError,
        checkpoint: str | Path | None,
        version: str | int | None,
        **flags: bool,
    ) -> _Plan:
        """What a batch is to do. Bad items and settings are refused here, before anything runs."""
        if isinstance(batch_kwargs, str) or not isinstance(batch_kwargs, Iterable):
            raise ParameterError(
                "batch_kwargs", f"{batch_kwargs!r:.60} is not a list of arguments.", where=user_location()
            )
        check_flags(**flags)
        settings = _settings({**_RUN_DEFAULTS, **options})
        batch.check_on_error(on_error)
        items = [self._item(i, item) for i, item in enumerate(batch_kwargs)]
        window = min(_window(num_threads), max(len(items), 1))
        file = None
        if checkpoint is not None:
            if not isinstance(checkpoint, str | Path):
                raise ParameterError("checkpoint", f"{checkpoint!r:.60} is no path.", where=user_location())
            parts = batch_parts(self.func, settings, _backend(options), version)
            file = BatchFile(Path(checkpoint), self.name, parts, items, skip_damaged=flags["skip_damaged"])
        elif version is not None or flags["skip_damaged"]:
            raise ParameterError(
                "skip_damaged" if version is None else "version", "needs a checkpoint.", where=user_location()
            )
        return _Plan(items, settings, window, file, dict(file.states) if file is not None else {})

    def trace(self, *, backend: Any = None, **kwargs: Any) -> Any:
        """Runs the body once without a backend and records its nodes. Arguments not given are symbols, which can be
        added and formatted into text; a body that decides by one raises TraceError at that line.

        Returns:
            A TracerProgramState: `.nodes`, `.variables`, `.child_states`, `.ret_value`, `.flatten_nodes()`.
        """
        from sglang_lite.lang.tracer import trace_program

        return trace_program(self, {**self.bind_arguments, **kwargs}, None if backend is None else backend_for(backend))

    def cache(self, backend: Any = None) -> None:
        """Tells the backend the constant text that the program starts with, if it is longer than 64 characters."""
        from sglang_lite.lang.tracer import extract_prefix_by_tracing

        chosen = backend_for(backend)
        prefix = extract_prefix_by_tracing(self, chosen)
        if len(prefix) > 64:
            chosen.cache_prefix(prefix)

    def _call(
        self, args: Sequence[Any], kwargs: dict[str, Any], options: dict[str, Any], settings: RunSettings | None = None
    ) -> Call:
        bound = self.bound(args, kwargs, "run")
        try:
            return Call(self, args, bound, _backend(options), settings or _settings(options))
        except ParameterError as error:
            error.where = error.where or user_location()
            raise

    def _crew(self, options: dict[str, Any], plan: _Plan) -> Callable[[bool, Report], Crew | AsyncCrew]:
        """Makes a crew for the items that are left."""
        if self.is_async:
            return self._async_crew(options, plan)

        def call(item: Item) -> Call:
            return self._call(item[0], item[1], options, plan.settings)

        return lambda held, report: Crew(call, plan.left, plan.window, _saving(report, plan.file), held=held)

    def _async_crew(self, options: dict[str, Any], plan: _Plan) -> Callable[[bool, Report], AsyncCrew]:
        async def body(item: Item) -> ProgramState:
            call = self._call(item[0], item[1], options, plan.settings)
            await call.arun()
            return call.state

        return lambda held, report: AsyncCrew(body, plan.left, plan.window, _saving(report, plan.file), held=held)

    def _item(self, index: int, item: Mapping[str, Any] | Sequence[Any]) -> Item:
        """An item of a batch as positional and keyword arguments, checked against the program's signature."""
        what = f"batch_kwargs[{index}]"
        if isinstance(item, Mapping):
            return (), self.bound((), dict(item), what)
        if not isinstance(item, list | tuple):
            raise ParameterError(
                what, f"{item!r:.80} is neither a mapping nor a list.", hint="Give arguments by name: {'name': value}.",
                where=user_location(),
            )  # fmt: skip
        return tuple(item), self.bound(item, {}, what)

    def bound(self, args: Sequence[Any], kwargs: dict[str, Any], what: str) -> dict[str, Any]:
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
                raise ParameterError(what, f"{self.name}: {error}.", where=user_location()) from error
        return kwargs

    def _sorted(
        self, args: Sequence[Any], kwargs: dict[str, Any], given: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The program's own keyword arguments, and the options of the run. A name that both have is the program's."""
        options = {name: given[name] for name in _RUN_DEFAULTS}
        own = kwargs
        if self._shadowed:
            own = dict(kwargs)
            given_otherwise = {*self.arg_names[: len(args)], *self.bind_arguments}
            for name in self._shadowed:
                value, default = options[name], _RUN_DEFAULTS[name]
                required = self.signature.parameters[name].default is inspect.Parameter.empty
                if _said(value, default):
                    own[name] = value
                elif required and name not in given_otherwise and type(default) not in (_Int, _Float):
                    own[name] = value  # None or False, which may have been said
                options[name] = default
        return own, _with_seed(options)


class NestedCall(SglCall):
    """A program called inside another's body. Added to a state, its body goes on with that state's text and names;
    read from, it is run by itself, unless it has been added before: then that is read from."""

    __slots__ = ("_added", "_args", "_kwargs", "_program", "_state", "_used", "_where")

    def __init__(self, program: SglFunction, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._program, self._args, self._kwargs = program, args, kwargs
        self._state: ProgramState | None = None
        self._added = self._used = False
        self._where = user_location()

    def play_on(self, branch: Any) -> None:
        program, self._used = self._program, True
        if self._state is not None and not self._added:
            raise ProgramError(
                f"{program.name}(…) was read from, so it has run by itself already.", where=user_location()
            )
        if program.is_async:
            raise ProgramError(
                f"{program.name} is async, and `+=` can't await it.", hint="Use await s.call(…).", where=user_location()
            )
        settings = self._kwargs.keys() & (_RUN_DEFAULTS.keys() - program.names)
        if settings:
            raise ParameterError(
                min(settings), f"an added {program.name}(…) runs with the settings of the run it is added to.",
                hint="Give it to the generation, or use s.call(…).", where=user_location(),
            )  # fmt: skip
        kwargs = program.bound(self._args, dict(self._kwargs), program.name)
        self._added, self._state = True, branch.run.new_state(branch)
        self._state.ret_value = returned(program, program.func(self._state, *self._args, **kwargs))

    @property
    def state(self) -> ProgramState:
        """The state of the program run by itself; started when it is first asked for."""
        from sglang_lite.lang.tracer import TracingScope, trace_program

        self._used = True
        if self._state is None:
            if TracingScope.get_current_scope() is not None:
                arguments = self._program.signature.bind(*self._args, **self._kwargs).arguments
                self._state = trace_program(self._program, dict(arguments), None)
            else:
                self._state = self._program.run(*self._args, **self._kwargs)
        return self._state

    def __getitem__(self, name: str) -> Any:
        return self.state[name]

    def __contains__(self, name: str) -> bool:
        return name in self.state

    def __getattr__(self, name: str) -> Any:
        return getattr(self.state, name)

    def __del__(self) -> None:
        if not self._used:
            logger.warning(
                "%s(…) was neither added (s += …) nor read from, so it has not run. [%s]",
                self._program.name,
                self._where,
            )

    def __repr__(self) -> str:
        return f"Call({self._program.name})"


def _with_seed(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a run; one inside another that has a seed gets one too."""
    outer = current_run.get()
    if outer is not None and options["seed"] is None:
        options["seed"] = outer.inner_seed()
    return options


def _backend(options: dict[str, Any]) -> BaseBackend:
    """What a run is on: the backend given, else that of the run it is inside, else the default."""
    outer = current_run.get()
    given = options["backend"]
    return backend_for(outer.backend if given is None and outer is not None else given)


def _said(value: Any, default: Any) -> bool:
    """A user has given the value: it is no default, of this method or of another."""
    return value is not default and type(value) not in (_Int, _Float)


def _settings(options: dict[str, Any]) -> RunSettings:
    given = {name: options[name] for name in _PARAMS if _said(options[name], _RUN_DEFAULTS[name])}
    plain = not given and not options["stream"] and options["seed"] is options["timeout"] is None
    plain = plain and options["push_down"] is True
    if plain and not options["retries"]:
        return _PLAIN
    timeout, retries = options["timeout"], options["retries"]
    check_limits(timeout, retries)
    check_flags(stream=options["stream"], push_down=options["push_down"])
    seed = options["seed"]
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, numbers.Integral)):
        raise ParameterError("seed", f"{seed!r:.60} is not a whole number.")
    params: SamplingParams = run_params(given) if given else NO_PARAMS
    seed = None if seed is None else int(seed)
    return RunSettings(params, options["stream"], seed, timeout, retries, options["push_down"])


def _defaults(method: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(method).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


_PLAIN = RunSettings()
_RUN_DEFAULTS = _defaults(SglFunction.run)
_BATCH_DEFAULTS = {k: v for k, v in _defaults(SglFunction.run_batch).items() if k in _RUN_DEFAULTS}
_PARAMS = tuple(named("run", sglang=True))


def _window(num_threads: str | int) -> int:
    if num_threads == "auto":
        return max(96, (os.cpu_count() or 1) * 16)
    if isinstance(num_threads, bool) or not isinstance(num_threads, int) or num_threads < 1:
        raise ParameterError(
            "num_threads", f"{num_threads!r} is not 'auto' or a whole number of at least 1.", where=user_location()
        )
    return num_threads


def _saving(report: Report, file: BatchFile | None) -> Report:
    """A report that also keeps what has succeeded."""
    if file is None:
        return report

    def save(index: int, outcome: batch.Outcome) -> None:
        if isinstance(outcome, ProgramState):
            try:
                file.save(index, outcome)
            except Exception as error:  # the item's outcome: it can't be kept
                outcome = error
        report(index, outcome)

    return save


def _wanted(outcome: batch.Outcome, on_error: OnError) -> bool:
    """Whether an iterator yields an outcome. Raises it, where the caller wants that."""
    if isinstance(outcome, Exception) and on_error == "raise":
        raise outcome
    return on_error != "skip" or not isinstance(outcome, Exception)


def _passed(
    plan: _Plan, outcomes: Generator[tuple[int, batch.Outcome], None, None], on_error: OnError, ordered: bool
) -> Iterator[Any]:
    with plan, contextlib.closing(outcomes):
        for index, outcome in outcomes:
            if _wanted(outcome, on_error):
                yield outcome if ordered else (index, outcome)


async def _apassed(
    plan: _Plan, outcomes: AsyncGenerator[tuple[int, batch.Outcome], None], on_error: OnError, ordered: bool
) -> AsyncIterator[Any]:
    with plan:
        async with contextlib.aclosing(outcomes):
            async for index, outcome in outcomes:
                if _wanted(outcome, on_error):
                    yield outcome if ordered else (index, outcome)
