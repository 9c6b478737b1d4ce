"""SGLang's gRPC service of encoders (`sglang_encoder.proto`, as smg-grpc-proto publishes it), on a
server with `--encoder-only`. Its messages can't carry features, so a call returns only their size.
A later request to `/encode` with the same media returns the features, which the server has kept.
"""

from __future__ import annotations

import json
from typing import Any

from smg_grpc_proto import sglang_encoder_pb2 as pb
from smg_grpc_proto import sglang_encoder_pb2_grpc as services

from sglang_lite.server.features import media_features
from sglang_lite.server.grpc_calls import GrpcCalls, refuse_fields
from sglang_lite.server.service import Service

_NAME = pb.DESCRIPTOR.services_by_name["SglangEncoder"].full_name


class EncoderServicer(services.SglangEncoderServicer):  # type: ignore[misc]  # generated code has no types
    """Calls of the service. Those that transfer features over Mooncake or ZMQ answer UNIMPLEMENTED."""

    def __init__(self, service: Service, calls: GrpcCalls) -> None:
        self._service = service
        self._calls = calls

    async def Encode(self, request: Any, context: Any) -> Any:  # noqa: N802  # of the protocol
        """Encodes media, and returns the size of their features."""
        async with self._calls.guard_grpc_call(
            "Encode", context, of=_NAME, request_id=request.req_id, counts=True
        ):
            refuse_fields(request, "prefill_host", "embedding_port")  # pickles over ZMQ
            data = await media_features(self._service, list(request.mm_items))
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])  # of safetensors
            found = [each for name, each in header.items() if name != "__metadata__"]
            return pb.EncodeResponse(
                embedding_size=max(each["data_offsets"][1] for each in found),
                embedding_len=sum(each["shape"][0] for each in found),
                embedding_dim=found[0]["shape"][1],
            )
