"""Builds regexes from schemas, at SGLang's module path."""

from sglang_lite.compat.sglang.utils import build_regex_from_object

__all__ = ["build_regex_from_object"]
