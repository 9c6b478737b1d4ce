"""Wrapper that gives a program's branch the attributes of SGLang's `StreamExecutor`, for SGLang's
users and its blocking hooks.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

from sglang_lite.lang.backend.base import Backend
from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.lang.execution.reading import (
    all_messages,
    find_variable,
    read_nothing,
    transcript_text,
    wait_for_error,
)
from sglang_lite.lang.expressions import SglSamplingParams
from sglang_lite.lang.results import messages_to_dicts, meta_info
from sglang_lite.protocol import (
    Media,
    ProgramError,
    RequestTimeoutError,
    SglError,
    UnknownVariableError,
)
from sglang_lite.protocol.anything import Json, UserValue
from sglang_lite.text.chat_template import TurnTemplate

if TYPE_CHECKING:
    from sglang_lite.lang.execution.names import Names
    from sglang_lite.lang.execution.player import Player


class Variables(MutableMapping[str, Any]):
    """Mapping of a branch's variables that are set. Writing declares a variable, as `s[name] =
    value` does.
    """

    __slots__ = ("_names",)

    def __init__(self, names: Names) -> None:
        self._names = names

    def __getitem__(self, name: str) -> UserValue:
        variable = self._names.variables.get(name)
        if variable is None or not variable.done or variable.error_or_none() is not None:
            raise KeyError(name)
        return variable.result()

    def __setitem__(self, name: str, value: object) -> None:
        self._names.declare(name, Variable.from_value(value))

    def __delitem__(self, name: str) -> None:
        raise ProgramError(f"the variable {name!r} can't be deleted.", hint="Set it to None.")

    def __iter__(self) -> Iterator[str]:
        variables = list(self._names.variables.items())
        return iter(
            [
                name
                for name, variable in variables
                if variable.done and variable.error_or_none() is None
            ]
        )

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return repr(dict(self))


class VariableEvent:
    """Event of a variable, like `threading.Event`: set when the variable has a value or has failed."""

    __slots__ = ("_variable",)

    def __init__(self, variable: Variable) -> None:
        self._variable = variable

    def is_set(self) -> bool:
        return self._variable.done

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the variable is set or has failed, for at most `timeout` seconds. Returns
        False if neither has happened.
        """
        try:
            self._variable.wait(timeout)
        except RequestTimeoutError:
            return self._variable.done
        except SglError:  # readers of the variable receive the error
            return True
        return True


class StreamExecutor:
    """Branch with the attributes of SGLang's `StreamExecutor`. Two instances are equal if they wrap
    the same branch.
    """

    __slots__ = ("_player",)

    def __init__(self, player: Player) -> None:
        self._player = player

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StreamExecutor) and hash(other) == hash(self)

    def __hash__(self) -> int:
        return hash(id(self._player))

    @property
    def sid(self) -> str:
        """Unique name of the branch."""
        self._player.sid = self._player.sid or uuid.uuid4().hex
        return self._player.sid

    @property
    def backend(self) -> Backend:
        """Backend that the user passed, without the adapter that calls its hooks."""
        backend = self._player.backend
        return getattr(backend, "hooked", backend)

    @property
    def text_(self) -> str:
        return self._player.transcript.text_so_far()

    @property
    def messages_(self) -> list[dict[str, Json]]:
        return messages_to_dicts(self._player.transcript.messages)

    @property
    def images_(self) -> list[Media]:
        return list(self._player.transcript.images)

    @property
    def cur_role(self) -> str | None:
        return self._player.transcript.role

    @property
    def chat_template(self) -> TurnTemplate:
        return self._player.run.template

    @property
    def stream(self) -> bool:
        return self._player.run.settings.stream

    @property
    def variables(self) -> Variables:
        """Variables that have been set, by name. Assigning to a name declares the variable."""
        return Variables(self._player.names)

    @property
    def variable_event(self) -> dict[str, VariableEvent]:
        """Events of all variables by name, including unset ones."""
        return {
            name: VariableEvent(variable)
            for name, variable in list(self._player.names.variables.items())
        }

    @property
    def arguments(self) -> dict[str, UserValue]:
        """Arguments passed to the program by name, including those of `bind`."""
        called = self._player.run.called
        return {} if called is None else dict(called.kwargs)

    @property
    def default_sampling_para(self) -> SglSamplingParams:
        """Sampling parameters that nodes inherit from the run."""
        return SglSamplingParams.from_params(self._player.run.settings.params)

    @property
    def num_api_spec_tokens(self) -> int | None:
        """Maximum number of tokens that one call of a remote API may generate ahead, or None if
        calls don't generate ahead.
        """
        called = self._player.run.called
        return None if called is None else called.program.api_drafts.tokens

    @property
    def use_thread(self) -> bool:
        """True unless `run` waits until everything has been executed."""
        return self._player.run.settings.use_thread

    @property
    def fork_start_text_pos(self) -> int | None:
        """Length in characters of the text that the branch was forked with, or None if the branch
        was not forked.
        """
        return self._player.transcript.fork_position

    @property
    def cur_images(self) -> list[Media]:
        """Images of the open turn; all images if the text has no turns."""
        return list(self._player.transcript.turn_images)

    @property
    def meta_info(self) -> dict[str, Json]:
        """Metadata that the backend reported about each variable that is set, by the variable's
        name.
        """
        variables = self._player.names.variables.items()
        return {
            name: meta_info(variable.record)
            for name, variable in variables
            if variable.done and variable.record
        }

    @property
    def error_(self) -> SglError | None:
        self._player.failure_reported = True
        return self._player.failure

    def error(self) -> SglError | None:
        return wait_for_error(self._player)

    @property
    def is_finished(self) -> bool:
        return self._player.is_idle and not self._player.run.body_open

    def get_var(self, name: str) -> UserValue:
        return find_variable(self._player, name).wait()

    def set_var(self, name: str, value: object) -> None:
        self._player.names.declare(name, Variable.from_value(value))

    def get_meta_info(self, name: str, timeout: float | None = None) -> dict[str, Json] | None:
        """Returns metadata that the backend reported about a variable. Returns None if the variable
        does not exist or was not set by the backend.

        Raises:
            RequestTimeoutError: the variable was not set within `timeout` seconds.
        """
        try:
            variable = find_variable(self._player, name)
        except UnknownVariableError:
            return None
        variable.wait(timeout)
        return meta_info(variable.record)

    def text(self) -> str:
        text: str = self._read_and_wait(transcript_text)
        return text

    def messages(self) -> list[dict[str, Json]]:
        messages: list[dict[str, Any]] = self._read_and_wait(all_messages)
        return messages

    def sync(self) -> None:
        self._read_and_wait(read_nothing)

    def _read_and_wait(self, what: Callable[[Player], Any]) -> Any:
        self._player.names.raise_if_removed(None)
        return self._player.read_when_played(what).wait()
