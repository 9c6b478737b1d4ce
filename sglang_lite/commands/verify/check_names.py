"""Names of the checks, in order. Imports nothing, because every command line reads them."""

from __future__ import annotations

from typing import Final

CHECKS: Final = ("template", "tokenizer", "greedy", "long", "served", "tasks", "recipes", "speed")
