"""Settings of an engine under SGLang's names, at SGLang's module path."""

from typing import Any

from sglang_lite.server.sglang.server_args import record_type

__all__ = ["ServerArgs"]

ServerArgs: Any = record_type(__name__)
