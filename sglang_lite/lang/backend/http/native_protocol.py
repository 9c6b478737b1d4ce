"""Client side of SGLang's native protocol: builds request bodies of `/generate` and parses the
answers into records.

A server of this package accepts prompts and constraints as records and returns generations as
records, so nothing is lost. Any other server receives text and the parameters that the protocol
has.
"""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from sglang_lite.constraints.number_text import PATTERNS, TERMINATORS, extract_leading_number
from sglang_lite.lang.backend.capabilities import Capabilities
from sglang_lite.lang.backend.http.client import LostConnectionError, typed_error
from sglang_lite.protocol import (
    BackendError,
    CapabilityError,
    Choices,
    ChoiceScore,
    Constraint,
    Delta,
    Ebnf,
    Generation,
    JsonSchema,
    Media,
    Number,
    Prompt,
    Regex,
    RequestAbortedError,
    SamplingParams,
    SglError,
    TokenLogprob,
    Usage,
)
from sglang_lite.protocol.anything import Json
from sglang_lite.protocol.sampling import PARAMETERS, given_as_data

_REQUEST = {each.name: each.sglang for each in PARAMETERS if "request" in each.places}
_SAMPLING = {each.name: each.sglang for each in PARAMETERS if each.name not in _REQUEST}
# Parameters that servers other than this package's accept.
FOREIGN_PARAMS = frozenset(each.name for each in PARAMETERS) - {
    "confidence",
    "exact",
    "heal",
    "repeats",
    "sampling_order",
    "speculation",
    "thinking",
    "reasoning_format",
    "return_routed_experts",
    "return_hidden_states",
}
NATIVE = Capabilities(frozenset({Regex, JsonSchema, Choices, Ebnf, Number}))


def request_body(
    prompt: Prompt, params: SamplingParams, constraint: Constraint | None, *, records: bool
) -> dict[str, Json]:
    """Builds the body of a `/generate` request.

    Args:
        records: whether the server accepts records.

    Raises:
        CapabilityError: the protocol can't express the constraint.
    """
    values = given_as_data(params)
    sampling = {_SAMPLING[name]: value for name, value in values.items() if name in _SAMPLING}
    if "logit_bias" in sampling:
        sampling["logit_bias"] = {str(token): bias for token, bias in sampling["logit_bias"]}
    body: dict[str, Any] = {
        _REQUEST[name]: value for name, value in values.items() if name in _REQUEST
    }
    # the protocol would read it as one path for each of zero prompts
    if body.get("lora_path") == []:
        del body["lora_path"]
    if records:
        body["prompt"] = msgspec.to_builtins(
            msgspec.structs.replace(prompt, messages=(), shared=())
        )
        if constraint is not None:
            body["constraint"] = msgspec.to_builtins(constraint)
    else:
        body["text"] = prompt.text
        sampling |= _constraint_fields(constraint)
        for image in prompt.images:
            body.setdefault(f"{image.kind}_data", []).append(_encode_image(image))
    return {**body, "sampling_params": sampling}


def _encode_image(image: Media) -> str:
    return image.url or base64.b64encode(image.data).decode()


def _constraint_fields(constraint: Constraint | None) -> dict[str, str]:
    match constraint:
        case None:
            return {}
        case Regex(pattern):
            return {"regex": pattern}
        case Choices(options):
            return {"regex": "(" + "|".join(map(re.escape, options)) + ")"}
        case Number(kind):
            return {"regex": f"{PATTERNS[kind]}[{re.escape(TERMINATORS)}]"}
        case JsonSchema(text):
            return {"json_schema": text}
        case Ebnf(grammar):
            return {"ebnf": grammar}
    raise CapabilityError(f"SGLang's protocol can't express a {type(constraint).__name__}.")


# ------------------------------------------------------------------------------------------ answers


class SampleStream:
    """Sample that is being received, over one connection or several.

    Args:
        index: index of the sample.
        constraint: constraint of the request, or None.
        incremental: whether an answer has only the new output, instead of all output so far.

    Attributes:
        ids: token ids of the output so far.
        ended: True once the last answer has arrived.
    """

    def __init__(self, index: int, constraint: Constraint | None, *, incremental: bool) -> None:
        self._index = index
        self._constraint = constraint
        self._incremental = incremental
        self.ids: list[int] = []
        self.ended = False
        # Text received on this connection, and text delivered so far.
        self._text = self._delivered = ""
        self._delivered_ids = self._delivered_logprobs = 0
        # log-probabilities of the tokens that this connection continues
        self._continued_logprobs: list[TokenLogprob] = []
        self._logprobs: list[TokenLogprob] = []

    def prepare_for_reconnect(self, *, continues: bool) -> list[int]:
        """Prepares for a new connection. Returns the token ids after which the server should
        continue, or an empty list to start over.
        """
        kept = list(self.ids) if continues else []
        self._continued_logprobs = self._all_logprobs()[: len(kept)]
        self._text = ""
        self.ids = []
        self._logprobs = []
        return kept

    def feed(self, answer: Mapping[str, Json]) -> list[Delta | Generation]:
        """Returns events for the part of an answer that has not been delivered yet.

        Raises:
            BackendError: the answer can't be read, reports a failure, or differs from the output
                that was already delivered.
        """
        with _translate_parse_errors():
            meta = answer["meta_info"]
            reason = meta.get("finish_reason")
            text = answer["text"]
            ids = answer.get("output_ids") or []
            logprobs = _parse_logprobs(meta, "output")
            if self._incremental:
                self._text += text
                self.ids += ids
                self._logprobs += logprobs
            else:
                self._text = text
                self.ids = list(ids)
                self._logprobs = logprobs
            raise_reported_failure(reason)
        if reason is None:
            return self._take_undelivered()
        whole = parse_generation(
            {**answer, "text": self._text, "output_ids": self.ids}, self._constraint, self._index
        )
        self.ended = True
        self._text = whole.text
        self.ids = list(whole.token_ids)
        if whole.output_logprobs:
            self._logprobs = list(whole.output_logprobs)
        meta_info = {name: value for name, value in whole.meta.items() if name != "continued_from"}
        whole = msgspec.structs.replace(
            whole, output_logprobs=tuple(self._all_logprobs()), meta=meta_info
        )
        return [*self._take_undelivered(), whole]

    def _all_logprobs(self) -> list[TokenLogprob]:
        return [*self._continued_logprobs, *self._logprobs]

    def _take_undelivered(self) -> list[Delta | Generation]:
        common = min(len(self._text), len(self._delivered))
        if self._text[:common] != self._delivered[:common]:
            raise BackendError(
                "after a new connection, the output differs from what had arrived before.",
                hint="Start the server with deterministic=True.",
            )
        text = self._text[len(self._delivered) :]
        logprobs = self._all_logprobs()
        if not text:
            return []
        self._delivered = self._text
        delta = Delta(
            text,
            tuple(self.ids[self._delivered_ids :]),
            tuple(logprobs[self._delivered_logprobs :]),
            self._index,
        )
        self._delivered_ids = max(self._delivered_ids, len(self.ids))
        self._delivered_logprobs = max(self._delivered_logprobs, len(logprobs))
        return [delta]


def parse_generation(
    answer: Mapping[str, Json], constraint: Constraint | None, index: int = 0
) -> Generation:
    """Parses a complete answer into a Generation.

    Raises:
        BackendError: the answer can't be read, or reports a failure.
    """
    with _translate_parse_errors():
        if "generation" in answer:
            return msgspec.structs.replace(
                msgspec.convert(answer["generation"], Generation), index=index
            )
        meta = answer["meta_info"]
        reason = meta["finish_reason"]
        raise_reported_failure(reason)
        text = answer["text"]
        if isinstance(constraint, Number):
            text = extract_leading_number(constraint, text)
        return Generation(
            text=text,
            token_ids=tuple(answer.get("output_ids") or ()),
            finish_reason="length" if reason["type"] == "length" else "stop",
            matched=reason.get("matched"),
            usage=usage_from_meta(meta),
            index=index,
            output_logprobs=tuple(_parse_logprobs(meta, "output")),
            prompt_logprobs=tuple(_parse_logprobs(meta, "input")),
            meta={
                name: value
                for name, value in meta.items()
                if name not in _READ and not name.endswith("logprobs")
            },
            prompt_ids=tuple(answer.get("prompt_token_ids") or ()),
        )


@contextlib.contextmanager
def _translate_parse_errors() -> Iterator[None]:
    """Converts errors in the `with` block to BackendError. They mean that an answer lacks expected
    fields.
    """
    try:
        yield
    except SglError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, msgspec.ValidationError) as error:
        raise BackendError(f"an answer can't be read ({type(error).__name__}: {error}).") from error


_READ = frozenset({
    "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "e2e_latency", "queue_time",
    "output_token_logprobs_length", "image_tokens", "cached_image_tokens",
})  # fmt: skip


def raise_reported_failure(reason: Mapping[str, Json] | None) -> None:
    """Raises the error that a finish reason reports, if any."""
    if reason is None or reason["type"] != "abort":
        return
    message = str(reason.get("message") or "the request was aborted.")
    status = reason.get("status_code")
    typed = typed_error(str(reason.get("err_type")), message)
    if typed is None and status in (500, 502, 503):
        raise LostConnectionError(message)
    raise typed or RequestAbortedError(message)


def usage_from_meta(meta: Mapping[str, Json]) -> Usage:
    """Returns the usage that the metadata of an answer reports."""
    return Usage(
        prompt_tokens=int(meta.get("prompt_tokens") or 0),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        completion_tokens=int(meta.get("completion_tokens") or 0),
        queue_s=float(meta.get("queue_time") or 0),
        total_s=float(meta.get("e2e_latency") or 0),
        image_tokens=int(meta.get("image_tokens") or 0),
        cached_image_tokens=int(meta.get("cached_image_tokens") or 0),
    )


def _parse_logprobs(meta: Mapping[str, Any], kind: str) -> list[TokenLogprob]:
    """Returns the log-probabilities of the prompt's tokens (`kind` "input") or of the output's. If
    the output is empty, SGLang may report only alternatives; the first one then takes the token's
    place.
    """
    entries = meta.get(f"{kind}_token_logprobs") or []
    tops = meta.get(f"{kind}_top_logprobs") or []
    ids = meta.get(f"{kind}_token_ids_logprobs") or []
    entries = entries or [alternatives[0] for alternatives in tops or ids if alternatives]
    tops = tops or [None] * len(entries)
    ids = ids or [None] * len(entries)
    return [
        TokenLogprob(
            entry[0],
            entry[1],
            entry[2] if len(entry) > 2 else None,
            _parse_top_entries(top),
            _parse_top_entries(chosen),
        )
        for entry, top, chosen in zip(entries, tops, ids)
    ]


def _parse_top_entries(entries: Sequence[Any] | None) -> tuple[tuple[float, int, str | None], ...]:
    return tuple(
        (entry[0], entry[1], entry[2] if len(entry) > 2 else None) for entry in entries or ()
    )


# --------------------------------------------------------------------------------------- selections


def parse_choice_score(
    choice: str, answer: Mapping[str, Json], start: int, prompt_tokens: int, before: int = 0
) -> ChoiceScore:
    """Parses the score of a choice. The answer is for a request whose text is the prompt followed
    by the choice.

    Args:
        start: token position from which log-probabilities are reported.
        prompt_tokens: number of tokens of the prompt without the choice.
        before: number of the prompt's last tokens that are scored as well.

    Raises:
        BackendError: the answer has no log-probabilities.
    """
    entries = _parse_logprobs(answer.get("meta_info") or {}, "input")
    # index of the choice's first entry, if the prompt's tokens stay the same before it
    first = prompt_tokens - start
    texts = [entry.text or "" for entry in entries]
    # the choice changed the last token of the prompt, or merged with it
    if "".join(texts[first:]) != choice:
        first = len(entries)
        length = 0
        while first > 1 and length < len(choice):
            first -= 1
            length += len(texts[first])
    own = [entry for entry in entries[max(first - before, 0) :] if entry.logprob is not None]
    if not own:
        raise BackendError("the server reported no log-probabilities of a choice.")
    return ChoiceScore(
        choice,
        tuple(e.token_id for e in own),
        tuple(e.logprob for e in own if e.logprob is not None),
    )


def parse_prompt_logprobs(answer: Mapping[str, Json]) -> tuple[float | None, ...]:
    """Returns the log-probabilities of all tokens of the prompt. The first token has None."""
    return tuple(entry.logprob for entry in _parse_logprobs(answer.get("meta_info") or {}, "input"))
