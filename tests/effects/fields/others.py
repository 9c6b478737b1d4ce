"""Cases of Anthropic's messages and of Ollama's requests."""

from __future__ import annotations

from typing import Any

from tests.effects.fields.case import OMIT, Case, Door, at, differs, has, refused, reported, streams
from tests.effects.fields.openai import ONE, USER, json_like
from tests.effects.fields.sampling import SAMPLING, text_is

TOOL: dict[str, Any] = {"name": "add", "input_schema": ONE}
OLLAMA_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": ONE}}
THOUGHTS = {"type": "enabled", "budget_tokens": 15}
PNG = "data:image/png;base64,iVBORw0KGgo="

DOORS = {
    "MessagesRequest": Door(
        "/v1/messages", {"messages": USER, "temperature": 0, "max_tokens": 12}, "content.0.text", "usage.output_tokens"
    ),
    "CountTokensRequest": Door("/v1/messages/count_tokens", {"messages": USER}),
    "OllamaChat": Door(
        "/api/chat",
        {"model": "", "messages": USER, "stream": False, "options": {"temperature": 0, "num_predict": 12}},
        "message.content", "eval_count",
    ),
    "OllamaGenerate": Door(
        "/api/generate", {"model": "", "prompt": "x", "stream": False, "options": {"temperature": 0, "num_predict": 12}},
        "response", "eval_count",
    ),
    "OllamaOptions": Door(
        "/api/generate",
        {"model": "", "prompt": "x", "raw": True, "stream": False, "options": {"temperature": 0, "num_predict": 12}},
        "response", "eval_count", inside="options",
    ),
    "OllamaShow": Door("/api/show", {"model": ""}),
}  # fmt: skip

OF_PROMPTS = {
    "messages": Case([{"role": "user", "content": "abc"}], lambda ask: ask().status == 200, empty=[]),
    "model": Case("another", refused(404)),
    "system": Case("brief", differs("content.0.text", "input_tokens")),
    "tools": Case([TOOL], differs("content.0.text", "input_tokens")),
    "tool_choice": Case({"type": "any"}, refused(word="tool_choice")),
    "thinking": Case({"type": "disabled"}, differs("content.0.text", "input_tokens")),
    "output_config": Case({"effort": "low"}, differs("content.0.text", "input_tokens")),
    "output_format": Case(
        {"type": "json_schema", "schema": {"type": "nothing"}}, refused()
    ),
}  # fmt: skip

MESSAGES = {
    **OF_PROMPTS,
    "temperature": Case(0, SAMPLING["temperature"].shows, {"max_tokens": 30, "temperature": OMIT}),
    "top_p": Case(0.01, SAMPLING["top_p"].shows, {"max_tokens": 30, "temperature": 1}),
    "top_k": Case(1, SAMPLING["top_k"].shows, {"max_tokens": 30, "temperature": 1}),
    "max_tokens": Case(2, text_is("AB"), server="reciter", empty=100),
    "stop_sequences": Case(["B"], text_is("A"), server="reciter"),
    "exact": Case(
        True,
        has("exact.probs"),
        {"output_config": {"format": {"type": "json_schema", "schema": {"enum": [1, 2]}}}},
    ),
    "tool_choice": Case(
        {"type": "any"},
        at("content.0.name", "add"),
        {"tools": [{**TOOL, "strict": True}], "max_tokens": 80},
    ),
    "thinking": Case(THOUGHTS, at("content.1.text", "ABC"), {"max_tokens": 60}, server="thinker"),
    "output_format": Case({"type": "json_schema", "schema": ONE}, json_like, {"max_tokens": 40}),
    "stream": Case(True, streams()),
}


ANSWERED = {
    "model": Case("another", refused(404), empty=""),
    # random draws may end there, too
    "options": Case({"num_predict": 3}, at("eval_count", 3), server="reciter"),
    "keep_alive": Case("5m", reported("keep_alive")),
    "stream": Case(False, lambda ask: len(ask().events) == 1, {"stream": OMIT}),
    "format": Case(ONE, json_like, {"options": {"temperature": 0, "num_predict": 40}}),
    "think": Case("low", differs("prompt_eval_count")),
    "logprobs": Case(True, at("logprobs.#", 12)),
    "top_logprobs": Case(
        2, lambda ask: len(ask().get("logprobs.0.top_logprobs")) == 2, {"logprobs": True}
    ),
}  # fmt: skip

CHAT = {
    **ANSWERED,
    "messages": Case(USER, at("eval_count", 12)),
    "tools": Case([OLLAMA_TOOL], differs("prompt_eval_count")),
}
GENERATE = {
    **ANSWERED,
    "prompt": Case("x", at("eval_count", 12)),
    "system": Case("brief", differs("prompt_eval_count")),
    "images": Case([PNG], refused()),
    "raw": Case(True, at("prompt_eval_count", 1)),
}
UNDRAWN = {"temperature": 1, "num_predict": 16, "seed": 7}
OPTIONS = {
    "num_predict": Case(3, at("eval_count", 3)),
    "temperature": Case(0, SAMPLING["temperature"].shows, {**UNDRAWN, "temperature": OMIT}),
    "top_k": Case(1, SAMPLING["top_k"].shows, UNDRAWN),
    "top_p": Case(0.01, SAMPLING["top_p"].shows, UNDRAWN),
    "min_p": Case(1.0, SAMPLING["min_p"].shows, UNDRAWN),
    "seed": Case(7, SAMPLING["seed"].shows, {**UNDRAWN, "seed": OMIT}),
    "stop": Case("B", text_is("A"), server="reciter"),
    "repeat_penalty": Case(2.0, SAMPLING["repetition_penalty"].shows, {"num_predict": 40}),
    "presence_penalty": Case(2.0, SAMPLING["presence_penalty"].shows, {"num_predict": 40}),
    "frequency_penalty": Case(2.0, SAMPLING["frequency_penalty"].shows, {"num_predict": 40}),
    **{
        name: Case(value, reported(f"options.{name}"))
        for name, value in {
            "num_ctx": 64,
            "num_keep": 4,
            "repeat_last_n": 8,
            "penalize_newline": True,
        }.items()
    },
}
SHOW = {
    "model": Case("another", refused(404), {"name": "served"}),
    "name": Case("another", refused(404), {"model": OMIT}),
    "verbose": Case(True, reported("verbose")),
}

CASES = {
    "MessagesRequest": MESSAGES, "CountTokensRequest": OF_PROMPTS, "OllamaChat": CHAT, "OllamaGenerate": GENERATE,
    "OllamaOptions": OPTIONS, "OllamaShow": SHOW,
}  # fmt: skip
