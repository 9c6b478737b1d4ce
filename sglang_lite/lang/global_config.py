"""Process-wide settings of the language."""

from __future__ import annotations

from typing import Any


class GlobalConfig:
    """Process-wide settings.

    Attributes:
        verbosity: 2 or more prints the text of each program when it has run (default 0).
        default_backend: backend of programs that are run without one, or None.
    """

    def __init__(self) -> None:
        self.verbosity = 0
        self.default_backend: Any = None


global_config = GlobalConfig()
