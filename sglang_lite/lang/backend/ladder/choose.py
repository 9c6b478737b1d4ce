"""The ladder: the choice of the way by which an API serves a node, or the reason why the node is refused.

Each way is a rung. The best comes first: native structured outputs, a forced tool call, log-probabilities of tokens,
at last an emulation that asks again. One function, `choose_rung`, decides. The check of a node before it is queued,
the call that serves it and `explain` all use it, so the behaviour is always what `explain` reports. Opens no
connection and builds no request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from sglang_lite.lang.backend.capabilities import CONSTRAINT_NAMES, BegunTurns, Capabilities, TurnRules
from sglang_lite.lang.backend.ladder.native_rungs import native_rungs
from sglang_lite.lang.backend.ladder.object_constraints import NUMBER_FORMS, json_form
from sglang_lite.lang.backend.ladder.rung import REPAIRS, Demands, Policy, Refusal, Rung
from sglang_lite.lang.backend.ladder.rung_parameters import with_parameters
from sglang_lite.lang.backend.profiles.profile import Profile
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

# Types of constraint that remote models ever serve. Not among them: Continuation, which would be continued in mid-turn,
# and InOrder, which describes reasoning before a value, because these servers send reasoning separately.
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


def choose_rung(profile: Profile, policy: Policy, demands: Demands) -> Rung | Refusal:
    """Rung on which a model serves a node, or the reason why the node is refused."""
    if _stops_a_value(demands):
        return Refusal("stop together with a constraint", "Leave stop out.")
    found = _constrained(profile, policy, demands)
    return found if isinstance(found, Refusal) else with_parameters(found, profile, policy, demands)


def _stops_a_value(demands: Demands) -> bool:
    """True if a stop string could cut a constrained value. The stops of a number can't, because a number ends by
    itself."""
    stops = demands.params.stop
    if isinstance(stops, Unset) or demands.constraint is None:
        return False
    number = isinstance(demands.constraint, Number) or json_form(demands.constraint) in NUMBER_FORMS
    return not number or not set(stops) <= set(NUMBER_STOPS)


def _constrained(profile: Profile, policy: Policy, demands: Demands) -> Rung | Refusal:
    constraint = demands.constraint
    if constraint is None:
        return Rung("free", profile.api)
    possible = list(native_rungs(profile, demands))
    rungs = [way for way in possible if isinstance(way, Rung)]
    if policy != "strict" and not demands.scores and type(constraint) in SERVED and profile.api != "completions":
        rungs.append(_repaired(profile, demands))  # not for base models, which follow no instructions
    if rungs:
        return _or_else(rungs, profile, policy, demands)
    unfit = next((way for way in possible if isinstance(way, Refusal)), None)
    if unfit is not None:
        return unfit
    if demands.scores:
        return Refusal("the choices' probabilities", _SCORED)
    if demands.kind == "select":
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


def _or_else(rungs: Sequence[Rung], profile: Profile, policy: Policy, demands: Demands) -> Rung:
    """First of the rungs. If only a call can show that this rung is of no use, the next rung is attached as a
    fallback."""
    first, *others = rungs
    if first.name != "token_logprobs" or demands.scores:
        return first
    behind = (with_parameters(each, profile, policy, demands) for each in others)
    other = next((each for each in behind if isinstance(each, Rung)), None)
    if other is None:
        return first
    return replace(first, fallback=other, calls=(1, 1 + other.calls[1]))


def _repaired(profile: Profile, demands: Demands) -> Rung:
    """Last rung: the prompt describes the constraint, and an answer that breaks it is shown with its error. A JSON
    schema is also sent as a hint if the API takes schemas and only its strict mode refuses this one."""
    assert demands.constraint is not None
    name = CONSTRAINT_NAMES[type(demands.constraint)]
    warning = f"{name} is not enforced by the provider: it is stated in the prompt, checked and asked for again"
    hint = json_form(demands.constraint) if profile.api == "chat" and profile.supports("json_schema") else None
    return Rung("repair", profile.api, False, (1, 1 + REPAIRS), form=hint, strict=False, warnings=(warning,))


def _instead(profile: Profile) -> str:
    kinds = kinds_served(profile, "strict")
    if not kinds:
        unknown = "" if profile.lacks("json_schema") else "Whether it enforces one is not known: set profile=. "
        return f'{unknown}Leave it out, use policy="emulate", or another backend for this node: gen(backend=…).'
    enforced = ", ".join(sorted(CONSTRAINT_NAMES[kind] for kind in kinds))
    other = 'use policy="emulate", which checks and asks again, or another backend for this node: gen(backend=…).'
    return f"It enforces: {enforced}. Or {other}"


def kinds_served(profile: Profile, policy: Policy) -> frozenset[type]:
    """Types of constraint that a rung of the profile serves."""
    if policy != "strict" and profile.api != "completions":
        return SERVED
    return frozenset(kind for kind, each in _SAMPLES.items() if any(native_rungs(profile, Demands(constraint=each))))


def capabilities_of(profile: Profile, policy: Policy) -> Capabilities:
    """Capabilities of a backend with this profile, in the form that the language checks."""
    selection = choose_rung(profile, policy, Demands("select", constraint=ANY_CHOICE))
    scored = choose_rung(profile, policy, Demands("select", constraint=ANY_CHOICE, scores=True))
    continues, continues_last = profile.supports("continues"), profile.supports("continue_final_message")
    prefill = profile.supports("prefill") or continues_last
    otherwise: BegunTurns = "refused" if policy == "strict" else "asked"
    rules = TurnRules(
        "continued" if continues or prefill else otherwise, "continued" if continues or continues_last else otherwise,
        OneOf in kinds_served(profile, "strict"),
    )  # fmt: skip
    return Capabilities(
        kinds_served(profile, policy), profile.params, select=isinstance(selection, Rung),
        scores=isinstance(scored, Rung), continues=continues, prefill=prefill, images=profile.supports("images"),
        turns=rules, caches_prompts=profile.supports("cache_control") or profile.supports("prompt_cache_key"),
    )  # fmt: skip
