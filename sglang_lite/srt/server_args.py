"""Settings by SGLang's names, for its users to import."""

from sglang_lite.compat.sglang.server_args import ServerArgs

__all__ = ["ServerArgs"]
