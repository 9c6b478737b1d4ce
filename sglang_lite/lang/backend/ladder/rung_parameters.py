"""Parameters on a rung: which ones are sent, emulated, left out or refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from sglang_lite.lang.backend.capabilities import CONSTRAINT_NAMES
from sglang_lite.lang.backend.ladder.rung import Demands, Policy, Refusal, Rung
from sglang_lite.lang.backend.profiles.profile import Profile
from sglang_lite.protocol import Unset
from sglang_lite.protocol.sampling import given_values

# Parameters of OpenAI's Responses API (openai 3.54.0: types/responses/response_create_params.py).
RESPONSES_PARAMS: Final = frozenset({"max_tokens", "temperature", "top_p"})
# Parameters that this API has too, but for answers in text alone.
_OF_TEXT: Final = frozenset({"return_logprob", "top_logprobs_num", "return_text_in_logprobs"})


def with_parameters(rung: Rung, profile: Profile, policy: Policy, demands: Demands) -> Rung | Refusal:
    """Rung adapted to a node's parameters, or the reason why they are refused."""
    params = demands.params
    found = _with_effort(rung, profile, policy, demands)
    if isinstance(found, Refusal):
        return found
    rung = found
    stops = () if isinstance(params.stop, Unset) or demands.constraint is not None else params.stop
    for name in given_values(params):
        here = rung.api != "responses" or name in RESPONSES_PARAMS or (rung.field is None and name in _OF_TEXT)
        if name == "stop" or (profile.supports(name) and here):
            continue
        without = _without(rung, profile, policy, name, demands)
        if isinstance(without, Refusal):
            return without
        rung = without
    both = not isinstance(params.temperature, Unset) and not isinstance(params.top_p, Unset)
    if both and not profile.supports("temperature_with_top_p") and "top_p" not in rung.left_out:
        if policy != "warn":
            return Refusal("temperature and top_p together", "Set one of them.")
        rung = _left_out(rung, "top_p")
    return _stopped(rung, profile, policy, stops) if stops else rung


def _with_effort(rung: Rung, profile: Profile, policy: Policy, demands: Demands) -> Rung | Refusal:
    """Rung with the amount of reasoning. If the model is not known to support that parameter, the parameter is left out
    or refused, because the API would report an error or ignore it."""
    if demands.effort is None or profile.supports("reasoning_effort"):
        return replace(rung, effort=demands.effort)
    if policy == "warn":
        warning = "reasoning_effort is left out: the model does not accept it"
        return replace(rung, native=False, warnings=(*rung.warnings, warning))
    return Refusal("reasoning_effort", f"Leave it out of the backend. {_known(profile, 'reasoning_effort')}".strip())


def _without(rung: Rung, profile: Profile, policy: Policy, name: str, demands: Demands) -> Rung | Refusal:
    """Rung adapted to a parameter that the model or the rung does not support, or the refusal."""
    if policy != "strict" and name == "n":
        count = demands.params.samples
        best, worst = rung.calls
        warnings = (*rung.warnings, f"{count} samples are {count} calls")
        return replace(rung, native=False, samples=count, calls=(best * count, worst * count), warnings=warnings)
    if policy == "warn":
        return _left_out(rung, name)
    if profile.supports(name) and demands.constraint is not None:
        return Refusal(f"{name} together with {CONSTRAINT_NAMES[type(demands.constraint)]}", f"Leave {name} out.")
    return Refusal(
        name,
        f"Leave it out, or use another backend for this node: gen(backend=…). {_known(profile, name)}{_takes(profile)}",
    )


def _left_out(rung: Rung, name: str) -> Rung:
    warning = f"{name} is left out: the model does not accept it"
    return replace(rung, native=False, left_out=(*rung.left_out, name), warnings=(*rung.warnings, warning))


def _stopped(rung: Rung, profile: Profile, policy: Policy, stops: tuple[str, ...]) -> Rung | Refusal:
    limit = profile.limits.get("stop")
    if not profile.supports("stop") or rung.api == "responses":
        feature, instead = "stop", f"Leave it out. {_known(profile, 'stop')}{_takes(profile)}"
    elif limit is not None and len(stops) > limit:
        feature, instead = f"{len(stops)} stop strings", f"Give at most {limit}."
    elif profile.lacks("blank_stops") and not all(map(str.strip, stops)):
        feature = "a stop string of whitespace only"
        instead = "Ask for one line in the prompt, or use a stop string that is visible."
    else:
        return rung
    if policy == "strict":
        return Refusal(feature, instead)
    warning = f"{feature}: the whole answer is generated and cut afterwards"
    return replace(
        rung, native=False, stops=stops, left_out=(*rung.left_out, "stop"), warnings=(*rung.warnings, warning)
    )


def _known(profile: Profile, name: str) -> str:
    if name in profile.features:
        return ""
    return f"Whether it accepts {name} is not known: set profile= or capabilities=. "


def _takes(profile: Profile) -> str:
    return f"It accepts: {', '.join(sorted(profile.params)) or 'no parameters'}."
