"""Supervisor of several servers of one model behind a gateway: starts, watches and restarts them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import httpx2

from sglang_lite.protocol import BackendError, ParameterError
from sglang_lite.protocol.anything import Json, UserValue
from sglang_lite.runtime.host.process_name import set_process_name
from sglang_lite.server import log
from sglang_lite.server.http.sockets import bind_socket
from sglang_lite.server.replicas.discovery import build_address_lookup
from sglang_lite.server.replicas.gateway import Gateway
from sglang_lite.server.replicas.tied_process import TiedProcess
from sglang_lite.server.settings import ReplicaSettings, ServerSettings, warn_if_exposed

logger = logging.getLogger("sglang_lite.server")

_LOOK_S = 0.5  # between two checks of a worker's health
_PAUSE_S = 0.05  # between two checks of something that ends soon
_TIMEOUT_S = 5.0  # longest time of a health check
_END_S = 5.0  # longest time for a process without open requests to end
FIND_S = 5.0  # between two lookups of a DNS name or a file of servers
LONGEST_PAUSE_S = 30.0  # longest pause before a server that dies repeatedly is restarted
_FINE_S = 60.0  # uptime after which a death doesn't count as early
_MAX_DEATHS = 8  # early deaths in a row after which a server isn't restarted


def serve(
    settings: ServerSettings,
    engine: Mapping[str, UserValue],
    replicas: ReplicaSettings,
    announce: Callable[[str], object],
) -> int:
    """Runs several servers until SIGTERM or SIGINT. Open requests may then continue for up to
    `drain_s`; a second signal ends them immediately. SIGHUP restarts the servers that this process
    has started, one after the other, unless the signal is ignored, as under nohup.

    Args:
        settings: settings of each server, and of the gateway's address.
        engine: keywords of each server's `Engine`.
        replicas: settings of the gateway and the number of servers.
        announce: function called with one line of text when a server can be reached through the
            gateway.

    Returns:
        The exit status.
    """
    log.configure(settings)
    warn_if_exposed(settings)
    devices = _devices(engine.get("device", "auto"), replicas.replicas)
    if devices is None and engine.get("threads") is None and replicas.replicas > 1:
        engine = {**engine, "threads": max((os.cpu_count() or 1) // replicas.replicas, 1)}
    with bind_socket(settings.host, settings.port) as listening:  # reports a port in use early
        host, port = listening.getsockname()[:2]
    gateway = Gateway(settings, replicas, host, port)
    workers: list[_Worker] = [
        _Remote(source, settings.health_timeout_s, gateway)
        if (find := build_address_lookup(source)) is None
        else _DiscoveryWorker(source, find, settings.health_timeout_s, gateway)
        for source in replicas.workers
    ]
    each: list[str | None] = [*devices] if devices else [None] * replicas.replicas
    workers += [_Replica(settings, engine, device, gateway) for device in each]
    supervisor = _Supervisor(gateway, workers, settings.drain_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, supervisor.on_signal)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, supervisor.on_restart)
    sources = [source for source in replicas.workers if build_address_lookup(source)]
    served = " and ".join(
        [f"{len(workers) - len(sources)} servers", *(f"those of {source}" for source in sources)]
    )
    return supervisor.run(
        lambda: announce(f"Serving {served} at {gateway.url} by {gateway.package}")
    )


class _Supervisor:
    """Starts the workers, and watches them and the gateway. On shutdown, ends the gateway before
    the workers.
    """

    def __init__(self, gateway: Gateway, workers: list[_Worker], drain_s: float) -> None:
        self._gateway = gateway
        self._workers = workers
        self._drain_s = drain_s
        self._signals = 0
        self._restarts = False  # whether SIGHUP has come
        self._restarting: threading.Thread | None = None
        self._bell = threading.Event()

    def on_signal(self, *_: object) -> None:
        self._signals += 1
        self._bell.set()

    def on_restart(self, *_: object) -> None:
        self._restarts = True
        self._bell.set()

    def _restart_workers(self) -> None:
        for worker in self._workers:
            if not worker.restart():
                if not worker.over.is_set():
                    logger.error(
                        "a server has not come back: the restart ends here, and the others keep running"
                    )
                return

    def run(self, announce: Callable[[], object]) -> int:
        """Supervises gateway and workers until a signal arrives or they have failed; returns the
        exit status.
        """
        for worker in self._workers:
            worker.start()
        failed = False
        announced = False
        while not (self._signals or failed):
            self._bell.wait(_LOOK_S / 2)
            self._bell.clear()
            if self._restarts and not (self._restarting and self._restarting.is_alive()):
                self._restarts = False
                self._restarting = threading.Thread(
                    target=self._restart_workers, name="sglang_lite-restart", daemon=True
                )
                self._restarting.start()
            failed = self._gateway.failed or any(worker.failed for worker in self._workers)
            failed = failed or all(worker.given_up for worker in self._workers)
            if not announced and self._gateway.known:
                announced = True
                announce()
        for worker in self._workers:
            worker.over.set()
        self._gateway.terminate()
        now = failed or not self._wait_until_done(
            self._drain_s + _END_S, lambda: self._gateway.wait(0.1) is not None
        )
        if not now:
            for worker in self._workers:
                worker.terminate()
            self._wait_until_done(
                self._drain_s + _END_S, lambda: all(worker.ended for worker in self._workers)
            )
        self._gateway.kill()
        for worker in self._workers:
            worker.kill()
        return 1 if failed else 0

    def _wait_until_done(self, timeout_s: float, done: Callable[[], bool]) -> bool:
        """Polls `done` until it returns True. Returns False if that takes too long, or a second
        signal arrives.
        """
        until = time.monotonic() + timeout_s
        while self._signals < 2 and time.monotonic() < until:
            if done():
                return True
            time.sleep(0.05)
        return False


class _Worker(ABC):
    """Server behind the gateway, watched on a thread of its own.

    Attributes:
        over: event that ends the watch.
        failed: True if the server died before it was ever ready; it is then not restarted.
        given_up: True if the server died repeatedly and isn't restarted any more.
    """

    failed = given_up = False

    def __init__(self, gateway: Gateway, health_timeout_s: float) -> None:
        self._gateway = gateway
        self._health_timeout_s = health_timeout_s
        self.over = threading.Event()

    def start(self) -> None:
        threading.Thread(
            target=self._watch_with_client, name="sglang_lite-worker", daemon=True
        ).start()

    def _watch_with_client(self) -> None:
        with httpx2.Client(trust_env=False, timeout=_TIMEOUT_S) as self._client:
            self._watch()

    @abstractmethod
    def _watch(self) -> None:
        """Adds the server to the gateway while it is healthy, and removes it while it isn't, until
        `over` is set.
        """

    # These methods do nothing to a server that this process has not started.

    def terminate(self) -> None:  # noqa: B027 # as said above
        """Ends a server that this process has started, once its open requests have ended."""

    def kill(self) -> None:  # noqa: B027 # as said above
        """Kills a server that this process has started."""

    def restart(self) -> bool:
        """Restarts a server that this process has started, once its open requests have ended, and
        waits until it can be reached. Returns False if it can't.
        """
        return True

    @property
    def ended(self) -> bool:
        return True

    def _request_status(self, url: str, path: str) -> int:
        """Returns the status of the answer, 0 if the connection fails, or -1 if no answer arrives
        in time.
        """
        try:
            return self._client.get(url + path).status_code
        except httpx2.TimeoutException:
            return -1
        except httpx2.HTTPError:
            return 0


class _Remote(_Worker):
    """Server on another machine."""

    def __init__(self, url: str, health_timeout_s: float, gateway: Gateway) -> None:
        super().__init__(gateway, health_timeout_s)
        self._url = url
        self._leaves = False

    def withdraw(self) -> None:
        """Removes the server from the gateway for good."""
        self._leaves = True
        self.over.set()

    def _watch(self) -> None:
        alive = False
        heard = time.monotonic()
        while not self.over.wait(_LOOK_S):
            status = self._request_status(self._url, "/health" if alive else "/ready")
            if status == 404 and not alive:  # SGLang's servers have no such route
                status = self._request_status(self._url, "/health")
            if status == 200:
                heard = time.monotonic()
                if not alive:
                    self._gateway.add_worker(self._url)
            elif alive and (status >= 0 or time.monotonic() - heard > self._health_timeout_s):
                logger.error("%s is not healthy", self._url)
                self._gateway.remove_worker(self._url)
            else:
                continue
            alive = status == 200
        if self._leaves and alive:
            self._gateway.remove_worker(self._url)


class _DiscoveryWorker(_Worker):
    """Servers on other machines, listed by a DNS name or a file. Servers may be added and removed
    at any time.

    Args:
        source: the name or file, for messages.
        find: function that returns their addresses: see `build_address_lookup`.
    """

    def __init__(
        self, source: str, find: Callable[[], set[str]], health_timeout_s: float, gateway: Gateway
    ) -> None:
        super().__init__(gateway, health_timeout_s)
        self._source = source
        self._find = find

    def _watch(self) -> None:
        servers: dict[str, _Remote] = {}
        told = ""
        while not self.over.is_set():
            try:
                urls = self._find()
                problem = ""
            except (OSError, ParameterError) as error:
                urls = set(servers)
                problem = str(error)
            if problem and problem != told:
                logger.error("%s can't be read, its servers stay: %s", self._source, problem)
            told = problem
            for url in urls - servers.keys():
                servers[url] = _Remote(url, self._health_timeout_s, self._gateway)
                servers[url].start()
            for url in servers.keys() - urls:
                servers.pop(url).withdraw()
            self.over.wait(FIND_S)
        for each in servers.values():
            each.over.set()


class _Replica(_Worker):
    """Server that this process starts.

    Args:
        device: the server's GPU, as CUDA_VISIBLE_DEVICES; None for a CPU.
    """

    def __init__(
        self,
        settings: ServerSettings,
        engine: Mapping[str, Any],
        device: str | None,
        gateway: Gateway,
    ) -> None:
        super().__init__(gateway, settings.health_timeout_s)
        self._settings = settings
        self._device = device
        self._engine = {**engine, "restart": False}  # the whole server is restarted instead
        self._process: TiedProcess | None = None
        self._lock = threading.Lock()
        self._lived = False
        self._old = threading.Event()  # set if the server must be restarted
        # number of starts, and number of the last start that the gateway knows
        self._starts = self._reached = 0

    def _watch(self) -> None:
        deaths = 0
        while not self.over.is_set():
            started = time.monotonic()
            process = None
            url = "an address that is not known yet"
            with self._lock:
                self._starts += 1
                self._old.clear()
            try:
                with bind_socket("127.0.0.1", 0) as listening:
                    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
                    process = self._start_process(url, listening)
            # out of memory or descriptors: the next attempt may succeed
            except (BackendError, OSError) as error:
                reason = f"did not start: {error}"
            else:
                if process is None:
                    return
                reason = self._wait_until_ready(process, url)
            if process is not None and not reason:
                self._lived = True
                self._gateway.add_worker(url)
                reason = self._watch_health(process, url)
                if not self.over.is_set():
                    self._gateway.remove_worker(url)
                    if not reason:
                        self._drain_before_restart(process, url)
                        continue
            if self.over.is_set():
                return
            deaths = 0 if time.monotonic() - started > _FINE_S else deaths + 1
            self.failed = not self._lived
            self.given_up = deaths == _MAX_DEATHS
            again = "" if self.failed else "; it is restarted"
            if self.given_up:
                again = f" for the {deaths}th time within {_FINE_S:.0f} s of its start; it is not restarted"
            logger.error("the server at %s %s%s", url, reason, again)
            if process is not None:
                process.kill()
            if self.failed or self.given_up:
                return
            self.over.wait(min(2.0 ** (deaths - 2), LONGEST_PAUSE_S) if deaths > 1 else 0)

    def _start_process(self, url: str, listening: socket.socket) -> TiedProcess | None:
        environment = {} if self._device is None else {"CUDA_VISIBLE_DEVICES": self._device}
        settings = dataclasses.asdict(
            dataclasses.replace(
                self._settings,
                host="127.0.0.1",
                port=0,
                # the gateway is the only client
                max_connections_per_client=self._settings.max_connections,
            )
        )
        content = {
            "descriptor": listening.fileno(),
            "settings": settings,
            "engine": dict(self._engine),
        }
        with self._lock:  # otherwise `kill` could miss the process
            if self.over.is_set():
                return None
            self._process = TiedProcess(
                "sglang_lite.server.replicas.supervisor:run",
                content,
                environment,
                [listening.fileno()],
            )
            logger.info("the server at %s is process %d", url, self._process.pid)
            return self._process

    def _wait_until_ready(self, process: TiedProcess, url: str) -> str:
        """Waits until the server is ready, and returns "". Returns the reason if the server ends or
        is no longer needed.
        """
        while not self.over.is_set():
            status = process.wait(_LOOK_S / 2)
            if status is not None:
                return _exit_reason(status)
            if self._request_status(url, "/ready") == 200:
                return ""
        return "is not needed"

    def _watch_health(self, process: TiedProcess, url: str) -> str:
        """Watches the server until it fails, and returns the reason. Returns "" if the watch ends
        or the server must be restarted.
        """
        heard = time.monotonic()
        while not (self.over.is_set() or self._old.is_set()):
            if url in self._gateway.healthy:
                self._reached = self._starts
            status = process.wait(_LOOK_S)
            if status is not None:
                return _exit_reason(status)
            answer = self._request_status(url, "/health")
            if answer == 200:
                heard = time.monotonic()
            elif answer == 503:
                return "has lost its engine"
            elif time.monotonic() - heard > self._health_timeout_s:
                return "does not answer"
        return ""

    def _drain_before_restart(self, process: TiedProcess, url: str) -> None:
        """Ends a server that is to be restarted. Waits until the gateway has removed the server,
        then lets its open requests end. Both share a time limit.
        """
        until = time.monotonic() + self._settings.drain_s + _END_S
        while (
            url in self._gateway.known and time.monotonic() < until and not self.over.wait(_PAUSE_S)
        ):
            pass
        logger.info("the server at %s is restarted when its requests have ended", url)
        process.terminate()
        while (
            process.wait(_PAUSE_S) is None and time.monotonic() < until and not self.over.is_set()
        ):
            pass
        if not self.over.is_set():
            process.kill()

    def restart(self) -> bool:
        with self._lock:
            wanted = self._starts + 1
            self._old.set()
        if self.given_up:
            self.given_up = False
            self.start()
        while (
            self._reached < wanted
            and self._starts <= wanted
            and not (self.given_up or self.over.wait(_PAUSE_S))
        ):
            pass
        return self._reached >= wanted

    def terminate(self) -> None:
        if self._process is not None:
            self._process.terminate()

    @property
    def ended(self) -> bool:
        return self._process is None or self._process.wait(0) is not None

    def kill(self) -> None:
        with self._lock:
            self.over.set()
            if self._process is not None:
                self._process.kill()


def run(content: dict[str, Json]) -> int:
    """Runs a server in this process."""
    from sglang_lite.protocol import SglError
    from sglang_lite.server.app import serve as serve_one

    set_process_name("sglang-server")
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in content["settings"].items()
    }
    try:
        with socket.socket(fileno=content["descriptor"]) as listening:
            return serve_one(
                ServerSettings(**settings), content["engine"], lambda _: None, listening
            )
    except SglError as error:
        print(f"sglang-lite: {error}", flush=True)
        return 1


def _exit_reason(status: int) -> str:
    how = f"ended with status {status}"
    if status < 0:
        with contextlib.suppress(ValueError):
            how = f"was ended by {signal.Signals(-status).name}"
    return how


def _devices(device: str, count: int) -> list[str] | None:
    """Returns the GPU of each server, as CUDA_VISIBLE_DEVICES, or None without GPUs.

    Raises:
        ParameterError: there are fewer GPUs than servers.
    """
    if device == "cpu" or not count:
        return None
    if device not in ("auto", "cuda"):
        raise ParameterError(
            "device",
            f"{device!r} is one device, but each server needs its own.",
            hint='Use "cuda".',
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = (
        [each.strip() for each in visible.split(",") if each.strip()]
        if visible is not None
        else _all_gpus()
    )
    if not found and device == "auto":
        return None
    if len(found) < count:
        raise ParameterError(
            "replicas",
            f"{count} servers need a GPU each, but there are {len(found)}. Lower it to the number of GPUs.",
        )
    return found[:count]


def _all_gpus() -> list[str]:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        return subprocess.run(
            query, capture_output=True, text=True, check=True, timeout=60
        ).stdout.split()
    return []
