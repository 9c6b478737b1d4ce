"""Requests of OpenAI's decisions: converts the input to messages, and each question to text and
choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from sglang_lite.protocol import CapabilityError, ParameterError
from sglang_lite.protocol.anything import Json
from sglang_lite.server.conversation.tools import INPUT, parse_earlier_arguments
from sglang_lite.server.fields import DECISIONS_NEUTRAL, Fields
from sglang_lite.server.openai.responses_items import ContentPart, InputText, OutputRefusal

MAX_CHOICES = 255
# limits of an input part that is JSON
_JSON_BYTES = 2**18
_JSON_DEPTH = 32
_JSON_VALUES = 10_000


class InputImage(ContentPart, tag="input_image"):
    image_url: str
    detail: str | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class InputJson(ContentPart, tag="input_json"):
    data: dict[str, Any] | list[dict[str, Any]]


class OutputText(ContentPart, tag="output_text"):
    text: str
    annotations: list[Any] | None = None  # of an earlier answer, returned by the client unchanged
    logprobs: list[Any] | None = None


Parts: TypeAlias = list[InputText | InputImage | InputJson | OutputText | OutputRefusal]


class InputMessage(
    msgspec.Struct, kw_only=True, tag_field="type", tag="message", forbid_unknown_fields=True
):
    role: Literal["user", "developer", "system", "assistant"]
    content: str | Parts
    phase: Literal["commentary", "final_answer"] | None = None


class _Item(msgspec.Struct, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    call_id: str
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class InputCall(_Item, tag="function_call"):
    name: str
    arguments: str
    namespace: str | None = None


class InputCallOutput(_Item, tag="function_call_output"):
    output: str | list[InputText | InputImage]


class InputCustomCall(_Item, tag="custom_tool_call"):
    name: str
    input: str
    namespace: str | None = None


class InputCustomCallOutput(_Item, tag="custom_tool_call_output"):
    output: str | list[InputText | InputImage]


Item: TypeAlias = (
    InputMessage | InputCall | InputCallOutput | InputCustomCall | InputCustomCallOutput
)


class _Question(msgspec.Struct, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    instructions: str | list[InputText | InputImage | InputJson]
    name: str | None = None


class PredicateQuestion(_Question, tag="predicate"):
    pass


class DecisionChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    value: str | bool
    description: str | None = None


class ChoiceQuestion(_Question, tag="choice"):
    choices: list[DecisionChoice]


class DecisionLevel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    label: str
    description: str | None = None


class ScoreQuestion(_Question, tag="score"):
    levels: list[DecisionLevel]


Question: TypeAlias = PredicateQuestion | ChoiceQuestion | ScoreQuestion


class DecisionRequest(msgspec.Struct, kw_only=True):
    """Request with questions about an input."""

    model: str
    input: str | list[dict[str, Any]]
    questions: list[Question]


DECISIONS: Fields[DecisionRequest] = Fields(DecisionRequest, DECISIONS_NEUTRAL, {})


@dataclass(frozen=True, slots=True)
class Options:
    """Question as the model reads it.

    Attributes:
        text: text of the question, with its choices.
        values: values of the choices, or labels of the levels.
        choices_json: the values as JSON.
    """

    text: str
    values: Sequence[str | bool]
    choices_json: tuple[str, ...]


def parse_decision_messages(given: str | list[dict[str, Json]]) -> list[dict[str, Json]]:
    """Converts the input to messages in the form that templates take.

    Raises:
        ParameterError: an item is invalid, or is the output of an unknown call.
        CapabilityError: an item has an image.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not given:
        raise ParameterError("input", "is empty.")
    messages: list[dict[str, Any]] = []
    calls: set[tuple[type, str]] = set()
    for i, data in enumerate(given):
        where = f"input[{i}]"
        item = _parse_input_item(data, where)
        if isinstance(item, InputMessage):
            messages.append({"role": item.role, "content": _text(item.content, f"{where}.content")})
        elif isinstance(item, InputCall | InputCustomCall):
            calls.add((type(item), item.call_id))
            function = {
                "name": item.name,
                "arguments": _parse_call_arguments(item, f"{where}.arguments"),
            }
            called = {"type": "function", "id": item.call_id, "function": function}
            if messages and messages[-1].get("tool_calls"):
                messages[-1]["tool_calls"].append(called)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [called]})
        else:
            kind = InputCall if isinstance(item, InputCallOutput) else InputCustomCall
            if (kind, item.call_id) not in calls:
                raise ParameterError(
                    f"{where}.call_id", f"{item.call_id!r:.80} is not the id of an earlier call."
                )
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": item.call_id,
                    "content": _text(item.output, f"{where}.output"),
                }
            )
    return messages


def _parse_input_item(data: dict[str, Any], where: str) -> Item:
    try:
        item: Item = msgspec.convert({"type": "message", **data} if "role" in data else data, Item)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise ParameterError(
            where + path.rstrip("`"), f"{message[:1].lower()}{message[1:]}."
        ) from None
    return item


def _parse_call_arguments(item: InputCall | InputCustomCall, where: str) -> dict[str, Json]:
    return (
        {INPUT: item.input}
        if isinstance(item, InputCustomCall)
        else parse_earlier_arguments(item.arguments, where)
    )


def _text(content: str | Sequence[ContentPart], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, InputText | OutputText):
            texts.append(part.text)
        elif isinstance(part, OutputRefusal):
            texts.append(part.refusal)
        elif isinstance(part, InputJson):
            texts.append(_encode_json_part(part, f"{where}[{i}].data"))
        else:
            kind = part.__struct_config__.tag
            raise CapabilityError(
                f"decisions read only text, no {kind}.", parameter=f"{where}[{i}]"
            )
    return "\n".join(texts)


def _encode_json_part(part: InputJson, where: str) -> str:
    written = msgspec.json.encode(part.data)
    if len(written) > _JSON_BYTES:
        raise ParameterError(
            where, f"has {len(written):,} bytes of JSON; the limit is {_JSON_BYTES:,}."
        )
    depths = list(_nesting_depths(part.data, 1))
    if max(depths) > _JSON_DEPTH:
        raise ParameterError(where, f"is nested more than {_JSON_DEPTH} levels deep.")
    if len(depths) > _JSON_VALUES:
        raise ParameterError(where, f"has {len(depths):,} values; the limit is {_JSON_VALUES:,}.")
    return written.decode()


def _nesting_depths(value: Any, depth: int) -> Iterator[int]:  # of plain data
    """Yields the nesting depth of a value and of every value inside it."""
    yield depth if isinstance(value, dict | list) else depth - 1
    for each in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from _nesting_depths(each, depth + 1)


def build_question_options(question: Question, where: str) -> Options | None:
    """Returns a question as the model reads it, or None if it has an image, which the model can't
    read.

    Raises:
        ParameterError: the question has too few or too many choices, or a choice twice.
    """
    values, descriptions = _choice_values_and_descriptions(question, where)
    choices_json = tuple(msgspec.json.encode(value).decode() for value in values)
    try:
        text = _text(question.instructions, f"{where}.instructions")
    except CapabilityError:
        return None
    if any(descriptions):
        choice_list = "".join(
            f"\n{each}: {description}" if description else f"\n{each}"
            for each, description in zip(choices_json, descriptions)
        )
    else:
        choice_list = f" {', '.join(choices_json)}"
    head = "Levels, lowest first:" if isinstance(question, ScoreQuestion) else "Choices:"
    return Options(f"{text}\n{head}{choice_list}", values, choices_json)


def _choice_values_and_descriptions(
    question: Question, where: str
) -> tuple[Sequence[str | bool], Sequence[str | None]]:
    """Returns the values of a question's choices, and their descriptions."""
    if isinstance(question, PredicateQuestion):
        return (True, False), (None, None)
    if isinstance(question, ChoiceQuestion):
        found: list[tuple[str | bool, str | None]] = [
            (each.value, each.description) for each in question.choices
        ]
        name = "choices"
    else:
        found = [(each.label, each.description) for each in question.levels]
        name = "levels"
    if not 2 <= len(found) <= MAX_CHOICES:
        raise ParameterError(
            f"{where}.{name}", f"has {len(found):,} entries. Give 2 to {MAX_CHOICES}."
        )
    if len({(type(value), value) for value, _ in found}) < len(found):
        raise ParameterError(f"{where}.{name}", "has an entry twice. Remove one of them.")
    return [value for value, _ in found], [description for _, description in found]
