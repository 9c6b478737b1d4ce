"""Servers of this package or of SGLang as backends, at SGLang's module path."""

from sglang_lite.compat.sglang.runtime import Runtime as Runtime
from sglang_lite.lang.backend.http.endpoint import RuntimeEndpoint as RuntimeEndpoint
