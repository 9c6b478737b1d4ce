"""Converts a backend's answers to the form that SGLang's users read, and warns about data that a
server left out.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from sglang_lite.protocol import (
    Delta,
    Generation,
    Media,
    Message,
    SamplingParams,
    Selection,
    TokenLogprob,
    Unset,
    Usage,
)
from sglang_lite.protocol.anything import Json, UserValue


def meta_info(record: object) -> dict[str, Json] | None:
    """Returns SGLang's meta_info for the record of a variable, or None if the record has no
    metadata.

    Args:
        record: a Generation, a Selection, metadata from a blocking hook, or a list of records of
            several samples or branches.
    """
    if isinstance(record, Generation):
        return _generation_meta_info(record)
    if isinstance(record, list):
        return {"samples": [meta_info(each) for each in record]}
    if isinstance(record, Selection):
        usage = record.usage
        return {
            **record.meta,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "e2e_latency": usage.total_s,
        }
    return dict(record) if isinstance(record, dict) else None


def _generation_meta_info(g: Generation) -> dict[str, Any]:
    reason: dict[str, Any] = {"type": g.finish_reason}
    reason["length" if g.finish_reason == "length" else "matched"] = (
        g.usage.completion_tokens if g.finish_reason == "length" else g.matched
    )
    meta = {
        **g.meta,
        "finish_reason": reason,
        "prompt_tokens": g.usage.prompt_tokens,
        "completion_tokens": g.usage.completion_tokens,
        "cached_tokens": g.usage.cached_tokens,
        "e2e_latency": g.usage.total_s,
    }
    if g.reasoning:
        meta["reasoning_content"] = g.reasoning
    if g.output_logprobs:
        meta["output_token_logprobs_length"] = len(g.output_logprobs)
    return {
        **meta,
        **_logprobs("output", g.output_logprobs),
        **_logprobs("input", g.prompt_logprobs),
        **({} if g.scores is None else g.scores.as_meta()),
    }


def with_warnings(meta: Mapping[str, Json], *warnings: str) -> dict[str, Json]:
    """Returns metadata with added warnings, which say how the answer differs from the request."""
    return {**meta, **({"warnings": [*meta.get("warnings", ()), *warnings]} if warnings else {})}


class DeltaWithMeta(Delta, frozen=True):
    """Piece of a stream, with metadata in SGLang's form."""

    meta: dict[str, Json] = msgspec.field(default_factory=dict)


def delta_meta(delta: Delta) -> dict[str, Json]:
    """Returns the metadata of one chunk of a stream, in SGLang's form."""
    return _logprobs("output", delta.logprobs)


def merge_meta(early: dict[str, Json], late: dict[str, Json]) -> dict[str, Json]:
    """Merges the metadata of two consecutive chunks: log-probabilities are concatenated, and other
    values are taken from the later chunk.
    """
    lists = {
        key
        for key in early.keys() & late.keys()
        if key.startswith("output_") and key.endswith("_logprobs")
    }
    return {**early, **late, **{key: [*early[key], *late[key]] for key in lists}}


def _logprobs(kind: str, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    if not entries:
        return {}
    meta: dict[str, Any] = {
        f"{kind}_token_logprobs": [[e.logprob, e.token_id, e.text] for e in entries]
    }
    if any(e.top for e in entries):
        meta[f"{kind}_top_logprobs"] = [[list(t) for t in e.top] for e in entries]
    if any(e.ids for e in entries):
        meta[f"{kind}_token_ids_logprobs"] = [[list(t) for t in e.ids] for e in entries]
    return meta


def collect_usages(record: object) -> list[Usage]:
    """Returns the usages in the record of a variable, including those of samples and of gathered
    branches.
    """
    if isinstance(record, Generation | Selection):
        return [record.usage]
    if isinstance(record, list):
        return [usage for each in record for usage in collect_usages(each)]
    return []


def messages_to_dicts(messages: Sequence[Message]) -> list[dict[str, Json]]:
    """Returns messages in the form of OpenAI's chat API. Content is a string, or a list of parts if
    the message contains media.
    """
    found = []
    for message in messages:
        if any(isinstance(part, Media) for part in message.content):
            parts: Any = [
                _convert_to_content_part(part)
                if isinstance(part, Media)
                else {"type": "text", "text": part}
                for part in message.content
            ]
        else:
            parts = "".join(map(str, message.content))
        found.append({"role": message.role, "content": parts})
    return found


def _convert_to_content_part(image: Media) -> dict[str, Json]:
    if image.kind == "audio":
        sound: dict[str, Json] = {
            "data": base64.b64encode(image.data).decode(),
            "format": image.media_type[6:],
        }
        return {"type": "input_audio", "input_audio": sound}
    return {"type": f"{image.kind}_url", f"{image.kind}_url": {"url": data_url(image)}}


def data_url(image: Media) -> str:
    """Returns the URL of an image: its own, or a data URL with its bytes."""
    return image.url or f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"


WARNINGS: Final[Mapping[str, str]] = {
    "usage": "usage: the server did not report it, or only a part; what is missing is shown as 0",
    "logprobs": "logprobs: requested, but the server sent none",
    "alternatives": "top_logprobs or token_ids_logprob: requested, but the server sent no alternatives",
    "finish_reason": "finish_reason: the server sent none, so the answer is taken as complete",
}


def missing_data_warnings(
    answer: Generation, params: SamplingParams, usage: Usage, *, end_assumed: bool = False
) -> list[str]:
    """Returns warnings, as texts from `WARNINGS`, about what an answer lacks.

    Args:
        params: parameters of the request.
        usage: usage of all samples of the request.
        end_assumed: whether the server sent no finish reason.
    """
    asked = params.return_logprob is True and bool(answer.text)
    tops = params.top_logprobs_num
    ids = params.token_ids_logprob
    alternatives = (
        not isinstance(tops, Unset) and tops > 0,
        not isinstance(ids, Unset) and bool(ids),
    )
    missing = {
        "usage": not usage.prompt_tokens or (bool(answer.text) and not usage.completion_tokens),
        "logprobs": asked and not answer.output_logprobs,
        "alternatives": asked
        and any(
            wanted and not any(getattr(each, kind) for each in answer.output_logprobs)
            for wanted, kind in zip(alternatives, ("top", "ids"))
        ),
        "finish_reason": end_assumed,
    }
    return [warning for name, warning in WARNINGS.items() if missing[name]]


def text_from_record(record: object, value: UserValue) -> UserValue:
    """Returns the text in the record of a variable, or a list of texts for several samples or
    branches. If the record has no text, returns the value itself.
    """
    if isinstance(record, Generation):
        return record.text
    if isinstance(record, list) and isinstance(value, list) and len(value) == len(record):
        return [text_from_record(r, v) for r, v in zip(record, value)]
    return value
