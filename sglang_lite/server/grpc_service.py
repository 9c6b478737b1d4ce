"""SGLang's gRPC service (`sglang_scheduler.proto`, as smg-grpc-proto publishes it), over which
gateways talk to workers: token ids in, token ids out. It shares the engine, keys and limits of the
HTTP server. With `--encoder-only`, the server also has the service of encoders (grpc_encoder.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import logging
import time
import zipfile
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import grpc
import msgspec
from google.protobuf.json_format import MessageToDict
from smg_grpc_proto import sglang_encoder_pb2_grpc as encoders
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc as services
from smg_grpc_proto.generated import common_pb2 as common

from sglang_lite.engine import embedding
from sglang_lite.protocol import BackendError, Delta, Generation, SglError, TokenLogprob, Usage
from sglang_lite.runtime.models.resolve import resolve_for_engine
from sglang_lite.server import native
from sglang_lite.server.async_engine import key_in_use
from sglang_lite.server.endpoint import AccessControl, Route
from sglang_lite.server.grpc_calls import GrpcCalls, refuse_fields
from sglang_lite.server.grpc_encoder import EncoderServicer
from sglang_lite.server.grpc_messages import MessageCheck
from sglang_lite.server.service import Service
from sglang_lite.server.sglang.request import read_request
from sglang_lite.version import __version__

logger = logging.getLogger("sglang_lite.server")
_CHUNK = 64 * 1024  # bytes of a tokenizer's files in a message
_IDLE_MS = 60_000  # a connection without calls is closed after this time
_FILES = (  # names of a tokenizer's files
    "tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "special_tokens_map.json",
    "vocab.json", "merges.txt", "tokenizer.model", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
_OF_ADMIN = Route("gRPC", native.flush_cache, "Calls that change the server", access="admin")


async def serve_grpc(
    service: Service, gate: AccessControl, port: int
) -> tuple[grpc.aio.Server, int]:
    """Starts the service on the running event loop, at the address of the HTTP server. Returns the
    server and its port.

    Args:
        gate: keys and counts of open requests of the HTTP server.
        port: port to listen on; 0 takes a free one.

    Raises:
        BackendError: the port is taken.
    """
    settings = service.settings
    most = int(settings.max_body_mb * 2**20)
    server = grpc.aio.server(
        interceptors=[MessageCheck()],
        options=[
            ("grpc.max_receive_message_length", most),
            ("grpc.so_reuseport", 0),
            ("grpc.max_connection_idle_ms", _IDLE_MS),
        ],
    )
    calls = GrpcCalls(service, gate)
    services.add_SglangSchedulerServicer_to_server(_Servicer(service, calls), server)
    if service.engine.config.encoder_only:
        encoders.add_SglangEncoderServicer_to_server(EncoderServicer(service, calls), server)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    try:
        port = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise BackendError(
            f"gRPC: {host}:{port} can't be listened on.", hint="Give another --grpc-port."
        ) from error
    await server.start()
    return server, port


class _Servicer(services.SglangSchedulerServicer):  # type: ignore[misc]  # generated code has no types
    """Calls of the service. Those that are missing here answer UNIMPLEMENTED."""

    def __init__(self, service: Service, calls: GrpcCalls) -> None:
        self._service = service
        self._calls = calls

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802  # of the protocol
        """Generates tokens after a prompt of token ids."""
        async with self._calls.guard_grpc_call(
            "Generate", context, request_id=request.request_id, counts=True
        ):
            wanted = _convert_generate_message(request)
            wanted = self._service.select_requested_adapter(request.lora_id, wanted)
            events = self._service.async_engine.generate(wanted)
            sent: dict[int, int] = {}
            async with contextlib.aclosing(events):
                async for batch in events:
                    for each in batch:
                        for answer in _answers(request, each, sent):
                            yield answer

    async def Embed(self, request: Any, context: Any) -> Any:  # noqa: N802  # of the protocol
        """Returns the embedding of token ids."""
        async with self._calls.guard_grpc_call(
            "Embed", context, request_id=request.request_id, counts=True
        ):
            refuse_fields(request, "mm_inputs", "is_cross_encoder", "token_type_ids")
            texts = [list(request.tokenized.input_ids)]
            (row, *_), tokens = await self._service.encode(
                embedding.embeddings, texts, field="tokenized"
            )
            return pb.EmbedResponse(
                embedding=row.tolist(), embedding_dim=len(row), prompt_tokens=sum(tokens)
            )

    async def HealthCheck(self, _: Any, __: Any) -> Any:  # noqa: N802  # of the protocol
        """Returns whether the engine has generated its first token and responds."""
        try:
            self._service.check_ready()
        except SglError as error:
            return pb.HealthCheckResponse(healthy=False, message=str(error))
        return pb.HealthCheckResponse(healthy=True, message="")

    async def Abort(self, request: Any, context: Any) -> Any:  # noqa: N802  # of the protocol
        """Aborts a request."""
        async with self._calls.guard_grpc_call("Abort", context):
            self._service.async_engine.abort(request.request_id, key_in_use.get() or None)
            return pb.AbortResponse(success=True)

    async def GetModelInfo(self, _: Any, context: Any) -> Any:  # noqa: N802  # of the protocol
        """Describes the model."""
        async with self._calls.guard_grpc_call("GetModelInfo", context):
            engine = self._service.engine
            tokenizer = self._service.engine.tokenizer
            config = self._config
            return pb.GetModelInfoResponse(
                model_path=engine.config.model,
                tokenizer_path=self._service.tokenizer_path,
                is_generation=engine.core.generates,
                weight_version=engine.config.weight_version,
                served_model_name=self._service.model_name,
                max_context_length=engine.context_length,
                vocab_size=engine.vocab_size,
                supports_vision=False,  # images come over HTTP
                model_type=str(config.get("model_type", "")),
                architectures=config.get("architectures") or [],
                eos_token_ids=sorted(tokenizer.eos_ids.union(_ids(config.get("eos_token_id")))),
                bos_token_id=next(
                    iter(_ids(tokenizer.bos_id) or _ids(config.get("bos_token_id"))), -1
                ),
                pad_token_id=next(iter(_ids(config.get("pad_token_id"))), 0),
                max_req_input_len=engine.core.capacity.longest - 1,
            )

    async def GetServerInfo(self, _: Any, context: Any) -> Any:  # noqa: N802  # of the protocol
        """Returns the settings and counts."""
        async with self._calls.guard_grpc_call("GetServerInfo", context):
            info: Any = await self._service.call_engine(self._service.engine.get_server_info)
            found = pb.GetServerInfoResponse(
                active_requests=self._service.async_engine.open,
                sglang_version=__version__,
                server_type="grpc",
                uptime_seconds=time.time() - self._service.started,
                max_total_num_tokens=info.get("max_total_tokens") or 0,
            )
            named = {**info, "served_model_name": self._service.model_name}
            found.server_args.update(json.loads(msgspec.json.encode(named, enc_hook=str)))
            found.start_time.FromSeconds(int(self._service.started))
            return found

    async def GetLoads(self, request: Any, context: Any) -> Any:  # noqa: N802  # of the protocol
        """Returns the load of each replica of the engine."""
        async with self._calls.guard_grpc_call("GetLoads", context):
            each = await native.collect_replica_stats(self._service)
            loads = [_encode_scheduler_load(self._service, stats) for stats in each]
            if request.HasField("dp_rank"):
                loads = [load for load in loads if load.dp_rank == request.dp_rank]
            running, waiting = (
                sum(getattr(load, f"num_{of}_reqs") for load in loads)
                for of in ("running", "waiting")
            )
            whole = pb.AggregateMetrics(
                total_running_reqs=running,
                total_waiting_reqs=waiting,
                total_reqs=running + waiting,
                avg_token_usage=sum(load.token_usage for load in loads) / max(len(loads), 1),
            )
            return pb.GetLoadsResponse(
                version=__version__, dp_rank_count=len(each), loads=loads, aggregate=whole
            )

    async def FlushCache(self, _: Any, context: Any) -> Any:  # noqa: N802  # of the protocol
        """Drops cached prefixes that are not in use."""
        async with self._calls.guard_grpc_call("FlushCache", context, _OF_ADMIN):
            freed = await self._service.call_engine(self._service.engine.flush_cache)
            return common.FlushCacheResponse(
                success=True, message=f"Cache flushed: {freed} tokens."
            )

    async def GetTokenizer(self, _: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802  # of the protocol
        """Yields the tokenizer's files as a ZIP archive, in pieces."""
        async with self._calls.guard_grpc_call("GetTokenizer", context):
            data, digest = await asyncio.to_thread(lambda: self._tokenizer_archive)
            for start in range(0, len(data), _CHUNK):
                last = start + _CHUNK >= len(data)
                yield common.GetTokenizerChunk(
                    data=data[start : start + _CHUNK], sha256=digest if last else ""
                )

    @cached_property
    def _config(self) -> dict[str, Any]:
        config = self._service.engine.config
        file = resolve_for_engine(config.model, config.revision) / "config.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
        return found

    @cached_property
    def _tokenizer_archive(self) -> tuple[bytes, str]:
        """ZIP archive of the tokenizer's files, and its SHA-256. The chat template is the engine's."""
        config = self._service.engine.config
        written = io.BytesIO()
        folders = (
            Path(self._service.tokenizer_path),
            resolve_for_engine(config.model, config.revision),
        )
        template = self._service.engine.chat_template()
        with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in _FILES:
                file = next(
                    (folder / name for folder in folders if (folder / name).is_file()), None
                )
                if file is not None:
                    archive.write(file, name)
            if template is not None:
                archive.writestr("chat_template.jinja", template.source)
        data = written.getvalue()
        return data, hashlib.sha256(data).hexdigest()


def _ids(given: object) -> list[int]:
    """Returns token ids as a list. `given` may be one id, a list or None, as in a model's config."""
    return [
        each for each in (given if isinstance(given, list) else [given]) if isinstance(each, int)
    ]


def _convert_generate_message(request: Any) -> Any:
    """Converts a message to a request of the engine. Zeros of proto3 that mean "not set" are left
    out.

    Raises:
        ParameterError, ConstraintError: see `read_request`.
    """
    refuse_fields(
        request,
        "mm_inputs",
        "input_embeds",
        "return_hidden_states",
        "disaggregated_params",
        "custom_logit_processor",
    )
    given = request.sampling_params
    refuse_fields(given, "custom_params")
    params = MessageToDict(given, preserving_proto_field_name=True)
    # zero is a valid value, which proto3 omits
    params = {"temperature": given.temperature, **params}
    for name in ("spaces_between_special_tokens", "stream_interval"):
        params.pop(name, None)
    if "ebnf_grammar" in params:
        params["ebnf"] = params.pop("ebnf_grammar")
    return read_request(
        None,
        params,
        list(request.tokenized.input_ids),
        return_logprob=request.return_logprob,
        logprob_start_len=request.logprob_start_len,
        top_logprobs_num=request.top_logprobs_num,
        token_ids_logprob=list(request.token_ids_logprob) or None,
        rid=request.request_id or None,
        data_parallel_rank=request.data_parallel_rank
        if request.HasField("data_parallel_rank")
        else None,
        stream=request.stream,
    ).calls[0]


def _answers(request: Any, event: Delta | Generation, sent: dict[int, int]) -> Iterator[Any]:
    """Yields the messages for an event. `sent` counts the tokens of each sample that earlier
    messages contained, and is updated.
    """
    done = sent.get(event.index, 0)
    index = event.index
    usage = event.usage if isinstance(event, Generation) else Usage()
    ids = event.token_ids if isinstance(event, Delta) else event.token_ids[done:]
    entries = event.logprobs if isinstance(event, Delta) else event.output_logprobs[done:]
    sent[index] = done + len(ids)
    counts = {
        "prompt_tokens": usage.prompt_tokens or len(request.tokenized.input_ids),
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": sent[index],
        "index": index,
    }
    if request.stream and ids:
        chunk = pb.GenerateStreamChunk(
            token_ids=ids, output_logprobs=_encode_output_logprobs(request, entries), **counts
        )
        yield pb.GenerateResponse(request_id=request.request_id, chunk=chunk)
    if isinstance(event, Generation):
        name = "matched_stop_str" if isinstance(event.matched, str) else "matched_token_id"
        matched: Any = {} if event.matched is None else {name: event.matched}
        whole = pb.GenerateComplete(
            output_ids=event.token_ids,
            finish_reason=event.finish_reason,
            output_logprobs=_encode_output_logprobs(request, event.output_logprobs),
            input_logprobs=_encode_input_logprobs(request, event),
            **counts,
            **matched,
        )
        yield pb.GenerateResponse(request_id=request.request_id, complete=whole)


def _encode_top_logprobs(entries: Sequence[TokenLogprob], attribute: str) -> list[Any]:
    """Converts the log-probabilities of alternatives to messages, one for each token."""
    found = [getattr(entry, attribute) for entry in entries]
    if not any(found):
        return []
    return [
        pb.TopLogProbs(values=[each[0] for each in row], token_ids=[each[1] for each in row])
        for row in found
    ]


def _encode_output_logprobs(request: Any, entries: Sequence[TokenLogprob]) -> Any:
    if not request.return_logprob or not entries:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in entries],
        token_ids=[entry.token_id for entry in entries],
        top_logprobs=_encode_top_logprobs(entries, "top"),
        token_ids_logprobs=_encode_top_logprobs(entries, "ids"),
    )


def _encode_input_logprobs(request: Any, generation: Generation) -> Any:
    if not request.return_logprob or not generation.prompt_logprobs:
        return None
    first = (
        [] if request.logprob_start_len else [TokenLogprob(None, request.tokenized.input_ids[0])]
    )
    entries = [*first, *generation.prompt_logprobs]
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(value=entry.logprob) for entry in entries],
        token_ids=[entry.token_id for entry in entries],
        top_logprobs=_encode_top_logprobs(entries, "top"),
    )


def _encode_scheduler_load(service: Service, stats: dict[str, Any]) -> Any:
    used = stats["total_tokens"] - stats["free_tokens"]
    usage = used / max(stats["total_tokens"], 1)
    return pb.SchedulerLoad(
        dp_rank=stats["dp_rank"],
        num_running_reqs=stats["running"],
        num_waiting_reqs=stats["waiting"],
        num_total_reqs=stats["running"] + stats["waiting"],
        num_used_tokens=used,
        token_usage=usage,
        max_total_num_tokens=stats["total_tokens"],
        utilization=usage,
        max_running_requests=service.engine.core.capacity.sizes.max_running,
        # encoders have none
        cache_hit_rate=stats.get("prompt_tokens_cached", 0) / max(stats.get("prompt_tokens", 0), 1),
    )
