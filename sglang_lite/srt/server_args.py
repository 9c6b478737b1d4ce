"""Settings by SGLang's names, for its users to import."""

from typing import Any

from sglang_lite.engine.sglang.server_args import record_type

__all__ = ["ServerArgs"]

ServerArgs: Any = record_type(__name__)
