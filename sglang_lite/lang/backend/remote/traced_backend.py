"""Backend for tracing a program that is to be explained: supports everything, and refers to the backend in question."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_lite.lang.backend.base_backend import ALL_CONSTRAINTS, BaseBackend
from sglang_lite.lang.backend.capabilities import Capabilities
from sglang_lite.protocol import SamplingParams

if TYPE_CHECKING:
    from sglang_lite.lang.execution.api_speculation import ApiSpeculation


class TracedBackend(BaseBackend):
    """Backend that plays nothing. Roles are rendered by the template of the backend in question.

    Args:
        about: backend to explain; the trace plans turns as a run on this backend would.
        params: sampling parameters of the run.
        speculation: speculation of the program, or None if the program does not speculate.
    """

    capabilities = Capabilities(ALL_CONSTRAINTS, images=True)

    def __init__(self, about: BaseBackend, params: SamplingParams, speculation: ApiSpeculation | None) -> None:
        super().__init__()
        self.chat_template = about.get_chat_template()
        self.about, self.params, self.speculation = about, params, speculation
