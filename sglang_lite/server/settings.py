"""Settings of a server, and of several."""

from __future__ import annotations

import ipaddress
import logging
from dataclasses import dataclass
from typing import Literal

from sglang_lite.protocol import ParameterError
from sglang_lite.text.reasoning import format_of
from sglang_lite.text.tool_formats import tool_format

logger = logging.getLogger("sglang_lite.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """
    Attributes:
        host: address to listen on; every other machine is shut out by the default.
        port: to listen on; 0 takes a free one.
        served_model_name: the model's name in answers and requests; None for the engine's.
        api_key: demanded of every request but those for health; several may be given. None demands none.
        admin_api_key: demanded instead of those for what changes the server: the cache, weights, profiles.
        tool_call_parser: the format in which the model writes calls of tools, by SGLang's name; None finds it in the
            model's chat template.
        reasoning_parser: the same of its reasoning.
        unknown_fields: "refuse" answers 400 to a field that no protocol has; "report" serves the request without it,
            and names it in a header and the log.
        incremental_streaming_output: pieces of a native stream have what is new, not all so far.
        stream_interval_ms: least time between two times that the engine tells of new text; what comes meanwhile is
            joined.
        max_body_mb: most of a request's body.
        max_depth: of lists and objects in a body, one in another.
        max_open: requests open at the same time.
        max_open_per_key: and of one key.
        program_max_tokens: tokens that all generations of a program may make.
        program_max_nodes: nodes of a program, those of its branches included.
        program_max_branches: of a program.
        program_max_s: how long a program may take.
        max_stored_responses: responses of `/v1/responses` that can be asked for again.
        max_stored_mb: of those, in all.
        health_timeout_s: how long the engine's loop may give no sign before `/health` is 503.
        drain_s: how long requests that are open may run on after SIGTERM.
        log_level: of the server's messages: a line a request, without prompts or keys, is "info".
    """

    host: str = "127.0.0.1"
    port: int = 30000
    served_model_name: str | None = None
    api_key: tuple[str, ...] = ()
    admin_api_key: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    unknown_fields: Literal["refuse", "report"] = "refuse"
    incremental_streaming_output: bool = False
    stream_interval_ms: float = 0.0
    max_body_mb: float = 32.0
    max_depth: int = 64
    max_open: int = 4096
    max_open_per_key: int = 4096
    program_max_tokens: int = 1_000_000
    program_max_nodes: int = 10_000
    program_max_branches: int = 1_000
    program_max_s: float = 600.0
    max_stored_responses: int = 1000
    max_stored_mb: float = 64.0
    health_timeout_s: float = 20.0
    drain_s: float = 30.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ParameterError("port", f"{self.port} is not between 0 and 65535.")
        for name in (
            "max_body_mb", "max_depth", "max_open", "max_open_per_key", "program_max_tokens", "program_max_nodes",
            "program_max_branches", "program_max_s",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ParameterError(name, f"{getattr(self, name)} is not greater than 0.")
        for name, most in (("stream_interval_ms", 60_000), ("drain_s", 86_400), ("health_timeout_s", 86_400)):
            if not 0 <= getattr(self, name) <= most:
                raise ParameterError(name, f"{getattr(self, name)} is not between 0 and {most:,}.")
        for key in (*self.api_key, *(() if self.admin_api_key is None else (self.admin_api_key,))):
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ParameterError(
                    "api_key", "a key is empty, or has characters other than printable ASCII without spaces."
                )
        if self.tool_call_parser is not None:
            tool_format(self.tool_call_parser)
        if self.reasoning_parser is not None:
            format_of(self.reasoning_parser)


def warn_of_strangers(settings: ServerSettings) -> None:
    """Logs a warning where other machines may reach the server, and no key is demanded of them."""
    try:
        alone = settings.host == "localhost" or ipaddress.ip_address(settings.host).is_loopback
    except ValueError:  # a name
        alone = False
    if not alone and not settings.api_key:
        logger.warning(
            "Anyone who can reach %s can use the server, as no key is required. Set --api-key, or --host 127.0.0.1.",
            settings.host,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """
    Attributes:
        replicas: servers of the model to start behind a gateway, one a GPU; 0 for none: without `workers`, one server
            answers by itself.
        workers: addresses of servers, of other machines say, that are to be behind the gateway, too: separated by
            commas, or said several times.
        policy: which server the gateway gives a request to: "cache_aware", the default, takes one that has seen its
            prefix.
        gateway: the package that is the gateway; "auto" takes the first that is installed.
    """

    replicas: int = 0
    workers: tuple[str, ...] = ()
    policy: Literal["cache_aware", "power_of_two", "round_robin", "random"] | None = None
    gateway: Literal["auto", "smg", "sglang-router"] = "auto"

    def __post_init__(self) -> None:
        if not 0 <= self.replicas <= 1024:
            raise ParameterError("replicas", f"{self.replicas} is not between 0 and 1,024.")
        if self.policy is not None and not self.replicas and not self.workers:
            raise ParameterError(
                "policy", "needs a gateway, and there is none without replicas or workers.",
                hint="The order of an engine's requests is schedule_policy.",
            )  # fmt: skip
        for url in self.workers:
            if not url.startswith(("http://", "https://")) or url.endswith("/"):
                raise ParameterError(
                    "workers", f"{url[:200]!r} is not an address.", hint="Write http://10.0.0.2:30000, for example."
                )
