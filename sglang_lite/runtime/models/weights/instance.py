"""Weights received from a running engine, layer by layer, through a group of torch.distributed."""

from __future__ import annotations

import re
import secrets
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from sglang_lite.protocol import ModelError, ParameterError
from sglang_lite.runtime.models.weights.groups import UpdateGroups, build_tensor_forms
from sglang_lite.runtime.models.weights.seed import Seed
from sglang_lite.runtime.models.weights.source import Stored, WeightSource

OFFER = "/init_weights_send_group_for_remote_instance"
SEND = "/send_weights_to_remote_instance"
_LAYER = re.compile(r".*?\.\d+\.")


class _Offer(msgspec.Struct, frozen=True):
    """Tensors that the sending engine (the seed) holds, and the port of the group in which it sends
    them.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class InstanceSource(WeightSource):
    """Source of the tensors of another, running engine. Needs memory for one layer in addition to
    the model's.

    Args:
        seed: server of that engine.
        version: weight version that it must have.
        device: device of the model.
        backend: "gloo", "nccl", or "auto" to choose by the device.
        port: port of the group on the seed's machine; 0 for any.
        timeout_s: seconds that the seed may keep this process waiting.

    Raises:
        ModelError: the server does not answer, or its engine can't send its weights or has other
            ones.
    """

    def __init__(
        self,
        seed: Seed,
        version: str,
        device: torch.device,
        *,
        backend: str,
        port: int,
        timeout_s: float,
    ) -> None:
        self._seed = seed
        self._version = version
        self._device = device
        self._group = f"send_weights_{secrets.token_hex(8)}"
        self._groups = UpdateGroups(device, timeout_s)
        self._come: dict[str, torch.Tensor] = {}
        self._asking = ThreadPoolExecutor(1, "sglang_lite-seed")
        backend = ("nccl" if device.type == "cuda" else "gloo") if backend == "auto" else backend
        offer = self._request_from_seed(
            OFFER,
            master_address=seed.host,
            ports=str(port),
            group_rank=0,
            world_size=2,
            backend=backend,
        )
        try:
            offered = msgspec.convert(offer, _Offer)
            forms = build_tensor_forms(offered.names, offered.dtypes, offered.shapes)
        except (msgspec.ValidationError, ParameterError) as error:
            raise ModelError(f"{seed}: is no engine of this package: {error!r}") from error
        self._forms = {form.name: form for form in forms}
        self._groups.join(seed.host, offered.port, 1, 2, self._group, backend)
        super().__init__(str(seed), dict.fromkeys(self._forms, Path(str(seed))))

    def check_all_used(self, may_ignore: tuple[str, ...] = ()) -> None:
        super().check_all_used(may_ignore)
        self._request_from_seed(SEND, names=[])  # ends the transfer
        self._groups.close()
        self._asking.shutdown()

    def _read_stored(self, name: str, file: Path) -> Stored:
        if name not in self._come:
            layer = found[0] if (found := _LAYER.match(name)) else name
            names = [
                name,
                *(
                    other
                    for other in self.names
                    if other.startswith(layer) and other not in self._come
                ),
            ]
            self._come |= self._receive_tensors(names)
        return self._come.pop(name)

    def _receive_tensors(self, names: list[str]) -> dict[str, torch.Tensor]:
        sent = self._asking.submit(self._request_from_seed, SEND, names=names)
        sent.add_done_callback(self._close_groups_on_failure)
        try:
            tensors = self._groups.receive(
                self._group, [self._forms[name] for name in names], flattened=True
            )
        except (ModelError, ParameterError):
            sent.result()  # raises the seed's error
            raise
        sent.result()
        return dict(tensors)

    def _close_groups_on_failure(self, sent: Future[Any]) -> None:  # of its answer
        if sent.exception() is not None:
            self._groups.close()

    def _request_from_seed(self, path: str, **body: Any) -> dict[str, Any]:  # JSON
        answer = self._seed.request_json(
            path,
            {"master_address": self._seed.host, "group_name": self._group, "ports": "", **body},
        )
        if (version := answer.get("weight_version")) != self._version:
            raise ModelError(
                f"{self._seed}: its weights are {version!r} now, and were {self._version!r}.",
                hint="Start again.",
            )
        return answer
