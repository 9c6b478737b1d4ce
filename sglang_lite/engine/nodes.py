"""Runs ranks or replicas on several machines, called nodes. The engine is on node 0. On each other
node, an agent starts that node's processes and relays messages between them and node 0. Each
process has its own TCP connection.

When an agent connects, it first sends its version, its settings and a digest of its model. Node 0
rejects the agent if these differ from its own. Connections are neither encrypted nor authenticated,
and neither are torch's connections between ranks, so nobody else may have access to the network.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from sglang_lite.engine.connection import BrokenFrameError, Connection
from sglang_lite.engine.frames import HEADER, Start, StartFailed, encode_frame, serializable_failure
from sglang_lite.engine.signs_of_life import processor_time
from sglang_lite.engine.spawned_process import CAUSE_FIRST_S, ProcessEnd, SpawnedProcess
from sglang_lite.protocol import BackendError
from sglang_lite.runtime.config import DIST_TIMEOUT_S, EngineConfig
from sglang_lite.runtime.host import startup_messages
from sglang_lite.runtime.parallel.addresses import GLOO, parse_address, rendezvous_url
from sglang_lite.version import __version__

logger = logging.getLogger("sglang_lite")

_HANDSHAKE_S = 10.0  # time that either end has for its part of the handshake
_HANDSHAKE_BYTES = 1 << 16  # maximum size of a handshake message
_AT_ONCE = 64  # maximum number of simultaneous greetings, since some callers may be silent
# raised while reading one
_NO_HANDSHAKE = (OSError, BrokenFrameError, msgspec.MsgspecError, RecursionError)
_AGAIN_S = 0.5  # between two attempts to reach node 0
_LOOK_S = 1.0  # between two checks whether the engine has ended, or whether a silent rank computes
_OF_ALL_NODES = (  # settings that affect how ranks load and compute; rank 0's are used for others
    "nnodes",
    "dp_size",
    "tp_size",
    "ep_size",
    "pp_size",
    "ep_num_redundant_experts",
    "init_expert_location",
    "enable_eplb",
    "expert_distribution_recorder_mode",
    "enable_layerwise_nvtx_marker",
    "debug_tensor_dump_output_folder",
    "debug_tensor_dump_layers",
    "device",
    "dtype",
    "quantization",
    "load_format",
    "context_length",
    "attention_backend",
    "cuda_graphs",
    "speculation",
    "draft_tokens",
    "original_logprobs",
)
_OF_ALL_REPLICAS = (  # settings that also affect the answers of replicas
    "model_impl",
    "kv_dtype",
    "deterministic",
    "seed",
    "weight_version",
    "prefix_cache",
    "enable_lora",
    "enable_memory_saver",
    "refuse_while_asleep",
    "enable_multimodal",
    "encoder_only",
    "language_only",
    "enable_return_routed_experts",
    "enable_return_hidden_states",
    "special_tokens_in_roles",
    "constraint_backend",
)
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt")
_LAST_BYTES = 1 << 16  # trailing bytes of a weights file that are compared


class Hello(msgspec.Struct, frozen=True):
    """First message of an agent for one of its processes.

    Attributes:
        rank: number of the rank or replica.
        version: version of this package.
        model: digest of the model's config, and of the names, sizes and last bytes of its weights.
        settings: settings that must be equal on all nodes, as text.
    """

    rank: int
    version: str
    model: str
    settings: dict[str, str]

    @staticmethod
    def for_rank(config: EngineConfig, path: Path, rank: int) -> Hello:
        names = _OF_ALL_NODES + (_OF_ALL_REPLICAS if config.dp_size > 1 else ())
        settings = {name: repr(getattr(config, name)) for name in names}
        return Hello(rank, __version__, _model_digest(path), settings)

    def describe_difference(self, own: Hello) -> str | None:
        """Describes how a process's version, settings or model differ from those of node 0. The
        text is part of a message. Returns None if all are the same.
        """
        if self.version != own.version:
            return f"sglang_lite {self.version}, and node 0 has {own.version}"
        for name, value in own.settings.items():
            if self.settings.get(name) != value:
                return f"{name}={self.settings.get(name)}, and node 0 has {value}"
        return (
            None
            if self.model == own.model
            else "another model than node 0: its config or its weights differ"
        )


class Welcome(msgspec.Struct, frozen=True):
    """Reply of node 0 to a process's greeting. Contains the reason if node 0 rejects the process,
    and None if it accepts it.
    """

    refusal: str | None


class RemoteProcess:
    """Process on another node, with the methods of a `SpawnedProcess`. When the connection ends,
    the agent on that node ends the process.

    Args:
        connection: connection to the agent of the process.
        node: number of the process's node.
    """

    pid = None  # on this machine

    def __init__(self, connection: Connection, node: int) -> None:
        self.connection = connection
        self._node = node

    def await_process_end(self) -> ProcessEnd:
        return ProcessEnd(
            f"on node {self._node} is gone: the connection to it ended.", by_itself=False
        )

    def kill(self) -> None:
        self.connection.close()


class NodeListener:
    """Listener on node 0. Agents of other nodes open one connection to it for each of their
    processes.

    Args:
        config: settings of the engine.
        path: folder or file of the model.
        joined: callback for each process that has connected, with its number, on a thread of the
            listener.

    Raises:
        BackendError: nothing can listen at `dist_init_addr`.
    """

    def __init__(
        self, config: EngineConfig, path: Path, joined: Callable[[int, RemoteProcess], object]
    ) -> None:
        self._config = config
        self._joined = joined
        self._own = Hello.for_rank(config, path, 0)
        self._per_node = processes_per_node(config)
        self._missing = set(range(self._per_node, self._per_node * config.nnodes))
        self._changed = threading.Condition()
        self._closed = False
        there = parse_address(config.dist_init_addr)
        family = socket.AF_INET6 if ":" in there[0] else socket.AF_INET
        try:
            self._server = socket.create_server(there, family=family)
        except OSError as error:
            raise BackendError(
                f"dist_init_addr: node 0 can't listen at {config.dist_init_addr}: {error}.",
                hint="Use a free port and an address of this machine.",
            ) from error
        self._server.settimeout(_LOOK_S)
        threading.Thread(target=self._accept, name="sglang_lite-nodes", daemon=True).start()

    def wait_for_processes(self, timeout_s: float, ended: Callable[[], bool]) -> None:
        """Waits until the processes of all other nodes have connected. Stops waiting if `ended`
        returns True, because the engine has then ended.

        Raises:
            BackendError: a process has not connected in time.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._missing and not ended():
                if time.monotonic() >= deadline:
                    node = min(self._missing) // self._per_node
                    raise BackendError(
                        f"node {node} of {self._config.nnodes} has not come to {self._config.dist_init_addr} "
                        f"within {timeout_s:g} s.",
                        hint=f"Run `sglang-lite serve` there with node_rank={node} and the same settings.",
                    )
                self._changed.wait(_LOOK_S)

    def close(self) -> None:
        """Stops the listener."""
        self._closed = True

    def _accept(self) -> None:
        places = threading.BoundedSemaphore(_AT_ONCE)

        def greet(line: socket.socket, host: str) -> None:
            try:
                self._answer_handshake(line, host)
            finally:
                places.release()

        with self._server:
            while self._missing and not self._closed:
                with contextlib.suppress(OSError):  # nobody has connected, or they are already gone
                    line, (host, *_) = self._server.accept()
                    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    places.acquire()
                    threading.Thread(
                        target=greet, args=(line, str(host)), name="sglang_lite-greet", daemon=True
                    ).start()

    def _answer_handshake(self, line: socket.socket, host: str) -> None:
        """Answers the greeting on a new connection. Accepts a rank that is still missing and
        rejects everything else, because anyone may have connected.
        """
        refusal = "this is no agent of a node"
        rank = -1
        with contextlib.suppress(*_NO_HANDSHAKE):
            hello = msgspec.msgpack.decode(_receive_handshake(line), type=Hello)
            problem = hello.describe_difference(self._own)
            rank = hello.rank
            refusal = f"it has {problem}" if problem is not None else ""
        with self._changed:
            if not refusal and rank not in self._missing:
                refusal = f"{rank} is none of those that are missing"
            if refusal:
                logger.warning(
                    "a rank of another node, from %s, was refused: %.500r", host, refusal
                )
            try:
                line.sendall(_prepend_length(msgspec.msgpack.encode(Welcome(refusal or None))))
                connection = Connection(line)
            except OSError:
                refusal = "it has left"
            if refusal:
                line.close()
                return
            self._missing.discard(rank)
            self._joined(rank, RemoteProcess(connection, rank // self._per_node))
            self._changed.notify_all()


def run_worker_node(config: EngineConfig, path: Path) -> int:
    """Runs the processes of a node other than 0 until the engine has ended.

    Args:
        config: settings, which must be those of node 0 except for settings of a single node.
        path: folder or file of the model.

    Returns:
        The exit status: 1 if a process of this node has ended before the engine.

    Raises:
        BackendError: node 0 can't be reached, or refuses this node.
    """
    here = processes_per_node(config)
    first = config.node_rank * here
    left = []
    with (
        contextlib.ExitStack() as lines,
        ThreadPoolExecutor(here) as threads,
        contextlib.ExitStack() as children,
    ):
        for rank in range(first, first + here):
            line = connect_to_node_0(config, path, rank)
            lines.callback(line.release_socket)
            relay = _Relay(config, path, rank, line)
            children.callback(relay.child.kill)
            left.append(threads.submit(relay.relay_until_end))
        joined = f"Node {config.node_rank} of {config.nnodes} has joined {config.dist_init_addr}."
        startup_messages.announce_line(joined, config.log_level)
        wait(left)
        return int(not all(each.result() for each in left))


def processes_per_node(config: EngineConfig) -> int:
    """Returns the number of processes that each node runs: its replicas or, for a single engine,
    its ranks.
    """
    return (config.dp_size if config.dp_size > 1 else config.parallel.ranks) // config.nnodes


def settings_of_replica(config: EngineConfig, rank: int) -> EngineConfig:
    """Returns the settings of one replica. They differ from the engine's settings in the GPU and,
    if a seed is set, in the seed.
    """
    place = rank % processes_per_node(config) * config.parallel.ranks
    gpu = 0 if config.device == "cpu" else config.base_gpu_id + place * config.gpu_id_step
    return replace(
        config, base_gpu_id=gpu, seed=None if config.seed is None else config.seed + rank
    )


class _Relay:
    """Process of this node, with the threads that relay messages between the process and node 0.

    Args:
        config, path: see `run_worker_node`.
        rank: number of the rank, or of the replica.
        line: connection to node 0.
    """

    def __init__(self, config: EngineConfig, path: Path, rank: int, line: Connection) -> None:
        self._line = line
        self._left = False
        self._whole = config.dp_size > 1
        if self._whole:
            name = f"replica {rank} of {config.dp_size}"
            started = settings_of_replica(config, rank)
            arguments = config.model, config.device, config.compile_processes
            self.child = SpawnedProcess("sglang_lite.engine.child.main", name, *arguments)
        else:
            name = f"rank {rank} of {config.parallel.ranks}"
            started = config
            there = rendezvous_url(config.dist_init_addr, GLOO)
            self.child = SpawnedProcess("sglang_lite.engine.child.rank", name, rank, there)
        self._name = name
        self.child.connection.send(
            encode_frame([(0, Start(asdict(started), os.fspath(path), os.getpid()))])
        )
        threading.Thread(
            target=self._relay_from_node_0, name=f"sglang_lite-to-{rank}", daemon=True
        ).start()

    def relay_until_end(self) -> bool:
        """Relays what the process sends until the process ends. Returns True if node 0 has ended
        it.
        """
        used = processor_time(self.child.pid)

        def look() -> None:
            """Sends a sign of life on the process's behalf if the process has used processor time.
            The GIL may delay the sign of life that the process itself sends.
            """
            nonlocal used
            before = used
            used = processor_time(self.child.pid)
            if used != before:
                self._line.send(encode_frame([]))

        with contextlib.suppress(OSError):
            for content in self.child.connection.read_frames(look, _LOOK_S):
                self._line.send(_prepend_length(content))
        end = self.child.await_process_end()
        left = self._left
        if not left and not self._whole:
            if end.by_itself:
                time.sleep(CAUSE_FIRST_S)
            with contextlib.suppress(OSError):
                self._line.send(
                    encode_frame(
                        [
                            StartFailed(
                                serializable_failure(BackendError(f"{self._name} {end.text}"))
                            )
                        ]
                    )
                )
        self._line.close()
        return left

    def _relay_from_node_0(self) -> None:
        with contextlib.suppress(OSError):
            for content in self._line.read_frames():
                self.child.connection.send(_prepend_length(content))
            self._left = True
        if self._whole:
            self.child.connection.close()  # it then writes its pending files
        else:
            self.child.kill()


def connect_to_node_0(config: EngineConfig, path: Path, rank: int) -> Connection:
    """Connects to node 0 and waits until node 0 accepts the rank. Returns the connection. Arguments
    and errors are those of `run_worker_node`.
    """
    there = parse_address(config.dist_init_addr)
    patience = config.dist_timeout or DIST_TIMEOUT_S
    deadline = time.monotonic() + patience
    while True:
        try:
            line = socket.create_connection(there, _HANDSHAKE_S)
            break
        except (OSError, UnicodeError) as error:
            if isinstance(error, socket.gaierror | UnicodeError) or time.monotonic() >= deadline:
                raise BackendError(
                    f"dist_init_addr: node 0 can't be reached at {config.dist_init_addr}: {error}.",
                    hint="Start node 0, and give all nodes its address, which a firewall must let through.",
                ) from error
            time.sleep(_AGAIN_S)
    try:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.sendall(_prepend_length(msgspec.msgpack.encode(Hello.for_rank(config, path, rank))))
        refusal = msgspec.msgpack.decode(_receive_handshake(line), type=Welcome).refusal
    except _NO_HANDSHAKE as error:
        refusal = f"{type(error).__name__}: {error}"
    if refusal is not None:
        line.close()
        raise BackendError(
            f"node 0 at {config.dist_init_addr} refuses node {config.node_rank}: {refusal}.",
            hint="Run the same version with the same model and settings on all nodes.",
        )
    return Connection(line)


def _receive_handshake(line: socket.socket) -> bytes:
    """Receives the next message of a handshake. Raises OSError if it doesn't arrive in time, and
    BrokenFrameError if it is too long.
    """
    deadline = time.monotonic() + _HANDSHAKE_S

    def read(count: int) -> bytes:
        found = b""
        while len(found) < count:
            rest = deadline - time.monotonic()
            if rest <= 0:
                raise TimeoutError("it takes too long")
            line.settimeout(rest)
            part = line.recv(count - len(found))
            if not part:
                raise ConnectionResetError("the other end has ended")
            found += part
        return found

    size = int.from_bytes(read(HEADER), "big")
    if size > _HANDSHAKE_BYTES:
        raise BrokenFrameError(f"a message of {size:,} bytes")
    return read(size)


def _prepend_length(content: bytes | memoryview) -> bytes:
    return len(content).to_bytes(HEADER, "big") + content


def _model_digest(path: Path) -> str:
    """Computes a digest that tells whether nodes have the same model. Reads only a small part of
    the weights.
    """
    files = (
        [each for each in sorted(path.iterdir()) if each.suffix in _WEIGHTS]
        if path.is_dir()
        else [path]
    )
    config = path / "config.json"
    digest = hashlib.sha256(config.read_bytes() if config.is_file() else b"")
    for each in files:
        size = each.stat().st_size
        digest.update(f"{each.name if path.is_dir() else ''} {size} ".encode())
        with each.open("rb") as file:
            file.seek(max(size - _LAST_BYTES, 0))
            digest.update(file.read())
    return digest.hexdigest()
