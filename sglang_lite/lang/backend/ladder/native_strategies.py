"""Native strategies: ways in which a model is known to enforce a constraint by itself, or to choose among texts, in
order of preference."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from sglang_lite.constraints.emit.gbnf import to_gbnf
from sglang_lite.constraints.emit.lark import to_lark
from sglang_lite.constraints.emit.regex import to_rust
from sglang_lite.constraints.json_schema.quotes import without_documents
from sglang_lite.constraints.language import language_of
from sglang_lite.constraints.number_text import PATTERNS
from sglang_lite.constraints.syntax.regex import parse
from sglang_lite.lang.backend.capabilities import Demands
from sglang_lite.lang.backend.ladder.object_constraints import json_form
from sglang_lite.lang.backend.ladder.schema_fit import Fit, fitted
from sglang_lite.lang.backend.ladder.strategy import Refusal, Strategy
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
from sglang_lite.text.tool_use import Function, ToolUse, tool_use_of


def native_strategies(profile: Profile, demands: Demands) -> Iterator[Strategy | Refusal]:
    """Yields the strategies that the model is known to support, in order of preference, and a Refusal for a strategy
    that a schema or the choices do not fit."""
    constraint = demands.constraint
    assert constraint is not None
    use = tool_use_of(constraint)
    if use is not None and profile.supports("tools") and (not use.required or profile.supports("forced_tools")):
        yield Strategy("tools", profile.api, field=_tools(use, profile))
    if demands.kind == "select":
        yield from selection_strategies(profile, demands)
        if demands.scores:
            return
    if profile.schema is not None:
        yield from _as_json(profile, demands)
    yield from as_tool(profile, constraint)
    yield from as_field(profile, constraint)


def _tools(use: ToolUse, profile: Profile) -> tuple[ToolUse, tuple[tuple[Function, str, bool], ...]]:
    """Field of the strategy "tools": the use of tools, and each function with the schema of its arguments and a flag
    for strict mode. A schema that the provider does not take in strict mode is a hint, and the arguments are
    checked."""
    found = list[tuple[Function, str, bool]]()
    for function in use.functions:
        fit = fitted(json.dumps(function.parameters), profile.schema) if profile.schema is not None else None
        strict = fit is not None and not fit.refused
        hint = json.dumps(without_documents(function.parameters))
        found.append((function, fit.schema if fit is not None and strict else hint, strict))
    return use, tuple(found)


def _as_json(profile: Profile, demands: Demands) -> Iterator[Strategy | Refusal]:
    """Yields the strategies of strict outputs and of strict tools: JSON whose schema is fitted to the provider."""
    form = json_form(demands.constraint)
    if form is None:
        return
    assert profile.schema is not None
    fit = fitted(form.constraint.schema, profile.schema)
    if form.wrapped:
        fit = fit.subschema_report("/properties/value")
    for name in ("json_schema", "strict_tool"):
        if not profile.supports(name) or (name == "strict_tool" and not profile.supports("forced_tools")):
            continue
        if fit.refused:
            yield Refusal("this JSON schema", _unfit(fit), fit.refused)
        else:
            strategy = "enum" if demands.kind == "select" and name == "json_schema" else name
            yield Strategy(strategy, profile.api, form=form, fit=fit)


def _unfit(fit: Fit) -> str:
    changes = "; ".join(f"{pointer or '/'}: {why}" for pointer, why in fit.refused[:3])
    more = f" (and {len(fit.refused) - 3} more)" if len(fit.refused) > 3 else ""
    return f'Change {changes}{more}. Or use policy="emulate", which checks and asks again.'


_ONE_TOKEN = ("chat", "generate_content")  # chat APIs that generate a single token on request; others need more
# Maximum number of alternatives that OpenAI's protocol reports for a token.
_MAX_ALTERNATIVES = 20


def selection_strategies(profile: Profile, demands: Demands) -> Iterator[Strategy | Refusal]:
    """Yields strategies in order of preference, and a Refusal if the choices are the reason why a strategy is
    missing."""
    assert isinstance(demands.constraint, Choices)
    choices = demands.constraint.options
    fits = 2 <= len(choices) <= profile.limits.get("choices", 0)
    if profile.supports("decisions") and fits and demands.effort is None:
        yield Strategy("decisions", profile.api)
    if _tells_first_tokens(profile, demands) and first_characters_differ(choices):
        count = min(profile.limits.get("top_logprobs_num", _MAX_ALTERNATIVES), _MAX_ALTERNATIVES)
        yield Strategy("token_logprobs", profile.api, field=count)
    if profile.supports("logit_bias_steps") and not demands.scores:
        if any(other != each and other.startswith(each) for each in choices for other in choices):
            hint = "Use choices where none begins with another, or another backend for this node: gen(backend=…)."
            yield Refusal("a choice that begins with another one", hint)
        else:  # one call for each step at which the remaining choices' tokens differ
            yield Strategy("logit_bias_steps", profile.api, calls=(min(1, len(choices) - 1), len(choices) - 1))


def _tells_first_tokens(profile: Profile, demands: Demands) -> bool:
    """True if a chat model's first token is the first of its answer, and has log-probabilities. A model that may reason
    first counts only if scores are needed, because then no other strategy can serve the node."""
    if profile.api not in _ONE_TOKEN or demands.effort is not None:
        return False
    logprobs = profile.supports("return_logprob") and profile.supports("top_logprobs_num")
    return logprobs and (demands.scores or not profile.supports("reasoning_effort"))


def first_characters_differ(choices: Sequence[str]) -> bool:
    """True if no token can begin two of the texts, however they are tokenised: their first characters differ. Leading
    blanks are ignored."""
    first = {choice.lstrip()[:1] for choice in choices}
    return len(choices) > 1 and len(first) == len(choices) and "" not in first


_GRAMMARS = frozenset({Lark, Ebnf, OneOf, Repeated, StructuralTag, TaggedObject})
# Syntax of llguidance that Lark does not have.
_BEYOND_LARK = re.compile(r"%json|%regex|%llguidance|\[[a-z_]+\s*[,=\]]|(?<![/\\])[&~](?![^\n]*/)")
_ESCAPED: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def as_tool(profile: Profile, constraint: Constraint) -> Iterator[Strategy]:
    """Yields the strategies of custom tools whose input follows a grammar."""
    if isinstance(constraint, Regex) and profile.supports("regex_tool"):
        yield Strategy("regex_tool", "responses", field=to_rust(parse(constraint.pattern)))
    elif profile.supports("lark_tool") and type(constraint) in _GRAMMARS:
        grammar = constraint.grammar if isinstance(constraint, Lark) else to_lark(language_of(constraint))
        if not _BEYOND_LARK.search(grammar):
            yield Strategy("lark_tool", "responses", field=grammar)


def as_field(profile: Profile, constraint: Constraint) -> Iterator[Strategy]:
    """Yields the strategies of request fields that only one dialect has. The answer is the text itself."""
    if isinstance(constraint, JsonSchema):
        if profile.supports("structured_outputs"):
            yield Strategy("structured_outputs", profile.api, field={"json": json.loads(constraint.schema)})
        elif profile.supports("json_schema") and profile.schema is None:
            yield Strategy("json_schema", profile.api, field=json.loads(constraint.schema))
        return
    pattern = _pattern(constraint)
    if profile.supports("structured_outputs"):
        if isinstance(constraint, Choices):
            yield Strategy("structured_outputs", profile.api, field={"choice": list(constraint.options)})
        elif pattern is not None:
            yield Strategy("structured_outputs", profile.api, field={"regex": pattern})
        else:
            yield from _grammar("structured_outputs", profile, constraint, lambda text: {"grammar": text})
    if profile.supports("regex") and pattern is not None:
        yield Strategy("regex", profile.api, field=pattern)
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


def _grammar(name: str, profile: Profile, constraint: Constraint, put: Callable[[str], Any]) -> Iterator[Strategy]:
    text = constraint.grammar if isinstance(constraint, Ebnf) else to_gbnf(language_of(constraint))
    yield Strategy(name, profile.api, field=put(text))
