"""Requests of SGLang's native protocol: the fields of `Engine.generate`, which are also those of a
server's `/generate`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from sglang_lite.errors import short_repr
from sglang_lite.process.random_ids import random_id
from sglang_lite.protocol import (
    Constraint,
    Ebnf,
    JsonSchema,
    Media,
    MediaKind,
    ParameterError,
    Prompt,
    Regex,
    SamplingParams,
    Span,
)
from sglang_lite.protocol.sampling import parameters_for, read_params
from sglang_lite.runtime.core.submission import GenerateRequest
from sglang_lite.runtime.media.data_url import parse_medium
from sglang_lite.runtime.requests.logit_processors import LogitProcessor
from sglang_lite.server.http.body import convert
from sglang_lite.server.sessions import SessionParams


@dataclass(frozen=True, slots=True)
class NativeRequest:
    """Request of the native protocol.

    Attributes:
        calls: requests of the engine, one for each prompt.
        is_list: whether the answer is a list.
        stream: whether the answer is a stream.
        session: session fields of the only prompt; None if it doesn't belong to a session.
    """

    calls: list[GenerateRequest]
    is_list: bool
    stream: bool = False
    session: SessionParams | None = None


class KvHintAction(msgspec.Struct, kw_only=True):
    """Hint about cached keys and values: an action for them, with a version that the sender
    defines.
    """

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any] = msgspec.field(default_factory=dict)


class KvHints(msgspec.Struct, kw_only=True):
    """Hints about cached keys and values that come with a request, in SGLang's envelope."""

    protocol_version: str
    message_id: str
    actions: list[KvHintAction] = msgspec.field(default_factory=list)


def read_request(
    prompt: str | Sequence[str] | None = None,
    sampling_params: Mapping[str, object] | Sequence[Mapping[str, object]] | None = None,
    input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    *,
    return_logprob: bool | Sequence[bool] = False,
    logprob_start_len: int | Sequence[int] | None = None,
    top_logprobs_num: int | Sequence[int] | None = None,
    token_ids_logprob: Sequence[int] | Sequence[Sequence[int]] | None = None,
    return_text_in_logprobs: bool = False,
    return_confidence: bool | None = None,
    return_prompt_token_ids: bool | None = None,
    return_routed_experts: bool | None = None,
    return_hidden_states: bool | None = None,
    lora_path: str | Sequence[str | None] | None = None,
    custom_logit_processor: LogitProcessor | Sequence[LogitProcessor | None] | None = None,
    rid: str | Sequence[str] | None = None,
    priority: int | Sequence[int] | None = None,
    cache_salt: str | Sequence[str] | None = None,
    output_ids: Sequence[int] | Sequence[Sequence[int] | None] | None = None,
    image_data: object = None,
    video_data: object = None,
    audio_data: object = None,
    modalities: Sequence[str] | Sequence[Sequence[str]] | None = None,
    kv_hints: Mapping[str, object] | Sequence[Mapping[str, object] | None] | None = None,
    routed_dp_rank: int | None = None,
    data_parallel_rank: int | None = None,
    stream: bool = False,
    **unsupported: object,  # SGLang's other parameters, which are refused by name if they are set
) -> NativeRequest:
    """Creates a request from the given fields, which `Engine.generate` documents.

    Raises:
        ParameterError: a field is invalid, unknown, or one of SGLang's that this engine doesn't
            support.
        ConstraintError: a structural tag is invalid or not supported.
    """
    _refuse_unsupported_fields(unsupported)
    _read_kv_hints(kv_hints)
    if (prompt is None) == (input_ids is None):
        raise ParameterError("prompt", "exactly one of prompt and input_ids is needed.")
    prompts, is_list = _list_text_prompts(prompt) if input_ids is None else _ids(input_ids)
    count = len(prompts)
    if isinstance(kv_hints, list | tuple) and not is_list:
        raise ParameterError("kv_hints", "is a list for one prompt.", hint="Give one envelope.")
    _one_value_per_prompt("kv_hints", kv_hints, count)
    params = _one_value_per_prompt(
        "sampling_params", {} if sampling_params is None else sampling_params, count
    )
    flags = _one_value_per_prompt("return_logprob", return_logprob, count)
    tops = _one_value_per_prompt("top_logprobs_num", top_logprobs_num, count)
    ids = _logprob_ids_per_prompt(arrays_to_lists(token_ids_logprob), count)
    starts = _one_value_per_prompt("logprob_start_len", logprob_start_len, count)
    processors = _one_value_per_prompt("custom_logit_processor", custom_logit_processor, count)
    priorities = _one_value_per_prompt("priority", priority, count)
    salts = _one_value_per_prompt("cache_salt", cache_salt, count)
    loras = _one_value_per_prompt("lora_path", lora_path, count)
    rids = _rids_per_prompt(rid, count, is_list)
    media = _media_per_prompt(
        {"image": image_data, "video": video_data, "audio": audio_data}, count, is_list, modalities
    )
    outputs: list[Any] = (
        [output_ids] if not is_list else _one_value_per_prompt("output_ids", output_ids, count)
    )
    calls = []
    for i in range(count):
        logprobs: dict[str, Any] = (
            {}
            if not flags[i]
            else {
                "return_logprob": flags[i],
                "logprob_start_len": starts[i],
                "top_logprobs_num": tops[i],
                "return_text_in_logprobs": return_text_in_logprobs,
                "token_ids_logprob": ids[i],
            }
        )
        more = {
            "return_confidence": return_confidence,
            "return_prompt_token_ids": return_prompt_token_ids,
            "return_routed_experts": return_routed_experts,
            "return_hidden_states": return_hidden_states,
            "lora_path": loras[i],
        }
        read, constraint = read_sampling(params[i], {**logprobs, **more})
        calls.append(
            GenerateRequest(
                _insert_prompt_media(prompts[i], media[i]),
                read,
                constraint,
                namespace="" if salts[i] is None else salts[i],
                priority=0 if priorities[i] is None else priorities[i],
                logit_processor=_require_callable_processor(processors[i]),
                rid=rids[i],
                output_ids=() if outputs[i] is None else outputs[i],
                stream=stream,
                routed_dp_rank=replica_rank(routed_dp_rank, data_parallel_rank),
            )
        )
    return NativeRequest(calls, is_list or any(call.samples != 1 for call in calls), stream)


# Fields about log-probabilities, with the values that request nothing.
_OF_LOGPROBS: dict[str, object] = {
    "logprob_start_len": -1,
    "top_logprobs_num": 0,
    "token_ids_logprob": [],
    "return_text_in_logprobs": False,
}


def unused_logprob_fields(fields: Mapping[str, object]) -> list[str]:
    """Returns the names of a request's options for log-probabilities that have no effect, because
    `return_logprob` isn't set for their prompt.

    Args:
        fields: arguments of `read_request`.
    """
    flags = fields.get("return_logprob", False)
    unused = []
    for name, nothing in _OF_LOGPROBS.items():
        value = arrays_to_lists(fields.get(name, nothing))
        several = isinstance(value, list | tuple) and (
            name != "token_ids_logprob" or any(isinstance(each, list | tuple) for each in value)
        )
        asked = [each not in (None, nothing, ()) for each in (value if several else [value])]
        if several and isinstance(flags, list | tuple):
            unused += [f"{name}[{i}]" for i, flag in enumerate(flags) if asked[i] and not flag]
        elif any(asked) and not (any(flags) if isinstance(flags, list | tuple) else flags):
            unused.append(name)
    return unused


def unused_kv_hints(kv_hints: object) -> list[str]:
    """Returns the kinds of a request's KV cache hints, all of which are ignored: the engine infers
    from programs which cache entries will be reused.

    Raises:
        ParameterError: the hints are not in SGLang's envelope.
    """
    return [
        f"kv_hints ({action.action_type})"
        for envelope in _read_kv_hints(kv_hints)
        for action in envelope.actions
    ]


def _read_kv_hints(kv_hints: object) -> list[KvHints]:
    if isinstance(kv_hints, list | tuple):
        given = {f"kv_hints[{i}]": each for i, each in enumerate(kv_hints) if each}
    else:
        given = {"kv_hints": kv_hints} if kv_hints else {}
    return [convert(each, KvHints, where) for where, each in given.items()]


def _refuse_unsupported_fields(others: Mapping[str, object]) -> None:
    """Raises ParameterError if a field is unknown, or is set and not supported."""
    for name, value in others.items():
        if name not in _UNSUPPORTED:
            near = difflib.get_close_matches(name, inspect.signature(read_request).parameters, n=1)
            hint = f"Did you mean {near[0]}=?" if near else ""
            raise ParameterError(name, "generate has no such parameter.", hint=hint)
        if value:
            raise ParameterError(name, "is not supported by this engine.")


# Fields of SGLang's requests that this engine accepts only if they are not set.
_UNSUPPORTED = frozenset((
    "mm_hashes", "mm_content_hashes",
    "require_reasoning", "routed_experts_start_len", "bootstrap_host",
    "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank",
    "external_trace_header", "session_params", "session_id", "kv_router_hint", "input_embeds",
))  # fmt: skip


def replica_rank(routed_dp_rank: int | None, data_parallel_rank: int | None) -> int | None:
    """Returns the replica that a request names as `routed_dp_rank` or, by the older name,
    `data_parallel_rank`. Raises ParameterError if these differ.
    """
    if None not in (routed_dp_rank, data_parallel_rank) and routed_dp_rank != data_parallel_rank:
        raise ParameterError(
            "data_parallel_rank", f"routed_dp_rank is {routed_dp_rank!r}.", hint="Give one of them."
        )
    return data_parallel_rank if routed_dp_rank is None else routed_dp_rank


def _list_text_prompts(prompt: Any) -> tuple[list[Any], bool]:
    if isinstance(prompt, str):
        return [prompt], False
    if not isinstance(prompt, list | tuple) or not all(isinstance(p, str) for p in prompt):
        raise ParameterError(
            "prompt", "is neither text nor a list of texts.", hint="Token ids are input_ids."
        )
    return list(prompt), True


def _insert_prompt_media(prompt: Any, images: Sequence[Media]) -> Any:
    """Returns a prompt with the images, videos and sounds that its text has placeholders for.
    Raises ParameterError for a prompt of token ids.
    """
    if not images:
        return prompt
    if not isinstance(prompt, str):
        name = f"{images[0].kind}_data"
        raise ParameterError(
            name, "goes with text: token ids name no image.", hint="Give the prompt as text."
        )
    return Prompt((Span(prompt),), images=tuple(images))


def _media_per_prompt(
    by_kind: Mapping[MediaKind, object], count: int, is_list: bool, modalities: object
) -> list[list[Media]]:
    """Returns the images, videos and sounds of each prompt. For a list of prompts, each kind has
    one entry per prompt: a medium, a list of media or None. SGLang's `modalities`, if given, are
    checked against the media.
    """
    found: list[list[Media]] = [[] for _ in range(count)]
    for kind, given in by_kind.items():
        if given is not None and given != []:
            for own, each in zip(
                found, _one_value_per_prompt(f"{kind}_data", given, count) if is_list else [given]
            ):
                several = (
                    each if isinstance(each, list | tuple) else [each] if each is not None else []
                )
                own += [_convert_medium(kind, one) for one in several]
    _check_modalities(modalities, found)
    return found


def _check_modalities(given: object, media: Sequence[Sequence[Media]]) -> None:
    """Raises ParameterError if SGLang's `modalities` name a kind of media that isn't given."""
    kinds = sorted({each.kind for own in media for each in own})
    for each in given if isinstance(given, list | tuple) else [] if given is None else [given]:
        for name in each if isinstance(each, list | tuple) else [each]:
            if name not in kinds:
                problem = f"{short_repr(name)} is not the kind of what is given ({', '.join(kinds) or 'nothing'})."
                raise ParameterError(
                    "modalities", problem, hint="Leave it out: image_data and others tell the kind."
                )


def _convert_medium(kind: MediaKind, given: object) -> Media:
    if isinstance(given, Media):
        return given
    if isinstance(given, dict):
        for name in given.keys() - {"url", "detail"}:
            raise ParameterError(
                f"{kind}_data.{name}", "is not supported by this engine.", hint="Leave it out."
            )
        given = given.get("url")
    return parse_medium(given, f"{kind}_data", kind)


def arrays_to_lists(given: Any) -> Any:  # any value of a user
    """Converts arrays, such as numpy's, to lists, also within a list. Returns other values
    unchanged.
    """
    if hasattr(given, "tolist"):
        return given.tolist()
    if isinstance(given, list | tuple) and any(hasattr(each, "tolist") for each in given):
        return [arrays_to_lists(each) for each in given]
    return given


def _ids(input_ids: Any) -> tuple[list[Any], bool]:
    input_ids = arrays_to_lists(input_ids)
    if not isinstance(input_ids, list | tuple):
        raise ParameterError("input_ids", "is no list of token ids.")
    if input_ids and isinstance(input_ids[0], list | tuple):
        return list(input_ids), True
    return [input_ids], False


def _one_value_per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """Returns a list with one value for each prompt. A single value is repeated for all prompts."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ParameterError(name, f"{len(value)} entries for {count} prompts.")
    return list(value)


def _logprob_ids_per_prompt(value: Any, count: int) -> list[Any]:
    several = (
        isinstance(value, list | tuple)
        and value
        and all(isinstance(ids, list | tuple | None) for ids in value)
    )
    return _one_value_per_prompt("token_ids_logprob", value, count) if several else [value] * count


def _rids_per_prompt(rid: Any, count: int, is_list: bool) -> list[str]:
    if rid is None:
        return [random_id() for _ in range(count)]
    if isinstance(rid, str):
        return [f"{rid}_{i}" for i in range(count)] if is_list else [rid]
    rids = _one_value_per_prompt("rid", rid, count)
    if not all(isinstance(r, str) for r in rids) or len(set(rids)) < count:
        raise ParameterError("rid", "the names are not strings, or not all different.")
    return rids


def _require_callable_processor(value: Any) -> LogitProcessor | None:
    if value is not None and not callable(value):
        raise ParameterError(
            "custom_logit_processor",
            "is not callable.",
            hint="Pass a function processor(token_ids, logits) -> logits; pickled code is not run.",
        )
    processor: LogitProcessor | None = value
    return processor


_PARAMS = parameters_for("sampling_params", sglang=True)
_LOGPROBS = parameters_for("request", sglang=True)


def _structural_tag(text: str) -> Constraint:
    from sglang_lite.constraints import structural_tag  # imports the parsers of constraints

    return structural_tag.parse(text)


_GRAMMARS: dict[str, Callable[[str], Constraint]] = {
    "json_schema": JsonSchema,
    "regex": Regex,
    "ebnf": Ebnf,
    "structural_tag": _structural_tag,
}
SAMPLING_FIELDS = frozenset((*_PARAMS, *_GRAMMARS))


def read_sampling(
    given: object, logprobs: Mapping[str, object] = MappingProxyType({})
) -> tuple[SamplingParams, Constraint | None]:
    """Reads the sampling parameters and constraint of SGLang's `sampling_params`; a value of None
    stands for the default.

    Args:
        logprobs: fields of the request itself about log-probabilities and confidence.

    Raises:
        ParameterError: a key is unknown, a value isn't supported, or more than one grammar is
            given.
        ConstraintError: a structural tag is invalid or not supported.
    """
    if not isinstance(given, Mapping):
        raise ParameterError("sampling_params", f"{type(given).__name__} is not a dictionary.")
    written: dict[str, object] = dict(logprobs)
    for name, value in given.items():
        if name in _PARAMS:
            written[name] = value
        # tokens are decoded to their bytes
        elif name not in _GRAMMARS and name != "spaces_between_special_tokens":
            known = sorted(SAMPLING_FIELDS)
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"It has: {', '.join(known)}."
            raise ParameterError(name, "sampling_params has no such field.", hint=hint)
    return read_params(written, {**_PARAMS, **_LOGPROBS}), _parse_sglang_constraint(given)


def _parse_sglang_constraint(given: Mapping[str, Any]) -> Constraint | None:
    # an empty value stands for no grammar
    grammars = [name for name in _GRAMMARS if given.get(name)]
    if not grammars:
        return None
    name = grammars[0]
    text = given[grammars[0]]
    if given.get("max_think_tokens") is not None:
        problem = (
            f"is given with {name}, whose text begins with the answer, so there are no thoughts."
        )
        raise ParameterError("max_think_tokens", problem, hint="Leave it out, or send a chat.")
    if len(grammars) > 1:
        raise ParameterError(name, f"and {grammars[1]} are both given; only one grammar can hold.")
    if not isinstance(text, str):
        raise ParameterError(name, f"{type(text).__name__} is not a string.")
    return _GRAMMARS[name](text)
