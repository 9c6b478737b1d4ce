"""Cases of OpenAI's protocols: chats, completions, responses."""

from __future__ import annotations

import json
from typing import Any

import httpx2

from tests.effects.fields.case import (
    OMIT,
    Ask,
    Case,
    Door,
    at,
    differs,
    has,
    refused,
    reported,
    streams,
    uses_its_own_cache,
)
from tests.effects.fields.native import goes_first
from tests.effects.fields.sampling import SAMPLING, named, text_is

USER: list[Any] = [{"role": "user", "content": "x"}]
LONG: list[Any] = [{"role": "user", "content": "abcdefgh" * 8}]
ONE = {
    "type": "object",
    "properties": {"n": {"const": 1}},
    "required": ["n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "one", "schema": ONE}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": ONE}}
OTHER = {"type": "function", "function": {"name": "sub", "parameters": ONE}}
JSON_TEXT = '{"n": 1}'
TAG = json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "aaaaa"}})
LEFT_OUT = {"temperature": OMIT}

DOORS = {
    "ChatRequest": Door(
        "/v1/chat/completions", {"messages": USER, "temperature": 0, "max_tokens": 12},
        "choices.0.message.content", "usage.completion_tokens",
    ),
    "CompletionRequest": Door(
        "/v1/completions", {"prompt": "x", "temperature": 0, "max_tokens": 12},
        "choices.0.text", "usage.completion_tokens",
    ),
    "ResponsesRequest": Door(
        "/v1/responses", {"input": "x", "temperature": 0, "max_output_tokens": 12},
        "output.0.content.0.text", "usage.output_tokens",
    ),
    "InputTokensRequest": Door("/v1/responses/input_tokens", {"input": "x"}),
}  # fmt: skip


def made_response(url: str) -> str:
    """Id of a new response."""
    made = httpx2.post(f"{url}/v1/responses", json={"input": "before", "max_output_tokens": 2})
    return str(made.json()["id"])


def json_like(ask: Ask) -> bool:
    try:
        return json.loads(ask.text()) == {"n": 1}
    except ValueError:
        return False


def has_one_event_of_reasoning(ask: Ask) -> bool:
    """Returns whether all reasoning came in one event, however busy the machine is."""
    deltas = [event["choices"][0]["delta"] for event in ask().events if event["choices"]]
    return sum(bool(delta.get("reasoning_content")) for delta in deltas) == 1


def ends_with_usage(ask: Ask) -> bool:
    return bool(ask().events[-1].get("usage"))


def every_chunk_counts(ask: Ask) -> bool:
    """Whether each chunk has the counts so far, of which the last are the whole answer's."""
    counts = [event.get("usage") for event in ask().events]
    if not all(counts):
        return False
    whole = ask.without(stream=False, stream_options=OMIT).get("usage")
    told = [each["completion_tokens"] for each in counts]
    return (
        told == sorted(told)
        and told[-1] == whole["completion_tokens"]
        and {each["prompt_tokens"] for each in counts} == {whole["prompt_tokens"]}
    )


def _prompt_ids(ask: Ask, **more: Any) -> Any:
    return ask(return_prompt_token_ids=True, **more).get("choices.0.prompt_token_ids")


def keeps_the_beginning(ask: Ask) -> bool:
    """Whether a truncated prompt has the first tokens of the whole one."""
    whole = _prompt_ids(ask, truncate_prompt_tokens=OMIT, truncation_side=OMIT)
    return bool(_prompt_ids(ask) == whole[:3])


def writes_ids(path: str) -> Any:
    """Shows that tokens are written as their ids."""
    return lambda ask: str(ask().get(path)).startswith("token_id:")


def hides_its_thoughts(ask: Ask) -> bool:
    found = ask()
    return found.get("usage.completion_tokens_details.reasoning_tokens") > 0 and not found.get(
        "choices.0.message.reasoning_content"
    )


def draws_three_for_one(ask: Ask) -> bool:
    found = ask()
    return found.get("usage.completion_tokens") == 36 and found.get("choices.#") == 1


def is_between_two_texts(ask: Ask) -> bool:
    """Whether the prompt has both texts, and the tokens around them."""
    return bool(_prompt_ids(ask) == [258, 66, 67, 259, 68, 260])


# What the two protocols of completions share.
SHARED = {
    **SAMPLING,
    "n": Case(2, at("choices.#", 2)),
    "logit_bias": Case({"66": 100}, text_is("a" * 12)),
    "allowed_token_ids": Case([66], text_is("a" * 12)),
    "bad_words": Case(["a"], text_is("b" * 12), {"logit_bias": {"66": 100, "67": 90}}),
    "model": Case("another", refused(404)),
    "stream": Case(True, streams()),
    "stream_options": Case({"include_usage": True}, ends_with_usage, {"stream": True}),
    "response_format": Case(FORMAT, json_like, {"max_tokens": 40}),
    "regex": Case("a{5}", text_is("aaaaa")),
    "exact": Case(True, has("choices.0.exact.probs.a"), {"regex": "a|b"}),
    "ebnf": Case('root ::= "aaaaa"', text_is("aaaaa")),
    "structural_tag": Case(TAG, text_is("aaaaa")),
    "structured_outputs": Case({"choice": ["aaaaa"]}, text_is("aaaaa")),
    "guided_json": Case(ONE, json_like, {"max_tokens": 40}),
    "guided_whitespace_pattern": Case("  ", text_is('{  "n"  :  1  }'), {"guided_json": ONE, "max_tokens": 40}),
    "guided_regex": Case("a{5}", text_is("aaaaa")),
    "guided_choice": Case(["aaaaa"], text_is("aaaaa")),
    "guided_grammar": Case('root ::= "aaaaa"', text_is("aaaaa")),
    "grammar": Case('root ::= "aaaaa"', text_is("aaaaa")),
    "include_stop_str_in_output": Case(True, text_is("AB"), {"stop": "B"}, server="reciter"),
    "n_predict": Case(2, text_is("AB"), {"max_tokens": OMIT}, server="reciter"),
    "lora_path": Case("another", refused(404)),
    "request_id": Case("mine", at("choices.0.meta_info.id", "mine"), {"return_meta_info": True}),
    "rid": Case("mine", at("choices.0.meta_info.id", "mine"), {"return_meta_info": True}),
    "priority": Case(5, goes_first, server="queue"),
    "return_token_ids": Case(True, at("choices.0.token_ids.#", 12)),
    "return_prompt_token_ids": Case(True, has("choices.0.prompt_token_ids")),
    "return_meta_info": Case(True, has("choices.0.meta_info")),
    "routed_dp_rank": Case(1, refused(word="routed_dp_rank")),
    "data_parallel_rank": Case(1, refused(word="dp_rank")),
}  # fmt: skip

CHAT = {
    **SHARED,
    "cache_salt": Case(
        "mine", uses_its_own_cache("usage.prompt_tokens_details.cached_tokens"), {"messages": LONG}
    ),
    "messages": Case(USER, has("usage"), empty=[]),
    "truncate_prompt_tokens": Case(3, at("usage.prompt_tokens", 3)),
    "truncation_side": Case("right", keeps_the_beginning, {"truncate_prompt_tokens": 3}),
    "prompt_logprobs": Case(2, has("prompt_logprobs.1")),
    "return_tokens_as_token_ids": Case(
        True, writes_ids("choices.0.logprobs.content.0.top_logprobs.0.token"), {"logprobs": True, "top_logprobs": 1}
    ),
    "documents": Case([{"text": "abc"}], differs("usage.prompt_tokens")),
    "echo": Case(True, lambda ask: ask.text().startswith("so"), {
        "continue_final_message": True, "messages": [*USER, {"role": "assistant", "content": "so"}],
    }),
    "include_reasoning": Case(False, hides_its_thoughts, {"max_tokens": 20}, server="thinker"),
    "tools": Case([TOOL], differs("usage.prompt_tokens")),
    "tool_choice": Case(
        "required", at("choices.0.message.tool_calls.0.function.name", "add"), {"tools": [TOOL], "max_tokens": 60}
    ),
    "parallel_tool_calls": Case(
        False, differs("usage.completion_tokens"),  # no token ends the calls
        {"tools": [TOOL], "tool_choice": "required", "max_tokens": 140},
    ),
    "max_completion_tokens": Case(2, text_is("AB"), {"max_tokens": OMIT}, server="reciter"),
    "logprobs": Case(True, at("choices.0.logprobs.content.#", 12)),
    "top_logprobs": Case(
        3, lambda ask: len(ask().get("choices.0.logprobs.content.0.top_logprobs")) == 3, {"logprobs": True}
    ),
    "reasoning_effort": Case("low", differs("usage.prompt_tokens")),
    "thinking_token_budget": Case(15, has("choices.0.message.content"), {"max_tokens": 60}, server="thinker"),
    "max_think_tokens": Case(15, has("choices.0.message.content"), {"max_tokens": 60}, server="thinker"),
    "verbosity": Case("low", reported("verbosity")),
    "heal": Case(True, has("choices.0.meta_info.healed"), {
        "return_meta_info": True, "continue_final_message": True,
        "messages": [*USER, {"role": "assistant", "content": "abc"}],
    }),
    "continue_final_message": Case(
        True, differs("usage.prompt_tokens"),
        {"messages": [*USER, {"role": "assistant", "content": "so"}]},
    ),
    "add_generation_prompt": Case(False, refused(word="add_generation_prompt")),
    "chat_template_kwargs": Case({"tone": "kind"}, differs("usage.prompt_tokens")),
    "separate_reasoning": Case(
        False, lambda ask: "<think>" in ask.text() or "abcdefghij" in ask.text(), {"max_tokens": 60}, server="thinker"
    ),
    "stream_reasoning": Case(
        False, has_one_event_of_reasoning, {"stream": True, "max_tokens": 60, "max_think_tokens": 40},
        server="thinker",
    ),
}  # fmt: skip

COMPLETIONS = {
    **SHARED,
    "cache_salt": Case(
        "text", uses_its_own_cache("usage.prompt_tokens_details.cached_tokens"), {"prompt": "hgfedcba" * 8}
    ),
    "prompt": Case("abc", at("usage.prompt_tokens", 3), empty="x"),
    "heal": Case(True, has("choices.0.meta_info.healed"), {"return_meta_info": True, "prompt": "abc"}),
    "suffix": Case("c", is_between_two_texts, {"prompt": "ab"}, server="infill"),
    "best_of": Case(3, draws_three_for_one, {"ignore_eos": True}),
    "n_probs": Case(2, at("choices.0.logprobs.tokens.#", 12)),
    "add_special_tokens": Case(False, at("usage.prompt_tokens", 1), server="queue"),
    "truncate_prompt_tokens": Case(2, at("usage.prompt_tokens", 2), {"prompt": "abcdef"}),
    "truncation_side": Case("right", keeps_the_beginning, {"prompt": "abcdef", "truncate_prompt_tokens": 3}),
    "prompt_logprobs": Case(2, has("choices.0.prompt_logprobs.1"), {"prompt": "abc"}),
    "return_tokens_as_token_ids": Case(True, writes_ids("choices.0.logprobs.tokens.0"), {"logprobs": 1}),
    "echo": Case(True, lambda ask: ask.text().startswith("x")),
    "logprobs": Case(2, at("choices.0.logprobs.tokens.#", 12)),
    "json_schema": Case(json.dumps(ONE), json_like, {"max_tokens": 40}),
    "program": Case(
        {"version": 1, "program": {}}, refused(word="program"), {"temperature": OMIT, "max_tokens": OMIT}
    ),
}  # fmt: skip

RESPONSES = {
    **named({
        each: each for each in SAMPLING if each != "max_tokens"
    } | {"max_tokens": "max_output_tokens"}),
    "exact": Case(
        True, has("exact.probs"),
        {"text": {"format": {"type": "json_schema", "name": "one", "schema": {"enum": [1, 2]}}}, "max_output_tokens": 20},
    ),
    "input": Case("abc", has("usage"), empty=None),
    "model": Case("another", refused(404)),
    "instructions": Case("brief", differs("usage.input_tokens")),
    "previous_response_id": Case(made_response, differs("usage.input_tokens")),
    "store": Case(False, lambda ask: ask.send("/v1/responses/" + ask().get("id"), None, "GET").status == 404),
    "metadata": Case({"a": "b"}, lambda ask: ask.send(
        "/v1/responses/" + ask().get("id"), None, "GET").get("metadata.a") == "b"),
    "include": Case(["message.output_text.logprobs"], has("output.0.content.0.logprobs")),
    "tools": Case([{"type": "function", **TOOL["function"]}], differs("usage.input_tokens")),
    "tool_choice": Case(
        "required", at("output.0.name", "add"),
        {"tools": [{"type": "function", **TOOL["function"]}], "max_output_tokens": 60},
    ),
    "parallel_tool_calls": Case(False, differs("usage.output_tokens"), {
        "tools": [{"type": "function", **TOOL["function"]}], "tool_choice": "required", "max_output_tokens": 200,
    }),
    "text": Case({"format": {"type": "json_schema", "name": "one", "schema": ONE}}, json_like, {"max_output_tokens": 40}),
    "reasoning": Case({"effort": "low"}, differs("usage.input_tokens")),
    "top_logprobs": Case(
        3, lambda ask: len(ask().get("output.0.content.0.logprobs.0.top_logprobs")) == 3,
        {"include": ["message.output_text.logprobs"]},
    ),
    "stream": Case(True, streams()),
    "stream_options": Case({"include_obfuscation": False}, refused(word="stream_options")),
    "image": Case({"context_compression": "enabled"}, refused(word="context_compression")),
    "priority": Case(5, goes_first, server="queue"),
    "cache_salt": Case(
        "response", uses_its_own_cache("usage.input_tokens_details.cached_tokens"), {"input": "abcdefgh" * 8}
    ),
}  # fmt: skip

INPUT_TOKENS = {
    "input": Case("abc", has("input_tokens"), empty=None),
    "model": Case("another", refused(404)),
    **{
        name: Case(RESPONSES[name].value, differs("input_tokens"))
        for name in ("instructions", "tools", "reasoning")
    },
    "tool_choice": Case("required", refused(word="tool_choice")),
    "previous_response_id": Case(made_response, differs("input_tokens")),
    "text": Case({"verbosity": "low"}, reported("text.verbosity")),
}

CASES = {
    "ChatRequest": CHAT, "CompletionRequest": COMPLETIONS, "ResponsesRequest": RESPONSES,
    "InputTokensRequest": INPUT_TOKENS,
}  # fmt: skip
