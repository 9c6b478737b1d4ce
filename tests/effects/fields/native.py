"""Cases of `/generate`, SGLang's native protocol, and of its requests beside it."""

from __future__ import annotations

import threading
from typing import Any

import httpx2

from tests.effects.fields.case import (
    OMIT,
    Answer,
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
from tests.waiting import until

GREEDY = {"temperature": 0, "max_new_tokens": 4}
SCORED = {"return_logprob": True}
LONG = "abcdefgh" * 8
HINTS = {
    "protocol_version": "1",
    "message_id": "m",
    "actions": [{"action_id": "1", "action_type": "retain", "action_version": "1"}],
}
STRINGS = '{"type": "array", "items": {"type": "string"}}'


def goes_first(ask: Ask) -> bool:
    """Whether a request overtakes one that came before, where one is answered at a time."""
    ended: list[str] = []
    url = ask.url
    # so long that a client on a busy machine notes the first end before the second comes
    long = {"max_new_tokens": 600, "ignore_eos": True}

    def waiting(count: int) -> bool:
        stats = httpx2.get(f"{url}/internal_state").json()["internal_states"][0]
        return int(stats["waiting"]) == count

    def other() -> None:
        body = {"text": "zz", "sampling_params": long}
        assert httpx2.post(f"{url}/generate", json=body, timeout=60).status_code == 200
        ended.append("other")

    def own() -> None:
        fields = {"sampling_params": long, "max_tokens": 600, "max_output_tokens": 600}
        own_fields = {name: value for name, value in fields.items() if name in ask.door.base}
        assert ask(**own_fields).status == 200
        ended.append("own")

    first = {
        "text": "yy",
        "rid": "first",
        "stream": True,
        "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True},
    }
    with httpx2.stream("POST", f"{url}/generate", json=first, timeout=60) as stream:
        lines = stream.iter_lines()  # whose end would close the stream
        next(lines)
        threads = [threading.Thread(target=each) for each in (other, own)]
        for count, thread in enumerate(threads, 1):
            thread.start()
            until(lambda count=count: waiting(count))
        httpx2.post(f"{url}/abort_request", json={"rid": "first"})
    for thread in threads:
        thread.join()
    return ended == ["own", "other"]


def in_a_session(ask: Ask) -> bool:
    """Whether a request continues another one of a session."""
    session = ask.send("/open_session", {"capacity_of_str_len": 1000}).body
    begun = ask(session_params={"id": session}) if ask.own else ask()
    given = {"session_params": {"id": session, "rid": begun.get("meta_info.id")}} if ask.own else {}
    return (
        ask(**given).get("meta_info.prompt_tokens") == 2 * begun.get("meta_info.prompt_tokens") + 4
    )


def has_entries(path: str, count: int) -> Any:
    return lambda ask: len(ask().get(path) or ()) == count


def first_entry_has(path: str, count: int) -> Any:
    return lambda ask: len((ask().get(path) or [[]])[0] or ()) == count


def texts_of_tokens(ask: Ask) -> bool:
    return all(entry[2] is not None for entry in ask().get("meta_info.output_token_logprobs"))


DOORS = {
    "GenerateBody": Door(
        "/generate", {"text": "abcd", "sampling_params": GREEDY}, "text", "meta_info.completion_tokens"
    ),
    "TokenizeRequest": Door("/tokenize", {"prompt": "ab"}),
    "DetokenizeRequest": Door("/detokenize", {"tokens": [66, 67]}),
    "SeparateReasoningRequest": Door(
        "/separate_reasoning", {"text": "<think>a</think>b", "reasoning_parser": "qwen3"}
    ),
    "ParseFunctionCallRequest": Door("/parse_function_call", {
        "text": '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>', "tool_call_parser": "qwen25",
        "tools": [{"type": "function", "function": {"name": "add"}}],
    }),
    "OpenSession": Door("/open_session", {"capacity_of_str_len": 10}),
    "CloseSession": Door("/close_session", {}),
    "AbortRequest": Door("/abort_request", {}),
}  # fmt: skip

GENERATE = {
    "text": Case("ab", at("meta_info.prompt_tokens", 2)),
    "input_ids": Case([67, 68, 69], at("meta_info.prompt_tokens", 3), {"text": OMIT}),
    # more tokens than by default, which no text has that ends by chance
    "sampling_params": Case(
        {"max_new_tokens": 150, "ignore_eos": True}, at("meta_info.completion_tokens", 150)
    ),
    "return_logprob": Case(True, has_entries("meta_info.output_token_logprobs", 4)),
    "logprob_start_len": Case(1, has_entries("meta_info.input_token_logprobs", 3), SCORED),
    "top_logprobs_num": Case(2, first_entry_has("meta_info.output_top_logprobs", 2), SCORED),
    "token_ids_logprob": Case([67], first_entry_has("meta_info.output_token_ids_logprobs", 1), SCORED),
    "return_text_in_logprobs": Case(True, texts_of_tokens, SCORED),
    "return_confidence": Case(
        True, has("meta_info.output_allowed_logprobs"), {"sampling_params": {**GREEDY, "regex": "[ab]{4}"}}
    ),
    "return_prompt_token_ids": Case(True, at("prompt_token_ids.#", 4)),
    "return_routed_experts": Case(True, has("meta_info.routed_experts"), server="mixture"),
    "return_hidden_states": Case(True, has("meta_info.hidden_states"), server="mixture"),
    "lora_path": Case("one", differs("output_ids"), server="mixture"),
    "rid": Case("mine", at("meta_info.id", "mine")),
    "kv_hints": Case(HINTS, reported("kv_hints (retain)")),
    "priority": Case(5, goes_first, server="queue"),
    "image_data": Case("data:image/png;base64,AAAA", refused(word="image")),
    "video_data": Case("data:video/mp4;base64,AAAA", refused(word="video")),
    "audio_data": Case("data:audio/wav;base64,AAAA", refused()),
    "modalities": Case(["image"], refused(word="modalities")),
    "cache_salt": Case("mine", uses_its_own_cache("meta_info.cached_tokens"), {"text": LONG}),
    "output_ids": Case([67, 68], lambda ask: ask().get("output_ids")[:2] == [67, 68]),
    "prompt": Case(
        {"spans": [{"text": "abc"}]}, lambda ask: ask().get("generation.usage.prompt_tokens") == 3, {"text": OMIT}
    ),
    "constraint": Case({"kind": "Regex", "pattern": "abbb"}, lambda ask: ask().get("text") == "abbb"),
    "timeout": Case(
        0.000001, at("meta_info.completion_tokens", 1),
        {"sampling_params": {"temperature": 0, "max_new_tokens": 60, "json_schema": STRINGS}},
    ),
    "stream": Case(True, streams()),
    "session_params": Case({"id": "set by the case"}, in_a_session),
    "routed_dp_rank": Case(1, refused(word="routed_dp_rank")),
    "data_parallel_rank": Case(1, refused(word="dp_rank")),
}  # fmt: skip


def opened(ask: Ask) -> Answer:
    """Session of a name, opened anew."""
    ask.send("/close_session", {"session_id": "mine"})
    return ask.send("/open_session", {"capacity_of_str_len": 10, "session_id": "mine"})


def is_closed(ask: Ask) -> bool:
    opened(ask)
    ask()
    return ask.send("/generate", {"text": "a", "session_params": {"id": "mine"}}).status == 404


def takes_few_tokens(ask: Ask) -> bool:
    session = ask().body if ask.own else None
    body = {"text": LONG, "sampling_params": GREEDY, "session_params": {"id": session}}
    return session is not None and ask.send("/generate", body).status == 400


def is_named(ask: Ask) -> bool:
    ask.send("/close_session", {"session_id": "mine"})
    return ask().body == "mine"


def aborts(ask: Ask) -> bool:
    """Whether a request ends as it is aborted; otherwise it ends by itself."""
    body = {
        "text": "ab",
        "rid": "endless",
        "stream": True,
        "sampling_params": {"max_new_tokens": 300, "ignore_eos": True},
    }
    with httpx2.stream("POST", f"{ask.url}/generate", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        ask()
        text = "".join(lines)
    return '"abort"' in text or "was aborted" in text


REQUESTS = {
    "GenerateBody": GENERATE,
    "TokenizeRequest": {
        "prompt": Case("abc", at("tokens.#", 3)),
        "text": Case("abcd", lambda ask: ask().get("tokens.#") == 4, {"prompt": OMIT}),
        "add_special_tokens": Case(False, differs("tokens"), server="queue"),
        "model": Case("another", refused(404)),
    },
    "DetokenizeRequest": {
        "tokens": Case([66], lambda ask: len(ask().get("text")) == 1),
        "ids": Case([66, 67, 68], lambda ask: len(ask().get("text") or "") == 3, {"tokens": OMIT}),
        "skip_special_tokens": Case(False, lambda ask: "<|end|>" in ask().text, {"tokens": [66, 0]}),
        "model": Case("another", refused(404)),
    },
    "SeparateReasoningRequest": {
        "text": Case("<think>c</think>d", at("text", "d"), empty=""),
        "reasoning_parser": Case("qwen3", at("reasoning_text", "a"), empty="gpt-oss"),
    },
    "ParseFunctionCallRequest": {
        "text": Case("nothing", at("normal_text", "nothing"), empty="something"),
        "tools": Case(
            [{"type": "function", "function": {"name": "add"}}], at("calls.0.tool_index", 0), empty=[]
        ),
        "tool_call_parser": Case("qwen25", at("calls.0.name", "add"), empty="mistral"),
    },
    "OpenSession": {
        "capacity_of_str_len": Case(4, takes_few_tokens, empty=1000),
        "session_id": Case("mine", is_named),
    },
    "CloseSession": {"session_id": Case("mine", is_closed, empty="another")},
    "AbortRequest": {"rid": Case("endless", aborts), "abort_all": Case(True, aborts)},
}  # fmt: skip
