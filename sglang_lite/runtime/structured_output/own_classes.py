"""Unpickles data from another process or a file, creating only objects of classes that given
modules define.
"""

from __future__ import annotations

import io
import pickle
from types import ModuleType
from typing import Any


def unpickle_trusted(data: bytes, *modules: ModuleType) -> Any:  # whatever was pickled
    """Restores pickled objects of trusted classes.

    Args:
        data: pickled objects.
        modules: modules whose own classes are allowed.

    Raises:
        pickle.UnpicklingError: the data contains anything else.
    """
    return _Unpickler(data, modules).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, modules: tuple[ModuleType, ...]) -> None:
        super().__init__(io.BytesIO(data))
        self._modules = {module.__name__: module for module in modules}

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(self._modules.get(module), name, None)
        if not (isinstance(found, type) and found.__module__ == module):
            raise pickle.UnpicklingError(f"{module}.{name} must not be in it")
        return found
