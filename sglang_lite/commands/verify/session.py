"""The order of the checks: one model in memory at a time, and each check reported as soon as it is
made.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Collection, Iterator
from typing import Final

from sglang_lite.commands.verify.check_names import CHECKS
from sglang_lite.commands.verify.engines import (
    GreedyAnswer,
    answer_greedily,
    start_exact_engine,
    start_served_engine,
)
from sglang_lite.commands.verify.greedy import (
    TOKENS,
    check_greedy,
    check_served_number_format,
    encode_prompts,
)
from sglang_lite.commands.verify.long_prompt import TOKENS as LONG_TOKENS
from sglang_lite.commands.verify.long_prompt import (
    answer_long_prompt,
    check_long_prompt,
    long_prompt_length,
)
from sglang_lite.commands.verify.recipes import check_recipes
from sglang_lite.commands.verify.records import Check, Subject, Unread
from sglang_lite.commands.verify.reference import read_model, read_tokenizer
from sglang_lite.commands.verify.speed import child_processes, measure_speed, time_to_first_token
from sglang_lite.commands.verify.subject import explain_memory_shortage, min_float32_engine_bytes
from sglang_lite.commands.verify.tasks import check_tasks
from sglang_lite.commands.verify.template import check_template
from sglang_lite.commands.verify.tokens import check_tokenizer
from sglang_lite.protocol import SglError

_EXACT: Final = frozenset(("greedy", "long", "served"))  # these need answers in float32
_SERVED: Final = frozenset(("served", "tasks", "recipes", "speed"))  # these need the served engine


def run_checks(subject: Subject, wanted: Collection[str], *, long: bool) -> Iterator[Check]:
    """Yields the checks in the order of CHECKS, each as soon as it is made.

    Args:
        wanted: names of the checks to make; the others are yielded as left out.
        long: whether the long prompt fills the whole context.
    """
    yield from _make_checks(subject, frozenset(wanted), long)
    for name in CHECKS:
        if name not in wanted:
            yield Check(name, "left out", "not asked for (--only)")


def _make_checks(subject: Subject, wanted: frozenset[str], long: bool) -> Iterator[Check]:
    if wanted & {"template", "tokenizer"}:
        theirs = read_tokenizer(subject)
        if "template" in wanted:
            yield check_template(subject, theirs)
        if "tokenizer" in wanted:
            yield check_tokenizer(subject, theirs)
        del theirs
    answers: list[GreedyAnswer] = []
    if exact := wanted & _EXACT:
        reason = explain_memory_shortage(
            subject, min_float32_engine_bytes(subject), "an engine in float32"
        )
        if reason:
            yield from (
                Check(name, "left out", reason)
                for name in ("greedy", "long", "served")
                if name in exact
            )
        else:
            length = long_prompt_length(subject, whole=long) if "long" in wanted else 0
            try:
                answers, long_answer = _answer_in_float32(subject, length)
            except SglError as error:
                yield from (
                    Check(name, "failed", f"in float32: {error}")
                    for name in CHECKS
                    if name in exact
                )
            else:
                yield from _compare_with_transformers(subject, wanted, answers, long_answer)
    if served := (wanted & _SERVED if answers else wanted & _SERVED - {"served"}):
        left: list[str] = [name for name in CHECKS if name in served]
        try:
            for check in _check_served_engine(subject, served, answers):
                left.remove(check.name)
                yield check
        except SglError as error:
            yield from (Check(name, "failed", f"the engine failed: {error}") for name in left)


def _answer_in_float32(
    subject: Subject, length: int
) -> tuple[list[GreedyAnswer], GreedyAnswer | None]:
    """Generates the answers with a float32 engine. The engine is closed before the function
    returns.
    """
    prompts = encode_prompts(subject)
    longest = max(length + LONG_TOKENS, max(map(len, prompts)) + TOKENS) + 1
    with start_exact_engine(subject, min(longest, subject.context_length)) as engine:
        answers = answer_greedily(engine, prompts, TOKENS)
        return answers, answer_long_prompt(subject, engine, length) if length else None


def _compare_with_transformers(
    subject: Subject,
    wanted: frozenset[str],
    answers: list[GreedyAnswer],
    long_answer: GreedyAnswer | None,
) -> Iterator[Check]:
    if not wanted & {"greedy", "long"}:
        return
    model = read_model(subject)
    if "greedy" in wanted:
        if isinstance(model, Unread):
            yield Check("greedy", "left out", model.reason)
        else:
            yield check_greedy(model, answers)
    if long_answer is not None:
        yield check_long_prompt(subject, model, long_answer)
    del model
    gc.collect()


def _check_served_engine(
    subject: Subject, wanted: frozenset[str], answers: list[GreedyAnswer]
) -> Iterator[Check]:
    before = child_processes()
    started = time.perf_counter()
    with start_served_engine(subject) as engine:
        waited = time_to_first_token(engine, started)
        if "served" in wanted:
            yield check_served_number_format(subject, engine, answers)
        if "tasks" in wanted:
            yield check_tasks(engine)
        if "recipes" in wanted:
            yield check_recipes(subject, engine)
        if "speed" in wanted:
            yield measure_speed(subject, engine, waited, sorted(child_processes() - before))
