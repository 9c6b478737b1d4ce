"""The ladder: by which of an API's ways a node is served, or why it is not.

One function decides, `rung_of`. What refuses a node before it is queued, what serves it and what explains it all ask
that one, so nothing is served otherwise than it was explained. Knows no connection and builds no request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

from sglang_lite.constraints.emit.gbnf import to_gbnf
from sglang_lite.constraints.emit.lark import to_lark
from sglang_lite.constraints.emit.regex import to_rust
from sglang_lite.constraints.free_numbers import PATTERNS
from sglang_lite.constraints.language import language_of
from sglang_lite.constraints.syntax.regex import parse
from sglang_lite.lang.backend.capabilities import CONSTRAINT_NAMES, Capabilities
from sglang_lite.lang.backend.profile import ApiName, Profile
from sglang_lite.lang.backend.schema_fit import Fit, fitted
from sglang_lite.lang.backend.structured import NUMBERS, Form, form_of
from sglang_lite.lang.backend.turns import Begun, TurnRules
from sglang_lite.lang.expressions import NUMBER_STOPS
from sglang_lite.protocol import (
    Choices,
    Constraint,
    Continuation,
    Ebnf,
    InOrder,
    JsonSchema,
    Lark,
    Number,
    OneOf,
    Regex,
    Repeated,
    SamplingParams,
    StructuralTag,
    TaggedObject,
    Unset,
)
from sglang_lite.protocol.sampling import given
from sglang_lite.text.tool_use import Function, ToolUse, tool_use_of

Policy: TypeAlias = Literal["strict", "emulate", "warn"]
POLICIES: Final = ("strict", "emulate", "warn")
REPAIRS: Final = 2  # at most, of an answer that breaks its constraint

# Parameters of OpenAI's Responses API (openai 3.54.0: types/responses/response_create_params.py).
RESPONSES_PARAMS: Final = frozenset({"max_tokens", "temperature", "top_p"})
_OF_TEXT: Final = frozenset({"return_logprob", "top_logprobs_num", "return_text_in_logprobs"})  # there, of text alone
# Kinds that are ever served remotely. (One over several nodes is continued in mid-turn; what stands in order is how
# reasoning before a value is written, and such servers send that apart.)
SERVED: Final = frozenset(CONSTRAINT_NAMES) - {Continuation, InOrder}
ANY_CHOICE: Final = Choices(("a", "b"))


@dataclass(frozen=True, slots=True)
class Rung:
    """A way in which a node is served.

    Attributes:
        name: a rung of `profile.RUNGS`, "free" for text without a constraint, "enum" for a choice in strict JSON, or
            "repair": generated, checked, and asked for again with the error shown.
        api: the API that is asked.
        native: the provider keeps what was asked for; else it is emulated.
        calls: how many at best, and at worst.
        form: the JSON object that the answer is read from; None: the answer is the text.
        fit: what becomes of a JSON schema; None where it is sent as it is.
        strict: a schema that is sent is kept; else it is a hint.
        field: the value of the rung's own field in the request: a pattern, a grammar, a schema.
        samples: how many calls make up `n`; 1: the API makes all samples itself.
        stops: stop strings by which the finished text is cut here.
        left_out: parameters that are not sent, as `policy="warn"` allows.
        warnings: what is not as it was asked for, in words.
    """

    name: str
    api: ApiName
    native: bool = True
    calls: tuple[int, int] = (1, 1)
    form: Form | None = None
    fit: Fit | None = None
    strict: bool = True
    field: Any = None
    samples: int = 1
    stops: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def mode(self) -> Literal["native", "emulated"]:
        return "native" if self.native else "emulated"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a node is not served.

    Attributes:
        feature: what can't be honoured.
        instead: what to do.
        reasons: of a JSON schema: pointers of what the provider does not take, and why.
    """

    feature: str
    instead: str
    reasons: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """What a node asks for.

    Attributes:
        kind: "gen", or "select" of one of the choices.
        params: the parameters that are set.
        constraint: of the text.
        scores: the choices' probabilities are wanted.
    """

    kind: Literal["gen", "select"] = "gen"
    params: SamplingParams = field(default_factory=SamplingParams)
    constraint: Constraint | None = None
    scores: bool = False


def rung_of(profile: Profile, policy: Policy, asked: Asked) -> Rung | Refusal:
    """The rung on which a node is served by a model, or why it is refused."""
    if _stops_a_value(asked):
        return Refusal("stop together with a constraint", "Leave stop out.")
    found = _constrained(profile, policy, asked)
    return found if isinstance(found, Refusal) else _with_parameters(found, profile, policy, asked)


def _stops_a_value(asked: Asked) -> bool:
    """Tells whether a stop could cut a value. Those of a number, which ends by itself, can't."""
    stops = asked.params.stop
    if isinstance(stops, Unset) or asked.constraint is None:
        return False
    number = isinstance(asked.constraint, Number) or form_of(asked.constraint) in NUMBERS
    return not number or not set(stops) <= set(NUMBER_STOPS)


def constraint_name(constraint: Constraint) -> str:
    """A constraint's kind in words."""
    return CONSTRAINT_NAMES[type(constraint)]


def capabilities_of(profile: Profile, policy: Policy) -> Capabilities:
    """What a backend of the profile can honour, in the words that the language asks in."""
    selection = rung_of(profile, policy, Asked("select", constraint=ANY_CHOICE))
    return Capabilities(
        kinds_served(profile, policy), profile.params, select=isinstance(selection, Rung),
        scores=profile.takes("decisions"), continues=profile.takes("continues"),
        prefill=profile.takes("prefill") or profile.takes("continue_final_message"), images=profile.takes("images"),
    )  # fmt: skip


def turn_rules_of(profile: Profile, policy: Policy) -> TurnRules:
    """What a backend of the profile does with several generations in a turn."""
    can = capabilities_of(profile, policy)
    begun: Begun = "continued" if can.continues or can.prefill else "refused" if policy == "strict" else "asked"
    constrained = can.continues or profile.takes("continue_final_message")
    return TurnRules(begun, JsonSchema in kinds_served(profile, "strict"), constrained)


def kinds_served(profile: Profile, policy: Policy) -> frozenset[type]:
    """Kinds of constraint for which there is a rung."""
    if policy != "strict" and profile.api != "completions":
        return SERVED
    return frozenset(kind for kind, each in _SAMPLES.items() if any(_native(profile, Asked(constraint=each))))


# --------------------------------------------------------------------------------------------------- constraints


def _constrained(profile: Profile, policy: Policy, asked: Asked) -> Rung | Refusal:
    constraint = asked.constraint
    if constraint is None:
        return Rung("free", profile.api)
    possible = list(_native(profile, asked))
    for way in possible:
        if isinstance(way, Rung):
            return way
    if asked.scores:
        return Refusal("the choices' probabilities", "It only picks: leave scores out, or use a local engine.")
    if (
        policy != "strict" and type(constraint) in SERVED and profile.api != "completions"
    ):  # a base model is told nothing
        return _repaired(profile, asked)
    unfit = next((way for way in possible if isinstance(way, Refusal)), None)
    return unfit or Refusal(CONSTRAINT_NAMES[type(constraint)], _instead(profile))


def _native(profile: Profile, asked: Asked) -> Iterator[Rung | Refusal]:
    """Ways that the model is known to have, in the order in which they are tried; a Refusal where a schema does not
    fit."""
    constraint = asked.constraint
    assert constraint is not None
    use = tool_use_of(constraint)
    if use is not None and profile.takes("tools") and (not use.required or profile.takes("forced_tools")):
        yield Rung("tools", profile.api, field=_tools(use, profile))
    if asked.kind == "select":
        yield from _decisions(profile, constraint)
        if asked.scores:
            return
    if profile.schema is not None:
        yield from _as_json(profile, asked)
    yield from _as_tool(profile, constraint)
    yield from _as_field(profile, constraint)


def _tools(use: ToolUse, profile: Profile) -> tuple[bool, tuple[tuple[Function, str, bool], ...]]:
    """Whether one is called, and functions with the schemas of their arguments; those that the provider does not take
    as strict ones are hints, and the arguments are checked."""
    found = list[tuple[Function, str, bool]]()
    for function in use.functions:
        plain = json.dumps(function.parameters)
        fit = fitted(plain, profile.schema) if profile.schema is not None else None
        strict = fit is not None and not fit.refused
        found.append((function, fit.schema if fit is not None and strict else plain, strict))
    return use.required, tuple(found)


def _decisions(profile: Profile, constraint: Constraint) -> Iterator[Rung]:
    assert isinstance(constraint, Choices)
    most = profile.limits.get("choices", 0)
    if profile.takes("decisions") and 2 <= len(constraint.options) <= most:
        yield Rung("decisions", profile.api)


def _as_json(profile: Profile, asked: Asked) -> Iterator[Rung | Refusal]:
    """Strict outputs, and the arguments of a strict tool: JSON of a schema that is fitted to the provider."""
    form = form_of(asked.constraint)
    if form is None:
        return
    assert profile.schema is not None
    fit = fitted(form.constraint.schema, profile.schema)
    if form.wrapped:
        fit = fit.below("/properties/value")
    for name in ("json_schema", "strict_tool"):
        if not profile.takes(name) or (name == "strict_tool" and not profile.takes("forced_tools")):
            continue
        if fit.refused:
            yield Refusal("this JSON schema", _unfit(fit), fit.refused)
        else:
            chosen = "enum" if asked.kind == "select" and name == "json_schema" else name
            yield Rung(chosen, profile.api, form=form, fit=fit)


def _unfit(fit: Fit) -> str:
    told = "; ".join(f"{pointer or '/'}: {why}" for pointer, why in fit.refused[:3])
    more = f" (and {len(fit.refused) - 3} more)" if len(fit.refused) > 3 else ""
    return f'Change {told}{more}. Or, to have it checked and asked for again: policy="emulate".'


def _as_tool(profile: Profile, constraint: Constraint) -> Iterator[Rung]:
    """Custom tools whose input is a grammar's text."""
    if isinstance(constraint, Regex) and profile.takes("regex_tool"):
        yield Rung("regex_tool", "responses", field=to_rust(parse(constraint.pattern)))
    elif profile.takes("lark_tool") and type(constraint) in _GRAMMARS:
        grammar = constraint.grammar if isinstance(constraint, Lark) else to_lark(language_of(constraint))
        if not _BEYOND_LARK.search(grammar):
            yield Rung("lark_tool", "responses", field=grammar)


_GRAMMARS = frozenset({Lark, Ebnf, OneOf, Repeated, StructuralTag, TaggedObject})
_BEYOND_LARK = re.compile(r"%json|%regex|%llguidance|\[[a-z_]+\s*[,=\]]|(?<![/\\])[&~](?![^\n]*/)")  # llguidance's own


def _as_field(profile: Profile, constraint: Constraint) -> Iterator[Rung]:
    """Fields that only one dialect has. The answer is the text itself."""
    if isinstance(constraint, JsonSchema):
        if profile.takes("structured_outputs"):
            yield Rung("structured_outputs", profile.api, field={"json": json.loads(constraint.schema)})
        elif profile.takes("json_schema") and profile.schema is None:
            yield Rung("json_schema", profile.api, field=json.loads(constraint.schema))
        return
    pattern = _pattern(constraint)
    if profile.takes("structured_outputs"):
        if isinstance(constraint, Choices):
            yield Rung("structured_outputs", profile.api, field={"choice": list(constraint.options)})
        elif pattern is not None:
            yield Rung("structured_outputs", profile.api, field={"regex": pattern})
        else:
            yield from _grammar("structured_outputs", profile, constraint, lambda text: {"grammar": text})
    if profile.takes("regex") and pattern is not None:
        yield Rung("regex", profile.api, field=pattern)
    for name in ("ebnf", "grammar"):
        if profile.takes(name) and (pattern is None or name == "grammar"):
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


_WRITTEN: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def _literally(text: str) -> str:
    """A text as a regex that matches it, in what all engines' dialects share."""
    return re.sub(r"[^\w ]", lambda found: _WRITTEN.get(found[0], "\\" + found[0]), text)


def _grammar(name: str, profile: Profile, constraint: Constraint, put: Any) -> Iterator[Rung]:
    text = constraint.grammar if isinstance(constraint, Ebnf) else to_gbnf(language_of(constraint))
    yield Rung(name, profile.api, field=put(text))


def _repaired(profile: Profile, asked: Asked) -> Rung:
    """The last rung: the model is told what is wanted, and, if need be, what was wrong with its answer. A schema that
    only strict outputs don't take is sent as a hint."""
    assert asked.constraint is not None
    warning = (
        f"{constraint_name(asked.constraint)} is not kept by the provider: it is told, checked and asked for again"
    )
    hint = form_of(asked.constraint) if profile.api == "chat" and profile.takes("json_schema") else None
    return Rung("repair", profile.api, False, (1, 1 + REPAIRS), form=hint, strict=False, warnings=(warning,))


# ---------------------------------------------------------------------------------------------------- parameters


def _with_parameters(rung: Rung, profile: Profile, policy: Policy, asked: Asked) -> Rung | Refusal:
    params = asked.params
    stops = () if isinstance(params.stop, Unset) or asked.constraint is not None else params.stop
    for name in given(params):
        here = rung.api != "responses" or name in RESPONSES_PARAMS or (rung.field is None and name in _OF_TEXT)
        if name == "stop" or (profile.takes(name) and here):
            continue
        found = _without(rung, profile, policy, name, asked)
        if isinstance(found, Refusal):
            return found
        rung = found
    both = not isinstance(params.temperature, Unset) and not isinstance(params.top_p, Unset)
    if both and not profile.takes("temperature_with_top_p") and "top_p" not in rung.left_out:
        if policy != "warn":
            return Refusal("temperature and top_p together", "Set one of them.")
        rung = _left_out(rung, "top_p")
    return _stopped(rung, profile, policy, stops) if stops else rung


def _without(rung: Rung, profile: Profile, policy: Policy, name: str, asked: Asked) -> Rung | Refusal:
    """What becomes of a parameter that the model, or the rung, does not take."""
    if policy != "strict" and name == "n":
        count = 1 if isinstance(asked.params.n, Unset) else asked.params.n
        best, worst = rung.calls
        warnings = (*rung.warnings, f"{count} samples are {count} calls")
        return replace(rung, native=False, samples=count, calls=(best * count, worst * count), warnings=warnings)
    if policy == "warn":
        return _left_out(rung, name)
    if profile.takes(name) and asked.constraint is not None:
        return Refusal(f"{name} together with {constraint_name(asked.constraint)}", f"Leave {name} out.")
    return Refusal(name, f"Leave it out, or: gen(backend=…). {_known(profile, name)}{_takes(profile)}")


def _left_out(rung: Rung, name: str) -> Rung:
    warning = f"{name} is left out: the model does not take it"
    return replace(rung, native=False, left_out=(*rung.left_out, name), warnings=(*rung.warnings, warning))


def _stopped(rung: Rung, profile: Profile, policy: Policy, stops: tuple[str, ...]) -> Rung | Refusal:
    most = profile.limits.get("stop")
    if not profile.takes("stop") or rung.api == "responses":
        feature, instead = "stop", f"Leave it out. {_known(profile, 'stop')}{_takes(profile)}"
    elif most is not None and len(stops) > most:
        feature, instead = f"{len(stops)} stop strings", f"It takes {most}."
    elif profile.refuses("blank_stops") and not all(map(str.strip, stops)):
        feature = "a stop string of blanks alone"
        instead = "Ask for one line in the prompt, or use a visible mark."
    else:
        return rung
    if policy == "strict":
        return Refusal(feature, instead)
    warning = f"{feature}: the whole answer is generated and cut here"
    return replace(
        rung, native=False, stops=stops, left_out=(*rung.left_out, "stop"), warnings=(*rung.warnings, warning)
    )


# --------------------------------------------------------------------------------------------------------- words


def _known(profile: Profile, name: str) -> str:
    if name in profile.features:
        return ""
    return f"Nothing is known of {name} for it: profile= or capabilities= says what it takes. "


def _takes(profile: Profile) -> str:
    return f"It takes: {', '.join(sorted(profile.params)) or 'no parameters'}."


def _instead(profile: Profile) -> str:
    kinds = kinds_served(profile, "strict")
    if not kinds:
        known = "" if profile.refuses("json_schema") else "That it keeps one is not known: profile= says which it is. "
        return f'{known}Leave it out, use policy="emulate", or another backend for this node: gen(backend=…).'
    enforced = ", ".join(sorted(CONSTRAINT_NAMES[kind] for kind in kinds))
    return f'It enforces: {enforced}. Or: policy="emulate", which checks and asks again, or gen(backend=…).'


_TEXT = JsonSchema('{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], '
                   '"additionalProperties": false}')  # fmt: skip
_SAMPLES: Final[Mapping[type, Constraint]] = {
    Regex: Regex("[a-z]"),
    JsonSchema: _TEXT,
    Choices: ANY_CHOICE,
    Number: Number("integer"),
    Ebnf: Ebnf('root ::= "a"'),
    Lark: Lark('start: "a"'),
    OneOf: OneOf((ANY_CHOICE,)),
    Repeated: Repeated(ANY_CHOICE, 1, 2),
}
