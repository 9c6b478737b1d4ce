"""Serving of a node by its strategy: makes the calls, checks every answer, and describes the strategy in the
metadata."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_lite.constraints.emit.gbnf import to_gbnf
from sglang_lite.constraints.json_schema.quotes import KEYWORD, without_documents
from sglang_lite.constraints.kinds import language_of
from sglang_lite.constraints.matching import validate
from sglang_lite.errors import Origin
from sglang_lite.lang.backend.apis.api import ApiTool, GrammarTool, JsonFormat, JsonTool, OwnField, Shape, Tools
from sglang_lite.lang.backend.base import only_answer
from sglang_lite.lang.backend.ladder.object_constraints import unwrap
from sglang_lite.lang.backend.ladder.strategy import REPAIRS, Strategy
from sglang_lite.lang.backend.token_counts import note_unreported
from sglang_lite.lang.results import with_warnings
from sglang_lite.protocol import (
    UNSET,
    Choices,
    Constraint,
    Delta,
    Ebnf,
    Generation,
    JsonSchema,
    Lark,
    Message,
    Number,
    Prompt,
    Regex,
    SamplingParams,
    SglError,
    ValueValidationError,
)
from sglang_lite.protocol.anything import Json
from sglang_lite.protocol.results import total_usage

if TYPE_CHECKING:
    from sglang_lite.lang.backend.remote.backend import RemoteBackend

_CALLED = frozenset({"tools", "strict_tool", "regex_tool", "lark_tool"})  # strategies whose answers are tool calls


async def serve(
    backend: RemoteBackend,
    prompt: Prompt,
    params: SamplingParams,
    constraint: Constraint | None,
    strategy: Strategy,
    *,
    stream: bool,
) -> AsyncGenerator[Delta | Generation, None]:
    """Serves a generation by its strategy. Yields deltas if `stream` and the text can be delivered as it arrives, then
    the samples.

    Raises:
        ValueValidationError: an answer breaks the constraint.
    """
    params = msgspec.structs.replace(params, **dict.fromkeys(strategy.left_out, UNSET))
    if constraint is not None:
        # Only a number can have stops here, and a number ends by itself.
        params = msgspec.structs.replace(params, stop=UNSET)
    if strategy.samples > 1:
        params = msgspec.structs.replace(params, n=UNSET)
        calls = [_single_sample(backend, prompt, params, constraint, strategy) for _ in range(strategy.samples)]
        for index, each in enumerate(await _all(calls)):
            yield msgspec.structs.replace(each, index=index)
    elif strategy.name == "repair":
        assert constraint is not None
        yield await _repaired(backend, prompt, params, constraint, strategy)
    else:
        whole = strategy.stops or strategy.name in _CALLED or (strategy.form is not None and strategy.form.wrapped)
        shown = stream and not whole  # other answers are only shown when they are complete
        async for event in backend.call(prompt, params, strategy, constrained=constraint is not None, stream=shown):
            if isinstance(event, Generation):
                event = _finished(event, constraint, strategy, 1)
            yield event


async def _all(calls: Sequence[Coroutine[Any, Any, Generation]]) -> list[Generation]:
    """Answers of all calls. If some fail, the first error is raised when all have ended."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    error = next((each for each in outcomes if isinstance(each, BaseException)), None)
    if error is not None:
        for each in outcomes:
            if each is not error and isinstance(each, Generation | SglError) and each.usage is not None:
                note_unreported(each.usage)
        raise error
    return [each for each in outcomes if isinstance(each, Generation)]


async def _single_sample(
    backend: RemoteBackend, prompt: Prompt, params: SamplingParams, constraint: Constraint | None, strategy: Strategy
) -> Generation:
    """One of several samples, each of which has calls of its own."""
    if strategy.name == "repair":
        assert constraint is not None
        return await _repaired(backend, prompt, params, constraint, strategy)
    events = backend.call(prompt, params, strategy, constrained=constraint is not None, stream=False)
    return _finished(await only_answer(events), constraint, strategy, 1)


def _finished(answer: Generation, constraint: Constraint | None, strategy: Strategy, calls: int) -> Generation:
    """Answer as the node receives it: checked, cut at the strategy's stops, with the strategy in its metadata.

    Raises:
        ValueValidationError: the answer breaks the constraint.
    """
    try:
        text = answer.text if constraint is None else _read(constraint, strategy, answer.text)
    except ValueValidationError as error:
        error.origin, error.usage = Origin.of(answer.meta), answer.usage
        raise
    found: dict[str, Any] = {"text": text, "meta": with_strategy(answer.meta, strategy, calls)}
    if strategy.stops:
        at, stop = min(((text.find(stop), stop) for stop in strategy.stops if stop in text), default=(-1, ""))
        if at >= 0:
            found |= {"text": text[:at], "finish_reason": "stop", "matched": stop, "output_logprobs": ()}
            if answer.output_logprobs:
                found["meta"] = with_warnings(
                    found["meta"], "logprobs: left out, as the finished text was cut at a stop"
                )
    return msgspec.structs.replace(answer, **found)


def with_strategy(meta: Mapping[str, Json], strategy: Strategy, calls: int) -> dict[str, Json]:
    """Metadata of a node that was served by a strategy, from the metadata of its last call."""
    return with_warnings({**meta, "strategy": strategy.name, "calls": calls}, *strategy.warnings)


def _read(constraint: Constraint, strategy: Strategy, text: str) -> str:
    if strategy.form is not None:
        text = unwrap(constraint, strategy.form, text)
        if strategy.form.wrapped or strategy.strict:
            return text  # objects are validated later, as all values are
    validate(constraint, text)
    return text


# ------------------------------------------------------------------------------------------------------- repairs


async def _repaired(
    backend: RemoteBackend, prompt: Prompt, params: SamplingParams, constraint: Constraint, strategy: Strategy
) -> Generation:
    """Requests answers until one satisfies the constraint: the first request describes the constraint, later ones show
    the error in the last answer.

    Raises:
        ValueValidationError: the last answer breaks the constraint, too.
    """
    shown = with_words(prompt, _instruction(constraint))
    usages, current = [], shown
    for attempt in range(1 + REPAIRS):
        events = backend.call(current, params, strategy, constrained=False, stream=False)  # one that is cut is repaired
        answer = await only_answer(events)
        usages.append(answer.usage)
        plain = msgspec.structs.replace(answer, text=_bare(answer.text), usage=total_usage(usages))
        try:
            if plain.finish_reason == "length":
                problem = f"it was cut after {answer.usage.completion_tokens} tokens. It has to be shorter."
                raise ValueValidationError(problem, text=plain.text, hint="Raise max_tokens, or ask for less.")
            return _finished(plain, constraint, strategy, attempt + 1)
        except ValueValidationError as error:
            usages[-1] = msgspec.structs.replace(answer.usage, thrown_away_tokens=answer.usage.completion_tokens)
            if attempt == REPAIRS:
                problem = f"{attempt + 1} answers broke the constraint; the last one: {error.message}"
                hint = error.hint or "Describe the wanted form in the prompt, or use a model that keeps the constraint."
                last = ValueValidationError(problem, text=plain.text, hint=hint)
                last.usage = total_usage(usages)
                raise last from error
            wrong = f"That is not valid: {error.message} Answer again, with nothing else."
            turn = Message("assistant", (answer.text,))
            current = msgspec.structs.replace(shown, messages=(*shown.messages, turn, Message("user", (wrong,))))
    raise AssertionError("unreachable")


def with_words(prompt: Prompt, words: str) -> Prompt:
    """Prompt with words at the end of its last turn, in a turn of the user."""
    *before, last = prompt.messages or (Message("user", ()),)
    if last.role != "user":
        before, last = [*before, last], Message("user", ())
    gap = ("\n\n",) if last.content else ()
    return msgspec.structs.replace(prompt, messages=(*before, Message("user", (*last.content, *gap, words))))


_FENCED = re.compile(r"\s*```[a-zA-Z]*\n(.*?)\n?```\s*", re.DOTALL)


def _bare(text: str) -> str:
    """Answer without the blanks and code fences that models put around values."""
    fenced = _FENCED.fullmatch(text)
    return (fenced[1] if fenced else text).strip()


def _instruction(constraint: Constraint) -> str:
    alone = "and with nothing else"
    match constraint:
        case JsonSchema(schema):
            if KEYWORD in schema:
                schema = json.dumps(without_documents(json.loads(schema)), ensure_ascii=False)
            return f"Answer with one JSON value that is valid under this JSON Schema, {alone}:\n{schema}"
        case Choices(options):
            return f"Answer with exactly one of these texts, {alone}:\n{json.dumps(options, ensure_ascii=False)}"
        case Number(kind):
            return f"Answer with one {'whole number' if kind == 'integer' else 'number'} in digits, {alone}."
        case Regex(pattern):
            return f"Answer with a text that matches this regular expression as a whole, {alone}:\n{pattern}"
        case Lark(grammar):
            return f"Answer with a text of this grammar (in Lark's syntax), {alone}:\n{grammar}"
    grammar = constraint.grammar if isinstance(constraint, Ebnf) else to_gbnf(language_of(constraint))
    return f"Answer with a text of this grammar (in llama.cpp's GBNF), {alone}:\n{grammar}"


# -------------------------------------------------------------------------------------------------------- shapes


def shape_of(strategy: Strategy) -> Shape:
    """Form in which a call by a strategy requests its answer."""
    match strategy.name:
        case "json_schema" | "enum" if strategy.form is None:
            return JsonFormat(strategy.field, strict=True)
        case "json_schema" | "enum" | "repair" if strategy.form is not None:
            if strategy.fit is None:  # a hint
                schema = without_documents(json.loads(strategy.form.constraint.schema))
                return JsonFormat(schema, strict=strategy.strict)
            return JsonFormat(json.loads(strategy.fit.schema), strict=strategy.strict)
        case "tools":
            use, functions = strategy.field
            tools = [
                ApiTool(each.name, each.description, json.loads(schema), strict) for each, schema, strict in functions
            ]
            return Tools(tuple(tools), use.required, use.parallel)
        case "strict_tool":
            assert strategy.fit is not None
            return JsonTool(json.loads(strategy.fit.schema))
        case "regex_tool":
            return GrammarTool("regex", strategy.field)
        case "lark_tool":
            return GrammarTool("lark", strategy.field)
        case "structured_outputs" | "regex" | "ebnf" | "grammar":
            return OwnField({strategy.name: strategy.field})
    return None
