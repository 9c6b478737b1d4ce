"""The gateway in front of several servers: a package of others, in a process of its own, told over HTTP of its workers.

`smg` and `sglang-router`, of which it is the continuation, have the same settings and routes. Neither is asked to find
out who is alive: whoever watches the workers tells it.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import logging
import secrets
import socket
import threading
import time
from typing import Any

import requests

from sglang_lite.protocol import BackendError, CapabilityError, ParameterError
from sglang_lite.protocol.anything import Json
from sglang_lite.server.replicas.tied_process import TiedProcess
from sglang_lite.server.settings import ReplicaSettings, ServerSettings

logger = logging.getLogger("sglang_lite.server")

PACKAGES = {"smg": "smg", "sglang-router": "sglang_router"}  # by the name to install: the name to import
_LOOK_S = 0.25  # between two looks at what is not yet as it should be
_TIMEOUT_S = 5.0  # of a request to it
_AGAIN_S = 5.0  # before a missing worker is registered again


def package_of(name: str) -> str:
    """The package of a gateway: the one named, or the first that is installed.

    Raises:
        CapabilityError: it is not installed.
    """
    wanted = list(PACKAGES) if name == "auto" else [name]
    for each in wanted:
        if importlib.util.find_spec(PACKAGES[each]) is not None:
            return each
    raise CapabilityError(
        f"several servers need a gateway, and {' and '.join(wanted)} {'are' if wanted[1:] else 'is'} not installed.",
        hint=f"pip install {wanted[0]}",
    )


class Gateway:
    """
    Args:
        host, port: to listen on.

    Attributes:
        package: that it is.
        wanted: addresses of the workers that it should have.
        known: of those that it has.
        failed: it ended before it had answered once, and will not.
    """

    def __init__(self, settings: ServerSettings, replicas: ReplicaSettings, host: str, port: int) -> None:
        self.package = package_of(replicas.gateway)
        if len(settings.api_key) > 1:
            raise ParameterError(
                "api_key", "a gateway accepts only one key.", hint="Give one key, or serve without replicas."
            )
        self._host, self._port = host, port
        self._key = next(iter(settings.api_key), None)
        self._admin = settings.admin_api_key or secrets.token_urlsafe()
        self._settings = {
            "host": host,
            "port": port,
            "policy": replicas.policy or "cache_aware",
            "api_key": self._key,
            "control_plane_api_keys": [("sglang-lite", "sglang-lite", self._admin, "admin")],
            "log_level": {"warning": "warn", "error": "error"}.get(settings.log_level, "warn"),
            "max_payload_size": int(settings.max_body_mb * 2**20),
            "max_buffered_request_bytes": int(settings.max_body_mb * 2**20),  # smg tries only those again
            "max_concurrent_requests": -1,  # the workers count
            # A known prefix saves less than it costs to wait for a server that has more than its share: by their own
            # measure (64 more, and half as many again) one of two got 60 to 84 % of requests that begin alike.
            "balance_abs_threshold": 8,
            "balance_rel_threshold": 1.05,
            # `smg` gives a server whose load it has not asked for yet next to nothing while it has another's; it asks
            # all at once, by its own measure each 10 s.
            "load_monitor_interval": 1,
            # Longer than it takes to see that a worker has died, and to tell of it.
            "retry_max_retries": 12,
            "retry_initial_backoff_ms": 50,
            "retry_max_backoff_ms": 500,
            "disable_health_check": True,
            "shutdown_grace_period_secs": max(int(settings.drain_s), 1),
            "prometheus_host": "127.0.0.1",
        }
        self._session = requests.Session()
        self._session.trust_env = False  # no proxy stands in between
        self._session.headers["authorization"] = f"Bearer {self._admin}"
        self.wanted: set[str] = set()
        self.known: set[str] = set()
        self._told: dict[str, float] = {}  # when it was told of a worker that it has not yet
        self._changed, self._lock = threading.Condition(), threading.Lock()
        self._over = self._answered = self.failed = False
        self._process = self._started()
        self._thread = threading.Thread(target=self._run, name="sglang_lite-gateway", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def _started(self) -> TiedProcess:
        with socket.socket() as free:  # for its counts; it would listen on a fixed one
            free.bind(("127.0.0.1", 0))
            counts = free.getsockname()[1]
        content = {"package": self.package, "settings": {**self._settings, "prometheus_port": counts}}
        process = TiedProcess("sglang_lite.server.replicas.gateway:run", content)
        logger.info("the gateway at %s is process %d", self.url, process.pid)
        return process

    def add(self, url: str) -> None:
        """Has it give requests to a worker."""
        with self._changed:
            self.wanted.add(url)
            self._changed.notify()

    def remove(self, url: str) -> None:
        """Has it give no more requests to a worker."""
        with self._changed:
            self.wanted.discard(url)
            self._changed.notify()

    def _run(self) -> None:
        """Keeps it running, and what it has as it should be."""
        while not self._over:
            if self._process.wait(0) is not None and not self._over:
                self.failed = not self._answered
                if self.failed:
                    logger.error("the gateway ended before it answered; its output is above")
                    return
                logger.error("the gateway has ended and is restarted")
                self.known, self._told = set(), {}
                try:
                    self._process = self._started()
                except (BackendError, OSError) as error:  # no memory, no descriptors: there may be some later
                    logger.error("the gateway can't be started: %s", error)
            try:
                self._adjust()
            except (requests.RequestException, ValueError, KeyError) as error:
                logger.debug("the gateway does not answer: %s", error)
                self.known = set()
            with self._changed:
                self._changed.wait(_LOOK_S)

    def _adjust(self) -> None:
        wanted = set(self.wanted)
        if wanted == self.known and not self._told:
            return
        there = {each["url"]: each for each in self._ask("GET", "/workers")["workers"]}
        self._answered = True
        for url, worker in there.items():
            if url not in wanted and worker.get("status") != "draining":
                self._ask("DELETE", f"/workers/{worker['id']}")
                logger.info("the gateway sends no more requests to %s", url)
        now = time.monotonic()
        for url in wanted - there.keys():
            if now - self._told.get(url, -_AGAIN_S) >= _AGAIN_S:
                key = {} if self._key is None else {"api_key": self._key}
                self._ask("POST", "/workers", {"url": url, "runtime": "sglang", **key})
                self._told[url] = now
        healthy = {url for url, worker in there.items() if worker.get("is_healthy") and url in wanted}
        self._told = {url: when for url, when in self._told.items() if url in wanted - healthy}
        self.known = {url for url in there if url in healthy or there[url].get("status") != "draining"}

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        response = self._session.request(method, self.url + path, json=body, timeout=_TIMEOUT_S)
        if response.status_code not in (404, 409):  # it is gone already, or on its way
            response.raise_for_status()
        return response.json()

    def ask_to_end(self) -> None:
        """Has it take no more requests, and end when those that are open have."""
        self._over = True
        self._process.ask_to_end()

    def wait(self, timeout_s: float) -> int | None:
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        self._over = True
        self._process.kill()


def run(content: dict[str, Json]) -> int:
    """Runs a gateway in this process."""
    launcher = importlib.import_module(f"{PACKAGES[content['package']]}.launch_router")
    known = {each.name for each in dataclasses.fields(launcher.RouterArgs)}
    settings = {name: value for name, value in content["settings"].items() if name in known}
    settings["control_plane_api_keys"] = [tuple(each) for each in settings["control_plane_api_keys"]]
    launcher.launch_router(launcher.RouterArgs(**settings))
    return 0
