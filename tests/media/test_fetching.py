"""Files at addresses are fetched from public hosts alone, up to a size and a time; all else is one
named error.
"""

from __future__ import annotations

import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from sglang_lite.media.fetching import FetchBounds, FetchEnd, fetch_files
from sglang_lite.protocol import CapabilityError, ParameterError
from tests.web import sends, web

PUBLIC = {"a.example": "93.184.215.14", "b.example": "2606:2800:21f::1"}
PRIVATE = {
    "loopback": "127.0.0.1", "here": "::1", "lan": "192.168.1.4", "metadata": "169.254.169.254", "none": "0.0.0.0",
    "mapped": "::ffff:10.0.0.1", "translated": "64:ff9b::a00:1", "tunnel": "2002:a00:1::1", "group": "224.0.0.1",
    "carrier": "100.64.0.1", "local": "fe80::1%eth0", "site": "fec0::1", "compatible": "::7f00:1",
    "siit": "::ffff:0:7f00:1", "segments": "5f00::1", "azure": "168.63.129.16", "azure6": "::ffff:168.63.129.16",
    "oracle": "192.0.0.192",
}  # fmt: skip


def _drips(handler: BaseHTTPRequestHandler) -> None:
    """Sends a header's bytes until the other side cuts the connection."""
    handler.wfile.write(b"HTTP/1.0 200 OK\r\nX: ")
    while not _cut(handler):
        handler.wfile.write(b"x")


def _cut(handler: BaseHTTPRequestHandler) -> bool:
    handler.connection.settimeout(0.02)
    try:
        return handler.connection.recv(1) == b""
    except TimeoutError:
        return False


def _endless(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
    while True:
        handler.wfile.write(b"x" * 4096)


PAGES = {
    "/file?x=1": sends(b"content"), "/again": sends(b"content"), "/moved": sends(b"", 302, location="/file?x=1"),
    "/other": sends(b"", 301, location="http://b.example/file?x=1"), "/round": sends(b"", 302, location="/round"),
    "/nowhere": sends(b"", 302), "/inside": sends(b"", 307, location="http://lan/file?x=1"),
    "/local": sends(b"", 302, location="file:///etc/passwd"), "/large": sends(b"x" * 2000),
    "/short": sends(b"abc", content_length="9"), "/packed": sends(b"abc", content_encoding="gzip"),
    "/drips": _drips, "/endless": _endless,
}  # fmt: skip


def _fetch(*paths: str, **bounds: Any) -> dict[str, bytes]:
    urls = [path if "://" in path else f"http://a.example{path}" for path in paths]
    return fetch_files(urls, FetchBounds(**{"most_bytes": 1000, **bounds}), "image")


def test_files_are_read_once_each_also_behind_redirects() -> None:
    with web(PUBLIC, PAGES) as asked:
        found = _fetch(
            "/file?x=1", "/file?x=1", "/moved", "/other", "http://b.example:8080/again#part"
        )
    assert set(found.values()) == {b"content"}
    assert asked == ["/file?x=1", "/moved", "/file?x=1", "/other", "/file?x=1", "/again"]


@pytest.mark.parametrize("host", PRIVATE)
def test_hosts_that_are_not_public_are_not_asked(host: str) -> None:
    with (
        web(PRIVATE, PAGES) as asked,
        pytest.raises(ParameterError, match="not at a public address"),
    ):
        _fetch(f"http://{host}/again")
    assert asked == []


@pytest.mark.parametrize("path", ["/again", "/moved"])
def test_a_name_that_leads_elsewhere_when_it_is_looked_up_again_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """DNS rebinding: a name has a public address for who checks it, and one inside for who connects
    to it.
    """
    lookups: list[str] = []

    with web({**PUBLIC, "rebound.example": "192.168.1.4"}, PAGES) as asked:
        look_up, connect = socket.getaddrinfo, socket.create_connection
        connected: list[str] = []

        def rebinds(host: Any, port: Any, *args: Any, **more: Any) -> Any:
            if host != "rebound.example":
                return look_up(host, port, *args, **more)
            lookups.append(host)
            return look_up("a.example" if len(lookups) == 1 else host, port, *args, **more)

        def connects(address: tuple[str, int], *args: Any, **more: Any) -> socket.socket:
            connected.append(address[0])
            return connect(address, *args, **more)

        monkeypatch.setattr(socket, "getaddrinfo", rebinds)
        monkeypatch.setattr(socket, "create_connection", connects)
        if path == "/again":
            assert _fetch(f"http://rebound.example{path}") == {
                f"http://rebound.example{path}": b"content"
            }
        else:  # the redirect is to the same host, which is looked up and checked again
            with pytest.raises(ParameterError, match="not at a public address"):
                _fetch(f"http://rebound.example{path}")
    assert asked == [path]
    assert connected == [PUBLIC["a.example"]]


def test_an_address_in_numbers_is_no_way_around() -> None:
    for url in ("http://127.0.0.1/", "http://[::1]/", "http://2130706433/", "http://0x7f.1/"):
        with pytest.raises(ParameterError, match="not at a public address"):
            _fetch(url)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/inside", "lan/file' is not at a public address"), ("/local", "is no address of a file"),
        ("/round", "more than 5 redirects"), ("/nowhere", "more than 5 redirects"), ("/missing", "answers 404"),
        ("/large", "too large: 1,000 bytes are the limit"), ("/endless", "too large"), ("/packed", "sent as 'gzip'"),
        ("/short", "can't be fetched"), ("http:///x", "is no address"), ("http://a.example:0/", "is no address"),
        ("http://a.example:99999/", "is no address"), ("http://a.example/a b", "is no address"),
        ("http://me:pw@a.example/", "has a name or a password"), ("ftp://a.example/", "is no address"),
        ("http://[::1/", "is no address"), ("https://a.example/again", "can't be fetched"),
    ],
)  # fmt: skip
def test_what_cannot_be_fetched_is_a_named_error(path: str, why: str) -> None:
    with web({**PUBLIC, "lan": "10.0.0.1"}, PAGES), pytest.raises(ParameterError, match=why):
        _fetch(path)


def test_all_files_have_the_size_together() -> None:
    with (
        web(PUBLIC, PAGES),
        pytest.raises(ParameterError, match="for all files of a request together"),
    ):
        _fetch("/file?x=1", "/again", most_bytes=13)


def test_a_slow_answer_is_cut_at_the_end_of_the_time() -> None:
    before = threading.active_count()
    with (
        web(PUBLIC, PAGES),
        pytest.raises(ParameterError, match=r"has not been read within 0\.2 seconds"),
    ):
        _fetch("/drips", seconds=0.2)
    assert threading.active_count() <= before + 1  # the page's own


def test_nothing_is_asked_after_the_end() -> None:
    late, stopped = FetchEnd(0.0), FetchEnd(30.0)
    stopped.stop()
    with web(PUBLIC, PAGES) as asked:
        for end in (late, stopped):
            with pytest.raises(ParameterError, match="has not been read within"):
                fetch_files(["http://a.example/again"], FetchBounds(), "image", end)
    assert asked == []


def test_only_hosts_that_are_allowed_are_asked_also_behind_redirects() -> None:
    with web(PUBLIC, PAGES) as asked:
        assert _fetch("/again", domains=("a.example",))
        with pytest.raises(
            CapabilityError, match=r"'http://b\.example/file' is not of an allowed domain"
        ):
            _fetch("/other", domains=("a.example",))
    assert asked == ["/again", "/other"]


def test_a_certificate_is_checked_for_the_name_and_not_for_the_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = Path(__file__).parents[1] / "server" / "data"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files / "localhost.pem", files / "localhost.key")
    monkeypatch.setenv("SSL_CERT_FILE", str(files / "localhost.pem"))
    with web({"localhost": "93.184.215.14", **PUBLIC}, PAGES, context):
        assert _fetch("https://localhost/again") == {"https://localhost/again": b"content"}
        with pytest.raises(ParameterError, match=r"can't be fetched: .*certificate"):
            _fetch("https://a.example/again")


@pytest.mark.parametrize(
    "path", ["/gone?key=secret", "/gone#secret", "http://me:secret@a.example/again"]
)
def test_an_error_hides_what_may_be_secret_in_an_address(path: str) -> None:
    with web(PUBLIC, PAGES), pytest.raises(ParameterError) as failed:
        _fetch(path)
    assert "secret" not in str(failed.value)
