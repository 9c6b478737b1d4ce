"""Context of a call: the node that asks a backend, for backends that store or look up answers by node, and a flag for
backends that can choose without scores."""

from __future__ import annotations

from contextvars import ContextVar
from typing import NamedTuple


class NodeIdentity(NamedTuple):
    """Identity of a node in a run.

    Attributes:
        program: name of the program, or "" outside a program.
        place: path of the node in the program's tree; equal in all runs that reach the node the same way.
        name: name of the node's variable, or None.
    """

    program: str = ""
    place: str = ""
    name: str | None = None


# True while a selection needs the scores of its choices.
scores_needed: ContextVar[bool] = ContextVar("sglang_lite_scores_needed", default=False)

# Fields of a NodeIdentity, which is only made on demand.
current_node_var: ContextVar[tuple[str, str, str | None] | None] = ContextVar("sglang_lite_current_node", default=None)


def current_node() -> NodeIdentity:
    """Identity of the node whose call runs in this context; an empty NodeIdentity outside of a call."""
    node = current_node_var.get()
    if node is None:
        return NodeIdentity()
    return NodeIdentity(*node)
