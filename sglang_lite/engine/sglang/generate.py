"""`Engine.generate` and `Engine.async_generate`: the methods of SGLang's offline engine, with all its parameters."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_lite.engine.sglang import api

if TYPE_CHECKING:
    from sglang_lite.engine.engine import Engine
    from sglang_lite.runtime.core.submission import GenerateRequest
    from sglang_lite.runtime.resolved_params import LogitProcessor


def generate(
    self: Engine,
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
    stream: bool = False,
    **unsupported: object,  # SGLang's other parameters, which are refused by name if they are set
) -> Any:  # a dictionary, a list or an iterator of them: by the shape of the prompt, `n` and `stream`
    """Generates text like SGLang's offline engine.

    Args:
        prompt, input_ids: exactly one of the two; a list of prompts makes a batch, and so does `n` > 1.
        sampling_params: parameters for all prompts, or a list with those of each prompt; `read_sampling` of api.py has
            the keys.
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
        output_ids: ids that an earlier stream of the same request has delivered, a list for each prompt: the output
            continues after them, as described at `submit`. Set `sampling_seed` in both requests.
        stream: whether to return an iterator.

    Returns:
        A dictionary with `text`, `output_ids` and `meta_info`; a list of dictionaries for a list of prompts or `n` > 1;
        with `stream` an iterator of dictionaries, each with everything so far.

    Parameters that have no effect in this call are named in a UserWarning, as SGLang accepts them.

    Raises:
        ParameterError, OverloadedError, EngineClosedError: as `submit`; nothing was generated. Unknown parameters, and
            those of SGLang's that this engine doesn't support, are refused by name.
        BatchError: some requests of a batch failed; the error has the results of the successful ones.
    """
    from sglang_lite.engine.sglang import offline

    self.core.check_wait("generate")
    fields: dict[str, Any] = {
        "return_logprob": return_logprob, "logprob_start_len": logprob_start_len, "top_logprobs_num": top_logprobs_num,
        "token_ids_logprob": token_ids_logprob, "return_text_in_logprobs": return_text_in_logprobs,
        "custom_logit_processor": custom_logit_processor, "rid": rid, "priority": priority, "cache_salt": cache_salt,
        "output_ids": output_ids, **unsupported,
    }  # fmt: skip
    calls, is_list = api.read_request(prompt, sampling_params, input_ids, **fields)
    _warn_unused(fields, calls, self.config.policy)
    return offline.generate(self.core, calls, is_list=is_list, stream=stream)


async def async_generate(
    self: Engine,
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
    stream: bool = False,
    **unsupported: object,  # SGLang's other parameters, which are refused by name if they are set
) -> Any:  # a dictionary, a list or an iterator of them: by the shape of the prompt, `n` and `stream`
    """Asynchronous form of `generate`, for asyncio; with `stream`, the awaited result is an asynchronous iterator."""
    from sglang_lite.engine.sglang import offline

    self.core.check_open()
    fields: dict[str, Any] = {
        "return_logprob": return_logprob, "logprob_start_len": logprob_start_len, "top_logprobs_num": top_logprobs_num,
        "token_ids_logprob": token_ids_logprob, "return_text_in_logprobs": return_text_in_logprobs,
        "custom_logit_processor": custom_logit_processor, "rid": rid, "priority": priority, "cache_salt": cache_salt,
        "output_ids": output_ids, **unsupported,
    }  # fmt: skip
    calls, is_list = api.read_request(prompt, sampling_params, input_ids, **fields)
    _warn_unused(fields, calls, self.config.policy)
    return await offline.async_generate(self.core, calls, is_list=is_list, stream=stream)


def _warn_unused(fields: Mapping[str, Any], calls: Sequence[GenerateRequest], policy: str) -> None:
    """Warns the caller of `generate` of parameters without effect, which are no errors as SGLang ignores them."""
    reasons = {
        "no log-probabilities are returned. Set return_logprob=True.": api.without_logprobs(fields),
        f'the engine\'s policy is {policy!r}. Make the engine with policy="priority".': (
            ["priority"] if policy != "priority" and any(call.priority for call in calls) else []
        ),
    }
    for reason, names in reasons.items():
        if names:
            warnings.warn(f"{', '.join(names)}: has no effect, as {reason}", stacklevel=3)
