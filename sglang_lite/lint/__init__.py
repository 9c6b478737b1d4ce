"""`sglang-lite lint`: reports faults of programs, the prompt prefixes that their runs share, and
changes that would let them share more. Depends on the language package. Uses the runtime only for a
model's tokenizer.
"""

from sglang_lite.lint.linting import lint
from sglang_lite.lint.report import LintReport

__all__ = ["LintReport", "lint"]
