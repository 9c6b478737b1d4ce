"""The node that a backend is asked for: for backends that keep, or look for, answers by their nodes; and whether its
choices' scores are needed, for those that could pick without."""

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


scores_needed: ContextVar[bool] = ContextVar("sglang_lite_scores_needed", default=False)  # of a selection

# Program, path of the branch, number of the node there, and variable: put together only where somebody looks.
asking: ContextVar[tuple[str, str, int, str | None] | None] = ContextVar("sglang_lite_asking", default=None)


def asked_node() -> AskedNode:
    """The node that asks here."""
    said = asking.get()
    if said is None:
        return AskedNode()
    program, path, number, name = said
    return AskedNode(program, f"{path}/{number}", name)
