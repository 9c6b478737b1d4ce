"""The public interface to constraints: `sgl.grammar`.

import sglang_lite as sgl

sgl.grammar.check({"items": {"type": "object"}, "uniqueItems": True}).refused
sgl.grammar.matches(sgl.Grammar('root ::= "a" | "(" root ")"'), "((a))")
sgl.grammar.complete(sgl.Regex("(yes|yellow)!"), "y").forced  # "e"
sgl.grammar.describe(dict[str, int])  # how to ask for it in a prompt
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import msgspec

from sglang_lite.constraints import matching
from sglang_lite.constraints.byte_matcher import ByteMatcher, Completion
from sglang_lite.constraints.coerce import ConstraintLike, as_constraint, type_of
from sglang_lite.constraints.coerce import Grammar as Grammar
from sglang_lite.constraints.describe import description
from sglang_lite.constraints.json_schema.assertions import assertions_and_annotations
from sglang_lite.constraints.json_schema.normal_form import document_of, normalise
from sglang_lite.constraints.json_schema.write_value import value_text
from sglang_lite.constraints.language import language_of
from sglang_lite.constraints.limits import within_limits
from sglang_lite.constraints.memo import memoized
from sglang_lite.constraints.random_texts import sample
from sglang_lite.constraints.schema import json_schema as json_schema
from sglang_lite.protocol import (
    Choices,
    Constraint,
    ConstraintError,
    Ebnf,
    InOrder,
    JsonSchema,
    Lark,
    Number,
    OneOf,
    ParameterError,
    Regex,
    Repeated,
    StructuralTag,
    Tag,
    TaggedObject,
    Tags,
    ValueValidationError,
)
from sglang_lite.protocol.anything import UserValue

if TYPE_CHECKING:
    from sglang_lite.engine.engine import Engine
    from sglang_lite.runtime.structured_output.base import CompiledGrammar, Matcher
    from sglang_lite.runtime.structured_output.llguidance import LlguidanceEngine
    from sglang_lite.runtime.tokens.tokenizer import Tokenizer

__all__ = [
    "Choices", "Completion", "Ebnf", "Grammar", "InOrder", "JsonSchema", "Lark", "Number", "OneOf", "Regex", "Repeated",
    "Report", "StructuralTag", "Tag", "TaggedObject", "Tags", "check", "complete", "describe", "json_schema", "matches",
    "validate",
]  # fmt: skip


_ONCE = "that an object has a name which is not listed once"


@dataclass(frozen=True, slots=True)
class Report:
    """Report on what will be kept of a constraint.

    Attributes:
        refused: why it is refused, with JSON Pointers into a schema ("" elsewhere): all there is to be changed.
        enforced: JSON Pointers of a schema's keywords that every text keeps.
        checked: what is not enforced but checked in the finished value: what `enforce="best_effort"` asked for, and
            of a Python type what no schema says, as a validator's function; that names which are not listed come once
            (docs/constraints.md says where that is enforced, too). With JSON Pointers into the schema.
        remarks: JSON Pointers of a schema's keywords that demand nothing, as formats and names that are not known.
        rules: how large the grammar is.
        example: a text that it allows; None if it is refused, or every text is very long.
        seconds: from the constraint to its first mask.
    """

    refused: tuple[tuple[str, str], ...] = ()
    enforced: tuple[str, ...] = ()
    checked: tuple[tuple[str, str], ...] = ()
    remarks: tuple[str, ...] = ()
    rules: int = 0
    example: str | None = None
    seconds: float = 0.0


def check(constraint: ConstraintLike, model: str | Path | Engine | None = None) -> Report:
    """Reports what will be kept of a constraint, a JSON schema or a Python type.

    Args:
        model: whose tokens to compile it for, by name or path, or an engine's; None: a token per byte.

    Raises:
        ConstraintError: it is none.
        ModelError: there is no such model.
        BackendError: what models need is not installed.
    """
    known = as_constraint(constraint)
    _engine(*_tokens(model))  # whose loading is not the constraint's
    began = time.perf_counter()
    refused: tuple[tuple[str, str], ...] = ()
    checked: tuple[tuple[str, str], ...] = ()
    try:
        if isinstance(known, JsonSchema):
            strict, known = known.enforce == "strict", msgspec.structs.replace(known, enforce="best_effort")
            checked = normalise(known).checked
            if strict:
                refused, checked = checked, ()
        if not refused:
            _first_mask(_compiled(known, model))
    except ConstraintError as error:
        refused = ((error.pointer or "", str(error)),)
    seconds = time.perf_counter() - began
    enforced, remarks = _said_by(known)
    kind = type_of(constraint)
    checked += kind.checked if kind is not None else ()
    if isinstance(known, JsonSchema) and not refused:
        checked += tuple((pointer, _ONCE) for pointer in normalise(known).open_at)
    left = {pointer for pointer, _ in (*refused, *checked)}
    enforced = tuple(pointer for pointer in enforced if pointer not in left)
    if refused:
        return Report(refused, enforced, checked, remarks, seconds=seconds)
    try:
        with within_limits("the constraint"):
            example = sample(known, Random(0))
    except ConstraintError:  # texts too long to be looked at
        example = None
    return Report((), enforced, checked, remarks, len(language_of(known).rules), example, seconds)


def _said_by(constraint: Constraint) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if not isinstance(constraint, JsonSchema):
        return (), ()
    return assertions_and_annotations(document_of(constraint), assert_format=constraint.format == "assert")


def matches(constraint: ConstraintLike, text: str, model: str | Path | Engine | None = None) -> bool:
    """Tells whether the masks allow the text, token by token to its end, and a finished value is valid.

    A JSON schema may be held against JSON with any blanks, order of members and spelling of numbers: its value is
    written as it is generated, and that text walked. Inside another constraint JSON has to be in that style.

    Args:
        constraint: a constraint, a JSON schema, or a Python type.
        text: to be looked at, from its beginning to its end.
        model: whose tokens the text is cut into, by name or path, or an engine's; None: a token per byte.

    Raises:
        ConstraintError: a constraint that is not valid or can't be enforced.
        ModelError: there is no such model.
    """
    known, kind = as_constraint(constraint), type_of(constraint)
    _must_be_text(text)
    engine = _engine(*_tokens(model))
    grammar = _compiled(known, model)
    texts: list[str | None] = [text]
    try:
        if isinstance(known, JsonSchema):
            texts.append(value_text(known, matching.validate(known, text)))
        if kind is not None:
            kind.parse(text)
    except ValueValidationError:
        return False
    return any(_generates(grammar, engine, each) for each in texts if each is not None)


def validate(constraint: ConstraintLike, text: str) -> UserValue:
    """The value of a finished text: for a Python type one of it, for a JSON schema what the text spells, else the text.

    Raises:
        ValueValidationError: the text is not what the constraint allows.
        ConstraintError: a constraint that is not valid.
    """
    kind = type_of(constraint)
    _must_be_text(text)
    with within_limits("the constraint"):
        value = matching.validate(as_constraint(constraint), text)
    return value if kind is None else kind.parse(text)


def complete(constraint: ConstraintLike, text: str = "") -> Completion:
    """Continuation of a text, character by character: what is forced, and what may come behind it.

    Args:
        constraint: a constraint, a JSON schema, or a Python type.
        text: the beginning of one that it allows, as it is generated.

    Raises:
        ConstraintError: a constraint that is not valid or can't be enforced; or a text that it does not allow.
    """
    from sglang_lite.runtime.structured_output.continuations import continuations

    known = as_constraint(constraint)
    _must_be_text(text)
    with within_limits("the constraint"):
        matcher = ByteMatcher(known)
        matcher.push(text)
        watched = _watching_matcher(known)
        return matcher.ahead() if watched is None else continuations(watched, text)


def describe(constraint: ConstraintLike) -> str:
    """A hint for prompts: what a text has to look like, for a model to read. Masks alone hold a model to a form that it
    may not expect.

    Args:
        constraint: a constraint, a JSON schema, or a Python type.

    Raises:
        ConstraintError: a constraint that is not valid.
    """
    known, kind = as_constraint(constraint), type_of(constraint)
    with within_limits("the constraint"):
        return description(known, None if kind is None else kind.annotation)


def _must_be_text(text: object) -> None:
    if not isinstance(text, str):
        raise ParameterError("text", f"{text!r:.60} is not a string.")


# ---------------------------------------------------------------------------------------------------------- masks


@lru_cache(maxsize=4)
def _engine(tokenizer: Tokenizer | None, vocab_size: int | None) -> LlguidanceEngine:
    from sglang_lite.runtime.structured_output.llguidance import LlguidanceEngine

    eos = () if tokenizer is None else sorted(tokenizer.eos_ids)
    return LlguidanceEngine(tokenizer, vocab_size, eos)


@memoized
def _grammar(engine: LlguidanceEngine, constraint: Constraint) -> CompiledGrammar:
    from sglang_lite.runtime.structured_output.watched_rules import watched_in, with_watched_rules

    return with_watched_rules(engine.compile(constraint), engine.ending_tokens, watched_in(constraint))


def _compiled(constraint: Constraint, model: str | Path | Engine | None) -> CompiledGrammar:
    """Compiles a constraint: as the Engine given would for a generation; without one, by llguidance."""
    if model is None or isinstance(model, str | Path):
        return _grammar(_engine(*_tokens(model)), constraint)
    return model.compile_grammar(constraint)


def _tokens(model: str | Path | Engine | None) -> tuple[Tokenizer | None, int | None]:
    """The tokenizer of a model and the size of its vocabulary."""
    if model is None:
        return None, None
    if not isinstance(model, str | Path):
        if not hasattr(model, "tokenizer"):
            raise ParameterError("model", f"{type(model).__name__} is not a name, a path or an Engine.")
        return model.tokenizer, model.vocab_size
    from sglang_lite.runtime.installed import check_installed
    from sglang_lite.runtime.models.resolve import resolve

    check_installed("a model's tokenizer")
    tokenizer = _tokenizer_at(resolve(str(model)))
    return tokenizer, tokenizer.vocab_size


@lru_cache(maxsize=4)
def _tokenizer_at(path: Path) -> Tokenizer:
    from sglang_lite.runtime.models.weights.gguf_file import GgufFile
    from sglang_lite.runtime.tokens.from_folder import tokenizer_from_folder
    from sglang_lite.runtime.tokens.from_gguf import tokenizer_from_gguf

    return tokenizer_from_folder(path) if path.is_dir() else tokenizer_from_gguf(GgufFile(path).metadata, str(path))


def _watching_matcher(constraint: Constraint) -> Matcher | None:
    """A matcher of bytes that watches what no grammar says; None where there is nothing."""
    from sglang_lite.runtime.structured_output.watched_rules import WatchedGrammar

    grammar = _grammar(_engine(None, None), constraint) if isinstance(constraint, JsonSchema) else None
    return grammar.matcher() if isinstance(grammar, WatchedGrammar) else None


def _first_mask(grammar: CompiledGrammar) -> None:
    from sglang_lite.runtime.structured_output.base import next_mask

    next_mask(grammar.matcher())


def _generates(grammar: CompiledGrammar, engine: LlguidanceEngine, text: str) -> bool:
    from sglang_lite.runtime.structured_output.base import masks_allow

    try:
        return masks_allow(grammar, engine.encode(text))
    except UnicodeEncodeError:  # half a character, which no token spells
        return False
