"""Rungs of selections alone: ways of choosing among texts, in addition to the rungs that enforce a constraint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sglang_lite.lang.backend.ladder.rung import Demands, Refusal, Rung
from sglang_lite.lang.backend.profiles.profile import Profile
from sglang_lite.protocol import Choices

_ONE_TOKEN = ("chat", "generate_content")  # chat APIs that generate a single token on request; others need more
# Maximum number of alternatives that OpenAI's protocol reports for a token.
_MAX_ALTERNATIVES = 20


def selection_rungs(profile: Profile, demands: Demands) -> Iterator[Rung | Refusal]:
    """Yields rungs in order of preference, and a Refusal if the choices are the reason why a rung is missing."""
    assert isinstance(demands.constraint, Choices)
    choices = demands.constraint.options
    fits = 2 <= len(choices) <= profile.limits.get("choices", 0)
    if profile.supports("decisions") and fits and demands.effort is None:
        yield Rung("decisions", profile.api)
    if _tells_first_tokens(profile, demands) and differ_at_once(choices):
        count = min(profile.limits.get("top_logprobs_num", _MAX_ALTERNATIVES), _MAX_ALTERNATIVES)
        yield Rung("token_logprobs", profile.api, field=count)
    if profile.supports("logit_bias_steps") and not demands.scores:
        if any(other != each and other.startswith(each) for each in choices for other in choices):
            hint = "Use choices where none begins with another, or another backend for this node: gen(backend=…)."
            yield Refusal("a choice that begins with another one", hint)
        else:  # one call for each step at which the remaining choices' tokens differ
            yield Rung("logit_bias_steps", profile.api, calls=(min(1, len(choices) - 1), len(choices) - 1))


def _tells_first_tokens(profile: Profile, demands: Demands) -> bool:
    """True if a chat model's first token is the first of its answer, and has log-probabilities. A model that may reason
    first counts only if scores are needed, because then no other rung can serve the node."""
    if profile.api not in _ONE_TOKEN or demands.effort is not None:
        return False
    logprobs = profile.supports("return_logprob") and profile.supports("top_logprobs_num")
    return logprobs and (demands.scores or not profile.supports("reasoning_effort"))


def differ_at_once(choices: Sequence[str]) -> bool:
    """True if no token can begin two of the texts, however they are tokenised: their first characters differ. Leading
    blanks are ignored."""
    first = {choice.lstrip()[:1] for choice in choices}
    return len(choices) > 1 and len(first) == len(choices) and "" not in first
