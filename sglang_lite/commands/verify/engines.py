"""Engines of a verification, and the requests made to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from sglang_lite.commands.verify.records import Subject
from sglang_lite.engine.engine import Engine
from sglang_lite.protocol import Generation, SamplingParams

T = TypeVar("T")
R = TypeVar("R")
ROWS = 8  # simultaneous requests
_TOP = 5  # number of likeliest tokens that are compared


@dataclass(frozen=True, slots=True)
class GreedyAnswer:
    """Greedy answer to a prompt, with its log-probabilities.

    Attributes:
        prompt: ids of the prompt.
        tokens: ids of the answer.
        start: index of the first token of prompt and answer that has a log-probability.
        logprobs: log-probability of each token from there on.
        top: likeliest tokens in each of these positions, as (log-probability, id).
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    start: int
    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[float, int], ...], ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of prompt and answer."""
        return self.prompt + self.tokens

    @property
    def token_logprobs(self) -> tuple[float, ...]:
        """Log-probabilities of the answer's tokens."""
        return self.logprobs[len(self.prompt) - self.start :]


def start_exact_engine(subject: Subject, longest: int, *, whole: bool = False) -> Engine:
    """Starts an engine that computes in float32.

    Args:
        longest: longest sequence that the engine will receive, in tokens.
        whole: whether the engine computes each prompt in one step, not in chunks.
    """
    return Engine(
        str(subject.path),
        dtype="float32",
        context_length=longest,
        max_total_tokens=longest + ROWS * 512,
        max_running=ROWS,
        step_tokens=-1 if whole else None,
        log_level="error",
    )


def start_served_engine(subject: Subject) -> Engine:
    """Starts the engine that `Engine(NAME)` would start, with the given settings."""
    settings: dict[str, Any] = dict(subject.settings)
    return Engine(str(subject.path), log_level="error", **settings)


def answer_greedily(
    engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, start: int = 1
) -> list[GreedyAnswer]:
    """Generates greedily with log-probabilities, several prompts at the same time.

    Args:
        tokens: number of tokens of each answer; an end-of-sequence token doesn't end it.
        start: index of the first token of a prompt whose log-probability is wanted.
    """
    params = SamplingParams(
        max_tokens=tokens,
        temperature=0,
        ignore_eos=True,
        return_logprob=True,
        logprob_start_len=start,
        top_logprobs_num=_TOP,
    )
    found = call_in_parallel(partial(engine.complete, params=params), prompts)
    return [_greedy_answer(tuple(prompt), start, each) for prompt, each in zip(prompts, found)]


def score_answers(engine: Engine, answers: Sequence[GreedyAnswer]) -> list[list[tuple[float, int]]]:
    """Scores answers with an engine. For each token of an answer, returns the log-probability that
    the engine gives it after the preceding tokens, and the token that the engine considers
    likeliest in its place.
    """

    def read(answer: GreedyAnswer) -> list[tuple[float, int]]:
        params = SamplingParams(
            max_tokens=1,
            temperature=0,
            return_logprob=True,
            logprob_start_len=len(answer.prompt),
            top_logprobs_num=1,
        )
        found = engine.complete(answer.ids, params).prompt_logprobs
        return [(entry.logprob or 0.0, entry.top[0][1]) for entry in found]

    return call_in_parallel(read, answers)


def call_in_parallel(call: Callable[[T], R], arguments: Iterable[T]) -> list[R]:
    """Calls a function of an engine for each argument, ROWS calls at the same time, and returns the
    results. An interrupt doesn't wait for running calls; they end with the engine.
    """
    pool = ThreadPoolExecutor(ROWS)
    try:
        return list(pool.map(call, arguments))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _greedy_answer(prompt: tuple[int, ...], start: int, found: Generation) -> GreedyAnswer:
    entries = (*found.prompt_logprobs, *found.output_logprobs)
    top = tuple(tuple((value, token) for value, token, _ in entry.top) for entry in entries)
    return GreedyAnswer(
        prompt, found.token_ids, start, tuple(entry.logprob or 0.0 for entry in entries), top
    )
