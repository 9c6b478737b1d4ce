"""sglang as far as the bench calls it; names and defaults of parameters as in sglang 0.5.23."""

from types import SimpleNamespace

import fake_peer

__version__ = "0.5.23"


class Engine:
    def __init__(
        self, *, model_path, skip_tokenizer_init=False, dtype="auto", quantization=None, load_format="auto",
        kv_cache_dtype="auto",
    ):  # fmt: skip
        fake_peer.load(
            model_path, skip_tokenizer_init=skip_tokenizer_init, dtype=dtype, quantization=quantization,
            load_format=load_format, kv_cache_dtype=kv_cache_dtype,
        )  # fmt: skip

    def generate(self, prompt=None, sampling_params=None, input_ids=None):
        assert prompt is None
        assert all(
            params.keys() == {"temperature", "max_new_tokens", "ignore_eos"}
            for params in sampling_params
        )
        assert all(params["ignore_eos"] for params in sampling_params)
        (temperature,) = {params["temperature"] for params in sampling_params}
        lengths = fake_peer.generate(
            input_ids, [params["max_new_tokens"] for params in sampling_params], temperature
        )
        return [{"output_ids": [0] * length} for length in lengths]

    def flush_cache(self):
        return SimpleNamespace(success=fake_peer.flush())
