"""Requests to Gemini's generateContent through Google's Gen AI SDK, and readers of its answers."""

from __future__ import annotations

import base64
import itertools
import json
import mimetypes
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from sglang_lite.lang.backend.apis.api import (
    Api,
    ApiRequest,
    JsonFormat,
    JsonTool,
    PartialAnswer,
    PartialCall,
    Reader,
    Tool,
    Tools,
)
from sglang_lite.lang.backend.apis.provider_items import conversation
from sglang_lite.protocol import CapabilityError, Delta, Image, Message, TokenLogprob, Usage
from sglang_lite.protocol.anything import Foreign, Json
from sglang_lite.protocol.sampling import given_values
from sglang_lite.text.tool_use import results_of

_ANSWER = Tool("answer", "Its arguments are your whole answer.", {}, strict=False)
_NAMES = {  # our names of parameters, and the API's
    "max_tokens": "max_output_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k",
    "n": "candidate_count", "seed": "seed", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "return_logprob": "response_logprobs", "top_logprobs_num": "logprobs",
}  # fmt: skip
_CUT = "MAX_TOKENS"
_REFUSED = frozenset({
    "SAFETY", "RECITATION", "LANGUAGE", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "IMAGE_SAFETY",
    "IMAGE_PROHIBITED_CONTENT", "IMAGE_RECITATION",
})  # fmt: skip


def request_arguments(request: ApiRequest) -> dict[str, Json]:
    """Arguments of `models.generate_content` for a request.

    Raises:
        CapabilityError: the API does not accept an image or a system turn of the prompt.
    """
    messages = request.prompt.messages
    system = list(itertools.takewhile(lambda message: message.role == "system", messages))
    config: dict[str, Any] = {**request.target.settings, **_parameters(request), **_shape(request)}
    if system:
        config["system_instruction"] = "\n\n".join(_text(message) for message in system)
    if request.target.effort is not None:
        config["thinking_config"] = {"thinking_level": request.target.effort.upper()}
    contents = _contents(request, len(system))
    return {"model": request.target.model, "contents": contents, "config": config}


def _parameters(request: ApiRequest) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name, value in given_values(request.params).items():
        if name == "stop":
            config["stop_sequences"] = list(value)
        elif name == "seed":
            config["seed"] = value % 2**31  # the API's seeds are signed 32-bit integers
        elif name in _NAMES:
            config[_NAMES[name]] = value
    return config


def _shape(request: ApiRequest) -> dict[str, Any]:
    """Fields of the configuration that specify the form of the answer."""
    match request.shape:
        case JsonFormat(schema, _):
            return {"response_mime_type": "application/json", "response_json_schema": schema}
        case JsonTool(schema):
            return _tools([Tool(_ANSWER.name, _ANSWER.description, schema, strict=True)], "ANY")
        case Tools(tools, required):
            return _tools(tools, "ANY" if required else "AUTO")
    return {}


def _tools(tools: Sequence[Tool], mode: str) -> dict[str, Any]:
    declared = [
        {"name": tool.name, "description": tool.description, "parameters_json_schema": dict(tool.schema)}
        for tool in tools
    ]
    return {
        "tools": [{"function_declarations": declared}],
        "tool_config": {"function_calling_config": {"mode": mode}},
        "automatic_function_calling": {"disable": True},
    }


def _contents(request: ApiRequest, start: int) -> list[dict[str, Any]]:
    """Conversation in the API's form. A turn with tool calls or signed thoughts is sent as the model's original
    parts."""
    contents: list[dict[str, Any]] = []
    turns = conversation(request.prompt.messages, request.provider_items, _calls_of)
    for message, stored, calls in itertools.islice(turns, start, None):
        if message.role == "system":
            raise CapabilityError(
                f"{request.target.model} accepts system turns only before all others.",
                hint="Move it to the front, or into a user's turn.",
            )
        if stored is not None:
            parts = list(stored)
        elif calls:
            results = results_of([call.get("name", "") for call in calls], _text(message))
            parts = [_result(call, result) for call, result in zip(calls, results)]
        else:
            parts = [_part(part, request.target.model) for part in message.content if part]
        contents.append({"role": "model" if message.role == "assistant" else "user", "parts": parts})
    return contents


def _calls_of(parts: Sequence[Any]) -> list[Any]:
    return [part["function_call"] for part in parts if "function_call" in part]


def _result(call: Mapping[str, Any], result: str) -> dict[str, Any]:
    identity = {key: call[key] for key in ("id", "name") if call.get(key)}
    return {"function_response": {**identity, "response": {"output": result}}}


def _text(message: Message) -> str:
    if any(isinstance(part, Image) for part in message.content):
        raise CapabilityError(
            "the API accepts only text in this turn, but it has an image.", hint="Move it to a user's turn."
        )
    return "".join(str(part) for part in message.content)


def _part(part: str | Image, model: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"text": part}
    if part.url.startswith("data:"):
        head, _, data = part.url.removeprefix("data:").partition(",")
        return {"inline_data": {"mime_type": head.partition(";")[0], "data": data}}
    if not part.url:
        return {"inline_data": {"mime_type": part.media_type, "data": base64.b64encode(part.data).decode()}}
    kind, _ = mimetypes.guess_type(part.url)
    if kind is None:
        raise CapabilityError(
            f"{model} needs the media type of the image at {part.url[:80]}.", hint="Give its bytes, or a data URL."
        )
    return {"file_data": {"file_uri": part.url, "mime_type": kind}}


class GenerateContentReader(Reader):
    """Reader of an answer, or of the pieces of a streamed one, which have the same form."""

    def event(self, event: Foreign) -> Sequence[Delta]:
        self.meta |= {"id": event.response_id, "model": event.model_version}
        if event.usage_metadata is not None:
            self._count(event.usage_metadata)
        blocked = event.prompt_feedback and event.prompt_feedback.block_reason
        if blocked:
            self.samples[0] = PartialAnswer(
                refusal=f"the prompt was blocked ({blocked.value})", finish_reason="blocked"
            )
        deltas = list[Delta]()
        for place, candidate in enumerate(event.candidates or ()):
            deltas += self._add(place if candidate.index is None else candidate.index, candidate)
        return deltas

    def _count(self, counts: Any) -> None:
        thoughts = counts.thoughts_token_count or 0
        completion = (counts.candidates_token_count or 0) + thoughts
        self.usage = Usage(
            counts.prompt_token_count or 0, counts.cached_content_token_count or 0, completion,
            reasoning_tokens=thoughts,
        )  # fmt: skip
        if thoughts:
            self.meta["reasoning_tokens"] = thoughts

    def _add(self, index: int, candidate: Any) -> list[Delta]:
        """Adds a candidate, whole or a piece of it, to its sample, and returns its new text and thoughts."""
        sample = self.samples.setdefault(index, PartialAnswer(reasoning=""))
        deltas = list[Delta]()
        for part in (candidate.content and candidate.content.parts) or ():
            sample.provider_items.append(part.model_dump(mode="json", exclude_none=True))
            if part.function_call is not None:
                call = part.function_call
                sample.calls[len(sample.calls)] = PartialCall(
                    call.name or "", json.dumps(call.args or {}), call.id or ""
                )
            elif part.text and part.thought:
                sample.reasoning = f"{sample.reasoning}{part.text}"
                deltas.append(Delta("", index=index, reasoning=part.text))
            elif part.text:
                sample.text += part.text
                deltas.append(Delta(part.text, index=index))
        sample.logprobs += _logprobs(candidate.logprobs_result)
        if candidate.finish_reason is not None:
            self._end(sample, candidate)
        return deltas

    def _end(self, sample: PartialAnswer, candidate: Any) -> None:
        sample.finish_reason = candidate.finish_reason.value
        sample.truncated = sample.finish_reason == _CUT
        if sample.finish_reason in _REFUSED:
            sample.refusal = candidate.finish_message or sample.finish_reason
        elif sample.finish_reason not in ("STOP", _CUT):
            self.failure = (
                f"the answer ended with {sample.finish_reason}: {candidate.finish_message or 'no reason is given'}"
            )
        if not any("function_call" in part or "thought_signature" in part for part in sample.provider_items):
            sample.provider_items = []  # later turns contain its text anyway


def _logprobs(result: Any) -> tuple[TokenLogprob, ...]:
    chosen = (result and result.chosen_candidates) or ()
    tops = (result and result.top_candidates) or [None] * len(chosen)
    return tuple(
        TokenLogprob(each.log_probability, _token_id(each), each.token, _top(top)) for each, top in zip(chosen, tops)
    )


def _top(alternatives: Any) -> tuple[tuple[float, int, str | None], ...]:
    candidates = (alternatives and alternatives.candidates) or ()
    return tuple((each.log_probability, _token_id(each), each.token) for each in candidates)


def _token_id(candidate: Any) -> int:
    return -1 if candidate.token_id is None else int(candidate.token_id)


def _create(client: Any) -> Any:
    async def create(*, stream: bool = False, **arguments: Any) -> Any:
        if stream:
            return aclosing(await client.aio.models.generate_content_stream(**arguments))
        return await client.aio.models.generate_content(**arguments)

    return create


GENERATE_CONTENT = Api(request_arguments, _create, {"stream": True}, GenerateContentReader)
