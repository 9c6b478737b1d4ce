"""Settings of a server, and of several behind a gateway."""

from __future__ import annotations

import ipaddress
import logging
import math
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from sglang_lite.protocol import ParameterError
from sglang_lite.text.reasoning import reasoning_format
from sglang_lite.text.tool_formats import tool_format

logger = logging.getLogger("sglang_lite.server")
# Settings that limit the use of a key, and their periods in seconds.
QUOTAS = {
    "max_requests_per_minute": 60.0,
    "max_tokens_per_minute": 60.0,
    "max_tokens_per_day": 86_400.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of a server.

    Attributes:
        host: address to listen on; with the default, only this machine can connect.
        port: port to listen on; 0 takes a free one.
        grpc_port: port of SGLang's gRPC service, over which gateways talk to servers; 0 takes a
            free one; None for no such service.
        served_model_name: name of the model in answers and requests; None for the engine's.
        api_key: key that requests must have, except for health, metrics and the OpenAPI document;
            several may be given. None requires no key.
        playground: whether `/` is a page that plays turns, for anyone who has the printed address;
            None means yes if only this machine can connect and there is no key.
        admin_api_key: key required, in place of `api_key`, by requests that change the server: the
            cache, weights, profiles. Without it, weights and profiles are changed only from this
            machine, while no key is required.
        allowed_host: name by which clients may address the server, besides "localhost" and IP
            addresses; several may be given. Other names are refused if only this machine can
            connect, or if a name is given.
        allowed_origin: origin of web pages that may use the server without a key, and read its
            answers, as "https://chat.lan"; several may be given.
        weights_root: folder in which weights and adapters that requests name must lie; None for any
            of this machine.
        weights_scheme: scheme of addresses that such requests may name in place of a folder, as
            "s3"; several may be given. Without any, no address is read.
        cache_salt_by_key: whether requests of different API keys never share cached prefixes, whose
            times would show one what another has asked.
        tool_call_parser: format in which the model writes tool calls, by SGLang's name; None finds
            it in the model's chat template.
        reasoning_parser: format in which the model writes reasoning, by SGLang's name; None finds
            it in the model's chat template.
        unknown_fields: "refuse" answers 400 to a field that no protocol has; "report" serves the
            request without it, and names it in a header and the log.
        incremental_streaming_output: whether chunks of a native stream have only what is new,
            instead of everything so far.
        stream_interval_ms: least time between two chunks of new text from the engine, in
            milliseconds; text in between is joined.
        max_body_mb: largest body of a request, in MiB.
        max_depth: deepest nesting of lists and objects in a body.
        body_timeout_s: seconds that the whole body of a request may take to arrive.
        max_head_kb: largest address and headers of a request, in KiB.
        max_header_lines: most header lines of a request.
        head_timeout_s: seconds that the address and headers of a request may take to arrive.
        unread_timeout_s: seconds after which a connection is closed if its client reads nothing of
            what it was sent. Linux only.
        max_connections: most connections open at the same time.
        max_connections_per_client: most connections of one client's address open at the same time.
        large_body_kb: size of a body, in KiB, above which another process parses, renders and
            tokenises it, so that other requests don't wait.
        body_processes: most processes for such bodies. Each starts when it is first needed, and has
            a tokenizer of its own.
        allowed_media_domains: host whose images requests may name by http and https addresses, as
            "pictures.org"; several may be given, "*" allows all. Without any, requests must contain
            their images. Hosts not at a public address are never contacted.
        media_url_max_file_size_mb: size of all files together that are fetched for a request, in
            MiB.
        media_url_max_total_mb: size of such files of all open requests; a request that would exceed
            it is refused.
        max_open: most requests open at the same time.
        max_open_per_key: most requests of one key open at the same time.
        max_requests_per_minute: most requests of one key in a minute; None for no limit. A quota
            refills evenly, and requests beyond it are refused until then.
        max_tokens_per_minute: most tokens of one key in a minute, of prompts and answers, counted
            when answers end; None for no limit.
        max_tokens_per_day: most tokens of one key in a day; None for no limit.
        program_max_tokens: most tokens that all generations of a program may produce.
        program_max_nodes: most nodes of a program, including the nodes of its branches.
        program_max_branches: most branches of a program.
        program_max_s: longest time that a program may take, in seconds.
        max_stored_responses: most responses of `/v1/responses` that are kept for later requests.
        max_stored_mb: largest total size of stored responses, in MiB.
        health_timeout_s: seconds that the engine's loop may be silent before `/health` answers 503.
        drain_s: seconds that open requests may continue after SIGTERM.
        log_level: lowest level of logged messages; each request logs one line at "info", without
            prompts or keys; polls of health, load and metrics at "debug".
        log_format: "json" logs a line of JSON for each message.
        ssl_certfile: file of the certificate for HTTPS, with those that signed it; None for HTTP.
        ssl_keyfile: file of its private key; None if the certificate's file has it.
        ssl_keyfile_password: password of the private key, if it has one.
        enable_trace: whether to send a span of each request and generation to a collector of
            OpenTelemetry.
        otlp_traces_endpoint: address of the collector, for OTLP over gRPC.
        metrics_names: project whose names the metrics of requests, tokens and times have in
            `/metrics`.
    """

    host: str = "127.0.0.1"
    port: int = 30000
    grpc_port: int | None = None
    served_model_name: str | None = None
    api_key: tuple[str, ...] = ()
    playground: bool | None = None
    admin_api_key: str | None = None
    allowed_host: tuple[str, ...] = ()
    allowed_origin: tuple[str, ...] = ()
    weights_root: str | None = None
    weights_scheme: tuple[str, ...] = ()
    cache_salt_by_key: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    unknown_fields: Literal["refuse", "report"] = "refuse"
    incremental_streaming_output: bool = False
    stream_interval_ms: float = 0.0
    max_body_mb: float = 32.0
    max_depth: int = 64
    body_timeout_s: float = 60.0
    max_head_kb: float = 64.0
    max_header_lines: int = 100
    head_timeout_s: float = 10.0
    unread_timeout_s: float = 300.0
    max_connections: int = 4096
    max_connections_per_client: int = 1024
    large_body_kb: float = 64.0
    body_processes: int = 2
    allowed_media_domains: tuple[str, ...] = ()
    media_url_max_file_size_mb: float = 64.0
    media_url_max_total_mb: float = 1024.0
    max_open: int = 4096
    max_open_per_key: int = 4096
    max_requests_per_minute: int | None = None
    max_tokens_per_minute: int | None = None
    max_tokens_per_day: int | None = None
    program_max_tokens: int = 1_000_000
    program_max_nodes: int = 10_000
    program_max_branches: int = 1_000
    program_max_s: float = 600.0
    max_stored_responses: int = 1000
    max_stored_mb: float = 64.0
    health_timeout_s: float = 20.0
    drain_s: float = 30.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    enable_trace: bool = False
    otlp_traces_endpoint: str = "localhost:4317"
    metrics_names: Literal["sglang", "vllm"] = "sglang"

    def __post_init__(self) -> None:
        self._check_ports()
        for name in (
            "max_body_mb",
            "max_depth",
            "body_timeout_s",
            "max_head_kb",
            "max_header_lines",
            "head_timeout_s",
            "unread_timeout_s",
            "max_connections",
            "max_connections_per_client",
            "max_open",
            "max_open_per_key",
            "program_max_tokens",
            "program_max_nodes",
            "program_max_branches",
            "program_max_s",
            "body_processes",
            "media_url_max_file_size_mb",
            "media_url_max_total_mb",
        ):
            if not 0 < getattr(self, name) < math.inf:
                raise ParameterError(name, f"{getattr(self, name)} is not a number greater than 0.")
        for name in QUOTAS:
            if (limit := getattr(self, name)) is not None and limit < 1:
                raise ParameterError(name, f"{limit} is not a number greater than 0.")
        for name, most in (
            ("stream_interval_ms", 60_000),
            ("drain_s", 86_400),
            ("health_timeout_s", 86_400),
            ("body_timeout_s", 86_400),
            ("head_timeout_s", 86_400),
            ("unread_timeout_s", 86_400),
            ("large_body_kb", 1024),
        ):
            if not 0 <= getattr(self, name) <= most:
                raise ParameterError(name, f"{getattr(self, name)} is not between 0 and {most:,}.")
        for key in (*self.api_key, *(() if self.admin_api_key is None else (self.admin_api_key,))):
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ParameterError(
                    "api_key",
                    "a key is empty, or has characters other than printable ASCII without spaces.",
                )
        if len({*self.api_key}) < len(self.api_key):
            raise ParameterError(
                "api_key", "a key is given twice.", hint="Give each client one of its own."
            )
        if self.admin_api_key in self.api_key:
            problem = "it is an API key, too, so that each client is the administrator."
            raise ParameterError(
                "admin_api_key", problem, hint="Give the administrator a key of their own."
            )
        for name in self.allowed_host:
            if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
                raise ParameterError(
                    "allowed_host",
                    f"{name[:200]!r} is not a host name.",
                    hint="Write box.lan, without a port.",
                )
        for name in self.allowed_media_domains:
            if not re.fullmatch(r"\*|[a-z0-9.-]+", name):
                problem = f"{name[:200]!r} is neither a host in lower case nor *."
                raise ParameterError(
                    "allowed_media_domains", problem, hint="Write pictures.example, without a port."
                )
        self._check_weight_sources()
        self._check_origins()
        if self.cache_salt_by_key and not self.api_key:
            raise ParameterError(
                "cache_salt_by_key", "there are no keys.", hint="Give --api-key, or leave it out."
            )
        if self.playground and not self.is_local:
            raise ParameterError(
                "playground",
                f"others can connect to {self.host}.",
                hint="Leave --playground or --host out.",
            )
        if self.ssl_certfile is not None:
            self._check_certificate(self.ssl_certfile)
        elif self.ssl_keyfile is not None or self.ssl_keyfile_password is not None:
            given = "ssl_keyfile_password" if self.ssl_keyfile is None else "ssl_keyfile"
            raise ParameterError(
                given, "a key needs a certificate.", hint="Give --ssl-certfile, too."
            )
        if self.tool_call_parser is not None:
            tool_format(self.tool_call_parser)
        if self.reasoning_parser is not None:
            reasoning_format(self.reasoning_parser)

    def _check_ports(self) -> None:
        if not 0 <= self.port < 65536:
            raise ParameterError("port", f"{self.port} is not between 0 and 65535.")
        if self.grpc_port is not None and not 0 <= self.grpc_port < 65536:
            raise ParameterError("grpc_port", f"{self.grpc_port} is not between 0 and 65535.")
        if self.grpc_port and self.grpc_port == self.port:
            raise ParameterError("grpc_port", f"{self.grpc_port} is that of HTTP, too.")
        if self.grpc_port is not None and self.ssl_certfile is not None:
            raise ParameterError(
                "grpc_port", "and ssl_certfile are both given, but gRPC is spoken without TLS."
            )

    def _check_origins(self) -> None:
        for name in self.allowed_origin:
            if not re.fullmatch(r"https?://[a-z0-9.-]+(:[0-9]+)?", name):
                raise ParameterError(
                    "allowed_origin",
                    f"{name[:200]!r} is not an origin.",
                    hint="Write https://chat.lan:8080, in lower case.",
                )

    def _check_weight_sources(self) -> None:
        if self.weights_root is not None and not Path(self.weights_root).expanduser().is_dir():
            raise ParameterError(
                "weights_root", f"{self.weights_root!r} is no folder.", hint="Give one that exists."
            )
        for name in self.weights_scheme:
            if not re.fullmatch(r"[a-z][a-z0-9+.-]*", name) or name in ("file", "local"):
                problem = f"{name[:200]!r} is no scheme of addresses elsewhere."
                raise ParameterError(
                    "weights_scheme", problem, hint="Write s3, for example; folders need none."
                )

    def _check_certificate(self, certificate: str) -> None:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(
                certificate, self.ssl_keyfile, lambda: self.ssl_keyfile_password or ""
            )
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ParameterError(
                "ssl_certfile",
                f"{certificate} and its key can't be used: {' '.join(str(error).split())}.",
                hint="Give PEM files of a certificate and of its private key, and the key's password if it has one.",
            ) from error

    @property
    def scheme(self) -> str:
        """Scheme of the server's address."""
        return "http" if self.ssl_certfile is None else "https"

    @property
    def has_playground(self) -> bool:
        """True if `/` is the playground's page."""
        keys = self.api_key or self.admin_api_key is not None
        return self.is_local and not keys if self.playground is None else self.playground

    @property
    def is_local(self) -> bool:
        """True if only this machine can connect."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a host name
            return False


def warn_if_exposed(settings: ServerSettings) -> None:
    """Logs a warning if other machines may reach the server and no key is required."""
    if not settings.is_local and not settings.api_key:
        logger.warning(
            "Anyone who can reach %s can use the server, as no key is required. Set --api-key, or --host 127.0.0.1.",
            settings.host,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """Settings of several servers behind a gateway.

    Attributes:
        replicas: number of servers of the model to start behind a gateway, one for each GPU; 0,
            without `workers`, starts a single server without gateway.
        workers: addresses of further servers behind the gateway, for example on other machines:
            separated by commas, or in several flags. "dns+http://name:port" stands for all
            addresses of a name, "file:path" for the lines of a file; both are looked up again every
            five seconds.
        policy: rule by which the gateway chooses a server for a request: "cache_aware", the
            default, prefers one that has seen the prefix.
        gateway: package of the gateway; "auto" takes the first that is installed.
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
                "policy",
                "needs a gateway, and there is none without replicas or workers.",
                hint="The order of an engine's requests is schedule_policy.",
            )
        for source in self.workers:
            if not source.startswith("file:"):
                check_worker(source.removeprefix("dns+"), http_only=source.startswith("dns+"))


def check_worker(url: str, *, http_only: bool = False) -> None:
    """Raises ParameterError if a text is not the address of a server."""
    schemes = ("http",) if http_only else ("http", "https")
    try:
        parts = urlsplit(url)
        fine = (
            parts.scheme in schemes and parts.hostname and parts.port != 0 and not url.endswith("/")
        )
        if http_only:  # only its name and port are used
            fine = fine and url == f"http://{parts.netloc}" and parts.username is None
    except ValueError:  # an invalid port
        fine = False
    if not fine:
        raise ParameterError(
            "workers",
            f"{url[:200]!r} is not an address.",
            hint="Write http://10.0.0.2:30000, dns+http://name:30000 or file:workers.txt, for example.",
        )
