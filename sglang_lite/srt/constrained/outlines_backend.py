"""Regexes of schemas, for SGLang's users to import."""

from sglang_lite.compat.sglang.regexes import build_regex_from_object

__all__ = ["build_regex_from_object"]
