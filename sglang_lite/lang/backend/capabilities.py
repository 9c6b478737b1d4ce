"""Capabilities of a backend with its model: the record that a program is held against before it is queued."""

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
    """Capabilities of a backend with its model. What a program needs beyond them is refused where it is added.

    Attributes:
        constraints: kinds of constraint it enforces.
        params: names of the sampling parameters it honours; None for all.
        select: it can choose among texts.
        scores: it reports the choices' probabilities, so that methods and temperatures work.
        continues: it continues any text; else only a conversation whose last turn is the one to be generated.
        prefill: it continues what stands in that turn already.
        images: it sees images.
    """

    constraints: frozenset[type] = frozenset({Regex, JsonSchema, Choices})
    params: frozenset[str] | None = None
    select: bool = True
    scores: bool = True
    continues: bool = True
    prefill: bool = True
    images: bool = False


EVERYTHING = Capabilities()
