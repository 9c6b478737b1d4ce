"""Backend for tracing a program that is to be explained: supports everything, and refers to the backend in question."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_lite.lang.backend.base_backend import ALL_CONSTRAINTS, BaseBackend
from sglang_lite.lang.backend.capabilities import Capabilities
from sglang_lite.lang.backend.planning import RunFacts

if TYPE_CHECKING:
    from sglang_lite.lang.backend.remote.backend import RemoteBackend


class TracedBackend(BaseBackend):
    """Backend that plays nothing. Roles are rendered by the template of the backend in question.

    Args:
        about: backend to explain; the trace plans calls as a run on this backend would.
        facts: facts of the run.
    """

    capabilities = Capabilities(ALL_CONSTRAINTS, images=True)

    def __init__(self, about: RemoteBackend, facts: RunFacts) -> None:
        super().__init__()
        self.chat_template = about.get_chat_template()
        self.about, self.facts = about, facts
