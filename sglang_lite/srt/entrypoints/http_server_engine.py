"""Server process with the methods of an engine, at SGLang's module path."""

from sglang_lite.compat.sglang.http_engine import HttpServerEngineAdapter

__all__ = ["HttpServerEngineAdapter"]
