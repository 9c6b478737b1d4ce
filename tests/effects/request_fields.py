"""Table of 61 fields that clients of other servers send, with where they come from.

A field that is served has a case of its effect in tests/effects/fields; all others are refused by
name, with a reason and a cure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CHAT, TEXT = "ChatRequest", "CompletionRequest"
_VLLM = "vLLM: ChatCompletionRequest, vllm/entrypoints/openai/protocol.py"
_VLLM_TEXT = "vLLM: CompletionRequest, vllm/entrypoints/openai/protocol.py"
_GUIDED = "vLLM before 0.12: guided decoding"
_OPENAI = "OpenAI: chat completions"
_OPENAI_TEXT = "OpenAI: completions"
_SGLANG = "SGLang: python/sglang/srt/entrypoints/openai/protocol.py"
_LLAMA = "llama.cpp: tools/server/README.md"


@dataclass(frozen=True)
class RequestField:
    """Field of another server's requests.

    Attributes:
        name: field; "a.b" is the member b of the field a.
        source: who defines it.
        value: a value that asks for something.
        record: record of the route that it is sent to.
        beside: other fields of the request.
        refused: whether this server refuses it.
    """

    name: str
    source: str
    value: Any
    record: str = CHAT
    beside: Mapping[str, Any] = field(default_factory=dict)
    refused: bool = False

    @property
    def body(self) -> dict[str, Any]:
        """The field as a body has it."""
        outer, _, inner = self.name.partition(".")
        return {**self.beside, outer: {inner: self.value} if inner else self.value}


REQUEST_FIELDS = (
    RequestField("top_k", _VLLM, 3),
    RequestField("min_p", _VLLM, 0.5),
    RequestField("repetition_penalty", _VLLM, 1.5),
    RequestField("stop_token_ids", _VLLM, [5]),
    RequestField("include_stop_str_in_output", _VLLM, True),
    RequestField("ignore_eos", _VLLM, True),
    RequestField("min_tokens", _VLLM, 2),
    RequestField("skip_special_tokens", _VLLM, False),
    RequestField("spaces_between_special_tokens", _VLLM, True, refused=True),
    RequestField("truncate_prompt_tokens", _VLLM, 3),
    RequestField("truncation_side", _VLLM, "right", beside={"truncate_prompt_tokens": 3}),
    RequestField("prompt_logprobs", _VLLM, 1),
    RequestField("allowed_token_ids", _VLLM, [40, 41]),
    RequestField("bad_words", _VLLM, ["a"]),
    RequestField("echo", _VLLM, True, beside={
        "continue_final_message": True,
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "so"}],
    }),
    RequestField("continue_final_message", _VLLM, True, beside={
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "so"}],
    }),
    RequestField("add_special_tokens", _VLLM_TEXT, False, TEXT),
    RequestField("documents", _VLLM, [{"title": "a", "text": "b"}]),
    RequestField("chat_template", _VLLM, "{{ messages }}", refused=True),
    RequestField("chat_template_kwargs", _VLLM, {"tone": "kind"}),
    RequestField("mm_processor_kwargs", _VLLM, {"min_pixels": 1}, refused=True),
    RequestField("structured_outputs", _VLLM, {"choice": ["a"]}),
    RequestField("guided_json", _GUIDED, {"const": 1}),
    RequestField("guided_regex", _GUIDED, "a"),
    RequestField("guided_choice", _GUIDED, ["a"]),
    RequestField("guided_grammar", _GUIDED, 'root ::= "a"'),
    RequestField("guided_decoding_backend", _GUIDED, "outlines", refused=True),
    RequestField("guided_whitespace_pattern", _GUIDED, " ?", beside={"guided_json": {"const": 1}}),
    RequestField("priority", _VLLM, 1),
    RequestField("request_id", _VLLM, "mine"),
    RequestField("logits_processors", _VLLM, ["module.Processor"], refused=True),
    RequestField("return_tokens_as_token_ids", _VLLM, True, beside={"logprobs": True}),
    RequestField("return_token_ids", _VLLM, True),
    RequestField("cache_salt", _VLLM, "salt"),
    RequestField("kv_transfer_params", _VLLM, {"do_remote_decode": True}, refused=True),
    RequestField("vllm_xargs", _VLLM, {"a": 1}, refused=True),
    RequestField("include_reasoning", _VLLM, False),
    RequestField("thinking_token_budget", _VLLM, 5),
    RequestField("stream_options.continuous_usage_stats", _VLLM, True, beside={"stream": True}),
    RequestField("use_beam_search", _VLLM, True, refused=True),
    RequestField("length_penalty", _VLLM, 2.0, refused=True),
    RequestField("prompt_embeds", _VLLM_TEXT, "AAAA", TEXT, refused=True),
    RequestField("best_of", _OPENAI_TEXT, 2, TEXT),
    RequestField("suffix", _OPENAI_TEXT, "end", TEXT),
    RequestField("logit_bias", _OPENAI, {"40": 5}),
    RequestField("logprobs", _OPENAI, True),
    RequestField("top_logprobs", _OPENAI, 1, beside={"logprobs": True}),
    RequestField("response_format", _OPENAI, {"type": "json_object"}),
    RequestField("functions", _OPENAI, [{"name": "add"}], refused=True),
    RequestField("audio", _OPENAI, {"voice": "a", "format": "wav"}, refused=True),
    RequestField("regex", _SGLANG, "a"),
    RequestField("ebnf", _SGLANG, 'root ::= "a"'),
    RequestField("no_stop_trim", _SGLANG, True),
    RequestField("stop_regex", _SGLANG, "b"),
    RequestField("separate_reasoning", _SGLANG, False),
    RequestField("lora_path", _SGLANG, "one"),
    RequestField("custom_logit_processor", _SGLANG, "{}", refused=True),
    RequestField("return_hidden_states", _SGLANG, True, refused=True),
    RequestField("grammar", _LLAMA, 'root ::= "a"'),
    RequestField("n_predict", _LLAMA, 3, beside={"max_tokens": None}),
    RequestField("n_probs", _LLAMA, 2, TEXT),
)  # fmt: skip
