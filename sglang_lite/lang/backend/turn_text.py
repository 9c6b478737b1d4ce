"""A turn of several generations as one text of a grammar: its constants as they are, between them the constraints. And
the constraint of either form of a turn, as an object or as such a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sglang_lite.lang.backend.turn_object import Field, turn_object
from sglang_lite.protocol import Choices, Constraint, InOrder, OneOf


def turn_text(parts: Sequence[str | Field]) -> Constraint | None:
    """The constraint of a turn's text, up to its last generation. None: it has none, as one may be any text, or nothing
    tells where one of two ends."""
    found = list[Constraint]()
    behind = False  # a generation, with nothing since
    last = max(i for i, part in enumerate(parts) if isinstance(part, Field))
    for part in parts[: last + 1]:
        if isinstance(part, str):
            found += [Choices((part,))] if part else []
            behind = behind and not part.strip()
        elif part.constraint is None or behind:
            return None
        else:
            found.append(part.constraint)
            behind = True
    return OneOf((InOrder(tuple(found)),))  # of which every API with grammars knows the language


def whole_turn(form: Literal["object", "text"], parts: Sequence[str | Field]) -> Constraint | None:
    """The constraint of one call that brings a turn as an object or as a text; None: there is none."""
    if form == "text":
        return turn_text(parts)
    whole = turn_object(parts)
    return None if whole is None else whole.constraint
