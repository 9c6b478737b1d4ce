"""Requests to the decisions endpoint of OpenAI and compatible servers, and its answers: a choice among texts, with
probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from sglang_lite.lang.backend.apis.openai_responses import input_items
from sglang_lite.lang.backend.apis.openai_usage import parse_usage
from sglang_lite.lang.backend.remote.selecting import MIN_LOGPROB
from sglang_lite.protocol import BackendError, ChoiceScore, Prompt, RefusalError, Selection
from sglang_lite.protocol.anything import Foreign, Json

_QUESTION = "Which of these texts is what the assistant says next?"


def decision_request(model: str, prompt: Prompt, choices: Sequence[str]) -> dict[str, Json]:
    """Arguments of `decisions.create` for one question, whose answer is one of the choices."""
    options = [{"value": choice} for choice in choices]
    question = {"type": "choice", "instructions": _QUESTION, "choices": options}
    return {"model": model, "input": input_items(prompt.messages), "questions": [question]}


def decision(response: Foreign, choices: Sequence[str], name: str, seconds: float) -> Selection:
    """Selection with the choices' scores in an answer. Each score is the logarithm of one probability.

    Raises:
        RefusalError: the model refused to answer.
        BackendError: the answer does not name the choices.
    """
    answers: list[Any] = getattr(response, "answers", None) or []
    answer = answers[0] if len(answers) == 1 else None
    if getattr(answer, "type", None) == "refusal":
        raise RefusalError(f"{name} refused to answer.", hint="Change the prompt.")
    found = {each.value: each.probability for each in getattr(answer, "probabilities", None) or ()}
    if set(found) != set(choices):
        raise BackendError(f"{name}: the decision does not name the choices.", hint="Check what listens at base_url.")
    scores = tuple(
        ChoiceScore(choice, (place,), (math.log(found[choice]) if found[choice] > 0 else MIN_LOGPROB,))
        for place, choice in enumerate(choices)
    )
    usage = parse_usage(response.usage)
    usage = msgspec.structs.replace(usage, total_s=seconds)
    return Selection(scores, usage, meta={"model": response.model, "rung": "decisions", "calls": 1})
