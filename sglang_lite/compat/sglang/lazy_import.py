"""A stand-in for a class whose module is loaded when it is first used."""

from __future__ import annotations

import importlib
from typing import Any

from sglang_lite.protocol.anything import Foreign


class LazyImport:
    """Stand-in for a class or function of a module.

    Args:
        module_name: where it is; loaded on first use.
        class_name: its name there.
    """

    def __init__(self, module_name: str, class_name: str) -> None:
        self.module_name, self.class_name = module_name, class_name

    def _load(self) -> Any:
        return getattr(importlib.import_module(self.module_name), self.class_name)

    def __getattr__(self, name: str) -> Foreign:
        if name.startswith("__"):  # what `copy` and `pickle` look for is no name of the class
            raise AttributeError(name)
        return getattr(self._load(), name)

    def __call__(self, *args: Foreign, **kwargs: Foreign) -> Foreign:
        return self._load()(*args, **kwargs)
