"""Process-wide settings of the language: the one piece of module state there is."""

from __future__ import annotations

from typing import Any


class GlobalConfig:
    """
    Attributes:
        verbosity: 2 prints the text of each program when it has run.
        default_backend: what programs run on that name no backend.
    """

    def __init__(self) -> None:
        self.verbosity = 0
        self.default_backend: Any = None


global_config = GlobalConfig()
