"""SGLang's `HttpServerEngineAdapter`: a server in a separate process, with the methods of an engine
that a trainer calls.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_lite.compat.sglang.server_process import ServerProcess
from sglang_lite.lang.backend.http.client import ServerClient
from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.anything import Json, UserValue

if TYPE_CHECKING:
    import torch

_LAUNCH_S = 600.0


class HttpServerEngineAdapter:
    """Server of this package in a separate process, with the methods of SGLang's adapter. The
    alternative `sgl.Engine` runs without a server and takes tensors through shared memory.

    Args:
        **kwargs: flags of `sglang-lite serve`, with underscores: `model_path`, `port` (a free one
            by default) …

    Attributes:
        url: address of the server.

    Raises:
        ParameterError: the command does not have this flag, or does not accept this value.
        BackendError: the server could not be started; the message includes its last output.
    """

    def __init__(self, **kwargs: UserValue) -> None:
        key = kwargs.get("admin_api_key") or kwargs.get("api_key")
        self._process = ServerProcess({"log_level": "error", **kwargs}, _LAUNCH_S)
        self.url = self._process.url
        self._server = ServerClient(
            self.url, key if isinstance(key, str | None) else None, None, None, 0
        )

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Mapping[str, Json] | Sequence[Mapping[str, Json]] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        **fields: UserValue,
    ) -> Any:  # as `Engine.generate`
        """Returns the answer of `/generate`: a dictionary, or a list for a list of prompts.

        Args:
            prompt, input_ids: one of the two; a list makes a batch.
            sampling_params: see `Engine.generate`.
            **fields: further fields of the route, such as `return_logprob`.
        """
        return self._post(
            "/generate", text=prompt, sampling_params=sampling_params, input_ids=input_ids, **fields
        )

    def update_weights_from_tensor(
        self,
        named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        load_format: str | None = None,
        flush_cache: bool = False,
    ) -> Any:  # JSON
        """Sends tensors to the server in the safetensors format.

        Args:
            named_tensors: tensors by the names that a checkpoint has for them.
            load_format: must be None.
            flush_cache: whether the update is complete, as for `Engine.update_weights_from_tensor`.

        Raises:
            ParameterError: a format is given, or a value is not a tensor.
            SglError: the server rejects the tensors.
        """
        from safetensors.torch import save

        from sglang_lite.runtime.models.weights.given import validate_named_tensors  # needs torch

        if load_format is not None:
            raise ParameterError(
                "load_format", f"{load_format!r} is not for a server.", hint="Leave it out."
            )
        data = save(
            {
                name: tensor.cpu().contiguous()
                for name, tensor in validate_named_tensors(named_tensors).items()
            }
        )
        text = base64.b64encode(data).decode()
        return self._post(
            "/update_weights_from_tensor", serialized_named_tensors=[text], flush_cache=flush_cache
        )

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Releases memory, like `Engine.release_memory_occupation`."""
        self._post("/release_memory_occupation", tags=tags)

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Allocates the memory again, like `Engine.resume_memory_occupation`."""
        self._post("/resume_memory_occupation", tags=tags)

    def flush_cache(self) -> None:
        """Clears the cache."""
        self._post("/flush_cache")

    def shutdown(self) -> None:
        """Stops the server. May be called again."""
        self._process.end_server()

    def _post(self, path: str, **fields: UserValue) -> Any:  # JSON, or None for an answer without
        body = {name: value for name, value in fields.items() if value is not None}
        content = self._server.request_blocking("POST", path, body).content
        return json.loads(content) if content[:1] in (b"{", b"[") else None
