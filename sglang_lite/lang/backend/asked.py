"""The node that a backend is asked for: for backends that keep, or look for, answers by their nodes."""

from __future__ import annotations

from contextvars import ContextVar
from typing import NamedTuple


class AskedNode(NamedTuple):
    """A node of a run.

    Attributes:
        program: name of the program; "" outside of one.
        place: of the node in the tree of forks: the same in every run that comes there the same way.
        name: of its variable.
    """

    program: str = ""
    place: str = ""
    name: str | None = None


_NO_NODE = AskedNode()
asked_node: ContextVar[AskedNode] = ContextVar("sglang_lite_asked", default=_NO_NODE)
