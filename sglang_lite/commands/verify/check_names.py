"""Names of the checks, in order. This module has no slow imports, because every command of
`sglang-lite` loads it.
"""

from __future__ import annotations

from typing import Final

CHECKS: Final = ("template", "tokenizer", "greedy", "long", "served", "tasks", "recipes", "speed")
