"""Settings of a run from the keywords of `run` and `run_batch`."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from itertools import compress
from operator import is_not

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.backend.default import backend_for
from sglang_lite.lang.checks import check_flags, check_limits, check_whole
from sglang_lite.lang.execution.budget import Budget
from sglang_lite.lang.execution.run import NO_PARAMS, RunSettings, current_run
from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.sampling import named, read_params

_PARAMS = named("run", sglang=True)
_PLAIN = RunSettings()


class DefaultInt(int):
    """A default that a signature shows, and that can be told from the same value said by a user."""


class DefaultFloat(float):
    """A default like DefaultInt, for a float."""


def inherit(options: dict[str, UserValue]) -> None:
    """Sets the seed of a run from that of the run that it is inside, and on the same backend also the priority."""
    outer = current_run.get()
    if outer is not None and not options["priority"] and options["backend"] is None:
        options["priority"] = outer.settings.priority
    if outer is not None and options["seed"] is None:
        options["seed"] = outer.inner_seed()


def backend_of(options: Mapping[str, UserValue]) -> BaseBackend:
    """Backend of a run: the one given, else that of the run it is inside, else the default."""
    outer = current_run.get()
    given = options["backend"]
    return backend_for(outer.backend if given is None and outer is not None else given)


def is_said(value: object, default: object) -> bool:
    """Tells whether a user has given the value: it is no default, of this method or of another."""
    return value is not default and type(value) not in (DefaultInt, DefaultFloat)


def settings_of(options: Mapping[str, UserValue], defaults: Mapping[str, UserValue]) -> RunSettings:
    """Settings that the options of a run say.

    Args:
        defaults: of each option.

    Raises:
        ParameterError: a bad value.
    """
    changed = [*compress(defaults, map(is_not, options.values(), defaults.values()))]  # both have the same order
    if not changed or changed == ["backend"]:
        return _PLAIN
    given = {name: options[name] for name in changed if name in _PARAMS and is_said(options[name], defaults[name])}
    timeout, retries = options["timeout"], options["retries"]
    check_limits(timeout, retries)
    check_flags(stream=options["stream"], push_down=options["push_down"])
    seed = options["seed"]
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, numbers.Integral)):
        raise ParameterError("seed", f"{seed!r:.60} is not a whole number.")
    params = read_params(given, _PARAMS) if given else NO_PARAMS
    priority = options["priority"]
    check_whole("priority", priority)
    limits = options["max_cost"], options["max_total_tokens"]
    return RunSettings(
        params, options["stream"], None if seed is None else int(seed), timeout, retries, options["push_down"],
        int(priority), None if limits == (None, None) else Budget(*limits), options["use_thread"],
    )  # fmt: skip
