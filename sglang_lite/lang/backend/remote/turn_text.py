"""Turn of several generations as one text of a grammar: its constant text unchanged, and the constraints in between.
Also the constraint of a turn in either form, as an object or as a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sglang_lite.lang.backend.remote.turn_object import TurnField, turn_object
from sglang_lite.protocol import Choices, Constraint, InOrder, OneOf


def turn_text(parts: Sequence[str | TurnField]) -> Constraint | None:
    """Constraint on a turn's text, up to its last generation. None if a generation may be any text, or only blanks
    separate two generations, so that the end of the first is unknown."""
    found = list[Constraint]()
    behind = False  # True after a generation, until text other than blanks follows
    last = max(i for i, part in enumerate(parts) if isinstance(part, TurnField))
    for part in parts[: last + 1]:
        if isinstance(part, str):
            found += [Choices((part,))] if part else []
            behind = behind and not part.strip()
        elif part.constraint is None or behind:
            return None
        else:
            found.append(part.constraint)
            behind = True
    return OneOf((InOrder(tuple(found)),))  # every API with grammars supports OneOf


def whole_turn(form: Literal["object", "text"], parts: Sequence[str | TurnField]) -> Constraint | None:
    """Constraint of one call that generates a whole turn, as an object or as a text; None if this is not possible."""
    if form == "text":
        return turn_text(parts)
    whole = turn_object(parts)
    return None if whole is None else whole.constraint
