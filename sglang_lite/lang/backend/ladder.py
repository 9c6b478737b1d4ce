"""The ladder: by which of an API's ways a node is served, or why it is not.

One function decides, `rung_of`. What refuses a node before it is queued, what serves it and what explains it all ask
that one, so nothing is served otherwise than it was explained. Knows no connection and builds no request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from sglang_lite.lang.backend.capabilities import CONSTRAINT_NAMES, Capabilities
from sglang_lite.lang.backend.native_rungs import native_rungs
from sglang_lite.lang.backend.object_constraints import NUMBERS, form_of
from sglang_lite.lang.backend.profile import Profile
from sglang_lite.lang.backend.rung import REPAIRS, Asked, Policy, Refusal, Rung
from sglang_lite.lang.backend.rung_parameters import with_parameters
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
    Unset,
)

# Kinds that are ever served remotely. (One over several nodes is continued in mid-turn; what stands in order is how
# reasoning before a value is written, and such servers send that apart.)
SERVED: Final = frozenset(CONSTRAINT_NAMES) - {Continuation, InOrder}
ANY_CHOICE: Final = Choices(("a", "b"))
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


def rung_of(profile: Profile, policy: Policy, asked: Asked) -> Rung | Refusal:
    """The rung on which a node is served by a model, or why it is refused."""
    if _stops_a_value(asked):
        return Refusal("stop together with a constraint", "Leave stop out.")
    found = _constrained(profile, policy, asked)
    return found if isinstance(found, Refusal) else with_parameters(found, profile, policy, asked)


def _stops_a_value(asked: Asked) -> bool:
    """Tells whether a stop could cut a value. Those of a number, which ends by itself, can't."""
    stops = asked.params.stop
    if isinstance(stops, Unset) or asked.constraint is None:
        return False
    number = isinstance(asked.constraint, Number) or form_of(asked.constraint) in NUMBERS
    return not number or not set(stops) <= set(NUMBER_STOPS)


def _constrained(profile: Profile, policy: Policy, asked: Asked) -> Rung | Refusal:
    constraint = asked.constraint
    if constraint is None:
        return Rung("free", profile.api)
    possible = list(native_rungs(profile, asked))
    rungs = [way for way in possible if isinstance(way, Rung)]
    if policy != "strict" and not asked.scores and type(constraint) in SERVED and profile.api != "completions":
        rungs.append(_repaired(profile, asked))  # but for a base model, which is told nothing
    if rungs:
        return _or_else(rungs, profile, policy, asked)
    unfit = next((way for way in possible if isinstance(way, Refusal)), None)
    if unfit is not None:
        return unfit
    if asked.scores:
        return Refusal("the choices' probabilities", _SCORED)
    if asked.kind == "select":
        return Refusal("select", _TOKENS if profile.api == "completions" else _instead(profile))
    return Refusal(CONSTRAINT_NAMES[type(constraint)], _instead(profile))


_SCORED = (
    "It only picks a choice, or has probabilities only for choices that begin with different characters. Leave "
    "scores out (choices_method, temperature, multi), or use a local engine."
)
_TOKENS = (
    "Give its tokenizer: OpenAI(…, tokenizer=tiktoken.encoding_for_model(…)). Or generate text and compare, "
    "or use another backend."
)


def _or_else(rungs: Sequence[Rung], profile: Profile, policy: Policy, asked: Asked) -> Rung:
    """The first rung. One that shows only after the call that it is of no use has the next one behind it."""
    first, *others = rungs
    if first.name != "token_logprobs" or asked.scores:
        return first
    behind = (with_parameters(each, profile, policy, asked) for each in others)
    other = next((each for each in behind if isinstance(each, Rung)), None)
    if other is None:
        return first
    return replace(first, otherwise=other, calls=(1, 1 + other.calls[1]))


def _repaired(profile: Profile, asked: Asked) -> Rung:
    """The last rung: the model is told what is wanted, and, if need be, what was wrong with its answer. A schema that
    only strict outputs don't take is sent as a hint."""
    assert asked.constraint is not None
    name = CONSTRAINT_NAMES[type(asked.constraint)]
    warning = f"{name} is not enforced by the provider: it is stated in the prompt, checked and asked for again"
    hint = form_of(asked.constraint) if profile.api == "chat" and profile.takes("json_schema") else None
    return Rung("repair", profile.api, False, (1, 1 + REPAIRS), form=hint, strict=False, warnings=(warning,))


def _instead(profile: Profile) -> str:
    kinds = kinds_served(profile, "strict")
    if not kinds:
        known = "" if profile.refuses("json_schema") else "Whether it enforces one is not known: set profile=. "
        return f'{known}Leave it out, use policy="emulate", or another backend for this node: gen(backend=…).'
    enforced = ", ".join(sorted(CONSTRAINT_NAMES[kind] for kind in kinds))
    other = 'use policy="emulate", which checks and asks again, or another backend for this node: gen(backend=…).'
    return f"It enforces: {enforced}. Or {other}"


def kinds_served(profile: Profile, policy: Policy) -> frozenset[type]:
    """Kinds of constraint for which there is a rung."""
    if policy != "strict" and profile.api != "completions":
        return SERVED
    return frozenset(kind for kind, each in _SAMPLES.items() if any(native_rungs(profile, Asked(constraint=each))))


def capabilities_of(profile: Profile, policy: Policy) -> Capabilities:
    """Capabilities of a backend of the profile, in the words that the language asks in."""
    selection = rung_of(profile, policy, Asked("select", constraint=ANY_CHOICE))
    scored = rung_of(profile, policy, Asked("select", constraint=ANY_CHOICE, scores=True))
    return Capabilities(
        kinds_served(profile, policy), profile.params, select=isinstance(selection, Rung),
        scores=isinstance(scored, Rung), continues=profile.takes("continues"),
        prefill=profile.takes("prefill") or profile.takes("continue_final_message"), images=profile.takes("images"),
    )  # fmt: skip


def turn_rules_of(profile: Profile, policy: Policy) -> TurnRules:
    """Rules of a backend of the profile for several generations in a turn."""
    can = capabilities_of(profile, policy)
    begun: Begun = "continued" if can.continues or can.prefill else "refused" if policy == "strict" else "asked"
    constrained = can.continues or profile.takes("continue_final_message")
    kept = kinds_served(profile, "strict")
    return TurnRules(begun, JsonSchema in kept, constrained, OneOf in kept)
