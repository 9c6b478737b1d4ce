"""Files at addresses of the web, fetched within bounds: up to a size and a time, and from public addresses alone, so
that nobody reads through this machine what only it can reach."""

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

from sglang_lite.protocol import CapabilityError, ParameterError, SglError

_REDIRECTS = 5
_CHUNK = 1 << 16
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "sglang-lite"}
_MOVED = (301, 302, 303, 307, 308)
_UNICAST6 = ipaddress.ip_network("2000::/3")  # all others of IPv6 are private, or stand for addresses of IPv4
# Those that are global by their numbers and yet lead to what only this machine reaches: tunnels of IPv6, and where
# Azure's and Oracle's hosts answer their guests.
_INSIDE = tuple(map(ipaddress.ip_network, ("2002::/16", "2001::/32", "168.63.129.16/32", "192.0.0.0/24")))


@dataclass(frozen=True, slots=True)
class FetchBounds:
    """Bounds of what is fetched.

    Attributes:
        domains: hosts that may be asked; "*" for all.
        most_bytes: size of all files that are fetched together.
        seconds: time for all of them, without the look-up of names.
    """

    domains: tuple[str, ...] = ("*",)
    most_bytes: int = 64 * 2**20
    seconds: float = 30.0


def fetch(urls: Iterable[str], bounds: FetchBounds, where: str) -> dict[str, bytes]:
    """Content of each address. Blocks; the environment's proxies are not used.

    Args:
        where: parameter that has the addresses, for errors.

    Raises:
        CapabilityError: a host, or one that it redirects to, is not among the domains.
        ParameterError: an address is invalid or not public, or the file can't be read within the bounds.
    """
    found: dict[str, bytes] = {}
    left, end = bounds.most_bytes, time.monotonic() + bounds.seconds
    for url in dict.fromkeys(urls):
        found[url] = _content(url, bounds, left, end, where)
        left -= len(found[url])
    return found


def _content(url: str, bounds: FetchBounds, most_bytes: int, end: float, where: str) -> bytes:
    for _ in range(_REDIRECTS + 1):
        parts = _parts(url, bounds, where)
        try:
            with _connected(parts, end, where) as connection:
                path, headers = parts.path or "/", {**_HEADERS, "Host": parts.netloc}
                connection.request("GET", f"{path}?{parts.query}" if parts.query else path, headers=headers)
                with connection.getresponse() as response:
                    if response.status not in _MOVED:
                        return _body(response, url, bounds, most_bytes, end, where)
                    url = urljoin(url, response.headers.get("Location", ""))
        except SglError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            if time.monotonic() >= end:
                raise _error(url, f"has not been read within {bounds.seconds:g} seconds.", where) from None
            raise _error(url, f"can't be fetched: {error or type(error).__name__}.", where) from None
    raise _error(url, f"is behind more than {_REDIRECTS} redirects.", where)


def _parts(url: str, bounds: FetchBounds, where: str) -> SplitResult:
    """Parts of an address that may be fetched."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, valid = SplitResult("", "", "", "", ""), False
    if not valid or not url.isascii() or not url.isprintable() or " " in url:
        raise _error(url, "is no address of a file.", where, "Write https://host/path, with %20 for a space.")
    if parts.username is not None or parts.password is not None:
        raise _error(url, "has a name or a password.", where, "Leave them out.")
    if "*" not in bounds.domains and parts.hostname not in bounds.domains:
        raise CapabilityError(
            f"{_shown(url)} is not of an allowed domain.", parameter=where,
            hint="Send the bytes as a data URL, or allow the domain: --allowed-media-domains.",
        )  # fmt: skip
    return parts


@contextmanager
def _connected(parts: SplitResult, end: float, where: str) -> Iterator[http.client.HTTPConnection]:
    """Connection to the host of an address, at an address that was looked up once and is public. It is cut at the end
    of the time, however slowly the other side sends."""
    secure, host = parts.scheme == "https", parts.hostname
    assert host is not None, "an address without a host is refused before"
    port = parts.port or (443 if secure else 80)
    raw = _socket(host, port, end, parts.geturl(), where)
    with raw.dup() as handle:  # the same connection, which another thread can end safely
        timer = threading.Timer(max(end - time.monotonic(), 0), _cut, (handle,))
        timer.daemon = True
        timer.start()
        connection = http.client.HTTPConnection(host, port)
        try:
            connection.sock = ssl.create_default_context().wrap_socket(raw, server_hostname=host) if secure else raw
            yield connection
        finally:
            timer.cancel()
            timer.join()
            connection.close()
            raw.close()


def _socket(host: str, port: int, end: float, url: str, where: str) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(each[4][0]) for each in found]
    if not all(map(_is_public, addresses)):
        raise _error(url, "is not at a public address.", where, "Send the bytes as a data URL.")
    for i, address in enumerate(addresses):
        try:
            return socket.create_connection((address, port), max(end - time.monotonic(), 0.001))
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
    return address.is_global and not address.is_multicast and not any(address in network for network in _INSIDE)


def _cut(handle: socket.socket) -> None:
    with suppress(OSError):  # it has ended by itself
        handle.shutdown(socket.SHUT_RDWR)


def _body(
    response: http.client.HTTPResponse, url: str, bounds: FetchBounds, most_bytes: int, end: float, where: str
) -> bytes:
    if response.status != 200:
        raise _error(url, f"answers {response.status}.", where)
    if (coding := response.headers.get("Content-Encoding", "identity")) != "identity":
        raise _error(url, f"is sent as {coding!r:.40}, which was not asked for.", where)
    content = bytearray()
    while chunk := response.read1(_CHUNK):
        content += chunk
        if len(content) > most_bytes:
            problem = f"is too large: {bounds.most_bytes:,} bytes are the limit, for all files of a request together."
            raise _error(url, problem, where, "Send smaller ones.")
    if time.monotonic() >= end:  # cut, which some answers can't be told from their end
        raise TimeoutError
    if response.length:
        raise http.client.IncompleteRead(bytes(content), response.length)
    return bytes(content)


def _shown(url: str) -> str:
    """An address for messages, without what may be secret in it."""
    return repr(url.partition("?")[0].partition("#")[0][:200])


def _error(url: str, problem: str, where: str, hint: str = "") -> ParameterError:
    return ParameterError(where, f"{_shown(url)} {problem}", hint=hint)
