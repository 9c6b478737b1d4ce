"""`Engine.generate` and `Engine.async_generate`: the methods of SGLang's offline engine, with all that they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_lite.engine.sglang import api

if TYPE_CHECKING:
    from sglang_lite.engine.engine import Engine
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
    **unsupported: object,  # SGLang's other parameters, which are refused by name where they are set
) -> Any:  # a dictionary, a list or an iterator of them: by the shape of the prompt, `n` and `stream`
    """SGLang's offline generation.

    Args:
        prompt, input_ids: one of them; a list of prompts makes a batch, and so does `n` > 1.
        sampling_params: for all, or one for each prompt; `read_sampling` of api.py has the keys.
        return_logprob: report log-probabilities of generated tokens. Like those that follow: for all, or a list.
        logprob_start_len: and of the prompt from this position on; -1 for none.
        top_logprobs_num: and the k most likely tokens at each position.
        token_ids_logprob: and those of these ids at each position.
        return_text_in_logprobs: with the text of each token.
        custom_logit_processor: `processor(token_ids, logits) -> logits`, called for every token, on the engine's
            thread: slow. SGLang's pickled classes are refused.
        rid: the request's name, for `abort`; in a batch, one name makes name_0, name_1 …
        priority: higher ones first, where the engine's policy is "priority".
        cache_salt: requests with different ones never share cached prefixes.
        output_ids: ids that an earlier stream of the same request has brought, a list for each prompt: it continues
            there, as `submit` says. Set `sampling_seed` in both.
        stream: give an iterator.

    Returns:
        A dictionary with `text`, `output_ids` and `meta_info`; a list of them for a list of prompts or `n` > 1;
        with `stream` an iterator of dictionaries, each with all that has come so far.

    Raises:
        ParameterError, OverloadedError, EngineClosedError: as `submit`; nothing was generated. An unknown
            parameter, and one of SGLang's that this engine does not support, is refused by name.
        BatchError: some of a list failed; it has the others' results.
    """
    from sglang_lite.engine.sglang import offline

    self.core.check_wait("generate")
    calls, is_list = api.read_request(
        prompt, sampling_params, input_ids, return_logprob=return_logprob, logprob_start_len=logprob_start_len,
        top_logprobs_num=top_logprobs_num, token_ids_logprob=token_ids_logprob,
        return_text_in_logprobs=return_text_in_logprobs, custom_logit_processor=custom_logit_processor, rid=rid,
        priority=priority, cache_salt=cache_salt, output_ids=output_ids, **unsupported,
    )  # fmt: skip
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
    **unsupported: object,  # SGLang's other parameters, which are refused by name where they are set
) -> Any:  # a dictionary, a list or an iterator of them: by the shape of the prompt, `n` and `stream`
    """`generate` for asyncio; with `stream`, the awaited result is an asynchronous iterator."""
    from sglang_lite.engine.sglang import offline

    self.core.check_open()
    calls, is_list = api.read_request(
        prompt, sampling_params, input_ids, return_logprob=return_logprob, logprob_start_len=logprob_start_len,
        top_logprobs_num=top_logprobs_num, token_ids_logprob=token_ids_logprob,
        return_text_in_logprobs=return_text_in_logprobs, custom_logit_processor=custom_logit_processor, rid=rid,
        priority=priority, cache_salt=cache_salt, output_ids=output_ids, **unsupported,
    )  # fmt: skip
    return await offline.async_generate(self.core, calls, is_list=is_list, stream=stream)
