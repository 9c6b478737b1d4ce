"""SGLang's backend interface and our related records, at SGLang's module path."""

from sglang_lite.compat.sglang.hooks import BaseBackend as BaseBackend
from sglang_lite.lang.backend.base import ALL_CONSTRAINTS as ALL_CONSTRAINTS
from sglang_lite.lang.backend.capabilities import EVERYTHING as EVERYTHING
from sglang_lite.lang.backend.capabilities import Capabilities as Capabilities
