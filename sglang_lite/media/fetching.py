"""Fetches files from web addresses, within limits on size and time. Only public addresses are
allowed. Otherwise, anyone could use this machine to read addresses that only it can reach.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

from sglang_lite.errors import redact_address
from sglang_lite.protocol import CapabilityError, ParameterError, SglError

_REDIRECTS = 5
_CONNECT_S = 5.0  # for a host to accept a connection; until then nothing can stop a fetch
_CHUNK = 1 << 16
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "sglang-lite"}
_MOVED = (301, 302, 303, 307, 308)
# all others of IPv6 are private, or stand for addresses of IPv4
_UNICAST6 = ipaddress.ip_network("2000::/3")
# Networks that look global but lead to hosts that only this machine can reach: IPv6 tunnels, and
# the addresses where Azure's and Oracle's hosts answer their guests.
_INSIDE = tuple(
    map(ipaddress.ip_network, ("2002::/16", "2001::/32", "168.63.129.16/32", "192.0.0.0/24"))
)


@dataclass(frozen=True, slots=True)
class FetchBounds:
    """Bounds of a fetch.

    Attributes:
        domains: hosts that may be contacted; "*" for all.
        most_bytes: maximum total size of the fetched files.
        seconds: time for all of them, excluding name look-ups.
    """

    domains: tuple[str, ...] = ("*",)
    most_bytes: int = 64 * 2**20
    seconds: float = 30.0


class FetchEnd:
    """Deadline of a fetch. Another thread may end the fetch before the deadline.

    Args:
        seconds: time from now on.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._until = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._stopped = False
        self._handle: socket.socket | None = None

    def stop(self) -> None:
        """Ends the fetch. May be called on any thread."""
        with self._lock:
            self._stopped = True
            if self._handle is not None:
                _shut_down(self._handle)

    def seconds_left(self) -> float:
        """Returns the remaining seconds, or 0.0 if the fetch should end."""
        return 0.0 if self._stopped else max(self._until - time.monotonic(), 0.0)

    @contextmanager
    def close_at_deadline(self, handle: socket.socket) -> Iterator[None]:
        """Closes the connection at the deadline, even if the peer trickles data."""
        timer = threading.Timer(self.seconds_left(), _shut_down, (handle,))
        timer.daemon = True
        timer.start()
        with self._lock:
            self._handle = handle
            if self._stopped:
                _shut_down(handle)
        try:
            yield
        finally:
            with self._lock:
                self._handle = None
            timer.cancel()
            timer.join()


def fetch_files(
    urls: Iterable[str], bounds: FetchBounds, where: str, end: FetchEnd | None = None
) -> dict[str, bytes]:
    """Fetches the content of each address. Blocks. Does not use the environment's proxies.

    Args:
        where: parameter that contains the addresses, for errors.
        end: deadline of the whole fetch; None for the bounds' seconds from now on.

    Raises:
        CapabilityError: a host, or one that it redirects to, is not among the domains.
        ParameterError: an address is invalid or not public, or the file can't be read within the
            bounds.
    """
    found: dict[str, bytes] = {}
    left = bounds.most_bytes
    end = end or FetchEnd(bounds.seconds)
    for url in dict.fromkeys(urls):
        found[url] = _fetch_file(url, bounds, left, end, where)
        left -= len(found[url])
    return found


def _fetch_file(url: str, bounds: FetchBounds, most_bytes: int, end: FetchEnd, where: str) -> bytes:
    for _ in range(_REDIRECTS + 1):
        parts = _split_allowed_address(url, bounds, where)
        try:
            if not end.seconds_left():
                raise TimeoutError
            with _connect(parts, end, where) as connection:
                path = parts.path or "/"
                headers = {**_HEADERS, "Host": parts.netloc}
                connection.request(
                    "GET", f"{path}?{parts.query}" if parts.query else path, headers=headers
                )
                with connection.getresponse() as response:
                    if response.status not in _MOVED:
                        return _read_body(response, url, bounds, most_bytes, end, where)
                    url = urljoin(url, response.headers.get("Location", ""))
        except SglError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            if not end.seconds_left():
                raise _fetch_error(
                    url, f"has not been read within {end.seconds:g} seconds.", where
                ) from None
            raise _fetch_error(
                url, f"can't be fetched: {error or type(error).__name__}.", where
            ) from None
    raise _fetch_error(url, f"is behind more than {_REDIRECTS} redirects.", where)


def _split_allowed_address(url: str, bounds: FetchBounds, where: str) -> SplitResult:
    """Splits an address into its parts, after checking that it may be fetched."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts = SplitResult("", "", "", "", "")
        valid = False
    if not valid or not url.isascii() or not url.isprintable() or " " in url:
        raise _fetch_error(
            url, "is no address of a file.", where, "Write https://host/path, with %20 for a space."
        )
    if parts.username is not None or parts.password is not None:
        raise _fetch_error(url, "has a name or a password.", where, "Leave them out.")
    if "*" not in bounds.domains and parts.hostname not in bounds.domains:
        raise CapabilityError(
            f"{redact_address(url)!r:.200} is not of an allowed domain.",
            parameter=where,
            hint="Send the bytes as a data URL, or allow the domain: --allowed-media-domains.",
        )
    return parts


@contextmanager
def _connect(parts: SplitResult, end: FetchEnd, where: str) -> Iterator[http.client.HTTPConnection]:
    """Connects to the host of an address. Looks up the host's IP address only once, and requires it
    to be public.
    """
    secure = parts.scheme == "https"
    host = parts.hostname
    assert host is not None, "an address without a host is refused before"
    port = parts.port or (443 if secure else 80)
    raw = _open_public_socket(host, port, end, parts.geturl(), where)
    # a duplicate, which another thread can shut down safely
    with raw.dup() as handle, end.close_at_deadline(handle):
        connection = http.client.HTTPConnection(host, port)
        try:
            connection.sock = (
                ssl.create_default_context().wrap_socket(raw, server_hostname=host)
                if secure
                else raw
            )
            yield connection
        finally:
            connection.close()
            raw.close()


def _open_public_socket(host: str, port: int, end: FetchEnd, url: str, where: str) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(each[4][0]) for each in found]
    if not all(map(_is_public, addresses)):
        raise _fetch_error(
            url, "is not at a public address.", where, "Send the bytes as a data URL."
        )
    for i, address in enumerate(addresses):
        try:
            return socket.create_connection(
                (address, port), min(max(end.seconds_left(), 0.001), _CONNECT_S)
            )
        except OSError:
            if i == len(addresses) - 1:
                raise
    raise OSError("the name has no address")


def _is_public(text: str) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return _is_public(str(address.ipv4_mapped))
        if address not in _UNICAST6:
            return False
    return (
        address.is_global
        and not address.is_multicast
        and not any(address in network for network in _INSIDE)
    )


def _shut_down(handle: socket.socket) -> None:
    with suppress(OSError):  # it has ended by itself
        handle.shutdown(socket.SHUT_RDWR)


def _read_body(
    response: http.client.HTTPResponse,
    url: str,
    bounds: FetchBounds,
    most_bytes: int,
    end: FetchEnd,
    where: str,
) -> bytes:
    if response.status != 200:
        raise _fetch_error(url, f"answers {response.status}.", where)
    if (coding := response.headers.get("Content-Encoding", "identity")) != "identity":
        raise _fetch_error(url, f"is sent as {coding!r:.40}, which was not asked for.", where)
    content = bytearray()
    while chunk := response.read1(_CHUNK):
        content += chunk
        if len(content) > most_bytes:
            problem = f"is too large: {bounds.most_bytes:,} bytes are the limit, for all files of a request together."
            raise _fetch_error(url, problem, where, "Send smaller ones.")
    if not end.seconds_left():  # cut off; some answers look complete then
        raise TimeoutError
    if response.length:
        raise http.client.IncompleteRead(bytes(content), response.length)
    return bytes(content)


def _fetch_error(url: str, problem: str, where: str, hint: str = "") -> ParameterError:
    return ParameterError(where, f"{redact_address(url)!r:.200} {problem}", hint=hint)
