"""Serves one model with several engines, each in its own process, behind the interface of a single
engine (`Core`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from sglang_lite.engine.core_client import CoreClient, load_tokenizer_and_media
from sglang_lite.engine.engine_process import EngineProcess
from sglang_lite.engine.frames import Meeting, Prefixes, Ready
from sglang_lite.engine.meetings import open_rendezvous
from sglang_lite.engine.nodes import (
    NodeListener,
    RemoteProcess,
    processes_per_node,
    settings_of_replica,
)
from sglang_lite.engine.replica_calls import ReplicaCalls
from sglang_lite.engine.replica_chooser import Placement, ReplicaChooser
from sglang_lite.engine.replica_program import (
    Early,
    ProgramAtReplica,
    ProgramLoad,
    collect_opening_spans,
    estimate_forked_load,
)
from sglang_lite.protocol import (
    BackendError,
    Delta,
    ProgramSink,
    Prompt,
    SamplingParams,
    Selection,
    SglError,
    Span,
)
from sglang_lite.runtime.calls import EncodeMedia, EngineCall, ExportPrefix, R
from sglang_lite.runtime.config import DIST_TIMEOUT_S, EngineConfig
from sglang_lite.runtime.core.gate import CLOSED, Gate
from sglang_lite.runtime.core.open_requests import OpenRequests, Ticket
from sglang_lite.runtime.core.submission import (
    GenerateRequest,
    OpenRequest,
    ProgramRequest,
    SelectRequest,
    Submission,
    check_priority,
    check_replica_rank,
)
from sglang_lite.runtime.embedding.request import EncodeRequest, not_a_generator_error
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.prefix_hash import PrefixHash, PrefixHasher, digest_interval
from sglang_lite.runtime.kv_cache.prefix_space import PrefixSpace
from sglang_lite.runtime.requests.output_builder import Sink

_MAX_TOKENS = 65_536  # tokens of a prompt whose prefixes are looked up
_BYTES_A_TOKEN = 4  # of a choice
_NAME = "the process of replica {}"


class _ReplicasGate(Gate):
    """Gate for all replicas together. A thread that calls the sinks of any replica counts as the
    engine's own thread.
    """

    def __init__(self, gates: Sequence[Gate]) -> None:
        super().__init__()
        self._gates = gates

    def is_on_own_thread(self) -> bool:
        return any(gate.is_on_own_thread() for gate in self._gates)


class Replicas:
    """The `Core` of an engine with `dp_size` above 1.

    Args:
        config: settings of the engine.
        path: folder of the model.

    Attributes:
        capacity: capacity of the smallest replica.
        other attributes: see CoreClient.

    Raises:
        SglError: a replica can't be started.
    """

    def __init__(self, config: EngineConfig, path: Path) -> None:
        self._config = config
        self._chooser: ReplicaChooser | None = None  # None until all replicas run
        self._coming_back: set[int] = set()  # replicas to which earlier calls are being repeated
        with open_rendezvous(config) as places:
            self._clients = clients = _start_clients(
                config, path, self._handle_replica_message, places
            )
        least = min(clients, key=lambda client: client.capacity.longest)
        self.capacity = least.capacity
        self.builder = least.builder
        self.encoder = least.encoder
        self.tokenizer = least.tokenizer
        self.vocab_size = least.vocab_size
        self.generates = least.generates
        self.description = f"{least.description}; {len(clients)} replicas"
        self.gate = _ReplicasGate([client.gate for client in clients])
        self.open_requests = OpenRequests(
            config.max_queued + len(clients) * self.capacity.sizes.max_running
        )
        for client in clients:
            client.open_requests = self.open_requests
        self._every = digest_interval(self.capacity.sizes.page_size)
        self._hasher = PrefixHasher()
        self._calls = ReplicaCalls(clients, str(path), config.weight_version)
        self._chooser = ReplicaChooser(
            len(clients), config.load_balance_method, self.capacity, self._every, self._readiness
        )

    @property
    def config(self) -> EngineConfig:
        now = self._calls.accepting_replicas()[0].config
        if (now.model, now.weight_version) != (self._config.model, self._config.weight_version):
            self._config = replace(
                self._config,
                model=now.model,
                revision=now.revision,
                weight_version=now.weight_version,
            )
        return self._config

    @property
    def model_name(self) -> str:
        return self._calls.accepting_replicas()[0].model_name

    @property
    def responds(self) -> bool:
        return any(client.responds for client in self._calls.accepting_replicas())

    @property
    def pids(self) -> list[int]:
        return [pid for client in self._clients for pid in client.pids]

    # ---------------------------------------------------------------------------------- submissions

    def submit(
        self,
        request: Submission,
        sink: Callable[[Any], None],
        flush: Callable[[], object] | None = None,
    ) -> Ticket:  # each kind of submission has its own events
        """Chooses a replica and submits a request to it: see `Engine.submit`, `submit_select` and
        `run_program`.
        """
        self.gate.check_open()
        request.check_fields()
        if not self.generates:
            raise not_a_generator_error(self.model_name, encoder_only=self._config.encoder_only)
        return self._submit_by_kind[type(request)](self, request, sink, flush)

    def _generate(
        self, request: GenerateRequest, sink: Sink, flush: Callable[[], object] | None
    ) -> Ticket:
        encoded = self.builder.encode_request(request)
        params = self.builder.resolve_with_defaults(request.params)
        tokens = self.builder.check_prompt_tokens(encoded.ids, params, encoded.media)
        placement = self._choose_replica(
            tokens,
            request.namespace,
            params.max_tokens * params.n,
            rows=params.n,
            rank=request.routed_dp_rank,
        )
        request = replace(encoded.put_into(request), routed_dp_rank=None)
        return self._submit_to_placement(
            placement, request, self._make_row_counting_sink(placement, sink), flush
        )

    def _select(
        self,
        request: SelectRequest,
        sink: Callable[[Selection | SglError], None],
        flush: Callable[[], object] | None,
    ) -> Ticket:
        prompt = self.builder.start_token_log(request.prompt).ids()
        choices = sum(map(len, request.choices)) // _BYTES_A_TOKEN
        placement = self._choose_replica(prompt, request.namespace, choices)
        return self._submit_to_placement(
            placement, request, self._make_row_counting_sink(placement, sink), flush
        )

    def _submit_program_request(
        self, request: ProgramRequest, sink: ProgramSink, flush: Callable[[], object] | None
    ) -> Ticket:
        check_priority(request.priority, self.config.policy)
        prompt = (
            request.prompt
            if isinstance(request.prompt, Prompt)
            else Prompt((Span(request.prompt),))
        )
        placement = self._choose_replica(
            self._ids_of_spans(collect_opening_spans(prompt.spans, request.program.nodes)),
            request.namespace,
            0,
        )
        load = ProgramLoad(self._require_chooser, placement, self.builder)
        load.add_nodes((), request.program.nodes)
        return self._submit_to_placement(placement, request, load.make_counting_sink(sink), flush)

    _submit_by_kind: ClassVar[Mapping[type[Submission], Callable[..., Ticket]]] = {
        GenerateRequest: _generate,
        SelectRequest: _select,
        ProgramRequest: _submit_program_request,
    }

    def open_program(
        self, request: OpenRequest, sink: ProgramSink, flush: Callable[[], object] | None = None
    ) -> ProgramAtReplica:
        """Opens a program like `Engine.open_program`. Its replica is chosen when the program asks
        for its first generation or selection.
        """
        self.gate.check_open()
        request.check_for_policy(self.config.policy)
        if not self.generates:
            raise not_a_generator_error(self.model_name, encoder_only=self._config.encoder_only)

        def open_at_replica(
            spans: Sequence[Span], early: Early
        ) -> tuple[Any, ProgramLoad]:  # an OpenProgram
            coming = estimate_forked_load(early, self.builder)
            expected = coming.branches * coming.tokens
            rows = 1 + coming.branches
            placement = self._choose_replica(
                self._ids_of_spans(spans), request.namespace, expected, rows=rows
            )
            load = ProgramLoad(self._require_chooser, placement, self.builder, coming)
            try:
                return self._clients[placement.rank].open_program(
                    request, load.make_counting_sink(sink), flush
                ), load
            except BaseException:
                self._require_chooser.forget_placement(placement)
                raise

        return ProgramAtReplica(self.gate, sink, open_at_replica)

    @property
    def _require_chooser(self) -> ReplicaChooser:
        assert self._chooser is not None
        return self._chooser

    def _choose_replica(
        self,
        ids: Sequence[int] | Ints,
        namespace: str,
        expected: int,
        *,
        rows: int = 1,
        rank: int | None = None,
    ) -> Placement:
        check_replica_rank(rank, len(self._clients))
        return self._require_chooser.place_prompt(
            self._prefix_digests(ids, namespace), len(ids), expected, rows=rows, rank=rank
        )

    def _prefix_digests(self, ids: Sequence[int] | Ints, namespace: str) -> list[int]:
        if not self._config.prefix_cache:
            return []
        tokens = np.asarray(ids[:_MAX_TOKENS], np.int32)
        root = PrefixHash.for_namespace(PrefixSpace.in_namespace(namespace).namespace)
        found: list[int] = self._hasher.compute_digests(root, tokens, self._every).tolist()
        return found

    def _ids_of_spans(self, spans: Sequence[Span]) -> Sequence[int]:
        """Returns the token ids of a text, with which its cached prefixes are looked up. A very
        long text is cut: no span is added after `_MAX_TOKENS` characters.
        """
        log = self.builder.start_token_log("")
        characters = 0
        for span in spans:
            log.append((span,))
            characters += len(span.text)
            if characters > _MAX_TOKENS:
                break
        return log.ids()

    def _make_row_counting_sink(
        self, placement: Placement, sink: Callable[[Any], None]
    ) -> Callable[[Any], None]:
        """Wraps a sink in a callback that passes every event on. When an event ends a row, the
        callback first subtracts the row from the replica's load.
        """

        def forward_and_count(event: object) -> None:
            if not isinstance(event, Delta):
                if placement.rows > 1:
                    self._require_chooser.adjust(
                        placement, -1, -(placement.tokens // placement.rows)
                    )
                else:
                    self._require_chooser.forget_placement(placement)
            sink(event)

        return forward_and_count

    def _submit_to_placement(
        self,
        placement: Placement,
        request: Submission,
        sink: Callable[[Any], None],
        flush: Callable[[], object] | None,
    ) -> Ticket:
        try:
            return self._clients[placement.rank].submit(request, sink, flush)
        except BaseException:
            self._require_chooser.forget_placement(placement)
            raise

    # ------------------------------------------------------------------------ calls with one answer

    def submit_call(self, call: EngineCall[R]) -> Future[R]:
        """Returns the future of the answer to a call to one replica or all of them: see
        replica_calls.py.
        """
        self.gate.check_open()
        answer: Future[Any]
        match call:
            case EncodeRequest() | EncodeMedia():
                placement = self._require_chooser.place_prompt(
                    (), len(call.ids if isinstance(call, EncodeRequest) else call.media), 0
                )
                answer = self._clients[placement.rank].submit_call(call)
                answer.add_done_callback(
                    lambda _: self._require_chooser.forget_placement(placement)
                )
            case ExportPrefix():
                ids = self.builder.prompt_ids(call.ids or call.prompt)
                self.builder.check_prompt_tokens(
                    ids, self.builder.resolve_with_defaults(SamplingParams(max_tokens=0))
                )
                rank = self._require_chooser.find_holder(self._prefix_digests(ids, call.namespace))
                answer = self._clients[rank].submit_call(call)
            case _:
                answer = self._calls.call_replicas(call)
        return answer

    # ------------------------------------------------------------------------ state of the replicas

    def call_soon(self, call: Callable[[], object]) -> None:
        """Schedules a call on the thread of a replica's sinks. Takes no lock."""
        self._calls.accepting_replicas()[0].call_soon(call)

    def close(self) -> None:
        """Stops all processes."""
        self.disconnect()
        if not self.gate.is_forked_copy:
            self._calls.close()
        for client in self._clients:
            client.close()

    def disconnect(self) -> None:
        """Closes the connections to all processes, which makes them end: see
        `EngineLink.disconnect`.
        """
        self.gate.reason = self.gate.reason or CLOSED
        for client in self._clients:
            client.disconnect()

    def _readiness(self, rank: int) -> int:
        """Returns how ready a replica is for requests: 2 if it can compute now, 1 if it is silent
        or restarting, and 0 if it has ended.
        """
        client = self._clients[rank]
        computes = client.is_up and not client.is_silent and rank not in self._coming_back
        return 2 if computes else int(not client.gate.reason)

    def _handle_replica_message(self, rank: int, message: Ready | Prefixes | None) -> None:
        """Handles a status message of a replica, on the thread of its sinks."""
        if self._chooser is None:
            return
        match message:
            case Prefixes():
                gained, lost = (
                    np.frombuffer(data, np.uint64).tolist()
                    for data in (message.gained, message.lost)
                )
                self._chooser.update_tree(rank, gained, lost, forgotten=message.forgotten)
            case Ready():
                self._catch_up_replacement(rank)
            case None:
                self._chooser.update_tree(rank, (), (), forgotten=True)
                for client in self._clients if self._config.enable_dp_attention else ():
                    client.disconnect(self._clients[rank].gate.reason)
                if not self.gate.reason and all(client.gate.reason for client in self._clients):
                    self.gate.reason = self._clients[rank].gate.reason

    def _catch_up_replacement(self, rank: int) -> None:
        """Brings a replica's replacement process up to date by repeating earlier calls to it. Until
        the calls have been answered, the replica counts as restarting.
        """
        client = self._clients[rank]

        def finish_return(answers: Future[list[Any]]) -> None:
            if (error := answers.exception()) is not None:
                client.disconnect()
                client.gate.reason = f"replica {rank} could not be used again: {error}"
            self._coming_back.discard(rank)

        self._coming_back.add(rank)
        self._calls.repeat_calls_to(client).add_done_callback(finish_return)


def _start_clients(
    config: EngineConfig,
    path: Path,
    told: Callable[[int, Ready | Prefixes | None], object],
    places: Sequence[Meeting | None],
) -> list[CoreClient]:
    """Starts the replicas' processes. Returns their clients once all of them are running. If one
    fails to start, all are ended.

    Args:
        config, path: see `Replicas`.
        told: callback for status messages, with the number of the replica.
        places: for each replica on this machine, the files through which it synchronizes with
            replicas that share its feed-forward weights; None if it shares none.
    """
    settings = [settings_of_replica(config, rank) for rank in range(config.dp_size)]
    processes: list[EngineProcess] = []
    starting: list[Future[CoreClient]] = []
    try:
        for rank, own in enumerate(settings[: processes_per_node(config)]):
            processes.append(EngineProcess(own, path, _NAME.format(rank), meeting=places[rank]))
        for rank, child in sorted(_wait_for_other_nodes(config, path).items()):
            processes.append(EngineProcess(settings[rank], path, _NAME.format(rank), child))
        parts = load_tokenizer_and_media(config, path)
        with ThreadPoolExecutor(config.dp_size, "sglang_lite-start") as threads:
            try:
                for rank, (own, process) in enumerate(zip(settings, processes)):
                    starting.append(
                        threads.submit(CoreClient, own, path, process, parts, partial(told, rank))
                    )
                for each in as_completed(starting):
                    each.result()
            except BaseException:
                for process in processes:
                    process.child.connection.close()
                raise
    except BaseException:
        for process in processes:
            process.child.connection.close()
        for each in starting:
            if each.exception() is None:
                each.result().close()
        raise
    return [each.result() for each in starting]


def _wait_for_other_nodes(config: EngineConfig, path: Path) -> dict[int, RemoteProcess]:
    """Returns the replicas of other machines by number, once all have connected.

    Raises:
        BackendError: a replica has not connected in time.
    """
    found: dict[int, RemoteProcess] = {}
    if config.nnodes == 1:
        return found
    listener = NodeListener(config, path, found.__setitem__)
    try:
        listener.wait_for_processes(config.dist_timeout or DIST_TIMEOUT_S, lambda: False)
    except BackendError:
        for child in found.values():
            child.kill()
        raise
    finally:
        listener.close()
    return found
