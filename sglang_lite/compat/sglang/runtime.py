"""SGLang's `Runtime`: starts a server of this package, and provides the backend that runs programs
on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from sglang_lite.compat.sglang.server_process import ServerProcess
from sglang_lite.lang.backend.http.client import ServerClient
from sglang_lite.lang.backend.http.endpoint import RuntimeEndpoint
from sglang_lite.protocol.anything import Json, UserValue


class Runtime:
    """Server of this package in a separate process, with the interface of SGLang's `Runtime`. The
    alternative `sgl.Engine` runs without a server.

    Args:
        log_level: level of the server's messages, which go to `logging` as "sglang_lite.server".
        launch_timeout: longest wait until the server is ready, in seconds.
        **kwargs: flags of `sglang-lite serve`, with underscores: `model_path`, `port` (a free one
            by default), `api_key` …

    Attributes:
        endpoint: the server as a backend.
        url, generate_url: address of the server, and that of its native protocol.
        pid: id of the process.
        server_args: flags as given.

    Raises:
        ParameterError: the command does not have this flag, or does not accept this value.
        BackendError: the server could not be started; the message includes its last output.
    """

    def __init__(
        self, log_level: str = "error", launch_timeout: float = 300.0, **kwargs: UserValue
    ) -> None:
        self.server_args = kwargs
        self._process = ServerProcess({"log_level": log_level, **kwargs}, launch_timeout)
        self.url = self._process.url
        self.pid = self._process.pid
        self.generate_url = f"{self.url}/generate"
        key = kwargs.get("api_key")
        self._key = key if isinstance(key, str | None) else next(iter(key), None)
        try:
            self.endpoint = RuntimeEndpoint(self.url, self._key)
        except BaseException:
            self._process.end_server()
            raise

    def shutdown(self) -> None:
        """Stops the server. May be called again."""
        if self._process.running:
            self.endpoint.shutdown()
        self._process.end_server()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def start_profile(self) -> None:
        self.endpoint.start_profile()

    def stop_profile(self) -> None:
        self.endpoint.stop_profile()

    def cache_prefix(self, prefix: str) -> None:
        self.endpoint.cache_prefix(prefix)

    def get_tokenizer(self) -> Any:  # a tokenizer of transformers
        """Returns the model's tokenizer, as an object of transformers."""
        path = str(self.endpoint.model_info["tokenizer_path"])
        transformers = importlib.import_module("transformers")
        try:
            return transformers.AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError, KeyError):  # a folder without anything else
            return transformers.PreTrainedTokenizerFast(tokenizer_file=f"{path}/tokenizer.json")

    async def async_generate(
        self, prompt: str, sampling_params: Mapping[str, Json] | None = None
    ) -> AsyncGenerator[str, None]:
        """Yields the answer's text in pieces, as it arrives."""
        body = {"text": prompt, "sampling_params": dict(sampling_params or {})}
        delivered = ""
        server = ServerClient(self.url, self._key, None, None, 0)
        try:
            async with contextlib.aclosing(
                server.stream_json("/generate", {**body, "stream": True})
            ) as answers:
                async for answer in answers:
                    text = answer["text"]
                    if len(text) > len(delivered):
                        yield text[len(delivered) :]
                        delivered = text
        finally:
            await server.close()

    add_request = async_generate

    def generate(
        self,
        prompt: str | Sequence[str],
        sampling_params: Mapping[str, Json] | None = None,
        return_logprob: bool | Sequence[bool] | None = False,
        logprob_start_len: int | Sequence[int] | None = None,
        top_logprobs_num: int | Sequence[int] | None = None,
        lora_path: Any = None,  # the server rejects every value except None
        session_id: str | None = None,
    ) -> str:
        """Returns the answer for one prompt or a list of prompts, as JSON text."""
        body = {
            "text": prompt,
            "sampling_params": sampling_params,
            "return_logprob": return_logprob,
            "logprob_start_len": logprob_start_len,
            "top_logprobs_num": top_logprobs_num,
            "lora_path": lora_path,
            "session_id": session_id,
        }
        return self._text("/generate", body)

    def encode(self, prompt: str | Sequence[str]) -> str:
        """Returns embeddings of one text or a list of texts, as JSON text. The server rejects the
        call if its model doesn't compute embeddings.
        """
        return self._text("/encode", {"text": prompt})

    def _text(self, path: str, body: Mapping[str, Any]) -> str:
        fields = {name: value for name, value in body.items() if value is not None}
        server = ServerClient(self.url, self._key, None, None, 0)
        return json.dumps(json.loads(server.request_blocking("POST", path, fields).content))

    async def get_server_info(self) -> dict[str, Json]:
        """Returns settings and counts of the server."""
        return await asyncio.to_thread(self.endpoint.get_server_info)
