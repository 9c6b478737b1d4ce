"""vllm as far as the bench calls it; names, kinds and defaults of parameters as in vllm 0.33."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TypedDict

import fake_peer

__version__ = "0.33.0"


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


@dataclass(kw_only=True)
class SamplingParams:
    temperature: float = 1.0
    ignore_eos: bool = False
    max_tokens: int | None = 16
    detokenize: bool = True


class LLM:
    def __init__(
        self, model, *, skip_tokenizer_init=False, dtype="auto", quantization=None, load_format="auto",
        kv_cache_dtype="auto",
    ):  # fmt: skip
        fake_peer.load(
            model, skip_tokenizer_init=skip_tokenizer_init, dtype=dtype, quantization=quantization,
            load_format=load_format, kv_cache_dtype=kv_cache_dtype,
        )  # fmt: skip

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True):
        assert not use_tqdm
        assert all(params.ignore_eos and not params.detokenize for params in sampling_params)
        (temperature,) = {params.temperature for params in sampling_params}
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        lengths = fake_peer.generate(
            ids, [params.max_tokens for params in sampling_params], temperature
        )
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * length)]) for length in lengths
        ]

    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        return fake_peer.flush()
