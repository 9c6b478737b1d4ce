"""Rungs of a selection alone: what a model has for a choice among texts, beside what keeps a constraint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sglang_lite.lang.backend.profile import Profile
from sglang_lite.lang.backend.rung import Asked, Refusal, Rung
from sglang_lite.protocol import Choices

_ONE_TOKEN = ("chat", "generate_content")  # APIs of chat models that are asked for one token; others want more
_MOST_ALTERNATIVES = 20  # of a token, that OpenAI's protocol tells


def selection_rungs(profile: Profile, asked: Asked) -> Iterator[Rung | Refusal]:
    """Ways in the order in which they are tried; a Refusal where the choices are the reason that there is none."""
    assert isinstance(asked.constraint, Choices)
    choices = asked.constraint.options
    if profile.takes("decisions") and 2 <= len(choices) <= profile.limits.get("choices", 0) and asked.effort is None:
        yield Rung("decisions", profile.api)
    if _tells_first_tokens(profile, asked) and differ_at_once(choices):
        most = min(profile.limits.get("top_logprobs_num", _MOST_ALTERNATIVES), _MOST_ALTERNATIVES)
        yield Rung("token_logprobs", profile.api, field=most)
    if profile.takes("logit_bias_steps") and not asked.scores:
        if any(other != each and other.startswith(each) for each in choices for other in choices):
            told = "Use choices where none begins with another, or another backend for this node: gen(backend=…)."
            yield Refusal("a choice that begins with another one", told)
        else:  # a call where the tokens of those that are left differ
            yield Rung("logit_bias_steps", profile.api, calls=(min(1, len(choices) - 1), len(choices) - 1))


def _tells_first_tokens(profile: Profile, asked: Asked) -> bool:
    """Tells whether a chat model's first token is the first of its answer, with log-probabilities. One that may reason
    may do that first: it is asked only where nothing else gives what is asked for."""
    if profile.api not in _ONE_TOKEN or asked.effort is not None:
        return False
    told = profile.takes("return_logprob") and profile.takes("top_logprobs_num")
    return told and (asked.scores or not profile.takes("reasoning_effort"))


def differ_at_once(choices: Sequence[str]) -> bool:
    """Tells whether no two of several texts can begin with the same token, however they are tokenised: their first
    characters differ. Blanks before them don't count."""
    first = {choice.lstrip()[:1] for choice in choices}
    return len(choices) > 1 and len(first) == len(choices) and "" not in first
