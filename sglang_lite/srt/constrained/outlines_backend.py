"""Regexes of schemas, at SGLang's module path."""

from sglang_lite.compat.sglang.regexes import build_regex_from_object

__all__ = ["build_regex_from_object"]
