"""The part of a branch that SGLang's users and its blocking hooks read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.lang.execution.reading import all_messages, find_variable, nothing, whole_text
from sglang_lite.lang.results import as_dicts, meta_info
from sglang_lite.protocol import Image, SglError
from sglang_lite.text.chat_template import ChatTemplate

if TYPE_CHECKING:
    from sglang_lite.lang.execution.player import Player


class StreamExecutor:
    """A branch, by SGLang's names. Two are equal that show the same one."""

    __slots__ = ("_player",)

    def __init__(self, player: Player) -> None:
        self._player = player

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StreamExecutor) and other._player is self._player

    def __hash__(self) -> int:
        return hash(id(self._player))

    @property
    def sid(self) -> str:
        """A unique name."""
        return self._player.sid

    @property
    def backend(self) -> BaseBackend:
        return self._player.backend

    @property
    def text_(self) -> str:
        return self._player.transcript.text()

    @property
    def messages_(self) -> list[dict[str, Any]]:
        return as_dicts(self._player.transcript.messages)

    @property
    def images_(self) -> list[Image]:
        return list(self._player.transcript.images)

    @property
    def cur_role(self) -> str | None:
        return self._player.transcript.role

    @property
    def chat_template(self) -> ChatTemplate:
        return self._player.run.template

    @property
    def stream(self) -> bool:
        return self._player.run.settings.stream

    @property
    def variables(self) -> dict[str, Any]:
        """The variables that have their value."""
        variables = self._player.names.variables.items()
        return {name: variable.result() for name, variable in variables if variable.done and variable.error() is None}

    @property
    def meta_info(self) -> dict[str, Any]:
        """Metadata that the backend reported about the variables that have their value."""
        variables = self._player.names.variables.items()
        return {name: meta_info(variable.record) for name, variable in variables if variable.done and variable.record}

    @property
    def error_(self) -> SglError | None:
        self._player.see_failure()
        return self._player.failure

    def error(self) -> SglError | None:
        return self._player.error()

    @property
    def is_finished(self) -> bool:
        return self._player.at_rest and not self._player.run.body_open

    def get_var(self, name: str) -> Any:
        return find_variable(self._player, name).wait()

    def set_var(self, name: str, value: object) -> None:
        self._player.names.declare(name, Variable.of(value))

    def get_meta_info(self, name: str, timeout: float | None = None) -> dict[str, Any] | None:
        """Raises RequestTimeoutError: the variable has no value within `timeout` seconds."""
        variable = find_variable(self._player, name)
        variable.wait(timeout)
        return meta_info(variable.record)

    def text(self) -> str:
        text: str = self._player.read(whole_text).wait()
        return text

    def messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = self._player.read(all_messages).wait()
        return messages

    def sync(self) -> None:
        self._player.read(nothing).wait()
