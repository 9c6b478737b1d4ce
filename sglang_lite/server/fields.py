"""Fields of requests: honoured, neutral (without effect on an answer of this server) or refused.

A protocol's record declares the honoured fields; this file lists the others. No field is dropped
silently: an unknown one is refused, with the most similar known name, or reported.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

import msgspec

from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.anything import Json
from sglang_lite.server.http.body import convert
from sglang_lite.server.sglang.request import SAMPLING_FIELDS

R = TypeVar("R", bound=msgspec.Struct)


@dataclass(frozen=True)
class Fields(Generic[R]):
    """Fields of a protocol's request.

    Attributes:
        record: record type whose fields are honoured.
        neutral: ignored fields by name, with the reason why they can't change an answer.
        refused: fields that are not supported, by name, with the values that mean "not set" and are
            accepted; None is always accepted.
    """

    record: type[R]
    neutral: Mapping[str, str]
    refused: Mapping[str, tuple[object, ...]]

    def parse_record(
        self, body: Mapping[str, Json], unused: list[str] | None = None, *, strict: bool = True
    ) -> R:
        """Converts a request's body to its record.

        Args:
            unused: list to which the names of unknown fields are appended; None to refuse unknown
                fields.
            strict: False if numbers and flags may be text, as in forms.

        Raises:
            ParameterError: a field is unknown or refused, or a value has the wrong type.
        """
        honoured = {}
        for name, value in body.items():
            if name in self.known:
                honoured[name] = value
            elif name in self.neutral or value is None:
                if name not in self.neutral and name not in self.refused:
                    self._report_unknown(name, unused)
            elif name in self.refused:
                if not any(
                    value == taken and type(value) is type(taken) for taken in self.refused[name]
                ):
                    why, cure = REASONS.get(
                        name, ("is not supported by this server.", "Leave it out.")
                    )
                    raise ParameterError(name, why, hint=cure)
            else:
                self._report_unknown(name, unused)
        return convert(honoured, self.record, strict=strict)

    @property
    def known(self) -> frozenset[str]:
        """Names of the honoured fields, in their encoded spelling."""
        return _names(self.record)

    def _report_unknown(self, name: str, unused: list[str] | None) -> None:
        if unused is not None:
            unused.append(name)
            return
        near = difflib.get_close_matches(name, (*self.known, *self.neutral, *self.refused), n=1)
        hint = (
            f"Did you mean {near[0]}?"
            if near
            else "Leave it out, or serve with --unknown-fields report."
        )
        if "sampling_params" in self.known and name in SAMPLING_FIELDS:
            hint = "It belongs in sampling_params."
        if "sampling_params" in self.known and name == "response_format":
            hint = 'Give a schema as text in sampling_params.json_schema; {"type": "object"} allows any object.'
        raise ParameterError(name[:100], "is not a field of this request.", hint=hint)


@cache
def _names(record: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(record.__struct_encode_fields__)


# ------------------------------------------------------------------------------------------- tables

_NAMES = "A name of the caller or the request; the model doesn't see it."
_CACHE = "Every prefix is cached as long as memory allows."
_ORDER = "This server has only one tier of service."
_GATEWAY = "A gateway adds it for its own logs."

# Fields that SGLang's gateways add to every request.
GATEWAY_NEUTRAL = {"log_metrics": _GATEWAY, "no_logs": _GATEWAY}
GATEWAY_REFUSED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys((
        "background", "return_bytes", "return_entropy", "return_hidden_states", "return_routed_experts",
    ), (False,)),
    **dict.fromkeys(("lora_path", "session_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"), ()),
}  # fmt: skip

_OPENAI_NEUTRAL = {
    "user": _NAMES,
    "safety_identifier": _NAMES,
    "service_tier": _ORDER,
    "prompt_cache_key": _CACHE,
    "prompt_cache_options": _CACHE,
    "prompt_cache_retention": _CACHE,
}

CHAT_NEUTRAL = {
    **_OPENAI_NEUTRAL,
    **GATEWAY_NEUTRAL,
    "metadata": _NAMES,
    "store": "Chat completions are not stored; only responses can be retrieved.",
    "prediction": "A prediction only speeds up generation; the answer is the same.",
    "client_metadata": _NAMES,
}
# Fields of vLLM and SGLang that chats and texts refuse.
_COMPLETIONS_REFUSED: dict[str, tuple[object, ...]] = {
    **{name: allowed for name, allowed in GATEWAY_REFUSED.items() if name != "lora_path"},
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "spaces_between_special_tokens": (False,),
    **dict.fromkeys((
        "chat_template", "custom_logit_processor", "custom_params", "guided_decoding_backend",
    ), ()),
    "kv_transfer_params": ({},),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": ([],),
    "vllm_xargs": ({},),
}  # fmt: skip

# Why fields are refused, and what to do instead; others have a general message.
REASONS = {
    "audio": (
        "asks for speech, and this server's models write only text.",
        'Leave it out, and "audio" out of modalities.',
    ),
    "chat_template": (
        "would run a client's template on the server.",
        "Start the server with --chat-template.",
    ),
    "custom_logit_processor": (
        "would run a client's Python on the server.",
        "Use logit_bias, allowed_token_ids, bad_words or a constraint.",
    ),
    "functions": ("is an old form that OpenAI has replaced.", "Give the functions in tools."),
    "guided_decoding_backend": (
        "can't be chosen: this server has one engine for constraints.",
        "Leave it out.",
    ),
    "kv_transfer_params": (
        "moves the cache between vLLM's servers, which this server can't join.",
        "Leave it out.",
    ),
    "length_penalty": (
        "belongs to beam search, which this server doesn't have.",
        "Use best_of on /v1/completions.",
    ),
    "logits_processors": (
        "names Python code for the server to run, which clients can't choose here.",
        "Use logit_bias, allowed_token_ids, bad_words or a constraint.",
    ),
    "mm_processor_kwargs": (
        "can't be set for a request: the server's settings say how images are scaled.",
        "Scale the image before you send it.",
    ),
    "prompt_embeds": ("is not supported: prompts are text or token ids.", "Give those."),
    "return_hidden_states": (
        "has no place in an answer of OpenAI's routes.",
        "Use /generate, of a server with --enable-return-hidden-states.",
    ),
    "spaces_between_special_tokens": (
        "can't be true: special tokens are written one after the other.",
        "Set it to false, or leave it out.",
    ),
    "use_beam_search": (
        "is not supported: answers are drawn token by token.",
        "Use best_of on /v1/completions, or temperature 0.",
    ),
    "vllm_xargs": (
        "is for extensions of vLLM, which this server doesn't load.",
        "Leave it out.",
    ),
}

CHAT_REFUSED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("audio", "moderation", "web_search_options", "input_ids"), ()),
    "modalities": (["text"], []),
    "functions": ([],),
    "function_call": ("none",),
    **_COMPLETIONS_REFUSED,
}  # fmt: skip

# Fields of the object with a medium's bytes or address, in a part of a message.
MEDIA_NEUTRAL = {
    "detail": "The model's processor scales images, by the settings of the server.",
    "format": "The first bytes of a file tell its format.",
}

DECISIONS_NEUTRAL = {
    **GATEWAY_NEUTRAL,
    "prompt_cache_key": _CACHE,
    "prompt_cache_options": _CACHE,
    "safety_identifier": _NAMES,
}

COMPLETIONS_NEUTRAL = {
    "user": _NAMES,
    **GATEWAY_NEUTRAL,
    "metadata": _NAMES,
    "store": CHAT_NEUTRAL["store"],
}
COMPLETIONS_REFUSED: dict[str, tuple[object, ...]] = {**_COMPLETIONS_REFUSED}

EMBEDDINGS_NEUTRAL = {**GATEWAY_NEUTRAL, "user": _NAMES, "rid": _NAMES}
POOLING_NEUTRAL = {
    **EMBEDDINGS_NEUTRAL,
    "request_id": _NAMES,
    "cache_salt": "Embedding models have no prefix cache.",
}
POOLING_REFUSED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(
        ("add_special_tokens", "chat_template", "truncate_prompt_tokens", "truncation_side"), ()
    ),
    "continue_final_message": (False,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "padding": ("do_not_pad",),
}

NATIVE_NEUTRAL = {
    **GATEWAY_NEUTRAL,
    "model": "This server has one model.",
    "routing_key": _GATEWAY,
    "custom_labels": _GATEWAY,
    "external_trace_header": _GATEWAY,
}
NATIVE_REFUSED: dict[str, tuple[object, ...]] = {
    **{name: allowed for name, allowed in GATEWAY_REFUSED.items() if name not in ("session_params", "lora_path")},
    "mm_hashes": ([],),
    **dict.fromkeys((
        "input_embeds", "session_id", "custom_logit_processor", "max_thinking_tokens", "sampling_logprobs_mode",
    ), ()),
    **dict.fromkeys((
        "require_reasoning", "return_sampling_mask", "return_flat_raw_top_logprobs",
        "return_flat_raw_top_logprobs_b64", "return_flat_raw_output_top_logprobs",
    ), (False,)),
}  # fmt: skip

OPEN_SESSION_REFUSED: dict[str, tuple[object, ...]] = {"streaming": (False,), "timeout": ()}

RESPONSES_NEUTRAL = {
    **_OPENAI_NEUTRAL,
    **GATEWAY_NEUTRAL,
    "client_metadata": _NAMES,
    "max_tool_calls": "It limits calls of hosted tools, which this server doesn't have.",
}
RESPONSES_REFUSED: dict[str, tuple[object, ...]] = {
    **GATEWAY_REFUSED,
    **dict.fromkeys(
        ("data_parallel_rank", "background_options", "conversation", "moderation", "prompt"), ()
    ),
    "access_programs": ({"cyber": "standard"},),
    "context_management": ([],),
    "truncation": ("disabled",),
}
INPUT_TOKENS_NEUTRAL = {
    **GATEWAY_NEUTRAL,
    "parallel_tool_calls": "It holds the answer, and is not part of the prompt that is counted.",
}
INPUT_TOKENS_REFUSED: dict[str, tuple[object, ...]] = {
    "conversation": (),
    "personality": (),
    "truncation": ("disabled",),
}

# first words of a line that some clients put into `system`
BILLING_HEADER = "x-anthropic-billing-header"

MESSAGES_NEUTRAL = {
    BILLING_HEADER: "The line changes with every request, so it is left out of the prompt.",
    **dict.fromkeys(("billing_policy", "fallback_credit_token", "service_tier", "speed"), _ORDER),
    "cache_control": _CACHE,
    "diagnostics": "It requests a report about the cache, which doesn't affect the answer.",
    "inference_geo": "The server computes the answer where it runs.",
    **dict.fromkeys(("metadata", "user_profile_id", "workspace_id"), _NAMES),
}
MESSAGES_REFUSED: dict[str, tuple[object, ...]] = {
    "compaction": (),
    "container": (),
    "context_management": (
        {},
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    "fallbacks": ([],),
    "mcp_servers": ([],),
    "thread": (),
}

OLLAMA_NEUTRAL = {
    "truncate": "Prompts are never cut: one that is too long is refused.",
    "shift": "The context never shifts: an answer ends where it is full.",
}
OLLAMA_EMBEDDINGS_NEUTRAL = {"shift": OLLAMA_NEUTRAL["shift"]}
_LOADING = "It says how Ollama loads a model; this one is loaded."
OLLAMA_OPTIONS_NEUTRAL = dict.fromkeys((
    "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap",
    "use_mlock", "embedding_only", "num_thread", "draft_num_predict",
), _LOADING)  # fmt: skip
OLLAMA_OPTIONS_REFUSED: dict[str, tuple[object, ...]] = {
    "mirostat": (0,),
    "mirostat_tau": (5.0, 5),
    "mirostat_eta": (0.1,),
    "tfs_z": (1.0, 1),
    "typical_p": (1.0, 1),
}

LOGGING_REFUSED: dict[str, tuple[object, ...]] = {
    "log_requests_level": (0,),
    "log_requests_format": ("text",),
    "dump_requests_folder": ("",),
    "dump_requests_threshold": (),
    "dump_requests_exclude_meta_keys": ([],),
    "crash_dump_folder": ("",),
}
PROFILE_REFUSED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("start_step", "num_steps", "profile_id", "profile_prefix"), ()),
    "activities": (["CPU", "GPU"], ["GPU", "CPU"], []),
    "profile_by_stage": (False,),
    "profile_stages": ([],),
    "merge_profiles": (False,),
}
