"""SGLang's native protocol: converts dictionaries to requests and results to dictionaries. Doesn't run the requests.

The same fields are used by `Engine.generate` and, as JSON, by a server's `/generate`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sglang_lite.protocol import (
    Constraint,
    ConstraintError,
    Delta,
    Ebnf,
    Generation,
    JsonSchema,
    OverloadedError,
    ParameterError,
    Prompt,
    Regex,
    RequestAbortedError,
    SamplingParams,
    SglError,
    TokenLogprob,
    Unset,
)
from sglang_lite.protocol.anything import Json
from sglang_lite.protocol.sampling import named, read_params
from sglang_lite.random_ids import random_id
from sglang_lite.runtime.core.submission import GenerateRequest
from sglang_lite.runtime.resolved_params import LogitProcessor

# ----------------------------------------------------------------------------------------------------- requests


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
    custom_logit_processor: LogitProcessor | Sequence[LogitProcessor | None] | None = None,
    rid: str | Sequence[str] | None = None,
    priority: int | Sequence[int] | None = None,
    cache_salt: str | Sequence[str] | None = None,
    output_ids: Sequence[int] | Sequence[Sequence[int] | None] | None = None,
    **others: object,
) -> tuple[list[GenerateRequest], bool]:
    """Requests of a native call, one for each prompt, and True if the answer is a list.

    Args:
        prompt, input_ids: exactly one of the two; a list of prompts makes a batch, and so does `n` > 1.
        sampling_params: parameters for all prompts, or a list with those of each prompt; `read_sampling` has the keys.
        return_logprob: whether to report log-probabilities of generated tokens. One value for all prompts, or a list,
            like the arguments below.
        logprob_start_len: position in the prompt from which on its log-probabilities are reported, too; -1 for none.
        top_logprobs_num: number k of most likely tokens to report at each position.
        token_ids_logprob: ids whose log-probabilities are reported at each position.
        return_text_in_logprobs: whether to report the text of each token.
        custom_logit_processor: function `processor(token_ids, logits) -> logits`, called for every token, on the
            engine's thread: slow. SGLang's pickled classes are refused.
        rid: name of the request, for `abort`; in a batch, one name makes name_0, name_1 …
        priority: rank of the request; higher ones run first, if the engine's policy is "priority".
        cache_salt: namespace of the prefix cache; requests with different ones never share cached prefixes.
        output_ids: ids that the output of each prompt begins with; None for none.

    Raises:
        ParameterError: a field is invalid, unknown, or one of SGLang's that this engine doesn't support.
    """
    _refuse_others(others)
    if (prompt is None) == (input_ids is None):
        raise ParameterError("prompt", "exactly one of prompt and input_ids is needed.")
    prompts, is_list = _prompts(prompt) if input_ids is None else _ids(input_ids)
    count = len(prompts)
    params = _each("sampling_params", {} if sampling_params is None else sampling_params, count)
    flags = _each("return_logprob", return_logprob, count)
    starts = _each("logprob_start_len", logprob_start_len, count)
    tops = _each("top_logprobs_num", top_logprobs_num, count)
    ids = _each_ids(plain_ids(token_ids_logprob), count)
    processors = _each("custom_logit_processor", custom_logit_processor, count)
    priorities = _each("priority", priority, count)
    salts = _each("cache_salt", cache_salt, count)
    rids = _rids(rid, count, is_list)
    outputs: list[Any] = [output_ids] if not is_list else _each("output_ids", output_ids, count)
    calls = []
    for i in range(count):
        logprobs: dict[str, Any] = {}
        if flags[i]:
            logprobs = {
                "return_logprob": flags[i], "logprob_start_len": starts[i], "top_logprobs_num": tops[i],
                "return_text_in_logprobs": return_text_in_logprobs, "token_ids_logprob": ids[i],
            }  # fmt: skip
        read, constraint = read_sampling(params[i], logprobs)
        calls.append(GenerateRequest(
            prompts[i], read, constraint, namespace="" if salts[i] is None else salts[i],
            priority=0 if priorities[i] is None else priorities[i], logit_processor=_processor(processors[i]),
            rid=rids[i], output_ids=() if outputs[i] is None else outputs[i],
        ))  # fmt: skip
    return calls, is_list or any(call.samples != 1 for call in calls)


# Fields about log-probabilities, with the values that request nothing.
_OF_LOGPROBS: dict[str, object] = {
    "logprob_start_len": -1,
    "top_logprobs_num": 0,
    "token_ids_logprob": [],
    "return_text_in_logprobs": False,
}


def without_logprobs(fields: Mapping[str, object]) -> list[str]:
    """Names of a request's fields about log-probabilities that have no effect, as none are returned for their prompt.

    Args:
        fields: arguments of `read_request`.
    """
    flags = fields.get("return_logprob", False)
    unused = []
    for name, nothing in _OF_LOGPROBS.items():
        value = plain_ids(fields.get(name, nothing))
        several = isinstance(value, list | tuple) and (
            name != "token_ids_logprob" or any(isinstance(each, list | tuple) for each in value)
        )
        asked = [each not in (None, nothing, ()) for each in (value if several else [value])]
        if several and isinstance(flags, list | tuple):
            unused += [f"{name}[{i}]" for i, flag in enumerate(flags) if asked[i] and not flag]
        elif any(asked) and not (any(flags) if isinstance(flags, list | tuple) else flags):
            unused.append(name)
    return unused


def _refuse_others(others: Mapping[str, object]) -> None:
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
    "image_data", "audio_data", "video_data", "modalities", "mm_hashes", "mm_content_hashes", "lora_path",
    "require_reasoning", "return_hidden_states", "return_routed_experts", "routed_experts_start_len", "bootstrap_host",
    "bootstrap_port", "bootstrap_room", "routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank",
    "external_trace_header", "session_params", "session_id", "kv_hints", "kv_router_hint", "input_embeds",
))  # fmt: skip


def _prompts(prompt: Any) -> tuple[list[Any], bool]:
    if isinstance(prompt, str):
        return [prompt], False
    if not isinstance(prompt, list | tuple) or not all(isinstance(p, str) for p in prompt):
        raise ParameterError("prompt", "is neither text nor a list of texts.", hint="Token ids are input_ids.")
    return list(prompt), True


def plain_ids(given: Any) -> Any:  # any value of a user
    """Token ids, or lists of them: arrays of another package become lists, other values are returned unchanged."""
    if hasattr(given, "tolist"):
        return given.tolist()
    if isinstance(given, list | tuple) and any(hasattr(each, "tolist") for each in given):
        return [plain_ids(each) for each in given]
    return given


def _ids(input_ids: Any) -> tuple[list[Any], bool]:
    input_ids = plain_ids(input_ids)
    if not isinstance(input_ids, list | tuple):
        raise ParameterError("input_ids", "is no list of token ids.")
    if input_ids and isinstance(input_ids[0], list | tuple):
        return list(input_ids), True
    return [input_ids], False


def _each(name: str, value: Any, count: int) -> list[Any]:
    """List with one value for each prompt, from a list or a value for all."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ParameterError(name, f"{len(value)} entries for {count} prompts.")
    return list(value)


def _each_ids(value: Any, count: int) -> list[Any]:
    several = isinstance(value, list | tuple) and value and all(isinstance(ids, list | tuple | None) for ids in value)
    return _each("token_ids_logprob", value, count) if several else [value] * count


def _rids(rid: Any, count: int, is_list: bool) -> list[str]:
    if rid is None:
        return [random_id() for _ in range(count)]
    if isinstance(rid, str):
        return [f"{rid}_{i}" for i in range(count)] if is_list else [rid]
    rids = _each("rid", rid, count)
    if not all(isinstance(r, str) for r in rids) or len(set(rids)) < count:
        raise ParameterError("rid", "the names are not strings, or not all different.")
    return rids


def _processor(value: Any) -> LogitProcessor | None:
    if value is not None and not callable(value):
        raise ParameterError(
            "custom_logit_processor",
            "is not callable.",
            hint="Pass a function processor(token_ids, logits) -> logits; pickled code is not run.",
        )
    processor: LogitProcessor | None = value
    return processor


_PARAMS, _LOGPROBS = named("sampling_params", sglang=True), named("request", sglang=True)


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
    """Sampling parameters and constraint of SGLang's `sampling_params`; a value of None stands for the default.

    Args:
        logprobs: fields of the request itself about log-probabilities.

    Raises:
        ParameterError: a key is unknown, a value isn't supported, or more than one grammar is given.
        ConstraintError: a structural tag is invalid or not supported.
    """
    if not isinstance(given, Mapping):
        raise ParameterError("sampling_params", f"{type(given).__name__} is not a dictionary.")
    written: dict[str, object] = dict(logprobs)
    for name, value in given.items():
        if name in _PARAMS:
            written[name] = value
        elif name not in _GRAMMARS and name != "spaces_between_special_tokens":  # tokens are decoded to their bytes
            known = sorted(SAMPLING_FIELDS)
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"It has: {', '.join(known)}."
            raise ParameterError(name, "sampling_params has no such field.", hint=hint)
    return read_params(written, {**_PARAMS, **_LOGPROBS}), _constraint(given)


def _constraint(given: Mapping[str, Any]) -> Constraint | None:
    grammars = [name for name in _GRAMMARS if given.get(name)]  # an empty value stands for no grammar
    if not grammars:
        return None
    name, text = grammars[0], given[grammars[0]]
    if len(grammars) > 1:
        raise ParameterError(name, f"and {grammars[1]} are both given; only one grammar can hold.")
    if not isinstance(text, str):
        raise ParameterError(name, f"{type(text).__name__} is not a string.")
    return _GRAMMARS[name](text)


# ------------------------------------------------------------------------------------------------------ answers


class SampleAnswer:
    """Answer of one sample as a dictionary of the protocol; after every event, `add_event` returns everything so far.

    Args:
        call: request of the sample.
        prompt_ids: token ids of the prompt.
        index: index of the sample in a streamed batch; None if the answer isn't a list or isn't streamed.
        decode: function that decodes token ids to text.
        rid: name of the sample; None for the name of the request.
        weight_version: version name of the model's weights.

    Attributes:
        outcome: final dictionary, or the error that ended the sample; None while the sample is running.
    """

    def __init__(
        self,
        call: GenerateRequest,
        prompt_ids: Sequence[int],
        index: int | None,
        decode: Callable[[Sequence[int]], str],
        *,
        rid: str | None = None,
        weight_version: str = "default",
    ) -> None:
        self._call, self._prompt_ids, self._index, self._decode = call, prompt_ids, index, decode
        self._named = {"id": call.rid if rid is None else rid, "weight_version": weight_version}
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self.outcome: dict[str, Any] | SglError | None = None

    def add_event(self, event: Delta | Generation | SglError, cached_tokens: int = 0) -> dict[str, Json]:
        """Dictionary of the answer after an event.

        Args:
            cached_tokens: number of tokens of the prompt that were found in the cache, for an incomplete answer.
        """
        if isinstance(event, Delta):
            self._texts.append(event.text)
            self._ids += event.token_ids
            self._logprobs += event.logprobs
            return self._partial(None, cached_tokens)
        if isinstance(event, Generation):
            self.outcome = answer = self._whole(event, _finish(event))
        elif isinstance(event, RequestAbortedError) and event.partial is not None:
            self.outcome = answer = self._whole(event.partial, _failure(event))
        else:
            answer = self._partial(_failure(event), cached_tokens)
            self.outcome = answer if isinstance(event, RequestAbortedError) else event
        return answer

    def _partial(self, finish: dict[str, Any] | None, cached_tokens: int) -> dict[str, Any]:
        return self._answer("".join(self._texts), self._ids, finish, cached_tokens, {}, (), self._logprobs)

    def _whole(self, generation: Generation, finish: dict[str, Any]) -> dict[str, Any]:
        usage = generation.usage
        meta = {"e2e_latency": usage.total_s, "queue_time": usage.queue_s, **generation.meta}
        return self._answer(
            generation.text,
            generation.token_ids,
            finish,
            usage.cached_tokens,
            meta,
            generation.prompt_logprobs,
            generation.output_logprobs,
            generation,
        )

    def _answer(
        self,
        text: str,
        ids: Sequence[int],
        finish: dict[str, Any] | None,
        cached_tokens: int,
        meta: Mapping[str, Any],
        prompt_logprobs: Sequence[TokenLogprob],
        output_logprobs: Sequence[TokenLogprob],
        record: Generation | None = None,
    ) -> dict[str, Any]:
        info = {
            **self._named,
            "finish_reason": finish,
            "prompt_tokens": len(self._prompt_ids),
            "completion_tokens": len(ids),
            "cached_tokens": cached_tokens,
            "reasoning_tokens": 0,
            **meta,
        }
        if self._call.params.return_logprob is True:
            info |= self._logprob_fields(prompt_logprobs, output_logprobs)
        answer: dict[str, Any] = {"text": text, "output_ids": list(ids), "meta_info": info}
        if record is not None and isinstance(self._call.prompt, Prompt):
            answer["generation"] = record
        return answer if self._index is None else {**answer, "index": self._index}

    def _logprob_fields(self, prompt: Sequence[TokenLogprob], output: Sequence[TokenLogprob]) -> dict[str, Any]:
        params = self._call.params
        entries = self._of_prompt(prompt)
        fields: dict[str, Any] = {
            "input_token_logprobs": [(e.logprob, e.token_id, e.text) for e in entries],
            "output_token_logprobs": [(e.logprob, e.token_id, e.text) for e in output],
            "output_token_logprobs_length": len(output),
        }
        for name, attribute, wanted in (
            ("top_logprobs", "top", params.top_logprobs_num),
            ("token_ids_logprobs", "ids", params.token_ids_logprob),
        ):
            if wanted and not isinstance(wanted, Unset):
                fields[f"input_{name}"] = [list(getattr(e, attribute)) or None for e in entries]
                fields[f"output_{name}"] = [list(getattr(e, attribute)) for e in output]
        return fields

    def _of_prompt(self, prompt: Sequence[TokenLogprob]) -> list[TokenLogprob]:
        """Log-probabilities of the prompt, one entry for each position from `logprob_start_len` on. The first token of
        a prompt has no log-probability, so its entry has only id and text."""
        params = self._call.params
        start = params.logprob_start_len
        if isinstance(start, Unset) or not 0 <= start < len(self._prompt_ids):
            return []
        if start:
            return list(prompt)
        first = self._prompt_ids[0]
        text = self._decode((first,)) if params.return_text_in_logprobs is True else None
        return [TokenLogprob(None, first, text), *prompt]


def _finish(generation: Generation) -> dict[str, Any]:
    if generation.finish_reason == "length":
        return {"type": "length", "length": generation.usage.completion_tokens}
    return {"type": "stop", "matched": generation.matched}


def _failure(error: SglError) -> dict[str, Any]:
    status = 500
    if isinstance(error, ParameterError | ConstraintError):
        status = 400
    elif isinstance(error, OverloadedError):
        status = 503
    elif isinstance(error, RequestAbortedError):
        status = 499  # nginx's status for a client that has disconnected
    return {"type": "abort", "message": str(error), "status_code": status, "err_type": type(error).__name__}
