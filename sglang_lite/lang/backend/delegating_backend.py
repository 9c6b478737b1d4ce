"""Base class of backends that wrap another backend and answer differently."""

from __future__ import annotations

from sglang_lite.lang.backend.base import Backend, KeepsPrefixes, name_of
from sglang_lite.lang.backend.capabilities import Demands
from sglang_lite.protocol import Location, Usage
from sglang_lite.protocol.anything import Json
from sglang_lite.text.chat_template import TurnTemplate


class DelegatingBackend(Backend):
    """Backend that delegates to another backend everything except answering, which subclasses define.

    Args:
        backend: backend to delegate to.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.backend, self.chat_template = backend, backend.chat_template
        self.capabilities, self.unset_max_tokens = backend.capabilities, backend.unset_max_tokens
        self.tokenizer, self.trace_name = backend.tokenizer, name_of(backend)

    def get_model_name(self) -> str:
        return self.backend.get_model_name()

    def identity(self) -> tuple[Json, ...]:
        return self.backend.identity()

    def get_chat_template(self) -> TurnTemplate | None:
        return self.backend.get_chat_template()

    @property
    def tokenizer_digest(self) -> str | None:
        return self.backend.tokenizer_digest

    def tool_family(self) -> str | None:
        return self.backend.tool_family()

    def cost(self, usage: Usage) -> float | None:
        return self.backend.cost(usage)

    @property
    def prefix_files(self) -> KeepsPrefixes:
        return self.backend.prefix_files

    def check(self, node: object, demands: Demands, where: Location | None) -> None:
        self.backend.check(node, demands, where)
