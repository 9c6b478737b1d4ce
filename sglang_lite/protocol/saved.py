"""A run as data: its text and variables, and its answers with what was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from sglang_lite.protocol.prompt import Image, Message, Span
from sglang_lite.protocol.record import Record, Variant
from sglang_lite.protocol.results import Generation, Selection, Usage
from sglang_lite.protocol.sampling import SamplingParams


class SavedChoice(Variant, frozen=True):
    """A selection, what was decided, and what the method said about it."""

    selection: Selection
    decision: str
    meta: Mapping[str, Any] | None = None


class SavedSamples(Variant, frozen=True):
    """Results of several samples, branches or steps."""

    results: tuple[Generation | SavedChoice | SavedSamples | None, ...]


SavedResult: TypeAlias = Generation | SavedChoice | SavedSamples


class SavedPiece(Record, frozen=True):
    """A piece of a transcript: text, or an image.

    Attributes:
        answer: of a generation whose reasoning is not shown, what is.
    """

    spans: tuple[Span, ...] = ()
    image: Image | None = None
    answer: str | None = None


class SavedVariable(Record, frozen=True):
    """A variable.

    Attributes:
        value: plain data; objects stand in it with the names of their types.
        result: of the node that made it.
        error: that this node failed with, instead.
        behind: how many pieces and finished turns there were behind the node, and the open turn.
    """

    name: str
    value: Any = None
    result: SavedResult | None = None
    error: str | None = None
    behind: tuple[int, int, tuple[str, int] | None] | None = None


class SavedAnswer(Record, frozen=True):
    """Answers to one question.

    Attributes:
        asked: digest of the prompt and all that went with it.
        name: of the variable that it gave its value.
        answers: samples of a generation, or one selection with its decision.
    """

    asked: str
    name: str | None
    answers: tuple[Generation | SavedChoice, ...]


class SavedRun(Record, frozen=True):
    """A run, as far as it has come.

    Attributes:
        program: name of the program; "" where no program's body was run.
        parts: digests of what its body does, by what they are of; empty where it could not be compared.
        arguments: of the body; None where they are no data.
        params, seed, retries: its settings.
        branch, nodes: place of the branch in the program, and the nodes that it has had: seeds are made of them.
        model: name of the model.
        tokenizer: digest of the tokenizer that the ids are of; None where nobody knows it.
        pieces: of the text.
        messages: the finished turns.
        turn: the open turn's role, and the piece that it begins with.
        variables: in the order in which they were made; that of the name "" is what the body returned.
        answers: that nodes had.
        usage: of all.
    """

    program: str
    parts: tuple[tuple[str, str], ...] = ()
    arguments: SavedVariable | None = None
    params: SamplingParams = SamplingParams()
    seed: int | None = None
    retries: int = 0
    branch: str = ""
    nodes: int = 0
    model: str = ""
    tokenizer: str | None = None
    pieces: tuple[SavedPiece, ...] = ()
    messages: tuple[Message, ...] = ()
    turn: tuple[str, int] | None = None
    variables: tuple[SavedVariable, ...] = ()
    answers: tuple[SavedAnswer, ...] = ()
    usage: Usage = msgspec.field(default_factory=Usage)
