"""Public interface to constraints: `sgl.grammar`.

import sglang_lite as sgl

sgl.grammar.check({"items": {"type": "object"}, "uniqueItems": True}).refused
sgl.grammar.matches(sgl.Grammar('root ::= "a" | "(" root ")"'), "((a))")
sgl.grammar.complete(sgl.Regex("(yes|yellow)!"), "y").forced  # "e"
sgl.grammar.explain(dict[str, int], backend)  # how a backend would enforce it
sgl.grammar.describe(dict[str, int])  # a description of the JSON for a prompt
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_lite.constraints import matching
from sglang_lite.constraints.byte_matcher import ByteMatcher, Completion
from sglang_lite.constraints.coerce import ConstraintLike, as_constraint, value_type_or_none
from sglang_lite.constraints.coerce import Grammar as Grammar
from sglang_lite.constraints.describe import description
from sglang_lite.constraints.json_schema.assertions import assertions_and_annotations
from sglang_lite.constraints.json_schema.formats import GENERATED_IN_PART
from sglang_lite.constraints.json_schema.keywords import REPEATS
from sglang_lite.constraints.json_schema.normal_form import load_schema_document, normalise
from sglang_lite.constraints.json_schema.write_value import value_text
from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.constraints.limits import convert_limit_errors
from sglang_lite.constraints.memo import memoize
from sglang_lite.constraints.random_texts import sample
from sglang_lite.constraints.schema import json_schema as json_schema
from sglang_lite.protocol import (
    ArgumentList,
    BackendError,
    Choices,
    Constraint,
    ConstraintError,
    Ebnf,
    InOrder,
    JsonSchema,
    Lark,
    Notation,
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
from sglang_lite.runtime.host.installed import is_installed

if TYPE_CHECKING:
    from sglang_lite.engine.engine import Engine
    from sglang_lite.lang.backend.base import Backend
    from sglang_lite.lang.backend.remote.constraint_explanation import ConstraintExplanation
    from sglang_lite.runtime.structured_output.base import CompiledGrammar, Matcher
    from sglang_lite.runtime.structured_output.llguidance import LlguidanceEngine
    from sglang_lite.runtime.tokens.tokenizer import Tokenizer

__all__ = [
    "ArgumentList", "Choices", "Completion", "Ebnf", "Grammar", "InOrder", "JsonSchema", "Lark", "Notation", "Number",
    "OneOf", "Regex", "Repeated", "Report", "StructuralTag", "Tag", "TaggedObject", "Tags", "check", "complete",
    "describe", "explain", "json_schema", "matches", "validate",
]  # fmt: skip


_ONCE = "that an object has a name which is not listed once"


@dataclass(frozen=True, slots=True)
class Report:
    """Report on a constraint: which of its parts are enforced.

    Attributes:
        refused: all reasons why the constraint is refused, each as (JSON Pointer into the schema,
            reason); the pointer is "" for constraints other than schemas.
        enforced: JSON Pointers of the schema's keywords that every generated text satisfies.
        checked: requirements that are not enforced but checked in the finished value, each as (JSON
            Pointer, reason): keywords that `enforce="best_effort"` permits, validators of a Python
            type that no schema can express, and that unlisted member names occur only once
            (docs/constraints.md says when this is enforced).
        remarks: JSON Pointers of the schema's keywords that have no effect, such as unknown formats
            and names.
        rules: number of rules of the grammar.
        example: text that the constraint allows; None if it is refused or all its texts are very
            long.
        seconds: time to compile the constraint and compute its first mask.
    """

    refused: tuple[tuple[str, str], ...] = ()
    enforced: tuple[str, ...] = ()
    checked: tuple[tuple[str, str], ...] = ()
    remarks: tuple[str, ...] = ()
    rules: int = 0
    example: str | None = None
    seconds: float = 0.0


def check(constraint: ConstraintLike, model: str | Path | Engine | None = None) -> Report:
    """Checks which parts of a constraint, a JSON schema or a Python type are enforced, and reports
    them.

    Args:
        constraint: constraint, JSON schema or Python type.
        model: name or path of a model, or an engine, whose tokens the constraint is compiled for;
            None for one token per byte.

    Raises:
        ConstraintError: the value is not a constraint.
        ModelError: the model does not exist.
        BackendError: packages that models need are not installed.
    """
    known = as_constraint(constraint)
    _llguidance_engine(*_resolve_tokenizer(model))  # load it before measuring the time
    began = time.perf_counter()
    refused: tuple[tuple[str, str], ...] = ()
    checked: tuple[tuple[str, str], ...] = ()
    try:
        if isinstance(known, JsonSchema):
            strict = known.enforce == "strict"
            known = msgspec.structs.replace(known, enforce="best_effort")
            checked = normalise(known).checked
            if strict:
                refused = checked
                checked = ()
        if not refused:
            from sglang_lite.runtime.structured_output.base import next_mask

            next_mask(_compile_for_model(known, model).matcher())
    except ConstraintError as error:
        refused = ((error.pointer or "", str(error)),)
    seconds = time.perf_counter() - began
    enforced, remarks = _split_keywords_by_enforcement(known)
    kind = value_type_or_none(constraint)
    checked += kind.checked if kind is not None else ()
    if isinstance(known, JsonSchema) and not refused:
        checked += tuple((pointer, _ONCE) for pointer in normalise(known).unlisted_names_at)
    unenforced = {pointer for pointer, _ in (*refused, *checked)}
    enforced = tuple(pointer for pointer in enforced if pointer not in unenforced)
    if refused:
        return Report(refused, enforced, checked, remarks, seconds=seconds)
    try:
        with convert_limit_errors("the constraint"):
            example = sample(known, Random(0))
    except ConstraintError:  # its texts are too long
        example = None
    return Report(
        (), enforced, checked, remarks, len(language_for_constraint(known).rules), example, seconds
    )


def explain(
    constraint: ConstraintLike | Sequence[str], backend: str | Path | Engine | Backend | None = None
) -> ConstraintExplanation:
    """Explains how a generation would be held to a constraint, without making a call. Names the
    grammar engine or the strategy of a provider, and lists what is refused, what is only checked in
    the finished value, and how texts are limited.

    Args:
        constraint: constraint, JSON schema or Python type, as for `gen(type=…)`; or a list of
            texts, as for `select`.
        backend: backend to explain, or a model whose engine to explain, as in `check`; None for one
            token per byte.

    Raises:
        ConstraintError: the value is not a constraint.
        ModelError: the model does not exist.
        BackendError: packages that models need are not installed.
    """
    from sglang_lite.lang.backend.capabilities import CONSTRAINT_NAMES
    from sglang_lite.lang.backend.default import coerce_backend, is_engine
    from sglang_lite.lang.backend.remote.constraint_explanation import (
        ConstraintExplanation,
        explain_for_backend,
    )

    select = isinstance(constraint, list | tuple)
    known = (
        Choices(tuple(constraint))
        if isinstance(constraint, list | tuple)
        else as_constraint(constraint)
    )
    if backend is not None and not isinstance(backend, str | Path) and not is_engine(backend):
        kind = None if select else value_type_or_none(constraint)
        return explain_for_backend(
            coerce_backend(backend), known, () if kind is None else kind.checked, select=select
        )
    model: Any = backend
    found = ConstraintExplanation(
        CONSTRAINT_NAMES[type(known)],
        str(getattr(model, "model_name", None) or model or "a model of bytes"),
        "native",
    )
    if select:
        return replace(found, by="scores")
    report = check(constraint, model)
    if report.refused:
        return replace(found, mode="refused", refused=report.refused)
    grammar = _compile_for_model(known, model)
    fewest = None if model is None else grammar.lengths().fewest
    limits = tuple(_describe_limits(known))
    if fewest is None and model is not None:
        limits += ("the fewest tokens are not known: max_tokens may cut a text",)
    by = "number" if isinstance(known, Number) else grammar.matcher().engine.name
    return replace(found, by=by, checked=report.checked, limits=limits, fewest_tokens=fewest)


def _describe_limits(constraint: Constraint) -> Iterator[str]:
    """Yields descriptions of how generated texts differ from what a constraint allows, such as a
    maximum number of digits.
    """
    if isinstance(constraint, Number):
        yield (
            "at most 19 digits"
            if constraint.kind == "integer"
            else "as many digits as max_tokens permits"
        )
        yield "the first token that does not continue the number ends it, and is not part of it"
    if not isinstance(constraint, JsonSchema):
        return
    yield "one style of JSON is generated (whitespace, order of members, numbers); any is accepted"
    document = load_schema_document(constraint)
    for location in document.locations:
        schema = document.schema(location)
        if not isinstance(schema, dict) or location.pointer[:1] not in ("", "/"):
            continue
        if constraint.format == "assert" and schema.get("format") in GENERATED_IN_PART:
            yield f"{location.pointer}/format: not all that is valid is generated"
        if REPEATS in schema:
            yield f"{location.pointer}/{REPEATS}: at most {schema[REPEATS]} equal items in a row are generated"
    for pointer in constraint.sets:
        yield f"{pointer}: an item may be written twice where masks can't prevent it; the set has it once"


def _split_keywords_by_enforcement(
    constraint: Constraint,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if not isinstance(constraint, JsonSchema):
        return (), ()
    return assertions_and_annotations(
        load_schema_document(constraint), assert_format=constraint.format == "assert"
    )


def matches(
    constraint: ConstraintLike, text: str, model: str | Path | Engine | None = None
) -> bool:
    """Returns True if a text could be generated under a constraint: the masks allow each of its
    tokens and its end, and its value is valid.

    For a JSON schema, the text may have any whitespace, order of members and spelling of numbers:
    its value is rewritten in the style of generated text, and the result is matched. JSON inside
    another constraint must be in that style.

    Args:
        constraint: constraint, JSON schema or Python type.
        text: complete text.
        model: name or path of a model, or an engine, whose tokens the text is split into; None for
            one token per byte.

    Raises:
        ConstraintError: the constraint is invalid or can't be enforced.
        ModelError: the model does not exist.
    """
    known = as_constraint(constraint)
    kind = value_type_or_none(constraint)
    _check_is_text(text)
    engine = _llguidance_engine(*_resolve_tokenizer(model))
    grammar = _compile_for_model(known, model)
    texts: list[str | None] = [text]
    try:
        if isinstance(known, JsonSchema):
            texts.append(value_text(known, matching.validate(known, text)))
        if kind is not None:
            kind.parse(text)
    except ValueValidationError:
        return False
    return any(_masks_allow_text(grammar, engine, each) for each in texts if each is not None)


def validate(constraint: ConstraintLike, text: str) -> UserValue:
    """Returns the value of a finished text: an instance of a Python type, the JSON value for a
    schema, or otherwise the text itself.

    Args:
        constraint: constraint, JSON schema or Python type.
        text: complete text.

    Raises:
        ValueValidationError: the constraint does not allow the text.
        ConstraintError: the constraint is invalid.
    """
    kind = value_type_or_none(constraint)
    _check_is_text(text)
    with convert_limit_errors("the constraint"):
        value = matching.validate(as_constraint(constraint), text)
    return value if kind is None else kind.parse(text)


def complete(constraint: ConstraintLike, text: str = "") -> Completion:
    """Returns what may follow the beginning of a text: the characters that are forced, and the
    characters that may come after them.

    Args:
        constraint: constraint, JSON schema or Python type.
        text: beginning of an allowed text, in the style of generated text.

    Raises:
        ConstraintError: the constraint is invalid or can't be enforced, or it does not allow the
            text.
    """
    from sglang_lite.runtime.structured_output.continuations import continuations

    known = as_constraint(constraint)
    _check_is_text(text)
    with convert_limit_errors("the constraint"):
        matcher = ByteMatcher(known)
        matcher.push(text)
        ruled = _matcher_with_mask_rules(known)
        return matcher.completion() if ruled is None else continuations(ruled, text)


def describe(constraint: ConstraintLike) -> str:
    """Describes the form that a constraint requires, as text for a prompt. Also available as
    `sgl.describe(T)`. Masks force a model into the form in any case; the description lets it expect
    the form.

    For a type or schema, the text has the names of members (with `?` if they may be left out),
    types, limits, docstrings and descriptions. It depends on nothing else, so prompts that begin
    with it share it in the cache.

    Args:
        constraint: constraint, JSON schema or Python type, as for `gen`.

    Raises:
        ConstraintError: the constraint is invalid.
    """
    known = as_constraint(constraint)
    kind = value_type_or_none(constraint)
    with convert_limit_errors("the constraint"):
        return description(known, None if kind is None else kind.annotation)


def _check_is_text(text: object) -> None:
    if not isinstance(text, str):
        raise ParameterError("text", f"{text!r:.60} is not a string.")


# -------------------------------------------------------------------------------------------- masks


@lru_cache(maxsize=4)
def _llguidance_engine(tokenizer: Tokenizer | None, vocab_size: int | None) -> LlguidanceEngine:
    if not is_installed("numpy"):
        raise BackendError(
            "masks need numpy, which is not installed.", hint="pip install 'sglang-lite[grammar]'."
        )
    from sglang_lite.runtime.structured_output.llguidance import LlguidanceEngine

    eos = () if tokenizer is None else sorted(tokenizer.eos_ids)
    return LlguidanceEngine(tokenizer, vocab_size, eos)


@memoize
def _compile_with_rules(engine: LlguidanceEngine, constraint: Constraint) -> CompiledGrammar:
    from sglang_lite.runtime.structured_output.ruled_grammar import (
        extract_mask_rules,
        with_mask_rules,
    )

    return with_mask_rules(
        engine.compile(constraint), engine.ending_tokens, extract_mask_rules(constraint)
    )


def _compile_for_model(
    constraint: Constraint, model: str | Path | Engine | None
) -> CompiledGrammar:
    """Compiles the grammar of a constraint. With an Engine, compiles it as for a generation;
    otherwise uses llguidance.
    """
    if model is None or isinstance(model, str | Path):
        with convert_limit_errors("the constraint"):
            return _compile_with_rules(_llguidance_engine(*_resolve_tokenizer(model)), constraint)
    return model.compile_grammar(constraint)


def _resolve_tokenizer(model: str | Path | Engine | None) -> tuple[Tokenizer | None, int | None]:
    """Returns the tokenizer of a model and the size of its vocabulary, or (None, None) for one
    token per byte.
    """
    if model is None:
        return None, None
    if not isinstance(model, str | Path):
        if not hasattr(model, "tokenizer"):
            raise ParameterError(
                "model", f"{type(model).__name__} is not a name, a path or an Engine."
            )
        return model.tokenizer, model.vocab_size
    from sglang_lite.runtime.host.installed import check_engine_packages
    from sglang_lite.runtime.models.resolve import resolve

    check_engine_packages("a model's tokenizer")
    tokenizer = _load_tokenizer_from_path(resolve(str(model)))
    return tokenizer, tokenizer.vocab_size


@lru_cache(maxsize=4)
def _load_tokenizer_from_path(path: Path) -> Tokenizer:
    from sglang_lite.runtime.models.weights.gguf_file import GgufFile
    from sglang_lite.runtime.tokens.from_folder import tokenizer_from_folder
    from sglang_lite.runtime.tokens.from_gguf import tokenizer_from_gguf

    return (
        tokenizer_from_folder(path)
        if path.is_dir()
        else tokenizer_from_gguf(GgufFile(path).metadata, str(path))
    )


def _matcher_with_mask_rules(constraint: Constraint) -> Matcher | None:
    """Returns a matcher that also enforces requirements that no grammar expresses, such as distinct
    member names. Returns None if the constraint has no such requirements.
    """
    from sglang_lite.runtime.structured_output.ruled_grammar import RuledGrammar

    grammar = (
        _compile_with_rules(_llguidance_engine(None, None), constraint)
        if isinstance(constraint, JsonSchema)
        else None
    )
    return grammar.matcher() if isinstance(grammar, RuledGrammar) else None


def _masks_allow_text(grammar: CompiledGrammar, engine: LlguidanceEngine, text: str) -> bool:
    from sglang_lite.runtime.structured_output.base import masks_allow_tokens

    try:
        return masks_allow_tokens(grammar, engine.encode(text))
    except UnicodeEncodeError:  # an unpaired surrogate, which no token spells
        return False
