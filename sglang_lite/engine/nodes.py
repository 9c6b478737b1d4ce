"""Ranks on several machines, called nodes. Node 0 has the engine; an agent on each other node starts that node's ranks
and passes on what they and rank 0 send, over a TCP connection of each rank.

An agent begins a connection with what it runs; node 0 answers, and refuses what differs from its own. Nothing is secret
or signed, and torch's own connections between ranks are as open: the network must be closed to others.
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
from dataclasses import asdict
from pathlib import Path

import msgspec

from sglang_lite.engine.connection import BrokenFrameError, Connection
from sglang_lite.engine.frames import HEADER, Start, StartFailed, failure_of, frame
from sglang_lite.engine.spawned_process import SpawnedProcess
from sglang_lite.protocol import BackendError
from sglang_lite.runtime.config import DIST_TIMEOUT_S, EngineConfig
from sglang_lite.runtime.host import startup_messages
from sglang_lite.runtime.parallel.addresses import GLOO, address, meeting
from sglang_lite.version import __version__

logger = logging.getLogger("sglang_lite")

_HANDSHAKE_S = 10.0  # time that either end has for its part of it
_AGAIN_S = 0.5  # between two attempts to reach node 0
_LOOK_S = 1.0  # between two looks whether the engine has ended
_OF_ALL_NODES = (  # settings by which ranks load and compute; of others, rank 0's count
    "nnodes", "tp_size", "ep_size", "pp_size", "device", "dtype", "quantization", "load_format", "context_length",
    "attention_backend", "cuda_graphs", "speculation", "draft_tokens", "original_logprobs",
)  # fmt: skip
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt")
_LAST_BYTES = 1 << 16  # of a file of weights, that are compared


class Hello(msgspec.Struct, frozen=True):
    """First message of an agent for one of its ranks.

    Attributes:
        rank: the rank.
        version: version of this package.
        model: digest of the model's config, and of the names, sizes and last bytes of its weights.
        settings: settings that all nodes must have alike, as text.
    """

    rank: int
    version: str
    model: str
    settings: dict[str, str]

    @staticmethod
    def of(config: EngineConfig, path: Path, rank: int) -> Hello:
        settings = {name: repr(getattr(config, name)) for name in _OF_ALL_NODES}
        return Hello(rank, __version__, _model_digest(path), settings)

    def unlike(self, own: Hello) -> str | None:
        """Difference to what node 0 runs, for a message; None if there is none."""
        if self.version != own.version:
            return f"sglang_lite {self.version}, and node 0 has {own.version}"
        for name, value in own.settings.items():
            if self.settings.get(name) != value:
                return f"{name}={self.settings.get(name)}, and node 0 has {value}"
        return None if self.model == own.model else "another model than node 0: its config or its weights differ"


class Welcome(msgspec.Struct, frozen=True):
    """Answer of node 0: None, or why it refuses a rank."""

    refusal: str | None


class RemoteRank:
    """Rank on another node, with the methods of a `SpawnedProcess`; its agent ends it when the connection ends.

    Args:
        connection: connection to its agent.
        node: number of its node.
    """

    pid = None  # on this machine

    def __init__(self, connection: Connection, node: int) -> None:
        self.connection, self._node = connection, node

    def end(self) -> str:
        return f"on node {self._node} is gone: the connection to it ended."

    def kill(self) -> None:
        self.connection.close()


class NodeListener:
    """Listener of node 0, to which the agents of other nodes come with their ranks.

    Args:
        config: settings of the engine.
        path: folder or file of the model.
        joined: callback for each rank that has come, on a thread of the listener.

    Raises:
        BackendError: nothing can listen at `dist_init_addr`.
    """

    def __init__(self, config: EngineConfig, path: Path, joined: Callable[[int, RemoteRank], object]) -> None:
        self._config, self._joined, self._own = config, joined, Hello.of(config, path, 0)
        self._missing = set(range(config.parallel.per_node, config.parallel.ranks))
        self._changed = threading.Condition()
        self._closed = False
        try:
            self._server = socket.create_server(address(config.dist_init_addr))
        except OSError as error:
            raise BackendError(
                f"dist_init_addr: node 0 can't listen at {config.dist_init_addr}: {error}.",
                hint="Use a free port and an address of this machine.",
            ) from error
        self._server.settimeout(_LOOK_S)
        threading.Thread(target=self._accept, name="sglang_lite-nodes", daemon=True).start()

    def wait(self, timeout_s: float, ended: Callable[[], bool]) -> None:
        """Waits until all ranks of other nodes have come, or `ended` tells that the engine has ended.

        Raises:
            BackendError: one has not come in time.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._missing and not ended():
                if time.monotonic() >= deadline:
                    node = min(self._missing) // self._config.parallel.per_node
                    raise BackendError(
                        f"node {node} of {self._config.nnodes} has not come to {self._config.dist_init_addr} "
                        f"within {timeout_s:g} s.",
                        hint=f"Run `sglang-lite serve` there with node_rank={node} and the same settings.",
                    )
                self._changed.wait(_LOOK_S)

    def close(self) -> None:
        """Ends the listener."""
        self._closed = True

    def _accept(self) -> None:
        with self._server:
            while self._missing and not self._closed:
                with contextlib.suppress(OSError):  # nobody has come, or is gone already
                    line, (host, *_) = self._server.accept()
                    self._greet(_prompt(line), str(host))

    def _greet(self, connection: Connection, host: str) -> None:
        """Answers one who has come from a host, who may be anybody."""
        refusal, rank = "this is no agent of a node", -1
        with contextlib.suppress(TimeoutError, msgspec.MsgspecError, BrokenFrameError):
            if (content := _received(connection)) is not None:
                hello = msgspec.msgpack.decode(content, type=Hello)
                rank = hello.rank
                problem = hello.unlike(self._own)
                refusal = f"it has {problem}" if problem is not None else ""
                if not refusal and rank not in self._missing:
                    refusal = f"rank {rank} is none of those that are missing"
        if refusal:
            logger.warning("a rank of another node, from %s, was refused: %s.", host, refusal)
        try:
            connection.send_now(_framed(msgspec.msgpack.encode(Welcome(refusal or None))))
        except OSError:
            refusal = "it has left"
        if refusal:
            connection.release()
            return
        self._joined(rank, RemoteRank(connection, rank // self._config.parallel.per_node))
        with self._changed:
            self._missing.discard(rank)
            self._changed.notify_all()


def run_agent(config: EngineConfig, path: Path) -> int:
    """Runs the ranks of a node other than 0 until the engine has ended.

    Args:
        config: settings, the same as on node 0 but for those of a node.
        path: folder or file of the model.

    Returns:
        The exit status: 1 if a rank of this node has ended by itself.

    Raises:
        BackendError: node 0 can't be reached, or refuses this node.
    """
    parallel = config.parallel
    first = config.node_rank * parallel.per_node
    with contextlib.ExitStack() as stack:
        lines = {}
        for rank in range(first, first + parallel.per_node):
            lines[rank] = join(config, path, rank)
            stack.callback(lines[rank].release)
        joined = f"Node {config.node_rank} of {config.nnodes} has joined {config.dist_init_addr}."
        startup_messages.announce(joined, config.log_level)
        relays = [_Relay(config, path, rank, line) for rank, line in lines.items()]
        try:
            return int(not all(relay.wait() for relay in relays))
        finally:
            for relay in relays:
                relay.child.kill()


class _Relay:
    """Rank of this node, and the threads that pass on what it and rank 0 send.

    Args:
        config, path: as for `run_agent`.
        rank: the rank.
        line: connection to node 0.
    """

    def __init__(self, config: EngineConfig, path: Path, rank: int, line: Connection) -> None:
        self._line, self._name, self._left = line, f"rank {rank} of {config.parallel.ranks}", False
        self.child = SpawnedProcess(
            "sglang_lite.engine.child.rank", self._name, rank, meeting(config.dist_init_addr, GLOO)
        )
        self.child.connection.send(frame([(0, Start(asdict(config), os.fspath(path), os.getpid()))]))
        threading.Thread(target=self._down, name=f"sglang_lite-to-{rank}", daemon=True).start()

    def wait(self) -> bool:
        """Passes on what the rank sends, until it ends. Returns whether node 0 has ended it."""
        with contextlib.suppress(OSError):
            for content in self.child.connection.frames():
                self._line.send(_framed(content))
        how, left = self.child.end(), self._left
        if not left:
            with contextlib.suppress(OSError):
                self._line.send(frame([StartFailed(failure_of(BackendError(f"{self._name} {how}")))]))
        self._line.close()
        return left

    def _down(self) -> None:
        with contextlib.suppress(OSError):
            for content in self._line.frames():
                self.child.connection.send(_framed(content))
            self._left = True
        self.child.kill()


def join(config: EngineConfig, path: Path, rank: int) -> Connection:
    """Connection to node 0, which has accepted a rank. Arguments and errors as of `run_agent`."""
    there, patience = address(config.dist_init_addr), config.dist_timeout or DIST_TIMEOUT_S
    deadline = time.monotonic() + patience
    while True:
        try:
            line = socket.create_connection(there, _HANDSHAKE_S)
            break
        except OSError as error:
            if isinstance(error, socket.gaierror) or time.monotonic() >= deadline:
                raise BackendError(
                    f"dist_init_addr: node 0 can't be reached at {config.dist_init_addr}: {error}.",
                    hint="Start node 0, and give all nodes its address, which a firewall must let through.",
                ) from error
            time.sleep(_AGAIN_S)
    connection = _prompt(line)
    try:
        connection.send_now(_framed(msgspec.msgpack.encode(Hello.of(config, path, rank))))
        content = _received(connection)
        refusal = "it has ended" if content is None else msgspec.msgpack.decode(content, type=Welcome).refusal
    except (OSError, msgspec.MsgspecError) as error:
        refusal = f"{type(error).__name__}: {error}"
    if refusal is not None:
        connection.release()
        raise BackendError(
            f"node 0 at {config.dist_init_addr} refuses node {config.node_rank}: {refusal}.",
            hint="Run the same version with the same model and settings on all nodes.",
        )
    return connection


def _prompt(line: socket.socket) -> Connection:
    """Connection that sends small frames at once."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(line)


def _received(connection: Connection) -> bytes | None:
    """Next frame of a handshake; None if the other end has closed the connection. Raises TimeoutError."""
    for content in connection.frames(_too_late, _HANDSHAKE_S):
        return bytes(content)
    return None


def _too_late() -> None:
    raise TimeoutError("no answer")


def _framed(content: bytes | memoryview) -> bytes:
    return len(content).to_bytes(HEADER, "big") + content


def _model_digest(path: Path) -> str:
    """Digest by which nodes compare their models; reads little of them."""
    files = [each for each in sorted(path.iterdir()) if each.suffix in _WEIGHTS] if path.is_dir() else [path]
    config = path / "config.json"
    digest = hashlib.sha256(config.read_bytes() if config.is_file() else b"")
    for each in files:
        size = each.stat().st_size
        digest.update(f"{each.name if path.is_dir() else ''} {size} ".encode())
        with each.open("rb") as file:
            file.seek(max(size - _LAST_BYTES, 0))
            digest.update(file.read())
    return digest.hexdigest()
