"""Serves a node with its strategy: makes the calls, checks every answer, and records the strategy
in the metadata.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_lite.constraints.matching import validate
from sglang_lite.errors import Origin
from sglang_lite.lang.backend.apis.api import GrammarTool, JsonTool, Tools
from sglang_lite.lang.backend.base import collect_single_answer
from sglang_lite.lang.backend.ladder.choose import constraint_to_gbnf, format_schema_for_prompt
from sglang_lite.lang.backend.ladder.object_constraints import unwrap_answer
from sglang_lite.lang.backend.ladder.strategy import REPAIRS, Strategy
from sglang_lite.lang.backend.token_counts import add_unreported_usage
from sglang_lite.lang.results import with_warnings
from sglang_lite.protocol import (
    UNSET,
    Choices,
    Constraint,
    Delta,
    Generation,
    JsonSchema,
    Lark,
    Message,
    Number,
    Prompt,
    Regex,
    SamplingParams,
    SglError,
    TruncatedError,
    ValueValidationError,
)
from sglang_lite.protocol.anything import Json
from sglang_lite.protocol.results import total_usage

if TYPE_CHECKING:
    from sglang_lite.lang.backend.remote.backend import RemoteBackend


async def serve(
    backend: RemoteBackend,
    prompt: Prompt,
    params: SamplingParams,
    constraint: Constraint | None,
    strategy: Strategy,
    *,
    stream: bool,
) -> AsyncGenerator[Delta | Generation, None]:
    """Serves a generation with its strategy, and yields the samples. If `stream` is True, yields
    deltas first, unless the text has to be complete before it can be converted.

    Raises:
        ValueValidationError: an answer breaks the constraint.
    """
    params = msgspec.structs.replace(params, **dict.fromkeys(strategy.left_out, UNSET))
    if constraint is not None:
        # Only a number can have stops here, and a number ends on its own.
        params = msgspec.structs.replace(params, stop=UNSET)
    if strategy.samples > 1:
        params = msgspec.structs.replace(params, n=UNSET)
        single = replace(strategy, samples=1)
        calls = [
            serve(backend, prompt, params, constraint, single, stream=False)
            for _ in range(strategy.samples)
        ]
        for index, each in enumerate(
            await _await_all_calls([collect_single_answer(each) for each in calls])
        ):
            yield msgspec.structs.replace(each, index=index)
    elif strategy.name == "repair":
        assert constraint is not None
        yield await _repair_until_valid(backend, prompt, params, constraint, strategy)
    else:
        wrapped = strategy.form is not None and strategy.form.wrapped
        whole = (
            strategy.stops or wrapped or isinstance(strategy.shape, Tools | JsonTool | GrammarTool)
        )
        shown = stream and not whole  # other answers are only shown when they are complete
        async for event in backend.call_api(
            prompt, params, strategy, constrained=constraint is not None, stream=shown
        ):
            if isinstance(event, Generation):
                event = _finish_answer(event, constraint, strategy, 1)
            yield event


async def _await_all_calls(calls: Sequence[Coroutine[Any, Any, Generation]]) -> list[Generation]:
    """Awaits all calls and returns their answers. If some fail, raises the first error once all
    have ended.
    """
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    error = next((each for each in outcomes if isinstance(each, BaseException)), None)
    if error is not None:
        for each in outcomes:
            if (
                each is not error
                and isinstance(each, Generation | SglError)
                and each.usage is not None
            ):
                add_unreported_usage(each.usage)
        raise error
    return [each for each in outcomes if isinstance(each, Generation)]


def _finish_answer(
    answer: Generation, constraint: Constraint | None, strategy: Strategy, calls: int
) -> Generation:
    """Prepares an answer for its node: checks it, cuts it at the strategy's stop strings, and adds
    the strategy to its metadata.

    Raises:
        ValueValidationError: the answer breaks the constraint.
    """
    try:
        text = (
            answer.text
            if constraint is None
            else _unwrap_and_validate(constraint, strategy, answer.text)
        )
    except ValueValidationError as error:
        error.origin = Origin.of(answer.meta)
        error.usage = answer.usage
        raise
    found: dict[str, Any] = {
        "text": text,
        "meta": add_strategy_to_meta(answer.meta, strategy, calls),
    }
    if strategy.stops:
        at, stop = min(
            ((text.find(stop), stop) for stop in strategy.stops if stop in text), default=(-1, "")
        )
        if at >= 0:
            found |= {
                "text": text[:at],
                "finish_reason": "stop",
                "matched": stop,
                "output_logprobs": (),
            }
            if answer.output_logprobs:
                found["meta"] = with_warnings(
                    found["meta"], "logprobs: left out, as the finished text was cut at a stop"
                )
    return msgspec.structs.replace(answer, **found)


def add_strategy_to_meta(
    meta: Mapping[str, Json], strategy: Strategy, calls: int
) -> dict[str, Json]:
    """Returns the metadata of a node. They consist of the metadata of its last call, the strategy's
    name and warnings, and the number of calls.
    """
    return with_warnings({**meta, "strategy": strategy.name, "calls": calls}, *strategy.warnings)


def _unwrap_and_validate(constraint: Constraint, strategy: Strategy, text: str) -> str:
    if strategy.form is not None:
        text = unwrap_answer(constraint, strategy.form, text)
        if strategy.form.wrapped or strategy.name != "repair":
            return text  # objects are validated later, like all values
    if strategy.name == "tools":
        return text  # calls, too; a tool loop may show invalid ones to the model
    validate(constraint, text)
    return text


# ------------------------------------------------------------------------------------------ repairs


async def _repair_until_valid(
    backend: RemoteBackend,
    prompt: Prompt,
    params: SamplingParams,
    constraint: Constraint,
    strategy: Strategy,
) -> Generation:
    """Asks until an answer satisfies the constraint. The first request describes the constraint.
    Each later one shows the model what was wrong with its last answer.

    Raises:
        ValueValidationError: the last answer also breaks the constraint.
    """
    shown = append_to_user_turn(prompt, _constraint_instruction(constraint))
    usages = []
    current = shown
    for attempt in range(1 + REPAIRS):
        # one that is cut is repaired
        events = backend.call_api(current, params, strategy, constrained=False, stream=False)
        answer = await collect_single_answer(events)
        usages.append(answer.usage)
        plain = msgspec.structs.replace(
            answer, text=_strip_fences(answer.text), usage=total_usage(usages)
        )
        try:
            if plain.finish_reason == "length":
                problem = f"it was cut after {answer.usage.completion_tokens} tokens. It has to be shorter."
                raise TruncatedError(
                    problem, text=plain.text, hint="Raise max_tokens, or ask for less."
                )
            return _finish_answer(plain, constraint, strategy, attempt + 1)
        except ValueValidationError as error:
            usages[-1] = msgspec.structs.replace(
                answer.usage, thrown_away_tokens=answer.usage.completion_tokens
            )
            if attempt == REPAIRS:
                problem = (
                    f"{attempt + 1} answers broke the constraint; the last one: {error.message}"
                )
                hint = (
                    error.hint
                    or "Describe the wanted form in the prompt, or use a model that keeps the constraint."
                )
                last = type(error)(problem, text=plain.text, hint=hint)
                last.usage = total_usage(usages)
                raise last from error
            wrong = f"That is not valid: {error.message} Answer again, with nothing else."
            turn = Message("assistant", (answer.text,))
            current = msgspec.structs.replace(
                shown, messages=(*shown.messages, turn, Message("user", (wrong,)))
            )
    raise AssertionError("unreachable")


def append_to_user_turn(prompt: Prompt, words: str) -> Prompt:
    """Appends words to the last turn of a prompt if it is the user's. Otherwise adds a user turn
    with the words.
    """
    *before, last = prompt.messages or (Message("user", ()),)
    if last.role != "user":
        before = [*before, last]
        last = Message("user", ())
    gap = ("\n\n",) if last.content else ()
    return msgspec.structs.replace(
        prompt, messages=(*before, Message("user", (*last.content, *gap, words)))
    )


_FENCED = re.compile(r"\s*```[a-zA-Z]*\n(.*?)\n?```\s*", re.DOTALL)


def _strip_fences(text: str) -> str:
    """Strips the whitespace and code fences that models put around values."""
    fenced = _FENCED.fullmatch(text)
    return (fenced[1] if fenced else text).strip()


def _constraint_instruction(constraint: Constraint) -> str:
    alone = "and with nothing else"
    match constraint:
        case JsonSchema(schema):
            shown = format_schema_for_prompt(schema)
            return f"Answer with one JSON value that is valid under this JSON Schema, {alone}:\n{shown}"
        case Choices(options):
            return f"Answer with exactly one of these texts, {alone}:\n{json.dumps(options, ensure_ascii=False)}"
        case Number(kind):
            return f"Answer with one {'whole number' if kind == 'integer' else 'number'} in digits, {alone}."
        case Regex(pattern):
            return f"Answer with a text that matches this regular expression as a whole, {alone}:\n{pattern}"
        case Lark(grammar):
            return f"Answer with a text of this grammar (in Lark's syntax), {alone}:\n{grammar}"
    return f"Answer with a text of this grammar (in llama.cpp's GBNF), {alone}:\n{constraint_to_gbnf(constraint)}"
