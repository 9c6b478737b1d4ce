"""`sglang-lite lint`: faults of programs, what their runs share, and how they would share more. Above language and
runtime, of which it takes a model's tokenizer."""

from sglang_lite.lint.linting import lint
from sglang_lite.lint.report import Report

__all__ = ["Report", "lint"]
