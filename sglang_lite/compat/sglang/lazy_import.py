"""Lazy imports: placeholders for classes whose modules are imported on first use."""

from __future__ import annotations

import importlib
from typing import Any

from sglang_lite.protocol.anything import Foreign


class LazyImport:
    """Placeholder for a class or function of a module that is imported on first use.

    Args:
        module_name: name of the module.
        class_name: name of the class or function in the module.
    """

    def __init__(self, module_name: str, class_name: str) -> None:
        self.module_name, self.class_name = module_name, class_name

    def _load(self) -> Any:
        return getattr(importlib.import_module(self.module_name), self.class_name)

    def __getattr__(self, name: str) -> Foreign:
        if name.startswith("__"):  # names that `copy` and `pickle` look for
            raise AttributeError(name)
        return getattr(self._load(), name)

    def __call__(self, *args: Foreign, **kwargs: Foreign) -> Foreign:
        return self._load()(*args, **kwargs)
