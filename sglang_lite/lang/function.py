"""`@function`: a program, and the ways to run it."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import copy_context
from threading import Thread
from typing import Any

from sglang_lite.lang.backend.default import backend_for
from sglang_lite.lang.batch import as_completed, collect, in_order, with_progress
from sglang_lite.lang.global_config import global_config
from sglang_lite.lang.interpreter import Run, RunSettings, StreamExecutor, current_run
from sglang_lite.lang.params import sampling_params
from sglang_lite.lang.state import ProgramState, in_event_loop
from sglang_lite.protocol import ParameterError


class _Int(int):
    """A default that a signature shows, and that can be told from the same value said by a user."""


class _Float(float):
    """See _Int."""


class SglFunction:
    """A program.

    Args:
        func: a function or coroutine function; its first parameter is the state.
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
        if num_api_spec_tokens is not None:
            raise ParameterError("num_api_spec_tokens", "API speculation is not supported.", hint="Leave it out.")
        self.name: str = getattr(func, "__name__", repr(func))
        parameters = list(inspect.signature(func).parameters.values())
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if not parameters or parameters[0].kind not in positional:
            raise ParameterError("function", f"{self.name} has no parameter for the state.", hint="def program(s, …):")
        self.func = func
        self.bind_arguments = dict(bind_arguments or {})
        self.arg_names = [p.name for p in parameters[1:] if p.kind in positional]
        self.arg_defaults = [p.default for p in parameters[1:] if p.kind in positional and p.default is not p.empty]
        self.is_async = inspect.iscoroutinefunction(func)
        self._signature = inspect.Signature(parameters[1:])
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self._names = frozenset(p.name for p in parameters[1:] if p.kind not in variable)
        functools.update_wrapper(self, func)

    def bind(self, **kwargs: Any) -> SglFunction:
        """The program with some arguments given.

        Raises:
            ParameterError: it has no parameter of such a name.
        """
        try:
            self._signature.bind_partial(**kwargs)
        except TypeError as error:
            raise ParameterError("bind", f"{self.name}: {error}.") from error
        return SglFunction(self.func, bind_arguments={**self.bind_arguments, **kwargs})

    def __call__(self, *args: Any, **kwargs: Any) -> ProgramState:
        """`run`."""
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
        **kwargs: Any,
    ) -> ProgramState:
        """Runs the program.

        Args:
            *args, **kwargs: the program's own arguments. They win over settings of the same name.
            max_new_tokens … return_text_in_logprobs: defaults for its generations; see SamplingParams.
            stream: return at once and let `text_iter` follow the text.
            backend: what to run on; else that of the enclosing program, else the default.
            use_thread: False waits until everything has been executed.
            seed: from which every generation gets its own.

        Returns:
            The state, when the body has returned. Reading from it waits for what is still being generated.
        """
        own, options = self._sorted(kwargs, locals(), _RUN_DEFAULTS)
        call = _Call(self, args, own, options)
        if options["stream"]:
            _thread(call.run_streaming)
        elif self.is_async and in_event_loop():
            call.run_in_thread()
        else:
            call.run()
        if not (options["use_thread"] or options["stream"]):
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
        **kwargs: Any,
    ) -> ProgramState:
        """`run` for coroutines. It returns when everything has been executed; with stream=True at once, while the
        body goes on as a task of this event loop. The body of a plain function runs in a thread."""
        own, options = self._sorted(kwargs, locals(), _RUN_DEFAULTS)
        call = _Call(self, args, own, options)
        if options["stream"]:
            call.state.stream_executor.run.body = asyncio.ensure_future(call.arun_streaming())
        else:
            await call.arun()
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
    ) -> Any:
        """Runs the program once for each item.

        Args:
            batch_kwargs: each run's arguments: by name (a mapping) or in order (a sequence). They are not changed.
            max_new_tokens … return_text_in_logprobs, backend, seed: as for `run`, the same for every item.
            num_threads: how many programs are under way at a time; "auto": 96, or 16 a CPU if that is more.
            progress_bar: show one, with tokens per second and the share of prompt tokens that were cached.
            generator_style: return an iterator of states in the order of the items. It starts what fits into the
                window, and more as the consumer asks.

        Returns:
            The states in the order of the items, executed to the end.

        Raises:
            BatchError: some program failed; after all have finished, with all results.
        """
        _, options = self._sorted({}, locals(), _BATCH_DEFAULTS)
        items = [self._item(i, item) for i, item in enumerate(batch_kwargs)]
        window = min(_window(num_threads), max(len(items), 1))

        def start(item: tuple[Sequence[Any], dict[str, Any]]) -> _Call:
            return _Call(self, item[0], item[1], {**_RUN_DEFAULTS, **options})

        outcomes = as_completed(
            None if self.is_async else lambda item: start(item).run(),
            (lambda item: start(item).arun_body()) if self.is_async else None,
            items,
            window,
        )
        if progress_bar:
            outcomes = with_progress(outcomes, len(items))
        if generator_style:
            return _states(in_order(outcomes))
        return collect(outcomes, len(items))

    def _item(self, index: int, item: Mapping[str, Any] | Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """An item of a batch as positional and keyword arguments, checked against the program's signature."""
        args, kwargs = ((), dict(item)) if isinstance(item, Mapping) else (tuple(item), {})
        self._bound(args, kwargs, f"batch_kwargs[{index}]")
        return args, kwargs

    def _bound(self, args: Sequence[Any], kwargs: dict[str, Any], what: str) -> dict[str, Any]:
        """The keyword arguments of a call, those given by `bind` included.

        Raises:
            ParameterError: they don't fit the program.
        """
        if self.bind_arguments:
            given = {k: v for k, v in self.bind_arguments.items() if k not in self.arg_names[: len(args)]}
            kwargs = {**given, **kwargs}
        if args or len(kwargs) != len(self._names) or not kwargs.keys() <= self._names:  # else they plainly fit
            try:
                self._signature.bind(*args, **kwargs)
            except TypeError as error:
                raise ParameterError(what, f"{self.name}: {error}.") from error
        return kwargs

    def _sorted(
        self, kwargs: dict[str, Any], given: dict[str, Any], defaults: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The program's own keyword arguments, and the options of the call. A name that both have is the program's."""
        own, options = dict(kwargs), {}
        for name, default in defaults.items():
            value = given[name]
            parameter = self._signature.parameters.get(name)
            if parameter is not None:
                if value is not default or parameter.default is parameter.empty:
                    own[name] = value
                value = default
            options[name] = value
        return own, options


class _Call:
    """One run of a program: its state, and its body with its arguments."""

    def __init__(
        self, program: SglFunction, args: Sequence[Any], kwargs: dict[str, Any], options: dict[str, Any]
    ) -> None:
        outer = current_run.get()
        backend = options["backend"]
        kwargs = program._bound(args, kwargs, "run")
        run = Run(
            backend_for(outer.backend if backend is None and outer is not None else backend),
            RunSettings(_params(options), options["stream"], options["seed"]),
            is_async=program.is_async,
        )
        self.state = ProgramState(StreamExecutor(run))
        self._body = functools.partial(program.func, self.state, *args, **kwargs)
        self._is_async = program.is_async

    def run(self) -> ProgramState:
        """Runs the body here. What it raises ends the run and is raised."""
        token = current_run.set(self.state.stream_executor.run)
        try:
            self.state.ret_value = asyncio.run(self._body()) if self._is_async else self._body()
        except BaseException as error:
            self.state.stream_executor.abandon(error)
            raise
        finally:
            current_run.reset(token)
            self.state.stream_executor.end()
        return self.state

    def run_streaming(self) -> None:
        """Runs the body in a thread of its own: what it raises is raised where the state is read."""
        try:
            self.run()
        except Exception:  # the state has it
            return

    def run_in_thread(self) -> None:
        """Runs a coroutine body although this thread's event loop is running."""
        raised: list[BaseException] = []

        def run() -> None:
            try:
                self.run()
            except BaseException as error:  # raised again in the caller's thread
                raised.append(error)

        _thread(run).join()
        if raised:
            raise raised[0]

    async def arun_body(self) -> ProgramState:
        """Awaits the body here."""
        token = current_run.set(self.state.stream_executor.run)
        try:
            if self._is_async:
                self.state.ret_value = await self._body()
            else:
                self.state.ret_value = await asyncio.to_thread(self._body)
        except BaseException as error:
            self.state.stream_executor.abandon(error)
            raise
        finally:
            current_run.reset(token)
            self.state.stream_executor.end()
        return self.state

    async def arun(self) -> None:
        """Awaits the body and everything it has added."""
        await self.arun_body()
        await self.state.stream_executor.finished()

    async def arun_streaming(self) -> None:
        try:
            await self.arun_body()
        except Exception:  # the state has it
            return


def _params(options: dict[str, Any]) -> Any:
    given = {name: options[name] for name in _PARAMS if options[name] is not _RUN_DEFAULTS[name]}
    if "max_new_tokens" in given:
        given["max_tokens"] = given.pop("max_new_tokens")
    return sampling_params(given)


def _defaults(method: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(method).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


_RUN_DEFAULTS = _defaults(SglFunction.run)
_BATCH_DEFAULTS = {k: v for k, v in _defaults(SglFunction.run_batch).items() if k in _RUN_DEFAULTS}
_PARAMS = [name for name in _BATCH_DEFAULTS if name not in ("backend", "seed")]


def _window(num_threads: str | int) -> int:
    if num_threads == "auto":
        return max(96, (os.cpu_count() or 1) * 16)
    if isinstance(num_threads, bool) or not isinstance(num_threads, int) or num_threads < 1:
        raise ParameterError("num_threads", f"{num_threads!r} is not 'auto' or a whole number of at least 1.")
    return num_threads


def _states(outcomes: Iterator[Any]) -> Iterator[ProgramState]:
    for _, outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
        yield outcome


def _thread(target: Callable[[], None]) -> Thread:
    thread = Thread(target=copy_context().run, args=(target,), name="sglang_lite-body", daemon=True)
    thread.start()
    return thread
