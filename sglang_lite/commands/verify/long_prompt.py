"""Check `long`: compares one long prompt, computed in chunks, with transformers' code or with the
same prompt in one step.
"""

from __future__ import annotations

from typing import Final

from sglang_lite.commands.verify.engines import GreedyAnswer, answer_greedily, start_exact_engine
from sglang_lite.commands.verify.greedy import TOLERANCE
from sglang_lite.commands.verify.records import Check, Subject, Unread
from sglang_lite.commands.verify.reference import ReferenceModel, largest_or_infinite
from sglang_lite.commands.verify.texts import random_prose
from sglang_lite.engine.engine import Engine

TOKENS: Final = 8  # of the answer
_LENGTH: Final = 8_000  # tokens of the prompt, unless the whole context is requested
_READ: Final = 256  # last tokens of the prompt whose log-probabilities are compared
_NEAR_TIE: Final = 2 * TOLERANCE


def long_prompt_length(subject: Subject, *, whole: bool) -> int:
    """Returns the length of the long prompt in tokens: 8,000, or less if the context is shorter. If
    `whole` is set, the prompt and its answer fill the context.
    """
    longest = subject.context_length - TOKENS - 1
    return longest if whole else min(_LENGTH, longest)


def answer_long_prompt(subject: Subject, engine: Engine, length: int) -> GreedyAnswer:
    """Generates the answer to a prompt of `length` tokens."""
    encode = subject.files.tokenizer.encode
    sentences = length // 8 + 8
    while len(ids := encode(random_prose(sentences))) < length:
        sentences *= 2
    return answer_greedily(engine, [ids[:length]], TOKENS, max(1, length - _READ))[0]


def check_long_prompt(
    subject: Subject, model: ReferenceModel | Unread, answer: GreedyAnswer
) -> Check:
    """Compares the answer to the long prompt with transformers' code. If transformers' code can't
    run, compares the answer with an engine that computes the prompt in one step.
    """
    length = len(answer.prompt)
    reason = (
        model.reason
        if isinstance(model, Unread)
        else model.explain_prompt_memory_shortage(subject, length + TOKENS)
    )
    if isinstance(model, Unread) or reason:
        return _compare_with_single_prefill(subject, answer, reason)
    found = model.compare(answer)
    apart = found.parting is not None and not found.parting.margin <= _NEAR_TIE
    tokens = (
        "the same greedy ids"
        if found.parting is None
        else f"other ids from token {found.parting.position + 1} on"
    )
    if found.parting is not None:
        tokens += f" ({'no ' if apart else 'a '}near tie, margin {found.parting.margin:.4f})"
    return _build_long_check(length, "transformers in float32", tokens, found.difference, apart)


def _compare_with_single_prefill(subject: Subject, answer: GreedyAnswer, reason: str) -> Check:
    with start_exact_engine(subject, len(answer.ids) + 1, whole=True) as engine:
        other = answer_greedily(engine, [answer.prompt], TOKENS, answer.start)[0]
    worst = largest_or_infinite(abs(one - two) for one, two in zip(answer.logprobs, other.logprobs))
    same = answer.tokens == other.tokens
    tokens = "the same greedy ids" if same else "other greedy ids"
    return _build_long_check(
        len(answer.prompt), f"our own prefill in one step ({reason})", tokens, worst, not same
    )


def _build_long_check(length: int, beside: str, tokens: str, worst: float, apart: bool) -> Check:
    failed = apart or not worst <= TOLERANCE
    summary = (
        f"{length:,} tokens in chunks beside {beside}: {tokens}, largest difference {worst:.1e}"
    )
    figures = {
        "tokens": length,
        "beside": beside,
        "largest_difference": worst,
        "tolerance": TOLERANCE,
    }
    return Check("long", "failed" if failed else "passed", summary, figures)
