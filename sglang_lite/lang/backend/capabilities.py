"""Capabilities of a backend with its model, which every node is checked against before it is queued."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sglang_lite.protocol import (
    Choices,
    Continuation,
    Ebnf,
    InOrder,
    JsonSchema,
    Lark,
    Number,
    OneOf,
    Regex,
    Repeated,
    StructuralTag,
    TaggedObject,
)

CONSTRAINT_NAMES: Final[dict[type, str]] = {
    Regex: "a regex",
    JsonSchema: "a JSON schema",
    TaggedObject: "an object between tags",
    Number: "a number in free text",
    Choices: "a list of choices",
    Ebnf: "an EBNF grammar",
    Lark: "a Lark grammar",
    StructuralTag: "a structural tag",
    InOrder: "constraints in order",
    OneOf: "one of several constraints",
    Repeated: "a repeated constraint",
    Continuation: "a grammar over several nodes",
}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities of a backend with its model. A node that needs more is refused at the line that adds it.

    Attributes:
        constraints: types of constraint that are enforced.
        params: names of the sampling parameters that are honoured, or None for all.
        select: True if the model can choose among texts.
        scores: True if the choices' probabilities are reported, so that methods and temperatures work.
        continues: True if any text is continued; False if only the last turn of a conversation can be generated.
        prefill: True if text that already stands in that turn is continued.
        images: True if the model accepts images.
    """

    constraints: frozenset[type] = frozenset({Regex, JsonSchema, Choices})
    params: frozenset[str] | None = None
    select: bool = True
    scores: bool = True
    continues: bool = True
    prefill: bool = True
    images: bool = False


EVERYTHING = Capabilities()
