"""Settings of an engine under SGLang's names, at SGLang's module path."""

from typing import Any

from sglang_lite.server.sglang.server_args import create_server_args_class

__all__ = ["ServerArgs"]

ServerArgs: Any = create_server_args_class(__name__)
