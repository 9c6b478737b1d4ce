"""SGLang's gRPC service (`sglang_scheduler.proto`, as smg-grpc-proto publishes it), which gateways speak with workers:
token ids in, token ids out. It shares the engine, keys and limits of the HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import logging
import time
import zipfile
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import grpc
import msgspec
from google.protobuf.json_format import MessageToDict
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc as services
from smg_grpc_proto.generated import common_pb2 as common
from starlette.requests import Request

from sglang_lite.engine import embedding
from sglang_lite.protocol import BackendError, Delta, Generation, ParameterError, SglError, TokenLogprob, Usage
from sglang_lite.random_ids import random_id
from sglang_lite.runtime.models.resolve import resolve_served
from sglang_lite.server import native
from sglang_lite.server.async_engine import key_in_use
from sglang_lite.server.endpoint import AccessControl, Route
from sglang_lite.server.errors import RateLimitError, status_of
from sglang_lite.server.service import Service
from sglang_lite.server.sglang.request import read_request
from sglang_lite.version import __version__

logger = logging.getLogger("sglang_lite.server")
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT, 401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED, 404: grpc.StatusCode.NOT_FOUND, 429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED, 503: grpc.StatusCode.UNAVAILABLE, 504: grpc.StatusCode.DEADLINE_EXCEEDED,
}  # fmt: skip
_CHUNK = 64 * 1024  # bytes of a tokenizer's files in a message
_LONGEST_S = 600.0  # of an embedding
_IDLE_MS = 60_000  # after which a connection without calls is closed
_FILES = (  # of a tokenizer
    "tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "special_tokens_map.json",
    "vocab.json", "merges.txt", "tokenizer.model", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
_NAME = pb.DESCRIPTOR.services_by_name["SglangScheduler"].full_name
_OF_KEY = Route("gRPC", native.generate, "Any call", protocol="native")
_OF_ADMIN = Route("gRPC", native.flush_cache, "Calls that change the server", access="admin")


async def serve_grpc(service: Service, gate: AccessControl, port: int) -> tuple[grpc.aio.Server, int]:
    """Starts the service on the running event loop, at the address of the HTTP server. Returns it, and its port.

    Args:
        gate: keys and counts of open requests of the HTTP server.
        port: port to listen on; 0 takes a free one.

    Raises:
        BackendError: the port is taken.
    """
    settings = service.settings
    most = int(settings.max_body_mb * 2**20)
    server = grpc.aio.server(options=[
        ("grpc.max_receive_message_length", most), ("grpc.so_reuseport", 0), ("grpc.max_connection_idle_ms", _IDLE_MS),
    ])  # fmt: skip
    services.add_SglangSchedulerServicer_to_server(_Servicer(service, gate), server)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    try:
        port = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise BackendError(f"gRPC: {host}:{port} can't be listened on.", hint="Give another --grpc-port.") from error
    await server.start()
    return server, port


class _Servicer(services.SglangSchedulerServicer):  # type: ignore[misc]  # generated code has no types
    """Calls of the service. Those that are missing here answer UNIMPLEMENTED."""

    def __init__(self, service: Service, gate: AccessControl) -> None:
        self._service, self._gate = service, gate
        self._connections = _Connections(service.settings.max_connections_per_client)

    @contextlib.asynccontextmanager
    async def _answering(
        self, call: str, context: grpc.aio.ServicerContext, route: Route = _OF_KEY, *, request_id: str = "",
        counts: bool = False,
    ) -> AsyncIterator[None]:  # fmt: skip
        """Context of a call that checks its key and the limits, logs a line, and ends it with a status if it fails."""
        headers = {name.lower(): value for name, value in context.invocation_metadata() if isinstance(value, str)}
        encoded = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        started, request_id, key, status, text = time.perf_counter(), request_id or random_id(), "", 200, ""
        told: dict[str, str | int] = {"sglang_lite.request_id": request_id}
        with self._span(call, headers, told) if counts else contextlib.nullcontext():
            try:
                key = self._gate.key_of(Request({"type": "http", "headers": encoded, "query_string": b""}), route)
                with self._connections.call(context.peer()), self._gate.count_open(key, counts):
                    if counts:
                        self._service.begin(key)
                    key_in_use.set(key)
                    yield
            except SglError as error:
                status, text = status_of(error).status, str(error)
            except (grpc.aio.AbortError, asyncio.CancelledError, GeneratorExit):
                status = 499
                raise
            except Exception:  # a bug of this package: the client gets a status, and the server continues
                logger.exception("the gRPC call %s failed", call)
                status, text = 500, "the server failed. See its log."
            finally:
                code = grpc.StatusCode.OK if status == 200 else _CODES.get(status, grpc.StatusCode.INTERNAL)
                told["rpc.grpc.status_code"] = code.value[0]
                self._log(call, request_id, status, key, time.perf_counter() - started)
        if text:
            await context.abort(code, text)

    def _span(
        self, call: str, headers: dict[str, str], told: dict[str, str | int]
    ) -> contextlib.AbstractContextManager[None]:
        if self._service.spans is None:
            return contextlib.nullcontext()
        attributes = {"rpc.system": "grpc", "rpc.service": _NAME, "rpc.method": call}
        return self._service.spans.request(f"{_NAME}/{call}", attributes, headers, told)

    def _log(self, call: str, request_id: str, status: int, key: str, took: float) -> None:
        """Logs and counts a call as an HTTP request, with the status that it would have there."""
        ms = round(took * 1000, 1)
        line = {"method": "gRPC", "route": f"/{call}", "status": status, "ms": ms, "request_id": request_id}
        logger.info("%s %s %d %.1f ms %s", *line.values(), extra={"request": line})
        self._service.metrics.responded(f"/{call}", "gRPC", status, key)
        self._service.metrics.took(f"/{call}", took)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802  # of the protocol
        """Continues token ids."""
        async with self._answering("Generate", context, request_id=request.request_id, counts=True):
            wanted = _generate_request(request)
            wanted = self._service.adapted(request.lora_id, wanted)
            events = self._service.async_engine.generate(wanted)
            sent: dict[int, int] = {}
            async with contextlib.aclosing(events):
                async for batch in events:
                    for each in batch:
                        for answer in _answers(request, each, sent):
                            yield answer

    async def Embed(self, request: Any, context: Any) -> Any:  # noqa: N802  # of the protocol
        """Embedding of token ids."""
        async with self._answering("Embed", context, request_id=request.request_id, counts=True):
            _refuse(request, "mm_inputs", "is_cross_encoder", "token_type_ids")
            texts = [list(request.tokenized.input_ids)]
            compute = partial(embedding.embeddings, self._service.engine, texts, field="tokenized")
            (row, *_), tokens = await self._service.call_engine(compute, at_most_s=_LONGEST_S)
            return pb.EmbedResponse(embedding=row.tolist(), embedding_dim=len(row), prompt_tokens=sum(tokens))

    async def HealthCheck(self, _: Any, __: Any) -> Any:  # noqa: N802  # of the protocol
        """Health: the engine has generated its first token, and responds."""
        try:
            self._service.check_ready()
        except SglError as error:
            return pb.HealthCheckResponse(healthy=False, message=str(error))
        return pb.HealthCheckResponse(healthy=True, message="")

    async def Abort(self, request: Any, context: Any) -> Any:  # noqa: N802  # of the protocol
        """Ends a request."""
        async with self._answering("Abort", context):
            self._service.async_engine.abort(request.request_id, key_in_use.get() or None)
            return pb.AbortResponse(success=True)

    async def GetModelInfo(self, _: Any, context: Any) -> Any:  # noqa: N802  # of the protocol
        """Description of the model."""
        async with self._answering("GetModelInfo", context):
            engine, tokenizer = self._service.engine, self._service.engine.tokenizer
            config = self._config
            return pb.GetModelInfoResponse(
                model_path=engine.config.model,
                tokenizer_path=self._service.tokenizer_path,
                is_generation=engine.core.encoder is None,
                weight_version=engine.config.weight_version,
                served_model_name=self._service.model_name,
                max_context_length=engine.context_length,
                vocab_size=engine.vocab_size,
                supports_vision=False,  # images come over HTTP
                model_type=str(config.get("model_type", "")),
                architectures=config.get("architectures") or [],
                eos_token_ids=sorted(tokenizer.eos_ids.union(_ids(config.get("eos_token_id")))),
                bos_token_id=next(iter(_ids(tokenizer.bos_id) or _ids(config.get("bos_token_id"))), -1),
                pad_token_id=next(iter(_ids(config.get("pad_token_id"))), 0),
                max_req_input_len=engine.core.capacity.longest - 1,
            )

    async def GetServerInfo(self, _: Any, context: Any) -> Any:  # noqa: N802  # of the protocol
        """Settings and counts."""
        async with self._answering("GetServerInfo", context):
            info: Any = await self._service.call_engine(self._service.engine.get_server_info)
            found = pb.GetServerInfoResponse(
                active_requests=self._service.async_engine.open, sglang_version=__version__, server_type="grpc",
                uptime_seconds=time.time() - self._service.started,
                max_total_num_tokens=info.get("max_total_tokens") or 0,
            )  # fmt: skip
            named = {**info, "served_model_name": self._service.model_name}
            found.server_args.update(json.loads(msgspec.json.encode(named, enc_hook=str)))
            found.start_time.FromSeconds(int(self._service.started))
            return found

    async def GetLoads(self, request: Any, context: Any) -> Any:  # noqa: N802  # of the protocol
        """Load of each replica of the engine."""
        async with self._answering("GetLoads", context):
            each = await native.each_stats(self._service)
            loads = [_load(self._service, stats) for stats in each]
            if request.HasField("dp_rank"):
                loads = [load for load in loads if load.dp_rank == request.dp_rank]
            running, waiting = (sum(getattr(load, f"num_{of}_reqs") for load in loads) for of in ("running", "waiting"))
            whole = pb.AggregateMetrics(
                total_running_reqs=running, total_waiting_reqs=waiting, total_reqs=running + waiting,
                avg_token_usage=sum(load.token_usage for load in loads) / max(len(loads), 1),
            )  # fmt: skip
            return pb.GetLoadsResponse(version=__version__, dp_rank_count=len(each), loads=loads, aggregate=whole)

    async def FlushCache(self, _: Any, context: Any) -> Any:  # noqa: N802  # of the protocol
        """Drops cached prefixes that are not in use."""
        async with self._answering("FlushCache", context, _OF_ADMIN):
            freed = await self._service.call_engine(self._service.engine.flush_cache)
            return common.FlushCacheResponse(success=True, message=f"Cache flushed: {freed} tokens.")

    async def GetTokenizer(self, _: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802  # of the protocol
        """The tokenizer's files, as a ZIP archive in pieces."""
        async with self._answering("GetTokenizer", context):
            data, digest = await asyncio.to_thread(lambda: self._archive)
            for start in range(0, len(data), _CHUNK):
                last = start + _CHUNK >= len(data)
                yield common.GetTokenizerChunk(data=data[start : start + _CHUNK], sha256=digest if last else "")

    @cached_property
    def _config(self) -> dict[str, Any]:
        config = self._service.engine.config
        file = resolve_served(config.model, config.revision) / "config.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
        return found

    @cached_property
    def _archive(self) -> tuple[bytes, str]:
        """Files and their SHA-256. The chat template is the engine's."""
        config, written = self._service.engine.config, io.BytesIO()
        folders = (Path(self._service.tokenizer_path), resolve_served(config.model, config.revision))
        template = self._service.engine.chat_template()
        with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in _FILES:
                file = next((folder / name for folder in folders if (folder / name).is_file()), None)
                if file is not None:
                    archive.write(file, name)
            if template is not None:
                archive.writestr("chat_template.jinja", template.source)
        data = written.getvalue()
        return data, hashlib.sha256(data).hexdigest()


class _Connections:
    """Connections that have open calls, by client: gRPC tells of no others, and closes them.

    Args:
        most: most connections of a client's address.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls: defaultdict[str, Counter[str]] = defaultdict(Counter)  # numbers of calls by address and peer

    @contextlib.contextmanager
    def call(self, peer: str) -> Iterator[None]:
        """Context of a call. Raises RateLimitError if its client has too many connections.

        Args:
            peer: address and port of the connection, as gRPC writes them.
        """
        address = peer.rpartition(":")[0]
        calls = self._calls[address]
        if peer not in calls and len(calls) >= self._most:
            told = f"{self._most:,} connections of this client have calls, which is the limit."
            raise RateLimitError(told, hint="Send calls over one connection.")
        calls[peer] += 1
        try:
            yield
        finally:
            calls[peer] -= 1
            if not calls[peer]:
                del calls[peer]
            if not calls:
                del self._calls[address]


def _ids(given: object) -> list[int]:
    """Token ids of a field of a config, which may have none, one or several."""
    return [each for each in (given if isinstance(given, list) else [given]) if isinstance(each, int)]


def _refuse(request: Any, *names: str) -> None:
    """Raises ParameterError if one of the fields is set."""
    given = {field.name for field, _ in request.ListFields()}
    for name in names:
        if name in given:
            raise ParameterError(name, "is not supported by this server.", hint="Leave it out.")


def _generate_request(request: Any) -> Any:
    """Request of the engine. Zeros of proto3 that mean "not set" are left out.

    Raises:
        ParameterError, ConstraintError: as `read_request`.
    """
    _refuse(
        request, "mm_inputs", "input_embeds", "return_hidden_states", "disaggregated_params", "custom_logit_processor"
    )
    given = request.sampling_params
    _refuse(given, "custom_params")
    params = MessageToDict(given, preserving_proto_field_name=True)
    params = {"temperature": given.temperature, **params}  # whose zero is a value
    for name in ("spaces_between_special_tokens", "stream_interval"):
        params.pop(name, None)
    if "ebnf_grammar" in params:
        params["ebnf"] = params.pop("ebnf_grammar")
    return read_request(
        None, params, list(request.tokenized.input_ids), return_logprob=request.return_logprob,
        logprob_start_len=request.logprob_start_len, top_logprobs_num=request.top_logprobs_num,
        token_ids_logprob=list(request.token_ids_logprob) or None, rid=request.request_id or None,
        data_parallel_rank=request.data_parallel_rank if request.HasField("data_parallel_rank") else None,
        stream=request.stream,
    ).calls[0]  # fmt: skip


def _answers(request: Any, event: Delta | Generation, sent: dict[int, int]) -> Iterator[Any]:
    """Yields the messages for an event. `sent` counts the tokens of each sample that chunks have had."""
    done, index = sent.get(event.index, 0), event.index
    usage = event.usage if isinstance(event, Generation) else Usage()
    ids = event.token_ids if isinstance(event, Delta) else event.token_ids[done:]
    entries = event.logprobs if isinstance(event, Delta) else event.output_logprobs[done:]
    sent[index] = done + len(ids)
    counts = {
        "prompt_tokens": usage.prompt_tokens or len(request.tokenized.input_ids), "cached_tokens": usage.cached_tokens,
        "completion_tokens": sent[index], "index": index,
    }  # fmt: skip
    if request.stream and ids:
        chunk = pb.GenerateStreamChunk(token_ids=ids, output_logprobs=_output(request, entries), **counts)
        yield pb.GenerateResponse(request_id=request.request_id, chunk=chunk)
    if isinstance(event, Generation):
        name = "matched_stop_str" if isinstance(event.matched, str) else "matched_token_id"
        matched: Any = {} if event.matched is None else {name: event.matched}
        whole = pb.GenerateComplete(
            output_ids=event.token_ids, finish_reason=event.finish_reason,
            output_logprobs=_output(request, event.output_logprobs), input_logprobs=_input(request, event), **counts,
            **matched,
        )  # fmt: skip
        yield pb.GenerateResponse(request_id=request.request_id, complete=whole)


def _rows(entries: Sequence[TokenLogprob], attribute: str) -> list[Any]:
    """Log-probabilities of alternatives, one message for each token."""
    found = [getattr(entry, attribute) for entry in entries]
    if not any(found):
        return []
    return [pb.TopLogProbs(values=[each[0] for each in row], token_ids=[each[1] for each in row]) for row in found]


def _output(request: Any, entries: Sequence[TokenLogprob]) -> Any:
    if not request.return_logprob or not entries:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in entries], token_ids=[entry.token_id for entry in entries],
        top_logprobs=_rows(entries, "top"), token_ids_logprobs=_rows(entries, "ids"),
    )  # fmt: skip


def _input(request: Any, generation: Generation) -> Any:
    if not request.return_logprob or not generation.prompt_logprobs:
        return None
    first = [] if request.logprob_start_len else [TokenLogprob(None, request.tokenized.input_ids[0])]
    entries = [*first, *generation.prompt_logprobs]
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(value=entry.logprob) for entry in entries],
        token_ids=[entry.token_id for entry in entries], top_logprobs=_rows(entries, "top"),
    )  # fmt: skip


def _load(service: Service, stats: dict[str, Any]) -> Any:
    used = stats["total_tokens"] - stats["free_tokens"]
    usage = used / max(stats["total_tokens"], 1)
    return pb.SchedulerLoad(
        dp_rank=stats["dp_rank"], num_running_reqs=stats["running"], num_waiting_reqs=stats["waiting"],
        num_total_reqs=stats["running"] + stats["waiting"], num_used_tokens=used, token_usage=usage,
        max_total_num_tokens=stats["total_tokens"], utilization=usage,
        max_running_requests=service.engine.core.capacity.sizes.max_running,
        cache_hit_rate=stats["prompt_tokens_cached"] / max(stats["prompt_tokens"], 1),
    )  # fmt: skip
