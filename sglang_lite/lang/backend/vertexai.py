"""Backend for Gemini on Vertex AI, through Google's Gen AI SDK (`google-genai`). Contains the
backend's class, the code that builds its requests, and the reader of its answers.
"""

from __future__ import annotations

import base64
import importlib.util
import itertools
import json
import mimetypes
import os
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from sglang_lite.lang.argument_names import explains_wrong_arguments
from sglang_lite.lang.backend.apis.api import (
    Api,
    ApiReader,
    ApiRequest,
    ApiTool,
    JsonFormat,
    JsonTool,
    PartialAnswer,
    PartialCall,
    Target,
    Tools,
    iterate_turns,
    split_parameters,
)
from sglang_lite.lang.backend.capabilities import Capabilities
from sglang_lite.lang.backend.http.rate_limit import RateLimit
from sglang_lite.lang.backend.ladder.strategy import Policy, Strategy
from sglang_lite.lang.backend.profiles.profile import Profile, resolve_profile
from sglang_lite.lang.backend.remote.backend import RemoteBackend
from sglang_lite.lang.backend.remote.connection import Connector, ResponseHook
from sglang_lite.lang.backend.rendering import without_stops_and_placeholders
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.protocol import (
    CapabilityError,
    Delta,
    Media,
    Message,
    ParameterError,
    TokenLogprob,
    Usage,
)
from sglang_lite.protocol.anything import Foreign, Json
from sglang_lite.text.tool_use import split_call_results


class VertexAI(RemoteBackend):
    """Backend for Gemini models on Vertex AI. Schemas, types and choices are enforced by the API's
    structured outputs. Tools use the API's own format. Requests contain only the parameters that
    were set.

    Args:
        model_name: name of the model.
        safety_settings: the API's settings: a list of dicts with `category` and `threshold`, or a
            dict from category to threshold.
        profile: features of the model, by profile name or as a Profile; None to look the model up
            by its name.
        policy: treatment of features that the model does not support: "strict" (the default),
            "emulate" or "warn"; see docs/backends.md.
        capabilities: features of the model; overrides `profile`.
        reasoning_effort: amount of reasoning: "minimal", "low", "medium" or "high"; None for the
            provider's default.
        client: existing `google.genai.Client` to use, instead of arguments for a new one.
        rate_limit: limit on calls; None for the limit shared by all backends with the same server
            and key (see RateLimit).
        **kwargs: arguments of the SDK's client: `credentials`, `http_options`, `api_key` (of the
            Gemini API, with `vertexai=False`) … The project is `project=`, or GCP_PROJECT_ID of the
            environment; the location is `location=`, or GCP_LOCATION.

    Attributes:
        token_usage: tokens used so far, as `prompt_tokens` and `completion_tokens`; `reset()` sets
            them to 0.

    Raises:
        BackendError: the SDK is not installed.
        ParameterError: no project is given, or the SDK rejects the arguments.
    """

    provider = "vertexai"

    @explains_wrong_arguments
    def __init__(
        self,
        model_name: str,
        safety_settings: Sequence[Mapping[str, Foreign]] | Mapping[str, str] | None = None,
        *,
        profile: str | Profile | None = None,
        policy: Policy = "strict",
        capabilities: Capabilities | None = None,
        reasoning_effort: str | None = None,
        client: Foreign = None,
        rate_limit: RateLimit | None = None,
        **kwargs: Foreign,
    ) -> None:
        if client is not None and kwargs:
            raise ParameterError(
                "client",
                "other arguments of the client have no effect beside it.",
                hint="Leave them out.",
            )
        options = {"vertexai": True, **kwargs}
        if client is None and options["vertexai"] and "api_key" not in options:
            options.setdefault("project", os.environ.get("GCP_PROJECT_ID"))
            options.setdefault("location", os.environ.get("GCP_LOCATION"))
            if not options["project"]:
                raise ParameterError(
                    "project", "no project is given.", hint="Give project=, or set GCP_PROJECT_ID."
                )
        super().__init__(
            model_name,
            Connector(
                "google.genai",
                "vertexai",
                _client_maker(options, client),
                _vertex_error_types,
                client,
                _close,
            ),
            resolve_profile(profile, "vertexai", model_name),
            policy,
            capabilities,
            without_stops_and_placeholders(get_chat_template("default")),
            rate_limit,
        )
        safety = _convert_safety_settings(safety_settings)
        self._settings = {"safety_settings": safety} if safety else {}
        self.reasoning_effort = reasoning_effort

    def target(self, strategy: Strategy) -> tuple[Api, Target]:
        return GENERATE_CONTENT, Target(
            self.model_name, effort=strategy.effort, settings=self._settings
        )


def _client_maker(options: Mapping[str, Any], client: Any) -> Any:
    def make(sdk: Any, on_response: ResponseHook, before: Any) -> Any:
        if client is not None and not isinstance(client, sdk.Client):
            raise ParameterError("client", f"{type(client).__name__} is not a google.genai.Client.")
        try:
            return explains_wrong_arguments(sdk.Client)(**options) if client is None else client
        except ValueError as error:
            raise ParameterError("VertexAI", str(error)) from error

    return make


def _vertex_error_types(sdk: Any) -> Any:
    from google.auth.exceptions import GoogleAuthError

    # The SDK uses the one of these that is installed.
    clients = [
        importlib.import_module(name)
        for name in ("httpx2", "httpx")
        if importlib.util.find_spec(name)
    ]
    late = tuple(client.TimeoutException for client in clients)
    lost = tuple(client.TransportError for client in clients)
    return (sdk.errors.APIError, GoogleAuthError, *late, *lost), late, lost


async def _close(client: Any) -> None:
    await client.aio.aclose()
    client.close()


def _convert_safety_settings(
    settings: Sequence[Mapping[str, Any]] | Mapping[str, str] | None,
) -> list[dict[str, Any]]:
    if isinstance(settings, Mapping):
        return [
            {"category": category, "threshold": threshold}
            for category, threshold in settings.items()
        ]
    return [dict(each) for each in settings or ()]


_NAMES = {  # our parameter names and the API's
    "max_tokens": "max_output_tokens",
    "stop": "stop_sequences",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "n": "candidate_count",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "return_logprob": "response_logprobs",
    "top_logprobs_num": "logprobs",
    "thinking": "thinking",
}
_CUT = "MAX_TOKENS"
_REFUSED = frozenset(
    {
        "SAFETY",
        "RECITATION",
        "LANGUAGE",
        "BLOCKLIST",
        "PROHIBITED_CONTENT",
        "SPII",
        "IMAGE_SAFETY",
        "IMAGE_PROHIBITED_CONTENT",
        "IMAGE_RECITATION",
    }
)


def request_arguments(request: ApiRequest) -> dict[str, Json]:
    """Builds the arguments of `models.generate_content` for a request.

    Raises:
        CapabilityError: the API does not accept an image or a system turn of the prompt.
    """
    messages = request.prompt.messages
    system = list(itertools.takewhile(lambda message: message.role == "system", messages))
    parameters, _ = split_parameters(request.params, _NAMES)
    budget = parameters.pop("thinking", None)
    if "seed" in parameters:
        parameters["seed"] %= 2**31  # the API's seeds are signed 32-bit integers
    config: dict[str, Any] = {
        **request.target.settings,
        **parameters,
        **_answer_format_fields(request),
    }
    if system:
        config["system_instruction"] = "\n\n".join(_text(message) for message in system)
    if request.target.effort is not None:
        config["thinking_config"] = {"thinking_level": request.target.effort.upper()}
    if budget is not None:
        config["thinking_config"] = {**config.get("thinking_config", {}), "thinking_budget": budget}
    contents = _convert_conversation(request, len(system))
    return {"model": request.target.model, "contents": contents, "config": config}


def _answer_format_fields(request: ApiRequest) -> dict[str, Any]:
    """Returns the configuration fields that specify the form of the answer."""
    match request.shape:
        case JsonFormat(schema, _):
            return {
                "response_mime_type": "application/json",
                "response_json_schema": json.loads(schema),
            }
        case JsonTool() as shape:
            return _tools([shape.tool], "ANY")
        case Tools(tools, choice):
            return _tools(tools, {"auto": "AUTO", "required": "ANY", "none": "NONE"}[choice])
    return {}


def _tools(tools: Sequence[ApiTool], mode: str) -> dict[str, Any]:
    declared = [
        {
            "name": tool.name,
            "description": tool.description,
            "parameters_json_schema": json.loads(tool.schema),
        }
        for tool in tools
    ]
    return {
        "tools": [{"function_declarations": declared}],
        "tool_config": {"function_calling_config": {"mode": mode}},
        "automatic_function_calling": {"disable": True},
    }


def _convert_conversation(request: ApiRequest, start: int) -> list[dict[str, Any]]:
    """Converts the conversation to the API's form. A turn with tool calls or signed thoughts is
    sent as the model's original parts.
    """
    contents: list[dict[str, Any]] = []
    turns = iterate_turns(request.prompt.messages, request.provider_items, _extract_tool_calls)
    for message, stored, calls in itertools.islice(turns, start, None):
        if message.role == "system":
            raise CapabilityError(
                f"{request.target.model} accepts system turns only before all others.",
                hint="Move it to the front, or into a user's turn.",
            )
        if stored is not None:
            parts = list(stored)
        elif calls:
            results = split_call_results([call.get("name", "") for call in calls], _text(message))
            parts = [_function_response(call, result) for call, result in zip(calls, results)]
        else:
            parts = [_part(part, request.target.model) for part in message.content if part]
        contents.append(
            {"role": "model" if message.role == "assistant" else "user", "parts": parts}
        )
    return contents


def _extract_tool_calls(parts: Sequence[Any]) -> list[Any]:
    return [part["function_call"] for part in parts if "function_call" in part]


def _function_response(call: Mapping[str, Any], result: str) -> dict[str, Any]:
    identity = {key: call[key] for key in ("id", "name") if call.get(key)}
    return {"function_response": {**identity, "response": {"output": result}}}


def _text(message: Message) -> str:
    if any(isinstance(part, Media) for part in message.content):
        raise CapabilityError(
            "the API accepts only text in this turn, but it has an image.",
            hint="Move it to a user's turn.",
        )
    return "".join(str(part) for part in message.content)


def _part(part: str | Media, model: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"text": part}
    if part.url.startswith("data:"):
        head, _, data = part.url.removeprefix("data:").partition(",")
        return {"inline_data": {"mime_type": head.partition(";")[0], "data": data}}
    if not part.url:
        return {
            "inline_data": {
                "mime_type": part.media_type,
                "data": base64.b64encode(part.data).decode(),
            }
        }
    kind, _ = mimetypes.guess_type(part.url)
    if kind is None:
        raise CapabilityError(
            f"{model} needs the media type of the image at {part.url[:80]}.",
            hint="Give its bytes, or a data URL.",
        )
    return {"file_data": {"file_uri": part.url, "mime_type": kind}}


class GenerateContentReader(ApiReader):
    """Reads a complete answer or the pieces of a streamed one. Both have the same form."""

    def read_event(self, event: Foreign) -> Sequence[Delta]:
        self.meta |= {"id": event.response_id, "model": event.model_version}
        if event.usage_metadata is not None:
            self._read_usage(event.usage_metadata)
        blocked = event.prompt_feedback and event.prompt_feedback.block_reason
        if blocked:
            self.samples[0] = PartialAnswer(
                refusal=f"the prompt was blocked ({blocked.value})", finish_reason="blocked"
            )
        deltas = list[Delta]()
        for index, candidate in enumerate(event.candidates or ()):
            deltas += self._add_candidate(
                index if candidate.index is None else candidate.index, candidate
            )
        return deltas

    def _read_usage(self, counts: Any) -> None:
        thoughts = counts.thoughts_token_count or 0
        completion = (counts.candidates_token_count or 0) + thoughts
        self.usage = Usage(
            counts.prompt_token_count or 0,
            counts.cached_content_token_count or 0,
            completion,
            reasoning_tokens=thoughts,
        )

    def _add_candidate(self, index: int, candidate: Any) -> list[Delta]:
        """Adds a candidate, or a piece of one, to its sample, and returns its new text and
        thoughts.
        """
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
            self._end_sample(sample, candidate)
        return deltas

    def _end_sample(self, sample: PartialAnswer, candidate: Any) -> None:
        sample.finish_reason = candidate.finish_reason.value
        sample.truncated = sample.finish_reason == _CUT
        if sample.finish_reason in _REFUSED:
            sample.refusal = candidate.finish_message or sample.finish_reason
        elif sample.finish_reason not in ("STOP", _CUT):
            reason = candidate.finish_message or "no reason is given"
            self.failure = f"the answer ended with {sample.finish_reason}: {reason}"
        if not any(
            "function_call" in part or "thought_signature" in part for part in sample.provider_items
        ):
            sample.provider_items = []  # later turns contain its text anyway


def _logprobs(result: Any) -> tuple[TokenLogprob, ...]:
    chosen = (result and result.chosen_candidates) or ()
    tops = (result and result.top_candidates) or [None] * len(chosen)
    return tuple(
        TokenLogprob(
            each.log_probability, _token_id(each), each.token, _convert_top_candidates(top)
        )
        for each, top in zip(chosen, tops)
    )


def _convert_top_candidates(alternatives: Any) -> tuple[tuple[float, int, str | None], ...]:
    candidates = (alternatives and alternatives.candidates) or ()
    return tuple((each.log_probability, _token_id(each), each.token) for each in candidates)


def _token_id(candidate: Any) -> int:
    return -1 if candidate.token_id is None else int(candidate.token_id)


def _wrap_generate_content(client: Any) -> Any:
    async def create(*, stream: bool = False, **arguments: Any) -> Any:
        if stream:
            return aclosing(await client.aio.models.generate_content_stream(**arguments))
        return await client.aio.models.generate_content(**arguments)

    return create


GENERATE_CONTENT = Api(
    request_arguments, _wrap_generate_content, {"stream": True}, GenerateContentReader
)
