"""The gateway in front of several servers: a third-party package in a process of its own, which
learns about its workers over HTTP.

`smg` continues `sglang-router`; both have the same settings and routes. Neither checks the health
of workers here: the supervisor watches them, and adds and removes them.
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
from collections import Counter
from typing import Any

import httpx2

from sglang_lite.protocol import BackendError, CapabilityError, ParameterError
from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.host.process_name import set_process_name
from sglang_lite.server.replicas.tied_process import TiedProcess
from sglang_lite.server.settings import QUOTAS, ReplicaSettings, ServerSettings

logger = logging.getLogger("sglang_lite.server")

# name of the distribution: name of the module
PACKAGES = {"smg": "smg", "sglang-router": "sglang_router"}
_LOOK_S = 0.25  # between two comparisons of the gateway's workers with the wanted ones
_TIMEOUT_S = 5.0  # longest time of a request to the gateway
_AGAIN_S = 5.0  # wait before a missing worker is registered again


def package_of(name: str) -> str:
    """Returns the package of a gateway: the named one, or the first that is installed.

    Raises:
        CapabilityError: the package is not installed.
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
    """Gateway in a process of its own, whose list of workers a thread keeps up to date.

    Args:
        host, port: address to listen on.

    Attributes:
        package: distribution name of the gateway's package.
        wanted: addresses of the workers that the gateway should have.
        known: addresses of the workers that the gateway has, as it last reported.
        healthy: addresses of the workers that the gateway sends requests to.
        failed: True if the gateway ended before its first answer; it is then not restarted.
    """

    def __init__(
        self, settings: ServerSettings, replicas: ReplicaSettings, host: str, port: int
    ) -> None:
        for name, problem in (
            ("allowed_host", "a gateway doesn't check names."),
            ("allowed_origin", "a gateway doesn't check pages."),
            *((name, "each server behind a gateway counts by itself.") for name in QUOTAS),
            ("grpc_port", "the servers behind a gateway would all have this port."),
        ):
            if getattr(settings, name) not in ((), None):
                raise ParameterError(name, problem, hint="Leave it out, or serve without replicas.")
        self.package = package_of(replicas.gateway)
        if len(settings.api_key) > 1:
            raise ParameterError(
                "api_key",
                "a gateway accepts only one key.",
                hint="Give one key, or serve without replicas.",
            )
        self._host = host
        self._port = port
        self._key = next(iter(settings.api_key), None)
        self._admin = settings.admin_api_key or secrets.token_urlsafe()
        self._settings = {
            "host": host,
            "port": port,
            "policy": replicas.policy or "cache_aware",
            "api_key": self._key,
            "control_plane_api_keys": [("sglang-lite", "sglang-lite", self._admin, "admin")],
            "log_level": {"warning": "warn", "error": "error"}.get(settings.log_level, "warn"),
            "log_json": settings.log_format == "json",
            "max_payload_size": int(settings.max_body_mb * 2**20),
            # smg retries only buffered requests
            "max_buffered_request_bytes": int(settings.max_body_mb * 2**20),
            "max_concurrent_requests": -1,  # the workers limit their own
            # A cached prefix saves less time than waiting for an overloaded server costs: with the
            # packages' default thresholds (64 more requests, and 1.5 times as many), one of two
            # servers got 60 to 84 % of requests that begin alike.
            "balance_abs_threshold": 8,
            "balance_rel_threshold": 1.05,
            # `smg` sends almost nothing to a server whose load it hasn't polled yet, while it knows
            # the load of another; by default it polls all servers every 10 s.
            "load_monitor_interval": 1,
            # The retries together take longer than it takes to notice that a worker has died, and
            # to remove it.
            "retry_max_retries": 12,
            "retry_initial_backoff_ms": 50,
            "retry_max_backoff_ms": 500,
            # `smg` sends nothing to a server in whose queue eight requests wait. When another
            # server has just died, that leaves none, and requests are refused (503) instead of
            # tried again.
            "worker_overload_protection": False,
            "disable_health_check": True,
            "shutdown_grace_period_secs": max(int(settings.drain_s), 1),
            "prometheus_host": "127.0.0.1",
        }
        # Requests to the gateway bypass proxies.
        headers = {"authorization": f"Bearer {self._admin}"}
        self._client = httpx2.Client(trust_env=False, headers=headers, timeout=_TIMEOUT_S)
        self._wanted: Counter[str] = Counter()  # number of sources that list each worker
        self.known: set[str] = set()
        self.healthy: set[str] = set()
        self._sure = True  # False if a call got no answer, so its effect is unknown
        # times of registering workers that the gateway doesn't list yet
        self._registered_at: dict[str, float] = {}
        self._changed = threading.Condition()
        self._lock = threading.Lock()
        self._over = self._answered = self.failed = False
        self._process = self._start_process()
        self._thread = threading.Thread(
            target=self._watch_until_closed, name="sglang_lite-gateway", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def _start_process(self) -> TiedProcess:
        with socket.socket() as free:  # port for metrics, which would otherwise be a fixed one
            free.bind(("127.0.0.1", 0))
            counts = free.getsockname()[1]
        content = {
            "package": self.package,
            "settings": {**self._settings, "prometheus_port": counts},
        }
        process = TiedProcess("sglang_lite.server.replicas.gateway:run", content)
        logger.info("the gateway at %s is process %d", self.url, process.pid)
        return process

    @property
    def wanted_workers(self) -> set[str]:
        """Addresses of the workers that the gateway should have."""
        with self._changed:
            return {url for url, sources in self._wanted.items() if sources > 0}

    def add_worker(self, url: str) -> None:
        """Makes the gateway send requests to a worker. A server may be listed both in a file and
        under a name, so the worker stays until it has been removed as often as added.
        """
        with self._changed:
            self._wanted[url] += 1
            self._changed.notify()

    def remove_worker(self, url: str) -> None:
        """Stops the gateway from sending requests to a worker, unless another source still has it."""
        with self._changed:
            self._wanted[url] -= 1
            self._changed.notify()

    def _watch_until_closed(self) -> None:
        with self._client:
            self._watch()

    def _watch(self) -> None:
        """Restarts the gateway when it ends, and keeps its workers up to date."""
        while not self._over:
            if self._process.wait(0) is not None and not self._over:
                self.failed = not self._answered
                if self.failed:
                    logger.error("the gateway ended before it answered; its output is above")
                    return
                logger.error("the gateway has ended and is restarted")
                self.known = set()
                self.healthy = set()
                self._registered_at = {}
                try:
                    self._process = self._start_process()
                # out of memory or descriptors: the next attempt may succeed
                except (BackendError, OSError) as error:
                    logger.error("the gateway can't be started: %s", error)
            try:
                self._sync_workers()
            except (httpx2.HTTPError, ValueError, KeyError) as error:
                logger.debug("the gateway does not answer: %s", error)
                self._sure = False
            with self._changed:
                self._changed.wait(_LOOK_S)

    def _sync_workers(self) -> None:
        wanted = self.wanted_workers
        if wanted == self.known == self.healthy and self._sure:
            return
        there = {each["url"]: each for each in self._request("GET", "/workers")["workers"]}
        self._answered = True
        for url, worker in there.items():
            if url not in wanted and worker.get("status") != "draining":
                self._request("DELETE", f"/workers/{worker['id']}")
                logger.info("the gateway sends no more requests to %s", url)
        now = time.monotonic()
        for url in wanted - there.keys():
            if now - self._registered_at.get(url, -_AGAIN_S) >= _AGAIN_S:
                key = {} if self._key is None else {"api_key": self._key}
                self._request("POST", "/workers", {"url": url, "runtime": "sglang", **key})
                self._registered_at[url] = now
        self.healthy = healthy = {
            url for url, worker in there.items() if worker.get("is_healthy") and url in wanted
        }
        self._registered_at = {
            url: when for url, when in self._registered_at.items() if url in wanted - healthy
        }
        self.known = {
            url for url in there if url in healthy or there[url].get("status") != "draining"
        }
        self._sure = True

    def _request(self, method: str, path: str, body: object = None) -> Any:
        response = self._client.request(method, self.url + path, json=body)
        if response.status_code not in (404, 409):  # the worker is gone already, or being added
            response.raise_for_status()
        return response.json()

    def terminate(self) -> None:
        """Stops the gateway from accepting requests, and lets it end when the open ones have ended."""
        self._over = True
        self._process.terminate()

    def wait(self, timeout_s: float) -> int | None:
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        self._over = True
        self._process.kill()


def run(content: dict[str, Json]) -> int:
    """Runs a gateway in this process."""
    set_process_name("sglang-gateway")
    launcher = importlib.import_module(f"{PACKAGES[content['package']]}.launch_router")
    known = {each.name for each in dataclasses.fields(launcher.RouterArgs)}
    settings = {name: value for name, value in content["settings"].items() if name in known}
    settings["control_plane_api_keys"] = [
        tuple(each) for each in settings["control_plane_api_keys"]
    ]
    launcher.launch_router(launcher.RouterArgs(**settings))
    return 0
