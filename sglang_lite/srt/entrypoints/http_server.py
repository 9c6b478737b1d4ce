"""In-process server, at SGLang's module path."""

from sglang_lite.compat.sglang.servers import launch_server

__all__ = ["launch_server"]
