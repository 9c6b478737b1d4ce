"""Constraints as the content of fields or tools that only some APIs have: patterns and grammars in the APIs'
dialects."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from sglang_lite.constraints.emit.gbnf import to_gbnf
from sglang_lite.constraints.emit.lark import to_lark
from sglang_lite.constraints.emit.regex import to_rust
from sglang_lite.constraints.free_numbers import PATTERNS
from sglang_lite.constraints.language import language_of
from sglang_lite.constraints.syntax.regex import parse
from sglang_lite.lang.backend.ladder.rung import Rung
from sglang_lite.lang.backend.profiles.profile import Profile
from sglang_lite.protocol import (
    Choices,
    Constraint,
    Ebnf,
    JsonSchema,
    Lark,
    Number,
    OneOf,
    Regex,
    Repeated,
    StructuralTag,
    TaggedObject,
)

_GRAMMARS = frozenset({Lark, Ebnf, OneOf, Repeated, StructuralTag, TaggedObject})
# Syntax of llguidance that Lark does not have.
_BEYOND_LARK = re.compile(r"%json|%regex|%llguidance|\[[a-z_]+\s*[,=\]]|(?<![/\\])[&~](?![^\n]*/)")
_ESCAPED: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def as_tool(profile: Profile, constraint: Constraint) -> Iterator[Rung]:
    """Yields the rungs of custom tools whose input follows a grammar."""
    if isinstance(constraint, Regex) and profile.supports("regex_tool"):
        yield Rung("regex_tool", "responses", field=to_rust(parse(constraint.pattern)))
    elif profile.supports("lark_tool") and type(constraint) in _GRAMMARS:
        grammar = constraint.grammar if isinstance(constraint, Lark) else to_lark(language_of(constraint))
        if not _BEYOND_LARK.search(grammar):
            yield Rung("lark_tool", "responses", field=grammar)


def as_field(profile: Profile, constraint: Constraint) -> Iterator[Rung]:
    """Yields the rungs of request fields that only one dialect has. The answer is the text itself."""
    if isinstance(constraint, JsonSchema):
        if profile.supports("structured_outputs"):
            yield Rung("structured_outputs", profile.api, field={"json": json.loads(constraint.schema)})
        elif profile.supports("json_schema") and profile.schema is None:
            yield Rung("json_schema", profile.api, field=json.loads(constraint.schema))
        return
    pattern = _pattern(constraint)
    if profile.supports("structured_outputs"):
        if isinstance(constraint, Choices):
            yield Rung("structured_outputs", profile.api, field={"choice": list(constraint.options)})
        elif pattern is not None:
            yield Rung("structured_outputs", profile.api, field={"regex": pattern})
        else:
            yield from _grammar("structured_outputs", profile, constraint, lambda text: {"grammar": text})
    if profile.supports("regex") and pattern is not None:
        yield Rung("regex", profile.api, field=pattern)
    for name in ("ebnf", "grammar"):
        if profile.supports(name) and (pattern is None or name == "grammar"):
            yield from _grammar(name, profile, constraint, str)


def _pattern(constraint: Constraint) -> str | None:
    match constraint:
        case Regex(pattern):
            return pattern
        case Number(kind):
            return PATTERNS[kind]
        case Choices(options):
            return f"({'|'.join(map(_literally, options))})"
    return None


def _literally(text: str) -> str:
    """Regex that matches a text literally, in the syntax that the dialects of all engines share."""
    return re.sub(r"[^\w ]", lambda found: _ESCAPED.get(found[0], "\\" + found[0]), text)


def _grammar(name: str, profile: Profile, constraint: Constraint, put: Callable[[str], Any]) -> Iterator[Rung]:
    text = constraint.grammar if isinstance(constraint, Ebnf) else to_gbnf(language_of(constraint))
    yield Rung(name, profile.api, field=put(text))
