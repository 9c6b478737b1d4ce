"""Base class of backends that wrap another backend and answer differently."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.backend.planning import Planner, RunFacts
from sglang_lite.lang.backend.remote.planner import CallPlanner
from sglang_lite.protocol import Constraint, Location, SamplingParams, Usage
from sglang_lite.protocol.anything import Json
from sglang_lite.text.chat_template import TurnTemplate


class DelegatingBackend(BaseBackend):
    """Backend that delegates to another backend everything except answering, which subclasses define.

    Args:
        backend: backend to delegate to.
    """

    def __init__(self, backend: BaseBackend) -> None:
        super().__init__()
        self.backend, self.chat_template = backend, backend.chat_template
        self.capabilities, self.unset_max_tokens = backend.capabilities, backend.unset_max_tokens
        self.tokenizer = backend.tokenizer

    @property
    def trace_name(self) -> str:
        return self.backend.trace_name

    def planner(self, run: RunFacts) -> Planner | None:
        return None if self.capabilities.turns is None else CallPlanner(self, run)

    def get_model_name(self) -> str:
        return self.backend.get_model_name()

    def identity(self) -> tuple[Json, ...]:
        return self.backend.identity()

    def get_chat_template(self) -> TurnTemplate | None:
        return self.backend.get_chat_template()

    def tokenizer_digest(self) -> str | None:
        return self.backend.tokenizer_digest()

    def tool_family(self) -> str | None:
        return self.backend.tool_family()

    def cost(self, usage: Usage) -> float | None:
        return self.backend.cost(usage)

    def check(
        self, node: object, params: SamplingParams, constraint: Constraint | None, where: Location | None
    ) -> None:
        self.backend.check(node, params, constraint, where)

    def check_selection(self, node: object, choices: Sequence[str], *, scores: bool, where: Location | None) -> None:
        self.backend.check_selection(node, choices, scores=scores, where=where)
