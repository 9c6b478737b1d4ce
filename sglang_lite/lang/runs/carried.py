"""Codecs for the values of a run's variables. They convert values for files, copies and pickles."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from sglang_lite.lang.runs.values import from_json_data, import_by_name, to_json_data
from sglang_lite.protocol import ProgramError
from sglang_lite.protocol.anything import UserValue


class ValueCodec(Protocol):
    """Codec that converts the values of a run's variables to data of a `SavedRun` and back."""

    def to_data(self, value: UserValue, what: str) -> UserValue:
        """Converts a value to data. Raises ProgramError if that is impossible; `what` describes the
        value in the error.
        """
        ...

    def from_data(self, data: UserValue) -> UserValue:
        """Restores a value from the result of `to_data`."""
        ...


class FileValues:
    """Values as JSON, for files.

    Args:
        find: returns the class or function for a name that occurs in a value.
    """

    def __init__(self, find: Callable[[str], UserValue] = import_by_name) -> None:
        self._find = find

    def to_data(self, value: UserValue, what: str) -> UserValue:
        return to_json_data(value, what)

    def from_data(self, data: UserValue) -> UserValue:
        return from_json_data(data, self._find)


class CopiedValues:
    """Values for a copy of a state in this process. Each value is represented by its index in a
    list of copies that this object holds.

    Args:
        copied: copies a value; by default deeply.
    """

    def __init__(self, copied: Callable[[UserValue], UserValue] = copy.deepcopy) -> None:
        self._copied = copied
        self._held = list[Any]()

    @classmethod
    def by_reference(cls) -> CopiedValues:
        """Creates a codec that does not copy values. Both states then refer to the same objects."""
        return cls(lambda value: value)

    @classmethod
    def by_deep_copy(cls, memo: dict[int, UserValue]) -> CopiedValues:
        """Creates a codec that copies values deeply. `memo` is the one that `copy.deepcopy` passes
        on.
        """
        return cls(partial(copy.deepcopy, memo=memo))

    def to_data(self, value: UserValue, what: str) -> UserValue:
        try:
            self._held.append(self._copied(value))
        except Exception as error:  # raised by the value's own code
            problem = f"{what} is a {type(value).__name__}, which can't be copied: {error}"
            raise ProgramError(
                problem, hint="Replace it with plain data, or fork the state."
            ) from error
        return len(self._held) - 1

    def from_data(self, data: UserValue) -> UserValue:
        return self._held[data]


class PickledValues:
    """Codec for pickling the values of a run's variables. Encodes a value as JSON data where
    possible, and otherwise leaves it to pickle.

    Args:
        others: values left to pickle.
    """

    def __init__(self, others: Sequence[UserValue] = ()) -> None:
        self.others: list[Any] = [*others]

    def to_data(self, value: UserValue, what: str) -> UserValue:
        try:
            return [to_json_data(value, what)]
        except ProgramError:
            pass
        try:
            pickle.dumps(value)
        except Exception as error:  # raised by the value's own code
            problem = f"{what} is a {type(value).__name__}, which can't be pickled: {error}"
            raise ProgramError(
                problem, hint="Define its class at the top of a module, or use plain data."
            ) from error
        self.others.append(value)
        return len(self.others) - 1

    def from_data(self, data: UserValue) -> UserValue:
        return (
            from_json_data(data[0], import_by_name) if isinstance(data, list) else self.others[data]
        )
