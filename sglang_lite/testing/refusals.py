"""Requests that a provider rejects with status 400, by model generation, with the provider's
messages.

Sources, read on 2026-11-22. LiteLLM 1.109.1 (`supports_sampling_params`,
`supports_assistant_prefill`, `supports_none_reasoning_effort` in its
model_prices_and_context_window_backup.json): which Claude models accept sampling parameters and
prefilled turns, and which OpenAI models can run without reasoning. Reports of users
(johny-b/llmcomp#69, danielmiessler/Fabric#2109, langchain-ai/deepagents#1585,
dottxt-ai/outlines#1666): the messages. Other models have no such rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from sglang_lite.protocol.anything import Json
from sglang_lite.testing.answers import Fail

# of Claude models; the SDK's types no longer have them
SAMPLERS = ("temperature", "top_p", "top_k")

_REASONS = re.compile(r"o\d|gpt-([5-9]|\d\d)(?!.*chat)")
# models that reason only on request
_MAY_NOT_REASON = re.compile(r"gpt-5\.[1-4](?!.*(codex|pro|chat))")
# models that accept `max_completion_tokens` only
_NEWER_LIMIT = re.compile(r"o\d|gpt-([5-9]|\d\d)")
_NO_SCHEMA = re.compile(r"gpt-(4|4-.*|4o-2024-05-13|3\.5.*)$")
# with their defaults
_SAMPLING = {"temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0}
_NEVER_WHILE_REASONING = ("logprobs", "top_logprobs", "logit_bias", "stop")
_MAX_STOPS = 4

_NO_SAMPLERS = re.compile(r"claude-(opus-4-[78]|[a-z]+-5|mythos)")
_NO_PREFILL = re.compile(r"claude-(\w+-4-[678]|[a-z]+-5|mythos)")
_ONE_SAMPLER = re.compile(r"claude-(opus-4-1|\w+-4-[56])")
_NO_OUTPUT_FORMAT = re.compile(r"claude-(instant|2|3)|claude-(opus|sonnet)-4-(0|2025)")


def openai_type_refusal(problem: tuple[str, str] | None) -> Fail | None:
    """Makes OpenAI's error for a body that doesn't match the SDK's type, or returns None if it
    matches.
    """
    if problem is None:
        return None
    parameter, why = problem
    if why.startswith("Extra inputs"):
        return _openai_error(
            f"Unrecognized request argument supplied: {parameter}", parameter, "unknown_parameter"
        )
    if why.startswith("Field required"):
        return _openai_error(
            f"Missing required parameter: '{parameter}'.", parameter, "missing_required_parameter"
        )
    return _openai_error(f"Invalid value for '{parameter}': {why}.", parameter, "invalid_value")


def chat_refusal(body: Mapping[str, Json]) -> Fail | None:
    model = base_name(body["model"])
    if "max_tokens" in body and _NEWER_LIMIT.match(model):
        message = (
            "'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
        )
        return _openai_error(
            f"Unsupported parameter: {message}", "max_tokens", "unsupported_parameter"
        )
    asked = body.get("response_format") or {}
    if asked.get("type") == "json_schema":
        if _NO_SCHEMA.match(model):
            message = "Invalid parameter: 'response_format' of type 'json_schema' is not supported with this model."
            return _openai_error(message, "response_format", None)
        form = asked["json_schema"]
        if form.get("strict"):
            fault = next(strictness_faults(form.get("schema")), None)
            if fault is not None:
                message = f"Invalid schema for response_format '{form['name']}': {fault}"
                return _openai_error(message, "response_format", None)
    return _reasoning_refusal(model, body, body.get("reasoning_effort")) or stop_count_refusal(body)


def responses_refusal(body: Mapping[str, Json]) -> Fail | None:
    form = (body.get("text") or {}).get("format") or {}
    if form.get("type") == "json_schema" and form.get("strict"):
        fault = next(strictness_faults(form.get("schema")), None)
        if fault is not None:
            message = f"Invalid schema for response_format '{form['name']}': {fault}"
            return _openai_error(message, "text.format.schema", "invalid_json_schema")
    return _reasoning_refusal(
        base_name(body["model"]), body, (body.get("reasoning") or {}).get("effort")
    )


def stop_count_refusal(body: Mapping[str, Json]) -> Fail | None:
    stops = body.get("stop")
    if not isinstance(stops, list) or len(stops) <= _MAX_STOPS:
        return None
    message = f"Expected an array with maximum length {_MAX_STOPS}, but got an array with length {len(stops)} instead."
    return _openai_error(
        f"Invalid 'stop': array too long. {message}", "stop", "array_above_max_length"
    )


def anthropic_type_refusal(problem: tuple[str, str] | None) -> Fail | None:
    """Makes Anthropic's error for a body that doesn't match the SDK's type, or returns None if it
    matches.
    """
    if problem is None:
        return None
    parameter, why = problem
    return Fail(
        400,
        f"{parameter}: {'Extra inputs are not permitted' if why.startswith('Extra inputs') else why}",
    )


def messages_refusal(body: Mapping[str, Json]) -> Fail | None:
    model = base_name(body["model"]).rpartition("anthropic.")[2]
    samplers = [name for name in SAMPLERS if name in body]
    if samplers and _NO_SAMPLERS.match(model):
        return Fail(400, f"`{samplers[0]}` is deprecated for this model.")
    if {"temperature", "top_p"} <= set(samplers) and _ONE_SAMPLER.match(model):
        return Fail(
            400,
            "`temperature` and `top_p` cannot both be specified for this model. Please use only one.",
        )
    if "format" in (body.get("output_config") or {}) and _NO_OUTPUT_FORMAT.match(model):
        return Fail(400, "output_config.format: This model does not support structured outputs.")
    turns = body["messages"]
    if not turns:
        return Fail(400, "messages: at least one message is required")
    last = turns[-1]
    if last["role"] == "assistant":
        if _NO_PREFILL.match(model):
            message = "This model does not support assistant message prefill."
            return Fail(400, f"{message} The conversation must end with a user message.")
        if isinstance(last["content"], str) and last["content"] != last["content"].rstrip():
            return Fail(
                400, "messages: final assistant content cannot end with trailing whitespace"
            )
    return None


def base_name(model: str) -> str:
    """Returns the name of a model without the prefixes of hosts and fine-tuning."""
    return model.rpartition("/")[2].removeprefix("ft:")


def strictness_faults(schema: Json, context: tuple[str, ...] = ()) -> Iterator[str]:
    """Yields the faults of a schema for OpenAI's strict structured outputs: objects that allow
    additional properties or don't require all their properties.
    """
    if not isinstance(schema, Mapping):
        return
    if not context and schema.get("type") != "object":
        yield f"schema must be a JSON Schema of 'type: \"object\"', got 'type: \"{schema.get('type')}\"'."
        return
    if schema.get("type") == "object" or "properties" in schema:
        if schema.get("additionalProperties") is not False:
            yield f"In context={context!r}, 'additionalProperties' is required to be supplied and to be false."
        missing = [
            name for name in schema.get("properties", {}) if name not in schema.get("required", ())
        ]
        if missing:
            yield (
                f"In context={context!r}, 'required' is required to be supplied and to be an array including every key "
                f"in properties. Missing '{missing[0]}'."
            )
    for name in ("properties", "$defs"):
        for key, each in schema.get(name, {}).items():
            yield from strictness_faults(each, (*context, name, key))
    if "items" in schema:
        yield from strictness_faults(schema["items"], (*context, "items"))
    for i, each in enumerate(schema.get("anyOf", ())):
        yield from strictness_faults(each, (*context, "anyOf", str(i)))
    for name in ("allOf", "not", "if", "patternProperties", "dependentSchemas"):
        if name in schema:
            yield f"In context={context!r}, '{name}' is not permitted."


def _reasoning_refusal(model: str, body: Mapping[str, Any], effort: str | None) -> Fail | None:
    if not _REASONS.match(model) or (_MAY_NOT_REASON.match(model) and effort in (None, "none")):
        return None
    for name, default in _SAMPLING.items():
        if body.get(name, default) != default:
            message = f"'{name}' does not support {body[name]:g} with this model. Only the default ({default}) value is"
            return _openai_error(
                f"Unsupported value: {message} supported.", name, "unsupported_value"
            )
    for name in _NEVER_WHILE_REASONING:
        if body.get(name):
            message = f"Unsupported parameter: '{name}' is not supported with this model."
            return _openai_error(message, name, "unsupported_parameter")
    return None


def _openai_error(message: str, parameter: str, code: str | None) -> Fail:
    return Fail(400, message, code=code, parameter=parameter)
