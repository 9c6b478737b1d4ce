"""Keywords of `run` and `run_batch`, and their conversion to the settings of a run."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import lru_cache
from os import PathLike
from typing import Literal, ParamSpec, TypeVar, Unpack

from sglang_lite.lang.backend.base import Backend
from sglang_lite.lang.backend.default import BackendLike, backend_for, identity_for
from sglang_lite.lang.checks import (
    check_booleans,
    check_limits,
    check_truncation_policy,
    check_whole_number,
    check_wind_down,
)
from sglang_lite.lang.execution.budget import Budget
from sglang_lite.lang.execution.run import RunSettings, current_run
from sglang_lite.lang.sampling_keywords import with_sampling_signature
from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.anything import Json, UserValue
from sglang_lite.protocol.sampling import NO_PARAMS, SamplingOptions, parameters_for, read_params

_P = ParamSpec("_P")
_T = TypeVar("_T")
_PARAMS = parameters_for("run", sglang=True)
_PLAIN = RunSettings()
# cached, since most runs use the same few combinations
_read = lru_cache(maxsize=1024, typed=True)(lambda **values: read_params(values, _PARAMS))
_OWN = {field.name for field in fields(RunSettings)}


def with_signature_of(
    method: Callable[_P, UserValue],
) -> Callable[[Callable[..., _T]], Callable[_P, _T]]:
    """Returns a decorator that gives a wrapper the signature of `method`. The wrapper itself may
    take only *args and **kwargs.
    """

    def with_signature(twin: Callable[..., _T]) -> Callable[_P, _T]:
        twin.__signature__ = inspect.signature(method)  # type: ignore[attr-defined] # read by `inspect.signature`
        return twin

    return with_signature


@with_sampling_signature("run", sglang=True)
def run_options(
    self: object,
    *,
    stream: bool = False,
    backend: BackendLike | None = None,
    use_thread: bool = True,
    seed: int | None = None,
    timeout: float | None = None,
    wind_down: float | None = None,
    retries: int = 0,
    push_down: bool = True,
    priority: int = 0,
    max_cost: float | None = None,
    max_total_tokens: int | None = None,
    shortened: Literal["raise", "warn", "keep"] | None = None,
    journal: str | PathLike[str] | None = None,
    secret: str | None = None,
    max_new_tokens: int | None = None,
    **sampling: Unpack[SamplingOptions],
) -> None:
    """Declares the options of `run`, without the program's own arguments."""


@with_sampling_signature("run", sglang=True)
def run_keywords(
    self: object,
    *args: UserValue,
    stream: bool = False,
    backend: BackendLike | None = None,
    use_thread: bool = True,
    seed: int | None = None,
    timeout: float | None = None,
    wind_down: float | None = None,
    retries: int = 0,
    push_down: bool = True,
    priority: int = 0,
    max_cost: float | None = None,
    max_total_tokens: int | None = None,
    shortened: Literal["raise", "warn", "keep"] | None = None,
    journal: str | PathLike[str] | None = None,
    secret: str | None = None,
    **kwargs: UserValue,
) -> None:
    """Declares the keywords of `run` and `arun`. These methods receive only the keywords that the
    caller gives, which may include the program's own arguments.
    """


RUN_OPTIONS = inspect.signature(run_options).parameters.keys() - {"self"}


def inherit_options(given: Mapping[str, UserValue]) -> Mapping[str, UserValue]:
    """Returns the options of a run, including those inherited from the enclosing run. If no seed is
    given, it is derived from the enclosing run's seed. If neither a priority nor a backend is
    given, the priority is inherited.
    """
    outer = current_run.get()
    if outer is None:
        return given
    found = dict(given)
    if not given.get("priority") and given.get("backend") is None:
        found["priority"] = outer.settings.priority
    if given.get("seed") is None:
        found["seed"] = outer.next_inner_run_seed()
    return found


def resolve_run_backend(given: Mapping[str, UserValue]) -> Backend:
    """Returns the backend of a run: the given one, else the enclosing run's, else the default."""
    return backend_for(_given_or_enclosing_backend(given))


def resolve_run_identity(given: Mapping[str, UserValue]) -> tuple[Json, ...]:
    """Returns the identity of a run's backend, without starting the backend."""
    return identity_for(_given_or_enclosing_backend(given))


def _given_or_enclosing_backend(given: Mapping[str, UserValue]) -> UserValue:
    """Returns the given backend or the enclosing run's, or None if there is neither."""
    outer = current_run.get()
    backend = given.get("backend")
    return outer.backend if backend is None and outer is not None else backend


def convert_to_settings(given: Mapping[str, UserValue]) -> RunSettings:
    """Converts the options of a run to its settings.

    Args:
        given: options that the caller has given; options that are not settings are ignored.

    Raises:
        ParameterError: an option has an invalid value.
    """
    if given.keys() <= {"backend"}:
        return _PLAIN
    values = {
        name: value
        for name, value in given.items()
        if name in _PARAMS
        and value is not None
        and not (value is False and _PARAMS[name].default is False)
    }  # a flag that is off by default, like SGLang's ignore_eos=False, needs nothing of a backend
    own = {name: value for name, value in given.items() if name in _OWN}
    if (seed := own.get("seed")) is not None:
        if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
            raise ParameterError("seed", f"{seed!r:.60} is not a whole number.")
        own["seed"] = int(seed)
    limits = given.get("max_cost"), given.get("max_total_tokens")
    try:
        params = _read(**values) if values else NO_PARAMS
    except TypeError:  # a value is a list, which can't be hashed
        params = read_params(values, _PARAMS)
    settings = RunSettings(
        params,
        budget=None if limits == (None, None) else Budget(*limits),
        **own,
    )
    if own:
        check_limits(settings.timeout, settings.retries)
        if settings.wind_down is not None:
            check_wind_down(settings.wind_down, settings.timeout)
        check_booleans(
            stream=settings.stream, push_down=settings.push_down, use_thread=settings.use_thread
        )
        check_whole_number("priority", settings.priority)
        if settings.shortened is not None:
            check_truncation_policy(settings.shortened)
    return settings
