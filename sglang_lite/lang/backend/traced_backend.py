"""The backend that a program is traced on to be explained: it honours everything, and knows who is asked about."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_lite.lang.backend.base_backend import ALL_CONSTRAINTS, BaseBackend
from sglang_lite.lang.backend.capabilities import Capabilities
from sglang_lite.protocol import SamplingParams

if TYPE_CHECKING:
    from sglang_lite.lang.execution.api_speculation import ApiSpeculation


class TracedBackend(BaseBackend):
    """Backend that plays nothing. Roles are rendered as by the one that is asked about.

    Args:
        about: the backend that is asked about: the trace plans turns as a run on it would.
        params: of the run.
        speculation: of the program; None: it does not speculate.
    """

    capabilities = Capabilities(ALL_CONSTRAINTS, images=True)

    def __init__(self, about: BaseBackend, params: SamplingParams, speculation: ApiSpeculation | None) -> None:
        super().__init__()
        self.chat_template = about.get_chat_template()
        self.about, self.params, self.speculation = about, params, speculation
