"""Checks `greedy` and `served`: compare float32 with transformers' code, and the served format with
float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from sglang_lite.commands.verify.engines import GreedyAnswer, answer_greedily, score_answers
from sglang_lite.commands.verify.records import Check, Subject
from sglang_lite.commands.verify.reference import ReferenceModel, largest_or_infinite
from sglang_lite.commands.verify.texts import PROMPTS
from sglang_lite.engine.engine import Engine
from sglang_lite.protocol import SglError
from sglang_lite.text.chat_template import JinjaTemplate

TOKENS: Final = 16  # of each answer
TOLERANCE: Final = 1e-3  # largest difference of log-probabilities in float32, in nats
# log-probabilities this close may swap places within the tolerance
_NEAR_TIE: Final = 2 * TOLERANCE
# The served format is broken if it agrees with float32 on fewer tokens, or differs by more nats on
# average. Rounding to 4 bits changes a few tokens in ten; a wrong scale or layer changes nearly
# all.
_FEWEST_EQUAL: Final = 0.5
_LARGEST_MEAN: Final = 1.0
_CHATS: Final = 10


def encode_prompts(subject: Subject) -> list[list[int]]:
    """Encodes the 30 prompts with our tokenizer; both sides get the same ids."""
    tokenizer = subject.files.tokenizer
    texts = list(PROMPTS)
    if tokenizer.chat_template is not None:
        try:
            template = JinjaTemplate(tokenizer.chat_template, tokenizer.special_tokens)
            for i in range(_CHATS):
                texts[i] = template.render(
                    [{"role": "user", "content": texts[i]}], add_generation_prompt=True
                )
        except SglError:  # the check `template` reports this
            texts = list(PROMPTS)
    limit = max(2, subject.context_length - TOKENS - 1)
    return [tokenizer.encode(text)[:limit] or [0] for text in texts]


def check_greedy(model: ReferenceModel, answers: Sequence[GreedyAnswer]) -> Check:
    """Compares greedy answers with the tokens that transformers' code would have chosen."""
    found = [model.compare(answer) for answer in answers]
    worst = largest_or_infinite(each.difference for each in found)
    partings = {i: each.parting for i, each in enumerate(found, 1) if each.parting is not None}
    summary = (
        f"{len(found) - len(partings)} of {len(found)} prompts have transformers' greedy ids in float32, "
        f"largest difference of log-probabilities {worst:.1e}"
    )
    for i, parting in partings.items():
        kind = "a near tie" if parting.margin <= _NEAR_TIE else "no near tie"
        summary += f"; prompt {i} parts at token {parting.position + 1} ({kind}, margin {parting.margin:.4f})"
    apart = any(not parting.margin <= _NEAR_TIE for parting in partings.values())
    failed = apart or not worst <= TOLERANCE
    figures = {
        "prompts": len(found),
        "equal": len(found) - len(partings),
        "tokens": TOKENS,
        "largest_difference": worst,
        "tolerance": TOLERANCE,
        "near_tie": _NEAR_TIE,
        "differences": [each.difference for each in found],
        "partings": [{"prompt": i, **asdict(parting)} for i, parting in partings.items()],
    }
    return Check("greedy", "failed" if failed else "passed", summary, figures)


@dataclass(frozen=True, slots=True)
class Distance:
    """Distance of an engine from another engine's greedy answers.

    Attributes:
        equal_share: share of the answers' tokens that are also the engine's likeliest after the
            same tokens.
        mean, worst: mean and largest difference of the tokens' log-probabilities, in nats.
        equal_answers: number of whole answers that the engine also gives.
    """

    equal_share: float
    mean: float
    worst: float
    equal_answers: int


def measure_distance_to_answers(engine: Engine, answers: Sequence[GreedyAnswer]) -> Distance:
    """Measures how far an engine is from greedy answers of another engine. Compares the engine's
    log-probabilities of the answers' tokens, and its own greedy answers to the same prompts.
    """
    differences = []
    equal = 0
    for answer, read in zip(answers, score_answers(engine, answers)):
        for (logprob, likeliest), exact, token in zip(read, answer.token_logprobs, answer.tokens):
            differences.append(abs(logprob - exact))
            equal += likeliest == token
    longest = max(len(answer.tokens) for answer in answers)
    own = answer_greedily(engine, [answer.prompt for answer in answers], longest)
    same = sum(one.tokens == other.tokens for one, other in zip(own, answers))
    count = len(differences)
    return Distance(equal / count, sum(differences) / count, largest_or_infinite(differences), same)


def check_served_number_format(
    subject: Subject, engine: Engine, answers: Sequence[GreedyAnswer]
) -> Check:
    """Reports how much results in the served number format differ from results in float32."""
    dtype = subject.description.dtype
    found = measure_distance_to_answers(engine, answers)
    summary = (
        f"{dtype}: {found.equal_share:.1%} of the greedy tokens are float32's, log-probabilities differ by "
        f"{found.mean:.3f} in the mean and {found.worst:.3f} at most; {found.equal_answers} of {len(answers)} whole "
        "answers are the same"
    )
    broken = not (found.equal_share >= _FEWEST_EQUAL and found.mean <= _LARGEST_MEAN)
    figures = {
        "dtype": dtype,
        "device": subject.description.device,
        "products": subject.description.products,
        "equal_share": found.equal_share,
        "mean_difference": found.mean,
        "largest_difference": found.worst,
        "equal_answers": found.equal_answers,
        "answers": len(answers),
        "fewest_equal": _FEWEST_EQUAL,
        "largest_mean": _LARGEST_MEAN,
    }
    return Check("served", "failed" if broken else "passed", summary, figures)
